"""Of multi_tensor_adam of amp_C, which steps of projects call: it does what torch's Adam does, also for half lists."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from helpers import DEVICES
from torch import Tensor, nn

import ampatch
from ampatch.apex import amp_C
from ampatch.apex.multi_tensor_apply import multi_tensor_applier
from ampatch.apex.optimizers import FusedAdam
from ampatch.errors import OptionError

SHAPES = ((4, 3), (5,), (), (2, 3, 2))
LR, BETA1, BETA2, EPS, DECAY = 0.05, 0.9, 0.98, 1e-8, 0.1


def drawn(seed: int, device: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in SHAPES]


def flag(device: str) -> Tensor:
    return torch.zeros(1, dtype=torch.int32, device=device)


def by_kernel(lists: list[list[Tensor]], step: int, mode: int, noop: Tensor, bias_correction: int = 1) -> None:
    multi_tensor_applier(
        amp_C.multi_tensor_adam, noop, lists, LR, BETA1, BETA2, EPS, step, mode, bias_correction, DECAY
    )


@pytest.mark.parametrize("device", DEVICES)
class TestTheKernel:
    @pytest.mark.parametrize(("mode", "torchs"), [(0, torch.optim.Adam), (1, torch.optim.AdamW)])
    def test_does_what_torch_does(self, mode: int, torchs: Any, device: str) -> None:
        params, (m, v) = drawn(0, device), ([torch.zeros_like(p) for p in drawn(0, device)] for _ in range(2))
        reference = [nn.Parameter(p.clone()) for p in params]
        optimizer = torchs(reference, lr=LR, betas=(BETA1, BETA2), eps=EPS, weight_decay=DECAY)
        for step in range(1, 6):
            grads = drawn(step, device)
            before = [grad.clone() for grad in grads]
            by_kernel([grads, params, m, v], step, mode, flag(device))
            assert all(map(torch.equal, grads, before))
            for p, grad in zip(reference, grads, strict=True):
                p.grad = grad.clone()
            optimizer.step()
        for ours, theirs in zip(params, reference, strict=True):
            torch.testing.assert_close(ours, theirs.detach())
        torch.testing.assert_close(v, [optimizer.state[p]["exp_avg_sq"] for p in reference])

    def test_without_bias_correction_leaves_the_moments(self, device: str) -> None:
        params, grads = drawn(0, device), drawn(1, device)
        expected = [
            p - LR * (0.1 * g / ((0.02 * g * g).sqrt() + EPS) + DECAY * p) for p, g in zip(params, grads, strict=True)
        ]
        by_kernel([grads, params, *([torch.zeros_like(p) for p in params] for _ in range(2))], 7, 1, flag(device), 0)
        torch.testing.assert_close(params, expected)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
    def test_computes_in_float32_and_rounds_once(self, dtype: torch.dtype, device: str) -> None:
        lists = [drawn(seed, device, dtype) for seed in (1, 2)] + [
            [p.abs() for p in drawn(3, device, dtype)] for _ in range(2)
        ]
        wide = [[each.float() for each in some] for some in lists]
        lists[1][0] = lists[1][0].t().contiguous().t()  # strides of another order
        by_kernel(lists, 3, 1, flag(device))
        by_kernel(wide, 3, 1, flag(device))
        for ours, theirs in zip(lists[1:], wide[1:], strict=True):
            assert all(torch.equal(one, other.to(dtype)) for one, other in zip(ours, theirs, strict=True))

    def test_updates_whatever_the_flag_says_as_in_apex(self, device: str) -> None:
        params = drawn(0, device)
        before = [p.clone() for p in params]
        raised = flag(device).fill_(1)
        by_kernel([drawn(1, device), params, *([torch.zeros_like(p) for p in params] for _ in range(2))], 1, 1, raised)
        assert not any(map(torch.equal, params, before))
        assert raised.item() == 1

    def test_takes_no_list_that_does_not_fit(self, device: str) -> None:
        with pytest.raises(OptionError, match=r"expected \[grads, params, exp_avgs, exp_avg_sqs\]"):
            by_kernel([drawn(0, device)] * 3, 1, 1, flag(device))
        by_kernel([[], [], [], []], 1, 1, flag(device))


class OfAProject(FusedAdam):
    """Steps by the kernel, and counts steps in the group, as in fairseq and in Apex."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            lists: list[list[Tensor]] = [[], [], [], []]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state |= {name: torch.zeros_like(p.data) for name in ("exp_avg", "exp_avg_sq")}
                for some, each in zip(lists, (p.grad, p.data, state["exp_avg"], state["exp_avg_sq"]), strict=True):
                    some.append(each)
            flag = self._dummy_overflow_buf
            multi_tensor_applier(self.multi_tensor_adam, flag, lists, LR, BETA1, BETA2, EPS, group["step"], 1, 1, DECAY)


def train(parameters: list[nn.Parameter], optimizer: Any, factors: Iterable[float], scaler: Any = None) -> None:
    for factor in factors:
        optimizer.zero_grad()
        loss = factor * sum((p.square().sum() for p in parameters), torch.zeros(()))
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()


class TestAProjectsStep:
    def test_goes_on_counting_in_a_resumed_run(self) -> None:
        parameters = [nn.Parameter(each) for each in drawn(0, "cpu")]
        optimizer = OfAProject(parameters)
        train(parameters, optimizer, [1.0, 2.0, 3.0])
        again = copy.deepcopy(parameters)
        resumed = OfAProject(again)
        resumed.load_state_dict(optimizer.state_dict())
        train(parameters, optimizer, [4.0, 5.0])
        train(again, resumed, [4.0, 5.0])
        assert resumed.param_groups[0]["step"] == 5
        assert all(map(torch.equal, parameters, again))

    @pytest.mark.parametrize("scaler_class", [torch.amp.GradScaler, ampatch.GradScaler])
    def test_gets_unscaled_gradients_from_a_scaler_and_is_left_out_after_an_overflow(self, scaler_class: Any) -> None:
        parameters, others = ([nn.Parameter(each) for each in drawn(0, "cpu")] for _ in range(2))
        scaler = scaler_class("cpu", init_scale=1024.0)
        train(parameters, OfAProject(parameters), [1.0, math.inf, 2.0], scaler)
        train(others, OfAProject(others), [1.0, 2.0])
        assert scaler.get_scale() == 512.0
        torch.testing.assert_close(parameters, others)


@pytest.mark.parametrize("device", DEVICES)
class TestWhatAProjectsStepReads:
    def test_has_a_flag_that_keeps_what_is_written(self, device: str) -> None:
        optimizer = FusedAdam([nn.Parameter(torch.ones(2, device=device))])
        assert (optimizer._dummy_overflow_buf.dtype, optimizer._dummy_overflow_buf.device.type) == (
            torch.int32,
            device[:4].rstrip(":"),
        )
        optimizer._dummy_overflow_buf.fill_(1)
        assert optimizer._dummy_overflow_buf.item() == 1
        for made in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
            assert made._dummy_overflow_buf.item() == 0
            assert made.multi_tensor_adam is amp_C.multi_tensor_adam
