"""What requests may ask of a session, whichever of the two endpoints they go to.

Nothing is ignored that would change the answer: what can't be done is refused by its name. A
session's tokens are trained on, so how they are drawn is the run's decision and not the client's.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from buffer.types import SamplingParams
from rollout_pool.endpoint.errors import ApiError, refuse
from rollout_pool.endpoint.fields import Fields

WITHOUT_EFFECT = ("user", "metadata", "store", "service_tier", "safety_identifier")
"""Fields for OpenAI's own bookkeeping, and the like: an answer does not depend on them."""
CACHE_HINTS = ("prompt_cache_key", "prompt_cache_retention")
SHARED = (
    "model",
    "max_tokens",
    "n",
    "stop",
    "seed",
    "stream",
    "stream_options",
    "logprobs",
    "logit_bias",
    *WITHOUT_EFFECT,
    *CACHE_HINTS,
    *SamplingParams.__dataclass_fields__,
)


@dataclass(kw_only=True, slots=True, frozen=True)
class Delivery:
    """How an answer is to be told."""

    is_streamed: bool
    wants_usage: bool
    """Streamed: a last chunk with the number of tokens."""
    wants_logprobs: bool


def check_shared(fields: Fields, model: str, sampling: SamplingParams) -> None:
    """Raises ApiError for whatever this endpoint does not do."""
    asked = fields.text("model")
    if asked != model:
        raise ApiError(
            404,
            f"model: there is no {asked!r} here; this session's model is {model!r}",
            param="model",
            code="model_not_found",
        )
    for name, configured in asdict(sampling).items():
        value = fields.number(name, configured)
        if value != configured:
            raise refuse(
                name,
                f"{value:g} was asked for, but this session is sampled with {configured:g}. Its "
                "tokens are trained on, so they are drawn as the run is configured "
                "(rollout.sampling); leave the field out",
            )
    fields.must_be("n", [1], "an episode has one answer at a time; ask again for another")
    fields.must_be("stop", [[]], "an answer ends where the model ends it; leave the field out")
    fields.must_be("logit_bias", [{}], "the policy is trained as it is sampled")
    fields.must_be("seed", [], "a rollout can't be drawn again; leave the field out")


def read_delivery(fields: Fields, *, wants_logprobs: bool) -> Delivery:
    is_streamed = fields.flag("stream", False)
    options = fields.inner("stream_options")
    if options is not None:
        if not is_streamed:
            raise refuse(fields.name("stream_options"), "has a meaning with stream=true only")
        options.only("include_usage", "include_obfuscation")
    return Delivery(
        is_streamed=is_streamed,
        wants_usage=options is not None and options.flag("include_usage", False),
        wants_logprobs=wants_logprobs,
    )
