"""Of the places that a function can be reached from: each is patched while casts are on, and restored."""

from __future__ import annotations

import copy
import functools
import importlib
import pickle
import sys
import types
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from helpers import HALF_DTYPES, casts_on, dtype_name
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
    def test_are_the_eight_that_torch_has_functions_in(self):
        assert NAMESPACES == [
            "torch",
            "torch.Tensor",
            "torch._VF",
            "torch.fft",
            "torch.linalg",
            "torch.nn.functional",
            "torch.sparse",
            "torch.special",
        ]

    @pytest.mark.parametrize("namespace", NAMESPACES)
    def test_every_listed_function_is_wrapped_while_casts_are_on(self, namespace):
        owner = find_owner(namespace)
        originals = {path.name: getattr(owner, path.name) for path in RULES if path.namespace == namespace}
        with casts_on(torch.float16):
            for name, original in originals.items():
                assert getattr(owner, name) is not original
                assert getattr(owner, name).__wrapped__ is original
                assert getattr(owner, name).__name__ == original.__name__
        assert all(getattr(owner, name) is original for name, original in originals.items())

    @pytest.mark.parametrize("half", HALF_DTYPES, ids=dtype_name)
    @pytest.mark.parametrize(
        "call",
        [
            pytest.param(lambda a: torch.mm(a, a.t()), id="torch"),
            pytest.param(lambda a: F.linear(a, a), id="torch.nn.functional"),
            pytest.param(lambda a: torch.linalg.matmul(a, a.t()), id="torch.linalg"),
            pytest.param(lambda a: torch._VF.rnn_tanh_cell(a, a[:, :3], a[:3], a[:3, :3]), id="torch._VF"),
            pytest.param(lambda a: a.matmul(a.t()), id="method"),
            pytest.param(lambda a: a @ a.t(), id="operator"),
            pytest.param(lambda a: torch.Tensor.matmul(a, a.t()), id="unbound-method"),
        ],
    )
    @pytest.mark.covering(1)
    def test_whitelisted_function_runs_in_half_wherever_it_stands(self, call, half):
        with casts_on(half):
            assert call(x()).dtype is half
        assert call(x()).dtype is torch.float32

    @pytest.mark.parametrize(
        "call",
        [
            pytest.param(lambda a: torch.exp(input=a), id="torch"),
            pytest.param(lambda a: F.softmax(a, -1), id="torch.nn.functional"),
            pytest.param(lambda a: torch.special.expm1(input=a), id="torch.special"),
            pytest.param(lambda a: torch.linalg.vector_norm(x=a), id="torch.linalg"),
            pytest.param(lambda a: torch.fft.rfft(a).real, id="torch.fft"),
            pytest.param(lambda a: a.exp(), id="method"),
            pytest.param(lambda a: a**2.5, id="operator"),
            pytest.param(lambda a: 2.5**a, id="reflected-operator"),
        ],
    )
    def test_blacklisted_function_runs_in_float32_wherever_it_stands(self, call):
        with casts_on(torch.float16):
            assert call(x().abs().half()).dtype is torch.float32

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
    def test_are_rebound_in_the_module_that_imported_them(self):
        assert linear is F.linear
        with casts_on():
            assert linear is dense is F.linear
            assert linear(x(), x()).dtype is torch.bfloat16
        assert linear(x(), x()).dtype is torch.float32
        assert linear is dense is F.linear
        assert not wrapped(linear)

    def test_are_found_under_any_name_in_any_module(self, neighbour):
        neighbour.matrix_product = original = torch.mm
        with casts_on():
            assert neighbour.matrix_product is torch.mm
            assert neighbour.matrix_product is not original
        assert neighbour.matrix_product is original

    def test_are_found_where_torch_offers_a_second_name(self):
        assert torch.functional.einsum is torch.einsum
        with casts_on():
            assert torch.functional.einsum("ij,jk", x(), x().t()).dtype is torch.bfloat16
        assert torch.functional.einsum is torch.einsum

    def test_are_left_alone_in_a_module_that_hands_its_attributes_on(self, monkeypatch):
        class Forwarding(types.ModuleType):
            def __setattr__(self, name: str, value: object) -> None:
                setattr(behind, name, value)

        behind, forwarding = types.ModuleType("behind"), Forwarding("forwarding")
        vars(forwarding)["product"] = behind.product = torch.mm
        monkeypatch.setitem(sys.modules, "forwarding", forwarding)
        with casts_on():
            assert not wrapped(forwarding.product)
        assert behind.product is torch.mm

    def test_are_left_alone_where_they_are_something_else(self, neighbour):
        neighbour.linear = original = lambda *args: args
        with casts_on():
            assert neighbour.linear is original

    def test_are_restored_in_modules_that_bound_the_wrapper(self, neighbour):
        with casts_on():
            neighbour.linear = F.linear
            neighbour.conv2d = torch.conv2d
            neighbour.conv_of_functional = F.conv2d
        assert neighbour.linear is F.linear
        assert neighbour.conv2d is neighbour.conv_of_functional is torch.conv2d

    def test_are_restored_in_modules_imported_meanwhile(self, package):
        package("meanwhile", __init__="from torch.nn.functional import linear as fully_connected\n")
        with casts_on():
            module = importlib.import_module("meanwhile")
            assert module.fully_connected(x(), x()).dtype is torch.bfloat16
        assert module.fully_connected is F.linear

    def test_keep_what_somebody_else_put_there_meanwhile(self, neighbour):
        neighbour.product = torch.mm
        amp.initialize(nn.Module(), verbosity=0)
        neighbour.product = theirs = lambda *args: args
        with pytest.warns(AmpWarning, match=r"and its replacements stay: neighbour\.product\."):
            amp.deinitialize()
        assert neighbour.product is theirs


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

    def test_initialize_makes_one_and_deinitialize_none(self, searches):
        amp.initialize(nn.Linear(4, 4), opt_level="O1", verbosity=0)
        assert len(searches) == 1
        amp.deinitialize()
        assert len(searches) == 1

    def test_initialize_makes_one_where_wrappers_of_a_session_are_left(self, searches):
        amp.init()
        kept = F.linear
        amp.deinitialize()
        searches.clear()
        amp.initialize(nn.Linear(4, 4), opt_level="O1", verbosity=0)
        assert wrapped(kept)
        assert len(searches) == 1

    def test_deinitialize_makes_one_where_a_wrapper_was_kept(self, searches, neighbour):
        amp.init()
        neighbour.mine = F.linear
        searches.clear()
        amp.deinitialize()
        assert len(searches) == 1
        assert neighbour.mine is F.linear

    def test_one_gives_a_module_the_wrapper_for_that_of_an_earlier_session(self, neighbour):
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
    def test_on_top_of_ours_are_reported_and_left_in_place(self):
        original = torch.mm
        amp.initialize(nn.Module(), half_dtype=torch.bfloat16, verbosity=0)
        ours = torch.mm

        def theirs(*args):
            return ours(*args)

        try:
            torch.mm = theirs
            with pytest.warns(AmpWarning, match=r"and its replacements stay: torch\.mm\."):
                amp.deinitialize()
            assert torch.mm is theirs
            assert torch.mm(x(), x().t()).dtype is torch.float32
        finally:
            torch.mm = original

    def test_below_ours_are_called_and_come_back(self, monkeypatch):
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
    def test_of_one_function_stay_one_function(self):
        assert torch.conv2d is F.conv2d
        with casts_on():
            assert torch.conv2d is F.conv2d
            assert torch.lstm is torch._VF.lstm

    def test_are_all_moved_by_a_list_that_names_one(self):
        with casts_on(cast_lists={"blacklist": {"torch": ["conv2d"]}}):
            assert nn.Conv2d(1, 1, 2)(torch.randn(1, 1, 4, 4).bfloat16()).dtype is torch.float32

    def test_are_all_moved_by_a_registration_of_one(self):
        amp.register_float_function(torch, "conv2d")
        with casts_on():
            assert F.conv2d is torch.conv2d
            assert nn.Conv2d(1, 1, 2)(torch.randn(1, 1, 4, 4).bfloat16()).dtype is torch.float32
        assert nn.Conv2d(1, 1, 2)(torch.randn(1, 1, 4, 4)).dtype is torch.float32

    def test_follow_the_last_registration(self):
        amp.register_float_function(torch, "conv2d")
        amp.register_half_function(F, "conv2d")
        with casts_on():
            assert torch.conv2d(torch.randn(1, 1, 4, 4), torch.randn(1, 1, 2, 2)).dtype is torch.bfloat16


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
    def test_are_rebound_in_every_submodule_and_restored(self):
        model = Activated()
        softmax, product = model.activation, model.inner.product
        amp.initialize(model, half_dtype=torch.float16, verbosity=0)
        assert (model.activation, model.inner.product) == (F.softmax, torch.mm)
        assert wrapped(model.activation)
        assert model(x()).dtype is torch.float32
        amp.deinitialize()
        assert (model.activation, model.inner.product) == (softmax, product)
        assert not wrapped(model.activation)

    def test_are_not_rebound_where_the_level_patches_nothing(self):
        model = Activated()
        amp.initialize(model, opt_level="O0", verbosity=0)
        assert not wrapped(model.activation)

    def test_of_a_model_built_while_patched_become_the_original(self):
        amp.initialize(nn.Module(), verbosity=0)
        model = amp.initialize(Activated(), verbosity=0)
        assert wrapped(model.activation)
        amp.deinitialize()
        assert model.activation is F.softmax
        assert model.inner.product is torch.mm

    def test_of_a_model_that_kept_wrappers_of_a_session_are_those_of_the_next(self):
        amp.initialize(nn.Module(), verbosity=0)
        model = Activated()
        amp.deinitialize()
        assert model.inner.product is not torch.mm  # nobody knows of it
        amp.initialize(model, half_dtype=torch.float16, verbosity=0)
        assert model.inner.product is torch.mm
        assert model.inner.product(x(), x().T.requires_grad_()).dtype is torch.float16
        amp.deinitialize()
        assert (model.activation, model.inner.product) == (F.softmax, torch.mm)

    def test_do_not_stop_a_model_from_pickling(self):
        model = amp.initialize(Activated(), verbosity=0)
        value = x()
        loaded = pickle.loads(pickle.dumps(model))
        assert loaded.activation is F.softmax
        assert torch.equal(loaded(value), model(value))

    def test_a_model_pickled_while_patched_loads_where_nothing_is(self):
        model = amp.initialize(Activated(), verbosity=0)
        value, saved = x(), pickle.dumps(model)
        amp.deinitialize()
        loaded = pickle.loads(saved)
        assert not wrapped(loaded.activation)
        assert torch.equal(loaded(value), model(value))
        assert loaded(value).dtype is torch.float32

    def test_a_deep_copy_is_independent(self):
        model = amp.initialize(Activated(), half_dtype=torch.float16, verbosity=0)
        copied = copy.deepcopy(model)
        with torch.no_grad():
            copied.linear.weight.zero_()
            copied.linear.bias.zero_()
        value = x()
        assert not torch.equal(copied(value), model(value))
        amp.deinitialize()
        assert copied(value).dtype is torch.float32
        assert not model._forward_hooks
        assert not model._forward_pre_hooks


