"""The real path end to end, for a few steps: Redis, Ray, SGLang and ZeRO-3 as a user starts them.

Four launches show what a run is: one that trains to its end and one with two engines and long
answers (here), one over two hosts that ends by a dead engine (test_two_hosts.py), and one in which
a process of each kind is killed, which `stop` ends (tests/soak/test_rollout_faults.py). Two more
are ended early, in their start, and two lose their controllers. Among them they run every
rollout.tail, buffer.on_stale and weight_sync.pause_mode.

`make soak` sends more signals than CI does, each at another line of the log (LEASH_SOAK_SIGNALS).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import torch
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from transformers import AutoModelForCausalLM

from benchmarks.loops.launches import read_run
from buffer.types import CANDIDATES_COLUMN, ROUTES_COLUMN, Trajectory, VersionSpan
from configs.schema import LoraConfig, ScratchModelConfig
from controller.metrics.history import read_metrics
from controller.watch.stages import stages
from rollout_pool.worker.record import read_recorded
from tests.support.collector import Post, collecting
from tests.support.event_files import drawn
from tests.support.experts import build_experts
from tests.support.launches import (
    RUN,
    Machine,
    assert_saved,
    attach,
    command_on,
    end_all,
    finish,
    kill_controller,
    processes_of,
    result_of,
    resume,
    start,
    wait_for_line,
)
from trainer_pool.model.scratch import build_scratch_model
from trainer_pool.state.checkpoint import CheckpointStore
from trainer_pool.state.export import export_checkpoint

TEMPERATURE = 0.5
"""The quickstart's temperature."""

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def launches_end(tmp_path: Path) -> Iterator[None]:
    yield
    end_all(tmp_path)


def test_launch_trains_holds_the_invariants_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine.look()
    monkeypatch.setenv("WANDB_MODE", "offline")
    settings = ["buffer.max_staleness=0", "buffer.on_stale=wait", "rollout.log_rate=1"]
    settings += ["run.loggers=[tensorboard,wandb]", *own_loss(tmp_path)]
    settings += ["algorithm.kl.weight=0.01", *own_evaluation(tmp_path)]
    build_scratch_model(ScratchModelConfig(), tmp_path / "teacher", seed=1)
    settings += [
        f"task.rewards={{turns: {{kind: env}}, t: {{kind: teacher, path: '{tmp_path}/teacher'}}}}",
        "algorithm.streams={words: {tokens: observations, weight: 0.1}, t: {loss: teacher_kl}}",
    ]
    with collecting() as (url, posts):
        tracing = f"rollout.trace_endpoint={url}"
        process = start(tmp_path, RUN, *settings, tracing, experiment="alphabet-sort")
        output = finish(process)
    assert process.returncode == 0, output[-6000:]
    result = result_of(output)
    dropped = sum(result["groups_dropped"].values())
    places = result["groups_trained"] + dropped + result["groups_ready"] + result["groups_leased"]
    assert result["groups_pushed"] == places
    assert result["groups_trained"] == 4 * 4
    assert result["steps"] == 4
    assert result["versions_published"] == 4
    assert result["max_staleness_trained"] == 0
    assert result["tokens_trained"] > 0
    assert result["logprob_diff_max"] <= 1e-4
    assert result["ratio_max_abs_dev"] <= 1e-3  # importance ratios are 1 within numeric error
    run = tmp_path / RUN
    # What the loss of this test reports, in all and by staleness.
    steps = read_metrics(run / "metrics.jsonl", "step")
    assert [step.number("fresh") for step in steps] == [1.0] * 4
    assert [step.number("fresh/staleness_0") for step in steps] == [1.0] * 4
    # The reference is the policy that RL began with, and the policy leaves it.
    apart = [step.number("kl") for step in steps]
    assert apart[0] == pytest.approx(0, abs=1e-6) and apart[-1] > 1e-6
    assert (run / "reference_model" / "model.safetensors").is_file()
    assert all(step.number("words/loss") > 0 for step in steps)
    assert all(step.number("t/kl") > 0 for step in steps)
    assert result["eval_command"]["bytes"][1] > 0, output[-6000:]
    assert not (run / "evaluated").exists()
    assert_turns(run, at_least=3)
    assert_read_by_benchmark(run, result)
    assert_engine_reported(run, result)
    assert_spans(posts)
    assert_stages(run)
    for name in (
        "config.yaml",
        "experiment.yaml",
        "metrics.jsonl",
        "summary.md",
        "result.json",
        "learning_by_step.png",
        "timeline.png",
    ):
        assert (run / name).is_file(), name
    assert (run / "checkpoints").is_dir()
    assert_weights_travelled(run, result, num_versions=4)
    rewards = {
        r.count("step"): r.number("reward_mean")
        for r in read_metrics(run / "metrics.jsonl", "step")
    }
    assert drawn(run / "tensorboard")["step/reward_mean"] == pytest.approx(rewards)
    assert len(list(run.glob("wandb/offline-run-*/*.wandb"))) == 1
    assert "run.loggers" not in output, "a logger complained"
    assert json.loads((run / "run.json").read_text())["state"] == "finished"
    assert "core_worker.cc" not in (run / "logs" / "ray.log").read_text(), "Ray complained"
    assert [str(p) for p in (run, *run.rglob("*")) if p.stat().st_mode & 0o077] == []
    machine.assert_nothing_left(tmp_path)


