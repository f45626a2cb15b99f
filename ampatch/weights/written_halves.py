"""Half weights that no optimizer updates, and so have no master: finds out what writes to them, and makes them float32.

Frozen weights may be half: nothing is lost. But user code may write to weights without an optimizer, as a momentum
teacher does. In half, it would lose every update below the type's resolution. So a weight that was written to is
float32 from then on. Owns also the float32 copies of such weights that state dicts get.

Methods that make tensors leave inference mode, as weights made there cannot be trained, and then turn gradients off:
leaving it turns them on.

Must not know optimizers, nor how a tensor's type is recorded.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ampatch.errors import UsageError
from ampatch.half_types import HALVES
from ampatch.torch_private.modules import APPLY_CODE
from ampatch.weights.exchange import exchange
from ampatch.weights.kept_values import Kept, moments_of
from ampatch.weights.untracked_writes import GivenData, has_memory, is_shared

_MOST_FRAMES = 8  # between `data` and a module that is being moved


class _Watched:
    """What is known of a half weight at the last look.

    Args:
        weight: the half weight; held weakly.

    Attributes:
        version: its version counter.
        given: what reading its ``data`` gives, once it was read.
        is_set: True if its ``data`` was set since, or written to.
        is_rounded: True if it has lost digits of values that were loaded into it.
    """

    __slots__ = ("given", "is_rounded", "is_set", "version", "weight")

    def __init__(self, weight: Tensor) -> None:
        self.weight = weakref.ref(weight)
        self.version = weight._version
        self.given: GivenData | None = None
        self.is_set = self.is_rounded = False

    def is_written_by_data(self) -> bool:
        """Returns True if the weight was written to through its ``data``."""
        self.is_set = self.is_set or (self.given is not None and self.given.is_written())
        return self.is_set

    def is_written(self, weight: Tensor) -> bool:
        """Returns True if the weight was written to since the last call."""
        # By what was counted, not by value: an update below half's resolution changes no value.
        is_written = self.is_written_by_data() or weight._version != self.version
        self.version, self.is_set = weight._version, False
        return is_written


class WrittenHalves:
    """The half weights without a master that are watched.

    Args:
        note_float32: called with a weight that has become float32.
    """

    def __init__(self, note_float32: Callable[[Tensor], object]) -> None:
        self._note_float32 = note_float32
        self._buffers: list[tuple[weakref.ref[Tensor], Kept]] = []
        self._widened: list[Tensor] = []  # until the caller of `widen_written` has them
        self._watched: dict[int, _Watched] = {}  # by id of the weight
        self._moments: tuple[list[int], list[int]] = [], []
        self._heard: list[_Watched] = []  # those among them whose ``data`` user code has read or set
        self._copies: dict[int, _Float32Copy] = {}  # by id of the weight; as long as user code has them
        self._left: list[tuple[Tensor, int]] = []  # half memory that widened weights had, and its version counter

    def watch(self, tensors: Iterable[Tensor]) -> None:
        """Watches these tensors too, from now on."""
        for each in tensors:
            if self._of(each) is None and has_memory(each) and each.numel():
                self._watched[id(each)] = _Watched(each)
        self._moments = [], []  # each is looked at once more

    def watch_buffer(self, buffer: Tensor, kept: Kept) -> None:
        """Copies writes to the float32 values of a half buffer to the buffer from now on, in `widen_written`."""
        self._buffers.append((weakref.ref(buffer), kept))

    def _of(self, tensor: Tensor) -> _Watched | None:
        found = self._watched.get(id(tensor))
        return found if found is not None and found.weight() is tensor else None

    def forget(self, tensor: Tensor) -> None:
        """Watches a tensor no longer: an optimizer updates it."""
        self._watched.pop(id(tensor), None)

    def on_access(self, tensor: Tensor, data: Tensor | None, *, is_read: bool) -> Tensor | None:
        """Notes that user code may write to a weight by its ``data``."""
        found = self._of(tensor)
        if found is None or _is_moved():
            return None
        if found.given is None and not found.is_set:
            self._heard.append(found)
        if data is None or not is_read:
            found.is_set, found.given = True, None
            return None
        if found.given is None:
            found.given = GivenData(data)
        return found.given.of(tensor)

    def widen_written(self) -> list[Tensor]:
        """Makes the weights float32 that were written to since the last look, also through a copy that was given.

        Copies to half buffers what was written to their float32 values.

        Returns:
            The weights that have become float32 since the last call.
        """
        for reference, kept in self._buffers:
            buffer = reference()
            if buffer is not None and kept.was_updated and buffer.dtype is kept.dtype:
                kept.synchronise(buffer)
        if not (self._watched or self._copies or self._widened):
            return []
        alive = [weight for each in self._watched.values() if (weight := each.weight()) is not None]
        is_written = any(each.is_written_by_data() for each in self._heard)
        if is_written or self._copies or self._widened or moments_of(alive) != self._moments:
            self._widen_each(alive)
        widened, self._widened = self._widened, []
        return widened

    def accept_writes(self) -> None:
        """Notes that what was written to weights since the last look has lost nothing, so that they stay half."""
        for each in self._watched.values():
            if (weight := each.weight()) is not None:
                each.is_written(weight)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _widen_each(self, alive: list[Tensor]) -> None:
        for key, given in list(self._copies.items()):
            self._widen_if_written(given)
            if not is_shared(given.copy):  # user code has no tensor of its memory any more
                del self._copies[key]
        self._watched = {id(each): self._watched[id(each)] for each in alive if each.dtype in HALVES}
        for each in alive:
            found = self._of(each)
            if found is not None and found.is_written(each):
                self._widen(each, each.detach().float())
        self._moments = moments_of([each for each in alive if self._of(each) is not None])
        self._heard = [each for each in self._watched.values() if each.given is not None]

    def _widen(self, tensor: Tensor, values: Tensor) -> None:
        """Makes a weight float32.

        By an exchange, so that the weight has a version counter of its own: tensors of the half memory keep theirs.
        """
        self.forget(tensor)
        other = nn.Parameter(values, tensor.requires_grad)
        if tensor.grad is not None:
            other.grad = tensor.grad.float()
        exchange([tensor], [other])
        self._note_float32(tensor)
        self._left.append((other, other._version))
        self._widened.append(tensor)

    def check_left(self) -> None:
        """Raises `UsageError` if user code has written to the half memory that a weight had before."""
        self._left = [left for left in self._left if is_shared(left[0])]
        for half, version in self._left:
            if half._version != version:
                raise UsageError(
                    f"user code writes to a tensor of the memory that a half weight of shape {tuple(half.shape)} had "
                    "before amp made it float32, since no optimizer updates it (a detached tensor, or a view). Such "
                    "a write no longer reaches the weight. Take the tensor from the model at each update; or keep the "
                    "model float32 (keep_fp32), or leave it out of amp.initialize."
                )

    @torch.inference_mode(False)
    @torch.no_grad()
    def note_loaded(self, tensor: Tensor, values: Tensor) -> None:
        """Notes that values were loaded into a weight; makes it float32 if it loses their digits a second time.

        The first time is a checkpoint, which the weight rounds as `initialize` did. From then on it is an average.
        """
        found = self._of(tensor)
        if found is None:
            return
        is_rounded = values.shape == tensor.shape and not torch.equal(values.to(tensor.device), tensor.to(values.dtype))
        found.is_written(tensor)  # by the load, which counts for itself
        if is_rounded and found.is_rounded:
            self._widen(tensor, values.detach().float().to(tensor.device, copy=True))
        found.is_rounded = found.is_rounded or is_rounded

    @torch.inference_mode(False)
    @torch.no_grad()
    def float32_copy_of(self, tensor: Tensor) -> Tensor:
        """Returns a float32 copy of a half weight; what the user writes to it counts, from the next look on."""
        given = self._copies.get(id(tensor))
        if given is not None:
            self._widen_if_written(given)
            if tensor.dtype not in HALVES:
                return tensor.detach()
        if given is None or not given.is_of(tensor):
            given = self._copies[id(tensor)] = _Float32Copy(tensor)
        return given.copy

    def _widen_if_written(self, given: _Float32Copy) -> None:
        tensor = given.tensor()
        if tensor is not None and tensor.dtype in HALVES and tensor.shape == given.copy.shape and given.was_written():
            values, copy = tensor.detach(), given.copy.to(tensor.device)
            is_same = torch.equal(values, given.values.to(tensor.device))
            # The copy itself, so that further writes to the state dict reach the weight, as they do in plain torch.
            self._widen(tensor, copy if is_same else torch.where(copy != given.values.float(), copy, values.float()))


def _is_moved() -> bool:
    """Returns True if a module is being moved, or converted, as a whole: its weights keep their values."""
    frame: Any = sys._getframe(1)
    for _ in range(_MOST_FRAMES):
        if frame is None or frame.f_code is APPLY_CODE:
            return frame is not None
        frame = frame.f_back
    return False


class _Float32Copy:
    """A float32 copy of half weights that user code got in their place.

    Args:
        tensor: the half weights.

    Attributes:
        tensor: weak reference to them.
        copy: float32 tensor of the same values.
        values: the values at that moment.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = weakref.ref(tensor)
        self.copy = tensor.detach().float()
        self.values = self.copy.to(tensor.dtype)
        self._looks = 0

    def was_written(self) -> bool:
        """Returns True if the copy was changed: by value at the first look, as torch does not count every write.

        At later looks by its version counter: user code may keep a state dict for long.
        """
        self._looks += 1
        return (self._looks == 1 or self.copy._version > 0) and not torch.equal(self.copy, self.values.float())

    def is_of(self, tensor: Tensor) -> bool:
        """Returns True if the copy is of this tensor and up to date."""
        is_alike = self.tensor() is tensor and (tensor.dtype, tensor.device) == (self.values.dtype, self.values.device)
        return is_alike and torch.equal(tensor, self.values)
