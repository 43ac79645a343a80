"""Deterministic inference: the same request in another batch, on a real server with a GPU."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
import torch

from rollout_pool.engines.sglang.engine import SGLangEngine
from tests.support.sglang_model import engine_spec, make_sample, sample

pytestmark = [
    pytest.mark.slow,
    pytest.mark.gpu,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


async def test_request_has_the_same_logprobs_to_the_bit_in_any_batch(sglang_folder, models):
    spec = engine_spec(sglang_folder / "a", sglang_folder / "deterministic.log")
    config = dataclasses.replace(
        spec.config,
        deterministic=True,
        mem_fraction=0.2,
        extra_args=["--attention-backend", "triton"],
    )
    engine = SGLangEngine(dataclasses.replace(spec, config=config, uses_gpu=True))
    await engine.start()
    try:
        await engine.client.update_from_disk(spec.model_path, 0, 60)
        runs = [await sample(engine.client, n, max_new_tokens=64, temperature=0.0) for n in (1, 8)]
        alone, together = runs[0][0], runs[1][0]
        assert (alone.output_ids, alone.logprobs) == (together.output_ids, together.logprobs)
        siblings = [make_sample(0, max_new_tokens=32, name=f"sibling-{i}.") for i in range(8)]
        await asyncio.gather(
            *(engine.client.generate_tokens(s, f"{s.sample_id}!") for s in siblings)
        )
        assert len({tuple(sibling.output_ids) for sibling in siblings}) == 8  # each by its seed
    finally:
        await engine.stop()
