// One warp's two products for float32 inputs on tensor cores.
// x = lead + rest: lead is x rounded to tf32 (11 bits), rest what is left. x*y = lead*lead + lead*rest + rest*lead
// (the scheme of CUTLASS example 27 and Ootomo & Yokota 2022). All three in tf32 are right to about 2^-22: so for
// the scores, whose error the exponential multiplies by their size. For the output the two small terms, 2^-11 of
// it, run in bf16, which the unit multiplies at twice the rate: about 2^-20.
// k is summed over, so its slots may be numbered at will: a thread takes the four neighbours 4t..4t+3 of 16
// columns (q, k), and keys 2t, 2t+1 of 8 (weights, v), where the accumulator has them. Columns of out are
// numbered so too: slot g of block b in a pair of blocks is column 2g + b. Wide loads then feed several products,
// no shuffle is needed, and a thread ends up with 4 neighbouring outputs.
// Row pitches make those loads free of bank conflicts: 16 words mod 32 for q and k, 4 mod 16 for v.
#pragma once
#include "common/types.cuh"
#include "ptx/mma.cuh"

// 16 values of k for one row (of A: g or g + 8) or column (of B): a thread's four of them.
struct Split {
    float lead[4], rest[4];

    Split() = default;
    __device__ __forceinline__ Split(float x0, float x1, float x2, float x3) {
        const float x[4] = {x0, x1, x2, x3};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            // Round to nearest: truncating would make every remainder push the same way.
            lead[i] = __uint_as_float((__float_as_uint(x[i]) + 0x1000u) & 0xffffe000u);
            rest[i] = x[i] - lead[i];
        }
    }

    __device__ __forceinline__ unsigned lead_pair(int i) const { return __byte_perm(__float_as_uint(lead[2 * i]), __float_as_uint(lead[2 * i + 1]), 0x7632); }
    __device__ __forceinline__ unsigned rest_pair(int i) const { return pack_pair<__nv_bfloat16>(rest[2 * i], rest[2 * i + 1]); }
};

template <int M_FRAGS>
struct WarpGemm<float, M_FRAGS> {
    static constexpr int LARGER_DIM = HEAD_DIM > HEAD_DIM_V ? HEAD_DIM : HEAD_DIM_V;
    static constexpr int PITCH_Q = LARGER_DIM % 32 == 16 ? LARGER_DIM : LARGER_DIM + 16;  // holds outputs later
    static constexpr int PITCH_K = HEAD_DIM % 32 == 16 ? HEAD_DIM : HEAD_DIM + 16;
    static constexpr int PITCH_V = HEAD_DIM_V + 4;
    static constexpr int N_BLOCKS = BLOCK_N / 8;
    static constexpr int V_BLOCKS = HEAD_DIM_V / 8;
    static constexpr int CHUNK = HEAD_DIM % 32 == 0 ? 32 : 16;  // columns of one chain of products

    const float* q_rows;
    int lane;

    __device__ __forceinline__ WarpGemm(const float* q, int lane_) : q_rows(q + lane_ / 4 * PITCH_Q + lane_ % 4 * 4), lane(lane_) {}

    __device__ __forceinline__ void load_q() {}

    // part[m][n] += a[m] b[n] over 16 of k; a[m] are rows g and g + 8. Products of one accumulator are kept apart
    // by those of the others: the unit's latency is several times its issue interval.
    template <bool SMALL_TERMS_IN_BF16>
    static __device__ __forceinline__ void multiply(float (&part)[M_FRAGS][2][4], const Split (&a)[M_FRAGS][2], const Split (&b)[2]) {
        constexpr int TERMS = TF32_PRODUCTS == 1 || SMALL_TERMS_IN_BF16 ? 1 : 3;
#pragma unroll
        for (int term = 0; term < TERMS; ++term)
#pragma unroll
            for (int step = 0; step < 4; step += 2)
#pragma unroll
                for (int n = 0; n < 2; ++n)
#pragma unroll
                    for (int m = 0; m < M_FRAGS; ++m) {
                        const auto& low = TERMS == 3 && term == 0 ? a[m][0].rest : a[m][0].lead;
                        const auto& high = TERMS == 3 && term == 0 ? a[m][1].rest : a[m][1].lead;
                        const auto& right = term == 1 ? b[n].rest : b[n].lead;
                        const float left[4] = {low[step], high[step], low[step + 1], high[step + 1]};
                        mma_16x8x8_tf32(part[m][n], left, right[step], right[step + 1]);
                    }
        if constexpr (TF32_PRODUCTS == 3 && SMALL_TERMS_IN_BF16) {
#pragma unroll
            for (int term = 0; term < 2; ++term)
#pragma unroll
                for (int n = 0; n < 2; ++n)
#pragma unroll
                    for (int m = 0; m < M_FRAGS; ++m) {
                        unsigned left[4], right[2];
#pragma unroll
                        for (int i = 0; i < 4; ++i) left[i] = term ? a[m][i % 2].lead_pair(i / 2) : a[m][i % 2].rest_pair(i / 2);
#pragma unroll
                        for (int i = 0; i < 2; ++i) right[i] = term ? b[n].rest_pair(i) : b[n].lead_pair(i);
                        mma_16x8x16<__nv_bfloat16>(part[m][n], left, right[0], right[1]);
                    }
        }
    }

