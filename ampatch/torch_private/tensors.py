"""Tensors and their memory, below the public methods. Must only name what torch has, and read it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch import _utils as utils
from torch.autograd import forward_ad

#: Base class of Tensor, whose methods amp does not patch: its ``reciprocal``, and its attribute ``data``.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/autograd/python_variable.cpp
#: Seen in: torch 2.10 to 2.13
#: Until: never; amp has to write to ``data`` below its own patch of it, and to call methods below theirs.
reciprocal = torch._C.TensorBase.reciprocal
DATA: Any = torch._C.TensorBase.__dict__["data"]

#: Modules that say they hold torch's methods of tensors: those in C++, and those in Python.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_tensor.py
#: Seen in: torch 2.10 to 2.13
#: Until: never; their names follow torch's tree of files.
HOMES_OF_METHODS = ("torch._C", "torch._tensor")

#: True if a tensor is torch's zero without memory, as some derivatives are; True if it is a view; the values of an
#: uncoalesced sparse tensor, as they are.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/native_functions.yaml
#: Seen in: torch 2.10 to 2.13
#: Until: torch has public methods for them; ``Tensor.values`` refuses uncoalesced tensors.
is_zerotensor = Tensor._is_zerotensor
is_view = Tensor._is_view
uncoalesced_values = Tensor._values

#: Exchanges all that two tensors are, their Python objects excepted.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/Module.cpp
#: Seen in: torch 2.10 to 2.13
#: Until: ``torch.utils.swap_tensors`` takes parameters with weak references, and those that belong to a graph.
swap_tensor_impl = torch._C._swap_tensor_impl

#: Identity of a storage, whichever Python object shows it, and the number of tensors and objects that hold it.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_inductor/cudagraph_trees.py
#: Seen in: torch 2.10 to 2.13
#: Until: torch says publicly whether two tensors share memory.
storage_id: Callable[[Any], int] = operator.attrgetter("_cdata")
storage_use_count = torch._C._storage_Use_Count

#: Copies tensors into one contiguous vector, and shows such a vector as tensors of their shapes.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_utils.py
#: Seen in: torch 2.10 to 2.13
#: Until: never; Apex's ``apex_C`` has these two functions.
flatten_dense_tensors: Callable[..., Any] = utils._flatten_dense_tensors
unflatten_dense_tensors: Callable[..., Any] = utils._unflatten_dense_tensors


def is_plain(tensor: Tensor) -> bool:
    """Returns True if a tensor's memory holds its elements, and it has no derivative in forward mode.

    Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/autograd/forward_ad.py
    Seen in: torch 2.10 to 2.13
    Until: torch says publicly whether forward mode is on; without that check, each call costs a frame more.
    """
    return (
        tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.is_neg()
        and not tensor._is_zerotensor()
        and (forward_ad._current_level < 0 or forward_ad.unpack_dual(tensor).tangent is None)
    )
