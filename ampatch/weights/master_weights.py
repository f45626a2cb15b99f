"""The float32 masters of one optimizer's half parameters, which the optimizer updates in their place.

The optimizer's groups hold the model's half parameters. While its own code runs, these objects stand for the masters
(`ampatch.weights.exchange`). Owns the pairs of parameter and master, and the exchange. `ampatch.weights.master_values`
owns the values of both, and `ampatch.weights.master_gradients` their gradients. Must know neither scales nor whether a
step is skipped.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from ampatch.errors import UsageError
from ampatch.ledger import PatchLedger
from ampatch.weights import optimizer_state
from ampatch.weights.conversion import Conversion
from ampatch.weights.exchange import ExchangedMasters, exchange, replace_method
from ampatch.weights.master_gradients import MasterGradients, Pair
from ampatch.weights.master_values import MasterValues

_IS_TRAINED = operator.attrgetter("requires_grad")


class MasterWeights(ExchangedMasters):
    """The masters of one optimizer.

    Args:
        optimizer: the user's optimizer; held weakly.
        conversion: record that keeps float32 values from before parameters were narrowed, and each master as long as
            its parameter lives.
        wanted: True to make masters; if False, all methods are no-ops.
        name_of: function that returns the name of a model's parameter, for messages.
        take_in: makes missing masters, and takes what user code has written to weights, and to gradients unless these
            are scaled; called before methods of the optimizer's class, which may read both.

    Attributes:
        wanted: the argument ``wanted``.
        gradients: gradients of the masters and of the half parameters.
        values: values of both.
        are_in_place: True while the optimizer's parameters stand for their masters.
    """

    def __init__(
        self,
        optimizer: Any,
        conversion: Conversion,
        wanted: bool,
        name_of: Callable[[Tensor], str],
        take_in: Callable[[], object],
    ) -> None:
        super().__init__(optimizer, conversion, name_of)
        self.wanted, self._take_in = wanted, take_in
        self._conversion = conversion
        self._pairs: dict[int, Pair] = {}  # by id of the half parameter
        self._masters: dict[int, nn.Parameter] = {}  # by the same ids
        self._parameters: dict[int, nn.Parameter] = {}  # by id of the master
        self.values = MasterValues(self._pairs, name_of)
        self.gradients = MasterGradients(self._pairs, self._known)

    def install(self, ledger: PatchLedger) -> None:
        """Makes the masters, and patches the optimizer's methods that must handle them.

        Raises:
            UsageError: a parameter is in two optimizers.
        """
        if not self.wanted:
            return
        super().install(ledger)
        optimizer = self._optimizer()
        if hasattr(optimizer, "add_param_group"):
            replace_method(ledger, optimizer, "add_param_group", self._add_param_group)

    def make_missing(self) -> None:
        """Makes masters for half parameters of the optimizer that have none: in new groups, or unfrozen since.

        Raises:
            UsageError: the optimizer's groups hold a master, or a parameter that another optimizer has.
        """
        optimizer = self._optimizer() if self.wanted and not self.are_in_place else None
        given = [] if optimizer is None else list(optimizer_state.parameters_of(optimizer))
        if self._are_all(given):  # as in nearly every step
            return
        if not self._parameters.keys().isdisjoint(map(id, given)):
            raise UsageError(
                f"a group of this {type(optimizer).__name__} holds a float32 master. Groups hold the model's "
                "parameters: put back the parameter that was there."
            )
        without = self._without_master(given)
        if not without:
            return
        self.values.synchronise()  # must come before all pairs are recorded again
        new: dict[int, Pair] = {}
        try:
            for parameter in without:
                new[id(parameter)] = Pair(parameter, *self._conversion.claim(parameter, self.values))
        except BaseException:
            for pair in new.values():
                self._conversion.release(pair.parameter)
            raise
        self._pairs.update(new)
        self._known.update({key: pair.parameter for key, pair in new.items()})
        self._masters.update({key: pair.master for key, pair in new.items()})
        self._parameters.update({id(pair.master): pair.parameter for pair in new.values()})
        self.values.take_pairs()
        self.gradients.take_initial(new.values())
        self._state = None
        self._widen_state()

    def _forget(self) -> None:
        super()._forget()
        self._pairs.clear()
        self._masters.clear()
        self._parameters.clear()
        self.values.forget()

    def __len__(self) -> int:
        return len(self._pairs)

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
        return len(given) == len(self._known) and all(map(operator.is_, given, self._known.values()))

    def parameters_without_master(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Returns those of the optimizer's parameters that have no master."""
        return [updated for updated in self.masters_of(parameters) if id(updated) not in self._parameters]

    # Weights

    def on_access(self, tensor: Tensor, data: Tensor | None, *, is_read: bool) -> Tensor | None:
        """Notes that user code may write to a master without being counted."""
        return None if self.are_in_place else self.values.data.on_access(tensor, data, is_read=is_read)

    def synchronise(self) -> None:
        """Copies what user code has written to half weights, or to masters; see `MasterValues.synchronise`."""
        if not self.are_in_place:
            self.values.synchronise()

    # The exchange

    def run(self, step: Callable[[Callable[[], object]], Any], is_whole: Callable[[], bool]) -> Any:  # noqa: ARG002
        """Calls an optimizer's step once, on all masters."""
        try:
            result = step(self.swap_in)
            self.swap_out()
        finally:
            self.swap_out()  # after an error; or Ctrl-C came as the call above began
        return result

    def swap_in(self) -> None:
        """Has the optimizer's parameters stand for their masters."""
        self._widen_state()
        parameters, masters = self._known.values(), self._masters.values()
        if list(map(_IS_TRAINED, parameters)) != list(map(_IS_TRAINED, masters)):
            for parameter, master in zip(parameters, masters, strict=True):
                master.requires_grad_(parameter.requires_grad)
        self.are_in_place = True  # first: Ctrl-C may come before the next line
        self._exchange()

    def _exchange(self) -> None:
        """Exchanges all parameters with their masters; if that fails, every parameter is half."""
        try:
            exchange(list(self._known.values()), list(self._masters.values()))
        except BaseException:  # Ctrl-C may come between two pairs: the types tell which are exchanged
            wide = [pair for pair in self._pairs.values() if pair.parameter.dtype is not pair.kept.dtype]
            exchange([pair.parameter for pair in wide], [pair.master for pair in wide])
            self.are_in_place = False
            raise

    def swap_out(self, *, stepped: bool = True) -> None:
        """Has the optimizer's parameters be the model's half weights again, and rounds the masters to them.

        Args:
            stepped: whether the optimizer has stepped, so that masters with gradients count as updated.
        """
        if not self.are_in_place:
            return
        self._exchange()
        self.are_in_place = False
        if self._pairs:
            self.values.check_that_masters_are_updated(type(self._optimizer()).__name__)
            self.values.write([*self._known.values()], [*self._masters.values()], stepped)

    def _prepare(self) -> None:
        self._take_in()

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        self.swap_out()
        try:
            yield
        finally:
            self.gradients.copy_edits()
            self.synchronise()
            self.swap_in()

    # Patched methods of the optimizer

    def _zero_grad(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self.swapped_out():
            result = super()._zero_grad(original, *args, **kwargs)
            self.gradients.drop_sums(self._pairs.keys())
            self.gradients.copy_edits(takes_new=False)
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
