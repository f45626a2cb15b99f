"""FP16_Optimizer and the functions beside it: what a careful loop with float32 masters by hand does, bit for bit."""

from __future__ import annotations

import copy
import io
import logging
import math
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import HALF_DTYPES, assert_same_bits, assert_same_state, dtype_name
from torch import Tensor, nn

from ampatch.apex.amp.scaler import LossScaler as LossScalerOfAmp
from ampatch.apex.fp16_utils import (
    BN_convert_float,
    DynamicLossScaler,
    FP16_Optimizer,
    FP16Model,
    LossScaler,
    clip_grad_norm,
    convert_module,
    convert_network,
    master_params_to_model_params,
    model_grads_to_master_grads,
    network_to_half,
    prep_param_lists,
    to_python_float,
    tofp16,
)
from ampatch.errors import GradientOverflowError, LossScaleError, OptionError, UsageError

HALVES = pytest.mark.parametrize("half", HALF_DTYPES, ids=dtype_name)


def network() -> nn.Sequential:
    """With half parameters and, once it is converted, float32 ones."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def inputs(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(6, 4, generator=generator) for _ in range(count)]


def converted(half: torch.dtype) -> nn.Module:
    return convert_network(network(), half)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x.to(model[0].weight.dtype)).float().square().mean()


def closure_of(model: nn.Module, optimizer: FP16_Optimizer) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, inputs(1)[0])
        optimizer.backward(loss)
        return loss

    return closure


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


class ByHand:
    """The loop that FP16_Optimizer saves its users."""

    def __init__(self, half: torch.dtype, scale: float) -> None:
        self.model, self.scale = converted(half), scale
        self.parameters, self.masters = prep_param_lists(self.model)
        self.optimizer = sgd(self.masters)

    def step(self, *batches: Tensor, max_norm: float = math.inf) -> bool:
        """Whether a step was made; otherwise the scale is halved."""
        self.model.zero_grad()
        for batch in batches:
            (loss_of(self.model, batch) * self.scale).backward()
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            master.grad = parameter.grad.float() / self.scale
        if not all(bool(master.grad.isfinite().all()) for master in self.masters):
            self.scale /= 2
            return False
        if max_norm < math.inf:
            nn.utils.clip_grad_norm_(self.masters, max_norm)
        self.optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                parameter.copy_(master)
        return True


def wrapped(half: torch.dtype = torch.float16, make: Any = sgd, **options: Any) -> tuple[nn.Module, FP16_Optimizer]:
    model = converted(half)
    return model, FP16_Optimizer(make(model.parameters()), **options)


def dynamic(half: torch.dtype = torch.float16, **arguments: Any) -> tuple[nn.Module, FP16_Optimizer]:
    """Returns the same with a dynamic loss scale."""
    options = {name: arguments.pop(name) for name in ("on_overflow", "verbose") if name in arguments}
    return wrapped(half, dynamic_loss_scale=True, dynamic_loss_args=arguments, **options)


def updated(optimizer: FP16_Optimizer) -> list[Tensor]:
    """Returns what the optimizer updates, in the order of its parameters: masters in place of half parameters."""
    masters = dict(zip(optimizer.fp16_groups[0], optimizer.fp32_from_fp16_groups[0], strict=True))
    return [masters.get(parameter, parameter) for parameter in optimizer.param_groups[0]["params"]]


def train(model: nn.Module, optimizer: FP16_Optimizer, batches: list[Tensor]) -> None:
    for batch in batches:
        optimizer.zero_grad()
        optimizer.backward(loss_of(model, batch))
        optimizer.step()


class TestMasters:
    def test_half_parameters_alone_have_masters(self):
        model, optimizer = wrapped()
        halves, masters = optimizer.fp16_groups[0], optimizer.fp32_from_fp16_groups[0]
        assert [id(p) for p in halves] == [id(p) for p in model.parameters() if p.dtype is torch.float16]
        assert len(halves) == 4
        assert [id(p) for p in optimizer.fp32_from_fp32_groups[0]] == [id(model[1].weight), id(model[1].bias)]
        for parameter, master in zip(halves, masters, strict=True):
            assert_same_bits(master, parameter.float())
        held = optimizer.param_groups[0]["params"]
        assert list(map(id, held)) == list(map(id, model.parameters()))

    def test_frozen_parameters_have_no_masters(self):
        model = nn.Linear(2, 2).half()
        model.bias.requires_grad_(False)
        optimizer = FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        assert optimizer.param_groups[0]["params"][1] is model.bias
        assert len(optimizer.fp16_groups[0]) == 1

    @pytest.mark.parametrize("layer", [0, 1], ids=["half", "float32"])
    @pytest.mark.parametrize("joins", [False, True], ids=["unfrozen", "added"])
    def test_a_parameter_that_is_to_be_trained_only_later_is_an_error(self, layer, joins):
        model = converted(torch.float16)
        late = model[layer].weight.requires_grad_(joins)
        others = [parameter for parameter in model.parameters() if parameter is not late]
        optimizer = FP16_Optimizer(sgd(others if joins else model.parameters()), static_loss_scale=128.0)
        train(model, optimizer, inputs(1))
        if joins:
            optimizer.optimizer.add_param_group({"params": [late]})
        late.requires_grad_()
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(UsageError, match=r"param_groups.* has a gradient, and was frozen or not in this SGD when"):
            optimizer.backward(model[:2](inputs(1)[0].half()).float().square().mean())
        assert_same_bits(late, before[f"{layer}.weight"])

    def test_parameters_may_be_frozen_later_and_have_gradients_from_before(self):
        model, optimizer = wrapped(static_loss_scale=128.0)
        model[0].requires_grad_(False)
        train(model, optimizer, inputs(2))
        model[0].requires_grad_(True)
        train(model, optimizer, inputs(2))
        model[3].weight.requires_grad_(False)
        assert model[3].weight.grad is not None
        train(model, FP16_Optimizer(sgd(model.parameters()), static_loss_scale=128.0), inputs(1))

    def test_state_of_the_optimizer_becomes_float32(self):
        model = converted(torch.float16)
        inner = sgd(model.parameters())
        loss_of(model, inputs(1)[0]).backward()
        inner.step()
        momentum = inner.state[model[0].weight]["momentum_buffer"].clone()
        optimizer = FP16_Optimizer(inner)
        assert_same_bits(optimizer.state[model[0].weight]["momentum_buffer"], momentum.float())

    def test_wrapping_what_is_no_optimizer_is_an_error(self):
        with pytest.raises(OptionError, match="which lacks param_groups, step;"):
            FP16_Optimizer(nn.Linear(1, 1))

    def test_unknown_or_bad_settings_of_the_scale_are_errors(self) -> None:
        with pytest.raises(OptionError, match=r"the unknown argument 'init_scal'. Did you mean 'init_scale'"):
            dynamic(init_scal=2.0)
        with pytest.raises(OptionError, match="scale_factor is 1"):
            dynamic(scale_factor=1.0)


class TestSteps:
    @HALVES
    @pytest.mark.parametrize("scale", [1.0, 128.0])
    def test_steps_are_those_of_masters_by_hand(self, half, scale):
        model, optimizer = wrapped(half, static_loss_scale=scale)
        hand = ByHand(half, scale)
        for batch in inputs(5):
            train(model, optimizer, [batch])
            assert hand.step(batch)
            assert_same_state(model.state_dict(), hand.model.state_dict())
            assert_same_state(updated(optimizer), hand.masters)
            assert_same_state(model[0].weight.grad, hand.parameters[0].grad)  # at the scale, as Apex left them

    def test_clip_master_grads_clips_as_by_hand(self):
        model, optimizer = wrapped(static_loss_scale=128.0)
        hand = ByHand(torch.float16, 128.0)
        for batch in inputs(3):
            optimizer.zero_grad()
            optimizer.backward(loss_of(model, batch))
            norm = optimizer.clip_master_grads(0.1)
            assert norm > 0.1
            assert float(clip_grad_norm(updated(optimizer), math.inf)) == pytest.approx(0.1, rel=1e-4)
            optimizer.step()
            hand.step(batch, max_norm=0.1)
        assert_same_state(model.state_dict(), hand.model.state_dict())

    @pytest.mark.parametrize("copied", [copy.deepcopy, lambda given: pickle.loads(pickle.dumps(given))])
    def test_a_copy_clips_and_steps_as_the_original(self, copied):
        norms, pairs = [], [wrapped(static_loss_scale=128.0)]
        pairs.append(copied(pairs[0]))
        for model, optimizer in pairs:
            optimizer.backward(loss_of(model, inputs(1)[0]))
            norms.append(float(optimizer.clip_master_grads(0.1)))
            optimizer.step()
        assert norms[0] == norms[1]
        assert_same_state(pairs[0][0].state_dict(), pairs[1][0].state_dict())

    def test_steps_that_overflow_are_skipped_until_the_scale_fits(self, caplog):
        """A scale that is too large comes down, and from then on steps are those of a loop that did the same."""
        model, optimizer = dynamic(init_scale=2.0**24)
        hand = ByHand(torch.float16, 2.0**24)
        made = []
        with caplog.at_level(logging.WARNING, logger="ampatch"):
            for batch in inputs(12):
                before = copy.deepcopy((list(model.parameters()), optimizer.optimizer.state_dict()))
                optimizer.zero_grad()
                optimizer.backward(loss_of(model, batch))
                if optimizer.overflow:
                    assert optimizer.clip_master_grads(0.1) == -1
                    assert optimizer.inspect_master_grad_data() is None
                    assert optimizer.step() is None
                    assert_same_state((list(model.parameters()), optimizer.optimizer.state_dict()), before)
                else:
                    optimizer.step()
                made.append(not optimizer.overflow)
                assert hand.step(batch) is made[-1]
                assert optimizer.loss_scale == hand.scale
                assert_same_state(model.state_dict(), hand.model.state_dict())
        assert (made[0], made[-1]) == (False, True)
        assert f"Skipping step, loss scaler 0 reducing loss scale to {2.0**23}" in caplog.text

    @HALVES
    def test_on_overflow_is_called_after_a_clean_skip(self, half):
        seen: list[Any] = []
        model, optimizer = dynamic(half, on_overflow=seen.append, verbose=False)
        before = copy.deepcopy(list(model.parameters()))
        optimizer.backward(loss_of(model, inputs(1)[0]) * math.nan)
        optimizer.step()
        assert_same_state(list(model.parameters()), before)
        assert (seen[0].loss_scale_before, seen[0].loss_scale_after) == (2.0**16, 2.0**15)
        assert len(seen[0].gradients) == len(list(model.parameters()))

    def test_on_overflow_raise_raises_once_and_training_goes_on(self):
        model, optimizer = dynamic(on_overflow="raise", verbose=False)
        optimizer.backward(loss_of(model, inputs(1)[0]) * math.nan)
        with pytest.raises(GradientOverflowError, match="reducing loss scale to 32768"):
            optimizer.step()
        optimizer.zero_grad()
        before = model[0].weight.detach().clone()
        train(model, optimizer, inputs(1))
        assert not torch.equal(model[0].weight, before)

    def test_on_overflow_trace_logs_the_gradients_instead_of_the_line(self, caplog):
        model, optimizer = dynamic(on_overflow="trace")
        optimizer.backward(loss_of(model, inputs(1)[0]) * math.nan)
        optimizer.step()
        assert len(caplog.records) == 1
        assert "param_groups[0]['params'][0]" in caplog.text

    def test_a_skip_is_not_logged_without_verbose(self, caplog):
        model, optimizer = dynamic(verbose=False)
        optimizer.backward(loss_of(model, inputs(1)[0]) * math.inf)
        optimizer.step()
        assert optimizer.overflow
        assert caplog.text == ""

    def test_a_static_scale_skips_no_step(self):
        model, optimizer = wrapped(static_loss_scale=8.0)
        optimizer.backward(loss_of(model, inputs(1)[0]) * math.inf)
        assert not optimizer.overflow
        optimizer.step()
        assert not bool(model[0].weight.isfinite().all())

    def test_an_overflow_at_the_floor_of_the_scale_raises(self):
        model, optimizer = dynamic(init_scale=2.0, min_loss_scale=1.0)
        nn.init.constant_(model[0].weight, math.inf)
        train(model, optimizer, inputs(1))
        optimizer.backward(loss_of(model, inputs(1)[0]))
        with pytest.raises(LossScaleError, match="at its floor of 1 and the gradients still overflow"):
            optimizer.step()

    def test_masters_without_a_gradient_are_not_stepped(self):
        model, optimizer = wrapped()
        train(model, optimizer, inputs(1))
        unused = optimizer.fp32_from_fp16_groups[0][-1]
        before = unused.detach().clone()
        model.zero_grad()
        optimizer.backward(model[0](inputs(1)[0].half()).float().sum())
        optimizer.step()
        assert_same_bits(unused, before)


class TestGradients:
    def check_sum(self, optimizer: FP16_Optimizer, scale: float, passes: int) -> None:
        hand = ByHand(torch.float16, scale)
        hand.step(*inputs(passes))
        assert_same_state(optimizer.inspect_master_grad_data()[0], [master.grad for master in hand.masters])

    @pytest.mark.parametrize("each_is_unscaled", [False, True])
    def test_gradients_of_several_passes_add_up(self, each_is_unscaled):
        """Of float32 parameters, too, whose gradients Apex divided again and again."""
        model, optimizer = wrapped(static_loss_scale=128.0)
        for batch in inputs(3):
            optimizer.backward(loss_of(model, batch), update_master_grads=each_is_unscaled)
        if not each_is_unscaled:
            optimizer.update_master_grads()
        self.check_sum(optimizer, 128.0, 3)

    def test_gradients_are_brought_to_a_scale_that_the_user_changes(self):
        model, optimizer = dynamic()
        for scale, batch in zip((64.0, 128.0), inputs(2), strict=True):
            optimizer.loss_scale = scale
            optimizer.backward(loss_of(model, batch))
        self.check_sum(optimizer, 128.0, 2)

    @pytest.mark.parametrize("bad", [None, 0, 3], ids=["finite", "the first overflows", "the last overflows"])
    def test_the_scale_moves_once_for_all_backward_passes_of_a_step(self, bad):
        model, optimizer = dynamic(init_scale=64.0, scale_window=2, verbose=False)
        for step in range(2):
            optimizer.zero_grad()
            for number, batch in enumerate(inputs(4)):
                optimizer.backward(loss_of(model, batch) * (math.inf if bad == number and not step else 1.0))
            assert optimizer.loss_scale == (64.0 if bad is None or not step else 32.0)
            optimizer.step()
        assert optimizer.loss_scale == (128.0 if bad is None else 32.0)

    @pytest.mark.parametrize(
        ("clear", "exponent"),
        [
            (lambda _, optimizer: optimizer.zero_grad(), 13),
            (lambda _, optimizer: optimizer.optimizer.zero_grad(), 13),
            (lambda model, _: model.zero_grad(), 13),
            (lambda model, _: model.zero_grad(set_to_none=False), 13),
            (lambda *_: None, 15),
        ],
        ids=["optimizer", "inner optimizer", "model", "model, zeros", "none"],
    )
    def test_gradients_that_overflow_and_are_cleared_lower_the_scale(self, clear, exponent):
        model, optimizer = dynamic()
        for _ in range(3):  # a loop that leaves out the steps
            optimizer.backward(loss_of(model, inputs(1)[0]) * math.inf)
            assert optimizer.overflow
            for _ in range(2):
                clear(model, optimizer)
        model.zero_grad()
        optimizer.backward(loss_of(model, inputs(1)[0]))
        assert not optimizer.overflow
        assert optimizer.loss_scale == 2.0**exponent

    @pytest.mark.parametrize("is_stepped", [False, True])
    def test_a_checkpoint_keeps_an_overflow_for_the_step_that_skips_it(self, is_stepped):
        model, optimizer = dynamic(verbose=False)
        optimizer.backward(loss_of(model, inputs(1)[0]) * math.inf)
        if is_stepped:
            optimizer.step()
        _, resumed = dynamic(verbose=False)
        resumed.load_state_dict(optimizer.state_dict())
        assert resumed.overflow is not is_stepped
        resumed.zero_grad()
        resumed.zero_grad()
        assert resumed.loss_scale == 2.0**15

    @pytest.mark.parametrize("clears", ["after a step", "without a step"])
    def test_gradients_may_be_scaled_by_the_user(self, clears):
        model, optimizer = wrapped(static_loss_scale=128.0)
        if clears == "without a step":
            statistics = copy.deepcopy(model[1].state_dict())
            optimizer.backward(loss_of(model, inputs(1)[0]))
            optimizer.zero_grad()
            model[1].load_state_dict(statistics)
        for batch in inputs(2):
            model.zero_grad()
            (loss_of(model, batch) * optimizer.loss_scale).backward()
            optimizer.update_master_grads()
            found = copy.deepcopy(optimizer.inspect_master_grad_data()[0])
            optimizer.step()
        hand = ByHand(torch.float16, 128.0)
        for batch in inputs(2):
            hand.step(batch)
        assert_same_state(found, [master.grad for master in hand.masters])

    def test_a_graph_may_be_retained(self):
        model, optimizer = wrapped(static_loss_scale=128.0)
        loss = loss_of(model, inputs(1)[0])
        optimizer.backward(loss, update_master_grads=False, retain_graph=True)
        once = model[0].weight.grad.clone()
        optimizer.backward(loss)
        assert_same_bits(model[0].weight.grad, once * 2)

    @pytest.mark.parametrize("to_none", [True, False])
    def test_zero_grad_clears_gradients_of_the_model_and_of_masters(self, to_none):
        model, optimizer = wrapped()
        optimizer.backward(loss_of(model, inputs(1)[0]))
        optimizer.zero_grad(set_grads_to_None=to_none)
        for parameter in [*model.parameters(), *updated(optimizer)]:
            assert parameter.grad is None if to_none else not parameter.grad.any()

    def test_sparse_gradients_are_unscaled(self):
        grads = []
        for sparse in (True, False):
            torch.manual_seed(0)
            embedding = nn.Embedding(5, 2, sparse=sparse).half()
            optimizer = FP16_Optimizer(torch.optim.SGD(embedding.parameters(), lr=0.1), static_loss_scale=8.0)
            optimizer.backward(embedding(torch.tensor([1, 1, 3])).float().square().sum())
            grads.append(optimizer.fp32_from_fp16_groups[0][0].grad)
            optimizer.step()
        torch.testing.assert_close(grads[0].to_dense(), grads[1], rtol=2e-3, atol=0)


class TestClosures:
    def test_a_closure_of_lbfgs_sees_the_masters_in_each_call(self):
        """The same as LBFGS on masters of which the closure evaluates the rounded values."""
        options = {"lr": 0.5, "max_iter": 5}
        model, optimizer = wrapped(make=lambda p: torch.optim.LBFGS(p, **options), static_loss_scale=128.0)
        hand = converted(torch.float16)
        parameters, masters = prep_param_lists(hand)

        def closure_by_hand() -> Tensor:
            master_params_to_model_params(parameters, masters)
            hand.zero_grad()
            loss = loss_of(hand, inputs(1)[0])
            (loss * 128.0).backward()
            model_grads_to_master_grads(parameters, masters)
            for master in masters:
                master.grad /= 128.0
            return loss

        by_hand = torch.optim.LBFGS(masters, **options)
        for _ in range(2):
            optimizer.step(closure_of(model, optimizer))
            assert optimizer.first_closure_call_this_step
            by_hand.step(closure_by_hand)
            master_params_to_model_params(parameters, masters)
            assert_same_state(model.state_dict(), hand.state_dict())

    def test_a_closure_is_called_again_after_an_overflow(self):
        model, optimizer = dynamic(init_scale=2.0**24, verbose=False)
        before = model[0].weight.detach().clone()
        optimizer.step(closure_of(model, optimizer))
        assert optimizer.loss_scale < 2.0**24
        assert bool(model[0].weight.isfinite().all())
        assert not torch.equal(model[0].weight, before)


class TestCheckpoints:
    @pytest.mark.parametrize("options", [{"static_loss_scale": 64.0}, {"dynamic_loss_scale": True}], ids=str)
    def test_a_resumed_run_has_the_same_bits(self, options):
        batches = inputs(8)
        model, optimizer = wrapped(torch.float16, **options)
        train(model, optimizer, batches[:4])
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        train(model, optimizer, batches[4:])

        another, resumed = wrapped(torch.float16, **options)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        resumed.load_state_dict(saved["optimizer"])
        assert_same_bits(another[0].weight, saved["model"]["0.weight"])
        another.load_state_dict(saved["model"])
        train(another, resumed, batches[4:])
        assert_same_state(another.state_dict(), model.state_dict())
        assert_same_state(resumed.state_dict(), optimizer.state_dict())

    def test_a_checkpoint_has_apexs_keys(self):
        _, optimizer = dynamic()
        assert optimizer.state_dict().keys() == {
            "loss_scaler",
            "dynamic_loss_scale",
            "overflow",
            "first_closure_call_this_step",
            "optimizer_state_dict",
            "fp32_from_fp16",
        }

    def test_a_checkpoint_of_apex_with_its_dynamic_scaler_loads(self):
        """As the class that it pickled is found under this name, without what that has beyond Apex's."""
        scaler = pickle.loads(pickle.dumps(DynamicLossScaler()))
        vars(scaler).clear()
        vars(scaler).update(cur_scale=4096.0, cur_iter=10, last_overflow_iter=6, scale_factor=2.0, scale_window=5)
        _, optimizer = dynamic()
        optimizer.load_state_dict({**optimizer.state_dict(), "loss_scaler": scaler})
        for expected in (4096.0, 8192.0):  # the fourth and the fifth clean step after the overflow
            optimizer.loss_scaler.update_scale(False)
            scaler.update_scale(False)
            assert optimizer.loss_scale == scaler.loss_scale == expected

    @pytest.mark.parametrize("pickled", [False, True], ids=["fields of Apex's scaler", "late Apex's pickled object"])
    def test_a_checkpoint_of_apex_with_a_scaler_of_amp_loads(self, pickled):
        fields = {"_loss_scale": 512.0, "_unskipped": 2, "_scale_seq_len": 4, "_max_loss_scale": 2.0**24}
        scaler = SimpleNamespace(**fields, _min_loss_scale=None)
        if pickled:  # it pickled the object, under the name that its class has here
            saved = LossScalerOfAmp.__new__(LossScalerOfAmp)
            vars(saved).update(fields, dynamic=True)
            scaler = pickle.loads(pickle.dumps(saved))
        _, optimizer = dynamic()
        optimizer.load_state_dict({**optimizer.state_dict(), "loss_scaler": scaler})
        scales = []
        for _ in range(3):
            optimizer.loss_scaler.update_scale(False)
            scales.append(optimizer.loss_scale)
        assert scales == [512.0, 1024.0, 1024.0]

    def test_a_checkpoint_with_a_static_scale_loads(self):
        _, optimizer = dynamic()
        saved = {**optimizer.state_dict(), "dynamic_loss_scale": False, "loss_scaler": LossScaler(32.0)}
        optimizer.load_state_dict(saved)
        assert (optimizer.loss_scale, optimizer.dynamic_loss_scale) == (32.0, False)

    def test_loading_something_else_is_an_error_and_changes_nothing(self):
        model, optimizer = wrapped()
        before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        saved = optimizer.state_dict()
        with pytest.raises(OptionError, match="lacks loss_scaler, overflow"):
            optimizer.load_state_dict({k: v for k, v in saved.items() if k not in ("loss_scaler", "overflow")})
        with pytest.raises(OptionError, match=r"have the shapes \[\[\(1,\)\]\], by group"):
            optimizer.load_state_dict({**saved, "fp32_from_fp16": [[torch.zeros(1)]]})
        with pytest.raises(OptionError, match="found float without a cur_scale"):
            optimizer.load_state_dict({**saved, "loss_scaler": 1.0})
        with pytest.raises(OptionError, match="found NoneType as the state of an FP16_Optimizer"):
            optimizer.load_state_dict(None)
        assert_same_state((model.state_dict(), optimizer.state_dict()), before)


