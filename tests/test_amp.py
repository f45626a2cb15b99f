"""Tests the functions of `ampatch.amp`: their arguments and results, and what one call means for the next."""

from __future__ import annotations

import contextlib
import copy
import logging
import math
from typing import Any

import pytest
import torch
from helpers import HALF_DTYPES, assert_same_bits, assert_same_state, casts_on, dtype_name
from optimizers import MOMENTUM, SGD, backward
from torch import Tensor, nn

from ampatch import amp
from ampatch.apex import amp as apex_amp
from ampatch.errors import AmpWarning, OptionError, UsageError
from ampatch.native import calls, kernels
from ampatch.runtime import runtime

DYNAMIC = {"loss_scale": "dynamic"}


def product(dtype: torch.dtype = torch.float32) -> Tensor:
    """A whitelisted function on a weight; its type tells whether casts are on."""
    return torch.mm(torch.ones(2, 2, dtype=dtype), torch.ones(2, 2, dtype=dtype, requires_grad=True)).detach()


@pytest.fixture
def model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 3)


@pytest.fixture
def optimizer(model: nn.Linear) -> torch.optim.Optimizer:
    return MOMENTUM(model.parameters())


def initialize(*args: Any, **options: Any) -> Any:
    return amp.initialize(*args, **{"verbosity": 0, **options})


def loss_of(model: nn.Module) -> Tensor:
    return model(torch.linspace(-1, 1, 6).reshape(2, 3)).square().sum()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, factor: float = 1.0, **options: Any) -> float:
    """Makes a step, and returns the loss scale after it."""
    optimizer.zero_grad()
    backward(loss_of(model) * factor, optimizer, **options)
    optimizer.step()
    return amp.get_loss_scale()


class TestArguments:
    def test_arguments_by_position_are_those_of_apex(self, model, optimizer):
        amp.initialize(
            model, optimizer, True, "O1", None, None, None, None, "128.0", None, 2, 0, None, 2.0**20, half_dtype=None
        )
        assert [amp.get_loss_scale(0), amp.get_loss_scale(1)] == [128, 128]
        with amp.scale_loss(loss_of(model), (optimizer,), 1, model, False, False) as scaled_loss:
            scaled_loss.backward()
        amp.deinitialize()
        with amp.init(True, "64", False, False, True):
            settings = amp.settings()
        assert (settings["loss_scale"], settings["enable_caching"], settings["allow_banned"]) == (64, False, True)

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
    def test_error_for_an_unknown_argument_suggests_the_right_name(self, call, name, meant):
        with pytest.raises(OptionError, match=rf"^amp\..*got the unknown argument {name!r}. Did you mean '{meant}'"):
            call()
        assert not amp.is_on()

    def test_every_public_function_is_in_all(self):
        assert dir(amp) == sorted(amp.__all__)
        own = {name for name, value in vars(amp).items() if getattr(value, "__module__", "") == "ampatch.amp"}
        assert {name for name in own if not name.startswith("_")} <= set(amp.__all__)

    @pytest.mark.parametrize(
        "shape",
        [
            lambda model, optimizer: (model, optimizer),
            lambda model, optimizer: ([model, nn.Linear(1, 1)], [optimizer]),
            lambda model, optimizer: ([model], optimizer),
            lambda model, _: (model, []),
            lambda model, _: (model, ()),
        ],
        ids=["objects", "lists", "list-and-object", "empty-list", "empty-tuple"],
    )
    def test_initialize_returns_its_arguments(self, model, optimizer, shape):
        parameters = list(model.parameters())
        arguments = shape(model, optimizer)
        assert initialize(*arguments) == arguments
        assert initialize(arguments[0]) == arguments[0]
        assert type(optimizer) is torch.optim.SGD
        assert list(map(id, model.parameters())) == list(map(id, parameters))


