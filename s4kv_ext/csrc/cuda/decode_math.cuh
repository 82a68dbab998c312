// One warp, one page: scores, softmax and value sums of up to 8 * NT query rows.
//
// S^T = K q^T and O^T = V^T p^T with mma.m16n8k16: tokens or channels on M, query rows on N. A
// lane (g = lane / 4, t = lane % 4) holds accumulator rows g and g + 8, columns 2t and 2t + 1.
#pragma once
#include "layout.cuh"
#include "prims.cuh"

namespace s4kv {

constexpr float RESCALE_AT = 5.f;  // how far, in bits, a score may rise over the reference unscaled
constexpr float P_BITS = -2.f;     // p = 2^(score - reference + P_BITS): p * value_scale fits float16
constexpr float NIBBLE = 16777216.f;  // a nibble n is the float16 subnormal n * 2^-24
constexpr float NEVER = -1e30f;

DEV uint4 load16(const uint8_t* p) { return *reinterpret_cast<const uint4*>(p); }
DEV uint2 load8(const uint8_t* p) { return *reinterpret_cast<const uint2*>(p); }

DEV void load_words(uint32_t (&w)[4], const uint8_t* p) {
  const uint4 v = load16(p);
  w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w;
}

// The four A registers of a code word; rows g + 8 come out 16 times too large.
DEV void unpack(uint32_t w, uint32_t (&a)[4]) {
  const uint32_t v = w >> 8;
  a[0] = w & 0x000f000fu, a[1] = w & 0x00f000f0u, a[2] = v & 0x000f000fu, a[3] = v & 0x00f000f0u;
}

// Running state of a warp's query rows. Probabilities and value sums have references of their own:
// a page's values carry a power of two, and the largest product decides what may be rounded away.
template <int D, int NT>
struct State {
  float o[NT][D / 16][4];   // value sums
  float top[NT][2];         // reference of the scores, log2
  float top_v[NT][2];       // reference of score + value exponent, log2
  float sum[NT][2];         // of p
  float offset[NT][2];      // of p * value_offset
};

template <int D, int NT>
DEV void clear(State<D, NT>& s) {
#pragma unroll
  for (int n = 0; n < NT; n++) {
#pragma unroll
    for (int i = 0; i < D / 16; i++)
#pragma unroll
      for (int j = 0; j < 4; j++) s.o[n][i][j] = 0;
#pragma unroll
    for (int c = 0; c < 2; c++) s.top[n][c] = s.top_v[n][c] = NEVER, s.sum[n][c] = s.offset[n][c] = 0;
  }
}

// query: the B operands over slots, then over channels, of each tile of rows; in shared memory, as
// registers are scarce.
template <int D, int NT>
DEV void sealed_page(const uint8_t* page, int lane, bool has_sinks, const uint2* query,
                     const float (&scale)[NT][2], State<D, NT>& st) {
  using L = Layout<D>;
  const int g = lane >> 2, t = lane & 3;
  constexpr int FRAGMENTS = L::KCHUNKS + L::DCHUNKS;
  const int exponents = *reinterpret_cast<const uint16_t*>(page + L::EXPONENTS);
  const float key_power = power_of_two((int8_t)(exponents & 255));
  const int value_exponent = (int8_t)(exponents >> 8);

  float s[4][NT][4], dot[NT][2][4];  // scores of the codes; of the offsets, in two chains
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int j = 0; j < 4; j++) {
      dot[n][0][j] = dot[n][1][j] = 0;
#pragma unroll
      for (int i = 0; i < 4; i++) s[i][n][j] = 0;
    }
#pragma unroll
  for (int p = 0; p < L::DCHUNKS / 2; p++) {  // offsets x, z in rows 0..7 of A and y, w in rows 8..15, as loaded
    const uint4 f = load16(page + L::KEY_OFFSET + p * 64 + t * 16);
#pragma unroll
    for (int n = 0; n < NT; n++) {
      const uint2 a = query[(n * FRAGMENTS + L::KCHUNKS + 2 * p) * 32 + lane];
      const uint2 b = query[(n * FRAGMENTS + L::KCHUNKS + 2 * p + 1) * 32 + lane];
      mma<false>(dot[n][0], f.x, f.y, f.z, f.w, a.x, a.y);
      mma<false>(dot[n][1], f.x, f.y, f.z, f.w, b.x, b.y);
    }
  }
#pragma unroll
  for (int kc = 0; kc < L::KCHUNKS; kc++) {
    const uint2 key_scale = load8(page + L::KEY_SCALE + L::first_slot(kc, t) * 2);
    uint32_t b[NT][2];
#pragma unroll
    for (int n = 0; n < NT; n++) {
      const uint2 q = query[(n * FRAGMENTS + kc) * 32 + lane];
      b[n][0] = mul_h2(q.x, key_scale.x), b[n][1] = mul_h2(q.y, key_scale.y);
    }
    uint32_t word[4];
    load_words(word, page + L::KEY_CODE + kc * 512 + lane * 16);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      uint32_t a[4];
      unpack(word[i], a);
#pragma unroll
      for (int n = 0; n < NT; n++) mma<false>(s[i][n], a[0], a[1], a[2], a[3], b[n][0], b[n][1]);
    }
  }

  float base[NT][2], unit[NT][2];
  bool rescale = false;
  float high[NT][2];
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int c = 0; c < 2; c++) {
      const float k = scale[n][c] * key_power;
      base[n][c] = (dot[n][0][c] + dot[n][1][c + 2]) * k;
      unit[n][c] = fmaxf(k * NIBBLE, 1e-37f);  // not zero: -inf * 0 is NaN
      if (has_sinks) s[0][n][c] = s[0][n][c + 2] = -INFINITY;
      float x = s[0][n][c], y = s[0][n][c + 2];
#pragma unroll
      for (int i = 1; i < 4; i++) x = fmaxf(x, s[i][n][c]), y = fmaxf(y, s[i][n][c + 2]);
      high[n][c] = fmaxf(x, y * 0.0625f);
    }
