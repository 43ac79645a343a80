"""`make trace GROUP=...`: the life of one group, from the buffer's audit stream.

2025-11-21  w0-17 of night: consumed
14:20:31.102              admitted (version 10)
14:20:33.402     +2.3 s   pushed (version 10)
14:20:40.010     +6.6 s   leased (step 12, owner 3fa9c1)
14:20:41.310     +1.3 s   consumed (step 12)
running 2.3 s, ready 6.6 s, leased 1.3 s, consumed 19 s until now
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import datetime

from rich.console import Console

from buffer.redis.keys import check_group_id
from buffer.results import GroupEvent
from controller.buffer_access import BufferAddress, ask, buffer_address
from controller.run_dir import RunDir, RunDirError
from controller.units import format_duration
from host.printable import printable

FINAL = frozenset({"acked", "dropped", "abandoned"})
STATE_AFTER = {
    "admitted": "running",
    **dict.fromkeys(("pushed", "expired", "nacked", "requeued", "reconciled"), "ready"),
    **{state: state for state in ("leased", "consumed", "quarantined")},
    **{state: state for state in FINAL},
}
"""State of the group after an event; other events do not change it."""

WORDS = {
    "full": "its push found no room",
    "expired": "its lease was not renewed",
    "nacked": "given back",
    "requeued": "ready again",
    "rerun": "its prompt runs again",
    "prompt_quarantined": "its prompt is in quarantine",
    "reconciled": "ready again for a trainer that took over",
    "acked": "a durable checkpoint contains it",
}
DETAILS = {"s": "step {}", "v": "version {}", "o": "owner {}", "r": "{}", "p": "prompt {}"}


def print_trace(
    run_dir: RunDir, group_id: str, url: str | None = None, as_json: bool = False
) -> None:
    """Print the group's events, `as_json` in one object. Raises RunDirError if none is known."""
    console = Console()
    check_group_id(group_id)
    with buffer_address(run_dir, url) as address:
        events = ask(address, lambda buffer: buffer.events(group_id))
        state = ask(address, lambda buffer: buffer.group_state(group_id))
    if as_json and (events or state is not None):
        listed = [{"at": one.at, "event": one.event, **one.detail} for one in events]
        print(
            json.dumps({"run": run_dir.name, "group": group_id, "state": state, "events": listed})
        )
        return
    if events:
        lines = life_lines(run_dir.name, group_id, events, time.time())
    elif state is not None:
        lines = [f"{group_id} of {run_dir.name}: {state}", f"{_why_no_events(address)}."]
    else:
        raise RunDirError(
            f"{group_id}: {_why_no_events(address)}, and nothing else is known of it; check the id"
        )
    for line in lines:
        console.print(printable(line), highlight=False, markup=False, soft_wrap=True)


def _why_no_events(address: BufferAddress) -> str:
    length = address.settings.audit_length
    if length == 0:
        return "buffer.audit_length=0 keeps no events of groups"
    return (
        f"no event of it is kept: {address.run} never had such a group, or its events are older "
        f"than the last buffer.audit_length={length}"
    )


def life_lines(run: str, group_id: str, events: Sequence[GroupEvent], now: float) -> list[str]:
    """The group's last state, its events, and the time in each state (pure)."""
    lines: list[str] = []
    seconds: dict[str, float] = {}
    state, before = "", events[0].at
    for event in events:
        since = max(0.0, event.at - before)
        if state:
            seconds[state] = seconds.get(state, 0.0) + since
        gap = f"+{format_duration(since)}" if lines else ""
        clock = datetime.fromtimestamp(event.at).strftime("%H:%M:%S.%f")[:-3]
        lines.append(f"{clock} {gap:>10}   {sentence(event)}")
        state, before = STATE_AFTER.get(event.event, state), event.at
    is_over = state in FINAL
    if state and not is_over:
        seconds[state] = seconds.get(state, 0.0) + max(0.0, now - before)
    times = ", ".join(f"{name} {format_duration(spent)}" for name, spent in seconds.items())
    day = datetime.fromtimestamp(events[0].at).strftime("%Y-%m-%d")
    head = f"{day}  {group_id} of {run}: {state or events[-1].event}"
    return [head, *lines, *([times + ("" if is_over else " until now")] if times else [])]


def sentence(event: GroupEvent) -> str:
    """One event with its details in brackets (pure)."""
    remarks = [WORDS[event.event]] if event.event in WORDS else []
    for name, text in event.detail.items():
        remarks.append(DETAILS.get(name, f"{name} {{}}").format(text))
    return event.event + (f" ({', '.join(remarks)})" if remarks else "")
