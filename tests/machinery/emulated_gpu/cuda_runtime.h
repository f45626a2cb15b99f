// As much of CUDA as csrc/cuda.cu uses, on the CPU: in place of NVIDIA's header of this name.
//
// A kernel's threads are coroutines, run in a random order between one barrier and the next, and so are its blocks. A
// barrier that not all threads of a block come to, and arguments that no launch could take, end the process.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <tuple>

#define __global__
#define __device__
#define __shared__ static
#define __launch_bounds__(threads)
#define CUDART_VERSION 13000

using cudaStream_t = void*;
using cudaError_t = int;
constexpr cudaError_t cudaSuccess = 0;

inline cudaError_t cudaGetLastError() {
  return cudaSuccess;
}

template <class Symbol>
cudaError_t cudaGetSymbolAddress(void** address, Symbol& symbol) {
  *address = &symbol;
  return cudaSuccess;
}

// One thread runs at a time.
template <class Value>
Value atomicAdd(Value* address, Value value) {
  const Value before = *address;
  *address += value;
  return before;
}

template <class Value>
Value __ldcg(const Value* address) {
  return *address;
}

inline void __threadfence() {
}

using std::min;

namespace emulated {

struct Index {
  unsigned x, y = 0;
};
extern Index thread, block;
extern long launches, argument_bytes;

int sync_or(int value);
double shuffle_down(double value, int distance);
void run(int64_t blocks, int threads, const std::function<void()>& kernel);

// What kernel<<<blocks, threads, 0, stream>>>(arguments...) does.
template <class Kernel>
auto launch(Kernel kernel, int64_t blocks, int threads, int, cudaStream_t) {
  return [=](const auto&... arguments) {
    if ((sizeof(arguments) + ... + 0) > 32764 || blocks <= 0 || threads > 1024) {
      std::abort();
    }
    ++launches;
    argument_bytes += (sizeof(arguments) + ... + 0);
    const auto copies = std::make_tuple(arguments...);
    run(blocks, threads, [&] { std::apply(kernel, copies); });
  };
}

}  // namespace emulated

#define threadIdx emulated::thread
#define blockIdx emulated::block
#define __syncthreads_or emulated::sync_or
#define __syncthreads() emulated::sync_or(0)
#define __shfl_down_sync(mask, value, distance) emulated::shuffle_down(value, distance)
