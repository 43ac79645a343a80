"""How long a real SGLang engine on a GPU stands still to take a staged version, by strategy.

    python -m benchmarks.gpu.weights_commit [--shapes 0.5B 1.5B 7B] [--strategies staged_disk ipc]

For each shape: random bfloat16 weights in tmpfs, one engine under load, commits of both of two
versions in turn. Told beside the pause is the bare /update_weights_from_disk on the idle engine,
and for how long a memcpy of as many bytes to the GPU would take.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

from benchmarks.engines import make_engine
from benchmarks.gpu.device import require_gpu, require_packages
from benchmarks.report import Report
from benchmarks.weights.load import FleetSize, Load
from benchmarks.weights.model import SHAPES, ModelShape, folder_in_memory
from benchmarks.weights.sglang_broadcast import SGLangBroadcast
from configs.choices import CommitStrategy
from configs.schema import WeightSyncConfig
from rollout_pool.engines.commit import Committer
from rollout_pool.engines.engine import Strategy
from rollout_pool.engines.sglang.engine import SGLangEngine
from rollout_pool.engines.sglang.strategies import make_strategy
from rollout_pool.sampling.engine_client import EngineError
from tensors.layout import Layout

_NUM_COMMITS = 6
_CHUNK = 1 << 26


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    strategies = [*(each.value for each in CommitStrategy), SGLangBroadcast.name]
    parser.add_argument("--strategies", nargs="+", choices=strategies, default=strategies)
    arguments = parser.parse_args()
    require_gpu("benchmarks.gpu.weights_commit")
    require_packages("benchmarks.gpu.weights_commit", "sglang")
    report = Report("staged commit on a GPU")
    for name in arguments.shapes:
        with folder_in_memory() as folder:
            try:
                asyncio.run(measure(report, name, folder, arguments.strategies))
            except (EngineError, OSError, RuntimeError) as error:
                print(f"{name}: {error}", file=sys.stderr)
                report.row(name, "failed")
    report.close()
    if not report.result:
        sys.exit(1)


async def measure(report: Report, name: str, folder: Path, strategies: list[str]) -> None:
    shape = SHAPES[name]
    layout = Layout.of(shape.tensors("bfloat16"), 1)
    staged = [write(folder / str(seed), shape, layout, seed) for seed in (0, 1)]
    report.say(f"{name}: {layout.num_bytes / 1e9:.2f} GB")
    engine = make_engine("engine-0", staged[0], folder, uses_gpu=True)
    await engine.start()
    try:
        bare = []
        for number in range(4):
            began = time.perf_counter()
            await engine.client.update_from_disk(str(staged[number % 2]), number, 600)
            bare.append(time.perf_counter() - began)
        report.figure(f"bare_load_s_{name}", median(bare[1:]), "/update_weights_from_disk, idle")
        report.figure(
            f"memcpy_s_{name}", to_gpu_s(layout), "memcpy of its bytes to the GPU, pinned"
        )
        load = Load(engine, FleetSize(vocab=shape.vocab, num_requests=31, num_tokens=1024))
        await load.start()
        version = 4
        for strategy in strategies:
            pauses = await commits(engine, load, staged, strategy, version)
            version += _NUM_COMMITS
            if isinstance(pauses, str):
                report.row(f"{name}, {strategy}", pauses)
            else:
                report.figure(f"pause_s_{strategy}_{name}", median(pauses), "32 requests in flight")
        await load.stop()
    finally:
        await engine.stop()


async def commits(
    engine: SGLangEngine, load: Load, staged: list[Path], choice: str, version: int
) -> list[float] | str:
    """Seconds of each pause; or why this strategy cannot be used here."""
    config = WeightSyncConfig(commit_timeout_s=600.0)
    strategy: Strategy
    if choice == SGLangBroadcast.name:
        strategy = SGLangBroadcast(engine, config)
    else:
        config = replace(config, commit=CommitStrategy(choice))
        strategy = make_strategy(engine.client, config, tp_size=1)
    try:
        await strategy.check()
    except ValueError as error:
        return str(error)
    committer = Committer(engine.client, strategy, config.pause_mode)
    pauses = []
    try:
        for number in range(version, version + _NUM_COMMITS):
            done = await committer.commit(number, staged[number % 2])
            load.note_version(done.version)
            pauses.append(done.pause_s)
        return pauses[1:]
    finally:
        await strategy.close()


def write(folder: Path, shape: ModelShape, layout: Layout, seed: int) -> Path:
    """A model as Hugging Face lays it out and as a receiver stages it."""
    folder.mkdir()
    torch.manual_seed(seed)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(layout.file_header)
        for spec in layout.tensors:
            values = torch.empty(spec.shape, dtype=torch.bfloat16, device="cuda").normal_(std=0.02)
            for part in torch.split(values.view(torch.int16).flatten(), _CHUNK):
                file.write(part.cpu().numpy().tobytes())
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocab,
        "tie_word_embeddings": shape.is_tied,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def to_gpu_s(layout: Layout) -> float:
    source = torch.empty(layout.num_bytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(layout.num_bytes, dtype=torch.uint8, device="cuda")
    seconds = []
    for _ in range(4):
        torch.cuda.synchronize()
        began = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


if __name__ == "__main__":
    main()
