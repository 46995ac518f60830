"""`cuflash env`: what this machine has for cuflash, each line `ok` or with what to do."""

from __future__ import annotations

import functools
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import click

import cuflash
from cuflash import settings
from cuflash.cli import machine
from cuflash.cli.tables import Column, Row, Table, emit, json_option
from cuflash.cli.units import in_bytes, in_milliseconds
from cuflash.errors import CuflashError, MissingDependencyError

COLUMNS = (
    Column("section"),
    Column("name"),
    Column("value"),
    Column("state"),
    Column("advice", "what to do"),
)
INSTALL = "pip install 'cuflash[cuda13]'"


@click.command()
@click.option("--strict", is_flag=True, help="Exit code 1 unless GPU arrays can be used too.")
@json_option
def env(strict: bool, as_json: bool) -> None:
    """Show versions, GPUs, folders and settings, for yourself or for a bug report.

    A row's state is `ok`, `absent` (only something optional is missing) or `wrong`. Exit code 0 if
    NumPy arrays can be used; with --strict, if GPU arrays can.
    """
    rows = all_rows()
    emit([Table("env", "cuflash on this machine", COLUMNS, rows)], as_json=as_json)
    states = {row["name"]: row["state"] for row in rows if row["section"] == "roads"}
    needed = ("NumPy arrays", "GPU arrays") if strict else ("NumPy arrays",)
    if any(states[name] != "ok" for name in needed):
        sys.exit(1)


def all_rows() -> list[Row]:
    """Give every line of `cuflash env`."""
    return [*versions(), *gpus(), *folders(), *settings_rows(), *roads()]


def line(section: str, name: str, value: object, state: str = "ok", advice: str = "") -> Row:
    """Give one line."""
    return {"section": section, "name": name, "value": value, "state": state, "advice": advice}


def asked(section: str, name: str, ask: Callable[[], object]) -> Row:
    """Give the line of something that may be missing, or may be there and broken."""
    try:
        return line(section, name, ask())
    except MissingDependencyError as error:
        return line(section, name, None, "absent", str(error))
    except CuflashError as error:
        return line(section, name, None, "wrong", str(error))
    except Exception as error:  # a report of what is broken must not break on it
        return line(section, name, None, "wrong", f"{type(error).__name__}: {error}")


def versions() -> Iterator[Row]:
    """Python, packages, NVRTC, headers and driver."""
    yield line("versions", "cuflash", cuflash.__version__)
    yield line("versions", "python", platform.python_version())
    for package in ("numpy", "ml_dtypes", "click", "rich"):
        yield line("versions", package, metadata.version(package))
    for package, module in (("cupy", "cupy"), ("cuda-bindings", "cuda.bindings")):
        yield asked("versions", package, functools.partial(version_of, package, module))
    yield asked("versions", "NVRTC", nvrtc_version)
    yield asked("versions", "CUDA headers", header_version)
    yield driver()


def version_of(package: str, module: str) -> str:
    """Give the version of an optional package; CuPy's has a name for each CUDA version."""
    for name in (package, f"{package}-cuda13x", f"{package}-cuda12x"):
        try:
            return f"{metadata.version(name)} ({name})"
        except metadata.PackageNotFoundError:
            continue
    raise MissingDependencyError(f"only GPU arrays need {module}: {INSTALL}")


def nvrtc_version() -> str:
    """Give NVRTC's version and the architectures that it compiles for."""
    from cuflash.gpu import toolchain

    major, minor = toolchain.nvrtc_version()
    archs = toolchain.supported_archs()
    return f"{major}.{minor}, compiles for sm_{archs[0]} to sm_{archs[-1]}"


def header_version() -> str:
    """Give the version of the CUDA headers that would be used."""
    from cuflash.gpu import toolchain

    version = toolchain.header_version(toolchain.header_directory())
    return ".".join(map(str, version)) if version else "unknown"


def driver() -> Row:
    """Give the driver, and the newest CUDA that it runs."""
    if machine.why_no_gpu() is not None:
        return line(
            "versions", "driver", None, "absent", f"only GPU arrays need it; {machine.why_no_gpu()}"
        )
    import cupy

    newest = cupy.cuda.runtime.driverGetVersion()
    value = f"for CUDA {newest // 1000}.{newest % 1000 // 10}"
    try:
        value = f"{Path('/sys/module/nvidia/version').read_text().strip()}, {value}"
    except OSError:
        pass  # a driver of another system; CUDA's own answer stands
    return line("versions", "driver", value)


