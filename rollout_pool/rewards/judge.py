"""A reward from another model, at any OpenAI-compatible URL."""

from __future__ import annotations

import re

from rollout_pool.episodes.episode import Episode
from rollout_pool.rewards.service import MAX_SCORE, RemoteFailure, RemoteService
from rollout_pool.rewards.types import PartScore
from rollout_pool.tasks.task import Prompt

DEFAULT_PROMPT = """\
Judge an answer to a question.

Question:
{prompt}

Answer:
{answer}

How right and how helpful is the answer, from 0 (useless) to 1 (perfect)? Give your reasons in a \
few sentences, then end with a line "Score: x"."""
_PLACES = re.compile(r"\{(prompt|answer|solution)\}")
_NUMBER = r"([-+]?(?:\d+(?:\.\d*)?|\.\d+))(?:\s*/\s*\d+(?:\.\d+)?)?"
_SCORE = re.compile(rf"score\W{{0,5}}(?:is\s+)?{_NUMBER}", re.IGNORECASE)
_LAST = re.compile(_NUMBER)
_LONGEST = 100_000
"""Characters at the end of a judgement in which its score is looked for."""


class Judge(RemoteService):
    path = "/chat/completions"

    async def score(self, prompt: Prompt, episode: Episode, key: str) -> PartScore:
        """The score in the judge's text."""
        template = self.config.prompt or DEFAULT_PROMPT
        texts = {"prompt": prompt.text, "answer": episode.answer}
        if "{solution}" in template:
            texts["solution"] = self._solution(prompt)
        # In one pass: the completion may itself contain {solution}.
        question = _PLACES.sub(lambda place: texts[place[1]], template)
        body = {
            "model": self.config.model,
            "messages": [{"role": "user", "content": question}],
            "temperature": 0.0,
        }
        return PartScore(value=parse_score(_content(await self.ask(body, key))))

    def _solution(self, prompt: Prompt) -> str:
        assert self.task is not None
        try:
            return self.task.solution(prompt)
        except Exception as error:  # a user's task, or a data set without solutions
            why = f"{type(error).__name__}: {error}"
            raise RemoteFailure(f"no solution for the judge: {why}"[:500]) from error


def parse_score(text: str) -> float:
    """The last "score: x" of a judgement, else its last number; "7/10" is 7.

    Raises RemoteFailure if there is none.
    """
    text = text[-_LONGEST:]
    found = _SCORE.findall(text) or _LAST.findall(text)
    if not found:
        raise RemoteFailure(f"the judge gave no score: {text.strip()[-200:]!r}")
    score = float(found[-1])
    if not abs(score) < MAX_SCORE:
        raise RemoteFailure(f"the judge's score is not a usable number: {found[-1][:100]!r}")
    return score


def _content(response: dict[str, object]) -> str:
    try:
        content = response["choices"][0]["message"]["content"]  # type: ignore[index]
    except (KeyError, IndexError, TypeError) as error:
        raise RemoteFailure("the judge's response is not a chat completion") from error
    return content if isinstance(content, str) else ""


KIND = Judge
