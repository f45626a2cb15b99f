"""The float32 masters of one optimizer's half parameters, and what keeps the two in step.

The optimizer's groups hold the masters, and so it updates those; the model keeps its own half parameters. Gradients
come out of backward in half, and are added to the masters' in float32. What is left in the half parameter's ``grad`` is
the master's gradient in half: whoever clears or changes it means the gradient, and is followed.

Owns the pairs of parameter and master. Knows neither scales nor whether a step is skipped.
"""

from __future__ import annotations

import copy
import enum
import functools
import operator
import types
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ampatch import kernels, optimizer_state
from ampatch.conversion import Backing, Conversion, Mark, Marks
from ampatch.errors import UsageError, warn
from ampatch.opt_levels import HALVES
from ampatch.patching import PatchLedger

_DTYPE = operator.attrgetter("dtype")


class _Gradient(enum.Enum):
    """What a half parameter's gradient is."""

    NEW = "what backward has left since, or nothing: the master is to get it"
    SHOWN = "the master's, in half"
    BASE = "zeros that backward adds to, below which the master keeps what was there before"


@dataclass(slots=True, eq=False)
class _Pair:
    """A half parameter of the model, and the float32 parameter that the optimizer updates.

    Attributes:
        parameter: the model's.
        backing: what stands behind it.
        master: the optimizer's.
        gradient: what the half parameter's gradient is.
        left: that gradient as amp left it; None if there was none.
        left_version: of that tensor.
    """

    parameter: nn.Parameter
    backing: Backing
    master: nn.Parameter
    gradient: _Gradient = _Gradient.NEW
    left: Tensor | None = None
    left_version: int = 0

    def leave(self, gradient: _Gradient) -> None:
        """Takes note of the gradient that is left in the half parameter."""
        grad = self.parameter.grad
        self.gradient, self.left, self.left_version = gradient, grad, 0 if grad is None else grad._version

    def clear(self) -> None:
        """There is no gradient in the half parameter."""
        self.parameter.grad = None
        self.gradient, self.left, self.left_version = _Gradient.NEW, None, 0

    @property
    def was_cleared(self) -> bool:
        """Whether somebody set the gradient that was left to None, whatever has come since."""
        left = self.left
        if left is None:
            return False
        grad = self.parameter.grad
        if grad is None or grad is left:
            return grad is None
        # Another tensor may hold the sum all the same: where something was added to the one that was left, of sparse
        # gradients, and of those with a graph.
        return left._version == self.left_version and left.layout is torch.strided and not grad.requires_grad


