"""Replaces a module's forward by one that runs the original, and its part of a backward pass, under other casts.

Owns what all such forwards share: copies, pickles, generators and the backward passes of the user's functions. Hooks
could not do this, because a compiler cannot enter a block in one hook and leave it in another. Must not know which
casts apply.
"""

from __future__ import annotations

import copy
import copyreg
import functools
import inspect
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Self

import torch
from torch import nn
from torch.autograd import Function
from torch.autograd.function import BackwardCFunction
from torch.compiler import is_dynamo_compiling

from ampatch.casting.nested import tensors_in
from ampatch.errors import OptionError
from ampatch.graph_nodes import nodes_of
from ampatch.ledger import PatchLedger
from ampatch.switch import Switch, in_steps
from ampatch.torch_private.autograd import FORWARD_CLASS, next_sequence_number, sequence_number
from ampatch.torch_private.modules import REPLICATE

Block = AbstractContextManager[None]


class ReplacedForward(ABC):
    """The forward of a module until its session ends.

    A copy of the module gets its own forward, which belongs to the same session. An unpickled forward casts like the
    code around it.

    Args:
        module: the module.
        own: the forward that it replaces.
        switch: switch of the session; None after unpickling.

    Attributes:
        module: the argument.
        switch: the argument.
    """

    def __init__(self, module: nn.Module, own: Callable[..., Any], switch: Switch | None = None) -> None:
        functools.update_wrapper(self, own)
        of_class = types.MethodType(type(module).forward, module)
        self.module, self.switch = module, switch
        self._own = None if own == of_class else own  # None: that of the class

    @property
    def own(self) -> Callable[..., Any]:
        """The forward that it replaces; that of the class as it is now, which user code may have replaced."""
        return types.MethodType(type(self.module).forward, self.module) if self._own is None else self._own

    def call_own(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the forward that it replaces."""
        if self._own is None:
            return type(self.module).forward(self.module, *args, **kwargs)
        return self._own(*args, **kwargs)

    @abstractmethod
    def block(self) -> Block:
        """Returns the block that the forward runs in."""

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the forward while the session casts."""
        return self.in_block(*args, **kwargs)

    def copied(self, module: nn.Module, own: Callable[..., Any] | None) -> Self:
        """Returns the forward of a copy of the module, which has the same casts."""
        made = object.__new__(type(self))
        vars(made).update(vars(self))
        made.module, made._own = module, own
        functools.update_wrapper(made, made.own)
        return made

    def in_block(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's own forward in the block; for a generator or a coroutine, runs each step in it."""
        with self.block():
            result = self.call_own(*args, **kwargs)
        if not is_dynamo_compiling():
            if inspect.isgenerator(result):
                return in_steps(result, self.block)
            if inspect.iscoroutine(result):
                return _awaiting(result, self.block)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.copied(copy.deepcopy(self.module, memo), copy.deepcopy(self._own, memo))

    def __reduce__(self) -> Any:
        return type(self), (self.module, self.own)

    @property
    def __code__(self) -> Any:  # torch.export reads from it where the module is in the source
        return self.own.__code__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the forward under the casts; after the session, without them."""
        switch = self.switch
        if switch is None or not switch.active:
            return self.call_own(*args, **kwargs)
        first = None if is_dynamo_compiling() else next_sequence_number()
        result = self.run(args, kwargs)
        if first is not None and next_sequence_number() != first:
            self.enclose_backward(result, first)
        return result

    def enclose_backward(self, result: object, first: int) -> None:
        """Runs the backward passes of users' `torch.autograd.Function` classes in a graph in the block as well.

        torch's own nodes run in C++, which cast lists do not reach.

        Args:
            result: what the forward returned, with the graph.
            first: number of the first node of that forward; earlier nodes belong to code around it.
        """
        roots = [tensor.grad_fn for tensor in tensors_in(result) if tensor.grad_fn is not None]
        node: Any
        for node in nodes_of(roots, enters=lambda node: sequence_number(node) >= first):
            if isinstance(node, BackwardCFunction):
                setattr(node, FORWARD_CLASS, _EnclosedInBackward(getattr(node, FORWARD_CLASS), self.block))


def check_replaceable(module: nn.Module, name: str, asked: str) -> None:
    """Raises `OptionError` if the casts in a module cannot be changed.

    Args:
        module: the module.
        name: its name in the model.
        asked: the option or entry that requests the change, for the message.
    """
    if isinstance(module, torch.jit.ScriptModule):
        raise OptionError(
            f"{asked} matches {name!r}, which TorchScript has compiled: amp casts nothing in it, nor for it. Use the "
            "Python module that it was compiled from."
        )
    if inspect.isasyncgenfunction(module.forward):
        raise OptionError(
            f"{asked} matches {name!r}, whose forward is an asynchronous generator; amp can follow forwards that are "
            "functions, coroutines or generators. Leave it out."
        )


def own_forward(module: nn.Module, switch: Switch) -> Callable[..., Any] | None:
    """Returns the forward to replace; None if the session has replaced it already.

    In copies from earlier sessions, and in unpickled models, such a forward has no effect any more.
    """
    forward = vars(module).get("forward")
    if not isinstance(forward, ReplacedForward):
        return module.forward
    return None if forward.switch is switch else forward.own


@contextmanager
def own_forwards(model: nn.Module) -> Iterator[None]:
    """Gives the modules of a model their own forwards back until the block ends."""
    replaced = [(module, restore(module)) for module in model.modules()]
    try:
        yield
    finally:
        for module, forward in replaced:
            if forward is not None:
                vars(module)["forward"] = forward


def restore(module: nn.Module) -> ReplacedForward | None:
    """Gives a module its own forward back; returns the one that had replaced it, None if there was none."""
    forward = vars(module).get("forward")
    if not isinstance(forward, ReplacedForward):
        return None
    del module.forward
    if module.forward != forward.own:  # the user had replaced it
        module.forward = forward.own
    return forward


def follow_copies(ledger: PatchLedger) -> None:
    """Patches torch, so that a module's replica in `torch.nn.DataParallel`, or its shallow copy, runs its own forward.

    Both get the module's attributes, and with them the forward of the original.
    """
    replicate = getattr(*REPLICATE)

    @functools.wraps(replicate)
    def replicate_with_own_forward(module: nn.Module) -> nn.Module:
        replica: nn.Module = replicate(module)
        give_own_forward(replica)
        return replica

    def copy_with_own_forward(module: nn.Module) -> nn.Module:
        # What copy.copy does without this method. `nn.Module.__setstate__` is no place for this: Dynamo patches it.
        reduce = copyreg.dispatch_table.get(type(module))
        reduced: Any = module.__reduce_ex__(4) if reduce is None else reduce(module)
        if isinstance(reduced, str):
            return module
        made: nn.Module = copy._reconstruct(module, None, *reduced)  # type: ignore[attr-defined]
        give_own_forward(made)
        return made

    ledger.set(*REPLICATE, replicate_with_own_forward)
    ledger.set(nn.Module, "__copy__", copy_with_own_forward)


def give_own_forward(module: nn.Module) -> None:
    """Gives a module its own forward, if it is a copy that has got the original's with all other attributes."""
    forward = vars(module).get("forward")
    if not isinstance(forward, ReplacedForward) or forward.module is module:
        return
    own = forward._own
    if isinstance(own, types.MethodType) and own.__self__ is forward.module:
        own = types.MethodType(own.__func__, module)
    vars(module)["forward"] = forward.copied(module, own)


def give_own_forwards(module: nn.Module) -> None:
    """Does the same for a module and its parts: libraries for meta-learning copy modules attribute by attribute."""
    if isinstance(forward := vars(module).get("forward"), ReplacedForward) and forward.module is not module:
        for each in module.modules():
            give_own_forward(each)


async def _awaiting(coroutine: Any, block: Callable[[], Block]) -> Any:
    return await in_steps(coroutine, block)


class _EnclosedInBackward:
    """A user's `torch.autograd.Function`, for one node of a graph, with its backward pass in a block."""

    def __init__(self, function: type[Function], block: Callable[[], Block]) -> None:
        self._function = function
        for name in ("backward", "vjp"):
            method = getattr(function, name)
            # torch compares both with those of the base class, to see which of them the user wrote.
            setattr(self, name, method if method is getattr(Function, name) else _enclosed(method, block))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)


def _enclosed(method: Callable[..., Any], block: Callable[[], Block]) -> Callable[..., Any]:
    @functools.wraps(method)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with block():
            return method(*args, **kwargs)

    return wrapper
