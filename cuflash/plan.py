"""What the last call did: which kernel, which tile, why, and where it came from."""

from __future__ import annotations

import threading
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Plan:
    """How a call was answered.

    Attributes
    ----------
    kernel : str
        ``"numpy"`` on the CPU, else the kernel's file in kernels_cu.
    arch : str or None
        Architecture the kernel was compiled for.
    tile : str
        Block sizes and the like, in the form that ``config=`` takes.
    reason : str
        Why this kernel and tile.
    origin : str
        ``"memory"``, ``"disk"`` or ``"compile"``: where the kernel came from at this call;
        ``"override"``: from CUFLASH_CUBIN_DIR.
    registers, spill_bytes, shared_bytes : int or None
        Registers and spilled bytes of a thread, shared memory of a thread block in bytes.
    compile_ms : float or None
        Milliseconds that compiling took, whenever that was.
    spec : str or None
        Name of the compiled spec, as in the cache folder.
    """

    kernel: str
    arch: str | None
    tile: str
    reason: str
    origin: str
    registers: int | None = None
    spill_bytes: int | None = None
    shared_bytes: int | None = None
    compile_ms: float | None = None
    spec: str | None = None


_last = threading.local()


def record(plan: Plan) -> None:
    """Remember how this thread's latest call was answered."""
    _last.plan = plan


def last_plan() -> Plan | None:
    """Tell how this thread's latest call was answered; None before the first."""
    return getattr(_last, "plan", None)
