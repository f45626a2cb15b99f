"""Exchanges the tensors of parameters and their masters, so that an optimizer steps the masters as its own parameters.

An optimizer's groups, its state and the lists that its class keeps hold the model's parameters, at all times. While it
steps, each of these objects stands for its master: float32 data, and the master's gradient. Ids, attributes and weak
references belong to the object, and stay. Hooks, the nodes of graphs and DDP's buckets belong to the tensor, and see
nothing of the exchange.

Owns also what all kinds of masters share: which parameters have them, and the optimizer's methods that see masters.
Must not know when optimizers step.
"""

from __future__ import annotations

import abc
import contextlib
import copy
import functools
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from ampatch.casting.nested import attributes_of
from ampatch.errors import UsageError
from ampatch.half_types import HALVES
from ampatch.ledger import PatchLedger
from ampatch.torch_private.tensors import swap_tensor_impl
from ampatch.weights import copies, optimizer_state

_ORDINARY = frozenset({Tensor, nn.Parameter})
_NOTHING = contextlib.nullcontext()
# Methods of optimizers that amp replaces by others, or that touch no parameter.
_KNOWN_METHODS = frozenset({"step", "zero_grad", "add_param_group", "state_dict"})


class Releases(Protocol):
    """Records which optimizer owns a half parameter; see `ampatch.weights.conversion.Conversion`."""

    def release(self, parameter: nn.Parameter) -> torch.dtype:
        """Ends the ownership; returns the type that the parameter had before."""


