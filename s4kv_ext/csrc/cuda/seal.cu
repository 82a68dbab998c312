// store_and_seal: new keys and values into recent pages, and every block of 64 tokens that has
// fallen behind the window into a sealed page. One launch a layer; the plan says what there is.
//
// Sealing repeats quantize.quantize operation by operation: the bytes are the reference's.
#include "hadamard.cuh"
#include "launch.h"
#include "layout.cuh"
#include "plan.cuh"

namespace s4kv {
namespace {

struct Params {
  Pages pages;
  NewTokens fresh;
  StepTables step;
  const Header* header;
  const Seal* seal;
  const int* slot;
  int tokens, seal_blocks, tokens_a_block;
};

template <int D>
struct Scratch {
  static constexpr int KEY_ROW = BLOCK + 4, VALUE_ROW = D + 4;  // bytes; padded against bank conflicts
  uint8_t key_code[D * KEY_ROW];        // [channel][token]
  uint8_t value_code[BLOCK * VALUE_ROW];  // [token][channel]
  __half key_scale[D];
  int slots[D];              // of each channel
  uint16_t slot[D + 16];     // channel | HIGH | UNUSED
  float top[2][D / 32];
};
constexpr uint16_t HIGH = 1 << 8, UNUSED = 1 << 9;

// Exponent that brings `top` into [16, 32).
DEV int exponent_of(float top) { return top > 0 ? max((__float_as_int(top) >> 23) - 131, MIN_EXPONENT) : 0; }

DEV float code_of(float x, float offset, float scale, float steps) {
  if (!(scale > 0)) return 0;
  return fminf(fmaxf(rintf(__fdiv_rn(__fsub_rn(x, offset), scale)), 0.f), steps);
}

DEV float warp_max(float v) {
#pragma unroll
  for (int d = 16; d; d >>= 1) v = fmaxf(v, shfl_xor(v, d));
  return v;
}

template <int D>
DEV float half_block_max(float v, float* scratch, int lane, int warp, int barrier) {
  v = warp_max(v);
  if (lane == 0) scratch[warp] = v;
  named_barrier(barrier, D);
#pragma unroll
  for (int i = 0; i < D / 32; i++) v = fmaxf(v, scratch[i]);
  return v;
}

// Where token `i` of the block lies; `kind` 0: keys, 1: values. Sinks stand in for token SINKS.
template <int D>
DEV const uint16_t* token_row(const Params& p, const Seal& s, int h, int i, int kind, const int (&page)[4]) {
  if (s.start == 0) i = max(i, SINKS);
  const int position = s.start + i;
  if (position >= s.computed) {
    const long row = s.query_start + position - s.computed;
    return kind ? static_cast<const uint16_t*>(p.fresh.value) + row * p.fresh.value_token + h * D
                : static_cast<const uint16_t*>(p.fresh.key) + row * p.fresh.key_token + h * D;
  }
  const int id = i < 32 ? (i < 16 ? page[0] : page[1]) : (i < 48 ? page[2] : page[3]);
  return reinterpret_cast<const uint16_t*>(p.pages.recent + id * p.pages.recent_page + h * p.pages.recent_head) +
         (kind * RECENT_TOKENS + i % RECENT_TOKENS) * D;
}

template <int D, bool BF16>
DEV void seal_keys(const Params& p, const Seal& s, int h, const int (&page)[4], uint8_t* out, Scratch<D>& m) {
  using L = Layout<D>;
  const int c = threadIdx.x, lane = c & 31, warp = c >> 5;
  const int16_t* slot_channel = p.pages.slot_channel + h * L::SLOTS;
  float k[BLOCK];
#pragma unroll
  for (int i = 0; i < BLOCK; i++) k[i] = to_float<BF16>(token_row<D>(p, s, h, i, 0, page)[c]);
  m.slots[c] = 0;
  named_barrier(1, D);
  for (int i = c; i < L::SLOTS; i += D) {
    const int channel = slot_channel[i], before = i ? slot_channel[i - 1] : -1, after = i + 1 < L::SLOTS ? slot_channel[i + 1] : -1;
    if (channel >= 0) atomicAdd(&m.slots[channel], 1);
    m.slot[i] = channel < 0 ? UNUSED : channel | (channel == after && channel != before ? HIGH : 0);
  }
  float top = 0;
#pragma unroll
  for (int i = 0; i < BLOCK; i++) top = fmaxf(top, fabsf(k[i]));
  const int e = exponent_of(half_block_max<D>(top, m.top[0], lane, warp, 1));
  const float power = power_of_two(-e);
  float low = INFINITY, high = -INFINITY, total = 0;
#pragma unroll
  for (int i = 0; i < BLOCK; i++) {
    k[i] = __fmul_rn(k[i], power);
    low = fminf(low, k[i]), high = fmaxf(high, k[i]), total = __fadd_rn(total, k[i]);
  }
  const int slots = m.slots[c];
  const float steps = slots == 0 ? 0.f : slots == 1 ? 15.f : 255.f;
  const __half offset = __float2half_rd(low);
  const float offset_f = __half2float(offset);
  const __half scale = __float2half_ru(__fdiv_rn(__fsub_rn(high, offset_f), fmaxf(steps, 1.f)));
  const float scale_f = __half2float(scale);
#pragma unroll
  for (int i = 0; i < BLOCK; i += 4) {
    uint32_t four = 0;
#pragma unroll
    for (int j = 0; j < 4; j++) four |= (uint32_t)code_of(k[i + j], offset_f, scale_f, steps) << (8 * j);
    *reinterpret_cast<uint32_t*>(m.key_code + c * m.KEY_ROW + i) = four;
  }
  m.key_scale[c] = scale;
  reinterpret_cast<__half*>(out + L::KEY_OFFSET)[c] = slots == 0 ? __float2half_rn(total * (1.f / BLOCK)) : offset;
  if (c == 0) out[L::EXPONENTS] = (uint8_t)e;
  if (c < 15) reinterpret_cast<uint16_t*>(out + L::EXPONENTS)[1 + c] = 0;
  named_barrier(1, D);
  for (int i = c; i < L::SLOTS; i += D) {
    const uint16_t slot = m.slot[i];
    const __half v = slot & UNUSED ? __ushort_as_half(0) : m.key_scale[slot & 255];
    reinterpret_cast<__half*>(out + L::KEY_SCALE)[i] = slot & HIGH ? __hmul(v, __float2half_rn(16.f)) : v;
  }
  for (int i = c; i < L::KCHUNKS * 128; i += D) {
    const int kc = i >> 7, g = i >> 4 & 7, t = i >> 2 & 3, tile = i & 3;
    uint32_t word = 0;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const uint16_t slot = m.slot[L::first_slot(kc, t) + j];
      const uint8_t* code = m.key_code + (slot & 255) * m.KEY_ROW + tile * 16 + g;
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const uint32_t v = code[8 * r];
        word |= (slot & UNUSED ? 0 : slot & HIGH ? v >> 4 : v & 15) << nibble_shift(r, j);
      }
    }
    reinterpret_cast<uint32_t*>(out + L::KEY_CODE)[i] = word;
  }
}

