"""Every environment variable that cuflash reads, and the only code that reads them."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from cuflash.errors import InvalidConfigError


class Setting(NamedTuple):
    """An environment variable, what holds without it, and what it does."""

    name: str
    default: str
    meaning: str


SETTINGS = (
    Setting(
        "CUFLASH_CACHE_DIR",
        "$XDG_CACHE_HOME/cuflash, else ~/.cache/cuflash",
        "folder of compiled kernels",
    ),
    Setting("CUFLASH_KERNEL_DIR", "the installed kernels_cu", "folder with an edited copy of it"),
    Setting("CUFLASH_DEV", "0", "1: look at every call whether a kernel file was edited"),
    Setting(
        "CUFLASH_CUBIN_DIR", "", "folder with hand-made <arch>/<spec name>.cubin to run instead"
    ),
    Setting("CUFLASH_DEBUG", "0", "1: kernels with asserts, bounds checks and line numbers"),
    Setting("CUFLASH_RECORD", "", "file to which each new problem is added, for --from-log"),
    Setting("CUFLASH_CONFIG", "", "kernel and tile for every call, as config= takes them"),
    Setting("CUFLASH_NO_CACHE", "0", "1: neither read nor write compiled kernels on disk"),
    Setting("CUFLASH_NO_JIT", "0", "1: an error instead of a compile"),
    Setting("CUFLASH_LOG", "", "such as INFO: level of what the 'cuflash' logger writes to stderr"),
    Setting(
        "CUFLASH_NVRTC_FLAGS", "", "more options for NVRTC; what files they name is not watched"
    ),
    Setting("CUFLASH_SYNC", "0", "1: wait after each launch, so that an error names its kernel"),
)


def cache_dir() -> Path:
    """Folder of compiled kernels; it need not exist."""
    given = os.environ.get("CUFLASH_CACHE_DIR")
    if given:
        return Path(given).expanduser()
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG rule: a relative folder is to be ignored, since it would follow the working directory.
    return (base if base.is_absolute() else Path(os.path.expanduser("~/.cache"))) / "cuflash"


def kernel_dir() -> Path | None:
    """Folder with an edited copy of kernels_cu, or None for the installed one."""
    given = _read("CUFLASH_KERNEL_DIR")
    return Path(given).expanduser() if given else None


def watch_kernels() -> bool:
    """Whether kernel files may change between two calls of a process."""
    return kernel_dir() is not None or _flag("CUFLASH_DEV")


def cubin_dir() -> Path | None:
    """Folder of hand-made machine code, or None."""
    given = _read("CUFLASH_CUBIN_DIR")
    return Path(given).expanduser() if given else None


def debug() -> bool:
    """Whether kernels are built to check themselves."""
    return _flag("CUFLASH_DEBUG")


def record() -> Path | None:
    """File of recorded problems, or None."""
    given = _read("CUFLASH_RECORD")
    return Path(given).expanduser() if given else None


def config() -> str | None:
    """Kernel and tile for every call, or None."""
    return _read("CUFLASH_CONFIG") or None


def no_cache() -> bool:
    """Whether the disk is left alone."""
    return _flag("CUFLASH_NO_CACHE")


def no_jit() -> bool:
    """Whether compiling is an error."""
    return _flag("CUFLASH_NO_JIT")


def sync() -> bool:
    """Whether to wait for the GPU after each launch."""
    return _flag("CUFLASH_SYNC")


def log_level() -> str | None:
    """Level of the logger in capitals, or None to leave logging to the program."""
    return os.environ.get("CUFLASH_LOG", "").upper() or None


def nvrtc_flags() -> list[str]:
    """More options for NVRTC, split as a shell would.

    Raises
    ------
    InvalidConfigError
        For a quote that is not closed.
    """
    given = os.environ.get("CUFLASH_NVRTC_FLAGS", "")
    try:
        return shlex.split(given)
    except ValueError as error:
        raise InvalidConfigError(
            f"CUFLASH_NVRTC_FLAGS is {given!r}: {error}; options separated by spaces are needed"
        ) from error


@contextlib.contextmanager
def more_nvrtc_flags(*flags: str) -> Iterator[None]:
    """Compile with more options, as with CUFLASH_NVRTC_FLAGS: calls with the same setting find these kernels."""
    before = os.environ.get("CUFLASH_NVRTC_FLAGS")
    os.environ["CUFLASH_NVRTC_FLAGS"] = shlex.join([*nvrtc_flags(), *flags])
    try:
        yield
    finally:
        if before is None:
            del os.environ["CUFLASH_NVRTC_FLAGS"]
        else:
            os.environ["CUFLASH_NVRTC_FLAGS"] = before


# What os.environ keeps its values in. os.environ.get raises and catches inside when a name is not set, which is
# the usual case and would be a tenth of a small call's host cost, three times over.
_VALUES: dict[bytes, bytes] | None = getattr(os.environ, "_data", None)


def _read(name: str) -> str:
    if _VALUES is not None and name.encode() not in _VALUES:
        return ""
    return os.environ.get(name, "")


def _flag(name: str) -> bool:
    value = _read(name)
    return bool(value) and value.lower() not in ("0", "false", "no", "off")