class TestDisabled:
    def test_disabled_initialize_returns_its_arguments_unchecked(self):
        anything = object()
        assert amp.initialize(anything, enabled=False) is anything
        assert amp.initialize([anything], [], enabled=False, opt_level="O9") == ([anything], [])

    @pytest.mark.parametrize("call", ["initialize", "init"])
    def test_calls_do_nothing_when_amp_is_disabled(self, model, optimizer, call):
        if call == "initialize":
            assert amp.initialize(model, optimizer, enabled=False) == (model, optimizer)
        else:
            amp.init(enabled=False)

        for loss in (loss_of(model), 3, None):
            block = amp.scale_loss(loss, optimizer, loss_id=7, delay_unscale=True)
            for _ in range(2):  # it may be entered again
                with block as scaled_loss:
                    assert scaled_loss is loss
        assert amp.state_dict() == {}
        amp.load_state_dict({"loss_scaler0": {"loss_scale": 2.0, "unskipped": 0}})
        assert amp.get_loss_scale(3) == 1
        assert amp.step_was_skipped(optimizer) is False
        assert amp.skipped_steps(optimizer) == 0
        assert list(amp.master_params(optimizer)) == list(model.parameters())
        assert amp.cast_counts() == amp.CastCounts(0, 0)
        amp.clear_cache()
        assert product().dtype is torch.float32
        with amp.disable_casts():
            assert product().dtype is torch.float32
        assert amp.half_function(product)(torch.float32).dtype is torch.float32
        assert "step" not in vars(optimizer)
        amp.deinitialize()
        with pytest.raises(UsageError):
            amp.state_dict()

    def test_amp_is_enabled_again_by_initialize_or_init(self, model):
        for enable in (lambda: initialize(model), amp.init):
            amp.initialize(model, enabled=False)
            enable()
            assert set(amp.state_dict()) == {"loss_scaler0"}
            amp.deinitialize()

    def test_disabled_initialize_leaves_a_live_session_alone(self, model):
        initialize(model)
        other = nn.Linear(1, 1)
        assert amp.initialize(other, enabled=False) is other
        assert set(amp.state_dict()) == {"loss_scaler0"}
        assert not other._forward_hooks


class TestHalfDtype:
    @pytest.mark.gpu
    def test_half_type_is_float16_on_a_gpu(self, model):
        initialize(model.cuda())
        assert torch.mm(torch.ones(2, 2, device="cuda"), torch.ones(2, 2, device="cuda")).dtype is torch.float16

    @pytest.mark.skipif(torch.accelerator.is_available(), reason="says what holds without an accelerator")
    @pytest.mark.parametrize(
        "model",
        [
            nn.Linear(2, 2),
            nn.Module(),
            nn.Linear(2, 2, device="meta"),
            nn.ModuleList(nn.Linear(3, 3, dtype=half_dtype) for half_dtype in HALF_DTYPES),
        ],
        ids=["on-cpu", "no-parameters", "on-meta", "both-half-types"],
    )
    def test_half_type_is_bfloat16_without_an_accelerator(self, model):
        initialize(model)
        assert product().dtype is torch.bfloat16

    def test_half_type_is_that_of_half_weights(self):
        initialize(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, dtype=torch.float16)))
        assert product().dtype is torch.float16

    @pytest.mark.parametrize("half", [torch.float16, "half"], ids=str)
    def test_half_type_may_be_given_by_either_argument_or_by_both(self, half):
        for names in (["half_dtype"], ["patch_torch_functions_type"], ["half_dtype", "patch_torch_functions_type"]):
            initialize(nn.Linear(1, 1), **dict.fromkeys(names, half))
            assert product().dtype is torch.float16
            initialize(nn.Linear(1, 1), half_dtype=torch.float16)  # the same settings
            amp.deinitialize()
        for name in ("half_dtype", "patch_type"):
            with amp.init(**{name: half}):
                assert product().dtype is torch.float16

    def test_types_of_weights_and_outputs_may_be_names(self, model):
        initialize(model, opt_level="O2", cast_model_type="bfloat16", cast_model_outputs="float64")
        assert model.weight.dtype is torch.bfloat16
        assert model(torch.ones(1, 3)).dtype is torch.float64


