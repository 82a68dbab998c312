// What one step has to do, worked out once on the device and read by every layer's kernels.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

namespace s4kv {

struct StepTables {
  const int* query_start;  // [requests + 1]
  const int* seq_lens;     // [requests], tokens after the step
  const int* sealed_table;
  const int* recent_table;
  long sealed_stride, recent_stride;  // entries a row
  int requests;
};

// Per request, for decode. queries 0: nothing to do here.
struct __align__(16) Request {
  int sealed;       // sealed tokens its queries see
  int seq_len;      // tokens after the step
  int query_start;  // row of its first query
  int queries;      // query tokens
};

// One KV head of a request, or a few that lie together, is a row of pages: its sealed pages, then
// (sinks first) its recent ones.
__host__ __device__ inline int sealed_pages(const Request& r) { return r.sealed / 64; }
__host__ __device__ inline int total_pages(const Request& r) {
  return r.queries == 0 ? 0 : sealed_pages(r) + (r.sealed > 0) + (r.seq_len + 15) / 16 - r.sealed / 16;
}
// Which of the request's recent pages comes k-th, and the first token it holds is 16 times that.
__host__ __device__ inline int recent_page_of(int sealed, int k) { return sealed == 0 || k == 0 ? k : sealed / 16 + k - 1; }
__host__ __device__ inline int recent_page(const Request& r, int k) { return recent_page_of(r.sealed, k); }

// What a thread block of the decode kernel reads: `pages` pages of a sequence in which the rows of all
// requests follow each other. Everything its first copies need is in here.
constexpr int FIRST_PAGES = 32;
struct __align__(16) Share {
  int request, head;  // head: the first of the row's
  int first;  // its first page, counted from the start of the row
  int pages;
  Request info;
  // Shares that the row it starts in is spread over, and whether the first of them starts with the
  // end of another row; the last share of the row it ends in.
  int first_share, last_share, first_is_second, end_last_share;
  int together;  // KV heads of a row: 1, 2 or 4
  int lanes;     // pages that the block works on at a time
  int unused[2];
  int page[FIRST_PAGES];
};
static_assert(sizeof(Share) == 192);

struct __align__(16) Seal {
  int request, start;  // block of tokens [start, start + 64)
  int computed;        // tokens before the step: older ones are in recent pages
  int query_start;     // row of token `computed` among the new ones
};

struct Header {
  int pages;   // of all requests and heads
  int shares;  // thread blocks that have work
  int seals;
  int unused[5];
};

struct Plan {
  Header* header;
  Request* request;  // [requests]
  Share* share;      // [grid]
  Seal* seal;        // [max_seals]
  int* slot;         // [tokens]: recent page * 16 + place of each new token, -1: not stored
  int grid, max_seals, tokens;
};

}  // namespace s4kv
