"""Converts a model's tensors to another type, keeps their float32 values, and undoes the conversion.

Owns the previous type of every converted tensor, and how long its float32 values are kept: the master that an optimizer
updates, or a buffer's values before it was narrowed. Tensors stay the same objects, so that shared tensors stay shared.
Must know optimizers only as owners of masters.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ampatch.errors import OptionError, UsageError
from ampatch.half_types import HALVES
from ampatch.weights.conversion_plan import Plan, own_tensors
from ampatch.weights.kept_values import Kept
from ampatch.weights.split_weights import SplitWeight
from ampatch.weights.untracked_writes import data_of
from ampatch.weights.written_halves import WrittenHalves


@dataclass(slots=True, eq=False)
class ConvertedTensor:
    """Record of one converted tensor.

    Attributes:
        number: position in the order of conversions.
        before: type of the tensor before the conversion.
        dtype: type of the tensor since the conversion.
        kept: its float32 values, or what it lacks of them; None if they are not kept.
        owner: weak reference to the masters of the optimizer that claimed the parameter, and so updates its float32
            values; None if none did.
        is_rounded: True if its float32 values are dropped, although it has an owner.
    """

    number: int
    before: torch.dtype
    dtype: torch.dtype
    kept: Kept | SplitWeight | None = None
    owner: weakref.ref[object] | None = None
    is_rounded: bool = False

    def live_owner(self) -> Any:
        """Returns the owner; None if there is none, or it was deleted."""
        return None if self.owner is None else self.owner()

    def full(self, tensor: Tensor, kept: Kept | SplitWeight) -> Tensor:
        """Returns the kept float32 values of the tensor, after it copied user writes between the two."""
        owner = self.live_owner()
        if owner is not None:
            return owner.full_of(tensor)  # type: ignore[no-any-return]
        if not isinstance(tensor, nn.Parameter) or not kept.is_in_sync(tensor):
            kept.synchronise(tensor)
        return kept.full

    def note_with_owner(self, tensor: Tensor, kept: Kept | SplitWeight) -> None:
        """Has the owner record that the tensor equals its float32 values, rounded, if it does."""
        owner = self.live_owner()
        if owner is not None and kept.is_in_sync(tensor):
            owner.note_one(tensor)


class Conversion:
    """The converted tensors of a session, and their float32 values.

    Tensors are known by identity, and held weakly; copies of a model are not tracked.

    Args:
        is_of_model: function that returns True if a tensor belongs to a converted model, even if it was added later.
        watches_writes: True to make half weights without a master float32 once something writes to them.

    Attributes:
        without_master: the half weights that have no master.
    """

    def __init__(
        self, is_of_model: Callable[[Tensor], bool] = lambda _: False, *, watches_writes: bool = False
    ) -> None:
        self._is_of_model, self._watches_writes = is_of_model, watches_writes
        self._converted = WeakTensorKeyDictionary()
        self.without_master = WrittenHalves(self._converted.__delitem__)
        self._buffers: weakref.WeakKeyDictionary[nn.Module, dict[str, tuple[int, torch.dtype]]]
        self._buffers = weakref.WeakKeyDictionary()
        self._numbers = itertools.count()

    def convert(self, planned: Plan) -> None:
        """Converts tensors to their planned types; keeps float32 values of parameters until `forget_unclaimed`.

        Raises:
            OptionError: a tensor was already converted to another type, for another model that shares it.
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
                    # First the record, by which `restore` gives the type back if the conversion raises.
                    made = self._converted[tensor] = ConvertedTensor(next(self._numbers), tensor.dtype, dtype)
                    if tensor.dtype is not dtype:
                        made.kept = kept = _set_dtype(tensor, dtype)
                        if kept is not None and not isinstance(tensor, nn.Parameter):
                            self.without_master.watch_buffer(tensor, kept)

    def dtype_before(self, tensor: Tensor) -> torch.dtype | None:
        """Returns the type of a tensor before it was converted; None if it was not converted."""
        converted = self._converted.get(tensor)
        return None if converted is None else converted.before

    def converted(self) -> list[Tensor]:
        """Returns the tensors whose type the conversion changed."""
        return [tensor for tensor, converted in self._converted.items() if converted.before is not converted.dtype]

    def has_any_of(self, module: nn.Module) -> bool:
        """Returns True if a parameter or buffer of a module or its submodules was converted."""
        return any(tensor in self._converted for tensor in (*module.parameters(), *module.buffers()))

    def claim(self, parameter: nn.Parameter, owner: object) -> tuple[Kept, nn.Parameter]:
        """Returns the float32 values of a half parameter, with their record; they are the owner's master from now on.

        The master has the gradient that the parameter had before it was narrowed, if there was one.

        Raises:
            UsageError: another optimizer has claimed the parameter.
        """
        converted = self._unowned(parameter, owner)
        with torch.inference_mode(False):
            if converted.kept is None:
                converted.kept = Kept(parameter, nn.Parameter(parameter.detach().float()), converted.dtype)
            else:
                converted.kept.synchronise(parameter)
        assert isinstance(converted.kept, Kept)
        master = converted.kept.full
        assert isinstance(master, nn.Parameter)
        master.requires_grad_()
        if type(parameter) is nn.Parameter:  # attributes that users set on one are those of the other, at all times
            master.__dict__ = parameter.__dict__
        self.without_master.forget(parameter)
        converted.owner = weakref.ref(owner)
        return converted.kept, master

    def claim_rounded(self, parameter: nn.Parameter, owner: object, splits: bool) -> SplitWeight | None:
        """Has an owner update a half parameter whose float32 value is not kept as a tensor.

        Args:
            parameter: a bfloat16 parameter.
            owner: its owner from now on.
            splits: whether the parameter gets a remainder, with which it has its float32 value.

        Returns:
            The parameter with its remainder; None without one.

        Raises:
            UsageError: another optimizer has claimed the parameter.
        """
        converted = self._unowned(parameter, owner)
        kept = converted.kept
        if kept is not None:
            kept.synchronise(parameter)
            _give_gradient(parameter, kept.take_gradient())
        if splits and not isinstance(kept, SplitWeight):
            with torch.inference_mode(False):
                full = parameter.detach().float() if kept is None else kept.full
                converted.kept = SplitWeight(parameter, full)
        converted.is_rounded = not splits  # dropped by `forget_unclaimed`, once nothing can be refused any more
        self.without_master.forget(parameter)
        converted.owner = weakref.ref(owner)
        return converted.kept if isinstance(converted.kept, SplitWeight) else None

    def _unowned(self, parameter: nn.Parameter, owner: object) -> ConvertedTensor:
        """Returns the record of a half parameter that no other optimizer updates."""
        converted = self._converted.get(parameter) or self._record_late(parameter)
        if converted.owner is not None and converted.live_owner() is not owner:
            gc.collect()  # an adopted optimizer is in a reference cycle, and outlives its last reference for a while
            if converted.live_owner() is not None:
                raise UsageError(
                    f"a parameter of shape {tuple(parameter.shape)} is in two optimizers, which would update two "
                    "float32 masters of it. Put it into one of them only: hand in the outer one, if one is wrapped "
                    "around the other. Or leave master weights out (master_weights=False). To replace an optimizer, "
                    "delete the old one first, with its LR schedulers."
                )
            if converted.kept is not None:
                converted.kept.take_gradient()  # of an optimizer that was deleted
        return converted

    def release(self, parameter: nn.Parameter) -> torch.dtype:
        """Undoes a `claim`; the float32 values are kept until `forget_unclaimed` or `restore`.

        Returns:
            The type that the parameter had before it was converted.
        """
        converted: ConvertedTensor = self._converted[parameter]
        converted.owner, converted.is_rounded = None, False
        return converted.before

    def has_master(self, tensor: Tensor) -> bool:
        """Returns True if a tensor is a half parameter that an owner has claimed."""
        converted = self._converted.get(tensor)
        return converted is not None and converted.live_owner() is not None

    def forget_unclaimed(self) -> None:
        """Drops the float32 values of parameters without an owner, to free the memory that half weights save.

        A gradient of the float32 values goes to the parameter, in its type.
        """
        for tensor, converted in list(self._converted.items()):
            kept = converted.kept
            is_dropped = converted.owner is None or converted.is_rounded
            if kept is not None and isinstance(tensor, nn.Parameter) and is_dropped:
                converted.kept = None
                _give_gradient(tensor, kept.take_gradient())
        if self._watches_writes:
            self.without_master.watch(
                tensor
                for tensor, converted in self._converted.items()
                if converted.kept is None
                and converted.owner is None
                and converted.before is torch.float32
                and isinstance(tensor, nn.Parameter)
            )

    def float32_of(self, module: nn.Module, name: str, tensor: Tensor) -> Tensor | None:
        """Returns a half tensor's values in float32, unrounded if they are kept.

        Args:
            module: the module that holds the tensor as a parameter or buffer.
            name: the tensor's name in the module.
            tensor: float16 or bfloat16 tensor.

        Returns:
            The kept float32 values themselves, such as the master; or float32 values. None if the tensor was not
            converted; or if it was half before `initialize`, and no float32 values are kept.
        """
        converted: ConvertedTensor | None = self._converted.get(tensor)
        if converted is None:  # the module may have replaced its buffer
            _, before = self._buffers.get(module, {}).get(name, (0, torch.float32))
            is_wide = tensor.dtype in HALVES and before not in HALVES and self._is_of_model(tensor)
            return self.without_master.float32_copy_of(tensor) if is_wide else None
        kept = converted.kept
        if kept is None and converted.owner is not None and tensor.dtype in HALVES:
            return tensor.detach().float()
        if kept is None or kept.shape != tensor.shape:
            # A state dict of weights that came half, such as a frozen base, must not take twice their memory.
            is_as_it_came = tensor.dtype is converted.before
            return self.without_master.float32_copy_of(tensor) if tensor.dtype in HALVES and not is_as_it_came else None
        if tensor.dtype is not converted.dtype:  # the user converted it again
            values = kept.values(tensor)
            return kept.full if values.dtype is kept.full.dtype and torch.equal(values, kept.full) else values
        return converted.full(tensor, kept)

    def _record_late(self, tensor: Tensor) -> ConvertedTensor:
        """Records a half tensor that was not converted; `restore` makes it float32 if it is of a converted model."""
        before = torch.float32 if self._is_of_model(tensor) else tensor.dtype
        converted = self._converted[tensor] = ConvertedTensor(next(self._numbers), before, tensor.dtype)
        return converted

    def record_late(self, module: nn.Module) -> None:
        """Records half tensors that were added to a module of a converted model after the conversion."""
        for name, tensor in own_tensors(module):
            if tensor.dtype in HALVES and tensor not in self._converted and not self._buffers.get(module, {}).get(name):
                self._record_late(tensor)

    def full_of(self, tensor: Tensor) -> Tensor | None:
        """Returns the float32 values of a tensor that was converted from float32 to half; None for any other."""
        converted: ConvertedTensor | None = self._converted.get(tensor)
        if converted is None or converted.before is not torch.float32 or tensor.dtype is not converted.dtype:
            return None
        if converted.kept is None:
            return tensor.detach().float() if tensor.dtype in HALVES else None
        return converted.full(tensor, converted.kept)

    def load(self, tensor: Tensor, values: Tensor) -> None:
        """Copies values that ``load_state_dict`` just loaded into a half tensor to its float32 values, unrounded."""
        converted = self._converted.get(tensor)
        if converted is not None:
            if converted.kept is not None:
                converted.kept.load(tensor, values)
                converted.note_with_owner(tensor, converted.kept)
            self.without_master.note_loaded(tensor, values)

    def kept_float32_values(self, tensor: Tensor) -> Tensor | None:
        """Returns the kept float32 values of a half tensor, without a copy; None if there are none."""
        converted = self._converted.get(tensor)
        return None if converted is None or converted.kept is None else converted.kept.full

    def set(self, tensor: Tensor, full: Tensor) -> None:
        """Takes float32 values that a tensor equals, rounded: its `kept_float32_values`, after code wrote to them."""
        converted = self._converted[tensor]
        converted.kept.set(tensor, full)
        converted.note_with_owner(tensor, converted.kept)

    def mark(self) -> int:
        """Returns a number for `restore`, which then undoes only later conversions."""
        return next(self._numbers)

    def restore(self, since: int = 0) -> None:
        """Converts tensors back to the types that they had, with their kept float32 values.

        If one tensor raises, the others are still restored.

        Args:
            since: number from `mark`; tensors converted before it stay as they are.
        """
        with torch.inference_mode(False), contextlib.ExitStack() as all_of_it:
            self.without_master.widen_written()
            for module, names in list(self._buffers.items()):
                for name, (number, before) in list(names.items()):
                    if number >= since:
                        del names[name]
                        buffer = module._buffers.get(name)
                        if buffer is not None and buffer not in self._converted and buffer.dtype in HALVES:
                            # The module itself replaced its buffer after the conversion.
                            all_of_it.callback(module._buffers.__setitem__, name, buffer.to(before))
            for tensor, converted in list(self._converted.items()):
                if converted.number >= since:
                    del self._converted[tensor]
                    all_of_it.callback(_restore, tensor, converted)


