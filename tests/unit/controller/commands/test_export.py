"""`make export`: which checkpoint it takes."""

from __future__ import annotations

import pytest

from controller.commands import export
from controller.main import EXIT_BAD_INPUT
from controller.run_dir import RunDir
from tests.support.controller.buffers import Command
from tests.support.controller.records import write_checkpoint
from trainer_pool.state.checkpoint import Best, CheckpointStore


def test_checkpoint_that_is_not_there_is_refused(run_dir: RunDir, leash: Command) -> None:
    assert "no checkpoint yet" in leash("export", exit_code=EXIT_BAD_INPUT)
    for step in (6, 12):
        write_checkpoint(run_dir, step, step)
    for step in ("7", "best", "first"):
        error = leash("export", "--step", step, exit_code=EXIT_BAD_INPUT)
        assert f"STEP={step}: " in error and "has no checkpoint of it" in error
        assert "; there are 6, 12" in error and ("trainer.keep_best" in error) == (step == "best")
    store = CheckpointStore(run_dir.path / "checkpoints")
    store.note_best(Best(step=6, metric="accuracy", value=0.5))
    (run_dir.path / "model-step-000006").mkdir()
    error = leash("export", "--step", "best", exit_code=EXIT_BAD_INPUT)
    assert "model-step-000006: exists already" in error


def test_damaged_records_are_found_before_the_model_is_written(
    run_dir: RunDir, leash: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = list[object]()
    monkeypatch.setattr(export, "export_checkpoint", lambda *a, **k: written.append(a) or 0)
    write_checkpoint(run_dir, 6, 6)
    (run_dir.path / "data.json").write_text("{")
    assert "data.json is damaged" in leash("export", exit_code=EXIT_BAD_INPUT)
    assert written == []
