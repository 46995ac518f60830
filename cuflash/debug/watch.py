"""A folder of kernels, watched: at each save one problem's kernel is compiled, checked and timed anew.

`cuflash dev` shows what comes out of here. Kernels run in a process of their own (`watch_worker`), which
is replaced when one leaves its memory or hangs: the loop goes on with the next save.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from cuflash import settings
from cuflash.errors import CompileError, CudaError, InvalidConfigError
from cuflash.gpu import cache, render
from cuflash.gpu.cache import Kernel
from cuflash.gpu.choose import choose
from cuflash.gpu.device import Device
from cuflash.gpu.spec import KernelSpec
from cuflash.gpu.tiles import Tile
from cuflash.problem import AttentionProblem
from cuflash.tuning.workbench import Workbench, WorkerLost, WorkerRefused

POLL_SECONDS = 0.1
# Editors write a file in several steps: a round begins when nothing more changed for this long.
_SETTLE_SECONDS = 0.03
_HANG_SECONDS = 60.0
_SUFFIXES = (".cu", ".cuh", ".in")
_MISTAKE = re.compile(
    r"^kernels_cu/([^()\n]+)\((\d+)\): (?:catastrophic )?error\S*: (.+)$", re.MULTILINE
)


@dataclass(frozen=True, slots=True)
class Mistake:
    """What the compiler does not like, where, and how the line reads."""

    path: Path
    line: int
    message: str
    text: str


@dataclass(frozen=True, slots=True)
class Run:
    """What became of a kernel on the GPU; ``status`` is "ok", "wrong", or how it failed."""

    status: str
    ms: float | None = None
    p20: float | None = None
    p80: float | None = None
    max_error: float | None = None
    bound: float | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Version:
    """The kernel as it was at one save.

    Attributes
    ----------
    number : int
        From 1.
    files : tuple of str
        What was edited since the version before.
    seconds : float
        From the save's discovery to the answer.
    kernel : Kernel or None
        None where it does not compile; ``error`` and ``mistakes`` say why.
    run : Run or None
        None where there is no GPU, or no kernel.
    base : Version or None
        The last good one before it.
    """

    number: int
    files: tuple[str, ...]
    seconds: float
    kernel: Kernel | None = None
    run: Run | None = None
    error: str | None = None
    mistakes: tuple[Mistake, ...] = ()
    base: Version | None = None

    @property
    def ok(self) -> bool:
        """Whether it compiles and, where it was run, is right."""
        return self.kernel is not None and (self.run is None or self.run.status == "ok")


class Folder:
    """The kernels' folder, and what of it changed since the last look."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._stamps: dict[str, tuple[int, ...]] = {}
        self._digests: dict[str, bytes] = {}
        self.changes()

    def changes(self) -> set[str]:
        """Name the files whose content is another one; only what has another date or size is read."""
        stamps = dict(self._look())
        changed = set()
        for name in stamps.keys() | self._stamps.keys():
            if stamps.get(name) == self._stamps.get(name):
                continue
            try:
                digest = hashlib.sha256((self.root / name).read_bytes()).digest()
            except OSError:  # deleted, or between two steps of a save
                digest = b""
            if digest != self._digests.get(name, b""):
                changed.add(name)
            self._digests[name] = digest
        self._stamps = stamps
        return changed

    def _look(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        for folder, _, names in os.walk(self.root):
            for name in names:
                path = Path(folder, name)
                if path.suffix in _SUFFIXES:
                    try:
                        stat = path.stat()
                    except OSError:
                        continue
                    stamp = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
                    yield path.relative_to(self.root).as_posix(), stamp


class Session:
    """One problem's kernel, version after version. The tile is chosen once: an edit must not move it.

    Parameters
    ----------
    problem : AttentionProblem
    device : Device
        What to compile for.
    config : str or mapping, optional
        Kernel and tile, as calls take them.
    bench : Workbench, optional
        Where the kernels run; None compiles only.

    Raises
    ------
    InvalidConfigError
        For a tile that cannot run, or with CUFLASH_CUBIN_DIR set.
    """

    def __init__(
        self,
        problem: AttentionProblem,
        device: Device,
        config: Any = None,
        bench: Workbench | None = None,
    ) -> None:
        if settings.cubin_dir() is not None:
            raise InvalidConfigError(
                "CUFLASH_CUBIN_DIR is set, so an edited kernel might not be what runs: unset it"
            )
        self.device = device
        self.bench = bench
        self.choice = choose(problem, device, config)
        self.spec: KernelSpec = self.choice.spec
        self.count = 0
        self.good: Version | None = None
        self.first_good: Version | None = None
        self.goods = 0

    def round(self, files: Sequence[str] = ()) -> Version:
        """Compile, check and time the kernel as it is now."""
        start = time.perf_counter()
        self.count += 1
        kernel: cache.Kernel | None = None
        run: Run | None = None
        error: str | None = None
        mistakes: tuple[Mistake, ...] = ()
        try:
            kernel = cache.load_or_compile(self.spec)
        except CompileError as failure:
            error, mistakes = str(failure), find_mistakes(failure.log, render.kernel_root())
        if kernel is not None and self.bench is not None:
            run = self._run(self.bench)
        seconds = time.perf_counter() - start
        version = Version(
            self.count, tuple(sorted(files)), seconds, kernel, run, error, mistakes, self.good
        )
        if version.ok:
            self.goods += 1
            self.good = version
            self.first_good = self.first_good or version
        return version

    def concerns(self, files: set[str]) -> bool:
        """Whether some of the files are part of the kernel, as far as that can be told."""
        try:
            source = render.render(self.spec)
        except CompileError:
            return True
        return bool(files & {source.name, "prelude.cuh.in", *source.includes})

    def _run(self, bench: Workbench) -> Run:
        config = {"kernel": self.spec.kernel}
        config |= {f.name: getattr(self.spec, f.name) for f in fields(Tile)}
        try:
            answer = bench.ask({"do": "measure", "config": config}, _HANG_SECONDS)
        except WorkerRefused as failure:
            raise CudaError(f"the GPU could not be made ready again: {failure}") from failure
        except WorkerLost as failure:
            return Run(failure.status, error=str(failure))
        known: dict[str, Any] = {f.name: answer.get(f.name) for f in fields(Run)}
        return Run(**known)


def workbench(problem: AttentionProblem, seed: int = 0) -> Workbench:
    """Give what runs a problem's kernels on the current GPU; it looks at their text each time."""
    request = {
        "do": "prepare", "op": "forward", "problem": problem.options, "device": 0, "seed": seed,
        "l2": "warm", "seconds": 0.2,
    }  # fmt: skip
    return Workbench(request, (sys.executable, "-m", "cuflash.debug.watch_worker"))


def versions(
    session: Session,
    folder: Folder,
    *,
    stop: Callable[[], bool] = lambda: False,
    poll: float = POLL_SECONDS,
) -> Iterator[Version]:
    """Yield the kernel as it is, then a version for each save that concerns it, until told to stop."""
    yield session.round()
    while not stop():
        changed = folder.changes()
        if not changed:
            time.sleep(poll)
            continue
        while more := _changes_after(folder, _SETTLE_SECONDS):
            changed |= more
        if session.concerns(changed):
            yield session.round(sorted(changed))


def _changes_after(folder: Folder, seconds: float) -> set[str]:
    time.sleep(seconds)
    return folder.changes()


def find_mistakes(log: str, root: Path) -> tuple[Mistake, ...]:
    """Read the errors out of NVRTC's log, and their lines out of the files."""
    found = []
    for name, line, message in _MISTAKE.findall(log):
        try:
            text = (root / name).read_text(encoding="utf-8").splitlines()[int(line) - 1]
        except (OSError, ValueError, IndexError):  # edited again since
            text = ""
        found.append(Mistake(root / name, int(line), message, text))
    return tuple(found)
