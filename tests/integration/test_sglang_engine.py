"""The real SGLang server: its log-probabilities, its commits, and that it dies with its parent."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest
import torch

from configs.choices import CommitStrategy, PauseMode
from configs.environment import FORK_SERVERS_VARIABLE
from processes.tree import family as family_of
from processes.tree import shared_memory_files
from rollout_pool.engines.commit import TornEngine
from rollout_pool.engines.engine import SGLangEngine
from rollout_pool.sampling.engine_client import EngineError, SampleRefused
from tests.support.rollout import until
from tests.support.sglang_model import (
    EOS,
    engine_spec,
    logprobs_of,
    make_sample,
    sample,
    served_tensors,
    worst_difference,
)

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]


@pytest.fixture(scope="session")
def server(servers):
    return servers[0]


@pytest.fixture(scope="session")
def engine(server):
    return server.engine


@pytest.fixture(scope="session")
def model_a(models):
    return models["a"]


@pytest.fixture(scope="session")
def model_b(models):
    return models["b"]


@pytest.mark.parametrize("choice", [CommitStrategy.staged_disk, CommitStrategy.direct])
async def test_logprobs_are_those_of_the_published_weights(
    engine, server, model_a, model_b, choice
):
    for model, temperature in ((model_b, 1.0), (model_a, 0.7)):
        report = await server.publish(model, choice)
        version = server.newest
        assert report.version == version
        assert report.strategy == choice.value and 0 < report.load_s <= report.pause_s < 10
        ends = await sample(engine.client, 32, max_new_tokens=64, temperature=temperature)
        assert worst_difference(model, ends, temperature) < 1e-4
        assert {span.version for end in ends for span in end.version_spans} == {version}


async def test_request_has_nearly_the_same_logprobs_alone_and_in_a_batch(engine, server, model_a):
    """On a CPU no kernel is batch-invariant: the sums of one token are split by the batch."""
    runs = []
    for count in (1, 1, 8):
        await server.publish(model_a)  # which empties the prefix cache
        runs.append((await sample(engine.client, count, max_new_tokens=64, temperature=0.0))[0])
    alone = torch.tensor(runs[0].logprobs)
    for other in runs[1:]:
        assert other.output_ids == runs[0].output_ids
        assert (torch.tensor(other.logprobs) - alone).abs().max() < 1e-4


async def test_token_that_ends_a_sample_is_returned_with_it(engine, server, model_a):
    ends = await sample(engine.client, 32, max_new_tokens=128)
    stopped = [end for end in ends if end.finish_reason == "stop"]
    full = [end for end in ends if end.finish_reason == "length"]
    assert stopped and full
    assert all(end.output_ids[-1] == EOS and EOS not in end.output_ids[:-1] for end in stopped)
    assert all(len(end.output_ids) == 128 and EOS not in end.output_ids[:-1] for end in full)


MIN_RESCORED = 1_000
"""Tokens of the new version that are compared after a commit."""


async def crossing(client, server, model, choice, pause_mode, **settings):
    """Samples in flight when `model` was committed, then the same prompts; the commit's report."""
    begun = asyncio.Event()
    sampling = asyncio.create_task(
        sample(client, 8, max_new_tokens=400, on_begun=begun.set, **settings)
    )
    async with asyncio.timeout(60):
        await begun.wait()
    await asyncio.sleep(0.1)
    report = await server.publish(model, choice, pause_mode=pause_mode)
    client.note_version(report.version)
    ends = await sampling
    assert [end for end in ends if len(end.version_spans) == 2]
    ends += await sample(client, 24, max_new_tokens=64, **settings)
    assert num_of_version(ends, report.version) >= MIN_RESCORED
    return ends, report


def num_of_version(ends, version):
    spans = [span for end in ends for span in end.version_spans]
    return sum(span.end - span.start for span in spans if span.version == version)


def spans_of(sample):
    return [(span.version, slice(span.start, span.end)) for span in sample.version_spans]


def worst_of_each(ends, models):
    """Largest difference of a token's log-probability from that of its version's model."""
    differences = []
    for end in ends:
        got = torch.tensor(end.logprobs)
        by_version = {version: logprobs_of(model, end, 1.0) for version, model in models.items()}
        differences += [(got - by_version[v])[part].abs().max() for v, part in spans_of(end)]
    return float(max(differences))


@pytest.mark.parametrize("number", range(2))  # of the server: with a prefix cache, and without
@pytest.mark.parametrize("choice", [CommitStrategy.staged_disk, CommitStrategy.direct])
async def test_samples_in_flight_continue_through_a_commit_with_exact_spans(
    servers, model_a, model_b, choice, number
):
    server = servers[number]
    await server.publish(model_a)
    old, mode = server.newest, server.engine.spec.pause_mode
    ends, report = await crossing(server.engine.client, server, model_b, choice, mode)
    assert report.version == old + 1 and report.pause_s < 10
    assert worst_of_each(ends, {old: model_a, old + 1: model_b}) < 1e-4
    assert max(end.num_attempts for end in ends) <= 1 and not any(e.num_wasted for e in ends)


