"""Tensors of a model in another type, with what stands behind them, and the way back.

Owns, for every converted tensor, the type it had before and, for as long as somebody needs them, its float32 values:
the master that an optimizer updates, or what a buffer held before it was narrowed. Tensors stay the objects they were,
so that what is shared stays shared. Knows optimizers as owners of masters only.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import operator
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ampatch.errors import OptionError, UsageError
from ampatch.opt_levels import HALVES
from ampatch.weights.conversion_plan import Plan, own_tensors
from ampatch.weights.untracked_writes import data_of

# Asked of all tensors of a list by `map`, since a line of Python for each takes several times as long.
_VERSION = operator.attrgetter("_version")
_ADDRESS = Tensor.data_ptr


class Mark:
    """A moment in the life of a tensor: tells whether it was written to since, as far as torch counts it."""

    __slots__ = ("_data", "address", "version")

    def __init__(self, tensor: Tensor) -> None:
        # Held, so that no other data can come to lie at its address.
        self._data = data_of(tensor)
        self.address = tensor.data_ptr()
        self.version = tensor._version

    def is_now(self, tensor: Tensor) -> bool:
        """Returns whether nothing was written since."""
        return tensor._version == self.version and tensor.data_ptr() == self.address

    def renew(self, tensor: Tensor) -> None:
        """Notes the version of now."""
        if tensor.data_ptr() != self.address:
            self._data, self.address = data_of(tensor), tensor.data_ptr()
        self.version = tensor._version


class Marks:
    """The marks of many tensors, which are renewed together, and asked all at once.

    A mark may be renewed by itself as well, by who has written to its tensor.

    Args:
        marks: of each tensor.
        tensors: as many.
    """

    __slots__ = ("_addresses", "_marks", "_tensors", "_versions")

    def __init__(self, marks: list[Mark], tensors: list[Tensor]) -> None:
        self._marks, self._tensors = marks, tensors
        self._versions: list[int] = []
        self._addresses: list[int] = []

    def are_now(self) -> bool:
        """Returns whether nothing was written since `renew`."""
        tensors = self._tensors
        return list(map(_VERSION, tensors)) == self._versions and list(map(_ADDRESS, tensors)) == self._addresses

    def renew(self) -> bool:
        """Notes the versions and addresses of now; returns whether any tensor has other memory than it had."""
        tensors, before = self._tensors, self._addresses
        self._versions, self._addresses = list(map(_VERSION, tensors)), list(map(_ADDRESS, tensors))
        for mark, tensor, version, address in zip(self._marks, tensors, self._versions, self._addresses, strict=True):
            if mark.address == address:
                mark.version = version
            else:
                mark.renew(tensor)
        return self._addresses != before


@dataclass(slots=True, eq=False)
class ConvertedTensor:
    """Records of one converted tensor: its types, its float32 values, and whether somebody wrote to either.

    Attributes:
        number: in the order in which tensors were converted.
        before: the type that the tensor had.
        dtype: the type that it got.
        full: its float32 values, where they are kept: behind a parameter that an optimizer updates, the master.
        owner: whoever updates the master; None: nobody.
        half_mark: the half tensor when it last was ``full``, rounded.
        full_mark: ``full`` at that moment.
    """

    number: int
    before: torch.dtype
    dtype: torch.dtype
    full: Tensor | None = None
    owner: weakref.ref[object] | None = None
    half_mark: Mark | None = None
    full_mark: Mark | None = None

    def note(self, half: Tensor) -> None:
        """Notes that the half tensor is the float32 values, rounded."""
        assert self.full is not None
        if self.half_mark is None or self.full_mark is None:
            self.half_mark, self.full_mark = Mark(half), Mark(self.full)
        else:
            self.half_mark.renew(half)
            self.full_mark.renew(self.full)

    def is_in_step(self, half: Tensor) -> bool:
        """Returns whether nobody has written to one of the two since `note`, as far as torch counts it."""
        assert self.full is not None
        assert self.half_mark is not None
        assert self.full_mark is not None
        return self.half_mark.is_now(half) and self.full_mark.is_now(self.full) and half.dtype is self.dtype

    @property
    def was_updated(self) -> bool:
        """Whether somebody has written to the float32 values since `note`, as far as torch counts it."""
        return self.full is not None and self.full_mark is not None and not self.full_mark.is_now(self.full)

    @torch.no_grad()
    def synchronise(self, half: Tensor) -> None:
        """Takes over what somebody wrote into one of the two since `note`.

        Where a half element is still its float32 value, rounded, that value stays, with all its bits.

        Raises:
            UsageError: the half tensor was given another type or shape.
        """
        assert self.full is not None
        if half.dtype is not self.dtype or half.shape != self.full.shape:
            raise UsageError(
                f"a half tensor of shape {tuple(self.full.shape)} became {half.dtype} of shape {tuple(half.shape)} "
                "after amp.initialize, which keeps float32 values of it. Type amp.deinitialize() before converting a "
                "model, and amp.initialize afterwards."
            )
        if self.full.device != half.device:
            self.full.data = data_of(self.full).to(half.device)
        if self.was_updated and self.half_mark is not None and self.half_mark.is_now(half):
            half.copy_(self.full)
        elif self.half_mark is not None and self.half_mark.address != half.data_ptr():
            # It has other data now. A state dict that was taken before is to keep the values, as in plain torch.
            self.full.data = self.values(half)
        else:
            self.full.copy_(self.values(half))
        self.note(half)

    @torch.no_grad()
    def values(self, tensor: Tensor) -> Tensor:
        """Returns what a tensor stands for, half or converted further by the user: float32 bits where they still count.

        Args:
            tensor: of the shape of ``full``.

        Returns:
            Of the wider type of the two, and at least float32.
        """
        assert self.full is not None
        full = self.full.to(tensor.device)
        dtype = torch.promote_types(full.dtype, tensor.dtype)
        return torch.where(full.to(self.dtype).to(tensor.dtype) == tensor, full.to(dtype), tensor.to(dtype))

    @torch.no_grad()
    def load(self, half: Tensor, values: Tensor) -> None:
        """Takes over values that the half tensor was loaded with, narrowed, as far as it was."""
        if values.shape == (1,) and half.dim() == 0:  # as scalars were saved once
            values = values[0]
        if self.full is not None and values.shape == half.shape == self.full.shape and half.dtype is self.dtype:
            values = values.to(half.device)
            was_loaded = values.to(half.dtype).view(torch.int16) == half.view(torch.int16)
            self.full.copy_(torch.where(was_loaded, values.float(), self.values(half)))
            self.note(half)


class Conversion:
    """What was converted in a session, and the float32 values behind half tensors.

    Tensors are known by identity, and held weakly: a copy of a model is nobody's business here.

    Args:
        is_of_model: whether a tensor is of a model that was converted, if only since.
    """

    def __init__(self, is_of_model: Callable[[Tensor], bool] = lambda _: False) -> None:
        self._is_of_model = is_of_model
        self._narrowed_buffers: list[tuple[weakref.ref[Tensor], ConvertedTensor]] = []
        # What state dicts have given away since the last forward of half weights without a master, by id of these.
        self._given_away: dict[int, _GivenAway] = {}
        self._converted = WeakTensorKeyDictionary()
        self._buffers: weakref.WeakKeyDictionary[nn.Module, dict[str, tuple[int, torch.dtype]]]
        self._buffers = weakref.WeakKeyDictionary()
        self._numbers = itertools.count()
        # By id of the half parameter, which its owner keeps alive: it is looked up at every forward.
        self._owners: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def convert(self, planned: Plan) -> None:
        """Gives tensors their types. The float32 values of parameters are kept until `forget_unclaimed`.

        Raises:
            OptionError: a tensor of another model was given another type already.
        """
        for tensor, dtype in planned.dtypes.values():
            if tensor in self._converted and tensor.dtype is not dtype:
                raise OptionError(
                    f"a tensor of shape {tuple(tensor.shape)} is shared by two models, of which keep_fp32 keeps only "
                    "one in float32. Give keep_fp32 the modules of both, or of none."
                )
        # Tensors made in inference mode could never be trained.
        with torch.inference_mode(False):
            for module, names in planned.buffers.items():
                known = self._buffers.setdefault(module, {})
                for name in names:
                    known.setdefault(name, (next(self._numbers), module._buffers[name].dtype))  # type: ignore[union-attr]
            for tensor, dtype in planned.dtypes.values():
                if tensor not in self._converted:
                    converted = self._back(tensor, dtype)
                    if tensor.dtype is not dtype:
                        _set_dtype(tensor, dtype, converted)
                        if converted.full is not None and not isinstance(tensor, nn.Parameter):
                            self._narrowed_buffers.append((weakref.ref(tensor), converted))

    def dtype_before(self, tensor: Tensor) -> torch.dtype | None:
        """Returns the type that a tensor had before it was converted; None if it was not."""
        converted = self._converted.get(tensor)
        return None if converted is None else converted.before

    def converted(self) -> list[Tensor]:
        """Returns the tensors that have another type than before."""
        return [tensor for tensor, converted in self._converted.items() if converted.before is not converted.dtype]

    def has_any_of(self, module: nn.Module) -> bool:
        """Returns whether a parameter or buffer of a module, or of one in it, was converted."""
        return any(tensor in self._converted for tensor in (*module.parameters(), *module.buffers()))

    def claim(self, parameter: nn.Parameter, owner: object) -> ConvertedTensor:
        """Returns what stands behind a half parameter, a master from now on, for the one who updates it.

        The master has the gradient from before the parameter was narrowed, if there was one.

        Raises:
            UsageError: somebody else updates it.
        """
        converted = self._converted.get(parameter) or self._back_late(parameter)
        if converted.owner is not None and converted.owner() is not owner:
            gc.collect()  # an adopted optimizer refers to itself, and so outlives its last name for a while
            if converted.owner() is not None:
                raise UsageError(
                    f"a parameter of shape {tuple(parameter.shape)} is in two optimizers, which would update two "
                    "float32 masters of it. Put it into one of them only, or leave master weights out "
                    "(master_weights=False). To replace an optimizer, delete the old one first, with its LR schedulers."
                )
            assert converted.full is not None
            converted.full.grad = None  # that of an optimizer that is gone
        with torch.inference_mode(False):
            if not isinstance(converted.full, nn.Parameter):
                converted.full = nn.Parameter(parameter.detach().float())
                converted.note(parameter)
            else:
                converted.synchronise(parameter)
        converted.full.requires_grad_()
        vars(converted.full).update(vars(parameter))  # some optimizers go by marks on parameters
        converted.owner = weakref.ref(owner)
        self._owners[id(parameter)] = owner
        return converted

    def release(self, parameter: nn.Parameter) -> None:
        """Takes a `claim` back; the values are kept until `forget_unclaimed` or `restore`."""
        self._converted[parameter].owner = None
        self._owners.pop(id(parameter), None)

    def owners_of(self, parameters: Iterable[Tensor]) -> set[Any]:
        """Returns all who have claimed one of these parameters."""
        return {owner for parameter in parameters if (owner := self._owners.get(id(parameter))) is not None}

    def forget_unclaimed(self) -> None:
        """Lets go of the float32 values of parameters that nobody updates: they are what half weights are to save."""
        for tensor, converted in list(self._converted.items()):
            if isinstance(converted.full, nn.Parameter) and converted.owner is None:
                grad, converted.full, converted.half_mark, converted.full_mark = converted.full.grad, None, None, None
                if grad is not None:
                    tensor.grad = grad.to(tensor.dtype)

    def float32_of(self, module: nn.Module, name: str, tensor: Tensor) -> Tensor | None:
        """Returns a half tensor's values in float32, unrounded where they are kept; these share memory with a master.

        Args:
            module: the module that the tensor is a parameter or buffer of.
            name: its name there.
            tensor: float16 or bfloat16.

        Returns:
            The master itself; or float32 values; or None if the tensor was not converted.
        """
        converted = self._converted.get(tensor)
        if converted is None:  # a buffer that the module itself has replaced since
            is_replaced = name in self._buffers.get(module, {})
            return self._give_away(tensor) if is_replaced or self._is_late(tensor) else None
        if converted.full is None or converted.full.shape != tensor.shape:
            return self._give_away(tensor) if tensor.dtype in HALVES else None
        if tensor.dtype is not converted.dtype:  # converted further by the user
            values: Tensor = converted.values(tensor)
            full: Tensor = converted.full
            return full if values.dtype is full.dtype and torch.equal(values, full) else values
        return self._in_step(tensor, converted)

    def _is_late(self, tensor: Tensor) -> bool:
        return tensor.dtype in HALVES and tensor not in self._converted and self._is_of_model(tensor)

    def _back_late(self, tensor: Tensor) -> ConvertedTensor:
        """Takes in a half tensor: of a converted model it stands among what was float32, and is to be that again."""
        converted = self._back(tensor, tensor.dtype)
        if self._is_of_model(tensor):
            converted.before = torch.float32
        return converted

    def take_in_late(self, module: nn.Module) -> None:
        """Takes in half tensors that have come into a converted model since."""
        for name, tensor in own_tensors(module):
            if tensor.dtype in HALVES and tensor not in self._converted and not self._buffers.get(module, {}).get(name):
                self._back_late(tensor)

    def _give_away(self, tensor: Tensor) -> Tensor:
        """Returns a float32 copy of half weights, of which what is written to it is meant for these."""
        given = self._given_away.get(id(tensor))
        if given is None or not given.is_of(tensor):
            given = self._given_away[id(tensor)] = _GivenAway(tensor)
        return given.copy

    def take_back(self) -> None:
        """Writes into half tensors without a master what was written into the float32 copies that were given away."""
        if self._given_away:
            given_away, self._given_away = self._given_away, {}
            for given in given_away.values():
                given.take_back()
        for reference, converted in self._narrowed_buffers:
            buffer = reference()
            if buffer is not None and converted.was_updated and buffer.dtype is converted.dtype:
                converted.synchronise(buffer)

    def full_of(self, tensor: Tensor) -> Tensor | None:
        """Returns the float32 values of a half tensor that is float32 without amp; None of any other."""
        converted = self._converted.get(tensor)
        if converted is None or converted.before is not torch.float32 or tensor.dtype is not converted.dtype:
            return None
        if converted.full is None:
            return tensor.detach().float() if tensor.dtype in HALVES else None
        return self._in_step(tensor, converted)

    def _in_step(self, tensor: Tensor, converted: ConvertedTensor) -> Tensor:
        """Returns the float32 values behind a half tensor, up to date."""
        owner: Any = None if converted.owner is None else converted.owner()
        if owner is not None:
            owner.synchronise_one(tensor)
        elif not isinstance(tensor, nn.Parameter) or not converted.is_in_step(tensor):
            converted.synchronise(tensor)
        assert converted.full is not None
        return converted.full

    def load(self, tensor: Tensor, values: Tensor) -> None:
        """Takes over values that a half tensor was just loaded with by ``load_state_dict``, with all their bits."""
        converted = self._converted.get(tensor)
        if converted is not None:
            converted.load(tensor, values)
            self._note_with_owner(tensor, converted)

    def values_behind(self, tensor: Tensor) -> Tensor | None:
        """Returns the float32 values that are kept of a half tensor, not a copy of them; None if there are none."""
        converted = self._converted.get(tensor)
        return None if converted is None else converted.full

    def note(self, tensor: Tensor) -> None:
        """Notes that a tensor is its `values_behind`, rounded."""
        self._converted[tensor].note(tensor)
        self._note_with_owner(tensor, self._converted[tensor])

    def _note_with_owner(self, tensor: Tensor, converted: ConvertedTensor) -> None:
        owner: Any = None if converted.owner is None else converted.owner()
        if owner is not None and converted.is_in_step(tensor):
            owner.note_one(tensor)

    def mark(self) -> int:
        """Returns a point in time for `restore`."""
        return next(self._numbers)

    def restore(self, since: int = 0) -> None:
        """Gives what was converted the type that it had, with the float32 values that are kept.

        All of it, also where something raises.
        """
        with torch.inference_mode(False), contextlib.ExitStack() as all_of_it:
            self.take_back()
            for module, names in list(self._buffers.items()):
                for name, (number, before) in list(names.items()):
                    if number >= since:
                        del names[name]
                        buffer = module._buffers.get(name)
                        if buffer is not None and buffer not in self._converted and buffer.dtype in HALVES:
                            # One that the module itself has put there since.
                            all_of_it.callback(module._buffers.__setitem__, name, buffer.to(before))
            for tensor, converted in list(self._converted.items()):
                if converted.number >= since:
                    del self._converted[tensor]
                    all_of_it.callback(_restore, tensor, converted)

    def _back(self, tensor: Tensor, dtype: torch.dtype) -> ConvertedTensor:
        converted = self._converted[tensor] = ConvertedTensor(next(self._numbers), tensor.dtype, dtype)
        return converted


class _GivenAway:
    """A float32 copy of half weights that somebody was given in their stead.

    Args:
        tensor: the half weights.

    Attributes:
        copy: of the same values.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.copy = tensor.detach().float()
        self._given = self.copy.to(tensor.dtype)
        self._tensor = weakref.ref(tensor)
        self._moment = Mark(tensor)

    def is_of(self, tensor: Tensor) -> bool:
        """Returns whether it still stands for these weights; what was written to it is written to them first."""
        self.take_back()
        return self._tensor() is tensor and self._moment.is_now(tensor)

    @torch.no_grad()
    def take_back(self) -> None:
        """Writes into the weights what was written to the copy since, and nothing else."""
        tensor = self._tensor()
        if tensor is None or tensor.shape != self.copy.shape:
            return
        values = self.copy.to(tensor)
        is_other = values != self._given
        # By the value, as ways to write to it are many. Counted only where there is something.
        if bool(is_other.any()):
            tensor.copy_(torch.where(is_other, values, tensor))
            self._given = values
            self._moment.renew(tensor)


