"""Numbers formatted for people."""

from __future__ import annotations


def format_bytes(num_bytes: float) -> str:
    """1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.3g} TiB"


def format_count(number: float) -> str:
    """1234567 -> "1.23M"; below a thousand the number itself."""
    for limit, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= limit:
            return f"{number / limit:.3g}{unit}"
    return f"{number:.0f}" if number == int(number) or number >= 100 else f"{number:.3g}"


def format_number_of(number: int, what: str) -> str:
    """1, "group" -> "1 group", 3 -> "3 groups"."""
    return f"{number} {what}" + "s" * (number != 1)


def format_duration(seconds: float) -> str:
    """0.0042 -> "4 ms", 2.51 -> "2.5 s", 31.4 -> "31 s", 75 -> "1m 15s", 4000 -> "1h 06m"."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m {rest:02d}s"
    return f"{minutes // 60}h {minutes % 60:02d}m"
