// The names of prelude.cuh.in with ordinary values, so that every .cu here reads, lints and compiles on its
// own in an editor. A rendered kernel never includes this file.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

using dtype_t = __nv_bfloat16;
using bias_t = float;
constexpr int ARCH = 90;
constexpr int HEAD_DIM = 128;
constexpr int HEAD_DIM_V = 128;
constexpr int BLOCK_M = 128;
constexpr int BLOCK_N = 64;
constexpr int NUM_WARPS = 4;
constexpr int BLOCKS_PER_SM = 1;
constexpr int NUM_STAGES = 2;
constexpr int VECTOR_BYTES = 16;
constexpr bool Q_IN_REGISTERS = false;
constexpr bool HAS_MASK = true;
constexpr bool HAS_SOFTCAP = false;
constexpr bool HAS_ALIBI = false;
constexpr bool HAS_BIAS = false;
constexpr int TF32_PRODUCTS = 3;
constexpr int PARAMS_BYTES = 336;
