"""Of the public functions: what they take, what they give back, and what one call means for the next."""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import HALF_DTYPES, assert_same_bits, assert_same_state, dtype_name
from torch import Tensor, nn

import ampatch
from ampatch import amp, opt_levels
from ampatch.apex import amp as apex_amp
from ampatch.errors import AmpWarning, OptionError, UsageError
from ampatch.native import calls, kernels
from ampatch.runtime import runtime


def product(dtype: torch.dtype = torch.float32) -> Tensor:
    """A whitelisted function on a weight; its type tells whether casts are on."""
    return torch.mm(torch.ones(2, 2, dtype=dtype), torch.ones(2, 2, dtype=dtype, requires_grad=True)).detach()


def exponential(dtype: torch.dtype) -> Tensor:
    """A function that is in the blacklist for float16 alone."""
    return torch.exp(torch.ones(2, dtype=dtype))


@pytest.fixture
def model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 3)


@pytest.fixture
def optimizer(model: nn.Linear) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def initialize(*args: Any, **options: Any) -> Any:
    return amp.initialize(*args, **{"verbosity": 0, **options})


def loss_of(model: nn.Module) -> Tensor:
    return model(torch.linspace(-1, 1, 6).reshape(2, 3)).square().sum()


def backward(loss: Tensor, optimizer: Any, **options: Any) -> None:
    with amp.scale_loss(loss, optimizer, **options) as scaled_loss:
        scaled_loss.backward()


