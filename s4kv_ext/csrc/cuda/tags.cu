// check_pages: once a step, before attention. One launch, and one before it if pages were given. What a step
// brings and what was found may lie in pinned memory: a few hundred bytes, sooner read there than copied.
#include <climits>

#include "launch.h"
#include "layout.cuh"

namespace s4kv {
namespace {

constexpr int THREADS = 256;
constexpr int OUTSIDE = -1;  // the tag of a page that is not in the pool

// All tags must be there before any is compared, and thread blocks of one launch have no order.
__global__ void __launch_bounds__(THREADS) give_kernel(PageCheck p) {
  const int i = blockIdx.x * THREADS + threadIdx.x;
  if (i >= p.num_given) return;
  const int2 given = p.given[i];
  if (given.x >= 0 && given.x < p.num_cells) p.cells[given.x] = given.y;
}

// A thread block a request: the entries that attention needs in one sequence, sealed pages, sinks, window.
__global__ void __launch_bounds__(THREADS) check_kernel(PageCheck p) {
  __shared__ int first;
  __shared__ int4 request;
  if (threadIdx.x == 0) first = INT_MAX, request = p.requests[blockIdx.x];  // may be far: read once
  __syncthreads();
  const int4 r = request;
  const int columns = p.sealed.columns + p.recent.columns;
  const int* expected = p.cells + p.num_pages + (long)r.x * columns;
  int* sealed = p.sealed.pages + blockIdx.x * p.sealed.stride;
  int* recent = p.recent.pages + blockIdx.x * p.recent.stride;
  const int num_sealed = min(r.y, p.sealed.columns), num_recent = min(r.w, p.recent.columns);
  const int sinks = min(SINKS / p.page_tokens, num_recent);
  const int gap = max(sinks, sealed_tokens(r.z) / p.page_tokens) - sinks;  // pages given back, after the sinks
  const int needed = num_sealed + max(sinks, num_recent - gap);

  int at = INT_MAX;
  int4 wrong = make_int4(0, 0, 0, 0);
  for (int i = threadIdx.x; i < needed; i += THREADS) {
    int column = i - num_sealed;
    if (column >= sinks) column += gap;
    const int page = i < num_sealed ? sealed[i] : recent[column];
    const int want = expected[i < num_sealed ? i : p.sealed.columns + column];
    const int found = page >= 0 && page < p.num_pages ? p.cells[page] : OUTSIDE;
    if (found == want) continue;
    at = i, wrong = make_int4(1, page, want, found);
    break;
  }
  if (!__syncthreads_or(at != INT_MAX)) {
    if (threadIdx.x == 0) p.wrong[blockIdx.x] = wrong;
    return;
  }
  if (at != INT_MAX) atomicMin(&first, at);
  __syncthreads();
  if (at == first) p.wrong[blockIdx.x] = wrong;
  if (!p.withdraw) return;
  for (int i = threadIdx.x; i < p.sealed.columns; i += THREADS) sealed[i] = 0;
  for (int i = threadIdx.x; i < p.recent.columns; i += THREADS) recent[i] = 0;
}

}  // namespace

void check_pages(const PageCheck& p, cudaStream_t stream) {
  if (p.num_given) give_kernel<<<(p.num_given + THREADS - 1) / THREADS, THREADS, 0, stream>>>(p);
  if (p.num_requests) check_kernel<<<p.num_requests, THREADS, 0, stream>>>(p);
  check_launch("check_pages");
}

}  // namespace s4kv
