// Runs a plan on all cores, with the kernels of the best instruction set this processor has.
#include <stdlib.h>
#include <string.h>

#include <algorithm>

#include <c10/util/Exception.h>

#include "format.h"
#include "plan.h"

namespace s4kv {
namespace {

constexpr Kernels kAll[] = {
    {"baseline", baseline::seal, baseline::attend, baseline::merge},
    {"avx2", avx2::seal, avx2::attend, avx2::merge},
    {"avx512", avx512::seal, avx512::attend, avx512::merge},
};

int best() {
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("f16c")) return 0;
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                 __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")
             ? 2
             : 1;
}

const Kernels* find(const char* name) {
  int i = best();
  while (strcmp(kAll[i].name, name)) TORCH_CHECK(i-- > 0, "this processor has baseline to ", kAll[best()].name, ", not ", name);
  return &kAll[i];
}

// S4KV_CPU_ISA asks for less than the best: a machine can then be held to what another one has.
const Kernels*& chosen() {
  static const Kernels* kernels = getenv("S4KV_CPU_ISA") ? find(getenv("S4KV_CPU_ISA")) : &kAll[best()];
  return kernels;
}

// Copies the new tokens [p, end) of a request into its recent pages.
void store(const StepArgs& a, const Request& r, int64_t p, int64_t end) {
  const int64_t item = a.dtype == DType::f32 ? 4 : 2, n = a.pages.page_tokens, size = a.dim * item;
  for (; p < end; ++p) {
    const int64_t row = r.row + p - r.computed;
    char* page = (char*)a.pages.recent + r.recent_row[p / n] * a.pages.recent_page_stride * item + p % n * size;
    for (int h = 0; h < a.kv_heads; ++h) {
      char* to = page + h * a.pages.recent_head_stride * item;
      memcpy(to, (char*)a.key.data + (row * a.key.token_stride + h * a.key.head_stride) * item, size);
      memcpy(to + n * size, (char*)a.value.data + (row * a.value.token_stride + h * a.value.head_stride) * item, size);
    }
  }
}

}  // namespace

const Kernels& kernels() { return *chosen(); }

void use_isa(const char* name) { chosen() = find(name); }

void run_store_and_seal(const StepArgs& a, const Plan& plan) {
  // Little memory for each request: only many tokens are worth waking the other threads.
  const int64_t requests = plan.requests.size();
  int64_t tokens = 0;
  for (const Request& r : plan.requests) tokens += r.length - r.computed;
#pragma omp parallel for schedule(dynamic, 1) if (requests > 1 && tokens > 128)
  for (int64_t i = 0; i < requests; ++i) {
    const Request& r = plan.requests[i];
    const int64_t end = std::max(sealed_tokens(r.length), r.computed), sinks = std::min<int64_t>(r.length, kSinks);
    store(a, r, r.computed, sinks);
    store(a, r, std::max(end, sinks), r.length);
  }
  const auto seal = kernels().seal;
  const int64_t n = plan.seals.size();
#pragma omp parallel for schedule(dynamic, 1) if (n > 1)
  for (int64_t i = 0; i < n; ++i) seal(a, plan.seals[i]);
}

void run_attend(const AttendArgs& a, const Plan& plan) {
  const Kernels& k = kernels();
  const int64_t n = plan.attends.size(), merges = plan.merges.size();
#pragma omp parallel if (n > 1)
  {
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < n; ++i) k.attend(a, plan.attends[i]);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < merges; ++i) k.merge(a, plan.merges[i]);
  }
}

}  // namespace s4kv
