"""The users of deploy/redis/: what each role's code does is allowed, and nothing else."""

from __future__ import annotations

import asyncio
import re
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from redis import Redis as BlockingRedis
from redis.asyncio import Redis

from buffer.connect import Buffer, buffer_on
from buffer.dump.export import dump_buffer
from buffer.probes import Probes
from buffer.redis.client import NotAllowedError
from buffer.redis.connection import connect
from buffer.redis.scripts import script_names, source
from buffer.redis.server import EmbeddedServer, find_binary
from buffer.replay_buffer import ReplayBuffer
from buffer.results import Failure
from buffer.run_state import RunState
from buffer.types import PromptRef, Rerun
from configs.schema import BufferConfig
from tests.support.buffer.groups import lease_batch, make_group, next_retry
from tests.support.invariants import find_violations

HOST, RUN = "127.0.0.1", "acl"
FOLDER = Path(__file__).parents[2] / "deploy" / "redis"
CONNECT = ["ping", "info", "cluster|slots", "evalsha"]


def _scripts(*folders: str, others: str) -> list[str]:
    """All of these folders, and some beside them."""
    own = [name for name in script_names() if name.split("/")[0] in folders]
    return own + others.split()


SCRIPTS = {
    "rollout": _scripts(
        "rollout",
        others="run_state/add_numbers run_state/append_metrics run_state/register_receiver "
        "run_state/forget_receiver run_state/enter_commit run_state/leave_commit "
        "run_state/other_weights run_state/drain_engine run_state/record_commits "
        "run_state/forget_engine",
    ),
    "trainer": _scripts(
        "trainer",
        "shards",
        others="run_state/record_staged run_state/mark_available run_state/leave_probes "
        "run_state/add_numbers run_state/append_metrics inspect/read_stats inspect/list_prompts",
    ),
    "controller": list(script_names()),
}
# What the clients send themselves, besides scripts.
LOADS = {"controller": ["script|load"]}
SENT = {
    "rollout": "get hget hgetall hmget hset set wait waitaof xread xrevrange",
    "trainer": "exec get hget hgetall hmget hset mget multi set xread xrevrange zmscore zrange",
    "controller": "exec get hget hgetall hmget hset hsetnx mget multi set wait waitaof xread "
    "xrevrange zrange",
}


def _granted(role: str) -> set[str]:
    lines = (FOLDER / f"{role}.acl").read_text().splitlines()
    rules = " ".join(line for line in lines if not line.startswith("#")).split()
    return {rule[1:] for rule in rules if rule.startswith("+")}


@pytest.mark.parametrize("role", sorted(SCRIPTS))
def test_role_is_granted_just_what_its_code_uses(role: str) -> None:
    call = re.compile(r"(?:redis\.p?call|call_many)\(\s*'([A-Z]+)'")
    used = {name.lower() for script in SCRIPTS[role] for name in call.findall(source(script))}
    assert _granted(role) == used | {*SENT[role].split(), *CONNECT, *LOADS.get(role, ())}


