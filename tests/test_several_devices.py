"""Tests models whose parameters are on several devices: one verdict decides on the step, all gradients are unscaled.

The far devices show on any machine which way a number goes. What a GPU computes is for the tests marked gpu to show, of
models that are partly on the CPU.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any

import optimizers
import pytest
import torch
import torch.distributed as dist
from far_devices import FarDevices
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import ampatch
from ampatch import amp
from ampatch.distributed import Group
from ampatch.scaling.scale_use import ScaleUse

SCALE = 4.0

SGD = functools.partial(torch.optim.SGD, lr=1.0)
FUSED: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": functools.partial(SGD, fused=True),
    "Adam": functools.partial(torch.optim.Adam, lr=1.0, fused=True),
    "Adagrad": functools.partial(torch.optim.Adagrad, lr=1.0, fused=True),
}
# Where the parameters are: by index of the far device, or None on the CPU.
PLACES = {"two-GPUs": (0, 1), "second-GPU": (1, 1), "GPU-and-CPU": (0, None), "CPU-and-GPU": (None, 1)}

in_every_place = pytest.mark.parametrize("places", PLACES.values(), ids=PLACES)
every_fused = pytest.mark.parametrize("make", FUSED.values(), ids=FUSED)
every_optimizer = pytest.mark.parametrize("make", [SGD, *FUSED.values()], ids=["not-fused", *FUSED])
plain_and_fused = pytest.mark.parametrize("make", [SGD, FUSED["SGD"]], ids=["SGD", "fused-SGD"])


class Parameters(nn.Module):
    """One parameter in each place."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self.all = nn.ParameterList(nn.Parameter(each) for each in tensors)


class Far:
    """A model on far devices, whose gradients a test sets itself."""

    def __init__(self, devices: FarDevices, places: tuple[int | None, ...]) -> None:
        self.devices, self.places = devices, places
        self.model = Parameters([self.tensor(1.0, place) for place in places])

    def tensor(self, value: float, place: int | None) -> Tensor:
        return torch.full((2,), value) if place is None else self.devices.of([value, value], place)

    def number(self, value: float, place: int | None) -> Tensor:
        return torch.tensor(value) if place is None else self.devices.of(value, place)

    def backward(self, gradients: tuple[float, ...]) -> None:
        for parameter, place, value in zip(self.model.parameters(), self.places, gradients, strict=True):
            new = self.tensor(value, place)
            parameter.grad = new if parameter.grad is None else parameter.grad + new

    def weights(self) -> list[float]:
        return [self.devices.values(each.detach())[0].item() for each in self.model.parameters()]

    def gradients(self) -> list[float]:
        return [self.devices.values(each.grad)[0].item() for each in self.model.parameters()]


@pytest.fixture
def far(far_devices: FarDevices, places: tuple[int | None, ...]) -> Far:
    return Far(far_devices, places)


def initialize(far: Far, optimizer: Any, **options: Any) -> None:
    optimizers.initialize(far.model, optimizer, **{"init_scale": SCALE, **options})


def scaled(overflowing: int | None, value: float = math.inf) -> tuple[float, ...]:
    """Gradients of 1 times the scale, of which one may overflow."""
    return tuple(value if index == overflowing else SCALE for index in range(2))


def block(far: Far, optimizer: Any, gradients: tuple[float, ...], loss_on: int | None = 0, **options: Any) -> None:
    with amp.scale_loss(far.number(1.0, loss_on), optimizer, **options):
        far.backward(gradients)


@in_every_place
@pytest.mark.parametrize("loss_on", [0, 1, None], ids=["loss-on-cuda:0", "loss-on-cuda:1", "loss-on-the-CPU"])
@pytest.mark.parametrize("overflowing", [None, 0, 1])
@every_optimizer
def test_step_is_skipped_if_gradients_on_any_device_overflow(far, loss_on, overflowing, make):
    optimizer = make(far.model.parameters())
    initialize(far, optimizer)
    block(far, optimizer, (SCALE, SCALE), loss_on)
    optimizer.step()
    optimizer.zero_grad()
    before = far.weights()
    assert before == pytest.approx([0, 0], abs=1e-6)
    block(far, optimizer, scaled(overflowing), loss_on)
    optimizer.step()
    if overflowing is None:
        assert all(now < earlier - 0.5 for now, earlier in zip(far.weights(), before, strict=True))
    else:
        assert far.weights() == before
    assert amp.step_was_skipped(optimizer) == (overflowing is not None)
    assert amp.get_loss_scale() == (SCALE if overflowing is None else SCALE / 2)


