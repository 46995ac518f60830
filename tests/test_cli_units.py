"""Sizes and ages, read and written."""

import click
import pytest

from cuflash.cli.units import AGE, SIZE, in_age, in_bytes, in_milliseconds


@pytest.mark.parametrize(
    ("function", "value", "text"),
    [
        (in_bytes, 0, "0 B"),
        (in_bytes, 1023, "1023 B"),
        (in_bytes, 1024, "1 KiB"),
        (in_bytes, 232448, "227 KiB"),
        (in_bytes, 5 << 30, "5 GiB"),
        (in_bytes, 5000 << 40, "5000 TiB"),
        (in_milliseconds, 0.01234, "0.0123"),
        (in_milliseconds, 34.567, "34.6"),
        (in_milliseconds, 1234.6, "1235"),
        (in_age, 5, "5 s"),
        (in_age, 300, "5 min"),
        (in_age, 93784, "26 h"),
        (in_age, 30 * 86400, "30 d"),
    ],
)
def test_written(function, value, text):
    assert function(value) == text


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (SIZE, "500M", 500 << 20),
        (SIZE, "500 MiB", 500 << 20),
        (SIZE, "1.5g", 3 << 29),
        (SIZE, "0", 0),
        (SIZE, "77b", 77),
        (AGE, "30d", 30 * 86400),
        (AGE, "12H", 43200),
        (AGE, "0.5h", 1800),
        (AGE, "90s", 90),
    ],
)
def test_read(kind, text, value):
    assert kind.convert(text, None, None) == value


@pytest.mark.parametrize(
    ("kind", "text"),
    [(SIZE, "500X"), (SIZE, "-1M"), (SIZE, ""), (SIZE, "M"), (AGE, "30"), (AGE, "d"), (AGE, "1y")],
)
def test_refused_with_an_example(kind, text):
    with pytest.raises(click.BadParameter, match="write for example"):
        kind.convert(text, None, None)
