"""Of the work on gradients: every kernel does what a loop over plain tensors does, one by one."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import HALF_DTYPES, assert_same_bits, dtype_name
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ampatch import kernels
from ampatch.loss_scaler import ScalePolicy, ScaleState, next_state

DTYPES = (*HALF_DTYPES, torch.float32, torch.float64)
NOT_FINITE = (math.inf, -math.inf, math.nan)

# The least numbers that the half types hold with all their digits, and a subnormal of each.
SMALL = {torch.float16: (2.0**-14, 2.0**-24), torch.bfloat16: (2.0**-126, 2.0**-133)}


def scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float32)


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


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
        factor=draw(st.sampled_from([2.0, 4.0, 1.5, 3.0, 1.001])),
        window=draw(st.integers(1, 4)),
        hysteresis=draw(st.integers(1, 3)),
        floor=floor,
        ceiling=ceiling,
    )


class Device:
    """A state as the kernel keeps it."""

    def __init__(self, state: ScaleState) -> None:
        self.scale = scalar(state.loss_scale)
        self.unskipped = torch.tensor(state.unskipped, dtype=torch.int32)
        self.hysteresis_left = torch.tensor(state.hysteresis_left, dtype=torch.int32)

    def update(self, overflow: float, policy: ScalePolicy) -> None:
        kernels.update_scale_(
            self.scale,
            self.unskipped,
            self.hysteresis_left,
            scalar(overflow),
            factor=policy.factor,
            window=policy.window,
            hysteresis=policy.hysteresis,
            floor=policy.floor,
            ceiling=policy.ceiling,
        )

    @property
    def state(self) -> ScaleState:
        return ScaleState(self.scale.item(), int(self.unskipped), int(self.hysteresis_left))


class TestUpdateScale:
    @given(policy=policies(), overflows=st.lists(st.booleans(), max_size=30))
    def test_every_transition_is_that_of_the_pure_function(self, policy, overflows):
        device = Device(ScaleState(policy.init_scale, 0, policy.hysteresis))
        for overflow in overflows:
            before = device.state
            device.update(float(overflow), policy)
            after, expected = device.state, next_state(before, overflow, policy)
            # The scale itself up to the rounding of float32, in which a factor of 3 or 1.5 is not exact.
            assert after.loss_scale == pytest.approx(expected.loss_scale, rel=2.0**-23)
            assert (after.unskipped, after.hysteresis_left) == (expected.unskipped, expected.hysteresis_left)

    @given(overflows=st.lists(st.booleans(), max_size=60), window=st.integers(1, 4), hysteresis=st.integers(1, 3))
    def test_powers_of_two_are_exact_all_the_way(self, overflows, window, hysteresis):
        policy = ScalePolicy(True, 1.0, 2.0, window, hysteresis, floor=2.0**-24, ceiling=2.0**24)
        state = ScaleState(1.0, 0, hysteresis)
        device = Device(state)
        for overflow in overflows:
            state = next_state(state, overflow, policy)
            device.update(float(overflow), policy)
            assert device.state == state
