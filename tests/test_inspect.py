"""What `cuflash show` tells: counted by hand for small problems, and for GPUs that are not here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from needs import needs_nvrtc

from cuflash.cli import main
from cuflash.debug.inspect import explain, least_bytes, visible_pairs
from cuflash.gpu import cache, peaks
from cuflash.gpu.device import Device
from cuflash.problem import describe_problem

H200 = peaks.device("H200")
RESOURCES = {"registers": 242, "spill_bytes": 0, "static_shared_bytes": 64}


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The compiler's report is played."""
    report = dict(RESOURCES)

    def load(spec: Any) -> cache.Kernel:
        return cache.Kernel(spec, b"", report, "memory", "", None)

    monkeypatch.setattr(cache, "load_or_compile", load)
    return report


@given(
    st.integers(0, 40), st.integers(0, 40), st.booleans(), st.integers(-1, 12), st.integers(-1, 12)
)
def test_visible_pairs_are_those_of_the_mask(
    sq: int, sk: int, causal: bool, left: int, right: int
) -> None:
    problem = describe_problem(seqlen_q=sq, seqlen_k=sk, causal=causal, window_size=(left, right))
    i, j = np.arange(sq)[:, None] + sk - sq, np.arange(sk)[None, :]
    seen = np.ones((sq, sk), bool)
    if left >= 0:
        seen &= j >= i - left
    if problem.window_right >= 0:
        seen &= j <= i + problem.window_right
    assert visible_pairs(problem) == seen.sum()


def test_figures_of_a_launch(compiled: dict[str, Any]) -> None:
    problem = describe_problem(batch=16, seqlen_q=1024, nheads_q=8, head_dim=256)
    found = explain(problem, H200)
    assert found.occupancy is not None and found.occupancy.blocks == 1
    assert found.blocks == 16 * 8 * 1024 // found.spec.block_m == 1024
    assert found.waves == 1024 / 132
    assert found.tail == pytest.approx(1 - 1024 / (8 * 132))
    assert found.flops == 4 * 16 * 8 * 1024 * 1024 * 256
    assert found.bytes == least_bytes(problem) == 4 * 16 * 1024 * 8 * 256 * 2
    assert found.l2_bytes == 8 * 16 * 8 * 1024 * 512 * 2
    assert found.bound == "compute" and found.least_ms == pytest.approx(found.flops / 989e9)
    assert sum(found.shared_buffers.values()) == found.spec.shared_bytes() + 64
    assert [step.source for step in found.steps] == [
        "config=", "CUFLASH_CONFIG", "tuned table", "shipped table", "heuristic",
    ]  # fmt: skip
    assert any("one block a multiprocessor" in line for line in found.advice)


def test_few_queries_are_bound_by_memory_and_fill_little(compiled: dict[str, Any]) -> None:
    found = explain(describe_problem(seqlen_q=1, seqlen_k=8192, nheads_q=8), H200)
    assert found.bound == "memory" and found.waves is not None and found.waves < 1
    assert any("of the GPU's block slots" in line for line in found.advice)


def test_spills_and_narrow_loads_are_said(compiled: dict[str, Any]) -> None:
    compiled["spill_bytes"] = 48
    advice = " ".join(explain(describe_problem(vector_bytes=2), H200).advice)
    assert "48 bytes a thread spill" in advice and "loads of 2 bytes" in advice


def test_what_is_unknown_is_none(compiled: dict[str, Any]) -> None:
    unknown = explain(describe_problem(), Device.from_arch("sm_90"))
    assert unknown.bound is None and unknown.least_ms is None and unknown.flops
    packed = explain(describe_problem(packed=True, batch=3), H200)
    assert packed.flops is None and packed.l2_bytes is None and packed.blocks > 0
    assert explain(describe_problem(), H200, compile=False).occupancy is None


def test_an_empty_problem_has_no_blocks(compiled: dict[str, Any]) -> None:
    found = explain(describe_problem(seqlen_q=0, seqlen_k=5), H200)
    assert (found.blocks, found.waves, found.tail, found.flops) == (0, 0.0, 0.0, 0.0)


def run(*arguments: str, exit_code: int = 0) -> Any:
    result = CliRunner().invoke(main, ["show", *arguments])
    assert result.exit_code == exit_code, result.output
    return result


@needs_nvrtc
def test_show_compiles_for_a_gpu_that_is_not_here() -> None:
    document = json.loads(run("--gpu", "H200", "--head-dim", "64", "--json").stdout)
    (row,) = document["problems"]
    assert row["gpu"].startswith("NVIDIA H200 (sm_90, 132 SMs)")
    assert row["registers"] > 100 and row["blocks_per_sm"] >= 1 and row["bound"] == "compute"
    assert document["steps"][-1]["source"] == "heuristic"


def test_show_of_several_problems_and_a_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(tmp_path))
    result = run(
        "--arch", "sm_90", "--seqlen", "128,256", "--no-compile", "--json", "--config", "block_n=32"
    )
    document = json.loads(result.stdout)
    assert len(document["problems"]) == 2
    assert all(
        "block_n=32" in row["tile"] and "config=" in row["reason"] for row in document["problems"]
    )
    assert "shared memory" in run("--arch", "sm_75", "--dtype", "fp16", "--no-compile", "--config",
                                  "block_m=256 num_warps=8", "--head-dim", "256", exit_code=1).stderr  # fmt: skip
