"""What well-known GPUs can do at most, by name: what a roofline is drawn from.

Figures are NVIDIA's data sheets' and architecture papers': dense (never sparse) TFLOP/s at boost clock,
16-bit products summed in float32, and the memory's bandwidth. GB10's are derived from its sparse FP4
figure. A GPU that is not here is unknown, never guessed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from cuflash.errors import InvalidArgumentError
from cuflash.gpu.device import Device


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU as it is sold.

    Attributes
    ----------
    name : str
        As the driver tells it.
    compute_capability, sm_count : int
    half, tf32, fp32 : float
        TFLOP/s of tensor cores on 16-bit and on tf32 numbers (0: none), and of plain float32.
    bandwidth : float
        TB/s.
    """

    name: str
    compute_capability: int
    sm_count: int
    half: float
    tf32: float
    fp32: float
    bandwidth: float


# Words of a name -> card. The most words that a name has decide.
_CARDS = {
    "v100": Card("Tesla V100-SXM2-16GB", 70, 80, 125, 0, 15.7, 0.9),
    "v100 pcie": Card("Tesla V100-PCIE-16GB", 70, 80, 112, 0, 14, 0.9),
    "t4": Card("Tesla T4", 75, 40, 65, 0, 8.1, 0.32),
    "a100": Card("NVIDIA A100-SXM4-40GB", 80, 108, 312, 156, 19.5, 1.555),
    "a100 80gb": Card("NVIDIA A100-SXM4-80GB", 80, 108, 312, 156, 19.5, 2.039),
    "a100 80gb pcie": Card("NVIDIA A100 80GB PCIe", 80, 108, 312, 156, 19.5, 1.935),
    "a30": Card("NVIDIA A30", 80, 56, 165, 82, 10.3, 0.933),
    "a10": Card("NVIDIA A10", 86, 72, 125, 62.5, 31.2, 0.6),
    "a10g": Card("NVIDIA A10G", 86, 80, 70, 35, 35, 0.6),
    "a40": Card("NVIDIA A40", 86, 84, 149.7, 74.8, 37.4, 0.696),
    "a6000": Card("NVIDIA RTX A6000", 86, 84, 154.8, 77.4, 38.7, 0.768),
    "rtx 3090": Card("NVIDIA GeForce RTX 3090", 86, 82, 71, 35.6, 35.6, 0.936),
    "l4": Card("NVIDIA L4", 89, 58, 121, 60, 30.3, 0.3),
    "l40": Card("NVIDIA L40", 89, 142, 181, 90.5, 90.5, 0.864),
    "l40s": Card("NVIDIA L40S", 89, 142, 362, 183, 91.6, 0.864),
    "rtx 4090": Card("NVIDIA GeForce RTX 4090", 89, 128, 165.2, 82.6, 82.6, 1.008),
    "6000 ada": Card("NVIDIA RTX 6000 Ada Generation", 89, 142, 364, 182, 91.1, 0.96),
    "h100": Card("NVIDIA H100 80GB HBM3", 90, 132, 989, 495, 67, 3.35),
    "h100 pcie": Card("NVIDIA H100 PCIe", 90, 114, 756, 378, 51, 2.04),
    "h100 nvl": Card("NVIDIA H100 NVL", 90, 132, 835, 418, 60, 3.9),
    "h200": Card("NVIDIA H200", 90, 132, 989, 495, 67, 4.8),
    "h200 nvl": Card("NVIDIA H200 NVL", 90, 132, 835, 418, 60, 4.8),
    "gh200": Card("NVIDIA GH200 480GB", 90, 132, 989, 495, 67, 4.0),
    "b200": Card("NVIDIA B200", 100, 148, 2250, 1125, 75, 8.0),
    "gb200": Card("NVIDIA GB200", 100, 152, 2500, 1250, 80, 8.0),
    "rtx 5090": Card("NVIDIA GeForce RTX 5090", 120, 170, 209.5, 104.8, 104.8, 1.792),
    "gb10": Card("NVIDIA GB10", 121, 48, 125, 62.5, 31, 0.273),
}  # fmt: skip
# Words that make another GPU of a name: "RTX 4090 Laptop GPU", "H100 ... MIG 1g.10gb".
_OTHERS = {"laptop", "mobile", "max", "mig", "ti", "super", "d"}


def card(name: str) -> Card | None:
    """Find a well-known GPU by its name, whole as the driver tells it or short."""
    words = set(re.findall(r"[a-z0-9]+", name.lower()))
    if words & _OTHERS:
        return None
    fitting = [key for key in _CARDS if words.issuperset(key.split())]
    return _CARDS[max(fitting, key=lambda key: len(key.split()))] if fitting else None


def device(name: str) -> Device:
    """Describe a well-known GPU without having one.

    Raises
    ------
    InvalidArgumentError
        For a name that is not known.
    """
    found = card(name)
    if found is None:
        raise InvalidArgumentError(
            f"gpu is {name!r}: one of {', '.join(key.upper() for key in _CARDS)} is known; give the"
            " architecture of another one"
        )
    usual = Device.from_arch(f"sm_{found.compute_capability}")
    return replace(usual, name=found.name, sm_count=found.sm_count)


def tflops(known: Card, kernel: str, dtype: str, precision: str) -> float:
    """Most TFLOP/s of a GPU in a kernel's products; 0 where it has no such units.

    float32 to full accuracy on tensor cores takes three tf32 products for each.
    """
    if kernel.endswith("_simt"):
        return known.fp32
    if dtype != "fp32":
        return known.half
    return known.tf32 / (1 if precision == "tf32" else 3)
