"""Forward attention on a GPU: from a call's arrays to one launch.

A call is answered from memory when its shapes, strides, alignment and options were seen before: then only
the pointers are new. Everything that is checked, chosen, compiled or packed happens on a miss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import cupy
import numpy as np

from cuflash import arrays, plan, settings
from cuflash.errors import InvalidArgumentError, OutOfMemoryError
from cuflash.gpu import launch, params
from cuflash.gpu.choose import choose
from cuflash.gpu.grid import grid
from cuflash.plan import Plan
from cuflash.problem import AttentionProblem, build_problem
from cuflash.tuning import problem_log

# Bytes of K and V whose readers should run side by side, so that they find each other's tiles in L2.
_SECTION_BYTES = 32 * 2**20
_MAX_PREPARED = 4096


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A call without its pointers."""

    kernel: launch.LoadedKernel | None  # None: nothing to compute
    packed_params: bytes
    blocks: int
    out_shape: tuple[int, ...]
    out_dtype: Any
    lse_shape: tuple[int, ...]
    plan: Plan


_prepared: dict[Any, _Prepared] = {}


def forget() -> None:
    """Forget how calls were answered, so that the next ones choose anew."""
    _prepared.clear()


def forward(
    q: Any,
    k: Any,
    v: Any,
    *,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    softmax_scale: float | None,
    causal: bool,
    window_size: Any,
    softcap: float,
    seqlens_k: Any,
    alibi_slopes: Any,
    bias: Any,
    sink: Any,
    layout: str,
    precision: str,
    config: Any,
    out: Any,
    return_lse: bool,
) -> Any:
    """Attention of CuPy arrays; arguments and result as in `cuflash.flash_attn_func`.

    ``cu_seqlens_*`` and ``seqlens_k`` are int32 and contiguous, ``alibi_slopes`` and ``sink`` float32.
    """
    device_id = q.data.device_id
    q_pointer, k_pointer, v_pointer = q.data.ptr, k.data.ptr, v.data.ptr
    key: tuple[Any, ...] = (
        q.shape, k.shape, v.shape, q.strides, k.strides, v.strides, q.dtype, k.dtype, v.dtype,
        (q_pointer | k_pointer | v_pointer) % 16, device_id, k.data.device_id, v.data.device_id,
        softmax_scale, causal, window_size if type(window_size) is tuple else repr(window_size), softcap,
        layout, precision, config if config is None else repr(config), settings.config(),
    )  # fmt: skip
    plain = cu_seqlens_q is seqlens_k is alibi_slopes is bias is sink is out is None
    if not plain:
        key += (
            _signature(cu_seqlens_q), _signature(cu_seqlens_k), _signature(seqlens_k), _signature(alibi_slopes),
            None if bias is None else (_signature(bias), bias.data.ptr % 4), _signature(sink),
            None if out is None else (_signature(out), out.data.ptr % 16),
        )  # fmt: skip
    if cupy.cuda.runtime.getDevice() != device_id:
        with cupy.cuda.Device(device_id):
            return forward(
                q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, softmax_scale=softmax_scale,
                causal=causal, window_size=window_size, softcap=softcap, seqlens_k=seqlens_k,
                alibi_slopes=alibi_slopes, bias=bias, sink=sink, layout=layout, precision=precision,
                config=config, out=out, return_lse=return_lse,
            )  # fmt: skip
    remember = not settings.watch_kernels()
    try:
        prepared = _prepared.get(key) if remember else None
    except TypeError:  # an argument without a hash, such as a 0-d array, cannot be remembered
        prepared, remember = None, False
    if prepared is None:
        inputs = dict(
            cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, seqlens_k=seqlens_k,
            alibi_slopes=alibi_slopes, bias=bias, sink=sink, out=out,
        )  # fmt: skip
        problem = build_problem(
            q, k, v, softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
            layout=layout, precision=precision, **inputs,
        )  # fmt: skip
        record = settings.record()
        if record is not None:
            problem_log.append(record, problem)
        prepared = _prepare(problem, q, k, v, inputs, layout, config, device_id)
        if remember:
            if len(_prepared) >= _MAX_PREPARED:
                _prepared.clear()
            origin = prepared.kernel.later_origin if prepared.kernel else "none"
            _prepared[key] = replace(prepared, plan=replace(prepared.plan, origin=origin))
    elif out is not None:  # its address is new, so this cannot be remembered
        _check_overlap(out, q=q, k=k, v=v, bias=bias)
    try:
        result = cupy.empty(prepared.out_shape, prepared.out_dtype) if out is None else out
        lse = cupy.empty(prepared.lse_shape, np.float32) if return_lse else None
    except cupy.cuda.memory.OutOfMemoryError as error:
        needed = (
            math.prod(prepared.out_shape) * q.itemsize
            + 4 * math.prod(prepared.lse_shape) * return_lse
        )
        raise OutOfMemoryError(
            f"out{' and lse need' if return_lse else ' needs'} {needed:,} bytes: {error}; pass out=, split the"
            " batch, or free arrays and CuPy's pool"
        ) from error
    if prepared.kernel is not None:
        launch.bind_context(device_id)
        words = params.Words.from_buffer_copy(prepared.packed_params)
        words[0], words[1], words[2], words[3] = q_pointer, k_pointer, v_pointer, result.data.ptr
        if lse is not None:
            words[4] = lse.data.ptr
        if not plain:
            optional = (cu_seqlens_q, cu_seqlens_k, seqlens_k, alibi_slopes, bias, sink)
            for word, x in enumerate(optional, 5):
                if x is not None:
                    words[word] = x.data.ptr
        launch.launch(prepared.kernel, prepared.blocks, words, cupy.cuda.get_current_stream().ptr)
    plan.record(prepared.plan)
    return (result, lse) if return_lse else result


