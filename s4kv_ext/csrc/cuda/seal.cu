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

constexpr int THREADS = 512, WARPS = THREADS / 32;
constexpr int RANGES = 9;
constexpr uint16_t HIGH = 1 << 8, UNUSED = 1 << 9;

template <int D>
struct KeyScratch {
  static constexpr int PARTS = THREADS / D, ROW = BLOCK + 4;  // threads a channel; bytes, padded
  uint8_t code[D * ROW];  // [channel][token]
  uint16_t raw[BLOCK][D];
  float low[PARTS][D], high[PARTS][D];
  unsigned error[RANGES][D];
  __half scale[D];
  int slots[D];           // of each channel
  uint16_t slot[D + 16];  // channel | HIGH | UNUSED
  float top[WARPS];
};
template <int D>
struct ValueScratch {
  static constexpr int ROW = D + 4;
  uint8_t code[BLOCK * ROW];  // [token][channel]
  float top[WARPS];
};
template <int D>
union Scratch {
  KeyScratch<D> key;
  ValueScratch<D> value;
};

// Exponent that brings `top` into [16, 32).
DEV int exponent_of(float top) { return top > 0 ? max((__float_as_int(top) >> 23) - 131, MIN_EXPONENT) : 0; }

// Rarely needed, and long when inlined.
__device__ __noinline__ float rounded_quotient(float x, float y) { return rintf(__fdiv_rn(x, y)); }

// Rounds (x - offset) / scale as a correctly rounded division would; `inverse` is 1 / scale. The
// product errs by less than 1e-4, so only near a tie is the division itself needed.
DEV float code_of(float x, float offset, float scale, float inverse, float steps) {
  const float d = __fsub_rn(x, offset), y = d * inverse;
  float r = rintf(y);
  if (fabsf(fabsf(y - r) - 0.5f) < 1e-4f) r = rounded_quotient(d, scale);
  return scale > 0 ? fminf(fmaxf(r, 0.f), steps) : 0.f;
}

// A range from its least to its largest value, of which quantize._choose_range tries nine variants.
struct Ends {
  float low, high, steps, step;
  DEV Ends(float low, float high, float steps) : low(low), high(high), steps(steps) {
    step = __fdiv_rn(__fsub_rn(high, low), steps);
  }
};
struct Range {
  __half offset, scale;
  float offset_f, scale_f, inverse;

  DEV Range(const Ends& e, int i) {
    const float a = i < 3 ? 0.f : i < 6 ? -0.3f : 0.3f, b = i % 3 == 0 ? 0.f : i % 3 == 1 ? -0.3f : 0.3f;
    offset = __float2half_rd(__fadd_rn(e.low, __fmul_rn(a, e.step)));
    offset_f = __half2float(offset);
    scale = __float2half_ru(__fdiv_rn(__fsub_rn(__fadd_rn(e.high, __fmul_rn(b, e.step)), offset_f), e.steps));
    scale_f = __half2float(scale);
    inverse = scale_f > 0 ? __frcp_rn(scale_f) : 0.f;
  }
  DEV Range of_lane(int lane) const {
    Range r = *this;
    r.offset = __shfl_sync(0xffffffffu, offset, lane), r.scale = __shfl_sync(0xffffffffu, scale, lane);
    r.offset_f = __half2float(r.offset), r.scale_f = __half2float(r.scale);
    r.inverse = __shfl_sync(0xffffffffu, inverse, lane);
    return r;
  }
  // Squared error of x in units of 2**-20. Near a tie either code errs alike, so the product does. Adding 2**23 rounds
  // to an integer, and shows it in the last bits: rintf and conversions run at an eighth of the rate.
  DEV unsigned error(float x, float steps, float unit, float weight) const {
    const float d = __fsub_rn(x, offset_f), y = fminf(fmaxf(__fmul_rn(d, inverse), 0.f), steps);
    const float code = __fsub_rn(__fadd_rn(y, 0x1p23f), 0x1p23f);
    const float u = __fmul_rn(__fmaf_rn(-code, scale_f, d), unit);  // code * scale is exact
    return __float_as_uint(__fmaf_rn(fminf(__fmul_rn(__fmul_rn(u, u), weight), 1.f), 0x1p20f, 0x1p23f)) - 0x4b000000u;
  }
};

