"""Of the loss scale by itself: the policy, its transition, and the scaler around it, without models or optimizers."""

from __future__ import annotations

import copy
import functools
import math
import pickle
from typing import Any

import pytest
import stepping
import torch
from helpers import HALF_DTYPES, assert_same_bits, assert_same_state, dtype_name
from hypothesis import given
from hypothesis import strategies as st
from optimizers import OVERFLOW, SGD, backward
from torch import nn

from ampatch import amp
from ampatch.errors import OptionError
from ampatch.scaling import loss_scaler
from ampatch.scaling.loss_scaler import LossScaler, ScalePolicy, ScaleState, first_state, make_policy, next_state

MODEL = nn.Linear(2, 3)

started = functools.partial(stepping.started, opt_level="O1", half_dtype="float16", init_scale=1024.0)


def overflow(model: nn.Module, optimizer: Any) -> None:
    backward(stepping.loss_of(model) * math.inf, optimizer)


def after(overflows: str, policy: ScalePolicy) -> ScaleState:
    """The state after a run of passes, each "x" (overflow) or "." (clean)."""
    state = first_state(policy)
    for overflow in overflows:
        state = next_state(state, overflow == "x", policy)
    return state


def passes(scaler: LossScaler, overflows: str) -> None:
    for overflow in overflows:
        scaler.unscale_([torch.tensor([math.inf if overflow == "x" else 1.0])])
        scaler.update()


class TestPolicy:
    def test_default_policy_is_that_of_the_paper_and_of_apex(self):
        assert make_policy("dynamic") == ScalePolicy(
            dynamic=True,
            init_scale=2.0**16,
            growth_factor=2.0,
            backoff_factor=0.5,
            scale_window=2000,
            hysteresis=1,
            min_loss_scale=2.0**-24,
            max_loss_scale=2.0**24,
        )

    @pytest.mark.parametrize("loss_scale", [128, 128.0, "128", "1.28e2"])
    def test_static_scale_starts_and_stays_where_it_was_put(self, loss_scale):
        policy = make_policy(loss_scale, max_loss_scale=2.0)
        assert (policy.dynamic, policy.init_scale) == (False, 128.0)

    @pytest.mark.parametrize(
        ("init_scale", "expected"), [(2.0**20, 2.0**10), (2.0**-20, 2.0**-2), (8.0, 8.0)], ids=["above", "below", "in"]
    )
    def test_first_dynamic_scale_is_between_floor_and_ceiling(self, init_scale, expected):
        policy = make_policy("dynamic", init_scale=init_scale, min_loss_scale=2.0**-2, max_loss_scale=2.0**10)
        assert policy.init_scale == expected

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"min_loss_scale": 4.0, "max_loss_scale": 2.0}, "min_loss_scale=4.0 is above max_loss_scale=2.0"),
            ({"min_loss_scale": 0.0}, "min_loss_scale is 0.0"),
            ({"max_loss_scale": math.inf}, "max_loss_scale is inf"),
            ({"init_scale": -1.0}, "init_scale is -1.0"),
            ({"init_scale": math.nan}, "init_scale is nan"),
            ({"init_scale": "65536"}, "init_scale is '65536'"),
            ({"init_scale": True}, "init_scale is True"),
            ({"scale_factor": 1}, "scale_factor is 1; expected a number above 1"),
            ({"scale_factor": 0.5}, "scale_factor is 0.5; expected a number above 1"),
            ({"growth_factor": 1}, "growth_factor is 1; expected a number above 1"),
            ({"growth_factor": math.inf}, "growth_factor is inf"),
            ({"backoff_factor": 1.0}, "backoff_factor is 1.0; expected a number below 1"),
            ({"backoff_factor": 0}, "backoff_factor is 0"),
            ({"backoff_factor": "0.5"}, "backoff_factor is '0.5'"),
            ({"scale_factor": 4, "backoff_factor": 0.5}, "scale_factor=4 stands beside"),
            ({"scale_window": 0}, "scale_window is 0"),
            ({"scale_window": 10.0}, "scale_window is 10.0"),
            ({"hysteresis": 0}, "hysteresis is 0"),
            ({"hysteresis": True}, "hysteresis is True"),
            ({"loss_scale": 1e-300}, "loss_scale is 1e-300"),
            ({"loss_scale": 1e300}, "loss_scale is 1e\\+300"),
            ({"loss_scale": "dynamc"}, "loss_scale is 'dynamc'.*Did you mean 'dynamic'"),
        ],
        ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
    )
    def test_option_out_of_range_is_named(self, arguments, message):
        with pytest.raises(OptionError, match=message):
            LossScaler(**{"loss_scale": "dynamic", **arguments})


