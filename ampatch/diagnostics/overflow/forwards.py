"""Forward passes, noted so that they can run again: a step that is skipped changes no weight.

Owns what a second run needs: the arguments, the state of autocast and of torch's random generators, and the gradients
that came into the outputs. A note waits for no device. A second run takes copies of the model and of its arguments, and
sets random states back. Must not judge what a second run shows.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import math
import sys
import threading
import weakref
from collections import UserDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ampatch.casting import nested
from ampatch.diagnostics.process_state import RandomState
from ampatch.diagnostics.recorder.callers import users_frame
from ampatch.diagnostics.recorder.operands import versions_of
from ampatch.diagnostics.recorder.recorder import paused
from ampatch.diagnostics.recorder.records import Place
from ampatch.diagnostics.recorder.watch import Watch
from ampatch.distributed import is_sharded
from ampatch.graph_nodes import leaves_among, nodes_of
from ampatch.switch import PLAIN, Region, State, is_in_region, state
from ampatch.torch_private.autograd import current_graph_task_id, engine_run_backward, sequence_number
from ampatch.torch_private.modes import is_any_autocast_enabled
from ampatch.torch_private.modules import HOOKS_AROUND_PASSES
from ampatch.tracing import is_batched
from ampatch.weights.conversion_plan import matches

#: The states of random generators, by the name of the device; that of the CPU's has None.
Random = list[tuple[str | None, Tensor]]


@dataclass(slots=True, weakref_slot=True, eq=False)
class NotedForward:
    """One forward pass of an adopted model.

    Attributes:
        module: the model, or a part of it that was called alone.
        call: runs its forward, without the hooks around it.
        given: its arguments and keyword arguments, without graphs.
        random: the states of torch's random generators when it began.
        state: the state of autocast then.
        place: the line of user code that called it.
        outputs: the numbers of the nodes that made its outputs.
        arrived: the gradients that came into its outputs, by the number of the backward pass and the output's place.
    """

    module: nn.Module
    call: Callable[..., Any]
    given: tuple[Any, Any]
    random: Random
    state: State
    place: Place | None = None
    outputs: list[int] = field(default_factory=list)
    arrived: dict[int, dict[int, Tensor]] = field(default_factory=dict)
    _versions: tuple[int, ...] = field(init=False)
    _thread: int = field(default_factory=threading.get_ident, init=False)

    def __post_init__(self) -> None:
        self._versions = versions_of(tensors_in(self.given))

    @classmethod
    def begun(
        cls, module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> NotedForward:
        """Notes a forward pass that begins now."""
        given: Any = (args, kwargs)
        random: Random = [(None, torch.default_generator.get_state())]
        if torch.cuda.is_initialized():
            on_gpus = {str(each.device) for each in tensors_in(given) if each.is_cuda}
            random += [(device, torch.cuda.get_rng_state(device)) for device in on_gpus]
        if any(each.requires_grad for each in tensors_in(given)):
            # Without their graphs, which the first backward pass frees.
            given = nested.cast_tensors(
                given, lambda each: each.detach().requires_grad_() if each.requires_grad else each
            )
        before = state() if is_any_autocast_enabled() or is_in_region() else PLAIN
        return cls(module, call, given, random, before, Place.of(users_frame(sys._getframe(2))))

    def follow(self, result: object) -> None:
        """Notes the gradients that come into the outputs from now on."""
        for place, output in enumerate(tensors_in(result)):
            node: Any = output.grad_fn
            if node is not None:  # hooks of nodes cost half of what hooks of tensors do
                node.register_prehook(functools.partial(_note, weakref.ref(self), place, output.output_nr))
                self.outputs.append(sequence_number(node))

    @property
    def has_lost_gradients(self) -> bool:
        """True if a gradient that came into an output is not finite; waits for the device."""
        return not all(bool(each.isfinite().all()) for given in self.arrived.values() for each in given.values())

    @property
    def hooked(self) -> list[str]:
        """Names of the submodules whose hooks run again with it."""
        named = self.module.named_modules()
        return [name for name, each in named if name and any(getattr(each, table) for table in HOOKS_AROUND_PASSES)]

    @property
    def obstacle(self) -> str:
        """Why it cannot run again; empty if it can."""
        if threading.get_ident() != self._thread:
            return "it ran in another thread"
        if is_sharded(self.module.parameters()):
            return "its parameters are sharded over ranks"
        if any(isinstance(each, torch.jit.ScriptModule) for each in self.module.modules()):
            return "TorchScript has compiled a part of it"
        is_same = versions_of(tensors_in(self.given)) == self._versions
        return "" if is_same else "its arguments were written to since"

    def decorate(
        self, pattern: str, names: Mapping[int, str], decorator: Callable[[Any], Any], copied: nn.Module
    ) -> None:
        """Decorates in a copy the forwards of submodules whose names for the user, by the module's id, match."""
        for name, each in self.module.named_modules() if pattern else ():
            if name and matches(pattern, names.get(id(each), ""), each):
                part = copied.get_submodule(name)
                part.forward = decorator(part.forward)

    def run_again(
        self,
        watch: Watch | None,
        factor: float = 1.0,
        *,
        replaces: Callable[[Tensor], Tensor] = lambda gradient: gradient,
        state: State | None = None,
        prepare: Callable[[nn.Module], None] = lambda _: None,
    ) -> SecondRun:
        """Runs the forward pass and its backward passes again, on copies of the model and of its arguments.

        Args:
            watch: records what runs; None: nothing does, and compiled code runs compiled.
            factor: factor of the gradients that came into the outputs: that of another loss scale.
            replaces: returns the gradients for the backward passes to begin with in place of those that came.
            state: a state of autocast in place of the one that was noted.
            prepare: changes the copy of the model before it runs.

        Raises:
            Exception: what the second run raises, or the copy of the model.
        """
        run = SecondRun(self)
        prepare(run.module)
        args, kwargs = run.given
        with contextlib.ExitStack() as stack:
            stack.callback(RandomState().restore)
            _draw_again(self.random)
            region = Region(self.state if state is None else state)
            for each in (region, torch.enable_grad(), contextlib.redirect_stdout(io.StringIO())):
                stack.enter_context(each)
            if watch is not None:
                stack.enter_context(watch)
            is_told = watch is None or self.call is self.module  # by the hooks around it
            with contextlib.nullcontext() if is_told else watch.inside(run.module):  # type: ignore[union-attr]
                outputs = tensors_in(run.call(*args, **kwargs))
            for gradients in self.arrived.values():
                roots = [outputs[place] for place in gradients]
                # At another opt level the outputs may have another type.
                incoming = [replaces(each).to(root) for each, root in zip(gradients.values(), roots, strict=True)]
                incoming = [each * factor if factor != 1 else each for each in incoming]
                leaves = leaves_among(nodes_of(each.grad_fn for each in roots if each.grad_fn is not None))
                # In place of what arrives there: one output may lead to another, whose gradient is noted as well. One
                # that is not finite stays, so that the watch knows where it comes from.
                with paused():
                    finite = [bool(own.isfinite().all()) for own in incoming]
                pairs = zip(roots, incoming, finite, strict=True)
                hooks = [root.register_hook(lambda _, own=own: own) for root, own, is_known in pairs if is_known]
                found = _gradients(roots, incoming, list(leaves.values()))
                for leaf, gradient in zip(leaves.values(), found, strict=True):
                    if gradient is not None and watch is not None:
                        watch.note_gradient(leaf, gradient, roots)
                    elif gradient is not None:
                        run.is_finite &= bool(gradient.isfinite().all())
                for hook in hooks:
                    hook.remove()
                run.is_finite &= watch is not None or all(bool((each < math.inf).all()) for each in roots)
        return run


