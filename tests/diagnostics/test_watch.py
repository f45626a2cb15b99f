"""`Watch`: the operators that it records, their values and gradients, and that it changes nothing."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from helpers import HALF_DTYPES, dtype_name, together
from optimizers import SGD, backward
from planted_overflows import Amplified
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from ampatch import amp
from ampatch.diagnostics.recorder.recorder import paused
from ampatch.diagnostics.recorder.records import WatchedOp
from ampatch.diagnostics.recorder.watch import Watch


class Block(nn.Module):
    """Attention without projections, as users write it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        scores = self.inner(x) @ x.transpose(-2, -1)
        return torch.softmax(scores, dim=-1) @ x


def batch() -> torch.Tensor:
    return torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))


def named(watch: Watch, op_name: str, *, backward: bool = False) -> list[WatchedOp]:
    return [op for op in watch.ops if op.op_name == op_name and op.is_backward is backward]


class TestOperators:
    def test_operators_have_their_function_module_and_line(self):
        block = Block()
        with Watch() as watch:
            block(batch())
        first, second = named(watch, "bmm")
        assert first.function_name in ("torch.Tensor.matmul", "torch.Tensor.__matmul__")
        assert first.modules == (block,)
        assert first.place is not None
        assert first.place.source == "scores = self.inner(x) @ x.transpose(-2, -1)"
        assert second.place.line == first.place.line + 1
        (linear,) = named(watch, "addmm")
        assert linear.function_name == "torch.nn.functional.linear"
        assert linear.modules == (block, block.inner)
        assert linear.place.line == first.place.line  # torch's own lines are not the user's

    def test_operators_of_a_backward_pass_have_that_of_the_forward_pass(self):
        with Watch() as watch:
            Block()(batch()).sum().backward()
        (softmax,) = named(watch, "_softmax")
        (of_softmax,) = named(watch, "_softmax_backward_data", backward=True)
        assert of_softmax.forward is softmax
        assert of_softmax.place is None
        assert {op.forward for op in named(watch, "bmm", backward=True)} == set(named(watch, "bmm"))

    def test_operators_of_a_custom_backward_have_its_line(self):
        with Watch() as watch:
            Amplified.apply(torch.ones(3, requires_grad=True), 2).sum().backward()
        (op,) = named(watch, "mul", backward=True)
        assert op.place.source == "return grad * ctx.factor, None"
        assert op.node == "AmplifiedBackward"

    @pytest.mark.parametrize("use_reentrant", [False, True])
    def test_operators_of_a_recomputed_forward_pass_count_as_forward(self, use_reentrant):
        block = Block()

        class Recomputed(nn.Module):
            def forward(self, x):
                return checkpoint(block, x, use_reentrant=use_reentrant)

        with Watch() as watch:
            Recomputed()(batch().requires_grad_()).sum().backward()
        assert [op.modules[-2:] for op in named(watch, "addmm")] == [(block, block.inner)] * 2
        assert not named(watch, "addmm", backward=True)

    def test_a_backward_pass_inside_of_a_forward_pass_counts_as_backward(self):
        class Penalised(nn.Module):
            def forward(self, x):
                (gradient,) = torch.autograd.grad(x.exp().sum(), x, create_graph=True)
                return gradient.sin()

        with Watch() as watch:
            module = Penalised()
            module(torch.ones(3, requires_grad=True))
        (exp,) = named(watch, "exp")
        (of_exp,) = named(watch, "mul", backward=True)
        assert of_exp.forward is exp
        assert of_exp.function is None
        assert named(watch, "sin")[0].modules == (module,)

    def test_views_are_left_out_and_copies_are_not(self):
        with Watch() as watch:
            x = torch.ones(2, 3, requires_grad=True)
            x.t().reshape(6).view(3, 2)
        assert [op.op_name for op in watch.ops] == ["ones", "clone"]

    def test_operators_without_gradients_are_left_out(self):
        with Watch() as watch, torch.no_grad():
            Block()(batch())
        assert not watch.ops

    def test_operators_keep_their_arguments_only_if_asked(self):
        for keep in (None, lambda values: True):
            with Watch(keep=keep) as watch:
                x = torch.ones(2, requires_grad=True) * 3
                x += 1
            written = named(watch, "add_")[0].arguments
            assert (written is None) is (keep is None)
            if written is not None:
                assert written[0][0].tolist() == [3, 3]  # as before the operator wrote to it

    def test_operators_are_left_out_while_paused(self):
        with Watch() as watch, paused():
            torch.ones(2, requires_grad=True) * 3
        assert not watch.ops


