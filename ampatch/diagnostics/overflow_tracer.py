"""Watches every step of a session, and says where the inf or NaN of a skipped one came from.

Owns when a session watches, and which gradients have arrived since each optimizer's last step. Must never change a
result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from ampatch.diagnostics.examiner import Examiner, origins_of_gradients
from ampatch.diagnostics.overflow_trace import OverflowTrace
from ampatch.diagnostics.watch import Watch
from ampatch.diagnostics.watched import WatchedOp, has_half
from ampatch.ledger import PatchLedger
from ampatch.opt_levels import Properties
from ampatch.scaling.loss_scaler import ScalePolicy

#: Why no operator is named for gradients that other ranks, or other code, made inf or NaN.
FINITE_HERE = (
    "the gradients that this process computed are finite: another rank's are not, or other code changed them afterwards"
)
_NOT_WATCHED = "no backward pass of these parameters was watched, such as one in another thread, or without modules"

#: Forward passes that are kept if no backward pass follows any of them.
_FORWARDS_KEPT = 8


class OverflowTracer:
    """Watches the steps of a session, and says why one was skipped.

    It watches the thread that runs the first forward pass, from there until the session ends.

    Args:
        properties: the values of the opt level.
        policy: how the loss scale behaves.
        named_modules: returns the names of the adopted models' modules, by the module's id.
    """

    def __init__(
        self, properties: Properties, policy: ScalePolicy, named_modules: Callable[[], Mapping[int, str]]
    ) -> None:
        self._watch = Watch(keep=has_half)
        self._examiner = Examiner(properties, policy, named_modules)
        self._origins: dict[int, WatchedOp | None] = {}  # by the id of the parameter, since its optimizer's last step
        self._arrived: set[int] = set()  # ids of the parameters with a gradient since then
        self._has_gone_backward = False  # since the first of these forward passes
        self._forwards: list[int] = []  # the number of the first operator of each

    def install(self, ledger: PatchLedger) -> None:
        """Hooks all modules, so that the first forward pass begins to watch.

        From then on compiled code runs uncompiled, because torch.compile compiles nothing while a mode is active.
        """
        handle = torch.nn.modules.module.register_module_forward_pre_hook(self._before_forward)
        ledger.on_undo(handle.remove)
        self._watch.hook_modules()  # behind that one, which asks whether a module is running
        ledger.on_undo(self._watch.forget)
        ledger.on_undo(self._watch.stop)

    def trace_of(self, parameters: Iterable[Tensor], loss_scale: float) -> OverflowTrace:
        """Returns where the first inf or NaN in the gradients of parameters came from; syncs with the device.

        Args:
            parameters: parameters of a model, as an optimizer has them.
            loss_scale: scale of the loss in the backward passes.
        """
        self._note_origins()
        ids = set(map(id, parameters))
        is_watched = bool(ids & self._arrived)  # sharded parameters get their gradients from other tensors
        origins = [origin for key, origin in self._origins.items() if key in ids or not is_watched]
        if not origins:
            note = FINITE_HERE if self._arrived else _NOT_WATCHED
            return OverflowTrace("unknown", notes=(note,))
        return self._examiner.describe(origins, self._watch.missed_threads, loss_scale)

    def end_step(self, parameters: Iterable[Tensor]) -> None:
        """Forgets the gradients of parameters, after a step that used them or was skipped."""
        self._note_origins()
        ids = set(map(id, parameters))
        if not ids & self._arrived:  # those of sharded parameters
            ids = {*self._origins, *self._arrived}
        self._origins = {key: origin for key, origin in self._origins.items() if key not in ids}
        self._arrived -= ids

    def _before_forward(self, *_: object) -> None:
        watch = self._watch
        if watch.is_in_forward or not watch.is_this_thread or torch._C._current_graph_task_id() != -1:
            return
        records = torch.is_grad_enabled()
        if records and not watch.is_on:
            watch.push()
        self._note_origins()
        if self._has_gone_backward:
            watch.forget()
            self._has_gone_backward = False
            self._forwards.clear()
        if records:
            self._forwards.append(watch.count)
        if len(self._forwards) > _FORWARDS_KEPT:  # such as in an evaluation that records gradients
            watch.forget(before=self._forwards.pop(0))

    def _note_origins(self) -> None:
        """Remembers the origins of the gradients that have arrived and are not finite."""
        arrived = self._watch.gradients
        if arrived:
            # The latest pass counts: gradients of an earlier one may have been cleared since.
            self._origins |= origins_of_gradients(self._watch)
            self._arrived.update(id(gradient.parameter) for gradient in arrived)
            arrived.clear()
            self._has_gone_backward = True
