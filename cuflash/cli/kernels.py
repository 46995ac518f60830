"""Specs to compiled kernels and their table, which `cuflash compile` and `cuflash demo` show."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TYPE_CHECKING

import click

from cuflash.cli.tables import Column, Row, Table
from cuflash.cli.units import in_bytes, in_milliseconds
from cuflash.errors import CuflashError

if TYPE_CHECKING:
    from cuflash.gpu.cache import Kernel
    from cuflash.gpu.spec import KernelSpec

COLUMNS = (
    Column("arch"),
    Column("spec"),
    Column("compile_ms", "ms", in_milliseconds, right=True),
    Column("registers", right=True),
    Column("spill_bytes", "spills", in_bytes, right=True),
    Column("shared_bytes", "shared memory", in_bytes, right=True),
    Column("origin", "from"),
)


def compile_specs(
    specs: Sequence[KernelSpec],
    jobs: int | None = None,
) -> tuple[list[Kernel], dict[KernelSpec, CuflashError]]:
    """Compile specs side by side, through the cache as a call would; give kernels and failures.

    NVRTC holds no lock while it optimises, so threads are enough. A failure does not stop the rest.
    """
    from cuflash.gpu.cache import load_or_compile

    kernels: dict[KernelSpec, Kernel] = {}
    failures: dict[KernelSpec, CuflashError] = {}
    workers = max(1, min(len(specs), jobs or os.cpu_count() or 1))
    progress = click.progressbar(
        length=len(specs), label="compiling", file=sys.stderr, hidden=not sys.stderr.isatty()
    )
    with ThreadPoolExecutor(workers) as pool, progress as bar:
        running = {pool.submit(load_or_compile, spec): spec for spec in specs}
        for future in as_completed(running):
            spec = running[future]
            try:
                kernels[spec] = future.result()
            except CuflashError as error:
                failures[spec] = error
            bar.update(1)
    return [kernels[spec] for spec in specs if spec in kernels], failures


def table(kernels: Sequence[Kernel], title: str) -> Table:
    """Give the table of compiled kernels."""
    return Table("kernels", title, COLUMNS, [row(kernel) for kernel in kernels])


def row(kernel: Kernel) -> Row:
    """Give one kernel as a row: shared memory is what a block takes, fixed and dynamic."""
    meta = kernel.meta
    return {
        "arch": meta["arch"],
        "spec": kernel.spec.name,
        "compile_ms": meta["compile_ms"],
        "registers": meta["registers"],
        "spill_bytes": meta["spill_bytes"],
        "shared_bytes": meta["shared_bytes"] + meta["static_shared_bytes"],
        "origin": kernel.origin,
    }
