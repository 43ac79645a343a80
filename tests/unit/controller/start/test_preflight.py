"""Mistakes that would end a launch after minutes are refused before anything is started."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from configs.load import load_config
from configs.schema import ScratchModelConfig
from controller.start.plan import make_plan
from controller.start.preflight import check_inputs, check_plan, check_shared_memory, probe_text
from rollout_pool.tasks.task import TaskStream
from trainer_pool.model.scratch import build_scratch_model, byte_tokenizer

TOOLS = ("task.chat_template=true", "task.tools=[python]", "task.max_turns=2")


def save_model(folder: Path, *, chat_template: str | None, weights: bool = True) -> str:
    """A folder with all that is looked at of a model."""
    build_scratch_model(ScratchModelConfig(num_layers=1, max_position_embeddings=64), folder, 0)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = chat_template
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer.save_pretrained(folder)
    if not weights:
        (folder / "model.safetensors").unlink()
    return f"model.path={folder}"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["cluster.host=nonsense.invalid"], r"cluster\.host='nonsense\.invalid': is neither an IP"),
        (
            ["cluster.num_cpus=2", "trainer.num_ranks=2"],
            r"cluster\.num_cpus=2: the run asks for 4 CPUs",
        ),
        (
            ["buffer.autotune={max_engines: 1}", "rollout.num_engines=2"],
            r"autotune\.max_engines=1: .* rollout\.num_engines=2: set at least 2, or null",
        ),
        (["rollout.engine.tp_size=3"], r"tp_size=3: must divide the model's 4 attention heads"),
        (
            ["buffer.capacity_groups=71", "rollout.oversampling=1.5", "buffer.on_stale=wait"],
            r"capacity_groups=71: .* wait for a group that waits for room; .* is admitted: 72",
        ),
        (
            ["trainer.sequence_parallel_size=3", "trainer.num_ranks=3"],
            r"trainer\.sequence_parallel_size=3: must divide the model's 4 attention heads",
        ),
        (["rollout.max_prompt_tokens=4"], r"max_prompt_tokens=4: prompt 0 has 6 tokens"),
        (
            ["rollout.max_prompt_tokens=1", "rollout.on_long_prompt=skip"],
            r"each of the first 1024 prompts is longer",
        ),
        ([*TOOLS], r"with the descriptions of 1 tools has \d+ tokens"),
        (["buffer.tls_ca_file=/nowhere.pem"], r"buffer\.tls_ca_file='/nowhere\.pem'"),
        (
            ["task.rewards={j: {kind: http, url: 'http://h/r', api_key_env: LEASH_NO_SUCH_KEY}}"],
            r"task\.rewards\.j\.api_key_env='LEASH_NO_SUCH_KEY': there is no such",
        ),
        (
            ["task.rewards={r: {kind: function, function: 'os.path:basename'}}"],
            r"task\.rewards\.r\.function='os\.path:basename': is called with \(prompt, episode\).*"
            r"takes \(p\); change",
        ),
        (
            ["task.rewards={r: {kind: task, of: group}}"],
            r"task\.rewards\.\*\.of='group': task\.rewards\.\*\.kind=task scores single episodes",
        ),
        (
            ["task.rewards={r: {kind: function, function: 'os.path:basename', of: group}}"],
            r"task\.rewards\.r\.function=.*: is called with \(prompt, episodes\), and with sol",
        ),
        (
            ["task.env=copy:copy"],
            r"task\.env='copy:copy': is called with \(config, prompt\), .*takes \(x\); change",
        ),
        (
            ["model.lora.targets=[q_proj, w1]"],
            r"model\.lora\.targets=\['q_proj', 'w1'\]: .* has no linear layer w1; it has down_proj",
        ),
        (["rollout.engine.routing_replay=true"], r"model\.scratch has no experts; set it to false"),
        (["model.lora.resume_from=/no/such"], r"model\.lora\.resume_from='/no/such': not a folder"),
        (
            ["rollout.sampling.top_k=9", "task.grammar='start: digits'"],
            r'task\.grammar: no answer can have this form: .*unknown name: "digits"',
        ),
    ],
)
def test_dry_run_refuses_what_start_up_would_refuse(settings: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_plan(load_config(settings))


def test_spans_without_their_exporter_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    url = "http://127.0.0.1:4318/v1/traces"
    with pytest.raises(
        ValueError, match=rf"rollout\.trace_endpoint='{url}': .*leash-rl\[tracing\]"
    ):
        check_plan(load_config([f"rollout.trace_endpoint={url}"]))


@pytest.mark.parametrize(
    "url", ["http://me:pw@h/v1/traces", "http://h/v1?key=1", "h:4318", "ftp://h"]
)
def test_address_for_spans_has_no_secret(url: str) -> None:
    with pytest.raises(ValueError, match=r"rollout\.trace_endpoint.*without a password"):
        load_config([f"rollout.trace_endpoint='{url}'"])


def test_tokenizer_without_a_required_chat_template_is_refused(tmp_path: Path) -> None:
    short = ["model=pretrained", "rollout.max_prompt_tokens=32", "trainer.warm_start.num_steps=0"]
    bare = save_model(tmp_path / "bare", chat_template=None)
    check_plan(load_config([*short, bare]))
    config = load_config([*short, bare, "task.chat_template=true"])
    for check in (check_plan, check_inputs):
        with pytest.raises(ValueError, match=r"task\.chat_template=true: .*no chat template"):
            check(config)
    config = load_config([*short, bare, "task.chat_template=true", "task.renderer=glm-5"])
    with pytest.raises(ValueError, match=r"task\.renderer='glm-5': .* does not fit the tokenizer"):
        check_plan(config)


CHATML = (
    "{%- for m in messages -%}<|unused0|>{{ m.role }}\n{{ m.content }}<|unused1|>\n{% endfor -%}"
    "{%- if add_generation_prompt %}<|unused0|>assistant\n{% endif -%}"
)
"""With an end of turn that is not the end of the sequence."""


def test_chat_template_whose_end_of_turn_ends_no_answer_is_refused(tmp_path: Path) -> None:
    model = save_model(tmp_path / "base", chat_template=CHATML)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template, tokenizer.split_special_tokens = CHATML, False
    tokenizer.save_pretrained(tmp_path / "base")
    short = ["model=pretrained", model, "rollout.max_prompt_tokens=48", "task.chat_template=true"]
    short += ["rollout.max_response_tokens=16", "trainer.warm_start.echo_fraction=0"]
    with pytest.raises(
        ValueError,
        match=r"^task\.chat_template=true: an answer ends with '<\|unused1\|>' there, at which no "
        r"engine stops, .* add 260 to eos_token_id in generation_config\.json of model\.path='.*"
        r"base', or set task\.stop=\[\"<\|unused1\|>\"\]$",
    ):
        check_plan(load_config(short))
    assert check_plan(load_config([*short, "task.stop=['<|unused1|>']"])) == []
    file = tmp_path / "base" / "generation_config.json"
    file.write_text(json.dumps({"eos_token_id": [258, 260]}))
    assert check_plan(load_config(short)) == []
    with pytest.raises(ValueError, match=r"^task\.template_args\.thinking=False: changes nothing"):
        check_plan(load_config([*short, "task.template_args={thinking: false}"]))
    with pytest.raises(ValueError, match=r"task\.template_args.*: set task\.chat_template=true"):
        load_config(["task.template_args={thinking: false}"])


def check_questions(folder: Path, template: str, late: list[dict[str, Any]] | None) -> None:
    """Checks a run on sixty questions, of which a late one is those messages."""
    model = save_model(folder / "model", chat_template=template)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template, tokenizer.split_special_tokens = template, False
    tokenizer.save_pretrained(folder / "model")
    settings = [model, "model=pretrained", "task.chat_template=true", "task.stop=['<|unused1|>']"]
    settings += ["rollout.max_prompt_tokens=48", "rollout.max_response_tokens=16"]
    settings += ["rollout.on_long_prompt=skip", "trainer.warm_start.echo_fraction=0"]
    settings += ["task.kind=questions", f"task.path={folder}/a.jsonl", "task.eval_size=1"]
    rows: list[dict[str, Any]] = [{"question": f"{n}?", "answer": "a"} for n in range(60)]
    rows[55]["question"] = late or "?"
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert check_plan(load_config(settings)) == []


def test_conversation_that_the_template_refuses_is_found_in_any_row(tmp_path: Path) -> None:
    late = "{%- if m.role == 'system' and not loop.first -%}{{ raise_exception('not here') }}"
    late += "{%- endif -%}"
    template = CHATML.replace("-%}<|unused0|>", f"-%}}{late}<|unused0|>", 1)
    check_questions(tmp_path, template, None)
    turns = [{"role": one, "content": "a"} for one in ("user", "system", "user")]
    with pytest.raises(ValueError, match=r"refuses a conversation of user, system, user: not here"):
        check_questions(tmp_path, template, turns)


def test_text_beside_a_call_that_the_template_leaves_out_is_found_in_any_row(
    tmp_path: Path,
) -> None:
    beside = "{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}"
    alone = "{{ m.tool_calls | tojson if m.tool_calls else m.content }}"
    written, left_out = (CHATML.replace("{{ m.content }}", one) for one in (beside, alone))
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": "1?"},
        {"role": "assistant", "content": "I add.", "tool_calls": [call]},
        {"role": "tool", "content": "2"},
    ]
    check_questions(tmp_path, written, turns)
    with pytest.raises(
        ValueError,
        match=r"leaves out the assistant's text beside a call of add, 'I add\.'; take it out",
    ):
        check_questions(tmp_path, left_out, turns)
    turns[1]["content"] = ""
    check_questions(tmp_path, left_out, turns)


NO_TOOLS = "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}"


@pytest.mark.parametrize(
    ("template", "settings", "lost"),
    [
        (NO_TOOLS, TOOLS, "the description of a tool"),
        (NO_TOOLS, (*TOOLS, "task.env=FILE:Own"), "the description of a tool"),
        (
            "{{ tools | tojson }}" + NO_TOOLS.replace(" %}", " if m.role != 'tool' %}", 1),
            TOOLS,
            "the result of a tool",
        ),
        (
            NO_TOOLS.replace(" %}", " if m.role != 'system' %}", 1),
            ("task.chat_template=true", "task.system_prompt='Be brief.'"),
            "the system's text",
        ),
    ],
)
def test_chat_template_that_leaves_out_what_a_task_needs_is_refused(
    tmp_path: Path, template: str, settings: tuple[str, ...], lost: str
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    model = save_model(tmp_path / "model", chat_template=template)
    short = ["model=pretrained", model, "trainer.warm_start.num_steps=0"]
    short += ["rollout.max_prompt_tokens=48", "rollout.max_response_tokens=16"]
    named = [one.replace("FILE", str(tmp_path / "own.py")) for one in settings]
    with pytest.raises(ValueError, match=rf"^task\.chat_template=true: .* leaves out {lost} in"):
        check_plan(load_config([*short, *named]))


OWN = """
from rollout_pool import Env, Observation, Step


