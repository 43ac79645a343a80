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
from transformers import AutoConfig, AutoModelForCausalLM

from configs.choices import ContainerKind, LoraMode, OnLongPrompt, TaskKind
from configs.rollout_schema import TaskConfig
from configs.schema import Config
from controller.cluster.needs import shared_memory_needed, stage_folder, staged_slots
from controller.metrics.sinks import check_loggers
from controller.ray_environment import LOOPBACK
from controller.start.gpu_host import SURE_FRACTION, check_gpus, check_host_memory
from controller.start.gpus import COPIES_BYTES_PER_PARAM, num_servers, num_states
from controller.start.model_size import num_trained
from controller.start.placement import RayCluster, num_cpus_needed
from controller.start.plan import Plan, make_plan
from controller.start.sandboxes import check_sandbox
from controller.start.teacher import check_served_teacher
from controller.start.warm_start import imitate
from controller.start.with_pictures import check_pictures, check_shown, shown_by
from controller.watch.stall_watch import webhook_address
from host.network import listen
from processes.tree import SHARED_MEMORY
from rollout_pool.engines.kinds import (
    check_adapters,
    check_routes,
    check_served,
    context_length,
)
from rollout_pool.episodes.conversation import Message, ToolSpec, TrainableChat
from rollout_pool.episodes.environment import Observation
from rollout_pool.episodes.renderer import chat_format, check_template_args
from rollout_pool.episodes.template import QUESTION
from rollout_pool.episodes.tokenizer import Tokenizer, end_tokens, load_tokenizer
from rollout_pool.rewards.reward import class_of
from rollout_pool.sampling.grammars import ConstraintFailed, Grammars
from rollout_pool.sampling.sample import Constraint
from rollout_pool.sampling.stop import first_stop
from rollout_pool.sampling.tracing import make_exporter
from rollout_pool.tasks.agent import find_agent
from rollout_pool.tasks.datasets import QuestionsTask
from rollout_pool.tasks.env_episodes import environment_factory, tools_shown
from rollout_pool.tasks.mixture import for_each_member
from rollout_pool.tasks.registry import build_task
from rollout_pool.tasks.repository import RepositoryTask
from rollout_pool.tasks.task import Task, TaskStream, demonstrations
from rollout_pool.worker.prompt_filter import PromptFilter
from tensors.base_weights import BaseWeights
from tensors.pictures import PictureProcessor
from trainer_pool.algorithms.trial import check_algorithm
from trainer_pool.model.attention import sliding_windows
from trainer_pool.model.checkpoint_names import (
    check_names,
    check_reference,
    check_tied_head,
    checkpoint_parts,
    model_without_weights,
)
from trainer_pool.model.lora import adapted_layers, add_adapter, check_base, last_names
from trainer_pool.model.recomputing import tile_mlps
from trainer_pool.model.routers import check_gates, gates
from trainer_pool.model.scratch import byte_tokenizer, model_config
from trainer_pool.model.sequence import check_heads

ANSWER = Message(role="assistant", content="!")
WEIGHTS = (".safetensors", ".bin")
NUM_PROMPTS = 32
"""Training prompts that are checked, besides all held-out prompts."""
NUM_PROBE_PROMPTS = 1024
NUM_DEMONSTRATIONS = 4


def check_inputs(config: Config, *, is_resumed: bool = False) -> Task:
    """The run's task. Raises ValueError for a task, model, address, port or number of GPUs with
    which a launch on this machine would fail later.

    `is_resumed`: its checkpoint has the adapter that it began with.
    """
    cluster = config.cluster
    num_gpus, promised = torch.cuda.device_count(), cluster.num_gpus
    if cluster.ray_address is None and promised is not None and promised > num_gpus:
        raise ValueError(
            f"cluster.num_gpus={promised}: this machine has {num_gpus}; only `make dry-run` can "
            "plan with more"
        )
    plan = _check_here(config, is_resumed=is_resumed)
    check_loggers(config.run.loggers)
    if (variable := config.run.stall.webhook_env) is not None:
        webhook_address(variable)
    if config.cluster.ray_address is None:
        check_shared_memory(plan.config, plan)
        if plan.devices.rank_gpus > 0:
            check_host_memory(plan)
    check_ports(config, has_page=not is_resumed)
    task, tokenizer = check_task(config.task), tokenizer_of(config)
    if config.model.path is not None and not Path(config.model.path).is_dir():
        built = _check_architecture(config, config.model.path)
        _check_adapter(config, built, config.model.path, is_resumed)
    check_first_words(config, task, tokenizer)
    check_served_teacher(config, tokenizer)
    check_services(config.task, task, tokenizer)
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
    return skipped


