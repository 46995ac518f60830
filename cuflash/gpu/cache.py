"""A spec's machine code, compiled once: from memory, from disk, or from the compiler.

The key is a digest of everything that decides the machine code, contents and never paths. Whatever
is wrong with the disk (see `disk`), kernels still run, from memory. Machine code made by hand, in
CUFLASH_CUBIN_DIR, goes before all of them.
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
from cuflash.errors import CacheError, CompileError
from cuflash.gpu import compiler, disk, toolchain
from cuflash.gpu.disk import Entry, entries, kernels_dir, prune
from cuflash.gpu.render import Source, render
from cuflash.gpu.spec import KernelSpec

__all__ = [
    "OVERRIDE",
    "Entry",
    "Kernel",
    "clear",
    "entries",
    "invalidate",
    "kernels_dir",
    "load_or_compile",
    "override_path",
    "prune",
]

OVERRIDE = "override"  # origin of machine code made by hand
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
        log. Of machine code made by hand what only the compiler knows is None.
    origin : str
        ``"memory"``, ``"disk"``, ``"compile"``, or ``"override"`` for machine code made by hand.
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
        self.overrides: set[tuple[Path, str]] = set()  # made by hand, and told of


_memory = _Memory()


def _forget() -> None:
    global _memory
    _memory = _Memory()


os.register_at_fork(after_in_child=_forget)


def load_or_compile(spec: KernelSpec) -> Kernel:
    """Return the kernel of a spec made by hand, from memory, from disk, or freshly compiled.

    However many threads ask at once, a kernel is compiled once. A failure is not remembered.

    Raises
    ------
    CompileError
        Also, with CUFLASH_NO_JIT set, for a kernel that is neither in memory nor on disk.
    CacheError
        For a file made by hand that cannot be read.
    UnsupportedArchError, MissingDependencyError
    """
    by_hand = _override(spec)
    if by_hand is not None:
        return by_hand
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


def override_path(folder: Path, spec: KernelSpec) -> Path:
    """File of a spec's machine code in a folder such as CUFLASH_CUBIN_DIR."""
    return folder / spec.arch / f"{spec.name}.cubin"


def invalidate(kernel: Kernel) -> None:
    """Forget a kernel that the driver will not take, in memory and on disk.

    Raises
    ------
    CacheError
        For machine code made by hand, which is its maker's to correct.
    """
    if kernel.origin == OVERRIDE:
        raise CacheError(
            f"the driver cannot load {kernel.meta['path']}, which CUFLASH_CUBIN_DIR has for"
            f" {kernel.spec.name}: correct or delete it, or unset CUFLASH_CUBIN_DIR"
        )
    with _memory.lock:
        _memory.kernels.pop(kernel.digest, None)
    if kernel.directory is not None:
        disk.remove(kernel.directory)


def clear() -> int:
    """Forget every kernel, in memory and on disk; give how many there were on disk."""
    with _memory.lock:
        _memory.kernels.clear()
    return disk.clear()


def _override(spec: KernelSpec) -> Kernel | None:
    folder = settings.cubin_dir()
    if folder is None:
        return None
    path = override_path(folder, spec)
    try:
        if not path.exists() and folder.is_dir():
            return None
        cubin = path.read_bytes()
    except OSError as error:
        raise _unusable(path, error.strerror or str(error)) from error
    if not cubin:
        raise _unusable(path, "it is empty")
    # Of the content, so that an edit is seen; and marked, so that it is never another kernel's.
    digest = hashlib.sha256(b"override\0" + cubin).hexdigest()
    memory = _memory
    with memory.lock:
        fresh = (path, digest) not in memory.overrides
        memory.overrides.add((path, digest))
    if fresh:
        _log.warning("%s runs from %s, made by hand", spec.name, path)
    unknown = (
        "registers",
        "spill_bytes",
        "spill_stores",
        "spill_loads",
        "stack_bytes",
        "compile_ms",
    )
    meta: dict[str, Any] = {
        "name": spec.name,
        "arch": spec.arch,
        "path": str(path),
        **dict.fromkeys(unknown),
        "static_shared_bytes": spec.static_shared_bytes(),
        "shared_bytes": spec.shared_bytes(),
        "warnings": [],
    }
    return Kernel(spec, cubin, meta, OVERRIDE, digest, None)


def _unusable(path: Path, why: str) -> CacheError:
    return CacheError(
        f"CUFLASH_CUBIN_DIR asks for {path}, which cannot be used ({why}): put machine code there"
        " (`cuflash compile --cubin-dir` does), delete it, or unset CUFLASH_CUBIN_DIR"
    )


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
