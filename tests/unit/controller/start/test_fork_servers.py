"""When the fork servers of a launch end."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from configs.environment import FORK_SERVERS_VARIABLE
from controller.start import fork_servers
from processes.child import has_ended
from processes.fork_server import Kind


def test_servers_that_still_import_end_at_once_with_a_launch_that_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "gate")
    (tmp_path / "endless.py").write_text(f"open({str(tmp_path / 'gate')!r}).readline()")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv(FORK_SERVERS_VARIABLE, raising=False)
    monkeypatch.setattr(fork_servers, "_NVIDIA", tmp_path / "no-gpu")
    monkeypatch.setattr(fork_servers, "_END_S", 60.0)
    had_ended, kill_group = [], fork_servers.kill_group

    def note(group: int) -> None:
        had_ended.append(has_ended(group, 0))
        kill_group(group)

    monkeypatch.setattr(fork_servers, "kill_group", note)
    kind = Kind(programs=["never.py"], imports=["endless"])
    gate = os.open(tmp_path / "gate", os.O_RDWR)
    try:
        with pytest.raises(ValueError, match="refused"), fork_servers.fork_servers([kind]):
            raise ValueError("refused")
    finally:
        os.close(gate)
    assert had_ended == [True]
