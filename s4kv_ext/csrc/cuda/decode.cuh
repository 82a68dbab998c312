// Decode attention: sealed and recent pages of all requests, 1 to 8 query tokens each.
//
// The pages of all (request, head group) rows are one sequence, cut into equal shares, one a thread
// block (plan.cu). In a block, page lanes take turns at its pages; each has a ring of page buffers
// in shared memory that the copy engine fills ahead. A page lane is one warp, or several that read
// the same page with different query rows. At the end of a row the block's lanes are summed; if
// other blocks share the row, the last of them to arrive sums the blocks.
#pragma once
#include "decode_math.cuh"
#include "launch.h"
#include "plan.cuh"

namespace s4kv {

struct DecodeParams {
  Pages pages;
  Queries q;
  StepTables step;
  const Header* header;
  const Request* request;
  const Share* share;
  int group, head_parts, tile_warps, warps, stages;
  float scale;  // softmax scale * log2(e)
};

constexpr int decode_max_warps(int tiles) { return tiles == 1 ? 12 : 8; }

// Floats of a partial result: value sums [D][8] of each tile, then reference and sum [2][8].
__host__ __device__ inline long partial_floats(int D, int head_parts, int tiles) {
  return (long)head_parts * tiles * (D * 8 + 16);
}
__host__ __device__ inline int decode_shared(int page_bytes, int warps, int tile_warps, int tiles, int stages) {
  const int lanes = warps / tile_warps;
  return lanes * stages * (page_bytes + 8) + warps * tiles * 64 + lanes * 4 + 16;
}

template <int D, bool BF16, int NT>
__global__ void __launch_bounds__(decode_max_warps(NT) * 32, 1) decode_kernel(const __grid_constant__ DecodeParams P) {
  using L = Layout<D>;
  extern __shared__ __align__(128) uint8_t memory[];
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, t = lane & 3;
  const int tile_warps = P.tile_warps, head_parts = P.head_parts, stages = P.stages;
  const int page_lanes = P.warps / tile_warps;               // of all heads
  const int tile = warp % tile_warps, page_lane = warp / tile_warps;
  const int part = page_lane % head_parts, step = page_lanes / head_parts;  // every step-th page is ours
  const int head_groups = P.pages.heads / head_parts, tiles = tile_warps * NT;

  uint8_t* ring = memory + page_lane * stages * L::BYTES;
  uint64_t* full = reinterpret_cast<uint64_t*>(memory + page_lanes * stages * L::BYTES) + page_lane * stages;
  float* s_top = reinterpret_cast<float*>(memory + page_lanes * stages * (L::BYTES + 8));  // [warps][NT * 8]
  float* s_sum = s_top + P.warps * NT * 8;
  int* s_held = reinterpret_cast<int*>(s_sum + P.warps * NT * 8);  // [page_lanes]
  int* s_last = s_held + page_lanes;

  const Share* share = P.share + blockIdx.x;
  const int4 head = *reinterpret_cast<const int4*>(share);
  Request info = share->info;
  const int first_page = lane < FIRST_PAGES ? share->page[lane] : 0;
  const int total = P.header->pages, shares = P.header->shares;
  const int n = head.w;  // pages of this block; all positions below count from its first
  if (n == 0) return;

  // The copying side runs `stages` pages ahead of the computing side.
  int p_at = page_lane / head_parts, p_request = head.x, p_group = head.y, p_start = -head.z, p_id = 0;
  Request p_info = info;
  auto locate = [&]() {
    if (p_at >= n) return;
    for (int count; p_at >= p_start + (count = total_pages(p_info));) {
      p_start += count;
      if (++p_group == head_groups) {
        p_group = 0;
        do p_info = P.request[++p_request]; while (total_pages(p_info) == 0);
      }
    }
    if (p_at < FIRST_PAGES) {
      p_id = __shfl_sync(0xffffffffu, first_page, p_at);
    } else {
      const int at = p_at - p_start, recent = at - sealed_pages(p_info);
      p_id = recent < 0 ? P.step.sealed_table[p_request * P.step.sealed_stride + at]
                        : P.step.recent_table[p_request * P.step.recent_stride + s4kv::recent_page(p_info, recent)];
    }
  };
  auto copy_next = [&](int stage) {
    if (p_at >= n) return;
    const int recent = p_at - p_start - sealed_pages(p_info), h = p_group * head_parts + part;
    uint8_t* dst = ring + stage * L::BYTES;
    uint64_t* bar = full + stage;
    if (recent < 0) {
      const uint8_t* src = P.pages.sealed + p_id * P.pages.sealed_page + h * P.pages.sealed_head;
      // A request that has just hit the cache may read pages that this very step seals.
      if (P.q.overlap && (p_info.queries & FRESH)) wait_for_previous();
#if S4KV_BULK
      if (tile == 0 && lane == 0) expect_bytes(bar, L::BYTES), bulk_copy(dst, src, L::BYTES, bar);
#else
      for (int i = (tile * 32 + lane) * 16; i < L::BYTES; i += tile_warps * 512) copy16(dst + i, src + i);
#endif
    } else {
      const uint8_t* src = P.pages.recent + p_id * P.pages.recent_page + h * P.pages.recent_head;
      const int valid = min(RECENT_TOKENS, p_info.seq_len - RECENT_TOKENS * s4kv::recent_page(p_info, recent));
      if (P.q.overlap) wait_for_previous();
#if S4KV_BULK
      if (tile == 0) {
        if (lane == 0) expect_bytes(bar, valid * 4 * D);
        __syncwarp();
        if ((lane & 15) < valid) bulk_copy(dst + lane * L::RECENT_ROW, src + lane * 2 * D, 2 * D, bar);
      }
#else
      for (int i = tile * 32 + lane; i < 32 * (D / 8); i += tile_warps * 32) {
        const int row = i / (D / 8), at = i % (D / 8) * 16;
        if ((row & 15) < valid) copy16(dst + row * L::RECENT_ROW + at, src + row * 2 * D + at);
      }
#endif
    }
#if !S4KV_BULK
    copies_arrive(bar);
#endif
    p_at += step;
    locate();
  };
  if (tid < page_lanes * stages)
    barrier_init(reinterpret_cast<uint64_t*>(memory + page_lanes * stages * L::BYTES) + tid,
                 S4KV_BULK ? 1 : tile_warps * 32);
  fence_barrier_init();
  __syncthreads();
  locate();
  for (int i = 0; i < stages; i++) copy_next(i);

  int at = page_lane / head_parts, request = head.x, group = head.y, start = -head.z, stage = 0;
  uint32_t parity = 0;
  while (true) {
    const int count = total_pages(info), end = min(start + count, n), h = group * head_parts + part;
    const int rows = (info.queries & 0xffff) * P.group;
    const int sealed_end = min(start + sealed_pages(info), end);
    State<D, NT> st;
    clear(st);
    int held = -1;
    const uint16_t* q_row[NT];
    bool q_valid[NT];
#pragma unroll
    for (int n_ = 0; n_ < NT; n_++) {
      const int row = (tile * NT + n_) * 8 + g;
      q_valid[n_] = row < rows;
      const int r = q_valid[n_] ? row : 0;
      q_row[n_] = reinterpret_cast<const uint16_t*>(P.q.query) + (info.query_start + r / P.group) * P.q.query_token +
                  (h * P.group + r % P.group) * D;
    }
    auto release = [&](bool refill) {  // the stage just read
      if (tile_warps == 1) __syncwarp(); else named_barrier(1 + page_lane, tile_warps * 32);
      if (refill) copy_next(stage); else held = stage;
      if (++stage == stages) stage = 0, parity ^= 1;
    };
    uint32_t query[NT][L::DCHUNKS][2];
    auto load_query = [&]() {
#pragma unroll
      for (int n_ = 0; n_ < NT; n_++)
#pragma unroll
        for (int kc = 0; kc < L::DCHUNKS; kc++) {
          const uint2 v = *reinterpret_cast<const uint2*>(q_row[n_] + L::first_slot(kc, t));
          query[n_][kc][0] = q_valid[n_] ? v.x : 0, query[n_][kc][1] = q_valid[n_] ? v.y : 0;
        }
    };
    load_query();
    if (at < sealed_end) {
      // Query rows in float16, scaled by a power of two to [256, 512): times a key scale that is
      // at most 4.3 (keys of a page are brought below 32), and exact for all but tiny elements.
      uint32_t slot_query[NT][L::KCHUNKS][2];
      float scale[NT][2];
#pragma unroll
      for (int n_ = 0; n_ < NT; n_++) {
        float high = 0;
#pragma unroll
        for (int kc = 0; kc < L::DCHUNKS; kc++)
#pragma unroll
          for (int j = 0; j < 2; j++) {
            const float2 v = unpack2<BF16>(query[n_][kc][j]);
            high = fmaxf(high, fmaxf(fabsf(v.x), fabsf(v.y)));
          }
        high = fmaxf(high, shfl_xor(high, 1)), high = fmaxf(high, shfl_xor(high, 2));
        const int e = max((__float_as_int(high) >> 23) - 127 - 8, -100);
        const float down = power_of_two(-e), row_scale = P.scale * power_of_two(e);
        scale[n_][0] = __shfl_sync(0xffffffffu, row_scale, 8 * t);
        scale[n_][1] = __shfl_sync(0xffffffffu, row_scale, 8 * t + 4);
#pragma unroll
        for (int kc = 0; kc < L::KCHUNKS; kc++) {
          const uint2 c4 = *reinterpret_cast<const uint2*>(P.pages.slot_channel + h * L::SLOTS + L::first_slot(kc, t));
          const uint32_t channel[4] = {c4.x & 0xffff, c4.x >> 16, c4.y & 0xffff, c4.y >> 16};
          float v[4];
#pragma unroll
          for (int j = 0; j < 4; j++) {
            const uint32_t raw = q_row[n_][channel[j] & (D - 1)];
            v[j] = q_valid[n_] && channel[j] < D ? unpack2<BF16>(raw).x * down : 0.f;
          }
          slot_query[n_][kc][0] = pack2<false>(v[0], v[1]), slot_query[n_][kc][1] = pack2<false>(v[2], v[3]);
        }
#pragma unroll
        for (int kc = 0; kc < L::DCHUNKS; kc++)
#pragma unroll
          for (int j = 0; j < 2; j++) {
            const float2 v = unpack2<BF16>(query[n_][kc][j]);
            query[n_][kc][j] = pack2<false>(v.x * down, v.y * down);
          }
      }
      for (; at < sealed_end; at += step) {
        barrier_wait(full + stage, parity);
        sealed_page<D, NT>(ring + stage * L::BYTES, lane, at == start, slot_query, query, scale, st);
        release(at + step < end);
      }
      finish_sealed<D, NT>(lane, st);
      if (at < end) load_query();
    }
    if (at < end) {
      int last[NT][2];
#pragma unroll
      for (int n_ = 0; n_ < NT; n_++)
#pragma unroll
        for (int c = 0; c < 2; c++) {
          const int row = (tile * NT + n_) * 8 + 2 * t + c;
          last[n_][c] = info.seq_len - 1 - (row < rows ? (rows - 1 - row) / P.group : 0);
        }
      for (; at < end; at += step) {
        const int first_token = RECENT_TOKENS * s4kv::recent_page(info, at - start - sealed_pages(info));
        barrier_wait(full + stage, parity);
        recent_page<D, BF16, NT>(ring + stage * L::BYTES, lane, first_token,
                                 min(RECENT_TOKENS, info.seq_len - first_token), last, query, P.scale, st);
        release(at + step < end);
      }
    }

    // Sum over the block's lanes. First the common reference of each query row ...
    if (lane == 0 && tile == 0) s_held[page_lane] = held;
    if (lane < 4)
#pragma unroll
      for (int n_ = 0; n_ < NT; n_++)
        *reinterpret_cast<float2*>(s_top + (warp * NT + n_) * 8 + 2 * t) = make_float2(st.top[n_][0], st.top[n_][1]);
    __syncthreads();
#pragma unroll
    for (int n_ = 0; n_ < NT; n_++) {
      float2 top = make_float2(NEVER, NEVER);
      for (int k = 0; k < step; k++) {
        const float2 v = *reinterpret_cast<const float2*>(
            s_top + (((k * head_parts + part) * tile_warps + tile) * NT + n_) * 8 + 2 * t);
        top.x = fmaxf(top.x, v.x), top.y = fmaxf(top.y, v.y);
      }
#pragma unroll
      for (int c = 0; c < 2; c++) {
        const float f = exp2_approx(st.top[n_][c] - (c ? top.y : top.x));
        float sum = st.sum[n_][c] * f;
#pragma unroll
        for (int d = 4; d < 32; d <<= 1) sum += shfl_xor(sum, d);
        if (lane < 4) s_sum[(warp * NT + n_) * 8 + 2 * t + c] = sum;
#pragma unroll
        for (int i = 0; i < D / 16; i++) st.o[n_][i][c] *= f, st.o[n_][i][c + 2] *= f;
      }
    }
    // ... then the value sums, two tiles of a lane at a time through the stage it read last.
    const long low = (long)total * blockIdx.x / shares, row_start = low + start, row_end = row_start + count;
    const int first_share = (int)(((row_start + 1) * shares - 1) / total), last_share = (int)((row_end * shares - 1) / total);
    const bool whole = first_share == last_share;
    const long stride = partial_floats(D, head_parts, tiles);
    // A share has at most two rows in common with others: the one it starts in, and the one it ends in.
    auto partial = [&](int k) {
      const bool second = k == first_share && (long)total * k / shares < row_start;
      return P.q.partial + (2 * k + second) * stride;
    };
    float* mine = partial(blockIdx.x);
    auto store = [&](int head_part, int row, int channel, float v) {
      if (row >= rows) return;
      const long to = (info.query_start + row / P.group) * P.q.out_token +
                      ((group * head_parts + head_part) * P.group + row % P.group) * D + channel;
      if constexpr (BF16) static_cast<__nv_bfloat16*>(P.q.out)[to] = __float2bfloat16(v);
      else static_cast<__half*>(P.q.out)[to] = __float2half(v);
    };
    auto sum_of = [&](int head_part, int row) {
      float v = 0;
      for (int k = 0; k < step; k++)
        v += s_sum[((k * head_parts + head_part) * tile_warps + row / (8 * NT)) * NT * 8 + row % (8 * NT)];
      return v;
    };
    if (P.q.overlap) wait_for_previous();  // only now may outputs and workspace be written
    for (int round = 0; round < (tiles + 1) / 2; round++) {
      if (held >= 0)
#pragma unroll
        for (int n_ = 0; n_ < NT; n_++)
          if ((tile * NT + n_) / 2 == round) {
            float* to = reinterpret_cast<float*>(ring + held * L::BYTES) + ((tile * NT + n_) & 1) * D * 8;
#pragma unroll
            for (int i = 0; i < D / 16; i++) {
              *reinterpret_cast<float2*>(to + (i * 16 + g) * 8 + 2 * t) = make_float2(st.o[n_][i][0], st.o[n_][i][1]);
              *reinterpret_cast<float2*>(to + (i * 16 + 8 + g) * 8 + 2 * t) = make_float2(st.o[n_][i][2], st.o[n_][i][3]);
            }
          }
      __syncthreads();
      const int in_round = min(2, tiles - 2 * round);
      for (int i = tid; i < head_parts * in_round * D * 8; i += P.warps * 32) {
        const int inner = i % (D * 8), which = i / (D * 8) % in_round, head_part = i / (D * 8 * in_round);
        float v = 0;
        for (int k = 0; k < step; k++) {
          const int from = k * head_parts + head_part, kept = s_held[from];
          if (kept >= 0)
            v += reinterpret_cast<const float*>(memory + (from * stages + kept) * L::BYTES)[which * D * 8 + inner];
        }
        const int in_tile = 2 * round + which, row = in_tile * 8 + (inner & 7);
        if (whole) store(head_part, row, inner >> 3, __fdividef(v, sum_of(head_part, row)));
        else mine[(head_part * tiles + in_tile) * (D * 8 + 16) + inner] = v;
      }
      fence_async_proxy();
      __syncthreads();
    }
    if (!whole) {
      for (int i = tid; i < head_parts * tiles * 8; i += P.warps * 32) {
        const int head_part = i / (tiles * 8), row = i % (tiles * 8);
        float top = NEVER;
        for (int k = 0; k < step; k++)
          top = fmaxf(top, s_top[((k * head_parts + head_part) * tile_warps + row / (8 * NT)) * NT * 8 + row % (8 * NT)]);
        float* to = mine + (head_part * tiles + row / 8) * (D * 8 + 16) + D * 8 + row % 8;
        to[0] = top, to[8] = sum_of(head_part, row);
      }
      __syncthreads();
      int* arrivals = P.q.arrivals + request * head_groups + group;
      if (tid == 0) {
        __threadfence();
        const int before = atomicAdd(arrivals, 1);
        *s_last = before == last_share - first_share;
        if (*s_last) *arrivals = 0, __threadfence();
      }
      __syncthreads();
      if (*s_last) {
        for (int i = tid; i < head_parts * tiles * D * 8; i += P.warps * 32) {
          const int inner = i % (D * 8), in_tile = i / (D * 8) % tiles, head_part = i / (D * 8 * tiles);
          const int row = in_tile * 8 + (inner & 7), at_ = (head_part * tiles + in_tile) * (D * 8 + 16);
          if (row >= rows) continue;
          float top = NEVER, v = 0, sum = 0;
#pragma unroll 4
          for (int k = first_share; k <= last_share; k++)
            top = fmaxf(top, __ldcg(partial(k) + at_ + D * 8 + (inner & 7)));
#pragma unroll 4
          for (int k = first_share; k <= last_share; k++) {
            const float* from = partial(k) + at_;
            const float f = exp2_approx(__ldcg(from + D * 8 + (inner & 7)) - top);
            v += f * __ldcg(from + inner), sum += f * __ldcg(from + D * 8 + 8 + (inner & 7));
          }
          store(head_part, row, inner >> 3, __fdividef(v, sum));
        }
      }
    }
    if (end >= n) break;
    if (held >= 0) copy_next(held);
    start += count;
    if (++group == head_groups) {
      group = 0;
      do info = P.request[++request]; while (total_pages(info) == 0);
    }
  }
}

}  // namespace s4kv