class TestWrappers:
    @pytest.mark.parametrize("namespace", NAMESPACES)
    def test_pickle_by_reference_while_patched(self, namespace):
        owner = find_owner(namespace)
        names = [path.name for path in RULES if path.namespace == namespace]
        with casts_on(torch.float16):
            saved = {name: pickle.dumps(getattr(owner, name)) for name in names}
            for name in names:
                assert pickle.loads(saved[name]) is getattr(owner, name)
        for name in names:
            assert pickle.loads(saved[name]) is getattr(owner, name)

    def test_kept_after_deinitialize_forward_unchanged(self):
        with casts_on():
            kept, method = torch.mm, torch.Tensor.matmul
        a, b = x(), x().t()
        assert torch.equal(kept(a, b), torch.mm(a, b))
        assert kept(a, b).dtype is method(a, b).dtype is torch.float32

    def test_kept_through_a_second_session_are_not_its_own(self):
        with casts_on(torch.float16):
            kept = torch.mm
        with casts_on(torch.bfloat16):
            assert kept(x(), x().t()).dtype is torch.float32
            assert torch.mm(x(), x().t()).dtype is torch.bfloat16


LATE = """
import torch

def attend(value):
    return value

class Gate:
    def open(self, value):
        return value

    @staticmethod
    def close(value):
        return value
"""