class TestProperties:
    def test_groups_and_state_are_those_of_the_inner_optimizer(self):
        _, optimizer = wrapped(static_loss_scale=4.0)
        optimizer.param_groups = groups = [dict(optimizer.optimizer.param_groups[0])]
        assert optimizer.optimizer.param_groups is groups
        optimizer.state = state = {}
        assert optimizer.optimizer.state is state

    def test_the_loss_scale_can_be_set(self):
        model, optimizer = wrapped(static_loss_scale=4.0)
        optimizer.loss_scale = 16.0
        optimizer.backward(loss_of(model, inputs(1)[0]))
        assert_same_bits(optimizer.fp32_from_fp16_groups[0][0].grad, model[0].weight.grad.float() / 16)
        with pytest.raises(OptionError, match="loss_scale is 0"):
            optimizer.loss_scale = 0


class TestNetworksInHalf:
    @pytest.mark.parametrize("in_half", [network_to_half, FP16Model])
    def test_networks_in_half_compile_into_one_graph(self, in_half):
        model = in_half(nn.Linear(4, 4))
        assert torch.compile(model, fullgraph=True, backend="eager")(torch.ones(2, 4)).dtype is torch.float16

    def test_fp16_model_takes_several_inputs(self):
        model = FP16Model(nn.Bilinear(2, 3, 1))
        assert model(torch.ones(4, 2), torch.ones(4, 3)).dtype is torch.float16
        assert list(model.state_dict()) == ["network.weight", "network.bias"]

    def test_network_to_half_leaves_batch_norms_in_float32(self):
        model = network_to_half(network())
        assert type(model[0]) is tofp16
        halves = {name for name, parameter in model.named_parameters() if parameter.dtype is torch.float16}
        assert halves == {"1.0.weight", "1.0.bias", "1.3.weight", "1.3.bias"}
        assert model(inputs(1)[0]).dtype is torch.float16

    @HALVES
    def test_convert_network_converts_all_but_batch_norms(self, half):
        model = nn.Sequential(network(), nn.BatchNorm1d(2, affine=False), nn.LSTM(2, 2))
        model[0][0].weight.grad = torch.ones(8, 4)
        model.register_buffer("count", torch.zeros(1, dtype=torch.int64))
        parameters = dict(model.named_parameters())
        assert convert_network(model, half) is model
        assert all(p is parameters[name] for name, p in model.named_parameters())
        assert model[0][0].weight.dtype is model[0][0].weight.grad.dtype is model[2].weight_ih_l0.dtype is half
        assert model[0][1].weight.dtype is model[0][1].running_mean.dtype is torch.float32
        assert model[1].running_mean.dtype is half
        assert model.count.dtype is torch.int64

    def test_convert_module_leaves_submodules_alone(self):
        model = network()
        convert_module(model, torch.float16)
        assert model[0].weight.dtype is torch.float32
        convert_module(model[0], torch.float16)
        assert (model[0].weight.dtype, model[3].weight.dtype) == (torch.float16, torch.float32)

    def test_bn_convert_float_leaves_norms_without_weights_half(self):
        model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2, affine=False)).half()
        assert BN_convert_float(model) is model
        assert (model[0].running_mean.dtype, model[1].running_mean.dtype) == (torch.float32, torch.float16)


