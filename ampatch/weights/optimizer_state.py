"""Reads, moves, casts and restores an optimizer's parameters, gradients and state, for any optimizer class.

Uses ``param_groups`` and, if there is one, ``state`` (a mapping by parameter), as all of torch's optimizers have them.
Owns nothing. Must know neither masters nor scales.
"""

from __future__ import annotations

import copy
import functools
import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from ampatch.casting.nested import CASTABLE, cast_tensors
from ampatch.half_types import HALVES
from ampatch.native import calls

_PARAMETERS = operator.itemgetter("params")
_GRAD = operator.attrgetter("grad")
_VALUES = operator.methodcaller("values")
_IS_NONE = functools.partial(operator.is_, None)


def parameters_of(optimizer: Any) -> Iterator[Tensor]:
    """Returns an iterator over the tensors that an optimizer updates, group by group."""
    return itertools.chain.from_iterable(map(_PARAMETERS, optimizer.param_groups))


def of_the_wrapped(name: str, doc: str, held_as: str = "optimizer") -> Any:
    """Returns a property, for wrappers of optimizers, that stands for an attribute of the wrapped one.

    Args:
        name: name of the attribute.
        doc: docstring of the property.
        held_as: attribute in which the wrapper holds the optimizer.
    """
    inner = operator.attrgetter(held_as)
    return property(
        lambda self: getattr(inner(self), name), lambda self, value: setattr(inner(self), name, value), doc=doc
    )


