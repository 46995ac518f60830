"""Sweeps with real worker processes whose GPU is played: what fails is named, the rest goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from cuflash.errors import CompileError, CudaError, InvalidArgumentError
from cuflash.gpu import cache
from cuflash.gpu.choose import choose
from cuflash.gpu.device import Device
from cuflash.gpu.spec import KernelSpec
from cuflash.problem import describe_problem
from cuflash.tuning import store
from cuflash.tuning import sweep as sweeping
from cuflash.tuning.record import Record
from cuflash.tuning.tune import tune

WORKER = (sys.executable, str(Path(__file__).parent / "played_worker.py"))
PROBLEM = describe_problem(seqlen_q=2048, nheads_q=8, causal=True)
SPACE = "block_m=128 block_n=32,64,96 num_stages=1,2 num_warps=4,8 blocks_per_sm=1 q_in_registers=0"


@pytest.fixture(autouse=True)
def own_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> list[KernelSpec]:
    """Nothing is compiled: the worker is played anyway."""
    asked: list[KernelSpec] = []
    monkeypatch.setattr(cache, "load_or_compile", asked.append)
    return asked


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, no_compiler: list[KernelSpec]) -> Any:
    def play(**what: Any) -> Path:
        log = tmp_path / "log"
        monkeypatch.setenv("PLAYED", json.dumps({"log": str(log), **what}))
        return log

    play()
    return play


def run(**options: Any) -> sweeping.Result:
    common: dict[str, Any] = {"space": SPACE, "command": WORKER}
    (result,) = tune(PROBLEM, **{**common, **options})
    return result


def test_the_fastest_wins_and_the_next_call_uses_it(played: Any) -> None:
    played(fast="block_n=32 num_stages=1")
    gpu = Device(**{**described(), "name": "NVIDIA Played"})
    assert "heuristic" in choose(PROBLEM, gpu).reason
    result = run()
    assert result.complete and result.winner is not None and result.default is not None
    assert "block_n=32" in result.winner.config and result.winner.verdict == "winner"
    assert result.winner.ratio is not None and result.winner.ratio > 1.5
    assert [r.ms for r in result.records] != [None] and all(r.ok for r in result.records)
    assert {r.blocks_per_sm for r in result.records} <= {2, 4}
    choice = choose(PROBLEM, gpu)
    assert choice.reason.startswith("tuned") and choice.spec.block_n == 32
    other = Device(**{**described(), "name": "NVIDIA Other"})
    assert "heuristic" in choose(PROBLEM, other).reason


def described() -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(Device.from_arch("sm_90"))


def test_no_winner_is_declared_inside_the_noise(played: Any) -> None:
    # The played time knows no warps, so two tiles are as fast as each other, but for the noise.
    result = run(space="block_m=128 block_n=64,96 num_stages=2 num_warps=4,8 q_in_registers=0")
    assert result.default is not None and result.winner is not None
    assert result.winner.config == result.default.config
    assert result.entry is not None and result.entry.verdict == "tie"
    assert any(r.verdict == "tie" for r in result.records)


def test_bad_candidates_are_named_and_the_sweep_goes_on(
    played: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = {
        "block_n=96 num_warps=4 num_stages=1": "crash",
        "block_n=96 num_warps=4 num_stages=2": "hang",
        "block_n=96 num_warps=8 num_stages=1": "poison",
        "block_n=96 num_warps=8 num_stages=2": "wrong",
        "block_n=32 num_warps=8 num_stages=1": "exception",
        "block_n=64 num_warps=8 num_stages=1": "noise",
    }
    log = played(bad=bad, fast="block_n=32 num_stages=2")

    def compile_(spec: KernelSpec) -> None:
        if spec.block_n == 32 and spec.num_warps == 4 and spec.num_stages == 1:
            raise CompileError("forward_mma.cu(7): error: planted")

    monkeypatch.setattr(cache, "load_or_compile", compile_)
    seen: list[Record] = []
    (result,) = tune(
        PROBLEM,
        space=SPACE,
        command=WORKER,
        hang_seconds=3.0,
        observe=lambda p: seen.append(p.latest),  # type: ignore[arg-type]
    )
    assert result.complete and len(seen) == len(result.records)
    statuses = {r.config: r for r in result.records}

    def of(words: str) -> Record:
        (found,) = (r for c, r in statuses.items() if all(w in c.split() for w in words.split()))
        return found

    expected = {
        "crash": ("crash", "signal 11"),
        "hang": ("timeout", "hangs"),
        "poison": ("launch", "ILLEGAL_ADDRESS"),
        "wrong": ("wrong", "max error"),
        "exception": ("error", "unexpected"),
        "noise": ("wrong", "max error"),
    }
    for words, what in bad.items():
        record = of(words)
        assert record.status == expected[what][0] and expected[what][1] in (record.error or "")
        assert record.verdict == record.status and record.ms is None
    planted = of("block_n=32 num_warps=4 num_stages=1")
    assert planted.status == "compile" and "planted" in (planted.error or "")
    assert result.winner is not None and "block_n=32" in result.winner.config
    # Every worker that was lost had a successor: after crash, hang, poison and exception.
    assert log.read_text().splitlines().count("prepare") == 5


def test_where_nothing_works_there_is_no_winner_and_nothing_is_stored(played: Any) -> None:
    played(bad={"kernel=forward_mma": "wrong"})
    result = run()
    assert result.winner is None and result.entry is None
    assert {r.status for r in result.records} == {"wrong"} and store.all_tables() == []


def test_where_the_heuristic_s_tile_fails_the_fastest_wins(played: Any) -> None:
    played(bad={"block_n=64 num_warps=4 num_stages=2": "wrong"})
    result = run()
    assert result.default is not None and result.default.status == "wrong"
    assert result.winner is not None and result.winner.ok and result.winner.ratio is None
    assert result.entry is not None


def test_a_worker_that_cannot_run_is_said_in_words(played: Any) -> None:
    played(refuse="no CUDA-capable device is detected")
    with pytest.raises(CudaError, match="no CUDA-capable device"):
        run()
    with pytest.raises(CudaError, match="exit code 3"):
        run(command=[sys.executable, "-c", "import sys; sys.exit(3)"])


def test_a_budget_ends_a_sweep_early_and_resume_finishes_it(played: Any) -> None:
    log = played(sleep=0.1)
    first = run(budget=0.25)
    assert not first.complete and 1 <= len(first.records) < 10
    tried = {r.config for r in first.records}
    log.unlink()
    second = run(resume=True)
    assert second.complete and second.resumed == len(tried)
    again = [line for line in log.read_text().splitlines() if line.startswith("kernel=")]
    assert not tried & set(again) and len(again) == len(second.records) - len(tried)


def test_another_space_keeps_what_was_measured(played: Any) -> None:
    run()
    result = run(space=SPACE.replace("32,64,96", "32,64,96,128"), resume=True)
    assert result.resumed > 5 and len(result.records) > result.resumed


def test_another_gpu_or_kernel_text_is_not_resumed(
    played: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run()
    monkeypatch.setattr(sweeping, "kernel_digest", lambda kernel: "edited")
    with pytest.raises(InvalidArgumentError, match="kernels"):
        run(resume=True)
    run()  # anew is fine, and the old file is kept
    assert len(list((store.user_dir().parent / "sweeps").glob("*.old"))) == 1
    played(gpu="NVIDIA Other")
    assert run(resume=True).resumed == 0


KILLED = """
    import os, signal, sys
    from cuflash.gpu import cache
    cache.load_or_compile = lambda spec: None
    from cuflash.problem import describe_problem
    from cuflash.tuning.tune import tune

    def observe(progress):
        if progress.measured == 4:
            os.kill(os.getpid(), signal.SIGKILL)

    tune(describe_problem(seqlen_q=2048, nheads_q=8, causal=True), space=sys.argv[1], command=sys.argv[2:],
         observe=observe)
