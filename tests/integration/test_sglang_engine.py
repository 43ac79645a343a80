"""The real SGLang server: its numbers, commits under way, and that it never outlives its parent."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import aclosing
from pathlib import Path

import httpx
import psutil
import pytest
import pytest_asyncio
import torch
import torch.distributed as dist
from transformers import Qwen3Config, Qwen3ForCausalLM

from configs.schema import EngineConfig, PauseMode
from rollout_pool.commit import Committer
from rollout_pool.engine import EngineSpec, SGLangEngine
from rollout_pool.generation import (
    EngineError,
    FirstToken,
    Generation,
    Refused,
    SampleRequest,
    Sampling,
)
from rollout_pool.process_tree import family as family_of
from rollout_pool.process_tree import shared_memory_files
from weight_sync.buckets import plan_buckets
from weight_sync.group import join_as_sender, open_store
from weight_sync.snapshot import spec_of
from weight_sync.types import GroupSpec

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

EOS = 258
PROMPT = [257, 5, 17, 99, 200, 33, 42]


def build_model(folder: Path, seed: int) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=264,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=257,
        eos_token_id=EOS,
        pad_token_id=256,
        initializer_range=0.2,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config).float().eval()
    model.save_pretrained(folder)
    return model


def engine_spec(model_path: Path, log_path: Path) -> EngineSpec:
    return EngineSpec(
        name="engine-0",
        config=EngineConfig(max_running_requests=32, start_timeout_s=180, request_timeout_s=120),
        pause_mode=PauseMode.retract,
        model_path=str(model_path),
        trust_remote_code=False,
        host="127.0.0.1",
        log_path=log_path,
        leftovers_path=log_path.with_suffix(".leftovers"),
        num_threads=1,
        uses_gpu=False,
        seed=0,
        key="k3y-of-this-test",
    )


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


class Sender:
    """Rank 0 of a weight group with one engine, and what the trainer does with it."""

    def __init__(self, engine):
        self.committer = Committer(engine.client, PauseMode.retract)

    async def connect(self):
        store = open_store("127.0.0.1", 60)
        self.spec = GroupSpec(
            host="127.0.0.1",
            port=store.port,
            name="weights-0",
            world_size=2,
            backend="gloo",
            timeout_s=60,
        )
        joining = asyncio.create_task(self.committer.join_group(self.spec, 1))
        self.group = await asyncio.to_thread(join_as_sender, store, self.spec)
        await joining

    async def publish(self, version, model):
        tensors = {k: v for k, v in model.state_dict().items() if k != "lm_head.weight"}
        buckets = plan_buckets([spec_of(k, v) for k, v in tensors.items()], bucket_bytes=100_000)
        assert len(buckets) > 2
        await self.committer.pause()
        for bucket in buckets:
            parts = [tensors[tensor.name].contiguous().flatten() for tensor in bucket.tensors]
            flat = torch.cat([part.view(torch.uint8) for part in parts])
            receiving = asyncio.create_task(self.committer.receive(bucket, self.spec, version))
            await asyncio.to_thread(dist.broadcast, flat, 0, self.group)
            await receiving
        return await self.committer.resume(version)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sender(engine):
    sender = Sender(engine)
    await sender.connect()
    yield sender
    dist.destroy_process_group(sender.group)


async def sample(client, count, *, max_new_tokens, temperature=1.0, on_begun=None, name=""):
    """The last event of each sample; calls `on_begun` when all have their first token."""
    requests = [
        SampleRequest(request_id=f"{name}{time.monotonic_ns()}.{i}", tokens=[*PROMPT, i])
        for i in range(count)
    ]
    sampling = Sampling(temperature=temperature, max_new_tokens=max_new_tokens)
    ends, begun = {}, 0
    async with aclosing(client.generate(requests, sampling)) as events:
        async for event in events:
            if isinstance(event, FirstToken):
                begun += 1
                if begun == count and on_begun is not None:
                    on_begun()
            else:
                ends[event.index] = event
    return [ends[index] for index in range(count)]


def logprobs_of(model, index, generation, temperature):
    """Hugging Face's log-probability of each token that the engine sampled."""
    prompt = [*PROMPT, index]
    tokens = torch.tensor([[*prompt, *generation.output_ids]])
    with torch.no_grad():
        logits = model(tokens).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, tokens[0, len(prompt) :, None])[:, 0]