class MasterWeights:
    """The masters of one optimizer.

    Args:
        optimizer: the user's; referred to weakly.
        conversion: keeps float32 values from the time before parameters were narrowed, and masters for as long as
            their parameters live.
        wanted: whether there are to be any; without, all of this does nothing.

    Attributes:
        wanted: as given.
    """

    def __init__(self, optimizer: Any, conversion: Conversion, wanted: bool) -> None:
        self.wanted = wanted
        self._is_clear = True  # no pair knows of a gradient
        self._compared = False
        self._optimizer = weakref.ref(optimizer)
        self._conversion = conversion
        self._pairs: dict[int, _Pair] = {}  # by id of the half parameter
        self._parameters: dict[int, nn.Parameter] = {}  # by id of the master
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
        new: dict[int, _Pair] = {}
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
                    new[id(parameter)] = _Pair(parameter, backing, backing.full)
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
        return not self._pairs or (self._is_clear and optimizer_state.are_bare(self._parameters.values()))

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

    # Gradients

    def take_gradients(self, inv_scale: Tensor | None = None, found_inf: Tensor | None = None) -> None:
        """Adds what backward left in half parameters to the masters' gradients, and shows these in half.

        Args:
            inv_scale: what it is to be multiplied by, 0-dimensional float32; None: 1.
            found_inf: 0-dimensional float32, set to 1 if any of it is not finite; None: that is not asked.
        """
        pairs = self._with_new_gradients()
        if not pairs:
            return
        self._is_clear = False
        device = pairs[0].master.device
        factor = torch.ones((), dtype=torch.float32, device=device) if inv_scale is None else inv_scale
        found_inf = torch.zeros((), dtype=torch.float32, device=device) if found_inf is None else found_inf
        first: list[Tensor] = []
        without: list[nn.Parameter] = []  # masters that these are the first gradients of
        later: list[Tensor] = []
        later_full: list[Tensor] = []
        strided = torch.strided
        for pair in pairs:
            grad, full = pair.parameter.grad, pair.master.grad
            assert grad is not None
            if grad.requires_grad or grad.layout is not strided or not (full is None or full.layout is strided):
                _take_gradient(pair, inv_scale, found_inf)
            elif full is None:
                first.append(grad)
                without.append(pair.master)
            else:
                later.append(grad)
                later_full.append(full)
        if first:
            full_grads = [torch.empty_like(grad, dtype=torch.float32) for grad in first]
            kernels.unscale_copy(first, full_grads, factor, found_inf, write_back=True)
            for master, full in zip(without, full_grads, strict=True):
                master.grad = full
        if later:
            kernels.unscale_add(later, later_full, factor, found_inf, write_back=True)
        for pair in pairs:
            pair.leave(_Gradient.SHOWN)

    def has_sums(self) -> bool:
        """Whether masters have gradients: those of earlier blocks, where what a block left is not taken yet."""
        return any(pair.master.grad is not None for pair in self._pairs.values())

    def new_gradients(self) -> list[Tensor]:
        """What backward left in half parameters, and `take_gradients` would take."""
        return [_gradient(pair.parameter) for pair in self._with_new_gradients()]

    def _with_new_gradients(self) -> list[_Pair]:
        """The pairs in which there is something that the master is to get."""
        shown = _Gradient.SHOWN
        return [pair for pair in self._pairs.values() if pair.gradient is not shown and pair.parameter.grad is not None]

    def show_gradients(self) -> None:
        """Shows the masters' gradients in the half parameters once more, after they were changed."""
        dense: list[_Pair] = []
        for pair in self._pairs.values():
            if pair.master.grad is None:
                pair.clear()
            elif pair.gradient is _Gradient.SHOWN and not _gradient(pair.parameter).requires_grad:
                if _is_sparse(pair.parameter.grad) or _is_sparse(pair.master.grad):
                    pair.parameter.grad = pair.master.grad.to(pair.parameter.dtype)
                    pair.leave(_Gradient.SHOWN)
                else:
                    dense.append(pair)
        kernels.copy_to_half([_gradient(pair.master) for pair in dense], [_gradient(pair.parameter) for pair in dense])
        for pair in dense:
            pair.leave(_Gradient.SHOWN)

    def follow_clearing(self) -> None:
        """Drops the masters' gradients where somebody has set those of the half parameters to None.

        Warns:
            AmpWarning: other gradients are there now, and whether they were to be added to the masters' nobody can say.
        """
        if self._is_clear:
            return
        replaced = False
        for pair in self._pairs.values():
            if pair.left is not None and pair.was_cleared:
                is_sum_dropped = pair.gradient is _Gradient.BASE and pair.master.grad is not None
                replaced = replaced or (is_sum_dropped and pair.parameter.grad is not None)
                pair.master.grad = None
                pair.gradient, pair.left = _Gradient.NEW, None
        if replaced:
            warn(
                "gradients of half parameters were replaced by other tensors inside of amp.scale_loss, or after it "
                "with delay_unscale=True. What earlier blocks had left for their float32 masters is dropped, as if "
                "they had been cleared. To add to them write p.grad += grad, in place; to clear them, "
                "model.zero_grad()."
            )

    def drop_sums(self, module: nn.Module) -> None:
        """Drops what masters keep of earlier blocks, for the parameters of a module that are zeros for backward now."""
        if self._is_clear:
            return
        ids = set(map(id, module.parameters()))
        for pair in self._pairs.values():
            if pair.gradient is _Gradient.BASE and id(pair.parameter) in ids:
                pair.master.grad = None
                pair.leave(_Gradient.BASE)

    def follow_gradients(self, quietly: bool = False) -> None:
        """Takes over what became of gradients since `take_gradients`: cleared, changed, or left without a scale.

        Args:
            quietly: without the warning.

        Warns:
            AmpWarning: gradients of half parameters were changed after they had been unscaled.
        """
        if not self._touched():
            return
        self.follow_clearing()
        changed = [
            pair
            for pair in self._pairs.values()
            if pair.gradient is _Gradient.SHOWN
            and (pair.parameter.grad is not pair.left or _gradient(pair.parameter)._version != pair.left_version)
        ]
        # Asked of the device only here, where somebody has written to gradients, if only by a clipping of nothing.
        for pair in changed:
            grad = _gradient(pair.parameter).detach()
            if pair.master.grad is not None and bool((grad == pair.master.grad.to(grad.dtype)).all()):
                pair.leave(_Gradient.SHOWN)
            else:
                pair.master.grad = None
                pair.gradient, pair.left = _Gradient.NEW, None
        changed = [pair for pair in changed if pair.gradient is _Gradient.NEW]
        # Zeros are a cleared one.
        if not quietly and any(bool(_gradient(pair.parameter).detach().any()) for pair in changed):
            warn(
                "gradients of the model's half parameters were changed after amp.scale_loss had ended. The optimizer "
                "updates float32 masters, whose gradients are now what was written, rounded to half. Change those of "
                "the masters instead, as in torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), max_norm), "
                "and put every backward into a block of amp.scale_loss."
            )
        self.take_gradients()

    def _touched(self) -> list[_Pair]:
        """The pairs whose half gradient is not what amp has left there, or has been written to since."""
        return [
            pair
            for pair in self._pairs.values()
            if (grad := pair.parameter.grad) is not pair.left
            or (grad is not None and grad._version != pair.left_version)
        ]

    def make_way(self) -> None:
        """Has what is shown make way for what backward will leave: zeros, so that clearing them can be seen."""
        shown = [pair for pair in self._pairs.values() if pair.gradient is _Gradient.SHOWN]
        for pair in shown:
            grad = _gradient(pair.parameter)
            if pair.master.grad is None or grad.layout is not torch.strided or grad.requires_grad:
                pair.parameter.grad = None
            else:
                grad.zero_()
        for pair in shown:  # only now, as gradients that are pieces of one storage count their writes together
            pair.leave(_Gradient.BASE)

    def follow_zeroing(self) -> None:
        """Drops the masters' gradients where somebody has zeroed what a delayed block left in the half parameters."""
        for pair in self._pairs.values():
            grad = pair.parameter.grad
            was_written = grad is not None and grad is pair.left and grad._version != pair.left_version
            # Asked of the device only where somebody has written to it.
            if was_written and pair.master.grad is not None and not bool(_gradient(pair.parameter).any()):
                pair.master.grad = None

    def leave_scaled(self) -> None:
        """Takes note of gradients that stay scaled for a later block, to see whether they are cleared until then."""
        self.follow_clearing()
        self._is_clear = not self._pairs
        for pair in self._pairs.values():
            if pair.gradient is not _Gradient.SHOWN:
                pair.leave(_Gradient.BASE)

    def surrender_gradients(self, scale: Tensor | None) -> None:
        """Has masters hold all there is of gradients, at a scale if there is one, for the parameters to take back."""
        self.follow_clearing()
        if scale is not None:
            kernels.multiply_(
                [pair.master.grad for pair in self._pairs.values() if pair.master.grad is not None], scale
            )
        self.take_gradients()
        for pair in self._pairs.values():
            pair.clear()

    def clear_gradients(self) -> None:
        """Sets the gradients of masters and half parameters to None."""
        for pair in self._pairs.values():
            pair.master.grad = None
            pair.clear()
        self._is_clear = True

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
        updated: list[_Pair] = []
        others: list[_Pair] = []
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
        result = original(*args, **kwargs)
        for pair in self._pairs.values():
            pair.clear()
        self._is_clear = True
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
            masters.drop_sums(module)

    return zero_grad


