"""Training through real ZeRO-3 over gloo: each rank a process, compared over numbers of ranks.

Then the loop of two ranks, with a real buffer and receiver and made-up rollouts.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from buffer.probes import beginnings
from buffer.redis.connection import connect
from buffer.replay_buffer import ReplayBuffer
from buffer.results import BufferStats
from buffer.run_state import STREAM_START
from buffer.types import TrajectoryGroup
from buffer.wire.codec import decode_group, encode_group
from configs.advantages import AGGREGATIONS
from configs.algorithm_schema import RETURN_COLUMN, VALUE_COLUMN
from configs.schema import BufferConfig, ScratchModelConfig
from host.loop_thread import LoopThread
from tensors.layout import Layout, TensorSpec
from tensors.pictures import PictureProcessor
from tests.support.blocking import BlockingReplayBuffer, BlockingRunState
from tests.support.experts import build_experts, random_routes, send_to
from tests.support.pictures import build_seeing_model, plain_logprobs
from tests.support.trainer import made_up
from tests.support.trainer.loop_scene import (
    GROUPS_PER_STEP,
    LATER_RATE,
    LOOP_STEPS,
    MAX_STALENESS,
    PEAK_TFLOPS,
    PROBE_TEXT,
    RUN,
    TIMEOUT_S,
    WEIGHTS_KEY,
    FollowingEngine,
    MadeUpRollouts,
    head_row,
    loop_spec,
)
from tests.support.zero3.adapter import LORA
from tests.support.zero3.critics import (
    BIAS,
    CLIP_RANGE,
    DENOMINATOR,
    head_weights,
    row_with_values,
)
from tests.support.zero3.ranks import Outcome, Ranks
from tests.support.zero3.seeing import shown_rows, with_pictures
from trainer_pool.data.packing import Row, pack
from trainer_pool.data.trained import Trained
from trainer_pool.model.scratch import build_scratch_model
from trainer_pool.state.checkpoint import CheckpointStore
from trainer_pool.state.export import ADAPTER_FOLDER, export_checkpoint
from trainer_pool.state.shards import ShardReader
from trainer_pool.types import FINAL_MODEL
from weight_sync.receiver.client import ReceiverClient
from weight_sync.receiver.process import ReceiverProcess
from weight_sync.types import ReceiverSpec

NUM_STEPS = 4
SAVE_AFTER = 2
TEMPERATURE = 0.7

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks(folder: Path) -> Iterator[Ranks]:
    ranks = Ranks(folder)
    yield ranks
    ranks.close()


def make_group(
    random: np.random.Generator, group_id: str, version: int, model: torch.nn.Module | None
) -> TrajectoryGroup:
    """Three episodes of 8 to 30 tokens; with a model, its own log-probabilities.

    The last one has two trajectories, and the groups of odd places have a further reward part.
    """
    parts = {"right": 1.0, "short": 0.25} if int(group_id[-1]) % 2 else {"right": 0.0}
    trajectories = []
    rewards = [float(random.integers(0, 2)) for _ in range(3)]
    for i in (0, 1, 2, 2):
        prompt_length, length = int(random.integers(2, 6)), int(random.integers(8, 31))
        tokens = random.integers(0, 256, length).astype(np.int32)
        mask = (np.arange(length) >= prompt_length).astype(np.uint8)
        logprobs = random.normal(-5.5, 0.3, length).astype(np.float32) * mask
        if model is not None:
            with torch.no_grad():
                logits = model(torch.from_numpy(tokens).long()[None]).logits[0] / TEMPERATURE
            every = logits.log_softmax(-1)[:-1].gather(
                -1, torch.from_numpy(tokens).long()[1:, None]
            )
            logprobs[1:] = every.squeeze(-1).numpy() * mask[1:]
        trajectories.append(
            made_up.trajectory(
                mask,
                version=version,
                tokens=tokens,
                rollout_logprobs=logprobs,
                reward=rewards[i],
                reward_parts=parts,
                episode=i,
            )
        )
    return made_up.group(*trajectories, group_id=group_id, temperature=TEMPERATURE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and a batch of 4 groups for each step; the first batch is exactly on-policy."""
    folder = tmp_path_factory.mktemp("zero3")
    config = ScratchModelConfig(
        hidden_size=32, intermediate_size=64, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16
    )
    for seed, name in enumerate(("model", "other")):
        build_scratch_model(config, folder / name, seed)
        build_scratch_model(replace(config, num_layers=1), folder / f"{name}_of_one_layer", seed)
    shutil.copytree(folder / "other", folder / "turned")
    fields = json.loads((folder / "turned" / "config.json").read_text())
    fields["rope_parameters"]["rope_theta"] *= 2
    (folder / "turned" / "config.json").write_text(json.dumps(fields))
    build_experts(folder / "experts")
    heads = replace(config, num_heads=4, num_kv_heads=2, head_dim=8)
    build_scratch_model(heads, folder / "heads", seed=2)
    wide = replace(config, hidden_size=48)
    build_scratch_model(wide, folder / "wide", seed=0)
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    random = np.random.default_rng(1)
    for step in range(NUM_STEPS):
        for i in range(4):
            on_policy = model if step == 0 else None
            version = max(0, step - i)  # staleness 0 to 3
            group = make_group(random, f"{step}-{i}", version, on_policy)
            (folder / f"batch-{step}-{i}.group").write_bytes(encode_group(group))
    return folder


@dataclass(kw_only=True, slots=True)
class Receiver:
    """The receiver that two ranks publish to."""

    client: ReceiverClient
    loop: LoopThread

    def staged(self) -> tuple[int, dict[str, torch.Tensor]]:
        """Its newest version and those weights."""
        newest = self.loop.run(self.client.newest(-1, timeout_s=60.0))
        assert newest is not None
        return newest.version, load_file(Path(newest.path) / "model.safetensors")

    def forget(self) -> None:
        """Drop its versions, as for another model."""
        other = Layout.of([TensorSpec(name="other", dtype="float32", shape=(1,))], 1)
        self.loop.run(self.client.set_layout(other, timeout_s=60.0))


@pytest.fixture(scope="module")
def receiver(folder: Path) -> Iterator[Receiver]:
    spec = ReceiverSpec(
        name="node-0",
        host="127.0.0.1",
        folder=str(folder / "staged"),
        num_slots=2,
        num_buffers=2,
        timeout_s=60.0,
        min_bandwidth=50e6,
        key=WEIGHTS_KEY,
    )
    loop = LoopThread("receiver")
    process = ReceiverProcess(spec, folder / "receiver.log")
    url = loop.run(process.start())
    client = ReceiverClient("node-0", url, WEIGHTS_KEY)
    (folder / "receivers.json").write_text(json.dumps({"node-0": url}))
    yield Receiver(client=client, loop=loop)
    loop.stop(client.close(), process.stop())


@pytest.fixture(scope="module")
def one_rank(ranks: Ranks) -> Outcome:
    return ranks.outcome("whole_run", 1)


@pytest.fixture(scope="module")
def two_ranks(ranks: Ranks, receiver: Receiver) -> Outcome:
    outcome = ranks.outcome("whole_run", 2)
    outcome.staged = receiver.staged()
    return outcome


def test_one_and_two_ranks_give_the_same_stats_and_weights(
    one_rank: Outcome, two_ranks: Outcome
) -> None:
    for alone, together in zip(one_rank.results["steps"], two_ranks.results["steps"], strict=True):
        for name, value in alone.items():
            if isinstance(value, str):
                assert value == together[name]
            elif name == "padding_fraction":  # a rank with less work makes the others' passes too
                assert value == 0 <= together[name] < 0.05
            else:
                assert value == pytest.approx(together[name], rel=2e-4, abs=2e-6, nan_ok=True), name
    assert one_rank.weights.keys() == two_ranks.weights.keys()
    for name, weights in one_rank.weights.items():
        np.testing.assert_allclose(weights, two_ranks.weights[name], atol=1e-5, err_msg=name)


def test_passes_of_any_size_and_shared_beginnings_change_nothing_but_rounding(
    ranks: Ranks, folder: Path
) -> None:
    """And what a pass costs is counted from the whole model, however it is sharded."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    num_weights = sum(parameter.numel() for parameter in model.parameters())
    every = []
    for num_ranks in (1, 2, 4):
        results = json.loads((ranks.run("packings", num_ranks) / "results.json").read_text())
        # A query and a key meet twice in each of 2 layers, in 2 heads of 16.
        assert results["cost"] == {"per_token": num_weights, "per_pair": 2 * 2 * 2 * 16}
        for _, is_shared, stats in results["packings"]:
            every.append(stats)
            assert (0.05 < stats["shared_fraction"] < 0.5) == is_shared
            assert is_shared or stats["shared_fraction"] == 0
    for stats in every:
        for name in ("loss", "grad_norm", "entropy", "ratio_mean", "logprob_diff_mean"):
            assert stats[name] == pytest.approx(every[0][name], rel=1e-5, abs=1e-7), name


def test_steps_change_the_weights_and_count_what_they_trained(
    folder: Path, two_ranks: Outcome
) -> None:
    first, last = two_ranks.results["steps"][0], two_ranks.results["steps"][-1]
    assert first["num_groups"] == last["num_groups"] == 4
    assert first["num_updates"] == 2
    assert first["num_skipped_updates"] == first["num_empty_updates"] == 0
    assert last["staleness_max"] == 3 and last["staleness_mean"] == pytest.approx(1.5)
    # Nothing for the first of two updates, and for the second what the first one did.
    assert all(0 < step["update_kl"] < 0.1 for step in two_ranks.results["steps"])
    before = AutoModelForCausalLM.from_pretrained(folder / "model").state_dict()
    moved = [np.abs(w - before[name].numpy()).max() for name, w in two_ranks.weights.items()]
    assert min(moved) > 1e-3


def test_rewards_are_reported_by_part_and_counted_by_episode(two_ranks: Outcome) -> None:
    """Each rank has groups whose parts the other one's do not have."""
    for step in two_ranks.results["steps"]:
        assert step["reward/right"] == pytest.approx(0.5)
        assert step["reward/short"] == pytest.approx(0.25)
        assert 12 * step["reward_mean"] == pytest.approx(round(12 * step["reward_mean"]))
        assert step["zero_variance_fraction"] in (0, 0.25, 0.5, 0.75, 1)


def test_weight_copy_is_awaited_right_before_each_update(two_ranks: Outcome) -> None:
    """Not before the passes through the model, which leave the weights as they are."""
    calls = two_ranks.results["calls"]
    updates = [place for place, call in enumerate(calls) if call == "step"]
    assert len(updates) == calls.count("before_update") == 2 * NUM_STEPS
    for place in updates:
        assert calls[place - 2 : place] == ["backward", "before_update"]


