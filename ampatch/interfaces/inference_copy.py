"""Makes a copy of a model for inference: its weights are half if all functions read them in half, and the lists cast.

Owns the copy's weights: which are half, their float32 values, and the values in state dicts. Must never change the
model that it copies, nor torch. A `CastingMode` casts, only while a forward pass of the copy runs.

A weight is *half* if only whitelisted functions read it, as these would cast it every time. For torch's own layers
this is known beforehand; for other modules the first forward pass shows it. A weight that other functions also read
stays float32, or becomes float32 again when such a function reads it. So results equal those of O1, bit for bit.
"""

from __future__ import annotations

import copy
import functools
import sys
import threading
import types
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.nn import Parameter
from torch.nn.parameter import is_lazy

from ampatch.cast_lists import spellings
from ampatch.cast_lists.lists import CastLists
from ampatch.cast_lists.paths import Path, find, find_or
from ampatch.cast_lists.rules import FLOAT32, Rule
from ampatch.casting import cast_observers, write_back
from ampatch.casting.cast_store import Store
from ampatch.casting.nested import cast_floating
from ampatch.distributed import is_sharded
from ampatch.errors import OptionError, UsageError, did_you_mean, warn
from ampatch.function_wrapper import unwrapped
from ampatch.grouping import grouped
from ampatch.patching import adopted_model, autocast_checks, recurrent_weights
from ampatch.patching.adapters import Function
from ampatch.patching.casting_mode import CastingMode, CastRules, thread
from ampatch.runtime import runtime
from ampatch.torch_private.compilers import DYNAMO
from ampatch.torch_private.modes import get_tracing_state, peek_interpreter_stack
from ampatch.torch_private.modules import CALL, FASTPATH
from ampatch.torch_private.operators import VF
from ampatch.tracing import is_capturing, is_under_mode
from ampatch.weights import conversion_plan
from ampatch.weights.ruled_parts import check_entries, ruled_parts

# torch's own layers, and the only functions that read their weights.
_LAYERS: dict[type[nn.Module], tuple[Function, ...]] = {
    nn.Linear: (F.linear,),
    nn.Bilinear: (F.bilinear,),
    nn.Conv1d: (F.conv1d,),
    nn.Conv2d: (F.conv2d,),
    nn.Conv3d: (F.conv3d,),
    nn.ConvTranspose1d: (F.conv_transpose1d,),
    nn.ConvTranspose2d: (F.conv_transpose2d,),
    nn.ConvTranspose3d: (F.conv_transpose3d,),
    nn.PReLU: (F.prelu,),
    nn.MultiheadAttention: (F.multi_head_attention_forward,),
    nn.RNN: (VF.rnn_tanh, VF.rnn_relu),
    nn.LSTM: (VF.lstm,),
    nn.GRU: (VF.gru,),
    nn.RNNCell: (VF.rnn_tanh_cell, VF.rnn_relu_cell),
    nn.LSTMCell: (VF.lstm_cell,),
    nn.GRUCell: (VF.gru_cell,),
}


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


class _State(Enum):
    """Which functions have read a weight so far."""

    UNREAD = auto()
    IN_HALF = auto()  # read in half in this forward pass; becomes half at its end
    HALF = auto()
    FLOAT32 = auto()


@dataclass(eq=False, slots=True)
class _Weight:
    """A weight of the copy that was float32 in the model.

    Attributes:
        places: modules that hold the weight, each with the weight's name in it.
        name: name as in `nn.Module.named_parameters`.
        state: kind of functions that have read the weight.
        kept: float32 values of a half weight, in CPU memory; None if they were dropped, or the weight is not half.
    """

    places: list[tuple[nn.Module, str]]
    name: str
    state: _State
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
_Own = list[tuple[str, _Weight]]


