// The operators on NVIDIA GPUs. Each has one kernel, and one launch processes as many tensors as fit in its arguments.
// Norms and fingerprints have a second kernel, which adds up the sums of chunks.
//
// A launch gets the addresses of the tensors as its arguments. It needs no allocation and no copy for them, so it is
// safe during the capture of a CUDA graph. Each block processes one chunk of one tensor, 16 bytes at a time if the
// addresses are aligned. Launches go to the current stream of the tensors' device. Must never sync with the device.

#include <cuda_runtime.h>

#include <algorithm>
#include <optional>
#include <vector>

#include <torch/csrc/stable/library.h>

#include "lists.h"
#include "on_device.h"
#include "operations.h"

namespace ampatch {
namespace {

constexpr int kThreads = 256;
constexpr int kMostThreads = 1024;  // of a block
constexpr int kVector = 16;         // bytes
constexpr int kUnroll = 4;          // loads of a thread in flight at once

// The arguments of a launch are limited to 32,764 bytes since CUDA 12.1, and to 4,096 before.
#if CUDART_VERSION >= 12010
constexpr int kMost = 1024;
#else
constexpr int kMost = 128;
#endif

// The tensors of one launch.
struct Batch {
  void* narrow[kMost];
  float* wide[kMost];
  int64_t count[kMost];
  int32_t first_chunk[kMost];  // of each tensor, numbered within the launch
  int8_t type[kMost];
  int32_t tensors = 0;
  int32_t chunks = 0;
};
static_assert(sizeof(Batch) <= (kMost > 128 ? 32000 : 4000), "the rest is for a kernel's other arguments");

// Elements that one instruction loads or stores.
template <class Element, int kLength>
struct alignas(sizeof(Element) * kLength) Vector {
  Element elements[kLength];
};

// Number of separate sums that a thread keeps, so that each adds up only a few numbers in float32.
constexpr int kRunningSums = 8;

struct Sums {
  float of[kRunningSums] = {};
};

// Returns the distance, in bytes, from an address to the next one at which vectors may begin.
__device__ int to_border(const void* address) {
  return static_cast<int>(-reinterpret_cast<uintptr_t>(address) % kVector);
}

// A few adjacent narrow elements, and the wide ones that belong to them.
template <class Narrow, class Operation, int kLength>
struct Slice {
  static constexpr int kWideLength = kLength < kVector / 4 ? kLength : kVector / 4;
  static constexpr int kWides = kLength / kWideLength;
  Vector<Narrow, kLength> narrow;
  Vector<float, kWideLength> wide[kWides];

  __device__ void load(const Narrow* from, const float* from_wide) {
    if constexpr (Operation::kReadsNarrow) {
      narrow = *reinterpret_cast<const Vector<Narrow, kLength>*>(from);
    }
    if constexpr (Operation::kReadsWide) {
#pragma unroll
      for (int part = 0; part < kWides; ++part) {
        wide[part] = reinterpret_cast<const Vector<float, kWideLength>*>(from_wide)[part];
      }
    }
  }

  // Adds to the sums in rotation, starting at index `sum`.
  __device__ bool apply(const Operation& operation, Sums& sums, int sum) {
    bool finite = true;
#pragma unroll
    for (int index = 0; index < kLength; ++index) {
      float one = Operation::kReadsNarrow ? static_cast<float>(narrow.elements[index]) : 0;
      float& other = wide[index / kWideLength].elements[index % kWideLength];
      finite &= operation(one, other, sums.of[(sum + index) % kRunningSums]);
      if (operation.writes_narrow()) {
        narrow.elements[index] = static_cast<Narrow>(Operation::kShows ? shown<Narrow>(one) : one);
      }
    }
    return finite;
  }

