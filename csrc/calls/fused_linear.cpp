// The node of a linear layer: the same arithmetic, in the same order, as the node in fused_linear.py, which says why.

#include "fused_linear.h"

#include <torch/csrc/python_headers.h>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/sum.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "tensors.h"

namespace ampatch {

namespace {

using torch::autograd::Edge;
using torch::autograd::InputMetadata;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using torch::dynamo::autograd::PackedArgs;

// How torch holds nodes: a std::shared_ptr, or a c10::intrusive_ptr in later versions.
using Held = decltype(Edge::function);

template <class Made, class Pointer = Held>
auto make_node() {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<Node>>) {
    return std::shared_ptr<Made>(new Made(), [](auto* node) { deleteNode(node); });
  } else {
    return c10::make_intrusive<Made>();
  }
}

bool is_in_float32(const Tensor& rows, Product product) {
  return product == Product::float32 || (product == Product::automatic && rows.is_cuda());
}

// As torch, it leaves a matrix alone: a reshape changes strides of dimensions of size 1.
Tensor as_rows(const Tensor& tensor) {
  return tensor.dim() == 2 ? tensor : tensor.reshape({-1, tensor.size(-1)});
}

Tensor input_gradient(const Tensor& rows, const Tensor& inputs, const Tensor& weight, at::IntArrayRef shape) {
  const bool is_column_major = inputs.stride(0) == 1 && inputs.stride(1) == inputs.size(0);
  const Tensor found = is_column_major ? weight.t().mm(rows.t()).t() : rows.mm(weight);
  return shape.size() == 2 ? found : found.reshape(shape);
}

Tensor weight_gradient(
    const Tensor& rows, const Tensor& inputs, bool has_usual_layout, Product product, bool is_recorded) {
  const Tensor left = (has_usual_layout ? rows : inputs).t();
  const Tensor& right = has_usual_layout ? inputs : rows;
  Tensor found;
  if (!is_in_float32(rows, product)) {
    found = left.mm(right).to(ScalarType::Float);
    return has_usual_layout ? found : found.t();
  }
  // In a backward pass inside its region, autocast would round the operands.
  const c10::impl::ExcludeDispatchKeyGuard without_autocast(c10::autocast_dispatch_keyset);
  if (is_recorded || !rows.is_cuda()) {  // torch cannot differentiate the other form
    found = left.to(ScalarType::Float).mm(right.to(ScalarType::Float));
  } else {
    found = at::mm(left, right, ScalarType::Float);
  }
  return has_usual_layout ? found : found.t();
}

Tensor bias_gradient(const Tensor& rows, Product product) {
  return is_in_float32(rows, product) ? rows.sum({0}, false, ScalarType::Float)
                                      : rows.sum({0}, false).to(ScalarType::Float);
}

// Returns the gradients of input, weight and bias that are asked for.
variable_list gradients(const Tensor& grad,
                        const Tensor& input,
                        const Tensor& weight,
                        bool has_usual_layout,
                        Product product,
                        const std::vector<bool>& asked) {
  variable_list found(3);
  const Tensor rows = as_rows(grad);
  const Tensor inputs = as_rows(input);
  if (asked[0]) {
    found[0] = input_gradient(rows, inputs, weight, input.sizes());
  }
  if (asked[1]) {
    found[1] = weight_gradient(rows, inputs, has_usual_layout, product, at::GradMode::is_enabled());
  }
  if (asked[2]) {
    found[2] = bias_gradient(rows, product);
  }
  return found;
}

// The same, for compiled autograd: `packed` is what `apply_with_saved` packs.
variable_list apply_later(const variable_list& grads, const std::vector<c10::IValue>& packed) {
  if (!grads[0].defined()) {
    return variable_list(3);
  }
  PackedArgs args(packed);
  const auto input = args.unpack<Tensor>();
  const auto weight = args.unpack<Tensor>();
  const auto has_usual_layout = args.unpack<bool>();
  const auto product = static_cast<Product>(args.unpack<int64_t>());
  return gradients(grads[0], input, weight, has_usual_layout, product, args.unpack<std::vector<bool>>());
}

// The cast of a parameter, where the values of the cast exist already.
struct LinkedCastBackward : Node {
  std::string name() const override {
    return "LinkedCastBackward";
  }

  variable_list apply(variable_list&& grads) override {
    return {grads[0].defined() ? grads[0].to(ScalarType::Float) : Tensor()};
  }
};

struct FusedLinearBackward : Node {
  SavedVariable input;
  SavedVariable weight;   // the half cast, which has no graph; empty if the input needs no gradient
  bool has_usual_layout;  // of that cast
  Product product;