class _Copy:
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
        self.weights: list[_Weight] = []
        self._begin()

    def _begin(self) -> None:
        self._by_id: dict[int, tuple[weakref.ref[Tensor], _Weight]] = {}
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

    def find(self, parameter: Tensor) -> _Weight | None:
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
        if weight is not None and weight.state is _State.UNREAD:
            weight.state, self._is_settled = _State.IN_HALF, False
        kept = self._casts.find(tensor, dtype)
        if kept is not None:
            cast_observers.hit([kept])
            return kept
        with torch.inference_mode(False):
            cast = cast_observers.cast(tensor, lambda: tensor.to(dtype))
        may_be_kept = cast.grad_fn is None and tensor.layout is torch.strided and not tensor.is_inference()
        if may_be_kept and peek_interpreter_stack() is None:
            # The cast requires grad if its weight does: torch's linear copies a weight that does not require grad for
            # each row of a batch.
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
        if known is None or known.state is _State.FLOAT32:
            return weight
        if known.state is _State.HALF:
            if _is_traced():
                raise UsageError(f"{_TRACED_TOO_EARLY} The weight is {known.name!r}.")
            self._restore(known, weight)
        elif not _is_traced():
            known.state = _State.FLOAT32
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
                parameter = weight.parameter() if weight.state is _State.IN_HALF else None
                if parameter is not None:
                    self._make_half(weight, parameter)

    def _make_half(self, weight: _Weight, parameter: Tensor) -> None:
        with torch.inference_mode(False), torch.no_grad():
            if self.keep_float32:
                weight.kept = parameter.detach().to("cpu", copy=True)
            half = self._casts.find(parameter, self.half_dtype)
            parameter.data = parameter.detach().to(self.half_dtype) if half is None else half.detach()
        _wait_for(parameter)
        weight.state = _State.HALF
        self._casts.forget([id(parameter)])

    def _restore(self, weight: _Weight, parameter: Tensor) -> None:
        with self._lock:
            if weight.state is not _State.HALF:
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
            weight.kept, weight.state = None, _State.FLOAT32

    # State dicts

    def after_state_dict(self, own: _Own, module: nn.Module, saved: dict[str, Any], prefix: str, _: object) -> None:
        """Replaces a module's half weights in a state dict by their float32 values; a post-hook."""
        for name, weight in own:
            parameter = module._parameters.get(name)
            if weight.state is _State.HALF and parameter is not None and prefix + name in saved:
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

        given = cast_floating((args, kwargs), torch.float32)
        result = write_back.call(without_casts, (args, kwargs), given, module)
        _check_complete(result)
        return result


def _before_load_state_dict(own: _Own, module: nn.Module, loaded: dict[str, Any], prefix: str, *_: object) -> None:
    """Keeps float32 values from a state dict, as loading into half weights loses half of the bits; a pre-hook."""
    for name, weight in own:
        found, parameter = loaded.get(prefix + name), module._parameters.get(name)
        keeps = weight.state is _State.HALF and weight.kept is not None
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


class _WrappedMethod:
    """Replaces a method of a module of the copy by which users call the module; runs it by way of `_Copy`."""

    def __init__(self, made: _Copy, module: nn.Module, method: Callable[..., Any], excluded: bool) -> None:
        functools.update_wrapper(self, method)
        self._copy, self._module, self._method, self._excluded = made, module, method, excluded

    @property
    def __code__(self) -> Any:  # torch.export reads the model's place in the source from it
        return self._method.__code__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._excluded:
            return self._copy.run_excluded(self._module, self._method, args, kwargs)
        return self._copy.run(self._method, args, kwargs)


