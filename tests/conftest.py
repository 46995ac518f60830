"""What every test gets: a kernel cache of its own, seeded numbers, a skip where there is no GPU."""

from __future__ import annotations

import functools
import importlib.util
import os
import zlib
from collections.abc import Iterator

import numpy as np
import pytest
from cold_process import nvrtc_calls, root  # noqa: F401 - fixtures, found here by every module

# Settings of the caller's shell that would change what the tests hold. CUFLASH_SYNC, CUFLASH_LOG
# and CUFLASH_KERNEL_DIR stay: with them one looks into a failing test, or tries an edited kernel.
OVERRIDING = ("CUFLASH_CONFIG", "CUFLASH_NO_CACHE", "CUFLASH_NO_JIT", "CUFLASH_NVRTC_FLAGS")


@functools.cache
def why_no_gpu() -> str | None:
    """Why GPU tests cannot run here, or None where they can."""
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed"
    import cupy

    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:  # no driver, or one that does not answer: the reason is the driver's
        return f"no CUDA GPU ({error})"
    return None if count else "no CUDA GPU"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--examples",
        type=int,
        default=20,
        help="random problems of each shard of test_random_gpu.py",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    # Asked only when a GPU test was collected: it imports CuPy and starts the driver.
    reason = why_no_gpu() if gpu_items else None
    if reason:
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    if not skipped:
        return
    on_gpu = sum("gpu" in report.keywords for report in skipped)
    terminalreporter.write_line(
        f"{len(skipped)} tests were skipped, {on_gpu} of them for want of a GPU", yellow=True
    )


@pytest.fixture(scope="session", autouse=True)
def settings_of_this_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Cold kernels in a temporary folder: neither read from the caller's cache nor written to it.

    Set in os.environ, since subprocesses started by tests must see it too.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in OVERRIDING:
            patch.delenv(name, raising=False)
        base = tmp_path_factory.getbasetemp()
        # Workers of pytest-xdist have folders of their own in one: they share what they compile.
        shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
        patch.setenv("CUFLASH_CACHE_DIR", os.fspath(shared / "cuflash-cache"))
        yield


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Numbers that depend on the test's name alone, not on the order or the choice of tests."""
    return np.random.default_rng(zlib.crc32(request.node.nodeid.encode()))
