"""Steps by whatever way: closures, names bound before, optimizers amp was not handed, losses that no scale helps."""

from __future__ import annotations

import functools
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ampatch import amp
from ampatch.errors import AmpWarning, LossScaleError, OptionError, UsageError
from ampatch.runtime import runtime

HALVES = (torch.float16, torch.bfloat16)
every_half = pytest.mark.parametrize("half_dtype", HALVES, ids=["float16", "bfloat16"])
NO_SCALE = "no amp.scale_loss was told of"


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, **options)


def begun(
    make: Callable[[nn.Module], Any] = sgd,
    opt_level: str = "O1",
    half_dtype: torch.dtype = torch.float16,
    **options: Any,
) -> tuple[nn.Module, Any]:
    model = network()
    optimizer = make(model)
    settings = {"loss_scale": "dynamic", "init_scale": 1024.0, "verbosity": 0, **options}
    amp.initialize(model, optimizer, opt_level=opt_level, half_dtype=half_dtype, **settings)
    return model, optimizer


def loss_of(model: nn.Module, factor: float = 1.0) -> Tensor:
    return model(torch.ones(2, 4)).float().square().mean() * factor


def scaled_backward(model: nn.Module, optimizer: Any, factor: float = 1.0) -> None:
    with amp.scale_loss(loss_of(model, factor), optimizer) as scaled_loss:
        scaled_loss.backward()


