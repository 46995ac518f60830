"""An answer held against float64: what `cuflash demo` calls OK.

A large problem is checked on samples: some heads, and of those the first, middle and last rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from cuflash.reference import attention_reference

# Up to this many scores a check covers everything; beyond it, samples keep it near a second.
FULL_CHECK_SCORES = 1 << 24
SAMPLED_ROWS = 64
# Of the largest answer, or of 1: for answers that the plain computation happens to get exactly right.
# The GPU's fp32 output is right to about 2^-20 (kernels_cu/common/gemm_tf32.cuh).
SLACK = 2e-6


@dataclass(frozen=True)
class Verdict:
    """The largest error found, the largest allowed, and how many rows were looked at."""

    max_error: float
    bound: float
    rows: int

    @property
    def ok(self) -> bool:
        """Whether the error is within the bound; a NaN is not."""
        return bool(self.max_error <= self.bound)


def check(q: Any, k: Any, v: Any, out: Any, *, causal: bool) -> Verdict:
    """Compare `out` (NumPy or CuPy, like q, k and v; layout "bshd") with float64.

    The bound is the project's accuracy rule: twice the error of the plain computation whose every
    step is rounded to the arrays' dtype, and a small constant.
    """
    error = plain_error = 0.0
    largest = 1.0
    rows = 0
    for batch, head, first, end in samples(q, k):
        key_head = head // (q.shape[2] // k.shape[2])
        # Without the keys that not even the last of these rows sees, the corner is the same.
        keys = max(0, k.shape[1] - q.shape[1] + end) if causal else k.shape[1]
        part_q = to_numpy(q[batch, first:end, head])
        part_k = to_numpy(k[batch, :keys, key_head])
        part_v = to_numpy(v[batch, :keys, key_head])
        as_call = (x[None, :, None] for x in (part_q, part_k, part_v))
        truth = attention_reference(*as_call, causal=causal)[0][0, :, 0]
        got = to_numpy(out[batch, first:end, head]).astype(np.float64)
        plain = plain_attention(part_q, part_k, part_v, causal)
        error = worst(error, got - truth)
        largest = worst(largest, truth)
        plain_error = worst(plain_error, plain - truth)
        rows += end - first
    return Verdict(error, 2 * plain_error + SLACK * largest, rows)


def samples(q: Any, k: Any) -> Iterator[tuple[int, int, int, int]]:
    """Yield (batch, head, first row, end row) of what is checked."""
    batches, seqlen_q, heads = q.shape[:3]
    if q.size == 0:
        return
    if batches * heads * seqlen_q * k.shape[1] <= FULL_CHECK_SCORES:
        yield from ((b, h, 0, seqlen_q) for b in range(batches) for h in range(heads))
        return
    rows = min(SAMPLED_ROWS, seqlen_q)
    starts = sorted({0, (seqlen_q - rows) // 2, seqlen_q - rows})
    for batch in sorted({0, batches - 1}):
        for head in sorted({0, heads // 2, heads - 1}):
            yield from ((batch, head, start, start + rows) for start in starts)


def plain_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool) -> np.ndarray:
    """Attention of one head as one would write it down, each step rounded to the arrays' dtype."""

    def rounded(values: np.ndarray) -> np.ndarray:
        return values.astype(q.dtype).astype(np.float32)

    q32, k32, v32 = (x.astype(np.float32) for x in (q, k, v))
    scores = rounded(rounded(q32 @ k32.T) / np.float32(math.sqrt(q.shape[-1])))
    if causal:
        rows, keys = scores.shape
        scores[np.arange(keys) > np.arange(rows)[:, None] + keys - rows] = -np.inf
    top = scores.max(axis=-1, keepdims=True, initial=-np.inf)
    top[np.isneginf(top)] = 0
    weights = rounded(np.exp(scores - top))
    total = weights.sum(axis=-1, keepdims=True)
    weights = rounded(np.divide(weights, total, out=weights, where=total > 0))
    return rounded(weights @ v32)


def to_numpy(array: Any) -> np.ndarray:
    """Bring a CuPy array to the host; leave a NumPy one."""
    return array.get() if hasattr(array, "get") else array


def worst(so_far: float, difference: np.ndarray) -> float:
    """Give the largest magnitude; NaN once there is a NaN, which `max` would lose."""
    return float(np.maximum(so_far, np.max(np.abs(difference), initial=0.0)))
