"""Insides of optimizers, their schedulers, ``GradScaler`` and the clipping of gradients. Must only name them."""

from __future__ import annotations

from torch.amp import GradScaler
from torch.nn.utils import clip_grad
from torch.optim import optimizer

#: Tables of the hooks of all optimizers: those before a step, and those after it.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/optim/optimizer.py
#: Seen in: torch 2.10 to 2.13
#: Until: torch lists hooks publicly.
global_pre_hooks = optimizer._global_optimizer_pre_hooks
global_post_hooks = optimizer._global_optimizer_post_hooks

#: Attributes of an optimizer with the tables of its hooks: before and after a step, a state dict, and a load of one.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/optim/optimizer.py
#: Seen in: torch 2.10 to 2.13
#: Until: torch lists hooks publicly.
STEP_PRE_HOOKS = "_optimizer_step_pre_hooks"
STEP_POST_HOOKS = "_optimizer_step_post_hooks"
STATE_DICT_PRE_HOOKS = "_optimizer_state_dict_pre_hooks"
STATE_DICT_POST_HOOKS = "_optimizer_state_dict_post_hooks"
LOAD_STATE_DICT_PRE_HOOKS = "_optimizer_load_state_dict_pre_hooks"
LOAD_STATE_DICT_POST_HOOKS = "_optimizer_load_state_dict_post_hooks"

#: Attribute of an optimizer that a scheduler's wrapper around ``step`` sets, and attribute of that wrapper. A scheduler
#: warns if it finds the first one unset.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/optim/lr_scheduler.py
#: Seen in: torch 2.10 to 2.13
#: Until: schedulers hear of steps through public hooks.
STEP_CALLED = "_opt_called"
WRAPPED_BY_SCHEDULER = "_wrapped_by_lr_sched"

#: Where ``GradScaler`` has its methods that unscale an optimizer's gradients, and that step or skip; its attribute with
#: the scale as a tensor, or None before the first loss.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/amp/grad_scaler.py
#: Seen in: torch 2.10 to 2.13
#: Until: ``GradScaler`` has hooks before it unscales, and after it has stepped or skipped.
UNSCALE_GRADS = (GradScaler, "_unscale_grads_")
MAYBE_OPT_STEP = (GradScaler, "_maybe_opt_step")
SCALE = "_scale"

#: Functions that torch's clipping calls with all gradients first: the one with lists of them, the one for their norm.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/nn/utils/clip_grad.py
#: Seen in: torch 2.10 to 2.13
#: Until: torch has hooks before gradients are clipped.
GROUP_TENSORS = (clip_grad, "_group_tensors_by_device_and_dtype")
GET_TOTAL_NORM = (clip_grad, "_get_total_norm")
