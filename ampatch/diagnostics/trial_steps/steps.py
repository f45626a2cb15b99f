"""Runs steps of copies of a model, at any opt level, on the same random numbers.

Owns the arguments of ``amp.initialize`` with which they run. Must never touch the user's model, judge a step, nor leave
a session.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ampatch.cast_lists.lists import Overlay, shipped
from ampatch.diagnostics.overflow import causes
from ampatch.diagnostics.overflow.examiner import Examiner, origins_of_gradients
from ampatch.diagnostics.overflow.trace import OverflowTrace
from ampatch.diagnostics.recorder import mode_stacks
from ampatch.diagnostics.recorder.operands import with_types
from ampatch.diagnostics.recorder.records import WatchedOp, has_half
from ampatch.diagnostics.recorder.watch import Watch
from ampatch.diagnostics.trial_steps.levels import call_of
from ampatch.diagnostics.trial_steps.subject import Arguments, Subject, copied
from ampatch.grouping import grouped
from ampatch.half_types import HALVES
from ampatch.native import calls, kernels
from ampatch.opt_levels import LossScale, Properties, dtype_name, resolve
from ampatch.patching import adopted_model
from ampatch.runtime import close_session, open_session
from ampatch.scaling.loss_scaler import make_policy
from ampatch.session import Session
from ampatch.settings import Settings
from ampatch.torch_private.modes import TorchDispatchMode
from ampatch.torch_private.operators import tree_leaves

#: Below this absolute value float16 flushes to zero, or to its least subnormal number.
_FLUSHED_BELOW = 2.0**-24

#: The least dynamic scale that is tried. A gradient that overflows even with it is beyond 1e7 in float32.
_LEAST_SCALE = 2.0**-8

#: An argument of ``amp.initialize``, and a value that is added to it: "blacklist" (a part of ``cast_lists``) with the
#: namespace and the name of a function, "keep_fp32" with the name of a module, or "loss_scale" with a loss scale.
Part = tuple[str, Any]


class RandomInFloat32(TorchDispatchMode):
    """Runs random operators on tensors of other types in float32, so that masks of dropout do not depend on the type.

    On a GPU, one seed gives other masks for other types, as kernels draw as many numbers at once as fit a register.

    Args:
        of: the other types.
    """

    def __init__(self, of: frozenset[torch.dtype] = HALVES) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._of = of

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or "attention" in func._schema.name:
            return func(*args, **kwargs)
        types = [each.dtype if isinstance(each, Tensor) else each for each in tree_leaves((args, kwargs))]
        other = next((each for each in types if isinstance(each, torch.dtype) and each in self._of), None)
        if other is None:
            return func(*args, **kwargs)
        cast_args, cast_kwargs = with_types((args, kwargs), dict.fromkeys(self._of, torch.float32))
        result = func(*cast_args, **cast_kwargs)
        written = func._schema.arguments[0].alias_info if func._schema.arguments else None
        if written is not None and written.is_write:
            args[0].copy_(cast_args[0])
            return args[0]
        return with_types(result, {torch.float32: other})


def draws_itself(ops: Iterable[WatchedOp]) -> bool:
    """Returns True if an attention kernel among operators draws dropout, each type in another order."""
    return any("attention" in op.op_name and _dropout_of(op) > 0 for op in ops)


def _dropout_of(op: WatchedOp) -> float:
    args, kwargs = op.arguments or ((), {})
    given = dict(zip((argument.name for argument in op.op._schema.arguments), args, strict=False)) | kwargs
    return float(given.get("dropout_p", 0.0))


@dataclass(frozen=True, slots=True)
class Setup:
    """The arguments of one call of ``amp.initialize``.

    Attributes:
        opt_level: "O0" to "O6".
        half_dtype: the half type.
        parts: changes to the level's defaults.
        init_scale: first value of a dynamic scale.
        overlay: the user's cast lists, below the parts.
        name: its name in results, such as "O1 bfloat16".
    """

    opt_level: str
    half_dtype: torch.dtype
    parts: tuple[Part, ...] = ()
    init_scale: float = 2.0**16
    overlay: Overlay = ()
    name: str = ""

    @property
    def properties(self) -> Properties:
        """The resolved values of the level."""
        return resolve(self.opt_level, self.half_dtype, loss_scale=self._loss_scale())

    def settings(self) -> Settings:
        """Returns the settings of a session.

        Raises:
            CastListError: the overlay has faults.
        """
        properties = self.properties
        return Settings(
            properties,
            shipped(self.opt_level).overlaid(self.overlay).overlaid({"blacklist": self._blacklist()}),
            make_policy(properties.loss_scale, init_scale=self.init_scale),
            keep_fp32=tuple(self._values("keep_fp32")),
            fused_linear=properties.casts_float32_weights,
        )

    def examiner(self, model: nn.Module) -> Examiner:
        """Returns what names the operators of a step of a copy of the user's model, with these arguments."""
        names = {id(module): name for name, module in model.named_modules()}
        return Examiner(self.properties, make_policy(self.properties.loss_scale), lambda: names)

    def as_call(self) -> str:
        """Returns the call of ``amp.initialize`` as text."""
        blacklist, kept, scale = self._blacklist(), self._values("keep_fp32"), self._loss_scale()
        overlay = {"blacklist": blacklist} if blacklist else None
        changed = {"cast_lists": overlay, "keep_fp32": kept, "loss_scale": scale}
        given = (f"{name}={value!r}".replace("'", '"') for name, value in changed.items() if value)
        return call_of(self.opt_level, dtype_name(self.half_dtype), *given)

    def _blacklist(self) -> dict[str, list[str]]:
        """Returns the names of the functions in float32, by namespace."""
        return grouped(self._values("blacklist"))

    def _loss_scale(self) -> LossScale | None:
        return dict(self.parts).get("loss_scale")  # the last one

    def _values(self, argument: str) -> list[Any]:
        return [value for name, value in self.parts if name == argument]


