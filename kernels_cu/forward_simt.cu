// Attention forward in plain float32 arithmetic: no tensor cores, no asynchronous copies, any GPU, any dtype, any
// strides. The kernel to read first; forward_mma.cu is the same algorithm on tensor cores.
//
// Algorithm: a thread block owns BLOCK_M query rows of one head and walks the visible keys BLOCK_N at a time.
//   For one tile of keys:      s = q k^T                          scores, modified and masked
//                              now = max(maximum, max of s)       the largest score of the row so far
//                              sum = sum * exp(maximum - now) + sum of exp(s - now)
//                              o   = o   * exp(maximum - now) + exp(s - now) v
//   and after the last one:    out = o / sum,  lse = now + log(sum).
//   So no row of scores ever exists as a whole, and no exponent is ever positive ("online softmax").
// Thread roles: a warp owns BLOCK_M / NUM_WARPS whole rows. Its lanes stand in a grid of 4 x 8: a thread owns every
//   fourth of those rows; of the scores in them every eighth key, of the outputs every eighth group of 4 columns.
//   The eight lanes of a row share its maximum through shuffles, and its weights through shared memory.
// Shared memory, all of it float32:
//     q [BLOCK_M][PITCH] | kv [BLOCK_N][PITCH] | weights [BLOCK_M][PITCH_W]
//     bytes = 4 * ((BLOCK_M + BLOCK_N) * PITCH + BLOCK_M * PITCH_W)
//     PITCH = max(HEAD_DIM, HEAD_DIM_V) rounded up to 32, + 4;  PITCH_W = BLOCK_N + 8
//   k and v take turns in kv, so that head dim 256 fits the 64 KiB of sm_75. Finished outputs leave through q.
//   The pitches let the 8 rows of k that a warp reads at once, 16 bytes each, lie in different banks; so too the
//   4 rows of q and of weights.
// Symbols: i = row, j = key, c = group of 4 columns, of this thread; n = tile of keys; s = scores, then weights;
//   o = output before the division. Scores are in natural units, exp(x) is computed as 2^(x * LOG2_E).
#ifndef CUFLASH_SPEC
#include "editor_defaults.cuh"
#endif
#include "common/layout.cuh"
#include "common/mask.cuh"
#include "common/math.cuh"
#include "common/score.cuh"
#include "common/types.cuh"

constexpr int LANE_ROWS = 4, LANE_COLUMNS = 8;  // the grid of a warp's lanes
constexpr int WARP_M = BLOCK_M / NUM_WARPS;
constexpr int COLUMNS_QK = (HEAD_DIM + 31) / 32 * 32;
constexpr int COLUMNS_V = (HEAD_DIM_V + 31) / 32 * 32;
constexpr int PITCH = (COLUMNS_QK > COLUMNS_V ? COLUMNS_QK : COLUMNS_V) + 4;
constexpr int PITCH_W = BLOCK_N + 8;
constexpr int ROWS = WARP_M / LANE_ROWS;  // of a thread, as are:
constexpr int KEYS = BLOCK_N / LANE_COLUMNS;
constexpr int GROUPS = COLUMNS_V / 4 / LANE_COLUMNS;
static_assert(ROWS * LANE_ROWS * NUM_WARPS == BLOCK_M, "block_m must be a multiple of 4 * num_warps");
static_assert(BLOCK_N % 16 == 0 && BLOCK_N % NUM_WARPS == 0, "block_n must be a multiple of 16 and of num_warps");
static_assert(HEAD_DIM % 16 == 0 && HEAD_DIM_V % 16 == 0);

// Stands for the weight of a key that a row must not see. A weight of 0 would not do: v may hold NaN there.
constexpr float HIDDEN = -1.0f;

// A strided array's rows to shared memory, zeros beyond what is valid. A warp takes a row at a time, a lane every
// 32nd column of it: neighbours in memory are read together, whatever the strides.
template <int TILE_ROWS, int TILE_COLUMNS>
__device__ __forceinline__ void load_tile(float* shared, const dtype_t* global, const Strides& strides, int valid_rows, int valid_columns) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll(TILE_COLUMNS < 256 ? 256 / TILE_COLUMNS : 1)  // eight loads in flight
    for (int i = 0; i < TILE_ROWS / NUM_WARPS; ++i)
#pragma unroll
        for (int c = 0; c < TILE_COLUMNS / 32; ++c) {
            const int row = i * NUM_WARPS + warp, column = c * 32 + lane;
            const bool valid = row < valid_rows && column < valid_columns;
            CUFLASH_ASSERT(row < TILE_ROWS && column < PITCH && in_dynamic_shared(shared + row * PITCH + column, sizeof(float)));
            shared[row * PITCH + column] = valid ? to_float(global[row * strides.row + column * strides.dim]) : 0.0f;
        }
}

