"""The tiles that a sweep tries: a space for each kernel, and what can be told without compiling.

A new kernel adds its axes to `SPACES`, its rules to `gpu/tiles.py` and its buffers and accumulators to
`gpu/spec.py`; nothing else here knows kernels by name.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from cuflash.errors import InvalidConfigError
from cuflash.gpu import choose, tiles
from cuflash.gpu.device import Device
from cuflash.gpu.occupancy import MAX_REGISTERS_PER_THREAD, REGISTERS_PER_SM
from cuflash.gpu.spec import KernelSpec
from cuflash.gpu.tiles import Tile
from cuflash.problem import AttentionProblem

Axes = dict[str, tuple[int, ...]]

AXES = tuple(f.name for f in fields(Tile))
# Addresses, counters and row statistics, at least, beside the accumulators.
_OTHER_REGISTERS = 24
_MOST_CANDIDATES = 20_000


def _mma_axes(problem: AttentionProblem) -> Axes:
    wide = problem.dtype != "fp32"
    return {
        "block_m": (64, 128, 256),
        "block_n": (32, 64, 96, 128) if wide else (16, 32, 48, 64),
        "num_warps": (4, 8),
        "num_stages": (1, 2, 3),
        "blocks_per_sm": (1, 2, 3),
        "q_in_registers": (0, 1) if wide else (0,),
    }


def _simt_axes(problem: AttentionProblem) -> Axes:
    return {
        "block_m": (32, 64, 128),
        "block_n": (16, 32, 64),
        "num_warps": (4, 8, 16),
        "num_stages": (1,),
        "blocks_per_sm": (1, 2),
        "q_in_registers": (0,),
    }


# kernel -> the values of each axis that are worth trying for a problem
SPACES = {"forward_mma": _mma_axes, "forward_simt": _simt_axes}


@dataclass(frozen=True)
class Candidate:
    """A tile to try: as ``config=`` takes it, and the spec that it gives."""

    config: dict[str, Any]
    spec: KernelSpec

    @property
    def name(self) -> str:
        """The config in one line, which names a candidate in records and messages."""
        return config_name(self.config)


@dataclass(frozen=True)
class Pruned:
    """A tile that is not tried, the kind of reason, and the reason in words."""

    config: dict[str, Any]
    kind: str
    reason: str


@dataclass(frozen=True)
class Plan:
    """What a sweep will do; the first candidate is the heuristic's, the others by distance from it."""

    problem: AttentionProblem
    device: Device
    candidates: list[Candidate]
    pruned: list[Pruned]

    @property
    def default(self) -> Candidate:
        """The heuristic's tile."""
        return self.candidates[0]

    @property
    def pruned_by_kind(self) -> Counter[str]:
        """How many tiles each kind of reason removed."""
        return Counter(p.kind for p in self.pruned)


def config_name(config: Mapping[str, Any]) -> str:
    """Give a config in one line, as ``config=`` takes it."""
    return " ".join(f"{k}={int(v) if k != 'kernel' else v}" for k, v in config.items())


def plan(
    problem: AttentionProblem,
    device: Device,
    space: str | Mapping[str, Any] | None = None,
) -> Plan:
    """List the tiles to try for a problem, and those that cannot run or cannot be worth it.

    Parameters
    ----------
    problem : AttentionProblem
    device : Device
    space : str or mapping, optional
        Values of some axes in the place of the usual ones: ``"block_m=64,128 num_stages=2"``, or a
        mapping to a number or a sequence of them. ``kernel=`` picks kernels.

    Raises
    ------
    InvalidConfigError
        For an axis that does not exist, a value that is no number, a kernel that cannot run the
        problem, or a space too large to list.
    """
    wanted = parse_space(space)
    default = choose.choose(problem, device, {}).spec
    kernels = wanted.pop("kernel", None) or [default.kernel]
    found: dict[Any, Candidate] = {_compiled(default): Candidate(_config(default), default)}
    pruned: list[Pruned] = []
    for kernel in kernels:
        axes = {**SPACES[kernel](problem), **wanted}
        if math.prod(map(len, axes.values())) > _MOST_CANDIDATES:
            raise InvalidConfigError(
                f"space has {math.prod(map(len, axes.values())):,} combinations: give fewer values,"
                f" at most {_MOST_CANDIDATES:,} are listed"
            )
        for values in itertools.product(*axes.values()):
            config = {"kernel": kernel, **dict(zip(axes, values, strict=True))}
            spec = choose.spec_for(problem, device, config, "space")
            reason = why_not(spec, device)
            if reason:
                pruned.append(Pruned(config, *reason))
            elif twin := found.get(_compiled(spec)):
                if twin.spec != spec:
                    words = f"compiles to the same kernel as {twin.name}"
                    pruned.append(Pruned(config, "same kernel", words))
            else:
                found[_compiled(spec)] = Candidate(_config(spec), spec)
    first, *rest = found.values()
    rest.sort(key=lambda c: _distance(c.spec, default))
    return Plan(problem, device, [first, *rest], pruned)


