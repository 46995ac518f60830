// cp.async: copies from global to shared memory that bypass registers and run behind the arithmetic.
// Before sm_80 there is none: the copy is done at once and the waits are free.
#pragma once
#include "common/debug.cuh"

__device__ __forceinline__ unsigned shared_address(const void* p) {
    return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

template <int BYTES>
struct VectorOf;
template <> struct VectorOf<16> { using type = uint4; };
template <> struct VectorOf<8> { using type = uint2; };
template <> struct VectorOf<4> { using type = unsigned; };
template <> struct VectorOf<2> { using type = unsigned short; };

// Copies BYTES, or writes as many zeros where `valid` is false; both sides BYTES-aligned. The predicate form of
// zero filling, because the other, a size that is not a constant, costs eight more instructions a copy.
template <int BYTES>
__device__ __forceinline__ void copy_async(void* shared, const void* global, bool valid) {
    CUFLASH_ASSERT(in_dynamic_shared(shared, BYTES));
    CUFLASH_ASSERT(!valid || reinterpret_cast<size_t>(global) % BYTES == 0);
    if constexpr (ARCH < 80 || BYTES == 2) {
        using Vector = typename VectorOf<BYTES>::type;
        *static_cast<Vector*>(shared) = valid ? __ldg(static_cast<const Vector*>(global)) : Vector{};
    } else if constexpr (BYTES == 16) {
        asm volatile("{.reg .pred skip;\nsetp.eq.b32 skip, %2, 0;\ncp.async.cg.shared.global.L2::128B [%0], [%1], 16, skip;}"
                     ::"r"(shared_address(shared)), "l"(global), "r"(static_cast<int>(valid)) : "memory");
    } else {
        asm volatile("{.reg .pred skip;\nsetp.eq.b32 skip, %2, 0;\ncp.async.ca.shared.global [%0], [%1], %3, skip;}"
                     ::"r"(shared_address(shared)), "l"(global), "r"(static_cast<int>(valid)), "n"(BYTES) : "memory");
    }
}

__device__ __forceinline__ void copy_async_commit() {
    if constexpr (ARCH >= 80) asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most PENDING of this thread's groups are still under way.
template <int PENDING>
__device__ __forceinline__ void copy_async_wait() {
    if constexpr (ARCH >= 80) asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
