"""Numbers as people read them."""

from __future__ import annotations

import pytest

from controller.units import format_bytes, format_count, format_duration


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 ms"),
        (0.0042, "4 ms"),
        (0.9999, "1.0 s"),
        (2.51, "2.5 s"),
        (31.4, "31 s"),
        (59.7, "1m 00s"),
        (75, "1m 15s"),
        (4000, "1h 06m"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (0.4567, "0.457"), (12, "12"), (984.62, "985"), (1500, "1.5k"), (1234567, "1.23M")],
)
def test_counts(number: float, text: str) -> None:
    assert format_count(number) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1023, "0.999 KiB"),
        (1536, "1.5 KiB"),
        (14 * 2**30, "14 GiB"),
        (2**41, "2 TiB"),
    ],
)
def test_bytes(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text
