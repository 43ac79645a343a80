"""How one engine comes to serve a version that lies staged beside it.

    prepare ── pause ── load ── which version are you at? ── continue ──► CommitReport
                 └───────── pause_s: no token is decoded ────────┘

Requests in flight wait and then go on. If something fails before the load, the engine is whole and
goes on at its old version. From the load's first byte on it is torn, until it has said itself that
it serves the new one: SGLang's "rollback" of a failed load reads the same new files again. A torn
engine stays paused for good, so that no token is ever decoded with torn weights, and has to be
started again.

The strategies differ in the load (`commit_ipc` holds the one for GPUs alone):

    weight_sync.commit   the load, while the engine stands still
    staged_disk          the engine reads the staged file through its own loader
    direct               this process broadcasts the staged file to SGLang's own endpoint
    ipc                  the engine copies from a buffer in GPU memory that this process fills
"""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from configs.choices import CommitStrategy, PauseMode
from configs.schema import WeightSyncConfig
from rollout_pool.engines.client import SGLangClient
from rollout_pool.engines.commit_ipc import Ipc
from rollout_pool.engines.staged_file import Batch, StagedFile
from rollout_pool.sampling.engine_client import EngineError
from weight_sync.types import GroupSpec

if TYPE_CHECKING:
    import torch.distributed as dist


class TornEngine(EngineError):
    """An engine whose weights or state nobody knows: it must never decode again, only be restarted.

    The message names the engine and what failed.
    """


@dataclass(kw_only=True, slots=True, frozen=True)
class CommitReport:
    """One engine's switch to a version, as the engine's own process measured it."""

    engine: str
    version: int
    strategy: str
    pause_s: float
    """From the call that stops decoding until the one that lets it go on has returned."""
    load_s: float
    """Of that, for the load alone."""
    paused_at: float
    """Unix time at which the pause began."""
    served_version: int
    """What the engine says that it serves now."""


class Strategy(Protocol):
    """One way in which an engine takes a staged version. Made anew for each start of a server."""

    @property
    def name(self) -> str:
        """As weight_sync.commit has it."""
        ...

    async def check(self) -> None:
        """Raises ValueError, naming the setting and the fix, if it can't work with this server."""
        ...

    async def prepare(self, folder: Path) -> None:
        """Whatever can be done while the engine still decodes. Raises EngineError."""
        ...

    async def load(self, version: int, folder: Path) -> None:
        """Load `folder`/model.safetensors into the paused engine. Raises anything if it fails."""
        ...

    async def close(self) -> None: ...


class Committer:
    """Takes one engine from version to version. One call at a time."""

    def __init__(self, client: SGLangClient, strategy: Strategy, pause_mode: PauseMode) -> None:
        self._client = client
        self._strategy = strategy
        self._pause_mode = pause_mode
        self._torn: str | None = None

    async def commit(self, version: int, folder: Path) -> CommitReport:
        """Make the engine serve what lies in `folder` as `version`.

        Raises EngineError if it could not begin (the engine goes on at its old version), and
        TornEngine for anything later, also for every call after that. Cancelled, it leaves the
        engine torn, unless it had not been paused yet.
        """
        self._check_whole()
        await self._strategy.prepare(folder)
        self._torn = f"the commit of version {version} was broken off"
        paused_at, pause_began = time.time(), time.perf_counter()
        await self._pause()
        try:
            load_at = time.perf_counter()
            await self._strategy.load(version, folder)
            load_s = time.perf_counter() - load_at
            served = await self._client.served_version()
            if served != version:
                raise EngineError(f"the engine says that it serves version {served}")
            await self._client.resume()
        except Exception as error:
            what = str(error) or type(error).__name__
            self._torn = f"the commit of version {version} failed: {what}"
            raise self._tear() from error
        pause_s = time.perf_counter() - pause_began
        self._torn = None
        return CommitReport(
            engine=self._client.name,
            version=version,
            strategy=self._strategy.name,
            pause_s=pause_s,
            load_s=load_s,
            paused_at=paused_at,
            served_version=served,
        )

    async def close(self) -> None:
        await self._strategy.close()

    async def _pause(self) -> None:
        """Stops decoding; a refused pause is taken back, whatever has become of it."""
        try:
            await self._client.pause(self._pause_mode)
        except EngineError as error:
            try:
                await self._client.resume()
            except EngineError:
                self._torn = f"it neither stops nor goes on: {error}"
                raise self._tear() from error
            self._torn = None
            raise

    def _check_whole(self) -> None:
        if self._torn is not None:
            raise self._tear()

    def _tear(self) -> TornEngine:
        return TornEngine(f"{self._client.name} must be started again: {self._torn}")


