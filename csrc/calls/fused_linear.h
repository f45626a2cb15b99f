// A linear layer as one node of autograd's graph, as ampatch/patching/fused_linear.py has it in Python.

#pragma once

#include <ATen/core/Tensor.h>

#include <string_view>

namespace ampatch {

// How gradients of weights and biases are computed: see `PRODUCTS` in fused_linear.py.
enum class Product { automatic, half, float32 };

// Returns false with a Python exception set.
bool product_of(std::string_view text, Product* product);

// A linear layer with its casts: `input` in half; `weight` and `bias`, and their casts to half with graphs that lead to
// them. Without a bias, both tensors are undefined.
struct Linear {
  const at::Tensor& input;
  const at::Tensor& weight;
  const at::Tensor bias;
  const at::Tensor& half_weight;
  const at::Tensor half_bias;

  // True if shapes, types and layouts fit the node. The caller checks the types of the Python objects and the state of
  // the thread.
  bool may_be_one_node() const;

  // Returns the result, with the node as its history. Throws what torch's linear layer throws.
  at::Tensor in_one_node(Product product) const;
};

}  // namespace ampatch
