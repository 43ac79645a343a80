"""TensorBoard and Weights & Biases get a run's records, and the run needs neither."""

from __future__ import annotations

import importlib.util
import threading
from pathlib import Path

import psutil
import pytest

from configs.choices import Logger
from controller.metrics import sinks
from controller.metrics.history import MetricsLog, Record
from controller.metrics.sinks import SinkThread, check_loggers, openers
from controller.run_dir import RunDir
from tests.support.event_files import drawn


class Kept:
    """A sink that remembers, and fails at the record of kind "bad"."""

    def __init__(self) -> None:
        self.written: list[tuple[str, int]] = []
        self.is_closed = False
        self.may_write = threading.Event()
        self.may_write.set()

    def write(self, record: Record, step: int) -> None:
        self.may_write.wait()
        if record.kind == "bad":
            raise RuntimeError("it broke")
        self.written.append((record.kind, step))

    def close(self) -> None:
        self.is_closed = True


def test_tensorboard_draws_numbers_by_step_and_purges_steps_that_were_undone(
    run_dir: RunDir,
) -> None:
    opener = openers([Logger.tensorboard], run_dir)["tensorboard"]
    with (
        SinkThread("tensorboard", opener, step=0, say=pytest.fail) as sink,
        MetricsLog(run_dir.metrics, [sink.write]) as log,
    ):
        for step in (1, 2, 3):
            log.append("step", {"step": step, "reward_mean": step / 4, "text": "no number"})
            log.append("buffer", {"ready": 5 * step, "lost": float("nan")})
        log.append("resumed", {"step": 2, "away_s": 9.0})
        log.append("step", {"step": 3, "reward_mean": 1.0})
    scalars = drawn(run_dir.path / "tensorboard")
    assert scalars["step/reward_mean"] == {1: 0.25, 2: 0.5, 3: 1.0}
    assert scalars["buffer/ready"] == {1: 5.0, 2: 10.0}
    assert not {"step/text", "buffer/lost"} & scalars.keys()


def test_wandb_gets_the_run_and_leaves_no_process(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(sinks, "END_S", 300.0)  # its process starts slowly on a busy machine
    before = set(psutil.Process().children(recursive=True))
    opener = openers([Logger.wandb], run_dir)["wandb"]
    for first in (1, 2):  # the second time the run goes on
        with SinkThread("wandb", opener, step=first - 1, say=pytest.fail) as sink:
            sink.write(Record(t=1.0, kind="step", values={"step": first, "reward_mean": 0.5}))
    _, still = psutil.wait_procs(set(psutil.Process().children(recursive=True)) - before, 60)
    assert still == []
    name = (run_dir.path / "wandb.id").read_text()
    files = list((run_dir.path / "wandb").glob(f"offline-run-*-{name}/run-{name}.wandb"))
    assert len(files) == 2 and b"reward_mean" in files[0].read_bytes()


def test_sink_that_fails_is_told_once_and_gets_nothing_more() -> None:
    kept, other, said = Kept(), Kept(), list[str]()
    with (
        SinkThread("kept", lambda: kept, step=4, say=said.append) as sink,
        SinkThread("other", lambda: other, step=4, say=said.append) as beside,
    ):
        for kind in ("buffer", "bad", "buffer"):
            sink.write(Record(t=1.0, kind=kind, values={}))
            beside.write(Record(t=1.0, kind=kind.replace("bad", "eval"), values={}))
    assert said == ["run.loggers: kept has failed, and gets nothing more: RuntimeError('it broke')"]
    assert kept.written == [("buffer", 4)] and len(other.written) == 3 and other.is_closed


def test_slow_sink_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "MAX_WAITING", 3)
    monkeypatch.setattr(sinks, "END_S", 0.05)
    kept, said = Kept(), list[str]()
    kept.may_write.clear()
    with SinkThread("kept", lambda: kept, step=0, say=said.append) as sink:
        for _ in range(9):
            sink.write(Record(t=1.0, kind="buffer", values={}))
    kept.may_write.set()
    assert said[0] == "run.loggers: kept did not end within 0.05 s"
    assert "kept was too slow for" in said[1]


def test_logger_that_cannot_work_is_refused_before_the_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ValueError, match=r"run\.loggers: wandb has no key; run `wandb login`"):
        check_loggers([Logger.wandb])
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password secret\n")
    (tmp_path / ".netrc").chmod(0o600)
    check_loggers([Logger.wandb, Logger.tensorboard])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"tensorboard needs tensorboardX.*leash-rl\[tensorboard"):
        check_loggers([Logger.tensorboard])
