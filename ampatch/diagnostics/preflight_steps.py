"""Runs steps of copies of a model: in float32, and at an opt level. Judges whether they stand, and measures them.

Every step runs a new deep copy, on the same random numbers. Must never touch the user's model, nor leave a session.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ampatch.cast_lists.lists import shipped
from ampatch.diagnostics import causes
from ampatch.diagnostics.overflow_trace import Examiner, OverflowTrace, origin_at, origins_of_gradients
from ampatch.diagnostics.peak_memory import peak_allocated
from ampatch.diagnostics.preflight_report import FAILS, INACCURATE, OVERFLOWS, STANDS, call_of
from ampatch.diagnostics.watch import Watch, ran_in_half
from ampatch.errors import AmpWarning, LossScaleError, OptionError
from ampatch.native import calls, kernels
from ampatch.opt_levels import HALVES, LossScale, Overrides, Properties, resolve
from ampatch.patching import adopted_model
from ampatch.runtime import close_session, open_session
from ampatch.scaling.loss_scaler import make_policy
from ampatch.session import Session
from ampatch.settings import Settings

#: The greatest gradient error of a level that stands: the two gradients then differ by 12 degrees at most. In bfloat16
#: sound models have errors of some hundredths, small ones with ReLU up to 0.1; sums that cancel give 0.3 and more.
GRADIENT_BOUND = 0.2

#: A dynamic scale is followed down to here; a gradient that overflows even so is beyond 1e7 in float32.
LEAST_SCALE = 2.0**-8

#: Below this absolute value float16 flushes to zero, or to its least subnormal number.
FLUSHED_BELOW = 2.0**-24

_ROUNDS = 3

#: Positional arguments and keyword arguments.
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Subject:
    """The user's model, with what a step of it needs.

    Attributes:
        model: the user's; only copies of it run.
        args: positional arguments of its forward.
        kwargs: keyword arguments.
        loss_fn: returns the loss for the model's output.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss_fn: Callable[[Any], Any]

    def copied(self) -> nn.Module:
        """Returns a deep copy of the model without gradients.

        Raises:
            OptionError: it cannot be copied.
        """
        try:
            with (
                torch.no_grad()
            ):  # otherwise parts in TorchScript would be copied into a graph of the user's parameters
                model = copy.deepcopy(self.model)
        except Exception as error:
            raise OptionError(
                f"the model cannot be copied by copy.deepcopy ({type(error).__name__}: {error}), and preflight runs "
                "copies only. Give it a model that has not run yet: tensors that a forward pass computed, kept as "
                "attributes, cannot be copied."
            ) from error
        for mine, original in zip(model.parameters(), self.model.parameters(), strict=True):
            mine.requires_grad_(original.requires_grad)
        model.zero_grad(set_to_none=True)
        return model

    def arguments(self) -> Arguments:
        """Returns copies of the inputs, since a forward pass may write to them."""
        return _copied(self.args), _copied(self.kwargs)

    def loss_of(self, model: nn.Module, arguments: Arguments) -> Tensor:
        """Runs the forward pass of a copy, and returns its loss.

        Raises:
            OptionError: ``loss_fn`` returns no scalar that depends on a parameter.
        """
        args, kwargs = arguments
        loss = self.loss_fn(model(*args, **kwargs))
        if not isinstance(loss, Tensor):
            raise OptionError(
                f"loss_fn returned {type(loss).__name__!r}; expected a scalar tensor. For a model that returns its "
                "loss, type loss_fn=lambda output: output.loss."
            )
        if loss.numel() != 1 or not loss.is_floating_point():
            raise OptionError(
                f"loss_fn returned a {str(loss.dtype).removeprefix('torch.')} tensor of shape {tuple(loss.shape)}; "
                "expected a floating-point scalar, such as the mean over the batch."
            )
        if not loss.requires_grad:
            raise OptionError(
                "the loss depends on no parameter that requires a gradient, so there is no backward pass. Unfreeze a "
                "parameter (requires_grad_()), and leave .detach() and .item() out of loss_fn."
            )
        return loss


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_copied, value))
    if type(value) in (list, tuple):
        return type(value)(map(_copied, value))
    if type(value) is dict:
        return {key: _copied(each) for key, each in value.items()}
    try:
        return copy.deepcopy(value)
    except (RuntimeError, TypeError):  # such as a tensor with a graph inside of it, or an open file
        return value


