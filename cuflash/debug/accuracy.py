"""An answer held against float64 by the project's accuracy rule.

The right answer is worked out once for a problem's arrays and then compared with as many answers as
there are. A large problem is checked on samples: some heads, and of those the first, middle and last
rows; beside them, that everything was written.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from cuflash import arrays, lengths
from cuflash.inputs import Inputs
from cuflash.problem import AttentionProblem
from cuflash.reference import softmax_of_head, visible_and_added, weighted

Array = np.ndarray[Any, Any]

# Up to this many scores a check covers everything; beyond it, samples keep it near a second.
FULL_CHECK_SCORES = 1 << 24
SAMPLED_ROWS = 64
# Of the largest answer, or of 1: for answers that the plain computation happens to get exactly right.
# The GPU's fp32 output is right to about 2^-20 (kernels_cu/common/gemm_tf32.cuh).
SLACK = 2e-6
# Error of a product whose factors were rounded to tf32, for precision="tf32".
TF32_SLACK = 2e-3
LSE_SLACK = 1e-4
_COUNTED_AT_ONCE = 1 << 24


@dataclass(frozen=True)
class Verdict:
    """How an answer compares with float64.

    Attributes
    ----------
    max_error, mean_error : float
        Largest and mean distance of a number; NaN where the answer has one and should not.
    bound : float
        Largest error that the accuracy rule allows.
    plain_error : float
        Largest error of the plain computation in the answer's dtype.
    lse_error : float or None
        Largest distance of an lse, if one was given.
    first_bad : tuple or None
        Index in ``out`` of the first number beyond the bound.
    rows : int
        Rows that were compared.
    unwritten : int
        Numbers of the whole answer that are NaN.
    """

    max_error: float
    mean_error: float
    bound: float
    plain_error: float
    rows: int
    lse_error: float | None = None
    first_bad: tuple[int, ...] | None = None
    unwritten: int = 0

    @property
    def ok(self) -> bool:
        """Whether the errors are within their bounds; a NaN is not."""
        right_lse = self.lse_error is None or self.lse_error <= LSE_SLACK
        return bool(self.max_error <= self.bound and right_lse and not self.unwritten)

    @property
    def ratio(self) -> float:
        """Error in units of the plain computation's, which has one near 1."""
        return self.max_error / self.plain_error if self.plain_error else float(self.max_error > 0)

    @property
    def in_words(self) -> str:
        """One line about what is wrong, or that nothing is."""
        if self.ok:
            return f"max error {self.max_error:.2e}, allowed {self.bound:.2e}"
        if self.unwritten:
            return f"{self.unwritten} numbers are NaN: not written, or wrong"
        if not self.max_error <= self.bound:
            at = f" first at out{list(self.first_bad)}" if self.first_bad else ""
            return f"max error {self.max_error:.2e}, allowed {self.bound:.2e};{at}"
        return f"lse is wrong by {self.lse_error:.2e}"


@dataclass(frozen=True)
class Sample:
    """Some rows of one head: where they are in out and lse, and what is right there."""

    of_out: tuple[Any, ...]
    of_lse: tuple[Any, ...]
    out: Array
    lse: Array
    first: int  # of the rows, along the axis of rows
    of_sequence: int