class TestTransition:
    @pytest.mark.parametrize(
        ("overflows", "loss_scale"),
        [("x", 16), ("xx", 16), ("xxx", 8), ("x.x.x", 8), ("xxxx", 4), ("xx...xx", 32), ("xx...xxx", 16)],
    )
    def test_hysteresis_forgives_overflows_until_it_is_used_up_and_growth_refills_it(self, overflows, loss_scale):
        policy = ScalePolicy(dynamic=True, init_scale=16.0, scale_window=3, hysteresis=3)
        assert after(overflows, policy).loss_scale == loss_scale

    def test_scale_stops_at_floor_and_ceiling(self):
        policy = ScalePolicy(dynamic=True, init_scale=16.0, scale_window=1, min_loss_scale=5.0, max_loss_scale=50.0)
        assert after("xxxx", policy).loss_scale == 5
        assert after("....", policy).loss_scale == 50

    def test_static_scale_never_changes(self):
        policy = ScalePolicy(dynamic=False, init_scale=16.0, scale_window=1)
        assert after("x.x.", policy).loss_scale == 16


def of_apex(overflows: str, window: int) -> tuple[float, int]:
    """The scale and the clean steps of Apex's dynamic scaler, after passes."""
    scale, unskipped = 2.0**16, 0
    for overflow in overflows:
        if overflow == "x":
            scale, unskipped = scale / 2, 0
            continue
        unskipped += 1
        if unskipped == window:
            scale, unskipped = min(scale * 2, 2.0**24), 0
    return scale, unskipped


def of_torch(overflows: str, window: int) -> tuple[float, int]:
    """The same of torch's own scaler."""
    scaler = torch.amp.GradScaler("cpu", growth_interval=window)
    weight = nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([weight])
    for overflow in overflows:
        scaler.scale(weight)
        weight.grad = torch.tensor(math.inf if overflow == "x" else 0.0)
        scaler.step(optimizer)
        scaler.update()
    return scaler.get_scale(), scaler._get_growth_tracker()


class TestPresets:
    @pytest.mark.parametrize("scaler", ["apex", "torch"])
    @pytest.mark.parametrize(
        "overflows", ["", "x", "." * 30, "x" * 120, "." * 150, "..x...xx..", "x" * 100 + "." * 20], ids=len
    )
    @pytest.mark.parametrize("window", [1, 3])
    def test_preset_takes_the_scales_of_the_scaler_it_is_named_after(self, scaler, overflows, window):
        policy = make_policy("dynamic", scaler=scaler, scale_window=window)
        used = LossScaler.from_policy(policy)
        passes(used, overflows)
        wanted = {"apex": of_apex, "torch": of_torch}[scaler](overflows, window)
        assert (used.state.loss_scale, used.state.unskipped) == wanted
        assert used.state == after(overflows, policy)

    def test_presets_differ_in_their_bounds_only(self):
        bounds = {"min_loss_scale": 1.0, "max_loss_scale": 2.0**30}
        assert make_policy("dynamic", scaler="apex", **bounds) == make_policy("dynamic", **bounds)
        assert make_policy("dynamic", scaler="torch", **bounds) == make_policy("dynamic", **bounds)

    @pytest.mark.parametrize(
        ("value", "told"), [("Apex", "Did you mean 'apex'"), ("deepspeed", "'apex' or 'torch'"), (2, "scaler is 2")]
    )
    def test_preset_of_another_name_is_refused(self, value, told):
        with pytest.raises(OptionError, match=told):
            make_policy("dynamic", scaler=value)