def _set_dtype(tensor: Tensor, dtype: torch.dtype, converted: ConvertedTensor) -> None:
    full, grad = data_of(tensor), tensor.grad  # not detach(), which counts writes to the two together
    _replace(tensor, full.to(dtype))
    if full.dtype is torch.float32 and dtype in HALVES:
        converted.full = nn.Parameter(full, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else full
        converted.full.grad = grad
        converted.note(tensor)
    elif grad is not None:
        tensor.grad = grad.to(dtype)


def _restore(tensor: Tensor, converted: ConvertedTensor) -> None:
    values, grad = data_of(tensor), tensor.grad
    if converted.full is not None and tensor.shape == converted.full.shape:
        if tensor.dtype is converted.dtype:
            if not (isinstance(tensor, nn.Parameter) and converted.is_in_step(tensor)):
                converted.synchronise(tensor)
            values = data_of(converted.full)
        elif tensor.is_floating_point():  # converted by the user since
            values = converted.values(tensor)
        # Of an optimizer that is gone the half parameter's gradient is what is left.
        if grad is None and converted.owner is None:
            grad = converted.full.grad
    if tensor.dtype is not converted.dtype:  # the user's type stays
        tensor.data = values.to(tensor.dtype)
    elif tensor.dtype is not converted.before:
        _replace(tensor, values.to(converted.before))
    if grad is not None:
        tensor.grad = grad.to(tensor.dtype)


def _replace(tensor: Tensor, data: Tensor) -> None:
    """Puts data of another type in place; the gradient is gone, as it is to be of the parameter's type."""
    tensor.grad = None
    follows = tensor.is_leaf and tensor.grad_dtype is tensor.dtype
    tensor.data = data
    if follows and tensor.grad_dtype is not data.dtype:  # somebody has set it, as unscaling half gradients does
        tensor.grad_dtype = data.dtype