// The way back, of a tile that shared memory holds.
__device__ __forceinline__ void store_tile(const float* shared, dtype_t* global, const Strides& strides, int rows, int columns) {
#pragma unroll 1
    for (int row = threadIdx.x / 32; row < rows; row += NUM_WARPS)
#pragma unroll 1
        for (int column = threadIdx.x % 32; column < columns; column += 32)
            global[row * strides.row + column * strides.dim] = from_float<dtype_t>(shared[row * PITCH + column]);
}

__device__ __forceinline__ void load_four(float (&x)[4], const float* shared) {
    CUFLASH_ASSERT(in_dynamic_shared(shared, 16));
    const float4 four = *reinterpret_cast<const float4*>(shared);
    x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
}

// s += q k^T. q and k point at this thread's first row and first key.
__device__ __forceinline__ void add_dot_products(float (&s)[ROWS][KEYS], const float* q, const float* k) {
#pragma unroll 4
    for (int d = 0; d < HEAD_DIM; d += 4) {
        float q_part[ROWS][4];
#pragma unroll
        for (int i = 0; i < ROWS; ++i) load_four(q_part[i], q + i * LANE_ROWS * PITCH + d);
#pragma unroll
        for (int j = 0; j < KEYS; ++j) {
            float k_part[4];
            load_four(k_part, k + j * LANE_COLUMNS * PITCH + d);
#pragma unroll
            for (int i = 0; i < ROWS; ++i)
#pragma unroll
                for (int x = 0; x < 4; ++x) s[i][j] = fmaf(q_part[i][x], k_part[x], s[i][j]);
        }
    }
}

// o += weights v. weights and v point at this thread's first row and first column.
__device__ __forceinline__ void add_values(float (&o)[ROWS][GROUPS][4], const float* weights, const float* v) {
#pragma unroll 1
    for (int first = 0; first < BLOCK_N; first += 4) {
        float weight[ROWS][4];
#pragma unroll
        for (int i = 0; i < ROWS; ++i) load_four(weight[i], weights + i * LANE_ROWS * PITCH_W + first);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            float v_part[GROUPS][4];
#pragma unroll
            for (int c = 0; c < GROUPS; ++c) load_four(v_part[c], v + (first + j) * PITCH + c * LANE_COLUMNS * 4);
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
                if (weight[i][j] == HIDDEN) continue;
#pragma unroll
                for (int c = 0; c < GROUPS; ++c)
#pragma unroll
                    for (int x = 0; x < 4; ++x) o[i][c][x] = fmaf(weight[i][j], v_part[c][x], o[i][c][x]);
            }
        }
    }
}

// The largest value, or the sum, of the eight lanes that share a row.
__device__ __forceinline__ float row_max(float x) {
    x = quad_max(x);
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 4));
}

__device__ __forceinline__ float row_sum(float x) {
    x = quad_sum(x);
    return x + __shfl_xor_sync(0xffffffffu, x, 4);
}

// exp(x - top) for x <= top, and 1 where both are -inf.
__device__ __forceinline__ float exp_below(float x, float top) {
    const float e = exp2_approx((x - top) * LOG2_E);
    return x == top ? 1.0f : e;
}

