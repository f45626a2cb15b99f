"""Plans the conversion of a model's weights: the type that each tensor gets, and the modules that stay float32.

Owns the checks for tensors that cannot be converted. Must never change a model.
"""

from __future__ import annotations

import fnmatch
import sys
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ampatch.cast_lists.paths import Path, find_or
from ampatch.cast_lists.spellings import NAMESPACES, spellings
from ampatch.casting.nested import CASTABLE
from ampatch.errors import OptionError, did_you_mean
from ampatch.half_types import HALVES
from ampatch.torch_private.modules import InstanceNorm, NormBase
from ampatch.weights.untracked_writes import data_of

KeepFloat32 = tuple[str | type[nn.Module], ...]


def keeps_statistics(module: nn.Module) -> bool:
    """Returns True if a module normalises by running statistics: batch norm (also synchronised) or instance norm.

    These modules accept half input with float32 weights natively, on the CPU and on CUDA.
    """
    return isinstance(module, NormBase) and (not isinstance(module, InstanceNorm) or module.track_running_stats)


def check_keep_fp32(given: object, argument: str = "keep_fp32") -> KeepFloat32:
    """Returns names, patterns and classes as a tuple; a single one becomes a tuple of one.

    Args:
        given: the value of the argument.
        argument: its name, for the message.

    Raises:
        OptionError: it has anything else.
    """
    if given is None:
        return ()
    wanted = tuple(given) if isinstance(given, (list, tuple, set, frozenset)) else (given,)
    for one in wanted:
        if not (isinstance(one, str) or (isinstance(one, type) and issubclass(one, nn.Module))):
            if isinstance(one, nn.Module):  # whose repr has a line for each submodule
                shown, hint = f"a {type(one).__name__}", f" Type its name, or {type(one).__name__!r} for all of them."
            elif callable(one) and not isinstance(one, type) and hasattr(one, "__name__"):
                shown, hint = f"the function {one.__name__}", _for_function(one.__name__)
            else:
                shown, hint = repr(one), ""
            raise OptionError(
                f"{argument} has {shown}; expected names of submodules ('encoder.norm'), patterns ('*.norm') or "
                f"classes (torch.nn.LayerNorm, or 'LayerNorm'), one or a list of them.{hint}"
            )
    return wanted


def check_matches(models: Iterable[nn.Module], kept: KeepFloat32, argument: str = "keep_fp32") -> None:
    """Raises `OptionError`, with the nearest names, if an entry of an argument matches no submodule."""
    submodules = [(name, module) for model in models for name, module in model.named_modules() if name]
    for wanted in kept:
        if not any(matches(wanted, name, module) for name, module in submodules):
            shown = repr(wanted) if isinstance(wanted, str) else wanted.__name__
            hint = near_names(shown.strip("'"), submodules)
            raise OptionError(f"{argument} has {shown}, which matches no submodule of the model.{hint}")


def near_names(wanted: str, submodules: Sequence[tuple[str, nn.Module]]) -> str:
    """Returns the names of submodules and classes next to one that matches none, as a sentence with a space before."""
    owner, _, leaf = wanted.rpartition(".")
    if any(name == owner and isinstance(getattr(module, leaf, None), nn.Parameter) for name, module in submodules):
        return f" It is a parameter: name its submodule, {owner!r}."
    inner = [name for name, _ in submodules if name.endswith(f".{wanted}")][:3]  # as in a wrapper: "_orig_mod.head"
    if inner:
        return f" Did you mean {' or '.join(map(repr, inner))}?"
    full = f"torch.{wanted}"  # "nn.LayerNorm", as scripts type the class without quotes
    if any(_is_of_class(full, module) for _, module in submodules):
        return f" Type {full!r} or {leaf!r} for that class."
    names = [name for name, _ in submodules] + [type(module).__name__ for _, module in submodules]
    hint = did_you_mean(wanted, list(dict.fromkeys(names)))
    if hint:
        return hint
    some = [name for name, _ in submodules if "." not in name][:10]
    listed = f" Its submodules are {', '.join(map(repr, some))} and those in them." if some else " It has none."
    return f"{listed}{_for_function(leaf)}" if owner in ("", "F", *NAMESPACES) else listed


def _for_function(name: str) -> str:
    """Returns what to type if a function of torch is to compute in float32; empty if no function has the name."""
    if not spellings(name):
        return ""
    lists = {"blacklist": {"*": [name]}}
    return f" To compute torch's function {name} in float32, type cast_lists={lists} at O1 or O4."


#: The buffers that become half: all of them, or those with these names or patterns.
CastBuffers = bool | tuple[str, ...]


def check_cast_buffers(given: object) -> CastBuffers:
    """Returns a flag, or names and patterns as a tuple; a single one becomes a tuple of one, and none at all False.

    Raises:
        OptionError: it is anything else.
    """
    if isinstance(given, bool):
        return given
    wanted = tuple(given) if isinstance(given, (list, tuple, set, frozenset)) else (given,)
    for one in wanted:
        if not isinstance(one, str):
            raise OptionError(
                f"cast_buffers has {one!r}; expected True, False, or names of buffers ('rope.inv_freq') or patterns "
                "('*.inv_freq'), one or a list of them."
            )
    return wanted or False


