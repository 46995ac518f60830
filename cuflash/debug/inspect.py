"""Why a problem runs as it does: the choice, what the kernel takes, how it fills the GPU, what bounds it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cuflash.arrays import ELEMENT_BYTES
from cuflash.errors import MissingDependencyError
from cuflash.gpu import cache, peaks
from cuflash.gpu.choose import Step, choose
from cuflash.gpu.device import Device
from cuflash.gpu.grid import grid
from cuflash.gpu.occupancy import Occupancy, occupancy
from cuflash.gpu.spec import KernelSpec
from cuflash.problem import AttentionProblem


@dataclass(frozen=True)
class Explanation:
    """Everything that `cuflash show` knows of a problem on a GPU.

    Attributes
    ----------
    problem : AttentionProblem
    device : Device
    spec : KernelSpec
    reason : str
    steps : tuple of Step
        Where a tile was looked for, and what was found.
    shared_buffers : dict
        Bytes of a block by buffer, the fixed part as "fixed".
    resources : dict or None
        The compiler's report (see `cuflash.gpu.cache.Kernel`); None where it was not compiled.
    occupancy : Occupancy or None
        None where the registers are unknown.
    blocks : int
        Of the launch.
    waves : float or None
        How many times the launch fills the GPU.
    tail : float or None
        The part of the GPU's block slots that the last wave leaves idle, of those of all waves.
    flops : float or None
        Multiplications and additions that visible keys need; None for packed problems, whose
        lengths are values.
    bytes : int
        q, k, v and out, each once.
    l2_bytes : int or None
        What blocks read of k and v all together, mostly from L2.
    intensity : float or None
        flops / bytes.
    bound : str or None
        "compute" or "memory": the side of the roofline; None for a GPU of unknown peaks.
    least_ms : float or None
        No kernel can be faster: the longer of work at the GPU's peak and bytes at its bandwidth.
    advice : tuple of str
    """

    problem: AttentionProblem
    device: Device
    spec: KernelSpec
    reason: str
    steps: tuple[Step, ...]
    shared_buffers: dict[str, int]
    resources: dict[str, Any] | None
    occupancy: Occupancy | None
    blocks: int
    waves: float | None
    tail: float | None
    flops: float | None
    bytes: int
    l2_bytes: int | None
    intensity: float | None
    bound: str | None
    least_ms: float | None
    advice: tuple[str, ...]


def explain(
    problem: AttentionProblem, device: Device, config: Any = None, *, compile: bool = True
) -> Explanation:
    """Say why a problem would run as it does on a GPU, which need not be here.

    Parameters
    ----------
    problem : AttentionProblem
    device : Device
    config : str or mapping, optional
        As ``config=`` of a call.
    compile : bool
        Ask the compiler for registers; without NVRTC they stay unknown.

    Raises
    ------
    CuflashError
        For a config that cannot run, or a kernel that does not compile.
    """
    choice = choose(problem, device, config)
    spec = choice.spec
    resources = _resources(spec) if compile else None
    shared = {**spec.shared_buffers(), "fixed": spec.static_shared_bytes()}
    resident = None
    if resources is not None:
        fixed = resources["static_shared_bytes"]
        shared["fixed"] = fixed
        resident = occupancy(
            device, registers=resources["registers"], shared_bytes=spec.shared_bytes() + fixed,
            threads=spec.threads,
        )  # fmt: skip
    blocks, _ = grid(problem, spec.block_m)
    waves, tail = _waves(blocks, resident, device)
    flops, moved = visible_flops(problem), least_bytes(problem)
    bound, least_ms = _roofline(device, spec, flops, moved)
    return Explanation(
        problem=problem, device=device, spec=spec, reason=choice.reason, steps=choice.steps,
        shared_buffers=shared, resources=resources, occupancy=resident, blocks=blocks, waves=waves, tail=tail,
        flops=flops, bytes=moved, l2_bytes=_l2_bytes(problem, spec),
        intensity=flops / moved if flops is not None and moved else None, bound=bound, least_ms=least_ms,
        advice=tuple(_advice(problem, spec, choice.reason, resources, resident, waves, tail)),
    )  # fmt: skip


def visible_pairs(problem: AttentionProblem) -> int | None:
    """Pairs of a query and a key that it sees, of one head; None for packed problems."""
    if problem.packed:
        return None
    queries, keys = problem.seqlen_q, problem.seqlen_k
    left, right = problem.window_left, problem.window_right
    if left < 0 and right < 0:
        return queries * keys
    diagonal = np.arange(queries) + (keys - queries)
    first = np.maximum(0, diagonal - left) if left >= 0 else 0
    last = np.minimum(keys - 1, diagonal + right) if right >= 0 else keys - 1
    return int(np.maximum(0, last - first + 1).sum())


def visible_flops(problem: AttentionProblem) -> float | None:
    """Operations of the two products over visible pairs; None for packed problems."""
    pairs = visible_pairs(problem)
    if pairs is None:
        return None
    return 2.0 * problem.batch * problem.nheads_q * pairs * (problem.head_dim + problem.head_dim_v)


def least_bytes(problem: AttentionProblem) -> int:
    """Bytes of q, k, v and out, each moved once."""
    sequences = 1 if problem.packed else problem.batch
    rows_q = sequences * problem.seqlen_q * problem.nheads_q
    rows_k = sequences * problem.seqlen_k * problem.nheads_k
    width = problem.head_dim + problem.head_dim_v
    return (rows_q + rows_k) * width * ELEMENT_BYTES[problem.dtype]


def _resources(spec: KernelSpec) -> dict[str, Any] | None:
    try:
        return cache.load_or_compile(spec).meta
    except MissingDependencyError:
        return None


def _waves(
    blocks: int, resident: Occupancy | None, device: Device
) -> tuple[float | None, float | None]:
    if resident is None or not resident.blocks:
        return None, None
    slots = resident.blocks * device.sm_count
    waves = blocks / slots
    whole = -(-blocks // slots)
    return waves, (1 - blocks / (whole * slots) if whole else 0.0)


def _l2_bytes(problem: AttentionProblem, spec: KernelSpec) -> int | None:
    pairs = visible_pairs(problem)
    if pairs is None:
        return None
    width = problem.head_dim + problem.head_dim_v
    heads = problem.batch * problem.nheads_q
    return heads * pairs * width * ELEMENT_BYTES[problem.dtype] // spec.block_m


def _roofline(
    device: Device, spec: KernelSpec, flops: float | None, moved: int
) -> tuple[str | None, float | None]:
    known = peaks.card(device.name)
    if known is None or flops is None:
        return None, None
    peak = peaks.tflops(known, spec.kernel, spec.dtype, spec.precision)
    if not peak:
        return None, None
    compute_ms, memory_ms = flops / peak / 1e9, moved / known.bandwidth / 1e9
    return ("compute" if compute_ms >= memory_ms else "memory"), max(compute_ms, memory_ms)


def _advice(
    problem: AttentionProblem, spec: KernelSpec, reason: str, resources: dict[str, Any] | None,
    resident: Occupancy | None, waves: float | None, tail: float | None,
) -> list[str]:  # fmt: skip
    lines = []
    if resources and resources["spill_bytes"]:
        lines.append(
            f"{resources['spill_bytes']} bytes a thread spill to local memory: a smaller block_m or"
            " block_n, or more warps"
        )
    if resident is not None and not resident.blocks:
        lines.append(f"no block fits a multiprocessor: {resident.limiter} are short")
    elif resident is not None and resident.blocks == 1:
        lines.append(
            f"one block a multiprocessor, limited by {resident.limiter}: nothing hides its start and end"
        )
    if waves is not None and waves < 1:
        lines.append(
            f"the launch fills {waves:.0%} of the GPU's block slots: a smaller block_m has more blocks"
        )
    elif waves is not None and waves < 4 and tail is not None and tail > 0.15:
        lines.append(f"{tail:.0%} of the slots of {waves:.1f} waves stay idle at the end")
    if spec.vector_bytes < 16 and spec.kernel != "forward_simt":
        lines.append(
            f"loads of {spec.vector_bytes} bytes: rows of q, k or v do not all start on 16-byte boundaries, or"
            " a head dim ends within one"
        )
    if "plain FMA" in reason:
        lines.append("tensor cores are not used: see the reason")
    if not reason.startswith("tuned") and problem.seqlen_q and problem.seqlen_k:
        lines.append(
            "the tile is not tuned for this problem: `cuflash tune` with the same options does"
        )
    return lines
