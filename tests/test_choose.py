"""From problem to spec: the order of choice, refusals before anything is compiled, and what a spec may know."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuflash.errors import InvalidConfigError, UnsupportedArchError
from cuflash.gpu import tiles
from cuflash.gpu.choose import CONFIG_KEYS, choose, pad_head_dim, parse_config, vector_bytes
from cuflash.gpu.device import Device
from cuflash.problem import AttentionProblem, describe_problem

ARCHS = (
    "sm_70",
    "sm_75",
    "sm_80",
    "sm_86",
    "sm_87",
    "sm_89",
    "sm_90",
    "sm_100",
    "sm_103",
    "sm_120",
    "sm_121",
)
H200 = Device.from_arch("sm_90")


def problem(dtype: str = "bf16", head_dim: int = 128, **fields: Any) -> AttentionProblem:
    plain = describe_problem(dtype=dtype, head_dim=head_dim, batch=2, seqlen_q=1000, nheads_q=4)
    return replace(plain, **fields)


def test_config_comes_before_the_variable_and_that_before_the_heuristic(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert "heuristic" in choose(problem(), H200).reason
    monkeypatch.setenv("CUFLASH_CONFIG", "block_n=32")
    from_variable = choose(problem(), H200)
    assert from_variable.spec.block_n == 32 and "CUFLASH_CONFIG" in from_variable.reason
    from_call = choose(problem(), H200, {"block_n": 16})
    assert from_call.spec.block_n == 16 and "config=" in from_call.reason


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("block_k=64", "block_k"),
        ("block_m", "name=value"),
        ({"block_m": "many"}, "integer"),
        ({"block_m": 64.5}, "integer"),
        ("kernel=forward_wgmma", "forward_simt"),
        (64, "mapping"),
        ("block_m=48", "16 or 32 rows"),
        ("block_n=40", "multiple of 16"),
        ("num_stages=9", "1 to 4"),
        ("num_warps=3", "num_warps"),
        ("blocks_per_sm=0", "blocks_per_sm"),
    ],
)
def test_a_config_that_cannot_be_is_refused(config: Any, words: str) -> None:
    with pytest.raises(InvalidConfigError, match=words):
        choose(problem(), H200, config)


def test_every_config_key_can_be_set() -> None:
    parsed = parse_config(" ".join(f"{key}=1" for key in CONFIG_KEYS))
    assert set(parsed) == set(CONFIG_KEYS) and parsed["q_in_registers"] is True


@pytest.mark.parametrize("arch", ["sm_75", "sm_86", "sm_90"])
def test_a_tile_too_large_is_refused_with_bytes_and_the_nearest_that_fits(arch: str) -> None:
    device = Device.from_arch(arch)
    config = {"block_m": 256, "block_n": 256, "num_warps": 8, "num_stages": 2}
    with pytest.raises(InvalidConfigError) as error:
        choose(problem("fp16", 256), device, config)
    text = str(error.value)
    assert all(name in text for name in ("q ", "k ", "v ", f"{device.shared_per_block:,}"))
    nearest = text.split("nearest tile that fits is ")[1]
    choose(problem("fp16", 256), device, nearest)  # what it advises works


def test_a_kernel_that_the_gpu_cannot_run_is_refused() -> None:
    with pytest.raises(InvalidConfigError, match="needs sm_80"):
        choose(problem("bf16"), Device.from_arch("sm_75"), "kernel=forward_mma")


@pytest.mark.parametrize(
    ("arch", "dtype", "kernel"),
    [
        ("sm_70", "fp16", "forward_simt"),
        ("sm_75", "fp16", "forward_mma"),
        ("sm_75", "bf16", "forward_simt"),
        ("sm_75", "fp32", "forward_simt"),
        ("sm_80", "bf16", "forward_mma"),
        ("sm_80", "fp32", "forward_mma"),
    ],
)
def test_tensor_cores_where_there_are_some(arch: str, dtype: str, kernel: str) -> None:
    choice = choose(problem(dtype), Device.from_arch(arch))
    assert choice.spec.kernel == kernel
    assert dtype in choice.reason and arch in choice.reason


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_every_default_tile_can_run(arch: str, dtype: str) -> None:
    device = Device.from_arch(arch)
    dims = [(n, n) for n in (1, 16, 33, 64, 65, 96, 112, 113, 128, 129, 192, 200, 256)]
    modifiers: list[dict[str, Any]] = [
        {},
        {"window_right": 0},
        {"softcap": 5.0},
        {"alibi": True},
        {"bias": "fp32"},
        {"softcap": 5.0, "alibi": True, "bias": "fp16", "window_left": 3},
        {"precision": "tf32"},
    ]
    for (dim, dim_v), width, fields in itertools.product(
        [*dims, (192, 128), (16, 256), (256, 1)], (16, 8, 4), modifiers
    ):
        asked = problem(dtype, dim, head_dim_v=dim_v, vector_bytes=width, **fields)
        tiles.check_tile(choose(asked, device).spec, device, "the heuristic")


@given(
    batch=st.integers(0, 1000),
    lengths=st.tuples(st.integers(0, 2**30), st.integers(0, 2**30)),
    heads=st.integers(1, 64),
    head_dim=st.integers(1, 256),
    scale=st.floats(-10, 10),
)
def test_a_spec_knows_no_length_batch_or_scale(
    batch: int, lengths: tuple[int, int], heads: int, head_dim: int, scale: float
) -> None:
    one = problem(head_dim=head_dim)
    other = replace(
        one, batch=batch, seqlen_q=lengths[0], seqlen_k=lengths[1], nheads_q=heads * one.nheads_k,
        softmax_scale=scale, packed=True, sink=True, seqlens_k=True,
    )  # fmt: skip
    assert choose(one, H200).spec == choose(other, H200).spec


@given(head_dim=st.integers(1, 256), width=st.sampled_from([2, 4, 8, 16]))
def test_no_row_ends_inside_a_load(head_dim: int, width: int) -> None:
    chosen = vector_bytes(problem(head_dim=head_dim, vector_bytes=width))
    assert chosen <= width and 2 * head_dim % chosen == 0
    assert pad_head_dim(head_dim) >= head_dim and pad_head_dim(head_dim) % 16 == 0


def test_an_unknown_architecture_is_named() -> None:
    with pytest.raises(UnsupportedArchError, match="sm_42"):
        Device.from_arch("sm_42")
