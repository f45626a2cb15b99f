"""Half parameters with a master that user code has replaced in a model: decides which parameter the optimizer updates.

torch calls a hook when a parameter is registered. Nothing is decided then, because the user may give the new parameter
to an optimizer later. Amp decides when it next uses the weights: before a forward pass, a step, saving and loading.
Owns the places in modules where parameters were replaced. Must never let values decide which parameter stays.
"""

from __future__ import annotations

import functools
import itertools
import operator
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from ampatch.errors import warn
from ampatch.ledger import PatchLedger
from ampatch.tracing import is_capturing
from ampatch.weights import optimizer_state
from ampatch.weights.conversion import Conversion
from ampatch.weights.conversion_plan import Plan
from ampatch.weights.exchange import ExchangedMasters
from ampatch.weights.untracked_writes import data_of, has_memory, is_shared

# For `map` over a list of modules: a line of Python for each takes several times as long.
_PARAMETERS = operator.attrgetter("_parameters")


@dataclass(frozen=True, slots=True)
class _Place:
    """A module's attribute where one parameter was replaced by another."""

    module: weakref.ref[nn.Module]
    name: str
    old: TensorWeakRef
    new: TensorWeakRef | None

    @classmethod
    def of(cls, module: nn.Module, name: str, old: Tensor, new: Tensor | None) -> _Place:
        """Returns the place by its module and name; keeps neither the module nor the parameters alive."""
        return cls(weakref.ref(module), name, TensorWeakRef(old), None if new is None else TensorWeakRef(new))

    def now(self) -> tuple[nn.Module, Tensor, nn.Parameter | None] | None:
        """Returns module, old parameter and present parameter; None if the module or the old parameter was deleted."""
        module, old = self.module(), self.old()
        return None if module is None or old is None else (module, old, module._parameters.get(self.name))

    def is_in_use(self) -> bool:
        """Returns True if a third tensor is there now, as in `torch.func.functional_call`, which puts it back."""
        now = self.now()
        return now is not None and now[2] is not (None if self.new is None else self.new()) and now[2] is not now[1]


class Places:
    """The places in a model's modules that hold some parameters.

    Args:
        found: modules with the name that each has for a parameter, and the parameter, which the caller keeps alive.
        searched: the number of parameters that were searched for.

    Attributes:
        searched: as given.
    """

    __slots__ = ("_ids", "_modules", "_names", "searched")

    def __init__(self, found: Sequence[tuple[nn.Module, str, Tensor]], searched: int) -> None:
        self.searched = searched
        self._modules = [weakref.ref(module) for module, _, _ in found]
        self._names = [name for _, name, _ in found]
        self._ids = [id(parameter) for _, _, parameter in found]

    def hold(self) -> bool:
        """Returns True if each place still holds its parameter."""
        try:
            return list(map(id, self._now())) == self._ids
        except AttributeError:  # a module was deleted
            return False

    def _now(self) -> Iterator[nn.Parameter | None]:
        return map(dict.get, map(_PARAMETERS, map(weakref.ref.__call__, self._modules)), self._names)

    def changed(self) -> Iterator[tuple[nn.Module, str, int]]:
        """Yields the places that hold another parameter now, with the id of the one before."""
        for reference, name, key in zip(self._modules, self._names, self._ids, strict=True):
            module = reference()
            if module is not None and id(module._parameters.get(name)) != key:
                yield module, name, key


_NOWHERE = Places((), 0)


