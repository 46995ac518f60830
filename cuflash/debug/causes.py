"""Likely causes of a wrong answer: the suspects that fit, and the places where it is wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from cuflash.debug import places
from cuflash.debug.accuracy import LSE_SLACK, Truth, Verdict, lse_difference, to_numpy
from cuflash.debug.places import LSE_AXES, OUT_AXES, Extent
from cuflash.debug.suspects_of_lse import SUSPECTS_OF_LSE
from cuflash.debug.trials import (
    Cause,
    Rows,
    Trial,
    error,
    part_of,
    picked_of,
    rows_of,
    try_orders,
    try_suspects,
)
from cuflash.inputs import Inputs

LONGEST_LIST = 5
_PART = "only a part is wrong"


def likely_causes(
    truth: Truth, inputs: Inputs, out: Any, lse: Any, verdict: Verdict
) -> list[Cause]:
    """Try every suspect on an answer; the likeliest first, none if nothing known fits."""
    if verdict.ok:
        return []
    with np.errstate(all="ignore"):
        rows = [rows_of(sample, out, truth.bound) for sample in truth.samples]
        if not verdict.unwritten and not any(r.wrong.any() for r in rows):
            trials = list(_of_lse(truth, inputs, lse))
        else:
            trials = list(_of_places(truth, inputs, out, rows, verdict))
            if any((r.wrong & r.comparable).any() for r in rows):
                trials += try_orders(truth, inputs, out)
                trials += try_suspects(truth, inputs, rows)
    causes = [trial.cause for trial in sorted(trials, key=lambda trial: trial.rank)]
    # Where a suspect explains all of it, the place that it shows in says no more.
    if causes and causes[0].explains and causes[0].name != _PART:
        causes = [cause for cause in causes if cause.name != _PART]
    return causes[:LONGEST_LIST]


def _of_places(
    truth: Truth, inputs: Inputs, out: Any, rows: Sequence[Rows], verdict: Verdict
) -> Iterator[Trial]:
    """Name what was not written, and what is wrong where the rest is right."""
    rest = max((_largest(r, r.comparable) for r in rows), default=0.0)
    explains = rest <= truth.bound
    rank = (0 if explains else 2, -1.0)
    if verdict.unwritten:
        where = places.in_words(places.extent(out, lambda x: x != x), OUT_AXES)
        yield Trial(Cause(*_why_nan(inputs, rows, where), rest, explains), rank)
    sampled = sum(len(r.got) for r in rows)
    whole = sampled * out.shape[-1] == out.size
    zero, wrong = (np.zeros(out.shape, bool) for _ in range(2)) if whole else (None, None)
    if zero is None or wrong is None:
        return
    for r in rows:
        zero[r.sample.of_out] = r.zero[:, None]
        wrong[r.sample.of_out] = error(r.got, r.sample.out) > truth.bound
    if zero.any():
        where = places.in_words(_extent(zero), OUT_AXES)
        yield Trial(Cause("left at 0", f"{where}; {_LOOK_AT_TILES}", rest, explains), rank)
    elif wrong.any() and not verdict.unwritten:
        extent = _extent(wrong)
        if not extent.everywhere:
            right = max(_largest(r, ~r.wrong) for r in rows)
            advice = f"{places.in_words(extent, OUT_AXES)}; {_LOOK_AT_TILES}"
            yield Trial(Cause(_PART, advice, right, True), (2, 0.0))


_LOOK_AT_TILES = "look at what is special there: a ragged tile, an offset, a bound of the grid"


def _largest(rows: Rows, which: Any) -> float:
    return float(error(rows.got[which], rows.sample.out[which]).max(initial=0))


def _extent(bad: Any) -> Extent:
    return places.extent(bad, lambda x: x)


def _why_nan(inputs: Inputs, rows: Sequence[Rows], where: str) -> tuple[str, str]:
    """Name and advice for an answer with NaN."""
    if any(np.isnan(r.sample.out).any() for r in rows):
        return (
            "NaN in the inputs",
            "q, k or v hold NaN or inf that these rows see: nothing else can come out",
        )
    with_nan = [r for r in rows if r.nan.any()]
    if with_nan and all((r.sample.lse[r.nan] == -np.inf).all() for r in with_nan):
        return (
            "rows that see no key are NaN",
            f"{where}; write 0 where the row sum is 0, and take no maximum of -inf",
        )
    for r in with_nan[:1] + with_nan[-1:]:
        part = part_of(inputs, r.sample, np.flatnonzero(r.nan)[:1])
        part = part.reading(rows_k=part.place.room_k)
        if not (np.isfinite(part.k).all() and np.isfinite(part.v).all()):
            return "NaN behind the mask leaks", (
                f"{where}; k or v hold NaN or inf that no row sees: set hidden scores to -inf rather than add it, and"
                " hidden values to 0, since 0 * NaN is NaN"
            )
    return "not written, or NaN", f"{where}; {_LOOK_AT_TILES}"


def _of_lse(truth: Truth, inputs: Inputs, lse: Any) -> Iterator[Trial]:
    """Name what is wrong with the lse of a right answer."""
    whole = places.extent(lse, lambda x: x != x)
    if whole.count:
        where = places.in_words(whole, LSE_AXES)
        yield Trial(
            Cause("lse not written, or NaN", f"{where}; {_LOOK_AT_TILES}", 0.0, True), (0, 0.0)
        )
        return
    rows = []
    for sample in truth.samples:
        got = to_numpy(lse[sample.of_lse]).astype(np.float64)
        wrong = ~(lse_difference(got, sample.lse) <= LSE_SLACK)
        # Rows without a key are a matter of their own: what a wrong formula makes of them is not known.
        rows.append(Rows(sample, got, wrong, np.isneginf(sample.lse), np.zeros(len(got), bool)))
    if not any((r.wrong & r.comparable).any() for r in rows):
        cause = Cause(
            "lse of rows that see no key",
            "it is -inf there, or the sink if there is one",
            0.0,
            True,
        )
        yield Trial(cause, (0, 0.0))
        return
    tried = [(part_of(inputs, r.sample, at), r.got[at]) for r, at in picked_of(inputs, rows)]
    for suspect in SUSPECTS_OF_LSE:
        if not suspect.when(truth.problem):
            continue
        after = max(float(lse_difference(got, suspect.answer(part)).max()) for part, got in tried)
        if after <= LSE_SLACK:
            yield Trial(Cause(suspect.name, suspect.advice, after, True), (0, after))
