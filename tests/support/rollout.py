"""Shared by the tests of the rollout pool: specs, a tokenizer, fake samples, waiting."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from buffer.run_state import STREAM_START, RunState
from buffer.types import SamplingParams, VersionSpan
from configs.choices import PauseMode, ToolParser
from configs.rollout_schema import EngineConfig, RolloutConfig, TaskConfig
from configs.schema import BufferConfig, Config, WeightSyncConfig
from rollout_pool.cancelling import end_tasks
from rollout_pool.engines.engine import EngineSpec
from rollout_pool.episodes.chat import ChatFormat
from rollout_pool.episodes.conversation import Message
from rollout_pool.episodes.episode import Branch, Episode, EpisodeRequest
from rollout_pool.episodes.runner import EpisodeRunner
from rollout_pool.sampling.group_samples import GroupSamples
from rollout_pool.sampling.sample import Clock, Interrupted, Sample
from rollout_pool.tasks.env_episodes import environment_factory
from rollout_pool.tasks.registry import build_task
from rollout_pool.tasks.task import Prompt
from rollout_pool.types import RolloutSpec

T = TypeVar("T")


def engine_spec(**fields: Any) -> EngineSpec:
    """An engine without a GPU and without a model."""
    return EngineSpec(
        **{
            "name": "engine-0",
            "config": EngineConfig(),
            "pause_mode": PauseMode.retract,
            "model_path": "/none",
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
            "model_path": "/none",
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


def spaced_tokenizer(scheme: str, template: str | None = None) -> Any:
    """As SentencePiece: puts a space before a text, and with all schemes but "first" behind each
    special token. "normalizer": like Llama 2's."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["▁", "▁Bob", "▁Ada", "Bob", "Ada", "▁=", "\n", *map(chr, range(33, 127))]
    scores = [(name, 0.0) for name in ("<unk>", "<s>", "</s>")]
    scores += [(word, -float(place)) for place, word in enumerate(words, start=1)]
    made = Tokenizer(models.Unigram(scores, unk_id=0))
    if scheme == "normalizer":
        made.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        made.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    else:
        space = {"replacement": "▁", "prepend_scheme": scheme}
        made.pre_tokenizer = pre_tokenizers.Metaspace(**space)
        made.decoder = decoders.Metaspace(**space)
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
        chat_template=template,
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


class Says:
    """A model that gives these completions, as tokens, one after the other."""

    def __init__(self, *completions: Sequence[int]) -> None:
        self._completions = list(completions)

    async def complete(self, sample: Sample, clock: Clock | None = None) -> None:
        write(sample, self._completions.pop(0), version=0)
        sample.finish_reason = "stop"

    def interrupt(self, sample: Sample) -> None:
        raise AssertionError("unexpected interrupt")


async def play(
    config: Config, chat: ChatFormat, prompt: Prompt, *completions: Sequence[int]
) -> Episode:
    """One episode of `prompt` in its own environment, with these completions of the model."""
    environment = environment_factory(config.task, build_task(config.task))(prompt)
    runner = EpisodeRunner(Says(*completions), chat, config.task, config.rollout)
    return await runner.run(environment, EpisodeRequest(session="s", sampling=SamplingParams()))


def unmasked_branch(tokens: list[int]) -> Branch:
    """Tokens of which the model wrote none."""
    return Branch(
        tokens=tokens,
        loss_mask=[0] * len(tokens),
        logprobs=[0.0] * len(tokens),
        candidates=[()] * len(tokens),
        version_spans=[],
        prompt_length=1,
        finish_reason="stop",
    )


def ended_episode(*said: str, **fields: Any) -> Episode:
    """An episode without tokens: a question, and the model's last message."""
    roles = ("user", "assistant") if len(said) == 2 else ("assistant",)
    messages = tuple(Message(role=r, content=text) for r, text in zip(roles, said, strict=True))
    return Episode(
        **{"branches": [], "messages": messages, "end": "done", "num_turns": 1, **fields}
    )