class ReplacedParameters:
    """The half parameters of a session that user code has replaced in its models.

    Args:
        conversion: the record of converted tensors, and of the optimizers' claims on them.
        modules: the modules of converted models.
        adopted: function that returns the adopted optimizers.
        names: function that returns the names of all parameters of the models, by the parameter's id.
    """

    def __init__(
        self,
        conversion: Conversion,
        modules: Collection[nn.Module],
        adopted: Callable[[], Iterable[Any]],
        names: Callable[[], Mapping[int, str]],
    ) -> None:
        self._conversion, self._modules = conversion, modules
        self._adopted, self._names = adopted, names
        self._places = weakref.WeakKeyDictionary[ExchangedMasters, Places]()  # as `search` found them last
        self._noted: dict[tuple[int, str], _Place] = {}  # by id of the module and name; to be decided on
        self._given: dict[int, weakref.ref[Any]] = {}  # torch's optimizers that were given parameters lately, by id
        self._taken_out = WeakTensorKeyDictionary()  # new parameters that amp took out of a model -> their places
        self._untold: list[TensorWeakRef] = []  # those that were put back, until the user is told

    def watch_optimizers(self, ledger: PatchLedger) -> None:
        """Patches `torch.optim.Optimizer` to note the optimizers that are given parameters, adopted or not."""
        original, reference = torch.optim.Optimizer.add_param_group, weakref.ref(self)

        @functools.wraps(original)
        def add_param_group(optimizer: torch.optim.Optimizer, param_group: dict[str, Any]) -> None:
            original(optimizer, param_group)
            replaced = reference()
            if replaced is not None:
                key, given = id(optimizer), replaced._given
                given[key] = weakref.ref(optimizer, lambda _: given.pop(key, None))
                replaced.follow(optimizer)

        ledger.set(torch.optim.Optimizer, "add_param_group", add_param_group)

    def follow(self, optimizer: Any) -> None:
        """Puts parameters that an optimizer has back into the model, if amp took them out before it had them."""
        if not self._taken_out:
            return
        for parameter in optimizer_state.parameters_of(optimizer):
            for place in self._taken_out.get(parameter, ()):
                now = place.now()
                if now is not None and now[1] is now[2]:
                    module, old, _ = now
                    full = self._conversion.float32_of(module, place.name, old)
                    with torch.no_grad():
                        parameter.copy_(old if full is None else full)
                    setattr(module, place.name, parameter)

    def note(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        """Notes that a module is about to get a parameter, for `decide`."""
        known = module._parameters.get(name)
        if parameter is None or known is None or known is parameter:
            return
        self._note(module, name, known, parameter)
        noted = self._noted.get((id(module), name))
        old = None if noted is None or noted.module() is not module else noted.old()
        if old is not None:  # this one, or the one that the known parameter had replaced
            self._note(module, name, old, parameter)

    def _note(self, module: nn.Module, name: str, old: Tensor, new: Tensor | None) -> None:
        """Notes that a parameter was replaced, if it has a master."""
        if self._conversion.has_master(old):
            self._noted[id(module), name] = _Place.of(module, name, old, new)

    def search(self, masters: ExchangedMasters) -> None:
        """Looks for half parameters that user code has replaced in the models since the last call, by any means.

        Args:
            masters: the masters of one optimizer's parameters.
        """
        places, parameters = self._places.get(masters, _NOWHERE), masters.parameters()
        if places.hold() and places.searched == len(parameters):
            return
        by_id = {id(parameter): parameter for parameter in parameters}
        for module, name, key in places.changed():
            if key in by_id:
                self._note(module, name, by_id[key], module._parameters.get(name))
        held = ((module, *item) for module in self._modules for item in module._parameters.items())
        found = [(module, name, each) for module, name, each in held if each is not None and id(each) in by_id]
        self._places[masters] = Places(found, len(by_id))

    def decide(self, given: Iterable[Any] = ()) -> bool:
        """Decides on all parameters that were replaced since the last call.

        As in torch, the new parameter stays, and the optimizer goes on with the old one. A float32 parameter becomes
        half, like the one before. There is one exception. If no optimizer has the new parameter, it may be there only
        because amp made the old one half: libraries widen half weights. Then the old one is put back, with the new
        values, and `tell` tells the user.

        Args:
            given: optimizers that amp is about to adopt.

        Returns:
            True if new parameters were converted: those that an optimizer has need masters.
        """
        if not self._noted or is_capturing():
            return False
        noted = [place for place in self._noted.values() if not place.is_in_use()]
        self._noted = {key: place for key, place in self._noted.items() if place.is_in_use()}
        by_old: dict[int, _Replaced] = {}
        for place in noted:
            now = place.now()
            if now is not None and self._conversion.has_master(now[1]):
                module, old, new = now
                by_old.setdefault(id(old), _Replaced(old)).places.append((module, place.name, new))
        ids = {id(each) for module in self._modules for each in module._parameters.values()}
        updated = {id(each) for each in self._updated(given)}
        converts = False
        # In this order: leaving inference mode turns gradients on.
        with torch.inference_mode(False), torch.no_grad():
            for each in by_old.values():
                is_held = id(each.old) in ids
                if not is_held and each.is_widened(updated):
                    self._put_back(each)
                    continue
                converts = self._convert(each) or converts
                if not is_held and is_shared(each.old):
                    # Perhaps by nn.Parameter(old.detach()): a step writes all masters, also those without gradients.
                    each.old.data = data_of(each.old).clone()
        return converts

    def _updated(self, given: Iterable[Any]) -> Iterator[Tensor]:
        """Yields the parameters of all optimizers that are known, adopted or not."""
        lately = (optimizer for reference in list(self._given.values()) if (optimizer := reference()) is not None)
        for optimizer in itertools.chain(given, self._adopted(), lately):
            yield from optimizer_state.parameters_of(optimizer)

    def _put_back(self, replaced: _Replaced) -> None:
        old, new = replaced.old, replaced.new()[0]
        # The half values of a copy have lost the master's bits.
        if not torch.equal(new, old.float()):
            old.copy_(new)
            self._conversion.load(old, new.detach())
        for module, name, each in replaced.places:
            setattr(module, name, old)  # not by _parameters: recurrent layers have lists of their weights
            self._taken_out[each] = (*self._taken_out.get(each, ()), _Place.of(module, name, old, each))
        self._untold.append(TensorWeakRef(old))

    def _convert(self, replaced: _Replaced) -> bool:
        """Makes new float32 parameters half, as `initialize` does; returns True if there are any."""
        new = {
            id(each): (each, replaced.old.dtype)
            for each in replaced.new()
            if each.dtype is torch.float32 and has_memory(each) and each.device.type != "meta"
        }
        self._conversion.convert(Plan(new, {}, {}))
        return bool(new)

    def float32_of(self, module: nn.Module, name: str, tensor: Tensor) -> Tensor | None:
        """Returns the master's values of a float32 copy that has replaced a half parameter, until that is settled.

        Returns:
            float32; None if the tensor has replaced none, or has other values.
        """
        place = self._noted.get((id(module), name))
        now = None if place is None else place.now()
        if now is None or now[0] is not module or now[2] is not tensor:
            return None
        old = now[1]
        is_copy = (tensor.dtype, tensor.shape, tensor.device) == (torch.float32, old.shape, old.device)
        is_copy = is_copy and torch.equal(tensor, old.float())
        return self._conversion.float32_of(module, name, old) if is_copy else None

    def warn_of_put_back(self) -> None:
        """Tells of the parameters that were put back, before a step updates them.

        Warns:
            AmpWarning: there are any.
        """
        if not self._untold:
            return
        names = self._names()
        untold = [names[id(old)] for reference in self._untold if id(old := reference()) in names]
        self._untold.clear()
        if untold:
            others = f" and {len(untold) - 1} more" if untold[1:] else ""
            warn(
                f"{untold[0]}{others}: user code replaced half weights that have a "
                "float32 master by float32 parameters that no optimizer has. Amp has put the half weights back, with "
                "the new values, and the optimizer goes on with them. If a library has only widened them, as PEFT's "
                "load_adapter does, all is well. To train the new parameters, call optimizer.add_param_group before "
                "the next forward pass; to train neither, give the new ones requires_grad=False."
            )


@dataclass(frozen=True, slots=True)
class _Replaced:
    """A half parameter, and the places where it was replaced: module, name, and the present parameter there."""

    old: Tensor
    places: list[tuple[nn.Module, str, nn.Parameter | None]] = field(default_factory=list)

    def new(self) -> list[nn.Parameter]:
        """Returns the parameters in its places."""
        return [each for _, _, each in self.places if each is not None]

    def is_widened(self, updated: Collection[int]) -> bool:
        """Returns True if the new parameter may be the old one in float32, and is not updated by any optimizer."""
        old, new = self.old, self.new()
        return len(new) == len(self.places) and all(
            type(each) is nn.Parameter
            and each.dtype is torch.float32
            and each.requires_grad == old.requires_grad  # or the user freezes it
            and (each.shape, each.device, each.layout) == (old.shape, old.device, old.layout)
            and id(each) not in updated
            and (each is new[0] or torch.equal(each, new[0]))  # or the user unties them
            for each in new
        )
