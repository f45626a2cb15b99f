"""The conversion of a model's weights to another type, and the way back.

Owns, for every converted tensor, the type it had before, and its float32 values for as long as somebody needs them: the
masters of an optimizer, and what buffers held before they were narrowed. Tensors stay the objects they were, so that
what is shared stays shared. Knows neither optimizers nor sessions.
"""

from __future__ import annotations

import fnmatch
import itertools
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakTensorKeyDictionary

from ampatch.casting import CASTABLE
from ampatch.errors import OptionError, UsageError, did_you_mean
from ampatch.opt_levels import HALF_DTYPES

HALVES = frozenset(HALF_DTYPES.values())

KeepFloat32 = tuple[str | type[nn.Module], ...]


def keeps_statistics(module: nn.Module) -> bool:
    """Whether a module normalises by running statistics: batch norm, synchronised or not, and instance norm with them.

    These take half input with float32 weights natively, on the CPU and on CUDA.
    """
    return isinstance(module, _NormBase) and (not isinstance(module, _InstanceNorm) or module.track_running_stats)


def check_keep_fp32(keep_fp32: object) -> KeepFloat32:
    """Names, patterns and classes as a tuple; one of them alone is a tuple of one.

    Raises:
        OptionError: anything else.
    """
    if keep_fp32 is None:
        return ()
    wanted = tuple(keep_fp32) if isinstance(keep_fp32, (list, tuple, set, frozenset)) else (keep_fp32,)
    for one in wanted:
        if not (isinstance(one, str) or (isinstance(one, type) and issubclass(one, nn.Module))):
            raise OptionError(
                f"keep_fp32 has {one!r}; expected names of submodules ('encoder.norm'), patterns ('*.norm') or classes "
                "(torch.nn.LayerNorm, or 'LayerNorm'), one or a list of them."
            )
    return wanted


def check_matches(models: Iterable[nn.Module], keep_fp32: KeepFloat32) -> None:
    """Raises `OptionError`, with the nearest names, where one of ``keep_fp32`` matches no submodule at all."""
    submodules = [(name, module) for model in models for name, module in model.named_modules() if name]
    for wanted in keep_fp32:
        if not any(_matches(wanted, name, module) for name, module in submodules):
            names = [name for name, _ in submodules] + [type(module).__name__ for _, module in submodules]
            shown = repr(wanted) if isinstance(wanted, str) else wanted.__name__
            hint = did_you_mean(shown.strip("'"), list(dict.fromkeys(names)))
            raise OptionError(f"keep_fp32 has {shown}, which matches no submodule of the model.{hint}")


@dataclass(frozen=True, slots=True)
class Plan:
    """What a conversion will do to a model.

    Attributes:
        dtypes: each tensor to convert, by ``id``, with the type it is to have.
        guarded: the submodules that compute in float32 among half ones, and need their inputs and outputs cast.
    """

    dtypes: Mapping[int, tuple[Tensor, torch.dtype]]
    guarded: tuple[nn.Module, ...]


def plan(model: nn.Module, dtype: torch.dtype, keep_batchnorm_fp32: bool, keep_fp32: KeepFloat32) -> Plan:
    """Works out a conversion, and changes nothing.

    Args:
        model: any module.
        dtype: the type of the weights.
        keep_batchnorm_fp32: whether what `keeps_statistics` is float32 all the same.
        keep_fp32: what else is.

    Raises:
        OptionError: a tensor that cannot be converted, or that is shared between what is kept and what is not.
    """
    kept: dict[nn.Module, None] = {}
    guarded: dict[nn.Module, None] = {}
    for name, module in model.named_modules():
        if keep_batchnorm_fp32 and keeps_statistics(module):
            kept[module] = None
        if name and any(_matches(wanted, name, module) for wanted in keep_fp32):
            guarded.update(dict.fromkeys(_callable_roots(module)))
            kept.update(dict.fromkeys(module.modules()))
    inner = {below for module in guarded for below in module.modules() if below is not module}

    found: dict[int, tuple[Tensor, torch.dtype]] = {}
    names: dict[int, str] = {}
    for prefix, module in model.named_modules():
        wanted = torch.float32 if module in kept else dtype
        for name, tensor in own_tensors(module):
            path = f"{prefix}.{name}" if prefix else name
            _check_convertible(path, tensor, wanted)
            _, other = found.setdefault(id(tensor), (tensor, wanted))
            if other is not wanted:
                raise OptionError(
                    f"{names[id(tensor)]!r} and {path!r} are one tensor, and keep_fp32 keeps only one of the two in "
                    "float32. Give keep_fp32 the modules of both, or of none."
                )
            names.setdefault(id(tensor), path)
    converted = {key: (tensor, wanted) for key, (tensor, wanted) in found.items() if tensor.dtype in CASTABLE}
    outermost = [module for module in guarded if module not in inner and not keeps_statistics(module)]
    return Plan(converted, tuple(outermost) if dtype in HALVES else ())


