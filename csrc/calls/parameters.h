// Functions that every step calls to inspect its gradients and parameters. ampatch/weights/, ampatch/native/kernels.py
// and ampatch/patching/adopted_model.py have the same in Python. Must not change anything.

#pragma once

#include "tensors.h"

namespace ampatch {

// Returns false with a Python exception set.
bool add_parameter_functions(PyObject* module);

}  // namespace ampatch
