"""Adopted models: which objects are refused, on which device a model is, and the hooks around its forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from ampatch import amp
from ampatch.errors import AmpWarning, OptionError, UsageError
from ampatch.patching import adopted_model
from ampatch.runtime import runtime


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

    def test_data_parallel_is_refused_with_the_right_order(self):
        order = r"model, optimizer = amp\.initialize\(model, optimizer\); model = DataParallel\(model\)"
        with pytest.raises(OptionError, match=order):
            adopted_model.check_model(nn.DataParallel(nn.Linear(1, 1)))

    @pytest.mark.usefixtures("process_group")
    def test_distributed_data_parallel_is_refused_with_the_right_order(self):
        order = r"model, optimizer = amp\.initialize\(model, optimizer\); model = DistributedDataParallel\(model\)"
        with pytest.raises(OptionError, match=order):
            adopted_model.check_model(nn.parallel.DistributedDataParallel(nn.Linear(1, 1)))


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

    def test_a_meta_model_may_get_memory_after_initialize(self):
        model = nn.Linear(2, 2, device="meta")
        amp.initialize(model, half_dtype=torch.bfloat16, verbosity=0)
        model.to_empty(device="cpu")
        assert model(torch.ones(1, 2)).dtype is torch.bfloat16


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
                (7, 5),
                torch.bfloat16,
                r"7\.5, and no tensor cores for torch\.bfloat16.*; or half_dtype=torch\.float16\.$",
            ),
        ],
    )
    def test_a_gpu_without_tensor_cores_for_the_half_type_is_warned_of_once(
        self, gpu, capability, half, hint, opt_level
    ):
        gpu(*capability)
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
