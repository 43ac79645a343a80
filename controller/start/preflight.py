"""Checks the input of a run before anything is started, so that a mistake costs only seconds."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch

from configs.choices import OnLongPrompt, RewardKind, TaskKind
from configs.rollout_schema import TaskConfig
from configs.schema import Config
from controller.metrics.sinks import check_loggers
from controller.ray_environment import LOOPBACK
from controller.start.gpu_host import SURE_SHARE, check_gpus, check_host_memory
from controller.start.placement import num_cpus_needed
from controller.start.plan import DEFAULT_STAGE_DIR, Plan, make_plan
from controller.start.sandboxes import check_remote_sandboxes, check_sandbox
from controller.start.teacher import check_served_teacher
from controller.start.warm_start import imitate
from rollout_pool.engines.engine import shared_memory_bytes
from rollout_pool.engines.sglang_models import check_served, context_length
from rollout_pool.episodes.env import Chat, Message, Observation, SingleTurn, ToolSpec, opening
from rollout_pool.episodes.renderer import AnyFormat, chat_format
from rollout_pool.episodes.template import QUESTION
from rollout_pool.episodes.tokenizer import Tokenizer, end_tokens, load_tokenizer
from rollout_pool.rewards.code_tests import PYTHON, languages_of
from rollout_pool.rewards.process import load_function
from rollout_pool.rewards.teacher import check_teacher
from rollout_pool.sampling.grammars import ConstraintFailed, Grammars
from rollout_pool.sampling.sample import Constraint
from rollout_pool.sampling.stop import first_stop
from rollout_pool.sampling.tracing import make_exporter
from rollout_pool.tasks.agent import find_agent
from rollout_pool.tasks.environments import environment_factory, load_tools
from rollout_pool.tasks.mixture import Mixture
from rollout_pool.tasks.programs import CodeTask
from rollout_pool.tasks.registry import build_task
from rollout_pool.tasks.task import Task, TaskStream, demonstrations
from rollout_pool.worker.loop import PromptReader
from trainer_pool.algorithms.trial import check_algorithm
from trainer_pool.model.attention import sliding_windows
from trainer_pool.model.checkpoint_names import (
    check_names,
    check_tied_head,
    model_without_weights,
    parameter_names,
)
from trainer_pool.model.scratch import byte_tokenizer, model_config

ANSWER = Message(role="assistant", content="!")
WEIGHTS = (".safetensors", ".bin")
NUM_PROMPTS = 32
"""Training prompts that are checked, besides all held-out prompts."""
NUM_DEMONSTRATIONS = 4
SHAPE_FIELDS = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "tie_word_embeddings",
)
"""Fields of a model's config.json that decide the names and shapes of its weights."""


def check_inputs(config: Config) -> Task:
    """The run's task. Raises ValueError for a task, model, address, port or number of GPUs with
    which a launch on this machine would fail later."""
    cluster = config.cluster
    num_gpus, promised = torch.cuda.device_count(), cluster.num_gpus
    if cluster.ray_address is None and promised is not None and promised > num_gpus:
        raise ValueError(
            f"cluster.num_gpus={promised}: this machine has {num_gpus}; only `make dry-run` can "
            "plan with more"
        )
    plan = _check_here(config)
    check_loggers(config.run.loggers)
    if config.cluster.ray_address is None:
        check_shared_memory(plan.config, plan)
        if plan.devices.rank_gpus > 0:
            check_host_memory(plan)
    _check_ports(config)
    task, tokenizer = check_task(config.task), tokenizer_of(config)
    if config.model.path is not None and not Path(config.model.path).is_dir():
        _check_architecture(config, config.model.path)
    check_first_words(config, task, tokenizer)
    check_grammar(config, tokenizer)
    uses_gpu = plan.devices.engine_gpus > 0
    check_served_teacher(config, uses_gpu=uses_gpu, student=tokenizer)
    for name, reward in config.task.rewards.items():
        if reward.kind is RewardKind.teacher and reward.url is not None:
            asyncio.run(check_teacher(name, reward, tokenizer))
    check_remote_sandboxes(config.task, task)
    return task


