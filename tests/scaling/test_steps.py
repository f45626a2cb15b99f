"""Steps by whatever way: closures, names bound before, optimizers amp was not handed, losses that no scale helps."""

from __future__ import annotations

import contextlib
import functools
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import stepping
import torch
from helpers import assert_same_state
from optimizers import SGD, backward, initialize
from stepping import closure_of, every_half, loss_of, network, o1_and_o2, train, weights
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ampatch import amp
from ampatch.errors import AmpWarning, LossScaleError, OptionError, UsageError
from ampatch.runtime import runtime

OVERFLOW = 1e30  # beyond a half type
NO_SCALE = "no amp.scale_loss was told of"
ANOTHER_LOSS = "begins with another loss than the scaled one"

FUSED_ADAM = functools.partial(torch.optim.Adam, fused=True)


def started(make: Callable[..., Any] = SGD, **options: Any) -> tuple[Any, Any]:
    return stepping.started(make, **{"opt_level": "O1", "half_dtype": "float16", "init_scale": 1024.0, **options})


def warned_once(function: Callable[[], object], message: str) -> warnings.WarningMessage:
    """Calls a function three times, which is to warn once; returns the warning."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(3):
            function()
    assert len(found) == 1
    assert re.search(message, str(found[0].message))
    assert found[0].category is AmpWarning
    return found[0]


class AnyStep(torch.optim.SGD):
    """An optimizer that takes closures in ways of its own, and keeps its other arguments."""

    def step(self, closure: Any = None, other: Any = None, *, many: Any = (), named: Any = None, **rest: Any) -> Any:
        self.rest = rest
        results = [each() for each in (closure, other, *many, *(named or {}).values()) if each is not None]
        super().step()
        return results


ANY_STEP = functools.partial(AnyStep, lr=0.1)


class TestClosures:
    @every_half
    @o1_and_o2
    @pytest.mark.parametrize(
        "step",
        [
            lambda optimizer, closure: optimizer.step(closure),
            lambda optimizer, closure: optimizer.step(closure=closure),
            lambda optimizer, closure: optimizer.step(None, closure),
            lambda optimizer, closure: optimizer.step(other=closure),
            lambda optimizer, closure: optimizer.step(many=[closure, closure]),
            lambda optimizer, closure: optimizer.step(named={"a": closure}),
        ],
        ids=["first", "keyword", "second", "other-keyword", "list", "dict"],
    )
    def test_closure_sees_casts_wherever_it_stands_among_the_arguments(self, step, opt_level, half_dtype):
        model, optimizer = started(ANY_STEP, opt_level=opt_level, half_dtype=half_dtype)
        seen: list[torch.dtype] = []
        model[2].register_forward_hook(lambda _, __, output: seen.append(output.dtype))

        def closure() -> float:
            optimizer.zero_grad()
            backward(loss_of(model), optimizer)
            return 3.0

        before = weights(model)
        assert set(step(optimizer, closure)) == {3.0}
        assert set(seen) == {half_dtype}
        assert not torch.equal(model[0].weight, before[0])

    def test_second_closure_that_overflows_skips_the_step(self):
        model, optimizer = started(ANY_STEP)
        before = weights(model)
        optimizer.step(None, lambda: backward(loss_of(model) * OVERFLOW, optimizer))
        assert amp.step_was_skipped(optimizer)
        assert_same_state(weights(model), before)

    def test_other_arguments_of_a_step_are_passed_on_as_the_objects_they_are(self):
        model, optimizer = started(ANY_STEP)
        rest = {"grads": [torch.ones(2)], "model": model, "kind": dict, "number": 3}
        optimizer.step(**rest)
        assert optimizer.rest.keys() == rest.keys()
        assert all(optimizer.rest[name] is value for name, value in rest.items())

    def test_undone_step_leaves_tensors_and_uncopyable_options_the_objects_they_are(self):
        model, optimizer = started(lambda parameters: torch.optim.LBFGS(parameters, max_iter=4))
        options = {"lr": torch.tensor(0.1), "lock": threading.Lock(), "nested": {"locks": [threading.Lock()]}}
        optimizer.param_groups[0].update(options)
        before = weights(model)
        optimizer.step(closure_of(model, optimizer, 1.0, OVERFLOW, OVERFLOW, OVERFLOW))
        assert amp.step_was_skipped(optimizer)
        assert_same_state(weights(model), before)
        assert all(optimizer.param_groups[0][name] is options[name] for name in ("lr", "lock"))
        assert options["lr"].item() == pytest.approx(0.1)

    @every_half
    @o1_and_o2
    @pytest.mark.parametrize("loss_scale", ["dynamic", 128.0])
    def test_closure_that_returns_the_scaled_loss_is_warned_of_once(self, loss_scale, opt_level, half_dtype):
        model, optimizer = started(
            lambda parameters: torch.optim.LBFGS(parameters, max_iter=3),
            opt_level=opt_level,
            half_dtype=half_dtype,
            loss_scale=loss_scale,
        )

        def closure() -> Tensor:
            optimizer.zero_grad()
            with amp.scale_loss(loss_of(model), optimizer) as scaled_loss:
                scaled_loss.backward()
            return scaled_loss

        warned_once(lambda: optimizer.step(closure), "returns the scaled loss")


STEPS: dict[str, Callable[[Any], Callable[[], object]]] = {
    "bound": lambda optimizer: optimizer.step,
    "compiled": lambda optimizer: torch.compile(optimizer.step, backend="eager"),
    "of-the-class": lambda optimizer: functools.partial(torch.optim.SGD.step, optimizer),
}


@every_half
@o1_and_o2
@pytest.mark.parametrize("bind", STEPS.values(), ids=STEPS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_step_bound_before_initialize_raises_before_it_writes(bind, opt_level, half_dtype):
    model = network()
    optimizer = SGD(model.parameters())
    step = bind(optimizer)
    amp.initialize(model, optimizer, opt_level=opt_level, half_dtype=half_dtype, verbosity=0)
    backward(loss_of(model), optimizer)
    before = weights(model)
    with pytest.raises(UsageError, match=r"goes past amp, .* bound, or compiled, before amp\.initialize"):
        step()
    assert_same_state(weights(model), before)
    optimizer.step()
    assert not torch.equal(model[0].weight, before[0])
    amp.deinitialize()
    step()


@o1_and_o2
@pytest.mark.parametrize("is_base_used", ["before", "after", "never"])
def test_method_that_calls_super_step_raises_before_it_writes(opt_level, is_base_used):
    class Base(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    class Minimizer(Base):
        def minimize(self) -> None:
            super().step()

    if is_base_used == "before":
        Base(network().parameters())  # torch's hooks are then called at its step
    own_step = Base.step
    model = network()
    optimizer = Minimizer(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=opt_level, half_dtype="float16", verbosity=0)
    calls: list[object] = []
    if is_base_used == "after":
        other = Base(network().parameters())
        other.register_step_pre_hook(lambda *_: calls.append(other))
    backward(loss_of(model) * OVERFLOW, optimizer)
    before = weights(model)
    with pytest.raises(UsageError, match=r"calls super\(\)\.step\(\)\. Call .* self\.step\(\)"):
        optimizer.minimize()
    assert_same_state(weights(model), before)
    optimizer.step()
    assert amp.step_was_skipped(optimizer)
    amp.deinitialize()
    if is_base_used == "after":  # torch has wrapped the step for good, to call the hooks of each object
        other.step()
        assert other in calls
    else:
        assert Base.step is own_step
    optimizer.minimize()


@pytest.mark.slow
def test_step_compiled_after_initialize_skips():
    model, optimizer = started()
    step = torch.compile(optimizer.step, backend="eager")
    backward(loss_of(model) * OVERFLOW, optimizer)
    before = weights(model)
    step()
    assert amp.step_was_skipped(optimizer)
    assert_same_state(weights(model), before)


class TestForgottenScales:
    @o1_and_o2
    def test_closure_without_a_block_is_warned_of_once(self, opt_level):
        model, optimizer = started(opt_level=opt_level)

        def closure() -> None:
            optimizer.zero_grad()
            loss_of(model).backward()

        warned_once(lambda: optimizer.step(closure), NO_SCALE)

    @o1_and_o2
    def test_step_without_a_block_after_steps_with_one_is_warned_of(self, opt_level):
        model, optimizer = started(opt_level=opt_level, steps=3)
        loss_of(model).backward()
        with pytest.warns(AmpWarning, match=NO_SCALE):
            optimizer.step()

    def test_second_step_with_the_same_gradients_is_not_warned_of(self):
        model, optimizer = started()
        train(model, optimizer, 1)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        optimizer.step(lambda: None)

    @pytest.mark.parametrize("adopted", [True, False])
    @pytest.mark.parametrize("scaler", ["GradScaler", "LossScaler"])
    def test_gradients_that_another_scaler_unscales_are_not_warned_of(self, scaler, adopted):
        model = network()
        optimizer = SGD(model.parameters())
        amp.initialize(model, optimizer if adopted else [], half_dtype=torch.float16, verbosity=0)
        for _ in range(2):
            optimizer.zero_grad()
            if scaler == "GradScaler":
                of_torch = torch.amp.GradScaler("cpu", init_scale=1024.0)
                of_torch.scale(loss_of(model)).backward()
                of_torch.step(optimizer)
            else:
                by_hand = amp.LossScaler(init_scale=1024.0)
                by_hand.scale(loss_of(model)).backward()
                by_hand.unscale_(parameter.grad for parameter in model.parameters())
                optimizer.step()

    def test_gradients_judged_from_outside_are_not_warned_of_but_others_are(self):
        """As in scripts for Apex that reduce gradients over processes themselves, and then call `update_scale`."""
        model, theirs = network(), network()
        optimizer, other = SGD(model.parameters()), SGD(theirs.parameters())
        amp.initialize([model, theirs], [optimizer, other], loss_scale="dynamic", num_losses=2, verbosity=0)
        for _ in range(2):
            optimizer.zero_grad()
            backward(loss_of(model), optimizer)
            runtime.live.gradients.replace_verdicts(runtime.live.losses.scalers[0], torch.zeros(()))
            optimizer.step()
        loss_of(theirs).backward()
        with pytest.warns(AmpWarning, match=NO_SCALE):
            other.step()


class TestStepsWithoutGradients:
    """With half weights a step clears the gradients, with which torch would step again."""

    @pytest.mark.parametrize("options", [{}, {"half_dtype": torch.bfloat16, "master_weights": "split"}], ids=str)
    def test_a_second_step_is_warned_of_once(self, options):
        model, optimizer = started(opt_level="O2", **options)
        backward(loss_of(model), optimizer)
        optimizer.step()
        before = weights(model)
        warned_once(optimizer.step, "this SGD steps without gradients, and so changes nothing")
        assert all(map(torch.equal, weights(model), before))

    @pytest.mark.parametrize("clear", ["optimizer", "model"])
    @pytest.mark.parametrize("level", ["O1", "O2"])
    def test_a_step_after_clearing_is_not_warned_of(self, level, clear):
        model, optimizer = started(opt_level=level)
        for _ in range(2):
            backward(loss_of(model), optimizer)
            optimizer.step()
            (optimizer if clear == "optimizer" else model).zero_grad()
            optimizer.step()


class TestOptimizersThatAmpWasNotHanded:
    def test_step_is_warned_of_once_if_the_model_has_a_loss_scale(self):
        model, _ = started()
        loss_of(model).backward()
        other = SGD(model.parameters())
        warned_once(other.step, rf"SGD was never handed to amp.initialize, and steps .* {NO_SCALE}")

    @every_half
    def test_step_is_warned_of_once_if_it_updates_half_weights_without_masters(self, half_dtype):
        model = amp.initialize(network(), opt_level="O2", half_dtype=half_dtype, loss_scale=1, verbosity=0)
        loss_of(model).backward()
        warned_once(SGD(model.parameters()).step, "SGD updates half weights of a model that amp has")

    @o1_and_o2
    @pytest.mark.parametrize("is_inner_adopted", [False, True])
    def test_optimizer_that_has_another_inside_is_warned_of_only_if_amp_has_the_outer_one(
        self, opt_level, is_inner_adopted
    ):
        class Halves(torch.optim.Optimizer):
            def __init__(self, inner: Any) -> None:
                super().__init__(inner.param_groups[0]["params"], {})
                self.inner = inner

            def step(self) -> None:
                self.inner.step()

            def second_half(self) -> None:
                self.inner.step()

        model = network()
        inner = SGD(model.parameters())
        outer = Halves(inner)
        adopted = inner if is_inner_adopted else outer
        amp.initialize(model, adopted, opt_level=opt_level, half_dtype="float16", verbosity=0)
        backward(loss_of(model), adopted)
        if is_inner_adopted:
            outer.step()  # a warning would be an error
        else:
            warned_once(outer.second_half, "this SGD is inside of the Halves that amp has, and steps outside of its")

    def test_step_under_init_is_warned_of(self):
        with amp.init(half_dtype=torch.float16):
            model = network()
            loss_of(model).backward()
            with pytest.warns(AmpWarning, match=NO_SCALE):
                SGD(model.parameters()).step()

    def test_step_is_not_warned_of_at_a_scale_of_1_or_with_a_model_of_its_own(self):
        model, _ = started(half_dtype=torch.bfloat16, loss_scale=1)
        loss_of(model).backward()
        SGD(model.parameters()).step()
        amp.deinitialize()
        started()
        theirs = network()
        with amp.disable_casts():
            loss_of(theirs).backward()
        SGD(theirs.parameters()).step()


class Wrapper:
    """An optimizer around another, as Accelerate and Lightning have them."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def step(self) -> None:
        self.optimizer.step()


