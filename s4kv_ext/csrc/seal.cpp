// Quantise one block of one KV head into its sealed page: quantize.py and LanePacking in one go, bit
// for bit. Every operation is exact or correctly rounded and in quantize.py's order; the loops are
// written so that the compiler vectorises them.
#include "format.h"
#include "half.h"
#include "kernels.h"

namespace s4kv::S4KV_ISA {
namespace {

constexpr int kMinExponent = -120;

struct Scratch {
  alignas(64) float x[kBlock * 128];
  alignas(64) uint8_t code[kBlock * 128];
};

// Largest float16 not above x.
f16 round_down(float x) {
  f16 near = half(x);
  if (to_float(near) > x) {
    if ((near.bits & 0x7fff) == 0)
      near.bits = 0x8001;
    else
      near.bits += near.bits & 0x8000 ? 1 : -1;
  }
  return near;
}
f16 round_up(float x) {
  f16 h = round_down(-x);
  h.bits ^= 0x8000;
  return h;
}

// To the nearest integer, ties to even, for |x| < 2**22: the sum has no room for a fraction.
float round_even(float x) { return (x + 0x1.8p23f) - 0x1.8p23f; }

float power(int e) { return float_of(uint32_t(e + 127) << 23); }

int exponent_of(const float* x, int n) {
  uint32_t top = 0;  // as integers, magnitudes order like floats
  for (int i = 0; i < n; ++i) {
    uint32_t u = bits_of(x[i]) & 0x7fffffff;
    top = u > top ? u : top;
  }
  if (top == 0) return 0;
  int e = int(top >> 23) - 126 - 5;  // frexp's exponent; a subnormal falls below the limit anyway
  return e < kMinExponent ? kMinExponent : e;
}

// -0 becomes 0, so that minima and maxima do not depend on the order they are taken in.
void scale_by(float* x, int n, float factor) {
  for (int i = 0; i < n; ++i) x[i] = x[i] * factor + 0.0f;
}

constexpr float kMoves[] = {0.0f, -0.3f, 0.3f};

// Offset, scale and codes of N ranges, each of x[0..ROWS)[i] in `steps[i]` steps: those of
// quantize._choose_range. What it returns is float16; the loops run over the ranges.
template <int ROWS, int N>
struct Ranges {
  alignas(64) float low[N], high[N], offset[N], scale[N];
  f16 offset16[N], scale16[N];

  void find_ends(const float* x) {
    for (int i = 0; i < N; ++i) low[i] = high[i] = x[i];
    for (int row = 1; row < ROWS; ++row, x += N)
      for (int i = 0; i < N; ++i) {
        const float v = x[N + i];
        low[i] = v < low[i] ? v : low[i];
        high[i] = v > high[i] ? v : high[i];
      }
  }

