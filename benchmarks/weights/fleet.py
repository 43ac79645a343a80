"""Part FLEET: real SGLang engines under load on a CPU, while versions come and are committed.

The measured engine, the first, has a core of its own; the other engine, the trainer, the receiver,
Redis and the clients share the rest. Its decoding rate is that of its steps (see `Pulse`).

- decode_while_moving: steps a second between the call of `send` and the moment when the version
  is visible (snapshot, encoding, wire, checksums; no engine commits yet), against the seconds of
  the same run in which nothing moves.
- pause_vs_bare_load: median pause of a commit with all requests in flight (stop, load, version,
  go on) against the median of /update_weights_from_disk alone, on an idle engine; the worse engine.
- standstill_vs_bare_load: the same without the time in which the requests decode a last token.
- max_rescoring_difference: of samples that cross a commit, each token's log-probability against
  Hugging Face's under the version that its span names.
- direct_*: the same with SGLang's own broadcast as the commit, which decodes nothing meanwhile.
"""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

import torch

from benchmarks import KEY
from benchmarks.engines import make_engine, random_qwen3
from benchmarks.report import Report
from benchmarks.team import Member
from benchmarks.weights.load import SHORT, FleetSize, Load, bare_loads, pin, worst_difference
from benchmarks.weights.model import SharedWeights, folder_in_memory, views_of
from benchmarks.weights.ours import receiver_in
from benchmarks.weights.sglang_broadcast import SGLangBroadcast
from benchmarks.weights.trainer import Moved, TrainerRank
from buffer.connect import connect_buffer
from buffer.redis.server import EmbeddedServer
from buffer.run_state import STREAM_START, RunState
from configs.schema import BufferConfig, WeightSyncConfig
from rollout_pool.engines.commit import Committer
from rollout_pool.engines.engine import Strategy
from rollout_pool.engines.follower import VersionPin, WeightFollower
from rollout_pool.engines.sglang.engine import SGLangEngine
from rollout_pool.engines.sglang.strategies import make_strategy
from tensors.layout import Layout, TensorSpec
from weight_sync.receiver.client import ReceiverClient

_RUN = "fleet"
_CALL_S = 30.0
_NUM_VARIANTS = 3
_MAX_RESCORED = 12
MEASURED = "engine-0"
MakeStrategy = Callable[[SGLangEngine, WeightSyncConfig], Strategy]


def measure(report: Report, *, is_short: bool) -> None:
    size = SHORT if is_short else FleetSize()
    torch.set_num_threads(1)  # this process, too, has to share a core
    with (
        tempfile.TemporaryDirectory(prefix="leash-bench-") as folder,
        folder_in_memory() as shared,
    ):
        models = Models(size, Path(folder) / "model", shared)
        millions = models.num_parameters / 1e6
        report.say(f"{size.num_engines} engines with {millions:.1f}M parameters of float32")
        asyncio.run(_measure(report, size, models, Path(folder), shared))


