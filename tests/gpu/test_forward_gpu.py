"""What small random problems do not reach: long sequences, big arrays, streams, graphs, memory, repeats."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import cases
import numpy as np
import pytest
import support

import cuflash
from cuflash.arrays import dtype_of

pytestmark = pytest.mark.gpu


def arrays(rng: np.random.Generator, dtype: str, *shapes: tuple[int, ...]) -> list[Any]:
    import cupy

    return [
        cupy.asarray(rng.standard_normal(s, np.float32)).astype(dtype_of(dtype)) for s in shapes
    ]


def check_head(q: Any, k: Any, v: Any, out: Any, lse: Any, dtype: str, **options: Any) -> None:
    """Hold one (batch, head) of a result to float64."""
    q, k, v = (support.to_numpy(x).astype(np.float64) for x in (q, k, v))
    expected, expected_lse = cases.ref(
        q[None, :, None], k[None, :, None], v[None, :, None], **options
    )
    plain = support.plain_attention(
        q[None, :, None], k[None, :, None], v[None, :, None], dtype=dtype_of(dtype), **options
    )
    support.assert_accurate(dtype, out[None, :, None], expected, plain)
    support.assert_lse(support.to_numpy(lse)[None, None], expected_lse)


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_several_tiles_and_a_ragged_tail(
    rng: np.random.Generator, dtype: str, head_dim: int, causal: bool
) -> None:
    q, k, v = arrays(
        rng, dtype, (2, 517, 4, head_dim), (2, 709, 2, head_dim), (2, 709, 2, head_dim)
    )
    out, lse = cuflash.flash_attn_func(q, k, v, causal=causal, return_lse=True)
    check_head(q[1, :, 3], k[1, :, 1], v[1, :, 1], out[1, :, 3], lse[1, 3], dtype, causal=causal)


def test_tf32_is_faster_arithmetic_not_another_result(rng: np.random.Generator) -> None:
    q, k, v = arrays(rng, "fp32", *[(1, 300, 2, 64)] * 3)
    exact = cuflash.flash_attn_func(q, k, v)
    coarse = cuflash.flash_attn_func(q, k, v, precision="tf32")
    error = float(abs(coarse - exact).max())
    assert 1e-6 < error < 5e-3


@pytest.mark.parametrize("tile", ["block_m=64 block_n=32 num_warps=4 num_stages=1", "block_m=32,num_warps=1",
                                  "block_n=32 num_stages=3", "block_m=64 num_warps=4 q_in_registers=1"])  # fmt: skip
def test_any_tile_gives_the_same(rng: np.random.Generator, tile: str) -> None:
    q, k, v = arrays(rng, "fp16", *[(1, 333, 2, 64)] * 3)
    expected = cuflash.flash_attn_func(q, k, v, causal=True)
    out = cuflash.flash_attn_func(q, k, v, causal=True, config=tile)
    plan = cuflash.last_plan()
    assert plan is not None and "config=" in plan.reason
    np.testing.assert_allclose(
        support.to_numpy(out).astype(float), support.to_numpy(expected).astype(float), atol=2e-3
    )


def test_a_tile_too_large_is_refused_with_the_nearest_that_fits(rng: np.random.Generator) -> None:
    q, k, v = arrays(rng, "fp16", *[(1, 64, 1, 256)] * 3)
    with pytest.raises(cuflash.errors.InvalidConfigError, match="nearest tile that fits"):
        cuflash.flash_attn_func(q, k, v, config="block_m=256 block_n=256 num_warps=8")


def test_repeats_are_bitwise_equal(rng: np.random.Generator) -> None:
    import cupy

    q, k, v = arrays(rng, "bf16", *[(2, 700, 4, 128)] * 3)
    first = cuflash.flash_attn_func(q, k, v, causal=True).view(cupy.uint16)
    for _ in range(20):
        assert (cuflash.flash_attn_func(q, k, v, causal=True).view(cupy.uint16) == first).all()


def test_long_sequence_needs_no_memory_but_out_and_lse(rng: np.random.Generator) -> None:
    import cupy

    n = 131072
    q, k, v = arrays(rng, "bf16", *[(1, n, 1, 64)] * 3)
    cuflash.flash_attn_func(q[:, :256], k[:, :256], v[:, :256])
    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    before = pool.used_bytes()
    out, lse = cuflash.flash_attn_func(q, k, v, causal=True, return_lse=True)
    assert pool.used_bytes() - before <= out.nbytes + lse.nbytes + 1024
    rows = slice(n - 40, n)
    part, part_lse = cuflash.flash_attn_func(q[:, rows], k, v, causal=True, return_lse=True)
    np.testing.assert_allclose(
        support.to_numpy(out[:, rows]).astype(float),
        support.to_numpy(part).astype(float),
        atol=1e-2,
    )
    np.testing.assert_allclose(
        support.to_numpy(lse[:, :, rows]), support.to_numpy(part_lse), rtol=1e-5
    )
    reference_k, reference_v = (support.to_numpy(x)[0, :, 0].astype(np.float64) for x in (k, v))
    scores = support.to_numpy(q)[0, -1, 0].astype(np.float64) @ reference_k.T / 8
    weights = np.exp(scores - scores.max())
    np.testing.assert_allclose(
        support.to_numpy(out)[0, -1, 0].astype(float),
        weights @ reference_v / weights.sum(),
        atol=2e-3,
    )


def test_more_than_2_to_31_elements(rng: np.random.Generator) -> None:
    import cupy

    batch, n, heads, dim = 1100, 512, 60, 64
    assert batch * n * heads * dim > 2**31
    generator = cupy.random.default_rng(0)

    def big() -> Any:
        x = cupy.empty((batch, n, heads, dim), np.float16)
        for b in range(0, batch, 100):
            x[b : b + 100] = generator.standard_normal((100, n, heads, dim), dtype=np.float32)
        return x

    q, k = big(), big()
    v = q
    out, lse = cuflash.flash_attn_func(q, k, v, causal=True, return_lse=True)
    check_head(
        q[-1, :, -1], k[-1, :, -1], v[-1, :, -1], out[-1, :, -1], lse[-1, -1], "fp16", causal=True
    )


def test_a_row_stride_beyond_2_to_31_elements(rng: np.random.Generator) -> None:
    import cupy

    dim, n = 32, 68  # the last row starts beyond 2**31
    base = cupy.zeros(2**31 + 2**27, np.float16)
    stride = 2**31 // 64
    q = cupy.lib.stride_tricks.as_strided(base, (1, n, 1, dim), (0, 2 * stride, 0, 2))
    values = cupy.asarray(rng.standard_normal((1, n, 1, dim))).astype(np.float16)
    q[...] = values
    out = cuflash.flash_attn_func(q, q, q)
    expected = cuflash.flash_attn_func(values, values, values)
    assert (out == expected).all()


def test_many_heads_go_on_the_grid(rng: np.random.Generator) -> None:
    q, k, v = arrays(rng, "fp16", *[(70000, 3, 1, 16)] * 3)
    out = cuflash.flash_attn_func(q, k, v)
    last = cuflash.flash_attn_func(q[-1:], k[-1:], v[-1:])
    assert (out[-1:] == last).all()


def test_stream_and_graph_capture(rng: np.random.Generator) -> None:
    import cupy

    q, k, v = arrays(rng, "bf16", *[(1, 300, 2, 64)] * 3)
    expected = cuflash.flash_attn_func(q, k, v)
    out = cupy.full_like(expected, np.nan)
    cuflash.flash_attn_func(q, k, v, out=out)
    out[...] = np.nan
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        cuflash.flash_attn_func(q, k, v, out=out)
        graph = stream.end_capture()
        assert np.isnan(support.to_numpy(out).astype(float)).all()
        q[...] = q[:, ::-1].copy()
        graph.launch()
        stream.synchronize()
    np.testing.assert_array_equal(support.to_numpy(out), support.to_numpy(expected[:, ::-1]))


def test_options_that_have_no_hash(rng: np.random.Generator) -> None:
    q, k, v = arrays(rng, "fp16", *[(1, 40, 1, 32)] * 3)
    expected = cuflash.flash_attn_func(q, k, v, causal=True, window_size=(8, 0))
    options: dict[str, Any] = {"causal": np.array(True), "window_size": (np.array(8), 0)}
    assert (cuflash.flash_attn_func(q, k, v, **options) == expected).all()


def test_nothing_is_kept(rng: np.random.Generator) -> None:
    import cupy

    q, k, v = arrays(rng, "fp16", *[(1, 200, 2, 64)] * 3)
    cuflash.flash_attn_func(q, k, v, return_lse=True)
    pool = cupy.get_default_memory_pool()
    before = pool.used_bytes()
    for _ in range(100):
        cuflash.flash_attn_func(q, k, v, return_lse=True)
    assert pool.used_bytes() == before


def test_first_use_from_many_threads(rng: np.random.Generator) -> None:
    q, k, v = arrays(rng, "fp16", *[(1, 200, 2, 48)] * 3)
    results: list[Any] = [None] * 16

    def work(i: int) -> None:
        results[i] = support.to_numpy(cuflash.flash_attn_func(q, k, v, config="block_n=32"))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(16)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for result in results:
        np.testing.assert_array_equal(result, results[0])


def test_plan_says_where_the_kernel_came_from(rng: np.random.Generator) -> None:
    q, k, v = arrays(rng, "fp16", *[(1, 100, 1, 32)] * 3)
    cuflash.flash_attn_func(q, k, v, config="block_n=48")
    first = cuflash.last_plan()
    cuflash.flash_attn_func(q, k, v, config="block_n=48")
    second = cuflash.last_plan()
    cuflash.flash_attn_func(q[:, :50], k, v, config="block_n=48")
    other_shape = cuflash.last_plan()
    assert first is not None and second is not None and other_shape is not None
    assert first.origin in ("compile", "disk") and second.origin == "memory"
    assert other_shape.origin == "memory"
    assert first.spill_bytes == 0 and first.registers and first.shared_bytes and first.compile_ms
    assert "block_n=48" in first.tile and "config=" in first.reason


def test_arrays_of_torch_come_back_as_torch(rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    q = torch.randn(1, 200, 2, 64, device="cuda", dtype=torch.bfloat16)
    out = cuflash.flash_attn_func(q, q, q, causal=True)
    assert isinstance(out, torch.Tensor) and out.device == q.device
    x = q.transpose(1, 2).float()
    expected = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True).transpose(
        1, 2
    )
    torch.testing.assert_close(out.float(), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("mask", ["causal", "window", "bias"])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_masked_key_does_not_leak(
    rng: np.random.Generator, dtype: str, head_dim: int, mask: str, poison: float
) -> None:
    """NaN in k and v reaches the rows that see the key and no other: 0 * NaN in a tile is not enough."""
    n, bad = 300, 170
    q, k, v = arrays(rng, dtype, *[(1, n, 1, head_dim)] * 3)
    options: dict[str, Any] = {}
    rows = np.arange(n)
    sees = rows >= bad
    if mask == "causal":
        options["causal"] = True
    elif mask == "window":
        options["window_size"] = (20, 10)
        sees = (rows - 20 <= bad) & (bad <= rows + 10)
    else:
        import cupy

        bias = np.zeros((1, 1, n, n), np.float32)
        bias[0, 0, ~sees, bad] = -np.inf
        options["bias"] = cupy.asarray(bias)
    clean = support.to_numpy(cuflash.flash_attn_func(q, k, v, **options)).astype(float)
    v[0, bad] = poison
    out = support.to_numpy(cuflash.flash_attn_func(q, k, v, **options)).astype(float)
    assert not np.isfinite(out[0, sees]).any()
    np.testing.assert_allclose(
        out[0, ~sees], clean[0, ~sees], atol=1e-2 if dtype != "fp32" else 1e-5
    )
    k[0, bad] = np.nan
    out = support.to_numpy(cuflash.flash_attn_func(q, k, v, **options)).astype(float)
    assert np.isnan(out[0, sees]).all()
    np.testing.assert_allclose(
        out[0, ~sees], clean[0, ~sees], atol=1e-2 if dtype != "fp32" else 1e-5
    )


def test_an_edited_kernel_runs_at_the_next_call(
    rng: np.random.Generator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    from cuflash.gpu.render import kernel_root

    folder = tmp_path / "kernels_cu"
    shutil.copytree(kernel_root(), folder)
    q, k, v = arrays(rng, "fp16", *[(1, 100, 1, 32)] * 3)
    _, before = cuflash.flash_attn_func(q, k, v, return_lse=True)
    monkeypatch.setenv("CUFLASH_KERNEL_DIR", str(folder))
    _, same = cuflash.flash_attn_func(q, k, v, return_lse=True)
    assert (same == before).all()
    header = folder / "common" / "softmax.cuh"
    header.write_text(
        header.read_text().replace("__log2f(total)) * LN_2", "__log2f(total)) * LN_2 + 1.0f")
    )
    _, after = cuflash.flash_attn_func(q, k, v, return_lse=True)
    np.testing.assert_allclose(support.to_numpy(after), support.to_numpy(before) + 1, rtol=1e-6)
    monkeypatch.delenv("CUFLASH_KERNEL_DIR")
    _, restored = cuflash.flash_attn_func(q[:, :99], k, v, return_lse=True)
    assert (restored == before[:, :, :99]).all()
    _, again = cuflash.flash_attn_func(q, k, v, return_lse=True)
    assert (again == before).all()
