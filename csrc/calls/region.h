// A block in which casts are off: `_Region` of ampatch/switch.py for an optimizer's step, which every iteration makes.

#pragma once

#include "tensors.h"

namespace ampatch {

// False with a Python exception set.
bool add_region(PyObject* module);

}  // namespace ampatch
