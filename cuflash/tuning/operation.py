"""What can be tuned: an operation with its arrays, its calls and its right answers.

The tuner, `bench` and `dev` know operations by this table alone. A new one (backward, decode) is a
class like `Forward`, an entry in `OPERATIONS`, and a space for its kernels in `space.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from cuflash.debug.accuracy import Truth, Verdict
from cuflash.inputs import random_inputs
from cuflash.problem import AttentionProblem


class Trial(Protocol):
    """One problem's arrays, on which candidates are checked and timed."""

    def check(self, config: Any) -> Verdict:
        """Run with a config on poisoned outputs and compare with float64."""

    def call(self, config: Any) -> Callable[[], Any]:
        """Give the call to time: it allocates nothing, so that it can be captured."""


class Forward:
    """Trial of the forward pass.

    Parameters
    ----------
    problem : AttentionProblem
    xp : module
        ``cupy``, or ``numpy`` for the CPU road, which has no configs.
    seed : int
    """

    def __init__(self, problem: AttentionProblem, xp: Any = np, seed: int = 0) -> None:
        self.inputs = random_inputs(problem, xp, seed)
        self.truth = Truth(self.inputs)
        self.out = self.inputs.out()

    def check(self, config: Any) -> Verdict:
        """Run with a config on an output full of NaN; out and lse are compared."""
        out = self.inputs.out()
        _, lse = self.inputs.attend(config=config, out=out, return_lse=True)
        return self.truth.verdict(out, lse)

    def call(self, config: Any) -> Callable[[], Any]:
        """Give a call that writes to one array, again and again."""
        return lambda: self.inputs.attend(config=config, out=self.out)


OPERATIONS: dict[str, Callable[..., Trial]] = {"forward": Forward}
