"""`cuflash cache`: the folder of compiled kernels."""

from __future__ import annotations

import time

import click

from cuflash.cli.tables import Column, Row, Table, emit, json_option
from cuflash.cli.units import AGE, SIZE, in_age, in_bytes, in_milliseconds

COLUMNS = (
    Column("name"),
    Column("arch"),
    Column("dtype"),
    Column("bytes", "size", in_bytes, right=True),
    Column("age_seconds", "last used", in_age, right=True),
    Column("compile_ms", "ms", in_milliseconds, right=True),
    Column("registers", right=True),
    Column("state"),
)


@click.group()
def cache() -> None:
    """Look at the compiled kernels on disk, or delete them; a deleted one is compiled again."""


@cache.command("dir")
def dir_command() -> None:
    """Print the folder of compiled kernels."""
    from cuflash.gpu.cache import kernels_dir

    click.echo(kernels_dir())


@cache.command("list")
@json_option
def list_command(as_json: bool) -> None:
    """List the compiled kernels, the last used first."""
    from cuflash.gpu.cache import entries, kernels_dir

    rows = []
    for entry in entries():
        meta = entry.meta or {}
        name = entry.name.rpartition("-")[0]  # what follows is the digest
        row: Row = {
            "name": name,
            "arch": entry.arch,
            "dtype": dtype_of(name),
            "bytes": entry.bytes,
            "age_seconds": max(0.0, time.time() - entry.last_used),
            "compile_ms": meta.get("compile_ms"),
            "registers": meta.get("registers"),
            # Not an error: it is a miss, which the next call replaces.
            "state": "ok" if entry.meta else "unreadable",
        }
        rows.append(row)
    emit([Table("kernels", f"Kernels in {kernels_dir()}", COLUMNS, rows)], as_json=as_json)


def dtype_of(name: str) -> str | None:
    """Read the dtype out of a spec's name, which an unreadable entry still has."""
    return next((part for part in name.split("-") if part in ("fp16", "bf16", "fp32")), None)


@cache.command()
@click.option("--yes", is_flag=True, help="Do not ask.")
def clear(yes: bool) -> None:
    """Delete all compiled kernels."""
    from cuflash.gpu import cache as kernel_cache

    found = kernel_cache.entries()
    if found and not yes:
        size = in_bytes(sum(entry.bytes for entry in found))
        click.confirm(
            f"Delete {len(found)} kernels ({size}) in {kernel_cache.kernels_dir()}?",
            abort=True,
            err=True,
        )
    click.echo(f"deleted {kernel_cache.clear()} kernels", err=True)


@cache.command()
@click.option("--max-size", type=SIZE, metavar="SIZE", help="Keep at most so much: 500M, 2G.")
@click.option(
    "--older-than", type=AGE, metavar="AGE", help="Delete what was not used since: 12h, 30d."
)
def prune(max_size: float | None, older_than: float | None) -> None:
    """Delete the kernels that were not used for longest."""
    from cuflash.gpu import cache as kernel_cache

    if max_size is None and older_than is None:
        raise click.UsageError("--max-size or --older-than says what to delete")
    gone = kernel_cache.prune(max_size, older_than)
    freed = in_bytes(sum(entry.bytes for entry in gone))
    click.echo(f"deleted {len(gone)} kernels ({freed})", err=True)
