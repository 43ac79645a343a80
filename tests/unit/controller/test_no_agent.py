"""The stand-in for the dashboard agent of a Ray on one machine."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from ray._raylet import (
    DASHBOARD_AGENT_LISTEN_PORT_NAME,
    METRICS_AGENT_PORT_NAME,
    METRICS_EXPORT_PORT_NAME,
)

from controller import no_agent
from tests.support.rollout import until


async def test_agent_says_that_it_serves_nothing_in_the_files_of_ray_and_ends_when_asked(
    tmp_path: Path,
) -> None:
    words = ["agent.py", f"--session-dir={tmp_path}", "--node-id=ab12", "--head"]
    names = {DASHBOARD_AGENT_LISTEN_PORT_NAME, METRICS_AGENT_PORT_NAME, METRICS_EXPORT_PORT_NAME}
    expected = {f"{name}_ab12": "-1" for name in names}

    def written() -> dict[str, str]:
        return {path.name: path.read_text() for path in tmp_path.glob("*_ab12")}

    command = [sys.executable, "-I", "-S", no_agent.__file__, *words]
    with subprocess.Popen(command) as agent:
        await until(lambda: written() == expected)
        agent.terminate()
    assert agent.returncode == -signal.SIGTERM
