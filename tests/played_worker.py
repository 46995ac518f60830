"""A worker whose GPU is played: times follow a formula, and some candidates misbehave.

PLAYED is JSON in the environment: {"bad": {"block_n=96": "crash", ...}, "fast": "block_n=32", "log": FILE, "sleep": s}.
A candidate is bad if its config holds the key as a word.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from dataclasses import asdict
from typing import Any

from cuflash.gpu.device import Device
from cuflash.tuning import worker
from cuflash.tuning.space import config_name

PLAYED = json.loads(os.environ.get("PLAYED", "{}"))


class PlayedRig:
    def __init__(self) -> None:
        self.random = random.Random(0)

    def prepare(self, request: dict[str, Any]) -> dict[str, Any]:
        if "refuse" in PLAYED:
            raise worker.CudaError(PLAYED["refuse"])
        self.log("prepare")
        gpu = asdict(Device.from_arch("sm_90")) | {"name": PLAYED.get("gpu", "NVIDIA Played")}
        return {"gpu": gpu, "versions": {"cuda_driver": "13.0"}}

    def milliseconds(self, config: dict[str, Any]) -> float:
        base = 1.0 + abs(config["block_m"] - 128) / 256 + abs(config["block_n"] - 64) / 128
        base += 0.05 * config["num_stages"]
        name = config_name(config)
        words = PLAYED.get("fast", "").split()
        if words and all(word in name.split() for word in words):
            base = 0.5
        return base * self.random.uniform(0.99, 1.01)

    def measure(self, request: dict[str, Any]) -> dict[str, Any]:
        config = request["config"]
        name = config_name(config)
        self.log(name)
        time.sleep(PLAYED.get("sleep", 0))
        for word, what in PLAYED.get("bad", {}).items():
            if all(part in name.split() for part in word.split()):
                return self.misbehave(what)
        ms = self.milliseconds(config)
        return {"status": "ok", "ms": ms, "p20": 0.99 * ms, "p80": 1.01 * ms, "samples": 9, "registers": 128,
                "spill_bytes": 0, "shared_bytes": 50_000, "compile_ms": 7.0, "max_error": 1e-3,
                "bound": 2e-3}  # fmt: skip

    def misbehave(self, what: str) -> dict[str, Any]:
        if what == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if what == "hang":
            time.sleep(1000)
        if what == "poison":
            raise worker.Poisoned({"status": "launch", "error": "CUDA_ERROR_ILLEGAL_ADDRESS"})
        if what == "noise":
            print("printed by a kernel", flush=True)
            os.write(1, b"and by another\n")
        if what == "exception":
            raise RuntimeError("unexpected")
        return {"status": "wrong", "error": "max error 3.2, allowed 0.01"}

    def finals(self, request: dict[str, Any]) -> dict[str, Any]:
        self.log("finals")
        rounds = range(request["rounds"])
        return {
            "rounds": {
                n: [self.milliseconds(c) for _ in rounds] for n, c in request["configs"].items()
            }
        }

    def log(self, line: str) -> None:
        if "log" in PLAYED:
            with open(PLAYED["log"], "a") as file:
                print(line, file=file)


if __name__ == "__main__":
    print("hello on stderr", file=sys.stderr)
    worker.main(PlayedRig())
