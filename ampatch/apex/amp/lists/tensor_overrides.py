"""Functions of `torch.Tensor` that amp casts; scripts edit the lists before ``initialize``."""

from __future__ import annotations

import torch

from ampatch.apex.amp.lists._edits import starting_lists

MODULE = torch.Tensor

_LISTS = starting_lists(MODULE)

FP16_FUNCS: list[str] = _LISTS["FP16_FUNCS"]
FP32_FUNCS: list[str] = _LISTS["FP32_FUNCS"]
CASTS: list[str] = _LISTS["CASTS"]
SEQUENCE_CASTS: list[str] = _LISTS["SEQUENCE_CASTS"]
#: Pairs of a function's name and what to use instead.
BANNED_FUNCS: list[tuple[str, str]] = _LISTS["BANNED_FUNCS"]
