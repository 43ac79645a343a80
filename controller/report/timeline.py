"""`make timeline`: draws how one version travelled from the trainer to the engines.

    trainer      [snapshot]....................(trains on)
    trainer           [encode][====== wire ======]
    receivers                                [verify]
    engine-0     ──── decodes v4 ────────────────── [gate][pause]──── decodes v5 ────
    engine-1     ──── decodes v4 ───────────────────────────[gate][pause]── decodes v5

Drawn from the absolute times that `publish` and `commit` records carry.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from configs.run_files import parse_json
from controller.metrics.history import Record, of_kind, read_metrics, series
from controller.metrics.weights import ENGINE_LEFT
from controller.run_dir import RunDir
from controller.units import format_bytes, format_duration
from controller.watch.run_view import ENGINES_HORIZON_S

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SNAPSHOT, ENCODE, WIRE = "copy of the shards", "finding changes", "sending"
VERIFY, GATE, PAUSE = "checksums", "waiting for its turn", "paused"
IDLE = "idle"
TRAINING, OLD, NEW = "training", "decoding the previous version", "decoding this version"
_THIN = {TRAINING, OLD, NEW, GATE}
LAST_TIMELINE = "timeline.png"
"""The last version that every engine took, drawn when a run ends."""
_STAGES = {
    "lease_wait_s": "waiting for rollouts",
    "lease_ranks_s": "waiting for other ranks",
    "step_s": TRAINING,
    "snapshot_wait_s": "waiting to copy weights",
    "snapshot_s": SNAPSHOT,
    "checkpoint_s": "checkpoint",
}
"""The fields of a step record that add up to its time, in their order."""
_OF_RANK = {
    "lease": "waiting for rollouts",
    "ranks": "waiting for other ranks",
    "rest": "rest of the step",
    "passes": "forward and backward",
    "update": "optimizer step",
    "snapshot_wait": "waiting to copy weights",
    "snapshot": SNAPSHOT,
    "checkpoint": "checkpoint",
}
"""The parts of a rank's step in a `ranks` record. Its waits are many, and drawn in one piece."""
LANE_KINDS = (
    *("forward and backward", "decoding even versions", "waiting for rollouts", "optimizer step"),
    *("decoding odd versions", "waiting for other ranks", "rest of the step", "checkpoint"),
    *(SNAPSHOT, "waiting to copy weights", PAUSE, TRAINING, IDLE),
)
"""A fixed order, so that each kind keeps its colour."""
_ENDS = {"engine_lost", ENGINE_LEFT}
_TRAINER, _PUBLISH, _RECEIVERS = "trainer", "checkpoint engine", "receivers"


@dataclass(kw_only=True, slots=True, frozen=True)
class Bar:
    """An interval in one row, in Unix seconds."""

    row: str
    what: str
    start: float
    stop: float


@dataclass(kw_only=True, slots=True, frozen=True)
class Timeline:
    """One publish, ready to be drawn."""

    version: int
    title: str
    start: float
    """Start of its snapshot."""
    stop: float
    rows: tuple[str, ...]
    bars: tuple[Bar, ...]


def draw_timeline(run_dir: RunDir, version: int | None = None) -> None:
    """Draw `version` (None: the newest that every engine took) and print the path of the picture.

    Raises ValueError if the run recorded no such publish.
    """
    timeline = find_timeline(read_metrics(run_dir.metrics), version)
    if timeline is None:
        wanted = "that every engine took" if version is None else str(version)
        raise ValueError(
            f"{run_dir.metrics} has no publish of a version {wanted}: give VERSION=... of a "
            "recorded one, or wait for the first"
        )
    path = run_dir.path / f"timeline-v{timeline.version}.svg"
    write_timeline(timeline, path)
    print(path)


def find_timeline(records: Sequence[Record], version: int | None = None) -> Timeline | None:
    """The timeline of a version, by default of the newest that every engine took (pure)."""
    committed = {r.number("version") for r in of_kind(records, "commit")}
    publishes = [r for r in of_kind(records, "publish") if math.isfinite(r.number("wire_at"))]
    if version is not None:
        publishes = [r for r in publishes if r.number("version") == version]
    else:
        # A version that all engines skipped converged together with the next one.
        taken = [r for r in publishes if r.number("version") in committed]
        publishes = [r for r in taken if math.isfinite(r.number("converged_at"))]
    newest = max(publishes, key=lambda r: r.number("version"), default=None)
    return None if newest is None else _timeline(newest, records)


