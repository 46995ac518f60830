"""From a problem to a spec: which kernel, which tile, and why.

Order: the call's ``config``, ``CUFLASH_CONFIG``, what was tuned for this GPU here, what ships for it,
then the heuristic below.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from cuflash import settings
from cuflash.arrays import ELEMENT_BYTES
from cuflash.errors import InvalidConfigError
from cuflash.gpu import tiles
from cuflash.gpu.device import Device
from cuflash.gpu.spec import KernelSpec
from cuflash.gpu.tiles import Tile
from cuflash.problem import AttentionProblem
from cuflash.tuning import store

KERNELS = ("forward_mma", "forward_simt")
CONFIG_KEYS = ("kernel", *(f.name for f in fields(Tile)))


@dataclass(frozen=True, slots=True)
class Step:
    """One place where a choice was looked for, and what was found there."""

    source: str
    outcome: str


@dataclass(frozen=True, slots=True)
class Choice:
    """A spec, the reason it was chosen, and the way to it."""

    spec: KernelSpec
    reason: str
    steps: tuple[Step, ...]


def choose(problem: AttentionProblem, device: Device, config: Any = None) -> Choice:
    """Choose the kernel and tile for a problem on a device.

    Parameters
    ----------
    problem : AttentionProblem
    device : Device
    config : str or mapping, optional
        Any of `CONFIG_KEYS`; the rest stays as the heuristic has it.

    Raises
    ------
    InvalidConfigError
        For a config that names something unknown or cannot run; the message gives the shared memory
        by buffer and the nearest tile that fits.
    """
    steps = []
    for source, given in (("config=", config), ("CUFLASH_CONFIG", settings.config())):
        if given is None:
            steps.append(Step(source, "not given"))
            continue
        wanted = parse_config(given, source)
        spec, why = _configured(problem, device, wanted, source)
        steps.append(Step(source, _in_words(wanted) or "empty: as the heuristic has it"))
        tile = f"tile from {source}" if wanted else "heuristic tile"
        return Choice(spec, f"{why}; {tile}", tuple(steps))
    for table in store.tables(device):
        entry = table.lookup(problem)
        if entry is None:
            steps.append(Step(table.label, table.state()))
            continue
        try:
            wanted = parse_config(entry.config, table.label)
            spec, _ = _configured(problem, device, wanted, table.label)
        except InvalidConfigError as error:
            table.ignore(f"entries that cannot run ({error})", "run `cuflash tune` again")
            steps.append(Step(table.label, f"its entry cannot run: {error}"))
            continue
        steps.append(Step(table.label, f"{_in_words(wanted)}, measured for {entry.problem}"))
        return Choice(spec, f"tuned: {table.label}, for {entry.problem}", tuple(steps))
    spec, why = _configured(problem, device, {}, "heuristic")
    reason = f"{why}; heuristic tile for head_dim {_padded_dim(problem)} on {device.arch}"
    steps.append(Step("heuristic", f"{why}; {spec.tile}"))
    return Choice(spec, reason, tuple(steps))


def _configured(
    problem: AttentionProblem, device: Device, wanted: dict[str, Any], source: str
) -> tuple[KernelSpec, str]:
    """The heuristic's spec with what is wanted instead, checked, and why it is this kernel."""
    spec, why = _unchecked(problem, device, wanted, source)
    if wanted.keys() - {"kernel"}:
        tiles.check_tile(spec, device, source)
    return spec, why


def spec_for(
    problem: AttentionProblem, device: Device, config: Mapping[str, Any], source: str
) -> KernelSpec:
    """Give the spec of a parsed config without asking whether its tile can run.

    Raises
    ------
    InvalidConfigError
        For a kernel that cannot run the problem.
    """
    return _unchecked(problem, device, dict(config), source)[0]


def _unchecked(
    problem: AttentionProblem, device: Device, wanted: dict[str, Any], source: str
) -> tuple[KernelSpec, str]:
    asked = {**wanted}
    kernel, why = _kernel(problem, device, asked.pop("kernel", None), source)
    tile = tiles.default_tile(
        kernel,
        problem.dtype,
        _padded_dim(problem),
        device,
        demanding=_demanding(problem),
        masked=_masked(problem),
    )
    if "q_in_registers" in asked:
        asked["q_in_registers"] = bool(asked["q_in_registers"])
    return _spec(problem, device, kernel, replace(tile, **asked)), why


def _in_words(config: Mapping[str, Any]) -> str:
    return " ".join(
        f"{name}={value:d}" if name != "kernel" else f"kernel={value}"
        for name, value in config.items()
    )


