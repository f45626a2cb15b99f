"""Exchanges the tensors of parameters and their masters, so that an optimizer steps the masters as its own parameters.

An optimizer's groups, its state and whatever lists its class keeps hold the model's parameters, at all times. While it
steps, each of these objects stands for its master: float32 data, and the master's gradient. Ids, attributes and weak
references belong to the object, and stay. Hooks, the nodes of graphs and DDP's buckets belong to the tensor, and see
nothing of the exchange.

Must not know which parameters have masters, nor when optimizers step.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from ampatch.casting.nested import attributes_of
from ampatch.ledger import PatchLedger
from ampatch.torch_private.tensors import swap_tensor_impl

_ORDINARY = frozenset({Tensor, nn.Parameter})
_NOTHING = contextlib.nullcontext()


class ExchangedMasters(abc.ABC):
    """Masters for which the parameters of one optimizer stand while code of the optimizer's class runs.

    Attributes:
        wanted: False if there are none, ever.
        are_in_place: True while the parameters stand for them.
    """

    wanted = True
    are_in_place = False

    @abc.abstractmethod
    def install(self, ledger: PatchLedger) -> None:
        """Takes the optimizer's parameters, and patches its methods that read or write them."""

    @abc.abstractmethod
    def ids(self) -> Collection[int]:
        """Returns the ids of the parameters that have masters."""

    @abc.abstractmethod
    def on_access(self, tensor: Tensor, data: Tensor | None, *, is_read: bool) -> Tensor | None:
        """Notes an access to a tensor's memory; see `ampatch.weights.untracked_writes.OnAccess`."""

    @abc.abstractmethod
    def make_missing(self) -> None:
        """Has masters for parameters that the optimizer has got, or that were unfrozen, since the last call."""

    @abc.abstractmethod
    def run(self, step: Callable[[Callable[[], object]], Any], is_whole: Callable[[], bool]) -> Any:
        """Calls an optimizer's step on the masters, and returns the result.

        Args:
            step: calls the step; its argument has parameters stand for their masters, and `swap_out` ends that.
            is_whole: tells whether the step must be called once, for all parameters, as with a closure.
        """

    @abc.abstractmethod
    def swap_out(self, *, stepped: bool = True) -> None:
        """Has the parameters that stand for masters be half again, with the masters' values.

        Args:
            stepped: whether the optimizer has stepped, so that masters with gradients count as updated.
        """

    @abc.abstractmethod
    def for_methods(self) -> contextlib.AbstractContextManager[None]:
        """Context for methods of the optimizer's class, which may read and write its parameters: on the masters."""

    def swapped_out(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context for the user's code during a step: it sees half weights, rounded, and may write to them."""
        return self._aside() if self.are_in_place else _NOTHING

    @abc.abstractmethod
    def _aside(self) -> contextlib.AbstractContextManager[None]:
        """Context of `swapped_out`."""

    def _with_masters(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls a method of the optimizer's class on the masters."""
        with self.for_methods():
            return original(*args, **kwargs)


def exchange(parameters: Sequence[Tensor], masters: Sequence[Tensor]) -> None:
    """Exchanges the tensors of each parameter and its master; a second call undoes the first.

    If one pair raises, no pair is exchanged.

    Args:
        parameters: tensors of the model.
        masters: one for each parameter, in its shape.
    """
    done = 0
    try:
        # What torch.utils.swap_tensors rests on. That also exchanges attributes, and refuses parameters that have
        # weak references or belong to a graph.
        for _ in map(swap_tensor_impl, parameters, masters):
            done += 1
    except Exception:  # after Ctrl-C, `done` is not exact
        for parameter, master in zip(parameters[:done], masters[:done], strict=True):
            swap_tensor_impl(parameter, master)
        raise
    if not _ORDINARY.issuperset(map(type, parameters)):
        for parameter, master in zip(parameters, masters, strict=True):
            if type(parameter) not in _ORDINARY:
                _exchange_inner(parameter, master)


@contextlib.contextmanager
def exchanged(pairs: Iterable[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Context in which parameters and masters have changed places; within another such context, back."""
    parameters, masters = unzipped(pairs)
    exchange(parameters, masters)
    try:
        yield
    finally:
        exchange(parameters, masters)


def unzipped(pairs: Iterable[tuple[Tensor, Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the parameters and the masters of pairs of both."""
    pairs = list(pairs)
    return [parameter for parameter, _ in pairs], [master for _, master in pairs]


def _exchange_inner(parameter: Tensor, master: Tensor) -> None:
    """Exchanges the attributes in which a subclass such as DTensor keeps the tensors that it wraps."""
    for name in attributes_of(master):
        one, other = getattr(parameter, name), getattr(master, name)
        setattr(parameter, name, other)
        setattr(master, name, one)
