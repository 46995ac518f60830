"""CUDA text to machine code: the one place that calls NVRTC."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from cuflash import settings
from cuflash.errors import CompileError
from cuflash.gpu import toolchain
from cuflash.gpu.render import Source


@dataclass(frozen=True, slots=True)
class Resources:
    """What ptxas says of a kernel: registers, spills and stack of a thread, fixed shared memory."""

    registers: int
    spill_stores: int
    spill_loads: int
    stack_bytes: int
    static_shared_bytes: int
    warnings: tuple[str, ...]

    @property
    def spill_bytes(self) -> int:
        """Bytes of spill stores and loads together: 0 for a kernel that keeps all in registers."""
        return self.spill_stores + self.spill_loads

    @property
    def serialized(self) -> bool:
        """Whether ptxas made wgmma instructions wait for each other, and most speed is lost."""
        return any(_SERIALIZED.search(warning) for warning in self.warnings)


@dataclass(frozen=True, slots=True)
class Compiled:
    """A compiled kernel; ``milliseconds`` is what NVRTC took, ``ptx`` is None unless asked for."""

    cubin: bytes
    log: str
    resources: Resources
    milliseconds: float
    ptx: bytes | None = None


# Asserts (kernels_cu/common/debug.cuh), and line numbers for sanitizers and profilers.
_DEBUG = ("-DCUFLASH_DEBUG=1", "-lineinfo")


def options(arch: str) -> list[str]:
    """Options that decide the machine code, in order; paths are not among them."""
    return [
        f"-arch={arch}",
        "-std=c++17",
        "-default-device",
        "--ptxas-options=-v",
        "-diag-suppress=177",  # a constant of the prelude that this kernel does not use
        *(_DEBUG if settings.debug() else ()),
        *settings.nvrtc_flags(),
    ]


_limit = threading.local()


@contextlib.contextmanager
def time_limit(seconds: float, stop: threading.Event | None = None) -> Iterator[None]:
    """Within this, this thread's compiles end in a CompileError after so long, or when ``stop`` is set.

    For sweeps, where one tile may keep the compiler busy for minutes. NVRTC older than 12.8 cannot be
    stopped and goes on to its end.
    """
    _limit.value = (seconds, stop)
    try:
        yield
    finally:
        _limit.value = None


def _watched(nvrtc: Any, program: Any) -> Any:
    """Let NVRTC ask, between its steps, whether to go on; gives what must live as long as it asks."""
    limit = getattr(_limit, "value", None)
    if limit is None or not hasattr(nvrtc, "nvrtcSetFlowCallback"):
        return None
    seconds, stop = limit
    end = time.monotonic() + seconds

    def cancel(_payload: int | None, _reserved: int | None) -> int:
        return int(time.monotonic() > end or (stop is not None and stop.is_set()))

    callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(cancel)
    try:
        nvrtc.nvrtcSetFlowCallback(program, ctypes.cast(callback, ctypes.c_void_p).value, 0)
    except RuntimeError:  # the bindings know it, the library does not
        return None
    return callback


def compile_source(source: Source, arch: str, *, ptx: bool = False) -> Compiled:
    """Compile for one exact architecture, straight to machine code.

    Raises
    ------
    CompileError
        With the first error's file and line in the message and NVRTC's whole output in ``log``.
    MissingDependencyError
        If NVRTC or the CUDA headers are not installed.
    """
    nvrtc = toolchain.nvrtc()
    arguments = [*options(arch), f"-I{toolchain.header_directory()}"]
    error, program = nvrtc.nvrtcCreateProgram(
        source.text.encode(),
        f"kernels_cu/{source.name}".encode(),
        len(source.includes),
        [text.encode() for text in source.includes.values()],
        [name.encode() for name in source.includes],
    )
    _require(nvrtc, error, "create a program")
    try:
        watch = _watched(nvrtc, program)
        start = time.perf_counter()
        (error,) = nvrtc.nvrtcCompileProgram(
            program, len(arguments), [os.fsencode(argument) for argument in arguments]
        )
        milliseconds = 1e3 * (time.perf_counter() - start)
        log = _fetch(nvrtc, program, "ProgramLog").decode(errors="replace").strip("\0 \n")
        if watch is not None and error.name == "NVRTC_ERROR_CANCELLED":
            raise CompileError(
                f"{source.name} was stopped after {milliseconds / 1e3:.1f} s of compiling", log=log
            )
        if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(
                f"{source.name} does not compile for {arch}: {first_error(log) or error.name}",
                log=log,
                source_path=source.path,
            )
        cubin = _fetch(nvrtc, program, "CUBIN")
        text = _fetch(nvrtc, program, "PTX").rstrip(b"\0") if ptx else None
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    if not cubin:
        raise CompileError(
            f"NVRTC gave no machine code for {source.name}: -arch=sm_... is needed, and it got"
            f" {' '.join(options(arch))}; look at CUFLASH_NVRTC_FLAGS",
            log=log,
            source_path=source.path,
        )
    return Compiled(cubin, log, parse_resources(log), milliseconds, text)


_WARNING = re.compile(r"\bwarning\b|\bC75\d\d\b|serializ", re.IGNORECASE)
_SERIALIZED = re.compile(r"\bC75\d\d\b|serializ", re.IGNORECASE)
_ERROR = re.compile(r"\b(error|fatal)\b", re.IGNORECASE)


def parse_resources(log: str) -> Resources:
    """Read ptxas's report of a file with one kernel.

    A function that was not inlined has lines of its own: its spills count with the kernel's.
    """

    def numbers(pattern: str) -> list[int]:
        return [int(text) for text in re.findall(pattern, log)]

    return Resources(
        registers=max(numbers(r"Used (\d+) registers"), default=0),
        spill_stores=sum(numbers(r"(\d+) bytes spill stores")),
        spill_loads=sum(numbers(r"(\d+) bytes spill loads")),
        stack_bytes=max(numbers(r"(\d+) bytes stack frame"), default=0),
        static_shared_bytes=max(numbers(r"(\d+) bytes smem"), default=0),
        warnings=tuple(line.strip() for line in log.splitlines() if _WARNING.search(line)),
    )


def first_error(log: str) -> str:
    """The log's first line that says what is wrong, with its file and line; "" for an empty log."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return next((line for line in lines if _ERROR.search(line)), lines[0] if lines else "")


def _fetch(nvrtc: Any, program: Any, what: str) -> bytes:
    ask_size: Callable[..., Any] = getattr(nvrtc, f"nvrtcGet{what}Size")
    ask: Callable[..., Any] = getattr(nvrtc, f"nvrtcGet{what}")
    error, size = ask_size(program)
    _require(nvrtc, error, f"get the {what}")
    # Never bytes: NVRTC writes into it, and Python shares short bytes objects.
    buffer = bytearray(size)
    (error,) = ask(program, buffer)
    _require(nvrtc, error, f"get the {what}")
    return bytes(buffer)


def _require(nvrtc: Any, error: Any, doing: str) -> None:
    if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CompileError(f"NVRTC could not {doing}: {error.name}")