DEV float block_max(float v, float* scratch) {
  v = warp_max(v);
  if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = v;
  __syncthreads();
  return warp_max(scratch[threadIdx.x & (WARPS - 1)]);
}

// The block's four recent pages; only those with tokens older than the step are looked up.
struct OldPages {
  int id[4];
};
DEV OldPages old_pages(const Params& p, const Seal& s) {
  OldPages old;
#pragma unroll
  for (int j = 0; j < 4; j++)
    old.id[j] = s.start + j * RECENT_TOKENS < s.computed
                    ? p.step.recent_table[s.request * p.step.recent_stride + s.start / RECENT_TOKENS + j]
                    : 0;
  return old;
}

// Where token i of the block lies; kind 0: keys, 1: values. Token SINKS stands in for the sinks.
template <int D>
DEV const uint16_t* token_row(const Params& p, const Seal& s, int h, int i, int kind, const OldPages& old) {
  if (s.start == 0) i = max(i, SINKS);
  const int position = s.start + i;
  if (position >= s.computed) {
    const long row = s.query_start + position - s.computed;
    return kind ? static_cast<const uint16_t*>(p.fresh.value) + row * p.fresh.value_token + h * D
                : static_cast<const uint16_t*>(p.fresh.key) + row * p.fresh.key_token + h * D;
  }
  const int id = i < 32 ? (i < 16 ? old.id[0] : old.id[1]) : (i < 48 ? old.id[2] : old.id[3]);
  return reinterpret_cast<const uint16_t*>(p.pages.recent + id * p.pages.recent_page + h * p.pages.recent_head) +
         (kind * RECENT_TOKENS + i % RECENT_TOKENS) * D;
}

// Thread (part, channel): every PARTS-th of the channel's tokens.
template <int D, bool BF16>
DEV void seal_keys(const Params& p, const Seal& s, int h, uint8_t* out, KeyScratch<D>& m) {
  using L = Layout<D>;
  constexpr int PARTS = THREADS / D, TOKENS = BLOCK / PARTS;
  const int c = threadIdx.x % D, part = threadIdx.x / D;
  const int16_t* slot_channel = p.pages.slot_channel + h * L::SLOTS;
  const OldPages old = old_pages(p, s);
  if (part == 0) m.slots[c] = 0;
  for (int r = part; r < RANGES; r += PARTS) m.error[r][c] = 0;
  uint16_t raw[TOKENS];
#pragma unroll
  for (int i = 0; i < TOKENS; i++) raw[i] = token_row<D>(p, s, h, part * TOKENS + i, 0, old)[c];
  __syncthreads();
  for (int i = threadIdx.x; i < L::SLOTS; i += THREADS) {
    const int channel = slot_channel[i], before = i ? slot_channel[i - 1] : -1, after = i + 1 < L::SLOTS ? slot_channel[i + 1] : -1;
    if (channel >= 0) atomicAdd(&m.slots[channel], 1);
    m.slot[i] = channel < 0 ? UNUSED : channel | (channel == after && channel != before ? HIGH : 0);
  }
  float k[TOKENS], top = 0;
#pragma unroll
  for (int i = 0; i < TOKENS; i++) {
    m.raw[part * TOKENS + i][c] = raw[i];
    k[i] = to_float<BF16>(raw[i]), top = fmaxf(top, fabsf(k[i]));
  }
  const int e = exponent_of(block_max(top, m.top));
  const float power = power_of_two(-e);
  float low = INFINITY, high = -INFINITY;
#pragma unroll
  for (int i = 0; i < TOKENS; i++) k[i] = __fmul_rn(k[i], power), low = fminf(low, k[i]), high = fmaxf(high, k[i]);
  m.low[part][c] = low, m.high[part][c] = high;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < PARTS; i++) low = fminf(low, m.low[i][c]), high = fmaxf(high, m.high[i][c]);
  const int slots = m.slots[c];
  const float steps = slots == 0 ? 0.f : slots == 1 ? 15.f : 255.f;
  const Ends ends(low, high, fmaxf(steps, 1.f));
  const float unit = Range(ends, 0).inverse, middle = __fmul_rn(__fadd_rn(low, high), 0.5f);
  const float to_end = __fdiv_rn(__fmul_rn(unit, 2.f), ends.steps);