class TestMastersByHand:
    @pytest.mark.parametrize("flat", [True, False])
    def test_masters_by_hand_are_copied_to_and_from_the_model(self, flat):
        model = nn.Linear(3, 2).half()
        frozen = nn.Parameter(torch.ones(1), requires_grad=False)
        model.register_parameter("frozen", frozen)
        parameters, masters = prep_param_lists(model, flat_master=flat)
        assert [id(p) for p in parameters] == [id(model.weight), id(model.bias)]
        assert all(type(m) is nn.Parameter and m.dtype is torch.float32 and m.requires_grad for m in masters)
        assert [m.shape for m in masters] == ([(8,)] if flat else [(2, 3), (2,)])

        for value in (1.0, 2.0):
            for parameter in parameters:
                parameter.grad = torch.full_like(parameter, value)
            model_grads_to_master_grads(parameters, masters, flat_master=flat)
            assert_same_state([m.grad for m in masters], [torch.full_like(m, value) for m in masters])

        with torch.no_grad():
            masters[0].fill_(1 / 3)
        master_params_to_model_params(parameters, masters, flat_master=flat)
        assert_same_bits(model.weight, torch.full((2, 3), 1 / 3).half())

    def test_masters_by_hand_of_parameters_without_a_gradient_have_none(self):
        model = nn.Linear(3, 2).half()
        parameters, masters = prep_param_lists(model)
        masters[0].grad = torch.ones(2, 3)
        model.bias.grad = torch.ones(2).half()
        model_grads_to_master_grads(parameters, masters)
        assert masters[0].grad is None
        parameters, (flat,) = prep_param_lists(model, flat_master=True)
        model_grads_to_master_grads(parameters, [flat], flat_master=True)
        assert_same_bits(flat.grad, torch.tensor([0.0] * 6 + [1.0] * 2))

    def test_flat_masters_of_several_types_are_an_error(self):
        with pytest.raises(OptionError, match=r"found torch\.float16, torch\.float32; expected parameters of one type"):
            prep_param_lists(converted(torch.float16), flat_master=True)

    def test_to_python_float_takes_tensors_and_lists(self):
        assert to_python_float(torch.tensor([2.5])) == 2.5
        assert to_python_float([2.5]) == 2.5


