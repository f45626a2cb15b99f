// The operators on NVIDIA GPUs. Each has one kernel, and one launch processes as many tensors as fit in its arguments.
// Each kernel is compiled for few tensors and for many. In norms and fingerprints the last block to finish completes
// the sum over chunks.
//
// A launch gets the addresses of the tensors as its arguments. It needs no allocation and no copy for them, so it is
// safe during the capture of a CUDA graph. Each block processes one chunk of one tensor, 16 bytes at a time if the
// addresses are aligned. Launches go to the current stream of the tensors' device. Must never sync with the device.

#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <type_traits>
#include <vector>

#include <torch/csrc/stable/library.h>

#include "lists.h"
#include "on_device.h"
#include "operations.h"

namespace ampatch {
namespace {

constexpr int kThreads = 256;
constexpr int kVector = 16;  // bytes
constexpr int kUnroll = 4;   // loads of a thread in flight at once

// The arguments of a launch are limited to 32,764 bytes since CUDA 12.1, and to 4,096 before.
#if CUDART_VERSION >= 12010
constexpr int kMost = 1024;
#else
constexpr int kMost = 128;
#endif

// The host copies all arguments of a launch, however few tensors there are: 29.7 KB for `kMost`, 1.9 KB for `kFew`.
constexpr int kFew = 64;

// The tensors of one launch.
template <int kCapacity>
struct Batch {
  void* narrow[kCapacity];
  float* wide[kCapacity];
  int64_t count[kCapacity];
  int32_t first_chunk[kCapacity];  // of each tensor, numbered within the launch
  int8_t type[kCapacity];
  int32_t tensors = 0;
  int32_t chunks = 0;

  Batch(const Piece* begin, const Piece* end) {
    for (const Piece* piece = begin; piece != end; ++piece) {
      const int index = tensors++;
      narrow[index] = piece->narrow;
      wide[index] = piece->wide;
      count[index] = piece->count;
      first_chunk[index] = chunks;
      type[index] = static_cast<int8_t>(piece->type);
      chunks += static_cast<int32_t>(piece->chunks());
    }
  }
};
static_assert(sizeof(Batch<kMost>) <= (kMost > 128 ? 32000 : 4000), "the rest is for a kernel's other arguments");

// Numbers by which blocks find out which of them is the last: 0 before and after each launch, as the last block sets
// them back. A row for each stream, because only launches on one stream run one after the other.
using Counter = unsigned long long;
constexpr int kStreams = 64;
__device__ Counter counters[kStreams * kMost];

// Returns the distance, in bytes, from an address to the next multiple of `bytes`.
__device__ int to_border(const void* address, int bytes) {
  return static_cast<int>(-reinterpret_cast<uintptr_t>(address) % bytes);
}

// Number of separate sums that a thread keeps, so that each adds up only a few numbers in float32.
constexpr int kRunningSums = 8;

struct Sums {
  float of[kRunningSums] = {};
};

// Adjacent elements that one instruction loads or stores. They are words until the arithmetic needs them: unpacked half
// elements take a register each, and two of them fit in a word.
template <class Element, int kLength>
constexpr size_t kAlignment = kLength == 1 ? alignof(Element) : sizeof(Element) * kLength;

template <class Element, int kLength>
struct alignas(kAlignment<Element, kLength>) Vector {
  using Word = std::conditional_t<kAlignment<Element, kLength> % sizeof(uint32_t) == 0, uint32_t, uint16_t>;
  Word words[sizeof(Element) * kLength / sizeof(Word)];

  __device__ void load(const Element* from) {
    *this = *reinterpret_cast<const Vector*>(from);
  }

  __device__ void unpack(Element (&to)[kLength]) const {
    std::memcpy(to, words, sizeof(words));
  }

  __device__ static void store(const Element (&from)[kLength], Element* to) {
    Vector packed;
    std::memcpy(packed.words, from, sizeof(packed.words));
    *reinterpret_cast<Vector*>(to) = packed;
  }
};

// A few adjacent narrow elements, and the wide ones that belong to them. `Reads` says which of them are loaded.
template <class Reads, class Narrow, int kLength, class Wide = float>
struct Slice {
  Vector<Narrow, kLength> narrow;
  Vector<Wide, kLength> wide;

