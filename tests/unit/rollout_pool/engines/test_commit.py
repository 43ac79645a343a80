"""How an engine behaves at a commit, with and without failures."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path

import pytest

from configs.choices import CommitStrategy, PauseMode
from configs.schema import WeightSyncConfig
from rollout_pool.engines.commit import Committer
from rollout_pool.engines.engine import TornEngine
from rollout_pool.engines.sglang.client import SGLangClient
from rollout_pool.engines.sglang.strategies import StagedDisk, make_strategy
from rollout_pool.sampling.engine_client import EngineError
from rollout_pool.types import AdapterSpec
from tests.support.rollout import make_sample, until

FOLDER = Path("/dev/shm/of-this-version")


@pytest.fixture
def committer(client):
    return Committer(client, StagedDisk(client, timeout_s=60), PauseMode.retract)


def paths(fake):
    return [path for path, _ in fake.calls]


async def test_commit_pauses_only_for_the_load_and_reports_the_served_version(fake, client):
    committer = Committer(client, StagedDisk(client, timeout_s=60), PauseMode.in_place)
    fake.slow["/update_weights_from_disk"] = 0.1
    report = await committer.commit(5, FOLDER)
    assert paths(fake) == ["/pause_generation", "/update_weights_from_disk", "/continue_generation"]
    assert fake.bodies("/pause_generation") == [{"mode": "in_place"}]
    [load] = fake.bodies("/update_weights_from_disk")
    assert load["model_path"] == str(FOLDER) and load["weight_version"] == "5"
    assert load["flush_cache"] is False and load["abort_all_requests"] is False
    assert (report.engine, report.strategy) == ("engine-0", "staged_disk")
    assert report.version == await client.served_version() == 5
    assert 0.1 <= report.load_s <= report.pause_s < 60


async def test_commit_that_sends_requests_again_loads_into_an_engine_without_any(fake, client):
    committer = Committer(client, StagedDisk(client, timeout_s=60), PauseMode.resubmit)
    fake.num_failed_flushes = 2
    await committer.commit(5, FOLDER)
    assert paths(fake) == [
        "/abort_request",
        *["/flush_cache"] * 3,
        "/pause_generation",
        "/flush_cache",
        "/update_weights_from_disk",
        "/continue_generation",
    ]
    fake.calls.clear()
    fake.num_failed_flushes = 5  # requests keep coming until the pause
    await committer.commit(6, FOLDER)
    assert paths(fake) == [
        "/abort_request",
        *["/flush_cache"] * 3,
        "/pause_generation",
        *["/flush_cache", "/abort_request"] * 2,
        "/flush_cache",
        "/update_weights_from_disk",
        "/continue_generation",
    ]
    assert fake.bodies("/abort_request") == [{"abort_all": True}] * 3
    assert fake.bodies("/pause_generation") == [{"mode": "retract"}]


PAUSE = ("/pause_generation", {"mode": "in_place"})


async def test_drained_engine_is_loaded_without_an_abort(fake, client):
    committer = Committer(client, StagedDisk(client, timeout_s=60), PauseMode.drain)
    await committer.drain(9.0)
    await committer.commit(5, FOLDER)
    [wait, flush] = [float(body["timeout"]) for body in fake.bodies("/flush_cache")]
    assert 0 < wait <= 9 and flush == 0
    assert paths(fake) == [
        "/flush_cache",
        PAUSE[0],
        "/flush_cache",
        "/update_weights_from_disk",
        "/continue_generation",
    ]
    await committer.undo_drain()
    assert paths(fake)[-1] == "/continue_generation" and len(fake.calls) == 5


async def test_request_that_arrives_while_an_engine_is_drained_ends_first(fake, client):
    committer = Committer(client, StagedDisk(client, timeout_s=60), PauseMode.drain)
    may_pause, may_end = threading.Event(), threading.Event()
    fake.says(may_end=may_end)
    fake.gates["/pause_generation"] = may_pause
    late = make_sample()
    draining = asyncio.create_task(committer.drain(60.0))
    await until(lambda: PAUSE in fake.calls)
    asking = asyncio.create_task(client.generate_tokens(late, "late!"))
    await until(lambda: fake.num_running == 1)
    may_pause.set()
    await until(lambda: len(fake.bodies("/flush_cache")) == 3)  # it waits for the late one
    may_end.set()
    await asyncio.gather(draining, asking)
    assert late.finish_reason == "stop"
    assert [body["timeout"] == "0" for body in fake.bodies("/flush_cache")] == [0, 1, 0, 1]
    await committer.undo_drain()
    assert paths(fake)[-1] == "/continue_generation" and "/abort_request" not in paths(fake)


async def test_rest_of_what_does_not_drain_in_time_is_taken_back(fake, client):
    committer = Committer(client, StagedDisk(client, timeout_s=60), PauseMode.drain)
    fake.says(never_ends=lambda rid: rid == "slow!", at_abort=[12])
    slow = make_sample()
    asking = asyncio.create_task(client.generate_tokens(slow, "slow!"))
    await until(lambda: slow.output_ids)
    await committer.drain(0.2)
    assert "/pause_generation" not in paths(fake)
    await committer.commit(1, FOLDER)
    client.note_version(1)
    await asking
    assert [span.version for span in slow.version_spans] == [0, 1] and slow.num_wasted == 0


async def test_drain_that_fails_is_undone(fake, client):
    committer = Committer(client, StagedDisk(client, timeout_s=60), PauseMode.drain)
    fake.refused = {"/pause_generation"}
    with pytest.raises(EngineError, match="refused /pause_generation"):
        await committer.drain(5.0)
    await committer.undo_drain()
    assert paths(fake)[-1] == "/continue_generation"
    fake.refused = {"/pause_generation", "/continue_generation"}
    with pytest.raises(EngineError):
        await committer.drain(5.0)
    with pytest.raises(TornEngine, match="does not resume after it has drained"):
        await committer.undo_drain()


async def test_engine_that_keeps_its_requests_stays_at_its_old_version(fake, client):
    committer = Committer(client, StagedDisk(client, timeout_s=60), PauseMode.resubmit)
    fake.num_failed_flushes = 100
    with pytest.raises(
        EngineError, match="engine-0 still holds requests after 20 aborts"
    ) as caught:
        await committer.commit(5, FOLDER)
    assert not isinstance(caught.value, TornEngine)
    assert paths(fake)[-1] == "/continue_generation"
    assert "/update_weights_from_disk" not in paths(fake)


async def test_engine_with_torn_weights_never_resumes(fake, committer):
    fake.refused = {"/update_weights_from_disk"}
    with pytest.raises(TornEngine, match=r"engine-0 must be restarted.* 5 failed.*refused"):
        await committer.commit(5, FOLDER)
    fake.refused = set()
    with pytest.raises(TornEngine, match="engine-0 must be restarted"):
        await committer.commit(6, FOLDER)
    assert paths(fake) == ["/pause_generation", "/update_weights_from_disk"]


async def test_engine_that_reports_another_version_never_resumes(fake, committer, client):
    class Forgetful(StagedDisk):
        async def load(self, version, folder):
            await super().load(version - 1, folder)

    committer = Committer(client, Forgetful(client, timeout_s=60), PauseMode.retract)
    with pytest.raises(TornEngine, match="reports version 4"):
        await committer.commit(5, FOLDER)
    assert "/continue_generation" not in paths(fake)


async def test_commit_cancelled_during_its_load_leaves_the_engine_torn(fake, committer):
    fake.slow["/update_weights_from_disk"] = 60.0
    committing = asyncio.create_task(committer.commit(5, FOLDER))
    await until(lambda: "/update_weights_from_disk" in paths(fake))
    committing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await committing
    with pytest.raises(TornEngine, match="version 5 was cancelled"):
        await committer.commit(6, FOLDER)
    assert "/continue_generation" not in paths(fake)


async def test_failure_before_the_load_leaves_the_engine_at_its_old_version(fake, committer):
    fake.refused = {"/pause_generation"}
    with pytest.raises(EngineError, match="refused /pause_generation") as caught:
        await committer.commit(5, FOLDER)
    assert not isinstance(caught.value, TornEngine)
    assert paths(fake) == ["/pause_generation", "/continue_generation"]
    fake.refused = set()
    assert (await committer.commit(5, FOLDER)).version == 5


async def test_engine_that_neither_pauses_nor_resumes_is_torn(fake, committer):
    fake.status = 503
    with pytest.raises(TornEngine, match="neither pauses nor resumes"):
        await committer.commit(5, FOLDER)


async def test_failed_prepare_does_not_pause_the_engine(fake, client):
    class Unready(StagedDisk):
        async def prepare(self, folder):
            raise EngineError("engine-0 did not join its sender")

    committer = Committer(client, Unready(client, timeout_s=60), PauseMode.retract)
    for _ in range(2):
        with pytest.raises(EngineError, match="did not join its sender"):
            await committer.commit(5, FOLDER)
    assert fake.calls == []


@pytest.fixture
def staged(tmp_path):
    folder = tmp_path / "slot-0"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"of version 5")
    return folder


@pytest.fixture
def adapter_committer(client):
    adapter = AdapterSpec(rank=4, alpha=8, layers=("q_proj", "v_proj"), num_slots=3)
    strategy = make_strategy(client, WeightSyncConfig(), tp_size=1, adapter=adapter)
    return Committer(client, strategy, PauseMode.resubmit)


async def test_version_of_an_adapter_is_taken_without_a_pause(fake, adapter_committer, staged):
    fake.gates["/load_lora_adapter"] = may_load = threading.Event()
    committing = asyncio.create_task(adapter_committer.commit(5, staged))
    await until(lambda: fake.calls)
    [load] = fake.bodies("/load_lora_adapter")
    folder = Path(load["lora_path"])
    # The receiver writes the next version into its file, which the engine must not see.
    (staged / "model.safetensors").write_bytes(b"of version 6")
    assert (folder / "adapter_model.safetensors").read_bytes() == b"of version 5"
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 8)
    assert config["target_modules"] == ["q_proj", "v_proj"] and config["peft_type"] == "LORA"
    may_load.set()
    report = await committing
    assert paths(fake) == ["/load_lora_adapter"] and load["lora_name"] == "5"
    assert (report.version, report.strategy, report.pause_s, report.stop_s) == (5, "adapter", 0, 0)
    assert report.load_s > 0
    # Other GPUs of the engine may read it later than the one that has replied.
    assert {*staged.parent.iterdir()} == {staged, folder}
    await adapter_committer.commit(6, staged)
    *_, load = fake.bodies("/load_lora_adapter")
    assert {*staged.parent.iterdir()} == {staged, Path(load["lora_path"])} != {staged, folder}
    await adapter_committer._strategy.close()
    assert [*staged.parent.iterdir()] == [staged]


async def test_adapter_that_an_engine_refuses_leaves_it_as_it_was(fake, adapter_committer, staged):
    fake.refused = {"/load_lora_adapter"}
    with pytest.raises(EngineError, match="refused /load_lora_adapter") as caught:
        await adapter_committer.commit(5, staged)
    assert not isinstance(caught.value, TornEngine)
    fake.refused = set()
    (staged / "model.safetensors").unlink()
    with pytest.raises(EngineError, match="cannot copy its staged adapter"):
        await adapter_committer.commit(5, staged)
    (staged / "model.safetensors").write_bytes(b"of version 6")
    assert (await adapter_committer.commit(6, staged)).version == 6
    assert paths(fake) == ["/load_lora_adapter"] * 2


async def test_server_without_the_route_of_its_strategy_is_bad_input(serve):
    client = SGLangClient("engine-0", serve([]), key="a-key", request_timeout_s=60.0)
    strategy = make_strategy(client, WeightSyncConfig(), tp_size=1)
    with pytest.raises(ValueError, match=r"sync\.commit=staged_disk: engine-0 has no /update_"):
        await strategy.check()
    await client.close()


async def test_ipc_without_a_gpu_is_bad_input(client):
    config = WeightSyncConfig(commit=CommitStrategy.ipc)
    strategy = make_strategy(client, config, tp_size=64)
    with pytest.raises(ValueError, match=r"weight_sync\.commit=ipc: .*GPU.*use .*=staged_disk"):
        await strategy.check()
