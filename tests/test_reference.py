"""The float64 formula against the independent one of cases.py, and its gradients by differences."""

from __future__ import annotations

from typing import Any

import cases
import numpy as np
import pytest
import strategies
from hypothesis import HealthCheck, given, settings

from cuflash.errors import DimensionMismatchError
from cuflash.reference import attention_reference, attention_reference_gradients


@pytest.mark.parametrize("name", sorted(cases.CASES))
def test_cases(name: str) -> None:
    q, k, v, options, expected, expected_lse = cases.CASES[name]()
    out, lse = attention_reference(q, k, v, **options)
    np.testing.assert_allclose(out, expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-13, atol=1e-12)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(strategies.problems(dtypes=("fp64",), max_length=40, max_head_dim=20))
def test_random_problems(drawn: strategies.Drawn) -> None:
    built = strategies.build(drawn, np)
    out, lse = attention_reference(built.q, built.k, built.v, **built.options)
    expected, expected_lse = cases.naive(**built.clean)
    if drawn.layout == "bhsd":
        out = out.swapaxes(1, 2)
    np.testing.assert_allclose(out, expected, rtol=1e-11, atol=1e-11)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-12, atol=1e-11)


@pytest.mark.parametrize("name", sorted(cases.GRADS))
def test_gradients_of_cases(name: str) -> None:
    q, k, v, options, out, _ = cases.CASES[name]()
    dout = cases.grid(99, out.shape)
    gradients = attention_reference_gradients(q, k, v, dout, **options)
    expected = cases.ref_grads(q, k, v, dout, **options)
    for got, wanted in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_gradients_by_differences(rng: np.random.Generator, causal: bool, layout: str) -> None:
    q, k, v = (rng.standard_normal(s) for s in ((2, 5, 4, 3), (2, 6, 2, 3), (2, 6, 2, 2)))
    sink = rng.standard_normal(4)
    bias = rng.standard_normal((5, 6))
    bias[1] = -np.inf
    options: dict[str, Any] = {
        "causal": causal, "softcap": 2.0, "sink": sink, "bias": bias, "layout": layout,
        "alibi_slopes": rng.uniform(size=4), "seqlens_k": [6, 4], "window_size": (3, 2),
    }  # fmt: skip
    if layout == "bhsd":
        q, k, v = (x.swapaxes(1, 2).copy() for x in (q, k, v))
    dout = rng.standard_normal(attention_reference(q, k, v, **options)[0].shape)

    def loss() -> float:
        return float((attention_reference(q, k, v, **options)[0] * dout).sum())

    gradients = attention_reference_gradients(q, k, v, dout, **options)
    for x, gradient in zip((q, k, v, sink), gradients, strict=True):
        assert gradient.shape == x.shape
        for index in np.ndindex(x.shape):
            kept, step = x[index], 1e-5
            x[index] = kept + step
            above = loss()
            x[index] = kept - step
            difference = (above - loss()) / (2 * step)
            x[index] = kept
            assert abs(difference - gradient[index]) < 1e-8


def test_hidden_nan_does_not_reach_gradients(rng: np.random.Generator) -> None:
    q, k, v, dout = (rng.standard_normal((1, 6, 1, 4)) for _ in range(4))
    clean = attention_reference_gradients(q, k, v, dout, seqlens_k=[3], softcap=5.0)
    k[0, 3:], v[0, 3:] = np.nan, np.inf
    bad = attention_reference_gradients(q, k, v, dout, seqlens_k=[3], softcap=5.0)
    # The same, but hidden by a mask: the bad keys lie within the products.
    bias = np.where(np.arange(6) < 3, 0.0, -np.inf)
    masked = attention_reference_gradients(q, k, v, dout, bias=bias, softcap=5.0)
    for a, b, c in zip(clean, bad, masked, strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_allclose(a, c, atol=1e-14)


def test_arguments_are_checked() -> None:
    x = np.zeros((1, 4, 2, 8))
    with pytest.raises(DimensionMismatchError, match="k has head_dim 4"):
        attention_reference(x, x[..., :4], x)
    with pytest.raises(TypeError, match="causl"):
        attention_reference(x, x, x, causl=True)
