// See parameters.h.

#include "parameters.h"

#include <c10/util/flat_hash_map.h>
#include <torch/csrc/Device.h>

namespace ampatch {

namespace {

PyObject* name_parameters;
PyObject* name_modules;

// Returns the gradient of a parameter, or None; empty with a Python exception set.
Ref gradient_of(PyObject* parameter) {
  if (!is_tensor(parameter)) {  // a subclass may override `grad`
    return Ref::taken(PyObject_GetAttrString(parameter, "grad"));
  }
  const Tensor& gradient = tensor_of(parameter).grad();
  return gradient.defined() ? Ref::taken(wrapped(gradient)) : Ref::shared(Py_None);
}

// gradients_of(parameters, writable): returns a list of the gradients that are not None, each once. Replaces a strided
// gradient that is not contiguous by the result of `writable(parameter)`.
PyObject* gradients_of(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return guarded([&]() -> PyObject* {
    TORCH_CHECK_TYPE(count == 2, "expected gradients_of(parameters, writable)");
    const Ref sequence = Ref::taken(PySequence_Fast(args[0], "expected gradients_of(parameters, writable)"));
    Ref found = Ref::taken(PyList_New(0));
    if (!sequence || !found) {
      return nullptr;
    }
    ska::flat_hash_set<PyObject*> seen;
    seen.reserve(PySequence_Fast_GET_SIZE(sequence.get()));
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(sequence.get()); ++i) {
      PyObject* parameter = PySequence_Fast_GET_ITEM(sequence.get(), i);
      Ref gradient = gradient_of(parameter);
      if (!gradient) {
        return nullptr;
      }
      if (is_any_tensor(gradient.get()) && tensor_of(gradient.get()).layout() == c10::kStrided &&
          !tensor_of(gradient.get()).is_contiguous()) {
        gradient = Ref::taken(PyObject_CallOneArg(args[1], parameter));
        if (!gradient) {
          return nullptr;
        }
      }
      if (gradient.get() != Py_None && seen.insert(gradient.get()).second &&
          PyList_Append(found.get(), gradient.get()) < 0) {
        return nullptr;
      }
    }
    return found.release();
  });
}

// ordinary_device(tensors, may_require_grad): returns the device of the tensors if all are on the same device and each
// is a dense float32, float16 or bfloat16 Tensor or Parameter, neither lazily negated nor a ZeroTensor. Otherwise
// returns None, as for an empty list, and for a tensor that requires a gradient if `may_require_grad` is false.
PyObject* ordinary_device(PyObject*, PyObject* const* args, Py_ssize_t argument_count) {
  return guarded([&]() -> PyObject* {
    TORCH_CHECK_TYPE(argument_count == 2 && PyList_CheckExact(args[0]), "expected ordinary_device(list, bool)");
    PyObject* tensors = args[0];
    const bool may_require_grad = args[1] == Py_True;
    const Py_ssize_t count = PyList_GET_SIZE(tensors);
    for (Py_ssize_t i = 0; i < count; ++i) {
      PyObject* object = PyList_GET_ITEM(tensors, i);
      if (!is_tensor(object)) {
        Py_RETURN_NONE;
      }
      const Tensor& tensor = tensor_of(object);
      if (!is_ordinary(tensor) || tensor.device() != tensor_of(PyList_GET_ITEM(tensors, 0)).device() ||
          (!may_require_grad && tensor.requires_grad())) {
        Py_RETURN_NONE;
      }
    }
    if (count == 0) {
      Py_RETURN_NONE;
    }
    return THPDevice_New(tensor_of(PyList_GET_ITEM(tensors, 0)).device());
  });
}

// have_no_gradients(parameters, may_be_half): returns True if no parameter has a gradient and, unless `may_be_half`,
// none is half. Stops at the first parameter that decides, as `parameters` may be an iterator that makes them.
PyObject* have_no_gradients(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return guarded([&]() -> PyObject* {
    TORCH_CHECK_TYPE(count == 2, "expected have_no_gradients(parameters, may_be_half)");
    const Ref iterator = Ref::taken(PyObject_GetIter(args[0]));
    if (!iterator) {
      return nullptr;
    }
    const bool may_be_half = args[1] == Py_True;
    while (const Ref parameter = Ref::taken(PyIter_Next(iterator.get()))) {
      const Ref gradient = gradient_of(parameter.get());
      if (!gradient) {
        return nullptr;
      }
      const bool is_wrong =
          !may_be_half && is_any_tensor(parameter.get()) && is_half(tensor_of(parameter.get()).scalar_type());
      if (gradient.get() != Py_None || is_wrong) {
        Py_RETURN_FALSE;
      }
    }
    if (PyErr_Occurred()) {
      return nullptr;
    }
    Py_RETURN_TRUE;
  });
}

// Returns a list with the result of `number_of` for each tensor of a list; empty with a Python exception set.
template <class Number>
Ref numbers_of(PyObject* tensors, const Number& number_of) {
  Ref found = Ref::taken(PyList_New(PyList_GET_SIZE(tensors)));
  for (Py_ssize_t i = 0; found && i < PyList_GET_SIZE(tensors); ++i) {
    PyObject* number = number_of(tensor_of(PyList_GET_ITEM(tensors, i)));
    if (number == nullptr) {
      return Ref();
    }
    PyList_SET_ITEM(found.get(), i, number);
  }
  return found;
}

// True if an object is a list of tensors of torch's own classes. Subclasses may override anything.
bool is_list_of_tensors(PyObject* tensors) {
  bool are_tensors = PyList_CheckExact(tensors);
  for (Py_ssize_t i = 0; are_tensors && i < PyList_GET_SIZE(tensors); ++i) {
    are_tensors = is_tensor(PyList_GET_ITEM(tensors, i));
  }
  return are_tensors;
}

// moments_of(tensors): returns a list of the version counters and a list of the addresses of tensors; None if the
// tensors are not of torch's own classes.
PyObject* moments_of(PyObject*, PyObject* tensors) {
  return guarded([&]() -> PyObject* {
    if (!is_list_of_tensors(tensors)) {
      Py_RETURN_NONE;
    }
    const Ref versions =
        numbers_of(tensors, [](const Tensor& tensor) { return PyLong_FromUnsignedLong(version_of(tensor)); });
    const Ref addresses =
        versions ? numbers_of(tensors, [](const Tensor& tensor) { return PyLong_FromVoidPtr(tensor.data_ptr()); })
                 : Ref();
    return addresses ? PyTuple_Pack(2, versions.get(), addresses.get()) : nullptr;
  });
}

// identities_of_gradients(parameters): returns a list with a number for each parameter, or 0 if it has no gradient. No
// other gradient has this number while this one lives. Returns None if the parameters are not of torch's own classes.
PyObject* identities_of_gradients(PyObject*, PyObject* parameters) {
  return guarded([&]() -> PyObject* {
    if (!is_list_of_tensors(parameters)) {
      Py_RETURN_NONE;
    }
    return numbers_of(parameters,
                      [](const Tensor& parameter) {
                        const Tensor& gradient = parameter.grad();
                        return PyLong_FromVoidPtr(gradient.defined() ? gradient.unsafeGetTensorImpl() : nullptr);
                      })
        .release();
  });
}

// Returns the first parameter of a module, in the order of `parameters()`, or None; empty with a Python exception set.
Ref first_parameter_of(PyObject* module) {
  const Ref parameters = Ref::taken(PyObject_GetAttr(module, name_parameters));
  const Ref own = Ref::taken(parameters ? PyMapping_Values(parameters.get()) : nullptr);
  for (Py_ssize_t i = 0; own && i < PyList_GET_SIZE(own.get()); ++i) {
    if (PyList_GET_ITEM(own.get(), i) != Py_None) {
      return Ref::shared(PyList_GET_ITEM(own.get(), i));
    }
  }
  const Ref modules = Ref::taken(own ? PyObject_GetAttr(module, name_modules) : nullptr);
  const Ref children = Ref::taken(modules ? PyMapping_Values(modules.get()) : nullptr);
  if (!children) {
    return Ref();
  }
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(children.get()); ++i) {
    PyObject* child = PyList_GET_ITEM(children.get(), i);
    Ref found = child == Py_None ? Ref::shared(Py_None) : first_parameter_of(child);
    if (found.get() != Py_None) {
      return found;
    }
  }
  return Ref::shared(Py_None);
}

PyObject* first_parameter(PyObject*, PyObject* module) {
  return first_parameter_of(module).release();
}

PyMethodDef functions[] = {{"gradients_of", fast(gradients_of), METH_FASTCALL, nullptr},
                           {"ordinary_device", fast(ordinary_device), METH_FASTCALL, nullptr},
                           {"have_no_gradients", fast(have_no_gradients), METH_FASTCALL, nullptr},
                           {"moments_of", moments_of, METH_O, nullptr},
                           {"identities_of_gradients", identities_of_gradients, METH_O, nullptr},
                           {"first_parameter", first_parameter, METH_O, nullptr},
                           {nullptr, nullptr, 0, nullptr}};

}  // namespace

bool add_parameter_functions(PyObject* module) {
  name_parameters = PyUnicode_InternFromString("_parameters");
  name_modules = PyUnicode_InternFromString("_modules");
  return name_parameters != nullptr && name_modules != nullptr && PyModule_AddFunctions(module, functions) == 0;
}

}  // namespace ampatch
