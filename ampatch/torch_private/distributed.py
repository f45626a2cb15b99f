"""Insides of DDP and of both FSDPs: when they reduce gradients, and which they hold back.

Must only read them, and drop gradients.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch.nn.parallel import DistributedDataParallel

#: Attribute of the class with the wrapper whose forward pass runs, or None.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/nn/parallel/distributed.py
#: Seen in: torch 2.10 to 2.13
#: Until: torch says publicly which wrapper's forward pass runs.
ACTIVE_DDP_MODULE = "_active_ddp_module"

#: Whether other code than a wrapper's reducer reduces its gradients; whether it has rebuilt its buckets, which it does
#: once; whether it runs in its ``join()``.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/nn/parallel/distributed.py
#: Seen in: torch 2.10 to 2.13
#: Until: DDP says publicly when a backward pass has reduced gradients, and when it moves them.
reduces_elsewhere: Callable[[Any], tuple[bool, bool]] = operator.attrgetter(
    "_use_python_reducer", "_delay_all_reduce_all_params"
)
has_rebuilt_buckets: Callable[[Any], bool] = operator.attrgetter("_has_rebuilt_buckets")
is_joining: Callable[[Any], bool] = operator.attrgetter("_join_config.enable")

#: Where DDP has its check that synchronized batch norms are on GPUs.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/nn/parallel/distributed.py
#: Seen in: torch 2.10 to 2.13
#: Until: `nn.SyncBatchNorm` runs on the CPU.
SYNC_BATCH_NORM_CHECK = (DistributedDataParallel, "_passing_sync_batchnorm_handle")

#: Name in the module of `nn.DataParallel` of the function that finds the type of its devices.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/nn/parallel/data_parallel.py
#: Seen in: torch 2.10 to 2.13
#: Until: torch drops `nn.DataParallel`.
AVAILABLE_DEVICE_TYPE = "_get_available_device_type"

#: Whether an FSDP1 module reduces gradients in its next backward pass: False in its ``no_sync()``.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/fsdp/fully_sharded_data_parallel.py
#: Seen in: torch 2.10 to 2.13
#: Until: torch drops FSDP1.
syncs_gradients: Callable[[Any], bool] = operator.attrgetter("_sync_gradients")

#: Attribute of parameters that FSDP1 has flattened.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/fsdp/_common_utils.py
#: Seen in: torch 2.10 to 2.13
#: Until: torch drops FSDP1.
FLATTENED = "_fsdp_flattened"


def flattened_by(module: Any) -> Sequence[Any]:
    """Returns the parameters that an FSDP1 module has flattened by itself, not those of its inner FSDP1 modules.

    The module's own ``parameters()`` lacks them while they are unsharded: under SHARD_GRAD_OP from a forward pass on.

    Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/fsdp/_flat_param.py
    Seen in: torch 2.10 to 2.13
    Until: torch drops FSDP1.
    """
    flat = module._flat_param
    if flat is None:
        return []
    return [flat] if flat._params is None else [*flat._params, *flat._shared_params]


def reductions_of(wrapper: DistributedDataParallel) -> object:
    """Returns a value that changes whenever a backward pass has reduced the gradients of a DDP wrapper.

    Torch measures when each gradient was ready, under no_sync none. In the first backward pass of a static graph
    it measures nothing, and a flag of the wrapper says that it has run.

    Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/nn/parallel/distributed.py
    Seen in: torch 2.10 to 2.13
    Until: DDP says publicly when a backward pass has reduced gradients.
    """
    return wrapper.reducer.get_backward_stats(), getattr(wrapper, "_static_graph_delay_allreduce_enqueued", False)


def parameter_groups(module: Any) -> Sequence[Any]:
    """Returns an FSDP2 module's parameter groups; FSDP2 gathers the parameters of a group together.

    Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/fsdp/_fully_shard/_fsdp_state.py
    Seen in: torch 2.10 to 2.13
    Until: FSDP2 says publicly which gradients it has not reduced yet.
    """
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        groups: Sequence[Any] = state._fsdp_param_groups
        return groups
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]  # before torch 2.13


def is_postponed(group: Any) -> bool:
    """Returns True if a parameter group of FSDP2 leaves gradients for a later backward pass to reduce.

    Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py
    Seen in: torch 2.10 to 2.13
    Until: FSDP2 says publicly which gradients it has not reduced yet.
    """
    return not (group.reduce_grads and (group.all_reduce_grads or not group._is_hsdp))


def holds_back(group: Any) -> bool:
    """Returns True if a parameter group of FSDP2 holds gradients that it has not reduced yet.

    Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py
    Seen in: torch 2.10 to 2.13
    Until: FSDP2 says publicly which gradients it has not reduced yet.
    """
    return group._partial_reduce_output is not None or any(  # HSDP has not reduced it over replicas yet
        each.unsharded_accumulated_grad is not None
        or (hasattr(each, "_unsharded_param") and each._unsharded_param.grad is not None)
        for each in group.fsdp_params
    )


def drop_held_back(group: Any) -> None:
    """Drops the gradients of a parameter group that `holds_back` finds.

    Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py
    Seen in: torch 2.10 to 2.13
    Until: FSDP2 drops them where ``zero_grad()`` drops gradients.
    """
    group._partial_reduce_output = None
    for each in group.fsdp_params:
        if hasattr(each, "_unsharded_param"):
            each._unsharded_param.grad = None
        if each.unsharded_accumulated_grad is not None:  # from torch 2.15 on, it is the one above
            each.unsharded_accumulated_grad = None
