"""The public functions: what goes in, what comes back, and which road is taken."""

from __future__ import annotations

import doctest
import sys
import types
from collections.abc import Iterator
from typing import Any

import cases
import numpy as np
import pytest

from cuflash import api, errors, numpy_backend, plan, reference, roads
from cuflash.api import flash_attn_func, flash_attn_varlen_func
from cuflash.arrays import dtype_of


@pytest.fixture
def qkv(rng: np.random.Generator) -> list[np.ndarray]:
    shapes = ((2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 6))
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


@pytest.mark.parametrize("module", [api, reference])
def test_examples_in_docstrings(module: types.ModuleType) -> None:
    result = doctest.testmod(module, extraglobs={"np": np})
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", "fp64"])
def test_result(qkv: list[np.ndarray], dtype: str) -> None:
    q, k, v = (x.astype(dtype_of(dtype)) for x in qkv)
    out, lse = flash_attn_func(q, k, v, return_lse=True)
    assert (out.shape, out.dtype) == ((2, 5, 4, 6), dtype_of(dtype))
    assert out.flags.c_contiguous
    assert (lse.shape, lse.dtype) == ((2, 4, 5), np.float32)
    alone = flash_attn_func(q, k, v)
    assert isinstance(alone, np.ndarray)
    np.testing.assert_array_equal(alone, out)


def test_inputs_are_not_written(qkv: list[np.ndarray]) -> None:
    copies = [x.copy() for x in qkv]
    for x in qkv:
        x.flags.writeable = False
    flash_attn_func(*qkv, causal=True, softcap=3.0)
    for x, copy in zip(qkv, copies, strict=True):
        np.testing.assert_array_equal(x, copy)


def test_layout_bhsd(qkv: list[np.ndarray]) -> None:
    out, lse = flash_attn_func(*qkv, causal=True, return_lse=True)
    swapped = [x.swapaxes(1, 2).copy() for x in qkv]
    given = np.empty((2, 4, 5, 6), np.float32)
    for options in ({}, {"out": given}):
        got, got_lse = flash_attn_func(
            *swapped, causal=True, layout="bhsd", return_lse=True, **options
        )
        np.testing.assert_allclose(got.swapaxes(1, 2), out, atol=1e-6)
        np.testing.assert_allclose(got_lse, lse, atol=1e-6)
        assert got.flags.c_contiguous
    assert got is given


def test_out_of_any_strides(qkv: list[np.ndarray]) -> None:
    buffer = np.full((2, 5, 9, 12), np.nan, np.float32)
    out = buffer[:, ::-1, 1::2, ::2]
    assert flash_attn_func(*qkv, out=out) is out
    np.testing.assert_array_equal(out, flash_attn_func(*qkv))
    out[...] = np.nan
    assert np.isnan(buffer).all()


@pytest.mark.parametrize("kind", [list, tuple, np.array, lambda x: np.array(x, np.uint8)])
def test_lengths_may_be_lists_or_any_integers(rng: np.random.Generator, kind: Any) -> None:
    q, k, v = (rng.standard_normal((9, 2, 8)).astype(np.float32) for _ in range(3))
    cu = [0, 2, 2, 9]
    expected, _ = cases.ref(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True)
    out = flash_attn_varlen_func(q, k, v, kind(cu), kind(cu), 7, 7, causal=True)
    np.testing.assert_allclose(out, expected, atol=1e-6)
    dense = flash_attn_func(q[None], k[None], v[None], seqlens_k=kind([4]))
    expected, _ = cases.ref(q[None], k[None, :4], v[None, :4])
    np.testing.assert_allclose(dense, expected, atol=1e-6)


