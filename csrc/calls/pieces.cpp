// See pieces.h. An operator that gets each tensor as an object inspects it by a dozen calls through torch's stable ABI,
// which take a quarter to half a microsecond. Here a tensor takes some nanoseconds. Must not accept a tensor that
// csrc/lists.h refuses or copies.

#include "pieces.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <vector>

namespace ampatch {

namespace {

// A row of the result; csrc/lists.h reads it.
struct Row {
  int64_t narrow;
  int64_t wide;  // 0 without a second list
  int64_t count;
  int64_t type;  // ScalarType of narrow
};
static_assert(sizeof(Row) == 4 * sizeof(int64_t));

// True if no mode, tracer or transform is active in this thread, which has to see the tensors themselves.
bool is_unobserved() {
  return (c10::impl::tls_local_dispatch_key_set().included_ - c10::default_included_set).empty();
}

// True if the operators process a tensor in place, and it is on the device of the first one.
bool is_piece(PyObject* object, const Tensor& first, bool is_remainder = false) {
  if (!is_tensor(object)) {
    return false;
  }
  const Tensor& tensor = tensor_of(object);
  const bool is_usual =
      is_remainder ? tensor.scalar_type() == ScalarType::Short && tensor.layout() == at::kStrided && !tensor.is_neg()
                   : is_ordinary(tensor);
  return is_usual && (tensor.is_cpu() || tensor.is_cuda()) && tensor.device() == first.device() &&
         tensor.has_storage() && tensor.unsafeGetTensorImpl()->storage_initialized() &&
         tensor.is_non_overlapping_and_dense();
}

// True if two dense tensors have the same shape and store their elements in the same order.
bool are_alike(const Tensor& a, const Tensor& b) {
  if (a.sizes() != b.sizes()) {
    return false;
  }
  if (a.is_contiguous() && b.is_contiguous()) {
    return true;
  }
  for (int64_t dim = 0; dim < a.dim(); ++dim) {
    if (a.size(dim) != 1 && a.stride(dim) != b.stride(dim)) {
      return false;
    }
  }
  return true;
}

int64_t address_of(const Tensor& tensor) {
  return reinterpret_cast<int64_t>(tensor.mutable_data_ptr());
}

// An operator takes a shorter list faster as tensors.
constexpr Py_ssize_t kFewest = 4;

// pieces(narrow, wide, third): returns an int64 tensor on the CPU with a `Row` for each tensor, or pair of tensors,
// after the first; leaves out empty ones. `wide` is a list of float32 tensors, or None. `third` is a list of int16
// tensors or of keys, or None; each gets a row before its pair's, as csrc/lists.h says. Returns None if the operator
// has to inspect the tensors itself.
PyObject* pieces(PyObject*, PyObject* const* args, Py_ssize_t argument_count) {
  return guarded([&]() -> PyObject* {
    TORCH_CHECK_TYPE(argument_count == 3, "expected pieces(narrow, wide, third)");
    PyObject *narrow = args[0], *wide = args[1], *third = args[2];
    const bool is_pair = wide != Py_None, is_triple = third != Py_None;
    const auto is_beside = [&](PyObject* list) {
      return PyList_CheckExact(list) && PyList_GET_SIZE(list) == PyList_GET_SIZE(narrow);
    };
    if (!PyList_CheckExact(narrow) || PyList_GET_SIZE(narrow) < kFewest || (is_pair && !is_beside(wide)) ||
        (is_triple && !is_beside(third)) || !is_tensor(PyList_GET_ITEM(narrow, 0)) || !is_unobserved()) {
      Py_RETURN_NONE;
    }
    const Tensor& first = tensor_of(PyList_GET_ITEM(narrow, 0));
    const bool has_keys = is_triple && PyLong_CheckExact(PyList_GET_ITEM(third, 0));
    std::vector<Row> rows;
    rows.reserve(PyList_GET_SIZE(narrow));
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(narrow); ++i) {
      if (!is_piece(PyList_GET_ITEM(narrow, i), first)) {
        Py_RETURN_NONE;
      }
      const Tensor& tensor = tensor_of(PyList_GET_ITEM(narrow, i));
      int64_t beside = 0;
      if (is_pair) {
        if (!is_piece(PyList_GET_ITEM(wide, i), first)) {
          Py_RETURN_NONE;
        }
        const Tensor& other = tensor_of(PyList_GET_ITEM(wide, i));
        if (other.scalar_type() != ScalarType::Float || !are_alike(tensor, other)) {
          Py_RETURN_NONE;
        }
        beside = address_of(other);
      }
      int64_t last = 0;
      if (is_triple) {
        PyObject* object = PyList_GET_ITEM(third, i);
        if (tensor.scalar_type() != ScalarType::BFloat16) {
          Py_RETURN_NONE;
        }
        if (has_keys && PyLong_CheckExact(object)) {
          last = static_cast<int64_t>(PyLong_AsUnsignedLongMask(object));
        } else if (!has_keys && is_piece(object, first, true) && are_alike(tensor, tensor_of(object))) {
          last = address_of(tensor_of(object));
        } else {
          Py_RETURN_NONE;
        }
      }
      if (i != 0 && tensor.numel() != 0) {
        if (is_triple) {
          rows.push_back({last, 0, 0, static_cast<int64_t>(ScalarType::Short)});
        }
        rows.push_back({address_of(tensor), beside, tensor.numel(), static_cast<int64_t>(tensor.scalar_type())});
      }
    }
    const Tensor found = at::empty({static_cast<int64_t>(rows.size()), 4}, at::device(at::kCPU).dtype(at::kLong));
    std::copy(rows.begin(), rows.end(), static_cast<Row*>(found.mutable_data_ptr()));
    return wrapped(found);
  });
}

// increment_versions(tensors): does what torch.autograd.graph.increment_version does, for a list of tensors.
PyObject* increment_versions(PyObject*, PyObject* tensors) {
  return guarded([&]() -> PyObject* {
    TORCH_CHECK_TYPE(PyList_Check(tensors), "expected increment_versions(list)");
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors); ++i) {
      TORCH_CHECK_TYPE(is_any_tensor(PyList_GET_ITEM(tensors, i)), "expected a list of tensors");
      const Tensor& tensor = tensor_of(PyList_GET_ITEM(tensors, i));
      if (!tensor.is_inference()) {
        tensor.unsafeGetTensorImpl()->bump_version();
      }
    }
    Py_RETURN_NONE;
  });
}