class TestValues:
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
    @pytest.mark.parametrize("special", [3.0, math.inf, math.nan])
    def test_the_greatest_absolute_value_is_read(self, dtype, special):
        with Watch() as watch:
            torch.tensor([1, -2, special], dtype=dtype, requires_grad=True).neg()
        watch.read()
        (op,) = named(watch, "neg")
        assert op.outputs[0].largest == pytest.approx(special, nan_ok=True)
        assert op.outputs[0].is_finite is math.isfinite(special)
        assert op.outputs[0].has_nan is math.isnan(special)

    def test_float64_beyond_float32_is_finite(self):
        with Watch() as watch:
            torch.full((2,), 1e200, dtype=torch.float64, requires_grad=True).neg()
        watch.read()
        assert watch.ops[-1].outputs[0].largest == 1e200

    def test_values_of_empty_and_integer_tensors_are_unknown(self):
        with Watch() as watch:
            torch.ones(0, requires_grad=True) * 2
            torch.arange(3) + 1
        watch.read()
        (op,) = named(watch, "mul")
        assert op.outputs[0].largest is None
        assert op.outputs[0].is_finite
        assert not named(watch, "add")[0].outputs

    def test_uninitialised_memory_is_not_read(self):
        with Watch() as watch:
            x = torch.empty(3)
            x.fill_(2.0)
            x.requires_grad_().neg()
        watch.read()
        assert not named(watch, "empty")
        assert named(watch, "neg")[0].inputs[0].largest == 2.0

    def test_values_know_their_writer_through_views_and_in_place(self):
        with Watch() as watch:
            x = torch.ones(2, 2, requires_grad=True) * 2
            x[0] *= 5
            x.t().neg()
        watch.read()
        (neg,) = named(watch, "neg")
        assert [part.writer.op_name for part in neg.inputs[0].parts][:2] == ["mul", "copy_"]
        assert neg.inputs[0].largest == 10

    def test_two_views_of_one_size_have_values_of_their_own(self):
        with Watch() as watch:
            x = torch.tensor([1.0, 2.0, math.inf, 4.0], requires_grad=True)
            first, second = x.chunk(2)
            first.neg()
            second.neg()
        watch.read()
        assert [op.inputs[0].largest for op in named(watch, "neg")] == [2, math.inf]

    def test_a_wrapper_has_the_values_of_the_tensors_inside(self):
        with Watch() as watch:
            torch.log(TwoTensor(torch.zeros(2), torch.ones(2)))
        watch.read()
        (op,) = named(watch, "log")
        assert [[values.largest for values in each] for each in (op.inputs, op.outputs)] == [[0, 1], [math.inf, 0]]

    def test_a_sparse_gradient_has_the_values_of_its_elements(self):
        embedding = nn.Embedding(5, 2, sparse=True)
        with Watch() as watch:
            (embedding(torch.tensor([1, 3])) * 7).sum().backward()
        watch.read()
        ((parameter, values, _),) = watch.gradients
        assert (parameter is embedding.weight, values.largest) == (True, 7)


def test_gradients_are_those_that_arrive_at_each_parameter():
    linear = nn.Linear(2, 1)
    with Watch() as watch:
        for factor in (3, 4):
            (linear(torch.ones(1, 2)) * factor).sum().backward()
    watch.read()
    found = [(values.largest, parameter is linear.weight) for parameter, values, _ in watch.gradients]
    assert sorted(found) == [(3, False), (3, True), (4, False), (4, True)]
    assert linear.weight.grad.tolist() == [[7, 7]]