class TestScaler:
    @given(
        overflows=st.text("x.", max_size=30),
        window=st.integers(1, 4),
        hysteresis=st.integers(1, 3),
        loss_scale=st.sampled_from(["dynamic", 4.0]),
    )
    def test_scaler_takes_the_states_of_the_pure_function(self, overflows, window, hysteresis, loss_scale):
        scaler = LossScaler(loss_scale, init_scale=4.0, scale_window=window, hysteresis=hysteresis)
        passes(scaler, overflows)
        assert scaler.state == after(overflows, scaler.policy)

    @pytest.mark.parametrize("dtype", [*HALF_DTYPES, torch.float32, torch.float64], ids=dtype_name)
    def test_loss_is_scaled_in_float32(self, dtype):
        loss = torch.tensor([[3.0, 0.5]], dtype=dtype)
        scaled = LossScaler().scale(loss)
        assert_same_bits(scaled, torch.tensor([[3 * 2.0**16, 2.0**15]]))

    def test_static_scale_of_one_gives_back_the_loss_itself(self):
        loss = torch.tensor(3.0)
        assert LossScaler(1.0).scale(loss) is loss
        assert LossScaler(2.0).scale(loss).item() == 6

    @pytest.mark.parametrize("loss_scale", ["dynamic", 8.0, 1.0])
    @pytest.mark.parametrize("dtype", [*HALF_DTYPES, torch.float32], ids=dtype_name)
    def test_gradients_are_unscaled_exactly(self, dtype, loss_scale):
        scaler = LossScaler(loss_scale, init_scale=8.0)
        factor = 1 if loss_scale == 1 else 8
        grad = torch.tensor([0.5 * factor, 3 * factor], dtype=dtype)
        scaler.unscale_([grad])
        assert_same_bits(grad, torch.tensor([0.5, 3.0], dtype=dtype))

    def test_gradients_of_any_kind_are_unscaled_in_place(self):
        scaler = LossScaler(init_scale=8.0)
        embedding = nn.Embedding(4, 1, sparse=True)
        scaler.scale(embedding(torch.tensor([1, 1, 3])).sum()).backward()
        grads = [torch.tensor([8.0, 4.0]), None, torch.tensor(16.0, dtype=torch.float64), embedding.weight.grad]
        overflow = scaler.unscale_(iter(grads))
        assert (grads[0].tolist(), grads[2].item(), overflow.item()) == ([1.0, 0.5], 2.0, 0.0)
        assert embedding.weight.grad.to_dense().flatten().tolist() == [0, 2, 0, 1]

    @pytest.mark.parametrize("loss_scale", ["dynamic", 8.0])
    def test_one_gradient_of_two_parameters_is_unscaled_once(self, loss_scale):
        scaler = LossScaler(loss_scale, init_scale=8.0)
        first, second = (torch.ones(2, requires_grad=True) for _ in range(2))
        loss = ((first + second) * torch.tensor([1.0, 2.0])).sum()
        grads = torch.autograd.grad(scaler.scale(loss), [first, second])
        assert grads[0] is grads[1]
        scaler.unscale_(grads)
        assert grads[0].tolist() == [1, 2]

    def test_unscale_tells_of_its_own_gradients_and_update_heeds_all_since_the_last(self):
        scaler = LossScaler(init_scale=8.0)
        first = scaler.unscale_([torch.tensor([math.nan])])
        second = scaler.unscale_([torch.tensor([1.0])])
        scaler.update()
        third = scaler.unscale_([torch.tensor([1.0])])
        scaler.update()
        assert (first.item(), second.item(), third.item()) == (1, 0, 0)
        assert scaler.state == ScaleState(4.0, 1, 0)

    @given(verdicts=st.lists(st.tuples(st.sampled_from(["note", "update_by"]), st.booleans()), max_size=20))
    def test_update_by_a_verdict_is_a_note_of_it_and_an_update(self, verdicts):
        at_once, one_by_one = (LossScaler(init_scale=4.0, scale_window=2) for _ in range(2))
        for call, overflow in verdicts:
            found_inf = torch.tensor(float(overflow))
            getattr(at_once, call)(found_inf)
            one_by_one.note(found_inf)
            if call == "update_by":
                one_by_one.update()
            assert found_inf == overflow
        assert at_once.state == one_by_one.state

    def test_verdict_that_a_cuda_graph_notes_counts_at_every_replay(self, monkeypatch):
        scaler = LossScaler(init_scale=8.0)
        monkeypatch.setattr(loss_scaler, "is_capturing", lambda: True)
        scaler.note(torch.tensor(0.0))  # recorded
        monkeypatch.setattr(loss_scaler, "is_capturing", lambda: False)
        for scale in (4.0, 2.0):
            scaler._found_inf.fill_(1)  # as a replay writes to it, without a word to Python
            scaler.update_by(torch.tensor(0.0))
            assert scaler.state.loss_scale == scale

    @pytest.mark.parametrize("loss_scale", ["dynamic", 2.0**16], ids=["dynamic", "static"])
    def test_snapshot_keeps_its_value_when_the_scale_changes(self, loss_scale):
        scaler = LossScaler(loss_scale)
        before = scaler.snapshot()
        scaler.load_state_dict({"loss_scale": 4.0, "unskipped": 0})
        assert (before, scaler.snapshot()) == (2.0**16, 4.0)

    @pytest.mark.parametrize("loss_scale", ["dynamic", 4.0], ids=["dynamic", "static"])
    def test_snapshot_takes_part_in_backward_after_one_in_inference_mode(self, loss_scale):
        scaler = LossScaler(loss_scale, init_scale=4.0)
        with torch.inference_mode():
            scaler.snapshot()
        weight = torch.ones(2, requires_grad=True)
        (weight * scaler.snapshot()).sum().backward()
        assert weight.grad.tolist() == [4.0, 4.0]

    def test_clean_steps_of_a_static_scale_go_on_from_those_loaded(self):
        scaler = LossScaler(4.0)
        passes(scaler, "..")
        scaler.load_state_dict({"loss_scale": 4.0, "unskipped": 10})
        passes(scaler, "...")
        assert scaler.state_dict()["unskipped"] == 13

    @pytest.mark.parametrize("loss_scale", [1.0, 4.0])
    def test_static_scale_is_never_checked(self, loss_scale):
        scaler = LossScaler(loss_scale)
        grad = torch.tensor([math.inf, 4.0])
        overflow = scaler.unscale_([grad])
        scaler.update()
        assert overflow.item() == 0
        assert grad.tolist() == [math.inf, 4 / loss_scale]
        assert scaler.state == ScaleState(loss_scale, 1, 1)

    def test_gradients_unscaled_in_place_can_be_differentiated_again(self):
        weight = torch.tensor([2.0], requires_grad=True)
        scaler = LossScaler()
        (grad,) = torch.autograd.grad(scaler.scale(weight**3), weight, create_graph=True)
        scaler.unscale_([grad])
        (second,) = torch.autograd.grad(grad**2, weight)
        assert second.item() == 2 * 12 * 12

    @pytest.mark.parametrize(
        ("grads", "found"),
        [
            (MODEL, "found Linear;"),
            (torch.ones(2), "found a tensor of torch.float32;"),
            (MODEL.parameters(), r"found a parameter of shape \(3, 2\) among"),
            ([torch.ones(2, dtype=torch.long)], "found a tensor of torch.int64 among"),
            ([1.0], "found float among"),
        ],
        ids=["model", "tensor", "parameters", "integers", "numbers"],
    )
    def test_objects_that_are_no_gradients_are_refused(self, grads, found):
        with pytest.raises(OptionError, match=f"{found}.*expected gradients, such as"):
            LossScaler().unscale_(grads)

    def test_object_that_is_no_loss_is_refused(self):
        with pytest.raises(OptionError, match="the loss is float; expected a floating tensor"):
            LossScaler().scale(1.0)

    def test_loop_that_scales_by_hand_trains_as_torch_without_the_skipped_step(self):
        model = stepping.network()
        optimizer = SGD(model.parameters())
        scaler = LossScaler()
        for index in range(6):
            optimizer.zero_grad()
            scaler.scale(stepping.loss_of(model, index) * (OVERFLOW if index == 2 else 1)).backward()
            if not scaler.unscale_(parameter.grad for parameter in model.parameters()):
                optimizer.step()
            scaler.update()
        reference, _ = stepping.trained_by_torch(SGD, stepping.network(), 0, 1, 3, 4, 5)
        assert_same_state(model.state_dict(), reference.state_dict())
        assert scaler.state == ScaleState(2.0**15, 3, 0)

    def test_copies_and_pickles_go_on_by_themselves(self):
        scaler = LossScaler(init_scale=8.0, hysteresis=2)
        passes(scaler, ".x")
        for twin in (copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))):
            assert (twin.state, twin.policy) == (scaler.state, scaler.policy)
            passes(twin, "x")
            assert twin.state.loss_scale == 4
        assert scaler.state.loss_scale == 8


