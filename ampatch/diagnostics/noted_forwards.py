"""Forward passes, noted so that they can run again: a step that is skipped changes no weight.

Owns what a second run needs: the arguments, the state of autocast and of the random generators, and the gradients that
came into the outputs. A note keeps no graph, and waits for no device. A second run leaves buffers and random states as
they were, and writes no ``.grad``. Must not judge what a second run shows.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ampatch.casting.nested import cast_tensors, tensors_in
from ampatch.diagnostics.operands import versions_of
from ampatch.diagnostics.watch import Watch
from ampatch.distributed import is_sharded
from ampatch.graph_nodes import leaves_among, nodes_of
from ampatch.switch import PLAIN, Region, is_in_region, state

_Random = list[tuple[torch.device | None, Tensor]]


class NotedForward:
    """One forward pass of an adopted model.

    Args:
        module: the model, or a part of it that was called alone.
        call: runs its forward, without the hooks around it.
        args: positional arguments.
        kwargs: keyword arguments.

    Attributes:
        module: as given.
        arrived: the gradients that came into its outputs, by the number of the backward pass and the output's place.
    """

    __slots__ = ("_call", "_given", "_random", "_state", "_thread", "_versions", "arrived", "module")

    def __init__(
        self, module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.module = module
        self.arrived: dict[int, dict[int, Tensor]] = {}
        self._call, self._given = call, (args, kwargs)
        self._versions = versions_of(self._given)
        self._state = state() if is_in_region() or torch._C._is_any_autocast_enabled() else PLAIN
        on_gpus = tensors_in(self._given) if torch.cuda.is_initialized() else ()
        self._random = _random_states({each.device for each in on_gpus if each.is_cuda})
        self._thread = threading.get_ident()

    def follow(self, result: object) -> None:
        """Notes the gradients that come into the outputs from now on."""
        for place, output in enumerate(tensors_in(result)):
            if output.grad_fn is not None:
                output.register_hook(functools.partial(self._note, place))

    def _note(self, place: int, gradient: Tensor) -> None:
        self.arrived.setdefault(torch._C._current_graph_task_id(), {})[place] = gradient.detach()

    @property
    def obstacle(self) -> str:
        """Why it cannot run again; empty if it can."""
        if threading.get_ident() != self._thread:
            return "it ran in another thread"
        if is_sharded(self.module.parameters()):
            return "its parameters are sharded over ranks"
        return "its arguments were written to since" if versions_of(self._given) != self._versions else ""

    def run_again(self, watch: Watch, factor: float = 1.0) -> None:
        """Runs the forward pass and its backward passes again, watched.

        Args:
            watch: records what runs.
            factor: factor of the gradients that came into the outputs: that of another loss scale.

        Raises:
            Exception: what the second run raises.
        """
        given: Any = cast_tensors(self._given, _apart)
        args, kwargs = given
        with _unchanged(self.module, self._random), Region(self._state), torch.enable_grad(), watch:
            with watch.inside(self.module):
                outputs = list(tensors_in(self._call(*args, **kwargs)))
            for gradients in self.arrived.values():
                roots = [outputs[place] for place in gradients]
                incoming = [gradient * factor if factor != 1 else gradient for gradient in gradients.values()]
                leaves = leaves_among(nodes_of(each.grad_fn for each in roots if each.grad_fn is not None))
                found = torch.autograd.grad(
                    roots, list(leaves.values()), incoming, retain_graph=True, allow_unused=True
                )
                for leaf, gradient in zip(leaves.values(), found, strict=True):
                    if gradient is not None:
                        watch.note_gradient(leaf, gradient, roots)


def _apart(tensor: Tensor) -> Tensor:
    """Returns a tensor without its graph, which the first backward pass has freed."""
    return tensor.detach().requires_grad_() if tensor.requires_grad else tensor


def _random_states(devices: set[torch.device]) -> _Random:
    return [(None, torch.get_rng_state()), *((device, torch.cuda.get_rng_state(device)) for device in devices)]


def _set_random_states(states: _Random) -> None:
    for device, values in states:
        if device is None:
            torch.set_rng_state(values)
        else:
            torch.cuda.set_rng_state(values, device)


@contextlib.contextmanager
def _unchanged(module: nn.Module, random: _Random) -> Iterator[None]:
    """Context that begins with the given random states, and after which random states and buffers are as before."""
    before = _random_states({device for device, _ in random if device is not None})
    tables = [(each._buffers, dict(each._buffers)) for each in module.modules()]
    copies = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    _set_random_states(random)
    try:
        yield
    finally:
        _set_random_states(before)
        for table, buffers in tables:
            table.update(buffers)
        with torch.no_grad():
            for buffer, values in copies:
                buffer.copy_(values)
