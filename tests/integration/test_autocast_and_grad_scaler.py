"""`torch.autocast` and `GradScaler` beside amp: each does what its documentation says, and nothing is cast twice."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from helpers import HALF_DTYPES, assert_same_bits, casts_on, dtype_name
from optimizers import backward
from small_nets import EACH_DEVICE, EACH_HALF
from torch import Tensor, nn
from torch.amp import GradScaler, custom_bwd, custom_fwd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from ampatch import amp
from ampatch.errors import UsageError

EACH_REGION = pytest.mark.parametrize("region", HALF_DTYPES, ids=lambda dtype: f"autocast-{dtype_name(dtype)}")


class Casts(TorchDispatchMode):
    """Takes note of every cast between floating types: from, to."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[torch.dtype, torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and out.dtype is not args[0].dtype:
            self.seen.append((args[0].dtype, out.dtype))
        return out


def operands(device: str) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.rand(4, 6, device=device) - 0.5, torch.rand(6, 6, device=device) - 0.5


WHITELISTED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": lambda x, w: F.linear(x, w),  # noqa: PLW0108 - looked up when it is called
    "operator": lambda x, w: x @ w,
    "conv1d": lambda x, w: F.conv1d(x[:, None], w[:1, None, :3]),
    "prelu": lambda x, w: F.prelu(x, w[0, :1]),
    "attention": lambda x, w: F.scaled_dot_product_attention(x[None], w[None], w[None]),
    "lstm-cell": lambda x, w: torch.lstm_cell(x[:, :1], (x[:, :1], x[:, :1]), w[:4, :1], w[:4, 1:2])[0],
}

BLACKLISTED: dict[str, Callable[[Tensor], Tensor]] = {
    "loss": lambda x: F.mse_loss(x, torch.zeros(4, 6, device=x.device)),
    "layer-norm": lambda x: F.layer_norm(x, (6,)),
    "fft": lambda x: torch.fft.rfft(x).real,
}


@EACH_HALF
@EACH_REGION
@EACH_DEVICE
class TestRegionUnderCasts:
    @pytest.mark.parametrize("name", WHITELISTED)
    @pytest.mark.covering(1)
    def test_whitelisted_functions_run_in_the_type_of_the_region(self, name, half, region, device):
        call, (x, w) = WHITELISTED[name], operands(device)
        with casts_on(region), Casts() as alone:
            expected = call(x, w)
        with casts_on(half):
            with torch.autocast(device, region), Casts() as casts:
                found = call(x, w)
            assert call(x, w).dtype is half  # the region has ended
        assert_same_bits(found, expected)
        assert casts.seen == alone.seen != []

    @pytest.mark.parametrize("name", BLACKLISTED)
    @pytest.mark.covering(1)
    def test_blacklisted_functions_run_in_float32_in_a_region(self, name, half, region, device):
        x = operands(device)[0].to(region)
        with casts_on(half), torch.autocast(device, region), Casts() as casts:
            found = BLACKLISTED[name](x)
        assert found.dtype is torch.float32
        assert casts.seen in ([], [(region, torch.float32)])  # of those that read half and compute in float32, none
        assert_same_bits(found, BLACKLISTED[name](x.float()))

    def test_a_weight_is_cast_once_in_a_region(self, half, region, device):
        model = amp.initialize(nn.Linear(6, 6, bias=False).to(device), half_dtype=half, verbosity=0)
        x = operands(device)[0].to(region)
        with torch.autocast(device, region):
            outs = [model(x) for _ in range(3)]
        assert amp.cast_counts() == amp.CastCounts(casts=1, cache_hits=2)
        assert model(x).dtype is half  # by a cast of its own
        sum(out.float().sum() for out in outs).backward()
        plain = nn.Linear(6, 6, bias=False).to(device)
        sum(plain(x.float()).sum() for _ in range(3)).backward()
        torch.testing.assert_close(model.weight.grad, plain.weight.grad, rtol=2e-2, atol=2e-2)

    def test_casts_turned_on_within_a_region_follow_it(self, half, region, device):
        x, w = operands(device)
        with torch.autocast(device, region):
            assert (x @ w).dtype is region
            with casts_on(half), Casts() as casts:
                assert (x @ w).dtype is region
            assert casts.seen == [(torch.float32, region)] * 2
            assert (x @ w).dtype is region

    @pytest.mark.parametrize("use_reentrant", [True, False])
    def test_a_checkpoint_recomputes_in_the_type_of_its_region(self, half, region, device, use_reentrant):
        seen = []

        def block(x: Tensor) -> Tensor:
            out = x @ x.t()
            seen.append(out.dtype)
            return out.sin()

        x = operands(device)[0].requires_grad_()
        with casts_on(half):
            with torch.autocast(device, region):
                out = checkpoint(block, x, use_reentrant=use_reentrant)
            out.float().sum().backward()
        assert seen == [region, region]

    @pytest.mark.covering(1)
    def test_compiled_code_follows_a_region(self, half, region, device):
        x, w = operands(device)
        with casts_on(half):
            fast = torch.compile(lambda x, w: x @ w, backend="aot_eager", fullgraph=True)
            for _ in range(2):
                assert fast(x, w).dtype is half
                with torch.autocast(device, region):
                    assert fast(x, w).dtype is region


