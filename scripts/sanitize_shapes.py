"""Small calls over every road through the kernels, to be run under compute-sanitizer:

    compute-sanitizer --tool memcheck  --error-exitcode 1 python scripts/sanitize_shapes.py
    compute-sanitizer --tool racecheck --error-exitcode 1 python scripts/sanitize_shapes.py

Lengths leave ragged tails in queries and keys; outputs are poisoned first and must come out finite.
"""

from __future__ import annotations

import itertools
from typing import Any

import cupy
import ml_dtypes
import numpy as np

import cuflash

DTYPES = {"fp16": np.float16, "bf16": ml_dtypes.bfloat16, "fp32": np.float32}


def main() -> None:
    rng = np.random.default_rng(0)
    # Arrays of exactly their size: out of a pool's large blocks, a read beyond the end would not be seen.
    cupy.cuda.set_allocator(None)
    calls = 0
    for dtype, dim, causal in itertools.product(
        ("fp16", "bf16", "fp32"), (40, 64, 96, 128, 192, 256), (False, True)
    ):
        run(rng, dtype, (1, 150, 131, 2, 1, dim, dim), causal=causal)
        calls += 1
    for dtype in ("fp16", "fp32"):
        for options in (
            {"softcap": 20.0, "causal": True},
            {"window_size": (20, 7)},
            {"alibi_slopes": cupy.ones(2, np.float32)},
            {"sink": cupy.ones(2, np.float32), "seqlens_k": cupy.asarray([70], np.int32)},
            {"bias": cupy.asarray(rng.standard_normal((1, 1, 150, 131)), np.float32)},
            {"config": "kernel=forward_simt", "causal": True},
            {"config": "num_stages=3 block_n=16"},
        ):
            run(rng, dtype, (1, 150, 131, 2, 1, 64, 64), **options)
            calls += 1
        for dim, dim_v in ((19, 64), (64, 33), (257 // 2, 72)):
            run(rng, dtype, (1, 150, 131, 2, 1, dim, dim_v), causal=True)
            calls += 1
        packed(rng, dtype)
        calls += 1
    print(f"{calls} calls done")


def run(rng: np.random.Generator, dtype: str, sizes: tuple[int, ...], **options: Any) -> None:
    batch, n_q, n_k, heads, kv_heads, dim, dim_v = sizes
    shapes = ((batch, n_q, heads, dim), (batch, n_k, kv_heads, dim), (batch, n_k, kv_heads, dim_v))
    q, k, v = (
        cupy.asarray(rng.standard_normal(s, np.float32).astype(DTYPES[dtype])) for s in shapes
    )
    out = cupy.full((batch, n_q, heads, dim_v), np.nan, q.dtype)
    cuflash.flash_attn_func(q, k, v, out=out, return_lse=True, **options)
    assert np.isfinite(out.get().astype(np.float32)).all(), (dtype, sizes, options)


def packed(rng: np.random.Generator, dtype: str) -> None:
    offsets_q, offsets_k = (
        cupy.asarray([0, 77, 77, 150], np.int32),
        cupy.asarray([0, 5, 90, 131], np.int32),
    )
    q, k, v = (
        cupy.asarray(rng.standard_normal((n, 2, 64), np.float32).astype(DTYPES[dtype]))
        for n in (155, 131, 131)
    )
    out = cuflash.flash_attn_varlen_func(q, k, v, offsets_q, offsets_k, causal=True)
    assert np.isfinite(out.get().astype(np.float32)).all()


if __name__ == "__main__":
    main()
