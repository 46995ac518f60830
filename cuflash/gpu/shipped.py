"""The specs that ship: what the heuristic chooses for ordinary problems, compiled in the tests for every GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from cuflash.arrays import ELEMENT_BYTES
from cuflash.gpu.choose import choose
from cuflash.gpu.device import Device
from cuflash.gpu.spec import KernelSpec
from cuflash.problem import AttentionProblem, describe_problem

ARCHS = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
_HEAD_DIMS = (
    (32, 32),
    (64, 64),
    (80, 80),
    (96, 96),
    (128, 128),
    (192, 128),
    (192, 192),
    (256, 256),
)


def shipped_specs(arch: str) -> list[KernelSpec]:
    """List, each once, the specs of an architecture's ordinary problems."""
    device = Device.from_arch(arch)
    return list(dict.fromkeys(choose(problem, device, {}).spec for problem in _problems()))


def _problems() -> Iterator[AttentionProblem]:
    for dtype in ("fp16", "bf16", "fp32"):
        for head_dim, head_dim_v in _HEAD_DIMS:
            yield _problem(dtype, head_dim, head_dim_v)
            yield _causal(_problem(dtype, head_dim, head_dim_v))
        for head_dim in (64, 128, 256):
            plain = _problem(dtype, head_dim, head_dim)
            yield replace(_causal(plain), vector_bytes=ELEMENT_BYTES[dtype])
            yield replace(_causal(plain), softcap=30.0)
            yield replace(_causal(plain), alibi=True)
            yield replace(plain, bias=dtype)
            yield replace(_causal(plain), softcap=30.0, alibi=True, bias="fp32")
    for head_dim in (64, 128, 256):
        yield replace(_problem("fp32", head_dim, head_dim), precision="tf32")


def _causal(problem: AttentionProblem) -> AttentionProblem:
    return replace(problem, window_right=0)


def _problem(dtype: str, head_dim: int, head_dim_v: int) -> AttentionProblem:
    return describe_problem(dtype=dtype, head_dim=head_dim, head_dim_v=head_dim_v)