@every_fused
@pytest.mark.parametrize("places", [(0, 0), (0, 1)], ids=["one-GPU", "two-GPUs"])
@pytest.mark.parametrize("is_clipped", [False, True], ids=["unclipped", "clipped"])
def test_fused_step_starts_one_copy_to_the_host_and_waits_for_none(far, make, is_clipped, caplog):
    optimizer, devices = make(far.model.parameters()), far.devices
    initialize(far, optimizer, verbosity=1)
    block(far, optimizer, (SCALE, SCALE))
    optimizer.step()
    for index, overflows in enumerate((False, True, False)):
        optimizer.zero_grad()
        devices.deliver(0)  # what was copied in the last step arrives before the next one ends
        devices.waits.clear()
        before = devices.sent(0)
        block(far, optimizer, (SCALE, math.inf if overflows else SCALE), delay_unscale=is_clipped)
        if is_clipped:
            amp.clip_grad_norm_(optimizer, 1.0)
        optimizer.step()
        assert (devices.sent(0) - before, devices.waits) == (1, [])
        # The log line of a skipped step comes with the next step.
        told = [each.message for each in caplog.records if each.levelname == "WARNING"]
        assert ["skipping" in each.lower() for each in told] == [True] * (index == 2)
    assert amp.skipped_steps(optimizer) == 1
    assert devices.waits == ["event"]  # for the last step, as the number was asked for


@pytest.mark.parametrize("places", [(0, 0), (0, 1)], ids=["one-GPU", "two-GPUs"])
@pytest.mark.parametrize("name", ["Adam", "AdamW"])
@pytest.mark.parametrize("is_unpickled", [False, True], ids=["new", "unpickled"])
def test_capturable_optimizer_skips_outside_of_a_capture_too(far, name, is_unpickled):
    optimizer = getattr(torch.optim, name)(far.model.parameters(), lr=1.0, fused=True, capturable=True)
    if is_unpickled:  # pickling keeps no more; of such an optimizer torch warns, and amp leaves that to it
        del optimizer._warned_capturable_if_run_uncaptured
    initialize(far, optimizer)
    block(far, optimizer, (SCALE, SCALE))
    with pytest.warns(UserWarning, match="capturable=True") if is_unpickled else contextlib.nullcontext():
        optimizer.step()
    optimizer.zero_grad()
    before = far.weights()
    block(far, optimizer, (math.inf, SCALE))
    optimizer.step()
    assert far.weights() == before
    assert amp.skipped_steps(optimizer) == 1


@in_every_place
class TestSeveralBlocks:
    """Their losses are on different devices, so that one scale has verdicts on both."""

    @pytest.mark.parametrize("overflowing", [None, 0, 1], ids=["none-overflows", "first-overflows", "second-overflows"])
    @pytest.mark.parametrize("make", [SGD, FUSED["SGD"], FUSED["Adagrad"]], ids=["SGD", "fused-SGD", "fused-Adagrad"])
    def test_blocks_with_losses_on_different_devices_decide_together(self, far, make, overflowing):
        optimizer = make(far.model.parameters())
        initialize(far, optimizer, num_losses=2)
        for loss_id in range(2):
            value = math.inf if loss_id == overflowing else SCALE
            if loss_id and overflowing == 0:
                far.model.zero_grad()  # otherwise inf is left in the sum
            block(far, optimizer, (value, SCALE), loss_on=loss_id, loss_id=loss_id)
        if overflowing == 0:
            assert far.gradients() == [1, 1]
        optimizer.step()
        skips = overflowing == 1
        assert (far.weights() == [1, 1]) == skips
        assert amp.skipped_steps(optimizer) == skips
        assert [amp.get_loss_scale(index) for index in range(2)] == [
            SCALE / 2 if index == overflowing else SCALE for index in range(2)
        ]

    @plain_and_fused
    def test_blocks_may_move_their_scale_between_devices(self, far, make):
        optimizer = make(far.model.parameters())
        initialize(far, optimizer)
        block(far, optimizer, (SCALE, SCALE), loss_on=0)
        block(far, optimizer, (SCALE, math.inf), loss_on=1)
        optimizer.step()
        assert far.weights() == [1, 1]
        assert amp.get_loss_scale() == SCALE / 2
        optimizer.zero_grad()
        block(far, optimizer, (SCALE / 2, SCALE / 2), loss_on=1)
        block(far, optimizer, (SCALE / 2, SCALE / 2), loss_on=0)
        optimizer.step()
        assert far.weights() == [-1, -1]
        assert amp.skipped_steps(optimizer) == 1

    @plain_and_fused
    def test_gradients_may_be_written_between_blocks_of_several_devices(self, far, make):
        optimizer = make(far.model.parameters())
        initialize(far, optimizer)
        for loss_on in (0, 1, 0):
            block(far, optimizer, (SCALE, SCALE), loss_on)
            far.backward((1.0, 1.0))
        optimizer.step()
        assert far.weights() == [-5, -5]

    def test_unscaling_and_overflow_check_may_be_delayed(self, far):
        optimizer = SGD(far.model.parameters())
        initialize(far, optimizer)
        block(far, optimizer, (SCALE, SCALE), loss_on=0, delay_unscale=True)
        block(far, optimizer, (SCALE, SCALE), loss_on=1, delay_overflow_check=True)
        optimizer.step()
        assert far.weights() == [-1, -1]

    def test_block_of_another_optimizer_leaves_delayed_gradients_to_be_clipped(self, far):
        first, second = (SGD([parameter]) for parameter in far.model.parameters())
        initialize(far, [first, second])
        with amp.scale_loss(far.number(1.0, 0), first, delay_unscale=True):
            far.model.all[0].grad = far.tensor(3 * SCALE, far.places[0])
        with amp.scale_loss(far.number(1.0, 1), second):
            far.model.all[1].grad = far.tensor(SCALE, far.places[1])
        norm = amp.clip_grad_norm_(first, 1.0)
        assert far.devices.values(norm).item() == pytest.approx(3 * 2**0.5)
        first.step()
        second.step()
        assert far.weights() == pytest.approx([1 - 0.5**0.5, 0])