@o1_and_o2
def test_wrapper_around_an_adopted_optimizer_stands_for_it(opt_level):
    model, optimizer = started(opt_level=opt_level)
    wrapper = Wrapper(Wrapper(optimizer))
    train(model, wrapper, OVERFLOW)
    assert amp.step_was_skipped(wrapper)
    assert amp.skipped_steps(wrapper) == 1
    assert list(map(id, amp.master_params(wrapper))) == list(map(id, amp.master_params(optimizer)))
    wrapper.zero_grad()
    backward(loss_of(model), wrapper)
    assert amp.clip_grad_norm_(wrapper, 1e-3) > 0
    before = weights(model)
    wrapper.step()
    assert not torch.equal(model[0].weight, before[0])
    with pytest.raises(UsageError, match=r"was handed to amp\.initialize before"):
        amp.initialize(model, wrapper, opt_level=opt_level, half_dtype="float16", init_scale=1024.0, verbosity=0)


def test_wrappers_in_a_ring_are_refused():
    class Ring(Wrapper):
        param_groups = ()

    started()
    ring = Ring(None)
    ring.optimizer = ring
    with pytest.raises(UsageError, match="was never handed"):
        amp.step_was_skipped(Ring(ring))


class TestLossesThatAreNotFinite:
    @pytest.mark.parametrize("value", ["nan", "inf"])
    @o1_and_o2
    def test_loss_that_is_not_finite_is_warned_of_in_the_first_skipped_step_only(self, opt_level, value):
        model, optimizer = started(opt_level=opt_level)
        before = weights(model)
        message = rf"the loss of a skipped step is {value} before it is scaled"
        warned_once(lambda: train(model, optimizer, float(value)), message)
        assert_same_state(weights(model), before)

    def test_loss_of_a_step_that_skips_by_itself_is_warned_of_when_the_user_asks(self, far_away):
        model, optimizer = started(FUSED_ADAM, steps=1)
        train(model, optimizer, float("nan"))
        with pytest.warns(AmpWarning, match="the loss of a skipped step is nan"):
            assert amp.step_was_skipped(optimizer)

    def test_loss_that_is_nan_at_the_floor_is_warned_of_before_the_error(self):
        model, optimizer = started(min_loss_scale=1024.0)
        with (
            pytest.warns(AmpWarning, match="the loss of a skipped step is nan"),
            pytest.raises(LossScaleError, match="at its floor"),
        ):
            train(model, optimizer, float("nan"))