  __device__ void load(const Narrow* from, const Wide* from_wide) {
    if constexpr (Reads::kReadsNarrow) {
      narrow.load(from);
    }
    if constexpr (Reads::kReadsWide) {
      wide.load(from_wide);
    }
  }

  // Sets what was loaded.
  __device__ void unpack(Narrow (&narrows)[kLength], Wide (&wides)[kLength]) const {
    if constexpr (Reads::kReadsNarrow) {
      narrow.unpack(narrows);
    }
    if constexpr (Reads::kReadsWide) {
      wide.unpack(wides);
    }
  }
};

// Applies an operation to a slice, and stores what it writes. Adds to the sums in rotation, starting at index `sum`.
// Returns true if all elements were finite.
template <class Operation, class Narrow, int kLength>
__device__ bool apply(const Operation& operation,
                      const Slice<Operation, Narrow, kLength>& slice,
                      Narrow* to,
                      float* to_wide,
                      Sums& sums,
                      int sum) {
  Narrow narrows[kLength];
  float wides[kLength], results[kLength];
  slice.unpack(narrows, wides);
  bool finite = true;
#pragma unroll
  for (int index = 0; index < kLength; ++index) {
    results[index] = Operation::kReadsNarrow ? static_cast<float>(narrows[index]) : 0;
    finite &= operation(results[index], wides[index], sums.of[(sum + index) % kRunningSums]);
  }
  if (operation.writes_narrow()) {
#pragma unroll
    for (int index = 0; index < kLength; ++index) {
      narrows[index] = static_cast<Narrow>(Operation::kShows ? shown<Narrow>(results[index]) : results[index]);
    }
    Vector<Narrow, kLength>::store(narrows, to);
  }
  if constexpr (Operation::kWritesWide) {
    Vector<float, kLength>::store(wides, to_wide);
  }
  return finite;
}

// Processes this thread's part of `slices` slices; slice `index` begins at element `place(index)`. Calls
// `work(slice, element, step)` for each. Several loads are in flight before the first store. The compiler could not
// reorder them so by itself, as it must assume that a store changes what a later load reads.
template <class Reads, int kLength, class Narrow, class Wide, class Place, class Work>
__device__ void visit_slices(const Narrow* narrow, const Wide* wide, int slices, const Place& place, const Work& work) {
  constexpr int kSteps = kLength == 1 ? 2 * kUnroll : kUnroll;
  for (int first = threadIdx.x; first < slices; first += kThreads * kSteps) {
    Slice<Reads, Narrow, kLength, Wide> parts[kSteps];
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
        work(parts[step], place(index), step);
      }
    }
  }
}

// Processes one chunk of a tensor: its aligned middle part in vectors, the rest element by element. A vector has 16
// bytes of the tensor with the larger elements, so that neighbouring threads access neighbouring memory in both tensors
// of a pair. If the two are not aligned at the same element, everything is processed element by element. So it is if
// `third` is not aligned there, the elements of another tensor that `work` writes. One of the three is of float32.
template <class Reads, class Narrow, class Wide, class Work, class Third = Narrow>
__device__ void visit_chunk(
    const Narrow* narrow, const Wide* wide, int count, const Work& work, const Third* third = nullptr) {
  constexpr int kLength = kVector / (Reads::kHasWide ? sizeof(float) : sizeof(Narrow));
  const auto to_vector = [](const auto* elements) { return to_border(elements, kLength * sizeof(*elements)); };
  const int to_head = Reads::kHasWide ? to_vector(wide) : to_vector(narrow);
  const int head = min(count, to_head / static_cast<int>(Reads::kHasWide ? sizeof(Wide) : sizeof(Narrow)));
  const bool together = to_vector(narrow + head) == 0 && (third == nullptr || to_vector(third + head) == 0);
  const int slices = together ? (count - head) / kLength : 0;
  visit_slices<Reads, kLength>(narrow, wide, slices, [&](int index) { return head + index * kLength; }, work);
  const auto rest = [&](int index) { return index < head ? index : index + slices * kLength; };
  visit_slices<Reads, 1>(narrow, wide, count - slices * kLength, rest, work);
}

