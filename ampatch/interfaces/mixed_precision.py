"""`MixedPrecision`: wraps any optimizer of half parameters, and keeps float32 masters in the optimizer's state.

Owns the interface of an optimizer around another one. The masters are `ampatch.interfaces.own_masters`. Must not know
opt levels or patches. Must not know the loss scale, except for the two attributes that a scaler sets on an optimizer
(docs/guide/optimizers.md).

The design follows Optimisers.jl, whose rule ``MixedPrecision`` also keeps the precise weights in the optimizer's state.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ampatch.errors import OptionError, UsageError
from ampatch.interfaces.own_masters import MASTER, StateMasters, StepMasters
from ampatch.native import kernels
from ampatch.opt_levels import TEMPORARY, check_dtype, state_type
from ampatch.runtime import runtime
from ampatch.scaling.step_gate import skipping_by_itself
from ampatch.scaling.users_optimizer import OptimizerLike, check_optimizer
from ampatch.scaling.widened_gradients import WidenedGradient
from ampatch.switch import WithoutCasts
from ampatch.torch_private import optimizers
from ampatch.weights import optimizer_state
from ampatch.weights.exchange import note_lost_graph, own_methods
from ampatch.weights.optimizer_state import give_up_buckets

# Types of callables that can make an optimizer. Other callable objects are not accepted: they might be anything.
_MAKERS = (type, functools.partial, types.FunctionType, types.MethodType)

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
        OptionError: ``optimizer`` is no optimizer, already has masters, or has half DTensors; or ``masters_from`` does
            not fit it.
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
        expected = "torch.float32 or torch.float64, or its name, for the masters"
        self._dtype = check_dtype("dtype", dtype, (torch.float32, torch.float64), expected)
        _check_masters(masters, self._dtype)
        narrow = state_type(optimizer_state, masters) == "bfloat16"
        give_up_buckets(optimizer)
        self.optimizer = optimizer
        self._widened: list[WidenedGradient] = []
        values = () if masters_from is None else _values(masters_from, optimizer)
        super().__setstate__({})  # creates the hook attributes; `__init__` would also copy the groups
        given = dict(zip(map(id, self._parameters()), values, strict=False))
        self._masters: StateMasters | StepMasters
        if isinstance(masters, str):
            self._masters = StepMasters(optimizer, masters, narrow, given)
        else:
            self._masters = StateMasters(self, self._dtype)
            self._masters.begin(given)

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
        value = getattr(self.optimizer, name)
        if isinstance(value, types.MethodType) and name in own_methods(self.optimizer):  # such as the halves of a step
            return functools.partial(self._masters.run_method, value)
        return value

    def __repr__(self) -> str:
        return f"MixedPrecision({self.optimizer!r}, dtype={self._dtype})"

    def __getstate__(self) -> dict[str, Any]:
        # Like torch's optimizers, without hooks. The `step` that a scheduler sets on the instance is left out too: it
        # would step the original.
        kept = {name: self.__dict__[name] for name in ("optimizer", "_dtype", "_widened")}
        return {**kept, "_temporary": self._masters.as_plain_data()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        plain = state.get("_temporary")
        super().__setstate__({name: state[name] for name in ("optimizer", "_dtype", "_widened")})
        if isinstance(plain, Mapping):
            self._masters = StepMasters.of_plain_data(self.optimizer, plain)
        else:
            self._masters = StateMasters(self, self._dtype, plain or ())

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group to the wrapped optimizer, and makes masters for its half parameters."""
        self._check_not_stepping("add groups")
        params = param_group.get("params", ())
        if isinstance(params, Iterator):  # read twice, here and by the optimizer
            param_group["params"] = params = list(params)
        self._masters.check_new(params)
        self.optimizer.add_param_group(param_group)
        self._masters.make_missing()

    # Masters

    def master_params(self) -> Iterator[Tensor]:
        """Yields the tensors that a step updates, in the order of the groups: masters, and parameters without one."""
        self._masters.synchronise()
        for parameter in list(self._parameters()):
            yield self._masters.updated(parameter)

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
        self._masters.synchronise()
        return self._masters.full_of(parameter)

    def master_state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Returns ``model.state_dict()`` with copies of the masters in place of half weights.

        Args:
            model: module with parameters that this optimizer updates. Other parameters and buffers are left as they
                are.
        """
        self._masters.synchronise()
        full = ((each, self._masters.full_of(each)) for each in self._parameters())
        masters = {id(each): master.detach().clone() for each, master in full if master is not each}
        named = model.state_dict(keep_vars=True)
        return {name: masters.get(id(named.get(name)), value) for name, value in model.state_dict().items()}

    def _parameters(self) -> Iterator[Tensor]:
        return optimizer_state.parameters_of(self.optimizer)

    # Steps

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of the parameters: sets them to None, or to zeros with ``set_to_none=False``."""
        super().zero_grad(set_to_none)
        self._narrow()

    def widen_gradients(self) -> None:
        """Casts half gradients to the masters' type until the next step or `zero_grad`, to unscale without loss."""
        for parameter in self._parameters():
            grad = parameter.grad
            if grad is not None and grad.dtype is not self._dtype and self._masters.widens(parameter):
                self._widened.append(WidenedGradient(parameter, self._dtype, fixes_type=False))

    def _narrow(self) -> None:
        """Undoes `widen_gradients`."""
        for each in self._widened:
            each.narrow()
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
        try:
            with self._masters.stepping():
                if closure is None:
                    self._masters.take_gradients()
                    if grad_scale is not None:
                        self._divide_gradients(grad_scale)
                else:
                    closure = functools.partial(self._masters.evaluate, closure)
                told: AbstractContextManager[Any] = nullcontext()
                if found_inf is not None and closure is None and _skips_by_itself(inside):
                    told = skipping_by_itself(inside, self._parameters(), None, found_inf)
                elif found_inf is not None and bool(found_inf):
                    return None
                with told:
                    return self._masters.step(inside.step, args if closure is None else (closure, *args), kwargs)
        except RuntimeError as error:
            note_lost_graph(error)
            raise
        finally:
            self._narrow()

    @torch.no_grad()
    @WithoutCasts()
    def _divide_gradients(self, grad_scale: Tensor) -> None:
        """Divides the gradients that the step uses by a scale."""
        grads = optimizer_state.gradients_of(map(self._masters.updated, self._parameters()))
        kernels.multiply_(grads, grad_scale.float().reciprocal())

    # Saving

    def state_dict(self) -> dict[str, Any]:
        """Returns the state dict of the wrapped optimizer; the state of each half parameter has a key "master"."""
        self._check_not_stepping("save its state")
        for hook in getattr(self, optimizers.STATE_DICT_PRE_HOOKS).values():
            hook(self)
        self._masters.synchronise()
        saved: dict[str, Any] = self.optimizer.state_dict()
        self._masters.add_to(saved)
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
        saved_masters = _saved_masters(state_dict, list(self._parameters()))
        states: Mapping[Any, Any] = state_dict["state"]
        bare = {key: {name: v for name, v in each.items() if name != MASTER} for key, each in states.items()}
        with self._masters.for_methods():
            self.optimizer.load_state_dict({**state_dict, "state": bare})
        for parameter, saved in zip(list(self._parameters()), saved_masters, strict=True):
            if saved is not None:
                self._masters.load(parameter, saved)
        for post_hook in getattr(self, optimizers.LOAD_STATE_DICT_POST_HOOKS).values():
            post_hook(self)

    def _check_not_stepping(self, what: str) -> None:
        if self._masters.are_in_place:
            raise UsageError(f"the step of this MixedPrecision is under way; {what} before or after it.")


def _saved_masters(state_dict: Any, parameters: list[Tensor]) -> list[Tensor | None]:
    """Returns the masters in a state dict, one for each parameter; None for parameters without a saved master."""
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


def _skips_by_itself(inside: Any) -> bool:
    """Returns True if a wrapped optimizer can skip by itself, without a sync with the device."""
    return getattr(inside, "_step_supports_amp_scaling", False) and optimizer_state.has_state(inside)


def _check_masters(masters: object, dtype: torch.dtype) -> None:
    if masters is True:
        return
    if not isinstance(masters, str) or masters not in TEMPORARY:
        raise OptionError(f"masters is {masters!r}; expected True, 'split' or 'stochastic'.")
    if dtype is not torch.float32:
        raise OptionError(f"masters={masters!r} contradicts dtype={dtype}; expected float32 masters. Leave dtype out.")


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
