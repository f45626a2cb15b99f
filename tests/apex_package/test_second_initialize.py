"""Under Apex's name a second `initialize` with other settings replaces the first, and says if that goes on training."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings
import weakref
from typing import Any

import pytest
import torch
from helpers import assert_same_state
from optimizers import backward
from torch import Tensor, nn
from torch.nn import functional as F

from ampatch import amp
from ampatch.apex import amp as apex_amp
from ampatch.errors import AmpWarning, OptionError, UsageError
from ampatch.runtime import runtime

LEVELS = ("O0", "O1", "O2", "O3", "O5")
TOLD = r"now trains without amp: a later amp\.initialize has replaced .*amp\.initialize\(\[model, other\]"


def made(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def fold(opt_level: str, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer = made()
    model, optimizer = apex_amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0, **options)
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        backward(model(torch.randn(8, 4, generator=generator)).square().mean(), optimizer)
        optimizer.step()
    return [parameter.detach().clone() for parameter in amp.master_params(optimizer)]


def forward(model: nn.Module) -> Tensor:
    result: Tensor = model(torch.ones(3, 4))
    return result


class OfAnotherKind:
    """An optimizer that has no hooks for its steps."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.param_groups = [dict(group) for group in inner.param_groups]
        self.steps = 0

    def step(self) -> None:
        self.steps += 1

    def zero_grad(self) -> None: ...


