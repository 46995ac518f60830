"""`cuflash.tune`: sweep the tiles of some problems on this GPU and keep the winners."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from cuflash.errors import CudaError, CuflashError, InvalidArgumentError
from cuflash.gpu.device import Device
from cuflash.problem import AttentionProblem
from cuflash.tuning import space as spaces
from cuflash.tuning import store
from cuflash.tuning import workbench as benches
from cuflash.tuning.operation import OPERATIONS
from cuflash.tuning.sweep import HANG_SECONDS, Progress, Result, sweep
from cuflash.tuning.workbench import Workbench, WorkerLost, WorkerRefused


def tune(
    problems: AttentionProblem | Iterable[AttentionProblem],
    *,
    op: str = "forward",
    space: str | Mapping[str, Any] | None = None,
    budget: float | None = None,
    jobs: int | None = None,
    resume: bool = False,
    save: bool = True,
    seed: int = 0,
    l2: str = "warm",
    seconds: float = 0.15,
    device: int = 0,
    hang_seconds: float = HANG_SECONDS,
    observe: Callable[[Progress], None] = lambda _: None,
    planned: Callable[[spaces.Plan], None] = lambda _: None,
    command: Iterable[str] | None = None,
) -> list[Result]:
    """Find the fastest tile of each problem on a GPU, and let later calls use it.

    Every candidate is compiled, checked against float64 on an output full of NaN, and timed, in a
    process of its own kind that is replaced when one crashes or hangs it. The fastest five and the
    heuristic's tile are timed again in turn; only one that is faster by more than the noise replaces
    the heuristic's.

    Parameters
    ----------
    problems : AttentionProblem or iterable of them
        See `cuflash.describe_problem`.
    op : {"forward"}
    space : str or mapping, optional
        Values of some axes instead of the usual ones: ``"block_m=64,128 num_stages=2"``.
    budget : float, optional
        Seconds for each problem, after which no further candidate is started.
    jobs : int, optional
        Compilers side by side; by default one less than there are cores.
    resume : bool
        Take up what an interrupted sweep of the same problem measured.
    save : bool
        Put the winners in this GPU's tuned table.
    seed : int
        Of the random arrays.
    l2 : {"warm", "cold"}
        What the GPU's cache holds when a kernel starts: what the last one left, or nothing of use.
    seconds : float
        How long to time each candidate.
    device : int
        Which GPU.
    hang_seconds : float
        How long a candidate may take before its process is killed.
    observe : callable
        Gets a `Progress` as results come in.
    planned : callable
        Gets the plan of each problem before it starts.
    command : iterable of str
        What runs candidates; only tests have a reason to change it.

    Returns
    -------
    list of Result
        One a problem, in their order: its records, the fastest first, and the winner.

    Raises
    ------
    CuflashError
        For arguments that are wrong, a GPU that cannot be used, or a file that cannot be written.
    """
    if op not in OPERATIONS:
        raise InvalidArgumentError(f"op is {op!r}: {', '.join(OPERATIONS)} can be tuned")
    if l2 not in ("warm", "cold"):
        raise InvalidArgumentError(f"l2 is {l2!r}: 'warm' or 'cold' can be asked for")
    asked = [problems] if isinstance(problems, AttentionProblem) else list(problems)
    request = {
        "do": "prepare",
        "op": op,
        "seed": seed,
        "l2": l2,
        "seconds": seconds,
        "device": device,
    }
    worker = list(command or benches.COMMAND)
    results = []
    for problem in asked:
        with Workbench({**request, "problem": problem.options}, worker) as workbench:
            try:
                gpu = Device(**workbench.prepare()["gpu"])
                plan = spaces.plan(problem, gpu, space)
                planned(plan)
                result = sweep(
                    plan,
                    workbench,
                    op=op,
                    budget=budget,
                    jobs=jobs,
                    resume=resume,
                    hang_seconds=hang_seconds,
                    observe=observe,
                )
            except WorkerRefused as refused:
                raise CudaError(f"candidates cannot be run here: {refused}") from refused
            except WorkerLost as lost:
                raise CudaError(f"candidates cannot be run here: {lost}") from lost
        results.append(result)
        if save and result.entry is not None:
            store.save(store.identity(gpu), [result.entry])
            _forget_choices()
    return results


def _forget_choices() -> None:
    """Let this process's next calls choose anew; without CuPy there is nothing to forget."""
    try:
        from cuflash.gpu.forward import forget
    except (ImportError, CuflashError):
        return
    forget()
