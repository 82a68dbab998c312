// The torch operators: what they take is checked here and handed on as plain pointers.
#include <torch/library.h>

#include "format.h"
#include "plan.h"
#include "tags.h"

namespace s4kv {
namespace {

using at::Tensor;

DType dtype_of(const Tensor& x) {
  switch (x.scalar_type()) {
    case at::kFloat: return DType::f32;
    case at::kBFloat16: return DType::bf16;
    case at::kHalf: return DType::f16;
    default: TORCH_CHECK(false, "int4_kivi takes float32, bfloat16 or float16, not ", x.scalar_type());
  }
}

Tokens tokens(const char* name, const Tensor& x, const Tensor& like) {
  TORCH_CHECK(x.dim() == 3 && x.stride(2) == 1 && x.scalar_type() == like.scalar_type() && x.size(2) == like.size(2),
              name, " is ", x.scalar_type(), " ", x.sizes(), " with strides ", x.strides(), "; expected ",
              like.scalar_type(), " [tokens, heads, ", like.size(2), "] with a contiguous last dimension");
  return {x.data_ptr(), x.stride(0), x.stride(1)};
}

const int32_t* table(const char* name, const Tensor& x, int64_t dim) {
  TORCH_CHECK(x.scalar_type() == at::kInt && x.dim() == dim && (x.numel() == 0 || x.stride(dim - 1) == 1), name,
              " is ", x.scalar_type(), " ", x.sizes(), " with strides ", x.strides(), "; expected int32 of ", dim,
              " dimensions with a contiguous last one");
  return x.data_ptr<int32_t>();
}

void read_shapes(StepArgs& a, const Tensor& key, const Tensor& value) {
  a.dtype = dtype_of(key);
  a.key = tokens("key", key, key);
  a.value = tokens("value", value, key);
  a.dim = int(key.size(2));
  a.kv_heads = int(key.size(1));
  TORCH_CHECK(a.dim == 64 || a.dim == 128, "head_dim is 64 or 128, not ", a.dim);
  TORCH_CHECK(value.sizes() == key.sizes(), "key is ", key.sizes(), " and value ", value.sizes());
}

void read_pages(StepArgs& a, const Tensor& sealed, const Tensor& recent, const Tensor& slot_channel) {
  const int64_t bytes = a.dim == 64 ? Sections<64>::bytes : Sections<128>::bytes;
  TORCH_CHECK(sealed.scalar_type() == at::kByte && sealed.dim() == 3 && sealed.size(1) == a.kv_heads &&
                  sealed.size(2) == bytes && sealed.stride(2) == 1,
              "sealed is ", sealed.scalar_type(), " ", sealed.sizes(), " with strides ", sealed.strides(),
              "; expected uint8 [pages, ", a.kv_heads, ", ", bytes, "] with a contiguous last dimension");
  const int64_t n = recent.dim() == 5 ? recent.size(3) : 0;
  TORCH_CHECK(recent.dim() == 5 && dtype_of(recent) == a.dtype && recent.size(1) == a.kv_heads && recent.size(2) == 2 &&
                  n > 0 && kSinks % n == 0 && recent.size(4) == a.dim && recent.stride(4) == 1 &&
                  recent.stride(3) == a.dim && recent.stride(2) == n * a.dim,
              "recent is ", recent.scalar_type(), " ", recent.sizes(), " with strides ", recent.strides(),
              "; expected the dtype of key, [pages, ", a.kv_heads, ", 2, a divisor of ", kSinks, ", ", a.dim,
              "] with the last three dimensions contiguous");
  TORCH_CHECK(recent.size(0) == sealed.size(0), "sealed has ", sealed.size(0), " pages and recent ", recent.size(0));
  const int slots = key_slots(a.dim);
  TORCH_CHECK(slot_channel.scalar_type() == at::kShort && slot_channel.is_contiguous() && slot_channel.dim() == 2 &&
                  slot_channel.size(0) == a.kv_heads && slot_channel.size(1) == slots,
              "slot_channel is ", slot_channel.scalar_type(), " ", slot_channel.sizes(), "; expected contiguous int16 [",
              a.kv_heads, ", ", slots, "]");
  a.slot_channel = slot_channel.data_ptr<int16_t>();
  for (int64_t i = 0; i < slot_channel.numel(); ++i)
    TORCH_CHECK(a.slot_channel[i] >= -1 && a.slot_channel[i] < a.dim, "slot_channel has channel ", a.slot_channel[i]);
  a.pages = {sealed.data_ptr<uint8_t>(), sealed.stride(0), sealed.stride(1), recent.data_ptr(), recent.stride(0),
             recent.stride(1), int(n)};
}

StepTables read_tables(const Tensor& key, const Tensor& sealed, const Tensor& recent, const Tensor& query_start_loc,
                       const Tensor& seq_lens, const Tensor& sealed_table, const Tensor& recent_table) {
  StepTables s;
  s.query_start_loc = table("query_start_loc", query_start_loc, 1);
  s.seq_lens = table("seq_lens", seq_lens, 1);
  s.sealed = table("sealed_table", sealed_table, 2);
  s.recent = table("recent_table", recent_table, 2);
  s.requests = query_start_loc.numel() - 1;
  TORCH_CHECK(s.requests >= 0 && seq_lens.numel() >= s.requests && sealed_table.size(0) >= s.requests &&
                  recent_table.size(0) >= s.requests,
              "query_start_loc is of ", s.requests, " requests, seq_lens of ", seq_lens.numel(), ", the tables of ",
              sealed_table.size(0), " and ", recent_table.size(0));
  s.sealed_stride = sealed_table.stride(0);
  s.recent_stride = recent_table.stride(0);
  s.sealed_columns = sealed_table.size(1);
  s.recent_columns = recent_table.size(1);
  s.pages = sealed.size(0);
  s.page_tokens = int(recent.size(3));
  s.tokens = key.size(0);
  return s;
}

// Kept between calls, so that a step allocates nothing once the largest has been seen.
Plan& scratch_plan() {
  static thread_local Plan plan;
  return plan;
}
float* scratch_partials(int64_t floats) {
  static thread_local std::vector<float> partials;
  if (int64_t(partials.size()) < floats) partials.resize(floats);
  return partials.data();
}

void store_and_seal(const Tensor& key, const Tensor& value, const Tensor& sealed, const Tensor& recent,
                    const Tensor& query_start_loc, const Tensor& seq_lens, const Tensor& sealed_table,
                    const Tensor& recent_table, const Tensor& slot_channel) {
  StepArgs a{};
  read_shapes(a, key, value);
  read_pages(a, sealed, recent, slot_channel);
  const StepTables s = read_tables(key, sealed, recent, query_start_loc, seq_lens, sealed_table, recent_table);
  Plan& plan = scratch_plan();
  plan.read(s);
  plan.plan_seal(s, a.kv_heads);
  a.requests = plan.requests.data();
  run_store_and_seal(a, plan);
}

void read_query(AttendArgs& a, const Tensor& query, const Tensor& key, const Tensor& out, double scale) {
  a.query = tokens("query", query, key);
  a.out = tokens("out", out, key);
  TORCH_CHECK(query.size(1) % a.kv_heads == 0, query.size(1), " query heads for ", a.kv_heads, " KV heads");
  a.group = int(query.size(1) / a.kv_heads);
  TORCH_CHECK(a.group >= 1 && a.group <= kTileRows, "at most ", kTileRows, " query heads a KV head, not ", a.group);
  TORCH_CHECK(out.sizes() == query.sizes() && key.size(0) >= query.size(0), "query is ", query.sizes(), ", key ",
              key.sizes(), " and out ", out.sizes());
  a.scale = float(scale);
}

void attend(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& sealed, const Tensor& recent,
            const Tensor& query_start_loc, const Tensor& seq_lens, const Tensor& sealed_table,
            const Tensor& recent_table, const Tensor& slot_channel, double scale, const Tensor& out) {
  AttendArgs a{};
  read_shapes(a, key, value);
  read_pages(a, sealed, recent, slot_channel);
  read_query(a, query, key, out, scale);
  const StepTables s = read_tables(query, sealed, recent, query_start_loc, seq_lens, sealed_table, recent_table);
  Plan& plan = scratch_plan();
  plan.read(s);
  plan.plan_attend(s, a.kv_heads, a.group, a.dim);
  a.requests = plan.requests.data();
  a.partials = scratch_partials(plan.partial_floats);
  run_attend(a, plan);
  for (const Rows& rows : plan.withdrawn) out.slice(0, rows.first, rows.end).zero_();
}

// One sequence without a cache: what calibration runs on.
void causal_attend(const Tensor& query, const Tensor& key, const Tensor& value, double scale, const Tensor& out) {
  AttendArgs a{};
  read_shapes(a, key, value);
  read_query(a, query, key, out, scale);
  const int32_t start[] = {0, int32_t(query.size(0))};
  StepTables s{};
  s.requests = 1;
  s.query_start_loc = start;
  s.seq_lens = start + 1;
  s.tokens = query.size(0);
  s.page_tokens = 1;
  Plan& plan = scratch_plan();
  plan.read(s);
  plan.plan_attend(s, a.kv_heads, a.group, a.dim);
  a.requests = plan.requests.data();
  a.partials = scratch_partials(plan.partial_floats);
  run_attend(a, plan);
}

PageTable page_table(const char* name, const Tensor& x, int64_t requests) {
  table(name, x, 2);
  TORCH_CHECK(x.size(0) >= requests, name, " has ", x.size(0), " rows for ", requests, " requests");
  return {x.data_ptr<int32_t>(), x.stride(0), x.size(1)};
}

void check_pages_op(const Tensor& cells, int64_t num_pages, const Tensor& step, const Tensor& sealed_table,
                    const Tensor& recent_table, int64_t page_tokens, bool withdraw, const Tensor& wrong) {
  table("cells", cells, 1);
  table("wrong", wrong, 2);
  TORCH_CHECK(wrong.size(1) == 4 && wrong.is_contiguous(), "wrong is ", wrong.sizes(), "; expected contiguous [R, 4]");
  const int64_t requests = wrong.size(0), given = step.numel() - 4 * requests;
  TORCH_CHECK(given >= 0 && given % 2 == 0, "step has ", step.numel(), " values for ", requests, " requests");
  CheckArgs a{cells.data_ptr<int32_t>(), cells.numel(), num_pages, table("step", step, 1), requests, given / 2,
              page_table("sealed_table", sealed_table, requests), page_table("recent_table", recent_table, requests),
              page_tokens, withdraw, wrong.data_ptr<int32_t>()};
  const int64_t columns = a.sealed.columns + a.recent.columns;
  TORCH_CHECK(num_pages >= 0 && num_pages <= a.num_cells && columns > 0 && (a.num_cells - num_pages) % columns == 0,
              "cells has ", a.num_cells, " values; expected one for each of ", num_pages, " pages and rows of ", columns);
  TORCH_CHECK(page_tokens > 0 && kSinks % page_tokens == 0, "a recent page has a divisor of ", kSinks, " tokens, not ",
              page_tokens);
  check_pages(a);
}

std::string isa() { return kernels().name; }
void set_isa(std::string name) { use_isa(name.c_str()); }

template <int D>
std::vector<int64_t> sections_of() {
  using S = Sections<D>;
  return {S::key_code,    S::key_scale,    S::key_offset, S::value_code,
          S::value_scale, S::value_offset, S::exponents,  S::bytes};
}

// Where each section of format.py starts and where the last ends, for a test.
std::vector<int64_t> sections(int64_t dim) { return dim == 64 ? sections_of<64>() : sections_of<128>(); }

}  // namespace

TORCH_LIBRARY(s4kv_cpu, m) {
  m.def(
      "store_and_seal(Tensor key, Tensor value, Tensor(a!) sealed, Tensor(b!) recent, Tensor query_start_loc, "
      "Tensor seq_lens, Tensor sealed_table, Tensor recent_table, Tensor slot_channel) -> ()");
  m.def(
      "attend(Tensor query, Tensor key, Tensor value, Tensor sealed, Tensor recent, Tensor query_start_loc, "
      "Tensor seq_lens, Tensor sealed_table, Tensor recent_table, Tensor slot_channel, float scale, "
      "Tensor(a!) out) -> ()");
  m.def("causal_attend(Tensor query, Tensor key, Tensor value, float scale, Tensor(a!) out) -> ()");
  m.def(
      "check_pages(Tensor(a!) cells, int num_pages, Tensor step, Tensor(b!) sealed_table, Tensor(c!) recent_table, "
      "int page_tokens, bool withdraw, Tensor(d!) wrong) -> ()");
  m.def("isa() -> str", isa);
  m.def("use_isa(str name) -> ()", set_isa);
  m.def("sections(int head_dim) -> int[]", sections);
}

TORCH_LIBRARY_IMPL(s4kv_cpu, CPU, m) {
  m.impl("store_and_seal", store_and_seal);
  m.impl("attend", attend);
  m.impl("causal_attend", causal_attend);
  m.impl("check_pages", check_pages_op);
}

}  // namespace s4kv
