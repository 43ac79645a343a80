"""Scoring in real processes, some of which misbehave."""

from __future__ import annotations

import asyncio
import json
import os
import time

import psutil
import pytest

from configs.choices import RewardKind, TaskKind
from configs.rollout_schema import RewardConfig, TaskConfig
from rollout_pool.episodes.env import Message, ToolCall
from rollout_pool.episodes.episode import Episode
from rollout_pool.rewards.part import decode_request, encode_request
from rollout_pool.rewards.pool import RewardError, RewardPool
from rollout_pool.rewards.process import decode_config, encode_config
from rollout_pool.tasks.registry import build_task
from rollout_pool.tasks.task import Prompt

PROMPT = Prompt(index=4, is_held_out=False, text="4 + 4 =")


def episode_of(answer: str, **fields) -> Episode:
    messages = (Message(role="user", content="?"), Message(role="assistant", content=answer))
    return Episode(branches=[], messages=messages, end="done", num_turns=1, **fields)


def asked(answer: str, part: str = "", prompt: Prompt = PROMPT) -> bytes:
    return encode_request(part, prompt, episode_of(answer), with_messages=True)


MISBEHAVING = """
import os, time

class Task:
    name = "misbehaving"

    def score(self, prompt, completion):
        if completion == "hang":
            while True:
                time.sleep(0.01)
        if completion == "crash":
            os._exit(7)
        if completion.startswith("crash once "):
            path = completion.removeprefix("crash once ")
            if not os.path.exists(path):
                open(path, "w").close()
                os._exit(7)
        if completion == "text":
            return "nothing"
        if completion == "raise":
            raise RuntimeError("no such thing")
        if completion == "print":
            print('{"reward": 99}')
        if completion == "nan":
            return float("nan")
        if completion == "slow":
            time.sleep(0.3)
        return prompt.index / 10

def build(config):
    if config.name == "bad":
        raise ValueError("task.name='bad': no such task")
    if config.name == "die":
        os._exit(7)
    if config.name.startswith("die once "):
        path = config.name.removeprefix("die once ")
        if not os.path.exists(path):
            open(path, "w").close()
            os._exit(7)
    return Task()
"""


@pytest.fixture
def make_pool(tmp_path):
    scorer = tmp_path / "misbehaving.py"
    scorer.write_text(MISBEHAVING)

    def make(num_processes=1, timeout_s=1.0, name="good", rewards=None):
        return RewardPool(
            TaskConfig(name=name, rewards=rewards or {}),
            num_processes=num_processes,
            timeout_s=timeout_s,
            log_path=tmp_path / "rewards.log",
            factory=f"{scorer}:build",
        )

    return make


@pytest.fixture
async def pool(make_pool):
    pool = make_pool()
    await pool.start()
    yield pool
    await pool.close()


def children():
    return [
        process
        for process in psutil.Process().children()
        if "rollout_pool.rewards.process" in process.cmdline()
    ]


