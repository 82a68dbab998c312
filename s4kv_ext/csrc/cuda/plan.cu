// plan_step: one launch a step. Every thread block scans all requests, then writes its part.
#include "launch.h"
#include "layout.cuh"
#include "plan.cuh"
#include "prims.cuh"

namespace s4kv {
namespace {

constexpr int THREADS = 1024;

// Inclusive scan of two values a thread over the block.
__device__ int2 scan(int2 v, int2* scratch) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
  for (int d = 1; d < 32; d <<= 1) {
    const int x = __shfl_up_sync(0xffffffffu, v.x, d), y = __shfl_up_sync(0xffffffffu, v.y, d);
    if (lane >= d) v.x += x, v.y += y;
  }
  if (lane == 31) scratch[warp] = v;
  __syncthreads();
  if (warp == 0) {
    int2 w = scratch[lane];
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
      const int x = __shfl_up_sync(0xffffffffu, w.x, d), y = __shfl_up_sync(0xffffffffu, w.y, d);
      if (lane >= d) w.x += x, w.y += y;
    }
    scratch[lane] = w;
  }
  __syncthreads();
  if (warp) v.x += scratch[warp - 1].x, v.y += scratch[warp - 1].y;
  return v;
}

// Largest i with start[i] <= x; start[0] == 0.
__device__ int find(const int* start, int n, int x) {
  int low = 0, high = n;
  while (high - low > 1) {
    const int mid = (low + high) >> 1;
    if (start[mid] <= x) low = mid; else high = mid;
  }
  return low;
}

// How many shares `total` pages in `rows` rows are cut into.
// Where rows are about equally long, a number that lets cuts fall between rows: a row that is read
// by one thread block needs no merge.
__device__ int choose_shares(int total, int rows, int longest, int grid, int few_lanes) {
  int shares = min(grid, (total + few_lanes - 1) / few_lanes);
  if (rows == 0 || (long)longest * rows > total + total / 16) return shares;
  if (rows <= grid) {
    // As many shares a row as give each lane of a block a page; one if that is nearly enough.
    const int parts = longest <= 2 * few_lanes ? 1 : min(grid / rows, (longest + few_lanes - 1) / few_lanes);
    return parts * rows * 8 >= shares * 7 || longest <= 4 * few_lanes ? parts * rows : shares;
  }
  const int turns = (rows + shares - 1) / shares, aligned = (rows + turns - 1) / turns;
  return aligned * 8 >= shares * 7 ? aligned : shares;
}

struct Place {
  int request, group, page, count;  // page: of that row, which has `count`
};
struct Rows {
  const int* pages;  // of one row before each request; [requests + 1]
  int requests, groups, total, shares;

  __device__ Place locate(int page) const {
    int a = 0, b = requests;  // requests without pages are never found: the search takes the last of equals
    while (b - a > 1) {
      const int mid = (a + b) >> 1;
      if (pages[mid] * groups <= page) a = mid; else b = mid;
    }
    const int count = pages[a + 1] - pages[a], rest = page - pages[a] * groups;
    return {a, rest / count, rest % count, count};
  }
  // Equal shares, but a cut that falls close to the end of a row is moved there.
  __device__ int share_start(int k) const {
    const int x = total / shares * k + total % shares * k / shares;  // total * k / shares without overflow
    if (x <= 0 || x >= total) return x;
    const Place at = locate(x);
    const int near = total / shares / 16;
    return at.page <= near ? x - at.page : at.count - at.page <= near ? x + at.count - at.page : x;
  }
  __device__ int share_of(int page) const {
    int k = min((int)((float)page * shares / total), shares - 1);
    while (k + 1 < shares && share_start(k + 1) <= page) k++;
    while (share_start(k) > page) k--;
    return k;
  }
};