@EACH_HALF
@EACH_DEVICE
class TestTurningOff:
    def test_autocast_with_enabled_false_turns_casts_off(self, half, device):
        x, w = operands(device)
        with casts_on(half):
            with torch.autocast(device, enabled=False):
                assert (x @ w).dtype is torch.float32
                assert (x.to(half) @ w.to(half)).exp().dtype is half
            assert (x @ w).dtype is half

    @pytest.mark.parametrize("region", HALF_DTYPES, ids=dtype_name)
    def test_disable_casts_turns_autocast_off(self, half, region, device):
        x, w = operands(device)
        with casts_on(half), torch.autocast(device, region):
            with amp.disable_casts(), Casts() as casts:
                assert (x @ w).dtype is torch.float32
            assert (x @ w).dtype is region
        assert casts.seen == []

    def test_disable_casts_within_disabled_autocast_computes_in_float32(self, half, device):
        x, w = operands(device)
        expected = x @ w
        region, off = torch.autocast(device, half), torch.autocast(device, enabled=False)
        with casts_on(half), region, off, amp.disable_casts():
            assert_same_bits(x @ w, expected)

    def test_a_region_for_another_type_of_device_is_ignored(self, half, device):
        x, w = operands(device)
        other = torch.bfloat16 if half is torch.float16 else torch.float16
        with casts_on(half), torch.autocast("xpu" if device == "cuda" else "mtia", other):
            assert (x @ w).dtype is half


class Product(torch.autograd.Function):
    """Written for autocast."""

    @staticmethod
    @custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.seen = (x @ w).dtype
        return x @ w

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return (grad @ w.t()).to(x.dtype), (x.t() @ grad).to(w.dtype)


@EACH_HALF
class TestFunctionsWrittenForAutocast:
    def test_functions_with_custom_fwd_compute_in_half(self, half):
        x, w = (operand.requires_grad_() for operand in operands("cpu"))
        expected = x @ w
        expected.sum().backward()
        gradients, x.grad, w.grad = (x.grad, w.grad), None, None
        with casts_on(half):
            found = Product.apply(x, w)
            found.sum().backward()
        assert found.dtype is half
        torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=2e-2)
        for gradient, other in zip((x.grad, w.grad), gradients, strict=True):
            torch.testing.assert_close(gradient, other, rtol=2e-2, atol=2e-2)

    def test_functions_with_custom_fwd_compute_in_the_type_of_the_region(self, half):
        region = torch.bfloat16 if half is torch.float16 else torch.float16
        x, w = operands("cpu")
        with casts_on(half), torch.autocast("cpu", region), Casts() as casts:
            assert Product.apply(x, w).dtype is region
        assert set(casts.seen) == {(torch.float32, region)}

    def test_functions_with_cast_inputs_get_float32_in_a_region(self, half):
        x, w = operands("cpu")
        with casts_on(half), torch.autocast("cpu", half):
            assert ByTorch.apply(x.to(half), w).dtype is torch.float32


def problem(device: str, fused: bool) -> tuple[nn.Module, torch.optim.Optimizer, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1)).to(device)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=fused), operands(device)[0]


def run(
    scaler: GradScaler, model: nn.Module, optimizer: Any, x: Tensor, clips: bool, overflows: int = 1
) -> list[Tensor]:
    """Weights after steps of the loop that torch's documentation gives."""
    for step in range(4):
        optimizer.zero_grad()
        loss = model(x).float().pow(2).mean() * (float("inf") if step == overflows else 1.0)
        scaler.scale(loss).backward()
        if clips:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
    return [parameter.detach().clone() for parameter in model.parameters()]


