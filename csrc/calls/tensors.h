// References to Python objects, the tensors behind them, and the types of numbers that casts know. Changes nothing.
//
// calls.cpp defines what needs torch's header of Python tensors: that alone takes most of the time to compile a file.

#pragma once

#include <torch/csrc/python_headers.h>
#include <torch/csrc/utils/pythoncapi_compat.h>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <utility>

namespace ampatch {

using at::ScalarType;
using at::Tensor;

// A strong reference to a Python object, or none.
class Ref {
 public:
  Ref() = default;
  Ref(Ref&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {
  }
  Ref& operator=(Ref&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Ref() {
    Py_XDECREF(object_);
  }

  static Ref taken(PyObject* object) {
    Ref ref;
    ref.object_ = object;
    return ref;
  }
  static Ref shared(PyObject* object) {
    return taken(Py_XNewRef(object));
  }

  PyObject* get() const {
    return object_;
  }
  PyObject* release() {
    return std::exchange(object_, nullptr);
  }
  explicit operator bool() const {
    return object_ != nullptr;
  }

 private:
  PyObject* object_ = nullptr;
};

// For tables of functions, which have one type for all ways to call them.
inline PyCFunction fast(PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

// Whether an object is a tensor or a parameter, and of no subclass, which could mean anything.
bool is_tensor(PyObject* object);

// True if an object is a tensor, subclasses included.
bool is_any_tensor(PyObject* object);

// The tensor of an object for which is_any_tensor is true.
const Tensor& tensor_of(PyObject* object);

// A new reference to the object in Python; null with a Python exception set.
PyObject* wrapped(const Tensor& tensor);

// To be called where a C++ exception is handled: sets the Python exception that torch has for it, and returns null.
PyObject* raised();

// Runs a function that returns an object or null; a C++ exception out of it becomes a Python exception.
template <class Function>
PyObject* guarded(const Function& function) {
  try {
    return function();
  } catch (...) {
    return raised();
  }
}

inline uint32_t version_of(const Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->version_counter().current_version();
}

// Types that are cast to have an index; float64 is nothing to cast from, but what promotion can lead to.
constexpr int kTypes = 4;

inline int index_of(ScalarType type) {
  switch (type) {
    case ScalarType::Float:
      return 0;
    case ScalarType::Half:
      return 1;
    case ScalarType::BFloat16:
      return 2;
    case ScalarType::Double:
      return 3;
    default:
      return -1;
  }
}

inline bool is_half(ScalarType type) {
  return type == ScalarType::Half || type == ScalarType::BFloat16;
}

inline bool is_castable(ScalarType type) {
  return type == ScalarType::Float || is_half(type);
}

// Whether the operators take a tensor as it is.
inline bool is_ordinary(const Tensor& tensor) {
  return is_castable(tensor.scalar_type()) && tensor.layout() == at::kStrided && !tensor.is_neg() &&
         !tensor._is_zerotensor();
}

}  // namespace ampatch
