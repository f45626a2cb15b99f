"""The loss scale: its transition as a pure function, and the scaler that keeps its state on the device.

The scheme is that of "Mixed Precision Training" (Micikevicius et al., 2018): halve on overflow, double after a run of
clean steps; with the hysteresis of Megatron-LM. A static scale has the same methods, but never changes, and does not
look for overflow. Must know gradients only as tensors, never parameters or optimizers.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from ampatch.casting.nested import cast_tensors
from ampatch.distributed import Ranks
from ampatch.errors import AmpError, OptionError, UsageError, did_you_mean, warn
from ampatch.native import kernels
from ampatch.native.host_copy import on_device, read
from ampatch.opt_levels import LossScale, check_count, check_loss_scale
from ampatch.switch import WithoutCasts
from ampatch.tracing import is_capturing

logger = logging.getLogger("ampatch")

_L = TypeVar("_L")

_GREATEST = torch.finfo(torch.float32).max

#: A floor for scales that are to have none: 1 / scale is still finite there, so that gradients of 0 do not become NaN.
#: A scale comes down to it only after more than a hundred overflows in a row.
NO_FLOOR = 2.0**-126

_NEVER = 2**31 - 1  # steps until a scale grows

# The keys of a saved state. The first two are required: the scale, and its number of clean steps.
_KEYS = ("loss_scale", "unskipped", "hysteresis_left", "dynamic")
_GRAD_SCALER_KEYS = (
    "scale",
    "_growth_tracker",
    "growth_factor",
    "backoff_factor",
    "growth_interval",
    "hysteresis_left",
)


@dataclass(frozen=True, slots=True)
class ScalePolicy:
    """How a loss scale behaves.

    Attributes:
        dynamic: True if the scale reacts to overflows; a static scale is neither checked nor changed.
        init_scale: the first scale. 2**16 is just above float16's largest number: gradients of 1 overflow at once, and
            the scale backs off to a suitable value in a few steps.
        growth_factor: factor by which the scale grows. Powers of two leave every mantissa unchanged.
        backoff_factor: factor by which the scale backs off.
        scale_window: steps without overflow before the scale grows; 2000 as in the paper.
        hysteresis: overflows, not necessarily in a row, before the scale backs off; refilled when it grows.
        min_loss_scale: the least scale. 2**-24 is float16's smallest number; a smaller scale cannot help.
        max_loss_scale: the greatest scale; inf: float32's largest number.
    """

    dynamic: bool
    init_scale: float
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    scale_window: int = 2000
    hysteresis: int = 1
    min_loss_scale: float = 2.0**-24
    max_loss_scale: float = 2.0**24


_CEILING = 2.0**24
#: The least and the greatest scale for which the user gives none, by the value of ``scaler``. All else is the same in
#: Apex's scaler, torch's and ampatch's: 2**16, 2, 0.5 and 2000.
_BOUNDS = {None: (2.0**-24, _CEILING), "apex": (NO_FLOOR, _CEILING), "torch": (NO_FLOOR, math.inf)}


@dataclass(frozen=True, slots=True)
class ScaleState:
    """The state of a scale at one moment.

    Attributes:
        loss_scale: factor of the loss.
        unskipped: steps without overflow since the scale last changed.
        hysteresis_left: overflows until the scale backs off.
    """

    loss_scale: float
    unskipped: int
    hysteresis_left: int


def make_policy(
    loss_scale: float | str,
    *,
    init_scale: float = 2.0**16,
    scale_factor: float = 2.0,
    scale_window: int = 2000,
    hysteresis: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
    growth_factor: float | None = None,
    backoff_factor: float | None = None,
    scaler: str | None = None,
) -> ScalePolicy:
    """Returns a checked policy from the arguments of ``amp.initialize``.

    Raises:
        OptionError: a value is out of range, the least scale is above the greatest, or ``scale_factor`` is given with
            one of the factors that it sets.
    """
    checked: LossScale = check_loss_scale(loss_scale)
    floor, greatest = _bounds(scaler)
    if min_loss_scale is not None:
        floor = _checked_scale("min_loss_scale", min_loss_scale)
    ceiling = _checked_scale("max_loss_scale", max_loss_scale)
    if ceiling == _CEILING:  # the default
        ceiling = greatest
    if floor > ceiling:
        raise OptionError(f"min_loss_scale={floor} is above max_loss_scale={ceiling}; expected it to be at most that.")
    growth, backoff = _factors(scale_factor, growth_factor, backoff_factor)
    window, left = check_count("scale_window", scale_window), check_count("hysteresis", hysteresis)
    start = _checked_scale("init_scale", init_scale)
    first = min(max(start, floor), ceiling) if checked == "dynamic" else _checked_scale("loss_scale", checked)
    return ScalePolicy(checked == "dynamic", first, growth, backoff, window, left, floor, ceiling)


def first_state(policy: ScalePolicy) -> ScaleState:
    """Returns the first state of a scale."""
    return ScaleState(policy.init_scale, 0, policy.hysteresis)


def next_state(state: ScaleState, overflow: bool, policy: ScalePolicy) -> ScaleState:
    """Returns the state after one step: the reference for the tests of `kernels.update_scale`."""
    if not policy.dynamic:
        return replace(state, unskipped=state.unskipped + 1)
    scale, left = state.loss_scale, state.hysteresis_left
    if overflow:
        left -= 1
        unskipped = 0
        if left <= 0:
            scale *= policy.backoff_factor
    else:
        unskipped = state.unskipped + 1
        if unskipped >= policy.scale_window:
            scale, unskipped, left = scale * policy.growth_factor, 0, policy.hysteresis
    bounded = min(max(_float32(scale), policy.min_loss_scale), policy.max_loss_scale)
    return ScaleState(bounded if math.isfinite(bounded) else state.loss_scale, unskipped, left)


def scaled(loss: _L, scale: Tensor | None) -> _L:
    """Multiplies losses by a scale.

    Args:
        loss: a floating tensor, or nested lists, tuples and dicts of them.
        scale: 0-dimensional float32; None: 1.

    Returns:
        Losses in float32, in the same lists, tuples and dicts, each on its own device.
    """
    if not isinstance(loss, Tensor):
        return cast_tensors(loss, lambda each: scaled(each, scale))  # type: ignore[return-value]
    full = loss.float()
    return full if scale is None else full * on_device(scale, full.device)  # type: ignore[return-value]


class _ScaleOnDevice:
    """The state of a loss scale where its losses are: on their device, so that no step waits for the host.

    Args:
        policy: how the scale reacts to overflows.

    Attributes:
        policy: as given.
        dynamic: True if the scale reacts to overflows.
        is_one: True if the scale is static and 1, so that scaling changes nothing and costs nothing.
        age: number of times that the scale was set or may have changed; known without a sync with the device.
        counted: number of updates of a static scale that the host has counted.
    """

    is_one: bool
    age: int = 0
    counted: int = 0
    _loads: int = 0  # states loaded; what blocks have found before them no longer moves the scale
    _has_noted: bool = False
    _is_replayed: bool = False  # a CUDA graph notes overflows, and its replays do not run this code
    _dropped: Tensor | None = None  # not 0 if it has backed off by `back_off` since the last update
    _has_reacted: bool = False
    _kept: Tensor | None = None  # the snapshot of a static scale

    def __init__(self, policy: ScalePolicy) -> None:
        self.policy, self.dynamic = policy, policy.dynamic
        with torch.inference_mode(False):  # a backward pass may need them, even if they are made in inference mode
            self._scale = torch.empty((), dtype=torch.float32, device="cpu")
            self._unskipped = torch.empty((), dtype=torch.int32, device="cpu")
            self._hysteresis_left = torch.empty_like(self._unskipped)
            self._found_inf = torch.empty_like(self._scale)  # overflows noted since the last update
        self.set_state(first_state(policy))

    def set_state(self, state: ScaleState) -> None:
        """Loads a checked state."""
        # In place: a CUDA graph keeps using the tensors that it captured.
        self._set_to = state.loss_scale  # for the host; a static scale still has it
        self._scale.fill_(state.loss_scale)
        self._unskipped.fill_(state.unskipped)
        self._hysteresis_left.fill_(state.hysteresis_left)
        self.forget()
        self.counted, self._kept, self._dropped = 0, None, None
        self._loads += 1
        self.is_one = not self.policy.dynamic and state.loss_scale == 1
        self.age += 1

    @property
    def numbers(self) -> tuple[Tensor, Tensor, Tensor]:
        """The state as it is kept on the device, to be read only; a static scale's updates are in `counted`."""
        return self._scale, self._unskipped, self._hysteresis_left

    @property
    def on_device(self) -> tuple[Tensor, Tensor]:
        """The scale and its clean updates as they are kept: to be read only."""
        return self._scale, self._unskipped

    def tensors_on(self, device: torch.device) -> tuple[Tensor, ...]:
        """Returns the state on its device; writing to it changes the state."""
        self.to(device)
        self._kept = None
        self.age += 1
        return self._scale, self._unskipped, self._hysteresis_left

    def to(self, device: torch.device) -> None:
        """Moves the state to a device.

        Raises:
            UsageError: a CUDA graph is being captured, and the state is elsewhere: it would be copied in each replay.
        """
        if self._scale.device != device:
            if is_capturing():
                raise UsageError(
                    f"the loss scale is on {str(self._scale.device)!r}, and cannot be moved to {str(device)!r} while a "
                    "CUDA graph is captured. Run one whole step before the capture."
                )
            self._scale = self._scale.to(device)
            self._unskipped = self._unskipped.to(device)
            self._hysteresis_left = self._hysteresis_left.to(device)
            self._found_inf = self._found_inf.to(device)
            self._kept = None

    def snapshot(self) -> Tensor:
        """Returns a copy of the present scale on the device: 0-dimensional float32; must not be written to."""
        if self.dynamic or is_capturing():
            return self._scale.clone()
        if self._kept is None:
            with torch.inference_mode(False):  # reused outside inference mode
                self._kept = self._scale.clone()
        return self._kept

    def set_scale(self, scale: float | Tensor) -> None:
        """Sets the scale of a dynamic scaler; its number of clean updates stays.

        Args:
            scale: a positive number; or a floating tensor of one element, whose value is not checked.

        Raises:
            OptionError: it is neither.
        """
        if not isinstance(scale, Tensor):
            self._scale.fill_(_checked_scale("new_scale", scale))
        elif scale.numel() == 1 and scale.is_floating_point() and not scale.requires_grad:
            self._scale.copy_(scale.reshape(()))
        else:
            raise OptionError(
                f"new_scale is {_kind(scale)} of shape {tuple(scale.shape)}"
                f"{' that requires gradients' * scale.requires_grad}; expected a number, or a floating tensor of one "
                "number without gradients."
            )
        self.age += 1

    def no_overflow(self) -> Tensor:
        """Returns a new verdict, for kernels to write: 0-dimensional float32, 0."""
        return torch.zeros_like(self._found_inf)

    def note(self, found_inf: Tensor) -> None:
        """Records a verdict for the next `update`.

        Args:
            found_inf: 0-dimensional float32, not 0 after an overflow.
        """
        torch.maximum(self._found_inf, on_device(found_inf, self._found_inf.device), out=self._found_inf)
        self._has_noted = True
        self._is_replayed = self._is_replayed or is_capturing()

    def forget(self) -> None:
        """Forgets the verdicts recorded since the last update."""
        self._found_inf.zero_()
        self._has_noted = False

    def _react(self, found_inf: Tensor, scale_window: int | None = None) -> None:
        policy, self._has_reacted = self.policy, True
        kernels.update_scale(
            self._scale,
            self._unskipped,
            self._hysteresis_left,
            on_device(found_inf, self._scale.device),
            policy.growth_factor,
            policy.backoff_factor,
            policy.scale_window if scale_window is None else scale_window,
            policy.hysteresis,
            policy.min_loss_scale,
            policy.max_loss_scale,
        )
        self.age += 1


