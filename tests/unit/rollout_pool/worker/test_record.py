"""Recording the groups of a worker, and reading them again."""

from __future__ import annotations

import asyncio
import json
import resource
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from buffer.types import PromptRef, SamplingParams, Trajectory, TrajectoryGroup, VersionSpan
from rollout_pool.episodes.conversation import Message, ToolCall
from rollout_pool.worker.record import RolloutLog, all_recorded, read_recorded
from tests.support.repository import ROOT

CALL = ToolCall(call_id="c1", name="add", arguments={"n": [3, 4], "where": "a/ö"})
CONVERSATIONS = {
    1: (
        Message(role="user", content="3 \ufffc 4 = „?“", pictures=("/plus.png",)),
        Message(role="assistant", content="", tool_calls=(CALL,)),
        Message(role="tool", content="7", tool_call_id="c1", name="add"),
        Message(role="assistant", content=" 7 <think>\n"),
    )
}


def make_group(group_id: str, num_tokens: int = 6) -> TrajectoryGroup:
    mask = np.array([0] + [1, 1, 0, 1] * num_tokens, np.uint8)[:num_tokens]
    one = Trajectory(
        tokens=np.arange(num_tokens, dtype=np.int32),
        loss_mask=mask,
        rollout_logprobs=(mask * -0.123456789).astype(np.float32),
        version_spans=(
            VersionSpan(version=7, start=0, end=3),
            VersionSpan(version=8, start=3, end=num_tokens),
        ),
        prompt_length=1,
        reward=0.5,
        finish_reason="stop",
        reward_parts={"right": 1.0, "short": -0.5},
        columns={
            "teacher_logprobs": (mask * -0.987654321).astype(np.float32),
            "choices": np.arange(2 * num_tokens, dtype=np.int32).reshape(num_tokens, 2),
            "experts": np.arange(2 * num_tokens, dtype=np.uint8).reshape(num_tokens, 2),
        },
    )
    return TrajectoryGroup(
        group_id=group_id,
        prompt=PromptRef(task="sums", index=3, attempt=1),
        trajectories=(one, replace(one, episode=1, role="critic", loss_mask=1 - mask, reward=0.0)),
        sampling=SamplingParams(temperature=0.8),
    )


def assert_same(one: Trajectory, other: Trajectory) -> None:
    for name in ("tokens", "loss_mask", "rollout_logprobs"):
        np.testing.assert_array_equal(getattr(other, name), getattr(one, name))
    for name in ("version_spans", "reward", "reward_parts", "episode", "role", "finish_reason"):
        assert getattr(other, name) == getattr(one, name)
    assert list(other.columns) == list(one.columns)
    for name, column in one.columns.items():
        assert other.columns[name].dtype == column.dtype
        np.testing.assert_array_equal(other.columns[name], column)


async def test_every_field_of_a_line_is_on_the_page(tmp_path: Path) -> None:
    log = RolloutLog(tmp_path, "worker-0", 1.0, 0)
    await log.write(make_group("w0-1"), "3 + 4 =", {})
    line = json.loads(log.path.read_text())
    [first, *_] = line["trajectories"]
    page = (ROOT / "docs/rollouts.md").read_text()
    table = page.partition("## Inspecting groups")[2].partition("\n## ")[0]
    names = [*line, *line["prompt"], *line["sampling"], *first, *first["columns"]["choices"]]
    assert [name for name in names if f"`{name}`" not in table] == []


@pytest.mark.parametrize("num_tokens", [6, 10_001], ids=["short", "long"])
async def test_group_is_read_as_it_was_written(tmp_path: Path, num_tokens: int) -> None:
    log, group = RolloutLog(tmp_path, "worker-0", 1.0, 0), make_group('w0-"17"', num_tokens)
    await log.write(group, "3 + 4 =\n„?“", CONVERSATIONS)
    await log.write(make_group("w0-18"), "another", {})
    found = read_recorded(tmp_path, 'w0-"17"')
    assert found is not None
    assert (found.text, found.worker) == ("3 + 4 =\n„?“", "worker-0")
    call = {"name": "add", "arguments": json.dumps(CALL.arguments)}
    shown = [{"type": "text", "text": "3 "}, {"type": "image", "image": "/plus.png"}]
    assert found.messages == {
        1: [
            {"role": "user", "content": [*shown, {"type": "text", "text": " 4 = „?“"}]},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": "c1", "type": "function", "function": call}],
            },
            {"role": "tool", "content": "7", "tool_call_id": "c1", "name": "add"},
            {"role": "assistant", "content": " 7 <think>\n"},
        ]
    }
    assert (found.group.prompt, found.group.sampling) == (group.prompt, group.sampling)
    for one, other in zip(group.trajectories, found.group.trajectories, strict=True):
        assert_same(one, other)
    line = log.path.read_text().splitlines()[0]
    assert json.loads(line)["trajectories"][0]["logprobs"][1] == -0.123456791