def check_matches_buffers(models: Iterable[nn.Module], wanted: CastBuffers) -> None:
    """Raises `OptionError`, with the nearest names, if a name or pattern matches no floating-point buffer."""
    if isinstance(wanted, bool):
        return
    buffers = dict(pair for model in models for pair in model.named_buffers(remove_duplicate=False))
    names = [name for name, buffer in buffers.items() if buffer.dtype in CASTABLE]
    for one in wanted:
        if not _is_cast(one, names):
            if one in buffers:
                hint = f" It is {buffers[one].dtype}."
            else:
                some = ", ".join(map(repr, names[:10]))
                hint = did_you_mean(one, names) or (f" Its buffers are {some}." if names else " It has none.")
            raise OptionError(f"cast_buffers has {one!r}, which matches no floating-point buffer of the model.{hint}")


def _is_cast(wanted: str, names: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, wanted) for name in names)


@dataclass(frozen=True, slots=True)
class Plan:
    """A planned conversion of a model.

    Attributes:
        dtypes: each tensor to convert, and each buffer that came half, by ``id``, with its new type.
        buffers: names of those of them that are buffers, by module.
        guarded: float32 submodules among half ones, whose inputs and outputs must be cast, each with the type of its
            outputs.
    """

    dtypes: Mapping[int, tuple[Tensor, torch.dtype]]
    buffers: Mapping[nn.Module, Sequence[str]]
    guarded: Mapping[nn.Module, torch.dtype]


def plan(
    model: nn.Module,
    dtype: torch.dtype,
    keep_batchnorm_fp32: bool,
    keep_fp32: KeepFloat32,
    float32_outputs: KeepFloat32 = (),
    cast_buffers: CastBuffers = False,
) -> Plan:
    """Plans a conversion; does not change the model.

    Args:
        model: any module.
        dtype: new type of the weights.
        keep_batchnorm_fp32: True if modules that `keeps_statistics` accepts stay float32.
        keep_fp32: names, patterns and classes of other submodules that stay float32.
        float32_outputs: those of them whose outputs stay float32.
        cast_buffers: the buffers that a half type is for, too; all others keep their types.

    Raises:
        OptionError: a tensor cannot be converted, or a float32 module and a converted one share it; or float32 outputs
            are asked for inside of a float32 module whose own outputs become half.
    """
    kept = {module for module in model.modules() if keep_batchnorm_fp32 and keeps_statistics(module)}
    guarded: dict[nn.Module, None] = {}
    for _, module in matching(model, keep_fp32):
        guarded.update(dict.fromkeys(callable_roots(module)))
        kept.update(module.modules())
    inner = {below for module in guarded for below in module.modules() if below is not module}

    found: dict[int, tuple[Tensor, torch.dtype]] = {}
    names: dict[int, str] = {}
    for path, tensor, wanted in _types(model, dtype, kept, cast_buffers):
        _, other = found.setdefault(id(tensor), (tensor, wanted))
        if other is not wanted:
            first, asked = names[id(tensor)], "float32_outputs" if float32_outputs else "keep_fp32"
            modules = [each.rpartition(".")[0] for each in (first, path)]
            raise OptionError(
                f"{first!r} and {path!r} are one tensor, and {asked} keeps only one of the two in float32. To keep "
                f"both, give keep_fp32 their modules, {modules}; otherwise name neither."
            )
        names.setdefault(id(tensor), path)
    converted = {key: (tensor, wanted) for key, (tensor, wanted) in found.items() if tensor.dtype in CASTABLE}
    wide = kept_modules(model, float32_outputs)
    # Batch norm gives a result of its input's type. It needs casts only where that is not to be half.
    outermost = {
        module: torch.float32 if module in wide else dtype
        for module in guarded
        if module not in inner and (module in wide or not keeps_statistics(module))
    }
    for around, outputs in outermost.items():
        within = next((wide[below] for below in around.modules() if below in wide), None)
        if outputs is not torch.float32 and within is not None and dtype in HALVES:
            outer = next(name for name, module in model.named_modules() if module is around)
            raise OptionError(
                f"float32_outputs has {within!r}, which is in {outer!r}. keep_fp32 has {outer!r} compute in float32, "
                f"but its outputs become {dtype}. Give float32_outputs {outer!r}."
            )
    buffers = {
        module: [name for name, buffer in module._buffers.items() if buffer is not None and id(buffer) in converted]
        for module in model.modules()
    }
    return Plan(converted, buffers, outermost if dtype in HALVES else {})


def _has_few_of_other_half(model: nn.Module, dtype: torch.dtype) -> bool:
    """Returns True if less than half of a model has the other half type, so that its author has chosen it for a few."""
    weights = [each for each in model.parameters() if each.is_floating_point() and not is_lazy(each)]
    sizes = [(each.numel(), {each.dtype, dtype} == HALVES) for each in weights]
    return 2 * sum(size for size, is_other in sizes if is_other) < sum(size for size, _ in sizes)


