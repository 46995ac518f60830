"""An error of the library as a person reads it."""

from __future__ import annotations

from typing import Any

import click

from cuflash.errors import CuflashError


def in_words(error: CuflashError) -> str:
    """Give an error's code and message."""
    return f"error {error.code.name} ({int(error.code)}): {error}"


class CleanError(click.ClickException):
    """A `CuflashError` without a traceback; it ends the command with exit code 1."""

    def __init__(self, error: CuflashError) -> None:
        super().__init__(in_words(error))

    def show(self, file: Any = None) -> None:
        """Print the message to stderr."""
        click.echo(self.message, err=True)
