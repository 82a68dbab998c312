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

// Which shares a row of pages [start, start + count) is spread over.
struct Row {
  int first_share, last_share;
  bool first_is_second;  // the first share has the end of another row before it
  DEV bool whole() const { return first_share == last_share; }
  // A share has at most two rows in common with others: the one it starts in, and the one it ends in.
  DEV int second(int share) const { return share == first_share && first_is_second; }
};
// The last share that starts at or before `page`; share k starts at total * k / shares.
DEV int share_of(long page, int total, int shares) {
  const unsigned long x = (unsigned long)(page + 1) * shares - 1;
  return x >> 32 ? (int)(x / (unsigned)total) : (int)((uint32_t)x / (uint32_t)total);
}
DEV int share_start(int share, int total, int shares) {
  const unsigned long x = (unsigned long)total * share;
  return x >> 32 ? (int)(x / (unsigned)shares) : (int)((uint32_t)x / (uint32_t)shares);
}
DEV Row split_row(long low, int start, int count, int total, int shares) {
  Row r;
  r.first_share = share_of(low + start, total, shares), r.last_share = share_of(low + start + count - 1, total, shares);
  r.first_is_second = share_start(r.first_share, total, shares) < low + start;
  return r;
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
  const int low = share_start(blockIdx.x, total, shares);

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

    // Sum over the block's lanes: the common reference of each query row, then the value sums, two
    // tiles of a lane at a time through the page buffer that the lane read last.
    if (lane == 0 && tile == 0) s_held[page_lane] = held;
    if (lane < 4)
#pragma unroll
      for (int n_ = 0; n_ < NT; n_++)
        *reinterpret_cast<float2*>(s_top + (warp * NT + n_) * 8 + 2 * t) = make_float2(st.top[n_][0], st.top[n_][1]);
    __syncthreads();
#pragma unroll
    for (int n_ = 0; n_ < NT; n_++) {
      float2 top = make_float2(NEVER, NEVER);
#pragma unroll 4
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
    const Row row_at = split_row(low, start, count, total, shares);
    const long stride = partial_floats(D, head_parts, tiles);
    const int row8 = tid & 7, channel0 = tid >> 3, channels = P.warps * 4;  // a thread's row and every which channel
    auto store = [&](int head_part, int row, int channel, float v) {
      const long to = (info.query_start + row / P.group) * P.q.out_token +
                      ((group * head_parts + head_part) * P.group + row % P.group) * D + channel;
      if constexpr (BF16) static_cast<__nv_bfloat16*>(P.q.out)[to] = __float2bfloat16(v);
      else static_cast<__half*>(P.q.out)[to] = __float2half(v);
    };
    if (P.q.overlap) wait_for_previous();  // only now may outputs and workspace be written
    for (int round = 0; 2 * round < tiles; round++) {
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
      for (int head_part = 0; head_part < head_parts; head_part++)
        for (int in_tile = 2 * round; in_tile < min(2 * round + 2, tiles); in_tile++) {
          float* mine = P.q.partial + (2 * blockIdx.x + row_at.second(blockIdx.x)) * stride + (head_part * tiles + in_tile) * (D * 8 + 16);
          float sum = 0, top = NEVER;
#pragma unroll 4
          for (int k = 0; k < step; k++) {
            const int from = (((k * head_parts + head_part) * tile_warps + in_tile / NT) * NT + in_tile % NT) * 8 + row8;
            sum += s_sum[from], top = fmaxf(top, s_top[from]);
          }
          if (!row_at.whole() && channel0 == 0) mine[D * 8 + row8] = top, mine[D * 8 + 8 + row8] = sum;
          const float by = row_at.whole() ? __frcp_rn(sum) : 1.f;
          const int row = in_tile * 8 + row8;
          for (int c = channel0; c < D; c += 4 * channels) {
            float v[4] = {0, 0, 0, 0};
#pragma unroll 2
            for (int k = 0; k < step; k++) {
              const int from = k * head_parts + head_part, kept = s_held[from];
              if (kept < 0) continue;
              const float* o = reinterpret_cast<const float*>(memory + (from * stages + kept) * L::BYTES) + (in_tile & 1) * D * 8 + row8;
#pragma unroll
              for (int j = 0; j < 4; j++)
                if (c + j * channels < D) v[j] += o[(c + j * channels) * 8];
            }
#pragma unroll
            for (int j = 0; j < 4; j++)
              if (c + j * channels < D) {
                if (!row_at.whole()) mine[(c + j * channels) * 8 + row8] = v[j];
                else if (row < rows) store(head_part, row, c + j * channels, v[j] * by);
              }
          }
        }
      fence_async_proxy();
      __syncthreads();
    }
    if (held >= 0 && end < n) copy_next(held);
    if (!row_at.whole()) {
      int* arrivals = P.q.arrivals + request * head_groups + group;
      if (tid == 0) {
        __threadfence();
        const int before = atomicAdd(arrivals, 1);
        *s_last = before == row_at.last_share - row_at.first_share;
        if (*s_last) *arrivals = 0, __threadfence();
      }
      __syncthreads();
      if (*s_last) {
        // Lane (k % 4, row) looks after the weights of every fourth share, for all of its warp.
        const int shares_here = row_at.last_share - row_at.first_share + 1;
        for (int head_part = 0; head_part < head_parts; head_part++)
          for (int in_tile = 0; in_tile < tiles; in_tile++) {
            const int row = in_tile * 8 + row8;
            const float* from0 = P.q.partial + (head_part * tiles + in_tile) * (D * 8 + 16);
            auto from = [&](int k) {
              const int share_ = row_at.first_share + min(k, shares_here - 1);
              return from0 + (2 * share_ + row_at.second(share_)) * stride;
            };
            float top = NEVER, sum = 0;
#pragma unroll 4
            for (int k = lane >> 3; k < shares_here; k += 4) top = fmaxf(top, __ldcg(from(k) + D * 8 + row8));
            top = fmaxf(top, shfl_xor(top, 8)), top = fmaxf(top, shfl_xor(top, 16));
#pragma unroll 4
            for (int k = lane >> 3; k < shares_here; k += 4)
              sum += exp2_approx(__ldcg(from(k) + D * 8 + row8) - top) * __ldcg(from(k) + D * 8 + 8 + row8);
            sum += shfl_xor(sum, 8), sum += shfl_xor(sum, 16);
            const float by = __frcp_rn(sum);
            for (int c = channel0; c - (channel0 & 3) < D; c += 4 * channels) {  // as long as any of the warp has work
              float v[4] = {0, 0, 0, 0};
              for (int k = 0; k < shares_here; k += 16) {
                float weight[4], o[16][4];
#pragma unroll
                for (int i = 0; i < 16; i++)
#pragma unroll
                  for (int j = 0; j < 4; j++)
                    o[i][j] = k + i < shares_here && c + j * channels < D ? __ldcg(from(k + i) + (c + j * channels) * 8 + row8) : 0.f;
#pragma unroll
                for (int i = 0; i < 4; i++) {
                  const int mine = k + 4 * i + (lane >> 3);
                  weight[i] = mine < shares_here ? exp2_approx(__ldcg(from(mine) + D * 8 + row8) - top) : 0.f;
                }
#pragma unroll
                for (int i = 0; i < 16; i++) {
                  const float w = __shfl_sync(0xffffffffu, weight[i >> 2], (i & 3) * 8 + row8);
#pragma unroll
                  for (int j = 0; j < 4; j++) v[j] += w * o[i][j];
                }
              }
#pragma unroll
              for (int j = 0; j < 4; j++)
                if (c + j * channels < D && row < rows) store(head_part, row, c + j * channels, v[j] * by);
            }
          }
      }
    }
    if (end >= n) break;
    start += count;
    if (++group == head_groups) {
      group = 0;
      do info = P.request[++request]; while (total_pages(info) == 0);
    }
  }
}

}  // namespace s4kv