#pragma unroll 1
  for (int r = 0; r < RANGES; r++) {
    const Range range(ends, r);
    unsigned error = 0;
#pragma unroll
    for (int i = 0; i < TOKENS; i++) {
      const float z = __fmul_rn(__fsub_rn(k[i], middle), to_end);
      error += range.error(k[i], ends.steps, unit, __fadd_rn(__fmul_rn(z, z), 0.1f));
    }
    atomicAdd(&m.error[r][c], error);
  }
  __syncthreads();
  int chosen = 0;
#pragma unroll
  for (int r = 1; r < RANGES; r++)
    if (m.error[r][c] < m.error[chosen][c]) chosen = r;
  const Range range(ends, chosen);
#pragma unroll
  for (int i = 0; i < TOKENS; i += 4) {
    uint32_t four = 0;
#pragma unroll
    for (int j = 0; j < 4; j++) four |= (uint32_t)code_of(k[i + j], range.offset_f, range.scale_f, range.inverse, steps) << (8 * j);
    *reinterpret_cast<uint32_t*>(m.code + c * m.ROW + part * TOKENS + i) = four;
  }
  if (part == 0) {
    m.scale[c] = range.scale;
    __half stored = range.offset;
    if (slots == 0) {  // the mean, summed in token order
      float total = 0;
#pragma unroll 8
      for (int i = 0; i < BLOCK; i++) total = __fadd_rn(total, __fmul_rn(to_float<BF16>(m.raw[i][c]), power));
      stored = __float2half_rn(total * (1.f / BLOCK));
    }
    reinterpret_cast<__half*>(out + L::KEY_OFFSET)[c] = stored;
    if (c == 0) out[L::EXPONENTS] = (uint8_t)e;
    if (c < 15) reinterpret_cast<uint16_t*>(out + L::EXPONENTS)[1 + c] = 0;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < L::SLOTS; i += THREADS) {
    const uint16_t slot = m.slot[i];
    const __half v = slot & UNUSED ? __ushort_as_half(0) : m.scale[slot & 255];
    reinterpret_cast<__half*>(out + L::KEY_SCALE)[i] = slot & HIGH ? __hmul(v, __float2half_rn(16.f)) : v;
  }
  for (int i = threadIdx.x; i < L::KCHUNKS * 128; i += THREADS) {
    const int kc = i >> 7, g = i >> 4 & 7, t = i >> 2 & 3, tile = i & 3;
    uint32_t word = 0;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const uint16_t slot = m.slot[L::first_slot(kc, t) + j];
      const uint8_t* code = m.code + (slot & 255) * m.ROW + tile * 16 + g;
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const uint32_t v = code[8 * r];
        word |= (slot & UNUSED ? 0 : slot & HIGH ? v >> 4 : v & 15) << nibble_shift(r, j);
      }
    }
    reinterpret_cast<uint32_t*>(out + L::KEY_CODE)[i] = word;
  }
}

