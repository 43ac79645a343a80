"""Sorting names alphabetically, with more names at each turn.

    Ida Bob =        ──►  Bob Ida            all in place: 1
    + Eva =          ──►  Eva Bob Ida        one name of three in its place: 1/3

A turn's score is the fraction of names in their places; the episode's reward is the mean over its
turns. With a chat template the questions are whole sentences.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, fields

from configs.rollout_schema import TaskConfig
from rollout_pool.episodes.conversation import Completion, Message, opening
from rollout_pool.episodes.environment import Env, Observation, Step
from rollout_pool.tasks.task import EVAL_SEED_OFFSET, Prompt, check_params, draw_held_out

# Names to sort, the shortest first; each list has no duplicates.
_FIRST = (
    # The first twenty have different initials.
    "Ada Bob Cal Dan Eva Fay Gus Hal Ida Joe Kim Lou Max Ned Pam Ray Sue Tom Una Zoe "
    "Amy Ben Dee Eli Gil Ian Jan Ken Leo Mia Nia Pat Ron Sam Ted Val Wes Abe Bea Lea "
    "Alma Bert Cora Dora Emil Fern Gwen Hugo Iris Jude Kurt Lena Mila Nora Otto Paul Rosa Saul "
    "Theo Vera Walt Yara"
)
_FAMILY = (
    "Ash Bell Cole Dunn Ek Frey Gray Holm Ito Jung Kerr Lund Moss Nash Orr Park Quist Reed Stone "
    "Todd Ueda Voss Webb Xu York Zorn Abbas Boyd Cruz Diaz Egan Fox Gale Hill Ives Jain Khan Levy "
    "Mora Neri Oduya Pohl Rao Sato Tran Urban Vega Wolf Young Zeller Amato Bauer Costa Duval "
    "Evans Fuchs Grant Hayes Irwin Jonas Klein Lopez"
)

FIRST_NAMES = tuple(_FIRST.split())
FAMILY_NAMES = tuple(_FAMILY.split())


@dataclass(kw_only=True, slots=True, frozen=True)
class SortParams:
    """The parameters in `task.params`."""

    num_turns: int = 3
    num_names_first: int = 4
    """Names in the first turn."""
    num_names_more: int = 2
    """Names added in each further turn."""
    sort_by: str = "first"
    """first or last."""
    last_names: bool = True
    """True gives each name a last name."""
    num_known: int = len(FIRST_NAMES)
    """Number of names to draw from, the shortest first."""


Names = tuple[tuple[str, ...], ...]
"""The new names of each turn."""


class AlphabetSortTask:
    """Names are drawn by seed and index, without repeats within an episode."""

    name = "alphabet_sort"

    def __init__(self, config: TaskConfig) -> None:
        self._params = read_params(config)
        self._seed = config.seed
        self._system_prompt = config.system_prompt
        self._is_chat, self._instruction = config.chat_template, config.instruction
        self._separator = ", " if self._params.last_names else " "
        self._eval_indices = draw_held_out(
            self.name, config.eval_size, lambda index: self._draw(index, is_held_out=True)
        )
        self._held_out = list(self._eval_indices)

    def example(self, index: int) -> Prompt:
        names = self._draw(index, is_held_out=False)
        return Prompt(index=index, is_held_out=False, text=self._question(names[0], 0))

    def eval_prompts(self) -> Sequence[Prompt]:
        return [
            Prompt(index=place, is_held_out=True, text=self._question(names[0], 0))
            for place, names in enumerate(self._held_out)
        ]

    def is_held_out(self, prompt: Prompt) -> bool:
        return self._names(prompt) in self._eval_indices

    def solution(self, prompt: Prompt) -> str:
        """The right completion of the last turn."""
        return self._separator.join(self.turns(prompt)[-1][1])

    def score(self, prompt: Prompt, completion: str) -> float:
        """The last turn's score; the environment's reward is the mean over all turns."""
        return self.score_turn(completion, self.turns(prompt)[-1][1])

    def score_turn(self, completion: str, order: Sequence[str]) -> float:
        """Reads the names on the last line of `completion` that is not blank."""
        lines = [line for line in completion.splitlines() if line.strip()] or [""]
        parts = lines[-1].split(self._separator.strip() or None)
        return fraction_in_place([" ".join(one.split()) for one in parts if one.strip()], order)

    def environment(self, prompt: Prompt) -> Env:
        return SortEnv(self, self.turns(prompt), self._system_prompt)

    def demonstration(self, prompt: Prompt) -> tuple[Message, ...]:
        messages: list[Message] = []
        for question, order in self.turns(prompt):
            messages += opening(question, None if messages else self._system_prompt)
            messages.append(Message(role="assistant", content=self._separator.join(order)))
        return tuple(messages)

    def turns(self, prompt: Prompt) -> list[tuple[str, list[str]]]:
        """Each turn's question, and all names so far in the right order."""
        turns, so_far = [], list[str]()
        place = 0 if self._params.sort_by == "first" else -1
        for number, new in enumerate(self._names(prompt)):
            so_far += new
            order = sorted(so_far, key=lambda name: name.split()[place])
            turns.append((self._question(new, number), order))
        return turns

    def _question(self, new: Sequence[str], turn: int) -> str:
        """A sentence, or a bare line for a base model."""
        names = self._separator.join(new)
        if not self._is_chat:
            return f"{'+ ' if turn else ''}{names} ={self._instruction}"
        if turn:
            return f"Add these, and give all names so far in the same order: {names}"
        by = f"{self._params.sort_by} names"
        return (
            f"Put these people into the alphabetical order of their {by}. Answer with one line "
            "that holds nothing but the names, as they are written here: "
            f"{names}{self._instruction}"
        )

    def _names(self, prompt: Prompt) -> Names:
        if prompt.is_held_out:
            return self._held_out[prompt.index]
        return self._draw(prompt.index, is_held_out=False)

    def _draw(self, index: int, *, is_held_out: bool) -> Names:
        params = self._params
        chance = random.Random(f"{self._seed + EVAL_SEED_OFFSET * is_held_out}/{index}")
        counts = [params.num_names_first] + [params.num_names_more] * (params.num_turns - 1)
        # No first or last name twice, so that the order is unique.
        drawn = chance.sample(FIRST_NAMES[: params.num_known], sum(counts))
        if params.last_names:
            family = chance.sample(FAMILY_NAMES[: params.num_known], sum(counts))
            drawn = [f"{first} {last}" for first, last in zip(drawn, family, strict=True)]
        rest = iter(drawn)
        return tuple(tuple(next(rest) for _ in range(count)) for count in counts)


