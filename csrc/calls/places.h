// Finds the modules and other objects in which amp replaces functions. ampatch/native/calls.py decides whether it is
// used. Must not change anything.

#pragma once

#include "tensors.h"

namespace ampatch {

// Returns false with a Python exception set.
bool add_places_functions(PyObject* module);

}  // namespace ampatch
