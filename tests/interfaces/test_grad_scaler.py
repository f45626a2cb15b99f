"""Of `ampatch.GradScaler`: what torch's class takes gives the same bits with both; what it does beyond, it does."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import itertools
import math
import pickle
import re
import weakref
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import DEVICES, HALF_DTYPES, assert_same_bits, assert_same_state, dtype_name
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import ampatch
from ampatch import amp
from ampatch.errors import AmpError, AmpWarning, LossScaleError, OptionError, UsageError

TORCHS, OURS = torch.amp.GradScaler, ampatch.GradScaler
EACH = pytest.mark.parametrize("kind", [TORCHS, OURS], ids=["torch", "ampatch"])

SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAMW = functools.partial(torch.optim.AdamW, lr=0.01)

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": SGD,
    "AdamW": ADAMW,
    "SGD-fused": functools.partial(torch.optim.SGD, lr=0.1, fused=True),  # momentum: see TestStep
    "AdamW-fused": functools.partial(ADAMW, fused=True),
}
EACH_OPTIMIZER = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


def scaler(**options: Any) -> ampatch.GradScaler:
    return OURS("cpu", **options)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def loss_of(model: nn.Module, index: int = 0) -> Tensor:
    batch = torch.randn(5, 4, generator=torch.Generator().manual_seed(index))
    return model(batch).float().square().mean()


def begun(kind: Any = OURS, **options: Any) -> Any:
    """Returns a scaler that has scaled once, as `step` and `update` require."""
    used = kind("cpu", **options)
    used.scale(torch.ones(1))
    return used


def step(used: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, times: int = 1) -> None:
    for _ in range(times):
        used.step(optimizer)
        used.update()


def closure_of(
    used: ampatch.GradScaler, optimizer: Any, model: nn.Module, *, overflow_at: int = -1, clips: bool = False
) -> Callable[[], Tensor]:
    """Returns a closure of which one call overflows."""
    calls = itertools.count()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model)
        used.scale(loss * (math.inf if next(calls) == overflow_at else 1)).backward()
        if clips:
            used.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        return loss

    return closure


def with_gradients(*values: float, **options: Any) -> tuple[nn.Parameter, torch.optim.Optimizer]:
    """A parameter of ones with gradients, and an SGD that has it."""
    parameter = nn.Parameter(torch.ones(len(values)))
    parameter.grad = torch.tensor(values)
    return parameter, torch.optim.SGD([parameter], **{"lr": 1.0, **options})


SETTINGS = ("growth_factor", "backoff_factor", "growth_interval")


class TestInterface:
    def test_only_torchs_methods_that_read_attributes_of_ours_are_inherited(self):
        """All else that torch's class does would work on attributes that this one does not have."""
        inherited = {name for name, value in vars(TORCHS).items() if callable(value) and name not in vars(OURS)}
        reads = {"_get_scale_async", "_get_growth_tracker", "_found_inf_per_device", "__setstate__"}
        reads |= {"is_enabled", "get_scale"}
        reads |= {f"{does}_{name}" for does in ("get", "set") for name in SETTINGS}
        assert inherited == {"_check_scale_growth_tracker", *reads}

    @pytest.mark.parametrize("name", [*sorted(name for name in vars(TORCHS) if name[0] != "_"), "__init__"])
    def test_methods_take_the_parameters_of_torchs(self, name):
        theirs = list(inspect.signature(getattr(TORCHS, name)).parameters.values())
        ours = list(inspect.signature(getattr(OURS, name)).parameters.values())[: len(theirs)]
        told = [(each.name, each.kind, each.default) for each in theirs]
        assert [(each.name, each.kind, each.default) for each in ours] == told

    def test_a_scaler_without_a_gpu_is_disabled_with_a_warning(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.warns(AmpWarning, match=r"CUDA is not available.*Type GradScaler\('cpu'\)"):
            assert not OURS().is_enabled()

    @pytest.mark.parametrize("device", [1024.0, None, "cdua"], ids=repr)
    def test_a_first_argument_that_is_no_device_is_an_error(self, device):
        """A scale that comes first, as torch.cuda.amp.GradScaler takes it, would be passed over."""
        with pytest.raises(OptionError, match=r"device is .*type GradScaler\(init_scale=\.\.\.\)"):
            OURS(device)

    def test_repr_shows_the_scale_and_the_options(self):
        shown = "GradScaler(scale=65536.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000)"
        used = begun(init_scale=8)
        assert repr(scaler()) == shown
        assert repr(used).startswith("GradScaler(scale=8.0,")
        assert repr(scaler(enabled=False)) == "GradScaler(enabled=False)"


# What torch's class takes


class Script:
    """Calls of a scaler, in any order, and what came of each."""

    def __init__(self, kind: type[torch.amp.GradScaler], make: Callable[..., torch.optim.Optimizer]) -> None:
        self.scaler = kind("cpu", init_scale=2.0**10, growth_factor=3.0, backoff_factor=0.3, growth_interval=2)
        self.model = network()
        self.optimizers = [make(self.model[0].parameters()), SGD(self.model[2].parameters())]
        self.told: list[Any] = []

    def run(self, calls: list[tuple[str, int]]) -> None:
        for number, (name, which) in enumerate(calls):
            try:
                self.told.append(getattr(self, name)(which, number))
            except (AssertionError, RuntimeError, ValueError) as error:
                self.told.append(error)

    def backward(self, which: int, number: int) -> None:
        loss = loss_of(self.model, number) * (math.inf if which and number % 3 == 0 else 1.0)
        self.scaler.scale(loss).backward()

    def clear(self, which: int, _: int) -> None:
        self.optimizers[which].zero_grad(set_to_none=bool(which))

    def unscale(self, which: int, _: int) -> Any:
        return self.scaler.unscale_(self.optimizers[which])

    def clip(self, which: int, _: int) -> float:
        return float(nn.utils.clip_grad_norm_(self.model[2 * which].parameters(), 0.1))

    def step(self, which: int, _: int) -> Any:
        return self.scaler.step(self.optimizers[which])

    def update(self, *_: int) -> float:
        self.scaler.update()
        return self.scaler.get_scale()

    def update_to(self, which: int, number: int) -> float:
        self.scaler.update(new_scale=torch.tensor(2.0**number) if which else 2.0**number)
        return self.scaler.get_scale()

    def set(self, which: int, number: int) -> tuple[float, ...]:
        self.scaler.set_growth_factor(2.0 + which)
        self.scaler.set_backoff_factor(1 / (2 + number))
        self.scaler.set_growth_interval(self.scaler.get_growth_interval() + which)  # to less: see TestUpdate
        return self.scaler.get_growth_factor(), self.scaler.get_backoff_factor(), self.scaler.get_growth_interval()

    def save(self, which: int, _: int) -> dict[str, Any]:
        saved = self.scaler.state_dict()
        self.scaler.load_state_dict({**saved, "scale": 4.0, "_growth_tracker": 1} if which else saved)
        return self.scaler.state_dict()

    def pickle(self, *_: int) -> None:
        self.scaler = pickle.loads(pickle.dumps(self.scaler))


CALLS = ["backward", "backward", "backward", "clear", "unscale", "clip", "step", "step", "update", "update"]
CALLS += ["update_to", "set", "save", "pickle"]


class TestBesideTorchs:
    """Both go through the same script: the same numbers, the same bits, errors of the same classes."""

    def check(self, make: Callable[..., torch.optim.Optimizer], calls: list[tuple[str, int]]) -> None:
        theirs, ours = Script(TORCHS, make), Script(OURS, make)
        for script in (theirs, ours):
            script.run(calls)
        for expected, found in zip(theirs.told, ours.told, strict=True):
            if isinstance(expected, Exception):
                assert isinstance(found, type(expected))
                assert isinstance(found, AmpError)
            else:
                assert repr(found) == repr(expected)  # NaN is like NaN
        assert_same_state(ours.model.state_dict(), theirs.model.state_dict())
        ours_grads, theirs_grads = ([each.grad for each in one.model.parameters()] for one in (ours, theirs))
        assert_same_state(ours_grads, theirs_grads)
        for expected, found in zip(theirs.optimizers, ours.optimizers, strict=True):
            if found.state:  # an empty one becomes what a first step makes of nothing, when there is one
                assert_same_state(found.state_dict(), expected.state_dict())

    @EACH_OPTIMIZER
    @given(calls=st.lists(st.tuples(st.sampled_from(CALLS), st.integers(0, 1)), max_size=24))
    def test_calls_in_any_order_have_the_results_of_torchs_scaler(self, make, calls):
        self.check(make, calls)

    @pytest.mark.slow
    @EACH_OPTIMIZER
    @given(passes=st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=6))
    def test_training_loops_have_the_bits_of_torchs_scaler(self, make, passes):
        calls: list[tuple[str, int]] = []
        for overflows, clips in passes:
            calls += [("clear", 1), ("clear", 0), ("backward", overflows), ("backward", 0)]
            calls += [("unscale", 0), ("clip", 0)] if clips else []
            calls += [("step", 1), ("step", 0), ("update", 0)]
        self.check(make, calls)


