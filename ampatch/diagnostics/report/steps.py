"""The steps of a report: scale, overflow, skip and norm of each, and the exponents of its gradients.

Sees every block and step of amp's, and every step of torch's optimizers that amp has not adopted. Values stay on the
device until `Steps.rows` or `Steps.underflow`; after some blocks one look at them, to warn of underflow. Must never
write to a gradient.
"""

from __future__ import annotations

import functools
import math
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ampatch.diagnostics.recorder import mode_stacks
from ampatch.diagnostics.recorder.recorder import paused
from ampatch.diagnostics.report import exponents
from ampatch.diagnostics.report.exponents import GradientExponents
from ampatch.errors import warn
from ampatch.native import kernels
from ampatch.native.host_copy import on_device
from ampatch.runtime import runtime
from ampatch.scaling import step_observers
from ampatch.scaling.optimizer_gradients import OptimizerGradients
from ampatch.scaling.scale_use import ScaleUse
from ampatch.scaling.users_optimizer import OWN_HOOK
from ampatch.switch import WithoutCasts
from ampatch.tracing import is_capturing
from ampatch.weights.optimizer_state import parameters_of

_P = ParamSpec("_P")

#: A scale that loses more than this share of the gradients' elements is warned of.
WARNS_ABOVE = 0.05
#: Blocks after which it is looked for.
_LOOKS_AFTER = (10, 100, 1000)
#: ``max_loss_scale`` of `amp.initialize` where none is given.
_GREATEST_BY_DEFAULT = 2.0**24
#: Steps whose numbers wait on the device.
_WAITING = 1000


@dataclass(slots=True)
class _Step:
    """A step, with numbers that may still be on the device.

    Attributes:
        loss_id: number of the loss whose block came last before it; None if there was none.
        scale: loss scale of that block.
        sum_of_squares: of the unscaled gradients, before they were clipped.
        verdicts: each not 0 after an overflow.
        skipped: whether the step was skipped; None if the verdicts say so.
    """

    loss_id: int | None
    scale: Tensor | float
    sum_of_squares: Tensor | float
    verdicts: Sequence[Tensor] = ()
    skipped: bool | None = False

    def read(self, number: int) -> dict[str, Any]:
        """Returns the step as plain data; syncs with the device."""
        overflow, norm = any(map(bool, self.verdicts)), float(self.sum_of_squares) ** 0.5
        return {
            "step": number,
            "loss_id": self.loss_id,
            "scale": float(self.scale),
            "overflow": overflow,
            "skipped": overflow if self.skipped is None else self.skipped,
            "gradient_norm": norm if norm < math.inf else None,  # NaN is not less
        }


def _timed(method: Callable[Concatenate[Steps, _P], None]) -> Callable[Concatenate[Steps, _P], None]:
    """Returns a method whose time is added to `Steps.seconds`; it runs without modes, which slow its work down."""

    @functools.wraps(method)
    def run(steps: Steps, /, *args: _P.args, **kwargs: _P.kwargs) -> None:
        start = time.perf_counter()
        try:
            with mode_stacks.without_modes():
                method(steps, *args, **kwargs)
        finally:
            steps.seconds += time.perf_counter() - start

    return run


