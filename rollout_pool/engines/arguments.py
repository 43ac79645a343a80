"""The command line of one SGLang server; pure, so that every choice can be read and tested."""

from __future__ import annotations

from configs.choices import Dtype, PauseMode
from configs.rollout_schema import EngineConfig

CPU_TOTAL_TOKENS = 65536
"""KV cache of a server without a GPU: SGLang would size it by the whole machine's memory."""


def server_arguments(
    config: EngineConfig,
    *,
    pause_mode: PauseMode,
    model_path: str,
    trust_remote_code: bool,
    served_name: str,
    host: str,
    port: int,
    seed: int,
    uses_gpu: bool,
) -> list[str]:
    """Arguments after the module's name.

    On a GPU SGLang chooses attention and sampling kernels itself. `config.extra_args` come last and
    win over all others.
    """
    arguments = ["--model-path", model_path, "--served-model-name", served_name]
    arguments += ["--host", host, "--port", str(port)]
    arguments += ["--tp-size", str(config.tp_size), "--dtype", _dtype(config.dtype, uses_gpu)]
    arguments += ["--max-running-requests", str(config.max_running_requests)]
    arguments += ["--random-seed", str(seed)]
    arguments += ["--skip-tokenizer-init"]  # token ids in, token ids out
    # Each part of an answer has only what is new; otherwise all that came before is told again.
    arguments += ["--incremental-streaming-output"]
    arguments += ["--log-level-http", "warning"]  # a line a request would drown the log
    if trust_remote_code:
        arguments += ["--trust-remote-code"]
    if not config.radix_cache:
        # A commit does not flush: a prefix computed under old weights would be found again.
        arguments += ["--disable-radix-cache"]
    max_total_tokens = config.max_total_tokens
    if uses_gpu:
        if config.mem_fraction is not None:
            arguments += ["--mem-fraction-static", str(config.mem_fraction)]
        if pause_mode is PauseMode.in_place:
            # With overlap a batch sampled under the old weights is booked after the commit, and its
            # tokens would be stamped with the new version. A retracting pause books it first.
            arguments += ["--disable-overlap-schedule"]
    else:
        arguments += ["--device", "cpu", "--attention-backend", "torch_native"]
        arguments += ["--sampling-backend", "pytorch", "--disable-cuda-graph"]
        arguments += ["--disable-overlap-schedule", "--skip-server-warmup"]
        arguments += ["--sleep-on-idle"]  # an idle scheduler would spin on a whole core
        max_total_tokens = max_total_tokens or CPU_TOTAL_TOKENS
    if max_total_tokens is not None:
        arguments += ["--max-total-tokens", str(max_total_tokens)]
    return arguments + list(config.extra_args)


def _dtype(dtype: Dtype, uses_gpu: bool) -> str:
    if dtype is Dtype.auto:
        return "bfloat16" if uses_gpu else "float32"
    return str(dtype.value)
