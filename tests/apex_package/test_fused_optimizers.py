"""Of Apex's optimizers: they do what the papers say, in float32 whatever the parameters are, and resume exactly."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import DEVICES, HALF_DTYPES, assert_same_bits, assert_same_state, dtype_name
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from ampatch import amp
from ampatch.apex.optimizers import FusedAdagrad, FusedAdam, FusedLAMB, FusedNovoGrad, FusedSGD
from ampatch.errors import OptionError, UsageError

SHAPES = ((4, 3), (5,), (), (2, 3, 2))
STEPS = 12

# What a test of each optimizer makes it with: options under which all of its state matters.
USUAL: dict[type[torch.optim.Optimizer], dict[str, Any]] = {
    FusedAdam: {"lr": 0.05, "weight_decay": 0.1},
    FusedSGD: {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1},
    FusedAdagrad: {"lr": 0.05, "weight_decay": 0.1},
    FusedLAMB: {"lr": 0.05, "weight_decay": 0.1},
    FusedNovoGrad: {"lr": 0.05, "weight_decay": 0.1},
}
EACH = pytest.mark.parametrize("optimizer_class", USUAL, ids=lambda each: each.__name__)


def values(seed: int, dtype: torch.dtype = torch.float64, shapes: tuple[tuple[int, ...], ...] = SHAPES) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def parameters_of(tensors: list[Tensor]) -> list[nn.Parameter]:
    return [nn.Parameter(tensor.clone()) for tensor in tensors]


def gradients(step: int, like: list[Any]) -> list[Tensor]:
    """The gradients of a step, the same ones for whatever dtype."""
    drawn = values(1000 + step, shapes=tuple(tuple(parameter.shape) for parameter in like))
    return [grad.to(parameter.device, parameter.dtype) for grad, parameter in zip(drawn, like, strict=True)]


def run(optimizer: torch.optim.Optimizer, parameters: list[Any], steps: range = range(STEPS)) -> None:
    for step in steps:
        for parameter, grad in zip(parameters, gradients(step, parameters), strict=True):
            parameter.grad = grad
        optimizer.step()


def snapshot(optimizer: torch.optim.Optimizer) -> tuple[list[Tensor], dict[str, Any]]:
    parameters = [each.detach().clone() for group in optimizer.param_groups for each in group["params"]]
    return parameters, copy.deepcopy(optimizer.state_dict())


# What the papers say, one tensor after the other in float64.


def adam(params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8, adam_w_mode=True, weight_decay=0.0):
    beta1, beta2 = betas
    theta, m, v = [p.double() for p in params], [0.0] * len(params), [0.0] * len(params)
    for t in range(1, STEPS + 1):
        for i, grad in enumerate(gradients(t - 1, params)):
            g = grad.double() + (0 if adam_w_mode else weight_decay) * theta[i]
            m[i] = beta1 * m[i] + (1 - beta1) * g
            v[i] = beta2 * v[i] + (1 - beta2) * g**2
            m_hat = m[i] / (1 - beta1**t) if bias_correction else m[i]
            v_hat = v[i] / (1 - beta2**t) if bias_correction else v[i]
            decay = weight_decay * theta[i] if adam_w_mode else 0
            theta[i] = theta[i] - lr * (m_hat / (v_hat**0.5 + eps) + decay)
    return theta


def sgd(params, lr, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False, wd_after_momentum=False):
    theta, buffers = [p.double() for p in params], [None] * len(params)
    for t in range(STEPS):
        for i, grad in enumerate(gradients(t, params)):
            g = grad.double() + (0 if wd_after_momentum else weight_decay * theta[i])
            if momentum:
                buffers[i] = g if buffers[i] is None else momentum * buffers[i] + (1 - dampening) * g
                g = g + momentum * buffers[i] if nesterov else buffers[i]
            theta[i] = theta[i] - lr * (g + (weight_decay * theta[i] if wd_after_momentum else 0))
    return theta


def adagrad(params, lr=1e-2, eps=1e-10, weight_decay=0.0, adagrad_w_mode=False):
    theta, sums = [p.double() for p in params], [0.0] * len(params)
    for t in range(STEPS):
        for i, grad in enumerate(gradients(t, params)):
            g = grad.double() + (0 if adagrad_w_mode else weight_decay * theta[i])
            sums[i] = sums[i] + g**2
            decay = weight_decay * theta[i] if adagrad_w_mode else 0
            theta[i] = theta[i] - lr * (g / (sums[i] ** 0.5 + eps) + decay)
    return theta


def lamb(
    params,
    lr=1e-3,
    bias_correction=True,
    betas=(0.9, 0.999),
    eps=1e-6,
    weight_decay=0.01,
    adam_w_mode=True,
    grad_averaging=True,
    max_grad_norm=1.0,
    use_nvlamb=False,
):
    beta1, beta2 = betas
    theta, m, v = [p.double() for p in params], [0.0] * len(params), [0.0] * len(params)
    for t in range(1, STEPS + 1):
        grads = [g.double() for g in gradients(t - 1, params)]
        global_norm = math.sqrt(sum(float((g**2).sum()) for g in grads))
        clip = max(1.0, global_norm / max_grad_norm) if max_grad_norm else 1.0
        for i, grad in enumerate(grads):
            g = grad / clip + (0 if adam_w_mode else weight_decay * theta[i])
            m[i] = beta1 * m[i] + ((1 - beta1) if grad_averaging else 1) * g
            v[i] = beta2 * v[i] + (1 - beta2) * g**2
            m_hat = m[i] / (1 - beta1**t) if bias_correction else m[i]
            v_hat = v[i] / (1 - beta2**t) if bias_correction else v[i]
            update = m_hat / (v_hat**0.5 + eps) + (weight_decay * theta[i] if adam_w_mode else 0)
            norm, norm_of_update = float((theta[i] ** 2).sum() ** 0.5), float((update**2).sum() ** 0.5)
            has_ratio = (weight_decay or use_nvlamb) and norm and norm_of_update
            theta[i] = theta[i] - lr * (norm / norm_of_update if has_ratio else 1) * update
    return theta


def novograd(
    params,
    lr=1e-3,
    bias_correction=True,
    betas=(0.9, 0.999),
    eps=1e-8,
    weight_decay=0.0,
    reg_inside_moment=False,
    grad_averaging=True,
    norm_type=2,
    init_zero=False,
):
    beta1, beta2 = betas
    theta, m, v = [p.double() for p in params], [0.0] * len(params), [None] * len(params)
    for t in range(1, STEPS + 1):
        for i, grad in enumerate(gradients(t - 1, params)):
            g = grad.double()
            second = float((g**2).sum()) if norm_type == 2 else float(g.abs().max())
            if v[i] is None:
                v[i] = (1 - beta2) * second if init_zero else second
            else:
                v[i] = beta2 * v[i] + (1 - beta2) * second
            norm = math.sqrt(v[i]) if norm_type == 2 else v[i]
            divisor = norm / (math.sqrt(1 - beta2**t) if bias_correction else 1) + eps
            if reg_inside_moment:
                g = g / divisor + weight_decay * theta[i]
            m[i] = beta1 * m[i] + ((1 - beta1) if grad_averaging else 1) * g
            update = m[i] / (1 - beta1**t) if bias_correction else m[i]
            if not reg_inside_moment:
                update = update / divisor + weight_decay * theta[i]
            theta[i] = theta[i] - lr * update
    return theta


PAPERS: dict[type[torch.optim.Optimizer], Callable[..., list[Tensor]]] = {
    FusedAdam: adam,
    FusedSGD: sgd,
    FusedAdagrad: adagrad,
    FusedLAMB: lamb,
    FusedNovoGrad: novograd,
}

RATES = st.floats(1e-4, 0.1)
BETAS = st.tuples(st.floats(0.0, 0.99), st.floats(0.5, 0.999))
DECAYS = st.sampled_from([0.0, 0.3])
EPSILONS = st.sampled_from([1e-8, 1e-3])


def some_sgd() -> st.SearchStrategy[dict[str, Any]]:
    common = {"lr": RATES, "weight_decay": DECAYS, "wd_after_momentum": st.booleans()}
    damped = st.fixed_dictionaries(
        {"momentum": st.sampled_from([0.0, 0.9]), "dampening": st.sampled_from([0.0, 0.3]), **common}
    )
    return damped | st.fixed_dictionaries({"momentum": st.just(0.8), "nesterov": st.just(True), **common})


OPTIONS: dict[type[torch.optim.Optimizer], st.SearchStrategy[dict[str, Any]]] = {
    FusedAdam: st.fixed_dictionaries(
        {
            "lr": RATES,
            "bias_correction": st.booleans(),
            "betas": BETAS,
            "eps": EPSILONS,
            "adam_w_mode": st.booleans(),
            "weight_decay": DECAYS,
        }
    ),
    FusedSGD: some_sgd(),
    FusedAdagrad: st.fixed_dictionaries(
        {"lr": RATES, "eps": EPSILONS, "weight_decay": DECAYS, "adagrad_w_mode": st.booleans()}
    ),
    FusedLAMB: st.fixed_dictionaries(
        {
            "lr": RATES,
            "bias_correction": st.booleans(),
            "betas": BETAS,
            "eps": EPSILONS,
            "weight_decay": DECAYS,
            "adam_w_mode": st.booleans(),
            "grad_averaging": st.booleans(),
            "max_grad_norm": st.sampled_from([0.1, 1.0, 100.0, 0.0]),
            "use_nvlamb": st.booleans(),
        }
    ),
    FusedNovoGrad: st.fixed_dictionaries(
        {
            "lr": RATES,
            "bias_correction": st.booleans(),
            "betas": BETAS,
            "eps": EPSILONS,
            "weight_decay": DECAYS,
            "reg_inside_moment": st.booleans(),
            "grad_averaging": st.booleans(),
            "norm_type": st.sampled_from([0, 2]),
            "init_zero": st.booleans(),
        }
    ),
}


@EACH
class TestTheAlgorithm:
    def test_is_the_published_one_over_all_options(self, optimizer_class):
        @given(OPTIONS[optimizer_class])
        def is_the_published_one(options: dict[str, Any]) -> None:
            start = values(0)
            parameters = parameters_of(start)
            run(optimizer_class(parameters, **options), parameters)
            for parameter, expected in zip(parameters, PAPERS[optimizer_class](start, **options), strict=True):
                torch.testing.assert_close(parameter.detach(), expected, rtol=1e-10, atol=1e-11)

        is_the_published_one()

    def test_is_the_published_one_with_its_defaults(self, optimizer_class):
        options = {"lr": 0.1} if optimizer_class is FusedSGD else {}
        start = values(0)
        parameters = parameters_of(start)
        run(optimizer_class(parameters, **options), parameters)
        for parameter, before, expected in zip(
            parameters, start, PAPERS[optimizer_class](start, **options), strict=True
        ):
            assert not torch.equal(parameter, before)
            torch.testing.assert_close(parameter - before, expected - before, rtol=1e-9, atol=1e-12)

    @pytest.mark.parametrize("device", DEVICES)
    def test_is_as_exact_as_float32_is(self, optimizer_class, device):
        start = values(0, torch.float32)
        parameters = [nn.Parameter(tensor.clone().to(device)) for tensor in start]
        run(optimizer_class(parameters, **USUAL[optimizer_class]), parameters)
        for parameter, expected in zip(
            parameters, PAPERS[optimizer_class](start, **USUAL[optimizer_class]), strict=True
        ):
            torch.testing.assert_close(parameter.detach().cpu().double(), expected, rtol=2e-6, atol=2e-6)

    @pytest.mark.parametrize("dtype", HALF_DTYPES, ids=dtype_name)
    def test_of_half_parameters_is_computed_in_float32_and_rounded_once_a_step(self, optimizer_class, dtype):
        halves = parameters_of(values(0, dtype))
        optimizer = optimizer_class(halves, **USUAL[optimizer_class])
        wide = parameters_of([half.detach().float() for half in halves])
        wide_optimizer = optimizer_class(wide, **USUAL[optimizer_class])
        for step in range(STEPS):
            for half, single, grad in zip(halves, wide, gradients(step, halves), strict=True):
                half.grad, single.grad = grad, grad.float()
            optimizer.step()
            wide_optimizer.step()
            with torch.no_grad():
                for half, single in zip(halves, wide, strict=True):
                    assert_same_bits(half, single.to(dtype))
                    single.copy_(half)
        assert_same_state(list(optimizer.state.values()), list(wide_optimizer.state.values()))

    def test_of_half_parameters_sees_squares_that_a_half_cannot_hold(self, optimizer_class):
        half = nn.Parameter(torch.ones(3, dtype=torch.float16))
        half.grad = torch.full((3,), 1e-4, dtype=torch.float16)
        optimizer = optimizer_class([half], lr=0.01)
        optimizer.step()
        expected = nn.Parameter(torch.ones(3, dtype=torch.float64))
        expected.grad = half.grad.double()
        optimizer_class([expected], lr=0.01).step()
        torch.testing.assert_close(half.detach().double(), expected.detach(), rtol=2**-11, atol=0)

    def test_of_mixed_dtypes_in_one_group_is_that_of_each_alone(self, optimizer_class):
        options = USUAL[optimizer_class] | ({"max_grad_norm": 0} if optimizer_class is FusedLAMB else {})
        dtypes = (torch.float16, torch.float32, torch.bfloat16, torch.float64)
        start = [tensor.to(dtype) for tensor, dtype in zip(values(0), dtypes, strict=True)]
        together, alone = parameters_of(start), parameters_of(start)
        one, several = optimizer_class(together, **options), [optimizer_class([each], **options) for each in alone]
        for step in range(STEPS):
            for first, second, grad in zip(together, alone, gradients(step, together), strict=True):
                first.grad, second.grad = grad, grad.clone()
            one.step()
            for optimizer in several:
                optimizer.step()
        for first, second in zip(together, alone, strict=True):
            torch.testing.assert_close(first, second, rtol=1e-6, atol=1e-7)


@EACH
class TestMemory:
    """Torch's fused kernels on the CPU take for granted that all tensors of a parameter have the same strides."""

    @staticmethod
    def steps_of(optimizer_class, parameter: nn.Parameter, as_grad: Callable[[Tensor], Tensor]) -> Tensor:
        optimizer = optimizer_class([parameter], **USUAL[optimizer_class])
        for step in range(3):
            (grad,) = gradients(step, [parameter])
            parameter.grad = as_grad(grad)
            optimizer.step()
        return parameter.detach().clone(memory_format=torch.contiguous_format)

    def test_gradients_may_have_other_strides_than_their_parameters(self, optimizer_class):
        (start,) = values(0, torch.float32, ((2, 3, 4, 4),))
        expected = self.steps_of(optimizer_class, nn.Parameter(start.clone()), lambda grad: grad)
        channels_last = nn.Parameter(start.to(memory_format=torch.channels_last))
        torch.testing.assert_close(self.steps_of(optimizer_class, channels_last, lambda grad: grad), expected)
        strided = self.steps_of(
            optimizer_class, nn.Parameter(start.clone()), lambda grad: grad.to(memory_format=torch.channels_last)
        )
        torch.testing.assert_close(strided, expected)

    def test_parameters_may_have_gaps_in_memory(self, optimizer_class):
        (start,) = values(0, torch.float32, ((6, 3),))
        expected = self.steps_of(optimizer_class, nn.Parameter(start[::2].clone()), lambda grad: grad)
        whole = start.clone()
        torch.testing.assert_close(
            self.steps_of(optimizer_class, nn.Parameter(whole[::2]), lambda grad: grad), expected
        )
        assert_same_bits(whole[1::2], start[1::2])

    def test_gradients_are_not_written_to(self, optimizer_class):
        parameters = parameters_of(values(0, torch.float32))
        optimizer = optimizer_class(parameters, **USUAL[optimizer_class])
        run(optimizer, parameters, range(2))
        for parameter, grad in zip(parameters, gradients(1, parameters), strict=True):
            assert_same_bits(parameter.grad, grad)

    def test_state_goes_along_when_a_parameter_takes_on_another_memory_format(self, optimizer_class):
        (start,) = values(0, torch.float32, ((2, 3, 4, 4),))
        parameters = parameters_of([start]), parameters_of([start])
        optimizers = [optimizer_class(each, **USUAL[optimizer_class]) for each in parameters]
        for optimizer, (parameter,) in zip(optimizers, parameters, strict=True):
            run(optimizer, [parameter], range(2))
        parameters[0][0].data = parameters[0][0].data.to(memory_format=torch.channels_last)
        for optimizer, (parameter,) in zip(optimizers, parameters, strict=True):
            run(optimizer, [parameter], range(2, 4))
        torch.testing.assert_close(parameters[0][0].detach(), parameters[1][0].detach())


