"""Checks of arguments: shapes, dtypes, devices, options and the array for the result.

A message names the argument, its value, what is allowed and what to do. Only what an array says of
itself is read, so NumPy's and CuPy's are checked alike and nothing waits for a GPU.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from numbers import Real
from typing import Any

import numpy as np

from cuflash import arrays
from cuflash.errors import (
    DeviceMismatchError,
    DimensionMismatchError,
    InvalidArgumentError,
    InvalidDimensionError,
    UnsupportedDtypeError,
    UnsupportedHeadDimError,
)

MAX_HEAD_DIM = 256
# Positions, and sums of a position and a window, must fit in 32 bits with room to spare.
MAX_LENGTH = 2**30
# As Python floats: a comparison with NumPy's would cast, and warn of, a number that is too large.
_FLOAT32_MAX = float(np.finfo(np.float32).max)
_FLOAT32_TINY = float(np.finfo(np.float32).tiny)


def check_layout(layout: str, packed: bool) -> None:
    """Refuse an unknown layout; packed rows have only one."""
    allowed = ("bshd", "thd") if packed else ("bshd", "bhsd")
    if layout not in allowed:
        rows = "packed arrays (total, nheads, head_dim)" if packed else "4-D arrays"
        raise InvalidArgumentError(f"layout is {layout!r}: {' or '.join(allowed)} for {rows}")


def check_devices(**named: Any) -> str:
    """Where the call's arrays live: all of them on one device."""
    device = arrays.device_of(named["q"])
    for name, x in named.items():
        if x is None:
            continue
        arrays.require_array(name, x)
        other = arrays.device_of(x)
        if other != device:
            raise DeviceMismatchError(
                f"{name} is on {other} but q is on {device}: all arrays of a call must be on one"
                f" device; copy {name} there (cupy.asarray, or cupy.asnumpy for the CPU)"
            )
    return device


def check_dtypes(q: Any, k: Any, v: Any, on_gpu: bool) -> str:
    """Name of the one dtype of q, k and v."""
    dtype = arrays.dtype_name(q.dtype, "q", on_gpu=on_gpu)
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise UnsupportedDtypeError(
                f"{name} has dtype {x.dtype} but q has {q.dtype}: q, k and v must have one dtype;"
                f" cast with {name}.astype(q.dtype)"
            )
    return dtype


def check_ndim(q: Any, k: Any, v: Any, layout: str, packed: bool) -> None:
    """Refuse arrays with another number of dimensions than the layout has."""
    axes = ("total, nheads, head_dim" if packed else
            {"bshd": "batch, seqlen, nheads, head_dim",
             "bhsd": "batch, nheads, seqlen, head_dim"}[layout])  # fmt: skip
    ndim = 3 if packed else 4
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != ndim:
            hint = "use flash_attn_func for 4-D arrays" if packed else (
                "use flash_attn_varlen_func for packed 3-D arrays" if x.ndim == 3 else
                "reshape it")  # fmt: skip
            raise InvalidDimensionError(
                f"{name} has shape {tuple(x.shape)}: {ndim} dimensions ({axes}) are needed; {hint}"
            )


def check_sizes(**named: int) -> None:
    """Refuse a negative size; 0 is a size."""
    for name, size in named.items():
        if size < 0:
            raise InvalidDimensionError(f"{name} is {size}: 0 or more is needed")


def check_shapes(q: Any, k: Any, v: Any, packed: bool) -> None:
    """Check sizes of (batch, seqlen, nheads, head_dim) or (total, nheads, head_dim) arrays."""
    for name, size in (("q", q.shape[-1]), ("k", k.shape[-1]), ("v", v.shape[-1])):
        if not 1 <= size <= MAX_HEAD_DIM:
            raise UnsupportedHeadDimError(
                f"{name} has head_dim {size}: 1 to {MAX_HEAD_DIM} can be used; split wider heads or"
                " project them down"
            )
    _same("k", "head_dim", k.shape[-1], "q", q.shape[-1])
    _same("v", "nheads", v.shape[-2], "k", k.shape[-2])
    _same("v", "rows (seqlen)", v.shape[-3], "k", k.shape[-3])
    if not packed:
        _same("k", "batch", k.shape[0], "q", q.shape[0])
        _same("v", "batch", v.shape[0], "q", q.shape[0])
    nheads_q, nheads_k = q.shape[-2], k.shape[-2]
    if nheads_q == 0 or nheads_k == 0:
        name = "q" if nheads_q == 0 else "k"
        raise InvalidDimensionError(f"{name} has 0 heads: at least 1 is needed")
    if nheads_q % nheads_k:
        raise DimensionMismatchError(
            f"q has {nheads_q} heads and k has {nheads_k}: the heads of q must be a multiple of"
            " those of k (query head h reads key head h // (nheads_q / nheads_k)); repeat heads"
        )
    for name, x in (("q", q), ("k", k)):
        size = max(x.shape[:-1])
        if size > MAX_LENGTH:
            raise InvalidDimensionError(
                f"{name} has a dimension of {size}: lengths, heads and batches up to 2**30 can be"
                " used; split the call"
            )


