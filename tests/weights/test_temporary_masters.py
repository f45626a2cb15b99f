"""Of masters that exist only while the optimizer steps: split weights, stochastic rounding, and bfloat16 state.

The reference is ``master_weights=True``. Gradients are set by hand where bits are compared: split weights round ties
away from zero, so that a forward pass might differ.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import io
import itertools
import math
import pickle
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import assert_same_bits, assert_same_state, check_rows
from optimizers import MOMENTUM, OPTIMIZERS, OVERFLOW, SGD, Larc, WithTuples, backward
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from workers import Workers

from ampatch import amp
from ampatch.errors import AmpWarning, OptionError, UsageError
from ampatch.runtime import runtime
from ampatch.weights import exchange, step_parts, stochastic_rounding
from ampatch.weights.master_weights import MasterWeights
from ampatch.weights.temporary_masters import TemporaryMasters

KINDS = ["split", "stochastic"]
EACH_KIND = pytest.mark.parametrize("kind", KINDS)
EACH_STATE = pytest.mark.parametrize("state", ["float32", "bfloat16"])
OR_KEPT = pytest.mark.parametrize("kind", [True, *KINDS])  # and masters that are kept

HALF = torch.bfloat16
# Of masters that are kept the state is always float32.
EACH_STORAGE = pytest.mark.parametrize(
    ("kind", "state"), [(True, "float32"), *itertools.product(KINDS, ("float32", "bfloat16"))]
)

ADAMW = functools.partial(torch.optim.AdamW, lr=0.01)


class Lion(torch.optim.Optimizer):
    """A user's own optimizer, which keeps a list of its parameters."""

    def __init__(self, parameters: Any, lr: float = 0.01, weight_decay: float = 0.0) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})
        self.mine = [parameter for group in self.param_groups for parameter in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        group = self.param_groups[0]
        for parameter in self.mine:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if not state:
                state["average"] = torch.zeros_like(parameter)
            assert parameter.dtype is parameter.grad.dtype is state["average"].dtype
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.sub_(torch.lerp(state["average"], parameter.grad, 0.1).sign_(), alpha=group["lr"])
            state["average"].lerp_(parameter.grad, 0.01)
        return loss


class Factored(torch.optim.Optimizer):
    """Second moments by rows and columns, as Adafactor has them, in a list; its count is a number."""

    def __init__(self, parameters: Any, lr: float = 0.01, weight_decay: float = 0.0) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state, square = self.state[parameter], parameter.grad.square().add_(1e-30)
                sides = [-1, 0] if parameter.dim() == 2 else []
                if not state:
                    state["step"] = 0
                    state["moments"] = [torch.zeros_like(square.mean(side)) for side in sides]
                    state["moments"] += [] if sides else [torch.zeros_like(square)]
                state["step"] += 1
                correction = 1 - 0.99 ** state["step"]
                for moment, side in itertools.zip_longest(state["moments"], sides):
                    moment.lerp_(square if side is None else square.mean(side), 0.01)
                if sides:
                    rows, columns = state["moments"]
                    estimate = torch.outer(rows, columns).div_(rows.mean())
                else:
                    estimate = state["moments"][0]
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.addcdiv_(parameter.grad, (estimate / correction).sqrt_().add_(1e-8), value=-group["lr"])


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimization as users write it: the optimizer proper has the same groups."""

    def __init__(self, parameters: Any, make: Callable[..., torch.optim.Optimizer] = MOMENTUM) -> None:
        super().__init__(parameters, {"rho": 0.05})
        self.base = make(self.param_groups)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                self.state[parameter]["old"] = parameter.detach().clone()
                parameter.add_(parameter.grad, alpha=0.05)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.data = self.state[parameter]["old"]
        self.base.step()
        self.zero_grad()

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        self.first_step()
        closure()
        self.second_step()
        return loss


class ByMethod(torch.optim.SGD):
    """Updates its parameters by a method other than its step."""

    @torch.no_grad()
    def update(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(parameter.grad, alpha=self.param_groups[0]["lr"])


class Flat(torch.optim.Optimizer):
    """Updates one buffer, of which the parameters were views when it was made."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        own = self.param_groups[0]["params"]
        self.flat = torch.cat([each.detach().flatten() for each in own])
        for each, values in zip(own, self.flat.split([each.numel() for each in own]), strict=True):
            each.data = values.view_as(each)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        self.flat.sub_(torch.cat([each.grad.flatten() for each in self.param_groups[0]["params"]]))


def matrices(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Muon([parameter for parameter in parameters if parameter.dim() == 2])


# One of each class, in each of the implementations.
NAMES = (
    *("SGD-momentum", "SGD-nesterov-foreach", "Adam-amsgrad-foreach", "AdamW", "AdamW-fused", "Adagrad", "Adadelta"),
    *("Adafactor", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop"),
)
EVERY: dict[str, Callable[..., Any]] = {
    **{name: OPTIMIZERS[name] for name in NAMES},
    "Muon": matrices,
    "Lion": Lion,
    "Factored": Factored,
}
MOST = {"AdamW": ADAMW, "SGD": MOMENTUM, "Adafactor": torch.optim.Adafactor, "Lion": Lion, "Factored": Factored}
EACH_OF_MOST = pytest.mark.parametrize("make", MOST.values(), ids=MOST)


def network(seed: int = 0) -> nn.Sequential:
    """Has a norm that stays float32."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3, bias=False))


def initialize(model: Any, optimizer: Any, kind: str | bool = "split", **options: Any) -> None:
    amp.initialize(model, optimizer, **{"opt_level": "O5", "master_weights": kind, "verbosity": 0, **options})


def trainable(
    kind: str | bool = "split", make: Callable[..., Any] = SGD, model: nn.Module | None = None, **options: Any
) -> tuple[Any, Any]:
    """Returns a model and its optimizer under amp."""
    model = network() if model is None else model
    optimizer = make(model.parameters())
    initialize(model, optimizer, kind, **options)
    return model, optimizer


def with_state(kind: str | bool, state: str, make: Callable[..., Any] = ADAMW, **options: Any) -> tuple[Any, Any]:
    return trainable(kind, make, optimizer_state=state, **options)


def plain(make: Callable[..., Any]) -> tuple[nn.Module, Any]:
    """Returns a float32 model and its optimizer, without amp."""
    model = network()
    return model, make(model.parameters())


def give(model: nn.Module, index: int = 0, factor: float = 1.0) -> list[Tensor]:
    """Sets gradients that hang on the index alone; returns them."""
    generator, given = torch.Generator().manual_seed(index), []
    for parameter in model.parameters():
        if parameter.requires_grad:
            grad = torch.randn(parameter.shape, generator=generator) * factor
            parameter.grad = grad.to(HALF).to(parameter.dtype)
            given.append(parameter.grad)
    return given


def step(model: nn.Module, optimizer: Any, index: int = 0) -> None:
    give(model, index)
    optimizer.step()


def step_with_gradients(model: nn.Module, optimizer: Any, index: int = 0) -> list[Tensor]:
    """Steps, and returns the gradients."""
    given = give(model, index)
    optimizer.step()
    return given


def loss_of(model: nn.Module, index: int = 0) -> Tensor:
    return model(torch.randn(5, 4, generator=torch.Generator().manual_seed(index))).float().square().mean()


def everything(model: nn.Module, optimizer: Any) -> Any:
    """A copy of all that a step writes; of split weights, the state dict shows the remainders."""
    parameters = [parameter.detach().clone() for parameter in model.parameters()]
    saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return [saved, parameters, states(model, optimizer)]


def states(model: nn.Module, optimizer: Any) -> list[Any]:
    """Returns copies of the optimizer's state, by parameter."""
    return [copy.deepcopy(dict(optimizer.state.get(parameter, {}))) for parameter in model.parameters()]


def full(model: nn.Module) -> list[Tensor]:
    """Returns the float32 values of the parameters, as copies."""
    names = [name for name, _ in model.named_parameters()]
    saved = model.state_dict()
    return [saved[name].clone() for name in names]


def dtypes(tensors: Iterable[Tensor]) -> set[torch.dtype]:
    return {tensor.dtype for tensor in tensors}


def state_of(optimizer: Any, parameter: Tensor) -> list[Tensor]:
    """Returns the tensors of a parameter's state, but scalars."""
    values = optimizer.state[parameter].values()
    nested = itertools.chain.from_iterable(each if isinstance(each, list) else [each] for each in values)
    return [each for each in nested if isinstance(each, Tensor) and each.dim()]


def parts_of(optimizer: Any) -> int:
    return len(step_parts.parts_of(optimizer, runtime.live.adopted.record_of(optimizer).exchange.parameters()))


def assert_is_between_steps(model: nn.Module) -> None:
    assert {model[0].weight.dtype, model[0].bias.dtype, model[3].weight.dtype} == {HALF}
    assert dtypes(model[1].parameters()) == {torch.float32}


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives each parameter a part of its own."""
    monkeypatch.setattr(step_parts, "_LEAST", 1)


class TestSplitWeights:
    @pytest.mark.parametrize("in_parts", [False, True], ids=["one-part", "parts"])
    @pytest.mark.parametrize("make", EVERY.values(), ids=EVERY)
    def test_masters_and_state_have_the_bits_of_float32_training(self, make, in_parts, monkeypatch):
        """Of which masters that are kept have the bits as well: see `TestParameters`."""
        if in_parts:
            monkeypatch.setattr(step_parts, "_LEAST", 1)
        model, other = network(), network()
        optimizer, plain = make(model.parameters()), make(other.parameters())
        if "Muon" in type(optimizer).__name__:  # a bias that no optimizer updates has no master
            model[0].bias, other[0].bias = None, None
        initialize(model, optimizer, "split")
        for index in range(3):
            for parameter, grad in zip(other.parameters(), give(model, index), strict=True):
                parameter.grad = grad.float().clone()  # some optimizers write to their gradients
            optimizer.step()
            plain.step()
            assert_same_state(full(model), full(other))
            assert_same_state(states(model, optimizer), states(other, plain))
            for parameter, values in zip(model.parameters(), full(model), strict=True):
                is_tie = (values.view(torch.int32) & 0xFFFF) == 0x8000
                assert (torch.eq(parameter.float(), values.to(parameter.dtype).float()) | is_tie).all()
        assert not torch.equal(full(model)[0], network()[0].weight)

    def test_half_weights_are_the_nearest_and_ties_are_rounded_away_from_zero(self):
        model = nn.Linear(4, 1, bias=False)
        with torch.no_grad():
            model.weight.copy_(torch.tensor([[1 + 2**-8, -1 - 2**-8, 1 + 2**-8 - 2**-20, 0.3]]))
        before = model.weight.detach().clone()
        trainable(model=model)
        up = 1 + 2**-7
        assert model.weight.flatten().tolist() == [up, -up, 1, torch.tensor(0.3, dtype=HALF).item()]
        assert_same_bits(model.state_dict()["weight"], before)

    def test_unusual_values_keep_every_bit(self):
        values = [0.0, -0.0, 1e-45, -1e-40, 3.4e38, -3.4e38, math.inf, -math.inf, 1.17549435e-38, math.pi]
        model = nn.ParameterList([torch.tensor(values)])
        _, optimizer = trainable(model=model)
        optimizer.step()
        model[0].grad = torch.zeros_like(model[0])
        optimizer.step()
        assert_same_bits(model.state_dict()["0"], torch.tensor(values))
        amp.deinitialize()
        assert_same_bits(model[0].detach(), torch.tensor(values))

    def test_nan_stays_nan_and_spoils_no_other_element(self):
        model, optimizer = trainable()
        before = full(model)[0]
        model[0].weight.grad = torch.zeros_like(model[0].weight)
        model[0].weight.grad[0, 0] = math.nan
        optimizer.step()
        found = full(model)[0]
        assert found[0, 0].isnan()
        assert_same_bits(found[1:], before[1:])


@pytest.mark.usefixtures("small_parts")
class TestParts:
    @EACH_KIND
    def test_each_parameter_has_its_turn_and_its_gradient_is_only_read(self, kind):
        model, optimizer = trainable(kind, MOMENTUM)
        given = give(model)
        assert parts_of(optimizer) == 3
        optimizer.step()
        assert_same_state(given, give(model))
        assert_is_between_steps(model)

    @EACH_STATE
    @pytest.mark.parametrize("make", [ADAMW, MOMENTUM, torch.optim.Adafactor], ids=["AdamW", "SGD", "Adafactor"])
    def test_stochastic_parts_are_rounded_as_one_part(self, make, state, monkeypatch):
        found = []
        for least in (1, 2**20):
            monkeypatch.setattr(step_parts, "_LEAST", least)
            model, optimizer = with_state("stochastic", state, make)
            for index in range(3):
                step(model, optimizer, index)
            found.append(everything(model, optimizer))
            amp.deinitialize()
        assert_same_state(*found)

    @OR_KEPT
    def test_parameters_without_a_gradient_stay_as_they_are(self, kind):
        model, optimizer = trainable(kind, functools.partial(ADAMW, weight_decay=0.5))
        give(model)
        model[0].weight.grad = model[1].bias.grad = None
        before = full(model)
        optimizer.step()
        assert model[0].weight.grad is model[1].bias.grad is None
        changed = [not torch.equal(*pair) for pair in zip(full(model), before, strict=True)]
        assert changed == [False, True, True, False, True]
        assert model[0].weight not in optimizer.state

    @OR_KEPT
    def test_state_that_was_loaded_past_amp_is_widened_in_every_part(self, kind):
        model, optimizer = trainable(kind, ADAMW)
        step(model, optimizer)
        torch.optim.Optimizer.load_state_dict(optimizer, copy.deepcopy(optimizer.state_dict()))
        assert dtypes(state_of(optimizer, model[3].weight)) == {HALF}
        step(model, optimizer, 1)
        for parameter in model.parameters():
            assert dtypes(state_of(optimizer, parameter)) == {torch.float32}

    def test_a_step_without_any_gradient_changes_nothing(self):
        model, optimizer = trainable()
        before = everything(model, optimizer)
        optimizer.step()
        assert_same_state(everything(model, optimizer), before)

    def test_an_error_in_a_later_part_leaves_the_parts_before_it_updated(self):
        model, optimizer = trainable("split", MOMENTUM)
        step(model, optimizer)
        optimizer.state[model[3].weight]["momentum_buffer"] = torch.ones(7)
        give(model, 1)
        before = full(model)
        with pytest.raises(RuntimeError, match="must match the size"):
            optimizer.step()
        assert_is_between_steps(model)
        assert not torch.equal(full(model)[0], before[0])
        assert_same_bits(full(model)[4], before[4])

    def test_a_step_that_the_user_has_replaced_runs_once(self):
        model = network()
        optimizer, calls = MOMENTUM(model.parameters()), []
        original = optimizer.step
        optimizer.step = lambda *args: [calls.append(1), original(*args)][1]
        initialize(model, optimizer)
        step(model, optimizer)
        assert len(calls) == 1

    def test_hooks_of_the_step_run_once(self):
        model, optimizer = trainable()
        seen = []
        optimizer.register_step_pre_hook(lambda *_: seen.append(model[0].weight.dtype))
        optimizer.register_step_post_hook(lambda *_: seen.append(model[0].weight.dtype))
        step(model, optimizer)
        assert seen == [HALF, HALF]


@pytest.mark.parametrize("kind", ["split", "stochastic"])
class TestSteps:
    def test_that_change_a_buffer_in_place_of_the_parameters_are_warned_of_once(self, kind):
        model = network()
        optimizer = Flat(model.parameters())
        initialize(model, optimizer, kind)
        for _ in range(8):
            step(model, optimizer)
        with pytest.warns(AmpWarning, match=f"8 steps of this Flat have changed none .* master_weights='{kind}'"):
            step(model, optimizer)
        step(model, optimizer)

    def test_of_many_parts_are_counted_once(self, kind, small_parts):
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
        initialize(model, optimizer, kind)
        give(model)
        assert parts_of(optimizer) == 3
        for _ in range(8):
            step(model, optimizer)

    @pytest.mark.parametrize("writes_data", [False, True])
    def test_that_begin_late_are_not_warned_of(self, kind, writes_data):
        class Late(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                if writes_data:
                    for each in self.param_groups[0]["params"]:
                        each.data.add_(each.grad * self.param_groups[0]["lr"])
                else:
                    super().step(closure)

        model = network()
        optimizer = Late(model.parameters(), lr=0.0)
        initialize(model, optimizer, kind)
        for count in range(20):
            optimizer.param_groups[0]["lr"] = 0.1 * (count == 6)
            step(model, optimizer)


class TestStochasticRounding:
    @pytest.mark.parametrize(
        ("make", "update"),
        [(SGD, "step"), (lambda parameters, lr: WithTuples(SGD(parameters, lr=2 * lr)), "step"), (ByMethod, "update")],
        ids=["step", "groups made anew each time", "own method"],
    )
    def test_small_updates_add_up_in_every_element(self, make, update):
        """400 updates of a sixtieth of the distance between two bfloat16 numbers."""
        model = nn.Linear(64, 32, bias=False)
        nn.init.ones_(model.weight)
        _, optimizer = trainable("stochastic", functools.partial(make, lr=2**-7 / 60 * 0.96), model)
        for _ in range(400):
            model.weight.grad = -torch.ones_like(model.weight)
            getattr(optimizer, update)()
        weights = full(model)[0]
        # Independent numbers have each element within some standard deviations (0.02) of the mean.
        assert weights.mean().item() == pytest.approx(1.05, abs=0.003)
        assert weights.std().item() < 0.03

    @EACH_STATE
    def test_the_users_seeds_are_neither_used_nor_changed(self, state):
        found = []
        for seed in (1, 2):
            model, optimizer = with_state("stochastic", state)
            torch.manual_seed(seed)
            before = torch.get_rng_state()
            for index in range(2):
                step(model, optimizer, index)
            assert torch.equal(torch.get_rng_state(), before)
            found.append(everything(model, optimizer))
            amp.deinitialize()
        assert_same_state(*found)

    def test_each_step_and_each_parameter_has_other_numbers(self):
        model = nn.ParameterList([torch.ones(256), torch.ones(256)])
        optimizer = SGD(model.parameters(), lr=2.0**-9)
        initialize(model, optimizer, "stochastic")
        found = []
        for _ in range(2):
            model.load_state_dict({"0": torch.ones(256), "1": torch.ones(256)})
            for parameter in model:
                parameter.grad = -torch.ones_like(parameter)
            optimizer.step()
            found += full(model)
        for one, other in itertools.combinations(found, 2):
            assert (one != other).float().mean() > 0.2


def _trained_on_ranks(kind: str, state: str, seeds: bool) -> list[Tensor]:
    model = network(dist.get_rank() if seeds else 0)
    optimizer = ADAMW(model.parameters())
    initialize(model, optimizer, kind, optimizer_state=state)
    replica = DistributedDataParallel(model)
    torch.manual_seed(dist.get_rank())
    for index in range(4):
        optimizer.zero_grad()
        backward(loss_of(replica, 10 * index + dist.get_rank()), optimizer)
        optimizer.step()
    rounded = [parameter.detach().clone() for parameter in model.parameters()]
    moments = [each.clone() for parameter in model.parameters() for each in state_of(optimizer, parameter)]
    return [*full(model), *rounded, *moments]


def _after_a_broadcast_of_detached_weights(kind: str) -> tuple[list[Tensor], list[Tensor]]:
    """Returns float32 and half weights after rank 0 has sent its own half ones, which torch does not count."""
    model = network(dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    initialize(model, optimizer, kind)
    for parameter in model.parameters():
        dist.broadcast(parameter.detach(), 0)
    step(model, optimizer)
    return full(model), [parameter.detach() for parameter in model.parameters()]


def _wrapped_after_a_write_by_numpy() -> list[Tensor]:
    model = network()
    initialize(model, SGD(model.parameters()), "split")
    WRITES["numpy"](model[0].weight)
    DistributedDataParallel(model)
    return full(model)


class TestRanks:
    @EACH_KIND
    def test_masters_are_weights_that_another_rank_has_sent_uncounted(self, two: Workers, kind):
        (_, sent), (found, received) = two.run(_after_a_broadcast_of_detached_weights, kind)
        assert_same_state(received, sent)
        assert_same_state(found, [each.float() for each in sent])

    def test_wrapping_sends_what_was_written_uncounted(self, two: Workers):
        first, second = two.run(_wrapped_after_a_write_by_numpy)
        assert not first[0].any()
        assert_same_state(first, second)

    @pytest.mark.slow
    @EACH_STATE
    @EACH_KIND
    def test_ranks_have_the_same_weights_and_state(self, two: Workers, kind, state):
        assert_same_state(*two.run(_trained_on_ranks, kind, state, False))

    @pytest.mark.slow
    def test_wrapping_sends_every_bit_of_the_weights_of_rank_0(self, two: Workers):
        for kind in KINDS:
            first, second = two.run(_trained_on_ranks, kind, "float32", True)
            assert_same_state(first, second)
            assert all(tensor.isfinite().all() for tensor in first)


class TestState:
    @EACH_KIND
    @EACH_OF_MOST
    def test_state_is_bfloat16_between_steps_and_float32_after_deinitialize(self, make, kind):
        model, optimizer = with_state(kind, "bfloat16", make)
        for index in range(2):
            step(model, optimizer, index)
            assert dtypes(state_of(optimizer, model[0].weight)) == {HALF}
            # Parameters that are float32 have no masters, and their state stays.
            assert dtypes(state_of(optimizer, model[1].weight)) == {torch.float32}
        before = [each.float() for each in state_of(optimizer, model[0].weight)]
        steps = optimizer.state[model[0].weight].get("step")
        amp.deinitialize()
        assert_same_state(state_of(optimizer, model[0].weight), before)
        assert optimizer.state[model[0].weight].get("step") == steps
        step(model, optimizer)

    @pytest.mark.slow
    def test_moments_are_rounded_without_bias(self):
        model = nn.Linear(64, 32, bias=False)
        _, optimizer = with_state("split", "bfloat16", model=model)
        for _ in range(300):
            model.weight.grad = torch.ones_like(model.weight)
            optimizer.step()
        moments = optimizer.state[model.weight]["exp_avg_sq"].float()
        assert moments.mean().item() == pytest.approx(1 - 0.999**300, rel=2e-3)
        assert moments.std().item() < 0.01

    @pytest.mark.slow
    @EACH_KIND
    def test_state_from_before_initialize_is_narrowed(self, kind):
        model = network()
        optimizer = ADAMW(model.parameters())
        step(model, optimizer)
        initialize(model, optimizer, kind, optimizer_state="bfloat16")
        assert dtypes(state_of(optimizer, model[0].weight)) == {HALF}
        step(model, optimizer, 1)
        assert optimizer.state[model[0].weight]["step"].item() == 2

    def test_lbfgs_goes_on_from_narrow_history(self):
        model, optimizer = with_state("split", "bfloat16", functools.partial(torch.optim.LBFGS, max_iter=3))
        values = itertools.count()
        for _ in range(2):
            optimizer.step(lambda: give(model, next(values)) and torch.tensor(1.0))
        assert dtypes(optimizer.state[model[0].weight]["old_dirs"]) == {HALF}
        assert all(each.isfinite().all() for each in full(model))

    def test_state_that_shares_memory_among_elements_is_narrowed(self):
        class Views(torch.optim.SGD):
            @torch.no_grad()
            def step(self, closure: Any = None) -> None:
                for parameter in self.param_groups[0]["params"]:
                    if not self.state[parameter]:
                        numbers = torch.arange(12.0).reshape(2, 6)
                        self.state[parameter] = {"all": torch.ones(1).expand(5), "some": numbers[:, ::2]}

        model, optimizer = with_state("split", "bfloat16", functools.partial(Views, lr=0.1))
        step(model, optimizer)
        found = optimizer.state[model[0].weight]
        assert (found["all"].tolist(), found["some"].tolist()) == ([1] * 5, [[0, 2, 4], [6, 8, 10]])
        step(model, optimizer)

    def test_a_parameters_state_may_be_reset(self):
        model, optimizer = with_state("split", "bfloat16", MOMENTUM)
        step(model, optimizer)
        optimizer.state[model[0].weight].pop("momentum_buffer")
        optimizer.state[model[3].weight]["momentum_buffer"].zero_()
        before, given = full(model), give(model, 1)
        optimizer.step()
        assert_same_bits(full(model)[0], before[0].sub(given[0].float(), alpha=0.1))
        assert_same_bits(full(model)[4], before[4].sub(given[4].float(), alpha=0.1))


class TestClosures:
    """The closure sets gradients, so that both sides get the same."""

    def stepped(self, model: nn.Module, optimizer: Any) -> Any:
        indices, seen = itertools.count(), []

        def closure() -> Tensor:
            optimizer.zero_grad()
            seen.append(model[0].weight.dtype)
            index = next(indices)
            give(model, index)
            return torch.tensor(3.0 - index / 10)

        results = [optimizer.step(closure) for _ in range(3)]
        assert set(seen) == {model[0].weight.dtype}
        found = [full(model), list(map(float, results)), len(seen)]
        amp.deinitialize()
        return found

    @pytest.mark.parametrize("in_parts", [False, True], ids=["one-part", "parts"])
    @pytest.mark.parametrize(
        "make",
        [MOMENTUM, ADAMW, functools.partial(torch.optim.LBFGS, max_iter=4), Lion, Sam],
        ids=["SGD", "AdamW", "LBFGS", "Lion", "SAM"],
    )
    @pytest.mark.parametrize("kind", [True, "split"])
    def test_steps_with_a_closure_have_the_bits_of_float32_training(self, kind, make, in_parts, monkeypatch):
        if in_parts:
            monkeypatch.setattr(step_parts, "_LEAST", 1)
        assert_same_state(self.stepped(*trainable(kind, make)), self.stepped(*plain(make)))

    @pytest.mark.slow
    @EACH_STATE
    @pytest.mark.parametrize("make", [ADAMW, Lion], ids=["AdamW", "Lion"])
    def test_stochastic_steps_with_a_closure_are_those_without(self, make, state):
        found = self.stepped(*with_state("stochastic", state, make))
        model, optimizer = with_state("stochastic", state, make)
        for index in range(3):
            step(model, optimizer, index)
        assert_same_state(found[0], full(model))

    @pytest.mark.parametrize("kind", [True, "split"])
    def test_a_closure_sees_the_line_search_move_half_weights(self, kind):
        model, optimizer = trainable(kind, functools.partial(torch.optim.LBFGS, line_search_fn="strong_wolfe"))
        seen = []

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model)
            backward(loss, optimizer)
            seen.append(loss.item())
            return loss

        for _ in range(2):
            optimizer.step(closure)
        assert len(set(seen)) > 4
        assert seen[-1] < seen[0]

    @pytest.mark.parametrize("how", ["counted", "by data"])
    @EACH_KIND
    def test_what_a_closure_writes_to_weights_counts(self, kind, how):
        model, optimizer = trainable(kind, Lion)

        def closure() -> Tensor:
            if how == "counted":
                with torch.no_grad():
                    model[0].weight.zero_()
            else:
                model[0].weight.data.zero_()
            give(model)
            return torch.tensor(1.0)

        optimizer.step(closure)
        assert full(model)[0].abs().max().item() == pytest.approx(0.01, rel=0.01)

    @EACH_KIND
    def test_an_error_in_a_closure_leaves_half_weights_as_they_were(self, kind):
        model, optimizer = trainable(kind, Lion)
        step(model, optimizer)
        before = full(model)

        def closure() -> Tensor:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            optimizer.step(closure)
        assert_is_between_steps(model)
        assert_same_state(full(model), before)
        step(model, optimizer)


class TestOwnMethods:
    def stepped(self, model: nn.Module, optimizer: Sam) -> list[list[Tensor]]:
        found, before = [], dtypes(model.parameters())
        for index in range(3):
            give(model, 2 * index, 0.1)
            optimizer.first_step()
            assert all(parameter.grad is None for parameter in model.parameters())
            assert dtypes(model.parameters()) == before
            found.append(full(model))
            give(model, 2 * index + 1, 0.1)
            optimizer.second_step()
            assert all(parameter.grad is None for parameter in model.parameters())
            found.append(full(model))
        amp.deinitialize()
        return found

    @pytest.mark.parametrize("kind", [True, "split"])
    def test_steps_in_two_halves_have_the_bits_of_float32_training(self, kind):
        assert_same_state(self.stepped(*trainable(kind, Sam)), self.stepped(*plain(Sam)))

    @EACH_STATE
    def test_the_first_half_is_undone_by_the_second(self, state):
        model, optimizer = trainable(
            "stochastic", functools.partial(Sam, make=functools.partial(SGD, lr=0.0)), optimizer_state=state
        )
        before = full(model)
        give(model)
        optimizer.first_step()
        assert not torch.equal(full(model)[0], before[0])
        give(model)
        optimizer.second_step()
        assert_same_state(full(model), before)

    def test_an_optimizer_that_finds_state_by_addresses_finds_it_in_each_method(self):
        class ByAddress(torch.optim.SGD):
            """Finds the state of a parameter as heavyball's optimizers do, and stands for one of them."""

            __module__ = "heavyball.optimizers"

            def __init__(self, parameters: Any) -> None:
                super().__init__(parameters, lr=0.1)
                self.mapping: dict[Tensor, list[Tensor]] = {}
                self.mapping_inverse: dict[int, Tensor] = {}

            def _state_of(self, parameter: Tensor) -> Any:
                for each in self.param_groups[0]["params"]:
                    if each not in self.mapping:
                        self.mapping[each] = [each.view(-1)]
                        self.mapping_inverse[each.data_ptr()] = each
                return self.state[self.mapping_inverse[parameter.data_ptr()]]

            @torch.no_grad()
            def step(self, closure: Any = None) -> None:
                for each in self.param_groups[0]["params"]:
                    self._state_of(each)["before"] = each.clone()
                super().step()

            @torch.no_grad()
            def take_back(self) -> None:
                for each in self.param_groups[0]["params"]:
                    each.copy_(self._state_of(each)["before"])

        model, optimizer = trainable("split", ByAddress)
        for index in range(2):
            before = full(model)
            step(model, optimizer, index)
            assert not torch.equal(full(model)[0], before[0])
            assert not optimizer.mapping  # its views would keep the masters' memory
            assert optimizer._state_of(model[0].weight)
            optimizer.take_back()
            assert_same_state(full(model), before)

    def test_an_own_method_sees_float32_weights_and_gradients(self):
        class Reads(torch.optim.SGD):
            def norms(self) -> list[Any]:
                return [(each.dtype, each.grad.dtype, each.detach().clone()) for each in self.param_groups[0]["params"]]

        model, optimizer = trainable("split", functools.partial(Reads, lr=0.1))
        given = give(model)
        wanted = full(model)
        found = optimizer.norms()
        assert {each[:2] for each in found} == {(torch.float32, torch.float32)}
        assert_same_state([each[2] for each in found], wanted)
        assert [id(each.grad) for each in model.parameters()] == list(map(id, given))


class TestResume:
    @pytest.mark.parametrize("when", ["before", "after"])
    @EACH_STATE
    @EACH_KIND
    @EACH_OF_MOST
    def test_a_run_goes_on_with_every_bit(self, make, kind, state, when):
        model, optimizer = with_state(kind, state, make)
        for index in range(3):
            step(model, optimizer, index)
        file = io.BytesIO()
        torch.save([model.state_dict(), optimizer.state_dict()], file)
        for index in range(3, 6):
            step(model, optimizer, index)
        wanted = everything(model, optimizer)
        amp.deinitialize()
        file.seek(0)
        saved, saved_state = torch.load(file, weights_only=True)
        assert dtypes(saved[name] for name, _ in model.named_parameters()) == {torch.float32}
        model = network(1)
        optimizer = make(model.parameters())
        if when == "before":
            model.load_state_dict(saved)
            optimizer.load_state_dict(saved_state)
        initialize(model, optimizer, kind, optimizer_state=state)
        if when == "after":
            model.load_state_dict(saved)
            optimizer.load_state_dict(saved_state)
        for index in range(3, 6):
            step(model, optimizer, index)
        assert_same_state(everything(model, optimizer), wanted)

    @EACH_KIND
    def test_a_run_goes_on_with_every_bit_after_a_parameter_was_unfrozen(self, kind):
        model = network()
        model[0].requires_grad_(False)
        _, optimizer = trainable(kind, model=model)
        step(model, optimizer)
        model[0].requires_grad_(True)
        step(model, optimizer, 1)
        saved = copy.deepcopy([full(model), model.state_dict(), optimizer.state_dict()])
        step(model, optimizer, 2)
        wanted = full(model)
        amp.deinitialize()
        model, optimizer = trainable(kind)
        model.load_state_dict(saved[1])
        optimizer.load_state_dict(saved[2])
        assert_same_state(full(model), saved[0])
        step(model, optimizer, 2)
        assert_same_state(full(model), wanted)

    @pytest.mark.slow
    @EACH_STORAGE
    def test_a_run_goes_on_from_a_distributed_checkpoint(self, kind, state):
        model, optimizer = with_state(kind, state)
        step(model, optimizer)
        saved = copy.deepcopy(get_state_dict(model, optimizer))
        step(model, optimizer, 1)
        wanted = everything(model, optimizer)
        amp.deinitialize()
        model, optimizer = with_state(kind, state, model=network(1))
        set_state_dict(model, optimizer, model_state_dict=saved[0], optim_state_dict=saved[1])
        step(model, optimizer, 1)
        assert_same_state(everything(model, optimizer), wanted)

    @EACH_STORAGE
    def test_checkpoints_go_to_plain_torch_and_back(self, kind, state):
        model, optimizer = with_state(kind, state)
        for index in range(2):
            step(model, optimizer, index)
        weights, saved, saved_state = full(model), copy.deepcopy(model.state_dict()), optimizer.state_dict()
        saved_state = copy.deepcopy(saved_state)
        amp.deinitialize()

        plain = network(1)
        other = ADAMW(plain.parameters())
        plain.load_state_dict(saved)
        other.load_state_dict(saved_state)
        assert_same_state(full(plain), weights)
        assert dtypes(state_of(other, plain[0].weight)) == {torch.float32}
        step(plain, other, 2)
        weights = full(plain)

        model, optimizer = with_state(kind, state, model=network(2))
        model.load_state_dict(plain.state_dict())
        optimizer.load_state_dict(other.state_dict())
        if kind != "stochastic":
            assert_same_state(full(model), weights)
        else:
            assert_same_state([*map(Tensor.float, model.parameters())], full(model))
            torch.testing.assert_close(full(model), weights, rtol=2**-8, atol=1e-30)
        step(model, optimizer, 3)
        assert optimizer.state[model[0].weight]["step"].item() == 4

    @pytest.mark.parametrize("kind", [True, "split"])
    @pytest.mark.parametrize("make", [ADAMW, Lion], ids=["AdamW", "Lion"])
    def test_deinitialize_and_initialize_again_goes_on_with_every_bit(self, make, kind):
        model, optimizer = trainable(kind, make)
        other, plain = network(), None
        for index in range(3):
            step(model, optimizer, index)
            amp.deinitialize()
            initialize(model, optimizer, kind)
        amp.deinitialize()
        plain = make(other.parameters())
        for index in range(3):
            step_in_float32(other, plain, index)
        assert_same_state(full(model), full(other))
        assert_same_state(optimizer.state_dict(), plain.state_dict())


def step_in_float32(model: nn.Module, optimizer: Any, index: int) -> None:
    assert dtypes(model.parameters()) == {torch.float32}
    step(model, optimizer, index)


class TestCopies:
    @EACH_STATE
    @EACH_KIND
    def test_a_deep_copy_of_model_and_optimizer_is_float32_and_steps(self, kind, state):
        model, optimizer = with_state(kind, state)
        step(model, optimizer)
        copied, other = copy.deepcopy((model, optimizer))
        assert_same_state([each.detach() for each in copied.parameters()], full(model))
        assert list(map(id, other.param_groups[0]["params"])) == list(map(id, copied.parameters()))
        assert dtypes(state_of(other, copied[0].weight)) == {torch.float32}
        before = everything(model, optimizer)
        step_in_float32(copied, other, 1)
        assert_same_state(everything(model, optimizer), before)
        step(model, optimizer, 1)
        if (kind, state) == ("split", "float32"):
            assert_same_state(full(model), full(copied))

    @EACH_STATE
    @EACH_KIND
    def test_an_optimizer_can_be_pickled(self, kind, state):
        model, optimizer = with_state(kind, state)
        step(model, optimizer)
        restored, other = pickle.loads(pickle.dumps((model, optimizer)))
        for parameter in other.param_groups[0]["params"]:  # as of an ordinary optimizer
            assert dtypes(state_of(other, parameter)) == {parameter.dtype}
        step(restored, other)
        assert len(other.param_groups[0]["params"]) == len(list(restored.parameters()))

    @pytest.mark.slow
    @EACH_KIND
    def test_an_averaged_model_averages_float32_values(self, kind):
        model, optimizer = trainable(kind)
        averaged = AveragedModel(model)
        total = [torch.zeros_like(each) for each in full(model)]
        for index in range(3):
            step(model, optimizer, index)
            averaged.update_parameters(model)
            total = [one + other for one, other in zip(total, full(model), strict=True)]
        assert dtypes(averaged.module.parameters()) == {torch.float32}
        for found, sums in zip(averaged.module.parameters(), total, strict=True):
            torch.testing.assert_close(found.detach(), sums / 3)

    @OR_KEPT
    def test_a_model_outlives_its_optimizer(self, kind):
        model, optimizer = trainable(kind)
        step(model, optimizer)
        before = full(model)
        del optimizer
        gc.collect()
        assert_same_state(full(model), before)
        amp.deinitialize()
        assert_same_state([each.detach() for each in model.parameters()], before)

    @OR_KEPT
    def test_an_optimizer_may_be_replaced(self, kind):
        model, optimizer = trainable(kind, ADAMW)
        step(model, optimizer)
        before = full(model)
        del optimizer
        other = SGD(model.parameters())
        initialize(model, other, kind)
        assert_same_state(full(model), before)
        given = give(model, 1)
        other.step()
        if kind != "stochastic":
            assert_same_bits(full(model)[0], before[0].sub(given[0].float(), alpha=0.1))


WRITES: dict[str, Callable[[Tensor], object]] = {
    "fill_": torch.no_grad()(lambda weight: weight.fill_(0.5)),
    "copy_": torch.no_grad()(lambda weight: weight.copy_(torch.full(weight.shape, 0.1))),
    "data.zero_": lambda weight: weight.data.zero_(),
    "data": lambda weight: setattr(weight, "data", torch.full_like(weight, -3.0)),
    "one": lambda weight: weight.data[0, 0].zero_(),
    "numpy": lambda weight: weight.detach().view(torch.int16).numpy().fill(0),
    "dlpack": lambda weight: torch.from_dlpack(weight.detach()).zero_(),
    "storage": lambda weight: weight.untyped_storage().fill_(0),
}


class TestWrites:
    @pytest.mark.parametrize("then", ["step", "save", "deinitialize", "copy", "convert", "method", "overflow"])
    @pytest.mark.parametrize("write", WRITES)
    @EACH_KIND
    def test_a_write_between_steps_counts(self, kind, write, then):
        model, optimizer = trainable(kind, functools.partial(torch.optim.SGD, lr=0.0), check_finite=True)
        step(model, optimizer)
        WRITES[write](model[0].weight)
        wanted = model[0].weight.detach().float()
        if then == "step":
            step(model, optimizer)
        elif then == "overflow":
            give(model, factor=math.inf)
            optimizer.step()
        elif then == "deinitialize":
            amp.deinitialize()
        elif then == "copy":
            model = copy.deepcopy(model)
        elif then == "convert":
            model.float()
        elif then == "method":
            optimizer.load_state_dict(optimizer.state_dict())
        found = full(model)[0]
        if write == "one":  # what the others have lost is less than half of their last digit
            torch.testing.assert_close(found, wanted, rtol=2**-8, atol=0)
        else:
            assert_same_bits(found, wanted)

    def test_a_write_of_the_same_values_keeps_the_remainder(self):
        model, optimizer = trainable()
        step(model, optimizer)
        before = full(model)
        kept = model[0].weight.detach().clone()
        model[0].weight.data.copy_(kept * 2)
        model[0].weight.data.copy_(kept)
        assert_same_state(full(model), before)
        given = step_with_gradients(model, optimizer, 1)
        assert_same_bits(full(model)[0], before[0].sub(given[0].float(), alpha=0.1))

    @pytest.mark.parametrize("how", ["counted", "by data", "by numpy"])
    @EACH_KIND
    def test_what_a_post_hook_writes_stays(self, kind, how):
        model, optimizer = trainable(kind)

        def clip(*_: object) -> None:
            if how == "counted":
                with torch.no_grad():
                    model[0].weight.clamp_(-0.01, 0.01)
            elif how == "by numpy":
                WRITES["numpy"](model[0].weight)
            else:
                model[0].weight.data.clamp_(-0.01, 0.01)

        optimizer.register_step_post_hook(clip)
        for index in range(5):
            step(model, optimizer, index)
            assert full(model)[0].abs().max() < 0.0101
            assert model[0].weight.abs().max() < 0.0101

    def test_repeated_writes_are_warned_of_once(self):
        model, optimizer = trainable()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for index in range(6):
                step(model, optimizer, index)
                WRITES["fill_"](model[0].weight)
        (warning,) = caught
        assert warning.category is AmpWarning
        assert "writes to weights between steps, such as 0.weight, again and again" in str(warning.message)

    @EACH_KIND
    def test_neither_two_writes_nor_loads_nor_steps_are_warned_of(self, kind):
        model, optimizer = trainable(kind)
        for index in range(6):
            step(model, optimizer, index)
            model.load_state_dict(network(index).state_dict())
            if index < 2:
                WRITES["fill_"](model[0].weight)

    @EACH_KIND
    def test_a_state_dict_that_is_saved_within_the_step_has_the_masters(self, kind):
        class Saves(torch.optim.SGD):
            saved: Any = None

            @torch.no_grad()
            def step(self, closure: Any = None) -> None:
                first = self.param_groups[0]["params"][0]
                first.zero_()
                self.saved = model.state_dict()["0.weight"].clone()
                first.fill_(math.pi)

        model, optimizer = trainable(kind, functools.partial(Saves, lr=0.1))
        step(model, optimizer)
        assert_same_bits(optimizer.saved, torch.zeros(6, 4))
        assert full(model)[0].flatten()[0].item() == pytest.approx(math.pi, rel=2**-24 if kind == "split" else 2**-7)

    @EACH_KIND
    def test_a_model_that_the_user_converts_is_refused_at_the_step_and_keeps_its_bits(self, kind):
        model, optimizer = trainable(kind)
        step(model, optimizer)
        before = full(model)
        model.float()
        assert_same_state(full(model), before)
        give(model)
        with pytest.raises(UsageError, match=r"became torch\.float32"):
            optimizer.step()
        amp.deinitialize()
        assert_same_state([each.detach() for each in model.parameters()], before)


class TestParameters:
    def test_an_unfrozen_parameter_is_stepped_as_with_masters_that_are_kept(self):
        found = []
        for kind in ("split", True):
            model = network()
            model[0].weight.requires_grad_(False)
            _, optimizer = trainable(kind, MOMENTUM, model)
            step(model, optimizer)
            frozen = model[0].weight.detach().clone()
            model[0].weight.requires_grad_(True)
            step(model, optimizer, 1)
            assert not torch.equal(model[0].weight, frozen)
            model[3].weight.requires_grad_(False)
            model[3].weight.grad = None
            step(model, optimizer, 2)
            found.append(full(model))
            amp.deinitialize()
        assert_same_state(*found)

    @EACH_KIND
    def test_an_added_group_is_stepped(self, kind):
        model = network()
        optimizer = MOMENTUM([model[0].weight, model[0].bias])
        initialize(model, optimizer, kind)
        step(model, optimizer)
        before = full(model)
        optimizer.add_param_group({"params": list(model[3].parameters()), "lr": 0.5})
        given = give(model, 1)
        optimizer.step()
        found = full(model)[4]
        if kind == "split":
            assert_same_bits(found, before[4].sub(given[4].float(), alpha=0.5))
        assert dtypes(state_of(optimizer, model[3].weight)) == {torch.float32}
        amp.deinitialize()
        assert_same_bits(model[3].weight.detach(), found)

    @EACH_STATE
    @EACH_KIND
    def test_weights_and_state_that_came_half_are_half_afterwards(self, kind, state):
        model = network()
        for parameter in (*model[0].parameters(), *model[3].parameters()):
            parameter.data = parameter.data.to(HALF)
        optimizer = MOMENTUM(model.parameters())
        step(model, optimizer)
        initialize(model, optimizer, kind, optimizer_state=state)
        expected = {HALF if state == "bfloat16" else torch.float32}
        for index in range(2):
            step(model, optimizer, index)
            assert dtypes(state_of(optimizer, model[0].weight)) == expected
        assert_is_between_steps(model)
        amp.deinitialize()
        assert_is_between_steps(model)
        assert dtypes(state_of(optimizer, model[0].weight)) == {HALF}
        step(model, optimizer)

    def test_float16_weights_are_refused(self):
        model = network()
        optimizer = SGD(model.parameters())
        initialize(model, optimizer)
        late = nn.Linear(2, 2).half()
        optimizer.add_param_group({"params": list(late.parameters())})
        give(late)
        with pytest.raises(
            UsageError, match=r"is torch\.float16; expected bfloat16 weights for master_weights='split'"
        ):
            step(model, optimizer)

    @EACH_STATE
    @EACH_KIND
    def test_scalars_and_empty_parameters_are_stepped(self, kind, state):
        model = nn.ParameterList([torch.tensor(1.5), torch.ones(0), torch.ones(2, 0), torch.ones(1)])
        _, optimizer = with_state(kind, state, MOMENTUM, model=model)
        for index in range(2):
            step(model, optimizer, index)
        assert [tuple(each.shape) for each in full(model)] == [(), (0,), (2, 0), (1,)]
        model.load_state_dict(model.state_dict())
        copy.deepcopy(model)
        assert model[0].item() != 1.5

    def test_other_layouts_in_memory_are_kept_and_loaded(self):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.Linear(3, 5, bias=False))
        model.to(memory_format=torch.channels_last)
        model[1].weight.data = torch.randn(3, 5).t()
        before, loaded = full(model), {name: torch.randn(each.shape) for name, each in model.state_dict().items()}
        _, optimizer = trainable(model=model)
        assert_same_state(full(model), before)
        given = give(model)
        optimizer.step()
        for found, values, grad in zip(full(model), before, given, strict=True):
            assert_same_bits(found, values.sub(grad.float(), alpha=0.1))
        model.load_state_dict(loaded)
        assert_same_state(model.state_dict(), loaded)
        assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
        given = step_with_gradients(model, optimizer, 1)
        for found, values, grad in zip(full(model), loaded.values(), given, strict=True):
            assert_same_bits(found, values.sub(grad.float(), alpha=0.1))

    @EACH_KIND
    def test_weights_that_came_half_as_a_view_are_stepped(self, kind):
        torch.manual_seed(0)
        whole = torch.randn(4, 6, dtype=HALF)
        model = nn.ParameterList([nn.Parameter(whole[:, :3])])
        before, beside = model[0].detach().clone(), whole[:, 3:].clone()
        _, optimizer = trainable(kind, functools.partial(torch.optim.SGD, lr=0.0), model)
        step(model, optimizer)
        assert_same_bits(model[0].detach(), before)
        assert_same_bits(whole[:, 3:], beside)

    def test_sparse_gradients_step_as_with_masters_that_are_kept(self):
        found = []
        for kind in ("split", True):
            torch.manual_seed(0)
            model = nn.Embedding(5, 3, sparse=True)
            _, optimizer = trainable(kind, lambda parameters: torch.optim.SparseAdam(list(parameters)), model)
            for _ in range(2):
                backward(model(torch.tensor([1, 1, 4])).sum(), optimizer)
                optimizer.step()
                optimizer.zero_grad()
            found.append(full(model))
            amp.deinitialize()
        assert_same_state(*found)

    @EACH_KIND
    def test_two_parameters_that_share_memory_are_refused_and_nothing_changed(self, kind):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].weight = nn.Parameter(model[0].weight.data)
        with pytest.raises(OptionError, match=r"'0\.weight' and '1\.weight' are two.*Type model\.1\.weight = model\.0"):
            trainable(kind, model=model)
        assert runtime.live is None
        assert dtypes(model.parameters()) == {torch.float32}
        model[1].weight = model[0].weight
        trainable(kind, model=model)

    @EACH_KIND
    def test_parameters_in_two_halves_of_one_memory_are_stepped(self, kind):
        whole = torch.ones(8)
        model = nn.ParameterList([nn.Parameter(each) for each in whole.chunk(2)])
        _, optimizer = trainable(kind, model=model)
        step(model, optimizer)
        assert not torch.equal(*model)

    @OR_KEPT
    def test_a_parameter_in_two_optimizers_is_refused_and_nothing_changed(self, kind):
        model = network()
        optimizers = [SGD(model.parameters()), SGD(model[0].parameters())]
        before, attributes = full(model), [set(vars(each)) for each in optimizers]
        with pytest.raises(UsageError, match=r"shape \(6, 4\) is in two optimizers.*one of them only"):
            initialize(model, optimizers, kind)
        assert_same_state([each.detach() for each in model.parameters()], before)
        assert [set(vars(each)) for each in optimizers] == attributes
        assert optimizers[0].param_groups[0]["params"] == list(model.parameters())
        assert not model._forward_hooks
        step(model, optimizers[0])

    def test_several_models_and_optimizers_step_as_with_masters_that_are_kept(self):
        found = []
        for kind in ("split", True):
            models = [network(seed) for seed in range(3)]
            optimizers = [MOMENTUM(models[0].parameters()), ADAMW([*models[1].parameters(), *models[2].parameters()])]
            initialize(models, optimizers, kind)
            for index in range(2):
                for model in models:
                    give(model, index)
                for optimizer in optimizers:
                    optimizer.step()
            found.append([full(model) for model in models])
            amp.deinitialize()
        assert_same_state(*found)

    def test_a_wrapper_of_an_optimizer_steps_the_masters(self):
        model, optimizer = trainable("split", lambda parameters: Larc(SGD(parameters)))
        before, given = full(model), give(model)
        wanted = [one.sub(0.5 * other.float(), alpha=0.1) for one, other in zip(before, given, strict=True)]
        assert optimizer.step() == "stepped"
        assert_same_state(full(model), wanted)

    @EACH_KIND
    def test_a_graph_from_before_a_step_is_refused(self, kind):
        model, optimizer = trainable(kind, model=nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        loss = loss_of(model)
        step(model, optimizer)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    @pytest.mark.parametrize("kind", [True, "split"])
    def test_weights_without_a_gradient_stay_good_for_a_backward_pass(self, kind):
        model, optimizer = trainable(kind, model=nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        inputs = torch.ones(2, 4, dtype=HALF)
        first, second = model[0](inputs).float().square().sum(), model[1](inputs).float().square().sum()
        backward(first, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        backward(second, optimizer)
        optimizer.step()


DYNAMIC: dict[str, Any] = {"loss_scale": "dynamic", "init_scale": 2.0**8}


class TestSkippedSteps:
    @pytest.mark.parametrize("ends", ["runs", "is skipped", "raises"])
    @pytest.mark.parametrize("kind", [True, *KINDS])
    def test_a_step_clears_the_gradients_of_half_weights_however_it_ends(self, kind, ends):
        model, optimizer = with_state(kind, "float32", MOMENTUM, check_finite=True)
        step(model, optimizer)
        if ends == "raises":
            optimizer.state[model[3].weight]["momentum_buffer"] = torch.ones(7)
        give(model, factor=math.inf if ends == "is skipped" else 1.0)
        with pytest.raises(RuntimeError) if ends == "raises" else contextlib.nullcontext():
            optimizer.step()
        assert amp.step_was_skipped(optimizer) is (ends == "is skipped")
        assert all(each.grad is None for each in model.parameters() if each.dtype is HALF)

    @EACH_STATE
    @EACH_KIND
    @pytest.mark.parametrize("make", [ADAMW, MOMENTUM, Lion], ids=["AdamW", "SGD", "Lion"])
    def test_an_overflow_leaves_every_bit(self, make, kind, state):
        model, optimizer = with_state(kind, state, make, **DYNAMIC)
        for factor in (OVERFLOW, 1.0, OVERFLOW, 1.0):
            before = everything(model, optimizer)
            optimizer.zero_grad()
            backward(loss_of(model) * factor, optimizer)
            optimizer.step()
            assert amp.step_was_skipped(optimizer) is (factor == OVERFLOW)
            assert_is_between_steps(model)
            same = torch.equal(full(model)[0], before[0]["0.weight"])
            assert same is (factor == OVERFLOW)
            if same:
                before[0] = {
                    name: each for name, each in before[0].items() if "running" not in name and "num" not in name
                }
                after = everything(model, optimizer)
                after[0] = {name: after[0][name] for name in before[0]}
                assert_same_state(after, before)

    @EACH_STATE
    @EACH_KIND
    def test_a_step_that_skips_in_its_kernel_leaves_every_bit(self, kind, state, far_away):
        model, optimizer = with_state(kind, state, functools.partial(ADAMW, fused=True), **DYNAMIC)
        for factor in (1.0, OVERFLOW, 1.0):
            before = everything(model, optimizer)[1:]
            optimizer.zero_grad()
            backward(loss_of(model) * factor, optimizer)
            optimizer.step()
            after = everything(model, optimizer)[1:]
            if factor == OVERFLOW:
                assert_same_state(after, before)
            else:
                assert not torch.equal(after[0][0], before[0][0])
        assert amp.skipped_steps(optimizer) == 1

    @EACH_STATE
    @EACH_KIND
    @pytest.mark.parametrize("overflow_at", [0, 2])
    def test_an_overflow_in_a_closure_restores_everything(self, overflow_at, kind, state):
        make = functools.partial(torch.optim.LBFGS, max_iter=4)
        model, optimizer = with_state(kind, state, make, **DYNAMIC)

        def stepped(overflow_at: int | None) -> None:
            evaluations = itertools.count()

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = loss_of(model)
                backward(loss * (OVERFLOW if next(evaluations) == overflow_at else 1.0), optimizer)
                return loss

            optimizer.step(closure)

        model.eval()
        stepped(None)
        before = everything(model, optimizer)
        stepped(overflow_at)
        assert amp.step_was_skipped(optimizer)
        assert_same_state(everything(model, optimizer), before)
        stepped(None)
        assert not amp.step_was_skipped(optimizer)

    @pytest.mark.parametrize("how", ["by amp", "by amp, delayed", "by torch"])
    def test_clipped_gradients_are_stepped_with(self, how):
        model, optimizer = trainable("split", **DYNAMIC)
        before = full(model)
        backward(loss_of(model), optimizer, delay_unscale=how == "by amp, delayed")
        if how == "by torch":
            norm = nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1e-3)
        else:
            norm = amp.clip_grad_norm_(optimizer, 1e-3)
        optimizer.step()
        moved = [one - other for one, other in zip(before, full(model), strict=True)]
        assert norm.item() > 1e-2
        assert nn.utils.get_total_norm(moved).item() == pytest.approx(1e-4, rel=1e-2)

    def test_gradients_of_micro_batches_add_up(self):
        model, optimizer = trainable(**DYNAMIC)
        model.eval()
        for index in range(3):
            backward(loss_of(model, index), optimizer)
        found = [parameter.grad.float() for parameter in model.parameters()]
        model.zero_grad()
        sum(loss_of(model, index) for index in range(3)).backward()
        for one, other in zip(found, model.parameters(), strict=True):
            torch.testing.assert_close(one, other.grad.float(), rtol=0.05, atol=0.01)
        optimizer.step()
        assert not amp.step_was_skipped(optimizer)


class TestErrors:
    @pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
    @EACH_STATE
    @EACH_KIND
    def test_an_error_in_the_step_leaves_half_weights_and_the_masters_bits(self, kind, state, error):
        class Fails(torch.optim.Adam):
            fails = False

            def step(self, closure: Any = None) -> Any:
                if self.fails:
                    raise error
                return super().step(closure)

        model, optimizer = with_state(kind, state, Fails)
        step(model, optimizer)
        before = everything(model, optimizer)
        give(model)
        optimizer.fails = True
        with pytest.raises(error):
            optimizer.step()
        assert_is_between_steps(model)
        assert_same_state(everything(model, optimizer), before)
        optimizer.fails = False
        step(model, optimizer)
        values = full(model)
        amp.deinitialize()
        assert_same_state([each.detach() for each in model.parameters()], values)

    @EACH_KIND
    def test_deinitialize_after_an_error_within_the_step_gives_whole_weights(self, kind):
        class Fails(torch.optim.SGD):
            def step(self, closure: Any = None) -> None:
                with torch.no_grad():
                    self.param_groups[0]["params"][0].fill_(0.1)
                raise ZeroDivisionError

        model, optimizer = trainable(kind, functools.partial(Fails, lr=0.1))
        before = full(model)
        give(model)
        with pytest.raises(ZeroDivisionError):
            optimizer.step()
        amp.deinitialize()
        if kind == "split":
            assert_same_bits(model[0].weight.detach(), torch.full((6, 4), 0.1))
        else:
            torch.testing.assert_close(model[0].weight.detach(), torch.full((6, 4), 0.1), rtol=2**-7, atol=0)
        assert_same_state([each.detach() for each in model.parameters()][1:], before[1:])

    @OR_KEPT
    def test_a_block_within_the_step_is_refused(self, kind):
        class Wrong(torch.optim.SGD):
            def step(self, closure: Any = None) -> None:
                with amp.scale_loss(torch.ones(()), self):
                    pass

        model, optimizer = trainable(kind, functools.partial(Wrong, lr=0.1))
        give(model)
        with pytest.raises(UsageError, match=r"stands in the step of its Wrong.*optimizer\.step\(closure\)"):
            optimizer.step()
        assert_is_between_steps(model)


class TestDeinitialize:
    @EACH_STATE
    @EACH_KIND
    def test_everything_is_float32_with_the_masters_bits(self, kind, state):
        model = network()
        optimizer = ADAMW(model.parameters())
        attributes, options = set(vars(optimizer)), set(optimizer.param_groups[0])
        initialize(model, optimizer, kind, optimizer_state=state)
        for index in range(2):
            step(model, optimizer, index)
        values, given = full(model), give(model, 2)
        amp.deinitialize()
        assert_same_state([each.detach() for each in model.parameters()], values)
        assert_same_state([each.grad for each in model.parameters()], [each.float() for each in given])
        assert dtypes(each for parameter in model.parameters() for each in state_of(optimizer, parameter)) == {
            torch.float32
        }
        kept = {stochastic_rounding.STEP}  # for a checkpoint that is saved now
        assert (set(vars(optimizer)), set(optimizer.param_groups[0]) - kept) == (attributes, options)
        optimizer.step()

    @EACH_KIND
    def test_gradients_from_before_initialize_are_stepped_with(self, kind):
        model = network()
        optimizer = SGD(model.parameters())
        given, before = [each.clone() for each in give(model)], full(model)
        initialize(model, optimizer, kind)
        optimizer.step()
        wanted = [one.sub(other, alpha=0.1) for one, other in zip(before, given, strict=True)]
        torch.testing.assert_close(full(model), wanted, rtol=2**-7, atol=2**-7)


def _options(**options: Any) -> Callable[[], None]:
    def check() -> None:
        model = network()
        initialize(model, SGD(model.parameters()), **options)

    return check


class TestOptions:
    @pytest.mark.once
    def test_every_contradiction_is_refused(self, subtests):
        leaves = (
            "contradicts opt_level='{}', which leaves the model's weights as they are.*opt_level='O5', which converts"
        )
        rows: list[tuple[str, dict[str, Any], str]] = [
            ("unknown", {"kind": "splt"}, r"is 'splt'; expected True, False, None, 'split' or 'stochastic'\..*'split'"),
            ("number", {"kind": 7}, "is 7; expected True, False, None, 'split' or 'stochastic'"),
            (
                "O2",
                {"kind": "split", "opt_level": "O2", "half_dtype": "float16"},
                r"'split' contradicts opt_level='O2' with float16 weights; expected bfloat16 .*Type opt_level='O5'",
            ),
            ("O1", {"kind": "split", "opt_level": "O1"}, leaves.format("O1")),
            ("O4", {"kind": "stochastic", "opt_level": "O4"}, leaves.format("O4")),
            ("O0", {"kind": "split", "opt_level": "O0"}, r"contradicts opt_level='O0'.*Type opt_level='O5'"),
            (
                "float16 state",
                {"kind": "split", "optimizer_state": "float16"},
                r"optimizer_state is 'float16'; expected torch\.float32 or torch\.bfloat16",
            ),
            ("no type", {"kind": "split", "optimizer_state": 3}, "optimizer_state is 3; expected"),
            (
                "kept masters",
                {"kind": True, "optimizer_state": "bfloat16"},
                r"='bfloat16' needs masters that exist only.*found True\. .*master_weights='stochastic' \(or 'split'\)",
            ),
            (
                "no masters",
                {"kind": None, "opt_level": "O1", "optimizer_state": torch.bfloat16},
                r"=torch\.bfloat16 needs masters that exist only.*found None",
            ),
        ]

        def check(options: dict[str, Any], message: str) -> None:
            with pytest.raises(OptionError, match=message):
                _options(**options)()
            assert runtime.live is None

        check_rows(subtests, rows, check)

    @pytest.mark.parametrize("dtype", ["float32", "float16"])
    def test_weights_of_another_type_are_refused(self, dtype):
        with pytest.raises(OptionError, match="expected bfloat16 weights"):
            _options(kind="split", cast_model_type=dtype)()

    def test_bfloat16_weights_at_a_level_of_float16_are_accepted(self):
        options = {"half_dtype": "float16", "cast_model_type": "bfloat16", "loss_scale": 1}
        model, optimizer = trainable("split", opt_level="O2", **options)
        before, given = full(model), step_with_gradients(model, optimizer)
        assert_same_bits(full(model)[0], before[0].sub(given[0].float(), alpha=0.1))

    def test_weights_that_came_bfloat16_and_are_not_converted_are_stepped(self):
        model = nn.ParameterList([torch.ones(4, dtype=HALF)])
        make = functools.partial(torch.optim.SGD, lr=0.25)
        _, optimizer = trainable("stochastic", make, model, cast_model_type=False)
        model[0].grad = -torch.ones_like(model[0])
        optimizer.step()
        assert model[0].tolist() == [1.25] * 4
        first = optimizer.param_groups[0][stochastic_rounding.STEP]
        optimizer.zero_grad()
        optimizer.step()
        assert optimizer.param_groups[0][stochastic_rounding.STEP] == first + 1

    def test_remainders_that_no_state_dict_would_save_are_refused(self):
        with pytest.raises(OptionError, match="with weights as they are; expected bfloat16 weights, made by amp"):
            _options(kind="split", cast_model_type=False)()

    @pytest.mark.parametrize(
        "options",
        [
            {"opt_level": "O2", "half_dtype": "bfloat16"},
            {"opt_level": "O3", "half_dtype": "bfloat16"},
            {"opt_level": "O5", "optimizer_state": torch.bfloat16},
        ],
        ids=str,
    )
    @EACH_KIND
    def test_settings_tell_the_kind_and_the_type_of_the_state(self, kind, options):
        model, optimizer = trainable(kind, MOMENTUM, **options)
        found = amp.settings()
        assert found["master_weights"] == kind
        assert found["optimizer_state"] == ("bfloat16" if "optimizer_state" in options else "float32")
        step(model, optimizer)
        assert dtypes(state_of(optimizer, model[0].weight)) == {HALF if "optimizer_state" in options else torch.float32}

    def test_settings_are_taken_back_as_options(self):
        trainable("stochastic", optimizer_state="bfloat16")
        found = {name: amp.settings()[name] for name in ("opt_level", "master_weights", "optimizer_state")}
        amp.deinitialize()
        model = network()
        amp.initialize(model, SGD(model.parameters()), **found, verbosity=0)
        assert {name: amp.settings()[name] for name in found} == found


class TestTraining:
    """A small regression, in which updates soon are smaller than half of a weight's last digit in bfloat16."""

    def loss_after_training(self, make: Callable[..., Any], **options: Any) -> float:
        torch.manual_seed(0)
        inputs = torch.randn(512, 8)
        targets = torch.sin(inputs @ torch.randn(8, 4)) + 0.1 * torch.randn(512, 4)
        model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))
        _, optimizer = trainable(options.pop("kind", None), make, model, **options)
        for index in range(500):
            chosen = torch.arange(128 * index, 128 * (index + 1)) % 512
            optimizer.zero_grad()
            backward(F.mse_loss(model(inputs[chosen]).float(), targets[chosen]), optimizer)
            optimizer.step()
        amp.deinitialize()
        with torch.no_grad():
            return F.mse_loss(model.float()(inputs), targets).item()

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "make",
        [
            functools.partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1),
            functools.partial(torch.optim.SGD, lr=2e-2, momentum=0.9, weight_decay=5e-3),
            functools.partial(Lion, lr=2e-4, weight_decay=0.5),
            functools.partial(Factored, lr=1e-4, weight_decay=1.0),
        ],
        ids=["AdamW", "SGD", "Lion", "Factored"],
    )
    def test_a_model_trains_to_the_end_where_bfloat16_weights_stall(self, make):
        """The weight decay is 1e-4 a step."""
        wanted = self.loss_after_training(make)
        assert self.loss_after_training(make, opt_level="O3", half_dtype="bfloat16") > 1.015 * wanted
        for kind, state in itertools.product(KINDS, ("float32", "bfloat16")):
            found = self.loss_after_training(make, kind=kind, optimizer_state=state)
            assert found < 1.01 * wanted, (kind, state)


