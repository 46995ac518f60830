"""What was asked: one attention problem without its arrays, and the checks that make it sound.

Both roads build their problem here, so both refuse the same calls with the same words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

from cuflash import arrays, checks, lengths
from cuflash.errors import UnsupportedDtypeError


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
    def in_words(self) -> str:
        """The problem as one reads it in a line."""
        masked = self.window_left >= 0 or self.window_right >= 0
        window = f"window={self.window_left},{self.window_right}"
        parts = [
            self.dtype,
            f"batch={self.batch}",
            f"{'rows' if self.packed else 'seqlen'}={self.seqlen_q}x{self.seqlen_k}",
            f"heads={self.nheads_q}/{self.nheads_k}",
            f"head_dim={self.head_dim}"
            + (f"/{self.head_dim_v}" if self.head_dim_v != self.head_dim else ""),
            "packed" if self.packed else "",
            "causal" if self.causal else window if masked else "",
            f"softcap={self.softcap:g}" if self.softcap else "",
            "alibi" if self.alibi else "",
            f"bias={self.bias}" if self.bias else "",
            "sink" if self.sink else "",
            "seqlens_k" if self.seqlens_k else "",
            self.precision if self.precision != "ieee" else "",
            f"loads={self.vector_bytes}" if self.vector_bytes != 16 else "",
        ]
        return " ".join(part for part in parts if part)

    @property
    def options(self) -> dict[str, Any]:
        """What `describe_problem` makes the problem of: numbers and words that JSON can hold."""
        values = asdict(self)
        values["window_size"] = (values.pop("window_left"), values.pop("window_right"))
        return values

    @property
    def flops(self) -> int:
        """Multiplications and additions of the two matrix products, half of them when causal.

        The usual count of benchmarks, for dense problems: it looks no further at the mask.
        """
        if self.packed:
            raise ValueError("the work of a packed problem depends on the values of cu_seqlens")
        scores = self.batch * self.nheads_q * self.seqlen_q * self.seqlen_k
        return 2 * scores * (self.head_dim + self.head_dim_v) // (2 if self.causal else 1)


def describe_problem(
    *,
    dtype: str = "bf16",
    batch: int = 1,
    seqlen_q: int = 1024,
    seqlen_k: int | None = None,
    nheads_q: int = 1,
    nheads_k: int | None = None,
    head_dim: int = 128,
    head_dim_v: int | None = None,
    packed: bool = False,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi: bool = False,
    bias: str | None = None,
    sink: bool = False,
    seqlens_k: bool = False,
    precision: str = "ieee",
    vector_bytes: int = 16,
) -> AttentionProblem:
    """Say by numbers alone what a call would ask for: a problem whose arrays do not exist yet.

    Parameters
    ----------
    dtype : {"fp16", "bf16", "fp32", "fp64"}
    batch, seqlen_q, seqlen_k, nheads_q, nheads_k, head_dim, head_dim_v : int
        Those of k are, where left out, those of q. Of packed input ``batch`` counts the sequences
        and ``seqlen_q``, ``seqlen_k`` the rows of all of them.
    bias : str, optional
        Dtype of a bias.
    alibi, sink, seqlens_k : bool
        Whether the call has such an argument.
    vector_bytes : int
        Widest load that the arrays will allow: 16, 8, 4 or the element's size.
    softmax_scale, causal, window_size, softcap, precision
        As `cuflash.flash_attn_func` takes them.

    Raises
    ------
    CuflashError
        As a call with such arrays would.
    """
    seqlen_k = seqlen_q if seqlen_k is None else seqlen_k
    nheads_k = nheads_q if nheads_k is None else nheads_k
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    of_q, of_k = (batch, seqlen_q, nheads_q), (batch, seqlen_k, nheads_k)
    checks.check_sizes(batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    shapes = ((*of_q, head_dim), (*of_k, head_dim), (*of_k, head_dim_v))
    q, k, v = (SimpleNamespace(shape=shape) for shape in shapes)
    checks.check_shapes(q, k, v, packed)
    for name, value in (("dtype", dtype), ("bias", bias)):
        if value is not None and value not in arrays.ELEMENT_BYTES:
            raise UnsupportedDtypeError(
                f"{name} is {value!r}: {', '.join(arrays.ELEMENT_BYTES)} can be used"
            )
    window_left, window_right = checks.check_window(window_size, causal)
    return AttentionProblem(
        dtype=dtype,
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        nheads_q=nheads_q,
        nheads_k=nheads_k,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        packed=packed,
        softmax_scale=checks.check_scale(softmax_scale, head_dim),
        window_left=window_left,
        window_right=window_right,
        softcap=checks.check_softcap(softcap),
        alibi=alibi,
        bias=bias,
        sink=sink,
        seqlens_k=seqlens_k,
        precision=checks.check_precision(precision, dtype),
        vector_bytes=max(vector_bytes, arrays.ELEMENT_BYTES[dtype]),
    )


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
