"""A skipped step as a value, and what happens after it: log, raise, or call the user's function.

Owns the texts about a skipped step, and the choice of ``on_overflow``. Must never decide whether a step is skipped, nor
change gradients: it counts inf and NaN in them, which syncs with the device.
"""

from __future__ import annotations

import inspect
import logging
import math
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from ampatch.errors import GradientOverflowError, OptionError, UsageError, did_you_mean
from ampatch.native import kernels
from ampatch.native.host_copy import read
from ampatch.opt_levels import dtype_name

logger = logging.getLogger("ampatch")

#: The log line of a skipped step; the placeholders are the scaler's number, "reducing loss scale to", and the scale.
LINE = "Gradient overflow. Skipping step, loss scaler %d %s %s"

#: Why an overflow names no gradient.
OF_ANOTHER_RANK = "no gradient of this rank is inf or NaN: another rank's was"
OF_ANOTHER_OPTIMIZER = "no gradient of this optimizer is inf or NaN: another optimizer's in the same block was"
CHANGED_SINCE = (
    "no gradient of this optimizer is inf or NaN now: they were cleared or changed after the block, or another "
    "optimizer's in the same block was"
)

CLEARED = "no gradient of this optimizer is inf or NaN now: they were cleared or changed since"

#: What to do if no scale helps.
ADVICE = (
    "Look for inputs or a loss that are not finite, a learning rate that is too high, or values in the forward that "
    "exceed float16's range: bfloat16 has the range of float32."
)

#: The environment variable that has every session trace overflows, if it is neither empty, 0, false, no nor off.
TRACE_VARIABLE = "AMPATCH_TRACE_OVERFLOW"

_CHOICES = ("explain", "log", "raise", "trace")
#: Choices that report nothing but the log line in the search of the loss scale, and so cost a step nothing.
_LOGS_ONLY = (("explain",), ("log",))
#: Skipped steps in a row that the search of the loss scale accounts for: before the first step that ran, and later.
_FIRST_SEARCH, _SEARCH = 7, 2
_NOT_NOTED = (
    "Steps are skipped for which the search of the loss scale does not account. No forward pass of an adopted model "
    "was noted, such as one that is compiled: on_overflow='trace' watches the steps as they run."
)
_LOOKED = "  note      on_overflow='explain', the default, looks for the cause of such steps; 'log' turns that off"
SAME = "  the trace is that of the step skipped before"
_MOST_NAMED = 8

_GO_ON = (
    "The step was skipped: weights and optimizer state are as they were. To go on, catch amp.GradientOverflowError "
    "around optimizer.step(), and clear the gradients. To log skipped steps only, leave out on_overflow='raise'."
)


