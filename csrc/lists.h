// Checks the tensors passed to an operator, and presents them as pieces of contiguous memory.
//
// Owns the temporary copies of tensors that are not contiguous: filled before the operation, copied back after it. Must
// not launch kernels other than these copies, nor read the values of tensors.

#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Exception.h>
#include <torch/headeronly/util/Half.h>

namespace ampatch {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Number of elements that one GPU thread block or one CPU task processes at a time. A multiple of all vector lengths.
constexpr int64_t kChunk = 16384;

struct Piece {
  void* narrow;
  float* wide;
  int64_t count;
  ScalarType type;  // of narrow

  int64_t chunks() const {
    return (count + kChunk - 1) / kChunk;
  }
};

// Calls `visit` with a null pointer to the C++ type of a narrow element.
template <class Visit>
C10_HOST_DEVICE inline void with_type(ScalarType type, Visit&& visit) {
  switch (type) {
    case ScalarType::Half:
      return visit(static_cast<c10::Half*>(nullptr));
    case ScalarType::BFloat16:
      return visit(static_cast<c10::BFloat16*>(nullptr));
    default:
      return visit(static_cast<float*>(nullptr));
  }
}

// True if the tensor's elements fill their memory without gaps or overlaps, in any order of dimensions.
inline bool is_dense(const Tensor& tensor) {
  if (tensor.is_contiguous()) {
    return true;
  }
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  std::vector<size_t> order(sizes.size());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return strides[a] < strides[b]; });
  int64_t expected = 1;
  for (const size_t dim : order) {
    if (sizes[dim] != 1) {
      if (strides[dim] != expected) {
        return false;
      }
      expected *= sizes[dim];
    }
  }
  return true;
}

// True if two tensors of the same shape are dense and store their elements in the same order.
inline bool are_alike(const Tensor& a, const Tensor& b) {
  if (a.is_contiguous() && b.is_contiguous()) {
    return true;
  }
  const auto sizes = a.sizes(), ours = a.strides(), theirs = b.strides();
  for (size_t dim = 0; dim < sizes.size(); ++dim) {
    if (sizes[dim] != 1 && ours[dim] != theirs[dim]) {
      return false;
    }
  }
  return is_dense(a);
}

// What some operators have beside each pair, of a bfloat16 and a float32 tensor: an int16 tensor, or a key of 32 bits.
struct Thirds {
  const std::vector<Tensor>* remainders = nullptr;
  bool are_written = false;
  const std::vector<int64_t>* keys = nullptr;
};

// Returns the key that a piece has in place of an address.
C10_HOST_DEVICE inline uint32_t key_of(const void* third) {
  return static_cast<uint32_t>(reinterpret_cast<uintptr_t>(third));
}

// Returns a tensor of two lists; it tells the device.
inline const Tensor& any_of(const std::vector<Tensor>& some, const std::vector<Tensor>& others) {
  STD_TORCH_CHECK(!some.empty() || !others.empty(), "ampatch: expected tensors, found two empty lists");
  return some.empty() ? others.front() : some.front();
}

// Tensors, or pairs of tensors, as pieces. What is beside a pair is a piece of its own, of no elements, right before
// that of the pair: its `narrow` is the address of the remainders, or the key. `more` has further ones as addresses and
// numbers, which csrc/calls/pieces.cpp has checked: rows of narrow, wide, count and type.
class Lists {
 public:
  // Gradients without masters, on the device of `beside`.
  Lists(const char* name,
        const Tensor& beside,
        const std::vector<Tensor>& narrow,
        bool writes_narrow,
        const std::optional<Tensor>& more)
      : name_(name) {
    pieces_.reserve(narrow.size() + rows_of(more));
    for (const Tensor& tensor : narrow) {
      const ScalarType type = checked(tensor, beside, true);
      const int64_t count = tensor.numel();
      if (count != 0) {
        void* data = is_dense(tensor) ? tensor.data_ptr() : copied(tensor, writes_narrow);
        pieces_.push_back({with_memory(data), nullptr, count, type});
      }
    }
    add(more);
  }

  // Pairs of a tensor of float16, bfloat16 or float32 and a float32 tensor.
  Lists(const char* name,
        const Tensor& beside,
        const std::vector<Tensor>& narrow,
        bool writes_narrow,
        const std::vector<Tensor>& wide,
        bool writes_wide,
        const std::optional<Tensor>& more,
        const Thirds& thirds = {})
      : name_(name) {
    const auto* remainders = thirds.remainders;
    const auto* keys = thirds.keys;
    const bool has_third = remainders != nullptr || keys != nullptr;
    check_length(narrow, wide.size());
    check_length(narrow, remainders != nullptr ? remainders->size() : keys != nullptr ? keys->size() : narrow.size());
    pieces_.reserve(narrow.size() * (1 + has_third) + rows_of(more));
    for (size_t index = 0; index < narrow.size(); ++index) {
      const Tensor &first = narrow[index], &second = wide[index];
      const ScalarType type = checked(first, beside, true);
      checked(second, beside, false);
      check_shape(first, second, index);
      STD_TORCH_CHECK(!has_third || type == ScalarType::BFloat16, name_, ": expected half tensors of bfloat16");
      bool alike = are_alike(first, second);
      if (remainders != nullptr) {
        const Tensor& third = (*remainders)[index];
        STD_TORCH_CHECK(third.scalar_type() == ScalarType::Short && third.device() == beside.device(),
                        name_,
                        ": expected remainders of int16, on the device of the others");
        check_shape(first, third, index);
        alike = alike && are_alike(first, third);
      }
      const int64_t count = first.numel();
      if (count != 0) {
        const auto address = [&](const Tensor& tensor, bool is_written) {
          return with_memory(alike ? tensor.data_ptr() : copied(tensor, is_written));
        };
        if (has_third) {
          void* third = remainders != nullptr ? address((*remainders)[index], thirds.are_written)
                                              : reinterpret_cast<void*>((*keys)[index]);
          pieces_.push_back({third, nullptr, 0, ScalarType::Short});
        }
        void* data = address(first, writes_narrow);
        pieces_.push_back({data, static_cast<float*>(address(second, writes_wide)), count, type});
      }
    }
    add(more);
  }