@pytest.mark.parametrize("kind", ["float16", "float32", "float64"])
async def test_numbers_are_read_exactly_as_they_were(tmp_path: Path, kind: str) -> None:
    group = make_group("exact", 6)
    numbers = np.array([-1e-7, -1 / 3, -17.25, 0.0, 65504, -2e-5], kind)
    logprobs = np.array([0, -1e-7, -1 / 3, -2e-5, 0, -103.97208], np.float32)
    one = replace(group.trajectories[0], rollout_logprobs=logprobs, columns={"numbers": numbers})
    await RolloutLog(tmp_path, "worker-0", 1.0, 0).write(
        replace(group, trajectories=(one,)), "", {}
    )
    found = read_recorded(tmp_path, "exact")
    assert found is not None
    assert_same(one, found.group.trajectories[0])


async def test_newest_record_of_all_workers_is_found_without_an_id(tmp_path: Path) -> None:
    assert read_recorded(tmp_path, None) is None
    for worker, group_id in (("worker-1", "a"), ("worker-0", "b"), ("worker-1", "c")):
        await RolloutLog(tmp_path, worker, 1.0, 0).write(make_group(group_id), "", {})
    found = read_recorded(tmp_path, None)
    assert found is not None and (found.group.group_id, found.worker) == ("c", "worker-1")
    assert read_recorded(tmp_path, "d") is None


async def test_rate_chooses_by_id_and_seed_alone(tmp_path: Path) -> None:
    ids = [f"w0-{i}" for i in range(2_000)]
    chosen = [RolloutLog(tmp_path, "worker-0", 0.1, seed) for seed in (1, 1, 2)]
    kept = [{group_id for group_id in ids if log.wants(group_id)} for log in chosen]
    assert kept[0] == kept[1] != kept[2]
    assert 160 < len(kept[0]) < 240
    more = RolloutLog(tmp_path, "worker-0", 0.2, 1)
    assert all(more.wants(group_id) for group_id in kept[0])
    assert not any(RolloutLog(tmp_path, "worker-0", 0.0, 1).wants(i) for i in ids)
    assert all(RolloutLog(tmp_path, "worker-0", 1.0, 1).wants(i) for i in ids)


async def test_files_are_bounded_and_the_oldest_is_removed(tmp_path: Path) -> None:
    probe = RolloutLog(tmp_path / "probe", "worker-0", 1.0, 0)
    (tmp_path / "probe").mkdir()
    await probe.write(make_group("g-00"), "", {})
    size = probe.path.stat().st_size + 20
    log = RolloutLog(tmp_path, "worker-0", 1.0, 0, max_file_bytes=3 * size, num_files=3)
    await asyncio.gather(*(log.write(make_group(f"g-{i:02}"), "", {}) for i in range(20)))
    files = sorted((tmp_path / "rollouts").iterdir())
    assert [file.name for file in files] == [
        "worker-0.jsonl",
        "worker-0.jsonl.1",
        "worker-0.jsonl.2",
    ]
    assert all(file.stat().st_size <= 3 * size for file in files)
    lines = [line for file in files for line in file.read_text().splitlines()]
    kept = [json.loads(line)["group_id"] for line in lines]
    assert len(kept) == len({*kept}) == 3 + 3 + 2
    for group_id in kept:
        assert read_recorded(tmp_path, group_id) is not None
    oldest_first = [line for file in reversed(files) for line in file.read_text().splitlines()]
    assert [one.group.group_id for one in all_recorded(tmp_path)] == [
        json.loads(line)["group_id"] for line in oldest_first
    ]


async def test_rotation_while_all_are_read_loses_none(tmp_path: Path) -> None:
    log = RolloutLog(tmp_path, "worker-0", 1.0, 0)
    for group_id in ("a", "b", "c"):
        log._rotate()
        await log.write(make_group(group_id), "", {})
    reading = all_recorded(tmp_path)
    found = [next(reading)]
    log._rotate()
    await log.write(make_group("d"), "", {})
    found += reading
    assert [one.group.group_id for one in found] == ["a", "b", "c"]


async def test_group_above_the_bound_is_left_out(tmp_path: Path, caplog) -> None:
    log = RolloutLog(tmp_path, "worker-0", 1.0, 0, max_file_bytes=1000)
    await log.write(make_group("a", 1000), "", {})
    assert log.num_lost == 1 and not log.path.exists()


