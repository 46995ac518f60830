"""One tuned table: its entries, which of them a problem gets, and the file it is kept in.

The file is JSON. It says which GPU and which kernel text each entry was measured on, and both are read
back and compared; `parse` takes nothing on trust, since people edit, copy and cut such files.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import warnings
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from cuflash.errors import CacheError, TuningWarning
from cuflash.gpu.render import kernel_digest
from cuflash.problem import AttentionProblem
from cuflash.tuning.bucket import NEAR, Bucket, bucket_of

SCHEMA = 1
GPU_FIELDS = ("name", "compute_capability", "sm_count", "shared_per_block", "shared_per_sm")
# What reading a file that is no table may raise.
UNREADABLE = (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError)
_MAX_SIZE = 2**62


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
        driver, nvrtc, cuflash, and the time (UTC, ISO 8601) when it was saved.
    """

    bucket: Bucket
    config: dict[str, Any]
    kernel_digest: str
    problem: str
    ms: float
    default_ms: float
    verdict: str
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def kernel(self) -> str:
        """Name of the kernel."""
        return str(self.config.get("kernel"))

    @property
    def current(self) -> bool:
        """Whether the kernel's text is the one that was measured."""
        return self.kernel_digest == kernel_digest(self.kernel)

    @property
    def time(self) -> str:
        """When it was saved; "" where nobody knows, which is before any time."""
        return self.versions.get("time", "")


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
            if entry.current:
                return entry
            self.ignore(
                "entries measured on another text of the kernel", "run `cuflash tune` again"
            )
        return None

    def state(self) -> str:
        """Say why no entry was found."""
        if not self.entries:
            return f"nothing for {self.gpu['name']}"
        digests = {e.kernel: kernel_digest(e.kernel) for e in self.entries.values()}
        old = sum(e.kernel_digest != digests[e.kernel] for e in self.entries.values())
        of_old = f" ({old} measured on another text of the kernel)" if old else ""
        return f"{len(self.entries)} entries{of_old}, none for such a problem"

    def ignore(self, what: str, advice: str) -> None:
        """Warn once of something in the file that is not used."""
        warn_once(f"{self.path}: {what} are ignored; {advice}")


def parse(path: Path, label: str) -> Table:
    """Read a table; raises one of `UNREADABLE` for a file that is none."""
    document = json.loads(path.read_bytes())
    if document["schema"] != SCHEMA:
        raise ValueError(f"schema {document['schema']}, {SCHEMA} is known here")
    gpu = {name: document["gpu"][name] for name in GPU_FIELDS}
    if not isinstance(gpu["name"], str) or not all(_is_size(gpu[n]) for n in GPU_FIELDS[1:]):
        raise ValueError(f"no GPU: {gpu}")
    entries = [_entry(row) for row in document["entries"]]
    return Table(path, label, gpu, {entry.bucket: entry for entry in entries})


def _entry(row: dict[str, Any]) -> Entry:
    bucket = Bucket(**row["bucket"])
    values = {f.name: row[f.name] for f in fields(Entry)}
    entry = Entry(**{**values, "bucket": bucket, "versions": dict(row["versions"])})
    texts = (
        bucket.kind,
        entry.kernel_digest,
        entry.problem,
        entry.verdict,
        *entry.versions.values(),
    )
    sizes = (bucket.seqlen_q, bucket.seqlen_k, bucket.heads, bucket.group)
    # The kernel becomes a file name.
    if not isinstance(entry.config, dict) or not entry.kernel.isidentifier():
        raise ValueError(f"config {entry.config!r} names no kernel")
    if not all(isinstance(text, str) for text in texts) or not entry.kernel_digest:
        raise ValueError(f"an entry with a text that is none: {texts}")
    if not all(_is_size(size) for size in sizes):
        raise ValueError(f"a bucket with a size that is none: {sizes}")
    if not all(_is_time(ms) for ms in (entry.ms, entry.default_ms)):
        raise ValueError(f"a time that is none: {entry.ms!r}, {entry.default_ms!r}")
    return entry


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 < value < _MAX_SIZE


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf


def write(table: Table, path: Path, advice: str) -> None:
    """Write a table whole or not at all; ``advice`` says what to do where the file cannot be written.

    Raises
    ------
    CacheError
    """
    rows = sorted(table.entries.values(), key=lambda e: e.bucket.name)
    document = {"schema": SCHEMA, "gpu": table.gpu, "entries": [asdict(e) for e in rows]}
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise CacheError(
            f"the tuned table {path} cannot be written ({error.strerror}): {advice}"
        ) from error


_warned: set[str] = set()


def warn_once(message: str) -> None:
    """Warn, but once a process: a table is read anew for each problem."""
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, TuningWarning, stacklevel=2)
