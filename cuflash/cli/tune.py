"""`cuflash tune`: sweep block sizes for some problems and keep the winners."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cuflash.cli import kernels, machine, tuned
from cuflash.cli.problem_options import command_line, problem_options, problems
from cuflash.cli.tables import Row, Table, emit
from cuflash.cli.tune_tables import RECORDS, pruned_rows, pruned_table, report
from cuflash.cli.units import AGE

if TYPE_CHECKING:
    from cuflash.gpu.device import Device
    from cuflash.problem import AttentionProblem
    from cuflash.tuning.record import Record
    from cuflash.tuning.space import Plan
    from cuflash.tuning.sweep import Result


@click.group(invoke_without_command=True)
@problem_options
@click.option("--op", default="forward", show_default=True, help="Operation to tune.")
@click.option("--space", metavar="AXES", help="Values of some axes: 'block_m=64,128 num_stages=2'.")
@click.option(
    "--budget", type=AGE, metavar="TIME", help="For each problem: 90s, 5m.  [default: none]"
)
@click.option(
    "--jobs", type=click.IntRange(1), help="Compilers side by side.  [default: cores - 1]"
)
@click.option("--resume", is_flag=True, help="Take up what an interrupted sweep has measured.")
@click.option("--l2", type=click.Choice(["warm", "cold"]), default="warm", show_default=True,
              help="Of the GPU's cache when a kernel starts.")  # fmt: skip
@click.option("--seconds", type=click.FloatRange(0, min_open=True), default=0.15, show_default=True,
              help="How long to time each candidate.")  # fmt: skip
@click.option("--device", type=click.IntRange(0), default=0, show_default=True, help="Which GPU.")
@click.option("--seed", default=0, show_default=True, help="Of the random arrays.")
@click.option("--no-save", is_flag=True, help="Do not put the winner in the tuned table.")
@click.option("--dry-run", is_flag=True, help="Only prune, compile, and show resources.")
@click.option(
    "--arch", metavar="SM", help="With --dry-run: for this architecture, without its GPU."
)
@click.option("--top", type=click.IntRange(1), default=15, show_default=True,
              help="How many candidates a terminal is shown; files and pipes get all.")  # fmt: skip
@click.option("--format", "form", type=click.Choice(["table", "tsv", "json"]),
              help="Of stdout.  [default: table on a terminal, tsv when piped]")  # fmt: skip
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
              help="Write all records as JSON.")  # fmt: skip
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE.png",
              help="Draw block_m against block_n; of several problems, one file each.")  # fmt: skip
@click.pass_context
def tune(
    ctx: click.Context,
    /,
    problem_options: dict[str, Any],
    op: str,
    space: str | None,
    budget: float | None,
    jobs: int | None,
    resume: bool,
    no_save: bool,
    dry_run: bool,
    arch: str | None,
    top: int,
    form: str | None,
    out: Path | None,
    plot: Path | None,
    **options: Any,
) -> None:
    """Find the fastest tile for a problem on this GPU, and use it from then on.

    Each candidate is compiled while others are timed, checked against float64, and run in a process
    of its own, so that one that crashes or hangs costs nothing but itself. The fastest five and the
    default are timed again in turn; nothing is called faster that is not faster beyond the noise.

    \b
      cuflash tune --seqlen 4096 --heads 16 --head-dim 128 --causal
      cuflash tune --from-model llama-3-8b --seqlen 2048,8192 --budget 2m
      cuflash tune --head-dim 128 --space "block_n=32,64,128 num_stages=1,2"
      cuflash tune --arch sm_90a --dry-run       # without a GPU: prepare a sweep
    """
    if ctx.invoked_subcommand is not None:
        refuse_beside(ctx)
        return
    asked = problems(problem_options)
    if arch and not dry_run:
        raise click.UsageError("--arch describes a GPU that is not here: add --dry-run")
    if dry_run:
        show_dry_run(asked, described(arch, options["device"]), space, jobs, form)
        return
    from cuflash.tuning.tune import tune as sweep_all

    results: list[Result] = []
    for number, problem in enumerate(asked, 1):
        with progress_bar(f"{number}/{len(asked)} {problem.in_words}") as observe:
            try:
                results += sweep_all(
                    problem, op=op, space=space, budget=budget, jobs=jobs, resume=resume,
                    save=not no_save, observe=observe, planned=lambda plan: tell_plan(plan, jobs), **options,
                )  # fmt: skip
            except KeyboardInterrupt:
                click.echo(
                    "\ninterrupted: what was measured is kept; go on with --resume", err=True
                )
                sys.exit(130)
        tell_result(results[-1], no_save)
    report(results, top, form)
    if out:
        write(out, results)
    if plot:
        draw(plot, results)
    if any(result.winner is None for result in results):
        sys.exit(1)


for command in tuned.COMMANDS:
    tune.add_command(command)


def refuse_beside(ctx: click.Context) -> None:
    """Refuse a sweep's options beside a subcommand, which would not hear of them."""
    for parameter in ctx.command.params:
        if ctx.get_parameter_source(str(parameter.name)) is click.core.ParameterSource.COMMANDLINE:
            raise click.UsageError(
                f"{parameter.opts[0]} belongs to a sweep, not to `tune {ctx.invoked_subcommand}`:"
                " write its options behind it"
            )


def described(arch: str | None, index: int) -> Device:
    """Give the GPU that a dry run is for."""
    from cuflash.gpu.device import Device

    if arch:
        return Device.from_arch(arch)
    if machine.why_no_gpu() is not None:
        raise click.UsageError(
            f"{machine.why_no_gpu()}: say which with --arch, such as --arch sm_90a"
        )
    from cuflash.gpu.launch import device_info

    return device_info(index)