def check_plan(config: Config) -> list[str]:
    """The same for a dry run, which downloads nothing and may run on another machine.

    Returns descriptions of what it did not check.
    """
    _check_here(config)
    skipped = []
    model, task = config.model.path, None
    tasks = config.task.by_name.values()
    if remote := [t.name for t in tasks if t.is_from_hub and not t.name.startswith("/")]:
        skipped += [f"the data set {name}" for name in remote]
    elif named := [t.name for t in tasks if t.kind is TaskKind.verifiers]:
        skipped += [f"the environment {name}" for name in named]
    else:
        task = check_task(config.task)
    if model is not None and not model.startswith("/"):  # a local folder is absolute by now
        skipped.append(f"the model {model}")
    elif task is not None:
        check_first_words(config, task, tokenizer_of(config))
        check_grammar(config, tokenizer_of(config))
    return skipped


def _check_here(config: Config) -> Plan:
    """The checks that cost nothing; returns the plan on this machine."""
    plan = plan_here(config)
    cluster, needed = config.cluster, num_cpus_needed(config)
    if cluster.ray_address is None and plan.devices.rank_gpus > 0:
        check_gpus()
    if cluster.ray_address is None and cluster.num_cpus is not None and cluster.num_cpus < needed:
        raise ValueError(
            f"cluster.num_cpus={cluster.num_cpus}: the run asks for {needed} CPUs, one for each "
            "process; raise it, do not set it, or lower trainer.num_ranks, rollout.num_engines, "
            "rollout.num_workers or rollout.reward_actors"
        )
    try:
        socket.getaddrinfo(cluster.host or LOOPBACK, 0)
    except OSError as error:
        raise ValueError(
            f"cluster.host={cluster.host!r}: is neither an IP address nor a name that resolves "
            f"here ({error.strerror})"
        ) from error
    ca_file = config.buffer.tls_ca_file
    if ca_file is not None and not Path(ca_file).is_file():
        raise ValueError(f"buffer.tls_ca_file={ca_file!r}: there is no such file")
    rewards = {f"task.rewards.{name}": one for name, one in config.task.rewards.items()}
    for task, mixed in config.task.tasks.items():
        rewards |= {f"task.tasks.{task}.rewards.{n}": one for n, one in mixed.rewards.items()}
    for setting, reward in rewards.items():
        if reward.api_key_env is not None and not os.environ.get(reward.api_key_env):
            raise ValueError(
                f"{setting}.api_key_env={reward.api_key_env!r}: there is no such environment "
                "variable; set it before the run is launched"
            )
    has_teacher = any(r.kind is RewardKind.teacher for r in config.task.rewards.values())
    check_algorithm(config.full_algorithm, has_teacher=has_teacher)
    if config.rollout.trace_endpoint is not None:
        make_exporter(config.rollout.trace_endpoint).shutdown()
    check_model(config)
    return plan


def check_model(config: Config) -> None:
    """Checks against the model's own config, if it is known."""
    model, tp_size = config.model, config.rollout.engine.tp_size
    fields: dict[str, Any] = {}
    if model.scratch is not None:
        fields = model_config(model.scratch, byte_tokenizer()).to_dict()
    elif model.path is not None and Path(model.path).is_dir():
        fields = _model_fields("model.path", model.path)
        built = _check_architecture(config, model.path)
        # For a model that is still to be downloaded, the trainer reads the files.
        check_names(model.path, parameter_names(built))
        check_tied_head(model.path, built)
    reference = config.algorithm.kl.reference
    if reference is not None and reference.startswith("/"):  # a local folder is absolute by now
        _check_reference(config, fields, _model_fields("algorithm.kl.reference", reference))
    num_heads = fields.get("num_attention_heads")
    if num_heads is not None and num_heads % tp_size:
        raise ValueError(
            f"rollout.engine.tp_size={tp_size}: must divide the model's {num_heads} attention heads"
        )


