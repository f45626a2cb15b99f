"""Two GPUs that are not there: their tensors keep their values on the CPU, and what a GPU would refuse is refused.

An operator refuses tensors of several devices, as torch's do, and types for which torch has no kernel. A copy to the
host that does not block brings its values only when an event behind it on the same stream is waited for, or when the
host waits for the device; until then the host reads `TOO_EARLY`. Autograd does not run there: it asks torch for the
device. So tests set gradients themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ampatch.native import kernels

COUNT = 2

# Neither 0 nor 1, nor a scale: whoever reads this has not waited.
TOO_EARLY = -7.0

_READS = frozenset({torch.ops.aten._local_scalar_dense, torch.ops.aten.equal, torch.ops.aten.is_nonzero})
_COPIES = frozenset({torch.ops.aten.copy_, torch.ops.aten._foreach_copy_})


class FarTensor(Tensor):
    """A tensor that says it is on a GPU."""

    on_host: Tensor

    @staticmethod
    def __new__(cls, on_host: Tensor, device: torch.device) -> FarTensor:
        made = Tensor._make_wrapper_subclass(
            cls, on_host.shape, strides=on_host.stride(), dtype=on_host.dtype, device=device
        )
        made.on_host = on_host
        return made

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        method = _METHODS.get(function)
        if method is not None and isinstance(args[0], Tensor):
            return method(*args, **(kwargs or {}))
        return torch._C._disabled_torch_function_impl(function, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{function} ran outside of the far devices")


def _copy_(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    with torch._C._AutoDispatchBelowAutograd():
        torch.ops.aten.copy_(target, source, non_blocking)
    increment_version(target)
    return target


def _number(tensor: Tensor) -> Any:
    return torch.ops.aten._local_scalar_dense(tensor.detach())


# Methods that ask torch for the device before they call an operator.
_METHODS: dict[Any, Callable[..., Any]] = {
    Tensor.copy_: _copy_,
    Tensor.__invert__: torch.bitwise_not,
    Tensor.item: _number,
    Tensor.__float__: lambda tensor: float(_number(tensor)),
    Tensor.__int__: lambda tensor: int(_number(tensor)),
    Tensor.__bool__: lambda tensor: bool(_number(tensor)),
    Tensor.tolist: lambda tensor: tensor.detach().to("cpu").tolist(),
}


class FarDevices(TorchDispatchMode):
    """The devices ``cuda:0`` and ``cuda:1``.

    Attributes:
        current: index of the current device.
        waits: what the host has waited for so far, by operator; "event" if an event was waited for.
        slow: number of tensors of lists for which an operator took a launch each.
    """

    def __init__(self) -> None:
        super().__init__()
        # As torch's fake tensors do it: without this, torch would look for a GPU before it asks any mode.
        self._mode_key = torch._C._TorchDispatchModeKey.FAKE
        self.current = 0
        self.waits: list[str] = []
        self.slow = 0
        self._sent_from = [0] * COUNT
        self._under_way: list[tuple[int, Tensor, Tensor]] = []  # the device, the copy, and the values it is to have

    def of(self, values: Any, index: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns a new tensor on a far device."""
        return FarTensor(torch.tensor(values, dtype=dtype, device="cpu"), torch.device("cuda", index))

    @staticmethod
    def values(tensor: Tensor) -> Tensor:
        """Returns what a tensor holds, wherever it is, without waiting."""
        return tensor.on_host if isinstance(tensor, FarTensor) else tensor

    def deliver(self, index: int, count: int | None = None) -> None:
        """Ends the first copies of a device, or all."""
        there = [each for each in self._under_way if each[0] == index][:count]
        self._under_way = [each for each in self._under_way if not any(each is done for done in there)]
        for _, copied, values in there:
            copied.copy_(values)

    def sent(self, index: int) -> int:
        """Returns the number of copies from a device that did not block."""
        return self._sent_from[index]

    def arrived(self, index: int) -> int:
        """Returns the number of those copies that have arrived."""
        return self._sent_from[index] - sum(each[0] == index for each in self._under_way)

    def _wait(self, function: Any, index: int) -> None:
        self.waits.append(str(function.overloadpacket))
        self.deliver(index)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        operator = function.overloadpacket
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        far = {id(each.on_host): each for each in given if isinstance(each, FarTensor)}
        source = next((each.device for each in far.values()), torch.device("cpu"))
        device = self._with_index(kwargs.pop("device", None) or source)
        if kwargs.pop("pin_memory", False) and device.type != "cpu":
            raise RuntimeError("cannot pin a tensor of a GPU: only dense CPU tensors can be pinned")
        if operator in _COPIES:
            return self._copy(function, args, kwargs)
        self._check(function, given, list(far.values()))
        if far:
            self._refuse_missing_kernels(operator, args)
            args = self._as_on_a_gpu(operator, args)
        if operator in _READS and far:
            self._wait(function, source.index)
        args, kwargs = tree_map(self.values, (args, kwargs))
        takes_device = any(argument.name == "device" for argument in function._schema.arguments)
        result = function(*args, **kwargs, **({"device": "cpu"} if takes_device else {}))
        if operator is torch.ops.aten._to_copy and device.type == "cpu" and far:
            return self._sent(function, source.index, result, kwargs.get("non_blocking", False))
        if device.type == "cpu":
            return result

        def placed(value: Any) -> Any:
            return far.get(id(value), FarTensor(value, device)) if isinstance(value, Tensor) else value

        return tree_map(placed, result)

    @staticmethod
    def _refuse_missing_kernels(operator: Any, args: Any) -> None:
        is_half = any(tensor.dtype is torch.bfloat16 for tensor in tree_leaves(args) if isinstance(tensor, Tensor))
        if operator is torch.ops.aten._amp_foreach_non_finite_check_and_unscale_ and is_half:
            raise RuntimeError("\"_amp_foreach_non_finite_check_and_unscale_cuda\" not implemented for 'BFloat16'")

    def _as_on_a_gpu(self, operator: Any, args: Any) -> Any:
        """Returns the arguments that a kernel of a GPU computes with; counts the launches for each tensor of a list."""
        if operator is torch.ops.aten._foreach_mul_ and isinstance(args[1], Tensor):
            tensors, factor = args
            if any(each.dtype is not factor.dtype for each in tensors):
                self.slow += len(tensors)
                return tensors, self.values(factor).to(tensors[0].dtype)
        return args

    def _with_index(self, device: torch.device) -> torch.device:
        has_index = device.type != "cuda" or device.index is not None
        return device if has_index else torch.device("cuda", self.current)

    def _copy(self, function: Any, args: Any, kwargs: Any) -> Any:
        targets, sources = ([each] if isinstance(each, Tensor) else each for each in args[:2])
        is_blocking = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        for target, source in zip(targets, sources, strict=True):
            self.values(target).copy_(self.values(source))
            if isinstance(source, FarTensor) and not isinstance(target, FarTensor):
                self._sent(function, source.device.index, target, not is_blocking)
        return args[0] if isinstance(args[0], Tensor) else None

    def _sent(self, function: Any, index: int, copied: Tensor, is_under_way: bool) -> Tensor:
        """Returns a copy on the host, which holds its values only if the host waits for them now."""
        if is_under_way:
            self._sent_from[index] += 1
            self._under_way.append((index, copied, copied.clone()))
            copied.fill_(TOO_EARLY)
        else:
            self._wait(function, index)
        return copied

    @staticmethod
    def _check(function: Any, given: list[Tensor], far: list[Tensor]) -> None:
        devices = {each.device for each in far} | {each.device for each in given if each.dim() and far}
        if len(devices) > 1 and function.overloadpacket is not torch.ops.aten._to_copy:
            raise RuntimeError(f"{function} expected all tensors on one device, and found {sorted(map(str, devices))}")


