"""Operators on lists of gradients of any kind, with either implementation, and the choice between the two.

test_operators.py tests each operator on its own, on lists of ordinary tensors.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import multiprocessing
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers import HALF_DTYPES, assert_same_bits, check_rows, dtype_name
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from ampatch.diagnostics.peak_memory import peak_allocated
from ampatch.errors import KernelError, OptionError
from ampatch.native import calls, extension, extension_kernels, kernels, torch_kernels
from ampatch.native.extension import Library
from ampatch.native.selection import Chosen
from ampatch.scaling.loss_scaler import ScalePolicy, ScaleState, next_state
from ampatch.weights import optimizer_state

DTYPES = (*HALF_DTYPES, torch.float32, torch.float64)
NOT_FINITE = (math.inf, -math.inf, math.nan)

# What gradients of a type show of 2**-30, which is too small for one of them.
SHOWN = {torch.float16: 2.0**-24, torch.bfloat16: 2.0**-30, torch.float32: 2.0**-30}


def scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float32)


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def sparse(values: list[float], rows: list[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """A column of five rows; a row may be given more than once."""
    with torch.sparse.check_sparse_tensor_invariants():
        return torch.sparse_coo_tensor(torch.tensor([rows]), torch.tensor(values, dtype=dtype)[:, None], (5, 1))


def every_kind() -> list[Tensor]:
    """Gradients as models have them: four dtypes in turn, views with strides, a scalar, an empty one, a complex one."""
    by_dtype = [normal(4, 3, dtype=dtype) for dtype in DTYPES]
    views = [normal(6, 4).t()[::2], normal(4).expand(1, 4)[:, 1:]]
    return [*by_dtype, *views, scalar(3.0), torch.empty(0, 3), *(normal(2, dtype=dtype) for dtype in DTYPES)]


def times(tensor: Tensor, factor: float) -> Tensor:
    """The reference: computed in double, rounded once."""
    return (tensor.double() * factor).to(tensor.dtype)


@contextlib.contextmanager
def selected(module: Any, name: str, cached: Any) -> Iterator[None]:
    """Selects an implementation, of the kernels or of the calls; ``cached`` remembers which one it is."""
    before = module._selection.chosen
    module.select(name)
    yield
    module._selection.chosen = before
    cached.cache_clear()


@pytest.fixture(scope="class", params=["torch", "extension"])
def implementation(request: pytest.FixtureRequest) -> Iterator[str]:
    """Which kernels the tests of a class run on."""
    if request.param == "extension":
        request.getfixturevalue("compiled")
    with selected(kernels, request.param, kernels._runs_on):
        yield request.param


with_each_implementation = pytest.mark.usefixtures("implementation")


class Marked(Tensor):
    """A subclass of tensors, as libraries have them."""


def marked(tensor: Tensor) -> Tensor:
    return tensor.as_subclass(Marked)


@pytest.fixture(scope="class", params=["python", "compiled"])
def calls_in(request: pytest.FixtureRequest) -> Iterator[str]:
    """Whether calls run in Python or in C++."""
    if request.param == "compiled":
        request.getfixturevalue("compiled_calls")
    with selected(calls, request.param, calls.compiled):
        yield request.param


with_calls_in_each = pytest.mark.usefixtures("calls_in")


def recorded(factor: float = 1.0) -> Tensor:
    """A gradient with a graph of its own."""
    weight = torch.tensor([2.0], requires_grad=True)
    return torch.autograd.grad((weight**3).sum() * factor, weight, create_graph=True)[0]


MOST = torch.finfo(torch.float32).max

# Lists of gradients, ordinary and unusual ones.
LISTS: dict[str, Callable[[], list[Tensor]]] = {
    "every kind": every_kind,
    "none": list,
    "empty": lambda: [torch.empty(0), torch.empty(2, 0, dtype=torch.float16)],
    "number": lambda: [torch.tensor(3.0)],
    "around vectors": lambda: [normal(count, dtype=dtype) for count in (1, 7, 8, 9, 17) for dtype in DTYPES[:3]],
    "many elements": lambda: [normal(70000), normal(3, dtype=torch.bfloat16), normal(40000, dtype=torch.float16)],
    "many in one": lambda: [normal(32769)],
    "dense, in any order": lambda: [
        normal(4, 3).t(),
        normal(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        normal(10)[3:7],
    ],
    "with gaps": lambda: [normal(6, 4).t()[::2], normal(4, 3)[:, 1], normal(3)],
    "parameter": lambda: [nn.Parameter(normal(3), requires_grad=False)],
    "sparse": lambda: [sparse([1.0, 2.0, 3.0], [4, 0, 4]), normal(3)],
    "sparse rows that sum to inf": lambda: [sparse([MOST, MOST, 4.0], [3, 3, 0])],
    "compressed": lambda: [torch.eye(2).to_sparse_csr()],
    "with a graph": lambda: [recorded(), normal(3)],
    "inf with a graph": lambda: [recorded(math.inf)],
    "subclass": lambda: [marked(normal(3)), normal(3)],
    "inf of a subclass": lambda: [normal(3), marked(torch.tensor([2.0, math.inf]))],
    "float64 alone": lambda: [normal(3, dtype=torch.float64)],
    "complex": lambda: [torch.tensor([1 + 2j, -3j]), torch.tensor([1 + 2j, -3j]).conj()],
    "complex inf": lambda: [torch.tensor([complex(math.inf, 0), 4j])],
    "conjugate nan": lambda: [torch.tensor([complex(0, math.nan), 4j]).conj()],
    "lazy copy": lambda: [torch._lazy_clone(normal(5)), normal(5)],
    "largest": lambda: [torch.tensor([torch.finfo(each).max, torch.finfo(each).min], dtype=each) for each in DTYPES],
}


def values_of(grads: list[Tensor]) -> list[Tensor]:
    """Copies of gradients as dense real tensors."""
    dense = [grad.detach().to_dense().resolve_conj().clone() for grad in grads]
    return [torch.view_as_real(each) if each.is_complex() else each for each in dense]


def is_finite(values: list[Tensor]) -> bool:
    return all(bool(each.isfinite().all()) for each in values)


@with_each_implementation
class TestMultiply:
    @pytest.mark.parametrize("factor", [0.375, 0.3, 2.0**-20, 2.0**17])
    def test_products_are_rounded_once_and_in_place(self, factor):
        tensors = [*every_kind(), *(normal(3000, dtype=dtype) for dtype in DTYPES)]
        expected = [times(tensor, scalar(factor).item()) for tensor in tensors]
        memory = [tensor.data_ptr() for tensor in tensors]

        kernels.multiply_(iter(tensors), scalar(factor))

        for tensor, wanted in zip(tensors, expected, strict=True):
            assert_same_bits(tensor, wanted)
        assert [tensor.data_ptr() for tensor in tensors] == memory

    @pytest.mark.parametrize("dtype", HALF_DTYPES, ids=dtype_name)
    def test_half_gradient_with_a_graph_is_multiplied_in_no_grad_mode(self, dtype):
        grad = torch.tensor([2.0**-20], dtype=dtype, requires_grad=True) * 1
        with torch.no_grad():
            kernels.multiply_([grad], scalar(2.0**20))
        assert grad.item() == 1

    def test_sparse_and_complex_tensors_are_multiplied(self):
        column = sparse([1.0, 2.0, 3.0], [4, 0, 4])
        waves = torch.tensor([1 + 2j, -3j])
        kernels.multiply_([column, waves, waves.conj()], scalar(2.0))
        assert column.to_dense().flatten().tolist() == [4, 0, 0, 0, 8]
        assert waves.tolist() == [4 + 8j, -12j]

    @pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
    def test_multiplication_is_part_of_the_graph_of_a_gradient(self, dtype):
        weight = torch.tensor([2.0], dtype=dtype, requires_grad=True)
        (grad,) = torch.autograd.grad((weight**3).sum(), weight, create_graph=True)
        kernels.multiply_([grad], scalar(8.0))
        (second,) = torch.autograd.grad(grad.sum(), weight)
        assert second.item() == 8 * 6 * 2


@with_calls_in_each
@with_each_implementation
class TestUnscale:
    @pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
    @pytest.mark.parametrize("name", LISTS)
    def test_gradients_of_every_kind_are_unscaled_in_place(self, name):
        grads, found_inf = LISTS[name](), scalar(0.0)
        before, kinds = values_of(grads), [(type(grad), grad.requires_grad) for grad in grads]
        versions = [grad._version for grad in grads]

        kernels.unscale_(grads, scalar(0.125), found_inf)

        assert found_inf.item() == (not is_finite(before))
        assert [(type(grad), grad.requires_grad) for grad in grads] == kinds
        assert all(grad._version > version for grad, version in zip(grads, versions, strict=True))
        for found, was in zip(values_of(grads), before, strict=True):
            torch.testing.assert_close(found, times(was, 0.125), rtol=0, atol=0, equal_nan=True)

    @pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
    @pytest.mark.parametrize("name", LISTS)
    def test_unscale_by_a_scale_is_unscale_by_its_reciprocal(self, name):
        for number in (8.0, 3.0, 2.0**127, 1e-40, 0.0, math.inf, math.nan):
            grads, others, scale, expected = LISTS[name](), LISTS[name](), scalar(number), scalar(0.0)
            kernels.unscale_(others, scale.reciprocal(), expected)

            found_inf = kernels.unscale_by_(grads, scale)

            assert_same_bits(found_inf, expected)
            assert not found_inf.requires_grad
            assert scale._version == 0
            for grad, other in zip(values_of(grads), values_of(others), strict=True):
                assert_same_bits(grad, other)

    def test_unscaling_is_part_of_the_graph_of_a_gradient(self):
        weight = torch.tensor([2.0], requires_grad=True)
        (grad,) = torch.autograd.grad((weight**3).sum() * 8, weight, create_graph=True)

        kernels.unscale_([grad], scalar(1 / 8), scalar(0.0))

        (second,) = torch.autograd.grad(grad.sum(), weight)
        assert second.item() == 12

    @pytest.mark.gpu
    @pytest.mark.parametrize("where", ["cpu", "cuda"])
    def test_tensors_of_several_devices_are_unscaled_in_one_call(self, where):
        for place in range(4):
            tensors = [torch.ones(3, device=device) for device in ("cpu", "cuda", "cpu", "cuda")]
            tensors[place][1] = math.nan
            found_inf = torch.zeros((), device=where)
            kernels.unscale_(tensors, torch.full((), 0.5, device=where), found_inf)
            assert found_inf.item() == 1
            assert [tensor.cpu()[0].item() for tensor in tensors] == [0.5] * 4

    def test_each_call_returns_a_flag_of_its_own(self):
        first = kernels.unscale_by_([torch.tensor([math.inf])], scalar(2.0))
        second = kernels.unscale_by_([torch.ones(1)], scalar(2.0))
        assert (first.item(), second.item()) == (1, 0)

    def test_inference_tensors_are_unscaled(self):
        with torch.inference_mode():
            grad = torch.ones(3)
            assert kernels.unscale_by_([grad], scalar(2.0)).item() == 0
        assert grad.tolist() == [0.5] * 3

    @pytest.mark.parametrize("count", [0, 1])
    def test_meta_tensors_have_a_flag_on_their_device(self, count):
        grads = [torch.ones(3, device="meta")] * count
        found_inf = kernels.unscale_by_(grads, torch.ones((), device="meta"))
        assert (found_inf.device.type, found_inf.shape, found_inf.dtype) == ("meta", (), torch.float32)

    def test_zero_tensors_without_memory_are_refused(self):
        zeros = torch._efficientzerotensor(3)

        def is_refused() -> None:
            with pytest.raises(RuntimeError, match="ZeroTensors are immutable"):
                kernels.unscale_by_([zeros], scalar(2.0))

        process = multiprocessing.get_context("fork").Process(target=is_refused)  # which may crash
        process.start()
        process.join()
        assert process.exitcode == 0

    @pytest.mark.gpu
    def test_scale_may_be_on_another_device_than_gradients(self):
        grads = [torch.ones(3, device=device) for device in ("cpu", "cuda", "cpu")]
        grads[2][1] = math.inf
        found_inf = kernels.unscale_by_(grads, torch.full((), 2.0, device="cuda"))
        assert (found_inf.item(), found_inf.device.type) == (1, "cuda")
        assert [grad[0].item() for grad in grads] == [0.5] * 3


def pairs(half_dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients and what masters hold: two dtypes, unlike strides, an empty pair and one of a single element."""
    grads = [
        normal(5, dtype=half_dtype),
        normal(2, 3, 4, 2, dtype=half_dtype).contiguous(memory_format=torch.channels_last),
        normal(3, 4),
        normal(6, 4, dtype=half_dtype).t()[::2],
        torch.empty(0, 3, dtype=half_dtype),
        torch.full((), 3.0, dtype=half_dtype),
        marked(normal(7, dtype=half_dtype)),
        normal(70, dtype=half_dtype)[1:],
    ]
    return grads, [torch.full(grad.shape, 0.25) for grad in grads]


