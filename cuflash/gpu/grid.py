"""How many thread blocks a launch has: known from the problem alone, so a machine without a GPU can tell."""

from __future__ import annotations

from cuflash.errors import InvalidDimensionError
from cuflash.problem import AttentionProblem

_MAX_BLOCKS = 2**31 - 1


def grid(problem: AttentionProblem, block_m: int) -> tuple[int, int]:
    """Thread blocks of the launch, and blocks of rows (of a sequence; packed: of a head)."""
    if problem.packed:
        # See common/layout.cuh: every sequence may waste one block, and so may the slack after the last.
        num_m_blocks = problem.seqlen_q // block_m + problem.batch + 1 if problem.seqlen_q else 0
        blocks = num_m_blocks * problem.nheads_q
    else:
        num_m_blocks = -(-problem.seqlen_q // block_m)
        blocks = num_m_blocks * problem.batch * problem.nheads_q
    if blocks > _MAX_BLOCKS:
        raise InvalidDimensionError(
            f"q of {problem.batch} batches, {problem.nheads_q} heads and {problem.seqlen_q} rows needs {blocks:,}"
            f" thread blocks of {block_m} rows: a launch has at most {_MAX_BLOCKS:,}; split the batch"
        )
    return blocks, num_m_blocks