class TestSignatures:
    """Positional arguments mean what they mean in Apex."""

    @pytest.mark.parametrize(
        ("function", "positional"),
        [
            (
                amp.initialize,
                """models optimizers enabled opt_level cast_model_type patch_torch_functions keep_batchnorm_fp32
                master_weights loss_scale cast_model_outputs num_losses verbosity min_loss_scale max_loss_scale""",
            ),
            (amp.init, "enabled loss_scale enable_caching verbose allow_banned"),
            (amp.scale_loss, "loss optimizers loss_id model delay_unscale delay_overflow_check"),
            (amp.register_half_function, "module name"),
            (amp.state_dict, ""),
            (amp.load_state_dict, "state_dict"),
            (amp.master_params, "optimizer"),
        ],
        ids=lambda value: getattr(value, "__name__", ""),
    )
    def test_order(self, function: Callable[..., Any], positional: str) -> None:
        parameters = inspect.signature(function).parameters.values()
        assert [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == positional.split()

    def test_what_apex_did_not_have_is_keyword_only(self) -> None:
        parameters = inspect.signature(amp.initialize).parameters.values()
        assert {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} == {
            "half_dtype",
            "cast_lists",
            "init_scale",
            "scale_factor",
            "growth_factor",
            "backoff_factor",
            "scale_window",
            "hysteresis",
            "exact_hooks",
            "keep_fp32",
            "float32_outputs",
            "cast_buffers",
            "patch_torch_functions_type",
            "profile_casts",
            "on_overflow",
            "check_finite",
            "scaler",
            "fused_linear",
        }

    @pytest.mark.parametrize(
        ("call", "name", "meant"),
        [
            (lambda: amp.initialize(nn.Linear(2, 2), dtype="float16"), "dtype", "half_dtype"),
            (lambda: apex_amp.initialize(nn.Linear(2, 2), dtype="float16"), "dtype", "half_dtype"),
            (lambda: amp.init(half_type="float16"), "half_type", "half_dtype"),
            (lambda: amp.convert_model(nn.Linear(2, 2), exclude="0"), "exclude", "excluded"),
        ],
        ids=["initialize", "initialize of apex", "init", "convert_model"],
    )
    def test_an_unknown_name_raises_with_the_one_that_was_meant(
        self, call: Callable[[], object], name: str, meant: str
    ) -> None:
        with pytest.raises(OptionError, match=f"got the unknown argument {name!r}. Did you mean '{meant}'") as caught:
            call()

        assert str(caught.value).startswith("amp.")
        assert not amp.is_on()

    def test_all_by_position(self, model, optimizer):
        amp.initialize(
            model, optimizer, True, "O1", None, None, None, None, "128.0", None, 2, 0, None, 2.0**20, half_dtype=None
        )
        assert [amp.get_loss_scale(0), amp.get_loss_scale(1)] == [128, 128]

    def test_all_that_is_public_is_exported(self):
        assert all(hasattr(amp, name) for name in amp.__all__)
        here = {
            name
            for name, value in vars(amp).items()
            if getattr(value, "__module__", "") == "ampatch.amp" and not name.startswith("_")
        }
        assert here <= set(amp.__all__)
        assert ampatch.amp is amp


class TestReturnShape:
    def test_model_alone(self, model):
        assert initialize(model) is model

    def test_model_and_optimizer(self, model, optimizer):
        assert initialize(model, optimizer) == (model, optimizer)

    def test_lists(self, model, optimizer):
        other = nn.Linear(1, 1)
        models, optimizers = initialize([model, other], [optimizer])
        assert (models, optimizers) == ([model, other], [optimizer])
        assert initialize([other]) == [other]

    @pytest.mark.parametrize("none", [[], ()], ids=["list", "tuple"])
    def test_no_optimizers_in_a_list(self, model, none):
        assert initialize(model, none) == (model, none)

    def test_list_of_models_and_one_optimizer(self, model, optimizer):
        assert initialize([model], optimizer) == ([model], optimizer)

    def test_of_the_very_objects_that_came(self, model, optimizer):
        parameters = list(model.parameters())
        found_model, found_optimizer = initialize(model, optimizer)
        assert (found_model is model, found_optimizer is optimizer) == (True, True)
        assert type(optimizer) is torch.optim.SGD
        for parameter, before in zip(found_model.parameters(), parameters, strict=True):
            assert parameter is before


class TestDisabled:
    @pytest.fixture(params=["initialize", "init"])
    def disabled(self, request, model, optimizer) -> None:
        if request.param == "initialize":
            assert amp.initialize(model, optimizer, enabled=False) == (model, optimizer)
        else:
            amp.init(enabled=False)

    def test_gives_everything_back_untouched_and_unchecked(self):
        anything = object()
        assert amp.initialize(anything, enabled=False) is anything
        assert amp.initialize([anything], [], enabled=False, opt_level="O9") == ([anything], [])

    @pytest.mark.usefixtures("disabled")
    def test_scale_loss_yields_the_loss_itself(self, model, optimizer):
        for loss in (loss_of(model), 3, None):
            with amp.scale_loss(loss, optimizer, loss_id=7, delay_unscale=True) as scaled_loss:
                assert scaled_loss is loss

    @pytest.mark.usefixtures("disabled")
    def test_every_other_call_does_nothing(self, model, optimizer):
        assert amp.state_dict() == {}
        amp.load_state_dict({"loss_scaler0": {"loss_scale": 2.0, "unskipped": 0}})
        assert amp.get_loss_scale(3) == 1
        assert amp.step_was_skipped(optimizer) is False
        assert amp.skipped_steps(optimizer) == 0
        assert list(amp.master_params(optimizer)) == list(model.parameters())
        assert amp.cast_counts() == amp.CastCounts(0, 0)
        amp.clear_cache()
        with amp.disable_casts():
            assert product().dtype is torch.float32
        assert amp.half_function(product)(torch.float32).dtype is torch.float32
        assert "step" not in vars(optimizer)
        amp.deinitialize()

    @pytest.mark.usefixtures("disabled")
    def test_trains_as_without_amp(self, model, optimizer):
        reference = copy.deepcopy(model)
        plain = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
        for _ in range(2):
            optimizer.zero_grad()
            backward(loss_of(model), optimizer)
            optimizer.step()
            plain.zero_grad()
            loss_of(reference).backward()
            plain.step()
        assert_same_bits(model.weight, reference.weight)

    @pytest.mark.usefixtures("disabled")
    def test_ends_with_initialize_or_deinitialize(self, model, optimizer):
        amp.deinitialize()
        with pytest.raises(UsageError):
            amp.state_dict()
        amp.initialize(model, optimizer, enabled=False)
        initialize(model, optimizer)
        assert set(amp.state_dict()) == {"loss_scaler0"}

    def test_ends_with_init(self, model):
        amp.initialize(model, enabled=False)
        with amp.init():
            assert set(amp.state_dict()) == {"loss_scaler0"}

    def test_does_not_reach_a_session_that_is_live(self, model, optimizer):
        initialize(model, optimizer)
        other = nn.Linear(1, 1)
        assert amp.initialize(other, enabled=False) is other
        assert set(amp.state_dict()) == {"loss_scaler0"}
        assert not other._forward_hooks


class TestHalfDtype:
    def test_is_bfloat16_on_the_cpu(self, model):
        initialize(model)
        assert product().dtype is torch.bfloat16

    @pytest.mark.gpu
    def test_is_float16_on_a_gpu(self, model):
        initialize(model.cuda())
        assert torch.mm(torch.ones(2, 2, device="cuda"), torch.ones(2, 2, device="cuda")).dtype is torch.float16

    @pytest.mark.skipif(torch.accelerator.is_available(), reason="says what holds without an accelerator")
    @pytest.mark.parametrize(
        "model", [nn.Module(), nn.Linear(2, 2, device="meta")], ids=["no-parameters", "not-put-anywhere-yet"]
    )
    def test_is_that_of_the_machine_where_the_model_does_not_tell(self, model):
        initialize(model)
        assert product().dtype is torch.bfloat16

    @pytest.mark.parametrize("half_dtype", HALF_DTYPES, ids=dtype_name)
    def test_is_that_of_weights_that_are_half(self, half_dtype):
        initialize(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).to(half_dtype)))
        assert product().dtype is half_dtype

    @pytest.mark.skipif(torch.accelerator.is_available(), reason="says what holds without an accelerator")
    def test_is_that_of_the_device_if_weights_are_of_both(self):
        initialize(nn.ModuleList(nn.Linear(3, 3).to(half_dtype) for half_dtype in HALF_DTYPES))
        assert product().dtype is torch.bfloat16

    @pytest.mark.parametrize("name", ["half_dtype", "patch_torch_functions_type"])
    @pytest.mark.parametrize("half_dtype", HALF_DTYPES, ids=dtype_name)
    def test_is_what_was_asked_for(self, model, half_dtype, name):
        initialize(model, **{name: half_dtype})
        assert product().dtype is half_dtype

    @pytest.mark.parametrize("name", ["half_dtype", "patch_torch_functions_type"])
    @pytest.mark.parametrize(
        ("text", "half_dtype"),
        [
            *((text, torch.float16) for text in ("float16", "torch.float16", "half", "fp16")),
            *((text, torch.bfloat16) for text in ("bfloat16", "torch.bfloat16", "bf16")),
        ],
    )
    @pytest.mark.covering(1)
    def test_may_be_named(self, model, name, text, half_dtype):
        initialize(model, **{name: text})
        assert product().dtype is half_dtype
        initialize(nn.Linear(1, 1), half_dtype=half_dtype)  # the same settings

    @pytest.mark.parametrize("name", ["half_dtype", "patch_type"])
    def test_may_be_named_to_init(self, name):
        with amp.init(**{name: "float16"}):
            assert product().dtype is torch.float16

    def test_of_weights_and_outputs_may_be_named(self, model):
        initialize(model, opt_level="O2", cast_model_type="bfloat16", cast_model_outputs="float64")
        assert model.weight.dtype is torch.bfloat16
        assert model(torch.ones(1, 3)).dtype is torch.float64

    def test_may_be_named_twice_if_it_is_the_same(self, model):
        initialize(model, half_dtype="half", patch_torch_functions_type=torch.float16)
        assert product().dtype is torch.float16

    def test_may_be_said_twice_if_it_is_the_same(self, model):
        initialize(model, half_dtype=torch.float16, patch_torch_functions_type=torch.float16)
        assert product().dtype is torch.float16

    @pytest.mark.parametrize("name", ["half_dtype", "patch_type"])
    @pytest.mark.parametrize("half_dtype", HALF_DTYPES, ids=dtype_name)
    @pytest.mark.covering(1)
    def test_of_init(self, half_dtype, name):
        with amp.init(**{name: half_dtype}):
            assert product().dtype is half_dtype

    def test_of_o5_is_bfloat16(self, model):
        initialize(model, opt_level="O5")
        assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}

    def test_of_o4_is_bfloat16(self, model):
        initialize(model, opt_level="O4")
        assert product().dtype is torch.bfloat16
        assert exponential(torch.bfloat16).dtype is torch.bfloat16