async def test_conversation_that_json_does_not_hold_is_left_out(tmp_path: Path) -> None:
    log = RolloutLog(tmp_path, "worker-0", 1.0, 0)
    call = ToolCall(call_id="c1", name="add", arguments={"numbers": {3, 4}})  # an environment's
    half = Message(role="tool", content="\ud800")
    for message in (half, Message(role="assistant", content="", tool_calls=(call,))):
        await log.write(make_group("a"), "", {0: (message,)})
    assert log.num_lost == 2 and not log.path.exists()


async def test_unwritable_folder_loses_lines_and_warns_once(tmp_path: Path, caplog) -> None:
    (tmp_path / "rollouts").write_text("a file in the way")
    log = RolloutLog(tmp_path, "worker-0", 1.0, 0)
    for _ in range(3):
        await log.write(make_group("a"), "", {})
    assert log.num_lost == 3
    assert len(caplog.records) == 1 and "is not recorded" in caplog.text


async def test_truncated_line_is_skipped(tmp_path: Path) -> None:
    log = RolloutLog(tmp_path, "worker-0", 1.0, 0)
    await log.write(make_group("a"), "", {})
    with log.path.open("a") as file:
        file.write('{"group_id":"b","at":17')
    found = read_recorded(tmp_path, None)
    assert found is not None and found.group.group_id == "a"
    await RolloutLog(tmp_path, "worker-0", 1.0, 0).write(make_group("c"), "", {})  # a later life
    found = read_recorded(tmp_path, None)
    assert found is not None and found.group.group_id == "c"


LINE = "rollouts/worker-0.jsonl:1 is damaged"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('{"group_id":"a"', '{"group_ix":"a"'),
        ('{"group_id":"a"', '\0\xff{"group_id":"a"'),
        ('"group_id":"a"', '"group_id":"a","at":' + 100_000 * "["),
        ('"reward":0.5', '"reward":"much"'),
        ('"reward":0.5', '"reward":1e999'),
        ('"reward":0.5', '"reward":NaN'),
        ('"episode":0', '"episode":%s' % ("9" * 5000)),
        ('"version_spans":[[7', '"version_spans":[[-7'),
        ('"version_spans":[[7,0,3]', '"version_spans":[[7,3,0]'),
        ('"loss_mask_runs":[1', '"loss_mask_runs":[1000000000000'),
        ('"prompt_length":1', '"prompt_length":7'),
        ('"tokens":[0,', '"tokens":[4294967295,'),
        ('"tokens":[0,', '"tokens":[0.5,'),
        ('"logprobs":[', '"logprobs":[0,'),
        ('"dtype":"float32"', '"dtype":"S1000000000"'),
        ('"shape":[6]', '"shape":[4294967295,4294967295]'),
        ('"trajectories":[', '"trajectories":[[],'),
    ],
    ids=range(17),
)
async def test_damaged_line_is_named_by_file_and_number(tmp_path: Path, old: str, new: str) -> None:
    log = RolloutLog(tmp_path, "worker-0", 1.0, 0)
    await log.write(make_group("a"), "", {})
    whole = log.path.read_text()
    assert old in whole
    log.path.write_text(whole.replace(old, new, 1), encoding="latin-1")
    with pytest.raises(ValueError, match=LINE):
        read_recorded(tmp_path, "a")


async def test_noise_in_another_line_is_named_too(tmp_path: Path) -> None:
    log = RolloutLog(tmp_path, "worker-0", 1.0, 0)
    log.path.parent.mkdir()
    log.path.write_bytes(b"\0" * 64 + b"\n")
    await log.write(make_group("a"), "", {})
    for group_id in ("a", None):
        with pytest.raises(ValueError, match=LINE):
            read_recorded(tmp_path, group_id)


async def test_lines_are_complete_again_after_a_full_disk(tmp_path: Path) -> None:
    """The limit of a file's size acts like a disk that is full: a part of the line is written.

    Python ignores the signal that comes with it (SIGXFSZ) and raises OSError.
    """
    log = RolloutLog(tmp_path, "worker-0", 1.0, 0)
    await log.write(make_group("a"), "", {})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (log.path.stat().st_size + 100, limits[1]))
    try:
        await log.write(make_group("b"), "", {})
        await log.write(make_group("c"), "", {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    await log.write(make_group("d"), "", {})
    assert log.num_lost == 2
    assert [read_recorded(tmp_path, i) is not None for i in "abcd"] == [True, False, False, True]
