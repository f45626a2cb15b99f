"""Judges the operators of a watched float32 step: float16's range, bfloat16's precision, functions that no list knows.

Runs operators again on the arguments that were kept. Must never change the user's tensors.
"""

from __future__ import annotations

import functools
import math
import types
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ampatch.cast_lists import spellings
from ampatch.cast_lists.lists import shipped
from ampatch.cast_lists.paths import Path, identity
from ampatch.cast_lists.rules import Rule, Treatment
from ampatch.diagnostics.examiner import Examiner
from ampatch.diagnostics.operands import floating_in, with_types
from ampatch.diagnostics.preflight_report import Imprecise, Location, OutOfRange, Unlisted
from ampatch.diagnostics.preflight_trials import enclosing
from ampatch.diagnostics.preflight_underflows import draws_itself
from ampatch.diagnostics.watch import Watch, paused, run_again
from ampatch.diagnostics.watched import Values, WatchedOp
from ampatch.function_wrapper import unwrapped
from ampatch.graph_nodes import nodes_of
from ampatch.grouping import grouped
from ampatch.patching.function_patches import Registration

_FLOAT16_MAX = torch.finfo(torch.float16).max
_IN_BFLOAT16 = {torch.float32: torch.bfloat16}

#: Namespaces of torch's own operators.
_OF_TORCH = frozenset(
    ("aten", "c10d", "c10d_functional", "_c10d_functional", "higher_order", "inductor", "mkl", "mkldnn", "onednn")
) | {"prim", "prims", "profiler", "quantized", "_quantized", "rngprims", "sparse", "symm_mem"}

#: Operators that copy or fill, and compute nothing.
_MOVES = frozenset(
    ("_to_copy", "clone", "copy_", "fill_", "full_like", "new_zeros", "ones_like", "zero_", "zeros_like")
)

_AT_O1 = {
    Treatment.WHITELIST: "half",
    Treatment.BLACKLIST: "float32",
    Treatment.PROMOTE: "the widest type of its inputs",
    Treatment.BANNED: "half it raises",
}
#: Errors from here on say nothing. float32 has 2**16 times bfloat16's precision, so the float32 result has lost 5 % as
#: well: a sum that cancels to rounding errors, such as the gradient of a bias before a softmax over the same axis.
_NOISE = 0.05 * 2**16


@dataclass(frozen=True, slots=True)
class Suspect:
    """An operator that may be to blame for an inaccurate level.

    Attributes:
        function: path of its function as a list could name it.
        modules: names of the modules around it, the innermost first, without the model itself.
    """

    function: str
    modules: tuple[str, ...]