def train_with_a_gradient_penalty(used: torch.amp.GradScaler, half: torch.dtype) -> nn.Module:
    model = network()
    optimizer = SGD(model.parameters())
    for index in range(6):
        optimizer.zero_grad()
        with torch.autocast("cpu", half):
            loss = loss_of(model, index)
        scaled = torch.autograd.grad(used.scale(loss), list(model.parameters()), create_graph=True)
        inverse = 1.0 / used.get_scale()
        with torch.autocast("cpu", half):
            loss = loss + sum((grad * inverse).pow(2).sum() for grad in scaled).sqrt()
        used.scale(loss).backward()
        step(used, optimizer)
    return model


@pytest.mark.parametrize("half", HALF_DTYPES, ids=dtype_name)
def test_gradient_penalty_under_autocast_has_the_bits_of_torchs_scaler(half: torch.dtype) -> None:
    found, expected = (train_with_a_gradient_penalty(kind("cpu", growth_interval=2), half) for kind in (OURS, TORCHS))
    assert_same_state(found.state_dict(), expected.state_dict())


Losses = namedtuple("Losses", "first second")


@pytest.mark.parametrize("device", DEVICES)
class TestScale:
    def test_scale_keeps_the_structure_of_nested_outputs(self, device):
        one = torch.ones(2, device=device)
        outputs = [one, (one, {"a": one}), Losses(one, OrderedDict(b=one)), []]
        found = OURS(device, init_scale=4.0).scale(outputs)
        four = torch.full_like(one, 4)
        assert repr(found) == repr([four, (four, {"a": four}), Losses(four, OrderedDict(b=four)), []])
        generated = OURS(device, init_scale=4.0).scale(one for _ in range(2))
        assert_same_state(list(generated), [four, four])

    @pytest.mark.parametrize(
        ("dtype", "wanted"),
        [
            (torch.float16, torch.float32),
            (torch.bfloat16, torch.bfloat16),
            (torch.float64, torch.float64),
            (torch.complex64, torch.complex64),
        ],
        ids=str,
    )
    def test_scale_returns_a_type_that_holds_the_product(self, device, dtype, wanted):
        found = OURS(device).scale(torch.full((2,), 2, dtype=dtype, device=device))
        assert (found.dtype, found[0].item()) == (wanted, 2.0**17)

    @pytest.mark.parametrize(
        ("outputs", "kind"),
        [(3.0, "float"), (None, "NoneType"), ([torch.ones(1), 2], "int"), (torch.tensor(1), "a tensor of torch.int64")],
        ids=repr,
    )
    def test_scale_refuses_outputs_that_have_no_gradients(self, device, outputs, kind):
        with pytest.raises(OptionError, match=f"outputs must be a Tensor or an iterable of Tensors.*found {kind}"):
            OURS(device).scale(outputs)

    def test_backward_after_an_update_has_the_scale_from_before(self, device):
        """Autograd keeps what the loss was multiplied by."""
        used = OURS(device, init_scale=4.0)
        weight = torch.ones(1, device=device, requires_grad=True)
        loss = used.scale((weight * 3).sum())
        used.update(new_scale=2.0)
        loss.backward()
        assert weight.grad is not None
        assert weight.grad.item() == 12.0


