// dequant_context: a chunk of each request's context, as its queries see it, into plain [T, H, D].
#include "hadamard.cuh"
#include "launch.h"
#include "layout.cuh"
#include "plan.cuh"

namespace s4kv {
namespace {

struct Params {
  Pages pages;
  ContextChunk chunk;
  StepTables step;
};

template <bool BF16>
DEV uint16_t from_float(float v) {
  if constexpr (BF16) return __bfloat16_as_ushort(__float2bfloat16_rn(v));
  return __half_as_ushort(__float2half_rn(v));
}

DEV float finite(float v) { return fminf(fmaxf(v, -3.40282347e38f), 3.40282347e38f); }

// Thread c: keys of channel c.
template <int D, bool BF16>
DEV void keys(const uint8_t* page, const int16_t* slot_channel, uint16_t* out, long stride, int first, int valid) {
  using L = Layout<D>;
  const int c = threadIdx.x;
  int slot[2] = {-1, -1};
  for (int i = 0; i < L::SLOTS; i++)
    if (slot_channel[i] == c) (slot[0] < 0 ? slot[0] : slot[1]) = i;
  int code[2], shift[2];  // first word and bit of each slot
  float scale[2];
#pragma unroll
  for (int k = 0; k < 2; k++) {
    const int s = max(slot[k], 0);
    const int kc = s < D ? s / 32 * 2 + (s >> 2 & 1) : L::DCHUNKS, t = s < D ? s >> 3 & 3 : s >> 2 & 3;
    code[k] = kc * 128 + t * 4, shift[k] = nibble_shift(0, s & 3);
    scale[k] = slot[k] < 0 ? 0.f : __half2float(reinterpret_cast<const __half*>(page + L::KEY_SCALE)[s]);
  }
  const float offset = __half2float(reinterpret_cast<const __half*>(page + L::KEY_OFFSET)[c]);
  const float power = power_of_two((int8_t)page[L::EXPONENTS]);
  const uint32_t* words = reinterpret_cast<const uint32_t*>(page + L::KEY_CODE);
  for (int token = first; token < valid; token++) {
    const int at = (token & 7) * 16 + (token >> 4), up = token >> 1 & 4;
    float v = offset;
#pragma unroll
    for (int k = 0; k < 2; k++) v = __fadd_rn(v, __fmul_rn((float)(words[code[k] + at] >> (shift[k] + up) & 15), scale[k]));
    out[token * stride + c] = from_float<BF16>(finite(v * power));
  }
}

// A warp a token at a time.
template <int D, bool BF16>
DEV void values(const uint8_t* page, uint16_t* out, long stride, int first, int valid) {
  using L = Layout<D>;
  constexpr int N = D / 32;
  const int lane = threadIdx.x & 31, warp = (threadIdx.x - D) >> 5;
  const float power = power_of_two((int8_t)page[L::EXPONENTS + 1]);
  const uint32_t* words = reinterpret_cast<const uint32_t*>(page + L::VALUE_CODE);
  for (int token = first + warp; token < valid; token += D / 32) {
    const int in_step = token & 15, t = in_step >> 1 & 3, j = (in_step & 1) + (in_step >> 3) * 2;
    const float scale = __half2float(reinterpret_cast<const __half*>(page + L::VALUE_SCALE)[value_scale_index(token)]);
    const float offset = __half2float(reinterpret_cast<const __half*>(page + L::VALUE_OFFSET)[value_scale_index(token)]);
    float v[N];
#pragma unroll
    for (int i = 0; i < N; i++) {
      const int c = lane * N + i, tile = c >> 4;
      const uint32_t word = words[(((token >> 4) * (D / 64) + (tile >> 2)) * 32 + (c & 7) * 4 + t) * 4 + (tile & 3)];
      v[i] = __fadd_rn(__fmul_rn((float)(word >> nibble_shift(c >> 3 & 1, j) & 15), scale), offset);
    }
    hadamard(v, lane);
#pragma unroll
    for (int i = 0; i < N; i++) out[token * stride + lane * N + i] = from_float<BF16>(finite(v[i] * (1.f / D) * power));
  }
}

// Thread block: 64 tokens of one head.
template <int D, bool BF16>
__global__ void __launch_bounds__(2 * D) dequant_kernel(const __grid_constant__ Params p) {
  using L = Layout<D>;
  __shared__ __align__(16) uint8_t page[L::BYTES];
  const int lane = threadIdx.x & 31, h = blockIdx.y;
  // Which request and which of its tiles: every warp scans the requests.
  int request = -1, tile = 0, before = 0;
  for (int base = 0; base < p.step.requests; base += 32) {
    const int i = base + lane;
    const int mine = i < p.step.requests ? (p.chunk.rows[i + 1] - p.chunk.rows[i] + BLOCK - 1) / BLOCK : 0;
    int sum = mine;
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
      const int v = __shfl_up_sync(0xffffffffu, sum, d);
      if (lane >= d) sum += v;
    }
    const uint32_t found = __ballot_sync(0xffffffffu, before + sum > (int)blockIdx.x);
    if (found) {
      const int k = __ffs(found) - 1;
      request = base + k;
      tile = blockIdx.x - before - __shfl_sync(0xffffffffu, sum - mine, k);
      break;
    }
    before += __shfl_sync(0xffffffffu, sum, 31);
  }
  if (request < 0) return;
  const int row = p.chunk.rows[request] + tile * BLOCK, start = p.chunk.start[request] + tile * BLOCK;
  const int valid = min(BLOCK, p.chunk.rows[request + 1] - row);
  if (row + valid > p.chunk.max_tokens) return;
  const int computed = p.step.seq_lens[request] - (p.step.query_start[request + 1] - p.step.query_start[request]);
  const int* recent_row = p.step.recent_table + request * p.step.recent_stride;
  int end = sealed_tokens(computed);
  if (end + BLOCK <= computed && recent_row[max(end, SINKS) / RECENT_TOKENS] == 0) end += BLOCK;