class RandomState:
    """The state of the random number generators of torch, Python and numpy at the time it was made."""

    def __init__(self) -> None:
        self._cpu = torch.get_rng_state()
        self._gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        self._python = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy = None if numpy is None else (numpy.random, numpy.random.get_state())

    def restore(self) -> None:
        """Restores it."""
        torch.set_rng_state(self._cpu)
        if self._gpus:
            torch.cuda.set_rng_state_all(self._gpus)
        random.setstate(self._python)
        if self._numpy is not None:
            module, state = self._numpy
            module.set_state(state)


class _RandomInFloat32(TorchDispatchMode):
    """Runs random operators on half tensors in float32, so that a mask of dropout does not depend on the type.

    On a GPU, one seed gives other masks for other types, as kernels draw as many numbers at once as fit a register.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or "attention" in func._schema.name:
            return func(*args, **kwargs)
        half = _half_in((args, kwargs))
        if half is None:
            return func(*args, **kwargs)
        wide_args, wide_kwargs = with_types((args, kwargs), dict.fromkeys(HALVES, torch.float32))
        result = func(*wide_args, **wide_kwargs)
        written = func._schema.arguments[0].alias_info if func._schema.arguments else None
        if written is not None and written.is_write:
            args[0].copy_(wide_args[0])
            return args[0]
        return _narrowed(result, half)


def with_types(value: Any, types: Mapping[torch.dtype, torch.dtype]) -> Any:
    """Returns an operator's arguments with tensors and dtypes of some types in others; casts are copies."""
    if isinstance(value, Tensor):
        return value.to(types[value.dtype]) if value.dtype in types else value
    if isinstance(value, torch.dtype):
        return types.get(value, value)
    if isinstance(value, (list, tuple)):
        return type(value)(with_types(each, types) for each in value)
    if isinstance(value, dict):
        return {name: with_types(each, types) for name, each in value.items()}
    return value


def _half_in(value: Any) -> torch.dtype | None:
    if isinstance(value, Tensor):
        return value.dtype if value.dtype in HALVES else None
    if isinstance(value, torch.dtype):
        return value if value in HALVES else None
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, (list, tuple)):
        return next((half for each in value if (half := _half_in(each)) is not None), None)
    return None