class TestReplacing:
    @pytest.mark.parametrize("second", LEVELS)
    @pytest.mark.parametrize("first", LEVELS)
    def test_a_second_initialize_trains_as_if_there_had_been_none_before(self, first: str, second: str) -> None:
        expected = train(*fold(second))
        amp.deinitialize()
        train(*fold(first))
        assert_same_state(train(*fold(second)), expected)

    @pytest.mark.parametrize(
        "options",
        [{"loss_scale": 8.0}, {"num_losses": 2}, {"cast_lists": {"blacklist": {"torch": ["mm"]}}}, {"enabled": False}],
        ids=str,
    )
    def test_any_other_setting_replaces_the_session(self, options: dict[str, Any]) -> None:
        fold("O1")
        first = runtime.live
        model, optimizer = fold("O1", **options)
        assert runtime.live is not first
        train(model, optimizer)
        assert runtime.disabled is (options == {"enabled": False})

    @pytest.mark.parametrize("second", ["O0", "O1", "O3", "O5"])
    @pytest.mark.parametrize("with_norm", [True, False])  # without one, the optimizer has masters alone
    def test_the_same_model_may_be_initialized_at_another_level(self, with_norm: bool, second: str) -> None:
        model = made()[0] if with_norm else nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for level in ("O2", second):
            model, optimizer = apex_amp.initialize(model, optimizer, opt_level=level, verbosity=0)
            train(model, optimizer)

    def test_the_half_type_of_a_replaced_session_does_not_stay(self) -> None:
        fold("O2", cast_model_type=torch.bfloat16)
        expected = apex_amp._amp_state.opt_properties
        amp.deinitialize()
        fold("O2")
        fold("O2", cast_model_type=torch.bfloat16)
        assert apex_amp._amp_state.opt_properties == expected

    def test_init_replaces_a_session_and_is_replaced(self) -> None:
        handle = apex_amp.init()
        later = apex_amp.init(allow_banned=True)
        handle.deactivate()
        assert later.is_active()
        fold("O1")
        later.deactivate()
        assert runtime.live is not None
        model, optimizer = made()
        with apex_amp.init(loss_scale=8.0):
            train(model, optimizer)
        assert not apex_amp.init(enabled=False).is_active()

    def test_a_model_of_a_session_replaced_by_init_does_not_warn(self) -> None:
        model, optimizer = fold("O1")
        with apex_amp.init():
            train(model, optimizer)

    def test_functions_registered_after_initialize_count_for_the_next(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(F, "given", lambda x: x.dtype, raising=False)
        fold("O1")
        for wanted, register in [
            (torch.float16, apex_amp.register_half_function),
            (torch.float16, apex_amp.register_half_function),
            (torch.bfloat16, apex_amp.register_bfloat16_function),
            (torch.float32, apex_amp.register_float_function),
        ]:
            live = runtime.live
            had = live is not None and bool(live.casts.registered)
            register(F, "given")
            fold("O1")
            assert F.given(torch.ones(2)) is wanted
            assert (runtime.live is live) is (had and wanted is torch.float16)
        amp.deinitialize()
        runtime.registered.clear()

    def test_a_second_initialize_that_fails_leaves_the_first(self) -> None:
        model, optimizer = fold("O1")
        other, of_another = made()[0], torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
        with pytest.raises(OptionError, match="none of them is the model's"):
            apex_amp.initialize(other, of_another, opt_level="O2")
        with pytest.raises(OptionError, match="cast_lists"):
            apex_amp.initialize(other, opt_level="O2", cast_lists={})
        train(model, optimizer)

    def test_a_replaced_model_and_optimizer_are_freed(self) -> None:
        model, optimizer = fold("O2")
        gone = [weakref.ref(model), weakref.ref(optimizer)]
        fold("O1")
        del model, optimizer
        gc.collect()
        assert [reference() for reference in gone] == [None, None]

    def test_a_second_initialize_is_an_error_under_ampatchs_name(self) -> None:
        model, optimizer = made()
        amp.initialize(model, optimizer, half_dtype=torch.float16, verbosity=0)
        live = runtime.live
        with pytest.raises(UsageError, match=r"Type amp\.deinitialize\(\) first, or give the same arguments"):
            amp.initialize(*made(), opt_level="O2", half_dtype=torch.float16)
        with pytest.raises(UsageError, match=r"amp\.deinitialize\(\)"):
            amp.init()
        with pytest.raises(UsageError, match=r"registered before amp\.initialize"):
            amp.register_half_function(F, "relu")
        amp.initialize(*made(), enabled=False)
        assert runtime.live is live


class TestReplacedModels:
    @pytest.mark.parametrize("first", LEVELS)
    def test_a_forward_of_a_replaced_model_in_training_warns_once(self, first: str) -> None:
        model, optimizer = fold(first)
        fold("O1", loss_scale=4.0)
        with pytest.warns(AmpWarning, match=rf"this Sequential {TOLD}") as told:
            forward(model)
        assert len(told) == 1
        assert told[0].filename == __file__
        forward(model)
        optimizer.step()

    def test_a_step_of_a_replaced_optimizer_warns_once(self) -> None:
        model, optimizer = fold("O2")
        fold("O1")
        with pytest.warns(AmpWarning, match=rf"this SGD {TOLD}") as told:
            optimizer.step()
        assert "opt_level is 'O2' (this call: 'O1')" in str(told[0].message)
        optimizer.step()
        forward(model)

    def test_a_step_of_a_replaced_optimizer_that_is_not_torchs_warns_once(self) -> None:
        model, inner = made()
        model, optimizer = apex_amp.initialize(model, OfAnotherKind(inner), opt_level="O1", verbosity=0)
        fold("O2")
        with pytest.warns(AmpWarning, match=rf"this OfAnotherKind {TOLD}"):
            optimizer.step()
        optimizer.step()
        assert optimizer.steps == 2
        amp.deinitialize()
        assert "step" not in vars(optimizer)

    def test_a_replaced_optimizer_with_a_scheduler_warns(self) -> None:
        _, optimizer = fold("O1")
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        fold("O2")
        with pytest.warns(AmpWarning, match=TOLD):
            optimizer.step()
        scheduler.step()

    def test_a_model_replaced_by_a_disabled_amp_warns(self) -> None:
        model, _ = fold("O1")
        fold("O1", enabled=False)
        with pytest.warns(AmpWarning, match="enabled=False"):
            forward(model)

    def test_each_replacing_call_has_a_warning(self) -> None:
        first, second = fold("O1"), fold("O2")
        third = fold("O3")
        with pytest.warns(AmpWarning, match=TOLD):
            forward(first[0])
        forward(second[0])
        fold("O1")
        with pytest.warns(AmpWarning, match=TOLD):
            forward(third[0])

    def test_evaluating_a_replaced_model_does_not_warn(self) -> None:
        model, _ = fold("O2")
        fold("O1")
        with torch.no_grad():
            forward(model)
        forward(model.eval())
        copy.deepcopy(model).train()(torch.ones(3, 4))
        assert model[0].weight.dtype is torch.float32

    def test_a_model_that_has_joined_the_later_session_does_not_warn(self) -> None:
        model, optimizer = fold("O1")
        whole = nn.Sequential(model)
        apex_amp.initialize(whole, optimizer, opt_level="O2", verbosity=0)
        train(whole, optimizer)

    def test_a_replaced_model_does_not_warn_once_amp_is_off(self) -> None:
        model, optimizer = fold("O1")
        fold("O2")
        apex_amp._amp_state.handle._deactivate()
        forward(model)
        optimizer.step()
        amp.deinitialize()
        assert not model._forward_pre_hooks
        assert runtime.replaced is None

    def test_a_replaced_model_and_optimizer_are_copied_and_pickled(self) -> None:
        model, optimizer = fold("O1")
        fold("O2")
        optimizer.zero_grad()
        for each in (copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))):
            forward(each[0])
            each[1].step()
        torch.save(model, io.BytesIO())

    def test_scaling_a_loss_for_a_replaced_optimizer_is_an_error(self) -> None:
        model, optimizer = fold("O1")
        fold("O2")
        told = r"handed to an amp\.initialize that a later one has replaced, .*opt_level is 'O1' \(this call: 'O2'\)"
        with pytest.raises(UsageError, match=told), apex_amp.scale_loss(torch.ones(()), optimizer):
            pass
        for question in (amp.step_was_skipped, amp.skipped_steps, amp.unscale_, amp.grads_are_unscaled):
            with pytest.raises(UsageError, match=told):
                question(optimizer)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AmpWarning)
            forward(model)
        with pytest.raises(UsageError, match=told), apex_amp.scale_loss(torch.ones(()), [optimizer]):
            pass
