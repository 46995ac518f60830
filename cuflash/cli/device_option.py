"""The options that say which GPU a command is about: one that is here, one by name, or an architecture."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import click

from cuflash.cli import machine
from cuflash.gpu.device import Device

Command = TypeVar("Command", bound=Callable[..., Any])


def device_options(command: Command) -> Command:
    """Give a command --arch and --gpu; it gets what they say as ``device``."""

    @functools.wraps(command)
    def asking(*args: Any, arch: str | None, gpu: str | None, **kwargs: Any) -> Any:
        return command(*args, device=asked_device(arch, gpu), **kwargs)

    wrapped: Any = asking
    wrapped = click.option(
        "--gpu", metavar="NAME", help='A GPU by its name, such as "H100" or "RTX 4090".'
    )(wrapped)
    return click.option(
        "--arch",
        metavar="SM",
        help=f"The usual GPU of an architecture.  [default: this GPU, else {machine.DEFAULT_ARCH}]",
    )(wrapped)


def asked_device(arch: str | None, gpu: str | None) -> Device:
    """Give the GPU that the options ask for, else the one here, else the usual one.

    Raises
    ------
    CuflashError
        For a name or an architecture that nobody knows.
    """
    if arch is not None and gpu is not None:
        raise click.UsageError("--arch or --gpu says which GPU: leave one out")
    if gpu is not None:
        return named(gpu)
    if arch is not None or machine.why_no_gpu() is not None:
        return Device.from_arch(arch or machine.DEFAULT_ARCH)
    import cupy

    from cuflash.gpu import launch

    return launch.device_info(cupy.cuda.Device().id)


def named(name: str) -> Device:
    """Describe a GPU by its name: one that a table was tuned on, else a well-known one."""
    from cuflash.gpu import peaks
    from cuflash.tuning import store

    for table in store.all_tables() + store.shipped_tables():
        if table.gpu["name"].lower() == name.lower():
            usual = Device.from_arch(f"sm_{table.gpu['compute_capability']}")
            return replace(usual, **table.gpu)
    return peaks.device(name)