def _narrowed(result: Any, half: torch.dtype) -> Any:
    if isinstance(result, Tensor):
        return result.to(half) if result.dtype is torch.float32 else result
    return type(result)(_narrowed(each, half) for each in result) if isinstance(result, (list, tuple)) else result


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
    """

    opt_level: str
    half_dtype: torch.dtype
    parts: tuple[Part, ...] = ()
    init_scale: float = 2.0**16

    @property
    def half_name(self) -> str:
        """The half type's name."""
        return str(self.half_dtype).removeprefix("torch.")

    @property
    def cast_lists(self) -> dict[str, dict[str, list[str]]] | None:
        """The overlay; None if no function is blacklisted."""
        blacklist: dict[str, list[str]] = {}
        for namespace, name in self._values("blacklist"):
            blacklist.setdefault(namespace, []).append(name)
        return {"blacklist": blacklist} if blacklist else None

    @property
    def properties(self) -> Properties:
        """The resolved values of the level."""
        scales: list[LossScale] = self._values("loss_scale")
        overrides = Overrides(loss_scale=scales[-1] if scales else None)
        return resolve(self.opt_level, self.half_dtype, overrides)

    def settings(self) -> Settings:
        """Returns the settings of a session.

        Raises:
            CastListError: the overlay has faults.
        """
        properties, overlay = self.properties, self.cast_lists
        return Settings(
            properties,
            shipped() if overlay is None else shipped().overlaid(overlay),
            make_policy(properties.loss_scale, init_scale=self.init_scale),
            keep_fp32=tuple(self._values("keep_fp32")),
        )

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

    @functools.cached_property
    def is_finite(self) -> bool:
        """True if the loss and all gradients are finite."""
        return math.isfinite(self.loss) and all(bool(each.isfinite().all()) for each in self.gradients.values())

    def gradient_error(self, other: Step) -> float:
        """Returns |gradients of the other step - these| / |these|, as 2-norms over all parameters."""
        squares, errors = 0.0, 0.0
        for name in self.gradients.keys() | other.gradients.keys():
            mine, theirs = self.gradients.get(name), other.gradients.get(name)
            if mine is not None:
                squares += _norm(mine) ** 2
            difference = mine if theirs is None else theirs.float() if mine is None else theirs.float() - mine
            errors += _norm(difference) ** 2
        if squares == 0:
            return 0.0 if errors == 0 else math.inf
        return math.sqrt(errors / squares)

    def loss_error(self, other: Step) -> float:
        """Returns |the other loss - this one| / |this one|."""
        difference = abs(other.loss - self.loss)
        return difference / abs(self.loss) if self.loss else (0.0 if difference == 0 else math.inf)

    def flushed(self, scale: float) -> float:
        """Returns the share of the nonzero gradient values that float16 flushes to zero at a loss scale."""
        counts = [flushed_of(each, scale) for each in self.gradients.values()]
        nonzero = sum(count for _, count in counts)
        return sum(small for small, _ in counts) / nonzero if nonzero else 0.0


def flushed_of(gradient: Tensor, scale: float) -> tuple[int, int]:
    """Returns how many elements float16 flushes to zero at a loss scale, and how many are not zero."""
    nonzero = gradient != 0
    small = nonzero & (gradient.abs() < FLUSHED_BELOW / scale)
    return int(small.sum()), int(nonzero.sum())


def _norm(tensor: Tensor | None) -> float:
    if tensor is None or not tensor.numel():
        return 0.0
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))


@dataclass(frozen=True, slots=True)
class Trial:
    """One or more steps with one setup, until one is finite.

    Attributes:
        setup: the arguments of ``amp.initialize``.
        verdict: "stands", "overflows", "inaccurate" or "fails"; see `LevelVerdict`.
        loss_scale: scale of the last step.
        step: the last step; None if it raised.
        loss_error: error of its loss.
        gradient_error: error of its gradients.
        error: text of what was raised.
        trace: where the first inf or NaN arose in the first step.
        around: names of the modules around that place, or around the place that raised; the innermost first.
        notes: warnings that amp gave.
        is_refused: True if amp refused the setup, before any step.
    """

    setup: Setup
    verdict: str
    loss_scale: float | None = None
    step: Step | None = None
    loss_error: float | None = None
    gradient_error: float | None = None
    error: str = ""
    trace: OverflowTrace | None = None
    around: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    is_refused: bool = False

    @property
    def stands(self) -> bool:
        """True if the verdict is "stands"."""
        return self.verdict == STANDS


@dataclass(slots=True)
class _Opened:
    session: Session
    model: nn.Module
    optimizer: torch.optim.SGD

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
        names = [name for name, each in self.model.named_parameters() if each.requires_grad]
        updated = list(self.session.master_params(self.optimizer))
        gradients = {
            name: dense(each.grad).float() for name, each in zip(names, updated, strict=True) if each.grad is not None
        }
        return Step(float(loss), gradients)

    @property
    def scale(self) -> float:
        return self.session.scaler(0).state.loss_scale


