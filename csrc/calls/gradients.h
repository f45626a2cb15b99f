// The operators on gradients and on the scale, called without the way through Python that torch.ops takes:
// ampatch/kernels.py and ampatch/extension_kernels.py have the same in Python.

#pragma once

#include "tensors.h"

namespace ampatch {

// False with a Python exception set.
bool add_gradient_functions(PyObject* module);

}  // namespace ampatch
