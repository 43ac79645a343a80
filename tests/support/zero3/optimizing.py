"""Updates of the optimizer against torch's own, in bfloat16, and of gradients that add up."""

from __future__ import annotations

from dataclasses import replace

import deepspeed
import torch

from configs.algorithm_schema import AGGREGATIONS, AlgorithmConfig
from configs.schema import TrainerConfig
from tests.support.trainer.loop_scene import HEAD_TOKENS, head_row
from tests.support.zero3.batches import part_of, without_trained_tokens
from tests.support.zero3.scene import Scene
from trainer_pool.algorithms.registry import Algorithm
from trainer_pool.data.packing import pack
from trainer_pool.step import Accumulation

OPTIMIZER = TrainerConfig(
    num_ranks=2,
    groups_per_step=2,
    adam_beta1=0.5,
    adam_beta2=0.7,
    adam_epsilon=0.01,
    weight_decay=0.3,
    max_grad_norm=0.0,
    gradient_checkpointing=True,
)


def optimizer(scene: Scene) -> None:
    """Updates with OPTIMIZER; in `errors` the largest difference from torch's AdamW on the
    whole weights with the same gradients, and in `forwards` how often a layer ran forward."""
    model = scene.engine._engine.module
    forwards: list[int] = []
    model.model.layers[0].register_forward_pre_hook(lambda *_: forwards.append(1))
    whole = scene.weights()
    adam = torch.optim.AdamW(
        whole.values(), betas=(0.5, 0.7), eps=0.01, weight_decay=0.3, fused=False
    )
    (batch,) = pack([head_row(0), head_row(1)], HEAD_TOKENS)
    errors = []
    for rate in (0.1, 0.02):
        logprobs = scene.engine.score(batch).logprobs
        scene.engine.backward(logprobs.square().mean() / scene.ranks.num_ranks)
        for name, parameter in model.named_parameters():
            whole[name].grad = deepspeed.utils.safe_get_full_grad(parameter).clone()
        scene.engine.step(rate)
        adam.param_groups[0]["lr"] = rate
        adam.step()
        mine = scene.engine.named_tensors()
        errors.append(max(float((t - whole[n]).abs().max()) for n, t in mine))
    scene.results |= {"errors": errors, "forwards": len(forwards)}


def masters(scene: Scene) -> None:
    """How far the last norm's weights, which are 1 in bfloat16, have moved after one update and
    after many that are each below what bfloat16 can add to 1."""
    (batch,) = pack([head_row(0), head_row(1)], HEAD_TOKENS)
    moved = []
    for update in range(1, 81):
        scene.engine.backward(scene.engine.score(batch).logprobs.sum())
        scene.engine.step(1e-4)
        if update in (1, 80):
            norm = scene.weights()["model.norm.weight"]
            assert norm.dtype is torch.bfloat16
            moved.append(float((norm.float() - 1).abs().max()))
    scene.results["moved"] = moved


def accumulation(scene: Scene) -> None:
    """What a step leaves in Adam's first moments, and the norm of its gradient: with the whole
    batch, and with parts of it one after the other, of which the last has no token to train."""
    whole = scene.batch(1)
    parts = [part_of(whole, whole.group_ids[:1]), part_of(whole, whole.group_ids[1:])]
    untrained = [without_trained_tokens(group) for group in parts[0].groups]
    parts.append(replace(parts[0], groups=tuple(untrained)))
    config = replace(scene.config, num_minibatches=1)
    for aggregation in AGGREGATIONS:
        length = 20 if aggregation == "sequence_mean_token_sum_norm" else None
        algorithm = Algorithm.load(
            AlgorithmConfig(aggregation=aggregation, aggregation_length=length)
        )
        found = []
        for batches in ([whole], parts):
            scene.engine.reset_optimizer()
            accumulation = Accumulation() if len(batches) > 1 else None
            for batch in batches:
                if accumulation is not None:
                    accumulation.is_complete = batch is batches[-1]
                stats = scene.step(
                    batch,
                    config=config,
                    algorithm=algorithm,
                    learning_rate=0.0,
                    accumulation=accumulation,
                )
            states = scene.engine._engine.optimizer.optimizer.state.values()
            moments = torch.cat([state["exp_avg"].flatten() for state in states])
            found.append((stats.grad_norm, moments.clone(), stats.num_updates))
        (norm, expected, _), (norm_of_parts, of_parts, num_updates) = found
        scene.results[aggregation] = {
            "norms": [norm, norm_of_parts],
            "updates": num_updates,
            "difference": float((of_parts - expected).norm() / expected.norm()),
        }
