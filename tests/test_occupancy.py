"""Resident blocks by NVIDIA's rules, at figures that its occupancy calculator gives."""

from __future__ import annotations

import pytest

from cuflash.gpu.device import Device
from cuflash.gpu.occupancy import occupancy

H200 = Device.from_arch("sm_90")


@pytest.mark.parametrize(
    ("registers", "threads", "shared", "blocks", "limiter"),
    [
        (255, 128, 0, 2, "registers"),
        (128, 256, 0, 2, "registers"),
        (168, 384, 0, 1, "registers"),
        (32, 128, 0, 16, "registers"),
        (32, 1024, 0, 2, "registers"),
        (64, 256, 64 * 1024, 3, "shared memory"),
        (64, 128, 232_448, 1, "shared memory"),
        (16, 32, 0, 32, "blocks"),
        (16, 512, 0, 4, "threads"),
    ],
)
def test_blocks_of_an_h200(
    registers: int, threads: int, shared: int, blocks: int, limiter: str
) -> None:
    found = occupancy(H200, registers=registers, shared_bytes=shared, threads=threads)
    assert found.blocks == blocks
    assert found.by_limit[limiter] == blocks
    assert found.warps == blocks * threads // 32 and found.max_warps == 64


def test_what_does_not_fit_is_none() -> None:
    assert occupancy(H200, registers=255, shared_bytes=0, threads=1024).blocks == 0
    assert (
        occupancy(H200, registers=32, shared_bytes=300_000, threads=128).limiter == "shared memory"
    )


def test_small_gpus_hold_fewer() -> None:
    turing, ada = Device.from_arch("sm_75"), Device.from_arch("sm_89")
    assert occupancy(turing, registers=32, shared_bytes=0, threads=256).blocks == 4
    assert occupancy(ada, registers=32, shared_bytes=0, threads=256).blocks == 6
    assert occupancy(turing, registers=32, shared_bytes=32_768, threads=64).blocks == 2
