"""Many threads and processes that start cold at once."""

from __future__ import annotations

import errno
import json
import os
import shutil
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
from cold_process import SPEC, Compiler, left_over, refuse
from needs import needs_nvrtc
from tiny_kernels import TinySpec

from cuflash.errors import CacheWarning, CompileError
from cuflash.gpu import cache
from cuflash.gpu.cache import Kernel, load_or_compile


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
