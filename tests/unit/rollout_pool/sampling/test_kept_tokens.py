"""Tokens that are kept of groups in flight, and samples that begin with them."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any

import pytest
from msgspec import msgpack
from msgspec.structs import replace

from buffer.staleness import Leash
from buffer.types import SamplingParams, VersionSpan
from rollout_pool.sampling.kept_tokens import GroupTokens, KeptSample, Part, read_kept
from rollout_pool.sampling.sample import Sample

LEASH = Leash(max_staleness=4)
TOP_K = SamplingParams(top_k=2)


def sample_of(group: str, place: int = 0, number: int = 0, **fields: Any) -> Sample:
    return Sample(
        sample_id=f"{group}.{place}.{number}",
        **{"prompt": [1, 2, 3], "sampling": SamplingParams(), "max_new_tokens": 10, **fields},
    )


def grow(sample: Sample, number: int, version: int) -> None:
    start = len(sample.output_ids)
    sample.output_ids += range(start, start + number)
    sample.logprobs += [-0.5 - place for place in range(start, start + number)]
    if sample.has_candidates:
        places = range(start, start + number)
        sample.candidates += [array("i", [place, place + 1]) for place in places]
    sample.version_spans += [VersionSpan(version=version, start=start, end=start + number)]


def kept(parts: Mapping[str, bytes], leash: Leash = LEASH, version: int = 5) -> dict[str, Any]:
    return read_kept(parts, leash, version, drops_stale=True)


def columns(sample: Sample | KeptSample) -> tuple[Any, ...]:
    spans = [(span.version, span.start, span.end) for span in sample.version_spans]
    return sample.output_ids, sample.logprobs, spans


def begun_with(parts: Mapping[str, bytes], sample: Sample, group: str = "0-1-b") -> GroupTokens:
    tokens = GroupTokens(group, kept(parts))
    tokens.begin(sample)
    return tokens


def test_candidates_are_kept_with_their_tokens() -> None:
    tokens, sample = GroupTokens("0-0-a", {}), sample_of("0-0-a", sampling=TOP_K)
    tokens.begin(sample)
    grow(sample, 2, 4)
    parts = tokens.take_new()
    grow(sample, 1, 4)
    parts |= tokens.take_new()
    again = sample_of("0-1-b", sampling=TOP_K)
    begun_with(parts, again)
    assert again.candidates == sample.candidates
    assert [ids.tolist() for ids in again.candidates] == [[0, 1], [1, 2], [2, 3]]
    other = sample_of("0-1-c")
    begun_with(parts, other)
    assert not other.output_ids  # drawn from another distribution


@pytest.mark.parametrize("number", [0, 1])
def test_kept_tokens_without_all_their_candidates_are_sampled_again(number: int) -> None:
    tokens, sample = GroupTokens("0-0-a", {}), sample_of("0-0-a", sampling=TOP_K)
    tokens.begin(sample)
    grow(sample, 2, 4)
    [(name, data)] = tokens.take_new().items()
    part = msgpack.decode(data, type=Part)
    part = replace(part, candidates=part.candidates[:number])
    again = sample_of("0-1-b", sampling=TOP_K)
    begun_with({name: msgpack.encode(part)}, again)
    assert not again.output_ids and not again.candidates


def test_sample_is_kept_in_parts_and_another_begins_with_them() -> None:
    tokens, sample, ended = GroupTokens("0-0-a", {}), sample_of("0-0-a"), sample_of("0-0-a", 1, 2)
    tokens.begin(sample)
    tokens.begin(ended)
    grow(sample, 3, 4)
    assert not tokens.is_due(4) and tokens.is_due(3)
    parts = tokens.take_new()
    assert [*parts] == ["0.0.0"] and not tokens.take_new()
    grow(sample, 1, 4)
    grow(sample, 2, 5)
    grow(ended, 2, 5)
    ended.finish_reason = "stop"
    tokens.end(ended)
    assert tokens.is_due(3) and not tokens.is_due(4)
    new = tokens.take_new()
    assert sorted(new) == ["0.0.3", "1.2.0"]
    parts |= new

    again, whole = sample_of("0-1-b"), sample_of("0-1-b", 1, 2)
    later = begun_with(parts, again)
    later.begin(whole)
    assert columns(again) == (
        [0, 1, 2, 3, 4, 5],
        [-0.5, -1.5, -2.5, -3.5, -4.5, -5.5],
        [(4, 0, 4), (5, 4, 6)],
    )
    assert again.finish_reason is None and again.num_left == 4
    assert (columns(whole), whole.finish_reason) == (columns(ended), "stop")
    assert later.num_restored == 8 and later.take_new() == {}
    grow(again, 1, 6)
    assert [*later.take_new()] == ["0.0.6"]


def test_end_is_kept_by_itself_and_only_if_the_model_ended() -> None:
    tokens, sample = GroupTokens("0-0-a", {}), sample_of("0-0-a")
    tokens.begin(sample)
    grow(sample, 2, 5)
    parts = tokens.take_new()
    sample.finish_reason = "length"  # its episode's time is over
    assert not tokens.take_new()
    sample.finish_reason = "stop"
    tokens.end(sample)
    parts |= tokens.take_new()
    assert [*parts] == ["0.0.0", "0.0.2"]
    again = sample_of("0-1-b")
    begun_with(parts, again)
    assert again.finish_reason == "stop" and len(again.output_ids) == 2


def test_tokens_behind_a_text_that_ends_the_sample_are_not_kept() -> None:
    tokens, sample = GroupTokens("0-0-a", {}), sample_of("0-0-a", stop=("x",))
    tokens.begin(sample)
    grow(sample, 3, 4)
    grow(sample, 4, 5)
    sample.ends_at, sample.finish_reason = 5, "length"  # the engine's last part, not cut yet
    again = sample_of("0-1-b")
    first = tokens.take_new()
    begun_with(first, again)
    assert columns(again) == ([0, 1, 2, 3, 4], sample.logprobs[:5], [(4, 0, 3), (5, 3, 5)])
    assert again.finish_reason is None, "the text is found again before any other is sampled"
    sample.end_at_stop()
    tokens.end(sample)
    ended = sample_of("0-2-c")
    begun_with({**first, **tokens.take_new()}, ended, group="0-2-c")
    assert columns(ended) == columns(sample) and ended.finish_reason == "stop"


@pytest.mark.parametrize(
    "other",
    [
        {"prompt": [1, 2, 4]},
        {"sampling": SamplingParams(temperature=0.5)},
        {"max_new_tokens": 1},
        {"number": 1},
        {"pictures": (b"a",)},
    ],
)
def test_sample_of_another_prompt_begins_anew(other: dict[str, Any]) -> None:
    tokens, sample = GroupTokens("0-0-a", {}), sample_of("0-0-a")
    tokens.begin(sample)
    grow(sample, 2, 5)
    again = sample_of("0-1-b", **other)
    assert begun_with(tokens.take_new(), again).num_restored == 0
    assert again.output_ids == []


def test_sample_of_another_picture_of_the_same_tokens_begins_anew() -> None:
    tokens, sample = GroupTokens("0-0-a", {}), sample_of("0-0-a", pictures=(b"a", b"b"))
    tokens.begin(sample)
    grow(sample, 2, 5)
    parts = tokens.take_new()
    swapped, same = (sample_of("0-1-b", pictures=(b"a", last)) for last in (b"c", b"b"))
    begun_with(parts, swapped)
    begun_with(parts, same)
    assert (swapped.output_ids, same.output_ids) == ([], [0, 1])


def test_sample_that_reached_a_limit_goes_on_if_it_was_raised() -> None:
    tokens, sample = GroupTokens("0-0-a", {}), sample_of("0-0-a")
    tokens.begin(sample)
    grow(sample, 10, 5)
    sample.finish_reason = "length"
    parts = tokens.take_new()
    same, longer = sample_of("0-1-b"), sample_of("0-1-b", max_new_tokens=12)
    begun_with(parts, same)
    begun_with(parts, longer)
    assert (same.finish_reason, longer.finish_reason, longer.num_left) == ("length", None, 2)


def test_sample_that_began_again_is_not_joined_to_its_former_tokens() -> None:
    tokens, sample = GroupTokens("0-0-a", {}), sample_of("0-0-a")
    tokens.begin(sample)
    grow(sample, 2, 3)
    parts = tokens.take_new()
    grow(sample, 2, 3)
    parts |= tokens.take_new()
    sample.drop_tokens()
    grow(sample, 2, 5)
    parts |= tokens.take_new()
    assert sorted(parts) == ["0.0.0", "0.0.2"]  # the second is of the first attempt
    again = sample_of("0-1-b")
    begun_with(parts, again)
    assert columns(again) == ([0, 1], [-0.5, -1.5], [(5, 0, 2)])


def test_tokens_that_cannot_be_trained_any_more_are_sampled_again() -> None:
    tokens, sample = GroupTokens("0-0-a", {}), sample_of("0-0-a")
    tokens.begin(sample)
    grow(sample, 2, 3)
    parts = tokens.take_new()
    grow(sample, 3, 4)
    parts |= tokens.take_new()
    assert kept(parts, version=7) and not kept(parts, version=8)
    assert read_kept(parts, LEASH, 8, drops_stale=False)
    # A rollback to version 3: those of version 4 are gone, those of version 3 count as of 9.
    rolled_back = Leash(max_staleness=4, rollbacks=((3, 9),))
    found = read_kept(parts, rolled_back, 12, drops_stale=True)
    later, again = GroupTokens("0-1-b", found), sample_of("0-1-b")
    later.begin(again)
    assert columns(again) == ([0, 1], [-0.5, -1.5], [(3, 0, 2)])
    assert not read_kept(parts, rolled_back, 14, drops_stale=True)
    grow(again, 4, 9)
    parts |= later.take_new()  # all of it: the buffer's second part is of other tokens
    assert sorted(parts) == ["0.0.0", "0.0.2"]
    third = sample_of("0-2-c")
    GroupTokens("0-2-c", read_kept(parts, rolled_back, 12, drops_stale=True)).begin(third)
    assert columns(third) == columns(again)


GOOD = Part(
    prompt=b"12345678",
    chain="c",
    start=0,
    tokens=b"\x01\0\0\0",
    logprobs=b"\0\0\0\0",
    versions=((5, 1),),
    end="",
)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("0.0.0", b"no MessagePack"),
        ("0.0.0", msgpack.encode({"prompt": b"", "chain": 5})),
        *(
            (
                "0.0.0",
                msgpack.encode({**{f: getattr(GOOD, f) for f in Part.__struct_fields__}, **d}),
            )
            for d in (
                {"start": 3},
                {"tokens": b"\x01\0\0"},
                {"tokens": b""},
                {"logprobs": b"\0\0\xc0\x7f"},
                {"versions": ((5, 2),)},
                {"versions": ((-1, 1),)},
                {"versions": ((5, 2), (6, -1))},
            )
        ),
    ],
)
def test_damaged_parts_are_told_and_sampled_again(name: str, data: bytes, caplog: Any) -> None:
    good = {"1.0.0": msgpack.encode(GOOD)}
    assert [*kept({name: data, **good})] == ["1.0"]
    assert "sampled again" in caplog.text
