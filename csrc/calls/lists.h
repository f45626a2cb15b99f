// Questions about lists of tensors, which the work on gradients asks in every step: ampatch/optimizer_state.py and
// ampatch/kernels.py have the same in Python.

#pragma once

#include "tensors.h"

namespace ampatch {

// False with a Python exception set.
bool add_list_functions(PyObject* module);

}  // namespace ampatch
