"""A reward from your own service: POST the episode, read {"reward": number}."""

from __future__ import annotations

import dataclasses
from typing import Any

from rollout_pool.episodes.conversation import Message
from rollout_pool.episodes.episode import Episode, check_parts
from rollout_pool.rewards.service import MAX_SCORE, RemoteFailure, RemoteService
from rollout_pool.rewards.types import PartScore
from rollout_pool.tasks.task import Prompt


class HttpReward(RemoteService):
    """The service receives

        {"prompt": "3 + 4 =", "index": 7, "is_held_out": false, "answer": "7",
         "messages": [{"role": "user", "content": "3 + 4 ="}, ...],
         "num_turns": 1, "end": "done", "env_reward": null}

    and replies {"reward": 1.0}, or, with named numbers for the log,
    {"reward": 1.0, "parts": {"style": 0.3}}. It replies {"reward": null} for
    a completion that it cannot judge.
    """

    async def score(self, prompt: Prompt, episode: Episode, key: str) -> PartScore:
        response = await self.ask(
            {
                "prompt": prompt.text,
                "index": prompt.index,
                "is_held_out": prompt.is_held_out,
                "answer": episode.answer,
                "messages": [_as_json(message) for message in episode.messages],
                "num_turns": episode.num_turns,
                "end": episode.end,
                "env_reward": episode.env_reward,
            },
            key,
        )
        if response.get("reward", 0) is None:
            return PartScore(is_left_open=True)
        parts = response.get("parts") or {}
        if not isinstance(parts, dict):
            raise RemoteFailure(f'its "parts" is not an object: {str(parts)[:100]!r}')
        try:
            check_parts(parts)
        except ValueError as error:
            raise RemoteFailure(f'its "parts" cannot be used: {error}') from error
        named = {name: _number(value, f"parts.{name}") for name, value in parts.items()}
        return PartScore(value=_number(response.get("reward"), "reward"), parts=named)


def _as_json(message: Message) -> dict[str, Any]:
    """Without the list of its pictures where there are none, and never with their bytes."""
    found = dataclasses.asdict(message)
    del found["files"]
    if not message.pictures:
        del found["pictures"]
    return found


def _number(value: object, what: str) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not abs(value) < MAX_SCORE:  # type: ignore[arg-type]
        raise RemoteFailure(f'its "{what}" is not a usable number: {str(value)[:100]!r}')
    return float(value)  # type: ignore[arg-type]


KIND = HttpReward
