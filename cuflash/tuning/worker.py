"""The process that runs candidates: it may crash or hang, and is replaced then.

A kernel that leaves its memory poisons the CUDA context of its process for good, so the sweep never
runs one in its own. Requests and answers are JSON, one a line; the protocol is `serve`, which tests use
with a rig of their own in the place of the GPU.

    {"do": "prepare", "op": "forward", "problem": {...}, ...}  -> {"gpu": {...}}
    {"do": "measure", "config": {...}}   -> {"status": "ok", "ms": ..., ...} or {"status": "wrong", "error": ...}
    {"do": "finals", "configs": {name: {...}}, "rounds": n}  -> {"rounds": {name: [ms, ...]}}

An answer with "last" is the worker's last: it ends after it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from typing import Any, Protocol, TextIO

from cuflash.errors import CompileError, CudaError, CuflashError, InvalidConfigError
from cuflash.problem import describe_problem


class Rig(Protocol):
    """What a worker runs candidates on."""

    def prepare(self, request: dict[str, Any]) -> dict[str, Any]:
        """Make the arrays of a problem ready."""

    def measure(self, request: dict[str, Any]) -> dict[str, Any]:
        """Check and time one candidate."""

    def finals(self, request: dict[str, Any]) -> dict[str, Any]:
        """Time some candidates in turn."""


class Poisoned(Exception):
    """The process can run nothing any more; ``answer`` is the last that it gives."""

    def __init__(self, answer: dict[str, Any]) -> None:
        super().__init__(answer)
        self.answer = answer


class GpuRig:
    """Candidates on the current GPU."""

    def prepare(self, request: dict[str, Any]) -> dict[str, Any]:
        """Make the arrays of a problem ready; tells the GPU."""
        import cupy

        from cuflash.gpu.launch import device_info
        from cuflash.tuning import timing
        from cuflash.tuning.operation import OPERATIONS

        cupy.cuda.Device(request["device"]).use()
        device = device_info(request["device"])
        answer = {"gpu": dataclasses.asdict(device), "versions": _versions(cupy)}
        if request.get("problem"):
            problem = describe_problem(**request["problem"])
            self.trial = OPERATIONS[request["op"]](problem, cupy, request["seed"])
            self.timer = timing.GpuTimer(l2=request["l2"], budget=request["seconds"])
        return answer

    def measure(self, request: dict[str, Any]) -> dict[str, Any]:
        """Check and time one candidate."""
        import cupy

        from cuflash.plan import last_plan

        config = request["config"]
        try:
            verdict = self.trial.check(config)
            plan = last_plan()
            facts: dict[str, Any] = {"max_error": verdict.max_error, "bound": verdict.bound}
            if plan is not None:
                facts |= {"registers": plan.registers, "spill_bytes": plan.spill_bytes,
                          "shared_bytes": plan.shared_bytes, "compile_ms": plan.compile_ms}  # fmt: skip
            if not verdict.ok:
                return {"status": "wrong", "error": verdict.in_words, **facts}
            timing = self.timer.measure(self.trial.call(config))
        except InvalidConfigError as error:
            return {"status": "invalid", "error": str(error)}
        except CompileError as error:
            return {"status": "compile", "error": str(error)}
        except (
            CudaError,
            cupy.cuda.runtime.CUDARuntimeError,
            cupy.cuda.driver.CUDADriverError,
        ) as error:
            raise Poisoned({"status": "launch", "error": str(error)}) from error
        return {"status": "ok", **dataclasses.asdict(timing), **facts}

    def finals(self, request: dict[str, Any]) -> dict[str, Any]:
        """Time some candidates in turn."""
        calls = {name: self.trial.call(config) for name, config in request["configs"].items()}
        return {"rounds": self.timer.rounds(calls, request["rounds"])}


def _versions(cupy: Any) -> dict[str, str]:
    from cuflash.gpu import toolchain

    driver = cupy.cuda.runtime.driverGetVersion()
    return {"cuda_driver": f"{driver // 1000}.{driver % 1000 // 10}", **toolchain.identity()}


def serve(rig: Rig, requests: TextIO, answers: TextIO) -> None:
    """Answer requests until there are no more, or until the rig is poisoned."""
    for line in requests:
        request = json.loads(line)
        do = {"prepare": rig.prepare, "measure": rig.measure, "finals": rig.finals}[request["do"]]
        poisoned = False
        try:
            answer = do(request)
        except Poisoned as end:
            answer, poisoned = end.answer, True
        except CuflashError as error:
            answer = {"status": "error", "error": str(error)}
        except Exception as error:  # whatever it is, the sweep must hear of it and go on
            answer = {"status": "error", "error": f"{type(error).__name__}: {error}"}
            poisoned = True
        answers.write(json.dumps({**answer, "last": poisoned}) + "\n")
        answers.flush()
        if poisoned:
            return


def main(rig: Rig) -> None:
    """Serve on the process's standard streams; what kernels print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(rig, sys.stdin, answers)
    answers.close()
    # Not the ordinary way out: a context that is broken, or busy for ever, would make it wait.
    os._exit(0)


if __name__ == "__main__":
    main(GpuRig())
