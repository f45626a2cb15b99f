// See gradients.h. A few elements on the CPU are worked on here, with the operations that the operators are made of;
// for all others the operators are called, and have to be loaded.

#include "gradients.h"

#include "../chunks.h"
#include "../operations.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/reciprocal.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/Exceptions.h>

#include <algorithm>
#include <vector>

namespace ampatch {

namespace {

template <class Signature>
c10::TypedOperatorHandle<Signature> operator_named(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// Operators of torch do so by themselves.
void count_write(const Tensor& tensor) {
  if (!tensor.is_inference()) {
    tensor.unsafeGetTensorImpl()->bump_version();
  }
}

template <class Number>
Number& number_in(const Tensor& tensor) {
  constexpr ScalarType type = c10::CppTypeToScalarType<Number>::value;
  TORCH_CHECK(tensor.is_cpu() && tensor.layout() == at::kStrided && tensor.numel() == 1 && tensor.scalar_type() == type,
              "expected one number of ",
              type,
              " on the CPU, and found a tensor of ",
              tensor.numel(),
              " of ",
              tensor.scalar_type(),
              " on ",
              tensor.device());
  return *static_cast<Number*>(tensor.mutable_data_ptr());
}

Tensor number_on_cpu(float value) {
  const Tensor number = at::detail::empty_cpu({}, ScalarType::Float);
  number_in<float>(number) = value;
  return number;
}

// Numbers

// copy_of(number): of a 0-dimensional tensor of float32.
PyObject* copy_of(PyObject*, PyObject* object) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(is_tensor(object), "expected copy_of(tensor)");
  const Tensor& number = tensor_of(object);
  return THPVariable_Wrap(number.is_cpu() ? number_on_cpu(number_in<float>(number)) : number.clone());
  END_HANDLE_TH_ERRORS
}

// update_scale(scale, unskipped, hysteresis_left, found_inf, factor, window, hysteresis, floor, ceiling): all tensors
// on one device.
PyObject* update_scale(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 9 && std::all_of(args, args + 4, is_tensor), "expected four tensors and five numbers");
  const double factor = PyFloat_AsDouble(args[4]), floor = PyFloat_AsDouble(args[7]);
  const double ceiling = PyFloat_AsDouble(args[8]);
  const int64_t window = PyLong_AsLongLong(args[5]), hysteresis = PyLong_AsLongLong(args[6]);
  if (PyErr_Occurred()) {
    return nullptr;
  }
  const Tensor &scale = tensor_of(args[0]), &unskipped = tensor_of(args[1]), &hysteresis_left = tensor_of(args[2]);
  const Tensor& found_inf = tensor_of(args[3]);
  if (scale.is_cpu()) {
    const UpdateScale update(factor, window, hysteresis, floor, ceiling);
    update(number_in<float>(scale),
           number_in<int32_t>(unskipped),
           number_in<int32_t>(hysteresis_left),
           number_in<float>(found_inf));
  } else {
    using Update =
        void(const Tensor&, const Tensor&, const Tensor&, const Tensor&, double, int64_t, int64_t, double, double);
    static const auto update = operator_named<Update>("ampatch::update_scale");
    update.call(scale, unskipped, hysteresis_left, found_inf, factor, window, hysteresis, floor, ceiling);
  }
  count_write(scale);
  count_write(unskipped);
  count_write(hysteresis_left);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// Gradients

// Whether they are a few elements, side by side, in the memory of the CPU: too few for a second thread, and to let go
// of the interpreter's lock.
bool are_few(const std::vector<Tensor>& tensors) {
  int64_t elements = 0;
  for (const Tensor& tensor : tensors) {
    elements += tensor.numel();
    if (!tensor.is_cpu() || !tensor.is_non_overlapping_and_dense() || elements > kGrain) {
      return false;
    }
  }
  return true;
}

// The tensors of a list; false if one is not ordinary, or has a graph of its own.
bool list_ordinary(PyObject* list, std::vector<Tensor>& tensors, bool may_require_grad = false) {
  tensors.reserve(PyList_GET_SIZE(list));
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i) {
    PyObject* object = PyList_GET_ITEM(list, i);
    if (!is_tensor(object) || !is_ordinary(tensor_of(object)) ||
        (!may_require_grad && tensor_of(object).requires_grad())) {
      return false;
    }
    tensors.push_back(tensor_of(object));
  }
  return true;
}

// Applies an operation to few elements of two lists; false, and nothing is done, if they are not that.
template <class Operation>
bool visit_few(PyObject* narrow_list, PyObject* wide_list, const Operation& operation, bool weights, bool* finite) {
  TORCH_CHECK_TYPE(PyList_CheckExact(narrow_list) && PyList_CheckExact(wide_list), "expected lists of tensors");
  std::vector<Tensor> narrow, wide;
  if (PyList_GET_SIZE(narrow_list) == 0 || !is_tensor(PyList_GET_ITEM(narrow_list, 0)) ||
      !tensor_of(PyList_GET_ITEM(narrow_list, 0)).is_cpu()) {
    return false;  // without a look at each
  }
  if (!list_ordinary(narrow_list, narrow, weights) || !list_ordinary(wide_list, wide, weights) || !are_few(narrow) ||
      !are_few(wide) || narrow.size() != wide.size()) {
    return false;
  }
  for (size_t i = 0; i < narrow.size(); ++i) {
    if (wide[i].scalar_type() != ScalarType::Float || narrow[i].sizes() != wide[i].sizes() ||
        narrow[i].strides() != wide[i].strides()) {
      return false;
    }
  }
  for (size_t i = 0; i < narrow.size(); ++i) {
    with_type(narrow[i].scalar_type(), [&](auto* type) {
      double sum;
      auto* from = static_cast<decltype(type)>(narrow[i].mutable_data_ptr());
      *finite &= visit_chunk(from, static_cast<float*>(wide[i].mutable_data_ptr()), wide[i].numel(), operation, sum);
    });
    if (operation.writes_narrow()) {
      count_write(narrow[i]);
    }
    if (Operation::kWritesWide) {
      count_write(wide[i]);
    }
  }
  return true;
}

// unscale_into(grads, master_grads, inv_scale, found_inf, write_back, adds): the operators unscale_copy and
// unscale_add; False, and nothing is done, if they are not a few elements on the CPU.
PyObject* unscale_into(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 6 && is_tensor(args[2]) && is_tensor(args[3]), "expected lists, numbers and flags");
  const Tensor &inv_scale = tensor_of(args[2]), &found_inf = tensor_of(args[3]);
  if (!inv_scale.is_cpu() || !found_inf.is_cpu()) {
    Py_RETURN_FALSE;
  }
  const float factor = number_in<float>(inv_scale);
  const bool write_back = args[4] == Py_True;
  bool finite = true;
  const bool done = args[5] == Py_True ? visit_few(args[0], args[1], UnscaleAdd{factor, write_back}, false, &finite)
                                       : visit_few(args[0], args[1], UnscaleCopy{factor, write_back}, false, &finite);
  if (!finite) {
    number_in<float>(found_inf) = 1;
  }
  return PyBool_FromLong(done);
  END_HANDLE_TH_ERRORS
}

