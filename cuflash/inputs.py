"""Random arrays for a problem: what the demo, the tuner, `bench`, `check` and `dev` run on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cuflash import api, arrays
from cuflash.problem import AttentionProblem

# Elements of a bias beyond which all heads share one.
_LARGEST_BIAS = 2**27


@dataclass(frozen=True)
class Inputs:
    """The arrays of one call; ``options`` are the call's other arguments, arrays among them."""

    problem: AttentionProblem
    q: Any
    k: Any
    v: Any
    options: dict[str, Any]

    def attend(self, **more: Any) -> Any:
        """Make the call, with ``out``, ``return_lse`` or ``config`` if they are given."""
        call = api.flash_attn_varlen_func if self.problem.packed else api.flash_attn_func
        return call(self.q, self.k, self.v, **self.options, **more)

    def out(self) -> Any:
        """Give an array for the result, full of NaN, so that what is not written can be seen."""
        shape = (*self.q.shape[:-1], self.v.shape[-1])
        xp = arrays.import_cupy("q is on a GPU") if arrays.is_cupy(self.q) else np
        nans = xp.empty(shape, self.q.dtype)
        nans.view(np.uint8).fill(0xFF)  # all bits set is a NaN in every dtype here
        return nans


def random_inputs(problem: AttentionProblem, xp: Any = np, seed: int = 0) -> Inputs:
    """Give standard normal q, k and v, and whatever else the problem has.

    Parameters
    ----------
    problem : AttentionProblem
        Its ``vector_bytes`` decides how the rows are aligned.
    xp : module
        ``numpy`` or ``cupy``; the numbers are the same.
    seed : int

    Returns
    -------
    Inputs
        Packed sequences have random lengths, of which one may be 0, that fill the rows.
    """
    rng = np.random.default_rng(seed)
    of_q = (problem.seqlen_q, problem.nheads_q)
    of_k = (problem.seqlen_k, problem.nheads_k)
    batch = () if problem.packed else (problem.batch,)
    q, k, v = (
        _rows(rng, (*batch, *shape), dim, problem, xp)
        for shape, dim in ((of_q, problem.head_dim), (of_k, problem.head_dim), (of_k, problem.head_dim_v))
    )  # fmt: skip
    options: dict[str, Any] = {
        "softmax_scale": problem.softmax_scale,
        "window_size": (problem.window_left, problem.window_right),
        "softcap": problem.softcap,
        "precision": problem.precision,
    }
    room = np.full(problem.batch, problem.seqlen_k)
    if problem.packed:
        lengths_q = _partition(rng, problem.seqlen_q, problem.batch)
        same = problem.seqlen_q == problem.seqlen_k
        room = lengths_q if same else _partition(rng, problem.seqlen_k, problem.batch)
        options["cu_seqlens_q"] = xp.asarray(_offsets(lengths_q))
        options["cu_seqlens_k"] = xp.asarray(_offsets(room))
    if problem.seqlens_k:
        options["seqlens_k"] = xp.asarray(rng.integers((room + 1) // 2, room + 1).astype(np.int32))
    if problem.alibi:
        slopes = 2.0 ** (-8.0 * np.arange(1, problem.nheads_q + 1) / problem.nheads_q)
        options["alibi_slopes"] = xp.asarray(slopes.astype(np.float32))
    if problem.bias:
        scores = problem.nheads_q * problem.seqlen_q * problem.seqlen_k
        heads = problem.nheads_q if scores <= _LARGEST_BIAS else 1
        numbers = rng.standard_normal((heads, problem.seqlen_q, problem.seqlen_k), np.float32)
        options["bias"] = xp.asarray(numbers).astype(arrays.dtype_of(problem.bias))
    if problem.sink:
        options["sink"] = xp.asarray(rng.standard_normal(problem.nheads_q, np.float32))
    return Inputs(problem, q, k, v, options)


def _rows(
    rng: np.random.Generator, shape: tuple[int, ...], dim: int, problem: AttentionProblem, xp: Any
) -> Any:
    """Random rows, each at a multiple of ``vector_bytes`` and of nothing wider."""
    dtype = arrays.dtype_of(problem.dtype)
    numbers = xp.asarray(rng.standard_normal((*shape, dim), np.float32)).astype(dtype)
    width = problem.vector_bytes // dtype.itemsize
    # The pitch is an odd number of widths, so that no wider load fits; 16 bytes is the widest.
    pitch = -(-dim // width)
    pitch += 1 if problem.vector_bytes < 16 and pitch % 2 == 0 else 0
    if pitch * width == dim:
        return numbers
    padded = xp.zeros((*shape, pitch * width), dtype)
    padded[..., :dim] = numbers
    return padded[..., :dim]


def _partition(rng: np.random.Generator, rows: int, parts: int) -> np.ndarray[Any, Any]:
    """Random lengths that sum to ``rows``."""
    cuts = np.sort(rng.integers(0, rows + 1, max(0, parts - 1)))
    return np.diff(np.concatenate(([0], cuts, [rows]))) if parts else np.zeros(0, np.int64)


def _offsets(lengths: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
