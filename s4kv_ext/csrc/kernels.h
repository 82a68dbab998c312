// What passes between the torch side (ops.cpp, plan.cpp, run.cpp) and the kernels. Plain data: the
// kernels are compiled for several instruction sets, and an inline function of the standard library
// or of torch in one of them could end up in the others.
#pragma once
#include <stdint.h>

namespace s4kv {

enum class DType { f32, bf16, f16 };

// A [tokens, heads, dim] tensor with its last dimension contiguous; strides in elements.
struct Tokens {
  void* data;
  int64_t token_stride, head_stride;
};

struct Pages {
  uint8_t* sealed;  // [pages, H, bytes], strides in bytes
  int64_t sealed_page_stride, sealed_head_stride;
  void* recent;  // [pages, H, 2, page_tokens, D], strides in elements
  int64_t recent_page_stride, recent_head_stride;
  int page_tokens;
};

struct Request {
  int64_t row;               // of its first new token
  int64_t computed, length;  // tokens before and after the step
  int64_t sealed;            // tokens that were sealed before the step
  const int32_t* sealed_row;
  const int32_t* recent_row;
};

struct StepArgs {
  DType dtype;
  int dim, kv_heads, group;  // group: query heads of a KV head
  Tokens key, value;
  Pages pages;
  const int16_t* slot_channel;  // [H, S]
  const Request* requests;
};

struct SealTask {
  int32_t request, head;
  int64_t block;
};

struct AttendArgs : StepArgs {
  Tokens query, out;
  float scale;
  float* partials;
};

// Some query tokens of one request and KV head against a part of what they see: sealed blocks
// [block0, block1) and, if tail, every token that is not sealed.
struct AttendTask {
  int32_t request, head;
  int64_t token, tokens;  // of the request's new ones
  int64_t block0, block1;
  bool tail;
  int64_t partial;  // offset in partials, or -1: this task sees everything and writes the output
};

// The partial results of one set of query rows: splits times rows * (dim + 2) floats,
// [rows][dim] unnormalised output, [rows] maximum, [rows] sum.
struct MergeTask {
  int32_t request, head;
  int64_t token, tokens;
  int64_t partial;
  int splits;
};

constexpr int kTileRows = 192;  // query rows of a task, at most

struct Kernels {
  const char* name;
  void (*seal)(const StepArgs&, const SealTask&);
  void (*attend)(const AttendArgs&, const AttendTask&);
  void (*merge)(const AttendArgs&, const MergeTask&);
};

#define S4KV_DECLARE(isa)                              \
  namespace isa {                                      \
  void seal(const StepArgs&, const SealTask&);         \
  void attend(const AttendArgs&, const AttendTask&);   \
  void merge(const AttendArgs&, const MergeTask&);     \
  }
S4KV_DECLARE(baseline)
S4KV_DECLARE(avx2)
S4KV_DECLARE(avx512)
#undef S4KV_DECLARE

}  // namespace s4kv
