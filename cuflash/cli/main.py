"""The ``cuflash`` command: its subcommands, and how an error or a warning reaches a person."""

from __future__ import annotations

import warnings
from typing import Any, TextIO

import click

import cuflash
from cuflash.cli.bench import bench
from cuflash.cli.cache import cache
from cuflash.cli.check import check
from cuflash.cli.compile import compile_command
from cuflash.cli.demo import demo
from cuflash.cli.dev import dev
from cuflash.cli.env import env
from cuflash.cli.failure import CleanError
from cuflash.cli.show import show
from cuflash.cli.tune import tune
from cuflash.errors import CuflashError


def show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Print a warning to stderr without the source line that raised it, which is not the user's."""
    click.echo(f"warning: {message}", err=True)


class CleanGroup(click.Group):
    """A group whose commands end in one message where the library raised one of its own errors."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; exit code 1 for a `CuflashError`, as click's is 2 for wrong usage."""
        if ctx.params.get("debug"):
            return super().invoke(ctx)
        try:
            with warnings.catch_warnings():
                warnings.showwarning = show_warning
                return super().invoke(ctx)
        except CuflashError as error:
            raise CleanError(error) from error


@click.group(cls=CleanGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(cuflash.__version__, prog_name="cuflash")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def main(debug: bool) -> None:
    """FlashAttention for CuPy: try it, tune it, check it, work on its kernels.

    Results go to stdout as a table on a terminal, as tab-separated values when piped, and as JSON
    with --json; everything else goes to stderr. Exit codes: 0 all went well, 1 something failed or
    an answer was wrong, 2 wrong usage.
    """


for command in (demo, compile_command, dev, env, cache, tune, bench, check, show):
    main.add_command(command)