def _check_here(config: Config, *, is_resumed: bool = False) -> Plan:
    """The checks that cost nothing; returns the plan on this machine."""
    config.enforce(config.starting_rules())
    if not is_resumed:
        config.enforce(config.launch_rules())
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
    if (command := config.rollout.eval.command) and shutil.which(command[0]) is None:
        raise ValueError(
            f"rollout.eval.command={command}: there is no program {command[0]!r} here; correct it"
        )
    ca_file = config.buffer.tls_ca_file
    if ca_file is not None and not Path(ca_file).is_file():
        raise ValueError(f"buffer.tls_ca_file={ca_file!r}: there is no such file; correct the path")
    rewards = {f"task.rewards.{name}": one for name, one in config.task.rewards.items()}
    for name, source in (*config.task.tasks.items(), *config.task.eval_sets.items()):
        section = config.task.section_of(name)
        rewards |= {f"{section}.rewards.{n}": one for n, one in source.rewards.items()}
    for setting, reward in rewards.items():
        if reward.api_key_env is not None and not os.environ.get(reward.api_key_env):
            raise ValueError(
                f"{setting}.api_key_env={reward.api_key_env!r}: there is no such environment "
                "variable; set it before the run is launched"
            )
    check_algorithm(config.full_algorithm, has_teacher=bool(config.task.teachers))
    if config.rollout.trace_endpoint is not None:
        make_exporter(config.rollout.trace_endpoint).shutdown()
    check_model(config, is_resumed=is_resumed)
    return plan


def check_model(config: Config, *, is_resumed: bool = False) -> None:
    """Checks against the model's own config, if it is known."""
    model, tp_size = config.model, config.rollout.engine.tp_size
    policy: Any = None
    if model.scratch is not None:
        policy = model_config(model.scratch, byte_tokenizer())
        check_gates("model.scratch", (), config.algorithm.load_balancing_weight)  # it is dense
        if config.rollout.engine.routing_replay:
            check_routes("model.scratch", policy)  # it has none
        if model.lora is not None:
            with torch.device("meta"):
                built = AutoModelForCausalLM.from_config(policy)
                _check_adapter(config, built, "model.scratch", is_resumed)
    elif model.path is not None and Path(model.path).is_dir():
        _check_folder("model.path", model.path)
        built = _check_architecture(config, model.path)
        policy = built.config
        # For a model that is still to be downloaded, the trainer reads the files.
        check_names(model.path, checkpoint_parts(built))
        check_tied_head(model.path, built)
        _check_adapter(config, built, model.path, is_resumed)
        if config.trainer.mlp_tile_tokens is not None:
            tile_mlps(built, config.trainer.mlp_tile_tokens)
        if model.lora is not None:
            with BaseWeights(model.path) as base:  # receivers merge into its files
                check_base(built, base)
    critic = config.algorithm.critic
    for setting, path in (
        ("algorithm.kl.reference", config.algorithm.kl.reference),
        ("algorithm.critic.path", None if critic is None else critic.path),
    ):
        if path is None or not path.startswith("/"):  # a local folder is absolute by now
            continue
        _check_folder(setting, path)
        if policy is not None:
            trust = model.trust_remote_code
            other = AutoConfig.from_pretrained(path, trust_remote_code=trust)
            check_reference(f"{setting}={path!r}", policy, other)
    if policy is not None:
        check_heads(config.trainer.sequence_parallel_size, policy)
    text = None if policy is None else policy.get_text_config()
    num_heads = getattr(text, "num_attention_heads", None)
    if num_heads is not None and num_heads % tp_size:
        raise ValueError(
            f"rollout.engine.tp_size={tp_size}: must divide the model's {num_heads} attention heads"
        )


