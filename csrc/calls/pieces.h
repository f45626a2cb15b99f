// What ampatch/native/extension_kernels.py does with lists of tensors: gets their addresses, and counts writes to them.

#pragma once

#include "tensors.h"

namespace ampatch {

// Returns false with a Python exception set.
bool add_pieces_functions(PyObject* module);

}  // namespace ampatch
