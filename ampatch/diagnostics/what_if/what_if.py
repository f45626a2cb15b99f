"""`amp.what_if`: watches one float32 step, and rounds what each listed function gets to every format, on the side.

Owns the counts. A call runs as it is; then it runs again on rounded arguments, once for each format. Gradients are
rounded when they arrive. Must never change what the step computes, nor keep a tensor of it beyond the call or hook that
has it.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import sys
import types
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, register_multi_grad_hook

from ampatch.cast_lists.lists import CastLists
from ampatch.cast_lists.paths import identity, prefixes
from ampatch.cast_lists.rules import Treatment
from ampatch.cast_lists.spellings import plain_name
from ampatch.casting.nested import CASTABLE, TensorCast, tensors_in, tensors_of_call
from ampatch.casting.rounding import rounded
from ampatch.diagnostics.process_state import RandomState
from ampatch.diagnostics.recorder import callers
from ampatch.diagnostics.recorder.operands import versions_of
from ampatch.diagnostics.recorder.recorder import Recorder, paused, unseen
from ampatch.diagnostics.trial_steps.steps import relative
from ampatch.diagnostics.trial_steps.subject import Subject, copied, noting, undisturbed
from ampatch.diagnostics.what_if.result import FormatNoise, Lost, WhatIf
from ampatch.formats import Format
from ampatch.graph_nodes import leaf_of
from ampatch.grouping import grouped
from ampatch.patching.casting_mode import CastRules
from ampatch.patching.emulation import Operands
from ampatch.torch_private.autograd import current_graph_task_id
from ampatch.tracing import is_batched

_FLOAT32 = "ampatch: The model or loss_fn raised this in float32."

#: The relative error from which a value counts as imprecise.
_IMPRECISE = 0.1

#: The list for one half type serves for both: which functions are listed does not depend on it here.
_HALF = torch.bfloat16


def what_if(subject: Subject, formats: Sequence[Format], lists: CastLists) -> WhatIf:
    """Runs what `amp.what_if` describes.

    Args:
        subject: the user's model and its step.
        formats: the formats.
        lists: the cast lists whose whitelist names the functions.

    Raises:
        OptionError: the step cannot be judged.
    """
    with undisturbed("amp.what_if", subject):
        copy = copied(subject.model)
        watched, arguments = _Watched(copy, formats, lists), subject.begin_step()
        with watched, noting(_FLOAT32):
            loss = subject.loss_of(copy, arguments)
            loss.backward()
        return watched.result(loss)


class _Place(NamedTuple):
    """Where a function was called, as `FormatNoise` has it."""

    function: str
    module: str | None
    file: str | None
    line: int | None


@dataclass(frozen=True, slots=True)
class _Call:
    """A call that can be made again, on the random numbers that it had.

    Holds its arguments until its backward pass has run, as autograd does for most of them.
    """

    place: _Place
    function: Any
    operands: Operands
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    before: RandomState
    versions: tuple[int, ...]

    def repeated(self, operand: TensorCast, addend: TensorCast) -> Any:
        """Makes the call with other arguments, and returns its result. What it updates is a copy."""

        def of_castable(change: TensorCast) -> TensorCast:
            return lambda tensor: change(tensor) if tensor.dtype in CASTABLE else tensor

        changes = of_castable(operand), of_castable(addend), Tensor.clone
        args, kwargs = self.operands.changed(self.args, self.kwargs, *changes)
        self.before.restore()
        return self.function(*args, **kwargs)

    def gradients(self, change: TensorCast, given: Sequence[Tensor | None]) -> list[Tensor]:
        """Makes the call and its backward pass, and returns the gradients of its arguments.

        Args:
            change: returns the operand to use in the place of one; see `Operands`.
            given: the gradients of its results.
        """
        leaves: list[Tensor] = []

        def leaf(change: TensorCast, tensor: Tensor) -> Tensor:
            with torch.no_grad():
                made = change(tensor).detach().requires_grad_(tensor.requires_grad)
            leaves.extend([made] if made.requires_grad else [])
            return made

        with torch.enable_grad():
            result = self.repeated(functools.partial(leaf, change), functools.partial(leaf, _same))
            made = zip(_with_gradients(result), given, strict=True)
            pairs = [(out, grad.to(out.dtype)) for out, grad in made if grad is not None]
            outs, grads = zip(*pairs, strict=True)
            found = torch.autograd.grad(outs, leaves, grads, allow_unused=True)
        return [torch.zeros_like(each) if grad is None else grad for each, grad in zip(leaves, found, strict=True)]


class _Found(NamedTuple):
    """What a format does to one call, in one direction.

    Attributes:
        counts: what `_counts` returns, for all values together.
        noise: what `_noise` returns.
        reach: the parameters whose gradients come by here, as bits; None in the forward pass.
    """

    format: Format
    place: _Place
    counts: list[int]
    noise: float
    reach: int | None


class _Watched(Recorder):
    """Counts what formats lose in the calls of one thread, and in the backward passes that it starts."""

    def __init__(self, model: nn.Module, formats: Sequence[Format], lists: CastLists) -> None:
        super().__init__()
        self._model, self._formats = model, formats
        self._modules = {id(module): name for name, module in model.named_modules()}
        trained = (each for each in model.parameters() if each.requires_grad)
        self._bits = {id(each): 1 << index for index, each in enumerate(trained)}
        self._reached: dict[Node, int] = {}
        self._found: list[_Found] = []
        rules = lists.for_half(_HALF)
        white = {path: rule for path, rule in rules.items() if rule.treatment is Treatment.WHITELIST}
        self._listed = {id(identity(path)): path.name for path in white}
        self._inside = {
            id(function): entry.inside
            for function, entry in CastRules(_HALF, rules.values()).entries.items()
            if entry.inside is not None
        }

    def function(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a function and, if it is listed, counts what the formats would do to it."""
        name = self._listed.get(id(function))
        if name is None or self.is_traced():
            return self._run(function, args, kwargs)
        with unseen():
            operands = Operands(name, function)
            unfit = _unfit(operands, args, kwargs)
            place = self._place(name, sys._getframe(2))
        if unfit:
            self.missed[f"{name} {unfit}; such calls were not judged."] = None
            return self._run(function, args, kwargs)
        call = _Call(place, function, operands, args, kwargs, RandomState(), versions_of((args, kwargs)))
        result = self._run(function, args, kwargs)
        # A checkpoint computes parts again in the backward pass. Their arguments have been judged, their gradients not.
        if current_graph_task_id() == -1:
            self._judge(call, result)
        with unseen():
            results = _with_gradients(result)
            nodes = [each.grad_fn for each in results if each.grad_fn is not None]
            if nodes:
                reach = functools.reduce(operator.or_, [self._reach(each) for each in nodes])
                judge = functools.partial(self._judge_gradients, call, reach)
                if results[1:]:
                    register_multi_grad_hook(results, judge)
                else:  # the other kind of hook does not run at the roots of a checkpoint's own backward pass
                    results[0].register_hook(lambda gradient: judge([gradient]))
        return result

    def _place(self, name: str, caller: types.FrameType) -> _Place:
        running = (self._modules.get(id(each.module)) for each in reversed(self.thread.running))
        module = next((each for each in running if each is not None), None)
        frame = callers.users_frame(caller)
        line = (None, None) if frame is None else (frame.f_code.co_filename, frame.f_lineno)
        place = _Place(plain_name(name), module, *line)
        if current_graph_task_id() == -1:
            return place
        # Computed again in a backward pass, where the frame of the user's code may be missing.
        known = [each.place for each in self._found if each.place[:2] == place[:2]]
        return place if place in known or not known else known[0]

    def _run(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a function; one of torch's in Python so that the functions that it calls are seen, too."""
        inside = self._inside.pop(id(function), None)  # taken out meanwhile: some functions call themselves
        if inside is None:
            return function(*args, **kwargs)
        try:
            with self.function_mode:
                return inside(*args, **kwargs)
        finally:
            self._inside[id(function)] = inside

    def _judge(self, call: _Call, result: Any) -> None:
        """Makes a call on arguments in each format, and counts."""
        with self._aside():
            for format in self._formats:
                given, rounding = _rounding(format)
                found = call.repeated(rounding, _same)
                counts = _counts(given, format)
                self._found.append(_Found(format, call.place, counts, _noise(result, found), None))

    def _judge_gradients(self, call: _Call, reach: int, gradients: Sequence[Tensor | None]) -> None:
        """Makes the backward pass of a call with arguments and gradients in each format, and counts."""
        is_same = versions_of((call.args, call.kwargs)) == call.versions
        if not is_same or any(each is not None and is_batched(each) for each in gradients):
            what = "in a batched backward pass" if is_same else "whose arguments were written to"
            self.missed[f"Gradients of {call.place.function} {what} were not judged."] = None
            return
        with self._aside():
            exact = call.gradients(_same, gradients)
            for format in self._formats:
                given, rounding = _rounding(format)
                changed = [None if each is None else rounding(each) for each in gradients]
                counts = _counts(given, format)
                noise = _noise(exact, call.gradients(rounding, changed))
                self._found.append(_Found(format, call.place, counts, noise, reach))

    def _reach(self, root: Node) -> int:
        """Returns the parameters that a backward pass reaches from a node, as bits."""
        waiting = [root]
        while waiting:
            node = waiting[-1]
            following = [each for each, _ in node.next_functions if each is not None]
            unknown = [each for each in following if each not in self._reached]
            waiting += unknown
            if not unknown:
                own = self._bits.get(id(leaf_of(node)), 0)
                self._reached[waiting.pop()] = functools.reduce(
                    operator.or_, map(self._reached.__getitem__, following), own
                )
        return self._reached[root]

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        """Context for work that neither the recorder sees, nor random numbers do."""
        after = RandomState()
        with torch.no_grad(), unseen(), paused():
            yield
        after.restore()

    def result(self, loss: Tensor) -> WhatIf:
        """Returns the rows, those with most noise first."""
        sizes = [each.numel() for each in self._model.parameters() if each.requires_grad]

        @functools.cache
        def weight(reach: int) -> float:
            """Returns what the noise of a gradient counts, given the parameters that learn from it."""
            # The root: by their share of the model's numbers alone, a small part that cannot learn would count little.
            return math.sqrt(sum(size for index, size in enumerate(sizes) if reach >> index & 1) / max(sum(sizes), 1))

        def effect_of(found: _Found) -> float:
            counts = 1.0 if found.reach is None else weight(found.reach)
            return found.noise * counts if counts else 0.0  # the noise may be inf

        effects = list(map(effect_of, self._found))
        calls = [(each.place, each, effect) for each, effect in zip(self._found, effects, strict=True)]
        functions = [(_Place(place.function, None, None, None), each, effect) for place, each, effect in calls]
        modules = [
            (_Place("", name, None, None), each, effect)
            for place, each, effect in calls
            for name in prefixes(place.module)
        ]
        notes = [] if math.isfinite(loss.item()) else [f"The loss of the float32 step is {loss.item()}."]
        return WhatIf(
            model=type(self._model).__name__,
            loss=loss.item(),
            formats=tuple(map(str, self._formats)),
            calls=_rows(calls),
            functions=_rows(functions),
            modules=_rows(modules),
            notes=(*notes, *self.missed),
        )


def _rows(found: Iterable[tuple[_Place, _Found, float]]) -> tuple[FormatNoise, ...]:
    """Returns a row for each format and place, from what was found there, and its effect on the step."""
    every = grouped(((each.format, place), (each, effect)) for place, each, effect in found)
    rows = []
    for (format, place), several in every.items():
        forward = [each for each, _ in several if each.reach is None]
        backward = [each for each, _ in several if each.reach is not None]
        noise = math.sqrt(sum(effect for _, effect in several))
        rows.append(FormatNoise(str(format), *place, len(forward), noise, _lost(forward), _lost(backward)))
    return tuple(sorted(rows, key=lambda row: -row.noise))


def _lost(found: list[_Found]) -> Lost:
    values, underflow, overflow, imprecise = (sum(each.counts[index] for each in found) for index in range(4))
    every = max(values, 1)
    noise = math.sqrt(sum(each.noise for each in found))
    return Lost(values, underflow / every, overflow / every, imprecise / every, noise)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _with_gradients(result: Any) -> list[Tensor]:
    return [each for each in tensors_in(result) if each.requires_grad and each.dtype in CASTABLE]


def _unfit(operands: Operands, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Returns why a call cannot compute in a format, as part of a sentence; empty if it can."""
    if operands.writes(args, kwargs) or kwargs.get("out") is not None:
        return "writes to a tensor that it is given"
    dense = (each.layout is torch.strided and not each.is_nested for each in tensors_of_call(args, kwargs))
    return "" if all(dense) else "got a sparse or nested tensor"


def _rounding(format: Format) -> tuple[list[tuple[Tensor, Tensor]], TensorCast]:
    """Returns a function that rounds tensors, and the list in which it puts each with the rounded one."""
    given: list[tuple[Tensor, Tensor]] = []

    def rounding(tensor: Tensor) -> Tensor:
        found = rounded(tensor, format, torch.float32)
        given.append((tensor, found))
        return found

    return given, rounding


def _counts(given: Iterable[tuple[Tensor, Tensor]], format: Format) -> list[int]:
    """Returns the number of finite values but zeros, and of those that underflow, overflow, and lose a digit."""
    # The format's own scale decides what is beyond its range. What saturates there is inf without saturation.
    nearest = replace(format, rounding="nearest", overflow="inf")
    sums = [0, 0, 0, 0]
    for exact, found in given:
        known = exact.isfinite() & (exact != 0)
        unbounded = found if format == nearest else rounded(exact, nearest, torch.float32)
        zero, beyond = known & (found == 0), known & ~unbounded.isfinite()
        imprecise = known & ~zero & ~beyond & ((found - exact).abs() > _IMPRECISE * exact.abs())
        here = torch.stack([each.sum() for each in (known, zero, beyond, imprecise)]).tolist()
        sums = [old + new for old, new in zip(sums, here, strict=True)]
    return sums


def _noise(exact: Any, found: Any) -> float:
    """Returns the sum of |found - exact|**2 / |exact|**2 of several tensors; inf if a finite value is not finite."""
    total = 0.0
    for one, other in zip(tensors_in(exact), tensors_in(found), strict=True):
        if one.dtype in CASTABLE:
            known = one.isfinite()
            errors, values = torch.where(known, other - one, 0.0), torch.where(known, one, 0.0)
            ratio = relative(float(errors.double().norm()), float(values.double().norm()))
            total += ratio**2 if math.isfinite(ratio) else math.inf
    return total
