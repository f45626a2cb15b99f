"""Every name under which code can reach a listed function is patched while casts are on, and restored."""

from __future__ import annotations

import functools
import importlib
import pickle
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from helpers import HALF_DTYPES, casts_on
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.nn.functional import linear as dense

from ampatch import amp
from ampatch.cast_lists import lists
from ampatch.cast_lists.paths import find_owner
from ampatch.errors import AmpWarning
from ampatch.patching import function_patches, function_places
from ampatch.runtime import runtime

COLLECTIVES = ("all_reduce", "broadcast", "reduce", "recv", "irecv")
RULES = tuple(lists.shipped().for_half(torch.float16))
NAMESPACES = sorted({path.namespace for path in RULES})


def wrapped(function: object) -> bool:
    """Whether what stands there calls something else."""
    return hasattr(function, "__wrapped__")


def x() -> Tensor:
    return torch.randn(3, 4)


@pytest.fixture
def neighbour():
    """A module that is loaded, and none of torch's."""
    module = types.ModuleType("neighbour")
    sys.modules["neighbour"] = module
    yield module
    del sys.modules["neighbour"]


class TestNamespaces:
    @pytest.mark.parametrize("namespace", NAMESPACES)
    def test_every_listed_function_is_wrapped_while_casts_are_on(self, namespace):
        owner = find_owner(namespace)
        originals = {path.name: getattr(owner, path.name) for path in RULES if path.namespace == namespace}
        with casts_on(torch.float16):
            for name, original in originals.items():
                assert getattr(owner, name) is not original
                assert getattr(owner, name).__wrapped__ is original
                assert getattr(owner, name).__name__ == original.__name__
                assert getattr(owner, name).__doc__ == original.__doc__
        assert all(getattr(owner, name) is original for name, original in originals.items())

    def test_nothing_else_of_torch_changes(self):
        """What is in no list stays, bar what autocast lists, and places that ask about autocast, patches or hooks."""

        def held() -> dict[tuple[str, str], object]:
            owners = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "torch"}
            owners |= {"torch.Tensor": torch.Tensor, "torch.nn.RNNBase": nn.RNNBase}
            return {(name, key): value for name, owner in owners.items() for key, value in vars(owner).items()}

        with casts_on():  # imports what it needs
            pass
        before = held()
        with casts_on(torch.float16):
            during = held()
        changed = {".".join(key) for key, value in during.items() if before.get(key) is not value}
        second_names = {f"torch.functional.{path.name}" for path in RULES if path.namespace == "torch"}
        second_names |= {f"torch._C._nn.{path.name}" for path in RULES if path.namespace == "torch.nn.functional"}
        of_autocast = {str(path) for path in lists.peer("torch_autocast_cpu").for_half(torch.float16)}
        assert changed - {str(path) for path in RULES} - second_names - of_autocast == {
            "torch.nn.RNNBase.check_input",
            "torch.Tensor.data",
            "torch.utils.swap_tensors",
            "torch.autograd._engine_run_backward",
            "torch.nn.utils.clip_grad._get_total_norm",
            "torch.nn.utils.clip_grad._group_tensors_by_device_and_dtype",
            *(f"torch.distributed.{name}" for name in COLLECTIVES),
            *(f"torch.distributed.distributed_c10d.{name}" for name in COLLECTIVES),
            "torch.backends.mha._is_fastpath_enabled",
            "torch._functorch.aot_autograd.should_use_local_autograd_cache",
            "torch._functorch.aot_autograd.should_use_remote_autograd_cache",
            "torch.nn.parallel.parallel_apply",
            "torch.nn.parallel.parallel_apply.parallel_apply",
            "torch.nn.parallel.data_parallel.parallel_apply",
            "torch.jit._builtins._find_builtin",
            "torch._jit_internal._try_get_dispatched_fn",
            "torch.jit._recursive.create_script_module",
            "torch.cuda.make_graphed_callables",
            "torch.cuda.graphs.make_graphed_callables",
        }


