"""What CPU and GPU tests share: running a case of cases.py, and how large an error may be."""

from __future__ import annotations

from typing import Any

import cases
import numpy as np

from cuflash.api import flash_attn_func, flash_attn_varlen_func
from cuflash.arrays import dtype_of

# cases.py speaks of dtypes by their long names.
LONG_NAMES = {str(dtype_of(name)): name for name in ("fp16", "bf16", "fp32")}

# What the plain computation cannot be blamed for: it may be exact by luck where another order of
# the same sums is not. (What is expected is float64 too: there the bound is this alone.)
SLACK = {name: factor * 2.0**-bits for name, factor, bits in
         (("fp16", 1, 10), ("bf16", 1, 7), ("fp32", 8, 23), ("fp64", 64, 52))}  # fmt: skip

# The GPU's fp32: small terms of its output in bf16 (2^-20 of it), exponentials to 2 units in the last place.
GPU_SLACK = {**SLACK, "fp32": 20 * 2.0**-23}


def case_parameters() -> list[tuple[str, str, str | None]]:
    """Every (case, dtype, dtype of its bias): all dtypes that the case allows."""
    found: list[tuple[str, str, str | None]] = []
    for name, make in cases.CASES.items():
        dtypes = [LONG_NAMES[d] for d in cases.DTYPES.get(name, LONG_NAMES)]
        has_bias = "bias" in make()[3]
        for dtype in dtypes:
            bias_dtypes = {dtype, "fp32"} if has_bias else {None}
            found += [(name, dtype, bias_dtype) for bias_dtype in sorted(bias_dtypes, key=str)]
    return found


def run_case(name: str, dtype: str, bias_dtype: str | None, xp: Any) -> None:
    """Run a case on the arrays of ``xp`` (numpy or cupy) into an ``out`` full of NaN; check it.

    Arrays keep the strides that the case gives them.
    """
    q, k, v, options, expected_out, expected_lse = cases.CASES[name]()
    options = dict(options)
    arrays = [cases.to_device(x, xp, dtype_of(dtype)) for x in (q, k, v)]
    for key, kind in (("bias", bias_dtype), ("alibi_slopes", "fp32"), ("sink", "fp32")):
        if key in options:
            options[key] = xp.asarray(np.asarray(options[key]).astype(dtype_of(kind)))
    out = xp.asarray(np.full(expected_out.shape, np.nan, dtype_of(dtype)))
    call = flash_attn_varlen_func if "cu_seqlens_q" in options else flash_attn_func
    returned, lse = call(*arrays, **options, out=out, return_lse=True)
    assert returned is out
    assert lse.dtype == np.float32
    cases.compare(to_numpy(out), to_numpy(lse), expected_out, expected_lse, str(dtype_of(dtype)))


def to_numpy(x: Any) -> np.ndarray:
    """Copy a CuPy array to the host; give back any other as it is."""
    return x.get() if hasattr(x, "get") else x


def plain_attention(q: Any, k: Any, v: Any, dtype: Any, **options: Any) -> np.ndarray:
    """The plain same-precision computation: every step rounded to ``dtype``.

    It takes what `cases.ref` takes. Inside one step numbers are float32 (float64 for float64), as
    in a library's matrix product of that dtype.
    """
    wide = np.float64 if dtype == np.float64 else np.float32

    def rounded(x: np.ndarray) -> np.ndarray:
        return np.asarray(x, wide).astype(dtype).astype(wide)

    out = np.zeros((*q.shape[:-1], v.shape[-1]))
    with np.errstate(all="ignore"):
        for qi, _, _, h, _, qq, kk, vv, scale, cap, mask, add, sink in cases._parts(
            q, k, v, options
        ):
            qq, kk, vv = (x.astype(wide) for x in (qq, kk, vv))
            scores = rounded(rounded(_running_product(qq, kk.T)) * wide(scale))
            if cap:
                scores = rounded(wide(cap) * np.tanh(rounded(scores / wide(cap))))
            scores = np.where(mask, rounded(scores + rounded(add)), wide(-np.inf))
            top = scores.max(-1, initial=-np.inf if sink is None else sink)
            top = np.where(np.isneginf(top), 0, top).astype(wide)
            weights = rounded(np.exp(rounded(scores - top[:, None])))
            total = rounded(weights.sum(-1) + (0 if sink is None else np.exp(wide(sink) - top)))
            weights = rounded(weights / np.where(total > 0, total, 1)[:, None])
            out[(*qi, h)] = rounded(_running_product(weights, vv))
    return out


def _running_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Matrix product in which each element is one running sum.

    BLAS sums in another order for every shape, with up to five times less error: a bound from its
    luck would ask the same luck of every tile.
    """
    total = np.zeros((a.shape[0], b.shape[1]), a.dtype)
    for i in range(a.shape[1]):
        total += a[:, i, None] * b[i]
    return total


def accuracy_bound(
    dtype: str, expected: np.ndarray, plain: np.ndarray, slack: dict[str, float] = SLACK
) -> float:
    """Largest error allowed: twice that of the plain computation, and a small constant."""
    plain_error = np.abs(plain - expected).max(initial=0)
    return float(2 * plain_error + slack[dtype] * max(1.0, np.abs(expected).max(initial=0)))


def assert_accurate(dtype: str, out: Any, expected: np.ndarray, plain: np.ndarray) -> None:
    """Hold a result to `accuracy_bound`."""
    error = np.abs(to_numpy(out).astype(np.float64) - expected).max(initial=0)
    bound = accuracy_bound(
        dtype, expected, plain, SLACK if isinstance(out, np.ndarray) else GPU_SLACK
    )
    assert error <= bound, f"error {error:.3g}, allowed {bound:.3g}"


def assert_lse(lse: Any, expected: np.ndarray, atol: float = 1e-4) -> None:
    """Hold an lse to the float64 one: -inf in the same rows, elsewhere close."""
    lse = to_numpy(lse)
    assert lse.dtype == np.float32
    assert lse.shape == expected.shape
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(expected))
    np.testing.assert_allclose(lse, expected, rtol=1e-5, atol=atol)
