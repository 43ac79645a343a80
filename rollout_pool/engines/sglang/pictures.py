"""Pictures in SGLang's requests.

Its processor writes the places of a picture itself, and fails where they are written already. So a
request has one for each picture, wherever its tokens come from: a chat template, or an earlier
request of the same sample. (Source: SGLang 0.5.20, Qwen3-VL.)
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from rollout_pool.sampling.sample import Sample
from tensors.pictures import PictureTokens

LEAST_LOGIT = -1e9
"""Added to the logits of tokens that are never sampled: their probability is 0, and those of the
others, which the engine returns, are among themselves."""
URLS_KEPT = 64
PNG = b"\x89PNG"


def add_pictures(body: dict[str, Any], samples: Iterable[Sample], tokens: PictureTokens) -> None:
    """Changes the body of a call of these `samples`, of a model with pictures."""
    every = list(samples)
    for settings in body["sampling_params"]:
        settings["logit_bias"] = {str(token): LEAST_LOGIT for token in tokens.unsampled}
    if any(sample.pictures for sample in every):
        body["input_ids"] = [tokens.collapsed(ids) for ids in body["input_ids"]]
        body["image_data"] = [[*map(_data_url, sample.pictures)] for sample in every]


def misplaced(sample: Sample, tokens: PictureTokens) -> str | None:
    """Says what is wrong with a sample whose places are not those of its pictures."""
    runs = list(tokens.runs([*sample.prompt, *sample.output_ids]))
    is_sampled = bool(runs) and runs[-1][1] > len(sample.prompt)
    if is_sampled or len(runs) != len(sample.pictures):
        return f"{len(sample.pictures)} pictures and {len(runs)} places for them"
    return None


def sampled_marks(output_ids: Sequence[int], tokens: PictureTokens | None) -> list[int]:
    """The tokens that only pictures bring: an engine must not have sampled them."""
    return [] if tokens is None else [token for token in output_ids if token in tokens.unsampled]


@lru_cache(URLS_KEPT)
def _data_url(picture: bytes) -> str:
    """As PNG: a JPEG would be decoded on a GPU, into other pixels than the trainer's."""
    if not picture.startswith(PNG):
        from PIL import Image

        file = io.BytesIO()
        with Image.open(io.BytesIO(picture)) as image:
            image.convert("RGB").save(file, "PNG", compress_level=1)
        picture = file.getvalue()
    return f"data:image/png;base64,{base64.b64encode(picture).decode()}"
