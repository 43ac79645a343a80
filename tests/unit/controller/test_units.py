"""Numbers as people read them."""

from __future__ import annotations

from controller.units import format_bytes, format_count, format_duration, format_number_of


def test_durations_read_well() -> None:
    seconds = (0.0, 0.0042, 0.9999, 2.51, 31.4, 59.7, 75, 4000)
    words = ["0 ms", "4 ms", "1.0 s", "2.5 s", "31 s", "1m 00s", "1m 15s", "1h 06m"]
    assert [format_duration(one) for one in seconds] == words


def test_counts_and_sizes_read_well() -> None:
    counts = (0, 0.4567, 12, 984.62, 1500, 1234567)
    assert [format_count(n) for n in counts] == ["0", "0.457", "12", "985", "1.5k", "1.23M"]
    sizes, words = (0, 999, 1023, 1536, 2**41), ["0 B", "999 B", "0.999 KiB", "1.5 KiB", "2 TiB"]
    assert [format_bytes(size) for size in sizes] == words
    assert [format_number_of(n, "step") for n in (0, 1)] == ["0 steps", "1 step"]