// Returns the sum of the values of all threads of a block; only the first thread gets it. Adds first values before
// second ones, and so on, as if other threads had these.
template <int kValues>
__device__ double block_sum(double (&values)[kValues]) {
  constexpr int kWarps = kThreads / 32;
  __shared__ double sums[kValues * kWarps];
#pragma unroll
  for (int index = 0; index < kValues; ++index) {
    for (int distance = 16; distance > 0; distance /= 2) {
      values[index] += __shfl_down_sync(0xffffffff, values[index], distance);
    }
    if (threadIdx.x % 32 == 0) {
      sums[index * kWarps + threadIdx.x / 32] = values[index];
    }
  }
  __syncthreads();
  double sum = sums[0];
  if (threadIdx.x == 0) {
    for (int warp = 1; warp < kValues * kWarps; ++warp) {
      sum += sums[warp];
    }
  }
  return sum;
}

// The chunk that a block processes.
struct Place {
  int tensor;     // index in the batch
  int64_t start;  // first element, in the tensor
  int count;      // number of elements
};

template <int kCapacity>
__device__ Place place_of_block(const Batch<kCapacity>& batch) {
  const int32_t chunk = blockIdx.x;
  int low = 0, high = batch.tensors;  // binary search for the last tensor that begins at this chunk or before
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (batch.first_chunk[middle] <= chunk ? low : high) = middle;
  }
  const int64_t start = (chunk - batch.first_chunk[low]) * kChunk;
  return {low, start, static_cast<int>(min(kChunk, batch.count[low] - start))};
}

// Processes the chunk of this block. Returns the sums of this thread.
template <class Operation, int kCapacity>
__device__ Sums visit(const Batch<kCapacity>& batch, const Operation& operation, float* found_inf) {
  const Place place = place_of_block(batch);
  Sums sums;
  bool finite = true;
  with_type(static_cast<ScalarType>(batch.type[place.tensor]), [&](auto* type) {
    auto* narrow = static_cast<decltype(type)>(batch.narrow[place.tensor]) + place.start;
    float* wide = Operation::kHasWide ? batch.wide[place.tensor] + place.start : nullptr;
    visit_chunk<Operation>(narrow, wide, place.count, [&](const auto& slice, int element, int step) {
      finite &= apply(operation, slice, narrow + element, wide + element, sums, step);
    });
  });
  if (__syncthreads_or(!finite) && threadIdx.x == 0) {
    *found_inf = 1;
  }
  return sums;
}

// Loads a factor without waiting for it. `threadIdx.y` is 0, but the compiler does not know that. If it knows that all
// threads load the same number, it moves it to a uniform register, and a block waits for it before it loads elements.
__device__ float loaded(const float* factor) {
  return factor[threadIdx.y];
}

template <int kCapacity>
__global__ void __launch_bounds__(kThreads)
    unscale_kernel(const __grid_constant__ Batch<kCapacity> batch, const float* inv_scale, float* found_inf) {
  visit(batch, Unscale{loaded(inv_scale)}, found_inf);
}

template <int kCapacity>
__global__ void __launch_bounds__(kThreads) unscale_copy_kernel(const __grid_constant__ Batch<kCapacity> batch,
                                                                const float* inv_scale,
                                                                float* found_inf,
                                                                bool write_back) {
  visit(batch, UnscaleCopy{loaded(inv_scale), write_back}, found_inf);
}

template <int kCapacity>
__global__ void __launch_bounds__(kThreads) unscale_add_kernel(const __grid_constant__ Batch<kCapacity> batch,
                                                               const float* inv_scale,
                                                               float* found_inf,
                                                               bool write_back) {
  visit(batch, UnscaleAdd{loaded(inv_scale), write_back}, found_inf);
}

