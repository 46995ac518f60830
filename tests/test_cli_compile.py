"""`cuflash compile`: what is asked for, what is shown, what is written, and how it fails."""

import json
import os
import shutil

import pytest
from click.testing import CliRunner

from cuflash.cli import compile as compiling
from cuflash.cli import listing, main, resources_diff
from cuflash.errors import MissingDependencyError
from cuflash.gpu.choose import choose
from cuflash.gpu.device import Device
from cuflash.gpu.render import kernel_root
from cuflash.problem import describe_problem

# One small kernel, so that the first of these tests compiles and the others find it in the cache.
ONE = ["compile", "--arch", "sm_90", "--dtype", "fp16", "--head-dim", "32"]


@pytest.fixture
def nvrtc():
    return pytest.importorskip("cuda.bindings.nvrtc")


def run(*arguments):
    return CliRunner().invoke(main, list(arguments))


def specs(**options):
    return compiling.asked_for(options.pop("archs", ["sm_90"]), **options)


def test_what_is_not_given_is_chosen_as_in_a_call():
    (spec,) = specs(dtypes=["bf16"], head_dims=[64])
    problem = describe_problem(head_dim=64)
    assert spec == choose(problem, Device.from_arch("sm_90")).spec


def test_options_reach_the_spec():
    (spec,) = specs(
        dtypes=["fp32"], head_dims=[96], head_dim_v=48, softcap=True, alibi=True, bias="fp16",
        precision="tf32", vector_bytes="4", block_m=32, block_n=16, num_warps=2, num_stages=1,
        kernel=None,
    )  # fmt: skip
    assert (spec.dtype, spec.head_dim, spec.head_dim_v) == ("fp32", 96, 48)
    assert (spec.softcap, spec.alibi, spec.bias) == (True, True, "fp16")
    assert (spec.precision, spec.vector_bytes) == ("tf32", 4)
    assert (spec.block_m, spec.block_n, spec.num_warps, spec.num_stages) == (32, 16, 2, 1)


def test_several_values_are_combined_and_doubles_dropped():
    found = specs(archs=["sm_80", "sm_90"], dtypes=["fp16", "bf16"], head_dims=[60, 64, 128])
    assert len(found) == 2 * 2 * 3  # 60 is padded to 64, but allows narrower loads only
    assert len(specs(dtypes=["fp16"], head_dims=[64, 64])) == 1


def test_vector_bytes_are_never_less_than_an_element():
    (spec,) = specs(dtypes=["fp32"], head_dims=[64], vector_bytes="2")
    assert spec.vector_bytes == 4


def test_table_and_cache(nvrtc):
    result = run(*ONE, "--json")
    assert result.exit_code == 0, result.output
    (row,) = json.loads(result.stdout)
    assert row["arch"] == "sm_90" and "-fp16-d32-" in row["spec"]
    assert row["compile_ms"] > 0 and row["registers"] > 0 and row["shared_bytes"] > 0
    again = run(*ONE)
    names, values = (line.split("\t") for line in again.stdout.splitlines())
    second = dict(zip(names, values, strict=True))
    assert second["spec"] == row["spec"] and second["origin"] in ("memory", "disk")


def test_keep_writes_what_was_compiled(nvrtc, tmp_path):
    result = run(*ONE, "--keep", str(tmp_path / "new"), "--ptx")
    assert result.exit_code == 0, result.output
    files = {path.suffix: path for path in (tmp_path / "new").iterdir()}
    assert set(files) == {".cu", ".cubin", ".json", ".ptx"}
    assert all(path.name.startswith("sm_90-forward_") for path in files.values())
    assert files[".cubin"].read_bytes()[:4] == b"\x7fELF"
    assert ".target sm_90" in files[".ptx"].read_text()
    assert '#line 1 "kernels_cu/' in files[".cu"].read_text()
    assert json.loads(files[".json"].read_text())["arch"] == "sm_90"


