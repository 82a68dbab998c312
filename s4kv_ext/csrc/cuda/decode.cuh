// Decode attention: sealed and recent pages of all requests, 1 to 8 query tokens each.
//
// The pages of all rows (a row is one KV head of one request, or a few) are one sequence, cut into
// shares, one a thread block (plan.cu). In a block, one warp copies pages into a ring of buffers in
// shared memory; page lanes take turns at them. A page lane is one warp, or as many as it takes to
// work on all heads and query rows of the same page. At the end of a row the block's lanes are summed;
// if other blocks have a part of the row, the last of them to arrive sums the blocks.
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
  int group, tile_warps, warps, stages, together;
  uint32_t per_group, per_tile_warps;  // what `quotient` takes for a division by them
  float scale;  // softmax scale * log2(e)
};

// n / d for n < 128, d <= 16.
constexpr uint32_t inverse_of(int d) { return 65536 / d + 1; }
DEV int quotient(int n, uint32_t inverse) { return (uint32_t)n * inverse >> 16; }

// Warps of a block, the copying one included: a multiple of 4, so that each of the four register
// files serves as few as possible. More than 7 warps with two tiles each need registers spilled;
// only 15 or 16 query heads with 8 query tokens come to that.
constexpr int decode_warps(int tiles, bool wide) { return tiles == 1 || wide ? 12 : 8; }

// Floats of a partial result: value sums [8][D] of each tile of each head, then reference and sum [2][8].
__host__ __device__ constexpr int partial_floats(int D, int tiles) { return tiles * (D * 8 + 16); }

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

// Floats of a query row's value sums where a page lane parks them: padded, so that no two lanes of a
// warp meet in a bank.
__host__ __device__ constexpr int parked_row(int D) { return D + 4; }

// Shared memory, in this order: ring [lanes][stages][heads], queries [heads][rows], their fragments, slot
// channels [heads], barriers, the rest. together: most heads.
struct SharedLayout {
  int query, fragments, slots, segment, full, empty, ready, top, sum, parked, exponent, last, bytes;
};
__host__ __device__ inline SharedLayout shared_layout(int D, int page_bytes, int warps, int tile_warps, int tiles, int stages, int together) {
  const int lanes = warps / tile_warps, buffers = lanes * stages, rows = tile_warps * tiles * 8 * together;
  SharedLayout s;
  s.query = buffers * page_bytes;
  s.fragments = s.query + rows * D * 2;
  s.slots = s.fragments + rows / 8 * (D / 8 + 1) * 256;
  s.segment = s.slots + (D + 16) * 2 * together;
  s.full = s.segment + 96;  // of this row and the next
  s.empty = s.full + buffers * 8;
  s.ready = s.empty + buffers * 8;  // queries and segment: filled, read
  s.top = s.ready + 16;             // [warps][tiles][8]
  s.sum = s.top + warps * tiles * 32;
  s.parked = s.sum + warps * tiles * 32;  // [lanes][heads]: where a lane's sums are, or -1
  s.exponent = s.parked + lanes * 4;      // [rows]
  s.last = s.exponent + rows * 4;
  s.bytes = s.last + 4;
  return s;
}
__host__ __device__ inline int decode_shared(int D, int warps, int tile_warps, int tiles, int stages, int together) {
  return shared_layout(D, D == 64 ? Layout<64>::BYTES : Layout<128>::BYTES, warps, tile_warps, tiles, stages, together).bytes;
}

