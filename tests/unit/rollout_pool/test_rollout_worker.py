"""The worker's loop: a real Redis server, a real HTTP engine in which nothing is computed."""

from __future__ import annotations

import asyncio
import json

import pytest

from buffer.connection import connect
from buffer.run_state import RunState
from configs.choices import OnLongPrompt
from configs.rollout_schema import RolloutConfig, TaskConfig
from configs.schema import BufferConfig, WeightSyncConfig
from rollout_pool.assemble import WorkerParts
from rollout_pool.engines.engine import EngineInfo
from rollout_pool.sampling import SamplesFailed
from rollout_pool.types import RolloutSpec

TASK = TaskConfig(
    params={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    prompt_pattern=": (.*=)$",
    eval_size=40,
)
GROUPS_PER_STEP = 2
LETTERS = "0123456789+-= "


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """A tokenizer of one token a letter: 3 + its place in LETTERS; 2 ends a text."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2} | {c: 3 + i for i, c in enumerate(LETTERS)}
    letters = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    letters.decoder = decoders.Fuse()
    letters.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="</s>")
    folder = tmp_path_factory.mktemp("model")
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    return folder


@pytest.fixture
async def make_worker(fake, state, redis_url, run_name, buffer_factory, model_folder, tmp_path):
    """Opens the run's buffer and a worker on the fake engine."""
    opened = []

    async def make(max_staleness=1, wait_timeout_s=30.0, max_prompt_tokens=16, **settings):
        buffer = await buffer_factory(GROUPS_PER_STEP, max_staleness=max_staleness)
        await state.record_commit("engine-0", int(fake.version), {})
        spec = RolloutSpec(
            config=RolloutConfig(
                group_size=2, max_prompt_tokens=max_prompt_tokens, max_response_tokens=4, **settings
            ),
            task=TASK,
            weight_sync=WeightSyncConfig(),
            buffer=BufferConfig(wait_timeout_s=wait_timeout_s),
            model_path=str(model_folder),
            trust_remote_code=False,
            redis_url=redis_url,
            run=run_name,
            run_dir=str(tmp_path),
            host="127.0.0.1",
            num_threads=1,
            uses_gpu=False,
            seed=0,
            engine_key="a-key",
            weights_key="another-key",
        )
        parts = WorkerParts(spec, 0)
        opened.append(parts)
        await parts.prepare()
        parts.connect([EngineInfo(name="engine-0", url=fake.url, pid=1, num_ranks=1)])
        return parts.worker, buffer

    yield make
    for parts in opened:
        await parts.close()


@pytest.fixture
async def state(redis_url, run_name):
    state = RunState(await connect(redis_url), run_name)
    yield state
    await state.close()


async def until(condition, timeout_s=20.0):
    """Waits for something that another process or the server will do."""
    async with asyncio.timeout(timeout_s):
        while not await condition():
            await asyncio.sleep(0.02)


def ids(text):
    return [3 + LETTERS.index(letter) for letter in text] + [2]


def right_answers(fake):
    """Result of the expression that a request asks for."""

    def solve(rid):
        body = next(b for b in reversed(fake.bodies("/generate")) if rid in b["rid"])
        tokens = body["input_ids"][body["rid"].index(rid)]
        left, operator, right, _ = "".join(LETTERS[t - 3] for t in tokens).split()
        return int(left) + int(right) if operator == "+" else int(left) - int(right)

    return solve


async def test_a_worker_fills_the_buffer_up_to_its_credits_and_no_further(
    fake, make_worker, state, make_reply
):
    solve = right_answers(fake)
    fake.reply = lambda rid: make_reply(output_ids=ids(str(solve(rid))))
    worker, buffer = await make_worker(max_staleness=1)
    running = asyncio.create_task(worker.run())

    async def is_full():
        return (await buffer.stats()).ready == 2 * GROUPS_PER_STEP

    await until(is_full)
    await asyncio.sleep(0.3)
    stats = await buffer.stats()
    assert (stats.pushed, stats.ready, stats.running) == (4, 4, 0)
    lease = await buffer.lease(step=0, version=0, num_groups=2, share=0, num_shares=1, timeout_s=5)
    assert {t.reward for group in lease.groups for t in group.trajectories} == {1.0}
    assert all(group.min_version == 0 for group in lease.groups)
    assert await buffer.consume(lease, lease.group_ids) == 2
    await until(is_full)
    worker.stop()
    report = await running
    assert (report.num_groups, report.num_failed, report.num_too_old) == (6, 0, 0)
    assert (await state.counters())["tokens_generated"] > 2 * 2 * 6
    assert (await state.waits())[("rollout", "trainer")] > 0.2
    assert (await state.task_positions())[0] >= 6
    assert (await buffer.stats()).is_conserved


async def test_groups_that_became_too_old_are_stopped_and_their_prompts_run_again(
    fake, make_worker, state, make_reply
):
    fake.reply = lambda rid: make_reply(output_ids=ids("1"), never_ends=True)
    worker, buffer = await make_worker(max_staleness=0)
    running = asyncio.create_task(worker.run())

    async def are_running():
        return len(fake.bodies("/generate")) == GROUPS_PER_STEP

    await until(are_running)
    await asyncio.sleep(0.2)
    first = {tuple(body["input_ids"][0]) for body in fake.bodies("/generate")}
    fake.reply = lambda rid: make_reply(output_ids=ids("1"))
    fake.version = "1"
    await buffer.publish_version(1)
    await asyncio.sleep(0.3)
    assert len(fake.bodies("/generate")) == GROUPS_PER_STEP  # the engine is still at version 0
    await state.record_commit("engine-0", 1, {})

    async def are_ready():
        return (await buffer.stats()).ready == GROUPS_PER_STEP

    await until(are_ready)
    stats = await buffer.stats()
    assert stats.abandoned_by_reason == {"too_old": 2} and stats.requeued == 2
    assert len(fake.aborted) == 2 * GROUPS_PER_STEP
    again = {tuple(body["input_ids"][0]) for body in fake.bodies("/generate")[GROUPS_PER_STEP:]}
    assert again == first
    worker.stop()
    assert (await running).num_too_old == 2
    lease = await buffer.lease(step=0, version=1, num_groups=2, share=0, num_shares=1, timeout_s=5)
    assert {group.prompt.attempt for group in lease.groups} == {1}


async def test_a_group_that_can_still_make_it_is_left_alone(fake, make_worker, make_reply):
    fake.reply = lambda rid: make_reply(output_ids=ids("1"), never_ends=True)
    worker, buffer = await make_worker(max_staleness=1)
    running = asyncio.create_task(worker.run())

    async def are_running():
        return len(fake.bodies("/generate")) == 2 * GROUPS_PER_STEP

    await until(are_running)
    await buffer.publish_version(1)
    await asyncio.sleep(0.3)
    assert not fake.aborted
    worker.stop()
    await running
    stats = await buffer.stats()
    assert stats.abandoned_by_reason == {"stopped": 4} and stats.running == 0


async def test_one_failed_group_is_counted_and_the_worker_goes_on(fake, make_worker, make_reply):
    fake.reply = lambda rid: make_reply(
        output_ids=ids("1"), finish_type="abort" if rid.startswith("0-0-") else "stop"
    )
    worker, buffer = await make_worker()
    running = asyncio.create_task(worker.run())

    async def is_full():
        return (await buffer.stats()).ready == 2 * GROUPS_PER_STEP

    await until(is_full)
    worker.stop()
    assert (await running).num_failed == 1
    assert (await buffer.stats()).abandoned_by_reason == {"failed": 1}


async def test_an_engine_that_fails_every_group_ends_the_worker_with_the_reason(fake, make_worker):
    fake.status = 500
    worker, _ = await make_worker(max_request_retries=0)
    with pytest.raises(SamplesFailed, match="engine-0 refused /generate"):
        await asyncio.wait_for(worker.run(), 30)


async def test_no_credit_within_the_limit_is_an_error(fake, make_worker, make_reply):
    fake.reply = lambda rid: make_reply(output_ids=ids("1"))
    worker, _ = await make_worker(wait_timeout_s=0.5)
    with pytest.raises(TimeoutError, match="no room for group"):
        await asyncio.wait_for(worker.run(), 30)


async def test_an_evaluation_scores_every_held_out_prompt_beside_generation(
    fake, make_worker, make_reply, state
):
    solve = right_answers(fake)
    fake.version = "3"
    fake.reply = lambda rid: make_reply(
        output_ids=ids(str(solve(rid) + (rid.startswith("eval") and int(rid.split(".")[1]) == 0)))
    )
    worker, _ = await make_worker()
    running = asyncio.create_task(worker.run())
    report = await worker.evaluate(3)
    assert report.num_prompts == TASK.eval_size
    assert report.accuracy == 37 / 40  # the first of each call of 16 is answered wrong
    assert (report.version_min, report.version_max) == (3, 3)
    evaluations = [b for b in fake.bodies("/generate") if b["rid"][0].startswith("eval")]
    assert {body["sampling_params"]["temperature"] for body in evaluations} == {0.0}
    assert not running.done()
    worker.stop()
    await running
    assert (await worker.evaluate(3)).accuracy == 37 / 40  # also after the end
    num_calls = len(fake.bodies("/generate"))
    waiting = asyncio.create_task(worker.evaluate(4))
    await asyncio.sleep(0.2)
    assert len(fake.bodies("/generate")) == num_calls  # until an engine serves that version
    fake.version = "4"
    await state.record_commit("engine-0", 4, {})
    assert (await waiting).version_min == 4


async def test_held_out_prompts_that_are_all_too_long_are_bad_input(make_worker):
    with pytest.raises(ValueError, match="every held-out prompt is longer"):
        await make_worker(max_prompt_tokens=1, on_long_prompt=OnLongPrompt.skip)
    with pytest.raises(ValueError, match=r"held-out prompt 0 has \d tokens; raise the limit"):
        await make_worker(max_prompt_tokens=1)