def weights(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def are_finite(model: nn.Module) -> bool:
    return all(bool(parameter.isfinite().all()) for parameter in model.parameters())


def told(function: Callable[[], object], message: str) -> warnings.WarningMessage:
    """Calls a function three times, which warns once; returns the warning."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(3):
            function()
    assert len(found) == 1
    assert re.search(message, str(found[0].message))
    assert found[0].category is AmpWarning
    return found[0]


@pytest.fixture
def no_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", AmpWarning)
        yield


class AnyStep(torch.optim.SGD):
    """An optimizer that takes its closures in ways of its own."""

    def step(self, closure: Any = None, other: Any = None, *, many: Any = (), named: Any = None) -> Any:  # type: ignore[override]
        results = [each() for each in (closure, other, *many, *(named or {}).values()) if each is not None]
        super().step()
        return results


class TestClosures:
    @every_half
    @pytest.mark.parametrize("opt_level", ["O1", "O2"])
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
    def test_see_casts_wherever_they_stand(self, step, opt_level, half_dtype):
        model, optimizer = begun(lambda model: AnyStep(model.parameters(), lr=0.1), opt_level, half_dtype)
        seen: list[torch.dtype] = []
        model[2].register_forward_hook(lambda _, __, output: seen.append(output.dtype))

        def closure() -> float:
            optimizer.zero_grad()
            scaled_backward(model, optimizer)
            return 3.0

        before = weights(model)
        assert set(step(optimizer, closure)) == {3.0}
        assert set(seen) == {half_dtype}
        assert not torch.equal(model[0].weight, before[0])

    def test_of_which_a_second_one_overflows_skip_the_step(self):
        model, optimizer = begun(lambda model: AnyStep(model.parameters(), lr=0.1))
        before = weights(model)
        optimizer.step(None, lambda: scaled_backward(model, optimizer, factor=1e30))
        assert amp.step_was_skipped(optimizer)
        assert all(map(torch.equal, weights(model), before))

    def test_leave_other_arguments_the_objects_they_are(self):
        given: list[Any] = []

        class Keeping(torch.optim.SGD):
            def step(self, closure: Any = None, **others: Any) -> None:  # type: ignore[override]
                given.append(others)

        model, optimizer = begun(lambda model: Keeping(model.parameters(), lr=0.1))
        others = {"grads": [torch.ones(2)], "model": model, "kind": dict, "number": 3}
        optimizer.step(**others)
        assert given[0].keys() == others.keys()
        assert all(given[0][name] is value for name, value in others.items())


class TestGoingBack:
    """Of LBFGS, whose closure may overflow when weights have moved already."""

    def skipped(self, **options: Any) -> tuple[torch.optim.Optimizer, dict[str, Any]]:
        model, optimizer = begun(lambda model: torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4))
        optimizer.param_groups[0].update(options)
        factors = iter([1.0, 1e30, 1e30, 1e30])

        def closure() -> Tensor:
            optimizer.zero_grad()
            factor = next(factors)
            scaled_backward(model, optimizer, factor)
            return loss_of(model, factor).detach()

        before = weights(model)
        optimizer.step(closure)
        assert amp.step_was_skipped(optimizer)
        assert all(map(torch.equal, weights(model), before))
        return optimizer, options

    def test_leaves_alone_what_cannot_be_copied(self):
        optimizer, options = self.skipped(lock=threading.Lock(), nested={"locks": [threading.Lock()]})
        assert optimizer.param_groups[0]["lock"] is options["lock"]

    def test_leaves_a_tensor_of_a_group_the_object_it_is(self):
        rate = torch.tensor(0.1)
        optimizer, _ = self.skipped(lr=rate)
        assert optimizer.param_groups[0]["lr"] is rate
        assert rate.item() == pytest.approx(0.1)


class TestStepsThatGoPast:
    @every_half
    @pytest.mark.parametrize("opt_level", ["O1", "O2"])
    @pytest.mark.parametrize("compiled", [False, True])
    @pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
    def test_bound_before_initialize_are_an_error_before_anything_is_written(self, compiled, opt_level, half_dtype):
        model = network()
        optimizer = sgd(model)
        step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
        amp.initialize(model, optimizer, opt_level=opt_level, half_dtype=half_dtype, verbosity=0)
        scaled_backward(model, optimizer)
        before = weights(model)
        with pytest.raises(UsageError, match=r"bound, or compiled, before amp\.initialize"):
            step()
        assert all(map(torch.equal, weights(model), before))
        optimizer.step()
        assert not torch.equal(model[0].weight, before[0])
        amp.deinitialize()
        step()

    def test_of_the_class_is_one_too(self):
        model, optimizer = begun()
        scaled_backward(model, optimizer)
        with pytest.raises(UsageError, match=r"bound, or compiled, before"):
            torch.optim.SGD.step(optimizer)

    @pytest.mark.slow
    @pytest.mark.usefixtures("no_warning")
    def test_compiled_afterwards_go_amps_way(self):
        model, optimizer = begun()
        step = torch.compile(optimizer.step, backend="eager")
        scaled_backward(model, optimizer, factor=1e30)
        before = weights(model)
        step()
        assert amp.step_was_skipped(optimizer)
        assert all(map(torch.equal, weights(model), before))


class TestScaledResultsOfClosures:
    @every_half
    @pytest.mark.parametrize("opt_level", ["O1", "O2"])
    @pytest.mark.parametrize("loss_scale", ["dynamic", 128.0])
    def test_are_warned_of_once(self, loss_scale, opt_level, half_dtype):
        model, optimizer = begun(
            lambda model: torch.optim.LBFGS(model.parameters(), max_iter=3),
            opt_level=opt_level,
            half_dtype=half_dtype,
            loss_scale=loss_scale,
            init_scale=1024.0 if loss_scale == "dynamic" else 2.0**16,
        )

        def closure() -> Tensor:
            optimizer.zero_grad()
            with amp.scale_loss(loss_of(model), optimizer) as scaled_loss:
                scaled_loss.backward()
            return scaled_loss

        told(lambda: optimizer.step(closure), "returns the scaled loss")

    @pytest.mark.usefixtures("no_warning")
    @pytest.mark.parametrize("loss_scale", [1, 128.0])
    def test_are_none_where_the_loss_itself_is_returned(self, loss_scale):
        model, optimizer = begun(loss_scale=loss_scale, init_scale=2.0**16)

        def closure() -> Tensor:
            loss = loss_of(model)
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            return scaled_loss if loss_scale == 1 else loss

        optimizer.step(closure)


class TestForgottenScales:
    @pytest.mark.parametrize("opt_level", ["O1", "O2"])
    def test_are_warned_of_in_a_closure(self, opt_level):
        model, optimizer = begun(opt_level=opt_level)

        def closure() -> None:
            optimizer.zero_grad()
            loss_of(model).backward()

        told(lambda: optimizer.step(closure), NO_SCALE)

    @pytest.mark.parametrize("opt_level", ["O1", "O2"])
    def test_are_warned_of_after_steps_that_had_one(self, opt_level):
        model, optimizer = begun(opt_level=opt_level)
        for _ in range(3):
            optimizer.zero_grad()
            scaled_backward(model, optimizer)
            optimizer.step()
        optimizer.zero_grad()
        loss_of(model).backward()
        with pytest.warns(AmpWarning, match=NO_SCALE):
            optimizer.step()

    @pytest.mark.usefixtures("no_warning")
    def test_are_none_where_the_same_gradients_are_used_again(self):
        model, optimizer = begun()
        scaled_backward(model, optimizer)
        optimizer.step()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        optimizer.step(lambda: None)

    @pytest.mark.usefixtures("no_warning")
    @pytest.mark.parametrize("adopted", [True, False])
    @pytest.mark.parametrize("scaler", ["GradScaler", "LossScaler"])
    def test_are_none_where_another_scaler_unscales(self, scaler, adopted):
        model = network()
        optimizer = sgd(model)
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

    @pytest.mark.usefixtures("no_warning")
    def test_are_none_where_the_verdict_comes_from_outside(self):
        """As of scripts for Apex that reduce gradients over processes themselves, and then call ``update_scale``."""
        model, optimizer = begun()
        for _ in range(2):
            optimizer.zero_grad()
            scaled_backward(model, optimizer)
            live = runtime.live
            live.gradients.replace_verdicts(live.losses.scalers[0], torch.zeros(()))
            optimizer.step()

    def test_are_warned_of_where_somebody_else_judges_another_loss(self):
        model, theirs = network(), network()
        optimizer, other = sgd(model), sgd(theirs)
        amp.initialize(
            [model, theirs], [optimizer, other], opt_level="O1", loss_scale="dynamic", num_losses=2, verbosity=0
        )
        scaled_backward(model, optimizer)
        runtime.live.gradients.replace_verdicts(runtime.live.losses.scalers[0], torch.zeros(()))
        loss_of(theirs).backward()
        with pytest.warns(AmpWarning, match=NO_SCALE):
            other.step()

    def test_in_a_later_block_are_warned_of(self):
        model, optimizer = begun()
        scaled_backward(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        loss = loss_of(model)
        with (
            pytest.warns(AmpWarning, match="begins with another loss than the scaled one"),
            amp.scale_loss(loss, optimizer),
        ):
            loss.backward()


class TestOptimizersThatAmpWasNotHanded:
    def test_are_warned_of_once_where_losses_are_to_be_scaled(self):
        model, _ = begun()
        other = sgd(model)
        loss_of(model).backward()
        told(other.step, rf"SGD was never handed to amp.initialize, and steps .* {NO_SCALE}")

    @every_half
    def test_are_warned_of_once_where_they_update_half_weights_without_masters(self, half_dtype):
        model = amp.initialize(network(), opt_level="O2", half_dtype=half_dtype, loss_scale=1, verbosity=0)
        other = sgd(model)
        loss_of(model).backward()
        told(other.step, "SGD updates half weights of a model that amp has")

    def test_are_warned_of_under_init(self):
        with amp.init(half_dtype=torch.float16):
            model = network()
            optimizer = sgd(model)
            loss_of(model).backward()
            with pytest.warns(AmpWarning, match=NO_SCALE):
                optimizer.step()

    @pytest.mark.usefixtures("no_warning")
    def test_are_left_alone_where_nothing_can_be_lost(self):
        model, _ = begun(half_dtype=torch.bfloat16, loss_scale=1)
        loss_of(model).backward()
        sgd(model).step()

    @pytest.mark.usefixtures("no_warning")
    def test_are_left_alone_with_models_of_their_own(self):
        begun()
        theirs = nn.Linear(2, 1)
        with amp.disable_casts():
            theirs(torch.ones(1, 2)).sum().backward()
        sgd(theirs).step()

    @pytest.mark.usefixtures("no_warning")
    @pytest.mark.parametrize("opt_level", ["O1", "O2"])
    def test_are_left_alone_inside_of_one_that_it_was_handed(self, opt_level):
        class Around:
            def __init__(self, inner: torch.optim.Optimizer) -> None:
                self.inner, self.param_groups = inner, inner.param_groups

            def zero_grad(self) -> None:
                self.inner.zero_grad()

            def step(self) -> None:
                self.inner.step()

        model, optimizer = begun(lambda model: Around(sgd(model)), opt_level)
        before = weights(model)
        scaled_backward(model, optimizer)
        optimizer.step()
        assert not torch.equal(model[0].weight, before[0])


class Wrapper:
    """As Accelerate and Lightning have them: the optimizer that amp was handed is inside."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def step(self) -> None:
        self.optimizer.step()


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_wrapper_around_an_adopted_optimizer_stands_for_it(opt_level):
    model, optimizer = begun(opt_level=opt_level)
    wrapper = Wrapper(Wrapper(optimizer))
    scaled_backward(model, wrapper, factor=1e30)
    wrapper.step()
    assert amp.step_was_skipped(wrapper)
    assert amp.skipped_steps(wrapper) == 1
    assert list(map(id, amp.master_params(wrapper))) == list(map(id, amp.master_params(optimizer)))
    wrapper.zero_grad()
    scaled_backward(model, wrapper)
    assert amp.clip_grad_norm_(wrapper, 1e-3) > 0
    before = weights(model)
    wrapper.step()
    assert not torch.equal(model[0].weight, before[0])
    with pytest.raises(UsageError, match=r"was handed to amp\.initialize before"):
        amp.initialize(model, wrapper, opt_level=opt_level, half_dtype=torch.float16, init_scale=1024.0, verbosity=0)


def test_wrappers_in_a_ring_are_none():
    begun()
    ring = Wrapper(None)
    ring.optimizer = ring
    with pytest.raises(UsageError, match="was never handed"):
        amp.step_was_skipped(Ring(ring))


class Ring(Wrapper):
    @property
    def param_groups(self) -> Any:
        return []


class TestLossesThatAreNotFinite:
    @pytest.mark.parametrize("value", ["nan", "inf"])
    @pytest.mark.parametrize("opt_level", ["O1", "O2"])
    def test_the_first_skip_says_so_and_later_ones_do_not(self, opt_level, value):
        model, optimizer = begun(opt_level=opt_level)
        before = weights(model)

        def skipped() -> None:
            scaled_backward(model, optimizer, float(value))
            optimizer.step()
            optimizer.zero_grad()

        told(skipped, rf"the loss of a skipped step is {value} before it is scaled")
        assert all(map(torch.equal, weights(model), before))

    @pytest.mark.usefixtures("no_warning")
    def test_an_overflow_of_the_scale_alone_does_not(self):
        model, optimizer = begun()
        scaled_backward(model, optimizer, factor=1e30)
        optimizer.step()
        assert amp.step_was_skipped(optimizer)

    def test_an_optimizer_that_skips_in_its_own_kernel_says_so_too(self, far_away):
        model, optimizer = begun(lambda model: torch.optim.Adam(model.parameters(), fused=True))
        scaled_backward(model, optimizer)
        optimizer.step()
        scaled_backward(model, optimizer, float("nan"))
        optimizer.step()
        with pytest.warns(AmpWarning, match="the loss of a skipped step is nan"):
            assert amp.step_was_skipped(optimizer)

    def test_at_the_floor_says_so_before_the_error(self):
        model, optimizer = begun(min_loss_scale=1024.0)
        scaled_backward(model, optimizer, float("nan"))
        with (
            pytest.warns(AmpWarning, match="the loss of a skipped step is nan"),
            pytest.raises(LossScaleError, match="at its floor"),
        ):
            optimizer.step()


class TestClippingScaledGradients:
    CLIPPED: tuple[Callable[[nn.Module], object], ...] = (
        lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False),
        lambda model: torch.nn.utils.clip_grad_value_(model.parameters(), 1.0),
        lambda model: torch.nn.utils.get_total_norm([each.grad for each in model.parameters()]),
    )

    @every_half
    @pytest.mark.parametrize("opt_level", ["O1", "O2"])
    @pytest.mark.parametrize("clipped", CLIPPED, ids=["norm", "norm-not-foreach", "value", "total-norm"])
    @pytest.mark.parametrize("where", ["inside", "delayed"])
    def test_is_warned_of(self, where, clipped, opt_level, half_dtype):
        model, optimizer = begun(opt_level=opt_level, half_dtype=half_dtype)
        with amp.scale_loss(loss_of(model), optimizer, delay_unscale=where == "delayed") as scaled_loss:
            scaled_loss.backward()
            if where == "inside":
                with pytest.warns(AmpWarning, match="gradients are clipped, or their norm is taken, where"):
                    clipped(model)
        if where == "delayed":
            with pytest.warns(AmpWarning, match="gradients are clipped, or their norm is taken, where"):
                clipped(model)
            amp.unscale_(optimizer)

    @every_half
    @pytest.mark.parametrize("where", ["inside", "delayed"])
    def test_is_warned_of_where_masters_have_none_yet(self, where, half_dtype):
        model, optimizer = begun(opt_level="O2", half_dtype=half_dtype)

        def clip() -> None:
            with pytest.warns(AmpWarning, match="masters have none yet, so that nothing is clipped"):
                torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)

        with amp.scale_loss(loss_of(model), optimizer, delay_unscale=where == "delayed") as scaled_loss:
            scaled_loss.backward()
            if where == "inside":
                clip()
        if where == "delayed":
            clip()
            amp.unscale_(optimizer)

    def test_is_warned_of_before_torch_has_nothing_to_clip_by_value(self):
        model, optimizer = begun(opt_level="O2")
        with amp.scale_loss(loss_of(model), optimizer) as scaled_loss:
            scaled_loss.backward()
            with (
                pytest.warns(AmpWarning, match="masters have none yet"),
                pytest.raises(RuntimeError, match="nested_tensorlist"),
            ):
                torch.nn.utils.clip_grad_value_(amp.master_params(optimizer), 1.0)

    @pytest.mark.usefixtures("no_warning")
    @pytest.mark.parametrize("clipped", CLIPPED, ids=["norm", "norm-not-foreach", "value", "total-norm"])
    def test_is_not_where_they_are_unscaled(self, clipped):
        model, optimizer = begun()
        theirs = nn.Linear(2, 2)
        theirs(torch.ones(1, 2)).sum().backward()
        with amp.scale_loss(loss_of(model), optimizer) as scaled_loss:
            scaled_loss.backward()
            clipped(theirs)
        clipped(model)


