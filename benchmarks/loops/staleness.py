"""Measures what staleness does to learning: accuracy by algorithm and max_staleness.

python -m benchmarks.loops.staleness            # 60 cells: an hour on two cores
python -m benchmarks.loops.staleness --short    # two cells of a few steps; the figures mean little

Each cell trains the quickstart's model on its task, with SETTINGS besides its own, by the real
step: ZeRO-3 of one rank, packing, the algorithm. So that staleness is exact, generation is in the
same process: every token of step v is sampled with the weights of version v - max_staleness, which
are kept. Naive PPO treats old tokens as the trained version's; a run would refuse it, so it is made
here.

A cell is a process with one thread; its result is kept in --folder, so that an interrupted
benchmark goes on. Accuracy is greedy, on the held-out words, over the last versions.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.loops.cells import Cell, measure_missing, plain, results_of
from benchmarks.ranks import free_port, join
from benchmarks.report import Report
from buffer.types import PromptRef, SamplingParams, Trajectory, TrajectoryGroup, VersionSpan
from configs.algorithm_schema import AlgorithmConfig
from configs.choices import Proximal
from configs.load import load_config
from configs.losses import LOSSES
from configs.schema import Config
from controller.start.warm_start import supervised_examples
from rollout_pool.tasks.registry import build_task
from rollout_pool.tasks.task import Prompt, Task, TaskStream
from trainer_pool.algorithms.registry import Algorithm
from trainer_pool.data.rows import StepBatch
from trainer_pool.model.scratch import build_scratch_model, byte_tokenizer
from trainer_pool.model.zero3 import Zero3Policy
from trainer_pool.step import train_step
from trainer_pool.warm_start import warm_start

LOSS = {kind: section(kind=kind) for kind, section in LOSSES.items()}
ALGORITHMS = {
    "naive PPO": AlgorithmConfig(correction=[]),
    "TIS": AlgorithmConfig(loss=LOSS["reinforce"], correction=[]),
    "decoupled PPO + TIS": AlgorithmConfig(),
    "CISPO": AlgorithmConfig(loss=LOSS["cispo"], proximal=Proximal.rollout, correction=[]),
    "DPPO": AlgorithmConfig(loss=LOSS["dppo_tv"], correction=[]),
}
STALENESS = (0, 1, 4, 16)
SEEDS = (0, 1, 2)
NUM_STEPS = 200
NUM_JUDGED = 10
"""The accuracy is the mean of so many last versions: a single one differs by points from the next.
"""
SETTINGS = ["trainer.num_minibatches=2", "trainer.learning_rate=1.0e-4"]
"""Two updates per step, without which two of the algorithms are the same; a third of the
quickstart's learning rate, for three times its steps."""


# One cell -----------------------------------------------------------------------------------------


def run_cell(
    name: str, max_staleness: int, seed: int, num_steps: int, given: Sequence[str]
) -> dict[str, Any]:
    torch.set_num_threads(1)
    settings = [*given, f"run.seed={seed}"]
    if num_steps < NUM_STEPS:
        settings.append("trainer.warm_start.num_steps=5")
    config = load_config(settings, "quickstart")
    with tempfile.TemporaryDirectory() as scratch:
        return learn(config, Path(scratch), name, max_staleness, num_steps)


def learn(
    config: Config, folder: Path, name: str, max_staleness: int, num_steps: int
) -> dict[str, Any]:
    seed = config.run.seed
    torch.manual_seed(seed)
    assert config.model.scratch is not None
    build_scratch_model(config.model.scratch, folder / "model", seed=seed)
    # Before ZeRO-3, which would take the sampler's model for one to shard.
    sampler = Sampler(config, folder / "model", build_task(config.task))
    address, ranks = join(0, 1, free_port(), 60.0)
    policy = Zero3Policy(str(folder / "model"), config.trainer, address)
    warm_start(policy, ranks, supervised_examples(config, str(folder / "model")), config.trainer)
    algorithm = Algorithm.load(ALGORITHMS[name])
    kept: deque[dict[str, Tensor]] = deque(maxlen=max_staleness + 1)
    rewards, reached, accuracies = [], [], []
    for version in range(num_steps):
        kept.append(weights_of(policy))
        if version >= num_steps - NUM_JUDGED:
            accuracies.append(sampler.accuracy(kept[-1]))
        behind = version - len(kept) + 1  # the first versions are younger than max_staleness
        groups = sampler.groups(kept[0], behind, config.trainer.groups_per_step)
        stats = train_step(
            policy,
            ranks,
            StepBatch(version=version, group_ids=tuple(g.group_id for g in groups), groups=groups),
            replace(config.trainer, num_ranks=1),
            algorithm,
            learning_rate=config.trainer.learning_rate * min(1.0, (version + 1) / 10),
            before_update=lambda: None,
        )
        # Else it would not be staleness that is measured.
        largest = float(stats["logprob_diff_max"])
        assert behind < version or largest < 1e-3, largest
        rewards.append(float(stats["reward_mean"]))
        reached.append(version - behind)
    return {
        "accuracy": mean(accuracies),
        "reward_last_ten": mean(rewards[-10:]),
        "rewards": rewards,
        "staleness": max(reached),
    }


