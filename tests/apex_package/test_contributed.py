"""Of the loss and the clipping in apex.contrib: they compute what torch's functions do."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers import DEVICES
from torch import nn

from ampatch import amp
from ampatch.apex.contrib.clip_grad import clip_grad_norm_
from ampatch.apex.contrib.xentropy import SoftmaxCrossEntropyLoss


@pytest.mark.parametrize("device", DEVICES)
class TestSoftmaxCrossEntropyLoss:
    @pytest.mark.parametrize("smoothing", [0.0, 0.1])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
    def test_gives_the_loss_of_each_row(self, dtype: torch.dtype, smoothing: float, device: str) -> None:
        generator = torch.Generator().manual_seed(0)
        logits = (3 * torch.randn(6, 5, generator=generator)).to(device, dtype).requires_grad_()
        labels = torch.tensor([0, 1, 2, 3, 4, 1], device=device)
        losses = SoftmaxCrossEntropyLoss.apply(logits, labels, smoothing, 3, dtype is torch.float16)
        log_p = logits.detach().double().log_softmax(1)
        expected = (1 - smoothing) * F.nll_loss(log_p, labels, reduction="none") - smoothing * log_p.mean(1)
        expected[3] = 0
        assert (losses.dtype, losses.shape) == (torch.float32, (6,))
        torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=1e-5)
        (grad,) = torch.autograd.grad(losses.sum(), logits)
        target = torch.full_like(log_p, smoothing / 5).scatter_add(
            1, labels[:, None], torch.full((6, 1), 1 - smoothing, device=device, dtype=torch.double)
        )
        wanted = log_p.exp() - target
        wanted[3] = 0
        assert grad.dtype is dtype
        torch.testing.assert_close(grad.double(), wanted, rtol=1e-3, atol=1e-3)

    def test_leaves_out_class_0_by_default(self, device: str) -> None:
        losses = SoftmaxCrossEntropyLoss.apply(torch.zeros(3, 4, device=device), torch.tensor([0, 1, 0], device=device))
        assert losses.tolist() == [0, pytest.approx(1.3863, rel=1e-4), 0]

    def test_takes_a_label_out_of_range_as_padding(self, device: str) -> None:
        labels = torch.tensor([-100, 1], device=device)
        assert SoftmaxCrossEntropyLoss.apply(torch.zeros(2, 4, device=device), labels, 0.0, -100)[0] == 0

    def test_is_float32_at_o1(self, device: str) -> None:
        model = nn.Linear(4, 3).to(device)
        amp.initialize(model, opt_level="O1", half_dtype="float16")
        logits = model(torch.ones(2, 4, device=device))
        assert logits.dtype is torch.float16
        losses = SoftmaxCrossEntropyLoss.apply(logits, torch.tensor([1, 2], device=device), 0.1)
        assert losses.dtype is torch.float32
        losses.mean().backward()
        assert model.weight.grad is not None


@pytest.mark.parametrize("device", DEVICES)
class TestClipGradNorm:
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_a_norm_beyond_the_half_type_clips_to_the_limit(self, dtype, device):
        parameter = nn.Parameter(torch.zeros(2000, 2000, dtype=dtype, device=device))
        parameter.grad = torch.full_like(parameter, 40.0)
        assert clip_grad_norm_(parameter, 1.0).item() == pytest.approx(80000.0)
        torch.testing.assert_close(parameter.grad.float().norm().item(), 1.0, rtol=0.01, atol=0.0)

    @pytest.mark.parametrize(("dtype", "value"), [(torch.float64, 1e100), (torch.complex64, 3 + 4j)])
    def test_clips_by_all_of_a_wide_or_complex_gradient(self, dtype, value, device):
        wide = nn.Parameter(torch.zeros(4, dtype=dtype, device=device))
        half = nn.Parameter(torch.zeros(2, dtype=torch.float16, device=device))
        wide.grad, half.grad = torch.full_like(wide, value), torch.ones_like(half)
        assert clip_grad_norm_([half, wide], 1.0).item() == pytest.approx((4 * abs(value) ** 2 + 2) ** 0.5)
        assert wide.grad.norm().item() == pytest.approx(1.0, rel=0.02)

    def test_clips_what_a_script_hands_in(self, device: str) -> None:
        parameters = [nn.Parameter(torch.ones(3, device=device)) for _ in range(2)]
        for parameter in parameters:
            parameter.grad = torch.full((3,), 2.0, device=device)
        norm = clip_grad_norm_(iter(parameters), 1.0)
        assert norm.item() == pytest.approx(24**0.5)
        assert torch.cat([each.grad for each in parameters]).norm().item() == pytest.approx(1.0, abs=1e-5)
        assert clip_grad_norm_(parameters[0], max_norm=100.0, norm_type=float("inf"), error_if_nonfinite=True) < 1