def _casts_buffer(cast_buffers: CastBuffers, name: str) -> bool:
    return cast_buffers if isinstance(cast_buffers, bool) else any(_is_cast(one, [name]) for one in cast_buffers)


def _types(
    model: nn.Module, dtype: torch.dtype, kept: Container[nn.Module], cast_buffers: CastBuffers
) -> Iterator[tuple[str, Tensor, torch.dtype]]:
    """Yields the tensors to convert, and the buffers that came half; each with its name and its new type."""
    has_few = _has_few_of_other_half(model, dtype)
    for prefix, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and dtype in HALVES:
            raise OptionError(
                f"the model's {prefix!r} was compiled by TorchScript, so that amp cannot add the casts that a module "
                f"needs once it is converted to {dtype}. Use the Python module that it was compiled from, or "
                "opt_level='O1' or 'O4', which leave it as it is."
            )
        for name, tensor in own_tensors(module):
            path = f"{prefix}.{name}" if prefix else name
            wanted = torch.float32 if module in kept else dtype
            stays = dtype in HALVES and name in module._buffers and not _casts_buffer(cast_buffers, path)
            if stays and tensor.dtype not in HALVES:
                continue
            if stays or (has_few and {tensor.dtype, dtype} == HALVES):
                wanted = tensor.dtype
            _check_convertible(path, tensor, wanted)
            yield path, tensor, wanted


def matches(wanted: str | type[nn.Module], name: str, module: nn.Module) -> bool:
    """Returns True if a name, a pattern or a class matches a submodule."""
    if isinstance(wanted, str):
        return fnmatch.fnmatchcase(name, wanted) or type(module).__name__ == wanted or _is_of_class(wanted, module)
    return isinstance(module, wanted)


def matching(model: nn.Module, wanted: KeepFloat32) -> Iterator[tuple[str, nn.Module]]:
    """Yields the submodules that any name, pattern or class matches, each with its name."""
    for name, module in model.named_modules():
        if name and any(matches(one, name, module) for one in wanted):
            yield name, module


def _is_of_class(path: str, module: nn.Module) -> bool:
    """Returns True if a dotted path (``torch.nn.LayerNorm``) names a class of a module. Imports nothing."""
    owner, _, name = path.rpartition(".")
    if not owner or not name.isidentifier() or owner.partition(".")[0] not in sys.modules:
        return False
    found = find_or(Path(owner, name))
    return isinstance(found, type) and isinstance(module, found)


def kept_modules(model: nn.Module, keep_fp32: KeepFloat32) -> dict[nn.Module, str]:
    """Returns the modules that ``keep_fp32`` matches and that have a forward, with the names under which it does."""
    return {root: name for name, module in matching(model, keep_fp32) for root in callable_roots(module)}


def callable_roots(module: nn.Module) -> Iterator[nn.Module]:
    """Yields the module itself; for a container without a forward, such as ``ModuleList``, its callable children."""
    if not isinstance(module, torch.jit.ScriptModule) and type(module).forward is nn.Module.forward:
        for child in module.children():
            yield from callable_roots(child)
    else:
        yield module


def own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields a module's own parameters and buffers by name, without those of its submodules."""
    for held in (module._parameters, module._buffers):
        for name, tensor in held.items():
            if tensor is not None:
                yield name, tensor


def _check_convertible(path: str, tensor: Tensor, dtype: torch.dtype) -> None:
    if is_lazy(tensor):
        raise OptionError(
            f"the model's {path!r} has no shape yet, so it cannot be converted to {dtype}. Run one batch through the "
            "model first, then make the optimizer and call amp.initialize."
        )
    if tensor.dtype not in CASTABLE or tensor.dtype is dtype:
        return
    if {tensor.dtype, dtype} <= HALVES:
        raise OptionError(
            f"the model's {path!r} is {tensor.dtype}, and would be rounded to {dtype} for good. Type opt_level='O2', "
            f"half_dtype={tensor.dtype}; or convert the model first, by model.float() or model.to({dtype})."
        )
    if tensor.device.type == "meta":
        raise OptionError(
            f"the model's {path!r} is on the device 'meta', so there are no values to convert to {dtype}. Type "
            "model.to_empty(device=...) and load the weights first."
        )
    if tensor.is_inference():
        raise OptionError(
            f"the model's {path!r} was made under torch.inference_mode(), where nothing can be trained or converted. "
            "Make the model outside of it."
        )
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise OptionError(
            f"the model's {path!r} is {'nested' if tensor.is_nested else f'of layout {tensor.layout}'}, and float32 "
            f"values can be kept of dense tensors only, so it cannot be converted to {dtype}. Use opt_level='O1' or "
            "'O4', or name its module in keep_fp32."
        )
    if type(data_of(tensor)) is not Tensor:
        raise OptionError(
            f"the model's {path!r} is a {type(data_of(tensor)).__name__}, and only plain tensors can be converted to "
            f"{dtype}. Use opt_level='O1' or 'O4', which leave weights as they are."
        )