// Where the norm of all launches of a call is added up.
struct Norm {
  double* chunk_sums;
  int64_t first_chunk;  // of this launch
  int64_t chunks;       // of all launches
  Counter* finished;    // chunks of the last launch; null for the others
  double* sum_of_squares;
};

// The last block of the last launch adds up the sums of all chunks, always in the same order, so that a norm has the
// same bits every time.
template <int kCapacity>
__global__ void __launch_bounds__(kThreads) found_inf_norm_kernel(const __grid_constant__ Batch<kCapacity> batch,
                                                                  const float* inv_scale,
                                                                  float* found_inf,
                                                                  const Norm norm) {
  const Sums sums = visit(batch, FoundInfNorm{loaded(inv_scale)}, found_inf);
  double of_thread[1] = {};
#pragma unroll
  for (int index = 0; index < kRunningSums; ++index) {
    of_thread[0] += sums.of[index];
  }
  const double of_chunk = block_sum(of_thread);
  __shared__ bool is_last;
  if (threadIdx.x == 0) {
    norm.chunk_sums[norm.first_chunk + blockIdx.x] = of_chunk;
    __threadfence();  // a block that sees this one counted must see its sum
    is_last = norm.finished != nullptr && atomicAdd(norm.finished, Counter{1}) + 1 == batch.chunks;
    if (is_last) {
      __threadfence();
    }
  }
  __syncthreads();
  if (is_last) {
    double of_chunks[4] = {};
#pragma unroll 2
    for (int64_t first = threadIdx.x; first < norm.chunks; first += 4 * kThreads) {
#pragma unroll
      for (int index = 0; index < 4; ++index) {
        const int64_t chunk = first + index * kThreads;
        of_chunks[index] += chunk < norm.chunks ? __ldcg(norm.chunk_sums + chunk) : 0;  // not from a stale cache
      }
    }
    const double sum = block_sum(of_chunks);
    if (threadIdx.x == 0) {
      *norm.sum_of_squares += sum;
      *norm.finished = 0;
    }
  }
}

template <bool kOfGradients, int kCapacity>
__global__ void __launch_bounds__(kThreads) copy_to_half_kernel(const __grid_constant__ Batch<kCapacity> batch) {
  visit(batch, CopyToHalf<kOfGradients>{}, nullptr);
}

// What a kernel loads that applies no operation.
struct ReadsNarrow {
  static constexpr bool kReadsNarrow = true, kHasWide = false, kReadsWide = false;
};
struct ReadsPairs {
  static constexpr bool kReadsNarrow = true, kHasWide = true, kReadsWide = true;
};

// Two half elements, which may begin at any even address, or a float32 one.
struct Bits {
  uint16_t low, high;
};

// Returns the sum of the hashes of a slice whose first word has an index in its tensor.
template <int kLength>
__device__ uint32_t sum_of_hashes(const Slice<ReadsNarrow, Bits, kLength>& slice, uint32_t first) {
  uint32_t bits[kLength];
  std::memcpy(bits, slice.narrow.words, sizeof(bits));
  uint32_t sum = 0;
#pragma unroll
  for (int index = 0; index < kLength; ++index) {
    sum += hashed(bits[index], first + index);
  }
  return sum;
}

