"""Warnings of optimizers that would train badly, or nothing, though nothing is wrong with amp's own set-up.

Must change nothing.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn

from ampatch.errors import warn
from ampatch.half_types import HALVES
from ampatch.parts.adopted import Adopted
from ampatch.scaling.users_optimizer import OptimizerLike
from ampatch.settings import Settings
from ampatch.weights.optimizer_state import parameters_of


def warn_of_bad_training(optimizers: Collection[OptimizerLike], adopted: Adopted, settings: Settings) -> None:
    """Warns of newly adopted optimizers that would train badly, or nothing."""
    if settings.properties.cast_model_type is None and not settings.steps_in_float32:
        for optimizer in optimizers:
            _warn_of_half_updates(optimizer, adopted, settings.properties.opt_level)
    _warn_of_frozen(optimizers, adopted)


def _warn_of_half_updates(optimizer: OptimizerLike, adopted: Adopted, opt_level: str) -> None:
    """Warns if an optimizer updates half weights, at a level that leaves weights as they are."""
    halves = (each for each in parameters_of(optimizer) if each.dtype in HALVES and each.requires_grad)
    parameter = next(halves, None)
    if parameter is None:
        return
    warn(
        f"the {type(optimizer).__name__} updates half weights, such as {adopted.name_of(parameter)} "
        f"({parameter.dtype}), and {_what_is_lost(parameter.dtype, optimizer, opt_level)} Make these weights float32 "
        "before the optimizer (weight.data = weight.data.float()), or use opt_level='O2'."
    )


def warn_of_half_data(parameter: nn.Parameter, adopted: Adopted, opt_level: str) -> bool:
    """Warns if an optimizer updates a parameter to which user code has just given half data, as some losses do.

    Returns:
        True if it has warned.
    """
    optimizers = (each for each in adopted.optimizers if any(own is parameter for own in parameters_of(each)))
    optimizer = next(optimizers, None)
    if optimizer is None or not parameter.requires_grad:
        return False
    kind, lost = type(optimizer).__name__, _what_is_lost(parameter.dtype, optimizer, opt_level)
    warn(
        f"user code has made {adopted.name_of(parameter)} {parameter.dtype}, a weight that the {kind} updates, and "
        f"{lost} Some losses and layers give their weights the type of their inputs: pass float32 inputs to them, "
        "loss_fn(output.float(), target), and make the weight float32 again."
    )
    return True


def _what_is_lost(dtype: torch.dtype, optimizer: OptimizerLike, opt_level: str) -> str:
    lost = f"opt_level={opt_level!r} makes no float32 masters: small updates are lost."
    eps = _eps_lost_in(dtype, optimizer)
    if eps is not None:
        lost += (
            f" In {dtype}, its eps of {eps:g} is zero: where the square of a gradient is zero as well, it "
            "divides by zero, and weights become NaN or infinite."
        )
    return lost


def _eps_lost_in(dtype: torch.dtype, optimizer: OptimizerLike) -> float | None:
    """Returns an optimizer's eps that is zero in a half type, as Adam's 1e-8 is in float16; None if there is none."""
    given = {group["eps"] for group in optimizer.param_groups if isinstance(group.get("eps"), float)}
    return next((eps for eps in given if eps and not torch.tensor(eps, dtype=dtype, device="cpu")), None)


def _warn_of_frozen(optimizers: Collection[OptimizerLike], adopted: Adopted) -> None:
    """Warns of optimizers that have frozen parameters only, if no optimizer has those that are to be trained."""
    updated = {id(each) for record in adopted.records for each in record.gradients.updated.model_parameters()}
    trained = [each for model in adopted.models for each in model.parameters() if each.requires_grad]
    if not trained or not updated.isdisjoint(map(id, trained)):
        return
    for optimizer in optimizers:
        parameters = list(parameters_of(optimizer))
        if parameters and not any(each.requires_grad for each in parameters):
            kind = type(optimizer).__name__
            warn(
                f"the {kind} updates {len(parameters)} parameters, all of which are frozen, and no optimizer has those "
                f"that require gradients, such as {adopted.name_of(trained[0])}. Was it made before get_peft_model, or "
                f"before the model was frozen? Make it after: optimizer = torch.optim.{kind}([each for each in "
                "model.parameters() if each.requires_grad], lr=...)."
            )
