// Which keys a query sees. Causal is a window with right = 0; everything is aligned to the bottom-right
// corner of the sequence's true lengths: query i stands at position i + seqlen_k - seqlen_q among the keys.
#pragma once
#include "common/layout.cuh"

struct Range {
    int begin, end;
};

struct Mask {
    int seqlen_k, diagonal, left, right;  // diagonal = seqlen_k - seqlen_q; left, right inclusive

    __device__ __forceinline__ Mask(const ForwardParams& p, const Tile& tile)
        : seqlen_k(tile.seqlen_k), diagonal(tile.seqlen_k - tile.seqlen_q), left(p.window_left), right(p.window_right) {}

    __device__ __forceinline__ int first_key(int query) const { return max(0, query + diagonal - left); }
    __device__ __forceinline__ int end_key(int query) const { return min(seqlen_k, query + diagonal + right + 1); }

    // Key blocks of which some row of the tile sees something.
    __device__ __forceinline__ Range visible_blocks(const Tile& tile) const {
        return {first_key(tile.m_start) / BLOCK_N, (max(end_key(tile.m_start + tile.rows - 1), 0) + BLOCK_N - 1) / BLOCK_N};
    }

    // Key blocks that every row of the tile sees whole: in all others elements must be tested.
    __device__ __forceinline__ Range whole_blocks(const Tile& tile) const {
        return {(first_key(tile.m_start + tile.rows - 1) + BLOCK_N - 1) / BLOCK_N, max(end_key(tile.m_start), 0) / BLOCK_N};
    }

    // The same question of one block, without a range to keep.
    __device__ __forceinline__ bool cuts(const Tile& tile, int block) const {
        return (block + 1) * BLOCK_N > end_key(tile.m_start) || block * BLOCK_N < first_key(tile.m_start + tile.rows - 1);
    }
};
