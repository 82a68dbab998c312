// Part 3 of a step: picks the kernel for a task, and merges the parts of a split context.
#include "few.h"
#include "many.h"

namespace s4kv::S4KV_ISA {
namespace {

template <typename T, int D>
void attend_dim(const AttendArgs& a, const AttendTask& task) {
  static_assert(kFewRows == 8);
  switch (task.tokens * a.group) {
    case 1: return attend_few<T, D, 1>(a, task);
    case 2: return attend_few<T, D, 2>(a, task);
    case 3: return attend_few<T, D, 3>(a, task);
    case 4: return attend_few<T, D, 4>(a, task);
    case 5: return attend_few<T, D, 5>(a, task);
    case 6: return attend_few<T, D, 6>(a, task);
    case 7: return attend_few<T, D, 7>(a, task);
    case 8: return attend_few<T, D, 8>(a, task);
    default: return attend_many<T, D>(a, task);
  }
}

template <typename T>
void attend_typed(const AttendArgs& a, const AttendTask& task) {
  a.dim == 64 ? attend_dim<T, 64>(a, task) : attend_dim<T, 128>(a, task);
}

template <typename T>
void merge_typed(const AttendArgs& a, const MergeTask& task) {
  const Request& r = a.requests[task.request];
  const int64_t rows = task.tokens * a.group, size = rows * (a.dim + 2);
  const float* part = a.partials + task.partial;
  for (int64_t i = 0; i < rows; ++i) {
    const float *m = part + rows * a.dim + i, *l = m + rows;
    float top = m[0], total = 0.0f;
    for (int s = 1; s < task.splits; ++s) top = m[s * size] > top ? m[s * size] : top;
    float x[128] = {};
    for (int s = 0; s < task.splits; ++s) {
      const float weight = exp2(m[s * size] - top);
      const float* acc = part + s * size + i * a.dim;
      total += l[s * size] * weight;
      for (int c = 0; c < a.dim; ++c) x[c] += acc[c] * weight;
    }
    write_row(out_row<T>(a, r, task.head, task.token + i / a.group, int(i % a.group)), x, 1.0f / total, a.dim);
  }
}

}  // namespace

void attend(const AttendArgs& a, const AttendTask& task) {
  switch (a.dtype) {
    case DType::f32: return attend_typed<float>(a, task);
    case DType::bf16: return attend_typed<bf16>(a, task);
    case DType::f16: return attend_typed<f16>(a, task);
  }
}

void merge(const AttendArgs& a, const MergeTask& task) {
  switch (a.dtype) {
    case DType::f32: return merge_typed<float>(a, task);
    case DType::bf16: return merge_typed<bf16>(a, task);
    case DType::f16: return merge_typed<f16>(a, task);
  }
}

}  // namespace s4kv::S4KV_ISA
