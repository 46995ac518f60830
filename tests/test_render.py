from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
from tiny_kernels import FILES, TinySpec, write_kernels

from cuflash.errors import CompileError
from cuflash.gpu.render import kernel_root, render
from cuflash.gpu.shipped import shipped_specs

# Costly under NVRTC (over a second each), or not to be found by it at all.
FORBIDDEN_HEADERS = r"<(cuda/|cub/|thrust/|cooperative_groups|mma\.h|stdint\.h|cstdint|cuda\.h)"


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = write_kernels(tmp_path / "kernels")
    monkeypatch.setenv("CUFLASH_KERNEL_DIR", str(folder))
    return folder


def test_constants_are_put_in_and_the_kernel_is_untouched(kernels: Path) -> None:
    source = render(TinySpec(block_m=48))
    assert source.name == "tiny.cu"
    assert source.path == str(kernels / "tiny.cu")
    assert source.text.startswith("#define CUFLASH_SPEC 1\n")
    assert "using dtype_t = __half;\nconstexpr int BLOCK_M = 48;\n" in source.text
    assert "// Costs $0." in source.text
    assert source.text.endswith('\n#line 1 "kernels_cu/tiny.cu"\n' + FILES["tiny.cu"])


def test_includes_are_walked_once_each_and_keep_their_line_numbers(kernels: Path) -> None:
    includes = render(TinySpec()).includes
    assert set(includes) == {"common/scale.cuh", "common/factor.cuh"}
    for name, text in includes.items():
        assert text == f'#line 1 "kernels_cu/{name}"\n{FILES[name]}'


def test_a_constant_the_spec_does_not_give(kernels: Path) -> None:
    with (kernels / "prelude.cuh.in").open("a") as file:
        file.write("constexpr int BLOCK_N = ${BLOCK_N};\n")
    with pytest.raises(CompileError, match=r"only in the prelude \['BLOCK_N'\]"):
        render(TinySpec())


def test_a_constant_the_prelude_does_not_know(kernels: Path) -> None:
    with pytest.raises(CompileError, match=r"only in the spec \['NUM_STAGES'\]"):
        render(TinySpec(extra={"NUM_STAGES": "2"}))


def test_a_stray_dollar_in_the_prelude(kernels: Path) -> None:
    with (kernels / "prelude.cuh.in").open("a") as file:
        file.write("// $ 5\n")
    with pytest.raises(CompileError, match=r"prelude\.cuh\.in: Invalid placeholder.*line 7"):
        render(TinySpec())


@pytest.mark.parametrize("name", ["prelude.cuh.in", "tiny.cu", "common/factor.cuh"])
def test_a_missing_file_is_named_with_its_folder(kernels: Path, name: str) -> None:
    (kernels / name).unlink()
    with pytest.raises(CompileError, match=re.escape(name)) as caught:
        render(TinySpec())
    assert str(kernels) in str(caught.value)
    assert caught.value.source_path == str(kernels / name)


def test_a_file_that_is_no_text_is_named(kernels: Path) -> None:
    (kernels / "common/factor.cuh").write_bytes(b"\xff\xfe")
    with pytest.raises(CompileError, match=r"common/factor\.cuh cannot be read.*utf-8"):
        render(TinySpec())


def test_an_edit_is_seen_at_the_next_call_whatever_its_time_and_size(kernels: Path) -> None:
    header = kernels / "common/factor.cuh"
    before, stat = render(TinySpec()), header.stat()
    header.write_text(FILES["common/factor.cuh"].replace("2.0f", "3.0f"))
    os.utime(header, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    after = render(TinySpec())
    assert "3.0f" in after.includes["common/factor.cuh"]
    assert after != before


def test_the_same_from_another_folder_with_an_awkward_name(
    kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = render(TinySpec())
    other = tmp_path / "a b" / "é"
    shutil.copytree(kernels, other)
    monkeypatch.setenv("CUFLASH_KERNEL_DIR", str(other))
    assert render(TinySpec()) == before


def test_the_shipped_kernels_are_found_without_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUFLASH_KERNEL_DIR", raising=False)
    assert (kernel_root() / "prelude.cuh.in").is_file()
    for spec in shipped_specs("sm_75") + shipped_specs("sm_90"):
        source = render(spec)
        assert "${" not in source.text
        assert source.name == f"{spec.kernel}.cu"
        assert "params.cuh" in source.includes


def test_shipped_kernels_include_nothing_costly_and_no_host_only_literal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUFLASH_KERNEL_DIR", raising=False)
    files = [path for path in kernel_root().rglob("*.cu*") if path.is_file()]
    assert len(files) > 5
    for path in files:
        text = path.read_text(encoding="utf-8")
        assert not re.search(rf"#\s*include\s*{FORBIDDEN_HEADERS}", text), path
        # INFINITY does not compile everywhere; write __int_as_float(0xff800000).
        assert not re.search(r"\bINFINITY\b", text), path


def test_every_shipped_kernel_has_one_entry_named_as_its_file_and_compiles_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUFLASH_KERNEL_DIR", raising=False)
    for path in kernel_root().glob("*.cu"):
        text = path.read_text(encoding="utf-8")
        entries = re.findall(r'extern "C"[^{;]*?\b(\w+)\s*\([^()]*\)\s*\{', text, re.DOTALL)
        assert entries == [path.stem], path
        guard = '#ifndef CUFLASH_SPEC\n#include "editor_defaults.cuh"\n#endif\n'
        assert guard in text, path


def test_editor_defaults_name_what_the_prelude_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUFLASH_KERNEL_DIR", raising=False)

    def names(file: str) -> list[str]:
        text = (kernel_root() / file).read_text(encoding="utf-8")
        return re.findall(r"^(?:using|constexpr \w+) (\w+) =", text, re.MULTILINE)

    assert names("prelude.cuh.in") == names("editor_defaults.cuh") != []
