"""An answer of any implementation, held against float64, and what may be wrong with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from cuflash import arrays, lengths
from cuflash.debug.accuracy import Truth, Verdict, to_numpy
from cuflash.debug.causes import likely_causes
from cuflash.debug.trials import Cause
from cuflash.errors import DimensionMismatchError
from cuflash.inputs import Inputs
from cuflash.problem import AttentionProblem, build_problem

COUNTS = ("cu_seqlens_q", "cu_seqlens_k", "seqlens_k")


@dataclass(frozen=True)
class Comparison:
    """How an answer compares with float64, and what it may suffer from.

    Attributes
    ----------
    problem : AttentionProblem
    verdict : Verdict
        Largest and mean error, the error of the plain computation in q's dtype and the ``ratio`` to
        it, the bound, the lse's error, and the index of the first number beyond the bound, in the
        caller's layout.
    suspects : tuple of Cause
        Likely causes, the likeliest first: each with its ``name``, ``advice``, the ``error`` that
        remains if it is the one, and whether it ``explains`` all of it. Empty for a right answer,
        and where nothing known fits.
    """

    problem: AttentionProblem
    verdict: Verdict
    suspects: tuple[Cause, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the answer is right."""
        return self.verdict.ok

    def __str__(self) -> str:
        lines = [f"{'OK' if self.ok else 'WRONG'}: {self.problem.in_words}", self.verdict.in_words]
        if not self.ok:
            lines += [f"- {cause.in_words}" for cause in self.suspects]
            lines += [] if self.suspects else ["- no known mistake gives this answer"]
        return "\n".join(lines)


def compare(
    out: Any,
    q: Any,
    k: Any,
    v: Any,
    *,
    lse: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    seqlens_k: Any = None,
    alibi_slopes: Any = None,
    bias: Any = None,
    sink: Any = None,
    layout: str | None = None,
    precision: str = "ieee",
) -> Comparison:
    """Hold an answer, of whatever implementation, against float64, and look for what is wrong with it.

    Right is an answer whose largest error is at most twice that of the plain computation in q's
    dtype, and a small constant. For a wrong one, known mistakes are tried: another causal corner,
    scale, order of heads, a ragged tile, sums not rescaled, rows not written, ... Large problems
    are checked on samples.

    Parameters
    ----------
    out : array, shape (batch, seqlen_q, nheads_q, head_dim_v), or as layout says
        The answer: NumPy's, CuPy's or any with DLPack, on any device and in any floating dtype.
    q, k, v : array
        What it was computed from, in the dtype in which the implementation read it.
    lse : array, shape (batch, nheads_q, seqlen_q), packed (nheads_q, total_q), optional
        The answer's logarithms of row sums, checked too.
    cu_seqlens_q, cu_seqlens_k : integers, optional
        Given for packed arrays, as to `flash_attn_varlen_func`.
    softmax_scale, causal, window_size, softcap, seqlens_k, alibi_slopes, bias, sink, precision
        What was asked for, in the meanings of `flash_attn_func`.
    layout : {"bshd", "bhsd", "thd"}, optional
        By default "bshd", or "thd" for packed arrays.

    Returns
    -------
    Comparison
        Printed, it says all it knows.

    Raises
    ------
    CuflashError
        For arguments that `flash_attn_func` would refuse, and shapes that do not fit.

    Examples
    --------
    >>> import numpy as np
    >>> from cuflash import flash_attn_func
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 60, 2, 16), np.float32)
    >>> out = flash_attn_func(q, k, v, causal=True)
    >>> compare(out, q, k, v, causal=True).ok
    True
    >>> compare(out, q, k, v).suspects[0].name
    'causal mask not asked for'
    """
    named = {"q": q, "k": k, "v": v, "alibi_slopes": alibi_slopes, "bias": bias, "sink": sink}
    given = {name: None if x is None else arrays.view(name, x) for name, x in named.items()}
    q, k, v = (given.pop(name) for name in "qkv")
    for name, x in (("q", q), ("k", k), ("v", v)):
        arrays.require_array(name, x)
    counts = dict(zip(COUNTS, (cu_seqlens_q, cu_seqlens_k, seqlens_k), strict=True))
    counts = {name: None if x is None else lengths.view(name, x) for name, x in counts.items()}
    layout = layout or ("bshd" if cu_seqlens_q is None else "thd")
    problem = build_problem(
        q, k, v, **_beside(q, counts), **given, softmax_scale=softmax_scale, causal=causal,
        window_size=window_size, softcap=softcap, layout=layout, precision=precision,
    )  # fmt: skip
    on_host = {name: None if x is None else to_numpy(x) for name, x in counts.items()}
    _check_counts(problem, on_host)
    out = _answer("out", out, (*q.shape[:-1], v.shape[-1]), _LAYOUTS.get(layout, ""))
    rows = (problem.nheads_q, problem.seqlen_q)
    of_lse = rows if problem.packed else (problem.batch, *rows)
    lse = None if lse is None else _answer("lse", lse, of_lse, "transpose its axes")
    q, k, v, out = (arrays.as_bshd(x, layout) for x in (q, k, v, out))
    comparison = judge(Inputs(problem, q, k, v, on_host | given), out, lse)
    first = comparison.verdict.first_bad
    if layout == "bhsd" and first is not None:
        b, row, head, column = first
        verdict = replace(comparison.verdict, first_bad=(b, head, row, column))
        comparison = replace(comparison, verdict=verdict)
    return comparison


def judge(inputs: Inputs, out: Any, lse: Any = None) -> Comparison:
    """Compare an answer to `Inputs`, in layout "bshd" or packed."""
    truth = Truth(inputs)
    verdict = truth.verdict(out, lse)
    causes = likely_causes(truth, inputs, out, lse, verdict)
    return Comparison(inputs.problem, verdict, tuple(causes))


_LAYOUTS = {
    "bshd": 'for (batch, nheads, seqlen, head_dim) arrays pass layout="bhsd"',
    "bhsd": 'for (batch, seqlen, nheads, head_dim) arrays pass layout="bshd"',
    "thd": "packed answers have no padding",
}


def _beside(q: Any, counts: dict[str, Any]) -> dict[str, Any]:
    """Lengths where q is, as a call would bring them there."""
    if not arrays.is_cupy(q):
        return counts
    return {n: None if x is None else lengths.on_device(n, x, q) for n, x in counts.items()}


def _check_counts(problem: AttentionProblem, on_host: dict[str, Any]) -> None:
    """Check the values of lengths, those of a GPU too: they are read here anyhow."""
    if problem.packed:
        lengths.check_packed(**on_host, rows_q=problem.seqlen_q, rows_k=problem.seqlen_k)
    elif on_host["seqlens_k"] is not None:
        lengths.check_seqlens_k(on_host["seqlens_k"], problem.batch, problem.seqlen_k)


def _answer(name: str, x: Any, shape: tuple[int, ...], hint: str) -> Any:
    """See an array of the answer as NumPy's or CuPy's, and refuse one that cannot be it."""
    arrays.require_array(name, x)
    x = arrays.view(name, x)
    arrays.dtype_name(x.dtype, name)
    if tuple(x.shape) != shape:
        raise DimensionMismatchError(
            f"{name} has shape {tuple(x.shape)}: {shape} is needed; {hint}"
        )
    return x
