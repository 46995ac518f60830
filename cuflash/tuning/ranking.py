"""Who won, and whether anybody did: ratios of timings taken in turn, and their noise."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from cuflash.tuning.record import Record
from cuflash.tuning.timing import summary

# No two runs of the same kernel are nearer than this.
LEAST_NOISE = 0.003


def finalists(records: Sequence[Record], default: str, count: int = 5) -> list[Record]:
    """Give the fastest candidates, and the heuristic's tile whatever its time, if it ran at all."""
    ran = sorted((r for r in records if r.ok), key=lambda r: r.ms or 0.0)
    chosen = ran[:count]
    return [r for r in ran if r.config == default and r not in chosen] + chosen


def judge(
    records: Sequence[Record], rounds: Mapping[str, Sequence[float]], default: str
) -> tuple[list[Record], Record | None]:
    """Give the records with their verdicts, the winner's among them, and the winner.

    Parameters
    ----------
    records : sequence of Record
    rounds : mapping
        Config of each finalist to its milliseconds, timed in turn.
    default : str
        The heuristic's config. It wins unless another one is faster by more than the noise of
        their ratio; where it did not run, the fastest does.
    """
    judged = {r.config: r for r in records}
    base = rounds.get(default)
    for config, times in rounds.items():
        record = judged[config] = replace(judged[config], final_ms=statistics.median(times))
        if base is None:
            continue
        ratios = summary([b / t for b, t in zip(base, times, strict=True)])
        noise = max(LEAST_NOISE, (ratios.p80 - ratios.p20) / 2)
        verdict = (
            "faster" if ratios.ms - 1 > noise else "slower" if 1 - ratios.ms > noise else "tie"
        )
        if config == default:
            verdict = "default"
        judged[config] = replace(record, ratio=ratios.ms, noise=noise, verdict=verdict)
    finals = [judged[config] for config in rounds]
    if base is None:
        winner = min(finals, key=lambda r: r.final_ms or 0.0, default=None)
    else:
        faster = [r for r in finals if r.verdict == "faster"]
        winner = max(faster, key=lambda r: r.ratio or 0.0, default=judged[default])
    if winner is not None:
        judged[winner.config] = winner = replace(winner, verdict="winner")
    for config, record in judged.items():
        if record.verdict is None:
            judged[config] = replace(record, verdict="slower" if record.ok else record.status)
    return list(judged.values()), winner
