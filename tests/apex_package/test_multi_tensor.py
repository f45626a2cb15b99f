"""Of the kernels of amp_C, and what calls them: they do what a loop in float64 does, rounded once."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from helpers import DEVICES, assert_same_bits, assert_same_state, casts_on
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ampatch.apex import amp_C, apex_C
from ampatch.apex.multi_tensor_apply import MultiTensorApply, multi_tensor_applier
from ampatch.errors import OptionError

DTYPES = (torch.float16, torch.float32, torch.bfloat16)
SHAPES = ((3, 4), (), (5,), (0, 2), (2, 3, 2))
NOT_FINITE = (math.inf, -math.inf, math.nan)


@pytest.fixture(autouse=True, params=["torch", "extension"])
def implementation(request: pytest.FixtureRequest, select: Callable[[str | None], None]) -> str:
    """Which kernels do the work."""
    if request.param == "extension":
        request.getfixturevalue("compiled")
    select(request.param)
    return request.param


def drawn(seed: int, dtypes: tuple[torch.dtype, ...] = DTYPES, device: str = "cpu") -> list[Tensor]:
    """Tensors of all shapes, and one that is not contiguous, with the dtypes in turn."""
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(shape, generator=generator) for shape in SHAPES]
    tensors.append(torch.randn(6, 4, generator=generator).t()[::2])
    return [tensor.to(device, dtype) for tensor, dtype in zip(tensors, itertools.cycle(dtypes), strict=False)]


def empty(dtypes: tuple[torch.dtype, ...], device: str = "cpu") -> list[Tensor]:
    return [torch.full_like(tensor, math.nan) for tensor in drawn(0, dtypes, device)]


def flag(device: str = "cpu") -> Tensor:
    return torch.zeros(1, dtype=torch.int32, device=device)


def copies(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.clone() for tensor in tensors]


# So that ins and outs meet in every pair of dtypes.
DTYPES_OF_OUTS = pytest.mark.parametrize(
    "out_dtypes",
    [(torch.float32,), (torch.float16,), (torch.bfloat16,), DTYPES, DTYPES[::-1]],
    ids=["float32", "float16", "bfloat16", "as ins", "mixed"],
)


class Copies(TorchDispatchMode):
    """Counts results of some size that do not lie in the memory of known tensors."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self.found = 0
        self._known = {tensor.data_ptr() for tensor in known}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.numel() > 1:
            self.found += result.data_ptr() not in self._known
        return result


