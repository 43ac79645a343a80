"""The command line of an SGLang server, and its environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from configs.choices import Dtype, PauseMode
from configs.rollout_schema import EngineConfig
from rollout_pool.engines.sglang.arguments import engine_environment, server_arguments
from rollout_pool.engines.sglang.client import IDLE_TIMEOUT_S
from rollout_pool.sampling.engine_watch import ASKED_PER_S
from rollout_pool.types import AdapterSpec
from tests.support.repository import ROOT
from tests.support.rollout import engine_spec


def arguments(config=None, *, pause_mode=PauseMode.retract, uses_gpu=False, trust=False, **fields):
    spec = engine_spec(
        config=config or EngineConfig(),
        pause_mode=pause_mode,
        model_path="/models/policy",
        trust_remote_code=trust,
        host="10.0.0.7",
        seed=17,
        uses_gpu=uses_gpu,
        **fields,
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
        "--enable-fp32-lm-head --mem-fraction-static 0.7"
    )


@pytest.mark.parametrize(
    ("flag", "config", "fields", "is_given"),
    [
        # As the trainer computes them: products in float32.
        ("--enable-fp32-lm-head", EngineConfig(dtype=Dtype.bfloat16), {}, True),
        ("--enable-fp32-lm-head", EngineConfig(dtype=Dtype.float32), {"uses_gpu": True}, False),
        ("--enable-deterministic-inference", EngineConfig(deterministic=True), {}, True),
        ("--enable-return-routed-experts", EngineConfig(routing_replay=True), {}, True),
        # Or tokens sampled before an in-place commit would get its version.
        (
            "--disable-overlap-schedule",
            EngineConfig(),
            {"uses_gpu": True, "pause_mode": PauseMode.in_place},
            True,
        ),
    ],
)
def test_flag_is_given_where_its_setting_asks_for_it(flag, config, fields, is_given):
    assert (flag in arguments(config, **fields)) is is_given


@pytest.mark.parametrize("uses_gpu", [True, False])
def test_server_of_adapters_has_room_for_each_version_that_it_may_serve(uses_gpu):
    adapter = AdapterSpec(rank=8, alpha=16, layers=("q_proj", "v_proj"), num_slots=4)
    given = " ".join(arguments(uses_gpu=uses_gpu, adapter=adapter))
    assert (
        " --lora-target-modules q_proj v_proj --enable-lora --max-lora-rank 8 "
        "--max-loras-per-batch 4" in given
    )
    # The kernels of the others need a GPU.
    assert ("--lora-backend torch_native" in given) is not uses_gpu
    assert "lora" not in " ".join(arguments(uses_gpu=uses_gpu))


@pytest.mark.parametrize("uses_gpu", [True, False])
def test_server_of_pictures_processes_them_as_the_trainer_does(uses_gpu):
    given = " ".join(arguments(uses_gpu=uses_gpu, has_pictures=True))
    assert "--image-processor-backend pil" in given
    assert "image-processor" not in " ".join(arguments(uses_gpu=uses_gpu))
    environment = engine_environment(engine_spec(uses_gpu=uses_gpu, has_pictures=True))
    # A compilation would hold the first request up for half a minute.
    assert ("TORCH_COMPILE_DISABLE" in environment) is not uses_gpu


@pytest.mark.parametrize("uses_gpu", [True, False])
def test_server_finds_the_programs_beside_its_python_first(uses_gpu, monkeypatch):
    monkeypatch.setenv("PATH", "/usr/bin")
    environment = engine_environment(engine_spec(uses_gpu=uses_gpu))
    assert environment["PATH"] == f"{Path(sys.executable).parent}{os.pathsep}/usr/bin"


@pytest.mark.parametrize("uses_gpu", [True, False])
def test_server_that_fails_ends_at_once_unless_its_user_wants_a_dump(uses_gpu, monkeypatch):
    py_spy, cuda = "SGLANG_PYSPY_DUMP_BEFORE_CRASH", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH"
    monkeypatch.delenv(py_spy, raising=False)
    monkeypatch.setenv(cuda, "1")
    environment = engine_environment(engine_spec(uses_gpu=uses_gpu))
    assert (environment[py_spy], environment[cuda]) == ("0", "1")


@pytest.mark.parametrize("name", ["no_proxy", "NO_PROXY"])
def test_server_asks_its_own_address_without_a_proxy(name, monkeypatch):
    for each in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(each, raising=False)
    spec = engine_spec(host="10.0.0.7", uses_gpu=True)
    assert engine_environment(spec)["no_proxy"] == "10.0.0.7"
    monkeypatch.setenv(name, "example.org,.internal")
    environment = engine_environment(spec)
    assert environment["no_proxy"] == environment["NO_PROXY"] == "example.org,.internal,10.0.0.7"


def test_connections_outlast_the_looks_at_a_large_fleet_and_close_before_the_server_closes_them():
    kept_s = float(engine_environment(engine_spec(uses_gpu=True))["SGLANG_TIMEOUT_KEEP_ALIVE"])
    assert 1000 / ASKED_PER_S < IDLE_TIMEOUT_S < kept_s


# What the parser does not know by its whole name it takes for the beginning of another.
PARSE = """
import argparse, json, sys
import torch
if not torch.cuda.is_available():
    from rollout_pool.engines.sglang import cpu_stubs
    cpu_stubs.install()
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser(allow_abbrev=False)
ServerArgs.add_cli_args(parser)
wanted = "enable_fp32_lm_head", "incremental_streaming_output", "mem_fraction_static", "tp_size"
parsed = vars(parser.parse_args(sys.argv[1:]))
print(json.dumps([parsed[name] for name in wanted]))
"""


@pytest.mark.slow
@pytest.mark.long
def test_arguments_of_a_gpu_server_are_those_of_sglangs_parser():
    config = EngineConfig(
        tp_size=2, mem_fraction=0.7, deterministic=True, radix_cache=False, max_total_tokens=4096
    )
    given = arguments(config, uses_gpu=True, pause_mode=PauseMode.in_place, trust=True)
    ended = subprocess.run(
        [sys.executable, "-c", PARSE, *given], cwd=ROOT, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout.splitlines()[-1]) == [True, True, 0.7, 2]


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