class TestPrivateAttributes:
    """Private ones, which subclasses and loops read and set."""

    @EACH
    def test_an_overridden_update_reads_torchs_private_attributes(self, kind):
        class Own(kind):  # type: ignore[misc, valid-type]
            def update(self, new_scale: Any = None) -> None:
                scale, clean = self._check_scale_growth_tracker("update")
                factors = self._growth_factor, self._backoff_factor, self._growth_interval
                torch._amp_update_scale_(scale, clean, torch.zeros(()), *factors)
                self._per_optimizer_states.clear()

        used = Own("cpu", init_scale=4.0, growth_factor=3.0, growth_interval=1)
        used.scale(torch.ones(1))
        used.step(with_gradients(1.0)[1])
        used.update()
        assert used.get_scale() == 12.0

    @EACH
    def test_private_attributes_set_by_hand_count(self, kind):
        used = begun(kind)
        used._growth_factor, used._backoff_factor, used._growth_interval = 3.0, 0.25, 7
        used._scale = torch.tensor(128).to(used._scale)
        used._growth_tracker = torch.tensor(5, dtype=torch.int32)
        wanted = {"scale": 128.0, "growth_factor": 3.0, "backoff_factor": 0.25, "growth_interval": 7}
        assert used.state_dict() == {**wanted, "_growth_tracker": 5}
        used._scale = used._growth_tracker = None
        assert used.scale(torch.ones(1)).item() == 65536.0

    @EACH
    def test_lazy_initialisation_keeps_a_scale_that_is_there(self, kind):
        used = begun(kind)
        used.update(4.0)
        with pytest.raises(AssertionError, match="_growth_tracker initialized before _scale"):
            used._lazy_init_scale_growth_tracker(torch.device("cpu"))
        assert used.get_scale() == 4.0

    @EACH
    def test_a_subclass_that_allows_half_gradients_unscales_them(self, kind):
        class Half(kind):  # type: ignore[misc, valid-type]
            def _unscale_grads_(self, optimizer: Any, inverse: Tensor, found: Tensor, _: bool) -> Any:
                return super()._unscale_grads_(optimizer, inverse, found, True)

        parameter = nn.Parameter(torch.ones(1, dtype=torch.float16))
        used = Half("cpu", init_scale=4.0)
        used.scale(parameter.float().sum()).backward()
        used.step(torch.optim.SGD([parameter], lr=1.0))
        used.update()
        assert (parameter.item(), used.get_scale()) == (0.0, 4.0)

    @EACH
    @pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
    def test_an_overflow_verdict_of_one_element_counts(self, kind, fused):
        """As of ShardedGradScaler, and of those who reduce it over processes."""
        parameter, optimizer = with_gradients(1.0, fused=fused)
        used = begun(kind)
        used.unscale_(optimizer)
        used._found_inf_per_device(optimizer)[torch.device("cpu")] = torch.ones(1)
        step(used, optimizer)
        assert (parameter.item(), used.get_scale()) == (1.0, 2.0**15)

    def test_the_scaler_keeps_an_optimizer_alive_until_the_update(self):
        """Or another one with its id would be taken for it, and not have its gradients unscaled."""
        _, optimizer = with_gradients(1.0)
        used, known = scaler(), weakref.ref(optimizer)
        used.scale(torch.ones(1))
        used.unscale_(optimizer)
        del optimizer
        gc.collect()
        assert known() is not None
        used.update()
        gc.collect()
        assert known() is None


