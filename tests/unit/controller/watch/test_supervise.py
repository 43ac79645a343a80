from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ray.exceptions import ActorDiedError, RayActorError

from controller.watch.supervise import death, failure
from tests.support.repository import ROOT


def test_last_lines_of_a_log_hold_no_escape(tmp_path: Path) -> None:
    log = tmp_path / "engine-0.log"
    log.write_bytes(b"loaded\nprompt: \x1b]52;c;ZXZpbA==\x07 \xe2\x80\xaeevil\x9b2J\n")
    said = str(failure("engine-0", "died", log))
    assert "\x1b" not in said and "\x07" not in said and "\u202e" not in said
    assert "␛]52;c;" in said


def test_failure_ends_with_the_last_lines_of_the_log(tmp_path: Path) -> None:
    log = tmp_path / "engine-0.log"
    log.write_text("\n".join(f"line {i}" for i in range(100)))
    message = str(failure("engine-0", "died (exit code -9)", log))
    assert message.startswith("engine-0 died (exit code -9)") and message.endswith("line 99")
    assert "line 84" not in message and "line 85" in message


LOST_NODE = """The actor died unexpectedly before finishing this task.
\tclass_name: EngineActor
\tactor_id: 8ebf6bba976b384aad971eb501000000
\tpid: 4711
\tip: 10.0.0.2
The actor died because its node has died. Node Id: 2f6d0c
\tthe actor's node was terminated unexpectedly: health check failed for too long
"""


def test_death_with_a_lost_node_names_the_node_instead_of_a_healthy_log(tmp_path: Path) -> None:
    log = tmp_path / "engine-0.log"
    log.write_text("all is well")
    message = str(death("engine-0", ActorDiedError(), log))
    assert message.startswith("engine-0 died") and message.endswith("all is well")
    message = str(death("engine-0", RayActorError(None, LOST_NODE), log))
    assert message.startswith("engine-0 is lost with its node 10.0.0.2 (health check failed")
    assert "all is well" not in message and str(log) in message


ACTOR = """
import asyncio, os, uvloop
from controller.watch.supervise import enter_process

async def run_program_of_an_agent():
    shell = await asyncio.create_subprocess_exec("sh", "-c", "cat <&7 || echo closed")
    await shell.wait()

os.dup2(os.open(__file__, os.O_RDONLY), 7)  # inheritable, as what Ray's native code opens
enter_process()
uvloop.run(run_program_of_an_agent())
"""


def test_programs_that_an_actor_starts_inherit_nothing_of_ray(tmp_path: Path) -> None:
    (tmp_path / "actor.py").write_text(ACTOR)
    command = [sys.executable, str(tmp_path / "actor.py")]
    ran = subprocess.run(
        command, capture_output=True, text=True, check=True, env={"PYTHONPATH": str(ROOT)}
    )
    assert ran.stdout == "closed\n"
