"""Every environment variable that cuflash reads, and the only code that reads them."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import NamedTuple


class Setting(NamedTuple):
    """An environment variable, what holds without it, and what it does."""

    name: str
    default: str
    meaning: str


SETTINGS = (
    Setting("CUFLASH_CACHE_DIR", "$XDG_CACHE_HOME/cuflash, else ~/.cache/cuflash", "folder of compiled kernels"),
    Setting("CUFLASH_KERNEL_DIR", "the installed kernels_cu", "folder with an edited copy of kernels_cu"),
    Setting("CUFLASH_CONFIG", "", "kernel and tile for every call, as config= takes them"),
    Setting("CUFLASH_NO_CACHE", "0", "1: neither read nor write compiled kernels on disk"),
    Setting("CUFLASH_NO_JIT", "0", "1: an error instead of a compile"),
    Setting("CUFLASH_LOG", "", "level of the 'cuflash' logger, such as INFO, written to standard error"),
    Setting("CUFLASH_NVRTC_FLAGS", "", "more options for NVRTC"),
    Setting("CUFLASH_SYNC", "0", "1: wait after each launch, so that an error names its kernel"),
)


def cache_dir() -> Path:
    """Folder of compiled kernels; it need not exist."""
    given = os.environ.get("CUFLASH_CACHE_DIR")
    if given:
        return Path(given).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path("~/.cache").expanduser()) / "cuflash"


def kernel_dir() -> Path | None:
    """Folder with an edited copy of kernels_cu, or None for the installed one."""
    given = os.environ.get("CUFLASH_KERNEL_DIR")
    return Path(given).expanduser() if given else None


def config() -> str | None:
    """Kernel and tile for every call, or None."""
    return os.environ.get("CUFLASH_CONFIG") or None


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
    """Level of the logger, or None to leave logging to the program."""
    return os.environ.get("CUFLASH_LOG") or None


def nvrtc_flags() -> list[str]:
    """More options for NVRTC."""
    return shlex.split(os.environ.get("CUFLASH_NVRTC_FLAGS", ""))


def _flag(name: str) -> bool:
    return os.environ.get(name, "") not in ("", "0")