class Steps(step_observers.StepObserver):
    """Observes blocks and steps until its block ends; see `amp.report`.

    Attributes:
        seconds: time that it took so far; without what a device still has to do.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._open: dict[int, _Step] = {}  # steps to come, by the optimizer's id
        self._ended: list[_Step] = []
        self._rows: list[dict[str, Any]] = []
        self._exponents = GradientExponents()
        self._scale: Tensor | float = 1.0
        self._half: torch.dtype | None = None
        self._has_warned = False
        self._undo = ExitStack()
        self._optimizers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # those without amp
        self._of_scaler: int | None = None  # id of the optimizer that a GradScaler steps now

    def __enter__(self) -> Steps:
        self._undo.callback(register_optimizer_step_pre_hook(self._before_step).remove)
        self._undo.callback(register_optimizer_step_post_hook(self._after_step).remove)
        step_observers.add(self)
        self._undo.callback(step_observers.remove, self)
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def rows(self) -> list[dict[str, Any]]:
        """Returns the steps as plain data; syncs with the device."""
        ended, self._ended = self._ended, []
        if ended:  # turning casts off imports torch's compiler
            with paused(), WithoutCasts():
                self._rows += [step.read(number) for number, step in enumerate(ended, start=len(self._rows) + 1)]
        return self._rows

    def underflow(self) -> dict[str, Any] | None:
        """Returns what the half type loses of the gradients, as plain data; None if none were seen.

        Syncs with the device.
        """
        if not self._exponents.seen:
            return None
        with paused(), WithoutCasts():
            overflowed_at = min((row["scale"] for row in self.rows() if row["overflow"]), default=math.inf)
            histograms, half = self._exponents.read(), self._half or torch.float16
            return exponents.as_dict(histograms, float(self._scale), half, self._exponents.seen, overflowed_at)

    # What is observed

    @_timed
    def unscaling(self, scale_use: ScaleUse, gradients: Sequence[OptimizerGradients]) -> None:
        """Counts the gradients of a block before they are unscaled, and begins their optimizers' next steps."""
        if is_capturing():
            return
        with paused(), WithoutCasts(), torch.no_grad():
            self._scale = scale_use.scale
            factor, counted = scale_use.scale.reciprocal(), []
            names = self._names()  # once a block: a name is found by a walk through all modules
            for each in gradients:
                found = list(_unscaled(each, factor, names))
                counted += found
                step = _Step(scale_use.scaler_id, scale_use.scale, _sum_of_squares(found))
                self._open[id(each.updated.optimizer())] = step
            self._exponents.add(counted)
            self._warn_of_underflow()

    @_timed
    def stepped(self, gradients: OptimizerGradients, judged: Sequence[ScaleUse], skipped: bool | None) -> None:
        """Ends the step of an adopted optimizer."""
        step = self._open.pop(id(gradients.updated.optimizer()), None)
        if step is None or is_capturing():
            return
        if step.loss_id is None and judged:  # its block ended before the report began
            step.loss_id, step.scale = judged[-1].scaler_id, judged[-1].scale
        step.verdicts = [each.found_inf for each in judged if each.found_inf is not None]
        step.skipped = skipped
        self._end(step)

    @_timed
    def _before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Counts gradients that came from no block."""
        if id(optimizer) in self._open or self._is_hidden(optimizer):
            return
        # Gradients that are there before a closure runs are those of the step before. args[0] is the optimizer.
        if kwargs.get("closure", args[1] if len(args) > 1 else None) is not None:
            return
        # Both are of a GradScaler that leaves it to the kernel.
        divisor, verdict = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
        self._count(optimizer, 1.0 if divisor is None else divisor, divisor, () if verdict is None else [verdict])

    @_timed
    def _after_step(self, optimizer: Any, *_: object) -> None:
        """Ends a step of an optimizer that amp has not adopted."""
        if self._is_hidden(optimizer) or (runtime.live is not None and runtime.live.adopted.has(optimizer)):
            return
        if id(optimizer) not in self._open:  # a closure's gradients are those that its last call has left
            self._count(optimizer, 1.0, None)
        self._end(self._open.pop(id(optimizer)))

    @_timed
    def scaler_stepping(self, scale: Tensor, optimizer: Any, verdicts: Sequence[Tensor], divisor: Any) -> None:
        """Begins a step of a GradScaler, which may skip it without calling the optimizer."""
        if is_capturing() or id(optimizer) in self._open:
            return
        self._count(optimizer, scale, divisor, verdicts)
        self._of_scaler = id(optimizer)

    @_timed
    def scaler_stepped(self, optimizer: Any) -> None:
        """Ends the step of a GradScaler, if the optimizer's own hook has not ended it."""
        step = self._open.pop(id(optimizer), None)
        self._of_scaler = None
        if step is not None:
            self._end(step)

    def _is_hidden(self, optimizer: Any) -> bool:
        """Returns True in a capture, and if an optimizer steps within another one that a GradScaler steps.

        Such another one is a `MixedPrecision`.
        """
        return is_capturing() or self._of_scaler not in (None, id(optimizer))

    def _count(self, optimizer: Any, scale: Tensor | float, divisor: Any, verdicts: Sequence[Tensor] = ()) -> None:
        """Begins a step, and counts its gradients as they are now.

        Args:
            optimizer: what steps.
            scale: the loss scale.
            divisor: what the gradients are divided by to unscale them; None if they are unscaled.
            verdicts: those that say whether the step is skipped; empty if it is not.
        """
        with paused(), WithoutCasts(), torch.no_grad():
            # A GradScaler's update() changes both in place.
            scale, verdicts = scale.clone() if isinstance(scale, Tensor) else scale, [each.clone() for each in verdicts]
            self._scale, names = scale, self._names()
            factor = None if divisor is None else 1 / divisor
            number = self._optimizers.setdefault(optimizer, len(self._optimizers) + 1)
            of_optimizer = "" if number == 1 else f" of optimizer {number}"
            found = [
                (names.get(id(each), f"parameter {index}{of_optimizer}"), _full(each.grad, factor))
                for index, each in enumerate(parameters_of(optimizer))
                if each.grad is not None
            ]
            self._exponents.add(found)
            skipped = None if verdicts else False
            self._open[id(optimizer)] = _Step(None, scale, _sum_of_squares(found), verdicts, skipped)

    def _end(self, step: _Step) -> None:
        self._ended.append(step)
        if len(self._ended) >= _WAITING:
            self.rows()

    def _names(self) -> Mapping[int, str]:
        """Returns the names of the session's parameters by their ids, and notes its half type."""
        if runtime.live is None:
            return {}
        self._half = runtime.live.settings.properties.half_dtype
        return runtime.live.adopted.parameter_names()

    def _warn_of_underflow(self) -> None:
        """Warns once if the scale of the last block loses more than `WARNS_ABOVE`; looks after some blocks only."""
        if self._has_warned or self._half is None or self._exponents.seen not in _LOOKS_AFTER:
            return
        found = self.underflow()
        if found is None or found["lost"] <= WARNS_ABOVE:
            return
        self._has_warned = True
        worst = max(found["parameters"], key=share_lost)
        scale, best = found["scale"], found["best_scale"]
        cure = "Every greater scale would overflow"
        if best > scale:
            lost, live = lost_at_best(found), runtime.live
            options = options_for(best, live is None or live.settings.scale_policy.dynamic)
            cure = f"At a scale of {spelled(best)} it would be {lost:.1%}: type amp.initialize(..., {options})"
        warn(
            f"{underflow_told(found)}; most in {worst['name']} ({share_lost(worst):.1%}). {cure}. Or type "
            "half_dtype=torch.bfloat16, which has float32's range."
        )


