"""The real SGLang server: its numbers, commits under way, and that it never outlives its parent."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest
import pytest_asyncio
import torch
from sglang_model import (
    EOS,
    build_model,
    engine_spec,
    logprobs_of,
    sample,
    served_tensors,
    stage,
    worst_difference,
)

from configs.choices import CommitStrategy, PauseMode
from configs.schema import WeightSyncConfig
from processes.tree import family as family_of
from processes.tree import is_semaphore, shared_memory_files
from rollout_pool.engines.commit import Committer, TornEngine, make_strategy
from rollout_pool.engines.engine import SGLangEngine
from rollout_pool.sampling.engine_client import EngineError, SampleRefused

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("engine")


@pytest.fixture(scope="module")
def model_a(folder):
    return build_model(folder / "a", seed=0)


@pytest.fixture(scope="module")
def model_b(folder):
    return build_model(folder / "b", seed=1)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(folder, model_a):
    engine = SGLangEngine(engine_spec(folder / "a", folder / "engine.log"))
    await engine.start()
    yield engine
    await engine.stop()


class Publisher:
    """Stages versions as a receiver does and lets the engine commit them, by either strategy."""

    def __init__(self, engine, folder):
        self.engine = engine
        self.folder = folder
        self.newest = -1
        self.strategies = {}

    async def open(self):
        """For the server that runs now."""
        for choice in (CommitStrategy.staged_disk, CommitStrategy.direct):
            config = WeightSyncConfig(commit=choice, bucket_bytes=100_000)
            strategy = make_strategy(self.engine.client, config, tp_size=1, host="127.0.0.1")
            await strategy.check()
            self.strategies[choice] = strategy

    def stage(self, tensors):
        """The next version's number and folder."""
        self.newest += 1
        return self.newest, stage(self.folder / str(self.newest), tensors)

    def committer(self, choice, pause_mode=PauseMode.retract):
        return Committer(self.engine.client, self.strategies[choice], pause_mode)

    async def publish(self, model, choice=CommitStrategy.staged_disk, **settings):
        return await self.committer(choice, **settings).commit(*self.stage(served_tensors(model)))

    async def close(self):
        for strategy in self.strategies.values():
            await strategy.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def publisher(engine, folder):
    staged = folder / "staged"
    staged.mkdir()
    publisher = Publisher(engine, staged)
    await publisher.open()
    yield publisher
    await publisher.close()


async def test_tokens_of_weights_that_nobody_published_are_refused(engine):
    with pytest.raises(SampleRefused, match="'default'"):
        await sample(engine.client, 1, max_new_tokens=4)


@pytest.mark.parametrize("choice", [CommitStrategy.staged_disk, CommitStrategy.direct])
async def test_logprobs_are_those_of_the_published_weights(
    engine, publisher, model_a, model_b, choice
):
    for model, temperature in ((model_b, 1.0), (model_a, 0.7)):
        report = await publisher.publish(model, choice)
        version = publisher.newest
        assert report.served_version == report.version == version
        assert report.strategy == choice.value and 0 < report.load_s <= report.pause_s < 10
        ends = await sample(engine.client, 32, max_new_tokens=64, temperature=temperature)
        assert worst_difference(model, ends, temperature) < 1e-4
        assert {span.version for end in ends for span in end.version_spans} == {version}


async def test_the_token_that_ends_a_sample_is_returned_with_it(engine, publisher, model_a):
    ends = await sample(engine.client, 32, max_new_tokens=128)
    stopped = [end for end in ends if end.finish_reason == "stop"]
    full = [end for end in ends if end.finish_reason == "length"]
    assert stopped and full
    assert all(end.output_ids[-1] == EOS and EOS not in end.output_ids[:-1] for end in stopped)
    assert all(len(end.output_ids) == 128 and EOS not in end.output_ids[:-1] for end in full)


