"""Fair timings: warm, on the GPU's own clock, without the cost of launching, with their spread.

Launches of microsecond kernels cost more host time than the kernels take, so calls are captured in a
CUDA graph and replayed: what is timed then is what runs inside a captured step. Kernels that read their
data from memory look faster when the previous repetition left it in L2; ``l2="cold"`` overwrites the
whole cache before each repetition, outside the timed part.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Call = Callable[[], Any]

# A sample is as many calls as fill this, so that the events' half microsecond does not count.
_SAMPLE_MS = 2.0
_MOST_CALLS = 200
_LEAST_SAMPLES, _MOST_SAMPLES = 5, 100


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds of one call: the median, the 20th and 80th percentile, and of how many samples."""

    ms: float
    p20: float
    p80: float
    samples: int

    @property
    def spread(self) -> float:
        """Distance of the percentiles as a fraction of the median: the noise of one sample."""
        return (self.p80 - self.p20) / self.ms if self.ms else 0.0


class Timer(Protocol):
    """What times a call: `GpuTimer`, `HostTimer`, or a test's."""

    def measure(self, call: Call) -> Timing:
        """Time one call by itself."""

    def rounds(self, calls: dict[str, Call], count: int) -> dict[str, list[float]]:
        """Time several calls in turn, ``count`` times; milliseconds of each round."""


def summary(samples: Sequence[float]) -> Timing:
    """Give the median and percentiles of some milliseconds."""
    ordered = sorted(samples)

    def percentile(fraction: float) -> float:
        return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))]

    return Timing(statistics.median(ordered), percentile(0.2), percentile(0.8), len(ordered))


def in_turn(
    sample: Callable[[str], float], names: Sequence[str], count: int
) -> dict[str, list[float]]:
    """Sample each name once a round; every other round goes backwards, so that no place is better."""
    found: dict[str, list[float]] = {name: [] for name in names}
    for number in range(count):
        for name in names if number % 2 == 0 else reversed(names):
            found[name].append(sample(name))
    return found


def samples_within(budget_ms: float, sample_ms: float) -> int:
    """How many samples fit a budget, within bounds that keep a median meaningful and a sweep short."""
    return max(_LEAST_SAMPLES, min(_MOST_SAMPLES, int(budget_ms / max(sample_ms, 1e-6))))


class GpuTimer:
    """Times calls on the current GPU with events.

    Parameters
    ----------
    l2 : {"warm", "cold"}
        What the caches hold when a call starts: what the previous one left, or nothing of use.
    budget : float
        Seconds that one measurement may take, about.
    graph : bool
        Replay a CUDA graph, so that launches cost nothing. The calls must be capturable: no
        allocation of a kind that capture forbids, no host synchronisation.
    """

    def __init__(self, *, l2: str = "warm", budget: float = 0.2, graph: bool = True) -> None:
        import cupy

        if l2 not in ("warm", "cold"):
            raise ValueError(f"l2 is {l2!r}: 'warm' or 'cold' can be asked for")
        self.budget_ms = 1e3 * budget
        self.graph = graph
        self.cupy = cupy
        self.trash = None
        if l2 == "cold":
            size = cupy.cuda.Device().attributes["L2CacheSize"]
            self.trash = cupy.empty(max(4 * size, 1 << 27), cupy.uint8)
        self.start, self.end = cupy.cuda.Event(), cupy.cuda.Event()

    def measure(self, call: Call) -> Timing:
        """Time one call by itself; the GPU is warm when the first sample starts."""
        sample, cost_ms = self._prepare(call)
        return summary([sample() for _ in range(samples_within(self.budget_ms, cost_ms))])

    def rounds(self, calls: dict[str, Call], count: int) -> dict[str, list[float]]:
        """Time calls in turn: a drifting clock favours none of them."""
        ready = {name: self._prepare(call)[0] for name, call in calls.items()}
        return in_turn(lambda name: ready[name](), list(ready), count)

    def _prepare(self, call: Call) -> tuple[Callable[[], float], float]:
        """Warm up; give a function that takes one sample, and what a sample costs in milliseconds."""
        call()  # compiles and loads, if nothing else did
        single = self._elapsed(call)
        if self.trash is not None:
            return (lambda: self._cold(call)), single + 0.1
        count = max(1, min(_MOST_CALLS, int(_SAMPLE_MS / max(single, 1e-3))))
        batch = self._captured(call, count) if self.graph else lambda: _repeat(call, count)
        # Clocks rise within some milliseconds of work: as much again as a sample, at least.
        for _ in range(3):
            cost = self._elapsed(batch)
        return (lambda: self._elapsed(batch) / count), cost

    def _captured(self, call: Call, count: int) -> Call:
        stream = self.cupy.cuda.Stream(non_blocking=True)
        with stream:
            call()
            stream.synchronize()
            stream.begin_capture()
            try:
                _repeat(call, count)
            finally:
                graph = stream.end_capture()
        graph.upload(stream)
        stream.synchronize()
        return lambda: graph.launch(self.cupy.cuda.get_current_stream())

    def _elapsed(self, work: Call) -> float:
        self.start.record()
        work()
        self.end.record()
        self.end.synchronize()
        return float(self.cupy.cuda.get_elapsed_time(self.start, self.end))

    def _cold(self, call: Call) -> float:
        # The flush takes longer than queueing the call, so the events stand around the kernel alone.
        self.trash.fill(0)  # type: ignore[union-attr]
        return self._elapsed(call)


class HostTimer:
    """Times calls on the CPU's clock; parameters as of `GpuTimer`."""

    def __init__(self, *, budget: float = 0.2) -> None:
        self.budget_ms = 1e3 * budget

    def measure(self, call: Call) -> Timing:
        """Time one call by itself, after a first one that does not count."""
        call()
        cost = _host_ms(call)
        return summary([_host_ms(call) for _ in range(samples_within(self.budget_ms, cost))])

    def rounds(self, calls: dict[str, Call], count: int) -> dict[str, list[float]]:
        """Time calls in turn."""
        for call in calls.values():
            call()
        return in_turn(lambda name: _host_ms(calls[name]), list(calls), count)


def _host_ms(call: Call) -> float:
    start = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - start)


def _repeat(call: Call, count: int) -> None:
    for _ in range(count):
        call()
