"""The one way results are printed: a table for a person, TSV or JSON for a program."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

Row = dict[str, Any]

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")

STYLES = {"ok": "green", "absent": "yellow", "wrong": "bold red", "FAIL": "bold red", "OK": "green"}


def plain(value: Any) -> str:
    """Give a value as a person reads it where its column asks for nothing else."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class Column:
    """One column: its key in a row, and how a terminal shows it. Programs get the bare value."""

    key: str
    title: str = ""
    text: Callable[[Any], str] = plain
    right: bool = False

    @property
    def heading(self) -> str:
        """What a terminal calls the column."""
        return self.title or self.key.replace("_", " ")


@dataclass(frozen=True)
class Table:
    """Rows of one kind; `name` is the table's key in JSON, `title` its heading on a terminal.

    A `tall` table's only row is drawn downwards, one line a column.
    """

    name: str
    title: str
    columns: Sequence[Column]
    rows: Sequence[Row]
    tall: bool = False


def is_terminal() -> bool:
    """Say whether a person reads stdout."""
    return sys.stdout.isatty()


def emit(tables: Sequence[Table], *, as_json: bool = False, form: str | None = None) -> None:
    """Print tables to stdout in the form that its reader wants, or in the one asked for.

    ``form`` is "table", "tsv" or "json"; without it a terminal gets tables, a pipe TSV.
    JSON is a list of rows for one table, an object of such lists by name for several. In
    tab-separated values each table starts with its keys, and an empty line ends it.
    """
    form = form or ("json" if as_json else "table" if is_terminal() else "tsv")
    if form == "json":
        bare = {table.name: [_bare(table, row) for row in table.rows] for table in tables}
        document = bare if len(tables) > 1 else next(iter(bare.values()))
        click.echo(json.dumps(document, indent=2, default=str))
    elif form == "table":
        from rich.console import Console  # a third of a second that only a terminal needs

        show(tables, Console())
    else:
        click.echo("\n\n".join(_tab_separated(table) for table in tables))


def show(tables: Sequence[Table], console: Console) -> None:
    """Draw tables on a terminal."""
    from rich.table import Table as RichTable

    for table in tables:
        drawn = RichTable(title=table.title, title_justify="left", title_style="bold")
        # Text, not str: a value with square brackets must not be read as markup.
        lines = [[_text(column, row) for column in table.columns] for row in table.rows]
        if table.tall:
            drawn.show_header = False
            drawn.add_column()
            drawn.add_column(overflow="fold")
            for column, text in zip(table.columns, lines[0], strict=True):
                drawn.add_row(column.heading, text)
        else:
            for column in table.columns:
                drawn.add_column(
                    column.heading, justify="right" if column.right else "left", overflow="fold"
                )
            for line in lines:
                drawn.add_row(*line)
        console.print(drawn)


def _bare(table: Table, row: Row) -> Row:
    return {column.key: row.get(column.key) for column in table.columns}


def _text(column: Column, row: Row) -> Text:
    from rich.text import Text

    value = row.get(column.key)
    text = "-" if value is None else column.text(value)
    return Text(text, style=STYLES.get(text, ""))


def _tab_separated(table: Table) -> str:
    lines = ["\t".join(column.key for column in table.columns)]
    for row in table.rows:
        lines.append("\t".join(_field(value) for value in _bare(table, row).values()))
    return "\n".join(lines)


def _field(value: Any) -> str:
    """Give a value without tabs and newlines, so that cut(1) sees as many fields as keys."""
    if value is None:
        return ""
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return " ".join(text.split())
