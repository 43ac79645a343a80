"""The record of the trained groups, against a group worked out by hand."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest
import torch

from tests.support.trainer import made_up
from tests.support.trainer.token_batch import algorithm
from trainer_pool.collectives import Collectives
from trainer_pool.data import trained
from trainer_pool.data.packing import pack
from trainer_pool.data.rows import StepBatch, rows_by_group
from trainer_pool.data.trained import TrainedLog, by_place, read_trained

# Rewards 1, 0, 0, 0: mean 0.25, deviation 0.5. The third has no token that is trained.
GROUP = made_up.group(
    made_up.trajectory([0, 0, 1, 1], episode=0, reward=1.0),
    made_up.trajectory([0, 0, 1, 0, 1, 1], episode=1),
    made_up.trajectory([0, 0], episode=2),
    made_up.trajectory([0, 0, 1], episode=3),
)


def note(log: TrainedLog, ranks: Collectives, shift: float) -> None:
    """Each token's log-probability by the trainer is `shift` less than its id."""
    batch = StepBatch(version=3, group_ids=("other", "g7"), groups=(GROUP,))
    (rows,) = rows_by_group(batch, algorithm(), ranks)
    micro_batches = pack(rows, max_tokens=10)
    assert len(micro_batches) == 2
    for micro_batch in micro_batches:
        log.note(batch.group_ids, rows, micro_batch, micro_batch.targets_N.float() - shift)


def test_group_has_the_advantages_of_the_loss_and_the_trainers_logprobs(
    ranks: Collectives, tmp_path: Path
) -> None:
    log = TrainedLog(tmp_path, 0, rate=1.0, seed=0)
    for step, shift in ((1, 7.0), (2, 9.25)):
        note(log, ranks, shift)
        log.write(step=step, version=step - 1)
    log.close()
    found = read_trained(tmp_path, "g7")
    assert found is not None and (found.step, found.version) == (2, 1), "the last time"
    first, second, third, fourth = by_place(found, 4)
    assert third is None and first is not None and second is not None and fourth is not None
    assert first.advantage == pytest.approx(1.5, rel=1e-5)
    assert second.advantage == fourth.advantage == pytest.approx(-0.5, rel=1e-5)
    assert first.logprobs == [None, None, -7.25, -6.25]
    assert second.logprobs == [None, None, -7.25, None, -5.25, -4.25]
    assert first.advantages is None
    assert read_trained(tmp_path, "g") is None and by_place(None, 2) == [None, None]


def test_newest_files_are_read_first_and_older_ones_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "trained").mkdir()
    for name, at, changed in (
        ("rank-1.jsonl", 20.0, 31.0),
        ("rank-0.jsonl", 30.0, 30.5),
        ("rank-0.jsonl.1", 10.0, 10.5),
    ):
        path = tmp_path / "trained" / name
        line = {"group_id": "g", "step": int(at), "version": 0, "at": at, "trajectories": []}
        path.write_text(json.dumps(line, separators=(",", ":")) + "\n")
        os.utime(path, (changed, changed))
    read = list[str]()
    own = trained.read_bytes
    monkeypatch.setattr(trained, "read_bytes", lambda path: (read.append(path.name), own(path))[1])
    found = read_trained(tmp_path, "g")
    assert found is not None and found.step == 30
    assert read == ["rank-1.jsonl", "rank-0.jsonl"]


def test_advantages_that_differ_by_token_are_kept_by_token(tmp_path: Path) -> None:
    log = TrainedLog(tmp_path, 0, rate=1.0, seed=0)
    row = made_up.row([0, 1, 1], advantages=torch.tensor([9.0, 1.0, -2.0]).numpy())
    row.group, row.trajectory = 0, 1
    (batch,) = pack([row], max_tokens=10)
    log.note(["g"], [row], batch, torch.tensor([-1.0, float("-inf")]))
    log.write(step=1, version=0)
    log.close()
    [line] = log.path.read_text().splitlines()
    [one] = json.loads(line)["trajectories"]
    assert one == {
        "place": 1,
        "advantage": -0.5,
        "logprobs": [None, -1.0, None],
        "advantages": [None, 1.0, -2.0],
    }


def test_groups_that_are_not_recorded_leave_nothing(ranks: Collectives, tmp_path: Path) -> None:
    log = TrainedLog(tmp_path, 0, rate=1e-9, seed=0)
    note(log, ranks, 1.0)
    log.write(step=1, version=0)
    log.close()
    assert not log.path.exists()


def test_disk_that_takes_nothing_costs_lines_alone(
    ranks: Collectives, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trained, "FOLDER", "none/deeper")
    log = TrainedLog(tmp_path, 0, rate=1.0, seed=0)
    note(log, ranks, 1.0)
    log.write(step=1, version=0)
    log.close()
    assert log.num_lost == 1


def test_disk_that_hangs_is_waited_for_once(
    ranks: Collectives, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, may_end, waits_for = list[float](), threading.Event(), trained.wait
    monkeypatch.setattr(trained, "WAIT_S", 0.01)
    monkeypatch.setattr(trained, "wait", lambda all, s: (waits.append(s), waits_for(all, s))[1])
    log = TrainedLog(tmp_path, 0, rate=1.0, seed=0)
    monkeypatch.setattr(log, "append", lambda make: may_end.wait(60))

    def write() -> None:
        note(log, ranks, 1.0)
        log.write(step=1, version=0)

    for _ in range(4):
        write()
    assert (waits, log.num_lost) == ([0.01, 0.01, 0, 0], 3)
    may_end.set()
    waits_for(log._writing, 60)
    write()
    waits_for(log._writing, 60)
    write()
    assert (waits[4:], log.num_lost) == ([0, 0.01], 3)
    log.close()