def _marks_and_tensors(pairs: Iterable[_Pair]) -> tuple[list[Mark], list[Tensor]]:
    """The marks of both sides of pairs, and what they are the marks of."""
    marks: list[Mark] = []
    tensors: list[Tensor] = []
    for pair in pairs:
        assert pair.backing.half_mark is not None
        assert pair.backing.full_mark is not None
        marks += pair.backing.half_mark, pair.backing.full_mark
        tensors += pair.parameter, pair.master
    return marks, tensors


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _is_sparse(grad: Tensor | None) -> bool:
    return grad is not None and grad.layout is not torch.strided


def _take_gradient(pair: _Pair, inv_scale: Tensor | None, found_inf: Tensor) -> None:
    """`MasterWeights.take_gradients` of a sparse gradient, or of one with a graph of its own."""
    grad, full = _gradient(pair.parameter), pair.master.grad
    unscaled = grad.detach().to(torch.float32, copy=True)
    if inv_scale is not None:
        kernels.unscale_([unscaled], inv_scale, found_inf)
    if full is None:
        pair.master.grad = unscaled
    else:  # torch adds a sparse one to a dense one, and not the other way round
        pair.master.grad = full + unscaled if _is_sparse(unscaled) else unscaled + full
    if _is_sparse(grad) or _is_sparse(pair.master.grad):
        pair.parameter.grad = pair.master.grad.to(grad.dtype)
    elif inv_scale is not None:
        kernels.unscale_([grad], inv_scale, found_inf)  # it stays the user's to differentiate
