"""Time cuflash's forward beside torch's attention backends, in turn in one process.

    python scripts/bench_forward.py --dtype bf16,fp16 --head-dim 64,128,256 --seqlen 1024,4096,16384
    python scripts/bench_forward.py --host        # microseconds a call, cold and warm start

16,384 tokens a batch and 2048 / head_dim heads, random normal input. Work is counted as
4 * B * H * S * S * D operations, half of it when causal. Each row times cuflash and its peer in turn, several
rounds (a drifting clock favours nobody), and gives the medians and the median of the rounds' ratios. Rows are
appended to a CSV with GPU, driver, versions and commit.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import functools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cupy
import torch
import torch.nn.functional as functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import cuflash

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
FIELDS = (
    "time", "gpu", "driver", "torch", "cupy", "nvrtc", "commit", "dtype", "batch", "seqlen", "heads", "head_dim",
    "causal", "peer", "peer_ms", "cuflash_ms", "ratio", "peer_tflops", "cuflash_tflops", "error", "peer_error", "tile",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", default="bf16,fp16")
    parser.add_argument("--head-dim", default="64,128,256")
    parser.add_argument("--seqlen", default="1024,4096,16384")
    parser.add_argument("--config", action="append", help="as config=; repeat to compare tiles")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--milliseconds", type=float, default=20, help="of one timing in a round")
    parser.add_argument("--csv", type=Path, help="append rows here")
    parser.add_argument("--host", action="store_true", help="only host cost and start-up times")
    arguments = parser.parse_args()
    if arguments.host:
        host_cost()
        return
    rows = []
    for dtype in arguments.dtype.split(","):
        for head_dim in map(int, arguments.head_dim.split(",")):
            for seqlen in map(int, arguments.seqlen.split(",")):
                for causal in (False, True):
                    rows += measure(dtype, head_dim, seqlen, causal, arguments)
    if arguments.csv:
        append(arguments.csv, rows)


def measure(
    dtype: str, head_dim: int, seqlen: int, causal: bool, arguments: Any
) -> list[dict[str, Any]]:
    """Time one shape: the peer and every config, in turn."""
    batch, heads = max(1, 16384 // seqlen), max(1, 2048 // head_dim)
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(batch, seqlen, heads, head_dim, device="cuda", dtype=DTYPES[dtype])
        for _ in range(3)
    )
    work = 4 * batch * heads * seqlen * seqlen * head_dim * (0.5 if causal else 1)
    peer_name, peer = torch_attention(q, k, v, causal)
    ours = [cupy.from_dlpack(x) for x in (q, k, v)]
    calls: dict[str | None, Callable[[], Any]] = {
        config: functools.partial(cuflash.flash_attn_func, *ours, causal=causal, config=config)
        for config in arguments.config or [None]
    }
    # CuPy and torch must queue their work on one stream, or events would time the other's.
    stream = cupy.cuda.Stream.from_external(torch.cuda.current_stream())
    rows = []
    with stream:
        errors = {
            config: sampled_error(q, k, v, torch.from_dlpack(call()), causal)
            for config, call in calls.items()
        }
        tiles = {}
        for config, call in calls.items():
            call()
            plan = cuflash.last_plan()
            assert plan is not None
            tiles[config] = plan.tile
        peer_error = sampled_error(q, k, v, peer().transpose(1, 2), causal)
        rounds: dict[Any, list[float]] = {config: [] for config in calls}
        peer_ms: list[float] = []
        for _ in range(arguments.rounds):
            peer_ms.append(milliseconds(peer, arguments.milliseconds))
            for config, call in calls.items():
                rounds[config].append(milliseconds(call, arguments.milliseconds))
    for config, ms in rounds.items():
        ratio = statistics.median(p / m for p, m in zip(peer_ms, ms, strict=True))
        peer_median, median = statistics.median(peer_ms), statistics.median(ms)
        row = dict(
            dtype=dtype, batch=batch, seqlen=seqlen, heads=heads, head_dim=head_dim, causal=int(causal), peer=peer_name,
            peer_ms=f"{peer_median:.4f}", cuflash_ms=f"{median:.4f}", ratio=f"{ratio:.3f}",
            peer_tflops=f"{work / peer_median / 1e9:.0f}", cuflash_tflops=f"{work / median / 1e9:.0f}",
            error=f"{errors[config]:.2e}", peer_error=f"{peer_error:.2e}", tile=tiles[config],
        )  # fmt: skip
        print(
            f"{dtype} D{head_dim:<3} S{seqlen:<5} {'causal' if causal else 'full  '}"
            f" {peer_name} {row['peer_tflops']:>4}"
            f"  cuflash {row['cuflash_tflops']:>4} TFLOP/s  ratio {row['ratio']}"
            f"  error {row['error']} ({row['peer_error']})"
            f"  {row['tile']}",
            flush=True,
        )
        rows.append(row)
    return rows


def torch_attention(q: Any, k: Any, v: Any, causal: bool) -> tuple[str, Callable[[], Any]]:
    """Torch's flash backend (FlashAttention-2), or for float32 its memory-efficient one."""
    name, backend = ("flash", SDPBackend.FLASH_ATTENTION)
    if q.dtype == torch.float32:
        name, backend = ("efficient", SDPBackend.EFFICIENT_ATTENTION)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))

    def call() -> Any:
        with sdpa_kernel(backend):
            return functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return name, call


