"""The argument of the forward kernels: ForwardParams of kernels_cu/params.cuh, packed on the host."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence

from cuflash.gpu.spec import PARAMS_BYTES

POINTERS = (
    "q", "k", "v", "out", "lse", "cu_seqlens_q", "cu_seqlens_k", "seqlens_k", "alibi_slopes", "bias", "sink",
)  # fmt: skip
# No bound of a window: no sum of a position and this overflows 32 bits.
UNBOUNDED = 2**30 - 1

_FORMAT = struct.Struct(f"<{len(POINTERS)}Q 20q 4q 12i 2f")
assert _FORMAT.size == PARAMS_BYTES

# Seen as 64-bit words, so that a call only stores its pointers: word i is POINTERS[i].
Words = ctypes.c_uint64 * (PARAMS_BYTES // 8)


def pack(
    strides: Sequence[int],
    lse_strides: tuple[int, int],
    alibi_strides: tuple[int, int],
    integers: Sequence[int],
    softmax_scale: float,
    softcap: float,
) -> bytes:
    """Pack everything but the pointers, which are left null.

    Parameters
    ----------
    strides : 20 integers
        Elements from one to the next (batch, row, head, dim) of q, k, v, out and bias.
    lse_strides, alibi_strides : (int, int)
        Elements from one (batch, head) to the next.
    integers : 12 integers
        The int members of ForwardParams, in their order.
    """
    pointers = [0] * len(POINTERS)
    return _FORMAT.pack(
        *pointers, *strides, *lse_strides, *alibi_strides, *integers, softmax_scale, softcap
    )