class LossScaler(_ScaleOnDevice):
    """A loss scale for loops that do not use ``amp.scale_loss``.

    ::

        scaler = amp.LossScaler()
        scaler.scale(loss).backward()
        overflow = scaler.unscale_(p.grad for p in model.parameters())
        if not overflow:
            optimizer.step()
        scaler.update()

    Args:
        loss_scale: "dynamic", or a positive number for a static scale, which is never checked.
        init_scale: first value of a dynamic scale.
        scale_factor: factor by which it grows and backs off.
        scale_window: updates without overflow before it grows.
        hysteresis: overflows before it backs off.
        min_loss_scale: the least scale; None: 2**-24.
        max_loss_scale: the greatest scale.
        growth_factor: factor by which it grows; None: ``scale_factor``.
        backoff_factor: factor by which it backs off; None: 1 / ``scale_factor``.

    Attributes:
        policy: how the scale reacts to overflows.
        dynamic: True if the scale reacts to overflows.
        is_one: True if the scale is static and 1, so that scaling changes nothing and costs nothing.
        age: number of times that the scale was set or may have changed; known without a sync with the device.
        overflows: number of overflows for which amp has skipped steps; stays 0 for a scaler that is used by hand.
        uses_by_hand: class attribute: number of calls of `unscale_`, of all scalers.

    Raises:
        OptionError: a value is out of range.
    """

    uses_by_hand: ClassVar[int] = 0
    overflows: int = 0

    def __init__(
        self,
        loss_scale: float | str = "dynamic",
        *,
        init_scale: float = 2.0**16,
        scale_factor: float = 2.0,
        scale_window: int = 2000,
        hysteresis: int = 1,
        min_loss_scale: float | None = None,
        max_loss_scale: float = 2.0**24,
        growth_factor: float | None = None,
        backoff_factor: float | None = None,
    ) -> None:
        super().__init__(
            make_policy(
                loss_scale,
                init_scale=init_scale,
                scale_factor=scale_factor,
                scale_window=scale_window,
                hysteresis=hysteresis,
                min_loss_scale=min_loss_scale,
                max_loss_scale=max_loss_scale,
                growth_factor=growth_factor,
                backoff_factor=backoff_factor,
            )
        )

    @classmethod
    def from_policy(cls, policy: ScalePolicy) -> LossScaler:
        """Returns a scaler for a checked policy."""
        scaler = cls.__new__(cls)
        _ScaleOnDevice.__init__(scaler, policy)
        return scaler

    @WithoutCasts()
    def scale(self, loss: _L) -> _L:
        """Multiplies a loss by the scale.

        Args:
            loss: floating tensor of any shape; or nested lists, tuples and dicts of them.

        Returns:
            The scaled loss: float32, of the same shape, on the same device, in the same lists, tuples and dicts.

        Raises:
            OptionError: it is not a floating tensor.
        """
        self.to_device_of(loss)
        # By a copy: autograd keeps the factor, and an update before the backward pass would change it.
        return scaled(loss, None if self.is_one else self.snapshot())

    @WithoutCasts()
    def unscale_(self, grads: Iterable[Tensor | None]) -> Tensor:
        """Divides gradients by the scale in place, and looks for overflow if the scale is dynamic.

        Args:
            grads: floating or complex tensors of any shape, dtype and device. None is skipped, sparse ones are
                coalesced. One that is there twice is unscaled once, as ``torch.autograd.grad`` may return one tensor
                for two parameters. All ranks must pass the same DTensors; then each rank sees an overflow on any rank.

        Returns:
            0-dimensional float32: 1 if any element is inf or NaN, else 0; always 0 under a static scale. Reading it
            syncs with the device.

        Raises:
            OptionError: one of them is not a gradient but, say, a parameter; nothing was changed.
        """
        there = _checked_gradients(grads)
        LossScaler.uses_by_hand += 1
        if not self.dynamic:
            if not self.is_one:
                kernels.multiply_(there, self._scale.reciprocal())
            return self.no_overflow()
        found_inf = kernels.unscale_by_(there, self._scale)
        Ranks().reduce_overflow_(found_inf, there)
        self.note(found_inf)
        return found_inf

    @WithoutCasts()
    def update(self) -> None:
        """Ends a step: the scale backs off after an overflow since the last update; otherwise it grows or stays."""
        if self.dynamic:
            self._react(self._found_inf)
            self.forget()
        elif is_capturing():
            self._unskipped += 1
        else:
            self.counted += 1

    def update_by(self, found_inf: Tensor) -> None:
        """Calls `note` and `update`, in one kernel if it can; backs off at most once with the `back_off` before it."""
        dropped, self._dropped = self._dropped, None
        if self._has_noted or self._is_replayed or not self.dynamic:
            self.note(found_inf)
            self.update()
        elif dropped is None:
            self._react(found_inf)
        else:
            both = on_device(dropped * on_device(found_inf, dropped.device), self._scale.device) != 0
            before = self._scale.clone(), self._hysteresis_left.clone()
            self._react(found_inf)
            for now, kept in zip((self._scale, self._hysteresis_left), before, strict=True):
                now.copy_(torch.where(both, kept, now))

    def to_device_of(self, loss: object) -> None:
        """Moves the state to the device of a loss, or of the first of several.

        Raises:
            OptionError: it is neither a floating tensor, nor lists, tuples and dicts of them.
        """
        if not isinstance(loss, Tensor) or not loss.is_floating_point():
            loss = _checked_losses(loss)[0]
        self.to(loss.device)

    def __repr__(self) -> str:
        # A debugger shows it at any moment: while it is made, under a tracer, while a CUDA graph is captured.
        with contextlib.suppress(Exception):
            if not self.dynamic:
                return f"LossScaler(static, loss_scale={self._set_to})"
            device, first = self._scale.device, self.policy.init_scale
            if device.type != "cpu":  # to read it would wait for the device
                return f"LossScaler(dynamic, loss_scale on {device}: read it by .state, init_scale={first})"
            return f"LossScaler(dynamic, loss_scale={float(self._scale)}, unskipped={int(self._unskipped)})"
        return object.__repr__(self)

    @property
    def state(self) -> ScaleState:
        """The state as plain numbers; reading it syncs with the device."""
        return ScaleState(float(self._scale), int(self._unskipped) + self.counted, int(self._hysteresis_left))

    def state_dict(self) -> dict[str, float | int]:
        """Returns the state as plain numbers, under the names that Apex used: ``loss_scale`` and ``unskipped``."""
        state = self.state
        saved: dict[str, float | int] = {"loss_scale": state.loss_scale, "unskipped": state.unskipped}
        if self.policy.hysteresis > 1:
            saved["hysteresis_left"] = state.hysteresis_left
        if not self.dynamic:
            saved["dynamic"] = False  # a dynamic scale must not start from it
        return saved

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Loads a state: one of `state_dict`, of Apex, or of ``torch.amp.GradScaler``.

        Raises:
            OptionError: a key is missing or unknown, or its value is out of range; nothing was changed.
        """
        self.set_state(self.read_state_dict(state_dict))

    def read_state_dict(self, state_dict: Mapping[str, object]) -> ScaleState:
        """Returns the checked state in a dict, without loading it.

        A dynamic scale is clamped to this policy's least and greatest scale, and its remaining hysteresis to this
        policy's.

        Raises:
            OptionError: a key is missing or unknown, or its value is out of range.
        """
        if not isinstance(state_dict, Mapping):
            raise OptionError(
                f"found {type(state_dict).__name__} as the state of a loss scaler; expected what state_dict() returned."
            )
        known = _GRAD_SCALER_KEYS if is_of_grad_scaler(state_dict) else _KEYS
        scale_key, unskipped_key = required = known[:2]
        unexpected = [key for key in state_dict if key not in known]
        missing = [key for key in required if key not in state_dict]
        if unexpected or missing:
            raise OptionError(
                f"the state of a loss scaler has unexpected keys {unexpected} and lacks {missing}; expected "
                f"{', '.join(required)}."
            )
        try:
            scale = _checked_scale(scale_key, state_dict[scale_key])
            unskipped = check_count(unskipped_key, state_dict[unskipped_key], least=0)
            left = state_dict.get("hysteresis_left", self.policy.hysteresis)
            left = min(check_count("hysteresis_left", left, least=-(2**31)), self.policy.hysteresis)
            for key in _GRAD_SCALER_KEYS[2:5]:
                _checked_scale(key, state_dict.get(key, 1.0))
        except AmpError as error:
            raise OptionError(f"the state of a loss scaler is not sound: {error}") from None
        if self.dynamic:
            scale = min(max(scale, self.policy.min_loss_scale), self.policy.max_loss_scale)
        return ScaleState(scale, unskipped, left)


def has_reacted(scaler: LossScaler) -> bool:
    """Returns True if a scale has reacted to a verdict, so that it is that of a run."""
    return scaler._has_reacted


def loads_of(scaler: LossScaler) -> int:
    """Returns the number of states that were loaded into a scaler."""
    return scaler._loads


def back_off(scaler: LossScaler, found_inf: Tensor) -> None:
    """Has a dynamic scale react to an overflow in gradients that no step will have; without one, changes nothing.

    Args:
        scaler: the scaler.
        found_inf: 0-dimensional float32, 1 after an overflow, else 0.
    """
    found_inf = on_device(found_inf, scaler._scale.device)
    earlier = scaler._dropped
    scaler._dropped = found_inf if earlier is None else torch.maximum(on_device(earlier, found_inf.device), found_inf)
    scaler._react(found_inf, scale_window=_NEVER)
    scaler._unskipped -= (found_inf == 0).int()


def read_states(scalers: Iterable[LossScaler]) -> list[ScaleState]:
    """Returns the states of several scalers as plain numbers; reads each device once."""
    scalers = list(scalers)
    found = read(torch.stack([each.double() for each in scaler.numbers]) for scaler in scalers)
    return [
        ScaleState(scale, int(unskipped) + scaler.counted, int(left))
        for scaler, (scale, unskipped, left) in zip(scalers, found, strict=True)
    ]


def is_of_grad_scaler(state_dict: Mapping[Any, object]) -> bool:
    """Returns True if a saved state is what ``torch.amp.GradScaler.state_dict()`` returns, or a part of it."""
    return bool(state_dict) and all(key in _GRAD_SCALER_KEYS for key in state_dict)


def settings_unlike(policy: ScalePolicy, *state_dicts: Mapping[Any, object]) -> str:
    """Returns the settings in which saved ``GradScaler`` states differ from a policy, as text.

    Empty if none differs, and for a static scale, which reacts to nothing.
    """
    here = {
        "growth_factor": policy.growth_factor,
        "backoff_factor": policy.backoff_factor,
        "growth_interval": policy.scale_window,
    }
    saved = [state_dict for state_dict in state_dicts if policy.dynamic and is_of_grad_scaler(state_dict)]
    unlike = {
        f"{name}={state_dict[name]} ({value:g} here)": None
        for state_dict in saved
        for name, value in here.items()
        if state_dict.get(name, value) != value
    }
    return ", ".join(unlike)


def load_states(
    scalers: Sequence[LossScaler], state_dict: Mapping[str, Any], *, logs: bool, warnings: Iterable[str] = ()
) -> None:
    """Loads the states of several scalers, after a check of all of them.

    Args:
        scalers: all of one policy.
        state_dict: states under "loss_scaler0" and on; or the state of a ``GradScaler``, for the first scaler.
        logs: whether to log states that are not loaded because the saved or the present scale is static.
        warnings: warnings of the caller, given after the checks and before anything is changed.

    Raises:
        OptionError: unexpected keys, or values that no scaler can have; nothing was changed.

    Warns:
        AmpWarning: the numbers of scalers differ, or a ``GradScaler`` had other settings.
    """
    if not isinstance(state_dict, Mapping):
        raise OptionError(
            f"found {type(state_dict).__name__}; expected the dict that amp.state_dict() returned, or that of a "
            "torch.amp.GradScaler."
        )
    if is_of_grad_scaler(state_dict):
        state_dict = {"loss_scaler0": state_dict}
    unexpected = [key for key in state_dict if not (str(key).startswith("loss_scaler") and str(key)[11:].isdigit())]
    if unexpected:
        raise OptionError(
            f"the state dict has unexpected keys {unexpected}; expected loss_scaler0, loss_scaler1, ..., or what a "
            "torch.amp.GradScaler saved and nothing else. Of a whole checkpoint, give the part that amp.state_dict() "
            "returned."
        )
    known = {f"loss_scaler{index}": scaler for index, scaler in enumerate(scalers)}
    common = [name for name in known if name in state_dict]
    states = {name: known[name].read_state_dict(state_dict[name]) for name in common}  # all, before any is changed
    if state_dict.keys() != known.keys():
        warn(
            f"the state dict holds {', '.join(state_dict) or 'no loss scaler'}, and there "
            f"{'is' if len(known) == 1 else 'are'} {', '.join(known)}; loaded: {', '.join(common) or 'none'}. Others "
            "stay as they are."
        )
    other = settings_unlike(scalers[0].policy, *(state_dict[name] for name in common))
    if other:
        warn(
            f"the GradScaler had {other}, which is not loaded. To have it here, give growth_factor, backoff_factor and "
            "scale_window to amp.initialize."
        )
    for told in warnings:
        warn(told)
    for name, state in states.items():
        _load(name, known[name], state, was_static=state_dict[name].get("dynamic") is False, logs=logs)


def _load(name: str, scaler: LossScaler, state: ScaleState, *, was_static: bool, logs: bool) -> None:
    """Loads a checked state; of a static scale and a dynamic one, only what both have."""
    policy = scaler.policy
    if policy.dynamic and was_static:
        if logs:
            logger.info("%s was saved with a static scale, and is dynamic here: it stays as it is.", name)
        return
    if not policy.dynamic and state.loss_scale != policy.init_scale:
        if logs:
            logger.info("%s was saved at %g, and is static here: %g", name, state.loss_scale, policy.init_scale)
        state = replace(state, loss_scale=policy.init_scale)
    scaler.set_state(state)


def _checked_gradients(grads: object) -> list[Tensor]:
    """Returns the gradients that there are, each once; raises if one of them is none."""
    expected = "expected gradients, such as (p.grad for p in model.parameters())."
    if isinstance(grads, Tensor) or not isinstance(grads, Iterable):
        raise OptionError(f"found {_kind(grads)}; {expected}")
    there = list({id(grad): grad for grad in grads if grad is not None}.values())
    for grad in there:
        if not isinstance(grad, Tensor) or not (grad.is_floating_point() or grad.is_complex()):
            raise OptionError(f"found {_kind(grad)} among the gradients; {expected}")
        if grad.requires_grad and grad.is_leaf:
            raise OptionError(f"found a parameter of shape {tuple(grad.shape)} among the gradients; {expected}")
    return there


def _checked_losses(loss: object) -> list[Tensor]:
    """Returns the losses in nested lists, tuples and dicts; raises if there is none."""
    if isinstance(loss, (list, tuple, dict)):
        items = loss.values() if isinstance(loss, dict) else loss
        found = [each for item in items for each in _checked_losses(item)]
        if found:
            return found
        raise OptionError(f"the loss is an empty {type(loss).__name__}; expected one floating tensor or more.")
    if isinstance(loss, Tensor) and loss.is_floating_point():
        return [loss]
    raise OptionError(
        f"the loss is {_kind(loss)}; expected a floating tensor, or lists, tuples and dicts of floating tensors."
    )


def _kind(value: object) -> str:
    return f"a tensor of {value.dtype}" if isinstance(value, Tensor) else type(value).__name__


def _checked_scale(name: str, value: object) -> float:
    """Returns a number rounded to float32; raises if it, or its reciprocal, is 0 or inf there."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 2.0**-126 <= value <= _GREATEST:
        return _float32(value)
    raise OptionError(f"{name} is {value!r}; expected a number from 2**-126 to {_GREATEST:g}.")


