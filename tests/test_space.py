"""What a sweep tries: valid, distinct, the heuristic's tile first; what is left out has its reason."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cuflash.errors import InvalidConfigError
from cuflash.gpu import tiles
from cuflash.gpu.choose import choose, parse_config
from cuflash.gpu.device import Device
from cuflash.gpu.shipped import shipped_specs
from cuflash.problem import describe_problem
from cuflash.tuning.space import SPACES, config_name, parse_space, plan, register_room, why_not

H200 = Device.from_arch("sm_90")
ARCHS = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(ARCHS), st.sampled_from(["fp16", "bf16", "fp32"]), st.integers(1, 256), st.booleans(),
    st.sampled_from([0.0, 20.0]), st.sampled_from([2, 4, 16]),
)  # fmt: skip
def test_every_candidate_can_be_chosen_and_fits(
    arch: str, dtype: str, head_dim: int, causal: bool, softcap: float, width: int
) -> None:
    device = Device.from_arch(arch)
    problem = describe_problem(
        dtype=dtype, head_dim=head_dim, causal=causal, softcap=softcap, vector_bytes=width
    )
    found = plan(problem, device)
    assert found.default.spec == choose(problem, device, {}).spec
    assert len({c.spec for c in found.candidates}) == len(found.candidates)
    for candidate in found.candidates:
        # As a call would take it, in both forms; choose() checks it.
        assert choose(problem, device, candidate.config).spec == candidate.spec
        assert choose(problem, device, candidate.name).spec == candidate.spec
        assert tiles.fits(candidate.spec, device) and tiles.broken_rule(candidate.spec) is None
    for candidate in found.candidates[1:]:
        assert why_not(candidate.spec, device) is None


def test_what_is_left_out_is_accounted_for() -> None:
    problem = describe_problem(head_dim=128, causal=True)
    found = plan(problem, H200)
    axes = SPACES["forward_mma"](problem)
    total = 1
    for values in axes.values():
        total *= len(values)
    in_space = sum(
        all(int(getattr(c.spec, name)) in values for name, values in axes.items())
        for c in found.candidates
    )
    assert in_space + len(found.pruned) == total
    kinds = {"rule of the kernel", "shared memory", "occupancy", "registers", "same kernel"}
    assert set(found.pruned_by_kind) == kinds
    assert found.pruned_by_kind == Counter(p.kind for p in found.pruned)
    assert all(p.reason and p.config["block_m"] for p in found.pruned)


def test_near_tiles_come_first() -> None:
    found = plan(describe_problem(head_dim=128), H200)
    near = [c.spec for c in found.candidates[1:4]]
    for spec in near:
        changed = [n for n in ("block_m", "block_n", "num_warps", "num_stages") if
                   getattr(spec, n) != getattr(found.default.spec, n)]  # fmt: skip
        assert len(changed) <= 1


def test_a_space_of_one_s_own() -> None:
    problem = describe_problem(head_dim=64)
    text = plan(problem, H200, "block_m=128 block_n=32,64 num_warps=4 num_stages=2 blocks_per_sm=2")
    axes = dict(block_m=128, block_n=[32, 64], num_warps=(4,), num_stages=2, blocks_per_sm=2)
    given = plan(problem, H200, axes)
    assert [c.spec for c in text.candidates] == [c.spec for c in given.candidates]
    assert {c.spec.block_n for c in text.candidates} == {32, 64}
    both = plan(problem, H200, "kernel=forward_mma,forward_simt block_m=64")
    assert {c.spec.kernel for c in both.candidates} == {"forward_mma", "forward_simt"}


@pytest.mark.parametrize(
    ("space", "words"),
    [
        ("block_q=1", "block_q.*axes"),
        ("block_m", "axis=value"),
        ("block_m=", "axis=value"),
        ("block_m=64.5", "integer"),
        ("kernel=backward", "can be swept"),
        ({"block_m": []}, "no value"),
        ({"block_n": range(16, 2000), "num_warps": range(1, 20)}, "combinations"),
    ],
)
def test_a_space_that_is_none_is_refused(space: object, words: str) -> None:
    with pytest.raises(InvalidConfigError, match=words):
        plan(describe_problem(), H200, space)  # type: ignore[arg-type]


def test_axes_are_read_once_each() -> None:
    assert parse_space("block_m=64,64,128 q_in_registers=1,0") == {
        "block_m": (64, 128),
        "q_in_registers": (1, 0),
    }
    assert parse_space(None) == {}


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"])
def test_what_ships_would_not_be_pruned_for_its_registers(arch: str) -> None:
    """The estimate is a lower bound: no spec that compiles without spills may be beyond it."""
    for spec in shipped_specs(arch):
        assert spec.accumulator_registers() < register_room(spec), spec.name


def test_names_are_configs() -> None:
    config = {"kernel": "forward_mma", "block_m": 64, "q_in_registers": True}
    assert config_name(config) == "kernel=forward_mma block_m=64 q_in_registers=1"
    assert parse_config(config_name(config)) == config
