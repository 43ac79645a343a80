"""The end of a log as a message quotes it."""

from __future__ import annotations

from pathlib import Path

from processes.logs import last_lines


def test_missing_or_empty_log_is_said_to_be_so(tmp_path: Path) -> None:
    assert "No such file" in last_lines(tmp_path / "none.log")
    (tmp_path / "empty.log").touch()
    assert "is empty" in last_lines(tmp_path / "empty.log")
