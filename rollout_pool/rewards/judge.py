"""A reward from another model, at any OpenAI-compatible URL."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping

from configs.rollout_schema import Criterion
from rollout_pool.episodes.episode import Episode
from rollout_pool.episodes.thoughts import split_thoughts
from rollout_pool.rewards.service import MAX_SCORE, RemoteFailure, RemoteService
from rollout_pool.rewards.types import PartScore
from rollout_pool.tasks.task import Prompt

_CASE = """\
Judge an answer to a question.

Question:
{prompt}

Answer:
{answer}

"""
DEFAULT_PROMPT = f"""\
{_CASE}\
How right and how helpful is the answer, from 0 (useless) to 1 (perfect)? Give your reasons in a \
few sentences, then end with a line "Score: x"."""
RUBRIC_PROMPT = _CASE + "{rubric}"
_PLACES = re.compile(r"\{(prompt|answer|solution|rubric)\}")
_NUMBER = r"([-+]?(?:\d+(?:\.\d*)?|\.\d+))(?:\s*/\s*(\d+(?:\.\d+)?))?"
_SCORE = re.compile(rf"score\W{{0,5}}?(?:is\s+)?{_NUMBER}", re.IGNORECASE)
_LAST = re.compile(_NUMBER)
_OBJECT = re.compile(r"(?s)\s*(?:```(?:json)?\s*)?(\{.*\})\s*(?:```\s*)?")
_LONGEST = 100_000
"""Characters at the end of a judgement in which its score is looked for."""


class Judge(RemoteService):
    path = "/chat/completions"

    async def score(self, prompt: Prompt, episode: Episode, key: str) -> PartScore:
        """The score in the judge's text, or the mean of those by the criteria of a rubric, which
        are further parts."""
        rubric = self.config.rubric
        template = self.config.prompt or (RUBRIC_PROMPT if rubric else DEFAULT_PROMPT)
        texts = {"prompt": prompt.text, "answer": episode.answer, "rubric": rubric_text(rubric)}
        if "{solution}" in template:
            texts["solution"] = self._solution(prompt)
        # In one pass: the completion may itself contain {solution}.
        question = _PLACES.sub(lambda place: texts[place[1]], template)
        body = {
            "model": self.config.model,
            "messages": [{"role": "user", "content": question}],
            "temperature": 0.0,
        }
        judgement = _content(await self.ask(body, key))
        if not rubric:
            is_default = self.config.prompt is None
            score = parse_score(judgement, is_share=is_default)
            if is_default and not 0 <= score <= 1:
                raise RemoteFailure(f"the judge's score must be from 0 to 1: {score:g}")
            return PartScore(value=score)
        scores = parse_rubric(judgement, rubric)
        weights = {name: one.weight for name, one in rubric.items()}
        total = sum(weight * scores[name] for name, weight in weights.items())
        return PartScore(value=total / sum(weights.values()), parts=scores)

    def _solution(self, prompt: Prompt) -> str:
        assert self.task is not None
        try:
            return self.task.solution(prompt)
        except Exception as error:  # a user's task, or a data set without solutions
            why = f"{type(error).__name__}: {error}"
            raise RemoteFailure(f"no solution for the judge: {why}"[:500]) from error


def rubric_text(rubric: Mapping[str, Criterion]) -> str:
    """The criteria and the form of the reply, in the place of {rubric}."""
    criteria = "".join(f"- {name}: {one.text}\n" for name, one in rubric.items())
    example = json.dumps(dict.fromkeys(rubric, 0.5), ensure_ascii=False)
    return (
        f"The answer is scored by each of these criteria:\n{criteria}\nReply with one JSON object "
        "and nothing else: for each criterion, by its name, a number from 0 (not met at all) to 1 "
        f"(fully met), as in {example}"
    )


def parse_rubric(text: str, criteria: Collection[str]) -> dict[str, float]:
    """The score of each criterion.

    Raises RemoteFailure unless the text, after any thoughts, is one JSON object that has each
    criterion once, and nothing else, with a number from 0 to 1.
    """
    reply = split_thoughts(text[-_LONGEST:])[1]
    found = _OBJECT.fullmatch(reply)
    try:
        pairs = json.loads(found[1] if found else "", object_pairs_hook=list)
    except (ValueError, RecursionError) as error:
        why = f"the judge's reply must be one JSON object: {reply.strip()[-200:]!r}"
        raise RemoteFailure(why) from error
    given, expected = [name for name, _ in pairs], ", ".join(criteria)
    if sorted(given) != sorted(criteria):
        raise RemoteFailure(f"the judge must score {expected}, each once, not {given!a:.200}")
    for name, score in pairs:
        is_number = isinstance(score, int | float) and not isinstance(score, bool)
        if not is_number or not 0 <= score <= 1:
            why = f"the judge's score of {name} must be from 0 to 1: {str(score)[:100]!r}"
            raise RemoteFailure(why)
    return {name: float(score) for name, score in pairs}


def parse_score(text: str, *, is_share: bool = False) -> float:
    """The last "score: x" of a judgement, else its last number; "7/10" is 7, of shares 0.7.

    Raises RemoteFailure if there is none.
    """
    text = text[-_LONGEST:]
    found = _SCORE.findall(text) or _LAST.findall(text)
    if not found:
        raise RemoteFailure(f"the judge gave no score: {text.strip()[-200:]!r}")
    number, whole = found[-1]
    score = float(number)
    if not abs(score) < MAX_SCORE:
        raise RemoteFailure(f"the judge's score is not a usable number: {number[:100]!r}")
    return score / float(whole) if is_share and whole.strip("0.") else score


def _content(response: dict[str, object]) -> str:
    try:
        choice = response["choices"][0]  # type: ignore[index]
        content, end = choice["message"]["content"], choice.get("finish_reason")
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise RemoteFailure("the judge's response is not a chat completion") from error
    if end == "length":  # its last number is of its reasons
        raise RemoteFailure("the judge's reply was cut off; let its server give it more tokens")
    return content if isinstance(content, str) else ""


KIND = Judge
