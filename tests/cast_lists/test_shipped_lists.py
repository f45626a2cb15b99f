"""Every entry of the shipped lists, called under casts.

The result is compared with the call without casts on arguments that were cast by hand, and with float32.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pytest
import torch
from helpers import casts_on, check_rows, dtype_name
from samples import (
    HALF_DTYPES,
    LIST_NAMES,
    SAMPLES,
    TOLERANCE,
    TORCH_WARNINGS,
    Entry,
    Maker,
    Sample,
    entries,
    is_method,
    lacks,
    resolve,
    tensors,
)

from ampatch.cast_lists.spellings import is_in_place
from ampatch.errors import BannedFunctionError

pytestmark = [pytest.mark.filterwarnings(warning) for warning in TORCH_WARNINGS]

ENTRIES = [entry for name in LIST_NAMES for entry in entries(name) if entry.is_in_force and not lacks(entry.path)]

COMPLEX = {torch.float32: torch.complex64, torch.float64: torch.complex128}

# What calls functions of other lists inside: equal to a call cast by hand within the tolerance of the half type only.
COMPOSITIONS = {"torch.nn.functional.linear_cross_entropy": "its layer runs in half"}


@dataclass(frozen=True)
class Call:
    """One way to make one sample call: which sample, by position or by keyword, and with which types in turn."""

    path: str
    sample: Sample
    form: str
    mix: tuple[torch.dtype, ...]

    def __str__(self) -> str:
        return f"{self.form}, {', '.join(map(dtype_name, self.mix))} {self.sample.note}".strip()


@dataclass
class Outcome:
    """What came of a call: the floating tensors handed over, and the result with its gradients, or the error."""

    made: list[torch.Tensor]
    result: object = None
    gradients: tuple[torch.Tensor, ...] = ()
    error: Exception | None = None


class CastByHand(Maker):
    """Makes what `Maker` makes, rounded to its dtypes, and casts it to one type."""

    def __init__(self, dtypes, target, requires_grad=False):
        super().__init__(dtypes, requires_grad=requires_grad)
        self._target = target

    def leaf(self, values, *, grad=True):
        leaf = super().leaf(values, grad=grad)
        self.made[-1] = leaf.detach().to(self._target).requires_grad_(leaf.requires_grad)
        return self.made[-1]


def calls(path: str, half: torch.dtype) -> Iterator[Call]:
    """Every call of an entry under one half type."""
    single = (half,), (torch.float32,), (torch.float64,)
    mixed = (half, torch.float32), (torch.float32, half)
    for sample in SAMPLES[path]:
        counter = Maker([half])
        sample.build(counter)
        mixes = (*single, *mixed) if len(counter.made) > 1 else single
        yield from (Call(path, sample, form, mix) for form, mix in itertools.product(sample.forms(), mixes))


def prepared(call: Call, maker: Maker) -> functools.partial[Outcome]:
    """The call with its arguments made, which is to happen where nothing casts."""
    args, kwargs = call.sample.arguments(maker, method=is_method(call.path), form=call.form)
    return functools.partial(outcome, call, maker.made, args, kwargs)


def outcome(call: Call, made: list[torch.Tensor], args: tuple, kwargs: dict) -> Outcome:
    if call.sample.random:
        torch.manual_seed(0)
    try:
        result = resolve(call.path)(*args, **kwargs)
    except (RuntimeError, BannedFunctionError, ValueError) as error:
        return Outcome(made, error=error)
    return Outcome(made, result, gradients(result, made) if call.sample.grad else ())


def gradients(result: object, made: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The gradients of what was made with one, for a fixed gradient of the result."""
    outputs = [tensor for tensor in tensors(result) if tensor.requires_grad]
    parts = [torch.view_as_real(out.resolve_conj()) if out.is_complex() else out for out in outputs]
    leaves = [tensor for tensor in made if tensor.requires_grad]
    if not leaves:
        return ()
    # Not all ones: a sum hands its operand an expanded gradient, which grouped_mm refuses.
    return torch.autograd.grad(parts, leaves, [torch.full_like(part, 0.5) for part in parts])


@functools.cache
def under_casts(namespace: str, half: torch.dtype) -> dict[Call, Outcome]:
    """What comes of all calls of a namespace's entries with casts on. Setting up takes longer than the calls."""
    here = {
        entry.path: None for entry in ENTRIES if entry.path.rpartition(".")[0] == namespace and half in entry.dtypes
    }
    ready = {
        call: prepared(call, Maker(call.mix, requires_grad=call.sample.grad))
        for path in here
        for call in calls(path, half)
    }
    with casts_on(half):
        return {call: run() for call, run in ready.items()}


def outcomes(entry: Entry, half: torch.dtype) -> list[tuple[Call, Outcome]]:
    everything = under_casts(entry.path.rpartition(".")[0], half)
    return [(call, everything[call]) for call in everything if call.path == entry.path]


def writes_in_place(entry: Entry) -> bool:
    return is_in_place(entry.path.rpartition(".")[2])


def target_of(entry: Entry, call: Call, half: torch.dtype) -> torch.dtype:
    """The type that a call's floating arguments are cast to, by the entry's list."""
    if call.mix == (torch.float64,):
        return torch.float64
    if writes_in_place(entry):
        return call.mix[0]
    if entry.list_name == "promote":
        return max(call.mix, key=lambda dtype: dtype.itemsize)
    return half if entry.list_name == "whitelist" else torch.float32


def refused(entry: Entry, call: Call) -> bool:
    """Whether a call is an error under casts."""
    if entry.list_name == "banned":
        return not {torch.float16, torch.bfloat16}.isdisjoint(call.mix)
    return entry.list_name == "blacklist" and writes_in_place(entry) and call.mix[0] in HALF_DTYPES


