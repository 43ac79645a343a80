"""The wire format: what goes in comes out, and no bytes can do more than raise ValueError."""

from __future__ import annotations

import struct
import zlib
from dataclasses import asdict, replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buffer.types import PromptRef, SamplingParams, Trajectory, TrajectoryGroup, VersionSpan
from buffer.wire.codec import FORMAT_VERSION, decode_group, encode_group
from buffer.wire.header import COLUMN_TYPES
from tests.support.buffer.groups import make_group
from tests.support.buffer.random_groups import random_trajectory
from tests.support.repository import ROOT


@st.composite
def episodes(draw: st.DrawFn) -> tuple[Trajectory, ...]:
    """Some trajectories of which some are of one episode, whose reward they have, in any order."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    several = draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))
    numbers = {old: new for new, old in enumerate(draw(st.permutations(sorted({*several}))))}
    rewards = [draw(st.floats(allow_nan=False, allow_infinity=False)) for _ in numbers]
    return tuple(
        replace(
            random_trajectory(random, *random.integers((1, 0), (41, 4)).tolist()),
            episode=numbers[old],
            reward=rewards[numbers[old]],
            finish_reason=draw(st.sampled_from(["stop", "length", ""])),
            reward_parts=draw(st.dictionaries(st.text(max_size=5), st.floats(-1, 1), max_size=3)),
        )
        for old in several
    )


numbers = st.floats(allow_nan=False, allow_infinity=False)
samplings = st.builds(
    SamplingParams,
    temperature=numbers,
    top_p=numbers,
    top_k=st.integers(-1, 2**40),
    min_p=numbers,
    frequency_penalty=numbers,
    presence_penalty=numbers,
    repetition_penalty=numbers,
)


groups = st.builds(
    TrajectoryGroup,
    group_id=st.text(min_size=1, max_size=30),
    prompt=st.builds(
        PromptRef,
        task=st.text(max_size=20),
        index=st.integers(0, 2**63),
        attempt=st.integers(0, 2**32 - 1),
    ),
    trajectories=episodes(),
    sampling=samplings,
)


def _assert_same(one: Trajectory, other: Trajectory) -> None:
    for name in ("tokens", "loss_mask", "rollout_logprobs"):
        mine, its = getattr(one, name), getattr(other, name)
        assert mine.dtype == its.dtype and np.array_equal(mine, its), name
    assert one.columns.keys() == other.columns.keys()
    for name, column in one.columns.items():
        assert column.dtype == other.columns[name].dtype
        assert column.shape == other.columns[name].shape
        assert np.array_equal(column, other.columns[name])
    for name in ("version_spans", "prompt_length", "episode", "reward", "finish_reason"):
        assert getattr(one, name) == getattr(other, name), name
    assert one.reward_parts == other.reward_parts


@settings(max_examples=50)
@given(groups, st.booleans())
def test_group_comes_back_as_it_went(group: TrajectoryGroup, compress: bool) -> None:
    copy = decode_group(encode_group(group, compress))
    assert encode_group(copy) == encode_group(group)
    assert (copy.group_id, copy.prompt) == (group.group_id, group.prompt)
    assert copy.sampling == group.sampling
    assert len(copy.trajectories) == len(group.trajectories)
    for one, other in zip(group.trajectories, copy.trajectories, strict=True):
        _assert_same(one, other)
    assert copy.min_version == group.min_version


def test_long_trajectory_takes_eight_bytes_a_token() -> None:
    group = make_group("long", num_tokens=160_000, prompt_length=1000, size=1)
    data = encode_group(group)
    assert len(data) < 8.003 * 160_000
    assert decode_group(data).num_tokens == 160_000


def _agentic_group(size: int, num_tokens: int) -> TrajectoryGroup:
    """Long episodes of many turns, with every column that a trainer may ask for."""
    random = np.random.default_rng(0)
    mask = np.zeros(num_tokens, np.uint8)
    turns = [(start, start + 700) for start in range(1000, num_tokens - 700, 1000)]
    for start, end in turns:
        mask[start:end] = 1
    trajectory = Trajectory(
        tokens=(random.zipf(1.3, num_tokens) % 150_000).astype(np.int32),
        loss_mask=mask,
        rollout_logprobs=np.where(mask, -random.exponential(0.5, num_tokens), 0).astype(np.float32),
        version_spans=tuple(
            VersionSpan(version=number // 20, start=start, end=end)
            for number, (start, end) in enumerate(turns)
        ),
        prompt_length=1000,
        reward=1.0,
        finish_reason="stop",
        columns={
            "teacher_logprobs": -random.random(num_tokens, np.float32),
            "routed_experts": random.integers(0, 128, (num_tokens, 8)).astype(np.uint8),
        },
    )
    prompt = PromptRef(task="agent", index=3)
    return TrajectoryGroup(group_id="long", prompt=prompt, trajectories=(trajectory,) * size)


@pytest.mark.parametrize("compress", [False, True])
def test_group_of_eight_160k_token_trajectories_comes_back_with_its_columns(
    compress: bool,
) -> None:
    group = _agentic_group(8, 160_000)
    data = encode_group(group, compress)
    assert len(data) < (8 + 4 + 8) * group.num_tokens + 100_000
    assert not compress or len(data) < 0.8 * 20 * group.num_tokens
    copy = decode_group(data)
    for one, other in zip(group.trajectories, copy.trajectories, strict=True):
        _assert_same(one, other)
    assert copy.tokens_by_version == group.tokens_by_version
    assert copy.min_version == 0


def test_compression_makes_real_groups_smaller_and_never_one_larger() -> None:
    for group in (make_group("g", num_tokens=4), _agentic_group(2, 3000)):
        plain, packed = encode_group(group), encode_group(group, compress=True)
        assert len(packed) <= len(plain)
        assert decode_group(packed).num_tokens == group.num_tokens


def test_group_that_compresses_like_a_bomb_is_sent_uncompressed() -> None:
    group = make_group("g", num_tokens=4, size=1)
    (trajectory,) = group.trajectories
    zeros = np.zeros((4, 2**21), np.uint8)
    group = replace(group, trajectories=(replace(trajectory, columns={"zeros": zeros}),))
    assert encode_group(group, compress=True) == encode_group(group)


def test_tokens_are_counted_by_version() -> None:
    mask = np.array([0, 1, 1, 0, 1, 1], np.uint8)
    spans = ((9, 0, 2), (4, 2, 4), (9, 4, 5), (2, 5, 6))
    one = _trajectory(
        tokens=np.arange(6, dtype=np.int32),
        loss_mask=mask,
        rollout_logprobs=np.zeros(6, np.float32),
        version_spans=tuple(VersionSpan(version=v, start=a, end=b) for v, a, b in spans),
    )
    group = replace(_group_of(one), trajectories=(one, _trajectory(episode=1)))
    assert list(one.tokens_by_version.items()) == [(2, 1), (4, 1), (9, 2)]
    assert list(group.tokens_by_version.items()) == [(2, 1), (4, 3), (9, 2)]
    assert (group.min_version, group.num_trainable_tokens) == (2, 6)


def test_decoded_arrays_are_aligned_and_cannot_be_written() -> None:
    copy = decode_group(encode_group(make_group("g", num_tokens=7))).trajectories[1]
    for array in (copy.tokens, copy.loss_mask, copy.rollout_logprobs):
        assert array.flags.aligned and not array.flags.writeable


def _trajectory(**changes: Any) -> Trajectory:
    values: dict[str, Any] = {
        "tokens": np.array([1, 2, 3], np.int32),
        "loss_mask": np.array([0, 1, 1], np.uint8),
        "rollout_logprobs": np.array([0, -1, -2], np.float32),
        "version_spans": (VersionSpan(version=4, start=1, end=3),),
        "prompt_length": 1,
        "reward": 0.5,
        "finish_reason": "stop",
    }
    return Trajectory(**{**values, **changes})


def _group_of(trajectory: Trajectory) -> TrajectoryGroup:
    prompt = PromptRef(task="sums", index=0)
    return TrajectoryGroup(group_id="g", prompt=prompt, trajectories=(trajectory,))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout_logprobs": np.array([0, np.nan, 0], np.float32)}, "NaN"),
        ({"loss_mask": np.array([0, 2, 0], np.uint8)}, "loss_mask"),
        ({"loss_mask": np.zeros(3, np.uint8)}, "no trainable token"),
        ({"tokens": np.array([1, -2, 3], np.int32)}, "token id -2"),
        ({"reward": float("inf")}, "not finite"),
        ({"reward_parts": {"format": float("nan")}}, "not finite"),
        ({"version_spans": ()}, "2 trainable tokens are in no version span"),
        ({"version_spans": (VersionSpan(version=1, start=2, end=3),)}, "1 trainable tokens"),
        ({"version_spans": (VersionSpan(version=1, start=1, end=4),)}, "ends after the tokens"),
        ({"version_spans": (VersionSpan(version=2**32, start=1, end=3),)}, "32 bits"),
        ({"version_spans": (VersionSpan(version=2**21, start=1, end=3),)}, "above the highest"),
        ({"tokens": np.array([1, 2, 2**31], np.int64)}, "tokens of int64"),
        ({"rollout_logprobs": np.array([0, -1, 1e300])}, "infinity"),
        ({"columns": {"teacher": np.array([0, np.nan, 0], np.float16)}}, "'teacher' holds NaN"),
        ({"columns": {"teacher": np.array([0, np.inf, 0])}}, "'teacher' holds NaN or inf"),
        (
            {"columns": {str(i): np.zeros(3, np.int8) for i in range(257)}},
            r"columns=.* length <= 256",
        ),
        ({"finish_reason": "\ud800"}, "surrogates"),
        ({"columns": {"names": np.array(["a", "b", "c"])}}, "column 'names'"),
        ({"columns": {"deep": np.zeros((3, 2, 2), np.float32)}}, "column 'deep'"),
        ({"finish_reason": "x" * 70_000}, "finish_reason='xx.* does not fit"),
    ],
)
def test_encoding_refuses_what_must_not_be_trained(changes: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        encode_group(_group_of(_trajectory(**changes)))


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([(0, 0.5), (2, 0.5)], "episode 2 among 2"),
        ([(1, 0.5)], "episode 1 among 1"),
        ([(0, 0.5), (-1, 0.5)], r"trajectories\[1\]\.episode=-1 does not fit"),
        ([(0, 0.5), (1, 1.0), (0, 0.25)], r"episode 0 have rewards 0\.5 and 0\.25"),
    ],
)
def test_episodes_are_numbered_from_zero_and_have_one_reward_each(
    members: list[tuple[int, float]], message: str
) -> None:
    some = tuple(_trajectory(episode=episode, reward=reward) for episode, reward in members)
    with pytest.raises(ValueError, match=message):
        encode_group(replace(_group_of(_trajectory()), trajectories=some))


def test_roles_of_an_episode_have_a_reward_each_and_cost_nothing_without() -> None:
    solver = _trajectory(role="solver", reward=0.75)
    group = replace(
        _group_of(solver), trajectories=(solver, replace(solver, role="critic", reward=0.5))
    )
    read = decode_group(encode_group(group))
    assert read.rewards_by_player == {(0, "solver"): 0.75, (0, "critic"): 0.5}
    assert b"role" not in encode_group(_group_of(_trajectory()))
    with pytest.raises(ValueError, match=r"episode 0 have rewards 0\.75 and 0\.5: .* each role"):
        encode_group(replace(group, trajectories=(solver, replace(solver, reward=0.5))))


def _forged(data: bytes, old: bytes, new: bytes) -> bytes:
    """The last `old` of the description replaced, with lengths and checksum that are right."""
    (length,) = struct.unpack_from("<I", data, 12)
    before, _, after = data[16 : 16 + length].rpartition(old)
    description = before + new + after
    arrays = data[16 + length + -length % 8 :]
    body = description + bytes(-len(description) % 8) + arrays
    return data[:8] + struct.pack("<II", zlib.crc32(body), len(description)) + body


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"\xa7episode\x01", b"\xa7episode\x00", None),
        (b"\xa7episode\x01", b"\xa7episode\x02", "episode 2 among 2"),
        (b"\xa7episode\x01", b"\xa7episode\xff", r"Expected `int` >= 0 .*\[1\]\.episode"),
        (b"\xa7episode\x01", b"\xa7episodf\x01", "unknown field"),
        (b"\xa7episode\x01", b"\xa7episode\xcc\x01", "not written as Leash writes it"),
        (b"\xa7episode\x01", b"", "missing required field|truncated|Expected"),
        (b"\xadprompt_length\x01", b"\xadprompt_length\x04", "prompt of 4 in 3 tokens"),
    ],
)
def test_forged_descriptions_are_refused(old: bytes, new: bytes, message: str | None) -> None:
    both = (_trajectory(), _trajectory(episode=1))
    data = encode_group(replace(_group_of(_trajectory()), trajectories=both))
    forged = _forged(data, old, new)
    if message is None:
        assert [t.episode for t in decode_group(forged).trajectories] == [0, 0]
        return
    with pytest.raises(ValueError, match=message):
        decode_group(forged)


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        (SamplingParams(temperature=float("nan")), "temperature=nan"),
        (SamplingParams(repetition_penalty=float("inf")), "holds NaN or infinity"),
        (SamplingParams(top_k=2**64), "top_k=18446744073709551616.* does not fit"),
    ],
)
def test_sampling_that_is_no_number_is_refused(sampling: SamplingParams, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        encode_group(replace(_group_of(_trajectory()), sampling=sampling))


@pytest.mark.parametrize("version", [3, 9])
def test_decode_refuses_another_format_by_its_number(version: int) -> None:
    data = bytearray(encode_group(make_group("g")))
    data[4] = version
    with pytest.raises(ValueError, match=f"format {version}.*reads format 4: use the version"):
        decode_group(bytes(data))


def test_page_has_the_format_and_the_types_of_columns() -> None:
    page = (ROOT / "docs" / "buffer.md").read_text()
    assert f"| 4 | u16 | format version, {FORMAT_VERSION} |" in page
    assert f"type ({', '.join(COLUMN_TYPES)})" in page


def test_reader_written_after_the_page_finds_the_same_group() -> None:
    """Nothing of buffer/ is used to read it."""
    group = a_group_for_the_page()
    [wanted] = group.trajectories
    data = encode_group(group)
    magic, version, flags, crc, description_bytes = struct.unpack_from("<4sHHII", data, 0)
    assert (magic, version, flags) == (b"LSHG", FORMAT_VERSION, 0)
    assert crc == zlib.crc32(data[16:])
    body, at = data[16:], description_bytes
    said = msgspec.msgpack.decode(body[:description_bytes])

    def array(dtype: str, count: int) -> list[Any]:
        nonlocal at
        at += -at % 8
        read = np.frombuffer(body, dtype, count, at)
        at += read.nbytes
        return read.tolist()

    [trajectory] = said.pop("trajectories")
    assert said.pop("sampling") == asdict(group.sampling)
    assert said == {"group_id": "0-1-ab", "task": "sums", "index": 9, "attempt": 0}
    assert trajectory == {
        "num_tokens": 5,
        "prompt_length": 2,
        "num_runs": 2,
        "num_spans": 1,
        "episode": 0,
        "reward": 1.5,
        "finish_reason": "stop",
        "reward_parts": {"style": 0.25},
        "columns": [{"name": "teacher_logprobs", "type": "f4", "width": 0}],
    }
    assert array("<i4", 5) == wanted.tokens.tolist()
    assert array("<f4", 5) == wanted.rollout_logprobs.tolist()
    assert array("<u4", 2) == [2, 3]
    assert array("<u4", 3) == [7, 2, 5]
    assert array("<f4", 5) == [0.5] * 5
    assert at == len(body)


def a_group_for_the_page() -> TrajectoryGroup:
    trajectory = Trajectory(
        tokens=np.array([1, 2, 3, 4, 5], np.int32),
        loss_mask=np.array([0, 0, 1, 1, 1], np.uint8),
        rollout_logprobs=np.array([0, 0, -1, -2, -3], np.float32),
        version_spans=(VersionSpan(version=7, start=2, end=5),),
        prompt_length=2,
        reward=1.5,
        finish_reason="stop",
        reward_parts={"style": 0.25},
        episode=0,
        columns={"teacher_logprobs": np.full(5, 0.5, np.float32)},
    )
    return TrajectoryGroup(
        group_id="0-1-ab",
        prompt=PromptRef(task="sums", index=9),
        trajectories=(trajectory,),
        sampling=SamplingParams(temperature=0.5),
    )