@contextlib.contextmanager
def scaled_gradients(where: str, **options: Any) -> Iterator[tuple[nn.Module, Any]]:
    """Gives a model with scaled gradients and its optimizer, inside a block or after a delayed one."""
    model, optimizer = started(**options)
    if where == "inside":
        with amp.scale_loss(loss_of(model), optimizer) as scaled_loss:
            scaled_loss.backward()
            yield model, optimizer
    else:
        backward(loss_of(model), optimizer, delay_unscale=True)
        yield model, optimizer
        amp.unscale_(optimizer)


CLIPPINGS: dict[str, Callable[[nn.Module], object]] = {
    "norm": lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "norm-not-foreach": lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False),
    "value": lambda model: torch.nn.utils.clip_grad_value_(model.parameters(), 1.0),
    "total-norm": lambda model: torch.nn.utils.get_total_norm([each.grad for each in model.parameters()]),
}

every_clipping = pytest.mark.parametrize("clip", CLIPPINGS.values(), ids=CLIPPINGS)
inside_or_delayed = pytest.mark.parametrize("where", ["inside", "delayed"])


class TestClippingByTorch:
    @every_half
    @o1_and_o2
    @every_clipping
    @inside_or_delayed
    def test_clipping_scaled_gradients_is_warned_of(self, where, clip, opt_level, half_dtype):
        with (
            scaled_gradients(where, opt_level=opt_level, half_dtype=half_dtype) as (model, _),
            pytest.warns(AmpWarning, match="gradients are clipped, or their norm is taken, where"),
        ):
            clip(model)

    @every_half
    @inside_or_delayed
    def test_clipping_masters_without_gradients_is_warned_of(self, where, half_dtype):
        with (
            scaled_gradients(where, opt_level="O2", half_dtype=half_dtype) as (_, optimizer),
            pytest.warns(AmpWarning, match="masters have none yet, so that nothing is clipped"),
        ):
            torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)

    def test_clipping_in_one_block_is_warned_of_once_for_each_optimizer(self):
        models = [network(), network()]
        optimizers = [SGD(model.parameters()) for model in models]
        initialize(models, optimizers, init_scale=1024.0)
        loss = loss_of(models[0]) + loss_of(models[1])
        with amp.scale_loss(loss, optimizers) as scaled_loss:
            scaled_loss.backward()
            for model in models:
                with pytest.warns(AmpWarning, match="gradients are clipped"):
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # another warning would be an error

    def test_clipping_masters_without_gradients_by_value_warns_before_torch_raises(self):
        with (
            scaled_gradients("inside", opt_level="O2") as (_, optimizer),
            pytest.warns(AmpWarning, match="masters have none yet"),
            pytest.raises(RuntimeError, match="nested_tensorlist"),
        ):
            torch.nn.utils.clip_grad_value_(amp.master_params(optimizer), 1.0)

    @every_clipping
    def test_clipping_unscaled_gradients_is_not_warned_of(self, clip):
        theirs = nn.Linear(2, 2)
        theirs(torch.ones(1, 2)).sum().backward()
        with scaled_gradients("inside") as (model, _):
            clip(theirs)
        clip(model)


