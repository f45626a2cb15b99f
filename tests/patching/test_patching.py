"""The ledger undoes each patch that it installed; and the search for names that hold an object."""

from __future__ import annotations

import gc
import importlib.util
import sys
import types
import weakref

import pytest
import wrapt
from hypothesis import given
from hypothesis import strategies as st

from ampatch.ledger import PatchLedger, bindings, loaded_modules


class Parent:
    inherited = "of the parent"
    overridden = "of the parent"

    @staticmethod
    def static() -> str:
        return "static"


class Child(Parent):
    overridden = "of the child"
    own = "of the child"

    @classmethod
    def of_class(cls) -> type:
        return cls


NAMES = ("inherited", "overridden", "own", "static", "of_class", "absent")


def make_owners() -> list[object]:
    """A module, a class that inherits some of the names, and an instance that has one of its own."""
    module = types.ModuleType("owner")
    module.own = "of the module"
    child = type("Child", (Child,), {"own": "of the class", "static": staticmethod(len)})
    instance = child()
    instance.own = "of the instance"
    return [module, child, instance]


def held(owners: list[object]) -> list[dict[str, object]]:
    return [dict(vars(owner)) for owner in owners]


def same(left: list[dict[str, object]], right: list[dict[str, object]]) -> bool:
    """Whether the same names hold the same objects."""
    return all(a.keys() == b.keys() and all(a[name] is b[name] for name in a) for a, b in zip(left, right, strict=True))


# An owner, a name, and what is put there: plain values, functions, and what binds.
SETS = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.sampled_from(NAMES),
        st.sampled_from(["text", 1, None, len, staticmethod(len), classmethod(len)]),
    ),
    max_size=12,
)


class TestUndo:
    @given(SETS)
    def test_undo_restores_every_owner(self, sets):
        owners = make_owners()
        before = held(owners)
        ledger = PatchLedger()
        for index, name, value in sets:
            ledger.set(owners[index], name, value)
            assert vars(owners[index])[name] is value
        assert ledger.undo() == []
        assert same(held(owners), before)
        assert ledger.patches == ()

    @given(SETS, SETS)
    def test_undo_to_a_mark_leaves_what_was_installed_before_it(self, first, second):
        owners = make_owners()
        ledger = PatchLedger()
        for index, name, value in first:
            ledger.set(owners[index], name, value)
        at_the_mark, mark = held(owners), ledger.mark()
        for index, name, value in second:
            ledger.set(owners[index], name, value)
        ledger.undo(since=mark)
        assert same(held(owners), at_the_mark)
        assert len(ledger.patches) == len(first)

    def test_undo_calls_callbacks_newest_first(self):
        called = []
        ledger = PatchLedger()
        for number in range(3):
            ledger.on_undo(lambda number=number: called.append(number))
        ledger.undo()
        assert called == [2, 1, 0]


class TestSet:
    @pytest.mark.parametrize("owner", [str, object(), 3], ids=["builtin-class", "no-dict", "number"])
    def test_an_owner_that_refuses_leaves_nothing_to_undo(self, owner):
        ledger = PatchLedger()
        with pytest.raises(TypeError):
            ledger.set(owner, "upper", len)
        assert ledger.patches == ()
        assert ledger.undo() == []

    def test_an_owner_that_forwards_its_attributes_is_refused(self):
        class Around:
            inside = types.SimpleNamespace(name="before")

            def __getattr__(self, name: str) -> object:
                return getattr(self.inside, name)

            def __setattr__(self, name: str, value: object) -> None:
                setattr(self.inside, name, value)

        owner, ledger = Around(), PatchLedger()
        with pytest.raises(TypeError, match="does not keep the attribute 'name' itself"):
            ledger.set(owner, "name", "after")
        assert owner.name == "before"
        assert ledger.patches == ()


