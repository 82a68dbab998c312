// The kernels as torch ops (namespace s4kv_cuda), through torch's stable ABI: the library depends
// neither on the Python version nor on the torch release it was built against.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <initializer_list>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>

#include "launch.h"
#include "layout.cuh"
#include "plan.cuh"

namespace s4kv {

void check(cudaError_t error, const char* name) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // or the next launch would be blamed
  throw std::runtime_error(std::string("s4kv_cuda::") + name + ": " + cudaGetErrorString(error));
}
void check_launch(const char* name) { check(cudaGetLastError(), name); }

namespace {

using torch::stable::Tensor;
using torch::headeronly::ScalarType;

std::string describe(const Tensor& t) {
  std::ostringstream s;
  s << "[";
  for (int i = 0; i < t.dim(); i++) s << (i ? ", " : "") << t.size(i);
  s << "] strides [";
  for (int i = 0; i < t.dim(); i++) s << (i ? ", " : "") << t.stride(i);
  s << "]";
  return s.str();
}
void require(bool ok, const char* what, const Tensor& t) {
  if (!ok) throw std::invalid_argument(std::string("s4kv_cuda: ") + what + ", got " + describe(t));
}
// A launch that fails says what it was launched on.
template <class Launch>
void with_shapes(std::initializer_list<std::pair<const char*, const Tensor*>> tensors, Launch launch) {
  try {
    launch();
  } catch (const std::runtime_error& e) {
    std::string message = e.what();
    for (const auto& [name, tensor] : tensors) message += std::string(", ") + name + " " + describe(*tensor);
    throw std::runtime_error(message);
  }
}
const int* ints(const Tensor& t, const char* name) {
  require(t.is_cuda() && t.scalar_type() == ScalarType::Int && (t.numel() == 0 || t.stride(t.dim() - 1) == 1), name, t);
  return static_cast<const int*>(t.data_ptr());
}
int* mutable_ints(const Tensor& t, const char* name) { return const_cast<int*>(ints(t, name)); }

// Small arrays may also lie in pinned memory of the host, which the GPU reads and writes where it is.
int* ints_in_reach(const Tensor& t, const char* name) {
  require(t.scalar_type() == ScalarType::Int && t.is_contiguous(), name, t);
  cudaPointerAttributes where{};
  if (t.numel() && !t.is_cuda()) {
    check(cudaPointerGetAttributes(&where, t.data_ptr()), name);
    require(where.type == cudaMemoryTypeHost, name, t);
  }
  return static_cast<int*>(t.data_ptr());
}
bool aligned(const Tensor& t, uintptr_t to) { return reinterpret_cast<uintptr_t>(t.data_ptr()) % to == 0; }

cudaStream_t stream_of(const Tensor& t) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(t.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

StepTables tables(const Tensor& query_start, const Tensor& seq_lens, const Tensor& sealed_table, const Tensor& recent_table) {
  const long n = seq_lens.size(0);
  require(query_start.dim() == 1 && query_start.size(0) > n, "query_start_loc must be int32 [requests + 1]", query_start);
  require(sealed_table.dim() == 2 && sealed_table.size(0) >= n, "sealed_table must be int32 [requests, pages]", sealed_table);
  require(recent_table.dim() == 2 && recent_table.size(0) >= n, "recent_table must be int32 [requests, pages]", recent_table);
  return {ints(query_start, "query_start_loc must be int32 on the GPU"), ints(seq_lens, "seq_lens must be int32 on the GPU"),
          ints(sealed_table, "sealed_table must be int32 on the GPU"), ints(recent_table, "recent_table must be int32 on the GPU"),
          sealed_table.stride(0), recent_table.stride(0), (int)n};
}

Plan plan_of(const Tensor& header, const Tensor& request, const Tensor& share, const Tensor& seal, const Tensor& slot) {
  return {reinterpret_cast<Header*>(mutable_ints(header, "plan header")),
          reinterpret_cast<Request*>(mutable_ints(request, "plan requests")),
          reinterpret_cast<Share*>(mutable_ints(share, "plan shares")),
          reinterpret_cast<Seal*>(mutable_ints(seal, "plan seals")),
          mutable_ints(slot, "plan slots"),
          (int)share.size(0), (int)seal.size(0), (int)slot.size(0)};
}

Pages pages_of(const Tensor& sealed, const Tensor& recent, const Tensor& slot_channel) {
  require(recent.dim() == 5 && recent.size(2) == 2 && recent.size(3) == RECENT_TOKENS,
          "recent must be [pages, heads, 2, 16, head_dim]", recent);
  const int heads = recent.size(1), dim = recent.size(4);
  require(dim == 64 || dim == 128, "head_dim must be 64 or 128", recent);
  const auto dtype = recent.scalar_type();
  require(dtype == ScalarType::BFloat16 || dtype == ScalarType::Half, "recent pages must be bfloat16 or float16", recent);
  require(recent.stride(4) == 1 && recent.stride(3) == dim && recent.stride(2) == RECENT_TOKENS * dim &&
              recent.stride(1) % 8 == 0 && recent.stride(0) % 8 == 0 && aligned(recent, 16),
          "a head's part of a recent page must be contiguous and 16-byte aligned", recent);
  const int bytes = dim == 64 ? Layout<64>::BYTES : Layout<128>::BYTES;
  require(sealed.dim() == 3 && sealed.size(1) == heads && sealed.size(2) == bytes && sealed.scalar_type() == ScalarType::Byte,
          "sealed must be uint8 [pages, heads, head_page_bytes]", sealed);
  require(sealed.stride(2) == 1 && sealed.stride(1) % 16 == 0 && sealed.stride(0) % 16 == 0 && aligned(sealed, 16),
          "a head's part of a sealed page must be contiguous and 16-byte aligned", sealed);
  require(slot_channel.is_contiguous() && slot_channel.scalar_type() == ScalarType::Short && slot_channel.dim() == 2 &&
              slot_channel.size(0) == heads && slot_channel.size(1) == dim + 16 && aligned(slot_channel, 8),
          "slot_channel must be int16 [heads, head_dim + 16]", slot_channel);
  return {static_cast<uint8_t*>(sealed.data_ptr()), static_cast<uint8_t*>(recent.data_ptr()),
          sealed.stride(0), sealed.stride(1), recent.stride(0) * 2, recent.stride(1) * 2,
          static_cast<const int16_t*>(slot_channel.data_ptr()), heads, dim, dtype == ScalarType::BFloat16};
}

// [T, heads, D] in the pages' dtype, a token's heads side by side.
void require_tokens(const Tensor& t, const Pages& p, int heads, const char* what) {
  require(t.is_cuda() && t.dim() == 3 && t.size(1) == heads && t.size(2) == p.dim && t.stride(2) == 1 &&
              (heads == 1 || t.stride(1) == p.dim) && t.stride(0) % 8 == 0 && aligned(t, 16) &&
              (t.scalar_type() == ScalarType::BFloat16) == p.bf16 && t.element_size() == 2,
          what, t);
}

void plan_step_op(const Tensor& query_start, const Tensor& seq_lens, const Tensor& sealed_table, const Tensor& recent_table,
                  const Tensor& header, const Tensor& request, const Tensor& share, const Tensor& seal, const Tensor& slot,
                  int64_t max_queries, int64_t heads, int64_t few_lanes, int64_t lanes, int64_t together, int64_t long_share) {
  const StepTables s = tables(query_start, seq_lens, sealed_table, recent_table);
  require(request.size(0) >= s.requests, "plan has room for fewer requests", request);
  if (s.requests == 0) return;
  torch::stable::accelerator::DeviceGuard guard(seq_lens.get_device_index());
  with_shapes({{"seq_lens", &seq_lens}, {"sealed_table", &sealed_table}, {"slot", &slot}}, [&] {
    plan_step(s, plan_of(header, request, share, seal, slot), max_queries, heads,
              {(int)few_lanes, (int)lanes, (int)together, (int)long_share}, stream_of(seq_lens));
  });
}

void store_and_seal_op(const Tensor& key, const Tensor& value, const Tensor& sealed, const Tensor& recent,
                       const Tensor& slot_channel, const Tensor& query_start, const Tensor& seq_lens,
                       const Tensor& sealed_table, const Tensor& recent_table, const Tensor& header, const Tensor& request,
                       const Tensor& share, const Tensor& seal, const Tensor& slot) {
  const Pages p = pages_of(sealed, recent, slot_channel);
  require_tokens(key, p, p.heads, "key must be [tokens, heads, head_dim] in the pages' dtype");
  require_tokens(value, p, p.heads, "value must be [tokens, heads, head_dim] in the pages' dtype");
  require(key.size(0) >= slot.size(0) && value.size(0) >= slot.size(0), "key and value must have the plan's tokens", key);
  torch::stable::accelerator::DeviceGuard guard(key.get_device_index());
  with_shapes({{"key", &key}, {"sealed", &sealed}, {"recent", &recent}, {"seq_lens", &seq_lens}}, [&] {
    store_and_seal(p, {key.data_ptr(), value.data_ptr(), key.stride(0), value.stride(0)},
                   tables(query_start, seq_lens, sealed_table, recent_table), plan_of(header, request, share, seal, slot),
                   stream_of(key));
  });
}

DecodeShape shape_of(int64_t group, int64_t tile_warps, int64_t tiles, int64_t warps, int64_t stages, int64_t together) {
  return {(int)group, (int)tile_warps, (int)tiles, (int)warps, (int)stages, (int)together};
}

void decode_op(const Tensor& query, const Tensor& out, const Tensor& sealed, const Tensor& recent, const Tensor& slot_channel,
               const Tensor& query_start, const Tensor& seq_lens, const Tensor& sealed_table, const Tensor& recent_table,
               const Tensor& header, const Tensor& request, const Tensor& share, const Tensor& seal, const Tensor& slot,
               const Tensor& partial, const Tensor& arrivals, double scale, int64_t group,
               int64_t tile_warps, int64_t tiles, int64_t warps, int64_t stages, int64_t together) {
  const Pages p = pages_of(sealed, recent, slot_channel);
  const DecodeShape shape = shape_of(group, tile_warps, tiles, warps, stages, together);
  const StepTables s = tables(query_start, seq_lens, sealed_table, recent_table);
  require_tokens(query, p, p.heads * shape.group, "query must be [tokens, heads * group, head_dim] in the pages' dtype");
  require_tokens(out, p, p.heads * shape.group, "out must be [tokens, heads * group, head_dim] in the pages' dtype");
  require(partial.scalar_type() == ScalarType::Float && partial.numel() >= decode_partial_floats(p.dim, share.size(0), shape),
          "partial is too small", partial);
  require(arrivals.numel() >= (long)s.requests * p.heads, "arrivals is too small", arrivals);
  torch::stable::accelerator::DeviceGuard guard(query.get_device_index());
  with_shapes({{"query", &query}, {"sealed", &sealed}, {"recent", &recent}, {"seq_lens", &seq_lens}, {"share", &share}}, [&] {
    decode(p,
           {query.data_ptr(), out.data_ptr(), query.stride(0), out.stride(0), (float)scale,
            static_cast<float*>(partial.data_ptr()), mutable_ints(arrivals, "arrivals")},
           s, plan_of(header, request, share, seal, slot), shape, stream_of(query));
  });
}

void dequant_context_op(const Tensor& sealed, const Tensor& recent, const Tensor& slot_channel, const Tensor& query_start,
                        const Tensor& seq_lens, const Tensor& sealed_table, const Tensor& recent_table, const Tensor& start,
                        const Tensor& rows, const Tensor& key, const Tensor& value) {
  const Pages p = pages_of(sealed, recent, slot_channel);
  const StepTables s = tables(query_start, seq_lens, sealed_table, recent_table);
  require(key.is_contiguous(), "key must be contiguous", key);
  require(value.is_contiguous() && value.size(0) == key.size(0), "value must be contiguous and as long as key", value);
  require_tokens(key, p, p.heads, "key must be [tokens, heads, head_dim] in the pages' dtype");
  require_tokens(value, p, p.heads, "value must be [tokens, heads, head_dim] in the pages' dtype");
  require(start.size(0) >= s.requests, "start must be int32 [requests]", start);
  require(rows.size(0) > s.requests, "rows must be int32 [requests + 1]", rows);
  if (s.requests == 0 || key.size(0) == 0) return;
  torch::stable::accelerator::DeviceGuard guard(key.get_device_index());
  with_shapes({{"key", &key}, {"sealed", &sealed}, {"recent", &recent}, {"seq_lens", &seq_lens}}, [&] {
    dequant_context(p, {ints(start, "start"), ints(rows, "rows"), key.data_ptr(), value.data_ptr(), (int)key.size(0)}, s,
                    stream_of(key));
  });
}

PageTable page_table(const Tensor& t, int requests, const char* what) {
  require(t.dim() == 2 && t.size(0) >= requests, what, t);
  return {mutable_ints(t, what), t.stride(0), (int)t.size(1)};
}

void check_pages_op(const Tensor& cells, int64_t num_pages, const Tensor& step, const Tensor& sealed_table,
                    const Tensor& recent_table, int64_t page_tokens, bool withdraw, const Tensor& wrong) {
  require(wrong.dim() == 2 && wrong.size(1) == 4 && wrong.is_contiguous() && aligned(wrong, 16),
          "wrong must be int32 [requests, 4]", wrong);
  const int n = wrong.size(0);
  const long given = step.numel() - 4L * n;
  require(step.dim() == 1 && given >= 0 && given % 2 == 0 && aligned(step, 16),
          "step must be int32 [4 * requests + 2 * given]", step);
  const int* values = ints_in_reach(step, "step must be int32 on the GPU or in pinned memory");
  const PageCheck p{mutable_ints(cells, "cells must be int32 on the GPU"), cells.numel(), (int)num_pages,
                    reinterpret_cast<const int4*>(values), reinterpret_cast<const int2*>(values + 4L * n), n, (int)(given / 2),
                    page_table(sealed_table, n, "sealed_table must be int32 [requests, pages]"),
                    page_table(recent_table, n, "recent_table must be int32 [requests, pages]"), (int)page_tokens, withdraw,
                    reinterpret_cast<int4*>(ints_in_reach(wrong, "wrong must be int32 on the GPU or in pinned memory"))};
  const long columns = (long)p.sealed.columns + p.recent.columns;
  require(cells.dim() == 1 && num_pages >= 0 && num_pages <= p.num_cells && columns > 0 && (p.num_cells - num_pages) % columns == 0,
          "cells must have one value for each page, and rows as wide as the tables", cells);
  require(page_tokens > 0 && SINKS % page_tokens == 0, "page_tokens must divide 16", step);
  torch::stable::accelerator::DeviceGuard guard(cells.get_device_index());
  with_shapes({{"step", &step}, {"sealed_table", &sealed_table}, {"recent_table", &recent_table}},
              [&] { check_pages(p, stream_of(cells)); });
}

int checked_dim(int64_t dim) {
  if (dim != 64 && dim != 128) throw std::runtime_error("s4kv_cuda: head_dim must be 64 or 128, got " + std::to_string(dim));
  return (int)dim;
}
int64_t decode_shared_bytes_op(int64_t dim, int64_t tile_warps, int64_t tiles, int64_t warps, int64_t stages,
                               int64_t together) {
  return decode_shared_bytes(checked_dim(dim), shape_of(1, tile_warps, tiles, warps, stages, together));
}
int64_t decode_partial_floats_op(int64_t dim, int64_t grid, int64_t tile_warps, int64_t tiles, int64_t together) {
  return decode_partial_floats(checked_dim(dim), grid, shape_of(1, tile_warps, tiles, 0, 0, together));
}

}  // namespace
}  // namespace s4kv