class TestUnscale:
    def test_sparse_gradients_are_unscaled_after_they_are_summed(self):
        table = nn.Embedding(4, 2, sparse=True)
        optimizer, used = torch.optim.SGD(table.parameters(), lr=1.0), scaler(init_scale=4.0)
        before = table.weight.detach().clone()
        used.scale(table(torch.tensor([1, 1])).sum()).backward()
        used.unscale_(optimizer)
        assert_same_bits(table.weight.grad.to_dense()[1], torch.tensor([2.0, 2.0]))
        used.step(optimizer)
        assert_same_bits(table.weight[1], before[1] - 2)

    def test_complex_gradients_are_unscaled_and_checked(self):
        parameter = nn.Parameter(torch.ones(2, dtype=torch.complex64))
        optimizer, used = torch.optim.SGD([parameter], lr=1.0), scaler(init_scale=4.0)
        used.scale((parameter * (1 + 2j)).real.sum()).backward()
        used.step(optimizer)
        assert_same_bits(parameter, torch.full((2,), 0 + 2j))
        parameter.grad = torch.tensor([complex(0, math.inf), 0j])
        used.update()
        step(used, optimizer)
        assert used.get_scale() == 2.0

    @EACH
    def test_float16_gradients_are_refused_and_stay_as_they_were(self, kind):
        parameters = [nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1, dtype=torch.float16))]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        used = begun(kind)
        with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
            used.unscale_(torch.optim.SGD(parameters, lr=1.0))
        assert [float(parameter.grad) for parameter in parameters] == [1.0, 1.0]

    def test_a_gradient_that_two_parameters_share_is_unscaled_once(self):
        first, second = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
        first.grad = second.grad = torch.tensor([8.0])
        used = begun(init_scale=4.0)
        used.unscale_(torch.optim.SGD([first, second], lr=1.0))
        assert first.grad.item() == 2.0

    def test_torchs_private_methods_have_its_results(self):
        """As torch's tests of its class call them."""
        parameter, optimizer = with_gradients(4.0, math.inf)
        used = scaler()
        used._lazy_init_scale_growth_tracker(torch.device("cpu"))
        assert (used._scale.item(), used._growth_tracker.item()) == (65536.0, 0)
        assert used._get_scale_async() is used._scale
        found = used._unscale_grads_(optimizer, torch.tensor(0.25), torch.tensor(0.0), True)
        assert found == {torch.device("cpu"): 1.0}
        assert parameter.grad[0].item() == 1.0
        assert used._check_inf_per_device(optimizer) == used._found_inf_per_device(optimizer) == found