// The sums of a block's threads add up to less than 2**40, which float64 holds exactly. The sums of chunks are added up
// modulo 2**32 in the upper half of a number whose lower half counts the chunks.
template <int kCapacity>
__global__ void __launch_bounds__(kThreads)
    fingerprint_kernel(const __grid_constant__ Batch<kCapacity> batch, Counter* sums, double* fingerprints) {
  const Place place = place_of_block(batch);
  const int is_half = batch.type[place.tensor] != static_cast<int8_t>(ScalarType::Float);
  const auto first = static_cast<uint32_t>(place.start >> is_half);
  const auto* words = static_cast<const Bits*>(batch.narrow[place.tensor]) + (place.start >> is_half);
  const int count = place.count >> is_half;
  uint32_t sum = 0;
  visit_chunk<ReadsNarrow>(words, batch.wide[0], count, [&](const auto& slice, int word, int) {
    sum += sum_of_hashes(slice, first + word);
  });
  if (threadIdx.x == 0 && count << is_half != place.count) {
    sum += hashed(words[count].low, first + count);
  }
  double of_thread[1] = {static_cast<double>(sum)};
  const double of_chunk = block_sum(of_thread);
  if (threadIdx.x == 0) {
    const Counter counted = (static_cast<Counter>(of_chunk) << 32) + 1;
    const Counter all = atomicAdd(sums + place.tensor, counted) + counted;
    if (static_cast<uint32_t>(all) == (batch.count[place.tensor] + kChunk - 1) / kChunk) {
      fingerprints[place.tensor] = static_cast<double>(all >> 32);
      sums[place.tensor] = 0;
    }
  }
}

// Stores the masters of a slice, with the user's edits.
template <class Narrow, int kLength>
__device__ void store_edits(const Slice<ReadsPairs, Narrow, kLength>& slice, float* masters, bool of_gradients) {
  Narrow narrows[kLength];
  float wides[kLength];
  slice.unpack(narrows, wides);
#pragma unroll
  for (int index = 0; index < kLength; ++index) {
    copy_edit(narrows[index], wides[index], of_gradients);
  }
  Vector<float, kLength>::store(wides, masters);
}

// Most blocks return at once: user code rarely edits tensors.
template <int kCapacity>
__global__ void __launch_bounds__(kThreads) follow_kernel(const __grid_constant__ Batch<kCapacity> batch,
                                                          const double* before,
                                                          const double* now,
                                                          bool of_gradients) {
  const Place place = place_of_block(batch);
  if (before[place.tensor] == now[place.tensor]) {
    return;
  }
  with_type(static_cast<ScalarType>(batch.type[place.tensor]), [&](auto* type) {
    const auto* narrow = static_cast<decltype(type)>(batch.narrow[place.tensor]) + place.start;
    float* wide = batch.wide[place.tensor] + place.start;
    visit_chunk<ReadsPairs>(narrow, wide, place.count, [&](const auto& slice, int element, int) {
      store_edits(slice, wide + element, of_gradients);
    });
  });
}

// What split and round_stochastically load, whose narrow elements are written only.
struct ReadsWide {
  static constexpr bool kReadsNarrow = false, kHasWide = true, kReadsWide = true;
};

template <int kLength>
__device__ void store_joined(const Slice<ReadsPairs, uint16_t, kLength, uint16_t>& slice, uint32_t* fulls) {
  uint16_t halves[kLength], remainders[kLength];
  uint32_t joined[kLength];
  slice.unpack(halves, remainders);
#pragma unroll
  for (int index = 0; index < kLength; ++index) {
    joined[index] = join_bits<uint32_t>(halves[index], remainders[index]);
  }
  Vector<uint32_t, kLength>::store(joined, fulls);
}

template <int kCapacity>
__global__ void __launch_bounds__(kThreads) join_kernel(const __grid_constant__ Batch<kCapacity> batch) {
  const Place place = place_of_block(batch);
  const auto* halves = static_cast<const uint16_t*>(batch.narrow[place.tensor]) + place.start;
  const auto* remainders = static_cast<const uint16_t*>(batch.narrow[place.tensor - 1]) + place.start;
  auto* fulls = reinterpret_cast<uint32_t*>(batch.wide[place.tensor]) + place.start;
  const auto work = [&](const auto& slice, int element, int) { store_joined(slice, fulls + element); };
  visit_chunk<ReadsPairs>(halves, remainders, place.count, work, fulls);
}

