"""Sets amp up for one fit or prediction, and takes it down after it, for frameworks that own the training loop.

Owns the list of trainers that share the session of this process, and the threads in which casts are on. Scales every
backward pass in a training step. Must not know any framework.
"""

from __future__ import annotations

import contextlib
import gc
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.parallel import DistributedDataParallel

from ampatch import amp
from ampatch.casting.nested import tensors_in
from ampatch.errors import OptionError, UsageError, warn
from ampatch.graph_nodes import leaves_among, nodes_of
from ampatch.grouping import grouped
from ampatch.half_types import HALF_DTYPES, HALVES
from ampatch.integrations import leaves_without_optimizer
from ampatch.integrations.given_scaler import GivenScaler, without_scale
from ampatch.integrations.leaves_without_optimizer import OtherLeaves
from ampatch.integrations.shared_patches import put_around
from ampatch.ledger import PatchLedger
from ampatch.opt_levels import LEVELS
from ampatch.runtime import runtime
from ampatch.scaling.scale_use import has_scaled
from ampatch.torch_private.autograd import FORWARD_CLASS, current_graph_task_id
from ampatch.torch_private.modules import COMPILED_CALL, COMPILED_ORIGINAL
from ampatch.weights.optimizer_state import parameters_of


class _Thread(threading.local):
    depth = 0  # number of open `casts_off` blocks
    casts = False  # True inside a `casts_on` block
    stepping: TrainerSession | None = None  # trainer whose training step runs in this thread


_thread = _Thread()


@dataclass
class _Shared:
    """State of the process: the trainers that use its session, and the patches that this module adds to amp's."""

    lock: threading.RLock = field(default_factory=threading.RLock)
    users: list[TrainerSession] = field(default_factory=list)
    ledger: PatchLedger = field(default_factory=PatchLedger)
    first_state: dict[str, Any] = field(default_factory=dict)


_shared = _Shared()


@contextlib.contextmanager
def casts_off() -> Iterator[None]:
    """Turns casts off in this thread while the block runs, except in `casts_on` blocks. A nested one is a no-op.

    Warns:
        AmpWarning: the block ends in another thread, as in a generator; casts stay off in the first one.
    """
    thread = threading.get_ident()
    if not _thread.depth:
        amp.disable_casts().__enter__()
    _thread.depth += 1
    try:
        yield
    finally:
        if thread == threading.get_ident():
            _thread.depth -= 1
            if not _thread.depth:  # iterators may end in any order, so the last one turns casts on
                amp.disable_casts().__exit__(None, None, None)
        else:
            warn(
                "an iterator over predictions was begun in one thread and ended in another, and casts stay off in the "
                "first one. Exhaust or close forward_iter in the thread that has begun it."
            )


def casts_off_elsewhere() -> contextlib.AbstractContextManager[None]:
    """Turns casts off for a trainer that has amp off, while other trainers have amp on.

    A session that the user set up stays in force: the user has asked for its casts.
    """
    is_anothers = runtime.live is not None and not _shared.users
    return contextlib.nullcontext() if is_anothers else casts_off()


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Delays Ctrl-C until the block ends, so that amp is never set up or taken down halfway."""
    before = signal.getsignal(signal.SIGINT)
    if not callable(before) or threading.current_thread() is not threading.main_thread():
        yield
        return
    caught: list[tuple[int, Any]] = []
    signal.signal(signal.SIGINT, lambda *received: caught.append(received))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if caught:
            before(*caught[0])


@contextlib.contextmanager
def casts_on() -> Iterator[None]:
    """Undoes `casts_off` while the block runs; the user's own ``amp.disable_casts`` still holds."""
    session = runtime.live
    if _thread.casts or not _thread.depth or session is None:
        yield
        return
    _thread.casts = True
    try:
        with session.switch.resumed():
            yield
    finally:
        _thread.casts = False


def has_scale() -> bool:
    """Returns True if amp is on with a loss scale; not in bfloat16, whose scale is 1 throughout."""
    live = runtime.live
    return live is not None and live.settings.properties.loss_scale != 1