class TestOrder:
    @pytest.mark.parametrize(
        ("calls", "message"),
        [
            ("unscale_", r"unscale_\(\) comes before any scale"),
            ("step", r"step\(\) comes before any scale"),
            ("update", r"update\(\) comes before any scale"),
            ("scale, unscale_, unscale_", r"unscale_\(\) has already been called on this optimizer since the last upd"),
            ("scale, step, unscale_", r"unscale_\(\) is being called after step\(\)"),
            ("scale, step, step", r"step\(\) has already been called since the last update\(\)"),
            ("scale, step without gradients", "No inf checks were recorded for this optimizer"),
            ("scale, update", "No inf checks were recorded prior to update"),
            ("scale, unscale_, pickle", "may only be pickled at the beginning of an iteration"),
            ("scale, unscale_, copy", "may only be pickled at the beginning of an iteration"),
        ],
        ids=lambda value: value if re.fullmatch(r"[\w, ]+", value) else "",
    )
    def test_calls_out_of_order_raise_each_class_that_callers_catch(self, calls, message):
        used, optimizer = scaler(), with_gradients(1.0)[1]
        to_call = {
            "scale": lambda: used.scale(torch.ones(1)),
            "unscale_": lambda: used.unscale_(optimizer),
            "step": lambda: used.step(optimizer),
            "step without gradients": lambda: used.step(SGD(network().parameters())),
            "update": used.update,
            "pickle": lambda: pickle.dumps(used),
            "copy": lambda: copy.deepcopy(used),
        }
        *before, last = calls.split(", ")
        for call in before:
            to_call[call]()
        with pytest.raises(UsageError, match=message) as caught:
            to_call[last]()
        assert isinstance(caught.value, RuntimeError)
        assert isinstance(caught.value, AssertionError)
        assert re.search(r"\b(Call|Type|Run|Copy)\b", str(caught.value))

    def test_a_step_that_raises_may_be_tried_again(self):
        parameter, optimizer = with_gradients(2.0)
        used = begun(init_scale=2.0)
        handle = optimizer.register_step_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            used.step(optimizer)
        handle.remove()
        used.step(optimizer)
        assert parameter.item() == 0.0

    def test_stepping_what_is_no_optimizer_is_an_error(self):
        used = begun()
        for call in (used.step, used.unscale_):
            with pytest.raises(OptionError, match="found Linear as an optimizer"):
                call(nn.Linear(1, 1))


class TestStep:
    def test_step_passes_arguments_and_returns_the_optimizers_result(self):
        class Told(torch.optim.SGD):
            def step(self, *args: Any, **kwargs: Any) -> Any:
                return args, kwargs

        parameter, _ = with_gradients(1.0)
        used = begun()
        assert used.step(Told([parameter], lr=1.0), None, epoch=3) == ((None,), {"epoch": 3})

    @EACH
    def test_step_passes_a_module_that_is_no_closure(self, kind):
        class Told(torch.optim.SGD):
            def step(self, model: Any) -> Any:
                return model

        parameter, _ = with_gradients(1.0)
        model, used = nn.Linear(1, 1), begun(kind)
        assert used.step(Told([parameter], lr=1.0), model) is model

    def test_an_optimizer_that_takes_the_scaler_gets_it(self):
        class Old(torch.optim.SGD):
            _step_supports_amp_scaling = True

            def step(self, closure: Any = None, *, grad_scaler: Any = None) -> Any:
                return grad_scaler

        parameter, _ = with_gradients(1.0)
        used = begun()
        with pytest.warns(FutureWarning, match="this Old takes grad_scaler"):
            assert used.step(Old([parameter], lr=1.0)) is used

    @EACH
    def test_a_grad_scale_that_the_user_has_set_is_gone_after_a_skipped_step(self, kind):
        """Or later gradients, for which none is set, would be divided by it."""
        parameter, optimizer = with_gradients(math.inf, fused=True)
        used = begun(kind, init_scale=2.0)
        optimizer.grad_scale = torch.tensor(4.0)
        step(used, optimizer)
        parameter.grad = torch.tensor([1.0])
        used.step(optimizer)
        assert parameter.item() == 0.0

    @EACH
    @pytest.mark.parametrize("unscaled", [False, True])
    def test_a_grad_scale_that_the_user_has_set_is_divided_by_as_well(self, kind, unscaled):
        parameter, optimizer = with_gradients(15.0, fused=True)
        used = begun(kind, init_scale=5.0)
        if unscaled:
            used.unscale_(optimizer)
        optimizer.grad_scale = torch.tensor(3.0)
        used.step(optimizer)
        assert parameter.item() == pytest.approx(0.0)
        assert not hasattr(optimizer, "grad_scale")

    @pytest.mark.parametrize("kind", [torch.optim.SGD, type("Own", (torch.optim.SGD,), {})])
    def test_a_fused_optimizer_that_skips_its_first_step_makes_no_state(self, kind):
        """SGD with momentum would go on from memory that nobody has written to."""
        parameter, _ = with_gradients(math.nan)
        optimizer = kind([parameter], lr=1.0, momentum=0.9, fused=True)
        used = begun()
        used.step(optimizer)
        assert not optimizer.state
        assert parameter.item() == 1.0

    @pytest.mark.usefixtures("far_away")
    def test_nothing_is_left_on_an_optimizer_whose_step_raises(self):
        class Fails(torch.optim.SGD):
            _step_supports_amp_scaling = True

            def step(self, closure: Any = None) -> None:
                raise ZeroDivisionError

        parameter, _ = with_gradients(1.0)
        optimizer, used = Fails([parameter], lr=1.0), begun()
        with pytest.raises(ZeroDivisionError):
            used.step(optimizer)
        assert not hasattr(optimizer, "found_inf")


