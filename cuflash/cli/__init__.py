"""The command line, and the only code of the package that prints."""

from cuflash.cli.main import main

__all__ = ["main"]