def assert_stages(run: Path) -> None:
    """Every stage that this run has took time, and the shares are of all of it."""
    records = read_metrics(run / "metrics.jsonl")
    found = stages(records, math.inf)
    assert {one.name for one in found if one.of == "episodes"} >= {
        *("prompt", "queue", "prefill", "decode"),
        *("environment", "rewards", "siblings", "push"),
    }
    assert {one.name for one in found} >= {
        *("lease", "plan", "passes", "update", "snapshot", "checkpoint"),
        *("wire", "commit", "gate", "pause"),
    }
    for of in ("episodes", "trainer", "versions"):
        assert sum(one.share for one in found if one.of == of) == pytest.approx(1)


def own_loss(folder: Path) -> tuple[str, ...]:
    """The settings for a loss that no file of ours knows."""
    (folder / "my_loss.py").write_text(
        "from trainer_pool.algorithms.types import LossOutputs\n"
        "def mine(inputs, config):\n"
        "    loss_N = -inputs.moved_N.exp() * inputs.advantages_N\n"
        "    return LossOutputs(loss_N=loss_N, diagnostics={'fresh': inputs.staleness_N == 0})\n"
    )
    return (f"algorithm.loss={folder / 'my_loss.py'}:mine", "algorithm.correction=[]")


def own_evaluation(folder: Path) -> tuple[str, ...]:
    """The settings for a program that looks at the files of the last model."""
    (folder / "evals.py").write_text(
        "import json, os, sys\n"
        "model, out = sys.argv[1:]\n"
        "with open(out, 'w') as file:\n"
        "    json.dump({'bytes': os.path.getsize(f'{model}/model.safetensors')}, file)\n"
    )
    words = [sys.executable, str(folder / "evals.py"), "{model}", "{out}"]
    return f"rollout.eval.command={json.dumps(words)}", "rollout.eval.command_every=4"


def _check_page(output: str) -> None:
    """The controller serves the page, which tells of the run and changes it."""
    (url,) = re.findall(r"http://127\.0\.0\.1:\d+/\?token=\S+", output)
    origin = url.partition("/?")[0]
    with httpx.Client(
        base_url=origin, follow_redirects=True, timeout=60, trust_env=False
    ) as browser:
        assert browser.get(url).status_code == 200
        state = browser.get("/api/state").json()
        assert state["is_live"] and not state["problem"] and state["step"] >= 9
        assert state["max_staleness"] == 2 and state["phase"] == "training"
        assert browser.get("/api/groups").json()["total"] > 0
        same = {"max_staleness": 2}
        changed = browser.post("/api/tune", json=same, headers={"origin": origin})
        assert changed.status_code == 200, changed.text


TWO_ENGINES = (
    "task=mixed",
    "task.eval_size=128",  # the default: each task has its own
    "task.tasks.spelling.eval_size=12",
    "task.tasks.sums.eval_size=4",
    "task.eval_sets={far: {kind: questions, params: {questions: [{question: 'ab =', answer: ba}, "
    "{question: 'cd =', answer: dc}]}, eval_size: 1, num_samples: 2, temperature: 0.7}}",
    "trainer.keep_best=score_mean/far",
    "trainer.checkpoint_every=8",
    "rollout.log_rate=1",
    "trainer.num_steps=32",
    "trainer.learning_rate=1e-10",  # so small that most bits stay: then versions travel as deltas
    "trainer.warm_start.num_steps=10",  # some of its answers do not end by themselves
    "rollout.num_engines=2",
    "rollout.max_response_tokens=120",
    "rollout.max_filtered_ratio=1",
    "rollout.eval_every=8",
    "rollout.sampling={top_k: 40, top_p: 0.95}",
    "task.grammar='start: /[^e]{0,300}/'",
    "weight_sync=delta",
    "weight_sync.pause_mode=drain",
    "weight_sync.drain_timeout_s=0.5",
    "buffer.on_stale=drop",
)


