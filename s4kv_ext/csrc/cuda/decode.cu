#include "decode.cuh"

#include <cmath>
#include <stdexcept>

namespace s4kv {
namespace {

template <int D, bool BF16, int NT, bool WIDE>
void launch(const DecodeParams& p, int grid, cudaStream_t stream) {
  auto kernel = decode_kernel<D, BF16, NT, WIDE>;
  const int bytes = decode_shared(D, p.warps, p.tile_warps, NT, p.stages, p.together);
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "decode");
  kernel<<<grid, (p.warps + 1) * 32, bytes, stream>>>(p);
  check_launch("decode");
}

template <int D, bool BF16>
void launch(const DecodeParams& p, int tiles, int grid, cudaStream_t stream) {
  if (tiles == 1) launch<D, BF16, 1, false>(p, grid, stream);
  else if (p.warps < 8) launch<D, BF16, 2, false>(p, grid, stream);
  else launch<D, BF16, 2, true>(p, grid, stream);
}

}  // namespace

int decode_shared_bytes(int dim, const DecodeShape& s) {
  return decode_shared(dim, s.warps, s.tile_warps, s.tiles, s.stages, s.together);
}

long decode_partial_floats(int dim, int grid, const DecodeShape& s) {
  return 2L * grid * partial_floats(dim, s.tile_warps * s.tiles * s.together);
}

void decode(const Pages& pages, const Queries& q, const StepTables& step, const Plan& plan, const DecodeShape& shape,
            cudaStream_t stream) {
  const DecodeParams p{pages, q, step, plan.request, plan.share, shape.group,
                       shape.tile_warps, shape.warps, shape.stages, shape.together,
                       inverse_of(shape.group), inverse_of(shape.tile_warps), q.scale * (float)M_LOG2E};
  if (pages.dim == 64)
    pages.bf16 ? launch<64, true>(p, shape.tiles, plan.grid, stream) : launch<64, false>(p, shape.tiles, plan.grid, stream);
  else
    pages.bf16 ? launch<128, true>(p, shape.tiles, plan.grid, stream) : launch<128, false>(p, shape.tiles, plan.grid, stream);
}

}  // namespace s4kv