class Models:
    """Some sets of random weights of one model, in shared memory. 116M parameters at full size."""

    def __init__(self, size: FleetSize, path: Path, shared: Path) -> None:
        self.path = path
        self.variants: list[SharedWeights] = []
        for seed in range(_NUM_VARIANTS):
            self.model = random_qwen3(
                seed,
                vocab_size=size.vocab,
                hidden_size=size.hidden,
                intermediate_size=4 * size.hidden,
                num_hidden_layers=size.layers,
                num_attention_heads=size.hidden // 64,
                num_key_value_heads=max(1, size.hidden // 192),
                head_dim=64,
                max_position_embeddings=2048,
                initializer_range=0.05,  # no token is certain
            )
            if seed == 0:
                self.model.save_pretrained(path)
            tensors = dict(self.model.named_parameters())
            self.num_parameters = sum(tensor.numel() for tensor in tensors.values())
            layout = Layout.of(
                [
                    TensorSpec(name=name, dtype="float32", shape=tuple(tensor.shape))
                    for name, tensor in tensors.items()
                ],
                1,
            )
            weights = SharedWeights(path=shared / f"weights-{seed}", layout=layout)
            for spec, place in zip(layout.tensors, views_of(weights.open(), layout), strict=True):
                place.copy_(tensors[spec.name].detach())
            self.variants.append(weights)

    @property
    def layout(self) -> Layout:
        return self.variants[0].layout

    def tensors_of(self, version: int) -> dict[str, torch.Tensor]:
        weights = self.variants[version % len(self.variants)]
        views = views_of(weights.open(), weights.layout)
        return {spec.name: v for spec, v in zip(weights.layout.tensors, views, strict=True)}


@dataclass(slots=True)
class Publishes:
    """Measurements with one strategy."""

    moved: list[Moved] = field(default_factory=list)
    quiet: list[tuple[float, float]] = field(default_factory=list)
    whole: list[tuple[float, float]] = field(default_factory=list)
    """Spans from the call of `send` until both engines decode again, after they have computed
    anew what their running requests hold."""
    pauses: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    loads: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """The part of each pause in which the engine loads."""
    stops: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """The part of each pause in which requests decode their last token."""

    @property
    def moving(self) -> list[tuple[float, float]]:
        return [(each.began, each.visible) for each in self.moved]


def _staged(engine: SGLangEngine, config: WeightSyncConfig) -> Strategy:
    return make_strategy(engine.client, config, tp_size=1)


async def _measure(
    report: Report, size: FleetSize, models: Models, folder: Path, shared: Path
) -> None:
    async with Fleet.open(size.num_engines, models, folder, shared) as fleet:
        async with fleet.following(_staged):
            await fleet.publish()
            await fleet.all_serve()
            report.say("bare loads")
            bare = await fleet.bare_loads(size.num_bare_loads)
            loads = {name: Load(engine, size) for name, engine in fleet.engines.items()}
            report.say("load")
            await asyncio.gather(*(load.start() for load in loads.values()))
            report.say(f"{size.num_publishes} publishes, staged")
            staged = await fleet.publishes(loads, size.num_publishes, size.undisturbed_s)
        async with fleet.following(SGLangBroadcast):
            report.say(f"{size.num_publishes // 2} publishes, direct")
            direct = await fleet.publishes(loads, size.num_publishes // 2, size.undisturbed_s)
        await asyncio.gather(*(load.stop() for load in loads.values()))
    _tell_decoding(report, loads, staged, direct)
    _tell_pauses(report, bare, staged, direct)
    report.say("re-scoring")
    crossing = [
        sample
        for load in loads.values()
        for sample in load.samples
        if len(sample.version_spans) > 1
    ]
    if not crossing:
        raise RuntimeError("no sample crossed a commit: there is nothing to re-score")
    rescored = random.Random(0).sample(crossing, min(len(crossing), _MAX_RESCORED))
    report.target(
        "max_rescoring_difference",
        worst_difference(models.model, models.tensors_of, rescored),
        "<=",
        1e-3,
        f"of the log-probabilities of {len(rescored)} of {len(crossing)} samples that cross a "
        "commit, on both sides of it",
    )


def _tell_decoding(
    report: Report, loads: dict[str, Load], staged: Publishes, direct: Publishes
) -> None:
    pulse = loads[MEASURED].pulse
    quiet, moving = pulse.per_second(staged.quiet), pulse.per_second(staged.moving)
    report.target(
        "decode_while_moving",
        moving / quiet,
        ">=",
        0.85,
        f"of {quiet * loads[MEASURED].num_running:.0f} undisturbed tokens/s, on its own core, in "
        f"{sum(b - a for a, b in staged.moving):.1f} s of moving bytes",
    )
    whole, whole_direct = pulse.per_second(staged.whole), pulse.per_second(direct.whole)
    report.figure(
        "decode_in_publish", whole / quiet, "the same from publish until both engines decode again"
    )
    report.figure(
        "direct_decode_in_publish",
        whole_direct / pulse.per_second(direct.quiet),
        "the same with SGLang's own broadcast",
    )
    for name in list(loads)[1:]:
        other = loads[name].pulse
        report.row(
            f"{name}, which shares its core with the transfer",
            f"{other.per_second(staged.moving) / other.per_second(staged.quiet):.2f} while moving",
        )


def _tell_pauses(
    report: Report, bare: dict[str, list[float]], staged: Publishes, direct: Publishes
) -> None:
    def worst(publishes: Publishes) -> float:
        return max(median(publishes.pauses[n]) / median(bare[n]) for n in bare)

    for name in bare:
        report.row(
            f"{name}: bare load; pause staged, of it stop, load; pause direct, median ms",
            f"{1e3 * median(bare[name]):.0f}; {1e3 * median(staged.pauses[name]):.0f}, "
            f"{1e3 * median(staged.stops[name]):.0f}, {1e3 * median(staged.loads[name]):.0f}; "
            f"{1e3 * median(direct.pauses[name]):.0f}",
        )
    report.target(
        "pause_vs_bare_load",
        worst(staged),
        "<=",
        1.5,
        "times /update_weights_from_disk alone and idle; worse engine",
    )
    still = {
        name: [pause - stop for pause, stop in zip(pauses, staged.stops[name], strict=True)]
        for name, pauses in staged.pauses.items()
    }
    report.target(
        "standstill_vs_bare_load",
        max(median(still[name]) / median(bare[name]) for name in bare),
        "<=",
        1.3,
        "the same without the steps in which the requests decode their last tokens",
    )
    report.figure("direct_pause_vs_bare_load", worst(direct), "the same, SGLang's own broadcast")


class Fleet:
    """Everything that a version passes on its way to the engines."""

    def __init__(
        self,
        engines: dict[str, SGLangEngine],
        state: RunState,
        client: ReceiverClient,
        trainer: Member,
    ) -> None:
        self.engines = engines
        self._state, self._client, self._trainer = state, client, trainer
        self._followers: list[asyncio.Task[None]] = []
        self._version = -1
        self._read_to = STREAM_START

    @classmethod
    @asynccontextmanager
    async def open(
        cls, num_engines: int, models: Models, folder: Path, shared: Path
    ) -> AsyncIterator[Fleet]:
        async with AsyncExitStack() as stack:
            settings, config = BufferConfig(), WeightSyncConfig()
            redis = EmbeddedServer.start(folder, settings, "127.0.0.1", folder / "redis.log")
            stack.callback(redis.stop, timeout_s=10)
            buffer = await connect_buffer(redis.url, _RUN, settings)
            await buffer.open(settings, 4)
            await buffer.close()
            state = await RunState.connect(redis.url, _RUN, settings)
            stack.push_async_callback(state.close)
            engines = {}
            for number in range(num_engines):
                engine = make_engine(f"engine-{number}", models.path, folder)
                engines[engine.spec.name] = engine
                stack.push_async_callback(engine.stop)
            receiver = receiver_in(shared, "receiver", config)
            stack.push_async_callback(receiver.stop)
            files = [each.path for each in models.variants]
            trainer = Member(partial(TrainerRank, redis.url, _RUN, config, models.layout, files))
            stack.callback(trainer.close)
            await asyncio.gather(receiver.start(), *(each.start() for each in engines.values()))
            await asyncio.to_thread(trainer.result)
            _give_cores([each.info.pid for each in engines.values()])
            await state.register_receiver(receiver.spec.name, receiver.url)
            client = ReceiverClient(receiver.spec.name, receiver.url, KEY)
            stack.push_async_callback(client.close)
            try:
                yield cls(engines, state, client, trainer)
            except BaseException as error:
                for engine in engines.values():
                    error.add_note(f"{engine.spec.name}: {engine.log_tail()}")
                raise

    @asynccontextmanager
    async def following(self, make: MakeStrategy) -> AsyncIterator[None]:
        """Both engines take every version by this strategy inside the block."""
        config = WeightSyncConfig()
        async with AsyncExitStack() as stack:
            for name, engine in self.engines.items():
                made = make(engine, config)
                await made.check()
                committer = Committer(engine.client, made, config.pause_mode)
                stack.push_async_callback(made.close)
                follower = WeightFollower(
                    engine=name,
                    host="127.0.0.1",
                    key=KEY,
                    config=config,
                    state=self._state,
                    committer=committer,
                    responds=engine.client.responds,
                    pin=VersionPin(),
                    read_back=None,
                )
                stack.push_async_callback(follower.forget_receiver)
                task = asyncio.create_task(follower.run())
                stack.push_async_callback(_end, task)
                self._followers.append(task)
            yield
            self._followers.clear()

    async def publish(self) -> Moved:
        """Returns when the engines that have served before serve a new version."""
        self._version += 1
        self._trainer.begin(self._version)
        publishing = asyncio.create_task(asyncio.to_thread(self._trainer.result))
        await asyncio.wait({publishing, *self._followers}, return_when=asyncio.FIRST_COMPLETED)
        for task in self._followers:
            if task.done():
                task.result()  # raises what ended it
        _, moved = await publishing
        assert isinstance(moved, Moved)
        return moved

    async def all_serve(self) -> None:
        """The newest version; until an engine's first commit nobody else waits for it."""
        async with asyncio.timeout(_CALL_S):
            served = await self._state.engine_versions()
            while served != dict.fromkeys(self.engines, self._version):
                served = await self._state.wait_engines_changed(served, _CALL_S)

    async def publishes(
        self, loads: dict[str, Load], number: int, undisturbed_s: float
    ) -> Publishes:
        """Publishes with quiet times between them; the first one warms up."""

        async def all_steady() -> None:
            await self.all_serve()
            for load in loads.values():
                load.note_version(self._version)
            await asyncio.gather(*(load.steady() for load in loads.values()))

        measured = Publishes()
        await self.publish()
        await all_steady()
        for _ in range(number):
            quiet_from = time.perf_counter()
            await asyncio.sleep(undisturbed_s)
            measured.quiet.append((quiet_from, time.perf_counter()))
            moved = await self.publish()
            await all_steady()
            measured.moved.append(moved)
            measured.whole.append((moved.began, time.perf_counter()))
            for record in await self._commits_of(moved.version):
                name = str(record["engine"])
                measured.pauses[name].append(float(record["pause_s"]))
                measured.loads[name].append(float(record["load_s"]))
                measured.stops[name].append(float(record["stop_s"]))
        return measured

    async def _commits_of(self, version: int) -> list[dict[str, float | int | str]]:
        """The commit of each engine."""
        found: list[dict[str, float | int | str]] = []
        while len(found) < len(self.engines):
            entries = await self._state.read_metrics(self._read_to, _CALL_S)
            assert entries, f"version {version}: only {found}"
            self._read_to = entries[-1].id
            found += [
                e.record for e in entries if e.kind == "commit" and e.record["version"] == version
            ]
        return found

    async def bare_loads(self, number: int) -> dict[str, list[float]]:
        staged = await self._client.newest(-1, timeout_s=_CALL_S)
        assert staged is not None
        return {
            name: await bare_loads(engine, staged.path, staged.version, number)
            for name, engine in self.engines.items()
        }


def _give_cores(engines: Sequence[int]) -> None:
    """Each engine gets a core; all else that runs now or starts later has to leave the first."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise RuntimeError("the measured engine needs a core of its own: this machine has one")
    pin(os.getpid(), cores[1:])
    for pid, core in zip(engines, cores, strict=False):
        pin(pid, [core])


async def _end(task: asyncio.Task[None]) -> None:
    if task.done():
        task.result()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