class TestNamesBoundEarlier:
    def test_names_imported_before_the_session_are_rebound_and_restored(self):
        assert linear is F.linear
        with casts_on():
            assert linear is dense is F.linear
            assert linear(x(), x()).dtype is torch.bfloat16
        assert linear(x(), x()).dtype is torch.float32
        assert linear is dense is F.linear
        assert not wrapped(linear)

    def test_second_names_of_torch_are_patched(self):
        assert torch.functional.einsum is torch.einsum
        with casts_on():
            assert torch.functional.einsum("ij,jk", x(), x().t()).dtype is torch.bfloat16
        assert torch.functional.einsum is torch.einsum

    def test_modules_that_forward_attributes_are_left_alone(self, monkeypatch):
        class Forwarding(types.ModuleType):
            def __setattr__(self, name: str, value: object) -> None:
                setattr(behind, name, value)

        behind, forwarding = types.ModuleType("behind"), Forwarding("forwarding")
        vars(forwarding)["product"] = behind.product = torch.mm
        monkeypatch.setitem(sys.modules, "forwarding", forwarding)
        with casts_on():
            assert not wrapped(forwarding.product)
        assert behind.product is torch.mm

    def test_other_functions_of_the_same_name_are_left_alone(self, neighbour):
        neighbour.linear = original = lambda *args: args
        with casts_on():
            assert neighbour.linear is original

    def test_wrappers_that_a_module_bound_are_replaced_by_the_originals(self, neighbour):
        with casts_on():
            neighbour.linear = F.linear
            neighbour.conv2d = torch.conv2d
            neighbour.conv_of_functional = F.conv2d
        assert neighbour.linear is F.linear
        assert neighbour.conv2d is neighbour.conv_of_functional is torch.conv2d

    def test_wrappers_in_a_module_that_cannot_be_written_to_stay_and_call_the_originals(self, monkeypatch, neighbour):
        class ReadOnly(types.ModuleType):
            def __setattr__(self, name: str, value: object) -> None:
                raise AttributeError(name)

        read_only = ReadOnly("read_only")
        with casts_on():
            vars(read_only)["linear"] = neighbour.linear = F.linear
            monkeypatch.setitem(sys.modules, "read_only", read_only)
            monkeypatch.setitem(sys.modules, "neighbour", neighbour)
        assert neighbour.linear is F.linear
        with casts_on():
            assert read_only.linear(x(), x()).dtype is torch.float32
        assert read_only.linear(x(), x()).dtype is torch.float32


class TestSearches:
    """How often all loaded modules are looked through: what most of the time would go to."""

    @pytest.fixture
    def searches(self, monkeypatch):
        """Each search through the loaded modules, as it begins."""
        begun = []
        loaded_modules = function_patches.loaded_modules

        def counting(*internal):
            begun.append(internal)
            return loaded_modules(*internal)

        for module in (function_patches, function_places):
            monkeypatch.setattr(module, "loaded_modules", counting)
        return begun

    def test_initialize_searches_once_and_deinitialize_never(self, searches):
        amp.initialize(nn.Linear(4, 4), opt_level="O1", verbosity=0)
        amp.deinitialize()
        assert len(searches) == 1
        amp.init()
        kept = F.linear
        amp.deinitialize()
        searches.clear()
        amp.initialize(nn.Linear(4, 4), opt_level="O1", verbosity=0)  # beside a wrapper that is left
        assert wrapped(kept)
        assert len(searches) == 1

    def test_deinitialize_searches_once_where_a_module_kept_a_wrapper(self, searches, neighbour):
        amp.init()
        neighbour.mine = F.linear
        searches.clear()
        amp.deinitialize()
        assert len(searches) == 1
        assert neighbour.mine is F.linear

    def test_wrappers_of_an_earlier_session_in_modules_are_replaced(self, neighbour):
        original = F.linear
        amp.init()
        kept = F.linear
        amp.deinitialize()
        neighbour.mine = kept  # as a module does that had the function in a container meanwhile
        amp.init()
        assert neighbour.mine is F.linear is not kept
        amp.deinitialize()
        assert neighbour.mine is original


class TestPatchesOfOthers:
    def test_patches_of_others_under_wrappers_are_called_and_restored(self, monkeypatch):
        def theirs(*args):
            called.append([arg.dtype for arg in args])
            return original(*args)

        called: list[object] = []
        original = torch.mm
        monkeypatch.setattr(torch, "mm", theirs)
        with casts_on():
            torch.mm(x(), x().t())
        assert called == [[torch.bfloat16, torch.bfloat16]]
        assert torch.mm is theirs


