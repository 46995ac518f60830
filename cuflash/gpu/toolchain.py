"""NVRTC and the CUDA headers: where they are, which versions, which architectures."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
from pathlib import Path
from typing import Any

from cuflash.errors import MissingDependencyError, UnsupportedArchError

HEADERS = ("cuda_fp16.h", "cuda_bf16.h")
TOOLKIT = Path("/usr/local/cuda")  # where one lies that nothing points at
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
        raise _no_bindings() from error
    try:
        bindings.nvrtcVersion()
    except Exception as error:  # the loader's own exception types differ from version to version
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise MissingDependencyError(
            f"the NVRTC library was not found ({reason}): {_INSTALL}, which brings it as the wheel"
            f" nvidia-cuda-nvrtc{_wheel_suffix(_bindings_major())}"
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
    """Folder with the CUDA headers: of NVRTC's very version where there is one, else of its major.

    Raises
    ------
    MissingDependencyError
        If there is none; names the package, and what was found instead.
    """
    version = nvrtc_version()
    found = {
        folder: header_version(folder)
        for folder in _header_candidates()
        if all((folder / name).is_file() for name in HEADERS)
    }
    for folder, its_version in found.items():
        if its_version == version:
            return folder
    for folder, its_version in found.items():
        if its_version and its_version[0] == version[0]:
            return folder
    others = ", ".join(f"{folder} is of {_dotted(v) or 'unknown'}" for folder, v in found.items())
    raise MissingDependencyError(
        f"the CUDA headers {' and '.join(HEADERS)} for NVRTC {_dotted(version)} were not found"
        f"{f' (found: {others})' if others else ''}: pip install"
        f" 'nvidia-cuda-runtime{_wheel_suffix(version[0])}~={version[0]}.0', or {_INSTALL}"
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
    """Folders to look into: NVIDIA's wheels, then whatever else the machine has."""
    places = (
        f"cu{nvrtc_version()[0]}",
        "cuda_runtime",
    )  # the second is where CUDA 12's wheels put it
    found = [nvidia / place / "include" for nvidia in _nvidia_folders() for place in places]
    try:
        from cuda import pathfinder

        folder = pathfinder.find_nvidia_header_directory("cudart")  # knows conda, too
        if folder:
            found.append(Path(folder))
    except Exception:  # the finder is a help, not a need: its errors must not hide the other places
        pass
    toolkits = [os.environ.get("CUDA_PATH"), os.environ.get("CUDA_HOME"), TOOLKIT]
    found += [Path(toolkit) / "include" for toolkit in toolkits if toolkit]
    return found


_ARCH = re.compile(r"sm_(\d+)([af]?)")


def resolve_arch(arch: str) -> str:
    """The architecture to compile for, so that the result runs on a GPU of ``arch``.

    Parameters
    ----------
    arch : str
        Exact architecture of the GPU: "sm_90"; "sm_90a" where the kernel needs instructions of that
        architecture alone.

    Raises
    ------
    UnsupportedArchError
        If NVRTC knows no architecture whose code this GPU can run.
    """
    match = _ARCH.fullmatch(arch)
    if match is None:
        raise UnsupportedArchError(f"arch is {arch!r}: a name like 'sm_80' or 'sm_90a' is needed")
    wanted, suffix = int(match[1]), match[2]
    known = supported_archs()
    if wanted in known:
        return arch
    version = nvrtc_version()
    if wanted < known[0]:
        advice = (
            "install the CUDA 12 packages, pip install 'cuflash[cuda12]'"
            if version[0] > 12
            else "no GPU kernel of cuflash can run there"
        )
        raise UnsupportedArchError(
            f"{arch} is older than what NVRTC {_dotted(version)} compiles for, sm_{known[0]} and"
            f" newer: {advice}"
        )
    # Machine code runs on the same major version and an equal or newer minor one; with a suffix it
    # runs nowhere else.
    family = [a for a in known if a // 10 == wanted // 10 and a < wanted]
    if family and not suffix:
        return f"sm_{family[-1]}"
    raise UnsupportedArchError(
        f"{arch} is unknown to NVRTC {_dotted(version)}, which knows"
        f" {', '.join(f'sm_{a}' for a in known)}: install a newer NVRTC, pip install --upgrade"
        f" nvidia-cuda-nvrtc{_wheel_suffix(version[0])}"
    )


@functools.cache
def identity() -> dict[str, str]:
    """Exact versions of NVRTC and the CUDA headers, which decide machine code.

    Of wheels the folder's name tells it: loading NVRTC, or importlib.metadata, takes longer than a
    start from the cache.
    """
    suffix = _wheel_suffix(_bindings_major()).replace("-", "_")
    compiler = _wheel_version(f"nvidia_cuda_nvrtc{suffix}")
    headers = _wheel_version(f"nvidia_cuda_runtime{suffix}")
    return {
        "nvrtc": compiler or f"library {_dotted(nvrtc_version())}",
        "headers": headers or f"folder {_dotted(header_version(header_directory()))}",
    }


def _bindings_major() -> int:
    try:
        import cuda.bindings as bindings
    except ImportError as error:
        raise _no_bindings() from error
    return int(bindings.__version__.split(".")[0])


def _no_bindings() -> MissingDependencyError:
    return MissingDependencyError(f"cuda-bindings is needed to compile kernels: {_INSTALL}")


def _wheel_suffix(major: int) -> str:
    """How NVIDIA's wheels are called: with the major version up to CUDA 12, without it since."""
    return "" if major >= 13 else f"-cu{major}"


def _wheel_version(name: str) -> str | None:
    for nvidia in _nvidia_folders():
        for folder in nvidia.parent.glob(f"{name}-*.dist-info"):
            return folder.name.removeprefix(f"{name}-").removesuffix(".dist-info")
    return None


@functools.cache
def _nvidia_folders() -> tuple[Path, ...]:
    """Folders that NVIDIA's wheels share, in the order of sys.path."""
    spec = importlib.util.find_spec("nvidia")
    return tuple(Path(p) for p in (spec and spec.submodule_search_locations) or ())


def _dotted(version: tuple[int, int] | None) -> str:
    return ".".join(map(str, version or ()))
