"""A measured row as the lines of a CSV: one for each peer, since peers come and go from run to run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cuflash.debug.accuracy import Verdict
from cuflash.tuning.bench import BenchRow
from cuflash.tuning.peer_calls import mask_of
from cuflash.tuning.timing import Timing

COLUMNS = (
    "problem", "dtype", "batch", "seqlen_q", "seqlen_k", "nheads_q", "nheads_k", "head_dim", "head_dim_v", "mask",
    "config", "kernel", "tile", "ms", "p20", "p80", "rounds", "tflops", "gbs", "max_error", "bound", "verdict",
    "peer", "peer_version", "peer_ms", "peer_p20", "peer_p80", "peer_tflops", "peer_max_error", "peer_verdict", "ratio",
)  # fmt: skip


def records(row: BenchRow) -> Iterator[dict[str, Any]]:
    """Give a row's lines of `COLUMNS`: one for each peer, or one without."""
    problem, verdict = row.problem, row.verdict
    sizes = (
        "dtype",
        "batch",
        "seqlen_q",
        "seqlen_k",
        "nheads_q",
        "nheads_k",
        "head_dim",
        "head_dim_v",
    )
    common = {
        "problem": problem.in_words, **{name: getattr(problem, name) for name in sizes},
        "mask": mask_of(problem), "config": row.config or "", "kernel": row.plan.kernel, "tile": row.plan.tile,
        **_figures("", row.timing, row.tflops, verdict), "rounds": row.timing.samples,
        "gbs": f"{row.gbs:.4g}", "bound": f"{verdict.bound:.3g}",
    }  # fmt: skip
    if not row.peers:
        yield common
    for name, result in row.peers.items():
        yield common | {
            "peer": name, "peer_version": result.version, "ratio": f"{result.ratio:.4f}",
            **_figures("peer_", result.timing, result.tflops, result.verdict),
        }  # fmt: skip


def _figures(prefix: str, timing: Timing, tflops: float, verdict: Verdict) -> dict[str, str]:
    return {
        f"{prefix}ms": f"{timing.ms:.5g}", f"{prefix}p20": f"{timing.p20:.5g}", f"{prefix}p80": f"{timing.p80:.5g}",
        f"{prefix}tflops": f"{tflops:.4g}", f"{prefix}max_error": f"{verdict.max_error:.3g}",
        f"{prefix}verdict": "OK" if verdict.ok else "FAIL",
    }  # fmt: skip
