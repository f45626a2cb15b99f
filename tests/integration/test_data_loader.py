"""Of the workers of a `DataLoader`: forked ones cast as their parent does, spawned ones know nothing of amp."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same_bits
from optimizers import backward
from small_nets import EACH_DEVICE, EACH_HALF, EACH_LEVEL
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from ampatch import amp


class Products(Dataset[dict[str, Tensor]]):
    """Items that are made by calling listed functions, with parameters and without."""

    def __init__(self) -> None:
        self.layer = nn.Linear(4, 3)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        value = torch.full((2, 4), float(index))
        with torch.no_grad():
            return {
                "whitelist": torch.mm(value, value.t()),
                "operator": value @ value.t(),
                "parameter": self.layer(value),
                "half": torch.mm(value.half(), value.t().half()),
                "blacklist": F.softmax(value.to(torch.float16), -1),
                "promote": torch.dot(value[0], value[1].half()) if _casts() else torch.dot(value[0], value[1]),
                "off": _off(value),
            }


def _casts() -> bool:
    return F.softmax(torch.ones(1, dtype=torch.float16), -1).dtype is torch.float32


@amp.disable_casts()
def _off(value: Tensor) -> Tensor:
    return torch.mm(value, value.t())


class Holds(Products):
    """A data set that holds what its loop is about, as many a script's does, and uses it."""

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        super().__init__()
        self.model, self.optimizer = model, optimizer

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        with torch.no_grad():
            return {"output": self.model(torch.full((2, 4), float(index)))}


def collate(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Runs in the worker, and calls listed functions too."""
    batch = {name: torch.stack([item[name] for item in items]) for name in items[0]}
    batch["collated"] = torch.mm(torch.ones(2, 2), torch.ones(2, 2))
    return batch


def warnings_are_errors(_: int) -> None:
    warnings.simplefilter("error")


def load(data: Dataset[Any], method: str, **options: Any) -> list[dict[str, Tensor]]:
    """All batches, from two workers that are started in one way; a warning in one of them is an error here."""
    start = {"num_workers": 2, "multiprocessing_context": method, "worker_init_fn": warnings_are_errors, "timeout": 120}
    return list(DataLoader(data, batch_size=2, collate_fn=collate, **start, **options))


def types(batches: list[dict[str, Tensor]]) -> dict[str, torch.dtype]:
    (found,) = {tuple((name, tensor.dtype) for name, tensor in batch.items()) for batch in batches}
    return dict(found)


def in_types(half: torch.dtype) -> dict[str, torch.dtype]:
    """What the batches are in where functions are cast to this type, or, for float32, where they are not."""
    casts = half is not torch.float32
    return {
        **dict.fromkeys(["whitelist", "operator", "parameter"], torch.float32),  # none of an adopted model's
        "half": torch.float16,  # their own
        "blacklist": torch.float32 if casts else torch.float16,
        **dict.fromkeys(["promote", "off", "collated"], torch.float32),
    }


def adopt(device: str = "cpu", half: torch.dtype = torch.bfloat16, level: str = "O1") -> tuple[nn.Module, Any]:
    """A model that is being trained."""
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 3)).to(device)
    optimizer = torch.optim.Adam(model.parameters())
    amp.initialize(model, optimizer, half_dtype=half, opt_level=level, verbosity=0)
    backward(model(torch.ones(2, 4, device=device)).float().sum(), optimizer)
    optimizer.step()
    return model, optimizer


class TestForkedWorkers:
    @EACH_DEVICE
    @EACH_HALF
    @EACH_LEVEL
    @pytest.mark.covering(1)
    def test_forked_workers_cast_as_their_parent(self, device, half, level):
        data = Products()
        adopt(device, half, level)
        # Tensors in a worker are on the CPU; those of a model on a GPU are what is cast then.
        casts = level == "O1" and device == "cpu"
        assert types(load(data, "fork")) == in_types(half if casts else torch.float32)

    def test_workers_forked_within_disable_casts_do_not_cast(self):
        data = Products()
        adopt()
        with amp.disable_casts():
            assert types(load(data, "fork")) == in_types(torch.float32)

    def test_forked_workers_outlive_deinitialize(self):
        data = Products()
        adopt()
        loader = DataLoader(data, batch_size=2, num_workers=1, multiprocessing_context="fork", persistent_workers=True)
        with_casts = next(iter(loader))["blacklist"]
        amp.deinitialize()
        assert next(iter(loader))["blacklist"].dtype is with_casts.dtype is torch.float32

    @EACH_LEVEL
    def test_forked_workers_use_an_adopted_model(self, level):
        model, optimizer = adopt(level=level)
        with torch.no_grad():
            expected = model(torch.full((2, 4), 3.0))
        assert_same_bits(load(Holds(model, optimizer), "fork")[-1]["output"][-1], expected)

    @pytest.mark.gpu
    def test_forked_workers_cast_parameters_if_the_parent_uses_a_gpu(self):
        """Which cannot be asked whether it captures a graph there."""
        data = Products()
        adopt("cuda")
        amp.initialize(data.layer, half_dtype=torch.bfloat16, verbosity=0)
        assert types(load(data, "fork"))["parameter"] is torch.bfloat16

    @pytest.mark.gpu
    def test_batches_of_forked_workers_are_pinned(self):
        data = Products()
        adopt("cuda")
        assert all(tensor.is_pinned() for batch in load(data, "fork", pin_memory=True) for tensor in batch.values())


@pytest.mark.slow
@pytest.mark.either_way
class TestSpawnedWorkers:
    def test_spawned_workers_do_not_cast(self):
        data = Products()
        adopt()
        assert types(load(data, "spawn")) == in_types(torch.float32)

    @EACH_LEVEL
    def test_spawned_workers_use_an_adopted_model_without_casts(self, level):
        model, optimizer = adopt(level=level, half=torch.float16)
        found = load(Holds(model, optimizer), "spawn")[-1]["output"][-1]
        with torch.no_grad(), amp.disable_casts():
            expected = model(torch.full((2, 4), 3.0))
        assert found.dtype is torch.float32
        assert_same_bits(found, expected)