def amp_log() -> dict[str, int | float]:
    """Returns the loss scale and the number of skipped steps, to log beside the loss. Reads the device once.

    Returns:
        "loss_scale" and "skipped_steps" of ``amp.stats``, and with several losses or optimizers "loss_scale/0" and so
        on. Empty if amp is off, and if the loss scale is 1 throughout, as in bfloat16.
    """
    stats = amp.stats() if has_scale() else {}
    return {name: each for name, each in stats.items() if name.startswith(("loss_scale", "skipped_steps"))}


@dataclass(frozen=True)
class Wording:
    """What users of a framework type, for errors and warnings.

    Attributes:
        set_up: what gets amp's arguments, and sets amp up.
        optimizer: sentence that says where they make an optimizer.
        backward: a backward pass with a scale.
    """

    set_up: str
    optimizer: str
    backward: str


class TrainerSession:
    """amp for the models and optimizers of one trainer, between `open` and `close`.

    Args:
        models: modules passed to ``amp.initialize``.
        optimizers: optimizers that train the models; None for predictions.
        options: keyword arguments of ``amp.initialize``.
        wording: what users of the framework type.
        scaler: object with ``torch.amp.GradScaler``'s interface that replaces amp's own scale; None for amp's own.

    Attributes:
        models: given models, without those that are part of another.
        optimizers: given optimizers; empty for predictions.
        is_training: True if optimizers were given.
        is_in_step: True while a training step runs.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Any] | None,
        options: Mapping[str, Any],
        wording: Wording,
        scaler: Any = None,
    ) -> None:
        # Levels that convert weights do not accept a model together with a part of it.
        inner = {id(part) for model in models for part in model.modules() if part is not model}
        self.models = [model for model in models if id(model) not in inner]
        self.optimizers = list(optimizers or ())
        self.is_training = optimizers is not None
        self._options = dict(options) if scaler is None else without_scale(options)
        self._wording = wording
        self._scaler = None if scaler is None else GivenScaler(scaler, self.optimizers)
        self._precise: list[tuple[Tensor, Tensor, torch.dtype]] = []
        self._updaters: dict[int, list[Any]] = {}  # optimizers by the ids of the parameters that they update
        self._warned_of_no_optimizer = self._has_run_backward = False
        self._steps = PatchLedger()
        self.is_in_step = self._has_skipped = False
        self._session: Any = None

    # Setup and teardown

    def open(self, state: Mapping[str, Any]) -> None:
        """Sets amp up, or joins the session of other trainers.

        Args:
            state: earlier result of this trainer's `state_dict`; empty for a fresh loss scale.

        Raises:
            UsageError: the user set amp up, or another trainer whose settings or loss scale cannot be shared.
            OptionError: an option has a value that is not allowed.
        """
        with _shared.lock:
            others = list(_shared.users)
            if others:
                _initialize([], [], self._options, joins=True)  # raises if settings differ, and names them
                self._check_may_join(others)
            elif amp.is_on():
                raise UsageError(
                    f"amp is set up already, by amp.initialize or amp.init, but {self._wording.set_up} sets it up "
                    f"itself. Leave that call out, and give its arguments to {self._wording.set_up}; or type "
                    "amp.deinitialize() before."
                )
            before = _floating(self.models) if may_convert(self._options) else []
            precise = [(each, each.detach()) for each in before]  # keep the float32 storage, which conversion replaces
            session = runtime.live
            optimizers = [] if self._scaler is not None else self.optimizers
            # The session still knows an optimizer that trained in it before.
            new = [each for each in optimizers if session is None or not session.adopted.has(each)]
            _initialize(self.models, new, self._options, joins=bool(others))
            self._session = runtime.live
            self._session.losses.leaves.are_unscaled = True
            _shared.users.append(self)
            try:
                self._after_initialize(precise, state)
            except BaseException:
                self.close()
                raise

    def _check_may_join(self, others: Sequence[TrainerSession]) -> None:
        live = amp.settings()
        session = runtime.live
        converts = session is not None and (session.settings.has_half_weights or session.settings.steps_in_float32)
        shares_scale = self.is_training and self._scaler is None and live.get("loss_scale") == "dynamic"
        if converts or (shares_scale and any(other.is_training for other in others)):
            why = "which has half weights" if converts else "with a dynamic loss scale"
            raise UsageError(
                f"amp is on in this process for another fit or prediction, at opt_level={live.get('opt_level')!r}, "
                f"{why}: only one at a time can have that. Run one after the other, or each in a process of its own."
            )

    def _after_initialize(self, precise: list[tuple[Tensor, Tensor]], state: Mapping[str, Any]) -> None:
        live = amp.settings()
        self._may_skip = live["loss_scale"] == "dynamic" or live["check_finite"]
        self._is_one = self._scaler is None and live["loss_scale"] == 1
        if self._scaler is not None and self._session.settings.steps_in_float32:
            raise OptionError(
                f"a scaler cannot replace amp's own scale at opt_level={live['opt_level']!r}, whose float32 masters "
                "get their gradients from amp's scale. Leave the scaler out, or use opt_level='O1'."
            )
        # amp restores a parameter from its master. Without a master it would stay rounded, so `close` restores it.
        updated = (id(each) for optimizer in self.optimizers for each in parameters_of(optimizer))
        mastered = set(updated) if live["master_weights"] else set()
        self._precise = [
            (now, before, now.dtype)
            for now, before in precise
            if now.dtype is not before.dtype and not (id(now) in mastered and now.requires_grad)
        ]
        self._counts = amp.cast_counts()
        casts = live["patch_torch_functions"] or live["cast_model_type"] in HALF_DTYPES
        self._unproven = self.is_training and casts
        if _shared.users == [self]:
            _shared.first_state = amp.state_dict()
            put_around(_shared.ledger, torch.autograd, "backward", _backward_of_steps)
        self.load_state_dict(state)
        for optimizer in self.optimizers:
            if self._scaler is None:
                self._session.adopted.record_of(optimizer).missing_scale.scaled_backward = self._wording.backward
            else:
                self._steps.set(optimizer, "step", self._scaler.step_of(optimizer))

    def close(self) -> None:
        """Leaves the session. The last trainer takes amp down, and its weights are float32 again."""
        with _shared.lock:
            _shared.users = [user for user in _shared.users if user is not self]
            self._steps.undo()
            if _shared.users:
                return
            _shared.ledger.undo()
            try:
                if runtime.live is self._session:
                    amp.deinitialize()
            finally:
                with torch.no_grad():
                    for now, before, half in self._precise:
                        if now.dtype is before.dtype and torch.equal(now, before.to(half).to(now.dtype)):
                            now.copy_(before)
                self._precise = []

    @property
    def converts(self) -> bool:
        """True if parameters or buffers of the models are half now."""
        return any(each.dtype in HALVES for each in _floating(self.models))

    def state_dict(self) -> dict[str, Any] | None:
        """Returns the state of amp's scale as plain numbers; None if amp is off, for predictions, or with a scaler."""
        return amp.state_dict() if self.is_training and self._scaler is None and amp.is_on() else None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a state into amp's scale; an empty one gives a fresh scale."""
        if self.is_training and self._scaler is None:
            amp.load_state_dict(state or _shared.first_state)

    # Steps

    @property
    def step_was_skipped(self) -> bool:
        """True if an optimizer skipped its step in the last training step, after an overflow."""
        return self._has_skipped if self._scaler is None else self._scaler.has_skipped

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Runs a training step: scales the backward passes of this thread, and notes whether a step was skipped.

        Raises:
            UsageError: user code took amp down after `open`.

        Warns:
            AmpWarning: amp cast nothing in the first training step.
        """
        try:
            with self.scaled_backward():
                skipped = self._skipped_steps()
                if self._scaler is not None:
                    self._scaler.has_skipped = False
                yield
        except BaseException:
            if self._scaler is not None:  # it unscales once an iteration, and another fit may begin with it
                self._scaler.end_iteration()
            raise
        self._warn_if_idle()
        if self._scaler is None:
            self._has_skipped = self._skipped_steps() > skipped
        elif self._scaler.has_stepped:
            self._scaler.end_iteration()

    @contextlib.contextmanager
    def scaled_backward(self) -> Iterator[None]:
        """Scales the backward passes of this thread in the block, for trainers whose steps are in several blocks.

        Raises:
            UsageError: user code took amp down after `open`.

        Warns:
            AmpWarning: amp cast nothing until the end of the first block with a backward pass.
        """
        if runtime.live is not self._session:
            raise UsageError(
                "amp.deinitialize() was called in the midst of a fit, which sets amp up and takes it down itself. "
                "Leave that call out, or call it after the fit."
            )
        outer, _thread.stepping = _thread.stepping, self
        was_in_step, self.is_in_step = self.is_in_step, True
        try:
            yield
        finally:
            _thread.stepping, self.is_in_step = outer, was_in_step
        if self._has_run_backward:
            self._warn_if_idle()

    def last_step_was_skipped(self) -> bool:
        """Returns whether the last step of any optimizer was skipped, after an overflow; syncs with the device."""
        return self._may_skip and any(map(amp.step_was_skipped, self.optimizers))

    def _skipped_steps(self) -> int:
        return sum(map(amp.skipped_steps, self.optimizers)) if self._may_skip else 0

    def _warn_if_idle(self) -> None:
        if not self._unproven:
            return
        self._unproven = False
        if self.converts or amp.cast_counts() != self._counts or _are_compiled(self.models):
            return
        live = amp.settings()
        warn(
            f"amp is on (opt_level={live['opt_level']!r}, {live['half_dtype']}), and the first training step has cast "
            f"nothing: no function of the cast lists met a tensor on {', '.join(live['device_types'])} that needs a "
            "cast. ampatch lists show NAME prints which functions are cast; opt_level='O0' turns amp off."
        )

    # What frameworks do to the models

    def forget_wrapper(self, wrapper: DistributedDataParallel) -> None:
        """Notes that the framework is about to drop a wrapper."""
        self._session.ranks.forget(wrapper)

    # Backward passes

    def backward(self, original: Callable[..., None], tensors: Any, args: tuple[Any, ...], kwargs: Any) -> None:
        """Runs a backward pass of a training step with the loss scaled, and leaves its gradients unscaled.

        Args:
            original: ``torch.autograd.backward``.
            tensors: tensor or sequence of tensors, the first argument of ``original``.
            args: other positional arguments of ``original``.
            kwargs: keyword arguments of ``original``.

        Raises:
            UsageError: the loss was scaled in a block that has ended.

        Warns:
            AmpWarning: the trainer has no optimizer, so that the loss is not scaled.
        """
        self._has_run_backward = True
        if not self.optimizers:
            if not (self._is_one or self._warned_of_no_optimizer):
                self._warned_of_no_optimizer = True
                warn(
                    "this backward pass runs without a loss scale, as there is no optimizer whose gradients amp would "
                    f"unscale: small gradients are lost in half precision. {self._wording.optimizer}"
                )
            original(tensors, *args, **kwargs)
            return
        inputs = args[4] if len(args) > 4 else kwargs.get("inputs")
        leaves, is_all = self._leaves(tensors, inputs)
        ours, scaler = self._ours(leaves), self._scaler
        # Without `inputs` it may reach parameters that are no leaves of this graph, as in a checkpointed region.
        is_anothers = not ours and bool(leaves) and (inputs is not None or (scaler is not None and scaler.is_unscaled))
        if is_anothers or self._is_scaled_by_hand():
            original(tensors, *args, **kwargs)
            return
        with casts_on():
            if scaler is None:
                reached = {id(optimizer) for key in ours for optimizer in self._updaters[key]} if is_all else ()
                updating = [each for each in self.optimizers if not reached or id(each) in reached]
                block: Any = amp.scale_loss(tensors, updating)
                # An accumulation goes on at the scale that it began with, so the block knows the scale.
                with block as scaled, self._others_unscaled(leaves, lambda _: block.scale_use.scale):
                    original(scaled, *args, **kwargs)
            else:
                scaler.begin_backward()
                with self._others_unscaled(leaves, scaler.scale_for):
                    scaler.backward(original, tensors, args, kwargs)

    def _others_unscaled(
        self, leaves: Mapping[int, Tensor], scale_for: Callable[[Tensor], Tensor]
    ) -> contextlib.AbstractContextManager[None]:
        """Unscales what a backward pass in the block adds to the gradients of leaves that no optimizer updates."""
        if self._is_one:
            return contextlib.nullcontext()
        return OtherLeaves(self._ours, self._session.ranks.reduced_among, scale_for).unscaled(leaves)

    def _leaves(self, tensors: Any, inputs: Any) -> tuple[dict[int, Tensor], bool]:
        """Returns the leaves that a backward pass reaches, by id, and whether these are all of them."""
        if inputs is not None:
            return {id(each): each for each in tensors_in(inputs)}, True
        if self._is_one and len(self.optimizers) == 1:  # nothing depends on them
            return {}, False
        roots = [each.grad_fn for each in tensors_in(tensors) if each.grad_fn is not None]
        nodes = list(nodes_of(roots))
        if any(map(has_scaled, nodes)) and not self._is_scaled_by_hand():
            raise UsageError(
                "this backward pass begins with a loss that amp.scale_loss has scaled, and the block of amp.scale_loss "
                f"has ended: the loss would be scaled twice. {self._wording.set_up} scales it: leave amp.scale_loss "
                "out; or run the backward pass inside of its block."
            )
        return leaves_among(nodes), not any(map(_may_hide_leaves, nodes))

    def _ours(self, leaves: Mapping[int, Tensor]) -> set[int]:
        """Returns the ids of those leaves that the optimizers update, also if optimizers got new parameters since."""
        if not leaves.keys() <= self._updaters.keys():
            pairs = ((id(each), optimizer) for optimizer in self.optimizers for each in parameters_of(optimizer))
            self._updaters = grouped(pairs)
        return self._updaters.keys() & leaves.keys()

    def _is_scaled_by_hand(self) -> bool:
        """Returns True if this backward pass runs inside the user's own ``amp.scale_loss`` block."""
        session = runtime.live
        if session is None or self._scaler is not None:
            return False
        uses = (session.adopted.record_of(optimizer).gradients.scaled_by for optimizer in self.optimizers)
        return any(each is not None and each.is_open for each in uses)