def test_scale_that_moved_takes_an_overflow_from_its_old_device(far_devices):
    scaler = amp.LossScaler(init_scale=SCALE)
    scaler.to(torch.device("cuda", 1))
    scaler.note(far_devices.of(1.0, 0))
    scaler.update()
    assert scaler.state.loss_scale == SCALE / 2


def test_scale_that_moved_is_the_same_until_it_changes(far_devices):
    scaler = amp.LossScaler(init_scale=SCALE)
    scaler.to(torch.device("cuda", 0))
    before = ScaleUse(scaler, 0)
    scaler.to(torch.device("cuda", 1))
    scaler.update()
    assert ScaleUse(scaler, 0).is_same_scale(before)
    scaler.note(far_devices.of(1.0, 1))
    scaler.update()
    assert not ScaleUse(scaler, 0).is_same_scale(before)


@in_every_place
class TestClipping:
    @pytest.mark.parametrize("delay_unscale", [False, True])
    @plain_and_fused
    def test_norm_is_that_of_gradients_on_all_devices(self, far, make, delay_unscale):
        optimizer = make(far.model.parameters())
        initialize(far, optimizer)
        block(far, optimizer, (3 * SCALE, 4 * SCALE), delay_unscale=delay_unscale)
        norm = amp.clip_grad_norm_(optimizer, 1.0)
        optimizer.step()
        assert far.devices.values(norm).item() == pytest.approx(5 * 2**0.5)
        assert far.weights() == pytest.approx([1 - 3 / 50**0.5, 1 - 4 / 50**0.5])

    @pytest.mark.parametrize("overflowing", [0, 1])
    def test_overflow_on_any_device_skips_a_clipped_step(self, far, overflowing):
        optimizer = SGD(far.model.parameters())
        initialize(far, optimizer)
        block(far, optimizer, scaled(overflowing), delay_unscale=True)
        amp.clip_grad_norm_(optimizer, 1.0)
        optimizer.step()
        assert far.weights() == [1, 1]