def convert(
    model: object, half_dtype: torch.dtype, excluded: object, lists: CastLists, keep_float32: bool
) -> nn.Module:
    """Returns the copy; see `amp.convert_model`."""
    source = _check(model)
    excluded_paths, functions = _split_excluded(source, excluded, lists)
    if functions:
        lists = lists.overlaid([{"blacklist": {path.namespace: [path.name]}} for path in functions])
    rules = CastRules(half_dtype, lists.for_half(half_dtype).values(), _registered())
    _warn_uncast(source, excluded_paths, rules)
    live = runtime.live
    conversion = None if live is None else live.weights.conversion
    if conversion is not None and any(
        conversion.has_master(each) or conversion.kept_float32_values(each) is not None for each in source.parameters()
    ):
        source = copy.deepcopy(source)  # a deep copy of a converted model is float32
    with torch.inference_mode(False), torch.no_grad():  # otherwise its weights would work only in inference mode
        copied = _Copy(rules, keep_float32)
        made = _copied(source, excluded_paths, copied)
    owned = grouped((module, (name, weight)) for weight in copied.weights for module, name in weight.places)
    for path, module in made.named_modules():
        for name in _methods_to_wrap(module, path in excluded_paths):
            module.__dict__[name] = _WrappedMethod(copied, module, getattr(module, name), path in excluded_paths)
        if isinstance(module, nn.RNNBase):
            module.__dict__["check_input"] = functools.partial(_check_input, module)
        if module in owned:
            after = functools.partial(_Copy.after_state_dict, copied, owned[module])
            module.register_state_dict_post_hook(after)
            module.register_load_state_dict_pre_hook(functools.partial(_before_load_state_dict, owned[module]))
    return made.eval()


def check_no_copy(module: nn.Module) -> None:
    """Raises `OptionError` if a module is, or contains, a copy that `convert` has made."""
    if any(isinstance(each.__dict__.get("forward"), _WrappedMethod) for each in module.modules()):
        raise OptionError(
            f"this {type(module).__name__} is, or contains, what amp.convert_model has made for inference. Pass the "
            "model that it was made from."
        )


def _copied(source: nn.Module, excluded_paths: Collection[str], copied: _Copy) -> nn.Module:
    """Returns a deep copy, whose weights ``copied`` gets; those that torch's layers read in half are half."""
    holders: dict[int, list[tuple[str, str]]] = {}
    modules = dict(source.named_modules())
    for path, module in modules.items():
        scripted = isinstance(module, torch.jit.ScriptModule)  # the casting mode cannot see its calls
        for name, parameter in () if scripted else module._parameters.items():
            if type(parameter) is Parameter and parameter.dtype is torch.float32:
                holders.setdefault(id(parameter), []).append((path, name))
    copied.are_of_the_model = any(each.dtype is copied.half_dtype for each in source.parameters())
    memo: dict[int, Any] = {}
    planned = []
    for key, places in holders.items():
        parameter = modules[places[0][0]].get_parameter(places[0][1])
        values = parameter.detach()
        state, kept = _State.UNREAD, None
        if any(path in excluded_paths for path, _ in places):
            state = _State.FLOAT32
        elif all(_reads_in_half(modules[path], copied.rules) for path, _ in places):
            state = _State.HALF
            memo[key] = Parameter(values.to(copied.half_dtype), requires_grad=parameter.requires_grad)
            kept = values.to("cpu", copy=True) if copied.keep_float32 else None
        planned.append((places, state, kept))
    made = adopted_model.without_hooks(copy.deepcopy(source, memo))
    recurrent_weights.flatten(made)
    copies = dict(made.named_modules())
    for places, state, kept in planned:
        name = ".".join(filter(None, places[0]))
        copied.weights.append(_Weight([(copies[path], each) for path, each in places], name, state, kept))
    return made


def _reads_in_half(module: nn.Module, rules: CastRules) -> bool:
    """Returns True if a module has the forward of a torch layer that passes its weights to whitelisted functions only.

    Of a subclass, other code may read a weight in float32; then `_Copy.full` makes it float32 again.
    """
    for kind, functions in _LAYERS.items():
        if isinstance(module, kind):
            return type(module).forward is kind.forward and all(map(rules.computes_in_half, functions))
    return False


def _check_input(module: nn.RNNBase, input: Tensor, batch_sizes: Tensor | None) -> None:
    """Checks the input as if it had the weights' type: the lists cast it later, as `autocast_checks` lets a session do.

    Replaces `nn.RNNBase.check_input`.
    """
    type(module).check_input(module, autocast_checks.of_the_weights_type(module, input), batch_sizes)


