"""Pictures in the wire format: each file once, and no other bytes for groups without any."""

from __future__ import annotations

from dataclasses import replace

import pytest

from buffer.types import digest_of
from buffer.wire.codec import decode_group, encode_group
from tests.support.buffer.groups import make_group

CAT, DOG = b"a cat" * 100, b"a dog"
FILES = {digest_of(CAT): CAT, digest_of(DOG): DOG}


def shown(*files_of_each, files=FILES):
    group = make_group("g", size=len(files_of_each))
    trajectories = tuple(
        replace(trajectory, pictures=tuple(map(digest_of, own)))
        for trajectory, own in zip(group.trajectories, files_of_each, strict=True)
    )
    return replace(group, trajectories=trajectories, pictures=files)


def test_pictures_are_kept_once_and_each_trajectory_has_its_own_in_order():
    group = shown((DOG, CAT, DOG), (CAT,), ())
    data = encode_group(group)
    assert data.count(CAT) == 1
    read = decode_group(data)
    assert dict(read.pictures) == FILES
    shown_by = [read.pictures_of(trajectory) for trajectory in read.trajectories]
    assert shown_by == [(DOG, CAT, DOG), (CAT,), ()]
    assert encode_group(read) == data
    assert group.num_bytes == replace(group, pictures={}).num_bytes + len(CAT) + len(DOG)


def test_group_without_pictures_says_nothing_of_them():
    group = make_group("g")
    assert b"pictures" not in encode_group(group)
    assert decode_group(encode_group(group)).pictures == {}


def test_picture_that_is_not_the_one_of_its_digest_is_refused():
    group = shown((CAT,), files={digest_of(CAT): DOG})
    with pytest.raises(ValueError, match=f"the picture {digest_of(CAT)} has the digest"):
        decode_group(encode_group(group))


@pytest.mark.parametrize(
    "group", [shown((CAT,)), shown((CAT, DOG), files={digest_of(CAT): CAT})], ids=["more", "fewer"]
)
def test_pictures_of_a_group_are_those_that_its_trajectories_show(group):
    with pytest.raises(ValueError, match="its trajectories show the pictures"):
        encode_group(group)
