"""Float32 masters that exist only while an optimizer steps, for a part of its bfloat16 parameters at a time.

Between two steps a parameter is bfloat16. With "split" an int16 remainder makes it the float32 master, bit for bit
(`ampatch.weights.split_weights`); with "stochastic" nothing is left of the master, which was rounded up or down at
random (`ampatch.weights.stochastic_rounding`). For a step, the parameters of a part stand for float32 tensors
(`ampatch.weights.exchange`), and these are put together from what there is. Gradients stay half.

Owns which parameters have such masters, and the parts. Must know neither scales nor whether a step is skipped.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ampatch.errors import OptionError, UsageError
from ampatch.half_types import HALVES
from ampatch.ledger import PatchLedger
from ampatch.native import kernels
from ampatch.torch_private import foreach
from ampatch.weights import copies, optimizer_state
from ampatch.weights.exchange import ExchangedMasters, exchange
from ampatch.weights.master_weights import own_methods, replace_method
from ampatch.weights.split_weights import SplitWeight, SplitWeights, check_as_converted
from ampatch.weights.stochastic_rounding import Rounding
from ampatch.weights.untracked_writes import data_of, moments_of

#: torch's optimizers that update each parameter by itself, and leave out those without a gradient.
_ONE_BY_ONE = frozenset(
    getattr(torch.optim, name)
    for name in (
        *("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam", "RAdam", "RMSprop"),
        *("Rprop", "SGD"),
    )
)
#: A part has this share of all elements, and at least so many.
_SHARE, _LEAST = 16, 2**20


class Claims(Protocol):
    """Records which optimizer owns a half parameter; see `ampatch.weights.conversion.Conversion`.

    Attributes:
        hears_writes: True if `TemporaryMasters.on_access` is told of writes that torch does not count.
    """

    hears_writes: bool

    def claim_rounded(self, parameter: nn.Parameter, owner: object, splits: bool) -> SplitWeight | None:
        """Has an owner update a parameter; returns the parameter with its remainder, None without one."""

    def release(self, parameter: nn.Parameter) -> torch.dtype:
        """Undoes this; returns the type that the parameter had before."""


@dataclass(frozen=True, slots=True, eq=False)
class Claimed:
    """A parameter that gets masters, and its remainder if it is split."""

    parameter: nn.Parameter
    split: SplitWeight | None


@dataclass(slots=True, eq=False)
class _Stand:
    """A parameter while it stands for a master.

    Attributes:
        claimed: the parameter.
        master: the float32 tensor.
        grad: the gradient that the master was given.
        versions: version counters of the master and of this gradient at that moment.
    """

    claimed: Claimed
    master: Tensor
    grad: Tensor | None = None
    versions: tuple[int, int] = (0, 0)


class TemporaryMasters(ExchangedMasters):
    """The temporary masters of one optimizer.

    Args:
        optimizer: the user's optimizer; held weakly.
        conversion: record of the half parameters, which keeps the remainders.
        kind: "split" or "stochastic".
        narrow_state: whether the optimizer's float32 state is bfloat16 between steps.
        name_of: function that returns the name of a model's parameter, for messages.

    Attributes:
        kind: as given.
        are_in_place: True while parameters stand for their masters.
    """

    def __init__(
        self,
        optimizer: Any,
        conversion: Claims,
        kind: str,
        narrow_state: bool,
        name_of: Callable[[Tensor], str],
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.kind, self._narrows = kind, narrow_state
        self._conversion, self._name_of = conversion, name_of
        self._known: dict[int, Claimed] = {}  # by id of the parameter
        self._splits, self._rounding = SplitWeights(name_of), Rounding()
        self._in_place: list[_Stand] = []
        self._hidden: dict[int, Tensor] = {}  # gradients of parameters whose turn it is not, by id
        self._runs = 0  # of steps
        # By user code, which may write there without being counted.
        self._data_was_read = not conversion.hears_writes
        self._state: object = None  # the optimizer's, when all of it was as it should be between steps

    def install(self, ledger: PatchLedger) -> None:
        """Takes the optimizer's parameters, and patches its methods that read or write them.

        Raises:
            UsageError: a parameter is in two optimizers, or is float16.
            OptionError: state is to be bfloat16, and the optimizer has none that can be reached.
        """
        optimizer = self._optimizer()
        assert optimizer is not None
        if self._narrows and optimizer_state.state_of(optimizer) is None:
            raise OptionError(
                f"optimizer_state='bfloat16' needs an optimizer with a mapping `state`, and this "
                f"{type(optimizer).__name__} has none. Hand in the optimizer inside it; or leave optimizer_state out."
            )
        ledger.on_undo(self._forget, optimizer)
        self.make_missing()
        for name in own_methods(optimizer):
            replace_method(ledger, optimizer, name, self._own_method)
        if isinstance(optimizer, torch.optim.Optimizer):
            replace_method(ledger, optimizer, "load_state_dict", self._with_masters)
            replace_method(ledger, optimizer, "__getstate__", self._getstate)

    def _own_method(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self.are_in_place:
            self._count_step()
        return self._with_masters(original, *args, **kwargs)

    def _getstate(self, original: Callable[..., Any]) -> Any:
        """Returns the state for a copy, whose parameters are float32; or for a pickle, whose are bfloat16."""
        state, parameters = dict(original()), [each.parameter for each in self._known.values()]
        types = (torch.bfloat16, torch.float32) if copies.is_copying() else (torch.float32, torch.bfloat16)
        state["state"] = optimizer_state.states_retyped(state["state"], parameters, *types)
        return state

    def make_missing(self) -> None:
        """Takes half parameters of the optimizer that it has got, or that were unfrozen, since the last call.

        Raises:
            UsageError: one is float16.
        """
        optimizer = self._optimizer()
        if self.are_in_place or optimizer is None:
            return
        self._take_writes()
        given = {id(each): each for each in optimizer_state.parameters_of(optimizer) if each.dtype in HALVES}
        new = [each for key, each in given.items() if key not in self._known and each.requires_grad]
        for parameter in new:
            if not isinstance(parameter, nn.Parameter):
                continue
            if parameter.dtype is not torch.bfloat16:
                raise UsageError(
                    f"{self._name_of(parameter)} is {parameter.dtype}; expected bfloat16 weights for "
                    f"master_weights={self.kind!r}. Type half_dtype='bfloat16', or master_weights=True."
                )
            split = self._conversion.claim_rounded(parameter, self, self.is_exact)
            self._known[id(parameter)] = Claimed(parameter, split)
            if split is not None:
                split.may_be_written = split.is_unannounced = not self._conversion.hears_writes
                self._splits.add(parameter, split)
        if new:
            self._state = None
            self._splits.note()
            self._widen_state(())
            self._narrow_state(self._known.values())

    def _take_writes(self) -> None:
        """Takes what user code has written to parameters since the last step."""
        for each in self._known.values():
            if each.parameter.dtype is not torch.bfloat16:
                check_as_converted(each.parameter, torch.bfloat16, each.parameter.shape, self._name_of)
        self._splits.take_writes()

    def _forget(self) -> None:
        optimizer = self._optimizer()
        for each in self._known.values():
            before = self._conversion.release(each.parameter)
            if optimizer is not None:
                optimizer_state.retype(optimizer, each.parameter, torch.bfloat16, torch.float32)
                optimizer_state.retype(optimizer, each.parameter, torch.float32, before)
        self._known.clear()
        self._splits.clear()

    def ids(self) -> Collection[int]:
        """Returns the ids of the parameters that have masters here."""
        return self._known.keys()

    @property
    def is_exact(self) -> bool:
        """True if the parameters have all bits of their masters between steps."""
        return self.kind == "split"

    def has(self, parameter: Tensor) -> bool:
        """Returns True if a parameter has a master in each step."""
        return id(parameter) in self._known

    def full_of(self, parameter: Tensor) -> Tensor:
        """Returns a parameter's float32 value, as a new tensor; a parameter without master itself."""
        known = self._known.get(id(parameter))
        if known is None:
            return parameter
        if known.split is None:
            return parameter.detach().float()
        if parameter.dtype is torch.bfloat16:
            known.split.synchronise(parameter)
        return known.split.values(parameter)

    @torch.no_grad()
    def load(self, parameter: Tensor, values: Tensor) -> None:
        """Gives a parameter a float32 value."""
        parameter.copy_(values)
        split = self._known[id(parameter)].split
        if split is not None:
            split.set(parameter, values.to(parameter.device).float())

    def as_plain_data(self) -> dict[str, Any]:
        """Returns the arguments, and the values of split parameters by their place in the optimizer."""
        parameters = enumerate(optimizer_state.parameters_of(self._optimizer()))
        values = {place: self.full_of(each) for place, each in parameters if self.is_exact and self.has(each)}
        return {"kind": self.kind, "narrow": self._narrows, "values": values}

    # As owner of converted parameters

    def synchronise_one(self, parameter: Tensor) -> None:
        """Drops the remainder of a parameter that user code has written to."""
        split = self._known[id(parameter)].split
        if split is not None:
            split.synchronise(parameter)

    def note_one(self, parameter: Tensor) -> None:
        """Does nothing: a parameter that was loaded has its remainder."""

    # Steps

    def _count_step(self) -> None:
        if self._narrows or not self.is_exact:
            self._rounding.count_step(self._optimizer())

    def _parts(self, whole: bool) -> list[list[Claimed]]:
        """Returns the parameters in parts, each of which a call of the optimizer's step updates."""
        if whole or type(self._optimizer()) not in _ONE_BY_ONE:
            return [list(self._known.values())]
        room = max(_LEAST, sum(each.parameter.numel() for each in self._known.values()) // _SHARE)
        parts: list[list[Claimed]] = [[]]
        elements = 0
        for each in self._known.values():
            if each.parameter.grad is None:
                continue
            if parts[-1] and elements + each.parameter.numel() > room:
                parts.append([])
                elements = 0
            parts[-1].append(each)
            elements += each.parameter.numel()
        return parts

    @contextlib.contextmanager
    def _in_turn(self, parts: Sequence[list[Claimed]]) -> Iterator[Iterable[list[Claimed]]]:
        """Context with an iterator over parts, in which no parameter of another part has a gradient.

        Parameters that have no master get their turn with the first part.
        """
        optimizer: Any = self._optimizer()
        if len(parts) == 1:
            yield parts
            return
        given = {id(each): each for each in optimizer_state.parameters_of(optimizer) if each.grad is not None}
        self._hidden = grads = {key: each.grad for key, each in given.items() if each.grad is not None}

        def hide(keys: Iterable[int]) -> None:
            for key in keys:
                given[key].grad = None

        def turns() -> Iterator[list[Claimed]]:
            hide(given.keys() & self._known.keys())
            yield parts[0]
            hide(given.keys() - self._known.keys())
            yield from parts[1:]

        try:
            yield turns()
        finally:
            self._hidden = {}
            for key, grad in grads.items():  # less those that the optimizer has cleared
                given[key].grad = grad

    def run(self, step: Callable[[Callable[[], object]], Any], is_whole: Callable[[], bool]) -> Any:
        """Calls an optimizer's step on the masters, once for each part; returns the last result."""
        self._count_step()
        result, parts = None, self._parts(is_whole())
        try:
            with self._in_turn(parts) as turns:
                for part in turns:
                    result = step(functools.partial(self.swap_in, part))
        finally:
            self._runs += 1
            self._splits.note()
        return result

    @torch.no_grad()
    def swap_in(self, part: Iterable[Claimed] | None = None) -> None:
        """Has parameters stand for their masters, put together now; None: all parameters."""
        part = list(self._known.values() if part is None else part)
        with torch.inference_mode(False):
            masters = kernels.float32_like([each.parameter for each in part])
        stands = [_Stand(each, master) for each, master in zip(part, masters, strict=True)]
        self._join(stands)
        try:
            self._widen_state(part)
            self._exchange_in(stands)
        except BaseException:  # such as one of missing memory
            self._narrow_state(part)
            raise

    def _join(self, stands: list[_Stand]) -> None:
        """Puts masters together from what there is."""
        masters = [each.master for each in stands]
        halves: list[Tensor] = [each.claimed.parameter for each in stands]
        if self.is_exact:
            kernels.join(halves, _remainders(stands), masters)
        elif stands:
            foreach.copy_(masters, halves)

    def _exchange_in(self, stands: list[_Stand]) -> None:
        given = [self._hidden.get(id(each.claimed.parameter), each.claimed.parameter.grad) for each in stands]
        for each, grad in zip(stands, _in_float32(given), strict=True):
            each.master.requires_grad_(each.claimed.parameter.requires_grad)
            each.grad = each.master.grad = grad
            each.versions = each.master._version, 0 if grad is None else grad._version
        self._in_place, self.are_in_place = stands, True  # first: Ctrl-C may come before the next line
        try:
            _exchange(stands)
        except BaseException:
            self._exchange_back()
            raise

    def _exchange_back(self) -> list[_Stand]:
        """Has parameters be half again, also if an exchange was interrupted: their types tell."""
        stands = self._in_place
        try:
            _exchange([each for each in stands if each.claimed.parameter.dtype is torch.float32])
        except BaseException:
            _exchange([each for each in stands if each.claimed.parameter.dtype is torch.float32])
            raise
        finally:
            self._in_place, self.are_in_place = [], False
        for each in stands:
            grad = each.master.grad
            if grad is not each.grad or (grad is not None and grad._version != each.versions[1]):
                self._give_back(each.claimed.parameter, grad)
        return stands

    def _give_back(self, parameter: nn.Parameter, grad: Tensor | None) -> None:
        """Gives a parameter the gradient that the optimizer has edited or cleared."""
        before = self._hidden.pop(id(parameter), None)
        if before is not None and grad is not None:  # it has had its turn
            self._hidden[id(parameter)] = grad.to(before.dtype)
        elif before is None:
            parameter.grad = None if grad is None else grad.to(getattr(parameter.grad, "dtype", parameter.dtype))

    @torch.no_grad()
    def swap_out(self, *, stepped: bool = True) -> None:
        """Has the parameters that stand for masters be half again, and rounds or splits the masters.

        Args:
            stepped: whether the optimizer has stepped, so that masters with gradients count as updated.
        """
        if self.are_in_place:
            stands = self._exchange_back()
            self._write(stands, stepped=stepped)
            claimed = [each.claimed for each in stands]
            del stands  # the masters' memory is free before the narrow state needs some
            self._narrow_state(claimed)

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        stands = self._exchange_back()
        with torch.no_grad():
            self._write(stands, to_nearest=True)
        halves: list[Tensor] = [each.claimed.parameter for each in stands]
        runs, moments = self._runs, moments_of(halves)
        try:
            yield
        finally:
            stands = stands if self._known else []  # none if amp was turned off meanwhile
            with torch.no_grad():
                if self._runs != runs:  # a step within the step, as SAM's second half
                    self._join(stands)
                    self._widen_state([each.claimed for each in stands])
                elif self._data_was_read or moments_of(halves) != moments:
                    for each in stands:
                        _take_edits(each)
            self._exchange_in(stands)

    @contextlib.contextmanager
    def for_methods(self) -> Iterator[None]:
        """Context for methods of the optimizer's class, which may read and write its parameters: on the masters."""
        if self.are_in_place:
            yield
            return
        self.make_missing()
        self.swap_in()
        try:
            yield
        finally:
            self.swap_out(stepped=False)
            self._splits.note()

    # Weights

    def on_access(self, tensor: Tensor, _: Tensor | None, *, is_read: bool) -> None:  # noqa: ARG002
        """Notes that user code may write to a parameter without being counted."""
        known = self._known.get(id(tensor))
        self._data_was_read = self._data_was_read or known is not None
        if known is not None and known.split is not None:
            known.split.may_be_written = True

    def _write(self, stands: list[_Stand], *, to_nearest: bool = False, stepped: bool = True) -> None:
        """Writes masters to their parameters, and to the remainders of split ones."""
        if not stands:
            return
        # A counted write breaks graphs that use the half weights: those that no step has updated keep theirs.
        halves = [
            each.claimed.parameter
            if (stepped and each.grad is not None) or each.master._version != each.versions[0]
            else data_of(each.claimed.parameter)
            for each in stands
        ]
        fulls = [each.master for each in stands]
        if self.is_exact:
            try:
                kernels.split(fulls, halves, _remainders(stands))
            finally:  # also after Ctrl-C: otherwise the remainders would seem to be of other values
                claimed = [each.claimed for each in stands]
                self._splits.note_step([(each.parameter, each.split) for each in claimed if each.split is not None])
        elif to_nearest:
            foreach.copy_(halves, fulls)
        else:
            self._rounding.round_weights(fulls, halves, [each.claimed.parameter for each in stands])

    def _widen_state(self, part: Iterable[Claimed]) -> None:
        """Makes bfloat16 state float32: the narrow one, or that of parameters that came half or was loaded past amp."""
        optimizer = self._optimizer()
        state = getattr(optimizer, "state", None)
        if state is not self._state:
            self._state, part = state, self._known.values()
        elif not self._narrows:
            return
        for each in part:
            optimizer_state.retype(optimizer, each.parameter, torch.bfloat16, torch.float32)

    def _narrow_state(self, part: Iterable[Claimed]) -> None:
        optimizer = self._optimizer()
        if self._narrows:
            self._rounding.narrow_state(optimizer, [each.parameter for each in part])
        self._state = getattr(optimizer, "state", None)


def _in_float32(grads: list[Tensor | None]) -> list[Tensor | None]:
    """Returns gradients in float32, each a copy unless it is float32 already."""
    half = {id(each): each for each in grads if each is not None and each.dtype in HALVES and not each.is_sparse}
    wide = kernels.float32_like(list(half.values()))
    if half:
        foreach.copy_(wide, list(half.values()))
    copies_of = dict(zip(half, wide, strict=True))
    return [None if each is None else copies_of.get(id(each), each).to(torch.float32) for each in grads]


def _take_edits(stand: _Stand) -> None:
    """Copies elements to a master that user code has written to its parameter since `_write`."""
    half, split, full = stand.claimed.parameter.detach(), stand.claimed.split, stand.master.detach()
    if split is None:
        own = full.to(half.dtype)
    elif split.is_in_sync(stand.claimed.parameter):
        return
    else:
        own = torch.empty_like(half)
        kernels.split([full], [own], [torch.empty_like(split.remainder)])
    full.copy_(torch.where(half == own, full, half.float()))


def _exchange(stands: list[_Stand]) -> None:
    exchange([each.claimed.parameter for each in stands], [each.master for each in stands])


def _remainders(stands: list[_Stand]) -> list[Tensor]:
    return [each.claimed.split.remainder for each in stands if each.claimed.split is not None]
