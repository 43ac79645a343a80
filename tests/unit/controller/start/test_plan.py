"""The plan: what would start, what it needs, and when it is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, LlamaConfig

from configs.choices import Backend
from configs.load import load_config
from configs.schema import LoraConfig, ModelConfig, ScratchModelConfig
from controller.main import main
from controller.start.gpus import (
    GPU_CONTEXT_BYTES,
    RANK_PROCESS_BYTES,
    activation_bytes,
    rank_bytes,
    rank_host_bytes,
)
from controller.start.model_size import ModelSize, model_size
from controller.start.plan import Plan, explained_diff, make_plan, max_logprob_diff
from controller.units import format_bytes
from trainer_pool.data.packing import packed_row
from trainer_pool.model import attention
from trainer_pool.model.recomputing import recompute_layers

GIB = 2**30
QWEN_7B = {
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}


def text_of(plan: Plan) -> str:
    console = Console(width=100)
    with console.capture() as capture:
        console.print(plan.render())
    return capture.get()


@pytest.mark.parametrize(
    ("settings", "num_cpus", "threads"),
    [
        (["rollout.num_engines=2"], 16, 16 // (2 + 2)),
        ([], 2, 1),
        (["cluster.threads_per_process=3"], 2, 3),
        (["rollout.engine.tp_size=2"], 16, 16 // (2 + 2)),
    ],
)
def test_cores_are_divided_without_gpus(settings: list[str], num_cpus: int, threads: int) -> None:
    plan = make_plan(load_config(settings), num_gpus=0, num_cpus=num_cpus)
    assert (plan.devices.rank_gpus, plan.devices.engine_gpus, plan.num_gpus) == (0, 0, 0)
    assert (plan.threads_per_process, plan.serving_dtype) == (threads, "float32")


@pytest.mark.parametrize(
    ("settings", "num_gpus", "num_cpus", "ranks"),
    [
        ([], 0, 4, 2),
        ([], 0, 3, 1),
        (["trainer.num_ranks=2"], 0, 2, 2),
        ([], 3, 2, 2),
    ],
)
def test_two_cores_have_one_rank_unless_asked_for_more(
    settings: list[str], num_gpus: int, num_cpus: int, ranks: int
) -> None:
    plan = make_plan(load_config(settings), num_gpus, num_cpus)
    assert (plan.devices.num_ranks, plan.config.trainer.num_ranks) == (ranks, ranks)


@pytest.mark.parametrize(
    ("settings", "uses_gpu", "most"),
    [
        ([], False, 1e-3),
        ([], True, 0.2),
        (["rollout.engine.dtype=bfloat16"], False, 0.2),
        (["trainer.dtype=bfloat16"], False, 0.2),
        (["weight_sync.pause_mode=in_place"], False, 1e-3),
        (["rollout.engine.extra_args=[--kv-cache-dtype=fp8_e4m3]"], True, 1.0),
        (["rollout.engine.extra_args=[--dtype, float16]"], True, 1.0),
    ],
)
def test_engines_and_trainer_must_agree_as_closely_as_their_dtypes_explain(
    settings: list[str], uses_gpu: bool, most: float
) -> None:
    assert explained_diff(load_config(settings), uses_gpu) == most


@pytest.mark.parametrize(
    ("settings", "uses_gpu", "most"),
    [
        ([], False, 1e-3),
        ([], True, 0.4),
        (["rollout.sampling.temperature=1.5"], True, 0.2),
        (["rollout.sampling.temperature=0.05"], True, 1.0),
        (["rollout.openai.port=0", "rollout.openai.sampling_overrides=true"], True, 1.0),
        (["weight_sync.pause_mode=in_place"], False, 1.0),
    ],
)
def test_sampled_tokens_may_differ_by_more_at_low_temperatures_and_over_an_old_cache(
    settings: list[str], uses_gpu: bool, most: float
) -> None:
    assert max_logprob_diff(load_config(settings), uses_gpu) == most


@pytest.mark.parametrize(
    ("settings", "num_gpus", "ranks", "engine_gpus", "total"),
    [
        (["rollout.num_engines=3", "rollout.engine.tp_size=2"], 8, 2, 2, 2 + 3 * 2),
        (["weight_sync=ipc"], 8, 2, 1, 3),
        (["weight_sync.backend=nccl"], 8, 2, 1, 3),
        ([], 3, 2, 1, 3),
        ([], 2, 1, 1, 2),
    ],
)
def test_gpus_are_one_per_rank_and_tp_size_per_engine(
    settings: list[str], num_gpus: int, ranks: int, engine_gpus: int, total: int
) -> None:
    plan = make_plan(load_config(settings), num_gpus, num_cpus=64)
    devices = plan.devices
    assert (devices.num_ranks, devices.rank_gpus, devices.engine_gpus) == (ranks, 1, engine_gpus)
    assert (plan.num_gpus, plan.serving_dtype) == (total, "bfloat16")
    assert plan.config.rollout.engine.mem_fraction is None, "SGLang knows better"
    assert plan.config.weight_sync.backend is not Backend.gloo
    few = "2 GPUs: too few for 2 ranks and the engines"
    assert (few in devices.why) == (num_gpus == 2)


def test_rendered_plan_shows_the_gpus_of_an_engine() -> None:
    plan = make_plan(load_config(["rollout.engine.tp_size=2"]), num_gpus=4, num_cpus=8)
    [line] = [line for line in text_of(plan).splitlines() if "SGLang engine" in line]
    assert line.split()[2:4] == ["1", "2"]
    assert "2 ranks on one machine" in line
    assert "SGLang's choice of each GPU" in " ".join(text_of(plan).split())
    chosen = load_config(["rollout.engine.tp_size=2", "rollout.engine.mem_fraction=0.7"])
    assert "70% of each GPU" in text_of(make_plan(chosen, num_gpus=4, num_cpus=8))


def test_memory_of_a_rank_is_that_of_the_step() -> None:
    params = 2 * 10**6
    size = ModelSize(label="m", num_params=params)

    def per_param(*settings: str, uses_gpu: bool = True) -> float:
        config = load_config(list(settings))
        needed = rank_bytes(config, size, num_ranks=2, uses_gpu=uses_gpu)
        assert needed is not None
        context = GPU_CONTEXT_BYTES if uses_gpu else RANK_PROCESS_BYTES
        return (needed - context) / (params / 2)

    assert per_param() == 2 + 4 + 4 + 8 + 4, "bfloat16"
    assert per_param("trainer.dtype=float32") == per_param(uses_gpu=False) == 4 + 4 + 8 + 4
    assert per_param("trainer.offload_optimizer=true") == 22 - 12
    assert per_param("trainer.offload_parameters=true") == 22 - 2
    assert per_param("algorithm.kl.weight=0.1") == 22 + 2, "the reference"
    assert per_param("algorithm.kl.weight=0.1", "algorithm.kl.offload=true") == 22
    assert per_param("algorithm=ppo") == 22 + 18, "the critic"
    host = {"num_ranks": 1, "served": "bfloat16"}
    with_critic, alone = (
        rank_host_bytes(load_config([*settings]), size, **host)
        for settings in (["algorithm=ppo"], [])
    )
    assert with_critic is not None and alone is not None
    assert with_critic - alone == 12 * params, "for its checkpoints"
    many = ModelSize(label="m", num_params=3 * 10**9)  # DeepSpeed copies a part at a time
    needed = rank_bytes(load_config([]), many, num_ranks=1, uses_gpu=True)
    assert needed == 18 * 3 * 10**9 + 4 * 10**9 + GPU_CONTEXT_BYTES
    adapted = ModelSize(label="m", num_params=10**9, num_adapter=10**6)
    cold = ["trainer.warm_start.num_steps=0"]
    for kl, reference_bytes in (({}, 0), ({"reference": "org/m"}, 2)):  # its base costs nothing
        config = load_config(["model.lora={}", "algorithm.kl.weight=0.1", *cold])
        config.algorithm.kl.reference = kl.get("reference")
        needed = rank_bytes(config, adapted, num_ranks=1, uses_gpu=True)
        assert needed == (2 + reference_bytes) * 10**9 + 22 * 10**6 + GPU_CONTEXT_BYTES
    config = load_config(["model.lora={}", "algorithm.kl={weight: 0.1, offload: true}", *cold])
    alone = rank_host_bytes(config, adapted, **host)
    config.trainer.warm_start.num_steps = 5  # now the policy that RL begins with is kept
    kept = rank_host_bytes(config, adapted, **host)
    assert kept is not None and alone is not None and kept - alone == 2 * 10**9


@pytest.mark.parametrize(
    ("is_checkpointed", "is_offloaded"), [(False, False), (True, False), (True, True)]
)
def test_activations_are_about_those_that_torch_keeps_for_the_backward_pass(
    is_checkpointed: bool, is_offloaded: bool, tmp_path: Path
) -> None:
    """Per token, of a Llama in float32; in a recomputed layer nothing is kept but its input, which
    a copy on the host replaces."""
    sizes = {"hidden_size": 64, "intermediate_size": 192, "head_dim": 8}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, **heads, num_hidden_layers=6, vocab_size=128)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.PACKED)
    if is_checkpointed:
        recompute_layers(model, offload=is_offloaded)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    row = packed_row([torch.arange(100)])
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = model.model(
            input_ids=row.tokens_L[None],
            position_ids=row.position_ids_L[None],
            use_cache=False,
            **attention.arguments(row),
        )
    measured = sum(storage.nbytes() for storage in kept.values())
    assert hidden.last_hidden_state.requires_grad
    config.save_pretrained(tmp_path)
    size = model_size(ModelConfig(path=str(tmp_path)))
    settings = load_config(["trainer.sequence_parallel_size=2", "trainer.num_ranks=2"])
    settings.trainer.micro_batch_tokens = 200  # of which each rank has half
    settings.trainer.gradient_checkpointing = is_checkpointed
    host = rank_host_bytes(settings, size, num_ranks=2, served="float32")
    settings.trainer.offload_activations = is_offloaded
    offloaded = rank_host_bytes(settings, size, num_ranks=2, served="float32")
    counted = activation_bytes(settings, size, uses_gpu=False)
    assert counted is not None
    # While it is computed again, from an input that is back on the device.
    one_layer = (5928 + 4 * 64 * is_offloaded) * 100 if is_checkpointed else 0
    assert counted == pytest.approx(measured + one_layer, rel=0.05)
    settings.trainer.mlp_tile_tokens = 30
    tiled = activation_bytes(settings, size, uses_gpu=False)
    assert tiled is not None
    saved = 4 * 4 * 192 * 70 - 4 * 3 * 192 * 64  # all tokens but those of a tile; sums
    assert counted - tiled == (saved if is_checkpointed else 0)
    settings.model.lora = LoraConfig()  # the weights of the MLP get no gradients
    adapted = activation_bytes(settings, size, uses_gpu=False)
    assert adapted == (tiled - 4 * 3 * 192 * 64 if is_checkpointed else tiled)
    assert host is not None and offloaded is not None
    assert offloaded - host == (6 * 64 * 2 * 100 if is_offloaded else 0)  # bfloat16: of a GPU


def test_plan_of_long_trajectories_shows_the_tokens_of_a_rank(tmp_path: Path) -> None:
    """131,072 tokens through a 7B: 16,384 of them on each of eight ranks."""
    size = ["trainer.num_ranks=8", "trainer.sequence_parallel_size=8"]
    long = ["trainer.micro_batch_tokens=131072", "trainer.gradient_checkpointing=true"]
    offloaded, tiled = "trainer.offload_activations=true", "trainer.mlp_tile_tokens=1024"
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B))
    model = ["model=pretrained", f"model.path={tmp_path}"]
    for split, tokens, gib in (
        (size, "131,072 tokens at most, 16,384 on each of 8 ranks", "6.94"),
        ([*size, offloaded], "131,072 tokens at most, 16,384 on each of 8 ranks", "3.98"),
        ([*size, offloaded, tiled], "131,072 tokens at most, 16,384 on each of 8 ranks", "2.58"),
        (size[:1], "131,072 tokens at most", "55.5"),
    ):
        config = load_config([*long, *model, *split])
        text = " ".join(text_of(make_plan(config, num_gpus=9, num_cpus=64)).split())
        assert f"passes {tokens}; about {gib} GiB of activations" in text


def test_experiment_of_sixteen_gpus_commits_at_once_and_leaves_memory_to_sglang() -> None:
    config = make_plan(load_config([], "qwen2.5-7b-gsm8k"), None, 64).config
    assert config.weight_sync.max_concurrent_commits == config.rollout.num_engines == 8
    engine = config.rollout.engine
    assert (engine.max_running_requests, engine.mem_fraction) == (256, None)
    assert 1200 < engine.start_timeout_s < config.cluster.start_timeout_s, "kernels are compiled"


def test_too_many_gpus_are_refused_with_the_numbers() -> None:
    config = load_config([], "qwen2.5-7b-gsm8k")
    with pytest.raises(ValueError, match=r"need 16 GPUs, and Ray has 4: lower trainer\.num_ranks"):
        make_plan(config, num_gpus=4, num_cpus=64)
    assert make_plan(config, num_gpus=None, num_cpus=8).num_gpus == 16, "not known yet: enough"
    with pytest.raises(ValueError, match=r"cluster\.gpus_per_rank=0"):
        make_plan(load_config(["cluster.gpus_per_rank=1"]), num_gpus=0, num_cpus=2)


def test_rendered_plan_lists_processes_and_the_leash() -> None:
    text = text_of(make_plan(load_config([]), 0, 2))
    for word in ("Redis server", "rollout worker", "trainer rank", "SGLang engine", "428k"):
        assert word in text
    assert "(2 + 1) x 16 = 48 groups" in text
    text = " ".join(text_of(make_plan(load_config(["buffer=synchronous"]), 0, 2)).split())
    assert "(0 + 1) x 16 = 16 groups" in text and "on the weights that sampled it" in text


def test_own_server_is_named_without_its_password() -> None:
    plan = make_plan(load_config(["buffer.url=redis://me:secret@box:6380/0"]), 0, 2)
    text = text_of(plan)
    assert "at box:6380" in text
    assert "secret" not in text + repr(plan)
    assert "Redis server" not in text, "it is not started"


def test_parameters_of_a_scratch_model_are_counted_by_hand() -> None:
    scratch = ScratchModelConfig(
        hidden_size=8,
        intermediate_size=16,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        max_position_embeddings=64,
    )
    size = model_size(ModelConfig(scratch=scratch))
    attention = 8 * 8 + 2 * (8 * 4) + 8 * 8 + 2 * 4  # q, k and v, o, their norms
    layer = attention + 3 * 8 * 16 + 2 * 8
    assert size.num_params == 264 * 8 + layer + 8
    assert size.kv_elements == 2 * 1 * 1 * 4


def test_folder_is_counted_by_its_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B))
    size = model_size(ModelConfig(path=str(tmp_path)))
    assert size.num_params == pytest.approx(7.6e9, rel=0.01), "Qwen2.5-7B"
    assert size.kv_elements == 2 * 28 * 4 * 128


def test_text_part_of_a_model_with_pictures_is_counted(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B))
    plain = model_size(ModelConfig(path=str(tmp_path)))
    (tmp_path / "config.json").write_text(json.dumps({"text_config": QWEN_7B}))
    size = model_size(ModelConfig(path=str(tmp_path)))
    assert size.num_params == plain.num_params and size.kv_elements == plain.kv_elements
    assert size.source == "counted from its config.json, without the tower of pictures"


def test_experts_are_counted(tmp_path: Path) -> None:
    fields = {
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "vocab_size": 151936,
    }
    (tmp_path / "config.json").write_text(json.dumps(fields))
    size = model_size(ModelConfig(path=str(tmp_path)))
    assert size.num_params == pytest.approx(30.5e9, rel=0.01), "Qwen3-30B-A3B"


def test_buffer_has_room_for_the_experts_of_tokens_where_they_travel(tmp_path: Path) -> None:
    fields = {"num_hidden_layers": 4, "num_experts": 8, "num_experts_per_tok": 2, "vocab_size": 9}
    fields |= dict.fromkeys(("hidden_size", "num_attention_heads", "intermediate_size"), 16)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    settings = ["model=pretrained", f"model.path={tmp_path}", "task.chat_template=false"]
    settings += ["trainer.warm_start.num_steps=0", "rollout.max_response_tokens=16000"]

    def redis_memory(*further: str) -> str:
        [redis] = [
            process
            for process in make_plan(load_config([*settings, *further]), 0, 4).processes
            if process.what == "Redis server"
        ]
        return redis.memory

    config = load_config(settings)
    num_groups = (config.buffer.max_staleness + 2) * config.trainer.groups_per_version
    num_tokens = num_groups * config.rollout.group_size * config.rollout.longest_trajectory
    assert redis_memory() == format_bytes(16 * 2**20 + num_tokens * 8)
    replayed = redis_memory("rollout.engine.routing_replay=true")
    assert replayed == format_bytes(16 * 2**20 + num_tokens * 16) != redis_memory()


def test_adapter_is_counted_by_its_targets() -> None:
    scratch, lora = ScratchModelConfig(), LoraConfig(rank=8)
    hidden, keys, inner = 128, 64, 384
    size = model_size(ModelConfig(scratch=scratch, lora=lora))
    shapes = [(hidden, hidden)] * 2 + [(keys, hidden)] * 2 + [(inner, hidden)] * 3
    assert size.num_adapted == 4 * sum(rows * columns for rows, columns in shapes)
    assert size.num_adapter == 4 * 8 * sum(rows + columns for rows, columns in shapes)
    assert size.label.endswith("parameters, of which an adapter of rank 8 is trained")
    lora.targets = ["q_proj", "down_proj"]
    size = model_size(ModelConfig(scratch=scratch, lora=lora))
    assert size.num_adapter == 4 * 8 * (2 * hidden + inner + hidden)
    named = model_size(ModelConfig(path="org/model-7B", lora=lora))
    assert (named.num_params, named.num_adapter, named.num_adapted) == (7e9, None, None)
    named = model_size(ModelConfig(path="org/model-7B", lora=LoraConfig()))
    assert (named.num_adapter, named.num_adapted) == (None, 7e9), "at most"
    lora.targets = ["qkv_proj"]  # not as dense layers are counted
    assert model_size(ModelConfig(scratch=scratch, lora=lora)).num_adapter is None


@pytest.mark.parametrize(
    ("name", "num_params"),
    [("Qwen/Qwen2.5-7B-Instruct", 7e9), ("Qwen/Qwen3-0.6B", 0.6e9), ("org/model", None)],
)
def test_hub_name_gives_the_size(name: str, num_params: float | None) -> None:
    assert model_size(ModelConfig(path=name)).num_params == num_params


def test_plan_describes_the_transfer_of_weights() -> None:
    text = text_of(make_plan(load_config([]), 0, 2))
    assert "weights receiver" in text and "one per node; stages in /dev/shm" in text
    assert "1.63 MiB per version, as float32; one engine pauses at a time" in text
    settings = ["weight_sync.full_every=8", "weight_sync.max_concurrent_commits=2"]
    settings.append("rollout.engine.dtype=bfloat16")
    text = " ".join(text_of(make_plan(load_config(settings), 0, 2)).split())
    assert "every 8 versions, only changes in between, as bfloat16" in text
    assert "at most 2 engines pause at a time" in text
    plan = make_plan(load_config(["model.lora={rank: 8, alpha: 16}"]), 0, 2)
    assert "MiB" not in plan._weights_sentence() and "KiB per version" in plan._weights_sentence()
    assert plan.staged_bytes is not None and plan.weights_bytes is not None
    assert plan.staged_bytes > 5 * plan.weights_bytes


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("weight_sync=ipc", "there is no GPU: choose"),
        ("weight_sync.backend=nccl", "there is no GPU: choose"),
        ("trainer.offload_parameters=true", r"^trainer\.offload_parameters=True: .* set false"),
        (
            "algorithm.kl={weight: 0.1, offload: true}",
            r"^algorithm\.kl\.offload=True: it frees GPU memory, and there is no GPU: set false",
        ),
    ],
)
def test_settings_that_need_a_gpu_are_refused_without_one(setting: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_plan(load_config([setting]), num_gpus=0, num_cpus=2)


def test_one_gpu_is_shared_by_a_rank_and_the_engine() -> None:
    plan = make_plan(load_config([]), num_gpus=1, num_cpus=8, gpu_bytes=80 * GIB)
    devices, config = plan.devices, plan.config
    assert (devices.num_ranks, devices.rank_gpus, devices.engine_gpus) == (1, 0.5, 0.5)
    assert plan.num_gpus == 1
    assert config.trainer.num_ranks == 1
    assert config.weight_sync.backend is Backend.gloo, "NCCL refuses two members on one GPU"
    fraction = config.rollout.engine.mem_fraction
    assert fraction is not None and 0.3 <= fraction <= 0.4, "a third beside the rank"
    text = " ".join(text_of(plan).split())
    assert "1 trainer rank and the engine share it" in text and f"takes {fraction:.0%}" in text


@pytest.mark.parametrize(
    ("settings", "num_gpus"),
    [
        (["trainer.num_ranks=2"], 1),
        (["trainer.num_ranks=2"], 2),
        (["rollout.num_engines=2"], 1),
        (["rollout.num_engines=2"], 2),
        (["rollout.engine.tp_size=2"], 1),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: list[str], num_gpus: int) -> None:
    with pytest.raises(ValueError, match=rf"GPUs, and Ray has {num_gpus}: lower"):
        make_plan(load_config(settings), num_gpus=num_gpus, num_cpus=8)


def test_settings_of_a_shared_gpu_are_kept_if_they_fit() -> None:
    chosen = load_config(["rollout.engine.mem_fraction=0.2", "trainer.num_ranks=1"])
    plan = make_plan(chosen, num_gpus=1, num_cpus=8, gpu_bytes=80 * GIB)
    assert plan.devices.is_shared and plan.config.rollout.engine.mem_fraction == 0.2
    with pytest.raises(ValueError, match=r"weight_sync\.backend='nccl': .* share the only GPU"):
        make_plan(load_config(["weight_sync.backend=nccl"]), num_gpus=1, num_cpus=8)
    greedy = load_config(["rollout.engine.mem_fraction=0.99"])
    with pytest.raises(ValueError, match=r"rollout\.engine\.mem_fraction=0\.99: leaves less"):
        make_plan(greedy, num_gpus=1, num_cpus=8, gpu_bytes=8 * GIB)


@pytest.mark.parametrize("num_gpus", [1, 2])
def test_model_too_large_for_the_gpus_runs_on_the_cpu(num_gpus: int) -> None:
    settings = ["model=pretrained", "model.path=Qwen/Qwen2.5-7B-Instruct"]
    plan = make_plan(load_config(settings), num_gpus, num_cpus=8, gpu_bytes=80 * GIB)
    assert plan.num_gpus == 0 and plan.config.trainer.num_ranks == 2
    assert "do not fit in a GPU of 80" in plan.devices.why
    demanded = load_config([*settings, "cluster.gpus_per_rank=1"])
    with pytest.raises(ValueError, match=r"cluster\.gpus_per_rank=1: .* do not fit"):
        make_plan(demanded, num_gpus, 8, gpu_bytes=80 * GIB)


def test_share_of_an_engine_grows_with_the_model() -> None:
    settings = ["model=pretrained", "model.path=Qwen/Qwen3-1.7B"]
    plan = make_plan(load_config(settings), num_gpus=1, num_cpus=8, gpu_bytes=80 * GIB)
    fraction = plan.config.rollout.engine.mem_fraction
    assert fraction is not None and plan.devices.is_shared
    engine, rank = 2 * 1.7e9 + GIB, 18 * 1.7e9 + 4e9 + GIB
    assert fraction * 80 * GIB > engine, "its weights fit"
    assert fraction * 80 * GIB + rank < 80 * GIB, "and the rank's states beside it"


def test_dry_run_names_bounds_that_would_not_act(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dry-run", "algorithm.loss.clip_low=0.1"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "algorithm.loss.clip_low=0.1 will change no gradient" in output


@pytest.mark.parametrize("num_gpus", [1, 16])
def test_dry_run_shows_the_plan_for_any_number_of_gpus(
    num_gpus: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["dry-run", f"cluster.num_gpus={num_gpus}"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert ("share it" if num_gpus == 1 else "each of 2 trainer ranks") in output
