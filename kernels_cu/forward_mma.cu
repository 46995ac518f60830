// Attention forward on mma.sync tensor cores (sm_75 and later), FlashAttention-2 style.
//
// Algorithm: a thread block owns BLOCK_M query rows of one head and walks the visible keys from the last tile
//   to the first, BLOCK_N at a time: scores = q k^T, mask, online softmax, out += weights v. Scores and
//   weights live in registers only. Only tiles on an edge of the mask pay for masking.
// Thread roles: all alike. A warp owns BLOCK_M / NUM_WARPS (16 or 32) whole rows, so row maxima and sums need
//   shuffles within a quad and nothing else; warps meet once a tile, for the loads.
// NaN and infinity: a masked or padded key never reaches a row that does not see it (common/repair.cuh).
// Shared memory (T = dtype_t):  q [BLOCK_M][PITCH_Q] | k [NUM_STAGES][BLOCK_N][PITCH_K] | v [NUM_STAGES][BLOCK_N][PITCH_V]
//   Finished outputs pass through the warp's own rows of q, to leave in 16-byte stores.
// Loads: NUM_STAGES >= 2: tiles n-1 .. travel while tile n is used, one barrier a tile. NUM_STAGES == 1: v(n)
//   travels under q k(n)^T, and k(n-1) under the softmax and weights v(n).
// Symbols: m, n = query and key blocks; s = scores, then weights; o = unnormalised output; g, t = lane / 4, lane % 4.
#ifndef CUFLASH_SPEC
#include "editor_defaults.cuh"
#endif
#include "common/types.cuh"
#include "common/layout.cuh"
#include "common/mask.cuh"
#include "common/repair.cuh"
#include "common/score.cuh"
#include "common/softmax.cuh"
#include "common/gemm_16bit.cuh"
#include "common/gemm_tf32.cuh"
#include "common/tile_load.cuh"
#include "common/tile_store.cuh"

constexpr int WARP_M = BLOCK_M / NUM_WARPS;
constexpr int M_FRAGS = WARP_M / 16;
static_assert(M_FRAGS * 16 * NUM_WARPS == BLOCK_M, "block_m must be a multiple of 16 * num_warps");
static_assert(BLOCK_N % 16 == 0 && HEAD_DIM % 16 == 0 && HEAD_DIM_V % 16 == 0);

using Gemm = WarpGemm<dtype_t, M_FRAGS>;
using Softmax = OnlineSoftmax<M_FRAGS, Gemm::N_BLOCKS>;
using Scores = float[M_FRAGS][Gemm::N_BLOCKS][4];
using Output = float[M_FRAGS][Gemm::V_BLOCKS][4];

// Scores in, scores out: modified, in natural units, where the spec has modifiers; -inf where the mask hides.
__device__ __forceinline__ void modify_and_mask(Scores& s, const ForwardParams& p, const Tile& tile, const ScoreModifier& modifier, int n, bool on_edge) {
    if constexpr (!HAS_SCORE_MODIFIER) {
        if (p.softmax_scale <= 0.0f) {  // the maximum of scaled scores is not the scaled maximum: scale before it
#pragma unroll
            for (int m = 0; m < M_FRAGS; ++m)
#pragma unroll
                for (int j = 0; j < Gemm::N_BLOCKS; ++j)
#pragma unroll
                    for (int i = 0; i < 4; ++i) s[m][j][i] *= p.softmax_scale;
        }
        if (!on_edge) return;
    }
    const int lane = threadIdx.x % 32, key = n * BLOCK_N + lane % 4 * 2;
    const Mask mask(p, tile);
#pragma unroll
    for (int m = 0; m < M_FRAGS; ++m)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int query = tile.m_start + threadIdx.x / 32 * WARP_M + m * 16 + r * 8 + lane / 4;
            const int first = mask.first_key(query) - key, end = mask.end_key(query) - key;
#pragma unroll
            for (int j = 0; j < Gemm::N_BLOCKS; ++j)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    float& x = s[m][j][2 * r + i];
                    if constexpr (HAS_SCORE_MODIFIER) x = modifier(x, query, key + j * 8 + i);
                    if (j * 8 + i < first || j * 8 + i >= end) x = minus_infinity();
                }
        }
}

