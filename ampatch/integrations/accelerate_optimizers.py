"""amp beside Hugging Face Accelerate, for the adapters of Accelerate and of what is built on it.

Owns what Accelerate's classes are told about optimizers that amp has adopted: skipped steps, and the parameters whose
gradients are to be clipped. Also what excludes amp, and the file of the loss scale. Must not know a training loop.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ampatch import amp
from ampatch.errors import OptionError, warn
from ampatch.half_types import HALVES
from ampatch.integrations import versions
from ampatch.integrations.shared_patches import SharedPatches, put_around
from ampatch.ledger import PatchLedger
from ampatch.opt_levels import LEVELS
from ampatch.runtime import runtime

versions.need("this adapter of ampatch", "accelerate", "accelerate", (1, 15))

from accelerate import Accelerator  # noqa: E402
from accelerate.optimizer import AcceleratedOptimizer  # noqa: E402

#: File of a checkpoint with the state of the loss scale; "scaler.pt" is of ``torch.amp.GradScaler``, and a run without
#: amp would fail to load it where it has none.
STATE_NAME = "ampatch.pt"
_GRAD_SCALER_NAME = "scaler.pt"

_VARIABLE = "ACCELERATE_MIXED_PRECISION"


def bare(optimizer: Any) -> Any:
    """Returns the optimizer inside of Accelerate's wrappers; any other optimizer unchanged."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


def updated(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Returns what the adopted optimizers update in place of the given parameters: masters in place of half ones.

    Raises:
        OptionError: a model or an optimizer was given.
        UsageError: their gradients are still scaled, since DDP has not reduced them yet.
    """
    session = runtime.live
    if isinstance(parameters, nn.Module) or hasattr(parameters, "param_groups"):
        raise OptionError(
            f"gradients of {type(parameters).__name__} cannot be clipped; expected parameters. Type "
            "accelerator.clip_grad_norm_(model.parameters(), 1.0)."
        )
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if session is None:
        return given
    masters: dict[int, Tensor] = {}
    for optimizer in session.adopted.optimizers:
        found = session.gradients.updated(optimizer, given)
        if found:
            gradients = session.adopted.record_of(optimizer).gradients
            gradients.check_unscaled("clip where accelerator.sync_gradients is True. These gradients are")
        masters |= {id(each): full for each, full in found}
    return [masters.get(id(each), each) for each in given]


# What excludes amp


def launched_precision(accelerator: Accelerator) -> torch.dtype | None:
    """Returns the half type that ``accelerate launch`` chose for an Accelerator, by its option or its config file.

    Accelerate keeps no record of where its precision came from: an argument of the Accelerator that equals the variable
    counts as the variable's.
    """
    found = accelerator.mixed_precision
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(found) if found == os.environ.get(_VARIABLE) else None


def with_launched_half(options: dict[str, Any], launched: torch.dtype | None) -> dict[str, Any]:
    """Returns options for amp with the launcher's half type, if neither they nor their opt level have one."""
    level = LEVELS.get(options.get("opt_level", "O1"))
    is_free = options.get("half_dtype") is None and (level is None or level.half_dtype is None)
    return {**options, "half_dtype": launched} if is_free else options


def replace_precision(accelerator: Accelerator, ledger: PatchLedger) -> None:
    """Turns off the precision that ``accelerate launch`` chose, in favour of the live session.

    Warns:
        AmpWarning: there is one, and it was on.
    """
    if not accelerator.native_amp or launched_precision(accelerator) is None:
        return
    if accelerator.is_main_process:
        live = amp.settings()
        warn(
            f"accelerate launch, or its config file, has mixed_precision={accelerator.mixed_precision!r}. amp "
            f"replaces it, and casts to {live['half_dtype']} at opt_level={live['opt_level']!r}. To launch without "
            "this warning, type accelerate launch --mixed_precision no."
        )
    ledger.set(accelerator, "native_amp", False)
    ledger.set(accelerator, "scaler", None)


def check_accelerator(accelerator: Accelerator, off: str) -> None:
    """Raises if an Accelerator casts as well, or shards weights; `replace_precision` takes what the launcher chose.

    Args:
        accelerator: the Accelerator.
        off: what the user types to turn amp off.

    Raises:
        OptionError: it does.
    """
    found = accelerator.mixed_precision
    if found != "no" and launched_precision(accelerator) is None:
        raise OptionError(
            f"accelerate has mixed_precision={found!r}, which casts as well as amp. Leave it out of Accelerator(...), "
            f"and type accelerate launch --mixed_precision no; or turn amp off ({off})."
        )
    sharding = accelerator.distributed_type.value
    if sharding in ("DEEPSPEED", "FSDP", "MEGATRON_LM"):
        raise OptionError(
            f"accelerate has the distributed type {sharding}, which shards the weights that amp is to adopt. Launch "
            f"without its plugin, such as with torchrun; or turn amp off ({off})."
        )


def check_weights(named_parameters: Iterable[tuple[str, Tensor]]) -> None:
    """Raises if weights that are to be trained are half already.

    Raises:
        OptionError: they are.
    """
    for name, parameter in named_parameters:
        if parameter.requires_grad and parameter.dtype in HALVES:
            raise OptionError(
                f"{name} is to be trained and is {parameter.dtype}, in which small updates are lost: amp makes half "
                "weights and their float32 masters itself. Load the model with from_pretrained(..., "
                "dtype=torch.float32), or call model.float(). On a frozen half base, type weight.data = "
                "weight.data.float() for each trained weight."
            )


# Checkpoints


def load_scale(folder: str | Path) -> None:
    """Loads the loss scale of a checkpoint, amp's or that of a ``torch.amp.GradScaler``.

    Warns:
        AmpWarning: it has neither, and the scale is dynamic.
    """
    for name in (STATE_NAME, _GRAD_SCALER_NAME):
        path = Path(folder, name)
        if path.is_file():
            amp.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
            return
    if amp.settings()["loss_scale"] == "dynamic":
        warn(f"there is no {STATE_NAME} in {folder}: it was probably saved with amp off. The loss scale starts afresh.")


# Patches of Accelerate's classes


def _install(ledger: PatchLedger) -> None:
    ledger.set(AcceleratedOptimizer, "_is_overflow", property(_is_overflow, _note_overflow))
    put_around(ledger, Accelerator, "clip_grad_norm_", _clip_updated)
    put_around(ledger, Accelerator, "clip_grad_value_", _clip_updated)


#: Within `adopted_optimizers.installed()`, ``_is_overflow`` is right for adopted optimizers: ``step_was_skipped`` and
#: ``accelerator.optimizer_step_was_skipped`` read it. ``accelerator.clip_grad_norm_`` and ``clip_grad_value_`` clip the
#: gradients that these optimizers step with.
adopted_optimizers = SharedPatches(_install)


def _is_overflow(optimizer: AcceleratedOptimizer) -> bool:
    session = runtime.live
    is_ours = session is not None and session.adopted.has(optimizer)
    # Accelerate writes the attribute only if it has a scaler; what a user writes holds.
    return bool(vars(optimizer)["_is_overflow"]) or (is_ours and amp.step_was_skipped(optimizer))


def _note_overflow(optimizer: AcceleratedOptimizer, is_overflow: bool) -> None:
    vars(optimizer)["_is_overflow"] = is_overflow


def _clip_updated(
    original: Callable[..., Any], accelerator: Accelerator, parameters: Any, *args: Any, **kwargs: Any
) -> Any:
    return original(accelerator, updated(parameters), *args, **kwargs)
