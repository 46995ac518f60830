"""How many thread blocks of a kernel one multiprocessor holds, and what limits it.

The rules are those of the CUDA C++ Programming Guide ("Hardware Multithreading") and of NVIDIA's
occupancy calculator: registers are handed out to warps in units of 256, shared memory to blocks in
units of 128 bytes, beside 1 KiB that the system keeps of each block since compute capability 8.0.
"""

from __future__ import annotations

from dataclasses import dataclass

from cuflash.gpu.device import Device

REGISTERS_PER_SM = 65536
_REGISTER_UNIT = 256
_SHARED_UNIT = 128
_MAX_BLOCKS = {75: 16, 86: 16, 87: 16, 89: 24, 120: 24, 121: 24}
MAX_REGISTERS_PER_THREAD = 255


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Resident blocks of a multiprocessor, by each limit; ``limiter`` names the least of them."""

    by_limit: dict[str, int]
    warps: int  # resident on a multiprocessor
    max_warps: int

    @property
    def blocks(self) -> int:
        """Thread blocks that run on one multiprocessor at a time; 0 where one does not fit."""
        return min(self.by_limit.values())

    @property
    def limiter(self) -> str:
        """The limit that is reached first: registers, shared memory, threads or blocks."""
        return min(self.by_limit, key=self.by_limit.__getitem__)

    @property
    def fraction(self) -> float:
        """Resident warps of those that the multiprocessor could hold."""
        return self.warps / self.max_warps


def occupancy(device: Device, *, registers: int, shared_bytes: int, threads: int) -> Occupancy:
    """Work out how many blocks fit one multiprocessor.

    Parameters
    ----------
    device : Device
    registers : int
        Of a thread, as ptxas reports them.
    shared_bytes : int
        Of a block, fixed and dynamic together.
    threads : int
        Of a block.
    """
    warps = -(-threads // 32)
    of_warp = -(-registers * 32 // _REGISTER_UNIT) * _REGISTER_UNIT
    reserved = 1024 if device.compute_capability >= 80 else 0
    of_block = -(-(shared_bytes + reserved) // _SHARED_UNIT) * _SHARED_UNIT
    max_warps = device.threads_per_sm // 32
    # A multiprocessor has four schedulers, and a warp's registers lie with one of them.
    resident_by_registers = REGISTERS_PER_SM // 4 // of_warp * 4 if of_warp else max_warps
    by_limit = {
        "registers": resident_by_registers // warps,
        "shared memory": device.shared_per_sm // of_block if of_block else 32,
        "threads": max_warps // warps,
        "blocks": _MAX_BLOCKS.get(device.compute_capability, 32),
    }
    return Occupancy(by_limit, min(by_limit.values()) * warps, max_warps)
