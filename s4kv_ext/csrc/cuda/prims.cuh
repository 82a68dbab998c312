// PTX wrappers. What sm_80 lacks, bulk copies, has a fallback there.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#define DEV __device__ __forceinline__

namespace s4kv {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define S4KV_BULK 1
#else
#define S4KV_BULK 0
#endif

DEV uint32_t smem_address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }

template <bool BF16>
DEV void mma(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  if constexpr (BF16)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
DEV uint32_t transpose8x8(uint32_t a) {
  uint32_t d;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(a));
  return d;
}
DEV void ldmatrix_trans(uint32_t (&r)[4], const void* p) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(smem_address(p))
               : "memory");
}
DEV float shfl_xor(float v, int m) { return __shfl_xor_sync(0xffffffffu, v, m); }
DEV float warp_max(float v) {
#pragma unroll
  for (int d = 16; d; d >>= 1) v = fmaxf(v, shfl_xor(v, d));
  return v;
}
DEV float warp_sum(float v) {
#pragma unroll
  for (int d = 16; d; d >>= 1) v += shfl_xor(v, d);
  return v;
}
DEV uint32_t mul_h2(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("mul.rn.f16x2 %0,%1,%2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
template <bool BF16>
DEV uint32_t pack2(float low, float high) {
  uint32_t d;
  if constexpr (BF16)
    asm("cvt.rn.bf16x2.f32 %0,%1,%2;" : "=r"(d) : "f"(high), "f"(low));
  else
    asm("cvt.rn.f16x2.f32 %0,%1,%2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}
template <bool BF16>
DEV float2 unpack2(uint32_t v) {
  if constexpr (BF16) return make_float2(__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000u));
  __half2 h = *reinterpret_cast<__half2*>(&v);
  return __half22float2(h);
}
DEV float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x));
  return y;
}
DEV float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x));
  return y;
}
// 2^e for -126 <= e <= 127.
DEV float power_of_two(int e) { return __int_as_float((e + 127) << 23); }
DEV uint32_t low_twice(uint32_t v) { return __byte_perm(v, 0, 0x1010); }
DEV uint32_t high_twice(uint32_t v) { return __byte_perm(v, 0, 0x3232); }

DEV void barrier_init(uint64_t* b, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(smem_address(b)), "r"(arrivals) : "memory");
}
DEV void barrier_arrive(uint64_t* b) {
  asm volatile("{.reg .b64 s;\nmbarrier.arrive.shared.b64 s, [%0];\n}" ::"r"(smem_address(b)) : "memory");
}
// Whether the phase of this parity is over, without waiting.
DEV bool barrier_test(uint64_t* b, uint32_t parity) {
  uint32_t done;
  asm volatile("{.reg .pred p;\nmbarrier.test_wait.parity.shared.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
               : "=r"(done)
               : "r"(smem_address(b)), "r"(parity)
               : "memory");
  return done;
}
DEV void barrier_wait(uint64_t* b, uint32_t parity) {
#if S4KV_BULK
  asm volatile("{.reg .pred p;\nL_%=: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@!p bra L_%=;\n}" ::"r"(
                   smem_address(b)),
               "r"(parity)
               : "memory");
#else
  asm volatile("{.reg .pred p;\nL_%=: mbarrier.test_wait.parity.shared.b64 p, [%0], %1;\n@!p bra L_%=;\n}" ::"r"(
                   smem_address(b)),
               "r"(parity)
               : "memory");
#endif
}
DEV void fence_barrier_init() {
#if S4KV_BULK
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
// Before the copy engine overwrites shared memory that ordinary stores have written.
DEV void fence_async_proxy() {
#if S4KV_BULK
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
DEV void expect_bytes(uint64_t* b, uint32_t bytes) {
#if S4KV_BULK
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(b)), "r"(bytes) : "memory");
#endif
}
// once: nobody else will read these bytes soon.
DEV void bulk_copy(void* dst, const void* src, uint32_t bytes, uint64_t* b, bool once) {
#if S4KV_BULK
  if (!once) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     smem_address(dst)),
                 "l"(src), "r"(bytes), "r"(smem_address(b))
                 : "memory");
    return;
  }
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
          smem_address(dst)),
      "l"(src), "r"(bytes), "r"(smem_address(b)), "l"(policy)
      : "memory");
#endif
}
DEV void copy16(void* dst, const void* src) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(smem_address(dst)), "l"(src) : "memory");
}
// This thread arrives once its copies so far have landed.
DEV void copies_arrive(uint64_t* b) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(smem_address(b)) : "memory");
}
DEV void named_barrier(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

DEV void named_barrier_arrive(int id, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

DEV int atomic_add_acq_rel(int* p, int v) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;" : "=r"(before) : "l"(p), "r"(v) : "memory");
  return before;
}

}  // namespace s4kv
