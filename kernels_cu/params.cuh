// The by-value argument of the forward kernels. cuflash/gpu/forward.py packs the same bytes.
#pragma once

struct Strides {  // of a (batch, seqlen, nheads, head_dim) array, in elements; batch is 0 for packed input
    long long batch, row, head, dim;
};

struct ForwardParams {
    const void* q;
    const void* k;
    const void* v;
    void* out;
    float* lse;               // (batch, nheads_q, seqlen_q) or packed (nheads_q, total_q); null = not asked for
    const int* cu_seqlens_q;  // batch + 1 row offsets; null = not packed
    const int* cu_seqlens_k;
    const int* seqlens_k;     // valid keys of each sequence; null = all
    const float* alibi_slopes;
    const void* bias;
    const float* sink;
    Strides q_strides, k_strides, v_strides, out_strides;
    Strides bias_strides;     // row and dim are the query and the key axis
    long long lse_batch_stride, lse_head_stride;
    long long alibi_batch_stride, alibi_head_stride;
    int batch;
    int seqlen_q, seqlen_k;   // packed: all rows together
    int nheads_q, heads_per_group;  // heads_per_group = nheads_q / nheads_k
    int head_dim, head_dim_v;       // the true ones
    int window_left, window_right;  // no bound = 2^30 - 1, which no sum of positions overflows
    int num_m_blocks;         // blocks of BLOCK_M rows: of one sequence, or packed of one head
    int heads_per_section;    // heads whose blocks run side by side, so that their K and V share the L2 cache
    int out_vectorized;       // every row of out starts on a 16-byte boundary
    float softmax_scale;
    float softcap;
};

static_assert(sizeof(ForwardParams) == PARAMS_BYTES, "cuflash/gpu/forward.py packs another layout");
