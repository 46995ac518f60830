"""Arrays of callers: kinds, dtypes, alignment, overlap, and DLPack there and back."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cuflash import arrays, errors
from cuflash.api import flash_attn_func, flash_attn_varlen_func


class Lent:
    """An array of another library, which lends its memory through DLPack."""

    def __init__(self, x: np.ndarray, device: int = 1) -> None:
        self.x = x
        self.shape, self.dtype = x.shape, x.dtype
        self.on = device

    def __dlpack__(self, **options: Any) -> Any:
        return self.x.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.on, 0


@pytest.fixture
def library() -> Iterator[types.ModuleType]:
    """The library that `Lent` belongs to: importable, with a from_dlpack."""
    module = types.ModuleType("lending")
    module.from_dlpack = lambda x: Lent(np.from_dlpack(x))  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "lending", module)
        patch.setattr(Lent, "__module__", "lending.core")
        yield module


def test_dtype_names() -> None:
    names = {np.float16: "fp16", ml_dtypes.bfloat16: "bf16", np.float32: "fp32", np.float64: "fp64"}
    for dtype, name in names.items():
        assert arrays.dtype_name(np.dtype(dtype)) == name
        assert arrays.dtype_of(name) == dtype
    with pytest.raises(errors.UnsupportedDtypeError, match="bias has dtype float64.*cast it"):
        arrays.dtype_name(np.dtype(np.float64), "bias", on_gpu=True)


SWAPPED = [np.dtype(x).newbyteorder() for x in (np.float32, ml_dtypes.bfloat16)]


@pytest.mark.parametrize(
    "dtype", [np.int32, np.complex64, bool, object, ml_dtypes.float8_e4m3fn, *SWAPPED]
)
def test_other_dtypes_are_refused(dtype: Any) -> None:
    with pytest.raises(errors.UnsupportedDtypeError, match="float16, bfloat16"):
        arrays.dtype_name(np.dtype(dtype))


def test_a_numpy_array_is_itself() -> None:
    x = np.zeros(3)
    assert arrays.view("q", x) is x
    assert arrays.give_back(x, like=x) is x
    assert arrays.device_of(x) == "cpu"
    assert arrays.pointer(x[1:]) == arrays.pointer(x) + 8


def test_as_bshd_is_a_view() -> None:
    x = np.zeros((2, 3, 5, 7))
    assert arrays.as_bshd(x, "bhsd").shape == (2, 5, 3, 7)
    assert np.shares_memory(arrays.as_bshd(x, "bhsd"), x)
    assert arrays.as_bshd(x, "bshd") is x


@pytest.mark.parametrize("bad", [None, 1.0, [[1.0]], "q", np.float32(3)])
def test_not_an_array(bad: object) -> None:
    with pytest.raises(errors.NullPointerError, match="^q is"):
        arrays.view("q", bad)


def test_overlap_is_exact() -> None:
    x = np.zeros((4, 6))
    assert arrays.overlap(x, x[1:, ::2])
    assert not arrays.overlap(x[:, ::2], x[:, 1::2])
    assert not arrays.overlap(x[:2], x[2:])
    assert not arrays.overlap(x, x.copy())
    assert not arrays.overlap(x[:0], x)
    assert arrays.overlap(x[::-1], x[3:])


def test_dlpack_is_seen_without_a_copy(library: types.ModuleType) -> None:
    x = np.arange(6, dtype=np.float32)
    seen = arrays.view("q", Lent(x))
    assert isinstance(seen, np.ndarray)
    assert np.shares_memory(seen, x)
    back = arrays.give_back(x, like=Lent(x))
    assert isinstance(back, Lent)
    assert np.shares_memory(back.x, x)


def test_dlpack_of_another_device_is_refused() -> None:
    with pytest.raises(errors.DeviceMismatchError, match="k lives on a device of DLPack type 8"):
        arrays.view("k", Lent(np.zeros(3), device=8))


def test_dlpack_on_a_gpu_without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(errors.MissingDependencyError, match=r"q lives on GPU 0.*cuflash\[cuda13\]"):
        arrays.view("q", Lent(np.zeros(3), device=2))


def test_a_dtype_that_dlpack_cannot_say() -> None:
    with pytest.raises(errors.UnsupportedDtypeError, match="q of type Lent cannot be seen"):
        arrays.view("q", Lent(np.zeros(3, ml_dtypes.float8_e4m3fn)))


def test_the_array_protocol_lends_bfloat16() -> None:
    class Jax(Lent):
        def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
            return self.x

    x = np.zeros(3, ml_dtypes.bfloat16)
    assert np.shares_memory(arrays.view("q", Jax(x)), x)


def test_attention_on_lent_arrays(library: types.ModuleType, rng: np.random.Generator) -> None:
    q, k, v = (rng.standard_normal((2, 5, 3, 8)).astype(np.float32) for _ in range(3))
    bias = rng.standard_normal((5, 5)).astype(np.float32)
    counts = np.array([2, 5])
    out, lse = flash_attn_func(
        Lent(q), Lent(k), Lent(v), bias=Lent(bias), seqlens_k=Lent(counts), return_lse=True
    )
    expected, expected_lse = flash_attn_func(q, k, v, bias=bias, seqlens_k=counts, return_lse=True)
    assert isinstance(out, Lent)
    assert isinstance(lse, Lent)
    np.testing.assert_array_equal(out.x, expected)
    np.testing.assert_array_equal(lse.x, expected_lse)


def test_out_is_given_back_as_the_caller_s_object(library: types.ModuleType) -> None:
    x = np.ones((5, 3, 8), np.float32)
    out = Lent(np.full_like(x, np.nan))
    assert flash_attn_varlen_func(x, x, x, [0, 5], [0, 5], out=out) is out
    assert (out.x == 1).all()


def test_torch_on_the_cpu() -> None:
    torch = pytest.importorskip("torch")
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        q = torch.ones(1, 4, 2, 8, dtype=dtype, requires_grad=True)
        out, lse = flash_attn_func(q, q, q, return_lse=True)
        assert isinstance(out, torch.Tensor)
        assert out.dtype == dtype
        assert (out == 1).all()
        assert lse.dtype == torch.float32


def test_jax_on_the_cpu() -> None:
    jax = pytest.importorskip("jax")
    for dtype in (jax.numpy.float16, jax.numpy.bfloat16, jax.numpy.float32):
        q = jax.numpy.ones((1, 4, 2, 8), dtype)
        out = flash_attn_func(q, q, q)
        assert isinstance(out, jax.Array)
        assert out.dtype == dtype
        assert (out == 1).all()
