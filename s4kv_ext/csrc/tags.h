// Whether the pages in block tables are still those of their requests (page_check.py).
#pragma once
#include <stdint.h>

namespace s4kv {

struct PageTable {
  int32_t* pages;  // [requests, columns]
  int64_t stride, columns;
};

struct CheckArgs {
  int32_t* cells;  // the tag of each page; then, in rows, those expected of a request's sealed and recent pages
  int64_t num_cells, num_pages;
  const int32_t* step;  // [requests][4]: row, sealed pages, computed tokens, recent pages; then [given][2]: cell, tag
  int64_t requests, given;
  PageTable sealed, recent;
  int64_t page_tokens;  // of a recent page
  bool withdraw;        // null pages for a request with a wrong one
  int32_t* wrong;       // [requests][4]: 1, page, expected tag, tag found; or zeros
};

void check_pages(const CheckArgs&);

}  // namespace s4kv
