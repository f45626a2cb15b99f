"""Checks adopted models, and owns the hooks around their forward.

Hooks must be module-level functions without state, so that an adopted model can be deep-copied and pickled.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Container, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from ampatch.casting import write_back
from ampatch.casting.cast_errors import may_be_of_mixed_types, names_missing_kernel
from ampatch.casting.nested import cast_floating, with_versions
from ampatch.compilers import traced_within_others
from ampatch.errors import AmpError, OptionError, UsageError, in_every_layer, warn
from ampatch.half_types import HALF_TYPES, HALVES
from ampatch.ledger import PatchLedger
from ampatch.native import calls
from ampatch.patching import cast_labels, replaced_forward
from ampatch.torch_private.modules import HOOKS_AROUND_FORWARD, STATE_HOOKS
from ampatch.torch_private.operators import OpOverload

WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)


@dataclass(frozen=True, slots=True)
class Hooks:
    """The hooks that torch calls around forward passes, and when a model is saved or loaded.

    They are functions of a module, so that a model deep-copies and pickles with them, and look up the session when
    called.
    """

    before_forward: Callable[[nn.Module, Any], None]
    after_forward: Callable[[nn.Module, Any, Any], None]
    before_replicated_forward: Callable[[nn.Module, Any], None]
    after_replicated_forward: Callable[[nn.Module, Any, Any], None]
    after_state_dict: Callable[[nn.Module, Any, str, Any], None]
    before_load_state_dict: Callable[..., None]
    after_load_state_dict: Callable[[nn.Module, Any], None]


def check_module(model: object) -> nn.Module:
    """Returns ``model`` if it is a module.

    Raises:
        OptionError: it is not a module.
    """
    if isinstance(model, type) and issubclass(model, nn.Module):
        name = model.__name__
        raise OptionError(f"found the class {name} as a model; expected a torch.nn.Module. Type {name}(...).")
    if not isinstance(model, nn.Module):
        raise OptionError(f"found {type(model).__name__} as a model; expected a torch.nn.Module.")
    return model


def check_model(model: object) -> nn.Module:
    """Returns ``model`` if amp can adopt it.

    Raises:
        OptionError: it is not a module, was compiled by TorchScript, or is already wrapped in DistributedDataParallel
            or DataParallel.
    """
    model = check_module(model)
    if isinstance(model, torch.jit.ScriptModule):
        raise OptionError(
            "the model was compiled by TorchScript, so nothing in it can be cast. Hand in the module that it was "
            "made from."
        )
    if isinstance(model, WRAPPERS):
        kind = type(model).__name__
        raise OptionError(
            f"the model is wrapped in {kind} already. Call amp.initialize on the bare model first, then wrap what "
            f"it returns: model, optimizer = amp.initialize(model, optimizer); model = {kind}(model)."
        )
    return model


def warn_of_graphs(model: nn.Module) -> None:
    """Warns of parts of a model that are graphs of operators, in which no patched function is called."""
    scripted = scripted_parts(model)
    if scripted:
        warn(
            f"TorchScript has compiled {', '.join(scripted)}: amp casts nothing in there. torch's autocast "
            "does, in the model's forward, by lists of its own. Use the Python code that it was made of."
        )
    exported = exported_parts(model)
    if exported:
        warn(
            f"torch.export has made {', '.join(exported)}; the graphs call operators below torch's functions: "
            "only torch's autocast casts in there, by lists of its own. Hand the module that was exported to "
            "amp.initialize, and export it afterwards, which records the casts."
        )


def scripted_parts(model: nn.Module) -> list[str]:
    """Returns the names of TorchScript-compiled submodules, and of compiled functions that modules hold or call."""
    parts: dict[int, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            if not any(name.startswith(f"{part}.") for part in parts.values()):
                parts[id(module)] = name
            continue
        held = {f"{name}.{key}" if name else key: value for key, value in vars(module).items()}
        for function in _own_functions(type(module)):
            for key in function.__code__.co_names:
                held[f"{function.__module__}.{key}"] = function.__globals__.get(key)
        for key, value in held.items():
            if isinstance(value, torch.jit.ScriptFunction):
                parts.setdefault(id(value), key)
    return list(parts.values())


def exported_parts(model: nn.Module) -> list[str]:
    """Returns the names of submodules that are graphs of torch's operators, as ``torch.export`` makes them."""
    return [
        name or type(module).__name__
        for name, module in model.named_modules()
        if isinstance(module, fx.GraphModule)
        and any(node.op == "call_function" and isinstance(node.target, OpOverload) for node in module.graph.nodes)
    ]


