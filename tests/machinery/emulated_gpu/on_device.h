// In place of csrc/on_device.h: the CPU is the only device, and has one stream. Every third call behaves as it
// would during the capture of a graph.

#pragma once

#include <limits>
#include <stdexcept>

#include <torch/csrc/stable/tensor.h>

namespace ampatch {

inline void check(int status, const char* what) {
  if (status != 0) {
    throw std::runtime_error(what);
  }
}

struct OnDevice {
  OnDevice(const char*, const torch::stable::Tensor&) {
  }

  void* stream() const {
    return nullptr;
  }

  int number_of_stream() const {
    static int calls = 0;
    return ++calls % 3 == 0 ? std::numeric_limits<int>::max() : 0;
  }
};

}  // namespace ampatch
