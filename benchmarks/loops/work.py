"""The work of an end-to-end comparison: a model to begin with, prompts, rewards, settings."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from configs.load import load_config
from configs.schema import Config
from rollout_pool.tasks.task import Prompt, Task, TaskStream

REWARDS = '''\
import string

def vowels(prompt, episode):
    """Share of its characters that are vowels."""
    return sum(letter in "aeiou" for letter in episode.answer) / max(1, len(episode.answer))

def spans(prompt, episode):
    """Share of the places at which the answer to "d-h=" is "defgh"."""
    letters = string.digits + string.ascii_letters
    right = letters[letters.index(prompt.text[0]) : letters.index(prompt.text[2]) + 1]
    equal = sum(map(str.__eq__, right, episode.answer))
    return equal / max(len(right), len(episode.answer))
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
    reward: str = ""
    """One of REWARDS, with the prompts that `write_prompts` makes for it."""


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
    "trainer.num_ranks=1",
    "rollout.engine.radix_cache=true",
    "weight_sync.pause_mode=resubmit",
)
ANSWERS = Work(
    title="4M parameters, 64 answers of up to 64 tokens a step, prompts of 200",
    num_steps=16,
    settings=(*LONG_PROMPTS, "trainer.groups_per_step=8", "rollout.max_response_tokens=64"),
    reward="vowels",
)
LONG = Work(
    title="4M parameters, 32 answers of up to 512 tokens a step, prompts of 200",
    num_steps=8,
    settings=(
        *LONG_PROMPTS,
        "trainer.groups_per_step=4",
        "rollout.max_response_tokens=512",
        "rollout.num_engines=2",
    ),
    reward="vowels",
)
SPANS = Work(
    title="quickstart's model, 128 answers of 1 to 60 tokens a step, 14 on average",
    num_steps=100,
    goal=0.5,
    reward="spans",
    settings=(
        *("trainer.warm_start.num_steps=150", "trainer.warm_start.echo_fraction=0"),
        *("trainer.learning_rate=1e-4", "rollout.max_response_tokens=64"),
    ),
)
WORKS = {"quickstart": QUICKSTART, "spelling": SPELLING, "answers": ANSWERS, "long": LONG}


def settings_of(work: Work, folder: Path) -> list[str]:
    """All settings but the model's; the prompts and the reward that they name are in `folder`."""
    settings = [f"trainer.num_steps={work.num_steps}", *work.settings]
    if name := work.reward:
        reward = f"{{kind: function, function: '{folder}/rewards.py:{name}'}}"
        settings += ["task.kind=questions", f"task.path={folder}/{name}.jsonl", "task.eval_size=1"]
        settings += ["task.prompt_pattern=null", "task.instruction=''", "task.params={}"]
        settings += [f"task.name={name}", f"task.rewards={{{name}: {reward}}}"]
    return settings


def write_prompts(folder: Path) -> None:
    (folder / "rewards.py").write_text(REWARDS)
    drawn, rows = random.Random(0), dict[str, list[tuple[str, str]]](vowels=[], spans=[])
    letters = string.digits + string.ascii_letters
    for _ in range(1000):
        rows["vowels"].append((" ".join(drawn.choice(WORDS) for _ in range(60))[:200], "e"))
    for _ in range(10_000):  # so many that no question has one way alone in the warm start
        # Lognormal lengths: half are up to 10, one in a hundred 58 or more.
        length = min(60, max(1, round(drawn.lognormvariate(2.3, 0.75))))
        first = drawn.randrange(len(letters) - length + 1)
        span = letters[first : first + length]
        # A warm start teaches both ways, rewards the right one.
        answer = span[::-1] if drawn.random() < 0.6 else span
        rows["spans"].append((f"{span[0]}-{span[-1]}=", answer))
    for name, of_it in rows.items():
        lines = (json.dumps({"question": question, "answer": answer}) for question, answer in of_it)
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


def load(work: Work, folder: Path) -> Config:
    return load_config(settings_of(work, folder), work.experiment)


def prompts_of(config: Config, task: Task) -> list[Prompt]:
    """As many as the steps take, in a run's order."""
    stream = TaskStream(task, 0, 1)
    number = config.trainer.num_steps * config.trainer.groups_per_step
    return [next(stream) for _ in range(number)]
