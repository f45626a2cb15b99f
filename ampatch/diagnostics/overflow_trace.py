"""Traces an overflow: watches every step, and names the operator that first produced inf or NaN.

Owns when a session watches, and the wording of what it found. Must never let a result depend on it.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from ampatch.cast_lists import spellings
from ampatch.diagnostics import causes
from ampatch.diagnostics.watch import Values, Watch, WatchedOp
from ampatch.ledger import PatchLedger
from ampatch.opt_levels import HALVES, Properties

_FLOAT16_MAX = 65504.0
_CAST = "_to_copy"


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
class OverflowTrace:
    """Where inf or NaN first arose in a step.

    Attributes:
        direction: "forward" or "backward"; "input" if data or parameters were not finite to begin with; "unknown" if
            no watched operator produced it.
        function: path of the torch function; for the backward pass, of the one whose gradient was computed.
        operator: operator that produced it, such as "bmm".
        module: name of the innermost module that was running, or was running in the forward pass; None outside of one.
        module_class: name of its class.
        file: the user's file; None if no user code was running.
        line: number of the line in it.
        source: text of the line.
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

    direction: str
    function: str = ""
    operator: str = ""
    module: str | None = None
    module_class: str | None = None
    file: str | None = None
    line: int | None = None
    source: str = ""
    inputs: tuple[TracedTensor, ...] = ()
    outputs: tuple[TracedTensor, ...] = ()
    largest_in_float32: float | None = None
    remedies: tuple[str, ...] = ()
    cast_lists: dict[str, Any] | None = None
    max_loss_scale: float | None = None
    others: int = 0
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data: text, numbers, None, lists and dicts. inf and NaN are the texts "inf" and "nan"."""
        return plain_data(asdict(self))  # type: ignore[no-any-return]

    def __str__(self) -> str:
        lines = [self._headline()]
        if self.module is not None:
            lines.append(f"  module    {self.module or '(the model)'} ({self.module_class})")
        if self.file is not None:
            lines.append(f"  line      {self.file}:{self.line}" + (f": {self.source}" if self.source else ""))
        lines += [f"  input     {each}" for each in self.inputs]
        lines += [f"  result    {each}" for each in self.outputs]
        if self.largest_in_float32 is not None:
            lines.append(f"  float32   largest {self.largest_in_float32:.4g}")
        lines += [f"  remedy    {each}" for each in self.remedies]
        if self.others:
            more = "1 other operator" if self.others == 1 else f"{self.others} other operators"
            lines.append(f"  also      {more} produced inf or NaN from finite inputs")
        lines += [f"  note      {each}" for each in self.notes]
        return "\n".join(lines)

    def _headline(self) -> str:
        if self.direction == "unknown":
            return "No watched operator produced the inf or NaN of these gradients."
        if self.direction == "input":
            return f"The input of {self.function} was not finite to begin with."
        kinds = {"NaN" if each.largest != each.largest else "inf" for each in self.outputs if not _finite(each.largest)}
        kind = " and ".join(sorted(kinds)) or "inf or NaN"
        what = self.function if self.operator in self.function else f"{self.function} (operator {self.operator})"
        if self.operator == "cast":
            what = f"the cast of an argument for {self.function}"
        of = "the backward of " if self.direction == "backward" else ""
        return f"First {kind}: in {of}{what}."


def _finite(number: float | None) -> bool:
    return number is None or math.isfinite(number)


def plain_data(value: Any) -> Any:
    """Returns dicts and lists of numbers and text; inf and NaN become the texts "inf" and "nan"."""
    if isinstance(value, dict):
        return {key: plain_data(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_data(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True, slots=True)
class Finding:
    """The operator that first produced inf or NaN.

    Attributes:
        op: the operator; None if no watched operator produced it.
        is_input: True if its input was not finite, and no watched operator wrote that.
        rerun: its result in float32; None if unknown.
        others: how many other operators did the same later, and reached a gradient.
        notes: what was not watched.
    """

    op: WatchedOp | None
    is_input: bool = False
    rerun: causes.Rerun | None = None
    others: int = 0
    notes: tuple[str, ...] = ()


class Examiner:
    """Says of what a `Watch` recorded where inf or NaN first arose.

    Args:
        properties: the values of the opt level, on which the remedy depends.
        dynamic: whether the loss scale is dynamic.
        name_of_module: returns the name of a module in the user's model.
    """

    def __init__(
        self, properties: Properties, dynamic: bool, name_of_module: Callable[[nn.Module], str | None]
    ) -> None:
        self._properties = properties
        self._dynamic = dynamic
        self._name_of_module = name_of_module

    def find(self, watch: Watch) -> Finding | None:
        """Returns where the first inf or NaN in the gradients came from; None if all gradients are finite.

        Syncs with the device once, and runs the guilty operator again in float32.
        """
        watch.read()
        reached = [values for _, values in watch.gradients if not values.is_finite]
        if not reached:
            return None
        notes = ("forward passes in other threads were not watched",) if watch.missed_threads else ()
        origins = causes.origins(watch.ops)
        order = {id(op): place for place, op in enumerate(watch.ops)}
        found = {id(op): op for values in reached if (op := origins.get(id(values))) is not None}
        if not found:
            return Finding(None, notes=notes)
        first = min(found.values(), key=lambda op: order[id(op)])
        is_input = any(not values.is_finite and values.writer is None for values in first.inputs)
        return Finding(first, is_input, None if is_input else causes.in_float32(first), len(found) - 1, notes)

    def describe(self, finding: Finding, loss_scale: float | None = None) -> OverflowTrace:
        """Returns a finding in words.

        Args:
            finding: what `find` returned.
            loss_scale: scale of the loss in the backward pass; None if it is unknown.
        """
        op, rerun = finding.op, finding.rerun
        if op is None:
            return OverflowTrace("unknown", notes=finding.notes)
        named = op.forward if op.is_backward and op.forward is not None else op
        place = op.place or named.place  # the user's own backward function, or the forward
        modules = named.modules or op.modules
        direction = "input" if finding.is_input else "backward" if op.is_backward else "forward"
        remedies, overlay, scale = self._remedies(op, named, direction, rerun, loss_scale)
        return OverflowTrace(
            direction,
            _function_name(op, named),
            "cast" if op.op_name == _CAST else op.op_name,
            self._path(modules) if modules else None,
            type(modules[-1]).__name__ if modules else None,
            None if place is None else place.file,
            None if place is None else place.line,
            "" if place is None else place.source,
            tuple(map(_traced, op.inputs)),
            tuple(map(_traced, op.outputs)),
            None if rerun is None else rerun.largest,
            tuple(remedies),
            overlay,
            scale,
            finding.others,
            finding.notes,
        )

    def _path(self, modules: Sequence[nn.Module]) -> str:
        """Returns the name of the innermost module that the user's model knows."""
        return next((name for each in reversed(modules) if (name := self._name_of_module(each)) is not None), "")

    def _remedies(
        self,
        op: WatchedOp,
        named: WatchedOp,
        direction: str,
        rerun: causes.Rerun | None,
        loss_scale: float | None,
    ) -> tuple[list[str], dict[str, Any] | None, float | None]:
        if direction == "input":
            return ["look at the data, or at the weights (a learning rate that is too high)"], None, None
        ran_in_half = any(values.dtype in HALVES for values in (*op.inputs, *op.outputs))
        if not ran_in_half or (rerun is not None and not rerun.is_finite):
            return ["none in precision: it is not finite in float32 either"], None, None
        if direction == "backward":
            return self._remedies_of_backward(rerun, loss_scale)
        return self._remedies_of_forward(named)

    def _remedies_of_backward(
        self, rerun: causes.Rerun | None, loss_scale: float | None
    ) -> tuple[list[str], None, float | None]:
        if rerun is None or loss_scale is None:
            return ["a lower loss scale"], None, None
        fits = _power_of_two_below(loss_scale * _FLOAT16_MAX / rerun.largest) if rerun.largest else loss_scale
        fits = min(fits, loss_scale / 2)
        if self._dynamic:
            return [f"a loss scale of {fits:g} or less; the dynamic scale gets there by itself"], None, fits
        return [f"a lower loss scale: amp.initialize(..., loss_scale={fits:g}), or loss_scale='dynamic'"], None, fits

    def _remedies_of_forward(self, op: WatchedOp) -> tuple[list[str], dict[str, Any] | None, None]:
        told: list[str] = []
        overlay: dict[str, Any] | None = None
        name = _listed_name(op).rpartition(".")[2]
        path = self._path(op.modules)
        if self._properties.patch_torch_functions:
            overlay = overlay_for(_listed_name(op))
            told.append(f"this function in float32: amp.initialize(..., cast_lists={overlay})")
        elif path:
            told.append(f"this module in float32: amp.initialize(..., keep_fp32=[{path!r}])")
        else:
            told.append(f"{name} in float32")
        if self._properties.half_dtype is torch.float16:
            told.append("float32's range: amp.initialize(..., half_dtype='bfloat16')")
        return told, overlay, None