def sampled_error(q: Any, k: Any, v: Any, out: Any, causal: bool) -> float:
    """Largest error against float64 in the last head's first, middle and last rows."""
    n = q.shape[1]
    rows = torch.tensor(
        [*range(0, 64), *range(n // 2, n // 2 + 64), *range(n - 64, n)], device=q.device
    )
    x, y, z = (t[-1, :, -1].double() for t in (q, k, v))
    scores = x[rows] @ y.T * q.shape[-1] ** -0.5
    if causal:
        scores.masked_fill_(torch.arange(n, device=q.device) > rows[:, None], -torch.inf)
    return float((torch.softmax(scores, -1) @ z - out[-1, rows, -1].double()).abs().max())


def milliseconds(call: Callable[[], Any], budget: float) -> float:
    """Mean over a batch of calls that fills the budget, between two events."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def batch(n: int) -> float:
        start.record()
        for _ in range(n):
            call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / n

    return batch(max(3, int(budget / max(batch(2), 1e-3))))


def host_cost() -> None:
    """Print microseconds of host time a call, and the first call's time cold, from disk and from memory."""
    for shape in ((1, 128, 8, 64), (4, 512, 16, 128)):
        q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        ours = [cupy.from_dlpack(x) for x in (q, k, v)]
        _, peer = torch_attention(q, k, v, True)
        for name, call in (
            ("cuflash", lambda ours=ours: cuflash.flash_attn_func(*ours, causal=True)),
            ("torch flash", peer),
        ):
            print(f"{name:12} {shape} {host_microseconds(call):6.1f} us a call", flush=True)
    code = (
        "import time, cupy, cuflash; from cuflash.gpu import launch\n"
        "q = cupy.zeros((1, 512, 4, {d}), cupy.float16); cupy.cuda.Device().synchronize()\n"
        "import cuflash.gpu.forward, cuflash.gpu.cache\n"
        "from cuflash.gpu.choose import choose; from cuflash.problem import build_problem\n"
        "spec = choose(build_problem(q, q, q), launch.device_info(0)).spec\n"
        "t = time.perf_counter(); kernel = launch.load(spec, 0); loaded = time.perf_counter() - t\n"
        "t = time.perf_counter(); cuflash.flash_attn_func(q, q, q); cupy.cuda.Device().synchronize()\n"
        "print(f'head_dim {d}: {{kernel.origin:7}} to a loaded function {{1e3 * loaded:7.1f}} ms,"
        ' compiling {{kernel.meta["compile_ms"]:.0f}} ms, then the call {{1e3 * (time.perf_counter() - t):.1f}} ms\')'
    )
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "CUFLASH_CACHE_DIR": folder}
        for head_dim in (64, 128, 256):
            for _ in range(3):
                subprocess.run(
                    [sys.executable, "-c", code.format(d=head_dim)], env=environment, check=True
                )


def host_microseconds(call: Callable[[], Any], calls: int = 2000) -> float:
    """Host time of one call, the best of five runs that end before the queue is full."""
    best = float("inf")
    for _ in range(50):
        call()
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls // 4):
            call()
        best = min(best, (time.perf_counter() - start) / (calls // 4))
    torch.cuda.synchronize()
    return 1e6 * best


def append(path: Path, rows: list[dict[str, Any]]) -> None:
    """Append rows with what they were measured on."""
    from cuflash.gpu import toolchain

    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip() or os.environ.get("CUFLASH_COMMIT", "unknown")
    common = dict(
        time=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), gpu=torch.cuda.get_device_name(),
        driver=driver, torch=torch.__version__, cupy=cupy.__version__, nvrtc=toolchain.identity()["nvrtc"],
        commit=commit,
    )  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        if new:
            writer.writeheader()
        writer.writerows({**common, **row} for row in rows)


if __name__ == "__main__":
    main()
