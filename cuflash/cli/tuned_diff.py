"""`cuflash tune diff`: two tuned tables side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from cuflash.cli.tables import Column, Row, Table, emit, json_option
from cuflash.cli.units import in_milliseconds
from cuflash.errors import InvalidArgumentError

if TYPE_CHECKING:
    from cuflash.tuning import store

PLACES = ("tuned", "shipped")
COLUMNS = (
    Column("bucket"),
    Column("a_config", "config of A"),
    Column("b_config", "config of B"),
    Column("a_ms", "ms of A", in_milliseconds, right=True),
    Column("b_ms", "ms of B", in_milliseconds, right=True),
    Column("ratio", "A / B", right=True),
    Column("verdict"),
)


@click.command("diff")
@click.argument("a")
@click.argument("b")
@click.option("--gpu", metavar="NAME", help="Which of several tables `tuned` and `shipped` mean.")
@click.option(
    "--threshold",
    type=click.FloatRange(0, 100),
    default=2.0,
    show_default=True,
    metavar="PERCENT",
    help="Less of a difference is none.",
)
@json_option
def diff_command(a: str, b: str, gpu: str | None, threshold: float, as_json: bool) -> None:
    """Compare table A with table B, entry by entry: files of `export`, or `tuned` or `shipped`.

    FASTER and SLOWER are what B is. OTHER: one bucket, but two problems were measured, whose times say
    nothing of each other.
    """
    tables = [found(name, gpu) for name in (a, b)]
    names = [table.gpu["name"] for table in tables]
    if tables[0].gpu != tables[1].gpu:
        click.echo(f"warning: A was tuned on {names[0]}, B on {names[1]}", err=True)
    rows = compared(tables[0], tables[1], threshold / 100)
    emit([Table("entries", f"A: {a}, B: {b}", COLUMNS, rows)], as_json=as_json)


def found(name: str, gpu: str | None) -> store.Table:
    """Give the table that an argument names.

    Raises
    ------
    InvalidArgumentError
        For a file that is no table, and where it is not clear which table is meant.
    """
    from cuflash.cli.tuned import one
    from cuflash.tuning import store

    if name not in PLACES:
        if not Path(name).is_file():
            raise InvalidArgumentError(f"{name} is no file: a file, `tuned` or `shipped` is needed")
        return store.read_file(Path(name))
    return one(store.all_tables() if name == "tuned" else store.shipped_tables(), gpu)


def compared(a: store.Table, b: store.Table, threshold: float) -> list[Row]:
    """Give a row for each bucket of either table."""
    buckets = sorted(a.entries.keys() | b.entries.keys(), key=lambda bucket: bucket.name)
    return [_row(a.entries.get(bucket), b.entries.get(bucket), threshold) for bucket in buckets]


def _row(a: store.Entry | None, b: store.Entry | None, threshold: float) -> Row:
    from cuflash.cli.tuned import in_words

    either = a or b
    assert either is not None
    row: Row = {"bucket": either.bucket.name}
    for side, entry in (("a", a), ("b", b)):
        if entry is not None:
            row |= {f"{side}_config": in_words(entry.config), f"{side}_ms": entry.ms}
    if a is None or b is None:
        return row | {"verdict": "ADDED" if a is None else "GONE"}
    if a.problem != b.problem:
        return row | {"verdict": "OTHER"}
    ratio = a.ms / b.ms
    if abs(ratio - 1) <= threshold:
        verdict = "SAME"
    else:
        verdict = "FASTER" if ratio > 1 else "SLOWER"
    return row | {"ratio": ratio, "verdict": verdict}
