"""A process that has compiled nothing yet, and a compiler that is quick and counts."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_kernels import TinySpec, write_kernels

from cuflash.errors import CompileError
from cuflash.gpu import cache, compiler, disk, toolchain
from cuflash.gpu.compiler import Compiled, parse_resources
from cuflash.gpu.render import Source

LOG = "ptxas info    : 8 bytes spill stores, 4 bytes spill loads\nUsed 40 registers, 96 bytes smem"
SPEC = TinySpec()


class Compiler:
    """Stands for NVRTC: quick, and counts. What it makes depends on the whole text."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.seconds = 0.0
        self.fails = False

    def __call__(self, source: Source, arch: str, *, ptx: bool = False) -> Compiled:
        self.calls.append((source.name, arch))
        time.sleep(self.seconds)
        if self.fails:
            raise CompileError("tiny.cu does not compile", log="the whole log")
        return Compiled(self.cubin(source, arch), LOG, parse_resources(LOG), 12.5)

    @staticmethod
    def cubin(source: Source, arch: str) -> bytes:
        whole = repr((source.text, source.includes, arch)).encode()
        return b"\x7fELF" + hashlib.sha256(whole).digest() * 64


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cold process: kernels to compile, an empty cache folder, nothing in memory."""
    monkeypatch.setenv("CUFLASH_KERNEL_DIR", str(write_kernels(tmp_path / "kernels_cu")))
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(tmp_path / "cache"))
    new_process()
    return tmp_path / "cache"


@pytest.fixture
def nvrtc_calls(root: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    fake = Compiler()
    monkeypatch.setattr(compiler, "compile_source", fake)
    monkeypatch.setattr(toolchain, "resolve_arch", lambda arch: arch)
    monkeypatch.setattr(toolchain, "identity", lambda: {"nvrtc": "13.5.37", "headers": "13.5.37"})
    return fake


def new_process() -> None:
    """Forget what a process remembers."""
    cache._forget()
    disk._done.clear()


def left_over(root: Path) -> list[Path]:
    return list((root / "tmp").glob("*"))


def the_entry(root: Path) -> Path:
    (path,) = (root / "kernels").glob("*/*")
    return path


def refuse(code: int) -> Callable[..., Any]:
    """Stand for a call of the system that fails."""

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise OSError(code, os.strerror(code))

    return fail