def test_two_engines_drain_in_turn_take_live_settings_and_hold_a_version_for_evaluations(
    tmp_path: Path,
) -> None:
    process = start(tmp_path, RUN, *TWO_ENGINES, "run.page_port=0")
    output = wait_for_line(process, "step 2/")
    # So far no sample is stopped and no group left out.
    first = "rollout.tail=postpone rollout.oversampling=2 rollout.filter_zero_variance=true"
    first += " rollout.eval_every=16"
    assert "tail continue_across_versions -> postpone" in command_on(
        tmp_path, "tune", *first.split()
    )
    output += wait_for_line(process, "step 10/")
    then = "rollout.tail=interrupt_and_resume rollout.keep_partial=false buffer.on_stale=requeue"
    then += " rollout.group_size=3 rollout.sampling.temperature=1.2 trainer.learning_rate=2e-10"
    then += " buffer.capacity_groups=40 buffer.paused=true"  # at once, or the run may end before
    command_on(tmp_path, "tune", *then.split())
    assert command_on(tmp_path, "status").startswith("The run is paused")
    _check_page(output)  # which the run, paused, cannot overtake
    unpaused = time.time()
    command_on(tmp_path, "tune", "buffer.paused=false")
    output += finish(process)
    assert process.returncode == 0, output[-6000:]
    result = result_of(output)
    assert result["steps"] == 32 and result["max_staleness_trained"] <= 2
    assert result["logprob_diff_max"] <= 1e-4
    counted = result["rollout"]
    assert counted["groups_filtered"] > 0
    # More than were postponed: the second change counts, too.
    assert counted["samples_interrupted"] > 4 * counted.get("groups_postponed", 0)
    assert set(result["groups_dropped"]) <= {"stale"}
    by_task = result["by_task"]
    assert by_task["spelling"]["groups_trained"] > by_task["sums"]["groups_trained"] > 0
    trained = sum(task["groups_trained"] for task in by_task.values())
    assert trained == result["groups_trained"]
    assert {task: one["eval_after"] is None for task, one in by_task.items()} == {
        "spelling": False,
        "sums": False,
    }
    assert sum(counted[f"scored_groups:{task}"] for task in by_task) >= trained
    run = tmp_path / RUN
    tuned = read_metrics(run / "metrics.jsonl", "tuned")
    assert len(tuned) == len(result["changes"]) == 4 + 8 + 1 + 1  # one by the page
    began, _ = [r.t for r in tuned if r.values["setting"] == "buffer.paused"]
    steps = read_metrics(run / "metrics.jsonl", "step")
    assert sum(began < step.t < unpaused for step in steps) <= 1  # it had its batch
    warming_up = 1e-10 * 9 / 11  # in its ninth step
    assert [steps[8].number("lr"), steps[-1].number("lr")] == pytest.approx(
        [warming_up, 2e-10], abs=0
    )
    admitted = [r.number("limit") for r in read_metrics(run / "metrics.jsonl", "buffer")]
    assert max(admitted) == 2 * (2 + 1) * 4
    publishes = read_metrics(run / "metrics.jsonl", "publish")
    assert {r.values["mode"] for r in publishes} >= {"full", "delta"}
    commits = read_metrics(run / "metrics.jsonl", "commit")
    assert {r.values["engine"] for r in commits} == {"engine-0", "engine-1"}
    assert max(r.number("drain_s") for r in commits) > 0
    evals = read_metrics(run / "metrics.jsonl", "eval")
    for record in evals:  # all answers are of the version that one engine was held at
        assert record.number("version_min") == record.number("version_max"), record.values
    evaluated = [record.number("version_min") for record in evals]
    assert evaluated[0] == 0 and evaluated[-1] == 32
    seen = sum(step.t < tuned[3].t for step in steps)  # when rollout.eval_every became 16
    assert not any(seen + 1 < version < 16 for version in evaluated)
    held = [record.values["engine"] for record in evals[1:-1]]  # a slow one may have delayed one
    assert held and set(held) <= {"engine-0", "engine-1"}
    assert all(record.number("num_samples/far") == 2 for record in evals)
    assert all(record.number("num_prompts") == 12 + 4 for record in evals)
    best = CheckpointStore(run / "checkpoints").best()
    of_set = {r.count("version_min"): r.number("score_mean/far") for r in evals[1:]}
    saved = {version: value for version, value in of_set.items() if version % 8 == 0}
    assert best is not None and best.value == saved[best.step] == max(saved.values())
    # What it trained on comes back as data, and the card names both.
    file = tmp_path / "groups.jsonl"
    command_on(tmp_path, "groups", str(file))
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    of_rows = [one.group for row in rows if (one := read_recorded(run, row["group"]))]
    changed = [group for group in of_rows if group.sampling.temperature == 1.2]
    assert changed and {len(group.rewards_by_player) for group in changed} == {3}
    recorded = read_recorded(run, rows[0]["group"])
    assert recorded is not None and rows[0]["messages"] == recorded.messages[0]
    assert [message["role"] for message in rows[0]["messages"]] == ["user", "assistant"]
    card = (run / "final_model" / "README.md").read_text()
    assert "| far | " in card and "| steps | 32 |" in card


