// The arithmetic of each operator on one element, shared by the kernels for the CPU and the GPU.
//
// An element is a pair: `narrow` from a tensor of float16, bfloat16 or float32, and `wide` from a float32 tensor. Some
// operators have no `wide`. An operation gets both as float32, as single values or vectors; the caller rounds `narrow`
// when it stores it. The constants of an operation say which of the two it reads and writes. It returns whether the
// gradient is finite; `sum` accumulates over a few elements. Must not know where elements are stored or which threads
// run. Compiled without contraction of a * b + c, so that every result equals that of torch's own kernels bit for bit.
//
// `split_bits`, `join_bits` and `round_bits` get the bits of float32 numbers as words of 32 bits, single ones or
// vectors. A half element or a remainder is the lower 16 bits of a word.

#pragma once

#include <cmath>
#include <cstdint>

#include <torch/headeronly/macros/Macros.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

namespace ampatch {

// Infinity times zero is NaN, and NaN does not equal 0.
template <class Value>
C10_HOST_DEVICE inline auto is_finite(const Value& value) {
  return value * 0.0f == 0.0f;
}

// The smallest positive (subnormal) number of a half type; 0 for float32.
template <class Narrow>
constexpr float kLeast = 0;
template <>
constexpr float kLeast<c10::Half> = 0x1p-24f;
template <>
constexpr float kLeast<c10::BFloat16> = 0x1p-133f;

// Returns the value that, rounded to `Narrow`, becomes the half parameter's gradient. Nonzero gradients stay nonzero,
// so that a gradient that user code zeroed can be distinguished from one that underflowed.
template <class Narrow>
C10_HOST_DEVICE inline float shown(float value) {
  const bool vanishes = (value != 0) & (fabsf(value) < kLeast<Narrow>);  // without a branch
  return vanishes ? copysignf(kLeast<Narrow>, value) : value;
}

// Copies the half value to the master if user code edited it: if it differs from the master rounded to half, for
// gradients as `shown` rounds. NaN always counts as different.
template <class Narrow>
C10_HOST_DEVICE inline void copy_edit(Narrow half, float& master, bool of_gradients) {
  const float value = static_cast<float>(half);
  const float own = of_gradients ? shown<Narrow>(master) : master;
  if (static_cast<float>(static_cast<Narrow>(own)) != value) {
    master = value;
  }
}

// Returns the hash of a word of 32 bits; the fingerprint of a tensor is the sum over its words. Two half elements make
// a word, the first of them its lower bits; an odd last one has a word of its own. At a given index different words
// have different hashes. The mixing keeps the effects of regular edits, such as flipped signs, from cancelling.
C10_HOST_DEVICE inline uint32_t hashed(uint32_t bits, uint32_t index) {
  uint32_t hash = (bits + index * 0x9e3779b1u) * 0x85ebca6bu;
  hash ^= hash >> 15;
  hash *= 0xc2b2ae35u;
  return hash ^ (hash >> 13);
}

// grads *= inv_scale
struct Unscale {
  static constexpr bool kReadsNarrow = true, kHasWide = false, kReadsWide = false, kWritesWide = false, kSums = false;
  static constexpr bool kShows = false;
  float inv_scale;

  C10_HOST_DEVICE bool writes_narrow() const {
    return true;
  }

  template <class Value>
  C10_HOST_DEVICE auto operator()(Value& grad, Value&, Value&) const {
    const Value scaled = grad;
    grad = scaled * inv_scale;
    return is_finite(scaled);
  }
};

// master_grads = grads * inv_scale, or += if kAdds; with write_back, then also copies them back to grads, as `shown`.
template <bool kAdds>
struct UnscaleInto {
  static constexpr bool kReadsNarrow = true, kHasWide = true, kReadsWide = kAdds, kWritesWide = true, kSums = false;
  static constexpr bool kShows = true;
  float inv_scale;
  bool write_back;

  C10_HOST_DEVICE bool writes_narrow() const {
    return write_back;
  }

  template <class Value>
  C10_HOST_DEVICE auto operator()(Value& grad, Value& master_grad, Value&) const {
    const Value scaled = grad;
    const Value unscaled = scaled * inv_scale;
    if constexpr (kAdds) {
      master_grad += unscaled;
    } else {
      master_grad = unscaled;
    }
    grad = master_grad;
    return is_finite(scaled);
  }
};
using UnscaleCopy = UnscaleInto<false>;
using UnscaleAdd = UnscaleInto<true>;

// Reads only: sum += (grads * inv_scale) ** 2
struct FoundInfNorm {
  static constexpr bool kReadsNarrow = true, kHasWide = false, kReadsWide = false, kWritesWide = false, kSums = true;
  static constexpr bool kShows = false;
  float inv_scale;

