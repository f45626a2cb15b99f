"""Functions that take a device: given a GPU, by any name, they use the CPU.

Owns the patches of tensors, modules, storages, generators and checkpoints. Must not patch ``torch.cuda``, except for
its tensor types. Each table below lists functions that take the device in one way.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.storage import TypedStorage, UntypedStorage

from ampatch.cuda_on_cpu.replacements import Function, Replacements
from ampatch.cuda_on_cpu.streams import current_device
from ampatch.cuda_on_cpu.torch_cuda import always
from ampatch.ledger import bindings
from ampatch.torch_private import devices
from ampatch.torch_private.modules import ALLOWED_METHODS

#: Functions that take the device only as the keyword ``device``. torch lists further ones, for its default device.
_LIKE = ("empty_like", "full_like", "ones_like", "rand_like", "randint_like", "randn_like", "zeros_like")
_FACTORIES = (*_LIKE, "from_file", "normal")
_FACTORY_METHODS = ("new", "new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros")

#: Classes whose method ``to`` takes a device as its first argument or as a keyword, or other arguments in its place.
_MOVED = (Tensor, nn.Module, UntypedStorage, TypedStorage)


def on_cpu(device: Any) -> Any:
    """Returns the CPU for a GPU (``"cuda"``, ``"cuda:1"``, ``torch.device("cuda")``, ``0``), other values unchanged."""
    if isinstance(device, str):
        return "cpu" if device.partition(":")[0] == "cuda" else device
    if isinstance(device, torch.device):
        return torch.device("cpu") if device.type == "cuda" else device
    if isinstance(device, int) and not isinstance(device, bool):
        return "cpu"
    return device


def install(replacements: Replacements) -> None:
    """Replaces the functions that take devices."""
    _create(replacements)
    _move(replacements)
    _answer(replacements)
    _name_types(replacements)
    # torch lists here the original methods that a lazy module's parameter allows; the replacements must be allowed too.
    allowed = [*getattr(*ALLOWED_METHODS), Tensor.to, Tensor.cuda, Tensor.get_device]
    replacements.ledger.set(*ALLOWED_METHODS, allowed)
    _load(replacements)


# Creating tensors


def _create(replacements: Replacements) -> None:
    # Call this before replacing anything: torch caches the result, and later looks up the originals in it.
    constructors = {id(each): each for each in devices.device_constructors()}
    for home, name, _ in bindings((torch, torch.fft, torch.nested), constructors):
        replacements.function(home, name, _with_device_keyword)
    for name in _FACTORIES:
        replacements.function(torch, name, _with_device_keyword)
    replacements.function(torch.nested, "as_nested_tensor", _with_device_keyword)
    for name in _FACTORY_METHODS:
        replacements.method(Tensor, name, _with_device_keyword)
    # `with torch.device("cuda")` and torch.set_default_device both create a DeviceContext.
    replacements.method(devices.DeviceContext, "__init__", _with_device_first)
    replacements.everywhere(torch.Generator, _generator_class(torch.Generator))


def _with_device_keyword(original: Function, *args: Any, **kwargs: Any) -> Any:
    if "device" in kwargs:
        kwargs["device"] = on_cpu(kwargs["device"])
    kwargs.pop("pin_memory", None)  # no GPU would copy from pinned memory
    return original(*args, **kwargs)


def _with_device_first(original: Function, self: Any, *args: Any, **kwargs: Any) -> Any:
    if args:
        args = (on_cpu(args[0]), *args[1:])
    return _with_device_keyword(original, self, *args, **kwargs)


def _generator_class(original: type[torch.Generator]) -> type:
    """Returns a stand-in for torch's generator class, a C type that cannot be patched; it makes original generators."""

    class _Asked(type):
        def __call__(cls, device: Any = "cpu") -> torch.Generator:
            return original(on_cpu(device))

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, original)

    return _Asked("Generator", (), {"__module__": "torch", "__doc__": original.__doc__})


# Moving tensors and modules


def _move(replacements: Replacements) -> None:
    for owner in _MOVED:
        replacements.method(owner, "to", _with_device_first)
    replacements.method(Tensor, "cuda", _moved_tensor)
    replacements.method(Tensor, "pin_memory", _as_it_is)
    replacements.method(Tensor, "record_stream", always(None))


def _moved_tensor(
    _original: Function,
    self: Tensor,
    device: Any = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format = torch.preserve_format,
) -> Tensor:
    return self.to("cpu", non_blocking=non_blocking, memory_format=memory_format)


def _as_it_is(_original: Function, self: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
    return self


# Asking for the device


def _answer(replacements: Replacements) -> None:
    replacements.method(Tensor, "get_device", _get_device)
    replacements.ledger.set(Tensor, "is_cuda", property(_is_cuda))
    # Otherwise GPU libraries would get an address in main memory, and crash.
    replacements.ledger.set(Tensor, "__cuda_array_interface__", property(_no_array_interface))


def _get_device(original: Function, self: Tensor) -> Any:
    return current_device() if _is_cuda(self) else original(self)


def _is_cuda(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def _no_array_interface(_tensor: Tensor) -> None:
    raise AttributeError("a tensor on the CPU has no __cuda_array_interface__; use .numpy()")


# Tensor types by name, as before torch 0.4


def _name_types(replacements: Replacements) -> None:
    # torch looks up most of these types by name, and so finds the replacements.
    for kind in ("Double", "Float", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool"):
        for suffix in ("Tensor", "Storage"):
            replacements.ledger.set(torch.cuda, f"{kind}{suffix}", getattr(torch, f"{kind}{suffix}"))
    replacements.method(Tensor, "type", _type)


def _type(original: Function, self: Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
    if isinstance(dtype, str):
        dtype = dtype.replace("torch.cuda.", "torch.")
    if dtype is not None:
        return original(self, dtype, *args, **kwargs)
    name: str = original(self)
    return name.replace("torch.", "torch.cuda.", 1) if _is_cuda(self) else name


# Checkpoints


def _load(replacements: Replacements) -> None:
    """Makes `torch.load` leave storages that were saved from a GPU, or are mapped to one, in main memory."""
    registry = devices.package_registry
    before = list(registry)
    # torch tries entries in order of priority; its own entry for CUDA has priority 20. A storage that is saved gets no
    # location from this one: torch's own entry for the CPU gives it.
    torch.serialization.register_package(0, always(None), _left_in_main_memory)
    (entry,) = (each for each in registry if each not in before)
    replacements.ledger.on_undo(lambda: registry.remove(entry))


def _left_in_main_memory(storage: Any, location: str) -> Any:
    return storage if location.partition(":")[0] == "cuda" else None
