"""The error family: codes, texts, and what an ordinary handler catches."""

from __future__ import annotations

import inspect
import pickle

import pytest

from cuflash import errors
from cuflash.errors import CompileError, CuflashError, ErrorCode, get_error_string

FAMILY = [
    (errors.InvalidDimensionError, 1, ValueError),
    (errors.DimensionMismatchError, 2, ValueError),
    (errors.NullPointerError, 3, TypeError),
    (errors.CudaError, 4, RuntimeError),
    (errors.OutOfMemoryError, 5, MemoryError),
    (errors.UnsupportedHeadDimError, 6, ValueError),
    (errors.UnsupportedDtypeError, 7, TypeError),
    (errors.CompileError, 8, RuntimeError),
    (errors.InvalidConfigError, 9, ValueError),
    (errors.CacheError, 10, RuntimeError),
    (errors.InvalidArgumentError, 11, ValueError),
    (errors.DeviceMismatchError, 12, ValueError),
    (errors.MissingDependencyError, 13, RuntimeError),
    (errors.UnsupportedArchError, 14, RuntimeError),
]


@pytest.mark.parametrize(("kind", "number", "builtin"), FAMILY)
def test_code_and_builtin(kind: type[CuflashError], number: int, builtin: type) -> None:
    with pytest.raises(builtin, match="what happened") as caught:
        raise kind("what happened")
    assert isinstance(caught.value, CuflashError)
    assert caught.value.code == number


def test_every_code_has_one_class() -> None:
    classes = {
        x
        for _, x in inspect.getmembers(errors, inspect.isclass)
        if issubclass(x, CuflashError) and x is not CuflashError
    }
    assert classes == {kind for kind, *_ in FAMILY}
    assert {x.code for x in classes} | {ErrorCode.SUCCESS} == set(ErrorCode)


def test_error_strings() -> None:
    texts = [get_error_string(code) for code in ErrorCode]
    assert len(set(texts)) == len(ErrorCode)
    assert get_error_string(0) == "no error"
    assert get_error_string(ErrorCode.UNSUPPORTED_HEAD_DIM) == get_error_string(6)
    assert "256" in get_error_string(6)
    assert get_error_string(99) == "unknown error code 99"
    assert get_error_string(-1) == "unknown error code -1"


def test_compile_error_keeps_its_log_through_a_process_pool() -> None:
    error = pickle.loads(pickle.dumps(CompileError("line 3", "whole log", "kernel.cu")))
    assert str(error) == "line 3"
    assert error.log == "whole log"
    assert error.source_path == "kernel.cu"
    assert CompileError("line 3").source_path is None
    assert CompileError("line 3").log == ""


def test_cache_warning_is_a_user_warning() -> None:
    assert issubclass(errors.CacheWarning, UserWarning)