def test_no_sequences_at_all() -> None:
    x = np.ones((0, 2, 8), np.float32)
    out, lse = flash_attn_varlen_func(x, x, x, [0], [0], seqlens_k=[], return_lse=True)
    assert (out.shape, lse.shape) == ((0, 2, 8), (2, 0))
    empty = np.ones((0, 3, 2, 8), np.float32)
    assert flash_attn_func(empty, empty, empty, seqlens_k=[]).shape == (0, 3, 2, 8)


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"cu_seqlens_q": None}, errors.NullPointerError, "cu_seqlens_q is None"),
        ({"cu_seqlens_k": None}, errors.NullPointerError, "cu_seqlens_k is None"),
        ({"cu_seqlens_q": [0, 1.5, 9]}, errors.UnsupportedDtypeError, "float64"),
        ({"cu_seqlens_q": [0, 5, 8, 4]}, errors.InvalidArgumentError, "falls from 8 to 4"),
        ({"cu_seqlens_q": [0, 9]}, errors.DimensionMismatchError, "cu_seqlens_k has 3"),
        ({"cu_seqlens_k": [0, 2, 10]}, errors.InvalidArgumentError, "9 rows"),
        ({"max_seqlen_q": 6}, errors.InvalidArgumentError,
         "sequence 1 of cu_seqlens_q has 7 rows, more than max_seqlen 6"),
        ({"max_seqlen_k": 6}, errors.InvalidArgumentError, "sequence 1 of cu_seqlens_k"),
        ({"max_seqlen_k": 2.5}, errors.InvalidArgumentError, "max_seqlen_k is 2.5"),
        ({"max_seqlen_q": -1}, errors.InvalidArgumentError, "max_seqlen_q is -1"),
        ({"seqlens_k": [2, 8]}, errors.InvalidArgumentError, r"seqlens_k\[1\] is 8: 0 to 7"),
        ({"seqlens_k": [2]}, errors.DimensionMismatchError, "seqlens_k"),
        ({"q": None}, errors.NullPointerError, "q is None"),
        ({"q": np.float32(1)}, errors.NullPointerError, "q is a float32"),
        ({"k": np.array(1, np.float32)}, errors.InvalidArgumentError, "cu_seqlens_k.*0 rows"),
        ({"layout": "bhsd"}, errors.InvalidArgumentError, "layout"),
        ({"config": "block_m=64"}, errors.InvalidConfigError, "block_m=64.*CPU"),
    ],
)  # fmt: skip
def test_varlen_refuses(changes: dict[str, Any], kind: type[Exception], words: str) -> None:
    x = np.ones((9, 2, 8), np.float32)
    call = {"q": x, "k": x, "v": x, "cu_seqlens_q": [0, 2, 9], "cu_seqlens_k": [0, 2, 9]}
    flash_attn_varlen_func(**call, max_seqlen_q=7, max_seqlen_k=7)
    with pytest.raises(kind, match=words):
        flash_attn_varlen_func(**{**call, **changes})


def test_dense_refuses(qkv: list[np.ndarray]) -> None:
    with pytest.raises(errors.InvalidConfigError, match="no kernels to configure"):
        flash_attn_func(*qkv, config={"block_m": 64})
    with pytest.raises(errors.InvalidArgumentError, match=r"seqlens_k\[0\] is 9"):
        flash_attn_func(*qkv, seqlens_k=[9, 1])
    with pytest.raises(errors.NullPointerError, match="v is None"):
        flash_attn_func(qkv[0], qkv[1], None)
    with pytest.raises(errors.InvalidArgumentError, match="overlaps q"):
        flash_attn_func(qkv[0], qkv[1], qkv[1], out=qkv[0])


def test_out_of_memory_says_how_much(
    qkv: list[np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(numpy_backend.np, "empty", full)
    with pytest.raises(errors.OutOfMemoryError, match="960 bytes"):
        flash_attn_func(*qkv)


def test_the_plan_says_numpy(qkv: list[np.ndarray]) -> None:
    flash_attn_func(*qkv)
    last = plan.last_plan()
    assert last is not None
    assert (last.kernel, last.origin) == ("numpy", "none")
    assert "CPU" in last.reason


class FakeDevice:
    id = 0

    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


class FakeCupy(np.ndarray):
    """A NumPy array in the clothes of CuPy: enough to see which road is taken, and with what."""

    device = FakeDevice()

    def get(self) -> np.ndarray:
        return np.array(self)


FakeCupy.__module__ = "cupy"


def on_gpu(x: Any) -> FakeCupy:
    return np.asarray(x).view(FakeCupy)


@pytest.fixture
def gpu_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[tuple, dict]]]:
    """Calls of the GPU road, which answers with marks."""
    calls: list[tuple[tuple, dict]] = []

    def forward(*arrays: Any, **options: Any) -> Any:
        calls.append((arrays, options))
        return ("out", "lse") if options["return_lse"] else "out"

    monkeypatch.setattr(roads, "gpu_forward", lambda: forward)
    # NumPy's functions serve for CuPy's, as long as the results wear its clothes.
    fake = types.SimpleNamespace(
        asarray=lambda x: on_gpu(x),
        ascontiguousarray=lambda x, dtype: on_gpu(np.ascontiguousarray(x, dtype=dtype)),
    )
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setattr(roads.arrays, "is_numpy", lambda x: type(x) is np.ndarray)
    monkeypatch.setattr(roads.arrays, "give_back", lambda x, like: x)
    yield calls


