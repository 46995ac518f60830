"""`cuflash compile`: kernels for any GPU, compiled here and now, with what they take."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cuflash import settings
from cuflash.cli import kernels, listing, machine, resources_diff
from cuflash.cli.failure import in_words
from cuflash.cli.tables import emit, json_option
from cuflash.problem import describe_problem

if TYPE_CHECKING:
    from cuflash.gpu.cache import Kernel
    from cuflash.gpu.spec import KernelSpec


DTYPE = click.Choice(["fp16", "bf16", "fp32"])


@click.command("compile")
@click.option("--all", "everything", is_flag=True, help="All specs that ship for the architecture.")
@click.option(
    "--arch",
    "archs",
    multiple=True,
    metavar="SM",
    help=f"Repeat for several.  [default: this GPU, else {machine.DEFAULT_ARCH}]",
)
@click.option(
    "--dtype", "dtypes", multiple=True, type=DTYPE, help="Repeat for several.  [default: bf16]"
)
@click.option(
    "--head-dim",
    "head_dims",
    multiple=True,
    type=click.IntRange(1, 256),
    help="Of q and k; repeat for several.  [default: 128]",
)
@click.option("--head-dim-v", type=click.IntRange(1, 256), help="Of v.  [default: as --head-dim]")
@click.option("--kernel", metavar="NAME", help="File in kernels_cu.  [default: as chosen]")
@click.option("--block-m", type=click.IntRange(1), help="Query rows of a thread block.")
@click.option("--block-n", type=click.IntRange(1), help="Keys of one step.")
@click.option("--num-warps", type=click.IntRange(1), help="Warps of a thread block.")
@click.option("--num-stages", type=click.IntRange(1), help="K and V tiles in shared memory.")
@click.option("--blocks-per-sm", type=click.IntRange(1), help="Bounds the registers.")
@click.option("--q-in-registers/--q-in-shared", default=None, help="Where q stays.")
@click.option("--softcap", is_flag=True, help="With a softcap.")
@click.option("--alibi", is_flag=True, help="With ALiBi slopes.")
@click.option("--bias", type=DTYPE, help="With a bias of this dtype.")
@click.option(
    "--precision",
    type=click.Choice(["ieee", "tf32"]),
    default="ieee",
    show_default=True,
    help="Of fp32 products.",
)
@click.option(
    "--vector-bytes",
    type=click.Choice(["2", "4", "8", "16"]),
    default="16",
    show_default=True,
    help="Widest load that the arrays allow.",
)
@click.option("--ptx", is_flag=True, help="PTX too: to stdout for one kernel, else with --keep.")
@click.option("--sass", is_flag=True, help="Disassembly too, likewise.")
@click.option(
    "--keep",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Write the .cu, .cubin and .json (.ptx, .sass) of each to DIR.",
)
@click.option(
    "--cubin-dir",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Write each cubin to where CUFLASH_CUBIN_DIR=DIR looks for it.",
)
@click.option(
    "--lineinfo", is_flag=True, help="With line numbers, as CUFLASH_NVRTC_FLAGS=-lineinfo."
)
@click.option(
    "--diff",
    nargs=2,
    metavar="A B",
    help="Resources of two configs side by side, such as block_n=64 block_n=128.",
)
@json_option
@click.pass_context
def compile_command(
    ctx: click.Context,
    /,
    everything: bool,
    archs: tuple[str, ...],
    ptx: bool,
    sass: bool,
    keep: Path | None,
    cubin_dir: Path | None,
    lineinfo: bool,
    diff: tuple[str, str] | None,
    as_json: bool,
    **spec_options: Any,
) -> None:
    """Compile kernels, without a GPU if need be, and show registers, spills and shared memory.

    What is not given is chosen as a call would choose it. Kernels go to the cache, where calls find
    them. Exit code 1 if one does not compile.
    """
    archs = archs or (machine.default_arch(),)
    if lineinfo:
        ctx.with_resource(settings.more_nvrtc_flags("-lineinfo"))
    if diff:
        refuse_with_diff(everything=everything, ptx=ptx, sass=sass, keep=keep, cubin_dir=cubin_dir)
        resources_diff.show(diff, *compiled_pair(archs, diff, spec_options), as_json=as_json)
        return
    if everything:
        refuse_with_all(ctx, spec_options)
        specs = shipped(archs)
    else:
        specs = asked_for(archs, **spec_options)
    to_stdout = (ptx or sass) and keep is None
    if to_stdout and (len(specs) > 1 or (ptx and sass)):
        raise click.UsageError("more than one text of --ptx or --sass needs --keep DIR")
    if sass:
        listing.disassembler()  # before anything is compiled: a missing tool is known at once
    compiled, failures = kernels.compile_specs(specs)
    for spec, error in failures.items():
        click.echo(f"{in_words(error)} ({spec.name})", err=True)
    for kernel in compiled:
        listings = {}
        if ptx:
            listings["ptx"] = listing.ptx(kernel)
        if sass:
            listings["sass"] = listing.sass(kernel)
        if cubin_dir:
            listing.lay_out(cubin_dir, kernel)
        if keep:
            listing.keep(keep, kernel, listings)
        elif listings:
            click.echo("".join(listings.values()))
    if not to_stdout:
        emit([kernels.table(compiled, "Kernels")], as_json=as_json)
    if failures:
        sys.exit(1)


def refuse_with_diff(**others: object) -> None:
    """Refuse --diff beside what is about one list of kernels."""
    for name, value in others.items():
        if value:
            flag = "--all" if name == "everything" else f"--{name.replace('_', '-')}"
            raise click.UsageError(f"--diff shows two kernels' resources: leave out {flag}")


def compiled_pair(
    archs: Sequence[str], diff: tuple[str, str], spec_options: dict[str, Any]
) -> list[Kernel]:
    """Compile the kernels of two configs; the other options hold for both."""
    from cuflash.gpu.cache import load_or_compile
    from cuflash.gpu.choose import parse_config

    pair = []
    for config in diff:
        specs = asked_for(archs, **{**spec_options, **parse_config(config, "--diff")})
        if len(specs) != 1:
            raise click.UsageError("--diff compares one spec: give one --arch, --dtype, --head-dim")
        pair.append(load_or_compile(specs[0]))
    return pair


def refuse_with_all(ctx: click.Context, spec_options: dict[str, Any]) -> None:
    """Refuse --all beside options that would choose a spec."""
    for parameter in ctx.command.params:
        if (
            parameter.name in spec_options
            and ctx.get_parameter_source(parameter.name) is click.core.ParameterSource.COMMANDLINE
        ):
            raise click.UsageError(f"--all compiles what ships: leave out {parameter.opts[0]}")


def shipped(archs: Sequence[str]) -> list[KernelSpec]:
    """Give the specs that ship for these architectures."""
    from cuflash.gpu.shipped import shipped_specs

    return [spec for arch in archs for spec in shipped_specs(arch)]


def asked_for(
    archs: Sequence[str],
    *,
    dtypes: Sequence[str] = (),
    head_dims: Sequence[int] = (),
    head_dim_v: int | None = None,
    softcap: bool = False,
    alibi: bool = False,
    bias: str | None = None,
    precision: str = "ieee",
    vector_bytes: str = "16",
    **tile: Any,
) -> list[KernelSpec]:
    """Let the library choose a spec for each architecture, dtype and head dim, as in a call.

    ``tile`` takes the place of the call's ``config=``.
    """
    from cuflash.gpu.choose import choose
    from cuflash.gpu.device import Device

    config = {name: value for name, value in tile.items() if value is not None}
    combinations = itertools.product(archs, dtypes or ("bf16",), head_dims or (128,))
    specs = [
        choose(
            describe_problem(
                dtype=dtype,
                head_dim=head_dim,
                head_dim_v=head_dim_v,
                softcap=float(softcap),
                alibi=alibi,
                bias=bias,
                precision=precision,
                vector_bytes=int(vector_bytes),
            ),
            Device.from_arch(arch),
            config or None,
        ).spec
        for arch, dtype, head_dim in combinations
    ]
    # Head dims that are padded alike share one kernel.
    return list(dict.fromkeys(specs))
