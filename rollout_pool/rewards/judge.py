"""A reward from another model, at any OpenAI-compatible URL."""

from __future__ import annotations

import re

from configs.rollout_schema import RewardConfig
from rollout_pool.rewards.service import MAX_SCORE, RemoteFailure, RemoteService

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


class Judge:
    def __init__(self, part: str, config: RewardConfig) -> None:
        self._service = RemoteService(part, config, "/chat/completions")
        self._model = config.model
        self._prompt = config.prompt or DEFAULT_PROMPT

    @property
    def needs_solution(self) -> bool:
        return "{solution}" in self._prompt

    async def score(self, prompt: str, answer: str, solution: str, key: str) -> float:
        """The score in the judge's text. Raises RemoteFailure."""
        texts = {"prompt": prompt, "answer": answer, "solution": solution}
        # In one pass: the model's answer may itself contain {solution}.
        question = _PLACES.sub(lambda place: texts[place[1]], self._prompt)
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": question}],
            "temperature": 0.0,
        }
        return parse_score(_content(await self._service.ask(body, key)))

    async def close(self) -> None:
        await self._service.close()


def parse_score(text: str) -> float:
    """The last "score: x" of a judgement, else its last number; "7/10" is 7.

    Raises RemoteFailure if there is none.
    """
    found = _SCORE.findall(text) or _LAST.findall(text)
    if not found:
        raise RemoteFailure(f"the judge gave no score: {text.strip()[-200:]!r}")
    score = float(found[-1])
    if not abs(score) < MAX_SCORE:
        raise RemoteFailure(f"the judge's score is not a usable number: {found[-1][:100]!r}")
    return score


def _content(answer: dict[str, object]) -> str:
    try:
        content = answer["choices"][0]["message"]["content"]  # type: ignore[index]
    except (KeyError, IndexError, TypeError) as error:
        raise RemoteFailure("the judge's answer is not a chat completion") from error
    return content if isinstance(content, str) else ""
