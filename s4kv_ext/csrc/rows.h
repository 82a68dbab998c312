// Where a task's queries, outputs and unsealed tokens are.
#pragma once
#include "format.h"
#include "kernels.h"
#include "vec.h"

namespace s4kv::S4KV_ISA {
namespace {

// Scores are kept in powers of two.
constexpr float kLog2e = 1.44269504088896340736f;

// Probabilities are at most 2**-20 before they are normalised, so that a sum over any context of the
// largest values there are is finite.
constexpr float kHeadroom = 20.0f;

template <typename T>
const T* query_row(const AttendArgs& a, const Request& r, int head, int64_t token, int g) {
  return (const T*)a.query.data + (r.row + token) * a.query.token_stride + (head * a.group + g) * a.query.head_stride;
}

template <typename T>
T* out_row(const AttendArgs& a, const Request& r, int head, int64_t token, int g) {
  return (T*)a.out.data + (r.row + token) * a.out.token_stride + (head * a.group + g) * a.out.head_stride;
}

template <typename T>
void write_row(T* out, const float* x, float factor, int dim) {
  for (int c = 0; c < dim; ++c) from_float(x[c] * factor, out[c]);
}

// The tokens that are not sealed, in order: sinks, recent pages, the step's own. Once anything is
// sealed the sinks are apart from the rest.
struct Tail {
  const Request& r;
  int64_t size() const { return r.sealed ? kSinks + r.length - r.sealed : r.length; }
  int64_t position(int64_t i) const { return r.sealed && i >= kSinks ? r.sealed + i - kSinks : i; }
  // First index that a query at position p, one of the step's own, does not see.
  int64_t end(int64_t p) const { return size() - (r.length - 1 - p); }
};

template <typename T, int D>
void tail_row(const AttendArgs& a, const Request& r, int head, int64_t position, const T*& key, const T*& value) {
  if (position >= r.computed) {
    const int64_t row = r.row + position - r.computed;
    key = (const T*)a.key.data + row * a.key.token_stride + head * a.key.head_stride;
    value = (const T*)a.value.data + row * a.value.token_stride + head * a.value.head_stride;
  } else {
    const int n = a.pages.page_tokens;
    key = (const T*)a.pages.recent + r.recent_row[position / n] * a.pages.recent_page_stride +
          head * a.pages.recent_head_stride + position % n * D;
    value = key + n * D;
  }
}

// Asks for the rows of the tail's tokens [start, start + kBlock).
template <typename T, int D>
void prefetch_tail(const AttendArgs& a, const Request& r, int head, int64_t start, int64_t end) {
  const Tail tail{r};
  for (int64_t i = start; i < end && i < start + kBlock; ++i) {
    const T *key, *value;
    tail_row<T, D>(a, r, head, tail.position(i), key, value);
    for (int c = 0; c < D; c += 64 / sizeof(T)) {
      __builtin_prefetch(key + c);
      __builtin_prefetch(value + c);
    }
  }
}

template <int D>
struct SealedPage : Sections<D> {
  const uint8_t* p;
  SealedPage(const AttendArgs& a, const Request& r, int head, int64_t block)
      : p(a.pages.sealed + r.sealed_row[block] * a.pages.sealed_page_stride + head * a.pages.sealed_head_stride) {}
  using S = Sections<D>;
  const uint8_t* key_codes() const { return p + S::key_code; }
  const uint8_t* value_codes() const { return p + S::value_code; }
  const f16* key_scales() const { return (const f16*)(p + S::key_scale); }
  const f16* key_offsets() const { return (const f16*)(p + S::key_offset); }
  const f16* value_scales() const { return (const f16*)(p + S::value_scale); }
  const f16* value_offsets() const { return (const f16*)(p + S::value_offset); }
  // Pages lie anywhere, so the processor does not see the next one coming.
  void prefetch() const {
    for (int i = 0; i < S::bytes; i += 64) __builtin_prefetch(p + i);
  }
  float key_power() const { return power((int8_t)p[S::exponents]); }
  int value_exponent() const { return (int8_t)p[S::exponents + 1]; }
};

// Scales and offsets of the values times 2**exponent / D: in this order nothing overflows that the
// values themselves do not.
template <int D>
void value_factors(const SealedPage<D>& page, float* scale, float* offset) {
  const float factor = power(page.value_exponent());
  for (int t = 0; t < kBlock; t += W) {
    store(scale + t, load(page.value_scales() + t) * (1.0f / D) * factor);
    store(offset + t, load(page.value_offsets() + t) * (1.0f / D) * factor);
  }
}

}  // namespace
}  // namespace s4kv::S4KV_ISA