  C10_HOST_DEVICE bool writes_narrow() const {
    return false;
  }

  template <class Value>
  C10_HOST_DEVICE auto operator()(Value& grad, Value&, Value& sum) const {
    const Value unscaled = grad * inv_scale;
    sum += unscaled * unscaled;
    return is_finite(grad);
  }
};

// The norm of gradients, and the factor that clips them: 1 after an overflow. In torch's order of operations.
struct ClipFactor {
  double max_norm;

  C10_HOST_DEVICE void operator()(double sum_of_squares, float found_inf, float& norm, float& factor) const {
    const double exact = sqrt(sum_of_squares);
    const double clipping = (1 / (exact + 1e-6)) * max_norm;
    norm = static_cast<float>(exact);
    factor = found_inf != 0 || max_norm == INFINITY || clipping > 1 ? 1 : static_cast<float>(clipping);
  }
};

// halves = masters, rounded; for gradients as `shown` rounds
template <bool kOfGradients>
struct CopyToHalf {
  static constexpr bool kReadsNarrow = false, kHasWide = true, kReadsWide = true, kWritesWide = false, kSums = false;
  static constexpr bool kShows = kOfGradients;

  C10_HOST_DEVICE bool writes_narrow() const {
    return true;
  }

  template <class Value>
  C10_HOST_DEVICE auto operator()(Value& half, Value& master, Value&) const {
    half = master;
    return is_finite(Value{});  // true: overflow is not checked in weights
  }
};

// Splits a float32 number into bfloat16, ties rounded away from zero, and a remainder, an int16 whose upper bits the
// caller drops. The two are exact: see `join_bits`. NaN becomes the quiet NaN, without a remainder.
template <class Word>
C10_HOST_DEVICE inline void split_bits(const Word& full, Word& half, Word& remainder) {
  const auto is_nan = (full & 0x7fffffffu) > 0x7f800000u;
  half = is_nan ? Word{} + 0x7fc0u : (full + 0x8000u) >> 16;
  remainder = is_nan ? Word{} : full;
}

// Returns the float32 number that `split_bits` made the two of.
template <class Word>
C10_HOST_DEVICE inline Word join_bits(const Word& half, const Word& remainder) {
  return (half << 16) + ((remainder ^ 0x8000u) - 0x8000u);  // the sign of the remainder extended to 32 bits
}

// Returns random numbers of 16 bits, the same for the same word: a hash with the constants of least bias in
// https://github.com/skeeto/hash-prospector.
template <class Word>
C10_HOST_DEVICE inline Word random_bits(Word word) {
  word ^= word >> 16;
  word *= 0x21f0aaadu;
  word ^= word >> 15;
  word *= 0x735a2d97u;
  word ^= word >> 15;
  return word >> 16;
}

// Rounds a float32 number to bfloat16: away from zero with the probability of the distance from the neighbour that is
// nearer to zero. A finite number stays finite. `index` is that of the element in memory, `key` belongs to its tensor.
template <class Word>
C10_HOST_DEVICE inline Word round_bits(const Word& full, const Word& index, uint32_t key) {
  const Word size = full & 0x7fffffffu, infinite = Word{} + 0x7f800000u, largest = Word{} + 0x7f7fffffu;
  const Word sum = size + random_bits<Word>(index * 0x9e3779b1u + key);
  const Word finite = sum < largest ? sum : largest;
  const Word other = size > infinite ? Word{} + 0x7fc00000u : infinite;
  return ((full & 0x80000000u) | (size < infinite ? finite : other)) >> 16;
}

// Updates the loss scale and its counters by the rules of ampatch.scaling.loss_scaler.next_state.
struct UpdateScale {
  // Takes the arguments of the operator `update_scale`.
  UpdateScale(double growth, double backoff, int64_t window, int64_t hysteresis, double floor, double ceiling)
      : growth(growth),
        backoff(backoff),
        window(static_cast<int32_t>(window)),
        hysteresis(static_cast<int32_t>(hysteresis)),
        floor(static_cast<float>(floor)),
        ceiling(static_cast<float>(ceiling)) {
  }

  double growth;
  double backoff;
  int32_t window;
  int32_t hysteresis;
  float floor;
  float ceiling;

  C10_HOST_DEVICE void operator()(float& scale, int32_t& unskipped, int32_t& hysteresis_left, float found_inf) const {
    double changed = scale;
    if (found_inf != 0) {
      unskipped = 0;
      if (--hysteresis_left <= 0) {
        changed *= backoff;
      }
    } else if (++unskipped >= window) {
      unskipped = 0;
      hysteresis_left = hysteresis;
      changed *= growth;
    }
    const float bounded = fminf(fmaxf(static_cast<float>(changed), floor), ceiling);
    scale = is_finite(bounded) ? bounded : scale;
  }
};

}  // namespace ampatch
