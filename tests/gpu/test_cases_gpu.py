"""Every case of cases.py, from public bug reports, on the GPU's kernels in every dtype it allows."""

from __future__ import annotations

import pytest
import support

import cuflash

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("name", "dtype", "bias_dtype"), support.case_parameters())
def test_case(name: str, dtype: str, bias_dtype: str | None) -> None:
    import cupy

    support.run_case(name, dtype, bias_dtype, cupy)
    plan = cuflash.last_plan()
    assert plan is not None and plan.kernel.startswith("forward_")


@pytest.mark.parametrize(("name", "dtype", "bias_dtype"), support.case_parameters())
def test_case_on_the_plain_kernel(
    name: str, dtype: str, bias_dtype: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import cupy

    monkeypatch.setenv("CUFLASH_CONFIG", "kernel=forward_simt")
    support.run_case(name, dtype, bias_dtype, cupy)
    plan = cuflash.last_plan()
    assert plan is not None and plan.kernel == "forward_simt"
