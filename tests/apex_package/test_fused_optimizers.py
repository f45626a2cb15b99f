"""Of Apex's optimizers: they do what the papers say, in float32 whatever the parameters are, and resume exactly."""

from __future__ import annotations

import copy
import io
import math
import pickle
from typing import Any

import pytest
import torch
from helpers import DEVICES, HALF_DTYPES, assert_same_bits, assert_same_state, dtype_name
from hypothesis import given
from hypothesis import strategies as st
from optimizers import backward
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
        set_gradients(parameters, step)
        optimizer.step()


def snapshot(optimizer: torch.optim.Optimizer) -> tuple[list[Tensor], dict[str, Any]]:
    parameters = [each.detach().clone() for group in optimizer.param_groups for each in group["params"]]
    return parameters, copy.deepcopy(optimizer.state_dict())


def usual(optimizer_class: Any, parameters: Any, **options: Any) -> torch.optim.Optimizer:
    return optimizer_class(parameters, **(USUAL[optimizer_class] | options))


def set_gradients(parameters: list[Any], step: int = 0) -> None:
    for parameter, grad in zip(parameters, gradients(step, parameters), strict=True):
        parameter.grad = grad


# What the papers say, of one tensor in float64: each returns the new values.


def moments(g, state, t, betas, bias_correction, average=True):
    """Returns the corrected first and second moment."""
    beta1, beta2 = betas
    state["m"] = beta1 * state.get("m", 0.0) + ((1 - beta1) if average else 1) * g
    state["v"] = beta2 * state.get("v", 0.0) + (1 - beta2) * g**2
    if not bias_correction:
        return state["m"], state["v"]
    return state["m"] / (1 - beta1**t), state["v"] / (1 - beta2**t)


def adam(
    theta, g, state, t, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8, adam_w_mode=True, weight_decay=0.0
):
    m, v = moments(g + (0 if adam_w_mode else weight_decay) * theta, state, t, betas, bias_correction)
    return theta - lr * (m / (v**0.5 + eps) + (weight_decay * theta if adam_w_mode else 0))


def sgd(theta, g, state, t, lr, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False, wd_after_momentum=False):
    g = g + (0 if wd_after_momentum else weight_decay * theta)
    if momentum:
        state["buffer"] = momentum * state["buffer"] + (1 - dampening) * g if state else g
        g = g + momentum * state["buffer"] if nesterov else state["buffer"]
    return theta - lr * (g + (weight_decay * theta if wd_after_momentum else 0))


def adagrad(theta, g, state, t, lr=1e-2, eps=1e-10, weight_decay=0.0, adagrad_w_mode=False):
    g = g + (0 if adagrad_w_mode else weight_decay * theta)
    state["sum"] = state.get("sum", 0.0) + g**2
    return theta - lr * (g / (state["sum"] ** 0.5 + eps) + (weight_decay * theta if adagrad_w_mode else 0))


def lamb(
    theta,
    g,
    state,
    t,
    lr=1e-3,
    bias_correction=True,
    betas=(0.9, 0.999),
    eps=1e-6,
    weight_decay=0.01,
    adam_w_mode=True,
    grad_averaging=True,
    use_nvlamb=False,
):
    g = g + (0 if adam_w_mode else weight_decay * theta)
    m, v = moments(g, state, t, betas, bias_correction, grad_averaging)
    update = m / (v**0.5 + eps) + (weight_decay * theta if adam_w_mode else 0)
    norm, norm_of_update = float((theta**2).sum() ** 0.5), float((update**2).sum() ** 0.5)
    has_ratio = (weight_decay or use_nvlamb) and norm and norm_of_update
    return theta - lr * (norm / norm_of_update if has_ratio else 1) * update