def underflow_told(found: Mapping[str, Any]) -> str:
    """Returns what the half type loses of all gradients, without the full stop.

    Args:
        found: what `exponents.as_dict` returns.
    """
    return (
        f"at a loss scale of {spelled(found['scale'])}, {found['lost']:.1%} of the gradients' elements underflow in "
        f"{found['half']}: they become zero, or keep fewer bits"
    )


def lost_at_best(found: Mapping[str, Any]) -> float:
    """Returns the share of all gradients' elements that the half type loses at the best scale."""
    row = next(row for row in found["scales"] if row["scale"] == found["best_scale"])
    return float(row["zero"] + row["subnormal"])


def share_lost(parameter: Mapping[str, float]) -> float:
    """Returns the share of a parameter's gradient that becomes zero, or keeps fewer bits."""
    return parameter["rounded_to_zero"] + parameter["subnormal"]


def spelled(scale: float) -> str:
    """Returns a loss scale with all its digits, as one would type it."""
    return f"{scale:.0f}" if scale >= 1 and scale % 1 == 0 else f"{scale:g}"


def course_of_scale(steps: Sequence[Mapping[str, Any]], spell: Callable[[float], str]) -> str:
    """Returns how the loss scale went over some steps, without the full stop.

    Args:
        steps: at least one.
        spell: returns the text of a number.
    """
    scales = [float(step["scale"]) for step in steps]  # inf is text
    first, last, least, greatest = map(spell, (scales[0], scales[-1], min(scales), max(scales)))
    if least == greatest:
        return f"The loss scale was {first} throughout"
    return f"The loss scale went from {first} to {last}, between {least} and {greatest}"


def options_for(scale: float, dynamic: bool) -> str:
    """Returns the arguments of `amp.initialize` with which the loss scale is a number, or starts at it."""
    if not dynamic:
        return f"loss_scale={scale!r}"
    return f"init_scale={scale!r}" + (f", max_loss_scale={scale!r}" if scale > _GREATEST_BY_DEFAULT else "")


for _hook in (Steps._before_step, Steps._after_step):
    setattr(_hook, OWN_HOOK, True)


def _unscaled(gradients: OptimizerGradients, factor: Tensor, names: Mapping[int, str]) -> Iterator[tuple[str, Tensor]]:
    """Yields the names of parameters, and the gradients that the block is about to leave them, unscaled in float32."""
    masters = gradients.masters
    for parameter, own in zip(gradients.updated.model_parameters(), gradients.updated.parameters(), strict=True):
        grad = parameter.grad
        if grad is None:
            continue
        is_added = masters.gradients.shows(parameter)  # to the master's before
        earlier = None if is_added or own is parameter else own.grad
        full = _full(grad, None if is_added else factor)
        name = names.get(id(parameter)) or masters.name_of(parameter)
        yield name, full if earlier is None else full + _full(earlier)


def _full(grad: Tensor, factor: Tensor | None = None) -> Tensor:
    """Returns a gradient's values in float32, multiplied by a number."""
    values = kernels.values_of(grad.detach()).to(torch.float32)
    return values if factor is None else values * on_device(factor, values.device)


def _sum_of_squares(found: Sequence[tuple[str, Tensor]]) -> Tensor | float:
    """Returns the sum of the squares of gradients in float64, on the device of the first; 0 if there are none."""
    squares = [_squares(gradient) for _, gradient in found]
    return sum(on_device(each, squares[0].device) for each in squares)


def _squares(gradient: Tensor) -> Tensor:
    """Returns the sum of a gradient's squares in float64."""
    if gradient.device.type == "cpu":  # there torch's norm takes three times as long
        values = gradient.flatten().to(torch.float64)
        return torch.dot(values, values)
    norm: Tensor = torch.linalg.vector_norm(gradient, dtype=torch.float64)
    return norm.square()
