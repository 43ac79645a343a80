"""Several tasks in one run: shares, names in errors, scores, curriculum."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice

import pytest

from configs.choices import RewardKind, TaskKind
from configs.load import load_config
from configs.rollout_schema import MixedTask, RewardConfig, TaskConfig
from controller.start.preflight import check_first_words, check_plan, check_task
from controller.start.warm_start import supervised_examples
from rollout_pool.rewards.pool import RewardPool
from rollout_pool.rewards.reward import needs_processes
from rollout_pool.rewards.scorer import EpisodeScorer
from rollout_pool.tasks.env_episodes import environment_factory
from rollout_pool.tasks.registry import build_task
from rollout_pool.tasks.task import Prompt, TaskStream
from rollout_pool.worker.variance import FEWEST, WINDOW, Curriculum
from tests.support.pictures import picture
from tests.support.rollout import ended_episode
from trainer_pool.model.scratch import byte_tokenizer


def questions(*pairs: str, weight: int = 1, eval_size: int = 1, **settings) -> MixedTask:
    """A task of these questions, each with its last word as the answer; the last is held out."""
    rows = [{"question": text, "answer": text.split()[-1]} for text in pairs]
    return MixedTask(
        kind=TaskKind.questions,
        params={"questions": rows},
        weight=weight,
        eval_size=eval_size,
        **settings,
    )


def mixture(seed: int = 0, **tasks: MixedTask) -> TaskConfig:
    return TaskConfig(kind=TaskKind.mixture, tasks=tasks, seed=seed)


TWO = mixture(
    easy=questions("say a", "say b", "say c", weight=3),
    hard=questions("prove x", "prove y", "prove z", instruction="!"),
)


def test_every_round_has_exactly_the_weights_in_an_order_of_its_own():
    task = build_task(TWO)
    names = [task.example(index).task for index in range(400)]
    rounds = [tuple(names[i : i + 4]) for i in range(0, 400, 4)]
    assert all(Counter(one) == {"easy": 3, "hard": 1} for one in rounds)
    assert len(set(rounds)) == 4  # any place, so that no number of workers meets one task only
    other = build_task(mixture(seed=1, **TWO.tasks))
    assert names != [other.example(index).task for index in range(400)]


def test_workers_together_give_each_task_its_prompts_in_its_own_order():
    task = build_task(
        mixture(easy=questions("say a", "say b", "say c", weight=2), hard=TWO.tasks["hard"])
    )
    streams = [islice(TaskStream(task, worker, 4), 30) for worker in range(4)]
    prompts = sorted((p for stream in streams for p in stream), key=lambda p: p.index)
    found = [task.of(prompt) for prompt in prompts]
    assert [own.index for name, own in found if name == "hard"] == list(range(40))
    assert [own.index for name, own in found if name == "easy"] == list(range(80))
    assert {own.text for _, own in found} == {"say a", "say b", "prove x!", "prove y!"}


def test_prompt_is_solved_demonstrated_and_scored_by_its_own_task():
    task = build_task(TWO)
    for prompt in (*map(task.example, range(8)), *task.eval_prompts()):
        last = prompt.text.rstrip("!").split()[-1]
        assert task.solution(prompt) == last
        assert task.demonstration(prompt)[-1].content == last
        assert (task.score(prompt, last), task.score(prompt, "nothing")) == (1.0, 0.0)
    assert [prompt.text for prompt in task.eval_prompts()] == ["say c", "prove z!"]
    assert [prompt.index for prompt in task.eval_prompts()] == [0, 1]
    assert [prompt.task for prompt in task.eval_prompts()] == ["easy", "hard"]


def test_prompt_that_any_task_holds_out_is_replaced_by_another_of_the_same_task():
    # What the first task trains on, the second one holds out.
    task = build_task(mixture(a=questions("1 1", "2 2", "3 3"), b=questions("4 4", "2 2")))
    prompts = [task.example(index) for index in range(60)]
    assert Counter(prompt.text for prompt in prompts) == {"1 1": 30, "4 4": 30}
    assert not any(map(task.is_held_out, prompts))
    nothing_left = mixture(a=questions("1 1", "2 2"), b=questions("3 3", "1 1"))
    with pytest.raises(ValueError, match=r"^task\.tasks\.a\.eval_size: the held-out prompts of al"):
        check_task(nothing_left)


def test_question_of_another_picture_is_another_one(tmp_path):
    for seed in range(3):
        (tmp_path / f"{seed}.png").write_bytes(picture(seed))
    tasks = {}
    for name, seeds in (("a", (0, 1)), ("b", (1, 2))):  # one trains on what the other holds out
        lines = [
            {"question": [{"role": "user", "content": [{"type": "image", "image": f"{seed}.png"}]}]}
            for seed in seeds
        ]
        text = "\n".join(json.dumps({**line, "answer": "a"}) for line in lines)
        (tmp_path / f"{name}.jsonl").write_text(text)
        (tmp_path / f"{name}-eval.jsonl").write_text(text.splitlines()[0])
        tasks[name] = MixedTask(
            kind=TaskKind.questions,
            path=f"{tmp_path}/{name}.jsonl",
            eval_path=f"{tmp_path}/{name}-eval.jsonl",
        )
    task = build_task(mixture(**tasks))
    with pytest.raises(ValueError, match=r"task.tasks.a.eval_size"):  # b holds its only one out
        [task.example(index) for index in range(2)]
    (tmp_path / "b-eval.jsonl").write_text((tmp_path / "b.jsonl").read_text().splitlines()[1])
    task = build_task(mixture(**tasks))
    prompts = {(one.task, one.pictures) for one in map(task.example, range(4))}
    assert prompts == {(name, (f"{tmp_path}/1.png",)) for name in "ab"}


def test_prompts_of_one_text_are_told_apart_by_their_task(tmp_path):
    (tmp_path / "game.py").write_text(
        "from rollout_pool import Prompt, SingleTurnTask\n"
        "class Game(SingleTurnTask):\n"
        "    name = 'game'\n"
        "    def make(self, index, is_held_out):\n"
        "        return Prompt(index=index, is_held_out=is_held_out, text='Play.')\n"
        "    def example(self, index): return self.make(index, False)\n"
        "    def eval_prompts(self): return [self.make(index, True) for index in range(3)]\n"
        "    def is_held_out(self, prompt): return prompt.index % 2 == 0\n"
        "    def solution(self, prompt): return str(prompt.index)\n"
        "    def score(self, prompt, answer): return float(answer == self.solution(prompt))\n"
    )
    game = MixedTask(kind=TaskKind.custom, factory=f"{tmp_path}/game.py:Game")
    task = check_task(mixture(game=game, hard=TWO.tasks["hard"]))
    prompts = [p for p in map(task.example, range(40)) if p.task == "game"]
    assert len(prompts) == 20 and {prompt.text for prompt in prompts} == {"Play."}
    solutions = [task.solution(prompt) for prompt in prompts]
    assert len(set(solutions)) == 20 and all(int(one) % 2 for one in solutions)
    assert [task.solution(p) for p in task.eval_prompts()] == ["0", "1", "2", "z"]


async def test_each_task_is_scored_by_its_own_rewards_and_those_of_all(tmp_path):
    (tmp_path / "rewards.py").write_text(
        "def short(prompt, episode): return -len(episode.answer)\n"
        "def right(prompt, episode, solution): return 10.0 * (episode.answer == solution)\n"
    )

    def function(name: str, weight: float = 1.0) -> RewardConfig:
        path = f"{tmp_path}/rewards.py:{name}"
        return RewardConfig(kind=RewardKind.function, function=path, weight=weight)

    config = TaskConfig(
        kind=TaskKind.mixture,
        rewards={"short": function("short", 0.5)},
        tasks={
            "easy": questions("say a", "say b", rewards={"right": RewardConfig()}),
            "hard": questions("say a", "say b", rewards={"right": function("right")}),
        },
    )
    assert needs_processes(config)
    task = check_task(config)
    pool = RewardPool(config, num_processes=1, timeout_s=20, log_path=tmp_path / "log")
    scorer = EpisodeScorer(config, task=task, pool=pool)
    try:
        await pool.start()
        for prompt in (*task.eval_prompts(), task.example(0)):
            score = await scorer.score(prompt, ended_episode(task.solution(prompt)))
            right = 1.0 if prompt.task == "easy" else 10.0
            assert dict(score.parts) == {"short": -1.0, "right": right}, score.failures
            assert score.reward == right - 0.5
        assert scorer.waited_s >= 0
    finally:
        await scorer.close()
        await pool.close()


async def test_episodes_and_warm_start_have_the_tools_of_their_own_task(tmp_path):
    build = ["task.kind=mixture", "task.chat_template=true", "task.max_turns=2"]
    tasks = "{plain: {name: spell_backward}, tools: {name: spell_backward, tools: [python]}}"
    config = load_config([*build, f"task.tasks={tasks}", "trainer.warm_start.num_steps=2"])
    task = build_task(config.task)
    make = environment_factory(config.task, task)
    for prompt in map(task.example, range(4)):
        begun = await make(prompt).reset()
        assert len(begun.tools) == (prompt.task == "tools")
        assert begun.messages[-1].content == prompt.text
    byte_tokenizer().save_pretrained(tmp_path)
    lengths = [len(e.tokens) for e in supervised_examples(config, str(tmp_path))]
    assert max(lengths) > 2 * min(lengths)  # the description of a tool is long


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (
            {"path": "/no/such.jsonl", "kind": "questions"},
            r"^task\.tasks\.bad\.path=/no/such\.jsonl: ",
        ),
        ({"params": {"max_word_length": 3}}, r"^task\.tasks\.bad\.params"),
        (
            {"rewards": {"r": {"kind": "function", "function": "nowhere:f"}}},
            r"^task\.tasks\.bad\.rewards\.r\.function='nowhere:f': ",
        ),
        ({"rewards": {"r": {"kind": "env"}}}, r"^task\.tasks\.bad\.rewards\.r\.kind=env: .* env"),
        ({"env": "nowhere:Env"}, r"^task\.tasks\.bad\.env='nowhere:Env': "),
        ({"prompt_pattern": "xyz"}, r"^task\.tasks\.bad\.prompt_pattern='xyz': matches nothing"),
    ],
)
def test_error_of_one_task_names_its_own_setting(task, message):
    tasks = json.dumps({"good": {}, "bad": {"name": "spell_backward", **task}})
    config = load_config(["task.kind=mixture", f"task.tasks={tasks}"])
    with pytest.raises(ValueError, match=message):
        check_task(config.task)


@pytest.mark.parametrize("section", ["task.rewards.j", "task.tasks.sums.rewards.j"])
def test_missing_key_names_the_setting_that_asks_for_it(section):
    judge = "{kind: judge, url: 'http://127.0.0.1:1/v1', model: m, api_key_env: NO_SUCH_KEY}"
    config = load_config(["task=mixed", f"{section}={judge}"])
    with pytest.raises(
        ValueError, match=rf"^{section}\.api_key_env='NO_SUCH_KEY': there is no such"
    ):
        check_plan(config)


def test_prompts_of_every_task_are_checked_before_the_start():
    tasks = "{short: {weight: 999, name: spell_backward}, long: {name: leg_counting}}"
    config = load_config(
        ["task.kind=mixture", f"task.tasks={tasks}", "trainer.warm_start.num_steps=0"]
    )
    config.rollout.max_prompt_tokens = 120
    message = r"^rollout\.max_prompt_tokens=120: (held-out )?prompt \d+ has \d+ tokens"
    with pytest.raises(ValueError, match=message):
        check_first_words(config, check_task(config.task), byte_tokenizer())


# Curriculum ---------------------------------------------------------------------------------------


def test_tasks_that_teach_little_are_passed_over_down_to_the_floor_and_come_back():
    curriculum = Curriculum(0.1, seed=0)

    def note(name: str, teaching: int, groups: int) -> None:
        prompt = Prompt(index=0, is_held_out=False, text="", task=name)
        for i in range(groups):
            curriculum.note(prompt, 0.5, teaches=i < teaching)

    note("hard", 0, FEWEST - 1)
    assert (curriculum.probability("easy"), curriculum.probability("hard")) == (
        1.0,
        1.0,
    )  # not enough seen
    note("hard", 0, WINDOW)
    note("easy", 32, WINDOW)
    assert (curriculum.probability("easy"), curriculum.probability("hard")) == (1.0, 0.1)
    assert all(curriculum.takes("easy") for _ in range(1000))
    assert 70 <= sum(curriculum.takes("hard") for _ in range(1000)) <= 130
    note("hard", 16, WINDOW)
    assert curriculum.probability("hard") == 0.5
    note("easy", 0, WINDOW)  # solved
    assert (curriculum.probability("easy"), curriculum.probability("hard")) == (0.1, 1.0)
    note("hard", 0, WINDOW)
    assert (curriculum.probability("easy"), curriculum.probability("hard")) == (
        1.0,
        1.0,
    )  # none teaches