def novograd(
    theta,
    g,
    state,
    t,
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
    second = float((g**2).sum()) if norm_type == 2 else float(g.abs().max())
    before = state.get("v", 0.0 if init_zero else second)
    state["v"] = beta2 * before + (1 - beta2) * second
    norm = math.sqrt(state["v"]) if norm_type == 2 else state["v"]
    divisor = norm / (math.sqrt(1 - beta2**t) if bias_correction else 1) + eps
    if reg_inside_moment:
        g = g / divisor + weight_decay * theta
    state["m"] = beta1 * state.get("m", 0.0) + ((1 - beta1) if grad_averaging else 1) * g
    update = state["m"] / (1 - beta1**t) if bias_correction else state["m"]
    return theta - lr * (update if reg_inside_moment else update / divisor + weight_decay * theta)


PAPERS = {FusedAdam: adam, FusedSGD: sgd, FusedAdagrad: adagrad, FusedLAMB: lamb, FusedNovoGrad: novograd}


def published(optimizer_class: type[torch.optim.Optimizer], start: list[Tensor], **options: Any) -> list[Tensor]:
    """Returns the parameters after all steps by the paper. LAMB clips by the norm of all gradients."""
    max_norm = options.pop("max_grad_norm", 1.0) if optimizer_class is FusedLAMB else 0.0
    theta, states = [tensor.double() for tensor in start], [{} for _ in start]
    for t in range(1, STEPS + 1):
        grads = [grad.double() for grad in gradients(t - 1, start)]
        if max_norm:
            norm = math.sqrt(sum(float((grad**2).sum()) for grad in grads))
            grads = [grad / max(1.0, norm / max_norm) for grad in grads]
        theta = [
            PAPERS[optimizer_class](each, grad, state, t, **options)
            for each, grad, state in zip(theta, grads, states, strict=True)
        ]
    return theta


OF_ALL = {"lr": st.floats(1e-4, 0.1), "weight_decay": st.sampled_from([0.0, 0.3])}
OF_MOMENTS = {
    **OF_ALL,
    "betas": st.tuples(st.floats(0.0, 0.99), st.floats(0.5, 0.999)),
    "bias_correction": st.booleans(),
    "eps": st.sampled_from([1e-8, 1e-3]),
}
OPTIONS: dict[type[torch.optim.Optimizer], st.SearchStrategy[dict[str, Any]]] = {
    FusedAdam: st.fixed_dictionaries({**OF_MOMENTS, "adam_w_mode": st.booleans()}),
    FusedSGD: st.fixed_dictionaries(
        {**OF_ALL, "momentum": st.sampled_from([0.0, 0.9]), "wd_after_momentum": st.booleans()}
    ).flatmap(
        lambda options: st.sampled_from(
            [options, {**options, "dampening": 0.3}, {**options, "momentum": 0.8, "nesterov": True}]
        )
    ),
    FusedAdagrad: st.fixed_dictionaries({**OF_ALL, "eps": OF_MOMENTS["eps"], "adagrad_w_mode": st.booleans()}),
    FusedLAMB: st.fixed_dictionaries(
        {
            **OF_MOMENTS,
            "adam_w_mode": st.booleans(),
            "grad_averaging": st.booleans(),
            "max_grad_norm": st.sampled_from([0.1, 1.0, 100.0, 0.0]),
            "use_nvlamb": st.booleans(),
        }
    ),
    FusedNovoGrad: st.fixed_dictionaries(
        {
            **OF_MOMENTS,
            "reg_inside_moment": st.booleans(),
            "grad_averaging": st.booleans(),
            "norm_type": st.sampled_from([0, 2]),
            "init_zero": st.booleans(),
        }
    ),
}


def assert_close(found: list[Any], expected: list[Tensor], **tolerances: float) -> None:
    torch.testing.assert_close([each.detach() for each in found], expected, **tolerances)


@EACH
class TestAlgorithms:
    def test_steps_are_the_published_ones_over_all_options(self, optimizer_class):
        @given(OPTIONS[optimizer_class])
        def check(options: dict[str, Any]) -> None:
            parameters = parameters_of(values(0))
            run(optimizer_class(parameters, **options), parameters)
            assert_close(parameters, published(optimizer_class, values(0), **options), rtol=1e-10, atol=1e-11)

        check()

    def test_steps_are_the_published_ones_with_the_defaults(self, optimizer_class):
        options = {"lr": 0.1} if optimizer_class is FusedSGD else {}
        start = values(0)
        parameters = parameters_of(start)
        run(optimizer_class(parameters, **options), parameters)
        for parameter, before, expected in zip(
            parameters, start, published(optimizer_class, start, **options), strict=True
        ):
            assert not torch.equal(parameter, before)
            torch.testing.assert_close(parameter - before, expected - before, rtol=1e-9, atol=1e-12)

    @pytest.mark.parametrize("device", DEVICES)
    def test_float32_steps_are_as_exact_as_float32_allows(self, optimizer_class, device):
        start = values(0, torch.float32)
        parameters = [nn.Parameter(tensor.clone().to(device)) for tensor in start]
        run(usual(optimizer_class, parameters), parameters)
        expected = published(optimizer_class, start, **USUAL[optimizer_class])
        assert_close([parameter.cpu().double() for parameter in parameters], expected, rtol=2e-6, atol=2e-6)

    @pytest.mark.parametrize("dtype", HALF_DTYPES, ids=dtype_name)
    def test_half_parameters_are_stepped_in_float32_and_rounded_once_a_step(self, optimizer_class, dtype):
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

    def test_parameters_of_several_types_are_stepped_as_each_alone(self, optimizer_class):
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
        torch.testing.assert_close(together, alone, rtol=1e-6, atol=1e-7)


@EACH
class TestMemory:
    """Torch's fused kernels on the CPU take for granted that all tensors of a parameter have the same strides."""

    def steps_of(self, optimizer_class, parameter: nn.Parameter, format_of_grad=torch.preserve_format) -> Tensor:
        optimizer = usual(optimizer_class, [parameter])
        for step in range(3):
            (grad,) = gradients(step, [parameter])
            parameter.grad = grad.to(memory_format=format_of_grad)
            optimizer.step()
        return parameter.detach().clone(memory_format=torch.contiguous_format)

    def test_gradients_may_have_other_strides_than_their_parameters(self, optimizer_class):
        (start,) = values(0, torch.float32, ((2, 3, 4, 4),))
        expected = self.steps_of(optimizer_class, nn.Parameter(start.clone()))
        channels_last = nn.Parameter(start.to(memory_format=torch.channels_last))
        torch.testing.assert_close(self.steps_of(optimizer_class, channels_last), expected)
        strided = self.steps_of(optimizer_class, nn.Parameter(start.clone()), torch.channels_last)
        torch.testing.assert_close(strided, expected)

    def test_parameters_may_have_gaps_in_memory(self, optimizer_class):
        (start,) = values(0, torch.float32, ((6, 3),))
        expected = self.steps_of(optimizer_class, nn.Parameter(start[::2].clone()))
        whole = start.clone()
        torch.testing.assert_close(self.steps_of(optimizer_class, nn.Parameter(whole[::2])), expected)
        assert_same_bits(whole[1::2], start[1::2])

    def test_gradients_are_not_written_to(self, optimizer_class):
        parameters = parameters_of(values(0, torch.float32))
        optimizer = usual(optimizer_class, parameters)
        run(optimizer, parameters, range(2))
        assert_same_state([parameter.grad for parameter in parameters], gradients(1, parameters))

    def test_state_follows_a_parameter_into_another_memory_format(self, optimizer_class):
        (start,) = values(0, torch.float32, ((2, 3, 4, 4),))
        found = []
        for memory_format in (torch.contiguous_format, torch.channels_last):
            (parameter,) = parameters_of([start])
            optimizer = usual(optimizer_class, [parameter])
            run(optimizer, [parameter], range(2))
            parameter.data = parameter.data.to(memory_format=memory_format)
            run(optimizer, [parameter], range(2, 4))
            found.append(parameter.detach())
        torch.testing.assert_close(*found)


def check_resumed(optimizer: torch.optim.Optimizer, parameters: list[Any], saved: dict[str, Any]) -> None:
    """Loads a state into another optimizer, and runs both three steps further."""
    as_saved = copy.deepcopy(saved)
    again = parameters_of([parameter.detach() for parameter in parameters])
    resumed = usual(type(optimizer), again, lr=123.0)
    resumed.load_state_dict(saved)
    assert_same_state(snapshot(resumed), snapshot(optimizer))
    run(optimizer, parameters, range(3, 6))
    run(resumed, again, range(3, 6))
    assert_same_state(snapshot(resumed), snapshot(optimizer))
    assert_same_state(saved, as_saved)


@EACH
class TestOptimizerInterface:
    @pytest.fixture
    def parameters(self) -> list[nn.Parameter]:
        """Of every dtype."""
        dtypes = (torch.float32, torch.float16, torch.bfloat16, torch.float32)
        return parameters_of([tensor.to(dtype) for tensor, dtype in zip(values(0), dtypes, strict=True)])

    def test_parameters_without_gradients_stay_and_have_no_state(self, optimizer_class, parameters):
        optimizer = usual(optimizer_class, parameters)
        before = snapshot(optimizer)
        optimizer.step()
        assert_same_state(snapshot(optimizer), before)
        set_gradients(parameters)
        parameters[1].grad = None
        optimizer.step()
        assert_same_bits(parameters[1], before[0][1])
        assert not optimizer.state.get(parameters[1])
        assert optimizer.state[parameters[0]]

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

    def test_a_resumed_optimizer_has_the_same_bits_and_leaves_what_it_loaded(self, optimizer_class, parameters):
        optimizer = usual(optimizer_class, parameters)
        run(optimizer, parameters, range(3))
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        check_resumed(optimizer, parameters, torch.load(file, weights_only=True))

    def test_hooks_of_loading_may_replace_the_state_and_see_what_was_loaded(self, optimizer_class, parameters):
        optimizer = usual(optimizer_class, parameters)
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

    def test_loading_state_of_other_groups_is_refused(self, optimizer_class, parameters):
        optimizer = usual(optimizer_class, parameters)
        other = optimizer_class([{"params": parameters[:2]}, {"params": parameters[2:]}], **USUAL[optimizer_class])
        with pytest.raises(ValueError, match="different number of parameter groups"):
            optimizer.load_state_dict(other.state_dict())
        with pytest.raises(ValueError, match="different number of parameter groups"):
            other.load_state_dict(optimizer.state_dict())

    @pytest.mark.parametrize(
        "copied", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))], ids=["deepcopy", "pickle"]
    )
    def test_a_copy_of_an_optimizer_has_the_same_bits(self, optimizer_class, parameters, copied):
        optimizer = usual(optimizer_class, parameters)
        run(optimizer, parameters, range(3))
        other = copied(optimizer)
        settings = [name for name in vars(optimizer) if not name.startswith("_")]
        assert {"set_grad_none", "param_groups"} <= {*settings}
        for name in set(settings) - {"defaults", "param_groups", "state"}:
            assert getattr(other, name) == getattr(optimizer, name)
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
        optimizer.param_groups[0]["lr"] = 0.1  # as a scheduler does
        run(optimizer, [first, second], range(2, 3))
        assert not torch.equal(first, before[0])

    def test_step_calls_a_closure_once_with_gradients_and_returns_its_loss(self, optimizer_class):
        (parameter,) = parameters_of(values(0, torch.float32, ((3,),)))
        before = parameter.detach().clone()
        optimizer = usual(optimizer_class, [parameter])
        losses = []

        def closure() -> Tensor:
            optimizer.zero_grad()
            losses.append(parameter.square().sum())
            losses[-1].backward()
            return losses[-1]

        assert optimizer.step(closure) is losses[0]
        assert len(losses) == 1
        assert not torch.equal(parameter, before)

    def test_zero_grad_has_the_default_of_set_grad_none(self, optimizer_class, parameters):
        for set_grad_none, kept in ((True, [None]), (False, [0.0])):
            optimizer = optimizer_class(parameters, **USUAL[optimizer_class], set_grad_none=set_grad_none)
            for arguments, expected in (({}, kept), ({"set_to_none": True}, [None]), ({"set_to_none": False}, [0.0])):
                set_gradients(parameters)
                optimizer.zero_grad(**arguments)
                found = [None if each.grad is None else float(each.grad.abs().max()) for each in parameters]
                assert found == expected * len(parameters)

    def test_a_sparse_gradient_is_refused_and_changes_nothing(self, optimizer_class, parameters):
        table = nn.Parameter(torch.ones(3, 2))
        optimizer = optimizer_class([*parameters, table], **USUAL[optimizer_class])
        before = snapshot(optimizer)
        set_gradients(parameters)
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
    def test_options_that_apex_refuses_are_refused(self):
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

    def test_fused_sgd_refuses_a_group_without_a_learning_rate(self):
        parameters = parameters_of(values(0))
        for groups in (parameters, [{"params": parameters[:1], "lr": 0.1}, {"params": parameters[1:]}]):
            with pytest.raises(OptionError, match=r"no lr for group \d .*FusedSGD\(params, lr=0\.1\)"):
                FusedSGD(groups, momentum=0.9)
        optimizer = FusedSGD([{"params": parameters[:1], "lr": 0.1}])
        for kept in (optimizer, copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
            with pytest.raises(OptionError, match="no lr for group 1"):
                kept.add_param_group({"params": parameters[1:]})
            assert len(kept.param_groups) == 1

    def test_fused_adam_takes_arguments_of_2018_that_change_nothing(self):
        parameters = parameters_of(values(0))
        FusedAdam(parameters, max_grad_norm=0.0, eps_inside_sqrt=False, use_mt=True, amp_scale_adjustment=1.0)
        FusedAdam([{"params": parameters, "max_grad_norm": 0.0}])

    @pytest.mark.parametrize(
        ("option", "advice"),
        [({"eps_inside_sqrt": True}, r"eps=math\.sqrt"), ({"amp_scale_adjustment": 2.0}, r"amp\.scale_loss")],
    )
    def test_fused_adam_refuses_other_arguments_of_2018_with_the_cure(self, option, advice):
        with pytest.raises(OptionError, match=rf"found {next(iter(option))}=.*{advice}"):
            FusedAdam(parameters_of(values(0)), **option)

    def test_groups_have_the_options_that_apex_keeps_in_them(self):
        parameters = parameters_of(values(0))
        of_all, of_moments = "params lr weight_decay ", "params lr weight_decay bias_correction betas eps "
        for optimizer, names in [
            (FusedAdam(parameters), of_moments),
            (FusedLAMB(parameters), of_moments + "grad_averaging max_grad_norm"),
            (FusedNovoGrad(parameters), of_moments + "grad_averaging norm_type init_zero"),
            (FusedAdagrad(parameters), of_all + "eps"),
            (FusedSGD(parameters, 0.1), of_all + "momentum dampening nesterov"),
        ]:
            assert optimizer.param_groups[0].keys() == set(names.split())

    def test_a_capturable_fused_adam_has_its_learning_rate_in_a_tensor(self):
        found = []
        for capturable in (True, False):
            parameters = parameters_of(values(0))
            optimizer = FusedAdam(parameters, lr=0.05, capturable=capturable)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
            for step in range(3):
                run(optimizer, parameters, range(step, step + 1))
                scheduler.step()
            assert isinstance(optimizer.param_groups[0]["lr"], Tensor) is capturable
            found.append(parameters)
        torch.testing.assert_close(*found)

    def test_novograd_by_greatest_magnitude_leaves_out_an_empty_parameter(self):
        parameters = [nn.Parameter(torch.empty(0)), nn.Parameter(torch.ones(2))]
        run(FusedNovoGrad(parameters, norm_type=0), parameters, range(2))
        assert parameters[1][0] != 1

    def test_lamb_clips_by_the_norm_of_all_groups_together(self):
        start = values(0)
        parameters = parameters_of(start)
        grouped = FusedLAMB([{"params": parameters[:1]}, {"params": parameters[1:]}], lr=0.05, max_grad_norm=0.5)
        run(grouped, parameters)
        assert_close(parameters, published(FusedLAMB, start, lr=0.05, max_grad_norm=0.5), rtol=1e-6, atol=1e-7)

    def test_lamb_moves_a_tensor_of_zeros(self):
        zeros = nn.Parameter(torch.zeros(3))
        zeros.grad = torch.ones(3)
        FusedLAMB([zeros], lr=0.5, max_grad_norm=0).step()
        torch.testing.assert_close(zeros.detach(), torch.full((3,), -0.5))

    def test_lamb_leaves_a_tensor_whose_gradient_is_zero(self):
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
    def test_a_checkpoint_of_apex_resumes_at_the_step_counted_by_group(self, optimizer_class, step):
        parameters = parameters_of(values(0, torch.float32))
        optimizer = usual(optimizer_class, parameters)
        run(optimizer, parameters, range(3))
        check_resumed(optimizer, parameters, as_apex_saves(optimizer, step))

    def test_a_checkpoint_of_apexs_novograd_has_its_norms_by_group(self):
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
        of_halves, of_floats = torch.stack([norms[1], norms[3]]), torch.stack([norms[0], norms[2]])
        saved["param_groups"][0]["exp_avg_sq"] = [of_halves, of_floats]
        again = parameters_of([parameter.detach() for parameter in parameters])
        resumed = FusedNovoGrad(again, lr=123.0)
        resumed.load_state_dict(saved)
        assert "exp_avg_sq" not in resumed.param_groups[0]
        for before, after in zip(parameters, again, strict=True):
            assert_same_bits(resumed.state[after]["exp_avg_norm"], optimizer.state[before]["exp_avg_norm"])
            assert resumed.state[after]["exp_avg"].dtype is torch.float32
            assert resumed.state[after]["step"] == 3

    def test_a_checkpoint_of_apexs_sgd_has_its_momentum_under_torchs_name(self):
        parameters = parameters_of(values(0, torch.float32))
        optimizer = FusedSGD(parameters, 0.1, momentum=0.9)
        buffers = [torch.full_like(parameter, 2.0) for parameter in parameters]
        saved = optimizer.state_dict() | {"state": {i: {"momentum_buffer": each} for i, each in enumerate(buffers)}}
        optimizer.load_state_dict(saved)
        expected = [parameter.detach() - 0.1 * 2.8 for parameter in parameters]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        assert_close(parameters, expected)

    def test_a_checkpoint_of_apex_from_before_the_first_step_loads(self):
        parameters = parameters_of(values(0, torch.float32))
        for optimizer_class, options in USUAL.items():
            optimizer = optimizer_class(parameters, **options)
            optimizer.load_state_dict(as_apex_saves(optimizer, 0))
            run(optimizer, parameters, range(1))

    def test_a_checkpoint_of_torchs_adamw_resumes_in_fused_adam(self):
        parameters, again = parameters_of(values(0, torch.float32)), parameters_of(values(0, torch.float32))
        torchs = torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1, fused=True)
        run(torchs, parameters, range(3))
        run(torch.optim.AdamW(again, lr=0.05, weight_decay=0.1, fused=True), again, range(3))
        fused = FusedAdam(again)
        fused.load_state_dict(torchs.state_dict())
        run(torchs, parameters, range(3, 6))
        run(fused, again, range(3, 6))
        assert_same_state(parameters, again)