class TestAliases:
    def test_aliases_of_one_function_get_one_wrapper(self):
        assert torch.conv2d is F.conv2d
        with casts_on():
            assert torch.conv2d is F.conv2d
            assert torch.lstm is torch._VF.lstm

    def test_a_list_that_names_one_alias_holds_for_all(self):
        with casts_on(cast_lists={"blacklist": {"torch": ["conv2d"]}}):
            assert nn.Conv2d(1, 1, 2)(torch.randn(1, 1, 4, 4).bfloat16()).dtype is torch.float32

    def test_a_registration_holds_for_all_aliases_and_the_last_one_counts(self):
        x, weight = torch.randn(1, 1, 4, 4), torch.randn(1, 1, 2, 2)
        amp.register_float_function(torch, "conv2d")
        with casts_on():
            assert F.conv2d is torch.conv2d
            assert nn.Conv2d(1, 1, 2)(x.bfloat16()).dtype is torch.float32
        assert nn.Conv2d(1, 1, 2)(x).dtype is torch.float32
        amp.register_half_function(F, "conv2d")
        with casts_on():
            assert torch.conv2d(x, weight).dtype is torch.bfloat16


class Activated(nn.Module):
    """Keeps functions as attributes, as models of the field do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.activation = F.softmax
        self.inner = nn.Module()
        self.inner.product = torch.mm

    def forward(self, value: Tensor) -> Tensor:
        return self.activation(self.inner.product(self.linear(value), value.t()), dim=-1)


class TestAttributesOfModels:
    def test_functions_that_submodules_keep_are_rebound_and_restored(self):
        model = Activated()
        softmax, product = model.activation, model.inner.product
        amp.initialize(model, half_dtype=torch.float16, verbosity=0)
        assert (model.activation, model.inner.product) == (F.softmax, torch.mm)
        assert wrapped(model.activation)
        assert model(x()).dtype is torch.float32
        amp.deinitialize()
        assert (model.activation, model.inner.product) == (softmax, product)
        assert not wrapped(model.activation)

    def test_wrappers_of_a_model_built_in_the_session_become_the_originals(self):
        amp.initialize(nn.Module(), verbosity=0)
        model = amp.initialize(Activated(), verbosity=0)
        assert wrapped(model.activation)
        amp.deinitialize()
        assert model.activation is F.softmax
        assert model.inner.product is torch.mm

    def test_wrappers_that_a_model_kept_become_those_of_the_next_session(self):
        amp.initialize(nn.Module(), verbosity=0)
        model = Activated()
        amp.deinitialize()
        assert model.inner.product is not torch.mm  # nobody knows of it
        amp.initialize(model, half_dtype=torch.float16, verbosity=0)
        assert model.inner.product is torch.mm
        assert model.inner.product(x(), x().T.requires_grad_()).dtype is torch.float16
        amp.deinitialize()
        assert (model.activation, model.inner.product) == (F.softmax, torch.mm)

    def test_a_model_with_wrappers_is_pickled_and_loaded_during_and_after_the_session(self):
        model, value = amp.initialize(Activated(), verbosity=0), x()
        saved = pickle.dumps(model)
        loaded = pickle.loads(saved)
        assert loaded.activation is F.softmax
        assert torch.equal(loaded(value), model(value))
        amp.deinitialize()
        loaded = pickle.loads(saved)
        assert not wrapped(loaded.activation)
        assert torch.equal(loaded(value), model(value))
        assert loaded(value).dtype is torch.float32


class TestWrappers:
    @pytest.mark.parametrize("namespace", NAMESPACES)
    def test_wrappers_are_pickled_by_name(self, namespace):
        owner = find_owner(namespace)
        names = [path.name for path in RULES if path.namespace == namespace]
        with casts_on(torch.float16):
            saved = {name: pickle.dumps(getattr(owner, name)) for name in names}
            for name in names:
                assert pickle.loads(saved[name]) is getattr(owner, name)
        for name in names:
            assert pickle.loads(saved[name]) is getattr(owner, name)

    def test_wrappers_kept_after_their_session_call_the_originals(self):
        with casts_on(torch.float16):
            kept, method = torch.mm, torch.Tensor.matmul
        a, b = x(), x().t()
        assert torch.equal(kept(a, b), torch.mm(a, b))
        assert kept(a, b).dtype is method(a, b).dtype is torch.float32
        with casts_on(torch.bfloat16):
            assert kept(a, b).dtype is torch.float32
            assert torch.mm(a, b).dtype is torch.bfloat16


LATE = """
SIZE = 3