class TestInterrupts:
    @OR_KEPT
    @pytest.mark.parametrize("at", range(6))
    @pytest.mark.covering(2)  # of each kind, on the way in and on the way back
    def test_an_exchange_that_is_interrupted_leaves_the_model_half(self, kind, at, monkeypatch):
        model, optimizer = trainable(kind)
        step(model, optimizer)
        count, swap = itertools.count(), exchange.swap_tensor_impl

        def interrupted(*pair: Tensor) -> None:
            if next(count) == at:
                raise KeyboardInterrupt
            swap(*pair)

        monkeypatch.setattr(exchange, "swap_tensor_impl", interrupted)
        with pytest.raises(KeyboardInterrupt):
            step(model, optimizer)
        monkeypatch.undo()
        assert_is_between_steps(model)
        step(model, optimizer)
        assert_is_between_steps(model)
        assert all(bool(each.isfinite().all()) for each in full(model))

    @pytest.mark.parametrize(
        ("kind", "owner", "method"),
        [
            *((kind, TemporaryMasters, method) for kind in KINDS for method in ("swap_out", "_exchange_back")),
            *((True, MasterWeights, method) for method in ("swap_out", "_exchange")),
        ],
    )
    def test_an_interrupt_as_the_exchange_back_begins_leaves_the_model_half(self, kind, owner, method, monkeypatch):
        model, optimizer = trainable(kind)
        original, interrupts = getattr(owner, method), [KeyboardInterrupt]

        def interrupted(masters: Any, **options: Any) -> Any:
            if masters.are_in_place and model[0].weight.dtype is torch.float32 and interrupts:
                raise interrupts.pop()
            return original(masters, **options)

        monkeypatch.setattr(owner, method, interrupted)
        with pytest.raises(KeyboardInterrupt):
            step(model, optimizer)
        assert not interrupts
        assert_is_between_steps(model)


