"""The sweep's side of a worker: start it, ask it, notice that it died or hangs, replace it."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

COMMAND = (sys.executable, "-m", "cuflash.tuning.worker")
# Importing CuPy, starting the driver, random numbers and the right answer of a large problem.
PREPARE_SECONDS = 300.0
_TAIL = 400


class WorkerLost(Exception):
    """The worker died or was killed; ``status`` is "crash" or "timeout"."""

    def __init__(self, status: str, message: str) -> None:
        super().__init__(message)
        self.status = status


class WorkerRefused(Exception):
    """The worker runs, but cannot do what was asked; the message says why."""


class Workbench:
    """A worker prepared for one problem, and another in its place when it is lost.

    Parameters
    ----------
    request : dict
        The ``prepare`` request, which every new worker gets first.
    command : sequence of str, optional
        What to run as a worker.
    """

    def __init__(self, request: dict[str, Any], command: Sequence[str] = COMMAND) -> None:
        self.request = request
        self.command = list(command)
        self.process: subprocess.Popen[str] | None = None
        self.facts: dict[str, Any] = {}

    def __enter__(self) -> Workbench:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def prepare(self) -> dict[str, Any]:
        """Start a worker if none runs; give what it says of the GPU.

        Raises
        ------
        WorkerRefused
            If it says that it cannot.
        WorkerLost
            If it does not live to say so.
        """
        if self.process is None or self.process.poll() is not None:
            self._start()
            answer = self._exchange(self.request, PREPARE_SECONDS)
            if "error" in answer:
                self.close()
                raise WorkerRefused(answer["error"])
            self.facts = answer
        return self.facts

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Put a request to a prepared worker.

        Raises
        ------
        WorkerLost
            If it dies, or has not answered in time and is killed for it.
        """
        self.prepare()
        return self._exchange(request, seconds)

    def close(self) -> None:
        """End the worker, at once."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            for stream in (self.process.stdin, self.process.stdout):
                if stream is not None:
                    with contextlib.suppress(OSError):  # unsent requests to a dead worker
                        stream.close()
            self.process = None

    def _start(self) -> None:
        self.close()
        # The worker must find this very package, wherever the program is started.
        root = os.fspath(Path(__file__).parents[2])
        path = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH")) if p)
        environment = {**os.environ, "PYTHONPATH": path}
        environment.pop("CUFLASH_RECORD", None)  # a sweep's calls are nobody's problems
        self.errors = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors,
            text=True, env=environment,
            start_new_session=True,  # Ctrl-C is for the sweep, which then ends its worker itself
        )  # fmt: skip
        self.lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, args=(self.process, self.lines), daemon=True).start()

    @staticmethod
    def _read(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
        try:
            for line in process.stdout or ():
                lines.put(line)
        except ValueError:  # closed under our hands
            pass
        lines.put(None)

    def _exchange(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        assert self.process is not None and self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            line = self.lines.get(timeout=seconds)
        except queue.Empty:
            self.close()
            raise WorkerLost(
                "timeout", f"no answer in {seconds:.0f} s: it hangs, and was killed"
            ) from None
        except BrokenPipeError:
            line = None
        if line is None:
            raise self._died()
        answer: dict[str, Any] = json.loads(line)
        if answer.pop("last", False):
            self.close()
        return answer

    def _died(self) -> WorkerLost:
        assert self.process is not None
        code = self.process.wait()
        self.errors.seek(0)
        said = self.errors.read().decode(errors="replace").strip()[-_TAIL:]
        self.close()
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        last = said.splitlines()[-1] if said else "it said nothing"
        return WorkerLost("crash", f"the process that ran it died with {how}: {last}")
