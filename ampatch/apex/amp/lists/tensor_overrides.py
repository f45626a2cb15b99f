"""Functions of `torch.Tensor` that amp casts; scripts edit the lists before ``initialize``."""

from __future__ import annotations

import torch

from ampatch.apex.amp.lists._edits import starting_lists

MODULE = torch.Tensor

# The last one has pairs of a name and what to use instead.
FP16_FUNCS, FP32_FUNCS, CASTS, SEQUENCE_CASTS, BANNED_FUNCS = starting_lists(MODULE).values()