class TestStateDict:
    def test_state_dict_has_the_keys_of_apex_and_plain_numbers(self):
        scaler = LossScaler(init_scale=8.0)
        passes(scaler, "x..")
        saved = scaler.state_dict()
        assert saved == {"loss_scale": 4.0, "unskipped": 2}
        assert [type(value) for value in saved.values()] == [float, int]
        assert LossScaler(hysteresis=2).state_dict() == {"loss_scale": 2.0**16, "unskipped": 0, "hysteresis_left": 2}

    @given(overflows=st.text("x.", max_size=20), further=st.text("x.", max_size=20), hysteresis=st.integers(1, 3))
    def test_scaler_that_loads_a_state_goes_on_like_the_one_that_saved_it(self, overflows, further, hysteresis):
        scaler, resumed = [LossScaler(init_scale=8.0, scale_window=3, hysteresis=hysteresis) for _ in range(2)]
        passes(scaler, overflows)
        resumed.load_state_dict(scaler.state_dict())
        passes(scaler, further)
        passes(resumed, further)
        assert resumed.state_dict() == scaler.state_dict()
        assert resumed.state.loss_scale == scaler.state.loss_scale

    def test_static_scale_is_replaced_by_a_loaded_one(self):
        scaler = LossScaler(1.0)
        scaler.load_state_dict({"loss_scale": 128.0, "unskipped": 5})
        assert scaler.scale(torch.tensor(1.0)).item() == 128
        scaler.load_state_dict({"loss_scale": 1.0, "unskipped": 5})
        assert scaler.scale(torch.tensor(1.0)).item() == 1

    @pytest.mark.parametrize(
        ("saved", "message"),
        [
            (3, "found int as the state of a loss scaler"),
            ({}, r"lacks \['loss_scale', 'unskipped'\]"),
            ({"loss_scale": 8.0}, r"lacks \['unskipped'\]"),
            ({"loss_scale": 8.0, "unskipped": 0, "scale": 1}, r"unexpected keys \['scale'\]"),
            ({"loss_scale": "dynamic", "unskipped": 0}, "loss_scale is 'dynamic'"),
            ({"loss_scale": math.nan, "unskipped": 0}, "loss_scale is nan"),
            ({"loss_scale": 0.0, "unskipped": 0}, "loss_scale is 0.0"),
            ({"loss_scale": 1e300, "unskipped": 0}, r"loss_scale is 1e\+300"),
            ({"loss_scale": 8.0, "unskipped": -1}, "unskipped is -1"),
            ({"loss_scale": 8.0, "unskipped": 2**40}, f"unskipped is {2**40}"),
            ({"loss_scale": 8.0, "unskipped": 0, "hysteresis_left": 1.5}, "hysteresis_left is 1.5"),
        ],
        ids=str,
    )
    def test_unsound_state_is_refused_and_changes_nothing(self, saved, message):
        scaler = LossScaler(init_scale=4.0)
        passes(scaler, ".")
        with pytest.raises(OptionError, match=message):
            scaler.load_state_dict(saved)
        assert scaler.state == ScaleState(4.0, 1, 1)