def _listed_name(op: WatchedOp) -> str:
    """Returns the path of a function as a list could name it.

    For a function in Python that calls other listed ones, the operator below has their name.
    """
    if op.op_name == _CAST and op.readers:
        return _listed_name(op.readers[0])
    name = op.function_name
    if isinstance(op.function, types.FunctionType) and op.op_name in spellings.known_names():
        return next(map(str, spellings.spellings(op.op_name)), name)
    return name


def _function_name(op: WatchedOp, named: WatchedOp) -> str:
    """Returns the name of the function to blame: an autograd.Function's own if the user wrote the backward."""
    if op.is_backward and op.place is not None and op.node is not None:
        return op.node.removesuffix("Backward")
    return _listed_name(named)


def overlay_for(path: str) -> dict[str, Any]:
    """Returns the overlay that blacklists a function under every spelling that torch has for its name."""
    namespace, _, name = path.rpartition(".")
    bare = spellings.name_of_operator(name) or name.rstrip("_")
    if namespace in spellings.NAMESPACES and spellings.spellings(bare):
        return {"blacklist": {"*": [bare]}}
    return {"blacklist": {namespace: [name]}}


def _power_of_two_below(number: float) -> float:
    return 2.0 ** math.floor(math.log2(number)) if number > 0 else 0.0