class TestLevels:
    """`test_opt_levels.py` has the table of levels, and tests/weights/test_conversion.py the conversion of weights."""

    @pytest.mark.parametrize("half_dtype", HALF_DTYPES, ids=dtype_name)
    @pytest.mark.parametrize(
        ("level", "options", "casts"),
        [
            ("O0", {}, False),
            ("O1", {}, True),
            ("O0", {"patch_torch_functions": True}, True),
            ("O1", {"patch_torch_functions": False}, False),
        ],
        ids=["O0", "O1", "O0-patched", "O1-unpatched"],
    )
    def test_levels_without_conversion_cast_functions_or_nothing(self, model, level, options, casts, half_dtype):
        before = copy.deepcopy(model.state_dict())
        initialize(model, opt_level=level, half_dtype=half_dtype, **options)
        assert_same_state(model.state_dict(), before)
        assert product().dtype is (half_dtype if casts else torch.float32)

    def test_o4_has_the_lists_of_bfloat16(self, model):
        initialize(model, opt_level="O4")
        assert product().dtype is torch.bfloat16
        assert torch.exp(torch.ones(2, dtype=torch.bfloat16)).dtype is torch.bfloat16  # float32 in the other list

    @pytest.mark.parametrize("half_dtype", HALF_DTYPES, ids=dtype_name)
    @pytest.mark.parametrize("options", [{"opt_level": "O0"}, {"opt_level": "O1", "cast_model_type": torch.float32}])
    def test_half_weights_become_float32_where_the_level_has_them(self, model, half_dtype, options):
        initialize(model.to(half_dtype), **options)
        assert model.weight.dtype is model.bias.dtype is torch.float32
        assert model(torch.ones(1, 3, dtype=half_dtype)).dtype is torch.float32
        amp.deinitialize()
        assert model.weight.dtype is model.bias.dtype is half_dtype
        initialize(model.double(), **options)
        assert model.weight.dtype is model.bias.dtype is torch.float64

    @pytest.mark.parametrize(
        ("options", "factors", "scales"),
        [
            (
                {"init_scale": 4, "scale_factor": 4, "scale_window": 2, "hysteresis": 2, "min_loss_scale": 2}
                | {"max_loss_scale": 32},
                [1, 1, 1, 1, math.inf, math.inf, math.inf],
                [4, 16, 16, 32, 32, 8, 2],
            ),
            (
                {"growth_factor": 8, "backoff_factor": 0.25, "scale_window": 1},
                [1, math.inf, math.inf],
                [2.0**19, 2.0**17, 2.0**15],
            ),
        ],
        ids=["one-factor", "growth-and-backoff"],
    )
    def test_settings_of_the_scale_take_effect(self, model, optimizer, options, factors, scales):
        initialize(model, optimizer, **DYNAMIC, **options)
        assert [step(model, optimizer, factor) for factor in factors] == scales


class TestVerbosity:
    @pytest.mark.parametrize(
        ("options", "count"),
        [({"verbosity": 0}, 0), ({"verbosity": False}, 0), ({"verbosity": -1}, 0), ({}, 1), ({"verbosity": 2}, 1)],
        ids=str,
    )
    def test_initialize_logs_its_settings_from_verbosity_1_on(self, model, options, count, caplog, capfd):
        kernels.prepare()  # the first session of a process logs what it runs on
        calls.prepare()
        caplog.set_level(logging.DEBUG)
        amp.initialize(model, opt_level="O4", **options)
        assert len(caplog.records) == count
        for record in caplog.records:
            assert (record.name, record.levelname) == ("ampatch", "INFO")
            assert "opt_level='O4'" in record.getMessage()
        assert capfd.readouterr() == ("", "")

    @pytest.mark.parametrize("verbosity", [0, 1])
    def test_overflows_are_logged_by_the_verbosity_that_came_with_the_optimizer(
        self, model, optimizer, verbosity, caplog
    ):
        amp.initialize(nn.Module(), half_dtype=torch.float16, verbosity=1 - verbosity)
        amp.initialize(model, optimizer, half_dtype=torch.float16, verbosity=verbosity)
        step(model, optimizer, math.inf)
        assert ("Gradient overflow" in caplog.text) is bool(verbosity)

    @pytest.mark.parametrize("verbose", [False, True])
    def test_init_logs_overflows_if_it_is_verbose(self, model, optimizer, verbose, caplog):
        with amp.init(verbose=verbose):
            step(model, optimizer, math.inf)
        assert ("Gradient overflow" in caplog.text) is verbose