class Truth:
    """The right answer for some arrays, of which every sample is worked out here."""

    def __init__(self, inputs: Inputs) -> None:
        self.problem = inputs.problem
        self.samples = list(_samples(inputs))
        self.plain_error = 0.0
        largest = 1.0
        for sample, plain in zip(self.samples, _plain_answers(inputs), strict=True):
            self.plain_error = worst(self.plain_error, plain - sample.out)
            largest = worst(largest, sample.out)
        slack = TF32_SLACK if self.problem.precision == "tf32" else SLACK
        self.bound = 2 * self.plain_error + slack * largest

    def verdict(self, out: Any, lse: Any = None) -> Verdict:
        """Compare an answer (and its lse) in layout "bshd", or packed, NumPy's or CuPy's."""
        error = total = 0.0
        lse_error = None if lse is None else 0.0
        rows = numbers = 0
        first_bad = None
        for sample in self.samples:
            got = to_numpy(out[sample.of_out]).astype(np.float64)
            difference = np.abs(got - sample.out)
            error = worst(error, difference)
            total += float(difference.sum())
            numbers += difference.size
            rows += len(got)
            if first_bad is None:
                first_bad = self._first_bad(sample, difference)
            if lse_error is not None:
                lse_error = worst(
                    lse_error, lse_difference(to_numpy(lse[sample.of_lse]), sample.lse)
                )
        return Verdict(
            error, total / max(1, numbers), self.bound, self.plain_error, rows, lse_error, first_bad,
            count_nan(out),
        )  # fmt: skip

    def _first_bad(self, sample: Sample, difference: Array) -> tuple[int, ...] | None:
        bad = np.argwhere(~(difference <= self.bound))
        if not len(bad):
            return None
        row, column = (int(n) for n in bad[0])
        head = sample.of_out[-1]
        place = (sample.first + row, head, column)
        return place if self.problem.packed else (sample.of_sequence, *place)