class TestSideEffects:
    @pytest.mark.parametrize("half_dtype", HALF_DTYPES, ids=dtype_name)
    @pytest.mark.parametrize("opt_level", ["O0", "O1", "O2"])
    def test_a_step_gives_the_same_bits(self, opt_level, half_dtype):
        results = []
        for watched in (False, True):
            torch.manual_seed(0)
            model = nn.Sequential(Block(), nn.LayerNorm(4), nn.Dropout(), nn.TransformerEncoderLayer(4, 2, 8))
            optimizer = SGD(model.parameters())
            options = {"opt_level": opt_level, "half_dtype": half_dtype, "loss_scale": 8.0}
            model, optimizer = amp.initialize(model, optimizer, verbosity=0, **options)
            watch = Watch()
            if watched:
                watch.__enter__()
            loss = F.mse_loss(model(batch()), batch())
            backward(loss, optimizer)
            optimizer.step()
            if watched:
                watch.stop()
                assert watch.ops
            amp.deinitialize()
            results.append([loss.detach(), *model.state_dict().values()])
        assert all(map(torch.equal, *results))

    def test_an_evaluation_runs_without_the_modes(self):
        class Asking(nn.Module):
            def forward(self, x):
                found.append(watch.is_on)
                return x

        found: list[bool] = []
        module = nn.Sequential(Asking())
        with Watch() as watch:
            for mode, is_grad_enabled in ((True, False), (False, True), (False, False)):
                with torch.set_grad_enabled(is_grad_enabled):
                    module.train(mode)(batch())
            found.append(watch.is_on)
        assert found == [True, True, False, True]

    @pytest.mark.parametrize("half_dtype", [None, *HALF_DTYPES], ids=str)
    def test_a_frozen_layer_runs_the_same_kernels_in_a_watch(self, half_dtype):
        class Frozen(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=0.0)

            def forward(self, x):
                with torch.no_grad(), torch.autocast("cpu", half_dtype, enabled=half_dtype is not None):
                    return self.layer.eval()(x, src_key_padding_mask=padding)

        padding = torch.tensor([[False, False, True], [False, True, True]])
        torch.manual_seed(0)
        model = Frozen()
        expected = model(batch())
        with Watch():
            actual = model.train()(batch())
        assert torch.equal(actual, expected)

    def test_modes_of_other_code_stay_in_their_order(self):
        class Function(TorchFunctionMode):
            def __torch_function__(self, func, types, args=(), kwargs=None):
                return func(*args, **(kwargs or {}))

        class Dispatch(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                return func(*args, **(kwargs or {}))

        first, second, below, above = Function(), Function(), Dispatch(), Dispatch()
        watch = Watch()
        with first, below:
            watch.__enter__()
            with second, above:
                assert _get_current_function_mode_stack()[1:] == [first, second]
                assert _get_current_dispatch_mode_stack()[1:] == [below, above]
                watch.stop()
                assert _get_current_function_mode_stack() == [first, second]
                assert _get_current_dispatch_mode_stack() == [below, above]
        assert not _get_current_function_mode_stack()
        assert not _get_current_dispatch_mode_stack()

    def test_another_mode_goes_on_counting(self):
        counter = FlopCounterMode(display=False)
        watch = Watch()
        with counter:
            nn.Linear(4, 4)(batch())
            watch.__enter__()
            nn.Linear(4, 4)(batch())
            watch.stop()
            nn.Linear(4, 4)(batch())
        assert counter.get_total_flops() == 3 * 2 * 6 * 4 * 4


def test_another_thread_is_not_watched_and_that_is_known():
    with Watch() as watch:
        assert not watch.missed_threads
        together([lambda: nn.Linear(4, 4)(batch())])
    assert not watch.ops
    assert watch.missed_threads