template <int D, bool BF16>
DEV void seal_values(const Params& p, const Seal& s, int h, const int (&page)[4], uint8_t* out, Scratch<D>& m) {
  using L = Layout<D>;
  constexpr int WARPS = D / 32, N = D / 32, TOKENS = BLOCK / WARPS;  // tokens a warp, N channels a lane
  const int c = threadIdx.x - D, lane = c & 31, warp = c >> 5;
  float v[TOKENS][N], top = 0;
#pragma unroll
  for (int i = 0; i < TOKENS; i++) load_floats<BF16>(v[i], token_row<D>(p, s, h, warp * TOKENS + i, 1, page) + lane * N);
#pragma unroll
  for (int i = 0; i < TOKENS; i++)
#pragma unroll
    for (int j = 0; j < N; j++) top = fmaxf(top, fabsf(v[i][j]));
  const int e = exponent_of(half_block_max<D>(top, m.top[1], lane, warp, 2));
  const float power = power_of_two(-e);
#pragma unroll
  for (int i = 0; i < TOKENS; i++) {
#pragma unroll
    for (int j = 0; j < N; j++) v[i][j] = __fmul_rn(v[i][j], power);
    hadamard(v[i], lane);
    float low = v[i][0], high = v[i][0];
#pragma unroll
    for (int j = 1; j < N; j++) low = fminf(low, v[i][j]), high = fmaxf(high, v[i][j]);
    low = -warp_max(-low), high = warp_max(high);
    const __half offset = __float2half_rd(low);
    const float offset_f = __half2float(offset);
    const __half scale = __float2half_ru(__fdiv_rn(__fsub_rn(high, offset_f), 15.f));
    const float scale_f = __half2float(scale);
    const int token = warp * TOKENS + i;
    uint32_t codes = 0;
#pragma unroll
    for (int j = 0; j < N; j++) codes |= (uint32_t)code_of(v[i][j], offset_f, scale_f, 15.f) << (8 * j);
    if constexpr (N == 4) *reinterpret_cast<uint32_t*>(m.value_code + token * m.VALUE_ROW + lane * 4) = codes;
    else *reinterpret_cast<uint16_t*>(m.value_code + token * m.VALUE_ROW + lane * 2) = codes;
    if (lane == 0) {
      reinterpret_cast<__half*>(out + L::VALUE_SCALE)[value_scale_index(token)] = scale;
      reinterpret_cast<__half*>(out + L::VALUE_OFFSET)[value_scale_index(token)] = offset;
    }
  }
  if (c == 0) out[L::EXPONENTS + 1] = (uint8_t)e;
  named_barrier(2, D);
  for (int i = c; i < 4 * (D / 64) * 128; i += D) {
    const int kc = i / (D * 2), tile = (i >> 7) % (D / 64) * 4 + (i & 3), g = i >> 4 & 7, t = i >> 2 & 3;
    uint32_t word = 0;
#pragma unroll
    for (int j = 0; j < 4; j++)
#pragma unroll
      for (int r = 0; r < 2; r++)
        word |= (uint32_t)m.value_code[(kc * 16 + k_index(j, t)) * m.VALUE_ROW + tile * 16 + r * 8 + g] << nibble_shift(r, j);
    reinterpret_cast<uint32_t*>(out + L::VALUE_CODE)[i] = word;
  }
}