def _same(name: str, axis: str, size: int, other: str, needed: int) -> None:
    if size != needed:
        raise DimensionMismatchError(
            f"{name} has {axis} {size} but {other} has {needed}: they must be equal"
        )


def check_strides(on_gpu: bool, **named: Any) -> None:
    """Refuse, on a GPU, arrays whose elements do not lie a whole number of elements apart."""
    for name, x in named.items():
        if on_gpu and x is not None and x.size:
            taken = [s for n, s in zip(x.shape, x.strides, strict=True) if n > 1]
            if any(a % x.itemsize for a in (arrays.pointer(x), *taken)):
                raise InvalidArgumentError(
                    f"{name} has strides {tuple(x.strides)} bytes, not multiples of its"
                    f" {x.itemsize}-byte elements: copy it ({name}.copy())"
                )


def check_per_head(name: str, x: Any, allowed: list[tuple[int, ...]]) -> None:
    """Check an array of one number a head."""
    if tuple(x.shape) not in allowed:
        raise DimensionMismatchError(
            f"{name} has shape {tuple(x.shape)}: {' or '.join(map(str, allowed))} is needed"
        )
    # On a GPU too any width is fine: it is a few numbers, cast to float32.
    arrays.dtype_name(x.dtype, name)


def check_bias(bias: Any, packed: bool, full: tuple[int, ...]) -> None:
    """Check that a bias broadcasts to (batch, nheads_q, seqlen_q, seqlen_k)."""
    if packed:
        raise InvalidArgumentError(
            "bias was given with cu_seqlens: packed sequences have no common (seqlen_q, seqlen_k)"
            " plane; pad the sequences and use flash_attn_func with seqlens_k"
        )
    shape = tuple(bias.shape)
    fits = len(shape) <= 4 and all(
        n in (1, m) for n, m in zip(reversed(shape), reversed(full), strict=False)
    )
    if not fits:
        raise DimensionMismatchError(
            f"bias has shape {shape}: it must broadcast to (batch, nheads_q, seqlen_q, seqlen_k) ="
            f" {full}"
        )


def check_out(out: Any, q: Any, shape: tuple[int, ...], inputs: dict[str, Any]) -> None:
    """Check the array that the caller wants the result in."""
    if tuple(out.shape) != shape:
        raise DimensionMismatchError(f"out has shape {tuple(out.shape)}: {shape} is needed")
    if out.dtype != q.dtype:
        raise UnsupportedDtypeError(f"out has dtype {out.dtype}: {q.dtype}, as q has, is needed")
    if arrays.is_numpy(out) and not out.flags.writeable:
        raise InvalidArgumentError("out is read-only: pass an array that can be written")
    if out.size and any(s == 0 and n > 1 for n, s in zip(out.shape, out.strides, strict=True)):
        raise InvalidArgumentError(
            f"out has strides {tuple(out.strides)}: elements that share memory cannot hold a result"
        )
    for name, x in inputs.items():
        if x is not None and arrays.overlap(out, x):
            raise InvalidArgumentError(
                f"out overlaps {name}: {name} would change while it is read; pass another array"
            )


def check_window(window_size: Sequence[int], causal: bool) -> tuple[int, int]:
    """Window as (left, right) with causal folded in; -1 = no bound."""
    try:
        left, right = (operator.index(w) for w in window_size)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(
            f"window_size is {window_size!r}: two integers (left, right) are needed, -1 = no bound"
        ) from error
    if left < -1 or right < -1:
        raise InvalidArgumentError(
            f"window_size is {(left, right)}: each side is a distance of 0 or more, or -1 for no"
            " bound"
        )
    if causal:
        right = 0
    # A distance that no two positions have is no bound; folding it keeps sums within 32 bits.
    return tuple(-1 if w >= MAX_LENGTH else w for w in (left, right))  # type: ignore[return-value]


def check_scale(softmax_scale: float | None, head_dim: int) -> float:
    """Softmax scale as a number: any finite one, by default 1/sqrt(head_dim)."""
    if softmax_scale is None:
        return 1.0 / math.sqrt(head_dim)
    if not isinstance(softmax_scale, Real) or not abs(float(softmax_scale)) <= _FLOAT32_MAX:
        raise InvalidArgumentError(
            f"softmax_scale is {softmax_scale!r}: a number that float32 can hold is needed, or None"
            " for 1/sqrt(head_dim)"
        )
    return float(softmax_scale)


def check_softcap(softcap: float) -> float:
    """Cap of the scores as a number: 0 = none, else positive and finite."""
    good = isinstance(softcap, Real) and (
        softcap == 0 or _FLOAT32_TINY <= float(softcap) <= _FLOAT32_MAX
    )
    if not good:
        raise InvalidArgumentError(
            f"softcap is {softcap!r}: a positive number is needed, or 0 for none"
        )
    return float(softcap)


def check_precision(precision: str, dtype: str) -> str:
    """Precision of the products: only float32 has a choice, other dtypes read "ieee"."""
    if precision not in ("ieee", "tf32"):
        raise InvalidArgumentError(
            f"precision is {precision!r}: 'ieee' (float32-accurate) or 'tf32' (faster, error near"
            " 1e-3) can be asked for"
        )
    return precision if dtype == "fp32" else "ieee"