class Operators:
    """The operators of a float32 step, judged.

    Args:
        watch: the step, with all arguments kept.
        examiner: names operators.
        autograd_functions: the classes of users' autograd.Functions in the graph, with the number of their nodes.
        registered: the functions that the user has registered.
        tolerance: the error above which an operator loses too much to bfloat16.

    Attributes:
        out_of_range: operators that leave float16's range.
        imprecise: operators that lose more than the tolerance.
        uncompared: number of operators that could not be compared.
        unlisted: functions that no list knows.
        draws_itself: True if an attention kernel drew dropout.
    """

    def __init__(
        self,
        watch: Watch,
        examiner: Examiner,
        autograd_functions: Mapping[type, int],
        registered: Sequence[Registration],
        tolerance: float,
    ) -> None:
        self._examiner = examiner
        self._rules = _rules_by_function()
        self._registered = [(each.owner, getattr(each.owner, each.name, None)) for each in registered]
        self._ops = watch.ops
        self._autograd_functions = autograd_functions
        self._tolerance = tolerance
        self._location = functools.cache(self._located)
        watch.read()
        self._errors, self.uncompared = _errors(watch.ops)
        self.draws_itself = draws_itself(watch.ops)
        for op in watch.ops:
            op.arguments = None  # the memory of the step is needed for the next ones
        self.out_of_range = self._out_of_range()
        self.imprecise = self._imprecise()
        self.unlisted = tuple(self._unlisted())

    @functools.cached_property
    def suspects(self) -> tuple[Suspect, ...]:
        """Operators to blame for an inaccurate level, the likeliest first."""
        return tuple(dict.fromkeys(self._suspects()))

    def _located(self, op: WatchedOp) -> Location:
        named = self._examiner.named(op)
        function = _custom_path(op) if _is_custom(op) else named.function
        at_o1 = self._at_o1(op.named_op.function, named.function)
        place = named.module, named.file, named.line, named.source
        return Location(function, named.operator, op.direction, *place, at_o1)

    def _at_o1(self, function: object, path: str) -> str:
        namespace, _, name = path.rpartition(".")
        by_path = shipped().rules.get((Path(namespace, name), torch.float16))
        rule = self._rules.get(id(unwrapped(function))) or by_path
        if rule is None:
            return "the type of its inputs"
        return _AT_O1[rule.treatment] + (" for some arguments" if rule.when else "")

    def _out_of_range(self) -> tuple[OutOfRange, ...]:
        """Returns operators that leave the range, those that only pass it on excepted."""
        found: dict[Location, list[float]] = {}
        for op in self._ops:
            largest = _largest(op.outputs)
            computed = [values for values in op.inputs if values.results]  # not data or parameters
            if math.inf > largest > _FLOAT16_MAX >= _largest(computed):  # inf is on purpose: the step is finite
                found.setdefault(self._location(op), []).append(largest)
        rows = (OutOfRange(location, max(largest), len(largest)) for location, largest in found.items())
        return tuple(sorted(rows, key=lambda row: -row.largest))

    def _imprecise(self) -> tuple[Imprecise, ...]:
        errors = ((op, self._errors.get(id(op), 0.0)) for op in self._ops)
        found = grouped((self._location(op), error) for op, error in errors if error > self._tolerance)
        rows = (Imprecise(location, max(each), len(each)) for location, each in found.items())
        return tuple(sorted(rows, key=lambda row: -row.error))

    def _unlisted(self) -> Iterator[Unlisted]:
        forward = [op for op in self._ops if not op.is_backward and op.inputs and op.outputs]
        computing = [op for op in forward if op.op_name not in _MOVES]
        custom = grouped((_custom_path(op), op) for op in computing if _is_custom(op) and not self._knows_operator(op))
        called = [op for op in computing if not _is_custom(op) and op.function is not None]
        plain = grouped((op.function_name, op) for op in called if not self._knows(op.function))
        for path, ops in custom.items():
            yield self._unlisted_of("custom operator", path, ops)
        for kind, count in self._autograd_functions.items():
            if not any(owner is kind for owner, _ in self._registered):
                code = getattr(getattr(kind, "forward", None), "__code__", None)
                where = (None, None) if code is None else (code.co_filename, code.co_firstlineno)
                yield Unlisted("autograd.Function", f"{kind.__module__}.{kind.__qualname__}", count, None, *where)
        for path, ops in sorted(plain.items(), key=lambda item: -len(item[1])):
            yield self._unlisted_of("torch function", path, ops)

    def _unlisted_of(self, kind: str, path: str, ops: Sequence[WatchedOp]) -> Unlisted:
        location = self._location(ops[0])
        return Unlisted(kind, path, len(ops), location.module, location.file, location.line)

    def _knows(self, function: object) -> bool:
        """Returns True if a list names a function, or one that it calls."""
        function = unwrapped(function)
        if id(function) in self._rules or any(known is function for _, known in self._registered):
            return True
        name = getattr(function, "__name__", "")
        if name in ("backward", "__get__", "__set__", "__setitem__"):
            return True  # no arithmetic of the forward pass
        is_python = isinstance(function, types.FunctionType)
        return is_python and any(key in self._rules for key in spellings.called_by(function))

    def _knows_operator(self, op: WatchedOp) -> bool:
        packet = op.op.overloadpacket
        if any(known is packet or known is op.op for _, known in self._registered):
            return True
        return any(
            path.name == op.op_name and path.namespace.startswith(op.op.namespace) for path, _ in shipped().rules
        )

    def _suspects(self) -> Iterator[Suspect]:
        """Yields operators above the tolerance, each with those that wrote its inputs; then those with most errors."""
        errors = self._errors
        imprecise = [op for op in self._ops if errors.get(id(op), 0.0) > self._tolerance]
        for op in sorted(imprecise, key=lambda op: -errors[id(op)]):
            yield self._suspect(op)
            yield from map(self._suspect, _writers(op.named_op.inputs, depth=3))
        by_suspect = grouped((self._suspect(op), errors[id(op)]) for op in self._ops if id(op) in errors)
        yield from sorted(by_suspect, key=lambda each: -sum(by_suspect[each]))

    def _suspect(self, op: WatchedOp) -> Suspect:
        location = self._location(op)
        return Suspect(location.function, enclosing(location.module or ""))


