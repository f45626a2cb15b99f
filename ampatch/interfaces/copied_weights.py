"""The weights of a copy for inference: which are half, their float32 values, and the forward passes that read them.

A weight is *half* if only whitelisted functions read it, as these would cast it every time. For torch's own layers
this is known beforehand; for other modules the first forward pass shows it. A weight that other functions also read
stays float32, or becomes float32 again when such a function reads it. So results equal those of O1, bit for bit.

Must never change the model that was copied, nor torch: a `CastingMode` casts while a forward pass of the copy runs.
"""

from __future__ import annotations

import threading
import types
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.nn import Parameter

from ampatch.casting import cast_observers, write_back
from ampatch.casting.cast_store import Store
from ampatch.casting.nested import cast_floating, with_versions
from ampatch.errors import UsageError
from ampatch.patching.casting_mode import CastingMode, CastRules, thread
from ampatch.runtime import runtime
from ampatch.torch_private.modes import get_tracing_state, peek_interpreter_stack
from ampatch.torch_private.modules import FASTPATH
from ampatch.tracing import is_capturing, is_under_mode


def _is_traced() -> bool:
    """Returns True if a tracer or a CUDA graph capture records the calls; weights must not change meanwhile."""
    return is_compiling() or get_tracing_state() is not None or is_under_mode() or is_capturing()


_TRACED_TOO_EARLY = (
    "a half weight of a converted model is read by a function that is not on the whitelist, while the model is traced. "
    "Run the converted model once before you compile or export it: the weight becomes float32 again then."
)


def _wait_for(written: Tensor) -> None:
    """Syncs with the device until a tensor is written: threads with other CUDA streams may read it next."""
    if written.is_cuda:
        torch.cuda.current_stream(written.device).synchronize()


class State(Enum):
    """Which functions have read a weight so far."""

    UNREAD = auto()
    IN_HALF = auto()  # read in half in this forward pass; becomes half at its end
    HALF = auto()
    FLOAT32 = auto()


@dataclass(eq=False, slots=True)
class Weight:
    """A weight of the copy that was float32 in the model.

    Attributes:
        places: modules that hold the weight, each with the weight's name in it.
        name: name as in `nn.Module.named_parameters`.
        state: kind of functions that have read the weight.
        kept: float32 values of a half weight, in CPU memory; None if they were dropped, or the weight is not half.
    """

    places: list[tuple[nn.Module, str]]
    name: str
    state: State
    kept: Tensor | None

    def parameter(self) -> Tensor | None:
        """Returns the parameter that the first of its places holds now; None if there is none."""
        module, name = self.places[0]
        found: Tensor | None = module._parameters.get(name)
        return found

    def values(self, parameter: Tensor, half_dtype: torch.dtype) -> Tensor:
        """Returns float32 values: the kept ones, except for elements that the user has changed since."""
        shown = parameter.detach()
        # The user saw the values in half, and may have converted the parameter to another type since.
        if self.kept is None:
            return shown.float()
        kept = self.kept.to(shown.device)
        return torch.where(kept.to(half_dtype).to(shown.dtype) == shown, kept, shown.float())


#: A module's own weights, each with its name there.
Own = list[tuple[str, Weight]]


