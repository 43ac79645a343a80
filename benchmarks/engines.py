"""Real SGLang servers, and random models for them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import KEY
from configs.choices import PauseMode
from configs.rollout_schema import EngineConfig
from rollout_pool.engines.engine import EngineSpec
from rollout_pool.engines.sglang.engine import SGLangEngine

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM


def random_qwen3(seed: int, **shape: Any) -> Qwen3ForCausalLM:
    """Random float32 weights; no token ends an answer."""
    from transformers import Qwen3Config, Qwen3ForCausalLM  # takes seconds, and not all need it

    torch.manual_seed(seed)
    config = Qwen3Config(
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        dtype="float32",
        **shape,
    )
    return Qwen3ForCausalLM(config).float().eval()


def make_engine(
    name: str,
    model_path: Path,
    folder: Path,
    *,
    max_running: int = 64,
    uses_gpu: bool = False,
    pause_mode: PauseMode = PauseMode.resubmit,
) -> SGLangEngine:
    """With a prefix cache where the mode allows it."""
    return SGLangEngine(
        EngineSpec(
            name=name,
            config=EngineConfig(
                max_running_requests=max_running,
                # The first server of a machine compiles its kernels.
                start_timeout_s=600 if uses_gpu else 300,
                request_timeout_s=120,
                radix_cache=pause_mode is not PauseMode.retract,
            ),
            pause_mode=pause_mode,
            model_path=str(model_path),
            trust_remote_code=False,
            host="127.0.0.1",
            log_path=folder / f"{name}.log",
            leftovers_path=folder / f"{name}.leftovers",
            num_threads=1,
            uses_gpu=uses_gpu,
            seed=hash(name) % 1000,
            key=KEY,
        )
    )
