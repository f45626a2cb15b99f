"""The attributes with an underscore that all of ampatch may name as they are, because libraries on torch rely on them.

A rename of one would break many projects, so torch does not rename them lightly. Must only list names: each file reads
the attributes itself.
"""

from __future__ import annotations

#: Number of in-place writes to a tensor's memory that autograd has counted.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/autograd/python_variable.cpp
#: Seen in: torch 2.10 to 2.13
#: Until: never; torch's notes on autograd describe the counter, and have no other name for it.
VERSION = "_version"

#: The tensor that a view shows a part of; None for tensors that are no views.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/autograd/python_variable.cpp
#: Seen in: torch 2.10 to 2.13
#: Until: torch has a public name for a view's base.
BASE = "_base"

#: Schema of an operator: its name, its arguments and its results, with what it writes to.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_ops.py
#: Seen in: torch 2.10 to 2.13
#: Until: torch has public schemas of operators.
SCHEMA = "_schema"

#: Tables of a module: its own parameters, buffers and submodules by name, those that are None or shared too.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/nn/modules/module.py
#: Seen in: torch 2.10 to 2.13
#: Until: never; subclasses of ``nn.Module`` all over the field read and write them.
PARAMETERS = "_parameters"
BUFFERS = "_buffers"
MODULES = "_modules"

#: Attribute by which an optimizer says that its step takes ``grad_scale`` and ``found_inf``, and skips by itself.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/amp/grad_scaler.py
#: Seen in: torch 2.10 to 2.13
#: Until: never; optimizers of other libraries set it for ``GradScaler``.
STEP_SUPPORTS_AMP_SCALING = "_step_supports_amp_scaling"

#: Function of ``torch.cuda`` that starts CUDA, and raises if it cannot.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/cuda/__init__.py
#: Seen in: torch 2.10 to 2.13
#: Until: ``torch.cuda.init`` is what torch itself calls before it uses a GPU.
LAZY_INIT = "_lazy_init"
