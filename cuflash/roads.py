"""The two roads: CuPy arrays go to the GPU's kernels, NumPy arrays to the NumPy backend."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from cuflash import arrays, checks, lengths
from cuflash.errors import InvalidConfigError
from cuflash.problem import build_problem


def attend(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    longest: dict[str, int | None] | None = None,
    check_device: bool = False,
    *,
    seqlens_k: Any,
    alibi_slopes: Any,
    bias: Any,
    sink: Any,
    config: Any,
    out: Any,
    return_lse: bool,
    **options: Any,
) -> Any:
    """See every argument as NumPy's or CuPy's, run, and give the result in the caller's kind."""
    caller_q, caller_out = q, out
    q, k, v = (arrays.view(name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    given = {"alibi_slopes": alibi_slopes, "bias": bias, "sink": sink, "out": out}
    given = {name: None if x is None else arrays.view(name, x) for name, x in given.items()}
    counts = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "seqlens_k": seqlens_k}
    counts = {name: None if x is None else lengths.view(name, x) for name, x in counts.items()}
    if longest is not None:
        _check_values(q, k, counts, longest, check_device)
    if arrays.is_cupy(q):
        options |= {"config": config, "return_lse": return_lse}
        result = _on_gpu(q, k, v, counts, given, options)
        out, lse = result if return_lse else (result, None)
    else:
        out, lse = _on_cpu(q, k, v, counts, given, config, options)
    result = arrays.give_back(out, caller_q) if caller_out is None else caller_out
    return (result, arrays.give_back(lse, caller_q)) if return_lse else result


def _check_values(
    q: Any, k: Any, counts: dict[str, Any], longest: dict[str, int | None], check_device: bool
) -> None:
    """Check the lengths of packed input that lie on the host or, if asked for, all of them."""
    host = {
        name: x.get() if check_device and arrays.is_cupy(x) else x for name, x in counts.items()
    }
    # q and k themselves are checked later, so a 0-d one may come by.
    rows_q, rows_k = (x.shape[0] if x.ndim else 0 for x in (q, k))
    lengths.check_packed(**host, rows_q=rows_q, rows_k=rows_k, **longest)


def _on_gpu(
    q: Any,
    k: Any,
    v: Any,
    counts: dict[str, Any],
    given: dict[str, Any],
    options: dict[str, Any],
) -> Any:
    """Bring the small arrays into the form that kernels read, and launch."""
    seqlens_k = counts["seqlens_k"]
    if arrays.is_numpy(seqlens_k) and counts["cu_seqlens_q"] is None and q.ndim == k.ndim == 4:
        # The last chance to see the values: on the device they cost a wait.
        seqlen_k = arrays.as_bshd(k, options["layout"]).shape[1]
        lengths.check_seqlens_k(seqlens_k, q.shape[0], seqlen_k)
    counts = {
        name: None if x is None else lengths.on_device(name, x, q) for name, x in counts.items()
    }
    # Only here: forward() remembers calls by shapes and strides, and those of a NumPy array may be
    # the same.
    checks.check_devices(q=q, k=k, v=v, **given)
    for name in ("alibi_slopes", "sink"):
        if given[name] is not None:
            given[name] = arrays.as_float32(name, given[name])
    return gpu_forward()(q, k, v, **counts, **given, **options)


def _on_cpu(
    q: Any,
    k: Any,
    v: Any,
    counts: dict[str, Any],
    given: dict[str, Any],
    config: Any,
    options: dict[str, Any],
) -> tuple[Any, Any]:
    """Check and compute in NumPy."""
    from cuflash import numpy_backend

    problem = build_problem(q, k, v, **counts, **given, **options)
    if config is not None:
        raise InvalidConfigError(
            f"config is {config!r}, but q is on the CPU, where there are no kernels to configure:"
            " pass None, or GPU arrays"
        )
    layout = options["layout"]
    if given["out"] is None:
        # As the layout asks, so that the result is contiguous in the caller's eyes.
        given["out"] = numpy_backend.empty((*q.shape[:-1], v.shape[-1]), q.dtype)
    out = given.pop("out")
    q, k, v, rows = (arrays.as_bshd(x, layout) for x in (q, k, v, out))
    return out, numpy_backend.forward(problem, q, k, v, rows, **counts, **given)


@functools.cache
def gpu_forward() -> Callable[..., Any]:
    """The GPU road, imported at the first call that takes it."""
    from cuflash.gpu.forward import forward

    return forward