def initialized(optimizer_class: Any, opt_level: str, **options: Any) -> tuple[nn.Module, Any]:
    """Returns a model and an optimizer under a level, the same each time, once those before are given back."""
    amp.deinitialize()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    optimizer = usual(optimizer_class, model.parameters(), **options)
    return amp.initialize(model, optimizer, opt_level=opt_level, loss_scale="dynamic", init_scale=256.0, verbosity=0)


def loss_of(model: nn.Module, step: int) -> Tensor:
    return model(torch.randn(8, 6, generator=torch.Generator().manual_seed(step))).square().mean()


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        backward(loss_of(model, step), optimizer)
        optimizer.step()


def assert_skips(model: nn.Module, optimizer: Any) -> None:
    """Asserts that a step with an overflow changes nothing."""
    before = snapshot(optimizer), copy.deepcopy(list(model.parameters()))
    optimizer.zero_grad()
    backward(loss_of(model, 0) * math.inf, optimizer)
    optimizer.step()
    assert amp.step_was_skipped(optimizer)
    assert_same_state((snapshot(optimizer), list(model.parameters())), before)


@EACH
@pytest.mark.parametrize("opt_level", ["O0", "O1", "O2"])
class TestUnderAmp:
    def test_an_overflow_in_the_first_or_a_later_step_changes_nothing(self, optimizer_class, opt_level):
        model, optimizer = initialized(optimizer_class, opt_level)
        assert_skips(model, optimizer)
        train(model, optimizer, range(1, 4))
        assert not amp.step_was_skipped(optimizer)
        assert all(torch.isfinite(each).all() for each in model.parameters())
        assert_skips(model, optimizer)


