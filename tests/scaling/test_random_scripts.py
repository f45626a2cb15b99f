"""Random scripts of training at every level leave what plain torch leaves, bit for bit.

A script is a list of events: blocks, delayed ones, overflows, gradients and weights cleared and edited by every means,
steps, checkpoints, groups made anew. Each runs in plain float32 torch and with amp. All numbers are small integers,
which every type holds; what would grow is cut off on both sides.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from edits import CLEARINGS, GRADIENT_EDITS, REBUILDS, UNSEEN, WEIGHT_EDITS, Run
from helpers import HALF_DTYPES, dtype_name

from ampatch import amp

LEVELS = [(level, dtype) for level in ("O1", "O2") for dtype in HALF_DTYPES] + [("O0", torch.float16)]
EVENTS = 25
LARGE = 60.0  # what grows above this is cut off

OF_GRADIENTS = "data.clamp_", "data.neg_", "data.copy_ of a permutation", "rows", "another", "none", "numpy", "dlpack"
OF_WEIGHTS = "data.sub_", "data.clamp_", "data.copy_ of a permutation", "data =", "in place", "init", "data[...] ="
CLEARING = ["optimizer", "model", "none"]
ZEROING = ["optimizer-zeros", "model-zeros", "data.zero_"]


class World(Run):
    """A run with what a script has to remember.

    Attributes:
        has_edited_masters: whether gradients of masters were edited since the last block.
        has_edited_weights: whether masters were written to since the last forward or step.
        doomed: passes since one that overflowed and was not cleared; None: there was none.
    """

    doomed: int | None = None
    has_edited_masters = False
    has_edited_weights = False
    saved: Any = None

    @property
    def is_plain(self) -> bool:
        return self.block is not amp.scale_loss

    def pass_(self, factor: float, overflows: bool = False, delayed: bool = False) -> None:
        """One block, or two of which the first is delayed."""
        self.has_edited_masters = self.has_edited_weights = False
        if self.doomed is not None or overflows:
            self.doomed = 0 if self.doomed is None else self.doomed + 1
        for is_first in (True, False) if delayed else (False,):
            if self.is_plain and overflows:
                continue
            self.backward(math.inf if overflows else factor, delay_unscale=is_first)

    def edit_gradients(self, name: str, of_masters: bool) -> None:
        # Once those of masters were edited the half ones show what they were before; to edit these too is warned of.
        if self.doomed is not None or (self.has_edited_masters and not of_masters):
            return
        self.has_edited_masters = of_masters
        parameters = self.masters if of_masters else self.parameters
        if all(parameter.grad is not None for parameter in parameters):
            GRADIENT_EDITS[name](parameters)

    def edit_weights(self, name: str, of_masters: bool) -> None:
        # To write to masters and then to the model is an error.
        of_masters = (of_masters or self.has_edited_weights) and name not in UNSEEN
        if name in UNSEEN and self.has_edited_weights:
            return
        self.has_edited_weights = of_masters
        parameters = self.masters if of_masters else self.parameters
        {**WEIGHT_EDITS, **UNSEEN}[name](parameters)

    def clear(self, name: str) -> None:
        if name in ZEROING and self.doomed is not None and self.doomed > 0:
            name = "optimizer"  # zeros that amp itself has put there cannot be told from others
        if name == "data.zero_" and self.has_edited_masters:  # what half parameters show may be zeros already
            name = "optimizer"
        CLEARINGS[name](self)
        self.doomed, self.has_edited_masters = None, False

    def step(self) -> None:
        if not (self.is_plain and self.doomed is not None):
            self.optimizer.step()
        if not self.is_plain:
            assert amp.step_was_skipped(self.optimizer) is (self.doomed is not None)
        self.optimizer.zero_grad()
        self.doomed, self.has_edited_masters, self.has_edited_weights = None, False, False

    def save(self) -> None:
        self.saved = copy.deepcopy(self.model.state_dict())

    def load(self) -> None:
        if self.saved is not None:
            self.has_edited_weights = False
            self.model.load_state_dict(self.saved)

    def rebuild(self, name: str) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None
        self.doomed, self.has_edited_masters = None, False
        REBUILDS[name](self)
        for group in self.optimizer.param_groups:
            group["lr"] = 1.0

    def cut_off(self) -> None:
        """Keeps numbers where every type holds them."""
        if self.doomed is None:
            for parameter in self.masters if self.has_edited_masters else self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.data.clamp_(-LARGE, LARGE)
        for parameter in self.masters if self.has_edited_weights else self.model.parameters():
            parameter.data.clamp_(-LARGE, LARGE)


Event = Callable[[World], object]


def script(seed: int, may_overflow: bool) -> list[tuple[str, Event]]:
    chance = random.Random(seed)
    events: list[tuple[str, Event]] = []

    def event(name: str, *arguments: Any, **options: Any) -> None:
        events.append((f"{name}{arguments}{options}", lambda world: getattr(world, name)(*arguments, **options)))

    for _ in range(EVENTS):
        kind = chance.choice(["pass_"] * 6 + ["step"] * 4 + ["gradients"] * 4 + ["weights"] * 3 + ["clear", "others"])
        if kind == "pass_":
            overflows = chance.random() < 0.15 and may_overflow
            event("pass_", chance.choice([1.0, 2.0, -1.0]), overflows=overflows, delayed=chance.random() < 0.2)
        elif kind == "gradients":
            event("edit_gradients", chance.choice(OF_GRADIENTS), of_masters=chance.random() < 0.4)
        elif kind == "weights":
            event("edit_weights", chance.choice([*OF_WEIGHTS, *UNSEEN]), of_masters=chance.random() < 0.4)
        elif kind == "clear":
            event("clear", chance.choice([*CLEARING, *ZEROING]))
        elif kind == "others":
            choices = [("save",), ("load",), ("rebuild", chance.choice(["__init__", "clear and add"]))]
            event(*chance.choice(choices))
        else:
            event("step")
        event("cut_off")
    return [*events, ("step", World.step)]


def gradients(world: World) -> list[list[float] | None]:
    found = [parameter.grad for parameter in world.masters]
    # What was cleared may be zeros or nothing.
    return [None if grad is None or not bool(grad.any()) else grad.float().flatten().tolist() for grad in found]


def play(seed: int, opt_level: str, half_dtype: torch.dtype) -> None:
    # A static scale is never checked, so that what overflowed would be used.
    loss_scale = ("dynamic", 8.0, 1.0)[seed % 3]
    plain, world = World(None), World(opt_level, half_dtype, loss_scale=loss_scale)
    for each in (plain, world):
        each.optimizer.param_groups[0]["lr"] = 1.0
    told = []
    try:
        for name, event in script(seed, loss_scale == "dynamic"):
            told.append(name)
            event(plain)
            event(world)
            if plain.doomed is None:
                assert gradients(world) == gradients(plain)
            assert world.weights == plain.weights
        amp.deinitialize()
        assert world.weights == plain.weights
        assert {parameter.dtype for parameter in world.model.parameters()} == {torch.float32}
    except BaseException as error:
        error.add_note(f"seed {seed}, and last of all: " + "; ".join(told[-14:]))
        raise
    finally:
        amp.deinitialize()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("opt_level", "half_dtype"), LEVELS, ids=[f"{level}-{dtype_name(dtype)}" for level, dtype in LEVELS]
)
def test_random_scripts_leave_the_weights_of_plain_torch(opt_level, half_dtype):
    for seed in range(160):
        play(seed, opt_level, half_dtype)
