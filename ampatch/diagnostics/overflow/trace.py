"""What a traced overflow says: the operator, its place, its values and what mends it, as data and as text.

Owns the wording. Must never run or watch anything.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from ampatch.diagnostics.json_files import plain
from ampatch.diagnostics.shown_names import counted, shown_module, shown_place

#: Stands in the place of a function: the engine adds up the gradients of a tensor that is used several times.
SUM_OF_GRADIENTS = "the sum of several gradients of one tensor"


@dataclass(frozen=True, slots=True)
class TracedTensor:
    """A tensor that went into or came out of the operator.

    Attributes:
        dtype: name of its type.
        shape: its shape.
        largest: its greatest absolute value, "inf" or "nan" in text; None if it is empty.
    """

    dtype: str
    shape: tuple[int, ...]
    largest: float | None

    def __str__(self) -> str:
        largest = "empty" if self.largest is None else f"largest {self.largest:.4g}"
        return f"{self.dtype} {list(self.shape)}, {largest}"


@dataclass(frozen=True, slots=True)
class NamedOp:
    """An operator in the user's terms.

    Attributes:
        function: path of the torch function; in a backward pass, of the one whose gradient was computed.
        operator: name of the operator, such as "bmm"; "cast" for a cast.
        module: name of the innermost module that was running in the forward pass; "" for the model itself, None outside
            of the adopted models.
        module_class: name of its class; None if no module was running.
        file: the user's file; None if no user code was running.
        line: number of the line in it.
        source: text of the line.
    """

    function: str = ""
    operator: str = ""
    module: str | None = None
    module_class: str | None = None
    file: str | None = None
    line: int | None = None
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverflowTrace(NamedOp):
    """Where inf or NaN first arose in a step.

    Attributes:
        direction: "forward" or "backward"; "input" if data or parameters were not finite to begin with; "unknown" if
            no watched operator produced it.
        inputs: floating-point inputs.
        outputs: floating-point outputs.
        largest_in_float32: largest value of the result in float32, on the same inputs; None if that could not be found
            out.
        remedies: what mends it, the smallest change first, as sentences with text to paste.
        cast_lists: overlay for ``initialize(cast_lists=...)`` that keeps the function in float32; None if none helps.
        max_loss_scale: largest power of two with which the gradient would have been finite at this operator; None in
            a forward pass.
        others: how many other operators produced inf or NaN from finite inputs, and reached a gradient.
        notes: what was not watched.
    """

    direction: str = "unknown"
    inputs: tuple[TracedTensor, ...] = ()
    outputs: tuple[TracedTensor, ...] = ()
    largest_in_float32: float | None = None
    remedies: tuple[str, ...] = ()
    cast_lists: dict[str, Any] | None = None
    max_loss_scale: float | None = None
    others: int = 0
    notes: tuple[str, ...] = ()

    @property
    def finding(self) -> object:
        """A key that is equal for two traces if both name the same operator; None if no operator is named."""
        if self.direction == "unknown":
            return None
        return self.direction, self.function, self.operator, self.module, self.file, self.line

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data: text, numbers, None, lists and dicts. inf and NaN are the texts "inf" and "nan"."""
        return plain(asdict(self))  # type: ignore[no-any-return]

    def __str__(self) -> str:
        lines = [self.headline]
        if self.module_class is not None:
            name = shown_module(self.module)
            lines.append(f"  module    {f'{name} ({self.module_class})' if name else self.module_class}")
        if self.file is not None:
            source = f": {self.source}" if self.source else ""
            lines.append(f"  line      {shown_place(self.file, self.line)}{source}")
        lines += [f"  input     {each}" for each in self.inputs]
        lines += [f"  result    {each}" for each in self.outputs]
        if self.largest_in_float32 is not None:
            lines.append(f"  float32   largest {self.largest_in_float32:.4g}")
        lines += [f"  remedy    {each}" for each in self.remedies]
        if self.others:
            lines.append(f"  also      {counted(self.others, 'other operator')} produced inf or NaN from finite inputs")
        lines += [f"  note      {each}" for each in self.notes]
        return "\n".join(lines)

    @property
    def headline(self) -> str:
        """The first line of the text: which operator it was."""
        if self.direction == "unknown":
            return "No watched operator produced the inf or NaN of these gradients."
        if self.direction == "input":
            return f"The input of {self.function} was not finite to begin with."
        largest = [each.largest for each in self.outputs if each.largest is not None]
        kinds = {"NaN" if math.isnan(each) else "inf" for each in largest if not math.isfinite(each)}
        kind = " and ".join(sorted(kinds)) or "inf or NaN"
        what = (
            self.function
            if self.operator in (*self.function.split("."), "cast")
            else f"{self.function} (operator {self.operator})"
        )
        if self.function == SUM_OF_GRADIENTS:
            return f"First {kind}: in {SUM_OF_GRADIENTS}."
        if self.direction == "backward":
            what = f"the backward of {what}"
        if self.operator == "cast":
            what = f"{'a gradient' if self.direction == 'backward' else 'an argument'} for {what}"
            what = f"the cast to {self.outputs[0].dtype} of {what}"
        return f"First {kind}: in {what}."
