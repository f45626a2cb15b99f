"""Of `amp.clip_grad_norm_`: it clips as torch does, however a block has left the gradients, and in fewer passes.

The reference is ``torch.nn.utils.clip_grad_norm_`` of the parameters that the optimizer updates, after a block that
unscales. The two round in another order, so numbers agree to some units in the last place.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import stepping
import torch
from helpers import assert_same_state
from optimizers import MOMENTUM, backward, initialize
from stepping import SCALE, every_half, everything, loss_of, network
from torch import Tensor, nn

from ampatch import amp
from ampatch.errors import OptionError, UsageError
from ampatch.native import kernels

MAX_NORM = 0.1  # less than every norm here

ADAM = functools.partial(torch.optim.Adam, lr=0.01)
FUSED = functools.partial(ADAM, fused=True)
OPTIMIZERS = {
    "SGD": MOMENTUM,
    "Adam": ADAM,
    "Adam-fused": FUSED,
    "SGD-fused": functools.partial(MOMENTUM, fused=True),
}

LEVELS: dict[str, dict[str, Any]] = {
    "O0": {"opt_level": "O0"},
    "O1": {},
    "O1-static": {"loss_scale": 64.0},
    "O1-one": {"loss_scale": 1.0},
    "O2": {"opt_level": "O2", "half_dtype": "float16"},
    "O5": {"opt_level": "O5", "loss_scale": 1.0},
}

every_level = pytest.mark.parametrize("options", LEVELS.values(), ids=LEVELS)
every_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
delays = pytest.mark.parametrize("delayed", [False, True], ids=["unscaled", "delayed"])

with_a_graph = pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")


def started(make: Callable[..., Any] = ADAM, **options: Any) -> tuple[Any, Any]:
    """Returns a network and its optimizer after a step: from its second on, a fused one skips by itself."""
    return stepping.started(make, **{"steps": 1, **options})


def gradients(optimizer: Any) -> list[Tensor]:
    return [parameter.grad for parameter in amp.master_params(optimizer) if parameter.grad is not None]


def weights(optimizer: Any) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in amp.master_params(optimizer)]


def norm_of(grads: list[Tensor]) -> float:
    """Returns the norm, computed in float64."""
    return math.sqrt(sum(float(grad.double().square().sum()) for grad in grads))


def assert_norm(optimizer: Any, norm: float = MAX_NORM) -> None:
    assert norm_of(gradients(optimizer)) == pytest.approx(norm, rel=1e-4)


def clip_by_torch(optimizer: Any, max_norm: float = MAX_NORM) -> Tensor:
    return torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), max_norm)


class TestAgainstTorch:
    @every_level
    @every_optimizer
    @delays
    @pytest.mark.covering(1)
    def test_training_has_the_norms_and_weights_of_torchs_clipping(self, make, options, delayed):
        def trained(clip: Callable[..., Tensor], delay_unscale: bool) -> Any:
            model, optimizer = started(make, steps=0, **options)
            norms = []
            for index in range(6):
                optimizer.zero_grad()
                backward(loss_of(model, index), optimizer, delay_unscale=delay_unscale)
                norms.append(float(clip(optimizer, MAX_NORM)))
                optimizer.step()
            result = norms, amp.get_loss_scale(), weights(optimizer)
            amp.deinitialize()
            return result

        expected_norms, expected_scale, expected_weights = trained(clip_by_torch, False)
        norms, scale, found_weights = trained(amp.clip_grad_norm_, delayed)
        assert min(expected_norms) > MAX_NORM
        assert norms == pytest.approx(expected_norms, rel=1e-5)
        assert scale == expected_scale
        torch.testing.assert_close(found_weights, expected_weights, rtol=1e-5, atol=1e-6)

    @every_level
    @delays
    def test_norm_is_that_of_the_unscaled_gradients_to_1e_6(self, options, delayed):
        model, optimizer = started(steps=0, **options)
        backward(loss_of(model), optimizer)
        expected = norm_of(gradients(optimizer))
        optimizer.zero_grad()
        backward(loss_of(model), optimizer, delay_unscale=delayed)
        norm = amp.clip_grad_norm_(optimizer, MAX_NORM)
        assert (norm.dtype, norm.ndim) == (torch.float32, 0)
        assert norm.item() == pytest.approx(expected, rel=1e-6)
        assert_norm(optimizer)

    @pytest.mark.parametrize("max_norm", [1e6, math.inf, 10**6])
    @delays
    def test_gradients_below_the_norm_stay_bit_for_bit(self, max_norm, delayed):
        model, optimizer = started()
        backward(loss_of(model), optimizer)
        expected = copy.deepcopy(gradients(optimizer))
        optimizer.zero_grad()
        backward(loss_of(model), optimizer, delay_unscale=delayed)
        amp.clip_grad_norm_(optimizer, max_norm)
        assert_same_state(gradients(optimizer), expected)

    @delays
    def test_norm_as_small_as_torchs_margin_is_clipped_as_torch_does(self, delayed):
        model, optimizer = started()
        backward(loss_of(model) * 1e-6, optimizer)
        assert clip_by_torch(optimizer, 1e-7) < 1e-5
        expected = norm_of(gradients(optimizer))
        optimizer.zero_grad()
        backward(loss_of(model) * 1e-6, optimizer, delay_unscale=delayed)
        amp.clip_grad_norm_(optimizer, 1e-7)
        assert_norm(optimizer, expected)

    def test_norm_of_zero_clips_everything_away(self):
        model, optimizer = started()
        backward(loss_of(model), optimizer)
        amp.clip_grad_norm_(optimizer, 0)
        assert not any(grad.any() for grad in gradients(optimizer))

    @delays
    def test_norm_without_gradients_is_0(self, delayed):
        model, optimizer = started()
        with amp.scale_loss(loss_of(model), optimizer, delay_unscale=delayed):
            pass
        assert amp.clip_grad_norm_(optimizer, MAX_NORM).item() == 0
        optimizer.step()

    @pytest.mark.parametrize("clip", [amp.clip_grad_norm_, clip_by_torch], ids=["amp", "torch"])
    def test_clipping_twice_clips_what_is_there(self, clip):
        model, optimizer = started()
        backward(loss_of(model), optimizer, delay_unscale=True)
        amp.clip_grad_norm_(optimizer, MAX_NORM)
        assert clip(optimizer, MAX_NORM / 2).item() == pytest.approx(MAX_NORM, rel=1e-4)
        assert_norm(optimizer, MAX_NORM / 2)

    def test_sparse_gradients_count_with_their_sums(self):
        torch.manual_seed(0)
        table, optimizer = started(torch.optim.SGD, model=nn.Embedding(4, 2, sparse=True), steps=0)
        backward(table(torch.tensor([1, 1, 3])).square().sum(), optimizer, delay_unscale=True)
        expected = (table.weight.grad.to_dense() / SCALE).norm().item()
        assert amp.clip_grad_norm_(optimizer, MAX_NORM).item() == pytest.approx(expected, rel=1e-6)
        assert table.weight.grad.to_dense().norm().item() == pytest.approx(MAX_NORM, rel=1e-4)

    @every_level
    @pytest.mark.parametrize("first_delayed", [False, True], ids=["first-unscaled", "first-delayed"])
    def test_gradients_of_two_blocks_are_clipped_as_a_whole(self, options, first_delayed):
        model, optimizer = started(steps=0, **options)
        for index in range(2):
            backward(loss_of(model, index), optimizer)
        expected = copy.deepcopy(gradients(optimizer))
        optimizer.zero_grad()
        backward(loss_of(model, 0), optimizer, delay_unscale=first_delayed)
        backward(loss_of(model, 1), optimizer, delay_unscale=True)
        # At O2 two delayed blocks are added up in half.
        rel = 1e-2 if options.get("opt_level") in ("O2", "O5") else 1e-6
        assert amp.clip_grad_norm_(optimizer, math.inf).item() == pytest.approx(norm_of(expected), rel=rel)
        torch.testing.assert_close(gradients(optimizer), expected, rtol=rel, atol=1e-3 if rel > 1e-3 else 1e-7)

    def test_block_after_clipping_adds_to_clipped_gradients(self):
        model, optimizer = started()
        backward(loss_of(model), optimizer)
        clip_by_torch(optimizer)
        backward(loss_of(model, 1), optimizer)
        expected = copy.deepcopy(gradients(optimizer))
        optimizer.zero_grad()
        backward(loss_of(model), optimizer, delay_unscale=True)
        amp.clip_grad_norm_(optimizer, MAX_NORM)
        backward(loss_of(model, 1), optimizer)
        torch.testing.assert_close(gradients(optimizer), expected, rtol=1e-5, atol=1e-7)

    @pytest.mark.parametrize("enabled", [None, False], ids=["before-initialize", "disabled"])
    def test_clipping_without_amp_is_that_of_torch(self, enabled):
        model = network()
        optimizer = MOMENTUM(model.parameters())
        if enabled is False:
            amp.initialize(model, optimizer, enabled=False)
        loss_of(model).backward()
        expected = norm_of(gradients(optimizer))
        assert amp.clip_grad_norm_(optimizer, MAX_NORM).item() == pytest.approx(expected, rel=1e-6)
        assert_norm(optimizer)

    @with_a_graph
    def test_gradients_with_a_graph_can_be_differentiated_after_clipping(self):
        model, optimizer = started(torch.optim.SGD, model=nn.ParameterList([torch.tensor([2.0])]), steps=0)
        (weight,) = model
        with amp.scale_loss((weight**3).sum(), optimizer, delay_unscale=True) as scaled_loss:
            scaled_loss.backward(create_graph=True)
        assert amp.clip_grad_norm_(optimizer, math.inf).item() == 12
        (second,) = torch.autograd.grad(weight.grad.sum(), weight)
        assert second.item() == 12
        weight.grad = None  # torch asks for that, to break the cycle

    @pytest.mark.parametrize(("options", "last"), [({}, "multiply_"), ({"opt_level": "O2"}, "unscale_copy")])
    def test_gradients_are_unscaled_and_clipped_in_one_pass(self, options, last, monkeypatch):
        def noted(name: str, kernel: Callable[..., None], tensors: Any, *args: Any, **kwargs: Any) -> None:
            tensors = list(tensors)
            if tensors:
                passes.append(name)
            kernel(tensors, *args, **kwargs)

        model, optimizer = started(**options)
        backward(loss_of(model), optimizer, delay_unscale=True)
        passes: list[str] = []
        for name in ("unscale_", "multiply_", "unscale_copy", "unscale_add", "found_inf_norm"):
            monkeypatch.setattr(kernels, name, functools.partial(noted, name, getattr(kernels, name)))
        amp.clip_grad_norm_(optimizer, MAX_NORM)
        assert passes == ["found_inf_norm", last]
        assert_norm(optimizer)

    @every_optimizer
    def test_closure_may_clip(self, make):
        model, optimizer = started(make)

        def closure() -> None:
            optimizer.zero_grad()
            backward(loss_of(model), optimizer, delay_unscale=True)
            amp.clip_grad_norm_(optimizer, MAX_NORM)

        before = weights(optimizer)
        for _ in range(3):
            optimizer.step(closure)
        assert not any(map(torch.equal, weights(optimizer), before))


class TestOverflows:
    @pytest.mark.parametrize("level", ["O0", "O1", "O2"])
    @every_optimizer
    @delays
    def test_overflow_skips_the_step_and_halves_the_scale_once(self, make, level, delayed):
        model, optimizer = started(make, **LEVELS[level])
        before = everything(model, optimizer)
        backward(loss_of(model) * math.inf, optimizer, delay_unscale=delayed)
        norm = amp.clip_grad_norm_(optimizer, MAX_NORM)
        optimizer.step()
        assert not norm.isfinite()
        assert amp.step_was_skipped(optimizer)
        assert amp.get_loss_scale() == SCALE / 2
        assert_same_state(everything(model, optimizer), before)
        optimizer.zero_grad()
        backward(loss_of(model), optimizer, delay_unscale=delayed)
        assert amp.clip_grad_norm_(optimizer, MAX_NORM).isfinite()
        optimizer.step()
        assert not amp.step_was_skipped(optimizer)
        assert all(weight.isfinite().all() for weight in weights(optimizer))

    @pytest.mark.parametrize("loss_scale", [1.0, 64.0])
    def test_overflow_under_a_static_scale_does_not_reach_the_next_gradients(self, loss_scale):
        model, optimizer = started(loss_scale=loss_scale)
        for factor in (math.inf, 1):
            optimizer.zero_grad(set_to_none=False)
            backward(loss_of(model) * factor, optimizer, delay_unscale=True)
            assert amp.clip_grad_norm_(optimizer, MAX_NORM).isfinite() == (factor == 1)
        optimizer.step()
        assert all(weight.isfinite().all() for weight in weights(optimizer))

    def test_step_skipped_by_an_earlier_overflow_leaves_clipped_gradients(self):
        model, optimizer = started()
        backward(loss_of(model, 1) * math.inf, optimizer)
        backward(loss_of(model), optimizer, delay_unscale=True)
        amp.clip_grad_norm_(optimizer, MAX_NORM)
        optimizer.step()
        assert amp.step_was_skipped(optimizer)
        assert_norm(optimizer)

    @delays
    def test_inf_and_nan_stay_in_the_gradient_that_has_them(self, delayed):
        model, optimizer = started(loss_scale=64.0)
        model[2].bias.register_hook(lambda grad: torch.tensor([math.nan, math.inf, 1.0]))
        backward(loss_of(model), optimizer, delay_unscale=delayed)
        amp.clip_grad_norm_(optimizer, MAX_NORM)
        assert [bool(grad.isfinite().all()) for grad in gradients(optimizer)] == [True, True, True, False]
        assert model[2].bias.grad.isinf().tolist() == [False, True, False]

    def test_measuring_a_norm_beyond_float32_changes_nothing(self):
        parameter = nn.Parameter(torch.zeros(2))
        parameter.grad = torch.tensor([1e30, 1.0])
        amp.clip_grad_norm_(MOMENTUM([parameter]), math.inf)
        assert parameter.grad.tolist() == pytest.approx([1e30, 1.0])

    def test_steps_with_clipping_let_the_scale_grow(self):
        model, optimizer = started(scale_window=3)
        for index in range(2):
            optimizer.zero_grad()
            backward(loss_of(model, index), optimizer, delay_unscale=True)
            amp.clip_grad_norm_(optimizer, MAX_NORM)
            optimizer.step()
        assert amp.get_loss_scale() == 2 * SCALE

    def test_overflow_of_one_of_two_optimizers_skips_both_and_halves_the_scale_once(self):
        models = network(), network()
        optimizers = [ADAM(model.parameters()) for model in models]
        initialize(list(models), optimizers, init_scale=SCALE)
        for factor in (1, math.inf):
            for optimizer in optimizers:
                optimizer.zero_grad()
            before = [weights(optimizer) for optimizer in optimizers]
            backward(loss_of(models[0], 0) + loss_of(models[1], 1) * factor, optimizers, delay_unscale=True)
            norms = [amp.clip_grad_norm_(optimizer, MAX_NORM) for optimizer in optimizers]
            if factor == 1:
                for optimizer in optimizers:
                    assert_norm(optimizer)
            for optimizer in optimizers:
                optimizer.step()
            assert [amp.step_was_skipped(optimizer) for optimizer in optimizers] == [factor != 1] * 2
        assert_same_state([weights(optimizer) for optimizer in optimizers], before)
        assert [bool(norm.isfinite()) for norm in norms] == [True, False]
        assert amp.get_loss_scale() == SCALE / 2


class TestMasters:
    @every_half
    @delays
    def test_half_parameters_show_the_clipped_gradients_of_their_masters(self, half_dtype, delayed):
        model, optimizer = started(MOMENTUM, steps=0, opt_level="O2", half_dtype=half_dtype)
        backward(loss_of(model), optimizer, delay_unscale=delayed)
        amp.clip_grad_norm_(optimizer, MAX_NORM)
        shown = [parameter.grad for parameter in model.parameters()]
        assert_same_state(shown, [grad.to(half_dtype) for grad in gradients(optimizer)])
        optimizer.step()  # a warning that gradients had been changed would be an error

    def test_half_parameter_whose_master_has_no_gradient_shows_none(self):
        model, optimizer = started(**LEVELS["O2"])
        backward(loss_of(model), optimizer)
        next(amp.master_params(optimizer)).grad = None
        amp.clip_grad_norm_(optimizer, MAX_NORM)
        assert [parameter.grad is None for parameter in model.parameters()] == [True, False, False, False]
        optimizer.step()

    def test_gradient_clipped_to_less_than_half_holds_is_not_shown_as_zero(self):
        model, optimizer = started(MOMENTUM, **LEVELS["O2"])
        backward(loss_of(model), optimizer)
        shown = [parameter.grad for parameter in model.parameters()]
        amp.clip_grad_norm_(optimizer, 1e-9)
        for parameter, grad, full in zip(model.parameters(), shown, gradients(optimizer), strict=True):
            assert parameter.grad is grad
            assert 0 < full.abs().max() < 2.0**-26
            assert torch.equal(grad != 0, full != 0)

    def test_sums_of_sparse_half_gradients_may_be_beyond_half(self):
        options = {**LEVELS["O2"], "init_scale": 2.0**15}
        table, optimizer = started(torch.optim.SGD, model=nn.Embedding(4, 2, sparse=True), steps=0, **options)
        backward(table(torch.tensor([1, 1, 1, 1])).sum(), optimizer, delay_unscale=True)
        assert amp.clip_grad_norm_(optimizer, math.inf).item() == pytest.approx(math.sqrt(2 * 4**2), rel=1e-6)

    def test_gradients_that_one_of_two_models_zeroed_after_a_delayed_block_count_as_0(self):
        models = network(), network()
        optimizers = [MOMENTUM(model.parameters()) for model in models]
        initialize(list(models), optimizers, **LEVELS["O2"])
        for delayed in (False, True):
            backward(loss_of(models[0], 0) + loss_of(models[1], 1), optimizers, delay_unscale=delayed)
        models[0].zero_grad(set_to_none=False)
        assert amp.clip_grad_norm_(optimizers[0], MAX_NORM).item() == 0
        assert amp.clip_grad_norm_(optimizers[1], MAX_NORM).item() > MAX_NORM

    @with_a_graph
    def test_gradients_with_a_graph_are_not_written_at_scale_1(self):
        model = nn.ParameterList([torch.tensor([2.0])])
        _, optimizer = started(torch.optim.SGD, model=model, steps=0, **LEVELS["O5"])
        with amp.scale_loss((model[0] ** 3).sum(), optimizer) as scaled_loss:
            scaled_loss.backward(create_graph=True)
            penalty = model[0].grad.square().sum()
        (second,) = torch.autograd.grad(penalty, model[0])
        assert second.item() == 2 * 12 * 12
        model[0].grad = None


class TestBadInput:
    @pytest.mark.parametrize("max_norm", [-1.0, math.nan, "1", None, True, 1j, 10**400])
    def test_norm_that_is_no_number_from_0_on_is_refused(self, max_norm):
        model, optimizer = started()
        backward(loss_of(model), optimizer)
        before = copy.deepcopy(gradients(optimizer))
        with pytest.raises(OptionError, match=r"max_norm is .*; expected a number from 0 on"):
            amp.clip_grad_norm_(optimizer, max_norm)
        assert_same_state(gradients(optimizer), before)

    @pytest.mark.parametrize("max_norm", [np.float32(MAX_NORM), torch.tensor(MAX_NORM)], ids=["numpy", "tensor"])
    def test_norm_of_numpy_or_torch_is_accepted(self, max_norm):
        model, optimizer = started()
        backward(loss_of(model), optimizer)
        amp.clip_grad_norm_(optimizer, max_norm)
        assert_norm(optimizer)

    def test_parameters_in_place_of_their_optimizer_are_refused(self):
        with pytest.raises(OptionError, match="lacks param_groups, step, zero_grad"):
            amp.clip_grad_norm_(list(network().parameters()), MAX_NORM)

    def test_clipping_gradients_that_another_optimizer_has_left_scaled_raises(self):
        model, optimizer = started()
        other = MOMENTUM(model.parameters())
        initialize(nn.Module(), other, init_scale=SCALE)
        backward(loss_of(model), other, delay_unscale=True)
        with pytest.raises(UsageError, match=r"clip_grad_norm_ would clip the gradient of 0\.weight, which"):
            amp.clip_grad_norm_(optimizer, MAX_NORM)
        other.zero_grad()
