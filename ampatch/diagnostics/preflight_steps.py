"""Runs steps of copies of a model, at any opt level, on the same random numbers.

Owns the arguments of ``amp.initialize`` with which they run. Must never touch the user's model, nor
leave a session.
"""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ampatch.cast_lists.lists import Overlay, shipped
from ampatch.diagnostics.examiner import Examiner
from ampatch.diagnostics.operands import with_types
from ampatch.diagnostics.preflight_report import call_of
from ampatch.diagnostics.preflight_subject import Arguments, Subject
from ampatch.errors import AmpWarning
from ampatch.grouping import grouped
from ampatch.native import calls, kernels
from ampatch.opt_levels import HALVES, LossScale, Properties, resolve
from ampatch.patching import adopted_model
from ampatch.runtime import close_session, open_session
from ampatch.scaling.loss_scaler import make_policy
from ampatch.session import Session
from ampatch.settings import Settings

#: Below this absolute value float16 flushes to zero, or to its least subnormal number.
FLUSHED_BELOW = 2.0**-24


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


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a change of the arguments of ``amp.initialize``.

    Attributes:
        argument: "blacklist" (a part of ``cast_lists``), "keep_fp32" or "loss_scale".
        value: (namespace, name) of a function, the name of a module, or a loss scale.
    """

    argument: str
    value: Any


@dataclass(frozen=True, slots=True)
class Setup:
    """The arguments of one call of ``amp.initialize``.

    Attributes:
        opt_level: "O0" to "O3".
        half_dtype: the half type.
        parts: changes to the level's defaults.
        init_scale: first value of a dynamic scale.
        overlay: the user's cast lists, below the parts.
    """

    opt_level: str
    half_dtype: torch.dtype
    parts: tuple[Part, ...] = ()
    init_scale: float = 2.0**16
    overlay: Overlay = ()

    @property
    def half_name(self) -> str:
        """The half type's name."""
        return str(self.half_dtype).removeprefix("torch.")

    @property
    def cast_lists(self) -> dict[str, dict[str, list[str]]] | None:
        """The overlay; None if no function is blacklisted."""
        blacklist = grouped(self._values("blacklist"))
        return {"blacklist": blacklist} if blacklist else None

    @property
    def properties(self) -> Properties:
        """The resolved values of the level."""
        scales: list[LossScale] = self._values("loss_scale")
        return resolve(self.opt_level, self.half_dtype, loss_scale=scales[-1] if scales else None)

    def settings(self) -> Settings:
        """Returns the settings of a session.

        Raises:
            CastListError: the overlay has faults.
        """
        properties, lists, overlay = self.properties, shipped().overlaid(self.overlay), self.cast_lists
        return Settings(
            properties,
            lists if overlay is None else lists.overlaid(overlay),
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
        given = []
        if self.cast_lists is not None:
            given.append(f"cast_lists={_quoted(self.cast_lists)}")
        kept = self._values("keep_fp32")
        if kept:
            given.append(f"keep_fp32={_quoted(kept)}")
        given += [f"loss_scale={_quoted(scale)}" for scale in self._values("loss_scale")[-1:]]
        return call_of(self.opt_level, self.half_name, *given)

    def _values(self, argument: str) -> list[Any]:
        return [part.value for part in self.parts if part.argument == argument]


def _quoted(value: object) -> str:
    return repr(value).replace("'", '"')


@dataclass(frozen=True)
class Step:
    """The result of one step.

    Attributes:
        loss: the loss.
        gradients: the unscaled gradients by the parameters' names, dense.
    """

    loss: float
    gradients: Mapping[str, Tensor]

    @classmethod
    def of(cls, model: nn.Module, loss: Tensor) -> Step:
        """Returns the result of a step whose backward pass has run, without amp."""
        gradients = {name: dense(each.grad) for name, each in model.named_parameters() if each.grad is not None}
        return cls(float(loss.detach()), gradients)

    @functools.cached_property
    def is_finite(self) -> bool:
        """True if the loss and all gradients are finite."""
        return math.isfinite(self.loss) and all(bool(each.isfinite().all()) for each in self.gradients.values())

    def gradient_error(self, other: Step) -> float:
        """Returns |gradients of the other step - these| / |these|, as 2-norms over all parameters."""
        squares, errors = 0.0, 0.0
        for name in self.gradients.keys() | other.gradients.keys():
            mine, theirs = self.gradients.get(name), other.gradients.get(name)
            squares += _norm(mine) ** 2
            theirs = None if theirs is None else wide(theirs)
            difference = mine if theirs is None else theirs if mine is None else theirs - mine
            errors += _norm(difference) ** 2
        return math.sqrt(relative(errors, squares))

    def loss_error(self, other: Step) -> float:
        """Returns |the other loss - this one| / |this one|."""
        return relative(abs(other.loss - self.loss), abs(self.loss))

    def flushed(self, scale: float) -> float:
        """Returns the share of the nonzero gradient values that float16 flushes to zero at a loss scale."""
        gradients = self.gradients.values()
        nonzero = sum(int((each != 0).sum()) for each in gradients)
        return sum(int(flushed_of(each, scale).sum()) for each in gradients) / nonzero if nonzero else 0.0


def relative(difference: float, size: float) -> float:
    """Returns a difference as a share of a size; inf for one from zero."""
    return 0.0 if difference == 0 else difference / size if size else math.inf


def flushed_of(gradient: Tensor, scale: float) -> Tensor:
    """Returns which elements are not zero, and float16 flushes to zero at a loss scale."""
    return (gradient != 0) & (gradient.abs() < FLUSHED_BELOW / scale)


def wide(tensor: Tensor) -> Tensor:
    """Returns a tensor in float32; a complex one as it is."""
    return tensor if tensor.is_complex() else tensor.float()


def _norm(tensor: Tensor | None) -> float:
    if tensor is None or not tensor.numel():
        return 0.0
    return float(torch.linalg.vector_norm(tensor, dtype=torch.complex128 if tensor.is_complex() else torch.float64))


@dataclass(slots=True)
class OpenedCopy:
    """A copy of the model in a session.

    Attributes:
        session: the session.
        model: the copy.
        optimizer: an optimizer that changes nothing.
        setup: the arguments of ``amp.initialize`` that the session has.
    """

    session: Session
    model: nn.Module
    optimizer: torch.optim.SGD
    setup: Setup

    def step_of(self, subject: Subject, arguments: Arguments) -> Tensor:
        """Runs forward and backward pass; returns the loss."""
        loss = subject.loss_of(self.model, arguments)
        with self.session.scale_loss(loss, [self.optimizer], 0) as scaled:
            scaled.backward()
        return loss.detach()

    def whole_step(self, subject: Subject, arguments: Arguments) -> None:
        """Runs a training step as a user's loop does."""
        self.step_of(subject, arguments)
        self.optimizer.step()

    def outcome(self, loss: Tensor) -> Step:
        """Returns the loss and the unscaled gradients of the step that ran last."""
        names = [name for name, each in self.model.named_parameters() if each.requires_grad]
        updated = list(self.session.master_params(self.optimizer))
        gradients = {
            name: wide(dense(each.grad)) for name, each in zip(names, updated, strict=True) if each.grad is not None
        }
        return Step(float(loss), gradients)

    @property
    def scale(self) -> float:
        """The loss scale."""
        return self.session.scaler(0).state.loss_scale


def dense(gradient: Tensor) -> Tensor:
    """Returns a copy of a gradient, dense and without a graph."""
    gradient = gradient.detach()
    return gradient.clone() if gradient.layout is torch.strided else gradient.to_dense()


@contextlib.contextmanager
def opened_copy(subject: Subject, setup: Setup) -> Iterator[OpenedCopy]:
    """Opens a session for a copy of the model and an optimizer that changes nothing."""
    kernels.prepare()
    calls.prepare()
    settings = setup.settings()
    model = subject.copied()
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.0)
    session = open_session(settings, adopted_model.device_types(model))
    session.verbose = False
    try:
        session.adopt([model], [optimizer])
        yield OpenedCopy(session, model, optimizer, setup)
    finally:
        close_session(session)


def text_of(error: BaseException) -> str:
    """Returns an error's class, message and notes."""
    return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])


@contextlib.contextmanager
def noting_warnings(notes: list[str]) -> Iterator[None]:
    """Collects amp's warnings, each once, and shows all others afterwards."""
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", AmpWarning)
            yield
    finally:
        notes += dict.fromkeys(str(each.message) for each in caught if issubclass(each.category, AmpWarning))
        for each in caught:
            if not issubclass(each.category, AmpWarning):
                warnings.warn_explicit(each.message, each.category, each.filename, each.lineno, source=each.source)
