"""The size of a model's vocabulary, the tokens that end a sample, and texts within others."""

from __future__ import annotations

import json

import pytest
from tokenizers import processors

from rollout_pool.episodes.tokenizer import TextTokens, end_tokens, load_tokenizer, vocab_size
from tests.support.rollout import spaced_tokenizer
from trainer_pool.model.scratch import byte_tokenizer

QWEN = {"model_type": "qwen3", "vocab_size": 1000}
GEMMA = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "vocab_size": 2000}}


@pytest.mark.parametrize(
    ("config", "size"),
    [
        (QWEN, 1000),
        (GEMMA, 2000),
        ({"model_type": "nobody-knows"}, len(byte_tokenizer())),
        (None, len(byte_tokenizer())),
    ],
    ids=["plain", "nested", "unknown", "none"],
)
def test_vocabulary_is_as_large_as_the_embeddings_if_the_model_says_so(tmp_path, config, size):
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    assert vocab_size(str(tmp_path), byte_tokenizer(), trust_remote_code=False) == size


@pytest.mark.parametrize(
    ("config", "generation", "further"),
    [
        ({**QWEN, "eos_token_id": 7}, {"eos_token_id": [8, 9]}, {7, 8, 9}),
        ({**QWEN, "eos_token_id": [7, 8]}, None, {7, 8}),
        (QWEN, {"eos_token_id": 9}, {9}),
        (None, None, set()),
    ],
)
def test_tokens_that_end_a_sample_are_of_all_configs(tmp_path, config, generation, further):
    for name, fields in (("config", config), ("generation_config", generation)):
        if fields is not None:
            (tmp_path / f"{name}.json").write_text(json.dumps(fields))
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|eom_id|>"]})
    listed = tokenizer.convert_tokens_to_ids("<|eom_id|>")
    found = end_tokens(str(tmp_path), tokenizer, trust_remote_code=False)
    assert found == {tokenizer.eos_token_id, listed, *further}


@pytest.mark.parametrize("scheme", ["always", "first", "normalizer"])
@pytest.mark.parametrize("text", ["=Ada+", "Ada Bob", " Ada", "\nBob", "0", "a.", "", "</s>=Ada"])
def test_text_that_goes_on_gets_no_space(scheme, text):
    made = spaced_tokenizer(scheme)
    tokens = TextTokens(made)
    for before in ("Bob Ada =", "Bob</s>", "Ada"):
        opening = tokens.opening(before)
        spaced = "</s> =Ada" if text.startswith("</s>") and scheme != "first" else text
        assert made.decode([*opening, *tokens.continuation(text)]) == made.decode(opening) + spaced


def test_text_that_goes_on_is_one_text_for_a_tokenizer_that_adds_no_space():
    made = byte_tokenizer()
    for text in (" a", "a", "0", "<|eos|>", ""):
        assert TextTokens(made).continuation(text) == list(text.encode())


@pytest.mark.parametrize(
    ("form", "before"), [("$A <|eos|>", []), ("<|bos|> $A <|eos|>", [257]), ("<|bos|> $A", [257])]
)
def test_opening_has_the_beginning_that_a_tokenizer_adds_and_never_its_end(form, before):
    made = byte_tokenizer()
    made.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=form, special_tokens=[("<|bos|>", 257), ("<|eos|>", 258)]
    )
    for text in ("capital of France =", "a", "0", ""):
        assert TextTokens(made).opening(text) == [*before, *text.encode()]


def test_invalid_model_path_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"model.path='.*nothing': there is no tokenizer to load"):
        load_tokenizer(str(tmp_path / "nothing"), trust_remote_code=False)