class TestScale:
    @DTYPES_OF_OUTS
    @pytest.mark.parametrize("device", DEVICES)
    @pytest.mark.covering(1)
    def test_scale_multiplies_in_float32_and_rounds_once(self, out_dtypes, device):
        ins, outs, overflow = drawn(0, device=device), empty(out_dtypes, device), flag(device)
        factor = torch.tensor(0.3, device=device)
        expected = [(one.float() * factor).to(other.dtype) for one, other in zip(ins, outs, strict=True)]
        before = copies(ins)
        assert amp_C.multi_tensor_scale(2048, overflow, [ins, outs], 0.3) is None
        assert_same_state(outs, expected)
        assert_same_state(ins, before)
        assert overflow.item() == 0

    def test_scale_in_place_or_into_float32_takes_no_memory(self):
        halves, singles = [torch.ones(5, dtype=torch.bfloat16)], [torch.ones(5)]
        with Copies(halves + singles) as copied:
            amp_C.multi_tensor_scale(2048, flag(), [halves, halves], 2.0)
            amp_C.multi_tensor_scale(2048, flag(), [halves, singles], 2.0)
        assert copied.found == 0
        assert singles[0].tolist() == [4] * 5
        with Copies(halves + singles) as copied:
            amp_C.multi_tensor_scale(2048, flag(), [singles, halves], 2.0)
        assert copied.found == 1

    def test_scale_takes_a_number_or_a_tensor_of_one_element_as_factor(self):
        for factor in (torch.tensor(0.5), torch.tensor([0.5], dtype=torch.float64), 0.5):
            grads = [torch.ones(2)]
            amp_C.multi_tensor_scale(2048, flag(), [grads, grads], factor)
            assert grads[0].tolist() == [0.5, 0.5]

        outs = [torch.zeros(1)]
        with pytest.raises(OptionError, match="as a factor"):
            amp_C.multi_tensor_scale(2048, flag(), [[torch.ones(1)], outs], torch.ones(2))
        assert outs[0].item() == 0

    @DTYPES_OF_OUTS
    @pytest.mark.parametrize("value", NOT_FINITE, ids=str)
    def test_scale_raises_the_flag_at_an_element_that_is_not_finite_and_writes(self, out_dtypes, value):
        ins, outs, overflow = drawn(0), empty(out_dtypes), flag()
        ins[-1][0, 0] = value
        amp_C.multi_tensor_scale(2048, overflow, [ins, outs], 1.0)
        assert overflow.item() == 1
        assert not outs[-1][0, 0].isfinite()
        assert outs[0].isfinite().all()

    def test_scale_in_place_raises_the_flag_and_never_lowers_it(self):
        grads, overflow = [torch.tensor([1.0, math.inf])], flag()
        amp_C.multi_tensor_scale(2048, overflow, [grads, grads], 0.5)
        assert overflow.item() == 1
        amp_C.multi_tensor_scale(2048, overflow, [drawn(0), empty(DTYPES)], 1.0)
        assert overflow.item() == 1

    def test_the_flag_stays_if_finite_elements_overflow_in_outs(self):
        outs, overflow = [torch.zeros(1, dtype=torch.float16)], flag()
        amp_C.multi_tensor_scale(2048, overflow, [[torch.tensor([60000.0])], outs], 2.0)
        assert overflow.item() == 0
        assert outs[0].item() == math.inf

    def test_empty_lists_change_nothing(self):
        overflow = flag()
        amp_C.multi_tensor_scale(2048, overflow, [[], []], 2.0)
        amp_C.multi_tensor_axpby(2048, overflow, [[], [], []], 1.0, 1.0)
        assert overflow.item() == 0

    def test_scale_writes_to_parameters_unseen_by_autograd(self):
        masters = [nn.Parameter(torch.full((2,), 0.1))]
        halves = [nn.Parameter(torch.zeros(2, dtype=torch.float16))]
        amp_C.multi_tensor_scale(2048, flag(), [masters, halves], 1.0)
        assert_same_bits(halves[0], masters[0].half())
        assert halves[0].is_leaf
        amp_C.multi_tensor_scale(2048, flag(), [masters, masters], 2.0)
        assert masters[0].is_leaf
        assert masters[0].tolist() == pytest.approx([0.2, 0.2])


class TestAxpby:
    @DTYPES_OF_OUTS
    @pytest.mark.parametrize("device", DEVICES)
    def test_axpby_adds_in_float32_and_rounds_once(self, out_dtypes, device):
        xs, ys, outs = drawn(0, device=device), drawn(1, DTYPES[::-1], device), empty(out_dtypes, device)
        a, b = torch.tensor(0.3, device=device), torch.tensor(-1.7, device=device)
        expected = [(x.float() * a + y.float() * b).to(out.dtype) for x, y, out in zip(xs, ys, outs, strict=True)]
        before, overflow = (copies(xs), copies(ys)), flag(device)
        amp_C.multi_tensor_axpby(2048, overflow, [xs, ys, outs], 0.3, -1.7)
        assert_same_state(outs, expected)
        assert_same_state((xs, ys), before)
        assert overflow.item() == 0

    @given(
        arg_to_check=st.sampled_from([-1, 0, 1]),
        of_x=st.sampled_from([1.0, *NOT_FINITE]),
        of_y=st.sampled_from([1.0, *NOT_FINITE]),
    )
    def test_axpby_checks_the_arguments_that_it_is_told_to(self, arg_to_check, of_x, of_y):
        overflow = flag()
        lists = [[torch.tensor([1.0, of_x])], [torch.tensor([1.0, of_y])], [torch.zeros(2)]]
        amp_C.multi_tensor_axpby(2048, overflow, lists, 1.0, 1.0, arg_to_check)
        checked = {-1: (of_x, of_y), 0: (of_x,), 1: (of_y,)}[arg_to_check]
        assert bool(overflow.item()) is not all(map(math.isfinite, checked))

    def test_axpby_writes_into_either_argument(self):
        xs, ys = [torch.tensor([1.0, 2.0])], [torch.tensor([10.0, 20.0])]
        amp_C.multi_tensor_axpby(2048, flag(), [xs, ys, ys], 2.0, 1.0)
        assert ys[0].tolist() == [12, 24]
        amp_C.multi_tensor_axpby(2048, flag(), [xs, ys, xs], 1.0, 0.5, 0)
        assert xs[0].tolist() == [7, 14]

    def test_axpby_refuses_another_argument_to_check(self):
        outs = [torch.zeros(1)]
        with pytest.raises(OptionError, match="arg_to_check=2"):
            amp_C.multi_tensor_axpby(2048, flag(), [[torch.ones(1)], [torch.ones(1)], outs], 1.0, 1.0, 2)
        assert outs[0].item() == 0