def dense(gradient: Tensor) -> Tensor:
    """Returns a copy of a gradient, dense and without a graph."""
    gradient = gradient.detach()
    return gradient.clone() if gradient.layout is torch.strided else gradient.to_dense()


@contextlib.contextmanager
def _opened(subject: Subject, setup: Setup) -> Iterator[_Opened]:
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
        yield _Opened(session, model, optimizer)
    finally:
        close_session(session)


def tried(subject: Subject, reference: Step, setup: Setup, state: RandomState) -> Trial:
    """Runs a step with a setup; with a dynamic scale again, while only the backward pass overflows.

    Args:
        subject: the model and its step.
        reference: the float32 step.
        setup: the arguments of ``amp.initialize``.
        state: random numbers of every step.
    """
    notes: list[str] = []
    around: list[str] = []
    is_refused = True
    try:
        with _noting_warnings(notes), _opened(subject, setup) as opened:
            names = {id(module): name for name, module in opened.model.named_modules()}
            is_refused = False
            try:
                step, scale, trace = _until_finite(subject, opened, setup, state, names)
            except Exception as error:
                around += _around(error, names)
                raise
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - a model may raise anything, and that is a verdict
        told = _text_of(error)
        return Trial(setup, FAILS, error=told, around=tuple(around), notes=tuple(notes), is_refused=is_refused)
    modules = () if trace is None or trace.module is None else enclosing(trace.module)
    trial = Trial(setup, OVERFLOWS, scale, step, trace=trace, around=modules, notes=tuple(notes))
    if not step.is_finite:
        return trial
    lost = reference.gradient_error(step)
    verdict = STANDS if lost <= GRADIENT_BOUND else INACCURATE
    return replace(trial, verdict=verdict, loss_error=reference.loss_error(step), gradient_error=lost)


def _until_finite(
    subject: Subject, opened: _Opened, setup: Setup, state: RandomState, names: Mapping[int, str]
) -> tuple[Step, float, OverflowTrace | None]:
    """Returns the last step, its scale, and the trace of what overflowed at most of the scales."""
    dynamic = setup.properties.loss_scale == "dynamic"
    buffers = [(buffer, buffer.clone()) for buffer in opened.model.buffers()]
    policy = make_policy(setup.properties.loss_scale)
    examiner = Examiner(setup.properties, policy, lambda module: names.get(id(module)))
    traces: list[OverflowTrace] = []
    while True:
        scale, arguments = opened.scale, subject.arguments()
        state.restore()
        with Watch(keep=ran_in_half) as watch, _RandomInFloat32():
            loss = opened.step_of(subject, arguments)
        step = opened.outcome(loss)
        trace = None if step.is_finite else examined(watch, examiner, scale)
        traces += [] if trace is None else [trace]
        only_backward = math.isfinite(step.loss) and (trace is None or trace.direction == "backward")
        if step.is_finite or not (dynamic and only_backward and scale > LEAST_SCALE):
            return step, scale, _commonest(traces)
        try:
            opened.optimizer.step()  # which is skipped
        except LossScaleError:
            return step, scale, _commonest(traces)
        opened.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


def _commonest(traces: Sequence[OverflowTrace]) -> OverflowTrace | None:
    """Returns the first of the traces that name the same place most often; None if there are none."""
    places = [(trace.direction, trace.function, trace.module, trace.line) for trace in traces]
    return max(traces, key=lambda trace: places.count(places[traces.index(trace)]), default=None)


def examined(watch: Watch, examiner: Examiner, loss_scale: float) -> OverflowTrace | None:
    """Returns where the first inf or NaN of a watched step arose; None if no operator produced one."""
    found = list(origins_of_gradients(watch).values())
    if not found:  # the gradients are finite, and the loss is not
        first = min(causes.origins(watch.ops).values(), key=lambda op: op.number, default=None)
        if first is None:
            return None
        found = [origin_at(first)]
    return examiner.describe(found, watch.missed_threads, loss_scale)


