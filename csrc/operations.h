// The arithmetic of each operator on one element, which the kernels for the CPU and for the GPU share.
//
// An element is a pair: `narrow`, of a tensor of float16, bfloat16 or float32, and `wide`, of one of float32, which
// some operators lack. Both are handed over as float32, one or a vector of several, and what is written to `narrow` is
// rounded when it is stored. An operation says which of the two it reads and writes, and returns whether the gradient
// that it met is finite; `sum` is what its caller keeps of a few elements. Must not know where elements lie or who runs
// what. Compiled without contraction of a * b + c, so that every result has the bits that torch's own kernels give.

#pragma once

#include <cmath>
#include <cstdint>

#include <torch/headeronly/macros/Macros.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

namespace ampatch {

// An infinity times zero is NaN, and NaN equals nothing.
template <class Value>
C10_HOST_DEVICE inline auto is_finite(const Value& value) {
  return value * 0.0f == 0.0f;
}

// The least number above zero that a narrow type has, and 0 of float32.
template <class Narrow>
constexpr float kLeast = 0;
template <>
constexpr float kLeast<c10::Half> = 0x1p-24f;
template <>
constexpr float kLeast<c10::BFloat16> = 0x1p-133f;

// A master's gradient as its half parameter shows it, but for the rounding: what is not zero does not become zero, so
// that a gradient which somebody has zeroed is told from one that underflowed.
template <class Narrow>
C10_HOST_DEVICE inline float shown(float value) {
  return value != 0 && fabsf(value) < kLeast<Narrow> ? copysignf(kLeast<Narrow>, value) : value;
}

// The user's value is the master's where it is another than the master's own in half, which of a gradient is the one
// that is shown; NaN is always another.
template <class Narrow>
C10_HOST_DEVICE inline void follow_element(Narrow half, float& master, bool of_gradients) {
  const float value = static_cast<float>(half);
  const float own = of_gradients ? shown<Narrow>(master) : master;
  if (static_cast<float>(static_cast<Narrow>(own)) != value) {
    master = value;
  }
}

// What an element counts for in the fingerprint of its tensor, which is the sum of these: for each index another one of
// each value, in no order that edits have, such as signs turned round.
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

// master_grads = grads * inv_scale, or += where it adds; with write_back, grads then show the master gradients.
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

// halves = masters, rounded; of gradients, as they are shown
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
    return is_finite(Value{});  // nobody asks about weights
  }
};

// The transition of a loss scale, as ampatch.scaling.loss_scaler.next_state describes it.
struct UpdateScale {
  // As the operator gets them.
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
