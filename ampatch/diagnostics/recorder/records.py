"""What a `Watch` records: operators, the largest values in and out, and the lines of user code that called them.

Owns these values only. Must never run an operator.
"""

from __future__ import annotations

import linecache
import math
import types
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ampatch.diagnostics.recorder.functions import name_of
from ampatch.diagnostics.recorder.operands import versions_of
from ampatch.half_types import HALVES
from ampatch.torch_private.operators import OpOverload, OpOverloadPacket


@dataclass(frozen=True, slots=True)
class Place:
    """A line of the user's code.

    Attributes:
        file: path of the file.
        line: number of the line.
    """

    file: str
    line: int

    @classmethod
    def of(cls, frame: types.FrameType | None) -> Place | None:
        """Returns the line that a frame runs; None without one."""
        return None if frame is None else cls(frame.f_code.co_filename, frame.f_lineno)

    @property
    def source(self) -> str:
        """The text of the line; empty if the file cannot be read."""
        return linecache.getline(self.file, self.line).strip()


@dataclass(slots=True, eq=False)
class Values:
    """What is known of the values of one tensor at one moment.

    Attributes:
        dtype: its type.
        shape: its shape.
        writer: operator whose result they are; None if they are none: a parameter, data, or a part of results.
        parts: what operators wrote to parts of the same memory before, if this is no result itself.
        is_leaf: False if autograd knows an operator that made it, whether that was watched or not.
        largest: the greatest absolute value, inf or NaN; None if the tensor is empty, or `Watch.read` was not called.
        highest: the greatest value; of complex numbers, the greatest absolute one.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    writer: WatchedOp | None = None
    parts: tuple[Values, ...] = ()
    is_leaf: bool = True
    largest: float | None = None
    highest: float | None = None
    on_device: tuple[Tensor, ...] = ()  # its extremes, until they are read

    @property
    def is_finite(self) -> bool:
        """True unless the tensor holds inf or NaN."""
        return self.largest is None or math.isfinite(self.largest)

    @property
    def results(self) -> tuple[Values, ...]:
        """The results of watched operators that the tensor consists of: itself, its parts, or none."""
        return self.parts if self.writer is None else (self,)

    @property
    def is_mask(self) -> bool:
        """True if -inf is all that is not finite, as in masks of attention."""
        is_only_negative = self.highest is not None and self.highest != math.inf
        return not self.is_finite and not self.has_nan and is_only_negative

    @property
    def has_nan(self) -> bool:
        """True if the tensor holds NaN."""
        return self.largest is not None and math.isnan(self.largest)


@dataclass(slots=True, eq=False)
class WatchedOp:
    """One operator that ran.

    Attributes:
        op: the operator.
        number: position among all operators that the watch has recorded.
        is_backward: True if the autograd engine ran it; False in a forward pass, and where one is recomputed.
        function: torch function that was called; None if the operator was called by other means.
        modules: modules that were running, from the outermost.
        place: innermost line of user code; None in a backward pass that runs no user code.
        node: name of the autograd node that ran it, such as "AddmmBackward0"; None outside of the backward pass.
        forward: in a backward pass, the operator of the forward pass whose gradient it is for; None if it is unknown.
        inputs: values of its floating-point inputs.
        outputs: values of its floating-point outputs.
        parameter: the parameter whose gradient it adds to or takes in; None for all other operators.
        use: which use of the innermost module it was in its forward pass, from 1.
        has_inf_argument: True if a number among its arguments is inf, such as the value of a mask.
        arguments: the arguments, if the watch keeps them; None otherwise.
        results: copies of the floating-point outputs, if the watch keeps them.
        versions: version counters of the tensors among them.
        readers: operators that read its results.
    """

    op: Any
    number: int
    is_backward: bool
    function: Any
    modules: tuple[nn.Module, ...]
    place: Place | None
    node: str | None = None
    forward: WatchedOp | None = None
    inputs: list[Values] = field(default_factory=list)
    outputs: list[Values] = field(default_factory=list)
    parameter: Tensor | None = None
    has_inf_argument: bool = False
    use: int = 1
    arguments: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    results: tuple[Tensor, ...] = ()
    versions: tuple[int, ...] = ()
    readers: list[WatchedOp] = field(default_factory=list)

    @property
    def kept_arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The arguments; None if they were not kept, or have been written to since."""
        if self.arguments is None or versions_of(self.arguments) != self.versions:
            return None
        return self.arguments

    @property
    def writers(self) -> list[WatchedOp]:
        """The operators that wrote its inputs, or parts of them."""
        results = (each for values in self.inputs for each in values.results)
        return [each.writer for each in results if each.writer is not None]

    @property
    def named_op(self) -> WatchedOp:
        """The operator to name to the user: that of the forward pass if it is known, else itself."""
        return self if self.forward is None else self.forward

    @property
    def direction(self) -> str:
        """The pass that ran it: "forward" or "backward"."""
        return "backward" if self.is_backward else "forward"

    @property
    def ran_in_half(self) -> bool:
        """True if a tensor among its inputs and outputs is half."""
        return has_half((*self.inputs, *self.outputs))

    @property
    def op_name(self) -> str:
        """The operator's name without namespace and overload, such as "bmm"."""
        return str(self.op._schema.name).partition("::")[2]

    @property
    def function_name(self) -> str:
        """The path of the torch function; that of the operator if it was called by itself."""
        return name_of(self.op if self.is_called_by_itself else self.function)

    @property
    def is_called_by_itself(self) -> bool:
        """True if no torch function called the operator: a function that a list could name."""
        return self.function is None or isinstance(self.function, (OpOverload, OpOverloadPacket))


class ArrivedGradient(NamedTuple):
    """A gradient that arrived at a parameter.

    Attributes:
        parameter: the parameter.
        values: what is known of the gradient.
        roots: what is known of the tensors that the backward pass began with; empty if that is unknown.
    """

    parameter: Tensor
    values: Values
    roots: tuple[Values, ...]


def has_half(several: Iterable[Values]) -> bool:
    """Returns True if one of the tensors is half."""
    return any(values.dtype in HALVES for values in several)