class Own(Env):
    def __init__(self, config, prompt):
        self.text = prompt.text

    async def reset(self):
        return Observation.user(self.text)

    async def step(self, completion):
        return Step(reward=1.0)
"""


def test_descriptions_of_tools_count_in_the_prompt_of_ones_own_environment(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    settings = [*TOOLS, f"task.env={tmp_path}/own.py:Own", "rollout.max_prompt_tokens=64"]
    with pytest.raises(
        ValueError,
        match=r"max_prompt_tokens=64: prompt 0 with the descriptions of 1 tools has \d+ tokens",
    ):
        check_plan(load_config(settings))


def test_folder_without_a_model_or_with_a_short_context_is_refused(tmp_path: Path) -> None:
    own = ["model=pretrained", "trainer.warm_start.echo_fraction=0"]
    empty = save_model(tmp_path / "empty", chat_template=None, weights=False)
    with pytest.raises(ValueError, match="neither a folder with a Hugging Face model"):
        check_plan(load_config([*own, empty]))
    small = save_model(tmp_path / "small", chat_template=None)
    with pytest.raises(ValueError, match=r"=72: the model takes 64 tokens"):
        check_plan(load_config([*own, small, "rollout.max_prompt_tokens=64"]))


def test_quickstarts_wrong_answers_are_not_taught_to_another_model(tmp_path: Path) -> None:
    path = save_model(tmp_path / "own", chat_template=None)
    short = ["model=pretrained", path, "rollout.max_prompt_tokens=32", "task.chat_template=false"]
    with pytest.raises(ValueError, match=r"^trainer\.warm_start\.echo_fraction=0\.6: teaches"):
        check_plan(load_config(short))
    for right in ("trainer.warm_start.num_steps=0", "trainer.warm_start.echo_fraction=0"):
        check_plan(load_config([*short, right]))
    config = load_config([*short, "trainer=gpu", "rollout=gpu"])
    assert config.trainer.warm_start.num_steps == 0 and config.rollout.sampling.temperature == 1.0


BY_VERSION = ("model.lora={mode: versions, targets: [q_proj, v_proj]}",)
BALANCED = ("algorithm.load_balancing_weight=0.01",)
SMALL: dict[str, Any] = {
    "vocab_size": 264,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}
REPLAY = ("rollout.engine.routing_replay=true",)
TILED = ("trainer.gradient_checkpointing=true", "trainer.mlp_tile_tokens=512")


def save_small(folder: Path, config: hf.PreTrainedConfig) -> list[str]:
    """The settings of a run with a random model of this config."""
    hf.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    short = ["rollout.max_prompt_tokens=32", "rollout.max_response_tokens=8"]
    no_chat = ["task.chat_template=false", "trainer.warm_start.num_steps=0"]
    return ["model=pretrained", f"model.path={folder}", *short, *no_chat]


@pytest.mark.parametrize(
    ("config", "settings", "message"),
    [
        (
            hf.MistralConfig(**SMALL, sliding_window=39),
            (),
            r"sliding_window=39 is shorter .*=40\), and the engines' side, SGLang's Mistral",
        ),
        (hf.MistralConfig(**SMALL, sliding_window=40), (), None),
        (
            hf.GemmaConfig(**SMALL),
            (),
            r"SGLang's GemmaForCausalLM, ignores hidden_act=\"gelu_pytorch_tanh\" of .* \"gelu\"",
        ),
        (
            hf.Qwen3MoeConfig(**SMALL, num_experts=4, mlp_only_layers=[1]),
            (),
            r"SGLang's Qwen3MoeForCausalLM, ignores mlp_only_layers=\[1\]",
        ),
        (
            hf.Qwen3MoeConfig(**SMALL, num_experts=4, tie_word_embeddings=True),
            (),
            r"SGLang's Qwen3MoeForCausalLM, ignores tie_word_embeddings=true",
        ),
        (hf.Qwen3MoeConfig(**SMALL, num_experts=4, num_experts_per_tok=2), BALANCED, None),
        (hf.Qwen2MoeConfig(**SMALL, num_experts=4, num_experts_per_tok=2), BALANCED, None),
        (
            hf.Qwen3Config(**SMALL),
            BALANCED,
            r"^algorithm\.load_balancing_weight=0\.01: model\.path='.*' has no router of experts",
        ),
        (hf.Qwen3MoeConfig(**SMALL, num_experts=4, num_experts_per_tok=2), REPLAY, None),
        (hf.Glm4MoeConfig(**SMALL, n_routed_experts=4, num_experts_per_tok=2), REPLAY, None),
        (
            hf.Qwen3MoeConfig(**SMALL, num_experts=4, num_experts_per_tok=1),
            REPLAY,
            r"num_experts_per_tok=1; .* it takes at least 2; set it to false",
        ),
        (
            hf.Qwen3MoeConfig(**SMALL, num_experts=4, num_experts_per_tok=2),
            (*REPLAY, "rollout.group_size=9999999"),
            r"9999999 trajectories of up to 40 tokens could take 1\.5 GiB for their experts",
        ),
        (
            hf.MixtralConfig(**SMALL, num_local_experts=4, sliding_window=None),
            REPLAY,
            r"SGLang's MixtralForCausalLM does not return .* only Glm4Moe.*, Qwen2Moe.* do; set",
        ),
        (hf.Qwen3Config(**SMALL), REPLAY, r"routing_replay=true: model.path=.* has no experts"),
        (hf.Qwen3Config(**SMALL), TILED, None),
        (
            hf.Qwen3MoeConfig(**SMALL, num_experts=4, num_experts_per_tok=2),
            TILED,
            r"^trainer\.mlp_tile_tokens=512: .* its Qwen3MoeDecoderLayer has a mixture of experts",
        ),
        (hf.Qwen3Config(**SMALL), BY_VERSION, None),
        (
            hf.SmolLM3Config(**SMALL, pad_token_id=0),
            BY_VERSION,
            r"versions: model.path=.*: SGLang's SmolLM3ForCausalLM has not been tested with adapt",
        ),
        (
            hf.Qwen3Config(**SMALL),
            ("model.lora={mode: versions, targets: [k_proj, v_proj]}",),
            r"^model\.lora\.targets=\['k_proj', 'v_proj'\]: .* not both q_proj and v_proj, as",
        ),
        (
            hf.OlmoeConfig(**{**SMALL, "num_key_value_heads": 4}, num_experts=4, clip_qkv=8.0),
            (),
            r"SGLang's OlmoeForCausalLM, ignores clip_qkv=8\.0",
        ),
        (hf.Gemma2Config(**SMALL), (), r"softcap, which the trainer does not compute"),
        (hf.GPT2Config(vocab_size=264, n_embd=32, n_layer=1, n_head=4, n_positions=39), (), "=40"),
        (hf.Qwen3Config(**SMALL), ("rollout.max_prompt_tokens=57",), "=65: the model takes 64"),
        (hf.Qwen3Config(**SMALL, rope_parameters=YARN), ("rollout.max_prompt_tokens=248",), None),
        (
            hf.Qwen3Config(**SMALL, rope_parameters=YARN),
            ("rollout.max_prompt_tokens=249",),
            "=257: the model takes 256 tokens",
        ),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_model_that_engines_and_trainer_compute_in_two_ways_is_refused(
    tmp_path: Path, config: hf.PreTrainedConfig, settings: Sequence[str], message: str | None
) -> None:
    loaded = load_config([*save_small(tmp_path, config), *settings])
    if message is None:
        check_plan(loaded)
        return
    with pytest.raises(ValueError, match=message):
        check_plan(loaded)


def test_load_of_experts_that_the_quickstarts_model_does_not_have_is_not_balanced() -> None:
    with pytest.raises(ValueError, match=r"_weight=0\.01: model\.scratch has no router of experts"):
        check_plan(load_config([*BALANCED]))


def test_adapter_of_a_model_in_an_older_kind_of_file_is_possible(tmp_path: Path) -> None:
    settings = save_small(tmp_path, hf.Qwen3Config(**SMALL))
    weights = hf.AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    torch.save(weights, tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    check_plan(load_config([*settings, "model.lora={}"]))


def test_head_beside_tied_embeddings_is_refused(tmp_path: Path) -> None:
    settings = save_small(tmp_path, hf.Qwen3Config(**SMALL))
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | {"tie_word_embeddings": True}))
    with pytest.raises(ValueError, match=r"lm_head\.weight that differs from model\.embed_tok"):
        check_plan(load_config(settings))


def test_folder_that_is_no_reference_is_refused(tmp_path: Path) -> None:
    config = load_config(["algorithm.kl.weight=0.1", f"algorithm.kl.reference={tmp_path}"])
    with pytest.raises(ValueError, match=r"^algorithm\.kl\.reference='.*': neither a folder"):
        check_plan(config)


def test_reference_of_another_shape_is_refused(tmp_path: Path) -> None:
    save_model(tmp_path / "own", chat_template=None)
    build_scratch_model(ScratchModelConfig(num_layers=1, hidden_size=64), tmp_path / "narrow", 0)
    kl = "algorithm.kl={{weight: 0.1, reference: '{}'}}"
    policy = ["model=pretrained", f"model.path={tmp_path}/own", "trainer.warm_start.num_steps=0"]
    short = ["rollout.max_prompt_tokens=32", "task.chat_template=false"]
    with pytest.raises(
        ValueError,
        match=r"^algorithm\.kl\.reference='.*narrow': its hidden_size is 64, the policy's 128, and "
        r"it is computed as the policy; choose a model whose config\.json agrees",
    ):
        check_plan(load_config([*policy, *short, kl.format(tmp_path / "narrow")]))
    check_plan(load_config([*policy, *short, kl.format(tmp_path / "own")]))
    critic = ["algorithm=ppo", f"algorithm.critic.path={tmp_path}/narrow"]
    with pytest.raises(
        ValueError, match=r"^algorithm\.critic\.path='.*narrow': its hidden_size is"
    ):
        check_plan(load_config([*policy, *short, *critic]))
    # A policy from scratch, with more layers.
    with pytest.raises(ValueError, match=r"its num_hidden_layers is 1, the policy's \d+, and"):
        check_plan(load_config([kl.format(tmp_path / "own")]))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "rope_parameters"),
        ({"rope_parameters": YARN}, "rope_parameters is .*yarn"),
        ({"sliding_window": 40}, "sliding_window is 40, the policy's None"),
        ({"rms_norm_eps": 1e-3}, "rms_norm_eps is 0.001"),
        ({"attention_dropout": 0.1, "eos_token_id": 7, "max_position_embeddings": 128}, None),
    ],
)
def test_reference_that_the_policys_code_would_compute_otherwise_is_refused(
    tmp_path: Path, fields: dict[str, Any], message: str | None
) -> None:
    settings = save_small(tmp_path / "own", hf.MistralConfig(**SMALL, sliding_window=None))
    config = hf.MistralConfig(**{**SMALL, "sliding_window": None, **fields})
    save_small(tmp_path / "other", config)
    kl = f"algorithm.kl={{weight: 0.1, reference: '{tmp_path}/other'}}"
    loaded = load_config([*settings, kl])
    if message is None:
        check_plan(loaded)
        return
    with pytest.raises(ValueError, match=rf"^algorithm\.kl\.reference='.*': its {message}"):
        check_plan(loaded)


def test_dry_run_names_what_it_does_not_check() -> None:
    assert check_plan(load_config([], "qwen2.5-7b-gsm8k")) == [
        "the data set openai/gsm8k",
        "the model Qwen/Qwen2.5-7B-Instruct",
    ]
    assert check_plan(load_config(["task.kind=questions", "task.name=org/trivia"])) == [
        "the data set org/trivia"
    ]
    assert check_plan(load_config([])) == []
    room = ("rollout.max_prompt_tokens=768", "rollout.max_response_tokens=256")
    assert check_plan(load_config([*TOOLS, *room])) == [], "the shipped model takes tools"


def test_folder_of_a_data_set_is_checked_and_found_from_other_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rows").mkdir()
    for split in ("train", "test"):
        (tmp_path / "rows" / f"{split}.jsonl").write_text('{"question": "a", "answer": "b"}')
    monkeypatch.chdir(tmp_path)
    config = load_config(["task.kind=questions", "task.name=rows"])
    assert config.task.name == str(tmp_path / "rows")
    with pytest.raises(ValueError, match="nothing is left to train on"):
        check_plan(config)


def test_held_out_prompts_that_are_all_too_long_are_refused(tmp_path: Path) -> None:
    paths = []
    for name, text in (("train", "1+1"), ("held-out", "1+1+1+1+1")):
        path = tmp_path / f"{name}.jsonl"
        path.write_text(json.dumps({"question": text, "answer": "2"}) + "\n")
        paths.append(path)
    files = ["task.kind=questions", f"task.path={paths[0]}", f"task.eval_path={paths[1]}"]
    long = ["rollout.max_prompt_tokens=4", "rollout.on_long_prompt=skip"]
    with pytest.raises(ValueError, match=r"max_prompt_tokens=4: every held-out prompt is longer"):
        check_plan(
            load_config([*files, *long, "trainer.warm_start.num_steps=0", "task.eval_size=1"])
        )


def test_text_of_the_comparison_is_prompts_up_to_the_longest_trajectory() -> None:
    limits = ["rollout.max_prompt_tokens=32", "rollout.max_response_tokens=50"]
    room = ["trainer.micro_batch_tokens=70000", "model.scratch.max_position_embeddings=70000"]
    config = load_config([*limits, *room])
    task = check_inputs(config)
    text = probe_text(config, task)
    assert len(text) == 82 and text == probe_text(config, task)
    first = byte_tokenizer().decode(text[:6])
    assert first == next(TaskStream(task, 0, 1)).text[:6]
    longer = replace(config, rollout=replace(config.rollout, max_response_tokens=60_000))
    assert len(probe_text(longer, task)) == 60_032  # more than 1,024 prompts have


def test_port_in_use_and_foreign_address_are_refused_before_the_start() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for name in ("run.prometheus_port", "rollout.openai.port"):
            with pytest.raises(ValueError, match=rf"{name}={port}: cannot listen on 127"):
                check_inputs(load_config([f"{name}={port}"]))
        page = load_config([f"run.page_port={port}"])
        with pytest.raises(ValueError, match=rf"run\.page_port={port}: another process"):
            check_inputs(page)
        check_inputs(page, is_resumed=True)
    with pytest.raises(ValueError, match=r"cluster\.host='192\.0\.2\.7': no interface"):
        check_inputs(load_config(["cluster.host=192.0.2.7"]))


HUGE = (
    "model.scratch.hidden_size=65536",
    "model.scratch.intermediate_size=262144",
    "model.scratch.num_layers=2000",
    "cluster.gpus_per_rank=0",
)


def test_memory_without_room_for_the_staged_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"weight_sync.stage_dir: no room in /dev/shm for 2 slots"):
        check_inputs(load_config([*HUGE]))
    own_folder = load_config([*HUGE, f"weight_sync.stage_dir={tmp_path}/not/there/yet"])
    message = f"no room in {tmp_path} for 2 slots of about [0-9]+ bytes \\("
    with pytest.raises(ValueError, match=message):
        check_shared_memory(own_folder, make_plan(own_folder, 0, 2))
    quickstart = load_config([])
    check_shared_memory(quickstart, make_plan(quickstart, 0, 2))


def test_memory_without_room_for_copies_of_the_training_state_is_refused(tmp_path: Path) -> None:
    copies = [*HUGE, "trainer.memory_copy_every=7"]
    for settings, message in (
        (copies, r"stage_dir: no room in /dev/shm for .* trainer\.memory_copy_every=7 \("),
        (
            [*copies, f"weight_sync.stage_dir={tmp_path}"],
            r"trainer\.memory_copy_every=7: no room in /dev/shm for two copies .* set it to null",
        ),
    ):
        config = load_config(settings)
        with pytest.raises(ValueError, match=message):
            check_shared_memory(config, make_plan(config, 0, 2))


@pytest.mark.parametrize(
    ("address", "words"),
    [("", "is not set"), ("hooks.example/secret", "holds no address as https://host/path")],
)
def test_launch_refuses_a_webhook_without_an_address(
    monkeypatch: pytest.MonkeyPatch, address: str, words: str
) -> None:
    monkeypatch.setenv("HOOK", address)
    with pytest.raises(ValueError, match=words) as refused:
        check_inputs(load_config(["run.stall.webhook_env=HOOK"]))
    assert str(refused.value).startswith("run.stall.webhook_env='HOOK': ")
    assert "secret" not in str(refused.value)