def make_strategy(
    client: SGLangClient, config: WeightSyncConfig, *, tp_size: int, host: str
) -> Strategy:
    """What weight_sync.commit asks for, for one server, which listens on `host`."""
    match config.commit:
        case CommitStrategy.staged_disk:
            return StagedDisk(client, config.commit_timeout_s)
        case CommitStrategy.direct:
            return Direct(client, config, tp_size=tp_size, host=host)
        case CommitStrategy.ipc:
            return Ipc(client, config, tp_size=tp_size)


class StagedDisk:
    """The engine's own loader reads the staged file: no byte passes through this process."""

    name = "staged_disk"

    def __init__(self, client: SGLangClient, timeout_s: float) -> None:
        self._client = client
        self._timeout_s = timeout_s

    async def check(self) -> None:
        if not await self._client.can_update_from_disk():
            raise ValueError(
                "weight_sync.commit=staged_disk: this SGLang server loads nothing from a folder; "
                "use weight_sync.commit=direct or a newer SGLang"
            )

    async def prepare(self, folder: Path) -> None:
        """Nothing: the bytes are where the engine reads them."""

    async def load(self, version: int, folder: Path) -> None:
        await self._client.update_from_disk(str(folder), version, self._timeout_s)

    async def close(self) -> None:
        """Nothing is held."""


class Direct:
    """SGLang's own broadcast: receive and load share the scheduler's thread, batch by batch.

    What others do to a whole fleet; here the sender is local. Always gloo, for nccl refuses two
    members on one GPU. The baseline that the other strategies are measured against.
    """

    name = "direct"

    def __init__(
        self, client: SGLangClient, config: WeightSyncConfig, *, tp_size: int, host: str
    ) -> None:
        self._client = client
        self._config = config
        self._tp_size = tp_size
        self._host = host
        self._spec: GroupSpec | None = None
        self._group: dist.ProcessGroup | None = None
        self._wants_session = False

    async def check(self) -> None:
        """It works with every SGLang server."""
        self._wants_session = await self._client.wants_update_session()

    async def prepare(self, folder: Path) -> None:
        if self._group is None:
            await self._join()

    async def load(self, version: int, folder: Path) -> None:
        staged = await asyncio.to_thread(StagedFile.open, folder)
        if self._wants_session:
            await self._client.begin_update()
        assert self._spec is not None, "prepare() comes first"
        for batch in staged.batches(self._config.bucket_bytes):
            # If one end fails, the other one's wait ends at the group's timeout or with the server.
            await asyncio.gather(
                self._client.receive(batch.tensors, self._spec, version),
                asyncio.to_thread(self._broadcast, batch),
            )
        if self._wants_session:
            await self._client.end_update()

    async def close(self) -> None:
        if self._group is not None:
            await asyncio.to_thread(self._leave)

    async def _join(self) -> None:
        # torch is a second of start-up and 200 MB: only who broadcasts pays for it.
        from weight_sync.group import join_as_sglang_sender, open_store

        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the engine is on this machine
        timeout_s = self._config.timeout_s
        store = await asyncio.to_thread(open_store, self._host, timeout_s)
        name = self._client.name
        spec = GroupSpec(
            epoch=0,
            host=self._host,
            port=store.port,
            name=f"direct-{name}",
            num_senders=1,
            receivers=tuple(f"{name}.{rank}" for rank in range(self._tp_size)),
            backend="gloo",
            timeout_s=timeout_s,
        )
        try:
            _, self._group = await asyncio.gather(
                self._client.join_broadcast(spec),
                asyncio.to_thread(
                    join_as_sglang_sender,
                    store,
                    name=spec.name,
                    world_size=spec.world_size,
                    backend=spec.backend,
                    timeout_s=timeout_s,
                ),
            )
        except RuntimeError as error:  # torch's DistStoreError is one
            raise EngineError(f"{name} did not meet its sender: {error}") from error
        self._spec = spec

    def _broadcast(self, batch: Batch) -> None:
        import torch
        import torch.distributed as dist

        dist.broadcast(torch.from_numpy(batch.data), 0, self._group)

    def _leave(self) -> None:
        import torch.distributed as dist

        group, self._group = self._group, None
        dist.destroy_process_group(group)
