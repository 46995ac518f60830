"""Tiles: the heuristic table, and what a tile must satisfy to run."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from cuflash.errors import InvalidConfigError
from cuflash.gpu.device import Device
from cuflash.gpu.spec import KernelSpec

# First compute capability whose tensor cores take the dtype.
LOWEST_TENSOR_CORE = {"fp16": 75, "bf16": 80, "fp32": 80}


@dataclass(frozen=True, slots=True)
class Tile:
    """The part of a spec that decides speed but not the result."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int = 1
    blocks_per_sm: int = 1
    q_in_registers: bool = False


# (largest padded head dim, tile), by how much shared memory an SM has. Measured on an H200 (docs/measured.md);
# the smaller GPUs follow from its shape: two blocks an SM where they fit, 32 rows a warp where registers allow.
_HALF = {
    "large": [
        (64, Tile(128, 64, 4, 2, 2, True)),
        (128, Tile(128, 64, 4, 2, 2)),
        (192, Tile(128, 96, 8, 2)),
        (256, Tile(128, 64, 8, 2)),
    ],
    "medium": [
        (64, Tile(128, 64, 4, 2, 2, True)),
        (96, Tile(128, 64, 4, 2, 2)),
        (128, Tile(128, 64, 4, 1, 2)),
        (192, Tile(128, 64, 8, 2)),
        (256, Tile(128, 64, 8, 1)),
    ],
    "small": [
        (64, Tile(128, 64, 4, 1, 2, True)),
        (128, Tile(128, 64, 8, 1)),
        (192, Tile(64, 48, 4, 1)),
        (256, Tile(64, 48, 4, 1)),
    ],
    "turing": [
        (64, Tile(64, 64, 4, 1, 2)),
        (128, Tile(64, 64, 4, 1)),
        (192, Tile(64, 32, 4, 1)),
        (256, Tile(64, 16, 4, 1)),
    ],
}
_SINGLE = {
    "large": [
        (64, Tile(128, 16, 4, 2, 2)),
        (112, Tile(64, 32, 4, 1, 2)),
        (128, Tile(128, 32, 4, 1, 2)),
        (192, Tile(64, 16, 4, 1, 2)),
        (256, Tile(64, 16, 4, 1, 2)),
    ],
    "medium": [
        (64, Tile(128, 16, 4, 2, 2)),
        (128, Tile(64, 32, 4, 1, 2)),
        (192, Tile(64, 16, 4, 1)),
        (256, Tile(64, 16, 4, 1)),
    ],
    "small": [
        (64, Tile(64, 32, 4, 1, 2)),
        (128, Tile(64, 32, 4, 1)),
        (192, Tile(64, 16, 4, 1)),
        (256, Tile(32, 16, 2, 1)),
    ],
}
# Modifiers work on single scores between the two products, narrow loads need more addresses: a warp then
# keeps 16 rows, so that nothing spills.
_HALF_DEMANDING = [
    (64, Tile(64, 64, 4, 1)),
    (128, Tile(64, 32, 4, 1)),
    (192, Tile(64, 32, 4, 1)),
    (256, Tile(64, 16, 4, 1)),
]
_SINGLE_DEMANDING = [
    (64, Tile(64, 32, 4, 1)),
    (128, Tile(64, 32, 4, 1)),
    (192, Tile(64, 16, 4, 1)),
    (256, Tile(32, 16, 2, 1)),
]
_SIMT = [
    (32, Tile(64, 32, 8)),
    (64, Tile(64, 64, 8)),
    (128, Tile(64, 32, 8)),
    (256, Tile(32, 16, 4)),
]


def default_tile(
    kernel: str, dtype: str, head_dim: int, device: Device, *, demanding: bool, masked: bool
) -> Tile:
    """Tile of the heuristic.

    ``head_dim`` is the larger of the two padded ones; ``demanding``: modified scores, narrow loads or
    another precision than the usual, which cost registers; ``masked``: as in the spec.
    """
    size = _size_class(device)
    if kernel == "forward_simt":
        table = _SIMT
    elif dtype == "fp32":
        if device.compute_capability >= 100:  # the compiler finds 32 rows a warp too many there
            size = "small"
        # The code that keeps a masked key's NaN out leaves too few registers for 32 rows a warp.
        demanding = demanding or (masked and 112 < head_dim <= 128)
        table = _SINGLE_DEMANDING if demanding else _SINGLE[size]
    else:
        table = _HALF_DEMANDING if demanding else _HALF[size]
    return next(tile for largest, tile in table if head_dim <= largest)