extern "C" __global__ void __launch_bounds__(NUM_WARPS * 32, BLOCKS_PER_SM) forward_simt(const __grid_constant__ ForwardParams p) {
    extern __shared__ __align__(16) float shared[];
    float* const q_tile = shared;
    float* const kv_tile = q_tile + BLOCK_M * PITCH;
    float* const weight_tile = kv_tile + BLOCK_N * PITCH;

    __shared__ Tile tile;
    if (threadIdx.x == 0) tile = find_tile(p, blockIdx.x);
    __syncthreads();
    if (tile.rows <= 0) return;
    CUFLASH_ASSERT(in_dynamic_shared(weight_tile + BLOCK_M * PITCH_W - 1, sizeof(float)));

    const int kv_head = tile.head / p.heads_per_group;
    const dtype_t* const q = row_pointer(static_cast<const dtype_t*>(p.q), p.q_strides, tile.batch, tile.row_q + tile.m_start, tile.head);
    const dtype_t* const k = row_pointer(static_cast<const dtype_t*>(p.k), p.k_strides, tile.batch, tile.row_k, kv_head);
    const dtype_t* const v = row_pointer(static_cast<const dtype_t*>(p.v), p.v_strides, tile.batch, tile.row_k, kv_head);

    CUFLASH_ASSERT(ends_in_array(q, tile.rows, p.q, p.q_strides, p.batch, p.seqlen_q, p.nheads_q, p.head_dim));
    CUFLASH_ASSERT(ends_in_array(k, tile.seqlen_k, p.k, p.k_strides, p.batch, p.seqlen_k, p.nheads_q / p.heads_per_group, p.head_dim));
    CUFLASH_ASSERT(ends_in_array(v, tile.seqlen_k, p.v, p.v_strides, p.batch, p.seqlen_k, p.nheads_q / p.heads_per_group, p.head_dim_v));

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int first_row = warp * WARP_M + lane / LANE_COLUMNS;  // this thread's rows: first_row + i * LANE_ROWS
    const int column = lane % LANE_COLUMNS;                     // its keys of a tile: column + j * LANE_COLUMNS
    float maximum[ROWS], sum[ROWS] = {};                        // sum: over this thread's keys only, until the end
    float o[ROWS][GROUPS][4] = {};
#pragma unroll
    for (int i = 0; i < ROWS; ++i) maximum[i] = minus_infinity();

    load_tile<BLOCK_M, COLUMNS_QK>(q_tile, q, p.q_strides, tile.rows, p.head_dim);
    const Mask mask(p, tile);
    const ScoreModifier modifier(p, tile);
    const Range blocks = mask.visible_blocks(tile);
#pragma unroll 1
    for (int n = blocks.begin; n < blocks.end; ++n) {
        const int first_key = n * BLOCK_N, valid_keys = mask.seqlen_k - first_key;
        CUFLASH_ASSERT(first_key >= 0 && valid_keys > 0);
        load_tile<BLOCK_N, COLUMNS_QK>(kv_tile, k + first_key * p.k_strides.row, p.k_strides, valid_keys, p.head_dim);
        __syncthreads();  // q and k are here
        float s[ROWS][KEYS] = {};
        add_dot_products(s, q_tile + first_row * PITCH, kv_tile + column * PITCH);
        __syncthreads();  // every warp is done with k
        load_tile<BLOCK_N, COLUMNS_V>(kv_tile, v + first_key * p.v_strides.row, p.v_strides, valid_keys, p.head_dim_v);

#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const int row = first_row + i * LANE_ROWS, query = tile.m_start + row;
            const int begin = mask.first_key(query), end = mask.end_key(query);
            float now = maximum[i];
#pragma unroll
            for (int j = 0; j < KEYS; ++j) {
                const int key = first_key + column + j * LANE_COLUMNS;
                s[i][j] = key >= begin && key < end ? modifier(s[i][j], query, key) : minus_infinity();
                now = fmaxf(now, s[i][j]);
            }
            now = row_max(now);
            const float shrink = exp_below(maximum[i], now);
            maximum[i] = now;
            sum[i] *= shrink;
#pragma unroll
            for (int c = 0; c < GROUPS; ++c)
#pragma unroll
                for (int x = 0; x < 4; ++x) o[i][c][x] *= shrink;
#pragma unroll
            for (int j = 0; j < KEYS; ++j) {
                const bool hidden = s[i][j] == minus_infinity();  // by the mask, or by a bias of -inf
                const float weight = exp_below(s[i][j], now);
                CUFLASH_ASSERT(row < BLOCK_M && column + j * LANE_COLUMNS < BLOCK_N);
                weight_tile[row * PITCH_W + column + j * LANE_COLUMNS] = hidden ? HIDDEN : weight;
                sum[i] += hidden ? 0.0f : weight;
            }
        }
        __syncthreads();  // v and the weights are here
        add_values(o, weight_tile + first_row * PITCH_W, kv_tile + column * 4);
        __syncthreads();  // every warp is done with v
    }

    const float sink = p.sink && tile.owned ? p.sink[tile.head] : minus_infinity();
    float* const lse = p.lse ? p.lse + tile.batch * p.lse_batch_stride + tile.head * p.lse_head_stride + tile.row_q + tile.m_start : nullptr;
    __syncthreads();  // no tile of keys: q has to arrive before it is overwritten
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        const int row = first_row + i * LANE_ROWS;
        const float top = fmaxf(maximum[i], sink);  // -inf: an empty row, all zeros
        const float share = exp_below(maximum[i], top);
        float total = row_sum(sum[i]) * share;
        if (sink != minus_infinity()) total += exp_below(sink, top);
        CUFLASH_ASSERT(!lse || row >= tile.rows || in_lse(p, lse + row));
        if (lse && column == 0 && row < tile.rows) lse[row] = total == 0.0f ? minus_infinity() : top + __log2f(total) * LN_2;
        const float factor = total == 0.0f ? 0.0f : share / total;
#pragma unroll
        for (int c = 0; c < GROUPS; ++c)
            *reinterpret_cast<float4*>(q_tile + row * PITCH + (c * LANE_COLUMNS + column) * 4) =
                make_float4(o[i][c][0] * factor, o[i][c][1] * factor, o[i][c][2] * factor, o[i][c][3] * factor);
    }
    __syncthreads();
    dtype_t* const out = row_pointer(static_cast<dtype_t*>(p.out), p.out_strides, tile.batch, tile.row_q + tile.m_start, tile.head);
    CUFLASH_ASSERT(ends_in_array(out, tile.rows, p.out, p.out_strides, p.batch, p.seqlen_q, p.nheads_q, p.head_dim_v));
    store_tile(q_tile, out, p.out_strides, tile.rows, p.head_dim_v);
}
