"""A folder of kernels small enough to compile in a blink, and specs for it.

What `render`, `compiler` and `cache` need of a spec is a kernel, an architecture, a name and
constants; the real ones are tried in test_shipped_specs.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

FILES = {
    "prelude.cuh.in": (
        "// Costs $$0.\n"
        "#include <cuda_bf16.h>\n"
        "#include <cuda_fp16.h>\n"
        "using dtype_t = ${DTYPE};\n"
        "constexpr int BLOCK_M = ${BLOCK_M};\n"
        "constexpr int UNUSED = 1;\n"
    ),
    "editor_defaults.cuh": "using dtype_t = float;\nconstexpr int BLOCK_M = 1;\n",
    "tiny.cu": (
        "#ifndef CUFLASH_SPEC\n"
        '#include "editor_defaults.cuh"\n'
        "#endif\n"
        '#include "common/scale.cuh"\n'
        '//#include "no/such.cuh"\n'
        'extern "C" __global__ void tiny(dtype_t* out) {\n'
        "    __shared__ int rows[BLOCK_M];\n"
        "    rows[threadIdx.x] = BLOCK_M;\n"
        "    __syncthreads();\n"
        "    out[threadIdx.x] = scaled(rows[BLOCK_M - 1 - threadIdx.x]);\n"
        "}\n"
    ),
    # These two include each other.
    "common/scale.cuh": (
        "#pragma once\n"
        '  #  include "common/factor.cuh"\n'
        "__device__ inline float scaled(int x) { return FACTOR * x; }\n"
    ),
    "common/factor.cuh": (
        '#pragma once\n#include "common/scale.cuh"\nconstexpr float FACTOR = 2.0f;\n'
    ),
}


@dataclass(frozen=True)
class TinySpec:
    """What the road from text to machine code, and a launch, ask of a spec."""

    arch: str = "sm_80"
    kernel: str = "tiny"
    block_m: int = 32
    extra: dict[str, str] = field(default_factory=dict, hash=False)

    @property
    def name(self) -> str:
        return f"{self.kernel}-m{self.block_m}"

    def constants(self) -> dict[str, str]:
        return {"DTYPE": "__half", "BLOCK_M": str(self.block_m), **self.extra}

    @property
    def threads(self) -> int:
        return self.block_m

    def shared_bytes(self) -> int:
        return 1024

    def static_shared_bytes(self) -> int:
        return 4 * self.block_m


def write_kernels(folder: Path) -> Path:
    """Fill a folder with the kernels and give it back."""
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder
