"""Routing replay: the log-probabilities of engine and trainer, by staleness; bytes in the buffer.

python -m benchmarks.training.routing           # two minutes
python -m benchmarks.training.routing --short
python -m benchmarks.training.routing --glm     # of GLM-4 MoE: groups and corrected scores choose

An engine samples with random weights. The trainer's weights are the same, and then those after so
many steps of a random walk, as if so many versions had been trained since. It scores the sampled
tokens with the experts that it chooses itself, and with those of the engine.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from rich.table import Table

from benchmarks.report import Report
from buffer.types import ROUTES_COLUMN, PromptRef, SamplingParams, Trajectory, TrajectoryGroup
from buffer.wire.codec import encode_group
from configs.rollout_schema import EngineConfig, RolloutConfig
from rollout_pool.engines.engine import engine_spec
from rollout_pool.engines.sglang.engine import SGLangEngine
from rollout_pool.episodes.episode import Branch, Episode, add_turn
from rollout_pool.rewards.types import Score
from rollout_pool.sampling.sample import Sample
from rollout_pool.worker.group_run import make_trajectories
from trainer_pool.model.routing import RoutingReplay
from trainer_pool.model.scratch import VOCAB_SIZE, byte_tokenizer

LAYERS, EXPERTS, PER_TOKEN, NUM_TOKENS = 4, 16, 4, 96
STALENESS = (0, 1, 2, 4, 8)
STEP = 0.01
"""Step of the walk, as a fraction of the standard deviation of each weight."""


def build(folder: Path, is_glm: bool) -> None:
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "moe_intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts_per_tok": PER_TOKEN,
        "norm_topk_prob": True,
        "initializer_range": 0.15,
        "eos_token_id": byte_tokenizer().eos_token_id,
        "dtype": "float32",
    }
    config: hf.PreTrainedConfig = hf.Qwen3MoeConfig(**sizes, num_experts=EXPERTS)
    if is_glm:
        sizes |= {"n_routed_experts": EXPERTS, "n_group": 4, "topk_group": 2}
        config = hf.Glm4MoeConfig(**sizes, intermediate_size=96, routed_scaling_factor=1.5)
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config)
    for name, corrections in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            corrections.normal_(0, 0.2)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


async def sampled(folder: Path, number: int) -> list[Trajectory]:
    """Answers to one prompt, by an engine that returns its experts."""
    rollout = RolloutConfig(engine=EngineConfig(routing_replay=True), max_prompt_tokens=64)
    place: dict[str, Any] = {"model_path": str(folder), "trust_remote_code": False}
    place |= {"host": "127.0.0.1", "num_threads": 1, "uses_gpu": False, "key": "a-key"}
    (folder / "logs").mkdir()
    engine = SGLangEngine(engine_spec("engine-0", rollout, folder, **place))
    await engine.start()
    try:
        await engine.client.update_from_disk(str(folder), 0, 300.0)
        samples = [
            Sample(
                sample_id=f"s.{i}",
                prompt=[*range(65, 97)],
                sampling=SamplingParams(),
                max_new_tokens=NUM_TOKENS,
            )
            for i in range(number)
        ]
        await asyncio.gather(
            *(engine.client.generate_tokens(s, f"{s.sample_id}!") for s in samples)
        )
    finally:
        await engine.stop()
    found = []
    for place_of, sample in enumerate(samples):
        branches: list[Branch] = []
        add_turn(branches, sample)
        episode = Episode(branches=branches, messages=(), end="done", num_turns=1)
        found += make_trajectories(episode, Score(reward=0.0), place_of, 1.0)
    return found


@torch.no_grad()
def apart(model: Any, replay: RoutingReplay, trajectories: list[Trajectory], on: bool) -> Any:
    """|trainer - engine| of each sampled token's log-probability, in nats."""
    found = []
    for one in trajectories:
        tokens = torch.from_numpy(one.tokens).long()
        routes = torch.from_numpy(one.columns[ROUTES_COLUMN].astype("int32")) if on else None
        with replay.of(routes):
            logits = model(tokens[None]).logits[0, :-1].float()
        logprobs = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        difference = (logprobs - torch.from_numpy(one.rollout_logprobs[1:])).abs()
        found.append(difference[torch.from_numpy(one.loss_mask[1:]) != 0])
    return torch.cat(found)


def measure_gaps(folder: Path, trajectories: list[Trajectory], report: Report) -> None:
    columns = ("versions", "drift", "own mean", "own largest", "replayed", "largest")
    table = Table(*columns, title="Engine and trainer, nats a token")
    model = hf.AutoModelForCausalLM.from_pretrained(folder)
    replay, dice, walked = RoutingReplay(model), torch.Generator().manual_seed(1), 0

    def row(name: str) -> float:
        own, replayed = (apart(model, replay, trajectories, on) for on in (False, True))
        drift, of = replay.take()["route_drift"].tolist()
        figures = (own.mean(), own.max(), replayed.mean(), replayed.max())
        table.add_row(name, f"{drift / of:.1%}", *(f"{float(figure):.2g}" for figure in figures))
        report.note(f"own_{name}", float(own.mean()))
        report.note(f"replayed_{name}", float(replayed.mean()))
        return float(replayed.max())

    for staleness in STALENESS:
        while walked < staleness:
            walked += 1
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=dice)
                parameter.data += STEP * parameter.std() * noise
        largest = row(str(staleness))
        if staleness == 0:
            report.target("staleness_0", largest, "<=", 1e-5, "nats, of all tokens, replayed")
            model.bfloat16()
            row("0_bfloat16")
            model.float().load_state_dict(
                hf.AutoModelForCausalLM.from_pretrained(folder).state_dict()
            )
    report.show(table)


def measure_bytes(trajectories: list[Trajectory], report: Report) -> None:
    def group(columns: bool) -> TrajectoryGroup:
        kept = trajectories if columns else [replace(one, columns={}) for one in trajectories]
        return TrajectoryGroup(
            group_id="g", prompt=PromptRef(task="t", index=0), trajectories=tuple(kept)
        )

    for compress, name in ((False, "bytes"), (True, "compressed_bytes")):
        sizes = [len(encode_group(group(columns), compress)) for columns in (True, False)]
        per_token = (sizes[0] - sizes[1]) / group(True).num_tokens / (LAYERS * PER_TOKEN)
        report.figure(name, per_token, "of the column, for each layer and expert of a token")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="fewer samples")
    parser.add_argument("--glm", action="store_true", help="a GLM-4 MoE, first layer dense")
    arguments = parser.parse_args()
    number = 4 if arguments.short else 32
    hf.utils.logging.set_verbosity_error()
    hf.utils.logging.disable_progress_bar()
    report = Report("Routing replay")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        build(folder, arguments.glm)
        trajectories = asyncio.run(sampled(folder, number))
        measure_gaps(folder, trajectories, report)
    measure_bytes(trajectories, report)
    report.close()


if __name__ == "__main__":
    main()