async def crossing(engine, publisher, model, choice, pause_mode):
    """All samples that were in flight when `model` was committed, and the commit's report."""
    begun = asyncio.Event()
    sampling = asyncio.create_task(sample(engine.client, 8, max_new_tokens=400, on_begun=begun.set))
    async with asyncio.timeout(60):
        await begun.wait()
    await asyncio.sleep(0.1)
    report = await publisher.publish(model, choice, pause_mode=pause_mode)
    ends = await sampling
    assert [end for end in ends if len(end.version_spans) == 2]
    return ends, report


def spans_of(sample):
    return [(span.version, slice(span.start, span.end)) for span in sample.version_spans]


@pytest.mark.parametrize("choice", [CommitStrategy.staged_disk, CommitStrategy.direct])
async def test_samples_in_flight_go_on_through_a_commit_with_exact_spans(
    engine, publisher, model_a, model_b, choice
):
    await publisher.publish(model_a)
    old = publisher.newest
    ends, report = await crossing(engine, publisher, model_b, choice, PauseMode.retract)
    assert report.version == old + 1 and report.pause_s < 10
    for end in ends:
        got = torch.tensor(end.logprobs)
        by_version = {
            old: logprobs_of(model_a, end, 1.0),
            old + 1: logprobs_of(model_b, end, 1.0),
        }
        for version, part in spans_of(end):
            assert (got - by_version[version])[part].abs().max() < 1e-4, (version, part)


@pytest.mark.parametrize("choice", [CommitStrategy.staged_disk, CommitStrategy.direct])
async def test_kept_in_place_samples_go_on_with_exact_spans_too(
    engine, publisher, model_a, model_b, choice
):
    """Their later tokens are of the new weights over the old weights' KV cache."""
    await publisher.publish(model_a)
    old = publisher.newest
    ends, _ = await crossing(engine, publisher, model_b, choice, PauseMode.in_place)
    for end in ends:
        got, under_a = torch.tensor(end.logprobs), logprobs_of(model_a, end, 1.0)
        for version, part in spans_of(end):
            difference = (got - under_a)[part].abs()
            if version == old:
                assert difference.max() < 1e-4
            elif part.stop - part.start > 8:
                assert difference.max() > 1e-2  # not one token more is of the old weights


async def test_a_staged_copy_may_be_overwritten_once_the_engine_has_taken_it(
    engine, publisher, model_b
):
    version, folder = publisher.stage(served_tensors(model_b))
    await publisher.committer(CommitStrategy.staged_disk).commit(version, folder)
    with (folder / "model.safetensors").open("r+b") as file:
        file.write(b"\0" * (folder / "model.safetensors").stat().st_size)
    ends = await sample(engine.client, 4, max_new_tokens=32)
    assert worst_difference(model_b, ends, 1.0) < 1e-4


async def test_a_sample_given_up_frees_the_engine(engine, publisher):
    slow = asyncio.create_task(sample(engine.client, 4, max_new_tokens=900, name="slow"))
    await asyncio.sleep(0.3)
    slow.cancel()
    with pytest.raises(asyncio.CancelledError):
        await slow
    async with asyncio.timeout(20):
        [end] = await sample(engine.client, 1, max_new_tokens=4)
    assert end.finish_reason


async def test_a_model_that_does_not_load_is_told_with_the_end_of_the_log(folder):
    spec = engine_spec(folder / "no-such-model", folder / "broken.log")
    engine = SGLangEngine(spec)
    with pytest.raises(EngineError, match=r"(?s)engine-0: the SGLang server ended .*no-such-model"):
        await engine.start()


async def test_a_request_without_the_key_is_refused_and_the_key_is_in_no_log(engine, folder):
    url = str(engine.client.url)
    async with httpx.AsyncClient(trust_env=False) as stranger:
        answer = await stranger.post(f"{url}/flush_cache")
    assert answer.status_code == 401
    assert engine.spec.key not in (folder / "engine.log").read_text()


