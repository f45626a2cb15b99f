"""Training loops of any order of calls: they have the bits of the same loop in float32 without amp, or raise.

Hypothesis draws the loops, and shortens one that fails. All numbers are small integers and scales are powers of two, so
nothing is rounded, and a difference is a fault.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from torch import Tensor, nn

from ampatch import amp
from ampatch.errors import UsageError

PARTS = ("encoder", "generator", "critic")
#: The parts that each optimizer updates.
OWNED: dict[str, dict[str, tuple[str, ...]]] = {
    "an optimizer for two parts": {"generator": ("generator", "encoder"), "critic": ("critic",)},
    "an optimizer for each part": {part: (part,) for part in PARTS},
}
#: What clears gradients. The last ones write zeros.
CLEAR: dict[str, Callable[[Side, str], object]] = {
    "optimizer": lambda side, name: side.optimizers[name].zero_grad(),
    "model": lambda side, name: [side.model[part].zero_grad() for part in side.owned[name]],
    "None": lambda side, name: [setattr(each, "grad", None) for each in side.parameters(name)],
    "optimizer, zeros": lambda side, name: side.optimizers[name].zero_grad(set_to_none=False),
    "model, zeros": lambda side, name: [side.model[part].zero_grad(set_to_none=False) for part in side.owned[name]],
    "zero_": lambda side, name: [gradient.zero_() for gradient in side.gradients(name)],
}
BY_NONE = ("optimizer", "model", "None")

parts = st.lists(st.sampled_from(PARTS), min_size=1, unique=True)
factors = st.sampled_from((1.0, 2.0, -1.0))


class Part(nn.Module):
    def __init__(self, first: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(first, first + 3.0))
        self.bias = nn.Parameter(torch.tensor([float(first)]))

    def forward(self, input: Tensor) -> Tensor:
        return (self.weight * input.to(self.weight.dtype)).sum() + self.bias.sum() * 2


class Side:
    """A loop with amp, or the same without: a model in three parts, and its optimizers by name."""

    def __init__(self, owned: dict[str, tuple[str, ...]], options: dict[str, Any] | None) -> None:
        self.owned, self.options = owned, options
        self.model = nn.ModuleDict({part: Part(first) for first, part in enumerate(PARTS, 1)})
        own = {
            name: [each for part in names for each in self.model[part].parameters()] for name, names in owned.items()
        }
        self.optimizers = {name: torch.optim.SGD(each, lr=1.0, momentum=0.5) for name, each in own.items()}
        self.begin()

    def begin(self) -> None:
        if self.options is not None:
            amp.initialize(list(self.model.values()), list(self.optimizers.values()), verbosity=0, **self.options)

    def parameters(self, name: str) -> list[Tensor]:
        return [each for group in self.optimizers[name].param_groups for each in group["params"]]

    def gradients(self, name: str) -> Iterator[Tensor]:
        return (each.grad for each in self.parameters(name) if each.grad is not None)

    def loss(self, reached: Iterable[str], factor: float) -> Tensor:
        results = (self.model[part](torch.tensor([1.0, 2.0, -1.0]) * factor) for part in reached)
        return sum(results, torch.tensor(0.0)).float()

    def block(
        self, handed: Iterable[str], loss: Tensor, inside: Callable[[], object] | None = None, **delays: bool
    ) -> None:
        if self.options is None:
            loss.backward()
            if inside is not None:
                inside()
            return
        with amp.scale_loss(loss, [self.optimizers[name] for name in handed], **delays) as scaled_loss:
            scaled_loss.backward()
            if inside is not None:
                inside()

    def weights(self) -> list[Tensor]:
        return [each.float() for each in self.model.state_dict().values()]


def call(**drawn: st.SearchStrategy[Any]) -> Callable[[Callable[..., None]], Any]:
    """Declares a call of the loop, which ends with the first call that amp refuses."""

    def declare(do: Callable[..., None]) -> Any:
        @functools.wraps(do)
        def unless_ended(loop: Loop, **kwargs: Any) -> None:
            try:
                if not loop.has_ended:
                    do(loop, **kwargs)
            except UsageError:
                loop.has_ended = True

        return rule(**drawn)(unless_ended)

    return declare


class Loop(RuleBasedStateMachine):
    """A loop on both sides at once; all its calls but the first are drawn."""

    options: dict[str, Any]
    has_ended = False

    @initialize(owned=st.sampled_from(sorted(OWNED)))
    def begin(self, owned: str) -> None:
        self.owned = OWNED[owned]
        self.plain, self.mixed = self.sides = Side(self.owned, None), Side(self.owned, self.options)
        self.overflowed: set[str] = set()  # the optimizers whose gradients have

    def name(self, number: int) -> str:
        return list(self.owned)[number % len(self.owned)]

    def on_both(self, do: Callable[[Side], object]) -> None:
        for side in self.sides:
            do(side)

    def compare_weights(self) -> None:
        for plain, mixed in zip(self.plain.weights(), self.mixed.weights(), strict=True):
            assert torch.equal(plain, mixed)

    @call(handed=st.sets(st.integers(0, 2), min_size=1), reached=parts, factor=factors, is_delayed=st.booleans())
    def block(self, handed: set[int], reached: list[str], factor: float, is_delayed: bool) -> None:
        names = sorted({self.name(number) for number in handed})
        if is_delayed:
            self.on_both(lambda side: side.block(names, side.loss(reached, factor), delay_unscale=True))
        self.on_both(lambda side: side.block(names, side.loss(reached, factor)))

    @call(handed=st.sets(st.integers(0, 2), min_size=1))
    def overflow(self, handed: set[int]) -> None:
        if self.options["loss_scale"] != "dynamic":
            return
        names = sorted({self.name(number) for number in handed})
        self.mixed.block(names, self.mixed.loss([part for name in names for part in self.owned[name]], 1.0) * math.inf)
        self.overflowed |= set(names)

    @call(first=st.integers(0, 2), second=st.integers(1, 2), reached=parts, inner=parts, is_inner_last=st.booleans())
    def nested(self, first: int, second: int, reached: list[str], inner: list[str], is_inner_last: bool) -> None:
        outside, inside = self.name(first), self.name(first + second)
        if self.overflowed or outside == inside:
            return
        if is_inner_last:
            self.on_both(
                lambda side: side.block(
                    [outside], side.loss(reached, 1.0), lambda: side.block([inside], side.loss(inner, -2.0))
                )
            )
            return
        self.plain.loss(reached, 1.0).backward()
        self.plain.loss(inner, -2.0).backward()
        outer = amp.scale_loss(self.mixed.loss(reached, 1.0), self.mixed.optimizers[outside])
        with outer as scaled_loss:
            self.mixed.block([inside], self.mixed.loss(inner, -2.0))
            scaled_loss.backward()

    @call(part=st.sampled_from(PARTS))
    def backward_outside_of_blocks(self, part: str) -> None:
        self.on_both(lambda side: side.loss([part], 1.0).backward())

    @call(number=st.integers(0, 2), how=st.sampled_from(sorted(CLEAR)))
    def clear(self, number: int, how: str) -> None:
        name = self.name(number)
        how = BY_NONE[number] if name in self.overflowed else how  # zeros that amp wrote do not count as cleared
        self.on_both(lambda side: CLEAR[how](side, name))
        self.overflowed.discard(name)

    @call(number=st.integers(0, 2), how=st.sampled_from(BY_NONE))
    def step(self, number: int, how: str) -> None:
        name = self.name(number)
        if name not in self.overflowed:
            self.plain.optimizers[name].step()
        self.mixed.optimizers[name].step()
        assert amp.step_was_skipped(self.mixed.optimizers[name]) is (name in self.overflowed)
        self.overflowed.discard(name)
        self.on_both(lambda side: CLEAR[how](side, name))
        self.compare_weights()

    @call(number=st.integers(0, 2), reached=parts, overflows=st.booleans())
    def step_with_closure(self, number: int, reached: list[str], overflows: bool) -> None:
        name = self.name(number)
        if self.overflowed:
            return
        overflows = overflows and self.options["loss_scale"] == "dynamic"

        def closure(side: Side) -> float:
            side.optimizers[name].zero_grad()
            loss = side.loss(self.owned[name] if overflows else reached, 1.0)
            side.block([name], loss * math.inf if overflows else loss)
            return 0.0

        for side in [self.mixed] if overflows else self.sides:
            side.optimizers[name].step(functools.partial(closure, side))
        self.on_both(lambda side: side.optimizers[name].zero_grad())
        self.compare_weights()

    @call(number=st.integers(0, 2))
    def error_in_a_block(self, number: int) -> None:
        name = self.name(number)
        with pytest.raises(KeyError):
            self.mixed.block([name], self.mixed.loss(self.owned[name], 1.0), lambda: {}["key"])
        self.on_both(lambda side: CLEAR["None"](side, name))
        self.overflowed.discard(name)

    @call(number=st.integers(0, 2))
    def load_into_an_optimizer(self, number: int) -> None:
        name = self.name(number)
        self.on_both(
            lambda side: side.optimizers[name].load_state_dict(copy.deepcopy(side.optimizers[name].state_dict()))
        )

    @call()
    def load_into_the_model(self) -> None:
        self.on_both(lambda side: side.model.load_state_dict(copy.deepcopy(side.model.state_dict())))

    @call(number=st.integers(0, 2))
    def unscale(self, number: int) -> None:
        amp.unscale_(self.mixed.optimizers[self.name(number)])

    @call(number=st.integers(0, 2))
    def norm(self, number: int) -> None:
        name = self.name(number)
        norm = amp.clip_grad_norm_(self.mixed.optimizers[name], math.inf)
        if name not in self.overflowed:
            expected = math.sqrt(sum(float(each.double().square().sum()) for each in self.plain.gradients(name)))
            assert float(norm) == pytest.approx(expected)

    @call(number=st.integers(0, 2))
    def change_of_gradients(self, number: int) -> None:
        name = self.name(number)
        if name not in self.overflowed and amp.grads_are_unscaled(self.mixed.optimizers[name]):
            self.on_both(lambda side: [gradient.mul_(-2.0) for gradient in side.gradients(name)])

    @call(number=st.integers(0, 2))
    def freezing(self, number: int) -> None:
        def freeze(side: Side) -> None:
            parameter = side.parameters(self.name(number))[0]
            parameter.requires_grad_(not parameter.requires_grad).grad = None

        self.on_both(freeze)

    @call()
    def new_session(self) -> None:
        for name, optimizer in self.mixed.optimizers.items():
            if name in self.overflowed or not amp.grads_are_unscaled(optimizer):  # amp would drop them, and warn
                self.on_both(functools.partial(CLEAR["None"], name=name))
        self.overflowed.clear()
        amp.deinitialize()
        for plain, mixed in zip(self.plain.model.parameters(), self.mixed.model.parameters(), strict=True):
            assert torch.equal(plain, mixed)
        self.mixed.begin()

    def teardown(self) -> None:
        amp.deinitialize()


DYNAMIC = {"loss_scale": "dynamic", "init_scale": 1024.0}


@pytest.mark.filterwarnings("ignore::ampatch.errors.AmpWarning")
@pytest.mark.parametrize(
    "options",
    [
        {"opt_level": "O1", "half_dtype": "float16", **DYNAMIC},
        {"opt_level": "O2", "half_dtype": "float16", **DYNAMIC},
        {"opt_level": "O2", "half_dtype": "float16", "loss_scale": 8.0},
        {"opt_level": "O5", "master_weights": "split", **DYNAMIC},
    ],
    ids=["O1", "O2", "O2, static scale", "O5, split masters"],
)
def test_a_loop_has_the_bits_of_float32_or_raises(options) -> None:
    class Chosen(Loop):
        pass

    Chosen.options = options
    run_state_machine_as_test(Chosen, settings=hypothesis.settings(stateful_step_count=20))
