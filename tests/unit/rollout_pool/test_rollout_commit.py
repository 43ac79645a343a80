"""What an engine does at a commit."""

from __future__ import annotations

import dataclasses

import pytest

from configs.schema import PauseMode
from rollout_pool.commit import Committer
from rollout_pool.generation import EngineError
from weight_sync.types import Bucket, GroupSpec, TensorSpec

GROUP = GroupSpec(
    host="127.0.0.1", port=29500, name="weights-0", world_size=2, backend="gloo", timeout_s=5
)


def bucket(index):
    return Bucket(index=index, tensors=(TensorSpec(name=f"w{index}", dtype="float32", shape=(2,)),))


async def test_a_commit_pauses_once_for_all_buckets_and_reports_the_served_version(fake, client):
    committer = Committer(client, PauseMode.in_place)
    await committer.join_group(GROUP, 1)
    await committer.pause()
    await committer.receive(bucket(0), GROUP, 5)
    await committer.receive(bucket(1), GROUP, 5)
    report = await committer.resume(5)
    assert [path for path, _ in fake.calls] == [
        "/init_weights_update_group",
        "/pause_generation",
        "/update_weights_from_distributed",
        "/update_weights_from_distributed",
        "/continue_generation",
    ]
    assert fake.bodies("/pause_generation") == [{"mode": "in_place"}]
    assert (report.engine, report.version, report.served_version) == ("engine-0", 5, 5)
    assert 0 < report.pause_s < 5


async def test_an_engine_with_torn_weights_never_goes_on(fake, client):
    committer = Committer(client, PauseMode.retract)
    await committer.pause()
    fake.status = 400
    with pytest.raises(EngineError, match="refused /update_weights_from_distributed"):
        await committer.receive(bucket(0), GROUP, 5)
    fake.status = 200
    for later in (committer.pause(), committer.receive(bucket(0), GROUP, 5), committer.resume(5)):
        with pytest.raises(EngineError, match="holds torn weights"):
            await later
    assert not fake.bodies("/continue_generation")


async def test_a_bucket_for_a_running_engine_is_refused(client):
    committer = Committer(client, PauseMode.retract)
    with pytest.raises(EngineError, match="while it was not paused"):
        await committer.receive(bucket(0), GROUP, 5)
    with pytest.raises(EngineError, match="while it was not paused"):
        await committer.resume(5)


async def test_an_engine_that_serves_another_version_is_told(fake, client):
    committer = Committer(client, PauseMode.retract)
    await committer.pause()
    await committer.receive(bucket(0), GROUP, 5)
    fake.version = "4"
    with pytest.raises(EngineError, match="engine-0 serves version 4 after the commit of 5"):
        await committer.resume(5)


async def test_joining_the_next_epochs_group_leaves_the_last_one(fake, client):
    committer = Committer(client, PauseMode.retract)
    await committer.join_group(GROUP, 1)
    await committer.join_group(dataclasses.replace(GROUP, name="weights-1"), 1)
    assert [path for path, _ in fake.calls] == [
        "/init_weights_update_group",
        "/destroy_weights_update_group",
        "/init_weights_update_group",
    ]
    assert fake.bodies("/destroy_weights_update_group") == [{"group_name": "weights-0"}]
