// References to Python objects, the tensors behind them, and the types of numbers that casts know. Must not change
// anything.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/python_variable.h>

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
inline bool is_tensor(PyObject* object) {
  return THPVariable_CheckExact(object);
}

inline const Tensor& tensor_of(PyObject* object) {
  return THPVariable_Unpack(object);
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

// Calls a function with a null pointer to a number of a castable type.
template <class Function>
inline void with_type(ScalarType type, const Function& function) {
  if (type == ScalarType::Half) {
    function(static_cast<c10::Half*>(nullptr));
  } else if (type == ScalarType::BFloat16) {
    function(static_cast<c10::BFloat16*>(nullptr));
  } else {
    function(static_cast<float*>(nullptr));
  }
}

// Whether this thread is in none of the regions that torch's dispatcher knows: modes, tracers, transforms, autocast.
inline bool has_usual_keys() {
  const auto here = c10::impl::tls_local_dispatch_key_set();
  return (here.included_ - c10::default_included_set).empty() && (c10::default_excluded_set - here.excluded_).empty();
}

// Whether the operators take a tensor as it is.
inline bool is_ordinary(const Tensor& tensor) {
  return is_castable(tensor.scalar_type()) && tensor.layout() == at::kStrided && !tensor.is_neg() &&
         !tensor._is_zerotensor();
}

}  // namespace ampatch
