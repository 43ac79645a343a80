"""Requests that show pictures, as SGLang takes them."""

from __future__ import annotations

import base64
import io

import pytest
from PIL import Image

from buffer.types import SamplingParams
from rollout_pool.engines.sglang.batching import generate_body
from rollout_pool.engines.sglang.pictures import (
    LEAST_LOGIT,
    PNG,
    add_pictures,
    misplaced,
    sampled_marks,
)
from rollout_pool.sampling.sample import Sample
from tensors.pictures import PictureTokens
from tests.support.pictures import picture

P, START, END = 50, 48, 49
TOKENS = PictureTokens(place=P, unsampled=(START, END, P))
CAT, DOG = picture(1), picture(2, 16, 32, "JPEG")


def sample(prompt, pictures=(), output=()):
    made = Sample(
        sample_id="a", prompt=prompt, sampling=SamplingParams(), max_new_tokens=9, pictures=pictures
    )
    made.output_ids.extend(output)
    return made


def pixels(file):
    return Image.open(io.BytesIO(file)).convert("RGB").tobytes()


def test_request_has_one_place_for_each_picture_and_no_mark_can_be_sampled():
    samples = {
        "a": sample([1, START, P, P, P, END, 2, START, P, P, END], (CAT, DOG), [7, 8]),
        "b": sample([1, 2]),
    }
    body = generate_body(samples, None, 8)
    add_pictures(body, samples.values(), TOKENS)
    assert body["input_ids"] == [[1, START, P, END, 2, START, P, END, 7, 8], [1, 2]]
    [of_a, of_b] = body["image_data"]
    sent = [base64.b64decode(url.removeprefix("data:image/png;base64,")) for url in of_a]
    assert sent[0] == CAT and of_b == []
    # On a GPU an engine would decode a JPEG into other pixels.
    assert sent[1].startswith(PNG) and pixels(sent[1]) == pixels(DOG)
    biases = [settings["logit_bias"] for settings in body["sampling_params"]]
    assert biases == [{"48": LEAST_LOGIT, "49": LEAST_LOGIT, "50": LEAST_LOGIT}] * 2


def test_texts_of_a_model_with_pictures_have_none():
    samples = {"b": sample([1, 2])}
    body = generate_body(samples, None, 8)
    add_pictures(body, samples.values(), TOKENS)
    assert "image_data" not in body and body["input_ids"] == [[1, 2]]


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        (sample([START, P, END]), "0 pictures and 1 places for them"),
        (sample([1], (CAT,)), "1 pictures and 0 places for them"),
        (sample([START, P, END], (CAT,), [P]), "1 pictures and 2 places for them"),
        (sample([START, P, END, P], (CAT, DOG)), None),
    ],
)
def test_sample_whose_places_are_not_those_of_its_pictures_is_not_sent(wrong, problem):
    assert misplaced(wrong, TOKENS) == problem


def test_sampled_marks_are_found():
    assert sampled_marks([1, P, 2, END], TOKENS) == [P, END]
    assert sampled_marks([1, P], None) == []
