"""Says where the inf or NaN of a skipped step came from, by running its forward passes again.

Ordinary steps are only noted. What a second run cannot tell, such as an overflow in the loss, is found by watching the
next steps as they run. Owns which forward passes are noted, and when steps are watched. Must never change a result.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.optim.optimizer import register_optimizer_step_post_hook

from ampatch import distributed
from ampatch.diagnostics.overflow import examiner
from ampatch.diagnostics.overflow.examiner import Examiner, enters, marked, origins_of_gradients
from ampatch.diagnostics.overflow.forwards import NotedForward, stand_in
from ampatch.diagnostics.overflow.step_file import SkippedStep
from ampatch.diagnostics.overflow.trace import OverflowTrace
from ampatch.diagnostics.overflow.trials import Entry, in_float32, smallest
from ampatch.diagnostics.recorder.recorder import hidden
from ampatch.diagnostics.recorder.records import WatchedOp, has_half
from ampatch.diagnostics.recorder.watch import Watch
from ampatch.graph_nodes import nodes_of
from ampatch.ledger import PatchLedger
from ampatch.scaling.scale_use import has_scaled
from ampatch.scaling.users_optimizer import OWN_HOOK
from ampatch.switch import OFF
from ampatch.torch_private.autograd import current_graph_task_id, sequence_number
from ampatch.tracing import is_capturing, is_recording

#: Why no operator is named for gradients that other ranks, or other code, made inf or NaN.
FINITE_HERE = (
    "the gradients that this process computed are finite: another rank's are not, or other code changed them afterwards"
)
_NOT_NOTED = (
    "no forward pass that amp has noted led to these gradients: it was compiled, is of no adopted model, or its "
    "backward pass was batched"
)
_FROM_OUTSIDE = (
    "the gradients that came into the model were not finite. If the loss is finite, the loss scale is too high for the "
    "outputs' type, and a dynamic one comes down by itself. If not, look at the loss and at code around the model"
)
FINITE_AGAIN = (
    "the forward passes ran again, and all gradients were finite: another rank's are not, other code changed them "
    "afterwards, a term of the loss goes past the model, or the overflow depends on what has changed since"
)
_DIFFER = "a forward pass that runs twice gives different results: it depends on something that changes"
_WITH_RANKS = "to find it there, train with one process: with several, amp does not watch steps as they run"
IS_ARMED = "the next steps are watched as they run, which takes several times as long, to find it there"

#: Forward passes that are kept if no backward pass follows any of them.
_FORWARDS_KEPT = 8

#: Forward passes of one step that are kept; of accumulated gradients, the last ones.
_MOST_NOTED = 32

#: The same while steps are noted unasked.
_MOST_NOTED_UNASKED = 4

#: Steps that are noted unasked.
_STEPS_NOTED = 100

#: Losses whose graph is known.
_LOSSES_KEPT = 4

#: Nodes between the loss and the model that are named.
_MOST_NAMED = 12

#: Steps that are watched as they run, if a second run cannot tell.
_STEPS_WATCHED = 20


#: A forward pass of a step, and the ids of the parameters whose gradients are looked at.
_OfStep = tuple[NotedForward, Collection[int] | None]


class OverflowTracer:
    """Notes the forward passes of a session, and says why a step was skipped.

    Args:
        session: the session, or what has the settings and the models of a script without one.
        is_asked: True notes all steps; False a number of them, until `note_next` is called, and never watches steps as
            they run.

    Attributes:
        skipped: the step that was skipped last; one that cannot be saved before there is one.
        notes_steps: True as long as it notes them.
    """

    def __init__(self, session: Any, *, is_asked: bool = True) -> None:
        self.notes_steps, self._is_asked = True, is_asked
        self._noted_left = math.inf if is_asked else _STEPS_NOTED  # number of steps
        self._most_noted = _MOST_NOTED if is_asked else _MOST_NOTED_UNASKED
        settings = session.settings
        self._session = session
        self._copies: dict[int, Any] = {}  # what the modules of the last second run are copies of, by id
        self._examiner = Examiner(settings.properties, settings.scale_policy, self._named_modules)
        self.skipped = SkippedStep(session, (), {})
        self._known: object = None  # the finding whose remedies were tried last, if steps are noted for a while
        self._has_stepped = False  # since the last forward pass
        self._losses: deque[Node] = deque(maxlen=_LOSSES_KEPT)  # the last nodes of scaled losses
        self._noted: list[NotedForward] = []
        self._thread = Thread()
        self._watched: _WatchedSteps | None = None

    def install(self, ledger: PatchLedger) -> None:
        """Has the ledger end what was begun."""
        ledger.on_undo(self._stop_watching)
        ledger.on_undo(self._drop)

        def after_step(*_: object) -> None:  # also of optimizers that amp has not adopted
            self._has_stepped = True
            self._noted_left -= 1
            if self.notes_steps and self._noted_left <= 0:
                self.notes_steps = False
                self._session.note_forwards(None)
                self._drop()

        setattr(after_step, OWN_HOOK, True)
        ledger.on_undo(register_optimizer_step_post_hook(after_step).remove)

    def note_next(self) -> None:
        """Notes the next steps, as many as at first."""
        self.notes_steps, self._noted_left = True, _STEPS_NOTED
        self._session.note_forwards(self)

    def run(self, module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the forward of a module, and notes it if it is an outermost one with gradients."""
        # Or a checkpoint recomputes a forward pass, or a graph is captured or traced.
        if self._thread.is_inside or current_graph_task_id() != -1 or is_capturing() or is_recording():
            return call(*args, **kwargs)
        self._drop_used()
        if not torch.is_grad_enabled():
            return call(*args, **kwargs)
        noted = NotedForward.begun(module, call, args, kwargs)
        with self._thread.inside():
            result = call(*args, **kwargs)
        noted.follow(result)
        self._noted.append(noted)
        if len(self._noted) > min(_FORWARDS_KEPT, self._most_noted):
            idle = [each for each in self._noted if not each.arrived]
            dropped = idle[:-_FORWARDS_KEPT] + self._noted[: -self._most_noted]
            self._noted[:] = [each for each in self._noted if each not in dropped]
        return result

    def _named_modules(self) -> dict[int, str]:
        names: dict[int, str] = self._session.adopted.named_modules()
        return names | {key: names[id(each)] for key, each in self._copies.items() if id(each) in names}

    def note_losses(self, losses: Iterable[Tensor]) -> None:
        """Notes scaled losses, whose backward passes follow."""
        self._drop_used()
        self._losses += [each.grad_fn for each in losses if each.grad_fn is not None]

    def _drop_used(self) -> None:
        """After a step drops the forward passes before it, except for those that no backward pass has followed."""
        if self._has_stepped:
            self._drop([each for each in self._noted if not each.arrived])

    def _drop(self, but: Sequence[NotedForward] = ()) -> None:
        """Drops what is noted of a step, but for some forward passes."""
        self._has_stepped = False
        self._losses.clear()
        self._copies = {}
        self._noted[:] = but
        self.skipped.close()

    def trace_of(self, parameters: Iterable[Tensor], loss_scale: float) -> OverflowTrace:
        """Returns where the first inf or NaN in the gradients of parameters came from; syncs with the device.

        Args:
            parameters: parameters of a model, as an optimizer has them.
            loss_scale: scale of the loss in the backward passes.
        """
        ids = set(map(id, parameters))
        trace = self._trace_of(ids, loss_scale)
        noted = [each for each in self._noted if each.arrived]
        facts = {"loss_scale": loss_scale, "trace": trace.to_dict()}
        self.skipped.close()
        self.skipped = SkippedStep(self._session, noted, facts)
        return trace

    @property
    def has_noted(self) -> bool:
        """True if a forward pass of the present step was noted, and may run again: not while other ranks wait."""
        return any(each.arrived for each in self._noted) and not distributed.has_other_ranks()

    def _trace_of(self, ids: set[int], loss_scale: float) -> OverflowTrace:
        seen = None if self._watched is None else self._watched.trace_of(ids, loss_scale)
        if seen is not None:
            return seen
        with hidden(), self._thread.inside():
            trace, _ = self.by_second_run(self._noted, loss_scale, ids)
        if trace.direction != "unknown" or not self._is_asked:
            return trace
        if distributed.has_other_ranks():  # they may have found it, and go on to run forward passes again
            return replace(trace, notes=(*trace.notes, _WITH_RANKS))
        self.watch(ids)
        return replace(trace, notes=(*trace.notes, IS_ARMED))

    def end_step(self, parameters: Iterable[Tensor]) -> None:
        """Notes that a step has used the gradients of parameters, or was skipped."""
        self._has_stepped = True
        if self._watched is not None and self._watched.end_step(set(map(id, parameters))):
            self._stop_watching()

    def watch(self, ids: set[int], steps: int = _STEPS_WATCHED) -> None:
        """Watches the next steps as they run.

        Args:
            ids: those of parameters of an optimizer whose steps are counted.
            steps: number of its steps.
        """
        self._stop_watching()
        self._watched = _WatchedSteps(self._examiner, ids, steps + 1)  # one is about to end
        self._watched.__enter__()

    def _stop_watching(self) -> None:
        if self._watched is not None:
            self._watched.stop()
            self._watched = None

    # The second run

    def by_second_run(
        self, noted: Iterable[NotedForward], loss_scale: float, ids: Collection[int] | None = None
    ) -> tuple[OverflowTrace, bool | None]:
        """Runs forward passes again, the last one first, until one shows an origin in a forward pass.

        Those of models through which the gradients came follow, such as a discriminator's. Other ranks run as many
        passes, since one may wait for theirs; then all run, each of them twice.

        Args:
            noted: the forward passes.
            loss_scale: scale of the loss in the backward passes.
            ids: those of the parameters whose gradients are looked at; None: all are.

        Returns:
            The trace; and whether all gradients were finite, None if that is unknown.
        """
        noted = [each for each in noted if each.arrived]
        own = [each for each in noted if ids is None or any(id(weight) in ids for weight in each.module.parameters())]
        backward = {number for each in own for number in each.arrived}
        through = [each for each in noted if each not in own and not backward.isdisjoint(each.arrived)]
        has_others = distributed.has_other_ranks()
        step = [*((each, ids) for each in reversed(own)), *((each, None) for each in reversed(through))]
        found: list[tuple[NotedForward, OverflowTrace, WatchedOp]] = []
        notes: dict[str, None] = {}
        for each, of_step in step:
            # One in the forward pass explains a loss that is not finite, and what follows from it.
            if not has_others and any(trace.direction != "backward" for _, trace, _ in found):
                break
            try:
                shown = self._examined(each, of_step, loss_scale, runs_twice=has_others)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - a model may raise anything
                shown = f"a forward pass could not run again: {type(error).__name__}: {error}"
            if isinstance(shown, str):
                notes |= dict.fromkeys([shown])
            elif shown is not None:
                found.append((each, *shown))
        if not found:
            unknown = OverflowTrace(notes=tuple(notes or [FINITE_AGAIN if own else _NOT_NOTED]))
            return unknown, None if notes or not own else True
        source, trace, op = next((each for each in found if each[1].direction != "backward"), found[0])
        if has_others or trace.finding == self._known:
            trace = replace(trace, remedies=marked(trace.remedies))
        else:
            trace = self._tried(step, trace, op, loss_scale)
        self._known = None if self._is_asked else trace.finding
        which = f"in forward pass {noted.index(source) + 1} of the {len(noted)} before this step"
        hooks = f"hooks of {', '.join(source.hooked)} ran again with the forward pass"
        added = [*[which] * (len(noted) > 1), *[hooks] * bool(source.hooked)]
        return replace(trace, notes=(*trace.notes, *added)), False

    def _examined(
        self, noted: NotedForward, ids: Collection[int] | None, loss_scale: float, *, runs_twice: bool
    ) -> tuple[OverflowTrace, WatchedOp] | str | None:
        """Returns what a second run shows, with the operator; or why nothing; None if all gradients are finite."""
        if noted.obstacle:
            return f"a forward pass could not run again: {noted.obstacle}"
        first = self._origins(noted, ids, None)
        found = [op for op in first if op is not None and not enters(op)]
        # Arguments are kept in another run, for the operator to be tried in float32: they take memory.
        origin = min((op.number for op in found), default=-1)
        again = self._origins(noted, ids, origin) if found or runs_twice else []
        if found:
            found = [op for op in again if op is not None and not enters(op)]
            trace = self._examiner.describe(found, loss_scale=loss_scale)
            if trace.direction == "unknown":
                return _DIFFER
            if trace.file is None and noted.place is not None:
                place = noted.place
                trace = replace(trace, file=place.file, line=place.line, source=place.source)
            return trace, min(found, key=lambda op: op.number)
        return f"{_FROM_OUTSIDE}{self._between()}" if first else None

    def _between(self) -> str:
        """Returns text that names the nodes between the losses and the models, the loss first."""
        ends = {number for each in self._noted for number in each.outputs}

        def is_between(node: Any) -> bool:
            return sequence_number(node) not in ends and type(node).__name__ != "AccumulateGrad"

        names = [type(node).__name__ for node in nodes_of(self._losses, is_between) if not has_scaled(node)]
        return f". Between the loss and the model: {', '.join(names[:_MOST_NAMED])}" if names else ""

    def _tried(self, step: list[_OfStep], trace: OverflowTrace, op: WatchedOp, loss_scale: float) -> OverflowTrace:
        """Returns a trace whose remedies say whether a second run of the whole step was finite with them."""
        fits, several = trace.max_loss_scale, [noted for noted, _ in step]
        if fits is None:
            return self._with_functions(several, trace, op, loss_scale)
        for scale in (fits / 2**halvings for halvings in (*range(9), 16)):
            if not any(self._origins(noted, ids, None, scale / loss_scale) for noted, ids in step):
                mended = self._examiner.of_loss_scale(scale)
                return replace(trace, **{**mended, "remedies": marked(mended["remedies"], examiner.TRIED)})
        none = replace(trace, **self._examiner.of_loss_scale(0.0))
        return self._with_functions(several, none, op, loss_scale)

    def _with_functions(
        self, several: list[NotedForward], trace: OverflowTrace, op: WatchedOp, loss_scale: float
    ) -> OverflowTrace:
        """Returns a trace that suggests functions in float32 with which a second run was finite."""
        if not self._session.settings.patches_functions or trace.direction == "input":
            return replace(trace, remedies=marked(trace.remedies))

        # A dynamic scale comes down to where the backward pass is finite.
        factor = 1 / loss_scale if self._session.settings.scale_policy.dynamic else 1.0
        results: list[bool | None] = []
        names = self._named_modules()

        def is_finite(entries: list[Entry] | None, pattern: str = "") -> bool | None:
            """Returns None if the forward pass raises; without entries, everything runs in float32."""
            state, result = OFF if entries is None else None, None
            around = in_float32(entries or ())
            # An error: types that do not fit together. Then it is no remedy.
            with contextlib.suppress(Exception), contextlib.nullcontext() if pattern else around:
                given: dict[str, Any] = {"replaces": stand_in(loss_scale), "state": state}
                prepared = ((each, functools.partial(each.decorate, pattern, names, around)) for each in several)
                runs = (each.run_again(None, factor, prepare=prepare, **given) for each, prepare in prepared)
                result = all(run.is_finite for run in runs)
            results.append(result)
            return result

        if is_finite(None) is False:
            return replace(trace, remedies=(examiner.NOT_IN_FLOAT32,), cast_lists=None)
        results.clear()
        candidates = [*examiner.entries_around(op)]
        for pattern in (*examiner.patterns_around(trace.module or ""), ""):
            entries = smallest(candidates, functools.partial(is_finite, pattern=pattern))
            if entries is not None:
                break
        first, *others = trace.remedies
        if entries is None:
            mark = examiner.NOT_ENOUGH if trace.cast_lists and False in results else examiner.NOT_TRIED
            return replace(trace, remedies=(*marked([first], mark), *marked(others)))
        kept = [first] if first.startswith(examiner.NO_SCALE) else []
        # A static scale does not come down to what the stand-ins for gradients need.
        is_whole = factor != 1 or not any(each.has_lost_gradients for each in several)
        told, overlay = examiner.blacklisting(entries, pattern)
        tried = marked([told], examiner.TRIED if is_whole else examiner.TRIED_FORWARD)
        return replace(trace, remedies=(*kept, *tried, *marked(others)), cast_lists=overlay)

    def _origins(
        self, noted: NotedForward, ids: Collection[int] | None, kept: int | None, factor: float = 1.0
    ) -> list[WatchedOp | None]:
        """Runs a forward pass again; returns the origins of gradients of some parameters, or None: of all leaves."""
        watch = Watch(None if kept is None else lambda values: watch.count - 1 == kept and has_half(values))
        run = noted.run_again(watch, factor)
        self._copies = run.originals
        found = {id(run.originals.get(key)): origin for key, origin in origins_of_gradients(watch).items()}
        return [origin for key, origin in found.items() if ids is None or key in ids]