def enclosing(name: str) -> tuple[str, ...]:
    """Returns the name of a module and of those around it, from the innermost; the model itself has none."""
    parts = name.split(".") if name else []
    return tuple(".".join(parts[:count]) for count in range(len(parts), 0, -1))


def _around(error: BaseException, names: Mapping[int, str]) -> tuple[str, ...]:
    """Returns the name of the innermost module whose code raised, and of those around it."""
    innermost, trace = "", error.__traceback__
    while trace is not None:
        innermost, trace = names.get(id(trace.tb_frame.f_locals.get("self")), "") or innermost, trace.tb_next
    return enclosing(innermost)


def _text_of(error: BaseException) -> str:
    return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])


@contextlib.contextmanager
def _noting_warnings(notes: list[str]) -> Iterator[None]:
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


# Measuring


@dataclass(slots=True)
class Measured:
    """What steps with one setup cost.

    Attributes:
        seconds: the time of each step.
        peak_bytes: peak memory of a step, with the weights; None if unknown.
        notes: why something could not be measured.
    """

    seconds: list[float] = field(default_factory=list)
    peak_bytes: int | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def milliseconds(self) -> float | None:
        """The median time of a step."""
        return statistics.median(self.seconds) * 1e3 if self.seconds else None


def measured(subject: Subject, setups: Sequence[Setup | None], state: RandomState) -> list[Measured]:
    """Measures steps: forward pass, loss, backward pass, and the step of SGD.

    Goes through all setups three times, so that noise of the machine hits all alike. Each time a step to warm up comes
    first. A setup that is None gets no numbers.
    """
    found = [Measured() for _ in setups]
    for last in [False] * _ROUNDS + [True]:
        for setup, numbers in zip(setups, found, strict=True):
            if setup is None or numbers.notes:
                continue
            try:
                with _noting_warnings([]):  # those of amp are in the verdict's notes
                    if last:
                        numbers.peak_bytes = _peak_bytes(subject, setup, state)
                    else:
                        numbers.seconds.append(_seconds(subject, setup, state))
            except Exception as error:  # noqa: BLE001 - a report without a number is better than none
                numbers.notes.append(f"not measured further: {_text_of(error)}")
    return found


def _seconds(subject: Subject, setup: Setup, state: RandomState) -> float:
    """Returns the time of a step, after one to warm up."""
    gpus = {each.device for each in subject.model.parameters() if each.is_cuda}
    with _opened(subject, setup) as opened:
        state.restore()
        opened.whole_step(subject, subject.arguments())
        opened.optimizer.zero_grad(set_to_none=True)
        arguments = subject.arguments()
        state.restore()
        for device in gpus:
            torch.cuda.synchronize(device)
        begun = time.perf_counter()
        opened.whole_step(subject, arguments)
        for device in gpus:
            torch.cuda.synchronize(device)
        return time.perf_counter() - begun


def _peak_bytes(subject: Subject, setup: Setup, state: RandomState) -> int:
    """Returns the peak memory of a step, with the weights of the copy, and without the user's own model."""
    gpu = next((each.device for each in subject.model.parameters() if each.is_cuda), None)
    before = 0 if gpu is None else torch.cuda.memory_allocated(gpu)
    with contextlib.ExitStack() as stack:

        def prepare() -> Callable[[], object]:
            opened = stack.enter_context(_opened(subject, setup))
            state.restore()
            opened.whole_step(subject, subject.arguments())
            opened.optimizer.zero_grad(set_to_none=True)
            arguments = subject.arguments()
            state.restore()
            return functools.partial(opened.whole_step, subject, arguments)

        if gpu is None:
            return peak_allocated(prepare)
        step = prepare()
        torch.cuda.reset_peak_memory_stats(gpu)
        step()
        return torch.cuda.max_memory_allocated(gpu) - before