class TestLevels:
    """The rows of the table; of the conversion of weights, tests/weights/test_conversion.py has more."""

    @pytest.mark.parametrize("half_dtype", HALF_DTYPES, ids=dtype_name)
    @pytest.mark.parametrize("level", ["O0", "O1", "O4"])
    def test_weights_stay_as_they_are(self, model, optimizer, level, half_dtype):
        before = copy.deepcopy(model.state_dict())
        initialize(model, optimizer, opt_level=level, half_dtype=None if level == "O4" else half_dtype)
        for name, value in model.state_dict().items():
            assert_same_bits(value, before[name])

    @pytest.mark.parametrize("half_dtype", HALF_DTYPES, ids=dtype_name)
    @pytest.mark.parametrize("options", [{"opt_level": "O0"}, {"opt_level": "O1", "cast_model_type": torch.float32}])
    def test_half_weights_become_float32_where_the_level_has_them(self, model, half_dtype, options):
        initialize(model.to(half_dtype), **options)
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        assert model(torch.ones(1, 3, dtype=half_dtype)).dtype is torch.float32
        amp.deinitialize()
        assert {parameter.dtype for parameter in model.parameters()} == {half_dtype}
        initialize(model.double(), **options)
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}

    @pytest.mark.parametrize("half_dtype", HALF_DTYPES, ids=dtype_name)
    @pytest.mark.parametrize(("level", "casts"), [("O0", False), ("O1", True)])
    def test_functions_cast_or_do_not(self, model, level, casts, half_dtype):
        initialize(model, opt_level=level, half_dtype=half_dtype)
        assert product().dtype is (half_dtype if casts else torch.float32)
        assert model(torch.ones(1, 3)).dtype is (half_dtype if casts else torch.float32)

    @pytest.mark.parametrize(("level", "patched"), [("O0", True), ("O1", False), ("O4", False)])
    def test_patching_may_be_overridden(self, model, level, patched):
        initialize(model, opt_level=level, patch_torch_functions=patched)
        assert product().dtype is (torch.bfloat16 if patched else torch.float32)

    @pytest.mark.parametrize(
        ("level", "half_dtype", "loss_scale"),
        [
            ("O0", torch.float16, 1),
            ("O1", torch.float16, 2.0**16),
            ("O1", torch.bfloat16, 1),
            ("O2", torch.float16, 2.0**16),
            ("O2", torch.bfloat16, 1),
            ("O3", torch.float16, 1),
            ("O3", torch.bfloat16, 1),
            ("O4", torch.bfloat16, 1),
            ("O5", torch.bfloat16, 1),
        ],
        ids=str,
    )
    def test_default_loss_scale(self, model, level, half_dtype, loss_scale):
        initialize(model, opt_level=level, half_dtype=half_dtype)
        assert amp.get_loss_scale() == loss_scale

    @pytest.mark.parametrize("level", opt_levels.LEVELS)
    @pytest.mark.parametrize(
        ("loss_scale", "expected"), [("dynamic", 2.0**16), (128, 128), ("128.0", 128), (1.0, 1), (0.5, 0.5)]
    )
    @pytest.mark.covering(1)
    def test_loss_scale_may_be_overridden(self, model, level, loss_scale, expected):
        initialize(model, opt_level=level, loss_scale=loss_scale)
        assert amp.get_loss_scale() == expected
        assert runtime.live.losses.scalers[0].dynamic is (loss_scale == "dynamic")

    @pytest.mark.parametrize("value", [True, False, "True", "False", None])
    def test_keep_batchnorm_fp32_is_taken_where_it_contradicts_nothing(self, model, value):
        assert initialize(model, opt_level="O0", keep_batchnorm_fp32=value) is model

    def test_scale_settings_reach_the_scale(self, model, optimizer):
        initialize(
            model,
            optimizer,
            loss_scale="dynamic",
            init_scale=4.0,
            scale_factor=4.0,
            scale_window=2,
            hysteresis=2,
            min_loss_scale=2.0,
            max_loss_scale=32.0,
        )
        scales = []
        for factor in (1, 1, 1, 1, math.inf, math.inf, math.inf):
            optimizer.zero_grad()
            backward(loss_of(model) * factor, optimizer)
            optimizer.step()
            scales.append(amp.get_loss_scale())
        assert scales == [4, 16, 16, 32, 32, 8, 2]

    def test_growth_and_backoff_apart(self, model, optimizer):
        initialize(model, optimizer, loss_scale="dynamic", growth_factor=8.0, backoff_factor=0.25, scale_window=1)
        scales = []
        for factor in (1, math.inf, math.inf):
            optimizer.zero_grad()
            backward(loss_of(model) * factor, optimizer)
            optimizer.step()
            scales.append(amp.get_loss_scale())
        assert scales == [2.0**19, 2.0**17, 2.0**15]


class TestVerbosity:
    @pytest.mark.parametrize("verbosity", [0, False, -1])
    def test_of_nothing_is_silent(self, model, optimizer, verbosity, caplog, capfd):
        kernels.prepare()  # the first session of a process tells what it runs on
        calls.prepare()
        caplog.set_level(logging.DEBUG)
        amp.initialize(model, optimizer, verbosity=verbosity)
        assert caplog.records == []
        assert capfd.readouterr() == ("", "")

    @pytest.mark.parametrize("options", [{}, {"verbosity": 1}, {"verbosity": 2}], ids=["default", "1", "2"])
    def test_of_one_tells_the_settings_through_logging_and_prints_nothing(
        self, model, optimizer, options, caplog, capfd
    ):
        caplog.set_level(logging.DEBUG)
        amp.initialize(model, optimizer, opt_level="O4", **options)
        (record,) = caplog.records
        assert (record.name, record.levelname) == ("ampatch", "INFO")
        assert "opt_level='O4'" in record.getMessage()
        assert capfd.readouterr() == ("", "")


