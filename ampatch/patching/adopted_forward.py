"""The forward of an adopted model at O1 and O4: a region of torch.autocast, whose casts amp makes by its lists.

Owns the forward that replaces the model's own. So code that asks torch for autocast gets the answer that describes
amp's casts; regions of torch.autocast inside change what amp does; and operators with rules for autocast follow them.
Must never cast an argument or a result.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Set
from typing import Any, Self

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling, is_exporting

from ampatch.compilers import traced_within_others
from ampatch.ledger import PatchLedger
from ampatch.patching.replaced_forward import Block, ReplacedForward, own_forward
from ampatch.switch import Region, State, Switch, blocks_of, casting_to, in_graph, is_set_by_autocast


def run_in_region(model: nn.Module, ledger: PatchLedger, switch: Switch, dtype: torch.dtype, kinds: Set[str]) -> None:
    """Makes the forward of a model run in a region while the session casts, unless it is called in one.

    Args:
        model: the model.
        ledger: records the change.
        switch: switch of the session.
        dtype: half type of the region.
        kinds: device types whose tensors are cast; the set may grow.
    """
    own = own_forward(model, switch)
    if own is not None and not inspect.isasyncgenfunction(own):
        ledger.set(model, "forward", _ForwardInRegion(model, own, switch, dtype, kinds))


class _ForwardInRegion(ReplacedForward):
    """The forward of an adopted model until its session ends."""

    def __init__(
        self,
        module: nn.Module,
        own: Callable[..., Any],
        switch: Switch | None = None,
        dtype: torch.dtype = torch.float16,
        kinds: Set[str] = frozenset(),
    ) -> None:
        super().__init__(module, own, switch)
        self._dtype, self._kinds = dtype, kinds
        self._state: State | None = None  # as of the last forward

    def block(self) -> Block:
        """Returns a region, or a block that changes nothing in a region of other code."""
        if is_set_by_autocast():
            return contextlib.nullcontext()
        if is_dynamo_compiling():
            return in_graph(casting_to(self._dtype, self._kinds))
        if self._state is None or len(self._kinds) > self._state[1].count(True):
            self._state = casting_to(self._dtype, self._kinds)
        return Region(self._state)

    @traced_within_others
    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the forward; under Dynamo in plain blocks, within which its graphs may break."""
        if not is_dynamo_compiling() or is_exporting() or is_set_by_autocast():
            return self.in_block(*args, **kwargs)
        first, second, third, fourth = blocks_of(casting_to(self._dtype, self._kinds))
        with first, second, third, fourth:
            return self.own(*args, **kwargs)

    def enclose_backward(self, result: object, first: int) -> None:
        """Leaves backward passes as they are: like torch.autocast, a region ends with the forward."""

    def copied(self, module: nn.Module, own: Callable[..., Any]) -> Self:
        """Returns the forward of a copy of the module."""
        return type(self)(module, own, self.switch, self._dtype, self._kinds)
