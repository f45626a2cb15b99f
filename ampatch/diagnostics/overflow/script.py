"""Explains skipped steps of loops without a session: those that a `torch.amp.GradScaler` skips.

Behind `ampatch run --trace-overflow`. Owns which forward passes such a script has, and the remedies in the terms of
torch.amp. While a session is live it does nothing, as the session traces its own steps. Must never change a result.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ampatch.diagnostics.overflow.examiner import BFLOAT16, marked, to_type
from ampatch.diagnostics.overflow.trace import OverflowTrace
from ampatch.diagnostics.overflow.tracer import OverflowTracer, Thread
from ampatch.diagnostics.recorder.callers import is_compiled_module
from ampatch.ledger import PatchLedger
from ampatch.opt_levels import resolve
from ampatch.parts.adopted import Adopted
from ampatch.patching.adopted_model import WRAPPERS
from ampatch.runtime import runtime
from ampatch.scaling import overflows, step_observers
from ampatch.scaling.loss_scaler import NO_FLOOR, make_policy
from ampatch.scaling.overflows import Overflow
from ampatch.scaling.users_optimizer import OWN_HOOK
from ampatch.switch import WithoutCasts
from ampatch.weights import optimizer_state

logger = logging.getLogger("ampatch")


class ScriptTracer(step_observers.StepObserver):
    """Notes forward passes from `install` on, and logs why a step was skipped.

    Attributes:
        has_run_forward: True if a forward pass has run without a session.
        may_skip: True if something could skip a step: a scaler, or a session.
    """

    def __init__(self) -> None:
        self.has_run_forward = self.may_skip = False
        self._models = Adopted()
        # What torch.amp does, as the settings of a session.
        settings = SimpleNamespace(
            properties=resolve("O1", torch.float16),
            scale_policy=make_policy("dynamic", min_loss_scale=NO_FLOOR),
            patches_functions=False,  # no functions are tried in float32: a forward may turn autocast on itself
        )
        self._tracer = OverflowTracer(SimpleNamespace(settings=settings, adopted=self._models))
        self._thread = Thread()
        self._stepping: Any = None  # the optimizer that a scaler steps now
        self._finding: object = None  # of the trace that was logged last

    def install(self, ledger: PatchLedger) -> None:
        """Begins; the ledger undoes it."""
        call = nn.Module.__call__

        def noted(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._leaves_out(module):
                return call(module, *args, **kwargs)
            with self._thread.inside():
                return self._tracer.run(module, module, args, kwargs)

        ledger.set(nn.Module, "__call__", noted)
        self._tracer.install(ledger)
        ledger.on_undo(register_optimizer_step_pre_hook(self._before_step).remove)
        step_observers.add(self)
        ledger.on_undo(lambda: step_observers.remove(self))

    def _leaves_out(self, module: nn.Module) -> bool:
        self.may_skip = self.may_skip or runtime.live is not None
        if self._thread.is_inside or torch.compiler.is_compiling() or runtime.live is not None:
            return True
        if isinstance(module, WRAPPERS) or is_compiled_module(module):
            return True
        if torch.is_grad_enabled():
            self.has_run_forward = True
            self._models.weak_models.add(module)
        return False

    # Steps of scalers

    def scaler_stepping(self, scale: Tensor, optimizer: Any, verdicts: Sequence[Tensor], divisor: Any) -> None:  # noqa: ARG002
        """Explains a step that is skipped."""
        self._stepping = optimizer
        self._explain(optimizer, scale, verdicts)

    def scaler_stepped(self, optimizer: Any) -> None:
        """Ends the step."""
        self._stepping = None
        self._end(optimizer)

    def _before_step(self, optimizer: Any, *_: object) -> None:
        """Explains a step that the optimizer's own kernel skips."""
        verdict, scale = getattr(optimizer, "found_inf", None), getattr(optimizer, "grad_scale", None)
        if verdict is not None and self._stepping is None:
            self._explain(optimizer, 1.0 if scale is None else scale, [verdict])
            self._end(optimizer)

    def _end(self, optimizer: Any) -> None:
        if runtime.live is None:
            self._tracer.end_step(optimizer_state.parameters_of(optimizer))

    @WithoutCasts()
    def _explain(self, optimizer: Any, scale: Tensor | float, verdicts: Sequence[Tensor]) -> None:
        if runtime.live is not None:
            return
        self.may_skip = True
        if not any(map(bool, verdicts)):
            return
        parameters = list(optimizer_state.parameters_of(optimizer))
        trace = _in_terms_of_torch(self._tracer.trace_of(parameters, float(scale)))
        found = overflows.non_finite_gradients(parameters, self._models.name_of)
        overflow = Overflow(type(optimizer).__name__, (), found, remark=overflows.CLEARED, trace=trace)
        is_known = trace.finding is not None and trace.finding == self._finding
        self._finding = trace.finding
        told = overflows.SAME if is_known else overflows.findings(overflow)
        logger.warning("Gradient overflow. GradScaler skips this step, at a loss scale of %g\n%s", float(scale), told)


setattr(ScriptTracer._before_step, OWN_HOOK, True)


def begun() -> ScriptTracer:
    """Returns a tracer that is installed until the process ends."""
    (tracer := ScriptTracer()).install(PatchLedger())
    return tracer


def _in_terms_of_torch(trace: OverflowTrace) -> OverflowTrace:
    """Returns a trace whose remedies are for torch.autocast."""
    remedies = tuple(each.replace(BFLOAT16, "torch.autocast(..., dtype=torch.bfloat16)") for each in trace.remedies)
    if trace.cast_lists is not None:
        own = "this function in float32: torch.autocast(..., enabled=False) around the line, .float() on its arguments"
        without = f"the same by a list, with amp in place of torch.amp: {to_type(trace.cast_lists)}"
        remedies = (*marked([own, without]), *remedies[1:])
    return replace(trace, remedies=remedies)
