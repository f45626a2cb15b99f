"""Operators and functions of torch that have no public name, and what says which operators there are.

Must only name them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch import _ops as ops
from torch.utils import _pytree as pytree

#: Types of operators: with an overload, as dispatch modes see them, and without.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_ops.py
#: Seen in: torch 2.10 to 2.13
#: Until: torch exports the types of ``torch.ops``.
OpOverload = ops.OpOverload
OpOverloadPacket = ops.OpOverloadPacket

#: Attributes of operators: that of an overload for what it is an overload of, and that of ``torch.ops``' functions for
#: their name with its namespace.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_ops.py
#: Seen in: torch 2.10 to 2.13
#: Until: torch exports the types of ``torch.ops``.
PACKET = "_overloadpacket"
QUALIFIED_NAME = "_qualified_op_name"

#: Schemas of all overloads of an operator, by its name such as "aten::add".
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/jit/python/init.cpp
#: Seen in: torch 2.10 to 2.13
#: Until: torch has public schemas of operators.
get_schemas_for_operator = torch._C._jit_get_schemas_for_operator

#: Walks nested lists, tuples, dicts and registered types.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/utils/_pytree.py
#: Seen in: torch 2.10 to 2.13
#: Until: torch exports them from a public module.
tree_flatten = pytree.tree_flatten
tree_leaves = pytree.tree_leaves
tree_map = pytree.tree_map
tree_map_only = pytree.tree_map_only
tree_unflatten = pytree.tree_unflatten

#: Namespaces of torch's own operators.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/core/interned_strings.h
#: Seen in: torch 2.10 to 2.13
#: Until: torch says publicly whether an operator is its own.
NAMESPACES = frozenset(
    ("aten", "c10d", "c10d_functional", "_c10d_functional", "higher_order", "inductor", "mkl", "mkldnn", "onednn")
) | {"prim", "prims", "profiler", "quantized", "_quantized", "rngprims", "sparse", "symm_mem"}

#: The operator below all casts: its name, and itself.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/native_functions.yaml
#: Seen in: torch 2.10 to 2.13
#: Until: never; dispatch modes see this one.
CAST = "_to_copy"
TO_COPY = torch.ops.aten._to_copy.default

#: An operator that returns a view, though its schema does not say so.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/native_functions.yaml
#: Seen in: torch 2.10 to 2.13
#: Until: its schema says that its result has the memory of its argument.
UNSAFE_VIEW: Callable[..., Tensor] = torch.ops.aten._unsafe_view.default

#: Whole layers of transformers as one operator, which torch's modules call in eval mode.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/native_functions.yaml
#: Seen in: torch 2.10 to 2.13
#: Until: torch drops the fast paths of its transformers.
FUSED_LAYERS = frozenset(
    {torch.ops.aten._transformer_encoder_layer_fwd.default, torch.ops.aten._native_multi_head_attention.default}
)

#: Attention's operator, and its name on the CPU, without and with the ending of its backward pass.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/utils/flop_counter.py
#: Seen in: torch 2.10 to 2.13
#: Until: ``torch.utils.flop_counter`` counts attention on the CPU.
FLASH_ATTENTION = {
    f"_scaled_dot_product_flash_attention_for_cpu{end}": f"_scaled_dot_product_flash_attention{end}"
    for end in ("", "_backward")
}

#: Name in ``torch`` of the function that `torch.nn.utils.weight_norm` computes weights with.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/nn/utils/parametrizations.py
#: Seen in: torch 2.10 to 2.13
#: Until: torch computes them with public functions.
WEIGHT_NORM = "_weight_norm"

#: Module with the functions that recurrent layers call; the functions take different arguments than the layers.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_VF.py
#: Seen in: torch 2.10 to 2.13
#: Until: ``torch.nn.functional`` has recurrent layers.
VF: Any = torch._VF

#: Module whose names torch compares what ``__torch_function__`` is asked about, and its ``linear``: what
#: `torch.nn.functional.linear` is, whatever another library has put under that name.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/tools/autograd/templates/python_nn_functions.cpp
#: Seen in: torch 2.10 to 2.13
#: Until: never; amp has to find the function below all patches.
NN = torch._C._nn
LINEAR: Callable[..., Tensor] = torch._C._nn.linear

#: True if torch would have cuDNN lay out the weights of a recurrent layer; does it.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/native_functions.yaml
#: Seen in: torch 2.10 to 2.13
#: Until: torch lays out bfloat16 weights itself, and functions of recurrent layers take weights in any layout.
use_cudnn_rnn_flatten_weight = torch._use_cudnn_rnn_flatten_weight
cudnn_rnn_flatten_weight = torch._cudnn_rnn_flatten_weight
