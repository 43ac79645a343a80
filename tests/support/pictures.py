"""A small model that takes pictures, pictures, and rows that show some."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import (
    AutoModelForImageTextToText,
    GenerationConfig,
    Qwen2VLImageProcessorPil,
    Qwen3VLConfig,
)

from tensors.pictures import PictureProcessor
from trainer_pool.data.packing import Row
from trainer_pool.model.scratch import byte_tokenizer

START, END, PLACE, VIDEO = MARKS = (
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
PATCH, MERGE = 4, 2
TEMPLATE = """\
{%- for message in messages %}
    {{- '' if loop.first else '\\n' }}{{ message.role + ': ' }}
    {%- if message.content is string %}{{ message.content }}
    {%- else %}
        {%- for part in message.content %}
            {%- if part.type == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- else %}{{ part.text }}{% endif %}
        {%- endfor %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '\\nassistant: ' }}{% endif %}
"""


def picture(seed: int, height: int = 24, width: int = 40, kind: str = "PNG") -> bytes:
    """A file of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def build_seeing_model(folder: Path, seed: int = 0) -> Any:
    """A Qwen3-VL of random weights in float32 with the tokenizer of bytes and the four marks."""
    tokenizer = byte_tokenizer()
    tokenizer.split_special_tokens = False
    tokenizer.add_tokens([*MARKS], special_tokens=True)
    tokenizer.chat_template = TEMPLATE
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in MARKS}
    ends = {f"{n}_token_id": getattr(tokenizer, f"{n}_token_id") for n in ("bos", "eos", "pad")}
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "max_position_embeddings": 2048,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [4, 2, 2],
                "mrope_interleaved": True,
            },
            **ends,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": 32,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": 2,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
        },
        image_token_id=ids[PLACE],
        video_token_id=ids[VIDEO],
        vision_start_token_id=ids[START],
        vision_end_token_id=ids[END],
        tie_word_embeddings=True,
        dtype="float32",
    )
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(0.15 * noise if parameter.ndim > 1 else parameter + 0.1 * noise)
    model.generation_config = GenerationConfig(**ends)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    Qwen2VLImageProcessorPil(
        patch_size=PATCH,
        temporal_patch_size=2,
        merge_size=MERGE,
        size={"shortest_edge": 16**2, "longest_edge": 64**2},
    ).save_pretrained(folder)
    return model


def tokens_of(processor: PictureProcessor, pictures: tuple[bytes, ...], tail: int) -> Any:
    start, end, place, _ = processor.tokens.unsampled
    shown = [token for _ in pictures for token in (65, start, place, end)]
    return [257, *processor.expanded(shown, pictures), *range(70, 70 + tail)]


def row_of(processor: PictureProcessor, pictures: tuple[bytes, ...], tail: int) -> Row:
    tokens = np.array(tokens_of(processor, pictures, tail), np.int32)
    mask = np.zeros(len(tokens), np.uint8)
    mask[-tail:] = 1
    zeros = np.zeros(len(tokens), np.float32)
    return Row(tokens=tokens, loss_mask=mask, rollout_logprobs=zeros, pictures=pictures)


def plain_logprobs(folder: Any, processor: PictureProcessor, row: Row) -> torch.Tensor:
    """transformers' own of one sequence, with positions that it finds itself; marks are left out
    of the distribution."""
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    tokens = torch.from_numpy(row.tokens).long().unsqueeze(0)
    shown: dict[str, Any] = {}
    if row.pictures:
        patches = [processor.patches(one) for one in row.pictures]
        shown = {
            "pixel_values": torch.cat([one.values_PD for one in patches]),
            "image_grid_thw": torch.tensor([one.grid for one in patches]),
            "mm_token_type_ids": (tokens == processor.tokens.place).int(),
        }
    with torch.no_grad():
        logits = model(input_ids=tokens, **shown).logits[0, :-1]
    logits[:, list(processor.tokens.unsampled)] = -torch.inf
    found = logits.log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
    return found[torch.from_numpy(row.loss_mask[1:]) != 0]
