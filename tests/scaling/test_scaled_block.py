"""Of blocks that begin without gradients to scale: they take a shortcut, and end as without it.

Other tests of blocks stand in test_optimizers.py, and for O2 in test_master_weights.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import assert_same_state
from optimizers import MOMENTUM, OVERFLOW, SGD, backward, initialize
from stepping import o1_and_o2
from torch import Tensor, nn

from ampatch import amp
from ampatch.errors import UsageError
from ampatch.scaling.scaled_block import ScaledBlock

# Functions do not cast, and the scale is dynamic.
LEVELS = {"O1": {"patch_torch_functions": False}, "O2": {"half_dtype": torch.bfloat16}}


class Training:
    """Two layers, an optimizer for each or one for both, and a record of everything that blocks and steps change."""

    def __init__(self, level: str, *, several: bool = False, frozen: bool = False, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.model[1].weight.requires_grad_(not frozen)
        parameters = [list(layer.parameters()) for layer in self.model] if several else [list(self.model.parameters())]
        self.optimizers = [MOMENTUM(each) for each in parameters]
        initialize(self.model, self.optimizers, opt_level=level, **{**LEVELS[level], **options})
        self.optimizer = self.optimizers[0]
        self.noted: list[Any] = []

    def loss(self, factor: float = 1.0) -> Tensor:
        batch = torch.linspace(-1, 1, 12).reshape(3, 4)
        return self.model(batch).float().square().sum() * factor

    def block(self, optimizers: Any = None, factor: float = 1.0, **options: Any) -> None:
        backward(self.loss(factor), self.optimizers if optimizers is None else optimizers, **options)
        self.note()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
        self.note()

    def clear(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def note(self) -> None:
        masters = [master for optimizer in self.optimizers for master in amp.master_params(optimizer)]
        tensors = [*self.model.parameters(), *masters]
        found = [None if each is None else each.detach().clone() for each in [*tensors, *(t.grad for t in tensors)]]
        skipped = [amp.step_was_skipped(optimizer) for optimizer in self.optimizers]
        self.noted.append([found, skipped, amp.get_loss_scale()])


def cleared(training: Training, set_to_none: bool = True, factors: tuple[float, ...] = (1.0, 1.0, 1.0)) -> None:
    for factor in factors:
        training.clear(set_to_none)
        training.block(factor=factor)
        training.step()


def zeroed(training: Training) -> None:
    cleared(training, set_to_none=False)


def overflowed(training: Training) -> None:
    cleared(training, factors=(1.0, OVERFLOW, 1.0))


def added_up(training: Training) -> None:
    for _ in range(3):
        training.block()


def backward_without_a_block(training: Training) -> None:
    training.loss().backward()
    training.block()


def gradients_of_masters_by_hand(training: Training) -> None:
    for parameter in amp.master_params(training.optimizer):
        parameter.grad = torch.ones_like(parameter)
    training.block()


def a_gradient_of_the_model_by_hand(training: Training) -> None:
    cleared(training, factors=(1.0,))
    training.clear()
    training.model[0].bias.grad = torch.ones_like(training.model[0].bias)
    training.block()


def cleared_by_hand(training: Training) -> None:
    training.block()
    for parameter in training.model.parameters():
        parameter.grad = None
    training.block()


def one_cleared_by_hand(training: Training) -> None:
    training.block()
    training.model[1].weight.grad = None
    training.block()


def overflowed_and_went_on(training: Training) -> None:
    training.block(factor=OVERFLOW)
    training.block()


def overflow_left_to_the_next_block(training: Training) -> None:
    training.block(factor=OVERFLOW, delay_overflow_check=True)
    training.clear()
    training.block()


def left_scaled(training: Training) -> None:
    training.block(delay_unscale=True)
    training.block()


def left_scaled_and_cleared(training: Training) -> None:
    training.block(delay_unscale=True)
    training.clear()
    training.block()


def raised(training: Training) -> None:
    with contextlib.suppress(ZeroDivisionError), amp.scale_loss(training.loss(), training.optimizers) as scaled_loss:
        scaled_loss.backward()
        raise ZeroDivisionError
    training.note()
    training.block()


def unfrozen(training: Training) -> None:
    cleared(training, factors=(1.0,))
    training.clear()
    training.model[1].weight.requires_grad_(True)
    training.block()


def grew(training: Training) -> None:
    cleared(training, factors=(1.0,))
    training.clear()
    layer = nn.Linear(4, 4).to(training.model[0].weight.dtype)
    for parameter in layer.parameters():
        nn.init.constant_(parameter, 0.25)
    training.model.append(layer)
    training.optimizer.param_groups[0]["params"].extend(layer.parameters())
    training.block()


def one_left_scaled_and_cleared(training: Training) -> None:
    first, second = training.optimizers
    training.block(first, delay_unscale=True)
    training.clear()
    training.block(second)
    second.step()
    training.clear()
    training.block()


def one_after_the_other(training: Training) -> None:
    for optimizer in training.optimizers:
        training.clear()
        training.block(optimizer)
        optimizer.step()
        training.note()


# What happens before the last step, options of the training, and which blocks begin without gradients at O1 and at O2.
SCENARIOS: list[tuple[Callable[[Training], None], dict[str, Any], list[bool], list[bool]]] = [
    (cleared, {}, [True] * 3, [True] * 3),
    (cleared, {"several": True}, [True] * 3, [True] * 3),
    (cleared, {"loss_scale": 128.0}, [True] * 3, [True] * 3),
    (cleared, {"loss_scale": 1.0}, [True] * 3, [True] * 3),
    # At O2 a step sets gradients to None.
    (zeroed, {}, [True, False, False], [True, True, True]),
    (added_up, {}, [True, False, False], [True, False, False]),
    (added_up, {"loss_scale": 1.0}, [True, False, False], [True, False, False]),
    (backward_without_a_block, {}, [False], [False]),
    (gradients_of_masters_by_hand, {}, [False], [False]),
    (a_gradient_of_the_model_by_hand, {}, [True, False], [True, False]),
    # What was found of them is to decide on the step.
    (cleared_by_hand, {}, [True, True], [True, True]),
    (one_cleared_by_hand, {}, [True, False], [True, False]),
    (overflowed, {}, [True] * 3, [True] * 3),
    (overflowed_and_went_on, {}, [True, False], [True, False]),
    (overflow_left_to_the_next_block, {}, [True, True], [True, True]),
    (left_scaled, {}, [True, False], [True, False]),
    (left_scaled_and_cleared, {}, [True, False], [True, False]),
    (raised, {}, [True, True], [True, True]),
    # A half parameter without a master: it may be one that is to get one.
    (unfrozen, {"frozen": True}, [True, True], [False, False]),
    (grew, {}, [True, True], [True, False]),
    (one_left_scaled_and_cleared, {"several": True}, [True, False, True], [True, False, True]),
    (one_after_the_other, {"several": True}, [True, True], [True, True]),
]


@pytest.fixture
def began(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each block, whether it began without gradients to scale."""
    begin_if_clear, found = ScaledBlock.begin_if_clear, []

    def noted(scaled_block: ScaledBlock[Any]) -> bool:
        found.append(begin_if_clear(scaled_block))
        return found[-1]

    monkeypatch.setattr(ScaledBlock, "begin_if_clear", noted)
    return found


