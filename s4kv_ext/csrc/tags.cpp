#include "tags.h"

#include <algorithm>

#include <c10/util/Exception.h>

#include "format.h"

namespace s4kv {
namespace {

constexpr int32_t kOutside = -1;  // the tag of a page that is not in the pool

// Looks at entries [first, end) of a row: whether one is wrong, and the first such one into `wrong`.
bool find_wrong(const CheckArgs& a, const int32_t* row, const int32_t* expected, int64_t first, int64_t end,
                int32_t* wrong) {
  for (int64_t i = first; i < end; ++i) {
    const int32_t page = row[i];
    const int32_t found = page >= 0 && page < a.num_pages ? a.cells[page] : kOutside;
    if (found == expected[i]) continue;
    wrong[0] = 1, wrong[1] = page, wrong[2] = expected[i], wrong[3] = found;
    return true;
  }
  return false;
}

}  // namespace

void check_pages(const CheckArgs& a) {
  const int32_t* given = a.step + 4 * a.requests;
  for (int64_t i = 0; i < a.given; ++i, given += 2) {
    TORCH_CHECK(given[0] >= 0 && given[0] < a.num_cells, "a tag for cell ", given[0], " of ", a.num_cells);
    a.cells[given[0]] = given[1];
  }
  const int64_t columns = a.sealed.columns + a.recent.columns, rows = (a.num_cells - a.num_pages) / columns;
  for (int64_t i = 0; i < a.requests; ++i) {
    const int32_t* r = a.step + 4 * i;
    const int64_t sealed = r[1], recent = r[3], sinks = std::min(kSinks / a.page_tokens, recent);
    TORCH_CHECK(r[0] >= 0 && r[0] < rows && sealed <= a.sealed.columns && recent <= a.recent.columns, "request ", i,
                " has row ", r[0], " of ", rows, ", ", sealed, " of ", a.sealed.columns, " sealed pages and ", recent,
                " of ", a.recent.columns, " recent ones");
    int32_t *sealed_row = a.sealed.pages + i * a.sealed.stride, *recent_row = a.recent.pages + i * a.recent.stride;
    const int32_t *expected = a.cells + a.num_pages + r[0] * columns, *expected_recent = expected + a.sealed.columns;
    const int64_t window = std::max(sinks, sealed_tokens(r[2]) / a.page_tokens);
    int32_t* wrong = a.wrong + 4 * i;
    std::fill_n(wrong, 4, 0);
    if ((find_wrong(a, sealed_row, expected, 0, sealed, wrong) ||
         find_wrong(a, recent_row, expected_recent, 0, sinks, wrong) ||
         find_wrong(a, recent_row, expected_recent, window, recent, wrong)) &&
        a.withdraw) {
      std::fill_n(sealed_row, a.sealed.columns, 0);
      std::fill_n(recent_row, a.recent.columns, 0);
    }
  }
}

}  // namespace s4kv
