"""A rank's pieces and random numbers in files that were damaged."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tensors.layout import Layout, TensorSpec
from trainer_pool.state.checkpoint import checksum_of
from trainer_pool.state.shards import (
    ShardReader,
    capture_rng,
    restore_rng,
    rng_file,
    shard_file,
    write_layout,
    write_pieces,
)

LAYOUT = Layout.of([TensorSpec(name="embed", dtype="float32", shape=(3, 5))], 2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two ranks' pieces of the numbers 0 to 14."""
    write_layout(tmp_path, LAYOUT)
    for rank, part in enumerate((torch.arange(8.0), torch.arange(8.0, 15.0))):
        write_pieces(tmp_path, LAYOUT, rank, [part], should_sync=True)
    rng_file(tmp_path, 0).write_text(capture_rng())
    return tmp_path


def test_checksum_that_is_taken_while_writing_is_that_of_the_file(tmp_path: Path) -> None:
    numbers = torch.arange(8.0)
    for parts in ([numbers], torch.split(numbers.view(torch.uint8), 3)):
        assert write_pieces(tmp_path, LAYOUT, 0, parts) == checksum_of(shard_file(tmp_path, 0))


def test_renamed_tensor_is_an_error_that_names_the_file(folder: Path) -> None:
    with ShardReader(folder) as reader:
        assert torch.equal(reader.tensor("embed"), torch.arange(15.0).reshape(3, 5))
    file = shard_file(folder, 1)
    file.write_bytes(file.read_bytes().replace(b"embed", b"embeD"))
    with (
        ShardReader(folder) as reader,
        pytest.raises(ValueError, match=rf"{file} is damaged: .*embed"),
    ):
        reader.tensor("embed")


NOTE = LAYOUT.to_json()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "[" * 100_000,
        '{"a": ' * 100_000,
        json.dumps({**NOTE, "num_ranks": 0}),
        json.dumps({**NOTE, "num_ranks": "2"}),
        json.dumps(NOTE).replace("2", "1e999"),
        json.dumps({**NOTE, "tensors": [["embed", "float32", [-3, 5]]]}),
        json.dumps({**NOTE, "tensors": [["embed", "float32", [3.0, 5]]]}),
        json.dumps({**NOTE, "tensors": 7}),
    ],
)
def test_layout_of_another_shape_is_an_error_that_names_the_folder(folder: Path, text: str) -> None:
    (folder / "layout.json").write_text(text)
    with pytest.raises(ValueError, match=f"{folder} is not a whole checkpoint"):
        ShardReader(folder)


def test_pipe_in_place_of_a_layout_does_not_wait_for_a_writer(folder: Path) -> None:
    (folder / "layout.json").unlink()
    os.mkfifo(folder / "layout.json")
    with pytest.raises(ValueError, match=r"layout\.json is not a regular file"):
        ShardReader(folder)


def huge_word(states: Any) -> None:
    states["numpy"]["state"]["key"][3] = 2**40


def huge_word_of_python(states: Any) -> None:
    states["python"][1][3] = 10**400


def another_generator(states: Any) -> None:
    states["numpy"]["bit_generator"] = "PCG64"


def short(states: Any) -> None:
    states["cpu"] = states["cpu"][:40]


def few_words(states: Any) -> None:
    del states["numpy"]["state"]["key"][5:]


def few_words_of_python(states: Any) -> None:
    del states["python"][1][5:]


@pytest.mark.parametrize(
    "spoil",
    [huge_word, huge_word_of_python, another_generator, short, few_words, few_words_of_python],
)
def test_random_numbers_of_another_shape_are_an_error_that_names_the_file(
    folder: Path, spoil: Callable[[Any], None]
) -> None:
    restore_rng(folder, 0)
    states = json.loads(rng_file(folder, 0).read_text())
    spoil(states)
    rng_file(folder, 0).write_text(json.dumps(states))
    with pytest.raises(ValueError, match=str(rng_file(folder, 0))):
        restore_rng(folder, 0)
