// Attention of many query rows (prefill). Rows lie in vector lanes: scores[token][row] and
// output[channel][row] are then products in which keys and values are broadcast one number at a
// time from wherever they are, and maximum, sum and rescaling need no reduction across lanes.
// A sealed page is dequantised once for all rows of the tile.
#pragma once
#include "rows.h"

namespace s4kv::S4KV_ISA {
namespace {

constexpr int kGroup = 2 * W;  // rows that go through the micro-kernels together
constexpr int kGroups = kTileRows / kGroup;
constexpr int kUnroll = W == 16 ? 8 : 4;  // tokens or channels at once; times 2 accumulators

template <int D>
struct Many {
  struct Rows {
    alignas(64) float q[D][kGroup];  // times scale * log2(e)
    alignas(64) float acc[D][kGroup];
    alignas(64) float m[kGroup];
    alignas(64) float l[kGroup];
    alignas(64) int32_t seen[kGroup];  // tail tokens that a row sees
  };
  Rows rows[kGroups];
  alignas(64) float key[D * kBlock];
  alignas(64) float value[kBlock * D];
  alignas(64) float s[kBlock][kGroup];
};

// s[t] = factor * sum over c of key(t, c) * q[c], for t in [t0, t1), rounded up to whole steps.
template <int D, int N, int token_stride, int channel_stride>
void scores(const float* key, float factor, const typename Many<D>::Rows& rows, float (*s)[kGroup], int t0, int t1) {
  for (int t = t0; t < t1; t += kUnroll) {
    Vec x[kUnroll][N] = {};
    const float* k = key + t * token_stride;
    for (int c = 0; c < D; ++c) {
      Vec q[N];
#pragma GCC unroll 2
      for (int n = 0; n < N; ++n) q[n] = load(rows.q[c] + n * W);
#pragma GCC unroll 8
      for (int i = 0; i < kUnroll; ++i)
#pragma GCC unroll 2
        for (int n = 0; n < N; ++n) x[i][n] += k[i * token_stride + c * channel_stride] * q[n];
    }
#pragma GCC unroll 8
    for (int i = 0; i < kUnroll; ++i)
#pragma GCC unroll 2
      for (int n = 0; n < N; ++n) store(s[t + i] + n * W, x[i][n] * factor);
  }
}

// Scores to probabilities; returns in rescale what the accumulators are to be multiplied by.
template <int D, int N>
void softmax(typename Many<D>::Rows& rows, float (*s)[kGroup], int t0, int t1, Vec* rescale) {
#pragma GCC unroll 2
  for (int n = 0; n < N; ++n) {
    const Vec old = load(rows.m + n * W);
    Vec high = old;
    for (int t = t0; t < t1; ++t) high = max(high, load(s[t] + n * W));
    rescale[n] = exp2(old - high);
    const Vec m = high + kHeadroom;
    Vec l = load(rows.l + n * W) * rescale[n];
    for (int t = t0; t < t1; ++t) {
      const Vec p = exp2(load(s[t] + n * W) - m);
      l += p;
      store(s[t] + n * W, p);
    }
    store(rows.m + n * W, high);
    store(rows.l + n * W, l);
  }
}

// acc[c] = acc[c] * rescale + sum over t of value(t, c) * s[t].
template <int D, int N>
void accumulate(const float* value, typename Many<D>::Rows& rows, float (*s)[kGroup], int t0, int t1,
                const Vec* rescale) {
  for (int c = 0; c < D; c += kUnroll) {
    Vec x[kUnroll][N];
#pragma GCC unroll 8
    for (int i = 0; i < kUnroll; ++i)
#pragma GCC unroll 2
      for (int n = 0; n < N; ++n) x[i][n] = load(rows.acc[c + i] + n * W) * rescale[n];
    for (int t = t0; t < t1; ++t) {
      Vec p[N];
#pragma GCC unroll 2
      for (int n = 0; n < N; ++n) p[n] = load(s[t] + n * W);
#pragma GCC unroll 8
      for (int i = 0; i < kUnroll; ++i)
#pragma GCC unroll 2
        for (int n = 0; n < N; ++n) x[i][n] += value[t * D + c + i] * p[n];
    }
#pragma GCC unroll 8
    for (int i = 0; i < kUnroll; ++i)
#pragma GCC unroll 2
      for (int n = 0; n < N; ++n) store(rows.acc[c + i] + n * W, x[i][n]);
  }
}

// One group of rows against the tokens [t0, t1) of the key and value scratch, whose first is token
// `base` of the tail. masked: some row does not see all of them.
template <int D, int N, int token_stride, int channel_stride>
void attend_group(Many<D>& f, float factor, typename Many<D>::Rows& rows, int t0, int t1, bool masked, int32_t base) {
  scores<D, N, token_stride, channel_stride>(f.key, factor, rows, f.s, t0, t1);
  if (masked)
    for (int t = t0; t < t1; ++t)
      for (int i = 0; i < N * W; ++i) f.s[t][i] = base + t < rows.seen[i] ? f.s[t][i] : -__builtin_inff();
  Vec rescale[N];
  softmax<D, N>(rows, f.s, t0, t1, rescale);
  accumulate<D, N>(f.value, rows, f.s, t0, t1, rescale);
}

// Keys, without their power of two, as [channel][token]; values, still rotated, as [token][channel].
template <int D>
void dequantize(const SealedPage<D>& page, const int16_t* slot_channel, float* key, float* value) {
  constexpr int S = key_slots(D);
  alignas(64) float scale[S], offset[S];
  for (int i = 0; i < S; i += W) store(scale + i, load(page.key_scales() + i));
  for (int c = 0; c < D; ++c) {
    const Vec x = splat(to_float(page.key_offsets()[c]));
    for (int t = 0; t < kBlock; t += W) store(key + c * kBlock + t, x);
  }
  for (int i = 0; i < S; ++i) {
    if (slot_channel[i] < 0) continue;
    const uint8_t* codes = page.key_codes() + i * (kBlock / 2);
    float* row = key + slot_channel[i] * kBlock;
    for (int j = 0; j < kBlock / 2; j += W) {
      Vec a, b;
      nibbles<0>(codes + j, a, b);
      store(row + j, load(row + j) + scale[i] * a);
      store(row + kBlock / 2 + j, load(row + kBlock / 2 + j) + scale[i] * b);
    }
  }
  value_factors(page, scale, offset);
  for (int t = 0; t < kBlock; ++t) {
    const uint8_t* codes = page.value_codes() + t * (D / 2);
    float* row = value + t * D;
    for (int j = 0; j < D / 2; j += W) {
      Vec a, b;
      nibbles<0>(codes + j, a, b);
      store(row + j, splat(offset[t]) + scale[t] * a);
      store(row + D / 2 + j, splat(offset[t]) + scale[t] * b);
    }
  }
}

template <int D>
void unrotate(typename Many<D>::Rows& rows) {
  for (int span = 1; span < D; span *= 2)
    for (int i = 0; i < D; i += 2 * span)
      for (int c = i; c < i + span; ++c)
        for (int n = 0; n < kGroup; n += W) {
          const Vec a = load(rows.acc[c] + n), b = load(rows.acc[c + span] + n);
          store(rows.acc[c] + n, a + b);
          store(rows.acc[c + span] + n, a - b);
        }
}

template <typename T, int D>
void attend_many(const AttendArgs& a, const AttendTask& task) {
  const Request& r = a.requests[task.request];
  const Tail tail{r};
  const int count = int(task.tokens) * a.group, groups = (count + kGroup - 1) / kGroup;
  const float scale = a.scale * kLog2e;
  Many<D> f;
  for (int i = 0; i < groups; ++i) memset(&f.rows[i], 0, sizeof f.rows[i]);
  for (int i = 0; i < groups * kGroup; ++i) {
    auto& rows = f.rows[i / kGroup];
    const int lane = i % kGroup, row = i < count ? i : count - 1;  // the rest of the lanes repeat the last row
    const int64_t token = task.token + row / a.group;
    const T* q = query_row<T>(a, r, task.head, token, row % a.group);
    for (int c = 0; c < D; ++c) rows.q[c][lane] = to_float(q[c]) * scale;
    rows.m[lane] = -0x1p126f;  // below any score, and a difference with one stays finite
    rows.seen[lane] = int32_t(tail.end(r.computed + token));
  }
  // A last group of few rows needs half of the lanes.
  const bool half_last = count - (groups - 1) * kGroup <= W;

  for (int64_t b = task.block0; b < task.block1; ++b) {
    const SealedPage<D> page(a, r, task.head, b);
    const float factor = page.key_power();
    dequantize(page, a.slot_channel + task.head * key_slots(D), f.key, f.value);
    if (b + 1 < task.block1) SealedPage<D>(a, r, task.head, b + 1).prefetch();
    const int first = b == 0 ? kSinks : 0;
    for (int i = 0; i < groups; ++i) {
      if (i == groups - 1 && half_last)
        attend_group<D, 1, 1, kBlock>(f, factor, f.rows[i], first, kBlock, false, 0);
      else
        attend_group<D, 2, 1, kBlock>(f, factor, f.rows[i], first, kBlock, false, 0);
    }
  }
  if (task.block1 > task.block0)
    for (int i = 0; i < groups; ++i) unrotate<D>(f.rows[i]);

  const int64_t end = task.tail ? tail.end(r.computed + task.token + task.tokens - 1) : 0;
  for (int64_t start = 0; start < end; start += kBlock) {
    const int n = end - start < kBlock ? int(end - start) : kBlock;
    for (int t = 0; t < n; ++t) {
      const T *key, *value;
      tail_row<T, D>(a, r, task.head, tail.position(start + t), key, value);
      for (int c = 0; c < D; c += W) {
        store(f.key + t * D + c, load(key + c));
        store(f.value + t * D + c, load(value + c));
      }
    }
    prefetch_tail<T, D>(a, r, task.head, start + kBlock, end);
    for (int i = 0; i < groups; ++i) {
      auto& rows = f.rows[i];
      const int64_t last = rows.seen[kGroup - 1] - start;  // rows are in the order of their tokens
      const int m = last < n ? int(last) : n;
      if (m <= 0) continue;
      const bool masked = rows.seen[0] - start < m;
      if (i == groups - 1 && half_last)
        attend_group<D, 1, D, 1>(f, 1.0f, rows, 0, m, masked, int32_t(start));
      else
        attend_group<D, 2, D, 1>(f, 1.0f, rows, 0, m, masked, int32_t(start));
    }
  }

  float* partial = task.partial < 0 ? nullptr : a.partials + task.partial;
  for (int i = 0; i < count; ++i) {
    auto& rows = f.rows[i / kGroup];
    const int lane = i % kGroup;
    float x[D];
    for (int c = 0; c < D; ++c) x[c] = rows.acc[c][lane];
    if (partial) {
      memcpy(partial + i * D, x, sizeof x);
      partial[count * D + i] = rows.m[lane];
      partial[count * D + count + i] = rows.l[lane];
    } else {
      write_row(out_row<T>(a, r, task.head, task.token + i / a.group, i % a.group), x, 1.0f / rows.l[lane], D);
    }
  }
}

}  // namespace
}  // namespace s4kv::S4KV_ISA