@pytest.mark.parametrize("number", range(2))
async def test_truncated_samples_cross_a_commit_with_the_candidates_of_each_token(
    servers, model_a, model_b, number
):
    server = servers[number]
    await server.publish(model_a)
    old, mode = server.newest, server.engine.spec.pause_mode
    truncation = {"top_k": 40, "top_p": 0.9, "min_p": 0.01}
    ends, _ = await crossing(
        server.engine.client, server, model_b, CommitStrategy.staged_disk, mode, **truncation
    )
    assert worst_of_each(ends, {old: model_a, old + 1: model_b}) < 1e-4
    sizes = [len(ids) for end in ends for ids in end.candidates]
    assert len(sizes) == sum(len(end.output_ids) for end in ends)
    assert 1 < max(sizes) <= 40 and min(sizes) < max(sizes)


async def test_drained_engine_ends_every_sample_under_one_version(engine, server, model_a, model_b):
    await server.publish(model_a)
    old, begun = server.newest, asyncio.Event()
    sampling = asyncio.create_task(sample(engine.client, 8, max_new_tokens=200, on_begun=begun.set))
    async with asyncio.timeout(60):
        await begun.wait()
    committer = server.committer(CommitStrategy.staged_disk, PauseMode.drain)
    draining = asyncio.create_task(committer.drain(60))
    before = await sampling
    await draining
    waiting = asyncio.create_task(sample(engine.client, 24, max_new_tokens=64))  # the same prompts
    report = await committer.commit(*server.stage(served_tensors(model_b)))
    engine.client.note_version(report.version)
    ends = [*before, *await waiting]
    versions = [[span.version for span in end.version_spans] for end in ends]
    assert versions == 8 * [[old]] + 24 * [[old + 1]]
    assert num_of_version(ends, old + 1) >= MIN_RESCORED
    assert worst_of_each(ends, {old: model_a, old + 1: model_b}) < 1e-4


async def test_rest_of_what_does_not_drain_in_time_is_of_the_next_version(
    engine, server, model_a, model_b
):
    await server.publish(model_a)
    old, begun = server.newest, asyncio.Event()
    sampling = asyncio.create_task(sample(engine.client, 8, max_new_tokens=900, on_begun=begun.set))
    async with asyncio.timeout(60):
        await begun.wait()
    committer = server.committer(CommitStrategy.staged_disk, PauseMode.drain)
    await committer.drain(0.1)
    report = await committer.commit(*server.stage(served_tensors(model_b)))
    engine.client.note_version(report.version)
    ends = await sampling
    assert [end for end in ends if len(end.version_spans) == 2]
    assert worst_of_each(ends, {old: model_a, old + 1: model_b}) < 1e-4
    assert not any(end.num_wasted for end in ends)


async def test_prefix_of_old_weights_would_be_noticed(engine, server, model_a, model_b):
    """The mode that is refused together with a prefix cache."""
    await server.publish(model_a)
    old = server.newest
    ends, _ = await crossing(
        engine.client, server, model_b, CommitStrategy.staged_disk, PauseMode.retract
    )
    assert worst_of_each(ends, {old: model_a, old + 1: model_b}) > 1e-2


async def test_siblings_and_turns_compute_each_prefix_once(engine, server, model_a):
    await server.publish(model_a)  # which empties the cache
    prompt = [7 + i % 240 for i in range(500)]
    before = engine.client.num_prefilled
    siblings = [
        make_sample(i, prompt=prompt, max_new_tokens=8, name="sibling-", group="g")
        for i in range(16)
    ]
    await asyncio.gather(*(engine.client.generate(s, f"{s.sample_id}.1!") for s in siblings))
    assert len(prompt) <= engine.client.num_prefilled - before <= 1.1 * len(prompt)
    before, unique, turn = engine.client.num_prefilled, 0, [9 + i % 200 for i in range(100)]
    for number in range(6):
        one = make_sample(number, prompt=list(turn), max_new_tokens=8, name="turn-")
        await engine.client.generate(one, f"{one.sample_id}.1!")
        unique = len(turn)
        turn += [*one.output_ids, *(11 + (number + i) % 200 for i in range(40))]
    assert unique <= engine.client.num_prefilled - before <= 1.1 * unique


async def test_cached_prefixes_that_can_make_way_are_no_load(engine, server, model_a):
    await server.publish(model_a)  # which empties the cache
    prompt = [13 + i % 230 for i in range(600)]
    samples = [make_sample(i, prompt=prompt, max_new_tokens=300, name="load-") for i in range(8)]
    work = [asyncio.create_task(engine.client.generate(s, f"{s.sample_id}.1!")) for s in samples]

    async def has_load(is_so):
        load = await engine.client.load()
        return is_so(load.num_tokens) and is_so(load.kv_usage * load.capacity)

    await until(lambda: has_load(lambda num_tokens: num_tokens >= 600))
    await asyncio.gather(*work)
    await until(lambda: has_load(lambda num_tokens: num_tokens < 100))
    before = engine.client.num_prefilled
    again = make_sample(9, prompt=prompt, max_new_tokens=1, name="load-")
    await engine.client.generate(again, f"{again.sample_id}.1!")
    assert engine.client.num_prefilled - before < 10, "the prefix was not in the cache any more"