def _bounds(scaler: object) -> tuple[float, float]:
    if scaler is None or (isinstance(scaler, str) and scaler in _BOUNDS):
        return _BOUNDS[scaler]
    raise OptionError(
        f"scaler is {scaler!r}; expected 'apex' or 'torch', or None for the bounds of ampatch."
        f"{did_you_mean(scaler, ['apex', 'torch'])}"
    )


def _factors(scale_factor: object, growth_factor: object, backoff_factor: object) -> tuple[float, float]:
    """Returns the growth factor and the backoff factor, from ``scale_factor`` or given separately."""
    both = _factor("scale_factor", scale_factor)
    if both <= 1:
        raise OptionError(f"scale_factor is {scale_factor!r}; expected a number above 1, such as 2.")
    if both != 2 and not (growth_factor is None and backoff_factor is None):
        raise OptionError(
            f"scale_factor={scale_factor!r} stands beside growth_factor or backoff_factor; expected either the one "
            "factor for both directions, or those two."
        )
    growth = both if growth_factor is None else _factor("growth_factor", growth_factor)
    backoff = 1 / both if backoff_factor is None else _factor("backoff_factor", backoff_factor)
    if growth <= 1:
        raise OptionError(f"growth_factor is {growth_factor!r}; expected a number above 1, such as 2.")
    if backoff >= 1:
        raise OptionError(f"backoff_factor is {backoff_factor!r}; expected a number below 1, such as 0.5.")
    return growth, backoff


def _factor(name: str, value: object) -> float:
    _checked_scale(name, value)
    return float(value)  # type: ignore[arg-type] # exactly: the product is what is rounded


def _float32(number: float) -> float:
    return float(torch.tensor(number, dtype=torch.float32, device="cpu"))
