"""Scoring in real processes, some of which misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from configs.choices import RewardKind, RewardScope, TaskKind
from configs.environment import RUN_VARIABLE
from configs.rollout_schema import RewardConfig, TaskConfig
from processes.runs import run_processes
from rollout_pool.rewards.function import FunctionReward
from rollout_pool.rewards.pool import TOGETHER_BYTES, TOGETHER_S, RewardError, RewardPool, _Asked
from rollout_pool.rewards.types import encode_request, part_of
from rollout_pool.tasks.registry import build_task
from rollout_pool.tasks.task import Prompt
from tests.support.rollout import ended_episode, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = Prompt(index=4, is_held_out=False, text="4 + 4 =")
TIMEOUT_S = 5.0

MISBEHAVING = """
import asyncio, os, subprocess, sys, time
from pathlib import Path

HERE = Path(__file__).parent

def first_time(name):
    is_first = not (HERE / name).exists()
    (HERE / name).touch()
    return is_first

class Task:
    name = "misbehaving"
    example = eval_prompts = is_held_out = environment = demonstration = None

    def score(self, prompt, completion):
        if completion == "hang":
            while True:
                time.sleep(0.01)
        if completion == "crash" or completion == "crash once" and first_time("crashed"):
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
        if completion == "meet":  # goes on once two processes are here
            (HERE / f"met-{os.getpid()}").touch()
            while len(list(HERE.glob("met-*"))) < 2:
                time.sleep(0.01)
        if completion == "gate":
            (HERE / "entered").touch()
            while not (HERE / "open").exists():
                time.sleep(0.01)
        return prompt.index / 10

def build(config):
    if config.name == "bad":
        raise ValueError("task.name='bad': no such task")
    if config.name == "die" or config.name == "die once" and first_time("died"):
        os._exit(7)
    return Task()

def brevity(prompt, episode):
    assert episode.messages[-1].role == "assistant"
    return 1 / len(episode.answer) + prompt.index

def ask(prompt, episode):
    return len(input())

def start(prompt, episode):
    return len(subprocess.run(["cat"], capture_output=True, check=True).stdout) + 0.5

def note(pid):
    with (HERE / "pids").open("a") as file:
        file.write(f"{pid} ")

def leave(prompt, episode):
    note(subprocess.Popen(["sleep", "600"]).pid)
    return 0

def leave_and_die(prompt, episode):
    leave(prompt, episode)
    os._exit(1)

def leave_and_hang(prompt, episode):
    leave(prompt, episode)
    time.sleep(600)

def fork(prompt, episode):
    pid = os.fork()
    if not pid:
        raise SystemExit if episode.answer == "end" else ValueError  # goes on in our own code
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def give(prompt, episode):
    return eval(episode.answer)

def leave_process(prompt, episode):
    sys.exit("--threshold is missing")

LOOPS = set()

async def slowly(prompt, episode):
    await asyncio.sleep(0)
    LOOPS.add(id(asyncio.get_running_loop()))
    return eval(episode.answer) if len(LOOPS) == 1 else -1

def each(prompt, episode):
    yield 1.0

async def each_slowly(prompt, episode):
    yield 1.0

class Each:
    def __call__(self, prompt, episode):
        yield 1.0

class Scored:
    def __init__(self, prompt, episode):
        self.reward = 1.0

class Later:
    async def __call__(self, prompt, episode):
        return 0.25

each_made, later = Each(), Later()

def rank(prompt, episodes):
    lengths = sorted(len(one.answer) for one in episodes)
    return [lengths.index(len(one.answer)) + len(one.messages) / 10 for one in episodes]

async def rank_slowly(prompt, episodes):
    await asyncio.sleep(0)
    return eval(episodes[0].answer)

def fork_and_die(prompt, episode):
    if pid := os.fork():
        note(pid)
        os._exit(1)
    time.sleep(600)