def rows(
    chosen: Iterable[Entry], half: torch.dtype, list_name: str | None = None
) -> Iterator[tuple[str, Entry, torch.dtype]]:
    """Those entries that name a half type and stand in a list, each with its name before it."""
    for entry in chosen:
        if half in entry.dtypes and list_name in (None, entry.list_name):
            yield f"{entry.list_name}-{entry.path}", entry, half


def assert_close(actual: torch.Tensor, expected: torch.Tensor, room: float | None = None) -> None:
    """Equal up to the last digits of the type; or, with ``room``, up to that part of the largest value."""
    if room is None:
        assert actual.dtype == expected.dtype
        torch.testing.assert_close(actual, expected, equal_nan=True)
    elif expected.numel() and (expected.is_floating_point() or expected.is_complex()):
        room *= max(1.0, expected.abs().max().item())
        torch.testing.assert_close(actual.to(expected.dtype), expected, rtol=0, atol=room, equal_nan=True)


def test_entries_are_patched_under_the_half_types_that_they_name(half):
    before = {entry.path: resolve(entry.path) for entry in ENTRIES}
    with casts_on(half):
        patched = {path for path, function in before.items() if resolve(path) is not function}
    assert patched == {entry.path for entry in ENTRIES if half in entry.dtypes}


class TestEveryEntry:
    @pytest.mark.parametrize("list_name", LIST_NAMES)
    @pytest.mark.covering(1)
    def test_an_entry_computes_as_if_its_arguments_were_cast_by_hand(self, list_name, half, subtests):
        def check(entry, half):
            compared = 0
            for call, actual in outcomes(entry, half):
                if refused(entry, call):
                    continue
                target = target_of(entry, call, half)
                hands_off = Maker(call.mix, requires_grad=call.sample.grad)
                by_hand = CastByHand(call.mix, target, requires_grad=call.sample.grad)
                expected = prepared(call, by_hand if call.sample.applies else hands_off)()
                if expected.error is not None:  # torch has no such kernel, amp or not
                    assert type(actual.error) is type(expected.error), call
                    continue
                assert actual.error is None, f"{call}: {actual.error}"
                room = TOLERANCE[half] if entry.path in COMPOSITIONS else None
                for got, wanted in zip(tensors(actual.result), tensors(expected.result), strict=True):
                    assert got.dtype == wanted.dtype, call
                    if call.sample.applies and (got.is_floating_point() or got.is_complex()):
                        assert got.dtype in (target, COMPLEX.get(target)), call
                    assert_close(got, wanted, room)
                for leaf, got, wanted in zip(
                    [leaf for leaf in actual.made if leaf.requires_grad],
                    actual.gradients,
                    expected.gradients,
                    strict=True,
                ):
                    assert got.dtype == leaf.dtype, call
                    assert_close(got, wanted.to(leaf.dtype), room)
                assert tensors(expected.result) or actual.result == expected.result
                compared += 1
            assert compared or all(refused(entry, call) for call, _ in outcomes(entry, half))

        check_rows(subtests, rows(ENTRIES, half, list_name), check)

    @pytest.mark.parametrize("list_name", LIST_NAMES)
    @pytest.mark.covering(1)
    def test_the_result_of_an_entry_is_close_to_float32(self, list_name, half, subtests):
        def check(entry, half):
            for call, actual in outcomes(entry, half):
                if actual.error is None and not call.sample.random:
                    reference = prepared(call, Maker([torch.float32]))()
                    for got, wanted in zip(tensors(actual.result), tensors(reference.result), strict=True):
                        assert_close(got, wanted, call.sample.tolerance * TOLERANCE[half])

        check_rows(subtests, rows(ENTRIES, half, list_name), check)


class TestInPlace:
    def test_an_in_place_entry_returns_its_tensor_with_its_dtype(self, half, subtests):
        def check(entry, half):
            for call, actual in outcomes(entry, half):
                if not refused(entry, call) and actual.error is None:
                    assert actual.result is actual.made[0], call
                    assert actual.made[0].dtype == call.mix[0], call

        check_rows(subtests, rows(filter(writes_in_place, ENTRIES), half), check)

    def test_a_blacklisted_in_place_form_on_half_is_an_error(self, half, subtests):
        def check(entry, half):
            errors = 0
            for call, actual in outcomes(entry, half):
                if refused(entry, call):
                    untouched = Maker(call.mix)
                    call.sample.build(untouched)
                    assert isinstance(actual.error, BannedFunctionError), call
                    assert torch.equal(actual.made[0], untouched.made[0]), call
                    errors += 1
            assert errors

        check_rows(subtests, rows(filter(writes_in_place, ENTRIES), half, "blacklist"), check)

    @pytest.mark.parametrize(
        ("path", "advice"),
        [("torch.exp_", "(exp)"), ("torch.Tensor.exp_", "(exp)"), ("torch.Tensor.__ipow__", "(pow)")],
    )
    def test_the_error_of_an_in_place_form_names_the_form_to_use(self, path, advice):
        entry = next(entry for entry in ENTRIES if entry.path == path)
        error = next(actual.error for call, actual in outcomes(entry, torch.float16) if refused(entry, call))
        assert path in str(error)
        assert advice in str(error)


class TestBanned:
    def test_a_banned_entry_with_a_half_argument_is_an_error(self, half, subtests):
        def check(entry, half):
            refusals = [actual for call, actual in outcomes(entry, half) if refused(entry, call)]
            assert refusals
            for actual in refusals:
                assert isinstance(actual.error, BannedFunctionError)
                assert entry.path in str(actual.error)
                assert entry.instead[1:] in str(actual.error)  # the sentence begins with a capital letter there

        check_rows(subtests, rows(ENTRIES, half, "banned"), check)
