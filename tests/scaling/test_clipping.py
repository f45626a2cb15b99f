"""Of `amp.clip_grad_norm_`: it clips as torch does, however a block has left the gradients, and in fewer passes.

What it is compared with is ``torch.nn.utils.clip_grad_norm_`` of the parameters that the optimizer updates, after a
block that unscales. The two round in another order, so that numbers agree to some units in the last place.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers import HALF_DTYPES, assert_same_state, dtype_name
from torch import Tensor, nn

from ampatch import amp
from ampatch.errors import AmpWarning, LossScaleError, OptionError, UsageError
from ampatch.native import kernels

SCALE = 2.0**8
MAX_NORM = 0.1  # less than every norm here

SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAM = functools.partial(torch.optim.Adam, lr=0.01)
FUSED = functools.partial(ADAM, fused=True)
OPTIMIZERS = {"SGD": SGD, "Adam": ADAM, "Adam-fused": FUSED, "SGD-fused": functools.partial(SGD, fused=True)}

LEVELS: dict[str, dict[str, Any]] = {
    "O0": {"opt_level": "O0", "loss_scale": "dynamic"},
    "O1": {"opt_level": "O1", "patch_torch_functions": False, "loss_scale": "dynamic"},
    "O1-static": {"opt_level": "O1", "patch_torch_functions": False, "loss_scale": 64.0},
    "O1-one": {"opt_level": "O1", "patch_torch_functions": False, "loss_scale": 1.0},
    "O2": {"opt_level": "O2", "half_dtype": torch.float16, "loss_scale": "dynamic"},
    "O5": {"opt_level": "O5", "loss_scale": 1.0},
}

DYNAMIC = {level: options for level, options in LEVELS.items() if options["loss_scale"] == "dynamic"}

every_level = pytest.mark.parametrize("options", LEVELS.values(), ids=LEVELS)
every_dynamic_level = pytest.mark.parametrize("options", DYNAMIC.values(), ids=DYNAMIC)
every_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def loss_of(model: nn.Module, index: int) -> Tensor:
    batch = torch.randn(5, 4, generator=torch.Generator().manual_seed(index))
    return model(batch).float().square().mean()


def initialize(model: Any, optimizer: Any, **options: Any) -> None:
    amp.initialize(model, optimizer, **{"init_scale": SCALE, "verbosity": 0, **options})


def prepared(make: Callable[..., torch.optim.Optimizer] = ADAM, **options: Any) -> tuple[nn.Module, Any]:
    """A network and its optimizer, which has done a step: from its second on, a fused one skips by itself."""
    model = network()
    optimizer = make(model.parameters())
    initialize(model, optimizer, **{**LEVELS["O1"], **options})
    backward(loss_of(model, 99), optimizer)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def backward(loss: Tensor, optimizers: Any, *, overflows: bool = False, **options: Any) -> None:
    with amp.scale_loss(loss * (math.inf if overflows else 1), optimizers, **options) as scaled_loss:
        scaled_loss.backward()


def gradients(optimizer: Any) -> list[Tensor]:
    return [parameter.grad for parameter in amp.master_params(optimizer) if parameter.grad is not None]


def weights(optimizer: Any) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in amp.master_params(optimizer)]


def norm_of(grads: list[Tensor]) -> float:
    """Computed in float64."""
    return math.sqrt(sum(float(grad.double().square().sum()) for grad in grads))


def torchs(optimizer: Any, max_norm: float = MAX_NORM) -> Tensor:
    return torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), max_norm)


def train(
    make: Callable[..., torch.optim.Optimizer], clip: Callable[..., Tensor], delayed: bool, **options: Any
) -> Any:
    """What six steps leave: norms and weights."""
    model = network()
    optimizer = make(model.parameters())
    initialize(model, optimizer, **options)
    norms = []
    for index in range(6):
        optimizer.zero_grad()
        backward(loss_of(model, index), optimizer, delay_unscale=delayed)
        norms.append(float(clip(optimizer, MAX_NORM)))
        optimizer.step()
    result = weights(optimizer), norms, amp.get_loss_scale()
    amp.deinitialize()
    return result


class TestAgreesWithTorch:
    @every_level
    @every_optimizer
    @pytest.mark.parametrize("delayed", [False, True], ids=["unscaled", "delayed"])
    @pytest.mark.covering(1)
    def test_training_goes_the_same_way(self, make, options, delayed):
        expected_weights, expected_norms, expected_scale = train(make, torchs, False, **options)
        actual_weights, norms, scale = train(make, amp.clip_grad_norm_, delayed, **options)
        assert min(expected_norms) > MAX_NORM
        assert norms == pytest.approx(expected_norms, rel=1e-5)
        assert scale == expected_scale
        for actual, expected in zip(actual_weights, expected_weights, strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)

    @every_level
    @pytest.mark.parametrize("delayed", [False, True], ids=["unscaled", "delayed"])
    def test_norm_is_that_of_the_unscaled_gradients_to_1e_6(self, options, delayed):
        model = network()
        optimizer = SGD(model.parameters())
        initialize(model, optimizer, **options)
        backward(loss_of(model, 0), optimizer)
        expected = norm_of(gradients(optimizer))
        optimizer.zero_grad()
        backward(loss_of(model, 0), optimizer, delay_unscale=delayed)
        norm = amp.clip_grad_norm_(optimizer, MAX_NORM)
        assert norm.dtype is torch.float32
        assert norm.ndim == 0
        assert norm.item() == pytest.approx(expected, rel=1e-6)
        assert norm_of(gradients(optimizer)) == pytest.approx(MAX_NORM, rel=1e-4)

    @pytest.mark.parametrize("max_norm", [1e6, math.inf, 10**6])
    @pytest.mark.parametrize("delayed", [False, True], ids=["unscaled", "delayed"])
    def test_gradients_below_the_norm_stay_bit_for_bit(self, max_norm, delayed):
        model, optimizer = prepared()
        backward(loss_of(model, 0), optimizer)
        expected = copy.deepcopy(gradients(optimizer))
        optimizer.zero_grad()
        backward(loss_of(model, 0), optimizer, delay_unscale=delayed)
        amp.clip_grad_norm_(optimizer, max_norm)
        assert_same_state(gradients(optimizer), expected)

    @pytest.mark.parametrize("delayed", [False, True], ids=["unscaled", "delayed"])
    def test_a_norm_as_small_as_torchs_margin_is_clipped_as_torch_does(self, delayed):
        model, optimizer = prepared()
        backward(loss_of(model, 0) * 1e-6, optimizer)
        assert torchs(optimizer, 1e-7) < 1e-5
        expected = norm_of(gradients(optimizer))
        optimizer.zero_grad()
        backward(loss_of(model, 0) * 1e-6, optimizer, delay_unscale=delayed)
        amp.clip_grad_norm_(optimizer, 1e-7)
        assert norm_of(gradients(optimizer)) == pytest.approx(expected, rel=1e-4)

    def test_norm_of_zero_clips_everything_away(self):
        model, optimizer = prepared()
        backward(loss_of(model, 0), optimizer)
        amp.clip_grad_norm_(optimizer, 0)
        assert not any(grad.any() for grad in gradients(optimizer))

    @pytest.mark.parametrize("delayed", [False, True], ids=["unscaled", "delayed"])
    def test_no_gradients_have_the_norm_0(self, delayed):
        model, optimizer = prepared()
        with amp.scale_loss(loss_of(model, 0), optimizer, delay_unscale=delayed):
            pass
        assert amp.clip_grad_norm_(optimizer, MAX_NORM).item() == 0
        optimizer.step()

    @pytest.mark.parametrize("half_dtype", HALF_DTYPES, ids=dtype_name)
    @pytest.mark.parametrize("delayed", [False, True], ids=["unscaled", "delayed"])
    def test_half_parameters_show_the_clipped_gradients_of_their_masters(self, half_dtype, delayed):
        model = network()
        optimizer = SGD(model.parameters())
        initialize(model, optimizer, opt_level="O2", half_dtype=half_dtype, loss_scale="dynamic")
        backward(loss_of(model, 0), optimizer, delay_unscale=delayed)
        amp.clip_grad_norm_(optimizer, MAX_NORM)
        shown = [parameter.grad for parameter in model.parameters()]
        assert_same_state(shown, [grad.to(half_dtype) for grad in gradients(optimizer)])
        optimizer.step()  # without a warning that gradients had been changed, which would be an error here

    def test_clipping_twice_clips_what_is_there(self):
        model, optimizer = prepared(FUSED)
        backward(loss_of(model, 0), optimizer, delay_unscale=True)
        amp.clip_grad_norm_(optimizer, MAX_NORM)
        assert amp.clip_grad_norm_(optimizer, MAX_NORM / 2).item() == pytest.approx(MAX_NORM, rel=1e-4)
        assert norm_of(gradients(optimizer)) == pytest.approx(MAX_NORM / 2, rel=1e-4)

    def test_sparse_gradients_count_with_their_sums(self):
        torch.manual_seed(0)
        table = nn.Embedding(4, 2, sparse=True)
        optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
        initialize(table, optimizer, **LEVELS["O1"])
        backward(table(torch.tensor([1, 1, 3])).square().sum(), optimizer, delay_unscale=True)
        expected = (table.weight.grad.to_dense() / SCALE).norm().item()
        assert amp.clip_grad_norm_(optimizer, MAX_NORM).item() == pytest.approx(expected, rel=1e-6)
        assert table.weight.grad.to_dense().norm().item() == pytest.approx(MAX_NORM, rel=1e-4)


class TestSums:
    @every_level
    @pytest.mark.parametrize("first_delayed", [False, True], ids=["first-unscaled", "first-delayed"])
    def test_of_two_blocks_are_clipped_as_a_whole(self, options, first_delayed):
        model = network()
        optimizer = SGD(model.parameters())
        initialize(model, optimizer, **options)
        for index in range(2):
            backward(loss_of(model, index), optimizer)
        expected = copy.deepcopy(gradients(optimizer))
        optimizer.zero_grad()
        backward(loss_of(model, 0), optimizer, delay_unscale=first_delayed)
        backward(loss_of(model, 1), optimizer, delay_unscale=True)
        # At O2 two delayed blocks are added up in half.
        rel = 1e-2 if options["opt_level"] in ("O2", "O5") else 1e-6
        assert amp.clip_grad_norm_(optimizer, math.inf).item() == pytest.approx(norm_of(expected), rel=rel)
        for actual, wanted in zip(gradients(optimizer), expected, strict=True):
            torch.testing.assert_close(actual, wanted, rtol=rel, atol=1e-3 if rel > 1e-3 else 1e-7)

    @pytest.mark.parametrize("make", [ADAM, FUSED], ids=["Adam", "Adam-fused"])
    def test_a_block_after_clipping_adds_to_what_was_clipped(self, make):
        model, optimizer = prepared(make)
        backward(loss_of(model, 1), optimizer)
        second = copy.deepcopy(gradients(optimizer))
        optimizer.zero_grad()
        backward(loss_of(model, 0), optimizer)
        torchs(optimizer)
        expected = [grad + more for grad, more in zip(gradients(optimizer), second, strict=True)]
        optimizer.zero_grad()
        backward(loss_of(model, 0), optimizer, delay_unscale=True)
        amp.clip_grad_norm_(optimizer, MAX_NORM)
        backward(loss_of(model, 1), optimizer)
        for actual, wanted in zip(gradients(optimizer), expected, strict=True):
            torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-7)


class TestFolding:
    """Of optimizers whose own kernel unscales and clips."""

    def test_gradients_are_read_and_not_written_before_the_step(self, monkeypatch):
        model, optimizer = prepared(FUSED)
        backward(loss_of(model, 0), optimizer, delay_unscale=True)
        before = copy.deepcopy(gradients(optimizer))
        versions = [grad._version for grad in gradients(optimizer)]
        monkeypatch.setattr(kernels, "multiply_", forbidden)
        monkeypatch.setattr(kernels, "unscale_", forbidden)
        amp.clip_grad_norm_(optimizer, MAX_NORM)
        optimizer_grads = gradients(optimizer)
        assert_same_state(optimizer_grads, before)
        assert [grad._version for grad in optimizer_grads] == versions
        optimizer.step()
        assert norm_of(optimizer_grads) == pytest.approx(MAX_NORM, rel=1e-4)  # torch's kernel writes them back

    @pytest.mark.parametrize(
        "options",
        [{"loss_scale": 64.0}, {"loss_scale": 1.0}, {"loss_scale": "dynamic"}],
        ids=["static", "one", "dynamic"],
    )
    def test_step_is_that_of_clipped_gradients(self, options):
        model, optimizer = prepared(FUSED, **options)
        model_before, state = copy.deepcopy((model, optimizer.state_dict()))
        backward(loss_of(model, 0), optimizer, delay_unscale=True)
        amp.clip_grad_norm_(optimizer, MAX_NORM)
        optimizer.step()
        folded = weights(optimizer)
        amp.deinitialize()

        other = FUSED(model_before.parameters())
        other.load_state_dict(state)
        loss_of(model_before, 0).backward()
        torch.nn.utils.clip_grad_norm_(model_before.parameters(), MAX_NORM)
        other.step()
        for actual, wanted in zip(folded, model_before.parameters(), strict=True):
            torch.testing.assert_close(actual, wanted.detach(), rtol=1e-6, atol=1e-7)

    @pytest.mark.parametrize(
        ("make", "options"),
        [(ADAM, {}), (FUSED, {"exact_hooks": True}), (FUSED, {"opt_level": "O2", "patch_torch_functions": None})],
        ids=["not-fused", "exact-hooks", "masters"],
    )
    def test_others_have_gradients_unscaled_and_clipped_in_one_pass(self, make, options, monkeypatch):
        model, optimizer = prepared(make, **options)
        backward(loss_of(model, 0), optimizer, delay_unscale=True)
        passes: list[str] = []
        for name in ("unscale_", "multiply_", "unscale_copy", "unscale_add", "found_inf_norm"):
            monkeypatch.setattr(kernels, name, noted(getattr(kernels, name), passes))
        amp.clip_grad_norm_(optimizer, MAX_NORM)
        assert passes == ["found_inf_norm", "unscale_copy" if options.get("opt_level") == "O2" else "multiply_"]
        assert norm_of(gradients(optimizer)) == pytest.approx(MAX_NORM, rel=1e-4)

    def test_first_step_has_no_state_yet_and_is_not_folded(self):
        model = network()
        optimizer = FUSED(model.parameters())
        initialize(model, optimizer, **LEVELS["O1"])
        backward(loss_of(model, 0), optimizer, delay_unscale=True)
        amp.clip_grad_norm_(optimizer, MAX_NORM)
        assert norm_of(gradients(optimizer)) == pytest.approx(MAX_NORM, rel=1e-4)

    def test_a_closure_or_a_group_that_is_not_fused_finds_clipped_gradients(self):
        model, optimizer = prepared(FUSED)
        backward(loss_of(model, 0), optimizer, delay_unscale=True)
        amp.clip_grad_norm_(optimizer, MAX_NORM)
        seen: list[float] = []
        optimizer.step(lambda: seen.append(norm_of(gradients(optimizer))))
        assert seen == [pytest.approx(MAX_NORM, rel=1e-4)]

    def test_deinitialize_leaves_clipped_gradients(self):
        model, optimizer = prepared(FUSED)
        backward(loss_of(model, 0), optimizer, delay_unscale=True)
        amp.clip_grad_norm_(optimizer, MAX_NORM)
        amp.deinitialize()
        assert norm_of(gradients(optimizer)) == pytest.approx(MAX_NORM, rel=1e-4)

    def test_clearing_gradients_before_the_step_is_no_error(self):
        model, optimizer = prepared(FUSED)
        before = weights(optimizer)
        backward(loss_of(model, 0), optimizer, delay_unscale=True)
        amp.clip_grad_norm_(optimizer, MAX_NORM)
        optimizer.zero_grad()
        optimizer.step()
        assert_same_state(weights(optimizer), before)
        backward(loss_of(model, 0), optimizer)
        optimizer.step()

    def test_a_hook_that_raises_leaves_no_gradient_behind(self):
        model, optimizer = prepared(FUSED)
        backward(loss_of(model, 0), optimizer, delay_unscale=True)
        amp.clip_grad_norm_(optimizer, MAX_NORM)
        hook = optimizer.register_step_post_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            optimizer.step()
        hook.remove()
        assert gradients(optimizer) == []
        backward(loss_of(model, 0), optimizer)
        optimizer.step()

    def test_a_step_of_another_optimizer_leaves_them_to_their_own(self, monkeypatch):
        model, optimizer = prepared(FUSED)
        second = network()
        other = FUSED(second.parameters())
        initialize(second, other, **LEVELS["O1"])
        for each, its in ((model, optimizer), (second, other)):
            backward(loss_of(each, 0), its, delay_unscale=True)
            amp.clip_grad_norm_(its, MAX_NORM)
        monkeypatch.setattr(kernels, "multiply_", forbidden)
        optimizer.step()

    def test_another_optimizer_of_the_same_parameters_finds_clipped_gradients(self):
        model, optimizer = prepared(FUSED)
        other = SGD(model.parameters())
        initialize(nn.Module(), other, **LEVELS["O1"])
        backward(loss_of(model, 0), optimizer, delay_unscale=True)
        amp.clip_grad_norm_(optimizer, MAX_NORM)
        with pytest.warns(AmpWarning, match="no amp.scale_loss was told of"):
            other.step()
        assert norm_of(gradients(optimizer)) == pytest.approx(MAX_NORM, rel=1e-4)


class TestFoldedGradientsThatChange:
    """Between clipping and step, where they are scaled still."""

    def expected(self, clip_first: bool) -> list[Tensor]:
        model, optimizer = prepared()
        if clip_first:
            backward(loss_of(model, 0), optimizer, delay_unscale=True)
            amp.clip_grad_norm_(optimizer, MAX_NORM)
            optimizer.step()
        else:
            loss_of(model, 1).backward()
            with pytest.warns(AmpWarning, match="no amp.scale_loss was told of"):
                optimizer.step()
        result = weights(optimizer)
        amp.deinitialize()
        return result

    @staticmethod
    def folded(make: Callable[..., torch.optim.Optimizer] = FUSED) -> tuple[nn.Module, Any]:
        model, optimizer = prepared(make)
        backward(loss_of(model, 0), optimizer, delay_unscale=True)
        amp.clip_grad_norm_(optimizer, MAX_NORM)
        return model, optimizer

    def test_those_of_a_later_backward_without_a_scale_are_not_divided(self):
        wanted = self.expected(clip_first=False)
        model, optimizer = self.folded()
        optimizer.zero_grad()
        loss_of(model, 1).backward()
        optimizer.step()
        for actual, expected in zip(weights(optimizer), wanted, strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-7)

    def test_torchs_own_clipping_finds_them_divided(self):
        model, optimizer = self.folded()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM / 2)
        assert norm.item() == pytest.approx(MAX_NORM, rel=1e-4)
        assert norm_of(gradients(optimizer)) == pytest.approx(MAX_NORM / 2, rel=1e-4)
        optimizer.step()

    def test_a_later_backward_without_a_scale_adds_to_them_divided(self):
        model, optimizer = prepared(FUSED)
        backward(loss_of(model, 0), optimizer)
        amp.clip_grad_norm_(optimizer, MAX_NORM)
        loss_of(model, 1).backward()
        optimizer.step()
        wanted = weights(optimizer)
        amp.deinitialize()
        model, optimizer = self.folded()
        loss_of(model, 1).backward()
        optimizer.step()
        for actual, expected in zip(weights(optimizer), wanted, strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-7)

    def test_a_write_to_them_is_warned_of(self):
        model, optimizer = self.folded()
        model[0].weight.grad.mul_(2)
        with pytest.warns(AmpWarning, match="changed after amp.clip_grad_norm_, which had left them scaled"):
            optimizer.step()

    def test_zeroing_them_is_not(self):
        _, optimizer = self.folded()
        optimizer.zero_grad(set_to_none=False)
        optimizer.step()
        assert not any(grad.any() for grad in gradients(optimizer))

    def test_a_hook_before_the_step_sees_them_clipped(self):
        wanted = self.expected(clip_first=True)
        _, optimizer = self.folded()
        seen: list[float] = []
        optimizer.register_step_pre_hook(lambda *_: seen.append(norm_of(gradients(optimizer))))
        optimizer.step()
        assert seen == [pytest.approx(MAX_NORM, rel=1e-4)]
        for actual, expected in zip(weights(optimizer), wanted, strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)

    def test_so_does_a_step_that_is_not_torchs_own(self):
        seen: list[float] = []

        class Own(torch.optim.Adam):
            def step(self, closure: Any = None) -> Any:
                seen.append(norm_of([p.grad for group in self.param_groups for p in group["params"]]))
                return super().step(closure)

        _, optimizer = self.folded(functools.partial(Own, lr=0.01, fused=True))
        seen.clear()
        optimizer.step()
        assert seen == [pytest.approx(MAX_NORM, rel=1e-4)]

    @pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
    def test_a_closure_may_clip(self, make):
        model, optimizer = prepared(make)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, 0)
            backward(loss, optimizer, delay_unscale=True)
            amp.clip_grad_norm_(optimizer, MAX_NORM)
            return loss

        before = weights(optimizer)
        for _ in range(3):
            optimizer.step(closure)
        assert not any(torch.equal(now, was) for now, was in zip(weights(optimizer), before, strict=True))


class TestOverflow:
    @every_dynamic_level
    @every_optimizer
    @pytest.mark.parametrize("delayed", [False, True], ids=["unscaled", "delayed"])
    def test_skips_the_step_and_halves_the_scale_once(self, make, options, delayed):
        model, optimizer = prepared(make, **options)
        before = copy.deepcopy([weights(optimizer), list(model.parameters()), optimizer.state_dict()])
        backward(loss_of(model, 0), optimizer, overflows=True, delay_unscale=delayed)
        norm = amp.clip_grad_norm_(optimizer, MAX_NORM)
        optimizer.step()
        assert not norm.isfinite()
        assert amp.step_was_skipped(optimizer)
        assert amp.get_loss_scale() == SCALE / 2
        assert_same_state([weights(optimizer), list(model.parameters()), optimizer.state_dict()], before)
        optimizer.zero_grad()
        backward(loss_of(model, 0), optimizer, delay_unscale=delayed)
        assert amp.clip_grad_norm_(optimizer, MAX_NORM).isfinite()
        optimizer.step()
        assert not amp.step_was_skipped(optimizer)
        assert all(weight.isfinite().all() for weight in weights(optimizer))

    @pytest.mark.parametrize("make", [ADAM, FUSED], ids=["Adam", "Adam-fused"])
    @pytest.mark.parametrize("loss_scale", [1.0, 64.0])
    def test_under_a_static_scale_does_not_reach_the_next_gradients(self, make, loss_scale):
        model, optimizer = prepared(make, loss_scale=loss_scale)
        for overflows in (True, False):
            optimizer.zero_grad(set_to_none=False)
            backward(loss_of(model, 0), optimizer, overflows=overflows, delay_unscale=True)
            assert amp.clip_grad_norm_(optimizer, MAX_NORM).isfinite() != overflows
        optimizer.step()
        assert all(weight.isfinite().all() for weight in weights(optimizer))

    @pytest.mark.parametrize("make", [ADAM, FUSED], ids=["Adam", "Adam-fused"])
    def test_of_an_earlier_pass_leaves_clipped_gradients_behind_the_skipped_step(self, make):
        model, optimizer = prepared(make)
        backward(loss_of(model, 1), optimizer, overflows=True)
        backward(loss_of(model, 0), optimizer, delay_unscale=True)
        amp.clip_grad_norm_(optimizer, MAX_NORM)
        optimizer.step()
        assert amp.step_was_skipped(optimizer)
        assert norm_of(gradients(optimizer)) == pytest.approx(MAX_NORM, rel=1e-4)

    @pytest.mark.parametrize("delayed", [False, True], ids=["unscaled", "delayed"])
    def test_stays_where_it_came_up(self, delayed):
        model, optimizer = prepared(loss_scale=64.0)
        model[2].bias.register_hook(lambda grad: torch.tensor([math.nan, math.inf, 1.0]))
        backward(loss_of(model, 0), optimizer, delay_unscale=delayed)
        amp.clip_grad_norm_(optimizer, MAX_NORM)
        assert [bool(grad.isfinite().all()) for grad in gradients(optimizer)] == [True, True, True, False]
        assert model[2].bias.grad.isinf().tolist() == [False, True, False]

    def test_measuring_a_norm_that_is_infinite_changes_nothing(self):
        parameter = nn.Parameter(torch.zeros(2))
        parameter.grad = torch.tensor([1e30, 1.0])
        optimizer = SGD([parameter])
        amp.clip_grad_norm_(optimizer, math.inf)
        assert parameter.grad.tolist() == pytest.approx([1e30, 1.0])

    def test_clean_passes_let_the_scale_grow(self):
        model, optimizer = prepared(scale_window=3)
        for index in range(2):
            optimizer.zero_grad()
            backward(loss_of(model, index), optimizer, delay_unscale=True)
            amp.clip_grad_norm_(optimizer, MAX_NORM)
            optimizer.step()
        assert amp.get_loss_scale() == 2 * SCALE

    def test_at_the_floor_the_error_names_what_is_not_finite(self):
        model, optimizer = prepared(FUSED, min_loss_scale=SCALE)
        for _ in range(2):
            optimizer.zero_grad()
            backward(loss_of(model, 0), optimizer, overflows=True, delay_unscale=True)
            amp.clip_grad_norm_(optimizer, MAX_NORM)
            if amp.skipped_steps(optimizer):
                with pytest.raises(LossScaleError, match=r"0\.weight"):
                    optimizer.step()
            else:
                optimizer.step()

    @pytest.mark.parametrize("make", [ADAM, FUSED], ids=["Adam", "Adam-fused"])
    def test_of_one_of_two_optimizers_in_a_block_skips_both_and_halves_once(self, make):
        models = network(), network()
        optimizers = [make(model.parameters()) for model in models]
        initialize(list(models), optimizers, **LEVELS["O1"])
        for overflows in (False, True):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = loss_of(models[0], 0) + loss_of(models[1], 1) * (math.inf if overflows else 1)
            before = [weights(optimizer) for optimizer in optimizers]
            backward(loss, optimizers, delay_unscale=True)
            norms = [amp.clip_grad_norm_(optimizer, MAX_NORM) for optimizer in optimizers]
            if not overflows:
                expected = [norm_of(gradients(optimizer)) for optimizer in optimizers]
                assert expected == [pytest.approx(MAX_NORM, rel=1e-4)] * 2
            for optimizer in optimizers:
                optimizer.step()
            assert [amp.step_was_skipped(optimizer) for optimizer in optimizers] == [overflows] * 2
        assert_same_state([weights(optimizer) for optimizer in optimizers], before)
        assert norms[0].isfinite()
        assert not norms[1].isfinite()
        assert amp.get_loss_scale() == SCALE / 2


class TestMasters:
    def test_one_without_a_gradient_has_none_shown(self):
        model, optimizer = prepared(opt_level="O2", half_dtype=torch.float16)
        backward(loss_of(model, 0), optimizer)
        first = next(amp.master_params(optimizer))
        first.grad = None
        amp.clip_grad_norm_(optimizer, MAX_NORM)
        assert [parameter.grad is None for parameter in model.parameters()] == [True, False, False, False]
        optimizer.step()

    def test_what_is_clipped_to_less_than_half_holds_is_not_shown_as_zero(self):
        model, optimizer = prepared(SGD, **LEVELS["O2"])
        backward(loss_of(model, 0), optimizer)
        shown = [parameter.grad for parameter in model.parameters()]
        amp.clip_grad_norm_(optimizer, 1e-9)
        for parameter, grad, full in zip(model.parameters(), shown, gradients(optimizer), strict=True):
            assert parameter.grad is grad
            assert 0 < full.abs().max() < 2.0**-26
            assert torch.equal(grad != 0, full != 0)

    def test_sums_of_sparse_half_gradients_may_be_beyond_half(self):
        torch.manual_seed(0)
        table = nn.Embedding(4, 2, sparse=True)
        optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
        initialize(table, optimizer, opt_level="O2", half_dtype=torch.float16, loss_scale="dynamic", init_scale=2.0**15)
        backward(table(torch.tensor([1, 1, 1, 1])).sum(), optimizer, delay_unscale=True)
        assert amp.clip_grad_norm_(optimizer, math.inf).item() == pytest.approx(math.sqrt(2 * 4**2), rel=1e-6)

    def test_zeroing_by_one_model_of_a_delayed_block_for_two_is_seen(self):
        models = network(), network()
        optimizers = [SGD(model.parameters()) for model in models]
        initialize(list(models), optimizers, opt_level="O2", half_dtype=torch.float16, loss_scale="dynamic")
        for delayed in (False, True):
            backward(loss_of(models[0], 0) + loss_of(models[1], 1), optimizers, delay_unscale=delayed)
        models[0].zero_grad(set_to_none=False)
        assert amp.clip_grad_norm_(optimizers[0], MAX_NORM).item() == 0
        assert amp.clip_grad_norm_(optimizers[1], MAX_NORM).item() > MAX_NORM

    @pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
    def test_gradients_with_a_graph_are_not_written_at_scale_1(self):
        model = nn.ParameterList([torch.tensor([2.0])])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        initialize(model, optimizer, opt_level="O5")
        with amp.scale_loss((model[0] ** 3).sum(), optimizer) as scaled_loss:
            scaled_loss.backward(create_graph=True)
            penalty = model[0].grad.square().sum()
        (second,) = torch.autograd.grad(penalty, model[0])
        assert second.item() == 2 * 12 * 12
        model[0].grad = None


class TestBadInput:
    @pytest.mark.parametrize("max_norm", [-1.0, math.nan, "1", None, True, 1j, 10**400])
    def test_a_norm_that_is_none(self, max_norm):
        model, optimizer = prepared()
        backward(loss_of(model, 0), optimizer)
        before = copy.deepcopy(gradients(optimizer))
        with pytest.raises(OptionError, match=r"max_norm is .*; expected a number from 0 on"):
            amp.clip_grad_norm_(optimizer, max_norm)
        assert_same_state(gradients(optimizer), before)

    @pytest.mark.parametrize("max_norm", [np.float32(MAX_NORM), torch.tensor(MAX_NORM)], ids=["numpy", "tensor"])
    def test_a_number_in_another_shape_is_none(self, max_norm):
        model, optimizer = prepared()
        backward(loss_of(model, 0), optimizer)
        amp.clip_grad_norm_(optimizer, max_norm)
        assert norm_of(gradients(optimizer)) == pytest.approx(MAX_NORM, rel=1e-4)

    def test_parameters_in_place_of_their_optimizer(self):
        model = network()
        with pytest.raises(OptionError, match="lacks param_groups, step, zero_grad"):
            amp.clip_grad_norm_(list(model.parameters()), MAX_NORM)

    def test_inside_the_block(self):
        model, optimizer = prepared()
        with amp.scale_loss(loss_of(model, 0), optimizer) as scaled_loss:
            scaled_loss.backward()
            with pytest.raises(UsageError, match=r"inside the amp\.scale_loss block. Move it behind"):
                amp.clip_grad_norm_(optimizer, MAX_NORM)

    def test_gradients_that_another_optimizer_has_left_scaled(self):
        model, optimizer = prepared()
        other = SGD(model.parameters())
        initialize(nn.Module(), other, **LEVELS["O1"])
        backward(loss_of(model, 0), other, delay_unscale=True)
        with pytest.raises(UsageError, match=r"clip_grad_norm_ would clip the gradient of 0\.weight, which"):
            amp.clip_grad_norm_(optimizer, MAX_NORM)
        other.zero_grad()


class TestWithoutAmp:
    @pytest.mark.parametrize("enabled", [None, False], ids=["before-initialize", "disabled"])
    def test_clips_all_the_same(self, enabled):
        model = network()
        optimizer = SGD(model.parameters())
        if enabled is False:
            amp.initialize(model, optimizer, enabled=False)
        loss_of(model, 0).backward()
        expected = norm_of(gradients(optimizer))
        assert amp.clip_grad_norm_(optimizer, MAX_NORM).item() == pytest.approx(expected, rel=1e-6)
        assert norm_of(gradients(optimizer)) == pytest.approx(MAX_NORM, rel=1e-4)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
def test_gradients_with_a_graph_stay_the_users_to_differentiate():
    model = nn.ParameterList([torch.tensor([2.0])])
    weight = model[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    initialize(model, optimizer, **LEVELS["O1"])
    with amp.scale_loss((weight**3).sum(), optimizer, delay_unscale=True) as scaled_loss:
        scaled_loss.backward(create_graph=True)
    assert amp.clip_grad_norm_(optimizer, math.inf).item() == 12
    (second,) = torch.autograd.grad(weight.grad.sum(), weight)
    assert second.item() == 12
    weight.grad = None  # torch asks for that, to break the cycle


def noted(kernel: Callable[..., None], passes: list[str]) -> Callable[..., None]:
    """A kernel that notes its name where there is anything to do."""

    def call(*args: Any, **kwargs: Any) -> None:
        tensors = list(args[0])
        if tensors:
            passes.append(kernel.__name__)
        kernel(tensors, *args[1:], **kwargs)

    return call


def forbidden(*_: Any) -> None:
    raise AssertionError("one pass too many")
