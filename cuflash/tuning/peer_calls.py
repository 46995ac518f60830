"""How each peer is called on the arrays that cuflash gets: the same memory, in the peer's own terms.

A `prepare` function does what a caller does once (views, masks, a compile) and gives the call that is
timed. torch and the wheels are imported here, when one of them is about to be called.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from cuflash import arrays
from cuflash.debug.accuracy import to_numpy
from cuflash.inputs import Inputs
from cuflash.problem import AttentionProblem

Call = Callable[[], Any]
Prepare = Callable[[Inputs], Call]

# The wheel fa3-fwd has a name of its own; builds from source have the other.
FA3_MODULES = ("fa3_fwd_interface", "flash_attn_interface")
_SWITCHES = {
    "flash": "flash_sdp", "efficient": "mem_efficient_sdp", "math": "math_sdp", "cudnn": "cudnn_sdp",
}  # fmt: skip


def mask_of(problem: AttentionProblem) -> str:
    """Give "full", "causal" or "window": what the mask comes to once bounds that hide nothing are gone."""
    right = -1 if problem.window_right >= problem.seqlen_q - 1 else problem.window_right
    left = -1 if problem.window_left >= problem.seqlen_k - 1 else problem.window_left
    if left >= 0:
        return "window"
    return {-1: "full", 0: "causal"}.get(right, "window")


@contextlib.contextmanager
def one_queue(on_gpu: bool) -> Iterator[None]:
    """Let CuPy and torch queue on one stream, or an event of the one would not see the other's work.

    Which SDPA backends torch may use is as before when it ends.
    """
    torch = sys.modules.get("torch")
    if not on_gpu or torch is None or not torch.cuda.is_available():
        yield
        return
    import cupy

    allowed = {
        name: getattr(torch.backends.cuda, f"{name}_enabled")() for name in _SWITCHES.values()
    }
    stream = torch.cuda.current_stream(cupy.cuda.Device().id)
    try:
        with cupy.cuda.Stream.from_external(stream):
            yield
    finally:
        _pin.backend = None
        for name, value in allowed.items():
            getattr(torch.backends.cuda, f"enable_{name}")(value)


def release(on_gpu: bool) -> None:
    """Give the memory that CuPy and torch keep for later back to the GPU: each starves the other."""
    if not on_gpu:
        return
    import cupy

    cupy.get_default_memory_pool().free_all_blocks()
    if "torch" in sys.modules:
        sys.modules["torch"].cuda.empty_cache()


def to_torch(x: Any) -> Any:
    """See a NumPy or CuPy array as a torch tensor, without a copy."""
    torch = importlib.import_module("torch")
    if arrays.is_numpy(x) and x.dtype.name == "bfloat16":
        return torch.from_dlpack(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_dlpack(x)


def answer(result: Any, *, heads_first: bool) -> Any:
    """See what a peer gave as NumPy's or CuPy's array, (batch, seqlen, heads, dim) or packed."""
    out = result[0] if isinstance(result, tuple) else result
    out = arrays.view("out", out)
    return out.transpose(0, 2, 1, 3) if heads_first else out


def sdpa(backend: str | None) -> Prepare:
    """Torch's scaled_dot_product_attention with one of its backends, or as it chooses."""

    def prepare(inputs: Inputs) -> Call:
        q, k, v = _heads_first(inputs)
        problem = inputs.problem
        attention = importlib.import_module("torch.nn.functional").scaled_dot_product_attention
        options = {"is_causal": mask_of(problem) == "causal", "scale": problem.softmax_scale}
        if problem.nheads_q != problem.nheads_k:
            options["enable_gqa"] = True

        def call() -> Any:
            if backend is not None:
                _pin(backend)
            return attention(q, k, v, **options)

        return call

    return prepare


class _Pin:
    """Allow SDPA one backend.

    Not torch's sdpa_kernel around each call: it costs up to 25 microseconds, half of what the call does.
    """

    backend: str | None = None

    def __call__(self, backend: str) -> None:
        if backend == self.backend:
            return
        cuda = importlib.import_module("torch.backends.cuda")
        for name, switch in _SWITCHES.items():
            getattr(cuda, f"enable_{switch}")(name == backend)
        self.backend = backend


_pin = _Pin()


def flash_attn_2(inputs: Inputs) -> Call:
    """Call the wheel flash-attn."""
    module = importlib.import_module("flash_attn")
    more = {}
    if inputs.problem.alibi:
        more["alibi_slopes"] = to_torch(inputs.options["alibi_slopes"])
    return _flash(module, inputs, -1, more)


def flash_attn_3(inputs: Inputs) -> Call:
    """Call FlashAttention-3, whichever of its two modules is installed."""
    for name in FA3_MODULES:
        with contextlib.suppress(ModuleNotFoundError):
            return _flash(importlib.import_module(name), inputs, -1, {})
    raise ModuleNotFoundError(" and ".join(FA3_MODULES))


