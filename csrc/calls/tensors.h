// References to Python objects, access to their tensors, and the dtypes that casts support. Must not change tensors.
//
// calls.cpp defines the functions that need torch's header of Python tensors, python_variable.h: including it takes
// most of the time to compile a file.

#pragma once

#include <torch/csrc/python_headers.h>
#include <torch/csrc/utils/pythoncapi_compat.h>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <utility>

namespace ampatch {

using at::ScalarType;
using at::Tensor;

// A strong reference to a Python object, or empty.
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

// Casts a METH_FASTCALL function to the type that method tables require for all functions.
inline PyCFunction fast(PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

// True if an object is exactly a Tensor or Parameter. Subclasses may override anything.
bool is_tensor(PyObject* object);

// True if an object is a tensor, subclasses included.
bool is_any_tensor(PyObject* object);

// Returns the tensor of an object for which is_any_tensor is true.
const Tensor& tensor_of(PyObject* object);

// Returns a new reference to the Python object of a tensor; null with a Python exception set.
PyObject* wrapped(const Tensor& tensor);

// Must be called in a catch block: sets the Python exception that torch has for the C++ exception, and returns null.
PyObject* raised();

// Runs a function that returns an object or null; converts its C++ exceptions to Python exceptions.
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

// Types that can be cast to have an index. float64 is never cast, but promotion may end in it. The float8 types, from
// kPromoted on, are only kept.
constexpr int kPromoted = 4;
constexpr int kTypes = 6;

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
    case ScalarType::Float8_e4m3fn:
      return 4;
    case ScalarType::Float8_e5m2:
      return 5;
    default:
      return -1;
  }
}

// True if promotion may begin or end in a type.
inline bool is_promoted(ScalarType type) {
  const int index = index_of(type);
  return index >= 0 && index < kPromoted;
}

inline bool is_half(ScalarType type) {
  return type == ScalarType::Half || type == ScalarType::BFloat16;
}

inline bool is_castable(ScalarType type) {
  return type == ScalarType::Float || is_half(type);
}

// True if the operators accept a tensor as it is.
inline bool is_ordinary(const Tensor& tensor) {
  return is_castable(tensor.scalar_type()) && tensor.layout() == at::kStrided && !tensor.is_neg() &&
         !tensor._is_zerotensor();
}

}  // namespace ampatch
