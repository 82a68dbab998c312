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

__global__ void __launch_bounds__(THREADS) plan_kernel(StepTables s, Plan p, int max_queries, int head_groups,
                                                       int min_pages) {
  extern __shared__ int memory[];
  const int n = s.requests;
  int* rows = memory;             // query_start, then
  int* pages = rows + n + 1;      // pages before each request, of one head group, and
  int* seals = pages + n + 1;     // seals before each request
  Request* request = reinterpret_cast<Request*>(seals + n + 1 + (-(3 * (n + 1)) & 3));
  __shared__ int2 scratch[32];
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
        int end = sealed_tokens(c), fresh = 0;
        // A null page where the window would start: a prefix hit brought everything before `c` sealed.
        if (end + BLOCK <= c && s.recent_table[i * s.recent_stride + max(end, SINKS) / RECENT_TOKENS] == 0)
          end += BLOCK, fresh = FRESH;
        r = {end, t, row, (q <= max_queries ? q : 0) | fresh};
        start = end;
        count = make_int2(total_pages(r), max(0, sealed_tokens(t) - end) / BLOCK);
      }
      request[i] = r;
    }
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
  const int total = pages[n] * head_groups;
  const int shares = min(p.grid, (total + min_pages - 1) / min_pages);
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

  // A warp a share. Requests without pages are never found: the search takes the last of equals.
  for (int k = first >> 5; k < p.grid; k += stride >> 5) {
    const int lane = threadIdx.x & 31;
    Share* out = p.share + k;
    if (k >= shares) {
      if (lane == 0) out->pages = 0;
      continue;
    }
    const int low = (int)((long)total * k / shares), high = (int)((long)total * (k + 1) / shares);
    auto locate = [&](int page, int& i, int& group) {  // -> page within (request, head group)
      int a = 0, b = n;
      while (b - a > 1) {
        const int mid = (a + b) >> 1;
        if (pages[mid] * head_groups <= page) a = mid; else b = mid;
      }
      i = a;
      const int of_group = pages[a + 1] - pages[a], rest = page - pages[a] * head_groups;
      group = rest / of_group;
      return rest % of_group;
    };
    int i, group;
    if (lane < FIRST_PAGES) {
      int id = 0;
      if (low + lane < high) {
        const int place = locate(low + lane, i, group);
        const Request r = request[i];
        const int n_sealed = sealed_pages(r);
        id = place < n_sealed ? s.sealed_table[i * s.sealed_stride + place]
                              : s.recent_table[i * s.recent_stride + recent_page(r, place - n_sealed)];
      }
      out->page[lane] = id;
    }
    if (lane == 0) {
      out->first = locate(low, i, group);
      out->request = i, out->head_group = group, out->pages = high - low;
      out->info = request[i];
    }
  }
}

}  // namespace

void plan_step(const StepTables& s, const Plan& p, int max_queries, int head_groups, int min_pages,
               cudaStream_t stream) {
  const int work = p.tokens > p.grid * 32 ? p.tokens : p.grid * 32;
  const int blocks = (work + THREADS - 1) / THREADS < 16 ? (work + THREADS - 1) / THREADS : 16;
  const int bytes = (3 * (s.requests + 1) + 4) * 4 + s.requests * (int)sizeof(Request);
  plan_kernel<<<blocks, THREADS, bytes, stream>>>(s, p, max_queries, head_groups, min_pages);
  check_launch("plan_step");
}

}  // namespace s4kv