  __device__ void store(const Operation& operation, Narrow* to, float* to_wide) const {
    if (operation.writes_narrow()) {
      *reinterpret_cast<Vector<Narrow, kLength>*>(to) = narrow;
    }
    if constexpr (Operation::kWritesWide) {
#pragma unroll
      for (int part = 0; part < kWides; ++part) {
        reinterpret_cast<Vector<float, kWideLength>*>(to_wide)[part] = wide[part];
      }
    }
  }
};

// Processes this thread's part of `slices` slices; slice `index` begins at `place(index)`. Returns true if all its
// elements were finite. Several loads are in flight before the first store. The compiler could not reorder them so by
// itself, as it must assume that a store changes what a later load reads.
template <int kLength, class Narrow, class Operation, class Place>
__device__ bool visit_slices(
    Narrow* narrow, float* wide, int slices, const Operation& operation, Sums& sums, const Place& place) {
  constexpr int kSteps = kLength == 1 ? 2 * kUnroll : kUnroll;
  bool finite = true;
  for (int first = threadIdx.x; first < slices; first += kThreads * kSteps) {
    Slice<Narrow, Operation, kLength> parts[kSteps];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int index = first + step * kThreads;
      if (index < slices) {
        parts[step].load(narrow + place(index), wide + place(index));
      }
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int index = first + step * kThreads;
      if (index < slices) {
        finite &= parts[step].apply(operation, sums, step);
        parts[step].store(operation, narrow + place(index), wide + place(index));
      }
    }
  }
  return finite;
}

// Processes one chunk of a tensor: its aligned middle part in vectors, the rest element by element. If the two tensors
// of a pair are not aligned at the same element, everything is processed element by element.
template <class Narrow, class Operation>
__device__ bool visit_chunk(Narrow* narrow, float* wide, int count, const Operation& operation, Sums& sums) {
  constexpr int kLength = kVector / sizeof(Narrow);
  const int head = min(count, to_border(narrow) / static_cast<int>(sizeof(Narrow)));
  const bool together = !Operation::kHasWide || to_border(wide + head) == 0;
  const int slices = together ? (count - head) / kLength : 0;
  const bool in_vectors =
      visit_slices<kLength>(narrow, wide, slices, operation, sums, [&](int index) { return head + index * kLength; });
  const bool by_element = visit_slices<1>(narrow, wide, count - slices * kLength, operation, sums, [&](int index) {
    return index < head ? index : index + slices * kLength;
  });
  return in_vectors && by_element;
}

// Returns the sum of the values of all threads of a block; only the first thread gets it.
template <int kSize>
__device__ double block_sum(double value) {
  __shared__ double sums[kSize / 32];
  for (int distance = 16; distance > 0; distance /= 2) {
    value += __shfl_down_sync(0xffffffff, value, distance);
  }
  if (threadIdx.x % 32 == 0) {
    sums[threadIdx.x / 32] = value;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int warp = 1; warp < kSize / 32; ++warp) {
      value += sums[warp];
    }
  }
  return value;
}

// The chunk that a block processes.
struct Place {
  int tensor;     // index in the batch
  int64_t start;  // first element, in the tensor
  int count;      // number of elements
};

__device__ Place place_of_block(const Batch& batch) {
  const int32_t chunk = blockIdx.x;
  int low = 0, high = batch.tensors;  // binary search for the last tensor that begins at this chunk or before
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (batch.first_chunk[middle] <= chunk ? low : high) = middle;
  }
  const int64_t start = (chunk - batch.first_chunk[low]) * kChunk;
  return {low, start, static_cast<int>(min(kChunk, batch.count[low] - start))};
}

