"""CUFLASH_DEBUG: kernels that check themselves, and that cost nothing where it is not set."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cold_process import SPEC, Compiler
from needs import needs_nvrtc

from cuflash.errors import CompileError
from cuflash.gpu import compiler
from cuflash.gpu.cache import load_or_compile
from cuflash.gpu.render import Source, kernel_root, render
from cuflash.gpu.shipped import shipped_specs
from cuflash.gpu.spec import KernelSpec

HEADERS = {
    "common/debug.cuh": (kernel_root() / "common" / "debug.cuh").read_text(),
    "params.cuh": "struct Strides { long long batch, row, head, dim; };\n",
}


def asserting(condition: str) -> Source:
    text = (
        '#include "common/debug.cuh"\n'
        'extern "C" __global__ void tiny(int* out) {\n'
        "    int calls = 0;\n"
        f"    CUFLASH_ASSERT({condition});\n"
        "    out[threadIdx.x] = calls;\n"
        "}\n"
    )
    return Source("tiny.cu", text, HEADERS)


def ptx(source: Source) -> str:
    return (compiler.compile_source(source, "sm_80", ptx=True).ptx or b"").decode()


def test_a_debug_build_has_a_key_of_its_own(
    root: Path, nvrtc_calls: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = load_or_compile(SPEC)
    monkeypatch.setenv("CUFLASH_DEBUG", "1")
    debug = load_or_compile(SPEC)
    assert debug.origin == "compile" and debug.digest != plain.digest
    assert {"-DCUFLASH_DEBUG=1", "-lineinfo"} <= set(debug.meta["options"])
    assert not {"-DCUFLASH_DEBUG=1", "-lineinfo"} & set(plain.meta["options"])
    monkeypatch.setenv("CUFLASH_DEBUG", "0")
    assert load_or_compile(SPEC).origin == "memory"


@needs_nvrtc
def test_without_debug_a_condition_is_not_even_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ptx(asserting("no_such_name")) == ptx(asserting("++calls < 0"))
    monkeypatch.setenv("CUFLASH_DEBUG", "1")
    with pytest.raises(CompileError, match="no_such_name"):
        ptx(asserting("no_such_name"))


@needs_nvrtc
def test_with_debug_a_condition_is_told_with_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUFLASH_DEBUG", "1")
    text = ptx(asserting("out[1] == 3, out[0] == 4"))  # a comma does not end it
    assert "trap;" in text and "vprintf" in text
    strings = bytes(int(n) for line in text.splitlines() if ".b8 $str" in line
                    for n in line.partition("{")[2].rpartition("}")[0].split(","))  # fmt: skip
    # The file as tiny.cu names it: `render` puts a #line before the real ones.
    assert b"tiny.cu" in strings and b"out[1] == 3, out[0] == 4" in strings


def kinds(arch: str) -> list[KernelSpec]:
    """One spec of each kernel, dtype and set of modifiers: their asserts differ."""
    by_kind = {
        (s.kernel, s.dtype, s.masked, s.bias, s.num_stages, s.precision): s
        for s in shipped_specs(arch)
    }
    return list(by_kind.values())[:: 1 if arch == "sm_75" else 4]


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90", "sm_120"])
def test_kernels_compile_with_their_asserts(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    specs = kinds(arch)[:3]
    plain = [compiler.compile_source(render(spec), arch).cubin for spec in specs]
    monkeypatch.setenv("CUFLASH_DEBUG", "1")
    for spec, release in zip(specs, plain, strict=True):
        debug = compiler.compile_source(render(spec), arch).cubin
        for word in (b"assertion failed", b"in_problem(p, tile)", b"kernels_cu/common/layout.cuh"):
            assert word in debug and word not in release, (spec.name, word)


# Its own process, because a trap ends the CUDA context.
FAILING = """
import cupy, sys
sys.path.insert(0, "tests")
from test_debug_build import asserting
from cuflash.gpu import compiler
arch = "sm_" + cupy.cuda.Device().compute_capability
cubin = compiler.compile_source(asserting("out[threadIdx.x] != 5"), arch).cubin
module = cupy.cuda.function.Module()
module.load(cubin)
out = cupy.arange(8, dtype=cupy.int32)
module.get_function("tiny")((1,), (8,), (out,))
try:
    cupy.cuda.runtime.deviceSynchronize()
except cupy.cuda.runtime.CUDARuntimeError as error:
    print("trapped", flush=True)
"""


@pytest.mark.gpu
def test_an_assert_that_fails_names_its_line_block_and_thread() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FAILING],
        env={**os.environ, "CUFLASH_DEBUG": "1"},
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
    )
    assert "trapped" in done.stdout, done.stderr
    assert (
        "kernels_cu/tiny.cu:4: block 0, thread 5: assertion failed: out[threadIdx.x] != 5"
        in done.stdout
    )