def gpus() -> Iterator[Row]:
    """Each GPU, and what its kernels are compiled for."""
    if machine.why_no_gpu() is not None:
        yield line(
            "gpu", "GPU", None, "absent", f"NumPy arrays work without one; {machine.why_no_gpu()}"
        )
        return
    import cupy

    for index in range(cupy.cuda.runtime.getDeviceCount()):
        yield asked("gpu", f"GPU {index}", functools.partial(describe, index))


def describe(index: int) -> str:
    """Describe a GPU; raise if NVRTC cannot compile for it."""
    import cupy

    from cuflash.gpu import toolchain

    properties = cupy.cuda.runtime.getDeviceProperties(index)
    arch = f"sm_{properties['major']}{properties['minor']}"
    return (
        f"{properties['name'].decode()}, {arch} (kernels for {toolchain.resolve_arch(arch)}),"
        f" {properties['multiProcessorCount']} SMs,"
        f" {in_bytes(properties['sharedMemPerBlockOptin'])} shared memory a block,"
        f" {in_bytes(properties['totalGlobalMem'])}"
    )


def folders() -> Iterator[Row]:
    """Where kernels are kept, where their text is, where the CUDA headers are."""
    from cuflash.gpu import render, toolchain

    yield cache_folder()
    root = render.kernel_root()
    if (root / "prelude.cuh.in").is_file():
        yield line("folders", "kernels_cu", str(root))
    else:
        advice = "no prelude.cuh.in there: correct CUFLASH_KERNEL_DIR, or install cuflash again"
        yield line("folders", "kernels_cu", str(root), "wrong", advice)
    yield asked("folders", "CUDA headers", lambda: str(toolchain.header_directory()))


def cache_folder() -> Row:
    """The cache folder; writing there is tried, in the nearest parent that exists."""
    folder = settings.cache_dir()
    if settings.no_cache():
        return line("folders", "cache", str(folder), "ok", "not used: CUFLASH_NO_CACHE is set")
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    try:
        with tempfile.TemporaryFile(dir=existing):
            return line("folders", "cache", str(folder))
    except OSError as error:
        advice = f"cannot be written ({error.strerror}): set CUFLASH_CACHE_DIR to a folder that can"
        return line("folders", "cache", str(folder), "wrong", advice)


def settings_rows() -> Iterator[Row]:
    """Every environment variable that cuflash reads."""
    for setting in settings.SETTINGS:
        given = os.environ.get(setting.name)
        value = given if given else f"default: {setting.default or 'none'}"
        yield line("settings", setting.name, value, "ok", setting.meaning)


def roads() -> Iterator[Row]:
    """What can be done here: tried, not concluded."""
    yield asked("roads", "NumPy arrays", try_numpy)
    yield asked("roads", "compile kernels", try_compile)
    if machine.why_no_gpu() is None:
        yield asked("roads", "GPU arrays", try_gpu)
    else:
        yield line(
            "roads",
            "GPU arrays",
            None,
            "absent",
            f"{machine.why_no_gpu()}; on a GPU machine: {INSTALL}",
        )


def try_numpy() -> str:
    """Compute a small attention on the CPU."""
    import numpy as np

    ones = np.ones((1, 2, 1, 8), np.float32)
    return averaged(cuflash.flash_attn_func(ones, ones, ones))


def try_gpu() -> str:
    """Compute a small attention on the GPU."""
    import cupy

    ones = cupy.ones((1, 2, 1, 8), cupy.float16)
    return averaged(cuflash.flash_attn_func(ones, ones, ones).get())


def averaged(out: Any) -> str:
    """Check an average of ones."""
    if not (out == 1).all():
        raise ArithmeticError(f"an average of ones came out as {out.ravel()[:4]}...")
    return "computed a small attention"


def try_compile() -> str:
    """Compile one kernel, or find it in the cache."""
    from cuflash.cli.compile import asked_for
    from cuflash.gpu.cache import load_or_compile

    (spec,) = asked_for((machine.default_arch(),), dtypes=("fp16",), head_dims=(64,))
    kernel = load_or_compile(spec)
    milliseconds = in_milliseconds(kernel.meta["compile_ms"])
    return f"{spec.kernel} for {kernel.meta['arch']}: {milliseconds} ms, from {kernel.origin}"