    // The unit adds products to its accumulator by truncation, an error that always points towards zero and
    // grows with the length of the chain. Chains are therefore kept short (`part`) and added up in ordinary
    // float32 arithmetic; over 4,096 keys this is the difference between 5e-5 and 1e-6 of the result.
    template <int BLOCKS>
    static __device__ __forceinline__ void add_part(float (&d)[M_FRAGS][BLOCKS][4], int first, const float (&part)[M_FRAGS][2][4]) {
#pragma unroll
        for (int m = 0; m < M_FRAGS; ++m)
#pragma unroll
            for (int n = 0; n < 2; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) d[m][first + n][i] += part[m][n][i];
    }

    static __device__ __forceinline__ Split split(const float* four) {
        CUFLASH_ASSERT(in_dynamic_shared(four, 16));
        const float4 x = *reinterpret_cast<const float4*>(four);
        return Split(x.x, x.y, x.z, x.w);
    }

    template <typename Between>
    __device__ __forceinline__ void scores(float (&s)[M_FRAGS][N_BLOCKS][4], const float* k, const Between& between) {
        const float* k_rows = k + lane / 4 * PITCH_K + lane % 4 * 4;
        between(0, 1);  // a long computation hides one burst of loads
#pragma unroll 1
        for (int chunk = 0; chunk < HEAD_DIM; chunk += CHUNK) {
            float part[N_BLOCKS / 2][M_FRAGS][2][4] = {};
#pragma unroll
            for (int column = chunk; column < chunk + CHUNK; column += 16) {
                Split a[M_FRAGS][2];
#pragma unroll
                for (int m = 0; m < M_FRAGS; ++m)
#pragma unroll
                    for (int r = 0; r < 2; ++r) a[m][r] = split(q_rows + (m * 16 + r * 8) * PITCH_Q + column);
#pragma unroll
                for (int n = 0; n < N_BLOCKS; n += 2) {
                    const Split b[2] = {split(k_rows + n * 8 * PITCH_K + column), split(k_rows + (n + 1) * 8 * PITCH_K + column)};
                    multiply<false>(part[n / 2], a, b);
                }
            }
#pragma unroll
            for (int n = 0; n < N_BLOCKS; n += 2) add_part(s, n, part[n / 2]);
        }
    }

    template <typename Between>
    __device__ __forceinline__ void values(float (&o)[M_FRAGS][V_BLOCKS][4], const float (&weights)[M_FRAGS][N_BLOCKS][4], const float* v, const Between& between) {
        const float* v_rows = v + lane % 4 * 2 * PITCH_V + lane / 4 * 2;
        between(0, 1);
#pragma unroll
        for (int n = 0; n < V_BLOCKS; n += 2) {
            float part[M_FRAGS][2][4] = {};
#pragma unroll
            for (int step = 0; step < N_BLOCKS; step += 2) {  // keys 2t, 2t+1 of two score blocks
                Split a[M_FRAGS][2];
#pragma unroll
                for (int m = 0; m < M_FRAGS; ++m)
#pragma unroll
                    for (int r = 0; r < 2; ++r)
                        a[m][r] = Split(weights[m][step][2 * r], weights[m][step][2 * r + 1], weights[m][step + 1][2 * r], weights[m][step + 1][2 * r + 1]);
                float2 x[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) x[i] = *reinterpret_cast<const float2*>(v_rows + (step * 8 + i / 2 * 8 + i % 2) * PITCH_V + n * 8);
                const Split b[2] = {Split(x[0].x, x[1].x, x[2].x, x[3].x), Split(x[0].y, x[1].y, x[2].y, x[3].y)};
                multiply<true>(part, a, b);
            }
            add_part(o, n, part);
        }
    }

    // Puts finished outputs where the warp's rows of q were. A pair of blocks holds columns 16c + 4t .. 4t+3.
    __device__ __forceinline__ void stage(const float (&o)[M_FRAGS][V_BLOCKS][4], float* rows) {
#pragma unroll
        for (int m = 0; m < M_FRAGS; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r)
#pragma unroll
                for (int n = 0; n < V_BLOCKS; n += 2)
                    *reinterpret_cast<float4*>(rows + (m * 16 + r * 8 + lane / 4) * PITCH_Q + n * 8 + lane % 4 * 4) =
                        make_float4(o[m][n][2 * r], o[m][n + 1][2 * r], o[m][n][2 * r + 1], o[m][n + 1][2 * r + 1]);
    }
};