#define TABLES "Tensor query_start_loc, Tensor seq_lens, Tensor sealed_table, Tensor recent_table"
#define PLAN "Tensor header, Tensor request, Tensor share, Tensor seal, Tensor slot"

STABLE_TORCH_LIBRARY(s4kv_cuda, m) {
  m.def("plan_step(" TABLES ", Tensor(a!) header, Tensor(b!) request, Tensor(c!) share, Tensor(d!) seal, Tensor(e!) slot, "
        "int max_queries, int heads, int few_lanes, int lanes, int together, int long_share) -> ()");
  m.def("store_and_seal(Tensor key, Tensor value, Tensor(a!) sealed, Tensor(b!) recent, Tensor slot_channel, " TABLES ", " PLAN
        ") -> ()");
  m.def("decode(Tensor query, Tensor(a!) out, Tensor sealed, Tensor recent, Tensor slot_channel, " TABLES ", " PLAN
        ", Tensor(b!) partial, Tensor(c!) arrivals, float scale, int group, int tile_warps, int tiles, "
        "int warps, int stages, int together) -> ()");
  m.def("dequant_context(Tensor sealed, Tensor recent, Tensor slot_channel, " TABLES
        ", Tensor start, Tensor rows, Tensor(a!) key, Tensor(b!) value) -> ()");
  m.def("check_pages(Tensor(a!) cells, int num_pages, Tensor step, Tensor(b!) sealed_table, Tensor(c!) recent_table, "
        "int page_tokens, bool withdraw, Tensor(d!) wrong) -> ()");
  m.def("decode_shared_bytes(int dim, int tile_warps, int tiles, int warps, int stages, int together) -> int");
  m.def("decode_partial_floats(int dim, int grid, int tile_warps, int tiles, int together) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(s4kv_cuda, CUDA, m) {
  m.impl("plan_step", TORCH_BOX(&s4kv::plan_step_op));
  m.impl("store_and_seal", TORCH_BOX(&s4kv::store_and_seal_op));
  m.impl("decode", TORCH_BOX(&s4kv::decode_op));
  m.impl("dequant_context", TORCH_BOX(&s4kv::dequant_context_op));
  m.impl("check_pages", TORCH_BOX(&s4kv::check_pages_op));
}

STABLE_TORCH_LIBRARY_IMPL(s4kv_cuda, CompositeExplicitAutograd, m) {
  m.impl("decode_shared_bytes", TORCH_BOX(&s4kv::decode_shared_bytes_op));
  m.impl("decode_partial_floats", TORCH_BOX(&s4kv::decode_partial_floats_op));
}