  template <bool ENDS>
  void choose(const float* x, const float* steps) {
    find_ends(x);
    alignas(64) float step[N], middle[N], unit[N], to_end[N];
    alignas(64) float new_offset[N], new_scale[N], inverse[N];
    alignas(64) int32_t least[N], error[N];
    f16 new_offset16[N], new_scale16[N];
    for (int i = 0; i < N; ++i) {
      step[i] = (high[i] - low[i]) / steps[i];
      middle[i] = (low[i] + high[i]) * 0.5f;
      least[i] = INT32_MAX;
    }
    for (int move = 0; move < 9; ++move) {
      const float a = kMoves[move / 3], b = kMoves[move % 3];
      for (int i = 0; i < N; ++i) {
        new_offset16[i] = round_down(low[i] + a * step[i]);
        new_offset[i] = to_float(new_offset16[i]);
        new_scale16[i] = round_up((high[i] + b * step[i] - new_offset[i]) / steps[i]);
        new_scale[i] = to_float(new_scale16[i]);
        inverse[i] = new_scale[i] > 0 ? 1.0f / new_scale[i] : 0.0f;
        error[i] = 0;
      }
      if (move == 0)
        for (int i = 0; i < N; ++i) unit[i] = inverse[i], to_end[i] = unit[i] * 2.0f / steps[i];
      for (int row = 0; row < ROWS; ++row)
        for (int i = 0; i < N; ++i) {
          const float v = x[row * N + i], d = v - new_offset[i];
          float code = round_even(d * inverse[i]);
          code = code > 0 ? code : 0.0f;
          code = code < steps[i] ? code : steps[i];
          const float u = (d - code * new_scale[i]) * unit[i];
          float squared = u * u;
          if (ENDS) {
            const float z = (v - middle[i]) * to_end[i];
            squared *= z * z + 0.1f;
          }
          squared = squared < 1.0f ? squared : 1.0f;
          error[i] += int(round_even(squared * 0x1p20f));
        }
      for (int i = 0; i < N; ++i) {
        if (error[i] >= least[i]) continue;
        least[i] = error[i];
        offset16[i] = new_offset16[i], scale16[i] = new_scale16[i];
        offset[i] = new_offset[i], scale[i] = new_scale[i];
      }
    }
  }

