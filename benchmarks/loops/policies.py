"""Rules that schedule rollouts, as settings of a run: parts of learning.py.

docs/performance.md has their sources, and what of each rule the settings do not say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

BASELINE = "synchronous"
KEEP_TOKENS = "weight_sync.pause_mode=resubmit"
"""Requests in flight end at a new version, keep their tokens and go on under it."""
END_FIRST = "weight_sync.pause_mode=drain"
"""Requests in flight end under their version before an engine takes a new one."""
NEVER_DROP = "buffer.on_stale=wait"
FIRST_IN = "buffer.selector=fifo"
UNBOUND = "rollout.oversampling=2"
"""Generation hardly waits for the trainer: what becomes too old is thrown away instead."""

POLICIES: Mapping[str, Sequence[str]] = {
    BASELINE: ["buffer=synchronous"],
    **{f"ours {k}": [f"buffer.max_staleness={k}"] for k in (1, 2, 4, 8)},
    "one step off": ["buffer.max_staleness=1", NEVER_DROP, END_FIRST],
    # trigger_parameter_sync_step=4, staleness_threshold=0.5: 4 * (1 + 0.5) batches between syncs.
    "quota per sync": [
        *("trainer.publish_every=4", "buffer.max_staleness=5"),
        *(NEVER_DROP, FIRST_IN, KEEP_TOKENS),
    ],
    "counter": ["buffer.max_staleness=4", NEVER_DROP, KEEP_TOKENS],
    "in flight": ["buffer.max_staleness=4", NEVER_DROP, FIRST_IN, "weight_sync=in_place"],
    "window": ["buffer.max_staleness=2", "buffer.on_stale=drop", FIRST_IN, UNBOUND, END_FIRST],
    "requeue": [
        *("buffer.max_staleness=2", "buffer.on_stale=requeue", "buffer.max_retries=1000"),
        *(FIRST_IN, UNBOUND, END_FIRST),
    ],
}