class TestInitializeAgain:
    def test_second_model_joins_under_the_same_settings(self, model, optimizer):
        initialize(model, optimizer, half_dtype=torch.float16)
        live = runtime.live
        other = nn.Linear(3, 3)
        other_optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
        initialize(other, other_optimizer, half_dtype=torch.float16)
        assert runtime.live is live
        for each in (model, other):
            with amp.scale_loss(loss_of(each), [optimizer, other_optimizer]) as scaled_loss:
                scaled_loss.backward()
            assert all(parameter.grad is not None for parameter in each.parameters())
        amp.deinitialize()
        for each in (model, other):
            assert not each._forward_hooks
        assert "step" not in vars(other_optimizer)

    def test_half_dtype_need_not_be_said_again(self, model):
        initialize(model, half_dtype=torch.float16)
        initialize(nn.Linear(1, 1))
        assert product().dtype is torch.float16

    def test_with_the_same_lists_from_a_file(self, model, tmp_path):
        lists = tmp_path / "lists.yaml"
        lists.write_text("blacklist: {torch: [mm]}\n", encoding="utf-8")
        initialize(model, cast_lists=lists)
        initialize(nn.Linear(1, 1), cast_lists=lists)
        assert product(torch.bfloat16).dtype is torch.float32

    def test_second_optimizer_of_the_first_model_joins(self, model, optimizer):
        initialize(model, optimizer)
        other = torch.optim.Adam(model.parameters())
        initialize(nn.Linear(1, 1), other)
        backward(loss_of(model), other)

    def test_model_that_is_adopted_already_is_hooked_once(self, model):
        initialize(model)
        initialize(model)
        initialize([model, model])
        assert len(model._forward_hooks) == 1

    def test_joining_does_not_reset_the_scale(self, model, optimizer):
        initialize(model, optimizer, loss_scale="dynamic")
        backward(loss_of(model) * math.inf, optimizer)
        optimizer.step()
        initialize(nn.Linear(1, 1), loss_scale="dynamic")
        assert amp.get_loss_scale() == 2.0**15

    def test_new_optimizers_begin_with_a_new_scale(self, model, optimizer):
        initialize(model, optimizer, loss_scale="dynamic")
        backward(loss_of(model) * math.inf, optimizer)
        optimizer.step()
        other_model = nn.Linear(3, 1)
        other = torch.optim.SGD(other_model.parameters(), lr=0.1)
        initialize(other_model, other, loss_scale="dynamic")
        assert amp.get_loss_scale() == amp.stats()["loss_scale"] == 2.0**16
        backward(loss_of(model) * math.inf, optimizer)
        optimizer.step()
        assert [state["loss_scale"] for state in amp.state_dict().values()] == [2.0**16, 2.0**14]
        amp.load_state_dict({f"loss_scaler{i}": {"loss_scale": 8.0 * 2**i, "unskipped": 0} for i in range(2)})
        backward(loss_of(model) * math.inf, optimizer)
        optimizer.step()
        assert [state["loss_scale"] for state in amp.state_dict().values()] == [8.0, 8.0]

    def test_new_optimizers_share_the_scale_before_the_first_step(self, model, optimizer):
        initialize(model, optimizer, loss_scale="dynamic")
        other_model = nn.Linear(3, 1)
        other = torch.optim.SGD(other_model.parameters(), lr=0.1)
        initialize(other_model, other, loss_scale="dynamic")
        backward(loss_of(model) * math.inf, [optimizer, other])
        other.step()
        optimizer.step()
        assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 2.0**15, "unskipped": 0}}

    def test_the_next_trial_does_not_inherit_the_scale_of_the_last(self):
        def trial(factor: float) -> list[float]:
            model = nn.Linear(3, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            initialize(model, optimizer, loss_scale="dynamic")
            scales = []
            for _ in range(3):
                backward(loss_of(model) * factor, optimizer)
                optimizer.step()
                scales.append(amp.get_loss_scale())
            return scales

        assert trial(math.inf) == [2.0**15, 2.0**14, 2.0**13]
        assert trial(1.0) == [2.0**16] * 3
        assert len(amp.state_dict()) == 1

    def test_another_policy_is_welcome_after_deinitialize(self, model, optimizer):
        initialize(model, optimizer, half_dtype=torch.float16)
        amp.deinitialize()
        initialize(model, optimizer, half_dtype=torch.bfloat16)
        assert product().dtype is torch.bfloat16

    def test_deinitialize_may_be_called_at_any_time(self, model):
        amp.deinitialize()
        initialize(model)
        amp.deinitialize()
        amp.deinitialize()
        with pytest.raises(UsageError):
            amp.state_dict()


class TestInit:
    def test_ends_with_its_block(self):
        with amp.init() as handle:
            assert isinstance(handle, amp.Handle)
            assert product().dtype is torch.bfloat16
        assert product().dtype is torch.float32

    def test_ends_with_its_block_where_that_raises(self):
        with pytest.raises(ZeroDivisionError), amp.init():
            raise ZeroDivisionError
        assert runtime.live is None

    def test_deactivate_undoes_it_and_a_second_time_nothing(self, model):
        handle = amp.init()
        handle.deactivate()
        assert product().dtype is torch.float32
        initialize(model)
        handle.deactivate()
        assert product().dtype is torch.bfloat16

    def test_handle_of_what_was_disabled_undoes_nothing(self, model):
        with amp.init(enabled=False):
            initialize(model)
        assert product().dtype is torch.bfloat16

    def test_deinitialize_undoes_it_too(self):
        amp.init()
        amp.deinitialize()
        assert product().dtype is torch.float32

    @pytest.mark.parametrize("half_dtype", HALF_DTYPES, ids=dtype_name)
    def test_scale_is_dynamic_by_default_in_either_half_type(self, half_dtype):
        with amp.init(half_dtype=half_dtype):
            assert amp.get_loss_scale() == 2.0**16
        with amp.init(loss_scale=1, half_dtype=half_dtype):
            assert amp.get_loss_scale() == 1

    @pytest.mark.parametrize("half_dtype", HALF_DTYPES, ids=dtype_name)
    def test_optimizer_is_adopted_by_its_first_loss(self, model, optimizer, half_dtype):
        with amp.init(half_dtype=half_dtype):
            assert "step" not in vars(optimizer)
            backward(loss_of(model) * math.inf, optimizer)
            optimizer.step()
            assert amp.step_was_skipped(optimizer)
            assert model.weight.isfinite().all()
            optimizer.zero_grad()
            backward(loss_of(model), [optimizer])
            before = model.weight.detach().clone()
            optimizer.step()
            assert (amp.step_was_skipped(optimizer), amp.skipped_steps(optimizer)) == (False, 1)
            assert not torch.equal(model.weight, before)
        assert "step" not in vars(optimizer)

    @pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.LBFGS], ids=["SGD", "LBFGS"])
    def test_optimizer_cannot_be_adopted_in_the_closure_of_its_step(self, model, make):
        optimizer = make(model.parameters(), lr=0.1)
        before = copy.deepcopy(model.state_dict())

        def closure() -> torch.Tensor:
            loss = loss_of(model) * math.inf
            backward(loss, optimizer)
            return loss

        with amp.init(half_dtype=torch.float16):
            with pytest.raises(
                amp.UsageError, match=r"closure of its step\(\).* type model, optimizer = amp.initialize"
            ):
                optimizer.step(closure)
            assert "step" not in vars(optimizer)
        assert_same_state(model.state_dict(), before)
        assert all(parameter.grad is None for parameter in model.parameters())

    def test_optimizer_of_a_loss_that_is_refused_is_not_adopted(self, model, optimizer):
        with amp.init():
            with (
                pytest.raises(amp.OptionError, match="loss_id is 7"),
                amp.scale_loss(loss_of(model), optimizer, loss_id=7),
            ):
                pytest.fail("the block was entered")
            assert "step" not in vars(optimizer)

    def test_optimizer_that_stands_there_twice_is_adopted_once(self, model, optimizer):
        step = optimizer.step
        with amp.init():
            backward(loss_of(model), [optimizer, optimizer])
            assert optimizer.step.__wrapped__ == step

    def test_cast_lists(self):
        with amp.init(half_dtype=torch.bfloat16, cast_lists={"unlisted": {"torch": ["mm"]}}):
            assert product().dtype is torch.float32

    @pytest.mark.parametrize(("loss_scale", "expected"), [("dynamic", 2.0**16), (1.0, 1), ("64", 64)])
    def test_loss_scale(self, loss_scale, expected):
        with amp.init(loss_scale=loss_scale):
            assert amp.get_loss_scale() == expected

    def test_banned_functions_raise_unless_they_are_allowed(self):
        probabilities, target = torch.full((2,), 0.5, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bfloat16)
        with (
            amp.init(half_dtype=torch.bfloat16),
            pytest.raises(amp.BannedFunctionError, match="with_logits"),
        ):
            nn.functional.binary_cross_entropy(probabilities, target)
        with amp.init(half_dtype=torch.bfloat16, allow_banned=True):
            assert nn.functional.binary_cross_entropy(probabilities, target).dtype is torch.float32

    @pytest.mark.parametrize("enable_caching", [True, False])
    def test_caching(self, model, enable_caching):
        with amp.init(enable_caching=enable_caching):
            for _ in range(2):
                model(torch.ones(1, 3))
            assert (amp.cast_counts().cache_hits > 0) is enable_caching

    @pytest.mark.parametrize("verbosity", [0, 1])
    def test_verbosity_is_that_of_the_call_that_brought_the_optimizer(self, model, optimizer, verbosity, caplog):
        amp.initialize(nn.Module(), half_dtype=torch.float16, verbosity=1 - verbosity)
        amp.initialize(model, optimizer, half_dtype=torch.float16, verbosity=verbosity)
        backward(loss_of(model) * math.inf, optimizer)
        optimizer.step()
        assert ("Gradient overflow" in caplog.text) is bool(verbosity)

    @pytest.mark.parametrize("verbose", [False, True])
    def test_verbose(self, model, optimizer, verbose, caplog):
        with amp.init(verbose=verbose):
            backward(loss_of(model) * math.inf, optimizer)
            optimizer.step()
        assert ("Gradient overflow" in caplog.text) is verbose

    def test_initialize_says_what_is_live(self, model):
        with (
            amp.init(half_dtype=torch.bfloat16),
            pytest.raises(UsageError, match=r"set up by amp\.init .*\. Type amp\.deinitialize\(\)"),
        ):
            initialize(model, loss_scale="dynamic")


