"""Bars of TFLOP/s by sequence length: one picture for each dtype, head dim and mask, all peers side by side."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cuflash.errors import InvalidArgumentError, MissingDependencyError
from cuflash.problem import AttentionProblem
from cuflash.tuning.bench import BenchRow

_COLUMNS = 3
_HEIGHT, _WIDTH = 3.2, 4.6  # inches of one picture


def require_matplotlib() -> None:
    """Refuse early, before an hour of measuring.

    Raises
    ------
    MissingDependencyError
        If matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingDependencyError("plots need matplotlib: pip install 'cuflash[plot]'")


def draw(rows: Sequence[BenchRow], path: Path) -> None:
    """Draw rows into an image file, whose ending says its format.

    Raises
    ------
    MissingDependencyError
        If matplotlib is not installed.
    InvalidArgumentError
        If the file cannot be written.
    """
    require_matplotlib()
    # Not pyplot: it would choose a window system, and keep the figure.
    from matplotlib.figure import Figure

    groups: dict[str, list[BenchRow]] = {}
    for row in rows:
        groups.setdefault(_title(row.problem), []).append(row)
    across = min(_COLUMNS, len(groups)) or 1
    down = -(-len(groups) // across) or 1
    figure = Figure(figsize=(_WIDTH * across, _HEIGHT * down), layout="constrained")
    axes = figure.subplots(down, across, squeeze=False).flat
    for axis, (title, of_group) in zip(axes, groups.items(), strict=False):
        _bars(axis, of_group)
        axis.set_title(title, fontsize="medium")
    for axis in list(axes)[len(groups) :]:
        axis.set_visible(False)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(f"the plot {path} cannot be written: {error}") from error


def series(rows: Sequence[BenchRow]) -> dict[str, dict[str, float]]:
    """Give TFLOP/s by who computed, cuflash first, and by the label of the problem."""
    label = labels(rows)
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        name = "cuflash" if row.config is None else f"cuflash {row.config}"
        found.setdefault(name, {})[label[row.problem]] = row.tflops
        for peer, result in row.peers.items():
            found.setdefault(peer, {})[label[row.problem]] = result.tflops
    return dict(sorted(found.items(), key=lambda item: not item[0].startswith("cuflash")))


def labels(rows: Sequence[BenchRow]) -> dict[AttentionProblem, str]:
    """Give each problem's length, with its batch where two have the same length."""
    lengths = {row.problem: _length(row.problem) for row in rows}
    often = Counter(lengths.values())
    return {
        problem: length if often[length] == 1 else f"{length}\nbatch {problem.batch}"
        for problem, length in lengths.items()
    }


def _bars(axis: Any, rows: Sequence[BenchRow]) -> None:
    bars = series(rows)
    ticks = list(dict.fromkeys(labels(rows).values()))
    width = 0.85 / len(bars)
    for number, (name, values) in enumerate(bars.items()):
        offset = (number - (len(bars) - 1) / 2) * width
        present = [(i + offset, values[tick]) for i, tick in enumerate(ticks) if tick in values]
        axis.bar([x for x, _ in present], [y for _, y in present], width, label=name)
    axis.set_xticks(range(len(ticks)), ticks)
    axis.set_xlabel("sequence length")
    axis.set_ylabel("TFLOP/s")
    axis.legend(fontsize="x-small")


def _length(problem: AttentionProblem) -> str:
    q, k = problem.seqlen_q, problem.seqlen_k
    return str(q) if q == k else f"{q}x{k}"


def _title(problem: AttentionProblem) -> str:
    """What the bars of one picture have in common: all but batch and lengths."""
    sizes = ("batch=", "seqlen=", "rows=")
    return " ".join(word for word in problem.in_words.split() if not word.startswith(sizes))
