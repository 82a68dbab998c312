// The value rotation of one token, a warp holding its D channels, D / 32 neighbours a lane.
#pragma once
#include "prims.cuh"

namespace s4kv {

// Unnormalised; the butterflies in the order of quantize.hadamard, so that rounding is the same.
template <int N>
DEV void hadamard(float (&v)[N], int lane) {
#pragma unroll
  for (int half = 1; half < N; half <<= 1)
#pragma unroll
    for (int i = 0; i < N; i++)
      if (!(i & half)) {
        const float a = v[i], b = v[i + half];
        v[i] = a + b, v[i + half] = a - b;
      }
#pragma unroll
  for (int d = 1; d < 32; d <<= 1)
#pragma unroll
    for (int i = 0; i < N; i++) {
      const float other = shfl_xor(v[i], d);
      v[i] = lane & d ? other - v[i] : v[i] + other;
    }
}

template <bool BF16>
DEV float to_float(uint16_t raw) {
  if constexpr (BF16) return __uint_as_float((uint32_t)raw << 16);
  return __half2float(__ushort_as_half(raw));
}

// N neighbouring 16-bit elements.
template <bool BF16, int N>
DEV void load_floats(float (&v)[N], const uint16_t* p) {
  static_assert(N == 2 || N == 4);
  uint32_t raw[N / 2];
  if constexpr (N == 4) {
    const uint2 w = *reinterpret_cast<const uint2*>(p);
    raw[0] = w.x, raw[1] = w.y;
  } else {
    raw[0] = *reinterpret_cast<const uint32_t*>(p);
  }
#pragma unroll
  for (int i = 0; i < N / 2; i++) {
    const float2 f = unpack2<BF16>(raw[i]);
    v[2 * i] = f.x, v[2 * i + 1] = f.y;
  }
}

}  // namespace s4kv
