"""Updates of the optimizer against torch's own, in bfloat16, and of gradients that add up."""

from __future__ import annotations

import sys
from dataclasses import replace

import deepspeed
import torch

from configs.advantages import AGGREGATIONS
from configs.schema import TrainerConfig
from tests.support.trainer.loop_scene import HEAD_TOKENS, head_row
from tests.support.trainer.token_batch import algorithm
from tests.support.zero3.batches import part_of, without_trained_tokens
from tests.support.zero3.scene import Scene
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
    max_grad_value=0.002,
    gradient_checkpointing=True,
)


def optimizer(scene: Scene) -> None:
    """Updates with OPTIMIZER; in `errors` the largest difference from torch's AdamW on the
    whole weights with the same gradients, clipped by torch; in `clipped` the fraction of elements
    that were, and in `forwards` how often a layer ran forward."""
    model = scene.policy._deepspeed.module
    forwards: list[int] = []
    model.model.layers[0].register_forward_pre_hook(lambda *_: forwards.append(1))
    whole = scene.weights()
    adam = torch.optim.AdamW(
        whole.values(), betas=(0.5, 0.7), eps=0.01, weight_decay=0.3, fused=False
    )
    (batch,) = pack([head_row(0), head_row(1)], HEAD_TOKENS)
    errors, clipped = [], []
    for rate in (0.1, 0.02):
        logprobs = scene.policy.score(batch).logprobs
        scene.policy.backward(logprobs.square().mean() / scene.ranks.num_ranks)
        for name, parameter in model.named_parameters():
            whole[name].grad = deepspeed.utils.safe_get_full_grad(parameter).clone()
        scene.policy.step(rate)
        over = sum(int((t.grad.abs() > 0.002).sum()) for t in whole.values() if t.grad is not None)
        clipped.append(over / sum(t.numel() for t in whole.values()))
        torch.nn.utils.clip_grad_value_(whole.values(), 0.002)
        adam.param_groups[0]["lr"] = rate
        adam.step()
        mine = scene.policy.named_tensors()
        errors.append(max(float((t - whole[n]).abs().max()) for n, t in mine))
    scene.results |= {"errors": errors, "clipped": clipped, "forwards": len(forwards)}
    scene.results["loads_compiler"] = "torch._inductor.compile_fx" in sys.modules


def masters(scene: Scene) -> None:
    """How far the last norm's weights, which are 1 in bfloat16, have moved after one update and
    after many that are each below what bfloat16 can add to 1."""
    (batch,) = pack([head_row(0), head_row(1)], HEAD_TOKENS)
    moved = []
    for update in range(1, 9):
        scene.policy.backward(scene.policy.score(batch).logprobs.sum())
        scene.policy.step(1e-3)
        if update in (1, 8):
            norm = scene.weights()["model.norm.weight"]
            assert norm.dtype is torch.bfloat16
            moved.append(float((norm.float() - 1).abs().max()))
    scene.results["moved"] = moved


def accumulation(scene: Scene) -> None:
    """Adam's first moments after a step, and the norm of its gradient: with the whole
    batch, and with parts of it one after the other, of which the last has no token to train."""
    whole = scene.batch(1)
    parts = [part_of(whole, whole.group_ids[:1]), part_of(whole, whole.group_ids[1:])]
    untrained = [without_trained_tokens(group) for group in parts[0].groups]
    parts.append(replace(parts[0], groups=tuple(untrained)))
    config = replace(scene.config, num_minibatches=1)
    for aggregation in AGGREGATIONS:
        length = {"aggregation_length": 20} if aggregation.endswith("_norm") else {}
        chosen = algorithm("tis_token", aggregation=aggregation, **length)
        found = []
        for batches in ([whole], parts):
            scene.policy.reset_optimizer()
            accumulation = Accumulation() if len(batches) > 1 else None
            for batch in batches:
                if accumulation is not None:
                    accumulation.is_complete = batch is batches[-1]
                stats = scene.step(
                    batch,
                    config=config,
                    algorithm=chosen,
                    learning_rate=0.0,
                    accumulation=accumulation,
                )
            states = scene.policy._deepspeed.optimizer.optimizer.state.values()
            moments = torch.cat([state["exp_avg"].flatten() for state in states])
            found.append((stats["grad_norm"], moments.clone(), stats["num_updates"]))
        (norm, expected, _), (norm_of_parts, of_parts, num_updates) = found
        scene.results[aggregation] = {
            "norms": [norm, norm_of_parts],
            "updates": num_updates,
            "difference": float((of_parts - expected).norm() / expected.norm()),
        }
