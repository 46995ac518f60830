"""The accuracy rule and the random arrays: a right answer passes whatever the problem, a wrong one does not."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cuflash import arrays
from cuflash.debug import accuracy
from cuflash.debug.accuracy import Truth, count_nan, samples_of, worst
from cuflash.gpu.choose import vector_bytes
from cuflash.inputs import random_inputs
from cuflash.problem import AttentionProblem, build_problem, describe_problem
from cuflash.reference import attention_reference


def problem(**fields: Any) -> AttentionProblem:
    common = dict(dtype="fp16", batch=2, seqlen_q=100, nheads_q=4, nheads_k=2, head_dim=32)
    return describe_problem(**{**common, **fields})


@st.composite
def problems(draw: Any) -> AttentionProblem:
    heads_k = draw(st.integers(1, 3))
    dtype = draw(st.sampled_from(["fp16", "bf16", "fp32", "fp64"]))
    packed = draw(st.booleans())
    return describe_problem(
        dtype=dtype,
        batch=draw(st.integers(1, 3)),
        seqlen_q=draw(st.integers(0, 70)),
        seqlen_k=draw(st.integers(0, 70)),
        nheads_q=heads_k * draw(st.integers(1, 3)),
        nheads_k=heads_k,
        head_dim=draw(st.integers(1, 40)),
        head_dim_v=draw(st.integers(1, 40)),
        packed=packed,
        causal=draw(st.booleans()),
        window_size=draw(st.sampled_from([(-1, -1), (10, 0), (3, 5)])),
        softcap=draw(st.sampled_from([0.0, 5.0])),
        alibi=draw(st.booleans()),
        bias=None if packed else draw(st.sampled_from([None, dtype, "fp32"])),
        sink=draw(st.booleans()),
        seqlens_k=draw(st.booleans()),
        vector_bytes=draw(st.sampled_from([2, 4, 8, 16])),
    )


@settings(max_examples=60, deadline=None)
@given(problems(), st.integers(0, 3), st.booleans())
def test_random_inputs_are_of_their_problem_and_the_numpy_road_answers_right(
    asked: AttentionProblem, seed: int, sampled: bool
) -> None:
    inputs = random_inputs(asked, np, seed)
    of_call = {n: x for n, x in inputs.options.items()}
    built = build_problem(
        inputs.q, inputs.k, inputs.v, layout="thd" if asked.packed else "bshd", **of_call
    )
    # Arrays of one row have no strides to misalign.
    assert dataclasses.replace(built, vector_bytes=asked.vector_bytes) == asked
    assert vector_bytes(built) >= vector_bytes(asked)
    out = inputs.out()
    assert out.size == 0 or np.isnan(out.astype(np.float32)).all()
    _, lse = inputs.attend(out=out, return_lse=True)
    with pytest.MonkeyPatch.context() as patch:
        if sampled:
            patch.setattr(accuracy, "FULL_CHECK_SCORES", 0)
            patch.setattr(accuracy, "SAMPLED_ROWS", 8)
        truth = Truth(inputs)
        verdict = truth.verdict(out, lse)
        assert verdict.ok, verdict.in_words
        # Samples are rows of the reference.
        expected, expected_lse = attention_reference(inputs.q, inputs.k, inputs.v, **inputs.options)
        for sample in truth.samples:
            np.testing.assert_allclose(sample.out, expected[sample.of_out], atol=1e-12)
            np.testing.assert_allclose(sample.lse, expected_lse[sample.of_lse], atol=1e-12)


def test_same_seed_same_numbers() -> None:
    first, again, other = (random_inputs(problem(), np, seed) for seed in (0, 0, 1))
    assert (first.k == again.k).all() and not (first.k == other.k).all()


@pytest.mark.parametrize("width", [2, 4, 8, 16])
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_arrays_allow_the_loads_asked_for_and_no_wider(width: int, dtype: str) -> None:
    asked = problem(dtype=dtype, head_dim=64, vector_bytes=width)
    inputs = random_inputs(asked)
    assert arrays.row_alignment(inputs.q) == max(width, arrays.ELEMENT_BYTES[dtype])


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("value", [np.nan, np.inf, 30.0])
@pytest.mark.parametrize("row", [0, 99])
@pytest.mark.parametrize("packed", [False, True])
def test_one_wrong_number_fails_and_is_found(
    sampled: bool, value: float, row: int, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sampled:
        monkeypatch.setattr(accuracy, "FULL_CHECK_SCORES", 0)
    inputs = random_inputs(problem(causal=True, packed=packed))
    truth = Truth(inputs)
    out = inputs.attend()
    index = (row, 3, 5) if packed else (1, row, 3, 5)
    out[index] = value
    verdict = truth.verdict(out)
    assert not verdict.ok and verdict.first_bad == index
    assert ("NaN" in verdict.in_words) == bool(np.isnan(value))


def test_what_no_sample_sees_must_at_least_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy, "FULL_CHECK_SCORES", 0)
    monkeypatch.setattr(accuracy, "SAMPLED_ROWS", 4)
    inputs = random_inputs(problem())
    truth = Truth(inputs)
    out = inputs.attend()
    out[0, 30, 1, 2] = np.nan
    verdict = truth.verdict(out)
    assert verdict.max_error <= verdict.bound and verdict.unwritten == 1 and not verdict.ok


@pytest.mark.parametrize("causal", [False, True])
def test_another_mask_fails(causal: bool) -> None:
    truth = Truth(random_inputs(problem(causal=causal)))
    assert not truth.verdict(random_inputs(problem(causal=not causal)).attend()).ok


def test_a_wrong_lse_fails() -> None:
    inputs = random_inputs(problem(causal=True))
    truth = Truth(inputs)
    out, lse = inputs.attend(return_lse=True)
    assert truth.verdict(out, lse).ok
    base_2 = truth.verdict(out, lse / np.log(2))
    assert not base_2.ok and "lse" in base_2.in_words


def test_low_precision_does_not_pass_as_fp32() -> None:
    inputs = random_inputs(problem(dtype="fp32", causal=True))
    low = dataclasses.replace(
        inputs, **{name: getattr(inputs, name).astype(np.float16) for name in "qkv"}
    )
    assert not Truth(inputs).verdict(low.attend().astype(np.float32)).ok


def test_a_large_problem_is_sampled_from_all_its_ends() -> None:
    long = describe_problem(batch=3, seqlen_q=100_000, nheads_q=5, head_dim=8)
    found = list(samples_of(long, [100_000] * 3))
    assert {b for b, _, _ in found} == {0, 2} and {h for _, h, _ in found} == {0, 2, 4}
    assert {int(rows[0]) for _, _, rows in found} == {0, (100_000 - 64) // 2, 100_000 - 64}
    packed = describe_problem(batch=3, seqlen_q=100_002, nheads_q=1, head_dim=8, packed=True)
    found = list(samples_of(packed, [0, 100_000, 2]))
    assert {b for b, _, _ in found} == {1, 2}


def test_worst_keeps_a_nan() -> None:
    assert np.isnan(worst(1.0, np.array([np.nan, 2.0])))
    assert np.isnan(worst(np.nan, np.array([2.0])))
    assert worst(1.0, np.array([-3.0, 2.0])) == 3.0
    assert worst(1.0, np.zeros(0)) == 1.0


def test_nan_are_counted_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy, "_COUNTED_AT_ONCE", 7)
    x = np.zeros((5, 3, 2), np.float16)
    x[1, 2, 1] = x[4, 0, 0] = np.nan
    assert count_nan(x) == 2 and count_nan(x[:0]) == 0