def _traced(values: Values) -> TracedTensor:
    return TracedTensor(str(values.dtype).removeprefix("torch."), values.shape, values.largest)


class OverflowTracer:
    """Watches the steps of a session, and says why one was skipped.

    It watches the thread that runs the first forward pass, from there until the session ends.

    Args:
        properties: the values of the opt level.
        dynamic: whether the loss scale is dynamic.
        named_modules: returns the names of the adopted models' modules, by the module's id.
    """

    def __init__(self, properties: Properties, dynamic: bool, named_modules: Callable[[], dict[int, str]]) -> None:
        self._watch = Watch(keep=_ran_in_half)
        self._examiner = Examiner(properties, dynamic, lambda module: named_modules().get(id(module)))
        self._found: Finding | None = None  # of backward passes before the latest forward pass
        self._forwards: list[int] = []  # number of operators recorded when each forward pass began

    def install(self, ledger: PatchLedger) -> None:
        """Hooks all modules, so that the first forward pass begins to watch; compiled code runs uncompiled."""
        handle = torch.nn.modules.module.register_module_forward_pre_hook(self._before_forward)
        ledger.on_undo(handle.remove)
        self._watch.hook_modules()  # behind that one, which asks whether a module is running
        ledger.on_undo(register_optimizer_step_post_hook(self._after_step).remove)
        ledger.on_undo(self._watch.stop)
        stance = torch.compiler.set_stance("force_eager")
        ledger.on_undo(functools.partial(stance.__exit__, None, None, None))

    def trace_of(self, loss_scale: float | None) -> OverflowTrace | None:
        """Returns where the first inf or NaN of the latest backward passes came from, and forgets them.

        Syncs with the device once.

        Args:
            loss_scale: scale of the loss in these backward passes; None if it is unknown.

        Returns:
            None if no gradient was watched that is not finite, such as after an overflow on another rank.
        """
        self._end_backward()
        found, self._found = self._found, None
        return None if found is None else self._examiner.describe(found, loss_scale)

    def _before_forward(self, *_: object) -> None:
        watch = self._watch
        if watch.is_in_forward or not watch.is_this_thread or torch._C._current_graph_task_id() != -1:
            return
        if not watch.is_on:
            watch.push()
        if watch.gradients:
            self._end_backward()
        elif not watch.ops:
            self._forwards.clear()
        self._forwards.append(len(watch.ops))
        if len(self._forwards) > _FORWARDS_KEPT:  # such as in an evaluation that records gradients
            del self._forwards[0]
            for op in watch.ops[: self._forwards[0]]:
                op.arguments = None

    def _end_backward(self) -> None:
        """Looks at the gradients of the backward passes that were watched, then forgets all operators."""
        if self._watch.gradients:
            self._found = self._found or self._examiner.find(self._watch)
            self._watch.forget()

    def _after_step(self, *_: object) -> None:
        self._found = None


#: Forward passes whose operators keep their arguments, if no backward pass follows any of them.
_FORWARDS_KEPT = 8


def _ran_in_half(inputs: Sequence[Values], outputs: Sequence[Values]) -> bool:
    return any(values.dtype in HALVES for values in (*inputs, *outputs))
