"""Runs the forward of an adopted model in a *region*, in which amp casts.

At O1 and O4 it is a region of torch.autocast, whose casts amp makes by its lists. So if code asks torch about
autocast, the answer describes amp's casts. Regions of torch.autocast inside change what amp does, and operators with
rules for autocast follow them. With half weights the region is the state `IN_HALF`, which autocast does not show.

Owns the forward that replaces the model's own, and calls of the model's parts from outside of that forward. Must never
cast an argument or a result.
"""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Callable, Set
from typing import Any, Protocol, Self

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling, is_exporting
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.utils.parametrize import ParametrizationList

from ampatch.casting.nested import tensors_in
from ampatch.compilers import trace_calls, traced_within_others
from ampatch.half_types import HALVES
from ampatch.ledger import PatchLedger
from ampatch.native import calls
from ampatch.patching.beside_half_weights import CastingBesideHalf, prepare_mode
from ampatch.patching.replaced_forward import Block, ReplacedForward, give_own_forwards, own_forward
from ampatch.switch import (
    IN_HALF,
    Region,
    State,
    Switch,
    blocks_of,
    casting_to,
    in_graph,
    is_in_half,
    is_in_region,
    is_set_by_autocast,
    state,
)
from ampatch.torch_private.modules import CALL, COMPILED_CALL