  const long stride = p.pages.heads * D;
  uint16_t* key = static_cast<uint16_t*>(p.chunk.key) + row * stride + h * D;
  uint16_t* value = static_cast<uint16_t*>(p.chunk.value) + row * stride + h * D;
  const bool sealed = start < end;
  const int plain = sealed ? (start == 0 ? min(SINKS, valid) : 0) : valid;  // tokens read from recent pages
  for (int i = threadIdx.x; i < 2 * plain * (D / 8); i += 2 * D) {
    const int kind = i & 1, x = i / 2 % (D / 8), token = i / 2 / (D / 8), position = start + token;
    const uint8_t* from = p.pages.recent + recent_row[position / RECENT_TOKENS] * p.pages.recent_page +
                          h * p.pages.recent_head + (kind * RECENT_TOKENS + position % RECENT_TOKENS) * D * 2;
    reinterpret_cast<uint4*>((kind ? value : key) + token * stride)[x] = reinterpret_cast<const uint4*>(from)[x];
  }
  if (!sealed) return;
  const int id = p.step.sealed_table[request * p.step.sealed_stride + start / BLOCK];
  const uint4* from = reinterpret_cast<const uint4*>(p.pages.sealed + id * p.pages.sealed_page + h * p.pages.sealed_head);
  for (int i = threadIdx.x; i < L::BYTES / 16; i += 2 * D) reinterpret_cast<uint4*>(page)[i] = from[i];
  __syncthreads();
  if (threadIdx.x < D) keys<D, BF16>(page, p.pages.slot_channel + h * L::SLOTS, key, stride, plain, valid);
  else values<D, BF16>(page, value, stride, plain, valid);
}

template <int D, bool BF16>
void launch(const Params& p, cudaStream_t stream) {
  const dim3 grid((p.chunk.max_tokens + BLOCK - 1) / BLOCK + p.step.requests, p.pages.heads);
  dequant_kernel<D, BF16><<<grid, 2 * D, 0, stream>>>(p);
  check_launch("dequant_context");
}

}  // namespace

void dequant_context(const Pages& pages, const ContextChunk& chunk, const StepTables& step, cudaStream_t stream) {
  const Params p{pages, chunk, step};
  if (pages.dim == 64) pages.bf16 ? launch<64, true>(p, stream) : launch<64, false>(p, stream);
  else pages.bf16 ? launch<128, true>(p, stream) : launch<128, false>(p, stream);
}

}  // namespace s4kv
