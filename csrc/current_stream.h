// Torch's current CUDA stream. Must not need CUDA: a torch without CUDA must be able to load the library for its CPU
// kernels.

#pragma once

#include <dlfcn.h>

#include <cstdint>
#include <stdexcept>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

namespace ampatch {

// Returns the current stream of a GPU, by its index. torch loads its CUDA library without making the symbols global, so
// this library cannot link to the function and looks it up with dlsym.
inline void* current_stream(int32_t device) {
  using Function = AOTITorchError (*)(int32_t, void**);
  static const Function function = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD);
    return reinterpret_cast<Function>(
        dlsym(library == nullptr ? RTLD_DEFAULT : library, "aoti_torch_get_current_cuda_stream"));
  }();
  void* stream = nullptr;
  if (function == nullptr || function(device, &stream) != AOTI_TORCH_SUCCESS) {
    throw std::runtime_error("ampatch: this torch does not tell its current CUDA stream");
  }
  return stream;
}

}  // namespace ampatch
