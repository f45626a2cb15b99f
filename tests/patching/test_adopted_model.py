"""Adopted models: which objects are refused, on which device a model is, and the hooks around its forward."""

from __future__ import annotations

import copy
import functools
import itertools
import pickle
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampatch import amp
from ampatch.errors import AmpWarning, OptionError, UsageError
from ampatch.ledger import PatchLedger
from ampatch.patching import adopted_model, cast_labels
from ampatch.runtime import runtime
from ampatch.torch_private.modules import HOOKS_AROUND_FORWARD, STATE_HOOKS

HALF = torch.bfloat16


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    """A process group of this one process."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


class TestCheckModel:
    @pytest.mark.parametrize(
        ("thing", "found"),
        [(None, "NoneType"), (torch.ones(1), "Tensor"), (nn.Linear, "the class Linear"), (iter(()), "tuple_iterator")],
        ids=["None", "tensor", "class", "iterator"],
    )
    def test_other_objects_are_refused(self, thing, found):
        with pytest.raises(OptionError, match=rf"found {found} as a model; expected a torch\.nn\.Module"):
            adopted_model.check_model(thing)

    def test_a_scripted_module_is_refused(self):
        with pytest.raises(OptionError, match="the model was compiled by TorchScript"):
            adopted_model.check_model(SCRIPTED)

    def test_data_parallel_is_refused_with_the_right_order(self):
        order = r"model, optimizer = amp\.initialize\(model, optimizer\); model = DataParallel\(model\)"
        with pytest.raises(OptionError, match=order):
            adopted_model.check_model(nn.DataParallel(nn.Linear(1, 1)))

    @pytest.mark.usefixtures("process_group")
    def test_distributed_data_parallel_is_refused_with_the_right_order(self):
        order = r"model, optimizer = amp\.initialize\(model, optimizer\); model = DistributedDataParallel\(model\)"
        with pytest.raises(OptionError, match=order):
            adopted_model.check_model(nn.parallel.DistributedDataParallel(nn.Linear(1, 1)))


def double(x: Tensor) -> Tensor:
    return x * 2


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    DOUBLE = torch.jit.script(double)
    SCRIPTED = torch.jit.script(nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 1))))


class CallsDouble(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return DOUBLE(x)


class TestGraphs:
    """Parts that TorchScript or torch.export has made: amp casts nothing in there, and names them."""

    def test_scripted_modules_are_named_without_their_own_parts(self):
        model = nn.ModuleDict({"part": SCRIPTED, "part2": copy.deepcopy(SCRIPTED), "other": nn.Linear(1, 1)})
        assert adopted_model.scripted_parts(model) == ["part", "part2"]

    def test_scripted_functions_are_named_where_they_are_found_first(self):
        model = nn.Sequential(nn.ReLU(), nn.ReLU())
        assert adopted_model.scripted_parts(model) == []
        model[1].act = DOUBLE
        assert adopted_model.scripted_parts(model) == ["1.act"]
        model.act = DOUBLE
        assert adopted_model.scripted_parts(model) == ["act"]

    def test_scripted_functions_that_methods_call_are_named_with_their_python_module(self):
        assert adopted_model.scripted_parts(nn.Sequential(CallsDouble())) == [f"{__name__}.DOUBLE"]

    def test_exported_modules_are_named_and_traced_ones_are_not(self):
        exported = torch.export.export(nn.Linear(1, 1), (torch.ones(1, 1),)).module()
        assert adopted_model.exported_parts(exported) == [type(exported).__name__]
        assert adopted_model.exported_parts(nn.Sequential(nn.ReLU(), exported)) == ["1"]
        assert adopted_model.exported_parts(torch.fx.symbolic_trace(CallsReLU())) == []

    def test_both_are_warned_of(self):
        exported = torch.export.export(nn.Linear(1, 1), (torch.ones(1, 1),)).module()
        with pytest.warns(AmpWarning, match="TorchScript has compiled 0:"):
            adopted_model.warn_of_graphs(nn.Sequential(SCRIPTED))
        with pytest.warns(AmpWarning, match=r"torch\.export has made 0;"):
            adopted_model.warn_of_graphs(nn.Sequential(exported))
        adopted_model.warn_of_graphs(nn.Sequential(nn.Linear(1, 1)))


class CallsReLU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x)


def with_gaps(*children: nn.Module) -> nn.Module:
    """A module with a parameter and a child that are not there, before those that are."""
    module = nn.Module()
    module.register_parameter("bias", None)
    module.register_module("downsample", None)
    for index, child in enumerate(children):
        module.add_module(str(index), child)
    return module


class TestDevice:
    @pytest.mark.parametrize(
        ("model", "first", "types"),
        [
            (nn.Linear(1, 1), "cpu", {"cpu"}),
            (nn.Linear(1, 1, device="meta"), "meta", set()),
            (nn.Sequential(nn.Linear(1, 1, device="meta"), nn.Linear(1, 1)), "meta", {"cpu"}),
            (nn.ReLU(), None, set()),
            (nn.Sequential(nn.ReLU(), nn.Sequential(nn.Linear(1, 1, device="meta")), nn.Linear(1, 1)), "meta", {"cpu"}),
            (with_gaps(nn.Linear(1, 1, device="meta")), "meta", set()),
            (with_gaps(), None, set()),
        ],
        ids=["cpu", "meta", "both", "no-parameters", "further-in", "gaps", "nothing-but-gaps"],
    )
    @pytest.mark.parametrize("way", ["python", "compiled"])
    def test_the_device_of_a_model_is_that_of_its_parameters(
        self, way, model, first, types, compiled_calls, select_calls
    ):
        select_calls(way)
        assert adopted_model.device_type(model) == first
        assert adopted_model.device_types(model) == types

    @pytest.mark.parametrize("way", ["python", "compiled"])
    def test_the_device_of_another_object_is_an_error(self, way, compiled_calls, select_calls):
        select_calls(way)
        with pytest.raises(AttributeError, match="_parameters"):
            adopted_model.device_type(object())

    @pytest.mark.gpu
    def test_a_model_that_was_moved_to_a_gpu_raises_when_it_is_called(self):
        model = nn.Linear(2, 2)
        amp.initialize(model, verbosity=0)
        model.to("cuda")
        with pytest.raises(UsageError, match=r"model\.to\('cuda'\)"):
            model(torch.ones(1, 2, device="cuda"))

    def test_every_call_of_an_adopted_model_checks_the_device(self):
        model = nn.Linear(2, 2)
        amp.initialize(model, verbosity=0)
        model(torch.ones(1, 2))
        # As if the model had been on GPUs until now.
        runtime.live.device_types.clear()
        runtime.live.device_types.update({"cuda", "xpu"})
        message = r"the model is on 'cpu', but was on 'cuda' and 'xpu' at amp\.initialize.*model\.to\('cpu'\)"
        with pytest.raises(UsageError, match=message):
            model(torch.ones(1, 2))

    def test_models_without_parameters_and_on_meta_are_on_no_wrong_device(self):
        adopted_model.check_device(nn.ReLU(), {"cuda"})
        adopted_model.check_device(nn.Linear(1, 1, device="meta"), {"cuda"})

    def test_known_devices_are_told_in_order(self):
        with pytest.raises(UsageError, match="was on 'cuda' and 'xpu'"):
            adopted_model.check_device(nn.Linear(1, 1), dict.fromkeys(["xpu", "cuda"]).keys())

    @pytest.mark.parametrize(("accelerator", "types"), [(None, {"cpu"}), (torch.device("xpu"), {"cpu", "xpu"})])
    def test_without_parameters_all_devices_of_the_machine_count(self, accelerator, types, monkeypatch):
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: accelerator)
        assert adopted_model.device_types_of([nn.ReLU(), nn.Linear(1, 1, device="meta")]) == types
        assert adopted_model.device_types_of([nn.ReLU(), nn.Linear(1, 1)]) == {"cpu"}

    def test_a_meta_model_may_get_memory_after_initialize(self):
        model = nn.Linear(2, 2, device="meta")
        amp.initialize(model, half_dtype=torch.bfloat16, verbosity=0)
        model.to_empty(device="cpu")
        assert model(torch.ones(1, 2)).dtype is torch.bfloat16


class Recording(nn.Module):
    """Returns its argument; notes its type, and a half tensor in a dict that it gets."""

    def __init__(self, dtype: torch.dtype | None = torch.float32) -> None:
        super().__init__()
        self.got: list[torch.dtype] = []
        if dtype is not None:
            self.weight = nn.Parameter(torch.ones(1, dtype=dtype))

    def forward(self, x: Tensor, found: dict[str, Tensor] | None = None, error: Exception | None = None) -> Tensor:
        self.got.append(x.dtype)
        if found is not None:
            found["half"] = torch.ones(2, dtype=HALF)
        if error is not None:
            raise error
        return x


def hooks_of(model: nn.Module) -> list[list[Any]]:
    return [list(getattr(model, table).values()) for table in (*HOOKS_AROUND_FORWARD, *STATE_HOOKS)]


class TestHooks:
    def test_around_the_forward_run_also_if_it_raises_until_they_are_undone(self):
        model, ledger, calls = Recording(), PatchLedger(), []
        adopted_model.hook_forward(model, ledger, lambda *_: calls.append("before"), lambda *_: calls.append("after"))
        model(torch.ones(1))
        with pytest.raises(ValueError, match="mine"):
            model(torch.ones(1), error=ValueError("mine"))
        assert calls == 2 * ["before", "after"]
        ledger.undo()
        assert hooks_of(model) == hooks_of(Recording())

    def test_of_the_state_dict_are_called_for_each_module_until_they_are_undone(self):
        model, ledger, calls = nn.Sequential(nn.Linear(1, 1)), PatchLedger(), []
        hooks = adopted_model.Hooks(
            *4 * [lambda *_: None],
            after_state_dict=lambda *_: calls.append("saved"),
            before_load_state_dict=lambda *_: calls.append("loading"),
            after_load_state_dict=lambda *_: calls.append("loaded"),
        )
        adopted_model.hook_state_dict(model.modules(), ledger, hooks)
        model.load_state_dict(model.state_dict())
        assert calls == ["saved", "saved", "loading", "loading", "loaded", "loaded"]
        ledger.undo()
        assert [hooks_of(each) for each in model.modules()] == 2 * [hooks_of(Recording())]

    @pytest.mark.parametrize(
        ("inputs", "outputs"), [(HALF, torch.float32), (torch.float32, HALF), (None, torch.float32)]
    )
    def test_cast_arguments_results_and_what_a_forward_leaves_until_they_are_undone(self, inputs, outputs):
        model, ledger, found = Recording(), PatchLedger(), {}
        adopted_model.hook_casts(model, ledger, inputs, outputs)
        given = torch.ones(1, dtype=HALF if inputs is None else torch.float32)
        assert model(given * 1, found).dtype is outputs
        assert model.got == [inputs or HALF]
        assert found["half"].dtype is outputs
        found.clear()
        with pytest.raises(ValueError, match="mine"):
            model(given, found, ValueError("mine"))
        assert found["half"].dtype is outputs
        ledger.undo()
        assert hooks_of(model) == hooks_of(Recording())

    @pytest.mark.parametrize("labelled", [True, False])
    def test_have_labels_if_asked(self, labelled, monkeypatch):
        labels: list[str] = []

        def under_label(label: str, call: Callable[..., Any], *args: Any) -> Any:
            labels.append(label)
            return call(*args)

        monkeypatch.setattr(cast_labels, "under_label", under_label)
        model = Recording()
        adopted_model.hook_casts(model, PatchLedger(), HALF, torch.float32, labelled=labelled)
        model(torch.ones(1))
        assert labels == (["arguments", "result"] if labelled else [])

    @pytest.mark.parametrize(
        ("inputs", "widens_copies", "got", "result"),
        [
            (HALF, False, torch.float32, HALF),
            (HALF, True, torch.float32, HALF),
            (torch.float32, True, torch.float32, torch.float32),
            (torch.float32, False, torch.float32, HALF),
        ],
    )
    def test_of_a_float32_copy_leave_its_types(self, inputs, widens_copies, got, result):
        model = Recording()
        adopted_model.hook_casts(model, PatchLedger(), inputs, HALF, widens_copies=widens_copies)
        copied = copy.deepcopy(model)
        assert copied(torch.ones(1, dtype=HALF)).dtype is result
        assert copied.got == [got]

    @pytest.mark.parametrize("active", [True, False, None])
    @pytest.mark.parametrize("dtype", [HALF, torch.float32, None], ids=str)
    def test_of_a_copy_cast_to_its_weights_type_unless_a_session_casts(self, dtype, active):
        model, x = Recording(dtype), torch.ones(2, dtype=HALF if dtype is torch.float32 else torch.float32)
        if active is not None:
            model.forward = types.SimpleNamespace(switch=types.SimpleNamespace(active=active))
        (given,), _ = adopted_model._cast_arguments_of_copy(model, (x,), {})
        assert given.dtype is (HALF if dtype is HALF and not active else torch.float32)

    def test_of_a_copy_in_the_session_cast_what_a_forward_leaves(self):
        model, found = Recording(), {}
        amp.initialize(model, opt_level="O2", half_dtype=HALF, verbosity=0)
        copy.deepcopy(model).to(HALF)(torch.ones(1), found)
        assert found["half"].dtype is torch.float32

    def test_of_a_float32_part_of_a_copy_leave_half_results_and_write_back(self):
        class Writing(Recording):
            def forward(self, x: Tensor) -> Tensor:
                return x.add_(1).to(HALF)

        model, x = Writing(), torch.ones(1, dtype=HALF)
        adopted_model.hook_casts(model, PatchLedger(), torch.float32, HALF, widens_copies=True)
        assert copy.deepcopy(model)(x).dtype is HALF
        assert x.item() == 2

    def test_of_arguments_become_those_of_a_copy_in_a_pickle(self):
        hook = adopted_model._Arguments()
        for copied in (copy.deepcopy(hook), pickle.loads(pickle.dumps(hook))):
            assert copied is adopted_model._cast_arguments_of_copy

    def test_and_forwards_of_amp_leave_a_copy_and_the_users_stay(self):
        model = Recording()
        amp.initialize(model, torch.optim.SGD(model.parameters()), opt_level="O2", verbosity=0)
        tables = (*HOOKS_AROUND_FORWARD, *STATE_HOOKS)
        assert all(map(adopted_model._is_of_amp, itertools.chain(*hooks_of(model))))
        assert [len(each) for each in hooks_of(model)] == [2, 2, 1, 1, 1]
        mine = functools.partial(lambda *_: None)
        keys = [max(getattr(model, table)) + 1 for table in tables]
        for key, table in zip(keys, tables, strict=True):
            getattr(model, table)[key] = mine
        copied = adopted_model.without_hooks(copy.deepcopy(model))
        assert [len(each) for each in hooks_of(copied)] == 5 * [1]
        assert "forward" not in vars(copied)

    def test_are_off_in_a_block_and_in_their_order_afterwards(self):
        model = Recording()
        amp.initialize(model, opt_level="O1", verbosity=0)
        model.register_forward_pre_hook(lambda *_: None)
        model.register_forward_hook(lambda *_: None)
        before, forward = [dict(getattr(model, table)) for table in HOOKS_AROUND_FORWARD], vars(model)["forward"]
        of_amp = {hook for hooks in before for hook in hooks.values() if adopted_model._is_of_amp(hook)}
        for block in (adopted_model.without_own_hooks([model]), adopted_model.as_without_amp(of_amp, model)):
            with block:
                assert [len(getattr(model, table)) for table in HOOKS_AROUND_FORWARD] == [1, 1]
                model.register_forward_hook(lambda *_: None)
                was_own = "forward" not in vars(model)
            assert [list(getattr(model, table).items()) for table in HOOKS_AROUND_FORWARD] == [
                list(each.items()) for each in before
            ]
            assert vars(model)["forward"] is forward
        assert was_own


class Calls(nn.Module):
    """Has another object's method raise an error."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.helper = Helper(error)

    def forward(self, x: Tensor) -> Tensor:
        return self.helper.run(x)


