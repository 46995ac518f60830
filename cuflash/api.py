"""The functions that users call."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from cuflash import roads
from cuflash.errors import InvalidArgumentError, NullPointerError


def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    seqlens_k: Any = None,
    alibi_slopes: Any = None,
    bias: Any = None,
    sink: Any = None,
    layout: str = "bshd",
    precision: str = "ieee",
    config: Any = None,
    out: Any = None,
    return_lse: bool = False,
) -> Any:
    """Exact attention, ``softmax(scale * q @ k.T) @ v``, without the matrix of scores.

    Arrays decide where the work runs: CuPy arrays (and CUDA arrays of torch, JAX and others, seen
    through DLPack without a copy) on their GPU and CuPy's current stream, NumPy arrays (and CPU
    arrays of others) on the CPU. The result comes back in the kind of ``q``, without a gradient.

    Parameters
    ----------
    q : array, shape (batch, seqlen_q, nheads_q, head_dim)
        Queries. float16, bfloat16 (``ml_dtypes.bfloat16`` in CuPy and NumPy) or float32; on the CPU
        also float64. Any strides; head_dim 1 to 256. Any length may be 0.
    k : array, shape (batch, seqlen_k, nheads_k, head_dim)
        Keys, of q's dtype. nheads_q must be a multiple of nheads_k: query head h reads key head
        ``h // (nheads_q // nheads_k)``.
    v : array, shape (batch, seqlen_k, nheads_k, head_dim_v)
        Values, of q's dtype; head_dim_v may differ from head_dim.
    softmax_scale : float, optional
        Factor of ``q @ k.T``; by default ``1 / sqrt(head_dim)``. Any finite number.
    causal : bool
        Query i sees key j only when ``j <= i + seqlen_k - seqlen_q``: the last query sees all keys.
    window_size : (int, int)
        Query i sees keys from ``i + seqlen_k - seqlen_q - left`` to ``i + seqlen_k - seqlen_q +
        right``, both included. -1 is no bound on that side. ``causal`` sets right to 0.
    softcap : float
        When positive, scores become ``softcap * tanh(score / softcap)``, before bias and mask.
    seqlens_k : integers, shape (batch,), optional
        How many keys of each sequence count; seqlen_k above is then this number. What lies behind
        may hold anything, NaN included. A list or a NumPy array is checked and, for GPU arrays,
        copied over; the values of an array on the GPU are not looked at.
    alibi_slopes : array, shape (nheads_q,) or (batch, nheads_q), optional
        ``slope * abs(i + seqlen_k - seqlen_q - j)`` is taken from the scores.
    bias : array that broadcasts to (batch, nheads_q, seqlen_q, seqlen_k), optional
        Added to the scores. It is read by its strides, never expanded. -inf hides a key.
    sink : array, shape (nheads_q,), optional
        One more logit for every row of a head, without a value: it takes a share of the softmax.
    layout : {"bshd", "bhsd"}
        "bhsd" takes and gives (batch, nheads, seqlen, head_dim). bias and lse stay the same.
    precision : {"ieee", "tf32"}
        For float32 on a GPU: float32-accurate products, or faster ones with an error near 1e-3.
    config : str or mapping, optional
        Kernel and tile to use instead of the chosen ones, such as ``"block_m=128,block_n=64"``.
        GPU arrays only.
    out : array, shape (batch, seqlen_q, nheads_q, head_dim_v), optional
        Where to write the result, in q's dtype and layout; any strides, no overlap with an input.
    return_lse : bool
        Return ``(out, lse)``.

    Returns
    -------
    out : array, shape (batch, seqlen_q, nheads_q, head_dim_v)
        ``out`` itself if it was given. A row that sees no key is 0.
    lse : float32 array, shape (batch, nheads_q, seqlen_q)
        With ``return_lse``: natural logarithm of the sum of the exponentials of each row's scores,
        the sink included; -inf for a row that sees no key (and has no sink).

    Raises
    ------
    CuflashError
        The subclass that fits (`InvalidDimensionError`, `DimensionMismatchError`,
        `NullPointerError`, `UnsupportedHeadDimError`, `UnsupportedDtypeError`,
        `InvalidArgumentError`, `InvalidConfigError`, `DeviceMismatchError`, ...). Each also derives
        from ValueError, TypeError, MemoryError or RuntimeError.

    Examples
    --------
    >>> import numpy as np
    >>> q = np.zeros((1, 2, 1, 8), np.float32)
    >>> v = np.arange(16, dtype=np.float32).reshape(1, 2, 1, 8)
    >>> flash_attn_func(q, q, v, causal=True)[0, :, 0, 0].tolist()
    [0.0, 4.0]
    """
    kind = type(q)
    # The hot path: nothing to convert, so nothing is looked at here.
    if (
        kind.__module__ == "cupy"
        and type(k) is kind
        and type(v) is kind
        and seqlens_k is alibi_slopes is bias is sink is out is None
    ):
        return roads.gpu_forward()(
            q, k, v, softmax_scale=softmax_scale, causal=causal, window_size=window_size,
            softcap=softcap, seqlens_k=None, alibi_slopes=None, bias=None, sink=None, layout=layout,
            precision=precision, config=config, out=None, return_lse=return_lse,
        )  # fmt: skip
    return roads.attend(
        q, k, v, softmax_scale=softmax_scale, causal=causal, window_size=window_size,
        softcap=softcap, seqlens_k=seqlens_k, alibi_slopes=alibi_slopes, bias=bias, sink=sink,
        layout=layout, precision=precision, config=config, out=out, return_lse=return_lse,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    seqlens_k: Any = None,
    alibi_slopes: Any = None,
    sink: Any = None,
    layout: str = "thd",
    precision: str = "ieee",
    config: Any = None,
    out: Any = None,
    return_lse: bool = False,
    check_device: bool = False,
) -> Any:
    """Exact attention over packed sequences: rows one behind the other, without padding.

    Every meaning is that of `flash_attn_func`, for each sequence on its own: its queries see its
    keys, and its diagonal is that of its own two lengths. Sequences may be empty on either side.

    Parameters
    ----------
    q : array, shape (total_q, nheads_q, head_dim)
        Queries of all sequences.
    k, v : array, shape (total_k, nheads_k, head_dim) and (total_k, nheads_k, head_dim_v)
        Keys and values of all sequences.
    cu_seqlens_q, cu_seqlens_k : integers, shape (number of sequences + 1,)
        Sequence s has the rows ``cu_seqlens[s]`` to ``cu_seqlens[s + 1] - 1``. Offsets start at 0
        and never fall. int32 is used as it is, other integers are cast. The last offset may lie
        below the number of rows: the rows behind it (the slack of a padded buffer) belong to no
        sequence, and get out 0 and lse -inf. Lists and NumPy arrays are always checked, and copied
        to the GPU if q is there; arrays on the GPU are checked on request (``check_device``).
    max_seqlen_q, max_seqlen_k : int, optional
        Length of the longest sequence, as flash-attn takes it. Not needed here; where the offsets
        are checked, a longer sequence is an error.
    softmax_scale, causal, window_size, softcap, precision, config
        As in `flash_attn_func`.
    seqlens_k : integers, shape (number of sequences,), optional
        How many of each sequence's keys count.
    alibi_slopes : array, shape (nheads_q,) or (number of sequences, nheads_q), optional
        As in `flash_attn_func`.
    sink : array, shape (nheads_q,), optional
        As in `flash_attn_func`.
    layout : {"thd", "bshd"}
        Two names for the one layout of packed rows.
    out : array, shape (total_q, nheads_q, head_dim_v), optional
        Where to write the result, in q's dtype; any strides, no overlap with an input.
    return_lse : bool
        Return ``(out, lse)``.
    check_device : bool
        Check the values of offsets and counts that lie on the GPU too. This waits for the GPU;
        without it, offsets that are wrong give undefined results.

    Returns
    -------
    out : array, shape (total_q, nheads_q, head_dim_v)
        ``out`` itself if it was given. A row that sees no key is 0.
    lse : float32 array, shape (nheads_q, total_q)
        With ``return_lse``, as in `flash_attn_func`.

    Raises
    ------
    CuflashError
        As `flash_attn_func`; `InvalidArgumentError` for malformed offsets.

    Examples
    --------
    >>> import numpy as np
    >>> q = np.zeros((3, 1, 8), np.float32)
    >>> v = np.arange(24, dtype=np.float32).reshape(3, 1, 8)
    >>> flash_attn_varlen_func(q, q, v, [0, 1, 3], [0, 1, 3])[:, 0, 0].tolist()
    [0.0, 12.0, 12.0]
    """
    for name, cu in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if cu is None:
            raise NullPointerError(f"{name} is None: the row offsets of q and of k are needed")
    longest = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    for name, value in longest.items():
        if value is not None and (not _is_integer(value) or value < 0):
            raise InvalidArgumentError(f"{name} is {value!r}: an integer of 0 or more, or None")
    return roads.attend(
        q, k, v, cu_seqlens_q, cu_seqlens_k, longest, check_device, softmax_scale=softmax_scale,
        causal=causal, window_size=window_size, softcap=softcap, seqlens_k=seqlens_k,
        alibi_slopes=alibi_slopes, bias=None, sink=sink, layout=layout, precision=precision,
        config=config, out=out, return_lse=return_lse,
    )  # fmt: skip


def _is_integer(value: object) -> bool:
    try:
        operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return False
    return True
