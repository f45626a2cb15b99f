// The operators on the CPU. They process vectors of elements, in chunks that are distributed among torch's threads.
// Where a chunk begins does not depend on the number of threads, and so a norm has the same bits with any number.

#include <algorithm>
#include <atomic>
#include <cstring>
#include <numeric>
#include <optional>
#include <type_traits>
#include <vector>

#include <torch/csrc/stable/library.h>

#include "lists.h"
#include "operations.h"
#include "vectors.h"

namespace ampatch {
namespace {

// Minimum number of elements per thread: a second thread does not pay for fewer.
constexpr int64_t kGrain = 2 * kChunk;

// Numbers that are summed in float32 before their sum is added in float64, to keep the error of a norm below 1e-6.
constexpr int64_t kSummed = 32;

template <class Vector>
double total(const Vector& lanes) {
  double total = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    total += lanes[lane];
  }
  return total;
}

// Applies an operation to `count` elements; `wide` is null if the operation has none. Returns true if all were finite.
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
        store(Operation::kShows ? shown(narrows, kLeast<Narrow>) : narrows, narrow + index);
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
      narrow[index] = static_cast<Narrow>(Operation::kShows ? shown<Narrow>(one) : one);
    }
    if (Operation::kWritesWide) {
      wide[index] = other;
    }
  }
  return all;
}

struct Outcome {
  bool finite;
  double sum;
};

// Splits tensors into chunks, which are numbered over all tensors.
class Chunks {
 public:
  explicit Chunks(const std::vector<Piece>& pieces) : pieces_(pieces) {
    first_.reserve(pieces.size());
    for (const Piece& piece : pieces) {
      first_.push_back(count_);
      count_ += piece.chunks();
      elements_ += piece.count;
    }
  }

  int64_t count() const {
    return count_;
  }

  // Number of the first chunk of a piece.
  int64_t first(size_t piece) const {
    return first_[piece];
  }

  // Calls `visit(chunk, piece, start, count)` for each chunk, on several threads.
  template <class Visit>
  void each(const Visit& visit) const {
    if (count_ == 0) {
      return;
    }
    const int64_t grain = std::max<int64_t>(1, kGrain * count_ / elements_);
    torch::stable::parallel_for(0, count_, grain, [&](int64_t begin, int64_t end) {
      size_t index = std::upper_bound(first_.begin(), first_.end(), begin) - first_.begin() - 1;
      for (int64_t chunk = begin; chunk < end; ++chunk) {
        while (index + 1 < pieces_.size() && first_[index + 1] == chunk) {  // a piece of no elements has no chunk
          ++index;
        }
        const int64_t start = (chunk - first_[index]) * kChunk;
        visit(chunk, index, start, std::min(kChunk, pieces_[index].count - start));
      }
    });
  }

  // Calls `visit(chunk, piece, narrow, wide, start, count)` likewise; `narrow` and `wide` point to the start of the
  // chunk.
  template <class Visit>
  void visit(const Visit& visit) const {
    each([&](int64_t chunk, size_t index, int64_t start, int64_t count) {
      const Piece& piece = pieces_[index];
      with_type(piece.type, [&](auto* type) {
        auto* narrow = static_cast<decltype(type)>(piece.narrow) + start;
        visit(chunk, index, narrow, piece.wide == nullptr ? nullptr : piece.wide + start, start, count);
      });
    });
  }

 private:
  const std::vector<Piece>& pieces_;
  std::vector<int64_t> first_;
  int64_t count_ = 0, elements_ = 0;
};

// Applies an operation to every element of the pieces.
template <class Operation>
Outcome visit(const std::vector<Piece>& pieces, const Operation& operation) {
  const Chunks chunks(pieces);
  std::atomic<bool> finite{true};
  std::vector<double> sums(Operation::kSums ? chunks.count() : 0);
  chunks.visit([&](int64_t chunk, size_t, auto* narrow, float* wide, int64_t, int64_t count) {
    double sum;
    if (!visit_chunk(narrow, wide, count, operation, sum)) {
      finite = false;
    }
    if (Operation::kSums) {
      sums[chunk] = sum;
    }
  });
  return {finite, std::accumulate(sums.begin(), sums.end(), 0.0)};
}

