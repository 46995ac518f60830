"""block_m against block_n: the best of all other axes in each cell, as numbers and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cuflash.errors import MissingDependencyError
from cuflash.gpu.choose import parse_config
from cuflash.tuning.record import Record

Cell = tuple[int, int]


@dataclass(frozen=True)
class HeatMap:
    """The grid of a sweep.

    Attributes
    ----------
    block_m, block_n : list of int
        What was tried, rising.
    best : dict
        (block_m, block_n) to the least milliseconds; cells without a time are absent.
    failed : dict
        (block_m, block_n) to the status of candidates where none ran.
    """

    block_m: list[int]
    block_n: list[int]
    best: dict[Cell, float]
    failed: dict[Cell, str]

    @property
    def fastest(self) -> float:
        """The least time of all cells."""
        return min(self.best.values(), default=0.0)


def heat_map(records: Sequence[Record]) -> HeatMap:
    """Sort a sweep's records into cells."""
    best: dict[Cell, float] = {}
    failed: dict[Cell, str] = {}
    for record in records:
        config = parse_config(record.config)
        cell = (config["block_m"], config["block_n"])
        if record.ok and record.ms is not None:
            best[cell] = min(record.ms, best.get(cell, record.ms))
        else:
            failed.setdefault(cell, record.status)
    cells = best.keys() | failed.keys()
    return HeatMap(
        sorted({m for m, _ in cells}),
        sorted({n for _, n in cells}),
        best,
        {cell: status for cell, status in failed.items() if cell not in best},
    )


def plot(records: Sequence[Record], title: str, path: Path) -> None:
    """Draw the heat map to a file; cells in which nothing ran are hatched.

    Raises
    ------
    MissingDependencyError
        Without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Rectangle
    except ImportError as error:
        raise MissingDependencyError(
            "a plot needs matplotlib: pip install 'cuflash[plot]'"
        ) from error
    found = heat_map(records)
    grid = [[found.best.get((m, n), float("nan")) for n in found.block_n] for m in found.block_m]
    figure = Figure(figsize=(2.5 + 1.1 * len(found.block_n), 2.0 + 0.8 * len(found.block_m)))
    axes = figure.add_subplot()
    image = axes.imshow(grid, cmap="viridis_r", aspect="auto")
    figure.colorbar(image, label="ms, best of stages, warps and registers")
    axes.set_xticks(range(len(found.block_n)), [str(n) for n in found.block_n])
    axes.set_yticks(range(len(found.block_m)), [str(m) for m in found.block_m])
    axes.set_xlabel("block_n")
    axes.set_ylabel("block_m")
    axes.set_title(title, fontsize=9, wrap=True)
    middle = (found.fastest + max(found.best.values(), default=0.0)) / 2
    for row, m in enumerate(found.block_m):
        for column, n in enumerate(found.block_n):
            time = found.best.get((m, n))
            if time is None:
                corner = (column - 0.5, row - 0.5)
                axes.add_patch(Rectangle(corner, 1, 1, hatch="///", fill=False, edgecolor="gray"))
                label, colour = found.failed.get((m, n), "pruned"), "black"
            else:
                label = f"{time:.4g}"
                colour = "white" if time > middle else "black"
            axes.text(column, row, label, ha="center", va="center", color=colour, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
