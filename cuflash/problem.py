"""What was asked: one attention problem without its arrays, and the checks that make it sound.

Both roads build their problem here, so both refuse the same calls with the same words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cuflash import arrays, checks, lengths


@dataclass(frozen=True, slots=True)
class AttentionProblem:
    """One attention problem: what was asked, hashable and without arrays.

    For packed input ``batch`` counts the sequences, ``seqlen_q`` and ``seqlen_k`` the
    rows of all of them. ``causal`` is folded into the window (-1 = no bound).
    """

    dtype: str
    batch: int
    seqlen_q: int
    seqlen_k: int
    nheads_q: int
    nheads_k: int
    head_dim: int
    head_dim_v: int
    packed: bool
    softmax_scale: float
    window_left: int
    window_right: int
    softcap: float
    alibi: bool
    bias: str | None
    sink: bool
    seqlens_k: bool
    precision: str
    vector_bytes: int

    @property
    def causal(self) -> bool:
        """Whether the mask is the causal one and nothing more."""
        return self.window_right == 0 and self.window_left == -1

    @property
    def flops(self) -> int:
        """Multiplications and additions of the two matrix products, half of them when causal.

        The usual count of benchmarks, for dense problems: it looks no further at the mask.
        """
        if self.packed:
            raise ValueError("the work of a packed problem depends on the values of cu_seqlens")
        scores = self.batch * self.nheads_q * self.seqlen_q * self.seqlen_k
        return 2 * scores * (self.head_dim + self.head_dim_v) // (2 if self.causal else 1)


def build_problem(
    q: Any,
    k: Any,
    v: Any,
    *,
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
    layout: str = "bshd",
    precision: str = "ieee",
    out: Any = None,
) -> AttentionProblem:
    """Check every argument of a call and say what it asks for.

    Arrays are NumPy's or CuPy's; only shapes, strides, dtypes and addresses are read. The values of
    ``cu_seqlens_*`` and ``seqlens_k`` are checked where they are NumPy arrays.

    Raises
    ------
    CuflashError
        The subclass that fits; its message names the argument, its value and what is allowed.
    """
    packed = cu_seqlens_q is not None or cu_seqlens_k is not None
    checks.check_layout(layout, packed)
    for name, x in (("q", q), ("k", k), ("v", v)):
        arrays.require_array(name, x)
    device = checks.check_devices(
        q=q, k=k, v=v, out=out, bias=bias, sink=sink, alibi_slopes=alibi_slopes,
        seqlens_k=seqlens_k, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
    )  # fmt: skip
    on_gpu = device != "cpu"
    dtype = checks.check_dtypes(q, k, v, on_gpu)
    caller_shape = tuple(q.shape)
    checks.check_ndim(q, k, v, layout, packed)
    q, k, v = (arrays.as_bshd(x, layout) for x in (q, k, v))
    checks.check_shapes(q, k, v, packed)
    checks.check_strides(on_gpu, q=q, k=k, v=v, bias=bias, out=out)
    if packed:
        seqlen_q, seqlen_k = q.shape[0], k.shape[0]
        batch = lengths.check_packed(
            cu_seqlens_q, cu_seqlens_k, seqlens_k, rows_q=seqlen_q, rows_k=seqlen_k
        )
    else:
        batch, seqlen_q, seqlen_k = q.shape[0], q.shape[1], k.shape[1]
        if seqlens_k is not None:
            lengths.check_seqlens_k(seqlens_k, batch, seqlen_k)
    nheads_q, head_dim = q.shape[-2:]
    if alibi_slopes is not None:
        checks.check_per_head("alibi_slopes", alibi_slopes, [(nheads_q,), (batch, nheads_q)])
    if sink is not None:
        checks.check_per_head("sink", sink, [(nheads_q,)])
    if bias is not None:
        checks.check_bias(bias, packed, (batch, nheads_q, seqlen_q, seqlen_k))
    if out is not None:
        checks.check_out(
            out, q, (*caller_shape[:-1], v.shape[-1]), {"q": q, "k": k, "v": v, "bias": bias}
        )
    window_left, window_right = checks.check_window(window_size, causal)
    return AttentionProblem(
        dtype=dtype,
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        nheads_q=nheads_q,
        nheads_k=k.shape[-2],
        head_dim=head_dim,
        head_dim_v=v.shape[-1],
        packed=packed,
        softmax_scale=checks.check_scale(softmax_scale, head_dim),
        window_left=window_left,
        window_right=window_right,
        softcap=checks.check_softcap(softcap),
        alibi=alibi_slopes is not None,
        bias=None if bias is None else arrays.dtype_name(bias.dtype, "bias", on_gpu=on_gpu),
        sink=sink is not None,
        seqlens_k=seqlens_k is not None,
        precision=checks.check_precision(precision, dtype),
        vector_bytes=min(arrays.row_alignment(x) for x in (q, k, v)),
    )
