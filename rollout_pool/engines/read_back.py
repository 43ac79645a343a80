"""Compares what an engine's loader took with what was published.

    version              3 ─────────────► 5      what the engine holds, by its own hashes
    q_proj, k_proj       changed                 qkv_proj       changed
    v_proj               as it was
    down_proj            changed                 down_proj      as it was: not taken

A loader that does not know a tensor's name keeps the old weight and says nothing, and an engine
that never takes a new one looks like staleness. The checksums in the manifests tell what should
have changed: a step need not change any bit of a bfloat16 tensor.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256

from rollout_pool.engines.engine import EngineControl, TornEngine
from weight_sync.types import Manifest

log = logging.getLogger(__name__)

READ_EVERY = 16
"""Versions between two readings: an engine decodes nothing while it hashes its weights."""
_FUSED = (
    (re.compile(r"\.experts\.\d+\.(gate_proj|up_proj|w1|w3)\.weight"), ".experts.w13_weight"),
    (re.compile(r"\.experts\.\d+\.(down_proj|w2)\.weight"), ".experts.w2_weight"),
    (re.compile(r"\.[qkv]_proj\."), ".qkv_proj."),
    (re.compile(r"\.(gate|up)_proj\."), ".gate_up_proj."),
)
"""Tensors that engines keep in one parameter, and its name."""
_NAMED = 3
"""Parameters that a message names."""


class WeightsNotTaken(TornEngine):
    """A loader does not take what was published, which a restart does not mend."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Reading:
    """The tensors that an engine was given, and the parameters that it holds."""

    version: int
    layout_digest: str
    published: Mapping[str, Sequence[int]]
    """Checksums of each tensor."""
    held: Mapping[str, Sequence[str]]
    """Hashes of each parameter, by the engine's name: one of each rank."""

    @property
    def digest(self) -> str:
        """Equal at engines that hold the same of what is published."""
        held = {parameter: self.held[parameter] for parameter in sorted(sources(self))}
        return sha256(json.dumps(held).encode()).hexdigest()[:16]


class ReadBack:
    """Reads one engine's parameters for one start of its server, while it decodes."""

    def __init__(self, client: EngineControl, timeout_s: float) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._last: Reading | None = None
        self._num_reads, self._read_at = 0, -1

    def is_due(self, version: int) -> bool:
        """Returns whether to read at this version: after the first two commits, and at every
        READ_EVERY-th version, which are the same at all engines."""
        return self._num_reads < 2 or version // READ_EVERY > self._read_at // READ_EVERY

    async def read(self, manifest: Manifest) -> Reading:
        """Reads the parameters of the version that the engine serves.

        Raises WeightsNotTaken if that is not what was published, EngineError without a response.
        """
        self._num_reads, self._read_at = self._num_reads + 1, manifest.version
        now = Reading(
            version=manifest.version,
            layout_digest=manifest.layout.digest,
            published=manifest.tensor_checksums,
            held=await self._client.weight_hashes(self._timeout_s),
        )
        before, self._last = self._last, now
        if before is None or before.layout_digest != now.layout_digest:
            self._tell_unknown(now)
            return now
        if problem := difference(before, now):
            raise WeightsNotTaken(
                f"did not take what was published as version {now.version}: since version "
                f"{before.version} {problem}. It samples from other weights than those that are "
                "trained: choose another weight_sync.commit, or a model that the engine's class "
                "loads completely (docs/weight-sync.md#what-the-engine-holds)"
            )
        return now

    def _tell_unknown(self, reading: Reading) -> None:
        known = sources(reading)
        unread = reading.published.keys() - {name for names in known.values() for name in names}
        if unread:
            log.warning(
                "%s: %d of %d published tensors are not among the engine's parameters by a name "
                "that is known here, so nobody checks that it takes them: %s",
                self._client.name,
                len(unread),
                len(reading.published),
                _some(unread),
            )


def sources(reading: Reading) -> dict[str, list[str]]:
    """The published tensors that each parameter is made of, as far as their names tell."""
    found: dict[str, list[str]] = {}
    for name in reading.published:
        fused = (pattern.sub(whole, name) for pattern, whole in _FUSED)
        parameter = next((p for p in (name, *fused) if p in reading.held), None)
        if parameter is not None:
            found.setdefault(parameter, []).append(name)
    return found


def difference(before: Reading, now: Reading) -> str:
    """Says what changed from one reading to the next otherwise than it should; "" if nothing.

    Both must be of the same layout. A parameter that is made of several is judged as a whole.
    """

    def changed(name: str) -> bool:
        return before.published[name] != now.published[name]

    def moved(parameter: str) -> bool:
        return before.held.get(parameter) != now.held[parameter]

    known = sources(now)
    kept = [p for p, names in known.items() if any(map(changed, names)) and not moved(p)]
    if kept:
        return f"these parameters stayed though their tensors changed: {_some(kept)}"
    if all(map(changed, now.published)) and not any(map(moved, now.held)):
        return "no parameter changed, though every tensor did"
    strange = [p for p, names in known.items() if not any(map(changed, names)) and moved(p)]
    if strange:
        return f"these parameters changed though their tensors stayed: {_some(strange)}"
    return ""


def _some(names: Iterable[str]) -> str:
    listed = sorted(names)
    rest = len(listed) - _NAMED
    return ", ".join(listed[:_NAMED]) + (f" and {rest} more" if rest > 0 else "")
