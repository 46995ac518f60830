"""Specs and the parameter struct: the same names, sizes and order on the host and in kernels_cu."""

from __future__ import annotations

import re
from dataclasses import replace
from string import Template
from typing import Any

from cuflash.gpu import params
from cuflash.gpu.render import kernel_root
from cuflash.gpu.shipped import ARCHS, shipped_specs
from cuflash.gpu.spec import PARAMS_BYTES, KernelSpec

SPEC = KernelSpec("forward_mma", "sm_90", "bf16", 128, 128, 128, 64, 4, 2)


def test_names_are_safe_and_tell_specs_apart() -> None:
    for arch in ARCHS:
        specs = shipped_specs(arch)
        names = [spec.name for spec in specs]
        assert len(set(names)) == len(specs)
        assert all(re.fullmatch(r"[\w-]+", name) for name in names)


def test_every_field_of_a_spec_shows_in_its_constants_and_name() -> None:
    changes: dict[str, Any] = dict(
        dtype="fp16", head_dim=64, head_dim_v=64, block_m=64, block_n=32, num_warps=8, num_stages=1, blocks_per_sm=2,
        q_in_registers=True, vector_bytes=8, masked=False, softcap=True, alibi=True, bias="fp16", precision="tf32",
        arch="sm_80",
    )  # fmt: skip
    for field, value in changes.items():
        other = replace(SPEC, **{field: value})
        assert other.constants() != SPEC.constants(), field
        # Kernels of different architectures lie in different folders.
        assert other.name != SPEC.name or field == "arch", field


def test_constants_are_those_of_the_prelude_and_of_the_editor() -> None:
    names = set(SPEC.constants())
    assert set(Template((kernel_root() / "prelude.cuh.in").read_text()).get_identifiers()) == names
    defaults = (kernel_root() / "editor_defaults.cuh").read_text()
    constants = set(re.findall(r"constexpr \w+ (\w+) =", defaults))
    assert constants == names - {"DTYPE", "BIAS_DTYPE"}
    assert f"PARAMS_BYTES = {PARAMS_BYTES};" in defaults


def test_shared_memory_by_buffer() -> None:
    assert SPEC.shared_buffers() == {
        "q": 128 * 136 * 2,
        "k": 2 * 64 * 136 * 2,
        "v": 2 * 64 * 136 * 2,
    }
    single = replace(SPEC, dtype="fp32", block_n=32, num_stages=1)
    assert single.shared_buffers() == {"q": 128 * 144 * 4, "k": 32 * 144 * 4, "v": 32 * 132 * 4}
    plain = replace(SPEC, kernel="forward_simt", block_m=64, block_n=32, num_warps=8, num_stages=1)
    assert plain.shared_bytes() == 4 * ((64 + 32) * 132 + 64 * 40)


def test_the_parameter_struct_has_the_members_of_params_cuh() -> None:
    text = (kernel_root() / "params.cuh").read_text()
    struct = re.search(r"struct ForwardParams \{(.*?)\n\};", text, re.S)
    assert struct
    code = re.sub(r"//.*", "", struct[1])
    members = [
        (kind.strip(), name.strip(" *"))
        for kind, names in re.findall(r"((?:const )?\w+(?: long)?\*?) ([^;]+);", code)
        for name in names.split(",")
    ]
    assert tuple(name for kind, name in members if kind.endswith("*")) == params.POINTERS
    sizes = {"Strides": 32, "long long": 8, "int": 4, "float": 4}
    assert sum(8 if kind.endswith("*") else sizes[kind] for kind, _ in members) == PARAMS_BYTES
    assert [kind for kind, _ in members if not kind.endswith("*")] == (
        ["Strides"] * 5 + ["long long"] * 4 + ["int"] * 12 + ["float"] * 2
    )


def test_packing_puts_numbers_where_the_kernel_reads_them() -> None:
    packed = params.pack(range(1, 21), (21, 22), (23, 24), range(25, 37), 0.5, 2.0)
    words = params.Words.from_buffer_copy(packed)
    assert list(words[: len(params.POINTERS)]) == [0] * len(params.POINTERS)
    assert list(words[len(params.POINTERS) :][:24]) == list(range(1, 25))
    assert len(packed) == PARAMS_BYTES
