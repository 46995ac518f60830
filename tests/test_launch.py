"""Loading kernels without a GPU: a driver that is played decides what becomes of the cache's entries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cuflash.errors import CudaError, OutOfMemoryError
from cuflash.gpu import cache
from cuflash.gpu.cache import Kernel
from cuflash.gpu.spec import KernelSpec

pytest.importorskip("cupy")
driver = pytest.importorskip("cuda.bindings.driver")
from cuflash.gpu import launch  # noqa: E402 - needs both

SPEC = KernelSpec("forward_mma", "sm_90", "bf16", 64, 64, 64, 64, 4)
Code = driver.CUresult


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