__global__ void __launch_bounds__(THREADS) plan_kernel(StepTables s, Plan p, int max_queries, int heads,
                                                       Lanes lanes) {
  extern __shared__ int memory[];
  const int n = s.requests;
  int* rows = memory;             // query_start, then
  int* pages = rows + n + 1;      // pages of one head before each request, and
  int* seals = pages + n + 1;     // seals before each request
  Request* request = reinterpret_cast<Request*>(seals + n + 1 + (-(3 * (n + 1)) & 3));
  __shared__ int2 scratch[32];
  __shared__ int active, longest;  // requests with pages; pages of the longest one's heads
  if (threadIdx.x == 0) active = longest = 0;
  __syncthreads();
  int2 carry = make_int2(0, 0);
  for (int base = 0; base < n; base += THREADS) {
    const int i = base + threadIdx.x;
    int2 count = make_int2(0, 0);
    Request r{0, 0, 0, 0};
    int start = 0;
    if (i < n) {
      const int row = s.query_start[i], q = s.query_start[i + 1] - row, t = s.seq_lens[i], c = t - q;
      rows[i] = row;
      if (i == n - 1) rows[n] = row + q;
      if (q > 0 && c >= 0) {
        int end = sealed_tokens(c);
        // A null page where the window would start: a prefix hit brought everything before `c` sealed.
        if (end + BLOCK <= c && s.recent_table[i * s.recent_stride + max(end, SINKS) / RECENT_TOKENS] == 0)
          end += BLOCK;
        r = {end, t, row, q <= max_queries ? q : 0};
        start = end;
        count = make_int2(total_pages(r), max(0, sealed_tokens(t) - end) / BLOCK);
      }
      request[i] = r;
    }
    if (count.x) atomicAdd(&active, 1), atomicMax(&longest, count.x);
    const int2 sum = scan(count, scratch);
    if (i < n) {
      pages[i] = carry.x + sum.x - count.x;
      seals[i] = carry.y + sum.y - count.y;
      if (i == n - 1) pages[n] = carry.x + sum.x, seals[n] = carry.y + sum.y;
      if (blockIdx.x == 0) {
        p.request[i] = r;
        const int q = s.query_start[i + 1] - s.query_start[i];
        for (int k = 0; k < count.y && seals[i] + k < p.max_seals; k++)
          p.seal[seals[i] + k] = {i, start + k * BLOCK, r.seq_len - q, r.query_start};
      }
    }
    __syncthreads();
    if (base + THREADS < n) {
      if (threadIdx.x == THREADS - 1) scratch[0] = make_int2(carry.x + sum.x, carry.y + sum.y);
      __syncthreads();
      carry = scratch[0];
      __syncthreads();
    }
  }
  const bool long_shares = pages[n] * heads > p.grid * lanes.long_share;
  int together = lanes.together;
  while (together > 1 && !long_shares && active * heads / together * 8 < p.grid * 7) together /= 2;
  const int groups = heads / together, total = pages[n] * groups;
  const int shares = choose_shares(total, active * groups, longest, p.grid, lanes.few);
  if (blockIdx.x == 0 && threadIdx.x == 0) *p.header = {total, shares, min(seals[n], p.max_seals), {0, 0, 0, 0, 0}};

  const int stride = gridDim.x * THREADS, first = blockIdx.x * THREADS + threadIdx.x;
  for (int token = first; token < p.tokens; token += stride) {
    int slot = -1;
    if (token < rows[n]) {
      const int i = find(rows, n, token), t = s.seq_lens[i], position = t - (rows[i + 1] - token);
      if (position >= 0 && (position < SINKS || position >= sealed_tokens(t)))
        slot = s.recent_table[i * s.recent_stride + position / RECENT_TOKENS] * RECENT_TOKENS + position % RECENT_TOKENS;
    }
    p.slot[token] = slot;
  }

  // A warp a share.
  const Rows of{pages, n, groups, total, shares};
  for (int k = first >> 5; k < p.grid; k += stride >> 5) {
    const int lane = threadIdx.x & 31;
    Share* out = p.share + k;
    if (k >= shares) {
      if (lane == 0) out->pages = 0;
      continue;
    }
    const int low = of.share_start(k), high = of.share_start(k + 1);
    int id = 0;
    if (low + lane < high) {
      const Place at = of.locate(low + lane);
      const Request r = request[at.request];
      const int recent = at.page - sealed_pages(r);
      id = recent < 0 ? s.sealed_table[at.request * s.sealed_stride + at.page]
                      : s.recent_table[at.request * s.recent_stride + recent_page(r, recent)];
    }
    out->page[lane] = id;
    if (lane == 0) out->together = together, out->lanes = together > 1 || long_shares ? lanes.many / together : lanes.few;
    if (lane == 0 && low == high) out->pages = 0;
    if (lane == 0 && low < high) {
      const Place at = of.locate(low), last = of.locate(high - 1);
      out->request = at.request, out->head = at.group * together, out->first = at.page, out->pages = high - low;
      out->info = request[at.request];
      out->first_share = of.share_of(low - at.page), out->last_share = of.share_of(low - at.page + at.count - 1);
      out->first_is_second = of.share_start(out->first_share) < low - at.page;
      out->end_last_share = of.share_of(high - 1 - last.page + last.count - 1);
    }
  }
}

}  // namespace

void plan_step(const StepTables& s, const Plan& p, int max_queries, int heads, Lanes lanes, cudaStream_t stream) {
  const int work = p.tokens > p.grid * 32 ? p.tokens : p.grid * 32;
  const int blocks = (work + THREADS - 1) / THREADS < 16 ? (work + THREADS - 1) / THREADS : 16;
  const int bytes = (3 * (s.requests + 1) + 4) * 4 + s.requests * (int)sizeof(Request);
  plan_kernel<<<blocks, THREADS, bytes, stream>>>(s, p, max_queries, heads, lanes);
  check_launch("plan_step");
}

}  // namespace s4kv
