"""What the rollout workers counted, and the words for it (pure)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from controller.units import format_count, format_duration
from rollout_pool.worker import group_run as tally

Counters = Mapping[str, float]

LENGTHS = (*(name for _, name in tally.LENGTHS), tally.LONGER)
"""Of a group's longest sample, in tokens."""


class Counted(NamedTuple):
    """How one counter is called."""

    what: str
    on_panel: str = ""
    is_in_summary: bool = True


COUNTED = {
    "tokens_generated": Counted("Tokens that the engines sampled.", is_in_summary=False),
    "tokens_wasted": Counted(
        "Of these, lost on the way to the buffer: with an engine, refused, given up.",
        is_in_summary=False,
    ),
    "tokens_filtered": Counted(
        "Tokens of groups that were left out since their rewards were all equal.",
        is_in_summary=False,
    ),
    "tokens_stopped": Counted(
        "Tokens of groups that the end of the run cut short.", is_in_summary=False
    ),
    "samples_retried": Counted("Requests that failed and were made again.", "retried"),
    "samples_interrupted": Counted("Samples stopped in favour of a version or of other groups."),
    "samples_resumed": Counted("Interrupted samples that went on.", is_in_summary=False),
    "groups_postponed": Counted("Groups stopped in favour of others.", "postponed"),
    "groups_stopped": Counted("Groups that the end of the run cut short."),
    "groups_filtered": Counted("Groups left out since their rewards were all equal.", "filtered"),
    "zero_variance_kept": Counted(
        "Groups whose rewards were all equal, kept since the budget was used up."
    ),
    "prompts_quarantined": Counted(
        "Prompts put aside since their groups failed.", "prompts put aside"
    ),
    "prompts_skipped": Counted("Prompts that were too long.", is_in_summary=False),
    "rewards_failed": Counted("Episodes with an unscored reward part.", "without full reward"),
    "logprobs_refused": Counted("Answers refused for their log-probabilities."),
    "workers_restarted": Counted(
        "Rollout workers that died and were started again.", "workers restarted"
    ),
}
COUNTED_BY = {
    "completed": ("rollout_groups_completed", "Groups that came to their end.", "length"),
    "given_up": ("rollout_groups_given_up", "Groups that did not.", "length"),
    "completed_s": ("rollout_completed_seconds", "Time that groups took to their end.", "length"),
    "given_up_s": (
        "rollout_given_up_seconds",
        "Time spent on groups that came to no end.",
        "length",
    ),
    "episodes_ended": ("rollout_episodes", "Episodes, by how they ended.", "end"),
}
"""Counters named `<key>:<label>`: metric, help, and what the label says."""


@dataclass(kw_only=True, slots=True, frozen=True)
class LengthRow:
    """The groups of one length."""

    length: str
    completed: int
    given_up: int
    seconds: float
    """That one took to its end, on average; 0 if none did."""


def length_rows(counters: Counters) -> list[LengthRow]:
    """A row for each length that any group had, shortest first."""
    rows = []
    for length in LENGTHS:
        completed = int(counters.get(f"completed:{length}", 0))
        given_up = int(counters.get(f"given_up:{length}", 0))
        if completed or given_up:
            seconds = counters.get(f"completed_s:{length}", 0.0) / max(1, completed)
            rows.append(
                LengthRow(length=length, completed=completed, given_up=given_up, seconds=seconds)
            )
    return rows


def wasted_share(counters: Counters, tokens_dropped: int) -> float | None:
    """Of all tokens generated, those that will never be trained and were not left out on purpose;
    None before the first. `tokens_dropped`: by the buffer (`BufferStats.tokens_dropped`)."""
    generated = counters.get("tokens_generated", 0.0)
    wasted = counters.get("tokens_wasted", 0.0) + tokens_dropped
    # Workers send their counts a moment after the buffer its own.
    return min(1.0, wasted / generated) if generated else None


def summary_rows(counters: Counters, tokens_dropped: int) -> Iterator[tuple[str, str]]:
    """What a run's summary says of its generation."""
    share = wasted_share(counters, tokens_dropped)
    if share is not None:
        yield "tokens that could not be used", f"{share:.1%}"
    for row in length_rows(counters):
        took = f", {format_duration(row.seconds)} each" if row.completed else ""
        yield (
            f"groups whose longest sample had {row.length} tokens",
            f"{row.completed:,} completed{took}; {row.given_up:,} given up",
        )
    for name, counted in COUNTED.items():
        if counted.is_in_summary and counters.get(name):
            text = counted.what.rstrip(".")
            yield text[0].lower() + text[1:], format_count(counters[name])


def panel_line(counters: Counters, tokens_dropped: int) -> str:
    """What deserves a place on the panel; "" as long as nothing does."""
    parts = [
        f"{format_count(counters[name])} {counted.on_panel}"
        for name, counted in COUNTED.items()
        if counted.on_panel and counters.get(name)
    ]
    if share := wasted_share(counters, tokens_dropped):
        parts.insert(0, f"{share:.1%} of tokens wasted")
    return ", ".join(parts)