// Processes the chunk of this block.
template <class Operation>
__device__ void visit(const Batch& batch, const Operation& operation, float* found_inf, double* chunk_sums) {
  const Place place = place_of_block(batch);
  Sums sums;
  bool finite = true;
  with_type(static_cast<ScalarType>(batch.type[place.tensor]), [&](auto* type) {
    auto* narrow = static_cast<decltype(type)>(batch.narrow[place.tensor]) + place.start;
    float* wide = Operation::kHasWide ? batch.wide[place.tensor] + place.start : nullptr;
    finite = visit_chunk(narrow, wide, place.count, operation, sums);
  });
  if (__syncthreads_or(!finite) && threadIdx.x == 0) {
    *found_inf = 1;
  }
  if constexpr (Operation::kSums) {
    double sum = 0;
#pragma unroll
    for (int index = 0; index < kRunningSums; ++index) {
      sum += sums.of[index];
    }
    sum = block_sum<kThreads>(sum);
    if (threadIdx.x == 0) {
      chunk_sums[blockIdx.x] = sum;
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    unscale_kernel(const __grid_constant__ Batch batch, const float* inv_scale, float* found_inf) {
  visit(batch, Unscale{*inv_scale}, found_inf, nullptr);
}

__global__ void __launch_bounds__(kThreads) unscale_copy_kernel(const __grid_constant__ Batch batch,
                                                                const float* inv_scale,
                                                                float* found_inf,
                                                                bool write_back) {
  visit(batch, UnscaleCopy{*inv_scale, write_back}, found_inf, nullptr);
}

__global__ void __launch_bounds__(kThreads)
    unscale_add_kernel(const __grid_constant__ Batch batch, const float* inv_scale, float* found_inf, bool write_back) {
  visit(batch, UnscaleAdd{*inv_scale, write_back}, found_inf, nullptr);
}

__global__ void __launch_bounds__(kThreads) found_inf_norm_kernel(const __grid_constant__ Batch batch,
                                                                  const float* inv_scale,
                                                                  float* found_inf,
                                                                  double* chunk_sums) {
  visit(batch, FoundInfNorm{*inv_scale}, found_inf, chunk_sums);
}

// One block adds up the sums of the chunks, always in the same order, so that a norm has the same bits every time.
__global__ void __launch_bounds__(kMostThreads)
    found_inf_norm_sum_kernel(const double* chunk_sums, int64_t chunks, double* sum_of_squares) {
  double sum = 0;
  for (int64_t chunk = threadIdx.x; chunk < chunks; chunk += kMostThreads) {
    sum += chunk_sums[chunk];
  }
  sum = block_sum<kMostThreads>(sum);
  if (threadIdx.x == 0) {
    *sum_of_squares += sum;
  }
}

template <bool kOfGradients>
__global__ void __launch_bounds__(kThreads) copy_to_half_kernel(const __grid_constant__ Batch batch) {
  visit(batch, CopyToHalf<kOfGradients>{}, nullptr, nullptr);
}

// The sums of a block's threads add up to less than 2**40, which float64 holds exactly.
__global__ void __launch_bounds__(kThreads)
    fingerprint_kernel(const __grid_constant__ Batch batch, double* chunk_sums) {
  const Place place = place_of_block(batch);
  uint32_t sum = 0;
  with_type(static_cast<ScalarType>(batch.type[place.tensor]), [&](auto* type) {
    using Bits = std::conditional_t<sizeof(*type) == 2, uint16_t, uint32_t>;
    const Bits* bits = static_cast<const Bits*>(batch.narrow[place.tensor]) + place.start;
    for (int index = threadIdx.x; index < place.count; index += kThreads) {
      sum += hashed(bits[index], static_cast<uint32_t>(place.start + index));
    }
  });
  const double total = block_sum<kThreads>(sum);
  if (threadIdx.x == 0) {
    chunk_sums[blockIdx.x] = total;
  }
}

// One block per tensor adds up the sums of its chunks.
__global__ void __launch_bounds__(kThreads)
    fingerprint_sum_kernel(const __grid_constant__ Batch batch, const double* chunk_sums, double* fingerprints) {
  const int tensor = blockIdx.x;
  const int end = tensor + 1 < batch.tensors ? batch.first_chunk[tensor + 1] : batch.chunks;
  uint32_t sum = 0;
  for (int chunk = batch.first_chunk[tensor] + threadIdx.x; chunk < end; chunk += kThreads) {
    sum += static_cast<uint32_t>(static_cast<int64_t>(chunk_sums[chunk]));
  }
  const double total = block_sum<kThreads>(sum);
  if (threadIdx.x == 0) {
    fingerprints[tensor] = static_cast<double>(static_cast<uint32_t>(static_cast<int64_t>(total)));
  }
}

// Most blocks return at once: user code rarely edits tensors.
__global__ void __launch_bounds__(kThreads)
    follow_kernel(const __grid_constant__ Batch batch, const double* before, const double* now, bool of_gradients) {
  const Place place = place_of_block(batch);
  if (before[place.tensor] == now[place.tensor]) {
    return;
  }
  with_type(static_cast<ScalarType>(batch.type[place.tensor]), [&](auto* type) {
    const auto* narrow = static_cast<decltype(type)>(batch.narrow[place.tensor]) + place.start;
    float* wide = batch.wide[place.tensor] + place.start;
    for (int index = threadIdx.x; index < place.count; index += kThreads) {
      copy_edit(narrow[index], wide[index], of_gradients);
    }
  });
}

__global__ void update_scale_kernel(
    float* scale, int32_t* unskipped, int32_t* hysteresis_left, const float* found_inf, UpdateScale update) {
  update(*scale, *unskipped, *hysteresis_left, *found_inf);
}

// Returns the total number of chunks, each of which takes one block.
int64_t chunks_of(const std::vector<Piece>& pieces) {
  int64_t chunks = 0;
  for (const Piece& piece : pieces) {
    chunks += piece.chunks();
  }
  return chunks;
}

// Splits the pieces into as few batches as possible, and calls `launch(batch, first_chunk)` for each.
template <class Launch>
void in_batches(const std::vector<Piece>& pieces, const Launch& launch) {
  Batch batch;
  int64_t first_chunk = 0;
  const auto flush = [&] {
    if (batch.chunks != 0) {
      launch(batch, first_chunk);
      check(cudaGetLastError(), "a kernel could not be launched");
      first_chunk += batch.chunks;
      batch.tensors = batch.chunks = 0;
    }
  };
  for (const Piece& piece : pieces) {
    if (batch.tensors == kMost || batch.chunks + piece.chunks() > INT32_MAX) {
      flush();
    }
    const int index = batch.tensors++;
    batch.narrow[index] = piece.narrow;
    batch.wide[index] = piece.wide;
    batch.count[index] = piece.count;
    batch.first_chunk[index] = batch.chunks;
    batch.type[index] = static_cast<int8_t>(piece.type);
    batch.chunks += static_cast<int32_t>(piece.chunks());
  }
  flush();
}

void unscale_(std::vector<Tensor> grads, Tensor inv_scale, Tensor found_inf, std::optional<Tensor> more) {
  const char* name = "ampatch::unscale_";
  const OnDevice device(name, inv_scale);
  Lists lists(name, inv_scale, grads, true, more);
  const float* factor = scalar<float>(name, "inv_scale", inv_scale, inv_scale);
  float* flag = scalar<float>(name, "found_inf", found_inf, inv_scale);
  in_batches(lists.pieces(), [&](const Batch& batch, int64_t) {
    unscale_kernel<<<batch.chunks, kThreads, 0, device.stream()>>>(batch, factor, flag);
  });
  lists.finish();
}

template <class Kernel>
void unscale_into(const char* name,
                  Kernel kernel,
                  const std::vector<Tensor>& grads,
                  const std::vector<Tensor>& master_grads,
                  const Tensor& inv_scale,
                  const Tensor& found_inf,
                  bool write_back,
                  const std::optional<Tensor>& more) {
  const OnDevice device(name, inv_scale);
  Lists lists(name, inv_scale, grads, write_back, master_grads, true, more);
  const float* factor = scalar<float>(name, "inv_scale", inv_scale, inv_scale);
  float* flag = scalar<float>(name, "found_inf", found_inf, inv_scale);
  in_batches(lists.pieces(), [&](const Batch& batch, int64_t) {
    kernel<<<batch.chunks, kThreads, 0, device.stream()>>>(batch, factor, flag, write_back);
  });
  lists.finish();
}

void unscale_copy(std::vector<Tensor> grads,
                  std::vector<Tensor> master_grads,
                  Tensor inv_scale,
                  Tensor found_inf,
                  bool write_back,
                  std::optional<Tensor> more) {
  unscale_into(
      "ampatch::unscale_copy", unscale_copy_kernel, grads, master_grads, inv_scale, found_inf, write_back, more);
}

void unscale_add(std::vector<Tensor> grads,
                 std::vector<Tensor> master_grads,
                 Tensor inv_scale,
                 Tensor found_inf,
                 bool write_back,
                 std::optional<Tensor> more) {
  unscale_into("ampatch::unscale_add", unscale_add_kernel, grads, master_grads, inv_scale, found_inf, write_back, more);
}

void found_inf_norm(
    std::vector<Tensor> grads, Tensor inv_scale, Tensor found_inf, Tensor sum_of_squares, std::optional<Tensor> more) {
  const char* name = "ampatch::found_inf_norm";
  const OnDevice device(name, inv_scale);
  Lists lists(name, inv_scale, grads, false, more);
  const float* factor = scalar<float>(name, "inv_scale", inv_scale, inv_scale);
  float* flag = scalar<float>(name, "found_inf", found_inf, inv_scale);
  double* total = scalar<double>(name, "sum_of_squares", sum_of_squares, inv_scale);
  const int64_t chunks = chunks_of(lists.pieces());
  if (chunks == 0) {
    return;
  }
  const Tensor sums = torch::stable::new_empty(sum_of_squares, {chunks});
  double* chunk_sums = static_cast<double*>(sums.data_ptr());
  in_batches(lists.pieces(), [&](const Batch& batch, int64_t first_chunk) {
    found_inf_norm_kernel<<<batch.chunks, kThreads, 0, device.stream()>>>(
        batch, factor, flag, chunk_sums + first_chunk);
  });
  found_inf_norm_sum_kernel<<<1, kMostThreads, 0, device.stream()>>>(chunk_sums, chunks, total);
  check(cudaGetLastError(), "a kernel could not be launched");
}

template <class Kernel>
void copy(const char* name,
          Kernel kernel,
          const std::vector<Tensor>& masters,
          const std::vector<Tensor>& halves,
          const std::optional<Tensor>& more) {
  if (masters.empty() && halves.empty()) {
    return;
  }
  const Tensor& beside = masters.empty() ? halves.front() : masters.front();
  const OnDevice device(name, beside);
  Lists lists(name, beside, halves, true, masters, false, more);
  in_batches(lists.pieces(),
             [&](const Batch& batch, int64_t) { kernel<<<batch.chunks, kThreads, 0, device.stream()>>>(batch); });
  lists.finish();
}

void copy_to_half(std::vector<Tensor> masters, std::vector<Tensor> halves, std::optional<Tensor> more) {
  copy("ampatch::copy_to_half", copy_to_half_kernel<false>, masters, halves, more);
}

void copy_to_half_grads(std::vector<Tensor> master_grads, std::vector<Tensor> grads, std::optional<Tensor> more) {
  copy("ampatch::copy_to_half_grads", copy_to_half_kernel<true>, master_grads, grads, more);
}

void fingerprint(std::vector<Tensor> grads, Tensor fingerprints, std::optional<Tensor> more) {
  const char* name = "ampatch::fingerprint";
  const OnDevice device(name, fingerprints);
  Lists lists(name, fingerprints, grads, false, more);
  double* found = one_for_each(name, "fingerprints", fingerprints, fingerprints, lists.pieces());
  const int64_t chunks = chunks_of(lists.pieces());
  if (chunks == 0) {
    return;
  }
  const Tensor sums = torch::stable::new_empty(fingerprints, {chunks});
  double* chunk_sums = static_cast<double*>(sums.data_ptr());
  in_batches(lists.pieces(), [&](const Batch& batch, int64_t first_chunk) {
    fingerprint_kernel<<<batch.chunks, kThreads, 0, device.stream()>>>(batch, chunk_sums + first_chunk);
    fingerprint_sum_kernel<<<batch.tensors, kThreads, 0, device.stream()>>>(batch, chunk_sums + first_chunk, found);
    found += batch.tensors;
  });
}

void copy_edits(std::vector<Tensor> halves,
                std::vector<Tensor> masters,
                Tensor before,
                Tensor now,
                bool of_gradients,
                std::optional<Tensor> more) {
  const char* name = "ampatch::copy_edits";
  const OnDevice device(name, before);
  Lists lists(name, before, halves, false, masters, true, more);
  const double* then = one_for_each(name, "before", before, before, lists.pieces());
  const double* found = one_for_each(name, "now", now, before, lists.pieces());
  in_batches(lists.pieces(), [&](const Batch& batch, int64_t) {
    follow_kernel<<<batch.chunks, kThreads, 0, device.stream()>>>(batch, then, found, of_gradients);
    then += batch.tensors;
    found += batch.tensors;
  });
  lists.finish();
}

void update_scale(Tensor scale,
                  Tensor unskipped,
                  Tensor hysteresis_left,
                  Tensor found_inf,
                  double growth,
                  double backoff,
                  int64_t window,
                  int64_t hysteresis,
                  double floor,
                  double ceiling) {
  const char* name = "ampatch::update_scale";
  const OnDevice device(name, scale);
  const UpdateScale update(growth, backoff, window, hysteresis, floor, ceiling);
  update_scale_kernel<<<1, 1, 0, device.stream()>>>(scalar<float>(name, "scale", scale, scale),
                                                    scalar<int32_t>(name, "unskipped", unskipped, scale),
                                                    scalar<int32_t>(name, "hysteresis_left", hysteresis_left, scale),
                                                    scalar<float>(name, "found_inf", found_inf, scale),
                                                    update);
  check(cudaGetLastError(), "a kernel could not be launched");
}

}  // namespace
}  // namespace ampatch

STABLE_TORCH_LIBRARY_IMPL(ampatch, CUDA, m) {
  m.impl("unscale_", TORCH_BOX(&ampatch::unscale_));
  m.impl("unscale_copy", TORCH_BOX(&ampatch::unscale_copy));
  m.impl("unscale_add", TORCH_BOX(&ampatch::unscale_add));
  m.impl("found_inf_norm", TORCH_BOX(&ampatch::found_inf_norm));
  m.impl("copy_to_half", TORCH_BOX(&ampatch::copy_to_half));
  m.impl("copy_to_half_grads", TORCH_BOX(&ampatch::copy_to_half_grads));
  m.impl("fingerprint", TORCH_BOX(&ampatch::fingerprint));
  m.impl("copy_edits", TORCH_BOX(&ampatch::copy_edits));
  m.impl("update_scale", TORCH_BOX(&ampatch::update_scale));
}