class TestClosures:
    """Which torch's class refuses."""

    @pytest.mark.parametrize("clips", [False, True], ids=["", "clipped-in-the-closure"])
    @pytest.mark.parametrize(
        "make",
        [SGD, ADAMW, functools.partial(ADAMW, fused=True), torch.optim.LBFGS],
        ids=["SGD", "AdamW", "AdamW-fused", "LBFGS"],
    )
    def test_steps_with_closures_are_those_without_a_scale(self, make, clips):
        def train(used: ampatch.GradScaler) -> list[Any]:
            model, losses = network(), []
            optimizer = make(model.parameters())
            for _ in range(3):
                losses.append(used.step(optimizer, closure=closure_of(used, optimizer, model, clips=clips)).item())
                used.update()
            return [losses, model.state_dict()]

        used = scaler(growth_interval=1)
        assert_same_state(train(used), train(scaler(enabled=False)))
        assert used.get_scale() == 2.0**19

    def test_an_overflow_whose_error_the_optimizer_catches_undoes_the_step(self):
        class Catches(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                try:
                    closure()
                finally:
                    super().step()
                    return None  # noqa: B012 - such code is there

        model = network()
        optimizer, used, before = Catches(model.parameters(), lr=0.1), scaler(), copy.deepcopy(model.state_dict())
        used.step(optimizer, closure_of(used, optimizer, model, overflow_at=0))
        used.update()
        assert_same_state(model.state_dict(), before)
        assert used.get_scale() == 2.0**15

    def test_an_update_in_a_closure_is_an_error(self):
        model = network()
        optimizer, used = torch.optim.LBFGS(model.parameters(), max_iter=3), scaler()
        closure = closure_of(used, optimizer, model, clips=True)
        with pytest.raises(UsageError, match=r"update\(\) was called in the closure of a step"):
            used.step(optimizer, lambda: (closure(), used.update()))

    def test_unscaling_before_a_step_with_a_closure_is_an_error(self):
        model = network()
        optimizer, used = SGD(model.parameters()), scaler()
        used.scale(loss_of(model)).backward()
        used.unscale_(optimizer)
        with pytest.raises(UsageError, match=r"unscale_\(\) was called before a step with a closure"):
            used.step(optimizer, lambda: loss_of(model))

    def test_a_closure_that_makes_no_gradients_is_an_error(self):
        model, used = network(), begun()
        with pytest.raises(UsageError, match="No inf checks were recorded for this optimizer"):
            used.step(SGD(model.parameters()), lambda: loss_of(model))

    def test_a_closure_that_is_never_called_is_an_error(self):
        class Deaf(torch.optim.SGD):
            def step(self, closure: Any = None) -> None: ...

        model, used = network(), begun()
        with pytest.raises(UsageError, match="this Deaf did not call its closure"):
            used.step(Deaf(model.parameters(), lr=1.0), lambda: loss_of(model))


class TestUpdate:
    @pytest.mark.parametrize(
        "new_scale", [8, 8.0, torch.tensor(8.0), torch.tensor([8.0], dtype=torch.float16)], ids=repr
    )
    def test_update_takes_a_new_scale(self, new_scale):
        used = begun()
        used.update(new_scale)
        assert used.get_scale() == 8.0
        if isinstance(new_scale, Tensor):
            new_scale.fill_(1)
        assert used.get_scale() == 8.0

    @pytest.mark.parametrize(
        "new_scale",
        [0.0, -1.0, math.inf, math.nan, "8", torch.ones(2), torch.ones(1, requires_grad=True), torch.tensor(8)],
        ids=repr,
    )
    def test_update_to_what_is_no_scale_is_an_error_and_changes_nothing(self, new_scale):
        used = begun()
        with pytest.raises(OptionError, match="new_scale is") as caught:
            used.update(new_scale)
        assert isinstance(caught.value, AssertionError)
        assert used.get_scale() == 65536.0

    @pytest.mark.parametrize(
        ("options", "expected"),
        [({"growth_factor": 100.0, "max_loss_scale": 2.0**20}, 2.0**20), ({"growth_factor": 2.0**100}, 2.0**116)],
        ids=["ceiling", "no ceiling"],
    )
    def test_the_scale_grows_to_its_ceiling_and_stays_finite_without_one(self, options, expected):
        _, optimizer = with_gradients(0.0)
        used = begun(growth_interval=1, **options)
        step(used, optimizer, times=3)
        assert used.get_scale() == expected

    def test_the_scale_grows_at_once_if_the_interval_became_shorter(self):
        """With torch's class it would not before an overflow."""
        _, optimizer = with_gradients(0.0)
        used = begun(growth_interval=5)
        for _ in range(4):
            step(used, optimizer)
            used.set_growth_interval(2)
        assert used.get_scale() == 2.0**18

    @EACH
    def test_a_scale_near_the_end_of_float32_stays_finite_and_is_saved(self, kind):
        _, optimizer = with_gradients(0.0)
        used = begun(kind, init_scale=1e38, growth_interval=1, growth_factor=3.0)
        step(used, optimizer, times=2)
        loaded = kind("cpu")
        loaded.load_state_dict(used.state_dict())
        assert loaded.get_scale() == used.get_scale() == pytest.approx(3e38)


class TestFloor:
    def overflow(self, used: ampatch.GradScaler, optimizer: torch.optim.Optimizer, times: int) -> None:
        used.scale(torch.ones(1))
        for _ in range(times):
            optimizer.param_groups[0]["params"][0].grad = torch.tensor([math.inf, math.nan, 1.0])
            step(used, optimizer)

    @pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
    def test_an_overflow_at_the_floor_raises_and_describes_the_parameters(self, fused):
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=1.0, fused=fused)
        used = scaler(init_scale=4.0, min_loss_scale=1.0)
        self.overflow(used, optimizer, 2)
        assert used.get_scale() == 1.0
        culprit = r"param_groups\[0\]\['params'\]\[0\], shape \(3,\), float32: 1 inf, 1 nan"
        with pytest.raises(LossScaleError, match=f"(?s)floor of 1 and the gradients still overflow.*{culprit}"):
            self.overflow(used, optimizer, 1)

    def test_the_scale_without_a_floor_warns_once_and_never_becomes_zero(self):
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=1.0)
        used = scaler(backoff_factor=2.0**-10)
        with pytest.warns(AmpWarning, match=r"(?s)has come down to .*1 inf, 1 nan") as warned:
            self.overflow(used, optimizer, 50)
        assert len(warned) == 1
        assert used.get_scale() == 2.0**-126

        parameter = optimizer.param_groups[0]["params"][0]
        parameter.grad = torch.zeros(3)
        used.step(optimizer)
        assert parameter.tolist() == [1.0] * 3


