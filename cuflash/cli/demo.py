"""`cuflash demo`: the main job on random input, checked and timed, with what this machine has."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import click
import numpy as np

import cuflash
from cuflash.cli import kernels, machine
from cuflash.cli.tables import Column, Row, Table, emit, json_option
from cuflash.cli.units import in_milliseconds
from cuflash.debug.accuracy import Truth
from cuflash.errors import MissingDependencyError
from cuflash.inputs import Inputs, random_inputs
from cuflash.problem import AttentionProblem, describe_problem

COLUMNS = (
    Column("device"),
    Column("problem"),
    Column("kernel"),
    Column("tile"),
    Column("reason"),
    Column("origin", "from"),
    Column("ms", text=in_milliseconds, right=True),
    Column("tflops", "TFLOP/s", right=True),
    Column("max_error", "max error", right=True),
    Column("bound", right=True),
    Column("verdict"),
)


@click.command()
@click.option("--batch", type=click.IntRange(1), help="Sequences.  [default: 4; on a CPU 1]")
@click.option("--seqlen", type=click.IntRange(1), help="Queries.  [default: 4096; on a CPU 1024]")
@click.option("--seqlen-k", type=click.IntRange(1), help="Keys.  [default: as --seqlen]")
@click.option("--heads", type=click.IntRange(1), help="Query heads.  [default: 16; on a CPU 4]")
@click.option("--heads-k", type=click.IntRange(1), help="Key heads.  [default: as --heads]")
@click.option("--head-dim", type=click.IntRange(1), help="Head dim.  [default: 128; on a CPU 64]")
@click.option(
    "--dtype",
    type=click.Choice(["fp16", "bf16", "fp32"]),
    default="bf16",
    show_default=True,
    help="Of q, k, v and the answer.",
)
@click.option("--causal/--no-causal", default=True, show_default=True, help="The causal mask.")
@click.option(
    "--arch",
    metavar="SM",
    help="Compile for this architecture, with or without a GPU."
    f"  [default: none; on a CPU {machine.DEFAULT_ARCH}]",
)
@click.option("--seed", default=0, show_default=True, help="Of the random numbers.")
@json_option
def demo(
    batch: int | None,
    seqlen: int | None,
    seqlen_k: int | None,
    heads: int | None,
    heads_k: int | None,
    head_dim: int | None,
    dtype: str,
    causal: bool,
    arch: str | None,
    seed: int,
    as_json: bool,
) -> None:
    """Run attention on random input and check it against float64.

    With a GPU its kernels run, and are timed. Without one the NumPy road runs, and the kernels that
    a GPU would run are compiled if NVRTC is installed. Exit code 1 if the answer is wrong.
    """
    gpu = machine.why_no_gpu() is None
    defaults = (4, 4096, 16, 128) if gpu else (1, 1024, 4, 64)
    given = (batch, seqlen, heads, head_dim)
    batch, seqlen, heads, head_dim = (
        fallback if value is None else value
        for value, fallback in zip(given, defaults, strict=True)
    )
    problem = describe_problem(
        dtype=dtype, batch=batch, seqlen_q=seqlen, seqlen_k=seqlen_k, nheads_q=heads, nheads_k=heads_k,
        head_dim=head_dim, causal=causal,
    )  # fmt: skip
    run = run_on_gpu(problem, seed) if gpu else run_on_cpu(problem, seed)
    tables = [
        Table(
            "run", "Attention on random input, checked against float64", COLUMNS, [run], tall=True
        )
    ]
    if arch or not gpu:
        tables += compiled_for(arch or machine.DEFAULT_ARCH, problem)
    emit(tables, as_json=as_json)
    if run["verdict"] != "OK":
        sys.exit(1)


def run_on_cpu(problem: AttentionProblem, seed: int) -> Row:
    """Run and time the NumPy road."""
    inputs = random_inputs(problem, np, seed)

    def call() -> float:
        start = time.perf_counter()
        inputs.attend()
        return 1e3 * (time.perf_counter() - start)

    out = inputs.attend()
    return result("CPU", inputs, [call() for _ in range(3)], out)


def run_on_gpu(problem: AttentionProblem, seed: int) -> Row:
    """Run and time the kernels on the current GPU."""
    import cupy

    from cuflash.gpu.launch import device_info

    inputs = random_inputs(problem, cupy, seed)
    out = inputs.attend()
    # Where the kernel came from is news at the first call only.
    first = cuflash.last_plan()
    device = device_info(cupy.cuda.Device().id)
    row = result(device.name, inputs, event_times(inputs.attend), out)
    return row | {"origin": first.origin if first else None}


def event_times(call: Callable[[], None], warm_up: int = 10, runs: int = 30) -> list[float]:
    """Time a launch with the GPU's own clock, in milliseconds, once the GPU is warm."""
    import cupy

    for _ in range(warm_up):
        call()
    pairs = [(cupy.cuda.Event(), cupy.cuda.Event()) for _ in range(runs)]
    for start, end in pairs:
        start.record()
        call()
        end.record()
    pairs[-1][1].synchronize()
    return [cupy.cuda.get_elapsed_time(start, end) for start, end in pairs]


def result(device: str, inputs: Inputs, times: Sequence[float], out: Any) -> Row:
    """Check an answer and put everything about the run in one row."""
    problem = inputs.problem
    plan = cuflash.last_plan()
    verdict = Truth(inputs).verdict(out)
    milliseconds = statistics.median(times)
    return {
        "device": device,
        "problem": problem.in_words,
        "kernel": plan.kernel if plan else None,
        "tile": plan.tile if plan else None,
        "reason": plan.reason if plan else None,
        "origin": plan.origin if plan else None,
        "ms": milliseconds,
        "tflops": problem.flops / milliseconds / 1e9,
        "max_error": verdict.max_error,
        "bound": verdict.bound,
        "verdict": "OK" if verdict.ok else "FAIL",
    }


def compiled_for(arch: str, problem: AttentionProblem) -> list[Table]:
    """Compile what this problem would run on an architecture, in each dtype, if NVRTC is here."""
    from cuflash.gpu.choose import choose
    from cuflash.gpu.device import Device

    device = Device.from_arch(arch)
    dtypes = ("fp16", "bf16", "fp32")
    specs = [choose(replace(problem, dtype=dtype), device).spec for dtype in dtypes]
    compiled, failures = kernels.compile_specs(specs)
    for error in failures.values():
        if isinstance(error, MissingDependencyError):
            click.echo(f"GPU kernels are not compiled here: {error}", err=True)
            return []
        raise error
    return [kernels.table(compiled, f"The kernels that {arch} would run, compiled here")]