class TestSeveralLosses:
    @every_half
    @o1_and_o2
    @pytest.mark.parametrize(
        ("packed", "unpacked"),
        [
            (lambda a, b: (a, b), lambda scaled: scaled),
            (lambda a, b: [a, b], lambda scaled: scaled),
            (lambda a, b: {"a": a, "b": b}, lambda scaled: scaled.values()),
            (lambda a, b: ({"a": [a]}, b), lambda scaled: (scaled[0]["a"][0], scaled[1])),
        ],
        ids=["tuple", "list", "dict", "nested"],
    )
    def test_losses_in_one_block_have_the_gradients_of_their_sum(self, packed, unpacked, opt_level, half_dtype):
        gradients: list[list[Tensor]] = []
        for together in (False, True):
            model, optimizer = started(opt_level=opt_level, half_dtype=half_dtype)
            for _ in range(2):  # the second time there are gradients to add to
                first, second = loss_of(model), loss_of(model) * 3
                losses = packed(first, second) if together else first + second
                with amp.scale_loss(losses, optimizer) as scaled:
                    assert type(scaled) is type(losses)
                    for each in unpacked(scaled) if together else [scaled]:
                        assert each.dtype is torch.float32
                        each.backward()
            gradients.append([parameter.grad.clone() for parameter in amp.master_params(optimizer)])
            amp.deinitialize()
        for alone, wanted in zip(*gradients, strict=True):
            torch.testing.assert_close(alone, wanted, rtol=2e-2, atol=2e-2)

    @pytest.mark.parametrize(
        ("losses", "message"),
        [
            ([], "the loss is an empty list"),
            ({"a": ()}, "the loss is an empty tuple"),
            ([torch.ones(()), 3.0], "the loss is float"),
            ((torch.ones((), dtype=torch.int64),), r"the loss is a tensor of torch\.int64"),
        ],
    )
    def test_what_is_no_loss_is_refused(self, losses, message):
        _, optimizer = started()
        with pytest.raises(OptionError, match=message), amp.scale_loss(losses, optimizer):
            pass

    def test_loss_scaler_scales_nested_losses(self):
        scaled = amp.LossScaler(init_scale=8.0).scale({"a": torch.ones(()), "b": [torch.ones(2)]})
        assert scaled["a"].item() == 8
        assert scaled["b"][0].tolist() == [8, 8]

    def test_backward_pass_through_an_unscaled_one_of_several_losses_is_warned_of(self):
        model, optimizer = started()
        losses = [loss_of(model), loss_of(model)]
        with pytest.warns(AmpWarning, match=ANOTHER_LOSS), amp.scale_loss(losses, optimizer):
            losses[0].backward()


