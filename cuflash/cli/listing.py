"""PTX and SASS of a kernel, and the folders that `cuflash compile` fills."""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cuflash.errors import CompileError, MissingDependencyError

if TYPE_CHECKING:
    from cuflash.gpu.cache import Kernel


def ptx(kernel: Kernel) -> str:
    """Compile a kernel's text once more for its PTX, which the cache does not keep."""
    from cuflash.gpu.compiler import compile_source
    from cuflash.gpu.render import render

    text = compile_source(render(kernel.spec), kernel.meta["arch"], ptx=True).ptx
    return (text or b"").decode()


def disassembler() -> str:
    """Find nvdisasm: on PATH, in its wheel or in a CUDA toolkit.

    Raises
    ------
    MissingDependencyError
        Saying what to install.
    """
    advice = (
        "--sass needs nvdisasm, which was found neither on PATH nor in a wheel nor in CUDA_PATH:"
        " pip install 'cuflash[sass]'"
    )
    try:
        from cuda.pathfinder import find_nvidia_binary_utility
    except ImportError as error:
        raise MissingDependencyError(advice) from error
    found = find_nvidia_binary_utility("nvdisasm")
    if not found:
        raise MissingDependencyError(advice)
    return str(found)


def sass(kernel: Kernel) -> str:
    """Disassemble a kernel's machine code."""
    program = disassembler()
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(kernel.cubin)
        done = subprocess.run([program, "-c", cubin], capture_output=True, text=True)
    if done.returncode:
        raise CompileError(f"{program} cannot read {kernel.spec.name}: {done.stderr.strip()}")
    return done.stdout


def keep(folder: Path, kernel: Kernel, listings: dict[str, str]) -> None:
    """Write a kernel's text, machine code, report and listings, named by architecture and spec."""
    from cuflash.gpu.render import render

    stem = f"{kernel.meta['arch']}-{kernel.spec.name}"
    texts = {"cu": render(kernel.spec).text, "json": json.dumps(kernel.meta, indent=1), **listings}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{stem}.cubin").write_bytes(kernel.cubin)
        for suffix, text in texts.items():
            (folder / f"{stem}.{suffix}").write_text(text, encoding="utf-8")
    except OSError as error:
        raise click.ClickException(f"cannot write to {folder}: {error.strerror}") from error


def lay_out(folder: Path, kernel: Kernel) -> None:
    """Write a kernel's machine code to where it is looked for when CUFLASH_CUBIN_DIR is the folder.

    What lies there and differs is somebody's work, and stays.
    """
    from cuflash.gpu.cache import OVERRIDE, override_path

    if kernel.origin == OVERRIDE:
        raise click.ClickException(
            f"{kernel.meta['path']} is not what NVRTC makes: unset CUFLASH_CUBIN_DIR first"
        )
    path = override_path(folder, kernel.spec)
    try:
        if path.exists() and path.read_bytes() != kernel.cubin:
            raise click.ClickException(
                f"{path} was edited, or made with other options: delete it, or name another folder"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(kernel.cubin)
    except OSError as error:
        raise click.ClickException(f"cannot write {path}: {error.strerror}") from error
