"""`cuflash demo` must call a wrong answer wrong."""

import ml_dtypes
import numpy as np
import pytest

import cuflash
from cuflash.cli import check as checking
from cuflash.cli.check import check, plain_attention, samples, worst
from cuflash.reference import attention_reference


def inputs(rng, seqlen_q, seqlen_k, dtype, heads=4, kv_heads=2, batch=2, dim=32):
    shapes = [(batch, seqlen_q, heads, dim)] + [(batch, seqlen_k, kv_heads, dim)] * 2
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(40, 40), (7, 50), (50, 7), (1, 1)])
@pytest.mark.parametrize("sampled", [False, True])
def test_a_right_answer_is_ok(rng, dtype, causal, seqlen_q, seqlen_k, sampled, monkeypatch):
    if sampled:
        monkeypatch.setattr(checking, "FULL_CHECK_SCORES", 0)
        monkeypatch.setattr(checking, "SAMPLED_ROWS", 8)
    q, k, v = inputs(rng, seqlen_q, seqlen_k, dtype)
    out = cuflash.flash_attn_func(q, k, v, causal=causal)
    verdict = check(q, k, v, out, causal=causal)
    assert verdict.ok and verdict.rows > 0


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("value", [np.nan, np.inf, 30.0])
@pytest.mark.parametrize("row", [0, 99])
def test_one_wrong_number_fails(rng, sampled, value, row, monkeypatch):
    if sampled:
        monkeypatch.setattr(checking, "FULL_CHECK_SCORES", 0)
    q, k, v = inputs(rng, 100, 100, np.float16)
    out = cuflash.flash_attn_func(q, k, v, causal=True)
    out[1, row, 3, 5] = value
    assert not check(q, k, v, out, causal=True).ok


@pytest.mark.parametrize("causal", [False, True])
def test_another_mask_fails(rng, causal):
    q, k, v = inputs(rng, 100, 100, np.float16)
    out = cuflash.flash_attn_func(q, k, v, causal=not causal)
    assert not check(q, k, v, out, causal=causal).ok


def test_low_precision_does_not_pass_as_fp32(rng):
    q, k, v = inputs(rng, 100, 100, np.float32)
    out = cuflash.flash_attn_func(*(x.astype(np.float16) for x in (q, k, v)), causal=True)
    assert not check(q, k, v, out.astype(np.float32), causal=True).ok


def test_a_large_problem_is_sampled_from_all_its_ends():
    q = np.lib.stride_tricks.as_strided(np.zeros(1), (3, 100_000, 5, 8), (0,) * 4)
    found = list(samples(q, q))
    assert {s[0] for s in found} == {0, 2} and {s[1] for s in found} == {0, 2, 4}
    assert {s[2] for s in found} == {0, (100_000 - 64) // 2, 100_000 - 64}


def test_plain_attention_is_attention(rng):
    q, k, v = (rng.standard_normal((20, 16)).astype(np.float32) for _ in range(3))
    for causal in (False, True):
        truth = attention_reference(*(x[None, :, None] for x in (q, k, v)), causal=causal)[0]
        np.testing.assert_allclose(plain_attention(q, k, v, causal), truth[0, :, 0], atol=1e-5)


def test_plain_attention_rounds(rng):
    q, k, v = (rng.standard_normal((20, 16)).astype(np.float16) for _ in range(3))
    out = plain_attention(q, k, v, False)
    np.testing.assert_array_equal(out, out.astype(np.float16))


def test_worst_keeps_a_nan():
    assert np.isnan(worst(1.0, np.array([np.nan, 2.0])))
    assert np.isnan(worst(np.nan, np.array([2.0])))
    assert worst(1.0, np.array([-3.0, 2.0])) == 3.0
    assert worst(1.0, np.zeros(0)) == 1.0
