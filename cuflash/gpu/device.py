"""What a GPU offers a kernel: its architecture and the limits that tiles must respect."""

from __future__ import annotations

from dataclasses import dataclass

from cuflash.errors import UnsupportedArchError

# Bytes of shared memory, largest for one block and of one multiprocessor, and its most resident threads (CUDA
# C++ Programming Guide, table "Technical Specifications per Compute Capability"); multiprocessors of the
# architecture's usual card. A real GPU is asked, never looked up here.
_LIMITS = {
    70: (98304, 98304, 2048, 80),
    75: (65536, 65536, 1024, 40),
    80: (166912, 167936, 2048, 108),
    86: (101376, 102400, 1536, 84),
    87: (166912, 167936, 1536, 16),
    89: (101376, 102400, 1536, 128),
    90: (232448, 233472, 2048, 132),
    100: (232448, 233472, 2048, 148),
    103: (232448, 233472, 2048, 148),
    120: (101376, 102400, 1536, 170),
    121: (101376, 102400, 1536, 48),
}


@dataclass(frozen=True, slots=True)
class Device:
    """The properties of a GPU that decide which kernels and tiles can run on it."""

    compute_capability: int  # 75, 80, 90, 120, ...
    shared_per_block: int  # bytes, the largest a kernel may opt in to
    shared_per_sm: int
    threads_per_sm: int
    sm_count: int
    name: str = "described by its architecture"

    @property
    def arch(self) -> str:
        """Exact architecture, as NVRTC names it: "sm_90"."""
        return f"sm_{self.compute_capability}"

    @classmethod
    def from_arch(cls, arch: str) -> Device:
        """Describe an architecture such as "sm_90" or "sm_90a" without having one.

        Raises
        ------
        UnsupportedArchError
            For a name that is not one of the known architectures.
        """
        digits = arch.removeprefix("sm_").rstrip("af")
        if not arch.startswith("sm_") or not digits.isdigit() or int(digits) not in _LIMITS:
            known = ", ".join(f"sm_{cc}" for cc in _LIMITS)
            raise UnsupportedArchError(
                f"arch is {arch!r}: one of {known} (or sm_90a, ...) is needed"
            )
        return cls(int(digits), *_LIMITS[int(digits)])
