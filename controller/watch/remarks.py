"""Warnings about a run, with the fix (pure)."""

from __future__ import annotations

from buffer.results import BufferStats
from controller.metrics.history import Record
from controller.metrics.weights import WeightsView, behind_words, engines_behind
from controller.units import format_bytes, format_duration, format_number_of

STILL_S = 10.0
"""Workers count the tokens that have arrived every few seconds."""


def buffer_remarks(stats: BufferStats) -> list[str]:
    """A sentence for each condition of the buffer that may need action."""
    remarks = [_blocked(stats)]
    for what, number, state in (
        ("group", stats.quarantined, "kept but not trained"),
        ("prompt", stats.prompts_quarantined, "no longer run"),
    ):
        if number:
            are = f"{format_number_of(number, what)} {'is' if number == 1 else 'are'}"
            remarks.append(f"{are} in quarantine, {state}: `make quarantine` says why.")
    return [sentence for sentence in remarks if sentence]


def engine_remarks(stats: BufferStats, weights: WeightsView) -> list[str]:
    lost = sorted(name for name in weights.lost_engines if name not in stats.engine_versions)
    remarks = []
    if stats.engines_gone:
        remarks.append("No engine serves: nothing is admitted until one is back.")
    if lost:
        are = "is" if len(lost) == 1 else "are"
        remarks.append(f"{', '.join(lost)} {are} lost; restarting or waiting.")
    served, every = stats.engine_versions, weights.publish_every
    if behind := engines_behind(stats.trainer_version, served, every):
        remarks.append(f"{behind_words(behind)}; admission follows the slowest engine.")
    return remarks


def overdue_words(stats: BufferStats, since_s: float, usual_s: float, still_s: float) -> str:
    """Names the part that keeps a step waiting. `still_s`: since the last token or group came."""
    head = f"No step for {format_duration(since_s)}, where one takes {format_duration(usual_s)}: "
    may_want_more = stats.gradient_accumulation_steps > 1 and stats.ready < stats.groups_per_step
    if stats.leased and not may_want_more:
        return f"{head}the trainer has its {stats.leased} groups; logs/trainer-0.log may say why."
    ready = f"{stats.ready} of {format_number_of(stats.groups_per_step, 'group')} are ready"
    if not stats.running:
        return f"{head}{ready} and none is being sampled; see the logs of the workers."
    moving = "tokens arrive"
    if still_s > STILL_S:
        moving = f"no token has come for {format_duration(still_s)}; see the logs of the engines"
    return f"{head}{ready}, {stats.running} are being sampled, and {moving}."


def eval_failed_words(record: Record) -> str:
    version, why = record.number("version"), record.values.get("why")
    return f"The evaluation of version {version:.0f} failed; training continues: {why}"


def checkpoint_failed_words(record: Record) -> str:
    step, why = record.count("step"), record.values.get("error")
    if why is None:
        return (
            f"The checkpoint of step {step} is without the buffer's groups, which does not stop "
            f"the run: {record.values.get('groups_error')}. A resume whose Redis has lost them "
            "samples their prompts again."
        )
    return (
        f"There is no checkpoint of step {step}, which does not stop the run: {why}. Free space; "
        "the next one, if any is due, tries again."
    )


def _blocked(stats: BufferStats) -> str:
    # A push is counted when its wait ends: a full buffer is reported before the first one.
    full, times = _full(stats), stats.push_blocked
    pushes = "1 push" if times == 1 else f"{times} pushes"
    waited = f"{pushes} waited {format_duration(stats.push_blocked_s)}"
    if full:
        so_far = f" ({waited} so far)" if times else ""
        return (
            f"The buffer is full: {full}{so_far}. The trainer is behind: raise the capacity, or "
            "train more groups per step."
        )
    return f"{waited} for room so far; there is room now." if times else ""


def bytes_in_use(stats: BufferStats) -> int:
    """The bytes that count against buffer.capacity_bytes: payloads that are ready or leased."""
    return stats.bytes - stats.bytes_consumed - stats.bytes_quarantined


def _full(stats: BufferStats) -> str:
    """The capacity that is used up, or ""."""
    held = stats.ready + stats.leased
    if stats.capacity_groups is not None and held >= stats.capacity_groups:
        return f"{held} groups, buffer.capacity_groups={stats.capacity_groups}"
    size = bytes_in_use(stats)
    if stats.capacity_bytes is not None and size >= stats.capacity_bytes:
        return f"{format_bytes(size)}, buffer.capacity_bytes={stats.capacity_bytes}"
    return ""
