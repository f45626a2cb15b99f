"""Each operator of the extension has the bits of plain arithmetic and of torch's kernels, on the CPU and on a GPU.

Hypothesis draws the lists; the values of a tensor follow from a seed.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import ModuleType

import pytest
import torch
from helpers import HALF_DTYPES, assert_same_bits, dtype_name
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ampatch.native import calls, extension, extension_kernels, kernels, torch_kernels

DTYPES = (*HALF_DTYPES, torch.float32)
NOT_FINITE = (math.inf, -math.inf, math.nan)

# As much as a task of the CPU or a block of threads takes at a time, in csrc/lists.h.
CHUNK = 16384

on_each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
with_each_implementation = pytest.mark.parametrize(
    "operators", [extension_kernels, torch_kernels], ids=["extension", "torch"]
)


@pytest.fixture(autouse=True)
def _has_kernels(request: pytest.FixtureRequest, compiled: ModuleType) -> None:
    library = extension.loaded()
    if "gpu" in request.keywords and library is not None and not library.architectures:
        pytest.skip("the extension has kernels for the CPU alone, as there is no nvcc")


# What is drawn

LENGTHS = st.one_of(
    st.integers(0, 40),
    st.sampled_from([63, 64, 65, 127, 128, 129, 255, 256, 257, 260, 1000]),
    st.sampled_from([CHUNK - 1, CHUNK, CHUNK + 1, CHUNK + 4, CHUNK + 8, 2 * CHUNK - 4, 2 * CHUNK + 1, 2 * CHUNK + 9]),
)

# Of a tensor of about so many elements.
SHAPES: dict[str, Callable[[int], tuple[int, ...]]] = {
    "scalar": lambda _length: (),
    "vector": lambda length: (length,),
    "matrix": lambda length: (length // 3, 3),
    "cube": lambda length: (2, length // 10, 5),
    "image": lambda length: (2, 3, (length + 11) // 12, 2),
}

LAYOUTS = ("contiguous", "transposed", "channels last", "every second", "rows with gaps")
READ_ONLY_LAYOUTS = (*LAYOUTS, "expanded")

CONTENTS = ("ordinary", "tiny", "subnormal", "largest", "any bits")


@dataclass(frozen=True)
class Lay:
    """How a tensor lies in memory.

    Attributes:
        layout: one of `READ_ONLY_LAYOUTS`.
        offset: so many elements off an address that 16 bytes divide.
    """

    layout: str = "contiguous"
    offset: int = 0


@dataclass(frozen=True)
class Drawn:
    """A tensor, or a pair of them.

    Attributes:
        shape: its own.
        dtype: of the first of a pair; the second is of float32.
        contents: one of `CONTENTS`.
        poison: what is put where, as a fraction of all elements: 0 is the first of them, 1 the last.
        narrow: how the first lies.
        wide: how the second does.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    contents: str = "ordinary"
    poison: tuple[float, float] | None = None
    narrow: Lay = Lay()
    wide: Lay = Lay()


def lays(layouts: tuple[str, ...]) -> st.SearchStrategy[Lay]:
    others = st.builds(Lay, st.sampled_from(layouts), st.sampled_from([0, 1, 1, 2, 3, 4]))
    return st.one_of(st.just(Lay()), st.just(Lay(offset=1)), others)


def drawn(
    narrow_layouts: tuple[str, ...] = LAYOUTS,
    wide_layouts: tuple[str, ...] = LAYOUTS,
    contents: tuple[str, ...] = CONTENTS,
) -> st.SearchStrategy[list[Drawn]]:
    """Lists of up to 40, few of which are large."""
    each = st.builds(
        Drawn,
        st.builds(lambda kind, length: SHAPES[kind](length), st.sampled_from(list(SHAPES)), LENGTHS),
        st.sampled_from(DTYPES),
        st.sampled_from(contents),
        st.one_of(st.none(), st.none(), st.tuples(st.sampled_from([0.0, 1.0, 0.5, 0.9]), st.sampled_from(NOT_FINITE))),
        lays(narrow_layouts),
        lays(wide_layouts),
    )
    return st.one_of(st.lists(each, max_size=5), st.lists(each, max_size=40))


SEEDS = st.integers(0, 2**32 - 1)
FACTORS = st.sampled_from([2.0**-16, 0.5, 1.0, 4.0, 0.3, 1.7, 2.0**20, 1 / 65537, 2.0**-30])
FLAGS = st.sampled_from([0.0, 1.0])

# What every run tries: one of each dtype and length that a fault in a tail, or beyond a chunk, would show in.
ENDS = [
    Drawn((length,), dtype, poison=poison)
    for dtype in DTYPES
    for length, poison in [
        (0, None),
        (1, None),
        (3, None),
        (CHUNK + 1, None),
        (2 * CHUNK + 7, None),
    ]
]

# Each way in which a pair can lie beside the borders of 16 bytes that a GPU reads at once.
ALIGNMENTS = [
    Drawn((length,), dtype, narrow=Lay(offset=one), wide=Lay(offset=other))
    for dtype in DTYPES
    for length, ones, others in [(45, range(8), range(4)), (CHUNK + 45, [1, 4], [0, 1])]
    for one in ones
    for other in others
]

draws = settings(
    max_examples=settings().max_examples * 3 // 2,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def values_of(each: Drawn, seed: int, dtype: torch.dtype) -> Tensor:
    """What a tensor holds, contiguous."""
    generator = torch.Generator().manual_seed(seed)
    count = math.prod(each.shape)
    bits, integer = (32, torch.int32) if dtype is torch.float32 else (16, torch.int16)
    limits = torch.finfo(dtype)
    if each.contents == "ordinary":
        values = torch.randn(count, generator=generator).mul_(2.0 ** (seed % 17 - 8)).to(dtype)
    elif each.contents == "tiny":  # around the least float16
        values = torch.randn(count, generator=generator).mul_(2.0**-25).to(dtype)
    elif each.contents == "subnormal":
        values = torch.randint(-100, 101, (count,), generator=generator).to(dtype) * limits.smallest_normal * limits.eps
    elif each.contents == "largest":
        values = torch.randint(0, 2, (count,), generator=generator).mul_(2).sub_(1).to(dtype) * limits.max
    else:
        words = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (count,), generator=generator)
        values = words.to(integer).view(dtype)
        values = values.where(values.isfinite(), 1)
    if each.poison is not None and count:
        where, what = each.poison
        values[round(where * (count - 1))] = what
    return values.view(each.shape)


def strides_of(shape: tuple[int, ...], layout: str) -> tuple[int, ...]:
    like = torch.empty(shape, device="meta")
    if layout == "transposed":
        return torch.empty(shape[::-1], device="meta").stride()[::-1]
    if layout == "channels last" and len(shape) == 4:
        return like.contiguous(memory_format=torch.channels_last).stride()
    if layout == "every second":
        return tuple(2 * stride for stride in like.stride())
    if layout == "rows with gaps" and len(shape) > 1:
        return torch.empty((*shape[:-1], shape[-1] + 1), device="meta").stride()
    if layout == "expanded" and shape:
        return (0, *like.stride()[1:])
    return like.stride()


class Laid:
    """A tensor in memory of its own, with elements around and between that are not part of it.

    Attributes:
        tensor: what an operator is handed.
    """

    def __init__(self, values: Tensor, lay: Lay, device: str) -> None:
        strides = strides_of(tuple(values.shape), lay.layout)
        extent = 1 + sum((size - 1) * stride for size, stride in zip(values.shape, strides, strict=True) if size)
        self._around = torch.full((8 + lay.offset + extent + 8,), 7.0, dtype=values.dtype)
        self._where = (tuple(values.shape), strides, 8 + lay.offset)
        if values.numel():
            values = values[:1] if 0 in strides else values
            self._around.as_strided(values.shape, *self._where[1:]).copy_(values)
        self._around = self._around.to(device)
        self._storage = self._around.clone()
        self.tensor = self._storage.as_strided(*self._where)

    def assert_only_it_was_written(self) -> None:
        now = self._storage.clone()
        now.as_strided(*self._where).copy_(self._around.as_strided(*self._where))
        assert_same(now, self._around)

    def assert_unwritten(self) -> None:
        assert_same(self._storage, self._around)


