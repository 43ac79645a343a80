"""`make tune` and `buffer.autotune`: change live settings of a running job through its Redis."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pwd import getpwuid
from socket import gethostname

from buffer.replay_buffer import CAPACITIES
from buffer.results import BufferStats
from configs.checks import Rule, live_text
from configs.choices import OnStale
from configs.introspection import live_settings, setting_named
from configs.load import unknown_setting
from configs.run_files import Scalar
from configs.schema import Config
from controller.buffer_access import BufferAddress, impatient, live_texts, opened, opened_state
from controller.metrics.history import TUNED, read_metrics, series
from controller.run_dir import RunDir, RunDirError
from controller.start.plan import FLOAT32_DIFF, max_logprob_diff
from controller.watch.autotune import ENGINES, WHO, find_move
from controller.watch.remarks import bytes_in_use
from controller.watch.run_view import RunView
from controller.watch.verdict import wanted_engines
from processes.pending import in_thread

BY_ITS_ORDER = "the groups that the buffer holds are stored by it"
AT_THE_START = "the parts of the run read it once, when they start"
EXAMPLE = 'make tune ARGS="buffer.max_staleness=1 rollout.oversampling=1.5"'
WHY_NOT = {"buffer.selector": BY_ITS_ORDER}
LIVE = live_settings()
LARGEST_GROUP = 4
"""A group may take so many times the bytes of those that the buffer holds."""
RESTART = "or end the run and resume it with the value (make stop, make resume)"
ASK_AGAIN_S, ANSWER_S = 30.0, 5.0
"""Ray is asked for room so long after it had none, and has so long for its answer."""
CHOICES = ", ".join(LIVE.values())
TRIES = 10
"""So often others may be quicker with a change before one is given up."""


def tune(run_dir: RunDir, overrides: Sequence[str]) -> None:
    """Changes settings (`rollout.tail=postpone`), all or none. Raises RunDirError or ValueError."""
    names = [override.partition("=")[0] for override in overrides]
    if not names:
        raise ValueError(f"name a setting, as {EXAMPLE}. What can be changed: {CHOICES}")
    for name in names:
        if not setting_named(name):
            raise ValueError(f"{name}: {unknown_setting(name)}")
        if name not in LIVE.values():
            why = WHY_NOT.get(name, AT_THE_START)
            raise ValueError(
                f"{name} cannot be changed in a running job: {why}. What can: {CHOICES}"
            )
    url, is_running = run_dir.read_redis_url(), run_dir.read_record().is_running
    if url is None or not is_running:
        over = "is not running, so there is nothing to tune; give the settings to `make resume`"
        starting = "is starting; its Redis is not up yet: try again soon"
        raise RunDirError(f"{run_dir.name} {starting if is_running else over}")
    settings = run_dir.read_config().buffer
    address = BufferAddress(url=url, run=run_dir.name, settings=impatient(settings))
    for one in asyncio.run(change(address, run_dir, overrides, {"who": _who()})):
        print(f"{run_dir.name}: {one['setting']} {one['before']} -> {one['after']}")


async def change(
    address: BufferAddress,
    run_dir: RunDir,
    overrides: Sequence[str],
    said: Mapping[str, Scalar],
    expected: Mapping[str, str] | None = None,
) -> list[dict[str, Scalar]]:
    """Changes these settings, all or none, and returns their records, in which `said` is who did it
    and why; none if settings are no longer as `expected`. Raises ValueError if the run would not be
    legal with them."""
    names = dict.fromkeys(override.partition("=")[0] for override in overrides)
    # Of a capacity shards hold parts, which after a change that broke off are none of any sum.
    compared = {*LIVE} - {*CAPACITIES} if address.settings.shards > 1 else {*LIVE}
    for _ in range(TRIES):
        async with opened(address) as buffer:
            stats = await buffer.stats()
        held = await live_texts(address, stats)
        # They may differ from those of the launch.
        now = [f"{LIVE[name]}={text}" for name, text in held.items()]
        # Half a second of work, which the loop of a controller has not.
        before, after = await asyncio.to_thread(_checked, run_dir, now, overrides, stats)
        texts = {name: live_text(attrgetter(name)(after)) for name in names}
        async with opened(address) as buffer:
            new = {name.rpartition(".")[2]: text for name, text in texts.items()}
            seen = {name: text for name, text in held.items() if name in compared}
            if await buffer.change_settings(new, {**seen, **(expected or {})}):
                break
        if expected is not None:
            return []
        # Somebody else was quicker: the settings that were checked have changed.
    else:
        raise ValueError(
            f"{address.run}: its live settings were changed by others {TRIES} times meanwhile, and "
            "nothing was changed here; try again when they are done"
        )
    # What a call that broke off has changed already is not what was there before.
    was = {name: live_text(attrgetter(name)(before)) for name in names}
    was |= {name: (expected or {}).get(name.rpartition(".")[2], was[name]) for name in names}
    records: list[dict[str, Scalar]] = [
        {"setting": name, "before": was[name], "after": text, **said}
        for name, text in texts.items()
    ]
    async with opened_state(address) as state:
        for record in records:
            await state.append_metrics(record, TUNED)
    return records


@dataclass(eq=False)
class Autotuner:
    """Makes the changes of `buffer.autotune`; `look` is awaited after each sample of the buffer."""

    address: BufferAddress
    run_dir: RunDir
    say: Callable[[str], None]
    count_places: Callable[[], int]
    """How many more engines Ray has room for now; it asks Ray."""

    def __post_init__(self) -> None:
        self._num_expected = 0
        """Changes that the run's history has once it has the last one of this class."""
        self._refused_at = -math.inf
        self._asks_at = -math.inf
        """When Ray may be asked for room again."""
        self._num_free: int | None = None
        self._has_said_full = False
        """It has said that Ray has no free place for an engine."""
        self._unmade: tuple[str, dict[str, Scalar], dict[str, str]] | None = None
        """A change that broke off: some shards may have it, and no record may say so."""

    async def look(self, view: RunView) -> None:
        num_changes = len(view.changes)
        if num_changes < self._num_expected or view.changed_at <= self._refused_at:
            return
        try:
            if self._unmade is None:
                if isinstance(move := find_move(view, wanted_engines), str):
                    return
                if move.setting == ENGINES and move.after > move.before:
                    num_free = await self._places(view.now)
                    if num_free is None:
                        return
                    if num_free == 0 and not self._has_said_full:
                        self.say(
                            "buffer.autotune: Ray has no free place for "
                            f"{move.setting}={move.after}; add a machine, or lower max_engines"
                        )
                    self._has_said_full = not num_free
                    if isinstance(move := find_move(view, wanted_engines, num_free), str):
                        return
                # `make tune` may have changed it since.
                expected = {move.setting.rpartition(".")[2]: str(move.before)}
                change_to = f"{move.setting}={move.after}"
                self._unmade = change_to, {"who": WHO, **move.said}, expected
            override, said, expected = self._unmade
            if await change(self.address, self.run_dir, [override], said, expected):
                self._num_expected = num_changes + 1
            self._unmade = None
        except ConnectionError:
            pass  # other parts of the run name it; once Redis answers again, it is sent again
        except Exception as error:  # it must not end the run
            self._refused_at, self._unmade = view.changed_at, None
            self.say(f"buffer.autotune stops until something else changes, or `make tune`: {error}")

    async def _places(self, now: float) -> int | None:
        """None: Ray did not answer lately, and will be asked again."""
        if now < self._asks_at:
            return self._num_free
        self._asks_at, self._num_free = now + ASK_AGAIN_S, None
        try:
            async with asyncio.timeout(ANSWER_S):
                self._num_free = await in_thread(self.count_places)
        except Exception:  # the sampling of the run, which awaits this, goes on
            return None
        if self._num_free:
            self._asks_at = now
        return self._num_free