@pytest.fixture
def urls(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A server with these users; a URL for each of them and for its admin."""
    admin = tmp_path / "admin"
    admin.write_text("admin-password")
    made = subprocess.run(
        [FOLDER / "make-users.sh", "--admin", admin, *_for_its_version()],
        check=True,
        capture_output=True,
        text=True,
    )
    password = "password-of-the-default-user"  # the server is asked with it whether it is ready
    acl = made.stdout.replace("user default off", f"user default on >{password} ~* &* +@all")
    (tmp_path / "users.acl").write_text(acl)
    server = EmbeddedServer.start(
        tmp_path / "redis",
        BufferConfig(),
        HOST,
        tmp_path / "log",
        password=password,
        extra={"aclfile": str(tmp_path / "users.acl")},
    )
    where = f"{HOST}:{urlsplit(server.url).port}"
    users = dict(line.split() for line in made.stderr.splitlines())
    users["admin"] = "admin-password"
    with BlockingRedis.from_url(f"redis://admin:admin-password@{where}") as client:
        client.execute_command("ACL SETUSER default off")
    yield {
        user.removeprefix("leash-"): f"redis://{user}:{secret}@{where}/0"
        for user, secret in users.items()
    }
    server.stop(timeout_s=60)


def _for_its_version() -> list[str]:
    run = subprocess.run([find_binary(), "--version"], check=True, capture_output=True, text=True)
    return ["--redis-7.0"] if "v=7.0" in run.stdout else []


Opener = Callable[[str], Awaitable[Buffer]]


@pytest.fixture(params=[1, 2])
def shards(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
async def open_as(urls: dict[str, str], shards: int) -> AsyncIterator[Opener]:
    opened: list[Buffer] = []

    async def make(role: str) -> Buffer:
        buffer = buffer_on(await connect(urls[role]), RUN, BufferConfig(shards=shards))
        opened.append(buffer)
        return buffer

    yield make
    for buffer in opened:
        await buffer.close()


async def _push(rollout: Buffer, name: str, version: int) -> str:
    credit = await rollout.admit(name, 5)
    await rollout.renew_credits([credit.group_id])
    await rollout.push(make_group(credit.group_id, version), 5)
    return credit.group_id


async def test_each_role_can_do_its_work(
    urls: dict[str, str], shards: int, open_as: Opener, tmp_path: Path
) -> None:
    controller, rollout = await open_as("controller"), await open_as("rollout")
    trainer, watcher = await open_as("trainer"), await open_as("watcher")
    await controller.open(BufferConfig(shards=shards, capacity_groups=8, max_attempts=2), 4)
    states = {
        role: RunState(await connect(urls[role]), RUN, shards=shards)
        for role in ("rollout", "trainer", "controller", "watcher")
    }

    await trainer.reconcile("lineage", step=0, version=0, resume_version=0)
    await trainer.announce_version(0)
    for index in range(4):
        await _push(rollout, f"group-{index}", 0)
    stopped = await rollout.admit("stopped", 5)
    await rollout.abandon(
        stopped.group_id, "stale", Rerun.as_stale, PromptRef(task="sums", index=1)
    )
    assert await next_retry(rollout) is not None
    for name, end in (
        ("9-lost", rollout.reclaim(9)),
        ("9-of-the-run-before", controller.reclaim(9, counts_as_death=False)),
        ("9-failed", None),
    ):
        credit = await rollout.admit(name, 5)
        assert await rollout.begin(credit.group_id, PromptRef(task="sums", index=2), 0, 5)
        if end is None:
            failure = await rollout.fail(credit.group_id, PromptRef(task="sums", index=2), 1)
            assert failure == Failure(num_failures=1, is_quarantined=True)
        else:
            assert await end == 1
    retry = await rollout.admit("9-again", 5)
    prompt = PromptRef(task="sums", index=3)
    await rollout.begin(retry.group_id, prompt, 0, 5)
    assert await rollout.keep_tokens(retry.group_id, 0, {"0.0.0": b"tokens"})
    assert await rollout.kept_tokens(retry.group_id, prompt) == {"0.0.0": b"tokens"}
    assert (await rollout.get_leash()).max_staleness == 2
    await rollout.abandon(retry.group_id, "stopped")
    assert len(await watcher.quarantined_prompts()) == 1
    assert await controller.release_prompt("sums", 2)
    assert (await rollout.get_leash()).max_staleness == 2
    await states["rollout"].add_wait("rollout", "trainer", 1.0)
    await states["rollout"].count("tokens_generated", 8)
    assert await states["rollout"].task_positions() == {0: 5}

    async def lease(step: int, version: int, number: int) -> frozenset[str]:
        batch = await lease_batch(trainer, step, number, version=version, timeout_s=60)
        assert await trainer.renew(batch) == number
        if step == 1:
            await trainer.nack(batch, "test")
            return await lease(step + 1, version, number)
        kept = await trainer.validate(batch, version)
        assert await trainer.consume(batch, kept) == number
        return kept

    assert len(await lease(1, 0, 4)) == 4
    await trainer.announce_version(1)
    await states["rollout"].register_receiver("receiver-0", "http://127.0.0.1:1")
    await states["rollout"].register_receiver("receiver-1", "http://127.0.0.1:2")
    await states["rollout"].forget_receiver("receiver-1")
    assert list(await states["trainer"].receivers()) == ["receiver-0"]
    await states["trainer"].record_staged("receiver-0", 1)
    await states["trainer"].mark_available(1)
    assert await states["rollout"].available_version() == 1
    assert await states["rollout"].enter_commit("engine-0", 1, 60, 5)
    await states["rollout"].drain_engine("engine-0")
    await states["rollout"].record_commits({"engine-0": 1})
    await states["rollout"].record_commits({"engine-1": 1})
    await states["rollout"].append_metrics({"pause_s": 0.1}, "commit")
    await states["rollout"].leave_commit("engine-0")
    assert not await states["rollout"].other_weights(1, "engine-0", "digest")
    probes = Probes(version=1, text=[5] * 9, logprobs=[[-1.0] * 8], most=0.1)
    await states["trainer"].leave_probes(probes)
    assert await states["rollout"].probes(1) == probes
    await states["rollout"].forget_engine("engine-1")
    assert await states["trainer"].wait_engines_at(1, 60) == {"engine-0": 1}
    await states["trainer"].append_metrics({"loss": 1.0}, "step")
    await states["trainer"].set_phase("training")
    assert await trainer.ack(2, "lineage") == 4
    assert await states["rollout"].wait_version_above(0, 5) == 1

    kept = await _push(rollout, "kept", 1)
    assert await rollout.flush(timeout_s=60)
    await controller.change_settings({"max_staleness": "3", "tail": "postpone"})
    names, before = ("max_staleness", "tail"), dict[str, str]()
    changed = await states["rollout"].wait_settings_changed(names, before, 5)
    assert changed == {"max_staleness": "3", "tail": "postpone"}
    assert await controller.sweep() == 0
    admin = ReplayBuffer(await connect(urls["admin"]), RUN, BufferConfig())
    assert await find_violations(admin) == []
    await admin.close()
    assert not await controller.release("unknown") and not await controller.discard("unknown")
    for role in ("controller", "watcher"):
        redis = await connect(urls[role])
        assert (await dump_buffer(redis, RUN, tmp_path / role)).groups == {"ready": 1}
        await redis.aclose()

    assert (await watcher.stats()).ready == 1
    assert (await watcher.stats()).by_staleness == {0: 1}
    assert await watcher.quarantined() == []
    events = [event.event for event in await watcher.events(kept)]
    assert [event for event in events if event != "begun"][:2] == ["admitted", "pushed"]
    assert len(await states["watcher"].read_metrics("0-0", 0)) == 2
    assert await states["watcher"].staged_versions() == {"receiver-0": 1}
    assert await states["watcher"].engine_versions() == {"engine-0": 1}
    assert await states["watcher"].phase() == "training"
    assert await states["watcher"].waits() == {("rollout", "trainer"): 1.0}

    # A checkpoint, and a resumed run with another leash.
    progress = await trainer.task_progress(2)
    assert progress.positions == {0: 5} and 0 in {p.index for p in progress.untrained}
    settings = BufferConfig(shards=shards, capacity_groups=8, max_staleness=4)
    await controller.open(settings, 4, replaced=names)
    assert await states["controller"].live_settings(names) == {"max_staleness": "4"}
    await controller.restore_progress(progress)
    await states["controller"].forget_fleet()
    assert await states["rollout"].engine_versions() == {}
    for state in states.values():
        await state.close()


@pytest.mark.parametrize("role", ["rollout", "trainer", "controller", "watcher"])
async def test_no_role_may_touch_the_server_or_other_keys(urls: dict[str, str], role: str) -> None:
    redis: Redis = await connect(urls[role])
    for command in (
        ("FLUSHALL",),
        ("FLUSHDB",),
        ("KEYS", "*"),
        ("CONFIG", "SET", "maxmemory", "1"),
        ("CONFIG", "GET", "*"),
        ("SHUTDOWN",),
        ("CLUSTER", "RESET"),
        ("ACL", "LIST"),
        ("CLIENT", "KILL", "ID", "1"),
        ("SCRIPT", "FLUSH"),
        ("REPLICAOF", "NO", "ONE"),
        ("MONITOR",),
        ("GET", "somebody-elses"),
        ("GET", "leash:no-tag"),
        ("HGETALL", "{other:run}:settings"),
        ("PUBLISH", "channel", "message"),
        ("EVAL", "while true do end", "0"),
        ("FUNCTION", "LOAD", "#!lua name=evil"),
    ):
        with pytest.raises(NotAllowedError):
            await redis.execute_command(*command)
    for text in ("return redis.call('DBSIZE')", "return redis.call('GET', 'somebody-elses')"):
        if role != "controller":
            with pytest.raises(NotAllowedError):  # a loop without end stops the server for all
                await redis.script_load(text)
            continue
        with pytest.raises(NotAllowedError):
            await redis.evalsha(await redis.script_load(text), 1, "{leash:acl}")
    await redis.aclose()


async def test_role_that_may_load_no_scripts_waits_for_the_controller(
    urls: dict[str, str],
) -> None:
    controller = ReplayBuffer(await connect(urls["controller"]), RUN, BufferConfig())
    watcher = ReplayBuffer(await connect(urls["watcher"], try_for_s=60), RUN, BufferConfig())
    await controller.open(BufferConfig(), 4)
    assert (await watcher.stats()).ready == 0
    with BlockingRedis.from_url(urls["admin"]) as admin:
        admin.script_flush()  # as a server that was started again
    waits = asyncio.create_task(watcher.stats())
    await asyncio.sleep(0)
    await controller.sweep()  # as the controller does all the time
    assert (await waits).ready == 0
    late = ReplayBuffer(await connect(urls["rollout"], try_for_s=0), RUN, BufferConfig())
    with BlockingRedis.from_url(urls["admin"]) as admin:
        admin.script_flush()
    with pytest.raises(NotAllowedError, match="the controller of run 'acl'"):
        await late.admit("group", 1)
    for buffer in (controller, watcher, late):
        await buffer.close()


async def test_users_of_a_team_see_no_run_of_another(urls: dict[str, str]) -> None:
    made = subprocess.run(
        [FOLDER / "make-users.sh", "--team", "night", *_for_its_version()],
        check=True,
        capture_output=True,
        text=True,
    )
    where = urls["admin"].rpartition("@")[2]
    with BlockingRedis.from_url(urls["admin"]) as admin:
        for line in made.stdout.splitlines():
            admin.execute_command("ACL", "SETUSER", *line.split()[1:])
    passwords = dict(line.split() for line in made.stderr.splitlines())
    assert sorted(passwords) == [f"night-{role}" for role in sorted([*SCRIPTS, "watcher"])]
    for user, password in passwords.items():
        redis: Redis = await connect(f"redis://{user}:{password}@{where}")
        await redis.hgetall("{leash:night-1}:settings")
        for foreign in (
            "{leash:day-1}:settings",
            "{leash:nightly-1}:settings",
            "{leash:night}:settings",
        ):
            with pytest.raises(NotAllowedError):
                await redis.hgetall(foreign)
        await redis.aclose()
    refused = subprocess.run(
        [FOLDER / "make-users.sh", "--team", "a-b"], capture_output=True, text=True
    )
    assert refused.returncode == 2 and "--team a-b" in refused.stderr


async def test_watcher_changes_nothing(open_as: Opener, urls: dict[str, str], shards: int) -> None:
    watcher = await open_as("watcher")
    controller = await open_as("controller")
    await controller.open(BufferConfig(shards=shards), 4)
    for verb in (
        watcher.admit("group", 1),
        watcher.push(make_group("group"), 1),
        watcher.announce_version(1),
        watcher.change_settings({"max_staleness": 9}),
    ):
        with pytest.raises(NotAllowedError):
            await verb
    with BlockingRedis.from_url(urls["admin"]) as admin:
        table = admin.command()
        writing = {name for name, info in table.items() if "write" in info["flags"]}
    assert _granted("watcher") & writing == set()