class TestInitializeAgain:
    def test_second_model_and_optimizer_join_the_session(self, model, optimizer):
        initialize(model, optimizer, half_dtype=torch.float16)
        initialize([model, model])
        assert len(model._forward_hooks) == 1
        live = runtime.live
        other = nn.Linear(3, 3)
        other_optimizer = SGD(other.parameters())
        initialize(other, other_optimizer)  # the half type need not be given again
        assert runtime.live is live
        assert product().dtype is torch.float16
        for each in (model, other):
            backward(loss_of(each), [optimizer, other_optimizer])
            assert all(parameter.grad is not None for parameter in each.parameters())
        amp.deinitialize()
        assert not model._forward_hooks
        assert not other._forward_hooks
        assert "step" not in vars(other_optimizer)

    def test_optimizer_of_the_first_model_may_join_with_another_model(self, model, optimizer):
        initialize(model, optimizer)
        other = torch.optim.Adam(model.parameters())
        initialize(nn.Linear(1, 1), other)
        backward(loss_of(model), other)

    def test_new_optimizers_begin_with_a_new_scale_and_new_models_do_not(self, model, optimizer):
        initialize(model, optimizer, **DYNAMIC)
        step(model, optimizer, math.inf)
        initialize(nn.Linear(1, 1), **DYNAMIC)
        assert amp.get_loss_scale() == 2.0**15
        other = nn.Linear(3, 1)
        initialize(other, SGD(other.parameters()), **DYNAMIC)
        assert amp.get_loss_scale() == amp.stats()["loss_scale"] == 2.0**16
        step(model, optimizer, math.inf)
        assert [state["loss_scale"] for state in amp.state_dict().values()] == [2.0**16, 2.0**14]
        amp.load_state_dict({f"loss_scaler{i}": {"loss_scale": 8.0 * 2**i, "unskipped": 0} for i in range(2)})
        step(model, optimizer, math.inf)
        assert [state["loss_scale"] for state in amp.state_dict().values()] == [8.0, 8.0]

    def test_new_optimizers_share_the_scale_before_the_first_step(self, model, optimizer):
        initialize(model, optimizer, **DYNAMIC)
        other_model = nn.Linear(3, 1)
        other = SGD(other_model.parameters())
        initialize(other_model, other, **DYNAMIC)
        backward(loss_of(model) * math.inf, [optimizer, other])
        other.step()
        optimizer.step()
        assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 2.0**15, "unskipped": 0}}

    def test_next_trial_does_not_inherit_the_scale_of_a_dropped_optimizer(self):
        def trial(factor: float) -> list[float]:
            model = nn.Linear(3, 1)
            optimizer = SGD(model.parameters())
            initialize(model, optimizer, **DYNAMIC)
            return [step(model, optimizer, factor) for _ in range(3)]

        assert trial(math.inf) == [2.0**15, 2.0**14, 2.0**13]
        assert trial(1.0) == [2.0**16] * 3
        assert len(amp.state_dict()) == 1


