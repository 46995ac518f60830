// One warp's two products for 16-bit inputs: scores += q k^T and out += weights v.
// Shared-memory rows are HEAD_DIM + 8 elements long: an odd number of 16-byte chunks, so the eight rows of an
// ldmatrix fall into eight different bank groups whatever the head dim, and addresses stay base + constant.
#pragma once
#include "common/types.cuh"
#include "ptx/mma.cuh"

template <typename T, int M_FRAGS>
struct WarpGemm {
    static constexpr int PITCH_K = HEAD_DIM + 8;
    static constexpr int PITCH_V = HEAD_DIM_V + 8;
    static constexpr int PITCH_Q = PITCH_K > PITCH_V ? PITCH_K : PITCH_V;  // q's rows later stage the output
    static constexpr int K_STEPS = HEAD_DIM / 16;
    static constexpr int N_BLOCKS = BLOCK_N / 8;
    static constexpr int V_BLOCKS = HEAD_DIM_V / 8;

    unsigned q_registers[Q_IN_REGISTERS ? K_STEPS : 1][M_FRAGS][4];
    const T* q_rows;  // this lane's row of the warp's q tile
    int lane;

    // q: the warp's 16 * M_FRAGS rows in shared memory.
    __device__ __forceinline__ WarpGemm(const T* q, int lane_) : q_rows(q + (lane_ % 16) * PITCH_Q + (lane_ / 16) * 8), lane(lane_) {}

    __device__ __forceinline__ void load_q() {
        if constexpr (Q_IN_REGISTERS) {
#pragma unroll
            for (int step = 0; step < K_STEPS; ++step)
#pragma unroll
                for (int m = 0; m < M_FRAGS; ++m) load_matrix_x4(q_registers[step][m], q_rows + m * 16 * PITCH_Q + step * 16);
        }
    }

    // Both products call between(step, steps) after each of their steps: the place for the next tile's loads.
    template <typename Between>
    __device__ __forceinline__ void scores(float (&s)[M_FRAGS][N_BLOCKS][4], const T* k, const Between& between) {
        const T* k_rows = k + (lane % 8 + lane / 16 * 8) * PITCH_K + lane / 8 % 2 * 8;
#pragma unroll
        for (int step = 0; step < K_STEPS; ++step) {
            unsigned q[M_FRAGS][4];
#pragma unroll
            for (int m = 0; m < M_FRAGS; ++m) {
                if constexpr (Q_IN_REGISTERS) {
#pragma unroll
                    for (int i = 0; i < 4; ++i) q[m][i] = q_registers[step][m][i];
                } else {
                    load_matrix_x4(q[m], q_rows + m * 16 * PITCH_Q + step * 16);
                }
            }
#pragma unroll
            for (int n = 0; n < N_BLOCKS; n += 2) {
                unsigned b[4];
                load_matrix_x4(b, k_rows + n * 8 * PITCH_K + step * 16);
#pragma unroll
                for (int m = 0; m < M_FRAGS; ++m) {
                    mma_16x8x16<T>(s[m][n], q[m], b[0], b[1]);
                    mma_16x8x16<T>(s[m][n + 1], q[m], b[2], b[3]);
                }
            }
            between(step, K_STEPS);
        }
    }

    // The accumulators of two score blocks are, packed in pairs, the A operand of one product with v.
    template <typename Between>
    __device__ __forceinline__ void values(float (&o)[M_FRAGS][V_BLOCKS][4], const float (&weights)[M_FRAGS][N_BLOCKS][4], const T* v, const Between& between) {
        const T* v_rows = v + (lane % 16) * PITCH_V + lane / 16 * 8;
#pragma unroll
        for (int step = 0; step < BLOCK_N / 16; ++step) {
            unsigned a[M_FRAGS][4];
#pragma unroll
            for (int m = 0; m < M_FRAGS; ++m)
#pragma unroll
                for (int i = 0; i < 4; ++i) a[m][i] = pack_pair<T>(weights[m][2 * step + i / 2][i % 2 * 2], weights[m][2 * step + i / 2][i % 2 * 2 + 1]);
#pragma unroll
            for (int n = 0; n < V_BLOCKS; n += 2) {
                unsigned b[4];
                load_matrix_x4_transposed(b, v_rows + step * 16 * PITCH_V + n * 8);
#pragma unroll
                for (int m = 0; m < M_FRAGS; ++m) {
                    mma_16x8x16<T>(o[m][n], a[m], b[0], b[1]);
                    mma_16x8x16<T>(o[m][n + 1], a[m], b[2], b[3]);
                }
            }
            between(step, BLOCK_N / 16);
        }
    }

    // Puts finished outputs where the warp's rows of q were.
    __device__ __forceinline__ void stage(const float (&o)[M_FRAGS][V_BLOCKS][4], T* rows) {
#pragma unroll
        for (int m = 0; m < M_FRAGS; ++m)
#pragma unroll
            for (int n = 0; n < V_BLOCKS; ++n)
#pragma unroll
                for (int r = 0; r < 2; ++r)
                    *reinterpret_cast<unsigned*>(rows + (m * 16 + r * 8 + lane / 4) * PITCH_Q + n * 8 + lane % 4 * 2) = pack_pair<T>(o[m][n][2 * r], o[m][n][2 * r + 1]);
    }
};
