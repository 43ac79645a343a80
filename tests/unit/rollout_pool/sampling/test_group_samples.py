"""The samples of a group: how they begin, wait and end."""

from __future__ import annotations

import asyncio

from rollout_pool.sampling.group_samples import Activity, GroupSamples
from tests.support.rollout import make_sample, write


async def test_sample_that_waits_is_not_to_be_stopped_and_goes_on_when_its_group_is_released() -> (
    None
):
    samples = GroupSamples(order=3)
    first, second = make_sample(0), make_sample(1)
    for sample in (first, second):
        samples.begin(sample)
    samples.hold(60.0)
    waiting = asyncio.create_task(samples.wait_released(first))
    await asyncio.sleep(0)
    assert samples.running and samples.to_stop == {second} and first.order == 3
    samples.move(8)
    samples.release()
    await waiting
    assert not samples.is_held and {sample.order for sample in (first, second)} == {8}
    await samples.wait_released(second)
    assert samples.num_resumed == 2
    assert samples.seconds["held"] > 0


def test_time_of_a_program_is_that_of_its_open_session_without_a_request() -> None:
    activity = Activity()
    activity.note(requests=1)
    activity.note(sessions=1)
    activity.note(requests=-1)
    assert activity.alone_s == 0
    activity.note(sessions=-1)
    alone_s = activity.alone_s
    activity.note()
    assert activity.alone_s == alone_s > 0


async def test_group_keeps_only_sums_of_ended_samples() -> None:
    samples = GroupSamples()
    for number, version in enumerate((4, 6)):
        samples.begin(sample := make_sample(number))
        write(sample, [1, 2, 3][: number + 2], version)
    sample.finish_reason = "stop"
    samples.end(sample)
    samples.end(sample)
    assert len(samples.in_progress) == len(samples.running) == 1
    assert (samples.spent.num_tokens, samples.spent.longest, samples.spent.oldest_version) == (
        5,
        3,
        4,
    )


async def test_sample_that_waits_loses_its_tokens_if_none_may_stay_unless_a_client_reads_it() -> (
    None
):
    samples = GroupSamples()
    read, unread = make_sample(0, on_tokens=lambda sample: None), make_sample(1)
    samples.hold(60.0, keep_partial=False)
    for sample in (read, unread):
        write(sample, [7, 8, 9], version=0)
    waiting = asyncio.gather(samples.wait_released(read), samples.wait_released(unread))
    await asyncio.sleep(0)
    assert not waiting.done(), "they are lost before it waits"
    assert (unread.output_ids, unread.logprobs, unread.num_wasted) == ([], [], 3)
    assert (read.output_ids, read.num_wasted) == ([7, 8, 9], 0)
    samples.release()
    await waiting