class TestScaleLoss:
    @pytest.mark.parametrize("dtype", [*HALF_DTYPES, torch.float32, torch.float64], ids=dtype_name)
    @pytest.mark.parametrize("loss_scale", [1.0, 128.0, "dynamic"])
    def test_yields_the_loss_in_float32_times_the_scale(self, model, optimizer, loss_scale, dtype):
        initialize(model, optimizer, opt_level="O0", loss_scale=loss_scale)
        loss = torch.tensor([[0.75, -2.0]], dtype=dtype)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            assert_same_bits(scaled_loss, loss.float() * amp.get_loss_scale())

    def test_takes_all_that_apex_took(self, model, optimizer):
        initialize(model, optimizer, num_losses=2)
        with amp.scale_loss(loss_of(model), [optimizer], 1, model, False, False) as scaled_loss:
            scaled_loss.backward()
        with amp.scale_loss(loss_of(model), (optimizer,), loss_id=1) as scaled_loss:
            scaled_loss.backward()

    @pytest.mark.parametrize("loss_scale", [128.0, "dynamic"])
    def test_warns_where_another_loss_goes_backward(self, model, optimizer, loss_scale):
        initialize(model, optimizer, loss_scale=loss_scale)
        for warns in (True, False):  # who types it types it in a loop
            loss = loss_of(model)
            block = amp.scale_loss(loss, optimizer)
            with pytest.warns(AmpWarning, match="as scaled_loss: ") if warns else contextlib.nullcontext(), block:
                loss.backward()

    def test_does_not_warn_where_nothing_goes_backward_or_in_another_way(self, model, optimizer):
        initialize(model, optimizer, loss_scale="dynamic", num_losses=4)
        with amp.scale_loss(loss_of(model), optimizer, loss_id=0):
            pass
        with amp.scale_loss(loss_of(model).detach(), optimizer, loss_id=1):
            pass
        with amp.scale_loss(loss_of(model), optimizer, loss_id=2) as scaled_loss:
            (scaled_loss / 2).backward(retain_graph=True)
        with amp.scale_loss(loss_of(model), optimizer, loss_id=3) as scaled_loss:
            model.weight.grad = torch.autograd.grad(scaled_loss, model.weight)[0]

    def test_losses_have_scales_of_their_own(self, model, optimizer):
        initialize(model, optimizer, num_losses=3, loss_scale="dynamic")
        for loss_id, overflows in enumerate([0, 2, 1]):
            for _ in range(overflows):
                optimizer.zero_grad()
                backward(loss_of(model) * math.inf, optimizer, loss_id=loss_id)
                optimizer.step()
        assert [amp.get_loss_scale(loss_id) for loss_id in range(3)] == [2.0**16, 2.0**14, 2.0**15]

    @pytest.mark.parametrize("delayed", [True, False])
    def test_the_scale_reacts_at_the_step_whichever_block_overflowed(self, delayed, model, optimizer):
        initialize(model, optimizer, loss_scale="dynamic")
        backward(loss_of(model) * math.inf, optimizer, delay_overflow_check=delayed)
        backward(loss_of(model), optimizer)
        assert amp.get_loss_scale() == 2.0**16
        optimizer.step()
        assert amp.get_loss_scale() == 2.0**15
        assert amp.step_was_skipped(optimizer)

    @pytest.mark.parametrize("set_to_none", [True, False])
    def test_with_torchs_scaler_the_scale_is_that_of_grad_scaler_in_every_step(self, set_to_none):
        models = [nn.Linear(4, 1) for _ in range(2)]
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in models]
        initialize(models[0], optimizers[0], opt_level="O0", loss_scale="dynamic", scale_window=3, scaler="torch")
        theirs = torch.amp.GradScaler("cpu", growth_interval=3)
        for step in range(14):
            for number in range(8):
                overflows = (step, number) in {(3, 2), (3, 5), (4, 0), (11, 7)}
                factor = math.inf if overflows else 1.0
                backward(models[0](torch.ones(2, 4)).sum() * factor, optimizers[0])
                theirs.scale(models[1](torch.ones(2, 4)).sum() * factor).backward()
            optimizers[0].step()
            theirs.step(optimizers[1])
            theirs.update()
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none)
            assert amp.get_loss_scale() == theirs.get_scale()
            assert amp.stats()["clean_steps"] == theirs.state_dict()["_growth_tracker"]

    def test_casts_of_weights_are_forgotten_when_the_block_ends(self, model, optimizer):
        initialize(model, optimizer)
        loss = loss_of(model)
        assert len(runtime.live.cache) == 2
        backward(loss, optimizer)
        assert len(runtime.live.cache) == 0

    def test_casts_of_weights_are_forgotten_when_the_block_raises(self, model, optimizer):
        initialize(model, optimizer)
        loss = loss_of(model)
        with pytest.raises(ZeroDivisionError), amp.scale_loss(loss, optimizer):
            raise ZeroDivisionError
        assert len(runtime.live.cache) == 0

    def test_gradients_are_those_of_a_plain_backward_under_the_same_casts(self, model, optimizer):
        initialize(model, optimizer, half_dtype=torch.bfloat16, loss_scale="dynamic")
        loss_of(model).backward()
        expected = model.weight.grad.clone()
        optimizer.zero_grad()
        backward(loss_of(model), optimizer)
        assert model.weight.grad.dtype is torch.float32
        assert_same_bits(model.weight.grad, expected)


