"""Judges gradients that float16 flushes to zero, and tells rounding noise from signal by a step in float64.

A value is noise if the float64 gradient differs from it by at least that gradient's own size: then float32 has no
correct digit of it either. Must never leave a value out because it is noise, nor call one noise without this evidence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ampatch.diagnostics.operands import with_types
from ampatch.diagnostics.preflight_report import Underflow
from ampatch.diagnostics.preflight_steps import RandomInFloat32, Step, flushed_of, text_of
from ampatch.diagnostics.preflight_subject import RandomState, Subject
from ampatch.diagnostics.watched import WatchedOp

#: The greatest error of the float32 gradients in which the float64 step still counts as the same step.
_SAME_STEP = 0.01


def rows_of(reference: Step, scale: float, noise: Mapping[str, float]) -> tuple[Underflow, ...]:
    """Returns the parameters whose gradients have values that float16 flushes to zero, those of noise alone last.

    Args:
        reference: the float32 step.
        scale: loss scale for which the share is given too.
        noise: what `noise_of` returns.
    """
    rows = []
    for name, gradient in reference.gradients.items():
        counts = [int(flushed_of(gradient, each).sum()) for each in (1.0, scale)]
        if counts[0]:
            share, share_scaled = (count / int((gradient != 0).sum()) for count in counts)
            rows.append(Underflow(name, share, share_scaled, scale, noise.get(name)))
    return tuple(sorted(rows, key=lambda row: (row.is_noise, -row.share, row.parameter)))


def noise_of(subject: Subject, reference: Step, state: RandomState, draws_itself: bool) -> tuple[dict[str, float], str]:
    """Returns the share of the flushed values that are noise, by the parameter.

    Args:
        subject: the model and its step.
        reference: the float32 step.
        state: the random numbers of every step.
        draws_itself: whether an attention kernel drew dropout, so that no other type can have the same one.

    Returns:
        These shares, and why no step in float64 tells noise from signal: empty if one does, or if none was needed.
    """
    if draws_itself:
        return {}, "an attention kernel drew its own dropout, which is another one in float64"
    masks = ((name, flushed_of(gradient, 1.0)) for name, gradient in reference.gradients.items())
    flushed = {name: mask for name, mask in masks if bool(mask.any())}
    if not flushed:
        return {}, ""
    try:
        exact = _in_float64(subject, state)
    except Exception as error:  # noqa: BLE001 - a model may need float32, and the report says so
        return {}, text_of(error)
    difference = exact.gradient_error(reference)
    if not difference <= _SAME_STEP:  # NaN is not
        return {}, f"its gradients differ by {difference:.2g} in all, so that it is another step"
    noise = {}
    for name in flushed.keys() & exact.gradients.keys():
        there = exact.gradients[name]
        is_noise = (reference.gradients[name] - there).abs() >= there.abs()
        noise[name] = int((is_noise & flushed[name]).sum()) / int(flushed[name].sum())
    return noise, ""


def _in_float64(subject: Subject, state: RandomState) -> Step:
    """Runs the step in float64, on the random numbers of float32.

    The loss is computed on outputs in float32, since ``loss_fn`` may have targets in it. Its rounding errors are those
    of the float32 step then, and never taken for noise.
    """
    model = subject.copied().double()
    args, kwargs = with_types(subject.arguments(), {torch.float32: torch.float64})
    state.restore()
    with RandomInFloat32(of=frozenset({torch.float64})):
        output = model(*args, **kwargs)
        loss = subject.loss_for(with_types(output, {torch.float64: torch.float32}))
        loss.backward()
    return Step.of(model, loss)


def draws_itself(ops: Sequence[WatchedOp]) -> bool:
    """Returns True if an attention kernel among operators draws dropout, each type in another order."""
    return any("attention" in op.op_name and _dropout_of(op) > 0 for op in ops)


def _dropout_of(op: WatchedOp) -> float:
    names = [argument.name for argument in op.op._schema.arguments]
    if "dropout_p" not in names or op.arguments is None:
        return 0.0
    place, (args, kwargs) = names.index("dropout_p"), op.arguments
    return float(args[place] if place < len(args) else kwargs.get("dropout_p", 0.0))