@EACH_HALF
@EACH_DEVICE
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
class TestGradScaler:
    def expected(self, half: torch.dtype, device: str, fused: bool, clips: bool) -> list[Tensor]:
        model, optimizer, x = problem(device, fused)
        with casts_on(half):
            return run(GradScaler(device, init_scale=64.0), model, optimizer, x, clips)

    @pytest.mark.parametrize("clips", [False, True], ids=["", "clips"])
    @pytest.mark.covering(1)
    def test_torchs_scaler_steps_and_skips_for_an_adopted_optimizer(self, half, device, fused, clips):
        expected = self.expected(half, device, fused, clips)
        model, optimizer, x = problem(device, fused)
        amp.initialize(model, optimizer, half_dtype=half, loss_scale="dynamic", verbosity=0)
        scaler = GradScaler(device, init_scale=64.0)
        for one, other in zip(run(scaler, model, optimizer, x, clips), expected, strict=True):
            assert other.isfinite().all()
            assert_same_bits(one, other)
        assert scaler.get_scale() == 32.0
        assert not hasattr(optimizer, "grad_scale")

    @pytest.mark.parametrize("level", ["O1", "O2"])
    def test_torchs_scaler_steps_beside_an_adopted_optimizer(self, level, half, device, fused):
        model, optimizer, x = problem(device, fused)
        expected = run(GradScaler(device, init_scale=64.0), model, optimizer, x, False)
        other, its_optimizer, _ = problem(device, fused)
        amp.initialize(
            other, its_optimizer, opt_level=level, half_dtype=half, loss_scale="dynamic", init_scale=64.0, verbosity=0
        )
        model, optimizer, x = problem(device, fused)
        scaler = GradScaler(device, init_scale=64.0)
        for step in range(4):
            optimizer.zero_grad()
            its_optimizer.zero_grad()
            with amp.disable_casts():
                loss = model(x).pow(2).mean() * (float("inf") if step == 1 else 1.0)
            scaler.scale(loss).backward()
            backward(other(x).float().pow(2).mean(), its_optimizer)
            scaler.step(optimizer)
            its_optimizer.step()
            scaler.update()
        assert (scaler.get_scale(), amp.get_loss_scale(), amp.skipped_steps(its_optimizer)) == (32.0, 64.0, 0)
        for one, value in zip(model.parameters(), expected, strict=True):
            assert_same_bits(one.detach(), value)

    @pytest.mark.covering(1)
    def test_torchs_scaler_raises_for_gradients_that_amp_has_scaled(self, half, device, fused):
        model, optimizer, x = problem(device, fused)
        amp.initialize(model, optimizer, half_dtype=half, loss_scale="dynamic", init_scale=8.0, verbosity=0)
        scaler = GradScaler(device, init_scale=8.0)
        backward(scaler.scale(model(x).float().sum()), optimizer)
        with pytest.raises(UsageError, match="Leave the GradScaler out"):
            scaler.step(optimizer)


@EACH_HALF
class TestSharedCaches:
    def test_a_changed_weight_is_cast_again_within_a_region(self, half):
        model = amp.initialize(nn.Linear(6, 6, bias=False), half_dtype=half, verbosity=0)
        x = operands("cpu")[0]
        with torch.autocast("cpu", half):
            first = model(x)
            with torch.no_grad():
                model.weight.mul_(2)
            assert_same_bits(model(x).detach(), (first * 2).detach())

    def test_casts_of_weights_outlive_a_region(self, half):
        model = amp.initialize(nn.Linear(6, 6, bias=False), half_dtype=half, verbosity=0)
        x = operands("cpu")[0]
        with contextlib.ExitStack() as region:
            region.enter_context(torch.autocast("cpu", half))
            first = model(x)
        second = model(x)
        assert amp.cast_counts().cache_hits == 1
        (first.float().sum() + second.float().sum()).backward()
        assert model.weight.grad.abs().sum() > 0


class ByTorch(torch.autograd.Function):
    seen: ClassVar[list[torch.dtype]] = []

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return noted(ByTorch, torch.mm(x, weight))

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return noted(ByTorch, torch.mm(grad, weight.t())), noted(ByTorch, torch.mm(x.t(), grad))


class ByAmp(torch.autograd.Function):
    """The same, as the guide has it."""

    seen: ClassVar[list[torch.dtype]] = []

    @staticmethod
    @amp.float_function
    @amp.disable_casts()
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return noted(ByAmp, torch.mm(x, weight))

    @staticmethod
    @amp.disable_casts()
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return noted(ByAmp, torch.mm(grad, weight.t())), noted(ByAmp, torch.mm(x.t(), grad))


def noted(function: Any, result: Tensor) -> Tensor:
    function.seen.append(result.dtype)
    return result


@pytest.mark.parametrize("half", HALF_DTYPES, ids=dtype_name)
def test_float_function_has_the_bits_of_custom_fwd_with_cast_inputs(half):
    torch.manual_seed(0)
    values, weights = torch.randn(3, 4), torch.randn(4, 4)
    found: list[tuple[Tensor, ...]] = []
    for function, casts in ((ByTorch, torch.autocast("cpu", half)), (ByAmp, casts_on(half))):
        function.seen.clear()
        x, weight = values.clone().requires_grad_(), weights.clone().requires_grad_()
        with casts:
            hidden = torch.mm(x, weight)
            assert hidden.dtype is half
            result = function.apply(hidden, weight)
            result.square().sum().backward()
        assert x.grad is not None
        assert weight.grad is not None
        found.append((result.detach(), x.grad, weight.grad))
    assert ByTorch.seen == ByAmp.seen == [torch.float32] * 3
    for by_torch, by_amp in zip(*found, strict=True):
        assert torch.equal(by_torch, by_amp)
