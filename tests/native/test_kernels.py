"""Of the work on gradients: every kernel does what a loop over plain tensors does, one by one.

With either implementation. And of the choice between the two. Each operator on its own: test_operators.py.
"""

from __future__ import annotations

import itertools
import logging
import math
import multiprocessing
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from helpers import HALF_DTYPES, assert_same_bits, dtype_name
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

# The least numbers that the half types hold with all their digits, and a subnormal of each.
SMALL = {torch.float16: (2.0**-14, 2.0**-24), torch.bfloat16: (2.0**-126, 2.0**-133)}

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
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    return (tensor.to(wide) * factor).to(tensor.dtype)


@pytest.fixture(scope="class", params=["torch", "extension"])
def implementation(request: pytest.FixtureRequest) -> Iterator[str]:
    """Which kernels the tests of a class run on."""
    if request.param == "extension":
        request.getfixturevalue("compiled")
    before = kernels._selection.chosen
    kernels.select(request.param)
    yield request.param
    kernels._selection.chosen = before
    kernels._runs_on.cache_clear()


with_each_implementation = pytest.mark.usefixtures("implementation")


class Marked(Tensor):
    """A subclass of tensors, as libraries have them."""


def marked(tensor: Tensor) -> Tensor:
    return tensor.as_subclass(Marked)


@with_each_implementation
class TestMultiply:
    def test_multiplies_mixed_dtypes_shapes_and_strides_in_place(self):
        tensors = every_kind()
        expected = [times(tensor, 0.375) for tensor in tensors]
        memory = [tensor.data_ptr() for tensor in tensors]

        kernels.multiply_(tensors, scalar(0.375))

        for tensor, wanted in zip(tensors, expected, strict=True):
            assert_same_bits(tensor, wanted)
        assert [tensor.data_ptr() for tensor in tensors] == memory

    def test_empty_list_is_nothing_to_do(self):
        kernels.multiply_([], scalar(2.0))

    def test_takes_an_iterator(self):
        tensor = torch.ones(2)
        kernels.multiply_(iter([tensor]), scalar(2.0))
        assert tensor.tolist() == [2, 2]

    @pytest.mark.parametrize("dtype", HALF_DTYPES, ids=dtype_name)
    def test_factor_beyond_the_half_type_is_not_rounded_to_it(self, dtype):
        tensor = torch.full((3,), 2.0**-20, dtype=dtype)
        kernels.multiply_([tensor], scalar(2.0**24))
        assert tensor.tolist() == [16.0] * 3

    @pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
    @pytest.mark.parametrize("factor", [0.3, 2.0**-20, 2.0**17])
    def test_rounds_once_whatever_the_factor(self, dtype, factor):
        tensors = [normal(5, 7, dtype=dtype), normal(3000, dtype=dtype)]
        expected = [times(tensor, scalar(factor).item()) for tensor in tensors]
        kernels.multiply_(tensors, scalar(factor))
        for tensor, wanted in zip(tensors, expected, strict=True):
            assert_same_bits(tensor, wanted)

    @pytest.mark.parametrize("dtype", HALF_DTYPES, ids=dtype_name)
    @pytest.mark.parametrize("is_recorded", [False, True], ids=["", "with-graph"])
    def test_may_multiply_what_requires_gradients(self, dtype, is_recorded):
        weight = torch.tensor([2.0**-20], dtype=dtype, requires_grad=True)
        grad = weight * 1
        with torch.set_grad_enabled(is_recorded):
            kernels.multiply_([grad], scalar(2.0**20))
        assert grad.item() == 1

    def test_sparse_and_complex_tensors(self):
        column = sparse([1.0, 2.0, 3.0], [4, 0, 4])
        waves = torch.tensor([1 + 2j, -3j])
        kernels.multiply_([column, waves, waves.conj()], scalar(2.0))
        assert column.to_dense().flatten().tolist() == [4, 0, 0, 0, 8]
        assert waves.tolist() == [4 + 8j, -12j]

    def test_is_part_of_the_graph_of_a_gradient_that_has_one(self):
        weight = torch.tensor([2.0], requires_grad=True)
        (grad,) = torch.autograd.grad((weight**3).sum(), weight, create_graph=True)
        kernels.multiply_([grad], scalar(8.0))
        (second,) = torch.autograd.grad(grad.sum(), weight)
        assert second.item() == 8 * 6 * 2