@pytest.mark.usefixtures("far_away")
class TestSkippingInTheKernel:
    """What spares a training step the wait for the verdict on its gradients."""

    @pytest.mark.parametrize("momentum", [0.0, 0.9])
    @pytest.mark.parametrize("wd_after_momentum", [False, True])
    @pytest.mark.covering(2)
    def test_sgd_has_amp_wait_only_if_the_kernel_does_not_decay(self, momentum, wd_after_momentum):
        model, optimizer = initialized(FusedSGD, "O1", wd_after_momentum=wd_after_momentum, momentum=momentum)
        assert bool(optimizer._step_supports_amp_scaling) is not wd_after_momentum
        train(model, optimizer, range(2))
        assert_skips(model, optimizer)

    @pytest.mark.parametrize("bias_correction", [True, False])
    def test_adam_skips_in_the_kernel_so_that_hooks_of_the_step_fire(self, bias_correction):
        model, optimizer = initialized(FusedAdam, "O1", bias_correction=bias_correction)
        train(model, optimizer, range(1))
        fired = []
        optimizer.register_step_post_hook(lambda *_: fired.append(True))
        assert_skips(model, optimizer)
        assert fired == [True]

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_name)
    @EACH
    def test_torchs_grad_scaler_unscales_and_skips_fused_optimizers(self, optimizer_class, dtype):
        parameters = parameters_of(values(0, dtype))
        expected = parameters_of(values(0, dtype))
        optimizer = usual(optimizer_class, parameters)
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
                assert_same_state(parameters, before)
            else:
                plain.step()
        assert_same_state(parameters, expected)
