"""The command line of an SGLang server, and its environment."""

from __future__ import annotations

import os

from configs.choices import Dtype, PauseMode
from configs.environment import asked_directly
from rollout_pool.engines.engine import EngineSpec, program_path
from rollout_pool.engines.sglang.client import IDLE_TIMEOUT_S
from rollout_pool.types import AdapterSpec

SHARED_MEMORY_BYTES = 2**20
"""Shared memory of a server of one rank; without it its scheduler dies of SIGBUS, minutes later."""
SHARED_MEMORY_BYTES_OF_RANKS = 32 * 2**20
"""Per rank where there are several, since they communicate through it."""
THREADS_BIND = "SGLANG_CPU_OMP_THREADS_BIND"
"""Cores of each rank; without it SGLang starts at most one rank for each NUMA node."""
KEEP_ALIVE_S = int(2 * IDLE_TIMEOUT_S)
"""Clients close their idle connections first: a call could meet a server that closes one."""


def engine_environment(spec: EngineSpec) -> dict[str, str]:
    """Variables of a server's process, beside those of this one."""
    environment = {"PATH": program_path(), "SGLANG_TIMEOUT_KEEP_ALIVE": str(KEEP_ALIVE_S)}
    # Or a server that fails waits for dumps of its ranks, with several of them more than a minute.
    for name in ("SGLANG_PYSPY_DUMP_BEFORE_CRASH", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH"):
        environment[name] = os.environ.get(name, "0")
    # SGLang warms up by requests to its own address, which a proxy would answer.
    environment |= asked_directly([spec.host])
    if spec.context_length is not None:
        # By itself SGLang takes no more than max_position_embeddings with YaRN.
        environment["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
    if not spec.uses_gpu:
        environment["OMP_NUM_THREADS"] = str(spec.num_threads)
        # Ray does not hide GPUs from an actor without any, and SGLang would take the first.
        environment["CUDA_VISIBLE_DEVICES"] = ""
        if spec.has_pictures:
            # The positions of pictures would be compiled, half a minute into the first request.
            environment["TORCH_COMPILE_DISABLE"] = "1"
        if (tp_size := spec.config.tp_size) > 1 and THREADS_BIND not in os.environ:
            cores = sorted(os.sched_getaffinity(0))
            by_rank = [cores[rank::tp_size] or cores for rank in range(tp_size)]
            environment[THREADS_BIND] = "|".join(",".join(map(str, own)) for own in by_rank)
    if not any(word.startswith("--dist-init-addr") for word in spec.config.extra_args):
        # All ranks and their sender run on this machine. By default gloo listens where the host
        # name points, and it accepts every connection.
        environment["GLOO_SOCKET_IFNAME"] = environment["NCCL_SOCKET_IFNAME"] = "lo"
    return environment


def shared_memory_bytes(tp_size: int) -> int:
    return SHARED_MEMORY_BYTES if tp_size == 1 else tp_size * SHARED_MEMORY_BYTES_OF_RANKS


CONTEXT_MARGIN = 8
"""SGLang refuses prompts that come within 6 tokens of its context length, and cuts completions
2 tokens before it."""
CPU_TOTAL_TOKENS = 65536
"""KV cache of a server without a GPU: SGLang would size it by the machine's whole memory."""


def server_arguments(spec: EngineSpec, served_name: str, port: int) -> list[str]:
    """Arguments after the module's name.

    On a GPU SGLang chooses attention and sampling kernels itself. `config.extra_args` come last, so
    they override the others.
    """
    config = spec.config
    arguments = ["--model-path", spec.model_path, "--served-model-name", served_name]
    arguments += ["--host", spec.host, "--port", str(port)]
    dtype = str(config.dtype.value)
    if config.dtype is Dtype.auto:
        dtype = "bfloat16" if spec.uses_gpu else "float32"
    arguments += ["--tp-size", str(config.tp_size), "--dtype", dtype]
    arguments += ["--max-running-requests", str(config.max_running_requests)]
    arguments += ["--random-seed", str(spec.seed)]
    arguments += ["--skip-tokenizer-init"]  # token ids in, token ids out
    # Each part of a response has only the new tokens, not all so far.
    arguments += ["--incremental-streaming-output"]
    arguments += ["--log-level-http", "warning"]  # no line per request
    if spec.context_length is not None:
        arguments += ["--context-length", str(spec.context_length + CONTEXT_MARGIN)]
    if spec.trust_remote_code:
        arguments += ["--trust-remote-code"]
    if not config.radix_cache:
        arguments += ["--disable-radix-cache"]
    if config.routing_replay:
        arguments += ["--enable-return-routed-experts"]
    if config.deterministic:
        arguments += ["--enable-deterministic-inference"]
    if dtype != "float32":
        # As the trainer computes them: logits rounded to bfloat16 are off by up to 0.06.
        arguments += ["--enable-fp32-lm-head"]
    if spec.has_pictures:
        # That of workers and trainer; SGLang would take torchvision's, which resizes otherwise.
        arguments += ["--image-processor-backend", "pil"]
    if spec.adapter is not None:
        arguments += _adapter_arguments(spec.adapter, spec.uses_gpu)
    max_total_tokens = config.max_total_tokens
    if spec.uses_gpu:
        if config.mem_fraction is not None:
            arguments += ["--mem-fraction-static", str(config.mem_fraction)]
        if spec.pause_mode is PauseMode.in_place:
            # With overlap a batch sampled with the old weights is processed after the commit, and
            # its tokens get the new version. A retracting pause processes it first.
            arguments += ["--disable-overlap-schedule"]
    else:
        arguments += ["--device", "cpu", "--attention-backend", "torch_native"]
        arguments += ["--sampling-backend", "pytorch", "--disable-cuda-graph"]
        arguments += ["--disable-overlap-schedule", "--skip-server-warmup"]
        arguments += ["--sleep-on-idle"]  # an idle scheduler would busy-wait on a whole core
        max_total_tokens = max_total_tokens or CPU_TOTAL_TOKENS
    if max_total_tokens is not None:
        arguments += ["--max-total-tokens", str(max_total_tokens)]
    return arguments + list(config.extra_args)


def _adapter_arguments(adapter: AdapterSpec, uses_gpu: bool) -> list[str]:
    arguments = ["--lora-target-modules", *adapter.layers]
    arguments += ["--enable-lora", "--max-lora-rank", str(adapter.rank)]
    arguments += ["--max-loras-per-batch", str(adapter.num_slots)]
    # The others are kernels of Triton.
    return arguments if uses_gpu else [*arguments, "--lora-backend", "torch_native"]
