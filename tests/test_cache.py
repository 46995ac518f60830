from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tiny_kernels import FILES, TinySpec, needs_nvrtc, write_kernels

from cuflash.errors import CacheWarning, CompileError, UnsupportedArchError
from cuflash.gpu import cache, compiler, disk, toolchain
from cuflash.gpu.cache import Kernel, load_or_compile
from cuflash.gpu.compiler import Compiled, parse_resources
from cuflash.gpu.render import Source

LOG = "ptxas info    : 8 bytes spill stores, 4 bytes spill loads\nUsed 40 registers, 96 bytes smem"
SPEC = TinySpec()


class Compiler:
    """Stands for NVRTC: quick, and counts. What it makes depends on the whole text."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.seconds = 0.0
        self.fails = False

    def __call__(self, source: Source, arch: str, *, ptx: bool = False) -> Compiled:
        self.calls.append((source.name, arch))
        time.sleep(self.seconds)
        if self.fails:
            raise CompileError("tiny.cu does not compile", log="the whole log")
        return Compiled(self.cubin(source, arch), LOG, parse_resources(LOG), 12.5)

    @staticmethod
    def cubin(source: Source, arch: str) -> bytes:
        whole = repr((source.text, source.includes, arch)).encode()
        return b"\x7fELF" + hashlib.sha256(whole).digest() * 64


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cold process: kernels to compile, an empty cache folder, nothing in memory."""
    monkeypatch.setenv("CUFLASH_KERNEL_DIR", str(write_kernels(tmp_path / "kernels_cu")))
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(tmp_path / "cache"))
    new_process()
    return tmp_path / "cache"


