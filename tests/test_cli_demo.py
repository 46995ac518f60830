"""`cuflash demo` on a machine without a GPU (or made to think so), and on one with."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

from cuflash import api
from cuflash.cli import kernels, machine, main
from cuflash.errors import MissingDependencyError

SMALL = ["demo", "--seqlen", "64", "--heads", "2", "--head-dim", "16"]


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(machine, "why_no_gpu", lambda: "none for this test")


@pytest.fixture
def no_nvrtc(monkeypatch):
    def refuse(specs):
        return [], {spec: MissingDependencyError("install the extra cuda13") for spec in specs}

    monkeypatch.setattr(kernels, "compile_specs", refuse)


def run(*arguments):
    return CliRunner().invoke(main, [*SMALL, *arguments])


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_without_nvrtc_the_numpy_road_runs_and_the_extra_is_named(no_gpu, no_nvrtc, dtype):
    result = run("--dtype", dtype, "--json")
    assert result.exit_code == 0, result.output
    assert "install the extra cuda13" in result.stderr
    (row,) = json.loads(result.stdout)
    assert row["verdict"] == "OK" and row["kernel"] == "numpy" and row["device"] == "CPU"
    assert 0 < row["max_error"] <= row["bound"] and row["ms"] > 0 and row["tflops"] > 0
    assert row["problem"] == f"{dtype} batch=1 seqlen=64x64 heads=2/2 head_dim=16 causal"


def test_options_reach_the_problem(no_gpu, no_nvrtc):
    result = run("--seqlen-k", "80", "--heads-k", "1", "--batch", "3", "--no-causal", "--json")
    (row,) = json.loads(result.stdout)
    assert row["problem"] == "bf16 batch=3 seqlen=64x80 heads=2/1 head_dim=16"


def test_piped_is_tab_separated(no_gpu, no_nvrtc):
    names, values = (line.split("\t") for line in run().stdout.splitlines())
    assert dict(zip(names, values, strict=True))["verdict"] == "OK"


def test_a_wrong_answer_is_exit_code_1(no_gpu, no_nvrtc, monkeypatch):
    def wrong(q, k, v, **options):
        return np.zeros_like(q)

    monkeypatch.setattr(api, "flash_attn_func", wrong)
    result = run("--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)[0]["verdict"] == "FAIL"


def test_a_problem_that_is_refused_is_one_message(no_gpu, no_nvrtc):
    result = run("--head-dim", "300")
    assert result.exit_code == 1 and result.stdout == ""
    assert result.stderr.startswith("error UNSUPPORTED_HEAD_DIM (6): ")


def test_an_unknown_architecture_is_one_message(no_gpu):
    result = run("--arch", "sm_1")
    assert result.exit_code == 1
    assert result.stderr.startswith("error UNSUPPORTED_ARCH (14): ")


def test_kernels_are_compiled_for_a_named_architecture(no_gpu):
    pytest.importorskip("cuda.bindings.nvrtc")
    result = run("--arch", "sm_80", "--json")
    assert result.exit_code == 0, result.output
    tables = json.loads(result.stdout)
    assert tables["run"][0]["verdict"] == "OK"
    assert len(tables["kernels"]) == 3
    for row in tables["kernels"]:
        assert row["arch"] == "sm_80" and "-d16-" in row["spec"]
        assert row["compile_ms"] > 0 and row["registers"] > 0 and row["spill_bytes"] == 0
        assert row["shared_bytes"] > 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_on_a_gpu_its_kernels_run_and_are_timed(dtype):
    result = run("--dtype", dtype, "--json")
    assert result.exit_code == 0, result.output
    (row,) = json.loads(result.stdout)
    assert row["verdict"] == "OK" and row["kernel"].startswith("forward_")
    assert row["device"] != "CPU" and row["ms"] > 0 and row["tile"] and row["reason"]
