from __future__ import annotations

import threading
from pathlib import Path

import pytest
from needs import needs_nvrtc
from tiny_kernels import FILES, TinySpec, write_kernels

from cuflash.errors import CompileError
from cuflash.gpu import compiler, toolchain
from cuflash.gpu.compiler import compile_source, parse_resources
from cuflash.gpu.render import Source, kernel_root, render

# What ptxas says of a kernel with a function that was not inlined.
TWO_FUNCTIONS = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'k' for 'sm_90a'
ptxas info    : Function properties for k
    8 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 96 registers, used 1 barriers, 16 bytes cumulative stack size, 1056 bytes smem
ptxas info    : Function properties for helper
    16 bytes stack frame, 4 bytes spill stores, 0 bytes spill loads
ptxas info    : Compile time = 91.040 ms
"""
SERIALIZED = (
    "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are"
    " serialized due to insufficient register resources for the wgmma pipeline in function 'k'"
)


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = write_kernels(tmp_path / "kernels")
    monkeypatch.setenv("CUFLASH_KERNEL_DIR", str(folder))
    return folder


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def test_resources_of_a_plain_kernel() -> None:
    found = parse_resources(
        "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
        "ptxas info    : Used 128 registers, used 1 barriers, 96 bytes smem, 400 bytes cmem[0]\n"
    )
    assert (found.registers, found.static_shared_bytes) == (128, 96)
    assert (found.spill_bytes, found.stack_bytes, found.warnings) == (0, 0, ())
    assert not found.serialized


def test_resources_of_functions_that_were_not_inlined_count() -> None:
    found = parse_resources(TWO_FUNCTIONS)
    assert (found.spill_stores, found.spill_loads, found.spill_bytes) == (16, 16, 32)
    assert (found.registers, found.stack_bytes, found.static_shared_bytes) == (96, 16, 1056)
    assert found.warnings == ()


def test_serialised_wgmma_is_a_warning() -> None:
    found = parse_resources(f"{TWO_FUNCTIONS}{SERIALIZED}\n")
    assert found.warnings == (SERIALIZED,)
    assert found.serialized


def test_a_compiler_warning_is_kept_and_is_no_serialisation() -> None:
    line = "kernels_cu/tiny.cu(3): warning #550-D: variable was set but never used"
    found = parse_resources(f"{line}\n  int x = 1;\n      ^\n")
    assert found.warnings == (line,)
    assert not found.serialized


def test_an_empty_log_is_zeros() -> None:
    assert parse_resources("") == compiler.Resources(0, 0, 0, 0, 0, ())


@pytest.mark.parametrize(
    ("log", "first"),
    [
        ("a.cu(1): warning: w\n\n  b.cu(2): error: e\nc.cu(3): error: f", "b.cu(2): error: e"),
        ("kernels_cu/a.cu(9): catastrophic error: cannot open", None),
        ("ptxas fatal   : Ptx assembly aborted", None),
        ("something odd\nsomething else", "something odd"),
        ("", ""),
    ],
)
def test_first_error(log: str, first: str | None) -> None:
    assert compiler.first_error(log) == (log if first is None else first)


def test_options_name_the_exact_architecture_and_no_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUFLASH_NVRTC_FLAGS", "-DX=1")
    options = compiler.options("sm_90a")
    assert options[0] == "-arch=sm_90a"
    assert options[-1] == "-DX=1"
    assert "--ptxas-options=-v" in options
    # Masked rows are -inf: options that let the compiler assume there is none break them.
    assert not any("fast" in option or option.startswith(("-I", "-ftz")) for option in options)


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
def test_machine_code_for_the_exact_architecture(kernels: Path, arch: str) -> None:
    compiled = compile_source(render(TinySpec(block_m=64)), arch)
    assert compiled.cubin.startswith(b"\x7fELF")
    assert f"'tiny' for '{arch}'" in compiled.log
    assert compiled.resources.registers > 0
    assert compiled.resources.static_shared_bytes >= 64 * 4
    assert compiled.resources.spill_bytes == 0
    assert compiled.resources.warnings == ()
    assert compiled.milliseconds > 0
    assert compiled.ptx is None


@needs_nvrtc
def test_ptx(kernels: Path) -> None:
    text = compile_source(render(TinySpec()), "sm_90a", ptx=True).ptx
    assert text is not None
    assert b".target sm_90a" in text
    assert b".entry tiny(" in text
    assert b"\0" not in text


@needs_nvrtc
@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        (
            "tiny.cu",
            "__syncthreads();",
            "__syncthreads()",
            "kernels_cu/tiny.cu(10): error: expected",
        ),
        (
            "common/scale.cuh",
            "FACTOR * x",
            "NO_SUCH * x",
            "kernels_cu/common/scale.cuh(3): error: id",
        ),
        (
            "prelude.cuh.in",
            "UNUSED = 1",
            "UNUSED = 1 +",
            "kernels_cu/prelude.cuh.in(6): error: exp",
        ),
        (
            "tiny.cu",
            "    __syncthreads();",
            '    static_assert(BLOCK_M % 64 == 0, "whole warps");\n',
            'kernels_cu/tiny.cu(9): error: static assertion failed with "whole warps"',
        ),
        (
            "tiny.cu",
            "#endif",
            "#endif\n#include <no_such.h>",
            "kernels_cu/tiny.cu(4): catastrophic",
        ),
    ],
)
def test_an_error_shows_its_file_and_line(
    kernels: Path, file: str, old: str, new: str, message: str
) -> None:
    edit(kernels / file, old, new)
    with pytest.raises(CompileError) as caught:
        compile_source(render(TinySpec()), "sm_80")
    assert f"tiny.cu does not compile for sm_80: {message}" in str(caught.value)
    assert message in caught.value.log
    assert caught.value.source_path == str(kernels / "tiny.cu")


@needs_nvrtc
def test_an_instruction_of_another_architecture(kernels: Path) -> None:
    edit(kernels / "tiny.cu", "__syncthreads();", 'asm volatile("wgmma.fence.sync.aligned;");')
    assert compile_source(render(TinySpec()), "sm_90a").cubin
    with pytest.raises(CompileError, match=r"wgmma\.fence.* not supported on \.target 'sm_90'"):
        compile_source(render(TinySpec()), "sm_90")


@needs_nvrtc
def test_more_options(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit(kernels / "tiny.cu", "__syncthreads();", "__syncthreads(); OURS")
    monkeypatch.setenv("CUFLASH_NVRTC_FLAGS", "-DOURS=rows[0]++;")
    assert compile_source(render(TinySpec()), "sm_80").cubin
    monkeypatch.setenv("CUFLASH_NVRTC_FLAGS", "--no-such-option")
    with pytest.raises(CompileError, match="unrecognized option --no-such-option"):
        compile_source(render(TinySpec()), "sm_80")


@needs_nvrtc
def test_spills_are_reported(kernels: Path) -> None:
    # 64 values that live through a loop, in the 32 registers that 2 x 1,024 threads leave each.
    (kernels / "tiny.cu").write_text(
        'extern "C" __global__ void __launch_bounds__(1024, 2) tiny(float* x, int n) {\n'
        "    float v[64];\n"
        "#pragma unroll\n"
        "    for (int i = 0; i < 64; ++i) v[i] = x[i * 1024 + threadIdx.x];\n"
        "    for (int j = 0; j < n; ++j)\n"
        "#pragma unroll\n"
        "        for (int i = 0; i < 64; ++i) v[i] = v[i] * v[(i + 7) % 64] + x[j];\n"
        "#pragma unroll\n"
        "    for (int i = 0; i < 64; ++i) x[i * 1024 + threadIdx.x] = v[i];\n"
        "}\n"
    )
    found = compile_source(render(TinySpec()), "sm_80").resources
    assert found.registers <= 32
    assert found.spill_stores > 0 and found.spill_loads > 0
    assert found.spill_bytes == found.spill_stores + found.spill_loads
    assert found.stack_bytes > 0


@needs_nvrtc
def test_cuda_headers_in_a_folder_with_an_awkward_name(
    kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a b" / "é"
    folder.parent.mkdir()
    folder.symlink_to(toolchain.header_directory())
    monkeypatch.setattr(toolchain, "header_directory", lambda: folder)
    assert compile_source(render(TinySpec()), "sm_80").cubin


@needs_nvrtc
def test_text_that_is_not_ascii(kernels: Path) -> None:
    edit(kernels / "common/factor.cuh", "#pragma once", "#pragma once  // Müller, 行")
    assert compile_source(render(TinySpec()), "sm_80").cubin


@needs_nvrtc
def test_no_machine_code_is_an_error(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "options", lambda arch: ["-arch=compute_80"])
    with pytest.raises(CompileError, match=r"no machine code for tiny\.cu.*-arch=compute_80"):
        compile_source(render(TinySpec()), "sm_80")


@needs_nvrtc
@pytest.mark.parametrize("name", ["forward_mma", "forward_simt"])
def test_a_shipped_kernel_compiles_without_a_spec(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUFLASH_KERNEL_DIR", raising=False)
    monkeypatch.setenv("CUFLASH_NVRTC_FLAGS", f"'-I{kernel_root()}'")
    text = (kernel_root() / f"{name}.cu").read_text(encoding="utf-8")
    assert compile_source(Source(f"{name}.cu", text, {}), "sm_90").cubin


def test_the_tiny_kernel_has_the_lines_these_tests_count_on() -> None:
    assert FILES["tiny.cu"].splitlines()[9].startswith("    out[")


@needs_nvrtc
def test_a_compile_can_be_given_a_time_limit_or_be_stopped(kernels: Path) -> None:
    # A text of its own: what NVRTC has in its cache, it does not stop for.
    edit(kernels / "tiny.cu", "void tiny(", "/* stopped */ void tiny(")
    source = render(TinySpec())
    stop = threading.Event()
    with compiler.time_limit(0.0), pytest.raises(CompileError, match="stopped after"):
        compile_source(source, "sm_80")
    with compiler.time_limit(1000.0, stop):
        stop.set()
        with pytest.raises(CompileError, match="stopped after"):
            compile_source(source, "sm_80")
        stop.clear()
        assert compile_source(source, "sm_80").cubin
    assert compile_source(source, "sm_80").cubin