def _set_dtype(tensor: Tensor, dtype: torch.dtype) -> Kept | None:
    """Converts a tensor; returns its float32 values if they are to be kept."""
    full, grad = data_of(tensor), tensor.grad  # not detach(): its result would share the version counter
    _replace(tensor, full.to(dtype))
    if full.dtype is not torch.float32 or dtype not in HALVES:
        _give_gradient(tensor, grad)
        return None
    full = nn.Parameter(full, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else full
    full.grad = grad
    return Kept(tensor, full, dtype)


def _give_gradient(tensor: Tensor, grad: Tensor | None) -> None:
    """Gives a tensor a gradient in its own type, if there is one."""
    if grad is not None:
        tensor.grad = grad.to(tensor.dtype)


def _restore(tensor: Tensor, converted: ConvertedTensor) -> None:
    values, grad, kept = data_of(tensor), tensor.grad, converted.kept
    if kept is not None and tensor.shape == kept.shape:
        if tensor.dtype is converted.dtype:
            values = data_of(converted.full(tensor, kept))
        elif tensor.is_floating_point():  # the user converted it again
            values = kept.values(tensor)
        # If the optimizer was deleted, only the half parameter's gradient counts.
        if grad is None and converted.owner is None:
            grad = kept.take_gradient()
    if tensor.dtype is not converted.dtype:  # the user's type stays
        tensor.data = values.to(tensor.dtype)
    elif tensor.dtype is not converted.before:
        _replace(tensor, values.to(converted.before))
    _give_gradient(tensor, grad)


def _replace(tensor: Tensor, data: Tensor) -> None:
    """Sets a tensor's data to data of another type, and drops its gradient, whose type no longer fits."""
    tensor.grad = None
    follows = tensor.is_leaf and tensor.grad_dtype is tensor.dtype
    tensor.data = data
    if follows and tensor.grad_dtype is not data.dtype:  # it was set explicitly, as when half gradients are unscaled
        tensor.grad_dtype = data.dtype