@EACH
class TestAnOptimizerOfTorch:
    @pytest.fixture
    def parameters(self) -> list[nn.Parameter]:
        """Of every dtype."""
        dtypes = (torch.float32, torch.float16, torch.bfloat16, torch.float32)
        return parameters_of([tensor.to(dtype) for tensor, dtype in zip(values(0), dtypes, strict=True)])

    def test_parameters_without_gradients_stay_and_keep_no_state(self, optimizer_class, parameters):
        before = parameters[1].detach().clone()
        optimizer = optimizer_class(parameters, **USUAL[optimizer_class])
        for parameter, grad in zip(parameters, gradients(0, parameters), strict=True):
            parameter.grad = None if parameter is parameters[1] else grad
        optimizer.step()
        assert_same_bits(parameters[1], before)
        assert not optimizer.state.get(parameters[1])
        assert optimizer.state[parameters[0]]

    def test_a_step_without_any_gradient_is_nothing(self, optimizer_class, parameters):
        optimizer = optimizer_class(parameters, **USUAL[optimizer_class])
        before = snapshot(optimizer)
        optimizer.step()
        assert_same_state(snapshot(optimizer), before)

    def test_a_parameter_that_joins_late_is_updated_as_if_it_were_alone(self, optimizer_class):
        options = USUAL[optimizer_class] | ({"max_grad_norm": 0} if optimizer_class is FusedLAMB else {})
        early, late, alone = parameters_of(values(0, torch.float32, ((3,), (4,), (4,))))
        alone.data.copy_(late)
        optimizer = optimizer_class([early, late], **options)
        run(optimizer, [early], range(5))
        run(optimizer_class([alone], **options), [alone], range(5))
        early.grad = None
        run(optimizer, [late], range(5))
        assert_same_bits(late, alone)

    def test_saved_and_loaded_it_goes_on_to_the_same_bits(self, optimizer_class, parameters):
        optimizer = optimizer_class(parameters, **USUAL[optimizer_class])
        run(optimizer, parameters, range(3))
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        again = parameters_of([parameter.detach() for parameter in parameters])
        resumed = optimizer_class(again, **(USUAL[optimizer_class] | {"lr": 123.0}))
        resumed.load_state_dict(torch.load(file, weights_only=True))
        assert_same_state(snapshot(resumed), snapshot(optimizer))
        run(optimizer, parameters, range(3, 6))
        run(resumed, again, range(3, 6))
        assert_same_state(snapshot(resumed), snapshot(optimizer))

    def test_loading_leaves_the_state_dict_alone_and_shares_nothing_with_it(self, optimizer_class, parameters):
        optimizer = optimizer_class(parameters, **USUAL[optimizer_class])
        run(optimizer, parameters, range(3))
        saved = copy.deepcopy(optimizer.state_dict())
        as_saved = copy.deepcopy(saved)
        again = parameters_of([parameter.detach() for parameter in parameters])
        resumed = optimizer_class(again, **USUAL[optimizer_class])
        resumed.load_state_dict(saved)
        run(resumed, again, range(3, 5))
        assert_same_state(saved, as_saved)

    def test_the_users_hooks_hand_on_what_is_loaded_and_see_what_was(self, optimizer_class, parameters):
        optimizer = optimizer_class(parameters, **USUAL[optimizer_class])
        run(optimizer, parameters, range(3))
        saved = copy.deepcopy(optimizer.state_dict())
        empty = saved | {"state": {}}
        seen: list[Any] = []
        optimizer.register_load_state_dict_pre_hook(lambda *_: saved)
        optimizer.register_load_state_dict_post_hook(lambda each: seen.append(copy.deepcopy(each.state_dict())))
        optimizer.load_state_dict(empty)
        assert_same_state(seen, [saved])
        optimizer.load_state_dict(empty)
        assert_same_state(seen, [saved, saved])

    def test_a_state_dict_of_other_groups_is_refused(self, optimizer_class, parameters):
        optimizer = optimizer_class(parameters, **USUAL[optimizer_class])
        other = optimizer_class([{"params": parameters[:2]}, {"params": parameters[2:]}], **USUAL[optimizer_class])
        with pytest.raises(ValueError, match="different number of parameter groups"):
            optimizer.load_state_dict(other.state_dict())
        with pytest.raises(ValueError, match="different number of parameter groups"):
            other.load_state_dict(optimizer.state_dict())

    @pytest.mark.parametrize(
        "copied", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))], ids=["deepcopy", "pickle"]
    )
    def test_a_copy_goes_on_to_the_same_bits(self, optimizer_class, parameters, copied):
        optimizer = optimizer_class(parameters, **USUAL[optimizer_class])
        run(optimizer, parameters, range(3))
        other = copied(optimizer)
        assert {name: getattr(other, name) for name in optimizer._settings} == {
            name: getattr(optimizer, name) for name in optimizer._settings
        }
        run(optimizer, parameters, range(3, 6))
        run(other, other.param_groups[0]["params"], range(3, 6))
        assert_same_state(snapshot(other), snapshot(optimizer))

    def test_groups_have_options_of_their_own_and_may_be_added(self, optimizer_class):
        first, second = parameters_of(values(0, torch.float32, ((3,), (4,))))
        optimizer = optimizer_class([{"params": [first], "lr": 0.0}], **USUAL[optimizer_class])
        optimizer.add_param_group({"params": [second]})
        assert [group["lr"] for group in optimizer.param_groups] == [0.0, USUAL[optimizer_class]["lr"]]
        before = first.detach().clone(), second.detach().clone()
        run(optimizer, [first, second], range(2))
        assert torch.equal(first, before[0])
        assert not torch.equal(second, before[1])

    def test_learning_rates_follow_a_scheduler(self, optimizer_class):
        (parameter,) = parameters_of(values(0, torch.float32, ((3,),)))
        optimizer = optimizer_class([parameter], **USUAL[optimizer_class])
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(step != 1))
        run(optimizer, [parameter], range(1))
        scheduler.step()
        before = parameter.detach().clone()
        run(optimizer, [parameter], range(1, 2))
        assert torch.equal(parameter, before)
        scheduler.step()
        run(optimizer, [parameter], range(2, 3))
        assert not torch.equal(parameter, before)

    def test_a_closure_is_evaluated_once_with_gradients_and_its_loss_returned(self, optimizer_class):
        (parameter,) = parameters_of(values(0, torch.float32, ((3,),)))
        before = parameter.detach().clone()
        optimizer = optimizer_class([parameter], **USUAL[optimizer_class])
        losses = []

        def closure() -> Tensor:
            optimizer.zero_grad()
            losses.append(parameter.square().sum())
            losses[-1].backward()
            return losses[-1]

        assert optimizer.step(closure) is losses[0]
        assert len(losses) == 1
        assert not torch.equal(parameter, before)

    def test_what_becomes_of_gradients_is_as_set_grad_none_says(self, optimizer_class, parameters):
        for set_grad_none, kept in ((True, [None]), (False, [0.0])):
            optimizer = optimizer_class(parameters, **USUAL[optimizer_class], set_grad_none=set_grad_none)
            for cleared, expected in ((None, kept), (True, [None]), (False, [0.0])):
                for parameter, grad in zip(parameters, gradients(0, parameters), strict=True):
                    parameter.grad = grad
                optimizer.zero_grad() if cleared is None else optimizer.zero_grad(set_to_none=cleared)
                found = [None if each.grad is None else float(each.grad.abs().max()) for each in parameters]
                assert found == expected * len(parameters)

    def test_a_sparse_gradient_is_refused_before_anything_is_written(self, optimizer_class, parameters):
        table = nn.Parameter(torch.ones(3, 2))
        optimizer = optimizer_class([*parameters, table], **USUAL[optimizer_class])
        before = snapshot(optimizer)
        for parameter, grad in zip(parameters, gradients(0, parameters), strict=True):
            parameter.grad = grad
        nn.functional.embedding(torch.tensor([1]), table, sparse=True).sum().backward()
        with pytest.raises(UsageError, match=rf"{optimizer_class.__name__} found a sparse gradient.*SparseAdam"):
            optimizer.step()
        assert_same_state(snapshot(optimizer), before)

    def test_a_complex_parameter_is_refused(self, optimizer_class):
        wave = nn.Parameter(torch.ones(2, dtype=torch.complex64))
        wave.grad = torch.ones_like(wave)
        optimizer = optimizer_class([wave], **USUAL[optimizer_class])
        with pytest.raises(UsageError, match="complex64"):
            optimizer.step()

    @pytest.mark.parametrize("option", [{"lr": -0.1}, {"lr": math.nan}, {"weight_decay": -1.0}], ids=str)
    def test_options_out_of_range_are_refused(self, optimizer_class, parameters, option):
        (name,) = option
        with pytest.raises(OptionError, match=f"{optimizer_class.__name__} found {name}="):
            optimizer_class(parameters, **(USUAL[optimizer_class] | option))


