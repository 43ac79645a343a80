"""A launch for each type of model: do engines and trainer compute the same?

python -m benchmarks.training.models                 # all types: half an hour on two cores
python -m benchmarks.training.models gemma3 olmo2    # these
python -m benchmarks.training.models --short         # one

A launch trains NUM_STEPS synchronous steps from random weights, norms and biases, with a learning
rate so large that a weight which the engines do not take shows in their log-probabilities. Prompts
and answers are longer than sliding windows, and than the original lengths of rotary embeddings.

    engine     samples with version v
    trainer    scores the same tokens with v: `logprob_diff` of its step
    export     the last checkpoint, which must be `final_model`; every weight has moved

Without a GPU both compute in float32, and differ by rounding alone.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from rich.table import Table

from benchmarks.loops.launches import run_to_its_end
from benchmarks.report import Report
from controller.metrics.history import read_metrics
from controller.start import fork_servers
from trainer_pool.model.scratch import VOCAB_SIZE, byte_tokenizer
from trainer_pool.state.export import export_checkpoint

NUM_STEPS = 3
NUM_LAYERS, WIDTH, HEAD, ORIGINAL, WINDOW = 3, 64, 16, 64, 16
LONGEST = 256
"""Tokens of a trajectory: four times the original length."""
SHORT = ["llama_rope_llama3"]
PLAIN: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": HEAD,
    "max_position_embeddings": LONGEST,
}
MULTI_HEAD = {**PLAIN, "num_key_value_heads": PLAIN["num_attention_heads"]}
WINDOWS = ["sliding_attention", "sliding_attention", "full_attention"]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
LINEAR = {"rope_type": "linear", "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
}
THETA = {"rope_theta": 1e4}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
TYPES: dict[str, Callable[[], Any]] = {
    "llama": lambda: hf.LlamaConfig(**PLAIN),
    "llama_tied": lambda: hf.LlamaConfig(**PLAIN, tie_word_embeddings=True, attention_bias=True),
    "llama_rope_llama3": lambda: hf.LlamaConfig(**PLAIN, rope_parameters={**LLAMA3, **THETA}),
    "mistral": lambda: hf.MistralConfig(**PLAIN, sliding_window=None),
    "phi3": lambda: hf.Phi3Config(**PLAIN, sliding_window=None),
    "phi3_partial": lambda: hf.Phi3Config(**PLAIN, sliding_window=None, partial_rotary_factor=0.5),
    "qwen2": lambda: hf.Qwen2Config(**PLAIN),
    "qwen2_yarn": lambda: hf.Qwen2Config(
        **{**PLAIN, "max_position_embeddings": ORIGINAL},
        tie_word_embeddings=True,
        rope_parameters={**YARN, **THETA},
    ),
    "qwen3": lambda: hf.Qwen3Config(**PLAIN, tie_word_embeddings=True),
    "qwen3_linear": lambda: hf.Qwen3Config(
        **{**PLAIN, "max_position_embeddings": ORIGINAL}, rope_parameters={**LINEAR, **THETA}
    ),
    "gemma": lambda: hf.GemmaConfig(**PLAIN, hidden_act="gelu"),
    "gemma3": lambda: hf.Gemma3TextConfig(**PLAIN, sliding_window=WINDOW, layer_types=WINDOWS),
    "olmo": lambda: hf.OlmoConfig(**MULTI_HEAD, clip_qkv=8.0),
    "olmo2": lambda: hf.Olmo2Config(**PLAIN),
    "olmo3": lambda: hf.Olmo3Config(**PLAIN, sliding_window=LONGEST, layer_types=WINDOWS),
    "olmo2_linear": lambda: hf.Olmo2Config(
        **{**PLAIN, "max_position_embeddings": ORIGINAL}, rope_parameters={**LINEAR, **THETA}
    ),
    "smollm3": lambda: hf.SmolLM3Config(**PLAIN, no_rope_layers=[1, 1, 0]),
    "gpt2": lambda: hf.GPT2Config(
        vocab_size=VOCAB_SIZE, n_embd=WIDTH, n_layer=NUM_LAYERS, n_head=4, n_positions=LONGEST
    ),
    "gpt_neox": lambda: hf.GPTNeoXConfig(**MULTI_HEAD),
    "opt": lambda: hf.OPTConfig(**MULTI_HEAD, ffn_dim=2 * WIDTH, word_embed_proj_dim=WIDTH),
    "granite": lambda: hf.GraniteConfig(
        **PLAIN, embedding_multiplier=3.0, residual_multiplier=0.5, logits_scaling=2.0
    ),
    "cohere": lambda: hf.CohereConfig(**PLAIN, use_qk_norm=True),
    "cohere2": lambda: hf.Cohere2Config(**PLAIN, sliding_window=LONGEST, layer_types=WINDOWS),
    "glm4": lambda: hf.Glm4Config(**PLAIN),
    "ernie4_5": lambda: hf.Ernie4_5Config(**PLAIN),
    "starcoder2": lambda: hf.Starcoder2Config(**PLAIN, sliding_window=None),
    "arcee": lambda: hf.ArceeConfig(**PLAIN),
    "mixtral": lambda: hf.MixtralConfig(**PLAIN, num_local_experts=4, sliding_window=None),
    "qwen3_moe": lambda: hf.Qwen3MoeConfig(**PLAIN, **EXPERTS, norm_topk_prob=True),
    "qwen2_moe": lambda: hf.Qwen2MoeConfig(**PLAIN, **EXPERTS, shared_expert_intermediate_size=48),
    "olmoe": lambda: hf.OlmoeConfig(**MULTI_HEAD, num_experts=4, num_experts_per_tok=2),
    "glm4_moe": lambda: hf.Glm4MoeConfig(
        **PLAIN,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        first_k_dense_replace=1,
    ),
}
QUESTIONS = "\n".join(
    json.dumps({"question": f"{n}: " + "the quick brown fox jumps over " * 5, "answer": str(n)})
    for n in range(12)
)
REWARD = "def score(prompt, episode):\n    return len(set(episode.answer)) / 100\n"
SETTINGS = [
    "model=pretrained",
    "task=capitals",
    "task.chat_template=false",
    "buffer=synchronous",
    f"trainer.num_steps={NUM_STEPS}",
    f"trainer.checkpoint_every={NUM_STEPS}",
    "trainer.groups_per_step=4",
    "trainer.num_ranks=2",
    "trainer.learning_rate=3e-3",
    "trainer.lr_warmup_steps=0",
    "trainer.warm_start.num_steps=0",
    "rollout.group_size=4",
    "rollout.eval_every=0",
    f"rollout.max_prompt_tokens={LONGEST - 64}",
    "rollout.max_response_tokens=64",
    "run.panel=false",
]


@dataclass(kw_only=True, slots=True, frozen=True)
class Agreement:
    """Figures from the launch of one type."""

    is_tied: bool
    mean: float
    """|trainer - engine| of a sampled token's log-probability over all steps, in nats."""
    largest: float
    num_tokens: int
    moved: float
    """The same between the first version and the last, over random tokens."""
    seconds: float


