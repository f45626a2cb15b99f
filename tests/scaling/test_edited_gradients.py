"""Whatever users do to gradients counts as it does in plain torch, by whatever means, at whatever moment."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from edits import (
    CLEARINGS,
    GRADIENT_EDITS,
    START,
    Run,
    Weights,
    assert_as_in_torch,
    each_replaced,
    every_level,
    plain_block,
)
from stepping import every_half
from torch import Tensor, nn

from ampatch import amp
from ampatch.amp import AmpWarning

OVERFLOW = 2.0**126

every_edit = pytest.mark.parametrize("edit", GRADIENT_EDITS)


class TestGradientsOfTheModel:
    @every_level
    @every_edit
    @pytest.mark.parametrize("moment", ["before the step", "before another block", "and then of the masters"])
    @pytest.mark.covering(2)
    def test_edit_of_gradients_counts_as_in_torch(self, edit, moment, opt_level, half_dtype):
        def script(run: Run) -> None:
            run.backward()
            GRADIENT_EDITS[edit](run.parameters)
            if moment == "before another block":
                run.backward(2.0)
            elif moment == "and then of the masters":
                for master in run.masters:
                    if master.grad is not None:
                        master.grad.data.mul_(2)
            run.optimizer.step()

        assert_as_in_torch(opt_level, half_dtype, script)

    @every_level
    @every_edit
    @pytest.mark.covering(1)
    def test_edit_of_gradients_in_a_block_before_its_backward_pass_counts_as_in_torch(
        self, edit, opt_level, half_dtype
    ):
        by_value = ("another", "a backward outside of a block", "data.clamp_", "clip_grad_value_")
        if opt_level == "O1" and edit in by_value:
            pytest.skip("without masters gradients are at the scale inside a block")

        def script(run: Run) -> None:
            run.backward()
            run.backward(2.0, within=GRADIENT_EDITS[edit])
            run.optimizer.step()

        assert_as_in_torch(opt_level, half_dtype, script)

    @every_level
    @pytest.mark.parametrize("overlapping", [False, True])
    @pytest.mark.parametrize("when", ["before the step", "before a block", "in a block"])
    @pytest.mark.covering(1)
    def test_gradient_with_several_elements_in_one_place_is_made_contiguous(
        self, when, overlapping, opt_level, half_dtype
    ):
        def twos(grad: Tensor, scale: float) -> Tensor:
            if overlapping and grad.dim() == 2:
                return torch.full((3,), 2.0 * scale, dtype=grad.dtype).as_strided((2, 2), (1, 1))
            return torch.full((1,) * grad.dim(), 2.0 * scale, dtype=grad.dtype).expand_as(grad)

        def script(run: Run) -> None:
            is_plain = run.block is plain_block
            scale = 8.0 if when == "in a block" and not is_plain else 1.0
            change = each_replaced(functools.partial(twos, scale=scale))
            with run.block(run.model(1.0), run.optimizer) as loss:
                loss.backward()
                if when == "in a block":
                    change(run.parameters)
            if when != "in a block":
                change(run.parameters)
            if when == "before a block":
                if is_plain:  # plain torch cannot add to one
                    each_replaced(Tensor.contiguous)(run.parameters)
                run.backward(2.0)
            run.optimizer.step()

        assert_as_in_torch(opt_level, half_dtype, script)

    @every_level
    @pytest.mark.parametrize("by_amp", [False, True], ids=["torch", "amp"])
    def test_gradients_of_the_model_are_clipped(self, by_amp, opt_level, half_dtype):
        run = Run(opt_level, half_dtype)
        run.backward(16.0)
        if by_amp:
            run.model.first.grad = torch.ones(1, dtype=run.model.first.dtype).expand(4)
            amp.clip_grad_norm_(run.optimizer, 1.0)
        else:
            nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
        found = nn.utils.get_total_norm([master.grad for master in run.masters]).item()
        assert found == pytest.approx(1, rel=1e-4 if by_amp else 4 * torch.finfo(half_dtype).eps)

    @every_level
    def test_gradients_are_cleared_by_an_optimizers_own_zero_grad(self, opt_level, half_dtype):
        class Own(torch.optim.SGD):
            def zero_grad(self, *_: object) -> None:
                GRADIENT_EDITS["none"](self.model.parameters())

        def script(run: Run) -> None:
            run.optimizer.model = run.model
            run.backward()
            run.optimizer.zero_grad()
            run.backward(2.0)
            run.optimizer.step()

        assert_as_in_torch(opt_level, half_dtype, script, optimizer=Own)

    @every_level
    @pytest.mark.filterwarnings("ignore:a hook of a leaf:ampatch.errors.AmpWarning")
    def test_edit_by_a_hook_after_accumulation_counts(self, opt_level, half_dtype):
        def double(parameter: Tensor) -> None:
            parameter.grad.data.mul_(2)

        def script(run: Run) -> None:
            run.model.first.register_post_accumulate_grad_hook(double)
            run.backward()
            run.optimizer.step()

        assert_as_in_torch(opt_level, half_dtype, script)

    @every_level
    def test_gradients_may_be_zeroed_through_data_before_each_iteration(self, opt_level, half_dtype):
        def script(run: Run) -> None:
            for factor in (1.0, 2.0, -1.0):
                CLEARINGS["data.zero_"](run)
                run.backward(factor)
                run.backward(factor)
                run.optimizer.step()

        assert_as_in_torch(opt_level, half_dtype, script)

    @every_level
    @pytest.mark.parametrize("loss_scale", [8.0, 1.0])
    @pytest.mark.parametrize("clear", ["optimizer", "model", "none", "data.zero_"])
    @pytest.mark.covering(1)
    def test_gradients_may_be_cleared_between_blocks_under_a_static_scale(
        self, clear, loss_scale, opt_level, half_dtype
    ):
        def script(run: Run) -> None:
            for _ in range(2):
                run.backward(4.0)
                CLEARINGS[clear](run)
                run.backward(2.0)
                run.optimizer.step()
                run.optimizer.zero_grad()

        assert_as_in_torch(opt_level, half_dtype, script, loss_scale=loss_scale)

    @every_half
    @pytest.mark.parametrize("choice", ["extension", "torch"])
    @pytest.mark.parametrize(
        "share",
        [lambda grad: grad, Tensor.detach, lambda grad: grad.view(2, 2).view(4)],
        ids=["itself", "detached", "viewed"],
    )
    @pytest.mark.covering(1)
    def test_gradient_that_two_weights_share_is_unscaled_once(self, share, choice, half_dtype, select, request):
        if choice == "extension":
            request.getfixturevalue("compiled")
        select(choice)

        class Twins(Weights):
            def __init__(self) -> None:
                super().__init__()
                self.second = nn.Parameter(torch.tensor(START).flip(0))

        def script(run: Run) -> None:
            for factor in (1.0, 2.0):
                with run.block(run.model(factor), run.optimizer) as loss:
                    loss.backward()
                    run.model.second.grad = share(run.model.first.grad)
                run.optimizer.step()
                run.optimizer.zero_grad()

        assert_as_in_torch("O2", half_dtype, script, model=Twins)

    @every_level
    @pytest.mark.parametrize("kernel", ["torch", "auto"])
    def test_empty_parameters_are_trained_with_others(self, kernel, opt_level, half_dtype, select):
        select(kernel)
        weights = [torch.ones(3), torch.ones(0, 2), torch.tensor(1.0)]
        run = Run(opt_level, half_dtype, model=lambda: nn.ParameterList(weights), loss_scale=8.0)
        for _ in range(2):
            for _ in range(2):
                with amp.scale_loss(sum(each.float().sum() for each in run.model), run.optimizer) as loss:
                    loss.backward()
                each_replaced(lambda grad: grad * 1)(run.model)
            run.optimizer.step()
            run.optimizer.zero_grad()
        assert [each.tolist() for each in run.model] == [[-1] * 3, [], -1]


class TestGradientsOfMasters:
    @every_level
    @pytest.mark.parametrize("kept", [False, True], ids=["new-list", "kept-list"])
    @pytest.mark.parametrize("edit", [name for name in GRADIENT_EDITS if name != "a backward outside of a block"])
    @pytest.mark.covering(1)
    def test_edit_of_masters_gradients_counts_as_in_torch(self, edit, kept, opt_level, half_dtype):
        def script(run: Run) -> None:
            masters = run.masters
            run.backward()
            GRADIENT_EDITS[edit](masters if kept else run.masters)
            run.optimizer.step()

        assert_as_in_torch(opt_level, half_dtype, script)

    @every_level
    @pytest.mark.covering(1)
    def test_gradients_set_on_masters_by_hand_count_and_are_warned_of_beside_others(self, opt_level, half_dtype):
        def script(run: Run) -> None:
            masters = run.masters
            run.model(1.0).backward()
            for parameter, master in zip(run.model.parameters(), masters, strict=True):
                master.grad = parameter.grad.float() * 2
            run.optimizer.step()

        if opt_level == "O1":
            assert_as_in_torch(opt_level, half_dtype, script, loss_scale=1)
            return
        with pytest.warns(AmpWarning, match="set on float32 masters by hand") as told:
            assert_as_in_torch(opt_level, half_dtype, script, loss_scale=1)
        assert told[0].filename == __file__

    @every_half
    @pytest.mark.parametrize("passes", [1, 2])
    def test_masters_gradient_too_small_for_half_is_not_shown_as_zero_and_keeps_its_bits(self, half_dtype, passes):
        scale = 2.0**10
        run = Run("O2", half_dtype, model=lambda: nn.ParameterList([torch.ones(4)]), loss_scale=scale)
        (weight,) = run.model
        least = torch.finfo(half_dtype).smallest_normal * torch.finfo(half_dtype).eps
        slopes = torch.tensor([least, 0.0, -2 * least, 1.0])
        for _ in range(passes):
            with amp.scale_loss((weight.float() * (slopes / scale)).sum(), run.optimizer) as loss:
                loss.backward()
        wanted = passes * slopes / scale
        assert torch.equal(run.masters[0].grad, wanted)
        assert weight.grad[:3].tolist() == [least, 0, -least]
        weight.grad.data.clamp_(-1, 1)
        assert torch.equal(run.masters[0].grad, wanted)
        weight.grad.data[0] = 0
        assert torch.equal(run.masters[0].grad, wanted * torch.tensor([0, 1, 1, 1]))

    @every_half
    def test_edits_of_the_models_gradients_and_then_of_a_new_list_of_masters_both_count(self, half_dtype):
        run = Run("O2", half_dtype)
        run.backward(16.0)
        run.model.first.grad[:2] = 0
        norm = nn.utils.clip_grad_norm_(amp.master_params(run.optimizer), 1.0)
        assert norm.item() == pytest.approx(16 * math.sqrt(30 + 25), rel=1e-6)
        run.optimizer.step()
        moved = torch.tensor(START) - next(iter(run.model.state_dict().values()))
        assert moved[:2].tolist() == [0, 0]
        assert moved[2:].norm().item() == pytest.approx(0.5 * 5 / math.sqrt(55), rel=1e-3)


def one_each(optimizer: Callable[..., Any]) -> Callable[..., Any]:
    """Makes optimizers of one parameter each."""
    return lambda parameters, lr: [optimizer([parameter], lr=lr) for parameter in parameters]


@every_level
@pytest.mark.parametrize(
    "optimizer", [torch.optim.SGD, functools.partial(torch.optim.SGD, fused=True)], ids=["SGD", "fused"]
)
@pytest.mark.parametrize("clear", CLEARINGS.values(), ids=CLEARINGS)
@pytest.mark.parametrize("floor", [1.0, 8.0], ids=["above-the-floor", "at-the-floor"])
@pytest.mark.covering(1)
class TestClearedOverflows:
    """An overflow skips no step once its gradients are cleared; the scale has backed off all the same."""

    def test_overflow_whose_gradients_were_cleared_skips_no_step(self, clear, optimizer, floor, opt_level, half_dtype):
        def script(run: Run) -> None:
            run.step()
            run.optimizer.zero_grad()
            run.backward(OVERFLOW)
            clear(run)
            run.backward(2.0)
            run.optimizer.step()

        run = assert_as_in_torch(opt_level, half_dtype, script, optimizer=optimizer, min_loss_scale=floor)
        assert not amp.step_was_skipped(run.optimizer)
        assert amp.get_loss_scale() == max(4.0, floor)

    def test_cleared_overflow_of_an_optimizer_that_does_not_step_skips_no_other_step(
        self, clear, optimizer, floor, opt_level, half_dtype
    ):
        run = Run(opt_level, half_dtype, optimizer=one_each(optimizer), min_loss_scale=floor)
        run.backward(OVERFLOW)
        for optimizer_of_one in run.optimizer:
            clear(SimpleNamespace(model=run.model, optimizer=optimizer_of_one))
        run.backward()
        run.optimizer[1].step()
        assert not amp.step_was_skipped(run.optimizer[1])


@every_level
def test_outer_block_unscales_by_its_own_scale_after_a_step_of_an_inner_one(opt_level, half_dtype):
    run = Run(opt_level, half_dtype, optimizer=one_each(torch.optim.SGD), scale_window=1)
    first, second = run.optimizer
    with amp.scale_loss(run.model.first.float().sum(), first) as outer:
        with amp.scale_loss(run.model.second.float().sum(), second) as inner:
            inner.backward()
        (master,) = amp.master_params(second)
        assert master.grad.flatten().tolist() == [1] * 4
        second.step()
        assert amp.get_loss_scale() == 16  # the inner block was clean
        outer.backward()
    (master,) = amp.master_params(first)
    assert master.grad.flatten().tolist() == [1] * 4


def test_loss_scaled_by_hand_keeps_its_scale_after_an_update_before_backward():
    weight = nn.Parameter(torch.ones(2))
    scaler = amp.LossScaler(init_scale=8.0, scale_window=1)
    scaled = scaler.scale(weight.sum())
    scaler.update()
    scaled.backward()
    assert weight.grad.tolist() == [8, 8]
