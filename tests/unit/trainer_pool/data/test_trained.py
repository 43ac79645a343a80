"""The record of the trained groups, against a group worked out by hand."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
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
        log.write(step=step, version=step + 2)
    log.close()
    found = read_trained(tmp_path, replace(GROUP, group_id="g7"))
    assert found is not None and (found.step, found.version) == (2, 4), "the last time"
    first, second, third, fourth = by_place(found, 4)
    assert third is None and first is not None and second is not None and fourth is not None
    assert first.advantage == pytest.approx(1.5, rel=1e-5)
    assert second.advantage == fourth.advantage == pytest.approx(-0.5, rel=1e-5)
    assert first.logprobs == [None, None, -7.25, -6.25]
    assert second.logprobs == [None, None, -7.25, None, -5.25, -4.25]
    assert first.advantages is None
    assert read_trained(tmp_path, replace(GROUP, group_id="g")) is None
    assert by_place(None, 2) == [None, None]


def test_lines_of_versions_that_may_have_trained_the_group_alone_are_looked_at(
    tmp_path: Path,
) -> None:
    (tmp_path / "trained").mkdir()
    for rank in range(2):
        lines = list[str]()
        for version in range(300):
            names = [f"g{version}-{rank}", "again", "x" * (version % 7 * 100)]
            for name in names[: version % 3 + 1]:
                line = {"group_id": name, "step": version + 1, "version": version}
                whole = {**line, "at": version + rank / 2, "trajectories": []}
                lines.append(json.dumps(whole, separators=(",", ":")) + "\n")
        file = tmp_path / "trained" / f"rank-{rank}.jsonl"
        file.write_text("".join(lines) + lines[-1][:30])
    (tmp_path / "trained" / "rank-2.jsonl").touch()

    def step(group_id: str, sampled: int, max_staleness: int) -> int | None:
        one = made_up.trajectory([0, 1], version=sampled)
        found = read_trained(tmp_path, made_up.group(one, group_id=group_id), max_staleness)
        return found and found.step

    for version in range(300):
        assert step(f"g{version}-{version % 2}", version, 0) == version + 1
        assert step(f"g{version}-1", version - 2 if version > 2 else 0, 2) == version + 1
    assert step("g9-0", 6, 2) is None and step("g9-0", 10, 9) is None, "too early, too late"
    assert step("again", 97, 3) == 101, "the newest of those that may be, on any rank"


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