def _timeline(publish: Record, records: Sequence[Record]) -> Timeline:
    version = int(publish.number("version"))
    of_version = [r for r in of_kind(records, "commit") if r.number("version") == version]
    # A restarted engine commits the version a second time: the first commit counts.
    by_engine = {str(r.values.get("engine")): r for r in reversed(of_version)}
    commits = [by_engine[engine] for engine in sorted(by_engine)]
    start = publish.number("snapshot_at")
    transfer = [*_publish_bars(publish), *_commit_bars(commits)]
    stop = max((bar.stop for bar in transfer), default=start)
    margin = 0.06 * max(stop - start, 1e-3)
    window = (start - margin, stop + margin)
    engines = [str(r.values.get("engine")) for r in commits]
    training = (bar for bar in _step_bars(records, window[0]) if bar.what == TRAINING)
    return Timeline(
        version=version,
        title=_title(publish),
        start=start,
        stop=window[1],
        rows=(_TRAINER, _PUBLISH, _RECEIVERS, *engines),
        bars=(
            *_clip(training, *window),
            *_clip(_decoding_bars(commits, *window), *window),
            *transfer,
        ),
    )


def find_lanes(records: Sequence[Record], seconds: float, num_bars: int) -> tuple[Bar, ...]:
    """The phases of each rank of the trainer and of each engine in the last `seconds`, or the last
    three steps if those took longer (pure). Each row has the longest of its bars, and the one with
    which it begins: `num_bars` of all rows. They end soon after the last step."""
    stop, steps = max((record.t for record in records), default=0.0), of_kind(records, "step")[-4:]
    if steps:
        seconds = max(seconds, steps[-1].t - steps[0].t)
        stop = min(stop, steps[-1].t + seconds / 4)
    start = stop - seconds
    by_engine: dict[str, list[Record]] = {}
    for commit in of_kind(records, "commit"):
        by_engine.setdefault(str(commit.values.get("engine")), []).append(commit)
    events = of_kind(records, "weights_event")
    gone = [(one.values.get("who"), one.t) for one in events if one.values.get("event") in _ENDS]
    bars = [*_clip(_rank_bars(records, start), start, stop)]
    if not bars:  # one rank alone, or an older run
        bars = [*_clip(_step_bars(records, start), start, stop)]
    for engine, commits in sorted(by_engine.items()):
        before = max(0, bisect_left(commits, start, key=lambda record: record.t) - 1)
        its = [t for who, t in gone if who == engine]
        bars += _clip(_engine_bars(engine, commits[before:], its, stop), start, stop)
    bars += _clip(_idle_bars(records, stop), start, stop)
    rows: dict[str, list[Bar]] = {}
    for bar in sorted(bars, key=lambda bar: (bar.start == start, bar.stop - bar.start)):
        if bar.stop > bar.start:
            rows.setdefault(bar.row, []).append(bar)
    most = max(1, num_bars // max(1, len(rows)))
    kept = (bar for row in rows.values() for bar in row[-most:])
    return tuple(sorted(kept, key=lambda bar: bar.start))


def _rank_bars(records: Sequence[Record], since: float) -> Iterator[Bar]:
    for record in of_kind(records, "ranks"):
        if record.t < since:
            continue
        lanes = parse_json(str(record.values.get("lanes")), dict[str, list[float]], "lanes")
        for place, stop in enumerate(lanes["at"]):
            rank = lanes.get("rank", range(place + 1))[place]  # older runs have all of them
            for part, what in reversed(_OF_RANK.items()):
                start = stop - lanes[part][place]
                yield Bar(row=f"rank {rank:.0f}", what=what, start=start, stop=stop)
                stop = start


def _idle_bars(records: Sequence[Record], stop: float) -> Iterator[Bar]:
    """From a look at an engine that decoded nothing to the next one that found it at work, or that
    it does not answer, or to its end; to the last such look if none comes soon."""
    idle: dict[str, tuple[float, float]] = {}  # since when, and the last such look
    for record in records:
        if record.kind == "engine":
            engine, is_idle = str(record.values.get("engine")), record.number("running") == 0
        elif record.kind == "weights_event" and record.values.get("event") in _ENDS:
            engine, is_idle = str(record.values.get("who")), False
        else:
            continue
        since, last = idle.pop(engine, (record.t, record.t))
        is_late = record.t - last > ENGINES_HORIZON_S
        if (is_late or not is_idle) and since < record.t:
            yield Bar(row=engine, what=IDLE, start=since, stop=last if is_late else record.t)
            since = record.t
        if is_idle:
            idle[engine] = since, record.t
    for engine, (since, last) in idle.items():
        until = last if stop - last > ENGINES_HORIZON_S else stop
        yield Bar(row=engine, what=IDLE, start=since, stop=until)


def _step_bars(records: Sequence[Record], since: float) -> Iterator[Bar]:
    """A step's record is written at its end, after its snapshot and checkpoint."""
    for step in of_kind(records, "step"):
        if step.t < since:
            continue
        stop = step.t
        for name, what in reversed(_STAGES.items()):
            for seconds in series([step], name):
                yield Bar(row=_TRAINER, what=what, start=stop - seconds, stop=stop)
                stop -= seconds


def _engine_bars(
    engine: str, commits: Sequence[Record], gone: Sequence[float], stop: float
) -> Iterator[Bar]:
    """Pauses, and between them the version that is decoded, until the engine is gone."""
    ends = [*(commit.number("paused_at") for commit in commits[1:]), stop]
    for commit, end in zip(commits, ends, strict=True):
        paused, resumed = commit.number("paused_at"), commit.number("resumed_at")
        if math.isfinite(paused + resumed + end):
            yield Bar(row=engine, what=PAUSE, start=paused, stop=resumed)
            what = f"decoding {'odd' if commit.count('version') % 2 else 'even'} versions"
            end = min([end, *(t for t in gone if t > resumed)])
            yield Bar(row=engine, what=what, start=resumed, stop=end)


def _title(publish: Record) -> str:
    what = "changes only" if publish.values.get("mode") == "delta" else "full"
    parts = [f"Version {publish.number('version'):.0f}: {what}"]
    if math.isfinite(wire := publish.number("wire_bytes")):
        parts.append(format_bytes(wire))
    if math.isfinite(converged := publish.number("convergence_s")):
        parts.append(f"{format_duration(converged)} until every engine serves it")
    return ", ".join(parts)


def _publish_bars(publish: Record) -> Iterator[Bar]:
    for row, what, name in (
        (_TRAINER, SNAPSHOT, "snapshot"),
        (_PUBLISH, ENCODE, "encode"),
        (_PUBLISH, WIRE, "wire"),
        (_RECEIVERS, VERIFY, "verify"),
    ):
        start, seconds = publish.number(f"{name}_at"), publish.number(f"{name}_s")
        if math.isfinite(start) and math.isfinite(seconds):
            yield Bar(row=row, what=what, start=start, stop=start + seconds)


def _commit_bars(commits: Sequence[Record]) -> Iterator[Bar]:
    for commit in commits:
        engine = str(commit.values.get("engine"))
        paused, resumed = commit.number("paused_at"), commit.number("resumed_at")
        seen, gate_wait_s = commit.number("seen_at"), commit.number("gate_wait_s")
        if math.isfinite(seen + gate_wait_s):
            yield Bar(row=engine, what=GATE, start=seen, stop=seen + gate_wait_s)
        if math.isfinite(paused + resumed):
            yield Bar(row=engine, what=PAUSE, start=paused, stop=resumed)


def _decoding_bars(commits: Sequence[Record], start: float, stop: float) -> Iterator[Bar]:
    for commit in commits:
        engine = str(commit.values.get("engine"))
        yield Bar(row=engine, what=OLD, start=start, stop=commit.number("paused_at"))
        yield Bar(row=engine, what=NEW, start=commit.number("resumed_at"), stop=stop)


def _clip(bars: Iterator[Bar], start: float, stop: float) -> Iterator[Bar]:
    for bar in bars:
        if bar.start < stop and bar.stop > start:
            yield replace(bar, start=max(bar.start, start), stop=min(bar.stop, stop))


def write_timeline(timeline: Timeline, path: Path) -> None:
    """Write the picture in the format of the file's suffix (svg or png)."""
    # Matplotlib takes a second of a core to import, and the page of a run needs only the bars.
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    from controller.report.plots import STYLE

    colors = _colors()
    with rc_context({"axes.spines.left": False, "axes.grid.axis": "x"}, fname=STYLE):
        figure = Figure(figsize=(9.0, 1.6 + 0.42 * len(timeline.rows)))
        axes = figure.add_subplot()
        _draw_bars(axes, timeline, colors)
        axes.set_title(timeline.title, fontsize=11, pad=10)
        axes.set_yticks([-number for number in range(len(timeline.rows))], labels=timeline.rows)
        axes.set_xlabel("seconds since the snapshot began")
        drawn = {bar.what for bar in timeline.bars}
        patches = [Patch(color=c, label=what) for what, c in colors.items() if what in drawn]
        axes.legend(handles=patches, loc="center left", bbox_to_anchor=(1.01, 0.5))
        figure.savefig(path)


def _colors() -> dict[str, str]:
    from controller.report.plots import BLUE, FAINT, GREEN, GREY, ORANGE, PINK, SKY

    return {
        TRAINING: GREY,
        SNAPSHOT: ORANGE,
        ENCODE: PINK,
        WIRE: BLUE,
        VERIFY: SKY,
        GATE: "#F0E442",
        PAUSE: "#C0392B",
        OLD: FAINT,
        NEW: GREEN,
    }


def _draw_bars(axes: Axes, timeline: Timeline, colors: Mapping[str, str]) -> None:
    places = {row: -number for number, row in enumerate(timeline.rows)}
    for bar in timeline.bars:
        axes.barh(
            places[bar.row],
            max(bar.stop - bar.start, 0.002 * (timeline.stop - timeline.start)),
            left=bar.start - timeline.start,
            height=0.22 if bar.what in _THIN else 0.55,
            color=colors[bar.what],
            zorder=2 if bar.what in _THIN else 3,
        )
