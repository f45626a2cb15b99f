"""Tests the numbers of `amp.stats`: what they count, and that their names stay the same."""

from __future__ import annotations

import gc
import math
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import HALF_DTYPES, Slotted, dtype_name
from optimizers import backward
from torch import Tensor, nn

from ampatch import amp
from ampatch.errors import AmpWarning
from ampatch.opt_levels import LEVELS

SCALE = 2.0**8


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def begun(**options: Any) -> tuple[nn.Sequential, Any]:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"half_dtype": "float16", "loss_scale": "dynamic", "init_scale": SCALE, "verbosity": 0, **options}
    amp.initialize(model, optimizer, **settings)
    return model, optimizer


def loss_of(model: nn.Module) -> Tensor:
    return model(torch.ones(3, 4)).float().square().mean()


def train(model: nn.Module, optimizers: Any, *factors: float, **options: Any) -> None:
    for factor in factors:
        backward(loss_of(model) * factor, optimizers, **options)
        for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
            optimizer.step()
            optimizer.zero_grad()


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Losses here are NaN on purpose."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the loss of a skipped step", AmpWarning)
        yield


def test_stats_of_one_loss_and_one_optimizer() -> None:
    model, optimizer = begun()
    train(model, optimizer, 1.0, math.nan, 1.0, 1.0)
    numbers = amp.stats()
    counts = amp.cast_counts()
    assert numbers == {
        "loss_scale": SCALE / 2,
        "clean_steps": 2,
        "overflows": 1,
        "skipped_steps": 1,
        "casts": counts.casts,
        "cache_hits": counts.cache_hits,
        "cache_hit_rate": counts.cache_hits / (counts.casts + counts.cache_hits),
        "cached_bytes": 0,
        "patched_functions": numbers["patched_functions"],
    }
    assert numbers["patched_functions"] > 100


@pytest.mark.parametrize(
    ("level", "half"),
    [(name, half) for name, level in LEVELS.items() for half in HALF_DTYPES if level.half_dtype in (None, half)],
    ids=lambda value: value if isinstance(value, str) else dtype_name(value),
)
@pytest.mark.filterwarnings(
    "ignore:.* does not compute in float8:ampatch.errors.AmpWarning"
)  # the layers are too small
def test_stats_are_numbers_under_the_same_names_throughout(level: str, half: torch.dtype) -> None:
    model = network()
    optimizers = [torch.optim.SGD([each], lr=0.1) for each in (model[0].weight, model[2].weight)]
    amp.initialize(model, optimizers, opt_level=level, half_dtype=half, num_losses=2, verbosity=0)
    before = amp.stats()
    names = list(before)
    assert all(type(value) in (int, float) for value in before.values())
    train(model, optimizers, 1.0)
    assert list(amp.stats()) == names
    train(model, optimizers, math.inf, loss_id=1)
    del optimizers
    gc.collect()
    assert list(amp.stats()) == names
    assert all(type(value) in (int, float) for value in amp.stats().values())


def test_stats_of_several_losses_have_their_number_in_the_name() -> None:
    model, optimizer = begun(num_losses=2)
    train(model, optimizer, 1.0, math.nan)
    train(model, optimizer, 1.0, 1.0, loss_id=1)
    numbers = amp.stats()
    expected = {"loss_scale/0": SCALE / 2, "loss_scale/1": SCALE}
    expected |= {"clean_steps/0": 0, "clean_steps/1": 2, "overflows/0": 1, "overflows/1": 0}
    assert numbers == {**numbers, **expected}
    assert not {"loss_scale", "clean_steps", "overflows"} & numbers.keys()


