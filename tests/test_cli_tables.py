"""One table, three readers: a person, cut(1) and a JSON parser."""

import io
import json

from rich.console import Console

from cuflash.cli import tables
from cuflash.cli.tables import Column, Table
from cuflash.cli.units import in_bytes, in_milliseconds

TABLE = Table(
    "kernels",
    "Kernels",
    (
        Column("spec"),
        Column("shared_bytes", "shared", in_bytes, right=True),
        Column("ms", text=in_milliseconds, right=True),
        Column("note"),
    ),
    [
        {"spec": "a", "shared_bytes": 232448, "ms": 41.26, "note": "[bold]x[/bold]\ttabbed\nlines"},
        {"spec": "b", "shared_bytes": None, "ms": 812.4, "note": True},
    ],
)


def drawn(*shown: Table) -> str:
    out = io.StringIO()
    tables.show(shown, Console(file=out, width=120, force_terminal=False))
    return out.getvalue()


def test_piped_is_tab_separated_with_bare_values(capsys):
    tables.emit([TABLE], as_json=False)
    assert [line.split("\t") for line in capsys.readouterr().out.splitlines()] == [
        ["spec", "shared_bytes", "ms", "note"],
        ["a", "232448", "41.26", "[bold]x[/bold] tabbed lines"],
        ["b", "", "812.4", "True"],
    ]


def test_json_of_one_table_is_its_rows(capsys):
    tables.emit([TABLE], as_json=True)
    assert json.loads(capsys.readouterr().out) == TABLE.rows


def test_json_of_several_tables_names_them(capsys):
    other = Table("run", "Run", (Column("x"),), [{"x": 1, "not a column": 2}])
    tables.emit([TABLE, other], as_json=True)
    assert json.loads(capsys.readouterr().out) == {"kernels": TABLE.rows, "run": [{"x": 1}]}


def test_several_tables_piped_are_parted_by_an_empty_line(capsys):
    tables.emit([Table("a", "A", (Column("x"),), [{"x": 1}])] * 2, as_json=False)
    assert capsys.readouterr().out == "x\n1\n\nx\n1\n"


def test_empty_table_keeps_its_heading_and_its_json_form(capsys):
    empty = Table("kernels", "Kernels", TABLE.columns, [])
    tables.emit([empty], as_json=False)
    assert capsys.readouterr().out == "spec\tshared_bytes\tms\tnote\n"
    tables.emit([empty], as_json=True)
    assert json.loads(capsys.readouterr().out) == []


def test_a_person_reads_units_and_brackets_as_they_are():
    text = drawn(TABLE)
    assert "227 KiB" in text and "41.3" in text and "812" in text
    assert "[bold]x[/bold]" in text and "yes" in text
    assert "shared_bytes" not in text


def test_a_terminal_gets_the_drawn_table(capsys, monkeypatch):
    monkeypatch.setattr(tables, "is_terminal", lambda: True)
    tables.emit([TABLE], as_json=False)
    out = capsys.readouterr().out
    assert "Kernels" in out and "\t" not in out