class SortEnv(Env):
    """One episode; `turns` are its questions and right orders."""

    def __init__(
        self,
        task: AlphabetSortTask,
        turns: Sequence[tuple[str, Sequence[str]]],
        system_prompt: str | None,
    ) -> None:
        self._task = task
        self._turns = turns
        self._system_prompt = system_prompt
        self._turn = 0

    async def reset(self) -> Observation:
        return Observation.user(self._turns[0][0], self._system_prompt)

    async def step(self, completion: Completion) -> Step:
        score = self._task.score_turn(completion.content, self._turns[self._turn][1])
        info = {f"turn_{self._turn}": score}
        self._turn += 1
        is_over = self._turn == len(self._turns)
        observation = None if is_over else Observation.user(self._turns[self._turn][0])
        # Rewards are summed, so this gives the mean.
        return Step(observation=observation, reward=score / len(self._turns), info=info)


def fraction_in_place(given: Sequence[str], right: Sequence[str]) -> float:
    """The fraction of the names that are in their places, relative to the longer list.

    Example: [Eva, Bob, Ida] for [Bob, Eva, Ida] is 1/3.
    """
    same = sum(mine == its for mine, its in zip(given, right, strict=False))
    return same / max(len(given), len(right))


def read_params(config: TaskConfig) -> SortParams:
    """Raises ValueError naming the parameter, its value and the fix."""
    kinds = {field.name: type(field.default) for field in fields(SortParams)}
    check_params(config, "alphabet_sort", kinds)
    for name, value in config.params.items():
        if type(value) is not kinds[name]:
            raise ValueError(
                f"task.params.{name}={value!r}: must be of type {kinds[name].__name__}"
            )
    params = SortParams(**config.params)
    for name in ("num_turns", "num_names_first", "num_names_more"):
        if getattr(params, name) < 1:
            raise ValueError(f"task.params.{name}={getattr(params, name)!r}: must be at least 1")
    if params.sort_by not in ("first", "last"):
        raise ValueError(f"task.params.sort_by={params.sort_by!r}: must be first or last")
    if params.sort_by == "last" and not params.last_names:
        raise ValueError(
            "task.params.sort_by='last': names have none with last_names=false; set last_names=true"
        )
    if config.max_turns < params.num_turns:
        raise ValueError(
            f"task.max_turns={config.max_turns}: an episode has task.params.num_turns="
            f"{params.num_turns} turns; set task.max_turns={params.num_turns}"
        )
    num_names = params.num_names_first + (params.num_turns - 1) * params.num_names_more
    num_known = min(params.num_known, len(FIRST_NAMES))
    if num_names > num_known:
        raise ValueError(
            f"task.params: an episode needs {num_names} names, but there are only {num_known} to "
            "draw from; lower num_turns, num_names_first or num_names_more, or raise "
            f"num_known, up to {len(FIRST_NAMES)}"
        )
    return params