#pragma unroll
  for (int d = 4; d < 32; d <<= 1)
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int c = 0; c < 2; c++) high[n][c] = fmaxf(high[n][c], shfl_xor(high[n][c], d));
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int c = 0; c < 2; c++) {
      high[n][c] = high[n][c] * unit[n][c] + base[n][c];
      rescale |= high[n][c] > st.top[n][c] + RESCALE_AT || high[n][c] + value_exponent > st.top_v[n][c] + RESCALE_AT;
    }
  if (__any_sync(0xffffffffu, rescale)) {
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int c = 0; c < 2; c++) {
        const float top = fmaxf(st.top[n][c], high[n][c]), top_v = fmaxf(st.top_v[n][c], high[n][c] + value_exponent);
        const float f = exp2_approx(st.top_v[n][c] - top_v);
        st.sum[n][c] *= exp2_approx(st.top[n][c] - top), st.offset[n][c] *= f;
        st.top[n][c] = top, st.top_v[n][c] = top_v;
#pragma unroll
        for (int i = 0; i < D / 16; i++) st.o[n][i][c] *= f, st.o[n][i][c + 2] *= f;
      }
  }

  uint32_t p_frag[NT][4][2];
  float to_v[NT][2];
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int c = 0; c < 2; c++) {
      to_v[n][c] = exp2_approx(value_exponent + st.top[n][c] - st.top_v[n][c]);
      base[n][c] += P_BITS - st.top[n][c];
    }
  uint32_t value_scale[4], value_offset[4];
  load_words(value_scale, page + L::VALUE_SCALE + g * 16);
  load_words(value_offset, page + L::VALUE_OFFSET + g * 16);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float2 off = unpack2<false>(value_offset[i]);
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const uint32_t scale2 = r ? high_twice(value_scale[i]) : low_twice(value_scale[i]);
      const float z = r ? off.y : off.x;
#pragma unroll
      for (int n = 0; n < NT; n++) {
        const float rows = r ? 0.0625f : 1.f;
        float p0 = exp2_approx(s[i][n][2 * r] * (unit[n][0] * rows) + base[n][0]);
        float p1 = exp2_approx(s[i][n][2 * r + 1] * (unit[n][1] * rows) + base[n][1]);
        st.sum[n][0] += p0, st.sum[n][1] += p1;
        p0 *= to_v[n][0], p1 *= to_v[n][1];
        st.offset[n][0] += p0 * z, st.offset[n][1] += p1 * z;
        p_frag[n][i][r] = transpose8x8(mul_h2(pack2<false>(p0, p1), scale2));
      }
    }
  }
#pragma unroll
  for (int kc = 0; kc < 4; kc++)
#pragma unroll
    for (int h = 0; h < D / 64; h++) {
      uint32_t word[4];
      load_words(word, page + L::VALUE_CODE + (kc * (D / 64) + h) * 512 + lane * 16);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        uint32_t a[4];
        unpack(word[i], a);
#pragma unroll
        for (int n = 0; n < NT; n++)
          mma<false>(st.o[n][4 * h + i], a[0], a[1], a[2], a[3], p_frag[n][kc][0], p_frag[n][kc][1]);
      }
    }
}

// Add the offsets to the sums over codes. Codes are positive and what they add up to is mostly cancelled
// by the offsets: mma truncates, which is a bias of a share of the sum, so that must not grow far.
template <int D, int NT>
DEV void add_offsets(State<D, NT>& st) {
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int c = 0; c < 2; c++) {
      float z = st.offset[n][c];
#pragma unroll
      for (int d = 4; d < 32; d <<= 1) z += shfl_xor(z, d);
      z *= 1.f / NIBBLE;
      st.offset[n][c] = 0;
#pragma unroll
      for (int i = 0; i < D / 16; i++) st.o[n][i][c] += z, st.o[n][i][c + 2] += z * 16.f;
    }
}

