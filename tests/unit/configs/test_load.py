"""Loading: what composes, what wins over what, and what each kind of mistake is told."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path

import pytest

from configs.choices import Dtype, PauseMode, TaskKind
from configs.load import CONFIG_DIR, ConfigError, load_config, options, read_config, to_yaml
from configs.rollout_schema import TaskConfig


def refusal(*overrides: str, experiment: str = "quickstart") -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides, experiment)
    message = str(caught.value)
    assert "\n" not in message, "one line"
    return message


def test_quickstart_is_a_small_asynchronous_run() -> None:
    config = load_config([])
    assert config.model.scratch is not None
    assert config.buffer.max_staleness == 2
    assert config.trainer.warm_start.num_steps > 0
    found = re.search(config.task.prompt_pattern or "", "Spell this word backward ...: Tea")
    assert found is not None
    assert found[1] == "Tea"


def test_override_wins_over_the_experiment_and_a_group_choice() -> None:
    config = load_config(["weight_sync=in_place", "trainer.num_steps=7", "rollout.num_engines=3"])
    assert config.weight_sync.pause_mode is PauseMode.in_place
    assert config.trainer.num_steps == 7
    assert config.rollout.num_engines == 3


@pytest.mark.parametrize(
    ("settings", "mode"),
    [
        ([], PauseMode.drain),
        (["rollout.max_response_tokens=33"], PauseMode.resubmit),
        (["model.lora={mode: versions}"], PauseMode.resubmit),
        (["weight_sync.drain_timeout_s=600"], PauseMode.resubmit),
        (["weight_sync.pause_mode=resubmit"], PauseMode.resubmit),
        (["weight_sync=in_place"], PauseMode.in_place),
    ],
)
def test_only_short_requests_end_before_a_commit_unless_asked_for(
    settings: list[str], mode: PauseMode
) -> None:
    assert load_config(settings).pause_mode is mode


def test_file_asked_for_by_name_wins_over_the_experiment() -> None:
    assert load_config(["buffer=synchronous"]).buffer.max_staleness == 0
    config = load_config(["buffer=synchronous", "buffer.max_staleness=1", "rollout=gpu"])
    assert (config.buffer.max_staleness, config.rollout.group_size) == (1, 16)


def test_experiment_may_be_named_among_the_overrides() -> None:
    assert load_config(["experiment=gsm8k-smoke"]).trainer.num_steps == 10


def test_values_are_read_as_yaml() -> None:
    config = load_config(
        [
            "trainer.learning_rate=1e-5",
            "trainer.dtype=bfloat16",
            "algorithm.advantage.mask_truncated=true",
            "rollout.engine.max_total_tokens=null",
            "rollout.engine.extra_args=[--log-level=error, --disable-overlap-schedule]",
            "task.params.max_terms=3",
        ]
    )
    assert config.trainer.learning_rate == 1e-5
    assert config.trainer.dtype is Dtype.bfloat16
    assert config.algorithm.advantage.mask_truncated is True
    assert config.rollout.engine.max_total_tokens is None
    assert config.rollout.engine.extra_args == ["--log-level=error", "--disable-overlap-schedule"]
    assert config.task.params["max_terms"] == 3


@pytest.mark.parametrize("text", ["a, b = c", "[x](y)", "12", "true", "${not} a variable", "x: y"])
def test_text_is_taken_as_it_stands(text: str, tmp_path: Path) -> None:
    config = load_config([f"task.instruction={text}"])
    assert config.task.instruction == text
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert read_config(tmp_path / "config.yaml") == config


def test_text_may_be_quoted_and_null_removes_it() -> None:
    assert load_config(["task.instruction=' two words '"]).task.instruction == " two words "
    assert load_config(["task.prompt_pattern=null"]).task.prompt_pattern is None


def test_pretrained_model_replaces_the_one_from_scratch(tmp_path: Path) -> None:
    config = load_config(["model=pretrained", "model.path=Qwen/Qwen3-0.6B"])
    assert (config.model.path, config.model.scratch) == ("Qwen/Qwen3-0.6B", None)
    config = load_config(["model=pretrained", f"model.path={tmp_path}"])
    assert config.model.path == str(tmp_path)


def test_relative_paths_mean_the_folder_of_the_command(tmp_path: Path) -> None:
    with chdir(tmp_path):
        config = load_config(["task.path=problems.jsonl", "run.dir=out"], "gsm8k-smoke")
    assert config.task.path == str(tmp_path / "problems.jsonl")
    assert config.run.dir == str(tmp_path / "out")


def test_project_ships_the_problems_of_the_smoke_test() -> None:
    path = load_config([], "gsm8k-smoke").task.path
    assert path == str(CONFIG_DIR / "data" / "word_problems.jsonl")


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("buffer.max_stalenes=4", "buffer.max_staleness"),
        ("max_staleness=4", "buffer.max_staleness"),
        ("trainer.max_staleness=4", "buffer.max_staleness"),
        ("trianer.num_ranks=4", "trainer.num_ranks"),
        ("rollout.temperature=0.5", "rollout.sampling.temperature"),
        ("trainer.warm_start={num_step: 3}", "trainer.warm_start.num_steps"),
        ("+buffer.max_staleness=4", "buffer.max_staleness"),
    ],
)
def test_unknown_setting_is_refused_with_the_nearest(override: str, nearest: str) -> None:
    message = refusal(override)
    assert "there is no such setting" in message
    assert f"did you mean {nearest}" in message


def test_unknown_setting_without_a_near_match_is_refused_with_its_section() -> None:
    assert "trainer has trainer.num_ranks, " in refusal("trainer.zzzzz=1")
    assert "the sections are run, model, " in refusal("zzzzz=1")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "buffer.max_staleness=four",
            "buffer.max_staleness='four': expected an integer, at least 0",
        ),
        ("trainer.num_steps=1.5", "trainer.num_steps=1.5: expected an integer, at least 1"),
        ("trainer.num_steps=null", "trainer.num_steps=None: expected an integer, at least 1"),
        ("trainer.learning_rate=fast", "trainer.learning_rate='fast': expected a number, above 0"),
        ("run.panel=maybe", "run.panel='maybe': expected true or false"),
        (
            "weight_sync.pause_mode=abort",
            "weight_sync.pause_mode='abort': expected one of auto, resubmit, drain, retract, "
            "in_place",
        ),
        ("rollout.engine.extra_args=3", "rollout.engine.extra_args=3: expected a list, each text"),
        (
            "rollout.engine.max_total_tokens=x",
            "rollout.engine.max_total_tokens='x': expected an integer, at least 1, or null",
        ),
        ("task.params=3", "task.params=3: expected a mapping"),
        (
            "task.stop=[yes, No]",
            "task.stop=[True, False]: expected text, and YAML takes yes, no, on and off for these: "
            "quote them",
        ),
        (
            "run.loggers=[no]",
            "run.loggers=[False]: expected a list, each one of tensorboard, wandb",
        ),
        (
            "task.rewards={a: {rubric: {brief: {weight: much}}}}",
            "task.rewards.a.rubric.brief.weight='much': expected a number, above 0",
        ),
        ("trainer.warm_start=3", "trainer.warm_start=3: is a section; set its settings one by one"),
    ],
)
def test_wrong_type_is_refused_with_the_expected_one(override: str, message: str) -> None:
    assert refusal(override) == message


REFUSED = """\
trainer.groups_per_step=1 -> trainer.groups_per_step=1
trainer.sequence_parallel_size=2
    -> trainer.num_ranks=None: must be a multiple of trainer.sequence_parallel_size=2
