// Warp-wide matrix products (mma.sync) and the loads that feed them (ldmatrix).
// Fragment layouts, with g = lane / 4 and t = lane % 4 (PTX ISA, "Matrix Fragments for mma"):
//   accumulator m16n8 : d[0], d[1] = row g, columns 2t, 2t+1;  d[2], d[3] = row g + 8, the same columns
//   16-bit A m16k16   : a[0] = (g, 2t..)  a[1] = (g+8, 2t..)  a[2] = (g, 2t+8..)  a[3] = (g+8, 2t+8..)
//   16-bit B k16n8    : b0 = (k 2t.., n g)  b1 = (k 2t+8.., n g)
//   tf32 A m16k8      : a[0] = (g, t)  a[1] = (g+8, t)  a[2] = (g, t+4)  a[3] = (g+8, t+4)
//   tf32 B k8n8       : b0 = (k t, n g)  b1 = (k t+4, n g)
#pragma once
#include "ptx/cp_async.cuh"

// ldmatrix is volatile, so it stays behind the barrier that makes its tile visible, but has no memory clobber:
// the compiler may then move products, which are pure, around it.

__device__ __forceinline__ void load_matrix_x4(unsigned (&r)[4], const void* row_of_this_lane) {
    CUFLASH_ASSERT(in_dynamic_shared(row_of_this_lane, 16));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row_of_this_lane)));
}

__device__ __forceinline__ void load_matrix_x4_transposed(unsigned (&r)[4], const void* row_of_this_lane) {
    CUFLASH_ASSERT(in_dynamic_shared(row_of_this_lane, 16));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row_of_this_lane)));
}

// d += A (16 x 16) * B (16 x 8), 16-bit inputs, float32 accumulation.
template <typename T>
__device__ __forceinline__ void mma_16x8x16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1);

template <>
__device__ __forceinline__ void mma_16x8x16<__half>(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    if constexpr (ARCH >= 80) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else {  // sm_75 has k8 only; its fragments are the two halves of the k16 ones
        asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(b0));
        asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[2]), "r"(a[3]), "r"(b1));
    }
}

template <>
__device__ __forceinline__ void mma_16x8x16<__nv_bfloat16>(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// d += A (16 x 8) * B (8 x 8), tf32 inputs (float32 whose low 13 bits the unit ignores), float32 accumulation.
__device__ __forceinline__ void mma_16x8x8_tf32(float (&d)[4], const float (&a)[4], float b0, float b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])), "r"(__float_as_uint(a[3])),
                   "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}
