"""The arrays of callers: what kind they are, where they live, and how to hand results back in kind.

NumPy arrays take the CPU road, CuPy arrays the GPU road. Anything else that speaks DLPack (torch,
JAX, ...) is viewed as one of the two, without a copy. CuPy, torch and JAX are imported only when an
array of theirs, or one that lives on a GPU, is there; ml_dtypes, slow to load, when bfloat16 is.
"""

from __future__ import annotations

import functools
import importlib
import sys
from typing import Any

import numpy as np

from cuflash.errors import (
    DeviceMismatchError,
    MissingDependencyError,
    NullPointerError,
    UnsupportedDtypeError,
)

# Arrays are Any on purpose: NumPy's and CuPy's have no common static type.
Array = Any

ELEMENT_BYTES = {"fp16": 2, "bf16": 2, "fp32": 4, "fp64": 8}
_NUMPY_DTYPES = {"fp16": np.float16, "fp32": np.float32, "fp64": np.float64}
_NAMES = {np.dtype(scalar): name for name, scalar in _NUMPY_DTYPES.items()}

_DLPACK_CPU = 1
# Page-locked and managed memory can be read by the device as it is.
_DLPACK_CUDA = (2, 13)


def is_cupy(x: object) -> bool:
    """Whether ``x`` is a CuPy array; imports nothing."""
    return type(x).__module__.partition(".")[0] == "cupy"


def is_numpy(x: object) -> bool:
    """Whether ``x`` is a NumPy array."""
    return isinstance(x, np.ndarray)


def require_array(name: str, x: object) -> None:
    """Refuse what is not a NumPy array, a CuPy array or an array with DLPack."""
    if is_numpy(x) or is_cupy(x) or hasattr(x, "__dlpack__"):
        return
    if x is None:
        raise NullPointerError(f"{name} is None: an array is needed")
    raise NullPointerError(
        f"{name} is a {type(x).__name__}, not an array: pass a NumPy array, a CuPy array, or one"
        f" with DLPack (for example numpy.asarray({name}))"
    )


@functools.cache
def dtype_of(name: str) -> np.dtype[Any]:
    """NumPy's dtype of "fp16", "bf16", "fp32" or "fp64"."""
    if name == "bf16":
        return np.dtype(importlib.import_module("ml_dtypes").bfloat16)
    return np.dtype(_NUMPY_DTYPES[name])


def _known(dtype: Any) -> str | None:
    name = _NAMES.get(dtype)
    # By its name first: an array of it means that ml_dtypes is loaded, any other need not load it.
    if name is None and dtype.name == "bfloat16" and dtype == dtype_of("bf16"):
        return "bf16"
    return name


def dtype_name(dtype: Any, argument: str = "q", *, on_gpu: bool = False) -> str:
    """Name of a dtype ("fp16", "bf16", "fp32", on the CPU also "fp64"), or an error.

    Parameters
    ----------
    dtype : numpy.dtype
        The dtype of ``argument``.
    argument : str
        What to call the array in the message.
    on_gpu : bool
        Refuse float64, for which there is no GPU kernel.
    """
    name = _known(dtype)
    if name is None or (on_gpu and name == "fp64"):
        allowed = "float16, bfloat16 (ml_dtypes.bfloat16), float32"
        allowed += "" if on_gpu else " or float64 (NumPy arrays only)"
        raise UnsupportedDtypeError(
            f"{argument} has dtype {dtype}: {allowed} can be used; cast it with"
            f" {argument}.astype(...)"
        )
    return name


def device_of(x: Array) -> str:
    """Where an array lives: "cpu" or "cuda:0"."""
    return f"cuda:{x.device.id}" if is_cupy(x) else "cpu"


def pointer(x: Array) -> int:
    """Address of the first element."""
    return int(x.data.ptr) if is_cupy(x) else int(x.__array_interface__["data"][0])


def as_bshd(x: Array, layout: str) -> Array:
    """View of an array of this layout as (batch, seqlen, nheads, head_dim)."""
    return x.transpose(0, 2, 1, 3) if layout == "bhsd" else x


def row_alignment(x: Array) -> int:
    """Widest load in bytes (16, 8, 4 or the element size) that every row of ``x`` allows.

    A row is the last dimension; wide loads need it contiguous and every row's first byte on a
    multiple of their width.
    """
    itemsize = int(x.itemsize)
    if x.size == 0:
        return 16
    if x.shape[-1] > 1 and x.strides[-1] != itemsize:
        return itemsize
    # The stride of a dimension of length 1 is never taken, whatever number stands there.
    steps = [s for n, s in zip(x.shape[:-1], x.strides[:-1], strict=True) if n > 1]
    addresses = [pointer(x), *steps]
    for width in (16, 8, 4):
        if width >= itemsize and all(a % width == 0 for a in addresses):
            return width
    return itemsize


