"""One problem, timed: cuflash with each config, and every peer that can do it, in turn in one run.

A ratio is the median of the rounds' ratios, since the clock of a GPU drifts more from second to second
than kernels differ. Every answer is checked against float64 before anything is timed.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cuflash import plan
from cuflash.debug.accuracy import Truth, Verdict, to_numpy
from cuflash.inputs import Inputs, random_inputs
from cuflash.problem import AttentionProblem
from cuflash.tuning import peer_calls
from cuflash.tuning.peers import Peer
from cuflash.tuning.timing import Call, Timer, Timing, summary

ROUNDS = 20
BUDGET = 5.0
# Fewer make no median; an even count, since timers go through their calls forwards and backwards by turns.
LEAST_ROUNDS = 4
_LONGEST_REASON = 200


@dataclass(frozen=True)
class PeerResult:
    """What a peer did with a problem.

    Attributes
    ----------
    timing : Timing
    tflops : float
    ratio : float
        Its time over cuflash's, the median of the rounds: above 1, cuflash is faster.
    verdict : Verdict
        Of its answer.
    version : str
    """

    timing: Timing
    tflops: float
    ratio: float
    verdict: Verdict
    version: str


@dataclass(frozen=True)
class BenchRow:
    """One problem with one config.

    Attributes
    ----------
    problem : AttentionProblem
    config : str or None
        As asked for; None for the tile that is chosen.
    plan : Plan
        The kernel and tile that ran.
    timing : Timing
        Of the rounds.
    tflops, gbs : float
        By the rule of `work`; q, k, v and the answer moved once.
    verdict : Verdict
        Of cuflash's answer.
    to_first : float
        Time of the first config over this one's, the median of the rounds.
    peers : dict
        `PeerResult` by name.
    absent : dict
        Why the other peers are not among them, by name.
    """

    problem: AttentionProblem
    config: str | None
    plan: plan.Plan
    timing: Timing
    tflops: float
    gbs: float
    verdict: Verdict
    to_first: float = 1.0
    peers: dict[str, PeerResult] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)

    @property
    def wrong_peers(self) -> list[str]:
        """Peers whose answer breaks the accuracy rule; their speed says nothing."""
        return [name for name, result in self.peers.items() if not result.verdict.ok]


def measure(
    problem: AttentionProblem,
    configs: Sequence[str | None] = (None,),
    peers: Sequence[Peer] = (),
    *,
    timer: Timer,
    rounds: int = ROUNDS,
    budget: float = BUDGET,
    xp: Any = np,
    seed: int = 0,
) -> list[BenchRow]:
    """Check and time one problem.

    Parameters
    ----------
    problem : AttentionProblem
    configs : sequence of str or None
        As ``config=`` takes them; None is the tile that is chosen.
    peers : sequence of Peer
    timer : Timer
        On a GPU one that does not capture: torch's calls may not be.
    rounds : int
        How often each call is timed.
    budget : float
        Seconds after which there are no more rounds, about; `LEAST_ROUNDS` there are.
    xp : module
        numpy or cupy.
    seed : int
        Of the random numbers.

    Returns
    -------
    list of BenchRow
        One for each config.

    Raises
    ------
    CuflashError
        For a problem or a config that cuflash refuses. What a peer raises keeps the peer out.
    """
    on_gpu = xp is not np
    absent = {peer.name: reason for peer in peers if (reason := _why_out(peer, problem, on_gpu))}
    present = [peer for peer in peers if peer.name not in absent]
    try:
        with peer_calls.one_queue(on_gpu):
            inputs = random_inputs(problem, xp, seed)
            return _rows(inputs, configs, present, absent, timer, rounds, budget)
    finally:
        peer_calls.release(on_gpu)


def _rows(
    inputs: Inputs,
    configs: Sequence[str | None],
    peers: Sequence[Peer],
    absent: dict[str, str],
    timer: Timer,
    rounds: int,
    budget: float,
) -> list[BenchRow]:
    """Check and time what can do the problem; a peer that fails goes to the absent ones."""
    truth = Truth(inputs)
    calls: dict[str, Call] = {}
    ours = {}
    for config in dict.fromkeys(configs):
        name = f"cuflash {config or ''}"
        ours[name] = (config, *_checked(inputs, truth, config))
        calls[name] = functools.partial(inputs.attend, config=config)
    theirs = {}
    for peer in peers:
        try:
            call = peer.prepare(inputs)
            theirs[peer.name] = (peer.version, truth.verdict(peer.answer(call())))
        except Exception as error:  # whatever it is, this peer cannot do it and the others can
            absent[peer.name] = _in_words(error)
            continue
        calls[peer.name] = call
    found = timed(timer, calls, rounds, budget)
    flops, moved = work(inputs)
    results = {
        name: (summary(found[name]), _rate(flops, found[name]) / 1e3, verdict, version)
        for name, (version, verdict) in theirs.items()
    }
    first = found[next(iter(ours))]
    rows = []
    for name, (config, verdict, ran) in ours.items():
        ms = found[name]
        against = {
            peer: PeerResult(timing, tflops, ratio(found[peer], ms), of_peer, version)
            for peer, (timing, tflops, of_peer, version) in results.items()
        }
        rows.append(BenchRow(
            inputs.problem, config, ran, summary(ms), _rate(flops, ms) / 1e3, _rate(moved, ms), verdict,
            ratio(first, ms), against, absent,
        ))  # fmt: skip
    return rows


def timed(
    timer: Timer, calls: dict[str, Call], rounds: int, budget: float
) -> dict[str, list[float]]:
    """Time calls in turn, for as many rounds as are asked for and the budget has room for."""
    start = time.perf_counter()
    first = min(rounds, LEAST_ROUNDS)
    found = timer.rounds(calls, first)
    spent = time.perf_counter() - start
    more = min(rounds - first, int((budget - spent) / max(spent / first, 1e-9)))
    if more > 0:
        for name, ms in timer.rounds(calls, more).items():
            found[name] = [*found[name], *ms]
    return found


def ratio(of: Sequence[float], to: Sequence[float]) -> float:
    """Median of the ratios of two calls' milliseconds, round by round."""
    return statistics.median(a / b for a, b in zip(of, to, strict=True))