template <int D>
DEV void store(const Params& p, int block) {
  const int first = block * p.tokens_a_block, heads = p.pages.heads;
  const int row_chunks = heads * (D / 8), chunks = 2 * row_chunks;  // of 16 bytes; keys, then values
  for (int i = threadIdx.x; i < p.tokens_a_block * chunks; i += 2 * D) {
    const int token = first + i / chunks, at = i % chunks, kind = at >= row_chunks, h = at % row_chunks / (D / 8), x = at % (D / 8);
    if (token >= p.tokens) return;
    const int slot = p.slot[token];
    if (slot < 0) continue;
    const uint16_t* from = kind ? static_cast<const uint16_t*>(p.fresh.value) + token * p.fresh.value_token
                                : static_cast<const uint16_t*>(p.fresh.key) + token * p.fresh.key_token;
    uint8_t* to = p.pages.recent + slot / RECENT_TOKENS * p.pages.recent_page + h * p.pages.recent_head +
                  (kind * RECENT_TOKENS + slot % RECENT_TOKENS) * D * 2;
    reinterpret_cast<uint4*>(to)[x] = reinterpret_cast<const uint4*>(from + h * D)[x];
  }
}

template <int D, bool BF16>
__global__ void __launch_bounds__(2 * D) seal_kernel(const __grid_constant__ Params p) {
  __shared__ __align__(16) Scratch<D> scratch;
  launch_dependents();
  if (blockIdx.x >= p.seal_blocks) return store<D>(p, blockIdx.x - p.seal_blocks);
  const int work = p.header->seals * p.pages.heads;
  for (int i = blockIdx.x; i < work; i += p.seal_blocks) {
    const Seal s = p.seal[i / p.pages.heads];
    const int h = i % p.pages.heads;
    int page[4];
#pragma unroll
    for (int j = 0; j < 4; j++)
      page[j] = s.start + j * RECENT_TOKENS < s.computed
                    ? p.step.recent_table[s.request * p.step.recent_stride + s.start / RECENT_TOKENS + j]
                    : 0;
    const int id = p.step.sealed_table[s.request * p.step.sealed_stride + s.start / BLOCK];
    uint8_t* out = p.pages.sealed + id * p.pages.sealed_page + h * p.pages.sealed_head;
    if (threadIdx.x < D) seal_keys<D, BF16>(p, s, h, page, out, scratch);
    else seal_values<D, BF16>(p, s, h, page, out, scratch);
    __syncthreads();
  }
}

template <int D, bool BF16>
void launch(const Params& p, cudaStream_t stream) {
  const int store_blocks = (p.tokens + p.tokens_a_block - 1) / p.tokens_a_block;
  seal_kernel<D, BF16><<<p.seal_blocks + store_blocks, 2 * D, 0, stream>>>(p);
  check_launch("store_and_seal");
}

}  // namespace

void store_and_seal(const Pages& pages, const NewTokens& fresh, const StepTables& step, const Plan& plan,
                    cudaStream_t stream) {
  const int most = plan.max_seals * pages.heads;
  const Params p{pages, fresh, step, plan.header, plan.seal, plan.slot,
                 plan.tokens, most < 256 ? most : 256, plan.tokens > 1024 ? 16 : 2};
  if (pages.dim == 64) pages.bf16 ? launch<64, true>(p, stream) : launch<64, false>(p, stream);
  else pages.bf16 ? launch<128, true>(p, stream) : launch<128, false>(p, stream);
}

}  // namespace s4kv