class FakeCompleter:
    """Completes samples: the first token of the answer at once, the others when `hold` is over."""

    def __init__(self, answer: Callable[[Sample], str | Exception]) -> None:
        self.answer = answer
        """The text, or an error that is raised instead."""
        self.version = 0
        self.version_of: Callable[[Sample], int] = lambda _sample: self.version
        self.hold: Callable[[Sample], asyncio.Event | None] = lambda _sample: None
        self.pause_s = 0.0
        self.is_deaf = False
        """To the first cancellation of each sample, as code that swallows it."""
        self.asked: list[Sample] = []
        self.cancelled: list[str] = []
        self._stops: dict[Sample, asyncio.Event] = {}

    @property
    def prompts(self) -> list[str]:
        return ["".join(map(chr, sample.prompt)) for sample in self.asked]

    async def complete(self, sample: Sample, clock: Clock | None = None) -> None:
        # Before it can be seen in `asked`: tests change them then.
        go, version = self.hold(sample), self.version_of(sample)
        self.asked.append(sample)
        await asyncio.sleep(0)
        said = self.answer(sample)
        if isinstance(said, Exception):
            raise said
        tokens = [*map(ord, said), EOS]
        write(sample, tokens[len(sample.output_ids) : 1], version)
        if go is not None:
            stop = self._stops[sample] = asyncio.Event()
            await self._wait(sample, stop, go)
            if stop.is_set():
                raise Interrupted(sample.sample_id)
        await asyncio.sleep(self.pause_s)
        write(sample, tokens[len(sample.output_ids) :], self.version_of(sample))
        sample.finish_reason = "stop"

    async def _wait(self, sample: Sample, *events: asyncio.Event) -> None:
        waits = [asyncio.create_task(event.wait()) for event in events]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self.cancelled.append(sample.sample_id)
            if self.is_deaf:
                await asyncio.Event().wait()
            raise
        finally:
            await end_tasks(waits)

    def interrupt(self, sample: Sample) -> None:
        if sample in self._stops:
            self._stops[sample].set()


class RecordingSamples(GroupSamples):
    """Remembers the samples that began and ended."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self.begun: list[Sample] = []
        self.ended: list[Sample] = []

    def begin(self, sample: Sample) -> None:
        super().begin(sample)
        self.begun.append(sample)

    def end(self, sample: Sample) -> None:
        super().end(sample)
        self.ended.append(sample)


def place_of(sample: Sample) -> int:
    """Returns the place of the sample's episode in the group."""
    return int(sample.sample_id.split(".")[1])


def spans(sample: Sample) -> list[tuple[int, int, int]]:
    return [(span.version, span.start, span.end) for span in sample.version_spans]


async def until(condition: Callable[[], bool | Awaitable[bool]], timeout_s: float = 60.0) -> None:
    """Waits for an effect of another task or a server."""
    async with asyncio.timeout(timeout_s):
        while not (await is_so if inspect.isawaitable(is_so := condition()) else is_so):
            await asyncio.sleep(0.01)


async def until_read(
    read: Callable[[], Awaitable[T]], holds: Callable[[T], object] = bool, timeout_s: float = 60.0
) -> T:
    """Reads until what it reads is as wanted, and returns that."""
    async with asyncio.timeout(timeout_s):
        while not holds(found := await read()):
            await asyncio.sleep(0.01)
    return found


async def serves(state: RunState, wanted: Mapping[str, int], timeout_s: float = 60.0) -> None:
    """Waits until exactly these engines serve exactly these versions."""
    async with asyncio.timeout(timeout_s):
        seen = await state.engine_versions()
        while seen != wanted:
            seen = await state.wait_engines_changed(seen, timeout_s)


async def records(state: RunState, kind: str) -> list[Mapping[str, Any]]:
    """The run's metrics of one kind."""
    entries = await state.read_metrics(STREAM_START, block_s=0)
    return [entry.record for entry in entries if entry.kind == kind]
