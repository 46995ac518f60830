"""Lengths of sequences: row offsets of packed input, counts of used keys.

These few integers may lie on the host even where q, k and v lie on a GPU; their values are checked
wherever that needs no waiting for the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from cuflash import arrays
from cuflash.errors import (
    DimensionMismatchError,
    InvalidArgumentError,
    InvalidDimensionError,
    NullPointerError,
    UnsupportedDtypeError,
)

if TYPE_CHECKING:
    from cuflash.problem import AttentionProblem


def view(name: str, x: object) -> Any:
    """See integers as a NumPy or CuPy array, without a copy except for lists and tuples."""
    if not isinstance(x, list | tuple):
        return arrays.view(name, x)
    array = np.asarray(x)
    # An empty list has no type of its own, and NumPy would call it float64.
    return array if array.size else array.astype(np.int32)


def on_device(name: str, x: Any, like: Any) -> Any:
    """Copy integers, if need be, to contiguous int32 on the GPU of ``like``."""
    _check_integers(name, x)
    if arrays.is_cupy(x) and x.dtype == np.int32 and x.flags.c_contiguous:
        return x
    cupy = arrays.import_cupy(f"{name} is needed on a GPU")
    with like.device:
        return cupy.ascontiguousarray(cupy.asarray(x), dtype=np.int32)


def sequences(
    problem: AttentionProblem, cu_seqlens_q: Any, cu_seqlens_k: Any, seqlens_k: Any
) -> Iterator[tuple[int, Any, Any]]:
    """Yield (sequence, index of its rows in q and out, index of its used rows in k and v).

    Each index takes a (rows, nheads, head_dim) view from a (batch, seqlen, nheads, head_dim) or a
    packed array. The counts are NumPy arrays.
    """
    for b in range(problem.batch):
        if problem.packed:
            first, end = int(cu_seqlens_k[b]), int(cu_seqlens_k[b + 1])
            rows: Any = slice(int(cu_seqlens_q[b]), int(cu_seqlens_q[b + 1]))
        else:
            first, end = 0, problem.seqlen_k
            rows = b
        if seqlens_k is not None:
            end = first + int(seqlens_k[b])
        keys = slice(first, end)
        yield b, rows, keys if problem.packed else (b, keys)


def check_packed(
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    seqlens_k: Any,
    *,
    rows_q: int,
    rows_k: int,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
) -> int:
    """Check the lengths of packed input; the number of sequences."""
    for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if x is None:
            raise NullPointerError(
                f"{name} is None: packed sequences need the row offsets of both q and k"
            )
    check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, rows_q, max_seqlen_q)
    check_cu_seqlens("cu_seqlens_k", cu_seqlens_k, rows_k, max_seqlen_k)
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise DimensionMismatchError(
            f"cu_seqlens_k has {cu_seqlens_k.shape[0]} entries but cu_seqlens_q has"
            f" {cu_seqlens_q.shape[0]}: both need the number of sequences + 1"
        )
    batch = int(cu_seqlens_q.shape[0]) - 1
    if seqlens_k is not None:
        check_seqlens_k(seqlens_k, batch, rows_k, cu_seqlens_k)
    return batch


def check_cu_seqlens(name: str, cu: Any, rows: int, max_seqlen: int | None = None) -> None:
    """Check row offsets: their dtype and shape, and their values where they are a NumPy array.

    Offsets start at 0, never fall and end at or below the number of rows. Rows past the last offset
    (the slack of a padded buffer) belong to no sequence.
    """
    _check_integers(name, cu)
    if cu.ndim != 1 or cu.shape[0] < 1:
        raise InvalidDimensionError(
            f"{name} has shape {tuple(cu.shape)}: a 1-D array of the number of sequences + 1 row"
            " offsets is needed"
        )
    if not arrays.is_numpy(cu):
        return
    if cu[0] != 0:
        raise InvalidArgumentError(f"{name}[0] is {cu[0]}: offsets start at 0")
    # Unsigned dtypes would hide a fall in a huge difference.
    lengths = np.diff(cu.astype(np.int64))
    if (lengths < 0).any():
        at = int(np.argmax(lengths < 0))
        raise InvalidArgumentError(
            f"{name} falls from {cu[at]} to {cu[at + 1]} at entry {at + 1}: offsets never fall;"
            " pass the cumulative sum of the lengths with a 0 in front"
        )
    if cu[-1] > rows:
        raise InvalidArgumentError(
            f"{name}[-1] is {cu[-1]} but the array has {rows} rows: the last offset may not"
            " pass them"
        )
    if max_seqlen is not None and lengths.max(initial=0) > max_seqlen:
        at = int(lengths.argmax())
        raise InvalidArgumentError(
            f"sequence {at} of {name} has {lengths[at]} rows, more than max_seqlen {max_seqlen}:"
            " pass the length of the longest sequence, or None"
        )


def check_seqlens_k(seqlens_k: Any, batch: int, seqlen_k: int, cu_seqlens_k: Any = None) -> None:
    """Check counts of used keys: dtype, length, and values where they are a NumPy array."""
    _check_integers("seqlens_k", seqlens_k)
    if tuple(seqlens_k.shape) != (batch,):
        raise DimensionMismatchError(
            f"seqlens_k has shape {tuple(seqlens_k.shape)}: ({batch},) is needed, one count of used"
            " keys for each sequence"
        )
    if not arrays.is_numpy(seqlens_k):
        return
    room: Any = np.full(batch, seqlen_k)
    if cu_seqlens_k is not None:
        if not arrays.is_numpy(cu_seqlens_k):
            return
        room = np.diff(cu_seqlens_k.astype(np.int64))
    wrong = (seqlens_k < 0) | (seqlens_k > room)
    if wrong.any():
        at = int(wrong.argmax())
        raise InvalidArgumentError(
            f"seqlens_k[{at}] is {seqlens_k[at]}: 0 to {room[at]}, the keys of that sequence, can"
            " be used"
        )


def _check_integers(name: str, x: Any) -> None:
    if x.dtype.kind not in "iu":
        raise UnsupportedDtypeError(
            f"{name} has dtype {x.dtype}: int32 or another integer type is needed; cast it with"
            f" {name}.astype('int32')"
        )