def _check_architecture(config: Config, path: str) -> Any:
    """The model on the meta device. Raises ValueError if trainer or engines cannot compute it, or
    would not compute the same, for the longest trajectories."""
    longest = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    model = model_without_weights(path, trust_remote_code=config.model.trust_remote_code)
    most = context_length(model.config)
    if most is not None and longest > most:
        raise ValueError(
            f"rollout.max_prompt_tokens + rollout.max_response_tokens={longest}: the model "
            f"takes {most} tokens (max_position_embeddings in its config.json); lower them"
        )
    check_served(path, model.config, sliding_windows(model), longest)
    return model


def _check_reference(config: Config, policy: dict[str, Any], reference: dict[str, Any]) -> None:
    """Compare what the config.json of both have; the ranks compare the weights themselves."""
    for name in SHAPE_FIELDS:
        own, other = policy.get(name), reference.get(name)
        if own is not None and other is not None and own != other:
            path = config.model.path
            whose = "model.scratch" if path is None else f"model.path={path!r}"
            raise ValueError(
                f"algorithm.kl.reference={config.algorithm.kl.reference!r}: its {name} is "
                f"{other!r}, the policy's {own!r}; choose a model of the same shape as {whose}"
            )


def _model_fields(setting: str, path: str) -> dict[str, Any]:
    """The config.json of the model in a folder."""
    folder = Path(path)
    has_weights = folder.is_dir() and any(file.suffix in WEIGHTS for file in folder.iterdir())
    if not has_weights or not (folder / "config.json").is_file():
        raise ValueError(
            f"{setting}={path!r}: neither a folder with a Hugging Face model (config.json and "
            "weights) nor the name of a model"
        )
    fields: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return fields


def _check_ports(config: Config) -> None:
    """Check that this machine's servers can listen at their addresses."""
    host = config.cluster.host or (LOOPBACK if config.cluster.ray_address is None else None)
    if host is None:
        return  # known once Ray runs
    if not _is_free(host, 0):
        raise ValueError(f"cluster.host={host!r}: no interface of this machine has that address")
    wanted = {"run.prometheus_port": (config.run.prometheus_port, 1)}
    if config.cluster.ray_address is None:  # elsewhere workers are placed on any machine
        wanted["rollout.openai.port"] = (config.rollout.openai.port, config.rollout.num_workers)
    for name, (first, count) in wanted.items():
        for port in range(first or 0, (first or 0) + count):
            if first and not _is_free(host, port):
                raise ValueError(
                    f"{name}={first}: cannot listen on {host}:{port}, another process uses that "
                    "port; choose another one"
                )


def _is_free(host: str, port: int) -> bool:
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    try:
        socket.create_server(address, family=family).close()
    except OSError:
        return False
    return True


def tokenizer_of(config: Config) -> Tokenizer:
    if config.model.path is not None:
        return load_tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)
    return cast(Tokenizer, byte_tokenizer())


def check_grammar(config: Config, tokenizer: Tokenizer) -> None:
    """Raises ValueError if `task.grammar` can't be compiled."""
    if config.task.grammar is not None:
        asyncio.run(_check_form(config.task.grammar, tokenizer))


async def _check_form(grammar: str, tokenizer: Tokenizer) -> None:
    grammars = Grammars(tokenizer, len(tokenizer), [tokenizer.eos_token_id or 0])
    try:
        await grammars.check(Constraint(grammar=grammar))
    except ConstraintFailed as error:
        raise ValueError(f"task.grammar: no answer can have this form: {error}") from error
    finally:
        await grammars.close()


