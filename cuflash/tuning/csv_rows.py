"""Rows of measurements that outlive the run: appended to a CSV with what they were measured on."""

from __future__ import annotations

import contextlib
import csv
import datetime
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import cuflash
from cuflash.errors import InvalidArgumentError

# What a figure means nothing without; first in every file.
ENVIRONMENT = ("time", "gpu", "driver", "torch", "cupy", "nvrtc", "cuflash", "commit")

_DRIVER = Path("/sys/module/nvidia/version")


class CsvRows:
    """A CSV that rows are appended to; its header is written once.

    Parameters
    ----------
    path : Path
        Folders on the way are made.
    columns : sequence of str
        Beyond `ENVIRONMENT`.

    Raises
    ------
    InvalidArgumentError
        For a file that cannot be written, or that has other columns: before anything is measured.
    """

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self.path = path
        self.columns = (*ENVIRONMENT, *columns)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a+", newline="", encoding="utf-8") as file:
                file.seek(0)
                self._check(next(csv.reader(file), None))
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidArgumentError(f"{path} cannot be appended to: {error}") from error

    def _check(self, header: list[str] | None) -> None:
        if header is None or tuple(header) == self.columns:
            return
        missing = [name for name in self.columns if name not in header]
        unknown = [name for name in header if name not in self.columns]
        differs = [
            f"it lacks {', '.join(missing)}" if missing else "",
            f"it has {', '.join(unknown)}" if unknown else "",
            "their order is another" if not missing and not unknown else "",
        ]
        raise InvalidArgumentError(
            f"{self.path} has other columns ({'; '.join(d for d in differs if d)}): rows would not"
            " fit under its header; name another file"
        )

    def append(self, environment: Mapping[str, str], rows: Iterable[Mapping[str, Any]]) -> None:
        """Append rows, each with what they were measured on."""
        with self.path.open("a+b") as file:
            # A line that a killed run left unfinished must not swallow the next one.
            size = file.seek(0, 2)
            if size:
                file.seek(size - 1)
                if file.read(1) != b"\n":
                    file.write(b"\n")
        with self.path.open("a", newline="", encoding="utf-8") as text:
            writer = csv.DictWriter(text, self.columns, lineterminator="\n")
            if not size:
                writer.writeheader()
            writer.writerows({**environment, **row} for row in rows)


def environment(on_gpu: bool, commit: str | None = None) -> dict[str, str]:
    """Say what is measured on: time, GPU, driver, versions, commit; empty where there is none.

    Parameters
    ----------
    on_gpu : bool
        Whether the current GPU is what works; else the CPU.
    commit : str, optional
        Of the source, where no git checkout can be asked.
    """
    values = {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "gpu": "CPU",
        "driver": "",
        "torch": _version("torch"),
        "cupy": _version("cupy", "cupy-cuda13x", "cupy-cuda12x"),
        "nvrtc": "",
        "cuflash": cuflash.__version__,
        "commit": commit or _commit(),
    }
    if on_gpu:
        import cupy

        from cuflash.gpu import launch, toolchain

        values["gpu"] = launch.device_info(cupy.cuda.Device().id).name
        values["driver"] = _driver()
        values["cupy"] = cupy.__version__
        values["nvrtc"] = toolchain.identity()["nvrtc"]
    return values


def _version(*packages: str) -> str:
    for name in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return ""


def _driver() -> str:
    try:
        return _DRIVER.read_text(encoding="ascii").strip()
    except OSError:  # some containers have no /sys of the host's modules
        told = _told(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
        return told.partition("\n")[0]


def _commit() -> str:
    """Commit of the checkout that this package is run from, "-dirty" where it was edited since."""
    root = Path(__file__).parents[2]
    # Installed, the package may lie inside somebody else's checkout.
    if not (root / ".git").exists():
        return ""
    return _told(["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"])


def _told(command: list[str]) -> str:
    """What a program says; nothing if it is not there or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