ADAPTER = LoraConfig(rank=8, alpha=64)
TRUNCATED_BY_ADAPTERS = (
    "model.lora={rank: 8, alpha: 64}",
    "rollout.sampling.top_k=20",
    "rollout.sampling.top_p=0.95",
    "rollout.sampling.min_p=0.02",
    "task.min_turn_tokens=4",
)


@pytest.mark.long
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("policy", ["experts", "adapters", "versions"])
def test_tokens_have_the_logprobs_of_the_checkpoint_of_their_version_and_of_no_other(
    tmp_path: Path, policy: str
) -> None:
    """Also the tokens of answers that several versions have sampled; those of adapters, which are
    sent in place of their weights, by truncated sampling; those of a mixture with the experts that
    their version chooses, which the trainer took. Where each version is an adapter of its own, an
    answer has one, no engine pauses, and a resumed run goes on so."""
    lora: LoraConfig | None = ADAPTER
    base, further = tmp_path / RUN / "model", TRUNCATED_BY_ADAPTERS
    if policy == "experts":
        lora, base = None, tmp_path / "experts"
        build_experts(base)
        further = ("model=pretrained", f"model.path={base}", "rollout.engine.routing_replay=true")
        further += ("algorithm.load_balancing_weight=1", "trainer.warm_start.echo_fraction=0")
    if policy == "versions":
        further = ("model.lora={rank: 8, alpha: 64, mode: versions}",)
    settings = ("trainer.num_steps=16", "trainer.checkpoint_every=1", "trainer.keep_checkpoints=16")
    settings += ("trainer.learning_rate=1e-3", "rollout.max_response_tokens=48")
    settings += ("rollout.log_rate=1", "rollout.engine.max_running_requests=8", *further)
    output = finish(process := start(tmp_path, RUN, *settings))
    assert process.returncode == 0, output[-6000:]
    run = tmp_path / RUN
    models = {
        step: checkpoint_model(run, base, tmp_path / f"exported-{step}", step, lora)
        for step in range(1, 17)
    }
    own, others, spans_of_answers = list[torch.Tensor](), list[torch.Tensor](), Counter[int]()
    routes = Counter[str]()
    for line in (run / "rollouts" / "worker-0.jsonl").read_text().splitlines():
        group = read_recorded(run, json.loads(line)["group_id"])
        assert group is not None
        for trajectory in group.group.trajectories:
            assert (policy == "adapters") == (CANDIDATES_COLUMN in trajectory.columns)
            assert (policy == "experts") == (ROUTES_COLUMN in trajectory.columns)
            spans_of_answers[len(trajectory.version_spans)] += 1
            for span in trajectory.version_spans:
                if span.version in models and span.version + 1 in models:
                    own.append(rescored(models[span.version], trajectory, span))
                    others.append(rescored(models[span.version + 1], trajectory, span))
                    if policy == "experts":
                        routes.update(compared_routes(models[span.version], trajectory, span))
    mine, wrong = torch.cat(own), torch.cat(others)
    print(f"{len(mine)} tokens; answers by number of versions: {sorted(spans_of_answers.items())}")
    print(f"own {mine.max():.1e}, next version's {wrong.mean():.2g}, at most {wrong.max():.2g}")
    assert mine.max() < 1e-4
    assert wrong.mean() > 100 * mine.max()  # so that a wrong stamp would be noticed
    num_crossed = spans_of_answers.total() - spans_of_answers[1]
    assert len(mine) > 500 and (num_crossed == 0 if policy == "versions" else num_crossed > 20)
    if policy == "versions":
        assert mine.max() < 1e-5
        output = finish(process := resume(tmp_path, "trainer.num_steps=18"))
        assert process.returncode == 0, output[-6000:]
        commits = read_metrics(run / "metrics.jsonl", "commit")
        assert {r.number("pause_s") for r in commits} == {0} and len(commits) > 16
        assert all(r.number("load_s") > 0 for r in commits)
    if policy == "experts":
        steps = read_metrics(run / "metrics.jsonl", "step")
        apart = max(step.number("logprob_diff_max") for step in steps)
        print(f"choices {dict(routes)}; engine and trainer at staleness 0: {apart:.1e}")
        assert routes["known"] > 0.9 * routes["all"] and routes["other"] <= 0.001 * routes["known"]
        assert apart <= 1e-5
        assert min(step.number("routes_replayed") for step in steps) > 0.5
        drift = [step.number("route_drift") for step in steps if step.number("staleness_mean")]
        assert 0 < max(drift) < 0.5
        for step in steps:  # two of four experts, whose load is balanced with a weight of 1
            balance, entropy = step.number("load_balancing_loss"), step.number("router_entropy")
            assert 1.9 < balance < 4 and 0 < entropy < math.log(4), step
            assert 1 <= step.number("router_max_load") <= 2
            assert 0 <= step.number("router_dead_experts") <= 4
            if step.number("zero_variance_fraction") == 1:  # then it is all of the loss
                assert step.number("loss") == pytest.approx(balance, rel=1e-5)
        assert any(step.number("zero_variance_fraction") == 1 for step in steps)


