"""`cuflash tune` as a person and a program use it; the GPU is played, everything else is real."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from needs import needs_nvrtc

from cuflash.cli import machine, main, tables
from cuflash.gpu import cache
from cuflash.tuning import store, workbench

WORKER = (sys.executable, str(Path(__file__).parent / "played_worker.py"))
SPACE = "block_m=128 block_n=32,64 num_stages=1,2 num_warps=4,8 blocks_per_sm=1 q_in_registers=0"
PROBLEM = ["--seqlen", "2048", "--heads", "8", "--batch", "1", "--causal"]


@pytest.fixture(autouse=True)
def own_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(workbench, "COMMAND", WORKER)
    monkeypatch.setattr(cache, "load_or_compile", lambda spec: None)

    def play(**what: Any) -> None:
        monkeypatch.setenv("PLAYED", json.dumps(what))

    play(fast="block_n=32 num_stages=1")
    return play


def run(*arguments: str, exit_code: int = 0) -> Result:
    result = CliRunner().invoke(main, ["tune", *arguments])
    assert result.exit_code == exit_code, result.output + str(result.exception)
    return result


def sweep(*more: str, exit_code: int = 0) -> Result:
    return run(*PROBLEM, "--space", SPACE, *more, exit_code=exit_code)


def test_help_reads_well() -> None:
    text = run("--help").stdout
    for words in (
        "cuflash tune --seqlen 4096",
        "--resume",
        "--dry-run",
        "list",
        "export",
        "default",
    ):
        assert words in text


def test_a_sweep_says_plan_outcome_and_what_to_profile(played: Any) -> None:
    result = sweep("--format", "json")
    document = json.loads(result.stdout)
    (winner,) = document["winners"]
    assert winner["verdict"] == "faster" and "block_n=32" in winner["config"]
    assert winner["ratio"] > 1.5 and winner["complete"] and winner["failed"] == 0
    first = document["records"][0]
    assert first["rank"] == 1 and first["verdict"] == "winner" and first["block_n"] == 32
    assert first["tflops"] > 0 and first["registers"] == 128 and first["resident"] == 4
    assert any(row["verdict"] == "default" for row in document["records"])
    assert {row["kind"] for row in document["pruned"]} == {"same kernel"}
    for words in (
        "candidates of",
        "pruned:",
        "saved in",
        "used by calls",
        "profile it:",
        "ncu --set full",
    ):
        assert words in result.stderr, words
    assert "cuflash bench --dtype bf16 --causal --batch 1 --seqlen 2048" in result.stderr
    assert len(store.all_tables()) == 1


def test_several_problems_are_swept_one_after_the_other(played: Any) -> None:
    result = sweep("--head-dim", "64,128", "--format", "json", "--no-save")
    assert len(json.loads(result.stdout)["winners"]) == 2
    assert store.all_tables() == [] and "not saved" in result.stderr


def test_a_terminal_gets_the_best_and_a_heat_map(
    played: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "is_terminal", lambda: True)
    monkeypatch.setenv("COLUMNS", "160")
    text = run(*PROBLEM, "--space", SPACE, "--top", "2").stdout
    assert "Winners" in text and "block_m \\ block_n" in text and "Not tried" in text
    piped = sweep("--format", "tsv").stdout
    assert piped.startswith("problem\tgpu\tconfig")
    assert len([line for line in piped.split("\n\n")[1].splitlines() if line]) > 4


def test_files_hold_every_record(played: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    played(bad={"block_n=64 num_warps=8": "wrong"})
    out, picture = tmp_path / "sweep.json", tmp_path / "map.png"
    sweep("--out", str(out), "--plot", str(picture))
    (document,) = json.loads(out.read_text())
    assert {r["status"] for r in document["records"]} == {"ok", "wrong"}
    assert document["gpu"]["name"] == "NVIDIA Played" and document["problem"]["seqlen_q"] == 2048
    assert picture.read_bytes().startswith(b"\x89PNG")
    result = sweep("--head-dim", "64,128", "--plot", str(picture))
    assert {p.name for p in tmp_path.glob("*.png")} == {"map.png", "map-1.png", "map-2.png"}
    assert "drawn" in result.stderr
    missing = str(tmp_path / "no" / "such.json")
    assert "cannot write" in sweep("--out", missing, exit_code=1).stderr


def test_where_nothing_works_it_is_exit_code_1_with_the_reasons(played: Any) -> None:
    played(bad={"kernel=forward_mma": "wrong"})
    result = sweep("--format", "json", exit_code=1)
    document = json.loads(result.stdout)
    assert document["winners"][0]["verdict"] == "FAIL"
    assert all("max error" in row["error"] for row in document["records"])


def test_a_budget_and_resume(played: Any) -> None:
    played(sleep=0.1)
    result = sweep("--budget", "0.15s", "--format", "json")
    assert "--resume goes on" in result.stderr
    tried = json.loads(result.stdout)["winners"][0]["tried"]
    document = json.loads(sweep("--resume", "--format", "json").stdout)
    assert document["winners"][0]["complete"] and document["winners"][0]["tried"] > tried


def test_ctrl_c_keeps_what_was_measured(played: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from cuflash.tuning import sweep as sweeping

    measure, calls = sweeping._measure, []

    def interrupted(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return measure(*arguments)

    monkeypatch.setattr(sweeping, "_measure", interrupted)
    assert "go on with --resume" in sweep(exit_code=130).stderr
    monkeypatch.undo()


def test_without_a_gpu_it_says_so_and_what_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "why_no_gpu", lambda: "CuPy finds no GPU")
    assert "--arch" in run("--dry-run", exit_code=2).stderr
    assert "--dry-run" in run("--arch", "sm_90", exit_code=2).stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--space", "block_q=64"], "axes"),
        (["--space", "block_m"], "axis=value"),
        (["--space", "kernel=nosuch"], "can be swept"),
        (["--space", "block_m=ten"], "integer"),
    ],
)
def test_a_misspelt_space_is_refused_before_anything_runs(
    played: Any, arguments: list[str], words: str
) -> None:
    assert words in run(*PROBLEM, *arguments, exit_code=1).stderr


def test_a_sweep_s_options_before_a_subcommand_are_refused() -> None:
    assert "belongs to a sweep" in run("--resume", "list", exit_code=2).stderr


@needs_nvrtc
def test_a_dry_run_prunes_compiles_and_shows_resources() -> None:
    # Two compiles of a second each; a spec that cannot fit is pruned, not compiled.
    result = run(
        "--arch", "sm_90a", "--dry-run", "--head-dim", "64", "--format", "json",
        "--space", "block_m=64,256 block_n=128 num_warps=4 num_stages=1 blocks_per_sm=1 q_in_registers=0",
    )  # fmt: skip
    document = json.loads(result.stdout)
    rows = document["candidates"]
    assert len(rows) == 2 and [row["verdict"] for row in rows] == ["default", "ready"]
    assert all(
        row["registers"] > 0 and row["resident"] > 0 and row["compile_ms"] > 0 for row in rows
    )
    assert sum(row["count"] for row in document["pruned"]) == 1
    assert "about" in result.stderr and len(cache.entries()) == 2
