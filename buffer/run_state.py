"""The state of a run in Redis besides its groups: weights, waits, metrics, positions."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any, NamedTuple, TypeVar, cast
from uuid import uuid4

from buffer.probes import Probes
from buffer.redis.client import BufferRedis
from buffer.redis.connection import connect_as
from buffer.redis.deadline import Deadline
from buffer.redis.keys import Keys
from buffer.redis.replies import Reply, is_number, readable, setting_number
from buffer.redis.scripts import Scripts
from buffer.redis.wakeups import Wake, WakeStreams
from configs.run_files import Scalar
from configs.schema import BufferConfig

T = TypeVar("T")

METRICS_LENGTH = 10_000
STREAM_START = "0-0"
_READ_ENTRIES = 500
_PAUSED = {"paused": "True"}


class MetricsEntry(NamedTuple):
    """One record of the metrics stream; pass `id` to read on from here."""

    id: str
    kind: str
    record: dict[str, Scalar]


class EngineRoutes(NamedTuple):
    """Where the engines are, and which of them may get requests."""

    versions: Mapping[str, int]
    """The version that each live engine serves."""
    draining: frozenset[str]
    """Live engines that get no new requests."""
    urls: Mapping[str, str]
    """Every engine of the run, also one that serves nothing at the moment."""


class Place(Reply):
    """The reply to an engine that wants to pause for its commit."""

    is_free: bool
    seen: Wake = ("", "")
    """If not, what to wait for, and until when at most."""
    until_free_ms: int = 0


class RunState:
    """A client of one run's shared state, created in and used from one event loop.

    state = await RunState.connect(url, run, settings)
    await state.record_commits({"engine-0": version})              # an engine
    await state.wait_engines_at(version, timeout_s=60)             # the trainer
    await state.count("tokens_generated", 512)

    Increments carry a token, so that a retry after a lost reply does not count twice. All writers
    but `set_phase` need a run that `ReplayBuffer.open` has opened.
    """

    def __init__(self, redis: BufferRedis, run: str, *, shards: int = 1) -> None:
        """`redis` comes from `connect`; `close` closes its connections too.

        `shards` is buffer.shards: every shard needs the engines' versions for its admission.
        """
        self._redis = redis
        self._keys = Keys(run)
        self._scripts = Scripts(redis, self._keys)
        self._all_keys = [Keys(run, shard) for shard in range(shards)]
        self._others = [Scripts(redis, keys) for keys in self._all_keys[1:]]
        self._wake = WakeStreams(redis)

    @classmethod
    async def connect(
        cls, url: str, run: str, settings: BufferConfig, *, waits: bool = False
    ) -> RunState:
        """The run's state with its own connections to `url`. Raises BufferConnectionError.

        `waits`: for a server that is down now, at most for `outage_timeout_s`.
        """
        redis = await connect_as(url, settings, waits=waits)
        return cls(redis, run, shards=settings.shards)

    # Weights: staged at receivers ------------------------------------------------------------

    async def register_receiver(self, name: str, url: str) -> None:
        """Records a receiver's URL; at a new URL it counts as having staged nothing."""
        await self._scripts.run("run_state/register_receiver", int, receiver=name, url=url)

    async def forget_receiver(self, name: str) -> None:
        await self._scripts.run("run_state/forget_receiver", int, receiver=name)

    async def receivers(self) -> dict[str, str]:
        """URL of each registered receiver, by name."""
        return await self._hash("receivers")

    async def record_staged(self, receiver: str, version: int) -> None:
        """Records that a receiver has a whole version, unless it was forgotten meanwhile."""
        await self._scripts.run("run_state/record_staged", int, receiver=receiver, version=version)

    async def staged_versions(self) -> dict[str, int]:
        """The version that each receiver staged last; receivers without one are left out."""
        return await self._numbers("staged")

    async def mark_available(self, version: int) -> None:
        """Records that a receiver has `version` whole; one below the newest changes nothing.

        Only status and metrics read it. Engines take a version when the receiver beside them has
        released it.
        """
        await self._scripts.run("run_state/mark_available", int, version=version)

    async def available_version(self) -> int | None:
        """The newest version that was marked available; None before the first."""
        version = await self._redis.hget(self._keys("weights"), "available")
        return int(version) if version is not None and is_number(version) else None

    # Weights: served by engines --------------------------------------------------------------

    async def register_engine(self, name: str, url: str) -> None:
        """Records where an engine listens, so that the workers connect to it."""
        await self._scripts.run("run_state/register_engine", int, engine=name, url=url)

    async def remove_engine(self, name: str) -> None:
        """Records that an engine has left the run for good: the workers disconnect."""
        await self.forget_engine(name)
        await self._scripts.run("run_state/register_engine", int, engine=name)

    async def record_commits(self, served_versions: Mapping[str, int]) -> None:
        """Records which version each engine serves. Admission depends on the slowest one."""
        if not served_versions:
            return
        # The home shard last: what `engine_versions` returns then holds in all shards.
        for scripts in (*self._others, self._scripts):
            await scripts.run("run_state/record_commits", int, versions=served_versions)

    async def forget_engine(self, engine: str) -> None:
        """Records that an engine is gone, so that neither admission nor commits wait for it.

        When the last one is gone, nothing is admitted until one serves again.
        """
        for scripts in (*self._others, self._scripts):
            await scripts.run("run_state/forget_engine", int, engine=engine)

    async def forget_fleet(self) -> None:
        """Forgets all engines and receivers: those of a run that has ended."""
        for engine in {*await self.engine_versions(), *await self._hash("engine_urls")}:
            await self.remove_engine(engine)
        for receiver in await self.receivers():
            await self.forget_receiver(receiver)

    async def drain_engine(self, engine: str) -> None:
        """Keeps new requests from an engine until `record_commits` or `forget_engine` names it. It
        still counts as serving its version; nothing happens if it serves none."""
        await self._scripts.run("run_state/drain_engine", int, engine=engine)

    async def engine_versions(self) -> dict[str, int]:
        """The version that each live engine serves, without engines that are starting or lost."""
        return await self._numbers("engine_versions")

    async def wait_engines_at(self, version: int, timeout_s: float) -> dict[str, int]:
        """Waits until every live engine (one at least) serves `version` or a later one.

        Returns engine_versions. Raises TimeoutError naming the engines that do not.
        """
        served = await self._engine_versions_when(
            lambda served: bool(served) and min(served.values()) >= version, timeout_s
        )
        if not served:
            raise TimeoutError(
                f"no engine served version {version} within {timeout_s:g} s: none is alive"
            )
        late = [f"{name} (version {at})" for name, at in sorted(served.items()) if at < version]
        if late:
            raise TimeoutError(
                f"engines that did not serve version {version} within {timeout_s:g} s: "
                f"{', '.join(late)}"
            )
        return served

    async def wait_engines_changed(
        self, seen: Mapping[str, int], timeout_s: float
    ) -> dict[str, int]:
        """Waits until engine_versions differs from `seen`, or for `timeout_s`; returns it."""
        return await self._engine_versions_when(lambda served: served != seen, timeout_s)

    async def wait_routes_changed(self, seen: EngineRoutes, timeout_s: float) -> EngineRoutes:
        """The same for all that EngineRoutes holds."""
        stream = self._keys.wake("engines")
        return await self._wake.wait_until(
            stream, self._routes, lambda routes: routes != seen, timeout_s
        )

    async def _routes(self) -> EngineRoutes:
        draining = frozenset(await self._hash("draining"))
        return EngineRoutes(await self.engine_versions(), draining, await self._hash("engine_urls"))

    async def _engine_versions_when(
        self, holds: Callable[[dict[str, int]], bool], timeout_s: float
    ) -> dict[str, int]:
        stream = self._keys.wake("engines")
        return await self._wake.wait_until(stream, self.engine_versions, holds, timeout_s)

    async def enter_commit(self, engine: str, limit: int, ttl_s: float, timeout_s: float) -> bool:
        """Waits until fewer than `limit` other engines of the run are paused for a commit.

        The place is held until `leave_commit`, but at most for `ttl_s`, so that an engine that dies
        in its commit does not block the others. Entering again renews the time. False on timeout.
        """
        deadline, ttl_ms = Deadline(timeout_s), max(1, int(1000 * ttl_s))
        while True:
            place = await self._scripts.run(
                "run_state/enter_commit", Place, engine=engine, limit=limit, held_ms=ttl_ms
            )
            if place.is_free:
                return True
            if not deadline.left_s:
                return False
            await self._wake.wait([place.seen], min(deadline.left_s, place.until_free_ms / 1000))

    async def leave_commit(self, engine: str) -> None:
        """Frees the place of `enter_commit`, if it is still held."""
        await self._scripts.run("run_state/leave_commit", int, engine=engine)

    async def other_weights(self, version: int, engine: str, digest: str) -> str:
        """Records the digest of what an engine holds at `version`. Returns the first engine that
        did so for this version, if its digest is another one; else "". Only the newest is kept."""
        return await self._scripts.run(
            "run_state/other_weights", str, version=version, engine=engine, digest=digest
        )

    # Whether trainer and engines agree --------------------------------------------------------

    async def leave_probes(self, probes: Probes) -> None:
        """Leaves them for the engines that commit their version, in place of the last ones."""
        await self._scripts.run(
            "run_state/leave_probes", int, version=probes.version, probes=probes.encode()
        )

    async def probes(self, version: int) -> Probes | None:
        """The probes of `version`; None unless they are those that were left last."""
        # By version, as engines ask at each commit: for most versions there is nothing to send.
        found = await self._redis.hget(self._keys("probes"), str(version))
        return Probes.decode(readable(cast("bytes", found))) if found else None

    # The trainer's version -------------------------------------------------------------------

    async def trainer_version(self) -> int:
        """The version that the trainer announced last; 0 before the first."""
        version = await self._redis.hget(self._keys("settings"), "trainer_version")
        return int(setting_number("trainer_version", readable(cast("bytes", version or b"0"))))

    async def wait_version_above(self, version: int, timeout_s: float) -> int:
        """Waits until the trainer's version is above `version`, and returns it. Or TimeoutError."""
        stream = self._keys.wake("version")
        current = await self._wake.wait_until(
            stream, self.trainer_version, lambda current: current > version, timeout_s
        )
        if current > version:
            return current
        raise TimeoutError(
            f"the trainer announced no version above {version} within {timeout_s:g} s"
        )

    # Settings that change during the run -----------------------------------------------------

    async def live_settings(self, names: Collection[str]) -> dict[str, str]:
        """The values of `names` in the run's Redis; a setting that is missing was never changed."""
        values = await self._redis.hmget(self._keys("settings"), list(names))
        return {
            name: readable(cast("bytes", value))
            for name, value in zip(names, values, strict=True)
            if value is not None
        }

    async def wait_settings_changed(
        self, names: Collection[str], seen: Mapping[str, str], timeout_s: float
    ) -> dict[str, str]:
        """Waits until `live_settings` differs from `seen`, or for `timeout_s`; returns it."""
        stream = self._keys.wake("settings")
        return await self._wake.wait_until(
            stream, lambda: self.live_settings(names), lambda now: now != seen, timeout_s
        )

    async def is_paused(self) -> bool:
        return await self.live_settings(_PAUSED) == _PAUSED

    async def wait_unpaused(self, timeout_s: float) -> None:
        """Waits while the run is paused, for `timeout_s` at most."""
        await self.wait_settings_changed(_PAUSED, _PAUSED, timeout_s)

    # Waits between the parts of a run, and other counters -------------------------------------

    async def add_wait(self, waiter: str, waited_on: str, seconds: float) -> None:
        """Adds to the time that one part of the run has spent waiting for another."""
        await self._add("waits", {f"{waiter}>{waited_on}": seconds})

    async def waits(self) -> dict[tuple[str, str], float]:
        """Seconds by (waiter, waited_on)."""
        waits = _finite(await self._hash("waits"))
        parts = {name.partition(">"): seconds for name, seconds in waits.items()}
        return {(waiter, on): seconds for (waiter, _, on), seconds in parts.items()}

    async def count(self, name: str, amount: float = 1) -> None:
        """Adds to a counter of the run, such as tokens_generated."""
        await self.count_all({name: amount})

    async def count_all(self, amounts: Mapping[str, float]) -> None:
        """The same for several counters, which a reader then finds all changed or none."""
        if amounts:
            await self._add("counters", amounts)

    async def counters(self) -> dict[str, float]:
        return _finite(await self._hash("counters"))

    async def _add(self, hash_name: str, amounts: Mapping[str, float]) -> None:
        await self._scripts.run(
            "run_state/add_numbers",
            int,
            token=uuid4().hex,
            name=hash_name,
            amounts={name: repr(float(amount)) for name, amount in amounts.items()},
        )

    async def retry_while_run_moves(self, wait: Callable[[], Awaitable[T]]) -> T:
        """The result of `wait`, which is called again after each of its TimeoutErrors if any part
        of the run has moved since the call before.

            lease = await state.retry_while_run_moves(lambda: buffer.lease(..., timeout_s=600))

        A run has moved if tokens arrived, also those of a group that takes hours, if a group was
        pushed or a version announced, if the trainer renewed the lease of a long step, or if it was
        paused in between. Raises the TimeoutError of a run that stands still, at the earliest the
        second one, and none while it is paused.
        """
        seen: list[object] | None = None
        while True:
            try:
                return await wait()
            except TimeoutError:
                # Most waits end in time, so nothing is read before the first that does not; it is
                # repeated once, because what moved before it is unknown.
                before, seen = seen, await self._marks()
                if seen == before and not await self.is_paused():
                    raise

    async def _marks(self) -> list[object]:
        """All that changes while the run moves; read from all shards at the same time."""

        async def of_shard(keys: Keys) -> list[object]:
            async with self._redis.pipeline(transaction=False) as pipe:
                pipe.hget(keys("counters"), "tokens_arrived")  # the home shard's
                pipe.hget(keys("stats"), "pushed")
                pipe.hmget(keys("settings"), ["trainer_version", "paused"])
                pipe.zrange(keys("leased"), -1, -1, withscores=True)
                return await pipe.execute()

        return list(await asyncio.gather(*map(of_shard, self._all_keys)))

    async def memory(self) -> tuple[int, int]:
        """Bytes that the server uses, and its maxmemory; 0 if it has none."""
        info: dict[str, Any] = await self._redis.info("memory")
        return int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))

    # Metrics ---------------------------------------------------------------------------------

    async def append_metrics(self, record: Mapping[str, Scalar], kind: str) -> None:
        """Appends a record to the stream, which keeps about the last METRICS_LENGTH entries."""
        await self._scripts.run(
            "run_state/append_metrics",
            str,
            token=uuid4().hex,
            kind=kind,
            record=json.dumps(record),
            length=METRICS_LENGTH,
        )

    async def append_event(self, event: str, who: str, detail: str) -> None:
        """Appends a `weights_event`: what has become of an engine or a receiver."""
        record = {"event": event, "who": who, "detail": detail}
        await self.append_metrics(record, "weights_event")

    async def read_metrics(self, after_id: str, block_s: float) -> list[MetricsEntry]:
        """Entries after `after_id` (STREAM_START for all), waiting up to `block_s` for the first.

        Returns at most _READ_ENTRIES: read on from the last one's id.
        """
        deadline, stream = Deadline(block_s), self._keys("metrics")
        while True:
            reply: Any = await self._redis.xread({stream: after_id}, _READ_ENTRIES)
            if reply:
                found = [_metrics_entry(entry_id, fields) for entry_id, fields in reply[0][1]]
                entries = [entry for entry in found if entry is not None]
                if entries:
                    return entries
                after_id = reply[0][1][-1][0].decode()  # none of these entries is ours
                continue
            if not deadline.left_s:
                return []
            await self._wake.wait([(stream, after_id)], deadline.left_s)

    # Positions, phase ------------------------------------------------------------------------

    async def task_positions(self) -> dict[int, int]:
        """Each worker's position in its task stream, as recorded by `ReplayBuffer.begin`."""
        positions: dict[int, int] = {}
        for keys in self._all_keys:
            found = cast("dict[bytes, bytes]", await self._redis.hgetall(keys("tasks")))
            for worker, position in found.items():
                if is_number(worker) and is_number(position):
                    positions[int(worker)] = max(positions.get(int(worker), 0), int(position))
        return positions

    async def set_phase(self, phase: str) -> None:
        await self._redis.set(self._keys("phase"), phase)

    async def phase(self) -> str:
        """The run's phase; "" before the first set_phase."""
        phase = cast("bytes | None", await self._redis.get(self._keys("phase")))
        return readable(phase) if phase else ""

    async def close(self) -> None:
        """Ends every wait in this object with BufferClosedError and closes the connections."""
        await self._wake.close()
        await self._redis.aclose()

    async def _numbers(self, name: str) -> dict[str, int]:
        return {f: int(text) for f, text in (await self._hash(name)).items() if is_number(text)}

    async def _hash(self, name: str) -> dict[str, str]:
        pairs = cast("dict[bytes, bytes]", await self._redis.hgetall(self._keys(name)))
        return {readable(field): readable(value) for field, value in pairs.items()}


def _metrics_entry(entry_id: bytes, fields: dict[bytes, bytes]) -> MetricsEntry | None:
    try:
        kind, record = readable(fields[b"kind"]), _read_record(readable(fields[b"record"]))
    except (KeyError, ValueError):
        return None
    return MetricsEntry(id=entry_id.decode(), kind=kind, record=record)


def _finite(found: Mapping[str, str]) -> dict[str, float]:
    """The fields that are numbers: one garbled field must not stop readers of all of them."""
    values: dict[str, float] = {}
    for name, text in found.items():
        with contextlib.suppress(ValueError):
            values[name] = float(text)
    return {name: value for name, value in values.items() if math.isfinite(value)}


def _read_record(text: str) -> dict[str, Scalar]:
    """Parses a record. Raises ValueError for anything else."""
    try:
        record = json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(record, dict):
        raise ValueError("not a record")
    return {name: value for name, value in record.items() if isinstance(value, float | int | str)}
