"""POST /v1/completions: plain text or tokens that the model continues."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from rollout_pool.endpoint.constraints import response_form
from rollout_pool.endpoint.errors import refuse
from rollout_pool.endpoint.pending_completion import PendingCompletion
from rollout_pool.endpoint.schema import CompletionRequest, only, shown
from rollout_pool.endpoint.sessions import Session
from rollout_pool.endpoint.stream import TextStream, Turn, logprob_entries
from rollout_pool.episodes.conversation import Message
from rollout_pool.episodes.tokenizer import TextTokens
from rollout_pool.sampling.stop import before_stop

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for this endpoint."""


class CompletionTurn(Turn):
    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def __init__(self, session: Session, request: CompletionRequest) -> None:
        super().__init__(session, request)
        only("echo", request.echo, False, "the prompt is not repeated")
        only("suffix", request.suffix, None, "the model only continues a text")
        only("best_of", request.best_of, 1, "only one completion is sampled")
        why = "only the log-probability of the token itself is recorded"
        only("logprobs", request.logprobs or 1, 1, why)
        self.constrain(request, response_form(request.response_format))
        self._wants_logprobs = request.logprobs is not None
        self._prompt = _read_prompt(request.prompt, session.serving.num_embeddings)
        self.max_tokens = request.max_tokens or DEFAULT_MAX_TOKENS
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

    def _deliver(self, completion: PendingCompletion) -> str:
        sample = completion.sample
        decode = self.session.serving.tokenizer.decode
        whole = decode(sample.output_ids, skip_special_tokens=True)
        text = before_stop(whole, self.stop)
        prompt = self._prompt
        shown = prompt if isinstance(prompt, str) else decode(prompt)
        messages = (Message(role="user", content=shown), Message(role="assistant", content=text))
        if self.session.deliver(completion, messages):
            self._note(completion, text)
            self._note(completion, whole)  # the next prompt may repeat the text that ended it
        return text

    def _note(self, completion: PendingCompletion, text: str) -> None:
        """Lets a later prompt that begins with this prompt and `text` reuse the sampled tokens."""
        if isinstance(self._prompt, str):
            tokens = [*completion.sample.prompt, *completion.sample.output_ids]
            self.session.texts.note(self._prompt + text, tokens)

    def whole(self, completion: PendingCompletion) -> dict[str, Any]:
        choice = self._choice(
            completion, self._deliver(completion), 0, completion.sample.finish_reason
        )
        # A client that sends tokens needs them.
        return {**choice, "token_ids": list(completion.sample.output_ids)}

    def piece(self, completion: PendingCompletion, start: int) -> list[dict[str, Any]]:
        return [self._choice(completion, self.feed(completion, is_end=False), start, None)]

    def ending(self, completion: PendingCompletion, start: int) -> list[dict[str, Any]]:
        self._deliver(completion)
        text = self.feed(completion, is_end=True)
        # Invalid UTF-8 can decode differently in pieces.
        self._note(completion, self.streamed)
        return [self._choice(completion, text, start, completion.sample.finish_reason)]

    def _choice(
        self, completion: PendingCompletion, text: str, start: int, finish_reason: str | None
    ) -> dict[str, Any]:
        logprobs = None
        if self._wants_logprobs and start < completion.sample.num_ready:
            tokenizer = self.session.serving.tokenizer
            entries = logprob_entries(completion.sample, tokenizer, start)
            tokens = [entry["token"] for entry in entries]
            *offsets, self._offset = accumulate(map(len, tokens), initial=self._offset)
            logprobs = {
                "tokens": tokens,
                "token_logprobs": [entry["logprob"] for entry in entries],
                "top_logprobs": [{entry["token"]: entry["logprob"]} for entry in entries],
                "text_offset": offsets,
            }
        body = {"index": self.index, "text": text, "logprobs": logprobs}
        return {**body, "finish_reason": finish_reason}


def _read_prompt(prompt: str | list[int | str], num_embeddings: int) -> str | list[int]:
    if isinstance(prompt, str):
        return prompt
    tokens = [one for one in prompt if isinstance(one, int)]
    if len(tokens) < len(prompt):
        if len(prompt) == 1 and isinstance(prompt[0], str) and prompt[0]:
            return prompt[0]
        raise refuse("prompt", "must be one text or one list of tokens, not empty")
    if (wrong := next((t for t in tokens if not 0 <= t < num_embeddings), None)) is not None:
        problem = f"there is no token {shown(wrong)}: the model has 0 to {num_embeddings - 1}"
        raise refuse("prompt", problem)
    return tokens
