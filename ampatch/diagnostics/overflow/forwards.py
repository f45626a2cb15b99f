"""Forward passes, noted so that they can run again: a step that is skipped changes no weight.

Owns what a second run needs: the arguments, the state of autocast and of torch's random generators, and the gradients
that came into the outputs. A note waits for no device. A second run leaves buffers, random states and ``.grad`` as they
were. Must not judge what a second run shows.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward

from ampatch.casting.nested import cast_tensors
from ampatch.diagnostics.random_state import RandomState
from ampatch.diagnostics.recorder.callers import users_frame
from ampatch.diagnostics.recorder.records import Place
from ampatch.diagnostics.recorder.watch import Watch
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
        place: the line of user code that called it.
        arrived: the gradients that came into its outputs, by the number of the backward pass and the output's place.
        is_used: True once a step has used its gradients; then it is dropped when the next forward pass begins.
    """

    __slots__ = (
        *("_call", "_given", "_random", "_state", "_thread", "_versions"),
        *("arrived", "is_used", "module", "place"),
    )

    def __init__(
        self, module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.module = module
        self.arrived: dict[int, dict[int, Tensor]] = {}
        self.is_used = False
        frame = users_frame(sys._getframe(1))
        self.place = None if frame is None else Place(frame.f_code.co_filename, frame.f_lineno)
        given: Any = (args, kwargs)
        tensors = list(_tensors_in(given))
        if any(each.requires_grad for each in tensors):
            given = cast_tensors(given, _apart)
        self._call, self._given = call, given
        self._versions = _versions_of(tensors)
        self._state = state() if is_in_region() or torch._C._is_any_autocast_enabled() else PLAIN
        on_gpus = [each.device for each in tensors if each.is_cuda] if torch.cuda.is_initialized() else ()
        self._random = _random_states(set(on_gpus))
        self._thread = threading.get_ident()

    def follow(self, result: object) -> None:
        """Notes the gradients that come into the outputs from now on."""
        for place, output in enumerate(_tensors_in(result)):
            if output.grad_fn is not None:  # hooks of nodes cost half of what hooks of tensors do
                output.grad_fn.register_prehook(functools.partial(self._note, place, output.output_nr))

    def _note(self, place: int, number: int, gradients: tuple[Tensor | None, ...]) -> None:
        gradient = gradients[number]
        if gradient is not None:
            self.arrived.setdefault(torch._C._current_graph_task_id(), {})[place] = gradient.detach()

    @property
    def obstacle(self) -> str:
        """Why it cannot run again; empty if it can."""
        if threading.get_ident() != self._thread:
            return "it ran in another thread"
        if is_sharded(self.module.parameters()):
            return "its parameters are sharded over ranks"
        if any(isinstance(each, torch.jit.ScriptModule) for each in self.module.modules()):
            return "TorchScript has compiled a part of it"
        is_same = _versions_of(_tensors_in(self._given)) == self._versions
        return "" if is_same else "its arguments were written to since"

    def run_again(self, watch: Watch, factor: float = 1.0) -> None:
        """Runs the forward pass and its backward passes again, watched.

        Args:
            watch: records what runs.
            factor: factor of the gradients that came into the outputs: that of another loss scale.

        Raises:
            Exception: what the second run raises.
        """
        args, kwargs = self._given
        with _unchanged(self.module, self._random), Region(self._state), torch.enable_grad(), watch:
            with watch.inside(self.module):
                outputs = list(_tensors_in(self._call(*args, **kwargs)))
            for gradients in self.arrived.values():
                roots = [outputs[place] for place in gradients]
                incoming = [gradient * factor if factor != 1 else gradient for gradient in gradients.values()]
                leaves = leaves_among(nodes_of(each.grad_fn for each in roots if each.grad_fn is not None))
                # In place of what arrives there: one output may lead to another, whose gradient is noted as well. One
                # that is not finite stays, so that the watch knows where it comes from.
                hooks = [
                    root.register_hook(_replacing(own))
                    for root, own in zip(roots, incoming, strict=True)
                    if bool(own.isfinite().all())
                ]
                found = _gradients(roots, incoming, list(leaves.values()))
                for leaf, gradient in zip(leaves.values(), found, strict=True):
                    if gradient is not None:
                        watch.note_gradient(leaf, gradient, roots)
                for hook in hooks:
                    hook.remove()


def _replacing(own: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda _: own


def _gradients(roots: list[Tensor], incoming: list[Tensor], leaves: list[Tensor]) -> list[Tensor | None]:
    """Returns the gradients of leaves, and leaves ``.grad`` as it is."""
    if not leaves:
        return []
    try:
        return list(torch.autograd.grad(roots, leaves, incoming, retain_graph=True, allow_unused=True))
    except RuntimeError as error:
        if "use_reentrant" not in str(error):
            raise
    # A reentrant checkpoint takes no backward pass but one that accumulates.
    before = [leaf.grad for leaf in leaves]
    try:
        for leaf in leaves:
            leaf.grad = None
        _engine_run_backward(
            tuple(roots), tuple(incoming), True, False, (), allow_unreachable=True, accumulate_grad=True
        )
        return [leaf.grad for leaf in leaves]
    finally:
        for leaf, grad in zip(leaves, before, strict=True):
            leaf.grad = grad


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """Yields the tensors in what a model gets or returns: in sequences, mappings and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors_in(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _tensors_in(getattr(value, field.name, None))


def _versions_of(tensors: Iterable[Tensor]) -> list[int]:
    return [0 if each.is_inference() else each._version for each in tensors]


def _apart(tensor: Tensor) -> Tensor:
    """Returns a tensor without its graph, which the first backward pass frees."""
    return tensor.detach().requires_grad_() if tensor.requires_grad else tensor


def _random_states(devices: set[torch.device]) -> _Random:
    return [(None, torch.get_rng_state()), *((device, torch.cuda.get_rng_state(device)) for device in devices)]


@contextlib.contextmanager
def _unchanged(module: nn.Module, noted: _Random) -> Iterator[None]:
    """Context that begins with noted random states, and after which random states and buffers are as before.

    The forward gets copies of the buffers, and of small frozen parameters, which it may write to.
    """
    before = RandomState()
    tables = [(each._buffers, dict(each._buffers)) for each in module.modules()]
    frozen = [each for each in module.parameters() if not each.requires_grad and each.numel() <= 2**20]
    kept = [each.detach().clone() for each in frozen]
    versions = _versions_of(frozen)
    copies = {id(each): each.detach().clone() for each in module.buffers()}
    for table, buffers in tables:
        table.update({name: each if each is None else copies[id(each)] for name, each in buffers.items()})
    for device, values in noted:
        if device is None:
            torch.set_rng_state(values)
        else:
            torch.cuda.set_rng_state(values, device)
    try:
        yield
    finally:
        before.restore()
        for table, buffers in tables:
            table.clear()
            table.update(buffers)
        if _versions_of(frozen) != versions:
            with torch.no_grad():
                for parameter, value in zip(frozen, kept, strict=True):
                    parameter.copy_(value)
