// The stream that torch is on. Must not need CUDA: the library is to load, for its CPU kernels, into a torch without
// it.

#pragma once

#include <dlfcn.h>

#include <cstdint>
#include <stdexcept>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

namespace ampatch {

// Of a GPU, by its index. The function that tells is in torch's library for CUDA, which torch loads for itself alone:
// its names are not there for others to be linked to, and it has to be asked for them.
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
