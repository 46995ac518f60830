"""Marks of tests that need more than NumPy. Importing this loads NVRTC."""

from __future__ import annotations

import pytest

from cuflash.errors import MissingDependencyError
from cuflash.gpu import toolchain


def why_no_nvrtc() -> str | None:
    """Why kernels cannot be compiled here, or None where they can."""
    try:
        toolchain.header_directory()
    except MissingDependencyError as error:
        return str(error)
    return None


_reason = why_no_nvrtc()
needs_nvrtc = pytest.mark.skipif(_reason is not None, reason=_reason or "")
