"""How prompts are written in Redis: those that run, wait to be run again, or are in quarantine."""

from __future__ import annotations

from buffer.lease import QuarantinedPrompt
from buffer.replies import is_number
from buffer.types import PromptRef


def write_prompt(prompt: PromptRef) -> str:
    """'attempt index task', or 'attempt+reruns index task' if a worker died over it."""
    reruns = f"+{prompt.reruns}" if prompt.reruns else ""
    return f"{prompt.attempt}{reruns} {prompt.index} {prompt.task}"


def read_prompt(text: str) -> PromptRef:
    counts, index, task = text.split(" ", 2)
    attempt, _, reruns = counts.partition("+")
    return PromptRef(task=task, index=int(index), attempt=int(attempt), reruns=int(reruns or 0))


def quarantined_prompt(name: str, text: str) -> QuarantinedPrompt:
    """Reads 'index task' and 'ms times reason'."""
    index, task = name.split(" ", 1)
    at_ms, times, reason = text.split(" ", 2)
    if not is_number(at_ms):
        raise ValueError(f"{at_ms!r} is no time in milliseconds")
    return QuarantinedPrompt(
        task=task, index=int(index), reason=reason, times=int(times), at=int(at_ms) / 1000
    )