def _checked(
    run_dir: RunDir, now: Sequence[str], overrides: Sequence[str], stats: BufferStats
) -> tuple[Config, Config]:
    """All settings before and after. Raises ValueError if the run would not be legal with them."""
    before, after = run_dir.read_config(now), run_dir.read_config([*now, *overrides])
    after.enforce(_rules(run_dir, before, after, stats))
    return before, after


def _rules(run_dir: RunDir, before: Config, after: Config, stats: BufferStats) -> Iterator[Rule]:
    """Rules of a running job, which its files need not keep."""
    yield from after.starting_rules()
    masks = {one.buffer.on_stale is OnStale.mask_tokens for one in (before, after)}
    fix = f"{BY_ITS_ORDER} if it is or was mask_tokens; choose among requeue, drop and wait"
    yield Rule(len(masks) == 1, "buffer.on_stale", fix)
    cooler = after.rollout.sampling.temperature < before.rollout.sampling.temperature
    if cooler:
        steps = read_metrics(run_dir.metrics, "step")
        # In force until the trainer starts again; before the first step that of a GPU is assumed.
        usual = max_logprob_diff(run_dir.read_config(), uses_gpu=True)
        bound = (series(steps, "logprob_diff_bound") or [usual])[-1]
        yield Rule(
            max_logprob_diff(after, uses_gpu=bound != FLOAT32_DIFF) <= bound,
            "rollout.sampling.temperature",
            "it multiplies by what rounding lets engines and trainer differ, and the trainer ends "
            f"the run at {bound:g} nats, as its launch has set; choose a higher one, {RESTART}",
        )
    replays = after.rollout.engine.routing_replay
    yield Rule(
        not replays or after.rollout.group_size <= before.rollout.group_size,
        "rollout.group_size",
        "with rollout.engine.routing_replay=true the start checks the memory of a group's experts; "
        f"choose at most {before.rollout.group_size}, {RESTART}",
    )
    held, capacity = stats.ready + stats.leased, after.buffer.capacity_bytes
    growth = after.rollout.group_size / before.rollout.group_size
    is_less = (before.buffer.capacity_bytes or math.inf) > (capacity or math.inf)
    if capacity is not None and (is_less or growth > 1):
        fix = "the buffer holds no group now by which to judge it; try again when it does"
        yield Rule(held > 0, "buffer.capacity_bytes", fix)
        # Each shard has its part, and a group that exceeds it would end the run.
        most = max(after.trainer.groups_per_version, LARGEST_GROUP * after.buffer.shards)
        least = math.ceil(bytes_in_use(stats) / held * max(1, growth) * most)
        fix = "the groups of one update, or a large one in its shard, would not fit; set at least "
        yield Rule(capacity >= least, "buffer.capacity_bytes", f"{fix}{least}, or null")


def _who() -> str:
    """The user of this process and its machine, as the run's history names them."""
    try:
        user = getpwuid(os.getuid()).pw_name
    except KeyError:  # a container's user may have no name
        user = str(os.getuid())
    return f"{user}@{gethostname()}"
