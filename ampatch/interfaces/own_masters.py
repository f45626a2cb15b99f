"""The masters of the optimizer inside a `MixedPrecision`: entries of its state, or there only while it steps.

Both kinds answer the same questions, so that `MixedPrecision` does not ask which one it has. Owns when a half parameter
and its master in the state were last equal. Must not know gradient scales, nor the hooks of state dicts.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ampatch.errors import OptionError, UsageError
from ampatch.half_types import HALVES
from ampatch.native import kernels
from ampatch.scaling.users_optimizer import has_own_step, hooks_of
from ampatch.switch import WithoutCasts
from ampatch.torch_private import foreach
from ampatch.weights import optimizer_state
from ampatch.weights.exchange import exchanged, refusing_backward, unzipped
from ampatch.weights.kept_values import unrounded
from ampatch.weights.split_weights import SplitWeight
from ampatch.weights.temporary_masters import TemporaryMasters
from ampatch.weights.untracked_writes import names_of_one_memory

#: Key of the master in the state of a parameter.
MASTER = "master"


class _Synced(NamedTuple):
    """Type and version counters of a parameter and its master when the parameter last equalled the rounded master."""

    parameter: Tensor  # kept alive, so that no other tensor gets its id
    dtype: torch.dtype
    version: int
    of_master: int

    @classmethod
    def now(cls, pairs: Iterable[tuple[Tensor, Tensor]]) -> dict[int, _Synced]:
        """Returns those of pairs of parameter and master, by id of the parameter."""
        return {id(each): cls(each, each.dtype, each._version, master._version) for each, master in pairs}

    def is_only_master_written(self, master: Tensor) -> bool:
        """Returns True if torch has counted a write to the master since, and none to the parameter."""
        return self.version == self.parameter._version and self.of_master != master._version


class StateMasters:
    """Masters that are entries of an optimizer's state, except while it steps or loads.

    Args:
        owner: keeps the optimizer as its attribute ``optimizer``, which users may replace; held weakly.
        dtype: type of the masters.
        in_place: pairs of parameter and master, of a copy that was made during a step: it cannot step.
    """

    def __init__(self, owner: Any, dtype: torch.dtype, in_place: Iterable[tuple[Tensor, Tensor]] = ()) -> None:
        self._owner, self._dtype = weakref.ref(owner), dtype
        self._synced: dict[int, _Synced] = {}  # by id of the parameter
        self._in_place = {id(pair[0]): pair for pair in in_place}  # by id of the parameter, during a step

    @property
    def _optimizer(self) -> Any:
        return self._owner().optimizer  # type: ignore[union-attr]

    @torch.no_grad()
    def begin(self, values: Mapping[int, Tensor]) -> None:
        """Makes the masters, with initial values by id of the parameter; the parameters get these values, rounded.

        Raises:
            OptionError: a parameter is a DTensor.
        """
        self.check_new(optimizer_state.parameters_of(self._optimizer))
        for parameter in optimizer_state.parameters_of(self._optimizer):
            master = self._of(parameter)
            if master is not None and id(parameter) in values:
                master.copy_(values[id(parameter)])
                parameter.copy_(master)
        self.synchronise()

    def as_plain_data(self) -> list[tuple[Tensor, Tensor]]:
        """Returns pairs of parameter and master, during a step; otherwise the optimizer's state has the masters."""
        return list(self._in_place.values())

    @property
    def are_in_place(self) -> bool:
        """True while the optimizer steps or loads."""
        return bool(self._in_place)

    def _of(self, parameter: Tensor) -> Tensor | None:
        """Returns the master of a parameter, and makes it if there is none; None if the parameter needs none."""
        if self._in_place:  # not in the state now
            pair = self._in_place.get(id(parameter))
            return None if pair is None else pair[1]
        # torch does not promote 8-bit types, and no optimizer updates them.
        is_narrower = parameter.is_floating_point() and 1 < parameter.dtype.itemsize < self._dtype.itemsize
        if not is_narrower or torch.promote_types(parameter.dtype, self._dtype) is not self._dtype:
            _retire(self._optimizer.state.get(parameter, {}), parameter)
            return None
        state = self._optimizer.state.setdefault(parameter, {})
        if MASTER not in state:
            # The master is an nn.Parameter, as some optimizers check for that; each step sets its gradient.
            if state:  # the optimizer has stepped before, in half
                state.update(optimizer_state.retyped(dict(state), parameter.dtype, self._dtype, parameter))
            state[MASTER] = nn.Parameter(parameter.detach().to(self._dtype), requires_grad=parameter.requires_grad)
        return state[MASTER]  # type: ignore[no-any-return]

    def widens(self, parameter: Tensor) -> bool:
        """Returns True if a parameter has a master, so that its gradient may be unscaled in the master's type."""
        return self._of(parameter) is not None

    def full_of(self, parameter: Tensor) -> Tensor:
        """Returns the master of a parameter; the parameter itself if it has none."""
        master = self._of(parameter)
        return parameter if master is None else master

    updated = full_of  # what a step updates

    def check_new(self, parameters: Any) -> None:
        """Raises `OptionError` if one of some parameters, or the only one, is a half DTensor."""
        _unsharded(parameters, self._dtype)

    def make_missing(self) -> None:
        """Makes masters of parameters that the optimizer has got."""
        for parameter in optimizer_state.parameters_of(self._optimizer):
            self._of(parameter)

    @torch.no_grad()
    @WithoutCasts()
    def synchronise(self) -> list[tuple[Tensor, Tensor]]:
        """Copies user writes to half parameters to their masters; returns all pairs of parameter and master."""
        if self._in_place:
            return list(self._in_place.values())
        each_once = list({id(each): each for each in optimizer_state.parameters_of(self._optimizer)}.values())
        pairs = [(each, master) for each in each_once if (master := self._of(each)) is not None]
        written = []
        for parameter, master in pairs:
            synced = self._synced.get(id(parameter))
            if synced is not None and synced.dtype is not parameter.dtype:  # as after model.half()
                master.copy_(unrounded(parameter, master, [synced.dtype]))
                parameter.copy_(master)
            if synced is None or not synced.is_only_master_written(master):
                written.append((parameter, master))
        kernels.copy_differing(*unzipped(written))
        self._synced |= _Synced.now(written)
        return pairs

    # Steps

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        """Context in which the state has no masters; then rounds them to the parameters."""
        pairs = self.synchronise()
        state = self._optimizer.state
        try:  # from here on, as Ctrl-C must not lose a master
            self._in_place = {id(parameter): (parameter, master) for parameter, master in pairs}
            for parameter, master in pairs:
                master.requires_grad_(parameter.requires_grad)
                del state[parameter][MASTER]
                if not state[parameter]:  # an optimizer may treat an empty dict as state that it has made
                    del state[parameter]
            yield
        finally:
            self._round()
            self._synced |= _Synced.now(pairs)
            self._in_place = {}
            for parameter, master in pairs:
                master.grad = None
                self._optimizer.state.setdefault(parameter, {})[MASTER] = master

    def step(self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls the optimizer's step on the masters."""
        with exchanged(self._in_place.values()):
            return step(*args, **kwargs)

    def run_method(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls a method of the optimizer's class on the masters and their gradients, which it may clear.

        Raises:
            UsageError: a backward pass in the method reaches the half parameters.
        """
        if self._in_place:
            return original(*args, **kwargs)
        with self.stepping():
            self.take_gradients()
            pairs = self._in_place.values()
            with refusing_backward((parameter for parameter, _ in pairs), self._optimizer):
                result = self.step(original, args, kwargs)
            for parameter, master in pairs:
                if master.grad is None:
                    parameter.grad = None
            return result

    def evaluate(self, closure: Callable[[], Any]) -> Any:
        """Calls the closure of a step, which has the half parameters."""
        with exchanged(self._in_place.values()):  # back
            self._round()
            result = closure()
            self.take_gradients()
            return result

    @torch.no_grad()
    @WithoutCasts()
    def take_gradients(self) -> None:
        """Copies the parameters' gradients to the masters."""
        for parameter, master in self._in_place.values():
            grad = parameter.grad
            master.grad = None if grad is None else grad.to(master.dtype, copy=True)

    @torch.no_grad()
    @WithoutCasts()
    def _round(self) -> None:
        parameters, masters = unzipped(self._in_place.values())
        if self._dtype is torch.float32:
            kernels.copy_to_half(masters, parameters)
        elif masters:
            foreach.copy_(parameters, masters)

    # Saving

    def add_to(self, saved: dict[str, Any]) -> None:
        """Does nothing: a saved state has the masters already."""

    @contextlib.contextmanager
    def for_methods(self) -> Iterator[None]:
        """Context in which the optimizer loads a state without masters, and casts it to the masters' type."""
        with self.stepping(), exchanged(self._in_place.values()):
            yield

    @torch.no_grad()
    def load(self, parameter: Tensor, values: Tensor) -> None:
        """Gives a parameter and its master a saved master's value."""
        master = self._of(parameter)
        parameter.copy_(values)
        if master is not None:
            master.copy_(values)
            self._synced |= _Synced.now([(parameter, master)])


@torch.no_grad()
def _retire(state: dict[str, Any], parameter: Tensor) -> None:
    """Copies the master's bits to a parameter that was made precise, as by ``model.float()``; drops the master."""
    if MASTER in state:
        master = state.pop(MASTER)
        master.copy_(unrounded(parameter, master, HALVES))
        parameter.copy_(master)


class StepMasters(TemporaryMasters):
    """Masters that exist only while an optimizer steps.

    Args:
        optimizer: the optimizer.
        kind: "split" or "stochastic".
        narrow: whether the optimizer's other state is bfloat16 between steps.
        values: initial values, by id of the parameter. Frozen parameters get them, too, rounded.

    Raises:
        OptionError: a parameter is float16 or a DTensor, or two share memory.
    """

    def __init__(self, optimizer: Any, kind: str, narrow: bool, values: dict[int, Tensor]) -> None:
        super().__init__(optimizer, _OwnParameters(), kind, narrow, _shape_of)
        self._inside = optimizer
        parameters = list(optimizer_state.parameters_of(optimizer))
        self.check_new(parameters)
        self.make_missing()
        for each in parameters:
            if id(each) in values:
                self.load(each, values[id(each)])

    @classmethod
    def of_plain_data(cls, optimizer: Any, plain: Mapping[str, Any]) -> StepMasters:
        """Returns the masters that `as_plain_data` has described."""
        parameters = list(optimizer_state.parameters_of(optimizer))
        values = {id(parameters[place]): value for place, value in plain["values"].items()}
        return cls(optimizer, plain["kind"], plain["narrow"], values)

    def widens(self, parameter: Tensor) -> bool:
        """Returns True if a parameter gets a master, so that its gradient may be unscaled in the master's type."""
        return parameter.dtype in HALVES

    def updated(self, parameter: Tensor) -> Tensor:
        """Returns the parameter: between steps there is no other tensor that a step updates."""
        return parameter

    def check_new(self, parameters: Any) -> None:
        """Raises `OptionError` if one of some parameters, or the only one, is float16, a DTensor, or shares memory."""
        tensors = _unsharded(parameters, torch.float32)
        every = [*optimizer_state.parameters_of(self._inside), *tensors]
        tied = names_of_one_memory((str(place), each) for place, each in enumerate(every))
        if tied is not None:
            raise OptionError(
                f"parameters {tied[0]} and {tied[1]} of the optimizer share memory, and masters={self.kind!r} would "
                "write two masters to it; expected one parameter. Type b.weight = a.weight before you make the "
                "optimizer."
            )
        for tensor in tensors:
            if getattr(tensor, "dtype", None) is torch.float16:
                raise OptionError(
                    f"masters={self.kind!r} needs bfloat16 parameters, and {_shape_of(tensor)} is float16. Type "
                    "model.bfloat16(), or leave masters out."
                )

    def synchronise(self) -> None:
        """Does nothing: each step takes what user code has written before it."""

    # Steps

    def stepping(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context for a step; `step` has the masters."""
        return contextlib.nullcontext()

    def step(self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls the optimizer's step on the masters: once for each part, if nothing is to be called once only."""

        def step_part(swap_in: Callable[[], object]) -> Any:
            with WithoutCasts():
                swap_in()
            return step(*args, **kwargs)

        inside = self._inside
        if any(each.dtype is not torch.bfloat16 for each in optimizer_state.parameters_of(inside) if self.has(each)):
            raise UsageError(
                "the model was converted to another type, and masters that exist only while the optimizer steps are "
                "put together from bfloat16 parameters. Load optimizer.state_dict() into a new MixedPrecision, made "
                "with masters=True."
            )
        self.make_missing()
        return self.run(step_part, lambda: bool(args or kwargs) or has_own_step(inside) or bool(hooks_of(inside)))

    def evaluate(self, closure: Callable[[], Any]) -> Any:
        """Calls the closure of a step, which has the half parameters."""
        with self.swapped_out():
            return closure()

    def take_gradients(self) -> None:
        """Does nothing: each part of a step takes its gradients."""

    # Saving

    def add_to(self, saved: dict[str, Any]) -> None:
        """Adds the masters to an optimizer's saved state, if the parameters lack some of their bits."""
        if self.is_exact:
            keys = [key for group in saved["param_groups"] for key in group["params"]]
            for key, parameter in zip(keys, optimizer_state.parameters_of(self._inside), strict=True):
                if self.has(parameter):
                    saved["state"][key] = {**saved["state"].get(key, {}), MASTER: self.full_of(parameter)}

    @torch.no_grad()
    def load(self, parameter: Tensor, values: Tensor) -> None:
        """Gives a parameter a saved master's value."""
        if self.has(parameter):
            super().load(parameter, values)
        else:
            parameter.copy_(values)


class _OwnParameters:
    """Stands for the record of converted parameters: an optimizer's own were half before."""

    def claim_rounded(self, parameter: nn.Parameter, _: object, splits: bool) -> SplitWeight | None:
        """Returns a parameter with its remainder; None without one."""
        return SplitWeight(parameter, parameter.detach().float()) if splits else None

    def release(self, parameter: nn.Parameter) -> torch.dtype:
        """Returns the type of a parameter before: its own."""
        return parameter.dtype


def _unsharded(parameters: Any, dtype: torch.dtype) -> list[Any]:
    """Returns the tensors of parameters that an optimizer is given.

    Args:
        parameters: one parameter, or several, which may be pairs with their names.
        dtype: type of the masters.

    Raises:
        OptionError: one that needs a master is a DTensor.
    """
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    tensors = [each[1] if isinstance(each, tuple) else each for each in given]
    # Those of FSDP1 are ordinary tensors.
    if any(hasattr(each, "device_mesh") and each.dtype.itemsize < dtype.itemsize for each in tensors):
        raise OptionError(
            f"parameters of the optimizer are DTensors, as of FSDP2, and MixedPrecision cannot make {dtype} masters of "
            f"these; expected {dtype} shards, which need none. To compute in bfloat16 with them, type "
            "fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))."
        )
    return tensors


def _shape_of(parameter: Tensor) -> str:
    return f"a parameter of shape {tuple(parameter.shape)}"
