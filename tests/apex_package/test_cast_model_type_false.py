"""Of cast_model_type=False: weights stay as they are, those that are half get masters, and losses are scaled."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from helpers import DEVICES
from torch import Tensor, nn

from ampatch import amp
from ampatch.apex import amp as apex_amp
from ampatch.apex.amp import _amp_state
from ampatch.errors import AmpWarning, OptionError

LEVELS = ("O0", "O1", "O2", "O3")
pytestmark = pytest.mark.filterwarnings("ignore:.* updates half weights:ampatch.errors.AmpWarning")


class Mixed(nn.Module):
    """A model with a float32 and a half weight, which casts for itself."""

    def __init__(self, number: int, device: str) -> None:
        super().__init__()
        self.wide = nn.Parameter(number + torch.arange(2.0, device=device))
        self.narrow = nn.Parameter(1.0 + number + torch.arange(2.0, device=device).half())

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.wide.float() * self.narrow.float()).sum()


def models_of(device: str) -> list[Mixed]:
    return [Mixed(number, device) for number in (1, 2, 3)]


def optimizers_of(models: list[Mixed], split: int) -> list[torch.optim.Optimizer]:
    """One optimizer, or two with the models before and after ``split``."""
    groups: list[dict[str, Any]] = [
        {"params": model.parameters(), "lr": lr} for model, lr in zip(models, (0.25, 0.5, 0.125), strict=True)
    ]
    parts = [groups[:split], groups[split:]]
    return [torch.optim.SGD(part, lr=0.1, momentum=0.125) for part in parts if part]


def losses_of(models: list[Mixed], device: str) -> list[Tensor]:
    x = torch.ones(2, device=device)
    return [models[0](x) + models[2](x), models[1](x) + models[2](x)]


def clear(how: str, models: list[Mixed], optimizers: list[torch.optim.Optimizer]) -> None:
    for each in optimizers if how == "optimizer" else models if how == "model" else ():
        each.zero_grad()
    if how == "none":
        for parameter in itertools.chain.from_iterable(model.parameters() for model in models):
            parameter.grad = None


def train_plainly(split: int, device: str) -> tuple[list[list[Tensor]], list[Tensor]]:
    models = models_of(device)
    optimizers = optimizers_of(models, split)
    parameters = [each for model in models for each in model.parameters()]
    gradients = []
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        sum(losses_of(models, device)).backward()
        gradients.append([each.grad.clone() for each in parameters])
        for optimizer in optimizers:
            optimizer.step()
    return gradients, [each.detach() for each in parameters]


@pytest.mark.parametrize("device", DEVICES)
class TestSeveralModelsAndLosses:
    @pytest.mark.parametrize("scalers", [1, 2])
    @pytest.mark.parametrize("split", [0, 2], ids=["one optimizer", "two optimizers"])
    @pytest.mark.parametrize("how_to_clear", ["none", "model", "optimizer"])
    @pytest.mark.parametrize("opt_level", LEVELS)
    def test_train_as_without_amp(
        self, opt_level: str, how_to_clear: str, split: int, scalers: int, device: str
    ) -> None:
        expected_gradients, expected = train_plainly(split, device)
        models = models_of(device)
        optimizers = optimizers_of(models, split)
        apex_amp.initialize(
            models, optimizers, opt_level=opt_level, verbosity=0, cast_model_type=False, num_losses=scalers
        )
        _amp_state.loss_scalers[0]._loss_scale = 4.0
        _amp_state.loss_scalers[-1]._loss_scale = 8.0
        for expected_of_step in expected_gradients:
            clear(how_to_clear, models, optimizers)
            for number, loss in enumerate(losses_of(models, device)):
                with apex_amp.scale_loss(loss, optimizers, loss_id=number % scalers) as scaled:
                    scaled.backward()
            masters = list(itertools.chain.from_iterable(map(apex_amp.master_params, optimizers)))
            for parameter, grad in zip(masters, expected_of_step, strict=True):
                torch.testing.assert_close(parameter.grad.float(), grad.float(), rtol=1e-3, atol=1e-5)
            for optimizer in optimizers:
                optimizer.step()
        for parameter, wanted in zip((p for m in models for p in m.parameters()), expected, strict=True):
            torch.testing.assert_close(parameter.detach(), wanted.to(parameter.dtype), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("device", DEVICES)
class TestWeights:
    @pytest.mark.parametrize("opt_level", [*LEVELS, "O4", "O5"])
    def test_stay_as_they_are(self, opt_level: str, device: str) -> None:
        model = Mixed(1, device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        apex_amp.initialize(model, optimizer, opt_level=opt_level, cast_model_type=False)
        assert (model.wide.dtype, model.narrow.dtype) == (torch.float32, torch.float16)
        assert _amp_state.opt_properties.cast_model_type is None
        full, half = apex_amp.master_params(optimizer)
        assert full is model.wide
        assert half.dtype is (torch.float32 if opt_level in ("O2", "O5") else torch.float16)
        assert model.state_dict()["narrow"].dtype is torch.float16
        amp.deinitialize()
        assert (model.wide.dtype, model.narrow.dtype) == (torch.float32, torch.float16)

    @pytest.mark.parametrize("opt_level", [*LEVELS, "O4", "O5"])
    def test_stay_as_the_settings_say(self, opt_level: str, device: str) -> None:
        first, model = Mixed(1, device), Mixed(1, device)
        amp.initialize(first, opt_level=opt_level, cast_model_type=False, verbosity=0)
        settings = amp.settings()
        amp.deinitialize()
        amp.initialize(model, opt_level=opt_level, cast_model_type=settings["cast_model_type"], verbosity=0)
        assert (model.wide.dtype, model.narrow.dtype) == (torch.float32, torch.float16)
        assert amp.settings() == settings

    def test_that_are_half_keep_small_updates_in_masters(self, device: str) -> None:
        model = Mixed(1, device)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        apex_amp.initialize(model, optimizer, opt_level="O2", cast_model_type=False, loss_scale=8.0)
        _, master = apex_amp.master_params(optimizer)
        for _ in range(3):
            optimizer.zero_grad()
            with apex_amp.scale_loss(model(torch.ones(2, device=device)), optimizer) as scaled:
                scaled.backward()
            optimizer.step()
        assert not torch.equal(master, master.half().float())
        assert torch.equal(model.narrow, master.half())

    def test_written_by_the_script_reach_masters_and_back(self, device: str) -> None:
        model = Mixed(1, device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        apex_amp.initialize(model, optimizer, opt_level="O2", cast_model_type=False)
        _, master = apex_amp.master_params(optimizer)
        with torch.no_grad():
            master.fill_(3.0)
            model(torch.ones(2, device=device))
            assert model.narrow.tolist() == [3.0, 3.0]
            model.narrow.fill_(5.0)
        assert [each.tolist() for each in apex_amp.master_params(optimizer)][1] == master.tolist() == [5.0, 5.0]

    def test_added_later_get_masters(self, device: str) -> None:
        model, added = Mixed(1, device), Mixed(2, device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        apex_amp.initialize([model, added], optimizer, opt_level="O2", cast_model_type=False)
        optimizer.add_param_group({"params": added.parameters()})
        assert [each.dtype for each in apex_amp.master_params(optimizer)] == [torch.float32] * 4


class TestArguments:
    @pytest.mark.parametrize("options", [{"keep_fp32": ["0"]}, {"float32_outputs": ["0"]}, {"cast_buffers": True}])
    def test_options_for_converted_weights_are_refused(self, options):
        with pytest.raises(OptionError, match="contradicts cast_model_type=False, which leaves all weights"):
            amp.initialize(nn.Sequential(nn.Linear(2, 2).half()), opt_level="O2", cast_model_type=False, **options)

    def test_inputs_and_outputs_keep_their_types(self) -> None:
        model = nn.Linear(2, 2)
        apex_amp.initialize(model, opt_level="O2", cast_model_type=False)
        assert model(torch.ones(1, 2)).dtype is torch.float32

    def test_o3_is_told_of_half_weights_and_o2_is_not(self, recwarn: pytest.WarningsRecorder) -> None:
        for opt_level in ("O2", "O3"):
            model = Mixed(1, "cpu")
            with_warning = pytest.warns(AmpWarning, match="'O3' makes no float32 masters")
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            if opt_level == "O2":
                apex_amp.initialize(model, optimizer, opt_level=opt_level, cast_model_type=False)
                assert not recwarn.list
            else:
                with with_warning:
                    apex_amp.initialize(model, optimizer, opt_level=opt_level, cast_model_type=False)

    def test_has_the_same_meaning_in_ampatchs_own_name(self) -> None:
        model = nn.Linear(2, 2)
        amp.initialize(model, opt_level="O2", cast_model_type=False)
        assert model.weight.dtype is torch.float32


class TestScaleWindow:
    def test_written_by_a_script_counts(self) -> None:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        apex_amp.initialize(model, optimizer, opt_level="O2", loss_scale="dynamic")
        scaler = apex_amp._amp_state.loss_scalers[0]
        scaler._loss_scale, scaler._scale_seq_len = 1024, 2
        scales = []
        for _ in range(4):
            with apex_amp.scale_loss(model(torch.ones(1, 2)).sum(), optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            scales.append(scaler.loss_scale())
        assert scaler._scale_seq_len == 2
        assert scales == [1024.0, 2048.0, 2048.0, 4096.0]

    def test_of_nothing_is_told_of(self) -> None:
        apex_amp.initialize(nn.Linear(2, 1), opt_level="O1")
        with pytest.raises(amp.OptionError, match="_scale_seq_len is 0; expected a whole number of at least 1"):
            apex_amp._amp_state.loss_scalers[0]._scale_seq_len = 0