def plan_here(config: Config) -> Plan:
    """The plan on this machine, or on `cluster.num_gpus` GPUs; a cluster not yet asked is assumed
    to have enough. Raises ValueError as `make_plan` does."""
    num_gpus = config.cluster.num_gpus
    if num_gpus is None and config.cluster.ray_address is None:
        num_gpus = torch.cuda.device_count()
    return make_plan(config, num_gpus, os.cpu_count() or 1, gpu_memory(config))


def gpu_memory(config: Config) -> int | None:
    """Bytes of this machine's first GPU; None if the run's GPUs may be others."""
    if config.cluster.ray_address is not None or not torch.cuda.is_available():
        return None
    return int(torch.cuda.get_device_properties(0).total_memory)


def check_shared_memory(config: Config, plan: Plan) -> None:
    """Raises ValueError if this machine has too little shared memory for the run."""
    staged = Path(config.weight_sync.stage_dir or DEFAULT_STAGE_DIR)
    folder = next(path for path in (staged, *staged.parents) if path.exists())
    slots = config.weight_sync.num_staged
    size = (plan.model.num_params or 0) * getattr(torch, plan.serving_dtype).itemsize
    # Sizes in a model's name are rounded.
    needed = int(SURE_SHARE * slots * size)
    what = f"{slots} slots of about {size} bytes"
    if str(folder) == DEFAULT_STAGE_DIR:
        needed += config.rollout.num_engines * shared_memory_bytes(config.rollout.engine.tp_size)
        what += " and SGLang's shared memory"
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ValueError(
            f"weight_sync.stage_dir: no room in {folder} for {what} ({needed} bytes in total), "
            f"{free} bytes are free; remove files there, make it larger (in a container: "
            "--shm-size), or choose a larger file system"
        )


def check_task(config: TaskConfig) -> Task:
    """Build the task and check it.

    Raises ValueError if it cannot be built, if the environment of its first prompt cannot be made,
    if an agent, tool or reward function does not exist, or if the task cannot give its rewards.
    """
    task = build_task(config)
    if isinstance(task, Mixture):
        for name, member in task.members.items():
            with task.named_in_errors(name):
                _check_rewards_and_environment(member.config, member.task)
        for index in range(task.round_size):
            task.example(index)
    else:
        _check_rewards_and_environment(config, task)
    return task


def _check_rewards_and_environment(config: TaskConfig, task: Task) -> None:
    if find_agent(config, task) is None:
        make_environment = environment_factory(config, task)
        try:
            make_environment(task.example(0))
        except (Exception, SystemExit) as error:
            name = f"task.env={config.env!r}" if config.env else f"task.kind={config.kind.name}"
            raise ValueError(
                f"{name}: made no environment of prompt 0: {type(error).__name__}: {error}"
            ) from error
        _check_env_rewards(config, task)
    for name, reward in config.rewards.items():
        if reward.function is not None:
            load_function(name, reward.function, task)
        if reward.kind is RewardKind.code_tests and not isinstance(task, CodeTask):
            raise ValueError(
                f"task.rewards.{name}.kind=code_tests: the prompts of task.kind={config.kind.name} "
                "have no tests; those of task.kind=code have, or score by task.rewards."
                f"{name}.kind=task"
            )
        if isinstance(task, CodeTask) and reward.command:
            task.check_inputs_only(f"task.rewards.{name}.command={reward.command}")
        if isinstance(task, CodeTask) and languages_of(reward)[0] not in PYTHON:
            task.check_inputs_only(f"task.rewards.{name}.languages={reward.languages}")
    check_sandbox(config)


def _check_env_rewards(config: TaskConfig, task: Task) -> None:
    """An environment with a single question and answer gives no reward itself."""
    if config.env is not None or type(task.environment(task.example(0))) is not SingleTurn:
        return
    for name, reward in config.rewards.items():
        if reward.kind is RewardKind.env:
            raise ValueError(
                f"task.rewards.{name}.kind=env: the environment of task.kind={config.kind.name} "
                f"gives no reward; set task.rewards.{name}.kind=task, or name an environment in "
                "task.env"
            )