def _own_functions(kind: type) -> Iterator[types.FunctionType]:
    """Yields the methods of a class and of its base classes, except torch's classes."""
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] != "torch":
            yield from (value for value in vars(base).values() if isinstance(value, types.FunctionType))


def device_type(model: nn.Module) -> str | None:
    """Returns the device type of the model's first parameter ("cpu", "cuda"); None without parameters."""
    # torch.compile knows `parameters()`. In eager code that is too slow: its setup takes longer than the walk itself.
    if torch.compiler.is_compiling():
        parameter = next(model.parameters(), None)
    else:
        compiled = calls.compiled()
        parameter = _first_parameter(model) if compiled is None else compiled.first_parameter(model)
    return None if parameter is None else parameter.device.type


def _first_parameter(module: nn.Module) -> nn.Parameter | None:
    for parameter in module._parameters.values():
        if parameter is not None:
            return parameter
    for child in module._modules.values():
        found = None if child is None else _first_parameter(child)
        if found is not None:
            return found
    return None


def device_types_of(models: Iterable[nn.Module]) -> set[str]:
    """Returns the device types of the models' parameters; if they have none, those of `all_device_types`."""
    return set().union(*map(device_types, models)) or all_device_types()


def all_device_types() -> set[str]:
    """Returns the device types of this machine whose tensors amp casts if no model says which."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return {"cpu"} if accelerator is None else {"cpu", accelerator.type}


def device_types(model: nn.Module) -> set[str]:
    """Returns the device types of the model's parameters, except "meta": those have no values yet."""
    return {parameter.device.type for parameter in model.parameters()} - {"meta"}


def warn_of_slow_half(model: nn.Module, half: torch.dtype) -> None:
    """Warns if the model is on a GPU that is no faster in a half type than in float32.

    Only NVIDIA's GPUs are checked.

    Args:
        model: module whose parameters' devices are checked.
        half: half type that the model is to compute in.

    Warns:
        AmpWarning: names the first such GPU, and no others.
    """
    if torch.version.hip is not None:
        return
    for device in _gpus(model):
        capability = torch.cuda.get_device_capability(device)
        if capability < HALF_TYPES[half].tensor_cores:
            faster = [row.dtype for row in HALF_TYPES.values() if capability >= row.tensor_cores]
            other = f"; or half_dtype={faster[0]}" if faster else ""
            warn(
                f"{torch.cuda.get_device_name(device)} has compute capability {'.'.join(map(str, capability))}, and no "
                f"tensor cores for {half}: training saves memory, but is not faster than in float32, or slower. Type "
                f"opt_level='O0' for float32{other}."
            )
            return


def _gpus(model: nn.Module) -> list[torch.device]:
    """Returns the CUDA devices that a model's parameters are on, each once."""
    devices = dict.fromkeys(parameter.device for parameter in model.parameters())
    return [device for device in devices if device.type == "cuda"]


def check_device(model: nn.Module, known: Set[str]) -> None:
    """Raises if the model was moved to a device type that amp was not set up for, where nothing would be cast.

    Raises:
        UsageError: the model's first parameter is on a device type that is not in ``known``, nor "meta".
    """
    found = device_type(model)
    if found is not None and found not in known and found != "meta":
        raise UsageError(
            f"the model is on {found!r}, but was on {' and '.join(map(repr, sorted(known)))} at amp.initialize, so "
            f"nothing would be cast. Move it first (model.to({found!r})), then call amp.initialize."
        )