// float32_like(tensors): returns a list of new float32 tensors, one like each of a list of dense tensors, in its
// layout. Returns None if Python has to make them.
PyObject* float32_like(PyObject*, PyObject* tensors) {
  return guarded([&]() -> PyObject* {
    if (!PyList_CheckExact(tensors) || !is_unobserved()) {
      Py_RETURN_NONE;
    }
    const at::AutoDispatchBelowADInplaceOrView no_autograd;
    Ref found = Ref::taken(PyList_New(PyList_GET_SIZE(tensors)));
    for (Py_ssize_t i = 0; found && i < PyList_GET_SIZE(tensors); ++i) {
      PyObject* object = PyList_GET_ITEM(tensors, i);
      if (!is_tensor(object) || !tensor_of(object).is_non_overlapping_and_dense()) {
        Py_RETURN_NONE;
      }
      const Tensor& tensor = tensor_of(object);
      PyObject* made =
          wrapped(at::empty_strided(tensor.sizes(), tensor.strides(), at::device(tensor.device()).dtype(at::kFloat)));
      if (made == nullptr) {
        return nullptr;
      }
      PyList_SET_ITEM(found.get(), i, made);
    }
    return found.release();
  });
}

PyMethodDef functions[] = {{"pieces", fast(pieces), METH_FASTCALL, nullptr},
                           {"float32_like", float32_like, METH_O, nullptr},
                           {"increment_versions", increment_versions, METH_O, nullptr},
                           {nullptr, nullptr, 0, nullptr}};

}  // namespace

bool add_pieces_functions(PyObject* module) {
  return PyModule_AddFunctions(module, functions) == 0;
}

}  // namespace ampatch
