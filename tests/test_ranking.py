"""Verdicts: nobody is called faster inside the noise, and a drifting clock fools nobody."""

from __future__ import annotations

import random

import pytest

from cuflash.tuning.ranking import finalists, judge
from cuflash.tuning.record import Record
from cuflash.tuning.timing import HostTimer, Timing, in_turn, samples_within, summary


def record(name: str, ms: float | None, status: str = "ok") -> Record:
    return Record(name, name, status, ms=ms)


def noisy(ms: float, seed: int, noise: float = 0.01, drift: float = 0.0) -> list[float]:
    numbers = random.Random(seed)
    return [ms * (1 + drift * i) * numbers.uniform(1 - noise, 1 + noise) for i in range(15)]


def verdicts(rounds: dict[str, list[float]], default: str = "default") -> dict[str, str | None]:
    judged, _ = judge([record(name, 1.0) for name in rounds], rounds, default)
    return {r.config: r.verdict for r in judged}


def test_finalists_are_the_fastest_and_the_default() -> None:
    records = [record(str(i), float(i)) for i in range(1, 9)]
    records += [record("bad", None, "crash"), record("default", 99.0)]
    assert [r.config for r in finalists(records, "default")] == ["default", "1", "2", "3", "4", "5"]
    assert [r.config for r in finalists(records, "2")] == ["1", "2", "3", "4", "5"]
    assert finalists([record("bad", None, "wrong")], "bad") == []


def test_a_difference_within_the_noise_is_a_tie_and_the_default_stays() -> None:
    found = verdicts({"default": noisy(1.0, 0), "other": noisy(0.998, 1)})
    assert found == {"default": "winner", "other": "tie"}


def test_a_difference_beyond_the_noise_wins() -> None:
    found = verdicts(
        {
            "default": noisy(1.0, 0),
            "slow": noisy(1.2, 1),
            "fast": noisy(0.9, 2),
            "faster": noisy(0.8, 3),
        }
    )
    assert found == {"default": "default", "slow": "slower", "fast": "faster", "faster": "winner"}


def test_a_clock_that_drifts_by_a_fifth_hides_and_makes_no_difference() -> None:
    drift = 0.2 / 15
    assert (
        verdicts({"default": noisy(1.0, 0, drift=drift), "other": noisy(0.95, 1, drift=drift)})[
            "other"
        ]
        == "winner"
    )
    assert (
        verdicts({"default": noisy(1.0, 0, drift=drift), "other": noisy(1.0, 1, drift=drift)})[
            "other"
        ]
        == "tie"
    )


def test_equal_timings_to_the_last_bit_are_a_tie() -> None:
    assert verdicts({"default": [1.0] * 9, "other": [1.0] * 9}) == {
        "default": "winner",
        "other": "tie",
    }


def test_without_a_default_the_fastest_wins_without_a_ratio() -> None:
    records = [
        record("default", None, "crash"),
        record("a", 1.0),
        record("b", 2.0),
        record("c", 3.0),
    ]
    judged, winner = judge(records, {"a": [1.0, 1.1], "b": [2.0, 2.1]}, "default")
    assert winner is not None and winner.config == "a" and winner.ratio is None
    assert {r.config: r.verdict for r in judged} == {
        "default": "crash",
        "a": "winner",
        "b": "slower",
        "c": "slower",
    }
    assert judge([record("bad", None, "wrong")], {}, "bad")[1] is None


def test_a_summary_has_the_median_and_percentiles() -> None:
    timing = summary([5.0, 1.0, 2.0, 4.0, 3.0])
    assert timing == Timing(3.0, 2.0, 5.0, 5) and timing.spread == 1.0
    assert summary([2.0]) == Timing(2.0, 2.0, 2.0, 1)


def test_rounds_go_back_and_forth() -> None:
    order: list[str] = []
    found = in_turn(lambda name: float(order.append(name) or len(order)), ["a", "b", "c"], 3)
    assert order == ["a", "b", "c", "c", "b", "a", "a", "b", "c"]
    assert found == {"a": [1.0, 6.0, 7.0], "b": [2.0, 5.0, 8.0], "c": [3.0, 4.0, 9.0]}


@pytest.mark.parametrize(("cost", "expected"), [(1e-9, 100), (10.0, 20), (1e6, 5)])
def test_a_slow_call_is_sampled_less_but_never_once(cost: float, expected: int) -> None:
    assert samples_within(200.0, cost) == expected


def test_the_host_timer_warms_up_and_measures() -> None:
    import time

    calls: list[float] = []
    timing = HostTimer(budget=0.05).measure(lambda: (calls.append(0), time.sleep(0.002)))
    assert timing.ms >= 2.0 and timing.samples >= 5 and len(calls) == timing.samples + 2
    rounds = HostTimer().rounds({"a": lambda: time.sleep(0.001), "b": lambda: None}, 4)
    assert len(rounds["a"]) == 4 and min(rounds["a"]) >= 1.0
