// What the CPU does with elements that lie side by side: an operation on vectors of them, and on what is left one by
// one.
//
// Must not know which operation it is, nor where the elements come from.

#pragma once

#include <algorithm>
#include <cstdint>

#include "operations.h"
#include "vectors.h"

namespace ampatch {

// Fewer elements than this are not worth a second thread.
constexpr int64_t kGrain = 32768;

// So many numbers are added up in float32 before float64 takes over: the error of a norm stays below 1e-6.
constexpr int64_t kSummed = 32;

template <class Vector>
inline double total(const Vector& lanes) {
  double total = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    total += lanes[lane];
  }
  return total;
}

// Applies an operation to so many elements; `wide` is null where it has none. Returns whether all were finite.
template <class Narrow, class Operation>
bool visit_chunk(Narrow* narrow, float* wide, int64_t count, const Operation operation, double& sum) {
  Floats narrows = {}, wides = {}, sums = {};
  auto finite = is_finite(sums);
  sum = 0;
  int64_t index = 0;
  while (index + kLanes <= count) {
    const int64_t end = Operation::kSums ? std::min(count, index + kSummed * kLanes) : count;
    for (; index + kLanes <= end; index += kLanes) {
      if (Operation::kReadsNarrow) {
        load(narrow + index, narrows);
      }
      if (Operation::kReadsWide) {
        load(wide + index, wides);
      }
      finite &= operation(narrows, wides, sums);
      if (operation.writes_narrow()) {
        store(narrows, narrow + index);
      }
      if (Operation::kWritesWide) {
        store(wides, wide + index);
      }
    }
    if (Operation::kSums) {
      sum += total(sums);
      sums = Floats{};
    }
  }
  bool all = total(finite) == -kLanes;
  for (; index < count; ++index) {
    float one = Operation::kReadsNarrow ? static_cast<float>(narrow[index]) : 0;
    float other = Operation::kReadsWide ? wide[index] : 0, square = 0;
    all &= operation(one, other, square);
    sum += square;
    if (operation.writes_narrow()) {
      narrow[index] = static_cast<Narrow>(one);
    }
    if (Operation::kWritesWide) {
      wide[index] = other;
    }
  }
  return all;
}

}  // namespace ampatch
