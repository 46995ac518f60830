from __future__ import annotations

import builtins
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from needs import needs_nvrtc

from cuflash.errors import MissingDependencyError, UnsupportedArchError
from cuflash.gpu import toolchain

CACHED = ("nvrtc", "nvrtc_version", "supported_archs", "header_directory", "identity")
NVRTC_13 = (75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120)
NVRTC_12 = (50, 52, 53, 60, 61, 62, 70, 72, 75, 80, 86, 87, 89, 90, 100, 101, 103, 120, 121)


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    for name in CACHED:
        getattr(toolchain, name).cache_clear()
    toolchain._nvidia_folders.cache_clear()
    yield
    for name in CACHED:
        getattr(toolchain, name).cache_clear()
    toolchain._nvidia_folders.cache_clear()


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Set NVRTC's version and the architectures it knows."""

    def to_be(version: tuple[int, int], archs: tuple[int, ...] = NVRTC_13) -> None:
        fake = SimpleNamespace(
            nvrtcVersion=lambda: (0, *version),
            nvrtcGetNumSupportedArchs=lambda: (0, len(archs)),
            nvrtcGetSupportedArchs=lambda: (0, [*archs, 0, 0]),
        )
        monkeypatch.setattr(toolchain, "nvrtc", lambda: fake)
        monkeypatch.setattr(toolchain, "_bindings_major", lambda: version[0])

    return to_be


@pytest.mark.parametrize(
    ("gpu", "version", "archs", "compiled_for"),
    [
        ("sm_75", (13, 5), NVRTC_13, "sm_75"),
        ("sm_90", (13, 5), NVRTC_13, "sm_90"),
        ("sm_90a", (13, 5), NVRTC_13, "sm_90a"),
        ("sm_103", (13, 5), NVRTC_13, "sm_103"),
        ("sm_120", (13, 5), NVRTC_13, "sm_120"),
        ("sm_120f", (13, 5), NVRTC_13, "sm_120f"),
        # Unknown to NVRTC, but of a family that it knows an older member of.
        ("sm_121", (13, 5), NVRTC_13, "sm_120"),
        ("sm_87", (12, 0), (75, 80, 86, 90), "sm_86"),
        ("sm_103", (12, 8), (90, 100), "sm_100"),
        ("sm_61", (12, 9), NVRTC_12, "sm_61"),
        ("sm_70", (12, 9), NVRTC_12, "sm_70"),
    ],
)
def test_arch_compiled_for(
    pretend: Any, gpu: str, version: tuple[int, int], archs: tuple[int, ...], compiled_for: str
) -> None:
    pretend(version, archs)
    assert toolchain.resolve_arch(gpu) == compiled_for


@pytest.mark.parametrize(
    ("gpu", "version", "archs", "advice"),
    [
        ("sm_61", (13, 5), NVRTC_13, "older than what NVRTC 13.5 .* sm_75 .*cuflash\\[cuda12\\]"),
        ("sm_70", (13, 5), NVRTC_13, "older than what NVRTC 13.5 .* sm_75 .*cuflash\\[cuda12\\]"),
        ("sm_37", (12, 9), NVRTC_12, "older than what NVRTC 12.9 .* no GPU kernel"),
        ("sm_130", (13, 5), NVRTC_13, "unknown to NVRTC 13.5, .*--upgrade nvidia-cuda-nvrtc$"),
        ("sm_100", (12, 0), (80, 90), "unknown to NVRTC 12.0, .*nvidia-cuda-nvrtc-cu12$"),
        # Code for one architecture alone runs on no other, and no newer minor serves an older one.
        ("sm_121a", (13, 5), NVRTC_13, "sm_121a is unknown"),
        ("sm_100", (13, 5), (90, 103), "sm_100 is unknown"),
        ("gfx942", (13, 5), NVRTC_13, "arch is 'gfx942'"),
        ("sm_9x", (13, 5), NVRTC_13, "arch is 'sm_9x'"),
    ],
)
def test_arch_that_cannot_be_compiled_for(
    pretend: Any, gpu: str, version: tuple[int, int], archs: tuple[int, ...], advice: str
) -> None:
    pretend(version, archs)
    with pytest.raises(UnsupportedArchError, match=advice):
        toolchain.resolve_arch(gpu)


def headers(folder: Path, version: str | None) -> Path:
    include = folder / "include"
    include.mkdir(parents=True)
    for name in toolchain.HEADERS:
        (include / name).touch()
    if version:
        (include / "cuda_runtime_api.h").write_text(f"/* */\n#define CUDART_VERSION  {version}\n")
    return include


@pytest.fixture
def bare_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No wheels, no conda, no toolkit; the answer is where wheels would lie."""
    pathfinder = pytest.importorskip("cuda.pathfinder")
    nvidia = tmp_path / "site-packages" / "nvidia"
    monkeypatch.setattr(toolchain, "_nvidia_folders", _Remembered((nvidia,)))
    monkeypatch.setattr(pathfinder, "find_nvidia_header_directory", lambda name: None)
    monkeypatch.setattr(toolchain, "TOOLKIT", tmp_path / "nothing")
    for name in ("CUDA_PATH", "CUDA_HOME"):
        monkeypatch.delenv(name, raising=False)
    return nvidia


class _Remembered:
    """A function that is already remembered, and can be told to forget."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __call__(self) -> Any:
        return self.value

    def cache_clear(self) -> None:
        pass