class TestLossScalers:
    def test_the_dynamic_scaler_backs_off_to_1_and_grows_by_its_window(self):
        scaler = DynamicLossScaler(init_scale=4.0, scale_factor=2.0, scale_window=2)
        scales = []
        for overflow in (True, False, False, False, False, True, True, True, True):
            scaler.update_scale(overflow)
            scales.append(scaler.loss_scale)
        assert scales == [2.0, 2.0, 4.0, 4.0, 8.0, 4.0, 2.0, 1.0, 1.0]
        assert (scaler.cur_iter, scaler.last_overflow_iter) == (9, 8)
        assert DynamicLossScaler().loss_scale == 2**32

    def test_only_the_dynamic_scaler_sees_overflows(self):
        parameters = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2).half())]
        scaler = DynamicLossScaler()
        assert not scaler.has_overflow(parameters)
        parameters[0].grad = torch.ones(2)
        assert not scaler.has_overflow(parameters)
        for bad in (math.inf, -math.inf, math.nan):
            parameters[1].grad = torch.tensor([1.0, bad]).half()
            assert scaler.has_overflow(parameters)
            assert not LossScaler().has_overflow(parameters)

    @pytest.mark.parametrize("scaler", [LossScaler(8), DynamicLossScaler(init_scale=8)], ids=["static", "dynamic"])
    def test_scalers_scale_backward_passes(self, scaler):
        parameter = nn.Parameter(torch.ones(()))
        loss = parameter * 2
        scaler.backward(loss, retain_graph=True)
        scaler.backward(loss)
        assert parameter.grad.item() == 32
        assert_same_state(scaler.scale_gradient(None, (torch.ones(1),), None), (torch.full((1,), 8.0),))