def test_keep_where_nothing_can_be_written(nvrtc, tmp_path):
    (tmp_path / "file").write_text("")
    result = run(*ONE, "--keep", str(tmp_path / "file" / "folder"))
    assert result.exit_code == 1 and "cannot write to" in result.stderr


def test_ptx_of_one_kernel_is_all_of_stdout(nvrtc):
    result = run(*ONE, "--ptx")
    assert result.exit_code == 0 and ".target sm_90" in result.stdout
    assert "registers" not in result.stdout


def test_sass_without_a_disassembler_says_what_to_install(monkeypatch):
    pathfinder = pytest.importorskip("cuda.pathfinder")
    monkeypatch.setattr(pathfinder, "find_nvidia_binary_utility", lambda name: None)
    result = run(*ONE, "--sass")
    assert result.exit_code == 1 and result.stdout == ""
    assert "cuflash[sass]" in result.stderr and "MISSING_DEPENDENCY" in result.stderr


def test_sass(nvrtc):
    try:
        listing.disassembler()
    except MissingDependencyError as error:
        pytest.skip(str(error))
    result = run(*ONE, "--sass")
    assert result.exit_code == 0 and "HMMA" in result.stdout


@pytest.fixture
def broken_kernels(tmp_path, monkeypatch):
    """An edited copy of the kernels, in which the last line of one is wrong: its number."""
    folder = tmp_path / "kernels of mine"
    shutil.copytree(kernel_root(), folder)
    file = folder / "forward_mma.cu"
    lines = [*file.read_text().splitlines(), "int wrong = no_such_name;"]
    file.write_text("\n".join(lines))
    monkeypatch.setenv("CUFLASH_KERNEL_DIR", str(folder))
    return len(lines)


def test_a_compile_error_has_file_and_line_and_exit_code_1(nvrtc, broken_kernels):
    result = run(*ONE)
    assert result.exit_code == 1 and "Traceback" not in result.output
    assert result.stderr.startswith("error COMPILE_ERROR (8): ")
    assert f"kernels_cu/forward_mma.cu({broken_kernels})" in result.stderr
    assert "no_such_name" in result.stderr