class TestModulesImportedLater:
    def test_are_patched_when_they_are_imported_and_restored(self, package):
        package("late_a", ops=LATE)
        with casts_on(cast_lists={"whitelist": {"late_a.ops": ["attend"]}}):
            assert "late_a" not in sys.modules
            ops = importlib.import_module("late_a.ops")
            assert ops.attend(x()).dtype is torch.bfloat16
        assert ops.attend(x()).dtype is torch.float32
        assert not wrapped(ops.attend)

    def test_may_be_in_a_package_that_is_loaded(self, package):
        package("late_b", ops=LATE)
        importlib.import_module("late_b")
        with casts_on(cast_lists={"whitelist": {"late_b.ops": ["attend"]}}):
            assert importlib.import_module("late_b.ops").attend(x()).dtype is torch.bfloat16

    def test_may_have_the_function_in_a_class(self, package):
        package("late_c", ops=LATE)
        with casts_on(cast_lists={"whitelist": {"late_c.ops.Gate": ["open", "close"]}}):
            gate = importlib.import_module("late_c.ops").Gate
            assert gate().open(x()).dtype is gate.close(x()).dtype is gate().close(x()).dtype is torch.bfloat16
        assert gate().open(x()).dtype is gate.close(x()).dtype is torch.float32
        assert isinstance(vars(gate)["close"], staticmethod)

    def test_may_have_bound_the_function_elsewhere_while_they_were_imported(self, package):
        package("late_d", __init__="from late_d.ops import attend as pay\nfrom late_d import ops\n", ops=LATE)
        with casts_on(cast_lists={"whitelist": {"late_d": ["pay"]}}):
            late = importlib.import_module("late_d")
            assert late.pay(x()).dtype is late.ops.attend(x()).dtype is torch.bfloat16
        assert late.pay is late.ops.attend
        assert not wrapped(late.pay)

    def test_that_lack_the_name_are_warned_of(self, package):
        package("late_e", ops=LATE)
        told = pytest.warns(AmpWarning, match=r"'late_e\.ops' was imported and has no 'atend'.*'attend'")
        with casts_on(cast_lists={"whitelist": {"late_e.ops": ["atend"]}}), told:
            importlib.import_module("late_e.ops")

    def test_that_lack_the_class_are_warned_of(self, package):
        package("late_f", ops=LATE)
        told = pytest.warns(AmpWarning, match=r"'late_f\.ops' has no 'Gaet'.*'Gate'")
        with casts_on(cast_lists={"whitelist": {"late_f.ops.Gaet": ["open"]}}), told:
            importlib.import_module("late_f.ops")

    def test_that_lack_the_argument_of_a_condition_are_warned_of(self, package):
        package("late_g", ops=LATE)
        rule = {"name": "attend", "when": {"mode": ["fast"]}}
        told = pytest.warns(AmpWarning, match=r"the argument 'mode', which cannot be read from a call of late_g\.ops")
        with casts_on(cast_lists={"whitelist": {"late_g.ops": [rule]}}), told:
            importlib.import_module("late_g.ops")

    @pytest.mark.parametrize(
        ("namespace", "name", "unfit"),
        [
            ("late_m.ops", "Gate", "is a class, not a function"),
            ("late_n.ops.SIZE", "bit_count", "expected a module or a class"),
        ],
    )
    def test_where_nothing_can_be_patched_are_warned_of(self, package, namespace, name, unfit):
        package(namespace[:6], ops=LATE + "SIZE = 3\n")
        with casts_on(cast_lists={"whitelist": {namespace: [name]}}), pytest.warns(AmpWarning, match=unfit):
            ops = importlib.import_module(f"{namespace[:6]}.ops")
        assert (type(ops.Gate), ops.SIZE) == (type, 3)

    def test_that_lack_an_optional_name_are_not(self, package):
        package("late_h", ops=LATE)
        with casts_on(cast_lists={"whitelist": {"late_h.ops": [{"name": "atend", "optional": True}]}}):
            importlib.import_module("late_h.ops")

    def test_are_left_alone_after_deinitialize(self, package):
        package("late_i", ops=LATE)
        with casts_on(cast_lists={"whitelist": {"late_i.ops": ["attend"]}}):
            over = runtime.live
        assert over is not None  # and somebody keeps it
        assert not wrapped(importlib.import_module("late_i.ops").attend)

    def test_are_patched_by_the_session_that_lives_and_by_no_earlier_one(self, package):
        package("late_j", ops=LATE)
        with casts_on(torch.float16, cast_lists={"whitelist": {"late_j.ops": ["attend"]}}):
            pass
        with casts_on(torch.bfloat16, cast_lists={"blacklist": {"late_j.ops": ["attend"]}}):
            ops = importlib.import_module("late_j.ops")
            assert ops.attend(x().bfloat16()).dtype is torch.float32
            assert not wrapped(ops.attend.__wrapped__)
        assert not wrapped(ops.attend)

    def test_are_patched_when_they_were_imported_in_the_session_before(self, package):
        package("late_k", ops=LATE)
        lists = {"whitelist": {"late_k.ops": ["attend"]}}
        with casts_on(torch.float16, cast_lists=lists):
            ops = importlib.import_module("late_k.ops")
        with casts_on(torch.bfloat16, cast_lists=lists):
            assert ops.attend(x()).dtype is torch.bfloat16

    def test_are_complete_when_they_are_patched(self, package):
        package("late_o", __init__="from late_o import ops\n" + LATE, ops=LATE)
        package("late_p", __init__="import late_o\n" + LATE)
        names = {"late_o": ["attend"], "late_o.ops": ["attend"], "late_o.Gate": ["open"], "late_p": ["attend"]}
        with casts_on(cast_lists={"whitelist": names}):
            late_p = importlib.import_module("late_p")
            late_o = late_p.late_o
            calls = [late_o.attend, late_o.ops.attend, late_o.Gate().open, late_p.attend]
            assert [call(x()).dtype for call in calls] == [torch.bfloat16] * 4

    def test_may_put_another_module_in_their_own_place(self, package):
        replace = "lazy = types.ModuleType(__name__)\nlazy.__spec__, lazy.attend = __spec__, attend\n"
        package("late_r", __init__=f"import sys, types\n{LATE}{replace}sys.modules[__name__] = lazy\n")
        with casts_on(cast_lists={"whitelist": {"late_r": ["attend"]}}):
            assert importlib.import_module("late_r").attend(x()).dtype is torch.bfloat16

    def test_are_patched_again_when_they_are_imported_again(self, package):
        package("late_q", ops=LATE)
        for half in (torch.float16, torch.bfloat16):
            with casts_on(half, cast_lists={"whitelist": {"late_q.ops": ["attend"]}}):
                assert importlib.import_module("late_q.ops").attend(x()).dtype is half
            for name in ("late_q.ops", "late_q"):
                del sys.modules[name]

    def test_that_are_not_imported_in_a_session_leave_no_hook(self, package):
        package("late_l", ops=LATE)
        before = list(sys.meta_path), dict(sys.modules["wrapt.importer"]._post_import_hooks)
        with casts_on(cast_lists={"whitelist": {"late_l.ops": ["attend"]}}):
            pass
        assert (sys.meta_path, sys.modules["wrapt.importer"]._post_import_hooks) == before


