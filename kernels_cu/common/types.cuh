// Element types and their conversions.
#pragma once

template <typename T, typename U>
constexpr bool SAME_TYPE = false;
template <typename T>
constexpr bool SAME_TYPE<T, T> = true;

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
__device__ __forceinline__ T from_float(float x) {
    if constexpr (SAME_TYPE<T, __half>) return __float2half_rn(x);
    else if constexpr (SAME_TYPE<T, __nv_bfloat16>) return __float2bfloat16_rn(x);
    else return x;
}

// Two neighbours in one register, low half first.
template <typename T>
__device__ __forceinline__ unsigned pack_pair(float low, float high) {
    if constexpr (SAME_TYPE<T, __half>) {
        const __half2 pair = __floats2half2_rn(low, high);
        return *reinterpret_cast<const unsigned*>(&pair);
    } else {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
        return *reinterpret_cast<const unsigned*>(&pair);
    }
}