def _may_hide_leaves(node: Node) -> bool:
    """Returns True if a node may run a backward pass of its own, as a reentrant checkpoint does."""
    function = getattr(type(node), FORWARD_CLASS, None)  # of nodes that are written in Python
    return function is not None and (
        function is torch.utils.checkpoint.CheckpointFunction
        or not function.__module__.startswith(("torch.", "ampatch."))
    )


def _backward_of_steps(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Calls ``torch.autograd.backward``, and scales the backward passes of training steps."""
    live = _thread.stepping
    if not (args or "tensors" in kwargs):
        original(*args, **kwargs)
        return
    tensors, args = (args[0], args[1:]) if args else (kwargs.pop("tensors"), ())
    if not isinstance(tensors, (Tensor, tuple)):
        tensors = tuple(tensors)  # torch takes iterators too
    if current_graph_task_id() != -1:
        # A backward pass within another one, as in checkpoints, has scaled gradients already.
        leaves_without_optimizer.note(tensors)
    elif live is not None:
        live.backward(original, tensors, args, kwargs)
        return
    original(tensors, *args, **kwargs)


def _initialize(
    models: Sequence[nn.Module], optimizers: Sequence[Any], options: Mapping[str, Any], *, joins: bool
) -> None:
    try:
        amp.initialize(list(models), list(optimizers), **options)
    except UsageError as error:
        if not joins:
            raise
        raise UsageError(
            "amp is on in this process for another fit or prediction, and torch's functions belong to the process. "
            f"Run one after the other, or each in a process of its own, or give both the same settings. {error}"
        ) from error


def may_convert(options: Mapping[str, Any]) -> bool:
    """Returns True if options of ``amp.initialize`` may convert weights."""
    level, given = LEVELS.get(str(options.get("opt_level", "O1"))), options.get("cast_model_type")
    return given is not False and (level is None or level.converts or given is not None)


def _are_compiled(models: Sequence[nn.Module]) -> bool:
    """Returns True if torch.compile has compiled a part of the models, or a model within a wrapper of its own."""
    from ampatch.torch_private.tracers import OptimizedModule

    parts = {id(part): part for model in models for part in model.modules()}
    return any(getattr(part, COMPILED_CALL) is not None for part in parts.values()) or any(
        issubclass(type(each), OptimizedModule) and id(getattr(each, COMPILED_ORIGINAL)) in parts
        for each in gc.get_objects()
    )


def _floating(models: Sequence[nn.Module]) -> list[Tensor]:
    tensors = {id(each): each for model in models for each in (*model.parameters(), *model.buffers())}
    return [each for each in tensors.values() if each.is_floating_point()]
