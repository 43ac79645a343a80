"""The weights in the files of a Hugging Face model, read one by one as they are needed."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError
from safetensors import SafetensorError, safe_open
from torch import Tensor

_INDEX, _WHOLE = "model.safetensors.index.json", "model.safetensors"


class BaseWeights:
    """Maps the files, so that the pages of a tensor that is read again are in memory already.

    Example:

        with BaseWeights("a/model") as base:
            weight = base.tensor("model.layers.0.self_attn.q_proj.weight")
    """

    def __init__(self, model_path: str) -> None:
        """`model_path`: a folder, or a model of the Hugging Face hub, which is downloaded where it
        is not here yet. Raises ValueError if it has no safetensors files."""
        self._model_path = model_path
        self._open = ExitStack()
        self._files: dict[str, Any] = {}
        if (index := self._path(_INDEX)) is not None:
            self._file_of: dict[str, str] = json.loads(index.read_text())["weight_map"]
        elif self._path(_WHOLE) is not None:
            self._file_of = dict.fromkeys(self._file(_WHOLE).keys(), _WHOLE)
        else:
            raise ValueError(
                f"model.path={model_path!r}: neither {_WHOLE} nor {_INDEX} is there or can be "
                "fetched; save the model again with save_pretrained, as safetensors"
            )

    def tensor(self, name: str) -> Tensor:
        """Raises ValueError if the model has no such weight, or its file cannot be read."""
        tensor: Tensor = self._file_with(name).get_tensor(name)
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        """Raises ValueError like `tensor`."""
        return tuple(self._file_with(name).get_slice(name).get_shape())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def _file_with(self, weight: str) -> Any:
        if (name := self._file_of.get(weight)) is None:
            raise ValueError(f"model.path={self._model_path!r} has no weight {weight}")
        return self._file(name)

    def _file(self, name: str) -> Any:
        if name not in self._files:
            if (path := self._path(name)) is None:
                raise ValueError(f"model.path={self._model_path!r}: {name} is missing; copy it")
            try:
                opened = self._open.enter_context(safe_open(path, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise ValueError(
                    f"model.path={self._model_path!r}: {name} cannot be read ({error}); copy it "
                    "again"
                ) from error
            self._files[name] = opened
        return self._files[name]

    def _path(self, name: str) -> Path | None:
        """None if the model has no such file."""
        folder = Path(self._model_path)
        if folder.is_dir():
            return folder / name if (folder / name).is_file() else None
        try:
            return Path(hf_hub_download(self._model_path, name))
        except EntryNotFoundError:  # or there is no network, and nothing is known of it
            return None
        except (HfHubHTTPError, OSError, ValueError) as error:
            raise ValueError(
                f"model.path={self._model_path!r}: {name} cannot be fetched ({error})"
            ) from error