class Recorder(Protocol):
    """Notes forward passes."""

    def run(self, module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns ``call(*args, **kwargs)``, the forward of a module."""


class Regions:
    """The regions of a session: around the forwards of its models, and around separate calls of their parts.

    Args:
        switch: switch of the session.
        dtype: half type of the regions.
        kinds: device types whose tensors are cast; the set may grow.
        in_half: True for models with half weights.

    Attributes:
        kinds: the argument.
        in_half: the argument.
        recorder: object that notes the outermost forward passes; None if there is none.
        before_part: function to call before a separate call of a part of a model; None if there is none.
    """

    recorder: Recorder | None = None
    before_part: Callable[[], None] | None = None

    def __init__(self, switch: Switch, dtype: torch.dtype, kinds: Set[str], in_half: bool = False) -> None:
        self._switch, self._dtype, self.kinds, self.in_half = switch, dtype, kinds, in_half
        self._state: State | None = None  # as of the last region
        self._parts: dict[int, weakref.ref[nn.Module]] = {}  # by id, since modules may define equality
        # Deep copies of models. They get their parts after their forwards.
        self._copies: list[weakref.ref[nn.Module]] = []

    def state(self) -> State:
        """Returns the state of a region that begins now."""
        if self.in_half:
            return IN_HALF
        if is_dynamo_compiling():
            return casting_to(self._dtype, self.kinds)
        if self._state is None or len(self.kinds) > self._state[1].count(True):
            self._state = casting_to(self._dtype, self.kinds)
        return self._state

    def is_decided(self) -> bool:
        """Returns True where no region begins: in one, after the session, or where code has turned autocast on."""
        return not self._switch.active or (is_in_half() if self.in_half else is_set_by_autocast(self.kinds))

    def state_of_checkpoint(self, args: tuple[Any, ...]) -> State:
        """Returns the state that a reentrant checkpoint runs and recomputes in, given its arguments.

        Autograd does not record its first run. So outside of regions only its arguments show whether it belongs to a
        model.
        """
        is_alone = torch.is_grad_enabled() and not self.is_decided()
        return self.state() if is_alone and any(each.requires_grad for each in tensors_in(args)) else state()

    def run_forward(self, model: nn.Module, ledger: PatchLedger) -> None:
        """Makes the forward of a model run in a region while the session casts, unless the call is in one already."""
        own = own_forward(model, self._switch) if type(model).forward is not nn.Module.forward else None
        if own is not None and not inspect.isasyncgenfunction(own):
            ledger.set(model, "forward", _ForwardInRegion(model, own, self._switch, self))

    def add(self, model: nn.Module) -> None:
        """Adds the parts of an adopted model, and those that the model gets later."""
        self._take_in(model)
        self._parts.pop(id(model), None)

    def note_copy(self, model: nn.Module) -> None:
        """Adds the parts of a deep copy of a model as soon as the copy has them."""
        self._copies.append(weakref.ref(model))

    def install(self, ledger: PatchLedger) -> None:
        """Makes calls of parts from outside of regions run in a region.

        Replacing the forward of each part would cost time in each call, and when torch.compile traces it.
        """
        ledger.on_undo(register_module_module_registration_hook(self._take_in_later).remove)
        compiled = calls.compiled()
        if compiled is None:
            ledger.set(
                nn.Module, COMPILED_CALL, _Call(self._call_elsewhere, is_in_half if self.in_half else is_in_region)
            )
        else:
            ledger.on_undo(lambda: compiled.call_impl(nn.Module, None, False))
            ledger.set(nn.Module, COMPILED_CALL, compiled.call_impl(nn.Module, self._call_elsewhere, self.in_half))
        trace_calls(ledger, _call_part, lambda: None if self.is_decided() else (self.state(),), self._is_part)

    def _take_in_later(self, parent: nn.Module, _: str, module: nn.Module | None) -> None:
        is_root = isinstance(vars(parent).get("forward"), _ForwardInRegion)
        if module is not None and (is_root or id(parent) in self._parts):
            self._take_in(module)

    def _take_in(self, module: nn.Module) -> None:
        # Reading a parametrized weight is a call, but not work of the model, unless the weight is half. The same is
        # true of what a metric in the model computes.
        made = (each for each in module.modules() if isinstance(each, ParametrizationList) and not self.in_half)
        others = {id(each) for parametrized in made for each in parametrized.modules()}
        for each in module.modules():
            has_own = "forward" in vars(each) or next(each.parameters(), None) is not None  # rules, or weights
            # In scripted modules amp casts nothing.
            if has_own and id(each) not in others and not isinstance(each, torch.jit.ScriptModule):
                self._parts[id(each)] = weakref.ref(each, self._forgetting(id(each)))

    def _forgetting(self, key: int) -> Callable[[object], object]:
        return lambda _: self._parts.pop(key, None)

    def _is_part(self, module: nn.Module) -> bool:
        for copied in tuple(self._copies):
            model = copied()
            if model is None or "_modules" in vars(model):  # no parts while the model is being copied
                self._copies = [other for other in self._copies if other is not copied]
                if model is not None:
                    self.add(model)
        return id(module) in self._parts

    @traced_within_others
    def _call_elsewhere(self, module: nn.Module, held: Callable[..., Any] | None) -> Callable[..., Any] | None:
        """Returns the call of a module outside of regions; None for torch's own. The user has compiled ``held``."""
        if not is_dynamo_compiling():
            give_own_forwards(module)
        if not self._is_part(module) or self.is_decided():
            return held
        if self.before_part is not None and not is_dynamo_compiling():
            self.before_part()
        return _ForwardInRegion(module, getattr(module, CALL) if held is None else held, self._switch, self)


class _Call:
    """The attribute that torch calls instead of `_call_impl`, for every module. In C++ it is `call_impl`."""

    def __init__(self, elsewhere: Callable[[nn.Module, Any], Any], is_inside: Callable[[], bool]) -> None:
        self._elsewhere, self._is_inside = elsewhere, is_inside

    @traced_within_others
    def __get__(self, module: nn.Module | None, _: type | None = None) -> Any:
        if module is None:
            return self
        held = vars(module).get(COMPILED_CALL)
        return held if self._is_inside() else self._elsewhere(module, held)

    def __set__(self, module: nn.Module, value: object) -> None:
        vars(module)[COMPILED_CALL] = value

    def __delete__(self, module: nn.Module) -> None:
        del vars(module)[COMPILED_CALL]


def has_half_weights(module: nn.Module) -> bool:
    """Returns True if the first parameter of a module is half."""
    parameter = next(module.parameters(), None)
    return parameter is not None and parameter.dtype in HALVES


class _ForwardInRegion(ReplacedForward):
    """The forward of an adopted model until its session ends, or one call of a part."""

    def __init__(
        self,
        module: nn.Module,
        own: Callable[..., Any],
        switch: Switch | None = None,
        regions: Regions | None = None,
        in_half: bool = False,
    ) -> None:
        super().__init__(module, own, switch)
        self._regions: Any = regions  # None after unpickling
        self._in_half = in_half if regions is None else regions.in_half
        if self._in_half:
            prepare_mode()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the forward; in a copy with half weights, amp casts even after the session that made them half."""
        switch = self.switch
        if self._in_half and (switch is None or not switch.active) and has_half_weights(self.module):
            with CastingBesideHalf():
                return self.call_own(*args, **kwargs)
        return super().__call__(*args, **kwargs)

    def __reduce__(self) -> Any:
        return type(self), (self.module, self.own, None, None, self._in_half)

    def block(self) -> Block:
        """Returns a region, or a block that changes nothing in a region of other code."""
        if self._regions.is_decided():
            return contextlib.nullcontext()
        wanted = self._regions.state()
        return in_graph(wanted) if is_dynamo_compiling() else Region(wanted)

    @traced_within_others
    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the forward; under Dynamo in plain blocks, inside which graphs may break."""
        if not is_dynamo_compiling() or is_exporting() or self._regions.is_decided():
            recorder = None if is_dynamo_compiling() else self._regions.recorder
            if recorder is not None:
                return recorder.run(self.module, self.in_block, args, kwargs)
            return self.in_block(*args, **kwargs)
        first, second, third, fourth = blocks_of(self._regions.state())
        with first, second, third, fourth:
            return self.call_own(*args, **kwargs)

    def enclose_backward(self, result: object, first: int) -> None:
        """Leaves backward passes as they are: like torch.autocast, a region ends with the forward."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        made = super().__deepcopy__(memo)
        if self._regions is not None:
            self._regions.note_copy(made.module)
        return made


def _call_part(wanted: State, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Calls a part of a model in a region; only torch.compile runs it."""
    if is_exporting():
        with in_graph(wanted):
            return module(*args, **kwargs)
    first, second, third, fourth = blocks_of(wanted)
    with first, second, third, fourth:
        return module(*args, **kwargs)
