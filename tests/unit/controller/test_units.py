"""Numbers as people read them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from controller.units import format_bytes, format_count, format_duration, format_number_of


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        (
            format_duration,
            {
                0.0: "0 ms",
                0.0042: "4 ms",
                0.9999: "1.0 s",
                2.51: "2.5 s",
                31.4: "31 s",
                59.7: "1m 00s",
                75: "1m 15s",
                4000: "1h 06m",
            },
        ),
        (
            format_count,
            {0: "0", 0.4567: "0.457", 12: "12", 984.62: "985", 1500: "1.5k", 1234567: "1.23M"},
        ),
        (
            format_bytes,
            {0: "0 B", 999: "999 B", 1023: "0.999 KiB", 1536: "1.5 KiB", 2**41: "2 TiB"},
        ),
        (lambda number: format_number_of(number, "step"), {0: "0 steps", 1: "1 step"}),
    ],
)
def test_number_reads_well(form: Callable[[float], str], expected: dict[float, str]) -> None:
    assert {number: form(number) for number in expected} == expected
