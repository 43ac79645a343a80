"""Hands the run's records on to TensorBoard and Weights & Biases, as `run.loggers` says.

    metrics.jsonl ◄── MetricsLog ──► queue ── SinkThread ──► Sink

The file is the history; a sink is a view of it. It may be slow or fail: the run does not wait for
it, and loses nothing but the view.

A number becomes `KIND/NAME`, as `step/reward_mean`. Its place on the axis is the newest step.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import netrc
import os
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol
from urllib.parse import urlsplit
from uuid import uuid4

import yaml

from configs.choices import Logger
from configs.run_files import read_text
from controller.metrics.catalogue import METRICS
from controller.metrics.history import RESUMED, Record
from controller.run_dir import RunDir

log = logging.getLogger(__name__)

MAX_WAITING = 10_000
"""Records for a sink that does not keep up."""
END_S = 30.0
"""Longest wait for unwritten records when the run ends."""
_HELP = {f"{kind}/{m.field}": m.help for kind, metrics in METRICS.items() for m in metrics}
_HELP |= {f"buffer/count.{m.field}": m.help for m in METRICS["count"]}
_MODULES = {Logger.tensorboard: "tensorboardX", Logger.wandb: "wandb"}


class Sink(Protocol):
    """Draws records; used from one thread."""

    def write(self, record: Record, step: int) -> None:
        """`step`: the newest one that is completed."""

    def close(self) -> None: ...


class TensorBoard:
    """Event files in the run's folder, for `tensorboard --logdir`."""

    def __init__(self, run_dir: RunDir) -> None:
        self._folder = run_dir.path / "tensorboard"
        self._writer = self._open(None)

    def _open(self, purge_step: int | None) -> Any:
        from tensorboardX import SummaryWriter

        # Names have seconds: without a number a second file could replace the first.
        self._folder.mkdir(exist_ok=True)
        suffix = f".{sum(1 for _ in self._folder.iterdir())}"
        return SummaryWriter(
            str(self._folder), purge_step=purge_step, flush_secs=10, filename_suffix=suffix
        )

    def write(self, record: Record, step: int) -> None:
        if record.kind == RESUMED:  # it draws no step that was undone
            self._writer.close()
            self._writer = self._open(step + 1)
        for name, number in _numbers(record).items():
            what = _HELP.get(name, "")
            self._writer.add_scalar(name, number, step, record.t, summary_description=what)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases, which its own environment variables set up: WANDB_PROJECT,
    WANDB_MODE=offline and others. A run that goes on here goes on there."""

    def __init__(self, run_dir: RunDir) -> None:
        import wandb

        id_file = run_dir.path / "wandb.id"
        if not id_file.exists():
            id_file.write_text(uuid4().hex)
        self._wandb = wandb
        # It gets the metrics and the settings: no output of the controller, and no code.
        quiet = wandb.Settings(console="off", silent=True, disable_code=True, disable_git=True)
        self._run = wandb.init(
            dir=run_dir.path,
            name=run_dir.name,
            id=read_text(id_file),
            resume="allow",
            config=yaml.safe_load(read_text(run_dir.path / "config.yaml")),  # no passwords
            settings=quiet,
        )
        self._run.define_metric("*", step_metric="completed_steps")

    def write(self, record: Record, step: int) -> None:
        if numbers := _numbers(record):
            self._run.log({**numbers, "completed_steps": step})

    def close(self) -> None:
        self._run.finish()
        self._wandb.teardown()  # its own process


def openers(loggers: Sequence[Logger], run_dir: RunDir) -> dict[str, Callable[[], Sink]]:
    """How each sink of the run is opened, by its name."""
    sinks: dict[Logger, Callable[[RunDir], Sink]] = {
        Logger.tensorboard: TensorBoard,
        Logger.wandb: WeightsAndBiases,
    }
    return {logger.value: partial(sinks[logger], run_dir) for logger in dict.fromkeys(loggers)}


def check_loggers(loggers: Sequence[Logger]) -> None:
    """Raises ValueError if the library of one is not installed."""
    for logger in loggers:
        if importlib.util.find_spec(_MODULES[logger]) is None:
            raise ValueError(
                f"run.loggers: {logger.value} needs {_MODULES[logger]}; pip install "
                f"'leash-rl[{logger.value}]', or leave it out"
            )
    if Logger.wandb in loggers and not _has_wandb_key():
        raise ValueError(
            "run.loggers: wandb has no key; run `wandb login`, or set WANDB_API_KEY or "
            "WANDB_MODE=offline in the environment"
        )


def _has_wandb_key() -> bool:
    """Without one its library would ask for it on the terminal, and wait."""
    if os.environ.get("WANDB_MODE") in ("offline", "disabled") or "WANDB_API_KEY" in os.environ:
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    with suppress(OSError, netrc.NetrcParseError):
        return netrc.netrc().authenticators(host) is not None
    return False


class SinkThread:
    """Writes to one sink, in a thread of its own.

    with SinkThread("tensorboard", lambda: TensorBoard(run_dir), step=0, say=print) as sink:
        sink.write(record)     # returns at once
    """

    def __init__(
        self, name: str, opener: Callable[[], Sink], *, step: int, say: Callable[[str], None]
    ) -> None:
        """`step`: the newest one of a run that goes on. `say` is called with a failure."""
        self._name = name
        self._step = step
        self._say = say
        self._records = queue.Queue[Record | None](MAX_WAITING)
        self._num_lost = 0
        self._thread = threading.Thread(
            target=self._run, args=(opener,), name=f"sink-{name}", daemon=True
        )
        self._thread.start()

    def write(self, record: Record) -> None:
        try:
            self._records.put_nowait(record)
        except queue.Full:
            self._num_lost += 1

    def _run(self, opener: Callable[[], Sink]) -> None:
        try:
            sink = opener()
            while (record := self._records.get()) is not None:
                if record.kind in ("step", RESUMED):
                    self._step = record.count("step")
                sink.write(record, self._step)
            sink.close()
        except Exception as error:  # whatever a library raises: the run goes on
            log.warning("run.loggers: %s has failed", self._name, exc_info=True)
            self._say(f"run.loggers: {self._name} has failed, and gets nothing more: {error!r}")
            while self._records.get() is not None:
                pass

    def __enter__(self) -> SinkThread:
        return self

    def __exit__(self, *_: object) -> None:
        """Waits for what is not written yet, at most END_S."""
        with suppress(queue.Full):
            self._records.put(None, timeout=END_S)
        self._thread.join(END_S)
        if self._thread.is_alive():
            self._say(f"run.loggers: {self._name} did not end within {END_S:g} s")
        if self._num_lost:
            self._say(f"run.loggers: {self._name} was too slow for {self._num_lost} records")


def _numbers(record: Record) -> dict[str, float]:
    return {
        f"{record.kind}/{name}": float(value)
        for name, value in record.values.items()
        if not isinstance(value, str) and math.isfinite(value)
    }
