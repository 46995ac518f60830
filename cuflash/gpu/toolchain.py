"""NVRTC and the CUDA headers: where they are, which versions, which architectures."""

from __future__ import annotations

import functools
import os
import re
from importlib import metadata
from pathlib import Path
from typing import Any

from cuflash.errors import MissingDependencyError, UnsupportedArchError

HEADERS = ("cuda_fp16.h", "cuda_bf16.h")
_INSTALL = "pip install 'cuflash[cuda13]' (or 'cuflash[cuda12]')"


@functools.cache
def nvrtc() -> Any:
    """The NVRTC bindings, with the library loaded.

    Raises
    ------
    MissingDependencyError
        If the bindings or the library are not installed; names the package.
    """
    try:
        from cuda.bindings import nvrtc as bindings
    except ImportError as error:
        raise MissingDependencyError(f"cuda-bindings is needed to compile kernels: {_INSTALL}") from error
    try:
        bindings.nvrtcVersion()
    except Exception as error:  # the loader's own exception types differ from version to version
        raise MissingDependencyError(
            f"the NVRTC library was not found ({error}): {_INSTALL}, which brings nvidia-cuda-nvrtc"
        ) from error
    return bindings


@functools.cache
def nvrtc_version() -> tuple[int, int]:
    """Version of NVRTC."""
    _, major, minor = nvrtc().nvrtcVersion()
    return int(major), int(minor)


@functools.cache
def supported_archs() -> tuple[int, ...]:
    """Compute capabilities NVRTC can compile for: (75, 80, ...)."""
    bindings = nvrtc()
    _, count = bindings.nvrtcGetNumSupportedArchs()
    _, archs = bindings.nvrtcGetSupportedArchs()
    return tuple(sorted(int(a) for a in archs[:count]))


@functools.cache
def header_directory() -> Path:
    """Folder with the CUDA headers, of NVRTC's major version.

    Raises
    ------
    MissingDependencyError
        If there is none; names the package, and what was found instead.
    """
    wrong: list[str] = []
    for folder in _header_candidates():
        if not all((folder / name).is_file() for name in HEADERS):
            continue
        version = header_version(folder)
        if version and version[0] == nvrtc_version()[0]:
            return folder
        wrong.append(f"{folder} has version {'.'.join(map(str, version)) if version else 'unknown'}")
    major, minor = nvrtc_version()
    found = f"; found, but not for NVRTC {major}.{minor}: {', '.join(wrong)}" if wrong else ""
    raise MissingDependencyError(
        f"the CUDA headers {' and '.join(HEADERS)} for NVRTC {major}.{minor} were not found{found}:"
        f" pip install nvidia-cuda-runtime~={major}.0, or {_INSTALL}"
    )


def header_version(folder: Path) -> tuple[int, int] | None:
    """Version that the headers in a folder say they are of."""
    try:
        text = (folder / "cuda_runtime_api.h").read_text(errors="replace")
    except OSError:
        return None
    match = re.search(r"#define\s+CUDART_VERSION\s+(\d+)", text)
    return (int(match[1]) // 1000, int(match[1]) % 1000 // 10) if match else None


def _header_candidates() -> list[Path]:
    found: list[Path] = []
    try:
        from cuda import pathfinder

        folder = pathfinder.find_nvidia_header_directory("cudart")
        if folder:
            found.append(Path(folder))
    except Exception:  # the finder is a help, not a need: its errors must not hide the other places
        pass
    for variable in ("CUDA_PATH", "CUDA_HOME"):
        if os.environ.get(variable):
            found.append(Path(os.environ[variable]) / "include")
    found.append(Path("/usr/local/cuda/include"))
    return found


def resolve_arch(arch: str, suffix: str = "") -> str:
    """The architecture to compile for, so that the result runs on a GPU of ``arch``.

    Parameters
    ----------
    arch : str
        Exact architecture of the GPU: "sm_90".
    suffix : str
        "a" where the kernel needs instructions of this architecture alone.

    Raises
    ------
    UnsupportedArchError
        If NVRTC knows no architecture whose code this GPU can run.
    """
    wanted = int(arch.removeprefix("sm_").rstrip("af"))
    known = supported_archs()
    if wanted in known:
        return f"sm_{wanted}{suffix}"
    version = ".".join(map(str, nvrtc_version()))
    if known and wanted < known[0]:
        raise UnsupportedArchError(
            f"{arch} is older than what NVRTC {version} compiles for (sm_{known[0]} and newer): install"
            " the CUDA 12 packages, pip install 'cuflash[cuda12]'"
        )
    # Machine code runs on the same major version and an equal or newer minor one.
    family = [a for a in known if a // 10 == wanted // 10 and a < wanted]
    if family and not suffix:
        return f"sm_{family[-1]}"
    raise UnsupportedArchError(
        f"{arch} is unknown to NVRTC {version} (it knows {', '.join(f'sm_{a}' for a in known)}): install a"
        " newer one, pip install --upgrade nvidia-cuda-nvrtc"
    )


@functools.cache
def identity() -> dict[str, str]:
    """Exact versions of NVRTC and the CUDA headers, which decide machine code.

    Of wheels the package version is read, without loading NVRTC: that takes longer than a start from the
    cache.
    """
    suffix = "-cu12" if (_package_version("cuda-bindings") or "").startswith("12.") else ""
    compiler = _package_version(f"nvidia-cuda-nvrtc{suffix}")
    headers = _package_version(f"nvidia-cuda-runtime{suffix}")
    return {
        "nvrtc": compiler or "library " + ".".join(map(str, nvrtc_version())),
        "headers": headers or "folder " + ".".join(map(str, header_version(header_directory()) or ())),
    }


def _package_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
