"""torch's kernels on lists of tensors, ``torch._foreach_*``, by their names without the prefix. Must only name them."""

from __future__ import annotations

import torch

#: Multi-tensor forms of the operators of these names: one kernel launch for many tensors. Those in place end in "_".
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/native_functions.yaml
#: Seen in: torch 2.10 to 2.13
#: Until: torch has public multi-tensor operators.
add = torch._foreach_add
add_ = torch._foreach_add_
addcmul_ = torch._foreach_addcmul_
copy_ = torch._foreach_copy_
div = torch._foreach_div
div_ = torch._foreach_div_
mul = torch._foreach_mul
mul_ = torch._foreach_mul_
norm = torch._foreach_norm
sqrt = torch._foreach_sqrt
sqrt_ = torch._foreach_sqrt_

#: Multiplies tensors in place by a 0-dimensional factor, and sets a flag to 1 if an element is not finite: the kernel
#: of ``torch.amp.GradScaler``.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/native_functions.yaml
#: Seen in: torch 2.10 to 2.13
#: Until: torch has a public function that unscales gradients.
non_finite_check_and_unscale_ = torch._amp_foreach_non_finite_check_and_unscale_
