// Vectors of the widest floats that the instruction set has, and the few things the compiler's
// vector extension does not do well by itself.
#pragma once
#include <immintrin.h>

#include "half.h"

namespace {

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float Vec __attribute__((vector_size(W * 4)));
typedef int32_t IVec __attribute__((vector_size(W * 4)));

inline Vec splat(float x) { return x - Vec{}; }

inline Vec load(const float* p) {
  Vec v;
  memcpy(&v, p, sizeof v);
  return v;
}
inline void store(float* p, Vec v) { memcpy(p, &v, sizeof v); }

inline Vec load(const f16* p) {
#if defined(__AVX512F__)
  return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__AVX2__)
  return (Vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
  Vec v;
  for (int i = 0; i < W; ++i) v[i] = to_float(p[i]);
  return v;
#endif
}

inline Vec load(const bf16* p) {
#if defined(__AVX512F__)
  return (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#elif defined(__AVX2__)
  return (Vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
#else
  Vec v;
  for (int i = 0; i < W; ++i) v[i] = to_float(p[i]);
  return v;
#endif
}

// W bytes: their low nibbles and their high nibbles, minus `zero`.
template <int two_zero>
inline void nibbles(const uint8_t* p, Vec& low, Vec& high) {
  constexpr float zero = two_zero * 0.5f;
#if defined(__AVX512F__)
  // A permutation looks at the low four bits of an index alone: it masks and converts at once.
  const __m512 to_float = _mm512_sub_ps(
      _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), _mm512_set1_ps(zero));
  const __m512i b = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
  low = (Vec)_mm512_permutexvar_ps(b, to_float);
  high = (Vec)_mm512_permutexvar_ps(_mm512_srli_epi32(b, 4), to_float);
#elif defined(__AVX2__)
  const __m256i b = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
  low = (Vec)_mm256_cvtepi32_ps(_mm256_and_si256(b, _mm256_set1_epi32(15))) - zero;
  high = (Vec)_mm256_cvtepi32_ps(_mm256_srli_epi32(b, 4)) - zero;
#else
  for (int i = 0; i < W; ++i) {
    low[i] = float(p[i] & 15) - zero;
    high[i] = float(p[i] >> 4) - zero;
  }
#endif
}

inline Vec max(Vec a, Vec b) {
#if defined(__AVX512F__)
  return (Vec)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (Vec)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}

inline float sum(Vec v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#elif defined(__AVX2__)
  __m128 x = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
#else
  return (v[0] + v[2]) + (v[1] + v[3]);
#endif
}

inline float top(Vec v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#elif defined(__AVX2__)
  __m128 x = _mm_max_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
#else
  float x = v[0];
  for (int i = 1; i < W; ++i) x = v[i] > x ? v[i] : x;
  return x;
#endif
}

// Lane i of the result is the sum of v[i]; v is overwritten.
inline Vec sums(Vec (&v)[W]) {
#if defined(__AVX512F__)
  // Each step merges pairs of vectors: of every two numbers apart by `step` one comes from each.
#pragma GCC unroll 4
  for (int step = 1; step < W; step *= 2) {
    IVec low, high;
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i) {
      low[i] = i & step ? W + i - step : i;
      high[i] = i & step ? W + i : i + step;
    }
#pragma GCC unroll 8
    for (int i = 0; i < W; i += 2 * step) {
      const __m512 a = (__m512)v[i], b = (__m512)v[i + step];
      v[i] = (Vec)_mm512_permutex2var_ps(a, (__m512i)low, b) + (Vec)_mm512_permutex2var_ps(a, (__m512i)high, b);
    }
  }
  return v[0];
#elif defined(__AVX2__)
  const auto four = [](const Vec* x) {
    return _mm256_hadd_ps(_mm256_hadd_ps((__m256)x[0], (__m256)x[1]), _mm256_hadd_ps((__m256)x[2], (__m256)x[3]));
  };
  const __m256 a = four(v), b = four(v + 4);
  return (Vec)_mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
#else
  Vec x;
  for (int i = 0; i < W; ++i) x[i] = sum(v[i]);
  return x;
#endif
}

// 2**x for x <= 0, within an ulp or two; 0 below the smallest normal number.
inline Vec exp2(Vec x) {
  const Vec magic = splat(0x1.8p23f);
  const Vec r = x + magic;  // the integer part is in the low bits
  const Vec f = x - (r - magic);
  Vec p = splat(1.535336188319500e-4f);
  p = p * f + 1.339887440266574e-3f;
  p = p * f + 9.618437357674640e-3f;
  p = p * f + 5.550332471162809e-2f;
  p = p * f + 2.402264791363012e-1f;
  p = p * f + 6.931472028550421e-1f;
  p = p * f + 1.0f;
  const Vec y = (Vec)((IVec)p + ((IVec)r << 23));
  return x < -126.0f ? Vec{} : y;
}

inline float exp2(float x) { return exp2(splat(x))[0]; }

inline float power(int e) { return float_of(uint32_t(e + 127) << 23); }

}  // namespace
