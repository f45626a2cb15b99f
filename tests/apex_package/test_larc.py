"""LARC: layer-wise adaptive rates around any optimizer, alone and with amp, against the paper in float64."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from helpers import assert_same_bits, assert_same_state
from optimizers import backward
from torch import Tensor, nn

from ampatch import amp
from ampatch.apex.parallel.LARC import LARC

SGD = {"lr": 0.5, "momentum": 0.9, "weight_decay": 0.01}


def model_of(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).to(dtype)


def inputs(count: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(6, 4, generator=generator).to(dtype) for _ in range(count)]


def adapted(w: Tensor, g: Tensor, *, trust: float, clip: bool, eps: float, lr: float, decay: float) -> Tensor:
    """The gradient by the paper, of one parameter in float64."""
    if w.norm() == 0 or g.norm() == 0:
        return g
    local = trust * w.norm() / (g.norm() + decay * w.norm() + eps)
    return (g + decay * w) * (min(local / lr, 1) if clip else local)


def by_the_paper(model: nn.Module, steps: int, *, trust: float, clip: bool, lr: float, decay: float, momentum: float):
    """SGD with momentum on adapted gradients."""
    moments = [torch.zeros_like(p) for p in model.parameters()]
    for number, x in enumerate(inputs(steps, torch.float64)):
        model.zero_grad()
        model(x).square().mean().backward()
        with torch.no_grad():
            for p, moment in zip(model.parameters(), moments, strict=True):
                g = adapted(p, p.grad, trust=trust, clip=clip, eps=1e-8, lr=lr, decay=decay)
                moment.mul_(momentum if number else 0).add_(g)
                p.sub_(moment, alpha=lr)


def run(model: nn.Module, optimizer: Any, steps: int, dtype: torch.dtype = torch.float32) -> None:
    for x in inputs(steps, dtype):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


class TestSteps:
    @pytest.mark.parametrize("clip", [True, False])
    @pytest.mark.parametrize("trust", [0.02, 0.5])
    @pytest.mark.parametrize(
        ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=["float64", "float32"]
    )
    def test_steps_are_those_of_the_paper(self, clip, trust, dtype, tolerance):
        model, reference = model_of(dtype), model_of().double()
        optimizer = LARC(torch.optim.SGD(model.parameters(), **SGD), trust_coefficient=trust, clip=clip)
        run(model, optimizer, 10, dtype)
        by_the_paper(reference, 10, trust=trust, clip=clip, lr=0.5, decay=0.01, momentum=0.9)
        found = [parameter.double() for parameter in model.parameters()]
        torch.testing.assert_close(found, list(reference.parameters()), rtol=tolerance, atol=tolerance)

    @pytest.mark.parametrize("what", ["weights", "gradients"])
    def test_what_has_no_norm_is_not_adapted(self, what):
        parameter = nn.Parameter(torch.zeros(3) if what == "weights" else torch.ones(3))
        parameter.grad = torch.zeros(3) if what == "gradients" else torch.ones(3)
        without = nn.Parameter(torch.ones(3))
        before, grad = parameter.detach().clone(), parameter.grad.clone()
        LARC(torch.optim.SGD([parameter, without], lr=0.5, weight_decay=0.1)).step()
        assert_same_bits(parameter.grad, grad)
        assert_same_bits(parameter, before - 0.5 * grad)
        assert_same_bits(without, torch.ones(3))

    def test_a_learning_rate_of_zero_divides_nothing_by_zero(self):
        parameter = nn.Parameter(torch.ones(2))
        parameter.grad = torch.ones(2)
        LARC(torch.optim.SGD([parameter], lr=0.0)).step()
        assert_same_bits(parameter, torch.ones(2))

    def test_norms_of_half_parameters_are_taken_in_float32(self):
        parameter = nn.Parameter(torch.full((4,), 300.0).half())
        parameter.grad = torch.full((4,), 40000.0).half()  # of norm 80000, which half does not hold
        LARC(torch.optim.SGD([parameter], lr=1.0), trust_coefficient=1.0, clip=False).step()
        assert_same_bits(parameter, torch.zeros(4).half())

    def test_each_group_has_its_own_rate_and_decay(self):
        parameters = [nn.Parameter(torch.ones(2) * 2) for _ in range(2)]
        for parameter in parameters:
            parameter.grad = torch.ones(2)
        groups = [{"params": parameters[:1], "lr": 0.1, "weight_decay": 0.5}, {"params": parameters[1:], "lr": 1e-3}]
        LARC(torch.optim.SGD(groups, lr=1.0)).step()
        for parameter, lr, decay in zip(parameters, (0.1, 1e-3), (0.5, 0.0), strict=True):
            was, grad = torch.ones(2).double() * 2, torch.ones(2).double()
            expected = adapted(was, grad, trust=0.02, clip=True, eps=1e-8, lr=lr, decay=decay)
            torch.testing.assert_close(parameter.double(), was - lr * expected)

    def test_a_closure_is_called(self):
        model, expected = model_of(), model_of()
        optimizer = LARC(torch.optim.SGD(model.parameters(), **SGD))

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = model(inputs(1)[0]).square().mean()
            loss.backward()
            return loss

        assert optimizer.step(closure).item() > 0
        run(expected, LARC(torch.optim.SGD(expected.parameters(), **SGD)), 1)
        assert_same_state(model.state_dict(), expected.state_dict())

    def test_a_step_that_raises_leaves_the_weight_decay(self):
        class Failing(torch.optim.SGD):
            def step(self, closure: Any = None) -> None:
                assert [group["weight_decay"] for group in self.param_groups] == [0.0]
                raise KeyError

        parameter = nn.Parameter(torch.ones(2))
        optimizer = LARC(Failing([parameter], lr=0.1, weight_decay=0.25))
        with pytest.raises(KeyError):
            optimizer.step()
        assert optimizer.param_groups[0]["weight_decay"] == 0.25


class TestWrapper:
    def test_attributes_are_those_of_the_inner_optimizer(self):
        model = model_of()
        inner = torch.optim.SGD(list(model.parameters())[:2], **SGD)
        optimizer = LARC(inner)
        assert not isinstance(optimizer, torch.optim.Optimizer)
        assert optimizer.optim is inner
        assert optimizer.param_groups is inner.param_groups
        assert repr(optimizer) == repr(inner)
        optimizer.add_param_group({"params": list(model.parameters())[2:]})
        assert len(inner.param_groups) == 2
        run(model, optimizer, 2)
        assert optimizer.state is inner.state
        assert_same_state(optimizer.state_dict(), inner.state_dict())
        optimizer.zero_grad(set_to_none=True)
        assert [p.grad for p in model.parameters()] == [None] * 4
        optimizer.param_groups = inner.param_groups[:1]
        assert len(inner.param_groups) == 1

    @pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
    def test_larc_is_copied_with_its_optimizer(self, copied):
        model = model_of()
        optimizer = LARC(torch.optim.SGD(model.parameters(), **SGD), clip=False)
        run(model, optimizer, 1)
        another, its_optimizer = copied((model, optimizer))
        run(model, optimizer, 2)
        run(another, its_optimizer, 2)
        assert not its_optimizer.clip
        assert_same_state(another.state_dict(), model.state_dict())

    def test_a_scheduled_run_goes_on_from_a_saved_state(self):
        model = model_of()
        optimizer = LARC(torch.optim.SGD(model.parameters(), **SGD))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer.optim, step_size=1, gamma=0.5)
        run(model, optimizer, 2)
        scheduler.step()
        another = copy.deepcopy(model)
        resumed = LARC(torch.optim.SGD(another.parameters(), lr=9.0))
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert resumed.param_groups[0]["lr"] == 0.25
        run(model, optimizer, 2)
        run(another, resumed, 2)
        assert_same_state(another.state_dict(), model.state_dict())


LEVELS = pytest.mark.parametrize("level", ["O1", "O2"])


class TestWithAmp:
    def trained(self, level: str, wrapped: str, overflow_at: int = -1) -> list[Tensor]:
        model = model_of()
        optimizer: Any = torch.optim.SGD(model.parameters(), **SGD)
        if wrapped == "before":
            optimizer = LARC(optimizer=optimizer, trust_coefficient=0.5, clip=False)
        model, given = amp.initialize(model, optimizer, opt_level=level, half_dtype=torch.float16, verbosity=0)
        optimizer = given if wrapped == "before" else LARC(given, trust_coefficient=0.5, clip=False)
        for number, x in enumerate(inputs(4)):
            optimizer.zero_grad()
            backward(model(x).float().square().mean() * (float("inf") if number == overflow_at else 1), given)
            before = [p.detach().clone() for p in amp.master_params(given)]
            optimizer.step()
            assert amp.step_was_skipped(given) is (number == overflow_at)
            if number == overflow_at:
                assert_same_state(list(amp.master_params(given)), before)
            assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01]
        return [p.detach() for p in amp.master_params(given)]

    @LEVELS
    @pytest.mark.parametrize("wrapped", ["before", "after"])
    def test_larc_under_amp_makes_the_steps_of_float32(self, level, wrapped):
        expected = model_of()
        optimizer = LARC(torch.optim.SGD(expected.parameters(), **SGD), trust_coefficient=0.5, clip=False)
        run(expected, optimizer, 4)
        # Weights bear a scale of a power of two, and half arithmetic, to about this.
        found = self.trained(level, wrapped)
        torch.testing.assert_close(found, [p.detach() for p in expected.parameters()], rtol=3e-2, atol=3e-3)

    @LEVELS
    @pytest.mark.parametrize("wrapped", ["before", "after"])
    @pytest.mark.parametrize("overflow_at", [0, 2])
    @pytest.mark.covering(1)
    def test_larc_under_amp_skips_steps_that_overflow(self, level, wrapped, overflow_at):
        assert all(bool(p.isfinite().all()) for p in self.trained(level, wrapped, overflow_at))

    @pytest.mark.parametrize("wrapped", ["before", "after"])
    def test_larc_under_amp_adapts_gradients_that_came_without_a_block(self, wrapped):
        """As loops in bfloat16 leave them: the masters get them at the step."""
        found = []
        for clip in (True, False):
            model = model_of()
            optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.5)
            if wrapped == "before":
                optimizer = LARC(optimizer, trust_coefficient=1e-3, clip=clip)
            amp.initialize(model, optimizer, opt_level="O5", verbosity=0)
            masters = list(amp.master_params(optimizer))
            before = [p.detach().clone() for p in masters]
            if wrapped == "after":
                optimizer = LARC(optimizer, trust_coefficient=1e-3, clip=clip)
            model(inputs(1)[0]).square().mean().backward()
            optimizer.step()
            found.append([((p - b).norm() / b.norm()).item() for p, b in zip(masters, before, strict=True)])
            amp.deinitialize()
        clipped, multiplied = found
        # A step of lr * local / lr moves a parameter by its trust coefficient, and one of lr * local by half of that.
        assert clipped == pytest.approx([1e-3] * 4, rel=2e-2)
        assert multiplied == pytest.approx([5e-4] * 4, rel=2e-2)
