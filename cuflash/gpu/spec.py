"""What is compiled: one kernel with everything it is specialised on, and the bytes it needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cuflash.arrays import ELEMENT_BYTES

CUDA_TYPES = {"fp16": "__half", "bf16": "__nv_bfloat16", "fp32": "float"}

# sizeof(ForwardParams) in kernels_cu/params.cuh; gpu/params.py packs it.
PARAMS_BYTES = 336


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """One specialised kernel: hashable, without lengths and batch sizes, which are arguments.

    ``masked``: rows may see only a part of their keys (causal, window, bias); which, is an argument too.

    ``head_dim`` and ``head_dim_v`` are the padded ones; ``bias`` is the bias dtype or None.
    ``blocks_per_sm`` bounds the registers so that as many thread blocks fit one multiprocessor.
    """

    kernel: str
    arch: str
    dtype: str
    head_dim: int
    head_dim_v: int
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int = 1
    blocks_per_sm: int = 1
    q_in_registers: bool = False
    vector_bytes: int = 16
    masked: bool = True
    softcap: bool = False
    alibi: bool = False
    bias: str | None = None
    precision: str = "ieee"

    @property
    def name(self) -> str:
        """Readable, safe as a file name; the architecture is left out."""
        parts = [
            self.kernel,
            self.dtype,
            f"d{self.head_dim}"
            + ("" if self.head_dim_v == self.head_dim else f"v{self.head_dim_v}"),
            f"m{self.block_m}n{self.block_n}",
            f"w{self.num_warps}s{self.num_stages}b{self.blocks_per_sm}",
            f"load{self.vector_bytes}",
        ]
        parts += [
            flag
            for flag, on in (
                ("qreg", self.q_in_registers),
                ("masked", self.masked),
                ("softcap", self.softcap),
                ("alibi", self.alibi),
                (f"bias_{self.bias}", self.bias),
                (self.precision, self.precision != "ieee"),
            )
            if on
        ]
        return "-".join(parts)

    @property
    def tile(self) -> str:
        """The part of the spec that a caller may choose, as ``config=`` takes it."""
        return (
            f"block_m={self.block_m} block_n={self.block_n} num_warps={self.num_warps}"
            f" num_stages={self.num_stages} blocks_per_sm={self.blocks_per_sm}"
            f" q_in_registers={int(self.q_in_registers)}"
        )

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.num_warps

    @property
    def compute_capability(self) -> int:
        """75, 80, 90, 120, ..."""
        return int(self.arch.removeprefix("sm_").rstrip("af"))

    def shared_buffers(self) -> dict[str, int]:
        """Bytes of each dynamic shared-memory buffer, as the head of the kernel's file lays them out."""
        return _BUFFERS[self.kernel](self)

    def static_shared_bytes(self) -> int:
        """Shared memory that the kernel declares itself, at most: the tile's coordinates, and rows' lse."""
        return 96 + (4 * self.block_m if self.masked else 0)

    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block in bytes."""
        return sum(self.shared_buffers().values())

    def accumulator_registers(self) -> int:
        """Registers of a thread that hold sums, scores and q: the kernel needs these and some more."""
        return _ACCUMULATORS[self.kernel](self)

    def constants(self) -> dict[str, str]:
        """Values of the names in kernels_cu/prelude.cuh.in."""
        values: dict[str, Any] = {
            "DTYPE": CUDA_TYPES[self.dtype],
            "BIAS_DTYPE": CUDA_TYPES[self.bias or "fp32"],
            "ARCH": self.compute_capability,
            "HEAD_DIM": self.head_dim,
            "HEAD_DIM_V": self.head_dim_v,
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "NUM_WARPS": self.num_warps,
            "BLOCKS_PER_SM": self.blocks_per_sm,
            "NUM_STAGES": self.num_stages,
            "VECTOR_BYTES": self.vector_bytes,
            "Q_IN_REGISTERS": self.q_in_registers,
            "HAS_MASK": self.masked,
            "HAS_SOFTCAP": self.softcap,
            "HAS_ALIBI": self.alibi,
            "HAS_BIAS": self.bias is not None,
            "TF32_PRODUCTS": 1 if self.precision == "tf32" else 3,
            "PARAMS_BYTES": PARAMS_BYTES,
        }
        return {name: _cuda_literal(value) for name, value in values.items()}


def _cuda_literal(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _mma_buffers(spec: KernelSpec) -> dict[str, int]:
    """Row pitches as in common/gemm_16bit.cuh and common/gemm_tf32.cuh."""
    d, dv = spec.head_dim, spec.head_dim_v
    if spec.dtype == "fp32":

        def pitch(dim: int) -> int:
            return dim if dim % 32 == 16 else dim + 16

        pitch_q, pitch_k, pitch_v = pitch(max(d, dv)), pitch(d), dv + 4
    else:
        pitch_q, pitch_k, pitch_v = max(d, dv) + 8, d + 8, dv + 8
    size = ELEMENT_BYTES[spec.dtype]
    rows = spec.num_stages * spec.block_n
    return {
        "q": spec.block_m * pitch_q * size,
        "k": rows * pitch_k * size,
        "v": rows * pitch_v * size,
    }


def _simt_buffers(spec: KernelSpec) -> dict[str, int]:
    """Row pitches as in forward_simt.cu; everything is float32 there."""
    pitch = -(-max(spec.head_dim, spec.head_dim_v) // 32) * 32 + 4
    return {
        "q": 4 * spec.block_m * pitch,
        "kv": 4 * spec.block_n * pitch,
        "weights": 4 * spec.block_m * (spec.block_n + 8),
    }


_BUFFERS = {"forward_mma": _mma_buffers, "forward_simt": _simt_buffers}


def _mma_accumulators(spec: KernelSpec) -> int:
    """A warp has 16 or 32 rows; a 16-bit q takes half a register an element."""
    rows = spec.block_m // spec.num_warps
    q = rows * spec.head_dim // 64 if spec.q_in_registers else 0
    return rows * (spec.head_dim_v + spec.block_n) // 32 + q


def _simt_accumulators(spec: KernelSpec) -> int:
    return spec.block_m * (spec.head_dim_v + spec.block_n) // spec.threads


_ACCUMULATORS = {"forward_mma": _mma_accumulators, "forward_simt": _simt_accumulators}
