"""Entries damaged in every way: a miss that is replaced."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cold_process import SPEC, Compiler, left_over, new_process, the_entry
from tiny_kernels import TinySpec

from cuflash.gpu import cache, disk
from cuflash.gpu.cache import load_or_compile


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
