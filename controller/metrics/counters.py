"""The counters of the rollout workers and their descriptions (pure)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import NamedTuple

from controller.units import format_count, format_duration
from rollout_pool.worker import group_run

Counters = Mapping[str, float]

LENGTHS = (*(name for _, name in group_run.LENGTHS), group_run.LONGER)
"""Classes of a group's longest sample, in tokens."""


class Counted(NamedTuple):
    """The description of one counter."""

    what: str
    on_panel: str = ""
    is_in_summary: bool = True


COUNTED = {
    "tokens_generated": Counted("Tokens that the engines sampled.", is_in_summary=False),
    "tokens_arrived": Counted(
        "Tokens that have arrived so far, also of groups in progress and of evaluations.",
        is_in_summary=False,
    ),
    "tokens_wasted": Counted(
        "Generated tokens that never reached the buffer: engine lost, rejected, given up.",
        is_in_summary=False,
    ),
    "tokens_restored": Counted(
        "Tokens with which samples began because a worker before had sampled them.", "restored"
    ),
    "tokens_filtered": Counted(
        "Tokens of groups that were discarded because their rewards were all equal.",
        is_in_summary=False,
    ),
    "tokens_stopped": Counted(
        "Tokens of groups that the end of the run or of their worker cut short.",
        is_in_summary=False,
    ),
    "samples_retried": Counted("Requests that failed and were retried.", "retried"),
    "samples_interrupted": Counted("Samples stopped in favour of a version or of other groups."),
    "samples_resumed": Counted("Interrupted samples that were resumed.", is_in_summary=False),
    "groups_postponed": Counted("Groups stopped in favour of others.", "postponed"),
    "groups_stopped": Counted("Groups that the end of the run or of their worker cut short."),
    "groups_filtered": Counted(
        "Groups discarded because their rewards were all equal.", "filtered"
    ),
    "zero_variance_kept": Counted(
        "Groups with equal rewards that were kept because the budget was used up."
    ),
    "prompts_quarantined": Counted(
        "Prompts quarantined because their groups failed.", "prompts quarantined"
    ),
    "prompts_skipped": Counted(
        "Prompts that were too long, or of text that no tokenizer takes.", is_in_summary=False
    ),
    "rewards_failed": Counted("Episodes with an unscored reward part.", "without full reward"),
    "episodes_left_out": Counted(
        "Episodes left out of their groups because a part of their reward was None.", "left out"
    ),
    "logprobs_refused": Counted("Answers rejected for their log-probabilities."),
    "turns": Counted("Turns of completed episodes.", is_in_summary=False),
    "branches": Counted("Branches of completed episodes.", is_in_summary=False),
    "workers_restarted": Counted(
        "Rollout workers that died, or were told to end, and were restarted.", "workers restarted"
    ),
    "workers_drained": Counted("Those that were told to end, and ended their groups first."),
}
COUNTED_BY = {
    "completed": ("rollout_groups_completed", "Completed groups.", "length"),
    "given_up": ("rollout_groups_given_up", "Groups that were given up.", "length"),
    "completed_s": ("rollout_completed_seconds", "Time spent on completed groups.", "length"),
    "given_up_s": ("rollout_given_up_seconds", "Time spent on groups given up.", "length"),
    "scored_groups": ("rollout_task_groups", "Groups that got all their rewards.", "task"),
    "mean_rewards": ("rollout_task_rewards", "Sum of the mean rewards of these groups.", "task"),
    "zero_variance": ("rollout_task_zero_variance", "Those whose rewards are all equal.", "task"),
    "passed_over": ("rollout_task_passed_over", "Prompts passed over by task.curriculum.", "task"),
    "external_ended": (
        "rollout_external_groups",
        "Groups of external programs, by how they ended.",
        "end",
    ),
    "requests_refused": (
        "rollout_requests_refused",
        "Requests of agents and external programs that a limit of rollout.openai refused.",
        "limit",
    ),
    "episodes_ended": ("rollout_episodes", "Episodes, by how they ended.", "end"),
    "prompt_tokens": (
        "rollout_prompt_tokens",
        "Tokens that requests began with; a resumed one begins with its answer so far.",
        "engine",
    ),
    "prefilled_tokens": (
        "rollout_prefilled_tokens",
        "Of these, the tokens for which the engine had no KV cache.",
        "engine",
    ),
    "requests": ("rollout_requests", "Requests that got a slot at an engine.", "engine"),
    "queue_s": ("rollout_router_queue_seconds", "Time that requests waited for a slot.", "engine"),
    "engine_queue_s": (
        "rollout_engine_queue_seconds",
        "Time that requests waited at the engine; 0 if it does not report it.",
        "engine",
    ),
    "first_token_s": (
        "rollout_first_token_seconds",
        "Time from a slot to the first token: the engine's queue and prefill.",
        "engine",
    ),
    "preemptions": (
        "rollout_preemptions",
        "Requests that lost their KV cache for lack of memory.",
        "engine",
    ),
}
"""Counters named `<key>:<label>`: metric, help, and name of the label."""
TIMES = {
    "queue": ("rollout_request_queue_seconds", "wait of a request for a slot at an engine"),
    "first_token": ("rollout_request_first_token_seconds", "time to first token from there"),
}
"""Histograms: the counters `<key>_within:<bound>` and `<key>_s:<engine>`; metric, description."""