def show_dry_run(
    asked: list[AttentionProblem],
    device: Device,
    space: str | None,
    jobs: int | None,
    form: str | None,
) -> None:
    """Prune, compile everything, and show what each candidate takes."""
    from cuflash.gpu.occupancy import occupancy
    from cuflash.tuning.space import plan as planned

    rows: list[Row] = []
    pruned: list[Row] = []
    failed = False
    for problem in asked:
        plan = planned(problem, device, space)
        tell_plan(plan, jobs)
        pruned += pruned_rows(plan)
        compiled, failures = kernels.compile_specs([c.spec for c in plan.candidates], jobs)
        found = {kernel.spec: kernels.row(kernel) for kernel in compiled}
        for candidate in plan.candidates:
            row: Row = {"problem": problem.in_words, **candidate.config}
            facts = found.get(candidate.spec)
            if facts is None:
                row |= {"verdict": "compile", "error": str(failures[candidate.spec])}
            else:
                resident = occupancy(
                    device, registers=facts["registers"], shared_bytes=facts["shared_bytes"],
                    threads=candidate.spec.threads,
                )  # fmt: skip
                verdict = "default" if candidate is plan.default else "ready"
                if facts["spill_bytes"]:
                    verdict = "spills"
                row |= facts | {"resident": resident.blocks, "verdict": verdict}
            rows.append(row)
        failed = failed or not compiled
    timed = ("rank", "ms", "spread", "tflops", "ratio", "noise")
    columns = [column for column in RECORDS if column.key not in timed]
    emit([Table("candidates", "Candidates", columns, rows), pruned_table(pruned)], form=form)
    if failed:
        sys.exit(1)


def tell_plan(plan: Plan, jobs: int | None) -> None:
    """Say, before anything runs, what will."""
    from cuflash.tuning.sweep import default_jobs, estimate_seconds

    removed = ", ".join(f"{count} {kind}" for kind, count in plan.pruned_by_kind.most_common())
    jobs = jobs or default_jobs()
    click.echo(
        f"{plan.problem.in_words} on {plan.device.name} ({plan.device.arch}):"
        f" {len(plan.candidates)} candidates of {len(plan.candidates) + len(plan.pruned)}"
        f"{f' (pruned: {removed})' if removed else ''}; about {estimate_seconds(plan, jobs):.0f} s with"
        f" {jobs} compilers, less for kernels in the cache",
        err=True,
    )


def tell_result(result: Result, no_save: bool) -> None:
    """Say in a sentence what came of a sweep, and how to look into the winner."""
    from cuflash.tuning import store

    winner = result.winner
    if winner is None:
        click.echo("no candidate worked; the reasons are in the table", err=True)
        return
    place = "not saved"
    if not no_save:
        name = store.file_name(store.identity(result.plan.device))
        place = f"saved in {store.user_dir() / name}, and used by calls from now on"
    if winner.config == result.plan.default.name:
        what = "nothing is faster than the default beyond the noise"
    else:
        what = f"{winner.config}: {winner.ratio or 1:.3f} of the default's speed"
    click.echo(f"{what}; {place}", err=True)
    if not result.complete:
        click.echo("the budget ended the sweep early: --resume goes on", err=True)
    click.echo(f"profile it: {ncu_line(result.plan.problem, winner)}", err=True)


def ncu_line(problem: AttentionProblem, winner: Record) -> str:
    """Give the line that profiles a config; the first launches warm up."""
    kernel = winner.config.split()[0].removeprefix("kernel=")
    return (
        "CUFLASH_NVRTC_FLAGS=-lineinfo ncu --set full --import-source yes"
        f" -k regex:{kernel} --launch-skip 3 --launch-count 1 -o {kernel}"
        f' cuflash bench {command_line(problem)} --peer none --rounds 1 --config "{winner.config}"'
    )


def write(path: Path, results: list[Result]) -> None:
    """Write everything about the sweeps as JSON."""
    from cuflash.tuning import store

    document = [
        {"problem": r.plan.problem.options, "gpu": store.identity(r.plan.device), "versions": r.versions,
         "complete": r.complete, "winner": r.winner and r.winner.config,
         "pruned": dict(r.plan.pruned_by_kind), "records": [record.as_dict() for record in r.records]}
        for r in results
    ]  # fmt: skip
    try:
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise click.ClickException(f"cannot write {path}: {error.strerror}") from error


def draw(path: Path, results: list[Result]) -> None:
    """Draw each sweep's heat map."""
    from cuflash.tuning.heatmap import plot

    for number, result in enumerate(results, 1):
        own = path if len(results) == 1 else path.with_stem(f"{path.stem}-{number}")
        title = f"{result.plan.problem.in_words}\n{result.plan.device.name}"
        try:
            plot(result.records, title, own)
        except OSError as error:
            raise click.ClickException(f"cannot write {own}: {error.strerror}") from error
        click.echo(f"drawn: {own}", err=True)


@contextmanager
def progress_bar(label: str) -> Iterator[Any]:
    """Show on a terminal how far a sweep is, and the best so far."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
        TextColumn("compiled {task.fields[compiled]}  best {task.fields[best]}"),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(label, total=None, compiled=0, best="-")

        def observe(progress: Any) -> None:
            best = progress.best
            words = f"{best.ms:.4g} ms ({best.config.partition(' ')[2]})" if best else "-"
            bar.update(
                task, total=progress.total, completed=progress.measured, compiled=progress.compiled, best=words
            )  # fmt: skip

        yield observe