class TestSeveralLosses:
    @every_half
    @pytest.mark.parametrize("opt_level", ["O1", "O2"])
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
    def test_in_one_block_are_as_their_sum(self, packed, unpacked, opt_level, half_dtype):
        gradients: list[list[Tensor]] = []
        for together in (False, True):
            model, optimizer = begun(opt_level=opt_level, half_dtype=half_dtype)
            for _ in range(2):  # the second time there are gradients to add to
                first, second = loss_of(model), loss_of(model, 3.0)
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

    def test_one_of_which_overflows_skip_the_step(self):
        model, optimizer = begun()
        with amp.scale_loss([loss_of(model), loss_of(model, 1e30)], optimizer) as scaled:
            for each in scaled:
                each.backward()
        before = weights(model)
        optimizer.step()
        assert amp.step_was_skipped(optimizer)
        assert all(map(torch.equal, weights(model), before))

    @pytest.mark.parametrize(
        ("losses", "message"),
        [
            ([], "the loss is an empty list"),
            ({"a": ()}, "the loss is an empty tuple"),
            ([torch.ones(()), 3.0], "the loss is float"),
            ((torch.ones((), dtype=torch.int64),), r"the loss is a tensor of torch\.int64"),
        ],
    )
    def test_that_are_none_are_an_error(self, losses, message):
        _, optimizer = begun()
        with pytest.raises(OptionError, match=message), amp.scale_loss(losses, optimizer):
            pass

    def test_are_scaled_by_a_scaler_by_hand(self):
        scaled = amp.LossScaler(init_scale=8.0).scale({"a": torch.ones(()), "b": [torch.ones(2)]})
        assert scaled["a"].item() == 8
        assert scaled["b"][0].tolist() == [8, 8]

    def test_nothing_of_which_went_backward_are_warned_of(self):
        model, optimizer = begun()
        losses = [loss_of(model), loss_of(model)]
        with (
            pytest.warns(AmpWarning, match="begins with another loss than the scaled one"),
            amp.scale_loss(losses, optimizer),
        ):
            losses[0].backward()