def lay_out(
    list_: list[Drawn], seed: int, device: str, *, wide_from: str = "ordinary"
) -> tuple[list[Laid], list[Laid]]:
    """The first of each pair, and the second, which is always finite."""
    narrow = [Laid(values_of(each, seed + index, each.dtype), each.narrow, device) for index, each in enumerate(list_)]
    wide = [
        Laid(
            values_of(Drawn(each.shape, torch.float32, wide_from), seed + 1000 + index, torch.float32),
            each.wide,
            device,
        )
        for index, each in enumerate(list_)
    ]
    return narrow, wide


def tensors(laid: list[Laid]) -> list[Tensor]:
    return [each.tensor for each in laid]


# What is compared


def scalar(value: float, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(value, dtype=dtype, device=device)


def assert_same(actual: Tensor, expected: Tensor) -> None:
    """Equal dtype, shape and every bit, those of the zeros too; one NaN is as good as another."""
    nan = expected.isnan()
    assert torch.equal(actual.isnan(), nan)
    assert_same_bits(actual.masked_fill(nan, 0), expected.masked_fill(nan, 0))


def assert_all_same(actual: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert_same(one, other)


def overflow(tensors: list[Tensor]) -> bool:
    return not all(bool(tensor.isfinite().all()) for tensor in tensors)


def shown(full: Tensor, dtype: torch.dtype) -> Tensor:
    """A master's gradient rounded to a half type, except that nonzero elements stay nonzero."""
    rounded = full.to(dtype)
    if dtype is torch.float32:
        return rounded
    least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    return torch.where((rounded == 0) & (full != 0), torch.full_like(full, least).copysign(full).to(dtype), rounded)


@dataclass(frozen=True)
class Operator:
    """An operator on pairs of lists.

    Attributes:
        run: calls the operator of a module with the narrow list, the wide one, the factor and the flag.
        expected: returns what a pair of tensors becomes.
        writes: which of the lists it writes to.
        checks: True if it sets the flag where narrow tensors are not finite.
    """

    run: Callable[..., None]
    expected: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    writes: tuple[str, ...]
    checks: bool = True


def unscaled(narrow: Tensor, _wide: Tensor, factor: Tensor) -> Tensor:
    return narrow.float() * factor


def added(narrow: Tensor, wide: Tensor, factor: Tensor) -> Tensor:
    return wide + narrow.float() * factor


OPERATORS = {
    "unscale_": Operator(
        lambda operators, narrow, _, *given: operators.unscale_(narrow, *given),
        lambda *pair: (unscaled(*pair).to(pair[0].dtype), pair[1]),
        ("narrow",),
    ),
    "unscale_copy": Operator(
        lambda operators, *given: operators.unscale_copy(*given, False),
        lambda *pair: (pair[0], unscaled(*pair)),
        ("wide",),
    ),
    "unscale_copy, written back": Operator(
        lambda operators, *given: operators.unscale_copy(*given, True),
        lambda *pair: (shown(unscaled(*pair), pair[0].dtype), unscaled(*pair)),
        ("narrow", "wide"),
    ),
    "unscale_add": Operator(
        lambda operators, *given: operators.unscale_add(*given, False),
        lambda *pair: (pair[0], added(*pair)),
        ("wide",),
    ),
    "unscale_add, written back": Operator(
        lambda operators, *given: operators.unscale_add(*given, True),
        lambda *pair: (shown(added(*pair), pair[0].dtype), added(*pair)),
        ("narrow", "wide"),
    ),
    "copy_to_half": Operator(
        lambda operators, narrow, wide, *_: operators.copy_to_half(wide, narrow),
        lambda narrow, wide, _: (wide.to(narrow.dtype), wide),
        ("narrow",),
        checks=False,
    ),
    "copy_to_half_grads": Operator(
        lambda operators, narrow, wide, *_: operators.copy_to_half_grads(wide, narrow),
        lambda narrow, wide, _: (shown(wide, narrow.dtype), wide),
        ("narrow",),
        checks=False,
    ),
}


@on_each_device
@pytest.mark.parametrize("name", OPERATORS)
@draws
@given(
    list_=drawn(READ_ONLY_LAYOUTS, READ_ONLY_LAYOUTS),
    masters=st.sampled_from(CONTENTS),
    seed=SEEDS,
    factor=FACTORS,
    flag=FLAGS,
)
@example(list_=ENDS, masters="ordinary", seed=1, factor=0.3, flag=0.0)
@example(list_=ALIGNMENTS, masters="ordinary", seed=1, factor=0.3, flag=0.0)
@example(list_=ENDS, masters="tiny", seed=1, factor=0.3, flag=0.0)
def test_operators_have_the_bits_of_plain_arithmetic_and_of_torch(device, name, list_, masters, seed, factor, flag):
    operator = OPERATORS[name]
    writable = {side: Lay() for side in operator.writes}  # elements of an expanded tensor share their memory
    list_ = [
        replace(each, **{side: lay for side, lay in writable.items() if getattr(each, side).layout == "expanded"})
        for each in list_
    ]
    narrow, wide = lay_out(list_, seed, device, wide_from=masters)
    others = lay_out(list_, seed, device, wide_from=masters)
    found_inf, theirs, inv_scale = scalar(flag, device), scalar(flag, device), scalar(factor, device)
    expected = [operator.expected(*pair, inv_scale) for pair in zip(tensors(narrow), tensors(wide), strict=True)]
    found = flag or (operator.checks and overflow(tensors(narrow)))

    operator.run(extension_kernels, tensors(narrow), tensors(wide), inv_scale, found_inf)
    operator.run(torch_kernels, *map(tensors, others), inv_scale, theirs)

    for laid, other, column in zip((narrow, wide), others, range(2), strict=True):
        assert_all_same(tensors(laid), [pair[column] for pair in expected])
        assert_all_same(tensors(laid), tensors(other))
    for side, laid in (("narrow", narrow), ("wide", wide)):
        for each in laid:
            each.assert_only_it_was_written() if side in operator.writes else each.assert_unwritten()
    assert found_inf.item() == theirs.item() == found
    assert inv_scale == scalar(factor, device)


class TestUnscale:
    @on_each_device
    @pytest.mark.parametrize("offset", [0, 1])
    @pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
    def test_a_value_that_is_not_finite_is_found_at_any_place(self, device, dtype, offset):
        for length in (1, 2, 3, 4, 5, 8, 9, 31, CHUNK - 1, CHUNK + 1, 3 * CHUNK, 2 * CHUNK + 5):
            ends = {0, 1, length // 2, length - 2, length - 1, CHUNK - 1, CHUNK, 2 * CHUNK - 1, 2 * CHUNK}
            for position in sorted(ends & set(range(length))):
                for value in NOT_FINITE:
                    grad = torch.ones(offset + length, dtype=dtype, device=device)[offset:]
                    beside = torch.ones(3, dtype=dtype, device=device)
                    grad[position] = value
                    found_inf = scalar(0.0, device)
                    extension_kernels.unscale_([beside, grad, beside], scalar(0.5, device), found_inf)
                    assert found_inf == 1, (length, position, value)
                    assert_same(grad[position], torch.full_like(grad[position], value))

    @on_each_device
    def test_many_tensors_each_with_a_value_of_its_own(self, device):
        grads = [torch.full((index % 5 + 1,), float(index), device=device) for index in range(5000)]
        found_inf = scalar(0.0, device)

        extension_kernels.unscale_(grads, scalar(0.5, device), found_inf)

        lengths = torch.tensor([index % 5 + 1 for index in range(5000)])
        assert torch.equal(torch.cat(grads).cpu(), torch.arange(5000.0).mul(0.5).repeat_interleave(lengths))
        assert found_inf == 0

    @on_each_device
    def test_a_nan_in_one_of_many_tensors_is_found(self, device):
        for place in (0, 1023, 1024, 1025, 2047, 2048, 2999):
            grads = [torch.ones(2, device=device) for _ in range(3000)]
            grads[place][1] = math.nan
            found_inf = scalar(0.0, device)
            extension_kernels.unscale_(grads, scalar(0.5, device), found_inf)
            assert found_inf == 1

    @on_each_device
    @with_each_implementation
    @pytest.mark.parametrize("write_back", [False, True])
    def test_earlier_values_of_masters_are_no_overflow(self, device, operators, write_back):
        most = torch.finfo(torch.float32).max
        grads = list(torch.full((2, 9), most, device=device).unbind())
        copied, added = torch.tensor([math.nan, math.inf, *[most] * 7], device=device).repeat(2, 1).unbind()
        found_inf = scalar(0.0, device)

        operators.unscale_copy(grads[:1], [copied], scalar(1.0, device), found_inf, write_back)
        operators.unscale_add(grads[1:], [added], scalar(1.0, device), found_inf, write_back)

        assert copied.eq(most).all()
        assert_same(added, torch.tensor([math.nan, *[math.inf] * 8], device=device))
        assert found_inf == 0


class TestFoundInfNorm:
    @on_each_device
    @draws
    @given(list_=drawn(READ_ONLY_LAYOUTS, contents=("ordinary",)), seed=SEEDS, factor=FACTORS, flag=FLAGS, before=FLAGS)
    @example(list_=ENDS, seed=1, factor=0.3, flag=0.0, before=0.0)
    @example(list_=ALIGNMENTS, seed=1, factor=0.3, flag=0.0, before=0.0)
    def test_norm_agrees_with_float64_and_checks_all_elements(self, device, list_, seed, factor, flag, before):
        laid, _ = lay_out(list_, seed, device)
        grads, found_inf, inv_scale = tensors(laid), scalar(flag, device), scalar(factor, device)
        sum_of_squares, theirs = (scalar(before, device, torch.float64) for _ in range(2))

        extension_kernels.found_inf_norm(grads, inv_scale, found_inf, sum_of_squares)
        torch_kernels.found_inf_norm(grads, inv_scale, scalar(0.0, device), theirs)

        assert found_inf.item() == (flag or overflow(grads))
        for each in laid:
            each.assert_unwritten()
        expected = before + sum(((grad.double() * inv_scale.double()) ** 2).sum().item() for grad in grads)
        assert sum_of_squares.item() == pytest.approx(expected, rel=2e-6, abs=0, nan_ok=True)
        assert theirs.item() == pytest.approx(expected, rel=1e-6, abs=0, nan_ok=True)

    @on_each_device
    @pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
    def test_constant_tensors_whose_sums_all_round_one_way(self, device, dtype):
        values = torch.rand(150, generator=torch.Generator().manual_seed(0)).add(1).to(dtype)
        worst = 0.0
        for index, value in enumerate(values.double().tolist()):
            grad = torch.full((2000 + 31 * index,), value, dtype=dtype, device=device)
            worst = max(worst, abs(norm_of([grad], 1.0) / (value * math.sqrt(grad.numel())) - 1))
        assert worst <= 1e-6

    @on_each_device
    @pytest.mark.parametrize("side_by_side", [4, 8, 16])
    def test_small_numbers_after_a_large_one_count_in_the_norm(self, device, side_by_side):
        block = [1.0] * side_by_side + [2.0**-12 * (1 - 2.0**-10)] * (31 * side_by_side)
        grad = torch.tensor(block * 100, device=device)
        assert norm_of([grad], 1.0) == pytest.approx(grad.double().norm().item(), rel=1e-6)

    @on_each_device
    def test_an_infinite_square_of_a_finite_number_is_no_overflow(self, device):
        total, found_inf = scalar(0.0, device, torch.float64), scalar(0.0, device)
        extension_kernels.found_inf_norm([torch.full((5,), 1e20, device=device)], scalar(1.0, device), found_inf, total)
        assert total.item() == math.inf
        assert found_inf == 0

    @on_each_device
    @given(list_=drawn(contents=("ordinary",)), seed=SEEDS)
    @draws
    @example(list_=ENDS * 3, seed=1)
    def test_norm_has_the_same_bits_with_any_number_of_threads(self, device, list_, seed):
        laid, _ = lay_out(list_, seed, device)
        first = norm_of(tensors(laid), 0.3)
        assert_same(torch.tensor(norm_of(tensors(laid), 0.3)), torch.tensor(first))
        with threads(2):
            assert_same(torch.tensor(norm_of(tensors(laid), 0.3)), torch.tensor(first))

    def test_every_thread_checks_its_elements(self):
        for position in (0, 4 * CHUNK, 8 * CHUNK, 9 * CHUNK + 4):
            grad, found_inf = torch.ones(9 * CHUNK + 5), scalar(0.0, "cpu")
            grad[position] = math.inf
            with threads(2):
                extension_kernels.unscale_([torch.ones(3), grad], scalar(0.5, "cpu"), found_inf)
            assert found_inf == 1
            assert grad.isfinite().sum() == 9 * CHUNK + 4
            assert grad[grad.isfinite()].eq(0.5).all()


def norm_of(grads: list[Tensor], factor: float) -> float:
    device = str(grads[0].device) if grads else "cpu"
    total = scalar(0.0, device, torch.float64)
    extension_kernels.found_inf_norm(grads, scalar(factor, device), scalar(0.0, device), total)
    return math.sqrt(total.item())


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Sets the number of torch's threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


def sum_of_hashes(grad: Tensor) -> int:
    """The fingerprint by the definition in csrc/operations.h, in integers without limit."""
    data = grad.reshape(-1).view(torch.uint8).numpy().tobytes()
    total = 0
    for index in range(-(-len(data) // 4)):
        bits = int.from_bytes(data[4 * index : 4 * index + 4], "little")
        hash_ = (bits + index * 0x9E3779B1) * 0x85EBCA6B % 2**32
        hash_ = (hash_ ^ hash_ >> 15) * 0xC2B2AE35 % 2**32
        total += hash_ ^ hash_ >> 13
    return total % 2**32


class TestFollow:
    """copy_edits copies elements of a half tensor that differ from its rounded master; others keep their bits."""

    @on_each_device
    @pytest.mark.parametrize("of_gradients", [False, True], ids=["weights", "gradients"])
    @draws
    @given(list_=drawn().filter(bool), masters=st.sampled_from(CONTENTS), seed=SEEDS)
    @example(list_=ENDS, masters="ordinary", seed=1)
    @example(list_=ALIGNMENTS, masters="ordinary", seed=1)
    def test_edited_elements_reach_the_masters_and_no_others(self, device, list_, masters, seed, of_gradients):
        list_ = [each for each in list_ if math.prod(each.shape) and each.dtype is not torch.float32]
        if not list_:
            return
        narrow, wide = lay_out(list_, seed, device, wide_from=masters)
        grads, fulls = tensors(narrow), tensors(wide)
        rounded = shown if of_gradients else Tensor.to
        for operators in (extension_kernels, torch_kernels):
            (operators.copy_to_half_grads if of_gradients else operators.copy_to_half)(fulls, grads)
            before = torch.empty(len(grads), dtype=torch.float64, device=device)
            operators.fingerprint(grads, before)
            torch.manual_seed(seed)
            for index, grad in enumerate(grads):
                if index % 2 == 0:
                    place = tuple(int(torch.randint(size, ())) for size in grad.shape)
                    grad.data[place] = 3.0 if grad[place] != 3 else 0.0
            now = torch.empty_like(before)
            operators.fingerprint(grads, now)
            assert [bool(changed) for changed in before != now] == [index % 2 == 0 for index in range(len(grads))]
            expected = [
                torch.where(rounded(full, grad.dtype) == grad, full, grad.float()) if index % 2 == 0 else full.clone()
                for index, (grad, full) in enumerate(zip(grads, fulls, strict=True))
            ]
            operators.copy_edits(grads, fulls, before, now, of_gradients)
            assert_all_same(fulls, expected)

    @on_each_device
    def test_a_fingerprint_is_the_sum_of_the_hashes_of_elements(self, device):
        grads = tensors(lay_out(ENDS[1:] + ALIGNMENTS, 1, device)[0])
        grads = [grad for grad in grads if grad.numel()]
        found = torch.empty(len(grads), dtype=torch.float64, device=device)

        extension_kernels.fingerprint(grads, found)

        assert found.tolist() == [sum_of_hashes(grad.cpu()) for grad in grads]

    @on_each_device
    @with_each_implementation
    def test_a_fingerprint_differs_after_every_change(self, device, operators):
        size = 2 * CHUNK + 7
        original = torch.randn(size, device=device).half()

        def fingerprint(grad: Tensor) -> float:
            found = torch.empty(1, dtype=torch.float64, device=device)
            operators.fingerprint([grad], found)
            return found.item()

        wanted = fingerprint(original)
        assert fingerprint(original.clone()) == wanted
        changes = [original * 0, -original, original.flip(0), original.roll(1), original * 0.5, original.clamp(-1, 1)]
        for place in (0, 1, CHUNK - 1, CHUNK, size - 1):
            changes.append(original.clone())
            changes[-1][place] += 1
        swapped = original.clone()
        swapped[[0, CHUNK]] = original[[CHUNK, 0]]
        assert wanted not in {fingerprint(each) for each in (*changes, swapped)}
        positive = torch.arange(1, 7387, device=device).remainder(97).add(1).half()
        assert len({fingerprint(each) for each in (positive, -positive, positive * 2, positive * 0.5)}) == 4
        constant = torch.ones(size, device=device).half()
        assert fingerprint(constant) != fingerprint(constant * 0)


@on_each_device
@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=dtype_name)
def test_numbers_midway_between_halves_are_rounded_to_even(device, dtype):
    eps = torch.finfo(dtype).eps
    largest = torch.finfo(dtype).max
    numbers = [1 + eps / 2, 1 + 3 * eps / 2, 1 + eps / 2 + 2.0**-23, -1 - eps / 2, -0.0, math.nan, -math.inf]
    expected = [1.0, 1 + 2 * eps, 1 + eps, -1.0, -0.0, math.nan, -math.inf]
    spacing = eps * 2.0 ** math.floor(math.log2(largest))  # to what would be the next number
    numbers += [largest + spacing / 2, largest + spacing / 4]
    expected += [math.inf, largest]
    # Once as a vector's elements, once as what is left over.
    masters = [torch.tensor(numbers * 9, device=device), *torch.tensor(numbers, device=device).split(1)]
    halves = [torch.empty_like(master, dtype=dtype) for master in masters]

    extension_kernels.copy_to_half(masters, halves)

    wanted = torch.tensor(expected, dtype=dtype, device=device)
    assert_same(halves[0], wanted.repeat(9))
    assert_same(torch.cat(halves[1:]), wanted)


# bfloat16 halves of float32 numbers

DENSE = ("contiguous", "transposed", "channels last")
KEYS = (0, 1, 2**31, 2**32 - 1, 123456789)

# The bits of every bfloat16 number, with lower halves that are rounded down, up, and either way.
EDGES = (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)
EVERY_UPPER_HALF = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16

SMALLEST = 2.0**-133  # of bfloat16, subnormal
LARGEST = torch.finfo(torch.bfloat16).max


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32)


def rounded(operators: ModuleType, fulls: list[Tensor], keys: list[int]) -> list[Tensor]:
    halves = [torch.empty_like(full, dtype=torch.bfloat16) for full in fulls]
    operators.round_stochastically(fulls, halves, keys)
    return halves


# What each writes: of fulls, halves and remainders.
WRITTEN = {"join": [0], "split": [1, 2], "round_stochastically": [1]}


def run_on_triples(operators: ModuleType, name: str, columns: list[list[Tensor]], keys: list[int]) -> None:
    fulls, halves, remainders = columns
    given = {"join": (halves, remainders, fulls), "split": (fulls, halves, remainders)}
    getattr(operators, name)(*given.get(name, (fulls, halves, keys)))


@on_each_device
@pytest.mark.parametrize("name", WRITTEN)
@draws
@given(list_=drawn(), seed=SEEDS)
@example(list_=ENDS, seed=1)
@example(list_=ALIGNMENTS, seed=1)
@example(list_=[Drawn((index % 4,), torch.float32) for index in range(3 * CHUNK // 16)], seed=1)
@example(list_=[Drawn((5 * CHUNK + 1,), torch.float32)], seed=1)
@example(list_=[Drawn((2, 3, 50, 7), HALF_DTYPES[0], narrow=Lay("channels last", 1))], seed=1)
def test_halves_and_remainders_have_the_bits_of_torchs_kernels(device, name, list_, seed):
    def triples() -> list[list[Laid]]:
        columns: list[list[Laid]] = [[], [], []]
        for index, each in enumerate(list_):
            lays = [each.wide, each.narrow, Lay(each.narrow.layout if index % 3 else "transposed", index % 5)]
            if name == "round_stochastically":  # random numbers belong to places in memory
                layout = each.narrow.layout if each.narrow.layout in DENSE else "contiguous"
                lays = [replace(lay, layout=layout) for lay in lays]
            half = values_of(each, seed + index, torch.bfloat16)
            values = [
                values_of(each, seed - index, torch.float32),
                half,
                bits(half).flip(-1) if half.dim() else bits(half),
            ]
            for column, value, lay in zip(columns, values, lays, strict=True):
                column.append(Laid(value, lay, device))
        return columns

    ours, theirs = triples(), triples()
    keys = [(seed + index * 0x12345679) % 2**32 for index in range(len(list_))]

    run_on_triples(extension_kernels, name, [tensors(column) for column in ours], keys)
    run_on_triples(torch_kernels, name, [tensors(column) for column in theirs], keys)

    for index, (column, others) in enumerate(zip(ours, theirs, strict=True)):
        assert_all_same(tensors(column), tensors(others))
        for each in column:
            each.assert_only_it_was_written() if index in WRITTEN[name] else each.assert_unwritten()


class TestSplit:
    @on_each_device
    @with_each_implementation
    @pytest.mark.parametrize("lower", EDGES, ids=hex)
    def test_every_half_with_any_rest_comes_back_bit_for_bit(self, device, operators, lower):
        full = (EVERY_UPPER_HALF | lower).view(torch.float32).to(device)
        half, remainder = torch.empty_like(full, dtype=torch.bfloat16), torch.empty_like(full, dtype=torch.int16)
        joined = torch.empty_like(full)

        operators.split([full], [half], [remainder])
        operators.join([half], [remainder], [joined])

        is_nan = full.isnan()
        assert torch.equal(half.isnan(), is_nan)
        assert_same(joined, full)
        assert remainder[is_nan].eq(0).all()
        nearest = full.to(torch.bfloat16)
        if lower == 0x8000:  # midway between two halves
            away = full.nextafter(full * math.inf).to(torch.bfloat16)
            assert_same(half[~is_nan], torch.where(full == 0, nearest, away)[~is_nan])
        else:
            assert_same(half, nearest)


class TestRoundStochastically:
    @on_each_device
    @with_each_implementation
    @pytest.mark.parametrize("sign", [1, -1])
    @pytest.mark.parametrize(
        "value",
        [
            1.2345,
            1 + 2.0**-8,
            1 / 3,
            1e-30,
            1e30,
            0.1 * SMALLEST,
            2.7 * SMALLEST,
            100.5 * SMALLEST,
            LARGEST * (1 - 2.0**-10),
        ],
    )
    def test_the_mean_is_the_number(self, device, operators, value, sign):
        full = torch.full((10**6,), sign * value, device=device)

        (half,) = rounded(operators, [full], [20250101])

        number, found = full[0].item(), half.double()
        lower, upper = sorted({*found.unique().tolist()})
        assert lower < number < upper
        chance = (number - lower) / (upper - lower)
        error = (upper - lower) * math.sqrt(chance * (1 - chance) / full.numel())
        assert abs(found.mean().item() - number) <= 4 * error

    @on_each_device
    @with_each_implementation
    def test_the_mean_over_keys_is_the_number(self, device, operators):
        fulls = list(torch.full((4000, 7), 1 + 2.0**-9, device=device).unbind())
        generator = torch.Generator().manual_seed(1)
        for keys in (range(len(fulls)), torch.randint(2**32, (len(fulls),), generator=generator).tolist()):
            up = torch.stack(rounded(operators, fulls, list(keys))).float().gt(1).double()
            assert (up.mean(0) - 0.25).abs().max() <= 4 * math.sqrt(0.25 * 0.75 / len(fulls))

    @on_each_device
    @with_each_implementation
    def test_halves_infinities_and_nan_stay_what_they_are(self, device, operators):
        half = EVERY_UPPER_HALF.view(torch.float32).to(device)
        for found in rounded(operators, [half] * len(KEYS), list(KEYS)):
            assert_same(found, half.to(torch.bfloat16))
        nan = torch.tensor([0x7F800001, 0x7FFFFFFF, -1, -0x7FFFFF], dtype=torch.int32).view(torch.float32).to(device)
        for found in rounded(operators, [nan.repeat(50)] * len(KEYS), list(KEYS)):
            assert found.isnan().all()

    @on_each_device
    @with_each_implementation
    def test_finite_numbers_stay_finite(self, device, operators):
        limit = torch.finfo(torch.float32).max
        full = torch.tensor([limit, -limit, LARGEST * (1 + 2.0**-12), -LARGEST], device=device).repeat(5000)
        for found in rounded(operators, [full] * len(KEYS), list(KEYS)):
            assert_same(found, full.sign().mul(LARGEST).to(torch.bfloat16))

    @on_each_device
    @with_each_implementation
    def test_random_numbers_belong_to_places_in_memory_and_keys(self, device, operators):
        image = torch.randn(2, 3, 100, 200, device=device).contiguous(memory_format=torch.channels_last)
        flat = image.permute(0, 2, 3, 1).reshape(-1)

        shaped, first, again, other = rounded(operators, [image, flat, flat, flat], [5, 5, 5, 6])

        assert_same(shaped.permute(0, 2, 3, 1).reshape(-1), first)
        assert_same(again, first)
        assert 0.2 < (other != first).float().mean() < 0.5


class TestUpdateScale:
    @on_each_device
    @given(
        scale=st.sampled_from([1.0, 2.0**16, 2.0**24, 3.3, 2.0**-24, 2.0**127]),
        unskipped=st.integers(0, 4),
        left=st.integers(-2, 3),
        found=st.sampled_from([0.0, 1.0]),
        factors=st.sampled_from([(2.0, 0.5), (4.0, 0.75), (1.5, 0.1), (3.0, 1 / 3), (1.001, 0.999)]),
        window=st.integers(1, 4),
        hysteresis=st.integers(1, 3),
        bounds=st.sampled_from([(2.0**-24, 2.0**24), (1.0, 65536.0), (0.1, 3.4e38), (0.0, math.inf)]),
    )
    def test_scale_and_counts_are_those_of_torchs_kernels(
        self, device, scale, unskipped, left, found, factors, window, hysteresis, bounds
    ):
        states = []
        for operators in (extension_kernels, torch_kernels):
            state = (scalar(scale, device), *(scalar(each, device, torch.int32) for each in (unskipped, left)))
            flag = scalar(found, device)
            operators.update_scale(*state, flag, *factors, window, hysteresis, *bounds)
            assert flag == found
            states.append(state)
        ours, theirs = states
        assert ours == theirs


class TestClipFactor:
    @on_each_device
    @pytest.mark.parametrize("found", [0.0, 1.0])
    @pytest.mark.parametrize("max_norm", [0.1, 1.0, 3.0, 1e30, math.inf])
    def test_norm_and_factor_are_those_of_torchs_kernels(self, device, found, max_norm):
        for total in (0.0, 1e-30, 0.01, 0.99, 1.0, 1.1, 2.0, 9.0, 1e9, 1e70, math.inf, math.nan):
            results = []
            for operators in (extension_kernels, torch_kernels):
                written = scalar(-1.0, device), scalar(-1.0, device)
                given = scalar(total, device, torch.float64), scalar(found, device)
                operators.clip_factor(*given, *written, max_norm)
                results.append([each.item() for each in (*given, *written)])
            ours, theirs = results
            assert_same(torch.tensor(ours), torch.tensor(theirs))

    @on_each_device
    def test_factor_has_the_margin_of_clip_grad_norm(self, device):
        parameters = [nn.Parameter(torch.zeros(3, device=device)) for _ in range(2)]
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 2.0)
        sum_of_squares, found_inf = scalar(24.0, device, torch.float64), scalar(0.0, device)
        norm, factor = kernels.clip_factor(sum_of_squares, found_inf, 1.5)
        assert norm == nn.utils.clip_grad_norm_(parameters, 1.5)
        torch.testing.assert_close(parameters[0].grad, (2 * factor).expand(3), rtol=1e-7, atol=0)


@on_each_device
@with_each_implementation
def test_empty_lists_change_no_flag_and_no_sum(device: str, operators: ModuleType) -> None:
    factor, flag, total = scalar(0.5, device), scalar(0.0, device), scalar(3.0, device, torch.float64)

    operators.unscale_([], factor, flag)
    operators.unscale_copy([], [], factor, flag, True)
    operators.unscale_add([], [], factor, flag, True)
    operators.found_inf_norm([], factor, flag, total)
    operators.copy_to_half([], [])
    operators.join([], [], [])
    operators.split([], [], [])
    operators.round_stochastically([], [], [])

    assert (factor.item(), flag.item(), total.item()) == (0.5, 0, 3)


# What they refuse

HALF, FLOAT, DOUBLE = torch.float16, torch.float32, torch.float64


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype)


FACTOR, FLAG, SUM = ones(), ones(), ones(dtype=DOUBLE)
COUNT = ones(dtype=torch.int32)
BRAINS, SHORTS = ones(2, dtype=torch.bfloat16), ones(2, dtype=torch.int16)
REST = (2.0, 0.5, 10, 1, 1.0, 4.0)

REFUSED: dict[str, tuple[str, list[object]]] = {
    "integers": ("unscale_", [[ones(2), ones(2, dtype=torch.int32)], FACTOR, FLAG]),
    "doubles": ("unscale_", [[ones(2), ones(2, dtype=DOUBLE)], FACTOR, FLAG]),
    "complex numbers": ("unscale_", [[ones(2), ones(2, dtype=torch.complex64)], FACTOR, FLAG]),
    "a flag of doubles": ("unscale_", [[ones(2)], FACTOR, SUM]),
    "a flag of two": ("unscale_", [[ones(2)], FACTOR, ones(2)]),
    "a flag of none": ("unscale_", [[ones(2)], FACTOR, ones(0)]),
    "a half factor": ("unscale_", [[ones(2)], ones(dtype=HALF), FLAG]),
    "two factors": ("unscale_", [[ones(2)], ones(2), FLAG]),
    "a tensor of no device": ("unscale_", [[ones(2), ones(2).to("meta")], FACTOR, FLAG]),
    "a flag of no device": ("unscale_", [[ones(2)], FACTOR, FLAG.to("meta")]),
    **{
        f"{what}, {operator}": (operator, [grads, master_grads, FACTOR, FLAG, True])
        for operator in ("unscale_copy", "unscale_add")
        for what, grads, master_grads in [
            ("more gradients", [ones(2), ones(2)], [ones(2)]),
            ("more masters", [ones(2)], [ones(2), ones(2)]),
            ("no gradients", [], [ones(2)]),
            ("other shapes", [ones(2), ones(2, 3)], [ones(2), ones(3, 2)]),
            ("other numbers of dimensions", [ones(2), ones(4)], [ones(2), ones(2, 2)]),
            ("one element less", [ones(2), ones(3)], [ones(2), ones(2)]),
            ("an empty one", [ones(2), ones(0)], [ones(2), ones(1)]),
            ("half masters", [ones(2), ones(2)], [ones(2), ones(2, dtype=HALF)]),
            ("integer gradients", [ones(2), ones(2, dtype=torch.int16)], [ones(2), ones(2)]),
        ]
    },
    "a flag of integers, copy": ("unscale_copy", [[ones(2)], [ones(2)], FACTOR, COUNT, True]),
    "a flag of integers, add": ("unscale_add", [[ones(2)], [ones(2)], FACTOR, COUNT, True]),
    "integers, norm": ("found_inf_norm", [[ones(2), ones(2, dtype=torch.int32)], FACTOR, FLAG, SUM]),
    "a sum in float32": ("found_inf_norm", [[ones(2)], FACTOR, FLAG, FLAG]),
    "two sums": ("found_inf_norm", [[ones(2)], FACTOR, FLAG, ones(2, dtype=DOUBLE)]),
    "a norm of doubles": ("clip_factor", [SUM, FLAG, SUM, FACTOR, 1.0]),
    "a sum of squares in float32": ("clip_factor", [FLAG, FLAG, FACTOR, FACTOR, 1.0]),
    "factors for one": ("clip_factor", [SUM, FLAG, FACTOR, ones(2), 1.0]),
    "more masters than halves": ("copy_to_half", [[ones(2), ones(2)], [ones(2, dtype=HALF)]]),
    "half to full": ("copy_to_half", [[ones(2, dtype=HALF)], [ones(2)]]),
    "halves of another shape": ("copy_to_half", [[ones(2), ones(6)], [ones(2, dtype=HALF), ones(2, 3, dtype=HALF)]]),
    **{
        f"{what}, {operator}": (operator, arguments)
        for what, fulls, halves, remainders in [
            ("full halves", [ones(2)], [ones(2)], [SHORTS]),
            ("float16", [ones(2)], [ones(2, dtype=HALF)], [SHORTS]),
            ("half fulls", [BRAINS], [BRAINS], [SHORTS]),
            ("fewer fulls", [ones(2)], [BRAINS] * 2, [SHORTS] * 2),
            ("other fulls", [ones(2, 1)], [BRAINS], [SHORTS]),
            ("fewer remainders", [ones(2)] * 2, [BRAINS] * 2, [SHORTS]),
            ("other remainders", [ones(2)], [BRAINS], [SHORTS[None]]),
            ("half remainders", [ones(2)], [BRAINS], [BRAINS]),
            ("remainders of no device", [ones(2)], [BRAINS], [SHORTS.to("meta")]),
        ]
        for operator, arguments in [("join", [halves, remainders, fulls]), ("split", [fulls, halves, remainders])]
    },
    "half and half": ("round_stochastically", [[ones(2)], [ones(2, dtype=HALF)], [1]]),
    "fewer keys": ("round_stochastically", [[ones(2)] * 2, [BRAINS] * 2, [1]]),
    "more keys": ("round_stochastically", [[ones(2)], [BRAINS], [1, 2]]),
    "a scale of doubles": ("update_scale", [SUM, COUNT, COUNT, FLAG, *REST]),
    "two scales": ("update_scale", [ones(2), COUNT, COUNT, FLAG, *REST]),
    "counts of int64": ("update_scale", [FACTOR, ones(dtype=torch.int64), COUNT, FLAG, *REST]),
    "counts of float32": ("update_scale", [FACTOR, COUNT, FLAG, FLAG, *REST]),
}


def flat(arguments: list[object]) -> Iterator[Tensor]:
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, list):
            yield from (each for each in argument if isinstance(each, Tensor))


@on_each_device
@pytest.mark.parametrize(("operator", "arguments"), REFUSED.values(), ids=REFUSED)
def test_invalid_arguments_are_an_error_that_changes_nothing(device, operator, arguments):
    def moved(value: object) -> object:
        if isinstance(value, list):
            return [moved(each) for each in value]
        return value.to(device, copy=True) if isinstance(value, Tensor) and value.device.type == "cpu" else value

    there = [moved(argument) for argument in arguments]

    with pytest.raises(RuntimeError, match=f"ampatch::{operator}\\b"):
        getattr(extension_kernels, operator)(*there)

    for now, before in zip(flat(there), flat(arguments), strict=True):
        assert now._version == 0
        if now.device.type != "meta":
            assert torch.equal(now.cpu(), before)


class Subclass(Tensor):
    pass


class NoMode(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def freed() -> Tensor:
    tensor = ones(3)
    tensor.untyped_storage().resize_(0)
    return tensor


def in_inference_mode(tensor: Tensor) -> Tensor:
    with torch.inference_mode():
        return tensor.clone()


def norm_on_lists(operators: ModuleType, narrow: list[Tensor], _: object, factor: Tensor, flag: Tensor) -> list[Tensor]:
    total = factor.double()
    operators.found_inf_norm(narrow, factor, flag, total)
    return [total]


def fingerprints_of_lists(
    operators: ModuleType, narrow: list[Tensor], _wide: object, _factor: Tensor, flag: Tensor
) -> list[Tensor]:
    filled = [each for each in narrow if each.numel()]
    found = torch.empty(len(filled), dtype=DOUBLE, device=flag.device)
    operators.fingerprint(filled, found)
    return [found]


RUN_ON_LISTS = {
    **{name: operator.run for name, operator in OPERATORS.items()},
    "found_inf_norm": norm_on_lists,
    "fingerprint": fingerprints_of_lists,
    "copy_edits": lambda operators, narrow, wide, *_: operators.copy_differing(narrow, wide),
}

# Pairs of tensors.
ACCEPTED: dict[str, tuple[Tensor, Tensor]] = {
    "contiguous": (ones(2, 3, dtype=HALF), ones(2, 3)),
    "transposed alike": (ones(2, 3, dtype=HALF).t(), ones(2, 3).t()),
    "channels last alike": tuple(
        ones(2, 3, 4, 5, dtype=dtype).contiguous(memory_format=torch.channels_last) for dtype in (HALF, FLOAT)
    ),
    "unlike in dimensions of one element": (ones(1, 3, dtype=HALF), ones(3, 1).t()),
    "empty": (ones(0, 2, dtype=HALF), ones(0, 2)),
    "parameters": (torch.nn.Parameter(ones(2, dtype=HALF)), torch.nn.Parameter(ones(2))),
    "of inference mode": (in_inference_mode(ones(2, dtype=HALF)), in_inference_mode(ones(2))),
}

# One tensor, or a pair, that only the operator itself can judge, or has to copy.
LEFT: dict[str, Callable[[], tuple[Tensor, ...]]] = {
    "doubles": lambda: (ones(2, dtype=DOUBLE),),
    "complex numbers": lambda: (ones(2, dtype=torch.complex64),),
    "a subclass": lambda: (ones(2).as_subclass(Subclass),),
    "a negated view": lambda: (ones(2, dtype=torch.complex64).conj().imag,),
    "gaps": lambda: (ones(6)[::2],),
    "elements in one place": lambda: (ones(1).expand(3),),
    "no device": lambda: (ones(2).to("meta"),),
    "sparse": lambda: (ones(2).to_sparse(),),
    "freed memory": lambda: (freed(),),
    "no tensor": lambda: (None,),  # type: ignore[dict-item]
    "gaps beside none": lambda: (ones(3), ones(6)[::2]),
    "another order": lambda: (ones(2, 3), ones(3, 2).t()),
    "another shape": lambda: (ones(2, 3), ones(3, 2)),
    "half masters": lambda: (ones(2), ones(2, dtype=HALF)),
}


class TestAddresses:
    """Operators get the addresses of tensors that C++ has checked, and do what they do with the tensors themselves."""

    @pytest.fixture
    def as_tensors(self, compiled_calls: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
        """Makes operators get lists as tensors, or as addresses where C++ accepts them."""

        def choose(choice: bool) -> None:
            monkeypatch.setattr(calls, "compiled", lambda: None if choice else compiled_calls)

        return choose

    @on_each_device
    @pytest.mark.parametrize("operator", RUN_ON_LISTS)
    @settings(draws, suppress_health_check=list(HealthCheck))
    @given(list_=drawn(("contiguous",), ("contiguous",)), seed=SEEDS, factor=FACTORS)
    @example(list_=ENDS, seed=1, factor=0.3)
    @example(list_=[Drawn((3, 50), HALF, "any bits", None, *[Lay("transposed")] * 2)] * 5, seed=1, factor=0.3)
    def test_addresses_lead_to_the_same_bits_and_versions(
        self, compiled_calls, as_tensors, device, operator, list_, seed, factor
    ):
        left = []
        for choice in (True, False):
            as_tensors(choice)
            narrow, wide = lay_out(list_, seed, device)
            assert (compiled_calls.pieces(tensors(narrow), tensors(wide), None) is None) == (len(list_) < 4)
            flag, inv_scale = scalar(0.0, device), scalar(factor, device)
            results = RUN_ON_LISTS[operator](extension_kernels, tensors(narrow), tensors(wide), inv_scale, flag)
            left.append([*tensors(narrow), *tensors(wide), flag, *(results or ())])
        assert_all_same(*left)
        assert [each._version for each in left[0]] == [each._version for each in left[1]]

    @pytest.mark.parametrize("pair", ACCEPTED.values(), ids=ACCEPTED)
    def test_addresses_are_those_of_ordinary_tensors(self, compiled_calls, pair):
        narrow, wide = [ones(5)] * 4 + [pair[0]], [ones(5)] * 4 + [pair[1]]
        assert compiled_calls.pieces(narrow, wide, None)[3:].tolist() == [
            [half.data_ptr(), full.data_ptr(), half.numel(), [torch.uint8, torch.float16].index(half.dtype) * 5]
            for half, full in [pair]
            if half.numel()
        ]
        assert len(compiled_calls.pieces(narrow, None, None)) == 3 + bool(pair[0].numel())

    @pytest.mark.parametrize("make", LEFT.values(), ids=LEFT)
    def test_other_tensors_have_no_addresses_and_the_same_results(self, compiled_calls, as_tensors, make):
        outcomes = []
        for choice in (True, False):
            as_tensors(choice)
            made = make()
            lists = [[*(ones(3) for _ in range(4)), each] for each in made]
            wide = lists[1] if len(lists) == 2 else None
            assert compiled_calls.pieces(lists[0], wide, None) is None
            try:
                if wide is None:
                    extension_kernels.unscale_(lists[0], scalar(0.5, "cpu"), scalar(0.0, "cpu"))
                else:
                    extension_kernels.unscale_add(*lists, scalar(0.5, "cpu"), scalar(0.0, "cpu"), True)
                outcome = [each.tolist() for list_ in lists for each in list_]
            except (RuntimeError, TypeError) as error:
                outcome = [type(error), str(error).partition("\n")[0]]
                assert not any(each._version for list_ in lists for each in list_[:4])
            outcomes.append(outcome)
        assert outcomes[0] == outcomes[1]

    def test_unequal_or_short_lists_tuples_and_modes_get_no_addresses(self, compiled_calls):
        four = [ones(3) for _ in range(4)]
        assert compiled_calls.pieces(four, four, None) is not None
        for narrow, wide in ([four, [*four, ones(3)]], [tuple(four), four], [four, tuple(four)], [four[:3], four[:3]]):
            assert compiled_calls.pieces(narrow, wide, None) is None
        with NoMode():
            assert compiled_calls.pieces(four, None, None) is None  # the mode has to see the tensors
        with torch.autocast("cpu"), torch.inference_mode():
            assert compiled_calls.pieces(four, None, None) is not None

    @on_each_device
    @pytest.mark.parametrize("name", WRITTEN)
    def test_addresses_of_triples_lead_to_the_same_bits_and_versions(self, compiled_calls, as_tensors, device, name):
        shapes = [(0,), (3, 4), (), (CHUNK + 1,), (0,), (2, 3, 4, 5)]
        fulls = [torch.randn(shape, device=device) for shape in shapes]
        fulls[-1] = fulls[-1].contiguous(memory_format=torch.channels_last)
        halves = [torch.empty_like(full, dtype=torch.bfloat16) for full in fulls]
        remainders = [torch.empty_like(full, dtype=torch.int16) for full in fulls]
        keys = [2**32 - 1 - index for index in range(len(shapes))]
        extension_kernels.split(fulls, halves, remainders)
        for third in (remainders, keys):
            assert len(compiled_calls.pieces(halves, fulls, third)) == 8  # two rows for each that is not empty
        left = []
        for choice in (True, False):
            as_tensors(choice)
            columns = [[each.clone() for each in column] for column in (fulls, halves, remainders)]
            run_on_triples(extension_kernels, name, columns, keys)
            left.append(columns)
        for index, (one, other) in enumerate(zip(*left, strict=True)):
            assert_all_same(one, other)
            for each in (*one, *other):
                assert each._version == (index in WRITTEN[name])

    def test_triples_that_the_operators_refuse_or_copy_have_no_addresses(self, compiled_calls):
        fulls, halves, remainders = ([tensor] * 4 for tensor in (ones(2), BRAINS, SHORTS))
        assert compiled_calls.pieces(halves, fulls, remainders) is not None
        assert compiled_calls.pieces(halves, fulls, [1] * 4) is not None
        gaps, shape, ints = SHORTS.repeat(2)[::2], SHORTS[None], SHORTS.int()
        for third in (gaps, shape, ints, BRAINS, SHORTS.to("meta"), 1, None, True, 1.0):
            assert compiled_calls.pieces(halves, fulls, [*remainders[:3], third]) is None
            assert compiled_calls.pieces(halves, fulls, [third, *remainders[:3]]) is None
        for third in (remainders[:3], tuple(remainders), [1, 1, 1], [1, 1, 1, SHORTS]):
            assert compiled_calls.pieces(halves, fulls, third) is None
        assert compiled_calls.pieces([*halves[:3], ones(2, dtype=HALF)], fulls, remainders) is None

    @pytest.mark.gpu
    def test_tensors_of_two_devices_have_no_addresses(self, compiled_calls):
        four = [ones(3).cuda() for _ in range(4)]
        assert compiled_calls.pieces(four, four, None) is not None
        assert compiled_calls.pieces([*four, ones(3)], None, None) is None
        assert compiled_calls.pieces(four, [*four[:3], ones(3)], None) is None

    def test_addresses_of_a_lazy_copy_are_its_own(self, compiled_calls, as_tensors):
        as_tensors(False)
        origins = [ones(3) for _ in range(4)]
        extension_kernels.unscale_(list(map(torch._lazy_clone, origins)), scalar(0.5, "cpu"), scalar(0.0, "cpu"))
        assert_all_same(origins, [ones(3) for _ in range(4)])

    def test_addresses_of_the_wrong_shape_or_dtype_are_refused(self):
        for more in (ones(2, 4), ones(2, 3, dtype=torch.int64), ones(8, dtype=torch.int64)):
            with pytest.raises(RuntimeError, match="ampatch::unscale_"):
                torch.ops.ampatch.unscale_([ones(2)], scalar(0.5, "cpu"), scalar(0.0, "cpu"), more)

    @pytest.mark.parametrize("operator", ["unscale_", "unscale_copy"])
    def test_an_error_counts_no_write(self, as_tensors, operator):
        as_tensors(False)
        narrow, wide = ([ones(3) for _ in range(4)] for _ in range(2))
        with pytest.raises(RuntimeError, match=f"ampatch::{operator}: expected found_inf"):
            RUN_ON_LISTS[operator](extension_kernels, narrow, wide, scalar(0.5, "cpu"), SUM)
        assert not any(each._version for each in (*narrow, *wide))


@pytest.mark.gpu
@pytest.mark.parametrize("there", ["grads", "inv_scale", "found_inf"])
@pytest.mark.parametrize("elsewhere", ["cpu", "cuda"])
def test_tensors_of_several_devices_are_refused(there: str, elsewhere: str) -> None:
    # In a process of its own: a kernel that follows such an address spoils the GPU for all that comes after.
    device = "cuda" if elsewhere == "cpu" else "cpu"
    program = f"""
import torch
from ampatch.native import extension_kernels, kernels
kernels.select("extension")
arguments = {{"grads": torch.ones(3, device={device!r})}}
arguments |= {{name: torch.ones((), device={device!r}) for name in ("inv_scale", "found_inf")}}
arguments[{there!r}] = arguments[{there!r}].to({elsewhere!r})
try:
    extension_kernels.unscale_([arguments["grads"]], arguments["inv_scale"], arguments["found_inf"])
except RuntimeError as error:
    print("refused" if "ampatch::unscale_" in str(error) else error)
torch.cuda.synchronize()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)

    assert (done.stdout, done.returncode) == ("refused\n", 0), done.stderr


def test_an_expanded_tensor_cannot_be_unscaled() -> None:
    one = torch.ones(1)
    with pytest.raises(RuntimeError):
        extension_kernels.unscale_([one.expand(4)], scalar(0.5, "cpu"), scalar(0.0, "cpu"))
    assert one == 1


# Large tensors


def needs_memory(device: str, gib: int) -> None:
    if device == "cuda":
        free, _ = torch.cuda.mem_get_info()
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if free < gib * 2**30:
        pytest.skip(f"needs {gib} GiB of memory on the device {device}, which has {free / 2**30:.1f} free")


@pytest.mark.slow
@on_each_device
class TestMoreElementsThanAnInt32Counts:
    COUNT = 2**31 + 5

    def test_the_last_element_is_unscaled_and_checked(self, device: str) -> None:
        needs_memory(device, 6)
        grad = torch.zeros(self.COUNT, dtype=torch.float16, device=device)
        grad[-3:] = torch.tensor([6.0, 8.0, 10.0])
        found_inf, total = scalar(0.0, device), scalar(0.0, device, torch.float64)

        extension_kernels.unscale_([grad], scalar(0.5, device), found_inf)
        extension_kernels.found_inf_norm([grad], scalar(1.0, device), found_inf, total)

        assert grad[-5:].tolist() == [0, 0, 3, 4, 5]
        assert total == 9 + 16 + 25
        assert found_inf == 0

        grad[-1] = math.inf
        extension_kernels.found_inf_norm([grad], scalar(1.0, device), found_inf, total)

        assert found_inf == 1

    def test_the_last_elements_of_pairs_are_unscaled_and_rounded(self, device: str) -> None:
        needs_memory(device, 15)
        grad = torch.zeros(self.COUNT, dtype=torch.bfloat16, device=device)
        master_grad = torch.empty(self.COUNT, device=device)
        grad[-2:] = torch.tensor([6.0, math.inf])
        found_inf = scalar(0.0, device)

        extension_kernels.unscale_copy([grad], [master_grad], scalar(0.5, device), found_inf, False)
        extension_kernels.unscale_add([grad], [master_grad], scalar(0.5, device), scalar(0.0, device), True)

        assert master_grad[-3:].tolist() == [0, 6, math.inf]
        assert grad[-3:].tolist() == [0, 6, math.inf]
        assert found_inf == 1

        master_grad[-1] = 7
        extension_kernels.copy_to_half([master_grad], [grad])

        assert grad[-3:].tolist() == [0, 6, 7]

        master_grad[-1] = 9
        extension_kernels.round_stochastically([master_grad], [grad], [3])

        assert grad[-3:].tolist() == [0, 6, 9]


# All operators, one after another

# The most tensors of a launch on a GPU, of few and of many, in csrc/cuda.cu.
FEW, MOST = 64, 1024


@dataclass
class Work:
    """The arguments of every operator: tensors that are aligned or not, and one with gaps, all of different values."""

    device: torch.device
    count: int = 7

    def __post_init__(self) -> None:
        values = torch.arange(40.0, device=self.device)
        lays = [(dtype, slice(offset, None)) for dtype in DTYPES for offset in (0, 1)]
        lays.append((torch.float32, slice(None, None, 2)))
        chosen = itertools.islice(itertools.cycle(lays), self.count)
        self.grads = [(values + index % 100).to(dtype)[lay] for index, (dtype, lay) in enumerate(chosen)]
        self.master_grads = [torch.ones_like(grad, dtype=torch.float32) for grad in self.grads]
        self.halves = [torch.zeros_like(grad, dtype=torch.bfloat16) for grad in self.grads]
        self.half_grads = [torch.zeros_like(grad, dtype=torch.float16) for grad in self.grads]
        self.remainders = [torch.zeros_like(half, dtype=torch.int16) for half in self.halves]
        self.keys = [index * 0x9E3779B9 % 2**32 for index in range(self.count)]
        self.random_halves = [torch.zeros_like(half) for half in self.halves]
        self.before, self.now = torch.zeros(2, self.count, device=self.device, dtype=torch.float64).unbind()
        self.inv_scale = torch.full((), 0.5, device=self.device)
        self.found_inf = torch.zeros((), device=self.device)
        self.total = torch.zeros((), device=self.device, dtype=torch.float64)
        self.scale = torch.full((), 8.0, device=self.device)
        self.counts = [torch.full((), 1, device=self.device, dtype=torch.int32) for _ in range(2)]

    def run(self, operators: ModuleType) -> None:
        operators.found_inf_norm(self.grads, self.inv_scale, self.found_inf, self.total)
        operators.unscale_(self.grads, self.inv_scale, self.found_inf)
        operators.unscale_add(self.grads, self.master_grads, self.inv_scale, self.found_inf, False)
        operators.unscale_copy(self.grads, self.master_grads, self.inv_scale, self.found_inf, True)
        operators.copy_to_half(self.master_grads, self.halves)
        operators.copy_to_half_grads(self.master_grads, self.half_grads)
        operators.fingerprint(self.halves, self.before)
        for half in self.halves[::2]:
            half.add_(1)
        operators.fingerprint(self.halves, self.now)
        operators.copy_edits(self.halves, self.master_grads, self.before, self.now, False)
        operators.split(self.master_grads, self.halves, self.remainders)
        operators.round_stochastically(self.master_grads, self.random_halves, self.keys)
        operators.join(self.random_halves, self.remainders, self.master_grads)
        operators.update_scale(self.scale, *self.counts, self.found_inf, 2.0, 0.5, 2, 1, 1.0, 64.0)

    def all(self) -> list[Tensor]:
        results = [self.found_inf, self.total, self.scale, *self.counts]
        lists = self.grads, self.master_grads, self.halves, self.half_grads, self.remainders, self.random_halves
        return [*itertools.chain(*lists), *results]

    def assert_is(self, other: Work) -> None:
        assert_all_same([each.cpu() for each in self.all()], [each.cpu() for each in other.all()])


@on_each_device
@pytest.mark.parametrize("count", [FEW // 2 + 1, FEW, FEW + 1, MOST + 1, MOST + FEW + 1])
def test_lists_around_the_size_of_a_launch_agree_with_torch(device: str, count: int) -> None:
    ours, theirs = Work(torch.device(device), count), Work(torch.device(device), count)
    ours.run(extension_kernels)
    theirs.run(torch_kernels)
    ours.assert_is(theirs)


# What only a GPU has


def needs_two_gpus() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs, and there is one")


@pytest.mark.gpu
class TestOnAGpu:
    @pytest.fixture
    def gpu(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    @pytest.fixture
    def expected(self, gpu: torch.device) -> Work:
        work = Work(gpu)
        work.run(torch_kernels)
        torch.cuda.synchronize()
        return work

    def test_all_of_them_do_what_torch_does(self, gpu: torch.device, expected: Work) -> None:
        work = Work(gpu)
        work.run(extension_kernels)
        work.assert_is(expected)

    def test_operators_run_on_the_current_stream(self, gpu: torch.device, expected: Work) -> None:
        work = Work(gpu)
        late = [each.clone() for each in work.all()]
        for each in work.all():
            each.zero_()
        torch.cuda.synchronize()

        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000_000)  # has the stream fall behind every other
            for each, value in zip(work.all(), late, strict=True):
                each.copy_(value)
            work.run(extension_kernels)
        stream.synchronize()

        work.assert_is(expected)

    def test_tensors_may_be_on_another_than_the_current_device(self, expected: Work) -> None:
        needs_two_gpus()
        work = Work(torch.device("cuda", 1))
        with torch.cuda.device(0):
            work.run(extension_kernels)
            assert torch.cuda.current_device() == 0
        work.assert_is(expected)

    def test_operators_can_be_captured_in_a_graph_and_replayed(self, gpu: torch.device, expected: Work) -> None:
        work = Work(gpu)
        before = [each.clone() for each in work.all()]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work.run(extension_kernels)
        for _ in range(2):
            for each, value in zip(work.all(), before, strict=True):
                each.copy_(value)
            graph.replay()
            torch.cuda.synchronize()
            work.assert_is(expected)

        work.grads[0][-1] = math.inf
        work.found_inf.zero_()
        graph.replay()
        assert work.found_inf == 1

    def test_norms_and_fingerprints_on_several_streams_at_once(self, gpu: torch.device) -> None:
        grads = [torch.randn(300 * CHUNK + size, device=gpu).half() for size in range(3)]
        factor, flag = torch.full((), 0.5, device=gpu), torch.zeros((), device=gpu)

        def found(grad: Tensor) -> Tensor:
            total, numbers = torch.zeros(2, 1, device=gpu, dtype=DOUBLE).unbind()
            extension_kernels.found_inf_norm([grad], factor, flag, total)
            extension_kernels.fingerprint([grad], numbers)
            return torch.cat([total, numbers])

        expected = torch.stack([found(grad) for grad in grads])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = found(grads[2])
        streams = [torch.cuda.Stream() for _ in grads]
        torch.cuda.synchronize()
        rounds = []
        for _ in range(50):
            for grad, stream in zip(grads, streams, strict=True):
                with torch.cuda.stream(stream):
                    if grad is grads[2]:
                        graph.replay()
                    rounds.append(captured.clone() if grad is grads[2] else found(grad))
        torch.cuda.synchronize()

        assert_all_same(rounds, [*expected] * 50)

    def test_operators_do_not_synchronise(self, gpu: torch.device, expected: Work) -> None:
        work = Work(gpu)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            work.run(extension_kernels)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        work.assert_is(expected)

    @pytest.mark.parametrize("operator", [*OPERATORS, "found_inf_norm"])
    def test_ten_thousand_small_tensors_take_few_launches(self, gpu: torch.device, operator: str) -> None:
        wide = list(torch.ones(10_000, 100, device=gpu).unbind())
        narrow = list(torch.ones(10_000, 100, device=gpu, dtype=torch.bfloat16).unbind())
        factor, flag = torch.full((), 0.5, device=gpu), torch.zeros((), device=gpu)
        torch.cuda.synchronize()

        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            RUN_ON_LISTS[operator](extension_kernels, narrow, wide, factor, flag)
            torch.cuda.synchronize()

        # Kernels, copies and fills alike.
        ran = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        assert 1 <= len(ran) <= 20, ran

    @pytest.mark.slow
    def test_compute_sanitizer_finds_no_fault(self) -> None:
        places = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/local/cuda/bin"])
        sanitizer = shutil.which("compute-sanitizer", path=places)
        if sanitizer is None:
            pytest.skip("needs compute-sanitizer, which comes with the CUDA toolkit")
        for tool in ("memcheck", "racecheck"):
            command = [sanitizer, "--tool", tool, "--error-exitcode", "9", sys.executable, "-m", "pytest", "-q"]
            # The profiler needs what the sanitizer uses itself.
            chosen = ["-m", "gpu and not slow", "-k", "not launches and not several_devices"]
            done = subprocess.run(
                [*command, "-p", "no:cacheprovider", *chosen, __file__], capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stdout[-3000:]
