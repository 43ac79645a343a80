"""Tokens per second of a training step: padded, packed, and with shared prefixes.

    python -m benchmarks.training.packing [--short] [--prompts gsm8k.jsonl]

Forward, backward and AdamW of a small Qwen3 in this process, without DeepSpeed. The baseline, in
the same run and interleaved, is batches of rows padded to the longest: sorted by length, as this
trainer had them before packing, and in the order of arrival. Rates count the tokens of the
trajectories, not the padding. A GPU computes in bfloat16.

With `--prompts`, a JSON-lines file with `question` and `answer` (GSM8K's), prompts and the lengths
of answers are those of the file, a byte a token; otherwise they are drawn.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from benchmarks.gpu.device import take_older_torch
from benchmarks.report import Report
from trainer_pool.data.packing import MicroBatch, PassCost, Row, pack
from trainer_pool.model import attention

VOCAB = 2048
SHAPE = Qwen3Config(
    vocab_size=VOCAB,
    hidden_size=256,
    intermediate_size=768,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=32,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
)


@dataclass(kw_only=True, slots=True, frozen=True)
class Work:
    """The rows of one step, in the order of arrival."""

    name: str
    rows: list[Row]
    max_tokens: int

    @property
    def num_tokens(self) -> int:
        return sum(len(row.tokens) for row in self.rows)


@dataclass(kw_only=True, slots=True, frozen=True)
class Padded:
    """Rows padded on the right, [B, T]; predictions for the last P positions only."""

    tokens_BT: Tensor
    mask_BP: Tensor
    advantages_B1: Tensor


# Two ways to form padded batches, of which each has rows x longest within the budget --------------


def padded_batches(rows: Sequence[Row], max_tokens: int, *, is_sorted: bool) -> list[Padded]:
    order = sorted(rows, key=lambda row: -len(row.tokens)) if is_sorted else list(rows)
    plan: list[list[Row]] = []
    for row in order:
        longest = max(len(other.tokens) for other in [row, *(plan[-1] if plan else [])])
        if plan and (len(plan[-1]) + 1) * longest <= max_tokens:
            plan[-1].append(row)
        else:
            plan.append([row])
    return [_pad(part) for part in plan]


def _pad(rows: Sequence[Row]) -> Padded:
    length = max(len(row.tokens) for row in rows)
    first = min(int(row.loss_mask.argmax()) for row in rows)
    advantages = [row.advantages[:1] for row in rows if row.advantages is not None]
    tokens, mask = np.zeros((len(rows), length), np.int64), np.zeros((len(rows), length))
    for i, row in enumerate(rows):
        tokens[i, : len(row.tokens)] = row.tokens
        mask[i, : len(row.tokens)] = row.loss_mask
    return Padded(
        tokens_BT=torch.from_numpy(tokens),
        mask_BP=torch.from_numpy(mask[:, first:]).float(),
        advantages_B1=torch.from_numpy(np.stack(advantages)),
    )


# One step -----------------------------------------------------------------------------------------


class Trainer:
    """The same weights behind either kind of attention."""

    def __init__(self, implementation: str, device: torch.device) -> None:
        torch.manual_seed(0)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.model: Any = AutoModelForCausalLM.from_config(
            copy.deepcopy(SHAPE), attn_implementation=implementation
        )
        self.model.to(device, dtype)
        self.device = device
        self._adam = torch.optim.AdamW(self.model.parameters(), lr=1e-6)

    def padded_pass(self, batch: Padded) -> Tensor:
        tokens, mask = batch.tokens_BT.to(self.device), batch.mask_BP.to(self.device)
        num_last = mask.shape[1] + 1
        output = self.model(input_ids=tokens, use_cache=False, logits_to_keep=num_last)
        logprobs_BP = _logprobs(output.logits[:, :-1], tokens[:, -mask.shape[1] :])
        return -(logprobs_BP * mask * batch.advantages_B1.to(self.device)).sum()

    def packed_pass(self, batch: MicroBatch) -> Tensor:
        batch = batch.to(self.device)
        output = self.model(
            input_ids=batch.row.tokens_L[None],
            position_ids=batch.row.position_ids_L[None],
            use_cache=False,
            logits_to_keep=batch.places_N,
            **attention.arguments(batch.row),
        )
        logprobs_N = _logprobs(output.logits[0], batch.targets_N)
        return -(logprobs_N * batch.mask_N * batch.advantages_N).sum()

    def gradient(self, losses: Sequence[Callable[[], Tensor]]) -> Tensor:
        """Returns the gradient of all weights in one line, without a step."""
        for loss in losses:
            loss().backward()  # type: ignore[no-untyped-call]
        gradient = torch.cat([p.grad.flatten().double() for p in self.model.parameters()])
        self._adam.zero_grad()
        return gradient

    def step(self, losses: Sequence[Callable[[], Tensor]]) -> float:
        """Its seconds."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        for loss in losses:
            loss().backward()  # type: ignore[no-untyped-call]
        self._adam.step()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self._adam.zero_grad()
        return time.perf_counter() - began


