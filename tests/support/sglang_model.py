"""Small real models, the servers that serve them, and samples checked token by token."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from buffer.types import SamplingParams
from configs.choices import PauseMode
from configs.rollout_schema import EngineConfig
from configs.schema import WeightSyncConfig
from rollout_pool.engines.commit import Committer
from rollout_pool.engines.engine import EngineSpec
from rollout_pool.engines.sglang.client import SGLangClient
from rollout_pool.engines.sglang.engine import SGLangEngine
from rollout_pool.sampling.sample import Sample
from rollout_pool.types import AdapterSpec
from tensors.layout import Layout, TensorSpec
from tests.support import rollout
from weight_sync.types import Manifest

EOS = 258
PROMPT = [257, 5, 17, 99, 200, 33, 42]


SHAPE: dict[str, Any] = {
    "vocab_size": 264,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "bos_token_id": 257,
    "eos_token_id": EOS,
    "pad_token_id": 256,
    "initializer_range": 0.2,
    "dtype": "float32",
}


def build_model(folder: Path, seed: int) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(**SHAPE, tie_word_embeddings=True)).float().eval()
    model.save_pretrained(folder)
    return model


def engine_spec(
    model_path: Path,
    log_path: Path,
    *,
    max_restarts: int = 3,
    name: str = "engine-0",
    pause_mode: PauseMode = PauseMode.resubmit,
) -> EngineSpec:
    return rollout.engine_spec(
        name=name,
        config=EngineConfig(
            max_running_requests=32,
            start_timeout_s=180,
            request_timeout_s=120,
            max_restarts=max_restarts,
            radix_cache=pause_mode is not PauseMode.retract,
        ),
        pause_mode=pause_mode,
        model_path=str(model_path),
        log_path=log_path,
        leftovers_path=log_path.with_suffix(".leftovers"),
        key="k3y-of-this-test",  # which is looked for in the log
    )


def served_tensors(model: Qwen3ForCausalLM) -> dict[str, torch.Tensor]:
    """Returns the tensors that a trainer publishes: lm_head is the embeddings again."""
    return {k: v for k, v in model.state_dict().items() if k != "lm_head.weight"}


def manifest_of(version: int, tensors: dict[str, torch.Tensor]) -> Manifest:
    """As a trainer of one rank sends it with them."""
    layout = Layout.of(
        [
            TensorSpec(name=name, dtype="float32", shape=tuple(tensor.shape))
            for name, tensor in tensors.items()
        ],
        num_ranks=1,
    )
    sums = [crc32(tensors[tensor.name].numpy().tobytes()) for tensor in layout.tensors]
    return Manifest.of(version, layout, (tuple(sums),))


def stage(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """As a receiver stages them."""
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    return folder


class Server:
    """A real server of model a, and versions that it commits."""

    def __init__(
        self,
        folder: Path,
        name: str,
        pause_mode: PauseMode,
        tp_size: int = 1,
        adapter: AdapterSpec | None = None,
    ) -> None:
        self.name = name
        self.folder = folder
        log_path = folder / f"{name}.log"
        spec = engine_spec(folder / "a", log_path, name=name, pause_mode=pause_mode)
        config = replace(spec.config, tp_size=tp_size)
        self.engine = SGLangEngine(replace(spec, config=config, adapter=adapter))
        self.newest = -1

    async def start(self) -> None:
        await self.engine.start()
        await self.open()

    async def open(self) -> None:
        """For the server that runs now."""
        self.engine.client.end_tokens = {EOS}  # as a worker's
        self._strategy = self.engine.strategy(WeightSyncConfig())
        await self._strategy.check()

    def client(self, stream_interval: int, **settings) -> SGLangClient:
        """A worker's client; the caller closes it."""
        return SGLangClient(
            self.name,
            self.engine.info.url,
            key=self.engine.spec.key,
            request_timeout_s=60,
            stream_interval=stream_interval,
            **settings,
        )

    def stage(self, tensors: dict[str, torch.Tensor]) -> tuple[int, Path]:
        """The next version's number and folder."""
        self.newest += 1
        return self.newest, stage(self.folder / f"{self.name}-staged-{self.newest}", tensors)

    def committer(self, pause_mode=None):
        mode = pause_mode or self.engine.spec.pause_mode
        return Committer(self.engine.client, self._strategy, mode)

    async def publish(self, model, pause_mode=None):
        return await self.publish_tensors(served_tensors(model), pause_mode)

    async def publish_tensors(self, tensors, pause_mode=None):
        report = await self.committer(pause_mode).commit(*self.stage(tensors))
        self.engine.client.note_version(report.version)  # as a worker's router does
        return report

    async def close(self) -> None:
        await self._strategy.close()


def make_sample(
    index, *, max_new_tokens, temperature=1.0, name="", prompt=PROMPT, group="", **sampling
):
    return Sample(
        sample_id=f"{name}{time.monotonic_ns()}.{index}",
        prompt=[*prompt, index],
        sampling=SamplingParams(temperature=temperature, **sampling),
        max_new_tokens=max_new_tokens,
        group=group,
    )


async def sample(client, count, *, max_new_tokens, on_begun=None, **fields):
    """Ended samples; calls `on_begun` once all have their first token."""
    samples = [make_sample(i, max_new_tokens=max_new_tokens, **fields) for i in range(count)]

    def on_arrival():
        if on_begun is not None and all(sample.output_ids for sample in samples):
            on_begun()

    calls = [
        client.generate_tokens(sample, f"{sample.sample_id}!", on_arrival) for sample in samples
    ]
    ends = await asyncio.gather(*calls, return_exceptions=True)
    for end in ends:
        if end is not None:
            raise end
    assert all(sample.finish_reason for sample in samples)
    assert not any(EOS in sample.output_ids[:-1] for sample in samples)
    return samples


def logprobs_of(model, sample, temperature):
    """Hugging Face's log-probability of each token that the engine sampled, of its candidates."""
    tokens = torch.tensor([[*sample.prompt, *sample.output_ids]])
    with torch.no_grad():
        logits = model(tokens).logits[0, len(sample.prompt) - 1 : -1] / temperature
    if sample.candidates:
        left = torch.full_like(logits, -torch.inf)
        for row, ids in enumerate(sample.candidates):
            left[row, list(ids)] = logits[row, list(ids)]
        logits = left
    return logits.log_softmax(-1).gather(1, tokens[0, len(sample.prompt) :, None])[:, 0]


def worst_difference(model, samples, temperature):
    return max(
        (logprobs_of(model, s, temperature) - torch.tensor(s.logprobs)).abs().max().item()
        for s in samples
    )