@every_half
@pytest.mark.parametrize("opt_level", ["O1", "O2"])
class TestBackwardPassesAfterADelayedBlock:
    """Outside of any block: the next block would divide their gradients by the scale with those that are scaled."""

    def delayed(self, opt_level: str, half_dtype: torch.dtype) -> tuple[nn.Module, Any]:
        model, optimizer = begun(opt_level=opt_level, half_dtype=half_dtype, loss_scale=8.0)
        with amp.scale_loss(loss_of(model), optimizer, delay_unscale=True) as scaled:
            scaled.backward()
        return model, optimizer

    def test_raise_and_add_nothing(self, opt_level, half_dtype):
        model, _ = self.delayed(opt_level, half_dtype)
        before = [p.grad.clone() for p in model.parameters()]
        with pytest.raises(UsageError, match=r"delay_unscale=True has left scaled.* Type: with amp\.scale_loss"):
            loss_of(model).backward()
        assert all(map(torch.equal, before, [p.grad for p in model.parameters()]))
        model.zero_grad()

    def test_run_where_they_reach_other_parameters_or_no_gradient(self, opt_level, half_dtype):
        model, _ = self.delayed(opt_level, half_dtype)
        loss_of(network()).backward()
        torch.autograd.grad(loss_of(model), list(model.parameters()))
        model.zero_grad()

    def test_run_once_the_gradients_were_dropped(self, opt_level, half_dtype):
        model, optimizer = self.delayed(opt_level, half_dtype)
        model.zero_grad()
        loss_of(model).backward()
        expected = [p.grad.float() * 2 for p in model.parameters()]
        with amp.scale_loss(loss_of(model), optimizer) as scaled:
            scaled.backward()
        torch.testing.assert_close([p.grad.float() for p in model.parameters()], expected, rtol=1e-2, atol=1e-3)


