"""Whether this machine has a GPU, and which architecture kernels are compiled for."""

from __future__ import annotations

import functools
import importlib.util

# The architecture that is compiled for where there is no GPU to ask.
DEFAULT_ARCH = "sm_90"


@functools.cache
def why_no_gpu() -> str | None:
    """Say why GPU arrays cannot be used here; None where they can."""
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed"
    try:
        import cupy

        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:  # CuPy without a driver fails in many ways, each of them an answer
        return f"CuPy finds no GPU: {error}"
    return None if count else "CuPy finds no GPU"


def default_arch() -> str:
    """Give the current GPU's architecture, or the one named where there is none."""
    if why_no_gpu() is not None:
        return DEFAULT_ARCH
    import cupy

    return f"sm_{cupy.cuda.Device().compute_capability}"
