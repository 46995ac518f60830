"""From a spec to machine code: memory, disk, compiler, and the key that decides."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
from cold_process import LOG, SPEC, Compiler, left_over, new_process, the_entry
from tiny_kernels import FILES, TinySpec

from cuflash.errors import CompileError, UnsupportedArchError
from cuflash.gpu import cache, disk, toolchain
from cuflash.gpu.cache import load_or_compile


def test_compile_then_memory_then_disk(root: Path, nvrtc_calls: Compiler) -> None:
    first = load_or_compile(SPEC)
    second = load_or_compile(SPEC)
    new_process()
    third = load_or_compile(SPEC)
    assert [k.origin for k in (first, second, third)] == ["compile", "memory", "disk"]
    assert first.cubin == second.cubin == third.cubin
    assert first.directory == second.directory == third.directory == the_entry(root)
    assert nvrtc_calls.calls == [("tiny.cu", "sm_80")]
    assert first.spec is second.spec is third.spec is SPEC
    known = first.meta.keys()
    assert {name: third.meta[name] for name in known} == first.meta


def test_an_entry_can_be_opened_and_read(root: Path, nvrtc_calls: Compiler) -> None:
    kernel = load_or_compile(SPEC)
    path = the_entry(root)
    assert path == root / "kernels" / "sm_80" / f"tiny-m32-{kernel.digest[:12]}"
    assert sorted(p.name for p in path.iterdir()) == ["kernel.cu", "kernel.cubin", "meta.json"]
    assert (path / "kernel.cubin").read_bytes() == kernel.cubin
    assert (path / "kernel.cu").read_text().endswith(FILES["tiny.cu"])
    meta = json.loads((path / "meta.json").read_text())
    expected = {
        "name": "tiny-m32",
        "arch": "sm_80",
        "digest": kernel.digest,
        "cubin_sha256": hashlib.sha256(kernel.cubin).hexdigest(),
        "registers": 40,
        "spill_bytes": 12,
        "spill_stores": 8,
        "spill_loads": 4,
        "static_shared_bytes": 96,
        "shared_bytes": 1024,
        "compile_ms": 12.5,
        "nvrtc": "13.5.37",
        "log": LOG,
    }
    assert {name: meta[name] for name in expected} == expected
    assert "-arch=sm_80" in meta["options"]
    assert left_over(root) == []


def test_no_cache_leaves_the_disk_alone(
    root: Path, nvrtc_calls: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_or_compile(SPEC)
    shutil.move(root, root.with_name("away"))
    monkeypatch.setenv("CUFLASH_NO_CACHE", "1")
    new_process()
    assert load_or_compile(SPEC).origin == "compile"
    assert load_or_compile(SPEC).origin == "memory"
    assert load_or_compile(SPEC).directory is None
    assert not root.exists()
    # Nor is it read.
    shutil.move(root.with_name("away"), root)
    new_process()
    assert load_or_compile(SPEC).origin == "compile"


def test_no_jit_is_an_error_that_names_the_spec(
    root: Path, nvrtc_calls: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUFLASH_NO_JIT", "1")
    with pytest.raises(CompileError, match=r"tiny-m32 for sm_80 .*CUFLASH_NO_JIT"):
        load_or_compile(SPEC)
    assert nvrtc_calls.calls == []
    monkeypatch.delenv("CUFLASH_NO_JIT")
    load_or_compile(SPEC)
    monkeypatch.setenv("CUFLASH_NO_JIT", "1")
    assert load_or_compile(SPEC).origin == "memory"
    new_process()
    assert load_or_compile(SPEC).origin == "disk"


def test_a_failure_is_not_remembered(root: Path, nvrtc_calls: Compiler) -> None:
    nvrtc_calls.fails = True
    for _ in range(2):
        with pytest.raises(CompileError) as caught:
            load_or_compile(SPEC)
        assert any("tiny-m32" in note for note in caught.value.__notes__)
    assert len(nvrtc_calls.calls) == 2
    assert cache.entries() == [] and left_over(root) == []
    nvrtc_calls.fails = False
    assert load_or_compile(SPEC).origin == "compile"


def test_an_unknown_architecture_is_not_remembered_either(
    root: Path, nvrtc_calls: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(arch: str) -> str:
        raise UnsupportedArchError(arch)

    with monkeypatch.context() as patch, pytest.raises(UnsupportedArchError):
        patch.setattr(toolchain, "resolve_arch", refuse)
        load_or_compile(SPEC)
    assert load_or_compile(SPEC).origin == "compile"


def test_a_newer_gpu_gets_code_of_its_family(
    root: Path, nvrtc_calls: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toolchain, "resolve_arch", lambda arch: "sm_120")
    kernel = load_or_compile(TinySpec(arch="sm_121"))
    assert nvrtc_calls.calls == [("tiny.cu", "sm_120")]
    assert kernel.meta["arch"] == "sm_120"
    assert the_entry(root).parent.name == "sm_121"


def test_memory_is_bounded(
    root: Path, nvrtc_calls: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "_MAX_IN_MEMORY", 2)
    specs = [TinySpec(block_m=m) for m in (1, 2, 3)]
    load_or_compile(specs[0])
    load_or_compile(specs[1])
    load_or_compile(specs[0])  # now the second is the longest unused
    load_or_compile(specs[2])
    assert [load_or_compile(specs[i]).origin for i in (0, 2, 1)] == ["memory", "memory", "disk"]


# --- the key ---


@pytest.mark.parametrize("file", ["tiny.cu", "common/scale.cuh", "common/factor.cuh"])
def test_an_edit_of_any_file_is_another_kernel(
    root: Path, nvrtc_calls: Compiler, file: str
) -> None:
    before = load_or_compile(SPEC)
    path = root.parent / "kernels_cu" / file
    original = path.read_text()
    path.write_text(original + "// edited\n")
    after = load_or_compile(SPEC)
    assert after.origin == "compile"
    assert after.digest != before.digest and after.directory != before.directory
    path.write_text(original)
    assert load_or_compile(SPEC).origin == "memory"


def test_an_edit_of_the_editors_defaults_is_none(root: Path, nvrtc_calls: Compiler) -> None:
    load_or_compile(SPEC)
    (root.parent / "kernels_cu" / "editor_defaults.cuh").write_text("// edited\n")
    assert load_or_compile(SPEC).origin == "memory"


def test_what_else_decides_the_machine_code_is_in_the_key(
    root: Path, nvrtc_calls: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = {load_or_compile(SPEC).digest}

    def is_new(spec: TinySpec = SPEC) -> bool:
        kernel = load_or_compile(spec)
        fresh = kernel.digest not in seen
        seen.add(kernel.digest)
        return fresh and kernel.origin == "compile"

    assert is_new(TinySpec(block_m=64))
    assert is_new(TinySpec(arch="sm_90"))
    assert is_new(TinySpec(arch="sm_90a"))
    monkeypatch.setenv("CUFLASH_NVRTC_FLAGS", "-DX")
    assert is_new()
    monkeypatch.delenv("CUFLASH_NVRTC_FLAGS")
    for versions in (("13.5.38", "13.5.37"), ("13.5.37", "13.5.38")):
        identity = dict(zip(("nvrtc", "headers"), versions, strict=True))
        monkeypatch.setattr(toolchain, "identity", lambda identity=identity: identity)
        assert is_new()
    monkeypatch.setattr(disk, "SCHEMA", disk.SCHEMA + 1)
    assert is_new()


def test_where_things_lie_is_not_in_the_key(
    root: Path, nvrtc_calls: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load_or_compile(SPEC)
    shutil.copytree(tmp_path / "kernels_cu", tmp_path / "elsewhere" / "k")
    monkeypatch.setenv("CUFLASH_KERNEL_DIR", str(tmp_path / "elsewhere" / "k"))
    assert load_or_compile(SPEC).origin == "memory"
    shutil.move(root, tmp_path / "moved")
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(tmp_path / "moved"))
    new_process()
    moved = load_or_compile(SPEC)
    assert (moved.origin, moved.digest) == ("disk", first.digest)
