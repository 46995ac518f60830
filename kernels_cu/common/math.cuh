// Scalar and warp arithmetic. Explicit instructions, so that no compiler flag changes a result.
#pragma once

constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }

__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// tanh to about 1e-7 absolute: tanh.approx is off by 5e-4, which a softcap of 50 turns into 2.5 % of a weight.
__device__ __forceinline__ float tanh_exact(float x) {
    const float e = exp2_approx(2.0f * LOG2_E * fabsf(x));  // inf for large |x|, and 2 / inf = 0
    return copysignf(1.0f - 2.0f * __frcp_rn(e + 1.0f), x);
}

// The four lanes of a quad share a row of the accumulator.
__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}