class TestLossesBesideTheScaledOne:
    """In its block, where their gradients are divided by the scale with the others."""

    BACKWARD: tuple[Callable[[Tensor, Tensor, nn.Module], object], ...] = (
        lambda scaled, other, _: (scaled.backward(), other.backward()),
        lambda scaled, other, _: (other.backward(), scaled.backward()),
        lambda scaled, other, _: torch.autograd.backward([scaled, other]),
        lambda scaled, other, _: (scaled.backward(), torch.autograd.backward([other])),
        lambda scaled, other, _: (scaled.backward(), other.backward(torch.tensor(0.5))),
        lambda scaled, other, model: (scaled.backward(), other.backward(inputs=list(model.parameters()))),
    )

    @every_half
    @pytest.mark.parametrize("opt_level", ["O1", "O2"])
    @pytest.mark.parametrize(
        "backward", BACKWARD, ids=["after", "before", "together", "function", "by-a-factor", "of-inputs"]
    )
    def test_are_warned_of_once(self, backward, opt_level, half_dtype):
        model, optimizer = begun(opt_level=opt_level, half_dtype=half_dtype)

        def step() -> None:
            optimizer.zero_grad()
            with amp.scale_loss(loss_of(model), optimizer) as scaled:
                backward(scaled, loss_of(model), model)
            optimizer.step()

        assert told(step, "begins with another loss than the scaled one").filename == __file__

    @pytest.mark.usefixtures("no_warning")
    @pytest.mark.parametrize("opt_level", ["O1", "O2"])
    def test_are_none_where_they_are_scaled_too_or_of_others(self, opt_level):
        model, optimizer = begun(opt_level=opt_level)
        theirs = nn.Linear(2, 2)
        with amp.scale_loss((loss_of(model), loss_of(model)), optimizer) as (first, second):
            first.backward(retain_graph=True)
            (first + second * 2).backward()
            theirs(torch.ones(1, 2)).sum().backward()
            torch.autograd.grad(loss_of(model), list(model.parameters()))
            loss_of(model).backward(inputs=list(theirs.parameters()))
        optimizer.step()

    @pytest.mark.usefixtures("no_warning")
    def test_are_none_where_a_block_around_it_scaled_them(self):
        model = network()
        first, second = sgd(model[0]), sgd(model[2])
        amp.initialize(model, [first, second], opt_level="O1", loss_scale="dynamic", verbosity=0)
        with amp.scale_loss(loss_of(model), first) as outer, amp.scale_loss(loss_of(model), second) as inner:
            outer.backward()
            inner.backward()

    @pytest.mark.usefixtures("no_warning")
    @pytest.mark.parametrize("reentrant", [True, False])
    def test_is_not_a_backward_within_another_nor_one_in_pieces(self, reentrant):
        model, optimizer = begun()
        x = torch.ones(1, 4, requires_grad=True)
        with amp.scale_loss(checkpoint(model, x, use_reentrant=reentrant).sum(), optimizer) as scaled:
            scaled.backward()
        hidden = model[0](x)
        cut = hidden.detach().requires_grad_()
        with amp.scale_loss(model[1:](cut).float().sum(), optimizer) as scaled:
            scaled.backward()
            hidden.backward(cut.grad)
        optimizer.step()

    @pytest.mark.usefixtures("no_warning")
    def test_are_none_where_the_scaled_loss_has_no_graph(self):
        model, optimizer = begun()
        with amp.scale_loss(loss_of(model).detach(), optimizer) as scaled:
            (loss_of(model) * scaled.detach()).backward()

    def test_gradients_by_hand_from_another_loss_are_told_of_at_the_end(self):
        model, optimizer = begun()

        def step() -> None:
            with amp.scale_loss(loss_of(model), optimizer):
                for parameter in model.parameters():
                    parameter.grad = torch.ones_like(parameter)

        told(step, "nothing went backward through the scaled loss")

    @pytest.mark.usefixtures("no_warning")
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
    def test_gradients_by_hand_from_the_scaled_loss_are_right(self, gradients):
        model, optimizer = begun()
        with amp.scale_loss(loss_of(model), optimizer) as scaled:
            weights = list(model.parameters())
            for parameter, gradient in zip(weights, gradients(scaled, weights), strict=True):
                parameter.grad = gradient
        optimizer.step()


