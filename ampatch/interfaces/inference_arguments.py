"""The arguments of `amp.convert_model`: can the model be copied, and which of its parts and functions are excluded.

Must not copy anything.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ampatch.cast_lists import spellings
from ampatch.cast_lists.lists import CastLists
from ampatch.cast_lists.paths import Path, find, find_or
from ampatch.cast_lists.rules import FLOAT32
from ampatch.distributed import is_sharded
from ampatch.errors import OptionError, did_you_mean
from ampatch.function_wrapper import unwrapped
from ampatch.patching import adopted_model
from ampatch.torch_private.compilers import DYNAMO
from ampatch.weights import conversion_plan
from ampatch.weights.ruled_parts import check_entries, ruled_parts


def check_model(model: object) -> nn.Module:
    """Returns the model.

    Raises:
        OptionError: it is no plain module with values, of which torch makes deep copies.
    """
    module = adopted_model.check_module(model)
    if isinstance(module, adopted_model.WRAPPERS):
        raise OptionError(f"found a {type(module).__name__} around a model. Type amp.convert_model(model.module).")
    dynamo = sys.modules.get(DYNAMO)  # which takes a second to import
    if dynamo is not None and isinstance(module, dynamo.OptimizedModule):
        raise OptionError(
            "found a compiled model. Convert the original model, and compile the copy: "
            "torch.compile(amp.convert_model(model))."
        )
    adopted_model.check_model(module)
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


def split_excluded(model: nn.Module, excluded: object, lists: CastLists) -> tuple[set[str], list[Path]]:
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
