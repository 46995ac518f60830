"""Every spec that ships, compiled for every GPU family: no spill, and no wgmma made to wait.

What is compiled is printed as a table (`pytest -rA` shows it); with CUFLASH_TEST_TABLE=FILE its
rows are appended to FILE, tab-separated.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
from needs import needs_nvrtc

from cuflash.errors import CuflashError
from cuflash.gpu import compiler, toolchain
from cuflash.gpu.compiler import Compiled
from cuflash.gpu.render import render
from cuflash.gpu.shipped import shipped_specs
from cuflash.gpu.spec import KernelSpec

# A few seconds are usual; a loop unrolled without bound takes minutes.
LIMIT_MS = 60_000

ARCHS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")


def compile_one(spec: KernelSpec) -> Compiled | CuflashError:
    try:
        return compiler.compile_source(render(spec), toolchain.resolve_arch(spec.arch))
    except CuflashError as error:
        return error


def row(spec: KernelSpec, compiled: Compiled) -> str:
    found = compiled.resources
    shared = spec.shared_bytes() + found.static_shared_bytes
    numbers = (f"{compiled.milliseconds:.0f}", found.registers, found.spill_bytes, shared)
    return "\t".join((spec.arch, spec.name, *map(str, numbers)))


def what_is_wrong(spec: KernelSpec, compiled: Compiled | CuflashError) -> str | None:
    if isinstance(compiled, CuflashError):
        return f"{spec.name}: {compiled}"
    found = compiled.resources
    if found.spill_bytes:
        return f"{spec.name}: spills {found.spill_bytes} bytes at {found.registers} registers"
    if found.registers * spec.threads > 65536:
        return f"{spec.name}: {spec.threads} threads of {found.registers} registers are too many"
    if compiled.milliseconds > LIMIT_MS:
        return f"{spec.name}: took {compiled.milliseconds / 1e3:.0f} s to compile"
    if found.warnings:
        return f"{spec.name}: {found.warnings[0]}"
    return None


@needs_nvrtc
@pytest.mark.parametrize("arch", ARCHS)
def test_shipped_specs_compile_without_spills(arch: str) -> None:
    specs = shipped_specs(arch)
    assert specs
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = list(zip(specs, pool.map(compile_one, specs), strict=True))
    rows = [row(spec, done) for spec, done in results if isinstance(done, Compiled)]
    print("arch\tspec\tcompile_ms\tregisters\tspill_bytes\tshared_bytes", *rows, sep="\n")
    table = os.environ.get("CUFLASH_TEST_TABLE")
    if table:
        with open(table, "a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in rows)
    wrong = [text for spec, done in results if (text := what_is_wrong(spec, done))]
    assert not wrong, "\n".join(wrong)
