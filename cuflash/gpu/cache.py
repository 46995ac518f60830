"""Compiled kernels, in memory and on disk: the one place that knows the cache folder.

``<cache>/kernels/<arch>/<spec name>-<digest>/`` holds kernel.cubin (raw, for cuobjdump), kernel.cu (as
compiled) and meta.json. An entry is written in a folder of its own and renamed, so it is whole or absent;
a checksum decides whether it is sound. Whatever is wrong with the disk, kernels still run, from memory.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import shutil
import threading
import time
import uuid
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cuflash import settings
from cuflash.errors import CacheWarning, CompileError
from cuflash.gpu import compiler, toolchain
from cuflash.gpu.render import Source, render
from cuflash.gpu.spec import KernelSpec

_SCHEMA = 1  # raise it when the meaning of an entry changes
_MAX_IN_MEMORY = 256
_STALE_SECONDS = 3600.0
_log = logging.getLogger("cuflash")


@dataclass(frozen=True, slots=True)
class Kernel:
    """A compiled kernel and where it came from: "memory", "disk" or "compile"."""

    spec: KernelSpec
    cubin: bytes
    meta: dict[str, Any]
    origin: str
    digest: str
    directory: Path | None


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry on disk; ``meta`` is None where it cannot be read."""

    path: Path
    arch: str
    bytes: int
    last_used: float
    meta: dict[str, Any] | None

    @property
    def name(self) -> str:
        """Folder name: the spec's name and the digest."""
        return self.path.name