def checkpoint_model(
    run: Path, base: Path, folder: Path, step: int, lora: LoraConfig | None
) -> torch.nn.Module:
    checkpoint = run / "checkpoints" / f"step-{step:06d}"
    export_checkpoint(checkpoint, str(base), folder, lora=lora)
    return AutoModelForCausalLM.from_pretrained(folder)  # type: ignore[no-any-return]


@torch.no_grad()
def rescored(model: torch.nn.Module, trajectory: Trajectory, span: VersionSpan) -> torch.Tensor:
    """How far the recorded log-probabilities of a span are from the model's, which are those among
    the candidates where sampling was truncated."""
    tokens, drawn = torch.from_numpy(trajectory.tokens).long(), slice(span.start, span.end)
    logits = model(tokens[None]).logits[0, span.start - 1 : span.end - 1] / TEMPERATURE
    among = logits
    if (column := trajectory.columns.get(CANDIDATES_COLUMN)) is not None:
        ids = torch.from_numpy(column[drawn]).long()
        among = logits.gather(1, ids.clamp(min=0)).masked_fill(ids < 0, -torch.inf)
    logprobs = logits.gather(1, tokens[drawn, None])[:, 0] - among.logsumexp(-1)
    recorded = torch.from_numpy(trajectory.rollout_logprobs[drawn])
    return (logprobs - recorded)[trajectory.loss_mask[drawn] != 0].abs()


@torch.no_grad()
def compared_routes(
    model: torch.nn.Module, trajectory: Trajectory, span: VersionSpan
) -> dict[str, int]:
    """Numbers of choices by token and layer, of those of which the engine's are known, and of those
    where the model chooses others. They are of the tokens before the span's: what is chosen for a
    token gives the distribution of the next one."""
    chosen: list[torch.Tensor] = []
    gates = [part for name, part in model.named_modules() if name.endswith("mlp.gate")]
    hooks = [
        gate.register_forward_hook(lambda _m, _a, out: chosen.append(out[2])) for gate in gates
    ]
    model(torch.from_numpy(trajectory.tokens).long()[None])
    for hook in hooks:
        hook.remove()
    before = slice(span.start - 1, span.end - 1)
    own = torch.stack(chosen, 1)[before].sort().values
    column = trajectory.columns[ROUTES_COLUMN]
    assert column.dtype == np.uint8 and not column[-1].any()
    of_engine = torch.from_numpy(column[before].astype(np.int64)).view_as(own).sort().values
    is_known = of_engine.flatten(1).any(1)
    other = ((own != of_engine).any(2) & is_known[:, None]).sum()
    numbers = {"all": len(own), "known": int(is_known.sum())}
    return {name: 2 * number for name, number in numbers.items()} | {"other": int(other)}


def assert_turns(run: Path, at_least: int) -> None:
    """Some episode of the newest recorded group has so many answers, in one trajectory."""
    recorded = read_recorded(run, None)
    assert recorded is not None
    trajectories = recorded.group.trajectories
    assert len({t.episode for t in trajectories}) == len(trajectories) == 4
    begins = [np.diff(t.loss_mask.astype(int), prepend=0) == 1 for t in trajectories]
    assert max(int(begin.sum()) for begin in begins) >= at_least