rollout.engine.routing_replay=true ; rollout.engine.extra_args=[--enable-hierarchical-cache]
    -> rollout.engine.routing_replay=True: with --enable-hierarchical-cache engines do not
model.lora={mode: versions} ; rollout.tail=interrupt_and_resume
    -> rollout.tail='interrupt_and_resume': it stops each request
model.lora={mode: versions} ; weight_sync.commit_timeout_s=20 -> weight_sync.commit_timeout_s=20
algorithm.load_balancing_weight=0.1 ; algorithm.aggregation=token_sum ;
trainer.gradient_accumulation_steps=2
    -> trainer.gradient_accumulation_steps=2: with algorithm.aggregation=token_sum the load
trainer.sequence_parallel_size=2 ; trainer.num_ranks=3
    -> trainer.num_ranks=3: must be a multiple of trainer.sequence_parallel_size=2
trainer.sequence_parallel_size=2 ; trainer.num_ranks=8 ; trainer.groups_per_step=3
    -> trainer.groups_per_step=3: every rank needs a group: at least (trainer.num_ranks / trainer.se
trainer.groups_per_step=4 ; buffer.capacity_groups=3
    -> buffer.capacity_groups=3: what one update trains on, trainer.groups_per_step * trainer.gra
trainer.groups_per_step=4 ; trainer.gradient_accumulation_steps=2 ; rollout.eval_every=0 ;
trainer.num_ranks=2 ; buffer.capacity_groups=7
    -> buffer.capacity_groups=7
rollout.sampling.top_p=0.9 -> rollout.sampling.top_k=-1
rollout.sampling.min_p=0.1 -> rollout.sampling.top_k=-1
rollout.sampling.top_k=1 -> rollout.sampling.top_k=1
rollout.sampling.top_k=9 ; rollout.engine.extra_args=[--speculative-algorithm, X]
    -> rollout.sampling.top_k=9
rollout.sampling.top_k=9 ; rollout.engine.extra_args=[--sampling-mask-max-tokens=8]
    -> rollout.sampling.top_k=9
rollout.sampling={top_k: 9, min_p: 0.1} ; rollout.engine.deterministic=true
    -> rollout.sampling.min_p=0.1
rollout.sampling.top_k=1024 ; rollout.max_response_tokens=40000
    -> could take 1.2 GiB, and the most is 1
task.grammar='start: x' -> task.grammar='start: x'
rollout.openai.sampling_overrides=true ; rollout.engine.deterministic=true
    -> rollout.openai.sampling_overrides=True: a request could choose min_p
task.min_turn_tokens=4 -> task.min_turn_tokens=4: the candidates that it leaves
rollout.sampling.top_k=9 ; task.grammar='start: x' ; task.min_turn_tokens=4
    -> task.min_turn_tokens=4: a grammar says itself
weight_sync.pause_mode=retract ; rollout.engine.radix_cache=true
    -> rollout.engine.radix_cache=True
weight_sync=delta ; weight_sync.max_delta_density=0 -> weight_sync.full_every=20
weight_sync.num_chains=2 -> weight_sync.num_chains=2
weight_sync.num_chains=3 ; trainer.num_ranks=2
    -> weight_sync.num_chains=3: each chain needs a rank that sends in it
weight_sync.stage_dir=stage -> weight_sync.stage_dir='stage'
weight_sync.commit_timeout_s=600 -> weight_sync.commit_timeout_s=600
weight_sync.pause_mode=drain ; weight_sync.drain_timeout_s=480 -> weight_sync.drain_timeout_s=480
weight_sync=ipc ; cluster.gpus_per_rank=0 -> weight_sync.commit='ipc'
weight_sync.backend=nccl ; cluster.gpus_per_rank=0 -> weight_sync.backend='nccl'
rollout.engine.deterministic=true ; cluster.gpus_per_rank=0 -> rollout.engine.deterministic=True
rollout.engine.extra_args=[--tp-size, '2'] -> set rollout.engine.tp_size
rollout.engine.extra_args=['--tp=2'] -> without --tp: set rollout.engine.tp_size
rollout.engine.extra_args=[--nnodes, '2'] -> on one machine
rollout.engine.extra_args=['--quantization=fp8']
    -> without --quantization: SGLang loads a new version into weights that it has quantized
rollout.engine.extra_args=[--kv-cache-dtype, fp8_e4m3] ; algorithm.correction=[geometric_mask]
    -> algorithm.correction=['geometric_mask']: with --kv-cache-dtype
rollout.engine.extra_args=[--pp-size, '2'] -> pipeline stages
rollout.engine.extra_args=[--enable-deterministic-inference] -> rollout.engine.deterministic=true
rollout.engine.extra_args=[--enable-return-routed-experts] -> rollout.engine.routing_replay=true
rollout.engine.routing_replay=true ;
rollout.engine.extra_args=[--moe-runner-backend=triton_kernel]
    -> rollout.engine.routing_replay=True: with --moe-runner-backend triton_kernel
rollout.engine.routing_replay=true ; rollout.engine.extra_args=[--speculative-algorithm, X]
    -> rollout.engine.routing_replay=True
rollout.engine.extra_args=[--dp-size, '2'] -> rollout.num_engines
rollout.engine.extra_args=[--enable-dp-attention, --dp-size, '2']
    -> --dp-size 2 must divide rollout.engine.tp_size=1
rollout.engine.tp_size=2 ; rollout.engine.extra_args=[--ep-size=3]
    -> --ep-size 3 must divide rollout.engine.tp_size=2
rollout.engine.tp_size=4 ; rollout.engine.extra_args=[--enable-dp-attention, --dp-size=2]
    -> weight_sync.pause_mode='auto'
model.lora={mode: versions} ; rollout.engine.tp_size=2 ;
rollout.engine.extra_args=[--enable-dp-attention, --dp-size, '2']
    -> remove --enable-dp-attention, --dp-size and set rollout.num_engines
model.lora={mode: versions} ; weight_sync.pause_mode=drain
    -> weight_sync.pause_mode='drain': with model.lora.mode=versions no engine pauses
model.lora={mode: versions} ; weight_sync=ipc
    -> weight_sync.commit='ipc': with model.lora.mode=versions
model.lora={mode: versions} ; rollout.engine.deterministic=true
    -> rollout.engine.deterministic=True: SGLang's kernels
trainer.backend=nccl ; cluster.gpus_per_rank=0 -> trainer.backend='nccl'
rollout.max_response_tokens=4096 -> rollout.max_prompt_tokens
buffer.url=http://host -> buffer.url='http://host'
model.path=Qwen/Qwen3-0.6B -> model.path='Qwen/Qwen3-0.6B'
model=pretrained -> model.path=None
rollout.tail=postpone ; buffer.on_stale=wait -> rollout.tail='postpone'
rollout.tail=postpone ; buffer.max_staleness=0 -> rollout.tail='postpone'
rollout.tail=interrupt_and_resume ; buffer=synchronous
    -> rollout.tail='interrupt_and_resume': with buffer.max_staleness=0
rollout.keep_partial=false -> rollout.keep_partial=False
trainer.min_groups_per_step=1 -> trainer.min_groups_per_step=1
trainer.publish_every=4 -> trainer.publish_every=4: must be at most buffer.max
trainer.publish_every=3 -> rollout.eval_every=20: engines evaluate the versions
trainer.gradient_accumulation_steps=7 -> trainer.num_steps=60: must be a multiple
trainer.gradient_accumulation_steps=4 -> trainer.checkpoint_every=50: must be a mult
trainer.gradient_accumulation_steps=2 ; trainer.memory_copy_every=5
    -> trainer.memory_copy_every=5: must be a multiple
trainer.gradient_accumulation_steps=2 ; trainer.num_minibatches=2
    -> trainer.num_minibatches=2: with trainer.gradient_accumulation_steps=2
trainer.gradient_accumulation_steps=2 ; trainer.min_ess=0.1
    -> trainer.min_ess=0.1: with trainer.gradient_accumulation_steps=2
trainer.gradient_accumulation_steps=2 ; algorithm.streams={sft: {loss: supervised}}
    -> trainer.gradient_accumulation_steps=2: each of algorithm.streams
trainer.offload_activations=true
    -> trainer.offload_activations=True: it offloads what trainer.gradient_checkpointing
trainer.mlp_tile_tokens=512 -> trainer.mlp_tile_tokens=512: it lowers the memory of
trainer.min_groups_per_step=17 -> trainer.min_groups_per_step=17
trainer.min_groups_per_step=4 ; trainer.batch_timeout_s=600 -> trainer.batch_timeout_s=600
rollout.oversampling=1.5 ; buffer=synchronous -> rollout.oversampling=1.5
rollout.oversampling=2 ; buffer=synchronous ; buffer.on_stale=drop -> rollout.oversampling=2
task.rewards={t: {kind: teacher, url: 'http://t', model: m}} -> task.rewards=['teach
task.rewards={a: {kind: task}, b: {kind: teacher, url: 'http://b', model: m},
c: {kind: teacher, url: 'http://c', model: m}} ;
algorithm.streams={t: {loss: teacher_kl}}
    -> task.rewards=['b', 'c']: a trajectory has one column
task.rewards={a: {kind: task, weight: 0}, b: {kind: env, weight: 0}} -> task.rewards.*.weight=[0
task.kind=code -> task.rewards=[]
task.kind=code ; task.rewards={a: {kind: task}} -> task.rewards=['task']
rollout.openai.port=65534 ; rollout.num_workers=3 -> rollout.openai.port=65534
rollout.openai.port=0 ; rollout.openai.idle_timeout_s=600
    -> rollout.openai.idle_timeout_s=600.0: idle programs
task.tools=[python] ; task.max_turns=4 -> task.tools=['python']
rollout.openai.port=99999 -> rollout.openai.port=99999: must be 0 to 65535
run.name=a/b -> run.name='a/b': must be up to 100 letters
cluster.start_timeout_s=-3 -> cluster.start_timeout_s=-3.0: must be 0.001 to 1000000
rollout.reward_timeout_s=.nan -> rollout.reward_timeout_s=nan
trainer.timeout_s=.inf -> trainer.timeout_s=inf
cluster.host=two words -> cluster.host='two words': must be an IP address or the name
rollout.engine.max_total_tokens=39
    -> rollout.engine.max_total_tokens=39: the engine would cut answers short
cluster.ray_address=http://127.0.0.1:8265 -> must be auto or HOST:PORT
cluster.ray_address=nonsense -> cluster.ray_address='nonsense': must be auto or HOST
buffer.max_staleness=1000000000000000000000 -> must be 0 to 1000000000
buffer.url=redis://host:99999/0 -> buffer.url='redis://host:99999/0'
buffer.url=redis:// -> buffer.url='redis://'
buffer.url=unix:// -> buffer.url='unix://'
trainer.adam_beta2=1 -> trainer.adam_beta2=1.0: must be at least 0 and below 1
model.scratch.head_dim=31 -> model.scratch.head_dim=31
task.env=nothing -> task.env='nothing': must be module:name or file.py:name
task.rewards={t: {kind: http, url: 'host/x'}} -> task.rewards.*.url='host/x': must be an address
task.rewards={a: {kind: task, all_or_nothing: true}}
    -> task.rewards.*.all_or_nothing=True: task.rewards.*.kind=task runs no tests
task.rewards={a: {kind: task, command: [sh, '{file}'], languages: [sh]}}
    -> task.rewards.*.command=['sh', '{file}']: task.rewards.*.kind=task runs no tests
task=code ; task.rewards.tests.command=[sh] -> command=['sh']: an argument must hold
task=code ; task.rewards.tests.languages=[sh] -> languages=['sh']: names the langu
task=code ; task.rewards.tests.languages=[C++] -> ['C++']: must be words in lower
task=code ;
task.rewards.tests={kind: code_tests, python: p, command: [sh, '{file}'], languages: [sh]}
    -> task.rewards.*.python='p': programs run either with
task=code ; task.rewards.tests.compile=[cc, '{file}', '{output}'] -> set that too
task=code ; task.rewards.tests.command=[sh, '{file}'] ; task.rewards.tests.languages=[sh] ;
task.rewards.tests.compile=[cc, '{file}']
    -> task.rewards.*.compile=['cc', '{file}']: its arguments must hold {file}
task=code ; task.rewards.tests={command: ['{file}'], languages: [c]}
    -> command=['{file}']: an argument must hold
task=code ; task.rewards.tests.command=[sh, '{file}'] ; task.rewards.tests.languages=[sh] ;
task.rewards.tests.url=http://host
    -> task.rewards.*.command=['sh', '{file}']: the service at task.rewards.*.url runs the
task=code ; task.rewards.tests={url: http://host, timeout_s: 15}
    -> task.rewards.*.timeout_s=15.0: one test may take 20 s
task=code ; task.rewards.tests.command=[sh, '{file}'] ; task.rewards.tests.languages=[sh] ;
task.rewards.tests={compile: [cc, '{file}', '{output}'], compile_time_s: 20}
    -> wall_time_s=10.0: all tests of an answer (after compile_time_s=20) must end within
task.rewards={a: {kind: env, cpu_time_s: 9}} -> task.rewards.*.cpu_time_s=9: task.rew
task.rewards={a: {kind: code_tests, cpu_time_s: 0}} -> cpu_time_s=0: must be 1 to 3600
task.rewards={a: {kind: code_tests, memory_bytes: 1000}} -> memory_bytes=1000: must be 67108864 to
task=code ; task.rewards.tests.wall_time_s=30
    -> task.rewards.*.wall_time_s=30.0: all tests of an answer must end within 0.8 of roll
task.curriculum=0.1 -> task.curriculum=0.1: it chooses between the tasks
task=mixed ; task.curriculum=0.1 ; task.pools={} -> task.curriculum=0.1: it chooses between tasks,
task.pools.hard_below=2 -> task.pools.hard_below=2.0: must be at most task.pools.easy_from
task.rewards={a: {kind: task, rubric: {brief: {text: t}}}}
    -> task.rewards.*.rubric=['brief']: task.rewards.*.kind=task asks no judge; leave it out
task.rewards={a: {kind: judge, url: 'http://j', model: m, rubric: {so so: {text: t}}}}
    -> task.rewards.*.rubric=['so so']: the name of a criterion
task.rewards={a: {kind: judge, url: 'http://j', model: m, rubric: {brief: {weight: 2}}}}
    -> task.rewards.*.rubric.*.text='': must be not empty
task.rewards={a: {kind: judge, url: 'http://j', model: m, rubric: {brief: {text: t, weight: 0}}}}
    -> task.rewards.*.rubric.*.weight=0.0: must be above 0
task.rewards={a: {kind: judge, url: 'http://j', model: m, rubric: {brief: {text: t, wight: 1}}}}
    -> task.rewards.a.rubric.brief.wight: there is no such setting
task.rewards={a: {kind: judge, url: 'http://j', model: m, prompt: p, rubric: {brief: {text: t}}}}
    -> task.rewards.*.prompt='p': must hold {rubric}
task.rewards={a: {kind: judge, url: 'http://j', model: m, prompt: '{rubric}'}}
    -> task.rewards.*.prompt='{rubric}': must hold {rubric}
rollout.eval.command=[e, '{model}', '{out}']
    -> rollout.eval.command_every=None: says how often rollout.eval.command runs: set both
rollout.eval.command_every=50 -> rollout.eval.command_every=50: says how often
rollout.eval.command=[e, '{model}'] ; rollout.eval.command_every=50
    -> rollout.eval.command=['e', '{model}']: its arguments must hold {model}, the exported
rollout.eval.command=[e, '{model}', '--to={out}'] ; rollout.eval.command_every=40
    -> rollout.eval.command_every=40: it evaluates checkpoints: must be a multiple of trainer.check
task.renderer=qwen3 -> task.renderer='qwen3'
task.renderer=qwen3 ; task.chat_template=true ; task.tool_parser=llama3_json
    -> task.tool_parser='llama3_json'
task.renderer='a b' ; task.chat_template=true -> task.renderer
"""
"""Settings, with a semicolon between two, and words of the error."""


def refused() -> Iterator[tuple[list[str], str]]:
    settings = ""
    for line in REFUSED.splitlines():
        given, arrow, words = line.partition("-> ")
        settings += f"{given.strip()} "
        if arrow:
            yield re.split(r" ; +", settings.strip()), words
            settings = ""


@pytest.mark.parametrize(("overrides", "field"), list(refused()))
def test_broken_rule_names_the_field_and_its_value(overrides: list[str], field: str) -> None:
    assert field in refusal(*overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ["rollout.tail=postpone"],
        ["rollout.tail=interrupt_and_resume", "rollout.keep_partial=false"],
        ["trainer.min_groups_per_step=2", "trainer.batch_timeout_s=5"],
        ["rollout.oversampling=1.5"],
        ["rollout.oversampling=1.5", "buffer=synchronous", "buffer.on_stale=wait"],
        [
            "task.rewards={t: {kind: teacher, url: 'http://t', model: m}, a: {kind: task}}",
            "algorithm.streams.t.loss=teacher_kl",
        ],
        ["task.rewards={a: {kind: task, weight: 0}, b: {kind: env, weight: -1}}"],
        ["task=code"],
        ["task=code", "task.rewards.tests.wall_time_s=48", "rollout.reward_timeout_s=60"],
        ["rollout.openai.port=0"],
        ["rollout.openai.idle_timeout_s=600"],
        ["rollout.openai.port=65533", "rollout.num_workers=3"],
        ["task.tools=[python]", "task.chat_template=true", "task.max_turns=4"],
        ["task.renderer=qwen3.5", "task.chat_template=true"],
        ["task=mixed", "task.pools={hard: 0}", "task.eval_sets={s: {}}"],
    ],
)
def test_valid_combinations_are_accepted(overrides: list[str]) -> None:
    load_config(overrides)


def test_gpus_of_an_engine_may_be_divided_by_sglangs_flags() -> None:
    divided = ["--enable-dp-attention", "--dp-size=2", "--ep-size", "4"]
    config = load_config(
        [
            "rollout.engine.tp_size=4",
            f"rollout.engine.extra_args=[{', '.join(divided)}]".replace(" 4]", " '4']"),
            "weight_sync.pause_mode=in_place",
        ]
    )
    assert config.rollout.engine.extra_args == divided and config.rollout.engine.dp_size == 2


def test_unknown_file_of_a_group_is_refused_with_those_that_exist() -> None:
    assert "did you mean quickstart? choose one of " in refusal(experiment="quikstart")
    assert "model=tinny: there is no such model; did you mean tiny?" in refusal("model=tinny")
    assert "experiment=nothing" in refusal("experiment=nothing")


@pytest.mark.parametrize("override", ["buffer", "", "=4", "~buffer"])
def test_argument_that_is_not_a_setting_is_refused(override: str) -> None:
    assert "write SETTING=VALUE" in refusal(override)


def test_value_that_is_not_yaml_is_refused() -> None:
    assert "trainer.num_ranks=[1" in refusal("trainer.num_ranks=[1")


def test_password_is_never_written_out() -> None:
    config = load_config(["buffer.url=redis://me:se=cret@host:6379/0"])
    assert config.buffer.url == "redis://me:se=cret@host:6379/0"
    assert "cret" not in to_yaml(config)
    assert "redis://me:***@host:6379/0" in to_yaml(config)
    assert "cret" not in refusal("buffer.url=http://me:secret@host")


@pytest.mark.parametrize("experiment", options("experiment"))
def test_written_settings_read_back_the_same(experiment: str, tmp_path: Path) -> None:
    config = load_config(["run.seed=5"], experiment)
    assert config.experiment == experiment
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert read_config(tmp_path / "config.yaml") == config


def test_file_of_a_user_needs_no_comment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("configs.load.CONFIG_DIR", tmp_path)
    (tmp_path / "task").mkdir()
    (tmp_path / "task" / "mine.yaml").write_text("kind: questions\n")
    (tmp_path / "task" / "other.yaml").write_text("# Words.\n# More.\nkind: questions\n")
    assert options("task") == {"mine": "", "other": "Words."}


def test_config_file_that_is_missing_or_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_config(tmp_path / "missing.yaml")
    (tmp_path / "list.yaml").write_text("- 1\n...\n")
    with pytest.raises(ConfigError, match="contains no settings"):
        read_config(tmp_path / "list.yaml")


def test_config_file_that_is_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path, whole = tmp_path / "config.yaml", to_yaml(load_config([]))
    lines = [place for place, letter in enumerate(whole) if letter == "\n"]
    for stop in (*lines[:-1:4], *range(len(whole) - 20, len(whole) - 1), 0, 1):
        path.write_text(whole[:stop])
        with pytest.raises(ConfigError, match=str(path)):
            read_config(path)
    path.write_text(whole.replace("\n", "\r\n"))
    assert read_config(path) == load_config([])


@pytest.mark.parametrize(
    "content", ["\xff\xfe", "\0", "a: " + "[" * 5000, "1: 2\n...\n", "buffer: 7\n...\n", "pipe"]
)
def test_damaged_config_file_is_an_error_that_names_it(tmp_path: Path, content: str) -> None:
    path = tmp_path / "config.yaml"
    if content == "pipe":
        os.mkfifo(path)
    else:
        path.write_text(content, encoding="latin-1")
    with pytest.raises(ConfigError, match=str(path)):
        read_config(path)


def test_files_of_the_buffer_become_absolute() -> None:
    """Its processes run in other folders."""
    files = ("buffer.password_file=key", "buffer.tls_ca_file=certs/ca.pem")
    buffer = load_config(["buffer.url=rediss://host", *files]).buffer
    assert (buffer.password_file, buffer.tls_ca_file) == (
        f"{Path.cwd()}/key",
        f"{Path.cwd()}/certs/ca.pem",
    )


def test_files_of_code_become_absolute_and_modules_stay() -> None:
    config = load_config(
        [
            "task.env=my_env.py:make",
            "task.tools=[python, 'tools.py:add', 'pkg.tools:sub']",
            "task.chat_template=true",
            "task.rewards={mine: {kind: function, function: 'rewards.py:score'}, "
            "tests: {kind: code_tests, python: env/bin/python}, "
            "a: {kind: code_tests, command: [./js, '{file}'], languages: [js]}, "
            "b: {kind: code_tests, command: [node, '{file}'], languages: [js]}}",
        ]
    )
    here = Path.cwd()
    assert config.task.env == f"{here}/my_env.py:make"
    assert config.task.tools == ["python", f"{here}/tools.py:add", "pkg.tools:sub"]
    assert config.task.rewards["mine"].function == f"{here}/rewards.py:score"
    assert config.task.rewards["tests"].python == f"{here}/env/bin/python"
    assert config.task.rewards["a"].command == [f"{here}/js", "{file}"]
    assert config.task.rewards["b"].command == ["node", "{file}"]


def test_another_kind_of_task_drops_the_experiments_settings() -> None:
    task = load_config(["task.path=/x.jsonl", "task.kind=gsm8k", "task.eval_size=3"]).task
    assert task == TaskConfig(kind=TaskKind.gsm8k, path="/x.jsonl", eval_size=3)


def test_another_data_set_of_the_library_drops_its_parameters() -> None:
    task = load_config(["task.name=letter_counting"]).task
    assert (task.params, task.prompt_pattern, task.instruction) == ({}, None, "")
    assert task.eval_size == 100, "that is the run's"


def test_same_kind_and_a_model_s_chat_template_stay() -> None:
    assert load_config(["task.kind=reasoning_gym"]).task.params == {
        "min_word_len": 3,
        "max_word_len": 4,
    }
    task = load_config(["task.renderer=qwen3", "task.kind=math"], "qwen2.5-7b-gsm8k").task
    assert task.chat_template and task.renderer == "qwen3"


def test_arguments_of_the_template_stay_with_another_task_and_are_set_as_a_whole(
    tmp_path: Path,
) -> None:
    file = tmp_path / "own.yaml"
    args = "{enable_thinking: false, effort: low}"
    task = f"{{chat_template: true, template_args: {args}, name: chain_sum}}"
    file.write_text(f"defaults: [override /model: tiny, _self_]\ntask: {task}")
    for other in ("task.kind=gsm8k", "task.name=leg_counting"):
        task = load_config([other, "task.eval_size=3"], str(file)).task
        assert task.template_args == {"enable_thinking": False, "effort": "low"}
    for given in ({}, {"effort": "high"}):
        task = load_config([f"task.template_args={given}"], str(file)).task
        assert task.template_args == given
    task = load_config(["task.template_args.effort=high"], str(file)).task
    assert task.template_args == {"enable_thinking": False, "effort": "high"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("trainer.keep_best=loss",), r"trainer\.keep_best='loss': must be accuracy, score_mean"),
        (
            ("trainer.keep_best=accuracy", "rollout.eval_every=30", "trainer.checkpoint_every=20"),
            r"rollout\.eval_every=30: .* a multiple of 20 \(trainer\.checkpoint_every\)",
        ),
        (("trainer.keep_best=accuracy", "rollout.eval_every=0"), r"rollout\.eval_every=0: "),
        (("trainer.keep_best=pass_at_4",), r"trainer\.keep_best='?pass_at_4'?: of 1 answers"),
        (
            ("trainer.keep_best=pass_at_4/aime",),
            r"trainer\.keep_best='?pass_at_4/aime'?: .* no set",
        ),
    ],
)
def test_best_checkpoint_by_what_is_not_evaluated_is_refused(settings, message) -> None:
    usual = ("rollout.eval_every=50", "trainer.checkpoint_every=50")
    with pytest.raises(ConfigError, match=message):
        load_config([*usual, *settings])