class Helper:
    def __init__(self, error: Exception) -> None:
        self.error = error

    def run(self, x: Tensor) -> Tensor:
        raise self.error


class TypesError(UsageError, RuntimeError):
    """An error of amp that is a RuntimeError."""


def note_of(error: Exception, *kept: str | type) -> str:
    """Returns the note that an error in a part of a model gets."""
    model = nn.Sequential(nn.ReLU(), Calls(error))
    with pytest.raises(type(error)):
        model(torch.ones(1))
    adopted_model.note_types(model, error, HALF, kept)
    return "".join(getattr(error, "__notes__", []))


class TestNotes:
    MIXED = "expected m1 and m2 to have the same dtype, but got: float != c10::BFloat16"
    NO_KERNEL = "\"some_kernel\" not implemented for 'BFloat16'"

    @pytest.mark.parametrize("text", [MIXED, NO_KERNEL])
    def test_name_the_part_and_what_is_kept_already(self, text):
        assert "keep_fp32=['head', 'Linear', '1'])" in note_of(RuntimeError(text), "head", nn.Linear)

    @pytest.mark.parametrize("error", [ValueError(MIXED), TypesError(MIXED), RuntimeError("no memory")], ids=repr)
    def test_are_for_torch_s_errors_of_types(self, error):
        assert note_of(error) == ""

    def test_are_not_added_to_others(self):
        error = RuntimeError(self.MIXED)
        error.add_note("mine")
        assert note_of(error) == "mine"


