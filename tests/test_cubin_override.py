"""Machine code made by hand: it runs instead of what the compiler makes, and never unnoticed."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from click.testing import CliRunner
from cold_process import SPEC, Compiler, new_process

from cuflash.cli import main
from cuflash.errors import CacheError
from cuflash.gpu import cache
from cuflash.gpu.cache import load_or_compile


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "by hand"
    (folder / "sm_80").mkdir(parents=True)
    monkeypatch.setenv("CUFLASH_CUBIN_DIR", str(folder))
    return folder


def put(folder: Path, content: bytes) -> Path:
    path = folder / "sm_80" / "tiny-m32.cubin"
    path.write_bytes(content)
    return path


def test_it_runs_instead_of_what_was_compiled(
    root: Path, nvrtc_calls: Compiler, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load_or_compile(SPEC).origin == "compile"  # nothing lies there yet
    path = put(folder, b"\x7fELF by hand")
    kernel = load_or_compile(SPEC)
    assert (kernel.origin, kernel.cubin) == ("override", b"\x7fELF by hand")
    assert kernel.meta["path"] == str(path) and kernel.meta["registers"] is None
    assert kernel.meta["shared_bytes"] == 1024
    assert len(nvrtc_calls.calls) == 1
    monkeypatch.delenv("CUFLASH_CUBIN_DIR")
    assert load_or_compile(SPEC).origin == "memory"


def test_it_needs_neither_a_compiler_nor_the_text(
    root: Path, nvrtc_calls: Compiler, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(folder, b"by hand")
    monkeypatch.setenv("CUFLASH_NO_JIT", "1")
    monkeypatch.setenv("CUFLASH_KERNEL_DIR", str(folder / "no such folder"))
    assert load_or_compile(SPEC).origin == "override"
    assert cache.entries() == []


def test_an_edit_has_another_digest_and_is_told_once(
    root: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put(folder, b"first")
    with caplog.at_level(logging.WARNING, "cuflash"):
        digests = [load_or_compile(SPEC).digest for _ in range(3)]
        path = put(folder, b"second")
        digests.append(load_or_compile(SPEC).digest)
    assert digests[0] == digests[1] == digests[2] != digests[3]
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert all("tiny-m32" in text and str(path) in text for text in messages)


@pytest.mark.parametrize("kind", ["empty", "folder", "no such directory"])
def test_what_cannot_be_used_is_an_error_that_names_it(
    root: Path, folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / "sm_80" / "tiny-m32.cubin"
    if kind == "empty":
        put(folder, b"")
    elif kind == "folder":
        path.mkdir()
    else:
        path = folder / "gone" / "sm_80" / "tiny-m32.cubin"
        monkeypatch.setenv("CUFLASH_CUBIN_DIR", str(folder / "gone"))
    with pytest.raises(CacheError) as caught:
        load_or_compile(SPEC)
    assert str(path) in str(caught.value) and "CUFLASH_CUBIN_DIR" in str(caught.value)


def test_what_the_driver_refuses_is_not_deleted(root: Path, folder: Path) -> None:
    path = put(folder, b"not machine code")
    with pytest.raises(CacheError, match="tiny-m32.cubin"):
        cache.invalidate(load_or_compile(SPEC))
    assert path.read_bytes() == b"not machine code"


# --- from the command line and back: dump, edit, run ---

ONE = ["compile", "--arch", "sm_90", "--dtype", "fp16", "--head-dim", "32"]


def run(*arguments: str) -> str:
    result = CliRunner().invoke(main, [*ONE, *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_what_compile_lays_out_is_what_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    new_process()
    run("--cubin-dir", str(tmp_path / "mine"))
    (path,) = (tmp_path / "mine").glob("*/*")
    assert path.parent.name == "sm_90" and path.name.startswith("forward_mma-fp16-d32-")
    assert path.read_bytes()[:4] == b"\x7fELF"
    run("--cubin-dir", str(tmp_path / "mine"))  # the same once more is no edit
    path.write_bytes(path.read_bytes() + b"edited")

    refused = CliRunner().invoke(main, [*ONE, "--cubin-dir", str(tmp_path / "mine")])
    assert refused.exit_code == 1 and str(path) in refused.stderr
    assert path.read_bytes().endswith(b"edited")

    monkeypatch.setenv("CUFLASH_CUBIN_DIR", str(tmp_path / "mine"))
    assert run().splitlines()[1].split("\t")[-1] == "override"
    refused = CliRunner().invoke(main, [*ONE, "--cubin-dir", str(tmp_path / "other")])
    assert refused.exit_code == 1 and "CUFLASH_CUBIN_DIR" in refused.stderr