@with_each_implementation
@pytest.mark.parametrize("half_dtype", HALF_DTYPES, ids=dtype_name)
@pytest.mark.parametrize("write_back", [False, True], ids=["grads-kept", "grads-written"])
@pytest.mark.parametrize("adds", [False, True], ids=["copy", "add"])
class TestUnscaleInto:
    """unscale_copy, and unscale_add, which adds to the values of the masters."""

    def unscale(self, adds: bool, *arguments: object) -> None:
        (kernels.unscale_add if adds else kernels.unscale_copy)(*arguments)

    def test_masters_get_the_unscaled_gradients(self, half_dtype, write_back, adds):
        grads, master_grads = pairs(half_dtype)
        found_inf = scalar(0.0)
        before = [grad.clone() for grad in grads]
        expected = [grad.float() * scalar(0.3) + 0.25 * adds for grad in before]

        self.unscale(adds, grads, master_grads, scalar(0.3), found_inf, write_back)

        for master_grad, wanted in zip(master_grads, expected, strict=True):
            assert_same_bits(master_grad, wanted.as_subclass(Tensor))
        for grad, was, wanted in zip(grads, before, expected, strict=True):
            assert_same_bits(grad, wanted.to(grad.dtype) if write_back else was)
        assert found_inf.item() == 0

    def test_one_gradient_that_is_not_finite_is_an_overflow(self, half_dtype, write_back, adds):
        for index in range(len(pairs(half_dtype)[0])):
            grads, master_grads = pairs(half_dtype)
            grads[index].fill_(math.nan)
            found_inf = scalar(0.0)
            self.unscale(adds, grads, master_grads, scalar(0.5), found_inf, write_back)
            assert found_inf.item() == (grads[index].numel() > 0)
            assert [bool(each.isfinite().all()) for each in master_grads] == [
                bool(each.isfinite().all()) for each in grads
            ]

    @pytest.mark.gpu
    def test_tensors_of_several_devices_are_unscaled_in_one_call(self, half_dtype, write_back, adds):
        for place in range(4):
            grads = [torch.ones(3, dtype=half_dtype, device=device) for device in ("cpu", "cuda", "cpu", "cuda")]
            master_grads = [torch.zeros(3, device=grad.device) for grad in grads]
            grads[place][2] = math.inf
            found_inf = torch.zeros((), device="cuda")
            self.unscale(adds, grads, master_grads, torch.full((), 0.5, device="cuda"), found_inf, write_back)
            assert found_inf.item() == 1
            assert [each.cpu()[0].item() for each in master_grads] == [0.5] * 4