class TestNorm:
    @pytest.mark.parametrize("dtypes", [(dtype,) for dtype in DTYPES] + [DTYPES], ids=str)
    @pytest.mark.parametrize("device", DEVICES)
    def test_l2norm_is_of_all_elements_and_of_each_tensor(self, dtypes, device):
        tensors, overflow = drawn(0, dtypes, device), flag(device)
        norms = [float(tensor.double().square().sum().sqrt()) for tensor in tensors]
        norm, of_each = amp_C.multi_tensor_l2norm(2048, overflow, [tensors], True)
        assert (norm.shape, norm.dtype, norm.device) == ((1,), torch.float32, tensors[0].device)
        assert (of_each.shape, of_each.dtype) == ((len(tensors),), torch.float32)
        assert norm.item() == pytest.approx(math.hypot(*norms), rel=1e-6)
        assert of_each.tolist() == pytest.approx(norms, rel=1e-6)
        assert overflow.item() == 0

    @pytest.mark.parametrize("arguments", [(), (False,), (None,)])
    def test_l2norm_of_each_tensor_is_given_only_if_asked_for(self, arguments):
        tensors = drawn(0)
        norm, of_each = amp_C.multi_tensor_l2norm(2048, flag(), [tensors], *arguments)
        assert (of_each.shape, of_each.dtype) == ((0,), torch.float32)
        assert_same_bits(norm, amp_C.multi_tensor_l2norm(2048, flag(), [tensors], True)[0])

    @pytest.mark.parametrize("per_tensor", [True, False])
    @pytest.mark.parametrize("value", NOT_FINITE, ids=str)
    def test_l2norm_raises_the_flag_at_an_element_that_is_not_finite(self, per_tensor, value):
        tensors, overflow = drawn(0), flag()
        tensors[2][1] = value
        norm, _ = amp_C.multi_tensor_l2norm(2048, overflow, [tensors], per_tensor)
        assert overflow.item() == 1
        assert not norm.isfinite().any()

    def test_l2norm_of_nothing_is_zero(self):
        norm, of_each = amp_C.multi_tensor_l2norm(2048, flag(), [[]], True)
        assert norm.tolist() == [0]
        assert of_each.tolist() == []

    def test_l2norm_records_nothing_for_autograd(self):
        norm, of_each = amp_C.multi_tensor_l2norm(2048, flag(), [[nn.Parameter(torch.ones(4))]], True)
        assert norm.tolist() == of_each.tolist() == [2]
        assert not norm.requires_grad
        assert not of_each.requires_grad

    def test_gradients_can_be_clipped_while_amp_casts(self):
        """As the helpers of projects do, with casts on."""
        parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))]
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 4.0)
        grads = [parameter.grad for parameter in parameters]
        with casts_on():
            norm, _ = multi_tensor_applier(amp_C.multi_tensor_l2norm, flag(), [grads], False)
            coefficient = 1.0 / (norm + 1e-6)
            multi_tensor_applier(amp_C.multi_tensor_scale, flag(), [grads, grads], coefficient)
        assert norm.dtype is torch.float32
        assert norm.item() == pytest.approx(4 * math.sqrt(5))
        assert torch.cat(grads).norm().item() == pytest.approx(1.0, rel=1e-5)

    def test_l2norm_scale_has_the_norm_of_what_it_writes(self):
        ins, outs, overflow = drawn(0), empty((torch.float32,)), flag()
        norm, of_each = amp_C.multi_tensor_l2norm_scale(2048, overflow, [ins, outs], 0.5, True)
        expected, expected_of_each = amp_C.multi_tensor_l2norm(2048, flag(), [ins], True)
        torch.testing.assert_close(norm, expected * 0.5)
        torch.testing.assert_close(of_each, expected_of_each * 0.5)
        assert_same_state(outs, [one.float() * 0.5 for one in ins])