def assert_read_by_benchmark(run: Path, result: dict[str, Any]) -> None:
    found = read_run(run)
    assert sorted(found["seconds"]) == found["seconds"] and len(found["rewards"]) == 4
    assert found["seconds"][0] > 0 and found["seconds"][-1] <= result["train_s"] + 0.1
    assert found["tokens"][-1] == result["tokens_trained"]
    assert found["mixed"] == 0 and found["staleness_max"] == 0
    assert 0.5 < found["length"] < 2 and 0 <= found["wasted"] < 1


def assert_spans(posts: Sequence[Post]) -> None:
    """Each request of an episode is below its sample, and that below the episode."""
    requests = [ExportTraceServiceRequest.FromString(post.body) for post in posts]
    scopes = [s for r in requests for of in r.resource_spans for s in of.scope_spans]
    spans = {span.span_id: span for scope in scopes for span in scope.spans}
    paths = Counter(path_of(span, spans) for span in spans.values())
    assert paths["episode",] >= 4 * 4 * 4
    assert paths["episode", "sample"] >= 3 * 4 * 4 * 4
    assert paths["episode", "sample", "request"] >= 3 * 4 * 4 * 4
    for part in ("queue", "prefill", "decode"):
        assert paths["episode", "sample", "request", part] >= 3 * 4 * 4 * 4


def path_of(span: Any, spans: Mapping[bytes, Any]) -> tuple[str, ...]:
    above = spans.get(span.parent_span_id)
    return (*(() if above is None else path_of(above, spans)), span.name)


def assert_engine_reported(run: Path, result: dict[str, Any]) -> None:
    """Its load and its requests are in the run's metrics, and agree with each other."""
    records = read_metrics(run / "metrics.jsonl", "engine")
    assert {(r.values["engine"], r.number("worker")) for r in records} == {("engine-0", 0)}
    for record in records:
        assert 1 <= record.number("limit") <= 128
        assert min(map(record.number, ("in_flight", "preemptions"))) >= 0
    # On a busy machine the first records come before the engine first reports its load.
    loaded = [record for record in records if "kv_usage" in record.values]
    assert loaded and loaded == records[-len(loaded) :]
    for record in loaded:
        assert 0 <= record.number("kv_usage") <= 1
        assert min(map(record.number, ("running", "queued"))) >= 0
    assert (
        0 < max(r.number("prefix_hit_rate") for r in records if "prefix_hit_rate" in r.values) < 1
    )
    versions = {version for r in records for version in r.histogram("logprobs")}
    assert 0 in versions and versions <= set(range(5))
    assert result["logprobs_not_finite"] == {}
    counted = result["rollout"]
    num_episodes = sum(n for name, n in counted.items() if name.startswith("episodes_ended:"))
    assert counted["turns"] > counted["branches"] == num_episodes >= 4 * 4 * 4
    num_requests = counted["requests:engine-0"]
    assert num_requests > 4 * 4 * 4  # reported every two seconds: the last ones are not in
    # A commit stops requests, on a busy machine many of them before their first token.
    for what, at_least in (("queue", 0.9 * num_requests), ("first_token", counted["turns"])):
        within = [n for name, n in counted.items() if name.startswith(f"{what}_within:")]
        assert at_least <= sum(within) <= num_requests
        assert counted[f"{what}_s:engine-0"] >= 0
    summary = (run / "summary.md").read_text()
    assert "| time to first token from there |" in summary and "| turns per episode |" in summary


def assert_weights_travelled(run: Path, result: dict[str, Any], num_versions: int) -> None:
    """Every version left the trainer or was overtaken, and the engine ended at the last one."""
    records = read_metrics(run / "metrics.jsonl")
    publishes = {int(r.number("version")): r for r in records if r.kind == "publish"}
    commits = [r for r in records if r.kind == "commit"]
    assert sorted(publishes) == list(range(num_versions + 1))
    assert publishes[num_versions].values["mode"] != "skipped"
    versions = [int(r.number("version")) for r in commits]
    assert versions == sorted(set(versions)) and versions[-1] == num_versions
    for commit in commits:
        assert 0 < commit.number("load_s") <= commit.number("pause_s")
        assert commit.number("paused_at") < commit.number("resumed_at")
    for publish in publishes.values():
        if publish.values["mode"] != "skipped":
            assert publish.number("wire_bytes") == publish.number("bytes") > 0
            assert publish.number("convergence_s") > publish.number("stage_s") > 0
    for name in ("engine_pause_s", "snapshot_s", "convergence_s"):
        assert 0 < result[name]["p50"] <= result[name]["max"]
    assert "excluded" not in result["weights_events"]


