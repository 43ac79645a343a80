"""A launch whose tools run in containers."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest

from rollout_pool.worker.record import all_recorded
from tests.support.bubblewrap import skip_without_bubblewrap
from tests.support.launches import RUN, Machine, end_all, finish, result_of, start

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1500)]
NAMED = "leash-????????????-????????"
"""Folders of containers."""
CALL = r"""
start: "<tool_call>{\"name\": \"shell\", \"arguments\": {\"command\": \"touch " /[a-d]/ "\"}}</tool_call>"
"""  # noqa: E501


def test_launch_trains_on_what_tools_did_in_containers_and_leaves_none(tmp_path: Path) -> None:
    """Each answer is a call that makes one of four files, and the tests want one of two of them."""
    skip_without_bubblewrap()
    row = {"problem": "make a", "files": {"x": ""}, "test_command": [["test", "-e", "a"], ["true"]]}
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 2)
    machine, before = Machine.look(), {*Path(tempfile.gettempdir()).glob(NAMED)}
    settings = [f"task.path={tmp_path}/rows.jsonl", f"task.grammar={CALL}", "task.eval_size=1"]
    settings += [f"task.eval_path={tmp_path}/held_out.jsonl", "rollout.sampling.top_k=50"]
    (tmp_path / "held_out.jsonl").write_text(json.dumps(row | {"problem": "make b"}))
    settings += ["trainer.num_steps=3", "trainer.groups_per_step=2", "trainer.checkpoint_every=3"]
    settings += ["trainer.warm_start.num_steps=0", "task.max_turns=2", "rollout.log_rate=1"]
    process = start(tmp_path, RUN, *settings, experiment="repository")
    try:
        output = finish(process, timeout_s=600)
    finally:
        end_all(tmp_path)
    assert process.returncode == 0, output[-6000:]
    assert (result_of(output)["steps"], result_of(output)["groups_trained"]) == (3, 6)
    trajectories = [t for one in all_recorded(tmp_path / RUN) for t in one.group.trajectories]
    assert len(trajectories) >= 24
    for one in trajectories:
        assert (one.reward_parts["tool_calls"], one.reward_parts["tool_errors"]) == (2, 0)
    assert {one.reward for one in trajectories} == {0.5, 1.0}
    assert {*Path(tempfile.gettempdir()).glob(NAMED)} <= before
    machine.assert_nothing_left(tmp_path)
