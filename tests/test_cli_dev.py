"""`cuflash dev`: what it shows at each save, and how it ends."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from edited_kernels import edit, kernels  # noqa: F401 - a fixture
from needs import needs_nvrtc

from cuflash.cli import machine, main
from cuflash.debug import watch
from cuflash.problem import AttentionProblem
from cuflash.tuning.workbench import Workbench

PLAYED = Path(__file__).parent / "played_dev_worker.py"
OPTIONS = ("--dtype", "fp16", "--head-dim", "32", "--config", "num_stages=1 block_n=32")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["dev", *OPTIONS, *arguments])


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "why_no_gpu", lambda: "no GPU is played")


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that is played by another process."""
    real = watch.workbench

    def played(problem: AttentionProblem, seed: int) -> Workbench:
        return Workbench(real(problem, seed).request, (sys.executable, str(PLAYED)))

    monkeypatch.setenv("PLAYED_LOG", str(tmp_path / "log"))
    monkeypatch.setattr(machine, "why_no_gpu", lambda: None)
    monkeypatch.setattr(machine, "default_arch", lambda: "sm_90")
    monkeypatch.setattr(watch, "workbench", played)


def edits(monkeypatch: pytest.MonkeyPatch, folder: Path, *ends: str) -> None:
    """Play a person who saves at each poll, and presses Ctrl-C at last."""
    waiting = iter(ends)
    real = watch.Folder.changes

    def changes(self: watch.Folder) -> set[str]:
        found = real(self)
        if found or not hasattr(self, "looked"):  # the first look is the folder's own
            self.looked = True  # type: ignore[attr-defined]
            return found
        try:
            edit(folder, next(waiting))
        except StopIteration:
            raise KeyboardInterrupt from None
        return real(self)

    monkeypatch.setattr(watch.Folder, "changes", changes)
    monkeypatch.setattr(watch, "_changes_after", lambda folder, seconds: set())


def documents(text: str) -> Iterator[dict[str, Any]]:
    """Read the JSON documents that follow each other, each as rows by their names."""
    decoder = json.JSONDecoder()
    while text.strip():
        rows, end = decoder.raw_decode(text.lstrip())
        yield {row["resource"]: row for row in rows}
        text = text.lstrip()[end:]


@needs_nvrtc
def test_once_without_a_gpu_compiles_and_says_so(kernels: Path, no_gpu: None) -> None:  # noqa: F811
    result = run("--once", "--json")
    assert result.exit_code == 0, result.output
    (rows,) = documents(result.stdout)
    assert rows["verdict"]["now"] == "not run" and rows["registers"]["now"] > 0
    assert rows["registers"]["before"] is None and "ms" not in rows
    assert "no GPU is played: kernels are compiled, not run" in result.stderr


@needs_nvrtc
def test_once_with_a_kernel_that_does_not_compile(kernels: Path, no_gpu: None) -> None:  # noqa: F811
    line = edit(kernels, "int wrong = no_such_name;")
    result = run("--once")
    assert result.exit_code == 1 and result.stdout == ""
    assert f"{kernels / 'forward_mma.cu'}:{line}: error: " in result.stderr
    assert f"{line} | int wrong = no_such_name;" in result.stderr
    assert "none was good" in result.stderr


@needs_nvrtc
def test_each_save_is_compared_with_the_last_good_one(
    kernels: Path,  # noqa: F811
    gpu: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    edits(monkeypatch, kernels, "// ms=0.5", "int wrong = no_such_name;", "// wrong", "// ms=0.25")
    result = run("--json")
    assert result.exit_code == 0, result.output
    first, second, wrong, last = documents(result.stdout)
    assert (first["verdict"]["now"], first["ms"]["now"]) == ("OK", 1.0)
    assert second["ms"] == {"resource": "ms", "before": 1.0, "now": 0.5, "delta": -0.5, "percent": -50.0}  # fmt: skip
    assert second["registers"]["delta"] == 0
    assert (wrong["verdict"]["before"], wrong["verdict"]["now"]) == ("OK", "FAIL")
    assert (last["ms"]["before"], last["ms"]["now"]) == (0.5, 0.25)
    assert "version 3, edited: forward_mma.cu" in result.stderr
    assert "does not compile; version 2 stays the last good one" in result.stderr
    assert "wrong: max error 1.0\nnot good; version 2 stays the last good one" in result.stderr
    assert result.stderr.rstrip().endswith(
        "5 versions, 3 good; the last good one is version 5: 0.25 ms, -75.0 % of version 1"
    )


@needs_nvrtc
def test_once_with_a_wrong_answer_or_a_crash_is_exit_code_1(kernels: Path, gpu: None) -> None:  # noqa: F811
    for end, word in (("// wrong", "max error 1.0"), ("// crash", "signal 11"),
                      ("// illegal", "ILLEGAL_ADDRESS")):  # fmt: skip
        edit(kernels, end)
        result = run("--once", "--json")
        assert result.exit_code == 1 and word in result.stderr
        assert next(documents(result.stdout))["verdict"]["now"] == "FAIL"


def test_another_architecture_than_the_gpu_s_is_compiled_only(kernels: Path, gpu: None) -> None:  # noqa: F811
    pytest.importorskip("cuda.bindings.nvrtc")
    result = run("--once", "--arch", "sm_80")
    assert result.exit_code == 0, result.output
    assert "--arch is sm_80 and the GPU is sm_90: kernels are compiled, not run" in result.stderr


def test_a_gpu_that_does_not_answer(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAYED_REFUSES", "1")
    result = run("--once")
    assert result.exit_code == 1 and "error CUDA_ERROR" in result.stderr
    assert "the played GPU is out of order" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        (["--seqlen", "64,128"], 2, "one problem"),
        (["--both-masks"], 2, "one problem"),
        (["--arch", "sm_999"], 1, "sm_999"),
        (["--config", "block_n=17"], 1, "block_n"),
    ],
)
def test_what_cannot_be_watched_is_refused(
    no_gpu: None, arguments: list[str], code: int, word: str
) -> None:
    result = run("--once", *arguments)
    assert result.exit_code == code and word in result.stderr


@pytest.mark.gpu
def test_on_the_gpu(kernels: Path) -> None:  # noqa: F811
    result = run("--once", "--seqlen", "256", "--json")
    assert result.exit_code == 0, result.output
    (rows,) = documents(result.stdout)
    assert rows["verdict"]["now"] == "OK" and rows["ms"]["now"] > 0
    edit(kernels, "static_assert(sizeof(int) == 4);")
    assert run("--once", "--seqlen", "256").exit_code == 0