@with_each_implementation
@pytest.mark.parametrize(
    "kinds", [*itertools.permutations(SHOWN, 2)], ids=lambda kinds: "-".join(map(dtype_name, kinds))
)
def test_tiny_gradient_stays_nonzero_in_each_of_two_types(kinds):
    grads = [torch.zeros(2, dtype=dtype) for dtype in kinds]
    kernels.copy_to_half_grads([torch.tensor([2.0**-30, 1.0]) for _ in kinds], grads)
    assert [grad.tolist() for grad in grads] == [[SHOWN[dtype], 1] for dtype in kinds]


@with_each_implementation
@pytest.mark.parametrize("name", ["unscale_copy", "unscale_add"])
def test_negated_view_of_a_gradient_is_unscaled_into_its_master(name):
    negated = torch.tensor([1 + 2j, 3 - 4j]).conj().imag
    assert negated.is_neg()
    master_grad, found_inf = torch.zeros(2), scalar(0.0)
    getattr(kernels, name)([negated], [master_grad], scalar(0.5), found_inf, False)
    assert master_grad.tolist() == [-1, 2]
    assert found_inf.item() == 0


def norm_of(tensors: list[Tensor], factor: float = 1.0) -> tuple[float, float]:
    """The norm, and the overflow flag."""
    found_inf, total = scalar(0.0), torch.zeros((), dtype=torch.float64)
    kernels.found_inf_norm(iter(tensors), scalar(factor), found_inf, total)
    return math.sqrt(total.item()), found_inf.item()


