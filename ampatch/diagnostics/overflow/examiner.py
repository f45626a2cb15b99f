"""Names the operator of a watched step that first produced inf or NaN, and what would have mended it.

Owns the remedies, and the names of functions and modules that the user reads. Must never watch a step, nor change one.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from ampatch.cast_lists.lists import shipped
from ampatch.cast_lists.spellings import entry_for, is_in_place, known_names, spellings
from ampatch.diagnostics.overflow import causes
from ampatch.diagnostics.overflow.trace import SUM_OF_GRADIENTS, NamedOp, OverflowTrace, TracedTensor
from ampatch.diagnostics.recorder.records import Values, WatchedOp
from ampatch.diagnostics.recorder.watch import Watch
from ampatch.errors import in_every_layer
from ampatch.grouping import grouped
from ampatch.half_types import needs_scale
from ampatch.opt_levels import Properties, dtype_name
from ampatch.scaling.loss_scaler import ScalePolicy
from ampatch.torch_private.operators import CAST

_OTHER_THREADS = "forward passes in other threads were not watched"
_NOT_RUN_AGAIN = "the remedy was not tried: the operator could not run again in float32, or its inputs were written to"
#: How remedies begin of which a second run has shown that all gradients are finite with them, that this holds for the
#: forward pass, that it does not hold, or of which nothing has been shown.
TRIED, TRIED_FORWARD = "(tried) ", "(tried in the forward pass) "
NOT_ENOUGH, NOT_TRIED = "(tried, and not enough) ", "(not tried) "
NOT_IN_FLOAT32 = "none in precision: the step as a whole is not finite in float32 either"
_OF_INPUT = (
    "look at the data, at the weights (a learning rate that is too high), or at the forward pass without gradients "
    "that computed this input"
)
NO_SCALE, _NONE = "no loss scale: ", "none in precision: "
BFLOAT16 = "amp.initialize(..., half_dtype='bfloat16')"
_NO_FORWARD = "the forward pass of this backward pass was no longer watched, since others followed"


class Examiner:
    """Says in the user's terms where inf or NaN arose, and what would have kept it finite.

    Args:
        properties: the values of the opt level, on which the remedy depends.
        policy: how the loss scale behaves.
        named_modules: returns the names of the user's modules, by the module's id.
    """

    def __init__(
        self, properties: Properties, policy: ScalePolicy, named_modules: Callable[[], Mapping[int, str]]
    ) -> None:
        self._properties = properties
        self._dynamic, self._min_loss_scale = policy.dynamic, policy.min_loss_scale
        self._named_modules = named_modules

    def describe(
        self, origins: Iterable[WatchedOp | None], missed_threads: bool = False, loss_scale: float | None = None
    ) -> OverflowTrace:
        """Describes the first of several origins, after it ran again in float32.

        Args:
            origins: those of an optimizer's gradients; None stands for gradients without one.
            missed_threads: whether forward passes ran in threads that were not watched.
            loss_scale: scale of the loss in the backward pass; None if it is unknown.
        """
        notes: tuple[str, ...] = (_OTHER_THREADS,) if missed_threads else ()
        found = {op.number: op for op in origins if op is not None}
        if not found:
            return OverflowTrace(notes=notes)
        op = found[min(found)]
        unwritten = _unwritten(op)
        # Data or a parameter was not finite to begin with.
        is_input = bool(unwritten) and not op.is_backward and all(values.is_leaf for values in unwritten)
        if unwritten and not is_input:
            return OverflowTrace(notes=(*notes, _NO_FORWARD))
        largest = None if is_input else causes.in_float32(op)
        if largest is None and not is_input and op.ran_in_half:
            notes += (_NOT_RUN_AGAIN,)
        use = _to_name(op).use
        if use > 1:
            notes += (f"in use {use} of this module in the forward pass",)
        trace = OverflowTrace(
            direction="input" if is_input else op.direction,
            **asdict(self.named(op)),
            inputs=tuple(map(_traced, op.inputs)),
            outputs=tuple(map(_traced, op.outputs)),
            largest_in_float32=largest,
            others=len(found) - 1,
            notes=notes,
        )
        return replace(trace, **({"remedies": (_OF_INPUT,)} if is_input else self._remedies(op, trace, loss_scale)))

    def named(self, op: WatchedOp) -> NamedOp:
        """Names an operator: in a backward pass, by the function whose gradient it computes."""
        named = _to_name(op)
        place = op.place or named.place  # the user's own backward function, or the forward
        modules = named.modules or op.modules
        names = self._named_modules() if modules else {}
        # The innermost one that the user's model knows; else one without a name.
        module = next((each for each in reversed(modules) if id(each) in names), modules[-1] if modules else None)
        return NamedOp(
            _function_name(op, named),
            "cast" if op.op_name == CAST else op.op_name,
            names.get(id(module)),
            None if module is None else type(module).__name__,
            *((None, None, "") if place is None else (place.file, place.line, place.source)),
        )

    def _remedies(self, op: WatchedOp, trace: OverflowTrace, loss_scale: float | None) -> dict[str, Any]:
        """Returns what mends an overflow, by the attributes of the trace."""
        largest = trace.largest_in_float32
        if not op.ran_in_half or not (largest is None or math.isfinite(largest)):
            told = ", on these inputs, which were computed in half," if op.ran_in_half else ""
            return {"remedies": (f"{_NONE}it is not finite in float32{told} either",)}
        if not op.is_backward:
            return self._of_forward(op, trace.module)
        if not largest or loss_scale is None:
            return {"remedies": ("a lower loss scale",)}
        fits = loss_scale * min(torch.finfo(self._properties.half_dtype).max / largest, 0.5)
        return self.of_loss_scale(2.0 ** math.floor(math.log2(fits)) if fits > 0 else 0.0)

    def of_loss_scale(self, fits: float) -> dict[str, Any]:
        """Returns what mends an overflow by a lower loss scale; by none if it is below the floor, or 0."""
        if fits < self._min_loss_scale:
            instead = "Bring this gradient down, or use bfloat16"
            needed = f"it would have to be {fits:g}" if fits else "at much lower ones gradients overflow as well"
            return {"remedies": (f"{NO_SCALE}{needed}. {instead}",), "max_loss_scale": None}
        if self._dynamic:
            told = f"a loss scale of {fits:g} or less; the dynamic scale gets there by itself"
        else:
            told = f"a lower loss scale: amp.initialize(..., loss_scale={fits:g}), or loss_scale='dynamic'"
        return {"remedies": (told,), "max_loss_scale": fits}

    def _of_forward(self, op: WatchedOp, module: str | None) -> dict[str, Any]:
        overlay: dict[str, Any] | None = None
        path = _listed_name(op)
        name = path.rpartition(".")[2]
        if not self._properties.patch_torch_functions:
            told = f"{name} in float32, by .float() on its arguments: no submodule has it, for keep_fp32 to name"
            if module:
                told = f"this module in float32: amp.initialize(..., keep_fp32=[{module!r}])"
        elif op.is_called_by_itself and op.op_name != CAST:
            told = f"{path} on float32 tensors: it was called by itself, so that no list can name it"
        elif is_in_place(name):
            told = (
                "this line out of place, on .float() tensors: a list could not keep it in float32, as it writes to half"
            )
        else:
            told, overlay = blacklisting([entry_for(path)], in_every_layer(module or ""))
        wider = [f"float32's range: {BFLOAT16}"] if needs_scale(self._properties.half_dtype) else []
        return {"remedies": (told, *wider), "cast_lists": overlay}


def entries_around(op: WatchedOp) -> Iterator[tuple[str, str]]:
    """Yields what to blacklist: the function of an operator, then those of its inputs, nearest first."""
    waiting, seen = [op.named_op], set()
    for each in waiting:  # it grows meanwhile
        entry = entry_for(path := _listed_name(each))
        if entry not in seen and not each.is_called_by_itself and not is_in_place(path.rpartition(".")[2]):
            seen.add(entry)
            yield entry
        waiting += [writer for writer in each.writers if writer not in waiting]


def marked(remedies: Iterable[str], mark: str = NOT_TRIED) -> tuple[str, ...]:
    """Returns remedies that say whether they were tried; "none" as it is."""
    return tuple(each if each.startswith((_NONE, NO_SCALE, "look at")) else mark + each for each in remedies)


def patterns_around(module: str) -> list[str]:
    """Returns patterns to try for a module: its like in all layers, and for a layer itself all layers beside it."""
    parent, _, last = module.rpartition(".")
    layers = [f"{in_every_layer(parent)}.*"] if parent and last.isdigit() else []
    return [in_every_layer(module), *layers] if module else []


def blacklisting(entries: Sequence[tuple[str, str]], pattern: str) -> tuple[str, dict[str, Any]]:
    """Returns the remedy of functions in float32, as text and as an overlay.

    Args:
        entries: the functions, as `entry_for` has them.
        pattern: of the modules in which they are; empty for the whole model.
    """
    overlay: dict[str, Any] = {"blacklist": grouped(entries)}
    which, where = "these functions" if entries[1:] else "this function", ""
    if pattern:
        overlay, where = {"modules": {pattern: overlay}}, f" in {pattern!r}"
    return f"{which} in float32{where}: {to_type(overlay)}", overlay


def to_type(overlay: Mapping[str, Any]) -> str:
    """Returns the call with which an overlay is in force."""
    return f"amp.initialize(..., cast_lists={overlay})"


def origins_of_gradients(watch: Watch) -> dict[int, WatchedOp | None]:
    """Returns the origins of gradients that are not finite, by the id of the parameter; syncs with the device.

    None stands in the place of an origin if no watched operator is one.
    """
    watch.read()
    origins = causes.origins(watch.ops)
    found: dict[int, WatchedOp | None] = {}
    for gradient in [each for each in watch.gradients if not each.values.is_finite]:
        # What made the loss inf may have led to the gradient by other numbers: log(0), and then 1 / 0.
        ops = [origins.get(id(values)) for values in (gradient.values, *gradient.roots)]
        found.setdefault(id(gradient.parameter), _first(ops))
    for added in watch.ops:  # finite gradients may have a sum that is not
        if added.parameter is not None and all(values.is_finite for values in added.inputs):
            sums = [origins[id(values)] for values in added.outputs if id(values) in origins]
            if sums:
                found.setdefault(id(added.parameter), _first(sums))
    return found


def _first(ops: Iterable[WatchedOp | None]) -> WatchedOp | None:
    return min(filter(None, ops), key=lambda op: op.number, default=None)


def enters(op: WatchedOp) -> bool:
    """Returns True if inf or NaN came into a backward pass from outside, and this operator was the first to read it."""
    return op.is_backward and bool(_unwritten(op))


def _unwritten(op: WatchedOp) -> list[Values]:
    """Returns the inputs that are not finite, and that no watched operator wrote."""
    return [values for values in op.inputs if not values.is_finite and not values.results]


def _to_name(op: WatchedOp) -> WatchedOp:
    """Returns the operator to name for an operator: in a backward pass, the operator of the forward pass.

    For the gradient of a cast, returns the operator whose result the forward pass cast.
    """
    named = op.named_op
    if named is op or named.op_name != CAST:
        return named
    return next(iter(named.writers), named)


def _listed_name(op: WatchedOp) -> str:
    """Returns the path of a function as a list could name it.

    A function in Python may call listed functions. If it is no listed one itself, the operator has the name that lists
    know.
    """
    if op.op_name == CAST and op.readers:
        return _listed_name(op.readers[0])
    name = op.function_name
    if not isinstance(op.function, types.FunctionType):
        return name
    bare = name.rpartition(".")[2]
    listed = bare if bare in _shipped_names() else op.op_name
    return next(map(str, spellings(listed)), name) if listed in known_names() else name


@functools.cache
def _shipped_names() -> frozenset[str]:
    """Returns the names of the functions on the shipped lists, without their namespaces."""
    return frozenset(path.name for path in shipped().for_half(torch.float16))


def _function_name(op: WatchedOp, named: WatchedOp) -> str:
    """Returns the name of the function to blame: an autograd.Function's own if the user wrote the backward."""
    if op.is_backward and op.place is not None and op.node is not None:
        return op.node.removesuffix("Backward")
    if op.is_backward and (op.parameter is not None or (op.forward is None and op.op_name in ("add", "add_"))):
        return SUM_OF_GRADIENTS
    return _listed_name(named)


def _traced(values: Values) -> TracedTensor:
    return TracedTensor(dtype_name(values.dtype), values.shape, values.largest)
