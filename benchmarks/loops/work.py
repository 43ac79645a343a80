"""The work of an end-to-end comparison: a model to begin with, prompts, rewards, settings."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from configs.load import load_config
from configs.schema import Config
from rollout_pool.tasks.task import Prompt, Task, TaskStream

REWARD = '''\
def score(prompt, episode):
    """Share of its characters that are vowels."""
    return vowels(episode.answer)


def vowels(answer):
    return sum(letter in "aeiou" for letter in answer) / max(1, len(answer))
'''
WORDS = (
    *("the", "of", "and", "rain", "stone", "river", "light", "under"),
    *("seven", "paper", "window", "garden", "north", "silver"),
)


@dataclass(kw_only=True, slots=True, frozen=True)
class Work:
    """Settings beside those of an experiment, and what counts as learnt."""

    title: str
    num_steps: int
    experiment: str = "quickstart"
    settings: Sequence[str] = ()
    goal: float | None = None
    """A mean reward that a learner reaches within `num_steps`; without: only speed is compared."""


QUICKSTART = Work(
    title="quickstart: 0.4M parameters, 128 answers of 5 tokens a step",
    num_steps=60,
    goal=0.85,
)
CALCULATOR = Work(
    title="calculator: 64 episodes of up to two answers, with a tool, a step",
    experiment="calculator",
    num_steps=30,
    goal=0.75,
)
FOUR_MILLION = (
    "model.scratch.hidden_size=256",
    "model.scratch.intermediate_size=1024",
    "model.scratch.num_layers=4",
    "model.scratch.num_kv_heads=4",
    "model.scratch.head_dim=64",
)
SPELLING = Work(
    title="the quickstart's task with 4M parameters, 128 answers of 5 tokens a step",
    num_steps=60,
    settings=FOUR_MILLION,
    goal=0.85,
)
LONG_PROMPTS = (
    *FOUR_MILLION,
    "trainer.warm_start.num_steps=0",
    "rollout.sampling.temperature=1",
    "rollout.max_prompt_tokens=224",
    "trainer.num_ranks=2",
    "rollout.engine.radix_cache=true",
    "weight_sync.pause_mode=resubmit",
)
ANSWERS = Work(
    title="4M parameters, 64 answers of up to 64 tokens a step, prompts of 200",
    num_steps=16,
    settings=(*LONG_PROMPTS, "trainer.groups_per_step=8", "rollout.max_response_tokens=64"),
)
LONG = Work(
    title="4M parameters, 32 answers of up to 512 tokens a step, prompts of 200",
    num_steps=8,
    settings=(*LONG_PROMPTS, "trainer.groups_per_step=4", "rollout.max_response_tokens=512"),
)
WORKS = {"quickstart": QUICKSTART, "spelling": SPELLING, "answers": ANSWERS, "long": LONG}


def settings_of(work: Work, folder: Path) -> list[str]:
    """All settings but the model's; the prompts and the reward that they name are in `folder`."""
    settings = [f"trainer.num_steps={work.num_steps}", *work.settings]
    if work.goal is None:
        reward = f"{{kind: function, function: '{folder}/reward.py:score'}}"
        settings += ["task.kind=questions", f"task.path={folder}/prompts.jsonl", "task.eval_size=1"]
        settings += ["task.prompt_pattern=null", "task.instruction=''", "task.params={}"]
        settings += ["task.name=prompts", f"task.rewards={{vowels: {reward}}}"]
    return settings


def write_prompts(folder: Path) -> None:
    (folder / "reward.py").write_text(REWARD)
    drawn = random.Random(0)
    with (folder / "prompts.jsonl").open("w") as lines:
        for _ in range(1000):
            text = " ".join(drawn.choice(WORDS) for _ in range(60))[:200]
            lines.write(json.dumps({"question": text, "answer": "e"}) + "\n")


def load(work: Work, folder: Path) -> Config:
    return load_config(settings_of(work, folder), work.experiment)


def prompts_of(config: Config, task: Task) -> list[Prompt]:
    """As many as the steps take, in a run's order."""
    stream = TaskStream(task, 0, 1)
    number = config.trainer.num_steps * config.trainer.groups_per_step
    return [next(stream) for _ in range(number)]
