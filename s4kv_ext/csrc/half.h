// float16 and bfloat16, one at a time. Both directions round to nearest even.
#pragma once
#include <stdint.h>
#include <string.h>
#ifdef __F16C__
#include <immintrin.h>
#endif

namespace {

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

inline uint32_t bits_of(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  return u;
}
inline float float_of(uint32_t u) {
  float x;
  memcpy(&x, &u, 4);
  return x;
}

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) { return float_of(uint32_t(x.bits) << 16); }
inline float to_float(f16 h) {
#ifdef __F16C__
  return _cvtsh_ss(h.bits);
#else
  uint32_t sign = uint32_t(h.bits & 0x8000) << 16, rest = h.bits & 0x7fff;
  if (rest >= 0x7c00) return float_of(sign | 0x7f800000 | (rest & 0x3ff) << 13);
  if (rest >= 0x400) return float_of(sign | ((rest << 13) + (112u << 23)));
  float tiny = float(rest) * 0x1p-24f;
  return sign ? -tiny : tiny;
#endif
}

inline void from_float(float x, float& out) { out = x; }
inline void from_float(float x, bf16& out) {
  uint32_t u = bits_of(x);
  out.bits = x != x ? 0x7fc0 : (u + 0x7fff + (u >> 16 & 1)) >> 16;
}
inline void from_float(float x, f16& out) {
#ifdef __F16C__
  out.bits = _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT);
#else
  uint32_t u = bits_of(x), sign = u >> 16 & 0x8000, rest = u & 0x7fffffff;
  if (rest > 0x7f800000) {
    out.bits = sign | 0x7e00;
  } else if (rest >= 0x477ff000) {  // rounds past 65504
    out.bits = sign | 0x7c00;
  } else if (rest >= 0x38800000) {
    out.bits = sign | (rest - (112u << 23) + 0xfff + (rest >> 13 & 1)) >> 13;
  } else {  // adding 0.5 leaves the subnormal, correctly rounded, in the low bits
    out.bits = sign | (bits_of(float_of(rest) + 0.5f) - 0x3f000000);
  }
#endif
}

inline f16 half(float x) {
  f16 h;
  from_float(x, h);
  return h;
}

}  // namespace