def _draw_again(noted: Random) -> None:
    """Sets torch's random generators to noted states; those of a GPU only where there is one."""
    for device, values in noted:
        if device is None:
            torch.set_rng_state(values)
        elif torch.cuda.is_available():
            torch.cuda.set_rng_state(values, device)


def _note(reference: weakref.ref[NotedForward], place: int, number: int, gradients: tuple[Tensor | None, ...]) -> None:
    # The graph, which a loss may keep for long, keeps no arguments and gradients.
    noted, gradient = reference(), gradients[number]
    if noted is not None and gradient is not None and not is_batched(gradient):
        # Not of another tensor with its memory: a leaf may get this very gradient, which a reference has autograd copy.
        without_graph = gradient.detach() if gradient.requires_grad else gradient
        noted.arrived.setdefault(current_graph_task_id(), {})[place] = without_graph


class SecondRun:
    """Copies of a model and its arguments, which one second run uses up.

    Args:
        noted: the forward pass.

    Attributes:
        module: the copy of the model.
        call: runs its forward.
        given: the copies of the arguments.
        originals: what the copies are made of, modules and parameters, by the id of the copy.
        is_finite: True if all gradients and outputs are finite, -inf of masks aside; not looked at under a watch.
    """

    def __init__(self, noted: NotedForward) -> None:
        self.is_finite = True
        originals = [*noted.module.parameters(), *noted.module.buffers(), *tensors_in(noted.given)]
        # Made here, since at O2 deep copies of half weights are float32.
        memo: dict[int, Any] = {id(each): _copied(each) for each in originals}
        with torch.no_grad():
            self.call, self.given = copy.deepcopy((noted.call, noted.given), memo)
        self.module: nn.Module = memo[id(noted.module)]
        known = (*noted.module.modules(), *noted.module.parameters())
        self.originals: dict[int, Any] = {id(memo[id(each)]): each for each in known if id(each) in memo}