// A warp: four tokens; a lane: D / 32 neighbouring channels.
template <int D, bool BF16>
DEV void seal_values(const Params& p, const Seal& s, int h, uint8_t* out, ValueScratch<D>& m) {
  using L = Layout<D>;
  constexpr int N = D / 32, TOKENS = BLOCK / WARPS;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const OldPages old = old_pages(p, s);
  float v[TOKENS][N], top = 0;
#pragma unroll
  for (int i = 0; i < TOKENS; i++) load_floats<BF16>(v[i], token_row<D>(p, s, h, warp * TOKENS + i, 1, old) + lane * N);
#pragma unroll
  for (int i = 0; i < TOKENS; i++)
#pragma unroll
    for (int j = 0; j < N; j++) top = fmaxf(top, fabsf(v[i][j]));
  const int e = exponent_of(block_max(top, m.top));
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
    const Ends ends(low, high, 15.f);
    Range range(ends, lane < RANGES ? lane : 0);
    const float unit = __shfl_sync(0xffffffffu, range.inverse, 0);
    unsigned least = ~0u;
    int chosen = 0;
#pragma unroll 1
    for (int r = 0; r < RANGES; r++) {
      const Range other = range.of_lane(r);
      unsigned error = 0;
#pragma unroll
      for (int j = 0; j < N; j++) error += other.error(v[i][j], 15.f, unit, 1.f);
      error = __reduce_add_sync(0xffffffffu, error);
      if (error < least) least = error, chosen = r;
    }
    range = range.of_lane(chosen);
    const int token = warp * TOKENS + i;
    uint32_t codes = 0;
#pragma unroll
    for (int j = 0; j < N; j++) codes |= (uint32_t)code_of(v[i][j], range.offset_f, range.scale_f, range.inverse, 15.f) << (8 * j);
    if constexpr (N == 4) *reinterpret_cast<uint32_t*>(m.code + token * m.ROW + lane * 4) = codes;
    else *reinterpret_cast<uint16_t*>(m.code + token * m.ROW + lane * 2) = codes;
    if (lane == 0) {
      reinterpret_cast<__half*>(out + L::VALUE_SCALE)[value_scale_index(token)] = range.scale;
      reinterpret_cast<__half*>(out + L::VALUE_OFFSET)[value_scale_index(token)] = range.offset;
    }
  }
  if (threadIdx.x == 0) out[L::EXPONENTS + 1] = (uint8_t)e;
  __syncthreads();
  for (int i = threadIdx.x; i < 4 * (D / 64) * 128; i += THREADS) {
    const int kc = i / (D * 2), tile = (i >> 7) % (D / 64) * 4 + (i & 3), g = i >> 4 & 7, t = i >> 2 & 3;
    uint32_t word = 0;
#pragma unroll
    for (int j = 0; j < 4; j++)
#pragma unroll
      for (int r = 0; r < 2; r++)
        word |= (uint32_t)m.code[(kc * 16 + k_index(j, t)) * m.ROW + tile * 16 + r * 8 + g] << nibble_shift(r, j);
    reinterpret_cast<uint32_t*>(out + L::VALUE_CODE)[i] = word;
  }
}

template <int D>
DEV void store(const Params& p, int block) {
  const int first = block * p.tokens_a_block, heads = p.pages.heads;
  const int row_chunks = heads * (D / 8), chunks = 2 * row_chunks;  // of 16 bytes; keys, then values
  for (int i = threadIdx.x; i < p.tokens_a_block * chunks; i += THREADS) {
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
__global__ void __launch_bounds__(THREADS, 2) seal_kernel(const __grid_constant__ Params p) {
  __shared__ __align__(16) Scratch<D> scratch;
  if ((int)blockIdx.x >= p.seal_blocks) return store<D>(p, blockIdx.x - p.seal_blocks);
  const int heads = p.pages.heads;
  Seal s = p.seal[blockIdx.x / (2 * heads)];  // asked for together with their number
  const int work = p.header->seals * heads * 2;  // keys and values apart
  for (int i = blockIdx.x; i < work; i += p.seal_blocks) {
    if (i != (int)blockIdx.x) s = p.seal[i / (2 * heads)];
    const int h = i / 2 % heads;
    const int id = p.step.sealed_table[s.request * p.step.sealed_stride + s.start / BLOCK];
    uint8_t* out = p.pages.sealed + id * p.pages.sealed_page + h * p.pages.sealed_head;
    if (i & 1) seal_values<D, BF16>(p, s, h, out, scratch.value);
    else seal_keys<D, BF16>(p, s, h, out, scratch.key);
    __syncthreads();
  }
}

template <int D, bool BF16>
void launch(const Params& p, cudaStream_t stream) {
  const int store_blocks = (p.tokens + p.tokens_a_block - 1) / p.tokens_a_block;
  seal_kernel<D, BF16><<<p.seal_blocks + store_blocks, THREADS, 0, stream>>>(p);
  check_launch("store_and_seal");
}

}  // namespace

void store_and_seal(const Pages& pages, const NewTokens& fresh, const StepTables& step, const Plan& plan,
                    cudaStream_t stream) {
  const int most = plan.max_seals * pages.heads * 2;
  const Params p{pages, fresh, step, plan.header, plan.seal, plan.slot,
                 plan.tokens, most < 512 ? most : 512, plan.tokens > 1024 ? 16 : 4};
  if (pages.dim == 64) pages.bf16 ? launch<64, true>(p, stream) : launch<64, false>(p, stream);
  else pages.bf16 ? launch<128, true>(p, stream) : launch<128, false>(p, stream);
}

}  // namespace s4kv