template <int kLength>
__device__ void store_split(const Slice<ReadsWide, uint16_t, kLength, uint32_t>& slice,
                            uint16_t* halves,
                            uint16_t* remainders) {
  uint32_t fulls[kLength], half, remainder;
  uint16_t split_halves[kLength], rest[kLength];
  slice.wide.unpack(fulls);
#pragma unroll
  for (int index = 0; index < kLength; ++index) {
    split_bits(fulls[index], half, remainder);
    split_halves[index] = static_cast<uint16_t>(half);
    rest[index] = static_cast<uint16_t>(remainder);
  }
  Vector<uint16_t, kLength>::store(split_halves, halves);
  Vector<uint16_t, kLength>::store(rest, remainders);
}

template <int kCapacity>
__global__ void __launch_bounds__(kThreads) split_kernel(const __grid_constant__ Batch<kCapacity> batch) {
  const Place place = place_of_block(batch);
  auto* halves = static_cast<uint16_t*>(batch.narrow[place.tensor]) + place.start;
  auto* remainders = static_cast<uint16_t*>(batch.narrow[place.tensor - 1]) + place.start;
  const auto* fulls = reinterpret_cast<const uint32_t*>(batch.wide[place.tensor]) + place.start;
  const auto work = [&](const auto& slice, int element, int) {
    store_split(slice, halves + element, remainders + element);
  };
  visit_chunk<ReadsWide>(halves, fulls, place.count, work, remainders);
}

// Stores the halves of a slice whose first element has an index in its tensor.
template <int kLength>
__device__ void store_rounded(const Slice<ReadsWide, uint16_t, kLength, uint32_t>& slice,
                              uint32_t first,
                              uint32_t key,
                              uint16_t* halves) {
  uint32_t fulls[kLength];
  uint16_t rounded[kLength];
  slice.wide.unpack(fulls);
#pragma unroll
  for (int index = 0; index < kLength; ++index) {
    rounded[index] = static_cast<uint16_t>(round_bits(fulls[index], first + index, key));
  }
  Vector<uint16_t, kLength>::store(rounded, halves);
}

template <int kCapacity>
__global__ void __launch_bounds__(kThreads)
    round_stochastically_kernel(const __grid_constant__ Batch<kCapacity> batch) {
  const Place place = place_of_block(batch);
  auto* halves = static_cast<uint16_t*>(batch.narrow[place.tensor]) + place.start;
  const auto* fulls = reinterpret_cast<const uint32_t*>(batch.wide[place.tensor]) + place.start;
  const uint32_t key = key_of(batch.narrow[place.tensor - 1]);
  visit_chunk<ReadsWide>(halves, fulls, place.count, [&](const auto& slice, int element, int) {
    store_rounded(slice, static_cast<uint32_t>(place.start) + element, key, halves + element);
  });
}

__global__ void clip_factor_kernel(
    const double* sum_of_squares, const float* found_inf, float* norm, float* factor, ClipFactor clip) {
  clip(*sum_of_squares, *found_inf, *norm, *factor);
}

__global__ void update_scale_kernel(
    float* scale, int32_t* unskipped, int32_t* hysteresis_left, const float* found_inf, UpdateScale update) {
  update(*scale, *unskipped, *hysteresis_left, *found_inf);
}

// The counters for the launches of one call, one for each tensor of a launch.
class Counters {
 public:
  Counters(const OnDevice& device, const Tensor& of_64_bits) {
    const int stream = device.number_of_stream();
    if (stream < kStreams) {
      void* rows = nullptr;
      check(cudaGetSymbolAddress(&rows, counters), "the counters of the kernels were not found");
      data_ = static_cast<Counter*>(rows) + stream * kMost;
    } else {
      own_ = torch::stable::new_zeros(of_64_bits, {kMost});
      data_ = static_cast<Counter*>(own_->data_ptr());
    }
  }

  Counter* data() const {
    return data_;
  }

 private:
  std::optional<Tensor> own_;
  Counter* data_;
};

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
  const Piece* const end = pieces.data() + pieces.size();
  int64_t first_chunk = 0;
  for (const Piece *first = pieces.data(), *last = first; first != end; first = last) {
    int64_t chunks = 0;
    do {
      chunks += last++->chunks();
    } while (last != end && last - first < kMost && chunks + last->chunks() <= INT32_MAX);
    if (last - first <= kFew) {
      launch(Batch<kFew>(first, last), first_chunk);
    } else {
      launch(Batch<kMost>(first, last), first_chunk);
    }
    check(cudaGetLastError(), "a kernel could not be launched");
    first_chunk += chunks;
  }
}