def _check_adapter(config: Config, built: Any, model_path: str, is_resumed: bool) -> None:
    """Raises ValueError if the adapter cannot be added to the model, or not be served; adds it."""
    if (lora := config.model.lora) is None:
        return
    if lora.mode is LoraMode.versions:
        layers = last_names(adapted_layers(built, lora, model_path))
        check_adapters(f"model.path={model_path!r}", lora.targets, built, layers)
    add_adapter(built, replace(lora, resume_from=None) if is_resumed else lora, model_path)


def _check_architecture(config: Config, path: str) -> Any:
    """The model on the meta device. Raises ValueError if trainer or engines cannot compute it, or
    would not compute the same, for the longest trajectories."""
    longest = config.rollout.longest_trajectory
    model = model_without_weights(path, trust_remote_code=config.model.trust_remote_code)
    check_pictures(config, model.config)
    check_gates(f"model.path={path!r}", gates(model), config.algorithm.load_balancing_weight)
    text = model.config.get_text_config()
    most = context_length(text)
    if most is not None and longest > most:
        raise ValueError(
            f"rollout.max_prompt_tokens + rollout.max_response_tokens={longest}: the model "
            f"takes {most} tokens (max_position_embeddings in its config.json); lower them"
        )
    check_served(path, model.config, sliding_windows(model), longest)
    if config.rollout.engine.routing_replay:
        _check_routes(config, f"model.path={path!r}", model.config)
    return model


def _check_routes(config: Config, model: str, policy: Any) -> None:
    check_routes(model, policy)
    rollout, per_token = config.rollout, policy.num_hidden_layers * policy.num_experts_per_tok
    size = rollout.group_size * rollout.longest_trajectory * per_token / 2**30
    if size > 1:
        raise ValueError(
            f"rollout.engine.routing_replay=true: {rollout.group_size} trajectories of up to "
            f"{rollout.longest_trajectory} tokens could take {size:.1f} GiB for their experts, "
            "and the most is 1; lower rollout.group_size or the limits of tokens, or set it to "
            "false"
        )


def _check_folder(setting: str, path: str) -> None:
    folder = Path(path)
    has_weights = folder.is_dir() and any(file.suffix in WEIGHTS for file in folder.iterdir())
    if not has_weights or not (folder / "config.json").is_file():
        raise ValueError(
            f"{setting}={path!r}: neither a folder with a Hugging Face model (config.json and "
            "weights) nor the name of a model; correct it"
        )


def check_ports(config: Config, host: str | None = None, *, has_page: bool = True) -> None:
    """Check that this machine's servers can listen at their addresses. `host`: this machine's
    address in the cluster. `has_page`: a run that goes on does so without its page."""
    page = config.run.page_port
    if has_page and page and not _is_free(LOOPBACK, page):
        raise ValueError(
            f"run.page_port={page}: another process uses that port; choose another one, or 0"
        )
    host = config.cluster.host or host or (LOOPBACK if config.cluster.ray_address is None else None)
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
    try:
        listen(host, port)[0].close()
    except OSError:
        return False
    return True


def tokenizer_of(config: Config) -> Tokenizer:
    if config.model.path is not None:
        return load_tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)
    return cast(Tokenizer, byte_tokenizer())


def pictures_of(config: Config) -> PictureProcessor | None:
    """The processor of the model's pictures. Raises ValueError if it takes some and has none."""
    path, trust = config.model.path, config.model.trust_remote_code
    return None if path is None else PictureProcessor.of(path, trust_remote_code=trust)


