"""``save_pretrained`` of transformers' models that amp has made half: ``config.json`` says what is saved, float32.

Owns the type in that file. Must not be imported unless transformers is, as adapters of other frameworks use it too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ampatch.integrations.shared_patches import SharedPatches, put_around
from ampatch.ledger import PatchLedger
from ampatch.runtime import runtime


def _install(ledger: PatchLedger) -> None:
    put_around(ledger, PreTrainedModel, "save_pretrained", _save_pretrained)


#: Within `honest_configs.installed()`, ``save_pretrained`` writes the type that it saves into ``config.json``. Without
#: it, the config has the type of the first parameter, which is half while the state dict is float32.
honest_configs = SharedPatches(_install)


def _save_pretrained(original: Callable[..., Any], model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    ledger = PatchLedger()
    put_around(ledger, model, "parameters", _as_saved)
    try:
        return original(model, *args, **kwargs)
    finally:
        ledger.undo()


def _as_saved(parameters: Callable[..., Iterator[Tensor]], *args: Any, **kwargs: Any) -> Iterator[Tensor]:
    """Yields tensors of the types that the parameters have in their model's state dict."""
    live = runtime.live
    for parameter in parameters(*args, **kwargs):
        dtype = None if live is None else live.weights.conversion.dtype_before(parameter)
        yield parameter if dtype is None else torch.empty((), dtype=dtype, device=parameter.device)