class TestOverflowsWithoutASkippedStep:
    @pytest.mark.filterwarnings("ignore:the loss of a skipped step is inf")
    def test_state_with_a_window_of_one_step_can_be_loaded_again(self):
        model, optimizer = started(scale_window=1)
        for set_to_none in (True, False):
            overflow(model, optimizer)
            optimizer.zero_grad(set_to_none)
        stepping.train(model, optimizer, math.inf)
        assert amp.stats()["clean_steps"] == 0
        amp.load_state_dict(amp.state_dict())

    def test_loaded_scale_is_not_moved_by_an_earlier_overflow_that_was_cleared(self):
        model, optimizer = started()
        overflow(model, optimizer)
        optimizer.zero_grad()
        amp.load_state_dict({"loss_scaler0": {"loss_scale": 4096.0, "unskipped": 7}})
        stepping.train(model, optimizer, 1.0)
        assert amp.get_loss_scale() == 4096.0
        assert amp.stats()["clean_steps"] == 8

    def test_scale_that_fell_without_steps_is_not_inherited_by_the_next_run(self):
        model, optimizer = started()
        for _ in range(4):
            optimizer.zero_grad()
            overflow(model, optimizer)
        assert amp.get_loss_scale() == 128.0
        started()
        assert amp.get_loss_scale() == 1024.0
