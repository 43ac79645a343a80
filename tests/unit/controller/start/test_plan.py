"""The plan: what would start, what it needs, and when it is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from configs.choices import Backend
from configs.load import load_config
from configs.schema import ModelConfig, ScratchModelConfig
from controller.main import main
from controller.start.gpus import GPU_CONTEXT_BYTES, RANK_PROCESS_BYTES, rank_bytes
from controller.start.model_size import ModelSize, model_size
from controller.start.plan import Plan, make_plan, max_logprob_diff

GIB = 2**30


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
    ("settings", "uses_gpu", "most"),
    [
        ([], False, 1e-3),
        ([], True, 1.0),
        (["rollout.engine.dtype=bfloat16"], False, 1.0),
        (["trainer.dtype=bfloat16"], False, 1.0),
        (["weight_sync.pause_mode=in_place"], False, 1.0),
    ],
)
def test_engines_and_trainer_must_agree_closely_where_both_compute_in_float32(
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
    many = ModelSize(label="m", num_params=3 * 10**9)  # DeepSpeed copies a part at a time
    needed = rank_bytes(load_config([]), many, num_ranks=1, uses_gpu=True)
    assert needed == 18 * 3 * 10**9 + 4 * 10**9 + GPU_CONTEXT_BYTES


def test_experiment_of_sixteen_gpus_commits_at_once_and_leaves_memory_to_sglang() -> None:
    config = make_plan(load_config([], "qwen2.5-7b-gsm8k"), None, 64).config
    assert config.weight_sync.max_concurrent_commits == config.rollout.num_engines == 8
    engine = config.rollout.engine
    assert (engine.max_running_requests, engine.mem_fraction) == (256, None)


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
    assert "secret" not in text
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
    fields = {
        "hidden_size": 3584,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(fields))
    size = model_size(ModelConfig(path=str(tmp_path)))
    assert size.num_params == pytest.approx(7.6e9, rel=0.01), "Qwen2.5-7B"
    assert size.kv_elements == 2 * 28 * 4 * 128


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


@pytest.mark.parametrize("num_gpus", [1, 16])
def test_dry_run_shows_the_plan_for_any_number_of_gpus(
    num_gpus: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["dry-run", f"cluster.num_gpus={num_gpus}"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert ("share it" if num_gpus == 1 else "each of 2 trainer ranks") in output
