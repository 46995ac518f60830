"""Some rows of one head of a problem, and the formula for them, any step of which can be changed.

What a wrong kernel may have computed is said in these terms (`suspects`), so nothing here is fast or
clever: float64, one whole matrix of scores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from cuflash.debug.accuracy import to_numpy
from cuflash.inputs import Inputs
from cuflash.reference import weighted

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Place:
    """Which rows of which head, and which keys they read."""

    sequence: int
    head: int
    rows: Array  # places in the sequence
    first_q: int  # row of the sequence's first query in packed arrays, else 0
    rows_q: int
    first_k: int
    rows_k: int  # that count
    room_k: int  # that there are, used or not
    key_sequence: int
    key_head: int


@dataclass(frozen=True)
class Softmax:
    """Softmax before the division: ``weights`` are relative to ``top``, and sum up to ``total``."""

    top: Array
    weights: Array
    total: Array

    @property
    def lse(self) -> Array:
        """Logarithm of the sum of exponentials."""
        return np.where(self.total > 0, self.top + np.log(self.total), -np.inf)


class Part:
    """The rows of a place, in float64; every method's default is what is right."""

    def __init__(self, inputs: Inputs, place: Place) -> None:
        self.inputs = inputs
        self.problem = inputs.problem
        self.place = place
        self.scale, self.cap = self.problem.softmax_scale, self.problem.softcap
        self.left, self.right = (
            float(side) if side >= 0 else np.inf
            for side in (self.problem.window_left, self.problem.window_right)
        )

    def reading(self, **changes: Any) -> Part:
        """Give the part with other keys, or counted in another way."""
        return Part(self.inputs, replace(self.place, **changes))

    @property
    def offset(self) -> int:
        """Key of the diagonal, less the query: the two sequences end together."""
        return self.place.rows_k - self.place.rows_q

    @cached_property
    def q(self) -> Array:
        """Queries of the rows."""
        rows = self.place.first_q + self.place.rows
        x = self.inputs.q if self.problem.packed else self.inputs.q[self.place.sequence]
        # A slice first: only it is a view on a GPU.
        span = x[int(rows[0]) : int(rows[-1]) + 1, self.place.head]
        return to_numpy(span)[rows - rows[0]].astype(np.float64)

    @cached_property
    def k(self) -> Array:
        """Keys that count."""
        return self._keys_of(self.inputs.k)

    @cached_property
    def v(self) -> Array:
        """Values that count."""
        return self._keys_of(self.inputs.v)

    def _keys_of(self, x: Any) -> Array:
        at = self.place
        x = x if self.problem.packed else x[at.key_sequence]
        return to_numpy(x[at.first_k : at.first_k + at.rows_k, at.key_head]).astype(np.float64)

    @cached_property
    def products(self) -> Array:
        """``q @ k.T``."""
        return self.q @ self.k.T

    @cached_property
    def ahead(self) -> Array:
        """Distance of each key from the row's diagonal, negative before it."""
        return np.arange(self.place.rows_k) - (self.place.rows[:, None] + self.offset)

    def bias_of(self, sequence: int, head: int) -> Array:
        """Bias of the rows as some sequence's head has it; zeros where there is none."""
        bias = self.inputs.options.get("bias")
        if bias is None:
            return np.zeros((1, self.place.rows_k))
        while bias.ndim < 4:
            bias = bias[None]
        plane = bias[min(sequence, bias.shape[0] - 1), min(head, bias.shape[1] - 1)]
        picked = to_numpy(plane if plane.shape[0] == 1 else plane[self.place.rows])
        return picked[:, : self.place.rows_k].astype(np.float64)

    @cached_property
    def _whole_bias(self) -> Array:
        return self.bias_of(self.place.sequence, self.place.head)

    @cached_property
    def hidden(self) -> Array:
        """Where the bias hides a key."""
        return np.isneginf(self._whole_bias)

    @cached_property
    def bias(self) -> Array:
        """What the bias adds, 0 where it hides."""
        return np.where(self.hidden, 0.0, self._whole_bias)

    @property
    def slope(self) -> float:
        """ALiBi slope of the head."""
        slopes = self.inputs.options.get("alibi_slopes")
        if slopes is None:
            return 0.0
        at = self.place
        return float(slopes[at.sequence, at.head] if slopes.ndim == 2 else slopes[at.head])

    @property
    def sink(self) -> float:
        """Sink of the head."""
        sinks = self.inputs.options.get("sink")
        return -np.inf if sinks is None else float(sinks[self.place.head])

    def seen(
        self, ahead: Array | None = None, left: float | None = None, right: float | None = None
    ) -> Array:
        """Which keys the rows see, by their distance and the window."""
        ahead = self.ahead if ahead is None else ahead
        left = self.left if left is None else left
        right = self.right if right is None else right
        return (ahead >= -left) & (ahead <= right) & ~self.hidden

    def scores(
        self,
        scale: float | None = None,
        cap: float | None = None,
        bias: Array | float | None = None,
        slope: float | None = None,
        distance: Array | None = None,
        inside: Array | float = 0.0,
        products: Array | None = None,
    ) -> Array:
        """Scores before the mask; ``inside`` is added before the cap."""
        scale = self.scale if scale is None else scale
        cap = self.cap if cap is None else cap
        products = self.products if products is None else products
        scores = scale * products + inside
        if cap:
            scores = cap * np.tanh(scores / cap)
        distance = np.abs(self.ahead) if distance is None else distance
        slope = self.slope if slope is None else slope
        return scores + (self.bias if bias is None else bias) - slope * distance

    def softmax(
        self,
        scores: Array | None = None,
        visible: Array | None = None,
        sink: float | None = None,
    ) -> Softmax:
        """Exponentials of the visible scores."""
        scores = self.scores() if scores is None else scores
        visible = self.seen() if visible is None else visible
        sink = self.sink if sink is None else sink
        scores = np.where(visible, scores, -np.inf)
        top = np.maximum(scores.max(-1, initial=-np.inf), sink)
        top = np.where(np.isneginf(top), 0.0, top)
        weights = np.exp(scores - top[:, None])
        return Softmax(top, weights, weights.sum(-1) + np.exp(sink - top))

    def attend(
        self,
        scores: Array | None = None,
        visible: Array | None = None,
        sink: float | None = None,
        v: Array | None = None,
    ) -> Array:
        """Give the answer's rows."""
        softmax = self.softmax(scores, visible, sink)
        return self.summed(softmax.weights, softmax.total, v)

    def summed(self, weights: Array, total: Array, v: Array | None = None) -> Array:
        """Values by weights, divided; a row without weights is 0."""
        divisor = np.where(total == 0, 1.0, total)[:, None]
        return weighted(weights, self.v if v is None else v, weights > 0) / divisor

    def not_rescaled(self, tile: int, backwards: bool, sum_too: bool) -> Array:
        """Online softmax over tiles of keys whose sums stay as they are when the maximum grows."""
        scores = np.where(self.seen(), self.scores(), -np.inf)
        if backwards:  # tiles keep their borders: the ragged one comes first
            scores = np.pad(scores, ((0, 0), (0, -scores.shape[1] % tile)), constant_values=-np.inf)
            scores = scores[:, ::-1]
        tops = [scores[:, j : j + tile].max(-1) for j in range(0, scores.shape[1], tile)]
        running = np.maximum(np.maximum.accumulate(np.array(tops)), self.sink)
        running = np.where(np.isneginf(running), 0.0, running)
        weights = np.exp(scores - np.repeat(running, tile, 0)[: scores.shape[1]].T)
        if backwards:
            weights = weights[:, ::-1][:, : self.place.rows_k]
        total = self.softmax().total
        if sum_too:
            total = weights.sum(-1) + np.exp(self.sink - running[-1])
        return self.summed(weights, total)

    def rounded(self, to: Callable[[Array], Array]) -> Array:
        """Give the answer when the factors of both products are rounded."""
        softmax = self.softmax(self.scores(products=to(self.q) @ to(self.k).T))
        return self.summed(to(softmax.weights), softmax.total, to(self.v))

    def summed_low(self, to: Callable[[Array], Array], step: int = 16) -> Array:
        """Give the answer when its sum is rounded after every few keys."""
        softmax = self.softmax()
        sums = np.zeros((len(self.q), self.v.shape[1]))
        for j in range(0, self.place.rows_k, step):
            part = softmax.weights[:, j : j + step]
            sums = to(sums + weighted(part, self.v[j : j + step], part > 0))
        return sums / np.where(softmax.total == 0, 1.0, softmax.total)[:, None]

    def over_heads(self) -> Array:
        """Give the answer when rows and heads change places: each row's heads attend to each other."""
        at, problem = self.place, self.problem
        rows = at.first_q + at.rows
        k, v = (
            to_numpy(x[rows] if problem.packed else x[at.sequence, rows]).astype(np.float64)
            for x in (self.inputs.k, self.inputs.v)
        )
        scores = self.scale * np.einsum("nd,nhd->nh", self.q, k)
        if self.cap:
            scores = self.cap * np.tanh(scores / self.cap)
        ahead = np.arange(problem.nheads_k) - (at.head + problem.nheads_k - problem.nheads_q)
        scores = np.where((ahead >= -self.left) & (ahead <= self.right), scores, -np.inf)
        top = scores.max(-1, keepdims=True, initial=-np.inf)
        weights = np.exp(scores - np.where(np.isneginf(top), 0.0, top))
        total = weights.sum(-1, keepdims=True)
        return np.einsum("nh,nhd->nd", weights, v) / np.where(total == 0, 1.0, total)


def to_bits(bits: int, rounding: Callable[[Array], Array] = np.rint) -> Callable[[Array], Array]:
    """Give a function that rounds to so many bits after the leading one: tf32, fp16 10, bf16 7."""

    def to(x: Array) -> Array:
        mantissa, exponent = np.frexp(x)
        return np.ldexp(rounding(np.ldexp(mantissa, bits + 1)), exponent - bits - 1)

    return to