@with_each_implementation
class TestUnscale:
    def test_scales_back_mixed_dtypes_shapes_and_strides_in_place(self):
        tensors, found_inf = every_kind(), scalar(0.0)
        expected = [times(tensor, 0.125) for tensor in tensors]
        memory = [tensor.data_ptr() for tensor in tensors]

        kernels.unscale_(tensors, scalar(0.125), found_inf)

        for tensor, wanted in zip(tensors, expected, strict=True):
            assert_same_bits(tensor, wanted)
        assert [tensor.data_ptr() for tensor in tensors] == memory
        assert found_inf.item() == 0

    @pytest.mark.parametrize("tensors", [[], [torch.empty(0), torch.empty(2, 0, dtype=torch.float16)]], ids=len)
    def test_nothing_to_look_at_is_no_overflow(self, tensors):
        found_inf = scalar(0.0)
        kernels.unscale_(tensors, scalar(0.5), found_inf)
        assert found_inf.item() == 0

    @pytest.mark.parametrize("value", NOT_FINITE)
    @pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
    def test_finds_one_value_that_is_not_finite(self, dtype, value):
        tensors = every_kind()
        (last,) = [tensor for tensor in tensors if tensor.dtype is dtype and tensor.shape == (2,)]
        last[1] = value
        found_inf = scalar(0.0)

        kernels.unscale_(tensors, scalar(0.5), found_inf)

        assert found_inf.item() == 1

    @pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
    def test_largest_number_is_finite(self, dtype):
        tensor, found_inf = torch.tensor([torch.finfo(dtype).max, torch.finfo(dtype).min], dtype=dtype), scalar(0.0)
        kernels.unscale_([tensor], scalar(0.5), found_inf)
        assert found_inf.item() == 0

    @pytest.mark.parametrize("dtype", HALF_DTYPES, ids=dtype_name)
    def test_subnormal_results_are_kept(self, dtype):
        normal_number, subnormal = SMALL[dtype]
        tensor, found_inf = torch.tensor([normal_number, subnormal], dtype=dtype), scalar(0.0)

        kernels.unscale_([tensor], scalar(0.5), found_inf)

        # Half of the least subnormal lies midway between it and zero, and rounds to even.
        assert tensor.tolist() == [normal_number / 2, 0.0]
        assert found_inf.item() == 0

    def test_is_never_reset(self):
        found_inf = scalar(0.0)
        kernels.unscale_([torch.tensor([math.inf])], scalar(0.5), found_inf)
        kernels.unscale_([torch.ones(3)], scalar(0.5), found_inf)
        kernels.unscale_([], scalar(0.5), found_inf)
        assert found_inf.item() == 1

    def test_sparse_entries_of_one_row_are_added_up_before_they_are_judged(self):
        most = torch.finfo(torch.float32).max
        column, found_inf = sparse([most, most, 2.0], [3, 3, 0]), scalar(0.0)

        kernels.unscale_([column], scalar(0.5), found_inf)

        assert column.is_coalesced()
        assert column.to_dense().flatten().tolist() == [1, 0, 0, math.inf, 0]
        assert found_inf.item() == 1

    @pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
    def test_finite_compressed_tensor(self):
        with torch.sparse.check_sparse_tensor_invariants():
            matrix = torch.sparse_csr_tensor(torch.tensor([0, 1, 2]), torch.tensor([1, 0]), torch.tensor([4.0, 8.0]))
        found_inf = scalar(0.0)
        kernels.unscale_([matrix], scalar(0.5), found_inf)
        assert matrix.to_dense().tolist() == [[0, 2], [4, 0]]
        assert found_inf.item() == 0

    def test_finite_sparse_tensor(self):
        column, found_inf = sparse([1.0, 2.0, 4.0], [3, 3, 0]), scalar(0.0)
        kernels.unscale_([column], scalar(0.5), found_inf)
        assert column.to_dense().flatten().tolist() == [2, 0, 0, 1.5, 0]
        assert found_inf.item() == 0

    @pytest.mark.parametrize(
        ("value", "overflow"),
        [(1 + 2j, 0), (complex(math.inf, 0), 1), (complex(0, math.nan), 1)],
        ids=["finite", "real-part-infinite", "imaginary-part-nan"],
    )
    @pytest.mark.parametrize("conjugated", [False, True], ids=["plain", "conjugated"])
    def test_complex_tensor(self, value, overflow, conjugated):
        tensor, found_inf = torch.tensor([value, 4j]), scalar(0.0)
        kernels.unscale_([tensor.conj() if conjugated else tensor], scalar(0.5), found_inf)
        assert found_inf.item() == overflow
        assert tensor[1].item() == 2j

    @pytest.mark.parametrize("value", [1.0, *NOT_FINITE])
    def test_gradient_with_a_graph_of_its_own_keeps_it(self, value):
        weight = torch.tensor([2.0], requires_grad=True)
        (grad,) = torch.autograd.grad((weight**3).sum() * 8 * value, weight, create_graph=True)
        found_inf = scalar(0.0)

        kernels.unscale_([grad], scalar(1 / 8), found_inf)

        assert found_inf.item() == (0 if value == 1 else 1)
        if value == 1:
            assert grad.item() == 12
            (second,) = torch.autograd.grad(grad.sum(), weight)
            assert second.item() == 12

    def test_subclass_of_tensors_among_plain_ones(self):
        for value, overflow in [(2.0, 0), (math.inf, 1)]:
            plain, parameter = torch.full((3,), 2.0), nn.Parameter(torch.full((3,), 2.0), requires_grad=False)
            other, found_inf = marked(torch.tensor([2.0, value])), scalar(0.0)
            kernels.unscale_([plain, other, parameter], scalar(0.5), found_inf)
            assert [each.tolist() for each in (plain, other, parameter)] == [[1] * 3, [1, value / 2], [1] * 3]
            assert type(other) is Marked
            assert found_inf.item() == overflow

    @pytest.mark.gpu
    @pytest.mark.parametrize("where", ["cpu", "cuda"])
    def test_tensors_of_several_devices_in_one_call(self, where):
        for place in range(4):
            tensors = [torch.ones(3, device=device) for device in ("cpu", "cuda", "cpu", "cuda")]
            tensors[place][1] = math.nan
            found_inf = torch.zeros((), device=where)
            kernels.unscale_(tensors, torch.full((), 0.5, device=where), found_inf)
            assert found_inf.item() == 1
            assert [tensor.cpu()[0].item() for tensor in tensors] == [0.5] * 4


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
    """unscale_copy and unscale_add, which adds to what is there already."""

    def unscale(self, adds: bool, *arguments: object) -> None:
        (kernels.unscale_add if adds else kernels.unscale_copy)(*arguments)

    def test_masters_are_the_gradients_scaled_back(self, half_dtype, write_back, adds):
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

    @pytest.mark.parametrize("value", NOT_FINITE)
    def test_finds_one_value_that_is_not_finite(self, half_dtype, write_back, adds, value):
        for index, grad in enumerate(pairs(half_dtype)[0]):
            for place in {0, grad.numel() - 1} if grad.numel() else ():
                grads, master_grads = pairs(half_dtype)
                where = tuple(int(each) for each in torch.unravel_index(torch.tensor(place), grad.shape))
                grads[index][where] = value
                found_inf = scalar(0.0)
                self.unscale(adds, grads, master_grads, scalar(0.5), found_inf, write_back)
                assert found_inf.item() == 1
                assert master_grads[index].isfinite().sum() == grad.numel() - 1

    def test_verdict_is_never_reset_and_not_on_what_was_there(self, half_dtype, write_back, adds):
        grads, master_grads = [torch.ones(3, dtype=half_dtype)], [torch.full((3,), math.inf)]
        for verdict in (0.0, 1.0):
            found_inf = scalar(verdict)
            self.unscale(adds, grads, master_grads, scalar(0.5), found_inf, write_back)
            self.unscale(adds, [], [], scalar(0.5), found_inf, write_back)
            assert found_inf.item() == verdict

    def test_what_half_numbers_cannot_hold_is_in_the_masters(self, half_dtype, write_back, adds):
        _, subnormal = SMALL[half_dtype]
        grads, master_grads = [torch.tensor([subnormal, 3 * subnormal], dtype=half_dtype)], [torch.zeros(2)]
        self.unscale(adds, grads, master_grads, scalar(0.5), scalar(0.0), write_back)
        assert master_grads[0].tolist() == [subnormal / 2, 3 * subnormal / 2]
        assert grads[0].tolist() == ([subnormal, 2 * subnormal] if write_back else [subnormal, 3 * subnormal])

    @pytest.mark.gpu
    def test_tensors_of_several_devices_in_one_call(self, half_dtype, write_back, adds):
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
def test_gradients_of_two_types_are_each_rounded_as_their_own_wants_it(kinds):
    grads = [torch.zeros(2, dtype=dtype) for dtype in kinds]
    kernels.copy_to_half_grads([torch.tensor([2.0**-30, 1.0]) for _ in kinds], grads)
    assert [grad.tolist() for grad in grads] == [[SHOWN[dtype], 1] for dtype in kinds]


