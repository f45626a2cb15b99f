"""`torch.utils.checkpoint`: what is recomputed is cast as it was, and gradients have the bits they have without."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same_state
from small_nets import EACH_DEVICE, EACH_HALF, EACH_LEVEL
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from ampatch import amp

aten = torch.ops.aten
Checkpoint = Callable[[nn.Module, Tensor], Tensor]


class Block(nn.Module):
    """Uses one weight three times, between functions of both lists, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(8, 8), nn.LayerNorm(8), nn.Dropout(0.25)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        self.seen.append(hidden.dtype)
        hidden = self.norm(self.dropout(F.gelu(hidden)))
        return x + self.linear(F.softmax(hidden @ self.linear.weight.to(hidden.dtype), -1).to(x.dtype))


class Blocks(nn.Module):
    """Runs its blocks each through what is to run them."""

    def __init__(self, run: Checkpoint) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.run(block, x)
        return x


def directly(block: nn.Module, x: Tensor) -> Tensor:
    return block(x)


def selective(*saved: torch._ops.OpOverload) -> Checkpoint:
    """Saves the results of these operators, and recomputes those of all others."""

    def policy(ctx: object, operator: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator in saved else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    return functools.partial(checkpoint, use_reentrant=False, context_fn=contexts)


def nested(outer: bool, inner: bool) -> Checkpoint:
    def run(block: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(functools.partial(checkpoint, block, use_reentrant=inner), x, use_reentrant=outer)

    return run


def to_the_end(block: nn.Module, x: Tensor) -> Tensor:
    with set_checkpoint_early_stop(False):
        return checkpoint(block, x, use_reentrant=False)


def without_casts(run: Checkpoint) -> Checkpoint:
    def wrapped(block: nn.Module, x: Tensor) -> Tensor:
        with amp.disable_casts():
            return run(block, x)

    return wrapped


KINDS: dict[str, Checkpoint] = {
    "reentrant": functools.partial(checkpoint, use_reentrant=True),
    "non-reentrant": functools.partial(checkpoint, use_reentrant=False),
    "unchecked": functools.partial(checkpoint, use_reentrant=False, determinism_check="none"),
    "to-the-end": to_the_end,
    "nested": nested(False, False),
    "reentrant-in-non-reentrant": nested(False, True),
    "non-reentrant-in-reentrant": nested(True, False),
    "saves-products": selective(aten.mm.default, aten.addmm.default),
    "saves-casts": selective(aten._to_copy.default),
    "saves-nothing": selective(),
    "saves-a-list": functools.partial(
        checkpoint,
        use_reentrant=False,
        context_fn=functools.partial(create_selective_checkpoint_contexts, [aten.mm.default, aten.addmm.default]),
    ),
}


def adopted(run: Checkpoint, level: str, half: torch.dtype, device: str) -> tuple[Blocks, torch.optim.Optimizer]:
    model = Blocks(run).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    # Of two powers of two, so that scaling rounds nothing.
    return amp.initialize(model, optimizer, opt_level=level, half_dtype=half, loss_scale=128.0, verbosity=0)


def gradients(
    run: Checkpoint, level: str, half: torch.dtype, device: str, warm: bool = False, clear: bool = False
) -> list[Tensor]:
    """The gradients of the input and of all parameters.

    Args:
        run: runs each block.
        level: the opt level.
        half: the half type.
        device: where.
        warm: whether the weights were cast before, outside of any checkpoint.
        clear: whether the casts are dropped between forward and backward.
    """
    model, optimizer = adopted(run, level, half, device)
    x = torch.linspace(-1, 1, 32, device=device).view(4, 8).requires_grad_()
    if warm:
        model.run = directly
        model(x.detach())
        model.run = run
    torch.manual_seed(1)
    with amp.scale_loss(model(x).float().pow(2).sum(), optimizer) as loss:
        if clear:
            amp.clear_cache()
        loss.backward()
    found = [x.grad, *(parameter.grad for parameter in amp.master_params(optimizer))]
    assert all(each.any() for each in found)
    amp.deinitialize()
    return found


@functools.cache
def expected_gradients(level: str, half: torch.dtype, device: str) -> list[Tensor]:
    return gradients(directly, level, half, device)


@functools.cache
def expected_without_casts(device: str) -> list[Tensor]:
    return gradients(without_casts(directly), "O1", torch.bfloat16, device)


@EACH_LEVEL
@EACH_HALF
@EACH_DEVICE
class TestGradients:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.covering(1)
    def test_gradients_are_those_without_a_checkpoint(self, kind, level, half, device):
        assert_same_state(gradients(KINDS[kind], level, half, device), expected_gradients(level, half, device))


@EACH_HALF
@EACH_DEVICE
@pytest.mark.parametrize("kind", ["reentrant", "non-reentrant", "saves-casts"])
@pytest.mark.parametrize(("warm", "clear"), [(True, False), (False, True), (True, True)])
@pytest.mark.covering(1)
def test_casts_kept_from_before_or_dropped_change_no_gradient(kind, half, device, warm, clear):
    found = gradients(KINDS[kind], "O1", half, device, warm, clear)
    assert_same_state(found, expected_gradients("O1", half, device))


@EACH_DEVICE
class TestWithoutCasts:
    @pytest.mark.parametrize("kind", ["reentrant", "non-reentrant", "nested", "saves-products"])
    def test_gradients_of_checkpoints_without_casts_are_those_of_float32(self, kind, device):
        found = gradients(without_casts(KINDS[kind]), "O1", torch.bfloat16, device)
        assert_same_state(found, expected_without_casts(device))

    @EACH_HALF
    @pytest.mark.filterwarnings("ignore:Please specify CheckpointImpl.NO_REENTRANT")
    @pytest.mark.parametrize("kind", ["reentrant", "saves-products", "composable", *CheckpointImpl.__members__])
    @pytest.mark.parametrize("off", [False, True], ids=["on", "off"])
    @pytest.mark.covering(1)
    def test_recomputations_compute_in_the_type_of_the_forward(self, kind, half, device, off):
        block = Block().to(device)
        run: Checkpoint = KINDS.get(kind, directly)
        outer: nn.Module = block
        if kind == "composable":
            outer = composable_checkpoint(block)
        elif kind in CheckpointImpl.__members__:
            outer = checkpoint_wrapper(block, CheckpointImpl[kind])
        amp.initialize(block, half_dtype=half, verbosity=0)
        x = torch.ones(2, 8, device=device, requires_grad=True)
        out = (without_casts(run) if off else run)(outer, x)
        out.float().sum().backward()
        if kind != "composable":  # it recomputes below the module's forward
            assert len(block.seen) > 1
        assert set(block.seen) == {torch.float32 if off else half}
        assert block.linear.weight.grad is not None

    @EACH_HALF
    def test_regions_within_a_checkpoint_are_recomputed(self, half, device):
        seen = []

        def region(x: Tensor) -> Tensor:
            with amp.disable_casts():
                uncast = x @ x
            cast = x @ x
            seen.append((uncast.dtype, cast.dtype))
            return (uncast + cast).sin()  # which saves the sum, so that recomputation does not stop before it

        x = torch.eye(4, device=device).requires_grad_()
        amp.initialize(nn.Linear(1, 1, device=device), half_dtype=half, verbosity=0)
        for use_reentrant in (True, False):
            checkpoint(region, x, use_reentrant=use_reentrant).sum().backward()
        assert seen == [(torch.float32, half)] * 4


@EACH_HALF
class TestNumberOfCasts:
    def counts(self, run: Checkpoint, half: torch.dtype) -> tuple[int, int]:
        """Casts in the forward, and in the backward, of a model of one weight and nothing else to cast."""

        class Twice(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(4, 4, bias=False)

            def forward(self, x: Tensor) -> Tensor:
                return run(self.linear, run(self.linear, x))

        model = amp.initialize(Twice(), half_dtype=half, verbosity=0)
        x = torch.ones(2, 4, dtype=half, requires_grad=True)
        casts = [amp.cast_counts().casts]
        out = model(x)
        casts.append(amp.cast_counts().casts)
        out.sum().backward()
        casts.append(amp.cast_counts().casts)
        return casts[1] - casts[0], casts[2] - casts[1]

    @pytest.mark.parametrize("kind", ["non-reentrant", "saves-products", "saves-casts", "to-the-end"])
    @pytest.mark.covering(1)
    def test_a_weight_is_cast_once_in_each_pass(self, kind, half):
        assert self.counts(KINDS[kind], half) == (1, 1)

    # Their forward records no gradients, so that its cast cannot serve the backward.
    def test_a_weight_is_cast_in_each_reentrant_checkpoint(self, half):
        assert self.counts(KINDS["reentrant"], half) == (1, 2)


class TestTraining:
    def test_two_backward_passes_through_a_checkpoint_have_the_same_bits(self):
        weights = {}
        for run in (directly, KINDS["non-reentrant"]):
            model, optimizer = adopted(run, "O1", torch.bfloat16, "cpu")
            torch.manual_seed(1)
            out = model(torch.linspace(-1, 1, 32).view(4, 8)).float()
            with amp.scale_loss(out.sum(), optimizer) as loss:
                loss.backward(retain_graph=True)
                loss.backward()
            weights[run] = [parameter.grad for parameter in model.parameters()]
            amp.deinitialize()
        assert_same_state(*weights.values())
