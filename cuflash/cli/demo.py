"""`cuflash demo`: the main job on random input, checked and timed, with what this machine has."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import click
import numpy as np

import cuflash
from cuflash import arrays
from cuflash.cli import kernels, machine
from cuflash.cli.check import check
from cuflash.cli.tables import Column, Row, Table, emit, json_option
from cuflash.cli.units import in_milliseconds
from cuflash.errors import MissingDependencyError
from cuflash.problem import AttentionProblem, build_problem

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


@dataclass(frozen=True)
class Size:
    """The shape of a run; the command's options fill in what they name."""

    batch: int
    seqlen: int
    seqlen_k: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    causal: bool


@click.command()
@click.option("--batch", type=click.IntRange(1), help="Sequences.  [default: 4; on a CPU 1]")
@click.option("--seqlen", type=click.IntRange(1), help="Queries.  [default: 4096; on a CPU 1024]")
@click.option("--seqlen-k", type=click.IntRange(1), help="Keys.  [default: as --seqlen]")
@click.option("--heads", type=click.IntRange(1), help="Query heads.  [default: 16; on a CPU 4]")
@click.option("--kv-heads", type=click.IntRange(1), help="Key heads.  [default: as --heads]")
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
    kv_heads: int | None,
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
    size = Size(
        batch, seqlen, seqlen_k or seqlen, heads, kv_heads or heads, head_dim, dtype, causal
    )
    q, k, v = random_inputs(size, seed)
    problem = build_problem(q, k, v, causal=causal)
    run = run_on_gpu(q, k, v, problem) if gpu else run_on_cpu(q, k, v, problem)
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


def random_inputs(size: Size, seed: int) -> tuple[Any, Any, Any]:
    """Give q, k and v of standard normal numbers in NumPy."""
    rng = np.random.default_rng(seed)
    of_k = (size.batch, size.seqlen_k, size.kv_heads, size.head_dim)
    shapes = ((size.batch, size.seqlen, size.heads, size.head_dim), of_k, of_k)
    dtype = arrays.dtype_of(size.dtype)
    q, k, v = (rng.standard_normal(shape, dtype=np.float32).astype(dtype) for shape in shapes)
    return q, k, v


def run_on_cpu(q: Any, k: Any, v: Any, problem: AttentionProblem) -> Row:
    """Run and time the NumPy road."""

    def call() -> float:
        start = time.perf_counter()
        cuflash.flash_attn_func(q, k, v, causal=problem.causal)
        return 1e3 * (time.perf_counter() - start)

    out = cuflash.flash_attn_func(q, k, v, causal=problem.causal)
    return result("CPU", problem, [call() for _ in range(3)], q, k, v, out)


def run_on_gpu(q: Any, k: Any, v: Any, problem: AttentionProblem) -> Row:
    """Run and time the kernels on the current GPU."""
    import cupy

    from cuflash.gpu.launch import device_info

    q, k, v = (cupy.asarray(x) for x in (q, k, v))
    out = cuflash.flash_attn_func(q, k, v, causal=problem.causal)
    # Where the kernel came from is news at the first call only.
    first = cuflash.last_plan()

    def call() -> None:
        cuflash.flash_attn_func(q, k, v, causal=problem.causal)

    device = device_info(cupy.cuda.Device().id)
    row = result(device.name, problem, event_times(call), q, k, v, out)
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


def result(
    device: str, problem: AttentionProblem, times: Sequence[float], q: Any, k: Any, v: Any, out: Any
) -> Row:
    """Check an answer and put everything about the run in one row."""
    plan = cuflash.last_plan()
    verdict = check(q, k, v, out, causal=problem.causal)
    milliseconds = statistics.median(times)
    return {
        "device": device,
        "problem": in_words(problem),
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


def in_words(problem: AttentionProblem) -> str:
    """Give a problem as one reads it."""
    return (
        f"{problem.dtype} batch={problem.batch} seqlen={problem.seqlen_q}x{problem.seqlen_k}"
        f" heads={problem.nheads_q}/{problem.nheads_k} head_dim={problem.head_dim}"
        f"{' causal' if problem.causal else ''}"
    )


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
