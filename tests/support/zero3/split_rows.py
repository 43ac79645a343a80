"""Steps of ranks that split the tokens of each row, for models of each kind."""

from __future__ import annotations

import json
import math
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch

from configs.algorithm_schema import KLConfig
from configs.choices import Backend
from configs.schema import LoraConfig, WarmStartConfig
from tests.support.trainer.loop_scene import PROBE_TEXT, head_row
from tests.support.trainer.token_batch import algorithm
from tests.support.zero3.batches import examples, read_batch, with_common_beginning, with_routes
from tests.support.zero3.scene import config_for, recorded
from trainer_pool.collectives import Collectives, RankAddress, join_ranks, leave_ranks
from trainer_pool.data.packing import Row, pack
from trainer_pool.model.zero3 import Zero3Policy
from trainer_pool.step import score_probes, train_step
from trainer_pool.warm_start import warm_start

SIZES = {1: (1,), 2: (2,), 4: (4, 2)}
"""By number of ranks: those that split a row."""
KINDS = {"heads": 4, "experts": 2, "adapter": 4}
"""Models, and the heads that each has."""
LORA = LoraConfig(rank=4, alpha=8)


def run(folder: Path, listener: socket.socket | None, address: RankAddress) -> None:
    """Writes what each model gave for each size of the groups, and the gradients."""
    ranks = join_ranks(address, Backend.gloo, 60.0, listener)
    results: dict[str, Any] = {}
    gradients: dict[str, np.ndarray] = {}
    for size in SIZES[ranks.num_ranks]:
        for kind in (kind for kind, num_heads in KINDS.items() if size <= num_heads):
            found = Split(folder, address, ranks, size, kind)
            results[f"{kind}:{size}"] = found.results
            gradients |= {f"{kind}:{size}:{name}": g for name, g in found.gradients.items()}
            found.policy.close()
    if ranks.rank == 0:
        output = folder / f"split_rows-{ranks.num_ranks}"
        output.mkdir(exist_ok=True)
        (output / "results.json").write_text(json.dumps(results))
        np.savez(output / "gradients.npz", **gradients)
    ranks.barrier()
    leave_ranks()


class Split:
    """One model, and what it gives."""

    def __init__(
        self, folder: Path, address: RankAddress, ranks: Collectives, size: int, kind: str
    ) -> None:
        torch.manual_seed(0)  # an adapter begins with random numbers
        self.parts = ranks.in_groups(size)
        is_tiled = kind == "heads" and size > 1
        self.config = replace(
            config_for(ranks.num_ranks),
            sequence_parallel_size=size,
            num_minibatches=1,
            warm_start=WarmStartConfig(num_steps=2, batch_size=5, learning_rate=1e-3),
            gradient_checkpointing=kind == "experts" or is_tiled,
            mlp_tile_tokens=7 if is_tiled else None,
        )
        name = "heads" if kind == "adapter" else kind
        lora = LORA if kind == "adapter" else None
        self.policy = Zero3Policy(str(folder / name), self.config, address, lora=lora)
        self.results: dict[str, Any] = {}
        self.gradients: dict[str, np.ndarray] = {}
        self._step(folder, share_prefixes=True)
        if kind == "heads":
            self._step(folder, share_prefixes=False)
            self._scores()
            self._culprits()
            probes = score_probes(self.policy, PROBE_TEXT, self.config, self.parts)
            self.results["probes"] = [logprob for each in probes for logprob in each]
            report = warm_start(self.policy, self.parts, examples(), self.config)
            self.results["warm_start"] = [report.loss_first, report.loss_last]
        if kind == "experts":
            self._step(folder, share_prefixes=True, name="replayed")

    def _step(self, folder: Path, *, share_prefixes: bool, name: str = "") -> None:
        """Ratios are those of whole sequences, and a reference is scored."""
        name = name or ("shared" if share_prefixes else "packed")
        batch = read_batch(folder, 1, self.parts.rank, self.parts.num_ranks)
        batch = replace(batch, groups=tuple(map(with_common_beginning, batch.groups)))
        if name == "replayed":
            batch = replace(batch, groups=tuple(map(with_routes, batch.groups)))
        self.policy.hold_reference(
            None if self.policy._lora else self.policy._model_path, offload=False
        )
        stats = train_step(
            self.policy,
            self.parts,
            batch,
            replace(self.config, micro_batch_tokens=96, share_prefixes=share_prefixes),
            algorithm(
                "tis_geometric",
                loss="gspo",
                kl=KLConfig(weight=0.1, estimator="k2"),
                load_balancing_weight=1.0 if self.policy.gates else 0.0,
            ),
            learning_rate=0.0,
            before_update=lambda: self._note(name),
        )
        self.results[name] = recorded(stats)
        self.results[f"{name}_work"] = float(stats["model_tflops"]) > 0

    def _scores(self) -> None:
        """Log-probabilities and entropies at temperatures, some among candidates, in a row that is
        no multiple of any group."""
        (batch,) = pack(beginning_alike(), 200, should_share_prefixes=True)
        assert len(batch.row.tokens_L) % 2 and batch.row.key_places is not None
        scores = self.policy.score(batch)
        self.results["logprobs"] = scores.logprobs.tolist()
        self.results["entropy"] = scores.entropy.tolist()
        self.results["sum_squares"] = scores.sum_squares.tolist()
        loss = ((scores.logprobs - 0.5 * scores.entropy) * batch.mask_N).sum()
        self.policy.backward(loss / self.parts.num_ranks)
        self._note("scores")
        self.policy.step(0.0)

    def _culprits(self) -> None:
        """Positions that get a gradient which is not finite, from one token of the first row."""
        (batch,) = pack([head_row(0), head_row(1)], 40)
        logprobs = self.policy.score(batch).logprobs
        bad = self.policy.backward(logprobs[3] * math.nan)
        self.results["culprits"] = bad.nonzero().flatten().tolist()
        assert self.policy.step(0.0) is None

    def _note(self, name: str) -> None:
        parts = [
            deepspeed.utils.safe_get_full_grad(parameter).flatten()
            for parameter in self.policy._deepspeed.module.parameters()
            if parameter.requires_grad
        ]
        self.gradients[name] = torch.cat(parts).double().numpy()


def beginning_alike() -> list[Row]:
    """Rows of which the first two begin with the same 20 tokens."""
    beginning = np.arange(20, dtype=np.int32)
    return [
        replace(
            row,
            tokens=np.concatenate([beginning, row.tokens]),
            loss_mask=np.pad(row.loss_mask, (20, 0)),
            rollout_logprobs=np.pad(row.rollout_logprobs, (20, 0)),
            advantages=None,
            temperatures=np.pad(row.temperatures, (20, 0), constant_values=1.0),
            candidates=None
            if row.candidates is None
            else np.pad(row.candidates, ((20, 0), (0, 0)), constant_values=-1),
        )
        if number < 2 and row.temperatures is not None
        else row
        for number, row in enumerate(map(head_row, range(3)))
    ]
