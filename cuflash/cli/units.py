"""Sizes, times and ages as people read and write them."""

from __future__ import annotations

import re
from typing import Any

import click

BYTES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def in_bytes(count: int) -> str:
    """Give a byte count in its largest fitting unit: 232448 is 227 KiB."""
    for unit, size in reversed(BYTES.items()):
        if abs(count) >= size > 1:
            return f"{count / size:.4g} {unit}iB"
    return f"{count} B"


def in_milliseconds(value: float) -> str:
    """Give milliseconds with as many digits as one can feel."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def in_age(seconds: float) -> str:
    """Give a time span in its largest fitting unit: 93784 s is 26 h."""
    for unit in "dhm":
        if seconds >= 2 * SECONDS[unit]:
            return f"{seconds / SECONDS[unit]:.0f} {'min' if unit == 'm' else unit}"
    return f"{seconds:.0f} s"


class _Quantity(click.ParamType[float]):
    """A number with one of some units, such as 500M or 30d."""

    def __init__(self, name: str, pattern: str, units: dict[str, int], example: str) -> None:
        self.name = name
        self.pattern = re.compile(r"(\d+(?:\.\d+)?)\s*" + pattern, re.IGNORECASE)
        self.units = units
        self.example = example

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Turn text into bytes or seconds."""
        if not isinstance(value, str):
            return float(value)
        match = self.pattern.fullmatch(value.strip())
        if match is None:
            self.fail(
                f"{value!r} is not a {self.name}; write for example {self.example}", param, ctx
            )
        number, unit = match.groups()
        units = {key.lower(): size for key, size in self.units.items()}
        return float(number) * units[unit.lower()]


SIZE = _Quantity("size", r"([KMGT]?)i?B?", BYTES, "500M or 2G")
AGE = _Quantity("age", r"([smhdw])", SECONDS, "12h or 30d")
