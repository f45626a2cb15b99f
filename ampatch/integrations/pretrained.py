"""``save_pretrained`` of transformers' models that amp has made half: ``config.json`` says what is saved, float32.

Owns the type in that file. Must not be imported unless transformers is, as adapters of other frameworks use it too.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ampatch.integrations.shared_patches import SharedPatches
from ampatch.ledger import PatchLedger
from ampatch.runtime import runtime


def _install(ledger: PatchLedger) -> None:
    original = PreTrainedModel.save_pretrained

    @functools.wraps(original)
    def save_pretrained(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        with _types_as_saved(model):
            return original(model, *args, **kwargs)

    ledger.set(PreTrainedModel, "save_pretrained", save_pretrained)


#: Within `honest_configs.installed()`, ``save_pretrained`` writes the type that it saves into ``config.json``. Without
#: it, the config has the type of the first parameter, which is half while the state dict is float32.
honest_configs = SharedPatches(_install)


@contextlib.contextmanager
def _types_as_saved(model: PreTrainedModel) -> Iterator[None]:
    """Makes ``model.parameters()`` yield tensors of the types that its state dict has, while the block runs."""
    live, ledger, parameters = runtime.live, PatchLedger(), model.parameters

    def as_saved(*args: Any, **kwargs: Any) -> Iterator[Tensor]:
        for parameter in parameters(*args, **kwargs):
            dtype = None if live is None else live.conversion.dtype_before(parameter)
            yield parameter if dtype is None else torch.empty((), dtype=dtype, device=parameter.device)

    ledger.set(model, "parameters", as_saved)
    try:
        yield
    finally:
        ledger.undo()