class CopiedWeights:
    """The weights of one copy, and the forward passes that run with them; implements `casting_mode.Weights`.

    Args:
        rules: the rules of its casts.
        keep_float32: True to keep the float32 values of half weights.

    Attributes:
        rules: the argument ``rules``.
        half_dtype: type of half weights.
        keep_float32: the argument ``keep_float32``.
        are_of_the_model: True if the model itself had weights of the type ``half_dtype``.
        weights: weights that were float32 in the model.
    """

    def __init__(self, rules: CastRules, keep_float32: bool) -> None:
        self.rules = rules
        self.half_dtype = rules.half_dtype
        self.keep_float32 = keep_float32
        self.are_of_the_model = False
        self.weights: list[Weight] = []
        self._begin()

    def _begin(self) -> None:
        self._by_id: dict[int, tuple[weakref.ref[Tensor], Weight]] = {}
        self._casts = Store()
        self._is_settled = True
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: held for name, held in vars(self).items() if not name.startswith("_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()  # `index` runs at the first use: only then are the modules of a deep copy or a pickle complete

    def index(self) -> None:
        """Looks up the parameters again: a deep copy has others, and a tracer replaces them."""
        parameters = [(weight.parameter(), weight) for weight in self.weights]
        self._by_id = {id(each): (weakref.ref(each), weight) for each, weight in parameters if each is not None}

    def find(self, parameter: Tensor) -> Weight | None:
        """Returns the record of a parameter; None if it is not one of these weights."""
        if not self._by_id and self.weights:
            self.index()
        reference, weight = self._by_id.get(id(parameter), (None, None))
        return weight if reference is not None and reference() is parameter else None

    # Called by the casting mode

    def cast(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns a tensor in another type; the cast of a weight is cached until the weight changes."""
        may_be_weight = type(tensor) is Parameter or is_under_mode()
        if may_be_weight and dtype is not self.half_dtype:  # a whitelisted function that writes to float32 wants this
            tensor = self.full(tensor)
        if type(tensor) is not Parameter or dtype is not self.half_dtype or _is_traced():
            return cast_observers.cast(tensor, lambda: tensor.to(dtype))
        weight = self.find(tensor)
        if weight is not None and weight.state is State.UNREAD:
            weight.state, self._is_settled = State.IN_HALF, False
        kept = self._casts.find(tensor, dtype)
        if kept is not None:
            cast_observers.hit([kept])
            return kept
        cast = cast_observers.cast(tensor, lambda: with_versions(tensor.to, dtype))
        may_be_kept = cast.grad_fn is None and tensor.layout is torch.strided and not tensor.is_inference()
        if may_be_kept and peek_interpreter_stack() is None:
            # The cast requires grad if its weight does: torch's linear copies a weight that does not require grad for
            # each row of a batch.
            self._casts.forget([key for key, parameter, _ in self._casts.entries() if parameter() is None])
            self._casts.keep(tensor, cast.requires_grad_(tensor.requires_grad))
            _wait_for(cast)
        return cast

    def full(self, weight: Tensor) -> Tensor:
        """Returns the weight for a function that is not whitelisted; makes it float32 again if it is half.

        Raises:
            UsageError: the weight is half, and its float32 values were dropped, or the calls are traced.
        """
        if is_dynamo_compiling():
            if weight.dtype is self.half_dtype and not self.are_of_the_model:
                raise UsageError(_TRACED_TOO_EARLY)
            return weight
        known = self.find(weight)
        if known is None or known.state is State.FLOAT32:
            return weight
        if known.state is State.HALF:
            if _is_traced():
                raise UsageError(f"{_TRACED_TOO_EARLY} The weight is {known.name!r}.")
            self._restore(known, weight)
        elif not _is_traced():
            known.state = State.FLOAT32
        return weight

    def dtype_of(self, weight: Tensor) -> torch.dtype:
        """Returns a weight's type in the model that was copied, for code that casts its input to the weight's type."""
        known = self.find(weight)
        return weight.dtype if known is None else torch.float32

    def narrow_weights(self) -> None:
        """Makes weights half that only whitelisted functions have read; runs at the end of a forward pass."""
        if self._is_settled:
            return
        self._is_settled = True
        with self._lock:
            for weight in self.weights:
                parameter = weight.parameter() if weight.state is State.IN_HALF else None
                if parameter is not None:
                    self._make_half(weight, parameter)

    def _make_half(self, weight: Weight, parameter: Tensor) -> None:
        with torch.inference_mode(False), torch.no_grad():
            if self.keep_float32:
                weight.kept = parameter.detach().to("cpu", copy=True)
            half = self._casts.find(parameter, self.half_dtype)
            parameter.data = parameter.detach().to(self.half_dtype) if half is None else half.detach()
        _wait_for(parameter)
        weight.state = State.HALF
        self._casts.forget([id(parameter)])

    def _restore(self, weight: Weight, parameter: Tensor) -> None:
        with self._lock:
            if weight.state is not State.HALF:
                return
            if weight.kept is None:
                raise UsageError(
                    f"the converted model's {weight.name!r} is half, a function that is not on the whitelist reads it "
                    "in float32, and keep_float32=False dropped those values. Leave keep_float32=False out, or exclude "
                    "the module: amp.convert_model(model, excluded=[...])."
                )
            with torch.inference_mode(False), torch.no_grad():
                parameter.data = weight.values(parameter, self.half_dtype)
            _wait_for(parameter)
            weight.kept, weight.state = None, State.FLOAT32

    # State dicts

    def after_state_dict(self, own: Own, module: nn.Module, saved: dict[str, Any], prefix: str, _: object) -> None:
        """Replaces a module's half weights in a state dict by their float32 values; a post-hook."""
        for name, weight in own:
            parameter = module._parameters.get(name)
            if weight.state is State.HALF and parameter is not None and prefix + name in saved:
                with torch.no_grad():
                    saved[prefix + name] = weight.values(parameter, self.half_dtype).detach()

    # Forward passes

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a forward with casts on."""
        if is_dynamo_compiling() and getattr(torch.backends.mha, FASTPATH):
            # In eager code attention sees the mode, and avoids its fast path (see `autocast_checks`). Dynamo hides the
            # mode from it, so the fast path is disabled here. Neither this nor the undo is in the compiled program.
            setattr(torch.backends.mha, FASTPATH, False)
            try:
                return self.run(forward, args, kwargs)
            finally:
                setattr(torch.backends.mha, FASTPATH, True)
        before = thread.mode
        if before is not None and before.weights is self:
            return forward(*args, **kwargs)
        is_traced = not is_dynamo_compiling() and _is_traced()
        if is_traced:
            self.index()
        mode = thread.mode = CastingMode(self.rules, self, is_traced)
        if before is not None:
            before.off += 1
        try:
            with mode, _session_off():
                result = forward(*args, **kwargs)
        finally:
            thread.mode = before
            if before is not None:
                before.off -= 1
            if is_traced:
                self._by_id = {}  # `find` looks them up again: the tracer puts the original parameters back
        if not is_traced and not is_dynamo_compiling():
            _check_complete(result)
            self.narrow_weights()
        return result

    def run_excluded(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Calls a forward with casts off and floating arguments in float32."""
        mode = thread.mode
        if mode is not None and mode.weights is self and mode.off:
            return forward(*args, **kwargs)

        def without_casts(*args: Any, **kwargs: Any) -> Any:
            if mode is None or mode.weights is not self:
                with _session_off():
                    return forward(*args, **kwargs)
            mode.off += 1
            try:
                return forward(*args, **kwargs)
            finally:
                mode.off -= 1

        given = with_versions(cast_floating, (args, kwargs), torch.float32)
        result = write_back.call(without_casts, (args, kwargs), given, module)
        _check_complete(result)
        return result


def before_load_state_dict(own: Own, module: nn.Module, loaded: dict[str, Any], prefix: str, *_: object) -> None:
    """Keeps float32 values from a state dict, as loading into half weights loses half of the bits; a pre-hook."""
    for name, weight in own:
        found, parameter = loaded.get(prefix + name), module._parameters.get(name)
        keeps = weight.state is State.HALF and weight.kept is not None
        if keeps and isinstance(found, Tensor) and parameter is not None and found.shape == parameter.shape:
            weight.kept = found.detach().to("cpu", torch.float32, copy=True)


def _session_off() -> AbstractContextManager[None]:
    live = runtime.live
    return nullcontext() if live is None else live.switch.disabled()


def _check_complete(result: object) -> None:
    """Raises `UsageError` if a forward returned a generator or coroutine, which would compute without casts."""
    if isinstance(result, (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)):
        raise UsageError(
            f"a forward of the converted model returned a {type(result).__name__}, which computes after the end of "
            "the forward: nothing in it would be cast. Return its results (a list, say), or use amp.initialize."
        )
