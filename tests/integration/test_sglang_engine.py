"""The real SGLang server: its log-probabilities, its commits, and that it dies with its parent."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import httpx
import psutil
import pytest
import torch
from transformers import Qwen3ForCausalLM

from buffer.probes import Probes, beginnings
from configs.choices import PauseMode
from configs.environment import FORK_SERVERS_VARIABLE
from processes.tree import family as family_of
from processes.tree import shared_memory_files
from rollout_pool.engines.engine import TornEngine
from rollout_pool.engines.read_back import ReadBack, WeightsNotTaken
from rollout_pool.engines.sglang.engine import SGLangEngine
from rollout_pool.sampling.engine_client import EngineError, SampleRefused
from tests.support.rollout import until
from tests.support.sglang_model import (
    EOS,
    engine_spec,
    logprobs_of,
    make_sample,
    manifest_of,
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


async def test_logprobs_are_those_of_the_published_weights(engine, server, model_a, model_b):
    for model, temperature in ((model_b, 1.0), (model_a, 0.7)):
        report = await server.publish(model)
        version = server.newest
        assert report.version == version
        assert report.strategy == "staged_disk" and 0 < report.load_s <= report.pause_s
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


async def test_window_that_the_server_ignores_is_told_by_the_length_at_which_it_matters(
    engine, server, model_a
):
    report = await server.publish(model_a)
    windowed = copy.deepcopy(model_a.config)
    windowed.update({"use_sliding_window": True, "sliding_window": 64})
    windowed.layer_types = ["sliding_attention"] * 2
    trainer_side = Qwen3ForCausalLM(windowed).eval()
    trainer_side.load_state_dict(model_a.state_dict())
    text = [5 + i * i % 240 for i in range(600)]
    for model in (model_a, trainer_side):
        logprobs = []
        for length, start in beginnings(len(text)):
            tokens = torch.tensor([text[:length]])
            with torch.no_grad():
                every = model(tokens).logits[0, :-1].log_softmax(-1)
            found = every.gather(1, tokens[0, 1:, None])[:, 0]
            logprobs.append(found[start - 1 :].tolist())
        probes = Probes(version=report.version, text=text, logprobs=logprobs, most=1e-3)
        problem = (await engine.client.compare(probes)).problem
        if model is model_a:
            assert problem is None
        else:
            assert problem and "Of a text of 75 tokens" in problem and "At 37 tokens" in problem


async def test_token_that_ends_a_sample_is_returned_with_it(engine, server, model_a):
    ends = await sample(engine.client, 32, max_new_tokens=128)
    stopped = [end for end in ends if end.finish_reason == "stop"]
    full = [end for end in ends if end.finish_reason == "length"]
    assert stopped and full
    assert all(end.output_ids[-1] == EOS and EOS not in end.output_ids[:-1] for end in stopped)
    assert all(len(end.output_ids) == 128 and EOS not in end.output_ids[:-1] for end in full)


MIN_RESCORED = 1_000
"""Tokens of the new version that are compared after a commit."""


async def begun(client, count, max_new_tokens, **settings):
    """A task of samples that all have their first token."""
    begun = asyncio.Event()
    limits = {"max_new_tokens": max_new_tokens, "on_begun": begun.set}
    sampling = asyncio.create_task(sample(client, count, **limits, **settings))
    async with asyncio.timeout(60):
        await begun.wait()
    return sampling


async def crossing(client, server, model, pause_mode, **settings):
    """Samples in flight when `model` was committed, then the same prompts; the commit's report."""
    sampling = await begun(client, 8, 400, **settings)
    await asyncio.sleep(0.1)
    report = await server.publish(model, pause_mode)
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
async def test_samples_in_flight_continue_through_a_commit_with_exact_spans(
    servers, model_a, model_b, number
):
    server = servers[number]
    await server.publish(model_a)
    old, mode = server.newest, server.engine.spec.pause_mode
    ends, report = await crossing(server.engine.client, server, model_b, mode)
    assert report.version == old + 1
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
    ends, _ = await crossing(server.engine.client, server, model_b, mode, **truncation)
    assert worst_of_each(ends, {old: model_a, old + 1: model_b}) < 1e-4
    sizes = [len(ids) for end in ends for ids in end.candidates]
    assert len(sizes) == sum(len(end.output_ids) for end in ends)
    assert 1 < max(sizes) <= 40 and min(sizes) < max(sizes)


async def test_drained_engine_ends_every_sample_under_one_version(engine, server, model_a, model_b):
    await server.publish(model_a)
    old, sampling = server.newest, await begun(engine.client, 8, 200)
    committer = server.committer(PauseMode.drain)
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
    old, sampling = server.newest, await begun(engine.client, 8, 900)
    committer = server.committer(PauseMode.drain)
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
    ends, _ = await crossing(engine.client, server, model_b, PauseMode.retract)
    assert worst_of_each(ends, {old: model_a, old + 1: model_b}) > 1e-2