@pytest.mark.parametrize("choice", [CommitStrategy.staged_disk, CommitStrategy.direct])
async def test_samples_paused_in_place_continue_with_exact_spans(server, model_a, model_b, choice):
    """Their later tokens are of the new weights over the old weights' KV cache."""
    await server.publish(model_a)
    old = server.newest
    client = server.client(1, keys_prefix_by_version=True)
    client.note_version(old)
    ends, _ = await crossing(client, server, model_b, choice, PauseMode.in_place)
    await client.close()
    in_flight, begun_after = ends[:8], ends[8:]
    assert worst_difference(model_b, begun_after, 1.0) < 1e-4
    for end in in_flight:
        got, under_a = torch.tensor(end.logprobs), logprobs_of(model_a, end, 1.0)
        for version, part in spans_of(end):
            difference = (got - under_a)[part].abs()
            if version == old:
                assert difference.max() < 1e-4
            elif part.stop - part.start > 8:
                assert difference.max() > 1e-2  # not one token more is of the old weights


async def test_staged_copy_may_be_overwritten_once_the_engine_has_taken_it(engine, server, model_b):
    version, folder = server.stage(served_tensors(model_b))
    await server.committer(CommitStrategy.staged_disk).commit(version, folder)
    with (folder / "model.safetensors").open("r+b") as file:
        file.write(b"\0" * (folder / "model.safetensors").stat().st_size)
    ends = await sample(engine.client, 4, max_new_tokens=32)
    assert worst_difference(model_b, ends, 1.0) < 1e-4


async def test_sample_given_up_frees_the_engine(engine, server):
    slow = asyncio.create_task(sample(engine.client, 4, max_new_tokens=900, name="slow"))
    await asyncio.sleep(0.3)
    slow.cancel()
    with pytest.raises(asyncio.CancelledError):
        await slow
    async with asyncio.timeout(60):
        [end] = await sample(engine.client, 1, max_new_tokens=4)
    assert end.finish_reason


async def test_model_that_does_not_load_is_reported_with_the_end_of_the_log(sglang_folder):
    spec = engine_spec(sglang_folder / "no-such-model", sglang_folder / "broken.log")
    engine = SGLangEngine(spec)
    with pytest.raises(EngineError, match=r"(?s)engine-0: the SGLang server ended .*no-such-model"):
        await engine.start()


async def test_request_without_the_key_is_refused_and_the_key_is_in_no_log(engine):
    url = str(engine.client.url)
    async with httpx.AsyncClient(trust_env=False) as stranger:
        answer = await stranger.post(f"{url}/flush_cache")
    assert answer.status_code == 401
    assert engine.spec.key not in engine.spec.log_path.read_text()


async def test_server_listens_on_loopback_alone(engine):
    connections = [c for p in family_of(engine.info.pid) for c in p.net_connections("inet")]
    listening = {c.laddr for c in connections if c.status == psutil.CONN_LISTEN}
    assert any(engine.info.url.endswith(f":{port}") for _, port in listening)
    assert {host for host, _ in listening} == {"127.0.0.1"}


async def test_failed_load_emits_no_token_and_a_restart_recovers(engine, server, model_a, model_b):
    await server.publish(model_a)
    url, begun = engine.client.url, asyncio.Event()
    sampling = asyncio.create_task(sample(engine.client, 4, max_new_tokens=900, on_begun=begun.set))
    async with asyncio.timeout(60):
        await begun.wait()
    tensors = served_tensors(model_b)
    tensors["model.layers.1.mlp.down_proj.weight"] = torch.zeros(3, 3)
    committer = server.committer(CommitStrategy.staged_disk)
    broken = server.stage(tensors)
    with pytest.raises(TornEngine, match=r"engine-0 must be restarted.*failed"):
        await committer.commit(*broken)
    with pytest.raises(TornEngine):
        await committer.commit(*server.stage(served_tensors(model_a)))
    await server.close()
    await engine.restart()
    with pytest.raises(EngineError):
        await sampling
    assert engine.client.url == engine.info.url == url
    with pytest.raises(SampleRefused, match="'default'"):  # its weights have no version
        await sample(engine.client, 1, max_new_tokens=4)
    await server.open()
    await server.publish(model_b)
    ends = await sample(engine.client, 4, max_new_tokens=32)
    assert worst_difference(model_b, ends, 1.0) < 1e-4


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


async def test_parent_that_is_killed_leaves_no_server(sglang_folder, model_a):
    spec = dataclasses.asdict(engine_spec(sglang_folder / "a", sglang_folder / "orphan.log"))
    paths = {name: str(spec[name]) for name in ("log_path", "leftovers_path")}
    fields = {**spec, **paths, "config": None, "pause_mode": None}
    environment = dict(os.environ)
    environment.pop(FORK_SERVERS_VARIABLE, None)  # executed, as with a GPU
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, json.dumps(fields)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
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
    assert not psutil.wait_procs(family, timeout=60)[1]
    assert not socket_folder.exists() and not any(path.exists() for path in shared)