def samples_of(problem: AttentionProblem, rows_of: list[int]) -> Iterator[tuple[int, int, Array]]:
    """Yield (sequence, head, its rows) of what is checked; ``rows_of`` counts each one's queries."""
    heads = problem.nheads_q
    scores = sum(rows_of) * heads * max(1, problem.seqlen_k)
    if problem.packed:
        scores //= max(1, problem.batch)
    if scores <= FULL_CHECK_SCORES:
        yield from ((b, h, np.arange(n)) for b, n in enumerate(rows_of) for h in range(heads) if n)
        return
    longest = int(np.argmax(rows_of))
    for b in sorted({0, longest, len(rows_of) - 1}):
        n = rows_of[b]
        count = min(SAMPLED_ROWS, n)
        starts = sorted({0, (n - count) // 2, n - count})
        for h in sorted({0, heads // 2, heads - 1}):
            yield from ((b, h, np.arange(start, start + count)) for start in starts if count)


@dataclass(frozen=True)
class _Head:
    """Everything that the formula needs of some rows of one head."""

    q: Array
    k: Array
    v: Array
    visible: Array
    added: Array
    sink: float
    rows: Array
    sequence: int
    head: int
    first_row: int  # of the sequence, in packed rows


def _heads(inputs: Inputs) -> Iterator[_Head]:
    problem, options = inputs.problem, inputs.options
    counts = {
        name: None if options.get(name) is None else to_numpy(options[name])
        for name in ("cu_seqlens_q", "cu_seqlens_k", "seqlens_k")
    }
    parts = list(lengths.sequences(problem, **counts))
    starts = [rows.start if problem.packed else 0 for _, rows, _ in parts]
    rows_of = [
        rows.stop - rows.start if problem.packed else problem.seqlen_q for _, rows, _ in parts
    ]
    group = problem.nheads_q // problem.nheads_k
    bias, slopes, sinks = (options.get(name) for name in ("bias", "alibi_slopes", "sink"))
    for b, head, rows in samples_of(problem, rows_of):
        of_k = parts[b][2]
        # The rows follow each other, so a slice takes them without a copy of the rest.
        span = slice(starts[b] + int(rows[0]), starts[b] + int(rows[-1]) + 1)
        q = to_numpy(inputs.q[span, head] if problem.packed else inputs.q[b, span, head])
        index = (of_k, head // group) if problem.packed else (*of_k, head // group)
        k, v = (to_numpy(x[index]) for x in (inputs.k, inputs.v))
        extra = np.zeros((len(rows), len(k)))
        if bias is not None:
            extra = _bias_rows(bias, b, head, rows)[:, : len(k)].astype(np.float64)
        slope = 0.0
        if slopes is not None:
            slope = float(slopes[b, head] if slopes.ndim == 2 else slopes[head])
        visible, added = visible_and_added(problem, rows, rows_of[b], len(k), extra, slope)
        sink = -np.inf if sinks is None else float(sinks[head])
        yield _Head(q, k, v, visible, added, sink, rows, b, head, starts[b])


def _bias_rows(bias: Any, b: int, head: int, rows: Array) -> Array:
    """The rows of a bias that broadcasts to (batch, heads, queries, keys)."""
    while bias.ndim < 4:
        bias = bias[None]
    picked = bias[min(b, bias.shape[0] - 1), min(head, bias.shape[1] - 1)]
    if picked.shape[0] > 1:
        picked = picked[int(rows[0]) : int(rows[-1]) + 1]
    return to_numpy(picked)


def _samples(inputs: Inputs) -> Iterator[Sample]:
    problem = inputs.problem
    for part in _heads(inputs):
        q, k, v = (x.astype(np.float64) for x in (part.q, part.k, part.v))
        _, weights, _, lse = softmax_of_head(problem, q, k, part.visible, part.added, part.sink)
        first, end = int(part.rows[0]), int(part.rows[-1]) + 1
        if problem.packed:
            span = slice(part.first_row + first, part.first_row + end)
            of_out: tuple[Any, ...] = (span, part.head)
            of_lse: tuple[Any, ...] = (part.head, span)
        else:
            of_out = (part.sequence, slice(first, end), part.head)
            of_lse = (part.sequence, part.head, slice(first, end))
        yield Sample(
            of_out, of_lse, weighted(weights, v, part.visible), lse, part.first_row + first, part.sequence
        )  # fmt: skip


def _plain_answers(inputs: Inputs) -> Iterator[Array]:
    return (plain_rows(inputs.problem, part) for part in _heads(inputs))


def plain_rows(problem: AttentionProblem, part: Any) -> Array:
    """Attention as one would write it down, each step rounded to the arrays' dtype."""
    dtype = arrays.dtype_of(problem.dtype)
    wide = np.float64 if problem.dtype == "fp64" else np.float32

    def rounded(values: Array) -> Array:
        return np.asarray(values, wide).astype(dtype).astype(wide)

    with np.errstate(all="ignore"):
        q, k, v = (x.astype(wide) for x in (part.q, part.k, part.v))
        scores = rounded(rounded(q @ k.T) * wide(problem.softmax_scale))
        if problem.softcap:
            cap = wide(problem.softcap)
            scores = rounded(cap * np.tanh(rounded(scores / cap)))
        scores = np.where(part.visible, rounded(scores + rounded(part.added)), wide(-np.inf))
        top = scores.max(-1, keepdims=True, initial=part.sink)
        top[np.isneginf(top)] = 0
        weights = rounded(np.exp(rounded(scores - top)))
        total = rounded(weights.sum(-1, keepdims=True) + np.exp(wide(part.sink) - top))
        weights = rounded(np.divide(weights, total, out=weights, where=total > 0))
        hidden = ~part.visible.any(0)
        return rounded(weights @ np.where(hidden[:, None], 0, v)).astype(np.float64)


def to_numpy(array: Any) -> Array:
    """Bring a CuPy array to the host; leave a NumPy one."""
    got: Array = array.get() if hasattr(array, "get") else array
    return got


def count_nan(x: Any) -> int:
    """How many numbers of a NumPy or CuPy array are NaN, looked at a part at a time."""
    if not x.size:
        return 0
    step = max(1, _COUNTED_AT_ONCE * len(x) // x.size)
    parts = (x[first : first + step].astype(np.float32) for first in range(0, len(x), step))
    return sum(int((part != part).sum()) for part in parts)


def worst(so_far: float, difference: Array) -> float:
    """Give the largest magnitude; NaN once there is a NaN, which `max` would lose."""
    return float(np.maximum(so_far, np.max(np.abs(difference), initial=0.0)))


def lse_difference(got: Array, expected: Array) -> Array:
    """Relative distance where the lse is large; 0 where both are -inf."""
    with np.errstate(invalid="ignore"):
        far = np.abs(got.astype(np.float64) - expected) / np.maximum(1.0, np.abs(expected) / 10)
    same = np.isneginf(got) & np.isneginf(expected)
    return np.where(same, 0.0, far)