def test_on_policy_batch_has_importance_ratio_one(two_ranks: Outcome) -> None:
    first = two_ranks.results["steps"][0]
    assert first["ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert first["ratio_mean_abs_dev"] < 1e-5
    assert first["logprob_diff_tokens"] == first["num_tokens"]
    assert first["logprob_diff_max"] < 1e-4
    assert first["tis_clipped_fraction"] == 0


@pytest.fixture(scope="module")
def head(ranks: Ranks) -> Outcome:
    return ranks.outcome("head", 2)


def row_logprobs(model: Any, row: Row) -> torch.Tensor:
    """[T - 1, V] from full logits: at its temperature, and among the candidates of each token."""
    tokens = torch.from_numpy(row.tokens).long()
    logits = model(input_ids=tokens[None]).logits[0, :-1] / torch.from_numpy(
        row.temperatures[1:, None]
    )
    if row.candidates is not None:
        for at, ids in enumerate(row.candidates[1:]):
            if (ids >= 0).any():
                is_left = torch.zeros(logits.shape[1], dtype=torch.bool)
                is_left[ids[ids >= 0]] = True
                logits[at, ~is_left] = -1e30  # not -inf: the entropy would be NaN
    return logits.log_softmax(-1)  # type: ignore[no-any-return]


def test_gradient_of_two_ranks_is_that_of_full_logits_in_one_process(
    folder: Path, head: Outcome
) -> None:
    """Log-probabilities and entropies, with each row's temperature, candidates and a tied head.
    One pass of rank 1 has no trained token, and goes backward like the others."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model").double()
    loss = torch.zeros((), dtype=torch.float64)
    for number in range(6):
        row = head_row(number)
        tokens, mask = torch.from_numpy(row.tokens).long(), torch.from_numpy(row.loss_mask)
        every = row_logprobs(model, row)
        logprobs = every.gather(1, tokens[1:, None]).squeeze(1)
        entropy = -(every.exp() * every).sum(-1)
        assert row.advantages is not None
        loss = loss + ((logprobs * row.advantages[0] - 0.5 * entropy) * mask[1:]).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = dict(np.load(folder / "head-2" / "gradients.npz"))
    assert gradients.keys() == {name for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        theirs = parameter.grad.numpy()
        error = np.linalg.norm(gradients[name] - theirs) / np.linalg.norm(theirs)
        assert error < 1e-5, (name, error)


def test_passes_of_the_reference_are_those_of_its_own_model(ranks: Ranks, folder: Path) -> None:
    """Two ranks, before and after an update of the policy, which changes the policy's alone."""
    found = json.loads((ranks.run("reference", 2) / "results.json").read_text())
    assert re.fullmatch(
        rf"algorithm\.kl\.reference='{folder}/wide': it and the policy differ in the shape of .*"
        r"input_layernorm\.weight.*; choose a model of the same shape as "
        rf"model\.path='{folder}/model'",
        found["refused"][0],
    )
    assert f"'{folder}/turned': its rope_parameters is" in found["refused"][1]
    for name, path in (("policy", "model"), ("reference", "other")):
        expected = two_rows_logprobs(AutoModelForCausalLM.from_pretrained(folder / path))
        np.testing.assert_allclose(found[name][0], expected, rtol=1e-5, atol=1e-6)
    # Each beginning of a text, which the ranks share out.
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    for (length, start), scored in zip(beginnings(40), found["probes"], strict=True):
        tokens = torch.tensor([PROBE_TEXT[:length]])
        every = model(tokens).logits[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
        np.testing.assert_allclose(scored, every[start - 1 :].tolist(), rtol=1e-5, atol=1e-6)
    assert found["reference"][1] == found["reference"][0]
    assert found["policy"][1] == found["policy"][0]
    assert np.abs(np.subtract(found["policy"][2], found["policy"][0])).max() > 1e-3
    # The gradient right after a pass of the reference is the policy's.
    assert found["norms"][0] == found["norms"][1]


@pytest.fixture(scope="module")
def experts(ranks: Ranks, receiver: Receiver) -> tuple[Outcome, Outcome]:
    """On one rank, and on two that publish."""
    alone, together = ranks.outcome("experts", 1), ranks.outcome("experts", 2)
    together.staged = receiver.staged()
    receiver.forget()
    return alone, together


def test_mixture_of_experts_is_sent_and_saved_by_the_names_of_its_files(
    experts: tuple[Outcome, Outcome], folder: Path
) -> None:
    """All that the index of its folder names, as full versions and as deltas; on one and on two
    ranks the experts learn the same."""
    alone, together = experts
    version, staged = together.staged
    before = load_file(folder / "experts" / "model.safetensors")
    assert version == NUM_STEPS and staged.keys() == before.keys()
    assert sum(".experts." in name for name in staged) == 2 * 4 * 3
    exported = load_file(together.export / "model.safetensors")
    for name, weight in exported.items():
        torch.testing.assert_close(staged[name], weight.bfloat16(), rtol=0, atol=0)
        assert not torch.equal(weight, before[name]), name
    assert_nearly_equal(alone, together)
    checkpoint = CheckpointStore(folder / "checkpoints-experts-2").latest()
    assert checkpoint is not None
    export_checkpoint(checkpoint[0], str(folder / "experts"), folder / "experts-exported")
    assert load_file(folder / "experts-exported" / "model.safetensors").keys() == before.keys()
    assert_replayed(alone)
    assert_replayed(together)


def assert_replayed(outcome: Outcome) -> None:
    """Tokens went to the experts of their column, and a step has counted how many would not."""
    model, row = AutoModelForCausalLM.from_pretrained(outcome.export), head_row(0)
    send_to(model, random_routes(len(row.tokens)))
    tokens, mask = torch.from_numpy(row.tokens).long(), torch.from_numpy(row.loss_mask)
    logprobs = row_logprobs(model, row).gather(1, tokens[1:, None]).squeeze(1)[mask[1:] != 0]
    assert outcome.results["replayed"] == pytest.approx(logprobs.tolist(), abs=1e-4)
    step = outcome.results["replaying_step"]
    assert 0.2 < step["route_drift"] < 1 and 0.8 < step["routes_replayed"] < 1
    assert "route_drift" not in outcome.results["steps"][-1]


def test_load_of_experts_is_balanced_alike_over_ranks_and_counted(
    experts: tuple[Outcome, Outcome], folder: Path
) -> None:
    """Its gradient is that of transformers' own function over all trajectories of the update; its
    figures are those of the trained tokens of all ranks, whatever passes they make."""
    model = AutoModelForCausalLM.from_pretrained(folder / "experts")
    layers: list[list[torch.Tensor]] = []
    for path in sorted(folder.glob("batch-1-*.group")):
        for trajectory in decode_group(path.read_bytes()).trajectories:
            tokens_1T = torch.tensor(trajectory.tokens[None], dtype=torch.int64)
            output = model(tokens_1T, output_router_logits=True)
            places = np.flatnonzero(trajectory.loss_mask) - 1
            layers.append([logits[places] for logits in output.router_logits])
    logits = [torch.cat(of_layer) for of_layer in zip(*layers, strict=True)]
    loss = torch.stack([load_balancing_loss_func((one,), 4, 2) for one in logits]).mean()
    loss.backward()  # type: ignore[no-untyped-call]
    for outcome in experts:
        gradients = dict(np.load(outcome.export.parent / "gradients.npz"))
        for name, parameter in model.named_parameters():
            expected = np.zeros(1) if parameter.grad is None else parameter.grad.numpy()
            error = np.linalg.norm(gradients[name] - expected)
            assert error <= 1e-4 * np.linalg.norm(expected) + 1e-7, name
        off, on = outcome.results["balanced"]
        counts_GE = [one.topk(2).indices.flatten().bincount(minlength=4) for one in logits]
        most = max(int(counts_E.max()) for counts_E in counts_GE)
        for stats in (off, on):
            assert stats["load_balancing_loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
            assert stats["router_max_load"] == pytest.approx(most / (2 * len(logits[0]) / 4))
            assert stats["router_dead_experts"] == sum(int((c == 0).sum()) for c in counts_GE)
        assert on["loss"] - off["loss"] == pytest.approx(10 * float(loss.detach()), rel=1e-4)


def assert_nearly_equal(alone: Outcome, together: Outcome) -> None:
    for one, two in zip(alone.results["steps"], together.results["steps"], strict=True):
        routers = [name for name in one if name.startswith("router_")]
        for name in ("loss", "grad_norm", "entropy", *routers):
            assert one[name] == pytest.approx(two[name], rel=2e-4, abs=2e-6), name
    for name, weights in alone.weights.items():
        assert np.abs(weights - together.weights[name]).max() < 1e-5, name


@pytest.fixture(scope="module")
def adapters(ranks: Ranks) -> dict[int, Outcome]:
    return {num_ranks: ranks.outcome("adapter", num_ranks) for num_ranks in (1, 2)}


def two_rows_logprobs(model: Any) -> list[float]:
    """Log-probabilities of the trained tokens of rows 0 and 1."""
    found = []
    for number in (0, 1):
        row = head_row(number)
        tokens, mask = torch.from_numpy(row.tokens).long(), torch.from_numpy(row.loss_mask)
        logprobs = row_logprobs(model, row).gather(1, tokens[1:, None]).squeeze(1)
        found += logprobs[mask[1:] != 0].tolist()
    return found


def test_adapter_is_trained_saved_and_served_in_place_of_the_weights(
    adapters: dict[int, Outcome], folder: Path
) -> None:
    """Its base is the reference, and stays as it is, bit by bit."""
    base = AutoModelForCausalLM.from_pretrained(folder / "model")
    num_layers, names = 7 * 2, [name for name, _ in base.named_parameters()]
    for outcome in adapters.values():
        found = outcome.results
        assert found["frozen_moved"] == [] and found["num_frozen"] == len(names)
        served = [name for name, _ in found["served"]]
        assert len(served) == 2 * num_layers and all(".lora_" in name for name in served)
        assert len(found["layout"]) == 3 * len(served), "with Adam's moments"
        assert found["scores_again"] == found["scores"], "after a pass of the reference"
        np.testing.assert_allclose(
            found["scores_of_base"], two_rows_logprobs(base), rtol=1e-5, atol=1e-6
        )
        assert np.abs(np.subtract(found["scores"], found["scores_of_base"])).max() > 1e-2
    assert_nearly_equal(adapters[1], adapters[2])


def test_exported_adapter_and_the_merged_model_are_what_was_trained(
    adapters: dict[int, Outcome], folder: Path, tmp_path: Path
) -> None:
    """Also those of a checkpoint, which holds the adapter alone."""
    scores, export = adapters[2].results["scores"], adapters[2].export
    base = AutoModelForCausalLM.from_pretrained(folder / "model")
    of_peft = peft.PeftModel.from_pretrained(base, export / ADAPTER_FOLDER)
    np.testing.assert_allclose(two_rows_logprobs(of_peft), scores, rtol=1e-5, atol=1e-5)
    merged = AutoModelForCausalLM.from_pretrained(export)
    np.testing.assert_allclose(two_rows_logprobs(merged), scores, rtol=1e-5, atol=1e-5)
    for name, weight in of_peft.merge_and_unload().named_parameters():
        torch.testing.assert_close(merged.get_parameter(name), weight, rtol=0, atol=1e-6)
    found = CheckpointStore(folder / "checkpoints-adapter-2").latest()
    assert found is not None
    base, to = AutoModelForCausalLM.from_pretrained(folder / "model"), tmp_path / "exported"
    with pytest.raises(ValueError, match=r"is not of .*: it has no model\.embed_tokens"):
        export_checkpoint(found[0], str(folder / "model"), to)  # as if it were of whole weights
    export_checkpoint(found[0], str(folder / "model"), to, lora=LORA)
    of_checkpoint = AutoModelForCausalLM.from_pretrained(to)
    other = peft.PeftModel.from_pretrained(base, to / ADAPTER_FOLDER).merge_and_unload()
    for name, weight in other.named_parameters():
        torch.testing.assert_close(of_checkpoint.get_parameter(name), weight, rtol=0, atol=1e-6)


def test_offloaded_and_recomputed_passes_train_the_same_adapter(
    ranks: Ranks, adapters: dict[int, Outcome]
) -> None:
    settings = "offload_optimizer+offload_parameters+gradient_checkpointing+offload_activations"
    assert_nearly_equal(adapters[2], ranks.outcome(f"adapter+{settings}", 2))


def test_resumed_adapter_continues_identically(ranks: Ranks, adapters: dict[int, Outcome]) -> None:
    again = ranks.outcome("adapter_again", 2)
    assert again.results["steps"] == adapters[2].results["steps"][SAVE_AFTER:]
    for name, weights in adapters[2].weights.items():
        np.testing.assert_array_equal(weights, again.weights[name], err_msg=name)


@pytest.fixture(scope="module")
def critics(ranks: Ranks) -> dict[int, Outcome]:
    return {num_ranks: ranks.outcome("critic", num_ranks) for num_ranks in (1, 2)}


def test_gradient_of_the_critic_is_that_of_a_plain_loop_in_one_process(
    critics: dict[int, Outcome], folder: Path
) -> None:
    """From the policy's weights, with weighted tokens, of which some are clipped."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model").double()
    weight_H = head_weights(model.config.hidden_size).double().requires_grad_()
    bias = torch.tensor(BIAS, dtype=torch.float64, requires_grad=True)
    loss, clipped, number = torch.zeros((), dtype=torch.float64), 0, 0
    losses = 0.0
    for row in map(row_with_values, range(6)):
        tokens = torch.from_numpy(row.tokens).long()
        hidden_TH = model.model(tokens[None]).last_hidden_state[0]
        for t in np.flatnonzero(row.loss_mask):
            start, target = (float(row.columns[name][t]) for name in (VALUE_COLUMN, RETURN_COLUMN))
            value = hidden_TH[t - 1] @ weight_H + bias
            moved = min(max(float(value.detach()) - start, -CLIP_RANGE), CLIP_RANGE)
            of_token = (value - target) ** 2 / 2
            if (start + moved - target) ** 2 / 2 > float(of_token.detach()):
                of_token, clipped = torch.tensor((start + moved - target) ** 2 / 2), clipped + 1
            losses, number = losses + float(of_token.detach()), number + 1
            loss = loss + row.weight * of_token / DENOMINATOR
    assert 0.1 < clipped / number < 0.9
    loss.backward()  # type: ignore[no-untyped-call]
    expected = {f"body.{name}": p.grad for name, p in model.model.named_parameters()}
    expected |= {"head.weight": weight_H.grad, "head.bias": bias.grad}
    for outcome in critics.values():
        gradients = dict(np.load(outcome.export.parent / "gradients.npz"))
        assert gradients.keys() == expected.keys()
        for name, gradient in expected.items():
            assert gradient is not None
            theirs = gradient.numpy().flatten()
            error = np.linalg.norm(gradients[name].flatten() - theirs) / np.linalg.norm(theirs)
            assert error < 1e-5, (name, error)
        assert outcome.results["update"]["value_loss"] == pytest.approx(losses / number, rel=1e-5)
        assert outcome.results["update"]["value_clip_fraction"] == clipped / number
        assert outcome.results["trains"] is True  # else no layer is recomputed


def test_critic_learns_alone_at_first_and_alike_on_one_and_two_ranks(
    critics: dict[int, Outcome], folder: Path
) -> None:
    """It is neither served nor exported."""
    assert_nearly_equal(critics[1], critics[2])
    names = load_file(folder / "model" / "model.safetensors").keys()
    for outcome in critics.values():
        assert outcome.results["moved"] == [[False, True], [True, True], [True, True], [True, True]]
        assert {*outcome.results["served"]} == {*names}
        assert load_file(outcome.export / "model.safetensors").keys() == names
    for one, two in zip(*(critics[n].results["steps"] for n in (1, 2)), strict=True):
        for name in ("value_loss", "explained_variance", "critic_grad_norm"):
            assert one[name] == pytest.approx(two[name], rel=1e-3, abs=1e-6), name
    losses = [step["value_loss"] for step in critics[2].results["steps"]]
    assert losses[-1] < losses[0]


def test_resumed_critic_continues_identically(ranks: Ranks, critics: dict[int, Outcome]) -> None:
    again = ranks.outcome("critic_again", 2)
    assert again.results["steps"] == critics[2].results["steps"][SAVE_AFTER:]
    for name, weights in critics[2].weights.items():
        np.testing.assert_array_equal(weights, again.weights[name], err_msg=name)


def test_run_without_a_critic_has_neither_its_passes_nor_its_state(
    folder: Path, two_ranks: Outcome, critics: dict[int, Outcome]
) -> None:
    found = []
    for name in ("checkpoints-2", "checkpoints-critic-2"):
        checkpoint = CheckpointStore(folder / name).latest()
        assert checkpoint is not None
        with ShardReader(checkpoint[0]) as reader:
            found.append({spec.name for spec in reader.layout.tensors})
    without, together = found
    assert without == {name for name in together if not name.startswith("critic:")} < together
    for one, other in zip(two_ranks.results["steps"], critics[2].results["steps"], strict=True):
        more = {"value_loss", "value_clip_fraction", "explained_variance", "critic_grad_norm"}
        more |= {"critic_skipped_updates"}
        assert {name for name in other if name not in one} == more


def test_update_over_the_norm_limit_changes_neither_weights_nor_moments(head: Outcome) -> None:
    over, within = head.results["changed_over_and_within_the_limit"]
    assert over[0] == pytest.approx(within[0]) and over[0] > 1e-9
    assert over[1:] == [0, 0]
    assert min(within[1:]) > 0


def test_guard_skips_updates_of_low_effective_sample_size_and_spikes_on_all_ranks(
    head: Outcome,
) -> None:
    low, spike, made = head.results["steps_under_a_guard"]
    norm = pytest.approx(low[0][0], rel=1e-5)
    for rank in range(2):
        assert low[rank] == [norm, 1, 0, 0, 0]
        assert spike[rank] == [norm, 0, 1, 0, 0]
        assert made[rank][:3] == [norm, 0, 0] and min(made[rank][3:]) > 0
    assert "sample size was low (2, in the last one lowest at" in head.results["guard_error"]


def test_nan_of_one_ranks_backward_pass_skips_the_update_everywhere_and_names_the_group(
    head: Outcome,
) -> None:
    step = head.results["step_with_planted_nan"]
    assert (step["num_updates"], step["num_skipped_updates"]) == (1, 1)
    assert step["not_finite_fraction"] == 0
    assert json.loads(step["not_finite_groups"]) == [head.results["planted_in"]]
    assert head.results["changed_by_planted_nan"] == []


@pytest.fixture(scope="module")
def seeing(ranks: Ranks, folder: Path) -> Outcome:
    """A model that takes pictures, and its batches, which show some."""
    build_seeing_model(folder / "seeing")
    build_seeing_model(folder / "seeing_other", seed=1)
    processor = PictureProcessor.of(str(folder / "seeing"), trust_remote_code=False)
    assert processor is not None
    (folder / "shown").mkdir()
    for file in folder.glob("batch-*.group"):
        group = with_pictures(decode_group(file.read_bytes()), processor)
        (folder / "shown" / file.name).write_bytes(encode_group(group))
    return ranks.outcome("seeing", 2)


def test_policy_and_reference_score_pictures_as_their_own_models(
    seeing: Outcome, folder: Path
) -> None:
    """Before and after training, in which the reference and both towers stay."""
    processor = PictureProcessor.of(str(folder / "seeing"), trust_remote_code=False)
    assert processor is not None
    (batch,) = pack(shown_rows(folder / "seeing"), 400)

    def alone(path: Path) -> list[float]:
        rows = [shown_rows(folder / "seeing")[number] for number in batch.rows]
        return torch.cat([plain_logprobs(path, processor, row) for row in rows]).tolist()

    before, after, with_itself = seeing.results["scores"]
    for found, path in (
        (before["policy"], folder / "seeing"),
        (before["reference"], folder / "seeing_other"),
        (after["reference"], folder / "seeing_other"),
        (after["policy"], seeing.export),
    ):
        np.testing.assert_allclose(found, alone(path), rtol=0, atol=1e-5)
    assert after["reference"] == before["reference"]
    assert with_itself["reference"] == with_itself["policy"] == after["policy"]
    assert np.abs(np.subtract(after["policy"], before["policy"])).max() > 1e-2
    assert all(0 < step["kl"] < 100 for step in seeing.results["steps"])
    first = AutoModelForImageTextToText.from_pretrained(folder / "seeing")
    for name, weight in first.named_parameters():
        is_same = np.array_equal(weight.detach().numpy(), seeing.weights[name])
        assert is_same is ("visual" in name), name


def test_resumed_policy_with_pictures_continues_identically(ranks: Ranks, seeing: Outcome) -> None:
    again = ranks.outcome("seeing_again", 2)
    assert again.results["steps"] == seeing.results["steps"][SAVE_AFTER:]
    for name, weights in seeing.weights.items():
        np.testing.assert_array_equal(weights, again.weights[name], err_msg=name)


@pytest.fixture(scope="module")
def resumed(ranks: Ranks, one_rank: Outcome, two_ranks: Outcome) -> Outcome:
    return ranks.outcome("resume", 2)


def test_resume_in_fresh_processes_continues_identically(
    two_ranks: Outcome, resumed: Outcome
) -> None:
    assert resumed.results["steps"] == two_ranks.results["steps"][2:]
    for name, weights in two_ranks.weights.items():
        np.testing.assert_array_equal(weights, resumed.weights[name], err_msg=name)


def test_updates_too_small_for_bfloat16_add_up_in_float32(ranks: Ranks) -> None:
    found = json.loads((ranks.run("masters", 2) / "results.json").read_text())
    assert found["moved"][0] == 0
    assert 8 * 1e-3 * 1.5 > found["moved"][1] >= 2**-8


@pytest.mark.parametrize(
    "offloads",
    ["offload_optimizer", "offload_parameters", "offload_optimizer+offload_parameters"],
)
def test_offloading_changes_nothing_but_where_the_state_is(
    ranks: Ranks, receiver: Receiver, two_ranks: Outcome, offloads: str
) -> None:
    """Updates, empty and skipped ones too, publishes, checkpoints and the reset of the moments."""
    receiver.forget()
    outcome = ranks.outcome(f"offloaded+{offloads}", 2)
    assert outcome.results.pop("offloaded") == {
        "optimizer": "offload_optimizer" in offloads,
        "parameters": "offload_parameters" in offloads,
        "has_gradient_on_host": "offload_optimizer" in offloads,
    }
    version, staged = receiver.staged()
    assert version == NUM_STEPS
    assert_close_results(outcome.results, two_ranks.results)
    for name, weights in two_ranks.weights.items():
        np.testing.assert_allclose(weights, outcome.weights[name], atol=1e-6, err_msg=name)
        served = torch.from_numpy(outcome.weights[name]).bfloat16()
        assert torch.equal(staged[name], served), name

    again = ranks.outcome(f"offloaded_again+{offloads}", 2)
    assert again.results["steps"] == outcome.results["steps"][SAVE_AFTER:]
    for name, weights in outcome.weights.items():
        np.testing.assert_array_equal(weights, again.weights[name], err_msg=name)


def assert_close_results(mine: Any, theirs: Any) -> None:
    """The same record, with numbers that differ by rounding at most."""
    if isinstance(theirs, dict):
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            assert_close_results(mine[name], value)
    elif isinstance(theirs, list):
        for value, other in zip(mine, theirs, strict=True):
            assert_close_results(value, other)
    elif isinstance(theirs, float):
        assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-7, nan_ok=True)
    else:
        assert mine == theirs


def test_checkpoint_of_two_ranks_is_read_by_four_and_theirs_by_one(
    ranks: Ranks, folder: Path, two_ranks: Outcome
) -> None:
    outputs = [ranks.run("reshard", num_ranks) for num_ranks in (4, 1)]
    states = []
    for num_ranks in (2, 4, 1):
        found = CheckpointStore(folder / f"checkpoints-{num_ranks}").latest()
        assert found is not None
        with ShardReader(found[0]) as reader:
            assert reader.layout.num_ranks == num_ranks
            tensors = {spec.name: reader.tensor(spec.name) for spec in reader.layout.tensors}
            states.append((found[1], tensors))
    (saved, tensors), *others = states
    assert saved.num_updates > SAVE_AFTER and len(tensors) == 3 * len(two_ranks.weights)
    for name in two_ranks.weights:
        assert float(tensors[f"{name}:exp_avg_sq"].abs().max()) > 0, name
    for other, again in others:
        assert other == saved and again.keys() == tensors.keys()
        assert [name for name in tensors if not torch.equal(tensors[name], again[name])] == []
    sums = [json.loads((output / "results.json").read_text()) for output in outputs]
    for name in two_ranks.weights:
        assert sums[0][name] == sums[1][name] == float(tensors[name].double().sum()), name


def test_weights_that_are_not_trained_are_in_the_checkpoint_for_any_number_of_ranks(
    ranks: Ranks, folder: Path
) -> None:
    before = AutoModelForCausalLM.from_pretrained(folder / "model").state_dict()
    saved = ranks.outcome("frozen", 2).weights
    frozen = {name for name in saved if ".mlp." in name}
    assert len(frozen) == 6
    for name, weights in saved.items():
        is_only_shifted = np.array_equal(weights, before[name].numpy() + np.float32(0.25))
        assert is_only_shifted == (name in frozen), name
    for num_ranks in (4, 1):
        again = ranks.outcome("frozen", num_ranks).weights
        assert again.keys() == saved.keys()
        for name, weights in saved.items():
            np.testing.assert_array_equal(weights, again[name], err_msg=name)
        found = CheckpointStore(folder / f"checkpoints-frozen-{num_ranks}").latest()
        assert found is not None
        with ShardReader(found[0]) as reader:
            names = {spec.name for spec in reader.layout.tensors}
        assert {name for name in saved if f"{name}:exp_avg" not in names} == frozen


def test_resumed_ranks_go_on_with_the_same_random_numbers(ranks: Ranks, two_ranks: Outcome) -> None:
    whole, resumed = ranks.outcome("noise", 2), ranks.outcome("noise", 2)
    assert (whole.results["first"], resumed.results["first"]) == (0, SAVE_AFTER)
    assert whole.results["steps"] != two_ranks.results["steps"]  # there is noise indeed
    assert resumed.results["steps"] == whole.results["steps"][SAVE_AFTER:]
    for name, weights in whole.weights.items():
        np.testing.assert_array_equal(weights, resumed.weights[name], err_msg=name)
    draws = whole.results["draws"]
    assert resumed.results["draws"] == draws[len(draws) * SAVE_AFTER // NUM_STEPS :]


def test_full_disk_of_one_rank_costs_its_checkpoint_and_not_the_run(
    ranks: Ranks, two_ranks: Outcome
) -> None:
    results = json.loads((ranks.run("full_disk", 2) / "results.json").read_text())
    first, failed, *last = results["errors"]
    assert [first, *last] == [None] * 3
    assert results["groups_errors"] == [None, None, None, "no Redis for groups.dump"]
    assert results["has_groups"] == [True, False]
    assert failed.startswith("trainer-1: [Errno 27] File too large"), failed
    assert results["latest_then"] == 1
    assert results["left"] == ["latest", "step-000001"]
    assert results["steps"] == two_ranks.results["steps"][1:2]


def test_adam_and_recomputed_layers_are_as_the_settings_say(ranks: Ranks) -> None:
    results = json.loads((ranks.run("optimizer", 2) / "results.json").read_text())
    assert max(results["errors"]) < 1e-6
    assert all(0.01 < fraction < 0.99 for fraction in results["clipped"])
    assert results["forwards"] == 4, "in each of two passes, once forward and once backward"
    assert not results["loads_compiler"], "seconds of a core, in each rank that is executed"


def test_ranks_go_on_from_the_copy_on_the_next_machine_if_one_is_lost(ranks: Ranks) -> None:
    results = json.loads((ranks.run("copies", 2) / "results.json").read_text())
    assert results["same"], "bitwise"
    assert results["kept"] == [["step-000002"]] * 2
    assert results["unsaved"] == [[2, ["a", "b"]]]


NUM_KILLS = int(os.environ.get("LEASH_SOAK_CHECKPOINT_KILLS", "2"))
LAST_MOMENT = 24
"""A rank with a checkpoint after each of 4 steps of two updates; rank 0 has twice as many."""


@pytest.mark.parametrize("seed", range(NUM_KILLS))
def test_ranks_killed_at_any_moment_of_a_step_or_checkpoint_go_on_bitwise_equal(
    ranks: Ranks, folder: Path, two_ranks: Outcome, seed: int
) -> None:
    dice = random.Random(seed)
    rank = dice.randrange(2)
    kill = {"rank": rank, "moment": dice.randint(1, LAST_MOMENT * (2 - rank))}
    shutil.rmtree(folder / "checkpoints-chain", ignore_errors=True)
    (folder / "kill.json").write_text(json.dumps(kill))
    assert ranks.exit_codes("chain", 2)[rank] == "-9", kill  # it was killed indeed
    (folder / "kill.json").write_text(json.dumps({"rank": -1}))
    outcome = ranks.outcome("chain", 2)
    print(kill, "went on after step", outcome.results["first"])
    assert outcome.results["steps"] == two_ranks.results["steps"][outcome.results["first"] :]
    for name, weights in two_ranks.weights.items():
        np.testing.assert_array_equal(weights, outcome.weights[name], err_msg=name)


def test_warm_start_is_the_same_on_one_and_two_ranks_and_leaves_no_momentum(
    one_rank: Outcome, two_ranks: Outcome
) -> None:
    alone, together = one_rank.results, two_ranks.results
    assert alone["warm_start_losses"] == pytest.approx(together["warm_start_losses"], rel=1e-4)
    assert together["warm_start_losses"][1] < together["warm_start_losses"][0]
    assert together["largest_moment_left"] == 0


def test_step_without_gradient_changes_nothing_and_is_counted(
    one_rank: Outcome, two_ranks: Outcome
) -> None:
    for outcome in (one_rank, two_ranks):
        step = outcome.results["step_without_gradient"]
        assert step["zero_variance_fraction"] == 1 and step["grad_norm"] == 0
        assert step["num_updates"] == step["num_empty_updates"] == 2
        assert step["num_skipped_updates"] == 0 and step["num_groups"] == 4
        assert outcome.results["changed_without_gradient"] == []


def test_update_whose_logprobs_are_not_finite_is_skipped_on_all_ranks(
    one_rank: Outcome, two_ranks: Outcome
) -> None:
    for outcome in (one_rank, two_ranks):
        step = outcome.results["step_with_nan"]
        assert (step["num_updates"], step["num_skipped_updates"]) == (2, 1)
        assert 0 < step["not_finite_fraction"] < 1
        assert json.loads(step["not_finite_groups"]) == ["0-0"]
        assert outcome.results["is_finite_after_nan"]
        assert outcome.results["steps"][0]["not_finite_fraction"] == 0


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_gradients_of_several_steps_add_up_to_that_of_all_their_groups(
    ranks: Ranks, num_ranks: int
) -> None:
    results = json.loads((ranks.run("accumulation", num_ranks) / "results.json").read_text())
    for aggregation in AGGREGATIONS:
        found = results[aggregation]
        norm, norm_of_parts = found["norms"]
        assert norm_of_parts == pytest.approx(norm, rel=1e-5) and norm > 0, aggregation
        assert found["difference"] < 1e-5, aggregation
        assert found["updates"] == 1


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_ranks_that_split_each_row_have_the_gradients_of_one_that_has_it_whole(
    ranks: Ranks, num_ranks: int
) -> None:
    """Dense with fewer KV heads than ranks, with experts, also those that an engine has chosen, and
    with an adapter; two groups of two ranks beside one of four."""
    outputs = [ranks.run("split_rows", number) for number in (1, num_ranks)]
    gradients, others = (dict(np.load(output / "gradients.npz")) for output in outputs)
    records = [json.loads((output / "results.json").read_text()) for output in outputs]
    sizes = {int(name.split(":")[1]) for name in records[1]}
    assert sizes == {num_ranks, 2} and len(others) == {2: 6, 4: 4 + 6}[num_ranks]
    for name, gradient in others.items():
        kind, _, step = name.split(":")
        expected = gradients[f"{kind}:1:{step}"]
        error = np.linalg.norm(gradient - expected) / np.linalg.norm(expected)
        assert error < 1e-5, (name, error)
    for name, record in records[1].items():
        expected = records[0][f"{name.split(':')[0]}:1"]
        assert record.keys() == expected.keys()
        for key, value in record.items():
            if isinstance(value, dict):
                # Groups of ranks that have less work make the others' passes too.
                skipped = {"padding_fraction"}
                own, of_one = (
                    {k: v for k, v in of.items() if k not in skipped and isinstance(v, float | int)}
                    for of in (value, expected[key])
                )
                assert own == pytest.approx(of_one, rel=1e-4, abs=1e-6, nan_ok=True), (name, key)
                assert own["loss"] == pytest.approx(of_one["loss"], rel=1e-5), (name, key)
            else:
                assert value == pytest.approx(expected[key], rel=1e-5, abs=1e-6), (name, key)
    shared = records[0]["heads:1"]["shared"]["shared_fraction"]
    assert shared > 0.05 and records[0]["heads:1"]["packed"]["shared_fraction"] == 0
    assert records[0]["heads:1"]["culprits"]
    replayed = records[0]["experts:1"]["replayed"]
    assert 0.2 < replayed["route_drift"] < 1 and 0.8 < replayed["routes_replayed"] < 1


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_every_algorithm_has_the_same_gradient_for_any_split_of_the_batch(
    ranks: Ranks, num_ranks: int
) -> None:
    """One rank with one micro-batch for each update, against two with several, or four that also
    share prefixes."""
    outputs = [ranks.run("algorithms", number) for number in (1, num_ranks)]
    gradients, others = (dict(np.load(output / "gradients.npz")) for output in outputs)
    assert len(gradients) >= 2 * 13
    assert others.keys() == gradients.keys()
    for name, gradient in gradients.items():
        size = np.linalg.norm(gradient)
        assert size > 1e-6, name
        assert np.linalg.norm(gradient - others[name]) < 1e-5 * size, name
    records = [json.loads((output / "results.json").read_text()) for output in outputs]
    for name, record in records[0].items():
        if name == "steps" or num_ranks == 4:  # what is shared is not counted twice
            continue
        for key in record.keys() - {"padding_fraction"}:  # ranks wait for each other's passes
            value, other = record[key], records[1][name][key]
            same = (
                value if isinstance(value, str) else pytest.approx(value, 1e-4, 1e-6, nan_ok=True)
            )
            assert other == same, (name, key)


def test_published_weights_equal_the_export_in_the_serving_dtype(two_ranks: Outcome) -> None:
    version, found = two_ranks.staged
    assert version == two_ranks.results["published"][-1] == NUM_STEPS
    # The output head is tied to the embedding: it is not among them.
    assert len(found) == two_ranks.results["num_tensors"] == len(two_ranks.weights)
    assert "lm_head.weight" not in found and "model.embed_tokens.weight" in found
    for name, weights in two_ranks.weights.items():
        assert torch.equal(found[name], torch.from_numpy(weights).to(torch.bfloat16)), name


# The whole loop ----------------------------------------------------------------------------------


@dataclass(kw_only=True, slots=True)
class LoopOutcome:
    """Everything that the loop of two ranks left behind."""

    run_dir: Path
    ranks: list[dict[str, Any]]
    """By rank: the reports of its warm start, its first publish and its training."""
    records: list[dict[str, Any]]
    lanes: list[dict[str, Any]]
    published: set[int]
    """Versions that the engines got."""
    waits: dict[tuple[str, str], float]
    stats: BufferStats
    engine_weights: dict[str, torch.Tensor]

    @property
    def num_steps(self) -> int:
        return int(self.ranks[0]["report"]["num_steps"])


def play_loop(
    ranks: Ranks, receiver: Receiver, redis_url: str, before: LoopOutcome | None = None
) -> Iterator[LoopOutcome]:
    """The loop of two ranks; after one `before`, resumed with two steps for each version."""
    settings = loop_spec(ranks.folder, redis_url).buffer
    buffer = BlockingReplayBuffer(redis_url, RUN, settings)
    run_state = BlockingRunState(redis_url, RUN, settings)
    replaced = {} if before is None else {"gradient_accumulation_steps": 2}
    buffer.open(settings, GROUPS_PER_STEP, replaced={"paused", *replaced}, **replaced)
    name = "first" if before is None else "again"
    engine, rollouts = FollowingEngine(redis_url, receiver.client), MadeUpRollouts(redis_url, name)
    try:
        output = ranks.run("loop" if before is None else "loop_again", 2)
    finally:
        rollouts.close()
        engine.close()
    run_dir = output if before is None else before.run_dir
    entries = run_state.read_metrics(STREAM_START, TIMEOUT_S)
    records = [dict(entry.record) for entry in entries if entry.kind == "step"]
    lanes = [dict(entry.record) for entry in entries if entry.kind == "ranks"]
    published = {int(e.record["version"]) for e in entries if e.kind == "publish"}
    yield LoopOutcome(
        run_dir=run_dir,
        ranks=[json.loads((run_dir / f"{name}-{rank}.json").read_text()) for rank in range(2)],
        records=records[0 if before is None else len(before.records) :],
        lanes=lanes[0 if before is None else len(before.lanes) :],
        published=published - (set() if before is None else before.published),
        waits=run_state.waits(),
        stats=buffer.stats(),
        engine_weights=engine.weights,
    )
    buffer.close()
    run_state.close()


@pytest.fixture(scope="module")
def loop(
    ranks: Ranks, folder: Path, two_ranks: Outcome, receiver: Receiver, redis_url: str
) -> Iterator[LoopOutcome]:
    """Warm start, version 0, three steps or more, stop."""
    (folder / "redis.txt").write_text(redis_url)
    receiver.forget()
    yield from play_loop(ranks, receiver, redis_url)


def test_stop_of_rank_0_ends_all_ranks_after_the_same_step(loop: LoopOutcome) -> None:
    first, second = (rank["report"] for rank in loop.ranks)
    assert first["was_stopped"] and second["was_stopped"]
    assert first["num_steps"] == second["num_steps"] == first["version"] >= LOOP_STEPS


def test_each_step_has_the_times_of_every_rank_and_who_was_waited_for(loop: LoopOutcome) -> None:
    assert [lane["step"] for lane in loop.lanes] == [*range(1, loop.num_steps + 1)]
    for lane, step in zip(loop.lanes, loop.records, strict=True):
        times = json.loads(lane["lanes"])
        waits = times.pop("ranks")
        assert min(waits) > 0 and lane["waited_s"] == max(waits), "there are collectives in a pass"
        assert waits[lane["slowest"]] == min(waits)
        assert {len(of_part) for of_part in times.values()} == {2} and times.pop("rank") == [0, 1]
        assert min(times["passes"]) > 0 and min(*times["update"], *times["rest"]) >= 0
        assert times["passes"][0] == pytest.approx(step["step_passes_s"], abs=1e-3)
        assert times["passes"][0] + step["step_ranks_s"] < step["step_s"]


def test_engine_has_the_final_weights(loop: LoopOutcome) -> None:
    model = AutoModelForCausalLM.from_pretrained(loop.run_dir / FINAL_MODEL)
    names = {name for name, _ in model.named_parameters()}
    assert names == set(loop.engine_weights)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.detach(), loop.engine_weights[name]), name
    assert [rank["initial"]["version"] for rank in loop.ranks] == [0, 0]


def test_trained_groups_are_acked_and_within_max_staleness(loop: LoopOutcome) -> None:
    stats, num_steps = loop.stats, loop.num_steps
    assert stats.is_conserved
    assert stats.acked == num_steps * GROUPS_PER_STEP and stats.consumed == 0
    assert stats.trainer_version == num_steps
    assert stats.engine_versions == {"engine-0": num_steps}
    assert stats.max_staleness_trained is not None
    assert stats.max_staleness_trained <= MAX_STALENESS


def test_each_trained_group_is_recorded_with_its_advantages(loop: LoopOutcome) -> None:
    lines = [
        msgspec.json.decode(line, type=Trained)
        for rank in range(2)
        for line in (loop.run_dir / f"trained/rank-{rank}.jsonl").read_bytes().splitlines()
    ]
    steps = sorted(range(1, loop.num_steps + 1)) * GROUPS_PER_STEP
    assert sorted(line.step for line in lines) == sorted(steps)
    assert all(line.version == line.step - 1 for line in lines)
    for line in lines:
        sums = [one.advantage for one in line.trajectories]
        assert sum(sums) == pytest.approx(0.0, abs=1e-4), "of a whole group"
        assert all(any(p is not None for p in one.logprobs) for one in line.trajectories)


def test_last_checkpoint_contains_the_last_step_and_the_weights_that_engines_serve(
    loop: LoopOutcome,
) -> None:
    latest = CheckpointStore(loop.run_dir / "checkpoints").latest()
    assert latest is not None
    folder, state = latest
    assert state.step == state.version == loop.num_steps
    # Those of the steps since the last checkpoint that was durable when this one began.
    assert len(state.consumed_group_ids) in range(
        GROUPS_PER_STEP, loop.num_steps * GROUPS_PER_STEP + 1, GROUPS_PER_STEP
    )
    assert state.num_updates == loop.num_steps  # the warm start's are reset
    with ShardReader(folder) as reader:
        assert reader.layout.num_ranks == 2
        for name, weights in loop.engine_weights.items():
            assert torch.equal(reader.tensor(name).to(weights.dtype), weights), name
    exported = loop.run_dir / "exported"
    model_path = loop.run_dir.parent / "model"
    num_parameters = export_checkpoint(folder, str(model_path), exported)
    model = AutoModelForCausalLM.from_pretrained(exported)
    assert num_parameters == model.num_parameters()
    assert {name for name, _ in model.named_parameters()} == set(loop.engine_weights)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.detach(), loop.engine_weights[name]), name
    assert torch.equal(model.lm_head.weight, model.get_input_embeddings().weight)  # tied, as it was
    names = {path.name for path in exported.iterdir()}
    assert names == {path.name for path in (loop.run_dir / FINAL_MODEL).iterdir()}
    for name in names:
        same = (loop.run_dir / FINAL_MODEL / name).read_bytes() == (exported / name).read_bytes()
        assert same, name


def test_each_step_is_recorded_with_its_times(loop: LoopOutcome) -> None:
    assert len(loop.records) == loop.num_steps
    for number, record in enumerate(loop.records, start=1):
        assert record["step"] == number and record["version"] == number - 1
        assert record["num_groups"] == GROUPS_PER_STEP and record["num_tokens"] > 0
        assert record["reward_mean"] == 0.5
        assert record["staleness_max"] <= MAX_STALENESS
        for name in ("lease_wait_s", "step_s", "snapshot_s", "snapshot_wait_s", "checkpoint_s"):
            assert record[name] >= 0
        assert 0 <= record["checkpoint_wait_s"] <= record["checkpoint_s"]
        assert record["mfu"] == pytest.approx(record["model_tflops"] / PEAK_TFLOPS)
    assert {("trainer", "rollout"), ("trainer", "weight_sync")} <= loop.waits.keys()
    rates = [record["lr"] for record in loop.records]
    assert (rates[0], rates[-1]) == (pytest.approx(1e-3), pytest.approx(LATER_RATE))


def test_ranks_that_are_stopped_in_a_pause_have_written_their_last_step(loop: LoopOutcome) -> None:
    assert loop.stats.paused and loop.stats.ready >= GROUPS_PER_STEP and loop.stats.leased == 0


def publish_to_one_shard(redis_url: str, settings: BufferConfig, version: int) -> None:
    async def publish() -> None:
        shard = ReplayBuffer(await connect(redis_url), RUN, settings, shard=1)
        await shard.announce_version(version)
        await shard.close()

    asyncio.run(publish())


@pytest.fixture(scope="module")
def loop_again(
    ranks: Ranks, loop: LoopOutcome, receiver: Receiver, redis_url: str
) -> Iterator[LoopOutcome]:
    """The same run, resumed from its last checkpoint but one: its last step was undone. Its trainer
    was killed while it published a version, of which only one shard knows, and Redis has lost the
    one that it had published after that. From here on two steps make a version, of which the
    engines get every other one, and both ranks lease the same groups, whose rows they split."""
    settings = loop_spec(loop.run_dir.parent, redis_url).buffer
    publish_to_one_shard(redis_url, settings, loop.num_steps + 1)
    store = CheckpointStore(loop.run_dir / "checkpoints")
    assert store.noted_version() == loop.num_steps
    store.note_version(loop.num_steps + 2)
    yield from play_loop(ranks, receiver, redis_url, before=loop)


def test_resumed_ranks_count_steps_on_and_give_old_weights_a_new_version(
    loop: LoopOutcome, loop_again: LoopOutcome
) -> None:
    undone = loop.num_steps + 2  # published and gone: the number may not name other weights
    assert [rank["initial"]["version"] for rank in loop_again.ranks] == [undone + 1] * 2
    first, *_, last = loop_again.records
    assert first["step"] == loop.num_steps - (loop.num_steps % 2 or 2) + 1
    assert first["version"] == undone + 1
    assert last["step"] == loop_again.num_steps
    versions = [record["version"] for record in loop_again.records]
    assert versions == [undone + 1 + number // 2 for number in range(len(versions))]
    updates = [record["num_updates"] for record in loop_again.records]
    assert updates == [0, 1] * (len(updates) // 2)
    # The initial version, those after every fourth step, and the last.
    made = {record["step"]: record["version"] + 1 for record in loop_again.records}
    due = {version for step, version in made.items() if step % 4 == 0}
    assert loop_again.published == {undone + 1, *due, versions[-1] + 1} != set(made.values())
    stats = loop_again.stats
    assert stats.is_conserved and stats.consumed == 0
    assert stats.trainer_version == versions[-1] + 1 == loop_again.ranks[0]["report"]["version"]
    assert stats.engine_versions == {"engine-0": stats.trainer_version}
    assert stats.max_staleness_trained is not None
    assert stats.max_staleness_trained <= MAX_STALENESS
    model = AutoModelForCausalLM.from_pretrained(loop.run_dir / FINAL_MODEL)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.detach(), loop_again.engine_weights[name]), name
