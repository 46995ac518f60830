// Online softmax of the rows a warp holds in accumulator fragments.
#pragma once
#include "common/math.cuh"

// Rows are rescaled only when their maximum grew by more than this (base-2 exponent): until then weights may
// reach 2^8, which fp16 and float32 hold with the same relative precision, and the work is saved.
constexpr float RESCALE_SLACK = 8.0f;
// Above this, rounding maximum * multiplier and score * multiplier apart could matter.
constexpr float LARGE_EXPONENT = 4096.0f;

template <int M_FRAGS, int N_BLOCKS>
struct OnlineSoftmax {
    float maximum[M_FRAGS][2];  // of the row so far, as a base-2 exponent; -inf = no visible key yet
    float sum[M_FRAGS][2];      // this thread's share of the row's sum of weights
    float multiplier;           // from score to base-2 exponent, > 0

    __device__ __forceinline__ explicit OnlineSoftmax(float score_to_exponent) : multiplier(score_to_exponent) {
#pragma unroll
        for (int m = 0; m < M_FRAGS; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                maximum[m][r] = minus_infinity();
                sum[m][r] = 0.0f;
            }
    }

    // Turns the scores s into weights and brings the output o, so far relative to the old maximum, up to date.
    template <int V_BLOCKS>
    __device__ __forceinline__ void step(float (&s)[M_FRAGS][N_BLOCKS][4], float (&o)[M_FRAGS][V_BLOCKS][4]) {
        float tile_maximum[M_FRAGS][2];
        bool grew = false;
#pragma unroll
        for (int m = 0; m < M_FRAGS; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float x = fmaxf(s[m][0][2 * r], s[m][0][2 * r + 1]);
#pragma unroll
                for (int n = 1; n < N_BLOCKS; ++n) x = fmaxf(x, fmaxf(s[m][n][2 * r], s[m][n][2 * r + 1]));
                tile_maximum[m][r] = __fmul_rn(quad_max(x), multiplier);
                grew |= tile_maximum[m][r] - maximum[m][r] > RESCALE_SLACK;
            }
        if (__any_sync(0xffffffffu, grew)) rescale(tile_maximum, o);

        float scale = multiplier;
        float largest = 0.0f;
#pragma unroll
        for (int m = 0; m < M_FRAGS; ++m) largest = fmaxf(largest, fmaxf(fabsf(maximum[m][0]), fabsf(maximum[m][1])));
        if (__any_sync(0xffffffffu, largest > LARGE_EXPONENT)) {  // round the product first, as the maximum was: then the largest score gives exactly 1
#pragma unroll
            for (int m = 0; m < M_FRAGS; ++m)
#pragma unroll
                for (int n = 0; n < N_BLOCKS; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i) s[m][n][i] = __fmul_rn(s[m][n][i], multiplier);
            scale = 1.0f;
        }
#pragma unroll
        for (int m = 0; m < M_FRAGS; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float shift = maximum[m][r] == minus_infinity() ? 0.0f : -maximum[m][r];
#pragma unroll
                for (int n = 0; n < N_BLOCKS; ++n)
#pragma unroll
                    for (int i = 2 * r; i < 2 * r + 2; ++i) {
                        s[m][n][i] = exp2_approx(fmaf(s[m][n][i], scale, shift));
                        sum[m][r] += s[m][n][i];
                    }
            }
    }

    template <int V_BLOCKS>
    __device__ __forceinline__ void rescale(const float (&tile_maximum)[M_FRAGS][2], float (&o)[M_FRAGS][V_BLOCKS][4]) {
#pragma unroll
        for (int m = 0; m < M_FRAGS; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float old = maximum[m][r], now = fmaxf(old, tile_maximum[m][r]);
                const float shrink = old == minus_infinity() ? 0.0f : exp2_approx(old - now);
                maximum[m][r] = now;
                sum[m][r] *= shrink;
#pragma unroll
                for (int v = 0; v < V_BLOCKS; ++v) {
                    o[m][v][2 * r] *= shrink;
                    o[m][v][2 * r + 1] *= shrink;
                }
            }
    }

    // Closes a row: what o must be multiplied with, and the row's lse (natural log). An empty row gives 0 and
    // -inf, with a sink the sink itself. `sink` is null or points at this head's extra logit.
    __device__ __forceinline__ float finish(int m, int r, const float* sink, float& lse) const {
        float top = maximum[m][r], total = quad_sum(sum[m][r]), share = 1.0f;
        if (sink && *sink != minus_infinity()) {
            const float sink_exponent = *sink * LOG2_E, old = top;
            top = fmaxf(old, sink_exponent);
            share = old == minus_infinity() ? 0.0f : exp2_approx(old - top);
            total = total * share + exp2_approx(sink_exponent - top);
        }
        const bool empty = total == 0.0f;
        lse = empty ? minus_infinity() : (top + __log2f(total)) * LN_2;
        return empty ? 0.0f : share / total;
    }
};
