"""An optimizer of float32 masters for a half model in a loop without amp, like ``apex.fp16_utils.FP16_Optimizer``.

Owns the masters, the loss scale, and the scale of existing gradients. Must not change torch. Must change only the
model's parameters and gradients. Must leave gradient arithmetic to `ampatch.native.kernels`.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ampatch.apex.fp16_utils.fp16util import clip_grad_norm
from ampatch.apex.fp16_utils.loss_scaler import DynamicLossScaler, LossScaler
from ampatch.errors import LossScaleError, OptionError, UsageError
from ampatch.half_types import HALVES
from ampatch.native import kernels
from ampatch.opt_levels import check_names
from ampatch.scaling import overflows
from ampatch.scaling.loss_scaler import make_policy
from ampatch.scaling.overflows import OnOverflow, Overflow, OverflowHandler, ScaleChange, check_on_overflow
from ampatch.scaling.step_gate import ClosureGate, check_floor, end_skipped
from ampatch.scaling.users_optimizer import check_optimizer
from ampatch.weights import optimizer_state
from ampatch.weights.exchange import exchanged, unzipped
from ampatch.weights.optimizer_state import of_the_wrapped

logger = logging.getLogger("ampatch")

# Settings of a dynamic scale.
_LOSS_ARGS = ("init_scale", "scale_factor", "scale_window", "min_loss_scale", "max_loss_scale")

_KEYS = (
    "loss_scaler",
    "dynamic_loss_scale",
    "overflow",
    "first_closure_call_this_step",
    "optimizer_state_dict",
    "fp32_from_fp16",
)


class _Masters:
    """The parameters that an optimizer trains: half ones, each with a float32 master, and others.

    Args:
        optimizer: the optimizer; the state of its half parameters becomes float32.

    Attributes:
        halves: half parameters, by group.
        fulls: their masters, by group.
        others: other parameters, by group.
    """

    def __init__(self, optimizer: Any) -> None:
        self.halves: list[list[Tensor]] = []
        self.fulls: list[list[Tensor]] = []
        self.others: list[list[Tensor]] = []
        # By the half parameter itself, as in the state of optimizers: a copy has other ids.
        self._by_half: dict[Tensor, Tensor] = {}
        for group in optimizer.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.requires_grad]
            halves = [parameter for parameter in trained if parameter.dtype in HALVES]
            of_group: list[Tensor] = [nn.Parameter(parameter.detach().clone().float()) for parameter in halves]
            self._by_half.update(zip(halves, of_group, strict=True))
            self.halves.append(halves)
            self.fulls.append(of_group)
            self.others.append([each for each in trained if each.dtype not in HALVES])
            for parameter in halves:
                optimizer_state.retype(optimizer, parameter, parameter.dtype, torch.float32)

    def of(self, parameter: Tensor) -> Tensor:
        """Returns the master of a half parameter, and any other parameter itself."""
        return self._by_half.get(parameter, parameter)

    def pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Returns pairs of a half parameter and its master."""
        return zip(itertools.chain(*self.halves), itertools.chain(*self.fulls), strict=True)

    def check(self, optimizer: Any) -> None:
        """Raises if a parameter that was not trained when the masters were made is to be trained now.

        Raises:
            UsageError: it has a gradient, which nothing would unscale.
        """
        trained = {id(each) for each in itertools.chain(*self.halves, *self.others)}
        for parameter in optimizer_state.parameters_of(optimizer):
            if parameter.requires_grad and parameter.grad is not None and id(parameter) not in trained:
                raise UsageError(
                    f"{optimizer_state.names_in(optimizer)(parameter)} has a gradient, and was frozen or not in this "
                    f"{type(optimizer).__name__} when FP16_Optimizer was made, so that it would step by a scaled "
                    "gradient. Freeze parameters after FP16_Optimizer(optimizer), or make it again."
                )

    @torch.no_grad()
    def write(self) -> None:
        """Rounds the masters to the half parameters."""
        halves, masters = unzipped(self.pairs())
        kernels.copy_to_half(masters, halves)


