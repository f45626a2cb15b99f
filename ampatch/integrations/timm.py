"""``AmpatchScaler``: amp in the form of timm's scalers, for training scripts in the manner of timm's ``train.py``.

Owns the order of timm's call: backward pass, clipping, step. Must never set amp up or take it down, as the script does
that with ``amp.initialize``; and must keep no state, as the loss scale is the session's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ampatch import amp
from ampatch.errors import OptionError, UsageError
from ampatch.half_types import needs_scale
from ampatch.integrations import versions
from ampatch.opt_levels import as_flag, check_limit, hint
from ampatch.runtime import runtime
from ampatch.scaling.users_optimizer import check_optimizer
from ampatch.session import Session

versions.need("ampatch.integrations.timm", "timm", "timm", (1, 0))

from timm.utils import dispatch_clip_grad  # noqa: E402

__all__ = ["AmpatchScaler"]

_CLIP_MODES = ("norm", "value", "agc")


class AmpatchScaler:
    """Scales the loss, clips the gradients and steps, in place of timm's ``NativeScaler`` and ``ApexScaler``.

    ::

        model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
        loss_scaler = AmpatchScaler()

        loss_scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters())

    After ``amp.initialize(..., enabled=False)`` it does the same without a scale.

    Attributes:
        state_dict_key: key of its state in timm's checkpoints, the same as ``NativeScaler``'s.
    """

    state_dict_key = "amp_scaler"

    def __call__(
        self,
        loss: Tensor,
        optimizer: Any,
        clip_grad: float | None = None,
        clip_mode: str = "norm",
        parameters: Iterable[Tensor] | Tensor | None = None,
        create_graph: bool = False,
        need_update: bool = True,
    ) -> None:
        """Runs the backward pass of a scaled loss and unscales the gradients; then clips them and steps.

        After an overflow the optimizer skips its step.

        Args:
            loss: 0-dimensional loss, not scaled.
            optimizer: optimizer that was passed to ``amp.initialize``.
            clip_grad: limit for `timm.utils.dispatch_clip_grad`; None: gradients are not clipped.
            clip_mode: "norm", "value" or "agc".
            parameters: the model's parameters whose gradients to clip, or their masters; None: all that the optimizer
                updates. Masters are clipped in place of half weights; parameters of other optimizers are left out.
            create_graph: records the backward pass for second derivatives, for optimizers such as Adahessian.
            need_update: False to accumulate gradients: no clipping and no step.

        Raises:
            OptionError: an argument is of the wrong kind; ``clip_grad`` is negative or NaN; ``clip_mode`` is unknown;
                or ``parameters`` has none of the optimizer's.
            UsageError: ``amp.initialize`` was not called, or not with this optimizer; torch.autocast is on; or
                ``create_graph=True`` in float16, or with master weights.
        """
        _check_arguments(loss, optimizer, clip_grad, parameters)
        create_graph, need_update = as_flag("create_graph", create_graph), as_flag("need_update", need_update)
        if clip_mode not in _CLIP_MODES:
            raise OptionError(f"found clip_mode={clip_mode!r}.{hint(clip_mode, _CLIP_MODES)}")
        session = runtime.live
        if session is not None:
            _check(session, loss, create_graph)
        elif not runtime.disabled:
            raise UsageError(
                "AmpatchScaler was called before amp.initialize. Type model, optimizer = amp.initialize(model, "
                "optimizer) where the script sets amp up."
            )
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward(create_graph=create_graph)
        if not need_update:
            return
        if clip_grad is not None:
            with amp.disable_casts():
                dispatch_clip_grad(_updated(optimizer, parameters), clip_grad, mode=clip_mode)
        optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """Returns `amp.state_dict`: the loss scale as plain numbers."""
        return amp.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads a state of ``AmpatchScaler``, ``NativeScaler`` or ``ApexScaler``; see `amp.load_state_dict`."""
        amp.load_state_dict(state_dict)


def _check_arguments(loss: Any, optimizer: Any, clip_grad: Any, parameters: Any) -> None:
    if not isinstance(loss, Tensor):
        found = (
            f"the loss is {loss!r}" if isinstance(loss, (int, float)) else f"found {type(loss).__name__} as the loss"
        )
        raise OptionError(
            f"{found}; expected the tensor that the criterion returns. Type loss = criterion(model(images), labels), "
            "then loss_scaler(loss, optimizer)."
        )
    check_optimizer(optimizer)
    if clip_grad is not None:
        check_limit("clip_grad", clip_grad, ", or None to leave gradients as they are")
    if isinstance(parameters, (str, nn.Module)) or not isinstance(parameters, (Iterable, Tensor, type(None))):
        raise OptionError(
            f"found {type(parameters).__name__} as parameters; expected an iterable of them. Type "
            "parameters=model.parameters()."
        )


def _check(session: Session, loss: Tensor, create_graph: bool) -> None:
    """Raises if another precision is asked for, or second derivatives where they would be wrong."""
    if torch.is_autocast_enabled(loss.device.type):
        raise UsageError(
            "found torch.autocast around AmpatchScaler, so that two systems cast at once. Leave torch.autocast out of "
            "the script: type amp_autocast = contextlib.nullcontext where timm's train.py chooses one."
        )
    properties = session.settings.properties
    has_masters = session.settings.steps_in_float32
    is_scaled = needs_scale(properties.half_dtype) and session.settings.patches_any
    if create_graph and (has_masters or is_scaled):
        why = (
            "the graph ends in half weights, and the optimizer updates their float32 masters"
            if has_masters
            else "second derivatives overflow in float16, unscaled and without a check"
        )
        raise UsageError(
            f"create_graph=True is wrong at opt_level={properties.opt_level!r} with {properties.half_dtype}: {why}. "
            "Type opt_level='O1', half_dtype='bfloat16' in amp.initialize."
        )


def _updated(optimizer: Any, parameters: Iterable[Tensor] | Tensor | None) -> list[Tensor]:
    """Returns the tensors whose gradients the optimizer reads: all, or those that stand for given parameters.

    Raises:
        OptionError: there are none among the given parameters.
    """
    updated, session = list(amp.master_params(optimizer)), runtime.live
    if parameters is None:
        return updated
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if session is None:
        found = [each for each in updated if any(each is other for other in given)]
    else:
        found = [full for _, full in session.gradients.updated(optimizer, given)]
    if not found:
        raise OptionError(
            f"found no parameter of this {type(optimizer).__name__} among parameters, so that clip_grad would clip "
            "nothing. Pass parameters=model.parameters() of the model that it trains."
        )
    return found