ONE = torch.ones(1)
CALLS = {
    "scale": lambda overflow, lists: amp_C.multi_tensor_scale(2048, overflow, lists, 2.0),
    "axpby": lambda overflow, lists: amp_C.multi_tensor_axpby(2048, overflow, [lists[0], *lists], 2.0, 2.0),
    "l2norm_scale": lambda overflow, lists: amp_C.multi_tensor_l2norm_scale(2048, overflow, lists, 2.0),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
class TestBadInput:
    @pytest.mark.parametrize(
        ("second_in", "second_out", "message"),
        [
            (torch.ones(2), torch.ones(3), r"shape \(3,\).* as outs\[1\].*\(2,\)"),
            (torch.ones(2), torch.ones(2, device="meta"), r"on meta as outs\[1\].*on cpu"),
            (
                torch.ones(2),
                torch.ones(2, dtype=torch.float64),
                r"float64.* as outs\[1\].*float16, bfloat16 or float32",
            ),
            (torch.ones(2, dtype=torch.int32), torch.ones(2), r"int32.* as \w+\[1\]"),
            (torch.ones(2).to_sparse(), torch.ones(2), r"sparse.* as \w+\[1\].*dense"),
            (None, torch.ones(2), r"NoneType as \w+\[1\]"),
        ],
        ids=["shape", "device", "float64", "integers", "sparse", "None"],
    )
    def test_tensors_that_do_not_fit_are_refused_before_anything_is_written(self, call, second_in, second_out, message):
        first, overflow = torch.zeros(2), flag()
        with pytest.raises(OptionError, match=message):
            call(overflow, [[torch.full((2,), math.inf), second_in], [first, second_out]])
        assert first.tolist() == [0, 0]
        assert overflow.item() == 0

    @pytest.mark.parametrize(
        "lists", [[[ONE, ONE], [ONE]], [[ONE]], [[ONE], [ONE], [ONE], [ONE]]], ids=["length", "few", "many"]
    )
    def test_a_wrong_number_of_lists_or_tensors_is_refused(self, call, lists):
        with pytest.raises(OptionError, match="found lists of"):
            call(flag(), lists)

    @pytest.mark.parametrize(
        "overflow",
        [None, 0, torch.zeros(1), torch.zeros(2, dtype=torch.int32)],
        ids=["None", "number", "float32", "two elements"],
    )
    def test_what_is_no_overflow_flag_is_refused(self, call, overflow):
        with pytest.raises(OptionError, match=r"as noop_flag; expected an int32 tensor of one element"):
            call(overflow, [[torch.ones(1)], [torch.ones(1)]])


class TestNames:
    def test_kernels_that_are_not_replaced_raise_with_what_to_use(self):
        with pytest.raises(AttributeError, match=r"amp_C\.multi_tensor_sgd.*FusedSGD.*SGD\(fused=True\)") as caught:
            _ = amp_C.multi_tensor_sgd
        assert caught.value.name == "multi_tensor_sgd"
        with pytest.raises(AttributeError, match=r"amp_C\.something.*torch\._foreach"):
            _ = amp_C.something
        assert not hasattr(amp_C, "multi_tensor_lamb")


class TestApplier:
    def test_the_applier_passes_its_chunk_size_and_returns_the_kernels_result(self):
        applier = MultiTensorApply(5)
        buffer, lists = flag(), [[torch.ones(1)]]
        assert applier(lambda *args: args, buffer, lists, 1.0, "x") == (5, buffer, lists, 1.0, "x")
        assert multi_tensor_applier.chunk_size == 2048 * 32

    def test_the_applier_is_always_available(self):
        assert MultiTensorApply.available
        assert multi_tensor_applier.available
        assert not multi_tensor_applier.warned
        multi_tensor_applier.check_avail()


class TestFlattening:
    def test_flattened_tensors_come_back_as_views(self):
        tensors = [torch.arange(6.0).reshape(2, 3), torch.tensor(6.0), torch.arange(7.0, 9.0)]
        flat = apex_C.flatten(iter(tensors))
        assert flat.tolist() == list(range(9))
        again = apex_C.unflatten(flat, tensors)
        assert_same_state(list(again), tensors)
        flat.zero_()
        assert again[0].tolist() == [[0, 0, 0], [0, 0, 0]]
        assert tensors[0].tolist() == [[0, 1, 2], [3, 4, 5]]