@every_half
@o1_and_o2
def test_backward_pass_outside_of_a_block_onto_scaled_gradients_raises(opt_level, half_dtype):
    model, optimizer = started(opt_level=opt_level, half_dtype=half_dtype, loss_scale=8.0)
    backward(loss_of(model), optimizer, delay_unscale=True)
    before = [parameter.grad.clone() for parameter in model.parameters()]
    loss_of(network()).backward()  # reaches other parameters
    torch.autograd.grad(loss_of(model), list(model.parameters()))  # accumulates no gradient
    with pytest.raises(UsageError, match=r"delay_unscale=True has left scaled.* Type: with amp\.scale_loss"):
        loss_of(model).backward()
    assert_same_state([parameter.grad for parameter in model.parameters()], before)
    model.zero_grad()
    loss_of(model).backward()
    expected = [parameter.grad.float() * 2 for parameter in model.parameters()]
    backward(loss_of(model), optimizer)
    found = [parameter.grad.float() for parameter in model.parameters()]
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-3)


PASSES: dict[str, Callable[[Tensor, Tensor, nn.Module], object]] = {
    "alone": lambda _, other, __: other.backward(),
    "after": lambda scaled, other, _: (scaled.backward(), other.backward()),
    "before": lambda scaled, other, _: (other.backward(), scaled.backward()),
    "together": lambda scaled, other, _: torch.autograd.backward([scaled, other]),
    "function": lambda scaled, other, _: (scaled.backward(), torch.autograd.backward([other])),
    "by-a-factor": lambda scaled, other, _: (scaled.backward(), other.backward(torch.tensor(0.5))),
    "of-inputs": lambda scaled, other, model: (
        scaled.backward(),
        other.backward(inputs=list(model.parameters())),
    ),
}


