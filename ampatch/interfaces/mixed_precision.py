"""`MixedPrecision`: wraps any optimizer of half parameters, and keeps float32 masters in the optimizer's state.

Owns the masters of one optimizer, which are entries of its state. The half parameters stand for them while it steps or
loads (`ampatch.weights.exchange`). Must not know opt levels or patches. Must not know the loss scale, except for the
two attributes that a scaler sets on an optimizer (docs/guide/optimizers.md).

The design follows Optimisers.jl, whose rule ``MixedPrecision`` also keeps the precise weights in the optimizer's state.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ampatch.errors import OptionError, UsageError
from ampatch.half_types import HALVES
from ampatch.native import kernels
from ampatch.native.host_copy import for_fused_step
from ampatch.opt_levels import TEMPORARY, dtype_of, state_type
from ampatch.runtime import runtime
from ampatch.scaling.optimizer_step import OptimizerLike, check_optimizer, has_own_step
from ampatch.switch import WithoutCasts
from ampatch.torch_private import foreach, optimizers
from ampatch.weights import optimizer_state
from ampatch.weights.exchange import exchanged, unzipped
from ampatch.weights.kept_values import unrounded
from ampatch.weights.split_weights import SplitWeight
from ampatch.weights.temporary_masters import TemporaryMasters

# Types of callables that can make an optimizer. Other callable objects are not accepted: they might be anything.
_MAKERS = (type, functools.partial, types.FunctionType, types.MethodType)

#: Key of the master in the state of a parameter.
MASTER = "master"

_INSIDE = ("optimizer", "optim", "base_optimizer", "_base_optimizer")  # attributes in which wrappers keep an optimizer


class MixedPrecision(torch.optim.Optimizer):
    """Gives an optimizer float32 masters of its half parameters, kept in its own state.

    ::

        model = Net().bfloat16()
        optimizer = MixedPrecision(torch.optim.AdamW(model.parameters(), lr=1e-3))
        loss_fn(model(inputs), targets).backward()
        optimizer.step()  # updates the masters, and rounds them to the model's weights

    It can also wrap an optimizer class: ``MixedPrecision(torch.optim.AdamW)(model.parameters(), lr=1e-3)``.
    ``param_groups``, ``state`` and all other attributes are those of the wrapped optimizer. While it steps, the half
    parameters hold their masters. Parameters that are already as precise as the masters get no master. `MixedPrecision`
    needs neither ``amp.initialize`` nor casts. For float16, scale the loss with `ampatch.GradScaler`.

    Writes to a half parameter between two steps take effect: elements that differ from the rounded master are copied to
    the master. A write to a master reaches the parameter at the next step, unless both were written to.

    Args:
        optimizer: optimizer, or a function that makes one (a class, a ``functools.partial``).
        dtype: type of the masters: ``torch.float32`` or ``torch.float64``, or its name.
        masters: True keeps the masters in the state. "split" and "stochastic" have masters only while the optimizer
            steps, and need bfloat16 parameters. With "split" a parameter and an int16 remainder are the master. With
            "stochastic" nothing is left of it, and updates are rounded at random.
        optimizer_state: with these two, the type of the other state between steps: ``torch.float32`` or
            ``torch.bfloat16``, or its name.
        masters_from: initial values of the masters: tensors in the order of the optimizer's parameters, a module, or a
            mapping by the names that the optimizer was given. The half parameters are set to these values, rounded.
            None: the masters start with the values of the half parameters.

    Attributes:
        optimizer: the wrapped optimizer.

    Raises:
        OptionError: ``optimizer`` is no optimizer or already has masters, or ``masters_from`` does not fit it.
        UsageError: amp already gives the optimizer float32 masters (O2, O5).
    """

    # `step` reads `grad_scale` and `found_inf`.
    _step_supports_amp_scaling = True

    optimizer: Any
    grad_scale: Tensor | None
    found_inf: Tensor | None

    def __new__(
        cls,
        optimizer: Any = None,
        dtype: torch.dtype | str = torch.float32,
        masters_from: Any = None,
        masters: bool | str = True,
        optimizer_state: torch.dtype | str = "float32",
    ) -> Any:
        """Returns a new instance; or, if ``optimizer`` makes optimizers, a function that makes wrapped ones."""
        if isinstance(optimizer, _MAKERS):

            @functools.wraps(optimizer, updated=())
            def make(*args: Any, **kwargs: Any) -> MixedPrecision:
                return cls(optimizer(*args, **kwargs), dtype, masters_from, masters, optimizer_state)

            return make
        return super().__new__(cls)

    def __init__(
        self,
        optimizer: OptimizerLike,
        dtype: torch.dtype | str = torch.float32,
        masters_from: Any = None,
        masters: bool | str = True,
        optimizer_state: torch.dtype | str = "float32",
    ) -> None:
        check_optimizer(optimizer)
        _check_composition(optimizer)
        self._dtype = _master_type(dtype)
        kind = _kind_of(masters, self._dtype)
        narrow = state_type(optimizer_state, kind or True) == "bfloat16"
        self.optimizer = optimizer
        self._in_place: list[tuple[Tensor, Tensor]] = []  # parameters and masters, during a step
        self._synced: dict[int, _Synced] = {}  # by id of the parameter
        self._widened: list[tuple[Tensor, torch.dtype | None]] = []
        values = None if masters_from is None else _values(masters_from, optimizer)
        super().__setstate__({})  # creates the hook attributes; `__init__` would also copy the groups
        self._temporary: TemporaryMasters | None = None
        if kind is not None:
            given = dict(zip(map(id, self._parameters()), values or (), strict=False))
            self._temporary = _temporary(optimizer, kind, narrow, given)
            return
        for number, parameter in enumerate(self._parameters()):
            master = self._master(parameter)
            if master is not None and values is not None:
                with torch.no_grad():
                    master.copy_(values[number])
                    parameter.copy_(master)
        self._sync_masters()

    # Attributes of the wrapped optimizer

    param_groups: Any = optimizer_state.of_the_wrapped("param_groups", "Groups of the wrapped optimizer.")
    state: Any = optimizer_state.of_the_wrapped("state", "State of the wrapped optimizer, with the masters in it.")

    @property
    def defaults(self) -> Any:  # type: ignore[override]
        """Defaults of the wrapped optimizer; empty if it has none."""
        return getattr(self.optimizer, "defaults", {})

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"MixedPrecision({self.optimizer!r}, dtype={self._dtype})"

    def __getstate__(self) -> dict[str, Any]:
        # Like torch's optimizers, without hooks. The `step` that a scheduler sets on the instance is left out too: it
        # would step the original.
        kept = {name: self.__dict__[name] for name in ("optimizer", "_dtype", "_in_place", "_widened")}
        temporary = None if self._temporary is None else self._temporary.as_plain_data()
        return {**kept, "_synced": {}, "_temporary": temporary}  # ids in `_synced` mean nothing in a copy

    def __setstate__(self, state: dict[str, Any]) -> None:
        plain = state.get("_temporary")
        super().__setstate__({**state, "_temporary": None})
        if plain is not None:
            parameters = list(self._parameters())
            given = {id(parameters[place]): value for place, value in plain["values"].items()}
            self._temporary = _temporary(self.optimizer, plain["kind"], plain["narrow"], given)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group to the wrapped optimizer, and makes masters for its half parameters."""
        self._check_not_stepping("add groups")
        if self._temporary is not None:
            _check_not_float16(param_group.get("params", ()), self._temporary.kind)
        self.optimizer.add_param_group(param_group)
        for parameter in self._parameters():
            self._master(parameter)
        if self._temporary is not None:
            self._temporary.make_missing()

    # Masters

    def master_params(self) -> Iterator[Tensor]:
        """Yields the tensors that a step updates, in the order of the groups: masters, and parameters without one."""
        masters = {id(parameter): master for parameter, master in self._sync_masters()}
        for parameter in list(self._parameters()):
            yield masters.get(id(parameter), parameter)

    def master_of(self, parameter: Tensor) -> Tensor:
        """Returns the master of one of the optimizer's parameters; the parameter itself if it has no master.

        A split parameter's is a new tensor.

        Raises:
            OptionError: the optimizer does not update the parameter.
        """
        if not any(parameter is each for each in self._parameters()):
            raise OptionError(
                f"found a tensor of shape {tuple(parameter.shape)} that this {type(self.optimizer).__name__} does not "
                "update; expected a parameter of the model that it was made for."
            )
        if self._temporary is not None:
            return self._temporary.full_of(parameter)
        return next((master for each, master in self._sync_masters() if each is parameter), parameter)

    def master_state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Returns ``model.state_dict()`` with copies of the masters in place of half weights.

        Args:
            model: module with parameters that this optimizer updates. Other parameters and buffers are left as they
                are.
        """
        masters = {id(parameter): master for parameter, master in self._sync_masters()}
        if self._temporary is not None:
            masters = {id(each): self._temporary.full_of(each) for each in self._parameters()}
        named = {name: masters.get(id(value)) for name, value in model.state_dict(keep_vars=True).items()}
        return {
            name: value if named.get(name) is None else named[name].detach().clone()  # type: ignore[union-attr]
            for name, value in model.state_dict().items()
        }

    def _parameters(self) -> Iterator[Tensor]:
        return optimizer_state.parameters_of(self.optimizer)

    def _master(self, parameter: Tensor) -> Tensor | None:
        """Returns the master of a parameter, and makes it if there is none; None if the parameter needs none."""
        if self._temporary is not None:
            return None
        if self._in_place:  # not in the state now
            return next((master for each, master in self._in_place if each is parameter), None)
        # torch does not promote 8-bit types, and no optimizer updates them.
        is_narrower = parameter.is_floating_point() and 1 < parameter.dtype.itemsize < self._dtype.itemsize
        if not is_narrower or torch.promote_types(parameter.dtype, self._dtype) is not self._dtype:
            self._retire_master(parameter)
            return None
        state = self.optimizer.state.setdefault(parameter, {})
        if MASTER not in state:
            # The master is an nn.Parameter, as some optimizers check for that; each step sets its gradient.
            if state:  # the optimizer has stepped before, in half
                state.update(optimizer_state.retyped(dict(state), parameter.dtype, self._dtype, parameter))
            state[MASTER] = nn.Parameter(parameter.detach().to(self._dtype), requires_grad=parameter.requires_grad)
        return state[MASTER]  # type: ignore[no-any-return]

    @torch.no_grad()
    def _retire_master(self, parameter: Tensor) -> None:
        """Copies the master's bits to a parameter that was made precise, as by ``model.float()``; drops the master."""
        state = self.optimizer.state.get(parameter, {})
        if MASTER in state:
            master = state.pop(MASTER)
            master.copy_(unrounded(parameter, master, HALVES))
            parameter.copy_(master)

    @torch.no_grad()
    @WithoutCasts()
    def _sync_masters(self) -> list[tuple[Tensor, Tensor]]:
        """Copies user writes to half parameters to their masters; returns all pairs of parameter and master."""
        if self._in_place:
            return self._in_place
        each_once = list({id(each): each for each in self._parameters()}.values())
        pairs = [(each, master) for each in each_once if (master := self._master(each)) is not None]
        for parameter, master in pairs:
            synced = self._synced.get(id(parameter))
            if synced is not None and synced.dtype is not parameter.dtype:  # as after model.half()
                master.copy_(unrounded(parameter, master, [synced.dtype]))
                parameter.copy_(master)
        written = [pair for pair in pairs if not self._only_master_was_written(*pair)]
        kernels.copy_differing(*unzipped(written))
        self._record_synced(written)
        return pairs

    def _only_master_was_written(self, parameter: Tensor, master: Tensor) -> bool:
        """Returns True if torch has counted a write to the master since `_record_synced`, and none to the parameter."""
        synced = self._synced.get(id(parameter))
        return synced is not None and synced.version == parameter._version and synced.of_master != master._version

    def _record_synced(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        """Records that parameters now equal their rounded masters."""
        for parameter, master in pairs:
            self._synced[id(parameter)] = _Synced(parameter, parameter.dtype, parameter._version, master._version)

    # Steps

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of the parameters: sets them to None, or to zeros with ``set_to_none=False``."""
        super().zero_grad(set_to_none)
        if set_to_none:
            self._narrow()

    def widen_gradients(self) -> None:
        """Casts half gradients to the masters' type until the next step or `zero_grad`, to unscale without loss."""
        for parameter in self._parameters():
            grad = parameter.grad
            has_master = (
                parameter.dtype in HALVES if self._temporary is not None else self._master(parameter) is not None
            )
            if grad is not None and grad.dtype is not self._dtype and has_master:
                self._widened.append((parameter, parameter.grad_dtype))
                parameter.grad = None
                parameter.grad_dtype = self._dtype
                parameter.grad = grad.to(self._dtype)

    def _narrow(self) -> None:
        """Undoes `widen_gradients`."""
        for parameter, allowed in self._widened:
            grad, parameter.grad = parameter.grad, None
            # With None, grad_dtype follows the parameter's type. The present type would stay fixed, and would be wrong
            # after model.float().
            parameter.grad_dtype = None if allowed is parameter.dtype else allowed
            if grad is not None:
                parameter.grad = grad.to(parameter.dtype)
        self._widened.clear()

    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Runs a step of the wrapped optimizer on the masters, and rounds them to the parameters.

        Args:
            closure: function that evaluates the model again, with parameters rounded from the masters.
            args: other arguments for the wrapped optimizer's step.
            kwargs: keyword arguments for the wrapped optimizer's step.

        Returns:
            The result of the wrapped optimizer's step; None if the step was skipped after an overflow that a scaler
            has found.

        Raises:
            UsageError: a step is already running.
        """
        self._check_not_stepping("step again")
        inside = self.optimizer
        found_inf, grad_scale = self.__dict__.get("found_inf"), self.__dict__.get("grad_scale")
        with self._stepping() as pairs:
            if closure is None:
                self._copy_gradients(grad_scale)
            else:
                closure = functools.partial(self._evaluate, closure)
            if found_inf is not None and not self._skips_by_itself(closure):
                if bool(found_inf):
                    return None
                found_inf = None
            if found_inf is not None:
                inside.grad_scale = None
                inside.found_inf = for_fused_step(found_inf, self._parameters())
            given = args if closure is None else (closure, *args)
            try:
                if self._temporary is not None:
                    return self._step_temporarily(self._temporary, given, kwargs)
                with exchanged(pairs):
                    return inside.step(*given, **kwargs)
            finally:
                if found_inf is not None:
                    del inside.grad_scale, inside.found_inf
                self._narrow()

    def _step_temporarily(self, masters: TemporaryMasters, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def step(swap_in: Callable[[], object]) -> Any:
            try:
                with WithoutCasts():
                    swap_in()
                return self.optimizer.step(*args, **kwargs)
            finally:
                masters.swap_out()

        if any(each.dtype is not torch.bfloat16 for each in self._parameters() if masters.has(each)):
            raise UsageError(
                "the model was converted to another type, and masters that exist only while the optimizer steps are "
                "put together from bfloat16 parameters. Load optimizer.state_dict() into a new MixedPrecision, made "
                "with masters=True."
            )
        masters.make_missing()
        return masters.run(step, lambda: bool(args or kwargs) or has_own_step(self.optimizer))

    def _skips_by_itself(self, closure: object) -> bool:
        """Returns True if the wrapped optimizer can skip by itself, without a sync with the device."""
        inside = self.optimizer
        supports = getattr(inside, "_step_supports_amp_scaling", False)
        return supports and closure is None and optimizer_state.has_state(inside)

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        if self._temporary is not None:
            with self._temporary.swapped_out():
                return closure()
        with exchanged(self._in_place):  # back: the closure has the half parameters
            self._round()
            result = closure()
            self._copy_gradients(None)
            return result

    @torch.no_grad()
    @WithoutCasts()
    def _copy_gradients(self, grad_scale: Tensor | None) -> None:
        """Copies the parameters' gradients to the masters; divides all gradients by the scale, if one is given."""
        taken = {id(parameter) for parameter, _ in self._in_place}
        for parameter, master in self._in_place:
            grad = parameter.grad
            master.grad = None if grad is None else grad.to(master.dtype, copy=True)
        if grad_scale is not None:
            own = [each for each in self._parameters() if id(each) not in taken]
            grads = optimizer_state.gradients_of(itertools.chain(own, (master for _, master in self._in_place)))
            kernels.multiply_(grads, grad_scale.float().reciprocal())

    @contextlib.contextmanager
    def _stepping(self) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """Context with the pairs of parameter and master, in which the state has no masters; then rounds them."""
        pairs = self._sync_masters()
        state = self.optimizer.state
        for parameter, master in pairs:
            master.requires_grad_(parameter.requires_grad)
            del state[parameter][MASTER]
            if not state[parameter]:  # an optimizer may treat an empty dict as state that it has made
                del state[parameter]
        self._in_place = pairs
        try:
            yield pairs
        finally:
            self._round()
            self._record_synced(pairs)
            self._in_place = []
            for parameter, master in pairs:
                master.grad = None
                self.optimizer.state.setdefault(parameter, {})[MASTER] = master

    @torch.no_grad()
    @WithoutCasts()
    def _round(self) -> None:
        parameters, masters = unzipped(self._in_place)
        if self._dtype is torch.float32:
            kernels.copy_to_half(masters, parameters)
        elif masters:
            foreach.copy_(parameters, masters)

    # Saving

    def state_dict(self) -> dict[str, Any]:
        """Returns the state dict of the wrapped optimizer; the state of each half parameter has a key "master"."""
        self._check_not_stepping("save its state")
        for hook in getattr(self, optimizers.STATE_DICT_PRE_HOOKS).values():
            hook(self)
        self._sync_masters()
        saved: dict[str, Any] = self.optimizer.state_dict()
        if self._temporary is not None and self._temporary.is_exact:
            keys = [key for group in saved["param_groups"] for key in group["params"]]
            for key, parameter in zip(keys, self._parameters(), strict=True):
                if self._temporary.has(parameter):
                    saved["state"][key] = {**saved["state"].get(key, {}), MASTER: self._temporary.full_of(parameter)}
        for post_hook in getattr(self, optimizers.STATE_DICT_POST_HOOKS).values():
            changed = post_hook(self, saved)
            saved = saved if changed is None else changed
        return saved

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads a state dict of this class, or of the wrapped optimizer.

        Masters are loaded with all their bits, and rounded to the half parameters. A parameter without a master gets
        the saved master's value, if there is one.

        Args:
            state_dict: state dict; if it has no masters, the present masters and weights stay.

        Raises:
            OptionError: it is no state dict of an optimizer, or a master in it has another shape; nothing was changed.
        """
        self._check_not_stepping("load its state")
        for pre_hook in getattr(self, optimizers.LOAD_STATE_DICT_PRE_HOOKS).values():
            changed = pre_hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        saved_masters = self._saved_masters(state_dict)
        states: Mapping[Any, Any] = state_dict["state"]
        bare = {key: {name: v for name, v in each.items() if name != MASTER} for key, each in states.items()}
        # The optimizer casts loaded state to the type of its parameters.
        temporary = contextlib.nullcontext() if self._temporary is None else self._temporary.for_methods()
        with self._stepping() as pairs, exchanged(pairs), temporary:
            self.optimizer.load_state_dict({**state_dict, "state": bare})
        for parameter, saved in zip(list(self._parameters()), saved_masters, strict=True):
            if saved is not None and self._temporary is not None and self._temporary.has(parameter):
                self._temporary.load(parameter, saved)
            elif saved is not None:
                master = self._master(parameter)
                if master is not None:
                    master.copy_(saved)
                parameter.copy_(saved)
                if master is not None:
                    self._record_synced([(parameter, master)])
        for post_hook in getattr(self, optimizers.LOAD_STATE_DICT_POST_HOOKS).values():
            post_hook(self)

    def _check_not_stepping(self, what: str) -> None:
        if self._in_place or (self._temporary is not None and self._temporary.are_in_place):
            raise UsageError(f"the step of this MixedPrecision is under way; {what} before or after it.")

    def _saved_masters(self, state_dict: Any) -> list[Tensor | None]:
        """Returns the masters in a state dict, one for each parameter; None for parameters without a saved master."""
        parameters = list(self._parameters())
        try:
            keys = [key for group in state_dict["param_groups"] for key in group["params"]]
            states = dict(state_dict["state"].items())
            found = [states.get(key, {}).get(MASTER) for key in keys]
        except (AttributeError, KeyError, TypeError):
            raise OptionError(
                f"found {type(state_dict).__name__} that is no state dict of an optimizer; expected what "
                "optimizer.state_dict() returned, with 'state' and 'param_groups'."
            ) from None
        for number, (parameter, saved) in enumerate(zip(parameters, found, strict=False)):
            if saved is not None and (not isinstance(saved, Tensor) or saved.shape != parameter.shape):
                kind = f"shape {tuple(saved.shape)}" if isinstance(saved, Tensor) else f"type {type(saved).__name__}"
                raise OptionError(
                    f"the state dict has a master of {kind} for parameter {number}, whose shape is "
                    f"{tuple(parameter.shape)}; expected the state of an optimizer of the same model."
                )
        return found


class _OwnParameters:
    """Stands for the record of converted parameters: an optimizer's own were half before.

    Args:
        values: initial values of masters, by id of the parameter.
    """

    hears_writes = False

    def __init__(self, values: dict[int, Tensor]) -> None:
        self._values = values

    @torch.no_grad()
    def claim_rounded(self, parameter: nn.Parameter, _: object, splits: bool) -> SplitWeight | None:
        """Returns a parameter with its remainder; None without one."""
        value = self._values.pop(id(parameter), None)
        if value is not None:
            parameter.copy_(value)
        if not splits:
            return None
        return SplitWeight(parameter, parameter.float() if value is None else value.to(parameter.device).float())

    def release(self, parameter: nn.Parameter) -> torch.dtype:
        """Returns the type of a parameter before: its own."""
        return parameter.dtype


def _temporary(optimizer: Any, kind: str, narrow: bool, values: dict[int, Tensor]) -> TemporaryMasters:
    _check_not_float16(optimizer_state.parameters_of(optimizer), kind)
    masters = TemporaryMasters(optimizer, _OwnParameters(values), kind, narrow, _shape_of)
    masters.make_missing()
    return masters


def _shape_of(parameter: Tensor) -> str:
    return f"a parameter of shape {tuple(parameter.shape)}"


def _check_not_float16(parameters: Any, kind: str) -> None:
    """Raises `OptionError` if one of some parameters, or the only one, is float16."""
    for parameter in [parameters] if isinstance(parameters, Tensor) else list(parameters):
        tensor = parameter[1] if isinstance(parameter, tuple) else parameter  # named ones are pairs
        if getattr(tensor, "dtype", None) is torch.float16:
            raise OptionError(
                f"masters={kind!r} needs bfloat16 parameters, and {_shape_of(tensor)} is float16. Type "
                "model.bfloat16(), or leave masters out."
            )


def _kind_of(masters: object, dtype: torch.dtype) -> str | None:
    """Returns the kind of temporary masters; None for masters in the state."""
    if masters is True:
        return None
    if not isinstance(masters, str) or masters not in TEMPORARY:
        raise OptionError(f"masters is {masters!r}; expected True, 'split' or 'stochastic'.")
    if dtype is not torch.float32:
        raise OptionError(f"masters={masters!r} contradicts dtype={dtype}; expected float32 masters. Leave dtype out.")
    return masters


class _Synced(NamedTuple):
    """Type and version counters of a parameter and its master when the parameter last equalled the rounded master."""

    parameter: Tensor  # kept alive, so that no other tensor gets its id
    dtype: torch.dtype
    version: int
    of_master: int


def mixed_precision_within(optimizer: object) -> MixedPrecision | None:
    """Returns the optimizer if it is a `MixedPrecision`, or the one that it wraps; None if there is none."""
    return next((each for each in _wrapped_optimizers(optimizer) if isinstance(each, MixedPrecision)), None)


def _wrapped_optimizers(optimizer: object) -> Iterator[Any]:
    """Yields an optimizer, then the optimizer that it wraps, and so on."""
    seen: set[int] = set()
    while hasattr(optimizer, "param_groups") and id(optimizer) not in seen:
        seen.add(id(optimizer))
        yield optimizer
        held = vars(optimizer) if hasattr(optimizer, "__dict__") else {}
        optimizer = next((held[name] for name in _INSIDE if name in held), None)


def _check_composition(optimizer: object) -> None:
    kind = type(optimizer).__name__
    if mixed_precision_within(optimizer) is not None:
        raise OptionError(
            f"this {kind} has masters of its own already, by a MixedPrecision. Pass the optimizer inside that "
            "MixedPrecision, or leave this one out."
        )
    if not isinstance(getattr(optimizer, "state", None), MutableMapping):
        raise OptionError(
            f"this {kind} has no mapping `state`, in which masters are kept; expected an optimizer like those of torch."
        )
    live = runtime.live
    for each in _wrapped_optimizers(optimizer):
        if live is not None and live.adopted.has(each) and live.settings.steps_in_float32:
            raise UsageError(
                f"amp.initialize gives this {kind} float32 masters, at opt_level="
                f"{live.settings.properties.opt_level!r}. Leave MixedPrecision out, or type master_weights=False there."
            )


def _master_type(dtype: object) -> torch.dtype:
    found = dtype_of(dtype)
    if found in (torch.float32, torch.float64):
        return found
    raise OptionError(f"dtype is {dtype!r}; expected torch.float32 or torch.float64, or its name, for the masters.")


def _values(masters_from: Any, optimizer: Any) -> list[Tensor]:
    """Returns the masters' initial values, one for each parameter, in its shape."""
    parameters = list(optimizer_state.parameters_of(optimizer))
    if isinstance(masters_from, Mapping):
        named: list[Any] = [name for group in optimizer.param_groups for name in group.get("param_names", ())]
        if len(named) != len(parameters):
            raise OptionError(
                f"masters_from is a mapping, and this {type(optimizer).__name__} has no names for its parameters. Make "
                "the optimizer from model.named_parameters(); or give a list of tensors in the order of the parameters."
            )
        missing = [name for name in named if name not in masters_from]
        if missing:
            named_few = ", ".join(map(repr, missing[:5]))
            raise OptionError(f"masters_from lacks {named_few}; expected a value for each parameter's name.")
        values = [masters_from[name] for name in named]
    elif not isinstance(masters_from, (nn.Module, Iterable)):
        raise OptionError(
            f"masters_from is of type {type(masters_from).__name__}; expected tensors in the order of the parameters, "
            "a module, or a mapping by names."
        )
    else:
        values = list(masters_from.parameters() if isinstance(masters_from, nn.Module) else masters_from)
    if len(values) != len(parameters):
        raise OptionError(
            f"masters_from has {len(values)} tensors, and the optimizer {len(parameters)} parameters; expected one for "
            "each, in the order in which the optimizer was given them."
        )
    for number, (value, parameter) in enumerate(zip(values, parameters, strict=True)):
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.shape != parameter.shape:
            is_tensor = isinstance(value, Tensor)
            found = f"{value.dtype} of shape {tuple(value.shape)}" if is_tensor else type(value).__name__
            raise OptionError(
                f"masters_from has {found} for parameter {number}, whose shape is {tuple(parameter.shape)}; expected "
                "a floating tensor of that shape."
            )
    return [value.detach() for value in values]
