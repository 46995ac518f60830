"""`cuflash dev`: edit a kernel, save, and see a second later what became of it."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

import click

from cuflash.cli import machine, resources_diff
from cuflash.cli.problem_options import problem_options, problems
from cuflash.cli.tables import Column, Row, Table, emit, json_option
from cuflash.errors import CudaError

if TYPE_CHECKING:
    from cuflash.debug.watch import Session, Version
    from cuflash.gpu.device import Device
    from cuflash.problem import AttentionProblem
    from cuflash.tuning.workbench import Workbench

# Of what a kernel takes, what one looks at at each save; `compile --diff` shows all.
SHOWN = ("registers", "spill stores, bytes", "spill loads, bytes", "shared memory", "blocks of an SM",
         "occupancy, %", "limited by", "machine code, bytes", "compile, ms")  # fmt: skip


@click.command()
@problem_options
@click.option("--config", metavar="C", help="Kernel and tile, as config= takes them.")
@click.option(
    "--arch",
    metavar="SM",
    help="Compile for this architecture; another than the GPU's: without running."
    f"  [default: this GPU, else {machine.DEFAULT_ARCH}]",
)
@click.option("--once", is_flag=True, help="Show the kernel as it is and end.")
@click.option("--seed", default=0, show_default=True, help="Of the random numbers.")
@json_option
def dev(
    problem_options: dict[str, Any],
    config: str | None,
    arch: str | None,
    once: bool,
    seed: int,
    as_json: bool,
) -> None:
    """Watch the kernels' folder: at each save compile, check and time one problem's kernel.

    Edit the files of kernels_cu, or a copy that CUFLASH_KERNEL_DIR names. Each version is compared
    with the last good one; one that does not compile, is wrong or crashes never takes its place.
    Kernels run in a process of their own, so a crash costs that process alone. Without a GPU they are
    compiled only. Ctrl-C ends. With --once, exit code 1 if the kernel is not good.
    """
    from cuflash.debug import watch
    from cuflash.gpu import render

    asked = problems(problem_options)
    if len(asked) != 1:
        raise click.UsageError(f"one problem can be watched, and the options give {len(asked)}")
    with contextlib.ExitStack() as stack:
        device, bench = where_it_runs(asked[0], arch, seed)
        if bench is not None:
            stack.enter_context(bench)
        session = watch.Session(asked[0], device, config, bench)
        folder = watch.Folder(render.kernel_root())
        click.echo(f"{asked[0].in_words}: {session.spec.name} for {device.arch}", err=True)
        try:
            for version in watch.versions(session, folder, stop=lambda: once):
                show(version, as_json=as_json)
                if not once:
                    click.echo(f"watching {folder.root}; Ctrl-C ends", err=True)
        except KeyboardInterrupt:
            click.echo(f"\n{summary(session)}", err=True)
            return
    if session.good is None:
        sys.exit(1)


def where_it_runs(
    problem: AttentionProblem, arch: str | None, seed: int
) -> tuple[Device, Workbench | None]:
    """Give what to compile for, and what runs it; say why nothing does."""
    from cuflash.debug import watch
    from cuflash.gpu.device import Device
    from cuflash.tuning.workbench import WorkerLost, WorkerRefused

    why = machine.why_no_gpu()
    if why is None and arch not in (None, here := machine.default_arch()):
        why = f"--arch is {arch} and the GPU is {here}"
    if why is not None:
        click.echo(f"{why}: kernels are compiled, not run", err=True)
        return Device.from_arch(arch or machine.DEFAULT_ARCH), None
    click.echo("making the GPU, the arrays and the right answer ready", err=True)
    bench = watch.workbench(problem, seed)
    try:
        return Device(**bench.prepare()["gpu"]), bench
    except (WorkerLost, WorkerRefused) as error:
        raise CudaError(f"kernels cannot be run: {error}") from error


def show(version: Version, *, as_json: bool) -> None:
    """Print what became of a version: mistakes to stderr, numbers to stdout."""
    edited = f", edited: {', '.join(version.files)}" if version.files else ""
    click.echo(f"version {version.number}{edited}, {version.seconds:.2f} s", err=True)
    for mistake in version.mistakes:
        click.echo(f"{mistake.path}:{mistake.line}: error: {mistake.message}", err=True)
        if mistake.text:
            click.echo(f"{mistake.line:6} | {mistake.text}", err=True)
    if version.kernel is None:
        if not version.mistakes:
            click.echo(version.error, err=True)
        click.echo(f"does not compile; {still_good(version)}", err=True)
        return
    for warning in version.kernel.meta["warnings"]:
        click.echo(warning, err=True)
    if version.run is not None and version.run.error is not None:
        click.echo(f"{version.run.status}: {version.run.error}", err=True)
    if not version.ok:
        click.echo(f"not good; {still_good(version)}", err=True)
    emit([table(version)], as_json=as_json)


def still_good(version: Version) -> str:
    """Say which version the next one is compared with."""
    return (
        f"version {version.base.number} stays the last good one"
        if version.base
        else "none was good"
    )


def table(version: Version) -> Table:
    """Give a version beside the last good one."""
    base = version.base
    columns = (
        Column("resource"),
        Column("before", f"version {base.number}" if base else "before", right=True),
        Column("now", f"version {version.number}", right=True),
        Column("delta", text=resources_diff.signed, right=True),
        Column("percent", "%", resources_diff.signed, right=True),
    )
    before, now = (facts(base) if base else {}, facts(version))
    rows = [row(name, before.get(name), value) for name, value in now.items()]
    return Table("version", f"{version.kernel.spec.name if version.kernel else ''}", columns, rows)


def facts(version: Version) -> dict[str, Any]:
    """Give what is known of a version, by name."""
    assert version.kernel is not None
    run = version.run
    found: dict[str, Any] = {"verdict": verdict(version)}
    if run is not None:
        found |= {"ms": run.ms, "ms, 20th percentile": run.p20, "ms, 80th percentile": run.p80,
                  "max error": run.max_error, "error allowed": run.bound}  # fmt: skip
    resources = resources_diff.resources(version.kernel)
    return found | {name: resources[name] for name in SHOWN if name in resources}


def verdict(version: Version) -> str:
    """Give the one word about a version that compiled."""
    if version.run is None:
        return "not run"
    return "OK" if version.ok else "FAIL"


def row(name: str, before: Any, now: Any) -> Row:
    """Give one number with its change."""
    change = resources_diff.difference(name, before, now)
    delta = change["delta"]
    percent = round(100 * delta / before, 1) if delta is not None and before else None
    return {"resource": name, "before": before, "now": now, "delta": delta, "percent": percent}


def summary(session: Session) -> str:
    """Give the session in one line."""
    text = f"{session.count} versions, {session.goods} good"
    good, first = session.good, session.first_good
    if good is None or first is None:
        return text
    text += f"; the last good one is version {good.number}"
    if good.run is None or first.run is None or good.run.ms is None or not first.run.ms:
        return text
    change = 100 * (good.run.ms / first.run.ms - 1)
    return f"{text}: {good.run.ms:.4g} ms, {change:+.1f} % of version {first.number}"