class TestLossesBesideTheScaledOne:
    """In its block, where their gradients are divided by the scale with the others."""

    @every_half
    @o1_and_o2
    @pytest.mark.parametrize("passes", PASSES.values(), ids=PASSES)
    def test_backward_pass_through_another_loss_is_warned_of_once(self, passes, opt_level, half_dtype):
        model, optimizer = started(opt_level=opt_level, half_dtype=half_dtype)

        def step() -> None:
            optimizer.zero_grad()
            with amp.scale_loss(loss_of(model), optimizer) as scaled:
                passes(scaled, loss_of(model), model)
            optimizer.step()

        assert warned_once(step, ANOTHER_LOSS).filename == __file__

    @o1_and_o2
    def test_backward_passes_of_scaled_losses_or_to_other_parameters_do_not_warn(self, opt_level):
        model, optimizer = started(opt_level=opt_level)
        theirs = nn.Linear(2, 2)
        with amp.scale_loss((loss_of(model), loss_of(model)), optimizer) as (first, second):
            first.backward(retain_graph=True)
            (first + second * 2).backward()
            theirs(torch.ones(1, 2)).sum().backward()
            torch.autograd.grad(loss_of(model), list(model.parameters()))
            loss_of(model).backward(inputs=list(theirs.parameters()))
        optimizer.step()

    def test_backward_pass_through_the_scaled_loss_of_an_outer_block_is_not_warned_of(self):
        model = network()
        first, second = SGD(model[0].parameters()), SGD(model[2].parameters())
        amp.initialize(model, [first, second], opt_level="O1", loss_scale="dynamic", verbosity=0)
        with amp.scale_loss(loss_of(model), first) as outer, amp.scale_loss(loss_of(model), second) as inner:
            outer.backward()
            inner.backward()

    @pytest.mark.parametrize("reentrant", [True, False])
    def test_checkpointed_and_divided_backward_passes_are_not_warned_of(self, reentrant):
        model, optimizer = started()
        x = torch.ones(1, 4, requires_grad=True)
        with amp.scale_loss(checkpoint(model, x, use_reentrant=reentrant).sum(), optimizer) as scaled:
            scaled.backward()
        hidden = model[0](x)
        cut = hidden.detach().requires_grad_()
        with amp.scale_loss(model[1:](cut).float().sum(), optimizer) as scaled:
            scaled.backward()
            hidden.backward(cut.grad)
        optimizer.step()

    def test_scaled_loss_without_a_graph_may_be_a_factor_of_another(self):
        model, optimizer = started()
        with amp.scale_loss(loss_of(model).detach(), optimizer) as scaled:
            (loss_of(model) * scaled.detach()).backward()

    def test_gradients_set_by_hand_without_a_backward_pass_are_warned_of_once(self):
        model, optimizer = started()

        def step() -> None:
            with amp.scale_loss(loss_of(model), optimizer):
                for parameter in model.parameters():
                    parameter.grad = torch.ones_like(parameter)

        warned_once(step, "nothing went backward through the scaled loss")

    @pytest.mark.parametrize(
        "gradients",
        [
            pytest.param(torch.autograd.grad, id="grad"),
            pytest.param(functools.partial(torch.autograd.grad, retain_graph=True), id="a graph kept"),
            pytest.param(lambda loss, weights: torch.autograd.grad(loss + 1, weights, retain_graph=True), id="a sum"),
            pytest.param(
                lambda loss, weights: torch.autograd.grad(
                    [torch.autograd.graph.get_gradient_edge(loss)], weights, torch.ones(())
                ),
                id="an edge of the graph",
            ),
            pytest.param(
                lambda loss, weights: torch.autograd.Variable._execution_engine.run_backward(
                    (loss,), (torch.ones(()),), False, False, tuple(weights), True, False
                ),
                id="torch's engine itself",
            ),
        ],
    )
    def test_gradients_set_by_hand_from_the_scaled_loss_are_not_warned_of(self, gradients):
        model, optimizer = started()
        with amp.scale_loss(loss_of(model), optimizer) as scaled:
            parameters = list(model.parameters())
            for parameter, gradient in zip(parameters, gradients(scaled, parameters), strict=True):
                parameter.grad = gradient
        optimizer.step()


