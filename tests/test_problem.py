"""The problem of a call, and every check that refuses one."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cuflash import errors
from cuflash.problem import AttentionProblem, build_problem


def zeros(*shape: int, dtype: Any = np.float16) -> np.ndarray:
    return np.zeros(shape, dtype)


def dense(**changes: Any) -> AttentionProblem:
    """Problem of (2, 5, 6, 64) queries on (2, 7, 3, 64) keys, with changes."""
    call: dict[str, Any] = {
        "q": zeros(2, 5, 6, 64),
        "k": zeros(2, 7, 3, 64),
        "v": zeros(2, 7, 3, 32),
    }
    return build_problem(**{**call, **changes})


def packed(**changes: Any) -> AttentionProblem:
    """Problem of two sequences in 9 rows of queries and 8 of keys, with changes."""
    call: dict[str, Any] = {
        "q": zeros(9, 6, 64),
        "k": zeros(8, 3, 64),
        "v": zeros(8, 3, 64),
        "cu_seqlens_q": np.array([0, 4, 9], np.int32),
        "cu_seqlens_k": np.array([0, 0, 8], np.int32),
    }
    return build_problem(**{**call, **changes})


def test_dense_problem() -> None:
    assert dense() == AttentionProblem(
        dtype="fp16",
        batch=2,
        seqlen_q=5,
        seqlen_k=7,
        nheads_q=6,
        nheads_k=3,
        head_dim=64,
        head_dim_v=32,
        packed=False,
        softmax_scale=0.125,
        window_left=-1,
        window_right=-1,
        softcap=0.0,
        alibi=False,
        bias=None,
        sink=False,
        seqlens_k=False,
        precision="ieee",
        vector_bytes=16,
    )
    assert len({dense(), dense(), dense(causal=True)}) == 2


def test_packed_problem() -> None:
    problem = packed(seqlens_k=np.array([0, 3]))
    assert (problem.batch, problem.seqlen_q, problem.seqlen_k) == (2, 9, 8)
    assert problem.packed
    assert problem.seqlens_k
    with pytest.raises(ValueError, match="cu_seqlens"):
        _ = problem.flops


def test_bhsd_is_the_same_problem() -> None:
    swapped = {n: zeros(*s) for n, s in
               (("q", (2, 6, 5, 64)), ("k", (2, 3, 7, 64)), ("v", (2, 3, 7, 32)))}  # fmt: skip
    assert dense(**swapped, layout="bhsd") == dense()
    assert dense(**swapped, layout="bhsd", out=zeros(2, 6, 5, 32)) == dense()


def test_options_are_noted() -> None:
    problem = dense(
        alibi_slopes=zeros(2, 6, dtype=np.float32),
        bias=zeros(5, 7, dtype=ml_dtypes.bfloat16),
        sink=zeros(6, dtype=np.float32),
        softcap=30,
        softmax_scale=-2,
    )
    assert problem.alibi
    assert problem.bias == "bf16"
    assert problem.sink
    assert (problem.softcap, problem.softmax_scale) == (30.0, -2.0)
    # Numbers of whatever kind make equal, hashable problems.
    assert dense(softcap=np.float32(2)) == dense(softcap=2)
    assert type(dense(softmax_scale=np.float64(2)).softmax_scale) is float


def test_default_scale_is_that_of_the_true_head_dim() -> None:
    x = zeros(1, 2, 1, 40)
    assert build_problem(x, x, x).softmax_scale == 1 / math.sqrt(40)


def test_causal_is_folded_into_the_window() -> None:
    def window(size: Any, causal: bool) -> tuple[int, int, bool]:
        problem = dense(window_size=size, causal=causal)
        return problem.window_left, problem.window_right, problem.causal

    assert window((-1, -1), True) == (-1, 0, True)
    assert window((-1, 0), False) == (-1, 0, True)
    assert window((3, 9), True) == (3, 0, False)
    assert window((3, 9), False) == (3, 9, False)
    assert window([np.int64(3), 2**40], False) == (3, -1, False)


def test_flops() -> None:
    assert dense().flops == 2 * 2 * 6 * 5 * 7 * (64 + 32)
    assert dense(causal=True).flops == dense().flops // 2
    assert dense(window_size=(1, 0)).flops == dense().flops


def test_precision_matters_to_fp32_only() -> None:
    x = zeros(1, 2, 1, 8, dtype=np.float32)
    assert build_problem(x, x, x, precision="tf32").precision == "tf32"
    assert dense(precision="tf32") == dense()


@pytest.mark.parametrize(
    ("dtype", "columns", "of", "expected"),
    [
        (np.float16, 64, slice(None), 16),
        (np.float16, 72, slice(None), 16),
        (np.float16, 68, slice(None), 8),
        (np.float16, 66, slice(None), 4),
        (np.float16, 67, slice(1, 65), 2),
        (np.float16, 72, slice(4, 68), 8),
        (np.float16, 128, slice(0, 128, 2), 2),
        (np.float32, 66, slice(2, 66), 8),
        (np.float32, 65, slice(1, 65), 4),
        (np.float64, 65, slice(None), 8),
    ],
)
def test_vector_bytes(dtype: Any, columns: int, of: slice, expected: int) -> None:
    # One array at a time is the odd one: the narrowest of the three counts.
    aligned = np.zeros(2 * 5 * 3 * columns + 64, dtype)
    start = -aligned.ctypes.data % 16 // aligned.itemsize
    odd = aligned[start : start + 2 * 5 * 3 * columns].reshape(2, 5, 3, columns)[..., of]
    even_columns = -(-odd.shape[-1] // 16) * 16
    even = np.zeros((2, 5, 3, even_columns), dtype)[..., : odd.shape[-1]]
    for i in range(3):
        arrays = [even, even, even]
        arrays[i] = odd
        assert build_problem(*arrays).vector_bytes == expected


def test_strides_that_are_never_taken_do_not_count() -> None:
    x = zeros(4, 6, 3, 67)[:1, :1, :1, :64]
    assert x.strides[2] == 134
    assert build_problem(x, x, x).vector_bytes == 16
    empty = zeros(0, 5, 3, 67)[..., 1:65]
    assert build_problem(empty, empty, empty).vector_bytes == 16


READ_ONLY = zeros(2, 5, 6, 32)
READ_ONLY.flags.writeable = False
ROWS = zeros(40, 6, 64)


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"q": None}, errors.NullPointerError, "q is None"),
        ({"k": [[1.0]]}, errors.NullPointerError, "k is a list, not an array.*asarray"),
        ({"v": 3.0}, errors.NullPointerError, "v is a float"),
        ({"q": zeros(5, 6, 64)}, errors.InvalidDimensionError, r"\(5, 6, 64\).*varlen"),
        ({"k": zeros(7, 64)}, errors.InvalidDimensionError, r"k has shape \(7, 64\)"),
        ({"q": zeros(2, 5, 6, 0)}, errors.UnsupportedHeadDimError, "head_dim 0: 1 to 256"),
        ({"q": zeros(2, 5, 6, 257)}, errors.UnsupportedHeadDimError, "257"),
        ({"v": zeros(2, 7, 3, 300)}, errors.UnsupportedHeadDimError, "v has head_dim 300"),
        ({"k": zeros(2, 7, 3, 32)}, errors.DimensionMismatchError, "k has head_dim 32 .*64"),
        ({"v": zeros(2, 7, 1, 64)}, errors.DimensionMismatchError, "v has nheads 1 .*k has 3"),
        ({"v": zeros(2, 6, 3, 64)}, errors.DimensionMismatchError, "v has rows .* 6 .*7"),
        ({"k": zeros(1, 7, 3, 64), "v": zeros(1, 7, 3, 64)},
         errors.DimensionMismatchError, "k has batch 1 but q has 2"),
        ({"v": zeros(3, 7, 3, 64)}, errors.DimensionMismatchError, "v has batch 3"),
        ({"q": zeros(2, 5, 4, 64)}, errors.DimensionMismatchError, "4 heads and k has 3.*multiple"),
        ({"q": zeros(2, 5, 0, 64)}, errors.InvalidDimensionError, "q has 0 heads"),
        ({"k": zeros(2, 7, 0, 64), "v": zeros(2, 7, 0, 64)}, errors.InvalidDimensionError,
         "k has 0 heads"),
        ({"q": np.broadcast_to(zeros(1), (2, 2**30 + 1, 6, 64))}, errors.InvalidDimensionError,
         "1073741825"),
        ({"k": zeros(2, 7, 3, 64, dtype=np.float32)}, errors.UnsupportedDtypeError,
         r"k has dtype float32 but q has float16.*astype"),
        ({"v": zeros(2, 7, 3, 64, dtype=ml_dtypes.bfloat16)}, errors.UnsupportedDtypeError,
         "v has dtype bfloat16"),
        ({"q": zeros(2, 5, 6, 64, dtype=np.int32)}, errors.UnsupportedDtypeError,
         "q has dtype int32.*float16, bfloat16"),
        ({"q": zeros(2, 5, 6, 64, dtype=">f4")}, errors.UnsupportedDtypeError, "q has dtype >f4"),
        ({"window_size": (-1, -3)}, errors.InvalidArgumentError, r"window_size is \(-1, -3\)"),
        ({"window_size": (-2, 0), "causal": True}, errors.InvalidArgumentError, "-2"),
        ({"window_size": (1,)}, errors.InvalidArgumentError, "two integers"),
        ({"window_size": (1.5, 2)}, errors.InvalidArgumentError, "two integers"),
        ({"window_size": None}, errors.InvalidArgumentError, "two integers"),
        ({"softmax_scale": math.nan}, errors.InvalidArgumentError, "softmax_scale is nan"),
        ({"softmax_scale": -math.inf}, errors.InvalidArgumentError, "-inf"),
        ({"softmax_scale": 1e39}, errors.InvalidArgumentError, "float32"),
        ({"softmax_scale": "0.1"}, errors.InvalidArgumentError, "'0.1'"),
        ({"softcap": -1.0}, errors.InvalidArgumentError, "softcap is -1.0"),
        ({"softcap": math.nan}, errors.InvalidArgumentError, "softcap is nan"),
        ({"softcap": math.inf}, errors.InvalidArgumentError, "softcap is inf"),
        ({"softcap": 1e-60}, errors.InvalidArgumentError, "softcap"),
        ({"softcap": None}, errors.InvalidArgumentError, "softcap is None"),
        ({"layout": "sbhd"}, errors.InvalidArgumentError, "'sbhd': bshd or bhsd"),
        ({"layout": "thd"}, errors.InvalidArgumentError, "'thd'"),
        ({"precision": "fast"}, errors.InvalidArgumentError, "'fast'.*ieee.*tf32"),
        ({"seqlens_k": np.array([1])}, errors.DimensionMismatchError, r"\(1,\).*\(2,\)"),
        ({"seqlens_k": np.array([1, 8])}, errors.InvalidArgumentError, r"k\[1\] is 8: 0 to 7"),
        ({"seqlens_k": np.array([-1, 7])}, errors.InvalidArgumentError, r"seqlens_k\[0\] is -1"),
        ({"seqlens_k": np.array([1.0, 2.0])}, errors.UnsupportedDtypeError, "float64.*int32"),
        ({"alibi_slopes": zeros(3)}, errors.DimensionMismatchError, r"\(3,\).*\(6,\) or \(2, 6\)"),
        ({"alibi_slopes": zeros(6, dtype=int)}, errors.UnsupportedDtypeError, "alibi_slopes"),
        ({"alibi_slopes": [0.5] * 6}, errors.NullPointerError, "alibi_slopes is a list"),
        ({"sink": zeros(2, 6)}, errors.DimensionMismatchError, r"sink.*\(6,\)"),
        ({"sink": zeros(6, dtype=bool)}, errors.UnsupportedDtypeError, "sink has dtype bool"),
        ({"bias": zeros(5, 6)}, errors.DimensionMismatchError, r"\(5, 6\).*\(2, 6, 5, 7\)"),
        ({"bias": zeros(1, 1, 1, 5, 7)}, errors.DimensionMismatchError, "bias"),
        ({"bias": zeros(5, 7, dtype=bool)}, errors.UnsupportedDtypeError, "bias has dtype bool"),
        ({"out": zeros(2, 5, 6, 64)}, errors.DimensionMismatchError, r"\(2, 5, 6, 32\) is needed"),
        ({"out": zeros(2, 5, 6, 32, dtype=np.float32)}, errors.UnsupportedDtypeError, "out"),
        ({"out": READ_ONLY}, errors.InvalidArgumentError, "read-only"),
        ({"out": np.lib.stride_tricks.as_strided(zeros(1), (2, 5, 6, 32), (0, 0, 0, 0))},
         errors.InvalidArgumentError, "share memory"),
        ({"out": [1]}, errors.NullPointerError, "out is a list"),
    ],
)  # fmt: skip
def test_refused(changes: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        dense(**changes)


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"cu_seqlens_q": None}, errors.NullPointerError, "cu_seqlens_q is None"),
        ({"cu_seqlens_k": None}, errors.NullPointerError, "cu_seqlens_k is None"),
        ({"cu_seqlens_q": np.array([1, 5, 9])}, errors.InvalidArgumentError,
         r"cu_seqlens_q\[0\] is 1: offsets start at 0"),
        ({"cu_seqlens_k": np.array([0, 5, 3])}, errors.InvalidArgumentError,
         "cu_seqlens_k falls from 5 to 3 at entry 2"),
        ({"cu_seqlens_k": np.array([0, 5, 3], np.uint64)}, errors.InvalidArgumentError, "falls"),
        ({"cu_seqlens_q": np.array([0, 4, 10])}, errors.InvalidArgumentError,
         r"cu_seqlens_q\[-1\] is 10 but the array has 9 rows"),
        ({"cu_seqlens_q": np.array([0, 9])}, errors.DimensionMismatchError, "3 .*has 2"),
        ({"cu_seqlens_q": np.array([[0, 4, 9]])}, errors.InvalidDimensionError, r"\(1, 3\)"),
        ({"cu_seqlens_q": np.array([], int)}, errors.InvalidDimensionError, r"\(0,\)"),
        ({"cu_seqlens_q": np.array(0)}, errors.InvalidDimensionError, r"\(\)"),
        ({"cu_seqlens_q": np.array([0.0, 4, 9])}, errors.UnsupportedDtypeError, "float64"),
        ({"cu_seqlens_q": np.array([0, 4, 9], bool)}, errors.UnsupportedDtypeError, "bool"),
        ({"seqlens_k": np.array([1, 2])}, errors.InvalidArgumentError,
         r"seqlens_k\[0\] is 1: 0 to 0"),
        ({"q": zeros(1, 9, 6, 64)}, errors.InvalidDimensionError, "flash_attn_func"),
        ({"layout": "bhsd"}, errors.InvalidArgumentError, "bshd or thd"),
        ({"bias": zeros(9, 8)}, errors.InvalidArgumentError, "bias was given with cu_seqlens"),
        ({"out": zeros(9, 6, 32)}, errors.DimensionMismatchError, r"\(9, 6, 64\) is needed"),
        ({"alibi_slopes": zeros(9, 6)}, errors.DimensionMismatchError, r"\(2, 6\)"),
    ],
)  # fmt: skip
def test_packed_refused(changes: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        packed(**changes)


def test_slack_rows_are_allowed() -> None:
    assert packed(cu_seqlens_q=np.array([0, 4, 7]), cu_seqlens_k=np.array([0, 0, 2])).seqlen_q == 9


def test_no_sequences() -> None:
    assert packed(cu_seqlens_q=np.array([0]), cu_seqlens_k=np.array([0])).batch == 0


def test_out_may_not_overlap_but_may_be_interleaved() -> None:
    buffer = zeros(2, 5, 4, 3, 64)
    q, k, v, out = (buffer[:, :, i] for i in range(4))
    assert build_problem(q, k, v, out=out).batch == 2
    for name, x in (("q", q), ("k", k), ("v", v)):
        with pytest.raises(errors.InvalidArgumentError, match=f"out overlaps {name}"):
            build_problem(q, k, v, out=x)
    with pytest.raises(errors.InvalidArgumentError, match="out overlaps q"):
        build_problem(buffer[:, :4, 0], k[:, :4], v[:, :4], out=buffer[:, 1:, 0])
    bias = out[0, :, 0, :5]
    assert np.shares_memory(bias, out)
    with pytest.raises(errors.InvalidArgumentError, match="out overlaps bias"):
        build_problem(q, k, v, bias=bias, out=out)


class FakeDevice:
    id = 1


class FakeCupy:
    """What a check may read of an array on a GPU: nothing else is here."""

    def __init__(self, x: np.ndarray, address: int = 1 << 20) -> None:
        self.shape, self.strides, self.dtype = x.shape, x.strides, x.dtype
        self.itemsize, self.size, self.ndim = x.itemsize, x.size, x.ndim
        self.device = FakeDevice()
        self.data = type("Pointer", (), {"ptr": address})()


FakeCupy.__module__ = "cupy"


def test_gpu_arrays_are_checked_by_their_description() -> None:
    q, k, v = (FakeCupy(zeros(2, 5, 3, 64), n << 20) for n in (1, 2, 3))
    counts = FakeCupy(zeros(2, dtype=np.int32))
    assert build_problem(q, k, v, seqlens_k=counts).vector_bytes == 16
    odd = FakeCupy(zeros(2, 5, 3, 64), (1 << 20) + 4)
    assert build_problem(odd, k, v).vector_bytes == 4
    out = FakeCupy(zeros(2, 5, 3, 64), (2 << 20) + 128)
    with pytest.raises(errors.InvalidArgumentError, match="out overlaps k"):
        build_problem(q, k, v, out=out)


def test_mixed_devices() -> None:
    host = zeros(2, 5, 3, 64)
    on_gpu = FakeCupy(host)
    with pytest.raises(errors.DeviceMismatchError, match="k is on cpu but q is on cuda:1"):
        build_problem(on_gpu, host, on_gpu)
    with pytest.raises(errors.DeviceMismatchError, match="sink is on cuda:1 but q is on cpu"):
        build_problem(host, host, host, sink=FakeCupy(zeros(3)))


def test_gpu_refuses_fp64_and_split_elements() -> None:
    wide = FakeCupy(zeros(2, 5, 3, 64, dtype=np.float64))
    with pytest.raises(errors.UnsupportedDtypeError, match="q has dtype float64"):
        build_problem(wide, wide, wide)
    plain = FakeCupy(zeros(2, 5, 3, 64))
    with pytest.raises(errors.UnsupportedDtypeError, match="bias has dtype float64"):
        build_problem(plain, plain, plain, bias=FakeCupy(zeros(5, 5, dtype=np.float64)))
    records = np.zeros((2, 5, 3, 64), [("a", np.float16), ("b", np.int8)])["a"]
    with pytest.raises(errors.InvalidArgumentError, match=r"k has strides .*copy"):
        build_problem(plain, FakeCupy(records), plain)


def test_a_problem_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        dense().batch = 3  # type: ignore[misc]
