// Checks that a kernel makes of itself with CUFLASH_DEBUG=1. Without it nothing here leaves a trace in the machine
// code: conditions are not even evaluated, so what only they need has to be written inside them.
#pragma once
#include "params.cuh"

#ifdef CUFLASH_DEBUG
// Out of line, so that hundreds of asserts in unrolled loops stay a test and a branch each.
[[noreturn]] static __device__ __noinline__ void assertion_failed(const char* file, int line, const char* condition) {
    printf("%s:%d: block %d, thread %d: assertion failed: %s\n", file, line, static_cast<int>(blockIdx.x), static_cast<int>(threadIdx.x), condition);
    __trap();
}
#define CUFLASH_ASSERT(...) ((__VA_ARGS__) ? static_cast<void>(0) : assertion_failed(__FILE__, __LINE__, #__VA_ARGS__))
#else
#define CUFLASH_ASSERT(...) static_cast<void>(0)
#endif

// Whether these bytes lie in the shared memory that the launch asked for, at a multiple of their number.
__device__ __forceinline__ bool in_dynamic_shared(const void* at, int bytes) {
    extern __shared__ __align__(16) unsigned char dynamic_shared[];  // starts where every kernel's does
    unsigned size;
    asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(size));
    const long long offset = static_cast<const unsigned char*>(at) - dynamic_shared;
    return offset >= 0 && offset + bytes <= size && offset % bytes == 0;
}

// Whether an element lies in a strided array of these sizes. Strides may be negative or 0.
template <typename T>
__device__ __forceinline__ bool in_array(const T* at, const void* base, const Strides& strides, int batch, long long rows, int heads, int columns) {
    const long long last[4] = {(batch - 1) * strides.batch, (rows - 1) * strides.row, (heads - 1) * strides.head, (columns - 1) * strides.dim};
    long long lowest = 0, highest = 0;
    for (int i = 0; i < 4; ++i) {
        if (last[i] < 0) lowest += last[i];
        else highest += last[i];
    }
    const long long offset = at - static_cast<const T*>(base);
    return offset >= lowest && offset <= highest;
}