def gradients_of(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Returns the parameters' gradients, each once; makes expanded gradients contiguous, so that they can be written.

    Parameters without a gradient are left out.
    """
    compiled = calls.compiled()
    if compiled is not None:
        return compiled.gradients_of(parameters, writable_gradient)  # type: ignore[no-any-return]
    found: dict[int, Tensor] = {}
    for parameter in parameters:
        grad = parameter.grad
        if grad is not None:
            if not grad.is_contiguous():
                grad = writable_gradient(parameter)
            found[id(grad)] = grad
    return list(found.values())


def usual_gradients_of(parameters: Iterable[Tensor]) -> list[Tensor] | None:
    """Returns the gradients if each parameter has one, all of them plain, contiguous and on one device; otherwise None.

    A plain gradient is a dense float32 or half tensor of torch's own class, without a graph. Without compiled calls
    returns None, as the check would take as long as what it saves.
    """
    compiled = calls.compiled()
    grads = list(map(_GRAD, parameters))
    is_usual = compiled is not None and compiled.ordinary_device(grads, False) is not None
    return grads if is_usual and all(map(Tensor.is_contiguous, grads)) else None


def writable_gradient(parameter: Tensor) -> Tensor:
    """Returns a parameter's gradient; makes it contiguous first if several elements share one memory location."""
    grad = parameter.grad
    assert grad is not None
    if grad.layout is torch.strided:
        reach = 0  # largest offset that the dimensions with smaller strides reach
        for step, size in sorted(zip(grad.stride(), grad.shape, strict=True)):
            if size > 1 and step <= reach:
                with torch.no_grad():
                    parameter.grad = grad.contiguous()
                return parameter.grad
            reach += (size - 1) * step
    return grad


def has_gradients(parameters: Iterable[Tensor]) -> bool:
    """Returns True if any parameter has a gradient."""
    return not have_no_gradients(parameters)


def have_no_gradients(parameters: Iterable[Tensor], may_be_half: bool = True) -> bool:
    """Returns True if no parameter has a gradient and, with ``may_be_half=False``, none is half."""
    compiled = calls.compiled()
    if compiled is not None:
        return compiled.have_no_gradients(parameters, may_be_half)  # type: ignore[no-any-return]
    return all(parameter.grad is None and (may_be_half or parameter.dtype not in HALVES) for parameter in parameters)


def lack_gradients(parameters: Iterable[Tensor]) -> bool:
    """Returns True if any parameter has no gradient."""
    return any(map(_IS_NONE, map(_GRAD, parameters)))


def names_in(optimizer: Any) -> Callable[[Tensor], str]:
    """Returns a function that names a parameter for messages, by its name in the optimizer or its place in groups."""
    names: dict[int, str] = {}
    for number, group in enumerate(optimizer.param_groups):
        given = group.get("param_names", ())
        for place, parameter in enumerate(group["params"]):
            names[id(parameter)] = given[place] if place < len(given) else f"param_groups[{number}]['params'][{place}]"
    return lambda parameter: names[id(parameter)]


def retype(optimizer: Any, parameter: Tensor, before: torch.dtype, now: torch.dtype) -> None:
    """Casts the state of one parameter from one type to another; leaves tensors of other types."""
    state = state_of(optimizer)
    if state and before is not now and parameter in state:
        state[parameter] = retyped(state[parameter], before, now, parameter)


def cast_state(optimizer: Any, dtype_before: Callable[[Tensor], torch.dtype | None], but: Collection[int] = ()) -> None:
    """Casts the state of parameters whose type has changed to the new type, as ``load_state_dict`` would.

    Args:
        optimizer: any object with ``param_groups``.
        dtype_before: function that returns the type that a parameter had; None if it has not changed.
        but: ids of parameters whose state stays, as they have float32 masters.
    """
    for parameter in parameters_of(optimizer):
        before = None if id(parameter) in but else dtype_before(parameter)
        if before is not None:
            retype(optimizer, parameter, before, parameter.dtype)


def retyped(value: Any, before: torch.dtype, now: torch.dtype, parameter: Tensor) -> Any:
    """Returns a parameter's state with tensors of type ``before`` cast to ``now``; step counts and scalars stay."""
    known: dict[int, Tensor] = {}  # a state may hold a tensor under two names

    def to_now(tensor: Tensor) -> Tensor:
        is_number = tensor.dim() == 0 and parameter.dim() > 0
        if tensor.dtype is not before or before not in CASTABLE or is_number:
            return tensor
        if id(tensor) not in known:
            known[id(tensor)] = tensor.to(now)
        return known[id(tensor)]

    return cast(value, to_now)


def cast(value: Any, with_type: Callable[[Tensor], Tensor]) -> Any:
    """Returns a parameter's state with its tensors replaced, but the number of steps."""
    if isinstance(value, dict) and "step" in value:
        return {**cast_tensors(value, with_type), "step": value["step"]}  # type: ignore[dict-item]
    return cast_tensors(value, with_type)


def evaluates_first(optimizer: object) -> bool:
    """Returns True if a step calls its closure once, before it changes anything: torch's optimizers except LBFGS."""
    kind = type(optimizer)
    return getattr(torch.optim, kind.__name__, None) is kind and kind is not torch.optim.LBFGS


def has_state(optimizer: torch.optim.Optimizer) -> bool:
    """Returns True if the optimizer has made its state; a first step that skips in its kernel would make state.

    SGD with momentum would even continue from uninitialised memory (torch 2.13).
    """
    # By id: hashing a tensor runs Python, and every step asks this.
    states = dict(zip(map(id, optimizer.state), optimizer.state.values(), strict=True))
    found = [
        states.get(id(parameter))
        for group in optimizer.param_groups
        if not isinstance(optimizer, torch.optim.SGD) or group["momentum"]
        for parameter in group["params"]
        if parameter.grad is not None
    ]
    return all(found) and not any(map(_IS_NONE, itertools.chain.from_iterable(map(_VALUES, found))))


class Snapshot:
    """A copy of an optimizer's parameters, options and state, to restore them later.

    Tensors are restored by value, so they stay the same objects. Objects that cannot be copied, such as a lock, are
    kept as they are.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._values: dict[int, tuple[Tensor, Tensor]] = {}  # by id: the tensor, and a copy
        for parameter in parameters_of(optimizer):
            self._keep(parameter)
        self._groups = [self._copied(_options(group)) for group in optimizer.param_groups]
        self._state = self._copied(dict(state_of(optimizer) or {}))

    @torch.no_grad()
    def restore(self) -> None:
        """Restores parameters, options and state, bit for bit."""
        for tensor, values in self._values.values():
            if tensor.shape == values.shape:
                tensor.copy_(values)
            else:
                tensor.set_(values)  # type: ignore[call-overload]
        for group, options in zip(self._optimizer.param_groups, self._groups, strict=True):
            for name in _options(group).keys() - options.keys():
                del group[name]
            group.update(options)
        state = state_of(self._optimizer)
        if state is not None:
            state.clear()
            state.update(self._state)

    def _keep(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self._values:
            self._values[id(tensor)] = tensor, tensor.detach().clone()
        return tensor

    def _copied(self, value: Any) -> Any:
        """Returns a deep copy that holds the same tensor objects; records their values for `restore`."""
        if isinstance(value, dict):
            copied = copy.copy(value)  # keeps its class
            copied.update({key: self._copied(item) for key, item in value.items()})
            return copied
        cast_tensors(value, self._keep)
        themselves: dict[int, Any] = {key: tensor for key, (tensor, _) in self._values.items()}
        try:
            return copy.deepcopy(value, themselves)
        except Exception:  # noqa: BLE001 - a class may raise anything here
            return value


def state_of(optimizer: Any) -> MutableMapping[Tensor, Any] | None:
    """Returns an optimizer's state by parameter; None if it has none, or another kind."""
    state = getattr(optimizer, "state", None)
    return state if isinstance(state, MutableMapping) else None


def give_up_buckets(optimizer: Any) -> None:
    """Has a `ZeroRedundancyOptimizer` send its parameters to other ranks, not the memory that these had before amp.

    Nothing undoes it: the parameters do not go back to that memory.
    """
    if getattr(optimizer, "parameters_as_bucket_view", False):
        optimizer.parameters_as_bucket_view = False


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}