def parse_space(space: str | Mapping[str, Any] | None) -> dict[str, Any]:
    """Read axes and their values, checked; see `plan`."""
    if space is None:
        return {}
    if isinstance(space, str):
        pairs = [part.partition("=") for part in space.split()]
        if bad := [name for name, equals, values in pairs if not equals or not values]:
            raise InvalidConfigError(
                f"space has {bad[0]!r} without values: write axis=value,value, such as"
                " 'block_m=64,128 block_n=32,64'"
            )
        items: dict[str, Any] = {name: values.split(",") for name, _, values in pairs}
    else:
        items = {n: [v] if isinstance(v, int | str) else list(v) for n, v in space.items()}
    result: dict[str, Any] = {}
    for name, values in items.items():
        if name not in ("kernel", *AXES):
            raise InvalidConfigError(f"space has {name!r}: kernel, {', '.join(AXES)} are the axes")
        if not values:
            raise InvalidConfigError(f"space has no value for {name}: give at least one")
        if name == "kernel":
            if unknown := [v for v in values if v not in SPACES]:
                raise InvalidConfigError(
                    f"space has kernel={unknown[0]}: {', '.join(SPACES)} can be swept"
                )
            result[name] = list(dict.fromkeys(values))
            continue
        parsed = [choose.parse_config({name: value}, "space")[name] for value in values]
        result[name] = tuple(dict.fromkeys(int(value) for value in parsed))
    return result


def why_not(spec: KernelSpec, device: Device) -> tuple[str, str] | None:
    """Say why a tile cannot run, or cannot be worth compiling: the kind of reason, and words."""
    broken = tiles.broken_rule(spec)
    if broken:
        return "rule of the kernel", broken
    shared = spec.shared_bytes() + spec.static_shared_bytes()
    if not tiles.fits(spec, device):
        return "shared memory", (
            f"{shared:,} bytes of shared memory, and {device.arch} has {device.shared_per_block:,} a block"
        )
    if spec.blocks_per_sm * (shared + 1024) > device.shared_per_sm:
        return "occupancy", (
            f"{spec.blocks_per_sm} blocks of {shared:,} bytes do not fit a multiprocessor's"
            f" {device.shared_per_sm:,}: the same tile with fewer blocks_per_sm has more registers"
        )
    if spec.blocks_per_sm * spec.threads > device.threads_per_sm:
        return "occupancy", (
            f"{spec.blocks_per_sm} blocks of {spec.threads} threads are more than the"
            f" {device.threads_per_sm} of a multiprocessor"
        )
    room = register_room(spec)
    needed = spec.accumulator_registers() + _OTHER_REGISTERS
    if needed > room:
        return "registers", (
            f"at least {needed} registers a thread, and {spec.blocks_per_sm} blocks of {spec.threads}"
            f" threads leave {room}: it would spill"
        )
    return None


def register_room(spec: KernelSpec) -> int:
    """Registers that the compiler may give a thread, so that ``blocks_per_sm`` blocks are resident."""
    room = REGISTERS_PER_SM // (spec.threads * spec.blocks_per_sm) // 8 * 8
    return min(room, MAX_REGISTERS_PER_THREAD)


def _compiled(spec: KernelSpec) -> Any:
    """What decides the machine code: of ``blocks_per_sm``, the registers that it leaves."""
    return replace(spec, blocks_per_sm=1), register_room(spec)


def _config(spec: KernelSpec) -> dict[str, Any]:
    return {"kernel": spec.kernel, **{name: int(getattr(spec, name)) for name in AXES}}


def _distance(spec: KernelSpec, other: KernelSpec) -> tuple[float, str]:
    """How far a tile is from another, in doublings; what is near is tried first."""
    far = float(spec.kernel != other.kernel) * 8
    for name in AXES:
        a, b = int(getattr(spec, name)), int(getattr(other, name))
        far += (
            abs(math.log2((a + 1) / (b + 1))) if name == "q_in_registers" else abs(math.log2(a / b))
        )
    return far, spec.name