def _methods_to_wrap(module: nn.Module, is_excluded: bool) -> tuple[str, ...]:
    """Returns the methods to replace: ``forward``, and ``_call_impl``, which runs hooks and the forward."""
    if isinstance(module, torch.jit.ScriptModule):
        return (CALL,) if is_excluded else ()
    has_forward = "forward" in vars(module) or type(module).forward is not nn.Module.forward
    return ("forward", CALL) if has_forward else ()


def _check(model: object) -> nn.Module:
    module = adopted_model.check_module(model)
    kind = type(module).__name__
    if isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        raise OptionError(f"found a {kind} around a model. Type amp.convert_model(model.module).")
    dynamo = sys.modules.get(DYNAMO)  # which takes a second to import
    if dynamo is not None and isinstance(module, dynamo.OptimizedModule):
        raise OptionError(
            "found a compiled model. Convert the original model, and compile the copy: "
            "torch.compile(amp.convert_model(model))."
        )
    adopted_model.check_model(module)
    check_no_copy(module)
    tensors = [*module.named_parameters(), *module.named_buffers()]
    for name, tensor in tensors:
        if is_lazy(tensor):
            raise OptionError(
                f"{name!r} has no shape yet. Call the model once, which gives lazy modules theirs, and convert it then."
            )
        if tensor.is_meta:
            raise OptionError(
                f"{name!r} is on the meta device, where it has no values. Load them first: model.to_empty(device=...), "
                "or load_state_dict(..., assign=True)."
            )
    for path, each in module.named_modules():
        for name, held in vars(each).items():
            if isinstance(held, Tensor) and not held.is_leaf:
                computed = f"{path}.{name}".removeprefix(".")
                raise OptionError(
                    f"{computed!r} was computed from weights with gradients, and torch makes no copies of such a "
                    "tensor. If weight_norm, spectral_norm or pruning of torch.nn.utils has put it there, call the "
                    "model once under torch.no_grad(), or type torch.nn.utils.remove_weight_norm(module) or "
                    "torch.nn.utils.prune.remove(module, name)."
                )
    if is_sharded(tensor for _, tensor in tensors):
        raise OptionError(
            "the model's parameters are sharded over ranks, so they cannot be copied. Gather its state dict "
            "(torch.distributed.checkpoint.state_dict.get_model_state_dict with full_state_dict=True), load that into "
            "an unsharded model, and convert that one."
        )
    return module


def _split_excluded(model: nn.Module, excluded: object, lists: CastLists) -> tuple[set[str], list[Path]]:
    """Returns the paths of the excluded modules with all their submodules, and of the excluded functions.

    Parts that ``modules`` in the lists has compute in float32 are excluded, too.

    Raises:
        CastListError: an entry of the lists matches no submodule.
        OptionError: an entry of the lists has rules of its own; or what is excluded is neither a submodule of the model
            nor a function of torch.
    """
    own = next((entry for entry in lists.modules if not entry.is_float32), None)
    if own is not None:
        raise OptionError(
            f"{own.source}: modules has rules for {own.name!r}, and a copy for inference applies the same lists "
            f"everywhere. Give it {FLOAT32}, or leave it out."
        )
    emulated = next((rule for rule in lists.told().values() if rule.formats is not None), None)
    if emulated is not None:
        raise OptionError(
            f"{emulated.source}: {emulated.path} computes in {emulated.formats}, and a copy for inference emulates no "
            "formats. Leave the format out, or call the model under amp.initialize in a block of torch.no_grad()."
        )
    check_entries([model], lists.modules)
    given = list(excluded) if isinstance(excluded, (list, tuple, set, frozenset, Iterator)) else [excluded]
    modules = [(path, module) for path, module in model.named_modules() if path]
    excluded_paths: set[str] = set()
    functions: list[Path] = []
    for each in [*given, *ruled_parts(model, lists.modules)]:
        found = {path for path, module in modules if _matches(each, path, module)}
        if found:
            excluded_paths |= {path for path, _ in modules for above in found if f"{path}.".startswith(f"{above}.")}
        else:
            functions.append(_path_of_function(each, model, modules))
    return excluded_paths, functions


