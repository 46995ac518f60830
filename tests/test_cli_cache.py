"""`cuflash cache` on a folder with entries of every kind."""

import json
import os
import time

import pytest
from click.testing import CliRunner

from cuflash.cli import main

DAY = 86400
NAMES = (
    "forward_mma-fp16-d64-m128n64",
    "forward_mma-bf16-d128-m128n64",
    "forward_simt-fp32-d64-m64n32",
)
META = {"compile_ms": 612.5, "registers": 168}


def run(*arguments, **options):
    return CliRunner().invoke(main, ["cache", *arguments], **options)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A cache whose three entries were used 1, 10 and 100 days ago; each takes over 1000 bytes."""
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(tmp_path))
    for name, days in zip(NAMES, (1, 10, 100), strict=True):
        entry = tmp_path / "kernels" / "sm_90" / f"{name}-0123456789ab"
        entry.mkdir(parents=True)
        (entry / "kernel.cubin").write_bytes(b"x" * 1000)
        (entry / "meta.json").write_text(json.dumps(META))
        used = time.time() - days * DAY
        os.utime(entry, (used, used))
    return tmp_path / "kernels"


def listed():
    result = run("list", "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_dir(folder):
    result = run("dir")
    assert result.exit_code == 0 and result.stdout == f"{folder}\n"


def test_list(folder):
    rows = listed()
    assert [row["name"] for row in rows] == list(NAMES)
    assert [row["dtype"] for row in rows] == ["fp16", "bf16", "fp32"]
    assert [round(row["age_seconds"] / DAY) for row in rows] == [1, 10, 100]
    for row in rows:
        assert (row["arch"], row["compile_ms"], row["registers"]) == ("sm_90", 612.5, 168)
        assert row["bytes"] > 1000 and row["state"] == "ok"


def test_list_piped(folder):
    heading, *rows = (line.split("\t") for line in run("list").stdout.splitlines())
    assert heading[:3] == ["name", "arch", "dtype"] and len(rows) == 3


@pytest.mark.parametrize("damage", ["", "{", "[]", "\x00\xff"])
def test_a_damaged_entry_is_listed_as_such(folder, damage):
    next(folder.glob(f"*/{NAMES[1]}-*/meta.json")).write_text(damage)
    rows = {row["name"]: row for row in listed()}
    assert rows[NAMES[1]]["state"] == "unreadable" and rows[NAMES[1]]["registers"] is None
    assert rows[NAMES[1]]["dtype"] == "bf16" and rows[NAMES[0]]["state"] == "ok"
    assert run("list").exit_code == 0


def test_what_is_no_kernel_is_neither_listed_nor_deleted(folder):
    strays = [folder / "stray", folder / "sm_90" / "stray", folder / "notes" / "mine-0123456789ab"]
    for stray in strays:
        stray.mkdir(parents=True)
    assert {row["name"] for row in listed()} == set(NAMES)
    assert "deleted 3 kernels" in run("clear", "--yes").stderr
    assert all(stray.exists() for stray in strays)


def test_an_empty_or_absent_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(tmp_path / "absent"))
    assert listed() == []
    result = run("clear")  # nothing to delete, nothing to ask
    assert result.exit_code == 0 and "deleted 0 kernels" in result.stderr
    assert run("prune", "--max-size", "0").exit_code == 0


def test_clear_asks(folder):
    result = run("clear", input="n\n")
    assert result.exit_code == 1 and "Delete 3 kernels" in result.stderr and len(listed()) == 3
    result = run("clear", input="y\n")
    assert result.exit_code == 0 and "deleted 3 kernels" in result.stderr and listed() == []


def test_clear_without_an_answer_deletes_nothing(folder):
    assert run("clear", input="").exit_code == 1
    assert len(listed()) == 3


def test_clear_yes(folder):
    result = run("clear", "--yes")
    assert result.exit_code == 0 and result.stdout == "" and listed() == []


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        (["--older-than", "30d"], 2),
        (["--older-than", "5d"], 1),
        (["--older-than", "1h"], 0),
        (["--older-than", "52w"], 3),
        (["--max-size", "1G"], 3),
        (["--max-size", "2500"], 2),
        (["--max-size", "0"], 0),
        (["--max-size", "2500", "--older-than", "5d"], 1),
    ],
)
def test_prune_keeps_the_last_used(folder, options, kept):
    result = run("prune", *options)
    assert result.exit_code == 0 and f"deleted {3 - kept} kernels" in result.stderr
    assert [row["name"] for row in listed()] == list(NAMES[:kept])
