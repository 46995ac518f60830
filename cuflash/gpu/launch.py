"""Cubins to loaded functions, and launches: the one place that talks to the CUDA driver."""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cuflash import settings
from cuflash.errors import CudaError, MissingDependencyError, OutOfMemoryError, UnsupportedArchError
from cuflash.gpu import cache
from cuflash.gpu.device import Device
from cuflash.gpu.spec import KernelSpec

try:
    from cuda.bindings import driver
except ImportError as error:  # pragma: no cover - depends on the installation
    raise MissingDependencyError(
        "GPU arrays were given, and cuda-bindings is needed to launch kernels on them:"
        " pip install 'cuflash[cuda13]' (or 'cuflash[cuda12]')"
    ) from error
import cupy

_SUCCESS = driver.CUresult.CUDA_SUCCESS
_ATTRIBUTE = driver.CUdevice_attribute


@dataclass(frozen=True, slots=True)
class LoadedKernel:
    """A kernel on one device, ready to launch."""

    spec: KernelSpec
    function: Any
    module: Any  # the function lives as long as its module
    shared_bytes: int
    origin: str
    digest: str
    meta: dict[str, Any]

    @property
    def later_origin(self) -> str:
        """Origin at every call but the first: memory, unless it was made by hand."""
        return self.origin if self.origin == cache.OVERRIDE else "memory"


_loaded: dict[tuple[KernelSpec, int, Path | None], LoadedKernel] = {}
_lock = threading.Lock()
_thread = threading.local()
# Largest number of functions remembered. Modules stay loaded: a captured graph may still run them.
_MAX_LOADED = 512
# What the driver says of a damaged image. Anything else may be an earlier kernel's doing, which must not
# cost a good entry of the cache.
_DAMAGED = (
    driver.CUresult.CUDA_ERROR_INVALID_IMAGE,
    driver.CUresult.CUDA_ERROR_INVALID_SOURCE,
)


def device_info(device_id: int) -> Device:
    """Limits of a GPU, asked of the driver once."""
    return _device_info(device_id)


@functools.cache
def _device_info(device_id: int) -> Device:
    _check(driver.cuInit(0), "start the driver for GPU", device_id)
    device = _check(driver.cuDeviceGet(device_id), "find GPU", device_id)

    def ask(attribute: Any) -> int:
        return int(_check(driver.cuDeviceGetAttribute(attribute, device), "ask GPU", device_id))

    major = ask(_ATTRIBUTE.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)
    minor = ask(_ATTRIBUTE.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)
    name = _check(driver.cuDeviceGetName(128, device), "ask GPU", device_id)
    return Device(
        10 * major + minor,
        ask(_ATTRIBUTE.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN),
        ask(_ATTRIBUTE.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR),
        ask(_ATTRIBUTE.CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR),
        ask(_ATTRIBUTE.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT),
        name.split(b"\0", 1)[0].decode(),
    )


def load(spec: KernelSpec, device_id: int) -> LoadedKernel:
    """Load a spec's kernel on the current device, from memory, disk or the compiler.

    Raises
    ------
    CompileError, CacheError, UnsupportedArchError, CudaError
    """
    folder = settings.kernel_dir()
    key = (spec, device_id, folder)
    loaded = _loaded.get(key)
    # Kernels that are being edited may change between two calls: their text decides.
    if loaded is not None and not settings.watch_kernels():
        return loaded
    bind_context(device_id)
    kernel = cache.load_or_compile(spec)
    if loaded is not None and loaded.digest == kernel.digest:
        return loaded
    result = driver.cuModuleLoadData(kernel.cubin)
    if result[0] in _DAMAGED and kernel.origin != "compile":
        # A whole-looking entry that the driver will not take: replace it, once.
        cache.invalidate(kernel)
        kernel = cache.load_or_compile(spec)
        result = driver.cuModuleLoadData(kernel.cubin)
    loaded = _loaded_kernel(result, kernel, spec)
    with _lock:
        if len(_loaded) >= _MAX_LOADED:
            _loaded.pop(next(iter(_loaded)))
        _loaded[key] = replace(loaded, origin=loaded.later_origin)
    return loaded


