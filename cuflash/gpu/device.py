"""What a GPU offers a kernel: its architecture and the limits that tiles must respect."""

from __future__ import annotations

from dataclasses import dataclass

from cuflash.errors import UnsupportedArchError

# Bytes of shared memory: largest for one block, and of one multiprocessor (CUDA C++ Programming Guide,
# table "Technical Specifications per Compute Capability"). A real GPU is asked, never looked up here.
_SHARED = {
    70: (98304, 98304),
    75: (65536, 65536),
    80: (166912, 167936),
    86: (101376, 102400),
    87: (166912, 167936),
    89: (101376, 102400),
    90: (232448, 233472),
    100: (232448, 233472),
    103: (232448, 233472),
    120: (101376, 102400),
    121: (101376, 102400),
}


@dataclass(frozen=True, slots=True)
class Device:
    """The properties of a GPU that decide which kernels and tiles can run on it."""

    compute_capability: int  # 75, 80, 90, 120, ...
    shared_per_block: int  # bytes, the largest a kernel may opt in to
    shared_per_sm: int
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
        if not arch.startswith("sm_") or not digits.isdigit() or int(digits) not in _SHARED:
            known = ", ".join(f"sm_{cc}" for cc in _SHARED)
            raise UnsupportedArchError(
                f"arch is {arch!r}: one of {known} (or sm_90a, ...) is needed"
            )
        return cls(int(digits), *_SHARED[int(digits)])