  std::string name() const override {
    return "FusedLinearBackward";
  }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    input.reset_data();
    weight.reset_data();
  }

  variable_list apply(variable_list&& grads) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    const Tensor& grad = grads[0];
    if (!grad.defined()) {
      return variable_list(3);
    }
    const std::vector<bool> asked = {
        task_should_compute_output(0), task_should_compute_output(1), task_should_compute_output(2)};
    Tensor half = weight.unpack();
    if (asked[0] && at::GradMode::is_enabled()) {
      half = linked(half);  // this pass is recorded, so a second one must find the parameter behind its cast
    }
    return gradients(grad, input.unpack(), half, has_usual_layout, product, asked);
  }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    args.collect(input, false);
    args.collect(weight, false);
    args.collect(has_usual_layout);
    args.collect(static_cast<int64_t>(product));
  }

  variable_list apply_with_saved(const variable_list& grads,
                                 torch::dynamo::autograd::SwapSavedVariables& saved) override {
    saved.before(input);
    saved.before(weight);
    PackedArgs packed;
    packed.pack(input.unpack());
    packed.pack(weight.unpack());
    packed.pack(has_usual_layout);
    packed.pack(static_cast<int64_t>(product));
    packed.pack(
        std::vector<bool>{task_should_compute_output(0), task_should_compute_output(1), task_should_compute_output(2)});
    const std::vector<c10::IValue> args = std::move(packed).vec();
    std::vector<at::TypePtr> schema;
    for (const auto& arg : args) {
      schema.push_back(arg.isTensor() ? at::TypePtr(at::TensorType::get()) : arg.type());
    }
    const auto metadata = torch::dynamo::autograd::IValuePacker<std::vector<std::optional<InputMetadata>>>::pack(
        torch::dynamo::autograd::get_input_metadata(next_edges()));
    const auto& interface = torch::dynamo::autograd::getPyCompilerInterface();
    const auto bound = interface->bind_function(saved.get_py_compiler(), name(), apply_later, schema, true, false);
    variable_list found =
        interface->call_function(saved.get_py_compiler(), "apply_functional", bound, grads, args, metadata);
    saved.after(input);
    saved.after(weight);
    return found;
  }

 private:
  Tensor linked(const Tensor& cast) const {
    const auto node = make_node<LinkedCastBackward>();
    node->add_next_edge(next_edge(1));
    Tensor made = cast.variable_data();
    set_history(made, node);
    return made;
  }
};

bool is_weight(const Tensor& tensor) {
  return tensor.scalar_type() == ScalarType::Float && is_ordinary(tensor) && !tensor.is_nested() && tensor.is_leaf() &&
         !tensor._fw_grad(0).defined();
}

}  // namespace

bool product_of(std::string_view text, Product* product) {
  if (text == "auto") {
    *product = Product::automatic;
  } else if (text == "half") {
    *product = Product::half;
  } else if (text == "float32") {
    *product = Product::float32;
  } else {
    PyErr_SetString(PyExc_ValueError, "expected the product auto, half or float32");
    return false;
  }
  return true;
}

bool may_fuse(const Tensor& input, const Tensor& weight, const Tensor& bias) {
  return weight.requires_grad() && is_weight(weight) && weight.dim() == 2 && is_ordinary(input) && !input.is_nested() &&
         input.dim() >= 2 && input.size(-1) == weight.size(1) && input.numel() > 0 && weight.numel() > 0 &&
         input.device() == weight.device() && !input._fw_grad(0).defined() &&
         (!bias.defined() ||
          (is_weight(bias) && bias.dim() == 1 && bias.size(0) == weight.size(0) && bias.device() == weight.device()));
}

Tensor fused_linear(const Tensor& input,
                    const Tensor& weight,
                    const Tensor& bias,
                    const Tensor& half_weight,
                    const Tensor& half_bias,
                    Product product) {
  const auto node = make_node<FusedLinearBackward>();
  node->set_next_edges(torch::autograd::collect_next_edges(input, weight, bias));
  node->input = SavedVariable(input, false);
  // As torch: without the gradient of the input, the cast is not needed any more.
  node->weight = SavedVariable(input.requires_grad() ? half_weight : Tensor(), false);
  node->has_usual_layout = half_weight.stride(1) == 1 && half_weight.stride(0) == half_weight.size(1);
  node->product = product;
  Tensor result;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    result = at::linear(input, half_weight, bias.defined() ? std::make_optional(half_bias) : std::nullopt);
  }
  set_history(result, node);
  return result;
}

}  // namespace ampatch