def test_one_failure_does_not_stop_the_rest(nvrtc, broken_kernels):
    # sm_75 has no fp32 tensor cores, so fp32 takes the other kernel, which is whole.
    result = run("compile", "--arch", "sm_75", "--dtype", "fp16", "--dtype", "fp32",
                 "--head-dim", "32", "--json")  # fmt: skip
    assert result.exit_code == 1
    assert [row["spec"].split("-")[:2] for row in json.loads(result.stdout)] == [
        ["forward_simt", "fp32"]
    ]
    assert "forward_mma-fp16-d32" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        (["--arch", "sm_999"], "UNSUPPORTED_ARCH", "sm_999"),
        (["--kernel", "backward"], "INVALID_CONFIG", "forward_mma"),
        (["--block-n", "17"], "INVALID_CONFIG", "block_n"),
        (["--block-m", "256", "--num-warps", "8", "--block-n", "256", "--num-stages", "4"],
         "INVALID_CONFIG", "nearest tile"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_words(arguments, code, word):
    result = run("compile", *arguments)
    assert result.exit_code == 1 and result.stdout == ""
    assert f"error {code}" in result.stderr and word in result.stderr


def test_all_is_what_ships():
    from cuflash.gpu.shipped import shipped_specs

    assert compiling.shipped(["sm_90a", "sm_75"]) == shipped_specs("sm_90a") + shipped_specs(
        "sm_75"
    )


def test_line_numbers_are_another_kernel_which_calls_with_the_same_flag_find(nvrtc, monkeypatch):
    (plain,) = json.loads(run(*ONE, "--json").stdout)
    (first,) = json.loads(run(*ONE, "--lineinfo", "--json").stdout)
    assert first["origin"] == "compile" and first["registers"] == plain["registers"]
    assert json.loads(run(*ONE, "--lineinfo", "--json").stdout)[0]["origin"] != "compile"
    assert "CUFLASH_NVRTC_FLAGS" not in os.environ
    monkeypatch.setenv("CUFLASH_NVRTC_FLAGS", "-lineinfo")
    assert json.loads(run(*ONE, "--json").stdout)[0]["origin"] != "compile"


def test_line_numbers_are_added_to_flags_that_are_set(monkeypatch):
    from cuflash import settings

    monkeypatch.setenv("CUFLASH_NVRTC_FLAGS", "'-DX=a b'")
    with settings.more_nvrtc_flags("-lineinfo"):
        assert settings.nvrtc_flags() == ["-DX=a b", "-lineinfo"]
    assert settings.nvrtc_flags() == ["-DX=a b"]


def test_diff_shows_two_configs_side_by_side(nvrtc):
    result = run(*ONE, "--num-stages", "1", "--diff", "block_n=32", "block_n=64", "--json")
    assert result.exit_code == 0, result.output
    rows = {row["resource"]: row for row in json.loads(result.stdout)}
    assert "n32-" in rows["spec"]["a"] and "n64-" in rows["spec"]["b"]
    assert rows["spec"]["delta"] is None
    k = rows["shared memory: k"]
    assert k["b"] == 2 * k["a"] and k["delta"] == k["a"]
    assert rows["shared memory: q"]["delta"] == 0
    parts = [row["a"] for name, row in rows.items() if name.startswith("shared memory: ")]
    assert sum(parts) == rows["shared memory"]["a"]
    assert rows["registers"]["a"] > 0 and 0 < rows["occupancy, %"]["a"] <= 100


def test_diff_counts_instructions_by_class(nvrtc):
    try:
        listing.disassembler()
    except MissingDependencyError as error:
        pytest.skip(str(error))
    result = run(*ONE, "--num-stages", "1", "--diff", "block_n=32", "block_n=64", "--json")
    rows = {row["resource"]: row for row in json.loads(result.stdout)}
    # Twice the keys are twice the products of a step.
    tensor = rows["instructions: tensor core"]
    assert tensor["b"] == 2 * tensor["a"] > 0
    of_classes = [row["a"] for name, row in rows.items() if name.startswith("instructions: ")]
    assert sum(of_classes) == rows["instructions"]["a"]


def test_diff_without_a_disassembler_has_the_rest(nvrtc, monkeypatch):
    pathfinder = pytest.importorskip("cuda.pathfinder")
    monkeypatch.setattr(pathfinder, "find_nvidia_binary_utility", lambda name: None)
    rows = json.loads(run(*ONE, "--diff", "", "num_stages=1", "--json").stdout)
    names = [row["resource"] for row in rows]
    assert "registers" in names and "instructions" not in names


def test_opcodes_and_their_classes():
    found = resources_diff.instruction_classes(
        "        /*0000*/                   S2R R0, SR_TID.X ;\n"
        "        /*0010*/              @!P0 LDGSTS.E.BYPASS.128 [R1], desc[UR4][R2.64] ;\n"
        "        /*0020*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;\n"
        "        /*0030*/              @UP1 LDSM.16.M88.4 R8, [R3] ;\n"
        "        /*0040*/                   FFMA R1, R2, R3, R4 ;\n"
        "        /*0050*/                   FLO.U32 R1, R2 ;\n"
        "        /*0060*/                   QUUX R1 ;\n"
        "        /*0070*/                   NOP ;\n"
        ".L_x_1:\n"
    )
    assert found == {
        "integer and logic": 2, "asynchronous copy": 1, "tensor core": 1, "shared memory": 1,
        "float32": 1, "other": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        (["--all", "--diff", "", ""], 2, "--all"),
        (["--cubin-dir", "d", "--diff", "", ""], 2, "--cubin-dir"),
        (["--arch", "sm_80", "--arch", "sm_90", "--diff", "", ""], 2, "one spec"),
        (["--diff", "block_x=1", ""], 1, "--diff"),
    ],
)
def test_diff_refuses_what_it_cannot_show(arguments, code, word):
    result = run("compile", *arguments)
    assert result.exit_code == code and word in result.stderr and result.stdout == ""
