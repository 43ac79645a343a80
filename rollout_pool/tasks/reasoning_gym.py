"""Tasks of the reasoning-gym library: endless generated questions with verifiable answers."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Sequence
from typing import Any, cast

import reasoning_gym
from reasoning_gym.factory import DATASETS

from configs.rollout_schema import TaskConfig
from rollout_pool.tasks.task import (
    EVAL_SEED_OFFSET,
    Prompt,
    PromptCut,
    SingleTurnTask,
    check_params,
    draw_held_out,
)

CHUNK = 1000
"""Prompts per generator object. Prompt i is seeded with seed + i, so chunks join seamlessly, and
generators that build a table of `size` rows stay small."""


class _Questions:
    """Entry `index` of the endless sequence that begins at `seed`."""

    def __init__(self, config: TaskConfig, seed: int) -> None:
        self._name = config.name
        self._params = config.params
        self._seed = seed
        self._chunks: dict[int, Any] = {}

    def generator(self, chunk: int) -> Any:
        """A data set of the library, which has no types."""
        if chunk not in self._chunks:
            if len(self._chunks) == 4:  # drop the oldest; requeued prompts reach back a little
                self._chunks.pop(next(iter(self._chunks)))
            own = {"seed": self._seed + chunk * CHUNK, "size": CHUNK}
            self._chunks[chunk] = reasoning_gym.create_dataset(self._name, **self._params, **own)
        return self._chunks[chunk]

    def entry(self, index: int) -> dict[str, Any]:
        return cast(dict[str, Any], self.generator(index // CHUNK)[index % CHUNK])


class ReasoningGymTask(SingleTurnTask):
    """A reasoning-gym data set; the reward is the library's own score, from 0 to 1."""

    def __init__(self, config: TaskConfig) -> None:
        super().__init__(config)
        _check(config)
        self.name = config.name
        self._cut = PromptCut(config)
        self._training = _Questions(config, config.seed)
        self._held_out = _Questions(config, config.seed + EVAL_SEED_OFFSET)
        self._eval_indices = draw_held_out(
            self.name,
            config.eval_size,
            lambda index: self._cut(self._held_out.entry(index)["question"]),
        )

    def example(self, index: int) -> Prompt:
        text = self._cut(self._training.entry(index)["question"])
        return Prompt(index=index, is_held_out=False, text=text)

    def eval_prompts(self) -> Sequence[Prompt]:
        return [
            Prompt(index=place, is_held_out=True, text=text)
            for place, text in enumerate(self._eval_indices)
        ]

    def is_held_out(self, prompt: Prompt) -> bool:
        # A small task repeats questions under other seeds.
        return prompt.text in self._eval_indices

    def solution(self, prompt: Prompt) -> str:
        return str(self._entry(prompt)["answer"])

    def score(self, prompt: Prompt, completion: str) -> float:
        questions = self._held_out if prompt.is_held_out else self._training
        entry = self._entry(prompt)
        return float(questions.generator(0).score_answer(completion.strip(), entry))

    def _entry(self, prompt: Prompt) -> dict[str, Any]:
        if prompt.is_held_out:
            return self._held_out.entry(self._eval_indices[prompt.text])
        return self._training.entry(prompt.index)


def _check(config: TaskConfig) -> None:
    if config.name not in DATASETS:
        close = difflib.get_close_matches(config.name, DATASETS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"one of {', '.join(sorted(DATASETS))}"
        raise ValueError(f"task.name={config.name!r}: reasoning-gym has no such task; {hint}")
    for name, instead in (("seed", "seed"), ("size", "eval_size")):
        if name in config.params:
            raise ValueError(f"task.params.{name}: use task.{instead}")
    settings = {f.name for f in dataclasses.fields(DATASETS[config.name][1])}
    check_params(config, config.name, sorted(settings - {"seed", "size"}))
    try:
        _Questions(config, config.seed).entry(0)
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(
            f"task.params={config.params}: {config.name} refused them: {error}"
        ) from error
