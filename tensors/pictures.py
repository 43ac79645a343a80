"""The processor of a model's pictures: their tokens and their patches.

Workers, engines and trainer ranks use the same one, transformers' by Pillow, on the same files: so
all have the same pixels, bit for bit, also where torchvision is missing. The two sides of a run
then differ only by rounding.
"""

from __future__ import annotations

import io
import json
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor  # workers of text have no torch

FAMILIES = {"qwen3_vl": "Qwen2VLImageProcessorPil"}
"""Types of models with pictures whose trainer and engine were seen to compute the same, and their
processors, which are named since transformers' automatic class needs torchvision."""
PATCHES_KEPT_BYTES = 256 * 2**20
"""Bytes of patches that are kept: those of a group are asked for in each of its rows."""
COUNTS_KEPT = 64
"""Pictures whose numbers of tokens are kept."""


class Patches(NamedTuple):
    """One picture, cut for the model's tower."""

    values_PD: Tensor
    """float32 [patches, values of a patch]"""
    grid: tuple[int, int, int]
    """Patches in time (1), height and width."""


def takes_pictures(config: Any) -> bool:
    """Returns whether the model of this transformers config is of a family with pictures."""
    return getattr(config, "model_type", None) in FAMILIES


def has_pictures(model_path: str, *, trust_remote_code: bool) -> bool:
    """The same of a model's folder or name; False for a folder without a config. Raises what
    reading it raises."""
    path = Path(model_path, "config.json")
    if path.is_file():  # without transformers, whose import takes seconds
        return json.loads(path.read_bytes()).get("model_type") in FAMILIES
    if path.is_absolute():
        return False
    from transformers import AutoConfig

    return takes_pictures(
        AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code)
    )


def auto_class(config: Any) -> Any:
    """The class of transformers' that makes the model of this config."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if takes_pictures(config) else AutoModelForCausalLM


@dataclass(kw_only=True, slots=True, frozen=True)
class PictureTokens:
    """How pictures stand among a model's tokens."""

    place: int
    """The token of which a picture has one for each patch that the language model sees."""
    unsampled: tuple[int, ...]
    """Ascending: tokens that only a picture or a video brings, `place` too. The policy is the
    distribution over all others."""

    @classmethod
    def of(cls, config: Any) -> PictureTokens:
        marks = (
            config.image_token_id,
            config.video_token_id,
            config.vision_start_token_id,
            config.vision_end_token_id,
        )
        return cls(place=config.image_token_id, unsampled=tuple(sorted({*marks})))

    def runs(self, tokens: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Where the places of each picture begin and end."""
        start = 0
        for is_picture, run in groupby(tokens, lambda token: token == self.place):
            stop = start + len(list(run))
            if is_picture:
                yield start, stop
            start = stop

    def collapsed(self, tokens: Sequence[int]) -> list[int]:
        """With one place for each picture, as before they were counted."""
        return [
            token
            for at, token in enumerate(tokens)
            if token != self.place or not at or tokens[at - 1] != self.place
        ]


class PictureProcessor:
    """Example:

    processor = PictureProcessor.of("a/model", trust_remote_code=False)
    tokens = processor.expanded([.., place, ..], [picture])    # as many places as it has tokens
    values_PD, grid = processor.patches(picture)
    """

    def __init__(
        self, processor: Any, tokens: PictureTokens, *, kept_bytes: int = PATCHES_KEPT_BYTES
    ) -> None:
        self._processor = processor
        self.tokens = tokens
        self._kept: OrderedDict[bytes, Patches] = OrderedDict()
        self._room = kept_bytes
        self.num_tokens = lru_cache(COUNTS_KEPT)(self._num_tokens)
        """The number of places of a picture that was checked."""

    @classmethod
    def of(cls, model_path: str, *, trust_remote_code: bool) -> PictureProcessor | None:
        """None for a model that takes none. Raises ValueError naming model.path if the model's
        folder has no processor."""
        if not has_pictures(model_path, trust_remote_code=trust_remote_code):
            return None
        import transformers

        config = transformers.AutoConfig.from_pretrained(
            model_path, trust_remote_code=trust_remote_code
        )
        kind = getattr(transformers, FAMILIES[config.model_type])
        try:
            processor = kind.from_pretrained(model_path)
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(
                f"model.path={model_path!r}: the model takes pictures, but its folder has no "
                f"processor for them ({error}); copy its preprocessor_config.json"
            ) from error
        return cls(processor, PictureTokens.of(config))

    def patches(self, picture: bytes) -> Patches:
        """Returns those of a picture that was checked."""
        if (known := self._kept.get(picture)) is not None:
            self._kept.move_to_end(picture)
            return known
        found = self._kept[picture] = self._patches(picture)
        self._room -= found.values_PD.nbytes
        while self._room < 0 and len(self._kept) > 1:
            _, oldest = self._kept.popitem(last=False)
            self._room += oldest.values_PD.nbytes
        return found

    def expanded(self, tokens: Sequence[int], pictures: Sequence[bytes]) -> list[int]:
        """`tokens`, whose pictures have one place each, with all their places. Raises ValueError
        if there are more or fewer than `pictures`."""
        found = tokens.count(self.tokens.place)
        if found != len(pictures):
            raise ValueError(
                f"{len(pictures)} pictures have {found} places in what the chat template writes; "
                "use the model's own template"
            )
        counts, written = map(self.num_tokens, pictures), list[int]()
        for token in tokens:
            written += [token] * (next(counts) if token == self.tokens.place else 1)
        return written

    def check(self, tokens: Sequence[int], pictures: Sequence[bytes]) -> None:
        """Raises ValueError unless the places among `tokens` are those of `pictures`."""
        places = [end - start for start, end in self.tokens.runs(tokens)]
        counts = [self.num_tokens(picture) for picture in pictures]
        if places != counts:
            raise ValueError(f"its pictures have {counts} tokens, and their places are {places}")

    def _num_tokens(self, picture: bytes) -> int:
        from PIL import Image

        with Image.open(io.BytesIO(picture)) as image:
            size = image.height, image.width
        patches = self._processor.get_number_of_image_patches(*size, {})
        return int(patches // self._processor.merge_size**2)

    def _patches(self, picture: bytes) -> Patches:
        from PIL import Image

        with Image.open(io.BytesIO(picture)) as image:
            found = self._processor([image.convert("RGB")], return_tensors="pt")
        time, height, width = found["image_grid_thw"][0].tolist()
        return Patches(found["pixel_values"].float(), (time, height, width))
