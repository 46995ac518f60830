"""Disks that refuse, permissions, and upkeep of the cache folder."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import time
import warnings
from pathlib import Path

import pytest
from cold_process import SPEC, Compiler, left_over, new_process, refuse, the_entry
from tiny_kernels import TinySpec

from cuflash.errors import CacheWarning
from cuflash.gpu import cache, disk
from cuflash.gpu.cache import load_or_compile


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
    with warnings.catch_warnings():
        warnings.simplefilter("error")
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
    (the_entry(root) / "kernel.cubin").write_bytes(b"")
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
    (the_entry(root) / "kernel.cubin").write_bytes(b"")
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


# --- upkeep ---


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


@pytest.mark.parametrize("meta", [None, b"", b"\xff\x00", b"[]", b'{"cut'])
def test_entries_lists_damaged_ones_too(
    root: Path, nvrtc_calls: Compiler, meta: bytes | None
) -> None:
    load_or_compile(SPEC)
    path = the_entry(root) / "meta.json"
    path.unlink()
    if meta is not None:
        path.write_bytes(meta)
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
