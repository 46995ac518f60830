"""Tuned tables: the best tile of each bucket of problems, one file a GPU.

A table is JSON in ``<cache>/tuned``, where `cuflash.tune` writes, or in the package's ``tuned``, which
ships. It says which GPU and which kernel text it was measured on, and both are read back and
compared: an entry of another GPU, of an older text, or damaged, is ignored with one warning.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from cuflash import settings
from cuflash.errors import CacheError, InvalidArgumentError, TuningWarning
from cuflash.gpu.device import Device
from cuflash.gpu.render import kernel_digest
from cuflash.problem import AttentionProblem
from cuflash.tuning.bucket import NEAR, Bucket, bucket_of

SCHEMA = 1
_SHIPPED = Path(__file__).parents[1] / "tuned"
_GPU_FIELDS = ("name", "compute_capability", "sm_count", "shared_per_block", "shared_per_sm")


@dataclass(frozen=True, slots=True)
class Entry:
    """The winner of a sweep.

    Attributes
    ----------
    bucket : Bucket
    config : dict
        Kernel and tile, as ``config=`` takes them.
    kernel_digest : str
        Of the kernel's text when it was measured.
    problem : str
        The problem that was measured, in words.
    ms, default_ms : float
        Medians of the winner and of the heuristic's tile, timed in turn.
    verdict : str
        "faster", or "tie" where the heuristic's tile was kept.
    versions : dict
        driver, nvrtc, cuflash, time.
    """

    bucket: Bucket
    config: dict[str, Any]
    kernel_digest: str
    problem: str
    ms: float
    default_ms: float
    verdict: str
    versions: dict[str, str] = field(default_factory=dict)


@dataclass
class Table:
    """The entries of one GPU in one file; ``label`` says where they come from."""

    path: Path
    label: str
    gpu: dict[str, Any]
    entries: dict[Bucket, Entry] = field(default_factory=dict)

    def lookup(self, problem: AttentionProblem, op: str = "forward") -> Entry | None:
        """Find the entry of a problem's bucket, or of the nearest one, whose kernel is unchanged."""
        wanted = bucket_of(problem, op)
        near = sorted(
            (e for e in self.entries.values() if e.bucket.distance(wanted) <= NEAR),
            key=lambda e: (e.bucket.distance(wanted), e.bucket.name),
        )
        for entry in near:
            if entry.kernel_digest == kernel_digest(str(entry.config.get("kernel"))):
                return entry
            self.ignore(
                "entries measured on another text of the kernel", "run `cuflash tune` again"
            )
        return None

    def state(self) -> str:
        """Say why no entry was found."""
        if not self.entries:
            return f"nothing for {self.gpu['name']}"
        return f"{len(self.entries)} entries, none for such a problem"

    def ignore(self, what: str, advice: str) -> None:
        """Warn once of something in the file that is not used."""
        _warn_once(f"{self.path}: {what} are ignored; {advice}")


def tables(device: Device) -> list[Table]:
    """Give the tables of a GPU in the order that they are asked: tuned here, then shipped."""
    gpu = identity(device)
    places = ((user_dir(), "tuned table"), (_SHIPPED, "shipped table"))
    return [_table(folder / file_name(gpu), label, gpu) for folder, label in places]


def all_tables() -> list[Table]:
    """Give every table that lies in the user's folder, whatever GPU it is of."""
    found = []
    for path in sorted(user_dir().glob("*.json")):
        table = _read(path, "tuned table")
        if table is not None:
            found.append(table)
    return found


def user_dir() -> Path:
    """Folder of the tables that are tuned here."""
    return settings.cache_dir() / "tuned"


def identity(device: Device) -> dict[str, Any]:
    """What a table says of its GPU."""
    return {name: getattr(device, name) for name in _GPU_FIELDS}


def file_name(gpu: dict[str, Any]) -> str:
    """Name of a GPU's table: "nvidia-h200-132sm.json"."""
    slug = re.sub(r"[^a-z0-9]+", "-", str(gpu["name"]).lower()).strip("-")
    return f"{slug}-{gpu['sm_count']}sm.json"