@with_each_implementation
@pytest.mark.parametrize("value", NOT_FINITE)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_one_value_that_is_not_finite_is_an_overflow(dtype, value):
    tensors = every_kind()
    (last,) = [tensor for tensor in tensors if tensor.dtype is dtype and tensor.shape == (2,)]
    last[1] = value

    norm, overflow = norm_of(tensors)
    found_inf = scalar(0.0)
    kernels.unscale_(tensors, scalar(0.5), found_inf)

    assert not math.isfinite(norm)
    assert overflow == found_inf.item() == 1


@with_each_implementation
class TestFoundInfNorm:
    @pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
    @pytest.mark.parametrize("name", [name for name in LISTS if name != "largest"])
    def test_norm_of_gradients_of_every_kind_agrees_with_float64(self, name):
        grads = LISTS[name]()
        before = values_of(grads)

        norm, found_inf = norm_of(grads, 0.375)

        assert found_inf == (not is_finite(before))
        if found_inf:
            assert not math.isfinite(norm)
        else:
            whole = torch.cat([torch.zeros(1), *(each.double().flatten() for each in before)])
            assert norm == pytest.approx(0.375 * whole.norm().item(), rel=1e-6)
        for found, was in zip(values_of(grads), before, strict=True):
            assert_same_bits(found, was)

    @pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
    def test_the_largest_number_is_no_overflow(self, dtype):
        _, found_inf = norm_of([torch.full((9,), torch.finfo(dtype).max, dtype=dtype)])
        assert found_inf == 0

    def test_gradient_with_a_graph_and_negated_view_have_a_norm(self):
        weight = torch.tensor([3.0], requires_grad=True)
        (grad,) = torch.autograd.grad((weight**2).sum(), weight, create_graph=True)
        negated = torch.tensor([8j]).conj().imag
        assert norm_of([grad, negated]) == (10, 0)
        assert grad.grad_fn is not None

    @pytest.mark.gpu
    def test_tensors_of_several_devices_have_one_norm(self):
        tensors = [torch.full((2,), 2.0, device=device) for device in ("cpu", "cuda", "cpu", "cuda")]
        found_inf, total = torch.zeros((), device="cuda"), torch.zeros((), device="cuda", dtype=torch.float64)
        kernels.found_inf_norm(tensors, torch.full((), 0.5, device="cuda"), found_inf, total)
        # torch's kernels take the root of each device's sum, and square it again.
        assert (total.item(), found_inf.item()) == (pytest.approx(8), 0)


@with_each_implementation
@pytest.mark.parametrize("half_dtype", HALF_DTYPES, ids=dtype_name)
def test_masters_are_rounded_to_halves_of_other_strides(half_dtype):
    halves, _ = pairs(half_dtype)
    halves[2] = halves[2].to(half_dtype)
    masters = [normal(*half.shape) * 3 for half in halves]
    # numpy rounds on its own, and knows float16 alone.
    expected = [
        torch.from_numpy(master.numpy().astype("float16")) if half_dtype is torch.float16 else master.bfloat16()
        for master in masters
    ]

    kernels.copy_to_half(masters, halves)

    for half, wanted in zip(halves, expected, strict=True):
        assert_same_bits(half.as_subclass(Tensor), wanted)


