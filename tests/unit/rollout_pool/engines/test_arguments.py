"""The command line of an SGLang server."""

from __future__ import annotations

from configs.choices import Dtype, PauseMode
from configs.rollout_schema import EngineConfig
from rollout_pool.engines.engine import server_arguments
from tests.support.rollout import engine_spec


def arguments(config=None, *, pause_mode=PauseMode.retract, uses_gpu=False, trust=False):
    spec = engine_spec(
        config=config or EngineConfig(),
        pause_mode=pause_mode,
        model_path="/models/policy",
        trust_remote_code=trust,
        host="10.0.0.7",
        seed=17,
        uses_gpu=uses_gpu,
    )
    return server_arguments(spec, "leash-engine-0", 31000)


def test_cpu_server_gets_the_kernels_that_exist_there():
    assert " ".join(arguments()) == (
        "--model-path /models/policy --served-model-name leash-engine-0 --host 10.0.0.7 "
        "--port 31000 --tp-size 1 --dtype float32 --max-running-requests 128 --random-seed 17 "
        "--skip-tokenizer-init --incremental-streaming-output --log-level-http warning "
        "--device cpu "
        "--attention-backend torch_native --sampling-backend pytorch --disable-cuda-graph "
        "--disable-overlap-schedule --skip-server-warmup --sleep-on-idle --max-total-tokens 65536"
    )


def test_gpu_server_keeps_sglangs_own_choice_of_kernels():
    config = EngineConfig(tp_size=4, mem_fraction=0.7, max_running_requests=256)
    assert " ".join(arguments(config, uses_gpu=True)) == (
        "--model-path /models/policy --served-model-name leash-engine-0 --host 10.0.0.7 "
        "--port 31000 --tp-size 4 --dtype bfloat16 --max-running-requests 256 --random-seed 17 "
        "--skip-tokenizer-init --incremental-streaming-output --log-level-http warning "
        "--mem-fraction-static 0.7"
    )


def test_tokens_sampled_before_an_in_place_commit_never_get_its_version():
    assert "--disable-overlap-schedule" in arguments(uses_gpu=True, pause_mode=PauseMode.in_place)
    assert "--disable-overlap-schedule" not in arguments(uses_gpu=True)


def test_deterministic_inference_is_asked_for_by_its_setting():
    flag = "--enable-deterministic-inference"
    assert flag in arguments(EngineConfig(deterministic=True), uses_gpu=True)
    assert flag not in arguments(uses_gpu=True)


def test_config_is_passed_on_and_extra_arguments_come_last():
    config = EngineConfig(
        dtype=Dtype.bfloat16,
        max_total_tokens=4096,
        radix_cache=False,
        extra_args=["--max-running-requests", "7"],
    )
    given = arguments(config, trust=True)
    assert given[given.index("--dtype") + 1] == "bfloat16"
    assert given[given.index("--max-total-tokens") + 1] == "4096"
    assert "--disable-radix-cache" in given and "--trust-remote-code" in given
    assert given[-2:] == ["--max-running-requests", "7"]
