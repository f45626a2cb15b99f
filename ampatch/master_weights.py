"""The float32 masters of one optimizer's half parameters, and what keeps the two in step.

The optimizer's groups hold the masters, and so it updates those; the model keeps its own half parameters. Gradients
come out of backward in half, and are added to the masters' in float32. What is left in the half parameter's ``grad`` is
the master's gradient in half: whoever clears or changes it means the gradient, and is followed.

Owns the pairs of parameter and master. Knows neither scales nor whether a step is skipped.
"""

from __future__ import annotations

import functools
import types
import warnings
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ampatch import kernels, optimizer_state
from ampatch.conversion import HALVES, Backing, Conversion
from ampatch.errors import AmpWarning, UsageError
from ampatch.patching import PatchLedger


@dataclass(slots=True, eq=False)
class _Pair:
    """A half parameter of the model, and the float32 parameter that the optimizer updates.

    Attributes:
        parameter: the model's.
        backing: what stands behind it.
        master: the optimizer's.
        shown: the half parameter's gradient if it shows the master's; None if it is a new one, or not there.
        shown_version: of that tensor as it was left.
    """

    parameter: nn.Parameter
    backing: Backing
    master: nn.Parameter
    shown: Tensor | None = None
    shown_version: int = 0

    @property
    def has_new_gradient(self) -> bool:
        """Whether backward left a gradient that the master does not have yet."""
        return self.shown is None and self.parameter.grad is not None