def measure(config: Any, folder: Path) -> Agreement:
    """Raises RuntimeError if the launch fails, or leaves another model than it has trained."""
    build(config, folder / "model")
    started = time.monotonic()
    launch(folder)
    seconds, run = time.monotonic() - started, folder / "run"
    steps = read_metrics(run / "metrics.jsonl", "step")
    counts = [step.count("logprob_diff_tokens") for step in steps]
    sums = [step.number("logprob_diff_mean") * n for step, n in zip(steps, counts, strict=True)]
    first, last = final_models(folder, run)
    tokens_BT = torch.randint(0, 256, (4, LONGEST))
    with torch.no_grad():
        both = [model(tokens_BT).logits.log_softmax(-1) for model in (first, last)]
    return Agreement(
        is_tied=first.get_output_embeddings().weight is first.get_input_embeddings().weight,
        mean=sum(sums) / sum(counts),
        largest=max(step.number("logprob_diff_max") for step in steps),
        num_tokens=sum(counts),
        moved=float((both[0] - both[1]).gather(2, tokens_BT[..., None]).abs().mean()),
        seconds=seconds,
    )


def build(config: Any, folder: Path) -> None:
    tokenizer = byte_tokenizer()
    ids = {f"{n}_token_id": getattr(tokenizer, f"{n}_token_id") for n in ("bos", "eos", "pad")}
    config.update(ids)
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(0.15 * noise if parameter.ndim > 1 else parameter + 0.1 * noise)
    model.generation_config = hf.GenerationConfig(**ids)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def launch(folder: Path) -> None:
    (folder / "questions.jsonl").write_text(QUESTIONS)
    (folder / "reward.py").write_text(REWARD)
    settings = [f"model.path={folder}/model", f"run.dir={folder}", "run.name=run", *SETTINGS]
    settings += [f"task.path={folder}/questions.jsonl"]
    settings += [f"task.rewards={{r: {{kind: function, function: '{folder}/reward.py:score'}}}}"]
    command = [sys.executable, "-m", "controller.main", "launch", *settings]
    run_to_its_end(command, folder / "output")


