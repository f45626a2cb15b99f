"""Base of Apex's optimizers: float32 arithmetic and state for parameters of any dtype, and checkpoints.

Owns the conversion of parameters and gradients, of any floating dtype and strides, to the tensors of an update. Also
converts saved state, from ampatch or Apex, to an optimizer's state. Must not know any particular update.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampatch.errors import OptionError, UsageError
from ampatch.grouping import grouped
from ampatch.half_types import HALVES
from ampatch.native.host_copy import on_device
from ampatch.torch_private import foreach
from ampatch.weights.exchange import unzipped
from ampatch.weights.optimizer_state import parameters_of

#: A group of parameters, with their options.
Group = dict[str, Any]

#: Type that torch's multi-tensor kernels take and return.
Tensors = list[Tensor] | tuple[Tensor, ...]


class UnsupportedOptionError(OptionError, RuntimeError):
    """An argument that Apex's optimizers have but do not support; Apex's raise a RuntimeError for it."""


class Float32Optimizer(Optimizer):
    """An optimizer of float16, bfloat16, float32 and float64 parameters, also mixed in one group.

    Half parameters are updated in float32 and rounded once; their state is float32. The state of float64 parameters is
    float64. Every parameter counts its own steps, as ``step`` in its state. Bias correction of a parameter that is
    added later therefore begins at its own first step.

    Args:
        params: parameters, or groups of them, as for every optimizer of torch.
        set_grad_none: True if ``zero_grad()`` sets gradients to None; False if it sets them to 0.
        amsgrad: True raises: Apex's optimizers have the argument, and do not support it.
        defaults: options of a group, under Apex's names.
    """

    def __init__(self, params: Iterable[Any], set_grad_none: bool, amsgrad: bool = False, **defaults: Any) -> None:
        if amsgrad:
            raise UnsupportedOptionError(
                f"found amsgrad=True; {type(self).__name__} has no AMSGrad variant, nor has Apex's. Leave it out, or "
                "use torch.optim.AdamW(params, amsgrad=True)."
            )
        _check_options(type(self).__name__, **defaults)
        self.set_grad_none = set_grad_none
        super().__init__(params, defaults)

    def __getstate__(self) -> dict[str, Any]:
        # torch keeps no settings, such as `adam_w_mode`. The `step` that a scheduler sets on the instance is none.
        settings = {name: value for name, value in vars(self).items() if name[0] != "_" and not callable(value)}
        return super().__getstate__() | settings

    # Steps

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates every parameter that has a gradient.

        Args:
            closure: function that evaluates the model again and returns the loss.

        Returns:
            Result of the closure; None without one.

        Raises:
            UsageError: a gradient is sparse, or a parameter is not a floating-point tensor; no parameter was changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update([batch for group in self.param_groups for batch in self._batches(group)])
        return loss

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clears the gradients.

        Args:
            set_to_none: True to set gradients to None, False to set them to 0; None for the value of
                ``set_grad_none``.
        """
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    @property
    def _has_own_step(self) -> bool:
        """False in a project's subclass that steps by itself, as fairseq's: its step knows nothing of a scaler's."""
        return type(self).step.__module__.startswith("ampatch.")

    def _overflowed(self) -> bool:
        """Returns True if a scaler has found an overflow in the gradients of the step that it runs now."""
        found_inf = getattr(self, "found_inf", None)
        return found_inf is not None and bool(found_inf)

    def _update(self, batches: list[tuple[Group, list[Tensor]]]) -> None:
        """Updates parameters in place.

        Args:
            batches: pairs of a group and those of its parameters that have gradients and are on one device.
        """
        divisors = self._divisors(batches)
        for group, parameters in batches:
            with self._in_float32(parameters) as (values, scaled):
                grads, divisor = scaled, divisors.get(id(group))
                if divisor is not None:
                    grads = list(foreach.div(grads, on_device(divisor.to(grads[0].dtype), grads[0].device)))
                self._update_batch(group, parameters, values, grads)

    def _divisors(self, batches: list[tuple[Group, list[Tensor]]]) -> dict[int, Tensor]:
        """Returns divisors of gradients, such as for clipping, by the id of the group that has one."""
        return {}

    def _update_batch(self, group: Group, parameters: list[Tensor], values: list[Tensor], grads: list[Tensor]) -> None:
        """Updates the values of parameters of one group and device; `_in_float32` yields values and gradients."""
        raise NotImplementedError

    @contextlib.contextmanager
    def _in_float32(self, parameters: list[Tensor]) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        """Converts parameters and gradients for an update; copies new values back when the ``with`` block ends.

        Args:
            parameters: floating-point parameters with gradients.

        Yields:
            Values to update in place, and gradients that must not be written to. Both are at least float32. Each
            gradient has the strides of its value, without gaps: torch's fused kernels go through memory and ignore
            indices (torch 2.13, on the CPU).
        """
        values = self._values(parameters)
        grads = [_like(parameter.grad, value) for parameter, value in zip(parameters, values, strict=True)]  # type: ignore[arg-type]
        yield values, grads
        copied = [pair for pair in zip(parameters, values, strict=True) if pair[0] is not pair[1]]
        if copied:
            foreach.copy_(*unzipped(copied))

    def _values(self, parameters: list[Tensor]) -> list[Tensor]:
        """Returns the tensors that an update writes to: the parameters themselves, or copies in float32."""
        return [_dense(parameter) for parameter in parameters]

    def _batches(self, group: Group) -> Iterator[tuple[Group, list[Tensor]]]:
        trained = [each for each in group["params"] if each.grad is not None and each.numel()]
        for parameter in trained:
            self._check(parameter, parameter.grad)
        for parameters in grouped((each.device, each) for each in trained).values():
            yield group, parameters

    def _check(self, parameter: Tensor, grad: Tensor) -> None:
        name, shape = type(self).__name__, tuple(parameter.shape)
        if grad.layout is not torch.strided:
            raise UsageError(
                f"{name} found a sparse gradient of a parameter of shape {shape}; expected a dense one. Leave sparse="
                "True out of the embedding it belongs to, or pass the embedding to torch.optim.SparseAdam."
            )
        if not parameter.is_floating_point():
            raise UsageError(
                f"{name} found a parameter of {parameter.dtype} and shape {shape}; expected one of float16, bfloat16, "
                "float32 or float64. Pass it to an optimizer of torch.optim."
            )

    def _moments(
        self, parameters: list[Tensor], likes: Tensors, name: str, first: Callable[[Tensor], Tensor] = torch.zeros_like
    ) -> list[Tensor]:
        """Returns each parameter's state of one name, in the dtype and with the strides of its tensor in ``likes``.

        If a parameter has no such state yet, ``first`` makes it from that tensor.
        """
        moments = []
        for parameter, like in zip(parameters, likes, strict=True):
            state = self.state[parameter]
            # The parameter may have been half, or in another memory format, when its state was made.
            state[name] = _like(state[name], like) if name in state else first(like)
            moments.append(state[name])
        return moments

    def _count_steps(self, parameters: list[Tensor]) -> list[int]:
        """Counts this step, and returns each parameter's number of steps."""
        for parameter in parameters:
            state = self.state[parameter]
            state["step"] = int(state.get("step", 0)) + 1
        return [self.state[parameter]["step"] for parameter in parameters]

    # Checkpoints

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict of this class, from ampatch or Apex, bit for bit.

        Apex counts steps in the group; this method moves the count to the state of each parameter, but not in a
        subclass with a step of its own. Options that the saved groups lack get the values that this optimizer was made
        with.

        Args:
            state_dict: result of ``state_dict()``; it is not changed, and shares nothing with the optimizer afterwards.

        Raises:
            ValueError: the number of groups, or of parameters in a group, differs from this optimizer's.
        """
        final: dict[str, Any] = {}

        def translate(_: Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            final.update(self._translated(given))
            return final

        def load_again(_: Optimizer) -> None:
            saved = itertools.chain.from_iterable(group["params"] for group in final["param_groups"])
            for index, parameter in zip(saved, parameters_of(self), strict=True):
                if index in final["state"]:
                    # torch has cast all state to the parameter's dtype, which may be half.
                    self.state[parameter] = {
                        name: self._loaded(name, value, parameter) for name, value in final["state"][index].items()
                    }

        # These are hooks, since the user's own hooks may return another state dict, or read the loaded state.
        with (
            self.register_load_state_dict_pre_hook(translate),
            self.register_load_state_dict_post_hook(load_again, prepend=True),
        ):
            super().load_state_dict(state_dict)

    def _translated(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Returns a shallow copy, in this optimizer's own form, of a state dict that Apex may have saved."""
        options = {name: value for name, value in self.defaults.items() if name in self.param_groups[0]}
        groups = [options | group for group in state_dict["param_groups"]]
        state = {index: dict(kept) for index, kept in state_dict["state"].items()}
        for group in groups:
            self._translate_group(group, [state[index] for index in group["params"] if index in state])
        return state_dict | {"param_groups": groups, "state": state}

    def _translate_group(self, group: Group, states: list[dict[str, Any]]) -> None:
        """Moves state that Apex kept in a group to the state of its parameters, in place."""
        # A project's step counts in the group, as Apex's does.
        step = group.pop("step", None) if self._has_own_step else None
        if step is not None:
            for state in states:
                state.setdefault("step", int(step))

    def _loaded(self, name: str, value: Any, parameter: Tensor) -> Any:
        """Returns a copy of a saved value for the state of a parameter."""
        if name == "step":
            return int(value)
        if isinstance(value, Tensor):
            dtype = _dtype_of_state(parameter) if value.is_floating_point() else value.dtype
            return value.to(parameter.device, dtype, copy=True)
        return copy.deepcopy(value)