class TestPathsOfUsers:
    def test_may_lead_to_any_loaded_module(self, package):
        package("early", ops=LATE)
        ops = importlib.import_module("early.ops")
        with casts_on(cast_lists={"whitelist": {"early.ops": ["attend"]}}):
            assert ops.attend(x()).dtype is torch.bfloat16
            assert pickle.loads(pickle.dumps(ops.attend)) is ops.attend
        assert ops.attend(x()).dtype is torch.float32

    def test_may_lead_to_a_class_whose_method_is_inherited(self, package):
        package("inherits", ops=LATE + "\nclass Valve(Gate):\n    pass\n")
        ops = importlib.import_module("inherits.ops")
        with casts_on(cast_lists={"whitelist": {"inherits.ops.Valve": ["open"]}}):
            assert ops.Valve().open(x()).dtype is torch.bfloat16
            assert ops.Gate().open(x()).dtype is torch.float32
        assert "open" not in vars(ops.Valve)


def make_classes() -> types.SimpleNamespace:
    """Classes with every kind of method; each returns its tensor."""

    class Base:
        def method(self, value: Tensor) -> Tensor:
            return value

        @staticmethod
        def static(value: Tensor) -> Tensor:
            return value

        @classmethod
        def of_class(cls, value: Tensor) -> tuple[type, Tensor]:
            return cls, value

    class Derived(Base):
        pass

    return types.SimpleNamespace(Base=Base, Derived=Derived)


