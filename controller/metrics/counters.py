"""What the rollout workers counted, in the forms in which people and Prometheus read it (pure)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, Metric

from controller.units import format_count, format_duration
from rollout_pool.worker import counters as tally

Counters = Mapping[str, float]

LENGTHS = (*(name for _, name in tally.LENGTHS), tally.LONGER)
"""Of a group's longest sample, in tokens."""
PLAIN = {
    "tokens_generated": "Tokens that the engines sampled.",
    "tokens_wasted": "Of these, lost on the way to the buffer: with an engine, refused, given up.",
    "tokens_filtered": "Tokens of groups that were left out since their rewards were all equal.",
    "tokens_stopped": "Tokens of groups that the end of the run cut short.",
    "samples_retried": "Requests that failed and were made again.",
    "samples_interrupted": "Samples stopped in favour of a version or of other groups.",
    "samples_resumed": "Interrupted samples that went on.",
    "groups_postponed": "Groups stopped in favour of others.",
    "groups_stopped": "Groups that the end of the run cut short.",
    "groups_filtered": "Groups left out since their rewards were all equal.",
    "zero_variance_kept": "Groups whose rewards were all equal, kept since the budget was used up.",
    "prompts_quarantined": "Prompts put aside since their groups failed.",
    "prompts_skipped": "Prompts that were too long.",
    "rewards_failed": "Episodes of whose reward a part could not be had.",
    "logprobs_refused": "Answers refused for their log-probabilities.",
    "workers_restarted": "Rollout workers that died and were started again.",
}
LABELLED = {
    "completed": ("rollout_groups_completed", "Groups that came to their end.", "length"),
    "given_up": ("rollout_groups_given_up", "Groups that did not.", "length"),
    "completed_s": ("rollout_completed_seconds", "Time that groups took to their end.", "length"),
    "given_up_s": ("rollout_given_up_seconds", "Time spent on groups in vain.", "length"),
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
    # Workers tell their counts a moment after the buffer its own.
    return min(1.0, wasted / generated) if generated else None


def summary_rows(counters: Counters, tokens_dropped: int) -> Iterator[tuple[str, str]]:
    """What a run's summary says of its generation."""
    share = wasted_share(counters, tokens_dropped)
    if share is not None:
        yield "tokens that nobody could use", f"{share:.1%}"
    for row in length_rows(counters):
        took = f", {format_duration(row.seconds)} each" if row.completed else ""
        yield (
            f"groups whose longest sample had {row.length} tokens",
            f"{row.completed:,} completed{took}; {row.given_up:,} given up",
        )
    for name, text in (
        ("samples_retried", "requests that failed and were made again"),
        ("groups_postponed", "groups stopped in favour of others"),
        ("groups_stopped", "groups that the end of the run cut short"),
        ("samples_interrupted", "samples interrupted"),
        ("groups_filtered", "groups left out: all rewards equal"),
        ("zero_variance_kept", "such groups kept: the budget was used up"),
        ("prompts_quarantined", "prompts put aside: their groups failed"),
        ("rewards_failed", "episodes of whose reward a part failed"),
        ("logprobs_refused", "answers refused for their log-probabilities"),
        ("workers_restarted", "workers that died and were started again"),
    ):
        if counters.get(name):
            yield text, format_count(counters[name])


def panel_line(counters: Counters, tokens_dropped: int) -> str:
    """What deserves a place on the panel; "" as long as nothing does."""
    parts = [
        f"{format_count(counters[name])} {text}"
        for name, text in (
            ("samples_retried", "retried"),
            ("groups_postponed", "postponed"),
            ("groups_filtered", "filtered"),
            ("prompts_quarantined", "prompts put aside"),
            ("rewards_failed", "without full reward"),
            ("workers_restarted", "workers restarted"),
        )
        if counters.get(name)
    ]
    share = wasted_share(counters, tokens_dropped)
    if share:
        parts.insert(0, f"{share:.1%} of tokens wasted")
    return ", ".join(parts)


def counter_families(run: str, counters: Counters) -> Iterator[Metric]:
    """All of them, those that never counted anything as 0."""
    for name, text in PLAIN.items():
        family = CounterMetricFamily(f"rollout_{name}", text, labels=["run"])
        family.add_metric([run], counters.get(name, 0.0))
        yield family
    for prefix, (metric, text, label) in LABELLED.items():
        family = CounterMetricFamily(metric, text, labels=["run", label])
        for name, value in sorted(counters.items()):
            kind, _, which = name.partition(":")
            if kind == prefix and which:
                family.add_metric([run, which], value)
        yield family
