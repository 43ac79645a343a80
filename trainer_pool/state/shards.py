"""The training state on disk: one safetensors file a rank, read by any number of ranks.

    rank-00.safetensors    [embed 0 | q 0 | ... | embed:exp_avg 0 | ...]    rank 0's pieces, flat
    rank-01.safetensors    [embed 1 | q 1 | ... | embed:exp_avg 1 | ...]
    layout.json            the whole tensors, and over how many ranks they are cut

Of each trained parameter there are the float32 weights under its Hugging Face name, and the
optimizer's state. Nothing is pickled.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from isal.isal_zlib import crc32
from msgspec import Meta
from safetensors import SafetensorError, safe_open
from torch import Tensor

from configs.run_files import read_json
from tensors.layout import ITEM_BYTES, Layout, TensorSpec
from trainer_pool.state.checkpoint import Checksum

LAYOUT_FILE = "layout.json"


def shard_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:02d}.safetensors"


def write_layout(folder: Path, layout: Layout) -> None:
    (folder / LAYOUT_FILE).write_text(json.dumps(layout.to_json()))


def write_pieces(
    folder: Path,
    layout: Layout,
    rank: int,
    pieces: Iterable[Tensor],
    *,
    should_sync: bool = False,
) -> Checksum:
    """Write a rank's `pieces` in the order of the layout, or any cut of all their bytes;
    `should_sync`: each to the disk itself. Raises OSError."""
    num_bytes = running = 0
    parts = (piece.cpu().contiguous().view(torch.uint8).numpy().data for piece in pieces)
    with shard_file(folder, rank).open("wb", buffering=0) as file:
        for part in chain([memoryview(_file_header(layout, rank))], parts):
            num_bytes, running = num_bytes + part.nbytes, crc32(part, running)
            while part:
                part = part[os.write(file.fileno(), part) :]
            del part  # it holds the copy from a GPU, and the next one is made before it is replaced
            if should_sync:
                os.fsync(file.fileno())
    return Checksum(num_bytes=num_bytes, crc32=running)


def _file_header(layout: Layout, rank: int) -> bytes:
    """The header of a file with this rank's pieces; empty if the rank has none."""
    specs = []
    for piece in layout.pieces[rank]:
        name, dtype = layout.tensors[piece.tensor].name, layout.tensors[piece.tensor].dtype
        shape = (piece.num_bytes // ITEM_BYTES[dtype],)
        specs.append(TensorSpec(name=name, dtype=dtype, shape=shape))
    return bytes(Layout.of(specs, 1).file_header) if specs else b""


def capture_rng() -> str:
    """The state of this process's random numbers (torch's, numpy's and Python's own) as JSON."""
    numbers = np.random.get_state(legacy=False)
    numbers["state"]["key"] = numbers["state"]["key"].tolist()
    states = {
        "cpu": torch.get_rng_state().numpy().tobytes().hex(),
        "numpy": numbers,
        "python": random.getstate(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state().numpy().tobytes().hex()
    return json.dumps(states)


_Word = Annotated[int, Meta(ge=0, lt=2**32)]


@dataclass(kw_only=True, slots=True, frozen=True)
class _Words:
    key: Annotated[tuple[_Word, ...], Meta(min_length=624, max_length=624)]
    pos: Annotated[int, Meta(ge=0, le=624)]


@dataclass(kw_only=True, slots=True, frozen=True)
class _NumpyNumbers:
    state: _Words
    has_gauss: _Word
    gauss: float
    bit_generator: Literal["MT19937"]


@dataclass(kw_only=True, slots=True, frozen=True)
class _RandomNumbers:
    """The text that `capture_rng` returned."""

    cpu: str
    numpy: _NumpyNumbers
    python: tuple[_Word, tuple[_Word, ...], float | None]
    cuda: str | None = None


def restore_rng(folder: Path, rank: int) -> None:
    """Go on with the random numbers of `rank`. Raises ValueError."""
    path = rng_file(folder, rank)
    try:
        states = read_json(path, _RandomNumbers)
        torch.set_rng_state(_bytes(states.cpu))
        if states.cuda is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(_bytes(states.cuda))
        np.random.set_state(asdict(states.numpy))
        random.setstate(states.python)
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def _bytes(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


def rng_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:02d}.rng.json"


class ShardReader:
    """Reads the state that some number of ranks wrote.

    Example, any part of a tensor whichever ranks wrote it, and a whole one:

        with ShardReader(Path("runs/NAME/checkpoints/step-000050")) as reader:
            piece = reader.read("model.embed_tokens.weight", 1000, 2000)
            weights = reader.tensor("model.embed_tokens.weight")
    """

    def __init__(self, folder: Path, only: int | None = None) -> None:
        """`only`: the pieces of this rank, the rest may be missing. Raises ValueError if `folder`
        is not a whole checkpoint of this form."""
        self._folder = folder
        self._open = ExitStack()
        try:
            self.layout = Layout.from_json(read_json(folder / LAYOUT_FILE, dict[str, Any]))
            self._files = {
                rank: self._open.enter_context(safe_open(shard_file(folder, rank), "pt"))
                for rank in range(self.layout.num_ranks)
                if only in (None, rank)
            }
        except (OSError, ValueError, SafetensorError) as error:
            self._open.close()
            raise ValueError(f"{folder} is not a whole checkpoint: {error}") from error
        self._specs = {tensor.name: tensor for tensor in self.layout.tensors}

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """[stop - start] elements of the flattened tensor. Raises ValueError if it is not there."""
        spec = self._specs.get(name)
        if spec is None or stop > spec.num_elements:
            raise ValueError(
                f"{self._folder} does not hold elements {start} to {stop} of {name}: it is of "
                "another model"
            )
        share = -(-spec.num_elements // self.layout.num_ranks)
        parts = []
        while start < stop:
            rank = start // share
            end = min(stop, (rank + 1) * share)
            try:
                piece = self._files[rank].get_slice(name)
                parts.append(piece[start - rank * share : end - rank * share])
            except SafetensorError as error:
                raise ValueError(f"{shard_file(self._folder, rank)} is damaged: {error}") from error
            start = end
        return torch.cat(parts) if parts else torch.empty(0)

    def tensor(self, name: str) -> Tensor:
        spec = self._specs[name]
        return self.read(name, 0, spec.num_elements).reshape(spec.shape)

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()


def differences(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """The first names of tensors whose whole shapes differ, or that only one of the two has."""
    shapes = [
        {name: tuple(getattr(tensor, "ds_shape", tensor.shape)) for name, tensor in of.items()}
        for of in (mine, theirs)
    ]
    wrong = sorted(n for n in {*mine, *theirs} if shapes[0].get(n) != shapes[1].get(n))
    return ", ".join(wrong[:3]) + (" ..." if len(wrong) > 3 else "")