def final_models(folder: Path, run: Path) -> tuple[Any, Any]:
    """The model that was launched, and `final_model` of the run, as transformers loads them."""
    checkpoint = run / "checkpoints" / f"step-{NUM_STEPS:06d}"
    export_checkpoint(checkpoint, str(folder / "model"), folder / "exported")
    first, last, exported = (
        hf.AutoModelForCausalLM.from_pretrained(path)
        for path in (folder / "model", run / "final_model", folder / "exported")
    )
    for name, weight in last.named_parameters():
        if not torch.equal(weight, exported.get_parameter(name)):
            raise RuntimeError(f"{name} of final_model is not that of the checkpoint")
        if torch.equal(weight, first.get_parameter(name)):
            raise RuntimeError(f"{name} has not moved")
    return first, last


def measure_all(types: Sequence[str], keep: Path | None) -> bool:
    """Prints a table and RESULT; returns whether all launches have succeeded."""
    report, found = Report("Models"), dict[str, Agreement]()
    title = f"Engine against trainer: {NUM_LAYERS} layers of {WIDTH}, in nats"
    table = Table("type", "tied", "mean", "largest", "tokens", "moved", "s", title=title)
    with fork_servers.fork_servers():
        for name in types:
            with tempfile.TemporaryDirectory() as scratch:
                try:
                    one = measure(TYPES[name](), Path(scratch) if keep is None else keep / name)
                except RuntimeError as error:
                    table.add_row(name, "failed")
                    report.say(f"{name}: {error}")
                    continue
            found[name] = one
            figures = (f"{one.mean:.1e}", f"{one.largest:.1e}", str(one.num_tokens))
            tied = "yes" if one.is_tied else "no"
            table.add_row(name, tied, *figures, f"{one.moved:.2f}", f"{one.seconds:.0f}")
            report.note(name, one.largest)
    report.show(table)
    if found:
        largest = max(one.largest for one in found.values())
        report.target("largest", largest, "<=", 1e-4, "nats, of all tokens of all types")
    report.close()
    return len(found) == len(types)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("types", nargs="*", help=f"of {' '.join(TYPES)}")
    parser.add_argument("--short", action="store_true", help="one type")
    parser.add_argument("--keep", type=Path, help="a folder for models and runs")
    given = parser.parse_args()
    if unknown := [name for name in given.types if name not in TYPES]:
        parser.error(f"no types: {', '.join(unknown)}")
    hf.utils.logging.set_verbosity_error()
    hf.utils.logging.disable_progress_bar()
    types = SHORT if given.short else given.types or [*TYPES]
    sys.exit(not measure_all(types, given.keep))


if __name__ == "__main__":
    main()