class TestUnscaling:
    @every_half
    @pytest.mark.parametrize("opt_level", ["O1", "O2"])
    def test_by_hand_gives_what_the_block_gives(self, opt_level, half_dtype):
        gradients: list[list[Tensor]] = []
        for by_hand in (False, True):
            model, optimizer = begun(opt_level=opt_level, half_dtype=half_dtype)
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
        assert all(map(torch.equal, *gradients))

    @pytest.mark.parametrize("opt_level", ["O1", "O2"])
    def test_by_hand_finds_an_overflow(self, opt_level):
        model, optimizer = begun(opt_level=opt_level)
        before = weights(model)
        with amp.scale_loss(loss_of(model, 1e30), optimizer, delay_unscale=True) as scaled_loss:
            scaled_loss.backward()
        amp.unscale_(optimizer)
        optimizer.step()
        assert amp.step_was_skipped(optimizer)
        assert amp.get_loss_scale() == 512
        assert all(map(torch.equal, weights(model), before))

    def test_inside_of_the_block_is_an_error(self):
        model, optimizer = begun()
        with amp.scale_loss(loss_of(model), optimizer) as scaled_loss:
            scaled_loss.backward()
            with pytest.raises(UsageError, match=r"amp\.unscale_ stands inside the amp\.scale_loss block"):
                amp.unscale_(optimizer)

    def test_what_a_fused_optimizer_was_to_divide_is_done_at_once(self):
        model, optimizer = begun(lambda model: torch.optim.Adam(model.parameters(), fused=True))
        scaled_backward(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        with amp.scale_loss(loss_of(model), optimizer, delay_unscale=True) as scaled_loss:
            scaled_loss.backward()
        norm = amp.clip_grad_norm_(optimizer, 1e6)
        assert not amp.grads_are_unscaled(optimizer)
        amp.unscale_(optimizer)
        assert amp.grads_are_unscaled(optimizer)
        total = torch.nn.utils.get_total_norm([each.grad for each in model.parameters()])
        assert total.item() == pytest.approx(norm.item(), rel=1e-5)

    def test_of_an_optimizer_that_amp_does_not_know_is_an_error(self):
        begun()
        for function in (amp.unscale_, amp.grads_are_unscaled):
            with pytest.raises(UsageError, match=r"was never handed to amp\.initialize"):
                function(sgd(network()))
            with pytest.raises(OptionError, match="as an optimizer, which lacks"):
                function(3)

    def test_without_amp_is_nothing(self):
        model = network()
        optimizer = sgd(model)
        amp.initialize(model, optimizer, enabled=False)
        loss_of(model).backward()
        amp.unscale_(optimizer)
        assert amp.grads_are_unscaled(optimizer)
