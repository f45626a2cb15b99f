"""The values of one optimizer's half parameters and of their float32 masters: keeps both the same.

Owns which of the two counts after user code has written to one of them. Torch does not count every write, so values
decide where the count cannot. Must know neither the optimizer nor when it steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from ampatch.errors import UsageError, in_every_layer
from ampatch.grouping import grouped
from ampatch.native import kernels
from ampatch.weights import optimizer_state
from ampatch.weights.kept_values import Marks, check_as_converted
from ampatch.weights.master_gradients import Pair, by_device
from ampatch.weights.untracked_writes import GivenData, data_of

_ALL = slice(None)


class _Group:
    """Pairs on one device, and fingerprints of the half weights when they last equalled the rounded masters.

    Args:
        pairs: pairs of tensors with at least one element. While the group is in use, these must keep their memory.
    """

    def __init__(self, pairs: list[Pair]) -> None:
        self.pairs = pairs
        with torch.inference_mode(False):  # code outside of inference mode changes these tensors too
            self._halves = [kernels.values_of(pair.parameter.detach()) for pair in pairs]
            self._masters = [kernels.values_of(pair.master.detach()) for pair in pairs]
            self._of_halves = kernels.fingerprints(self._halves)

    def note(self, places: slice = _ALL) -> None:
        """Records that half weights now equal the rounded masters."""
        self._of_halves[places].copy_(kernels.fingerprints(self._halves[places]))

    def renew(self, place: int) -> None:
        """Records the same as `note` for one pair, whose tensors may have other memory now."""
        pair = self.pairs[place]
        self._halves[place] = kernels.values_of(pair.parameter.detach())
        self._masters[place] = kernels.values_of(pair.master.detach())
        self.note(_only(place))

    def copy_edits(self, places: slice = _ALL) -> None:
        """Copies elements of half weights that were written to since `note`, counted or not, to the masters."""
        halves, before = self._halves[places], self._of_halves[places]
        now = kernels.fingerprints(halves)
        kernels.copy_edits(halves, self._masters[places], before, now, of_gradients=False)
        before.copy_(now)

    def fingerprint(self, place: int) -> Tensor:
        """Returns the fingerprint of a half weight at `note`."""
        return self._of_halves[_only(place)].clone()

    def was_written(self, place: int) -> bool:
        """Returns True if the values of a half weight have changed since `note`; syncs with the device."""
        return not torch.equal(kernels.fingerprints(self._halves[_only(place)]), self._of_halves[_only(place)])


class MasterValues:
    """The values of the pairs of one optimizer.

    Args:
        pairs: pairs by id of the half parameter; a dict that its owner updates, to call `take_pairs` then.
        name_of: function that returns the name of a model's parameter, for messages.

    Attributes:
        data: the memory of masters to which user code may write uncounted.
    """

    def __init__(self, pairs: Mapping[int, Pair], name_of: Callable[[Tensor], str]) -> None:
        self._pairs, self._name_of = pairs, name_of
        self.data = MasterData()
        self._marks = Marks([], [])  # of all half weights, then all masters, when they last were the same
        self._groups: list[_Group] = []
        self._places: dict[int, tuple[_Group, int]] = {}  # by id of the half parameter
        # By id of the half parameter: the master's memory before it took what user code has written to the half weight,
        # and the fingerprint that this had then.
        self._before: dict[int, tuple[Tensor, Tensor]] = {}

    def take_pairs(self) -> None:
        """Takes the pairs that there are now, whose half weights equal the rounded masters."""
        pairs = self._pairs.values()
        halves, masters = [pair.parameter for pair in pairs], [pair.master for pair in pairs]
        marks = [*(pair.kept.half_mark for pair in pairs), *(pair.kept.full_mark for pair in pairs)]
        self._marks = Marks(marks, [*halves, *masters])
        self._note()

    def _note(self) -> None:
        """Records that all half weights now equal the rounded masters."""
        if self._marks.renew():
            pairs = self._pairs.values()
            self.data.follow([pair.master for pair in pairs])
            self._groups = list(map(_Group, by_device(pair for pair in pairs if pair.parameter.numel())))
            self._places = {
                id(pair.parameter): (group, place) for group in self._groups for place, pair in enumerate(group.pairs)
            }
        else:
            for group in self._groups:
                group.note()

    def synchronise(self) -> None:
        """Copies user writes since `write` from half weights to masters, or from masters to half weights.

        Compares the values of all half weights, which also finds writes that torch does not count.

        Raises:
            UsageError: the model was converted to another type; or both tensors of a pair were written to.
        """
        self.data.count_writes()
        is_counted = not self._marks.are_now()
        special = [pair for pair in self._pairs.values() if is_counted and not pair.kept.may_be_edited(pair.parameter)]
        for pair in special:
            self._synchronise(pair)
        self.copy_edits()
        if special:
            self._note()
        elif is_counted:
            self._marks.renew()

    def show_masters(self) -> None:
        """Copies what user code has written to masters to the half weights, for a forward.

        Its writes to half weights do not reach masters until a master is used. User code may take such a write back, as
        with averages for a validation, or with the first half of SAM's steps. The master then has lost nothing.

        Raises:
            UsageError: as `synchronise`.
        """
        self.data.count_writes()
        if self._marks.are_now():
            return
        for pair in self._pairs.values():
            if pair.kept.was_updated:
                self._synchronise(pair)
                self.note_one(pair.parameter)
            else:
                self._check_as_converted(pair)
        self._marks.renew_versions()

    def copy_edits(self) -> None:
        """Copies elements of half weights that user code has written to, counted or not, to the masters."""
        self._put_back()
        for group in self._groups:
            group.copy_edits()

    @torch.no_grad()
    def full_of(self, parameter: Tensor) -> Tensor:
        """Returns a half parameter's master, with what user code has written to either; syncs with the device.

        If it has written to the half parameter, the master's values of before are kept. `synchronise` puts them back if
        user code has put the half weights back by then: averages are saved while a model has them for a validation.
        """
        self.data.count_writes()
        pair = self._pairs[id(parameter)]
        is_edited = pair.kept.may_be_edited(parameter)
        if parameter.numel() and not pair.kept.was_updated:
            group, place = self._places[id(parameter)]
            if is_edited and not group.was_written(place):
                return pair.master
            self._before.setdefault(id(parameter), (pair.master.detach().clone(), group.fingerprint(place)))
            if is_edited:
                group.copy_edits(_only(place))
        if not is_edited:
            self._synchronise(pair)
        self.note_one(parameter)
        return pair.master

    @torch.no_grad()
    def _put_back(self) -> None:
        """Gives masters their earlier values back, if their half weights are what they were then."""
        before, self._before = self._before, {}
        for key, (values, fingerprint) in before.items():
            pair = self._pairs[key]
            if pair.kept.was_updated or pair.parameter.dtype is not pair.kept.dtype:
                continue
            now = kernels.fingerprints([kernels.values_of(pair.parameter.detach())])
            if now.device == fingerprint.device and torch.equal(now, fingerprint):
                pair.master.copy_(values)
                self.note_one(pair.parameter)

    def note_one(self, parameter: Tensor) -> None:
        """Records that a half parameter now equals its rounded master."""
        self._pairs[id(parameter)].kept.note(parameter)
        if parameter.numel():
            group, place = self._places[id(parameter)]
            group.renew(place)

    def _synchronise(self, pair: Pair) -> None:
        kept, parameter = pair.kept, pair.parameter
        # `_was_written` syncs with the device: call it only if torch has counted a write to the master.
        if kept.was_updated and self._was_written(pair) and not _are_alike(pair):
            raise UsageError(
                f"{self._name_of(parameter)}: half weights and their float32 master were both written to since they "
                "last were the same, so amp cannot know which of the two counts. Write to only one of them; now, under "
                "torch.no_grad(), type parameter.copy_(master) or master.copy_(parameter)."
            )
        self._check_as_converted(pair)
        kept.synchronise(parameter)

    def _check_as_converted(self, pair: Pair) -> None:
        kept, parameter = pair.kept, pair.parameter
        try:
            check_as_converted(parameter, kept.dtype, kept.shape)
        except UsageError as error:
            name = self._name_of(parameter)
            module = name.rpartition(".")[0]
            hint = ""
            if parameter.dtype is torch.float32 and module:
                hint = (
                    f" If the model's own code made it float32, as routers of experts do, type amp.initialize(..., "
                    f"keep_fp32=[{in_every_layer(module)!r}])."
                )
            raise UsageError(f"{name}: {error}{hint}") from None

    def _was_written(self, pair: Pair) -> bool:
        """Returns True if user code has written to a half weight since it equalled its rounded master."""
        parameter = pair.parameter
        if not pair.kept.half_mark.is_now(parameter):
            return True
        if not parameter.numel():
            return False
        group, place = self._places[id(parameter)]
        return group.was_written(place)

    def check_that_masters_are_updated(self, kind: str) -> None:
        """Checks, after a step and before `write`, that the optimizer has not written to half weights.

        Args:
            kind: the name of the optimizer's class.

        Raises:
            UsageError: it has, by tensors of the same memory that it keeps.
        """
        if self._marks.are_now(len(self._pairs)):
            return
        for pair in self._pairs.values():
            if not _are_alike(pair) and not pair.kept.was_updated:
                raise UsageError(
                    f"this {kind} has written to the memory of the model's {self._name_of(pair.parameter)}, and not "
                    "to its parameters, which stand for float32 masters while it steps. Make the optimizer before "
                    "amp.initialize; or use master_weights=False, or opt_level='O1'."
                )

    def write(self, halves: list[Tensor], masters: list[Tensor], stepped: bool) -> None:
        """Writes the masters into the half weights, rounded.

        Args:
            halves: all half weights.
            masters: all masters.
            stepped: whether the optimizer has stepped, so that masters with gradients count as updated.
        """
        # All masters are copied: an optimizer may write to parameters without a gradient, and through .data, which
        # torch does not count. But a counted write breaks autograd graphs that use the half weights. So half weights
        # whose master was probably not updated are written to uncounted, which keeps their graphs valid.
        with torch.no_grad():
            if not stepped or optimizer_state.lack_gradients(masters):
                for place, pair in enumerate(self._pairs.values()):
                    if not (stepped and pair.master.grad is not None) and not pair.kept.was_updated:
                        halves[place] = data_of(pair.parameter)
            kernels.copy_to_half(masters, halves)
        self._note()

    def forget(self) -> None:
        """Forgets all pairs."""
        self._marks, self._groups, self._places, self.data = Marks([], []), [], {}, MasterData()
        self._before = {}


class MasterData:
    """The memory of masters, to which user code may write through ``data`` without being counted."""

    def __init__(self) -> None:
        self._given: dict[int, GivenData] = {}  # by address of the storage
        self.follow([])

    def follow(self, masters: list[nn.Parameter]) -> None:
        """Takes the masters that there are now, which may have moved."""
        self._masters = {id(each): each for each in masters}
        self._by_address: dict[int, list[nn.Parameter]] | None = None  # until it is needed

    def on_access(self, tensor: Tensor, data: Tensor | None, *, is_read: bool) -> Tensor | None:
        """Notes that user code may write to a master without being counted."""
        address = tensor.untyped_storage().data_ptr()
        masters = self._sharing(tensor, address)
        if not masters:
            return None
        given = self._given.get(address)
        if data is None or data.is_inference() or (is_read and given is not None and not given.has_type(data.dtype)):
            increment_version(masters)
            return None
        if given is None or not is_read:
            given = self._given[address] = GivenData(data)
        return given.of(tensor) if is_read else None

    def _sharing(self, tensor: Tensor, address: int) -> list[nn.Parameter]:
        """Returns the masters that share memory with a tensor, whose storage has this address."""
        if self._by_address is None or (address not in self._by_address and id(tensor) in self._masters):
            masters = self._masters.values()
            self._by_address = grouped((each.untyped_storage().data_ptr(), each) for each in masters)
            self._given = {at: given for at, given in self._given.items() if at in self._by_address}
        return self._by_address.get(address, []) if address else []

    def count_writes(self) -> None:
        """Counts writes to the tensors that ``data`` gave as writes to the masters there."""
        written = {address for address, given in self._given.items() if given.is_written()}
        if written:
            masters = self._masters.values()
            increment_version([each for each in masters if each.untyped_storage().data_ptr() in written])


def _only(place: int) -> slice:
    return slice(place, place + 1)


def _are_alike(pair: Pair) -> bool:
    """Returns True if half weights equal their rounded master, or the two have different shapes."""
    half, full = pair.parameter.detach(), pair.master.detach()
    return half.shape != full.shape or torch.equal(full.to(half), half)
