"""`cuflash check`: answers held against float64, and what is likely wrong with a wrong one."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np

import cuflash
from cuflash.cli import answer_file, failure, machine
from cuflash.cli.problem_options import DEFAULTS, SMALL, problem_options, problems
from cuflash.cli.tables import Column, Row, Table, emit, json_option
from cuflash.debug.compare import Comparison, compare, judge
from cuflash.errors import CuflashError, InvalidArgumentError
from cuflash.inputs import random_inputs
from cuflash.problem import AttentionProblem

COLUMNS = (
    Column("problem"),
    Column("seed", right=True),
    Column("kernel"),
    Column("tile"),
    Column("max_error", "max error", right=True),
    Column("mean_error", "mean error", right=True),
    Column("ratio", "x plain", right=True),
    Column("bound", right=True),
    Column("lse_error", "lse error", right=True),
    Column("first_bad", "first bad"),
    Column("verdict"),
    Column("cause", "likely cause"),
)
# What a file of arrays leaves open; its arrays say the rest.
WITH_ANSWER = ("causal", "window_size", "softcap", "precision", "dtype")


@click.command()
@problem_options
@click.option(
    "--softmax-scale",
    type=float,
    metavar="X",
    help="Factor of q @ k.T.  [default: 1/sqrt(head_dim)]",
)
@click.option("--config", metavar="C", help="Kernel and tile, as config= takes them.")
@click.option(
    "--seed",
    "seeds",
    type=int,
    multiple=True,
    metavar="N",
    help="Of the random numbers; repeat for several.  [default: 0]",
)
@click.option(
    "--repeat",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Seeds from each --seed on.",
)
@click.option(
    "--answer",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE.npz",
    help="Check q, k, v, out (and lse) that another program saved.",
)
@click.option(
    "--layout",
    type=click.Choice(["bshd", "bhsd"]),
    help="With --answer: of its arrays.  [default: bshd]",
)
@json_option
def check(
    problem_options: dict[str, Any],
    softmax_scale: float | None,
    config: str | None,
    seeds: Sequence[int],
    repeat: int,
    answer: Path | None,
    layout: str | None,
    as_json: bool,
) -> None:
    """Check answers on random input against float64, and say what a wrong one suffers from.

    Right is at most twice the error of the plain computation in the same dtype, which the column
    `x plain` counts in. What a kernel leaves unwritten is found: the result is full of NaN before.
    For a wrong answer known mistakes are tried, and those that fit are named on stderr with what to
    do. Exit code 1 if an answer is wrong or missing.

    \b
      cuflash check --seqlen 1000,4096 --head-dim 64,128 --both-masks
      cuflash check --config block_m=64,block_n=32 --dtype fp16 --repeat 5
      cuflash check --answer saved.npz --causal   # another program's kernel
    """  # fmt: skip
    if answer is not None:
        refuse_beside_answer(problem_options, config, seeds, repeat)
        rows = [of_file(answer, problem_options, softmax_scale, layout)]
    elif layout is not None:
        raise click.UsageError("--layout is of the arrays of --answer: without it there are none")
    else:
        on_gpu = machine.why_no_gpu() is None
        asked = problems(problem_options, DEFAULTS if on_gpu else SMALL)
        if softmax_scale is not None:
            asked = [replace(problem, softmax_scale=softmax_scale) for problem in asked]
        drawn = dict.fromkeys(first + n for first in seeds or (0,) for n in range(repeat))
        rows = [of_random(problem, seed, config, on_gpu) for problem in asked for seed in drawn]
    title = "Answers against float64"
    emit([Table("check", title, COLUMNS, rows, tall=len(rows) == 1)], as_json=as_json)
    if any(row["verdict"] != "OK" for row in rows):
        sys.exit(1)


def refuse_beside_answer(
    options: dict[str, Any], config: str | None, seeds: Sequence[int], repeat: int
) -> None:
    """Refuse options that say what the arrays of a file say themselves."""
    given = [name for name, value in options.items() if value not in (None, False)]
    beside = [name for name in given if name not in WITH_ANSWER]
    beside += [name for name, there in (("config", config), ("seed", seeds)) if there]
    beside += ["repeat"] if repeat > 1 else []
    context = click.get_current_context()
    for parameter in context.command.params:
        if parameter.name in beside or (parameter.name == "seeds" and "seed" in beside):
            raise click.UsageError(f"--answer brings its own arrays: leave out {parameter.opts[0]}")


def of_file(
    path: Path, options: dict[str, Any], softmax_scale: float | None, layout: str | None
) -> Row:
    """Check the arrays of a file."""
    dtypes = options["dtype"] or (None,)
    if len(dtypes) > 1:
        raise click.UsageError("--answer is of one dtype: name one with --dtype")
    given, other = answer_file.read(path, dtypes[0])
    if other:
        click.echo(f"{path}: not looked at: {', '.join(other)}", err=True)
    comparison = compare(
        **given, softmax_scale=softmax_scale, layout=layout, causal=bool(options["causal"]),
        window_size=options["window_size"] or (-1, -1), softcap=options["softcap"] or 0.0,
        precision=options["precision"] or "ieee",
    )  # fmt: skip
    if dtypes[0] not in (None, comparison.problem.dtype):
        raise InvalidArgumentError(
            f"{path} holds arrays of {comparison.problem.dtype}, not of --dtype {dtypes[0]}: save"
            " what the kernel read"
        )
    return row(comparison, {"kernel": path.name})


def of_random(problem: AttentionProblem, seed: int, config: str | None, on_gpu: bool) -> Row:
    """Run a problem on random arrays, into a result full of NaN, and check it."""
    xp: Any = np
    if on_gpu:
        import cupy

        xp = cupy
    try:
        inputs = random_inputs(problem, xp, seed)
        out, lse = inputs.attend(out=inputs.out(), return_lse=True, config=config)
        plan = cuflash.last_plan()
        comparison = judge(inputs, out, lse)
    except CuflashError as error:
        click.echo(f"{problem.in_words}: {failure.in_words(error)}", err=True)
        return {
            "problem": problem.in_words,
            "seed": seed,
            "verdict": "FAIL",
            "cause": error.code.name,
        }
    of_run = {
        "seed": seed,
        "kernel": plan.kernel if plan else None,
        "tile": plan.tile if plan else None,
    }
    return row(comparison, of_run)


def row(comparison: Comparison, of_run: Row) -> Row:
    """Put an answer's check in one row, and all that is known of a wrong one on stderr."""
    verdict = comparison.verdict
    if not comparison.ok:
        click.echo(str(comparison), err=True)
    return of_run | {
        "problem": comparison.problem.in_words,
        "max_error": number(verdict.max_error),
        "mean_error": number(verdict.mean_error),
        "ratio": number(verdict.ratio),
        "bound": verdict.bound,
        "lse_error": number(verdict.lse_error),
        "first_bad": verdict.first_bad,
        "verdict": "OK" if comparison.ok else "FAIL",
        "cause": comparison.suspects[0].name if comparison.suspects else None,
    }  # fmt: skip


def number(value: float | None) -> float | None:
    """Give a number that JSON can hold: none for a NaN, of which the cause says more."""
    return value if value is not None and math.isfinite(value) else None