"""


def test_a_sweep_killed_half_way_resumes_even_with_a_torn_last_line(played: Any) -> None:
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(KILLED), SPACE, *WORKER],
        env={**os.environ, "PYTHONPATH": str(root)},
        timeout=100,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    (file,) = (store.user_dir().parent / "sweeps").glob("*.jsonl")
    assert len(file.read_text().splitlines()) == 5
    with file.open("a") as torn:
        torn.write('{"config": "kernel=forward_mma block_m=128 blo')
    result = run(resume=True)
    assert result.complete and result.resumed == 4
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert len({row["config"] for row in rows[1:]}) == len(result.records)


def test_a_lost_parent_leaves_no_worker_behind(played: Any, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    worker = [
        sys.executable,
        "-c",
        f"import os, runpy; open({str(pid_file)!r}, 'w').write(str(os.getpid()));"
        f" runpy.run_path({WORKER[1]!r}, run_name='__main__')",
    ]
    root = Path(__file__).parents[1]
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(KILLED), SPACE, *worker],
        env={**os.environ, "PYTHONPATH": str(root)},
        timeout=100,
        check=False,
    )
    pid = int(pid_file.read_text())
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        # A zombie has ended, too: nobody may be left who would wait for it.
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    pytest.fail("the worker outlived the sweep")


@pytest.mark.parametrize(
    ("options", "words"),
    [({"op": "sideways"}, "forward"), ({"l2": "tepid"}, "warm"), ({"space": "block_q=1"}, "axes")],
)
def test_wrong_arguments_are_refused(played: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        run(**options)
