"""`import cuflash` touches no GPU, so that a process may import it and fork."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from needs import needs_nvrtc
from tiny_kernels import write_kernels

fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


def run(program: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_loads_nothing_heavy_and_writes_nothing(tmp_path: Path) -> None:
    program = """
        import sys
        import cuflash
        heavy = "cupy cupy_backends cuda ml_dtypes torch jax click rich matplotlib".split()
        print([name for name in heavy if name in sys.modules])
        print([lib for lib in ("libcuda", "libcudart", "libnvrtc")
               if lib in open("/proc/self/maps").read()] if sys.platform == "linux" else [])
    """
    home = tmp_path / "home"
    home.mkdir()
    cache = tmp_path / "cache"
    assert run(program, HOME=str(home), CUFLASH_CACHE_DIR=str(cache)) == "[]\n[]\n"
    assert list(home.iterdir()) == [] and not cache.exists()


def test_only_bfloat16_loads_ml_dtypes() -> None:
    program = """
        import sys
        import numpy as np
        import cuflash
        for dtype in (np.float16, np.float32, np.float64):
            x = np.ones((1, 5, 2, 16), dtype)
            cuflash.flash_attn_func(x, x, x)
        try:
            cuflash.flash_attn_func(*[x.astype(int)] * 3)
        except cuflash.CuflashError as error:
            print(error.code.name)
        print("ml_dtypes" in sys.modules)
    """
    assert run(program) == "UNSUPPORTED_DTYPE\nFalse\n"


def test_import_without_a_home() -> None:
    assert run("import cuflash", HOME="/nonexistent", XDG_CACHE_HOME="/nonexistent") == ""


def test_log_level_of_the_environment_is_heard() -> None:
    program = """
        import logging, sys
        import cuflash
        logger = logging.getLogger("cuflash")
        print(logger.level, [type(handler).__name__ for handler in logger.handlers])
    """
    assert run(program, CUFLASH_LOG="") == "0 ['NullHandler']\n"
    assert run(program, CUFLASH_LOG="debug") == "10 ['NullHandler', 'StreamHandler']\n"


@needs_nvrtc
def test_compiling_starts_no_driver() -> None:
    program = """
        import sys
        from cuflash.gpu import compiler
        from cuflash.gpu.render import Source
        kernel = 'extern "C" __global__ void k(int* x) { *x = 1; }'
        print(len(compiler.compile_source(Source("k.cu", kernel, {}), "sm_80").cubin) > 0)
        print("cupy" in sys.modules)
    """
    assert run(program) == "True\nFalse\n"


@fork
def test_fork_after_import_and_call_in_the_child() -> None:
    program = """
        import os, sys
        import numpy as np
        import cuflash
        def call():
            q = np.ones((1, 5, 2, 16), np.float32)
            return bool(np.allclose(cuflash.flash_attn_func(q, q, q), 1))
        child = os.fork()
        if child == 0:
            os._exit(0 if call() else 1)
        print(call(), os.waitpid(child, 0)[1])
    """
    assert run(program) == "True 0\n"


@fork
@needs_nvrtc
def test_fork_while_threads_compile(tmp_path: Path) -> None:
    """The child has locks of its own: the parent's may be held by a thread that it has not got."""
    program = f"""
        import os, sys, threading, time
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from tiny_kernels import TinySpec
        from cuflash.gpu import cache, compiler
        spec = TinySpec()
        digest = cache.load_or_compile(spec).digest
        cache.clear()
        real, entered, go = compiler.compile_source, threading.Event(), threading.Event()
        def slow(*args, **kwargs):
            entered.set()
            go.wait()
            return real(*args, **kwargs)
        compiler.compile_source = slow
        thread = threading.Thread(target=cache.load_or_compile, args=(spec,))
        thread.start()
        entered.wait()
        with cache._memory.lock:
            child = os.fork()
            if child == 0:
                compiler.compile_source = real
                kernel = cache.load_or_compile(spec)
                os._exit(0 if kernel.digest == digest and kernel.origin == "compile" else 1)
        status = os.waitpid(child, 0)[1]
        go.set()
        thread.join()
        print(status, cache.load_or_compile(spec).origin, len(cache.entries()))
    """
    places = {
        "CUFLASH_KERNEL_DIR": str(write_kernels(tmp_path / "kernels")),
        "CUFLASH_CACHE_DIR": str(tmp_path / "cache"),
    }
    assert run(program, **places) == "0 memory 1\n"
