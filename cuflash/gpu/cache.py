"""A spec's machine code, compiled once: from memory, from disk, or from the compiler.

The key is a digest of everything that decides the machine code, contents and never paths. Whatever
is wrong with the disk (see `disk`), kernels still run, from memory.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cuflash import settings
from cuflash.errors import CompileError
from cuflash.gpu import compiler, disk, toolchain
from cuflash.gpu.disk import Entry, entries, kernels_dir, prune
from cuflash.gpu.render import Source, render
from cuflash.gpu.spec import KernelSpec

__all__ = [
    "Entry",
    "Kernel",
    "clear",
    "entries",
    "invalidate",
    "kernels_dir",
    "load_or_compile",
    "prune",
]

_MAX_IN_MEMORY = 256
_log = logging.getLogger("cuflash")


@dataclass(frozen=True, slots=True)
class Kernel:
    """A compiled kernel.

    Attributes
    ----------
    spec : KernelSpec
    cubin : bytes
        Machine code for ``meta["arch"]``.
    meta : dict
        name, arch, registers, spill_bytes, spill_stores, spill_loads, stack_bytes,
        static_shared_bytes, shared_bytes (dynamic), warnings, compile_ms, options, nvrtc, headers,
        log.
    origin : str
        ``"memory"``, ``"disk"`` or ``"compile"``.
    digest : str
    directory : Path or None
        Its entry on disk, if it has one.
    """

    spec: KernelSpec
    cubin: bytes
    meta: dict[str, Any]
    origin: str
    digest: str
    directory: Path | None


class _Memory:
    """What lives in memory; made anew in a forked child, where the lock may be held by nobody."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.kernels: OrderedDict[str, Kernel] = OrderedDict()
        self.pending: dict[str, Future[Kernel]] = {}


_memory = _Memory()


def _forget() -> None:
    global _memory
    _memory = _Memory()


os.register_at_fork(after_in_child=_forget)


def load_or_compile(spec: KernelSpec) -> Kernel:
    """Return the kernel of a spec from memory, from disk, or freshly compiled.

    However many threads ask at once, a kernel is compiled once. A failure is not remembered.

    Raises
    ------
    CompileError
        Also, with CUFLASH_NO_JIT set, for a kernel that is neither in memory nor on disk.
    UnsupportedArchError, MissingDependencyError
    """
    source = render(spec)
    digest = _digest(source, spec.arch)
    memory = _memory
    with memory.lock:
        kernel = memory.kernels.get(digest)
        if kernel is not None:
            memory.kernels.move_to_end(digest)
            return replace(kernel, origin="memory")
        future = memory.pending.get(digest)
        leader = future is None
        if future is None:
            future = memory.pending[digest] = Future()
    if not leader:
        return future.result()
    try:
        kernel = _from_disk(spec, digest) or _compile(spec, source, digest)
    except BaseException as error:
        with memory.lock:
            del memory.pending[digest]
        future.set_exception(error)
        raise
    with memory.lock:
        memory.kernels[digest] = kernel
        if len(memory.kernels) > _MAX_IN_MEMORY:
            memory.kernels.popitem(last=False)
        del memory.pending[digest]
    future.set_result(kernel)
    return kernel


def invalidate(kernel: Kernel) -> None:
    """Forget a kernel that the driver will not take, in memory and on disk."""
    with _memory.lock:
        _memory.kernels.pop(kernel.digest, None)
    if kernel.directory is not None:
        disk.remove(kernel.directory)


def clear() -> int:
    """Forget every kernel, in memory and on disk; give how many there were on disk."""
    with _memory.lock:
        _memory.kernels.clear()
    return disk.clear()


def _digest(source: Source, arch: str) -> str:
    content = {
        "schema": disk.SCHEMA,
        "text": source.text,
        "includes": source.includes,
        # The GPU's architecture; which one is compiled for follows from it and NVRTC's version.
        "options": compiler.options(arch),
        **toolchain.identity(),
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _from_disk(spec: KernelSpec, digest: str) -> Kernel | None:
    path = disk.entry_path(spec.arch, spec.name, digest)
    found = disk.read(path, digest)
    if found is None:
        return None
    cubin, meta = found
    return Kernel(spec, cubin, meta, "disk", digest, path)


def _compile(spec: KernelSpec, source: Source, digest: str) -> Kernel:
    if settings.no_jit():
        raise CompileError(
            f"{spec.name} for {spec.arch} is not in {settings.cache_dir()} and CUFLASH_NO_JIT is"
            " set: unset it, or compile the kernel first with `cuflash compile`"
        )
    arch = toolchain.resolve_arch(spec.arch)
    if arch != spec.arch:
        _log.info("%s is unknown to NVRTC; compiling for %s, whose code it runs", spec.arch, arch)
    try:
        compiled = compiler.compile_source(source, arch)
    except CompileError as error:
        error.add_note(f"compiling {spec.name} from {source.path}")
        raise
    _log.info("compiled %s for %s in %.0f ms", spec.name, arch, compiled.milliseconds)
    resources = compiled.resources
    meta = {
        "name": spec.name,
        "arch": arch,
        "registers": resources.registers,
        "spill_bytes": resources.spill_bytes,
        "spill_stores": resources.spill_stores,
        "spill_loads": resources.spill_loads,
        "stack_bytes": resources.stack_bytes,
        "static_shared_bytes": resources.static_shared_bytes,
        "shared_bytes": spec.shared_bytes(),
        "warnings": list(resources.warnings),
        "compile_ms": compiled.milliseconds,
        "options": compiler.options(arch),
        **toolchain.identity(),
        "log": compiled.log,
    }
    path = disk.entry_path(spec.arch, spec.name, digest)
    written = disk.write(path, digest, compiled.cubin, source.text, meta)
    return Kernel(spec, compiled.cubin, meta, "compile", digest, path if written else None)