@pytest.mark.filterwarnings("ignore::ampatch.errors.AmpWarning")
@o1_and_o2
@pytest.mark.parametrize(
    ("scenario", "options", "at_o1", "at_o2"),
    [pytest.param(*each, id="-".join([each[0].__name__, *map(str, each[1].values())])) for each in SCENARIOS],
)
@pytest.mark.covering(1)
def test_block_without_gradients_to_scale_ends_as_without_its_shortcut(
    scenario, options, at_o1, at_o2, opt_level, began, monkeypatch
):
    def ended() -> list[Any]:
        training = Training(opt_level, **options)
        scenario(training)
        training.step()
        amp.deinitialize()
        return training.noted

    found = ended()
    assert began == (at_o1 if opt_level == "O1" else at_o2)
    monkeypatch.setattr(ScaledBlock, "begin_if_clear", lambda _: False)
    assert_same_state(found, ended())


@o1_and_o2
def test_block_inside_another_is_refused_before_its_shortcut(opt_level, began):
    training = Training(opt_level)
    with (
        amp.scale_loss(training.loss(), training.optimizers),
        pytest.raises(UsageError, match="stands inside another one"),
        amp.scale_loss(training.loss(), training.optimizers),
    ):
        pass
    assert began == [True, False]


def test_block_for_a_parameter_left_scaled_is_refused_before_its_shortcut(began):
    training = Training("O1")
    other = SGD(training.model[0].parameters())
    initialize(training.model, other)
    training.block(training.optimizer, delay_unscale=True)
    with pytest.raises(UsageError, match="scaled"), amp.scale_loss(training.loss(), other):
        pass
    training.clear()
    assert began == [True, False]


class TestLossesThatAreScaledTwice:
    """Their gradients would be divided by one of the two scales."""

    @pytest.fixture
    def training(self) -> Training:
        return Training("O1", several=True, num_losses=2)

    @pytest.mark.parametrize("loss_id", [0, 1])
    @pytest.mark.parametrize("added", [False, True], ids=["itself", "in-a-sum"])
    def test_scaled_loss_in_a_nested_block_raises_and_leaves_no_gradients(self, training, loss_id, added):
        first, second = training.optimizers
        message = r"scaled before, .* amp.scale_loss\(loss, \[optimizer, other\]\)"
        with pytest.raises(UsageError, match=message):  # noqa: SIM117, PT012
            with amp.scale_loss(training.loss(), first) as scaled:
                loss = scaled + training.loss() if added else scaled
                with amp.scale_loss(loss, second, loss_id=loss_id) as again:
                    again.backward()
        assert all(parameter.grad is None for parameter in training.model.parameters())
        training.block()
        training.step()

    def test_scaled_loss_in_a_later_block_raises(self, training):
        with amp.scale_loss(training.loss(), training.optimizers) as scaled:
            scaled.backward(retain_graph=True)
        with pytest.raises(UsageError, match="scaled before"), amp.scale_loss([scaled], training.optimizers):
            pass

    def test_each_of_two_losses_may_be_scaled_in_nested_blocks(self, training):
        batch = torch.ones(3, 4)
        losses = [layer(batch).square().sum() for layer in training.model]
        expected = [
            torch.autograd.grad(loss, layer.weight, retain_graph=True)[0]
            for loss, layer in zip(losses, training.model, strict=True)
        ]
        first, second = training.optimizers
        with amp.scale_loss(losses[0], first) as one, amp.scale_loss(losses[1], second, loss_id=1) as other:
            (one + other).backward()
        torch.testing.assert_close([layer.weight.grad for layer in training.model], expected)


@o1_and_o2
def test_backward_pass_behind_its_block_raises(opt_level):
    training = Training(opt_level)
    with amp.scale_loss(training.loss(), training.optimizers) as scaled_loss:
        pass
    with pytest.raises(UsageError, match=r"the block has ended.*Type it inside of the block"):
        scaled_loss.backward()
    assert all(parameter.grad is None for parameter in training.model.parameters())
