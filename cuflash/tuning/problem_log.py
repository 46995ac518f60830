"""A file of problems that calls have asked for: written with CUFLASH_RECORD, read by `--from-log`.

One JSON object a line, with the arguments of `describe_problem`; a person may write such a file, too.
"""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path

from cuflash.errors import CuflashError, InvalidArgumentError, TuningWarning
from cuflash.problem import AttentionProblem, describe_problem


def append(path: Path, problem: AttentionProblem) -> None:
    """Add a problem; a file that cannot be written costs a warning, never the call."""
    line = json.dumps(problem.options) + "\n"
    try:
        # One write in append mode, so that lines of several processes do not mix.
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o664)
        try:
            os.write(file, line.encode())
        finally:
            os.close(file)
    except OSError as error:
        warnings.warn(
            f"CUFLASH_RECORD={path} cannot be written ({error.strerror}): problems are not recorded",
            TuningWarning,
            stacklevel=2,
        )


def read(path: Path) -> list[AttentionProblem]:
    """Read the problems of a file, each once, in the order of their first call.

    Raises
    ------
    InvalidArgumentError
        For a file that cannot be read, or a line that is no problem; names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"the log {path} cannot be read ({error})") from error
    found: dict[AttentionProblem, None] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found[describe_problem(**json.loads(line))] = None
        except (ValueError, TypeError, CuflashError) as error:
            raise InvalidArgumentError(
                f"{path}:{number} is no recorded problem ({error}): a JSON object such as"
                ' {"dtype": "bf16", "seqlen_q": 4096} is needed'
            ) from error
    if not found:
        raise InvalidArgumentError(
            f"{path} holds no problem: run the program with CUFLASH_RECORD={path} first"
        )
    return list(found)
