"""One run as the page sees it: its records so far, its verdict, and the groups that it recorded."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import tokenizers

from controller.commands.show import tokenizer_of
from controller.metrics.history import TUNED, MetricsTail, Record, of_kind
from controller.page.curves import find_metrics
from controller.page.samples import Decode, GroupIndex
from controller.run_dir import RunDir, RunRecord
from controller.watch.finding import Finding
from controller.watch.look import as_object, observe
from controller.watch.run_view import UNSEEN_S, RunView
from controller.watch.verdict import findings, findings_of_ended

EVERY_S = 2.0
"""Files and Redis are read no more often, however many look."""
INDEX_S = 0.1
"""For reading on in the recorded groups, a request: the first one of a page waits for it."""
NUM_CHANGES = 50


class WatchedRun:
    """A run that goes on, or its folder. Threads may share it."""

    def __init__(self, run_dir: RunDir) -> None:
        self.dir = run_dir
        self._tail = MetricsTail(run_dir.metrics)
        self._metrics = set[tuple[str, str]]()
        self._groups = GroupIndex(run_dir.path)
        self._lock, self._groups_lock = threading.RLock(), threading.Lock()
        self._looked_at = 0.0
        self._state: dict[str, Any] = {}
        self._view: RunView | None = None
        self._ended: RunRecord | None = None
        """As it was judged."""

    def records(self) -> Sequence[Record]:
        self.state()
        return self._tail.records

    def state(self) -> dict[str, Any]:
        """The object of `make status JSON=1`, and what the page can draw.

        Raises ValueError if the folder has a damaged file."""
        with self._lock:
            if time.monotonic() - self._looked_at > EVERY_S:
                self._state = self._look()
                self._looked_at = time.monotonic()
            return self._state

    def _look(self) -> dict[str, Any]:
        run, url = self.dir.read_record(), self.dir.read_redis_url()
        was_collecting = gc.isenabled()
        gc.disable()  # what is read stays: to look for cycles in it takes a sixth of the time
        try:
            new, problem, found = self._tail.read(), "", list[Finding]()
        finally:
            if was_collecting:  # else a thread that reads another run enables it
                gc.enable()
        if not new and not run.is_running and self._ended == run:
            return self._state  # the same again
        shapes = {(record.kind, *record.values): record for record in new}
        self._metrics |= set(find_metrics(shapes.values()))
        is_live = run.is_running and url is not None
        if is_live and url is not None:
            view = self._followed(new)
            try:
                observe(view, self.dir, run, url)
                found = findings(view)
            except (OSError, RuntimeError) as error:
                problem = f"{error}"
        else:
            view, found = None, findings_of_ended(self._tail.records)
        self._view = view
        last_step = of_kind(self._tail.records, "step")[-1:]
        state = "gone" if run.state == "running" and not run.is_alive else run.state
        told = {
            "step": last_step[0].count("step") if last_step else 0,
            **as_object(self.dir, state, view, found),
            "is_live": is_live,
            "problem": problem,
            "error": run.error,
            "line": found[0].line(self.dir.named) if found else "Nothing is measured so far.",
            "num_records": len(self._tail.records),
            "metrics": sorted("/".join(metric) for metric in self._metrics),
            "max_staleness": None if view is None or not view.stats else view.stats.max_staleness,
            "changes": [
                {"t": record.t, **record.values}
                for record in of_kind(self._tail.records, TUNED)[-NUM_CHANGES:]
            ],
        }
        self._ended = None if run.is_running else run
        return told

    def _followed(self, new: Sequence[Record]) -> RunView:
        """The view with the new records. One that nobody has fed for a while begins anew, as that
        of `make status`: it would take the time in between for a gap in what Redis says."""
        view = self._view
        if view is None or time.monotonic() - self._looked_at > UNSEEN_S / 2:
            run, config = self.dir.read_record(), self.dir.read_config()
            view = RunView(
                run=self.dir.name, config=config, started=run.started, named=self.dir.named
            )
            new = self._tail.records
        for record in new:
            view.apply(record)
        return view

    def largest_staleness(self) -> int:
        """The largest `buffer.max_staleness` that it has had."""
        records, setting = self.records(), "buffer.max_staleness"  # a resume may have lowered it
        tuned = [one.values for one in of_kind(records, TUNED) if one.values["setting"] == setting]
        changed = [int(one[name]) for one in tuned for name in ("before", "after")]
        sampled = [one.count("max_staleness") for one in of_kind(records, "buffer")]
        return max(self.dir.read_config().buffer.max_staleness, 0, *changed, *sampled)

    def begin(self) -> None:
        """Reads the run before a browser asks for it, which says what is wrong with its files."""
        with suppress(ValueError, OSError):
            self.state()

    def look_again(self) -> None:
        """After a change of the run: the next look does not wait."""
        with self._lock:
            self._looked_at = min(self._looked_at, time.monotonic() - EVERY_S - 0.1)

    def groups(self) -> tuple[GroupIndex, int]:
        """The recorded groups, and how many bytes of them are not read yet."""
        with self._groups_lock:
            return self._groups, self._groups.read(INDEX_S)

    @cached_property
    def decode(self) -> Decode | None:
        """The text of tokens; None if the tokenizer is gone."""
        path = self.dir.read_config().model.path or self.dir.model
        if (file := Path(path) / "tokenizer.json").is_file():
            # Transformers, which read the same file, take ten seconds of a core to import.
            return partial(
                tokenizers.Tokenizer.from_file(str(file)).decode, skip_special_tokens=False
            )
        try:
            return tokenizer_of(self.dir).decode
        except (ValueError, OSError):
            return None