class _State:
    """What lives in memory; made anew in a forked child, where a lock may be held by nobody."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.kernels: OrderedDict[str, Kernel] = OrderedDict()
        self.pending: dict[str, Future[Kernel]] = {}
        self.warned = False
        self.swept = False


_state = _State()


def _reset() -> None:
    global _state
    _state = _State()


os.register_at_fork(after_in_child=_reset)


def load_or_compile(spec: KernelSpec) -> Kernel:
    """Return the kernel of a spec from memory, from disk, or freshly compiled.

    However many threads ask at once, a kernel is compiled once. A failure is not remembered.

    Raises
    ------
    CompileError, UnsupportedArchError, MissingDependencyError
    """
    source = render(spec)
    digest = _digest(source, spec.arch)
    state = _state
    with state.lock:
        kernel = state.kernels.get(digest)
        if kernel is not None:
            state.kernels.move_to_end(digest)
            return replace(kernel, spec=spec, origin="memory")
        future = state.pending.get(digest)
        leader = future is None
        if future is None:
            future = state.pending[digest] = Future()
    if not leader:
        return future.result()
    try:
        kernel = _from_disk(spec, spec.arch, digest) or _compile(spec, source, digest)
    except BaseException as error:
        with state.lock:
            del state.pending[digest]
        future.set_exception(error)
        raise
    with state.lock:
        state.kernels[digest] = kernel
        while len(state.kernels) > _MAX_IN_MEMORY:
            state.kernels.popitem(last=False)
        del state.pending[digest]
    future.set_result(kernel)
    return kernel


def invalidate(kernel: Kernel) -> None:
    """Forget a kernel that the driver will not take, in memory and on disk."""
    with _state.lock:
        _state.kernels.pop(kernel.digest, None)
    if kernel.directory is not None:
        _remove(kernel.directory)


def _digest(source: Source, arch: str) -> str:
    """Hash everything that decides the machine code: contents, never paths."""
    content = {
        "schema": _SCHEMA,
        "text": source.text,
        "includes": source.includes,
        "options": compiler.options(arch),
        **toolchain.identity(),
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _compile(spec: KernelSpec, source: Source, digest: str) -> Kernel:
    arch = toolchain.resolve_arch(spec.arch)
    if arch != spec.arch:
        _log.info("%s is unknown to NVRTC; compiling for %s, whose code it runs", spec.arch, arch)
    if settings.no_jit():
        raise CompileError(
            f"{spec.name} for {spec.arch} is not in the cache and CUFLASH_NO_JIT is set: unset it, or compile"
            " the kernel first with `cuflash compile`"
        )
    compiled = compiler.compile_source(source, arch)
    resources = compiled.resources
    _log.info("compiled %s for %s in %.0f ms", spec.name, arch, compiled.milliseconds)
    meta = {
        "schema": _SCHEMA,
        "name": spec.name,
        "arch": arch,
        "digest": digest,
        "cubin_sha256": hashlib.sha256(compiled.cubin).hexdigest(),
        "registers": resources.registers,
        "spill_bytes": resources.spill_bytes,
        "stack_bytes": resources.stack_bytes,
        "static_shared_bytes": resources.static_shared_bytes,
        "shared_bytes": spec.shared_bytes(),
        "warnings": list(resources.warnings),
        "compile_ms": compiled.milliseconds,
        "options": compiler.options(arch),
        **toolchain.identity(),
        "log": compiled.log,
    }
    kernel = Kernel(spec, compiled.cubin, meta, "compile", digest, None)
    return _publish(kernel, source)


# --- disk -------------------------------------------------------------------------------------------


def kernels_dir() -> Path:
    """Folder of the entries."""
    return settings.cache_dir() / "kernels"


def _entry_path(spec: KernelSpec, arch: str, digest: str) -> Path:
    return kernels_dir() / arch / f"{spec.name}-{digest[:12]}"


def _from_disk(spec: KernelSpec, arch: str, digest: str) -> Kernel | None:
    """Read an entry; damaged in whatever way, it is a miss."""
    if settings.no_cache():
        return None
    path = _entry_path(spec, arch, digest)
    try:
        cubin = (path / "kernel.cubin").read_bytes()
        meta = json.loads((path / "meta.json").read_text(encoding="utf-8"))
        sound = (
            meta["schema"] == _SCHEMA
            and meta["digest"] == digest
            and meta["cubin_sha256"] == hashlib.sha256(cubin).hexdigest()
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        _log.info("cache entry %s cannot be read (%s): compiling anew", path, error)
        return None
    if not sound:
        _log.info("cache entry %s is damaged: compiling anew", path)
        return None
    with contextlib.suppress(OSError):
        os.utime(path)  # when it was last used, for prune
    return Kernel(spec, cubin, meta, "disk", digest, path)


def _publish(kernel: Kernel, source: Source) -> Kernel:
    """Write an entry; if the disk will not have it, warn once and go on from memory."""
    if settings.no_cache():
        return kernel
    path = _entry_path(kernel.spec, kernel.spec.arch, kernel.digest)
    temporary = settings.cache_dir() / "tmp" / f"{os.getpid()}-{uuid.uuid4().hex}"
    try:
        temporary.mkdir(parents=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(temporary / "kernel.cubin", kernel.cubin)
        _write(temporary / "kernel.cu", source.text.encode())
        _write(temporary / "meta.json", json.dumps(kernel.meta, indent=1).encode())
        _move_into_place(kernel, temporary, path)
    except OSError as error:
        _remove(temporary)
        _warn(
            f"compiled kernels cannot be kept in {settings.cache_dir()} ({error.strerror or error}): they stay"
            " in memory and are compiled again by the next process; set CUFLASH_CACHE_DIR to a folder that"
            " can be written, or CUFLASH_NO_CACHE=1"
        )
        return kernel
    _sweep()
    return replace(kernel, directory=path)


def _move_into_place(kernel: Kernel, temporary: Path, path: Path) -> None:
    try:
        os.rename(temporary, path)
        return
    except OSError as error:
        # Somebody was faster, or a damaged entry is in the way. Windows says PermissionError for both.
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.EACCES, errno.EPERM) or not path.exists():
            raise
    if _from_disk(kernel.spec, kernel.spec.arch, kernel.digest) is None:
        _remove(path)
        with contextlib.suppress(OSError):  # lost to another writer: its entry serves as well
            os.rename(temporary, path)
    _remove(temporary)


def _write(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _remove(path: Path) -> None:
    """Take a folder out of sight first, so that nobody reads it half-deleted."""
    trash = settings.cache_dir() / "tmp" / f"trash-{uuid.uuid4().hex}"
    with contextlib.suppress(OSError):
        trash.parent.mkdir(parents=True, exist_ok=True)
        os.rename(path, trash)
        path = trash
    shutil.rmtree(path, ignore_errors=True)


def _sweep() -> None:
    """Delete, once a process, what crashed writers left behind."""
    if _state.swept:
        return
    _state.swept = True
    with contextlib.suppress(OSError):
        for path in (settings.cache_dir() / "tmp").iterdir():
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                    shutil.rmtree(path, ignore_errors=True)


def _warn(message: str) -> None:
    if not _state.warned:
        _state.warned = True
        warnings.warn(message, CacheWarning, stacklevel=2)


# --- upkeep -----------------------------------------------------------------------------------------


def entries() -> list[Entry]:
    """List the entries on disk, the last used first; unreadable ones included."""
    return sorted(_entries(), key=lambda e: e.last_used, reverse=True)


def _entries() -> Iterator[Entry]:
    root = kernels_dir()
    for path in root.glob("*/*"):
        try:
            if not path.is_dir():
                continue
            size = sum(f.stat().st_size for f in path.iterdir() if f.is_file())
            last_used = path.stat().st_mtime
        except OSError:
            continue
        try:
            meta = json.loads((path / "meta.json").read_text(encoding="utf-8"))
            meta = meta if isinstance(meta, dict) else None
        except (OSError, ValueError):
            meta = None
        yield Entry(path, path.parent.name, size, last_used, meta)


def clear() -> int:
    """Delete every entry; how many there were."""
    found = entries()
    for entry in found:
        _remove(entry.path)
    return len(found)


def prune(max_bytes: int | None = None, older_than: float | None = None) -> list[Entry]:
    """Delete entries not used for ``older_than`` seconds, then the longest unused above ``max_bytes``.

    Returns
    -------
    list of Entry
        What was deleted.
    """
    now = time.time()
    kept, gone, total = [], [], 0
    for entry in entries():
        total += entry.bytes
        old = older_than is not None and now - entry.last_used > older_than
        large = max_bytes is not None and total > max_bytes
        if old or large:
            total -= entry.bytes
            gone.append(entry)
        else:
            kept.append(entry)
    for entry in gone:
        _remove(entry.path)
    return gone