def weights_of(policy: Zero3Policy) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in policy.named_tensors()}


class Sampler:
    """Generates with any weights, in this process."""

    def __init__(self, config: Config, path: Path, task: Task) -> None:
        self._rollout, self._task = config.rollout, task
        self._model: Any = AutoModelForCausalLM.from_pretrained(path)
        self._tokenizer = byte_tokenizer()
        self._prompts = TaskStream(task, 0, 1)
        self._count = 0

    def groups(
        self, weights: dict[str, Tensor], version: int, number: int
    ) -> tuple[TrajectoryGroup, ...]:
        prompts = [next(self._prompts) for _ in range(number)]
        size = self._rollout.group_size
        every = [prompt for prompt in prompts for _ in range(size)]
        made = [
            self._trajectory(prompt, answer, logprobs, version, episode % size)
            for episode, (prompt, (answer, logprobs)) in enumerate(
                zip(every, self._sample(weights, every), strict=True)
            )
        ]
        sampling = SamplingParams(temperature=self._rollout.sampling.temperature)
        groups = []
        for place, prompt in enumerate(prompts):
            self._count += 1
            groups.append(
                TrajectoryGroup(
                    group_id=f"g{self._count}",
                    prompt=PromptRef(task=self._task.name, index=prompt.index),
                    trajectories=tuple(made[place * size : (place + 1) * size]),
                    sampling=sampling,
                )
            )
        return tuple(groups)

    def accuracy(self, weights: dict[str, Tensor]) -> float:
        prompts = self._task.eval_prompts()
        answers = self._sample(weights, prompts, is_greedy=True)
        pairs = zip(prompts, answers, strict=True)
        return mean(self._score(prompt, answer) >= 1 for prompt, (answer, _) in pairs)

    def _trajectory(
        self, prompt: Prompt, answer: list[int], logprobs: list[float], version: int, episode: int
    ) -> Trajectory:
        asked = self._tokenizer.encode(prompt.text)
        length = len(asked) + len(answer)
        return Trajectory(
            tokens=np.array([*asked, *answer], np.int32),
            loss_mask=(np.arange(length) >= len(asked)).astype(np.uint8),
            rollout_logprobs=np.array([0.0] * len(asked) + logprobs, np.float32),
            version_spans=(VersionSpan(version=version, start=len(asked), end=length),),
            prompt_length=len(asked),
            reward=self._score(prompt, answer),
            finish_reason="stop" if answer[-1] == self._tokenizer.eos_token_id else "length",
            episode=episode,
        )

    def _score(self, prompt: Prompt, answer: Sequence[int]) -> float:
        return self._task.score(prompt, self._tokenizer.decode(answer, skip_special_tokens=True))

    @torch.no_grad()
    def _sample(
        self, weights: dict[str, Tensor], prompts: Sequence[Prompt], *, is_greedy: bool = False
    ) -> list[tuple[list[int], list[float]]]:
        """Tokens of each answer, with the last that ends it, and their log-probabilities."""
        self._model.load_state_dict(weights, strict=False)
        temperature = self._rollout.sampling.temperature
        encoded = [self._tokenizer.encode(prompt.text) for prompt in prompts]
        found: list[tuple[list[int], list[float]]] = [([], []) for _ in prompts]
        for length in sorted({len(tokens) for tokens in encoded}):
            places = [i for i, tokens in enumerate(encoded) if len(tokens) == length]
            step: Any = torch.tensor([encoded[i] for i in places])
            cache, is_open = None, torch.ones(len(places), dtype=torch.bool)
            for _ in range(self._rollout.max_response_tokens):
                output = self._model(input_ids=step, past_key_values=cache, use_cache=True)
                cache = output.past_key_values
                logprobs = (output.logits[:, -1].float() / temperature).log_softmax(-1)
                if is_greedy:
                    drawn = logprobs.argmax(-1)
                else:
                    drawn = torch.multinomial(logprobs.exp(), 1)[:, 0]
                chosen = logprobs.gather(1, drawn[:, None])[:, 0].tolist()
                for place, token, logprob, is_on in zip(
                    places, drawn.tolist(), chosen, is_open.tolist(), strict=True
                ):
                    if is_on:
                        found[place][0].append(token)
                        found[place][1].append(logprob)
                is_open &= drawn != self._tokenizer.eos_token_id
                if not is_open.any():
                    break
                step = drawn[:, None]
        return found


