"""Exchanges the tensors of parameters and their masters, so that an optimizer steps the masters as its own parameters.

An optimizer's groups, its state and whatever lists its class keeps hold the model's parameters, at all times. While it
steps, each of these objects stands for its master: float32 data, and the master's gradient. Ids, attributes and weak
references belong to the object, and stay. Hooks, the nodes of graphs and DDP's buckets belong to the tensor, and see
nothing of the exchange.

Must not know which parameters have masters, nor when optimizers step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor, nn

from ampatch.casting.nested import attributes_of
from ampatch.torch_private.tensors import swap_tensor_impl

_ORDINARY = frozenset({Tensor, nn.Parameter})


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