class TestOptions:
    def test_what_apex_does_not_support_is_refused_as_there(self):
        parameters = parameters_of(values(0))
        for optimizer_class in (FusedAdam, FusedLAMB, FusedNovoGrad):
            with pytest.raises(RuntimeError, match="amsgrad=True") as caught:
                optimizer_class(parameters, amsgrad=True)
            assert isinstance(caught.value, OptionError)
        with pytest.raises(OptionError, match=r"master_weights=True.*opt_level=\"O2\""):
            FusedAdam(parameters, master_weights=True)
        with pytest.raises(OptionError, match="norm_type=1"):
            FusedNovoGrad(parameters, norm_type=1)
        with pytest.raises(OptionError, match="nesterov=True"):
            FusedSGD(parameters, 0.1, nesterov=True)
        with pytest.raises(OptionError, match="nesterov=True"):
            FusedSGD(parameters, 0.1, momentum=0.9, dampening=0.1, nesterov=True)
        with pytest.raises(OptionError, match="betas="):
            FusedAdam(parameters, betas=(0.9, 1.0))

    def test_a_learning_rate_may_be_each_groups_own(self):
        first, second = parameters_of(values(0)[:2]), parameters_of(values(0)[2:])
        optimizer = FusedSGD([{"params": first, "lr": 0.05}, {"params": second, "lr": 0.2}], momentum=0.9)
        run(optimizer, first + second)
        expected = sgd(values(0), 0.05, momentum=0.9)[:2] + sgd(values(0), 0.2, momentum=0.9)[2:]
        for parameter, wanted in zip(first + second, expected, strict=True):
            torch.testing.assert_close(parameter.detach(), wanted)

    def test_a_group_that_has_none_is_refused(self):
        parameters = parameters_of(values(0))
        for groups in (parameters, [{"params": parameters[:1], "lr": 0.1}, {"params": parameters[1:]}]):
            with pytest.raises(OptionError, match=r"no lr for group \d .*FusedSGD\(params, lr=0\.1\)"):
                FusedSGD(groups, momentum=0.9)
        optimizer = FusedSGD([{"params": parameters[:1], "lr": 0.1}])
        for kept in (optimizer, copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
            with pytest.raises(OptionError, match="no lr for group 1"):
                kept.add_param_group({"params": parameters[1:]})
            assert len(kept.param_groups) == 1

    def test_arguments_of_the_adam_of_2018_that_ask_for_nothing_are_taken(self):
        parameters = parameters_of(values(0))
        FusedAdam(parameters, max_grad_norm=0.0, eps_inside_sqrt=False, use_mt=True, amp_scale_adjustment=1.0)
        FusedAdam([{"params": parameters, "max_grad_norm": 0.0}])

    @pytest.mark.parametrize(
        ("option", "advice"),
        [({"eps_inside_sqrt": True}, r"eps=math\.sqrt"), ({"amp_scale_adjustment": 2.0}, r"amp\.scale_loss")],
    )
    def test_others_of_its_arguments_say_what_to_do(self, option, advice):
        with pytest.raises(OptionError, match=rf"found {next(iter(option))}=.*{advice}"):
            FusedAdam(parameters_of(values(0)), **option)

    def test_groups_have_the_options_that_apex_keeps_in_them(self):
        parameters = parameters_of(values(0))
        moments = {"params", "lr", "bias_correction", "betas", "eps", "weight_decay"}
        assert FusedAdam(parameters).param_groups[0].keys() == moments
        assert FusedLAMB(parameters).param_groups[0].keys() == moments | {"grad_averaging", "max_grad_norm"}
        assert FusedNovoGrad(parameters).param_groups[0].keys() == moments | {
            "grad_averaging",
            "norm_type",
            "init_zero",
        }
        assert FusedAdagrad(parameters).param_groups[0].keys() == {"params", "lr", "eps", "weight_decay"}
        assert FusedSGD(parameters, 0.1).param_groups[0].keys() == {
            "params",
            "lr",
            "momentum",
            "dampening",
            "weight_decay",
            "nesterov",
        }

    def test_a_capturable_adam_has_its_learning_rate_on_the_device(self):
        parameters, others = parameters_of(values(0)), parameters_of(values(0))
        optimizer = FusedAdam(parameters, lr=0.05, capturable=True)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        plain = FusedAdam(others, lr=0.05)
        plain_scheduler = torch.optim.lr_scheduler.StepLR(plain, 1, gamma=0.5)
        for step in range(3):
            run(optimizer, parameters, range(step, step + 1))
            scheduler.step()
            run(plain, others, range(step, step + 1))
            plain_scheduler.step()
        assert isinstance(optimizer.param_groups[0]["lr"], Tensor)
        for parameter, other in zip(parameters, others, strict=True):
            torch.testing.assert_close(parameter, other)

    def test_an_empty_parameter_has_no_greatest_magnitude_and_is_left_out(self):
        parameters = [nn.Parameter(torch.empty(0)), nn.Parameter(torch.ones(2))]
        run(FusedNovoGrad(parameters, norm_type=0), parameters, range(2))
        assert parameters[1][0] != 1

    def test_lamb_clips_by_the_norm_of_all_groups_together(self):
        start = values(0)
        parameters = parameters_of(start)
        grouped = FusedLAMB([{"params": parameters[:1]}, {"params": parameters[1:]}], lr=0.05, max_grad_norm=0.5)
        run(grouped, parameters)
        for parameter, expected in zip(parameters, lamb(start, lr=0.05, max_grad_norm=0.5), strict=True):
            torch.testing.assert_close(parameter.detach(), expected, rtol=1e-6, atol=1e-7)

    def test_lamb_moves_a_tensor_of_zeros(self):
        zeros = nn.Parameter(torch.zeros(3))
        zeros.grad = torch.ones(3)
        FusedLAMB([zeros], lr=0.5, max_grad_norm=0).step()
        torch.testing.assert_close(zeros.detach(), torch.full((3,), -0.5))

    def test_lamb_leaves_a_tensor_without_update_where_it_is(self):
        ones = nn.Parameter(torch.ones(3))
        ones.grad = torch.zeros(3)
        FusedLAMB([ones], weight_decay=0.0, use_nvlamb=True).step()
        assert ones.tolist() == [1, 1, 1]


def as_apex_saves(optimizer: torch.optim.Optimizer, step: Any) -> dict[str, Any]:
    """The state dict of an optimizer as Apex's own would have it: steps are counted by group."""
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        state.pop("step", None)
    for group in saved["param_groups"]:
        group["step"] = step
    return saved


class TestCheckpointsOfApex:
    @pytest.mark.parametrize("step", [3, torch.tensor([3], dtype=torch.int32)], ids=["number", "tensor"])
    @pytest.mark.parametrize("optimizer_class", [FusedAdam, FusedLAMB], ids=lambda each: each.__name__)
    def test_training_goes_on_from_the_step_that_the_group_counts(self, optimizer_class, step):
        parameters = parameters_of(values(0, torch.float32))
        optimizer = optimizer_class(parameters, **USUAL[optimizer_class])
        run(optimizer, parameters, range(3))
        again = parameters_of([parameter.detach() for parameter in parameters])
        resumed = optimizer_class(again, lr=123.0)
        saved = as_apex_saves(optimizer, step)
        as_saved = copy.deepcopy(saved)
        resumed.load_state_dict(saved)
        assert_same_state(saved, as_saved)
        assert_same_state(snapshot(resumed), snapshot(optimizer))
        run(optimizer, parameters, range(3, 6))
        run(resumed, again, range(3, 6))
        assert_same_state(snapshot(resumed), snapshot(optimizer))

    def test_norms_of_novograd_go_from_the_group_to_their_parameters(self):
        dtypes = (torch.float32, torch.float16, torch.float32, torch.float16)
        start = [tensor.to(dtype) for tensor, dtype in zip(values(0), dtypes, strict=True)]
        parameters = parameters_of(start)
        optimizer = FusedNovoGrad(parameters, lr=0.05)
        run(optimizer, parameters, range(3))
        saved = as_apex_saves(optimizer, 3)
        norms = {}
        for index, state in saved["state"].items():
            norms[index] = state.pop("exp_avg_norm")
            state["exp_avg"] = state["exp_avg"].to(dtypes[index])
        saved["param_groups"][0]["exp_avg_sq"] = [
            torch.stack([norms[1], norms[3]]),
            torch.stack([norms[0], norms[2]]),
        ]
        again = parameters_of([parameter.detach() for parameter in parameters])
        resumed = FusedNovoGrad(again, lr=123.0)
        resumed.load_state_dict(saved)
        assert "exp_avg_sq" not in resumed.param_groups[0]
        for before, after in zip(parameters, again, strict=True):
            assert_same_bits(resumed.state[after]["exp_avg_norm"], optimizer.state[before]["exp_avg_norm"])
            assert resumed.state[after]["exp_avg"].dtype is torch.float32
            assert resumed.state[after]["step"] == 3

    def test_momentum_of_sgd_is_under_the_name_it_had(self):
        parameters = parameters_of(values(0, torch.float32))
        optimizer = FusedSGD(parameters, 0.1, momentum=0.9)
        buffers = [torch.full_like(parameter, 2.0) for parameter in parameters]
        saved = optimizer.state_dict() | {"state": {i: {"momentum_buffer": each} for i, each in enumerate(buffers)}}
        optimizer.load_state_dict(saved)
        before = [parameter.detach().clone() for parameter in parameters]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        for parameter, start in zip(parameters, before, strict=True):
            torch.testing.assert_close(parameter.detach(), start - 0.1 * 2.8)

    def test_a_checkpoint_from_before_the_first_step_loads(self):
        parameters = parameters_of(values(0, torch.float32))
        for optimizer_class, options in USUAL.items():
            optimizer = optimizer_class(parameters, **options)
            optimizer.load_state_dict(as_apex_saves(optimizer, 0))
            run(optimizer, parameters, range(1))

    def test_what_torchs_adamw_saved_goes_on_in_fused_adam(self):
        parameters, again = parameters_of(values(0, torch.float32)), parameters_of(values(0, torch.float32))
        torchs = torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1, fused=True)
        run(torchs, parameters, range(3))
        run(torch.optim.AdamW(again, lr=0.05, weight_decay=0.1, fused=True), again, range(3))
        fused = FusedAdam(again)
        fused.load_state_dict(torchs.state_dict())
        run(torchs, parameters, range(3, 6))
        run(fused, again, range(3, 6))
        for parameter, other in zip(parameters, again, strict=True):
            assert_same_bits(parameter, other)