def hook_forward(
    model: nn.Module,
    ledger: PatchLedger,
    before: Callable[[nn.Module, Any], None],
    after: Callable[[nn.Module, Any, Any], None],
) -> None:
    """Registers hooks that run before and after every forward of the model; ``after`` also if the forward raises."""
    ledger.on_undo(model.register_forward_pre_hook(before).remove, model)
    ledger.on_undo(model.register_forward_hook(after, always_call=True).remove, model)


def note_types(
    model: nn.Module, error: BaseException | None, half: torch.dtype, kept: Sequence[str | type] = ()
) -> None:
    """Adds a note, which says what to write, to an error about types that a half model's forward raised.

    Args:
        model: model whose forward has ended.
        error: exception that the forward raised; None if it returned. amp's own errors, and errors with notes, get no
            note.
        half: half type of the model's weights.
        kept: names or classes of the parts that already stay float32.
    """
    if not isinstance(error, RuntimeError) or isinstance(error, AmpError) or getattr(error, "__notes__", None):
        return
    lacks_kernel = names_missing_kernel(error, half)
    if not lacks_kernel and not may_be_of_mixed_types(error, half):
        return
    names = {id(module): name for name, module in model.named_modules() if name}
    at, trace = None, error.__traceback__
    while trace is not None:
        at, trace = names.get(id(trace.tb_frame.f_locals.get("self")), at), trace.tb_next
    so_far = [each if isinstance(each, str) else each.__name__ for each in kept]
    # A submodule in float32 returns half again, so keeping one does not help the code of the model itself.
    kept_part = f"keep_fp32={[*so_far, in_every_layer(at)]}) to keep a part in float32" if at else ""
    made = f"ampatch: amp.initialize has made this {type(model).__name__}'s weights {half}"
    if lacks_kernel:
        kept_part = f"Type amp.initialize(..., {kept_part}. Or type" if at else "Type amp.initialize(...) with"
        error.add_note(
            f"{made}, and torch has no kernel for these arguments in that type. {kept_part} patch_torch_functions=True "
            "if the function is in the blacklist (ampatch explain NAME), or mark it needs_float32 in a file for "
            "cast_lists=."
        )
        return
    if at:
        cure = f"{kept_part}. If the model mixes types in several places, type patch_torch_functions=True, or "
    else:
        cure = "patch_torch_functions=True), or "
    error.add_note(
        f"{made}. In its forward, amp casts what meets a half tensor in torch's functions that demand one type: "
        "products, convolutions, attention, recurrent layers, normalisations. It does not in torch's operators "
        "(torch.ops), in extensions, or in functions that it does not know. Cast there by hand: x.to(weight.dtype). Or "
        f"type amp.initialize(..., {cure}opt_level='O1', which leaves weights float32."
    )


def hook_casts(
    model: nn.Module,
    ledger: PatchLedger,
    inputs: torch.dtype | None,
    outputs: torch.dtype,
    *,
    widens_copies: bool = False,
    labelled: bool = False,
) -> None:
    """Registers hooks that cast the floating-point arguments and results of every forward of the model.

    Tensors that the forward leaves in the caller's containers are cast like the result. A copy of the model casts by
    itself, because the hooks hold only their types.

    Args:
        model: the model, or a submodule kept in float32.
        ledger: records the hooks.
        inputs: type that arguments are cast to; None to leave them.
        outputs: type that the result is cast to.
        widens_copies: True if deep copies of the model are float32. In a copy, submodules that give a half result leave
            it uncast.
        labelled: True to label the casts in ``torch.profiler``.
    """
    before: Any = _Arguments()
    if inputs is not None:
        cast = functools.partial(cast_labels.under_label, "arguments", _cast_arguments) if labelled else _cast_arguments
        before = functools.partial(cast, inputs)
    if inputs in HALVES:
        before.__deepcopy__ = functools.partial(_hook_of_copy, _cast_arguments_of_copy)
    ledger.on_undo(model.register_forward_pre_hook(before, with_kwargs=True).remove, model)
    cast_result = functools.partial(cast_labels.under_label, "result", _cast_result) if labelled else _cast_result
    after: Any = functools.partial(cast_result, outputs)
    if widens_copies and inputs is torch.float32:
        after.__deepcopy__ = functools.partial(_hook_of_copy, _leave_result)
    ledger.on_undo(model.register_forward_hook(after, always_call=True).remove, model)