class FP16_Optimizer:  # noqa: N801 - Apex's name
    """Wraps an optimizer, which then updates float32 masters of its half parameters.

    ::

        model = network_to_half(model)
        optimizer = FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), dynamic_loss_scale=True)
        optimizer.zero_grad()
        optimizer.backward(loss)
        optimizer.clip_master_grads(1.0)
        optimizer.step()

    Gradients of half parameters stay scaled. ``backward`` unscales the gradients of masters and of parameters that are
    not half; with ``update_master_grads=False``, a later call of ``update_master_grads`` does. Gradients of several
    backward passes before a step accumulate in both cases. From construction on, training updates the masters: the next
    step overwrites weights that are loaded into the model later.

    Every ``update_master_grads`` with a dynamic scale syncs with the device once, since ``overflow`` is a bool.

    Args:
        init_optimizer: optimizer of the model's parameters. While it steps, masters replace its float16 and bfloat16
            parameters.
        static_loss_scale: factor of losses, without a check for overflow.
        dynamic_loss_scale: True for a scale that reacts to overflows; an overflow then skips the step.
        dynamic_loss_args: settings of the dynamic scale; the defaults are ``init_scale=2**16``, ``scale_factor=2``,
            ``scale_window=2000``, ``min_loss_scale=2**-24`` and ``max_loss_scale=2**24``.
        verbose: True to log skipped steps.
        on_overflow: "log", "raise", "trace" or a function, as for ``amp.initialize``; decides what a skipped step does.
            Evaluating a closure again is not a skipped step. "trace" logs the gradients, but has no trace.

    Attributes:
        optimizer: wrapped optimizer.
        loss_scaler: loss scaler; ``loss_scale`` reads and writes its ``cur_scale``.
        dynamic_loss_scale: True if the scale reacts to overflows.
        overflow: True if the gradients overflowed when they were last unscaled; the next step is then skipped.
        fp16_groups: half parameters, by group.
        fp32_from_fp16_groups: masters of the half parameters, by group.
        fp32_from_fp32_groups: other parameters, by group.
        first_closure_call_this_step: True if the next evaluation of a closure is the first one of its step.

    Raises:
        OptionError: ``init_optimizer`` is not an optimizer, or a loss scale argument is invalid.
    """

    _checks_static_scale = False

    def __init__(
        self,
        init_optimizer: Any,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: Mapping[str, Any] | None = None,
        verbose: bool = True,
        *,
        on_overflow: OnOverflow = "log",
    ) -> None:
        check_optimizer(init_optimizer)
        self._overflows = OverflowHandler(check_on_overflow(on_overflow))
        self.verbose = verbose
        self.dynamic_loss_scale = dynamic_loss_scale
        self.loss_scaler: LossScaler
        if dynamic_loss_scale:
            settings = dynamic_loss_args or {}
            check_names(settings, _LOSS_ARGS, "dynamic_loss_args has")
            self.loss_scaler = _dynamic_loss_scaler(**settings)
        else:
            self.loss_scaler = LossScaler(_checked_scale(static_loss_scale))
        self.optimizer = init_optimizer
        self.overflow = False
        self.first_closure_call_this_step = True
        self._change: ScaleChange | None = self._no_change()  # None: the scale has not reacted to `overflow` yet
        self._unscaled_by = self.loss_scale  # at the last unscaling
        # Scale of gradients that were not cleared yet; None if there are no such gradients, or if the scale is current.
        self._half_scale: float | None = None
        self._are_unscaled = False  # True if those of masters and of other parameters are unscaled already
        self._masters = _Masters(init_optimizer)
        self.fp16_groups, self.fp32_from_fp16_groups = self._masters.halves, self._masters.fulls
        self.fp32_from_fp32_groups = self._masters.others

    def _updated(self) -> Iterator[Tensor]:
        """Yields the tensors that the inner optimizer updates, with masters in place of half parameters."""
        return map(self._masters.of, optimizer_state.parameters_of(self.optimizer))

    # Attributes of the inner optimizer

    state = of_the_wrapped("state", "State of the inner optimizer.")
    param_groups = of_the_wrapped("param_groups", "Groups of the inner optimizer, with the model's parameters.")

    @property
    def loss_scale(self) -> float:
        """Factor of losses."""
        return self.loss_scaler.cur_scale

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        self.loss_scaler.cur_scale = _checked_scale(scale)

    # Gradients

    def zero_grad(self, set_grads_to_None: bool = False) -> None:  # noqa: N803 - Apex's name
        """Clears the gradients of the masters and of the model's parameters.

        Args:
            set_grads_to_None: True to set gradients to None; False to set them to 0.
        """
        if self.overflow:  # no step skips these gradients; a loop that leaves out bad steps must end
            self._react()
        for parameter in itertools.chain(self._updated(), *self.fp16_groups):
            if set_grads_to_None:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.detach().zero_()
        self._half_scale, self._are_unscaled = None, False

    def backward(self, loss: Tensor, update_master_grads: bool = True, retain_graph: bool = False) -> None:
        """Runs the backward pass of the loss, multiplied by the scale.

        Args:
            loss: floating-point tensor of one element.
            update_master_grads: True to call `update_master_grads` afterwards; with False, the caller must call it
                after the last backward pass.
            retain_graph: True to keep the graph, as for ``loss.backward``.
        """
        if self.overflow and self._change is None:
            parameters = itertools.chain(*self.fp16_groups, *self.fp32_from_fp32_groups)
            if not self.loss_scaler.has_overflow(parameters):  # the gradients were cleared, and no step skips them
                self._react()
        scale = self.loss_scale
        self._bring_to(scale)
        (loss.float() * scale).backward(retain_graph=retain_graph)
        if update_master_grads:
            self.update_master_grads()

    @torch.no_grad()
    def _bring_to(self, scale: float) -> None:
        """Rescales existing gradients to a scale, so that the backward pass adds gradients of the same scale."""
        half_grads = optimizer_state.gradients_of(itertools.chain(*self.fp16_groups))
        full_grads = optimizer_state.gradients_of(itertools.chain(*self.fp32_from_fp32_groups))
        full_scale = 1.0 if self._are_unscaled else self._half_scale
        for grads, at in ((half_grads, self._half_scale), (full_grads, full_scale)):
            if grads and at is not None and at != scale:
                kernels.multiply_(grads, _number(scale / at, grads[0]))
        self._half_scale, self._are_unscaled = scale, False

    @torch.no_grad()
    def update_master_grads(self) -> None:
        """Copies the model's gradients, unscaled, to the masters; if the scale is dynamic, checks for overflow.

        Raises:
            UsageError: a parameter was frozen, or not in the optimizer, when this object was made; nothing was changed.
        """
        self._masters.check(self.optimizer)
        half_scale = self.loss_scale if self._half_scale is None else self._half_scale
        full_scale = 1.0 if self._are_unscaled else half_scale
        half_grads: list[Tensor] = []
        master_grads: list[Tensor] = []
        sparse: list[Tensor] = []
        for parameter, master in self._masters.pairs():
            grad = parameter.grad
            if grad is None:
                master.grad = None
            elif grad.is_sparse:
                master.grad = grad.float()
                sparse.append(master.grad)
            else:
                if master.grad is None:
                    master.grad = torch.empty_like(grad, dtype=torch.float32)
                half_grads.append(grad)
                master_grads.append(master.grad)
        full_grads = optimizer_state.gradients_of(itertools.chain(*self.fp32_from_fp32_groups))
        found = [*half_grads, *sparse, *full_grads]
        found_inf = torch.zeros((), dtype=torch.float32, device=found[0].device if found else "cpu")
        kernels.unscale_copy(half_grads, master_grads, _number(1 / half_scale, found_inf), found_inf, write_back=False)
        kernels.unscale_(sparse, _number(1 / half_scale, found_inf), found_inf)
        kernels.unscale_(full_grads, _number(1 / full_scale, found_inf), found_inf)
        self._half_scale, self._are_unscaled = half_scale, True
        overflow = (self.dynamic_loss_scale or self._checks_static_scale) and bool(found_inf)
        if self.overflow and not overflow:
            self._react()
        self.overflow = overflow
        self._unscaled_by, self._change = half_scale, None

    def clip_master_grads(self, max_norm: float, norm_type: float = 2) -> Tensor | float:
        """Clips the gradients of all parameters that the optimizer updates, by their common norm.

        Args:
            max_norm: upper bound of the norm.
            norm_type: order of the norm.

        Returns:
            Norm before clipping; -1 if the gradients overflowed, and nothing was clipped.
        """
        if self.overflow:
            return -1
        return clip_grad_norm(self._updated(), max_norm, norm_type)

    def inspect_master_grad_data(self) -> list[list[Tensor | None]] | None:
        """Returns the gradients of all parameters that the optimizer updates, by group; None if they overflowed."""
        if self.overflow:
            logger.warning("There are no master gradients to inspect: the last ones overflowed.")
            return None
        return [
            [None if full.grad is None else full.grad.detach() for full in map(self._masters.of, group["params"])]
            for group in self.param_groups
        ]

    # Steps

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps and copies the masters to the model's parameters, or skips the step after an overflow.

        Args:
            closure: function that clears the gradients, calls this object's ``backward``, and returns the loss. At each
                call the model has the current values of the masters. It is called again while its gradients overflow.

        Returns:
            Result of the inner step; None if it was skipped.

        Raises:
            LossScaleError: the gradients overflowed with the loss scale at its lower limit.
            GradientOverflowError: the step was skipped, and ``on_overflow`` is "raise".
        """
        skipped = None
        if self.overflow and closure is None:
            change = self._react()
            skipped = end_skipped(
                self.optimizer,
                [(change, self.loss_scaler.min_scale)],
                self._overflow_event,
                self._overflows,
                lambda: self._log(str(change)),
            )
            result = None
        else:
            try:
                with exchanged(self._masters.pairs()):
                    result = self.optimizer.step() if closure is None else self._step_with_closure(closure)
                self._react()
            finally:
                self._masters.write()
        self._half_scale, self._are_unscaled = None, False
        if skipped is not None:
            self._overflows.handle(skipped)
        return result

    def _overflow_event(self) -> Overflow:
        optimizer = self.optimizer
        names = optimizer_state.names_in(optimizer)
        of_masters = {id(master): names(parameter) for parameter, master in self._masters.pairs()}
        found = overflows.non_finite_gradients(self._updated(), lambda each: of_masters.get(id(each)) or names(each))
        return Overflow(type(optimizer).__name__, (self._react(),), found, remark="" if found else overflows.CLEARED)

    def _step_with_closure(self, closure: Callable[[], Any]) -> Any:
        gate = ClosureGate(self.optimizer, may_go_back=self.dynamic_loss_scale)

        def evaluate() -> Any:
            with exchanged(self._masters.pairs()):  # exchanges back: the closure gets the half parameters
                if not self.first_closure_call_this_step:
                    self._masters.write()
                self.first_closure_call_this_step = False
                loss = closure()
                try:
                    while self.overflow:
                        check_floor([(self._react(), self.loss_scaler.min_scale)], self._overflow_event)
                        self._log(f"Gradient overflow. Evaluating the closure again, at loss scale {self.loss_scale}")
                        loss = closure()
                except LossScaleError as error:
                    gate.leave(error, None)
                return loss

        try:
            result = gate.run(lambda: self.optimizer.step(evaluate))
        finally:
            self.first_closure_call_this_step = True
        if gate.overflowed is not None:
            raise gate.overflowed
        return result

    def _react(self) -> ScaleChange:
        """Lets the scale react to `overflow`, once per step, and once per evaluation of a closure that overflowed."""
        if self._change is None:
            self.loss_scaler.update_scale(self.overflow)
            self._change = ScaleChange(0, self._unscaled_by, self.loss_scale)
        return self._change

    def _no_change(self) -> ScaleChange:
        return ScaleChange(0, self.loss_scale, self.loss_scale)

    def _log(self, line: str) -> None:
        if self.verbose:
            logger.warning("%s", line)

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Returns the state under Apex's keys; ``torch.load(weights_only=True)`` can read it.

        It includes the masters, so that training continues bit for bit. It does not include the model's own state.
        """
        return {
            "loss_scaler": dict(vars(self.loss_scaler)),
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "overflow": self.overflow and self._change is None,  # False once a step was skipped for it
            "first_closure_call_this_step": self.first_closure_call_this_step,
            "optimizer_state_dict": self.optimizer.state_dict(),
            "fp32_from_fp16": [[master.detach() for master in group] for group in self.fp32_from_fp16_groups],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads a saved state, including the kind and settings of its loss scale, and copies the masters to the model.

        Args:
            state_dict: result of `state_dict`, or of Apex's method, which saves the loss scaler as an object.

        Raises:
            OptionError: a key is missing, the loss scaler is invalid, or the masters have other shapes than this
                optimizer's; nothing was changed.
            ValueError: the inner optimizer rejects its part; nothing was changed.
        """
        if not isinstance(state_dict, Mapping):
            raise OptionError(
                f"found {type(state_dict).__name__} as the state of an FP16_Optimizer; expected what state_dict() "
                "returned."
            )
        missing = [key for key in _KEYS if key not in state_dict]
        if missing:
            raise OptionError(
                f"the state of an FP16_Optimizer lacks {', '.join(missing)}; expected what state_dict() returned."
            )
        saved_groups: Sequence[Sequence[Tensor]] = state_dict["fp32_from_fp16"]
        found, expected = _shapes(saved_groups), _shapes(self.fp32_from_fp16_groups)
        if found != expected:
            raise OptionError(
                f"the saved masters have the shapes {found}, by group; expected {expected}. Make the optimizer from "
                "parameters of the saved shapes, in the same groups."
            )
        dynamic = bool(state_dict["dynamic_loss_scale"])
        loss_scaler = _loss_scaler_from(state_dict["loss_scaler"], dynamic)
        with exchanged(self._masters.pairs()):  # the inner optimizer casts its state to the type of its parameters
            self.optimizer.load_state_dict(state_dict["optimizer_state_dict"])
        self.loss_scaler, self.dynamic_loss_scale = loss_scaler, dynamic
        self.overflow = bool(state_dict["overflow"])
        self.first_closure_call_this_step = bool(state_dict["first_closure_call_this_step"])
        self._unscaled_by, self._change = self.loss_scale, None if self.overflow else self._no_change()
        self._half_scale, self._are_unscaled = None, False
        with torch.no_grad():
            masters = itertools.chain(*self.fp32_from_fp16_groups)
            for master, saved in zip(masters, itertools.chain(*saved_groups), strict=True):
                master.copy_(saved)
        self._masters.write()


def _dynamic_loss_scaler(**settings: Any) -> DynamicLossScaler:
    """Returns a dynamic loss scaler with checked settings, named in `_LOSS_ARGS`; amp's defaults fill missing ones."""
    policy = make_policy("dynamic", **settings)
    return DynamicLossScaler(
        policy.init_scale,
        policy.growth_factor,
        policy.scale_window,
        min_scale=policy.min_loss_scale,
        max_scale=policy.max_loss_scale,
    )


def _loss_scaler_from(saved: Any, dynamic: bool) -> LossScaler:
    """Returns a loss scaler made from a saved one: its attributes, or an object of either kind that Apex had.

    Raises:
        OptionError: ``saved`` is none of these, or a setting is out of range.
    """
    found: Mapping[str, Any] = saved if isinstance(saved, Mapping) else getattr(saved, "__dict__", {})
    scale = found.get("cur_scale", found.get("_loss_scale"))
    if scale is None:
        raise OptionError(
            f"found {type(saved).__name__} without a cur_scale as the state of a loss scaler; expected what "
            "state_dict() returned."
        )
    if not dynamic:
        return LossScaler(_checked_scale(scale))
    # Apex's later kind is amp's scaler: it counts steps without overflow, and has other names.
    loss_scaler = _dynamic_loss_scaler(
        init_scale=scale,
        scale_factor=found.get("scale_factor", 2.0),
        scale_window=found.get("scale_window", found.get("_scale_seq_len", 2000)),
        min_loss_scale=found.get("min_scale", found.get("_min_loss_scale")),
        max_loss_scale=found.get("max_scale", found.get("_max_loss_scale", 2.0**24)),
    )
    loss_scaler.cur_iter = found.get("cur_iter", found.get("_unskipped", 0))
    loss_scaler.last_overflow_iter = found.get("last_overflow_iter", -1)
    return loss_scaler


def _checked_scale(scale: float) -> float:
    return make_policy(scale).init_scale


def _number(value: float, like: Tensor) -> Tensor:
    """Returns a number as a 0-dimensional float32 tensor, on the device of another tensor."""
    return torch.tensor(value, dtype=torch.float32, device=like.device)


def _shapes(groups: Iterable[Iterable[Tensor]]) -> list[list[tuple[int, ...]]]:
    return [[tuple(tensor.shape) for tensor in group] for group in groups]
