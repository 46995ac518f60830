"""`cuflash env`: every line is ok or says what to do, and nothing broken breaks it."""

import json
import os

import pytest
from click.testing import CliRunner

from cuflash import numpy_backend, settings
from cuflash.cli import env, machine, main
from cuflash.errors import CompileError, MissingDependencyError
from cuflash.gpu import cache, toolchain


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(machine, "why_no_gpu", lambda: "none for this test")


def run(*arguments):
    return CliRunner().invoke(main, ["env", *arguments])


def lines(*arguments):
    result = run("--json", *arguments)
    assert result.exit_code == 0, result.output
    return {(row["section"], row["name"]): row for row in json.loads(result.stdout)}


def fail(error):
    def ask(*arguments, **options):
        raise error

    return ask


def test_every_line_is_ok_or_says_what_to_do(no_gpu):
    found = lines()
    assert {section for section, _ in found} == {"versions", "gpu", "folders", "settings", "roads"}
    for row in found.values():
        assert row["state"] in ("ok", "absent", "wrong")
        assert row["state"] == "ok" or row["advice"]
        assert row["state"] != "ok" or row["value"]


def test_every_setting_is_there_with_its_value(no_gpu, monkeypatch):
    monkeypatch.setenv("CUFLASH_CONFIG", "block_m=64")
    found = lines()
    for setting in settings.SETTINGS:
        assert found["settings", setting.name]["advice"] == setting.meaning
    assert found["settings", "CUFLASH_CONFIG"]["value"] == "block_m=64"
    assert found["settings", "CUFLASH_NO_JIT"]["value"].startswith("default: ")


def test_without_a_gpu_the_exit_code_is_0_and_strict_1(no_gpu):
    assert lines()["roads", "GPU arrays"]["state"] == "absent"
    assert run("--strict").exit_code == 1


def test_without_nvrtc_the_package_is_named(no_gpu, monkeypatch):
    missing = MissingDependencyError("pip install 'cuflash[cuda13]'")
    monkeypatch.setattr(toolchain, "nvrtc_version", fail(missing))
    monkeypatch.setattr(cache, "load_or_compile", fail(missing))
    found = lines()
    for key in (("versions", "NVRTC"), ("roads", "compile kernels")):
        assert found[key]["state"] == "absent" and "cuda13" in found[key]["advice"]


def test_what_is_there_and_broken_is_wrong(no_gpu, monkeypatch):
    monkeypatch.setattr(cache, "load_or_compile", fail(CompileError("no such header")))
    monkeypatch.setattr(toolchain, "header_directory", fail(OSError("disk on fire")))
    found = lines()
    assert found["roads", "compile kernels"]["advice"] == "no such header"
    assert found["folders", "CUDA headers"]["state"] == "wrong"
    assert "disk on fire" in found["folders", "CUDA headers"]["advice"]


def test_a_broken_numpy_road_is_exit_code_1(no_gpu, monkeypatch):
    monkeypatch.setattr(numpy_backend, "forward", fail(ValueError("broken")))
    result = run("--json")
    assert result.exit_code == 1
    (row,) = (row for row in json.loads(result.stdout) if row["name"] == "NumPy arrays")
    assert row["state"] == "wrong" and "broken" in row["advice"]


def test_a_wrong_average_is_noticed():
    import numpy as np

    with pytest.raises(ArithmeticError):
        env.averaged(np.array([1.0, 0.5]))


def test_a_wrong_kernel_folder_says_what_to_correct(no_gpu, monkeypatch, tmp_path):
    monkeypatch.setenv("CUFLASH_KERNEL_DIR", str(tmp_path))
    row = lines()["folders", "kernels_cu"]
    assert row["state"] == "wrong" and "CUFLASH_KERNEL_DIR" in row["advice"]


def test_the_cache_folder_need_not_exist(no_gpu, monkeypatch, tmp_path):
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(tmp_path / "a" / "b"))
    assert env.cache_folder()["state"] == "ok"
    assert not (tmp_path / "a").exists()


def test_a_cache_folder_that_cannot_be_written(no_gpu, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(tmp_path / "file" / "cache"))
    row = env.cache_folder()
    assert row["state"] == "wrong" and "CUFLASH_CACHE_DIR" in row["advice"]


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root writes everywhere")
def test_a_read_only_cache_folder(no_gpu, monkeypatch, tmp_path):
    tmp_path.chmod(0o500)
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(tmp_path))
    assert env.cache_folder()["state"] == "wrong"


def test_a_cache_that_is_switched_off_is_said(no_gpu, monkeypatch):
    monkeypatch.setenv("CUFLASH_NO_CACHE", "1")
    assert "CUFLASH_NO_CACHE" in env.cache_folder()["advice"]


def test_piped_is_tab_separated(no_gpu):
    heading, *rows = run().stdout.splitlines()
    assert heading.split("\t") == ["section", "name", "value", "state", "advice"]
    assert all(len(row.split("\t")) == 5 for row in rows)


@pytest.mark.gpu
def test_on_a_gpu_strict_passes():
    found = lines("--strict")
    assert found["roads", "GPU arrays"]["state"] == "ok"
    assert "shared memory" in found["gpu", "GPU 0"]["value"]
    assert found["versions", "driver"]["state"] == "ok"