void unscale_(std::vector<Tensor> grads, Tensor inv_scale, Tensor found_inf, std::optional<Tensor> more) {
  const char* name = "ampatch::unscale_";
  const OnDevice device(name, inv_scale);
  Lists lists(name, inv_scale, grads, true, more);
  const float* factor = scalar<float>(name, "inv_scale", inv_scale, inv_scale);
  float* flag = scalar<float>(name, "found_inf", found_inf, inv_scale);
  in_batches(lists.pieces(), [&](const auto& batch, int64_t) {
    unscale_kernel<<<batch.chunks, kThreads, 0, device.stream()>>>(batch, factor, flag);
  });
  lists.finish();
}

template <class Launch>
void unscale_into(const char* name,
                  const Launch& launch,
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
  in_batches(lists.pieces(),
             [&](const auto& batch, int64_t) { launch(batch, device.stream(), factor, flag, write_back); });
  lists.finish();
}

void unscale_copy(std::vector<Tensor> grads,
                  std::vector<Tensor> master_grads,
                  Tensor inv_scale,
                  Tensor found_inf,
                  bool write_back,
                  std::optional<Tensor> more) {
  const auto launch = [](const auto& batch, cudaStream_t stream, auto... rest) {
    unscale_copy_kernel<<<batch.chunks, kThreads, 0, stream>>>(batch, rest...);
  };
  unscale_into("ampatch::unscale_copy", launch, grads, master_grads, inv_scale, found_inf, write_back, more);
}

void unscale_add(std::vector<Tensor> grads,
                 std::vector<Tensor> master_grads,
                 Tensor inv_scale,
                 Tensor found_inf,
                 bool write_back,
                 std::optional<Tensor> more) {
  const auto launch = [](const auto& batch, cudaStream_t stream, auto... rest) {
    unscale_add_kernel<<<batch.chunks, kThreads, 0, stream>>>(batch, rest...);
  };
  unscale_into("ampatch::unscale_add", launch, grads, master_grads, inv_scale, found_inf, write_back, more);
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
  const Counters counters(device, sum_of_squares);
  in_batches(lists.pieces(), [&](const auto& batch, int64_t first_chunk) {
    const bool is_last = first_chunk + batch.chunks == chunks;
    const Norm norm{chunk_sums, first_chunk, chunks, is_last ? counters.data() : nullptr, total};
    found_inf_norm_kernel<<<batch.chunks, kThreads, 0, device.stream()>>>(batch, factor, flag, norm);
  });
}

template <class Launch>
void copy(const char* name,
          const Launch& launch,
          const std::vector<Tensor>& masters,
          const std::vector<Tensor>& halves,
          const std::optional<Tensor>& more) {
  const Tensor& beside = any_of(masters, halves);
  const OnDevice device(name, beside);
  Lists lists(name, beside, halves, true, masters, false, more);
  in_batches(lists.pieces(), [&](const auto& batch, int64_t) { launch(batch, device.stream()); });
  lists.finish();
}

void copy_to_half(std::vector<Tensor> masters, std::vector<Tensor> halves, std::optional<Tensor> more) {
  const auto launch = [](const auto& batch, cudaStream_t stream) {
    copy_to_half_kernel<false><<<batch.chunks, kThreads, 0, stream>>>(batch);
  };
  copy("ampatch::copy_to_half", launch, masters, halves, more);
}

void copy_to_half_grads(std::vector<Tensor> master_grads, std::vector<Tensor> grads, std::optional<Tensor> more) {
  const auto launch = [](const auto& batch, cudaStream_t stream) {
    copy_to_half_kernel<true><<<batch.chunks, kThreads, 0, stream>>>(batch);
  };
  copy("ampatch::copy_to_half_grads", launch, master_grads, grads, more);
}

