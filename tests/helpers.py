"""Words of the domain, for tests of every module."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import pickle
import random
import subprocess
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import covered
from hypothesis import settings as hypothesis_settings
from torch import Tensor, nn

from ampatch import amp
from ampatch.runtime import runtime

HALF_DTYPES = (torch.float16, torch.bfloat16)

# What the fixture `write` gives.
Write = Callable[..., Path]

# What is to hold on every device: on a GPU where there is one.
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# Of several processes that gather and scatter, which on GPUs they do by way of NCCL only.
DEVICES_OF_EACH = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs a GPU for each of four processes"),
        ],
    ),
]


def dtype_name(dtype: torch.dtype) -> str:
    """A readable id for parametrised tests."""
    return str(dtype).removeprefix("torch.")


def check_rows(subtests: pytest.Subtests, rows: Iterable[tuple[Any, ...]], check: Callable[..., None]) -> None:
    """Checks each row of a table, and names every row that fails.

    Args:
        subtests: pytest's fixture.
        rows: the name of each, and the arguments of the check.
        check: raises AssertionError.

    Raises:
        AssertionError: there are no rows.
    """
    found = 0
    for name, *arguments in rows:
        found += 1
        with subtests.test(name):
            check(*arguments)
    assert found, "there are no rows"


def few_of(cases: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Returns cases for a loop within a test: as few as have every two values, and in `make slow` every three."""
    return [cases[number] for number in covered(cases, 3 if is_thorough() else 2)]


@functools.cache
def combinations(*settings: Iterable[Hashable]) -> list[tuple[Any, ...]]:
    """Returns few combinations of settings, as `few_of` chooses them.

    Args:
        settings: the values of each, as tuples.
    """
    return few_of(list(itertools.product(*settings)))


def is_thorough() -> bool:
    """Whether a test is to take the time for every case: in `make slow`, which draws more examples as well."""
    return hypothesis_settings.get_current_profile_name() == "thorough"


@contextlib.contextmanager
def casts_on(half_dtype: torch.dtype = torch.bfloat16, **options: Any) -> Iterator[None]:
    """Functions cast by the shipped lists (and what ``options`` lay over them) inside the block, whoever calls them."""
    with amp.init(half_dtype=half_dtype, verbose=False, **options):
        yield


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    """Equal dtype, shape and every bit; NaN equals NaN."""
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    as_bytes = [tensor.detach().contiguous().cpu().flatten().view(torch.uint8) for tensor in (actual, expected)]
    assert torch.equal(*as_bytes)


def _flat(value: Any) -> Iterator[Any]:
    """What a nested state holds, tensors and plain values, in order."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _flat(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _flat(item)
    else:
        yield value


def assert_same_state(actual: Any, expected: Any) -> None:
    """Nested states with the same plain values, and tensors of the same bits."""
    pairs = list(zip(_flat(actual), _flat(expected), strict=True))
    assert pairs
    for found, wanted in pairs:
        if isinstance(wanted, Tensor):
            assert_same_bits(found, wanted)
        else:
            assert found == wanted


def pickled(value: Any) -> Any:
    """A value as another process would get it."""
    return pickle.loads(pickle.dumps(value))


COPIES = pytest.mark.parametrize("copied", [copy.deepcopy, pickled], ids=["copy", "pickle"])


class Calls(nn.Module):
    """Calls a function in its forward."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


class _Heard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, hear: Callable[[Tensor], object]) -> Tensor:
        ctx.hear = hear
        return value * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.hear(gradient)
        return gradient, None


def heard(value: Tensor, hear: Callable[[Tensor], object]) -> Tensor:
    """The same values; in the backward pass a user's function of autograd hands their gradient to ``hear``."""
    return _Heard.apply(value, hear)  # type: ignore[no-any-return]


class Slotted:
    """An optimizer on which no `step` can be put."""

    __slots__ = ("__weakref__", "param_groups")

    def __init__(self, parameters: Any) -> None:
        self.param_groups = [{"params": list(parameters)}]

    def step(self) -> None: ...

    def zero_grad(self) -> None: ...


# A process that has used DistributedDataParallel by way of gloo now and then aborts when it exits, in one of ten runs
# or so, with amp or without (torch 2.13).
_TORCHS_OWN_ABORT = "terminate called without an active exception"


def completed(command: Sequence[str], cwd: Path, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """What became of a command, with what it printed; it is started again where torch itself has aborted it."""
    for _ in range(4):
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=cwd, env=env, check=False)
        if _TORCHS_OWN_ABORT not in done.stderr:
            break
    return done


class Disturbable(nn.Module):
    """Has all that could change: batch norm, dropout, gradients, numbers from Python, an input that it writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))

    def forward(self, x: Tensor, bias: float = 0.0) -> Tensor:
        x.add_(bias + random.random())
        return self.body(x)


@contextlib.contextmanager
def undisturbed(model: nn.Module, inputs: Tensor) -> Iterator[None]:
    """Asserts that a float32 model in training, its inputs, random numbers and torch are afterwards what they were."""
    state = copy.deepcopy(model.state_dict())
    gradients = [each.grad.clone() for each in model.parameters()]
    hooks = [dict(module._forward_hooks) for module in model.modules()]
    given, of_torch, of_python = inputs.clone(), torch.get_rng_state(), random.getstate()
    yield
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(each.grad, old) for each, old in zip(model.parameters(), gradients, strict=True))
    assert all(each.dtype is torch.float32 for each in model.parameters())
    assert [dict(module._forward_hooks) for module in model.modules()] == hooks
    assert torch.equal(inputs, given)
    assert torch.equal(torch.get_rng_state(), of_torch)
    assert random.getstate() == of_python
    assert runtime.live is None
    assert model.training


def in_thread(function: Callable[[], Any]) -> Any:
    """What a function returns in a thread of its own."""
    results: list[Any] = []
    together([lambda: results.append(function())])
    return results[0]


def together(functions: Iterable[Callable[[], object]]) -> None:
    """Runs functions in threads of their own, which begin at once; the first error in one of them is raised here."""

    def run(function: Callable[[], object]) -> None:
        try:
            barrier.wait(60)
            function()
        except BaseException as error:  # noqa: BLE001 - raised below, where the test is
            errors.append(error)

    functions = list(functions)
    barrier, errors = threading.Barrier(len(functions)), []
    threads = [threading.Thread(target=run, args=[function]) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        raise error
