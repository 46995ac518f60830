"""A sweep: compile candidates side by side, run each in a worker as it is ready, judge the fastest."""

from __future__ import annotations

import hashlib
import json
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import cuflash
from cuflash import settings
from cuflash.errors import CuflashError
from cuflash.gpu import cache, compiler, toolchain
from cuflash.gpu.occupancy import occupancy
from cuflash.gpu.render import kernel_digest
from cuflash.gpu.spec import KernelSpec
from cuflash.tuning import ranking, store
from cuflash.tuning.bucket import bucket_of
from cuflash.tuning.journal import Journal
from cuflash.tuning.record import Record
from cuflash.tuning.space import SPACES, Candidate, Plan
from cuflash.tuning.workbench import Workbench, WorkerLost

# A kernel of the sizes that are tuned takes milliseconds; one that takes this long hangs.
HANG_SECONDS = 60.0
# A tile that keeps the compiler busy for longer is too large to be any good.
COMPILE_SECONDS = 60.0
FINAL_ROUNDS = 15
# What a candidate costs at the least, for the estimate: check and timing; a compile on one core.
_RUN_SECONDS, _COMPILE_SECONDS = 0.4, 1.3


@dataclass(frozen=True)
class Progress:
    """What a sweep tells while it goes on."""

    total: int
    compiled: int
    measured: int
    latest: Record | None
    best: Record | None


@dataclass(frozen=True)
class Result:
    """A finished sweep: records of all candidates that were tried, and the winner.

    Attributes
    ----------
    plan : Plan
        The problem, the GPU, the candidates and what was pruned.
    records : list of Record
        The fastest first, then those that failed.
    winner : Record or None
        None where no candidate worked.
    complete : bool
        Whether all candidates were tried: not when the budget ran out.
    resumed : int
        Candidates that an earlier run had measured.
    versions : dict
    """

    plan: Plan
    records: list[Record]
    winner: Record | None
    complete: bool
    resumed: int
    versions: dict[str, str]

    @property
    def default(self) -> Record | None:
        """The record of the heuristic's tile."""
        return next((r for r in self.records if r.config == self.plan.default.name), None)

    @property
    def entry(self) -> store.Entry | None:
        """What the tuned table keeps of this sweep; None without a winner."""
        winner, default = self.winner, self.default
        if winner is None or winner.final_ms is None:
            return None
        candidate = next(c for c in self.plan.candidates if c.name == winner.config)
        return store.Entry(
            bucket=bucket_of(self.plan.problem),
            config=candidate.config,
            kernel_digest=kernel_digest(candidate.spec.kernel),
            problem=self.plan.problem.in_words,
            ms=winner.final_ms,
            default_ms=(default and default.final_ms) or winner.final_ms,
            verdict="tie" if winner.config == self.plan.default.name else "faster",
            versions=self.versions,
        )


def estimate_seconds(plan: Plan, jobs: int) -> float:
    """Guess how long a sweep takes when nothing is compiled yet."""
    count = len(plan.candidates)
    return 5.0 + max(count * _RUN_SECONDS, count * _COMPILE_SECONDS / max(1, jobs)) + 2.0


def default_jobs() -> int:
    """Compilers that run side by side where the user says nothing: one core stays for the timing."""
    return max(1, len(os.sched_getaffinity(0)) - 1)


def journal_path(plan: Plan, op: str) -> Path:
    """The file of a sweep: found again by GPU, operation and problem."""
    what = json.dumps([store.identity(plan.device), op, plan.problem.options], sort_keys=True)
    digest = hashlib.sha256(what.encode()).hexdigest()[:12]
    return settings.cache_dir() / "sweeps" / f"{bucket_of(plan.problem, op).kind}-{digest}.jsonl"


