"""Of Apex's FusedAdam and FP16_Optimizer of early 2019, and of the LAMB with masters: they train as in float32."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import DEVICES
from torch import Tensor, nn

from ampatch import amp
from ampatch.apex import contrib, optimizers
from ampatch.apex.contrib.optimizers import FP16_Optimizer, FusedAdam
from ampatch.apex.optimizers import FusedLAMB, FusedMixedPrecisionLamb
from ampatch.errors import OptionError, UsageError

SHAPES = ((4, 3), (5,), (2, 3, 2))
# With so large an eps updates depend on the size of gradients, which Adam and LAMB otherwise do not.
OPTIONS: dict[str, Any] = {"lr": 0.05, "bias_correction": False, "eps": 1.0, "weight_decay": 0.1}


def drawn(seed: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in SHAPES]


def parameters(device: str = "cpu", dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(each) for each in drawn(0, device, dtype)]


def give(trained: list[nn.Parameter], grads: list[Tensor]) -> None:
    for parameter, grad in zip(trained, grads, strict=True):
        parameter.grad = grad


def norm(tensors: list[Tensor]) -> Tensor:
    return torch.stack([each.float().norm() for each in tensors]).norm()


def reference(steps: int, device: str, max_norm: float = 0.0) -> list[Tensor]:
    """Parameters after steps of the optimizer without the additions of 2019, of clipped gradients."""
    trained = parameters(device)
    optimizer = optimizers.FusedAdam(trained, **OPTIONS)
    for step in range(1, steps + 1):
        give(trained, drawn(step, device))
        if max_norm:
            nn.utils.clip_grad_norm_(trained, max_norm)
        optimizer.step()
    return [each.detach() for each in trained]


def detached(trained: list[nn.Parameter]) -> list[Tensor]:
    return [each.detach() for each in trained]


@pytest.mark.parametrize("device", DEVICES)
class TestFusedAdam:
    def test_clipping_a_norm_beyond_the_half_type_keeps_the_update_and_the_gradient(self, device: str) -> None:
        parameter = nn.Parameter(torch.zeros(2000, 2000, dtype=torch.float16, device=device))
        parameter.grad = torch.full_like(parameter, 40.0)
        optimizer = FusedAdam([parameter], max_grad_norm=1.0)
        optimizer.step()
        assert optimizer.state[parameter]["exp_avg"].norm().item() == pytest.approx(0.1, rel=0.01)
        assert parameter.grad.unique().tolist() == [40.0]

    def test_clips_each_group_by_its_own_norm(self, device: str) -> None:
        trained = parameters(device)
        alone = parameters(device)[:2]
        both = FusedAdam(
            [{"params": trained[:2], "max_grad_norm": 0.5}, {"params": trained[2:]}], max_grad_norm=0.0, **OPTIONS
        )
        one = FusedAdam(alone, max_grad_norm=0.5, **OPTIONS)
        give(trained, drawn(1, device))
        give(alone, drawn(1, device)[:2])
        both.step()
        one.step()
        torch.testing.assert_close(detached(trained[:2]), detached(alone))
        torch.testing.assert_close(trained[2].detach(), reference(1, device)[2])

    @pytest.mark.parametrize("max_norm", [0.0, 0.5])
    @pytest.mark.parametrize("form", ["flat", "generator", "groups"])
    def test_steps_by_scaled_half_gradients_and_writes_half_copies(
        self, form: str, max_norm: float, device: str
    ) -> None:
        trained, halves = parameters(device), parameters(device, torch.float16)
        optimizer = FusedAdam(trained, max_grad_norm=max_norm, **OPTIONS)
        forms: dict[str, Any] = {"flat": list, "generator": iter, "groups": lambda given: [list(given)]}
        for step in range(1, 4):
            scaled = [(128 * grad).half() for grad in drawn(step, device)]
            outputs: Any = [each.data for each in halves]
            optimizer.step(
                grads=(grad for grad in scaled) if form == "generator" else forms[form](scaled),
                output_params=forms[form](outputs),
                scale=128.0,
                grad_norms=[norm(scaled)],
            )
            assert all(each.grad is None for each in trained)
        torch.testing.assert_close(detached(trained), reference(3, device, max_norm), rtol=1e-3, atol=1e-3)
        assert all(torch.equal(half, full.half()) for half, full in zip(halves, trained, strict=True))

    def test_clips_by_the_norm_that_it_is_given(self, device: str) -> None:
        # As where ranks hold parts of the parameters: only the caller knows the norm of them all.
        trained, other = parameters(device), parameters(device)
        grads = drawn(1, device)
        FusedAdam(trained, max_grad_norm=1.0, **OPTIONS).step(grads=grads, scale=2.0, grad_norms=[16.0])
        FusedAdam(other, **OPTIONS).step(grads=[grad / 2 / 8 for grad in grads])
        torch.testing.assert_close(detached(trained), detached(other))

    def test_uses_own_gradients_where_none_are_given(self, device: str) -> None:
        trained, other = parameters(device), parameters(device)
        grads = drawn(1, device)
        give(trained, [4 * grad for grad in grads])
        kept = [parameter.grad for parameter in trained]
        FusedAdam(trained, **OPTIONS).step(grads=[4 * grads[0], None, None], scale=4.0)
        assert all(parameter.grad is grad for parameter, grad in zip(trained, kept, strict=True))
        assert all(map(torch.equal, kept, [4 * grad for grad in grads]))
        FusedAdam(other, **OPTIONS).step(grads=grads)
        torch.testing.assert_close(detached(trained), detached(other))

    def test_takes_a_closure(self, device: str) -> None:
        trained = parameters(device)

        def closure() -> Tensor:
            loss = sum((each.square().sum() for each in trained), torch.zeros((), device=device))
            loss.backward()
            return loss

        assert FusedAdam(trained, **OPTIONS).step(closure) > 0
        assert not torch.equal(trained[0], parameters(device)[0])

    def test_takes_arguments_in_the_order_of_2019(self, device: str) -> None:
        group = FusedAdam(parameters(device), 0.1, False, (0.8, 0.9), 1e-6, False, 0.2, 0.5, False, True).param_groups[
            0
        ]
        assert (group["lr"], group["bias_correction"], group["betas"], group["eps"]) == (0.1, False, (0.8, 0.9), 1e-6)
        assert (group["weight_decay"], group["max_grad_norm"]) == (0.2, 0.5)

    def test_takes_no_lists_that_do_not_fit_the_groups(self, device: str) -> None:
        optimizer = FusedAdam(parameters(device))
        with pytest.raises(OptionError, match=r"found grads with \[2\] tensors by group; expected \[3\]"):
            optimizer.step(grads=drawn(1, device)[:2])
        with pytest.raises(OptionError, match=r"found output_params with \[3, 3\] tensors by group; expected \[3\]"):
            optimizer.step(grads=drawn(1, device), output_params=[drawn(2, device), drawn(2, device)])

    @pytest.mark.parametrize("opt_level", ["O1", "O2"])
    def test_that_clips_steps_on_unscaled_gradients_under_amp(self, opt_level: str, device: str) -> None:
        assert FusedAdam(parameters(device))._step_supports_amp_scaling
        trained = []
        for max_norm in (1.0, 0.0):
            torch.manual_seed(0)
            model = nn.Linear(4, 1).to(device)
            optimizer = FusedAdam(model.parameters(), lr=0.1, eps=1.0, max_grad_norm=max_norm)
            amp.initialize(model, optimizer, opt_level=opt_level, half_dtype="float16", init_scale=2.0**16)
            for step in range(10):
                optimizer.zero_grad()
                with amp.scale_loss(model(torch.ones(3, 4, device=device)).sum() * (1 + step), optimizer) as scaled:
                    scaled.backward()
                if not max_norm:
                    amp.clip_grad_norm_(optimizer, 1.0)
                optimizer.step()
            assert 0 < amp.skipped_steps(optimizer) < 8
            trained.append([each.detach().clone() for each in amp.master_params(optimizer)])
            amp.deinitialize()
        torch.testing.assert_close(*trained)

    def test_that_clips_resumes(self, device: str) -> None:
        optimizer = FusedAdam(parameters(device), max_grad_norm=0.5)
        for made in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
            assert made.param_groups[0]["max_grad_norm"] == 0.5
        other = FusedAdam(parameters(device))
        other.load_state_dict(optimizer.state_dict())
        assert other.param_groups[0]["max_grad_norm"] == 0.5


def train(
    optimizer_of: Any, device: str, *, is_half: bool, steps: int = 20, break_at: int = -1
) -> tuple[Any, list[float]]:
    """A loop of early 2019; without half, one of plain torch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)).to(device)
    inputs, targets = torch.randn(32, 8).to(device), torch.randn(32, 1).to(device)
    if is_half:
        model.half()
        inputs = inputs.half()
    groups = [{"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.01}]
    groups.append({"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0})
    optimizer = optimizer_of(groups)
    losses = []
    for step in range(steps):
        loss = F.mse_loss(model(inputs).float(), targets)
        if step == break_at:
            loss = loss * float("inf")
        optimizer.backward(loss) if is_half else loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = 0.02
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return optimizer, losses


def adam(groups: Any) -> Any:
    return FusedAdam(groups, lr=1e-3, bias_correction=False, max_grad_norm=1.0)


SCALES = pytest.mark.parametrize(
    "scale",
    [
        {"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 1024.0}},
        {"static_loss_scale": 128.0},
    ],
    ids=["dynamic", "static"],
)


@pytest.mark.parametrize("device", DEVICES)
class TestFP16Optimizer:
    def test_has_all_names(self, device: str) -> None:
        assert optimizers.FP16_Optimizer is FP16_Optimizer is contrib.optimizers.fp16_optimizer.FP16_Optimizer

    @pytest.mark.parametrize("inner", [FusedAdam, optimizers.FusedAdam], ids=["contrib", "optimizers"])
    @SCALES
    def test_trains_as_float32_does(self, scale: dict[str, Any], inner: Any, device: str) -> None:
        def of_half(groups: Any) -> FP16_Optimizer:
            adam = inner(groups, lr=1e-3, bias_correction=False, max_grad_norm=1.0)
            return FP16_Optimizer(adam, verbose=False, **scale)

        _, halves = train(of_half, device, is_half=True)
        _, full = train(adam, device, is_half=False)
        assert full[-1] < 0.5 * full[0]
        assert halves[-1] == pytest.approx(full[-1], rel=0.05)

    @SCALES
    def test_skips_after_an_overflow(self, scale: dict[str, Any], device: str) -> None:
        optimizer, losses = train(
            lambda groups: FP16_Optimizer(adam(groups), **scale), device, is_half=True, break_at=5
        )
        _, without = train(lambda groups: FP16_Optimizer(adam(groups), **scale), device, is_half=True, steps=6)
        assert losses[6] == without[5]
        assert all(torch.isfinite(each).all() for group in optimizer.fp32_groups for each in group)
        assert optimizer.cur_scale == scale.get("static_loss_scale", 512.0)

    def test_sees_gradients_that_the_script_reduces_by_hand(self, device: str) -> None:
        half = nn.Parameter(torch.ones(2, dtype=torch.float16, device=device))
        optimizer = FP16_Optimizer(torch.optim.SGD([half], lr=1.0), static_loss_scale=64.0)
        optimizer.backward((half * 2).sum())
        assert half.grad.tolist() == [128.0, 128.0]
        half.grad /= 4
        optimizer.step()
        assert half.tolist() == [0.5, 0.5]
        assert optimizer.fp32_groups[0][0].tolist() == [0.5, 0.5]
        optimizer.zero_grad()
        assert half.grad is None

    @pytest.mark.parametrize("updates", [False, True], ids=["in step", "in backward"])
    def test_steps_on_gradients_that_are_clipped_before(self, device: str, updates: bool) -> None:
        half = nn.Parameter(torch.ones(2, dtype=torch.float16, device=device))
        optimizer = FP16_Optimizer(torch.optim.SGD([half], lr=1.0), static_loss_scale=64.0)
        for after in (-1.0, -3.0):
            optimizer.zero_grad()
            optimizer.backward((half * torch.tensor([3.0, 4.0], device=device)).sum(), update_master_grads=updates)
            assert optimizer.inspect_master_grad_data()[0][0].tolist() == [3.0, 4.0]
            assert float(optimizer.clip_master_grads(2.5)) == pytest.approx(5.0)
            optimizer.step()
            assert half[1].item() == pytest.approx(after, abs=1e-2)

    def test_takes_settings_of_the_scale(self, device: str) -> None:
        args = {"init_scale": 4.0, "scale_window": 1}
        optimizer = FP16_Optimizer(adam(parameters(device)), dynamic_loss_scale=True, dynamic_loss_args=args)
        assert optimizer.cur_scale == 4.0
        optimizer.cur_scale = 8.0
        assert optimizer.loss_scale == 8.0
        scaler = FP16_Optimizer(adam(parameters(device)), dynamic_loss_scale=True).loss_scaler
        assert (scaler.cur_scale, scaler.scale_window, scaler.min_scale) == (2.0**16, 1000, 1.0)

    def test_takes_no_closure(self, device: str) -> None:
        with pytest.raises(UsageError, match=r"takes no closure.*apex\.fp16_utils\.FP16_Optimizer\(optimizer\)"):
            FP16_Optimizer(adam(parameters(device))).step(lambda: None)


@pytest.mark.parametrize("device", DEVICES)
class TestFusedMixedPrecisionLamb:
    def test_without_a_type_is_lamb(self, device: str) -> None:
        ours, theirs = parameters(device), parameters(device)
        lamb = FusedMixedPrecisionLamb(ours, lr=0.05, betas=(0.8, 0.9), weight_decay=0.1, max_grad_norm=0.5)
        for optimizer in (lamb, FusedLAMB(theirs, lr=0.05, betas=(0.8, 0.9), weight_decay=0.1, max_grad_norm=0.5)):
            for step in range(1, 4):
                give(optimizer.param_groups[0]["params"], drawn(step, device))
                optimizer.step()
        assert all(map(torch.equal, ours, theirs))
        assert lamb.state[ours[0]].keys() == {"step", "exp_avg", "exp_avg_sq"}

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
    def test_with_one_keeps_small_updates_in_masters(self, dtype: torch.dtype, device: str) -> None:
        halves = parameters(device, dtype)
        wide = [nn.Parameter(each.detach().float()) for each in halves]
        before = [each.detach().clone() for each in wide]
        options: dict[str, Any] = {"lr": 2e-5, "weight_decay": 0.1}
        mixed = FusedMixedPrecisionLamb(halves, reduced_precision_dtype=dtype, **options)
        full = FusedLAMB(wide, **options)
        for _ in range(60):
            for half, other, grad in zip(halves, wide, drawn(1, device, dtype), strict=True):
                half.grad, other.grad = grad, grad.float()
            mixed.step()
            full.step()
        for half, other, first in zip(halves, wide, before, strict=True):
            assert torch.equal(mixed.state[half]["master"], other)
            assert torch.equal(half, other.to(dtype))
            assert not torch.equal(other, first)

    @pytest.mark.parametrize("max_norm", [0.0, 0.5, 100.0])
    @pytest.mark.parametrize("scale", [0.5, 1024.0])
    def test_is_unscaled_by_a_scaler_of_torch(self, scale: float, max_norm: float, device: str) -> None:
        halves, wide = parameters(device, torch.float16), parameters(device)
        for half, full in zip(halves, wide, strict=True):
            full.data.copy_(half)
        options: dict[str, Any] = {"lr": 0.05, "eps": 1.0, "weight_decay": 0.1, "max_grad_norm": max_norm}
        mixed = FusedMixedPrecisionLamb(halves, reduced_precision_dtype=torch.float16, **options)
        scaler = torch.amp.GradScaler(torch.device(device).type, init_scale=scale, growth_interval=100)
        full_lamb = FusedLAMB(wide, **options)
        for step, factor in enumerate((1.0, float("inf"), 1.0)):
            grads = drawn(step + 1, device, torch.float16)
            mixed.zero_grad()
            scaler.scale(sum((p * g).float().sum() for p, g in zip(halves, grads, strict=True)) * factor).backward()
            scaler.step(mixed)
            scaler.update()
            if factor == 1:
                give(wide, [grad.float() for grad in grads])
                full_lamb.step()
        for half, full in zip(halves, wide, strict=True):
            torch.testing.assert_close(mixed.state[half]["master"], full.detach(), rtol=1e-3, atol=1e-4)
            assert mixed.state[half]["step"] == 2

    def test_resumes_with_its_masters(self, device: str) -> None:
        halves, other = parameters(device, torch.float16), parameters(device, torch.float16)
        optimizers_ = [
            FusedMixedPrecisionLamb(each, lr=1e-5, reduced_precision_dtype=torch.half) for each in (halves, other)
        ]
        give(halves, drawn(1, device, torch.float16))
        optimizers_[0].step()
        optimizers_[1].load_state_dict(optimizers_[0].state_dict())
        for ours, theirs in zip(halves, other, strict=True):
            master = optimizers_[1].state[theirs]["master"]
            assert master.dtype is torch.float32
            assert torch.equal(master, optimizers_[0].state[ours]["master"])
        assert pickle.loads(pickle.dumps(optimizers_[0])).reduced_precision_dtype is torch.half

    def test_takes_no_number_of_steps(self, device: str) -> None:
        with pytest.raises(OptionError, match=r"found step=3; expected 0.*load_state_dict"):
            FusedMixedPrecisionLamb(parameters(device), step=3)