@with_each_implementation
class TestHalvesOfFloat32Numbers:
    """Of tensors that no single implementation handles: dense ones in any order, of a subclass, and parameters."""

    @staticmethod
    def fulls() -> list[Tensor]:
        image = normal(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
        parameter = nn.Parameter(normal(3, 3), requires_grad=False)
        return [marked(normal(7)), image, normal(4, 3).t(), parameter, scalar(1.3), torch.empty(0, 3), normal(70001)]

    def test_joining_undoes_splitting(self):
        fulls = self.fulls()
        halves = [torch.empty_like(full, dtype=torch.bfloat16) for full in fulls]
        remainders = [torch.empty_like(full, dtype=torch.int16) for full in fulls]
        joined = [torch.empty_like(full) for full in fulls]

        kernels.split(fulls, halves, remainders)
        kernels.join(halves, remainders, joined)

        for full, half, back in zip(fulls, halves, joined, strict=True):
            assert_same_bits(back.as_subclass(Tensor), full.detach().as_subclass(Tensor))
            torch.testing.assert_close(half.float(), full.data, rtol=2.0**-8, atol=0)

    def test_each_element_becomes_one_of_its_neighbours(self):
        fulls = self.fulls()
        halves = [torch.empty_like(full, dtype=torch.bfloat16) for full in fulls]

        kernels.round_stochastically(fulls, halves, list(range(len(fulls))))

        for full, half in zip(fulls, halves, strict=True):
            torch.testing.assert_close(half.float(), full.data, rtol=2.0**-7, atol=0)
        assert (halves[-1] != fulls[-1].bfloat16()).any()

    @pytest.mark.gpu
    def test_devices_have_the_same_bits(self):
        fulls = [normal(100003).to(device) for device in ("cpu", "cuda", "cpu", "cuda")]
        halves = [torch.empty_like(full, dtype=torch.bfloat16) for full in fulls]
        kernels.round_stochastically(fulls, halves, [1, 1, 2, 2])
        assert_same_bits(halves[0], halves[1])
        assert_same_bits(halves[2], halves[3])
        assert not torch.equal(halves[0], halves[2])


@with_each_implementation
def test_tensors_that_are_written_to_and_no_others_count_the_write(subtests):
    """Autograd and the cache of casts see by the count that a tensor changed."""
    wide, halves = [torch.ones(3), torch.ones(6)[::2]], [torch.ones(3).half(), torch.ones(6).half()[::2]]
    both, factor, flag = [*wide, *halves], scalar(0.5), scalar(0.0)
    total, prints = torch.zeros((), dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    fulls = [torch.ones(3), torch.ones(2, 3).t()]
    brains, shorts = (
        [torch.empty_like(each, dtype=dtype) for each in fulls] for dtype in (torch.bfloat16, torch.int16)
    )
    device, policy = Device(ScaleState(4.0, 0, 1)), ScalePolicy(True, 4.0, 2.0, 0.5, 1, 1, 1.0, 16.0)
    state = [device.scale, device.unskipped, device.hysteresis_left]

    def check(work: Callable[[], None], written: list[Tensor], read: list[Tensor]) -> None:
        before = [tensor._version for tensor in (*written, *read)]
        work()
        counted = [tensor._version > was for tensor, was in zip((*written, *read), before, strict=True)]
        assert counted == [True] * len(written) + [False] * len(read)

    rows = [
        ("multiply_", lambda: kernels.multiply_(both, factor), both, [factor]),
        ("unscale_", lambda: kernels.unscale_(both, factor, flag), both, [factor]),
        ("copy", lambda: kernels.unscale_copy(halves, wide, factor, flag, False), wide, [*halves, factor]),
        ("copy and back", lambda: kernels.unscale_copy(halves, wide, factor, flag, True), both, [factor]),
        ("add", lambda: kernels.unscale_add(halves, wide, factor, flag, False), wide, [*halves, factor]),
        ("add and back", lambda: kernels.unscale_add(halves, wide, factor, flag, True), both, [factor]),
        ("norm", lambda: kernels.found_inf_norm(both, factor, flag, total), [], [*both, factor]),
        ("copy_to_half", lambda: kernels.copy_to_half(wide, halves), halves, wide),
        ("edits", lambda: kernels.copy_edits(halves, wide, prints, prints + 1, of_gradients=False), [], both),
        ("split", lambda: kernels.split(fulls, brains, shorts), [*brains, *shorts], fulls),
        ("join", lambda: kernels.join(brains, shorts, fulls), fulls, [*brains, *shorts]),
        ("round", lambda: kernels.round_stochastically(fulls, brains, [1, 2]), brains, fulls),
        ("update_scale", lambda: device.update(0.0, policy), state, []),
    ]
    check_rows(subtests, rows, check)


@with_each_implementation
@pytest.mark.parametrize("overflow", [0.0, 1.0], ids=["clean", "overflow"])
def test_gradients_are_zeroed_after_an_overflow_only(overflow):
    tensors = [*every_kind(), sparse([1.0, math.inf, 3.0], [4, 0, 4]), torch.tensor([1j, math.nan])]
    before = [tensor.clone() for tensor in tensors]

    kernels.zero_after_overflow_(tensors, scalar(overflow))

    for tensor, was in zip(tensors, before, strict=True):
        wanted = torch.zeros_like(was.to_dense()) if overflow else was.to_dense()
        assert_same_bits(tensor.to_dense(), wanted)


POWERS = st.integers(-12, 12).map(lambda exponent: 2.0**exponent)


@st.composite
def policies(draw: st.DrawFn) -> ScalePolicy:
    """Dynamic policies whose floor and ceiling are near enough to be met."""
    floor, start, ceiling = sorted([draw(POWERS), draw(POWERS), draw(POWERS)])
    return ScalePolicy(
        dynamic=True,
        init_scale=start,
        growth_factor=draw(st.sampled_from([2.0, 4.0, 1.5, 3.0, 1.001])),
        backoff_factor=draw(st.sampled_from([0.5, 0.25, 0.75, 1 / 3, 0.999])),
        scale_window=draw(st.integers(1, 4)),
        hysteresis=draw(st.integers(1, 3)),
        min_loss_scale=floor,
        max_loss_scale=ceiling,
    )


class Device:
    """A state as the kernel keeps it."""

    def __init__(self, state: ScaleState) -> None:
        self.scale = scalar(state.loss_scale)
        self.unskipped = torch.tensor(state.unskipped, dtype=torch.int32)
        self.hysteresis_left = torch.tensor(state.hysteresis_left, dtype=torch.int32)

    def update(self, overflow: float, policy: ScalePolicy) -> None:
        kernels.update_scale(
            self.scale,
            self.unskipped,
            self.hysteresis_left,
            scalar(overflow),
            policy.growth_factor,
            policy.backoff_factor,
            policy.scale_window,
            policy.hysteresis,
            policy.min_loss_scale,
            policy.max_loss_scale,
        )

    @property
    def state(self) -> ScaleState:
        return ScaleState(self.scale.item(), int(self.unskipped), int(self.hysteresis_left))


@with_each_implementation
class TestUpdateScale:
    @given(policy=policies(), overflows=st.lists(st.booleans(), max_size=30))
    def test_every_update_is_that_of_the_pure_function(self, policy, overflows):
        device = Device(ScaleState(policy.init_scale, 0, policy.hysteresis))
        for overflow in overflows:
            before = device.state
            device.update(float(overflow), policy)
            assert device.state == next_state(before, overflow, policy)

    def test_options_of_a_policy_may_be_whole_numbers(self):
        device = Device(ScaleState(4.0, 0, 1))
        device.update(1.0, ScalePolicy(True, 4, 2, 0.5, 1, 1, 1, 16))
        assert device.scale.item() == 2


# Which implementation is chosen


@pytest.fixture
def unchosen(select: Callable[[str | None], None], monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """As in a process that has not chosen yet, with AMPATCH_KERNELS not set."""
    monkeypatch.setattr(kernels._selection, "chosen", None)
    kernels._runs_on.cache_clear()  # an earlier test may have asked
    monkeypatch.delenv("AMPATCH_KERNELS")
    return select


@pytest.fixture
def none_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMPATCH_CACHE", str(tmp_path))
    monkeypatch.setattr(extension, "loaded", lambda: None)


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[type]]]:
    """Which implementation was handed what types of gradients to unscale, in the order of the calls."""
    found: list[tuple[str, list[type]]] = []

    def record(name: str, operators: ModuleType) -> None:
        unscale_ = operators.unscale_

        def recorded(grads: list[Tensor], *arguments: Tensor) -> None:
            found.append((name, [type(grad) for grad in grads]))
            unscale_(grads, *arguments)

        monkeypatch.setattr(operators, "unscale_", recorded)

    record("extension", extension_kernels)
    record("torch", torch_kernels)
    return found


def unscale_one() -> None:
    kernels.unscale_([torch.ones(2)], scalar(0.5), scalar(0.0))


class TestChoice:
    def test_auto_is_the_extension_if_it_is_built(self, compiled, unchosen, called):
        unscale_one()
        assert [name for name, _ in called] == ["extension"]
        assert kernels.in_use() == f"the compiled extension {extension.loaded().path}"

    @pytest.mark.usefixtures("none_built")
    def test_auto_is_torchs_kernels_if_no_extension_is_built(self, unchosen, called, caplog):
        caplog.set_level(logging.INFO, "ampatch")
        kernels.prepare()
        unscale_one()
        assert [name for name, _ in called] == ["torch"]
        assert kernels.in_use().startswith("torch's own multi-tensor kernels, as there is no compiled extension")
        assert caplog.messages == [f"Gradients are unscaled by {kernels.in_use()}."]
        unchosen("torch")
        with pytest.raises(KernelError, match=r"there is no compiled extension of this version.*Type `ampatch build`"):
            unchosen("extension")
        assert "AMPATCH_KERNELS=torch" in kernels.in_use()

    @pytest.mark.parametrize("choice", ["extension", "torch"])
    def test_environment_variable_and_argument_choose_alike(self, choice, compiled, unchosen, called, monkeypatch):
        monkeypatch.setenv("AMPATCH_KERNELS", choice)
        unscale_one()
        unchosen("torch")
        unscale_one()
        unchosen(choice)
        unscale_one()
        unchosen(None)
        unscale_one()
        assert [name for name, _ in called] == [choice, "torch", choice, choice]

    def test_an_invalid_choice_is_an_error_and_chooses_nothing(self, unchosen, monkeypatch):
        monkeypatch.setenv("AMPATCH_KERNELS", "extensoin")
        for choose in (kernels.prepare, unchosen, kernels.in_use, unscale_one):
            with pytest.raises(OptionError, match="AMPATCH_KERNELS is 'extensoin'; expected auto, extension, torch"):
                choose()
        assert kernels._selection.chosen is None

    @pytest.mark.slow
    def test_initialize_without_the_asked_for_extension_changes_nothing(self, fresh, tmp_path):
        program = """
import torch
from ampatch import amp
from ampatch.errors import KernelError
before = torch.mm
try:
    amp.initialize(torch.nn.Linear(2, 2), opt_level="O1", half_dtype=torch.bfloat16, verbosity=0)
except KernelError as error:
    print(error)
assert torch.mm is before
"""
        environment = {**os.environ, "AMPATCH_KERNELS": "extension", "AMPATCH_CACHE": str(tmp_path)}

        done = fresh.run(program, environment=environment)

        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("AMPATCH_KERNELS=extension asks for compiled code, and there is no")

    def test_without_a_home_directory_auto_is_torchs_kernels(self, unchosen, none_built, monkeypatch):
        def cache_directory() -> Path:
            raise KernelError("there is no directory for compiled libraries (no home)")

        monkeypatch.setattr(extension, "cache_directory", cache_directory)
        monkeypatch.setattr(extension, "find", lambda: None)
        unchosen("auto")
        assert kernels.in_use().endswith(", as there is no directory for compiled libraries (no home)")

    def test_tensors_that_the_extension_cannot_take_are_left_to_torch(self, compiled, unchosen, called):
        unchosen("extension")
        parameter = nn.Parameter(torch.ones(2), requires_grad=False)
        mixed = [torch.ones(2), marked(torch.ones(2)), parameter, torch.ones(2, dtype=torch.float64), torch.ones(1)]
        kernels.unscale_(mixed, scalar(0.5), scalar(0.0))
        assert called == [("extension", [Tensor, nn.Parameter, Tensor]), ("torch", [Marked, Tensor])]

    @pytest.mark.parametrize("too_old", [False, True], ids=["other-architecture", "driver-too-old"])
    def test_gpu_that_the_library_does_not_support_is_warned_of_once(
        self, compiled, unchosen, monkeypatch, caplog, too_old
    ):
        fault = "CUDA driver version is insufficient for CUDA runtime version"

        def try_out(device: torch.device) -> None:
            if too_old and device.index:
                raise RuntimeError(fault)

        if not too_old:
            fault = "it has no kernels for compute capability 8.0"
        monkeypatch.setattr(kernels, "_try_out", try_out)
        library = Library(Path("/built/libampatch.so"), 0, ("90",), "", "", "", "", "")
        monkeypatch.setattr(kernels._selection, "chosen", Chosen(library, ""))
        monkeypatch.setattr(
            torch.cuda, "get_device_capability", lambda device: (8, 0) if device.index and not too_old else (9, 0)
        )
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
        kernels._runs_on.cache_clear()

        runs = [kernels._runs_on(torch.device("cuda", index)) for index in (0, 1, 1, 0)]

        assert runs == [True, False, False, True]
        (message,) = caplog.messages
        assert f"/built/libampatch.so does not run on A100: {fault}." in message
        assert "`ampatch build --force`" in message

    def test_library_of_cpu_kernels_leaves_gpus_to_torch(self, compiled, unchosen, monkeypatch):
        library = Library(Path("/built/libampatch.so"), 0, (), "", "", "", "", "")
        monkeypatch.setattr(kernels._selection, "chosen", Chosen(library, ""))
        kernels._runs_on.cache_clear()

        assert [kernels._runs_on(torch.device(each)) for each in ("cpu", "cuda", "meta")] == [True, False, False]


def parameter(dtype: torch.dtype = torch.float32, *, grad: bool = False, kind: type = nn.Parameter) -> Tensor:
    made = nn.Parameter(torch.ones(2, dtype=dtype))
    made = made if kind is nn.Parameter else made.detach().as_subclass(kind).requires_grad_()
    made.grad = torch.zeros_like(made) if grad else None
    return made


def with_sparse_gradient() -> Tensor:
    made = nn.Parameter(torch.ones(5, 1))
    made.grad = sparse([1.0], [4])
    return made


class NeverWithout(Tensor):
    """A parameter whose `grad` is a property."""

    @property
    def grad(self) -> Tensor:
        return torch.ones(2)

    @grad.setter
    def grad(self, value: Tensor | None) -> None: ...


@with_calls_in_each
@pytest.mark.parametrize(
    ("parameters", "bare", "bare_and_wide"),
    [
        pytest.param(list, True, True, id="none"),
        pytest.param(lambda: [parameter(), parameter()], True, True, id="bare"),
        pytest.param(lambda: [parameter(), parameter(grad=True)], False, False, id="gradient"),
        pytest.param(lambda: [with_sparse_gradient()], False, False, id="sparse gradient"),
        pytest.param(lambda: [parameter(torch.float16)], True, False, id="float16"),
        pytest.param(lambda: [parameter(), parameter(torch.bfloat16)], True, False, id="bfloat16"),
        pytest.param(lambda: [parameter(torch.float64), torch.ones(2).cfloat()], True, True, id="other types"),
        pytest.param(lambda: [parameter(torch.float64, grad=True)], False, False, id="float64 gradient"),
        pytest.param(lambda: [parameter(kind=Marked), torch.ones(2)], True, True, id="subclass"),
        pytest.param(lambda: [parameter(torch.float16, kind=Marked)], True, False, id="half subclass"),
        pytest.param(lambda: [parameter(kind=Marked, grad=True)], False, False, id="subclass with a gradient"),
        pytest.param(lambda: [parameter(kind=NeverWithout)], False, False, id="gradient of a property"),
        pytest.param(lambda: [parameter(torch.bfloat16, grad=True)], False, False, id="half with a gradient"),
    ],
)
def test_parameters_without_gradients_are_recognised(parameters, bare, bare_and_wide):
    for container in (list, tuple, iter, lambda each: dict(enumerate(each)).values()):
        assert optimizer_state.have_no_gradients(container(parameters())) is bare
        assert optimizer_state.have_no_gradients(container(parameters()), may_be_half=True) is bare
        assert optimizer_state.have_no_gradients(container(parameters()), may_be_half=False) is bare_and_wide


class TestOnAGpu:
    """torch lacks some kernels for GPUs, and others launch once for each tensor."""

    @with_calls_in_each
    @pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
    def test_multiply_rounds_once_without_a_launch_per_tensor(self, far_devices, dtype):
        rows = [(row, each) for each in (torch.float32, dtype) for row in ([2.0**-20, 0.3], [1.0, 3.0])]
        tensors = [far_devices.of(row, dtype=each) for row, each in rows]
        expected = [times(torch.tensor(row, dtype=each), 2.0**17) for row, each in rows]
        kernels.multiply_(tensors, far_devices.of(2.0**17))
        for tensor, wanted in zip(tensors, expected, strict=True):
            assert_same_bits(far_devices.values(tensor), wanted)
        assert (far_devices.slow, far_devices.waits) == (0, [])

    def test_bfloat16_is_unscaled_although_torch_has_no_kernel(self, far_devices):
        found = []
        for value in (3.0, math.inf, math.nan):
            tensors, flag = [far_devices.of([value, 8.0], dtype=torch.bfloat16)], far_devices.of(0.0)
            kernels.unscale_(tensors, far_devices.of(0.5), flag)
            assert far_devices.values(tensors[0])[1].item() == 4
            found.append(far_devices.values(flag).item())
        assert found == [0, 1, 1]
        assert far_devices.waits == []


@pytest.mark.gpu
@with_each_implementation
class TestOnARealGpu:
    @pytest.mark.parametrize("factor", [0.3, 2.0**-20, 2.0**17])
    @pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
    def test_multiply_and_unscale_have_the_bits_of_the_cpu(self, dtype, factor):
        for function in (kernels.multiply_, lambda *given: kernels.unscale_(*given, torch.zeros_like(given[1]))):
            tensors = [normal(5, 7, dtype=dtype), normal(3000, dtype=dtype)]
            there = [tensor.cuda() for tensor in tensors]
            function(tensors, scalar(factor))
            function(there, scalar(factor).cuda())
            for tensor, wanted in zip(there, tensors, strict=True):
                assert_same_bits(tensor.cpu(), wanted)

    @pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
    def test_multiply_launches_few_kernels_for_many_tensors(self, dtype):
        tensors, factor = [torch.ones(10, dtype=dtype, device="cuda") for _ in range(200)], scalar(0.5).cuda()
        kernels.multiply_(tensors, factor)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            kernels.multiply_(tensors, factor)
            torch.cuda.synchronize()
        launched = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        assert 0 < len(launched) < 30


class TestUnscaleWithoutAKernelOfTorchs:
    """`unscale_` of half types for which torch's operator has no kernel, compared with that operator."""

    @pytest.fixture(autouse=True)
    def _without(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch_kernels, "_UNSCALED_HALVES", {})

    @given(st.lists(st.lists(st.floats(width=16), max_size=5), min_size=1, max_size=4), st.floats(2**-24, 2**24))
    @pytest.mark.parametrize("dtype", HALF_DTYPES, ids=dtype_name)
    def test_bits_and_flag_are_those_of_torchs_operator(self, dtype, rows, factor):
        tensors = [torch.tensor(row, dtype=dtype) for row in rows]
        expected, flag = [tensor.clone() for tensor in tensors], scalar(0.0)
        torch._amp_foreach_non_finite_check_and_unscale_(expected, flag, scalar(factor))
        found_inf = scalar(0.0)
        torch_kernels.unscale_(tensors, scalar(factor), found_inf)
        assert found_inf == flag
        for tensor, wanted in zip(tensors, expected, strict=True):
            assert torch.equal(tensor.isnan(), wanted.isnan())
            assert_same_bits(tensor.nan_to_num(nan=7.0), wanted.nan_to_num(nan=7.0))

    def test_large_tensor_takes_little_more_memory(self):
        large = normal(300, 1000, dtype=torch.bfloat16)
        expected = times(large, 0.25)
        peak = peak_allocated(lambda: lambda: torch_kernels.unscale_([large], scalar(0.25), scalar(0.0)))
        assert_same_bits(large, expected)
        assert 0 < peak < large.nbytes / 10

    def test_strides_are_kept_and_the_write_is_counted(self):
        column = normal(6, 4, dtype=torch.bfloat16).t()[::2]
        expected, version = times(column, 0.25), column._version
        torch_kernels.unscale_([column], scalar(0.25), scalar(0.0))
        assert torch.equal(column, expected)
        assert column._version > version
