"""Trying suspects: on which rows, and whether what remains of the error says that it is the one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cuflash.debug.accuracy import Sample, Truth, to_numpy
from cuflash.debug.parts import Array, Part, Place
from cuflash.debug.suspects import MISPLACED, SUSPECTS, Suspect
from cuflash.inputs import Inputs

# Suspects are tried on so many parts, scores and elements of keys at most: some seconds for all of them.
WRONG_PARTS = 6
RIGHT_PARTS = 2
SCORES = 1 << 20
KEY_ELEMENTS = 1 << 24
# What may remain of an error at most where a suspect explains it, and where it is named without.
EXPLAINED = 0.7
NEARER = 0.25
# Of noise, whose numbers need not agree: how far its size may be from the one expected.
NOISE_FACTOR = 3.0


@dataclass(frozen=True)
class Cause:
    """A likely cause of a wrong answer.

    Attributes
    ----------
    name : str
        What is wrong.
    advice : str
        What to do; for a cause that is a place, where that is.
    error : float
        Largest error that remains if this is the cause.
    explains : bool
        Whether what remains is within what the accuracy rule allows.
    alike : tuple of str
        Names of suspects that give the same answer to this problem.
    """

    name: str
    advice: str
    error: float
    explains: bool
    alike: tuple[str, ...] = ()

    @property
    def in_words(self) -> str:
        """One line."""
        more = "" if self.explains else ": not all of it"
        alike = f"; the same here: {', '.join(self.alike)}" if self.alike else ""
        return f"{self.name}: {self.advice} (error that remains {self.error:.2e}{more}{alike})"


@dataclass(frozen=True)
class Trial:
    """A cause and what it is ranked by: smallest first."""

    cause: Cause
    rank: tuple[int, float]


@dataclass(frozen=True)
class Rows:
    """What a sample got, and which of its rows can be compared at all."""

    sample: Sample
    got: Array
    wrong: Array
    nan: Array
    zero: Array  # though they should not be

    @property
    def comparable(self) -> Array:
        """Rows that were written."""
        return ~(self.nan | self.zero)


def rows_of(sample: Sample, out: Any, bound: float) -> Rows:
    """Look at the rows of a sample."""
    got = to_numpy(out[sample.of_out]).astype(np.float64)
    nan = np.asarray(np.isnan(got).any(-1))
    zero = np.asarray((got == 0).all(-1) & (sample.out != 0).any(-1))
    return Rows(sample, got, np.asarray(~(error(got, sample.out) <= bound).all(-1)), nan, zero)


def error(got: Array, expected: Array) -> Array:
    """Distance of each number; infinite where only one is NaN or they are different infinities."""
    difference = np.abs(got - expected)
    same = (got == expected) | (np.isnan(got) & np.isnan(expected))
    return np.where(np.isnan(difference), np.where(same, 0.0, np.inf), difference)


def try_suspects(truth: Truth, inputs: Inputs, rows: Sequence[Rows]) -> list[Trial]:
    """Compare the answer with what each suspect computes."""
    tried = [
        (part_of(inputs, of_sample.sample, picked), of_sample, picked)
        for of_sample, picked in picked_of(inputs, rows)
    ]
    got = np.concatenate([r.got[picked] for _, r, picked in tried])
    right = np.concatenate([r.sample.out[picked] for _, r, picked in tried])
    before = error(got, right)
    size = max(1.0, float(np.abs(right).max(initial=0)))
    found: list[tuple[Trial, Array]] = []
    for suspect in SUSPECTS:
        if not suspect.when(truth.problem):
            continue
        computed = np.concatenate([suspect.answer(part) for part, _, _ in tried])
        larger = max(1.0, float(np.abs(computed).max(initial=0)) / size)
        after, noise = error(got, computed), np.abs(computed - right)
        trial = judged(suspect, before, after, noise, truth.bound * larger)
        if trial:
            _add(found, trial, computed)
    return [trial for trial, _ in found]


def _add(found: list[tuple[Trial, Array]], trial: Trial, computed: Array) -> None:
    """Add a trial, as its own or, if its answer was there before, under the name it had then."""
    for n, (earlier, same) in enumerate(found):
        if np.allclose(same, computed, rtol=1e-12, atol=1e-12, equal_nan=True):
            cause = earlier.cause
            cause = replace(cause, alike=(*cause.alike, trial.cause.name))
            found[n] = (replace(earlier, cause=cause), same)
            return
    found.append((trial, computed))


def judged(
    suspect: Suspect, before: Array, after: Array, noise: Array, bound: float
) -> Trial | None:
    """Name a suspect under which the answer is right, or much nearer."""
    was, remains = _size(before), _size(after)
    explains = bool(after.max() <= bound and remains <= EXPLAINED * was)
    nearer = remains <= NEARER * was and (suspect.noise or after.max() <= NEARER * before.max())
    if not (explains or nearer or (suspect.noise and _alike(before, noise))):
        return None
    cause = Cause(suspect.name, suspect.advice, float(after.max()), explains)
    # In steps: what is equal up to rounding stays in the order of the table.
    step = round(4 * float(np.log2(remains))) / 4 if remains else -np.inf
    return Trial(cause, (0 if explains else 3 if suspect.noise else 1, step))


def _alike(before: Array, noise: Array) -> bool:
    """Whether errors have the size of some noise, and are spread like it."""
    was, expected = _size(before), _size(noise)
    if not expected or not 1 / NOISE_FACTOR <= was / expected <= NOISE_FACTOR:
        return False
    return bool(before.max() / was <= NOISE_FACTOR * noise.max() / expected)


def _size(x: Array) -> float:
    return float(np.sqrt(np.mean(x**2)))


def try_orders(truth: Truth, inputs: Inputs, out: Any) -> Iterator[Trial]:
    """Bring the whole answer into another order, and look again."""
    for suspect in MISPLACED:
        verdict = truth.verdict(suspect.undo(out, inputs.problem))
        if verdict.max_error <= verdict.bound:
            cause = Cause(suspect.name, suspect.advice, verdict.max_error, True)
            yield Trial(cause, (0, -np.inf))


def picked_of(inputs: Inputs, rows: Sequence[Rows]) -> Iterator[tuple[Rows, Array]]:
    """Choose samples and rows to try suspects on: most of them wrong, all of them written."""
    bad = [r for r in rows if (r.wrong & r.comparable).any()]
    good = [r for r in rows if r.comparable.any() and not (r.wrong & r.comparable).any()]
    problem = inputs.problem
    keys = max(1, problem.seqlen_k)
    most = max(1, KEY_ELEMENTS // (keys * (problem.head_dim + problem.head_dim_v)))
    chosen = spread(bad, min(WRONG_PARTS, most)) + spread(good, min(RIGHT_PARTS, most // 4))
    each = max(4, SCORES // (keys * len(chosen)))
    for r in chosen:
        wrong = np.flatnonzero(r.wrong & r.comparable)
        right = np.flatnonzero(~r.wrong & r.comparable)
        some = spread(wrong, max(each - len(right), 3 * each // 4))
        picked = [*some, *spread(right, each - len(some))]
        yield r, np.sort(np.array(picked, int))


def spread(items: Any, count: int) -> list[Any]:
    """Give so many at most, evenly from first to last."""
    if len(items) <= count:
        return list(items)
    return [items[int(i)] for i in np.unique(np.linspace(0, len(items) - 1, max(0, count)).round())]


def part_of(inputs: Inputs, sample: Sample, picked: Array) -> Part:
    """Give some of a sample's rows as a `Part`."""
    problem = inputs.problem
    first_q, first_k, rows_q, room = 0, 0, problem.seqlen_q, problem.seqlen_k
    b, head = sample.of_sequence, int(sample.of_out[-1])
    if problem.packed:
        first_q, end_q = (int(n) for n in inputs.options["cu_seqlens_q"][b : b + 2])
        first_k, end_k = (int(n) for n in inputs.options["cu_seqlens_k"][b : b + 2])
        rows_q, room = end_q - first_q, end_k - first_k
    counts = inputs.options.get("seqlens_k")
    used = room if counts is None else int(counts[b])
    key_head = head // (problem.nheads_q // problem.nheads_k)
    at = sample.first - first_q + picked
    return Part(inputs, Place(b, head, at, first_q, rows_q, first_k, used, room, b, key_head))