@dataclass(frozen=True, slots=True)
class NonFiniteGradient:
    """A gradient with elements that are inf or NaN.

    Of a sharded gradient only this rank's elements are counted, of a sparse one only its values. A complex element
    counts as two numbers.

    Attributes:
        name: name of the parameter in the model.
        shape: shape of the gradient; of a sharded one, the whole shape.
        dtype: dtype of the gradient, such as "float32". At O2 it is that of the float32 master.
        infs: number of elements that are inf or -inf.
        nans: number of elements that are NaN.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    infs: int
    nans: int

    def __str__(self) -> str:
        return f"{self.name}, shape {self.shape}, {self.dtype}: {self.infs} inf, {self.nans} nan"

    def to_dict(self) -> dict[str, Any]:
        """Returns the attributes as plain data for JSON."""
        return {**asdict(self), "shape": list(self.shape)}


@dataclass(frozen=True, slots=True)
class ScaleChange:
    """The reaction of one loss's scale to an overflow.

    Attributes:
        loss_id: number of the loss.
        before: scale by which the loss was multiplied.
        after: scale of the next block; the same under a static scale. For a `GradScaler`, the scale that its
            ``update`` will set.
    """

    loss_id: int
    before: float
    after: float

    @property
    def verb(self) -> str:
        """The words before the scale in the log line."""
        return "reducing loss scale to" if self.after < self.before else "keeping loss scale at"

    def __str__(self) -> str:
        return LINE % (self.loss_id, self.verb, self.after)


@dataclass(frozen=True, slots=True)
class Overflow:
    """One skipped step of one optimizer.

    ``str()`` of it is a text of several lines: the log line, the gradients that are not finite, and the trace.

    Attributes:
        optimizer: name of the optimizer's class.
        scales: reactions of the scales, one for each loss whose gradients overflowed. With ``check_finite``, of the
            last loss before the step.
        gradients: every gradient of the optimizer that is inf or NaN, as they are when the step is skipped. Those that
            were cleared since, for a later backward pass, are counted as they were.
        non_finite_loss: a loss that is inf or NaN, or the sum of its elements; None if all losses are finite.
        remark: why ``gradients`` is empty; empty text if it is not.
        trace: what a tracer found out about the origin of the overflow: an object with ``str()`` and ``to_dict()``.
            None if there is none.
        step: what `save` writes; None if the step was not traced.
    """

    optimizer: str
    scales: tuple[ScaleChange, ...]
    gradients: tuple[NonFiniteGradient, ...]
    non_finite_loss: float | None = None
    remark: str = ""
    trace: Any = None
    step: Any = field(default=None, repr=False, compare=False)

    @property
    def loss_ids(self) -> tuple[int, ...]:
        """Numbers of the losses whose gradients overflowed."""
        return tuple(change.loss_id for change in self.scales)

    @property
    def loss_scale_before(self) -> float:
        """Scale of the first of these losses before the overflow."""
        return self.scales[0].before

    @property
    def loss_scale_after(self) -> float:
        """Scale of the first of these losses after the overflow."""
        return self.scales[0].after

    @property
    def loss_is_finite(self) -> bool:
        """False if a loss itself is inf or NaN, so that no scale could help."""
        return self.non_finite_loss is None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the step to a file, with which `amp.replay` runs it again in another process.

        Call it in a function for ``on_overflow=("trace", function)``, or where `GradientOverflowError` is caught: until
        the next forward pass or step. The file holds the weights, buffers and inputs of the models, torch's random
        states, and the gradients that came into the outputs.

        Args:
            path: of the file, which is replaced if it exists: ``.pt`` or ``.pth``.

        Raises:
            UsageError: the step was not traced, or is over; or the parameters are sharded.
            OptionError: the path cannot be written, or a model's arguments hold something else than tensors, numbers
                and text in lists, tuples and dicts.
        """
        if self.step is None:
            raise UsageError(
                "overflow.save was called for a step that was not traced; expected one with a trace. Type "
                "amp.initialize(..., on_overflow=('trace', function))."
            )
        self.step.save(path)

    def __str__(self) -> str:
        return "\n".join([*map(str, self.scales), findings(self)])

    def to_dict(self) -> dict[str, Any]:
        """Returns the attributes as plain data for JSON; a loss that is inf or NaN as text, which JSON lacks."""
        return {
            "optimizer": self.optimizer,
            "scales": [asdict(change) for change in self.scales],
            "gradients": [gradient.to_dict() for gradient in self.gradients],
            "non_finite_loss": None if self.non_finite_loss is None else str(self.non_finite_loss),
            "remark": self.remark,
            "trace": None if self.trace is None else self.trace.to_dict(),
        }


def findings(overflow: Overflow) -> str:
    """Returns the text of a skipped step without its log lines: losses, gradients and trace."""
    lines = []
    if overflow.non_finite_loss is not None:
        lines.append(f"  the loss itself is {overflow.non_finite_loss}: no loss scale could help")
    if overflow.gradients:
        count = len(overflow.gradients)
        lines.append(f"  {count} gradient{'s' * (count > 1)} of this {overflow.optimizer} with inf or NaN:")
        lines += [f"    {gradient}" for gradient in overflow.gradients[:_MOST_NAMED]]
        if count > _MOST_NAMED:
            lines.append(f"    and {count - _MOST_NAMED} more")
    else:
        lines.append(f"  {overflow.optimizer}: {overflow.remark}")
    if overflow.trace is not None:
        lines.append(str(overflow.trace))
    return "\n".join(lines)


#: What ``on_overflow`` may be: one choice, or "trace" with another one.
OnOverflow = str | Callable[[Overflow], object] | tuple[str | Callable[[Overflow], object], ...]