def _logprobs(logits: Tensor, targets: Tensor) -> Tensor:
    return logits.float().log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)


@dataclass(kw_only=True, slots=True)
class Outcome:
    tokens_per_s: float
    padding: float
    num_passes: int
    difference: float
    """Distance of the gradient from that of sorted padded batches, relative to its norm."""


def measure(work: Work, rounds: int, device: torch.device) -> dict[str, Outcome]:
    padded, packed = Trainer("sdpa", device), Trainer(attention.PACKED, device)
    num_weights = float(sum(parameter.numel() for parameter in packed.model.parameters()))
    size = SHAPE.num_hidden_layers * SHAPE.num_attention_heads * SHAPE.head_dim
    cost = PassCost(per_token=num_weights, per_pair=2.0 * size)
    pads = {
        "sorted": padded_batches(work.rows, work.max_tokens, is_sorted=True),
        "unsorted": padded_batches(work.rows, work.max_tokens, is_sorted=False),
    }
    packs = {
        "packed": pack(work.rows, work.max_tokens, cost),
        "shared": pack(work.rows, work.max_tokens, cost, should_share_prefixes=True),
    }
    ways: dict[str, tuple[Trainer, Sequence[Callable[[], Tensor]], int]] = {}
    for name, batches in pads.items():
        num_computed = sum(batch.tokens_BT.numel() for batch in batches)
        ways[name] = padded, [partial(padded.padded_pass, each) for each in batches], num_computed
    for name, micro_batches in packs.items():
        calls = [partial(packed.packed_pass, each) for each in micro_batches]
        ways[name] = packed, calls, sum(len(each.row.tokens_L) for each in micro_batches)
    # This also warms up.
    gradients = {name: trainer.gradient(passes) for name, (trainer, passes, _) in ways.items()}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, (trainer, passes, _) in ways.items():
            seconds[name].append(trainer.step(passes))
    plain = gradients["sorted"]
    return {
        name: Outcome(
            tokens_per_s=work.num_tokens / statistics.median(seconds[name]),
            padding=max(0.0, 1 - work.num_tokens / num_computed),  # fewer if some are shared
            num_passes=len(passes),
            difference=float((gradients[name] - plain).norm() / plain.norm()),
        )
        for name, (_, passes, num_computed) in ways.items()
    }


# What is trained on -------------------------------------------------------------------------------