def _matches(excluded: object, path: str, module: nn.Module) -> bool:
    if isinstance(excluded, str) or (isinstance(excluded, type) and issubclass(excluded, nn.Module)):
        return conversion_plan.matches(excluded, path, module)
    return excluded is module


def _path_of_function(excluded: object, model: nn.Module, modules: Sequence[tuple[str, nn.Module]]) -> Path:
    """Returns the path of a function in torch; it covers every spelling if ``excluded`` names no namespace.

    Raises:
        OptionError: ``excluded`` is no function of torch.
    """
    if _matches(excluded, "", model):
        raise OptionError("excluded has the model itself, so nothing would be left to cast. Name parts of it.")
    if isinstance(excluded, str):
        namespace, _, name = excluded.rpartition(".")
        if not namespace and spellings.spellings(name):
            return Path(spellings.EVERY_NAMESPACE, name)
        if namespace.partition(".")[0] == "torch" and callable(find_or(Path(namespace, name))):
            return Path(namespace, name)
        said = f"excluded has {excluded!r}, which is neither a submodule of the model nor a function of torch."
        if excluded in dict(model.named_parameters(remove_duplicate=False)):
            raise OptionError(f"{said} It is a parameter: name the module that holds it, or its class.")
        names = [*(path for path, _ in modules), *(type(module).__name__ for _, module in modules)]
        meant = name if namespace.partition(".")[0] == "torch" else excluded
        raise OptionError(f"{said}{did_you_mean(meant, [*dict.fromkeys(names), *spellings.known_names()])}")
    name = getattr(excluded, "__name__", "")
    known = spellings.spellings(name)
    if known and any(find(path) is unwrapped(excluded) for path in known):
        return Path(spellings.EVERY_NAMESPACE, name)
    if isinstance(excluded, nn.Module):
        shown = f"a {type(excluded).__name__} that is not in the model"
    elif isinstance(excluded, type):
        shown = f"{excluded.__name__}, which no module of the model is"
    else:
        shown = repr(excluded) if callable(excluded) else type(excluded).__name__
    raise OptionError(
        f"excluded has {shown}; expected submodules of the model, their names, patterns ('*.norm') or classes "
        "(torch.nn.LayerNorm), or functions of torch (torch.softmax, 'softmax'), one of them or a list."
    )


def _registered() -> Iterator[tuple[Rule, torch.dtype | None]]:
    """Yields a rule for each function that the user registered, with the half type given for it, or None."""
    for registration in runtime.registered:
        owner: Any = registration.owner
        of_class = isinstance(owner, type)
        namespace = f"{owner.__module__}.{owner.__qualname__}" if of_class else owner.__name__
        yield Rule(Path(namespace, registration.name), registration.treatment, "registered"), registration.dtype


def _warn_uncast(model: nn.Module, excluded_paths: Collection[str], rules: CastRules) -> None:
    if rules.outside_torch:
        names = ", ".join(str(rule.path) for rule in rules.outside_torch[:5])
        warn(
            f"the copy does not cast for {names}: only functions of torch report their calls. Decorate a function of "
            "your own (@amp.half_function, @amp.float_function); for functions of other libraries use amp.initialize."
        )
    for rule, name in rules.reported_as_other[:5]:
        warn(
            f"the copy does not cast for {rule.path} as {rule.source} says: torch reports its calls as those of "
            f"{name!r}. List torch.Tensor.{name}, too."
        )
    scripted = [name for name in adopted_model.scripted_parts(model) if name not in excluded_paths]
    exported = [name for name in adopted_model.exported_parts(model) if name not in excluded_paths]
    if scripted or exported:
        warn(
            f"nothing is cast in {', '.join(scripted + exported)}, which TorchScript or torch.export has compiled: it "
            "computes in the types of its inputs. Use the Python code that it was compiled from; or name it, or the "
            "module that calls it, in excluded=, so that it gets float32."
        )
