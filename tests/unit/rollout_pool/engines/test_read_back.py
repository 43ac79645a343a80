"""Conclusions from the hashes of an engine at two versions."""

from __future__ import annotations

import logging

import pytest

from rollout_pool.engines.read_back import ReadBack, Reading, WeightsNotTaken, difference
from tensors.layout import Layout, Part, TensorSpec
from weight_sync.types import Manifest

ATTENTION = [f"layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
MLP = [f"layers.0.mlp.{part}_proj.weight" for part in ("gate", "up", "down")]
NAMES = ["embed.weight", *ATTENTION, *MLP, "unknown.weight"]
PARAMETERS = [
    "embed.weight",
    "layers.0.self_attn.qkv_proj.weight",
    "layers.0.mlp.gate_up_proj.weight",
    "layers.0.mlp.down_proj.weight",
    "of_the_engine_alone",
]


def reading(version, changed=(), moved=()):
    """Everything is of version 1 but those that changed."""
    return Reading(
        version=version,
        layout_digest="same",
        published={name: [version if name in changed else 1] for name in NAMES},
        held={name: [f"of {version if name in moved else 1}"] for name in PARAMETERS},
    )


@pytest.mark.parametrize(
    ("changed", "moved", "problem"),
    [
        (NAMES, PARAMETERS, ""),
        ([], [], ""),  # as with a tiny learning rate in bfloat16
        (NAMES, PARAMETERS[:-1], ""),  # nobody knows what the last one is made of
        (["unknown.weight"], [], ""),
        ([ATTENTION[1]], [PARAMETERS[1]], ""),
        (
            NAMES,
            PARAMETERS[1:],
            "these parameters stayed though their tensors changed: embed.weight",
        ),
        ([MLP[1]], [], f"these parameters stayed though their tensors changed: {PARAMETERS[2]}"),
        (NAMES[:-1], [], "tensors changed: embed.weight, layers.0.mlp.down_proj.weight, "),
        (NAMES[:-1], [], "gate_up_proj.weight and 1 more"),
        ([], [PARAMETERS[3]], f"these parameters changed though their tensors stayed: {MLP[2]}"),
        ([], [PARAMETERS[4]], ""),
    ],
)
def test_difference_is_what_moved_otherwise_than_its_tensors(changed, moved, problem):
    found = difference(reading(1), reading(2, changed, moved))
    assert found.endswith(problem) if "more" in problem or not problem else problem in found
    assert bool(found) == bool(problem)


def test_engine_that_takes_nothing_is_found_though_no_name_is_known():
    fields = {"layout_digest": "same", "held": {"a": ["1"], "b": ["2"]}}
    before, now = (Reading(version=v, published={"c": [v]}, **fields) for v in (1, 2))
    assert difference(before, now) == "no parameter changed, though every tensor did"


@pytest.mark.parametrize(
    ("parts", "held"),
    [
        (("gate_proj", "up_proj", "down_proj"), ("w13_weight", "w2_weight")),
        (("w1", "w3", "w2"), ("w13_weight", "w2_weight")),
    ],
    ids=["Qwen", "Mixtral"],
)
def test_experts_that_an_engine_silently_left_are_named(parts, held):
    names = [f"layers.0.mlp.experts.{n}.{part}.weight" for n in range(2) for part in parts]
    parameters = [f"layers.0.mlp.experts.{name}" for name in held]

    def reading_of(version, moved):
        return Reading(
            version=version,
            layout_digest="same",
            published={name: [version] for name in names},
            held={name: [f"of {version if name in moved else 1}"] for name in parameters},
        )

    assert difference(reading_of(1, ()), reading_of(2, parameters)) == ""
    found = difference(reading_of(1, ()), reading_of(2, parameters[:1]))
    assert found == f"these parameters stayed though their tensors changed: {parameters[1]}"


def manifest_of(version, num_ranks=1):
    specs = [TensorSpec(name=name, dtype="float32", shape=(2,)) for name in ("a", "b")]
    layout = Layout.of(specs, num_ranks)
    return Manifest.of(version, layout, tuple((version, 7) for _ in range(num_ranks)))


async def test_tensors_that_no_parameter_is_known_for_are_counted_once(fake, client, caplog):
    fake.held = lambda version: {"a": fake.version}
    read_back = ReadBack(client, 60)
    with caplog.at_level(logging.WARNING):
        for fake.version in ("1", "2"):
            await read_back.read(manifest_of(int(fake.version)))
    [line] = caplog.messages
    assert (
        line.startswith("engine-0: 1 of 2 published tensors are not among") and line[-3:] == ": b"
    )


async def test_versions_of_another_layout_are_not_compared(fake, client):
    fake.held = lambda version: {"a": "the same"}
    read_back = ReadBack(client, 60)
    for manifest in (manifest_of(1), manifest_of(2, num_ranks=2)):
        await read_back.read(manifest)
    with pytest.raises(WeightsNotTaken):
        await read_back.read(manifest_of(3, num_ranks=2))


def test_parts_of_a_parameter_have_the_checksums_of_all_of_it():
    parts = (Part("experts.0.weight", (2,)), Part("experts.1.weight", (2,)))
    layout = Layout.of([TensorSpec(name="experts", dtype="float32", shape=(4,), parts=parts)], 2)
    manifest = Manifest.of(1, layout, ((3,), (5,)))
    assert manifest.tensor_checksums == {part.name: [3, 5] for part in parts}


def test_checksums_of_a_tensor_are_those_of_its_pieces():
    assert manifest_of(5, num_ranks=2).tensor_checksums == {"a": [5, 5], "b": [7, 7]}
