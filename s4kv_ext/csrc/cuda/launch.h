// Host entry points of the kernels, and what they share.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

namespace s4kv {

struct StepTables;
struct Plan;

// Throws with the kernel's name if the launch failed.
void check_launch(const char* name);
void check(cudaError_t error, const char* name);

// Pages of one layer: sealed [pages, H, bytes] and recent [pages, H, 2, 16, D], strides in bytes.
struct Pages {
  uint8_t* sealed;
  uint8_t* recent;
  long sealed_page, sealed_head, recent_page, recent_head;
  const int16_t* slot_channel;  // [H, D + 16]
  int heads, dim;
  bool bf16;
};

// How many parts of pages, each of one KV head, a thread block of `decode` works on at a time: `few`, or
// `many` of which up to `together` are heads of the same page. DRAM likes such reads best, but rows are
// then fewer and larger: where there are enough of them, or more than `long_share` parts a block.
struct Lanes {
  int few, many, together, long_share;
};
void plan_step(const StepTables&, const Plan&, int max_queries, int heads, Lanes, cudaStream_t);

struct NewTokens {
  const void* key;  // [T, H, D], heads of a token contiguous
  const void* value;
  long key_token, value_token;  // strides in elements
};
void store_and_seal(const Pages&, const NewTokens&, const StepTables&, const Plan&, cudaStream_t);

struct DecodeShape {
  int group;       // query heads a KV head
  int tile_warps;  // warps that share a page, each with its own query rows
  int tiles;       // tiles of 8 query rows a warp: 1 or 2
  int warps;       // of a thread block, without the one that copies
  int stages;      // of a page lane's ring
  int together;    // most KV heads of a row, see plan.cuh
};
struct Queries {
  const void* query;  // [T, H * G, D]
  void* out;
  long query_token, out_token;  // strides in elements; heads of a token contiguous
  float scale;
  float* partial;  // workspace
  int* arrivals;   // [requests * H], zero between launches
};
int decode_shared_bytes(int dim, const DecodeShape&);
long decode_partial_floats(int dim, int grid, const DecodeShape&);
void decode(const Pages&, const Queries&, const StepTables&, const Plan&, const DecodeShape&, cudaStream_t);

struct ContextChunk {
  const int* start;  // [requests] first token of each request, a multiple of 64
  const int* rows;   // [requests + 1] where its tokens go in the workspace
  void* key;         // [max_tokens, H, D]
  void* value;
  int max_tokens;
};
void dequant_context(const Pages&, const ContextChunk&, const StepTables&, cudaStream_t);

struct PageTable {
  int* pages;  // [requests, columns]
  long stride;
  int columns;
};
struct PageCheck {
  int* cells;  // the tag of each page; then, in rows, those expected of a request's sealed and recent pages
  long num_cells;
  int num_pages;
  const int4* requests;  // [num_requests] row, sealed pages, computed tokens, recent pages
  const int2* given;     // [num_given] cell, tag
  int num_requests, num_given;
  PageTable sealed, recent;
  int page_tokens;  // of a recent page
  bool withdraw;    // null pages for a request with a wrong one
  int4* wrong;      // [num_requests] 1, page, expected tag, tag found; or zeros
};
void check_pages(const PageCheck&, cudaStream_t);

}  // namespace s4kv