class TestScaleLossIsEnteredOnce:
    """What `scale_loss` returns is one block: its loss is gone when the block has begun."""

    @pytest.mark.parametrize("loss_scale", [1.0, "dynamic"])
    def test_again_after_its_end_raises_and_says_what_to_call(self, model, optimizer, loss_scale):
        initialize(model, optimizer, loss_scale=loss_scale)
        block = amp.scale_loss(loss_of(model), optimizer)
        with block as scaled_loss:
            scaled_loss.backward()
        before = model.weight.grad.clone()
        with (
            pytest.raises(UsageError, match=r"has ended.*only once\. Call amp\.scale_loss\(loss, optimizer\) anew"),
            block,
        ):
            pytest.fail("the block was entered")
        assert_same_bits(model.weight.grad, before)
        optimizer.step()

    def test_again_after_it_raised_raises_too(self, model, optimizer):
        initialize(model, optimizer, loss_scale="dynamic")
        block = amp.scale_loss(loss_of(model), optimizer)
        with pytest.raises(ZeroDivisionError), block:
            raise ZeroDivisionError
        with pytest.raises(UsageError, match="has ended"), block:
            pytest.fail("the block was entered")

    def test_again_while_it_is_open_raises_and_abandons_the_pass(self, model, optimizer):
        initialize(model, optimizer, loss_scale="dynamic")
        block = amp.scale_loss(loss_of(model), optimizer)
        with pytest.raises(UsageError, match=r"is open already.*Call amp\.scale_loss"), block, block:
            pytest.fail("the block was entered twice")
        assert model.weight.grad is None
        backward(loss_of(model), optimizer)
        assert model.weight.grad.isfinite().all()

    def test_taken_for_a_loss_says_what_to_type(self, model, optimizer):
        initialize(model, optimizer, loss_scale="dynamic")
        with pytest.raises(UsageError, match=r"a block, and no loss. Type with amp.scale_loss"):
            amp.scale_loss(loss_of(model), optimizer).backward()
        assert model.weight.grad is None

    def test_a_block_that_could_not_begin_may_be_entered_again(self, model, optimizer):
        initialize(model)
        block = amp.scale_loss(loss_of(model), optimizer)
        with pytest.raises(UsageError, match="never handed"), block:
            pytest.fail("the block was entered")
        initialize(model, [optimizer])
        with block as scaled_loss:
            scaled_loss.backward()
        assert model.weight.grad is not None

    def test_where_amp_is_disabled_it_does_nothing_as_often_as_one_likes(self, model, optimizer):
        amp.initialize(model, optimizer, enabled=False)
        block = amp.scale_loss(3, optimizer)
        for _ in range(2):
            with block as loss:
                assert loss == 3


