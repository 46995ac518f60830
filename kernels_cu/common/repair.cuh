// Rows that a masked key's NaN or infinity in v has reached: 0 * NaN is NaN, so hiding the weight is not enough.
// Only blocks that the mask cuts can leak, only a non-finite output shows it, and then v tells whether it was that:
// rare enough for a plain computation of those rows, in which hidden keys do not take part at all.
#pragma once
#include "common/mask.cuh"
#include "common/score.cuh"

__device__ __forceinline__ bool any_not_finite(const dtype_t* v, const Strides& strides, int begin, int end, int columns) {
    bool found = false;
#pragma unroll 1
    for (int key = begin; key < end; ++key)
#pragma unroll 1
        for (int column = threadIdx.x % 32; column < columns; column += 32) found |= !isfinite(to_float(v[key * strides.row + column * strides.dim]));
    return __any_sync(0xffffffffu, found);
}

// One warp, one row: out = sum over visible keys of exp(score - lse) v. Writes the finished row to `row`.
__device__ __forceinline__ void repair_row(const ForwardParams& p, const Tile& tile, const Mask& mask, int query, float lse, dtype_t* row) {
    CUFLASH_ASSERT(query >= tile.m_start && query < tile.m_start + tile.rows);
    CUFLASH_ASSERT(mask.first_key(query) >= 0 && mask.end_key(query) <= tile.seqlen_k);
    CUFLASH_ASSERT(in_dynamic_shared(row + p.head_dim_v - 1, sizeof(dtype_t)));
    const int lane = threadIdx.x % 32, kv_head = tile.head / p.heads_per_group;
    const dtype_t* const q = row_pointer(static_cast<const dtype_t*>(p.q), p.q_strides, tile.batch, tile.row_q + query, tile.head);
    const dtype_t* const k = row_pointer(static_cast<const dtype_t*>(p.k), p.k_strides, tile.batch, tile.row_k, kv_head);
    const dtype_t* const v = row_pointer(static_cast<const dtype_t*>(p.v), p.v_strides, tile.batch, tile.row_k, kv_head);
    const ScoreModifier modifier(p, tile);
    constexpr int COLUMNS = (HEAD_DIM_V + 31) / 32;  // of a lane
    float o[COLUMNS] = {};
#pragma unroll 1
    for (int key = mask.first_key(query); key < mask.end_key(query); ++key) {
        float dot = 0.0f;
#pragma unroll 1
        for (int d = lane; d < p.head_dim; d += 32) dot += to_float(q[d * p.q_strides.dim]) * to_float(k[key * p.k_strides.row + d * p.k_strides.dim]);
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2) dot += __shfl_xor_sync(0xffffffffu, dot, offset);
        const float s = modifier(dot, query, key);
        if (s == minus_infinity()) continue;  // hidden by the bias
        const float weight = exp2_approx((s - lse) * LOG2_E);
#pragma unroll
        for (int i = 0; i < COLUMNS; ++i)
            if (lane + 32 * i < p.head_dim_v) o[i] += weight * to_float(v[key * p.v_strides.row + (lane + 32 * i) * p.v_strides.dim]);
    }
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i)
        if (lane + 32 * i < p.head_dim_v) row[lane + 32 * i] = from_float<dtype_t>(o[i]);
}

// rows: of this warp, staged with this pitch; first_row: counted from the tile's first.
template <int ROWS, int PITCH>
__device__ __forceinline__ void repair_rows(const ForwardParams& p, const Tile& tile, dtype_t* stage, const float* row_lse, int first_row) {
    const Mask mask(p, tile);
    const Range blocks = mask.visible_blocks(tile);
    const dtype_t* const v = row_pointer(static_cast<const dtype_t*>(p.v), p.v_strides, tile.batch, tile.row_k, tile.head / p.heads_per_group);
    bool leaks = HAS_BIAS;  // a bias may hide any key
#pragma unroll 1
    for (int block = blocks.begin; block < blocks.end && !leaks; ++block)
        leaks = mask.cuts(tile, block) && any_not_finite(v, p.v_strides, block * BLOCK_N, min((block + 1) * BLOCK_N, tile.seqlen_k), p.head_dim_v);
    if (!leaks) return;
#pragma unroll 1
    for (int row = 0; row < ROWS && first_row + row < tile.rows; ++row) {
        CUFLASH_ASSERT(first_row + row < BLOCK_M);
        const float lse = row_lse[first_row + row];
        bool bad = false;
#pragma unroll 1
        for (int column = threadIdx.x % 32; column < p.head_dim_v; column += 32) bad |= !isfinite(to_float(stage[row * PITCH + column]));
        if (__any_sync(0xffffffffu, bad) && isfinite(lse)) repair_row(p, tile, mask, tile.m_start + first_row + row, lse, stage + row * PITCH);
    }
}