@dataclass(slots=True, eq=False)
class Backing:
    """What stands behind one converted tensor.

    Attributes:
        number: in the order in which tensors were converted.
        before: the type that the tensor had.
        full: its float32 values, where they are kept: behind a parameter that an optimizer updates, the master.
        owner: whoever updates the master; None: nobody has so far.
        marks: version and address of the half tensor, and version of ``full``, when the two last were in step.
    """

    number: int
    before: torch.dtype
    full: Tensor | None = None
    owner: weakref.ref[object] | None = None
    marks: tuple[int, int, int] = (0, 0, 0)

    def note(self, half: Tensor) -> None:
        """The half tensor is the float32 values, rounded."""
        assert self.full is not None
        self.marks = (half._version, half.data_ptr(), self.full._version)

    @torch.no_grad()
    def synchronise(self, half: Tensor) -> None:
        """Takes over what somebody wrote into one of the two since `note`; into a parameter, as far as torch counts it.

        Where a half element is still its float32 value, rounded, that value stays, with all its bits.
        """
        assert self.full is not None
        if self.full.device != half.device:
            self.full.data = self.full.data.to(half.device)
        version, address, full_version = self.marks
        # Writes to buffers are not all counted: batch norm's to its running statistics are not.
        if not isinstance(half, nn.Parameter) or (half._version, half.data_ptr()) != (version, address):
            unchanged = self.full.to(half.dtype).view(torch.int16) == half.view(torch.int16)
            self.full.copy_(torch.where(unchanged, self.full, half.float()))
        elif self.full._version != full_version:
            half.copy_(self.full)
        else:
            return
        self.note(half)