class TestState:
    @pytest.fixture
    def saved(self, model, optimizer) -> dict[str, Any]:
        """The state of two scales, the second of which has backed off."""
        initialize(model, optimizer, num_losses=2, loss_scale="dynamic")
        backward(loss_of(model), optimizer, loss_id=0)
        backward(loss_of(model) * math.inf, optimizer, loss_id=1)
        optimizer.step()
        return amp.state_dict()

    def test_is_that_of_apex(self, saved):
        assert saved == {
            "loss_scaler0": {"loss_scale": 65536.0, "unskipped": 1},
            "loss_scaler1": {"loss_scale": 32768.0, "unskipped": 0},
        }

    def test_goes_through_a_checkpoint(self, saved, model, optimizer):
        file = io.BytesIO()
        torch.save({"amp": amp.state_dict(), "model": model.state_dict()}, file)
        amp.deinitialize()
        initialize(model, optimizer, num_losses=2, loss_scale="dynamic")
        file.seek(0)
        amp.load_state_dict(torch.load(file, weights_only=True)["amp"])
        assert amp.state_dict() == saved
        assert amp.get_loss_scale(1) == 2.0**15

    def test_is_a_copy(self, saved, model, optimizer):
        backward(loss_of(model), optimizer, loss_id=0)
        optimizer.step()
        assert saved["loss_scaler0"]["unskipped"] == 1

    @pytest.mark.parametrize(
        ("keys", "told", "scales"),
        [
            ([], "holds no loss scaler, and there are loss_scaler0, loss_scaler1; loaded: none", [65536, 32768]),
            ([0], "holds loss_scaler0, and there are loss_scaler0, loss_scaler1; loaded: loss_scaler0", [8, 32768]),
            (
                [0, 1, 2],
                "holds loss_scaler0, loss_scaler1, loss_scaler2, and there .*; loaded: loss_scaler0, loss_scaler1",
                [8, 16],
            ),
            ([1, 2], "holds loss_scaler1, loss_scaler2, and there are .*; loaded: loss_scaler1", [65536, 16]),
        ],
        ids=str,
    )
    @pytest.mark.usefixtures("saved")
    def test_of_another_number_of_losses_is_loaded_as_far_as_it_goes(self, keys, told, scales):
        state = {f"loss_scaler{key}": {"loss_scale": 8.0 * 2**key, "unskipped": 3} for key in keys}
        with pytest.warns(AmpWarning, match=told):
            amp.load_state_dict(state)
        assert [amp.get_loss_scale(0), amp.get_loss_scale(1)] == scales

    def test_one_fault_and_none_is_loaded(self, saved):
        state = {"loss_scaler0": {"loss_scale": 8.0, "unskipped": 3}, "loss_scaler1": {"loss_scale": 8.0}}
        with pytest.raises(amp.OptionError, match="lacks"):
            amp.load_state_dict(state)
        assert amp.state_dict() == saved

    def test_growth_goes_on_where_it_was(self, model, optimizer):
        initialize(model, optimizer, loss_scale="dynamic", scale_window=4)
        amp.load_state_dict({"loss_scaler0": {"loss_scale": 8.0, "unskipped": 3}})
        backward(loss_of(model), optimizer)
        optimizer.step()
        assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 16.0, "unskipped": 0}}


class TestDisableCasts:
    @pytest.fixture(autouse=True)
    def casts(self) -> Iterator[None]:
        with amp.init(half_dtype=torch.bfloat16):
            yield

    def test_nests(self):
        with amp.disable_casts():
            with amp.disable_casts():
                assert product().dtype is torch.float32
            assert product().dtype is torch.float32
        assert product().dtype is torch.bfloat16

    def test_restores_where_the_block_raises(self):
        with pytest.raises(ZeroDivisionError), amp.disable_casts():
            raise ZeroDivisionError
        assert product().dtype is torch.bfloat16

    def test_decorates(self):
        decorated = amp.disable_casts()(product)
        for _ in range(2):
            assert decorated().dtype is torch.float32
            assert product().dtype is torch.bfloat16


class TestLateDecoration:
    """Of `disable_casts` made before amp is set up: as a decorator it is."""

    def test_counts_from_initialize_on(self, model):
        decorated = amp.disable_casts()(product)
        assert decorated().dtype is torch.float32
        initialize(model)
        assert decorated().dtype is torch.float32
        assert product().dtype is torch.bfloat16


class TestRegistration:
    @pytest.fixture
    def library(self) -> Any:
        """A class of somebody else's."""

        class Library:
            @staticmethod
            def double(x: Tensor) -> Tensor:
                return x * 2

            @staticmethod
            def add(x: Tensor, y: Tensor) -> tuple[torch.dtype, torch.dtype]:
                return x.dtype, y.dtype

        return Library

    @pytest.mark.parametrize(
        ("register", "given", "expected"),
        [
            (amp.register_half_function, torch.float32, torch.float16),
            (amp.register_bfloat16_function, torch.float32, torch.bfloat16),
            (amp.register_float_function, torch.float16, torch.float32),
        ],
        ids=["half", "bfloat16", "float"],
    )
    def test_before_initialize_casts_from_then_on(self, library, model, register, given, expected):
        register(library, "double")
        assert library.double(torch.ones(2, dtype=given)).dtype is given
        initialize(model, half_dtype=torch.float16)
        assert library.double(torch.ones(2, dtype=given)).dtype is expected
        amp.deinitialize()
        assert library.double(torch.ones(2, dtype=given)).dtype is given

    def test_promotes(self, library, model):
        amp.register_promote_function(library, "add")
        initialize(model, half_dtype=torch.float16)
        half, single = torch.ones(2, dtype=torch.float16), torch.ones(2)
        assert library.add(half, single) == (torch.float32, torch.float32)
        assert library.add(half, half) == (torch.float16, torch.float16)

    def test_takes_precedence_over_the_lists_and_the_last_one_counts(self, model):
        amp.register_half_function(torch, "mm")
        amp.register_float_function(torch, "mm")
        initialize(model, half_dtype=torch.float16)
        assert product(torch.float16).dtype is torch.float32

    def test_lasts_for_every_later_set_up(self, library, model):
        amp.register_half_function(library, "double")
        for half_dtype in HALF_DTYPES:
            initialize(model, half_dtype=half_dtype)
            assert library.double(torch.ones(2)).dtype is half_dtype
            amp.deinitialize()


