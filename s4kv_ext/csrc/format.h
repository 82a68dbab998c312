// The sizes of s4kv_ext/format.py. ops.cpp exports them so that a test can compare the two.
#pragma once
#include <stdint.h>

namespace s4kv {

constexpr int kBlock = 64;
constexpr int kRecent = 64;
constexpr int kSinks = 16;
constexpr int kExtraSlots = 16;

constexpr int key_slots(int dim) { return dim + kExtraSlots; }

// Offsets of the sections of one head's part of a sealed page.
template <int D>
struct Sections {
  static constexpr int slots = key_slots(D);
  static constexpr int key_code = 0;
  static constexpr int key_scale = key_code + kBlock * slots / 2;
  static constexpr int key_offset = key_scale + slots * 2;
  static constexpr int value_code = key_offset + D * 2;
  static constexpr int value_scale = value_code + kBlock * D / 2;
  static constexpr int value_offset = value_scale + kBlock * 2;
  static constexpr int exponents = value_offset + kBlock * 2;
  static constexpr int bytes = exponents + 32;
};
static_assert(Sections<64>::bytes == 5184 && Sections<128>::bytes == 9536);

constexpr int64_t sealed_tokens(int64_t computed) {
  return computed < kRecent + kBlock ? 0 : (computed - kRecent) / kBlock * kBlock;
}

}  // namespace s4kv
