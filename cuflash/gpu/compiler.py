"""CUDA text to machine code: the one place that calls NVRTC."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import Any

from cuflash import settings
from cuflash.errors import CompileError
from cuflash.gpu import toolchain
from cuflash.gpu.render import Source


@dataclass(frozen=True, slots=True)
class Resources:
    """What ptxas says of a kernel: per thread registers, spills and stack, per block static shared memory."""

    registers: int
    spill_bytes: int
    stack_bytes: int
    static_shared_bytes: int
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Compiled:
    """A compiled kernel."""

    cubin: bytes
    log: str
    resources: Resources
    milliseconds: float
    ptx: bytes | None = None


def options(arch: str) -> list[str]:
    """Options that decide the machine code, in order; paths are not among them."""
    return [
        f"-arch={arch}",
        "-std=c++17",
        "-default-device",
        "-lineinfo",
        "--ptxas-options=-v",
        "-diag-suppress=177",  # a constant of the prelude that this kernel does not use
        *settings.nvrtc_flags(),
    ]


def compile_source(source: Source, arch: str, *, ptx: bool = False) -> Compiled:
    """Compile for one exact architecture, straight to machine code.

    Raises
    ------
    CompileError
        With the first error's file and line in the message and NVRTC's whole output in ``log``.
    MissingDependencyError
    """
    nvrtc = toolchain.nvrtc()
    headers = list(source.includes)
    error, program = nvrtc.nvrtcCreateProgram(
        source.text.encode(),
        f"kernels_cu/{source.name}".encode(),
        len(headers),
        [source.includes[name].encode() for name in headers],
        [name.encode() for name in headers],
    )
    _require(nvrtc, error, "create a program")
    try:
        arguments = [*options(arch), f"-I{toolchain.header_directory()}"]
        start = time.perf_counter()
        (error,) = nvrtc.nvrtcCompileProgram(program, len(arguments), [a.encode() for a in arguments])
        milliseconds = 1e3 * (time.perf_counter() - start)
        log = _text(nvrtc, program, "ProgramLog").decode(errors="replace").strip("\0 \n")
        if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(_first_error(source, arch, log), log=log, source_path=f"kernels_cu/{source.name}")
        cubin = _text(nvrtc, program, "CUBIN")
        if not cubin:
            raise CompileError(f"NVRTC gave no machine code for {source.name} and {arch}", log=log)
        assembly = _text(nvrtc, program, "PTX").rstrip(b"\0") if ptx else None
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return Compiled(cubin, log, parse_resources(log), milliseconds, assembly)


def parse_resources(log: str) -> Resources:
    """Read ptxas's report of a file with one kernel."""

    def number(pattern: str) -> int:
        match = re.search(pattern, log)
        return int(match[1]) if match else 0

    warnings = [line.strip() for line in log.splitlines() if re.search(r"warning|C75\d\d|serializ", line)]
    return Resources(
        registers=number(r"Used (\d+) registers"),
        spill_bytes=number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
        stack_bytes=number(r"(\d+) bytes stack frame"),
        static_shared_bytes=number(r"(\d+) bytes smem"),
        warnings=tuple(warnings),
    )


def _first_error(source: Source, arch: str, log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if "error" in line]
    first = lines[0] if lines else log.strip() or "NVRTC gave no reason"
    for name in source.includes:  # headers of ours are named as they are included
        first = re.sub(rf"(?<![\w/]){re.escape(name)}\(", f"kernels_cu/{name}(", first)
    return f"{source.name} does not compile for {arch}: {first}"


def _text(nvrtc: Any, program: Any, what: str) -> bytes:
    error, size = getattr(nvrtc, f"nvrtcGet{what}Size")(program)
    _require(nvrtc, error, f"get the {what}")
    buffer = b" " * size
    (error,) = getattr(nvrtc, f"nvrtcGet{what}")(program, buffer)
    _require(nvrtc, error, f"get the {what}")
    return buffer


def _require(nvrtc: Any, error: Any, doing: str) -> None:
    if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CompileError(f"NVRTC could not {doing}: {error.name}")