class MasterWeights:
    """The masters of one optimizer.

    Args:
        optimizer: the user's; referred to weakly.
        conversion: keeps float32 values from the time before parameters were narrowed, and masters for as long as
            their parameters live.
        wanted: whether there are to be any; without, all of this does nothing.
    """

    def __init__(self, optimizer: Any, conversion: Conversion, wanted: bool) -> None:
        self._wanted = wanted
        self._optimizer = weakref.ref(optimizer)
        self._conversion = conversion
        self._pairs: dict[int, _Pair] = {}  # by id of the half parameter
        self._parameters: dict[int, nn.Parameter] = {}  # by id of the master

    def install(self, ledger: PatchLedger) -> None:
        """Makes the masters, and has the optimizer's other methods know of them.

        Raises:
            UsageError: a parameter is in two optimizers.
            OptionError: the optimizer's groups cannot be written to.
        """
        if not self._wanted:
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
        optimizer = self._optimizer()
        if optimizer is None or not self._wanted:
            return
        new: dict[int, _Pair] = {}
        try:
            for parameter in optimizer_state.parameters_of(optimizer):
                if parameter.dtype in HALVES and parameter.requires_grad and isinstance(parameter, nn.Parameter):
                    if id(parameter) in self._pairs or id(parameter) in new:
                        raise UsageError("some parameters are in more than one parameter group of the optimizer.")
                    backing = self._conversion.claim(parameter, self)
                    assert isinstance(backing.full, nn.Parameter)
                    new[id(parameter)] = _Pair(parameter, backing, backing.full)
        except BaseException:
            for pair in new.values():
                self._conversion.release(pair.parameter)
            raise
        if new:
            self._pairs.update(new)
            self._parameters.update({id(pair.master): pair.parameter for pair in new.values()})
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
        self.hide_gradients()
        self._pairs.clear()
        self._parameters.clear()

    def parameter_of(self, tensor: Tensor) -> Tensor:
        """The model's parameter behind a master; any other tensor is its own."""
        return self._parameters.get(id(tensor), tensor)

    def is_master(self, tensor: Tensor) -> bool:
        """Whether a tensor is one of these masters."""
        return id(tensor) in self._parameters

    # Gradients

    def has_new_gradients(self) -> bool:
        """Whether backward left gradients in half parameters that the masters do not have yet."""
        return any(pair.has_new_gradient for pair in self._pairs.values())

    def new_gradients(self) -> list[Tensor]:
        """What backward left in half parameters, in the order of `widened`."""
        return [_gradient(pair.parameter) for pair in self._pairs.values() if pair.has_new_gradient]

    def widened(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Masters, each with a float32 copy of what backward left in its half parameter, for `add` to take in."""
        masters = [pair.master for pair in self._pairs.values() if pair.has_new_gradient]
        return list(zip(masters, kernels.widened([grad.detach() for grad in self.new_gradients()]), strict=True))

    def add(self, gradients: Iterable[tuple[nn.Parameter, Tensor]]) -> None:
        """Adds to the masters' gradients, and shows what they are now in the half parameters."""
        there: list[tuple[Tensor, Tensor]] = []
        shown: list[_Pair] = []
        for master, grad in gradients:
            if master.grad is None:
                master.grad = grad
            elif grad.layout is torch.strided and master.grad.layout is torch.strided:
                there.append((master.grad, grad))
            else:
                master.grad = master.grad + grad
            shown.append(self._pairs[id(self._parameters[id(master)])])
        kernels.add_([grad for grad, _ in there], [new for _, new in there])
        self._show(shown)

    def follow_gradients(self) -> None:
        """Takes over what became of gradients since `add`: cleared, changed, or left by a backward without a scale.

        Warns:
            AmpWarning: gradients of half parameters were changed after they had been unscaled.
        """
        changed: list[_Pair] = []
        for pair in self._pairs.values():
            if pair.shown is None:
                continue
            grad = pair.parameter.grad
            if grad is None:
                pair.master.grad = pair.shown = None
            elif grad is not pair.shown or grad._version != pair.shown_version:
                changed.append(pair)
        if changed:
            # Asked of the device only here, where somebody has written to a gradient: zeros are a cleared one.
            if any(bool(_gradient(pair.parameter).detach().any()) for pair in changed):
                warnings.warn(
                    "gradients of the model's half parameters were changed after amp.scale_loss had ended. The "
                    "optimizer updates float32 masters, whose gradients are now what was written, rounded to half. "
                    "Change those of the masters instead, as in torch.nn.utils.clip_grad_norm_(amp.master_params("
                    "optimizer), max_norm), and put every backward into a block of amp.scale_loss.",
                    AmpWarning,
                    stacklevel=3,
                )
            for pair in changed:
                pair.shown = pair.master.grad = None
        if self.has_new_gradients():
            self.add(self.widened())

    def hide_gradients(self) -> None:
        """Takes shown gradients out of the half parameters, so that backward leaves what is new there and no more."""
        for pair in self._pairs.values():
            if pair.shown is not None and pair.parameter.grad is pair.shown:
                pair.parameter.grad = None
            pair.shown = None

    def clear_gradients(self) -> None:
        """Sets the gradients of masters and half parameters to None."""
        for pair in self._pairs.values():
            pair.parameter.grad = pair.shown = pair.master.grad = None

    # Weights

    def synchronise(self) -> None:
        """Takes over what somebody wrote into half weights or masters since `write`, where torch has counted it.

        Raises:
            UsageError: the model was converted to another type.
        """
        for pair in self._pairs.values():
            if pair.parameter.dtype not in HALVES:
                raise UsageError(
                    f"a parameter of shape {tuple(pair.parameter.shape)} became {pair.parameter.dtype} after "
                    "amp.initialize, and its optimizer updates a master of half weights. Type amp.deinitialize() "
                    "before converting the model, and amp.initialize afterwards."
                )
            pair.backing.synchronise(pair.parameter)

    def write(self) -> None:
        """Writes the masters into the half weights, rounded."""
        pairs = list(self._pairs.values())
        with torch.no_grad():
            kernels.copy_([pair.parameter for pair in pairs], [pair.master for pair in pairs])
        for pair in pairs:
            pair.backing.note(pair.parameter)

    def _show(self, pairs: list[_Pair]) -> None:
        plain: list[tuple[Tensor, Tensor]] = []
        for pair in pairs:
            grad, full = _gradient(pair.parameter), _gradient(pair.master)
            if grad.layout is not torch.strided or full.layout is not torch.strided:
                pair.parameter.grad = full.to(grad.dtype)
            elif not grad.requires_grad:  # one with a graph of its own is the user's to differentiate
                plain.append((grad, full))
        kernels.copy_([grad for grad, _ in plain], [full for _, full in plain])
        for pair in pairs:
            pair.shown = _gradient(pair.parameter)
            pair.shown_version = pair.shown._version

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
        result = original(*args, **kwargs)
        for pair in self._pairs.values():
            pair.parameter.grad = pair.shown = None
        return result

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
        state["state"] = type(state["state"])(
            *([dict] if hasattr(state["state"], "default_factory") else []),
            {self.parameter_of(key): value for key, value in state["state"].items()},
        )
        return state


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
