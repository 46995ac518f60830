"""What a wrong answer may come from: a table, of which each entry says what would then be computed.

An entry is tried on some rows of the problem: where the answer given is near what the entry computes,
the entry is the likely cause. To add one, add a line; entries whose answers are alike stand with the
likelier one first.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cuflash.debug.parts import Array, Part, to_bits
from cuflash.problem import AttentionProblem

When = Callable[[AttentionProblem], Any]

# Bits after the leading one.
MANTISSA = {"bf16": 7, "fp16": 10, "fp32": 23, "fp64": 52}
TILES = (16, 32, 64, 128, 256)


def always(problem: AttentionProblem) -> bool:
    """Hold for every problem."""
    return True


@dataclass(frozen=True)
class Suspect:
    """One way to go wrong.

    Attributes
    ----------
    name : str
        What is wrong.
    advice : str
        What to do about it.
    answer : function of a `Part`
        What is computed then: the rows of out, or, for a suspect of the lse, of that.
    when : function of an `AttentionProblem`
        Whether the problem has what the suspect is about.
    noise : bool
        Errors have the size that this gives, but need not agree in each number.
    """

    name: str
    advice: str
    answer: Callable[[Part], Array]
    when: When = always
    noise: bool = False


@dataclass(frozen=True)
class Misplaced:
    """A right answer in another order; ``undo`` of the whole answer and its problem brings it back."""

    name: str
    advice: str
    undo: Callable[[Any, AttentionProblem], Any]


def bounded(problem: AttentionProblem) -> bool:
    """Whether a window or the causal mask hides keys."""
    return problem.window_left >= 0 or problem.window_right >= 0


def masked(problem: AttentionProblem) -> bool:
    """Whether anything may hide keys."""
    return bounded(problem) or problem.bias is not None


def grouped(problem: AttentionProblem) -> bool:
    """Whether query heads share key heads."""
    return problem.nheads_k < problem.nheads_q


def interleaved(p: Part) -> int:
    """Give the key head when heads are dealt out in turn."""
    return p.place.head % p.problem.nheads_k


def _packed_keys(p: Part) -> Part:
    """All sequences as one."""
    at, problem = p.place, p.problem
    return p.reading(
        rows=at.rows + at.first_q, first_q=0, rows_q=problem.seqlen_q, first_k=0, rows_k=problem.seqlen_k
    )  # fmt: skip


# fmt: off
def _padded(n: int) -> Suspect:
    return Suspect(f"scale of a head dim padded to {n}", "take 1/sqrt of the true head dim, not of the padded one",
                   lambda p: p.attend(p.scores(scale=n**-0.5)), lambda a: a.head_dim < n)


def _tail_not_read(n: int) -> Suspect:
    return Suspect(f"keys behind the last whole tile of {n} not read", "run the ragged last tile too, masked",
                   lambda p: p.attend(visible=p.seen() & (np.arange(p.place.rows_k) < p.place.rows_k // n * n)))


def _padding_counted(n: int) -> Suspect:
    return Suspect(f"padding of the last tile of {n} keys counted",
                   "hide keys from seqlen_k on: filled with zeros they have score 0, and a share of the sum",
                   lambda p: p.attend(sink=float(np.logaddexp(p.sink, np.log(-p.place.rows_k % n)))),
                   lambda a: a.window_right < 0)


def _first_keys(n: int) -> Suspect:
    return Suspect(f"only the first {n} keys read", "look at the bound of the loop over tiles of keys",
                   lambda p: p.attend(visible=p.seen() & (np.arange(p.place.rows_k) < n)))


def _not_rescaled(n: int, back: bool, both: bool) -> Suspect:
    what = "accumulator and sum" if both else "accumulator"
    return Suspect(f"{what} not rescaled, tiles of {n} keys{' from last to first' if back else ''}",
                   "when the row's maximum grows, multiply what was summed so far by exp(old - new)",
                   lambda p: p.not_rescaled(n, back, both))


MASKS = (
    Suspect("causal mask missing", "hide key j from query i where j > i + seqlen_k - seqlen_q",
            lambda p: p.attend(visible=p.seen(right=np.inf)), lambda a: a.window_right == 0),
    Suspect("causal mask not asked for", "pass causal=True to both, or to neither",
            lambda p: p.attend(visible=p.seen(right=0)), lambda a: a.window_right < 0),
    Suspect("causal mask of the top left corner",
            "the diagonal ends at the last query and the last key: j <= i + seqlen_k - seqlen_q, not j <= i",
            lambda p: p.attend(visible=p.seen(ahead=p.ahead + p.offset)), bounded),
    Suspect("causal mask of the top left corner, not asked for",
            "pass causal=True to both, or to neither; the diagonal ends at the last query and the last key",
            lambda p: p.attend(visible=p.seen(ahead=p.ahead + p.offset, right=0)), lambda a: a.window_right < 0),
    Suspect("diagonal of the padded length", "take seqlen_k of the diagonal from seqlens_k, not from k's shape",
            lambda p: p.attend(visible=p.seen(ahead=p.ahead + p.place.rows_k - p.place.room_k)),
            lambda a: a.seqlens_k and bounded(a)),
    Suspect("right bound off by one: a key less", "the bound is inclusive: compare with <=, not <",
            lambda p: p.attend(visible=p.seen(right=p.right - 1)), lambda a: a.window_right >= 0),
    Suspect("right bound off by one: a key more", "the bound is j <= i + off + right: look for a < or a + 1",
            lambda p: p.attend(visible=p.seen(right=p.right + 1)), lambda a: a.window_right >= 0),
    Suspect("left bound off by one: a key less", "the window is inclusive: j >= i + off - left, so left + 1 keys",
            lambda p: p.attend(visible=p.seen(left=p.left - 1)), lambda a: a.window_left >= 0),
    Suspect("left bound off by one: a key more", "the window is j >= i + off - left: look for a - 1",
            lambda p: p.attend(visible=p.seen(left=p.left + 1)), lambda a: a.window_left >= 0),
    Suspect("window swapped", "window_size is (left, right): keys before the diagonal first",
            lambda p: p.attend(visible=p.seen(left=p.right, right=p.left)), bounded),
    Suspect("window's left bound missing", "hide key j where j < i + off - left",
            lambda p: p.attend(visible=p.seen(left=np.inf)), lambda a: a.window_left >= 0),
    Suspect("window's right bound missing", "hide key j where j > i + off + right",
            lambda p: p.attend(visible=p.seen(right=np.inf)), lambda a: a.window_right > 0),
    Suspect("window missing", "no bound of the window is applied",
            lambda p: p.attend(visible=~p.hidden & (p.ahead == p.ahead)), lambda a: a.window_left >= 0),
    Suspect("mask inverted", "it shows what it should hide: a boolean mask may mean True = hidden there",
            lambda p: p.attend(visible=~p.seen()), masked),
    Suspect("the bias's -inf does not hide", "a bias of -inf hides its key, also where 0 * inf would be NaN",
            lambda p: p.attend(visible=(p.ahead >= -p.left) & (p.ahead <= p.right)), lambda a: a.bias),
    Suspect("seqlens_k ignored", "keys from seqlens_k[b] on do not count, for the diagonal neither",
            lambda p: p.reading(rows_k=p.place.room_k).attend(), lambda a: a.seqlens_k),
    Suspect("sequences not kept apart", "rows of cu_seqlens_q see only their own sequence's keys",
            lambda p: _packed_keys(p).attend(), lambda a: a.packed),
)
SCORES = (
    Suspect("scale missing", "multiply q @ k.T by softmax_scale (default 1/sqrt(head_dim))",
            lambda p: p.attend(p.scores(scale=1.0))),
    Suspect("scale applied twice", "scale q or the scores, not both",
            lambda p: p.attend(p.scores(scale=p.scale**2))),
    Suspect("scale 1/head_dim", "the default is 1/sqrt(head_dim)",
            lambda p: p.attend(p.scores(scale=1 / p.problem.head_dim))),
    Suspect("scale is the default one", "softmax_scale was given: use it, not 1/sqrt(head_dim)",
            lambda p: p.attend(p.scores(scale=p.problem.head_dim**-0.5))),
    Suspect("scale of v's head dim", "the default is 1/sqrt(head_dim) of q and k",
            lambda p: p.attend(p.scores(scale=p.problem.head_dim_v**-0.5))),
    *(_padded(n) for n in (16, 32, 64, 96, 128, 192, 256)),
    Suspect("log2(e) missing", "exp2 needs scores times log2(e) = 1.442695",
            lambda p: p.attend(p.scores() * math.log(2))),
    Suspect("log2(e) too much", "exp takes the scores as they are: log2(e) belongs to exp2",
            lambda p: p.attend(p.scores() / math.log(2))),
    Suspect("scale's sign", "scores are +scale * q @ k.T",
            lambda p: p.attend(p.scores(scale=-p.scale))),
    Suspect("softcap missing", "scores become softcap * tanh(score / softcap), before bias and mask",
            lambda p: p.attend(p.scores(cap=0.0)), lambda a: a.softcap),
    Suspect("softcap before the scale", "the cap takes scale * q @ k.T",
            lambda p: p.attend(p.scale * p.cap * np.tanh(p.products / p.cap) + p.scores() - p.scores(bias=0, slope=0)),
            lambda a: a.softcap),
    Suspect("softcap without its factor", "it is softcap * tanh(score / softcap): multiply by softcap after tanh",
            lambda p: p.attend(p.scores() - (1 - 1 / p.cap) * p.scores(bias=0, slope=0)), lambda a: a.softcap),
    Suspect("ALiBi missing", "subtract slope * abs(i + off - j) from the scores",
            lambda p: p.attend(p.scores(slope=0.0)), lambda a: a.alibi),
    Suspect("ALiBi's sign", "the distance is subtracted: far keys count less for a positive slope",
            lambda p: p.attend(p.scores(slope=-p.slope)), lambda a: a.alibi),
    Suspect("ALiBi without abs", "the distance is abs(i + off - j): it matters for keys behind the diagonal",
            lambda p: p.attend(p.scores(distance=-p.ahead)), lambda a: a.alibi),
    Suspect("ALiBi's distance from the top left corner", "the distance is abs(i + seqlen_k - seqlen_q - j)",
            lambda p: p.attend(p.scores(distance=np.abs(p.ahead + p.offset))), lambda a: a.alibi),
    Suspect("ALiBi before the scale", "slope * distance is subtracted after the scale and the cap",
            lambda p: p.attend(p.scores(slope=0.0, inside=-p.scale * p.slope * np.abs(p.ahead))), lambda a: a.alibi),
    Suspect("bias missing", "add the bias to the scores, after scale and softcap",
            lambda p: p.attend(p.scores(bias=0.0), p.seen()), lambda a: a.bias),
    Suspect("bias missing, with what it hides", "add the bias to the scores; -inf in it hides a key",
            lambda p: p.attend(p.scores(bias=0.0), (p.ahead >= -p.left) & (p.ahead <= p.right)), lambda a: a.bias),
    Suspect("bias before the softcap", "the order is scale, softcap, bias, mask",
            lambda p: p.attend(p.scores(bias=0.0, inside=p.bias)), lambda a: a.bias and a.softcap),
    Suspect("bias before the scale", "the bias is added after the scale: scale * q @ k.T + bias",
            lambda p: p.attend(p.scores(bias=p.scale * p.bias)), lambda a: a.bias),
    Suspect("bias's sign", "the bias is added",
            lambda p: p.attend(p.scores(bias=-p.bias)), lambda a: a.bias),
    Suspect("bias of head 0 for all heads", "step by the bias's stride from head to head",
            lambda p: p.attend(p.scores(bias=p.bias_of(p.place.sequence, 0))), lambda a: a.bias),
    Suspect("bias of sequence 0 for all", "step by the bias's stride from sequence to sequence",
            lambda p: p.attend(p.scores(bias=p.bias_of(0, p.place.head))), lambda a: a.bias),
)
SUMS = (
    Suspect("not divided by the row sum", "divide by the sum of exponentials once all keys are seen",
            lambda p: p.summed(p.softmax().weights, np.ones(len(p.q)))),
    Suspect("neither divided nor the maximum taken", "divide by the sum of exponentials once all keys are seen",
            lambda p: p.attend() * np.exp(p.softmax().lse)[:, None]),
    Suspect("softmax missing", "the weights are softmax(scores), not the scores",
            lambda p: p.summed(np.where(p.seen(), p.scores(), 0.0), np.ones(len(p.q)))),
    Suspect("sink missing", "add exp(sink - max) to the sum of each row, without a value",
            lambda p: p.attend(sink=-np.inf), lambda a: a.sink),
    Suspect("sink scaled", "the sink is a logit: neither softmax_scale nor softcap touches it",
            lambda p: p.attend(sink=p.sink * p.scale), lambda a: a.sink),
    Suspect("sink is 0", "read the sink's own logit for each query head",
            lambda p: p.attend(sink=0.0), lambda a: a.sink),
    *(_tail_not_read(n) for n in TILES),
    *(_padding_counted(n) for n in TILES),
    *(_first_keys(n) for n in TILES),
    *(_not_rescaled(n, back, both) for both in (False, True) for n in TILES for back in (False, True)),
)
READS = (
    Suspect("key heads interleaved", "query head h reads key head h // (nheads_q // nheads_k), not h % nheads_k",
            lambda p: p.reading(key_head=interleaved(p)).attend(), grouped),
    Suspect("all heads read key head 0", "step by the strides of k and v from head to head",
            lambda p: p.reading(key_head=0).attend()),
    Suspect("all sequences read keys of sequence 0", "step by the strides of k and v from sequence to sequence",
            lambda p: p.reading(key_sequence=0).attend(), lambda a: not a.packed),
    Suspect("k and v swapped", "the order of arguments is q, k, v",
            lambda p: p.attend(p.scores(products=p.q @ p.v.T), v=p.k), lambda a: a.head_dim == a.head_dim_v),
    Suspect("v is k", "the second product takes v, not k again",
            lambda p: p.attend(v=p.k), lambda a: a.head_dim == a.head_dim_v),
    Suspect("k is v", "the first product takes k, not v",
            lambda p: p.attend(p.scores(products=p.q @ p.v.T)), lambda a: a.head_dim == a.head_dim_v),
    Suspect("rows and heads swapped: heads attend to each other",
            'the arrays were read as the other layout: pass layout="bhsd" (or "bshd"), or transpose axes 1 and 2',
            lambda p: p.over_heads(), lambda a: a.seqlen_q == a.seqlen_k and not (a.alibi or a.bias or a.sink)),
)
PRECISION = (
    Suspect("products in tf32 or fp16", "use more exact products: 3xTF32, or plain FMA; in torch allow_tf32 = False",
            lambda p: p.rounded(to_bits(10)), lambda a: MANTISSA[a.dtype] > 10, noise=True),
    Suspect("products in tf32, cut off", "round inputs with cvt.rna.tf32; exact products need 3xTF32, or plain FMA",
            lambda p: p.rounded(to_bits(10, np.trunc)), lambda a: MANTISSA[a.dtype] > 10, noise=True),
    Suspect("products in bf16", "keep inputs and weights in a dtype that holds them",
            lambda p: p.rounded(to_bits(7)), lambda a: MANTISSA[a.dtype] > 7, noise=True),
    Suspect("products in fp32", "keep float64 throughout",
            lambda p: p.rounded(to_bits(23)), lambda a: MANTISSA[a.dtype] > 23, noise=True),
    Suspect("answer rounded to fp16", "write the answer in its own dtype",
            lambda p: to_bits(10)(p.attend()), lambda a: MANTISSA[a.dtype] > 10, noise=True),
    Suspect("answer rounded to bf16", "write the answer in its own dtype",
            lambda p: to_bits(7)(p.attend()), lambda a: MANTISSA[a.dtype] > 7, noise=True),
    Suspect("sums in the dtype of the inputs", "accumulate in float32, and round once at the end",
            lambda p: p.summed_low(to_bits(MANTISSA[p.problem.dtype])),
            lambda a: a.dtype in ("fp16", "bf16"), noise=True),
)
SUSPECTS = MASKS + SCORES + SUMS + READS + PRECISION

MISPLACED = (
    Misplaced("answer in the other layout", "rows and heads of out have changed places: transpose before the reshape",
              lambda out, a: (out.reshape(a.nheads_q, a.seqlen_q, -1).swapaxes(0, 1) if a.packed else
                              out.reshape(a.batch, a.nheads_q, a.seqlen_q, -1).swapaxes(1, 2))),
)
# fmt: on
