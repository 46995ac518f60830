"""Every error that cuflash raises: one family, each member with a stable number.

Each class also derives from the built-in exception that an ordinary caller would catch, so
``except ValueError`` works and so does ``except CuflashError as e: e.code``.
"""

from __future__ import annotations

from enum import IntEnum
from typing import ClassVar


class ErrorCode(IntEnum):
    """Number of an error. The numbers are part of the interface and never change."""

    SUCCESS = 0
    INVALID_DIMENSION = 1
    DIMENSION_MISMATCH = 2
    NULL_POINTER = 3
    CUDA_ERROR = 4
    OUT_OF_MEMORY = 5
    UNSUPPORTED_HEAD_DIM = 6
    UNSUPPORTED_DTYPE = 7
    COMPILE_ERROR = 8
    INVALID_CONFIG = 9
    CACHE_ERROR = 10
    INVALID_ARGUMENT = 11
    DEVICE_MISMATCH = 12
    MISSING_DEPENDENCY = 13
    UNSUPPORTED_ARCH = 14


_TEXTS: dict[ErrorCode, str] = {
    ErrorCode.SUCCESS: "no error",
    ErrorCode.INVALID_DIMENSION: "an array has a number of dimensions or a size not allowed here",
    ErrorCode.DIMENSION_MISMATCH: "the shapes of two arguments do not fit together",
    ErrorCode.NULL_POINTER: "a required array is missing or is not an array",
    ErrorCode.CUDA_ERROR: "the CUDA driver or runtime reported an error",
    ErrorCode.OUT_OF_MEMORY: "not enough memory",
    ErrorCode.UNSUPPORTED_HEAD_DIM: "the head dimension is outside 1..256",
    ErrorCode.UNSUPPORTED_DTYPE: "the data type is not supported here",
    ErrorCode.COMPILE_ERROR: "a kernel did not compile",
    ErrorCode.INVALID_CONFIG: "the kernel configuration is not possible here",
    ErrorCode.CACHE_ERROR: "the kernel cache cannot be used",
    ErrorCode.INVALID_ARGUMENT: "an argument has a value that is not allowed",
    ErrorCode.DEVICE_MISMATCH: "the arrays are not all on one device",
    ErrorCode.MISSING_DEPENDENCY: "a package that this call needs is not installed",
    ErrorCode.UNSUPPORTED_ARCH: "no kernel can be built for this GPU architecture",
}


def get_error_string(code: int) -> str:
    """Say in words what an error number means.

    Parameters
    ----------
    code : int or ErrorCode
        A number, for example ``error.code`` of a caught `CuflashError`.

    Returns
    -------
    str
        One sentence without a full stop; ``"unknown error code N"`` for a number that is not one.

    Examples
    --------
    >>> get_error_string(0)
    'no error'
    """
    try:
        return _TEXTS[ErrorCode(code)]
    except ValueError:
        return f"unknown error code {code}"


class CuflashError(Exception):
    """Base of every error of this package; ``code`` is its `ErrorCode`."""

    code: ClassVar[ErrorCode]


class InvalidDimensionError(CuflashError, ValueError):
    """An array has a number of dimensions or a size that is not allowed."""

    code = ErrorCode.INVALID_DIMENSION


class DimensionMismatchError(CuflashError, ValueError):
    """The shapes of two arguments do not fit together."""

    code = ErrorCode.DIMENSION_MISMATCH


class NullPointerError(CuflashError, TypeError):
    """A required array is None or is not an array at all."""

    code = ErrorCode.NULL_POINTER


class CudaError(CuflashError, RuntimeError):
    """The CUDA driver or runtime reported an error."""

    code = ErrorCode.CUDA_ERROR


class OutOfMemoryError(CuflashError, MemoryError):
    """There is not enough memory for the result."""

    code = ErrorCode.OUT_OF_MEMORY


class UnsupportedHeadDimError(CuflashError, ValueError):
    """The head dimension is outside 1..256."""

    code = ErrorCode.UNSUPPORTED_HEAD_DIM


class UnsupportedDtypeError(CuflashError, TypeError):
    """The data type is not one that this road computes in."""

    code = ErrorCode.UNSUPPORTED_DTYPE


class CompileError(CuflashError, RuntimeError):
    """A kernel did not compile.

    Attributes
    ----------
    log : str
        The compiler's whole log.
    source_path : str or None
        Where the text that was compiled lies, if it was written anywhere.
    """

    code = ErrorCode.COMPILE_ERROR

    def __init__(self, message: str, log: str = "", source_path: str | None = None) -> None:
        # All three go to args, so that a copy made by pickle (process pools) keeps them.
        super().__init__(message, log, source_path)
        self.log = log
        self.source_path = source_path

    def __str__(self) -> str:
        return str(self.args[0])


class InvalidConfigError(CuflashError, ValueError):
    """The kernel configuration asked for is not possible here."""

    code = ErrorCode.INVALID_CONFIG


class CacheError(CuflashError, RuntimeError):
    """The kernel cache cannot be used."""

    code = ErrorCode.CACHE_ERROR


class InvalidArgumentError(CuflashError, ValueError):
    """An argument has a value that is not allowed."""

    code = ErrorCode.INVALID_ARGUMENT


class DeviceMismatchError(CuflashError, ValueError):
    """The arrays of one call are not all on one device."""

    code = ErrorCode.DEVICE_MISMATCH


class MissingDependencyError(CuflashError, RuntimeError):
    """A package that this call needs is not installed; the message says which."""

    code = ErrorCode.MISSING_DEPENDENCY


class UnsupportedArchError(CuflashError, RuntimeError):
    """No kernel can be built for this GPU architecture with the NVRTC installed."""

    code = ErrorCode.UNSUPPORTED_ARCH


class CacheWarning(UserWarning):
    """The kernel cache could not be read or written; work goes on without it."""


class TuningWarning(UserWarning):
    """A tuned entry, or a whole table, could not be used; the next place is asked for a tile."""
