"""What is left of temporary masters between two steps: bfloat16 parameters alone, or with an int16 remainder each.

Owns how masters are put together from that before a step, and what is written of them after it. Must know neither
optimizers nor when they step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from ampatch.errors import warn
from ampatch.grouping import grouped
from ampatch.native import kernels
from ampatch.torch_private import foreach
from ampatch.tracing import is_capturing
from ampatch.weights.marks import moments_of
from ampatch.weights.split_weights import SplitWeight
from ampatch.weights.stochastic_rounding import Rounding
from ampatch.weights.untracked_writes import is_shared

_MOST_TIMES = 3  # that user code may write between steps before it is warned


class Rounded:
    """Masters of which nothing is left but the parameters: they were rounded up or down at random.

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

    def note_access(self, tensor: Tensor) -> None:
        """Notes that user code may write to a tensor without being counted."""

    def synchronise_one(self, half: Tensor) -> None:
        """Takes what user code has written to a parameter."""

    def note_one(self, half: Tensor) -> None:
        """Does nothing: a parameter that was loaded has its remainder, if it has one."""

    def take_writes(self) -> None:
        """Takes what user code has written to all parameters."""


class Split(Rounded):
    """Masters of which an int16 remainder is left beside each parameter: the two are the master, bit for bit.

    Args:
        name_of: function that returns a parameter's name, for messages.
        hears_writes: whether `note_access` is called for all writes that torch does not count.
    """

    def __init__(self, name_of: Callable[[Tensor], str], hears_writes: bool) -> None:
        self._name_of, self._hears_writes = name_of, hears_writes
        self._splits: dict[int, tuple[Tensor, SplitWeight]] = {}  # by id of the parameter: itself, and its remainder
        self._times_written = 0  # looks that found writes

    def add(self, half: Tensor, split: SplitWeight | None) -> None:
        """Adds a parameter, which has its remainder."""
        assert split is not None
        split.may_be_written = split.is_unannounced = not self._hears_writes
        self._splits[id(half)] = half, split

    def clear(self) -> None:
        """Forgets all parameters."""
        self._splits.clear()

    def full_of(self, half: Tensor) -> Tensor:
        """Returns a parameter's float32 value, as a new tensor."""
        _, split = self._splits[id(half)]
        if half.dtype is torch.bfloat16:
            split.synchronise(half)
        return split.values(half)

    def set(self, half: Tensor, full: Tensor) -> None:
        """Gives a parameter a float32 value."""
        self._splits[id(half)][1].set(half, full.to(half.device).float())

    def join(self, halves: list[Tensor], masters: list[Tensor]) -> None:
        """Puts masters together."""
        kernels.join(halves, self._remainders(halves), masters)

    def write(self, masters: list[Tensor], memory: list[Tensor], halves: list[Tensor], *, to_nearest: bool) -> None:  # noqa: ARG002
        """Writes masters to their parameters and remainders."""
        try:
            kernels.split(masters, memory, self._remainders(halves))
        finally:  # also after Ctrl-C: otherwise the remainders would seem to be of other values
            self._note(halves)

    def _note(self, halves: list[Tensor]) -> None:
        """Records that the remainders of these parameters are their own."""
        pairs = [self._splits[id(half)] for half in halves]
        for some in _by_device(pairs):
            prints = kernels.fingerprints([half for half, _ in some])
            for (half, split), own in zip(some, prints.split(1), strict=True):
                split.note(half, own)

    def rounded(self, master: Tensor) -> Tensor:
        """Returns what `write` writes of a master."""
        half = torch.empty_like(master, dtype=torch.bfloat16)
        kernels.split([master], [half], [torch.empty_like(half, dtype=torch.int16)])
        return half

    def _remainders(self, halves: list[Tensor]) -> list[Tensor]:
        return [self._splits[id(half)][1].remainder for half in halves]

    # What user code writes to parameters

    def note_access(self, tensor: Tensor) -> None:
        """Notes that user code may write to a tensor without being counted."""
        if id(tensor) in self._splits:
            self._splits[id(tensor)][1].may_be_written = True

    def synchronise_one(self, half: Tensor) -> None:
        """Drops the remainder of a parameter that user code has written to."""
        self._splits[id(half)][1].synchronise(half)

    def take_writes(self) -> None:
        """Drops the remainders of parameters that user code has written to; syncs if it has read their ``data``.

        Raises:
            UsageError: a parameter was given another type.

        Warns:
            AmpWarning: user code writes to parameters again and again.
        """
        if is_capturing():  # nothing can be read from the device; it was looked at before the capture
            return
        pairs = [pair for pair in self._splits.values() if pair[0].numel()]
        watched = [pair for pair in pairs if pair[1].may_be_written]
        moments = list(zip(*moments_of([half for half, _ in pairs]), strict=True))
        is_same = moments == [split.moment for _, split in pairs] and not (watched and _differ(watched))
        written = [] if is_same else [half for half, split in pairs if split.synchronise(half)]
        for half, split in watched:  # to those whose ``data`` user code has dropped, torch counts every write again
            split.may_be_written = split.is_unannounced or is_shared(half)
        self._times_written += bool(written)
        if written and self._times_written == _MOST_TIMES:
            warn(
                f"user code writes to weights between steps, such as {self._name_of(written[0])}, again and again. A "
                "split weight then loses what bfloat16 cannot hold of its updates. Type True in the place of 'split', "
                "which keeps the masters; or load values by load_state_dict."
            )


def _differ(pairs: list[tuple[Tensor, SplitWeight]]) -> bool:
    """Returns True if the values of a parameter have changed since `SplitWeight.note`; reads each device once."""
    for some in _by_device(pairs):
        now = kernels.fingerprints([half.detach() for half, _ in some])
        if not torch.equal(now, torch.cat([split.fingerprint.to(now.device) for _, split in some])):
            return True
    return False


def _by_device(pairs: Iterable[tuple[Tensor, SplitWeight]]) -> Iterable[list[tuple[Tensor, SplitWeight]]]:
    """Returns the parameters that have elements, with their remainders, by device."""
    return grouped((half.device, (half, split)) for half, split in pairs if half.numel()).values()