BAD_OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "growth of 1": ({"growth_factor": 1.0}, "growth_factor is 1.0; expected a number above 1"),
    "no backoff": ({"backoff_factor": 0}, "backoff_factor is 0"),
    "no interval": ({"growth_interval": 0}, "growth_interval is 0"),
    "text": ({"init_scale": "big"}, "init_scale is 'big'"),
    "floor above ceiling": ({"min_loss_scale": 2, "max_loss_scale": 1}, "is above max_loss_scale"),
    "no hysteresis": ({"hysteresis": 0}, "hysteresis is 0"),
}


class TestOptions:
    @pytest.mark.parametrize(("options", "message"), BAD_OPTIONS.values(), ids=BAD_OPTIONS)
    def test_options_out_of_range_raise_each_class_that_callers_catch(self, options, message):
        with pytest.raises(OptionError, match=message) as caught:
            scaler(**options)
        assert isinstance(caught.value, AssertionError)

    @pytest.mark.parametrize(
        ("name", "value"), [("growth_factor", 1.0), ("backoff_factor", 2.0), ("growth_interval", 0.5)]
    )
    def test_setters_refuse_values_out_of_range(self, name, value):
        used = scaler()
        before = used.state_dict()
        with pytest.raises(OptionError, match=name.replace("growth_interval", "scale_window|growth_interval")):
            getattr(used, f"set_{name}")(value)
        assert used.state_dict() == before

    @EACH
    @pytest.mark.parametrize("options", [{"growth_factor": 1.0}, {"init_scale": None}, {"growth_interval": 0}], ids=str)
    def test_a_disabled_scaler_takes_any_options(self, kind, options):
        assert not kind("cpu", enabled=False, **options).is_enabled()

    def test_a_disabled_scaler_does_nothing(self):
        used = OURS("cpu", enabled=False)
        parameter, optimizer = with_gradients(1.0)
        loss = torch.ones((), dtype=torch.float16)
        assert used.scale(loss) is loss
        used.unscale_(optimizer)
        used.step(optimizer)
        used.step(optimizer, lambda: loss)
        used.update()
        used.load_state_dict({})
        assert parameter.item() == -1.0
        assert (used.get_scale(), used.state_dict(), used.is_enabled()) == (1.0, {}, False)
        assert not pickle.loads(pickle.dumps(used)).is_enabled()