template <class Launch>
void on_triples(const char* name,
                const Launch& launch,
                const std::vector<Tensor>& halves,
                const std::vector<Tensor>& fulls,
                bool writes_halves,
                const Thirds& thirds,
                const std::optional<Tensor>& more) {
  const Tensor& beside = any_of(halves, fulls);
  const OnDevice device(name, beside);
  Lists lists(name, beside, halves, writes_halves, fulls, !writes_halves, more, thirds);
  in_batches(lists.pieces(), [&](const auto& batch, int64_t) { launch(batch, device.stream()); });
  lists.finish();
}

void join(std::vector<Tensor> halves,
          std::vector<Tensor> remainders,
          std::vector<Tensor> fulls,
          std::optional<Tensor> more) {
  const auto launch = [](const auto& batch, cudaStream_t stream) {
    join_kernel<<<batch.chunks, kThreads, 0, stream>>>(batch);
  };
  on_triples("ampatch::join", launch, halves, fulls, false, {&remainders}, more);
}

void split(std::vector<Tensor> fulls,
           std::vector<Tensor> halves,
           std::vector<Tensor> remainders,
           std::optional<Tensor> more) {
  const auto launch = [](const auto& batch, cudaStream_t stream) {
    split_kernel<<<batch.chunks, kThreads, 0, stream>>>(batch);
  };
  on_triples("ampatch::split", launch, halves, fulls, true, {&remainders, true}, more);
}

void round_stochastically(std::vector<Tensor> fulls,
                          std::vector<Tensor> halves,
                          std::vector<int64_t> keys,
                          std::optional<Tensor> more) {
  const auto launch = [](const auto& batch, cudaStream_t stream) {
    round_stochastically_kernel<<<batch.chunks, kThreads, 0, stream>>>(batch);
  };
  on_triples("ampatch::round_stochastically", launch, halves, fulls, true, {nullptr, false, &keys}, more);
}

void fingerprint(std::vector<Tensor> grads, Tensor fingerprints, std::optional<Tensor> more) {
  const char* name = "ampatch::fingerprint";
  const OnDevice device(name, fingerprints);
  Lists lists(name, fingerprints, grads, false, more);
  double* found = one_for_each(name, "fingerprints", fingerprints, fingerprints, lists.pieces());
  const Counters counters(device, fingerprints);
  in_batches(lists.pieces(), [&](const auto& batch, int64_t) {
    fingerprint_kernel<<<batch.chunks, kThreads, 0, device.stream()>>>(batch, counters.data(), found);
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
  in_batches(lists.pieces(), [&](const auto& batch, int64_t) {
    follow_kernel<<<batch.chunks, kThreads, 0, device.stream()>>>(batch, then, found, of_gradients);
    then += batch.tensors;
    found += batch.tensors;
  });
  lists.finish();
}

void clip_factor(Tensor sum_of_squares, Tensor found_inf, Tensor norm, Tensor factor, double max_norm) {
  const char* name = "ampatch::clip_factor";
  const OnDevice device(name, sum_of_squares);
  clip_factor_kernel<<<1, 1, 0, device.stream()>>>(
      scalar<double>(name, "sum_of_squares", sum_of_squares, sum_of_squares),
      scalar<float>(name, "found_inf", found_inf, sum_of_squares),
      scalar<float>(name, "norm", norm, sum_of_squares),
      scalar<float>(name, "factor", factor, sum_of_squares),
      ClipFactor{max_norm});
  check(cudaGetLastError(), "a kernel could not be launched");
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
  m.impl("clip_factor", TORCH_BOX(&ampatch::clip_factor));
  m.impl("join", TORCH_BOX(&ampatch::join));
  m.impl("split", TORCH_BOX(&ampatch::split));
  m.impl("round_stochastically", TORCH_BOX(&ampatch::round_stochastically));
  m.impl("update_scale", TORCH_BOX(&ampatch::update_scale));
}