class TestUnscaleByHand:
    @every_half
    @o1_and_o2
    def test_unscale_by_hand_gives_the_gradients_of_a_block(self, opt_level, half_dtype):
        gradients: list[list[Tensor]] = []
        for by_hand in (False, True):
            model, optimizer = started(opt_level=opt_level, half_dtype=half_dtype)
            assert amp.grads_are_unscaled(optimizer)
            with amp.scale_loss(loss_of(model), optimizer, delay_unscale=by_hand) as scaled_loss:
                scaled_loss.backward()
                assert not amp.grads_are_unscaled(optimizer)
            assert amp.grads_are_unscaled(optimizer) is not by_hand
            if by_hand:
                amp.unscale_(optimizer)
                amp.unscale_(optimizer)  # nothing is left to do
            assert amp.grads_are_unscaled(optimizer)
            gradients.append([parameter.grad.clone() for parameter in amp.master_params(optimizer)])
            optimizer.step()
            amp.deinitialize()
        assert_same_state(*gradients)

    @pytest.mark.parametrize("function", [amp.unscale_, functools.partial(amp.clip_grad_norm_, max_norm=1.0)])
    def test_unscaling_and_clipping_inside_of_the_block_raise(self, function):
        message = r"amp\.\w+ stands inside the amp\.scale_loss block\. Move it behind"
        with scaled_gradients("inside") as (_, optimizer), pytest.raises(UsageError, match=message):
            function(optimizer)

    @pytest.mark.parametrize("function", [amp.unscale_, amp.grads_are_unscaled, amp.gradients_are_finite])
    def test_unscale_of_an_optimizer_that_amp_does_not_know_raises(self, function):
        started()
        with pytest.raises(UsageError, match=r"was never handed to amp\.initialize"):
            function(SGD(network().parameters()))
        with pytest.raises(OptionError, match="as an optimizer, which lacks"):
            function(3)

    def test_unscale_does_nothing_if_amp_is_disabled(self):
        model, optimizer = started(enabled=False)
        loss_of(model).backward()
        amp.unscale_(optimizer)
        assert amp.grads_are_unscaled(optimizer)