class TestPatchesOfOthers:
    def test_patches_of_others_on_top_are_reported_and_stay(self):
        module, child, instance = make_owners()
        ledger = PatchLedger()
        for owner in (module, child, instance):
            ledger.set(owner, "own", len)
        module.own = theirs = repr
        del instance.own
        assert ledger.undo() == [(instance, "own"), (module, "own")]
        assert module.own is theirs
        assert child.own == "of the class"
        assert "own" not in vars(instance)

    @pytest.mark.parametrize("restored", ["ours", "original"])
    def test_patches_of_others_that_are_gone_are_not_reported(self, restored):
        module, *_ = make_owners()
        original, ledger = module.own, PatchLedger()
        ledger.set(module, "own", len)
        module.own = repr
        module.own = len if restored == "ours" else original
        assert ledger.undo() == []
        assert module.own is original


class TestDeadOwners:
    def test_dead_owners_are_forgotten(self):
        _, child, instance = make_owners()
        ledger = PatchLedger()
        ledger.set(instance, "own", len)
        ledger.set(child, "own", len)
        del instance
        gc.collect()
        assert [patch.owner() for patch in ledger.patches] == [child]
        assert ledger.undo() == []

    def test_owners_are_not_kept_alive_by_their_bound_methods(self):
        *_, instance = make_owners()
        ledger = PatchLedger()
        ledger.set(instance, "own", types.MethodType(len, instance))
        died = weakref.ref(instance)
        del instance
        gc.collect()
        assert died() is None

    def test_callbacks_of_dead_owners_are_forgotten(self):
        called = []
        *_, instance = make_owners()
        ledger = PatchLedger()
        ledger.on_undo(lambda: called.append("of the dead"), instance)
        ledger.on_undo(lambda: called.append("of nobody"))
        del instance
        gc.collect()
        ledger.undo()
        assert called == ["of nobody"]

    def test_many_dead_owners_leave_no_steps(self):
        ledger = PatchLedger()
        for _ in range(1000):
            module, _, instance = make_owners()
            ledger.set(module, "own", len)
            ledger.on_undo(len, instance)
        del module, instance
        gc.collect()
        assert not ledger._steps


class TestBindings:
    def test_an_object_is_found_under_any_name_by_identity(self):
        wanted = {"a": 1}
        module = types.ModuleType("user")
        assert bindings([module], {id(wanted): wanted}) == []
        module.equal, module.unhashable = {"a": 1}, []
        module.first = module.second = wanted
        assert bindings([module], {id(wanted): wanted}) == [(module, "first", wanted), (module, "second", wanted)]

    def test_the_search_runs_no_property(self):
        class Model:
            @property
            def function(self) -> object:
                raise AssertionError("a property ran")

            def __getattr__(self, name: str) -> object:
                raise AssertionError("an attribute was made up")

        assert bindings([Model()], {id(len): len}) == []

    def test_the_search_loads_no_lazy_module(self, tmp_path, monkeypatch):
        (tmp_path / "lazy_neighbour.py").write_text("raise AssertionError('it was loaded')\n")
        monkeypatch.syspath_prepend(tmp_path)
        spec = importlib.util.find_spec("lazy_neighbour")
        spec.loader = importlib.util.LazyLoader(spec.loader)
        lazy = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(lazy)
        monkeypatch.setitem(sys.modules, "lazy_neighbour", lazy)
        assert lazy in loaded_modules()
        assert bindings(loaded_modules(), {id(len): len}) is not None

    def test_the_search_wakes_no_lazy_proxy(self, monkeypatch):
        def wake() -> types.ModuleType:
            raise AssertionError("the proxy was woken")

        monkeypatch.setitem(sys.modules, "proxied_neighbour", wrapt.LazyObjectProxy(wake))
        assert all(type(module) is not wrapt.LazyObjectProxy for module in loaded_modules())


class TestLoadedModules:
    def test_loaded_modules_leave_out_the_packages_named(self):
        names = {module.__name__ for module in loaded_modules("torch")}
        assert __name__ in names
        assert not any(name == "torch" or name.startswith("torch.") for name in names)