class ExchangedMasters(abc.ABC):
    """Masters for which the parameters of one optimizer stand while code of the optimizer's class runs.

    Args:
        optimizer: the user's optimizer; held weakly.
        owners: records that the parameters have masters here.
        name_of: function that returns the name of a model's parameter, for messages.

    Attributes:
        wanted: False if there are none, ever.
        are_in_place: True while the parameters stand for them.
        have_cleared: True after a step, which clears gradients, until user code clears them as well.
        state_type: type of the optimizer's float32 state between steps, if it is not float32 then.
        name_of: as given.
    """

    wanted = True
    are_in_place = have_cleared = False
    state_type = torch.float32

    def __init__(self, optimizer: Any, owners: Releases, name_of: Callable[[Tensor], str]) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._owners = owners
        self.name_of = name_of
        self._known: dict[int, nn.Parameter] = {}  # the parameters that have masters, by id
        self._state: object = None  # the optimizer's, when all of it had the right type

    def install(self, ledger: PatchLedger) -> None:
        """Takes the optimizer's parameters, and patches its methods that read or write them.

        Raises:
            UsageError: a parameter is in two optimizers.
        """
        optimizer = self._optimizer()
        assert optimizer is not None
        ledger.on_undo(self._forget, optimizer)
        self.make_missing()
        replace_method(ledger, optimizer, "zero_grad", self._zero_grad)
        for name in own_methods(optimizer):
            replace_method(ledger, optimizer, name, self.run_method)
        if isinstance(optimizer, torch.optim.Optimizer):
            replace_method(ledger, optimizer, "load_state_dict", self._with_masters)
            replace_method(ledger, optimizer, "__getstate__", self._getstate)

    def _forget(self) -> None:
        """Forgets the masters; `Conversion.restore` gives their values back to the parameters."""
        optimizer = self._optimizer()
        for parameter in self._known.values():
            before = self._owners.release(parameter)
            if optimizer is not None:
                optimizer_state.retype(optimizer, parameter, self.state_type, torch.float32)
                optimizer_state.retype(optimizer, parameter, torch.float32, before)
        self._known.clear()

    def parameters(self) -> Collection[nn.Parameter]:
        """Returns the parameters that have masters."""
        return self._known.values()

    def ids(self) -> Collection[int]:
        """Returns the ids of the parameters that have masters."""
        return self._known.keys()

    def on_access(self, tensor: Tensor, data: Tensor | None, *, is_read: bool) -> Tensor | None:  # noqa: ARG002
        """Notes an access to a tensor's memory, if masters last; see `ampatch.weights.untracked_writes.OnAccess`."""
        return None

    @abc.abstractmethod
    def make_missing(self) -> None:
        """Has masters for parameters that the optimizer has got, or that were unfrozen, since the last call."""

    def _without_master(self, given: Iterable[Tensor]) -> list[nn.Parameter]:
        """Returns those of the optimizer's parameters that are to get masters, each once: trained half ones."""
        new = {id(each): each for each in given if id(each) not in self._known and each.dtype in HALVES}
        return [each for each in new.values() if each.requires_grad and isinstance(each, nn.Parameter)]

    def _note_state(self) -> bool:
        """Records the optimizer's state; returns True if it is another object than before, and so of any types."""
        before, self._state = self._state, getattr(self._optimizer(), "state", None)
        return self._state is not before

    def _widen_state(self) -> None:
        """Makes half state float32: of parameters that came half, or if it was loaded past amp."""
        optimizer = self._optimizer()
        if self._note_state():
            for parameter in self._known.values():
                optimizer_state.retype(optimizer, parameter, parameter.dtype, torch.float32)

    @abc.abstractmethod
    def run(self, step: Callable[[Callable[[], object]], Any], is_whole: Callable[[], bool]) -> Any:
        """Calls an optimizer's step on the masters, and returns the result.

        Args:
            step: calls the step; its argument has parameters stand for their masters, until the call ends.
            is_whole: tells whether the step must be called once, for all parameters, as with a closure.
        """

    @abc.abstractmethod
    def swap_in(self) -> None:
        """Has all parameters stand for their masters."""

    @abc.abstractmethod
    def swap_out(self, *, stepped: bool = True) -> None:
        """Has the parameters that stand for masters be half again, with the masters' values.

        Args:
            stepped: whether the optimizer has stepped, so that masters with gradients count as updated.
        """

    @contextlib.contextmanager
    def for_methods(self) -> Iterator[None]:
        """Context for methods of the optimizer's class, which may read and write its parameters: on the masters.

        Raises:
            UsageError: a backward pass in the method reaches the half weights of a forward before it.
        """
        if self.are_in_place:
            yield
            return
        self._prepare()
        with refusing_backward(self._known.values(), self._optimizer()):
            try:
                self.swap_in()
                yield
            finally:
                self.swap_out(stepped=False)

    @abc.abstractmethod
    def _prepare(self) -> None:
        """Has missing masters, and takes what user code has written to parameters and gradients since the last step."""

    def swapped_out(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context for the user's code during a step: it sees half weights, rounded, and may write to them."""
        return self._aside() if self.are_in_place else _NOTHING

    @abc.abstractmethod
    def _aside(self) -> contextlib.AbstractContextManager[None]:
        """Context of `swapped_out`."""

    # Patched methods of the optimizer

    def _zero_grad(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.have_cleared = False
        with self.swapped_out():
            return original(*args, **kwargs)

    def _with_masters(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls a method of the optimizer's class on the masters."""
        with self.for_methods():
            return original(*args, **kwargs)

    #: Calls a public method that the optimizer's class adds to torch's.
    run_method = _with_masters

    def _getstate(self, original: Callable[..., Any]) -> Any:
        """Returns the state for a copy, whose parameters are float32; or for a pickle, whose are half."""
        state, is_copied = dict(original()), copies.is_copying()
        state["state"] = states = copy.copy(state["state"])  # keeps its class: torch's optimizers use a defaultdict
        for parameter in self._known.values():
            if parameter in states:
                before, now = (self.state_type, torch.float32) if is_copied else (torch.float32, parameter.dtype)
                states[parameter] = optimizer_state.retyped(states[parameter], before, now, parameter)
        return state


@contextlib.contextmanager
def refusing_backward(parameters: Iterable[Tensor], optimizer: object) -> Iterator[None]:
    """Context for methods of an optimizer that stand for masters: raises if a backward pass reaches half parameters.

    Raises:
        UsageError: in the backward pass, before the half parameters get gradients.
    """
    kind = type(optimizer).__name__

    def refuse(_: Tensor) -> None:
        raise UsageError(
            f"a method of this {kind} runs a backward pass, as optimizers do that update weights within it. The "
            "gradients belong to half weights, and the optimizer has float32 masters meanwhile, which get none. "
            f"Use {kind} without masters, as at opt_level='O1' or 'O4'; or call backward() outside of its methods."
        )

    trained = [each for each in parameters if each.requires_grad]
    hook = register_multi_grad_hook(trained, refuse, mode="any") if trained else None
    try:
        yield
    finally:
        if hook is not None:
            hook.remove()


def replace_method(ledger: PatchLedger, optimizer: Any, name: str, replacement: Callable[..., Any]) -> None:
    """Replaces a method of an optimizer on the object; ``replacement`` gets the original, then its arguments."""
    original, reference = getattr(optimizer, name), weakref.ref(optimizer)

    @functools.wraps(original)
    def method(me: Any, *args: Any, **kwargs: Any) -> Any:
        if me is not reference():  # `me` is a deep copy, of an optimizer whose class copies every attribute
            return getattr(type(me), name)(me, *args, **kwargs)
        return replacement(original, *args, **kwargs)

    method.__name__ = name
    ledger.set(optimizer, name, types.MethodType(method, optimizer))


def own_methods(optimizer: object) -> list[str]:
    """Returns the names of public methods that classes other than torch's give an optimizer, but known ones."""
    methods = {
        name: value
        for kind in reversed(type(optimizer).__mro__)
        for name, value in vars(kind).items()
        if isinstance(value, types.FunctionType) and kind.__module__.partition(".")[0] != "torch"
    }
    return [name for name in methods if not name.startswith("_") and name not in _KNOWN_METHODS]


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


def note_lost_graph(error: RuntimeError) -> None:
    """Adds a note to an error of a step on masters that differentiates gradients again."""
    if "grad_fn" in str(error):
        error.add_note(
            "ampatch: this optimizer steps float32 masters, and their gradients have no graph, even after "
            "backward(create_graph=True). An optimizer that differentiates gradients again, such as Adahessian, needs "
            "weights that are float32: type opt_level='O1' or 'O4', and leave MixedPrecision out."
        )


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
