"""The NumPy road: random problems, what hidden NaN may do, and how it tiles."""

from __future__ import annotations

import warnings
from typing import Any

import cases
import numpy as np
import pytest
import strategies
import support
from hypothesis import HealthCheck, given, settings

from cuflash import numpy_backend
from cuflash.api import flash_attn_func, flash_attn_varlen_func
from cuflash.arrays import dtype_of


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(strategies.problems(dtypes=("fp16", "bf16", "fp32", "fp64")))
def test_random_problems(drawn: strategies.Drawn) -> None:
    strategies.build(drawn, np).check()


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(strategies.problems(dtypes=("fp32",), max_length=60, max_head_dim=16))
def test_random_problems_in_small_tiles(drawn: strategies.Drawn) -> None:
    # Lengths of 300 rarely meet the ends of tiles of 512 keys; these do, and chunks of heads too.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numpy_backend, "BLOCK_M", 8)
        patch.setattr(numpy_backend, "BLOCK_N", 16)
        patch.setattr(numpy_backend, "TILE_SCORES", 256)
        strategies.build(drawn, np).check()


def arrays(rng: np.random.Generator, *shape: int, dtype: str = "fp32") -> tuple[Any, Any, Any]:
    q, k, v = (rng.standard_normal(shape).astype(dtype_of(dtype)) for _ in range(3))
    return q, k, v


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("which", ["k", "v"])
def test_a_bad_key_reaches_only_the_rows_that_see_it(
    rng: np.random.Generator, which: str, bad: float
) -> None:
    q, k, v = arrays(rng, 1, 300, 4, 16)
    k, v = k[:, :, :2].copy(), v[:, :, :2].copy()
    clean, _ = cases.ref(q, k, v, causal=True, window_size=(20, 0))
    (k if which == "k" else v)[0, 100, 1] = bad
    out = flash_attn_func(q, k, v, causal=True, window_size=(20, 0))
    seeing = np.zeros((300, 4), bool)
    seeing[100:121, 2:] = True  # the two query heads of key head 1
    np.testing.assert_allclose(out[0][~seeing], clean[0][~seeing], atol=1e-5)
    if which == "v" or np.isnan(bad):
        assert not np.isfinite(out[0][seeing]).any(-1).any()


def test_bias_minus_inf_hides_a_nan_key_and_value(rng: np.random.Generator) -> None:
    q, k, v = arrays(rng, 1, 9, 2, 8)
    bias = np.zeros((1, 1, 9, 9), np.float32)
    bias[..., 4] = -np.inf
    bias[0, 0, 7, 4] = 0
    expected, expected_lse = cases.ref(q, k, v, bias=bias)
    k[0, 4], v[0, 4] = np.nan, np.nan
    out, lse = flash_attn_func(q, k, v, bias=bias, return_lse=True)
    others = np.arange(9) != 7
    np.testing.assert_allclose(out[0, others], expected[0, others], atol=1e-6)
    np.testing.assert_allclose(lse[..., others], expected_lse[..., others], atol=1e-6)
    assert np.isnan(out[0, 7]).all()
    assert np.isnan(lse[..., 7]).all()


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_bias_of_the_lowest_finite_number(rng: np.random.Generator, dtype: str) -> None:
    q, k, v = arrays(rng, 1, 6, 1, 8)
    lowest = np.array(np.finfo(np.float32).min if dtype != "fp16" else -65504.0, dtype_of(dtype))
    if np.isinf(lowest):  # float32's lowest rounds to bfloat16's -inf
        lowest = np.array(-3.3e38, dtype_of(dtype))
    bias = np.zeros((1, 1, 6, 6), dtype_of(dtype))
    bias[..., :2] = lowest
    bias[0, 0, 3] = lowest  # one row of nothing else
    expected, _ = cases.ref(q, k, v, bias=bias.astype(np.float64))
    out = flash_attn_func(q, k, v, bias=bias)
    atol = 1e-6 if dtype != "fp16" else 2e-2  # float32 next to 65504 has steps of 1/128
    np.testing.assert_allclose(out, expected, atol=atol)


def test_nan_in_a_query_stays_in_its_row(rng: np.random.Generator) -> None:
    q, k, v = arrays(rng, 1, 5, 2, 8)
    expected, _ = cases.ref(q, k, v)
    q[0, 2, 0, 3] = np.nan
    out = flash_attn_func(q, k, v)
    hit = np.zeros((5, 2), bool)
    hit[2, 0] = True
    assert np.isnan(out[0][hit]).all()
    np.testing.assert_allclose(out[0][~hit], expected[0][~hit], atol=1e-6)