def _dense(parameter: Tensor) -> Tensor:
    """Returns a parameter in the dtype of its state and without gaps between elements: itself, or else a copy."""
    dtype = _dtype_of_state(parameter)
    is_dense = parameter.is_contiguous() or torch.empty_like(parameter, device="meta").stride() == parameter.stride()
    if dtype is parameter.dtype and is_dense:
        return parameter
    return torch.empty_like(parameter, dtype=dtype).copy_(parameter)


def _like(tensor: Tensor, other: Tensor) -> Tensor:
    """Returns a tensor in the dtype and with the strides of another: itself, or else a copy."""
    if tensor.dtype is other.dtype and tensor.stride() == other.stride():
        return tensor
    return torch.empty_like(other).copy_(tensor)


def _dtype_of_state(parameter: Tensor) -> torch.dtype:
    return torch.float32 if parameter.dtype in HALVES else parameter.dtype


def decay_first(values: list[Tensor], group: Group) -> None:
    """Applies only a group's weight decay to values; the update that follows must get a weight decay of 0."""
    foreach.mul_(values, 1 - float(group["lr"]) * group["weight_decay"])


def _check_options(optimizer: str, betas: tuple[float, float] = (0.0, 0.0), **options: Any) -> None:
    """Raises an `OptionError` if an option of a group is out of the range of every optimizer."""
    for name in ("lr", "eps", "momentum", "weight_decay"):
        value = options.get(name, 0.0)
        if not value >= 0:
            raise OptionError(f"{optimizer} found {name}={value}; expected a number of 0 or more.")
    if not all(0 <= beta < 1 for beta in betas):
        raise OptionError(f"{optimizer} found betas={betas}; expected two numbers of at least 0 and below 1.")