@with_each_implementation
@pytest.mark.parametrize("name", ["unscale_copy", "unscale_add"])
def test_gradients_that_are_not_written_may_be_negated_views(name):
    negated = torch.tensor([1 + 2j, 3 - 4j]).conj().imag
    assert negated.is_neg()
    master_grad, found_inf = torch.zeros(2), scalar(0.0)
    getattr(kernels, name)([negated], [master_grad], scalar(0.5), found_inf, False)
    assert master_grad.tolist() == [-1, 2]
    assert found_inf.item() == 0


@with_each_implementation
class TestFoundInfNorm:
    def norm(self, tensors: list[Tensor], factor: float = 1.0) -> tuple[float, float]:
        """The norm and the verdict."""
        found_inf, total = scalar(0.0), torch.zeros((), dtype=torch.float64)
        kernels.found_inf_norm(iter(tensors), scalar(factor), found_inf, total)
        return math.sqrt(total.item()), found_inf.item()

    def test_agrees_with_float64_and_changes_nothing(self):
        tensors = [*every_kind(), sparse([1.0, 2.0, 3.0], [4, 0, 4]), torch.tensor([3 + 4j]), marked(normal(3))]
        before = [tensor.clone() for tensor in tensors]
        # Of the sparse one, 4 in row 4 and 2 in row 0.
        dense = torch.cat([tensor.to_dense().abs().double().flatten() for tensor in tensors])

        norm, found_inf = self.norm(tensors, 0.375)

        assert norm == pytest.approx(0.375 * dense.norm().item(), rel=1e-6)
        assert found_inf == 0
        for tensor, was in zip(tensors, before, strict=True):
            assert_same_bits(tensor.to_dense(), was.to_dense())

    def test_nothing_has_no_norm(self):
        assert self.norm([]) == self.norm([torch.empty(0), torch.empty(0, 2, dtype=torch.float16)]) == (0, 0)

    @pytest.mark.parametrize("value", NOT_FINITE)
    @pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
    def test_finds_one_value_that_is_not_finite(self, dtype, value):
        tensors = every_kind()
        (last,) = [tensor for tensor in tensors if tensor.dtype is dtype and tensor.shape == (2,)]
        last[1] = value
        norm, found_inf = self.norm(tensors)
        assert not math.isfinite(norm)
        assert found_inf == 1

    @pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
    def test_largest_number_is_finite(self, dtype):
        _, found_inf = self.norm([torch.full((9,), torch.finfo(dtype).max, dtype=dtype)])
        assert found_inf == 0

    def test_adds_to_what_is_there_and_never_resets_the_verdict(self):
        found_inf, total = scalar(1.0), torch.tensor(0.5, dtype=torch.float64)
        for _ in range(2):
            kernels.found_inf_norm([torch.full((2,), 4.0)], scalar(0.5), found_inf, total)
        assert total.item() == pytest.approx(0.5 + 8 + 8, rel=1e-12)
        assert found_inf.item() == 1

    def test_gradient_with_a_graph_of_its_own_and_a_negated_view(self):
        weight = torch.tensor([3.0], requires_grad=True)
        (grad,) = torch.autograd.grad((weight**2).sum(), weight, create_graph=True)
        negated = torch.tensor([8j]).conj().imag
        assert self.norm([grad, negated]) == (10, 0)
        assert grad.grad_fn is not None

    @pytest.mark.gpu
    def test_tensors_of_several_devices_in_one_call(self):
        tensors = [torch.full((2,), 2.0, device=device) for device in ("cpu", "cuda", "cpu", "cuda")]
        found_inf, total = torch.zeros((), device="cuda"), torch.zeros((), device="cuda", dtype=torch.float64)
        kernels.found_inf_norm(tensors, torch.full((), 0.5, device="cuda"), found_inf, total)
        # torch's kernels take the root of each device's sum, and square it again.
        assert (total.item(), found_inf.item()) == (pytest.approx(8), 0)