void unscale_(std::vector<Tensor> grads, Tensor inv_scale, Tensor found_inf, std::optional<Tensor> more) {
  const char* name = "ampatch::unscale_";
  Lists lists(name, inv_scale, grads, true, more);
  const float* factor = scalar<float>(name, "inv_scale", inv_scale, inv_scale);
  float* flag = scalar<float>(name, "found_inf", found_inf, inv_scale);
  if (!visit(lists.pieces(), Unscale{*factor}).finite) {
    *flag = 1;
  }
  lists.finish();
}

template <class Operation>
void unscale_into(const char* name,
                  const std::vector<Tensor>& grads,
                  const std::vector<Tensor>& master_grads,
                  const Tensor& inv_scale,
                  const Tensor& found_inf,
                  bool write_back,
                  const std::optional<Tensor>& more) {
  Lists lists(name, inv_scale, grads, write_back, master_grads, true, more);
  const float* factor = scalar<float>(name, "inv_scale", inv_scale, inv_scale);
  float* flag = scalar<float>(name, "found_inf", found_inf, inv_scale);
  if (!visit(lists.pieces(), Operation{*factor, write_back}).finite) {
    *flag = 1;
  }
  lists.finish();
}

void unscale_copy(std::vector<Tensor> grads,
                  std::vector<Tensor> master_grads,
                  Tensor inv_scale,
                  Tensor found_inf,
                  bool write_back,
                  std::optional<Tensor> more) {
  unscale_into<UnscaleCopy>("ampatch::unscale_copy", grads, master_grads, inv_scale, found_inf, write_back, more);
}

void unscale_add(std::vector<Tensor> grads,
                 std::vector<Tensor> master_grads,
                 Tensor inv_scale,
                 Tensor found_inf,
                 bool write_back,
                 std::optional<Tensor> more) {
  unscale_into<UnscaleAdd>("ampatch::unscale_add", grads, master_grads, inv_scale, found_inf, write_back, more);
}

void found_inf_norm(
    std::vector<Tensor> grads, Tensor inv_scale, Tensor found_inf, Tensor sum_of_squares, std::optional<Tensor> more) {
  const char* name = "ampatch::found_inf_norm";
  Lists lists(name, inv_scale, grads, false, more);
  const float* factor = scalar<float>(name, "inv_scale", inv_scale, inv_scale);
  float* flag = scalar<float>(name, "found_inf", found_inf, inv_scale);
  double* total = scalar<double>(name, "sum_of_squares", sum_of_squares, inv_scale);
  const Outcome outcome = visit(lists.pieces(), FoundInfNorm{*factor});
  if (!outcome.finite) {
    *flag = 1;
  }
  *total += outcome.sum;
}

void clip_factor(Tensor sum_of_squares, Tensor found_inf, Tensor norm, Tensor factor, double max_norm) {
  const char* name = "ampatch::clip_factor";
  const double* sum = scalar<double>(name, "sum_of_squares", sum_of_squares, sum_of_squares);
  const float* flag = scalar<float>(name, "found_inf", found_inf, sum_of_squares);
  float* of_all = scalar<float>(name, "norm", norm, sum_of_squares);
  float* clips = scalar<float>(name, "factor", factor, sum_of_squares);
  ClipFactor{max_norm}(*sum, *flag, *of_all, *clips);
}

template <class Operation>
void copy(const char* name,
          const std::vector<Tensor>& masters,
          const std::vector<Tensor>& halves,
          const std::optional<Tensor>& more) {
  const Tensor& beside = any_of(masters, halves);
  Lists lists(name, beside, halves, true, masters, false, more);
  visit(lists.pieces(), Operation{});
  lists.finish();
}

