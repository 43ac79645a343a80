"""Shared by the tests of the rollout pool: specs, a tokenizer, fake samples, waiting."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from buffer.types import SamplingParams, VersionSpan
from configs.choices import PauseMode, ToolParser
from configs.rollout_schema import EngineConfig, RolloutConfig, TaskConfig
from configs.schema import BufferConfig, WeightSyncConfig
from rollout_pool.engines.engine import EngineSpec
from rollout_pool.episodes.chat import ChatFormat
from rollout_pool.sampling.sample import Sample
from rollout_pool.types import RolloutSpec


def engine_spec(**fields: Any) -> EngineSpec:
    """An engine without a GPU and without a model."""
    return EngineSpec(
        **{
            "name": "engine-0",
            "config": EngineConfig(),
            "pause_mode": PauseMode.retract,
            "model_path": "none",
            "trust_remote_code": False,
            "host": "127.0.0.1",
            "log_path": Path("/nowhere/engine.log"),
            "leftovers_path": Path("/nowhere/leftovers"),
            "num_threads": 1,
            "uses_gpu": False,
            "seed": 0,
            "key": "a-key",
            **fields,
        }
    )


def rollout_spec(**fields: Any) -> RolloutSpec:
    """Engines without a GPU, at `redis_url`, of `run`, with the folder `run_dir`."""
    return RolloutSpec(
        **{
            "config": RolloutConfig(),
            "task": TaskConfig(),
            "weight_sync": WeightSyncConfig(),
            "buffer": BufferConfig(),
            "model_path": "none",
            "trust_remote_code": False,
            "host": "127.0.0.1",
            "num_threads": 1,
            "uses_gpu": False,
            "seed": 0,
            "engine_key": "a-key",
            "weights_key": "another-key",
            **fields,
        }
    )


class Letters:
    """A tokenizer with one token per byte, without heavy libraries."""

    eos_token_id = 0
    added_tokens_decoder: ClassVar[Mapping[int, Any]] = {}

    def __len__(self) -> int:
        return 256

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [*text.encode()]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        written = bytes(t for t in token_ids if t or not skip_special_tokens)
        return written.decode(errors="replace")

    def apply_chat_template(self, conversation: Any, **_settings: Any) -> str:
        raise AssertionError("not asked for")


EOS = Letters.eos_token_id


def plain_chat() -> ChatFormat:
    """Letters, without a template."""
    return ChatFormat(Letters(), chat_template=False, tool_parser=ToolParser.hermes)


def merging_tokenizer(
    merges: Sequence[tuple[str, str]],
    specials: Sequence[str],
    template: str | None,
    **settings: str,
) -> Any:
    """Bytes with merges, so that nearly every text has more than one spelling."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from trainer_pool.model.scratch import byte_tokenizer

    vocab = {token: place for token, place in byte_tokenizer().get_vocab().items() if place < 256}
    for left, right in merges:
        vocab[left + right] = len(vocab)
    vocab |= {name: len(vocab) + place for place, name in enumerate(specials)}
    made = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        additional_special_tokens=list(specials),
        clean_up_tokenization_spaces=False,
        chat_template=template,
        **settings,
    )


def make_sample(number: int = 0, **fields: Any) -> Sample:
    return Sample(
        **{
            "sample_id": f"g.{number}",
            "prompt": [5, 6, 7],
            "sampling": SamplingParams(temperature=0.7),
            "max_new_tokens": 8,
            **fields,
        }
    )


def write(sample: Sample, tokens: Sequence[int], version: int, logprob: float = -0.5) -> None:
    """Appends to the sample what an engine at `version` wrote."""
    if tokens:
        start = len(sample.output_ids)
        sample.output_ids += tokens
        sample.logprobs += [logprob] * len(tokens)
        sample.version_spans.append(
            VersionSpan(version=version, start=start, end=len(sample.output_ids))
        )


def spans(sample: Sample) -> list[tuple[int, int, int]]:
    return [(span.version, span.start, span.end) for span in sample.version_spans]


async def until(condition: Callable[[], bool | Awaitable[bool]], timeout_s: float = 20.0) -> None:
    """Waits for an effect of another task or a server."""
    async with asyncio.timeout(timeout_s):
        while not (await is_so if inspect.isawaitable(is_so := condition()) else is_so):
            await asyncio.sleep(0.01)
