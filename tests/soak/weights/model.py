"""The trainer's weights at every version: the same numbers in every process that asks for them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from tensors.layout import Layout, TensorSpec
from tensors.snapshots import Shard

BUCKET_BYTES = 1 << 16
RENEWED_EVERY = 4
"""Interval of versions in which every element changes; in the others one in a hundred does."""

ODD = (
    TensorSpec(name="embed", dtype="bfloat16", shape=(1001, 1021)),  # 31 buckets; odd on purpose
    *(
        TensorSpec(name=f"layers.{layer}.{part}", dtype=dtype, shape=shape)
        for layer in range(4)
        for part, dtype, shape in (
            ("q", "bfloat16", (256, 257)),
            ("q_bias", "bfloat16", (7,)),
            ("up", "bfloat16", (513, 256)),
            ("norm", "float32", (257,)),
            ("router", "float32", (1,)),  # of two ranks the second owns nothing of it
        )
    ),
)
"""Sizes that divide evenly by nothing."""


def tied_config() -> Qwen3Config:
    return Qwen3Config(
        vocab_size=2003,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=True,
        dtype="float32",
    )


def tied_tensors(dtype: str) -> tuple[TensorSpec, ...]:
    """Tensors of a Qwen3 with tied embeddings: one serves as both, and travels once."""
    with torch.device("meta"):
        parameters = Qwen3ForCausalLM(tied_config()).named_parameters()
    return tuple(
        TensorSpec(name=name, dtype=dtype, shape=tuple(tensor.shape)) for name, tensor in parameters
    )


class Weights:
    """float32, as a trainer holds them. Used by one thread."""

    def __init__(self, tensors: tuple[TensorSpec, ...], seed: int = 0) -> None:
        self.layout = Layout.of(tensors, 1)
        self._tensors = tensors
        self._seed = seed
        self._version = -1
        self._values: dict[str, Tensor] = {}

    def at(self, version: int) -> dict[str, Tensor]:
        """Every tensor, flat. Valid until the next call."""
        renewed = version - version % RENEWED_EVERY
        if not renewed <= self._version <= version:
            self._version = renewed - 1
        while self._version < version:
            self._version += 1
            self._change(torch.Generator().manual_seed(1_000_003 * self._seed + self._version))
        return self._values

    def _change(self, dice: torch.Generator) -> None:
        for spec in self._tensors:
            n = spec.num_elements
            if self._version % RENEWED_EVERY == 0:
                self._values[spec.name] = torch.randn(n, generator=dice)
                continue
            # Each place once: of two writes to one place, which is the last is left to chance.
            places = torch.randint(n, (max(1, n // 100),), generator=dice).unique()
            self._values[spec.name][places] = torch.randn(len(places), generator=dice)

    def shards(self, version: int, rank: int, num_ranks: int) -> Iterator[Shard]:
        """A ZeRO-3 rank's shards: ceil(n / num_ranks) elements, the last ranks fewer."""
        values = self.at(version)
        for spec in self._tensors:
            share = -(-spec.num_elements // num_ranks)
            yield Shard(name=spec.name, tensor=values[spec.name][rank * share : (rank + 1) * share])

    def file_data(self, version: int) -> Tensor:
        """uint8: the bytes behind the header of the staged file, cast to the serving dtypes."""
        values = self.at(version)
        return torch.cat(
            [
                values[spec.name].to(getattr(torch, spec.dtype)).view(torch.uint8)
                for spec in self.layout.tensors
            ]
        )
