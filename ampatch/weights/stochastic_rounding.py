"""The random numbers of one optimizer's stochastic rounding, and its state in bfloat16 between steps.

Owns the number of the step. Every random number is a hash of it and of the places of the parameter and the element. So
ranks round alike, a resumed run rounds as the first would have, and torch's generators play no part. The first number
is a hash of the weights, so that the next optimizer of the same weights does not repeat the numbers of the last one.
Otherwise a weight that met the same number in each round would never move. `Rounded` is the form of masters that it
leaves between steps. Must not know which parameters have masters.

Stochastic rounding of bfloat16 weights: P. Zamirai et al., "Revisiting BFloat16 Training", 2020.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from ampatch.errors import UsageError
from ampatch.grouping import grouped
from ampatch.native import kernels
from ampatch.native.torch_kernels import key_of
from ampatch.torch_private import foreach
from ampatch.tracing import is_capturing
from ampatch.weights import optimizer_state
from ampatch.weights.split_weights import SplitWeight

#: The option of an optimizer's first group with the number of the step: it travels with the state dict. It stays in the
#: group when amp ends, so that a checkpoint saved later has it.
STEP = "stochastic_rounding_step"

_SLOTS = 64  # numbers of each parameter: its own, and those of its state


class Rounding:
    """The random numbers of one optimizer.

    Args:
        is_used: False if nothing is rounded; then no step is counted.
    """

    def __init__(self, *, is_used: bool) -> None:
        self._is_used = is_used
        self._step: int | None = None
        self._places: dict[int, int] = {}  # by id of the parameter: its place in the optimizer

    def count_step(self, optimizer: Any) -> None:
        """Counts a step, from what the optimizer has loaded on; syncs with the device if it has loaded nothing.

        Raises:
            UsageError: a CUDA graph is captured, whose replays would all have the same numbers.
        """
        if not self._is_used:
            return
        if is_capturing():
            raise UsageError(
                "a CUDA graph captures this step, whose stochastic rounding would have the same random numbers in each "
                "replay. Capture the forward and backward pass alone; or type master_weights='split', without "
                "optimizer_state."
            )
        self._note_places(optimizer)
        group: Any = next(iter(optimizer.param_groups), {})
        before = group.get(STEP, self._step)
        self._step = (_hash_of(optimizer) if before is None else before) + 1
        with contextlib.suppress(TypeError):  # groups may be computed, and not written to
            group[STEP] = self._step

    def _note_places(self, optimizer: Any) -> None:
        self._places = {id(each): place for place, each in enumerate(optimizer_state.parameters_of(optimizer))}

    def round_weights(self, fulls: list[Tensor], halves: list[Tensor], parameters: Iterable[Tensor]) -> None:
        """Rounds float32 tensors to bfloat16 ones, which have the memory of these parameters."""
        self._round(fulls, halves, [self._slot(each) for each in parameters])

    def _slot(self, parameter: Tensor) -> int:
        return self._places.get(id(parameter), 0) * _SLOTS

    def narrow_state(self, optimizer: Any, parameters: Iterable[Tensor]) -> None:
        """Rounds the float32 state of parameters to bfloat16; step counts and other numbers stay."""
        if not self._places:
            self._note_places(optimizer)
        state = optimizer_state.state_of(optimizer)
        fulls: list[Tensor] = []
        halves: list[Tensor] = []
        slots: list[int] = []
        known: dict[int, Tensor] = {}  # a state may hold a tensor under two names
        for parameter in parameters:
            counted = itertools.count(self._slot(parameter) + 1)

            def narrow(tensor: Tensor, counted: Iterator[int] = counted) -> Tensor:
                if tensor.dtype is not torch.float32 or tensor.numel() < 2:  # a number, such as of steps
                    return tensor
                if id(tensor) in known:
                    return known[id(tensor)]
                fulls.append(tensor)
                halves.append(torch.empty_like(tensor, dtype=torch.bfloat16))
                slots.append(next(counted))
                return known.setdefault(id(tensor), halves[-1])

            if state and parameter in state:
                state[parameter] = optimizer_state.cast(state[parameter], narrow)
        self._round(fulls, halves, slots)

    def _round(self, fulls: list[Tensor], halves: list[Tensor], slots: list[int]) -> None:
        step = 0 if self._step is None else self._step
        kernels.round_stochastically(fulls, halves, [key_of(step, slot) for slot in slots])


class Rounded:
    """Masters of which nothing is left between steps but the parameters: they were rounded up or down at random.

    Has the methods of `ampatch.weights.split_weights.Split`, for `ampatch.weights.temporary_masters`.

    Args:
        rounding: the random numbers.
    """

    def __init__(self, rounding: Rounding) -> None:
        self._rounding = rounding

    def add(self, half: Tensor, split: SplitWeight | None) -> None:
        """Adds a parameter; ``split`` is its remainder, if masters have one."""

    def clear(self) -> None:
        """Forgets all parameters."""

    def full_of(self, half: Tensor) -> Tensor:
        """Returns a parameter's float32 value, as a new tensor."""
        return half.detach().float()

    def set(self, half: Tensor, full: Tensor) -> None:
        """Gives a parameter a float32 value."""
        half.copy_(full)

    def join(self, halves: list[Tensor], masters: list[Tensor]) -> None:
        """Puts masters together."""
        if masters:
            foreach.copy_(masters, halves)

    def write(self, masters: list[Tensor], memory: list[Tensor], halves: list[Tensor], *, to_nearest: bool) -> None:
        """Writes masters to their parameters.

        Args:
            masters: float32 tensors.
            memory: the parameters, or tensors of their memory, to which torch counts no writes.
            halves: the parameters.
            to_nearest: whether masters are written within a step, which goes on with the masters afterwards.
        """
        if to_nearest:
            foreach.copy_(memory, masters)
        else:
            self._rounding.round_weights(masters, memory, halves)

    def rounded(self, master: Tensor) -> Tensor:
        """Returns what `write` writes of a master within a step."""
        return master.to(torch.bfloat16)

    # What user code writes to parameters

    def note_one(self, half: Tensor) -> None:
        """Does nothing: beside a parameter, nothing is kept that could differ from it."""

    def take_writes(self) -> None:
        """Takes what user code has written to all parameters."""


def _hash_of(optimizer: Any) -> int:
    """Returns a number of 31 bits that depends on every bit of the bfloat16 parameters, the same on every rank."""
    weights = [each for each in optimizer_state.parameters_of(optimizer) if each.dtype is torch.bfloat16]
    by_device = grouped((each.device, each.detach()) for each in weights if each.numel())
    sums = [int(kernels.fingerprints(some).sum().item()) for some in by_device.values()]
    return key_of(sum(sums), 0) >> 1