async def test_a_server_listens_on_loopback_alone(engine):
    connections = [c for p in family_of(engine.info.pid) for c in p.net_connections("inet")]
    listening = {c.laddr for c in connections if c.status == psutil.CONN_LISTEN}
    assert any(engine.info.url.endswith(f":{port}") for _, port in listening)
    assert {host for host, _ in listening} == {"127.0.0.1"}


async def test_a_load_that_fails_never_lets_a_token_out_and_a_restart_heals_it(
    engine, publisher, model_a, model_b
):
    await publisher.publish(model_a)
    url, begun = engine.client.url, asyncio.Event()
    sampling = asyncio.create_task(sample(engine.client, 4, max_new_tokens=900, on_begun=begun.set))
    async with asyncio.timeout(60):
        await begun.wait()
    tensors = served_tensors(model_b)
    tensors["model.layers.1.mlp.down_proj.weight"] = torch.zeros(3, 3)
    committer = publisher.committer(CommitStrategy.staged_disk)
    broken = publisher.stage(tensors)
    with pytest.raises(TornEngine, match=r"engine-0 must be started again.*failed"):
        await committer.commit(*broken)
    with pytest.raises(TornEngine):
        await committer.commit(*publisher.stage(served_tensors(model_a)))
    await publisher.close()
    await engine.restart()
    with pytest.raises(EngineError):
        await sampling
    assert engine.client.url == engine.info.url == url
    await publisher.open()
    await publisher.publish(model_b)
    ends = await sample(engine.client, 4, max_new_tokens=32)
    assert worst_difference(model_b, ends, 1.0) < 1e-4


async def test_a_server_that_is_killed_is_told_and_leaves_nothing(engine):
    family = psutil.Process(engine.info.pid).children(recursive=True)
    shared = shared_memory_files(family_of(engine.info.pid))
    kinds = ["semaphore" if is_semaphore(path) else path.name[:12] for path in shared]
    assert "sglang_loads" in kinds
    if torch.cuda.is_available():  # a process that is forked shares semaphores without a name
        assert "semaphore" in kinds
    assert {*map(str, shared)} <= {*engine.spec.leftovers_path.read_text().splitlines()}
    os.kill(engine.info.pid, signal.SIGKILL)
    assert await asyncio.wait_for(engine.wait_dead(), 20) == -signal.SIGKILL
    await engine.stop()
    assert not psutil.wait_procs(family, timeout=20)[1]
    assert not any(path.exists() for path in shared)


PARENT = """
import asyncio, json, sys
from pathlib import Path
from configs.choices import PauseMode
from configs.rollout_schema import EngineConfig
from rollout_pool.engines.engine import EngineSpec, SGLangEngine

async def main():
    fields = json.loads(sys.argv[1])
    engine = SGLangEngine(EngineSpec(
        **{**fields, "config": EngineConfig(), "pause_mode": PauseMode.retract,
           "log_path": Path(fields["log_path"]),
           "leftovers_path": Path(fields["leftovers_path"])}
    ))
    info = await engine.start()
    await engine.client.pause(PauseMode.retract)  # SGLang itself would not end while paused
    print(info.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_a_parent_that_is_killed_leaves_no_server(folder, model_a):
    spec = dataclasses.asdict(engine_spec(folder / "a", folder / "orphan.log"))
    paths = {name: str(spec[name]) for name in ("log_path", "leftovers_path")}
    fields = {**spec, **paths, "config": None, "pause_mode": None}
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, json.dumps(fields)], stdout=subprocess.PIPE, text=True
    )
    line = await asyncio.wait_for(asyncio.to_thread(parent.stdout.readline), 180)
    server = psutil.Process(int(line))
    family = [server, *server.children(recursive=True)]
    socket_folder = Path(server.cmdline()[3])
    shared = shared_memory_files(family_of(server.pid))
    assert len(family) > 2 and any(socket_folder.iterdir()) and shared
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert not psutil.wait_procs(family, timeout=20)[1]
    assert not socket_folder.exists() and not any(path.exists() for path in shared)
