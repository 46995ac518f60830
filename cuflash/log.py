"""The package's logger: silent unless the program, or CUFLASH_LOG, wants to hear it."""

from __future__ import annotations

import logging
import warnings

from cuflash import settings


def start() -> None:
    """Give the logger no handler, or standard error at the level of CUFLASH_LOG."""
    logger = logging.getLogger("cuflash")
    logger.addHandler(logging.NullHandler())
    level = settings.log_level()
    if level is None:
        return
    if level not in logging.getLevelNamesMapping():
        # Never a reason for `import cuflash` to fail.
        warnings.warn(
            f"CUFLASH_LOG is {level!r}, so nothing is logged: use DEBUG, INFO, WARNING or ERROR",
            stacklevel=3,
        )
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(level)
