// Makes the GPU of an operator the current device, and finds torch's current stream. Must not launch anything.

#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/tensor.h>

#include "current_stream.h"

namespace ampatch {

inline void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) {
    (void)cudaGetLastError();  // clears the error, so that the next call does not report it again
    throw std::runtime_error(std::string("ampatch: ") + what + ": " + cudaGetErrorString(status));
  }
}

// Makes the device of a tensor the current one, and holds torch's current stream of that device.
class OnDevice {
 public:
  OnDevice(const char* name, const torch::stable::Tensor& tensor) : guard_(checked(name, tensor)) {
    // torch's guard does not suffice: this library has a CUDA runtime of its own, which is linked into it.
    check(cudaSetDevice(tensor.get_device_index()), name);
    stream_ = static_cast<cudaStream_t>(current_stream(tensor.get_device_index()));
  }

  cudaStream_t stream() const {
    return stream_;
  }

 private:
  static int32_t checked(const char* name, const torch::stable::Tensor& tensor) {
    STD_TORCH_CHECK(tensor.is_cuda(), name, ": expected all tensors on one GPU, and found one on the CPU");
    return tensor.get_device_index();
  }

  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_;
};

}  // namespace ampatch