@dataclass(frozen=True)
class Step:
    """The result of one step.

    Attributes:
        loss: the loss.
        gradients: the unscaled gradients by the parameters' names, dense.
        state: copies of the state that forward passes may write to, as `state_of` has it.
    """

    loss: float
    gradients: Mapping[str, Tensor]
    state: Mapping[str, Tensor]

    @classmethod
    def of(cls, loss: Tensor, parameters: Iterable[tuple[str, Tensor]], model: nn.Module) -> Step:
        """Returns the result of a step whose backward pass has run; keeps copies, those of half gradients in float32.

        Args:
            loss: the loss.
            parameters: the parameters with unscaled gradients, by name.
            model: the model that ran.
        """
        state = {name: each.detach().clone() for name, each in state_of(model).items()}
        gradients = {name: each.grad.detach().to_dense() for name, each in parameters if each.grad is not None}
        wide = {name: torch.promote_types(each.dtype, torch.float32) for name, each in gradients.items()}
        return cls(float(loss.detach()), {n: each.to(wide[n], copy=True) for n, each in gradients.items()}, state)

    @functools.cached_property
    def is_finite(self) -> bool:
        """True if the loss and all gradients are finite."""
        return math.isfinite(self.loss) and all(bool(each.isfinite().all()) for each in self.gradients.values())

    def gradient_error(self, other: Step) -> float:
        """Returns |gradients of the other step - these| / |these|, as 2-norms over all parameters."""
        squares, errors, zero = 0.0, 0.0, torch.zeros((), device="cpu")
        for name in {**self.gradients, **other.gradients}:
            mine, theirs = self.gradients.get(name, zero), other.gradients.get(name, zero)
            squares += _norm(mine) ** 2
            errors += _norm(theirs - mine) ** 2
        return math.sqrt(relative(errors, squares))

    def state_error(self, other: Step, before: Mapping[str, Tensor]) -> tuple[float, str]:
        """Returns the greatest |other - this| / |this - before| of what this step changes.

        Args:
            other: the step to judge.
            before: the buffers and frozen weights to compare, as they were before both steps.

        Returns:
            The error with the name; 0 and "" if the step changes none.
        """
        found = [(0.0, "")]
        for name, old_value in before.items():
            own = self.state[name]
            several = own, other.state[name], old_value
            is_dense = own.is_floating_point() and own.layout is torch.strided  # nothing counts in a sparse one
            if is_dense and len({each.shape for each in several}) == 1:
                mine, theirs, old = (each.to(own.device, torch.float64) for each in several)
                changed = _norm(mine - old)
                if 0 < changed < math.inf:
                    error = _norm(theirs - mine) / changed
                    found.append((math.inf if math.isnan(error) else error, name))
        return max(found)

    def flushed(self, scale: float) -> float:
        """Returns the share of the nonzero gradient values that float16 flushes to zero at a loss scale."""
        gradients = self.gradients.values()
        nonzero = sum(int((each != 0).sum()) for each in gradients)
        return sum(int(flushed_of(each, scale).sum()) for each in gradients) / nonzero if nonzero else 0.0


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Returns a model's buffers and frozen weights by name: what only its own code writes to, such as a counter."""
    frozen = {name: each for name, each in model.named_parameters() if not each.requires_grad}
    return {**frozen, **dict(model.named_buffers())}


def relative(difference: float, size: float) -> float:
    """Returns a difference as a share of a size; inf for one from zero."""
    return 0.0 if difference == 0 else difference / size if size else math.inf