@pytest.mark.parametrize("far", [False, True], ids=["", "far-away"])
def test_skipped_steps_are_counted_for_each_optimizer_and_outlive_it(far: bool, request: pytest.FixtureRequest) -> None:
    if far:
        request.getfixturevalue("far_away")
    model = network()
    optimizers = [torch.optim.AdamW(model[index].parameters(), fused=True) for index in (0, 2)]
    amp.initialize(model, optimizers, half_dtype="float16", verbosity=0)
    train(model, optimizers, 1.0, math.nan)
    train(model, optimizers[1], math.nan)

    def skipped() -> dict[str, float]:
        return {name: value for name, value in amp.stats().items() if "skipped" in name or "overflows" in name}

    assert skipped() == {"overflows": 2, "skipped_steps": 3, "skipped_steps/0": 1, "skipped_steps/1": 2}
    del optimizers[0]
    gc.collect()
    assert skipped() == {"overflows": 2, "skipped_steps": 3, "skipped_steps/0": 1, "skipped_steps/1": 2}


def test_steps_skipped_by_check_finite_are_counted():
    model, optimizer = begun(loss_scale=1.0, check_finite=True)
    train(model, optimizer, 1.0, math.nan, 1.0)
    model[0].bias.grad = torch.full_like(model[0].bias, math.nan)
    optimizer.step()
    expected = {"loss_scale": 1.0, "overflows": 2, "skipped_steps": 2, "clean_steps": 3}
    assert amp.stats() == {**amp.stats(), **expected}


@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
def test_overflow_that_check_finite_finds_counts_once_for_all_optimizers(fused: bool) -> None:
    model = network()
    optimizers = [torch.optim.AdamW(model[index].parameters(), fused=fused) for index in (0, 2)]
    amp.initialize(model, optimizers, half_dtype="bfloat16", check_finite=True, verbosity=0)

    def counts() -> tuple[float, ...]:
        numbers = amp.stats()
        return numbers["overflows"], numbers["skipped_steps/0"], numbers["skipped_steps/1"]

    train(model, optimizers, 1.0, math.nan, 1.0)
    assert counts() == (1, 1, 1)
    train(model, optimizers, math.nan, math.nan)  # two blocks are two overflows
    assert counts() == (3, 3, 3)
    # Of gradients that no block scaled, each optimizer has its own.
    for index, optimizer in zip((0, 2), optimizers, strict=True):
        model[index].bias.grad = torch.full_like(model[index].bias, math.nan)
        optimizer.step()
    assert counts() == (5, 4, 4)


def test_overflow_of_accumulated_blocks_with_a_step_between_counts_once() -> None:
    model = network()
    every, each = (torch.optim.SGD(model[index].parameters(), lr=0.1) for index in (0, 2))
    amp.initialize(model, [every, each], half_dtype="bfloat16", check_finite=True, verbosity=0)
    for factor in (math.nan, 1.0):
        backward(loss_of(model) * factor, [every, each])
        each.step()
        each.zero_grad()
    every.step()
    numbers = amp.stats()
    assert (numbers["overflows"], numbers["skipped_steps"]) == (1, 2)


def test_cached_bytes_are_those_of_this_moment() -> None:
    model, _ = begun()
    model(torch.ones(1, 4))
    model(torch.ones(1, 4))
    numbers = amp.stats()
    assert numbers["cached_bytes"] == 2 * sum(parameter.numel() for parameter in model.parameters())
    assert numbers["cache_hits"] == 4
    assert 0 < numbers["cache_hit_rate"] < 1
    amp.clear_cache()
    assert amp.stats()["cached_bytes"] == 0


def test_stats_of_init_have_the_same_names_before_an_optimizer() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with amp.init(half_dtype="float16"):
        names = amp.stats().keys()
        train(model, optimizer, 1.0)
        assert amp.stats().keys() == names


def test_stats_are_empty_if_amp_is_off() -> None:
    assert amp.stats() == {}
    amp.initialize(network(), enabled=False)
    assert amp.stats() == {}
    amp.deinitialize()
    begun()
    assert amp.stats() != {}
    amp.deinitialize()
    assert amp.stats() == {}


def test_failed_initialize_leaves_no_stats_of_its_optimizers() -> None:
    model, _ = begun()
    with pytest.raises(amp.AmpError):
        amp.initialize(
            model,
            [torch.optim.SGD(model.parameters(), lr=0.1), Slotted(model.parameters())],
            half_dtype="float16",
            loss_scale="dynamic",
            init_scale=SCALE,
            verbosity=0,
        )
    assert "skipped_steps/0" not in amp.stats()