class TestRegistrations:
    @pytest.mark.parametrize("half", HALF_DTYPES, ids=dtype_name)
    @pytest.mark.parametrize(
        ("register", "given", "gets"),
        [
            (amp.register_half_function, torch.float32, "half"),
            (amp.register_float_function, "half", torch.float32),
            (amp.register_bfloat16_function, torch.float32, torch.bfloat16),
        ],
        ids=["half", "float", "bfloat16"],
    )
    def test_cast_a_function_of_a_users_module(self, neighbour, register, given, gets, half):
        neighbour.identity = original = lambda value: value
        register(neighbour, "identity")
        assert neighbour.identity is original
        with casts_on(half):
            result = neighbour.identity(x().to(half if given == "half" else given))
            assert result.dtype is (half if gets == "half" else gets)
        assert neighbour.identity is original

    def test_promote_mixed_arguments(self, neighbour):
        neighbour.pair = lambda a, b: (a, b)
        amp.register_promote_function(neighbour, "pair")
        with casts_on():
            assert [value.dtype for value in neighbour.pair(x(), x().bfloat16())] == [torch.float32, torch.float32]

    def test_cast_the_method_of_a_class(self):
        classes = make_classes()
        amp.register_half_function(classes.Base, "method")
        before = vars(classes.Base)["method"]
        with casts_on():
            assert classes.Base().method(x()).dtype is torch.bfloat16
            assert classes.Derived().method(x()).dtype is torch.bfloat16
        assert vars(classes.Base)["method"] is before

    def test_cast_a_static_method_and_leave_it_one(self):
        classes = make_classes()
        amp.register_half_function(classes.Base, "static")
        before = vars(classes.Base)["static"]
        with casts_on():
            assert isinstance(vars(classes.Base)["static"], staticmethod)
            assert classes.Base.static(x()).dtype is classes.Base().static(x()).dtype is torch.bfloat16
        assert vars(classes.Base)["static"] is before

    def test_cast_a_class_method_and_leave_it_one(self):
        classes = make_classes()
        amp.register_half_function(classes.Base, "of_class")
        with casts_on():
            cls, value = classes.Derived.of_class(x())
            assert (cls, value.dtype) == (classes.Derived, torch.bfloat16)

    @pytest.mark.parametrize("name", ["method", "static", "of_class"])
    def test_cast_an_inherited_method_in_the_class_named_only(self, name):
        classes = make_classes()
        amp.register_half_function(classes.Derived, name)

        def dtype(owner: type) -> torch.dtype:
            result = getattr(owner(), name)(x())
            return (result[1] if isinstance(result, tuple) else result).dtype

        with casts_on():
            assert (dtype(classes.Derived), dtype(classes.Base)) == (torch.bfloat16, torch.float32)
        assert name not in vars(classes.Derived)

    def test_of_a_method_and_of_its_heir_count_each_for_itself(self):
        classes = make_classes()
        amp.register_half_function(classes.Base, "method")
        amp.register_float_function(classes.Derived, "method")
        with casts_on():
            assert classes.Base().method(x()).dtype is torch.bfloat16
            assert classes.Derived().method(x()).dtype is torch.float32

    def test_cast_the_forward_of_an_autograd_function(self):
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

    def test_take_precedence_over_the_lists(self):
        amp.register_float_function(torch, "mm")
        amp.register_float_function(torch.Tensor, "matmul")
        amp.register_half_function(torch.Tensor, "exp")
        with casts_on(torch.float16):
            half = x().half()
            assert torch.mm(half, half.t()).dtype is half.matmul(half.t()).dtype is torch.float32
            assert x().exp().dtype is torch.float16

    def test_of_one_name_count_by_the_last(self, neighbour):
        neighbour.identity = lambda value: value
        amp.register_half_function(neighbour, "identity")
        amp.register_float_function(neighbour, "identity")
        with casts_on():
            assert neighbour.identity(x()).dtype is torch.float32

    def test_are_not_installed_where_the_level_patches_nothing(self, neighbour):
        neighbour.identity = original = lambda value: value
        amp.register_half_function(neighbour, "identity")
        amp.initialize(nn.Module(), opt_level="O0", verbosity=0)
        assert neighbour.identity is original

    def test_stay_for_the_next_session(self, neighbour):
        neighbour.identity = lambda value: value
        amp.register_half_function(neighbour, "identity")
        for half in HALF_DTYPES:
            with casts_on(half):
                assert neighbour.identity(x()).dtype is half

    def test_reach_names_bound_earlier(self, neighbour, monkeypatch):
        neighbour.identity = lambda value: value
        monkeypatch.setitem(globals(), "identity", neighbour.identity)
        amp.register_half_function(neighbour, "identity")
        with casts_on():
            assert globals()["identity"] is neighbour.identity
            assert globals()["identity"](x()).dtype is torch.bfloat16


class Held(NamedTuple):
    function: object


class TestWhatTheSweepDoesNotReach:
    """Documented limits, so that a change of them is noticed."""

    @pytest.mark.parametrize(
        "hold",
        [
            pytest.param(lambda function: {"linear": function}, id="dict"),
            pytest.param(Held, id="named-tuple"),
            pytest.param(functools.partial, id="partial"),
        ],
    )
    def test_a_function_in_a_container_runs_uncast(self, neighbour, hold):
        neighbour.held = hold(F.linear)
        with casts_on():
            held = neighbour.held
            function = held["linear"] if isinstance(held, dict) else getattr(held, "function", held)
            assert function(x(), x()).dtype is torch.float32


def test_owners_of_registrations_are_named_in_errors(neighbour):
    neighbour.fails = lambda value: value.numpy()
    amp.register_half_function(neighbour, "fails")
    with casts_on(), pytest.raises(TypeError, match="BFloat16") as caught:
        neighbour.fails(x())
    assert caught.value.__notes__ == ["ampatch: neighbour.fails is registered for the whitelist."]
