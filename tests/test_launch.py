"""Loading kernels without a GPU: a driver that is played decides what becomes of the cache's entries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cold_process import Compiler
from tiny_kernels import FILES, TinySpec

from cuflash.errors import CacheError, CompileError, CudaError, OutOfMemoryError
from cuflash.gpu import cache, compiler, render, toolchain
from cuflash.gpu.cache import Kernel, invalidate, load_or_compile
from cuflash.gpu.spec import KernelSpec

pytest.importorskip("cupy")
driver = pytest.importorskip("cuda.bindings.driver")
from cuflash.gpu import launch  # noqa: E402 - needs both

SPEC = KernelSpec("forward_mma", "sm_90", "bf16", 64, 64, 64, 64, 4)
Code = driver.CUresult
TINY: Any = TinySpec()


class Played:
    """The driver and the cache: ``answers`` are those of the next loads, then every load succeeds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers: list[Any] = []
        self.kernel = Kernel(SPEC, b"cubin", {}, "disk", "digest", Path("entry"))
        self.loads = self.invalidated = 0
        for name in ("cuModuleGetFunction", "cuFuncSetAttribute", "cuFuncGetAttribute"):
            monkeypatch.setattr(driver, name, lambda *_: (Code.CUDA_SUCCESS, 1024))
        monkeypatch.setattr(driver, "cuModuleLoadData", self.load)
        monkeypatch.setattr(launch, "bind_context", lambda _: None)
        monkeypatch.setattr(cache, "load_or_compile", lambda _: self.kernel)
        monkeypatch.setattr(cache, "invalidate", self.invalidate)

    def load(self, _: bytes) -> tuple[Any, str]:
        self.loads += 1
        return (self.answers.pop(0) if self.answers else Code.CUDA_SUCCESS), f"module {self.loads}"

    def invalidate(self, kernel: Kernel) -> None:
        if kernel.origin == cache.OVERRIDE:
            invalidate(kernel)
        assert kernel is self.kernel
        self.invalidated += 1
        self.kernel = replace(kernel, origin="compile", directory=None)


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Iterator[Played]:
    monkeypatch.delenv("CUFLASH_KERNEL_DIR", raising=False)
    monkeypatch.setattr(launch, "_loaded", {})
    # A driver that is not there cannot say what its codes are called.
    for name in ("cuGetErrorName", "cuGetErrorString"):
        monkeypatch.setattr(driver, name, lambda code: (Code.CUDA_SUCCESS, code.name.encode()))
    yield Played(monkeypatch)


def test_a_kernel_is_loaded_once_and_is_from_memory_from_then_on(played: Played) -> None:
    assert [launch.load(SPEC, 0).origin for _ in range(3)] == ["disk", "memory", "memory"]
    assert played.loads == 1
    launch.load(SPEC, 1)
    assert played.loads == 2


def test_a_damaged_entry_is_replaced_once(played: Played) -> None:
    played.answers = [Code.CUDA_ERROR_INVALID_IMAGE]
    assert launch.load(SPEC, 0).origin == "compile"
    assert played.invalidated == 1
    launch._loaded.clear()
    played.answers = [Code.CUDA_ERROR_INVALID_IMAGE]
    with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_IMAGE"):
        launch.load(SPEC, 0)
    assert played.invalidated == 1


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (Code.CUDA_ERROR_ILLEGAL_ADDRESS, CudaError),
        (Code.CUDA_ERROR_OUT_OF_MEMORY, OutOfMemoryError),
    ],
)
def test_what_is_not_the_entry_s_fault_does_not_cost_it(
    played: Played, code: Any, error: type[Exception]
) -> None:
    played.answers = [code]
    with pytest.raises(error):
        launch.load(SPEC, 0)
    assert played.invalidated == 0
    assert launch.load(SPEC, 0).origin == "disk"


def test_an_edited_kernel_does_not_outlive_its_folder(
    played: Played, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    installed = launch.load(SPEC, 0).module
    monkeypatch.setenv("CUFLASH_KERNEL_DIR", str(tmp_path))
    first = launch.load(SPEC, 0).module
    assert launch.load(SPEC, 0).module == first != installed
    played.kernel = replace(played.kernel, digest="edited")
    assert launch.load(SPEC, 0).module not in (first, installed)
    monkeypatch.delenv("CUFLASH_KERNEL_DIR")
    assert launch.load(SPEC, 0).module == installed


@pytest.fixture
def edited(played: Played, root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The kernels' folder, as it is installed, with CUFLASH_DEV; the real cache, a played compiler."""
    folder = root.parent / "kernels_cu"
    monkeypatch.delenv("CUFLASH_KERNEL_DIR")
    monkeypatch.setattr(render, "_packaged_root", lambda: folder)
    monkeypatch.setattr(cache, "load_or_compile", load_or_compile)
    monkeypatch.setattr(compiler, "compile_source", Compiler())
    monkeypatch.setattr(toolchain, "resolve_arch", lambda arch: arch)
    monkeypatch.setattr(toolchain, "identity", lambda: {})
    monkeypatch.setenv("CUFLASH_DEV", "1")
    return folder


@pytest.mark.parametrize("file", ["tiny.cu", "common/factor.cuh", "prelude.cuh.in"])
def test_with_dev_an_edit_runs_at_the_next_call(played: Played, edited: Path, file: str) -> None:
    first = launch.load(TINY, 0)
    again = launch.load(TINY, 0)
    assert (first.origin, again.origin, again.module) == ("compile", "memory", first.module)
    path = edited / file
    original = path.read_text()
    path.write_text(original + "// edited\n")
    second = launch.load(TINY, 0)
    assert second.origin == "compile" and second.module != first.module
    assert launch.load(TINY, 0).module == second.module
    path.write_text(original)
    assert launch.load(TINY, 0).digest == first.digest


def test_with_dev_an_edit_that_does_not_compile_is_an_error_and_the_next_one_is_not(
    played: Played, edited: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = launch.load(TINY, 0)
    (edited / "tiny.cu").write_text("wrong")
    with monkeypatch.context() as patch:
        failing = Compiler()
        failing.fails = True
        patch.setattr(compiler, "compile_source", failing)
        with pytest.raises(CompileError):
            launch.load(TINY, 0)
    (edited / "tiny.cu").write_text(FILES["tiny.cu"])
    assert launch.load(TINY, 0).module == first.module


def test_without_dev_no_file_is_looked_at(
    played: Played, edited: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUFLASH_DEV")
    first = launch.load(TINY, 0)
    (edited / "tiny.cu").unlink()
    assert launch.load(TINY, 0).module == first.module


def test_machine_code_made_by_hand_stays_one_and_its_edit_runs(
    played: Played, edited: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = launch.load(TINY, 0)
    path = tmp_path / "by hand" / "sm_80" / "tiny-m32.cubin"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"first")
    monkeypatch.setenv("CUFLASH_CUBIN_DIR", str(tmp_path / "by hand"))
    loaded = [launch.load(TINY, 0) for _ in range(2)]
    assert [kernel.origin for kernel in loaded] == ["override", "override"]
    assert loaded[0].module == loaded[1].module != compiled.module
    path.write_bytes(b"second")
    assert launch.load(TINY, 0).module != loaded[0].module
    path.write_bytes(b"third")
    played.answers = [Code.CUDA_ERROR_INVALID_IMAGE]
    with pytest.raises(CacheError, match="tiny-m32.cubin"):
        launch.load(TINY, 0)
    assert path.read_bytes() == b"third"
