// A linear layer as one node of autograd's graph, as ampatch/patching/fused_linear.py has it in Python.

#pragma once

#include <ATen/core/Tensor.h>

#include <string_view>

namespace ampatch {

// How gradients of weights and biases are computed: see `PRODUCTS` in fused_linear.py.
enum class Product { automatic, half, float32 };

// Returns false with a Python exception set.
bool product_of(std::string_view text, Product* product);

// True if shapes, types and layouts fit the node; a layer without a bias passes an undefined tensor. The caller
// checks the types of the Python objects, the devices that are cast on, and the state of the thread.
bool may_fuse(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias);

// Returns the result of a linear layer as one node.
//
// `input` is half. `weight` and `bias` are float32 leaves, and `half_weight` and `half_bias` their casts without a
// graph. Throws what torch's linear layer throws.
at::Tensor fused_linear(const at::Tensor& input,
                        const at::Tensor& weight,
                        const at::Tensor& bias,
                        const at::Tensor& half_weight,
                        const at::Tensor& half_bias,
                        Product product);

}  // namespace ampatch
