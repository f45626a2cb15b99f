"""autograd's insides: running backward passes, the nodes of graphs, checkpoints. Must only name them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint
from torch.autograd import grad_mode

#: Calls the autograd engine: `Tensor.backward`, `torch.autograd.backward` and `torch.autograd.grad` end there. The
#: second is the place where `Tensor.backward` and `torch.autograd.backward` look it up, for code that replaces it.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/autograd/graph.py
#: Seen in: torch 2.10 to 2.13
#: Until: torch has public hooks around a whole backward pass.
engine_run_backward = torch.autograd.graph._engine_run_backward
ENGINE_RUN_BACKWARD = (torch.autograd, "_engine_run_backward")

#: Number of the running backward pass, -1 outside of one; the node that runs in it, or None.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/Module.cpp
#: Seen in: torch 2.10 to 2.13
#: Until: torch exports them; ``torch.autograd.graph`` uses both itself.
current_graph_task_id = torch._C._current_graph_task_id
current_node = torch._C._current_autograd_node

#: True if the running backward pass will run a node.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/Module.cpp
#: Seen in: torch 2.10 to 2.13
#: Until: torch exports it; ``torch.autograd.graph.register_multi_grad_hook`` rests on it.
will_engine_execute_node = torch._C._will_engine_execute_node

#: Number that autograd gives to the next node of this thread.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/autograd/init.cpp
#: Seen in: torch 2.10 to 2.13
#: Until: torch says publicly in which order nodes were made.
next_sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr

#: Number of a node: later nodes of a thread have higher ones.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/autograd/python_cpp_function.cpp
#: Seen in: torch 2.10 to 2.13
#: Until: torch says publicly in which order nodes were made.
sequence_number: Callable[[Any], int] = operator.methodcaller("_sequence_nr")

#: Attribute of nodes that a user's ``autograd.Function`` made, and of their types: that Function.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/autograd/function.py
#: Seen in: torch 2.10 to 2.13
#: Until: a node says publicly which Function it is of.
FORWARD_CLASS = "_forward_cls"

#: Attribute of multiplication's nodes: one of the factors. Reading it raises RuntimeError once the graph is freed.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/tools/autograd/derivatives.yaml
#: Seen in: torch 2.10 to 2.13
#: Until: torch says publicly whether a graph is freed.
SAVED_OTHER = "_saved_other"

#: Hooks of a tensor: those on its gradient, and those after the gradient is accumulated. Each a table, or None.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/autograd/python_variable.cpp
#: Seen in: torch 2.10 to 2.13
#: Until: torch lists hooks publicly.
hooks_of_leaf: Callable[[Any], tuple[Any, Any]] = operator.attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")

#: Block that sets tensors' version counters back when it ends.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/autograd/grad_mode.py
#: Seen in: torch 2.10 to 2.13
#: Until: torch has a public one, beside ``torch.autograd.graph.increment_version``.
unsafe_preserve_version_counter = grad_mode._unsafe_preserve_version_counter

#: Remembers one forward pass of a non-reentrant checkpoint; made where the forward pass begins.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/utils/checkpoint.py
#: Seen in: torch 2.10 to 2.13
#: Until: torch calls public hooks around a checkpoint's forward pass and its recomputation.
CheckpointFrame = torch.utils.checkpoint._CheckpointFrame

#: Puts an object under a key where this thread and the threads of its backward passes find it; gets it; True if it is
#: there.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/Module.cpp
#: Seen in: torch 2.10 to 2.13
#: Until: autograd carries ``contextvars`` to its threads.
stash_for_backward = torch._C._stash_obj_in_tls
get_stashed = torch._C._get_obj_in_tls
is_stashed = torch._C._is_key_in_tls


def unstash(key: str) -> None:
    """Removes what `stash_for_backward` has put under a key; before torch 2.13, which cannot, it leaves None there.

    Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/Module.cpp
    Seen in: torch 2.10 to 2.13
    Until: as `stash_for_backward`; the part for older versions: setup.cfg asks for torch 2.13.
    """
    if hasattr(torch._C, "_remove_obj_from_tls"):
        torch._C._remove_obj_from_tls(key)
    else:
        torch._C._stash_obj_in_tls(key, None)
