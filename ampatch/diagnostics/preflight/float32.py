"""Judges a float32 step: range, precision and lists of its operators, and gradients that float16 flushes to zero.

Runs operators again on the arguments that were kept, and one step in float64. A flushed gradient value is noise if the
float64 gradient differs from it by at least that gradient's own size: then float32 has no correct digit of it either.
Must never change the user's tensors, leave a value out because it is noise, nor call one noise without this evidence.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from ampatch.cast_lists import spellings
from ampatch.cast_lists.lists import shipped
from ampatch.cast_lists.paths import Path, identity
from ampatch.cast_lists.rules import Treatment
from ampatch.diagnostics.overflow.examiner import Examiner
from ampatch.diagnostics.preflight.result import Imprecise, Location, OutOfRange, Underflow, Unlisted
from ampatch.diagnostics.recorder.operands import floating_in, with_types
from ampatch.diagnostics.recorder.recorder import paused
from ampatch.diagnostics.recorder.records import Values, WatchedOp
from ampatch.diagnostics.recorder.watch import Watch, run_again
from ampatch.diagnostics.trial_steps.steps import RandomInFloat32, Step, draws_itself, flushed_of, relative
from ampatch.diagnostics.trial_steps.subject import Subject, copied, text_of
from ampatch.function_wrapper import unwrapped
from ampatch.graph_nodes import nodes_of
from ampatch.grouping import grouped
from ampatch.runtime import runtime
from ampatch.torch_private.autograd import FORWARD_CLASS
from ampatch.torch_private.operators import CAST, NAMESPACES

_Row = TypeVar("_Row", OutOfRange, Imprecise)

_FLOAT16_MAX = torch.finfo(torch.float16).max
_IN_BFLOAT16 = {torch.float32: torch.bfloat16}

#: Operators that copy or fill, and compute nothing.
_MOVES = frozenset((CAST, "clone", "copy_", "fill_", "full_like", "new_zeros", "ones_like", "zero_", "zeros_like"))

_AT_O1 = {
    Treatment.WHITELIST: "half",
    Treatment.BLACKLIST: "float32",
    Treatment.PROMOTE: "the widest type of its inputs",
    Treatment.BANNED: "half it raises",
}
#: Errors from here on say nothing. float32 has 2**16 times bfloat16's precision, so the float32 result has lost 5 % as
#: well: a sum that cancels to rounding errors, such as the gradient of a bias before a softmax over the same axis.
_NOISE = 0.05 * 2**16
#: The greatest error of the float32 gradients in which the float64 step still counts as the same step.
_SAME_STEP = 0.01


class Operators:
    """The operators of a float32 step, judged.

    Args:
        watch: the step, with all arguments kept.
        examiner: names operators.
        loss: the loss of the step.
        tolerance: the error above which an operator loses too much to bfloat16.

    Attributes:
        out_of_range: operators that leave float16's range, those that only pass it on excepted.
        imprecise: operators that lose more than the tolerance.
        uncompared: number of operators that could not be compared.
        unlisted: functions that no list knows.
        banned: paths of the functions that the shipped lists ban.
        draws_itself: True if an attention kernel drew dropout.
    """

    def __init__(self, watch: Watch, examiner: Examiner, loss: Tensor, tolerance: float) -> None:
        self._examiner = examiner
        listed = [(identity(path), rule) for path, rule in shipped().for_half(torch.float16).items()]
        self._rules = {id(function): rule for function, rule in listed}  # torch and the lists keep all of these alive
        self._registered = [(each.owner, getattr(each.owner, each.name, None)) for each in runtime.registered]
        self._location = functools.cache(self._located)
        watch.read()
        self._errors, self.uncompared = _errors(watch.ops)
        self.draws_itself = draws_itself(watch.ops)
        for op in watch.ops:
            op.arguments = None  # the memory of the step is needed for the next ones
        self._above = [op for op, error in self._errors.items() if error > tolerance]
        self.out_of_range = self._rows(OutOfRange, _beyond_float16(watch.ops))
        self.imprecise = self._rows(Imprecise, ((op, self._errors[op]) for op in self._above))
        forward = [op for op in watch.ops if not op.is_backward]
        unlisted = self._unlisted(forward, loss)
        self.unlisted = tuple(sorted(unlisted, key=lambda row: (row.kind == "torch function", -row.count)))
        banned = {str(path) for (path, _), rule in shipped().rules.items() if rule.treatment is Treatment.BANNED}
        self.banned = [each for each in dict.fromkeys(op.function_name for op in forward) if each in banned]

    @functools.cached_property
    def suspects(self) -> list[tuple[str, str]]:
        """Operators to blame for an inaccurate level, the likeliest first: the function and the innermost module.

        Those above the tolerance come first, each with those that wrote its inputs; then those with most errors.
        """
        above = sorted(self._above, key=lambda op: -self._errors[op])
        blamed = [each for op in above for each in (op, *_writers(op.named_op, depth=3))]
        summed = grouped((self._suspect(op), error) for op, error in self._errors.items())
        return list(dict.fromkeys([*map(self._suspect, blamed), *sorted(summed, key=lambda each: -sum(summed[each]))]))

    def _located(self, op: WatchedOp) -> Location:
        named = self._examiner.named(op)
        at_o1 = self._at_o1(op.named_op.function, named.function)
        named = replace(named, function=_path_of(op)) if _is_custom(op) else named
        return Location(**asdict(named), direction=op.direction, at_o1=at_o1)

    def _at_o1(self, function: object, path: str) -> str:
        by_path = shipped().rules.get((Path.of(path), torch.float16))
        rule = self._rules.get(id(unwrapped(function))) or by_path
        if rule is None:
            return "the type of its inputs"
        return _AT_O1[rule.treatment] + (" for some arguments" if rule.when else "")

    def _rows(
        self, row: Callable[[Location, float, int], _Row], found: Iterable[tuple[WatchedOp, float]]
    ) -> tuple[_Row, ...]:
        """Returns a row for each location of some operators, the greatest number first."""
        numbers = grouped((self._location(op), number) for op, number in found)
        ordered = sorted(numbers.items(), key=lambda item: -max(item[1]))
        return tuple(row(location, max(several), len(several)) for location, several in ordered)

    def _unlisted(self, ops: Iterable[WatchedOp], loss: Tensor) -> Iterator[Unlisted]:
        computing = (op for op in ops if op.inputs and op.outputs and op.op_name not in _MOVES)
        unknown = grouped((_path_of(op), op) for op in computing if not self._knows(op))
        for path, calls in unknown.items():
            kind, location = "custom operator" if _is_custom(calls[0]) else "torch function", self._location(calls[0])
            yield Unlisted(kind, path, len(calls), location.module, location.file, location.line)
        for function, count in _autograd_functions(loss).items():
            if not any(owner is function for owner, _ in self._registered):
                code = getattr(getattr(function, "forward", None), "__code__", None)
                where = (None, None) if code is None else (code.co_filename, code.co_firstlineno)
                path = f"{function.__module__}.{function.__qualname__}"
                yield Unlisted("autograd.Function", path, count, None, *where)

    def _knows(self, op: WatchedOp) -> bool:
        """Returns True if a list or a registration names the function that ran an operator, or one that it calls."""
        if _is_custom(op):
            named = (path for path, _ in shipped().rules if path.name == op.op_name)
            is_listed = any(path.namespace.startswith(op.op.namespace) for path in named)
            return is_listed or self._has_registered(op.op.overloadpacket, op.op)
        function = unwrapped(op.function)
        if function is None or id(function) in self._rules or self._has_registered(function):
            return True
        if getattr(function, "__name__", "") in ("backward", "__get__", "__set__", "__setitem__"):
            return True  # no arithmetic of the forward pass
        return any(key in self._rules for key in spellings.called_by(function))

    def _has_registered(self, *functions: object) -> bool:
        return any(known is function for _, known in self._registered for function in functions)

    def _suspect(self, op: WatchedOp) -> tuple[str, str]:
        location = self._location(op)
        return location.function, location.module or ""


def _beyond_float16(ops: Iterable[WatchedOp]) -> Iterator[tuple[WatchedOp, float]]:
    """Yields operators that leave the range, with their largest result."""
    for op in ops:
        largest = _largest(op.outputs)
        computed = [values for values in op.inputs if values.results]  # not data or parameters
        if math.inf > largest > _FLOAT16_MAX >= _largest(computed):  # inf is on purpose: the step is finite
            yield op, largest


def _writers(op: WatchedOp, depth: int) -> Iterator[WatchedOp]:
    yield from op.writers
    if depth > 1:
        for writer in op.writers:
            yield from _writers(writer, depth - 1)


def _is_custom(op: WatchedOp) -> bool:
    return op.op.namespace not in NAMESPACES


def _path_of(op: WatchedOp) -> str:
    return f"torch.ops.{op.op.namespace}.{op.op_name}" if _is_custom(op) else op.function_name


def _largest(values: Sequence[Values]) -> float:
    return max((each.largest for each in values if each.largest is not None), default=0.0)


def _errors(ops: Iterable[WatchedOp]) -> tuple[dict[WatchedOp, float], int]:
    """Runs operators again in bfloat16 and in float32.

    Returns:
        The relative error by operator, and the number of operators that could not be compared.
    """
    computing = (op for op in ops if op.op_name not in _MOVES and op.outputs)
    judged = [op for op in computing if any(values.dtype is torch.float32 for values in op.inputs)]
    kept = {op: op.kept_arguments for op in judged}  # before one of them runs again: it may write to another's
    errors = {op: error for op in judged if (error := _error_of(op, kept[op])) is not None}
    return {op: error for op, error in errors.items() if error < _NOISE}, len(judged) - len(errors)


def _error_of(op: WatchedOp, kept: tuple[tuple[Any, ...], dict[str, Any]] | None) -> float | None:
    """Returns |bfloat16 - float32| / |float32|.

    None if bfloat16 has no kernel, if the operator is random, or if its arguments were written to since.
    """
    if kept is None or torch.Tag.nondeterministic_seeded in op.op.tags:
        return None
    # First, since an operator in place writes to the copies that were kept.
    narrow = floating_in(run_again(op.op, *with_types(kept, _IN_BFLOAT16)))
    exact = floating_in(run_again(op.op, *kept))
    if not exact or [each.shape for each in narrow] != [each.shape for each in exact]:
        return None
    with torch.no_grad(), paused():
        difference = _norm(one.float() - other.float() for one, other in zip(narrow, exact, strict=True))
        return relative(difference, _norm(exact))


def _norm(tensors: Iterable[Tensor]) -> float:
    """Returns the 2-norm of the finite elements, in float64: inf of a mask is inf in both types."""
    finite = [each.nan_to_num(0.0, 0.0, 0.0) for each in tensors]
    return math.hypot(*(float(torch.linalg.vector_norm(each, dtype=torch.float64)) for each in finite))


def _autograd_functions(loss: Tensor) -> dict[type, int]:
    """Returns the classes of the users' autograd.Functions in a loss's graph, with the number of their nodes."""
    nodes = () if loss.grad_fn is None else nodes_of([loss.grad_fn])
    kinds: Iterator[Any] = (getattr(node, FORWARD_CLASS, None) for node in nodes)  # of BackwardCFunction only
    own = ("torch", "ampatch")
    return Counter(kind for kind in kinds if kind is not None and kind.__module__.partition(".")[0] not in own)


def underflows(
    subject: Subject, reference: Step, draws_itself: bool, scale: float
) -> tuple[tuple[Underflow, ...], str]:
    """Returns the parameters whose gradients have values that float16 flushes to zero, those of noise alone last.

    Args:
        subject: the model and its step.
        reference: the float32 step.
        draws_itself: whether an attention kernel drew dropout, so that no other type can have the same one.
        scale: loss scale for which the share is given too.

    Returns:
        The parameters, and why no step in float64 tells noise from signal: empty if one does, or if none was needed.
    """
    masks = ((name, flushed_of(gradient, 1.0)) for name, gradient in reference.gradients.items())
    flushed = {name: mask for name, mask in masks if bool(mask.any())}
    exact, unknown = _gradients_in_float64(subject, reference) if flushed and not draws_itself else ({}, "")
    if draws_itself:
        unknown = "an attention kernel drew its own dropout, which is another one in float64"
    rows = []
    for name, mask in flushed.items():
        gradient, there = reference.gradients[name], exact.get(name)
        count, nonzero = int(mask.sum()), int((gradient != 0).sum())
        noise = None if there is None else int((mask & ((gradient - there).abs() >= there.abs())).sum()) / count
        share_scaled = int(flushed_of(gradient, scale).sum()) / nonzero
        rows.append(Underflow(name, count / nonzero, share_scaled, scale, noise))
    return tuple(sorted(rows, key=lambda row: (row.is_noise, -row.share, row.parameter))), unknown


def _gradients_in_float64(subject: Subject, reference: Step) -> tuple[Mapping[str, Tensor], str]:
    """Returns the gradients of a step in float64, on the random numbers of float32; or none, and why.

    The loss is computed on outputs in float32, since ``loss_fn`` may have targets in it. Its rounding errors are those
    of the float32 step then, and never taken for noise.
    """
    try:
        model = copied(subject.model).double()
        args, kwargs = with_types(subject.begin_step(), {torch.float32: torch.float64})
        with RandomInFloat32(of=frozenset({torch.float64})):
            output = model(*args, **kwargs)
            loss = subject.loss_for(with_types(output, {torch.float64: torch.float32}), model)
            loss.backward()
    except Exception as error:  # noqa: BLE001 - a model may need float32, and the report says so
        return {}, text_of(error)
    step = Step.of(loss, model.named_parameters(), model)
    difference = step.gradient_error(reference)
    if difference <= _SAME_STEP:  # NaN is not
        return step.gradients, ""
    return {}, f"its gradients differ by {difference:.2g} in all, so that it is another step"
