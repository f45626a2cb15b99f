// Casts as Tensor.to makes them. Of a few elements on the CPU they are made here, with what autograd is to know:
// torch's way there, through its dispatcher and its iterators, takes several times as long as they do.

#include "casts.h"

#include "../vectors.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/generated/Functions.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/variable.h>

#include <optional>
#include <type_traits>

namespace ampatch {

namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;
using torch::autograd::generated::ToCopyBackward0;

// On the CPU this many elements are cast before the interpreter's lock could be let go and taken back.
constexpr int64_t kFew = 4096;

template <class From, class To>
void convert(const From* from, To* to, int64_t count) {
  int64_t index = 0;
  for (Floats lanes; index + kLanes <= count; index += kLanes) {
    load(from + index, lanes);
    store(lanes, to + index);
  }
  for (; index < count; ++index) {
    to[index] = static_cast<To>(static_cast<float>(from[index]));
  }
}

// Whether there is nobody in this thread who is to hear of operators: modes, tracers, transforms, profilers.
bool is_unobserved() {
  return has_usual_keys() && !at::hasCallbacks();
}

// Dimensions have names until torch 2.12.
template <class Impl>
bool has_names(const Impl* impl) {
  if constexpr (requires { impl->has_named_tensor_meta(); }) {
    return impl->has_named_tensor_meta();
  }
  return false;
}

// Whether a tensor has nothing to it but its few elements, side by side, in memory of the CPU that is there.
bool is_few(const Tensor& tensor, ScalarType type) {
  static const c10::DispatchKeySet ordinary({c10::DispatchKey::CPU,
                                             c10::DispatchKey::ADInplaceOrView,
                                             c10::DispatchKey::AutogradCPU,
                                             c10::DispatchKey::AutocastCPU});
  const auto* meta = tensor.unsafeGetTensorImpl()->autograd_meta();
  return (tensor.key_set().raw_repr() & ~ordinary.raw_repr()) == 0 && tensor.numel() <= kFew &&
         is_castable(tensor.scalar_type()) && is_castable(type) && tensor.is_non_overlapping_and_dense() &&
         !has_names(tensor.unsafeGetTensorImpl()) &&
         (meta == nullptr || static_cast<const torch::autograd::AutogradMeta*>(meta)->fw_grad_ == nullptr) &&
         tensor.storage().nbytes() >= static_cast<size_t>(tensor.storage_offset() + tensor.numel()) * tensor.itemsize();
}

Tensor converted_here(const Tensor& tensor, ScalarType type) {
  const Tensor made = at::detail::empty_strided_cpu(tensor.sizes(), tensor.strides(), type);
  with_type(tensor.scalar_type(), [&](auto* from) {
    with_type(type, [&](auto* to) {
      using From = std::remove_pointer_t<decltype(from)>;
      using To = std::remove_pointer_t<decltype(to)>;
      convert(
          static_cast<const From*>(tensor.const_data_ptr()), static_cast<To*>(made.mutable_data_ptr()), tensor.numel());
    });
  });
  return made;
}

// torch's own node, which casts the gradient back, in the way above where that will do.
struct CastBackward : ToCopyBackward0 {
  variable_list apply(variable_list&& grads) override {
    const ScalarType type = c10::typeMetaToScalarType(self_options.dtype());
    if (grads.size() == 1 && grads[0].defined() && !at::GradMode::is_enabled() && is_unobserved() &&
        is_few(grads[0], type) && grads[0].scalar_type() != type) {
      return {converted_here(grads[0], type)};
    }
    return ToCopyBackward0::apply(std::move(grads));
  }
};

// torch held its nodes by std::shared_ptr before 2.13.
template <class Pointer, class Made = CastBackward>
Pointer new_node() {
  if constexpr (std::is_constructible_v<Pointer, Made*, void (*)(Node*)>) {
    return Pointer(new Made(), [](auto* node) { deleteNode(node); });
  } else {
    return c10::make_intrusive<Made>();
  }
}

bool is_recorded(const Tensor& tensor) {
  return at::GradMode::is_enabled() && tensor.requires_grad() &&
         !c10::impl::tls_local_dispatch_key_set().excluded_.has(c10::DispatchKey::AutogradFunctionality);
}

}  // namespace

Tensor converted(const Tensor& tensor, ScalarType type) {
  if (is_few(tensor, type) && is_unobserved()) {
    const Tensor made = converted_here(tensor, type);
    if (is_recorded(tensor)) {
      const auto node = new_node<decltype(torch::autograd::Edge::function)>();
      static_cast<CastBackward*>(node.get())->self_options = tensor.options();
      node->set_next_edges(torch::autograd::collect_next_edges(tensor));
      torch::autograd::set_history(made, node);
    }
    return made;
  }
  std::optional<pybind11::gil_scoped_release> released;
  if (!tensor.is_cpu() || tensor.numel() > kFew) {
    released.emplace();
  }
  std::optional<at::AutoDispatchBelowADInplaceOrView> below;
  if (tensor.unsafeGetTensorImpl()->autograd_meta() == nullptr) {  // autograd has never met it, and would do nothing
    below.emplace();
  }
  return tensor.to(type);
}

// To Python a node is of torch's class.
bool prepare_casts() {
  const at::AutoGradMode records(true);
  const c10::InferenceMode outside(false);
  const Tensor cast = at::empty({}, at::kFloat).set_requires_grad(true).to(at::kHalf);
  const Ref function = Ref::taken(torch::autograd::functionToPyObject(cast.grad_fn()));
  if (!function) {
    return false;
  }
  torch::autograd::registerCppFunction(typeid(CastBackward), Py_TYPE(function.get()));
  return true;
}

}  // namespace ampatch
