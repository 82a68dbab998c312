#include "plan.h"

#include <algorithm>

#include <c10/util/Exception.h>

#include "format.h"

namespace s4kv {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Entries [first, last) of a table row are pages that exist.
void check_pages(const char* what, int64_t request, const int32_t* row, int64_t columns, int64_t first, int64_t last,
                 int64_t lowest, int64_t pages) {
  if (first >= last) return;
  TORCH_CHECK(last <= columns, "request ", request, " needs ", last, " entries of its ", what, " table, which has ",
              columns);
  for (int64_t i = first; i < last; ++i)
    TORCH_CHECK(row[i] >= lowest && row[i] < pages, what, " page ", i, " of request ", request, " is ", row[i],
                ", not in [", lowest, ", ", pages, ")");
}

// reference.py's sealed_before: after a prefix hit one block more is sealed, and then its recent
// pages are null.
int64_t sealed_before(const StepTables& s, int64_t request, int64_t computed, const int32_t* recent_row) {
  int64_t end = sealed_tokens(computed);
  if (end + kBlock > computed) return end;
  const int64_t page = std::max<int64_t>(end, kSinks) / s.page_tokens;
  TORCH_CHECK(page < s.recent_columns, "request ", request, " needs ", page + 1,
              " entries of its recent table, which has ", s.recent_columns);
  return recent_row[page] == 0 ? end + kBlock : end;
}

}  // namespace

void Plan::read(const StepTables& s) {
  requests.clear();
  withdrawn.clear();
  TORCH_CHECK(s.query_start_loc[0] >= 0, "query_start_loc starts at ", s.query_start_loc[0]);
  for (int64_t i = 0; i < s.requests; ++i) {
    const int64_t row = s.query_start_loc[i], end = s.query_start_loc[i + 1], length = s.seq_lens[i];
    if (end <= row) continue;
    TORCH_CHECK(end <= s.tokens && length >= end - row, "request ", i, " of length ", length, " has rows [", row, ", ",
                end, ") of ", s.tokens);
    if (s.recent && s.recent_columns > 0 && s.recent[i * s.recent_stride] == 0) {
      withdrawn.push_back({row, end});
      continue;
    }
    Request r{row, length - (end - row), length, 0, nullptr, nullptr};
    r.sealed_row = s.sealed ? s.sealed + i * s.sealed_stride : nullptr;
    r.recent_row = s.recent ? s.recent + i * s.recent_stride : nullptr;
    if (r.computed > 0) r.sealed = sealed_before(s, i, r.computed, r.recent_row);
    requests.push_back(r);
  }
}

void Plan::plan_seal(const StepTables& s, int kv_heads) {
  seals.clear();
  const int n = s.page_tokens;
  for (size_t i = 0; i < requests.size(); ++i) {
    const Request& r = requests[i];
    const int64_t end = sealed_tokens(r.length);
    if (r.computed < kSinks)
      check_pages("recent", i, r.recent_row, s.recent_columns, r.computed / n,
                  ceil_div(std::min<int64_t>(r.length, kSinks), n), 1, s.pages);
    check_pages("recent", i, r.recent_row, s.recent_columns, std::max(r.computed, end) / n, ceil_div(r.length, n), 1,
                s.pages);
    if (end <= r.sealed) continue;
    check_pages("recent", i, r.recent_row, s.recent_columns, std::max<int64_t>(r.sealed, kSinks) / n,
                ceil_div(std::min(r.computed, end), n), 1, s.pages);
    check_pages("sealed", i, r.sealed_row, s.sealed_columns, r.sealed / kBlock, end / kBlock, 1, s.pages);
    for (int64_t b = r.sealed / kBlock; b < end / kBlock; ++b)
      for (int h = 0; h < kv_heads; ++h) seals.push_back({int32_t(i), h, b});
  }
}

void Plan::plan_attend(const StepTables& s, int kv_heads, int group, int dim) {
  attends.clear();
  merges.clear();
  partial_floats = 0;
  const int n = s.page_tokens;
  const int64_t tile = std::max(1, kTileRows / group);  // query tokens of a task
  int64_t tiles = 0;
  for (const Request& r : requests) tiles += ceil_div(r.length - r.computed, tile) * kv_heads;
  // With few tiles the context is split, for cores that would idle. How does not depend on how many
  // there are: the result is then the same on any machine.
  constexpr int64_t kTasks = 64, kMinBlocks = 8;
  const int64_t most = ceil_div(kTasks, std::max<int64_t>(tiles, 1));

  for (size_t i = 0; i < requests.size(); ++i) {
    const Request& r = requests[i];
    check_pages("sealed", i, r.sealed_row, s.sealed_columns, 0, r.sealed / kBlock, 1, s.pages);
    if (r.sealed)
      check_pages("recent", i, r.recent_row, s.recent_columns, 0, ceil_div(kSinks, n), 1, s.pages);
    if (r.computed)
      check_pages("recent", i, r.recent_row, s.recent_columns, r.sealed / n, ceil_div(r.computed, n), 1, s.pages);

    const int64_t fresh = r.length - r.computed, blocks = r.sealed / kBlock;
    // The last tiles see most: they go first, so that no core is left alone with one.
    for (int64_t token = (fresh - 1) / tile * tile; token >= 0; token -= tile) {
      const int64_t tokens = std::min(tile, fresh - token);
      const int64_t units = blocks + ceil_div(r.computed + token + tokens - r.sealed, kBlock);
      const int64_t splits = std::clamp<int64_t>(units / kMinBlocks, 1, most);
      for (int h = 0; h < kv_heads; ++h) {
        if (splits > 1) merges.push_back({int32_t(i), h, token, tokens, partial_floats, int(splits)});
        for (int64_t k = 0; k < splits; ++k) {
          const int64_t first = std::min(units * k / splits, blocks), last = std::min(units * (k + 1) / splits, blocks);
          const bool tail = k == splits - 1;
          attends.push_back({int32_t(i), h, token, tokens, first, tail ? blocks : last, tail, -1});
          if (splits > 1) {
            attends.back().partial = partial_floats;
            partial_floats += tokens * group * (dim + 2);
          }
        }
      }
    }
  }
}

}  // namespace s4kv