class Network(nn.Sequential):
    """Has a parameter of every kind that amp tells apart."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))


def batch(step: int) -> Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(step))


@pytest.fixture
def trained() -> Iterator[Callable[..., tuple[nn.Module, Any]]]:
    """Makes a model and an optimizer under a level, the same each time, once those before are given back."""

    def make(optimizer_class: Any, opt_level: str, **options: Any) -> tuple[nn.Module, Any]:
        amp.deinitialize()
        torch.manual_seed(0)
        model = Network()
        optimizer = optimizer_class(model.parameters(), **(USUAL[optimizer_class] | options))
        return amp.initialize(
            model, optimizer, opt_level=opt_level, loss_scale="dynamic", init_scale=256.0, verbosity=0
        )

    yield make
    amp.deinitialize()


def iterate(model: nn.Module, optimizer: Any, step: int, overflow: bool = False) -> None:
    optimizer.zero_grad()
    loss = model(batch(step)).square().mean()
    with amp.scale_loss(loss * (math.inf if overflow else 1), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()


@EACH
@pytest.mark.parametrize("opt_level", ["O0", "O1", "O2"])
class TestUnderAmp:
    def test_an_overflow_in_the_first_step_leaves_everything_as_it_was(self, optimizer_class, opt_level, trained):
        model, optimizer = trained(optimizer_class, opt_level)
        before = snapshot(optimizer)
        weights = copy.deepcopy([each.detach() for each in model.parameters()])
        iterate(model, optimizer, 0, overflow=True)
        assert amp.step_was_skipped(optimizer)
        assert_same_state(snapshot(optimizer), before)
        assert_same_state([each.detach() for each in model.parameters()], weights)
        iterate(model, optimizer, 1)
        assert not amp.step_was_skipped(optimizer)
        assert all(torch.isfinite(each).all() for each in model.parameters())

    @pytest.mark.covering(1)
    def test_an_overflow_later_leaves_everything_as_it_was(self, optimizer_class, opt_level, trained):
        model, optimizer = trained(optimizer_class, opt_level)
        for step in range(3):
            iterate(model, optimizer, step)
        before = snapshot(optimizer)
        weights = copy.deepcopy([each.detach() for each in model.parameters()])
        iterate(model, optimizer, 3, overflow=True)
        assert amp.step_was_skipped(optimizer)
        assert_same_state(snapshot(optimizer), before)
        assert_same_state([each.detach() for each in model.parameters()], weights)

    @pytest.mark.covering(1)
    def test_training_comes_close_to_that_in_float32(self, optimizer_class, opt_level, trained):
        losses = []
        for level in ("O0", opt_level):
            model, optimizer = trained(optimizer_class, level, lr=0.01)
            for step in range(10):
                iterate(model, optimizer, step)
            losses.append(model(batch(0)).square().mean().item())
        assert losses[1] == pytest.approx(losses[0], rel=0.02)

    def test_what_is_updated_at_o2_are_float32_masters(self, optimizer_class, opt_level, trained):
        model, optimizer = trained(optimizer_class, opt_level)
        for step in range(3):
            iterate(model, optimizer, step)
        masters = list(amp.master_params(optimizer))
        assert {each.dtype for each in masters} == {torch.float32}
        assert any(each.dtype is torch.bfloat16 for each in model.parameters()) == (opt_level == "O2")
        for master, parameter in zip(masters, model.parameters(), strict=True):
            assert_same_bits(parameter, master.to(parameter.dtype))
        assert {each for each in optimizer.state if optimizer.state[each]} == set(model.parameters())

    @pytest.mark.covering(1)
    def test_interrupted_and_resumed_it_ends_in_the_same_bits(self, optimizer_class, opt_level, trained):
        model, optimizer = trained(optimizer_class, opt_level)
        for step in range(3):
            iterate(model, optimizer, step)
        saved = copy.deepcopy([model.state_dict(), optimizer.state_dict(), amp.state_dict()])
        for step in range(3, 6):
            iterate(model, optimizer, step)
        expected = copy.deepcopy(model.state_dict())
        model, optimizer = trained(optimizer_class, opt_level)
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        amp.load_state_dict(saved[2])
        for step in range(3, 6):
            iterate(model, optimizer, step)
        assert_same_state(dict(model.state_dict()), dict(expected))


@pytest.mark.usefixtures("far_away")
class TestSkippingInTheKernel:
    """What spares a training step the wait for the verdict on its gradients."""

    @pytest.mark.parametrize("momentum", [0.0, 0.9])
    def test_sgd_asks_amp_to_wait_only_where_weight_decay_is_not_the_kernels(self, trained, momentum):
        for wd_after_momentum in (False, True):
            model, optimizer = trained(FusedSGD, "O1", wd_after_momentum=wd_after_momentum, momentum=momentum)
            assert bool(optimizer._step_supports_amp_scaling) is not wd_after_momentum
            for step in range(2):
                iterate(model, optimizer, step)
            before = snapshot(optimizer)
            iterate(model, optimizer, 2, overflow=True)
            assert amp.step_was_skipped(optimizer)
            assert_same_state(snapshot(optimizer), before)

    @pytest.mark.parametrize("bias_correction", [True, False])
    def test_adam_skips_in_the_kernel_so_that_hooks_of_the_step_fire(self, trained, bias_correction):
        model, optimizer = trained(FusedAdam, "O1", bias_correction=bias_correction)
        iterate(model, optimizer, 0)
        fired = []
        optimizer.register_step_post_hook(lambda *_: fired.append(True))
        before = snapshot(optimizer)
        iterate(model, optimizer, 1, overflow=True)
        assert fired == [True]
        assert_same_state(snapshot(optimizer), before)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_name)
    @EACH
    def test_torchs_own_scaler_may_be_used_too(self, optimizer_class, dtype):
        parameters = parameters_of(values(0, dtype))
        expected = parameters_of(values(0, dtype))
        optimizer = optimizer_class(parameters, **USUAL[optimizer_class])
        plain = optimizer_class(expected, **USUAL[optimizer_class])
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
        for step, overflows in enumerate([True, False, True, False]):
            scale = scaler.scale(torch.tensor(1.0))
            for parameter, other, grad in zip(parameters, expected, gradients(step, parameters), strict=True):
                parameter.grad, other.grad = grad * scale.to(dtype), grad
            before = [parameter.detach().clone() for parameter in parameters]
            if overflows:
                parameters[0].grad.fill_(math.inf)
            scaler.step(optimizer)
            scaler.update()
            if overflows:
                for parameter, other in zip(parameters, before, strict=True):
                    assert_same_bits(parameter, other)
            else:
                plain.step()
        for parameter, other in zip(parameters, expected, strict=True):
            assert_same_bits(parameter, other)