STEPS_OF_THE_START = (
    "Redis",
    "Ray",
    "placement",
    "receivers, engines, workers, trainer ranks",
    "task and model",
    "model from scratch",
    "warm start",
    "checkpoint engine",
    "version 0 to the engines",
)
"""Each is a line of the log when it is done: a signal at it meets the step that comes next."""
SIGNALS = (
    ("✓ Redis", signal.SIGINT),
    ("step 2/", signal.SIGTERM),
    ("✓ Redis", signal.SIGTERM),
    *((f"✓ {step}", signal.SIGINT) for step in STEPS_OF_THE_START[1:]),
    ("step 1/", signal.SIGINT),
)
NUM_SIGNALS = int(os.environ.get("LEASH_SOAK_SIGNALS", "1"))


@pytest.mark.parametrize(("line", "number"), SIGNALS[:NUM_SIGNALS])
def test_signal_to_the_group_at_a_line_of_the_log_ends_the_run_and_leaves_nothing(
    tmp_path: Path, line: str, number: signal.Signals
) -> None:
    machine = Machine.look()
    process = start(tmp_path, RUN, "trainer.num_steps=1000", is_forked=False)
    seen = wait_for_line(process, line)
    if line == "✓ Redis":
        wait_for_ray_folder(tmp_path / RUN)
    os.killpg(process.pid, number)  # as Ctrl-C and `timeout` do: every process of the shell's job
    output = seen + finish(process)
    assert process.returncode == 130, output[-4000:]
    assert "Traceback" not in output and "Exception ignored" not in output, output[-4000:]
    run = tmp_path / RUN
    if run.exists():  # a signal at the first line may come before there is a folder
        assert json.loads((run / "run.json").read_text())["state"] == "stopped"
        assert json.loads((run / "result.json").read_text())["state"] == "stopped"
        assert "**Stopped" in (run / "summary.md").read_text()
        assert not (run / "redis.url").exists() and not (run / "ray").is_symlink()
    if line == "step 2/":
        assert_saved(run)
    machine.assert_nothing_left(tmp_path)


def wait_for_ray_folder(run: Path) -> None:
    """It is noted just before Ray starts, which says no line until it has started."""
    deadline = time.monotonic() + 300
    while not (run / "ray").is_symlink():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("line", ["✓ placement", "step 2/"][:NUM_SIGNALS])
def test_stop_cleans_up_after_a_controller_killed_at_a_line_of_the_log(
    tmp_path: Path, line: str
) -> None:
    machine = Machine.look()
    process = start(tmp_path, RUN, "trainer.num_steps=1000")
    wait_for_line(process, line)
    run = tmp_path / RUN
    kill_controller(run, with_guard=True)  # which would clear up by itself
    finish(process, timeout_s=60)
    command_on(tmp_path, "stop")
    assert json.loads((run / "run.json").read_text())["state"] == "stopped"
    assert not (run / "redis.url").exists()
    written = json.loads((run / "result.json").read_text())
    assert written["state"] == "stopped" and written["steps"] >= 2 * line.startswith("step 2")
    (run / "summary.md").unlink()
    (run / "result.json").unlink()
    command_on(tmp_path, "report")
    assert json.loads((run / "result.json").read_text()) == written
    assert "**Stopped" in (run / "summary.md").read_text()
    machine.assert_nothing_left(tmp_path)


ATTACHED_STEPS = 48
"""Both controllers attach within ten on a busy machine; more pass by on one that trains faster."""