class Times(NamedTuple):
    within: dict[float, int]
    """Number of requests that took at most so many seconds, by the bound; the last is infinite."""
    sum_s: float

    @property
    def number(self) -> int:
        return max(self.within.values(), default=0)

    def __str__(self) -> str:
        most = next(bound for bound, count in self.within.items() if count >= 0.99 * self.number)
        mean = format_duration(self.sum_s / self.number)
        within = "over 100 s" if math.isinf(most) else f"within {format_duration(most)}"
        return f"{mean} on average, 99% {within}"


def times(counters: Counters, kind: str) -> Times:
    """Of the requests so far; `kind` is a key of TIMES."""
    buckets = {float(bound): count for bound, count in _below(counters, f"{kind}_within:")}
    bounds = sorted({*buckets, math.inf})
    cumulative = accumulate(int(buckets.get(bound, 0)) for bound in bounds)
    sum_s = sum(seconds for _, seconds in _below(counters, f"{kind}_s:"))
    return Times(dict(zip(bounds, cumulative, strict=True)), sum_s)


def _below(counters: Counters, prefix: str) -> Iterator[tuple[str, float]]:
    """Values of the counters that begin with `prefix`, by the rest of their names."""
    return ((n.removeprefix(prefix), v) for n, v in counters.items() if n.startswith(prefix))


def wasted_share(counters: Counters, tokens_dropped: int) -> float | None:
    """Share of generated tokens that will never be trained, without deliberately discarded ones;
    None before the first token. `tokens_dropped`: by the buffer (`BufferStats.tokens_dropped`)."""
    generated = counters.get("tokens_generated", 0.0)
    wasted = counters.get("tokens_wasted", 0.0) + tokens_dropped
    # The workers' counters arrive slightly later than the buffer's.
    return min(1.0, wasted / generated) if generated else None


def cached_share(counters: Counters) -> float | None:
    """Share of prompt tokens that the engines found in their prefix caches; None before the
    first."""
    prompts, prefilled = (
        sum(value for _, value in _below(counters, f"{kind}:"))
        for kind in ("prompt_tokens", "prefilled_tokens")
    )
    return 1 - prefilled / prompts if prompts else None


def summary_rows(counters: Counters, tokens_dropped: int) -> Iterator[tuple[str, str]]:
    """Rows about generation for a run's summary."""
    share = wasted_share(counters, tokens_dropped)
    if share is not None:
        yield "tokens that never reached the trainer: failed, stopped or too old", f"{share:.1%}"
    filtered, generated = (counters.get(f"tokens_{what}") for what in ("filtered", "generated"))
    if filtered and generated:
        share = min(1.0, filtered / generated)
        yield "tokens that were filtered out, of groups with equal rewards", f"{share:.1%}"
    cached = cached_share(counters)
    if cached is not None:
        yield "prompt tokens found in the prefix cache", f"{cached:.1%}"
    for kind, (_, what) in TIMES.items():
        if (found := times(counters, kind)).number:
            yield what, str(found)
    if num_preempted := sum(number for _, number in _below(counters, "preemptions:")):
        yield "requests that lost their KV cache for lack of memory", format_count(num_preempted)
    if num_episodes := sum(number for _, number in _below(counters, "episodes_ended:")):
        for name in ("turns", "branches"):
            yield f"{name} per episode", f"{counters.get(name, 0.0) / num_episodes:.2f}"
    for length in LENGTHS:
        completed = counters.get(f"completed:{length}", 0.0)
        given_up = counters.get(f"given_up:{length}", 0.0)
        if completed or given_up:
            seconds = counters.get(f"completed_s:{length}", 0.0) / max(1.0, completed)
            took = f", {format_duration(seconds)} each" if completed else ""
            yield (
                f"groups whose longest sample had {length} tokens",
                f"{completed:,.0f} completed{took}; {given_up:,.0f} given up",
            )
    for name, counted in COUNTED.items():
        if counted.is_in_summary and counters.get(name):
            text = counted.what.rstrip(".")
            yield text[0].lower() + text[1:], format_count(counters[name])


def panel_line(counters: Counters, tokens_dropped: int) -> str:
    """The notable counters for the panel; "" if there are none."""
    parts = [
        f"{format_count(counters[name])} {counted.on_panel}"
        for name, counted in COUNTED.items()
        if counted.on_panel and counters.get(name)
    ]
    if share := wasted_share(counters, tokens_dropped):
        parts.insert(0, f"{share:.1%} of tokens wasted")
    return ", ".join(parts)
