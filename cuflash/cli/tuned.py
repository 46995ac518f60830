"""Commands on tuned tables, which `cuflash tune` takes as its own: list, show, export, import, diff, reset."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cuflash.cli.device_option import device_options
from cuflash.cli.problem_options import command_line, problem_options, problems
from cuflash.cli.tables import Column, Row, Table, emit, json_option
from cuflash.cli.tuned_diff import diff_command
from cuflash.cli.units import in_milliseconds
from cuflash.errors import InvalidArgumentError

if TYPE_CHECKING:
    from cuflash.gpu.device import Device
    from cuflash.problem import AttentionProblem
    from cuflash.tuning import store

LIST_COLUMNS = (
    Column("gpu"),
    Column("bucket"),
    Column("config"),
    Column("ms", "ms", in_milliseconds, right=True),
    Column("ratio", "ratio to default", right=True),
    Column("verdict"),
    Column("state"),
    Column("table", "from"),
)
# Too wide for a person, and of use to a program.
LIST_DETAILS = (Column("problem"), Column("time"), Column("path"))
SHOW_COLUMNS = (
    Column("problem"),
    Column("gpu"),
    Column("bucket"),
    Column("step", "found in"),
    Column("entry", "entry of bucket"),
    Column("distance", "doublings away"),
    Column("measured", "measured for"),
    Column("config"),
    Column("ms", "ms", in_milliseconds),
    Column("ratio", "ratio to default"),
    Column("advice"),
)
STEP_COLUMNS = (Column("problem"), Column("source", "asked"), Column("outcome", "answer"))
IMPORT_COLUMNS = (Column("bucket"), Column("config"), Column("time"), Column("action"))

gpu_option = click.option("--gpu", metavar="NAME", help="Of the GPU whose name has this in it.")
new_file = click.Path(dir_okay=False, path_type=Path)
old_file = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command("list")
@json_option
def list_command(as_json: bool) -> None:
    """List the tuned entries of all GPUs: those tuned here, then those that ship."""
    from cuflash.tuning import store

    rows = [row(t, e) for t in store.all_tables() + store.shipped_tables() for e in in_order(t)]
    columns = LIST_COLUMNS + LIST_DETAILS if as_json else LIST_COLUMNS
    emit([Table("entries", "Tuned entries", columns, rows)], as_json=as_json)


def in_order(table: store.Table) -> list[store.Entry]:
    """Give the entries of a table by bucket."""
    return sorted(table.entries.values(), key=lambda entry: entry.bucket.name)


def row(table: store.Table, entry: store.Entry) -> Row:
    """Give an entry as a row."""
    return {
        "gpu": table.gpu["name"],
        "bucket": entry.bucket.name,
        "config": in_words(entry.config),
        "ms": entry.ms,
        "ratio": entry.default_ms / entry.ms,
        "verdict": entry.verdict,
        "state": "ok" if entry.current else "other kernel text",
        "table": table.label,
        "problem": entry.problem,
        "time": entry.time or None,
        "path": str(table.path),
    }


def in_words(config: dict[str, Any]) -> str:
    """Give a config in one line, as --config takes it."""
    return " ".join(
        f"{name}={value if isinstance(value, str) else int(value)}"
        for name, value in config.items()
    )


@click.command("show")
@problem_options
@device_options
@json_option
def show_command(problem_options: dict[str, Any], device: Device, as_json: bool) -> None:
    """Show which entry a problem gets, from which table, and how far away it was measured."""
    asked = [shown(problem, device) for problem in problems(problem_options)]
    rows = [row for row, _ in asked]
    steps = [step for _, steps in asked for step in steps]
    tall = len(rows) == 1
    emit(
        [
            Table("choices", "Tuned entry", SHOW_COLUMNS, rows, tall=tall),
            Table("steps", "Where it was looked for", STEP_COLUMNS, steps),
        ],
        as_json=as_json,
    )


def shown(problem: AttentionProblem, device: Device) -> tuple[Row, list[Row]]:
    """Give what a problem gets as a row, and the way to it."""
    from cuflash.gpu.choose import choose
    from cuflash.tuning import store
    from cuflash.tuning.bucket import bucket_of

    choice = choose(problem, device)
    found = choice.steps[-1].source
    bucket = bucket_of(problem)
    tables = [table for table in store.tables(device) if table.label == found]
    entry = tables[0].lookup(problem) if tables else None
    result: Row = {
        "problem": problem.in_words,
        "gpu": device.name,
        "bucket": bucket.name,
        "step": found,
        "config": f"kernel={choice.spec.kernel} {choice.spec.tile}",
    }
    if entry is not None:
        result |= {
            "entry": entry.bucket.name,
            "distance": entry.bucket.distance(bucket),
            "measured": entry.problem,
            "ms": entry.ms,
            "ratio": entry.default_ms / entry.ms,
        }
    if entry is None or entry.bucket != bucket:
        result["advice"] = f"cuflash tune {command_line(problem)}"
    steps: list[Row] = [
        {"problem": problem.in_words, "source": step.source, "outcome": step.outcome}
        for step in choice.steps
    ]
    return result, steps


@click.command("export")
@click.argument("file", type=new_file)
@gpu_option
@click.option("--shipped", is_flag=True, help="A table that ships, not one that was tuned here.")
@click.option("--force", is_flag=True, help="Overwrite FILE.")
def export_command(file: Path, gpu: str | None, shipped: bool, force: bool) -> None:
    """Write one GPU's table to FILE, for another machine with such a GPU."""
    from cuflash.tuning import store

    table = one(store.shipped_tables() if shipped else store.all_tables(), gpu)
    if file.exists() and not force:
        raise InvalidArgumentError(f"{file} exists: name another file, or give --force")
    store.export(table, file)
    click.echo(f"wrote {len(table.entries)} entries of {table.gpu['name']} to {file}", err=True)