def work(inputs: Inputs) -> tuple[int, int]:
    """Count operations and bytes: products as `AttentionProblem.flops` has it, each array moved once.

    Packed sequences are counted one by one, by the same rule.
    """
    problem = inputs.problem
    rows = inputs.q.size // max(1, problem.head_dim)
    moved = sum(x.size * x.itemsize for x in (inputs.q, inputs.k, inputs.v))
    moved += rows * problem.head_dim_v * inputs.q.itemsize
    if not problem.packed:
        return problem.flops, moved
    lengths_q, lengths_k = (
        np.ediff1d(to_numpy(inputs.options[f"cu_seqlens_{side}"]).astype(np.int64)) for side in "qk"
    )
    scores = problem.nheads_q * int((lengths_q * lengths_k).sum())
    flops = 2 * scores * (problem.head_dim + problem.head_dim_v)
    return flops // (2 if problem.causal else 1), moved


def _why_out(peer: Peer, problem: AttentionProblem, on_gpu: bool) -> str | None:
    return peer.why_absent(on_gpu) or peer.why_not(problem)


def _checked(inputs: Inputs, truth: Truth, config: str | None) -> tuple[Verdict, plan.Plan]:
    """Run once, into an array full of NaN; give the verdict and the plan."""
    out = inputs.out()
    inputs.attend(config=config, out=out)
    ran = plan.last_plan()
    assert ran is not None
    return truth.verdict(out), ran


def _in_words(error: Exception) -> str:
    text = f"failed with {type(error).__name__}: {' '.join(str(error).split())}"
    return text if len(text) <= _LONGEST_REASON else text[: _LONGEST_REASON - 3] + "..."


def _rate(amount: int, ms: Sequence[float]) -> float:
    """Billions a second."""
    return amount / statistics.median(ms) / 1e6 if amount else 0.0
