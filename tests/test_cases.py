"""Every case of cases.py, from public bug reports, on the NumPy road."""

from __future__ import annotations

import cases
import numpy as np
import pytest
import support

PARAMETERS = support.case_parameters()


@pytest.mark.parametrize(("name", "dtype", "bias_dtype"), PARAMETERS)
def test_case(name: str, dtype: str, bias_dtype: str | None) -> None:
    support.run_case(name, dtype, bias_dtype, np)


def test_every_case_runs_in_some_dtype() -> None:
    assert {name for name, *_ in PARAMETERS} == set(cases.CASES)
    assert len(cases.CASES) == 40


def test_the_cases_agree_with_themselves(capsys: pytest.CaptureFixture[str]) -> None:
    """Its own check: against an independent formula, and of gradients by differences."""
    assert cases.main() == 0, capsys.readouterr().out
