"""Modules that compute in float32 although torch's functions are patched: ``keep_fp32`` at O1 and O4.

Owns the forward that replaces a module's own: it casts half arguments to float32, and runs with casts off. A hook could
not do that: a compiler cannot enter a block in one hook and leave it in another. Must never cast a result: functions
outside of the module cast it by their own rules.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.autograd import Function
from torch.autograd.function import BackwardCFunction
from torch.compiler import is_dynamo_compiling

from ampatch.casting import write_back
from ampatch.casting.nested import tensors_in
from ampatch.errors import OptionError
from ampatch.ledger import PatchLedger
from ampatch.opt_levels import HALVES
from ampatch.switch import Switch, WithoutCasts

# nn.DataParallel calls this method of each module. The replica that it returns has all attributes of the module.
_REPLICATE = "_replicate_for_data_parallel"


def keep_in_float32(modules: Mapping[nn.Module, str], ledger: PatchLedger, switch: Switch) -> None:
    """Makes modules compute in float32 while the session casts.

    Args:
        modules: modules that have a forward, with their names; those that this session keeps already stay so.
        ledger: records the changes.
        switch: of the session.

    Raises:
        OptionError: TorchScript has compiled one of them, or its weights are half.
    """
    for module, name in modules.items():
        before = vars(module).get("forward")
        if not isinstance(before, _ForwardInFloat32) or not before.is_of(switch):
            _check(module, name)
            _restore(module)  # a copy from a session that has ended, or an unpickled module, casts nothing
            forward = _ForwardInFloat32(module, module.forward, switch)
            ledger.set(module, "forward", forward)
            ledger.set(module, _REPLICATE, forward.replicate)


def without_kept(copied: nn.Module) -> None:
    """Gives the modules of a deep copy their own forwards back."""
    for module in copied.modules():
        _restore(module)


def _restore(module: nn.Module) -> None:
    """Gives a module its own forward back, unless it has that."""
    forward = vars(module).get("forward")
    if isinstance(forward, _ForwardInFloat32):
        del module.forward
        vars(module).pop(_REPLICATE, None)
        if module.forward != forward.own:  # the user had replaced it
            module.forward = forward.own


def _check(module: nn.Module, name: str) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        raise OptionError(
            f"keep_fp32 matches {name!r}, which TorchScript has compiled: amp casts nothing in it, nor for it. Use the "
            "Python module that it was compiled from."
        )
    half = next((each for each, parameter in module.named_parameters() if parameter.dtype in HALVES), None)
    if half is not None:
        raise OptionError(
            f"keep_fp32 matches {name!r}, whose {half!r} is half, and this opt level leaves weights as they are. "
            f"Convert it first: model.get_submodule({name!r}).float()."
        )


class _ForwardInFloat32:
    """The forward of a module that computes in float32 until its session ends.

    A deep copy of the module has one of its own, of the same session. A pickled one casts nothing.

    Attributes:
        own: the forward that it replaces.
    """

    def __init__(self, module: nn.Module, own: Callable[..., Any], switch: Switch | None) -> None:
        functools.update_wrapper(self, own)
        self._module, self.own, self._switch = module, own, switch

    def __deepcopy__(self, memo: dict[int, Any]) -> _ForwardInFloat32:
        return _ForwardInFloat32(copy.deepcopy(self._module, memo), copy.deepcopy(self.own, memo), self._switch)

    def __reduce__(self) -> Any:
        return _ForwardInFloat32, (self._module, self.own, None)

    def is_of(self, switch: Switch) -> bool:
        """Returns True if the module computes in float32 while the session of this switch casts."""
        return self._switch is switch

    def replicate(self) -> nn.Module:
        """Returns a replica of the module for ``nn.DataParallel``, whose forward uses the replica's own weights."""
        module, own = self._module, self.own
        replica: nn.Module = getattr(type(module), _REPLICATE)(module)
        if getattr(own, "__self__", None) is module:
            own = types.MethodType(own.__func__, replica)  # type: ignore[attr-defined]
        forward = _ForwardInFloat32(replica, own, self._switch)
        replica.forward = forward
        setattr(replica, _REPLICATE, forward.replicate)
        return replica

    @property
    def __code__(self) -> Any:  # torch.export reads the module's place in the source from it
        return self.own.__code__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        switch = self._switch
        if switch is None or not switch.active:
            return self.own(*args, **kwargs)
        first = None if is_dynamo_compiling() else _next_number()
        result = write_back.call_in_float32(self._module, self._without_casts, args, kwargs)
        if first is not None and _next_number() != first:
            _keep_backward(result, first)
        return result

    def _without_casts(self, *args: Any, **kwargs: Any) -> Any:
        with self._switch.disabled():  # type: ignore[union-attr]
            return self.own(*args, **kwargs)


def _next_number() -> int:
    """Returns the number that autograd gives to the next node of this thread."""
    number: int = torch._C._autograd._get_sequence_nr()
    return number


def _keep_backward(result: object, first: int) -> None:
    """Turns casts off in the backward passes of the user's functions in a graph.

    torch's own nodes run in C++, which no cast list reaches.

    Args:
        result: what the forward returned, with the graph.
        first: number of the first node of that forward; earlier ones belong to code around it.
    """
    waiting = [tensor.grad_fn for tensor in tensors_in(result) if tensor.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node: Any = waiting.pop()
        if node._sequence_nr() < first:
            continue
        if isinstance(node, BackwardCFunction):
            node._forward_cls = _WithoutCastsInBackward(node._forward_cls)  # type: ignore[attr-defined]
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                waiting.append(below)


class _WithoutCastsInBackward:
    """A user's `torch.autograd.Function`, for one node of a graph, with casts off in its backward pass."""

    def __init__(self, function: type[Function]) -> None:
        self._function = function
        for name in ("backward", "vjp"):
            method = getattr(function, name)
            # torch compares both with those of the base class, to see which one the user wrote.
            setattr(self, name, method if method is getattr(Function, name) else WithoutCasts()(method))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)
