// Which part of the problem a thread block works on.
#pragma once
#include "common/debug.cuh"
#include "params.cuh"

struct Tile {
    int batch, head;           // head of q
    int m_start, rows;         // query rows of the block, counted from the start of its sequence; rows <= 0: none
    int seqlen_q, seqlen_k;    // of this sequence
    long long row_q, row_k;    // where the sequence starts in packed arrays, else 0
    bool owned;                // by a sequence; false for packed rows after the last one
};

// What every address that the block makes follows from.
__device__ __forceinline__ bool in_problem(const ForwardParams& p, const Tile& tile) {
    const bool head = tile.head >= 0 && tile.head < p.nheads_q && tile.batch >= 0 && tile.batch < p.batch + !tile.owned;
    const bool queries = tile.rows <= BLOCK_M && tile.m_start % BLOCK_M == 0 && tile.m_start >= 0 && tile.m_start + tile.rows <= tile.seqlen_q;
    return head && (tile.rows <= 0 || queries) && tile.row_q >= 0 && tile.row_q + tile.seqlen_q <= p.seqlen_q &&
           tile.row_k >= 0 && tile.seqlen_k >= 0 && tile.row_k + tile.seqlen_k <= p.seqlen_k;
}

// Whether the last of some rows, which begin here, is one of the array's.
template <typename T>
__device__ __forceinline__ bool ends_in_array(const T* first_row, int rows, const void* base, const Strides& s, int batch, int array_rows, int heads, int columns) {
    return rows <= 0 || in_array(first_row + (rows - 1) * s.row + (columns - 1) * s.dim, base, s, batch, array_rows, heads, columns);
}

__device__ __forceinline__ bool in_lse(const ForwardParams& p, const float* at) {
    return at >= p.lse && at < p.lse + static_cast<long long>(p.cu_seqlens_q ? 1 : p.batch) * p.nheads_q * p.seqlen_q;
}

// Packed: block number b + floor(cu_seqlens_q[b] / BLOCK_M) is the first of sequence b. Those numbers are
// strictly increasing and leave each sequence at least ceil(seqlen / BLOCK_M) blocks, so the grid needs the
// total row count only: no maximum length, no scheduling kernel, no copy back to the host.
__device__ __forceinline__ int clamped_offset(const int* cu_seqlens, int i, int total) {
    return min(max(cu_seqlens[i], 0), total);
}

__device__ __forceinline__ Tile packed_tile(const ForwardParams& p, int block) {
    Tile tile;
    const int local = block / p.nheads_q;
    tile.head = block - local * p.nheads_q;
    // Sequence number p.batch stands for rows after the last sequence; they are written as empty rows.
    int low = 0, high = p.batch;
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (clamped_offset(p.cu_seqlens_q, middle, p.seqlen_q) / BLOCK_M + middle <= local) low = middle;
        else high = middle - 1;
    }
    tile.batch = low;
    tile.owned = low < p.batch;
    const int begin = clamped_offset(p.cu_seqlens_q, low, p.seqlen_q);
    const int end = tile.owned ? clamped_offset(p.cu_seqlens_q, low + 1, p.seqlen_q) : p.seqlen_q;
    tile.row_q = begin;
    tile.seqlen_q = end - begin;
    const int blocks = (tile.seqlen_q + BLOCK_M - 1) / BLOCK_M;
    const int m_block = blocks - 1 - (local - (begin / BLOCK_M + low));  // longest causal rows first
    tile.m_start = m_block * BLOCK_M;
    tile.rows = m_block < 0 ? 0 : min(BLOCK_M, tile.seqlen_q - tile.m_start);
    tile.row_k = 0;
    tile.seqlen_k = 0;
    if (tile.owned) {
        const int begin_k = clamped_offset(p.cu_seqlens_k, low, p.seqlen_k);
        tile.row_k = begin_k;
        tile.seqlen_k = max(clamped_offset(p.cu_seqlens_k, low + 1, p.seqlen_k) - begin_k, 0);
        if (p.seqlens_k) tile.seqlen_k = min(tile.seqlen_k, max(p.seqlens_k[low], 0));
    }
    CUFLASH_ASSERT(in_problem(p, tile));
    return tile;
}

__device__ __forceinline__ Tile dense_tile(const ForwardParams& p, int block) {
    Tile tile;
    const int section_blocks = p.heads_per_section * p.num_m_blocks;
    const int section = block / section_blocks, first = section * p.heads_per_section;
    const int heads = min(p.heads_per_section, p.batch * p.nheads_q - first);
    const int within = block - section * section_blocks;
    const int m_from_end = within / heads;
    const int batch_head = first + within - m_from_end * heads;
    tile.batch = batch_head / p.nheads_q;
    tile.head = batch_head - tile.batch * p.nheads_q;
    tile.m_start = (p.num_m_blocks - 1 - m_from_end) * BLOCK_M;  // longest causal rows first
    tile.seqlen_q = p.seqlen_q;
    tile.seqlen_k = p.seqlens_k ? min(max(p.seqlens_k[tile.batch], 0), p.seqlen_k) : p.seqlen_k;
    tile.row_q = tile.row_k = 0;
    tile.rows = min(BLOCK_M, tile.seqlen_q - tile.m_start);
    tile.owned = true;
    CUFLASH_ASSERT(in_problem(p, tile));
    return tile;
}

__device__ __forceinline__ Tile find_tile(const ForwardParams& p, int block) {
    return p.cu_seqlens_q ? packed_tile(p, block) : dense_tile(p, block);
}

template <typename T>
__device__ __forceinline__ T* row_pointer(T* base, const Strides& s, int batch, long long row, int head) {
    return base + batch * s.batch + row * s.row + head * s.head;
}