def attend(value):
    return value

class Gate:
    def open(self, value):
        return value

    @staticmethod
    def close(value):
        return value
"""


@pytest.fixture
def late(package):
    """A package that is not imported yet, with functions in `late.ops`."""
    package("late", ops=LATE)


class TestModulesImportedLater:
    @pytest.mark.parametrize("is_loaded", [False, True], ids=["package not loaded", "package loaded"])
    def test_modules_imported_later_are_patched_and_restored(self, late, is_loaded):
        if is_loaded:
            importlib.import_module("late")
        lists = {"whitelist": {"late.ops": ["attend"]}}
        with casts_on(torch.float16, cast_lists=lists):
            ops = importlib.import_module("late.ops")
            assert ops.attend(x()).dtype is torch.float16
        assert ops.attend(x()).dtype is torch.float32
        assert not wrapped(ops.attend)
        with casts_on(torch.bfloat16, cast_lists=lists):
            assert ops.attend(x()).dtype is torch.bfloat16

    def test_classes_of_modules_imported_later_are_patched(self, late):
        with casts_on(cast_lists={"whitelist": {"late.ops.Gate": ["open", "close"]}}):
            gate = importlib.import_module("late.ops").Gate
            assert gate().open(x()).dtype is gate.close(x()).dtype is gate().close(x()).dtype is torch.bfloat16
        assert gate().open(x()).dtype is gate.close(x()).dtype is torch.float32
        assert isinstance(vars(gate)["close"], staticmethod)

    def test_names_that_a_module_bound_during_its_import_are_rebound(self, package):
        package("late_d", __init__="from late_d.ops import attend as pay\nfrom late_d import ops\n", ops=LATE)
        with casts_on(cast_lists={"whitelist": {"late_d": ["pay"]}}):
            late = importlib.import_module("late_d")
            assert late.pay(x()).dtype is late.ops.attend(x()).dtype is torch.bfloat16
        assert late.pay is late.ops.attend
        assert not wrapped(late.pay)

    @pytest.mark.parametrize(
        ("namespace", "entry", "told"),
        [
            ("", "atend", r"'late\.ops' was imported and has no 'atend'.*'attend'"),
            (".Gaet", "open", r"'late\.ops' has no 'Gaet'.*'Gate'"),
            (
                "",
                {"name": "attend", "when": {"mode": ["fast"]}},
                "'mode', which cannot be read from a call of late.ops",
            ),
            ("", "Gate", "is a class, not a function"),
            (".SIZE", "bit_count", "expected a module or a class"),
        ],
        ids=["no name", "no class", "no argument", "a class", "a number"],
    )
    def test_modules_imported_later_that_an_entry_does_not_fit_are_warned_of(self, late, namespace, entry, told):
        with (
            casts_on(cast_lists={"whitelist": {f"late.ops{namespace}": [entry]}}),
            pytest.warns(AmpWarning, match=told),
        ):
            ops = importlib.import_module("late.ops")
        assert (type(ops.Gate), ops.SIZE) == (type, 3)

    def test_modules_imported_later_may_lack_an_optional_name(self, late):
        with casts_on(cast_lists={"whitelist": {"late.ops": [{"name": "atend", "optional": True}]}}):
            importlib.import_module("late.ops")

    def test_modules_imported_after_deinitialize_are_left_alone(self, late):
        with casts_on(cast_lists={"whitelist": {"late.ops": ["attend"]}}):
            over = runtime.live
        assert over is not None  # and somebody keeps it
        assert not wrapped(importlib.import_module("late.ops").attend)

    def test_modules_imported_later_are_patched_by_the_live_session_only(self, late):
        with casts_on(torch.float16, cast_lists={"whitelist": {"late.ops": ["attend"]}}):
            pass
        with casts_on(torch.bfloat16, cast_lists={"blacklist": {"late.ops": ["attend"]}}):
            ops = importlib.import_module("late.ops")
            assert ops.attend(x().bfloat16()).dtype is torch.float32
            assert not wrapped(ops.attend.__wrapped__)
        assert not wrapped(ops.attend)

    def test_packages_that_import_each_other_are_patched_when_complete(self, package):
        package("late_o", __init__="from late_o import ops\n" + LATE, ops=LATE)
        package("late_p", __init__="import late_o\n" + LATE)
        names = {"late_o": ["attend"], "late_o.ops": ["attend"], "late_o.Gate": ["open"], "late_p": ["attend"]}
        with casts_on(cast_lists={"whitelist": names}):
            late_p = importlib.import_module("late_p")
            late_o = late_p.late_o
            calls = [late_o.attend, late_o.ops.attend, late_o.Gate().open, late_p.attend]
            assert [call(x()).dtype for call in calls] == [torch.bfloat16] * 4

    def test_a_module_that_replaces_itself_in_sys_modules_is_patched(self, package):
        replace = "lazy = types.ModuleType(__name__)\nlazy.__spec__, lazy.attend = __spec__, attend\n"
        package("late_r", __init__=f"import sys, types\n{LATE}{replace}sys.modules[__name__] = lazy\n")
        with casts_on(cast_lists={"whitelist": {"late_r": ["attend"]}}):
            assert importlib.import_module("late_r").attend(x()).dtype is torch.bfloat16

    def test_modules_imported_again_are_patched_again(self, late):
        for half in (torch.float16, torch.bfloat16):
            with casts_on(half, cast_lists={"whitelist": {"late.ops": ["attend"]}}):
                assert importlib.import_module("late.ops").attend(x()).dtype is half
            for name in ("late.ops", "late"):
                del sys.modules[name]

    def test_modules_that_are_never_imported_leave_no_hook(self, late):
        before = list(sys.meta_path), dict(sys.modules["wrapt.importer"]._post_import_hooks)
        with casts_on(cast_lists={"whitelist": {"late.ops": ["attend"]}}):
            pass
        assert (sys.meta_path, sys.modules["wrapt.importer"]._post_import_hooks) == before


def make_classes() -> types.SimpleNamespace:
    """Classes with every kind of method; each returns its tensor."""

    class Base:
        def method(self, value: Tensor) -> Tensor:
            return value

        @staticmethod
        def static(value: Tensor) -> Tensor:
            return value

        @classmethod
        def of_class(cls, value: Tensor) -> Tensor:
            cls.called_by = cls
            return value

    class Derived(Base):
        pass

    return types.SimpleNamespace(Base=Base, Derived=Derived)


class TestRegistrations:
    @pytest.mark.parametrize(
        ("register", "given", "gets"),
        [
            (amp.register_half_function, torch.float32, "half"),
            (amp.register_float_function, "half", torch.float32),
            (amp.register_bfloat16_function, torch.float32, torch.bfloat16),
        ],
        ids=["half", "float", "bfloat16"],
    )
    def test_registered_functions_of_a_users_module_cast_in_every_session(self, neighbour, register, given, gets):
        neighbour.identity = original = lambda value: value
        register(neighbour, "identity")
        assert neighbour.identity is original
        for half in HALF_DTYPES:
            with casts_on(half):
                result = neighbour.identity(x().to(half if given == "half" else given))
                assert result.dtype is (half if gets == "half" else gets)
            assert neighbour.identity is original

    def test_a_registered_promotion_casts_mixed_arguments(self, neighbour):
        neighbour.pair = lambda a, b: (a, b)
        amp.register_promote_function(neighbour, "pair")
        with casts_on():
            for other, wanted in ((x(), torch.float32), (x().bfloat16(), torch.bfloat16)):
                assert [value.dtype for value in neighbour.pair(other, x().bfloat16())] == [wanted, wanted]

    @pytest.mark.parametrize(
        ("name", "kind"), [("method", object), ("static", staticmethod), ("of_class", classmethod)]
    )
    def test_registered_methods_keep_their_kind_cast_and_are_restored(self, name, kind):
        classes = make_classes()
        amp.register_half_function(classes.Base, name)
        before = vars(classes.Base)[name]
        with casts_on():
            assert isinstance(vars(classes.Base)[name], kind)
            for owner in (classes.Base(), classes.Derived()):
                assert getattr(owner, name)(x()).dtype is torch.bfloat16
            assert classes.Base.static(x()).dtype is (torch.bfloat16 if name == "static" else torch.float32)
            classes.Derived.of_class(x())
        assert vars(classes.Base)[name] is before
        assert classes.Derived.called_by is classes.Derived

    @pytest.mark.parametrize("name", ["method", "static", "of_class"])
    def test_a_registered_inherited_method_casts_in_the_named_class_only(self, name):
        classes = make_classes()
        amp.register_half_function(classes.Derived, name)
        with casts_on():
            assert getattr(classes.Derived(), name)(x()).dtype is torch.bfloat16
            assert getattr(classes.Base(), name)(x()).dtype is torch.float32
        assert name not in vars(classes.Derived)

    def test_registrations_of_a_method_and_of_an_inherited_one_differ(self):
        classes = make_classes()
        amp.register_half_function(classes.Base, "method")
        amp.register_float_function(classes.Derived, "method")
        with casts_on():
            assert classes.Base().method(x()).dtype is torch.bfloat16
            assert classes.Derived().method(x()).dtype is torch.float32

    def test_apply_of_an_autograd_function_can_be_registered(self):
        class Double(torch.autograd.Function):
            @staticmethod
            def forward(ctx: object, value: Tensor) -> Tensor:
                seen.append(value.dtype)
                return value * 2

            @staticmethod
            def backward(ctx: object, grad: Tensor) -> Tensor:
                return grad * 2

        seen: list[torch.dtype] = []
        amp.register_half_function(Double, "apply")
        weight = x().requires_grad_()
        with casts_on():
            Double.apply(weight).float().sum().backward()
        Double.apply(weight)
        assert seen == [torch.bfloat16, torch.float32]
        assert torch.equal(weight.grad, torch.full_like(weight, 2))
        assert "apply" not in vars(Double)

    def test_methods_that_were_bound_before_are_bound_again(self, monkeypatch: pytest.MonkeyPatch):
        """`relu = Relu.apply` is how torch's documentation names an autograd function."""

        class Double(torch.autograd.Function):
            @staticmethod
            def forward(ctx: object, value: Tensor) -> Tensor:
                seen.append(value.dtype)
                return value * 2

        class Other(torch.autograd.Function):
            forward = staticmethod(Double.forward)

        class Calls(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.double = Double.apply

        seen: list[torch.dtype] = []
        bound, others, model = Double.apply, Other.apply, Calls()
        package = types.ModuleType("of_functions")
        package.double, package.other = bound, others  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "of_functions", package)
        amp.register_half_function(Double, "apply")
        for _ in range(2):
            amp.initialize(model, opt_level="O1", half_dtype="bfloat16", verbosity=0)
            for function in (package.double, model.double, package.other):
                function(x())
            amp.deinitialize()
            assert (package.double, model.double, package.other) == (bound, bound, others)
        assert seen == 2 * [torch.bfloat16, torch.bfloat16, torch.float32]

    def test_registrations_take_precedence_over_the_lists(self):
        amp.register_float_function(torch, "mm")
        amp.register_float_function(torch.Tensor, "matmul")
        amp.register_half_function(torch.Tensor, "exp")
        with casts_on(torch.float16):
            half = x().half()
            assert torch.mm(half, half.t()).dtype is half.matmul(half.t()).dtype is torch.float32
            assert x().exp().dtype is torch.float16

    def test_registrations_and_attributes_are_left_alone_at_o0(self, neighbour):
        neighbour.identity = original = lambda value: value
        amp.register_half_function(neighbour, "identity")
        model = amp.initialize(Activated(), opt_level="O0", verbosity=0)
        assert neighbour.identity is original
        assert not wrapped(model.activation)


class TestLimits:
    """Documented limits, so that a change of them is noticed."""

    @pytest.mark.parametrize(
        "hold",
        [
            pytest.param(lambda function: {"linear": function}, id="dict"),
            pytest.param(functools.partial, id="partial"),
        ],
    )
    def test_a_function_in_a_container_runs_uncast(self, neighbour, hold):
        neighbour.held = hold(F.linear)
        with casts_on():
            held = neighbour.held
            function = held["linear"] if isinstance(held, dict) else held
            assert function(x(), x()).dtype is torch.float32


def test_errors_name_the_owner_of_a_registration(neighbour):
    neighbour.fails = lambda value: value.numpy()
    amp.register_half_function(neighbour, "fails")
    with casts_on(), pytest.raises(TypeError, match="BFloat16") as caught:
        neighbour.fails(x())
    assert caught.value.__notes__ == ["ampatch: neighbour.fails is registered for the whitelist."]