class TestDecorators:
    @pytest.mark.parametrize(
        ("decorate", "given", "expected"),
        [
            (amp.half_function, torch.float32, torch.float16),
            (amp.bfloat16_function, torch.float32, torch.bfloat16),
            (amp.float_function, torch.float16, torch.float32),
        ],
        ids=["half", "bfloat16", "float"],
    )
    def test_cast_while_amp_is_on_and_casts_are(self, model, decorate, given, expected):
        @decorate
        def dtype_of(x: Tensor) -> torch.dtype:
            """Kept."""
            return x.dtype

        x = torch.ones(2, dtype=given)
        assert dtype_of(x) is given
        initialize(model, half_dtype=torch.float16)
        assert dtype_of(x) is expected
        with amp.disable_casts():
            assert dtype_of(x) is given
        amp.deinitialize()
        assert dtype_of(x) is given
        assert (dtype_of.__name__, dtype_of.__doc__) == ("dtype_of", "Kept.")

    def test_promote(self, model):
        @amp.promote_function
        def dtypes_of(x: Tensor, y: Tensor) -> tuple[torch.dtype, torch.dtype]:
            return x.dtype, y.dtype

        half, single = torch.ones(2, dtype=torch.float16), torch.ones(2)
        initialize(model, half_dtype=torch.float16)
        assert dtypes_of(half, single) == (torch.float32, torch.float32)

    def test_are_inert_where_functions_do_not_cast(self, model):
        initialize(model, opt_level="O0")
        assert amp.half_function(lambda x: x)(torch.ones(2)).dtype is torch.float32

    def test_on_methods_of_every_kind(self, model):
        class Library:
            @amp.half_function
            def method(self, x: Tensor) -> torch.dtype:
                return x.dtype

            @amp.half_function
            @staticmethod
            def static(x: Tensor) -> torch.dtype:
                return x.dtype

            @amp.half_function
            @classmethod
            def of_class(cls, x: Tensor) -> torch.dtype:
                return x.dtype

        initialize(model, half_dtype=torch.float16)
        x = torch.ones(2)
        library = Library()
        assert {library.method(x), library.static(x), Library.static(x), Library.of_class(x)} == {torch.float16}

    def test_on_a_builtin(self, model):
        add = amp.half_function(torch.add)
        initialize(model, half_dtype=torch.float16)
        assert add(torch.ones(2), torch.ones(2)).dtype is torch.float16

    def test_on_the_forward_of_an_autograd_function(self, model):
        class Double(torch.autograd.Function):
            @staticmethod
            @amp.half_function
            def forward(ctx: Any, x: Tensor) -> Tensor:
                ctx.found = x.dtype
                return x * 2

            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> Tensor:
                return grad * 2

        initialize(model, half_dtype=torch.float16)
        x = torch.ones(2, requires_grad=True)
        result = Double.apply(x)
        assert result.dtype is torch.float16
        result.sum().backward()
        assert_same_bits(x.grad, torch.full((2,), 2.0))


class TestRest:
    def test_names_that_complete_are_those_to_use(self):
        assert dir(amp) == sorted(amp.__all__)

    def test_master_params_are_those_that_the_optimizer_updates(self, model):
        optimizer = torch.optim.SGD([{"params": [model.bias]}, {"params": [model.weight], "lr": 1.0}], lr=0.1)
        initialize(model, optimizer)
        assert [id(parameter) for parameter in amp.master_params(optimizer)] == [id(model.bias), id(model.weight)]

    def test_clear_cache_makes_a_change_through_data_seen(self, model):
        initialize(model)
        x = torch.ones(1, 3)
        before = model(x)
        model.weight.data.add_(1)
        amp.clear_cache()
        assert not torch.equal(model(x), before)

    def test_cast_counts(self, model):
        initialize(model)
        x = torch.ones(1, 3)
        model(x)
        assert amp.cast_counts() == amp.CastCounts(casts=3, cache_hits=0)
        model(x)
        assert amp.cast_counts() == amp.CastCounts(casts=4, cache_hits=2)
        amp.deinitialize()
        assert amp.cast_counts() == amp.CastCounts(casts=0, cache_hits=0)

    def test_double_parameters_are_left_alone(self):
        model = nn.Linear(3, 3, dtype=torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        initialize(model, optimizer, loss_scale="dynamic")
        x = torch.ones(2, 3, dtype=torch.float64)
        loss = model(x).sum()
        assert loss.dtype is torch.float64
        backward(loss, optimizer)
        assert_same_bits(model.weight.grad, torch.full((3, 3), 2.0, dtype=torch.float64))

    @pytest.mark.filterwarnings("ignore:the SGD updates half weights")
    @pytest.mark.parametrize("half_dtype", HALF_DTYPES, ids=dtype_name)
    def test_half_parameters_are_used_as_they_are(self, half_dtype):
        model = nn.Linear(3, 3).to(half_dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        initialize(model, optimizer, half_dtype=half_dtype, loss_scale="dynamic", init_scale=2.0**8)
        for _ in range(2):
            backward(model(torch.ones(2, 3)).sum(), optimizer)
        assert model.weight.dtype is half_dtype
        assert_same_bits(model.weight.grad, torch.full((3, 3), 4.0, dtype=half_dtype))