def test_cupy_arrays_go_to_the_gpu_untouched(qkv: list[np.ndarray], gpu_calls: list) -> None:
    q, k, v = map(on_gpu, qkv)
    assert flash_attn_func(q, k, v, causal=True, config="block_m=64") == "out"
    assert flash_attn_func(q, k, v, return_lse=True) == ("out", "lse")
    arrays, options = gpu_calls[0]
    assert arrays[0] is q
    assert arrays[1] is k
    assert arrays[2] is v
    assert options["causal"] is True
    assert options["config"] == "block_m=64"
    assert set(options) == {
        "softmax_scale", "causal", "window_size", "softcap", "seqlens_k", "alibi_slopes", "bias",
        "sink", "layout", "precision", "config", "out", "return_lse",
    }  # fmt: skip


def test_small_arrays_are_made_ready_for_kernels(qkv: list[np.ndarray], gpu_calls: list) -> None:
    q, k, v = map(on_gpu, qkv)
    bias = on_gpu(np.zeros((5, 7), np.float16))
    options = {"seqlens_k": [1, 2], "sink": on_gpu(np.zeros(4)), "bias": bias}
    assert flash_attn_func(q, k, v, **options) == "out"
    assert flash_attn_func(q, k, v, **options, return_lse=True) == ("out", "lse")
    assert flash_attn_func(q, k, v, out=bias) is bias  # the kernel's road checks it
    given = gpu_calls[0][1]
    assert isinstance(given["seqlens_k"], FakeCupy)
    assert given["seqlens_k"].dtype == np.int32
    assert given["seqlens_k"].tolist() == [1, 2]
    assert given["sink"].dtype == np.float32
    assert given["bias"] is bias
    ready = on_gpu(np.zeros(2, np.int32))
    flash_attn_func(q, k, v, seqlens_k=ready)
    assert gpu_calls[-1][1]["seqlens_k"] is ready


def test_host_lengths_are_checked_before_they_are_copied(
    qkv: list[np.ndarray], gpu_calls: list
) -> None:
    q, k, v = map(on_gpu, qkv)
    with pytest.raises(errors.InvalidArgumentError, match=r"seqlens_k\[1\] is 8"):
        flash_attn_func(q, k, v, seqlens_k=[1, 8])
    with pytest.raises(errors.InvalidArgumentError, match="falls"):
        flash_attn_varlen_func(q[0], k[0], v[0], [0, 3, 2], [0, 3, 7])
    assert not gpu_calls


def test_device_lengths_are_checked_on_request(qkv: list[np.ndarray], gpu_calls: list) -> None:
    q, k, v = (on_gpu(x)[0] for x in qkv)
    bad, good = on_gpu([0, 3, 2]), on_gpu([0, 3, 7])
    assert flash_attn_varlen_func(q, k, v, bad, good) == "out"
    assert gpu_calls[0][1]["cu_seqlens_q"].dtype == np.int32
    with pytest.raises(errors.InvalidArgumentError, match="cu_seqlens_q falls"):
        flash_attn_varlen_func(q, k, v, bad, good, check_device=True)


def test_mixed_devices_never_reach_the_gpu(qkv: list[np.ndarray], gpu_calls: list) -> None:
    q, k, v = qkv
    with pytest.raises(errors.DeviceMismatchError, match="k is on cpu but q is on cuda:0"):
        flash_attn_func(on_gpu(q), k, on_gpu(v))
    with pytest.raises(errors.DeviceMismatchError, match="sink is on cpu"):
        flash_attn_func(*map(on_gpu, qkv), sink=np.zeros(4, np.float32))
    with pytest.raises(errors.DeviceMismatchError, match="k is on cuda:0 but q is on cpu"):
        flash_attn_func(q, on_gpu(k), v)
    assert not gpu_calls
