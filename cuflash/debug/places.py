"""Where in an answer something is wrong, in words: "rows >= 96 of every head"."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cuflash.debug.accuracy import to_numpy

Array = np.ndarray[Any, Any]

OUT_AXES = ("sequence", "row", "head", "column")
LSE_AXES = ("sequence", "head", "row")
# How they are named in words: the innermost first.
_ORDER = ("column", "row", "head", "sequence")
_PERIODS = (2, 4, 8, 16, 32, 64, 128)
_NAMED = 3


@dataclass(frozen=True)
class Extent:
    """Some elements of an array: how many, and along each axis the places that have one."""

    shape: tuple[int, ...]
    count: int
    touched: tuple[Array, ...]

    @property
    def everywhere(self) -> bool:
        """Whether no axis has a place without one."""
        return all(len(t) == n for t, n in zip(self.touched, self.shape, strict=True))

    @property
    def is_block(self) -> bool:
        """Whether all elements at the crossings of the touched places are among them."""
        return self.count == int(np.prod([len(t) for t in self.touched]))


def extent(x: Any, holds: Callable[[Any], Any]) -> Extent:
    """Find the elements of a NumPy or CuPy array for which something holds, a slice at a time."""
    found = [np.zeros(n, bool) for n in x.shape]
    count = 0
    others = tuple(range(x.ndim - 1))
    for first in range(len(x)):
        part = holds(x[first])
        here = int(part.sum())
        if here:
            count += here
            found[0][first] = True
            for axis in others:
                rest = tuple(a for a in others if a != axis)
                found[axis + 1] |= to_numpy(part.any(axis=rest))
    return Extent(tuple(x.shape), count, tuple(np.flatnonzero(f) for f in found))


def in_words(place: Extent, axes: Sequence[str]) -> str:
    """Say where the elements are.

    Parameters
    ----------
    place : Extent
    axes : sequence of str
        What the array's axes are called, such as `OUT_AXES`; packed arrays have no first one.
    """
    axes = axes[len(axes) - len(place.shape) :]
    by_name = dict(zip(axes, zip(place.touched, place.shape, strict=True), strict=True))
    said = [
        _along(name, *by_name[name])
        for name in _ORDER
        if name in by_name and len(by_name[name][0]) < by_name[name][1]
    ]
    total = int(np.prod(place.shape))
    if not said:
        return "everywhere" if place.count == total else f"{place.count} of {total} numbers"
    if not place.is_block:
        return f"{place.count} of {total} numbers, within " + " of ".join(said)
    tail = ""
    if "row" in by_name:
        rows, size = by_name["row"]
        if len(rows) < size:
            if len(by_name["head"][0]) == by_name["head"][1]:
                said.insert(
                    1 + ("column" in by_name and len(by_name["column"][0]) < by_name["column"][1]),
                    "every head",
                )
            if rows[-1] == size - 1 and len(rows) == size - rows[0]:
                tail = f": a ragged tail of {len(rows)}"
    return " of ".join(said) + tail


def _along(name: str, places: Array, size: int) -> str:
    """Say which places along one axis."""
    first, last = int(places[0]), int(places[-1])
    if len(places) == 1:
        return f"{name} {first}"
    if len(places) == last - first + 1:
        if last == size - 1:
            return f"{name}s >= {first}" if name != "head" else f"heads {first}..{last}"
        return (
            f"{name}s < {last + 1}" if first == 0 and name != "head" else f"{name}s {first}..{last}"
        )
    steps = np.unique(np.diff(places))
    if len(steps) == 1:
        return f"every {_ordinal(int(steps[0]))} {name} from {first}"
    for period in _PERIODS:
        inside = np.unique(places % period)
        whole = np.flatnonzero(np.isin(np.arange(size) % period, inside))
        if (
            len(inside) < period
            and len(inside) == inside[-1] - inside[0] + 1
            and np.array_equal(whole, places)
        ):
            return f"{name}s {inside[0]}..{inside[-1]} of every {period}"
    named = ", ".join(str(int(p)) for p in places[:_NAMED])
    return f"{len(places)} {name}s ({named}{', ...' if len(places) > _NAMED else ''})"


def _ordinal(n: int) -> str:
    return {2: "second", 3: "third"}.get(n, f"{n}th")
