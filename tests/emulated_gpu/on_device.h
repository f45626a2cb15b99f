// In place of csrc/on_device.h: the CPU is the only device, and has no streams.

#pragma once

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
};

}  // namespace ampatch