class TestInit:
    def test_init_ends_with_its_block(self):
        with amp.init() as handle:
            assert isinstance(handle, amp.Handle)
            assert product().dtype is torch.bfloat16
        assert product().dtype is torch.float32
        with pytest.raises(ZeroDivisionError), amp.init():
            raise ZeroDivisionError
        assert runtime.live is None

    def test_handle_ends_no_other_session(self, model):
        handle = amp.init()
        handle.deactivate()
        assert product().dtype is torch.float32
        initialize(model)
        handle.deactivate()
        assert product().dtype is torch.bfloat16
        amp.deinitialize()
        with amp.init(enabled=False):
            initialize(model)
        assert product().dtype is torch.bfloat16

    @pytest.mark.parametrize(
        ("options", "expected"),
        [
            ({"half_dtype": torch.float16}, 2.0**16),
            ({"half_dtype": torch.bfloat16}, 2.0**16),
            ({"loss_scale": 1.0}, 1),
            ({"loss_scale": "64"}, 64),
        ],
        ids=str,
    )
    def test_loss_scale_of_init_is_dynamic_unless_it_is_given(self, options, expected):
        with amp.init(**options):
            assert amp.get_loss_scale() == expected

    def test_optimizer_is_adopted_by_its_first_loss(self, model, optimizer):
        with amp.init():
            assert "step" not in vars(optimizer)
            step(model, optimizer, math.inf)
            assert amp.step_was_skipped(optimizer)
            assert model.weight.isfinite().all()
            before = model.weight.detach().clone()
            step(model, optimizer)
            assert (amp.step_was_skipped(optimizer), amp.skipped_steps(optimizer)) == (False, 1)
            assert not torch.equal(model.weight, before)
        assert "step" not in vars(optimizer)

    @pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.LBFGS], ids=["SGD", "LBFGS"])
    def test_optimizer_cannot_be_adopted_in_the_closure_of_its_step(self, model, make):
        optimizer = make(model.parameters(), lr=0.1)
        before = copy.deepcopy(model.state_dict())

        def closure() -> Tensor:
            loss = loss_of(model) * math.inf
            backward(loss, optimizer)
            return loss

        with amp.init(half_dtype=torch.float16):
            with pytest.raises(UsageError, match=r"closure of its step\(\).* type model, optimizer = amp.initialize"):
                optimizer.step(closure)
            assert "step" not in vars(optimizer)
        assert_same_state(model.state_dict(), before)
        assert all(parameter.grad is None for parameter in model.parameters())

    def test_optimizer_is_adopted_once_and_by_no_loss_that_is_refused(self, model, optimizer):
        original = optimizer.step
        with amp.init():
            with pytest.raises(OptionError, match="loss_id is 7"):
                backward(loss_of(model), optimizer, loss_id=7)
            assert "step" not in vars(optimizer)
            backward(loss_of(model), [optimizer, optimizer])
            assert optimizer.step.__wrapped__ == original


class TestScaleLoss:
    @pytest.mark.parametrize("loss_scale", [128.0, "dynamic"])
    def test_backward_of_the_unscaled_loss_warns_once(self, model, optimizer, loss_scale):
        initialize(model, optimizer, loss_scale=loss_scale)
        for warns in (pytest.warns(AmpWarning, match="as scaled_loss: "), contextlib.nullcontext()):
            loss = loss_of(model)
            with warns, amp.scale_loss(loss, optimizer):
                loss.backward()

    @pytest.mark.parametrize("set_to_none", [True, False])
    def test_scaler_torch_has_the_scale_of_grad_scaler_in_every_step(self, set_to_none):
        models = [nn.Linear(4, 1) for _ in range(2)]
        optimizers = [SGD(each.parameters(), lr=0.01) for each in models]
        initialize(models[0], optimizers[0], opt_level="O0", scale_window=3, scaler="torch", **DYNAMIC)
        theirs = torch.amp.GradScaler("cpu", growth_interval=3)
        for number in range(14):
            for micro_batch in range(8):
                overflows = (number, micro_batch) in {(3, 2), (3, 5), (4, 0), (11, 7)}
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


class TestEnteringABlockAgain:
    @pytest.mark.parametrize("loss_scale", [1.0, "dynamic"])
    def test_finished_block_cannot_be_entered_again(self, model, optimizer, loss_scale):
        initialize(model, optimizer, loss_scale=loss_scale)
        block = amp.scale_loss(loss_of(model), optimizer)
        with block as scaled_loss:
            scaled_loss.backward()
        before = model.weight.grad.clone()
        message = r"has ended.*only once\. Call amp\.scale_loss\(loss, optimizer\) anew"
        with pytest.raises(UsageError, match=message), block:
            pytest.fail("the block was entered")
        assert_same_bits(model.weight.grad, before)
        optimizer.step()

    def test_open_block_cannot_be_entered_again_nor_after_it_raised(self, model, optimizer):
        initialize(model, optimizer, **DYNAMIC)
        block = amp.scale_loss(loss_of(model), optimizer)
        with pytest.raises(UsageError, match=r"is open already.*Call amp\.scale_loss"), block, block:
            pytest.fail("the block was entered twice")
        with pytest.raises(UsageError, match="has ended"), block:
            pytest.fail("the block was entered")
        assert model.weight.grad is None
        backward(loss_of(model), optimizer)
        assert model.weight.grad.isfinite().all()

    def test_block_that_could_not_begin_may_be_entered_again(self, model, optimizer):
        initialize(model)
        block = amp.scale_loss(loss_of(model), optimizer)
        with pytest.raises(UsageError, match="never handed"), block:
            pytest.fail("the block was entered")
        initialize(model, [optimizer])
        with block as scaled_loss:
            scaled_loss.backward()
        assert model.weight.grad is not None

    def test_backward_on_the_block_itself_raises_with_what_to_type(self, model, optimizer):
        initialize(model, optimizer, **DYNAMIC)
        with pytest.raises(UsageError, match=r"a block, and no loss. Type with amp.scale_loss"):
            amp.scale_loss(loss_of(model), optimizer).backward()
        assert model.weight.grad is None