def flushed_of(gradient: Tensor, scale: float) -> Tensor:
    """Returns which elements are not zero, and float16 flushes to zero at a loss scale."""
    return (gradient != 0) & (gradient.abs() < _FLUSHED_BELOW / scale)


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.complex128 if tensor.is_complex() else torch.float64))


@dataclass(slots=True)
class OpenedCopy:
    """A copy of the model in a session.

    Attributes:
        subject: the user's model and its step.
        setup: the arguments of ``amp.initialize`` that the session has.
        session: the session.
        model: the copy.
        optimizer: an optimizer that changes nothing.
    """

    subject: Subject
    setup: Setup
    session: Session
    model: nn.Module
    optimizer: torch.optim.SGD

    def step(self, arguments: Arguments, before_unscaling: Callable[[], object] = lambda: None) -> Tensor:
        """Runs forward and backward pass; returns the loss, with its graph."""
        loss = self.subject.loss_of(self.model, arguments)
        with self.session.losses.scale_loss(loss, [self.optimizer], 0) as scaled:
            scaled.backward()
            before_unscaling()
        return loss

    def watched_step(self, watch: Watch) -> tuple[Step, Tensor]:
        """Runs a step under a watch, on the same random numbers in every type; returns the loss too, with its graph."""
        arguments, random_in_float32 = self.subject.begin_step(), RandomInFloat32()
        with watch, contextlib.ExitStack() as stack:
            # Below the watch, so that the watch does not see its casts.
            mode_stacks.OPERATORS.insert(random_in_float32)
            stack.callback(mode_stacks.OPERATORS.remove, random_in_float32)
            loss = self.step(arguments, watch.stop)
        names = [name for name, each in self.model.named_parameters() if each.requires_grad]
        masters = zip(names, self.session.gradients.master_params(self.optimizer), strict=True)
        return Step.of(loss, masters, self.model), loss


@contextlib.contextmanager
def opened_copy(subject: Subject, setup: Setup) -> Iterator[OpenedCopy]:
    """Opens a session for a copy of the model and an optimizer that changes nothing."""
    settings, model = setup.settings(), copied(subject.model)
    with opened([model], settings) as (session, optimizer):
        yield OpenedCopy(subject, setup, session, model, optimizer)


@contextlib.contextmanager
def opened(models: Sequence[nn.Module], settings: Settings) -> Iterator[tuple[Session, torch.optim.SGD]]:
    """Opens a session for models and an optimizer that changes nothing."""
    kernels.prepare()
    calls.prepare()
    trained = [each for model in models for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.0)
    session = open_session(settings, {kind for model in models for kind in adopted_model.device_types(model)})
    session.losses.verbose = False
    try:
        session.adopt(list(models), [optimizer])
        yield session, optimizer
    finally:
        close_session(session)


def until_finite(opened: OpenedCopy) -> tuple[Step, float, OverflowTrace | None]:
    """Runs a step; with a dynamic scale again, while only the backward pass overflows.

    Returns:
        The last step, its scale, and the trace that most scales have in common.
    """
    dynamic = opened.setup.properties.loss_scale == "dynamic"
    state = [(each, each.clone()) for each in state_of(opened.model).values()]
    buffers = [(each._buffers, dict(each._buffers)) for each in opened.model.modules()]
    examiner = opened.setup.examiner(opened.model)
    traces: list[OverflowTrace] = []
    while True:
        scale, watch = opened.session.losses.scaler(0).state.loss_scale, Watch(keep=has_half)
        step, _ = opened.watched_step(watch)
        trace = None if step.is_finite else examined(watch, examiner, scale)
        traces += [] if trace is None else [trace]
        only_backward = math.isfinite(step.loss) and (trace is None or trace.direction == "backward")
        if step.is_finite or not (dynamic and only_backward and scale > _LEAST_SCALE):
            break
        opened.optimizer.step()  # which is skipped, and lowers the scale
        opened.optimizer.zero_grad(set_to_none=True)
        for current, first in buffers:  # a forward pass may write to a buffer, or put another tensor in its place
            current.update(first)
        with torch.no_grad():
            for each, before in state:
                each.copy_(before)
    alike = grouped((each.finding, each) for each in traces)
    return step, scale, max(alike.values(), key=len)[0] if alike else None


def examined(watch: Watch, examiner: Examiner, loss_scale: float) -> OverflowTrace | None:
    """Returns where the first inf or NaN of a watched step arose; None if no operator produced one."""
    found: list[WatchedOp | None] = list(origins_of_gradients(watch).values())
    if not found:  # the gradients are finite, and the loss is not
        found += causes.origins(watch.ops).values()
    return examiner.describe(found, watch.missed_threads, loss_scale) if found else None
