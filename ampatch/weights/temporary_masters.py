"""Float32 masters that exist only while an optimizer steps, for a part of its bfloat16 parameters at a time.

Between two steps a parameter is bfloat16. With "split" it keeps an int16 remainder: weight and remainder are the
float32 master, bit for bit (`ampatch.weights.split_weights`). With "stochastic" it keeps only the weight, which is the
master rounded up or down at random (`ampatch.weights.stochastic_rounding`). For a step, float32 tensors are made from
the weights and their remainders, and the parameters of a part stand for these (`ampatch.weights.exchange`). Gradients
stay half.

Owns the masters while they exist. Must know neither scales nor whether a step is skipped.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ampatch.errors import OptionError, UsageError, warn
from ampatch.half_types import HALVES
from ampatch.ledger import PatchLedger
from ampatch.native import kernels
from ampatch.torch_private import foreach
from ampatch.tracing import is_capturing
from ampatch.weights import optimizer_state
from ampatch.weights.exchange import ExchangedMasters, Releases, exchange
from ampatch.weights.kept_values import check_as_converted
from ampatch.weights.split_weights import Split, SplitWeight
from ampatch.weights.step_parts import Turns, parts_of
from ampatch.weights.stochastic_rounding import Rounded, Rounding
from ampatch.weights.untracked_writes import data_of

_MOST_IDLE = 8  # first steps without an update, as when gradients are accumulated, before the user is warned


class Claims(Releases, Protocol):
    """Records which optimizer owns a half parameter; see `ampatch.weights.conversion.Conversion`."""

    def claim_rounded(self, parameter: nn.Parameter, owner: object, splits: bool) -> SplitWeight | None:
        """Has an owner update a parameter; returns the parameter with its remainder, None without one."""


@dataclass(slots=True, eq=False)
class _Stand:
    """A parameter while it stands for a master.

    Attributes:
        parameter: the parameter.
        master: the float32 tensor.
        grad: the gradient that the master was given.
        versions: version counters of the master and of this gradient at that moment.
    """

    parameter: Tensor
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
        is_exact: True if the parameters have all bits of their masters between steps.
    """

    state_type = torch.bfloat16

    def __init__(
        self,
        optimizer: Any,
        conversion: Claims,
        kind: str,
        narrow_state: bool,
        name_of: Callable[[Tensor], str],
    ) -> None:
        super().__init__(optimizer, conversion, name_of)
        self.kind, self._narrows = kind, narrow_state
        self._conversion = conversion
        self.is_exact = kind == "split"
        self._rounding = Rounding(is_used=narrow_state or not self.is_exact)
        self._form = Split(name_of) if self.is_exact else Rounded(self._rounding)
        self._turns = Turns()
        self._in_place: list[_Stand] = []
        self._runs = 0  # of steps
        self._is_idle = True  # until a step has changed a master
        # Optimizers of heavyball find the state of a parameter by its address, and keep views of it.
        self._keeps_addresses = any(each.__module__.startswith("heavyball.") for each in type(optimizer).__mro__)

    def install(self, ledger: PatchLedger) -> None:
        """Takes the optimizer's parameters, and patches its methods that read or write them.

        Raises:
            UsageError: a parameter is in two optimizers, or is float16.
            OptionError: state is to be bfloat16, and the optimizer has none that can be reached.
        """
        optimizer = self._optimizer()
        if self._narrows and optimizer_state.state_of(optimizer) is None:
            raise OptionError(
                f"optimizer_state='bfloat16' needs an optimizer with a mapping `state`, and this "
                f"{type(optimizer).__name__} has none. Hand in the optimizer inside it; or leave optimizer_state out."
            )
        super().install(ledger)

    def make_missing(self) -> None:
        """Takes half parameters of the optimizer that it has got, or that were unfrozen, since the last call.

        Raises:
            UsageError: one is float16.
        """
        optimizer = self._optimizer()
        if self.are_in_place or optimizer is None:
            return
        for each in self._known.values():
            if each.dtype is not torch.bfloat16:
                check_as_converted(each, torch.bfloat16, each.shape, self.name_of)
        self._form.take_writes()
        new = self._without_master(optimizer_state.parameters_of(optimizer))
        for parameter in new:
            if parameter.dtype is not torch.bfloat16:
                raise UsageError(
                    f"{self.name_of(parameter)} is {parameter.dtype}; expected bfloat16 weights for "
                    f"master_weights={self.kind!r}. Type half_dtype='bfloat16', or master_weights=True."
                )
            split = self._conversion.claim_rounded(parameter, self._form, self.is_exact)
            self._known[id(parameter)] = parameter
            self._form.add(parameter, split)
        if new:
            self._state = None
            self._widen_state()
            self._narrow_state(self._known.values())

    _prepare = make_missing

    def _forget(self) -> None:
        super()._forget()
        self._form.clear()

    def has(self, parameter: Tensor) -> bool:
        """Returns True if a parameter has a master."""
        return id(parameter) in self._known

    def full_of(self, parameter: Tensor) -> Tensor:
        """Returns a parameter's float32 value, as a new tensor; a parameter without master itself."""
        return self._form.full_of(parameter) if self.has(parameter) else parameter

    @torch.no_grad()
    def load(self, parameter: Tensor, values: Tensor) -> None:
        """Gives a parameter a float32 value."""
        self._form.set(parameter, values)

    def as_plain_data(self) -> dict[str, Any]:
        """Returns the arguments, and the values of split parameters by their place in the optimizer."""
        parameters = enumerate(optimizer_state.parameters_of(self._optimizer()))
        values = {place: self.full_of(each) for place, each in parameters if self.is_exact and self.has(each)}
        return {"kind": self.kind, "narrow": self._narrows, "values": values}

    # Steps

    def run_method(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls a public method that the optimizer's class adds to torch's, on the masters."""
        if not self.are_in_place:
            self._rounding.count_step(self._optimizer())
        return self._with_masters(original, *args, **kwargs)

    def run(self, step: Callable[[Callable[[], object]], Any], is_whole: Callable[[], bool]) -> Any:
        """Calls an optimizer's step on the masters, once for each part; returns the last result."""
        optimizer, parameters = self._optimizer(), self._known.values()
        self._rounding.count_step(optimizer)
        result, parts = None, [list(parameters)] if is_whole() else parts_of(optimizer, parameters)
        with self._turns.taken(optimizer, parts, self.ids()) as turns:
            try:
                for part in turns:
                    result = step(functools.partial(self.swap_in, part))
                    self.swap_out()
            finally:
                self._runs += 1
                self.swap_out()  # after an error; or Ctrl-C came as the call above began
        return result

    @torch.no_grad()
    def swap_in(self, part: Iterable[Tensor] | None = None) -> None:
        """Has parameters stand for their masters, put together now; None: all parameters."""
        halves: list[Tensor] = list(self._known.values() if part is None else part)
        with torch.inference_mode(False):
            masters = kernels.float32_like(halves)
        self._form.join(halves, masters)
        self._forget_addresses()
        try:
            self._widen_part(halves)
            self._exchange_in([_Stand(*pair) for pair in zip(halves, masters, strict=True)])
        except BaseException:  # such as one of missing memory
            self._narrow_state(halves)
            raise

    def _exchange_in(self, stands: list[_Stand]) -> None:
        given = self._turns.gradients_of(_halves(stands))
        for each, grad in zip(stands, _in_float32(given), strict=True):
            each.master.requires_grad_(each.parameter.requires_grad)
            each.grad = each.master.grad = grad
            each.versions = each.master._version, 0 if grad is None else grad._version
        self._in_place, self.are_in_place = stands, True  # first: Ctrl-C may come before the next line
        try:
            exchange(_halves(stands), _masters(stands))
        except BaseException:
            self._exchange_back()
            raise

    def _exchange_back(self) -> list[_Stand]:
        """Has parameters be half again, also if an exchange was interrupted: their types tell."""
        stands = self._in_place
        try:
            _exchange_wide(stands)
        except BaseException:
            _exchange_wide(stands)
            raise
        finally:
            self._in_place, self.are_in_place = [], False
        for each in stands:
            grad = each.master.grad
            if grad is not each.grad or (grad is not None and grad._version != each.versions[1]):
                self._turns.set_gradient(each.parameter, grad)
        return stands

    @torch.no_grad()
    def swap_out(self, *, stepped: bool = True) -> None:
        """Has the parameters that stand for masters be half again, and rounds or splits the masters.

        Args:
            stepped: whether the optimizer has stepped, so that masters with gradients count as updated.
        """
        if self.are_in_place:
            stands = self._exchange_back()
            if stepped and self._is_idle:
                self._watch_for_updates([each for each in stands if each.grad is not None])
            self._write(stands, stepped=stepped)
            halves = _halves(stands)
            del stands  # the masters' memory is free before the narrow state needs some
            self._forget_addresses()
            self._narrow_state(halves)

    def _watch_for_updates(self, stands: list[_Stand]) -> None:
        """Warns if all of an optimizer's first steps have left masters with gradients as they were; may sync."""
        if is_capturing() or not stands:
            return
        self._is_idle = all(_is_unchanged(each, self._form) for each in stands)
        if self._is_idle and self._runs == _MOST_IDLE:
            self._is_idle = False
            warn(
                f"{_MOST_IDLE} steps of this {type(self._optimizer()).__name__} have changed none of its parameters. "
                "If it updates a buffer of its own, of which the parameters were views when it was made, the model is "
                f"not trained: master_weights={self.kind!r} makes masters anew for each step. Type "
                "master_weights=True, or opt_level='O4'."
            )

    def _forget_addresses(self) -> None:
        """Has an optimizer that keeps addresses look at them again, since masters have new memory each time."""
        if self._keeps_addresses:
            optimizer: Any = self._optimizer()
            optimizer.mapping_inverse.clear()
            optimizer.mapping.clear()

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        stands = self._exchange_back()
        with torch.no_grad():
            self._write(stands, to_nearest=True)
        runs = self._runs
        try:
            yield
        finally:
            stands = stands if self._known else []  # none if amp was turned off meanwhile
            halves = _halves(stands)
            with torch.no_grad():
                if self._runs != runs:  # a step within the step, as SAM's second half
                    self._form.take_writes()  # after it
                    self._form.join(halves, _masters(stands))
                    self._widen_part(halves)
                else:
                    for each in stands:
                        half, full = each.parameter.detach(), each.master.detach()
                        full.copy_(torch.where(half == self._form.rounded(full), full, half.float()))
            self._exchange_in(stands)

    def _write(self, stands: list[_Stand], *, to_nearest: bool = False, stepped: bool = True) -> None:
        """Writes masters to their parameters, and to the remainders of split ones."""
        if not stands:
            return
        # A counted write breaks graphs that use the half weights: those that no step has updated keep theirs.
        memory: list[Tensor] = [
            each.parameter
            if (stepped and each.grad is not None) or each.master._version != each.versions[0]
            else data_of(each.parameter)
            for each in stands
        ]
        self._form.write(_masters(stands), memory, _halves(stands), to_nearest=to_nearest)

    def _widen_part(self, part: Iterable[Tensor]) -> None:
        """Makes the state of a part float32: the narrow one, or any that is half."""
        self._widen_state()
        optimizer = self._optimizer()
        for parameter in part if self._narrows else ():
            optimizer_state.retype(optimizer, parameter, torch.bfloat16, torch.float32)

    def _narrow_state(self, part: Iterable[Tensor]) -> None:
        if self._narrows:
            self._rounding.narrow_state(self._optimizer(), part)
        self._note_state()  # the step may have replaced it


def _is_unchanged(stand: _Stand, form: Split | Rounded) -> bool:
    before = kernels.float32_like([stand.parameter])
    form.join([stand.parameter], before)
    return torch.equal(before[0], stand.master)


def _halves(stands: list[_Stand]) -> list[Tensor]:
    return [each.parameter for each in stands]


def _masters(stands: list[_Stand]) -> list[Tensor]:
    return [each.master for each in stands]


def _exchange_wide(stands: list[_Stand]) -> None:
    """Exchanges those parameters and masters again that were exchanged."""
    wide = [each for each in stands if each.parameter.dtype is torch.float32]
    exchange(_halves(wide), _masters(wide))


def _in_float32(grads: list[Tensor | None]) -> list[Tensor | None]:
    """Returns gradients in float32, each a copy unless it is float32 already."""
    half = {id(each): each for each in grads if each is not None and each.dtype in HALVES and not each.is_sparse}
    wide = kernels.float32_like(list(half.values()))
    if half:
        foreach.copy_(wide, list(half.values()))
    copies_of = dict(zip(half, wide, strict=True))
    return [None if each is None else copies_of.get(id(each), each).to(torch.float32) for each in grads]
