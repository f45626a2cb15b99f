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
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <array>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "tensors.h"

namespace ampatch {

namespace {

using torch::autograd::Edge;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using torch::dynamo::autograd::CompiledNodeArgs;
using torch::dynamo::autograd::IValuePacker;
using torch::dynamo::autograd::PackedArgs;
using torch::dynamo::autograd::SwapSavedVariables;

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

// True if no subclass, mode, transform or tangent sees the operators on a tensor.
bool is_alone(const Tensor& tensor) {
  const auto here = c10::impl::tls_local_dispatch_key_set();
  return (here.included_ - c10::default_included_set).empty() &&
         !tensor.key_set().has_any(c10::python_ks | c10::functorch_transforms_ks) && !tensor._fw_grad(0).defined();
}

// As torch, it leaves a matrix alone: a reshape changes strides of dimensions of size 1. And views are not free.
Tensor as_matrix(const Tensor& tensor) {
  return tensor.dim() == 2 ? tensor : tensor.reshape_symint({-1, tensor.sym_size(-1)});
}

Tensor reshaped(const Tensor& matrix, const Tensor& model) {
  return model.dim() == 2 ? matrix : matrix.reshape_symint(model.sym_sizes());
}

bool is_in_float32(const Tensor& rows, Product product) {
  return product == Product::float32 || (product == Product::automatic && rows.is_cuda());
}

// Sizes are symbols where torch compiles the backward pass for inputs of any length.
Tensor input_gradient(const Tensor& rows, const Tensor& inputs, const Tensor& weight) {
  if (inputs.sym_stride(0) == 1 && inputs.sym_stride(1) == inputs.sym_size(0)) {
    return weight.t().mm(rows.t()).t();
  }
  return rows.mm(weight);
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

// Which gradients are asked for: of input, bias and weight.
using Asked = std::array<bool, 3>;

// Drops `weight`, the half cast, before it makes the gradient of the weight.
variable_list gradients(const Tensor& grad,
                        const Tensor& input,
                        Tensor weight,
                        bool has_usual_layout,
                        Product product,
                        const Asked& asked,
                        bool is_recorded) {
  const Tensor rows = as_matrix(grad);
  const Tensor inputs = as_matrix(input);
  variable_list found(3);
  if (asked[0]) {
    found[0] = reshaped(input_gradient(rows, inputs, weight), input);
  }
  weight.reset();
  if (asked[1]) {
    found[1] = bias_gradient(rows, product);
  }
  if (asked[2]) {
    found[2] = weight_gradient(rows, inputs, has_usual_layout, product, is_recorded);
  }
  return found;
}

// Puts a call of a function into the graph that compiled autograd makes of the backward pass. torch binds the functions
// of its own C++ nodes so, too: see CppNode in torch/csrc/autograd/custom_function.h.
variable_list call_in_graph(const Node& node,
                            const variable_list& grads,
                            SwapSavedVariables& saved,
                            variable_list (*function)(const variable_list&, const std::vector<c10::IValue>&),
                            const PackedArgs& packed) {
  std::vector<at::TypePtr> schema;
  for (const c10::IValue& value : packed.vec()) {
    schema.push_back(value.isTensor() ? at::TensorType::get() : value.type());
  }
  const auto& python = torch::dynamo::autograd::getPyCompilerInterface();
  const std::string name =
      python->bind_function(saved.get_py_compiler(), node.name(), function, std::move(schema), true, true);
  const auto metadata = IValuePacker<std::vector<std::optional<torch::autograd::InputMetadata>>>::pack(
      torch::dynamo::autograd::get_input_metadata(node.next_edges()));
  return python->call_function(saved.get_py_compiler(), "apply_functional", name, grads, packed.vec(), metadata);
}

struct FusedLinearBackward : Node {
  SavedVariable input;
  SavedVariable weight;   // the half cast; empty if the input needs no gradient
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
    if (!grads[0].defined()) {
      return variable_list(3);
    }
    const Tensor given = input.unpack();
    Tensor half = weight.unpack();
    if (!torch::autograd::get_current_graph_task_keep_graph()) {
      weight.reset_data();
    }
    const bool is_recorded = at::GradMode::is_enabled();
    std::optional<at::AutoDispatchBelowADInplaceOrView> below;
    if (!is_recorded && is_alone(grads[0]) && is_alone(given)) {  // autograd would do nothing
      below.emplace();
    }
    return gradients(grads[0], given, std::move(half), has_usual_layout, product, asked(), is_recorded);
  }

  void compiled_args(CompiledNodeArgs& args) const override {
    args.collect(input, false);
    args.collect(weight, false);
    args.collect(has_usual_layout);
    args.collect(static_cast<int64_t>(product));
  }

  variable_list apply_with_saved(const variable_list& grads, SwapSavedVariables& saved) override {
    saved.before(input);
    saved.before(weight);
    PackedArgs packed;
    const Tensor given = input.unpack();
    const Tensor half = weight.unpack();
    packed.pack(given);
    packed.pack(half.defined() ? half : given);  // without it no gradient of the input is asked for
    packed.pack(has_usual_layout);
    packed.pack(static_cast<int64_t>(product));
    packed.pack(asked());
    variable_list found = call_in_graph(*this, grads, saved, applied, packed);
    saved.after(input);
    saved.after(weight);
    return found;
  }

 private:
  // As `apply`, but compiled autograd never records a backward pass.
  static variable_list applied(const variable_list& grads, const std::vector<c10::IValue>& args) {
    if (!grads[0].defined()) {
      return variable_list(3);
    }
    PackedArgs packed(args);
    const auto input = packed.unpack<Tensor>();
    const auto weight = packed.unpack<Tensor>();
    const auto has_usual_layout = packed.unpack<bool>();
    const auto product = static_cast<Product>(packed.unpack<int64_t>());
    return gradients(grads[0], input, weight, has_usual_layout, product, packed.unpack<Asked>(), false);
  }

  Asked asked() const {
    return {task_should_compute_output(0), task_should_compute_output(1), task_should_compute_output(2)};
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

bool Linear::may_be_one_node() const {
  return weight.requires_grad() && is_weight(weight) && weight.dim() == 2 && is_ordinary(input) && !input.is_nested() &&
         input.scalar_type() == half_weight.scalar_type() && input.dim() >= 2 && input.size(-1) == weight.size(1) &&
         input.numel() > 0 && weight.numel() > 0 && input.device() == weight.device() && !input._fw_grad(0).defined() &&
         (!bias.defined() ||
          (is_weight(bias) && bias.dim() == 1 && bias.size(0) == weight.size(0) && bias.device() == weight.device()));
}

Tensor Linear::in_one_node(Product product) const {
  const auto node = make_node<FusedLinearBackward>();
  node->set_next_edges(torch::autograd::collect_next_edges(input, bias, weight));
  node->input = SavedVariable(input, false);
  // As torch: without the gradient of the input, the cast is not needed any more.
  node->weight = SavedVariable(input.requires_grad() ? half_weight : Tensor(), false);
  node->has_usual_layout = half_weight.stride(1) == 1 && half_weight.stride(0) == half_weight.size(1);
  node->product = product;
  Tensor result;
  {
    const at::NoGradGuard without_graph;
    std::optional<at::AutoDispatchBelowADInplaceOrView> below;
    // torch multiplies the rows of a strided input at once only if the weight's transpose requires grad, which a view
    // made below autograd does not. Its other product rounds differently on some processors.
    if (input.is_contiguous()) {
      below.emplace();
    }
    result = at::linear(input, half_weight, bias.defined() ? std::make_optional(half_bias) : std::nullopt);
  }
  set_history(result, node);
  return result;
}

}  // namespace ampatch