// copy_to_half(masters, halves): the operator of that name; False, and nothing is done, if they are not a few elements
// on the CPU.
PyObject* copy_to_half(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 2, "expected two lists");
  bool finite = true;
  return PyBool_FromLong(visit_few(args[1], args[0], CopyToHalf{}, true, &finite));
  END_HANDLE_TH_ERRORS
}

// float32_like(tensors): a list of new tensors, shaped and laid out as these; what they hold does not count.
PyObject* float32_like(PyObject*, PyObject* tensors) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(PyList_CheckExact(tensors), "expected float32_like(list)");
  Ref made = Ref::taken(PyList_New(PyList_GET_SIZE(tensors)));
  for (Py_ssize_t i = 0; made && i < PyList_GET_SIZE(tensors); ++i) {
    PyObject* object = PyList_GET_ITEM(tensors, i);
    TORCH_CHECK_TYPE(THPVariable_Check(object), "expected tensors");
    const at::NoGradGuard without_graph;
    const Tensor& tensor = tensor_of(object);
    PyObject* like = THPVariable_Wrap(at::empty_like(tensor, tensor.options().dtype(ScalarType::Float)));
    if (like == nullptr) {
      return nullptr;
    }
    PyList_SET_ITEM(made.get(), i, like);
  }
  return made.release();
  END_HANDLE_TH_ERRORS
}

Tensor unscale_few(const std::vector<Tensor>& grads, float scale) {
  const Unscale unscale{1 / scale};
  bool finite = true;
  for (const Tensor& grad : grads) {
    with_type(grad.scalar_type(), [&](auto* type) {
      double sum;
      finite &= visit_chunk(static_cast<decltype(type)>(grad.mutable_data_ptr()), nullptr, grad.numel(), unscale, sum);
    });
  }
  return number_on_cpu(finite ? 0 : 1);
}

Tensor unscale_many(const std::vector<Tensor>& grads, const Tensor& scale) {
  static const auto unscale = operator_named<void(at::TensorList, const Tensor&, const Tensor&)>("ampatch::unscale_");
  const pybind11::gil_scoped_release released;
  const at::NoGradGuard without_graph;
  Tensor found_inf = at::zeros_like(scale);
  if (!grads.empty()) {
    unscale.call(grads, at::reciprocal(scale), found_inf);
  }
  return found_inf;
}

// unscale_by(grads, scale): multiplies a list of gradients by the reciprocal of a scale, and returns the verdict; None,
// and nothing is done, if they are not all ordinary and where the scale is, or one has a graph of its own.
PyObject* unscale_by(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 2 && PyList_CheckExact(args[0]) && is_tensor(args[1]), "expected unscale_by(list, tensor)");
  const Tensor& scale = tensor_of(args[1]);
  std::vector<Tensor> grads;
  const auto is_elsewhere = [&](const Tensor& grad) { return grad.device() != scale.device(); };
  if (!list_ordinary(args[0], grads) || std::any_of(grads.begin(), grads.end(), is_elsewhere)) {
    Py_RETURN_NONE;
  }
  const bool here = scale.is_cpu() && are_few(grads);
  Tensor found_inf = here ? unscale_few(grads, number_in<float>(scale)) : unscale_many(grads, scale);
  for (const Tensor& grad : grads) {
    count_write(grad);
  }
  return THPVariable_Wrap(std::move(found_inf));
  END_HANDLE_TH_ERRORS
}

PyMethodDef functions[] = {{"copy_of", copy_of, METH_O, nullptr},
                           {"update_scale", fast(update_scale), METH_FASTCALL, nullptr},
                           {"unscale_by", fast(unscale_by), METH_FASTCALL, nullptr},
                           {"unscale_into", fast(unscale_into), METH_FASTCALL, nullptr},
                           {"copy_to_half", fast(copy_to_half), METH_FASTCALL, nullptr},
                           {"float32_like", float32_like, METH_O, nullptr},
                           {nullptr, nullptr, 0, nullptr}};

}  // namespace

bool add_gradient_functions(PyObject* module) {
  return PyModule_AddFunctions(module, functions) == 0;
}

}  // namespace ampatch