// From sums over rotated int4 values to sums over values: add the offsets, undo the scaling of codes,
// apply the Hadamard transform over channels, and adopt the scores' reference.
template <int D, int NT>
DEV void finish_sealed(int lane, State<D, NT>& st) {
  constexpr int M = D / 16;
  add_offsets<D, NT>(st);
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int c = 0; c < 2; c++) {
      const float f = exp2_approx(st.top_v[n][c] - st.top[n][c]) * (1.f / D);
#pragma unroll
      for (int i = 0; i < M; i++) {
        st.o[n][i][c] *= NIBBLE * f;
        st.o[n][i][c + 2] *= NIBBLE / 16 * f;
      }
#pragma unroll
      for (int d = 4; d < 32; d <<= 1) {
        const float sign = lane & d ? -1.f : 1.f;
#pragma unroll
        for (int i = 0; i < M; i++)
#pragma unroll
          for (int r = 0; r < 4; r += 2) {
            const float v = st.o[n][i][c + r];
            st.o[n][i][c + r] = shfl_xor(v, d) + sign * v;
          }
      }
#pragma unroll
      for (int i = 0; i < M; i++) {
        const float a = st.o[n][i][c], b = st.o[n][i][c + 2];
        st.o[n][i][c] = a + b, st.o[n][i][c + 2] = a - b;
      }
#pragma unroll
      for (int half = 1; half < M; half <<= 1)
#pragma unroll
        for (int i = 0; i < M; i++)
          if (!(i & half))
#pragma unroll
            for (int r = 0; r < 4; r += 2) {
              const float a = st.o[n][i][c + r], b = st.o[n][i + half][c + r];
              st.o[n][i][c + r] = a + b, st.o[n][i + half][c + r] = a - b;
            }
      st.top_v[n][c] = st.top[n][c];
    }
}

// A recent page of 16 tokens, in the model's dtype; `last` is the last token a row may see.
template <int D, bool BF16, int NT>
DEV void recent_page(uint8_t* page, int lane, int first_token, int valid, const int (&last)[NT][2],
                     const uint32_t (&query)[NT][D / 16][2], float scale, State<D, NT>& st) {
  using L = Layout<D>;
  const int g = lane >> 2, t = lane & 3;
  if (valid < RECENT_TOKENS) {  // 0 * whatever is there must be 0
    for (int i = lane; i < (RECENT_TOKENS - valid) * (D / 8); i += 32)
      *reinterpret_cast<uint4*>(page + (RECENT_TOKENS + valid + i / (D / 8)) * L::RECENT_ROW + i % (D / 8) * 16) =
          make_uint4(0, 0, 0, 0);
    fence_async_proxy();
    __syncwarp();
  }
  float s[NT][4];
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int j = 0; j < 4; j++) s[n][j] = 0;
#pragma unroll
  for (int p = 0; p < D / 32; p++) {
    const uint4 a = load16(page + g * L::RECENT_ROW + p * 64 + t * 16);
    const uint4 b = load16(page + (g + 8) * L::RECENT_ROW + p * 64 + t * 16);
#pragma unroll
    for (int n = 0; n < NT; n++) {
      mma<BF16>(s[n], a.x, b.x, a.z, b.z, query[n][2 * p][0], query[n][2 * p][1]);
      mma<BF16>(s[n], a.y, b.y, a.w, b.w, query[n][2 * p + 1][0], query[n][2 * p + 1][1]);
    }
  }
  bool rescale = false;
  float high[NT][2];
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int c = 0; c < 2; c++) {
      s[n][c] = first_token + g <= last[n][c] ? s[n][c] * scale : -INFINITY;
      s[n][c + 2] = first_token + g + 8 <= last[n][c] ? s[n][c + 2] * scale : -INFINITY;
      float x = fmaxf(s[n][c], s[n][c + 2]);
#pragma unroll
      for (int d = 4; d < 32; d <<= 1) x = fmaxf(x, shfl_xor(x, d));
      high[n][c] = x;
      rescale |= x > st.top[n][c] + RESCALE_AT;
    }
  if (__any_sync(0xffffffffu, rescale)) {
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int c = 0; c < 2; c++) {
        const float top = fmaxf(st.top[n][c], high[n][c]), f = exp2_approx(st.top[n][c] - top);
        st.top[n][c] = top, st.sum[n][c] *= f;
#pragma unroll
        for (int i = 0; i < D / 16; i++) st.o[n][i][c] *= f, st.o[n][i][c + 2] *= f;
      }
  }
  uint32_t p_frag[NT][2];
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const float p0 = exp2_approx(s[n][2 * r] - st.top[n][0] + P_BITS);
      const float p1 = exp2_approx(s[n][2 * r + 1] - st.top[n][1] + P_BITS);
      st.sum[n][0] += p0, st.sum[n][1] += p1;
      p_frag[n][r] = transpose8x8(pack2<BF16>(p0, p1));
    }
#pragma unroll
  for (int i = 0; i < D / 16; i++) {
    uint32_t a[4];
    ldmatrix_trans(a, page + (RECENT_TOKENS + (lane >> 4) * 8 + (lane & 7)) * L::RECENT_ROW + i * 32 + (lane >> 3 & 1) * 16);
#pragma unroll
    for (int n = 0; n < NT; n++) mma<BF16>(st.o[n][i], a[0], a[1], a[2], a[3], p_frag[n][0], p_frag[n][1]);
  }
}

}  // namespace s4kv