def _copied(tensor: Tensor) -> Tensor:
    made = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def stand_in(loss_scale: float) -> Callable[[Tensor], Tensor]:
    """Returns a function that returns a gradient, or that of the output's mean in place of one that is not finite."""

    def finite(gradient: Tensor) -> Tensor:
        if bool(gradient.isfinite().all()):
            return gradient
        return torch.full_like(gradient, min(loss_scale / gradient.numel(), torch.finfo(torch.float16).max))

    return finite


def _gradients(roots: list[Tensor], incoming: list[Tensor], leaves: list[Tensor]) -> list[Tensor | None]:
    """Returns the gradients of leaves, which are copies."""
    if not leaves:
        return []
    try:
        return list(torch.autograd.grad(roots, leaves, incoming, retain_graph=True, allow_unused=True))
    except RuntimeError as error:
        if "use_reentrant" not in str(error):
            raise
    # A reentrant checkpoint takes no backward pass but one that accumulates.
    for leaf in leaves:
        leaf.grad = None
    engine_run_backward(tuple(roots), tuple(incoming), True, False, (), allow_unreachable=True, accumulate_grad=True)
    return [leaf.grad for leaf in leaves]


def tensors_in(value: Any) -> list[Tensor]:
    """Returns the tensors in what a model gets or returns, in sequences, mappings and dataclasses: outer ones first."""
    found: list[Tensor] = []
    waiting, opened = [value], set()
    for each in waiting:  # it grows meanwhile
        if isinstance(each, Tensor):
            found.append(each)
        elif type(each) in nested.PLAIN or id(each) in opened:  # a value may hold itself
            continue
        elif isinstance(each, (list, tuple)):
            waiting += each
        elif isinstance(each, (dict, UserDict)):  # other mappings may compute their values
            waiting += each.values()
        elif is_dataclass(each) and not isinstance(each, type):
            waiting += [getattr(each, known.name, None) for known in fields(each)]
        opened.add(id(each))
    return found