def _size_class(device: Device) -> str:
    for name, least in (("large", 200_000), ("medium", 160_000), ("small", 99_000)):
        if device.shared_per_block >= least:
            return name
    return "turing"


def check_tile(spec: KernelSpec, device: Device, source: str) -> None:
    """Refuse, before anything is compiled, a tile that cannot run.

    Raises
    ------
    InvalidConfigError
        Naming the value, what is allowed, and for shared memory the bytes by buffer and the nearest
        tile that fits.
    """
    problem = broken_rule(spec)
    if problem:
        raise InvalidConfigError(f"{source}: {problem}")
    if fits(spec, device):
        return
    buffers = ", ".join(f"{name} {size:,}" for name, size in spec.shared_buffers().items())
    nearest = nearest_fit(spec, device)
    advice = (
        f"the nearest tile that fits is {nearest.tile}"
        if nearest
        else "no tile of this kernel fits"
    )
    raise InvalidConfigError(
        f"{source}: block_m={spec.block_m} block_n={spec.block_n} num_stages={spec.num_stages} needs"
        f" {spec.shared_bytes() + spec.static_shared_bytes():,} bytes of shared memory ({buffers}, fixed"
        f" {spec.static_shared_bytes()}) and {device.arch} has {device.shared_per_block:,} a block; {advice}"
    )


def fits(spec: KernelSpec, device: Device) -> bool:
    """Whether a block's shared memory is within the device's limit."""
    return spec.shared_bytes() + spec.static_shared_bytes() <= device.shared_per_block


def nearest_fit(spec: KernelSpec, device: Device) -> KernelSpec | None:
    """Find the valid tile closest in size to ``spec`` that the device has shared memory for."""

    def distance(other: KernelSpec) -> float:
        pairs = (
            (other.block_m, spec.block_m),
            (other.block_n, spec.block_n),
            (other.num_stages, spec.num_stages),
        )
        return sum(abs(math.log2(a / b)) for a, b in pairs)

    candidates = (
        replace(spec, block_m=m, block_n=n, num_stages=s, num_warps=w)
        for m in (16, 32, 64, 128, 256)
        for n in (16, 32, 48, 64, 96, 128, 256)
        for s in range(1, spec.num_stages + 1)
        for w in (1, 2, 4, 8)
    )
    fitting = [c for c in candidates if not broken_rule(c) and fits(c, device)]
    return min(
        fitting, key=lambda c: (distance(c), abs(c.num_warps - spec.num_warps)), default=None
    )


def broken_rule(spec: KernelSpec) -> str | None:
    """Say which rule of the kernel a tile breaks, on any GPU; None where it breaks none."""
    if spec.num_warps not in (1, 2, 4, 8, 16):
        return f"num_warps is {spec.num_warps}: 1, 2, 4, 8 or 16 can be used"
    if not 1 <= spec.num_stages <= 4:
        return f"num_stages is {spec.num_stages}: 1 to 4 can be used"
    if not 1 <= spec.blocks_per_sm <= 8:
        return f"blocks_per_sm is {spec.blocks_per_sm}: 1 to 8 can be used"
    if spec.block_n < 16 or spec.block_n > 256 or spec.block_n % 16:
        return f"block_n is {spec.block_n}: a multiple of 16 from 16 to 256 is needed"
    if spec.kernel == "forward_simt":
        return _broken_simt_rule(spec)
    if spec.block_m not in (16 * spec.num_warps, 32 * spec.num_warps):
        return (
            f"block_m is {spec.block_m} with {spec.num_warps} warps: a warp takes 16 or 32 rows, so"
            f" {16 * spec.num_warps} or {32 * spec.num_warps} is needed"
        )
    if spec.q_in_registers and spec.dtype == "fp32":
        return "q_in_registers is set: only 16-bit inputs can keep q in registers"
    return None


def _broken_simt_rule(spec: KernelSpec) -> str | None:
    if spec.block_m % (4 * spec.num_warps) or not 16 <= spec.block_m <= 128:
        return (
            f"block_m is {spec.block_m} with {spec.num_warps} warps: a multiple of 4 rows a warp, from 16"
            " to 128, is needed"
        )
    if spec.block_n % spec.num_warps:
        return f"block_n is {spec.block_n}: a multiple of num_warps={spec.num_warps} is needed"
    if spec.num_stages != 1 or spec.q_in_registers:
        return "forward_simt has one stage and keeps q in shared memory: leave num_stages and q_in_registers out"
    return None
