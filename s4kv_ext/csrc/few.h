// Attention of a few query rows (decode). The work is reading the codes, so each byte is unpacked
// once for all rows and multiplied as it is: key scales go into the queries, value scales into the
// probabilities, offsets become one dot product a page. Codes count from the middle, 7.5: sums of
// codes and of offsets are then both about as large as the result, and no digits cancel.
#pragma once
#include "rows.h"

namespace s4kv::S4KV_ISA {
namespace {

constexpr int kFewRows = 8;

template <int D, int R>
struct Few {
  static constexpr int S = key_slots(D);
  alignas(64) float q[R][D];     // times scale * log2(e)
  alignas(64) float q_slot[R][S];  // gathered into slots
  alignas(64) float acc[R][D];
  alignas(64) float s[R][kBlock];  // scores, then probabilities
  float m[R];                    // running maximum
  Vec l[R];                      // running sum, by lane
  Vec offset[R];                 // probabilities times value offsets, by lane
  float rescale[R];
};

constexpr float kMiddle = 7.5f;

// out[r][j] += sum over i of coef[r][i] * (low nibble of codes[i][j] - 7.5), and out[r][half + j]
// with the high ones, for j in [0, half).
template <int R, int half>
void times_codes(const uint8_t* codes, int n, const float* coef, int ld_coef, float* out, int ld_out) {
  constexpr int registers = W == 16 ? 24 : 12;
  constexpr int N = R * 4 <= registers && half >= 2 * W ? 2 : 1;
  for (int j = 0; j < half; j += N * W) {
    Vec low[R][N], high[R][N];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int k = 0; k < N; ++k) {
        low[r][k] = load(out + r * ld_out + j + k * W);
        high[r][k] = load(out + r * ld_out + half + j + k * W);
      }
    for (int i = 0; i < n; ++i) {
#pragma GCC unroll 2
      for (int k = 0; k < N; ++k) {
        Vec a, b;
        nibbles<15>(codes + i * half + j + k * W, a, b);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
          low[r][k] += coef[r * ld_coef + i] * a;
          high[r][k] += coef[r * ld_coef + i] * b;
        }
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int k = 0; k < N; ++k) {
        store(out + r * ld_out + j + k * W, low[r][k]);
        store(out + r * ld_out + half + j + k * W, high[r][k]);
      }
  }
}

// Scores to probabilities, with the running maximum and sum. n: scores, a multiple of W.
template <int D, int R>
void softmax(Few<D, R>& f, int n) {
  for (int r = 0; r < R; ++r) {
    Vec high = splat(f.m[r]);
    for (int t = 0; t < n; t += W) high = max(high, load(f.s[r] + t));
    const float m = top(high), shift = m + kHeadroom;
    const float rescale = exp2(f.m[r] - m);
    f.l[r] *= rescale;
    f.offset[r] *= rescale;
    for (int t = 0; t < n; t += W) {
      const Vec p = exp2(load(f.s[r] + t) - shift);
      f.l[r] += p;
      store(f.s[r] + t, p);
    }
    f.m[r] = m;
    if (rescale != 1.0f)
      for (int c = 0; c < D; c += W) store(f.acc[r] + c, load(f.acc[r] + c) * rescale);
  }
}

template <int D, int R>
void attend_page(Few<D, R>& f, const SealedPage<D>& page, int first) {
  constexpr int S = key_slots(D);
  alignas(64) float coef[R][S];
  for (int r = 0; r < R; ++r) {
    Vec offset{};
    for (int i = 0; i < S; i += W) {
      const Vec x = load(f.q_slot[r] + i) * load(page.key_scales() + i);
      store(coef[r] + i, x);
      offset += x * kMiddle;
    }
    for (int c = 0; c < D; c += W) offset += load(f.q[r] + c) * load(page.key_offsets() + c);
    const Vec start = splat(sum(offset));
    for (int t = 0; t < kBlock; t += W) store(f.s[r] + t, start);
  }
  times_codes<R, kBlock / 2>(page.key_codes(), S, coef[0], S, f.s[0], kBlock);
  const float factor = page.key_power();
  for (int r = 0; r < R; ++r) {
    for (int t = 0; t < kBlock; t += W) store(f.s[r] + t, load(f.s[r] + t) * factor);
    for (int t = 0; t < first; ++t) f.s[r][t] = -__builtin_inff();
  }
  softmax(f, kBlock);
  alignas(64) float scale[kBlock], offset[kBlock];
  value_factors(page, scale, offset);
  for (int r = 0; r < R; ++r)
    for (int t = 0; t < kBlock; t += W) {
      const Vec p = load(f.s[r] + t);
      f.offset[r] += p * (load(offset + t) + load(scale + t) * kMiddle);
      store(f.s[r] + t, p * load(scale + t));
    }
  times_codes<R, D / 2>(page.value_codes(), kBlock, f.s[0], kBlock, f.acc[0], D);
}

// The sealed part is done: add the offsets, which are the same for every rotated channel, and undo
// the rotation. What follows is not rotated.
template <int D, int R>
void unrotate(Few<D, R>& f) {
  for (int r = 0; r < R; ++r) {
    const float offset = sum(f.offset[r]);
    float* x = f.acc[r];
    for (int c = 0; c < D; ++c) x[c] += offset;
    for (int span = 1; span < D; span *= 2)
      for (int i = 0; i < D; i += 2 * span)
        for (int j = i; j < i + span; ++j) {
          const float a = x[j], b = x[j + span];
          x[j] = a + b;
          x[j + span] = a - b;
        }
    f.offset[r] = Vec{};
  }
}

template <typename T, int D, int R>
void attend_tail(Few<D, R>& f, const AttendArgs& a, const Request& r, const AttendTask& task) {
  const Tail tail{r};
  const int64_t end = tail.end(r.computed + task.token + task.tokens - 1);
  const T *key[kBlock], *value[kBlock];
  for (int64_t start = 0; start < end; start += kBlock) {
    const int n = end - start < kBlock ? int(end - start) : kBlock;
    for (int t = 0; t < n; ++t) tail_row<T, D>(a, r, task.head, tail.position(start + t), key[t], value[t]);
    prefetch_tail<T, D>(a, r, task.head, start + kBlock, end);
    // Dot products leave their W parts in lanes; they are summed up for W tokens at a time.
    for (int i = 0; i < R; ++i)
      for (int t0 = 0; t0 < n; t0 += W) {
        Vec dot[W] = {};
        const int some = n - t0 < W ? n - t0 : W;
        for (int t = 0; t < some; ++t)
#pragma GCC unroll 8
          for (int c = 0; c < D; c += W) dot[t] += load(key[t0 + t] + c) * load(f.q[i] + c);
        store(f.s[i] + t0, sums(dot));
      }
    const int whole = (n + W - 1) / W * W;
    for (int i = 0; i < R; ++i) {
      int64_t seen = tail.end(r.computed + task.token + i / a.group) - start;
      for (int64_t t = seen < n ? (seen < 0 ? 0 : seen) : n; t < whole; ++t) f.s[i][t] = -__builtin_inff();
    }
    softmax(f, whole);
    constexpr int N = R * 4 <= (W == 16 ? 24 : 8) ? 4 : 2;  // columns at once
    for (int c = 0; c < D; c += N * W) {
      Vec x[R][N];
#pragma GCC unroll 16
      for (int i = 0; i < R; ++i)
#pragma GCC unroll 4
        for (int k = 0; k < N; ++k) x[i][k] = load(f.acc[i] + c + k * W);
      for (int t = 0; t < n; ++t) {
        Vec v[N];
#pragma GCC unroll 4
        for (int k = 0; k < N; ++k) v[k] = load(value[t] + c + k * W);
#pragma GCC unroll 16
        for (int i = 0; i < R; ++i)
#pragma GCC unroll 4
          for (int k = 0; k < N; ++k) x[i][k] += f.s[i][t] * v[k];
      }
#pragma GCC unroll 16
      for (int i = 0; i < R; ++i)
#pragma GCC unroll 4
        for (int k = 0; k < N; ++k) store(f.acc[i] + c + k * W, x[i][k]);
    }
  }
}

template <typename T, int D, int R>
void attend_few(const AttendArgs& a, const AttendTask& task) {
  const Request& r = a.requests[task.request];
  Few<D, R> f;
  const int16_t* slot_channel = a.slot_channel + task.head * key_slots(D);
  const float scale = a.scale * kLog2e;
  for (int i = 0; i < R; ++i) {
    const T* q = query_row<T>(a, r, task.head, task.token + i / a.group, i % a.group);
    for (int c = 0; c < D; c += W) {
      store(f.q[i] + c, load(q + c) * scale);
      store(f.acc[i] + c, Vec{});
    }
    f.m[i] = -0x1p126f;  // below any score, and a difference with one stays finite
    f.l[i] = f.offset[i] = Vec{};
  }
  if (task.block1 > task.block0) {
    for (int i = 0; i < R; ++i)
      for (int s = 0; s < key_slots(D); ++s) f.q_slot[i][s] = slot_channel[s] < 0 ? 0.0f : f.q[i][slot_channel[s]];
    for (int64_t b = task.block0; b < task.block1; ++b) {
      if (b + 1 < task.block1)
        SealedPage<D>(a, r, task.head, b + 1).prefetch();
      else if (task.tail)
        prefetch_tail<T, D>(a, r, task.head, 0, Tail{r}.size());
      attend_page(f, SealedPage<D>(a, r, task.head, b), b == 0 ? kSinks : 0);
    }
    unrotate(f);
  }
  if (task.tail) attend_tail<T>(f, a, r, task);

  float* partial = task.partial < 0 ? nullptr : a.partials + task.partial;
  for (int i = 0; i < R; ++i) {
    if (partial) {
      memcpy(partial + i * D, f.acc[i], sizeof f.acc[i]);
      partial[R * D + i] = f.m[i];
      partial[R * D + R + i] = sum(f.l[i]);
    } else {
      write_row(out_row<T>(a, r, task.head, task.token + i / a.group, i % a.group), f.acc[i], 1.0f / sum(f.l[i]), D);
    }
  }
}

}  // namespace
}  // namespace s4kv::S4KV_ISA
