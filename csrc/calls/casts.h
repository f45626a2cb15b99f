// A tensor in another type, as Tensor.to gives it.

#pragma once

#include "tensors.h"

namespace ampatch {

// The interpreter's lock is let go of where casting takes longer than that. Throws what Tensor.to does.
Tensor converted(const Tensor& tensor, ScalarType type);

// False with a Python exception set.
bool prepare_casts();

}  // namespace ampatch
