"""The weights in the files of a Hugging Face model, read one by one as they are needed."""

from __future__ import annotations

import json
from collections.abc import Set
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError
from safetensors import safe_open
from torch import Tensor

_SAFETENSORS, _TORCH = "model.safetensors", "pytorch_model.bin"


class BaseWeights:
    """Maps the files, so that the pages of a tensor that is read again are in memory already.

    Example:

        with BaseWeights("a/model") as base:
            weight = base.tensor("model.layers.0.self_attn.q_proj.weight")
    """

    def __init__(self, model_path: str) -> None:
        """`model_path`: a folder, or a model of the Hugging Face hub, which is downloaded where it
        is not here yet. Raises ValueError if it has no files of weights."""
        self._model_path = model_path
        self._open = ExitStack()
        self._files: dict[str, Any] = {}
        self._file_of = self._find_files()

    def _find_files(self) -> dict[str, str]:
        """The file of each weight."""
        for whole in (_SAFETENSORS, _TORCH):
            if (index := self._path(f"{whole}.index.json")) is not None:
                found: dict[str, str] = json.loads(index.read_text())["weight_map"]
                return found
            if self._path(whole) is not None:
                return dict.fromkeys(self._file(whole).keys(), whole)
        raise ValueError(
            f"model.path={self._model_path!r}: no weights: neither {_SAFETENSORS} nor {_TORCH}, in "
            "one file or sharded, is there or can be fetched; save the model again with "
            "save_pretrained"
        )

    @property
    def names(self) -> Set[str]:
        """The names of all weights."""
        return self._file_of.keys()

    def tensor(self, name: str) -> Tensor:
        """Raises ValueError if the model has no such weight, or its file cannot be read."""
        file = self._file_with(name)
        tensor: Tensor = file[name] if isinstance(file, dict) else file.get_tensor(name)
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        """Raises ValueError like `tensor`."""
        file = self._file_with(name)
        return tuple(
            file[name].shape if isinstance(file, dict) else file.get_slice(name).get_shape()
        )

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
            opened: Any
            try:
                if path.suffix == ".safetensors":
                    opened = self._open.enter_context(safe_open(path, framework="pt"))
                else:
                    opened = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except Exception as error:  # also that of an object which no tensor is
                raise ValueError(
                    f"model.path={self._model_path!r}: {name} cannot be read ({error}); copy it "
                    "again, or save the model again with save_pretrained, as safetensors"
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