def _writers(inputs: Iterable[Values], depth: int) -> Iterator[WatchedOp]:
    found = [writer for values in inputs for writer in values.writers]
    yield from found
    if depth > 1:
        for writer in found:
            yield from _writers(writer.inputs, depth - 1)


def _rules_by_function() -> dict[int, Rule]:
    """Returns the shipped rules for float16 by the id of the function; torch keeps all of these alive."""
    functions = ((identity(path), rule) for path, rule in shipped().for_half(torch.float16).items())
    return {id(function): rule for function, rule in functions if not isinstance(function, Path)}


def _is_custom(op: WatchedOp) -> bool:
    return op.op.namespace not in _OF_TORCH


def _custom_path(op: WatchedOp) -> str:
    return f"torch.ops.{op.op.namespace}.{op.op_name}"


def _largest(values: Sequence[Values]) -> float:
    return max((each.largest for each in values if each.largest is not None), default=0.0)


def _errors(ops: Sequence[WatchedOp]) -> tuple[dict[int, float], int]:
    """Runs operators again in bfloat16 and in float32; syncs with each device once.

    Returns:
        The relative error by the operator's id, and the number of operators that could not be compared.
    """
    computing = [op for op in ops if op.op_name not in _MOVES and op.arguments is not None and op.outputs]
    judged = [op for op in computing if any(values.dtype is torch.float32 for values in op.inputs)]
    pairs = {id(op): pair for op in judged if (pair := _error_of(op)) is not None}
    errors: dict[int, float] = {}
    for keys in grouped((pair.device, key) for key, pair in pairs.items()).values():
        numbers = torch.stack([pairs[key] for key in keys]).tolist()
        for key, (difference, size) in zip(keys, numbers, strict=True):
            if 0 < size < math.inf and difference < size * _NOISE:
                errors[key] = difference / size
    return errors, len(judged) - len(pairs)


def _error_of(op: WatchedOp) -> Tensor | None:
    """Returns |bfloat16 - float32| and |float32| on the device; None if bfloat16 has no kernel, or op is random."""
    assert op.arguments is not None
    if torch.Tag.nondeterministic_seeded in op.op.tags:
        return None
    # First, since an operator in place writes to the copies that were kept.
    narrow = floating_in(run_again(op.op, *with_types(op.arguments, _IN_BFLOAT16)))
    exact = floating_in(run_again(op.op, *op.arguments))
    if not exact or [each.shape for each in narrow] != [each.shape for each in exact]:
        return None
    with torch.no_grad(), paused():
        differences = [_finite_norm(one.float() - other.float()) for one, other in zip(narrow, exact, strict=True)]
        sizes = [_finite_norm(each.float()) for each in exact]
        return torch.stack([_total(differences), _total(sizes)])


def _finite_norm(tensor: Tensor) -> Tensor:
    """Returns the 2-norm of the finite elements, in float64: inf of a mask is inf in both types."""
    norm: Tensor = torch.linalg.vector_norm(tensor.nan_to_num(0.0, 0.0, 0.0), dtype=torch.float64)
    return norm


def _total(norms: list[Tensor]) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm


def autograd_functions(loss: Tensor) -> dict[type, int]:
    """Returns the classes of the users' autograd.Functions in a loss's graph, with the number of their nodes."""
    nodes = () if loss.grad_fn is None else nodes_of([loss.grad_fn])
    kinds: Iterator[Any] = (getattr(node, "_forward_cls", None) for node in nodes)  # of BackwardCFunction only
    own = ("torch", "ampatch")
    return Counter(kind for kind in kinds if kind is not None and kind.__module__.partition(".")[0] not in own)