class TestLayouts:
    @pytest.mark.parametrize("fills", [False, True], ids=["random", "alike"])
    def test_remainders_follow_another_memory_format(self, fills):
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3))
        if fills:
            for parameter in model.parameters():
                nn.init.constant_(parameter, 0.1)
        _, optimizer = trainable("split", MOMENTUM, model)
        if fills:
            initialized = full(model)
            model.to(memory_format=torch.channels_last)
            assert_same_state(full(model), initialized)
        step(model, optimizer)
        before = full(model)
        model.to(memory_format=torch.channels_last)
        assert model[1].weight.is_contiguous(memory_format=torch.channels_last)
        assert_same_state(full(model), before)
        step(model, optimizer, 1)
        assert dtypes(model.parameters()) == {HALF}

    def test_a_write_and_a_state_dict_in_inference_mode_leave_a_model_that_steps(self):
        model, optimizer = trainable("split")
        step(model, optimizer)
        with torch.no_grad():
            model[0].weight.fill_(0.5)
        with torch.inference_mode():
            model.state_dict()
        step(model, optimizer)
        assert_is_between_steps(model)

    def test_a_state_that_holds_a_tensor_twice_holds_it_twice_after_a_step(self):
        class Twice(torch.optim.SGD):
            @torch.no_grad()
            def step(self, closure: Any = None) -> None:
                for parameter in self.param_groups[0]["params"]:
                    state = self.state[parameter]
                    state.setdefault("a", torch.zeros_like(parameter))
                    state.setdefault("b", state["a"])
                    state["a"].add_(parameter.grad, alpha=1e-3)

        model, optimizer = trainable("split", functools.partial(Twice, lr=0.1), optimizer_state="bfloat16")
        for index in range(3):
            step(model, optimizer, index)
        state = optimizer.state[model[0].weight]
        assert state["a"] is state["b"]

    @EACH_KIND
    def test_a_step_without_gradients_and_loading_state_leave_graphs_that_use_the_weights(self, kind):
        model, optimizer = trainable(kind, ADAMW)
        step(model, optimizer)
        loss = loss_of(model)
        optimizer.zero_grad()
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        loss.backward()


