"""Compiled kernels on disk: the one place that knows the cache folder.

``<cache>/kernels/<arch>/<spec name>-<digest>/`` holds kernel.cubin (raw, for cuobjdump), kernel.cu
(as compiled) and meta.json. An entry is written in a folder of its own under ``<cache>/tmp`` and
renamed, so it is whole or absent; checksums decide whether it is sound. Nothing here raises because
of the disk.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
import stat
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cuflash import settings
from cuflash.errors import CacheWarning

SCHEMA = 1  # raise it when the meaning of an entry changes

_STALE_SECONDS = 3600.0
_CUBIN, _TEXT, _META = "kernel.cubin", "kernel.cu", "meta.json"
# What `clear` and `prune` may delete: nothing else that lies in the folder is ours.
_ARCH_FOLDER = re.compile(r"sm_\d+[af]?")
_ENTRY_FOLDER = re.compile(r".+-[0-9a-f]{12}")
_log = logging.getLogger("cuflash")
_done: dict[tuple[str, str], object] = {}


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


def kernels_dir() -> Path:
    """Folder of the entries."""
    return settings.cache_dir() / "kernels"


def entry_path(arch: str, name: str, digest: str) -> Path:
    """Folder of one entry."""
    return kernels_dir() / arch / f"{name}-{digest[:12]}"


def read(path: Path, digest: str) -> tuple[bytes, dict[str, Any]] | None:
    """Machine code and meta of an entry; damaged in whatever way, it is a miss."""
    if not _usable():
        return None
    found = _read(path, digest)
    if found is not None:
        with contextlib.suppress(OSError):
            os.utime(path)  # when it was last used, for prune
    return found


def write(path: Path, digest: str, cubin: bytes, text: str, meta: dict[str, Any]) -> bool:
    """Write an entry and say whether it lies there; if the disk will not have it, warn once."""
    if not _usable():
        return False
    temporary = _temporary()
    meta = {**meta, "schema": SCHEMA, "digest": digest, "cubin_sha256": _sha256(cubin)}
    meta["meta_sha256"] = _meta_sha256(meta)
    try:
        _make_folder(path.parent)
        _make_folder(temporary)
        _write_file(temporary / _CUBIN, cubin)
        _write_file(temporary / _TEXT, text.encode())
        _write_file(temporary / _META, json.dumps(meta, indent=1).encode())
        _publish(temporary, path, digest)
    except OSError as error:
        remove(temporary)
        _warn(
            f"compiled kernels cannot be kept in {settings.cache_dir()}"
            f" ({error.strerror or error}): they stay in memory and are compiled again by the next"
            " process; set CUFLASH_CACHE_DIR to a folder that can be written, or CUFLASH_NO_CACHE=1"
        )
        return False
    _sweep()
    return True


def remove(path: Path) -> None:
    """Delete an entry: out of sight first, so that it is never half there. Failing is no error."""
    trash = _temporary()
    with contextlib.suppress(OSError):
        _make_folder(trash.parent)
        os.rename(path, trash)
        path = trash
    shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):  # something that is no folder was in an entry's place
        path.unlink()


def entries() -> list[Entry]:
    """List the entries on disk, the last used first; damaged ones included."""
    return sorted(_entries(), key=lambda e: e.last_used, reverse=True)


def clear() -> int:
    """Delete every entry; give how many there were."""
    found = entries()
    for entry in found:
        remove(entry.path)
    return len(found)


def prune(max_bytes: float | None = None, older_than: float | None = None) -> list[Entry]:
    """Delete entries, the longest unused first, until the rest is within both limits.

    Parameters
    ----------
    max_bytes : float, optional
        How much may stay.
    older_than : float, optional
        Seconds without use after which an entry goes.

    Returns
    -------
    list of Entry
        What was deleted.
    """
    now = time.time()
    found = entries()
    total = sum(entry.bytes for entry in found)
    gone = []
    for entry in reversed(found):
        old = older_than is not None and now - entry.last_used > older_than
        if old or (max_bytes is not None and total > max_bytes):
            remove(entry.path)
            total -= entry.bytes
            gone.append(entry)
    return gone


def _usable() -> bool:
    """Whether the disk is to be used: not in a folder where anyone could plant a kernel."""
    if settings.no_cache():
        return False
    try:
        mode = settings.cache_dir().stat().st_mode
    except OSError:
        return True  # not there yet, or about to fail with a better reason
    if os.name == "posix" and mode & stat.S_IWOTH:
        _warn(
            f"everyone can write to {settings.cache_dir()}, so no kernel is taken from there and"
            " compiled ones stay in memory: chmod o-w it, or set CUFLASH_CACHE_DIR to a folder of"
            " your own, which may lie inside it"
        )
        return False
    return True


def _read(path: Path, digest: str) -> tuple[bytes, dict[str, Any]] | None:
    try:
        cubin = (path / _CUBIN).read_bytes()
        meta = json.loads((path / _META).read_bytes())
        sound = (
            meta["schema"] == SCHEMA
            and meta["digest"] == digest
            and meta["cubin_sha256"] == _sha256(cubin)
            and meta.pop("meta_sha256") == _meta_sha256(meta)
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        if path.exists():
            _log.info("cache entry %s cannot be read (%r): it is replaced", path, error)
        return None
    if not sound:
        _log.info("cache entry %s is damaged: it is replaced", path)
        return None
    return cubin, meta


def _publish(temporary: Path, path: Path, digest: str) -> None:
    """Move a finished entry into place. Who comes second uses what the first one wrote."""
    for last in (False, True):
        try:
            os.rename(temporary, path)
            return
        except OSError:
            # Which error says that something is there differs between systems: look instead.
            if _read(path, digest) is not None:
                remove(temporary)
                return
            if last or not os.path.lexists(path):
                raise
            remove(path)  # damaged


def _make_folder(path: Path) -> None:
    """Make a folder and its parents, as the umask says but never writable by everyone."""
    if not path.is_dir():
        _make_folder(path.parent)
        path.mkdir(mode=0o775, exist_ok=True)


def _write_file(path: Path, content: bytes) -> None:
    # Not flushed to the platter: what a power cut tears, the checksums find.
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o664), "wb") as file:
        file.write(content)


def _temporary() -> Path:
    return settings.cache_dir() / "tmp" / f"{os.getpid()}-{os.urandom(8).hex()}"


def _sweep() -> None:
    """Delete, once a process, what crashed writers left behind."""
    if not _first("sweep"):
        return
    with contextlib.suppress(OSError):
        for path in (settings.cache_dir() / "tmp").iterdir():
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                    shutil.rmtree(path, ignore_errors=True)


def _entries() -> Iterator[Entry]:
    for path in kernels_dir().glob("*/*"):
        if not (_ARCH_FOLDER.fullmatch(path.parent.name) and _ENTRY_FOLDER.fullmatch(path.name)):
            continue
        try:
            size = sum(f.stat().st_size for f in path.iterdir())
            last_used = path.stat().st_mtime
        except OSError:  # deleted while we look
            continue
        try:
            meta = json.loads((path / _META).read_bytes())
        except (OSError, ValueError, RecursionError):
            meta = None
        if not isinstance(meta, dict):
            meta = None
        yield Entry(path, path.parent.name, size, last_used, meta)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _meta_sha256(meta: dict[str, Any]) -> str:
    return _sha256(json.dumps(meta, sort_keys=True).encode())


def _warn(message: str) -> None:
    if _first("warn"):
        warnings.warn(message, CacheWarning, stacklevel=2)


def _first(what: str) -> bool:
    """Whether this is the first time in this process for this folder; one thread is told so."""
    token = object()
    return _done.setdefault((what, str(settings.cache_dir())), token) is token