# All cells ----------------------------------------------------------------------------------------


def measure(cell: Cell, num_steps: int, settings: Sequence[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.loops.staleness", "--steps", str(num_steps)]
    command += ["--cell", *map(str, cell), "--set", *settings]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    if ended.returncode:
        raise RuntimeError(f"{cell}: {ended.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


def cells_of(
    names: Sequence[str], staleness: Sequence[int], seeds: Sequence[int]
) -> Iterator[Cell]:
    for max_staleness in staleness:
        for seed in seeds:
            for name in names:
                yield name, max_staleness, seed


def summarize(
    folder: Path, names: Sequence[str], staleness: Sequence[int], seeds: Sequence[int]
) -> None:
    report = Report("Staleness")
    title = "Accuracy in percent: mean of the seeds, and their deviation"
    table = Table("algorithm", *(f"max_staleness {value}" for value in staleness), title=title)
    means: dict[tuple[str, int], float] = {}
    for name in names:
        line = []
        for value in staleness:
            results = results_of(folder, ((name, value, seed) for seed in seeds))
            found = [100 * result["accuracy"] for result in results]
            line.append(f"{mean(found):.1f} ± {pstdev(found):.1f}" if found else "")
            if found:
                means[name, value] = mean(found)
                report.note(f"{plain(name)}_{value}", means[name, value])
        table.add_row(name, *line)
    report.show(table)
    draw(folder / "staleness.png", means, names, staleness)
    report.say(f"{folder / 'staleness.png'} has the plot")
    late = {name: means[name, 4] for name in names[1:] if (name, 4) in means}
    if late and all((name, 0) in means for name in late):
        best = max(late, key=lambda name: late[name])
        lost = means[best, 0] - late[best]
        report.target("points_lost_at_4", lost, "<=", 2.0, f"by {best}, the best at 4, against 0")
    report.close()


def draw(
    path: Path, means: dict[tuple[str, int], float], names: Sequence[str], staleness: Sequence[int]
) -> None:
    figure, axes = plt.subplots(figsize=(6, 4))
    for name in names:
        values = [value for value in staleness if (name, value) in means]
        axes.plot(
            [staleness.index(value) for value in values],
            [means[name, value] for value in values],
            marker="o",
            label=name,
        )
    axes.set_xticks(range(len(staleness)), [str(value) for value in staleness])
    axes.set_xlabel("max_staleness")
    axes.set_ylabel("held-out accuracy, %")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="two cells of a few steps")
    parser.add_argument("--folder", type=Path, default=Path("build/staleness"))
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--steps", type=int, default=NUM_STEPS)
    parser.add_argument("--only", type=int, nargs="*", help="these values of max_staleness")
    parser.add_argument("--set", nargs="*", default=SETTINGS, help="instead of the settings here")
    parser.add_argument("--cell", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.cell:
        name, max_staleness, seed = given.cell
        found = run_cell(name, int(max_staleness), int(seed), given.steps, given.set)
        print(json.dumps(found))
        return
    names: Sequence[str] = [*ALGORITHMS]
    staleness: Sequence[int] = STALENESS
    seeds: Sequence[int] = SEEDS
    with tempfile.TemporaryDirectory() as scratch:
        if given.short:
            given.folder, given.steps = Path(scratch), 3
            names, staleness, seeds = names[2:3], (0, 4), SEEDS[:1]
        wanted = [value for value in staleness if given.only is None or value in given.only]
        cells = [*cells_of(names, wanted, seeds)]
        one = partial(measure, num_steps=given.steps, settings=given.set)
        measure_missing(given.folder, cells, one, given.jobs)
        summarize(given.folder, names, staleness, seeds)


if __name__ == "__main__":
    main()
