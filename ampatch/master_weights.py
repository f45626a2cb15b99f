"""The float32 masters of one optimizer's half parameters, and what keeps the weights of the two in step.

The optimizer's groups hold the masters, and so it updates those; the model keeps its own half parameters. Owns the
pairs of parameter and master; `ampatch.master_gradients` has their gradients. Knows neither scales nor whether a step
is skipped.
"""

from __future__ import annotations

import copy
import functools
import operator
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ampatch import kernels, optimizer_state
from ampatch.conversion import Conversion, Mark, Marks
from ampatch.errors import UsageError
from ampatch.master_gradients import MasterGradients, Pair
from ampatch.opt_levels import HALVES
from ampatch.patching import PatchLedger

_DTYPE = operator.attrgetter("dtype")


class MasterWeights:
    """The masters of one optimizer.

    Args:
        optimizer: the user's; referred to weakly.
        conversion: keeps float32 values from the time before parameters were narrowed, and masters for as long as
            their parameters live.
        wanted: whether there are to be any; without, all of this does nothing.

    Attributes:
        wanted: as given.
        gradients: theirs and those of the half parameters.
    """

    def __init__(self, optimizer: Any, conversion: Conversion, wanted: bool) -> None:
        self.wanted = wanted
        self._compared = False
        self._optimizer = weakref.ref(optimizer)
        self._conversion = conversion
        self._pairs: dict[int, Pair] = {}  # by id of the half parameter
        self._parameters: dict[int, nn.Parameter] = {}  # by id of the master
        self.gradients = MasterGradients(self._pairs, self._parameters)
        self._marks = Marks([], [])  # of all pairs, when they were last in step

    def install(self, ledger: PatchLedger) -> None:
        """Makes the masters, and has the optimizer's other methods know of them.

        Raises:
            UsageError: a parameter is in two optimizers.
            OptionError: the optimizer's groups cannot be written to.
        """
        if not self.wanted:
            return
        optimizer = self._optimizer()
        assert optimizer is not None
        ledger.on_undo(self.take_out, optimizer)
        self.complete()
        self._replace(ledger, optimizer, "zero_grad", self._zero_grad)
        if hasattr(optimizer, "add_param_group"):
            self._replace(ledger, optimizer, "add_param_group", self._add_param_group)
        if isinstance(optimizer, torch.optim.Optimizer):
            self._replace(ledger, optimizer, "__getstate__", self._getstate)

    def complete(self) -> None:
        """Makes masters for half parameters of the optimizer that have none: of new groups, or unfrozen since."""
        optimizer = self._optimizer() if self.wanted else None
        if optimizer is None or HALVES.isdisjoint(map(_DTYPE, optimizer_state.parameters_of(optimizer))):
            return
        new: dict[int, Pair] = {}
        try:
            for parameter in optimizer_state.parameters_of(optimizer):
                if parameter.dtype in HALVES and parameter.requires_grad and isinstance(parameter, nn.Parameter):
                    if id(parameter) in self._pairs or id(parameter) in new:
                        raise UsageError(
                            f"a parameter of shape {tuple(parameter.shape)} is in more than one parameter group of the "
                            "optimizer, or in one twice: as itself and as its float32 master, which is what the groups "
                            "hold. Leave it where amp.initialize put the master."
                        )
                    backing = self._conversion.claim(parameter, self)
                    assert isinstance(backing.full, nn.Parameter)
                    new[id(parameter)] = Pair(parameter, backing, backing.full, backing.full.grad)
        except BaseException:
            for pair in new.values():
                self._conversion.release(pair.parameter)
            raise
        if new:
            self._pairs.update(new)
            self._parameters.update({id(pair.master): pair.parameter for pair in new.values()})
            self._marks = Marks(*_marks_and_tensors(self._pairs.values()))
            # Its way out is `take_out`, which puts back what has been put in.
            optimizer_state.replace_parameters(
                optimizer,
                lambda parameter: (new[id(parameter)].master, torch.float32) if id(parameter) in new else None,
            )

    def take_out(self) -> None:
        """Gives the optimizer the model's parameters back. What they hold is the conversion's to restore."""
        optimizer = self._optimizer()
        before = {id(pair.master): (pair.parameter, pair.backing.before) for pair in self._pairs.values()}
        if optimizer is not None:
            optimizer_state.replace_parameters(optimizer, lambda master: before.get(id(master)))
        for pair in self._pairs.values():
            self._conversion.release(pair.parameter)
        self._pairs.clear()
        self._parameters.clear()
        self._marks = Marks([], [])

    def __len__(self) -> int:
        return len(self._pairs)

    def are_at_rest(self) -> bool:
        """Whether there is no gradient in the half parameters, and none is known of; the masters' are not looked at."""
        return not self._pairs or self.gradients.are_at_rest()

    def parameter_of(self, tensor: Tensor) -> Tensor:
        """The model's parameter behind a master; any other tensor is its own."""
        return self._parameters.get(id(tensor), tensor)

    def is_master(self, tensor: Tensor) -> bool:
        """Whether a tensor is one of these masters."""
        return id(tensor) in self._parameters

    def without_master(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Those of an optimizer's parameters that are none of these masters."""
        masters = self._parameters
        return [parameter for parameter in parameters if id(parameter) not in masters]

    # Weights

    def synchronise(self) -> None:
        """Takes over what somebody wrote into half weights or masters since `write`.

        Writes by way of ``.data`` are not counted by torch, and it would take a pass over all weights to see them. The
        first time that is done, for weights that are initialised in that way.

        Raises:
            UsageError: the model was converted to another type.
        """
        if self._compared and self._marks.are_now():
            return
        for pair in self._pairs.values():
            if not (self._compared and pair.backing.is_in_step(pair.parameter)):
                pair.backing.synchronise(pair.parameter)
        self._compared = True
        self._marks.renew()

    def write(self) -> None:
        """Writes the masters into the half weights, rounded."""
        # An optimizer may write to parameters that have no gradient, and by way of .data, which is not counted. But a
        # write that is counted breaks graphs that half weights are part of, which are sound where nothing was updated.
        if not self._pairs:
            return
        updated: list[Pair] = []
        others: list[Pair] = []
        for pair in self._pairs.values():
            (updated if pair.master.grad is not None or pair.backing.was_updated else others).append(pair)
        with torch.no_grad():
            kernels.copy_to_half([pair.master for pair in updated], [pair.parameter for pair in updated])
            if others:
                kernels.copy_to_half([pair.master for pair in others], [pair.parameter.data for pair in others])
        self._marks.renew()

    # What the optimizer's own methods do besides

    def _replace(self, ledger: PatchLedger, optimizer: Any, name: str, replacement: Callable[..., Any]) -> None:
        original = getattr(optimizer, name)

        @functools.wraps(original)
        def method(me: Any, *args: Any, **kwargs: Any) -> Any:
            if me is not self._optimizer():  # the deep copy of an optimizer whose class copies every attribute
                return getattr(type(me), name)(me, *args, **kwargs)
            return replacement(original, *args, **kwargs)

        method.__name__ = name
        ledger.set(optimizer, name, types.MethodType(method, optimizer))

    def _zero_grad(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self.gradients.clearing():
            return original(*args, **kwargs)

    def _add_param_group(self, original: Callable[..., Any], param_group: Any) -> Any:
        optimizer = self._optimizer()
        assert optimizer is not None
        known = len(optimizer.param_groups)
        result = original(param_group)
        try:
            self.complete()
        except BaseException:
            del optimizer.param_groups[known:]
            raise
        return result

    def _getstate(self, original: Callable[..., Any]) -> Any:
        """What a copy or a pickle of the optimizer is made of: an ordinary optimizer of the model's own parameters."""
        state = dict(original())
        state["param_groups"] = [
            {**group, "params": [self.parameter_of(parameter) for parameter in group["params"]]}
            for group in state["param_groups"]
        ]
        # Of a defaultdict, as torch's optimizers have, the copy is one too.
        moved = copy.copy(state["state"])
        moved.clear()
        for key, value in state["state"].items():
            parameter = self.parameter_of(key)
            moved[parameter] = optimizer_state.retyped(value, key.dtype, parameter.dtype, parameter)
        state["state"] = moved
        return state


def dropping_sums(
    original: Callable[..., None], all_masters: Callable[[], Iterable[MasterWeights]]
) -> Callable[..., None]:
    """A `torch.nn.Module.zero_grad` that the masters hear of.

    Inside of a block zeros cannot be told from what is zeroed once more, as with ``set_to_none=False``.
    """

    @functools.wraps(original)
    def zero_grad(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        original(module, *args, **kwargs)
        for masters in all_masters():
            masters.gradients.drop_sums(set(map(id, module.parameters())))

    return zero_grad


def _marks_and_tensors(pairs: Iterable[Pair]) -> tuple[list[Mark], list[Tensor]]:
    """The marks of both sides of pairs, and what they are the marks of."""
    marks: list[Mark] = []
    tensors: list[Tensor] = []
    for pair in pairs:
        assert pair.backing.half_mark is not None
        assert pair.backing.full_mark is not None
        marks += pair.backing.half_mark, pair.backing.full_mark
        tensors += pair.parameter, pair.master
    return marks, tensors
