"""Supervised learning on a task's own answers before RL, which cannot start without any success.

Uses the ZeRO-3 policy and the packing of a training step.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from configs.schema import TrainerConfig
from trainer_pool.collectives import Collectives
from trainer_pool.data.packing import MicroBatch, Row, fill_up, pack
from trainer_pool.model.zero3 import Zero3Policy
from trainer_pool.types import SupervisedExample, WarmStartReport


def warm_start(
    policy: Zero3Policy,
    ranks: Collectives,
    examples: Sequence[SupervisedExample],
    config: TrainerConfig,
) -> WarmStartReport:
    """Train on `examples` in order, starting over when they run out.

    Every rank gets all of them and uses its share. The optimizer is reset afterwards, so that RL
    starts with fresh moments. Raises ValueError without examples.
    """
    if not examples:
        raise ValueError(
            f"trainer.warm_start.num_steps={config.warm_start.num_steps}: the task gave no "
            "examples to learn from; set 0, or choose a task with solutions"
        )
    start = time.perf_counter()
    endless, settings = itertools.cycle(examples), config.warm_start
    losses = [
        _supervised_step(policy, ranks, [*itertools.islice(endless, settings.batch_size)], config)
        for _ in range(settings.num_steps)
    ]
    policy.reset_optimizer()
    # One collective for all steps: each rank's losses are its shares of the global means.
    totals = ranks.gather(torch.stack(losses)).sum(0) if losses else torch.zeros(1)
    return WarmStartReport(
        loss_first=float(totals[0]),
        loss_last=float(totals[-1]),
        num_steps=len(losses),
        seconds=time.perf_counter() - start,
    )


def _supervised_step(
    policy: Zero3Policy,
    ranks: Collectives,
    batch: Sequence[SupervisedExample],
    config: TrainerConfig,
) -> Tensor:
    """One update; returns this rank's share of the loss, still on the device."""
    num_tokens = sum(int(example.loss_mask.sum()) for example in batch)
    rows = [
        Row(
            tokens=example.tokens,
            loss_mask=example.loss_mask,
            rollout_logprobs=np.zeros(len(example.tokens), np.float32),
        )
        for example in batch[ranks.rank :: ranks.num_ranks]
    ]
    mine = pack(
        rows,
        config.micro_batch_tokens,
        policy.cost,
        should_share_prefixes=config.share_prefixes,
    )
    num_passes = int(ranks.gather(torch.tensor([float(len(mine))])).max())
    micro_batches = fill_up(mine, num_passes)
    losses = [_accumulate(policy, part.to(policy.device), num_tokens) for part in micro_batches]
    policy.step(config.warm_start.learning_rate)
    return torch.stack(losses).sum()


def _accumulate(policy: Zero3Policy, batch: MicroBatch, num_tokens: int) -> Tensor:
    logprobs_N = policy.score(batch).logprobs
    loss = -logprobs_N.masked_fill(batch.mask_N == 0, 0.0).sum() / num_tokens
    policy.backward(loss)
    return loss.detach()
