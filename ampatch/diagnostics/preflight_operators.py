"""Judges the operators of a watched float32 step: float16's range, bfloat16's precision, functions that no list knows.

Runs operators again on copies of their arguments. Must never change the recorded step.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from ampatch.cast_lists import spellings
from ampatch.cast_lists.lists import shipped
from ampatch.cast_lists.paths import Path, identity, unwrapped
from ampatch.cast_lists.rules import Rule, Treatment
from ampatch.diagnostics.overflow_trace import Examiner, Finding
from ampatch.diagnostics.preflight_report import Imprecise, Location, OutOfRange, Underflow, Unlisted
from ampatch.diagnostics.preflight_steps import Step, enclosing, flushed_of, with_types
from ampatch.diagnostics.watch import Values, Watch, WatchedOp, paused
from ampatch.patching.function_patches import Registration

_FLOAT16_MAX = torch.finfo(torch.float16).max
_IN_BFLOAT16 = {torch.float32: torch.bfloat16}

#: Namespaces of torch's own operators.
_OF_TORCH = frozenset(
    ("aten", "c10d", "c10d_functional", "_c10d_functional", "higher_order", "inductor", "mkl", "mkldnn", "onednn")
    + ("prim", "prims", "profiler", "quantized", "_quantized", "rngprims", "sparse", "symm_mem")
)

#: Operators that copy or fill, and compute nothing.
_MOVES = frozenset(("_to_copy", "clone", "copy_", "fill_", "ones_like", "zero_", "zeros_like", "full_like", "new_zeros"))

_AT_O1 = {
    Treatment.WHITELIST: "half",
    Treatment.BLACKLIST: "float32",
    Treatment.PROMOTE: "the widest type of its inputs",
    Treatment.BANNED: "half it raises",
}
_UNKNOWN_AT_O1 = "the type of its inputs"


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
        suspects: operators to blame for an inaccurate level, the likeliest first.
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
        watch.read()
        errors, self.uncompared = _errors(watch.ops)
        located = {id(op): self._location(op) for op in watch.ops if op.outputs}
        self.out_of_range = _out_of_range(watch.ops, located)
        self.imprecise = _imprecise(watch.ops, located, errors, tolerance)
        self.unlisted = tuple(self._unlisted(watch.ops, located, autograd_functions))
        self.suspects = tuple(dict.fromkeys(self._suspects(watch.ops, located, errors, tolerance)))

    def _location(self, op: WatchedOp) -> Location:
        told = self._examiner.describe(Finding(op))
        function = _custom_path(op) if _is_custom(op) else told.function
        direction = "backward" if op.is_backward else "forward"
        return Location(
            function, told.operator, direction, told.module, told.file, told.line, told.source, self._at_o1(op, told)
        )

    def _at_o1(self, op: WatchedOp, told: Any) -> str:
        named = op.forward if op.is_backward and op.forward is not None else op
        rule = self._rule_of(named.function, told.function)
        if rule is None:
            return _UNKNOWN_AT_O1
        return _AT_O1[rule.treatment] + (" for some arguments" if rule.when else "")

    def _rule_of(self, function: object, path: str) -> Rule | None:
        namespace, _, name = path.rpartition(".")
        return self._rules.get(id(unwrapped(function))) or shipped().rules.get((Path(namespace, name), torch.float16))

    def _unlisted(
        self, ops: Sequence[WatchedOp], located: Mapping[int, Location], functions: Mapping[type, int]
    ) -> Iterator[Unlisted]:
        custom: dict[str, list[Location]] = {}
        plain: dict[str, list[Location]] = {}
        for op in ops:
            if op.is_backward or not op.inputs or not op.outputs or op.op_name in _MOVES:
                continue
            if _is_custom(op):
                if not self._knows_operator(op):
                    custom.setdefault(_custom_path(op), []).append(located[id(op)])
            elif op.function is not None and not self._knows(op.function):
                plain.setdefault(op.function_name, []).append(located[id(op)])
        for path, at in custom.items():
            yield Unlisted("custom operator", path, len(at), at[0].module, at[0].file, at[0].line)
        for kind, calls in functions.items():
            if not any(owner is kind for owner, _ in self._registered):
                code = getattr(getattr(kind, "forward", None), "__code__", None)
                where = (None, None) if code is None else (code.co_filename, code.co_firstlineno)
                yield Unlisted("autograd.Function", f"{kind.__module__}.{kind.__qualname__}", calls, None, *where)
        for path, at in sorted(plain.items(), key=lambda item: -len(item[1])):
            yield Unlisted("torch function", path, len(at), at[0].module, at[0].file, at[0].line)

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
        return any(path.name == op.op_name and path.namespace.startswith(op.op.namespace) for path, _ in shipped().rules)

    def _suspects(
        self,
        ops: Sequence[WatchedOp],
        located: Mapping[int, Location],
        errors: Mapping[int, float],
        tolerance: float,
    ) -> Iterator[Suspect]:
        """Yields operators above the tolerance, each with those that wrote its inputs; then those with most errors."""

        def suspect(op: WatchedOp) -> Suspect:
            location = located[id(op)]
            return Suspect(location.function, enclosing(location.module or ""))

        worst = sorted((op for op in ops if errors.get(id(op), 0) > tolerance), key=lambda op: -errors[id(op)])
        for op in worst:
            yield suspect(op)
            named = op.forward if op.is_backward and op.forward is not None else op
            for writer in _writers(named.inputs, depth=3):
                if id(writer) in located:
                    yield suspect(writer)
        sums: dict[Suspect, float] = {}
        for op in ops:
            if id(op) in errors:
                each = suspect(op)
                sums[each] = sums.get(each, 0.0) + errors[id(op)]
        yield from sorted(sums, key=lambda each: -sums[each])


def _writers(inputs: Iterable[Values], depth: int) -> Iterator[WatchedOp]:
    found = [values.writer for values in inputs if values.writer is not None]
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


def _out_of_range(ops: Sequence[WatchedOp], located: Mapping[int, Location]) -> tuple[OutOfRange, ...]:
    """Returns operators that leave the range, those that only pass it on excepted."""
    found: dict[Location, list[float]] = {}
    for op in ops:
        largest = _largest(op.outputs)
        entered = [values for values in op.inputs if values.writer is not None]  # not data or parameters
        if largest > _FLOAT16_MAX >= _largest(entered):
            found.setdefault(located[id(op)], []).append(largest)
    rows = (OutOfRange(location, max(largest), len(largest)) for location, largest in found.items())
    return tuple(sorted(rows, key=lambda row: -row.largest))


def _largest(values: Sequence[Values]) -> float:
    return max((each.largest for each in values if each.largest is not None), default=0.0)


def _imprecise(
    ops: Sequence[WatchedOp], located: Mapping[int, Location], errors: Mapping[int, float], tolerance: float
) -> tuple[Imprecise, ...]:
    found: dict[Location, list[float]] = {}
    for op in ops:
        if errors.get(id(op), 0.0) > tolerance:
            found.setdefault(located[id(op)], []).append(errors[id(op)])
    rows = (Imprecise(location, max(each), len(each)) for location, each in found.items())
    return tuple(sorted(rows, key=lambda row: -row.error))


def _errors(ops: Sequence[WatchedOp]) -> tuple[dict[int, float], int]:
    """Runs operators again in bfloat16 and in float32; syncs with each device once.

    Returns:
        The relative error by the operator's id, and the number of operators that could not be compared.
    """
    keys: dict[torch.device, list[int]] = {}
    pairs: dict[torch.device, list[Tensor]] = {}
    skipped = 0
    for op in ops:
        if op.op_name in _MOVES or op.arguments is None or not _has_float32(op.inputs) or not op.outputs:
            continue
        pair = None if torch.Tag.nondeterministic_seeded in op.op.tags else _error_of(op)
        if pair is None:
            skipped += 1
            continue
        keys.setdefault(pair.device, []).append(id(op))
        pairs.setdefault(pair.device, []).append(pair)
    errors: dict[int, float] = {}
    for device, of_device in pairs.items():
        for key, (difference, size) in zip(keys[device], torch.stack(of_device).tolist(), strict=True):
            if size > 0 and difference == difference:  # not NaN: such as inf - inf of a mask
                errors[key] = difference / size
    return errors, skipped


def _has_float32(inputs: Sequence[Values]) -> bool:
    return any(values.dtype is torch.float32 for values in inputs)


def _error_of(op: WatchedOp) -> Tensor | None:
    """Returns |bfloat16 - float32| and |float32| on the device; None if bfloat16 has no kernel."""
    assert op.arguments is not None
    args, kwargs = op.arguments
    with torch.no_grad(), paused():
        try:
            # First, since an operator in place writes to the copies that were kept.
            narrow_args, narrow_kwargs = with_types((args, kwargs), _IN_BFLOAT16)
            narrow = list(_floating(op.op(*narrow_args, **narrow_kwargs)))
            exact = list(_floating(op.op(*args, **kwargs)))
        except (RuntimeError, TypeError, NotImplementedError):
            return None
        if not exact or [each.shape for each in narrow] != [each.shape for each in exact]:
            return None
        differences = [_finite_norm(one.float() - other.float()) for one, other in zip(narrow, exact, strict=True)]
        sizes = [_finite_norm(each.float()) for each in exact]
        return torch.stack([_total(differences), _total(sizes)])


def _finite_norm(tensor: Tensor) -> Tensor:
    """Returns the 2-norm of the finite elements, in float64: inf of a mask is inf in both types."""
    return torch.linalg.vector_norm(tensor.nan_to_num(0.0, 0.0, 0.0), dtype=torch.float64)


def _total(norms: list[Tensor]) -> Tensor:
    return torch.linalg.vector_norm(torch.stack(norms))


def _floating(result: Any) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        if result.is_floating_point() and result.numel() and result.layout is torch.strided:
            yield result
    elif isinstance(result, (list, tuple)):
        for each in result:
            yield from _floating(each)


def autograd_functions(loss: Tensor) -> dict[type, int]:
    """Returns the classes of the users' autograd.Functions in a loss's graph, with the number of their nodes."""
    found: dict[type, int] = {}
    waiting, seen = [loss.grad_fn], {None}
    while waiting:
        node = waiting.pop()
        if node in seen or node is None:
            continue
        seen.add(node)
        kind = getattr(node, "_forward_cls", None)
        if isinstance(node, BackwardCFunction) and kind is not None:
            if kind.__module__.partition(".")[0] not in ("torch", "ampatch"):
                found[kind] = found.get(kind, 0) + 1
        waiting += [following for following, _ in node.next_functions]
    return found


def underflows(reference: Step, scale: float) -> tuple[Underflow, ...]:
    """Returns the parameters with gradient values that float16 flushes to zero, at scale 1 and at another."""
    rows = []
    for name, gradient in reference.gradients.items():
        small, nonzero = flushed_of(gradient, 1.0)
        if small:
            rows.append(Underflow(name, small / nonzero, flushed_of(gradient, scale)[0] / nonzero, scale))
    return tuple(sorted(rows, key=lambda row: (-row.share, row.parameter)))