def _loaded_kernel(result: Any, kernel: cache.Kernel, spec: KernelSpec) -> LoadedKernel:
    """Find the entry in a module just loaded, and let it use the memory that it needs."""
    if result[0] in (
        driver.CUresult.CUDA_ERROR_NO_BINARY_FOR_GPU,
        driver.CUresult.CUDA_ERROR_UNSUPPORTED_PTX_VERSION,
    ):
        raise UnsupportedArchError(
            f"the driver cannot run {spec.name}, compiled for {spec.arch}: it says"
            f" {_name(result[0])}; update the NVIDIA driver, or install an NVRTC no newer than it"
        )
    module = _check(result, "load", spec.name)
    function = _check(
        driver.cuModuleGetFunction(module, spec.kernel.encode()), "find the entry of", spec.name
    )
    dynamic = spec.shared_bytes()
    fixed = _function_attribute(function, "CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES", spec)
    if dynamic + fixed > 48 * 1024:  # beyond this a kernel must opt in
        _check(
            driver.cuFuncSetAttribute(
                function,
                driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                dynamic,
            ),
            f"allow {dynamic:,} bytes of shared memory for",
            spec.name,
        )
    most = _function_attribute(function, "CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK", spec)
    if spec.threads > most:
        registers = _function_attribute(function, "CU_FUNC_ATTRIBUTE_NUM_REGS", spec)
        raise CudaError(
            f"{spec.name} needs {spec.threads} threads of {registers} registers, and this GPU can"
            f" run {most} such threads in a block: use fewer num_warps or a smaller tile"
        )
    return LoadedKernel(spec, function, module, dynamic, kernel.origin, kernel.digest, kernel.meta)


def _function_attribute(function: Any, name: str, spec: KernelSpec) -> int:
    attribute = getattr(driver.CUfunction_attribute, name)
    return int(_check(driver.cuFuncGetAttribute(attribute, function), "ask about", spec.name))


def launch(kernel: LoadedKernel, blocks: int, words: Any, stream: int) -> None:
    """Launch on a stream; ``words`` is the packed parameter struct (see `params`).

    Raises
    ------
    CudaError
        With the driver's own error, the kernel, its grid, threads and shared memory.
    """
    argument = ctypes.c_void_p(ctypes.addressof(words))
    error = driver.cuLaunchKernel(
        kernel.function, blocks, 1, 1, 32 * kernel.spec.num_warps, 1, 1, kernel.shared_bytes,
        _stream(stream), ctypes.addressof(argument), 0,
    )[0]  # fmt: skip
    if error != _SUCCESS:
        raise _error(
            error,
            f"could not launch {kernel.spec.name} with {blocks} blocks of {kernel.spec.threads}"
            f" threads and {kernel.shared_bytes:,} bytes of shared memory",
        )
    if settings.sync():
        synchronized = driver.cuStreamSynchronize(_stream(stream))[0]
        if synchronized != _SUCCESS:
            raise _error(synchronized, f"{kernel.spec.name} failed while it ran")


@functools.lru_cache(maxsize=64)
def _stream(pointer: int) -> Any:
    return driver.CUstream(pointer)


def bind_context(device_id: int) -> None:
    """Make the device's primary context current in this thread; the driver API needs one."""
    bound = getattr(_thread, "bound", None)
    if bound is None:
        bound = _thread.bound = set()
    if device_id not in bound:
        try:
            cupy.cuda.runtime.free(0)
        except cupy.cuda.runtime.CUDARuntimeError as error:
            raise CudaError(
                f"GPU {device_id} cannot be used: {error}. In a process forked from one that had used"
                " the GPU, start workers with the 'spawn' method instead"
            ) from error
        bound.add(device_id)


def _check(result: tuple[Any, ...], doing: str, what: object) -> Any:
    error, *values = result
    if error != _SUCCESS:
        raise _error(error, f"could not {doing} {what}")
    return values[0] if values else None


def _name(error: Any) -> str:
    found, text = driver.cuGetErrorName(error)
    return text.decode() if found == _SUCCESS and text else str(error)


def _error(error: Any, context: str) -> CudaError | OutOfMemoryError:
    """Turn the driver's code into words: what it is called, what it means, what to do."""
    found, text = driver.cuGetErrorString(error)
    meaning = text.decode() if found == _SUCCESS and text else "unknown error"
    if error == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
        return OutOfMemoryError(
            f"{context}: the GPU is out of memory; free arrays or CuPy's pool"
            " (cupy.get_default_memory_pool().free_all_blocks())"
        )
    advice = {
        driver.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS: (
            "; an earlier kernel, not necessarily this one, left its memory: run with CUFLASH_SYNC=1"
            " or under compute-sanitizer to find it"
        ),
        driver.CUresult.CUDA_ERROR_INVALID_CONTEXT: (
            "; this thread has no CUDA context: use the device in it first (cupy.cuda.Device(0).use())"
        ),
    }.get(error, "")
    return CudaError(f"{context}: {_name(error)}, {meaning}{advice}")


def _forget() -> None:
    """In a forked child nothing of the parent's GPU state is usable."""
    global _lock, _thread
    _loaded.clear()
    _lock = threading.Lock()
    _thread = threading.local()


os.register_at_fork(after_in_child=_forget)

__all__ = ["LoadedKernel", "bind_context", "device_info", "launch", "load"]
