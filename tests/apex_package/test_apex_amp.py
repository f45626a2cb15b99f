"""`apex.amp` as scripts use it: the functions, the state below it, and the lists."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from optimizers import backward
from torch import nn

from ampatch import amp
from ampatch.apex import amp as apex_amp
from ampatch.apex.amp import _amp_state, frontend, lists
from ampatch.apex.amp._amp_state import maybe_print, warn_or_err
from ampatch.apex.amp.lists import functional_overrides, tensor_overrides, torch_overrides
from ampatch.apex.amp.scaler import LossScaler
from ampatch.errors import AmpWarning, OptionError, UsageError

_NAMES = ("FP16_FUNCS", "FP32_FUNCS", "CASTS", "SEQUENCE_CASTS", "BANNED_FUNCS")


@pytest.fixture
def edited_lists() -> Iterator[None]:
    """Lists that a test may edit."""
    modules = (functional_overrides, torch_overrides, tensor_overrides)
    before = [
        (module, name, getattr(module, name), list(getattr(module, name))) for module in modules for name in _NAMES
    ]
    yield
    for module, name, held, items in before:
        held[:] = items
        setattr(module, name, held)
    assert lists.changes() == {}


def setup(opt_level: str, **options: object) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = apex_amp.initialize(model, optimizer, opt_level=opt_level, **options)
    return model, optimizer


def run_pass(model: nn.Module, optimizer: torch.optim.Optimizer, factor: float = 1.0, **options: object) -> None:
    backward(model(torch.ones(3, 4)).sum() * factor, optimizer, **options)


def product_type() -> torch.dtype:
    return torch.mm(torch.ones(2, 2), torch.ones(2, 2, requires_grad=True)).dtype


def softmax_type(dtype: torch.dtype = torch.float32) -> torch.dtype:
    return F.softmax(torch.ones(2, 2, dtype=dtype, requires_grad=True), -1).dtype


class TestPackage:
    def test_apex_amp_is_a_package_with_all_names_of_amp(self) -> None:
        assert apex_amp.__path__
        assert set(amp.__all__) <= set(apex_amp.__dict__)
        assert apex_amp.scale_loss is amp.scale_loss
        assert frontend.state_dict is amp.state_dict

    @pytest.mark.parametrize("opt_level", ["O0", "O1", "O2", "O3"])
    def test_the_half_type_is_float16_on_the_cpu_too(self, opt_level: str) -> None:
        model, _ = setup(opt_level)
        assert _amp_state.opt_properties.half_dtype is torch.float16
        assert model[0].weight.dtype is (torch.float16 if opt_level in ("O2", "O3") else torch.float32)
        assert apex_amp.get_loss_scale() == (65536 if opt_level in ("O1", "O2") else 1)

    @pytest.mark.parametrize(
        "options",
        [
            {"half_dtype": torch.bfloat16},
            {"patch_torch_functions_type": torch.bfloat16},
            {"opt_level": "O4"},
            {"opt_level": "O5"},
            {"opt_level": "O2", "cast_model_type": torch.bfloat16},
            {"opt_level": "O2", "cast_model_type": "bfloat16"},
        ],
        ids=str,
    )
    def test_a_half_type_that_is_named_counts(self, options: dict[str, object]) -> None:
        setup(**{"opt_level": "O1", **options})
        assert _amp_state.opt_properties.half_dtype is torch.bfloat16

    @pytest.mark.parametrize(
        ("opt_level", "message"),
        [(["O1"], "opt_level is"), (None, "opt_level is"), (1, "opt_level is"), ("o1", "capital letter O")],
    )
    def test_what_is_no_level_is_an_error(self, opt_level: object, message: str) -> None:
        with pytest.raises(OptionError, match=message):
            setup(opt_level)

    def test_init_patches_functions_until_its_block_ends(self) -> None:
        with apex_amp.init() as handle:
            assert handle.is_active()
            assert product_type() is torch.float16
        assert not handle.is_active()
        assert not apex_amp.init(enabled=False).is_active()

    def test_the_handle_of_init_has_apexs_private_methods(self) -> None:
        handle = apex_amp.init()
        with handle._disable_casts():
            assert product_type() is torch.float32
        handle._deactivate()
        handle._deactivate()
        assert not handle.is_active()
        assert product_type() is torch.float32
        apex_amp.init(enabled=False)._deactivate()

    def test_the_handle_of_initialize_can_be_deactivated(self) -> None:
        model, _ = setup("O2")
        _amp_state.handle._deactivate()
        assert model[0].weight.dtype is torch.float32
        setup("O1")

    def test_false_may_be_given_by_position(self) -> None:
        model = nn.Linear(2, 2)
        assert apex_amp.initialize(model, None, True, "O1", False) is model


class TestFormsOf2018:
    def test_methods_and_classes_of_2018_raise_and_say_what_to_write(self) -> None:
        handle = apex_amp.init()
        with pytest.raises(UsageError, match=r"handle\.scale_loss .* with amp\.scale_loss\(loss, optimizer\)"):
            handle.scale_loss(torch.ones(()), None)
        with pytest.raises(UsageError, match=r"wrap_optimizer .*amp\.initialize\(model, optimizer"):
            handle.wrap_optimizer(None, num_loss=2)
        with pytest.raises(UsageError, match=r"OptimWrapper .*amp\.initialize\(model, optimizer"):
            apex_amp.OptimWrapper(None, None, 1)


class TestState:
    def test_state_has_properties_once_amp_is_set_up(self) -> None:
        assert not hasattr(_amp_state, "opt_properties")
        assert not hasattr(_amp_state, "handle")
        assert _amp_state.loss_scalers == []
        setup("O2", loss_scale="128.0")
        properties = _amp_state.opt_properties
        assert (properties.enabled, properties.opt_level) == (True, "O2")
        assert (properties.loss_scale, properties.master_weights) == (128.0, True)
        assert properties.keep_batchnorm_fp32 is True
        assert _amp_state.handle.is_active()

    def test_state_of_a_disabled_amp_says_so(self) -> None:
        setup("O1", enabled=False)
        properties = _amp_state.opt_properties
        assert (properties.enabled, properties.opt_level, properties.master_weights) == (False, None, None)
        assert (properties.cast_model_type, properties.patch_torch_functions) == (None, False)
        assert not _amp_state.handle.is_active()

    def test_the_state_module_has_the_object_and_the_functions(self) -> None:
        from ampatch.apex.amp._amp_state import _amp_state as from_the_module

        assert from_the_module is apex_amp._amp_state
        assert _amp_state.master_params is amp.master_params

    def test_attributes_of_the_state_without_effect_can_be_set(self) -> None:
        _amp_state.allow_incoming_model_not_fp32 = True
        _amp_state.hard_override = True
        warn_or_err("only logged")
        _amp_state.allow_incoming_model_not_fp32 = _amp_state.hard_override = False
        with pytest.raises(RuntimeError, match="raised"):
            warn_or_err("raised")

    def test_maybe_print_heeds_verbosity(self, capsys: pytest.CaptureFixture[str]) -> None:
        setup("O1", verbosity=0)
        maybe_print("not this")
        amp.deinitialize()
        setup("O1")
        maybe_print("but this", rank0=True)
        assert capsys.readouterr().out == "but this\n"


class TestLossScalers:
    def test_scale_and_count_of_a_loss_scaler_are_read_and_written(self) -> None:
        model, optimizer = setup("O1", num_losses=3)
        scaler = _amp_state.loss_scalers[0]
        assert _amp_state.loss_scalers[0] is scaler
        scaler._loss_scale = 1024
        run_pass(model, optimizer)
        optimizer.step()
        assert (scaler.loss_scale(), scaler._loss_scale, scaler._unskipped) == (1024.0, 1024.0, 1)
        scaler._unskipped = 1999
        run_pass(model, optimizer)
        optimizer.step()
        assert (scaler._loss_scale, scaler._unskipped) == (2048.0, 0)
        assert [other.loss_scale() for other in _amp_state.loss_scalers[1:]] == [65536.0] * 2

    def test_bounds_and_window_of_a_loss_scaler_are_read(self) -> None:
        setup("O1", min_loss_scale=8.0, max_loss_scale=2.0**20, scale_window=5)
        scaler = _amp_state.loss_scalers[0]
        assert (scaler._min_loss_scale, scaler._max_loss_scale, scaler._scale_seq_len) == (8.0, 2.0**20, 5)
        assert (_amp_state.min_loss_scale, _amp_state.max_loss_scale) == (8.0, 2.0**20)

    def test_making_a_loss_scaler_is_an_error(self) -> None:
        with pytest.raises(OptionError, match=r"type ampatch\.amp\.LossScaler"):
            LossScaler("dynamic")

    @pytest.mark.parametrize("opt_level", ["O1", "O2"])
    @pytest.mark.parametrize("passes", [(1.0, 1.0), (float("inf"), 1.0), (1.0, float("inf"))], ids=str)
    def test_an_overflow_verdict_that_the_script_sets_counts(self, opt_level: str, passes: tuple[float, ...]) -> None:
        # As where gradients are reduced by hand: another process may have found what this one did not.
        model, optimizer = setup(opt_level, init_scale=1024.0)
        scaler, overflows = _amp_state.loss_scalers[0], float("inf") in passes
        for factor in passes:
            run_pass(model, optimizer, factor, delay_overflow_check=True)
        finite = [bool(each.grad.isfinite().all()) for each in amp.master_params(optimizer) if each.grad is not None]
        assert all(finite) is not overflows
        scaler._overflow_buf = torch.tensor([int(overflows)], dtype=torch.int32)
        assert scaler.update_scale() is overflows
        assert scaler.loss_scale() == (512.0 if overflows else 1024.0)
        optimizer.zero_grad()
        run_pass(model, optimizer)
        before = [parameter.detach().clone() for parameter in amp.master_params(optimizer)]
        optimizer.step()
        assert not amp.step_was_skipped(optimizer)
        assert any(not torch.equal(*pair) for pair in zip(before, amp.master_params(optimizer), strict=True))

    def test_update_scale_follows_a_script_that_unscales_by_itself(self) -> None:
        setup("O1")
        scaler = _amp_state.loss_scalers[0]
        scaler._overflow_buf = torch.zeros(1, dtype=torch.int32)
        assert scaler.update_scale() is False
        assert (scaler.loss_scale(), scaler._unskipped) == (65536.0, 1)
        scaler._overflow_buf = torch.ones(1, dtype=torch.int32)
        assert scaler.update_scale() is True
        assert (scaler.loss_scale(), scaler._unskipped) == (32768.0, 0)

    def test_a_loss_scaler_of_an_ended_session_is_an_error(self) -> None:
        setup("O1")
        scaler = _amp_state.loss_scalers[0]
        amp.deinitialize()
        gc.collect()
        with pytest.raises(UsageError, match=r"amp\.deinitialize\(\) was called"):
            scaler.loss_scale()


class TestStash:
    def test_stash_has_masters_beside_their_half_parameters(self) -> None:
        model, optimizer = setup("O2")
        stash = optimizer._amp_stash
        halves = [parameter for parameter in model.parameters() if parameter.dtype is torch.float16]
        assert [id(each) for each in stash.all_fp16_params] == [id(each) for each in halves]
        assert [each.dtype for each in stash.all_fp32_from_fp16_params] == [torch.float32] * len(halves)
        assert {id(each) for each in stash.all_fp32_from_fp16_params} <= set(map(id, amp.master_params(optimizer)))
        assert {id(each) for each in stash.all_fp32_from_fp32_params} == set(map(id, model[1].parameters()))

    def test_stash_without_masters_has_the_parameters_themselves(self) -> None:
        model, optimizer = setup("O1")
        assert optimizer._amp_stash.all_fp16_params == []
        assert optimizer._amp_stash.all_fp32_from_fp16_params == []
        assert len(optimizer._amp_stash.all_fp32_params) == len(list(model.parameters()))

    def test_stash_leaves_out_frozen_parameters(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[0].requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        apex_amp.initialize(model, optimizer, opt_level="O2")
        stash = optimizer._amp_stash
        assert [id(each) for each in stash.all_fp16_params] == [id(each) for each in model[1].parameters()]
        for half, master in zip(stash.all_fp16_params, stash.all_fp32_from_fp16_params, strict=True):
            assert torch.equal(half, master.half())

    def test_stash_has_the_optimizers_groups(self) -> None:
        _, optimizer = setup("O2")
        optimizer.add_param_group({"params": nn.Linear(2, 2).parameters()})
        stash = optimizer._amp_stash
        assert list(map(len, stash.fp16_groups)) == list(map(len, stash.fp32_from_fp16_groups)) == [4, 0]
        assert list(map(len, stash.fp32_from_fp32_groups)) == [2, 2]
        amp.deinitialize()
        assert stash.all_fp16_params == []

    def test_gradients_of_masters_can_be_dropped_through_the_stash(self) -> None:
        model, optimizer = setup("O2")
        run_pass(model, optimizer)
        for master in optimizer._amp_stash.all_fp32_from_fp16_params:
            assert master.grad is not None
            master.grad = None
        optimizer.zero_grad()

    def test_lazy_initialisation_of_the_stash_can_be_asked_for(self) -> None:
        _, optimizer = setup("O2")
        assert optimizer._amp_stash.lazy_init_called
        optimizer._amp_stash.lazy_init_called = False
        optimizer._amp_lazy_init()
        optimizer._lazy_init_maybe_master_weights()

    @pytest.mark.parametrize("opt_level", ["O1", "O2"])
    def test_an_optimizer_is_copied_pickled_and_given_back_without_its_stash(self, opt_level: str) -> None:
        model, optimizer = setup(opt_level)
        run_pass(model, optimizer)
        optimizer.step()
        assert not hasattr(copy.deepcopy(optimizer), "_amp_stash")
        pickle.dump(optimizer, io.BytesIO())
        amp.deinitialize()
        assert not {"_amp_stash", "_amp_lazy_init", "_lazy_init_maybe_master_weights"} & set(vars(optimizer))


@pytest.mark.usefixtures("edited_lists")
class TestLists:
    def test_lists_hold_what_the_yaml_lists(self) -> None:
        assert lists.changes() == {}
        assert functional_overrides.MODULE is F
        assert "linear" in functional_overrides.FP16_FUNCS
        assert "softmax" in functional_overrides.FP32_FUNCS
        assert "binary_cross_entropy" in dict(functional_overrides.BANNED_FUNCS)
        assert torch_overrides.MODULE is torch
        assert "mm" in torch_overrides.FP16_FUNCS
        assert "dot" in torch_overrides.CASTS
        assert tensor_overrides.MODULE is torch.Tensor
        assert "__matmul__" in tensor_overrides.FP16_FUNCS

    def test_a_function_taken_out_of_the_blacklist_keeps_its_type(self) -> None:
        functional_overrides.FP32_FUNCS.remove("softmax")
        setup("O1")
        assert softmax_type(torch.float16) is torch.float16
        assert softmax_type() is torch.float32

    @pytest.mark.parametrize("is_taken_out", [True, False])
    def test_a_function_put_into_the_whitelist_runs_in_half(self, is_taken_out: bool) -> None:
        if is_taken_out:
            functional_overrides.FP32_FUNCS.remove("softmax")
        functional_overrides.FP16_FUNCS.append("softmax")
        setup("O1")
        assert softmax_type() is torch.float16

    def test_a_list_may_be_replaced(self) -> None:
        torch_overrides.FP16_FUNCS = [name for name in torch_overrides.FP16_FUNCS if name != "mm"]
        setup("O1")
        assert product_type() is torch.float32
        assert torch.bmm(torch.ones(1, 2, 2), torch.ones(1, 2, 2, requires_grad=True)).dtype is torch.float16

    def test_methods_have_a_list_of_their_own(self) -> None:
        weight = torch.ones(2, 2, requires_grad=True)
        tensor_overrides.FP16_FUNCS.remove("__matmul__")
        setup("O1")
        assert (torch.ones(2, 2) @ weight).dtype is torch.float32
        assert torch.matmul(torch.ones(2, 2), weight).dtype is torch.float16

    def test_a_function_taken_out_of_the_banned_ones_may_be_called(self) -> None:
        functional_overrides.BANNED_FUNCS.clear()
        setup("O1")
        half = torch.full((2,), 0.5, dtype=torch.float16)
        F.binary_cross_entropy(half, half)

    def test_functions_that_torch_promotes_itself_can_be_taken_out(self) -> None:
        torch_overrides.SEQUENCE_CASTS.remove("cat")
        torch_overrides.CASTS.remove("add")
        setup("O1")
        assert torch.cat([torch.ones(1), torch.ones(1, dtype=torch.float16)]).dtype is torch.float32

    def test_the_users_cast_lists_count_more_than_edited_lists(self) -> None:
        functional_overrides.FP32_FUNCS.remove("softmax")
        setup("O1", cast_lists={"blacklist": {"torch.nn.functional": ["softmax"]}})
        assert softmax_type(torch.float16) is torch.float32

    def test_init_heeds_edited_lists(self) -> None:
        functional_overrides.FP16_FUNCS.append("softmax")
        with apex_amp.init():
            assert softmax_type() is torch.float16

    def test_edited_lists_mean_nothing_at_o2(self) -> None:
        functional_overrides.FP32_FUNCS.remove("softmax")
        setup("O2")

    def test_a_listed_name_that_torch_lacks_warns(self) -> None:
        functional_overrides.FP16_FUNCS.append("sofmax")
        with pytest.warns(AmpWarning, match=r"FP16_FUNCS holds 'sofmax', .* Did you mean 'softmax'"):
            setup("O1")
        assert product_type() is torch.float16

    def test_a_function_put_into_two_lists_is_an_error(self) -> None:
        torch_overrides.FP16_FUNCS.append("relu")
        torch_overrides.CASTS.append("relu")
        with pytest.raises(OptionError, match=r"torch_overrides\.FP16_FUNCS and into CASTS"):
            setup("O1")

    @pytest.mark.parametrize("item", [torch.relu, ["relu"], ()], ids=["function", "list", "tuple"])
    def test_an_entry_that_is_no_name_is_an_error(self, item: object) -> None:
        torch_overrides.FP16_FUNCS.append(item)
        with pytest.raises(OptionError, match="expected the name of a function"):
            setup("O1")
