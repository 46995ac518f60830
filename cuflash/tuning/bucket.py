"""Which problems share a tuned entry.

A bucket has a kind, which must be the same, and sizes rounded up to powers of two, of which the nearest
will do: a tile that is best for 4096 rows is a good guess for 3000.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from cuflash.problem import AttentionProblem

# Doublings, all sizes together, up to which another bucket's tile is taken.
NEAR = 2.0
# Heads of a group change what is found in L2, and little else.
_GROUP_WEIGHT = 0.5


@dataclass(frozen=True, slots=True)
class Bucket:
    """The problems that one tuned entry is for.

    Attributes
    ----------
    kind : str
        Operation, dtype, head dims, mask and modifiers.
    seqlen_q, seqlen_k : int
        Rounded up; of packed sequences the mean.
    heads : int
        Heads of all batches, rounded up.
    group : int
        Query heads of a key head, rounded up.
    """

    kind: str
    seqlen_q: int
    seqlen_k: int
    heads: int
    group: int

    @property
    def name(self) -> str:
        """Readable key."""
        return f"{self.kind}/q{self.seqlen_q}-k{self.seqlen_k}-h{self.heads}-g{self.group}"

    def distance(self, other: Bucket) -> float:
        """Doublings between the sizes of two buckets; infinite for another kind."""
        if self.kind != other.kind:
            return math.inf
        sizes = ("seqlen_q", "seqlen_k", "heads")
        far = sum(abs(math.log2(getattr(self, s) / getattr(other, s))) for s in sizes)
        return far + _GROUP_WEIGHT * abs(math.log2(self.group / other.group))


def bucket_of(problem: AttentionProblem, op: str = "forward") -> Bucket:
    """Give the bucket of a problem."""
    sequences = max(1, problem.batch) if problem.packed else 1
    return Bucket(
        kind(problem, op),
        _rounded(problem.seqlen_q // sequences),
        _rounded(problem.seqlen_k // sequences),
        _rounded(problem.batch * problem.nheads_q),
        _rounded(problem.nheads_q // problem.nheads_k),
    )


def kind(problem: AttentionProblem, op: str) -> str:
    """Everything of a problem that is no size."""
    left, right = problem.window_left, problem.window_right
    if problem.causal:
        mask = "causal"
    elif left < 0 and right < 0:
        mask = "full"
    else:
        mask = f"window{'' if left < 0 else _rounded(left)}_{'' if right < 0 else _rounded(right)}"
    flags = (
        ("packed", problem.packed),
        ("softcap", problem.softcap > 0),
        ("alibi", problem.alibi),
        (f"bias_{problem.bias}", problem.bias),
        (problem.precision, problem.precision != "ieee"),
        (f"load{problem.vector_bytes}", problem.vector_bytes != 16),
    )
    parts = [op, problem.dtype, f"d{problem.head_dim}v{problem.head_dim_v}", mask]
    return "-".join(parts + [flag for flag, on in flags if on])


def _rounded(size: int) -> int:
    return 1 << max(0, size - 1).bit_length() if size > 1 else 1