@pytest.mark.parametrize(("major", "place"), [(13, "cu13"), (12, "cuda_runtime")])
def test_headers_of_wheels(bare_machine: Path, pretend: Any, major: int, place: str) -> None:
    pretend((major, 4))
    include = headers(bare_machine / place, f"{major}040")
    assert toolchain.header_directory() == include


def test_headers_of_another_major_version_are_passed_over(
    bare_machine: Path, pretend: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend((12, 9))
    headers(bare_machine / "cuda_runtime", "13000")
    toolkit = headers(tmp_path / "toolkit", "12060")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    assert toolchain.header_directory() == toolkit


def test_headers_of_the_very_version_come_first(
    bare_machine: Path, pretend: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend((12, 9))
    headers(tmp_path / "old", "12000")
    same = headers(tmp_path / "same", "12090")
    monkeypatch.setenv("CUDA_PATH", str(tmp_path / "old"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "same"))
    assert toolchain.header_directory() == same


def test_only_wrong_headers_are_named_with_their_version(
    bare_machine: Path, pretend: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend((13, 5))
    old = headers(tmp_path / "old", "12000")
    monkeypatch.setenv("CUDA_PATH", str(tmp_path / "old"))
    strange = headers(tmp_path / "strange", None)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "strange"))
    with pytest.raises(MissingDependencyError) as caught:
        toolchain.header_directory()
    message = str(caught.value)
    assert "for NVRTC 13.5" in message
    assert f"{old} is of 12.0" in message
    assert f"{strange} is of unknown" in message
    assert "pip install 'nvidia-cuda-runtime~=13.0'" in message


def test_no_headers_at_all(bare_machine: Path, pretend: Any) -> None:
    pretend((12, 9))
    with pytest.raises(
        MissingDependencyError, match=r"not found: pip install 'nvidia-cuda-runtime-cu12~=12\.0'"
    ):
        toolchain.header_directory()


def test_headers_installed_later_are_found(bare_machine: Path, pretend: Any) -> None:
    pretend((13, 0))
    with pytest.raises(MissingDependencyError):
        toolchain.header_directory()
    include = headers(bare_machine / "cu13", "13000")
    assert toolchain.header_directory() == include


def test_a_toolkit_alone_serves(
    bare_machine: Path, pretend: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend((13, 1))
    monkeypatch.setattr(toolchain, "TOOLKIT", tmp_path / "cuda")
    include = headers(tmp_path / "cuda", "13010")
    assert toolchain.header_directory() == include
    assert toolchain.identity() == {"nvrtc": "library 13.1", "headers": "folder 13.1"}


def test_identity_of_wheels_is_their_exact_version(bare_machine: Path, pretend: Any) -> None:
    pretend((12, 9))
    for wheel in (
        "nvidia_cuda_nvrtc-13.5.37",
        "nvidia_cuda_nvrtc_cu12-12.9.86",
        "nvidia_cuda_runtime_cu12-12.9.79",
    ):
        (bare_machine.parent / f"{wheel}.dist-info").mkdir(parents=True)
    assert toolchain.identity() == {"nvrtc": "12.9.86", "headers": "12.9.79"}


def without(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    real = builtins.__import__

    def refuse(wanted: str, *args: Any, **kwargs: Any) -> Any:
        if wanted.startswith(name):
            raise ModuleNotFoundError(f"No module named {wanted!r}")
        return real(wanted, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)


@pytest.mark.parametrize("function", ["nvrtc", "identity"])
def test_without_bindings(monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    without(monkeypatch, "cuda.bindings" if function == "identity" else "cuda")
    with pytest.raises(
        MissingDependencyError, match=r"cuda-bindings .*pip install 'cuflash\[cuda13"
    ):
        getattr(toolchain, function)()


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    bindings = pytest.importorskip("cuda.bindings.nvrtc")

    def fail() -> None:
        raise RuntimeError("Failed to find libnvrtc.so\nsearched: here, there")

    monkeypatch.setattr(bindings, "nvrtcVersion", fail)
    with pytest.raises(MissingDependencyError, match=r"nvidia-cuda-nvrtc") as caught:
        toolchain.nvrtc()
    assert "(Failed to find libnvrtc.so)" in str(caught.value)
    monkeypatch.undo()
    assert toolchain.nvrtc_version() >= (12, 0)  # the failure was not remembered


@needs_nvrtc
def test_what_is_installed_here() -> None:
    major, _ = toolchain.nvrtc_version()
    version = toolchain.header_version(toolchain.header_directory())
    assert version is not None and version[0] == major
    assert 90 in toolchain.supported_archs()
    assert toolchain.resolve_arch("sm_90a") == "sm_90a"
    assert toolchain.identity()["nvrtc"].split(".")[0].endswith(str(major))