"""
NO_NUMBER = "which is not a finite number below 1e30; let it return an int, a float or a bool, "
NO_NUMBER += "or None for an answer that cannot be judged"
NO_LIST = "which is no list of 3 rewards; let it return one for each episode, in their order"
FUNCTIONS = (
    *("brevity", "ask", "start", "leave", "leave_and_die", "leave_and_hang"),
    *("fork", "fork_and_die", "give", "leave_process", "slowly", "later"),
)


def asked(answer: str, part: str = "task", prompt: Prompt = PROMPT) -> bytes:
    return encode_request(part, prompt, ended_episode("?", answer), with_messages=True)


def function(name: str) -> RewardConfig:
    return RewardConfig(kind=RewardKind.function, function=name)


@pytest.fixture(scope="module")
def mine(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("rewards") / "mine.py"
    path.write_text(MISBEHAVING)
    return path


@pytest.fixture(scope="module")
def make_pool(mine):
    def make(num_processes=1, timeout_s=TIMEOUT_S, name="good", rewards=None, factory=None):
        return RewardPool(
            TaskConfig(
                kind=TaskKind.custom,
                name=name,
                factory=factory or f"{mine}:build",
                rewards={"task": RewardConfig(), **(rewards or {})},
            ),
            num_processes=num_processes,
            timeout_s=timeout_s,
            log_path=mine.parent / "rewards.log",
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(RUN_VARIABLE, str(mine))
        yield make


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(make_pool, mine):
    rewards = {name: function(f"{mine}:{name}") for name in FUNCTIONS}
    for name in ("rank", "rank_slowly"):
        rewards[name] = replace(function(f"{mine}:{name}"), of=RewardScope.group)
    pool = make_pool(rewards=rewards)
    await pool.start()
    yield pool
    await pool.close()
    assert not children()


@pytest.fixture
def pool(shared):
    """One process for all tests, which replace it where they must."""
    shared.num_restarts = 0
    return shared


def children():
    """They may be forked: a fork server is their parent then."""
    found = []
    for process in run_processes(os.environ[RUN_VARIABLE]):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "rollout_pool.rewards.process" in " ".join(process.cmdline()):
                found.append(process)
    return found


async def ended(pids) -> bool:
    """Waits until they have."""
    async with asyncio.timeout(60):
        while any(psutil.pid_exists(pid) and running(pid) for pid in pids):
            await asyncio.sleep(0.02)
    return True


def running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("answer", "failure", "num_restarts"),
    [
        ("hang", f"no reward within {TIMEOUT_S:g} s", 1),
        ("crash", "the scoring process died", 2),  # it was retried
        ("raise", "RuntimeError: no such thing", 0),
        ("nan", f"task.factory: score of misbehaving: returned nan, {NO_NUMBER}", 0),
        ("text", f"task.factory: score of misbehaving: returned 'nothing', {NO_NUMBER}", 0),
    ],
)
async def test_bad_scorer_fails_only_its_own_sample(pool, answer, failure, num_restarts):
    bad, next_one = await asyncio.gather(pool.score(asked(answer)), pool.score(asked("ok")))
    assert (bad.value, bad.failure, bad.is_unscored) == (0.0, failure, False)
    assert (next_one.value, next_one.failure) == (0.4, None)
    assert pool.num_restarts == num_restarts


@pytest.mark.parametrize(
    ("answer", "failure", "num_restarts"),
    [("crash", "the scoring process died", 2), ("hang", f"no reward within {TIMEOUT_S:g} s", 1)],
)
async def test_quick_requests_share_a_message_and_a_bad_one_among_them_fails_alone(
    pool, monkeypatch, answer, failure, num_restarts
):
    messages = messages_of(pool, monkeypatch, task=1e-6)
    answers = [*["ok"] * 3, answer, *["ok"] * 3]
    scores = await asyncio.gather(*(pool.score(asked(one)) for one in answers))
    assert [score.failure for score in scores] == [None] * 3 + [failure] + [None] * 3
    assert [score.value for score in scores] == [0.4] * 3 + [0.0] + [0.4] * 3
    assert messages[0] == 7 and pool.num_restarts == num_restarts


def messages_of(pool, monkeypatch, **longest_s) -> list[int]:
    """How many requests each message has, to a pool whose parts took so long lately."""
    pool._longest_s = {part_of(asked("", part)): took_s for part, took_s in longest_s.items()}
    [process] = pool._processes
    messages, send = [], process.send
    monkeypatch.setattr(process, "send", lambda *all: messages.append(len(all)) or send(*all))
    return messages


async def test_nothing_sits_behind_a_slow_request_or_one_of_an_unknown_part(pool, monkeypatch):
    monkeypatch.setattr(pool, "_note_work", lambda one, took_s: None)  # as on any machine
    messages = messages_of(pool, monkeypatch, task=1e-6, later=1.0)
    parts = ["task", "task", "later", "task", "task", "task", "slowly", "task"]
    await asyncio.gather(*(pool.score(asked("1.0", part)) for part in parts))
    assert messages == [2, 1, 3, 1, 1]


async def test_part_that_was_slow_once_among_many_quick_ones_goes_alone(pool):
    [slow, quick] = [_Asked(asked("", part), None, 0.0, 0.0) for part in ("task", "later")]
    pool._longest_s = {}
    pool._note_work(slow, 30.0)
    for _ in range(50):
        pool._note_work(slow, 1e-6)
        pool._note_work(quick, 1e-6)
    assert pool._longest_s[part_of(slow.request)] > TOGETHER_S
    assert pool._longest_s[part_of(quick.request)] < TOGETHER_S


async def test_message_is_no_longer_than_what_a_socket_takes_at_once(pool, monkeypatch):
    messages = messages_of(pool, monkeypatch, task=1e-6)
    sizes = [TOGETHER_BYTES // 8, TOGETHER_BYTES // 8, 2 * TOGETHER_BYTES, 1]
    scores = await asyncio.gather(*(pool.score(asked(size * "x")) for size in sizes))
    assert [score.value for score in scores] == [0.4] * 4
    assert messages[:2] == [2, 1]


@pytest.mark.parametrize("reply", [{"reward": "abc", "took_s": 0.0}, {"reward": 1.0}, []])
async def test_reply_that_cannot_be_read_fails_its_request_alone(pool, monkeypatch, reply):
    messages_of(pool, monkeypatch, task=1e-6)
    [process] = pool._processes
    replies, read = [reply], process.reply

    async def reply_of():
        real = await read()
        return replies.pop() if replies and "ready" not in real else real

    monkeypatch.setattr(process, "reply", reply_of)
    async with asyncio.timeout(60):
        bad, next_one = await asyncio.gather(*(pool.score(asked("ok")) for _ in range(2)))
    assert bad.failure and (next_one.value, next_one.failure) == (0.4, None)


@pytest.mark.parametrize("error", [OSError(24, "too many files"), RuntimeError("no new thread")])
async def test_error_of_the_host_at_a_restart_reaches_the_callers(pool, monkeypatch, error):
    await pool.score(asked("ok"))
    [process] = pool._processes
    await process.kill()
    starts = []

    async def start():
        starts.append(1)
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(process, "start", start)
        async with asyncio.timeout(60):
            asking = (pool.score(asked("ok")) for _ in range(3))
            assert await asyncio.gather(*asking, return_exceptions=True) == [error] * 3
        await until(lambda: pool._idle)
    assert len(starts) <= 6  # one for each request, and one after each
    assert (await pool.score(asked("ok"))).value == 0.4


async def test_request_for_which_no_process_starts_is_unscored(pool, monkeypatch):
    """A file that is being edited says nothing about a completion, whose reward would be 0."""
    [process] = pool._processes
    await process.kill()

    async def start():
        raise ValueError("task.rewards.mine.function='mine.py:f': could not be loaded")

    with monkeypatch.context() as patch:
        patch.setattr(process, "start", start)
        score = await pool.score(asked("ok"))
        await until(lambda: pool._idle)
    assert score.is_unscored and "could not be loaded" in score.failure
    assert (await pool.score(asked("ok"))).value == 0.4


async def test_process_that_cannot_start_again_leaves_its_request_to_others(make_pool, monkeypatch):
    pool = make_pool(num_processes=2, timeout_s=60)
    await pool.start()
    dead, living = pool._processes
    await dead.kill()

    async def start():
        raise OSError(11, "no process to spare")

    monkeypatch.setattr(dead, "start", start)
    pool._idle.remove(living)  # it scores another request
    asking = asyncio.create_task(pool.score(asked("ok")))
    await until(lambda: dead not in pool._idle)
    pool._idle.append(living)
    async with asyncio.timeout(60):
        assert (await asking).value == 0.4
    await pool.close()


async def test_dead_process_gets_nothing_while_another_is_idle_and_then_one_request(make_pool):
    pool, others = make_pool(num_processes=2, timeout_s=60), {*children()}
    await pool.start()
    pool._longest_s = {part_of(asked("ok")): 1e-6}
    pool._note_work = lambda one, took_s: None  # as on any machine
    dead, living = pool._processes
    await dead.kill()
    given, score = [], pool._score
    pool._score = lambda process, asked: (
        given.append((process, len(asked))) or score(process, asked)
    )
    assert (await pool.score(asked("ok"))).value == 0.4
    assert given == [(living, 1)] and not dead.is_alive
    scores = await asyncio.gather(*(pool.score(asked("ok")) for _ in range(8)))
    assert [score.value for score in scores] == [0.4] * 8
    assert given[1:3] == [(living, 4), (dead, 1)]
    await pool.close()
    assert {*children()} <= others


async def test_request_whose_process_dies_is_retried(pool):
    score = await pool.score(asked("crash once"))
    assert (score.value, score.failure) == (0.4, None)
    assert pool.num_restarts == 1


async def test_process_killed_while_idle_is_replaced(pool):
    await pool.score(asked("ok"))
    [child] = children()
    child.kill()
    await asyncio.sleep(0.1)
    assert (await pool.score(asked("ok"))).value == 0.4


async def test_scorer_output_is_not_taken_for_its_reward(pool):
    assert (await pool.score(asked("print"))).value == 0.4


async def test_wait_for_a_free_process_is_reported(pool):
    began = time.monotonic()
    first, second = await asyncio.gather(pool.score(asked("slow")), pool.score(asked("ok")))
    took_s = time.monotonic() - began
    assert 0.3 <= second.waited_s <= took_s and first.waited_s <= took_s - 0.3


async def test_time_in_which_a_reply_lies_at_a_busy_worker_is_no_wait_for_a_process(pool):
    asking = [asyncio.create_task(pool.score(asked("ok"))) for _ in range(2)]
    while pool._idle:
        await asyncio.sleep(0)
    await asyncio.sleep(0.001)  # the request is on its way
    time.sleep(2)  # the worker does something else
    first, second = await asyncio.gather(*asking)
    assert first.waited_s + second.waited_s < 2


async def test_cancelled_caller_does_not_cost_a_process(pool, mine):
    await pool.score(asked("ok"))
    before = children()
    asking = asyncio.create_task(pool.score(asked("gate")))
    await until((mine.parent / "entered").exists)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    (mine.parent / "open").touch()
    assert (await pool.score(asked("ok"))).value == 0.4
    assert children() == before and pool.num_restarts == 0


async def test_function_of_the_user_scores_the_whole_episode(pool):
    assert (await pool.score(asked("four", "brevity"))).value == 4.25
    assert (await pool.score(asked("", "brevity"))).failure == "ZeroDivisionError: division by zero"


@pytest.mark.parametrize("given", ["'yes'", "'0.5'", "nan", "inf", "[1.0]", f"1{400 * '0'}"])
async def test_function_that_returns_no_number_is_named_with_what_it_returned(pool, mine, given):
    shown = given.replace("nan", "float('nan')").replace("inf", "float('inf')")
    score = await pool.score(asked(shown, "give"))
    setting = f"task.rewards.give.function='{mine}:give'"
    assert (score.value, score.failure) == (0.0, f"{setting}: returned {given:.200}, {NO_NUMBER}")


@pytest.mark.parametrize("part", ["give", "slowly"])
async def test_function_that_returns_none_leaves_the_answer_open(pool, part):
    score = await pool.score(asked("None", part))
    assert score.is_left_open and (score.value, score.failure) == (0.0, None)


async def test_async_functions_are_awaited_in_one_loop(pool):
    scores = [await pool.score(asked(given, "slowly")) for given in ("0.5", "True", "[]", "1 / 0")]
    assert [score.value for score in scores] == [0.5, 1.0, 0.0, 0.0]
    assert scores[2].failure.endswith(f":slowly': returned [], {NO_NUMBER}")
    assert scores[3].failure == "ZeroDivisionError: division by zero"
    assert (await pool.score(asked("", "later"))).value == 0.25


def asked_of_group(part: str, *answers: str) -> bytes:
    episodes = [ended_episode("?", answer) for answer in answers]
    return encode_request(part, PROMPT, *episodes, with_messages=True)


async def test_function_of_a_group_gets_all_its_episodes_and_scores_each(pool):
    score = await pool.score(asked_of_group("rank", "aaa", "a", "aa"))
    assert (score.of_group, score.failure) == ((2.2, 0.2, 1.2), None)


@pytest.mark.parametrize(
    ("given", "failure"),
    [
        ("(1, None, True)", None),
        ("[1.0, 2.0]", f"returned [1.0, 2.0], {NO_LIST}"),
        ("'abc'", f"returned 'abc', {NO_LIST}"),
        ("{0: 1, 1: 2, 2: 3}", f"returned {{0: 1, 1: 2, 2: 3}}, {NO_LIST}"),
        ("7", f"returned 7, {NO_LIST}"),
        ("None", f"returned None, {NO_LIST}"),
    ],
)
async def test_function_of_a_group_that_returns_no_list_of_rewards_is_named(
    pool, mine, given, failure
):
    score = await pool.score(asked_of_group("rank_slowly", given, "b", "c"))
    setting = f"task.rewards.rank_slowly.function='{mine}:rank_slowly'"
    assert score.failure == (failure and f"{setting}: {failure}")
    assert score.of_group == (() if failure else (1.0, None, 1.0))


async def test_episode_for_which_a_function_of_a_group_returned_no_number_is_named(pool, mine):
    score = await pool.score(asked_of_group("rank_slowly", "[1, 'b', 3]", "b", "c"))
    setting = f"task.rewards.rank_slowly.function='{mine}:rank_slowly'"
    assert score.failure == f"{setting}, episode 1: returned 'b', {NO_NUMBER}"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("each", "a generator, which yields"),
        ("each_slowly", "a generator, which yields"),
        ("each_made", "a generator, which yields"),
        ("Scored", "a class, and a call makes an object of it"),
    ],
)
async def test_function_that_can_return_no_number_is_refused_before_the_start(mine, name, words):
    name = f"{mine}:{name}"
    config = TaskConfig(kind=TaskKind.alphabet_sort, max_turns=3, rewards={"style": function(name)})
    with pytest.raises(ValueError) as refused:
        FunctionReward.check("style", config, build_task(config))
    assert str(refused.value).startswith(f"task.rewards.style.function={name!r}: is {words}, but a")


CONFIG = TaskConfig(kind=TaskKind.alphabet_sort, max_turns=3)


def refusal_of(tmp_path: Path, parameters: str, of: RewardScope = RewardScope.episode) -> str:
    (tmp_path / "brought.py").write_text(f"def score({parameters}):\n    return 1.0")
    part = replace(function(f"{tmp_path}/brought.py:score"), of=of)
    try:
        FunctionReward.check("r", replace(CONFIG, rewards={"r": part}), build_task(CONFIG))
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("parameters", "wrong"),
    [
        ("args, sample", "args"),
        ("args, samples, **kwargs", "args"),
        ("solution_str, ground_truth, extra_info=None", "solution_str and ground_truth"),
        ("data_source, solution_str", "data_source and solution_str"),
        ("completions, answer, **kwargs", "completions"),
        ("prompts, completions", "prompts"),
        ("episode, prompt", "episode and prompt"),
        ("prompt, completion, **columns", "completion"),
    ],
)
async def test_function_of_another_system_is_refused_before_the_start(tmp_path, parameters, wrong):
    refused = refusal_of(tmp_path, parameters)
    first_two = ", ".join(parameters.split(", ")[:2])
    assert refused.startswith(
        f"task.rewards.r.function='{tmp_path}/brought.py:score': is called with (prompt, episode), "
        f"in this order, but takes ({first_two}), and would get something else as {wrong}; change"
    )


OWN = ["p, e", "_, x", "question, answer", "*args", "sample, episode", "prompt, sample", "x, *args"]


@pytest.mark.parametrize(
    ("parameters", "of"),
    [
        ("prompt, completions", RewardScope.group),
        *((names, RewardScope.episode) for names in OWN),
    ],
)
async def test_own_names_of_parameters_are_taken(tmp_path, parameters, of):
    assert refusal_of(tmp_path, parameters, of) == ""


async def test_function_that_exits_costs_no_process(pool):
    score = await pool.score(asked("ok", "leave_process"))
    assert (score.value, score.failure) == (0.0, "SystemExit: --threshold is missing")
    assert pool.num_restarts == 0


async def test_function_that_reads_its_input_takes_no_request(pool):
    scores = await asyncio.gather(
        *(pool.score(asked("ok", part)) for part in ("ask", "start", "task", "start", "task"))
    )
    assert [score.value for score in scores] == [0.0, 0.5, 0.4, 0.5, 0.4]
    assert [score.failure for score in scores[1:]] == [None] * 4
    assert scores[0].failure == "EOFError: EOF when reading a line"
    assert pool.num_restarts == 0


@pytest.mark.parametrize("how", ["end", "go on"])
async def test_fork_in_a_function_answers_no_request(pool, how):
    scores = await asyncio.gather(
        pool.score(asked(how, "fork")), *(pool.score(asked("ok")) for _ in range(5))
    )
    assert [score.value for score in scores] == [0.0] + [0.4] * 5
    assert [score.failure for score in scores] == [None] * 6
    assert pool.num_restarts == 0


@pytest.mark.parametrize("how", ["leave_and_die", "leave_and_hang", "fork_and_die"])
async def test_children_of_a_function_end_with_its_process(pool, mine, how):
    assert (await pool.score(asked("ok", how))).failure is not None
    assert (await pool.score(asked("ok"))).value == 0.4
    assert await ended(map(int, (mine.parent / "pids").read_text().split()))


async def test_processes_killed_at_random_under_load_cost_no_score(make_pool):
    pool, num_kills = make_pool(num_processes=2, timeout_s=60), 5
    others = {*children()}
    await pool.start()
    together = await asyncio.gather(*(pool.score(asked("meet")) for _ in range(2)))
    assert [score.failure for score in together] == [None, None]
    is_over, scores = asyncio.Event(), []

    def kill_oldest():
        alive = {*children()} - others  # none, if both have just been killed
        if alive:
            min(alive, key=psutil.Process.create_time).kill()
        return bool(alive)

    async def kill():
        for number in range(1, num_kills + 1):
            await until(lambda n=number: len(scores) >= 10 * n and kill_oldest())
        is_over.set()

    async def ask():
        while not is_over.is_set():
            scores.append(await pool.score(asked("ok")))

    await asyncio.gather(kill(), *(ask() for _ in range(8)))
    # Only a request that met two deaths has no score.
    assert sum(score.failure is not None for score in scores) <= num_kills // 2
    assert len(scores) >= 10 * num_kills and pool.num_restarts >= 2
    await pool.close()


async def test_pool_that_is_closed_answers_all_and_leaves_no_process(make_pool, mine, pool):
    others = {*children()}
    closing = make_pool(timeout_s=60, rewards={"leave": function(f"{mine}:leave")})
    await closing.start()
    await closing.score(asked("ok", "leave"))
    asking = [asyncio.create_task(closing.score(asked("hang"))) for _ in range(3)]
    await asyncio.sleep(0.1)
    await closing.close()
    scores = await asyncio.gather(*asking)
    assert {score.failure for score in scores} == {"the reward pool was closed"}
    assert {*children()} <= others
    assert await ended(map(int, (mine.parent / "pids").read_text().split()))


async def test_process_ends_with_its_worker(make_pool):
    async with asyncio.timeout(60):
        orphaned = make_pool()
        await orphaned.start()
        [process] = orphaned._idle
        process._life.close()  # as the end of the worker does
        assert await process._child.exit() == -signal.SIGKILL
        await orphaned.close()


async def test_process_killed_during_its_start_is_restarted(make_pool):
    pool = make_pool(name="die once")
    await pool.start()
    assert (await pool.score(asked("ok"))).value == 0.4
    await pool.close()


async def test_process_that_never_starts_is_an_error(make_pool):
    with pytest.raises(RewardError, match=r"died 3 times while it started; see .*rewards.log"):
        await make_pool(name="die").start()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "bad"}, r"task.name='bad': no such task"),
        ({"factory": "no_such_module:build"}, r"task.factory="),
        ({"rewards": {"mine": function("HERE/mine.py:absent")}}, r"task\.rewards\.mine\.function="),
        (
            {"rewards": {"tests": RewardConfig(kind=RewardKind.code_tests)}},
            r"task\.rewards\.tests\.kind=code_tests: .*no tests",
        ),
    ],
)
async def test_setting_that_cannot_be_met_is_bad_input(make_pool, mine, pool, settings, message):
    others = {*children()}
    if reward := settings.get("rewards", {}).get("mine"):
        settings["rewards"] = {"mine": function(reward.function.replace("HERE", str(mine.parent)))}
    with pytest.raises(ValueError, match=message):
        await make_pool(**settings).start()
    assert {*children()} <= others


async def test_pool_without_processes_starts_and_closes(make_pool):
    pool = make_pool(num_processes=0)
    await pool.start()
    await pool.close()


async def test_process_whose_data_are_not_those_of_the_run_scores_nothing(tmp_path):
    listed = [{"question": f"{n}?", "answer": n} for n in range(3)]
    config = TaskConfig(kind=TaskKind.questions, params={"questions": listed}, eval_size=1)
    data, log_path = {"": "4 problems"}, tmp_path / "rewards.log"
    pool = RewardPool(config, num_processes=1, timeout_s=60, log_path=log_path, data=data)
    with pytest.raises(ValueError, match=r"^task\.name=.*but the run began with 4 problems"):
        await pool.start()
    await pool.close()


async def test_programs_are_scored_in_a_scoring_process_and_slow_tests_do_not_cost_it(tmp_path):
    few = [{"input": "1", "output": "2"}, {"input": "4", "output": "8"}]
    many = [{"input": str(n), "output": str(n)} for n in range(50)]
    lines = [
        {"prompt": f"Do {n}", "tests": many if n else few, "solution": "print(2 * int(input()))"}
        for n in range(3)
    ]
    (tmp_path / "exercises.jsonl").write_text("\n".join(map(json.dumps, lines)))
    log_path = tmp_path / "rewards.log"
    config = TaskConfig(
        kind=TaskKind.code,
        path=str(tmp_path / "exercises.jsonl"),
        eval_size=1,
        rewards={
            "tests": RewardConfig(kind=RewardKind.code_tests),
            "all": RewardConfig(kind=RewardKind.code_tests, all_or_nothing=True, wall_time_s=5.0),
            "shell": RewardConfig(
                kind=RewardKind.code_tests, command=["sh", "{file}"], languages=["sh"]
            ),
            "small": RewardConfig(
                kind=RewardKind.code_tests, cpu_time_s=1, memory_bytes=64 * 2**20
            ),
        },
    )
    pool = RewardPool(config, num_processes=1, timeout_s=15, log_path=log_path)
    await pool.start()
    task = build_task(config)
    doubled, echoed = sorted(
        (task.example(n) for n in range(2)), key=lambda prompt: prompt.text != "Do 0"
    )
    answers = [
        task.solution(doubled),
        "```python\nprint(2)\n```",
        "```python\nimport os\nwhile True: os.fork()\n```",
        "```python\nprint(open('/etc/passwd').read())\n```",
    ]
    scores = [await pool.score(asked(answer, "tests", doubled)) for answer in answers]
    assert [score.value for score in scores] == [1.0, 0.5, 0.0, 0.0]
    whole = [await pool.score(asked(answer, "all", doubled)) for answer in answers[:2]]
    assert [score.value for score in whole] == [1.0, 0.0]
    shell = "```sh\nread n\necho $((2 * n))\n```\n```python\nprint(0)\n```"
    assert (await pool.score(asked(shell, "shell", doubled))).value == 1.0
    hung = await pool.score(asked("```python\nimport time\ntime.sleep(60)\n```", "all", doubled))
    assert hung.value == 0.0
    limited = ("print(len(bytes(10**8)))", "while True: pass")
    for code in limited:
        score = await pool.score(asked(f"```python\n{code}\n```", "small", doubled))
        assert score.value == 0.0
    slow = "```python\nimport time\ntime.sleep(2)\nprint(input())\n```"
    score = await pool.score(asked(slow, "tests", echoed))
    assert 0 < score.value < 0.2
    await pool.close()
    assert {score.failure for score in [*scores, score]} == {None} and pool.num_restarts == 0
    log = log_path.read_text()
    assert "0 of 2 tests passed; test 1: it tried to start or signal a process" in log
    assert "0 of 2 tests passed; test 1: it tried to use a forbidden or missing file" in log
    assert "all tests together took longer than 12 s" in log
    for limit in ("took too long", "exceeded its memory", "exceeded its CPU time"):
        assert f"0 of 2 tests passed; test 1: it {limit}" in log
