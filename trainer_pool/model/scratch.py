"""Builds the quickstart's small policy: a random byte-level Qwen3, in Hugging Face format."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from safetensors import SafetensorError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode

from configs.schema import ScratchModelConfig

PAD_TOKEN, BOS_TOKEN, EOS_TOKEN = "<|pad|>", "<|bos|>", "<|eos|>"
VOCAB_SIZE = 264
"""256 bytes and three special tokens, rounded up to a multiple of 8 with unused tokens."""

CHAT_TEMPLATE = """\
{%- if tools %}
    {{- 'tools: <tools>' }}
    {%- for tool in tools %}{{ tool | tojson }}{% endfor %}
    {{- '</tools> A call: <tool_call>{"name": "...", "arguments": {...}}</tool_call>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '' if loop.first else '\\n' }}
    {{- message.role + ': ' + (message.content or '') }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>{"name": ' + (call.function.name | tojson) + ', "arguments": ' }}
        {{- (call.function.arguments | tojson) + '}</tool_call>' }}
    {%- endfor %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '\\nassistant: ' }}{% endif %}
"""
"""Plain text, one line per message: a byte tokenizer has no tokens for roles. An answer ends with
<|eos|>. Calls are in the format of task.tool_parser=hermes."""


def build_scratch_model(config: ScratchModelConfig, folder: Path, seed: int) -> None:
    """Write weights, configuration and tokenizer to `folder`; the same seed gives the same bytes.

    Any loader of a Hugging Face folder can read it: `from_pretrained`, SGLang, the trainer.
    """
    transformers.utils.logging.disable_progress_bar()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(model_config(config, tokenizer))
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    try:
        model.save_pretrained(folder)
    except SafetensorError as error:  # as of a full disk
        raise OSError(f"cannot write {folder} ({error}); free space if its disk is full") from error


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per UTF-8 byte, so that every text has one encoding and decodes to itself."""
    chars = bytes_to_unicode()
    vocab = {chars[byte]: byte for byte in range(256)}
    specials = [PAD_TOKEN, BOS_TOKEN, EOS_TOKEN]
    specials += [f"<|unused{i}|>" for i in range(VOCAB_SIZE - len(vocab) - len(specials))]
    vocab |= {token: len(vocab) + i for i, token in enumerate(specials)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=CHAT_TEMPLATE,
        pad_token=PAD_TOKEN,
        bos_token=BOS_TOKEN,
        eos_token=EOS_TOKEN,
        additional_special_tokens=specials[3:],
        clean_up_tokenization_spaces=False,
        # A prompt that contains "<|eos|>" is text; otherwise it would become the special token.
        split_special_tokens=True,
    )


def model_config(config: ScratchModelConfig, tokenizer: PreTrainedTokenizerFast) -> Qwen3Config:
    """The content of the model's config.json."""
    return Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
