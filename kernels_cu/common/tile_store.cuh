// Writes a warp's finished rows, staged in shared memory, to a strided array.
#pragma once
#include "common/debug.cuh"
#include "common/types.cuh"
#include "params.cuh"

// rows, columns: how many of them exist; vectorized: every row starts on a 16-byte boundary, last dim contiguous.
template <int ROWS, int COLUMNS, int PITCH, typename T>
__device__ __forceinline__ void store_rows(const T* stage, T* out, const Strides& strides, int rows, int columns, bool vectorized) {
    constexpr int VECTOR = 16 / sizeof(T), CHUNKS = COLUMNS / VECTOR;
    if (vectorized && columns % VECTOR == 0) {
#pragma unroll 4
        for (int i = threadIdx.x % 32; i < ROWS * CHUNKS; i += 32) {
            const int row = i / CHUNKS, column = i % CHUNKS * VECTOR;
            CUFLASH_ASSERT(in_dynamic_shared(stage + row * PITCH + column, 16));
            CUFLASH_ASSERT(reinterpret_cast<size_t>(out + row * strides.row + column) % 16 == 0);
            if (row < rows && column < columns) *reinterpret_cast<uint4*>(out + row * strides.row + column) = *reinterpret_cast<const uint4*>(stage + row * PITCH + column);
        }
    } else {
#pragma unroll 1
        for (int i = threadIdx.x % 32; i < ROWS * COLUMNS; i += 32) {
            const int row = i / COLUMNS, column = i % COLUMNS;
            CUFLASH_ASSERT(in_dynamic_shared(stage + row * PITCH + column, sizeof(T)));
            if (row < rows && column < columns) out[row * strides.row + column * strides.dim] = stage[row * PITCH + column];
        }
    }
}
