"""POST /v1/completions: plain text or tokens that the model continues."""

from __future__ import annotations

from typing import Any

from rollout_pool.endpoint.answers import Answer
from rollout_pool.endpoint.errors import refuse
from rollout_pool.endpoint.forms import response_form
from rollout_pool.endpoint.schema import Fields, shown
from rollout_pool.endpoint.sessions import Session
from rollout_pool.endpoint.stream import TextStream, Turn, logprob_entries
from rollout_pool.episodes.env import Message
from rollout_pool.episodes.tokenizer import TextTokens
from rollout_pool.sampling.stop import before_stop

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for this endpoint."""


class CompletionTurn(Turn):
    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def __init__(self, session: Session, fields: Fields) -> None:
        super().__init__(session, fields, "prompt", "echo", "suffix", "best_of", "response_format")
        fields.must_be("echo", [False], "the prompt is not repeated")
        fields.must_be("suffix", [], "the model only continues a text")
        fields.must_be("best_of", [1], "only one answer is sampled")
        fields.must_be(
            "logprobs", [0, 1], "only the log-probability of the token itself is recorded"
        )
        self.constrain(fields, response_form(fields))
        self._wants_logprobs = fields.has("logprobs")
        self._prompt = _read_prompt(fields, session.serving.num_embeddings)
        self.max_tokens = fields.count("max_tokens", DEFAULT_MAX_TOKENS, at_least=1)
        self._offset = 0
        """Position of the next token's text, among those whose log-probabilities were sent."""

    def new_texts(self) -> TextStream:
        return TextStream(self.session.serving.tokenizer)

    def render(self) -> list[int]:
        """Text that the session knows keeps its original tokens."""
        prompt = self._prompt
        if not isinstance(prompt, str):
            return list(prompt)
        self.session.check_size("prompt", len(prompt))
        text = TextTokens(self.session.serving.tokenizer)
        known, tokens = self.session.texts.known_start(prompt)
        if not known:
            return text.opening(prompt)
        new = prompt[len(known) :]
        return [*tokens, *(text.continuation(new) if new else [])]

    def _deliver(self, answer: Answer) -> str:
        sample = answer.sample
        decode = self.session.serving.tokenizer.decode
        whole = decode(sample.output_ids, skip_special_tokens=True)
        text = before_stop(whole, self.stop)
        prompt = self._prompt
        shown = prompt if isinstance(prompt, str) else decode(prompt)
        messages = (
            Message(role="user", content=shown),
            Message(role="assistant", content=text),
        )
        if self.session.deliver(answer, messages):
            self._note(answer, text)
            self._note(answer, whole)  # the next prompt may repeat the text that ended it
        return text

    def _note(self, answer: Answer, text: str) -> None:
        """Lets a later prompt that begins with this prompt and `text` reuse the answer's tokens."""
        if isinstance(self._prompt, str):
            tokens = [*answer.sample.prompt, *answer.sample.output_ids]
            self.session.texts.note(self._prompt + text, tokens)

    def whole(self, answer: Answer) -> dict[str, Any]:
        choice = self._choice(answer, self._deliver(answer), 0, answer.sample.finish_reason)
        # A client that sends tokens needs them.
        return {**choice, "token_ids": list(answer.sample.output_ids)}

    def piece(self, answer: Answer, start: int) -> list[dict[str, Any]]:
        return [self._choice(answer, self.feed(answer, is_end=False), start, None)]

    def ending(self, answer: Answer, start: int) -> list[dict[str, Any]]:
        self._deliver(answer)
        text = self.feed(answer, is_end=True)
        # Invalid UTF-8 can decode differently in pieces.
        self._note(answer, self.streamed)
        return [self._choice(answer, text, start, answer.sample.finish_reason)]

    def _choice(
        self, answer: Answer, text: str, start: int, finish_reason: str | None
    ) -> dict[str, Any]:
        logprobs = None
        if self._wants_logprobs and start < answer.sample.num_ready:
            tokenizer = self.session.serving.tokenizer
            entries = logprob_entries(answer.sample, tokenizer, start)
            logprobs = {
                "tokens": [entry["token"] for entry in entries],
                "token_logprobs": [entry["logprob"] for entry in entries],
                "top_logprobs": [{entry["token"]: entry["logprob"]} for entry in entries],
                "text_offset": self._offsets([entry["token"] for entry in entries]),
            }
        body = {"index": self.index, "text": text, "logprobs": logprobs}
        return {**body, "finish_reason": finish_reason}

    def _offsets(self, tokens: list[str]) -> list[int]:
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token)
        return offsets


def _read_prompt(fields: Fields, num_embeddings: int) -> str | list[int]:
    prompt = fields.raw("prompt")
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt and all(type(one) is int for one in prompt):
        if (wrong := next((t for t in prompt if not 0 <= t < num_embeddings), None)) is not None:
            problem = f"there is no token {shown(wrong)}: the model has 0 to {num_embeddings - 1}"
            raise refuse("prompt", problem)
        return prompt
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str) and prompt[0]:
        return prompt[0]
    raise refuse("prompt", "must be one text or one list of tokens, not empty")
