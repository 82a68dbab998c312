// One KV head's part of a sealed page, as s4kv_ext/format.py sizes it and packing_mma.py orders it.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

namespace s4kv {

constexpr int BLOCK = 64;         // tokens in a sealed page
constexpr int WINDOW = 64;        // the newest tokens that are never sealed (format.RECENT)
constexpr int SINKS = 16;         // first tokens, always read from their recent page
constexpr int RECENT_TOKENS = 16; // tokens in a recent page of a 16-bit dtype
constexpr int MIN_EXPONENT = -120;

template <int D>
struct Layout {
  static constexpr int SLOTS = D + 16;        // int4 key slots a token
  static constexpr int KCHUNKS = SLOTS / 16;  // k16 steps of the key MMA over slots
  static constexpr int DCHUNKS = D / 16;      // the same over channels
  static constexpr int KEY_CODE = 0;
  static constexpr int KEY_SCALE = KEY_CODE + BLOCK * SLOTS / 2;
  static constexpr int KEY_OFFSET = KEY_SCALE + SLOTS * 2;
  static constexpr int VALUE_CODE = KEY_OFFSET + D * 2;
  static constexpr int VALUE_SCALE = VALUE_CODE + BLOCK * D / 2;
  static constexpr int VALUE_OFFSET = VALUE_SCALE + BLOCK * 2;
  static constexpr int EXPONENTS = VALUE_OFFSET + BLOCK * 2;
  static constexpr int BYTES = EXPONENTS + 32;
  static_assert(BYTES % 32 == 0 && KEY_SCALE % 16 == 0 && KEY_OFFSET % 16 == 0 && VALUE_CODE % 16 == 0 &&
                VALUE_SCALE % 16 == 0 && EXPONENTS % 16 == 0);

  static constexpr int RECENT_ROW = D * 2;  // a recent page: 16 key rows, 16 value rows
  static_assert(2 * RECENT_TOKENS * RECENT_ROW <= BYTES);

  // First of the four neighbouring slots that lane % 4 == t holds of k16 step kc.
  // Steps come in pairs so that a lane's eight slots of a pair are neighbours; the last is single.
  __host__ __device__ static constexpr int first_slot(int kc, int t) {
    return kc < DCHUNKS ? (kc >> 1) * 32 + t * 8 + (kc & 1) * 4 : D + t * 4;
  }

  // Channel of k index j of step kc where rows of channels are operands: a lane's 16 bytes are eight
  // neighbours x x y y z z w w, of which even steps take x and z, odd ones y and w.
  __host__ __device__ static constexpr int channel(int kc, int t, int j) {
    return (kc >> 1) * 32 + t * 8 + (kc & 1) * 2 + (j & 1) + (j >> 1) * 4;
  }
};

// Codes are stored as the A operands of mma.m16n8k16: word (step, lane, tile of 16 rows) has the
// nibbles of rows g and g + 8 (r = 0, 1; g = lane / 4) for the lane's four k indices
// K_INDEX[j] + 2 t. Nibble (r, j) sits at bit 4 r + 8 (j / 2) + 16 (j % 2), so that
// (w & 0x000f000f), (w & 0x00f000f0) and the same of w >> 8 are the four operand registers, each
// nibble a float16 subnormal.
__host__ __device__ constexpr int k_index(int j, int t) { return 2 * t + (j & 1) + (j >> 1) * 8; }
__host__ __device__ constexpr int nibble_shift(int r, int j) { return 4 * r + 8 * (j >> 1) + 16 * (j & 1); }

// Value scales and offsets of a lane's eight tokens are neighbours.
__host__ __device__ constexpr int value_scale_index(int token) {
  return (token & 7) * 8 + (token >> 4) * 2 + ((token >> 3) & 1);
}

__host__ __device__ inline int sealed_tokens(int computed) {
  return computed < WINDOW ? 0 : (computed - WINDOW) / BLOCK * BLOCK;
}

}  // namespace s4kv
