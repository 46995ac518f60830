"""What a sweep knows of one candidate."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

# Of a candidate that was measured, and of those that were not: why.
STATUSES = ("ok", "wrong", "compile", "invalid", "launch", "crash", "timeout", "error")


@dataclass(frozen=True)
class Record:
    """One candidate of a sweep.

    Attributes
    ----------
    config : str
        Kernel and tile, as ``config=`` takes them.
    spec : str
        Name of the compiled spec.
    status : str
        "ok", or why it is out: "wrong" (answer), "compile", "invalid" (config), "launch" (driver
        or kernel error), "crash" (its process died), "timeout" (it hung), "error" (anything else).
    error : str or None
        The reason in words.
    ms, p20, p80 : float or None
        Median and percentiles, by itself.
    samples : int or None
    registers, spill_bytes, shared_bytes, blocks_per_sm : int or None
        Of a thread, and of a block; resident blocks of a multiprocessor.
    compile_ms : float or None
    max_error, bound : float or None
        Against float64.
    final_ms, ratio, noise : float or None
        Of the finalists, timed in turn: median, how many times as fast as the heuristic's tile,
        and the noise of that ratio.
    verdict : str or None
        "default", "faster", "tie" (within the noise), "slower"; "winner" for the one to use.
    """

    config: str
    spec: str
    status: str
    error: str | None = None
    ms: float | None = None
    p20: float | None = None
    p80: float | None = None
    samples: int | None = None
    registers: int | None = None
    spill_bytes: int | None = None
    shared_bytes: int | None = None
    blocks_per_sm: int | None = None
    compile_ms: float | None = None
    max_error: float | None = None
    bound: float | None = None
    final_ms: float | None = None
    ratio: float | None = None
    noise: float | None = None
    verdict: str | None = None

    @property
    def ok(self) -> bool:
        """Whether it ran, was right, and was timed."""
        return self.status == "ok"

    def as_dict(self) -> dict[str, Any]:
        """Give what JSON can hold."""
        return asdict(self)

    @classmethod
    def from_dict(cls, row: dict[str, Any]) -> Record:
        """Read a record back; raises TypeError, KeyError or ValueError for what is none."""
        known = {f.name for f in fields(cls)}
        record = cls(**{name: value for name, value in row.items() if name in known})
        if record.status not in STATUSES or not isinstance(record.config, str):
            raise ValueError(f"no record: {row!r}")
        return record
