"""The file of a sweep: every result is written the moment it is there, and an interrupted sweep goes on.

JSON lines: first what the results depend on, then one candidate a line. A line that a kill cut short
is dropped; results of another GPU or another kernel text are refused, with the field that differs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from cuflash.errors import CacheError, InvalidArgumentError
from cuflash.tuning.record import Record

SCHEMA = 1


class Journal:
    """A sweep's file, open for appending.

    Parameters
    ----------
    path : Path
    header : dict
        What results depend on: GPU, operation, problem, kernel text, versions.
    resume : bool
        Take up the results that are there; else an old file is kept aside as ``.old``.

    Raises
    ------
    InvalidArgumentError
        To resume what was measured on something else.
    CacheError
        If the file cannot be written.
    """

    def __init__(self, path: Path, header: dict[str, Any], *, resume: bool = False) -> None:
        self.path = path
        header = {"schema": SCHEMA, **header}
        self.done: dict[str, Record] = {}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if resume and path.exists():
                self.done = self._take_up(header)
            elif path.exists():
                os.replace(path, path.with_suffix(".old"))
            self.file = path.open("a", encoding="utf-8")
            if not self.file.tell():
                self._append(header)
        except OSError as error:
            raise CacheError(
                f"the sweep's file {path} cannot be written ({error.strerror}): set CUFLASH_CACHE_DIR"
                " to a folder that can"
            ) from error

    def add(self, record: Record) -> None:
        """Write a result, at once and to the disk."""
        self._append(record.as_dict())
        self.done[record.config] = record

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.file.close()

    def _append(self, row: dict[str, Any]) -> None:
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()
        os.fsync(self.file.fileno())

    def _take_up(self, header: dict[str, Any]) -> dict[str, Record]:
        text = self.path.read_bytes()
        whole = text[: text.rfind(b"\n") + 1]
        lines = whole.splitlines()
        found = _json(lines[:1])
        if not found:
            return self._start_over()
        for name, value in header.items():
            if found[0].get(name) != value:
                raise InvalidArgumentError(
                    f"{self.path} cannot be resumed: its {name} is {found[0].get(name)!r} and now it is"
                    f" {value!r}; leave out --resume to sweep anew"
                )
        if len(whole) < len(text):
            with self.path.open("r+b") as file:
                file.truncate(len(whole))
        done = {}
        for row in _json(lines[1:]):
            try:
                record = Record.from_dict(row)
            except (TypeError, KeyError, ValueError):
                continue
            done[record.config] = record
        return done

    def _start_over(self) -> dict[str, Record]:
        os.replace(self.path, self.path.with_suffix(".old"))
        return {}


def _json(lines: Iterable[bytes]) -> list[dict[str, Any]]:
    """The lines that are JSON objects."""
    found = []
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            found.append(row)
    return found
