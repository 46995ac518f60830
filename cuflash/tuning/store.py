"""Where tuned tables lie: one file a GPU, tuned here in ``<cache>/tuned``, or shipped in the package's ``tuned``.

A table of another GPU, or a damaged one, is ignored with one warning, and set aside when this GPU's is saved.
Several processes may save at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cuflash import settings
from cuflash.errors import CacheError, InvalidArgumentError
from cuflash.gpu.device import Device
from cuflash.tuning.table import GPU_FIELDS, UNREADABLE, Entry, Table, parse, warn_once, write

__all__ = [
    "Change",
    "Entry",
    "Table",
    "all_tables",
    "export",
    "file_name",
    "files",
    "identity",
    "merge",
    "read_file",
    "reset",
    "save",
    "shipped_tables",
    "tables",
    "user_dir",
]

TUNED, SHIPPED = "tuned table", "shipped table"
_SHIPPED = Path(__file__).parents[1] / "tuned"
_ADVICE = "set CUFLASH_CACHE_DIR to a folder that can"


@dataclass(frozen=True, slots=True)
class Change:
    """What `merge` did with an entry: "added", "replaced", "kept" (the one here is newer) or "same"."""

    entry: Entry
    action: str


def tables(device: Device) -> list[Table]:
    """Give the tables of a GPU in the order that they are asked: tuned here, then shipped."""
    gpu = identity(device)
    places = ((user_dir(), TUNED), (_SHIPPED, SHIPPED))
    return [_table(folder / file_name(gpu), label, gpu) for folder, label in places]


def all_tables() -> list[Table]:
    """Give every table that lies in the user's folder, whatever GPU it is of."""
    return _readable(files(), TUNED)


def shipped_tables() -> list[Table]:
    """Give every table that ships, whatever GPU it is of."""
    return _readable(sorted(_SHIPPED.glob("*.json")), SHIPPED)


def files() -> list[Path]:
    """Give the files in the user's folder, those that cannot be read among them."""
    return sorted(user_dir().glob("*.json"))


def user_dir() -> Path:
    """Folder of the tables that are tuned here."""
    return settings.cache_dir() / "tuned"


def identity(device: Device) -> dict[str, Any]:
    """What a table says of its GPU."""
    return {name: getattr(device, name) for name in GPU_FIELDS}


def file_name(gpu: dict[str, Any]) -> str:
    """Name of a GPU's table: "nvidia-h200-132sm.json"."""
    slug = re.sub(r"[^a-z0-9]+", "-", str(gpu["name"]).lower()).strip("-")
    return f"{slug or 'gpu'}-{gpu['sm_count']}sm.json"


def save(gpu: dict[str, Any], entries: Sequence[Entry]) -> Path:
    """Put entries in a GPU's table in the user's folder, in the place of older ones of their buckets.

    Raises
    ------
    CacheError
        If the folder cannot be written.
    """
    now = datetime.now(UTC).isoformat(timespec="seconds")
    with _changing(gpu) as table:
        for entry in entries:
            stamped = replace(entry, versions={"time": now, **entry.versions})
            table.entries[entry.bucket] = stamped
    return table.path


def merge(gpu: dict[str, Any], entries: Sequence[Entry], *, dry_run: bool = False) -> list[Change]:
    """Put entries in the table of the GPU that they were measured on; of two of a bucket the newest stays.

    With ``dry_run`` only say what would change.

    Raises
    ------
    CacheError
        If the folder cannot be written.
    """
    if dry_run:
        return _merged(_table(user_dir() / file_name(gpu), TUNED, gpu), entries)
    with _changing(gpu) as table:
        return _merged(table, entries)


def _merged(table: Table, entries: Sequence[Entry]) -> list[Change]:
    changes = []
    for entry in entries:
        here = table.entries.get(entry.bucket)
        if here is None:
            action = "added"
        elif here == entry:
            action = "same"
        else:
            action = "replaced" if entry.time >= here.time else "kept"
        if action in ("added", "replaced"):
            table.entries[entry.bucket] = entry
        changes.append(Change(entry, action))
    return changes


def export(table: Table, path: Path) -> None:
    """Write a table to a file that a user names.

    Raises
    ------
    CacheError
        If it cannot be written.
    """
    write(table, path, "name a file in a folder that can")


def reset(path: Path) -> int:
    """Delete a table; give how many entries it had.

    Raises
    ------
    CacheError
        If it cannot be deleted.
    """
    with _locked(path):
        try:
            count = len(parse(path, TUNED).entries)
        except UNREADABLE:
            count = 0
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise CacheError(
                f"the tuned table {path} cannot be deleted ({error.strerror}): delete it by hand"
            ) from error
    return count


def read_file(path: Path) -> Table:
    """Read a table that a user names.

    Raises
    ------
    InvalidArgumentError
        For a file that is no table.
    """
    try:
        return parse(path, "file")
    except UNREADABLE as error:
        raise InvalidArgumentError(
            f"{path} is no tuned table ({error!r}): a file of `cuflash tune export` is needed"
        ) from error


def _readable(paths: Sequence[Path], label: str) -> list[Table]:
    return [table for path in paths if (table := _read(path, label)) is not None]


def _table(path: Path, label: str, gpu: dict[str, Any]) -> Table:
    """A GPU's table, empty where there is none that can be used."""
    found = _read(path, label)
    if found is not None and found.gpu != gpu:
        wrong = [name for name in GPU_FIELDS if found.gpu.get(name) != gpu[name]]
        found.ignore(
            f"entries of another GPU ({', '.join(f'{n}={found.gpu.get(n)}' for n in wrong)})",
            "tune on this one",
        )
        found = None
    return found or Table(path, label, gpu)


def _read(path: Path, label: str) -> Table | None:
    """A table; None where there is none, or none that can be read."""
    try:
        return parse(path, label)
    except FileNotFoundError:
        return None
    except UNREADABLE as error:
        warn_once(f"{path} is damaged and ignored ({error!r}): tune again, or delete it")
        return None


@contextlib.contextmanager
def _changing(gpu: dict[str, Any]) -> Iterator[Table]:
    """Give a GPU's table to change, and write it afterwards; nobody else writes meanwhile."""
    path = user_dir() / file_name(gpu)
    with _locked(path):
        table = _table(path, TUNED, gpu)
        yield table
        _set_aside_unless_of(gpu, path)
        write(table, path, _ADVICE)


def _set_aside_unless_of(gpu: dict[str, Any], path: Path) -> None:
    """Keep what is not this GPU's table beside the new one: it may be of use to a person."""
    try:
        if parse(path, "").gpu == gpu:
            return
    except FileNotFoundError:
        return
    except UNREADABLE:
        pass
    names = (path.with_name(f"{path.name}.aside{number or ''}") for number in itertools.count())
    free = next(name for name in names if not name.exists())
    try:
        os.replace(path, free)
    except OSError as error:
        raise CacheError(
            f"{path} is no table of this GPU and cannot be moved to {free.name} ({error.strerror}): delete it"
        ) from error


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Let one process at a time read, change and write a table."""
    with contextlib.ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(open(path.with_suffix(".lock"), "w"))
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            raise CacheError(
                f"the folder {path.parent} cannot be written ({error.strerror}): {_ADVICE}"
            ) from error
        yield
