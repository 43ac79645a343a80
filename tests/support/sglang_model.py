"""Small real models, the servers that serve them, and samples checked token by token."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from buffer.types import SamplingParams
from configs.choices import CommitStrategy, PauseMode
from configs.rollout_schema import EngineConfig
from configs.schema import WeightSyncConfig
from rollout_pool.engines.client import SGLangClient
from rollout_pool.engines.commit import Committer
from rollout_pool.engines.engine import EngineSpec, SGLangEngine
from rollout_pool.engines.strategies import make_strategy
from rollout_pool.sampling.sample import Sample

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


def engine_spec(
    model_path: Path,
    log_path: Path,
    *,
    max_restarts: int = 3,
    name: str = "engine-0",
    pause_mode: PauseMode = PauseMode.resubmit,
) -> EngineSpec:
    return EngineSpec(
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
        trust_remote_code=False,
        host="127.0.0.1",
        log_path=log_path,
        leftovers_path=log_path.with_suffix(".leftovers"),
        num_threads=1,
        uses_gpu=False,
        seed=0,
        key="k3y-of-this-test",
    )


def served_tensors(model: Qwen3ForCausalLM) -> dict[str, torch.Tensor]:
    """What a trainer publishes of it: lm_head is the embeddings under another name."""
    return {k: v for k, v in model.state_dict().items() if k != "lm_head.weight"}


def stage(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """As a receiver stages them."""
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    return folder


class Server:
    """A real server of model a, and versions that it commits by either strategy."""

    def __init__(self, folder: Path, name: str, pause_mode: PauseMode, tp_size: int = 1) -> None:
        self.name = name
        self.folder = folder
        log_path = folder / f"{name}.log"
        spec = engine_spec(folder / "a", log_path, name=name, pause_mode=pause_mode)
        config = replace(spec.config, tp_size=tp_size)
        self.engine = SGLangEngine(replace(spec, config=config))
        self.newest = -1
        self._strategies = {}

    async def start(self) -> None:
        await self.engine.start()
        await self.open()

    async def open(self) -> None:
        """For the server that runs now."""
        self.engine.client._end_tokens = {EOS}  # as a worker's
        for choice in (CommitStrategy.staged_disk, CommitStrategy.direct):
            config = WeightSyncConfig(commit=choice, bucket_bytes=100_000)
            tp_size = self.engine.spec.config.tp_size
            strategy = make_strategy(self.engine.client, config, tp_size=tp_size, host="127.0.0.1")
            await strategy.check()
            self._strategies[choice] = strategy

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

    def committer(self, choice, pause_mode=None):
        mode = pause_mode or self.engine.spec.pause_mode
        return Committer(self.engine.client, self._strategies[choice], mode)

    async def publish(self, model, choice=CommitStrategy.staged_disk, **settings):
        committer = self.committer(choice, **settings)
        report = await committer.commit(*self.stage(served_tensors(model)))
        self.engine.client.note_version(report.version)  # as a worker's router does
        return report

    async def close(self) -> None:
        for strategy in self._strategies.values():
            await strategy.close()


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

    calls = [client.generate(sample, f"{sample.sample_id}!", on_arrival) for sample in samples]
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