async def test_siblings_and_turns_compute_each_prefix_once(engine, server, model_a):
    await server.publish(model_a)  # which empties the cache
    prompt = [7 + i % 240 for i in range(500)]
    before = engine.client.counters.num_prefilled
    siblings = [
        make_sample(i, prompt=prompt, max_new_tokens=8, name="sibling-", group="g")
        for i in range(16)
    ]
    await asyncio.gather(*(engine.client.generate_tokens(s, f"{s.sample_id}.1!") for s in siblings))
    assert len(prompt) <= engine.client.counters.num_prefilled - before <= 1.1 * len(prompt)
    before, unique, turn = (
        engine.client.counters.num_prefilled,
        0,
        [9 + i % 200 for i in range(100)],
    )
    for number in range(6):
        one = make_sample(number, prompt=list(turn), max_new_tokens=8, name="turn-")
        await engine.client.generate_tokens(one, f"{one.sample_id}.1!")
        unique = len(turn)
        turn += [*one.output_ids, *(11 + (number + i) % 200 for i in range(40))]
    assert unique <= engine.client.counters.num_prefilled - before <= 1.1 * unique


async def test_cached_prefixes_that_can_make_way_are_no_load(engine, server, model_a):
    await server.publish(model_a)  # which empties the cache
    prompt = [13 + i % 230 for i in range(600)]
    samples = [make_sample(i, prompt=prompt, max_new_tokens=300, name="load-") for i in range(8)]
    work = [
        asyncio.create_task(engine.client.generate_tokens(s, f"{s.sample_id}.1!")) for s in samples
    ]

    async def has_load(is_so):
        load = await engine.client.load()
        return is_so(load.num_tokens) and is_so(load.kv_usage * load.capacity)

    await until(lambda: has_load(lambda num_tokens: num_tokens >= 600))
    await asyncio.gather(*work)
    await until(lambda: has_load(lambda num_tokens: num_tokens < 100))
    before = engine.client.counters.num_prefilled
    again = make_sample(9, prompt=prompt, max_new_tokens=1, name="load-")
    await engine.client.generate_tokens(again, f"{again.sample_id}.1!")
    assert engine.client.counters.num_prefilled - before < 10, (
        "the prefix was not in the cache any more"
    )


async def test_samples_paused_in_place_continue_with_exact_spans(server, model_a, model_b):
    """Their later tokens are of the new weights over the old weights' KV cache."""
    await server.publish(model_a)
    old = server.newest
    client = server.client(1, keys_prefix_by_version=True)
    client.note_version(old)
    ends, _ = await crossing(client, server, model_b, PauseMode.in_place)
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
    await server.committer().commit(version, folder)
    with (folder / "model.safetensors").open("r+b") as file:
        file.write(b"\0" * (folder / "model.safetensors").stat().st_size)
    ends = await sample(engine.client, 4, max_new_tokens=32)
    assert worst_difference(model_b, ends, 1.0) < 1e-4


async def test_engine_is_found_to_hold_what_it_was_given(servers, model_a, model_b):
    models = {"a": model_a, "b": model_b}
    for server in servers:
        read_back, digests = ReadBack(server.engine.client, 60), {}
        for _ in range(2):
            for name, model in models.items():
                report = await server.publish(model)
                reading = await read_back.read(manifest_of(report.version, served_tensors(model)))
                assert digests.setdefault(name, reading.digest) == reading.digest
        assert digests["a"] != digests["b"]
    assert "published tensors are not among" not in server.engine.log_tail()


async def test_tensors_that_the_loader_drops_are_found_after_the_commit(
    engine, server, model_a, model_b
):
    report = await server.publish(model_a)
    read_back = ReadBack(engine.client, 60)
    await read_back.read(manifest_of(report.version, served_tensors(model_a)))
    tensors = served_tensors(model_b)
    manifest = manifest_of(server.newest + 1, tensors)
    for part in ("q", "k", "v"):
        tensors[f"lost.{part}"] = tensors.pop(f"model.layers.0.self_attn.{part}_proj.weight")
    tensors["lost.norm"] = tensors.pop("model.norm.weight")  # the same in both
    await server.committer().commit(*server.stage(tensors))
    lost = r"stayed .*: model\.layers\.0\.self_attn\.qkv_proj\.weight\."
    with pytest.raises(WeightsNotTaken, match=lost):
        await read_back.read(manifest)


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


def streamed(engine, name, *, count=4, headers=(), **body):
    """A call of `count` samples to the server's /generate."""
    url, key = f"{str(engine.client.url).rstrip('/')}/generate", f"Bearer {engine.spec.key}"
    settings = {"temperature": 0.0, "max_new_tokens": 24, "stream_interval": 8, "ignore_eos": True}
    body = {
        "rid": [f"{name}-{i}" for i in range(count)],
        "input_ids": [[7 + i, 9, 11] for i in range(count)],
        "sampling_params": [settings | body.pop("settings", {})] * count,
        "return_logprob": True,
        "stream": True,
        **body,
    }
    return aiohttp.request("POST", url, json=body, headers={"Authorization": key, **dict(headers)})