class Thread(threading.local):
    """Whether a thread is inside of a forward pass that is noted, or of a second run."""

    is_inside = False

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Context of such a pass."""
        self.is_inside = True
        try:
            yield
        finally:
            self.is_inside = False


class _WatchedSteps(Watch):
    """Watches steps of the thread that makes it as they run, and says why one was skipped.

    Compiled code runs uncompiled meanwhile, because torch.compile compiles nothing while a mode is active.

    Args:
        examiner: says in the user's terms where inf or NaN arose.
        ids: those of parameters of an optimizer whose steps are counted.
        steps: number of its steps.
    """

    def __init__(self, examiner: Examiner, ids: set[int], steps: int) -> None:
        super().__init__(keep=has_half)
        self._examiner, self._counted, self._left = examiner, ids, steps
        self._origins: dict[int, WatchedOp | None] = {}  # by the id of the parameter, since its optimizer's last step
        self._arrived: set[int] = set()  # ids of the parameters with a gradient since then
        self._forwards = 0  # forward passes since the record began

    def trace_of(self, ids: set[int], loss_scale: float) -> OverflowTrace | None:
        """Returns what `OverflowTracer.trace_of` does, by the ids of the parameters; None before a backward pass."""
        self._note_origins()
        is_watched = bool(ids & self._arrived)  # sharded parameters get their gradients from other tensors
        origins = [origin for key, origin in self._origins.items() if key in ids or not is_watched]
        if not origins:
            return OverflowTrace(notes=(FINITE_HERE,)) if self._arrived else None
        trace = self._examiner.describe(origins, self.missed_threads, loss_scale)
        return replace(trace, remedies=marked(trace.remedies))

    def end_step(self, ids: set[int]) -> bool:
        """Forgets the gradients of parameters, given by id, after a step that used them or was skipped.

        Returns:
            True after the last step to watch.
        """
        if not self.is_this_thread:
            return False
        self._left -= not ids.isdisjoint(self._counted)
        self._note_origins()
        if not ids & self._arrived:  # those of sharded parameters
            ids = {*self._origins, *self._arrived}
        self._origins = {key: origin for key, origin in self._origins.items() if key not in ids}
        self._arrived -= ids
        return self._left <= 0

    def enters(self, module: nn.Module, args: Any) -> bool:
        """Forgets earlier passes when a forward pass begins after a backward pass, or after many others."""
        if not self.thread.running and current_graph_task_id() == -1:
            self._note_origins()
            if self._forwards == _FORWARDS_KEPT or any(op.is_backward for op in self.ops):
                self.forget()
                self._forwards = 0
            self._forwards += torch.is_grad_enabled()
        return super().enters(module, args)

    def _note_origins(self) -> None:
        """Remembers the origins of the gradients that have arrived and are not finite."""
        if self.gradients:
            # The latest pass counts: gradients of an earlier one may have been cleared since.
            self._origins |= origins_of_gradients(self)
            self._arrived.update(id(gradient.parameter) for gradient in self.gradients)
            self.gradients.clear()
