// Brings tiles of rows from a strided array into shared memory, zeros beyond the valid rows and columns.
// In parts, so that a kernel can spread the copies among its products: in one burst they would fill the queue that
// ldmatrix waits in too. And without branches, because the compiler mixes instructions within a stretch of code only.
// Two forms, for the registers they cost: load_tile keeps nothing between tiles, TileWalker keeps a pointer and
// saves the address arithmetic.
#pragma once
#include "common/debug.cuh"
#include "ptx/cp_async.cuh"
#include "params.cuh"

// How the threads of the block divide a tile among them.
template <int ROWS, int COLUMNS, int PITCH, typename T>
struct TileShape {
    static constexpr int VECTOR = VECTOR_BYTES / sizeof(T);  // 1: the last dim need not be contiguous; else it divides the true columns
    static constexpr int CHUNKS = COLUMNS / VECTOR, THREADS = NUM_WARPS * 32;
    static constexpr int STEP = THREADS >= CHUNKS ? THREADS / CHUNKS : 1;                     // rows copied at once
    static constexpr int PASSES = THREADS >= CHUNKS ? 1 : (CHUNKS + THREADS - 1) / THREADS;   // copies of a thread in a row
    static constexpr int COPIES = (ROWS + STEP - 1) / STEP * PASSES;
    static constexpr bool GUARDED = ROWS % STEP != 0 || (THREADS % CHUNKS != 0 && CHUNKS % THREADS != 0);  // some fall outside
    static_assert(VECTOR >= 1 && COLUMNS % VECTOR == 0);

    static __device__ __forceinline__ int thread_row(int thread) {
        const int row = PASSES > 1 ? 0 : thread / CHUNKS;
        return THREADS % CHUNKS == 0 || row < STEP ? row : ROWS;  // threads left over have no row
    }
    static __device__ __forceinline__ int thread_column(int thread) { return (PASSES > 1 ? thread : thread % CHUNKS) * VECTOR; }
    static constexpr int down(int copy) { return copy / PASSES * STEP; }
    static constexpr int right(int copy) { return copy % PASSES * THREADS * VECTOR; }

    // Calls copy_one(copy) for part `part` of `parts` equal ones, both constants after unrolling.
    template <typename CopyOne>
    static __device__ __forceinline__ void for_part(int part, int parts, const CopyOne& copy_one) {
        if constexpr (COPIES > 32) {  // single elements: too many to unroll
            if (part != 0) return;
#pragma unroll 4
            for (int copy = 0; copy < COPIES; ++copy) copy_one(copy);
        } else {
#pragma unroll
            for (int copy = 0; copy < COPIES; ++copy)
                if (copy * parts / COPIES == part) copy_one(copy);
        }
    }
};

// global: the tile's first row.
template <int ROWS, int COLUMNS, int PITCH, typename T>
__device__ __forceinline__ void load_tile(T* shared, const T* global, const Strides& strides, int valid_rows, int valid_columns, int part = 0, int parts = 1) {
    using Shape = TileShape<ROWS, COLUMNS, PITCH, T>;
    const int thread_row = Shape::thread_row(threadIdx.x), thread_column = Shape::thread_column(threadIdx.x);
    Shape::for_part(part, parts, [&](int copy) {
        const int row = thread_row + Shape::down(copy), column = thread_column + Shape::right(copy);
        if (Shape::GUARDED && (row >= ROWS || column >= COLUMNS)) return;
        CUFLASH_ASSERT(row < ROWS && column + Shape::VECTOR <= COLUMNS);
        CUFLASH_ASSERT(column >= valid_columns || column + Shape::VECTOR <= valid_columns);  // no row ends within a load
        copy_async<VECTOR_BYTES>(shared + row * PITCH + column, global + row * strides.row + column * (Shape::VECTOR == 1 ? strides.dim : 1),
                                 row < valid_rows && column < valid_columns);
    });
}

// Walks from tile to tile towards the start of the array; all of a tile's rows are valid, or none.
template <int ROWS, int COLUMNS, int PITCH, typename T>
struct TileWalker {
    using Shape = TileShape<ROWS, COLUMNS, PITCH, T>;
    const T* from;  // where this thread's first copy of the next tile reads
    int row, column;
    bool has_data;

    __device__ __forceinline__ TileWalker(const T* first_row, const Strides& strides, int valid_columns) {
        int thread;  // hidden from the compiler, which would otherwise share parts of this with the first loads and keep them
        asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
        row = Shape::thread_row(thread);
        column = Shape::thread_column(thread);
        has_data = column < valid_columns;
        from = first_row + row * strides.row + column * (Shape::VECTOR == 1 ? strides.dim : 1);
    }

    __device__ __forceinline__ void load(T* shared, const Strides& strides, bool valid, int valid_columns, int part, int parts) const {
        Shape::for_part(part, parts, [&](int copy) {
            if (Shape::GUARDED && (row + Shape::down(copy) >= ROWS || column + Shape::right(copy) >= COLUMNS)) return;
            CUFLASH_ASSERT(row + Shape::down(copy) < ROWS && column + Shape::right(copy) + Shape::VECTOR <= COLUMNS);
            copy_async<VECTOR_BYTES>(shared + (row + Shape::down(copy)) * PITCH + column + Shape::right(copy),
                                     from + Shape::down(copy) * strides.row + Shape::right(copy) * (Shape::VECTOR == 1 ? strides.dim : 1),
                                     valid && (Shape::PASSES == 1 ? has_data : column + Shape::right(copy) < valid_columns));
        });
    }

    // Whether this thread's first copy reads where an array's row of this number is.
    __device__ __forceinline__ bool reads(const T* first_row, const Strides& strides) const {
        return from == first_row + row * strides.row + column * (Shape::VECTOR == 1 ? strides.dim : 1);
    }

    __device__ __forceinline__ void step_back(const Strides& strides) { from -= ROWS * strides.row; }
};