@with_each_implementation
class TestCopyToHalf:
    @pytest.mark.parametrize("half_dtype", HALF_DTYPES, ids=dtype_name)
    def test_rounds_pairs_of_unlike_strides(self, half_dtype):
        halves, _ = pairs(half_dtype)
        masters = [normal(*half.shape) * 3 for half in halves]
        # numpy rounds on its own, and knows float16 alone.
        expected = [
            torch.from_numpy(master.numpy().astype("float16")) if half_dtype is torch.float16 else master.bfloat16()
            for master in masters
        ]
        halves[2] = halves[2].to(half_dtype)

        kernels.copy_to_half(masters, halves)

        for half, wanted in zip(halves, expected, strict=True):
            assert_same_bits(half.as_subclass(Tensor), wanted)

    def test_parameters_of_both_half_types(self):
        masters = [nn.Parameter(torch.tensor([1 + 2.0**-9, -3e38])) for _ in HALF_DTYPES]
        halves = [nn.Parameter(torch.zeros(2, dtype=dtype)) for dtype in HALF_DTYPES]
        with torch.no_grad():
            kernels.copy_to_half(masters, halves)
        assert [half.tolist() for half in halves] == [[1 + 2.0**-9, -math.inf], [1, halves[1][1].item()]]
        assert halves[1][1].item() == pytest.approx(-3e38, rel=2.0**-8)

    def test_empty_list_is_nothing_to_do(self):
        kernels.copy_to_half([], [])


@with_each_implementation
class TestWritesAreCounted:
    """Autograd goes by the count where a tensor it keeps was changed, and so does the cache of casts."""

    def counts(self, tensors: list[Tensor], work: Callable[[], None]) -> list[bool]:
        """Which of the tensors ``work`` wrote to, as they tell it."""
        before = [tensor._version for tensor in tensors]
        work()
        return [tensor._version > was for tensor, was in zip(tensors, before, strict=True)]

    def test_by_multiply_and_unscale(self):
        tensors, factor = [torch.ones(3), torch.ones(3, dtype=torch.float16), torch.ones(6)[::2]], scalar(0.5)
        found_inf = scalar(0.0)
        watched = [*tensors, factor]
        assert self.counts(watched, lambda: kernels.multiply_(tensors, factor)) == [True] * 3 + [False]
        assert self.counts(watched, lambda: kernels.unscale_(tensors, factor, found_inf)) == [True] * 3 + [False]

    @pytest.mark.parametrize("write_back", [False, True])
    @pytest.mark.parametrize("name", ["unscale_copy", "unscale_add"])
    def test_by_what_writes_to_masters(self, name, write_back):
        grads = [torch.ones(3, dtype=torch.float16), torch.ones(3)]
        master_grads, factor, found_inf = [torch.ones(3), torch.ones(3)], scalar(0.5), scalar(0.0)
        assert self.counts(
            [*grads, *master_grads, factor],
            lambda: getattr(kernels, name)(grads, master_grads, factor, found_inf, write_back),
        ) == [write_back, write_back, True, True, False]

    def test_by_norm_and_copy_to_half(self):
        masters, halves = [torch.ones(3), torch.ones(6)[::2]], [torch.zeros(3, dtype=torch.float16) for _ in range(2)]
        factor, found_inf, total = scalar(0.5), scalar(0.0), torch.zeros((), dtype=torch.float64)
        watched = [*masters, *halves, factor]
        assert not any(
            self.counts(watched, lambda: kernels.found_inf_norm([*masters, *halves], factor, found_inf, total))
        )
        assert self.counts(watched, lambda: kernels.copy_to_half(masters, halves)) == [False] * 2 + [True] * 2 + [False]

    def test_by_the_update_of_the_scale(self):
        device, policy = Device(ScaleState(4.0, 0, 1)), ScalePolicy(True, 4.0, 2.0, 0.5, 1, 1, 1.0, 16.0)
        state = [device.scale, device.unskipped, device.hysteresis_left]
        assert self.counts(state, lambda: device.update(0.0, policy)) == [True] * 3

    def test_autograd_sees_a_gradient_that_it_keeps_change(self):
        kept = torch.ones(3, requires_grad=True)
        factor = torch.ones(3)
        loss = (kept * factor).sum()
        kernels.unscale_([factor], scalar(0.5), scalar(0.0))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@with_each_implementation