// A place in the sequence of rows; head: the first of the row's.
struct Cursor {
  Request info;
  int request, head, start, pages;
  DEV void next(const Request* requests, int heads, int together) {
    start += pages;
    if ((head += together) == heads) {
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
                    int lanes, int together, int lane) {
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
  uint8_t* ring = memory + lane * P.stages * together * L::BYTES;
  int stage = 0;
  uint32_t parity = 1;  // of a first pass through a ring
  bool publishing = publisher;
  auto find = [&] {  // page `at`: its row, and its id if it is not one of the first
    if (at >= n) return;
    while (at >= c.start + c.pages) c.next(P.request, heads, together);
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
      const int end = min(c.start + c.pages, n), queries = c.info.queries, token_bytes = P.group * D * 2;
      const int head_rows = (at_.fragments - at_.query) / P.together;  // bytes
      *segment = Segment{c.info, c.request, c.head, c.start, end, first ? mine.first_share : (int)blockIdx.x,
                  first ? mine.last_share : end < n ? (int)blockIdx.x : mine.end_last_share, (int16_t)(first ? mine.first_is_second : 1), (int16_t)(end < n)};
      uint8_t* dst = memory + at_.query;
      const uint8_t* src = static_cast<const uint8_t*>(P.q.query) + (c.info.query_start * P.q.query_token + c.head * P.group * D) * 2;
      const uint8_t* slots = reinterpret_cast<const uint8_t*>(P.pages.slot_channel + c.head * L::SLOTS);
#if S4KV_BULK
      expect_bytes(ready, together * (queries * token_bytes + L::SLOTS * 2));
      for (int h = 0; h < together; h++)
        for (int i = 0; i < queries; i++)
          bulk_copy(dst + h * head_rows + i * token_bytes, src + i * P.q.query_token * 2 + h * token_bytes, token_bytes, ready, false);
      bulk_copy(memory + at_.slots, slots, together * L::SLOTS * 2, ready, false);
#else
      for (int h = 0; h < together; h++)
        for (int i = 0; i < queries; i++)
          for (int x = 0; x < token_bytes; x += 16)
            copy16(dst + h * head_rows + i * token_bytes + x, src + i * P.q.query_token * 2 + h * token_bytes + x);
      for (int x = 0; x < together * L::SLOTS * 2; x += 16) copy16(memory + at_.slots + x, slots + x);
      copies_arrive(ready);
      barrier_arrive(ready);  // for the segment, an ordinary store
#endif
      publishing = end < n;
      if (publishing) c.next(P.request, heads, together);
    }
    const bool go = at < n && barrier_test(empty + stage, parity);
    const int recent = at - c.start - sealed_pages(c.info);
    const uint8_t* src = recent < 0 ? P.pages.sealed + id * P.pages.sealed_page + c.head * P.pages.sealed_head
                                    : P.pages.recent + id * P.pages.recent_page + c.head * P.pages.recent_head;
    const long to_head = recent < 0 ? P.pages.sealed_head : P.pages.recent_head;
    uint8_t* dst = ring + stage * together * L::BYTES;
    uint64_t* bar = full + stage;
#if S4KV_BULK
    // A bulk copy is issued by one lane at a time, so few and large ones.
    if (go && recent < 0) {
      expect_bytes(bar, together * L::BYTES);
      for (int h = 0; h < together; h++) bulk_copy(dst + h * L::BYTES, src + h * to_head, L::BYTES, bar, true);
    }
    if (go && recent >= 0) {
      const int bytes = min(RECENT_TOKENS, c.info.seq_len - RECENT_TOKENS * recent_page(c.info, recent)) * L::RECENT_ROW;
      expect_bytes(bar, together * 2 * bytes);
      for (int h = 0; h < together; h++, dst += L::BYTES, src += to_head)
        if (bytes == RECENT_TOKENS * L::RECENT_ROW) {
          bulk_copy(dst, src, 2 * bytes, bar, true);
        } else {
          bulk_copy(dst, src, bytes, bar, true);
          bulk_copy(dst + RECENT_TOKENS * L::RECENT_ROW, src + RECENT_TOKENS * L::RECENT_ROW, bytes, bar, true);
        }
    }
#else
    for (unsigned to_do = __ballot_sync(ALL, go); to_do; to_do &= to_do - 1) {  // one page after the other
      const int who = __ffs(to_do) - 1;
      const uint8_t* from = reinterpret_cast<const uint8_t*>(__shfl_sync(ALL, reinterpret_cast<unsigned long long>(src), who));
      uint8_t* to = memory + __shfl_sync(ALL, (int)(dst - memory), who);
      const long from_head = __shfl_sync(ALL, (long long)to_head, who);
      const int of_recent = __shfl_sync(ALL, recent < 0 ? -1 : RECENT_TOKENS * recent_page(c.info, recent), who);
      const int valid = of_recent < 0 ? RECENT_TOKENS : min(RECENT_TOKENS, __shfl_sync(ALL, c.info.seq_len, who) - of_recent);
      const int bytes = of_recent < 0 ? L::BYTES : 2 * RECENT_TOKENS * L::RECENT_ROW;
      for (int h = 0; h < together; h++, to += L::BYTES, from += from_head)
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
DEV float* partial_of(const DecodeParams& P, const volatile Segment& s, int share, int all_tiles) {
  return P.q.partial + (2 * share + (share == s.first_share && s.first_is_second)) * partial_floats(D, all_tiles);
}

// A lane's D / 32 channels of a query row, of which a warp has all.
template <int N>
struct Channels {
  float v[N] = {};
  DEV void add(float weight, const float* from) {
    if constexpr (N == 4) {
      const float4 o = *reinterpret_cast<const float4*>(from);
      v[0] += weight * o.x, v[1] += weight * o.y, v[2] += weight * o.z, v[3] += weight * o.w;
    } else {
      const float2 o = *reinterpret_cast<const float2*>(from);
      v[0] += weight * o.x, v[1] += weight * o.y;
    }
  }
  DEV void scale(float by) {
#pragma unroll
    for (int i = 0; i < N; i++) v[i] *= by;
  }
  DEV void store(float* to) const {
    if constexpr (N == 4) *reinterpret_cast<float4*>(to) = make_float4(v[0], v[1], v[2], v[3]);
    else *reinterpret_cast<float2*>(to) = make_float2(v[0], v[1]);
  }
  DEV void load_cached(const float* from) {  // at L2: other blocks have written it
    if constexpr (N == 4) {
      const float4 o = __ldcg(reinterpret_cast<const float4*>(from));
      v[0] = o.x, v[1] = o.y, v[2] = o.z, v[3] = o.w;
    } else {
      const float2 o = __ldcg(reinterpret_cast<const float2*>(from));
      v[0] = o.x, v[1] = o.y;
    }
  }
};

// A query row of the output, by one warp.
template <int D, bool BF16>
DEV void store_output(const DecodeParams& P, const volatile Segment& s, int head, int row, int lane, const Channels<D / 32>& c) {
  const int query = quotient(row, P.per_group);
  const long to = (s.info.query_start + query) * P.q.out_token + ((s.head + head) * P.group + row - query * P.group) * D + lane * (D / 32);
  uint16_t* out = static_cast<uint16_t*>(P.q.out) + to;
  if constexpr (D == 128) *reinterpret_cast<uint2*>(out) = make_uint2(pack2<BF16>(c.v[0], c.v[1]), pack2<BF16>(c.v[2], c.v[3]));
  else *reinterpret_cast<uint32_t*>(out) = pack2<BF16>(c.v[0], c.v[1]);
}

// The last block to finish its part of a row: sums of all shares into the output, a warp a query row.
template <int D, bool BF16>
DEV void merge_shares(const DecodeParams& P, const volatile Segment& s, int tiles, int shift, int warps) {
  constexpr int AHEAD = 12;  // loads in flight; more would take registers from the page loop
  constexpr unsigned ALL = 0xffffffffu;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int first_share = s.first_share, second = s.first_is_second, count = s.last_share - first_share + 1;
  const int rows = s.info.queries * P.group, share_floats = partial_floats(D, tiles << shift);
  for (int i = warp; i < rows << shift; i += warps) {
    const int row = i >> shift, head = i - (row << shift);
    const float* first = P.q.partial + 2 * first_share * share_floats + (head * tiles + (row >> 3)) * (D * 8 + 16);
    auto from = [&](int k) { return first + (2 * k + (k == 0 ? second : 0)) * share_floats; };
    const int at = (row & 7) * D + lane * (D / 32);
    Channels<D / 32> sum, part[AHEAD];
    float high = NEVER, total = 0;
    for (int base = 0; base < count; base += 64) {  // a lane weighs two shares
      const int here = min(64, count - base);
      float top[2] = {NEVER, NEVER}, mine[2] = {0, 0};
#pragma unroll
      for (int j = 0; j < 2; j++)
        if (lane + 32 * j < here) {
          const float* of_share = from(base + lane + 32 * j) + D * 8 + (row & 7);
          top[j] = __ldcg(of_share), mine[j] = __ldcg(of_share + 8);
        }
#pragma unroll
      for (int k = 0; k < AHEAD; k++) part[k].load_cached(from(base + min(k, here - 1)) + at);
      const float before = high;
      high = fmaxf(high, warp_max(fmaxf(top[0], top[1])));
      const float weight[2] = {exp2_approx(top[0] - high), exp2_approx(top[1] - high)}, factor = exp2_approx(before - high);
      total = total * factor + warp_sum(mine[0] * weight[0] + mine[1] * weight[1]);
      sum.scale(factor);
      for (int k0 = 0; k0 < here; k0 += AHEAD)
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {  // past the end: the last share again, with weight 0
          const int k = k0 + j;
          const float w = k < here ? __shfl_sync(ALL, k < 32 ? weight[0] : weight[1], k & 31) : 0.f;
#pragma unroll
          for (int i = 0; i < D / 32; i++) sum.v[i] += w * part[j].v[i];
          if (k0 + AHEAD < here) part[j].load_cached(from(base + min(k + AHEAD, here - 1)) + at);
        }
    }
    sum.scale(reciprocal(total));
    store_output<D, BF16>(P, s, head, row, lane, sum);
  }
}

template <int D, bool BF16, int NT, bool WIDE>
__global__ void __launch_bounds__(decode_warps(NT, WIDE) * 32, 1) decode_kernel(const __grid_constant__ DecodeParams P) {
  using L = Layout<D>;
  extern __shared__ __align__(128) uint8_t memory[];
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, t = lane & 3;
  const int tile_warps = P.tile_warps, stages = P.stages;
  const SharedLayout at_ = shared_layout(D, L::BYTES, P.warps, tile_warps, NT, stages, P.together);
  // Everything that the first copies depend on is asked for before anything else is done.
  const Share* share = P.share + blockIdx.x;
  const int n_pages = share->pages, lanes = share->lanes, together = share->together;
  const int shift = __ffs(together) - 1;  // together is a power of two
  const int lane_warps = tile_warps << shift, warps = lanes * lane_warps;  // warps at work: P.warps or fewer
  Share mine;
  int first_page = 0;
  if (warp == P.warps) {
    mine.pages = n_pages, mine.request = share->request, mine.head = share->head, mine.first = share->first;
    mine.info = share->info, mine.first_share = share->first_share, mine.last_share = share->last_share;
    mine.first_is_second = share->first_is_second, mine.end_last_share = share->end_last_share;
    first_page = share->page[lane];
  }
  uint64_t* ready = reinterpret_cast<uint64_t*>(memory + at_.ready);
  // The copying warp makes the barriers and is off; the others wait until they are there.
  if (warp == P.warps) {
    for (int i = lane; i < lanes * stages; i += 32) {
      barrier_init(reinterpret_cast<uint64_t*>(memory + at_.full) + i, S4KV_BULK ? 1 : 32);
      barrier_init(reinterpret_cast<uint64_t*>(memory + at_.empty) + i, lane_warps);
    }
    if (lane == 0) barrier_init(ready, S4KV_BULK ? 1 : 2), barrier_init(ready + 1, warps);
    fence_barrier_init();
    __syncwarp();
    named_barrier_arrive(2, (P.warps + 1) * 32);
    if (n_pages) copy_pages<D>(P, mine, first_page, memory, at_, lanes, together, lane);
    return;
  }
  named_barrier(2, (P.warps + 1) * 32);
  if (n_pages == 0 || warp >= warps) return;

  const int head_lane = quotient(warp, P.per_tile_warps), tile = warp - head_lane * tile_warps, tiles = tile_warps * NT;
  const int head = head_lane & (together - 1), page_lane = head_lane >> shift;
  const int threads = warps * 32;
  auto buffer = [&](int stage) { return memory + (((page_lane * stages + stage) << shift) + head) * L::BYTES; };
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
    const int rows = s.info.queries * P.group, end = s.end, start = s.start;
    const int sealed_end_of_row = start + s.info.sealed / BLOCK, sealed_end = min(sealed_end_of_row, end);

    // Query rows to float16, in place, scaled by a power of two to [256, 512): times a key scale that
    // is at most 4.5 (keys of a page are brought below 32), and exact for all but tiny elements.
    uint16_t* q = reinterpret_cast<uint16_t*>(memory + at_.query);
    for (int row = warp; row < together * tiles * 8; row += warps) {  // of all heads
      float v[D / 32] = {};
      if (together > 1 ? (row & 7) < rows : row < rows) load_floats<BF16>(v, q + row * D + lane * (D / 32));
      uint32_t high = 0;  // floats of one sign compare as integers
#pragma unroll
      for (int i = 0; i < D / 32; i++) high = max(high, __float_as_uint(fabsf(v[i])));
      const int e = max((int)(__reduce_max_sync(0xffffffffu, high) >> 23) - 127 - 8, -100);
      const float down = power_of_two(-e);
      if (lane == 0) s_exponent[row] = e;
#pragma unroll
      for (int i = 0; i < D / 32; i += 2)
        reinterpret_cast<uint32_t*>(q + row * D + lane * (D / 32))[i / 2] = pack2<false>(v[i] * down, v[i + 1] * down);
    }
    fence_async_proxy();
    sync();
    auto fragment = [&](int row, const uint8_t* slots, int kc) {  // of step kc: slots, then channels
      const uint16_t* from = q + row * D;
      if (kc >= L::KCHUNKS) {
        const int c = kc - L::KCHUNKS;
        return make_uint2(*reinterpret_cast<const uint32_t*>(from + L::channel(c, t, 0)), *reinterpret_cast<const uint32_t*>(from + L::channel(c, t, 2)));
      }
      const uint2 c4 = *reinterpret_cast<const uint2*>(slots + L::first_slot(kc, t) * 2);
      auto element = [&](uint32_t channel) { return channel < D ? (uint32_t)from[channel] : 0u; };
      return make_uint2(element(c4.x & 0xffff) | element(c4.x >> 16) << 16, element(c4.y & 0xffff) | element(c4.y >> 16) << 16);
    };
    constexpr int FRAGMENTS = L::KCHUNKS + L::DCHUNKS;  // of a tile; many warps need the same: share the work
    uint2* fragments = reinterpret_cast<uint2*>(memory + at_.fragments);
    for (int i = warp; i < together * tiles * FRAGMENTS; i += warps) {
      const int of_tile = i / FRAGMENTS;  // tiles of all heads
      const uint8_t* slots = memory + at_.slots + (together > 1 ? of_tile : 0) * L::SLOTS * 2;
      fragments[i * 32 + lane] = fragment(of_tile * 8 + g, slots, i - of_tile * FRAGMENTS);
    }
    sync();
    const uint2* query = fragments + (head * tiles + tile * NT) * FRAGMENTS * 32;
    const int* exponent = s_exponent + (head * tiles + tile * NT) * 8;
    float scale[NT][2];
#pragma unroll
    for (int n = 0; n < NT; n++) {
      const int* e = exponent + n * 8;
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
      for (int pages = 1; at < sealed_end; pages++) {
        barrier_wait(full + stage, parity);
        sealed_page<D, NT>(buffer(stage), lane, at == start, query, scale, st);
        release();
        if ((pages & 15) == 0) add_offsets<D, NT>(st);
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
          last[n][c] = seq_len - 1 - (row < rows ? quotient(rows - 1 - row, P.per_group) : 0);
        }
        const float up = power_of_two(exponent[n * 8 + g]);
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
        recent_page<D, BF16, NT>(buffer(stage), lane, first_token, min(RECENT_TOKENS, seq_len - first_token),
                                 last, plain_query, P.scale, st);
        release();
      }
    }

    // Sum over the block's lanes: each parks its sums in the page buffer that it read last, two tiles
    // at a time, then a warp sums a query row over the lanes.
    if (lane == 0 && tile == 0) s_parked[head_lane] = held < 0 ? -1 : (int)(buffer(held) - memory);
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int c = 0; c < 2; c++) {
        float sum = st.sum[n][c];
#pragma unroll
        for (int d = 4; d < 32; d <<= 1) sum += shfl_xor(sum, d);
        if (lane < 4) s_top[(warp * NT + n) * 8 + 2 * t + c] = st.top[n][c], s_sum[(warp * NT + n) * 8 + 2 * t + c] = sum;
      }
    const bool whole = s.first_share == s.last_share;
    float* partial = partial_of<D>(P, s, blockIdx.x, tiles * together);
    constexpr int ROW = parked_row(D);
    static_assert(2 * 8 * ROW * 4 <= L::BYTES);
    if (tile_warps > 1) sync();  // the other warps of the lane have read its page, too
    for (int round = 0; 2 * round < tiles; round++) {
      if (held >= 0)
#pragma unroll
        for (int n = 0; n < NT; n++)
          if ((tile * NT + n) / 2 == round) {
            float* to = reinterpret_cast<float*>(buffer(held)) + ((tile * NT + n) & 1) * 8 * ROW + 2 * t * ROW + g;
#pragma unroll
            for (int i = 0; i < D / 16; i++) {
              to[i * 16] = st.o[n][i][0], to[ROW + i * 16] = st.o[n][i][1];
              to[i * 16 + 8] = st.o[n][i][2], to[ROW + i * 16 + 8] = st.o[n][i][3];
            }
          }
      fence_async_proxy();
      sync();
      const int last_row = min(16 * round + 16, rows);
      for (int i = 16 * round * together + warp; i < last_row * together; i += warps) {
        const int of_head = i & (together - 1), row = i >> shift, of = (lane << shift) + of_head;
        const int of_lane = (of * tile_warps * NT + (row >> 3)) * 8 + (row & 7);
        const int parked = lane < lanes ? s_parked[of] : -1;
        const float top = parked < 0 ? NEVER : s_top[of_lane], high = warp_max(top);
        const float weight = parked < 0 ? 0.f : exp2_approx(top - high), total = warp_sum(parked < 0 ? 0.f : s_sum[of_lane] * weight);
        Channels<D / 32> sum;
#pragma unroll 4
        for (int k = 0; k < lanes; k++) {
          const int from = __shfl_sync(0xffffffffu, parked, k);
          const float w = __shfl_sync(0xffffffffu, weight, k);
          if (from >= 0) sum.add(w, reinterpret_cast<const float*>(memory + from) + (row & 15) * ROW + lane * (D / 32));
        }
        if (whole) {
          sum.scale(reciprocal(total));
          store_output<D, BF16>(P, s, of_head, row, lane, sum);
        } else {
          float* to = partial + (of_head * tiles + (row >> 3)) * (D * 8 + 16);
          sum.store(to + (row & 7) * D + lane * (D / 32));
          if (lane == 0) to[D * 8 + (row & 7)] = high, to[D * 8 + 8 + (row & 7)] = total;
        }
      }
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
      if (*s_last) merge_shares<D, BF16>(P, s, tiles, shift, warps);
    }
    if (!s.more) return;
  }
}

}  // namespace s4kv