# Errors that workers and the warm start would otherwise find after everything has started -------


def check_first_words(config: Config, task: Task, tokenizer: Tokenizer) -> None:
    """Raises ValueError for a chat template that is missing or fails, leaves out what the task
    needs, or has an end that ends no answer, prompts that `rollout.max_prompt_tokens` rejects, and
    demonstrations that cannot be made."""
    chat = chat_format(tokenizer, config.task)
    if not isinstance(task, Mixture):
        _check_words(config, task, tokenizer, chat)
        return
    for name, member in task.members.items():
        with task.named_in_errors(name):
            _check_words(replace(config, task=member.config), member.task, tokenizer, chat)


def _check_words(config: Config, task: Task, tokenizer: Tokenizer, chat: AnyFormat) -> None:
    _check_prompts(config, task, chat)
    tools = [tool.spec for tool in load_tools(config.task.tools)]
    if find_agent(config.task, task) is None:
        _check_opening(config, task, chat, tools)
    if config.task.chat_template:
        _check_end(config, tokenizer, chat)
    if config.trainer.warm_start.num_steps:
        for _, messages in demonstrations(task, NUM_DEMONSTRATIONS):
            imitate(chat, messages, tools)


def _check_prompts(config: Config, task: Task, chat: Chat) -> None:
    reader = PromptReader(chat, config.task, config.rollout)
    for prompt in itertools.islice(TaskStream(task, 0, 1), NUM_PROMPTS):
        reader.accepts(prompt)
    held_out = [reader.accepts(prompt) for prompt in task.eval_prompts()]
    if held_out and not any(held_out):
        raise ValueError(
            f"rollout.max_prompt_tokens={config.rollout.max_prompt_tokens}: every held-out prompt "
            "is longer and would be skipped; raise the limit"
        )


def _check_opening(config: Config, task: Task, chat: AnyFormat, tools: Sequence[ToolSpec]) -> None:
    """Check the first prompt as an episode begins, with its tools, and that it can go on."""
    prompt = task.example(0)
    # A user's own environment may do anything at its start, so it is not run here.
    first = Observation(
        messages=opening(prompt.text, config.task.system_prompt), tools=tuple(tools)
    )
    if config.task.env is None:
        first = asyncio.run(environment_factory(config.task, task)(prompt).reset())
    tokens, most = chat.first(first.messages, first.tools), config.rollout.max_prompt_tokens
    if config.task.max_turns > 1:
        chat.follow(tokens, chat.answer(ANSWER, first.tools), [QUESTION], first.tools)
    if len(tokens) <= most:
        return
    if first.tools or config.rollout.on_long_prompt is OnLongPrompt.refuse:
        described = f" with the descriptions of {len(first.tools)} tools" if first.tools else ""
        raise ValueError(
            f"rollout.max_prompt_tokens={most}: prompt 0{described} has {len(tokens)} tokens; "
            "raise the limit"
        )


def _check_end(config: Config, tokenizer: Tokenizer, chat: AnyFormat) -> None:
    """Check that an engine ends an answer where the chat format does: those of base models often
    have an end that their configs do not name."""
    end, path = chat.answer(ANSWER)[-1], config.model.path
    ends = {tokenizer.eos_token_id}
    if path is not None:
        ends |= end_tokens(path, tokenizer, trust_remote_code=config.model.trust_remote_code)
    text = tokenizer.decode([end])
    if end in ends or first_stop(text, config.task.stop) is not None:
        return
    raise ValueError(
        f"task.chat_template=true: an answer ends with {text!r} there, at which no engine stops, "
        f"so the model would go on until it is cut off; add {end} to eos_token_id in "
        f"generation_config.json of model.path={path!r}, or set task.stop=[{json.dumps(text)}]"
    )