class TestZeroAfterOverflow:
    @pytest.mark.parametrize("overflow", [0.0, 1.0], ids=["clean", "overflow"])
    def test_zeroes_everything_or_nothing(self, overflow):
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
    def test_every_transition_is_that_of_the_pure_function(self, policy, overflows):
        device = Device(ScaleState(policy.init_scale, 0, policy.hysteresis))
        for overflow in overflows:
            before = device.state
            device.update(float(overflow), policy)
            assert device.state == next_state(before, overflow, policy)

    @given(overflows=st.lists(st.booleans(), max_size=60), window=st.integers(1, 4), hysteresis=st.integers(1, 3))
    def test_powers_of_two_are_exact_all_the_way(self, overflows, window, hysteresis):
        policy = ScalePolicy(True, 1.0, 2.0, 0.5, window, hysteresis, min_loss_scale=2.0**-24, max_loss_scale=2.0**24)
        state = ScaleState(1.0, 0, hysteresis)
        device = Device(state)
        for overflow in overflows:
            state = next_state(state, overflow, policy)
            device.update(float(overflow), policy)
            assert device.state == state

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
    def test_auto_is_the_extension_where_there_is_one(self, compiled, unchosen, called):
        unscale_one()
        assert [name for name, _ in called] == ["extension"]
        assert kernels.in_use() == f"the compiled extension {extension.loaded().path}"

    @pytest.mark.usefixtures("unchosen", "none_built")
    def test_auto_is_torchs_where_there_is_none(self, called):
        unscale_one()
        assert [name for name, _ in called] == ["torch"]
        assert kernels.in_use().startswith("torch's own multi-tensor kernels, as there is no compiled extension")
        assert "`ampatch build`" in kernels.in_use()

    @pytest.mark.parametrize("choice", ["extension", "torch"])
    def test_environment_and_argument_choose_alike(self, choice, compiled, unchosen, called, monkeypatch):
        monkeypatch.setenv("AMPATCH_KERNELS", choice)
        unscale_one()
        unchosen("torch")
        unscale_one()
        unchosen(choice)
        unscale_one()
        unchosen(None)
        unscale_one()
        assert [name for name, _ in called] == [choice, "torch", choice, choice]

    def test_torchs_can_be_asked_for(self, unchosen):
        unchosen("torch")
        assert kernels.in_use() == "torch's own multi-tensor kernels, as AMPATCH_KERNELS=torch asks for"

    @pytest.mark.parametrize(
        ("value", "message"),
        [
            ("extensoin", "'extensoin'; expected auto, extension, torch. Did you mean 'extension'?"),
            ("Torch", "'Torch'; expected auto, extension, torch. Did you mean 'torch'?"),
            ("", "''; expected auto, extension, torch."),
        ],
    )
    def test_a_choice_that_is_none_is_an_error_and_chooses_nothing(self, value, message, unchosen, monkeypatch):
        monkeypatch.setenv("AMPATCH_KERNELS", value)
        for choose in (kernels.prepare, unchosen, kernels.in_use, unscale_one):
            with pytest.raises(OptionError) as raised:
                choose()
            assert str(raised.value) == f"AMPATCH_KERNELS is {message}"
        assert kernels._selection.chosen is None

    @pytest.mark.usefixtures("none_built")
    def test_an_extension_that_is_asked_for_and_not_there_is_an_error(self, unchosen):
        unchosen("torch")
        with pytest.raises(KernelError, match=r"there is no compiled extension of this version.*Type `ampatch build`"):
            unchosen("extension")
        assert "AMPATCH_KERNELS=torch" in kernels.in_use()

    @pytest.mark.slow
    def test_an_error_at_initialize_comes_before_anything_is_changed(self, fresh, tmp_path):
        program = """
import torch
from ampatch import amp
from ampatch.diagnostics.peak_memory import peak_allocated
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
        assert "Type `ampatch build`" in done.stdout

    def test_a_library_that_cannot_be_loaded_is_left_alone_unless_it_is_asked_for(
        self, compiled, unchosen, called, monkeypatch
    ):
        def load(library: Library) -> None:
            raise KernelError(f"the compiled library {library.path} cannot be loaded (truncated)")

        monkeypatch.setattr(extension, "load", load)
        unchosen("auto")
        unscale_one()
        assert [name for name, _ in called] == ["torch"]
        assert kernels.in_use().startswith("torch's own multi-tensor kernels, as the compiled library /")
        with pytest.raises(KernelError, match="truncated"):
            unchosen("extension")

    def test_a_user_without_a_home_directory_has_torchs_unless_the_extension_is_asked_for(self, unchosen, monkeypatch):
        def cache_directory() -> Path:
            raise KernelError("there is no directory for compiled libraries (no home)")

        monkeypatch.setattr(extension, "loaded", lambda: None)
        monkeypatch.setattr(extension, "find", lambda: None)
        monkeypatch.setattr(extension, "cache_directory", cache_directory)
        unchosen("auto")
        assert kernels.in_use() == (
            "torch's own multi-tensor kernels, as there is no directory for compiled libraries (no home)"
        )
        with pytest.raises(KernelError, match=r"no directory for compiled libraries"):
            unchosen("extension")

    def test_one_line_is_logged_where_there_is_no_extension(self, unchosen, none_built, caplog):
        caplog.set_level(logging.INFO, "ampatch")
        for _ in range(2):
            kernels.prepare()
            unscale_one()
        (record,) = caplog.records
        assert record.levelno == logging.INFO
        assert record.getMessage().startswith("Gradients are unscaled by torch's own multi-tensor kernels, as there")

    def test_nothing_is_logged_where_there_is_one(self, compiled, unchosen, caplog):
        caplog.set_level(logging.INFO, "ampatch")
        kernels.prepare()
        unscale_one()
        assert caplog.records == []

    def test_what_the_extension_does_not_know_is_left_to_torch(self, compiled, unchosen, called):
        unchosen("extension")
        parameter = nn.Parameter(torch.ones(2), requires_grad=False)
        mixed = [torch.ones(2), marked(torch.ones(2)), parameter, torch.ones(2, dtype=torch.float64), torch.ones(1)]
        kernels.unscale_(mixed, scalar(0.5), scalar(0.0))
        assert called == [("extension", [Tensor, nn.Parameter, Tensor]), ("torch", [Marked, Tensor])]

    @pytest.mark.parametrize("too_old", [False, True], ids=["other-architecture", "driver-too-old"])
    def test_a_gpu_that_the_library_does_not_run_on_is_left_to_torch_and_said_once(
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

    def test_a_library_of_cpu_kernels_leaves_gpus_to_torch(self, compiled, unchosen, monkeypatch):
        library = Library(Path("/built/libampatch.so"), 0, (), "", "", "", "", "")
        monkeypatch.setattr(kernels._selection, "chosen", Chosen(library, ""))
        kernels._runs_on.cache_clear()

        assert [kernels._runs_on(torch.device(each)) for each in ("cpu", "cuda", "meta")] == [True, False, False]


# What the library of calls answers, where it is in use


@pytest.fixture(scope="class", params=["python", "compiled"])
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """Whether calls run in Python or in C++."""
    if request.param == "compiled":
        request.getfixturevalue("compiled_calls")
    before = calls._selection.chosen
    calls.select(request.param)
    yield request.param
    calls._selection.chosen = before
    calls.compiled.cache_clear()


in_each_way = pytest.mark.usefixtures("way")


def sizes(*counts: int) -> list[Tensor]:
    return [normal(count, dtype=dtype) for count, dtype in zip(counts, DTYPES, strict=False)]


def recorded() -> Tensor:
    weight = torch.tensor([2.0], requires_grad=True)
    return torch.autograd.grad((weight**3).sum(), weight, create_graph=True)[0]


# Gradients in lists as they come, and as they hardly ever do.
LISTS: dict[str, Callable[[], list[Tensor]]] = {
    "every kind": every_kind,
    "none": list,
    "empty ones": lambda: [torch.empty(0), torch.empty(2, 0, dtype=torch.float16)],
    "one": lambda: [torch.tensor(3.0)],
    "around vectors": lambda: [normal(count, dtype=dtype) for count in (1, 7, 8, 9, 17) for dtype in DTYPES[:3]],
    "many": lambda: sizes(70000, 3, 40000),
    "many in one": lambda: [normal(32769)],
    "dense, in any order": lambda: [
        normal(4, 3).t(),
        normal(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        normal(10)[3:7],
    ],
    "with gaps": lambda: [normal(6, 4).t()[::2], normal(4, 3)[:, 1], normal(3)],
    "parameters": lambda: [nn.Parameter(normal(3), requires_grad=False)],
    "a sparse one": lambda: [sparse([1.0, 2.0, 3.0], [4, 0, 4]), normal(3)],
    "one with a graph": lambda: [recorded(), normal(3)],
    "a subclass": lambda: [marked(normal(3)), normal(3)],
    "float64 alone": lambda: [normal(3, dtype=torch.float64)],
    "complex": lambda: [torch.tensor([1 + 2j, -3j]), torch.tensor([1 + 2j, -3j]).conj()],
    "one copied lazily": lambda: [torch._lazy_clone(normal(5)), normal(5)],
    "one twice": lambda: [torch.ones(3)] * 2,
}


@in_each_way
@with_each_implementation
class TestUnscaleBy:
    @pytest.mark.parametrize("name", LISTS)
    def test_does_what_unscale_does_by_the_reciprocal(self, name):
        for scale in (8.0, 3.0, 2.0**127, 1e-40, 0.0, math.inf, math.nan):
            grads, others, expected = LISTS[name](), LISTS[name](), scalar(0.0)
            types = [(type(grad), grad.requires_grad) for grad in grads]
            kernels.unscale_(others, scalar(scale).reciprocal(), expected)

            found_inf = kernels.unscale_by_(grads, scalar(scale))

            assert_same_bits(found_inf, expected)
            assert not found_inf.requires_grad
            assert [(type(grad), grad.requires_grad) for grad in grads] == types
            for grad, other in zip(grads, others, strict=True):
                assert_same_bits(*(each.detach().to_dense().resolve_conj() for each in (grad, other)))

    @pytest.mark.parametrize("name", LISTS)
    def test_writes_are_counted(self, name):
        grads = LISTS[name]()
        before, scale = [grad._version for grad in grads], scalar(8.0)
        kernels.unscale_by_(grads, scale)
        assert all(grad._version > was for grad, was in zip(grads, before, strict=True))
        assert scale._version == 0

    def test_finds_one_value_that_is_not_finite_wherever_it_stands(self):
        for dtype, value in itertools.product(DTYPES, NOT_FINITE):
            for count, place in [(1, 0), (8, 7), (19, 3), (19, 18), (32769, 0), (32769, 32768)]:
                grads = [torch.ones(3), torch.ones(count, dtype=dtype), torch.ones(3, dtype=torch.bfloat16)]
                grads[1][place] = value
                assert kernels.unscale_by_(grads, scalar(4.0)).item() == 1, (dtype, value, count, place)
                assert grads[1].isfinite().sum() == count - 1
                assert grads[0].tolist() == grads[2].tolist() == [0.25] * 3

    def test_largest_number_is_finite(self):
        for dtype in DTYPES:
            most = torch.finfo(dtype)
            grad = torch.tensor([most.max, most.min] * 9, dtype=dtype)
            assert kernels.unscale_by_([grad], scalar(2.0)).item() == 0, dtype

    def test_each_verdict_is_a_tensor_of_its_own(self):
        first = kernels.unscale_by_([torch.tensor([math.inf])], scalar(2.0))
        second = kernels.unscale_by_([torch.ones(1)], scalar(2.0))
        assert (first.item(), second.item()) == (1, 0)

    def test_what_a_lazy_copy_was_made_of_stays_as_it_is(self):
        whole = torch.ones(3)
        kernels.unscale_by_([torch._lazy_clone(whole)], scalar(2.0))
        assert whole.tolist() == [1] * 3

    def test_inference_tensors_have_no_count(self):
        with torch.inference_mode():
            grad = torch.ones(3)
            assert kernels.unscale_by_([grad], scalar(2.0)).item() == 0
        assert grad.tolist() == [0.5] * 3

    def test_autograd_sees_a_gradient_that_it_keeps_change(self):
        kept, factor = torch.ones(3, requires_grad=True), torch.ones(3)
        loss = (kept * factor).sum()
        kernels.unscale_by_([factor], scalar(2.0))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    @pytest.mark.parametrize("count", [0, 1])
    def test_on_a_device_without_memory(self, count):
        grads = [torch.ones(3, device="meta")] * count
        found_inf = kernels.unscale_by_(grads, torch.ones((), device="meta"))
        assert (found_inf.device.type, found_inf.shape, found_inf.dtype) == ("meta", (), torch.float32)

    def test_zeros_that_have_no_memory_are_refused(self):
        zeros = torch._efficientzerotensor(3)

        def is_refused() -> None:
            with pytest.raises(RuntimeError, match="ZeroTensors are immutable"):
                kernels.unscale_by_([zeros], scalar(2.0))

        process = multiprocessing.get_context("fork").Process(target=is_refused)  # which may crash
        process.start()
        process.join()
        assert process.exitcode == 0

    @pytest.mark.gpu
    def test_a_scale_on_another_device_than_the_gradients(self):
        grads = [torch.ones(3, device=device) for device in ("cpu", "cuda", "cpu")]
        grads[2][1] = math.inf
        found_inf = kernels.unscale_by_(grads, torch.full((), 2.0, device="cuda"))
        assert (found_inf.item(), found_inf.device.type) == (1, "cuda")
        assert [grad[0].item() for grad in grads] == [0.5] * 3


def parameter(dtype: torch.dtype = torch.float32, *, grad: bool = False, kind: type = nn.Parameter) -> Tensor:
    made = nn.Parameter(torch.ones(2, dtype=dtype))
    made = made if kind is nn.Parameter else made.detach().as_subclass(kind).requires_grad_()
    made.grad = torch.ones_like(made) if grad else None
    return made


class NeverWithout(Tensor):
    """One whose gradient is there, whatever autograd says."""

    @property
    def grad(self) -> Tensor:
        return torch.ones(2)

    @grad.setter
    def grad(self, value: Tensor | None) -> None: ...


@in_each_way
class TestAreBare:
    @pytest.mark.parametrize(
        ("parameters", "bare", "bare_and_wide"),
        [
            (list, True, True),
            (lambda: [parameter(), parameter()], True, True),
            (lambda: [parameter(), parameter(grad=True)], False, False),
            (lambda: [parameter(torch.float16)], True, False),
            (lambda: [parameter(), parameter(torch.bfloat16)], True, False),
            (lambda: [parameter(torch.float64), torch.ones(2, dtype=torch.complex64)], True, True),
            (lambda: [parameter(torch.float64, grad=True)], False, False),
            (lambda: [parameter(kind=Marked), torch.ones(2)], True, True),
            (lambda: [parameter(torch.float16, kind=Marked)], True, False),
            (lambda: [parameter(kind=Marked, grad=True)], False, False),
            (lambda: [parameter(kind=NeverWithout)], False, False),
            (lambda: [parameter(torch.bfloat16, grad=True)], False, False),
        ],
        ids=[
            "none",
            "bare",
            "a gradient",
            "float16",
            "bfloat16",
            "other types",
            "a gradient of float64",
            "a subclass",
            "a half subclass",
            "a subclass with a gradient",
            "a gradient of its own idea",
            "both",
        ],
    )
    def test_whatever_there_is(self, parameters, bare, bare_and_wide):
        for container in (list, tuple, iter):
            assert optimizer_state.have_no_gradients(container(parameters())) is bare
            assert optimizer_state.have_no_gradients(container(parameters()), may_be_half=True) is bare
            assert optimizer_state.have_no_gradients(container(parameters()), may_be_half=False) is bare_and_wide

    def test_views_of_a_dict(self):
        parameters = {0: parameter(), 1: parameter()}
        assert optimizer_state.have_no_gradients(parameters.values())
        parameters[1].grad = torch.ones(2)
        assert not optimizer_state.have_no_gradients(parameters.values())

    def test_zeros_and_sparse_gradients_are_gradients(self):
        one = parameter()
        one.grad = torch.zeros(2)
        assert not optimizer_state.have_no_gradients([one])
        other = nn.Parameter(torch.ones(5, 1))
        other.grad = sparse([1.0], [4])
        assert not optimizer_state.have_no_gradients([other])


class TestOnAGpu:
    """What torch's own kernels are not there for, and what they would do in another way."""

    @pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
    def test_multiply_launches_nothing_for_each_tensor_and_rounds_once(self, far_devices, dtype):
        values = [[2.0**-20, 0.3], [1.0, 3.0]]
        tensors = [far_devices.of(row, dtype=dtype) for row in values]
        expected = [times(torch.tensor(row, dtype=dtype), 2.0**17) for row in values]
        kernels.multiply_(tensors, far_devices.of(2.0**17))
        for tensor, wanted in zip(tensors, expected, strict=True):
            assert_same_bits(far_devices.values(tensor), wanted)
        assert (far_devices.slow, far_devices.waits) == (0, [])

    def test_unscale_takes_bfloat16_for_which_torch_has_no_kernel(self, far_devices):
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
    def test_multiply_and_unscale_give_the_bits_of_the_cpu(self, dtype, factor):
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
    def test_gives_the_same_bits_and_the_same_verdict(self, dtype, rows, factor):
        tensors = [torch.tensor(row, dtype=dtype) for row in rows]
        expected, flag = [tensor.clone() for tensor in tensors], scalar(0.0)
        torch._amp_foreach_non_finite_check_and_unscale_(expected, flag, scalar(factor))
        found_inf = scalar(0.0)
        torch_kernels.unscale_(tensors, scalar(factor), found_inf)
        assert found_inf == flag
        for tensor, wanted in zip(tensors, expected, strict=True):
            assert torch.equal(tensor.isnan(), wanted.isnan())
            assert_same_bits(tensor.nan_to_num(nan=7.0), wanted.nan_to_num(nan=7.0))

    def test_of_many_elements_needs_little_more_memory(self):
        large = normal(300, 1000, dtype=torch.bfloat16)
        expected = times(large, 0.25)
        peak = peak_allocated(lambda: lambda: torch_kernels.unscale_([large], scalar(0.25), scalar(0.0)))
        assert_same_bits(large, expected)
        assert 0 < peak < large.nbytes / 10

    def test_keeps_strides_and_counts_the_write(self):
        column = normal(6, 4, dtype=torch.bfloat16).t()[::2]
        expected, version = times(column, 0.25), column._version
        torch_kernels.unscale_([column], scalar(0.25), scalar(0.0))
        assert torch.equal(column, expected)
        assert column._version > version