def lognormal_lengths(dice: np.random.Generator, num_rows: int, max_tokens: int) -> Work:
    """Rows of exp(N(log 200, 1)) tokens between 16 and 2048, a quarter of each its prompt."""
    lengths = np.exp(dice.normal(np.log(200), 1.0, num_rows)).clip(16, min(2048, max_tokens))
    rows = [_row(dice, _some(dice, int(n) // 4), int(n) - int(n) // 4) for n in lengths]
    return Work(name="lognormal lengths", rows=rows, max_tokens=max_tokens)


def problems(
    dice: np.random.Generator, path: Path | None, num_groups: int, group_size: int, max_tokens: int
) -> Work:
    """Groups of answers to problems; answers differ in length by a lognormal factor of 0.4."""
    if path is None:
        texts = [
            (_some(dice, int(np.exp(dice.normal(np.log(220), 0.4)))), int(dice.integers(150, 450)))
            for _ in range(num_groups)
        ]
    else:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        chosen = [lines[i] for i in dice.choice(len(lines), num_groups, replace=False)]
        texts = [
            (
                np.frombuffer(line["question"].encode(), np.uint8).astype(np.int32),
                len(line["answer"].encode()),
            )
            for line in chosen
        ]
    rows = [
        _row(dice, prompt, max(1, int(length * np.exp(dice.normal(0, 0.4)))))
        for prompt, length in texts
        for _ in range(group_size)
    ]
    return Work(name="problems", rows=rows, max_tokens=max_tokens)


def long_prompts(dice: np.random.Generator, num_groups: int, answer: int, max_tokens: int) -> Work:
    """Groups of 16 answers to prompts of twice their length."""
    prompts = [_some(dice, 2 * answer) for _ in range(num_groups)]
    rows = [_row(dice, prompt, answer) for prompt in prompts for _ in range(16)]
    return Work(name="prompt = 2 x answer", rows=rows, max_tokens=max_tokens)


def _some(dice: np.random.Generator, length: int) -> NDArray[np.int32]:
    return dice.integers(0, VOCAB, length).astype(np.int32)


def _row(dice: np.random.Generator, prompt: NDArray[np.int32], answer: int) -> Row:
    tokens = np.concatenate([prompt, _some(dice, answer)])
    return Row(
        tokens=tokens,
        loss_mask=(np.arange(len(tokens)) >= len(prompt)).astype(np.uint8),
        rollout_logprobs=np.zeros(len(tokens), np.float32),
        advantages=np.full(len(tokens), dice.normal(), np.float32),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="few rows, one round")
    parser.add_argument("--prompts", type=Path, help="JSON lines with question and answer")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    scale, rounds = (1, 1) if options.short else (8, 3)
    budget = 1024 if options.short else 8192
    dice = np.random.default_rng(0)
    report = Report("packing")
    report.say(f"{device}, {torch.get_num_threads()} threads, {budget} tokens a pass")
    if (difference := take_older_torch()) is not None:
        report.say(difference)
    works = {
        "lengths": lognormal_lengths(dice, 8 * scale, budget),
        "problems": problems(dice, options.prompts, min(scale, 6), 8, budget),
        "prefix": long_prompts(dice, max(1, scale // 4), 64 if options.short else 192, budget),
    }
    outcomes = {name: measure(work, rounds, device) for name, work in works.items()}
    for name, work in works.items():
        title = f"{work.name}: {len(work.rows)} rows, {work.num_tokens} tokens"
        columns = ("way", "passes", "padding", "tokens/s", "gradient differs by")
        table = Table(*columns, title=title)
        for way, outcome in outcomes[name].items():
            table.add_row(
                way,
                str(outcome.num_passes),
                f"{outcome.padding:.1%}",
                f"{outcome.tokens_per_s:,.0f}",
                f"{outcome.difference:.1e}",
            )
        report.show(table)

    def ratio(work: str, ours: str, theirs: str) -> float:
        return outcomes[work][ours].tokens_per_s / outcomes[work][theirs].tokens_per_s

    unsorted, before = "than padded in order of arrival", "than padded and sorted by length"
    report.target(
        "packed_vs_padded", ratio("lengths", "packed", "unsorted"), ">=", 2, f"faster {unsorted}"
    )
    report.figure("packed_vs_sorted", ratio("lengths", "packed", "sorted"), f"faster {before}")
    report.target(
        "padding", outcomes["lengths"]["packed"].padding, "<=", 0.02, "share of the packed passes"
    )
    report.figure(
        "problems_packed_vs_padded", ratio("problems", "packed", "unsorted"), "groups of 8"
    )
    report.figure("problems_packed_vs_sorted", ratio("problems", "packed", "sorted"), "groups of 8")
    report.figure("problems_shared_vs_packed", ratio("problems", "shared", "packed"), "groups of 8")
    report.target(
        "shared_vs_packed", ratio("prefix", "shared", "packed"), ">=", 2, "16 answers a prompt"
    )
    largest = max(way.difference for ways in outcomes.values() for way in ways.values())
    report.target(
        "gradient_difference",
        largest,
        "<=",
        1e-5 if device.type == "cpu" else 0.05,
        "largest, from the padded batches', relative",
    )
    report.close()


if __name__ == "__main__":
    main()