class Conversion:
    """What was converted in a session, and the float32 values behind half tensors.

    Everything is known by the tensor's identity, and held weakly: a copy of a model is nobody's business here.
    """

    def __init__(self) -> None:
        self._backings = WeakTensorKeyDictionary()
        self._numbers = itertools.count()

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor in self._backings

    def convert(self, planned: Plan) -> None:
        """Gives tensors their types. The float32 values of parameters are kept until `forget_unclaimed`."""
        for tensor, dtype in planned.dtypes.values():
            if tensor not in self._backings:
                backing = self._back(tensor)
                if tensor.dtype is not dtype:
                    _set_dtype(tensor, dtype, backing)

    def dtype_before(self, tensor: Tensor) -> torch.dtype | None:
        """The type that a tensor had before it was converted; None if it was not."""
        backing = self._backings.get(tensor)
        return None if backing is None else backing.before

    def claim(self, parameter: nn.Parameter, owner: object) -> Backing:
        """What stands behind a half parameter, a master from now on, for the one who updates it.

        The master has the parameter's gradient, if there is one.

        Raises:
            UsageError: somebody else updates it.
        """
        backing = self._backings.get(parameter) or self._back(parameter)
        other = None if backing.owner is None else backing.owner()
        if other is not None and other is not owner:
            raise UsageError(
                f"a parameter of shape {tuple(parameter.shape)} is in two optimizers, which would update two float32 "
                "masters of it. Put it into one of them only; or leave master weights out (master_weights=False)."
            )
        if not isinstance(backing.full, nn.Parameter):
            backing.full = nn.Parameter(parameter.detach().float())
        else:
            if backing.owner is not None:
                backing.full.grad = None  # that of an optimizer that is gone
                backing.synchronise(parameter)
            backing.full.requires_grad_()
        if parameter.grad is not None:
            backing.full.grad, parameter.grad = parameter.grad.float(), None
        vars(backing.full).update(vars(parameter))  # some optimizers go by marks on parameters
        backing.owner = weakref.ref(owner)
        backing.note(parameter)
        return backing

    def release(self, parameter: nn.Parameter) -> None:
        """Takes a `claim` back."""
        self._backings[parameter].owner = None

    def forget_unclaimed(self) -> None:
        """Lets go of the float32 values of parameters that nobody updates: they are what half weights are to save."""
        for tensor, backing in list(self._backings.items()):
            if isinstance(backing.full, nn.Parameter) and backing.owner is None:
                grad, backing.full = backing.full.grad, None
                if grad is not None:
                    tensor.grad = grad.to(tensor.dtype)

    def float32_of(self, tensor: Tensor) -> Tensor:
        """A half tensor's values in float32, without rounding where they are kept; these share memory with a master."""
        backing = self._backings[tensor]
        if backing.full is None:
            return tensor.detach().float()
        backing.synchronise(tensor)
        full: Tensor = backing.full.detach()
        return full

    def load(self, tensor: Tensor, values: Tensor) -> None:
        """Takes over float32 values before the half tensor gets them, narrowed, from ``load_state_dict``."""
        full = self._backings[tensor].full
        if full is not None and values.shape == tensor.shape:
            with torch.no_grad():
                full.copy_(values)

    def mark(self) -> int:
        """A point in time for `restore`."""
        return next(self._numbers)

    def restore(self, since: int = 0) -> None:
        """Gives what was converted the type that it had, with the float32 values that are kept."""
        for tensor, backing in list(self._backings.items()):
            if backing.number >= since:
                del self._backings[tensor]
                _restore(tensor, backing)

    def _back(self, tensor: Tensor) -> Backing:
        backing = self._backings[tensor] = Backing(next(self._numbers), tensor.dtype)
        return backing


def _matches(wanted: str | type[nn.Module], name: str, module: nn.Module) -> bool:
    if isinstance(wanted, str):
        return fnmatch.fnmatchcase(name, wanted) or type(module).__name__ == wanted
    return isinstance(module, wanted)


def _callable_roots(module: nn.Module) -> Iterator[nn.Module]:
    """The module itself; of one that only holds others, such as a ``ModuleList``, those that it holds."""
    if type(module).forward is nn.Module.forward:
        for child in module.children():
            yield from _callable_roots(child)
    else:
        yield module


def own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """A module's own parameters and buffers by name, without those of its submodules."""
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
    if tensor.device.type == "meta":
        raise OptionError(
            f"the model's {path!r} is on the device 'meta', so there are no values to convert to {dtype}. Type "
            "model.to_empty(device=...) and load the weights first."
        )
    if type(tensor.data) is not Tensor:
        raise OptionError(
            f"the model's {path!r} is a {type(tensor.data).__name__}, and only plain tensors can be converted to "
            f"{dtype}. Use opt_level='O1' or 'O4', which leave weights as they are."
        )


def _set_dtype(tensor: Tensor, dtype: torch.dtype, backing: Backing) -> None:
    full, grad = tensor.data, tensor.grad  # not detach(), which counts writes to the two together
    narrowed = full.to(dtype)
    tensor.grad = None  # torch wants a gradient to be of the parameter's type
    tensor.data = narrowed
    if full.dtype is torch.float32 and dtype in HALVES:
        backing.full = nn.Parameter(full, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else full
        backing.full.grad = grad
        backing.note(tensor)
    elif grad is not None:
        tensor.grad = grad.to(dtype)


def _restore(tensor: Tensor, backing: Backing) -> None:
    values, grad = tensor.data, tensor.grad
    if backing.full is not None:
        backing.synchronise(tensor)
        values, grad = backing.full.data, backing.full.grad if grad is None else grad
    if tensor.dtype is not backing.before:
        tensor.grad = None
        tensor.data = values.to(backing.before)
    if grad is not None:
        tensor.grad = grad.to(backing.before)