  const std::vector<Piece>& pieces() const {
    return pieces_;
  }

  // Copies results back to tensors that are not contiguous. Call it once the operation is done or enqueued.
  void finish() {
    for (auto& [tensor, flat] : written_) {
      torch::stable::copy_(tensor, flat);
    }
  }

 private:
  static int64_t rows_of(const std::optional<Tensor>& more) {
    return more.has_value() ? more->size(0) : 0;
  }

  void check_length(const std::vector<Tensor>& tensors, size_t others) const {
    STD_TORCH_CHECK(tensors.size() == others, name_, ": found lists of ", tensors.size(), " and ", others, " tensors");
  }

  void check_shape(const Tensor& tensor, const Tensor& other, size_t index) const {
    const auto sizes = tensor.sizes(), others = other.sizes();
    STD_TORCH_CHECK(sizes.size() == others.size() && std::equal(sizes.begin(), sizes.end(), others.begin()),
                    name_,
                    ": found tensors of different shapes at index ",
                    index);
  }

  void add(const std::optional<Tensor>& more) {
    if (rows_of(more) == 0) {
      return;
    }
    STD_TORCH_CHECK(more->scalar_type() == ScalarType::Long && more->is_cpu() && more->is_contiguous() &&
                        more->dim() == 2 && more->size(1) == 4,
                    name_,
                    ": expected rows of four numbers");
    const auto* row = static_cast<const int64_t*>(more->data_ptr());
    for (const auto* end = row + more->numel(); row != end; row += 4) {
      pieces_.push_back(
          {reinterpret_cast<void*>(row[0]), reinterpret_cast<float*>(row[1]), row[2], static_cast<ScalarType>(row[3])});
    }
  }

  ScalarType checked(const Tensor& tensor, const Tensor& beside, bool may_be_half) const {
    const ScalarType type = tensor.scalar_type();
    STD_TORCH_CHECK(
        type == ScalarType::Float || (may_be_half && (type == ScalarType::Half || type == ScalarType::BFloat16)),
        name_,
        may_be_half ? ": expected tensors of float16, bfloat16 or float32" : ": expected master tensors of float32");
    STD_TORCH_CHECK(tensor.device() == beside.device(), name_, ": expected the tensors of one device");
    return type;
  }

  void* with_memory(void* data) const {
    STD_TORCH_CHECK(data != nullptr, name_, ": found a tensor whose memory was freed");
    return data;
  }

  void* copied(const Tensor& tensor, bool is_written) {
    const Tensor flat = torch::stable::contiguous(tensor);  // the tensor itself if it is contiguous
    copies_.push_back(flat);
    if (is_written && flat.data_ptr() != tensor.data_ptr()) {
      // A tensor of its own on that memory: torch counts a copy to the given one, and writes are counted by the caller.
      written_.emplace_back(
          torch::stable::from_blob(
              tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.device(), tensor.scalar_type()),
          flat);
    }
    return flat.data_ptr();
  }

  const char* name_;
  std::vector<Piece> pieces_;
  std::vector<Tensor> copies_;  // must live until the operation is enqueued
  std::vector<std::pair<Tensor, Tensor>> written_;
};

// Checks a tensor of one element, and returns a pointer to it.
template <class Value>
inline Value* scalar(const char* name, const char* argument, const Tensor& tensor, const Tensor& beside) {
  constexpr bool is_float = std::is_same_v<Value, float>, is_double = std::is_same_v<Value, double>;
  constexpr ScalarType type = is_float ? ScalarType::Float : is_double ? ScalarType::Double : ScalarType::Int;
  STD_TORCH_CHECK(tensor.numel() == 1 && tensor.scalar_type() == type && tensor.device() == beside.device(),
                  name,
                  ": expected ",
                  argument,
                  " to be one element of ",
                  is_float    ? "float32"
                  : is_double ? "float64"
                              : "int32",
                  ", on the device of the others");
  return static_cast<Value*>(tensor.data_ptr());
}

// Checks a tensor with one number per piece, and returns a pointer to the first; raises if a list tensor was empty.
inline double* one_for_each(
    const char* name, const char* argument, const Tensor& tensor, const Tensor& beside, const std::vector<Piece>& of) {
  STD_TORCH_CHECK(tensor.numel() == static_cast<int64_t>(of.size()) && tensor.scalar_type() == ScalarType::Double &&
                      tensor.is_contiguous() && tensor.device() == beside.device(),
                  name,
                  ": expected ",
                  argument,
                  " to be float64 and as many as there are tensors, none of them empty, on the device of the others");
  return static_cast<double*>(tensor.data_ptr());
}

}  // namespace ampatch
