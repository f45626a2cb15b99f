"""The parts of an optimizer's parameters, each of which a call of its step updates: so few masters exist at a time.

Owns the gradients of parameters whose turn it is not: optimizers leave out what has none. Must not know masters.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ampatch.weights import optimizer_state

#: torch's optimizers that update each parameter by itself, and leave out those without a gradient.
_ONE_BY_ONE = frozenset(
    getattr(torch.optim, name)
    for name in (
        *("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam", "RAdam", "RMSprop"),
        *("Rprop", "SGD"),
    )
)
#: A part has this share of all elements, and at least so many.
_SHARE, _LEAST = 16, 2**20


def parts_of(optimizer: Any, parameters: Collection[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Returns an optimizer's parameters in parts; one part for optimizers that must see all at once."""
    if type(optimizer) not in _ONE_BY_ONE:
        return [list(parameters)]
    room = max(_LEAST, sum(each.numel() for each in parameters) // _SHARE)
    parts: list[list[nn.Parameter]] = [[]]
    elements = 0
    for each in parameters:
        if each.grad is None:
            continue
        if parts[-1] and elements + each.numel() > room:
            parts.append([])
            elements = 0
        parts[-1].append(each)
        elements += each.numel()
    return parts


class Turns:
    """The gradients of one optimizer while parts of its parameters take turns."""

    def __init__(self) -> None:
        self._hidden: dict[int, Tensor] = {}  # of parameters whose turn it is not, by id

    @contextlib.contextmanager
    def taken(
        self, optimizer: Any, parts: Sequence[list[nn.Parameter]], ids: Collection[int]
    ) -> Iterator[Iterable[list[nn.Parameter]]]:
        """Context with an iterator over parts, in which no parameter of another part has a gradient.

        Args:
            optimizer: any optimizer. Those of its parameters that are in no part get their turn with the first one.
            parts: its parameters in parts.
            ids: ids of the parameters in all parts, and of such as have no gradient.
        """
        if len(parts) == 1:
            yield parts
            return
        given = {id(each): each for each in optimizer_state.parameters_of(optimizer) if each.grad is not None}
        self._hidden = grads = {key: each.grad for key, each in given.items() if each.grad is not None}

        def hide(keys: Iterable[int]) -> None:
            for key in keys:
                given[key].grad = None

        def turns() -> Iterator[list[nn.Parameter]]:
            hide(given.keys() & ids)
            yield parts[0]
            hide(given.keys() - ids)
            yield from parts[1:]

        try:
            yield turns()
        finally:
            self._hidden = {}
            for key, grad in grads.items():  # less those that the optimizer has cleared
                given[key].grad = grad

    def gradients_of(self, parameters: Iterable[Tensor]) -> list[Tensor | None]:
        """Returns the gradients of parameters whose turn it is."""
        return [self._hidden.get(id(parameter), parameter.grad) for parameter in parameters]

    def set_gradient(self, parameter: Tensor, grad: Tensor | None) -> None:
        """Gives a parameter the gradient that the optimizer has edited or cleared, in its own type."""
        before = self._hidden.pop(id(parameter), None)
        if before is not None and grad is not None:  # it has had its turn
            self._hidden[id(parameter)] = grad.to(before.dtype)
        elif before is None:
            parameter.grad = None if grad is None else grad.to(getattr(parameter.grad, "dtype", parameter.dtype))