def sweep(
    plan: Plan,
    workbench: Workbench,
    *,
    op: str = "forward",
    budget: float | None = None,
    jobs: int | None = None,
    resume: bool = False,
    hang_seconds: float = HANG_SECONDS,
    rounds: int = FINAL_ROUNDS,
    observe: Callable[[Progress], None] = lambda _: None,
) -> Result:
    """Measure the candidates of a plan and judge the fastest.

    A candidate that does not compile, does not launch, answers wrong, crashes or hangs is a record
    with its reason. Ctrl-C leaves what was measured in the sweep's file.

    Parameters
    ----------
    plan : Plan
    workbench : Workbench
        Prepared, or to be, for the plan's problem.
    op : str
    budget : float, optional
        Seconds after which no further candidate is started.
    jobs : int, optional
        Compilers side by side.
    resume : bool
        Take up what an interrupted sweep of this problem has measured.
    hang_seconds : float
        How long a candidate may take to answer.
    rounds : int
        Timings of each finalist, in turn.
    observe : callable
        Gets a `Progress` after each step.

    Raises
    ------
    CuflashError
        If no worker can be had, or the sweep's file cannot be written or resumed.
    """
    versions = {**workbench.prepare().get("versions", {}), "cuflash": cuflash.__version__}
    deadline = time.monotonic() + budget if budget else None
    header = {
        "op": op,
        "gpu": store.identity(plan.device),
        "problem": plan.problem.in_words,
        "kernels": {kernel: kernel_digest(kernel) for kernel in sorted(SPACES)},
        "nvrtc": toolchain.identity()["nvrtc"],
    }
    with Journal(journal_path(plan, op), header, resume=resume) as journal:
        done = [journal.done[c.name] for c in plan.candidates if c.name in journal.done]
        waiting = [c for c in plan.candidates if c.name not in journal.done]
        records, resumed = list(done), len(done)
        with _compiled(waiting, jobs or default_jobs()) as compiled:
            for candidate, error, count in compiled:
                record = _measure(candidate, error, workbench, hang_seconds, plan)
                journal.add(record)
                records.append(record)
                observe(
                    Progress(
                        len(plan.candidates), resumed + count, len(records), record, _best(records)
                    )
                )
                if deadline and time.monotonic() > deadline:
                    break
    complete = len(records) == len(plan.candidates)
    records, winner = _judge(records, plan, workbench, rounds, hang_seconds)
    records.sort(key=lambda r: (not r.ok, r.final_ms or r.ms or 0.0))
    return Result(plan, records, winner, complete, resumed, versions)


def _best(records: Sequence[Record]) -> Record | None:
    return min((r for r in records if r.ok), key=lambda r: r.ms or 0.0, default=None)


@contextmanager
def _compiled(
    candidates: Sequence[Candidate], jobs: int
) -> Iterator[Iterator[tuple[Candidate, CuflashError | None, int]]]:
    """Compile in threads; yield (candidate, its error, how many are compiled) as they are ready."""
    stop = threading.Event()
    ready: queue.Queue[tuple[Candidate, Future[cache.Kernel]]] = queue.Queue()
    # NVRTC holds no lock while it optimises, so threads are enough.
    pool = ThreadPoolExecutor(jobs, thread_name_prefix="cuflash-compile")

    def compile_within(spec: KernelSpec) -> cache.Kernel:
        with compiler.time_limit(COMPILE_SECONDS, stop):
            return cache.load_or_compile(spec)

    def start(candidate: Candidate) -> None:
        future = pool.submit(compile_within, candidate.spec)
        future.add_done_callback(lambda done: ready.put((candidate, done)))

    def in_order_of_readiness() -> Iterator[tuple[Candidate, CuflashError | None, int]]:
        for taken in range(1, len(candidates) + 1):
            candidate, future = ready.get()
            error = future.exception()
            if error is not None and not isinstance(error, CuflashError):
                raise error
            yield candidate, error, taken + ready.qsize()

    for candidate in candidates:
        start(candidate)
    try:
        yield in_order_of_readiness()
    finally:
        stop.set()
        pool.shutdown(wait=False, cancel_futures=True)


def _measure(
    candidate: Candidate,
    compile_error: CuflashError | None,
    workbench: Workbench,
    hang_seconds: float,
    plan: Plan,
) -> Record:
    record = Record(candidate.name, candidate.spec.name, "error")
    if compile_error is not None:
        return replace(record, status="compile", error=str(compile_error))
    try:
        answer = workbench.ask({"do": "measure", "config": candidate.config}, hang_seconds)
    except WorkerLost as lost:
        return replace(record, status=lost.status, error=str(lost))
    record = Record.from_dict({**record.as_dict(), **answer})
    if record.registers and record.shared_bytes is not None:
        resident = occupancy(
            plan.device, registers=record.registers, shared_bytes=record.shared_bytes,
            threads=candidate.spec.threads,
        )  # fmt: skip
        record = replace(record, blocks_per_sm=resident.blocks)
    return record


def _judge(
    records: list[Record], plan: Plan, workbench: Workbench, rounds: int, hang_seconds: float
) -> tuple[list[Record], Record | None]:
    """Time the finalists in turn; if a worker is lost at that, once more without more ado."""
    default = plan.default.name
    finals = ranking.finalists(records, default)
    if not finals:
        return ranking.judge(records, {}, default)
    configs = {c.name: c.config for c in plan.candidates}
    request = {
        "do": "finals",
        "configs": {r.config: configs[r.config] for r in finals},
        "rounds": rounds,
    }
    for last in (False, True):
        try:
            answer = workbench.ask(request, hang_seconds * len(finals))
            break
        except WorkerLost:
            if last:
                raise
    return ranking.judge(records, answer["rounds"], default)
