"""`cuflash show`: why a problem runs as it does, with or without its GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from cuflash.cli.device_option import device_options
from cuflash.cli.problem_options import problem_options, problems
from cuflash.cli.tables import Column, Row, Table, emit, json_option
from cuflash.cli.units import in_bytes, in_milliseconds

if TYPE_CHECKING:
    from cuflash.debug.inspect import Explanation
    from cuflash.gpu.device import Device


def in_percent(value: float) -> str:
    """Give a fraction in percent."""
    return f"{100 * value:.0f} %"


FACTS = (
    Column("problem"),
    Column("gpu"),
    Column("kernel"),
    Column("tile"),
    Column("reason"),
    Column("shared", "shared memory"),
    Column("shared_bytes", "shared memory of a block", in_bytes),
    Column("registers", "registers of a thread"),
    Column("spill_bytes", "spills", in_bytes),
    Column("blocks_per_sm", "blocks a multiprocessor"),
    Column("limiter", "limited by"),
    Column("occupancy", "warps resident", in_percent),
    Column("blocks", "blocks of the launch"),
    Column("waves"),
    Column("tail", "idle slots at the end", in_percent),
    Column("gflops", "GFLOP of visible keys"),
    Column("bytes", "q, k, v, out once", in_bytes),
    Column("l2_bytes", "k and v read by all blocks", in_bytes),
    Column("intensity", "FLOP a byte"),
    Column("bound", "bound by"),
    Column("least_ms", "no kernel can take less than ms", in_milliseconds),
)
STEPS = (Column("problem"), Column("source", "asked"), Column("outcome", "answer"))
ADVICE = (Column("problem"), Column("advice"))


@click.command()
@problem_options
@device_options
@click.option("--config", metavar="C", help="Kernel and tile, as config= takes them.")
@click.option("--no-compile", is_flag=True, help="Leave registers and what follows from them out.")
@json_option
def show(
    problem_options: dict[str, Any],
    device: Device,
    config: str | None,
    no_compile: bool,
    as_json: bool,
) -> None:
    """Show which kernel and tile a problem would run with, why, and what bounds it.

    The choice is walked step by step; registers come from the compiler, for any GPU. Work is counted
    over visible keys, 2 operations for each number of q.k and of the weighted sum.
    """
    from cuflash.debug.inspect import explain

    found = [explain(p, device, config, compile=not no_compile) for p in problems(problem_options)]
    tables = [
        Table(
            "problems" if as_json else "problem",
            "What runs, and what bounds it",
            FACTS,
            [facts(e)],
            tall=True,
        )
        for e in found
    ]
    if as_json:
        tables = [Table("problems", "", FACTS, [facts(e) for e in found])]
    steps = [
        {"problem": e.problem.in_words, "source": s.source, "outcome": s.outcome}
        for e in found
        for s in e.steps
    ]
    advice = [{"problem": e.problem.in_words, "advice": line} for e in found for line in e.advice]
    tables.append(Table("steps", "How the tile was chosen", STEPS, steps))
    if advice or as_json:
        tables.append(Table("advice", "What could be better", ADVICE, advice))
    emit(tables, as_json=as_json)


def facts(found: Explanation) -> Row:
    """Give everything but the steps and the advice in one row."""
    resident, resources = found.occupancy, found.resources or {}
    shared = found.shared_buffers
    return {
        "problem": found.problem.in_words,
        "gpu": f"{found.device.name} ({found.device.arch}, {found.device.sm_count} SMs)",
        "kernel": found.spec.kernel,
        "tile": found.spec.tile,
        "reason": found.reason,
        "shared": ", ".join(f"{name} {size:,}" for name, size in shared.items()),
        "shared_bytes": sum(shared.values()),
        "registers": resources.get("registers"),
        "spill_bytes": resources.get("spill_bytes"),
        "blocks_per_sm": resident and resident.blocks,
        "limiter": resident and resident.limiter,
        "occupancy": resident and resident.fraction,
        "blocks": found.blocks,
        "waves": found.waves,
        "tail": found.tail,
        "gflops": None if found.flops is None else found.flops / 1e9,
        "bytes": found.bytes,
        "l2_bytes": found.l2_bytes,
        "intensity": found.intensity,
        "bound": found.bound,
        "least_ms": found.least_ms,
    }