def flash_attn_4(inputs: Inputs) -> Call:
    """Call FlashAttention-4 (CuTe)."""
    return _flash(importlib.import_module("flash_attn.cute.interface"), inputs, None, {})


def _flash(module: Any, inputs: Inputs, no_bound: int | None, more: dict[str, Any]) -> Call:
    """What the three have in common; ``no_bound`` is how an open side of a window is said."""
    problem = inputs.problem
    q, k, v = (to_torch(x) for x in (inputs.q, inputs.k, inputs.v))
    options: dict[str, Any] = {"softmax_scale": problem.softmax_scale, **more}
    mask = mask_of(problem)
    if mask == "causal":
        options["causal"] = True
    elif mask == "window":
        sides = (problem.window_left, problem.window_right)
        options["window_size"] = tuple(no_bound if side < 0 else side for side in sides)
    if problem.softcap:
        options["softcap"] = problem.softcap
    if not problem.packed:
        return functools.partial(module.flash_attn_func, q, k, v, **options)
    for side in "qk":
        offsets = inputs.options[f"cu_seqlens_{side}"]
        options[f"cu_seqlens_{side}"] = to_torch(offsets)
        options[f"max_seqlen_{side}"] = int(np.diff(to_numpy(offsets)).max(initial=0))
    return functools.partial(module.flash_attn_varlen_func, q, k, v, **options)


def flex(inputs: Inputs) -> Call:
    """FlexAttention, compiled for the shape, with a block mask where there is a mask."""
    q, k, v = _heads_first(inputs)
    problem = inputs.problem
    module = importlib.import_module("torch.nn.attention.flex_attention")
    offset = problem.seqlen_k - problem.seqlen_q
    # Bounds that are not there are larger than any distance.
    far = problem.seqlen_q + problem.seqlen_k
    left = far if problem.window_left < 0 else problem.window_left
    right = far if problem.window_right < 0 else problem.window_right
    options: dict[str, Any] = {"scale": problem.softmax_scale}
    if mask_of(problem) != "full":

        def visible(b: Any, h: Any, i: Any, j: Any) -> Any:
            return (j >= i + offset - left) & (j <= i + offset + right)

        options["block_mask"] = module.create_block_mask(
            visible, None, None, problem.seqlen_q, problem.seqlen_k, device=q.device
        )
    if problem.softcap or problem.alibi:
        options["score_mod"] = _score_mod(inputs, offset)
    if problem.nheads_q != problem.nheads_k:
        options["enable_gqa"] = True
    return functools.partial(compiled(module.flex_attention), q, k, v, **options)


def compiled(function: Any) -> Any:
    """Compile with torch, forgetting earlier shapes: after eight of them it would compile no more."""
    torch = importlib.import_module("torch")
    torch.compiler.reset()
    return torch.compile(function, dynamic=False)


def _score_mod(inputs: Inputs, offset: int) -> Callable[..., Any]:
    torch = importlib.import_module("torch")
    cap = inputs.problem.softcap
    slopes = to_torch(inputs.options["alibi_slopes"]) if inputs.problem.alibi else None

    def changed(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        if cap:
            score = cap * torch.tanh(score / cap)
        return score if slopes is None else score - slopes[h] * abs(i + offset - j)

    return changed


def numpy_formula(inputs: Inputs) -> Call:
    """The formula as one would write it in NumPy, in float32: every score in memory at once."""
    problem = inputs.problem
    group = problem.nheads_q // problem.nheads_k
    visible = None
    if mask_of(problem) != "full":
        # How far a key lies behind its query's diagonal.
        ahead = np.arange(problem.seqlen_k) - np.arange(problem.seqlen_q)[:, None]
        ahead -= problem.seqlen_k - problem.seqlen_q
        visible = np.ones(ahead.shape, bool)
        if problem.window_left >= 0:
            visible &= ahead >= -problem.window_left
        if problem.window_right >= 0:
            visible &= ahead <= problem.window_right

    def call() -> Any:
        q, k, v = (
            x.transpose(0, 2, 1, 3).astype(np.float32) for x in (inputs.q, inputs.k, inputs.v)
        )
        q = q.reshape(problem.batch, problem.nheads_k, group, *q.shape[2:])
        scores = q @ k[:, :, None].swapaxes(-1, -2) * np.float32(problem.softmax_scale)
        if problem.softcap:
            scores = problem.softcap * np.tanh(scores / problem.softcap)
        if visible is not None:
            scores = np.where(visible, scores, np.float32(-np.inf))
        top = scores.max(-1, keepdims=True, initial=-np.inf)
        weights = np.exp(scores - np.where(np.isneginf(top), 0, top))
        total = weights.sum(-1, keepdims=True)
        out = weights @ v[:, :, None] / np.where(total > 0, total, 1)
        shape = (problem.batch, problem.nheads_q, problem.seqlen_q, problem.head_dim_v)
        return out.reshape(shape).transpose(0, 2, 1, 3).astype(inputs.q.dtype)

    return call


def _heads_first(inputs: Inputs) -> tuple[Any, ...]:
    return tuple(to_torch(x).transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v))