class TestNumbers:
    def test_a_new_optimizer_of_the_same_weights_has_numbers_of_its_own(self):
        weight = nn.Parameter(torch.ones(4096))
        for _ in range(60):
            optimizer = torch.optim.SGD([weight], lr=1e-4)
            model = nn.ParameterList([weight])
            initialize(model, optimizer, "stochastic")
            model[0].grad = torch.ones_like(model[0])
            optimizer.step()
            amp.deinitialize()
        moved = (weight != 1).float().mean()
        assert moved > 0.4  # 1 - (1 - 1e-4 * 2 ** 8) ** 60 = 0.79, and 0.026 with the same numbers each time
        torch.testing.assert_close(weight.mean(), torch.tensor(1 - 60e-4), rtol=0, atol=3e-4)

    def test_a_number_of_steps_counts_beyond_256(self):
        class Counted(torch.optim.SGD):
            @torch.no_grad()
            def step(self, closure: Any = None) -> None:
                for parameter in self.param_groups[0]["params"]:
                    state = self.state[parameter]
                    for name in ("step", "t"):
                        state.setdefault(name, torch.full((1,), 256.0)).add_(1)
                    parameter.sub_(parameter.grad, alpha=1e-3)

        model, optimizer = trainable("split", functools.partial(Counted, lr=0.1), optimizer_state="bfloat16")
        step(model, optimizer)
        step(model, optimizer)
        state = optimizer.state[model[0].weight]
        assert (state["step"].item(), state["t"].item()) == (258, 258)

    @EACH_KIND
    def test_amp_may_be_turned_off_in_a_hook_of_the_step(self, kind):
        model, optimizer = trainable(kind)
        optimizer.register_step_post_hook(lambda *_: amp.deinitialize())
        step(model, optimizer)
        assert dtypes(model.parameters()) == {torch.float32}

    @EACH_KIND
    def test_a_copy_for_inference_is_half(self, kind):
        model, optimizer = trainable(kind)
        step(model, optimizer)
        copied = amp.convert_model(model, "bfloat16")
        assert copied[0].weight.dtype is HALF