def _signature(x: Any) -> Any:
    """What of an optional array decides how it is read."""
    return None if x is None else (x.shape, x.strides, x.dtype, x.data.device_id)


def _check_overlap(out: Any, **inputs: Any) -> None:
    for name, x in inputs.items():
        if x is not None and arrays.overlap(out, x):
            raise InvalidArgumentError(f"out overlaps {name}: pass an array of its own memory")


def _prepare(
    problem: AttentionProblem,
    q: Any,
    k: Any,
    v: Any,
    inputs: dict[str, Any],
    layout: str,
    config: Any,
    device_id: int,
) -> _Prepared:
    """Choose, compile and pack everything about a call but its pointers."""
    out_shape = (*q.shape[:-1], v.shape[-1])
    lse_shape = (
        (problem.nheads_q, problem.seqlen_q)
        if problem.packed
        else (problem.batch, problem.nheads_q, problem.seqlen_q)
    )
    choice = choose(problem, launch.device_info(device_id), config)
    spec = choice.spec
    blocks, num_m_blocks = grid(problem, spec.block_m)
    if blocks == 0:
        empty = Plan(
            spec.kernel,
            spec.arch,
            spec.tile,
            f"{choice.reason}; nothing to compute",
            "none",
            spec=spec.name,
        )
        return _Prepared(None, b"", 0, out_shape, q.dtype, lse_shape, empty)
    kernel = launch.load(spec, device_id)
    out_strides = _out_strides(out_shape, inputs["out"], q.itemsize)
    packed = params.pack(
        [s for x in (q, k, v) for s in _bshd(_element_strides(x), problem.packed, layout)]
        + _bshd(out_strides, problem.packed, layout)
        + _bias_strides(problem, inputs["bias"]),
        _lse_strides(problem),
        _alibi_strides(problem, inputs["alibi_slopes"]),
        [
            problem.batch,
            problem.seqlen_q,
            problem.seqlen_k,
            problem.nheads_q,
            problem.nheads_q // problem.nheads_k,
            problem.head_dim,
            problem.head_dim_v,
            *(
                params.UNBOUNDED if w < 0 else w
                for w in (problem.window_left, problem.window_right)
            ),
            num_m_blocks,
            _heads_per_section(problem, q.itemsize),
            int(_vectorized(out_strides, inputs["out"], q.itemsize)),
        ],
        problem.softmax_scale,
        problem.softcap,
    )
    meta = kernel.meta
    description = Plan(
        kernel=spec.kernel,
        arch=spec.arch,
        tile=spec.tile,
        reason=choice.reason,
        origin=kernel.origin,
        registers=meta.get("registers"),
        spill_bytes=meta.get("spill_bytes"),
        shared_bytes=kernel.shared_bytes + meta.get("static_shared_bytes", 0),
        compile_ms=meta.get("compile_ms"),
        spec=spec.name,
    )
    return _Prepared(kernel, packed, blocks, out_shape, q.dtype, lse_shape, description)


def _heads_per_section(problem: AttentionProblem, itemsize: int) -> int:
    """Heads that go through their rows together, longest rows first.

    Only causal rows differ in length; others take one head after the other, which shares K and V best.
    """
    if problem.packed or not problem.causal:
        return 1
    bytes_per_head = max(1, problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * itemsize)
    kv_heads = 2 ** int(math.log2(max(1.0, _SECTION_BYTES / bytes_per_head)))
    group = problem.nheads_q // problem.nheads_k
    return min(kv_heads * group, problem.batch * problem.nheads_q)


def _element_strides(x: Any) -> list[int]:
    return [s // x.itemsize for s in x.strides]


def _bshd(strides: list[int], packed: bool, layout: str) -> list[int]:
    """Strides in the order of kernels_cu's Strides: batch, row, head, dim."""
    if packed:
        return [0, *strides]
    if layout == "bhsd":
        return [strides[0], strides[2], strides[1], strides[3]]
    return strides


def _out_strides(shape: tuple[int, ...], out: Any, itemsize: int) -> list[int]:
    if out is not None:
        return [s // itemsize for s in out.strides]
    return [math.prod(shape[i + 1 :]) for i in range(len(shape))]


def _vectorized(strides: list[int], out: Any, itemsize: int) -> bool:
    """Whether every row of out starts on a 16-byte boundary and is contiguous."""
    aligned = out is None or out.data.ptr % 16 == 0
    return aligned and strides[-1] == 1 and all(s * itemsize % 16 == 0 for s in strides[:-1])


def _lse_strides(problem: AttentionProblem) -> tuple[int, int]:
    if problem.packed:
        return 0, problem.seqlen_q
    return problem.nheads_q * problem.seqlen_q, problem.seqlen_q


def _alibi_strides(problem: AttentionProblem, slopes: Any) -> tuple[int, int]:
    if slopes is None:
        return 0, 0
    return (slopes.shape[1] if slopes.ndim == 2 else 0), 1


def _bias_strides(problem: AttentionProblem, bias: Any) -> list[int]:
    """Strides of (batch, query, head, key): 0 where the bias is broadcast."""
    if bias is None:
        return [0, 0, 0, 0]
    sizes = [1] * (4 - bias.ndim) + list(bias.shape)
    strides = [0] * (4 - bias.ndim) + _element_strides(bias)
    batch, head, query, key = (0 if n == 1 else s for n, s in zip(sizes, strides, strict=True))
    return [batch, query, head, key]
