// What is added to a score before the mask (DESIGN: s = scale*q.k; softcap; + bias; - slope*|i + off - j|).
#pragma once
#include "common/debug.cuh"
#include "common/math.cuh"
#include "common/types.cuh"
#include "params.cuh"

constexpr bool HAS_SCORE_MODIFIER = HAS_SOFTCAP || HAS_ALIBI || HAS_BIAS;

struct ScoreModifier {
    float scale, softcap, slope;
    const bias_t* bias;
    long long bias_row, bias_key;
    int seqlen_q, seqlen_k, diagonal;

    __device__ __forceinline__ ScoreModifier(const ForwardParams& p, const Tile& tile)
        : scale(p.softmax_scale), softcap(p.softcap), slope(0.0f), bias(nullptr), bias_row(p.bias_strides.row),
          bias_key(p.bias_strides.dim), seqlen_q(tile.seqlen_q), seqlen_k(tile.seqlen_k), diagonal(tile.seqlen_k - tile.seqlen_q) {
        if constexpr (HAS_ALIBI) slope = tile.owned ? p.alibi_slopes[tile.batch * p.alibi_batch_stride + tile.head * p.alibi_head_stride] : 0.0f;
        if constexpr (HAS_BIAS) bias = row_pointer(static_cast<const bias_t*>(p.bias), p.bias_strides, tile.owned ? tile.batch : 0, 0, tile.head);
    }

    // dot = q.k of this query and key; the result is in natural units.
    __device__ __forceinline__ float operator()(float dot, int query, int key) const {
        float s = dot * scale;
        if constexpr (HAS_SOFTCAP) s = softcap * tanh_exact(s / softcap);
        if constexpr (HAS_BIAS) {
            if (query < seqlen_q && key < seqlen_k) {
                CUFLASH_ASSERT(query >= 0 && key >= 0);
                const float b = to_float(bias[query * bias_row + key * bias_key]);
                // Selected, not added: the key may hold NaN. And finfo.min must stay finite when it becomes
                // a base-2 exponent, or a row with nothing else would lose its (uniform) weights.
                s = b == minus_infinity() ? b : fmaxf(s + b, -1.7e38f);
            }
        }
        if constexpr (HAS_ALIBI) s -= slope * fabsf(static_cast<float>(query + diagonal - key));
        return s;
    }
};