void copy_to_half(std::vector<Tensor> masters, std::vector<Tensor> halves, std::optional<Tensor> more) {
  copy<CopyToHalf<false>>("ampatch::copy_to_half", masters, halves, more);
}

void copy_to_half_grads(std::vector<Tensor> master_grads, std::vector<Tensor> grads, std::optional<Tensor> more) {
  copy<CopyToHalf<true>>("ampatch::copy_to_half_grads", master_grads, grads, more);
}

template <class Narrow>
uint32_t fingerprint_of(const Narrow* elements, int64_t start, int64_t count) {
  constexpr int64_t kInWord = sizeof(uint32_t) / sizeof(Narrow);  // elements
  const auto first = static_cast<uint32_t>(start / kInWord);
  uint32_t sum = 0, bits = 0;
  for (int64_t word = 0; word < count / kInWord; ++word) {
    std::memcpy(&bits, elements + word * kInWord, sizeof(bits));
    sum += hashed(bits, first + static_cast<uint32_t>(word));
  }
  if (count % kInWord != 0) {
    uint16_t last;
    std::memcpy(&last, elements + count - 1, sizeof(last));
    sum += hashed(last, first + static_cast<uint32_t>(count / kInWord));
  }
  return sum;
}

void fingerprint(std::vector<Tensor> grads, Tensor fingerprints, std::optional<Tensor> more) {
  const char* name = "ampatch::fingerprint";
  Lists lists(name, fingerprints, grads, false, more);
  const Chunks chunks(lists.pieces());
  double* found = one_for_each(name, "fingerprints", fingerprints, fingerprints, lists.pieces());
  std::vector<uint32_t> sums(chunks.count());
  chunks.visit([&](int64_t chunk, size_t, auto* narrow, float*, int64_t start, int64_t count) {
    sums[chunk] = fingerprint_of(narrow, start, count);
  });
  for (size_t index = 0; index < lists.pieces().size(); ++index) {
    const auto first = sums.begin() + chunks.first(index);
    found[index] = std::accumulate(first, first + lists.pieces()[index].chunks(), uint32_t{0});
  }
}

void copy_edits(std::vector<Tensor> halves,
                std::vector<Tensor> masters,
                Tensor before,
                Tensor now,
                bool of_gradients,
                std::optional<Tensor> more) {
  const char* name = "ampatch::copy_edits";
  Lists lists(name, before, halves, false, masters, true, more);
  const double* then = one_for_each(name, "before", before, before, lists.pieces());
  const double* found = one_for_each(name, "now", now, before, lists.pieces());
  Chunks(lists.pieces()).visit([&](int64_t, size_t piece, auto* narrow, float* wide, int64_t, int64_t count) {
    for (int64_t index = 0; then[piece] != found[piece] && index < count; ++index) {
      copy_edit(narrow[index], wide[index], of_gradients);
    }
  });
  lists.finish();
}

// Calls `work(index, half, full, third, element)` for each vector of the pieces, and for each element that is left
// over. `index` is that of the elements in their tensor, a vector or one word; `half` and `full` point to their memory,
// and `third` is that of the piece before. Words are of the type of `index`.
template <class Work>
void visit_bits(const std::vector<Piece>& pieces, const Work& work) {
  Words lanes;
  for (int lane = 0; lane < kLanes; ++lane) {
    lanes[lane] = lane;
  }
  Chunks(pieces).each([&](int64_t, size_t piece, int64_t start, int64_t count) {
    auto* halves = static_cast<uint16_t*>(pieces[piece].narrow);
    float* fulls = pieces[piece].wide;
    void* third = pieces[piece - 1].narrow;
    const auto visit = [&](const auto& first, int64_t element) {
      work(first + static_cast<uint32_t>(element), halves + element, fulls + element, third, element);
    };
    int64_t element = start;
    for (; element + kLanes <= start + count; element += kLanes) {
      visit(lanes, element);
    }
    for (; element < start + count; ++element) {
      visit(uint32_t{0}, element);
    }
  });
}

