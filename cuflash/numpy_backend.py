"""Attention on the CPU: tiled online softmax in NumPy, with every meaning of the GPU kernels.

For each tile of queries the tiles of keys that some query of it sees are visited once, from first
to last. A row carries the largest score so far, the sum of exponentials relative to it, and the
weighted sum of values; when the largest score grows, the two sums shrink by the same factor. So no
more than one tile of scores exists at a time. Sums are float32 (float64 for float64 input).

Scores of hidden keys are set to -inf, never shifted to it, so whatever hidden keys and values hold,
NaN included, stays out of the sums.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from cuflash import lengths
from cuflash.errors import OutOfMemoryError
from cuflash.plan import Plan, record
from cuflash.problem import AttentionProblem

Array = np.ndarray[Any, Any]

BLOCK_M = 128
BLOCK_N = 512
# Scores of one tile, over the heads computed together: 1 MiB of float32, which stays in the cache.
TILE_SCORES = 1 << 18


class _Extras(NamedTuple):
    """What is added to the scores of the heads at hand: of one sequence, in the sums' dtype."""

    slopes: Array | None  # (heads)
    bias: Array | None  # (heads, seqlen_q, seqlen_k), a view of the caller's
    sink: Array | None  # (heads)


def empty(shape: tuple[int, ...], dtype: Any) -> Array:
    """New array, or the error of this package that says how much memory it needed."""
    try:
        return np.empty(shape, dtype)
    except MemoryError as error:
        needed = math.prod(shape) * np.dtype(dtype).itemsize
        raise OutOfMemoryError(
            f"the result of shape {shape} needs {needed} bytes: split the call over batch or heads"
        ) from error


def forward(
    problem: AttentionProblem,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    *,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    seqlens_k: Any = None,
    alibi_slopes: Any = None,
    bias: Any = None,
    sink: Any = None,
) -> Array:
    """Write the attention of a checked problem into ``out`` and return its lse.

    Arrays are (batch, seqlen, nheads, head_dim) views, or packed (total, nheads, head_dim).
    """
    record(
        Plan(
            kernel="numpy",
            arch=None,
            tile=f"block_m={BLOCK_M} block_n={BLOCK_N}",
            reason="q is on the CPU",
            origin="none",
        )
    )
    heads, rows = problem.nheads_q, problem.seqlen_q
    lse = empty((heads, rows) if problem.packed else (problem.batch, heads, rows), np.float32)
    if problem.packed:
        used = int(cu_seqlens_q[-1])
        out[used:] = 0
        lse[:, used:] = -np.inf
    dtype = np.float64 if problem.dtype == "fp64" else np.float32
    if bias is not None:
        bias = np.broadcast_to(bias, (problem.batch, heads, rows, problem.seqlen_k))
    # Overflow and NaN are results here, not accidents: those of hidden keys are thrown away.
    with np.errstate(all="ignore"):
        for b, of_q, of_k in lengths.sequences(problem, cu_seqlens_q, cu_seqlens_k, seqlens_k):
            slopes = alibi_slopes
            if slopes is not None:
                slopes = np.asarray(slopes[b] if slopes.ndim == 2 else slopes, dtype)
            extras = _Extras(
                slopes,
                None if bias is None else bias[b],
                None if sink is None else np.asarray(sink, dtype),
            )
            lse_rows = lse[:, of_q] if problem.packed else lse[of_q]
            _sequence(problem, q[of_q], k[of_k], v[of_k], out[of_q], lse_rows, extras, dtype)
    return lse


