// Makes the GPU of an operator the current device, and finds torch's current stream. Must not launch anything.

#pragma once

#include <cuda_runtime.h>

#include <limits>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

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
  OnDevice(const char* name, const torch::stable::Tensor& tensor) : device_(checked(name, tensor)), guard_(device_) {
    // torch's guard does not suffice: this library has a CUDA runtime of its own, which is linked into it.
    check(cudaSetDevice(device_), name);
    stream_ = static_cast<cudaStream_t>(current_stream(device_));
  }

  cudaStream_t stream() const {
    return stream_;
  }

  // Returns a number that belongs to the stream alone, from 0 on. Returns the largest int if launches on the stream may
  // run beside each other: a captured graph may be replayed on any stream, and `cudaStreamPerThread` means several.
  int number_of_stream() const {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    check(cudaStreamIsCapturing(stream_, &status), "the current stream cannot be used");
    if (status != cudaStreamCaptureStatusNone || stream_ == cudaStreamPerThread) {
      return std::numeric_limits<int>::max();
    }
    static std::mutex mutex;
    static std::map<std::pair<int, cudaStream_t>, int> numbers;
    const std::lock_guard<std::mutex> lock(mutex);
    return numbers.try_emplace({device_, stream_}, static_cast<int>(numbers.size())).first->second;
  }

 private:
  static int32_t checked(const char* name, const torch::stable::Tensor& tensor) {
    STD_TORCH_CHECK(tensor.is_cuda(), name, ": expected all tensors on one GPU, and found one on the CPU");
    return tensor.get_device_index();
  }

  int32_t device_;
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_;
};

}  // namespace ampatch