class Tracer(Protocol):
    """Finds out where an overflow began.

    Attributes:
        skipped: the step that was traced last, which it can write to a file.
        notes_steps: True if it notes what it needs for that.
    """

    skipped: Any
    notes_steps: bool

    @property
    def has_noted(self) -> bool:
        """True if a forward pass of the present step was noted, and may run again."""

    def trace_of(self, parameters: Iterable[Tensor], loss_scale: float) -> object | None:
        """Returns the origin of inf and NaN in the gradients of parameters; None if nothing is known of it.

        Args:
            parameters: parameters of the model that the optimizer updates.
            loss_scale: scale of the loss in the backward passes; 1 if it was not scaled.
        """

    def note_next(self) -> None:
        """Notes the next steps, if it notes steps for a while only."""

    def note_losses(self, losses: Iterable[Tensor]) -> None:
        """Notes scaled losses, whose backward passes follow."""

    def end_step(self, parameters: Iterable[Tensor]) -> None:
        """Forgets what is known of the gradients of parameters, after a step."""


@dataclass(slots=True)
class SkippedSteps:
    """The skipped steps of one optimizer or scaler, as far as the host has read their verdicts; may outlive it.

    Attributes:
        total: number of skipped steps.
        in_a_row: number of those since the last step that ran.
        has_stepped: True if a step has run.
    """

    total: int = 0
    in_a_row: int = 0
    has_stepped: bool = False

    def note_ran(self) -> None:
        """Counts a step that ran."""
        self.in_a_row, self.has_stepped = 0, True

    def note_skipped(self) -> None:
        """Counts a skipped step."""
        self.total += 1
        self.in_a_row += 1


class OverflowHandler:
    """What happens after a skipped step, by the choice of ``on_overflow``.

    Args:
        choice: a checked ``on_overflow``.

    Attributes:
        tracer: gives each overflow its trace; None: overflows have none.
        trace_next: has the next steps noted, so that a tracer can tell why they were skipped; None: "explain" does
            nothing.
    """

    def __init__(self, choice: OnOverflow) -> None:
        self.tracer: Tracer | None = None
        self.trace_next: Callable[[], object] | None = None
        self._unaccounted, self._due = 0, 2  # skipped steps that no search accounts for; the one to explain next
        self._choices = _choices_of(choice)
        self._finding: object = None  # of the trace that was logged last

    @property
    def traces(self) -> bool:
        """True if overflows are to have a trace."""
        return "trace" in self._choices

    @property
    def reports(self) -> bool:
        """True if a skipped step is to be described, not only noted by the log line."""
        return self._choices not in _LOGS_ONLY

    @property
    def explains(self) -> bool:
        """True if steps are to be explained that the search of the loss scale does not account for."""
        return self._choices == ("explain",)

    @property
    def is_looking(self) -> bool:
        """True if the verdict on a step has to be known before it, so that the step can be explained."""
        return self.tracer is not None and self.tracer.notes_steps

    @property
    def logs_line(self) -> bool:
        """False if a longer text replaces the log line."""
        return self._choices != ("trace",)

    def handle(self, overflow: Overflow) -> None:
        """Logs a skipped step in full, calls the user's function, or raises.

        Raises:
            GradientOverflowError: the choice is "raise".
        """
        if not self.logs_line:
            finding, self._finding = self._finding, getattr(overflow.trace, "finding", None)
            is_known = finding is not None and finding == self._finding
            logger.warning("%s", "\n".join([*map(str, overflow.scales), SAME]) if is_known else overflow)
        for choice in self._choices:
            if callable(choice):
                choice(overflow)
        if "raise" in self._choices:
            raise GradientOverflowError(f"{overflow}\n{_GO_ON}", overflow)

    def explain(self, skips: SkippedSteps, is_certain: bool, trace: Callable[[], object] | None = None) -> None:
        """Logs why a step was skipped, if the search of the loss scale does not account for it, and steps are noted.

        Ordinary steps are not noted. The first skipped step of this kind has the next ones noted. Explained are the
        second, fourth, eighth ..., so that many bad batches do not slow a run down for good.

        Args:
            skips: the skipped steps so far. Before the first step that ran, the search begins at its highest scale.
            is_certain: whether one skipped step is enough: the loss is inf or NaN, or the scale is static.
            trace: returns the trace of the step, while its gradients are there; None if it is over.
        """
        in_search = _SEARCH if skips.has_stepped else _FIRST_SEARCH
        if self.trace_next is None or not (is_certain or skips.in_a_row >= in_search):
            return
        self._unaccounted += 1
        if self.is_looking and self.tracer is not None and trace is not None and self._unaccounted >= self._due:
            self._due = 2 * self._unaccounted
            found = trace() if self.tracer.has_noted else _NOT_NOTED
            finding, self._finding = self._finding, getattr(found, "finding", None) or str(found)
            if finding != self._finding:
                logger.warning("%s\n%s", found, _LOOKED)
            self.tracer.end_step(())
        if self._unaccounted + 1 >= self._due:
            self.trace_next()

    def traced(self, parameters: Iterable[Tensor], loss_scale: float) -> dict[str, Any]:
        """Returns what the tracer knows of an overflow, as attributes of `Overflow`. See `Tracer.trace_of`."""
        if self.tracer is None:
            return {}
        return {"trace": self.tracer.trace_of(parameters, loss_scale), "step": self.tracer.skipped}

    def end_step(self, parameters: Iterable[Tensor]) -> None:
        """Ends the tracing of one step."""
        if self.tracer is not None:
            self.tracer.end_step(parameters)


