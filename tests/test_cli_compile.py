"""`cuflash compile`: what is asked for, what is shown, what is written, and how it fails."""

import json
import shutil

import pytest
from click.testing import CliRunner

from cuflash.cli import compile as compiling
from cuflash.cli import listing, main
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