def probe_text(config: Config, task: Task) -> tuple[int, ...]:
    """The run's first prompts, one after the other, as many tokens as its longest trajectory may
    have; empty if none of them is accepted."""
    if pictures_of(config) is not None:
        return ()  # its texts would hold places without pictures, and marks that no side samples
    longest = config.rollout.longest_trajectory
    skipping = replace(config.rollout, on_long_prompt=OnLongPrompt.skip)
    chat = chat_format(tokenizer_of(config), config.task)
    reader, tokens = PromptFilter(chat, config.task, skipping), list[int]()
    for prompt in itertools.islice(TaskStream(task, 0, 1), NUM_PROBE_PROMPTS):
        if reader.accepts(prompt):
            tokens += reader.opening(prompt)
        if len(tokens) >= longest:
            break
    return tuple(itertools.islice(itertools.cycle(tokens), longest))


def check_grammar(config: Config, tokenizer: Tokenizer) -> None:
    """Raises ValueError if `task.grammar` can't be compiled."""

    async def check(grammar: str) -> None:
        grammars = Grammars(tokenizer, len(tokenizer), [tokenizer.eos_token_id or 0])
        try:
            await grammars.check(Constraint(grammar=grammar))
        except ConstraintFailed as error:
            raise ValueError(
                f"task.grammar: no answer can have this form: {error}; correct it"
            ) from error
        finally:
            await grammars.close()

    if config.task.grammar is not None:
        asyncio.run(check(config.task.grammar))


def plan_here(config: Config, gpu_bytes: int | None = None) -> Plan:
    """The plan on this machine, or on `cluster.num_gpus` GPUs (of `gpu_bytes`, if those are others
    than this machine's); a cluster not yet asked is assumed to have enough. Raises ValueError as
    `make_plan` does."""
    num_gpus = config.cluster.num_gpus
    if num_gpus is None and config.cluster.ray_address is None:
        num_gpus = torch.cuda.device_count()
    return make_plan(config, num_gpus, os.cpu_count() or 1, gpu_bytes or gpu_memory(config))


def plan_on(config: Config, cluster: RayCluster) -> Plan:
    """The plan on this Ray. Raises ValueError as `make_plan` does, and PlacementError."""
    num_gpus = int(cluster.num_gpus)
    if config.cluster.num_gpus is not None:
        num_gpus = min(num_gpus, config.cluster.num_gpus)
    plan = make_plan(config, num_gpus, os.cpu_count() or 1, gpu_memory(config))
    cluster.check_cpus(num_cpus_needed(plan.config))
    cluster.check_engine(plan.devices.engine_gpus)
    return plan


def gpu_memory(config: Config) -> int | None:
    """Bytes of this machine's first GPU; None if the run's GPUs may be others."""
    if config.cluster.ray_address is not None or not torch.cuda.is_available():
        return None
    return int(torch.cuda.get_device_properties(0).total_memory)


def check_shared_memory(config: Config, plan: Plan, *, is_dry: bool = False) -> None:
    """Raises ValueError if this machine has too little shared memory for the run; `is_dry`: free
    or not."""
    folder = stage_folder(config)
    slots, size = staged_slots(config, num_servers(config)), plan.staged_bytes or 0
    what = f"{slots} slots of about {size} bytes"
    every, copies = config.trainer.memory_copy_every, _copies_bytes(config, plan)
    if folder == SHARED_MEMORY:
        what += " and SGLang's shared memory"
        if copies:
            what += f", and for trainer.memory_copy_every={every}"
    elif copies:
        setting, states = f"trainer.memory_copy_every={every}", "two copies of the training state"
        _check_room(setting, SHARED_MEMORY, states, copies, "set it to null", is_dry)
    needed = shared_memory_needed(config, plan, num_servers(config))
    needed += copies if folder == SHARED_MEMORY else 0
    fix = "choose a larger file system"
    _check_room("weight_sync.stage_dir", folder, what, needed, fix, is_dry)


