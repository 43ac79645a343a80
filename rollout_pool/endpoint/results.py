"""What every answer of the API says besides its text."""

from __future__ import annotations

from typing import Any, Protocol

from rollout_pool.endpoint.answers import Answer
from rollout_pool.endpoint.asked import Delivery
from rollout_pool.endpoint.sessions import Session
from rollout_pool.episodes.tokenizer import Tokenizer
from rollout_pool.sampling.sample import Sample


class Turn(Protocol):
    """One request of one of the two endpoints, and how its answer is written."""

    session: Session
    delivery: Delivery
    kind: str
    """The API's name of the object."""
    prefix: str
    """Of its id."""

    def render(self) -> list[int]:
        """The tokens that the model goes on from. Raises ApiError. May be called in a thread."""
        ...

    def begin(self, prompt: list[int], fingerprint: bytes) -> Answer:
        """Let the model write. `prompt`: as rendered. Raises ApiError."""
        ...

    def result(self, answer: Answer) -> dict[str, Any]:
        """The whole answer; with it the answer is delivered."""
        ...

    def opening(self) -> list[dict[str, Any]]:
        """Choices of the chunks with which a stream begins."""
        ...

    def piece(self, answer: Answer, start: int) -> list[dict[str, Any]]:
        """Choices of the next chunks; tokens before `start` have been told of."""
        ...

    def ending(self, answer: Answer, start: int) -> list[dict[str, Any]]:
        """Choices of the last chunks; with them the answer is delivered."""
        ...


def about(turn: Turn, answer: Answer, *, is_chunk: bool = False) -> dict[str, Any]:
    """`leash` holds what the API has no place for."""
    sample = answer.sample
    return {
        "id": f"{turn.prefix}-{sample.sample_id}",
        "object": "chat.completion.chunk" if is_chunk and turn.prefix == "chatcmpl" else turn.kind,
        "created": answer.created,
        "model": turn.session.serving.model,
        "leash": {
            "session": turn.session.session_id,
            "version_min": sample.oldest_version,
            "version_max": max((span.version for span in sample.version_spans), default=None),
        },
    }


def usage(answer: Answer) -> dict[str, Any]:
    given, written = len(answer.sample.prompt), len(answer.sample.output_ids)
    return {
        "prompt_tokens": given,
        "completion_tokens": written,
        "total_tokens": given + written,
    }


def logprob_entries(sample: Sample, tokenizer: Tokenizer, start: int) -> list[dict[str, Any]]:
    """Of the tokens from `start` on, the one that ends the answer included."""
    entries = []
    for token, logprob in zip(sample.output_ids[start:], sample.logprobs[start:], strict=True):
        text = tokenizer.decode([token])
        is_whole = "\ufffd" not in text
        entries.append(
            {
                "token": text,
                "logprob": logprob,
                "bytes": list(text.encode()) if is_whole else None,
                "top_logprobs": [],
            }
        )
    return entries