def test_huge_logits_in_fp16() -> None:
    q = np.full((1, 2, 1, 64), 60000, np.float16)
    out, lse = flash_attn_func(q, q, q, return_lse=True)
    assert (out == 60000).all()
    np.testing.assert_allclose(lse, 8 * 60000.0**2, rtol=1e-6)


def test_fp32_is_accurate_over_many_keys(rng: np.random.Generator) -> None:
    q, k, v = arrays(rng, 1, 1500, 1, 64)
    expected, expected_lse = cases.ref(*(x.astype(np.float64) for x in (q, k, v)))
    out, lse = flash_attn_func(q, k, v, return_lse=True)
    np.testing.assert_allclose(out, expected, atol=1e-6)
    np.testing.assert_allclose(lse, expected_lse, atol=2e-6)


def test_fp64_is_computed_in_fp64(rng: np.random.Generator) -> None:
    q, k, v = (x.astype(np.float64) / 3 for x in arrays(rng, 1, 600, 2, 8))
    expected, _ = cases.ref(q, k, v, causal=True)
    out = flash_attn_func(q, k, v, causal=True)
    assert out.dtype == np.float64
    np.testing.assert_allclose(out, expected, atol=1e-14)


def test_slack_rows_are_written(rng: np.random.Generator) -> None:
    q, k, v = arrays(rng, 7, 2, 8)
    k[5:], v[5:] = np.nan, np.nan
    out = np.full_like(q, np.nan)
    sink = np.zeros(2, np.float32)
    _, lse = flash_attn_varlen_func(
        q, k, v, [0, 2, 4], [0, 1, 5], sink=sink, out=out, return_lse=True
    )
    assert (out[4:] == 0).all()
    assert np.isneginf(lse[:, 4:]).all()
    assert np.isfinite(out[:4]).all()
    assert np.isfinite(lse[:, :4]).all()


def test_no_warnings_from_hidden_or_empty_rows(rng: np.random.Generator) -> None:
    q, k, v = arrays(rng, 1, 9, 1, 8)
    k[0, 3:], v[0, 3:] = np.nan, np.inf
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flash_attn_func(q, k, v, causal=True, seqlens_k=[3])


def test_hidden_tiles_are_skipped(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    visited = []
    finish = numpy_backend._finish_scores
    monkeypatch.setattr(
        numpy_backend, "_finish_scores", lambda *a: (visited.append(a[4]), finish(*a))
    )
    monkeypatch.setattr(numpy_backend, "BLOCK_N", 128)
    flash_attn_func(*arrays(rng, 1, 1024, 1, 8), window_size=(0, 0))
    assert len(visited) == 8  # one for each tile of 128 queries


def test_same_bits_every_run(rng: np.random.Generator) -> None:
    q, k, v = arrays(rng, 2, 200, 4, 32, dtype="bf16")
    first = flash_attn_func(q, k, v, causal=True)
    assert all((flash_attn_func(q, k, v, causal=True) == first).all() for _ in range(3))


def test_4096_rows(rng: np.random.Generator) -> None:
    q, k, v = arrays(rng, 1, 4096, 4, 64)  # half a second on two idle cores
    out = flash_attn_func(q, k, v)
    rows = slice(4000, 4010)
    expected, _ = cases.ref(q[:, rows, :1], k[:, :, :1], v[:, :, :1])
    np.testing.assert_allclose(out[:, rows, :1], expected, atol=1e-6)


def test_the_plain_computation_is_what_the_bound_says(rng: np.random.Generator) -> None:
    """A bound that a wrong answer meets would hold nothing."""
    q, k, v = arrays(rng, 1, 50, 2, 64, dtype="fp16")
    wide = [x.astype(np.float64) for x in (q, k, v)]
    expected, _ = cases.ref(*wide)
    plain = support.plain_attention(*wide, dtype=np.float16)
    assert support.accuracy_bound("fp16", expected, plain) < 5e-3
    without_last_key, _ = cases.ref(wide[0], wide[1][:, :-1], wide[2][:, :-1])
    with pytest.raises(AssertionError, match="allowed"):
        support.assert_accurate("fp16", without_last_key, expected, plain)
