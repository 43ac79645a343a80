"""`make tune`: changes live settings of a running job through its Redis."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from operator import attrgetter
from pwd import getpwuid
from socket import gethostname

from configs.checks import live_text
from configs.introspection import all_settings, setting_named
from controller.buffer_access import BufferAddress, impatient, opened, opened_state
from controller.metrics.history import TUNED
from controller.run_dir import RunDir, RunDirError

BY_ITS_ORDER = "the groups that the buffer holds are stored by it"
AT_THE_START = "the parts of the run read it once, when they start"
NO_SETTING = "there is no such setting"
EXAMPLE = 'make tune ARGS="buffer.max_staleness=1 rollout.oversampling=1.5"'
WHY_NOT = {"buffer.on_stale": BY_ITS_ORDER, "buffer.selector": BY_ITS_ORDER}
LIVE = {s.name.rpartition(".")[2]: s.name for s in all_settings() if s.is_live}
"""The live settings, by their name in Redis."""
CHOICES = ", ".join(LIVE.values())


def tune(run_dir: RunDir, overrides: Sequence[str]) -> None:
    """Changes settings (`rollout.tail=postpone`), all or none. Raises RunDirError or ValueError."""
    names = [override.partition("=")[0] for override in overrides]
    if not names:
        raise ValueError(f"name a setting, as {EXAMPLE}. What can be changed: {CHOICES}")
    for name in names:
        if name not in LIVE.values():
            why = WHY_NOT.get(name, AT_THE_START if setting_named(name) else NO_SETTING)
            raise ValueError(
                f"{name} cannot be changed in a running job: {why}. What can: {CHOICES}"
            )
    url = run_dir.read_redis_url()
    if url is None or not run_dir.read_record().is_alive:
        raise RunDirError(
            f"{run_dir.name} is not running, so there is nothing to tune; give the settings to "
            "`make resume`"
        )
    settings = run_dir.read_config().buffer
    address = BufferAddress(url=url, run=run_dir.name, settings=impatient(settings))
    asyncio.run(_tune(address, run_dir, overrides, dict.fromkeys(names)))


async def _tune(
    address: BufferAddress, run_dir: RunDir, overrides: Sequence[str], names: Mapping[str, None]
) -> None:
    async with opened_state(address) as state:
        held = await state.live_settings(LIVE)
    # They may differ from those of the launch.
    now = [f"{LIVE[name]}={text}" for name, text in held.items()]
    before, after = run_dir.read_config(now), run_dir.read_config([*now, *overrides])
    texts = {name: live_text(attrgetter(name)(after)) for name in names}
    async with opened(address) as buffer:
        await buffer.change_settings({n.rpartition(".")[2]: text for n, text in texts.items()})
    async with opened_state(address) as state:
        for name, text in texts.items():
            old = live_text(attrgetter(name)(before))
            change = {"setting": name, "before": old, "after": text, "who": _who()}
            await state.append_metrics(change, TUNED)
            print(f"{run_dir.name}: {name} {old} -> {text}")


def _who() -> str:
    """The user of this process and its machine, as the run's history names them."""
    try:
        user = getpwuid(os.getuid()).pw_name
    except KeyError:  # a container's user may have no name
        user = str(os.getuid())
    return f"{user}@{gethostname()}"