def overlap(x: Array, y: Array) -> bool:
    """Whether two arrays share an element's memory: exactly, so interleaved views do not count."""
    if device_of(x) != device_of(y):
        return False
    # NumPy solves this from addresses alone, so it also answers for memory it must never touch.
    return np.shares_memory(_addresses(x), _addresses(y))


class _Footprint:
    """The addresses of an array's elements, without a way to read them."""

    def __init__(self, x: Array) -> None:
        self.__array_interface__ = {
            "version": 3,
            "shape": tuple(x.shape),
            "strides": tuple(x.strides),
            "typestr": f"|V{x.itemsize}",
            "data": (pointer(x), True),
        }


def _addresses(x: Array) -> np.ndarray[Any, Any]:
    return np.asarray(_Footprint(x))


def view(name: str, x: object) -> Array:
    """See a caller's array as NumPy's or CuPy's, without a copy."""
    if is_numpy(x) or is_cupy(x):
        return x
    require_array(name, x)
    # No gradient is carried, and torch refuses to export a tensor that wants one.
    source: Any = x.detach() if hasattr(x, "detach") else x
    try:
        device, index = (int(n) for n in source.__dlpack_device__())
    except ValueError as error:  # torch's meta tensors, for one, have no memory at all
        raise DeviceMismatchError(f"{name} lives nowhere that can be used: {error}") from error
    if device == _DLPACK_CPU:
        return _numpy_view(name, source)
    if device in _DLPACK_CUDA:
        return import_cupy(f"{name} lives on GPU {index}").from_dlpack(source)
    raise DeviceMismatchError(
        f"{name} lives on a device of DLPack type {device}: only CPU (1) and CUDA (2) memory can be"
        " used; copy it there"
    )


def _numpy_view(name: str, source: Any) -> Array:
    try:
        return np.from_dlpack(source)
    except (BufferError, RuntimeError, TypeError) as error:
        # DLPack's bfloat16 has no counterpart in NumPy itself: pass the bits as int16.
        if type(source).__module__.partition(".")[0] == "torch" and "bfloat16" in str(source.dtype):
            torch = sys.modules["torch"]
            return np.from_dlpack(source.view(torch.int16)).view(dtype_of("bf16"))
        try:
            # JAX and others lend ml_dtypes arrays through the array protocol, without a copy.
            seen = np.asarray(source)
        except Exception:
            seen = None
        if seen is not None and _known(seen.dtype):
            return seen
        raise UnsupportedDtypeError(
            f"{name} of type {type(source).__name__} cannot be seen as a NumPy array ({error}):"
            " float16, bfloat16, float32 or float64 can be used; cast it"
        ) from error


def as_float32(name: str, x: Array) -> Array:
    """See a few numbers on a GPU as contiguous float32, cast there if need be."""
    dtype_name(x.dtype, name)
    if x.dtype == np.float32 and x.flags.c_contiguous:
        return x
    with x.device:
        return import_cupy(name).ascontiguousarray(x, dtype=np.float32)


def give_back(x: Array, like: object) -> Any:
    """Hand a NumPy or CuPy result back in the kind of the caller's array, without a copy."""
    if is_numpy(like) or is_cupy(like):
        return x
    package = type(like).__module__.partition(".")[0]
    if package == "jaxlib":
        package = "jax"
    if package == "torch":
        return _to_torch(x)
    name = "jax.dlpack" if package == "jax" else package
    module = sys.modules.get(name) or importlib.import_module(name)
    try:
        return module.from_dlpack(x)
    except (AttributeError, BufferError):
        if package == "jax":
            return sys.modules["jax"].numpy.asarray(x)
        return x


def _to_torch(x: Array) -> Any:
    torch = sys.modules["torch"]
    if is_numpy(x) and _known(x.dtype) == "bf16":
        return torch.from_dlpack(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_dlpack(x)


def import_cupy(why: str) -> Any:
    """CuPy, or an error that says why it is needed and what to install."""
    try:
        return importlib.import_module("cupy")
    except ImportError as error:
        raise MissingDependencyError(
            f"{why}, and CuPy is needed to use it there: pip install 'cuflash[cuda13]' (or"
            " 'cuflash[cuda12]'), or pass NumPy arrays"
        ) from error