@in_every_place
@pytest.mark.parametrize("overflowing", [None, 0, 1])
class TestOtherInterfaces:
    def test_check_finite_skips_the_step_if_any_device_overflows(self, far, overflowing):
        optimizer = SGD(far.model.parameters())
        initialize(far, optimizer, loss_scale=SCALE, check_finite=True)
        block(far, optimizer, scaled(overflowing, math.nan))
        optimizer.step()
        assert far.weights() == ([0, 0] if overflowing is None else [1, 1])
        assert amp.stats()["skipped_steps"] == (overflowing is not None)

    def test_loss_scaler_by_hand_unscales_and_notes_every_device(self, far, overflowing):
        scaler = amp.LossScaler(init_scale=SCALE)
        for loss_on in (0, 1, None):
            far.model.zero_grad()
            scaled_loss = scaler.scale(far.number(1.0, loss_on))
            assert far.devices.values(scaled_loss).item() == SCALE
            far.backward(scaled(overflowing))
            overflow = scaler.unscale_(parameter.grad for parameter in far.model.parameters())
            assert bool(overflow) == (overflowing is not None)
            if overflowing is None:
                assert far.gradients() == [1, 1]
        scaler.update()
        assert scaler.state.loss_scale == (SCALE if overflowing is None else SCALE / 2)

    @every_optimizer
    @pytest.mark.parametrize("clips", [False, True], ids=["", "unscaled-before"])
    @pytest.mark.covering(1)
    def test_grad_scaler_skips_the_step_if_any_device_overflows(self, far, overflowing, make, clips):
        scaler = ampatch.GradScaler("cpu", init_scale=SCALE)
        optimizer = make(far.model.parameters())
        for value in (SCALE, math.inf):
            before = far.weights()
            optimizer.zero_grad()
            scaler.scale(far.number(1.0, 0))
            assert scaler._scale.device.type == "cuda"
            far.backward(scaled(overflowing, value))
            if clips:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            skips = value == math.inf and overflowing is not None
            assert (far.weights() == before) == skips
        assert scaler.get_scale() == (SCALE if overflowing is None else SCALE / 2)


class Split(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3).cuda()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).cuda())


def test_a_tensor_is_reduced_on_the_device_of_the_process_group(far_devices: FarDevices) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        for device_type, waits in ("cuda", []), ("cpu", ["aten._to_copy"]):
            Group(dist.group.WORLD, device_type).reduce_(far_devices.of(3.0), dist.ReduceOp.SUM)
            assert far_devices.waits == waits
    finally:
        dist.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.parametrize("level", ["O1", "O2"])
class TestOnARealGpu:
    """A model whose first layer is on the CPU, and whose last one is on a GPU."""

    def trained(self, make: Callable[..., Any], *overflows: bool, loss_on: str = "cuda", **options: Any) -> Any:
        model = Split()
        optimizer = make(model.parameters())
        amp.initialize(model, optimizer, loss_scale="dynamic", init_scale=2.0**8, verbosity=0, **options)
        weights = []
        for overflow in overflows:
            optimizer.zero_grad()
            loss = model(torch.ones(2, 4)).float().square().mean().to(loss_on)
            with amp.scale_loss(loss * (math.inf if overflow else 1), optimizer) as scaled_loss:
                scaled_loss.backward()
            torch.cuda._sleep(20_000_000)  # so that whoever does not wait reads too early
            optimizer.step()
            # Clones: float() and cpu() return a float32 tensor on the CPU itself, which the next step changes.
            weights.append([parameter.detach().float().cpu().clone() for parameter in amp.master_params(optimizer)])
        return weights, amp.skipped_steps(optimizer)

    @pytest.mark.parametrize("loss_on", ["cuda", "cpu"])
    @pytest.mark.parametrize(
        "make",
        [torch.optim.Adam, functools.partial(torch.optim.Adam, fused=True), FUSED["SGD"]],
        ids=["", "fused", "SGD"],
    )
    def test_step_on_gpu_and_cpu_is_skipped_only_after_an_overflow(self, make, loss_on, level):
        weights, skipped = self.trained(make, False, True, False, True, loss_on=loss_on, opt_level=level)
        assert skipped == 2
        for before, after, is_same in zip(weights, weights[1:], (True, False, True), strict=False):
            for one, other in zip(before, after, strict=True):
                assert torch.equal(one, other) == is_same
                assert other.isfinite().all()

    def test_norm_is_that_of_gradients_on_gpu_and_cpu(self, level):
        model = Split()
        optimizer = SGD(model.parameters())
        # The default scale overflows float16 in the gradient of this loss.
        amp.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", init_scale=2.0**8, verbosity=0)
        with amp.scale_loss(
            model(torch.ones(2, 4)).float().square().sum(), optimizer, delay_unscale=True
        ) as scaled_loss:
            scaled_loss.backward()
        norm = amp.clip_grad_norm_(optimizer, 0.1)
        clipped = [parameter.grad.float().cpu().norm() for parameter in amp.master_params(optimizer)]
        assert norm > 0.1
        assert torch.stack(clipped).norm().item() == pytest.approx(0.1, rel=1e-2)