def _sequence(
    problem: AttentionProblem,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    extras: _Extras,
    dtype: Any,
) -> None:
    """One sequence: arrays (rows, nheads, head_dim), lse (nheads_q, rows)."""
    rows, group = q.shape[0], problem.nheads_q // problem.nheads_k
    block_m = max(1, min(rows, BLOCK_M, TILE_SCORES // (group * BLOCK_N)))
    block_g = max(1, TILE_SCORES // (group * block_m * BLOCK_N))
    for g in range(0, problem.nheads_k, block_g):
        of_kv = slice(g, min(g + block_g, problem.nheads_k))
        of_heads = slice(of_kv.start * group, of_kv.stop * group)
        part = _Extras(*(None if x is None else x[of_heads] for x in extras))
        for i in range(0, rows, block_m):
            of_rows = slice(i, min(i + block_m, rows))
            result, lse[of_heads, of_rows] = _tile(
                problem, q[of_rows, of_heads], k[:, of_kv], v[:, of_kv], of_rows, rows, part, dtype
            )
            out[of_rows, of_heads] = result.transpose(1, 0, 2)


def _tile(
    problem: AttentionProblem,
    q: Array,
    k: Array,
    v: Array,
    of_rows: slice,
    seqlen_q: int,
    extras: _Extras,
    dtype: Any,
) -> tuple[Array, Array]:
    """All keys for one tile of queries: out (heads, rows, head_dim_v) and lse (heads, rows)."""
    rows, heads = q.shape[:2]
    seqlen_k, kv_heads = k.shape[:2]
    left, right = problem.window_left, problem.window_right
    # Where the diagonal of each row lies: the key that causal shows it last.
    positions = np.arange(of_rows.start, of_rows.stop) + (seqlen_k - seqlen_q)
    first = 0 if left < 0 else max(0, int(positions[0]) - left)
    end = seqlen_k if right < 0 else min(seqlen_k, int(positions[-1]) + right + 1)

    # The query heads that read one key head lie behind each other: one product serves them all.
    queries = _upcast(q, dtype).reshape(kv_heads, -1, problem.head_dim)
    largest = np.full((heads, rows), -np.inf, dtype)
    if extras.sink is not None:
        largest[:] = extras.sink[:, None]
    total = np.where(np.isneginf(largest), dtype(0), dtype(1))
    acc = np.zeros((heads, rows, problem.head_dim_v), dtype)

    for j in range(first, end, BLOCK_N):
        of_keys = slice(j, min(j + BLOCK_N, end))
        scores = queries @ _upcast(k[of_keys], dtype).transpose(0, 2, 1)
        scores = scores.reshape(heads, rows, -1)
        _finish_scores(problem, scores, positions, of_rows, of_keys, extras, dtype)

        grown = np.maximum(largest, scores.max(axis=-1))
        # A row that has seen nothing yet subtracts 0, since -inf - -inf is NaN.
        shift = np.where(np.isneginf(grown), dtype(0), grown)
        shrink = np.exp(largest - shift)
        values = _upcast(v[of_keys], dtype)
        wild = np.flatnonzero(~np.isfinite(values).all(axis=(0, 2)))
        # NaN scores count as seen: a NaN that a row does see must show in it.
        seen = ~np.isneginf(scores[..., wild])
        scores -= shift[..., None]
        weights = np.exp(scores, out=scores)
        total = total * shrink + weights.sum(axis=-1)
        acc *= shrink[..., None]
        acc += _weighted(weights, values, wild, seen)
        largest = grown

    nothing = total == 0
    divisor = np.where(nothing, dtype(1), total)
    lse = np.where(nothing, dtype(-np.inf), largest + np.log(divisor))
    acc /= divisor[..., None]
    return acc, lse


def _upcast(x: Array, dtype: Any) -> Array:
    """Copy (rows, heads, dim) to contiguous (heads, rows, dim), in the dtype of the sums."""
    return np.array(x.transpose(1, 0, 2), dtype, order="C")


def _finish_scores(
    problem: AttentionProblem,
    scores: Array,
    positions: Array,
    of_rows: slice,
    of_keys: slice,
    extras: _Extras,
    dtype: Any,
) -> None:
    """Turn products (heads, rows, keys) into scores, in place: -inf where a key is hidden."""
    scores *= dtype(problem.softmax_scale)
    if problem.softcap:
        cap = dtype(problem.softcap)
        scores /= cap
        np.tanh(scores, out=scores)
        scores *= cap
    keys = np.arange(of_keys.start, of_keys.stop)
    bias = None
    if extras.bias is not None:
        bias = extras.bias[:, of_rows, of_keys].astype(dtype)
        scores += bias
    if extras.slopes is not None:
        distance = np.abs(positions[:, None] - keys).astype(dtype)
        scores -= extras.slopes[:, None, None] * distance
    if bias is not None:
        np.copyto(scores, -np.inf, where=np.isneginf(bias))
    left, right = problem.window_left, problem.window_right
    if right >= 0 and keys[-1] > positions[0] + right:
        np.copyto(scores, -np.inf, where=keys > positions[:, None] + right)
    if left >= 0 and keys[0] < positions[-1] - left:
        np.copyto(scores, -np.inf, where=keys < positions[:, None] - left)


def _weighted(weights: Array, values: Array, wild: Array, seen: Array) -> Array:
    """Sum of values by weights, in which a value that is not finite touches only rows that see it.

    A weight of 0 does not keep NaN out of a product, so such values (indices ``wild``) are taken
    out of it and added one by one where ``seen`` (heads, rows, wild) says so.
    """
    heads, rows, keys = weights.shape
    kv_heads, _, dim = values.shape
    tame = values
    if wild.size:
        tame = values.copy()
        tame[:, wild] = 0
    sums = (weights.reshape(kv_heads, -1, keys) @ tame).reshape(heads, rows, dim)
    for n, key in enumerate(wild):
        value = np.repeat(values[:, key], heads // kv_heads, axis=0)[:, None]
        np.add(sums, weights[..., key, None] * value, out=sums, where=seen[..., n, None])
    return sums
