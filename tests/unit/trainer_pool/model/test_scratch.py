"""The model and tokenizer that the quickstart begins with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    Qwen3ForCausalLM,
)

from configs.schema import ScratchModelConfig
from trainer_pool.model.scratch import VOCAB_SIZE, build_scratch_model, byte_tokenizer

TOKENIZER = byte_tokenizer()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scratch")
    build_scratch_model(ScratchModelConfig(), folder, seed=7)
    return folder


@given(st.text())
def test_every_text_is_its_bytes_and_decodes_to_itself(text: str) -> None:
    text = text.encode("utf-8", "ignore").decode()  # lone surrogates are no text
    ids = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    assert ids == list(text.encode())
    assert TOKENIZER.decode(ids) == text


def test_saved_tokenizer_does_not_read_special_tokens_from_text(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for text in ("3 + 4 =", " a  b\n", "<|eos|>", "<|pad|> <|unused0|>", "naïve 🎉"):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert ids == list(text.encode()) and tokenizer.decode(ids) == text
    answer = [*b"12", tokenizer.eos_token_id]
    assert tokenizer.decode(answer, skip_special_tokens=True) == "12"


def test_model_is_small_float32_and_ends_at_the_tokenizers_eos(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert sum(parameter.numel() for parameter in model.parameters()) < 2_000_000
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert len(tokenizer) == model.config.vocab_size == VOCAB_SIZE == 264
    generation = GenerationConfig.from_pretrained(folder)
    assert generation.eos_token_id == model.config.eos_token_id == tokenizer.eos_token_id


def test_seed_decides_the_weights(folder: Path, tmp_path: Path) -> None:
    build_scratch_model(ScratchModelConfig(), tmp_path / "same", seed=7)
    build_scratch_model(ScratchModelConfig(), tmp_path / "other", seed=8)
    weights = [
        (path / "model.safetensors").read_bytes()
        for path in (folder, tmp_path / "same", tmp_path / "other")
    ]
    assert weights[0] == weights[1] != weights[2]


def test_chat_template_writes_tools_turns_and_calls(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    conversation = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "So: ", "tool_calls": [call]},
        {"role": "tool", "content": "2"},
    ]
    text = tokenizer.apply_chat_template(
        conversation, tools=[{"name": "add"}], add_generation_prompt=True, tokenize=False
    )
    assert text == (
        'tools: <tools>{"name": "add"}</tools> '
        'A call: <tool_call>{"name": "...", "arguments": {...}}</tool_call>\n'
        "user: 1 + 1?\n"
        'assistant: So: <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>\n'
        "tool: 2\n"
        "assistant: "
    )


def test_full_disk_is_an_error_that_names_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(Qwen3ForCausalLM, "save_pretrained", refuse)
    with pytest.raises(OSError, match=f"cannot write {tmp_path} .*No space left.*; free space"):
        build_scratch_model(ScratchModelConfig(), tmp_path, seed=0)
