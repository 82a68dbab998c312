// Turns the tensors of a step into tasks for the kernels, and refuses what would read or write
// outside the pages of a request.
#pragma once
#include <vector>

#include "kernels.h"

namespace s4kv {

// query_start_loc, seq_lens and the tables of reference.py's Step. A table may be absent (the
// sequence is then all new).
struct StepTables {
  int64_t requests;
  const int32_t *query_start_loc, *seq_lens;
  const int32_t *sealed, *recent;
  int64_t sealed_stride, sealed_columns, recent_stride, recent_columns;
  int64_t pages, tokens;  // pages that exist; rows of query, key and value
  int page_tokens;
};

struct Rows {
  int64_t first, end;  // of query, key and value
};

struct Plan {
  std::vector<Request> requests;
  std::vector<Rows> withdrawn;  // of requests whose first recent page is null: they take no part
  std::vector<SealTask> seals;
  std::vector<AttendTask> attends;
  std::vector<MergeTask> merges;
  int64_t partial_floats;

  void read(const StepTables&);
  void plan_seal(const StepTables&, int kv_heads);
  void plan_attend(const StepTables&, int kv_heads, int group, int dim);
};

const Kernels& kernels();
void use_isa(const char* name);  // for tests
void run_store_and_seal(const StepArgs&, const Plan&);
void run_attend(const AttendArgs&, const Plan&);

}  // namespace s4kv