class TestStateDict:
    @pytest.fixture
    def saved(self, model, optimizer) -> dict[str, Any]:
        """The state of two scales, the second of which has backed off."""
        initialize(model, optimizer, num_losses=2, **DYNAMIC)
        backward(loss_of(model), optimizer, loss_id=0)
        backward(loss_of(model) * math.inf, optimizer, loss_id=1)
        optimizer.step()
        return amp.state_dict()

    def test_state_dict_is_that_of_apex_and_a_copy(self, saved, model, optimizer):
        expected = {
            "loss_scaler0": {"loss_scale": 65536.0, "unskipped": 1},
            "loss_scaler1": {"loss_scale": 32768.0, "unskipped": 0},
        }
        assert saved == expected
        step(model, optimizer)
        assert saved == expected

    @pytest.mark.parametrize(
        ("keys", "message", "scales"),
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
    def test_states_of_another_number_of_losses_load_by_number(self, keys, message, scales):
        state = {f"loss_scaler{key}": {"loss_scale": 8.0 * 2**key, "unskipped": 3} for key in keys}
        with pytest.warns(AmpWarning, match=message):
            amp.load_state_dict(state)
        assert [amp.get_loss_scale(0), amp.get_loss_scale(1)] == scales


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
    def test_decorated_function_casts_while_casts_are_on(self, decorate, given, expected):
        @decorate
        def dtype_of(x: Tensor) -> torch.dtype:
            """Kept."""
            return x.dtype

        x = torch.ones(2, dtype=given)
        assert dtype_of(x) is given
        with casts_on(torch.float16):
            assert dtype_of(x) is expected
            with amp.disable_casts():
                assert dtype_of(x) is given
        assert dtype_of(x) is given
        assert (dtype_of.__name__, dtype_of.__doc__) == ("dtype_of", "Kept.")

    def test_decorated_functions_do_not_cast_at_o0(self, model):
        initialize(model, opt_level="O0")
        assert amp.half_function(lambda x: x)(torch.ones(2)).dtype is torch.float32

    def test_decorators_take_methods_and_builtins(self):
        class Library:
            @amp.half_function
            def method(self, x: Tensor) -> Tensor:
                return x

        with casts_on(torch.float16):
            for function in (Library().method, amp.half_function(torch.neg)):
                assert function(torch.ones(2)).dtype is torch.float16


class TestMasterParamsAndCasts:
    def test_master_params_follow_the_groups_of_the_optimizer(self, model):
        optimizer = SGD([{"params": [model.bias]}, {"params": [model.weight], "lr": 1.0}])
        initialize(model, optimizer)
        assert list(map(id, amp.master_params(optimizer))) == [id(model.bias), id(model.weight)]

    def test_cast_counts_tell_casts_and_cache_hits(self, model):
        initialize(model)
        x = torch.ones(1, 3)
        model(x)
        assert amp.cast_counts() == amp.CastCounts(casts=3, cache_hits=0)
        model(x)
        assert amp.cast_counts() == amp.CastCounts(casts=4, cache_hits=2)
        amp.deinitialize()
        assert amp.cast_counts() == amp.CastCounts(casts=0, cache_hits=0)