@pytest.fixture
def nvrtc_calls(root: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    fake = Compiler()
    monkeypatch.setattr(compiler, "compile_source", fake)
    monkeypatch.setattr(toolchain, "resolve_arch", lambda arch: arch)
    monkeypatch.setattr(toolchain, "identity", lambda: {"nvrtc": "13.5.37", "headers": "13.5.37"})
    return fake


def new_process() -> None:
    """Forget what a process remembers."""
    cache._forget()
    disk._done.clear()


def left_over(root: Path) -> list[Path]:
    return list((root / "tmp").glob("*"))


def the_entry(root: Path) -> Path:
    (path,) = (root / "kernels").glob("*/*")
    return path


# --- the road -----------------------------------------------------------------------------------


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


# --- the key ------------------------------------------------------------------------------------


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


# --- damage -------------------------------------------------------------------------------------


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def put(name: str, content: bytes) -> Callable[[Path], Any]:
    return lambda entry: (entry / name).write_bytes(content)


def edit_meta(**changes: Any) -> Callable[[Path], Any]:
    def edit(entry: Path) -> None:
        meta = json.loads((entry / "meta.json").read_text())
        (entry / "meta.json").write_text(json.dumps({**meta, **changes}))

    return edit


def replace_by_file(entry: Path) -> None:
    shutil.rmtree(entry)
    entry.write_text("no folder")


def replace_by_broken_link(entry: Path) -> None:
    shutil.rmtree(entry)
    entry.symlink_to(entry.with_name("nowhere"))


def replace_cubin_by_folder(entry: Path) -> None:
    (entry / "kernel.cubin").unlink()
    (entry / "kernel.cubin").mkdir()


def take_another_kernels_files(entry: Path) -> None:
    """A whole entry, sound in itself, but of another key."""
    other = load_or_compile(TinySpec(block_m=64)).directory
    assert other is not None
    shutil.rmtree(entry)
    shutil.copytree(other, entry)
    shutil.rmtree(other)


def take_another_kernels_cubin(entry: Path) -> None:
    other = load_or_compile(TinySpec(block_m=64)).directory
    assert other is not None
    shutil.copy(other / "kernel.cubin", entry)
    shutil.rmtree(other)


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "cubin missing": lambda entry: (entry / "kernel.cubin").unlink(),
    "cubin empty": put("kernel.cubin", b""),
    "cubin cut": lambda entry: cut(entry / "kernel.cubin", 1000),
    "cubin one byte short": lambda entry: cut(entry / "kernel.cubin", -1),
    "cubin one byte long": lambda entry: (entry / "kernel.cubin").open("ab").write(b"\0"),
    "cubin noise": put("kernel.cubin", bytes(range(256)) * 8),
    "cubin first bit flipped": lambda entry: flip(entry / "kernel.cubin", 0),
    "cubin middle bit flipped": lambda entry: flip(entry / "kernel.cubin", 1024),
    "cubin last bit flipped": lambda entry: flip(entry / "kernel.cubin", -1),
    "cubin a folder": replace_cubin_by_folder,
    "cubin of another kernel": take_another_kernels_cubin,
    "meta missing": lambda entry: (entry / "meta.json").unlink(),
    "meta empty": put("meta.json", b""),
    "meta cut": lambda entry: cut(entry / "meta.json", 100),
    "meta noise": put("meta.json", bytes(range(256))),
    "meta a list": put("meta.json", b"[]"),
    "meta a string": put("meta.json", b'"schema"'),
    "meta null": put("meta.json", b"null"),
    "meta nested too deeply": put("meta.json", b"[" * 100_000),
    "meta without names": put("meta.json", b"{}"),
    "meta with a wrong checksum of the cubin": edit_meta(cubin_sha256="0" * 64),
    "meta with a wrong checksum of itself": edit_meta(meta_sha256="0" * 64),
    "meta with a number changed": edit_meta(registers=41),
    "meta with another digest": edit_meta(digest="0" * 64),
    "meta with another schema": edit_meta(schema=0),
    "folder empty": lambda entry: [path.unlink() for path in entry.iterdir()],
    "folder missing": shutil.rmtree,
    "folder of another kernel": take_another_kernels_files,
    "a file in its place": replace_by_file,
    "a broken link in its place": replace_by_broken_link,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_entry_is_a_miss_and_is_replaced(
    root: Path, nvrtc_calls: Compiler, damage: str
) -> None:
    right = load_or_compile(SPEC)
    DAMAGE[damage](the_entry(root))
    new_process()
    nvrtc_calls.calls.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = load_or_compile(SPEC)
    assert again.origin == "compile" and again.cubin == right.cubin
    assert again.directory == the_entry(root)
    assert left_over(root) == []
    new_process()
    replaced = load_or_compile(SPEC)
    assert replaced.origin == "disk" and replaced.cubin == right.cubin
    assert len(nvrtc_calls.calls) == 1


def test_every_single_bit_of_a_small_entry(root: Path, nvrtc_calls: Compiler) -> None:
    kernel = load_or_compile(SPEC)
    entry = the_entry(root)
    for name in ("kernel.cubin", "meta.json"):
        path = entry / name
        whole = path.read_bytes()
        for position in range(0, len(whole), 37):
            for bit in range(8):
                damaged = bytearray(whole)
                damaged[position] ^= 1 << bit
                path.write_bytes(damaged)
                found = disk.read(entry, kernel.digest)
                # A bit in the white space between JSON's names may change nothing at all.
                assert found is None or (found[0] == kernel.cubin and name == "meta.json"), position
                if found:
                    assert {n: found[1][n] for n in kernel.meta} == kernel.meta, position
        path.write_bytes(whole)
    assert disk.read(entry, kernel.digest) is not None


def test_the_text_is_for_people_and_not_needed(root: Path, nvrtc_calls: Compiler) -> None:
    load_or_compile(SPEC)
    (the_entry(root) / "kernel.cu").unlink()
    new_process()
    assert load_or_compile(SPEC).origin == "disk"


def test_a_kernel_the_driver_refuses_is_compiled_anew(root: Path, nvrtc_calls: Compiler) -> None:
    load_or_compile(SPEC)
    new_process()
    cache.invalidate(load_or_compile(SPEC))
    assert cache.entries() == []
    assert load_or_compile(SPEC).origin == "compile"
    assert cache.entries() != []


# --- disks that refuse --------------------------------------------------------------------------


def refuse(code: int) -> Callable[..., Any]:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise OSError(code, os.strerror(code))

    return fail


def lives_in_memory_with_one_warning(nvrtc_calls: Compiler, reason: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kernels = [load_or_compile(TinySpec(block_m=m)) for m in (32, 48, 64)]
        again = load_or_compile(SPEC)
    assert [k.origin for k in kernels] == ["compile"] * 3
    assert all(k.directory is None for k in kernels)
    assert again.origin == "memory" and again.cubin == kernels[0].cubin
    assert [warning.category for warning in caught] == [CacheWarning]
    assert reason in str(caught[0].message)
    assert "CUFLASH_CACHE_DIR" in str(caught[0].message)


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("call", ["mkdir", "open", "rename"])
def test_a_disk_that_refuses(
    root: Path, nvrtc_calls: Compiler, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    root.mkdir()
    monkeypatch.setattr(os, call, refuse(code))
    lives_in_memory_with_one_warning(nvrtc_calls, os.strerror(code))
    monkeypatch.undo()
    assert list((root / "kernels").glob("*/*")) == []


def test_a_disk_that_is_full_in_the_middle_of_a_file_leaves_nothing(
    root: Path, nvrtc_calls: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = disk._write_file

    def half(path: Path, content: bytes) -> None:
        write(path, content[: len(content) // 2])
        if path.name == "meta.json":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(disk, "_write_file", half)
    lives_in_memory_with_one_warning(nvrtc_calls, "No space left")
    assert cache.entries() == [] and left_over(root) == []


def test_a_cache_folder_below_a_file(
    root: Path, nvrtc_calls: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    root.write_text("a file")
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(root / "deeper"))
    lives_in_memory_with_one_warning(nvrtc_calls, str(root / "deeper"))
    assert cache.entries() == []


def test_a_read_only_disk_still_serves_what_is_there(
    root: Path, nvrtc_calls: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_or_compile(SPEC)
    new_process()
    for call in ("utime", "mkdir", "rename"):
        monkeypatch.setattr(os, call, refuse(errno.EROFS))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_or_compile(SPEC).origin == "disk"


def test_a_file_that_may_not_be_read_is_a_miss(
    root: Path, nvrtc_calls: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_or_compile(SPEC)
    new_process()
    monkeypatch.setattr(Path, "read_bytes", refuse(errno.EACCES))
    with pytest.warns(CacheWarning) if os.name == "nt" else warnings.catch_warnings():
        assert load_or_compile(SPEC).origin == "compile"


@pytest.mark.parametrize("code", [errno.EACCES, errno.EPERM, errno.EEXIST, errno.ENOTEMPTY])
def test_losing_the_race_uses_the_winners_entry(
    root: Path, nvrtc_calls: Compiler, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    rename = os.rename

    def win_first(source: Path, target: Path) -> None:
        if "kernels" in Path(target).parts:
            if not Path(target).exists():
                shutil.copytree(source, target)
            raise OSError(code, os.strerror(code))
        rename(source, target)

    monkeypatch.setattr(os, "rename", win_first)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernel = load_or_compile(SPEC)
    assert kernel.directory == the_entry(root)
    assert left_over(root) == []
    new_process()
    assert load_or_compile(SPEC).origin == "disk"


@pytest.mark.parametrize("code", [errno.EBUSY, errno.ENOENT])
def test_cleaning_up_may_fail(
    root: Path, nvrtc_calls: Compiler, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    load_or_compile(SPEC)
    put("kernel.cubin", b"")(the_entry(root))
    new_process()
    for call in ("rmdir", "remove", "unlink"):
        monkeypatch.setattr(os, call, refuse(code))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_or_compile(SPEC).origin == "compile"
    new_process()
    assert load_or_compile(SPEC).origin == "disk"


def test_a_damaged_entry_that_cannot_be_moved_away(
    root: Path, nvrtc_calls: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_or_compile(SPEC)
    put("kernel.cubin", b"")(the_entry(root))
    new_process()
    with monkeypatch.context() as patch:
        for call in ("rename", "rmdir", "remove", "unlink"):
            patch.setattr(os, call, refuse(errno.EBUSY))
        lives_in_memory_with_one_warning(nvrtc_calls, "busy")


@pytest.mark.skipif(os.name != "posix", reason="permissions are POSIX's")
def test_a_folder_that_everyone_can_write_is_not_trusted(root: Path, nvrtc_calls: Compiler) -> None:
    load_or_compile(SPEC)
    root.chmod(0o777)
    new_process()
    lives_in_memory_with_one_warning(nvrtc_calls, "everyone can write")
    root.chmod(0o775)
    new_process()
    assert load_or_compile(SPEC).origin == "disk"


@pytest.mark.skipif(os.name != "posix", reason="permissions are POSIX's")
@pytest.mark.parametrize(
    ("umask", "folder", "file"),
    [(0o022, 0o755, 0o644), (0o002, 0o775, 0o664), (0o077, 0o700, 0o600), (0, 0o775, 0o664)],
)
def test_permissions_follow_the_umask_but_never_let_everyone_write(
    root: Path, nvrtc_calls: Compiler, umask: int, folder: int, file: int
) -> None:
    before = os.umask(umask)
    try:
        load_or_compile(SPEC)
    finally:
        os.umask(before)
    for path in (root, *root.rglob("*")):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (folder if path.is_dir() else file), path


# --- many at once -------------------------------------------------------------------------------


def all_at_once(count: int, call: Callable[[int], Any]) -> list[Any]:
    barrier = threading.Barrier(count)

    def run(i: int) -> Any:
        barrier.wait()
        try:
            return call(i)
        except CompileError as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


def test_sixteen_threads_compile_once(root: Path, nvrtc_calls: Compiler) -> None:
    nvrtc_calls.seconds = 0.2
    kernels = all_at_once(16, lambda i: load_or_compile(TinySpec()))
    assert len(nvrtc_calls.calls) == 1
    assert len({kernel.cubin for kernel in kernels}) == 1
    assert load_or_compile(SPEC).origin == "memory"


def test_threads_with_different_kernels_do_not_wait_for_each_other(
    root: Path, nvrtc_calls: Compiler
) -> None:
    nvrtc_calls.seconds = 0.2
    start = time.perf_counter()
    kernels = all_at_once(16, lambda i: load_or_compile(TinySpec(block_m=1 + i % 8)))
    assert time.perf_counter() - start < 8 * 0.2
    assert len(nvrtc_calls.calls) == 8
    assert len({kernel.cubin for kernel in kernels}) == 8
    assert {k.spec.block_m: k.cubin for k in kernels} == {
        k.spec.block_m: load_or_compile(k.spec).cubin for k in kernels
    }


def test_threads_that_wait_for_a_failure_get_it_and_may_try_again(
    root: Path, nvrtc_calls: Compiler
) -> None:
    nvrtc_calls.seconds, nvrtc_calls.fails = 0.2, True
    results = all_at_once(16, lambda i: load_or_compile(SPEC))
    assert all(isinstance(result, CompileError) for result in results)
    assert len(nvrtc_calls.calls) < 16
    nvrtc_calls.seconds, nvrtc_calls.fails = 0.0, False
    assert isinstance(load_or_compile(SPEC), Kernel)


def test_sixteen_threads_on_a_full_disk_warn_once(
    root: Path, nvrtc_calls: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "mkdir", refuse(errno.ENOSPC))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        all_at_once(16, lambda i: load_or_compile(TinySpec(block_m=1 + i)))
    assert [warning.category for warning in caught] == [CacheWarning]


CHILD = """
import json, sys
sys.path.insert(0, {tests!r})
from tiny_kernels import TinySpec
from cuflash.gpu import cache, compiler
compiles = []
compile_source = compiler.compile_source
def counted(*args, **kwargs):
    compiles.append(args)
    return compile_source(*args, **kwargs)
compiler.compile_source = counted
kernels = [cache.load_or_compile(TinySpec(block_m=m)) for m in (32, 64)]
print(json.dumps([[k.origin, k.cubin.hex()[:32], len(k.cubin)] for k in kernels] + [len(compiles)]))
"""


def start_process(**environment: str) -> subprocess.Popen[str]:
    program = CHILD.format(tests=str(Path(__file__).parent))
    return subprocess.Popen(
        [sys.executable, "-W", "error::UserWarning", "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def answer(process: subprocess.Popen[str]) -> list[Any]:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return json.loads(out)


@needs_nvrtc
@pytest.mark.parametrize("damaged", [False, True])
def test_six_cold_processes(root: Path, damaged: bool) -> None:
    if damaged:
        answer(start_process())
        for entry in cache.entries():
            (entry.path / "kernel.cubin").write_bytes(b"")
    answers = [answer(process) for process in [start_process() for _ in range(6)]]
    sizes = {tuple(kernel[2] for kernel in found[:2]) for found in answers}
    assert len(sizes) == 1 and min(next(iter(sizes))) > 1000
    assert left_over(root) == []
    assert len(cache.entries()) == 2
    # The next one finds both, sound, and compiles nothing.
    *kernels, compiles = answer(start_process())
    assert [kernel[0] for kernel in kernels] == ["disk", "disk"]
    assert compiles == 0


@needs_nvrtc
def test_folders_with_awkward_names(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(tmp_path / "kernels_cu", tmp_path / "k b" / "ü")
    places = {
        "CUFLASH_CACHE_DIR": str(tmp_path / "a b" / "é"),
        "CUFLASH_KERNEL_DIR": str(tmp_path / "k b" / "ü"),
    }
    assert answer(start_process(**places))[-1] == 2
    assert answer(start_process(**places))[-1] == 0
    # A process that thinks the world is ASCII reads the same bytes.
    assert answer(start_process(**places, LC_ALL="C", PYTHONUTF8="0"))[-1] == 0


@needs_nvrtc
def test_a_second_process_does_not_even_load_nvrtc(root: Path) -> None:
    program = CHILD + "print('libnvrtc' in open('/proc/self/maps').read())\n"
    program = program.format(tests=str(Path(__file__).parent))
    runs = [
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    assert [run.stdout.split()[-1] for run in runs] == ["True", "False"]


# --- upkeep -------------------------------------------------------------------------------------


def three_entries(root: Path) -> list[Path]:
    """Entries last used three, two and one hours ago."""
    paths = []
    for hours, block_m in ((3, 8), (2, 16), (1, 32)):
        path = load_or_compile(TinySpec(block_m=block_m)).directory
        assert path is not None
        used = time.time() - 3600 * hours
        os.utime(path, (used, used))
        paths.append(path)
    return paths


def test_entries(root: Path, nvrtc_calls: Compiler) -> None:
    assert cache.entries() == []
    paths = three_entries(root)
    found = cache.entries()
    assert [entry.path for entry in found] == paths[::-1]
    first = found[0]
    assert first.arch == "sm_80" and first.name == paths[2].name
    assert first.bytes == sum(file.stat().st_size for file in paths[2].iterdir()) > 2048
    assert time.time() - first.last_used == pytest.approx(3600, abs=60)
    assert first.meta is not None and first.meta["registers"] == 40


@pytest.mark.parametrize("damage", ["meta missing", "meta noise", "meta a list", "meta cut"])
def test_entries_lists_damaged_ones_too(root: Path, nvrtc_calls: Compiler, damage: str) -> None:
    load_or_compile(SPEC)
    DAMAGE[damage](the_entry(root))
    (entry,) = cache.entries()
    assert entry.meta is None
    assert entry.name.startswith("tiny-m32-")


def test_use_renews_an_entry(root: Path, nvrtc_calls: Compiler) -> None:
    oldest = three_entries(root)[0]
    new_process()
    load_or_compile(TinySpec(block_m=8))
    assert cache.entries()[0].path == oldest


def test_prune_by_age(root: Path, nvrtc_calls: Compiler) -> None:
    paths = three_entries(root)
    gone = cache.prune(older_than=1.5 * 3600)
    assert [entry.path for entry in gone] == paths[:2]
    assert [entry.path for entry in cache.entries()] == paths[2:]
    assert left_over(root) == []


def test_prune_by_size_takes_the_longest_unused(root: Path, nvrtc_calls: Compiler) -> None:
    paths = three_entries(root)
    sizes = {entry.path: entry.bytes for entry in cache.entries()}
    assert cache.prune(max_bytes=sum(sizes.values())) == []
    gone = cache.prune(max_bytes=sizes[paths[2]] + sizes[paths[1]])
    assert [entry.path for entry in gone] == paths[:1]
    # A small one does not stay because a larger, younger one went.
    (paths[2] / "kernel.cu").write_bytes(bytes(100_000))
    gone = cache.prune(max_bytes=50_000)
    assert [entry.path for entry in gone] == paths[1:]
    assert cache.prune() == []


def test_clear_forgets_everything_and_touches_nothing_else(
    root: Path, nvrtc_calls: Compiler
) -> None:
    three_entries(root)
    foreign = [
        root / "tuned" / "gpu.json",
        root / "kernels" / "notes.txt",
        root / "kernels" / "src" / "my-thesis-123456789abc" / "chapter.tex",
        root / "kernels" / "sm_80" / "my-folder" / "file",
    ]
    for path in foreign:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    assert cache.clear() == 3
    assert cache.entries() == [] and cache.clear() == 0
    assert all(path.read_text() == "mine" for path in foreign)
    assert load_or_compile(SPEC).origin == "compile"


def test_what_crashed_writers_left_is_swept_after_an_hour(
    root: Path, nvrtc_calls: Compiler
) -> None:
    old, new = root / "tmp" / "123-dead", root / "tmp" / "124-alive"
    for path in (old, new):
        path.mkdir(parents=True)
        (path / "kernel.cubin").write_bytes(b"half")
    os.utime(old, (time.time() - 3700,) * 2)
    os.utime(new, (time.time() - 3500,) * 2)
    load_or_compile(SPEC)
    assert left_over(root) == [new]
