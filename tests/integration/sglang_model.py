"""A small real model, the engine that serves it, and samples that are checked token by token."""

from __future__ import annotations

import time
from contextlib import aclosing
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from configs.choices import PauseMode
from configs.rollout_schema import EngineConfig
from rollout_pool.engines.engine import EngineSpec
from rollout_pool.generation import FirstToken, SampleRequest, Sampling

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


def engine_spec(model_path: Path, log_path: Path, *, max_restarts: int = 3) -> EngineSpec:
    return EngineSpec(
        name="engine-0",
        config=EngineConfig(
            max_running_requests=32,
            start_timeout_s=180,
            request_timeout_s=120,
            max_restarts=max_restarts,
        ),
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


def served_tensors(model: Qwen3ForCausalLM) -> dict[str, torch.Tensor]:
    """What a trainer publishes of it: lm_head is the embeddings under another name."""
    return {k: v for k, v in model.state_dict().items() if k != "lm_head.weight"}


def stage(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """As a receiver stages them."""
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    return folder


async def sample(client, count, *, max_new_tokens, temperature=1.0, on_begun=None, name=""):
    """The last event of each sample; calls `on_begun` once all have their first token."""
    requests = [
        SampleRequest(request_id=f"{name}{time.monotonic_ns()}.{i}", tokens=[*PROMPT, i])
        for i in range(count)
    ]
    sampling = Sampling(temperature=temperature, max_new_tokens=max_new_tokens)
    ends, begun = {}, set()
    async with aclosing(client.generate(requests, sampling)) as events:
        async for event in events:
            begun.add(event.index)  # one that ends with its first token has no other event
            if len(begun) == count and on_begun is not None:
                on_begun()
            if not isinstance(event, FirstToken):
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
