"""The float32 masters of one optimizer's half parameters; keeps the values of both the same.

The optimizer's groups hold the model's half parameters. While its own code runs, these objects stand for the masters
(`ampatch.weights.exchange`), so it updates the masters. Owns the pairs of parameter and master, and the exchange;
`ampatch.weights.master_gradients` owns their gradients. Must know neither scales nor whether a step is skipped.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from ampatch.errors import UsageError, in_every_layer
from ampatch.grouping import grouped
from ampatch.half_types import HALVES
from ampatch.ledger import PatchLedger
from ampatch.native import kernels
from ampatch.weights import copies, optimizer_state
from ampatch.weights.conversion import Conversion, Marks
from ampatch.weights.exchange import ExchangedMasters, exchange
from ampatch.weights.master_gradients import MasterGradients, Pair, by_device
from ampatch.weights.replaced_parameters import Places, ReplacedParameters
from ampatch.weights.untracked_writes import GivenData, data_of

_ALL = slice(None)
_IS_TRAINED = operator.attrgetter("requires_grad")
# Methods of optimizers that `MasterWeights` or `AdoptedOptimizer` replaces by others, or that touch no parameter.
_KNOWN_METHODS = frozenset({"step", "zero_grad", "add_param_group", "state_dict"})


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

    def was_written(self, place: int) -> bool:
        """Returns True if the values of a half weight have changed since `note`; syncs with the device."""
        return bool((kernels.fingerprints(self._halves[_only(place)]) != self._of_halves[_only(place)]).any())


class MasterWeights(ExchangedMasters):
    """The masters of one optimizer.

    Args:
        optimizer: the user's optimizer; held weakly.
        conversion: record that keeps float32 values from before parameters were narrowed, and each master as long as
            its parameter lives.
        wanted: True to make masters; if False, all methods are no-ops.
        name_of: function that returns the name of a model's parameter, for messages.

    Attributes:
        wanted: the argument ``wanted``.
        gradients: gradients of the masters and of the half parameters.
        are_in_place: True while the optimizer's parameters stand for their masters.
    """

    def __init__(
        self, optimizer: Any, conversion: Conversion, wanted: bool, name_of: Callable[[Tensor], str] = str
    ) -> None:
        self.wanted = wanted
        self.name_of = name_of
        self._memory: dict[int, list[nn.Parameter]] | None = None  # masters by address of storage; None until needed
        self._given: dict[int, GivenData] = {}  # by the same addresses
        self._groups: list[_Group] = []
        self._places: dict[int, tuple[_Group, int]] = {}  # by id of the half parameter
        self._state: object = None  # the optimizer's, when all of it was float32
        self._held: Places | None = None  # where the models had the half parameters at the last search
        self._searched = 0  # the number of pairs then
        self._optimizer = weakref.ref(optimizer)
        self._conversion = conversion
        self._pairs: dict[int, Pair] = {}  # by id of the half parameter
        self._parameters: dict[int, nn.Parameter] = {}  # by id of the master
        self._masters: dict[int, nn.Parameter] = {}  # by id of the half parameter
        self.gradients = MasterGradients(self._pairs, self._parameters)
        self._marks = Marks([], [])  # of all half weights, then all masters, when they last were the same

    def install(self, ledger: PatchLedger) -> None:
        """Makes the masters, and patches the optimizer's methods that must handle them.

        Raises:
            UsageError: a parameter is in two optimizers.
            OptionError: the optimizer's groups cannot be written to.
        """
        if not self.wanted:
            return
        optimizer = self._optimizer()
        assert optimizer is not None
        ledger.on_undo(self.forget_masters, optimizer)
        self.make_missing()
        replace_method(ledger, optimizer, "zero_grad", self._zero_grad)
        if hasattr(optimizer, "add_param_group"):
            replace_method(ledger, optimizer, "add_param_group", self._add_param_group)
        for name in own_methods(optimizer):
            replace_method(ledger, optimizer, name, self._with_masters)
        if isinstance(optimizer, torch.optim.Optimizer):
            replace_method(ledger, optimizer, "load_state_dict", self._with_masters)
            replace_method(ledger, optimizer, "__getstate__", self._getstate)

    def make_missing(self) -> None:
        """Makes masters for half parameters of the optimizer that have none: in new groups, or unfrozen since."""
        without = self._without_masters()
        if not without:
            return
        self.synchronise(by_value=True)  # must come before `_note_in_step` records all pairs again
        new: dict[int, Pair] = {}
        try:
            for parameter in without:
                new[id(parameter)] = Pair(parameter, *self._conversion.claim(parameter, self))
        except BaseException:
            for pair in new.values():
                self._conversion.release(pair.parameter)
            raise
        self._pairs.update(new)
        self._parameters.update({id(pair.master): pair.parameter for pair in new.values()})
        self._masters.update({key: pair.master for key, pair in new.items()})
        kept = [pair.kept for pair in self._pairs.values()]
        marks = [*(each.half_mark for each in kept), *(each.full_mark for each in kept)]
        self._marks = Marks(marks, [*self._parameters.values(), *self._masters.values()])
        self._note_in_step()
        self.gradients.take_initial(new.values())
        self._state = None
        self._widen_state()

    def _without_masters(self) -> list[nn.Parameter]:
        """Returns the trained half parameters of the optimizer that have no master yet, each once."""
        optimizer = self._optimizer() if self.wanted and not self.are_in_place else None
        given = [] if optimizer is None else list(optimizer_state.parameters_of(optimizer))
        if self._are_all(given):  # as in nearly every step
            return []
        held = {id(each): each for each in given if id(each) not in self._masters}
        if not self._parameters.keys().isdisjoint(held):
            raise UsageError(
                f"a group of this {type(optimizer).__name__} holds a float32 master. Groups hold the model's "
                "parameters: put back the parameter that was there."
            )
        return [
            each
            for each in held.values()
            if each.dtype in HALVES and each.requires_grad and isinstance(each, nn.Parameter)
        ]

    def forget_masters(self) -> None:
        """Forgets the masters; `Conversion.restore` gives their values back to the parameters."""
        optimizer = self._optimizer()
        for pair in self._pairs.values():
            before = self._conversion.release(pair.parameter)
            if optimizer is not None:
                optimizer_state.retype(optimizer, pair.parameter, torch.float32, before)
        known: list[Any] = [self._pairs, self._parameters, self._masters, self._groups, self._given, self._places]
        for each in known:
            each.clear()
        self._held, self._memory, self._marks = None, None, Marks([], [])

    def __len__(self) -> int:
        return len(self._pairs)

    def ids(self) -> Collection[int]:
        """Returns the ids of the parameters that have masters here."""
        return self._pairs.keys()

    def parameter_of(self, tensor: Tensor) -> Tensor:
        """Returns the model's parameter of a master; returns any other tensor as it is."""
        return self._parameters.get(id(tensor), tensor)

    def masters_of(self, parameters: Iterable[Tensor]) -> Iterable[Tensor]:
        """Returns what the optimizer updates for its parameters: the master of each, or the parameter itself."""
        if self.are_in_place or not self._pairs:
            return parameters
        given = list(parameters)
        return self._masters.values() if self._are_all(given) else map(self._masters.get, map(id, given), given)

    def _are_all(self, given: list[Tensor]) -> bool:
        """Returns True if these are the parameters that have masters, in their order."""
        return len(given) == len(self._parameters) and all(map(operator.is_, given, self._parameters.values()))

    def is_master(self, tensor: Tensor) -> bool:
        """Returns True if a tensor is one of these masters."""
        return id(tensor) in self._parameters

    def parameters_without_master(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Returns the optimizer's parameters that are not masters."""
        masters = self._parameters
        return [parameter for parameter in parameters if id(parameter) not in masters]

    def search_replaced(self, replaced: ReplacedParameters) -> None:
        """Looks for half parameters that user code has replaced in the models since the last call, by any means."""
        is_as_before = self._held is not None and self._held.hold()
        if is_as_before and len(self._pairs) == self._searched:
            return
        parameters = [pair.parameter for pair in self._pairs.values()]
        if self._held is not None and not is_as_before:
            replaced.search(self._held, parameters)
        self._held, self._searched = replaced.places_of(parameters), len(parameters)

    # Weights

    def on_access(self, tensor: Tensor, data: Tensor | None, *, is_read: bool) -> Tensor | None:
        """Notes that user code may write to a master without being counted."""
        masters = [] if self.are_in_place else self._masters_at(tensor)
        if not masters:
            return None
        address = _address_of(tensor)
        given = self._given.get(address)
        if data is None or data.is_inference() or (is_read and given is not None and not given.has_type(data.dtype)):
            increment_version(masters)
            return None
        if given is None or not is_read:
            given = self._given[address] = GivenData(data)
        return given.of(tensor) if is_read else None

    def _masters_at(self, tensor: Tensor) -> list[nn.Parameter]:
        """Returns the masters that share memory with a tensor."""
        address = _address_of(tensor)
        if self._memory is None or (self.is_master(tensor) and address not in self._memory):
            self._memory = grouped((_address_of(each), each) for each in self._masters.values())
            self._given = {at: given for at, given in self._given.items() if at in self._memory}
        return self._memory.get(address, []) if address else []

    def _count_writes(self) -> None:
        """Counts writes to the tensors that ``data`` gave as writes to the masters there."""
        written = [address for address, given in self._given.items() if given.is_written()]
        if written:
            increment_version([each for each in self._masters.values() if _address_of(each) in written])

    def synchronise(self, by_value: bool = False) -> None:
        """Copies user writes since `write` from half weights to masters, or from masters to half weights.

        Args:
            by_value: True to compare the values of all half weights, which also finds writes that torch does not
                count; reads all half weights once.

        Raises:
            UsageError: the model was converted to another type; or both tensors of a pair were written to.
        """
        if self.are_in_place:
            return
        self._count_writes()
        is_counted = not self._marks.are_now()
        if not is_counted and not by_value:
            return
        special = [pair for pair in self._pairs.values() if is_counted and not pair.kept.may_be_edited(pair.parameter)]
        for pair in special:
            self._synchronise(pair)
        for group in self._groups:
            group.copy_edits()
        if special:
            self._note_in_step()
        elif is_counted:
            self._marks.renew()

    def synchronise_one(self, parameter: Tensor) -> None:
        """Synchronises one pair, by value."""
        self._count_writes()
        pair = self._pairs[id(parameter)]
        if not pair.kept.may_be_edited(parameter):
            self._synchronise(pair)
            self.note_one(parameter)
        elif parameter.numel():
            group, place = self._places[id(parameter)]
            group.copy_edits(_only(place))

    def note_one(self, parameter: Tensor) -> None:
        """Records that a half parameter now equals its rounded master."""
        pair = self._pairs[id(parameter)]
        pair.kept.note(parameter)
        if parameter.numel():
            group, place = self._places[id(parameter)]
            group.renew(place)

    def give_back(self) -> None:
        """Copies the user's last writes to half weights to the masters, which `Conversion.restore` gives back."""
        self.swap_out()
        for group in self._groups:
            group.copy_edits()

    def _synchronise(self, pair: Pair) -> None:
        kept, parameter = pair.kept, pair.parameter
        # `_was_written` syncs with the device: call it only if torch has counted a write to the master.
        if kept.was_updated and self._was_written(pair) and not _are_alike(pair):
            raise UsageError(
                f"{self.name_of(parameter)}: half weights and their float32 master were both written to since they "
                "last were the same, so amp cannot know which of the two counts. Write to only one of them; now, under "
                "torch.no_grad(), type parameter.copy_(master) or master.copy_(parameter)."
            )
        try:
            kept.synchronise(parameter)
        except UsageError as error:
            name = self.name_of(parameter)
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

    def _note_in_step(self) -> None:
        """Records that all half weights now equal the rounded masters."""
        if self._marks.renew():
            self._memory = None
            pairs = [pair for pair in self._pairs.values() if pair.parameter.numel()]
            self._groups = list(map(_Group, by_device(pairs)))
            self._places = {
                id(pair.parameter): (group, place) for group in self._groups for place, pair in enumerate(group.pairs)
            }
        else:
            for group in self._groups:
                group.note()

    # The exchange

    def run(self, step: Callable[[Callable[[], object]], Any], is_whole: Callable[[], bool]) -> Any:  # noqa: ARG002
        """Calls an optimizer's step once, on all masters."""
        return step(self.swap_in)

    def swap_in(self) -> None:
        """Has the optimizer's parameters stand for their masters."""
        self._widen_state()
        parameters, masters = self._parameters.values(), self._masters.values()
        if list(map(_IS_TRAINED, parameters)) != list(map(_IS_TRAINED, masters)):
            for parameter, master in zip(parameters, masters, strict=True):
                master.requires_grad_(parameter.requires_grad)
        self.are_in_place = True  # first: Ctrl-C may come before the next line
        self._exchange()

    def _exchange(self) -> None:
        """Exchanges all parameters with their masters; if that fails, every parameter is half."""
        try:
            exchange(list(self._parameters.values()), list(self._masters.values()))
        except BaseException:  # Ctrl-C may come between two pairs: the types tell which are exchanged
            wide = [pair for pair in self._pairs.values() if pair.parameter.dtype is not pair.kept.dtype]
            exchange([pair.parameter for pair in wide], [pair.master for pair in wide])
            self.are_in_place = False
            raise

    def _widen_state(self) -> None:
        """Makes the state of parameters with masters float32: of those that came half, or if it was loaded past amp."""
        optimizer = self._optimizer()
        state = getattr(optimizer, "state", None)
        if state is not self._state:
            self._state = state
            for pair in self._pairs.values():
                optimizer_state.retype(optimizer, pair.parameter, pair.kept.dtype, torch.float32)

    def swap_out(self, *, stepped: bool = True) -> None:
        """Has the optimizer's parameters be the model's half weights again, and rounds the masters to them.

        Args:
            stepped: as for `write`.
        """
        if not self.are_in_place:
            return
        self._exchange()
        self.are_in_place = False
        self._check_that_masters_are_updated()
        self.write(stepped)

    @contextlib.contextmanager
    def for_methods(self) -> Iterator[None]:
        """Context for methods of the optimizer's class, which may read and write its parameters: on the masters."""
        if self.are_in_place:
            yield
            return
        self.make_missing()
        self.synchronise(by_value=True)
        self.gradients.copy_edits()
        self.swap_in()
        try:
            yield
        finally:
            self.swap_out(stepped=False)

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        self.swap_out()
        try:
            yield
        finally:
            self.gradients.copy_edits()
            self.synchronise(by_value=True)
            self.swap_in()

    def _check_that_masters_are_updated(self) -> None:
        """Checks, after a step and before `write`, that the optimizer has not written to half weights.

        Raises:
            UsageError: it has, by tensors of the same memory that it keeps.
        """
        if self._marks.are_now(len(self._pairs)):
            return
        for pair in self._pairs.values():
            if not _are_alike(pair) and not pair.kept.was_updated:
                raise UsageError(
                    f"this {type(self._optimizer()).__name__} has written to the memory of the model's "
                    f"{self.name_of(pair.parameter)}, and not to its parameters, which stand for float32 masters while "
                    "it steps. Make the optimizer before amp.initialize; or use master_weights=False, or "
                    "opt_level='O1'."
                )

    def write(self, stepped: bool = True) -> None:
        """Writes the masters into the half weights, rounded.

        Args:
            stepped: whether the optimizer has stepped, so that masters with gradients count as updated.
        """
        # All masters are copied: an optimizer may write to parameters without a gradient, and through .data, which
        # torch does not count. But a counted write breaks autograd graphs that use the half weights. So half weights
        # whose master was probably not updated are written to uncounted, which keeps their graphs valid.
        if not self._pairs:
            return
        halves: list[Tensor] = [*self._parameters.values()]
        masters: list[Tensor] = [*self._masters.values()]
        with torch.no_grad():
            if not stepped or optimizer_state.lack_gradients(masters):
                for place, pair in enumerate(self._pairs.values()):
                    if not (stepped and pair.master.grad is not None) and not pair.kept.was_updated:
                        halves[place] = data_of(pair.parameter)
            kernels.copy_to_half(masters, halves)
        self._note_in_step()

    # Patched methods of the optimizer

    def _zero_grad(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self.swapped_out():
            result = original(*args, **kwargs)
            self.gradients.note_zero_grad()
        return result

    def _add_param_group(self, original: Callable[..., Any], param_group: Any) -> Any:
        optimizer = self._optimizer()
        assert optimizer is not None
        known = len(optimizer.param_groups)
        result = original(param_group)
        try:
            self.make_missing()
        except BaseException:
            del optimizer.param_groups[known:]
            raise
        return result

    def _getstate(self, original: Callable[..., Any]) -> Any:
        """Returns the state for a copy, or for a pickle: that of an ordinary optimizer of half parameters."""
        state = dict(original())
        if not copies.is_copying():
            state["state"] = optimizer_state.states_retyped(state["state"], self._parameters.values(), torch.float32)
        return state


def replace_method(ledger: PatchLedger, optimizer: Any, name: str, replacement: Callable[..., Any]) -> None:
    """Replaces a method of an optimizer on the object; ``replacement`` gets the original, then its arguments."""
    original, reference = getattr(optimizer, name), weakref.ref(optimizer)

    @functools.wraps(original)
    def method(me: Any, *args: Any, **kwargs: Any) -> Any:
        if me is not reference():  # `me` is a deep copy, of an optimizer whose class copies every attribute
            return getattr(type(me), name)(me, *args, **kwargs)
        return replacement(original, *args, **kwargs)

    method.__name__ = name
    ledger.set(optimizer, name, types.MethodType(method, optimizer))


def own_methods(optimizer: object) -> list[str]:
    """Returns the names of public methods that classes other than torch's give an optimizer, but known ones."""
    methods = {
        name: value
        for kind in reversed(type(optimizer).__mro__)
        for name, value in vars(kind).items()
        if isinstance(value, types.FunctionType) and kind.__module__.partition(".")[0] != "torch"
    }
    return [name for name in methods if not name.startswith("_") and name not in _KNOWN_METHODS]


def dropping_sums(
    original: Callable[..., None], all_masters: Callable[[], Iterable[MasterWeights]]
) -> Callable[..., None]:
    """Returns a wrapper of `torch.nn.Module.zero_grad` that also drops the masters' sums of the module's parameters.

    Inside a block the half gradients are zeros, and masters hold the sums of earlier blocks. Writing zeros onto zeros
    leaves no trace, so amp would miss ``zero_grad(set_to_none=False)`` without the wrapper.
    """

    @functools.wraps(original)
    def zero_grad(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        original(module, *args, **kwargs)
        for masters in all_masters():
            masters.gradients.drop_sums(set(map(id, module.parameters())))

    return zero_grad


def _address_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _only(place: int) -> slice:
    return slice(place, place + 1)


def _are_alike(pair: Pair) -> bool:
    """Returns True if half weights equal their rounded master, or the two have different shapes."""
    half, full = pair.parameter.detach(), pair.master.detach()
    return half.shape != full.shape or torch.equal(full.to(half), half)
