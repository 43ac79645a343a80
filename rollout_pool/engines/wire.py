"""SGLang's form of a request and of its streamed answers; pure, so that each case can be tested.

The server streams disjoint parts. A part that is not a sample's last has `weight_version`, what the
server calls its weights at that moment; the last has `weight_versions`, exact spans over all tokens
of the request. Read in the source of 0.5.20.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from buffer.types import VersionSpan
from rollout_pool.sampling.engine_client import ROUNDING, BadLogprobs, SampleRefused, check_logprobs
from rollout_pool.sampling.sample import Sample

STREAM_INTERVAL = 64
"""Tokens between two parts of an answer. A killed engine costs each of its samples half of them on
the average, which is written anew in a second or two. A part costs both processes about what some
hundred bytes do, so larger ones would save nearly nothing."""
_VERSION = re.compile("[0-9]+")


def generate_body(
    samples: Mapping[str, Sample], extra_key: str | None, stream_interval: int
) -> dict[str, object]:
    """One call for all samples, by their request ids; each has its own sampling."""
    body: dict[str, object] = {
        "rid": list(samples),
        "input_ids": [[*sample.prompt, *sample.output_ids] for sample in samples.values()],
        "sampling_params": [_sampling(sample, stream_interval) for sample in samples.values()],
        "return_logprob": True,
        "stream": True,
    }
    if extra_key is not None:
        body["extra_key"] = extra_key
    return body


def _sampling(sample: Sample, stream_interval: int) -> dict[str, object]:
    params = sample.sampling
    return {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "frequency_penalty": params.frequency_penalty,
        "presence_penalty": params.presence_penalty,
        "repetition_penalty": params.repetition_penalty,
        "max_new_tokens": sample.num_left,
        "stream_interval": stream_interval,
    }


def new_tokens(
    engine: str, answer: Mapping[str, Any], num_gathered: int
) -> tuple[list[int], list[float]]:
    """Tokens of one part that are new, with their log-probabilities.

    `num_gathered` tokens of the request came before. Raises SampleRefused, BadLogprobs.
    """
    meta = answer["meta_info"]
    output_ids: list[int] = answer["output_ids"]
    pairs = meta.get("output_token_logprobs") or []
    number = meta["completion_tokens"] - num_gathered
    if len(output_ids) > number >= 0 and _is_abort(meta):
        # One that is given up while it is queued ends with its last token and with all of its
        # log-probabilities once more; if parts were joined, the new ones come first.
        output_ids, pairs = output_ids[:number], pairs[:number]
    if len(output_ids) != number:
        raise SampleRefused(
            f"{engine}: {num_gathered} tokens and {len(output_ids)} more were not the "
            f"{meta['completion_tokens']} that the sample has"
        )
    if [pair[1] for pair in pairs] != output_ids:
        raise BadLogprobs("the log-probabilities are those of other tokens than were returned")
    return output_ids, _floats([pair[0] for pair in pairs])


def _floats(logprobs: list[Any]) -> list[float]:
    try:
        if not logprobs or (math.isfinite(math.fsum(logprobs)) and max(logprobs) <= ROUNDING):
            return logprobs
    except (TypeError, ValueError, OverflowError):
        pass
    return check_logprobs(logprobs)  # slower, and says which


def _is_abort(meta: Mapping[str, Any]) -> bool:
    return meta["finish_reason"] is not None and meta["finish_reason"]["type"] == "abort"


def read_spans(engine: str, spans: Sequence[Mapping[str, Any]], length: int) -> list[VersionSpan]:
    """Spans over the `length` tokens of a request. Raises SampleRefused if they are not that."""
    end, parsed = 0, []
    for span in spans:
        if span["start"] != end or span["end"] <= end:
            break
        end = span["end"]
        version = read_version(engine, span["version"])
        parsed.append(VersionSpan(version=version, start=span["start"], end=end))
    if end != length:
        raise SampleRefused(
            f"{engine}: the version spans {list(spans)} do not cover {length} tokens"
        )
    return parsed


def read_version(engine: str, text: str) -> int:
    """Raises SampleRefused for what is no number of a policy version."""
    if not _VERSION.fullmatch(text):
        raise SampleRefused(
            f"{engine} served weights of version {text!r}, which no trainer published"
        )
    return int(text)
