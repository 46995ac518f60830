"""The plain formula in float64, forward and gradients: what everything else is compared with.

It builds the whole matrix of scores, a head at a time, and has nothing that could be called clever.
Hidden keys and values may hold NaN or inf, as everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from cuflash import arrays, lengths
from cuflash.problem import AttentionProblem, build_problem

Array = np.ndarray[Any, Any]


def attention_reference(q: Any, k: Any, v: Any, **options: Any) -> tuple[Array, Array]:
    """Attention by the plain formula in float64.

    Parameters
    ----------
    q, k, v : array
        As `cuflash.flash_attn_func` takes them or, with ``cu_seqlens_q`` and ``cu_seqlens_k``, as
        `cuflash.flash_attn_varlen_func` does; NumPy or CuPy (copied to the CPU).
    **options
        softmax_scale, causal, window_size, softcap, seqlens_k, alibi_slopes, bias, sink and layout,
        as there.

    Returns
    -------
    out, lse : float64 arrays
        Shaped as there.

    Examples
    --------
    >>> out, lse = attention_reference(*np.zeros((3, 1, 4, 1, 8)), causal=True)
    >>> np.exp(lse[0, 0]).round(6).tolist()
    [1.0, 2.0, 3.0, 4.0]
    """
    asked = _ask(q, k, v, **options)
    out = np.zeros((*asked.q.shape[:-1], asked.problem.head_dim_v))
    lse = np.full(_lse_shape(asked.problem), -np.inf)
    for part in _parts(asked):
        out[part.of_q] = weighted(part.weights, part.v, part.visible)
        lse[part.of_lse] = part.lse
    return arrays.as_bshd(out, asked.layout), lse


def attention_reference_gradients(
    q: Any, k: Any, v: Any, dout: Any, **options: Any
) -> tuple[Array, ...]:
    """Gradients of ``(out * dout).sum()`` by the plain formula in float64.

    Parameters
    ----------
    q, k, v, **options
        As `attention_reference` takes them.
    dout : array, shaped as out
        Gradient of the result.

    Returns
    -------
    dq, dk, dv : float64 arrays
        Shaped as q, k and v.
    dsink : float64 array, shape (nheads_q,)
        Only when a sink was given.
    """
    asked = _ask(q, k, v, **options)
    dout = arrays.as_bshd(_float64(dout), asked.layout)
    dq, dk, dv = (np.zeros(x.shape) for x in (asked.q, asked.k, asked.v))
    dsink = np.zeros(asked.problem.nheads_q)
    scale, cap = asked.problem.softmax_scale, asked.problem.softcap
    for part in _parts(asked):
        do, p, visible = dout[part.of_q], part.weights, part.visible
        # The sum over keys of weight times its gradient: out . dout, row by row.
        delta = (do * weighted(p, part.v, visible)).sum(-1, keepdims=True)
        with np.errstate(invalid="ignore"):
            ds = np.where(visible, p * (do @ part.v.T - delta), 0.0)
            if cap:
                ds = np.where(visible, ds * (1 - (part.capped / cap) ** 2), 0.0)
        dq[part.of_q] += scale * weighted(ds, part.k, visible)
        dk[part.of_k] += scale * weighted(ds.T, part.q, visible.T)
        dv[part.of_k] += weighted(p.T, do, visible.T)
        dsink[part.head] -= (part.sink_weight * delta[:, 0]).sum()
    gradients = tuple(arrays.as_bshd(x, asked.layout) for x in (dq, dk, dv))
    return gradients if asked.sink is None else (*gradients, dsink)


@dataclass
class _Asked:
    """A checked call: float64 arrays as (batch, seqlen, nheads, head_dim) or packed."""

    problem: AttentionProblem
    layout: str
    q: Array
    k: Array
    v: Array
    counts: dict[str, Any]
    alibi_slopes: Array | None
    bias: Array | None
    sink: Array | None


@dataclass
class _Part:
    """One head of one sequence: its rows, and its softmax."""

    of_q: Any
    of_k: Any
    of_lse: Any
    head: int
    q: Array
    k: Array
    v: Array
    visible: Array
    capped: Array
    weights: Array
    sink_weight: Array
    lse: Array


def _ask(
    q: Any,
    k: Any,
    v: Any,
    *,
    layout: str | None = None,
    alibi_slopes: Any = None,
    bias: Any = None,
    sink: Any = None,
    **options: Any,
) -> _Asked:
    """Check the arguments of a call and bring its arrays to float64."""
    names = ("cu_seqlens_q", "cu_seqlens_k", "seqlens_k")
    counts: dict[str, Any] = {n: options.pop(n, None) for n in names}
    counts = {n: None if x is None else _host(lengths.view(n, x)) for n, x in counts.items()}
    layout = layout or ("bshd" if counts["cu_seqlens_q"] is None else "thd")
    named = {"alibi_slopes": alibi_slopes, "bias": bias, "sink": sink}
    given: dict[str, Any] = {n: None if x is None else _float64(x) for n, x in named.items()}
    q, k, v = (_float64(x) for x in (q, k, v))
    problem = build_problem(q, k, v, layout=layout, **counts, **given, **options)
    q, k, v = (arrays.as_bshd(x, layout) for x in (q, k, v))
    return _Asked(problem, layout, q, k, v, counts, **given)


def _host(x: Any) -> Array:
    return x.get() if arrays.is_cupy(x) else x


def _float64(x: Any) -> Array:
    return np.asarray(_host(x), np.float64)


def _lse_shape(problem: AttentionProblem) -> tuple[int, ...]:
    rows = (problem.nheads_q, problem.seqlen_q)
    return rows if problem.packed else (problem.batch, *rows)


def _parts(asked: _Asked) -> Iterator[_Part]:
    """Yield the softmax of every head of every sequence."""
    problem = asked.problem
    group = problem.nheads_q // problem.nheads_k
    bias = asked.bias
    if bias is not None:
        full = (problem.batch, problem.nheads_q, problem.seqlen_q, problem.seqlen_k)
        bias = np.broadcast_to(bias, full)
    slopes = np.zeros(1) if asked.alibi_slopes is None else asked.alibi_slopes
    slopes = np.broadcast_to(slopes, (problem.batch, problem.nheads_q))
    for b, rows, keys in lengths.sequences(problem, **asked.counts):
        rows_of = (rows,) if problem.packed else (rows, slice(None))
        keys_of = (keys,) if problem.packed else keys
        for head in range(problem.nheads_q):
            of_q, of_k = (*rows_of, head), (*keys_of, head // group)
            q, k, v = asked.q[of_q], asked.k[of_k], asked.v[of_k]
            extra = np.zeros((len(q), len(k))) if bias is None else bias[b, head, :, : len(k)]
            sink = -np.inf if asked.sink is None else float(asked.sink[head])
            of_lse = (head, rows) if problem.packed else (b, head)
            visible, added = visible_and_added(
                problem, np.arange(len(q)), len(q), len(k), extra, slopes[b, head]
            )
            softmax = softmax_of_head(problem, q, k, visible, added, sink)
            yield _Part(of_q, of_k, of_lse, head, q, k, v, visible, *softmax)


def visible_and_added(
    problem: AttentionProblem, rows: Array, rows_q: int, rows_k: int, bias: Array, slope: float
) -> tuple[Array, Array]:
    """Which keys some query rows see, and what bias and ALiBi add to their scores.

    ``rows`` are their places among the sequence's ``rows_q``; the matrices are (rows, rows_k).
    """
    # Distance of a key from the diagonal, which ends at the last query and the last key.
    ahead = np.arange(rows_k) - (rows[:, None] + rows_k - rows_q)
    visible = ~np.isneginf(bias)
    if problem.window_left >= 0:
        visible &= ahead >= -problem.window_left
    if problem.window_right >= 0:
        visible &= ahead <= problem.window_right
    return visible, bias - slope * np.abs(ahead)


def softmax_of_head(
    problem: AttentionProblem, q: Array, k: Array, visible: Array, added: Array, sink: float
) -> tuple[Array, Array, Array, Array]:
    """Capped scores, weights, weight of the sink and lse of some rows of one head."""
    with np.errstate(invalid="ignore", over="ignore"):
        capped = problem.softmax_scale * (q @ k.T)
        if problem.softcap:
            capped = problem.softcap * np.tanh(capped / problem.softcap)
        scores = np.where(visible, capped + added, -np.inf)
    largest = np.maximum(scores.max(-1, initial=-np.inf), sink)
    shift = np.where(np.isneginf(largest), 0.0, largest)
    weights = np.exp(scores - shift[:, None])
    sink_weight = np.exp(sink - shift)
    total = weights.sum(-1) + sink_weight
    empty = total == 0
    divisor = np.where(empty, 1.0, total)
    lse = np.where(empty, -np.inf, shift + np.log(divisor))
    return capped, weights / divisor[:, None], sink_weight / divisor, lse


def weighted(weights: Array, values: Array, visible: Array) -> Array:
    """``weights @ values``, where hidden values do not count, not even NaN times 0."""
    tame = np.isfinite(values).all(-1, keepdims=True)
    sums = weights @ np.where(tame, values, 0.0)
    for key in np.flatnonzero(~tame):
        seeing = visible[:, key]
        sums[seeing] += weights[seeing, key, None] * values[key]
    return sums
