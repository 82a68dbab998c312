// Decode attention: sealed and recent pages of all requests, 1 to 8 query tokens each.
//
// The pages of all rows (a row is one KV head of one request) are one sequence, cut into shares, one
// a thread block (plan.cu). In a block, one warp copies pages into a ring of buffers in shared
// memory; page lanes take turns at them. A page lane is one warp, or as many as it takes to work on
// all query rows of the same page. At the end of a row the block's lanes are summed; if other blocks
// have a part of the row, the last of them to arrive sums the blocks.
#pragma once
#include "decode_math.cuh"
#include "hadamard.cuh"
#include "launch.h"
#include "plan.cuh"

namespace s4kv {

struct DecodeParams {
  Pages pages;
  Queries q;
  StepTables step;
  const Request* request;
  const Share* share;
  int group, tile_warps, warps, stages;
  float scale;  // softmax scale * log2(e)
};

// Warps of a block, the copying one included: a multiple of 4, so that each of the four register
// files serves as few as possible. More than 7 warps with two tiles each need registers spilled;
// only 15 or 16 query heads with 8 query tokens come to that.
constexpr int decode_warps(int tiles, bool wide) { return tiles == 1 || wide ? 12 : 8; }

// Floats of a partial result: value sums [D][8] of each tile, then reference and sum [2][8].
__host__ __device__ inline long partial_floats(int D, int tiles) { return (long)tiles * (D * 8 + 16); }

// The part of a row that a block works on; page positions count from the block's first page.
struct Segment {
  Request info;
  int request, head;
  int start;  // of the row: negative if another block has its beginning
  int end;    // of the part
  int first_share, last_share;
  int16_t first_is_second;
  int16_t more;  // whether the block has another part after it
};
static_assert(sizeof(Segment) == 48);

// Shared memory, in this order: ring [lanes][stages], queries as they come, their fragments, slot
// channels, barriers, the rest.
struct SharedLayout {
  int query, fragments, slots, segment, full, empty, ready, top, sum, parked, exponent, weight, running, last, bytes;
};
constexpr int MERGE_AT_ONCE = 32;  // shares
__host__ __device__ inline SharedLayout shared_layout(int D, int page_bytes, int warps, int tile_warps, int tiles, int stages) {
  const int lanes = warps / tile_warps, buffers = lanes * stages, rows = tile_warps * tiles * 8;
  SharedLayout s;
  s.query = buffers * page_bytes;
  s.fragments = s.query + rows * D * 2;
  s.slots = s.fragments + rows / 8 * (D / 8 + 1) * 256;
  s.segment = s.slots + (D + 16) * 2;
  s.full = s.segment + 96;  // of this row and the next
  s.empty = s.full + buffers * 8;
  s.ready = s.empty + buffers * 8;  // queries and segment: filled, read
  s.top = s.ready + 16;             // [warps][tiles][8]
  s.sum = s.top + warps * tiles * 32;
  s.weight = s.sum + warps * tiles * 32;  // [MERGE_AT_ONCE][8]
  s.running = s.weight + MERGE_AT_ONCE * 32;  // [3][8]: reference, sum, factor
  s.parked = s.running + 96;              // [lanes]: where a lane's sums are, or -1
  s.exponent = s.parked + lanes * 4;      // [rows]
  s.last = s.exponent + rows * 4;
  s.bytes = s.last + 4;
  return s;
}
__host__ __device__ inline int decode_shared(int D, int warps, int tile_warps, int tiles, int stages) {
  return shared_layout(D, D == 64 ? Layout<64>::BYTES : Layout<128>::BYTES, warps, tile_warps, tiles, stages).bytes;
}

// A place in the sequence of rows.
struct Cursor {
  Request info;
  int request, head, start, pages;
  DEV void next(const Request* requests, int heads) {
    start += pages;
    if (++head == heads) {
      head = 0;
      do info = requests[++request]; while (total_pages(info) == 0);
    }
    pages = total_pages(info);
  }
};

// The copying warp. Lane i fills the ring of page lane i whenever a buffer is free; lane 31 brings
// the rows' queries. Nobody waits for anybody else.
template <int D>
DEV void copy_pages(const DecodeParams& P, const Share& mine, int first_page, uint8_t* memory, const SharedLayout& at_,
                    int lanes, int lane) {
  using L = Layout<D>;
  constexpr unsigned ALL = 0xffffffffu;
  const Share* share = P.share + blockIdx.x;
  const int n = mine.pages, heads = P.pages.heads;
  const bool publisher = lane == 31;
  int at = lane < lanes ? lane : n, id = 0;
  Cursor c{mine.info, mine.request, mine.head, -mine.first, total_pages(mine.info)};
  uint64_t* ready = reinterpret_cast<uint64_t*>(memory + at_.ready);
  uint64_t* full = reinterpret_cast<uint64_t*>(memory + at_.full) + lane * P.stages;
  uint64_t* empty = reinterpret_cast<uint64_t*>(memory + at_.empty) + lane * P.stages;
  uint8_t* ring = memory + lane * P.stages * L::BYTES;
  int stage = 0;
  uint32_t parity = 1;  // of a first pass through a ring
  bool publishing = publisher;
  auto find = [&] {  // page `at`: its row, and its id if it is not one of the first
    if (at >= n) return;
    while (at >= c.start + c.pages) c.next(P.request, heads);
    const int place = at - c.start, recent = place - sealed_pages(c.info);
    id = at == lane       ? first_page
         : at < FIRST_PAGES ? share->page[at]
         : recent < 0       ? P.step.sealed_table[c.request * P.step.sealed_stride + place]
                            : P.step.recent_table[c.request * P.step.recent_stride + recent_page(c.info, recent)];
  };
  if (!publisher) find();
  while (true) {
    if (publishing && barrier_test(ready + 1, parity)) {  // the previous row's queries have been read
      Segment* segment = reinterpret_cast<Segment*>(memory + at_.segment) + (parity ^ 1);
      parity ^= 1;
      const bool first = c.start <= 0;
      const int end = min(c.start + c.pages, n), queries = c.info.queries & 0xffff, token_bytes = P.group * D * 2;
      *segment = Segment{c.info, c.request, c.head, c.start, end, first ? mine.first_share : (int)blockIdx.x,
                  first ? mine.last_share : end < n ? (int)blockIdx.x : mine.end_last_share, (int16_t)(first ? mine.first_is_second : 1), (int16_t)(end < n)};
      uint8_t* dst = memory + at_.query;
      const uint8_t* src = static_cast<const uint8_t*>(P.q.query) + (c.info.query_start * P.q.query_token + c.head * P.group * D) * 2;
      const uint8_t* slots = reinterpret_cast<const uint8_t*>(P.pages.slot_channel + c.head * L::SLOTS);
#if S4KV_BULK
      expect_bytes(ready, queries * token_bytes + L::SLOTS * 2);
      for (int i = 0; i < queries; i++) bulk_copy(dst + i * token_bytes, src + i * P.q.query_token * 2, token_bytes, ready, false);
      bulk_copy(memory + at_.slots, slots, L::SLOTS * 2, ready, false);
#else
      for (int i = 0; i < queries; i++)
        for (int x = 0; x < token_bytes; x += 16) copy16(dst + i * token_bytes + x, src + i * P.q.query_token * 2 + x);
      for (int x = 0; x < L::SLOTS * 2; x += 16) copy16(memory + at_.slots + x, slots + x);
      copies_arrive(ready);
      barrier_arrive(ready);  // for the segment, an ordinary store
#endif
      publishing = end < n;
      if (publishing) c.next(P.request, heads);
    }
    const bool go = at < n && barrier_test(empty + stage, parity);
    const int recent = at - c.start - sealed_pages(c.info);
    const uint8_t* src = recent < 0 ? P.pages.sealed + id * P.pages.sealed_page + c.head * P.pages.sealed_head
                                    : P.pages.recent + id * P.pages.recent_page + c.head * P.pages.recent_head;
    uint8_t* dst = ring + stage * L::BYTES;
    uint64_t* bar = full + stage;
    // New tokens are in recent pages only once store_and_seal is done, and a request that has just
    // hit the cache may read pages that this very step seals.
    if (P.q.overlap && go && (recent >= 0 || (c.info.queries & FRESH))) wait_for_previous();
#if S4KV_BULK
    // A bulk copy is issued by one lane at a time, so few and large ones.
    if (go && recent < 0) expect_bytes(bar, L::BYTES), bulk_copy(dst, src, L::BYTES, bar, true);
    if (go && recent >= 0) {
      const int bytes = min(RECENT_TOKENS, c.info.seq_len - RECENT_TOKENS * recent_page(c.info, recent)) * L::RECENT_ROW;
      expect_bytes(bar, 2 * bytes);
      if (bytes == RECENT_TOKENS * L::RECENT_ROW) {
        bulk_copy(dst, src, 2 * bytes, bar, true);
      } else {
        bulk_copy(dst, src, bytes, bar, true);
        bulk_copy(dst + RECENT_TOKENS * L::RECENT_ROW, src + RECENT_TOKENS * L::RECENT_ROW, bytes, bar, true);
      }
    }
#else
    for (unsigned together = __ballot_sync(ALL, go); together; together &= together - 1) {  // one page after the other
      const int who = __ffs(together) - 1;
      const uint8_t* from = reinterpret_cast<const uint8_t*>(__shfl_sync(ALL, reinterpret_cast<unsigned long long>(src), who));
      uint8_t* to = memory + __shfl_sync(ALL, (int)(dst - memory), who);
      const int of_recent = __shfl_sync(ALL, recent < 0 ? -1 : RECENT_TOKENS * recent_page(c.info, recent), who);
      const int valid = of_recent < 0 ? RECENT_TOKENS : min(RECENT_TOKENS, __shfl_sync(ALL, c.info.seq_len, who) - of_recent);
      const int bytes = of_recent < 0 ? L::BYTES : 2 * RECENT_TOKENS * L::RECENT_ROW;
      for (int i = lane * 16; i < bytes; i += 512)
        if ((i / L::RECENT_ROW & 15) < valid) copy16(to + i, from + i);
      copies_arrive(reinterpret_cast<uint64_t*>(memory + __shfl_sync(ALL, (int)(reinterpret_cast<uint8_t*>(bar) - memory), who)));
    }
#endif
    if (go) {
      at += lanes;
      if (++stage == P.stages) stage = 0, parity ^= 1;
      find();
    }
    if (!__any_sync(ALL, at < n || publishing)) return;
    if (!__any_sync(ALL, go)) __nanosleep(20);
  }
}

// Where a share's sums of this row are. A share has at most two rows in common with others: the one
// it starts in, and the one it ends in.
template <int D>
DEV float* partial_of(const DecodeParams& P, const volatile Segment& s, int share, int tiles) {
  return P.q.partial + (2 * share + (share == s.first_share && s.first_is_second)) * partial_floats(D, tiles);
}

template <int D, bool BF16>
DEV void store_output(const DecodeParams& P, const volatile Segment& s, int row, int channel, float v) {
  if (row >= (s.info.queries & 0xffff) * P.group) return;
  const long to = (s.info.query_start + row / P.group) * P.q.out_token + (s.head * P.group + row % P.group) * D + channel;
  if constexpr (BF16) static_cast<__nv_bfloat16*>(P.q.out)[to] = __float2bfloat16(v);
  else static_cast<__half*>(P.q.out)[to] = __float2half(v);
}

// The last block to finish its part of a row: sums of all shares into the output. weight: shared
// memory, [MERGE_AT_ONCE][8], then reference, sum and factor of each row.
template <int D, bool BF16>
DEV void merge_shares(const DecodeParams& P, const volatile Segment& s, float* weight, int tiles) {
  constexpr int AHEAD = 8;  // shares loaded at a time; more would take registers from the page loop
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, threads = P.warps * 32;
  const int first_share = s.first_share, count = s.last_share - first_share + 1;
  float* running = weight + MERGE_AT_ONCE * 8;
  for (int in_tile = 0; in_tile < tiles; in_tile++) {
    auto from = [&](int k) { return partial_of<D>(P, s, first_share + k, tiles) + in_tile * (D * 8 + 16); };
    for (int first = 0; first < D * 2; first += threads) {  // a thread: one channel, four rows
      const int i = first + tid, half = (i & 1) * 4;
      float v[4] = {0, 0, 0, 0};
      for (int base = 0; base < count; base += MERGE_AT_ONCE) {
        const int here = min(MERGE_AT_ONCE, count - base);
        float4 o[AHEAD];
#pragma unroll
        for (int k = 0; k < AHEAD; k++)
          if (k < here && i < D * 2) o[k] = __ldcg(reinterpret_cast<const float4*>(from(base + k)) + i);
        for (int row = warp; row < 8; row += P.warps) {  // a warp a row: the weight of each share
          float top = NEVER, sum = 0;
          if (lane < here) top = __ldcg(from(base + lane) + D * 8 + row), sum = __ldcg(from(base + lane) + D * 8 + 8 + row);
          float high = top;
#pragma unroll
          for (int d = 16; d; d >>= 1) high = fmaxf(high, shfl_xor(high, d));
          const float before = base ? running[row] : NEVER;
          high = fmaxf(high, before);
          const float w = exp2_approx(top - high), f = exp2_approx(before - high);
          sum *= w;
#pragma unroll
          for (int d = 16; d; d >>= 1) sum += shfl_xor(sum, d);
          weight[lane * 8 + row] = w;
          __syncwarp();
          if (lane == 0) running[8 + row] = (base ? running[8 + row] * f : 0.f) + sum, running[row] = high, running[16 + row] = f;
        }
        named_barrier(1, threads);
        if (i < D * 2) {
#pragma unroll
          for (int j = 0; j < 4; j++) v[j] *= running[16 + half + j];
          for (int k0 = 0; k0 < here; k0 += AHEAD) {
#pragma unroll
            for (int k = 0; k < AHEAD; k++)
              if (k0 && k0 + k < here) o[k] = __ldcg(reinterpret_cast<const float4*>(from(base + k0 + k)) + i);
#pragma unroll
            for (int k = 0; k < AHEAD; k++)
              if (k0 + k < here) {
                const float4 w = *reinterpret_cast<const float4*>(weight + (k0 + k) * 8 + half);
                v[0] += w.x * o[k].x, v[1] += w.y * o[k].y, v[2] += w.z * o[k].z, v[3] += w.w * o[k].w;
              }
          }
          if (base + MERGE_AT_ONCE >= count)
#pragma unroll
            for (int j = 0; j < 4; j++)
              store_output<D, BF16>(P, s, in_tile * 8 + half + j, i >> 1, v[j] * __frcp_rn(running[8 + half + j]));
        }
        named_barrier(1, threads);
      }
    }
  }
}

template <int D, bool BF16, int NT, bool WIDE>
__global__ void __launch_bounds__(decode_warps(NT, WIDE) * 32, 1) decode_kernel(const __grid_constant__ DecodeParams P) {
  using L = Layout<D>;
  extern __shared__ __align__(128) uint8_t memory[];
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, t = lane & 3;
  const int tile_warps = P.tile_warps, stages = P.stages, lanes = P.warps / tile_warps;
  const SharedLayout at_ = shared_layout(D, L::BYTES, P.warps, tile_warps, NT, stages);
  // Everything that the first copies depend on is asked for before anything else is done.
  const Share* share = P.share + blockIdx.x;
  const int n_pages = share->pages;
  Share mine;
  int first_page = 0;
  if (warp == P.warps) {
    mine.pages = n_pages, mine.request = share->request, mine.head = share->head, mine.first = share->first;
    mine.info = share->info, mine.first_share = share->first_share, mine.last_share = share->last_share;
    mine.first_is_second = share->first_is_second, mine.end_last_share = share->end_last_share;
    first_page = share->page[lane];
  }
  uint64_t* ready = reinterpret_cast<uint64_t*>(memory + at_.ready);
  if (tid < lanes * stages) {
    barrier_init(reinterpret_cast<uint64_t*>(memory + at_.full) + tid, S4KV_BULK ? 1 : 32);
    barrier_init(reinterpret_cast<uint64_t*>(memory + at_.empty) + tid, tile_warps);
  }
  if (tid == 0) barrier_init(ready, S4KV_BULK ? 1 : 2), barrier_init(ready + 1, P.warps);
  fence_barrier_init();
  __syncthreads();
  if (n_pages == 0) return;
  if (warp == P.warps) return copy_pages<D>(P, mine, first_page, memory, at_, lanes, lane);

  const int tile = warp % tile_warps, page_lane = warp / tile_warps, tiles = tile_warps * NT;
  const int threads = P.warps * 32;
  uint8_t* ring = memory + page_lane * stages * L::BYTES;
  uint64_t* full = reinterpret_cast<uint64_t*>(memory + at_.full) + page_lane * stages;
  uint64_t* empty = reinterpret_cast<uint64_t*>(memory + at_.empty) + page_lane * stages;
  float* s_top = reinterpret_cast<float*>(memory + at_.top);  // [warps][NT * 8]
  float* s_sum = reinterpret_cast<float*>(memory + at_.sum);
  int* s_parked = reinterpret_cast<int*>(memory + at_.parked);
  int* s_exponent = reinterpret_cast<int*>(memory + at_.exponent);
  int* s_last = reinterpret_cast<int*>(memory + at_.last);
  auto sync = [&] { named_barrier(1, threads); };

  int at = page_lane, stage = 0;
  uint32_t parity = 0, ready_parity = 0;
  while (true) {
    barrier_wait(ready, ready_parity);
    // Read again where it is needed: registers are scarce.
    const volatile Segment& s = reinterpret_cast<const volatile Segment*>(memory + at_.segment)[ready_parity];
    ready_parity ^= 1;
    const int rows = (s.info.queries & 0xffff) * P.group, end = s.end, start = s.start;
    const int sealed_end_of_row = start + s.info.sealed / BLOCK, sealed_end = min(sealed_end_of_row, end);

    // Query rows in float16, scaled by a power of two to [256, 512): times a key scale that is at
    // most 4.3 (keys of a page are brought below 32), and exact for all but tiny elements.
    const uint16_t* q = reinterpret_cast<const uint16_t*>(memory + at_.query);
    for (int row = warp; row < tiles * 8; row += P.warps) {
      float v[D / 32], high = 0;
      load_floats<BF16>(v, q + (row < rows ? row : 0) * D + lane * (D / 32));
#pragma unroll
      for (int i = 0; i < D / 32; i++) high = fmaxf(high, fabsf(v[i]));
#pragma unroll
      for (int d = 16; d; d >>= 1) high = fmaxf(high, shfl_xor(high, d));
      if (lane == 0) s_exponent[row] = max((__float_as_int(high) >> 23) - 127 - 8, -100);
    }
    sync();
    auto fragment = [&](int row, int kc) {  // of step kc: slots, then channels
      uint32_t channel[4];
      if (kc < L::KCHUNKS) {
        const uint2 c4 = *reinterpret_cast<const uint2*>(memory + at_.slots + L::first_slot(kc, t) * 2);
        channel[0] = c4.x & 0xffff, channel[1] = c4.x >> 16, channel[2] = c4.y & 0xffff, channel[3] = c4.y >> 16;
      } else {
#pragma unroll
        for (int j = 0; j < 4; j++) channel[j] = L::channel(kc - L::KCHUNKS, t, j);
      }
      const float down = row < rows ? power_of_two(-s_exponent[row]) : 0.f;
      float v[4];
#pragma unroll
      for (int j = 0; j < 4; j++) v[j] = channel[j] < D ? unpack2<BF16>(q[(row < rows ? row : 0) * D + channel[j]]).x * down : 0.f;
      return make_uint2(pack2<false>(v[0], v[1]), pack2<false>(v[2], v[3]));
    };
    constexpr int FRAGMENTS = L::KCHUNKS + L::DCHUNKS;  // of a tile; many warps need the same: share the work
    uint2* fragments = reinterpret_cast<uint2*>(memory + at_.fragments);
    for (int i = warp; i < tiles * FRAGMENTS; i += P.warps) fragments[i * 32 + lane] = fragment(i / FRAGMENTS * 8 + g, i % FRAGMENTS);
    sync();
    const uint2* query = fragments + tile * NT * FRAGMENTS * 32;
    float scale[NT][2];
#pragma unroll
    for (int n = 0; n < NT; n++) {
      const int* e = s_exponent + (tile * NT + n) * 8;
      scale[n][0] = P.scale * power_of_two(e[2 * t]), scale[n][1] = P.scale * power_of_two(e[2 * t + 1]);
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(ready + 1);

    State<D, NT> st;
    clear(st);
    int held = -1;
    auto release = [&] {  // the page just read; the row's last one is kept to park sums in
      __syncwarp();
      at += lanes;
      if (at < end) {
        if (lane == 0) barrier_arrive(empty + stage);
      } else {
        held = stage;
      }
      if (++stage == stages) stage = 0, parity ^= 1;
    };
    if (at < sealed_end) {
      while (at < sealed_end) {
        barrier_wait(full + stage, parity);
        sealed_page<D, NT>(ring + stage * L::BYTES, lane, at == start, query, scale, st);
        release();
      }
      finish_sealed<D, NT>(lane, st);
    }
    if (at < end) {
      const int seq_len = s.info.seq_len, row_sealed = s.info.sealed;
      int last[NT][2];
      uint32_t plain_query[NT][L::DCHUNKS][2];
#pragma unroll
      for (int n = 0; n < NT; n++) {
#pragma unroll
        for (int c = 0; c < 2; c++) {
          const int row = (tile * NT + n) * 8 + 2 * t + c;
          last[n][c] = seq_len - 1 - (row < rows ? (rows - 1 - row) / P.group : 0);
        }
        const float up = power_of_two(s_exponent[(tile * NT + n) * 8 + g]);
#pragma unroll
        for (int kc = 0; kc < L::DCHUNKS; kc++) {
          const uint2 q2 = query[(n * FRAGMENTS + L::KCHUNKS + kc) * 32 + lane];
          const float2 a = unpack2<false>(q2.x), b = unpack2<false>(q2.y);
          plain_query[n][kc][0] = pack2<BF16>(a.x * up, a.y * up), plain_query[n][kc][1] = pack2<BF16>(b.x * up, b.y * up);
        }
      }
      while (at < end) {
        const int first_token = RECENT_TOKENS * recent_page_of(row_sealed, at - sealed_end_of_row);
        barrier_wait(full + stage, parity);
        recent_page<D, BF16, NT>(ring + stage * L::BYTES, lane, first_token, min(RECENT_TOKENS, seq_len - first_token),
                                 last, plain_query, P.scale, st);
        release();
      }
    }

    // Sum over the block's lanes: the common reference of each query row, then the value sums, two
    // tiles of a lane at a time through the page buffer that the lane read last.
    if (lane == 0 && tile == 0) s_parked[page_lane] = held < 0 ? -1 : (page_lane * stages + held) * L::BYTES;
    if (lane < 4)
#pragma unroll
      for (int n = 0; n < NT; n++)
        *reinterpret_cast<float2*>(s_top + (warp * NT + n) * 8 + 2 * t) = make_float2(st.top[n][0], st.top[n][1]);
    sync();
#pragma unroll
    for (int n = 0; n < NT; n++) {
      float2 top = make_float2(NEVER, NEVER);
#pragma unroll 4
      for (int k = 0; k < lanes; k++) {
        const float2 v = *reinterpret_cast<const float2*>(s_top + ((k * tile_warps + tile) * NT + n) * 8 + 2 * t);
        top.x = fmaxf(top.x, v.x), top.y = fmaxf(top.y, v.y);
      }
#pragma unroll
      for (int c = 0; c < 2; c++) {
        const float f = exp2_approx(st.top[n][c] - (c ? top.y : top.x));
        float sum = st.sum[n][c] * f;
#pragma unroll
        for (int d = 4; d < 32; d <<= 1) sum += shfl_xor(sum, d);
        if (lane < 4) s_sum[(warp * NT + n) * 8 + 2 * t + c] = sum;
#pragma unroll
        for (int i = 0; i < D / 16; i++) st.o[n][i][c] *= f, st.o[n][i][c + 2] *= f;
      }
    }
    const bool whole = s.first_share == s.last_share;
    float* partial = partial_of<D>(P, s, blockIdx.x, tiles);
    auto store = [&](int row, int channel, float v) { store_output<D, BF16>(P, s, row, channel, v); };
    if (P.q.overlap) wait_for_previous();  // only now may outputs and workspace be written
    for (int round = 0; 2 * round < tiles; round++) {
      if (held >= 0)
#pragma unroll
        for (int n = 0; n < NT; n++)
          if ((tile * NT + n) / 2 == round) {
            float* to = reinterpret_cast<float*>(ring + held * L::BYTES) + ((tile * NT + n) & 1) * D * 8;
#pragma unroll
            for (int i = 0; i < D / 16; i++) {
              *reinterpret_cast<float2*>(to + (i * 16 + g) * 8 + 2 * t) = make_float2(st.o[n][i][0], st.o[n][i][1]);
              *reinterpret_cast<float2*>(to + (i * 16 + 8 + g) * 8 + 2 * t) = make_float2(st.o[n][i][2], st.o[n][i][3]);
            }
          }
      sync();
      for (int in_tile = 2 * round; in_tile < min(2 * round + 2, tiles); in_tile++) {
        float* mine = partial + in_tile * (D * 8 + 16);
        for (int i = tid; i < D * 2; i += threads) {  // one channel, four rows
          const int half = (i & 1) * 4;
          float v[4] = {0, 0, 0, 0}, sum[4] = {0, 0, 0, 0};
#pragma unroll 4
          for (int k = 0; k < lanes; k++) {
            const float4 l = *reinterpret_cast<const float4*>(s_sum + (k * tile_warps * NT + in_tile) * 8 + half);
            sum[0] += l.x, sum[1] += l.y, sum[2] += l.z, sum[3] += l.w;
            const int from = s_parked[k];
            if (from >= 0) {
              const float4 o = *reinterpret_cast<const float4*>(memory + from + (in_tile & 1) * D * 32 + i * 16);
              v[0] += o.x, v[1] += o.y, v[2] += o.z, v[3] += o.w;
            }
          }
          if (whole) {
#pragma unroll
            for (int j = 0; j < 4; j++) store(in_tile * 8 + half + j, i >> 1, v[j] * __frcp_rn(sum[j]));
          } else {
            *reinterpret_cast<float4*>(mine + i * 4) = make_float4(v[0], v[1], v[2], v[3]);
            if (i < 2) *reinterpret_cast<float4*>(mine + D * 8 + 8 + half) = make_float4(sum[0], sum[1], sum[2], sum[3]);
          }
        }
        if (!whole && tid < 8) {
          float top = NEVER;
          for (int k = 0; k < lanes; k++) top = fmaxf(top, s_top[(k * tile_warps * NT + in_tile) * 8 + tid]);
          mine[D * 8 + tid] = top;
        }
      }
      fence_async_proxy();
      sync();
    }
    if (held >= 0 && lane == 0) barrier_arrive(empty + held);
    if (!whole) {
      if (tid == 0) {
        int* arrivals = P.q.arrivals + s.request * P.pages.heads + s.head;
        const bool last = atomic_add_acq_rel(arrivals, 1) == s.last_share - s.first_share;
        if (last) *arrivals = 0;
        *s_last = last;
      }
      sync();
      if (*s_last) merge_shares<D, BF16>(P, s, reinterpret_cast<float*>(memory + at_.weight), tiles);
    }
    if (!s.more) return;
  }
}

}  // namespace s4kv