def test_run_whose_controllers_are_killed_goes_on_and_the_next_ones_attach_to_it(
    tmp_path: Path,
) -> None:
    machine = Machine.look()
    run = tmp_path / RUN
    process = start(
        tmp_path,
        RUN,
        f"trainer.num_steps={ATTACHED_STEPS}",
        f"trainer.checkpoint_every={ATTACHED_STEPS}",  # so nothing could be resumed
        "trainer.gradient_accumulation_steps=2",
        "trainer.publish_every=2",
        "rollout.num_workers=2",
        "rollout.reward_actors=1",
    )
    output = wait_for_line(process, "step 2/")
    pools = pools_of(tmp_path)
    assert len(pools) >= 9
    kill_controller(run)
    output += wait_for_line(process, "✓ attached") + wait_for_line(process, "step ")
    assert "leash: the controller died (exit code -9); another one goes on" in output
    assert pools_of(tmp_path) == pools

    command_on(tmp_path, "tune", "buffer.paused=true")
    kill_controller(run, with_guard=True)
    finish(process, timeout_s=60)
    version = served_version(run)
    process = attach(tmp_path)
    output = wait_for_line(process, "✓ attached")
    assert command_on(tmp_path, "status").startswith("The run is paused")
    command_on(tmp_path, "tune", "buffer.paused=false")
    output += wait_for_line(process, "step ")
    assert pools_of(tmp_path) == pools
    output += finish(process)
    assert process.returncode == 0, output[-6000:]
    result = result_of(output)
    assert (result["state"], result["steps"]) == ("finished", ATTACHED_STEPS)
    assert result["is_conserved"] and result["max_staleness_trained"] <= 2
    assert result["eval_version"] == ATTACHED_STEPS // 2 > version
    records = read_metrics(run / "metrics.jsonl")
    steps = [r.count("step") for r in records if r.kind == "step"]
    assert steps == list(range(1, ATTACHED_STEPS + 1)), "each is trained and recorded once"
    published = {r.count("version") for r in records if r.kind == "publish"}
    assert published == {*range(0, ATTACHED_STEPS // 2, 2), ATTACHED_STEPS // 2}
    kinds = Counter(r.kind for r in records)
    assert (kinds["attached"], kinds["resumed"]) == (2, 0)
    machine.assert_nothing_left(tmp_path)


@pytest.mark.long
def test_run_whose_ray_dies_goes_on_from_its_last_checkpoint(tmp_path: Path) -> None:
    machine = Machine.look()
    process = start(tmp_path, RUN, "trainer.num_steps=12", "trainer.checkpoint_every=2")
    output = wait_for_line(process, "step 5/")
    (part,) = (line for line in processes_of(tmp_path) if line.endswith(" raylet"))
    os.kill(int(part.split()[0]), signal.SIGKILL)
    output += finish(process)
    assert process.returncode == 0, output[-6000:]
    assert "Ray's raylet died" in output and "leash: Ray died; another one goes on" in output
    assert (result := result_of(output))["state"] == "finished" and result["steps"] == 12
    assert result["is_conserved"]
    records = read_metrics(tmp_path / RUN / "metrics.jsonl")
    (resumed,) = (record for record in records if record.kind == "resumed")
    assert resumed.count("step") >= 2  # the checkpoint after step 4 may not have been whole
    machine.assert_nothing_left(tmp_path)


def test_run_that_serves_its_teacher_ends_with_it(tmp_path: Path) -> None:
    machine = Machine.look()
    run = tmp_path / RUN
    build_scratch_model(ScratchModelConfig(), tmp_path / "teacher", seed=1)
    teacher = f"task.rewards.t={{kind: teacher, path: '{tmp_path}/teacher'}}"
    process = start(tmp_path, RUN, teacher, "algorithm=distill", "trainer.num_steps=10000")
    wait_for_line(process, "step 2/")
    served = f"--model-path {tmp_path}/teacher"
    (server,) = (p for p in psutil.process_iter() if served in command_of(p))
    server.kill()
    output = finish(process)
    assert process.returncode == 1, output[-6000:]
    died = f"leash: teacher of task.rewards.t.path='{tmp_path}/teacher' died (exit code -9)"
    assert died in output and str(run / "logs" / "teacher.log") in output
    assert "continues it" in output
    machine.assert_nothing_left(tmp_path)


def command_of(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        return " ".join(process.cmdline())
    return ""


def test_run_that_nobody_attaches_to_ends_in_time_and_leaves_nothing(tmp_path: Path) -> None:
    machine = Machine.look()
    run = tmp_path / RUN
    process = start(tmp_path, RUN, "run.attach_timeout_s=1")
    wait_for_line(process, "✓ placement")
    kill_controller(run, with_guard=True)
    finish(process, timeout_s=60)
    deadline = time.monotonic() + 300
    while processes_of(tmp_path):
        assert time.monotonic() < deadline, processes_of(tmp_path)
        time.sleep(0.2)
    record = json.loads((run / "run.json").read_text())
    assert record["state"] == "failed" and "run.attach_timeout_s=1" in record["error"]
    assert "its controller was killed" in (run / "summary.md").read_text()
    assert not (run / "redis.url").exists() and not (run / "ray").is_symlink()
    refused = finish(attach(tmp_path), timeout_s=60)
    assert "it has ended" in refused
    machine.assert_nothing_left(tmp_path)


POOLS = ("Actor", "sglang", "redis", "valkey", "raylet")


def pools_of(runs: Path) -> set[int]:
    """Process ids of ranks, engines, workers, receivers, scorers, Redis and Ray."""
    lines = [line for line in processes_of(runs) if any(word in line for word in POOLS)]
    return {int(line.split()[0]) for line in lines}


def served_version(run: Path) -> int:
    commits = read_metrics(run / "metrics.jsonl", "commit")
    return max(int(r.number("version")) for r in commits)