def test_parameters_are_named_as_their_model_names_them():
    model, other = nn.Sequential(nn.Linear(1, 1)), nn.Linear(1, 1, bias=False)
    amp.initialize([model, other], verbosity=0)
    assert runtime.live.adopted.parameter_names() == {
        id(model[0].weight): "0.weight",
        id(model[0].bias): "0.bias",
        id(other.weight): "weight",
    }


class TestSlowHalf:
    """GPUs of which there is none here: what torch tells of them is put in its place."""

    @pytest.fixture
    def gpu(self, monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
        def made(major: int, minor: int) -> None:
            monkeypatch.setattr(adopted_model, "_gpus", lambda _: [torch.device("cuda", 0)])
            monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (major, minor))
            monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Some GPU")

        return made

    @pytest.mark.parametrize("opt_level", ["O1", "O2", "O3"])
    @pytest.mark.parametrize(
        ("capability", "half", "hint"),
        [
            (
                (6, 1),
                torch.float16,
                r"6\.1, and no tensor cores for torch\.float16.* Type opt_level='O0' for float32\.$",
            ),
            ((6, 1), torch.bfloat16, r"6\.1, and no tensor cores for torch\.bfloat16.* for float32\.$"),
            (
                (7, 0),
                torch.bfloat16,
                r"7\.0, and no tensor cores for torch\.bfloat16.*; or half_dtype=torch\.float16\.$",
            ),
        ],
    )
    def test_a_gpu_without_tensor_cores_for_the_half_type_is_warned_of_once(
        self, gpu, capability, half, hint, opt_level, monkeypatch
    ):
        gpu(*capability)
        monkeypatch.setattr(adopted_model, "_gpus", lambda _: [torch.device("cuda", index) for index in range(2)])
        with pytest.warns(AmpWarning, match=hint) as told:
            amp.initialize(nn.Linear(2, 2), opt_level=opt_level, half_dtype=half, verbosity=0)
        assert len(told) == 1

    @pytest.mark.parametrize(
        ("capability", "half", "opt_level"),
        [((7, 0), torch.float16, "O1"), ((8, 0), torch.bfloat16, "O2"), ((6, 1), torch.float16, "O0")],
    )
    def test_a_gpu_with_tensor_cores_and_o0_are_not_warned_of(self, gpu, capability, half, opt_level):
        gpu(*capability)
        amp.initialize(nn.Linear(2, 2), opt_level=opt_level, half_dtype=half, verbosity=0)

    def test_gpus_of_other_makers_are_not_judged(self, gpu, monkeypatch):
        gpu(6, 1)
        monkeypatch.setattr(torch.version, "hip", "6.4")
        amp.initialize(nn.Linear(2, 2), opt_level="O1", half_dtype=torch.float16, verbosity=0)

    def test_each_gpu_of_a_model_is_looked_at_once(self):
        devices = [torch.device(name) for name in ("cpu", "cuda:1", "cuda:0", "cuda:1")]
        model: Any = types.SimpleNamespace(parameters=lambda: [types.SimpleNamespace(device=each) for each in devices])
        assert adopted_model._gpus(model) == devices[1:3]