class _Stream:
    def __init__(self, index: int) -> None:
        self.device = torch.device("cuda", index)

    def is_capturing(self) -> bool:
        return False


def event_of(devices: FarDevices) -> type:
    """Returns what `torch.Event` is on the far devices."""

    class Event:
        def __init__(self, device: Any = None) -> None:
            self._index, self._before = None, 0

        def record(self, stream: Any = None) -> None:
            self._index = devices.current if stream is None else stream.device.index
            self._before = devices.sent(self._index)

        def query(self) -> bool:
            return devices.arrived(self._index) >= self._before

        def synchronize(self) -> None:
            devices.waits.append("event")
            devices.deliver(self._index, self._before - devices.arrived(self._index))

    return Event


@pytest.fixture
def far_devices(monkeypatch: pytest.MonkeyPatch, select: Callable[[str | None], None]) -> Any:
    """Two GPUs, for the length of a test."""
    devices = FarDevices()
    select("torch")
    monkeypatch.setattr(kernels, "_TYPES", kernels._TYPES | {FarTensor})
    monkeypatch.setattr(torch, "Event", event_of(devices))
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    monkeypatch.setattr(
        torch.accelerator,
        "current_stream",
        lambda device=None: _Stream(devices.current if device is None else device.index),
    )
    with devices:
        yield devices
