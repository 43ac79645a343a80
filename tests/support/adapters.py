"""Adapters of the small real model, as they are sent and in the model by peft; requests that decode
under versions of them while others come."""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import peft
import torch
import transformers as hf

from configs.choices import PauseMode
from configs.schema import LoraConfig
from rollout_pool.cancelling import end_tasks
from rollout_pool.engines.sglang.client import SGLangClient
from rollout_pool.sampling.sample import Sample
from rollout_pool.types import AdapterSpec
from tests.support.sglang_model import SHAPE, Server, logprobs_of, make_sample
from trainer_pool.state.adapter import peft_config

LAYERS = ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")
ATTENTION = ("k_proj", "o_proj", "q_proj", "v_proj")
RANK, ALPHA = 8, 32
MIXTURE = {"tie_word_embeddings": False, "num_experts_per_tok": 2}
CONFIGS: dict[str, Callable[[], Any]] = {
    "Gemma3ForCausalLM": lambda: hf.Gemma3TextConfig(**SHAPE),
    "GraniteForCausalLM": lambda: hf.GraniteConfig(**SHAPE, residual_multiplier=0.5),
    "LlamaForCausalLM": lambda: hf.LlamaConfig(**SHAPE),
    "MistralForCausalLM": lambda: hf.MistralConfig(**SHAPE, sliding_window=None),
    "MixtralForCausalLM": lambda: hf.MixtralConfig(
        **SHAPE, **MIXTURE, num_local_experts=4, sliding_window=None
    ),
    "Olmo2ForCausalLM": lambda: hf.Olmo2Config(**SHAPE),
    "OlmoeForCausalLM": lambda: hf.OlmoeConfig(
        **{**SHAPE, "num_key_value_heads": 4}, **MIXTURE, num_experts=4
    ),
    "Qwen2ForCausalLM": lambda: hf.Qwen2Config(**SHAPE),
    "Qwen3ForCausalLM": lambda: hf.Qwen3Config(**SHAPE),
    "Qwen3MoeForCausalLM": lambda: hf.Qwen3MoeConfig(
        **SHAPE, **MIXTURE, num_experts=4, moe_intermediate_size=32
    ),
}
"""A small model of each of SGLang's classes that serve adapters by version."""


def build(served_by: str, folder: Path) -> Any:
    """A model of that class with random weights, norms among them."""
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(CONFIGS[served_by](), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model


def adapter_spec(num_slots: int, layers: Sequence[str] = LAYERS) -> AdapterSpec:
    return AdapterSpec(rank=RANK, alpha=ALPHA, layers=tuple(layers), num_slots=num_slots)


class AdaptedModel:
    """`model` with the adapter of one version after the other, which has these layers."""

    def __init__(self, model: Any, layers: Sequence[str] = LAYERS) -> None:
        config = peft_config(LoraConfig(rank=RANK, alpha=ALPHA), "none", list(layers))
        config.base_model_name_or_path = None  # the model does not know where it is from
        self._adapted = peft.get_peft_model(copy.deepcopy(model), config)
        self.without = ""
        """A layer that `at` leaves out."""

    def tensors(self, version: int) -> dict[str, torch.Tensor]:
        """As a trainer sends them; B is as far from 0 as A."""
        generator = torch.Generator().manual_seed(version)
        state = peft.get_peft_model_state_dict(self._adapted)
        return {n: 0.1 * torch.randn(t.shape, generator=generator) for n, t in state.items()}

    def at(self, version: int) -> Any:
        """The model of this version until the next call."""
        tensors = self.tensors(version)
        if self.without:
            tensors |= {n: t.zero_() for n, t in tensors.items() if f".{self.without}." in n}
        peft.set_peft_model_state_dict(self._adapted, tensors)
        return self._adapted.eval()

    def worst_difference(self, samples: list[Sample]) -> float:
        """The largest one of a token's log-probability from that of its version's adapter."""
        worst = 0.0
        for version in sorted({span.version for s in samples for span in s.version_spans}):
            model = self.at(version)
            for each in samples:
                spans = [span for span in each.version_spans if span.version == version]
                if spans:
                    wrong = (logprobs_of(model, each, 1.0) - torch.tensor(each.logprobs)).abs()
                    worst = max([worst, *(float(wrong[s.start : s.end].max()) for s in spans)])
        return worst


def adapter_server(
    folder: Path, num_slots: int, max_running: int, layers: Sequence[str] = LAYERS
) -> Server:
    mode = PauseMode.resubmit
    server = Server(folder, "engine-of-adapters", mode, adapter=adapter_spec(num_slots, layers))
    spec = server.engine.spec
    config = replace(spec.config, max_running_requests=max_running)
    server.engine.spec = replace(spec, config=config)
    return server


async def loaded_versions(server: Server) -> set[int]:
    headers = {"Authorization": f"Bearer {server.engine.spec.key}"}
    async with httpx.AsyncClient(
        base_url=server.engine.info.url, headers=headers, trust_env=False
    ) as client:
        models = (await client.get("/v1/models")).json()["data"]
    return {int(model["id"]) for model in models if model["id"].isdecimal()}


class Crowd:
    """Keeps requests in flight, of which every third is aborted somewhere, also in the queue."""

    NUM_TOKENS = 8, 64

    def __init__(self, client: SGLangClient, number: int) -> None:
        self.ended: list[Sample] = []
        self.num_aborted = 0
        self.turn = asyncio.Semaphore(0)
        """Released as one ends by itself: aborts come at their own pace, on a slow machine too."""
        self._client = client
        self._is_leaving = False
        self._dice = random.Random(number)
        self._tasks = [asyncio.create_task(self._go_on(i)) for i in range(number)]

    async def _go_on(self, index: int) -> None:
        while not self._is_leaving:
            length = self._dice.randint(*self.NUM_TOKENS)
            each = make_sample(index, max_new_tokens=length, name=f"crowd.{index}.")
            call = asyncio.create_task(self._client.generate_tokens(each, f"{each.sample_id}!"))
            is_aborted = self._dice.random() < 1 / 3
            try:
                await asyncio.wait({call}, timeout=self._dice.uniform(0, 1) if is_aborted else None)
                self.num_aborted += not call.done()
            finally:
                await end_tasks({call})
            if not call.cancelled():
                call.result()
                self.ended.append(each)
                self.turn.release()

    async def leave(self) -> None:
        """Returns as those in flight have ended; raises what one of them has raised."""
        self._is_leaving = True
        await asyncio.gather(*self._tasks)