def hook_state_dict(modules: Iterable[nn.Module], ledger: PatchLedger, hooks: Hooks) -> None:
    """Registers the three hooks on each module, because submodules can be saved and loaded on their own."""
    for module in modules:
        ledger.on_undo(module.register_state_dict_post_hook(hooks.after_state_dict).remove, module)
        ledger.on_undo(module.register_load_state_dict_pre_hook(hooks.before_load_state_dict).remove, module)
        ledger.on_undo(module.register_load_state_dict_post_hook(hooks.after_load_state_dict).remove, module)


def _is_of_amp(hook: Any) -> bool:
    hook = getattr(hook, "hook", hook)  # torch wraps hooks that run before load_state_dict
    function = hook.func if isinstance(hook, functools.partial) else hook
    return str(getattr(function, "__module__", "")).partition(".")[0] == "ampatch"


def without_hooks(copied: nn.Module) -> nn.Module:
    """Removes amp's hooks from a deep copy (`hook_forward`, `hook_casts`, `hook_state_dict`), and returns the copy."""
    for module in copied.modules():
        for table in (*HOOKS_AROUND_FORWARD, *STATE_HOOKS):
            _remove(getattr(module, table), _is_of_amp)
        replaced_forward.restore(module)
    return copied


@contextlib.contextmanager
def without_own_hooks(modules: Iterable[nn.Module], is_own: Callable[[Any], bool] = _is_of_amp) -> Iterator[None]:
    """Takes amp's hooks around the forward off modules while the block runs.

    Args:
        modules: the modules.
        is_own: returns True for the hooks to take off.
    """
    stores = [getattr(module, table) for module in modules for table in HOOKS_AROUND_FORWARD]
    before = [dict(hooks) for hooks in stores]
    try:
        for hooks in stores:
            _remove(hooks, is_own)
        yield
    finally:
        for hooks, known in zip(stores, before, strict=True):  # under the same keys, by which the ledger removes them
            hooks.clear()
            hooks.update(known)


@contextlib.contextmanager
def as_without_amp(hooks: Container[object], model: nn.Module) -> Iterator[None]:
    """Gives a model its own forwards, and takes off these hooks around them, while the block runs."""
    with without_own_hooks(model.modules(), hooks.__contains__), replaced_forward.own_forwards(model):
        yield


def _remove(hooks: dict[int, Any], is_own: Callable[[Any], bool]) -> None:
    for key in [key for key, hook in hooks.items() if is_own(hook)]:
        del hooks[key]


@traced_within_others
def _cast_arguments(
    dtype: torch.dtype, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any]:
    given: Any = with_versions(cast_floating, (args, kwargs), dtype)
    write_back.begin(module, (args, kwargs), given)
    return given  # type: ignore[no-any-return]


class _Arguments:
    """The hook before a forward that gets its arguments as they are; copies of the model have another one."""

    @traced_within_others
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        write_back.begin(module, (args, kwargs), (args, kwargs))

    def __reduce__(self) -> Any:
        return _hook_of_copy, (_cast_arguments_of_copy,)


@traced_within_others
def _cast_arguments_of_copy(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Casts to float32 in a float32 copy; to half in a half copy, unless a session casts what meets its weights."""
    parameter = next(module.parameters(), None)
    switch = getattr(module.forward, "switch", None)
    if parameter is None or (parameter.dtype in HALVES and switch is not None and switch.active):
        write_back.begin(module, (args, kwargs), (args, kwargs))
        return args, kwargs
    return _cast_arguments(parameter.dtype, module, args, kwargs)


def _hook_of_copy(hook: Callable[..., Any], *_: object) -> Callable[..., Any]:
    return hook


@traced_within_others
def _leave_result(module: nn.Module, _: tuple[Any, ...], result: Any) -> Any:
    return write_back.end(module, None, result)


@traced_within_others
def _cast_result(dtype: torch.dtype, module: nn.Module, _: tuple[Any, ...], result: Any) -> Any:
    return write_back.end(module, dtype, result)