def parse_config(config: Any, source: str = "config=") -> dict[str, Any]:
    """Read ``"block_m=64,num_warps=4"`` or a mapping into checked names and values."""
    if isinstance(config, Mapping):
        items = list(config.items())
    elif isinstance(config, str):
        items = [_split(part, config, source) for part in config.replace(",", " ").split()]
    else:
        raise InvalidConfigError(
            f"{source} is {config!r}: a mapping or a string like 'block_m=64,block_n=64' is needed"
        )
    result: dict[str, Any] = {}
    for name, value in items:
        if name not in CONFIG_KEYS:
            raise InvalidConfigError(f"{source} has {name!r}: {', '.join(CONFIG_KEYS)} can be set")
        if name == "kernel":
            result[name] = str(value)
            continue
        try:
            # Not int() of any number: 64.5 is a mistake, not 64.
            number = int(value) if isinstance(value, str) else operator.index(value)
        except (TypeError, ValueError) as error:
            raise InvalidConfigError(
                f"{source} has {name}={value!r}: an integer is needed"
            ) from error
        result[name] = bool(number) if name == "q_in_registers" else number
    return result


def _split(part: str, config: str, source: str) -> tuple[str, str]:
    name, equals, value = part.partition("=")
    if not equals:
        raise InvalidConfigError(f"{source} is {config!r}: {part!r} is not name=value")
    return name, value


def _kernel(
    problem: AttentionProblem, device: Device, asked: str | None, source: str
) -> tuple[str, str]:
    lowest = tiles.LOWEST_TENSOR_CORE[problem.dtype]
    tensor_cores = device.compute_capability >= lowest
    if asked is not None:
        if asked not in KERNELS:
            raise InvalidConfigError(f"{source} has kernel={asked!r}: {', '.join(KERNELS)} exist")
        if asked == "forward_mma" and not tensor_cores:
            raise InvalidConfigError(
                f"{source} has kernel='forward_mma', but {problem.dtype} on tensor cores needs sm_{lowest}"
                f" and this is {device.arch}: leave the kernel out or ask for 'forward_simt'"
            )
        return asked, f"{asked} from {source}"
    if (
        tensor_cores
        and problem.dtype == "fp32"
        and _padded_dim(problem) > 192
        and (
            vector_bytes(problem) < 16 or (_demanding(problem) and device.compute_capability >= 100)
        )
    ):
        # Accumulators, and addresses or modifiers, together need more registers than there are.
        return "forward_simt", "fp32 of head_dim > 192, unaligned or modified: plain FMA"
    if tensor_cores:
        return "forward_mma", f"{problem.dtype} tensor cores of {device.arch}"
    return "forward_simt", f"{device.arch} has no {problem.dtype} tensor cores: plain FMA"


def _spec(problem: AttentionProblem, device: Device, kernel: str, tile: Tile) -> KernelSpec:
    simt = kernel == "forward_simt"
    return KernelSpec(
        kernel=kernel,
        arch=device.arch,
        dtype=problem.dtype,
        head_dim=pad_head_dim(problem.head_dim),
        head_dim_v=pad_head_dim(problem.head_dim_v),
        **{f.name: getattr(tile, f.name) for f in fields(Tile)},
        vector_bytes=ELEMENT_BYTES[problem.dtype] if simt else vector_bytes(problem),
        masked=simt or _masked(problem),
        softcap=problem.softcap > 0.0,
        alibi=problem.alibi,
        bias=problem.bias,
        precision="ieee" if simt else problem.precision,
    )


def vector_bytes(problem: AttentionProblem) -> int:
    """Widest load that every row allows and that no row ends in the middle of."""
    element = ELEMENT_BYTES[problem.dtype]
    width = problem.vector_bytes
    while width > element and (
        problem.head_dim * element % width or problem.head_dim_v * element % width
    ):
        width //= 2
    return width


def pad_head_dim(head_dim: int) -> int:
    """Head dim as compiled: steps of 16 to 128 and of 32 above, so that a few kernels serve all."""
    step = 16 if head_dim <= 128 else 32
    return -(-head_dim // step) * step


def _padded_dim(problem: AttentionProblem) -> int:
    return pad_head_dim(max(problem.head_dim, problem.head_dim_v))


def _demanding(problem: AttentionProblem) -> bool:
    modified = problem.softcap > 0.0 or problem.alibi or problem.bias is not None
    return modified or vector_bytes(problem) < 16 or problem.precision != "ieee"


def _masked(problem: AttentionProblem) -> bool:
    """Whether rows may see only a part of their sequence's keys."""
    return problem.window_left >= 0 or problem.window_right >= 0 or problem.bias is not None