  void encode(const float* x, const float* steps, uint8_t* code) const {
    for (int row = 0; row < ROWS; ++row, x += N, code += N)
      for (int i = 0; i < N; ++i) {
        float y = round_even((x[i] - offset[i]) / scale[i]);
        y = scale[i] > 0 ? y : 0.0f;
        y = y > 0 ? y : 0.0f;
        y = y < steps[i] ? y : steps[i];
        code[i] = uint8_t(int(y));
      }
  }
};

void put(uint8_t* to, const f16* from, int n) { memcpy(to, from, n * sizeof(f16)); }

template <int D>
int seal_key(const int16_t* slot_channel, Scratch& s, uint8_t* page) {
  using Sec = Sections<D>;
  const int exponent = exponent_of(s.x, kBlock * D);
  scale_by(s.x, kBlock * D, power(-exponent));

  int slots[D] = {};
  for (int i = 0; i < Sec::slots; ++i)
    if (slot_channel[i] >= 0) ++slots[slot_channel[i]];

  alignas(64) float total[D], steps[D], most[D];
  for (int c = 0; c < D; ++c) {
    total[c] = s.x[c];
    steps[c] = slots[c] == 2 ? 255.0f : 15.0f;
    most[c] = slots[c] ? steps[c] : 0.0f;
  }
  for (int t = 1; t < kBlock; ++t)
    for (int c = 0; c < D; ++c) total[c] += s.x[t * D + c];
  Ranges<kBlock, D> range;
  range.template choose<true>(s.x, steps);
  range.encode(s.x, most, s.code);
  for (int c = 0; c < D; ++c)
    if (slots[c] == 0) range.offset16[c] = half(total[c] / kBlock);
  put(page + Sec::key_offset, range.offset16, D);

  f16 slot_scale[Sec::slots];
  for (int i = 0; i < Sec::slots; ++i) {
    uint8_t* row = page + Sec::key_code + i * (kBlock / 2);
    const int c = slot_channel[i];
    if (c < 0) {
      memset(row, 0, kBlock / 2);
      slot_scale[i].bits = 0;
      continue;
    }
    const bool high_nibble = slots[c] == 2 && !(i > 0 && slot_channel[i - 1] == c);
    const int shift = high_nibble ? 4 : 0;
    slot_scale[i] = high_nibble ? half(range.scale[c] * 16.0f) : range.scale16[c];
    for (int j = 0; j < kBlock / 2; ++j) {
      const int a = s.code[j * D + c] >> shift & 15, b = s.code[(j + kBlock / 2) * D + c] >> shift & 15;
      row[j] = uint8_t(a | b << 4);
    }
  }
  put(page + Sec::key_scale, slot_scale, Sec::slots);
  return exponent;
}

// The values lie transposed, x[channel][token], so that the transform and the per-token ranges
// run over whole vectors of tokens.
template <int D>
int seal_value(Scratch& s, uint8_t* page) {
  using Sec = Sections<D>;
  const int exponent = exponent_of(s.x, kBlock * D);
  scale_by(s.x, kBlock * D, power(-exponent));

  for (int span = 1; span < D; span *= 2)
    for (int i = 0; i < D; i += 2 * span)
      for (int j = i; j < i + span; ++j) {
        float *a = s.x + j * kBlock, *b = s.x + (j + span) * kBlock;
        for (int t = 0; t < kBlock; ++t) {
          const float p = a[t], q = b[t];
          a[t] = p + q;
          b[t] = p - q;
        }
      }

  alignas(64) float steps[kBlock];
  for (float& n : steps) n = 15.0f;
  Ranges<D, kBlock> range;
  range.template choose<false>(s.x, steps);
  range.encode(s.x, steps, s.code);
  put(page + Sec::value_offset, range.offset16, kBlock);
  put(page + Sec::value_scale, range.scale16, kBlock);

  for (int t = 0; t < kBlock; ++t) {
    uint8_t* row = page + Sec::value_code + t * (D / 2);
    for (int j = 0; j < D / 2; ++j) row[j] = uint8_t(s.code[j * kBlock + t] | s.code[(j + D / 2) * kBlock + t] << 4);
  }
  return exponent;
}

template <typename T, int D>
void seal_block(const StepArgs& a, const SealTask& task) {
  const Request& r = a.requests[task.request];
  const int64_t start = task.block * kBlock;
  Scratch s;
  const T *key[kBlock], *value[kBlock];
  for (int i = 0; i < kBlock; ++i) {
    // Block 0 is sealed as if the sinks were copies of the first token after them.
    const int64_t p = start == 0 && i < kSinks ? kSinks : start + i;
    if (p >= r.computed) {
      const int64_t row = r.row + p - r.computed;
      key[i] = (const T*)a.key.data + row * a.key.token_stride + task.head * a.key.head_stride;
      value[i] = (const T*)a.value.data + row * a.value.token_stride + task.head * a.value.head_stride;
    } else {
      const int n = a.pages.page_tokens;
      key[i] = (const T*)a.pages.recent + r.recent_row[p / n] * a.pages.recent_page_stride +
               task.head * a.pages.recent_head_stride + p % n * D;
      value[i] = key[i] + n * D;
    }
  }
  uint8_t* page = a.pages.sealed + r.sealed_row[task.block] * a.pages.sealed_page_stride +
                  task.head * a.pages.sealed_head_stride;

  for (int t = 0; t < kBlock; ++t)
    for (int c = 0; c < D; ++c) s.x[t * D + c] = to_float(key[t][c]);
  const int key_exponent = seal_key<D>(a.slot_channel + task.head * Sections<D>::slots, s, page);
  for (int t = 0; t < kBlock; ++t)
    for (int c = 0; c < D; ++c) s.x[c * kBlock + t] = to_float(value[t][c]);
  const int value_exponent = seal_value<D>(s, page);

  uint8_t* end = page + Sections<D>::exponents;
  memset(end, 0, 32);
  end[0] = uint8_t(key_exponent);
  end[1] = uint8_t(value_exponent);
}

template <typename T>
void seal_typed(const StepArgs& a, const SealTask& task) {
  a.dim == 64 ? seal_block<T, 64>(a, task) : seal_block<T, 128>(a, task);
}

}  // namespace

void seal(const StepArgs& a, const SealTask& task) {
  switch (a.dtype) {
    case DType::f32: return seal_typed<float>(a, task);
    case DType::bf16: return seal_typed<bf16>(a, task);
    case DType::f16: return seal_typed<f16>(a, task);
  }
}

}  // namespace s4kv::S4KV_ISA