def save(gpu: dict[str, Any], entries: Sequence[Entry]) -> Path:
    """Put entries in a GPU's table in the user's folder, in the place of older ones of their buckets.

    Raises
    ------
    CacheError
        If the folder cannot be written.
    """
    path = user_dir() / file_name(gpu)
    with _locked(path):
        table = _table(path, "tuned table", gpu)
        _set_aside_if_damaged(path)
        table.entries.update({entry.bucket: entry for entry in entries})
        write(table, path)
    return path


def reset(path: Path) -> int:
    """Delete a table; give how many entries it had."""
    with _locked(path):
        table = _read(path, "tuned table")
        path.unlink(missing_ok=True)
    return len(table.entries) if table else 0


def write(table: Table, path: Path) -> None:
    """Write a table whole or not at all."""
    rows = sorted(table.entries.values(), key=lambda e: e.bucket.name)
    document = {"schema": SCHEMA, "gpu": table.gpu, "entries": [asdict(e) for e in rows]}
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise CacheError(
            f"the tuned table {path} cannot be written ({error.strerror}): set CUFLASH_CACHE_DIR to a"
            " folder that can"
        ) from error


def read_file(path: Path) -> Table:
    """Read a table that a user names.

    Raises
    ------
    InvalidArgumentError
        For a file that is no table.
    """
    try:
        return _parse(path, "file")
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise InvalidArgumentError(
            f"{path} is no tuned table ({error!r}): a file of `cuflash tune export` is needed"
        ) from error


def _table(path: Path, label: str, gpu: dict[str, Any]) -> Table:
    """A GPU's table, empty where there is none that can be used."""
    found = _read(path, label)
    if found is not None and found.gpu != gpu:
        wrong = [name for name in _GPU_FIELDS if found.gpu.get(name) != gpu[name]]
        found.ignore(
            f"entries of another GPU ({', '.join(f'{n}={found.gpu.get(n)}' for n in wrong)})",
            "tune on this one",
        )
        found = None
    return found or Table(path, label, gpu)


def _read(path: Path, label: str) -> Table | None:
    """A table; None where there is none, or none that can be read."""
    try:
        return _parse(path, label)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        _warn_once(f"{path} is damaged and ignored ({error!r}): tune again, or delete it")
        return None


def _parse(path: Path, label: str) -> Table:
    document = json.loads(path.read_bytes())
    if document["schema"] != SCHEMA:
        raise ValueError(f"schema {document['schema']}, {SCHEMA} is known here")
    gpu = {name: document["gpu"][name] for name in _GPU_FIELDS}
    entries = [_entry(row) for row in document["entries"]]
    return Table(path, label, gpu, {entry.bucket: entry for entry in entries})


def _entry(row: dict[str, Any]) -> Entry:
    bucket = Bucket(**row["bucket"])
    sizes = (bucket.seqlen_q, bucket.seqlen_k, bucket.heads, bucket.group)
    if not isinstance(row["config"], dict) or not all(isinstance(s, int) and s > 0 for s in sizes):
        raise ValueError("an entry without a config, or with a size that is none")
    values = {f.name: row[f.name] for f in fields(Entry)}
    return Entry(
        **{
            **values,
            "bucket": bucket,
            "ms": float(row["ms"]),
            "default_ms": float(row["default_ms"]),
        }
    )


def _set_aside_if_damaged(path: Path) -> None:
    """Keep what cannot be read beside the new table: it may be of use to a person."""
    with contextlib.suppress(FileNotFoundError):
        try:
            _parse(path, "")
        except FileNotFoundError:
            raise
        except Exception:
            os.replace(path, path.with_suffix(".damaged"))


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Let one process at a time read, change and write a table."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path.with_suffix(".lock"), "w")
    except OSError as error:
        raise CacheError(
            f"the folder {path.parent} cannot be written ({error.strerror}): set CUFLASH_CACHE_DIR to"
            " one that can"
        ) from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


_warned: set[str] = set()


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, TuningWarning, stacklevel=2)