def _copies_bytes(config: Config, plan: Plan) -> int:
    if config.trainer.memory_copy_every is None:
        return 0
    params = num_trained(config.model, plan.model) or 0
    return int(SURE_FRACTION * COPIES_BYTES_PER_PARAM * num_states(config) * params)


def _check_room(setting: str, folder: Path, what: str, needed: int, fix: str, is_dry: bool) -> None:
    disk = shutil.disk_usage(folder)
    has, state = (disk.total, "there are in all") if is_dry else (disk.free, "are free")
    if has < needed:
        raise ValueError(
            f"{setting}: no room in {folder} for {what} ({needed} bytes in total), "
            f"{has} bytes {state}; remove files there, make it larger (in a container: "
            f"--shm-size), or {fix}"
        )


def check_task(config: TaskConfig) -> Task:
    """Build the task and check it.

    Raises ValueError if it cannot be built, if the environment of its first prompt cannot be made,
    if an agent, tool or reward function does not exist, or if the task cannot give its rewards.
    """
    task = build_task(config)
    for_each_member(config, task, _check_rewards_and_environment)
    # A round of a mixture.
    for index in range(sum(one.weight for one in config.tasks.values()) or 1):
        task.example(index)
    return task


def _check_rewards_and_environment(name: str, config: TaskConfig, task: Task) -> None:
    if find_agent(config, task) is None:
        make_environment = environment_factory(config, task)
        try:
            make_environment(task.example(0))
        except (Exception, SystemExit) as error:
            what = f"task.env={config.env!r}" if config.env else f"task.kind={config.kind.name}"
            raise ValueError(
                f"{what}: made no environment of prompt 0: {type(error).__name__}: {error}"
            ) from error
    for part, reward in config.rewards.items():
        class_of(reward).check(part, config, task)
    check_sandbox(config)
    if isinstance(task, RepositoryTask) and config.container.kind is ContainerKind.bubblewrap:
        asyncio.run(task.probe())  # others fetch images: not before a launch


def check_services(config: TaskConfig, task: Task, tokenizer: Tokenizer) -> None:
    """Raises ValueError for a service that cannot give its part of the reward, or for containers
    that do not start."""

    def probe(name: str, config: TaskConfig, task: Task) -> None:
        for part, reward in config.rewards.items():
            if reward.url is not None:
                asyncio.run(class_of(reward).probe(part, reward, tokenizer))
        if isinstance(task, RepositoryTask):
            asyncio.run(task.probe())

    for_each_member(config, task, probe)


# Errors that workers and the warm start would otherwise find after everything has started -------


def check_first_words(config: Config, task: Task, tokenizer: Tokenizer) -> None:
    """Raises ValueError for a chat template that is missing or fails, leaves out what the task
    needs, or has an end that ends no answer, prompts that `rollout.max_prompt_tokens` rejects, and
    demonstrations that cannot be made."""
    check_template_args(tokenizer, config.task)
    chat = chat_format(tokenizer, config.task, pictures_of(config))

    def check(name: str, task_config: TaskConfig, member: Task) -> None:
        is_trained = name not in config.task.eval_sets
        trainer = replace(config.trainer, keep_best=None)  # which may name another task or set
        own = replace(config, task=task_config, trainer=trainer)
        _check_words(own, member, tokenizer, chat, is_trained)

    for_each_member(config.task, task, check)
    check_grammar(config, tokenizer)


def _check_words(
    config: Config, task: Task, tokenizer: Tokenizer, chat: TrainableChat, is_trained: bool
) -> None:
    _check_prompts(config, task, chat, is_trained)
    tools = tools_shown(config.task, task)
    if find_agent(config.task, task) is None:
        _check_opening(config, task, chat, tools)
    if config.task.chat_template:
        _check_end(config, tokenizer, chat)
    if is_trained and config.trainer.warm_start.num_steps:
        for prompt, messages in demonstrations(task, NUM_DEMONSTRATIONS):
            imitate(chat, messages, tools, num_given=len(prompt.conversation))