def _choices_of(choice: OnOverflow) -> tuple[str | Callable[[Overflow], object], ...]:
    return choice if isinstance(choice, tuple) else (choice,)


def check_on_overflow(choice: Any) -> OnOverflow:
    """Returns a checked ``on_overflow``; a list becomes a tuple.

    Raises:
        OptionError: it is neither "explain", "log", "raise", "trace", a function of one argument, nor "trace" with one
            other choice.
    """
    if isinstance(choice, str) and choice in _CHOICES:
        return choice
    if callable(choice):
        return _with_one_argument(choice)
    if isinstance(choice, (list, tuple)) and len(choice) == 2 and "trace" in choice:
        (other,) = [each for each in choice if each != "trace"] or ["trace"]
        if other == "raise":
            return "trace", other
        if callable(other):
            return "trace", _with_one_argument(other)
    raise OptionError(
        f"on_overflow is {choice!r}; expected 'explain', 'log', 'raise', 'trace', a function that takes an "
        f"amp.Overflow, ('trace', function) or ('trace', 'raise').{did_you_mean(choice, _CHOICES)}"
    )


def _with_one_argument(function: Callable[..., object]) -> Callable[[Overflow], object]:
    """Returns a function that takes one argument: otherwise the first overflow, hours later, would end the run."""
    try:
        inspect.signature(function).bind(None)
    except ValueError:  # of a function in C, whose signature is unknown
        pass
    except TypeError as error:
        raise OptionError(
            f"on_overflow is {_name_of(function)}, which cannot be called with one argument ({error}); expected a "
            "function that takes an amp.Overflow, such as lambda overflow: print(overflow)."
        ) from None
    return function


def with_requested_trace(choice: OnOverflow) -> OnOverflow:
    """Returns a checked choice with a trace in addition, if the environment asks for one."""
    if os.environ.get(TRACE_VARIABLE, "0").lower() in ("", "0", "false", "no", "off") or "trace" in _choices_of(choice):
        return choice
    return "trace" if _choices_of(choice) in _LOGS_ONLY else ("trace", *_choices_of(choice))


def name_of_choice(choice: OnOverflow) -> str:
    """Returns ``on_overflow`` as text: a function by its qualified name."""
    return " and ".join(map(_name_of, _choices_of(choice)))


def _name_of(choice: str | Callable[[Overflow], object]) -> str:
    if isinstance(choice, str):
        return choice
    named = choice if hasattr(choice, "__qualname__") else type(choice)
    return f"{named.__module__ or 'builtins'}.{named.__qualname__}"


def non_finite_gradients(
    parameters: Iterable[Tensor], name_of: Callable[[Tensor], str]
) -> tuple[NonFiniteGradient, ...]:
    """Returns the gradients of parameters that are inf or NaN; syncs with each device once.

    Args:
        parameters: with gradients of any shape, layout, dtype and device, or with none.
        name_of: returns the name of one of them.
    """
    pairs = [(parameter, grad) for parameter in parameters if (grad := parameter.grad) is not None]
    values = [kernels.values_of(grad.detach()) for _, grad in pairs]
    counts = read(torch.stack([each.isinf().sum(), each.isnan().sum()]) for each in values)
    return tuple(
        NonFiniteGradient(name_of(parameter), tuple(grad.shape), dtype_name(grad.dtype), infs, nans)
        for (parameter, grad), (infs, nans) in zip(pairs, counts, strict=True)
        if infs or nans
    )


def non_finite(values: Iterable[float]) -> float | None:
    """Returns the first number that is inf or NaN; None if all are finite."""
    return next((value for value in values if not math.isfinite(value)), None)