def worst_difference(model, generations, temperature):
    return max(
        (logprobs_of(model, i, g, temperature) - torch.tensor(g.logprobs)).abs().max().item()
        for i, g in enumerate(generations)
    )


async def test_tokens_of_weights_that_nobody_published_are_refused(engine):
    [refused] = await sample(engine.client, 1, max_new_tokens=4)
    assert isinstance(refused, Refused) and "'default'" in str(refused.error)


async def test_logprobs_are_those_of_the_published_weights(engine, sender, model_a, model_b):
    for version, model, temperature in ((0, model_b, 1.0), (1, model_a, 0.7)):
        report = await sender.publish(version, model)
        assert report.served_version == report.version == version and 0 < report.pause_s < 10
        ends = await sample(engine.client, 32, max_new_tokens=64, temperature=temperature)
        assert all(isinstance(end, Generation) for end in ends), ends
        assert worst_difference(model, ends, temperature) < 1e-4
        assert {span.version for end in ends for span in end.version_spans} == {version}


async def test_the_token_that_ends_a_sample_is_returned_with_it(engine, sender, model_a):
    ends = await sample(engine.client, 32, max_new_tokens=128)
    stopped = [end for end in ends if end.finish_reason == "stop"]
    full = [end for end in ends if end.finish_reason == "length"]
    assert stopped and full
    assert all(end.output_ids[-1] == EOS and EOS not in end.output_ids[:-1] for end in stopped)
    assert all(len(end.output_ids) == 128 and EOS not in end.output_ids[:-1] for end in full)


async def test_samples_in_flight_go_on_through_a_commit_with_exact_spans(
    engine, sender, model_a, model_b
):
    await sender.publish(2, model_a)
    begun = asyncio.Event()
    sampling = asyncio.create_task(sample(engine.client, 8, max_new_tokens=400, on_begun=begun.set))
    await asyncio.wait_for(begun.wait(), 60)
    await asyncio.sleep(0.1)
    report = await sender.publish(3, model_b)
    ends = await sampling
    crossing = [end for end in ends if len(end.version_spans) == 2]
    assert crossing and report.pause_s < 10
    for index, end in enumerate(ends):
        got = torch.tensor(end.logprobs)
        by_version = {
            2: logprobs_of(model_a, index, end, 1.0),
            3: logprobs_of(model_b, index, end, 1.0),
        }
        for span in end.version_spans:
            part = slice(span.start, span.end)
            assert (got - by_version[span.version])[part].abs().max() < 1e-4, span


async def test_a_sample_given_up_frees_the_engine(engine, sender):
    slow = asyncio.create_task(sample(engine.client, 4, max_new_tokens=900, name="slow"))
    await asyncio.sleep(0.3)
    slow.cancel()
    with pytest.raises(asyncio.CancelledError):
        await slow
    [end] = await asyncio.wait_for(sample(engine.client, 1, max_new_tokens=4), 20)
    assert isinstance(end, Generation)


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


async def test_a_server_that_is_killed_is_told_and_leaves_nothing(engine):
    family = psutil.Process(engine.info.pid).children(recursive=True)
    shared = shared_memory_files(family_of(engine.info.pid))
    assert shared and all(path.exists() for path in shared)
    os.kill(engine.info.pid, signal.SIGKILL)
    died = await asyncio.wait_for(engine.wait_dead(), 20)
    assert (died.name, died.exit_code) == ("engine-0", -signal.SIGKILL)
    await engine.stop()
    assert not psutil.wait_procs(family, timeout=20)[1]
    assert not any(path.exists() for path in shared)


PARENT = """
import asyncio, json, sys
from pathlib import Path
from configs.schema import EngineConfig, PauseMode
from rollout_pool.engine import EngineSpec, SGLangEngine

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