async def parts_of(response):
    """The events of each HTTP chunk."""
    chunks, data = [], b""
    async for some, is_whole in response.content.iter_chunks():
        data += some
        if is_whole:
            events = data.split(b"\n\n")[:-1]
            chunks.append([event.removeprefix(b"data: ") for event in events])
            data = b""
    return [chunk for chunk in chunks if chunk]


OF_ONE_CALL = {"id", "e2e_latency", "response_sent_to_client_ts", "output_token_logprobs"}
OF_ONE_CALL |= {"cached_tokens", "cached_tokens_details"}
"""Fields that differ between two calls of the same prompts."""


async def test_streams_say_what_the_servers_own_route_says_in_fewer_chunks(engine, server, model_a):
    await server.publish(model_a)
    replies = []
    for name, headers in (("short", {}), ("own", {"Origin": "http://page"})):
        async with streamed(engine, name, headers=headers) as response:
            assert response.status == 200
            kind, chunks = response.headers["Content-Type"], await parts_of(response)
        assert chunks[-1] == [b"[DONE]"]
        parts = [json.loads(event) for chunk in chunks[:-1] for event in chunk]
        replies.append((kind, {index: {"ids": []} for index in range(4)}))
        for part in parts:
            meta = part.pop("meta_info")
            assert meta["id"] == f"{name}-{part['index']}"
            # A busy server joins parts of one sample, on both ways.
            whole = replies[-1][1][part["index"]]
            whole["ids"] += [token for _, token, _ in meta["output_token_logprobs"]]
            whole["last"] = {k: None if k in OF_ONE_CALL else v for k, v in meta.items()}
        assert (max(len(chunk) for chunk in chunks) > 1) == (name == "short")
    assert replies[0] == replies[1]


async def test_stream_of_few_tokens_has_one_part_of_each_sample(engine, server, model_a):
    await server.publish(model_a)
    async with streamed(engine, "few", settings={"max_new_tokens": 8}) as response:
        parts = [json.loads(e) for chunk in await parts_of(response) for e in chunk if b"{" in e]
    assert sorted(part["index"] for part in parts) == [0, 1, 2, 3]
    assert all(part["meta_info"]["completion_tokens"] == 8 for part in parts)


async def test_streams_are_refused_as_the_servers_own_route_refuses_them(engine, server, model_a):
    await server.publish(model_a)
    cases = [
        ("stranger", 401, {"Authorization": "Bearer no-key"}, {}),
        ("torn", 400, {}, {"input_ids": "seven"}),
        ("long", 200, {}, {"input_ids": [[5] * 10_000] * 4}),
        ("odd", 200, {}, {"settings": {"temperature": -1.0}}),
    ]
    for name, status, headers, body in cases:
        replies = []
        for origin in ({}, {"Origin": "http://page"}):
            async with streamed(engine, name, headers=headers | origin, **body) as response:
                replies.append((response.status, await response.read()))
        assert replies[0] == replies[1]
        assert replies[0][0] == status and b"error" in replies[0][1]


async def test_client_that_goes_frees_the_engine(engine, server, model_a):
    await server.publish(model_a)
    began, at_40 = time.monotonic(), 0.0
    settings = {"max_new_tokens": 900, "stream_interval": 4}
    async with streamed(engine, "left", settings=settings) as response:
        async for line in response.content:
            event = line.removeprefix(b"data: ").strip()
            if event and json.loads(event)["meta_info"]["completion_tokens"] >= 40:
                break
        at_40 = time.monotonic() - began
        response.close()
    left = time.monotonic()

    async def is_idle():
        return (await engine.client.load()).num_running == 0

    async with asyncio.timeout(60):
        while not await is_idle():
            await asyncio.sleep(0.02)
    # The rest of its tokens would take twenty times as long as those that came.
    assert time.monotonic() - left < 0.5 + 15 * at_40


async def test_server_listens_on_loopback_alone(engine):
    connections = [c for p in family_of(engine.info.pid) for c in p.net_connections("inet")]
    listening = {c.laddr for c in connections if c.status == psutil.CONN_LISTEN}
    assert any(engine.info.url.endswith(f":{port}") for _, port in listening)
    assert {host for host, _ in listening} == {"127.0.0.1"}


async def test_failed_load_emits_no_token_and_a_restart_recovers(engine, server, model_a, model_b):
    await server.publish(model_a)
    url, sampling = engine.client.url, await begun(engine.client, 4, 900)
    tensors = served_tensors(model_b)
    tensors["model.layers.1.mlp.down_proj.weight"] = torch.zeros(3, 3)
    committer = server.committer()
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
from rollout_pool.engines.engine import EngineSpec
from rollout_pool.engines.sglang.engine import SGLangEngine

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
