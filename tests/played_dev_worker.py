"""A worker for `cuflash dev` whose GPU is played: comments in the kernel say what becomes of it.

``// ms=2.5`` is how long it takes, ``// wrong``, ``// crash`` and ``// illegal`` what it does.
"""

from __future__ import annotations

import os
import re
import signal
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cuflash.gpu.device import Device
from cuflash.gpu.render import kernel_root
from cuflash.tuning import worker


class PlayedRig:
    def prepare(self, request: dict[str, Any]) -> dict[str, Any]:
        if "PLAYED_REFUSES" in os.environ:
            raise worker.CudaError("the played GPU is out of order")
        with Path(os.environ["PLAYED_LOG"]).open("a") as log:
            log.write("prepared\n")
        return {"gpu": asdict(Device.from_arch("sm_90"))}

    def measure(self, request: dict[str, Any]) -> dict[str, Any]:
        assert request["config"]["kernel"] == "forward_mma"
        text = (kernel_root() / "forward_mma.cu").read_text()
        if "// crash" in text:
            os.kill(os.getpid(), signal.SIGSEGV)
        if "// illegal" in text:
            raise worker.Poisoned({"status": "launch", "error": "CUDA_ERROR_ILLEGAL_ADDRESS"})
        if "// wrong" in text:
            return {"status": "wrong", "error": "max error 1.0", "max_error": 1.0, "bound": 0.01}
        found = re.search(r"// ms=(\S+)", text)
        ms = float(found[1]) if found else 1.0
        return {"status": "ok", "ms": ms, "p20": ms, "p80": ms, "samples": 9, "max_error": 0.001,
                "bound": 0.01}  # fmt: skip

    def finals(self, request: dict[str, Any]) -> dict[str, Any]:
        raise NotImplementedError


if __name__ == "__main__":
    worker.main(PlayedRig())
