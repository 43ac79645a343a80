"""The protocol of an engine: what its actor, the weights' way and the benchmarks ask of any kind.

    engine = make_engine(spec)                        kinds.py knows which class that is
    await engine.start()                              EngineInfo: its URL, for its clients
    strategy = engine.strategy(config)                one way to load a staged version
    await engine.client.pause(PauseMode.resubmit)     the calls of a commit: commit.py
    await strategy.load(7, folder)
    await engine.client.resume()
    await engine.stop()

Each kind has a folder of its own: an Engine, its EngineControl, its strategies.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from buffer.probes import Agreement, Probes
from configs.choices import PauseMode
from configs.rollout_schema import EngineConfig, RolloutConfig
from configs.schema import WeightSyncConfig
from processes.leftovers import list_path
from rollout_pool.sampling.engine_client import EngineClient, EngineError
from rollout_pool.types import AdapterSpec
from tensors.pictures import has_pictures


class TornEngine(EngineError):
    """The engine's weights or state are unknown: it must never decode again, only be restarted.

    The message names the engine and what failed.
    """


@dataclass(kw_only=True, slots=True, frozen=True)
class EngineSpec:
    name: str
    config: EngineConfig
    pause_mode: PauseMode
    model_path: str
    trust_remote_code: bool
    host: str
    log_path: Path
    leftovers_path: Path
    """List of what a killed server leaves, to be removed when this process has died."""
    num_threads: int
    """Torch threads of a server without a GPU."""
    uses_gpu: bool
    seed: int
    """Sampling seed; must differ between engines, or they would draw the same samples."""
    key: str = field(repr=False)
    context_length: int | None = None
    """Most tokens of a request with its completion; None: what the model's config says."""
    adapter: AdapterSpec | None = None
    """Its versions are committed; None: weights are."""
    has_pictures: bool = False
    """The model takes pictures."""


def engine_spec(
    name: str,
    rollout: RolloutConfig,
    run_dir: Path,
    *,
    model_path: str,
    trust_remote_code: bool,
    host: str,
    num_threads: int,
    uses_gpu: bool,
    key: str,
    seed: int = 0,
    pause_mode: PauseMode = PauseMode.resubmit,
    adapter: AdapterSpec | None = None,
) -> EngineSpec:
    """Describes an engine that serves `rollout`, with room for its longest trajectory, and keeps
    its log and the list of its leftovers in `run_dir`."""
    return EngineSpec(
        name=name,
        config=rollout.engine,
        pause_mode=pause_mode,
        model_path=model_path,
        trust_remote_code=trust_remote_code,
        host=host,
        log_path=run_dir / "logs" / f"{name}.log",
        leftovers_path=list_path(run_dir, name),
        num_threads=num_threads,
        uses_gpu=uses_gpu,
        seed=seed,
        key=key,
        context_length=rollout.longest_trajectory,
        adapter=adapter,
        has_pictures=has_pictures(model_path, trust_remote_code=trust_remote_code),
    )


@dataclass(kw_only=True, slots=True, frozen=True)
class EngineInfo:
    name: str
    url: str
    pid: int


class EngineControl(EngineClient, Protocol):
    """The connection of the process that owns an engine. Every call may raise EngineError.

    Implementation: SGLangClient (sglang/client.py).
    """

    async def responds(self, timeout_s: float) -> bool:
        """Returns whether the server responds at all; it may be loading weights or be paused."""
        ...

    async def num_kv_tokens(self) -> int:
        """Tokens that the KV cache has room for."""
        ...

    async def drain(self, limit_s: float) -> bool:
        """Waits until all requests have ended, and pauses the engine then: none is inside, and no
        cached prefix. Returns False if some still run after `limit_s`. For an engine that is sent
        no new ones; any that were on their way end first, too."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Stops decoding: running requests pause, or end if they are to be sent again; new ones
        wait outside."""
        ...

    async def resume(self) -> None: ...

    async def served_version(self) -> int: ...

    async def compare(self, probes: Probes) -> Agreement:
        """Compares the server with the trainer. Raises EngineError if it serves another version
        than that of `probes`; no commit may begin meanwhile."""
        ...

    async def weight_hashes(self, timeout_s: float) -> Mapping[str, Sequence[str]]:
        """Hashes of each parameter, one of each rank that has it. It decodes nothing meanwhile."""
        ...


class Strategy:
    """One way to load a staged version into an engine. New for each start of a server."""

    name: str
    """In records of commits."""
    pauses: bool = True
    """The engine must be paused for `load`."""

    async def check(self) -> None:
        """Raises ValueError, naming the setting and the fix, if it can't work with this server."""

    async def prepare(self, folder: Path) -> None:
        """Work that can be done while the engine still decodes. Raises EngineError."""

    async def load(self, version: int, folder: Path) -> None:
        """Load `folder`/model.safetensors into the engine. May raise anything; where it does not
        pause, the engine then serves on as before."""
        raise NotImplementedError

    async def close(self) -> None:
        """Free what is kept between commits."""


class Engine(Protocol):
    """Owns one server: its processes, their leftovers and its log. Used in one event loop.

    Implementation: SGLangEngine (sglang/engine.py).
    """

    spec: EngineSpec

    @property
    def info(self) -> EngineInfo: ...

    @property
    def client(self) -> EngineControl:
        """To the server that runs now; another after a restart. EngineError if there is none."""
        ...

    async def start(self) -> EngineInfo:
        """Starts the server on a free port and waits until it is ready.

        Raises EngineError with the end of its log if it dies or is not ready within
        `rollout.engine.start_timeout_s`.
        """
        ...

    async def restart(self) -> EngineInfo:
        """Ends what is left of the server and starts another one, at the same URL if there was
        one. Raises EngineError like `start`; it may be called again then."""
        ...

    async def wait_dead(self) -> int:
        """Returns the server's exit code once it has ended, also after `stop`."""
        ...

    async def stop(self, timeout_s: float = 10.0) -> None:
        """Ends the server and its processes, and removes what they left."""
        ...

    def strategy(self, config: WeightSyncConfig) -> Strategy:
        """The strategy of weight_sync.commit, for the server that runs now."""
        ...

    def log_tail(self) -> str: ...


def program_path() -> str:
    """PATH of a server: the programs of its own packages, such as ninja, stand beside Python."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
