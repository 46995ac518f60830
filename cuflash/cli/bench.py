"""`cuflash bench`: problems timed beside the other implementations that are installed, in one run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np

from cuflash.cli import failure, machine
from cuflash.cli.problem_options import DEFAULTS, SMALL, problem_options, problems
from cuflash.cli.tables import Column, Row, Table, emit, json_option
from cuflash.cli.units import in_milliseconds
from cuflash.errors import CuflashError, InvalidArgumentError
from cuflash.problem import AttentionProblem
from cuflash.tuning import bench_plot, peers
from cuflash.tuning.bench import BUDGET, LEAST_ROUNDS, ROUNDS, BenchRow, measure
from cuflash.tuning.bench_records import COLUMNS as CSV_COLUMNS
from cuflash.tuning.bench_records import records
from cuflash.tuning.csv_rows import CsvRows, environment
from cuflash.tuning.timing import GpuTimer, HostTimer, Timer

# Of the shapes in which benchmarks of attention are published: heads of all head dims are as wide together.
TOKENS_WIDTH = 2048

NAMES = ", ".join(peer.name for peer in peers.PEERS)


@click.command()
@problem_options
@click.option(
    "--tokens",
    type=click.IntRange(1),
    metavar="N",
    help=f"Batch N / seqlen and {TOKENS_WIDTH} / head_dim heads, as in published benchmarks (N = 16384).",
)
@click.option(
    "--config",
    "configs",
    multiple=True,
    metavar="C",
    help="Kernel and tile, as config= takes them, or `default`; several are compared.",
)
@click.option(
    "--peer",
    "peer_names",
    multiple=True,
    metavar="NAME,...",
    help=f"all, none, or of: {NAMES}.  [default: all]",
)
@click.option(
    "--rounds",
    type=click.IntRange(1),
    default=ROUNDS,
    show_default=True,
    help="Times that each call is timed.",
)
@click.option(
    "--budget",
    type=click.FloatRange(0, min_open=True),
    default=BUDGET,
    show_default=True,
    metavar="SECONDS",
    help=f"No more rounds of a problem after this long; {LEAST_ROUNDS} there are.",
)
@click.option(
    "--l2",
    type=click.Choice(["warm", "cold"]),
    default="warm",
    show_default=True,
    help="What a GPU's L2 holds.",
)
@click.option(
    "--csv",
    "csv_file",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Append a line for each problem, config and peer.",
)
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE.png",
    help="Draw TFLOP/s by length.",
)
@click.option(
    "--commit",
    envvar="CUFLASH_COMMIT",
    show_envvar=True,
    help="For the CSV, where git cannot be asked.",
)
@click.option("--seed", default=0, show_default=True, help="Of the random numbers.")
@json_option
def bench(
    problem_options: dict[str, Any],
    tokens: int | None,
    configs: Sequence[str],
    peer_names: Sequence[str],
    rounds: int,
    budget: float,
    l2: str,
    csv_file: Path | None,
    plot: Path | None,
    commit: str | None,
    seed: int,
    as_json: bool,
) -> None:
    """Time attention beside the other implementations that are installed.

    cuflash and its peers are checked against float64, then timed in turn in one run. A ratio above 1
    says how many times as fast as that peer cuflash is, the median of the rounds. Operations are
    counted as 2 * batch * heads * seqlen_q * seqlen_k * (head_dim + head_dim_v), half of it when
    causal. A peer that is not installed or cannot do a problem is named on stderr, with the reason.
    Without a GPU the NumPy road is timed. Exit code 1 if an answer of cuflash's is wrong or missing.
    """  # fmt: skip
    on_gpu = machine.why_no_gpu() is None
    asked = asked_problems(problem_options, tokens, on_gpu)
    names = [name for part in peer_names or ("all",) for name in part.replace(",", " ").split()]
    try:
        chosen = peers.select(names, on_gpu)
    except InvalidArgumentError as error:
        raise click.BadParameter(str(error), param_hint="--peer") from error
    # What would fail at the end fails before the measuring.
    if plot:
        bench_plot.require_matplotlib()
    csv = CsvRows(csv_file, CSV_COLUMNS) if csv_file else None
    timer, xp = timer_and_arrays(on_gpu, l2, budget)
    rows: list[BenchRow] = []
    failed = False
    for number, problem in enumerate(asked, start=1):
        click.echo(f"{number}/{len(asked)} {problem.in_words}", err=True)
        try:
            measured = measure(
                problem, [None if c == "default" else c for c in configs] or [None], chosen,
                timer=timer, rounds=rounds, budget=budget, xp=xp, seed=seed,
            )  # fmt: skip
        except CuflashError as error:
            failed = True
            click.echo(f"not measured, {failure.in_words(error)}", err=True)
            continue
        rows += measured
        if csv:
            csv.append(environment(on_gpu, commit), [r for row in measured for r in records(row)])
    say_what_is_missing(rows)
    emit([table(rows)], as_json=as_json)
    if plot and rows:
        bench_plot.draw(rows, plot)
    if failed or not all(row.verdict.ok for row in rows):
        sys.exit(1)


def asked_problems(
    options: dict[str, Any], tokens: int | None, on_gpu: bool
) -> list[AttentionProblem]:
    """Give the problems of the options, in the shapes of ``--tokens`` if that is given."""
    if tokens is None:
        return problems(options, DEFAULTS if on_gpu else SMALL)
    for name, flag in (("batch", "batch"), ("nheads_q", "heads"), ("nheads_k", "heads-k"),
                       ("packed", "packed"), ("from_model", "from-model"), ("from_log", "from-log")):  # fmt: skip
        if options[name]:
            raise click.UsageError(f"--tokens says batch and heads: leave out --{flag}")
    return [
        replace(
            problem,
            batch=max(1, tokens // max(1, problem.seqlen_q)),
            nheads_q=(heads := max(1, TOKENS_WIDTH // problem.head_dim)),
            nheads_k=heads,
        )
        for problem in problems(options, DEFAULTS if on_gpu else SMALL)
    ]


def timer_and_arrays(on_gpu: bool, l2: str, budget: float) -> tuple[Timer, Any]:
    """Give what times, and the module whose arrays are timed."""
    if not on_gpu:
        return HostTimer(budget=budget), np
    import cupy

    # Not captured in a graph: what torch does in a call may not be.
    return GpuTimer(l2=l2, budget=budget, graph=False), cupy


def say_what_is_missing(rows: Sequence[BenchRow]) -> None:
    """Name on stderr, once each, the peers that were left out and those whose answer was wrong."""
    problems_of: dict[str, set[AttentionProblem]] = {}
    for row in rows:
        said = {f"peer {name} left out: {reason}" for name, reason in row.absent.items()}
        said |= {
            f"peer {name} is wrong: {row.peers[name].verdict.in_words}" for name in row.wrong_peers
        }
        if not row.verdict.ok:
            config = f" with {row.config}" if row.config else ""
            said.add(f"cuflash is wrong{config}: {row.verdict.in_words}")
        for line in said:
            problems_of.setdefault(line, set()).add(row.problem)
    total = len({row.problem for row in rows})
    for line, where in sorted(problems_of.items()):
        some = f" ({len(where)} of {total} problems)" if total > 1 else ""
        click.echo(f"{line}{some}", err=True)


def table(rows: Sequence[BenchRow]) -> Table:
    """Give the table: a line for each problem and config, with every peer that did any of them."""
    names = list(dict.fromkeys(name for row in rows for name in row.peers))
    several = any(row.config is not None for row in rows)
    columns = [
        Column("problem"),
        *([Column("config"), Column("to_first", "x first", ratio_text, right=True)] if several else []),
        Column("ms", text=in_milliseconds, right=True),
        Column("spread", text=lambda value: f"{value:.1%}", right=True),
        Column("tflops", "TFLOP/s", right=True),
        Column("gbs", "GB/s", right=True),
        *(c for name in names for c in (Column(tflops_key(name), f"{name} TFLOP/s", right=True),
                                        Column(ratio_key(name), "ratio", ratio_text, right=True))),
        Column("check"),
        *([Column("wrong_peers")] if any(row.wrong_peers for row in rows) else []),
        Column("tile"),
    ]  # fmt: skip
    title = "Timed in turn; ratio: how many times as fast as the peer"
    return Table("bench", title, columns, [line(row) for row in rows])


def line(row: BenchRow) -> Row:
    """Give a row of the table."""
    of_peers: Row = {}
    for name, result in row.peers.items():
        of_peers |= {tflops_key(name): result.tflops, ratio_key(name): result.ratio}
    return {
        "problem": row.problem.in_words,
        "config": row.config or "default",
        "to_first": row.to_first,
        "ms": row.timing.ms,
        "spread": row.timing.spread,
        "tflops": row.tflops,
        "gbs": row.gbs,
        **of_peers,
        "check": "OK" if row.verdict.ok else "FAIL",
        "wrong_peers": " ".join(row.wrong_peers) or None,
        "tile": row.plan.tile,
    }


def tflops_key(name: str) -> str:
    """Key of a peer's speed in a row."""
    return f"{name.replace('-', '_')}_tflops"


def ratio_key(name: str) -> str:
    """Key of the ratio to a peer in a row."""
    return f"{name.replace('-', '_')}_ratio"


def ratio_text(value: float) -> str:
    """Give a ratio with as many digits as it is known to."""
    return f"{value:.2f}"
