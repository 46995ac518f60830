"""Random problems on the GPU: accuracy of out and lse, and nothing written outside of out.

``pytest -n 12 --examples 170`` draws over 2,000; every shard has a seed of its own.
"""

from __future__ import annotations

import pytest
import strategies
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.gpu

SHARDS = 12


@pytest.mark.parametrize("shard", range(SHARDS))
def test_random_problems(shard: int, request: pytest.FixtureRequest) -> None:
    import cupy

    @seed(shard)
    @settings(
        max_examples=request.config.getoption("--examples"),
        deadline=None,
        database=None,
        phases=[Phase.generate],  # shrinking would compile hundreds of kernels
        suppress_health_check=list(HealthCheck),
    )
    @given(drawn=st.one_of(strategies.problems(), strategies.problems(max_head_dim=64)))
    def check(drawn: strategies.Drawn) -> None:
        strategies.build(drawn, cupy).check()

    check()
