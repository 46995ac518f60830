"""Other implementations of attention that `cuflash bench` times beside this one.

Each says in words why it is not here or cannot do a problem: a peer is left out with its reason, never
given another problem. Nothing of theirs is imported until one is asked whether it is here.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from cuflash.errors import InvalidArgumentError
from cuflash.inputs import Inputs
from cuflash.problem import AttentionProblem
from cuflash.tuning import peer_calls
from cuflash.tuning.peer_calls import Call, mask_of

# Scores that a peer which keeps them all may have: 8 GiB of float32, of which it holds a few copies.
MOST_SCORES = 1 << 31

_HALF = ("fp16", "bf16")
_ALL = ("fp16", "bf16", "fp32")


@dataclass(frozen=True)
class Limits:
    """What a peer can do: dtypes, the largest head dim, and which of `demands` it meets."""

    dtypes: tuple[str, ...] = _HALF
    head_dim: int = 256
    meets: frozenset[str] = frozenset()
    scores: int | None = None

    def why_not(self, problem: AttentionProblem) -> str | None:
        """Say what of a problem is beyond these limits; None if nothing is."""
        reasons = [] if problem.dtype in self.dtypes else [f"no {problem.dtype}"]
        largest = max(problem.head_dim, problem.head_dim_v)
        if largest > self.head_dim:
            reasons.append(f"no head dim beyond {self.head_dim}")
        reasons += [words for name, words in demands(problem).items() if name not in self.meets]
        if self.scores is not None:
            scores = problem.batch * problem.nheads_q * problem.seqlen_q * problem.seqlen_k
            if scores > self.scores:
                reasons.append(f"keeps all scores in memory, at most {self.scores} are tried")
        return "; ".join(reasons) or None


def demands(problem: AttentionProblem) -> dict[str, str]:
    """Give what a problem asks for beyond dense arrays: a name, and how a peer lacks it in words."""
    mask = mask_of(problem)
    # torch's is_causal starts in the top-left corner, which is another mask unless lengths are equal.
    uneven = mask == "causal" and not problem.packed and problem.seqlen_q != problem.seqlen_k
    asked = {
        "packed": (problem.packed, "no packed sequences"),
        "uneven": (uneven, "its causal mask is top-left, which differs where seqlen_q != seqlen_k"),
        "window": (mask == "window", "no window"),
        "gqa": (problem.nheads_q != problem.nheads_k, "no heads that share a key head"),
        "two_dims": (problem.head_dim != problem.head_dim_v, "no head dim of v that differs"),
        "softcap": (problem.softcap > 0, "no softcap"),
        "alibi": (problem.alibi, "no ALiBi slopes"),
        "bias": (problem.bias is not None, "no bias (not called with one here)"),
        "sink": (problem.sink, "no sinks (not called with them here)"),
        "seqlens_k": (problem.seqlens_k, "no seqlens_k (not called with them here)"),
    }
    return {name: words for name, (wanted, words) in asked.items() if wanted}


@dataclass(frozen=True)
class Peer:
    """One other implementation.

    Attributes
    ----------
    name : str
        As ``--peer`` takes it.
    packages : tuple of str
        Distributions that may hold it, for its version.
    modules : tuple of str
        One of them must import.
    limits : Limits
    prepare : callable
        Takes `Inputs`, gives the call to time; no array is copied.
    on_gpu : bool
        Whether it takes CuPy's arrays, else NumPy's.
    heads_first : bool
        Whether its answer is (batch, heads, seqlen, head_dim).
    """

    name: str
    packages: tuple[str, ...]
    modules: tuple[str, ...]
    limits: Limits
    prepare: Callable[[Inputs], Call]
    on_gpu: bool = True
    heads_first: bool = False

    def why_absent(self, on_gpu: bool) -> str | None:
        """Say why it cannot be called here; None if it can."""
        if self.on_gpu != on_gpu:
            return "it runs on a GPU" if self.on_gpu else "it runs on the CPU, beside NumPy arrays"
        reason = _why_no_import(self.modules)
        if reason is None and on_gpu:
            # Each of them is torch's; a torch without CUDA imports as well as any.
            if not importlib.import_module("torch").cuda.is_available():
                reason = "torch here is built without CUDA, or finds no GPU"
        return reason

    def why_not(self, problem: AttentionProblem) -> str | None:
        """Say why it cannot do a problem; None if it can."""
        return self.limits.why_not(problem)

    def answer(self, result: Any) -> Any:
        """See what its call gave as NumPy's or CuPy's array, without a copy."""
        return peer_calls.answer(result, heads_first=self.heads_first)

    @property
    def version(self) -> str:
        """Version of the package that is called; empty where none says it."""
        for name in self.packages:
            try:
                return f"{name} {metadata.version(name)}"
            except metadata.PackageNotFoundError:
                continue
        return ""


@functools.cache
def _why_no_import(modules: tuple[str, ...]) -> str | None:
    reason = None
    for name in modules:
        try:
            importlib.import_module(name)
            return None
        except ModuleNotFoundError as error:
            reason = reason or f"not installed: {error}"
        except (
            Exception
        ) as error:  # built for another torch, or a library missing: each its own type
            reason = f"{name} cannot be imported: {type(error).__name__}: {error}"
    return reason


def _sdpa(backend: str, limits: Limits) -> Peer:
    prepare = peer_calls.sdpa(backend)
    return Peer(f"sdpa-{backend}", ("torch",), ("torch",), limits, prepare, heads_first=True)


_FLASH = frozenset({"packed", "uneven", "window", "gqa", "softcap"})

PEERS: tuple[Peer, ...] = (
    _sdpa("flash", Limits(meets=frozenset({"gqa"}))),
    _sdpa("cudnn", Limits(meets=frozenset({"gqa", "two_dims"}))),
    _sdpa("efficient", Limits(_ALL, head_dim=65536, meets=frozenset({"two_dims"}))),
    _sdpa("math", Limits(_ALL, head_dim=65536, meets=frozenset({"gqa", "two_dims"}), scores=MOST_SCORES)),
    Peer("fa2", ("flash-attn",), ("flash_attn.flash_attn_interface",), Limits(meets=_FLASH | {"alibi"}),
         peer_calls.flash_attn_2),
    Peer("fa3", ("fa3-fwd", "flash-attn-3"), peer_calls.FA3_MODULES, Limits(meets=_FLASH | {"two_dims"}),
         peer_calls.flash_attn_3),
    Peer("fa4", ("flash-attn-4",), ("flash_attn.cute.interface",), Limits(meets=_FLASH | {"two_dims"}),
         peer_calls.flash_attn_4),
    Peer("flex", ("torch",), ("torch.nn.attention.flex_attention",),
         Limits(_ALL, meets=frozenset({"uneven", "window", "gqa", "two_dims", "softcap", "alibi"})),
         peer_calls.flex, heads_first=True),
    Peer("numpy-formula", ("numpy",), ("numpy",),
         Limits(_ALL, 65536, frozenset({"uneven", "window", "gqa", "two_dims", "softcap"}), MOST_SCORES),
         peer_calls.numpy_formula, on_gpu=False),
    Peer("torch-cpu", ("torch",), ("torch",), Limits(_ALL, 65536, frozenset({"gqa", "two_dims"})),
         peer_calls.sdpa(None), on_gpu=False, heads_first=True),
)  # fmt: skip


def select(names: Sequence[str], on_gpu: bool) -> list[Peer]:
    """Give the peers of these names; "all" stands for every one that takes such arrays.

    Raises
    ------
    InvalidArgumentError
        For a name that no peer has.
    """
    known = {peer.name: peer for peer in PEERS}
    found: dict[str, Peer] = {}
    for name in names:
        if name == "all":
            found |= {peer.name: peer for peer in PEERS if peer.on_gpu == on_gpu}
        elif name in known:
            found[name] = known[name]
        elif name != "none":
            raise InvalidArgumentError(
                f"there is no peer {name!r}: {', '.join(known)}, all or none can be asked for"
            )
    return list(found.values())
