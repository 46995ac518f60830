"""Hypothesis strategies over attention problems, and the arrays of a drawn problem.

A drawn problem is small and printable; `build` makes its arrays for NumPy or CuPy from a seed, in
odd storage, with NaN and inf behind the used keys and NaN all around the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import cases
import numpy as np
import support
from hypothesis import strategies as st

from cuflash.api import flash_attn_func, flash_attn_varlen_func
from cuflash.arrays import dtype_of

Shape = tuple[int, ...]

# How (..., seqlen, nheads, head_dim) may lie in a buffer: the buffer's shape, and the view of it.
STORAGE: dict[str, tuple[Callable[..., Shape], Callable[[Any, Shape], Any]]] = {
    "contiguous": (lambda *n, s, h, d: (*n, s, h, d), lambda x, shape: x),
    "heads first": (lambda *n, s, h, d: (*n, h, s, d), lambda x, shape: x.swapaxes(-3, -2)),
    "rows last": (
        lambda *n, s, h, d: (*n, h, d, s),
        lambda x, shape: x.swapaxes(-1, -2).swapaxes(-3, -2),
    ),
    "every second row": (lambda *n, s, h, d: (*n, 2 * s, h, d), lambda x, shape: x[..., ::2, :, :]),
    "rows reversed": (lambda *n, s, h, d: (*n, s, h, d), lambda x, shape: x[..., ::-1, :, :]),
    "one element in": (lambda *n, s, h, d: (*n, s, h, d + 3), lambda x, shape: x[..., 1:-2]),
    "every second column": (lambda *n, s, h, d: (*n, s, h, 2 * d), lambda x, shape: x[..., ::2]),
    "middle of three": (lambda *n, s, h, d: (*n, s, 3, h, d), lambda x, shape: x[..., 1, :, :]),
    # CuPy answers np.broadcast_to for its own arrays.
    "one head for all": (lambda *n, s, h, d: (*n, s, 1, d), np.broadcast_to),
}
WRITABLE = [name for name in STORAGE if name != "one head for all"]


@dataclass(frozen=True)
class Drawn:
    """One problem: its sizes and options, where its arrays lie, and the seed of their content."""

    dtype: str
    lengths_q: tuple[int, ...]  # of each sequence; dense: all the same
    lengths_k: tuple[int, ...]
    used_k: tuple[int, ...] | None  # seqlens_k
    packed: bool
    slack: int  # packed: rows behind the last sequence
    nheads_k: int
    group: int
    head_dim: int
    head_dim_v: int
    storage: tuple[str, str, str, str]  # of q, k, v, out
    layout: str
    causal: bool
    window: tuple[int, int]
    softcap: float
    scale: float | None
    alibi: str | None  # "head" or "batch and head"
    bias: tuple[str, tuple[bool, bool, bool, bool]] | None  # dtype, and the axes that it has
    sink: bool
    seed: int


@st.composite
def problems(
    draw: st.DrawFn,
    dtypes: Sequence[str] = ("fp16", "bf16", "fp32"),
    max_length: int = 300,
    max_head_dim: int = 256,
) -> Drawn:
    """Draw a problem: every length from 0, any head dim, groups, storage, masks and caps."""
    # Small sizes and those around tiles are where the mistakes are.
    length = st.one_of(
        st.integers(0, 5),
        st.sampled_from([n for n in (15, 16, 17, 63, 64, 65, 127, 128, 129) if n <= max_length]),
        st.integers(0, max_length),
    )
    dim = st.one_of(
        st.sampled_from([n for n in (8, 32, 64, 72, 128, 256) if n <= max_head_dim]),
        st.integers(1, max_head_dim),
    )
    packed = draw(st.booleans())
    batch = draw(st.sampled_from([2, 3, 1, 4, 0] if packed else [2, 1, 2, 0]))
    if packed:
        of_batch = st.lists(length, min_size=batch, max_size=batch).map(tuple)
    else:
        of_batch = length.map(lambda n: (n,) * batch)
    lengths_q, lengths_k = draw(of_batch), draw(of_batch)
    used_k = None
    if draw(st.integers(0, 3)) == 0:
        used_k = tuple(draw(st.integers(0, n)) for n in lengths_k)
    head_dim = draw(dim)
    bias = None
    if not packed and draw(st.integers(0, 3)) == 0:
        axes = draw(st.tuples(st.booleans(), st.booleans(), st.booleans(), st.booleans()))
        bias = (draw(st.sampled_from(["fp16", "bf16", "fp32"])), axes)
    distance = st.one_of(st.just(-1), st.integers(0, 40), st.integers(0, max_length))
    stored = st.sampled_from(sorted(STORAGE))
    return Drawn(
        dtype=draw(st.sampled_from(dtypes)),
        lengths_q=lengths_q,
        lengths_k=lengths_k,
        used_k=used_k,
        packed=packed,
        slack=draw(st.sampled_from([0, 0, 3])) if packed else 0,
        nheads_k=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 4)),
        head_dim=head_dim,
        head_dim_v=draw(st.one_of(st.just(head_dim), dim)),
        storage=(draw(stored), draw(stored), draw(stored), draw(st.sampled_from(WRITABLE))),
        layout="thd" if packed else draw(st.sampled_from(["bshd", "bhsd"])),
        causal=draw(st.booleans()),
        window=draw(st.one_of(st.just((-1, -1)), st.tuples(distance, distance))),
        softcap=draw(st.sampled_from([0.0, 0.0, 0.0, 1.0, 15.0])),
        scale=draw(st.sampled_from([None, None, None, 0.0, 0.05, -0.3, 1.0])),
        alibi=draw(st.sampled_from([None, None, "head", "batch and head"])),
        bias=bias,
        sink=draw(st.integers(0, 3)) == 0,
        seed=draw(st.integers(0, 2**32 - 1)),
    )


@dataclass
class Built:
    """The arrays of a problem, and the call on them; ``clean`` is the same for `cases.ref`."""

    drawn: Drawn
    q: Any
    k: Any
    v: Any
    out: Any
    out_buffer: Any
    options: dict[str, Any]
    clean: dict[str, Any]

    def run(self) -> tuple[Any, Any]:
        """Call cuflash: (out, lse)."""
        call = flash_attn_varlen_func if self.drawn.packed else flash_attn_func
        options = {**self.options, "out": self.out, "return_lse": True}
        returned, lse = call(self.q, self.k, self.v, **options)
        assert returned is self.out
        return returned, lse

    def check(self, lse_atol: float = 1e-4) -> None:
        """Run, and hold out and lse to float64, and the memory around out to what it was."""
        out, lse = self.run()
        expected, expected_lse = cases.ref(**self.clean)
        plain = support.plain_attention(**self.clean, dtype=dtype_of(self.drawn.dtype))
        if self.drawn.layout == "bhsd":
            out = out.swapaxes(1, 2)
        support.assert_accurate(self.drawn.dtype, out, expected, plain)
        support.assert_lse(lse, expected_lse, lse_atol)
        out[...] = np.nan
        around = support.to_numpy(self.out_buffer)
        assert np.isnan(around.astype(np.float32)).all(), "memory around out was written"


def build(drawn: Drawn, xp: Any) -> Built:
    """Make the arrays of a drawn problem in ``xp`` (numpy or cupy)."""
    rng = np.random.default_rng(drawn.seed)
    dtype = dtype_of(drawn.dtype)
    heads = drawn.nheads_k * drawn.group
    batch = len(drawn.lengths_q)
    offsets_q = np.cumsum([0, *drawn.lengths_q])
    offsets_k = np.cumsum([0, *drawn.lengths_k])

    def rows(lengths: tuple[int, ...]) -> Shape:
        if drawn.packed:
            return (sum(lengths) + drawn.slack,)
        return batch, lengths[0] if lengths else 7

    def filled(lengths: tuple[int, ...], nheads: int, dim: int, stored: str) -> tuple[Any, Any]:
        shape = (*rows(lengths), nheads, dim)
        buffer, view = _buffer(shape, stored)
        host = rng.standard_normal(buffer).astype(dtype)
        return host, view

    clean: dict[str, Any] = {}
    device: dict[str, Any] = {}
    for name, lengths, nheads, dim, stored in (
        ("q", drawn.lengths_q, heads, drawn.head_dim, drawn.storage[0]),
        ("k", drawn.lengths_k, drawn.nheads_k, drawn.head_dim, drawn.storage[1]),
        ("v", drawn.lengths_k, drawn.nheads_k, drawn.head_dim_v, drawn.storage[2]),
    ):
        host, view = filled(lengths, nheads, dim, stored)
        clean[name] = view(host).astype(np.float64)
        if name != "q" and view(host).flags.writeable:
            for unused in _unused(drawn, offsets_k):
                view(host)[unused] = np.nan if name == "k" else np.inf
        device[name] = view(xp.asarray(host))

    buffer, view = _buffer((*rows(drawn.lengths_q), heads, drawn.head_dim_v), drawn.storage[3])
    out_buffer = xp.asarray(np.full(buffer, np.nan, dtype))
    device["out"] = view(out_buffer)
    if drawn.layout == "bhsd":
        device = {name: x.swapaxes(1, 2) for name, x in device.items()}

    options: dict[str, Any] = {}
    if drawn.alibi:
        shape = (heads,) if drawn.alibi == "head" else (batch, heads)
        options["alibi_slopes"] = rng.uniform(-0.1, 1, shape).astype(np.float32)
    if drawn.sink:
        options["sink"] = rng.standard_normal(heads).astype(np.float32)
    if drawn.bias:
        name, axes = drawn.bias
        full = (batch, heads, rows(drawn.lengths_q)[1], rows(drawn.lengths_k)[1])
        shape = tuple(n if there else 1 for n, there in zip(full, axes, strict=True))
        bias = rng.standard_normal(shape)
        bias[rng.random(shape) < 0.1] = -np.inf
        options["bias"] = bias.astype(dtype_of(name))
    clean |= {name: x.astype(np.float64) for name, x in options.items()}
    options = {name: xp.asarray(x) for name, x in options.items()}

    same = {"causal": drawn.causal, "window_size": drawn.window, "softcap": drawn.softcap}
    same["softmax_scale"] = drawn.scale
    counts: dict[str, Any] = {}
    if drawn.packed:
        counts = {"cu_seqlens_q": offsets_q, "cu_seqlens_k": offsets_k}
    if drawn.used_k is not None:
        counts["seqlens_k"] = np.array(drawn.used_k, np.int64)
    clean |= counts | same
    if drawn.packed and drawn.used_k is not None:
        _gather_used(clean, drawn, offsets_k)
    on_device = {name: xp.asarray(x.astype(np.int32)) for name, x in counts.items()}
    options |= on_device | same | {"layout": drawn.layout}
    return Built(drawn, **device, out_buffer=out_buffer, options=options, clean=clean)


def _buffer(shape: Shape, stored: str) -> tuple[Shape, Callable[[Any], Any]]:
    size, view = STORAGE[stored]
    *lead, s, h, d = shape
    return size(*lead, s=s, h=h, d=d), lambda x: view(x, shape)


def _unused(drawn: Drawn, offsets_k: np.ndarray) -> list[Any]:
    """Indices of the key rows that no query may see."""
    if not drawn.packed:
        return [(b, slice(n, None)) for b, n in enumerate(drawn.used_k or ())]
    used = drawn.used_k if drawn.used_k is not None else drawn.lengths_k
    behind = [slice(offsets_k[b] + n, offsets_k[b + 1]) for b, n in enumerate(used)]
    return [*behind, slice(offsets_k[-1], None)]


def _gather_used(clean: dict[str, Any], drawn: Drawn, offsets_k: np.ndarray) -> None:
    """Say packed seqlens_k to `cases.ref`, which has no such thing: drop the unused rows."""
    assert drawn.used_k is not None
    kept = [np.arange(offsets_k[b], offsets_k[b] + n) for b, n in enumerate(drawn.used_k)]
    index = np.concatenate([np.arange(0), *kept]).astype(int)
    clean["k"], clean["v"] = clean["k"][index], clean["v"][index]
    clean["cu_seqlens_k"] = np.cumsum([0, *drawn.used_k])
    del clean["seqlens_k"]