SAVED = scaler().state_dict()


class TestSaving:
    @pytest.mark.parametrize("begun", [False, True], ids=["new", "begun"])
    @pytest.mark.parametrize("source", [TORCHS, OURS], ids=["from-torch", "from-ampatch"])
    @pytest.mark.parametrize("target", [TORCHS, OURS], ids=["to-torch", "to-ampatch"])
    def test_torchs_scaler_and_ours_load_each_others_state(self, source, target, begun):
        saved = source("cpu", init_scale=3.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=2).state_dict()
        used = target("cpu", init_scale=6.0)
        used._init_growth_tracker = 7
        if begun:
            used.scale(torch.ones(1))
        used.load_state_dict(saved)
        assert used.state_dict() == saved
        assert used._init_growth_tracker == 0

    def test_amp_loads_the_state_of_a_scaler_and_the_scaler_amps(self):
        model = network()
        amp.initialize(model, SGD(model.parameters()), half_dtype="float16", verbosity=0)
        used = scaler(init_scale=2.0**9, hysteresis=2)
        amp.load_state_dict(used.state_dict())
        assert amp.get_loss_scale() == 2.0**9
        used.load_state_dict(amp.state_dict()["loss_scaler0"])

    def test_overflows_left_to_forgive_are_saved_and_pickled(self):
        _, optimizer = with_gradients(math.inf)
        used = begun(hysteresis=2)
        step(used, optimizer)
        assert used.state_dict()["hysteresis_left"] == 1
        loaded = scaler(hysteresis=2)
        loaded.load_state_dict(used.state_dict())
        for each in (loaded, pickle.loads(pickle.dumps(used))):
            each.scale(torch.ones(1))
            for scale in (2.0**15, 2.0**14):
                step(each, optimizer)
                assert each.get_scale() == scale

    @pytest.mark.parametrize(
        ("saved", "message"),
        [
            ({**SAVED, "scale": 0.0}, "scale is 0.0"),
            ({**SAVED, "growth_factor": 0.5}, "growth_factor is 0.5"),
            ({**SAVED, "_growth_tracker": -1}, "_growth_tracker is -1"),
            ({**SAVED, "unknown": 1}, "unexpected keys"),
            (amp.LossScaler(1.0).state_dict(), "of a static loss scale"),
            (None, "as the state of a loss scaler"),
            ({}, "The source state dict is empty"),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_loading_what_no_enabled_scaler_saved_is_an_error_and_changes_nothing(self, saved, message):
        used = scaler()
        with pytest.raises(RuntimeError if saved == {} else OptionError, match=message):
            used.load_state_dict(saved)
        assert used.state_dict() == SAVED

    def test_loading_forgives_no_more_overflows_than_the_scalers_own_hysteresis(self):
        _, optimizer = with_gradients(math.inf)
        used = scaler()
        used.load_state_dict(scaler(hysteresis=3).state_dict())
        used.scale(torch.ones(1))
        step(used, optimizer)
        assert used.get_scale() == 2.0**15


class TestBesideAmp:
    """A `GradScaler` of either kind is for optimizers whose gradients amp does not scale."""

    @EACH
    def test_a_scaler_works_at_o1_without_scale_loss(self, kind):
        model, plain = network(), network()
        optimizer, by_hand, used = SGD(model.parameters()), SGD(plain.parameters()), kind("cpu")
        amp.initialize(model, optimizer, half_dtype="float16", patch_torch_functions=False, verbosity=0)
        used.scale(loss_of(model)).backward()
        step(used, optimizer)
        loss_of(plain).backward()
        by_hand.step()
        assert_same_state(model.state_dict(), plain.state_dict())

    @EACH
    @pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
    def test_a_scaler_raises_at_o2_where_amp_unscales(self, kind, fused):
        model = network()
        optimizer, used = SGD(model.parameters(), fused=fused), kind("cpu")
        amp.initialize(model, optimizer, opt_level="O2", half_dtype="float16", verbosity=0)
        used.scale(loss_of(model)).backward()
        with pytest.raises(UsageError, match=r"a GradScaler cannot unscale for this SGD: amp\.scale_loss does"):
            used.step(optimizer)