async def test_the_real_task_scores_by_the_number_of_the_prompt(tmp_path):
    config = TaskConfig(
        params={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
        prompt_pattern=": (.*=)$",
        eval_size=10,
    )
    pool = RewardPool(config, num_processes=1, timeout_s=30, log_path=tmp_path / "rewards.log")
    await pool.start()
    task = build_task(config)
    for prompt in [task.example(7), task.eval_prompts()[3]]:
        right, wrong = await asyncio.gather(
            pool.score(asked(task.solution(prompt), prompt=prompt)),
            pool.score(asked("1234", prompt=prompt)),
        )
        assert (right.value, right.failure) == (1.0, None)
        assert wrong.value < 0.5 and wrong.failure is None
    await pool.close()


async def test_a_hanging_scorer_costs_its_own_sample_alone(pool):
    hanging, next_one = await asyncio.gather(pool.score(asked("hang")), pool.score(asked("ok")))
    assert (hanging.value, hanging.failure) == (0.0, "no reward within 1 s")
    assert (next_one.value, next_one.failure) == (0.4, None)
    assert pool.num_restarts == 1


async def test_a_crashing_scorer_costs_its_own_sample_alone(pool):
    crashing, next_one = await asyncio.gather(pool.score(asked("crash")), pool.score(asked("ok")))
    assert (crashing.value, crashing.failure) == (0.0, "the scoring process died")
    assert next_one.value == 0.4
    assert pool.num_restarts == 2  # it was asked a second time


async def test_a_request_whose_process_dies_is_asked_again(pool, tmp_path):
    score = await pool.score(asked(f"crash once {tmp_path}/crashed"))
    assert (score.value, score.failure) == (0.4, None)
    assert pool.num_restarts == 1


async def test_processes_killed_at_random_under_load_cost_no_score(make_pool):
    pool = make_pool(num_processes=2, timeout_s=30)
    await pool.start()
    is_over = asyncio.Event()

    async def kill():
        for _ in range(5):
            await asyncio.sleep(0.2)
            for child in children()[:1]:
                child.kill()
        is_over.set()

    async def ask():
        scores = []
        while not is_over.is_set():
            scores.append(await pool.score(asked("ok")))
        return scores

    _, *asking = await asyncio.gather(kill(), *(ask() for _ in range(8)))
    scores = [score for one in asking for score in one]
    # Only a request that met two deaths has no score.
    assert sum(score.failure is not None for score in scores) <= 1
    assert len(scores) > 50 and pool.num_restarts >= 2
    await pool.close()


async def test_the_wait_for_a_free_process_is_told(pool):
    first, second = await asyncio.gather(pool.score(asked("slow")), pool.score(asked("ok")))
    assert first.waited_s < 0.1 and 0.2 < second.waited_s < 2


async def test_a_pool_that_is_closed_answers_whoever_waits(make_pool):
    pool = make_pool(timeout_s=60)
    await pool.start()
    asking = [asyncio.create_task(pool.score(asked("hang"))) for _ in range(3)]
    await asyncio.sleep(0.1)
    await pool.close()
    with pytest.raises(asyncio.CancelledError):
        await asking[0]
    late = await asyncio.gather(*asking[1:])
    assert {score.failure for score in late} == {"the reward pool was closed"}
    assert not children()


async def test_a_scorer_killed_from_outside_while_idle_is_replaced(pool):
    [child] = children()
    child.kill()
    await asyncio.sleep(0.1)
    score = await pool.score(asked("ok"))
    assert score.value == 0.4


@pytest.mark.parametrize(
    ("completion", "failure"),
    [
        ("raise", "RuntimeError: no such thing"),
        ("nan", "the reward is nan"),
        ("text", "the reward is no number but 'nothing'"),
    ],
)
async def test_an_error_in_a_scorer_is_told_and_its_process_lives_on(pool, completion, failure):
    [child] = children()
    score = await pool.score(asked(completion))
    assert (score.value, score.failure) == (0.0, failure)
    assert children() == [child] and pool.num_restarts == 0


async def test_what_a_scorer_prints_is_not_taken_for_its_reward(pool):
    assert (await pool.score(asked("print"))).value == 0.4


@pytest.mark.machine
async def test_two_processes_score_at_the_same_time(make_pool):
    pool = make_pool(num_processes=2, timeout_s=5)
    await pool.start()
    started = time.perf_counter()
    await asyncio.gather(*(pool.score(asked("slow")) for _ in range(4)))
    assert time.perf_counter() - started < 1.0  # 4 x 0.3 s, two at a time
    await pool.close()


async def test_a_caller_that_gives_up_does_not_cost_a_process(pool):
    [child] = children()
    asking = asyncio.create_task(pool.score(asked("slow")))
    await asyncio.sleep(0.1)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert (await pool.score(asked("ok"))).value == 0.4
    assert children() == [child] and pool.num_restarts == 0


async def test_close_leaves_no_process_not_even_a_hanging_one(make_pool):
    pool = make_pool(num_processes=2, timeout_s=60)
    await pool.start()
    asking = asyncio.create_task(pool.score(asked("hang")))
    await asyncio.sleep(0.2)
    await pool.close()
    assert not children()
    with pytest.raises(asyncio.CancelledError):
        await asking


async def test_a_process_that_is_killed_while_it_starts_is_started_again(make_pool, tmp_path):
    pool = make_pool(name=f"die once {tmp_path / 'died'}")
    await pool.start()
    assert (await pool.score(asked("ok"))).value == 0.4
    await pool.close()


async def test_a_process_that_never_starts_is_an_error(make_pool, tmp_path):
    with pytest.raises(RewardError, match=r"died 3 times while it started; see .*rewards.log"):
        await make_pool(name="die").start()
    assert not children()


async def test_a_task_that_refuses_its_config_is_bad_input(make_pool):
    with pytest.raises(ValueError, match=r"task.name='bad': no such task"):
        await make_pool(name="bad").start()
    assert not children()


async def test_a_factory_that_does_not_exist_is_bad_input(tmp_path):
    for factory in ("no_such_module:build", f"{tmp_path}/none.py:build", f"{os.__name__}:build"):
        pool = RewardPool(
            TaskConfig(),
            num_processes=1,
            timeout_s=1,
            log_path=tmp_path / "rewards.log",
            factory=factory,
        )
        with pytest.raises(ValueError, match=r"task.factory=.*"):
            await pool.start()


# What travels ------------------------------------------------------------------------------------


def test_a_request_arrives_as_it_was_sent():
    call = ToolCall(call_id="c1", name="python", arguments={"code": "print(1)\n"})
    messages = (
        Message(role="user", content="zw\u00f6lf\n\ud83d"),
        Message(role="assistant", content="", tool_calls=(call,)),
        Message(role="tool", content="1", tool_call_id="c1", name="python"),
        Message(role="assistant", content="12"),
    )
    episode = Episode(branches=[], messages=messages, end="done", num_turns=2, env_reward=0.5)
    line = encode_request("style", PROMPT, episode, with_messages=True)
    assert b"\n" not in line
    request = decode_request(line.decode())
    assert (request.part, request.prompt) == ("style", PROMPT)
    view = request.episode
    assert view.messages == messages
    assert (view.answer, view.num_turns, view.env_reward, view.end) == ("12", 2, 0.5, "done")
    bare = decode_request(encode_request("", PROMPT, episode, with_messages=False).decode())
    assert bare.episode.messages == () and bare.episode.answer == "12"


def test_a_config_arrives_as_it_was_sent():
    rewards = {"tests": RewardConfig(kind=RewardKind.code_tests, weight=0.5)}
    config = TaskConfig(rewards=rewards, tools=["python"], params={"a": [1]})
    assert decode_config(encode_config(config)) == config


# Functions of a user ------------------------------------------------------------------------------

FUNCTIONS = """
def brevity(prompt, episode):
    assert episode.messages[-1].role == "assistant"
    return 1 / len(episode.answer) + prompt.index

number = 5
"""


async def test_a_function_of_the_user_scores_the_whole_episode(make_pool, tmp_path):
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    function = f"{tmp_path}/mine.py:brevity"
    rewards = {"brevity": RewardConfig(kind=RewardKind.function, function=function)}
    pool = make_pool(rewards=rewards)
    await pool.start()
    assert (await pool.score(asked("four", "brevity"))).value == 4.25
    assert (await pool.score(asked("", "brevity"))).failure == "ZeroDivisionError: division by zero"
    await pool.close()


STARTING = """
import os, subprocess, time

def ask(prompt, episode):
    return len(input())

def start(prompt, episode):
    return len(subprocess.run(["cat"], capture_output=True, check=True).stdout) + 0.5

def leave(prompt, episode):
    return subprocess.Popen(["sleep", "600"]).pid

def leave_and_die(prompt, episode):
    open("PLACE", "a").write(f"{leave(prompt, episode)} ")
    os._exit(1)

def leave_and_hang(prompt, episode):
    open("PLACE", "a").write(f"{leave(prompt, episode)} ")
    time.sleep(600)

def fork(prompt, episode):
    pid = os.fork()
    if not pid:
        raise SystemExit if episode.answer == "end" else ValueError  # goes on in our own code
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def fork_and_die(prompt, episode):
    if pid := os.fork():
        open("PLACE", "a").write(f"{pid} ")
        os._exit(1)
    time.sleep(600)
"""


@pytest.fixture
async def starting(make_pool, tmp_path):
    """A pool whose functions start processes, and the file where some write their numbers."""
    path = tmp_path / "pids"
    (tmp_path / "mine.py").write_text(STARTING.replace("PLACE", str(path)))
    names = ["ask", "start", "leave", "leave_and_die", "leave_and_hang", "fork", "fork_and_die"]
    pool = make_pool(
        timeout_s=3.0,
        rewards={
            name: RewardConfig(kind=RewardKind.function, function=f"{tmp_path}/mine.py:{name}")
            for name in names
        },
    )
    await pool.start()
    yield pool, path
    await pool.close()


async def ended(pids) -> bool:
    """Whether they are, or are soon."""
    async with asyncio.timeout(5):
        while any(psutil.pid_exists(pid) and running(pid) for pid in pids):
            await asyncio.sleep(0.02)
    return True


def running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def test_a_function_that_reads_its_input_takes_nobodys_request(starting):
    pool, _ = starting
    scores = await asyncio.gather(
        *(pool.score(asked("ok", part)) for part in ("ask", "start", "", "start", ""))
    )
    assert [score.value for score in scores] == [0.0, 0.5, 0.4, 0.5, 0.4]
    assert [score.failure for score in scores[1:]] == [None] * 4
    assert scores[0].failure == "EOFError: EOF when reading a line"
    assert pool.num_restarts == 0


@pytest.mark.parametrize("how", ["end", "go on"])
async def test_a_fork_in_a_function_answers_nobody(starting, how):
    pool, _ = starting
    scores = await asyncio.gather(
        pool.score(asked(how, "fork")), *(pool.score(asked("ok")) for _ in range(5))
    )
    assert [score.value for score in scores] == [0.0] + [0.4] * 5
    assert [score.failure for score in scores] == [None] * 6
    assert pool.num_restarts == 0


async def test_what_a_function_started_ends_with_the_pool(starting):
    pool, _ = starting
    started = await pool.score(asked("ok", "leave"))
    assert running(int(started.value))
    await pool.close()
    assert await ended([int(started.value)])


@pytest.mark.parametrize("how", ["leave_and_die", "leave_and_hang", "fork_and_die"])
async def test_what_a_function_started_ends_with_its_process(starting, how):
    pool, path = starting
    assert (await pool.score(asked("ok", how))).failure is not None
    assert (await pool.score(asked("ok"))).value == 0.4
    assert await ended([int(pid) for pid in path.read_text().split()])


@pytest.mark.parametrize("name", ["none.py:f", "mine.py:absent", "mine.py:number"])
async def test_a_function_that_is_not_there_is_bad_input(make_pool, tmp_path, name):
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    reward = RewardConfig(kind=RewardKind.function, function=f"{tmp_path}/{name}")
    with pytest.raises(ValueError, match=r"task\.rewards\.mine\.function="):
        await make_pool(rewards={"mine": reward}).start()


# Programs ----------------------------------------------------------------------------------------

DOUBLE = "print(2 * int(input()))"


@pytest.fixture
def exercises(tmp_path):
    path = tmp_path / "exercises.jsonl"
    tests = [{"input": "1", "output": "2"}, {"input": "4", "output": "8"}]
    lines = [{"prompt": f"Double {n}", "tests": tests, "solution": DOUBLE} for n in range(4)]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


async def test_programs_are_scored_in_a_scoring_process(exercises, tmp_path):
    log_path = tmp_path / "rewards.log"
    config = TaskConfig(
        kind=TaskKind.code,
        path=str(exercises),
        eval_size=1,
        rewards={"tests": RewardConfig(kind=RewardKind.code_tests)},
    )
    pool = RewardPool(config, num_processes=1, timeout_s=30, log_path=log_path)
    await pool.start()
    task = build_task(config)
    prompt = task.example(0)
    answers = [
        task.solution(prompt),
        "```python\nprint(2)\n```",
        "```python\nimport os\nwhile True: os.fork()\n```",
        "```python\nprint(open('/etc/passwd').read())\n```",
    ]
    scores = [await pool.score(asked(answer, "tests", prompt)) for answer in answers]
    assert [(score.value, score.failure) for score in scores] == [
        (1.0, None),
        (0.5, None),
        (0.0, None),
        (0.0, None),
    ]
    await pool.close()
    told = log_path.read_text()
    assert "0 of 2 tests passed; test 1: it wanted to start a process" in told
    assert "0 of 2 tests passed; test 1: it wanted a file" in told


async def test_a_task_without_tests_cannot_be_scored_by_them(make_pool):
    rewards = {"tests": RewardConfig(kind=RewardKind.code_tests)}
    with pytest.raises(ValueError, match=r"task\.rewards\.tests\.kind=code_tests: .*no tests"):
        await make_pool(rewards=rewards).start()