void join(std::vector<Tensor> halves,
          std::vector<Tensor> remainders,
          std::vector<Tensor> fulls,
          std::optional<Tensor> more) {
  Lists lists("ampatch::join", any_of(halves, fulls), halves, false, fulls, true, more, {&remainders});
  visit_bits(lists.pieces(), [](const auto& index, uint16_t* halves, float* fulls, void* remainders, int64_t element) {
    std::decay_t<decltype(index)> half, remainder;
    load(halves, half);
    load(static_cast<uint16_t*>(remainders) + element, remainder);
    store(join_bits(half, remainder), fulls);
  });
  lists.finish();
}

void split(std::vector<Tensor> fulls,
           std::vector<Tensor> halves,
           std::vector<Tensor> remainders,
           std::optional<Tensor> more) {
  Lists lists("ampatch::split", any_of(halves, fulls), halves, true, fulls, false, more, {&remainders, true});
  visit_bits(lists.pieces(), [](const auto& index, uint16_t* halves, float* fulls, void* remainders, int64_t element) {
    std::decay_t<decltype(index)> full, half, remainder;
    load(fulls, full);
    split_bits(full, half, remainder);
    store(half, halves);
    store(remainder, static_cast<uint16_t*>(remainders) + element);
  });
  lists.finish();
}

void round_stochastically(std::vector<Tensor> fulls,
                          std::vector<Tensor> halves,
                          std::vector<int64_t> keys,
                          std::optional<Tensor> more) {
  const char* name = "ampatch::round_stochastically";
  Lists lists(name, any_of(halves, fulls), halves, true, fulls, false, more, {nullptr, false, &keys});
  visit_bits(lists.pieces(), [](const auto& index, uint16_t* halves, float* fulls, void* key, int64_t) {
    std::decay_t<decltype(index)> full;
    load(fulls, full);
    store(round_bits(full, index, key_of(key)), halves);
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
  float* current = scalar<float>(name, "scale", scale, scale);
  int32_t* clean = scalar<int32_t>(name, "unskipped", unskipped, scale);
  int32_t* left = scalar<int32_t>(name, "hysteresis_left", hysteresis_left, scale);
  const float* flag = scalar<float>(name, "found_inf", found_inf, scale);
  const UpdateScale update(growth, backoff, window, hysteresis, floor, ceiling);
  update(*current, *clean, *left, *flag);
}

}  // namespace
}  // namespace ampatch

STABLE_TORCH_LIBRARY_IMPL(ampatch, CPU, m) {
  m.impl("unscale_", TORCH_BOX(&ampatch::unscale_));
  m.impl("unscale_copy", TORCH_BOX(&ampatch::unscale_copy));
  m.impl("unscale_add", TORCH_BOX(&ampatch::unscale_add));
  m.impl("found_inf_norm", TORCH_BOX(&ampatch::found_inf_norm));
  m.impl("clip_factor", TORCH_BOX(&ampatch::clip_factor));
  m.impl("copy_to_half", TORCH_BOX(&ampatch::copy_to_half));
  m.impl("copy_to_half_grads", TORCH_BOX(&ampatch::copy_to_half_grads));
  m.impl("fingerprint", TORCH_BOX(&ampatch::fingerprint));
  m.impl("copy_edits", TORCH_BOX(&ampatch::copy_edits));
  m.impl("join", TORCH_BOX(&ampatch::join));
  m.impl("split", TORCH_BOX(&ampatch::split));
  m.impl("round_stochastically", TORCH_BOX(&ampatch::round_stochastically));
  m.impl("update_scale", TORCH_BOX(&ampatch::update_scale));
}
