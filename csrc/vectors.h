// Vectors of float32 on the CPU, loaded from and stored to memory in each type, rounded to nearest even; and vectors of
// words, for the bits of elements.
//
// Must not know what is computed with them.

#pragma once

#include <cstdint>
#include <cstring>

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#if defined(__F16C__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace ampatch {

// Number of elements per vector: as many as a register holds. GCC and clang support the vector types below on every
// processor; they vectorise plain loops less reliably.
#if defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
using Floats = float __attribute__((vector_size(kLanes * sizeof(float))));
using Words = uint32_t __attribute__((vector_size(kLanes * sizeof(uint32_t))));
using Shorts = uint16_t __attribute__((vector_size(kLanes * sizeof(uint16_t))));

// Of floats or of their bits, a vector or a single word.
template <class Value>
inline void load(const float* from, Value& to) {
  std::memcpy(&to, from, sizeof(to));
}

template <class Value>
inline void store(const Value& from, float* to) {
  std::memcpy(to, &from, sizeof(from));
}

// Words of 16 bits, as the lower bits of words of 32.
inline void load(const uint16_t* from, Words& to) {
#if defined(__AVX2__)  // GCC 12 does not emit this instruction for the code below
  to = (Words)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
  Shorts shorts;
  std::memcpy(&shorts, from, sizeof(shorts));
  to = __builtin_convertvector(shorts, Words);
#endif
}

inline void store(const Words& from, uint16_t* to) {
  const Shorts shorts = __builtin_convertvector(from, Shorts);
  std::memcpy(to, &shorts, sizeof(shorts));
}

inline void load(const uint16_t* from, uint32_t& to) {
  to = *from;
}

inline void store(uint32_t from, uint16_t* to) {
  *to = static_cast<uint16_t>(from);
}

inline void load(const c10::BFloat16* from, Floats& to) {
  Words bits;
  load(reinterpret_cast<const uint16_t*>(from), bits);
  to = (Floats)(bits << 16);
}

inline void store(const Floats& from, c10::BFloat16* to) {
  const Words bits = (Words)from;
  const Words nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // ties to even
  const Words is_nan = (Words)(from != from);
  store((is_nan & 0x7fc0) | (~is_nan & nearest), reinterpret_cast<uint16_t*>(to));
}

// `shown` of operations.h for a vector.
inline Floats shown(const Floats& values, float least) {
  const Words bits = (Words)values;
  const Floats size = (Floats)(bits & 0x7fffffffu);
  const Words vanishes = (Words)(size < least) & (Words)(size != 0.0f);
  uint32_t smallest;
  std::memcpy(&smallest, &least, sizeof(smallest));
  return (Floats)((vanishes & ((bits & 0x80000000u) | smallest)) | (~vanishes & bits));
}

#if defined(__F16C__)  // implies AVX, and so eight lanes
inline void load(const c10::Half* from, Floats& to) {
  to = (Floats)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}

inline void store(const Floats& from, c10::Half* to) {
  const __m128i rounded = _mm256_cvtps_ph((__m256)from, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), rounded);
}
#else
inline void load(const c10::Half* from, Floats& to) {
  for (int lane = 0; lane < kLanes; ++lane) {
    to[lane] = from[lane];
  }
}

inline void store(const Floats& from, c10::Half* to) {
  for (int lane = 0; lane < kLanes; ++lane) {
    to[lane] = from[lane];
  }
}
#endif

}  // namespace ampatch