extern "C" __global__ void __launch_bounds__(NUM_WARPS * 32, BLOCKS_PER_SM) forward_mma(const __grid_constant__ ForwardParams p) {
    extern __shared__ __align__(16) unsigned char shared[];
    dtype_t* const q_tile = reinterpret_cast<dtype_t*>(shared);
    dtype_t* const k_tiles = q_tile + BLOCK_M * Gemm::PITCH_Q;
    dtype_t* const v_tiles = k_tiles + NUM_STAGES * BLOCK_N * Gemm::PITCH_K;
    // Shared, because only loads, masks and the epilogue need them: they must not hold registers through the products.
    __shared__ Tile tile;
    __shared__ float row_lse[HAS_MASK ? BLOCK_M : 1];
    __shared__ const dtype_t *k, *v;  // first row of the sequence

    if (threadIdx.x == 0) {
        tile = find_tile(p, blockIdx.x);
        k = row_pointer(static_cast<const dtype_t*>(p.k), p.k_strides, tile.batch, tile.row_k, tile.head / p.heads_per_group);
        CUFLASH_ASSERT(in_dynamic_shared(v_tiles + NUM_STAGES * BLOCK_N * Gemm::PITCH_V - 1, sizeof(dtype_t)));
        v = row_pointer(static_cast<const dtype_t*>(p.v), p.v_strides, tile.batch, tile.row_k, tile.head / p.heads_per_group);
        CUFLASH_ASSERT(ends_in_array(k, tile.seqlen_k, p.k, p.k_strides, p.batch, p.seqlen_k, p.nheads_q / p.heads_per_group, p.head_dim));
        CUFLASH_ASSERT(ends_in_array(v, tile.seqlen_k, p.v, p.v_strides, p.batch, p.seqlen_k, p.nheads_q / p.heads_per_group, p.head_dim_v));
    }
    __syncthreads();
    if (tile.rows <= 0) return;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    dtype_t* const warp_q = q_tile + warp * WARP_M * Gemm::PITCH_Q;
    Gemm gemm(warp_q, lane);
    Softmax softmax(HAS_SCORE_MODIFIER || p.softmax_scale <= 0.0f ? LOG2_E : p.softmax_scale * LOG2_E);
    Output o = {};

    const Range blocks = Mask(p, tile).visible_blocks(tile);
    if (blocks.begin < blocks.end) {
        const ScoreModifier modifier(p, tile);
        const int first = blocks.begin, last = blocks.end - 1, seqlen_k = tile.seqlen_k;
        CUFLASH_ASSERT(first >= 0 && last * BLOCK_N < seqlen_k);
        // A block before the first is filled with zeros, which nobody reads.
        const auto load_k = [&](int n, int stage, int part = 0, int parts = 1) {
            load_tile<BLOCK_N, HEAD_DIM, Gemm::PITCH_K>(k_tiles + stage * BLOCK_N * Gemm::PITCH_K, k + n * BLOCK_N * p.k_strides.row, p.k_strides,
                                                        n < first ? 0 : seqlen_k - n * BLOCK_N, p.head_dim, part, parts);
        };
        const auto load_v = [&](int n, int stage, int part = 0, int parts = 1) {
            load_tile<BLOCK_N, HEAD_DIM_V, Gemm::PITCH_V>(v_tiles + stage * BLOCK_N * Gemm::PITCH_V, v + n * BLOCK_N * p.v_strides.row, p.v_strides,
                                                          n < first ? 0 : seqlen_k - n * BLOCK_N, p.head_dim_v, part, parts);
        };
        CUFLASH_ASSERT(ends_in_array(row_pointer(static_cast<const dtype_t*>(p.q), p.q_strides, tile.batch, tile.row_q + tile.m_start, tile.head), tile.rows,
                                     p.q, p.q_strides, p.batch, p.seqlen_q, p.nheads_q, p.head_dim));
        load_tile<BLOCK_M, HEAD_DIM, Gemm::PITCH_Q>(q_tile, row_pointer(static_cast<const dtype_t*>(p.q), p.q_strides, tile.batch, tile.row_q + tile.m_start, tile.head),
                                                    p.q_strides, tile.rows, p.head_dim);
        if constexpr (NUM_STAGES == 1) {
            load_k(last, 0);
            copy_async_commit();
#pragma unroll 1
            for (int n = last; n >= first; --n) {
                copy_async_wait<0>();
                __syncthreads();  // k(n) is here; every warp is done with v(n+1)
                if (n == last) gemm.load_q();
                Scores s = {};
                // Early in the products, though not in one burst: they must hide the whole way from memory.
                gemm.scores(s, k_tiles, [&](int step, int steps) { load_v(n, 0, step, (steps + 3) / 4); });
                copy_async_commit();
                modify_and_mask(s, p, tile, modifier, n, Mask(p, tile).cuts(tile, n));
                softmax.step(s, o);
                copy_async_wait<0>();
                __syncthreads();  // v(n) is here; every warp is done with k(n)
                gemm.values(o, s, v_tiles, [&](int step, int steps) { load_k(n - 1, 0, step, (steps + 3) / 4); });
                copy_async_commit();
            }
        } else {
#pragma unroll
            for (int ahead = 0; ahead < NUM_STAGES - 1; ++ahead) {
                load_k(last - ahead, ahead);
                load_v(last - ahead, ahead);
                copy_async_commit();
            }
            TileWalker<BLOCK_N, HEAD_DIM, Gemm::PITCH_K, dtype_t> k_walker(k + (last - NUM_STAGES + 1) * BLOCK_N * p.k_strides.row, p.k_strides, p.head_dim);
            TileWalker<BLOCK_N, HEAD_DIM_V, Gemm::PITCH_V, dtype_t> v_walker(v + (last - NUM_STAGES + 1) * BLOCK_N * p.v_strides.row, p.v_strides, p.head_dim_v);
            const Range whole = Mask(p, tile).whole_blocks(tile);
            int stage = 0, free_stage = NUM_STAGES - 1;
#pragma unroll 1
            for (int n = last; n >= first; --n) {
                copy_async_wait<NUM_STAGES - 2>();
                __syncthreads();  // k(n), v(n) are here; every warp is done with tile n+1
                if (n == last) gemm.load_q();
                Scores s = {};
                gemm.scores(s, k_tiles + stage * BLOCK_N * Gemm::PITCH_K, [&](int step, int steps) {
                    const bool more = n - (NUM_STAGES - 1) >= first;
                    CUFLASH_ASSERT(!more || (n - (NUM_STAGES - 1)) * BLOCK_N + BLOCK_N <= seqlen_k);
                    CUFLASH_ASSERT(k_walker.reads(k + (n - (NUM_STAGES - 1)) * BLOCK_N * p.k_strides.row, p.k_strides));
                    CUFLASH_ASSERT(v_walker.reads(v + (n - (NUM_STAGES - 1)) * BLOCK_N * p.v_strides.row, p.v_strides));
                    k_walker.load(k_tiles + free_stage * BLOCK_N * Gemm::PITCH_K, p.k_strides, more, p.head_dim, step, steps);
                    v_walker.load(v_tiles + free_stage * BLOCK_N * Gemm::PITCH_V, p.v_strides, more, p.head_dim_v, step, steps);
                });
                copy_async_commit();
                k_walker.step_back(p.k_strides);
                v_walker.step_back(p.v_strides);
                modify_and_mask(s, p, tile, modifier, n, n < whole.begin || n >= whole.end);
                softmax.step(s, o);
                gemm.values(o, s, v_tiles + stage * BLOCK_N * Gemm::PITCH_V, [](int, int) {});
                free_stage = stage;
                stage = stage + 1 == NUM_STAGES ? 0 : stage + 1;
            }
        }
    }

    const float* const sink = p.sink && tile.owned ? p.sink + tile.head : nullptr;
    bool not_finite = false;
    float* const lse_of_block = p.lse ? p.lse + tile.batch * p.lse_batch_stride + tile.head * p.lse_head_stride + tile.row_q + tile.m_start : nullptr;
#pragma unroll
    for (int m = 0; m < M_FRAGS; ++m)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float lse;
            const float factor = softmax.finish(m, r, sink, lse);
            const int row = warp * WARP_M + m * 16 + r * 8 + lane / 4;
            CUFLASH_ASSERT(row < BLOCK_M);
            if (HAS_MASK && lane % 4 == 0) row_lse[row] = lse;
            CUFLASH_ASSERT(!lse_of_block || row >= tile.rows || in_lse(p, lse_of_block + row));
            if (lse_of_block && lane % 4 == 0 && row < tile.rows) lse_of_block[row] = lse;
#pragma unroll
            for (int n = 0; n < Gemm::V_BLOCKS; ++n)
#pragma unroll
                for (int i = 2 * r; i < 2 * r + 2; ++i) {
                    o[m][n][i] = factor == 0.0f ? 0.0f : o[m][n][i] * factor;
                    not_finite |= !isfinite(o[m][n][i]);
                }
        }
    __syncwarp();  // every lane has read its last of q
    gemm.stage(o, warp_q);
    __syncwarp();
    if (HAS_MASK && __any_sync(0xffffffffu, not_finite)) {
        repair_rows<WARP_M, Gemm::PITCH_Q>(p, tile, warp_q, row_lse, warp * WARP_M);
        __syncwarp();
    }
    dtype_t* const out = row_pointer(static_cast<dtype_t*>(p.out), p.out_strides, tile.batch, tile.row_q + tile.m_start + warp * WARP_M, tile.head);
    CUFLASH_ASSERT(ends_in_array(out, tile.rows - warp * WARP_M, p.out, p.out_strides, p.batch, p.seqlen_q, p.nheads_q, p.head_dim_v));
    store_rows<WARP_M, HEAD_DIM_V, Gemm::PITCH_Q>(warp_q, out, p.out_strides, tile.rows - warp * WARP_M, p.head_dim_v, p.out_vectorized);
}