def _check_prompts(config: Config, task: Task, chat: TrainableChat, is_trained: bool) -> None:
    reader, rest = PromptFilter(chat, config.task, config.rollout), task.eval_prompts()
    # Of a set that is only evaluated each prompt may be held out.
    stream = TaskStream(task, 0, 1) if is_trained else iter(rest)
    first = [*itertools.islice(stream, NUM_PROMPTS)]
    if (shown := shown_by(task, [*first, *rest])) is not None:
        for prompt in (shown, *first, *rest):
            if prompt.pictures:  # a missing file is an error here, and not one of an episode
                reader.opening(prompt)
        check_shown(config, shown, has_agent=find_agent(config.task, task) is not None)
    for prompt in task.shapes if isinstance(task, QuestionsTask) else ():
        reader.opening(prompt)  # raises if the template refuses such roles, which may come late
        _check_texts_beside_calls(prompt.opening(config.task.system_prompt), chat)
    for prompt in first:
        reader.accepts(prompt)  # raises
    probed = itertools.islice(TaskStream(task, 0, 1), NUM_PROBE_PROMPTS) if is_trained else first
    if not any(map(reader.accepts, probed)):
        raise ValueError(
            f"rollout.max_prompt_tokens={config.rollout.max_prompt_tokens}: each of the first "
            f"{NUM_PROBE_PROMPTS} prompts is longer and would be skipped; raise the limit"
        )
    held_out = [reader.accepts(prompt) for prompt in rest]
    if held_out and not any(held_out):
        raise ValueError(
            f"rollout.max_prompt_tokens={config.rollout.max_prompt_tokens}: every held-out prompt "
            "is longer and would be skipped; raise the limit"
        )


def _check_texts_beside_calls(messages: Sequence[Message], chat: TrainableChat) -> None:
    """Raises ValueError if the chat format leaves out a text that the data have beside a call: some
    write the call alone, which is right only where the text is the model's own and kept as tokens.
    """
    for place, message in enumerate(messages):
        if not message.tool_calls or not message.content:
            continue
        shown = (replace(message, content=text, pictures=()) for text in ("Well.", ""))
        first, bare = ([*messages[:place], one, *messages[place + 1 :]] for one in shown)
        if chat.first_prompt(first) == chat.first_prompt(bare):
            raise ValueError(
                "task.chat_template=true: the model's chat format leaves out the assistant's text "
                f"beside a call of {message.tool_calls[0].name}, {message.content!r:.60}; take it "
                "out of the data, make it a message before that of the call, or use another "
                "template or task.renderer"
            )


def _check_opening(
    config: Config, task: Task, chat: TrainableChat, tools: Sequence[ToolSpec]
) -> None:
    """Check the first prompt as an episode begins, with its tools, and that it can go on."""
    prompt = task.example(0)
    # A user's own environment may do anything at its start, and one that brings tools starts what
    # they need, so they are not run here.
    first = Observation(messages=prompt.opening(config.task.system_prompt), tools=tuple(tools))
    if config.task.env is None and not hasattr(task, "tool_specs"):
        first = asyncio.run(environment_factory(config.task, task)(prompt).reset())
    tokens, most = chat.first_prompt(first.messages, first.tools), config.rollout.max_prompt_tokens
    if config.task.max_turns > 1:
        chat.next_prompt(tokens, chat.demonstration(ANSWER, first.tools), [QUESTION], first.tools)
    if len(tokens) <= most:
        return
    if first.tools or config.rollout.on_long_prompt is OnLongPrompt.refuse:
        described = f" with the descriptions of {len(first.tools)} tools" if first.tools else ""
        raise ValueError(
            f"rollout.max_prompt_tokens={most}: prompt 0{described} has {len(tokens)} tokens; "
            "raise the limit"
        )


def _check_end(config: Config, tokenizer: Tokenizer, chat: TrainableChat) -> None:
    """Check that an engine ends an answer where the chat format does: those of base models often
    have an end that their configs do not name."""
    end, path = chat.demonstration(ANSWER)[-1], config.model.path
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