def one(tables: list[store.Table], gpu: str | None) -> store.Table:
    """Give the only table, or the only one of the GPUs with ``gpu`` in their names.

    Raises
    ------
    InvalidArgumentError
        If there is none, or more than one; names them.
    """
    fitting = of_gpu(tables, gpu)
    if len(fitting) == 1:
        return fitting[0]
    of_which = "" if gpu is None else f" of a GPU with {gpu!r} in its name"
    if not fitting:
        there = f" (there are {_names(tables)})" if tables else ""
        raise InvalidArgumentError(f"there is no table{of_which}{there}: run `cuflash tune` first")
    raise InvalidArgumentError(
        f"there are {len(fitting)} tables{of_which}, {_names(fitting)}: choose one with --gpu"
    )


def of_gpu(tables: list[store.Table], gpu: str | None) -> list[store.Table]:
    """Give the tables of a GPU: of the one with just this name, else of all with it in their names."""
    if gpu is None:
        return tables
    exact = [
        table for table in tables if gpu.lower() in (table.gpu["name"].lower(), table.path.stem)
    ]
    return exact or [table for table in tables if gpu.lower() in table.gpu["name"].lower()]


def _names(tables: list[store.Table]) -> str:
    return ", ".join(f"{table.gpu['name']} ({table.path.stem})" for table in tables)


@click.command("import")
@click.argument("file", type=old_file)
@click.option("--dry-run", is_flag=True, help="Say what would change, and change nothing.")
@json_option
def import_command(file: Path, dry_run: bool, as_json: bool) -> None:
    """Merge FILE into the table of the GPU that it names; of two entries of a bucket the newest stays."""
    from cuflash.tuning import store

    table = store.read_file(file)
    changes = store.merge(table.gpu, in_order(table), dry_run=dry_run)
    rows: list[Row] = [
        {
            "bucket": change.entry.bucket.name,
            "config": in_words(change.entry.config),
            "time": change.entry.time or None,
            "action": change.action,
        }
        for change in changes
    ]
    title = f"{'Would be imported' if dry_run else 'Imported'} for {table.gpu['name']}"
    emit([Table("changes", title, IMPORT_COLUMNS, rows)], as_json=as_json)
    actions = [change.action for change in changes]
    said = ", ".join(f"{actions.count(a)} {a}" for a in ("added", "replaced", "kept", "same"))
    click.echo(f"{table.gpu['name']}: {said}{' (dry run)' if dry_run else ''}", err=True)


@click.command("reset")
@gpu_option
@click.option("--yes", is_flag=True, help="Do not ask.")
def reset_command(gpu: str | None, yes: bool) -> None:
    """Delete what was tuned here, of one GPU or of all; what ships stays."""
    from cuflash.tuning import store

    tables = store.all_tables()
    # Without --gpu also the files that cannot be read.
    paths = store.files() if gpu is None else [table.path for table in of_gpu(tables, gpu)]
    if gpu is not None and not paths:
        one(tables, gpu)
    if paths and not yes:
        names = ", ".join(path.stem for path in paths)
        click.confirm(
            f"Delete {len(paths)} tables ({names}) in {store.user_dir()}?", abort=True, err=True
        )
    entries = sum(store.reset(path) for path in paths)
    click.echo(f"deleted {entries} entries of {len(paths)} tables", err=True)


COMMANDS: list[click.Command] = [
    list_command,
    show_command,
    export_command,
    import_command,
    diff_command,
    reset_command,
]
