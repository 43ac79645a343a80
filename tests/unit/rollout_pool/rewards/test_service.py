"""Rewards from services: a real HTTP server that sometimes fails."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import re
import time
from dataclasses import replace
from email.utils import formatdate
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from configs.choices import RewardKind, TaskKind
from configs.rollout_schema import Criterion, RewardConfig, TaskConfig
from rollout_pool.episodes.conversation import Message
from rollout_pool.episodes.episode import Episode
from rollout_pool.rewards.code_tests import CodeTests
from rollout_pool.rewards.http import HttpReward
from rollout_pool.rewards.judge import Judge, parse_score
from rollout_pool.rewards.remote_sandbox import RemoteSandbox, check_remote_sandbox
from rollout_pool.rewards.reward import needs_processes
from rollout_pool.rewards.scorer import EpisodeScorer
from rollout_pool.rewards.service import FIRST_PAUSE_S, RemoteFailure, RemoteService
from rollout_pool.rewards.teacher import Teacher
from rollout_pool.sandbox.run import SandboxLimits
from rollout_pool.tasks.programs import CodeTask
from rollout_pool.tasks.task import Prompt
from tests.support.rollout import ended_episode, unmasked_branch, until
from trainer_pool.model.scratch import byte_tokenizer

PROMPT = Prompt(index=7, is_held_out=False, text="3 + 4 =")
EPISODE = ended_episode("3 + 4 =", "7")


class Service:
    """Answers with what is in `replies`, one after the other, the last repeatedly."""

    url = ""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.replies: list[object] = [{"reward": 1.0}]
        self.delay_s = 0.0
        self.bodies: list[dict] = []
        self.headers: list[dict] = []
        self.paths: list[str] = []
        self.times: list[float] = []
        self.num_open = self.most_open = 0

    async def answer(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        self.paths.append(request.url.path)
        self.times.append(time.monotonic())
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            await asyncio.sleep(self.delay_s)
        finally:
            self.num_open -= 1
        if callable(reply) and not isinstance(reply, Response):
            reply = reply(body)
        if isinstance(reply, Response):
            return reply
        if isinstance(reply, int):
            return PlainTextResponse("out of order", reply)
        return JSONResponse(reply)


@pytest.fixture
def service(serve):
    service = Service()
    service.url = serve([Route("/{path:path}", service.answer, methods=["POST"])])
    return service


class Solved:
    """A task that knows one solution."""

    name = "solved"

    def solution(self, prompt: Prompt) -> str:
        return "S7"


@pytest.fixture
async def make(service):
    """Makes the client of a service; each is closed."""
    made = []

    def make(kind: type[RemoteService], path: str = "", **settings) -> RemoteService:
        config = RewardConfig(
            kind=KINDS[kind], **{"url": service.url + path, "timeout_s": 60, **settings}
        )
        made.append(kind("mine", config, Solved()))
        return made[-1]

    yield make
    for one in made:
        await one.close()


KINDS = {HttpReward: RewardKind.http, Judge: RewardKind.judge, Teacher: RewardKind.teacher}


@pytest.fixture
def reward(make):
    return partial(make, HttpReward, "/score")


# Calls -------------------------------------------------------------------------------------------


async def test_service_is_sent_the_episode_and_gives_reward_and_parts(service, reward):
    service.replies = [{"reward": 0.5, "parts": {"style": 1, "length": -2.0}}]
    score = await reward().score(PROMPT, EPISODE, "k1")
    assert (score.value, score.parts) == (0.5, {"style": 1.0, "length": -2.0})
    [body] = service.bodies
    assert (body["prompt"], body["index"], body["answer"]) == ("3 + 4 =", 7, "7")
    assert [message["role"] for message in body["messages"]] == ["user", "assistant"]
    assert service.paths == ["/score"]


async def test_service_may_leave_an_answer_open(service, reward):
    service.replies = [{"reward": None, "parts": {"style": 1}}]
    assert (await reward().score(PROMPT, EPISODE, "k1")).is_left_open


@pytest.mark.parametrize("statuses", [(429, 500), (503, 408)])
async def test_transient_failure_is_retried_with_the_same_key(service, reward, statuses):
    service.replies = [*statuses, {"reward": 1.0}]
    assert (await reward().score(PROMPT, EPISODE, "k1")).value == 1.0
    assert [headers["idempotency-key"] for headers in service.headers] == ["k1"] * 3
    assert service.bodies[0] == service.bodies[2]
    first, second, third = service.times
    assert second - first > 0.9 * FIRST_PAUSE_S / 2 and third - second > 0.9 * FIRST_PAUSE_S


async def test_compressed_answer_is_not_expanded(service, reward):
    content = gzip.compress(b'{"reward": 1}')
    service.replies = [Response(content, headers={"Content-Encoding": "gzip"})]
    with pytest.raises(RemoteFailure, match="the response has Content-Encoding 'gzip', unasked"):
        await reward(max_retries=0).score(PROMPT, EPISODE, "k")
    assert service.headers[0]["accept-encoding"] == "identity"


async def test_retry_after_that_no_clock_has_is_ignored(service, reward):
    value = "Mon, 01 Jan 2020 00:00:00 +99999999999999999"
    service.replies = [Response(status_code=429, headers={"Retry-After": value}), {"reward": 1}]
    assert (await reward().score(PROMPT, EPISODE, "k")).value == 1.0


async def test_refusal_is_not_retried(service, reward):
    service.replies = [422]
    with pytest.raises(RemoteFailure, match="HTTP 422: out of order"):
        await reward().score(PROMPT, EPISODE, "k")
    assert len(service.bodies) == 1


@pytest.mark.parametrize("as_date", [False, True])
async def test_service_retry_after_is_respected(service, reward, as_date):
    since_epoch = time.time() - time.monotonic()
    due = int(time.time()) + 2
    value = formatdate(due, usegmt=True) if as_date else "1.2"
    service.replies = [Response(status_code=429, headers={"Retry-After": value}), {"reward": 1}]
    await reward().score(PROMPT, EPISODE, "k")
    # A busy machine may ask for the first time when the date has almost come.
    earliest = due - since_epoch if as_date else service.times[0] + 1.2
    assert service.times[1] > earliest - 0.1


async def test_service_that_hangs_is_given_up_in_time(service, reward):
    service.delay_s = 30
    started = time.monotonic()
    with pytest.raises(RemoteFailure, match=r"no response within 0.3 s \(2 attempts\)"):
        await reward(timeout_s=0.3, max_retries=1).score(PROMPT, EPISODE, "k")
    assert time.monotonic() - started < service.delay_s


async def test_service_that_trickles_is_given_up_in_time(service, reward):
    async def trickle():
        while True:
            yield b" "
            await asyncio.sleep(0.05)

    service.replies = [StreamingResponse(trickle())]
    with pytest.raises(RemoteFailure, match=r"no response within 0\.4 s"):
        await reward(timeout_s=0.4, max_retries=0).score(PROMPT, EPISODE, "k")


async def test_calls_are_rate_limited(service, reward):
    limited = reward(max_per_second=20, timeout_s=60)
    await asyncio.gather(*(limited.score(PROMPT, EPISODE, str(i)) for i in range(21)))
    took = max(service.times) - min(service.times)
    assert took > 0.5  # it is 1 s, but for what a busy machine delays the first


async def test_concurrent_calls_are_limited(service, reward):
    service.delay_s = 0.05
    one = reward(timeout_s=60)
    await asyncio.gather(*(one.score(PROMPT, EPISODE, str(i)) for i in range(150)))
    assert service.most_open <= 64 and len(service.bodies) == 150


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ({}, 'its "reward" is not a usable number'),
        ({"reward": "high"}, 'its "reward" is not a usable number'),
        ({"reward": True}, 'its "reward" is not a usable number'),
        (Response('{"reward": NaN}'), 'its "reward" is not a usable number'),
        (Response('{"reward": 1' + 400 * "0" + "}"), 'its "reward" is not a usable number'),
        ({"reward": 1, "parts": {"a": None}}, r'its "parts.a" is not a usable number'),
        ({"reward": 1, "parts": [1]}, 'its "parts" is not an object'),
        # Without its own limits such a name is what the trainer or UTF-8 cannot read.
        ({"reward": 1, "parts": {"x" * 70_000: 1}}, "the name of a part has at most 200"),
        (Response(r'{"reward": 1, "parts": {"\ud800": 1}}'), "'.ud800': the name of a part has"),
        ({"reward": 1, "parts": {str(i): i for i in range(101)}}, "at most 100 parts, not 101"),
        (Response('{"reward": 1, "more": [' + 100_000 * "[]," + "1]}"), "100000 JSON values"),
        (Response("<html>"), "the response is not JSON"),
        (Response("[1]"), "the response is not a JSON object"),
    ],
)
async def test_answer_without_a_usable_reward_is_reported(service, reward, reply, message):
    service.replies = [reply]
    with pytest.raises(RemoteFailure, match=message):
        await reward().score(PROMPT, EPISODE, "k")
    assert len(service.bodies) == 1


# Keys --------------------------------------------------------------------------------------------

KEY = "LEASH_TEST_REWARD_KEY"


@pytest.fixture
def key():
    os.environ[KEY] = "sk-very-secret"
    yield "sk-very-secret"
    del os.environ[KEY]


async def test_key_is_sent_and_never_logged(service, reward, key, caplog):
    service.replies = [lambda body: PlainTextResponse(f"bad key {key}", 401)]
    url = service.url.replace("//", "//user:pass-word@") + "/score?token=in-the-query"
    with caplog.at_level("DEBUG", "rollout_pool"), pytest.raises(RemoteFailure) as caught:
        await reward(url=url, api_key_env=KEY).score(PROMPT, EPISODE, "k")
    message = str(caught.value) + caplog.text
    for secret in (key, "pass-word", "in-the-query"):
        assert secret not in message
    assert "HTTP 401: bad key (key)" in message
    service.replies = [{"reward": 1.0}]
    await reward(api_key_env=KEY).score(PROMPT, EPISODE, "k")
    assert service.headers[-1]["authorization"] == f"Bearer {key}"


async def test_impossible_settings_are_refused_at_once(reward):
    with pytest.raises(ValueError, match=r"task\.rewards\.mine\.api_key_env='NOT_THERE'"):
        reward(api_key_env="NOT_THERE")
    with pytest.raises(ValueError, match=r"task\.rewards\.\*\.url='ftp://host/a': must be"):
        reward(url="ftp://user:secret@host/a?b")


async def test_proxy_of_the_environment_is_for_outside_services(service, reward, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert (await reward().score(PROMPT, EPISODE, "k1")).value == 1.0
    for outside in ("http://judge.example/", "http://9.9.9.9:81/"):
        with pytest.raises(RemoteFailure, match="ConnectError"):
            await reward(url=outside, max_retries=0).score(PROMPT, EPISODE, "k2")
    # The service stands for the proxy, and has no such path as that whole address.
    monkeypatch.setenv("http_proxy", service.url)
    with pytest.raises(RemoteFailure, match="HTTP 404"):
        await reward(url="http://judge.example/score").score(PROMPT, EPISODE, "k3")


async def test_cancelled_call_leaves_nothing_behind(service, reward):
    service.delay_s = 30
    asking = asyncio.create_task(reward(timeout_s=60).score(PROMPT, EPISODE, "k"))
    await until(lambda: service.bodies)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking


# Judge -------------------------------------------------------------------------------------------


def says(text: str) -> dict:
    return {"choices": [{"message": {"role": "assistant", "content": text}}]}


@pytest.fixture
def judge(make):
    return partial(make, Judge, "/v1/", model="m")


async def test_judge_gets_the_configured_prompt(service, judge):
    service.replies = [says("Nearly. Score: 0.75")]
    one = judge(prompt="Q {prompt} A {answer} S {solution} {other}")
    prompt = replace(PROMPT, text="3+4 {answer}")
    answered = Message(role="assistant", content="{solution}")
    score = await one.score(prompt, replace(EPISODE, messages=(answered,)), "k")
    assert score.value == 0.75
    [body] = service.bodies
    assert service.paths == ["/v1/chat/completions"] and body["model"] == "m"
    [message] = body["messages"]
    assert message == {"role": "user", "content": "Q 3+4 {answer} A {solution} S S7 {other}"}


async def test_judge_prompt_defaults_to_a_score_from_0_to_1(service, judge):
    service.replies = [says("Fine.\n\nScore: 1")]
    assert (await judge().score(PROMPT, EPISODE, "k")).value == 1.0
    content = service.bodies[0]["messages"][0]["content"]
    assert "Question:\n3 + 4 =" in content and "Answer:\n7" in content and "S7" not in content
    assert "from 0 (useless) to 1" in content


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("score: 0.5", 0.5),
        ("Of 3 points it gets 2. Score: 7/10", 7.0),
        ("**Score:** 8", 8.0),
        ("Score: 3 at first, but on balance score: 4 of 10 things are right", 4.0),
        ("I give it 4, no, 6.", 6.0),
        ("9 / 10", 9.0),
        ("-1.5", -1.5),
        ("Score: -1", -1.0),
        ("**Score:** -0.5/1", -0.5),
        ("Score - 5", 5.0),
        ("the score is .25", 0.25),
    ],
)
def test_judgement_becomes_a_number(text, score):
    assert parse_score(text) == score


def test_endless_judgement_does_not_hold_the_event_loop():
    started = time.monotonic()
    assert parse_score(2_000_000 * "score is " + "score: 4") == 4.0  # 20 s to search
    assert time.monotonic() - started < 5


@pytest.mark.parametrize(
    "reply",
    [
        *(says("No idea."), says(""), says("Score: " + 400 * "9"), {"choices": []}, {"error": 1}),
        *(says("Score: 7"), says("Score: -0.1"), says("Score: 7/0"), {"choices": [1]}),
        {"choices": [{**says("1. The answer")["choices"][0], "finish_reason": "length"}]},
    ],
)
async def test_judge_without_a_score_is_reported(service, judge, reply):
    service.replies = [reply]
    with pytest.raises(RemoteFailure, match="the judge"):
        await judge().score(PROMPT, EPISODE, "k")


async def test_prompt_of_ones_own_may_ask_a_judge_for_any_number(service, judge):
    service.replies = [says("Score: 7/10"), says("Score: 7/10")]
    assert (await judge().score(PROMPT, EPISODE, "k")).value == 0.7, "it asks for a share"
    assert (await judge(prompt="0 to 10: {answer}").score(PROMPT, EPISODE, "k")).value == 7.0


RUBRIC = {
    "right": Criterion(text="Is the sum right?", weight=3.0),
    "short": Criterion(text="No word too many."),
}


async def test_judge_scores_each_criterion_of_a_rubric_in_one_call(service, judge):
    scores = '```json\n{"short": 0, "right": 1.0}\n```'
    service.replies = [says(f'<think>Maybe {{"right": 0}}?</think>\n{scores}')]
    score = await judge(rubric=RUBRIC).score(PROMPT, EPISODE, "k")
    assert (score.value, score.parts) == (0.75, {"right": 1.0, "short": 0.0})
    [body] = service.bodies
    content = body["messages"][0]["content"]
    assert "Question:\n3 + 4 =" in content and "Answer:\n7" in content
    assert "- right: Is the sum right?\n- short: No word too many.\n" in content
    assert content.endswith('as in {"right": 0.5, "short": 0.5}')


async def test_criteria_stand_where_the_prompt_of_a_judge_says(service, judge):
    service.replies = [says('{"right": 0.5, "short": 1}')]
    score = await judge(rubric=RUBRIC, prompt="{rubric} {answer}").score(PROMPT, EPISODE, "k")
    assert score.value == 0.625
    content = service.bodies[0]["messages"][0]["content"]
    assert "- right: Is the sum right?" in content and content.endswith(" 7")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("right: 1, short: 1", "must be one JSON object"),
        ("[1, 1]", "must be one JSON object"),
        ('{"right": 1, "short": 1} {"right": 0}', "must be one JSON object"),
        ('{"right": 1' + 5000 * "0" + ', "short": 1}', "must be one JSON object"),
        (10_000 * '{"right":' + "1" + 10_000 * "}", "must be one JSON object"),
        ("{}", r"must score right, short, each once, not \[\]"),
        ('{"right": 1}', r"must score right, short, each once, not \['right'\]"),
        ('{"right": 1, "short": 1, "kind": 1}', "each once, not .*'kind'"),
        ('{"right": 0, "short": 1, "right": 1}', "each once, not .*'short', 'right'"),
        ('{"right": 1.01, "short": 1}', r"score of right must be from 0 to 1: '1\.01'"),
        ('{"right": 1, "short": -1}', "score of short must be from 0 to 1"),
        ('{"right": NaN, "short": 1}', "score of right must be from 0 to 1: 'nan'"),
        ('{"right": true, "short": 1}', "score of right must be from 0 to 1: 'True'"),
        ('{"right": "1", "short": 1}', "score of right must be from 0 to 1"),
        ('{"right": {"x": 1}, "short": 1}', "score of right must be from 0 to 1"),
    ],
)
async def test_reply_that_is_not_the_rubric_s_is_reported(service, judge, text, message):
    service.replies = [says(text)]
    with pytest.raises(RemoteFailure, match=f"the judge.*{message}"):
        await judge(rubric=RUBRIC).score(PROMPT, EPISODE, "k")


# Teacher -----------------------------------------------------------------------------------------


def logprob_of(token: int, before: int) -> float:
    """The teacher's, which only looks at one token before."""
    return -0.25 * token - 0.001 * before


def echo(body: dict) -> dict:
    """As SGLang and vLLM answer: the prompt's, none for its first token, then the sampled ones."""
    tokens = body["prompt"]
    assert body["echo"] and body["logprobs"] >= 1
    logprobs = [None, *(logprob_of(t, b) for b, t in pairwise(tokens))]
    sampled = [-0.7] * body["max_tokens"]
    texts = ["x"] * (len(tokens) + len(sampled))
    return {"choices": [{"logprobs": {"tokens": texts, "token_logprobs": logprobs + sampled}}]}


def episode_of(*branches: list[int]) -> Episode:
    return replace(EPISODE, branches=[*map(unmasked_branch, branches)])


@pytest.fixture
def teacher(make):
    return make(Teacher, "/v1", model="big", max_retries=1)


async def test_each_token_gets_the_teachers_log_probability_given_those_before(service, teacher):
    service.replies = [echo]
    first, second = (await teacher.score(PROMPT, episode_of([5, 6, 7, 10], [3]), "k")).columns
    column = first["teacher_logprobs"]
    assert column.dtype == np.float32 and column.shape == (4,)
    expected = [0.0, logprob_of(6, 5), logprob_of(7, 6), logprob_of(10, 7)]
    assert column.tolist() == pytest.approx(expected)
    assert second["teacher_logprobs"].tolist() == [0.0]
    assert set(service.paths) == {"/v1/completions"}
    assert service.bodies[0]["model"] == "big"
    keys = {headers["idempotency-key"] for headers in service.headers}
    assert keys == {"k-0", "k-1"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda given: given[-1:], "gave 1 log-probabilities for 3 tokens: its server must echo"),
        (lambda given: [None, None, *given[2:]], "omitted the log-probabilities"),
        (lambda given: [None, 0.5, *given[2:]], "invalid log-probabilities"),
        (lambda given: [None, -(10**400), *given[2:]], "invalid log-probabilities"),
        (lambda given: [None, "x", *given[2:]], "omitted the log-probabilities"),
        (lambda given: None, "gave 0 log-probabilities"),
    ],
)
async def test_incomplete_teacher_answer_is_reported(service, teacher, change, message):
    def reply(body: dict) -> dict:
        answer = echo(body)
        logprobs = answer["choices"][0]["logprobs"]
        logprobs["token_logprobs"] = change(logprobs["token_logprobs"])
        return answer

    service.replies = [reply]
    with pytest.raises(RemoteFailure, match=message):
        await teacher.score(PROMPT, episode_of([5, 6, 7]), "k")


async def test_certain_token_may_be_above_zero_by_rounding(service, teacher):
    def reply(body: dict) -> dict:
        answer = echo(body)
        answer["choices"][0]["logprobs"]["token_logprobs"][1] = 6e-8
        return answer

    service.replies = [reply]
    found = await teacher.score(PROMPT, episode_of([5, 6, 7]), "k")
    assert found.columns[0]["teacher_logprobs"][1] == 0


def sglang(body: dict) -> dict:
    """As an SGLang server answers: triples of log-probability, id and text."""
    tokens = body["input_ids"]
    assert body["return_logprob"] and body["logprob_start_len"] == 0
    logprobs = [None, *(logprob_of(t, b) for b, t in pairwise(tokens))]
    texts = [bytes([t]).decode("latin-1") if t < 256 else "" for t in tokens]
    told = texts if body["return_text_in_logprobs"] else [None] * len(tokens)
    return {"meta_info": {"input_token_logprobs": list(zip(logprobs, tokens, told, strict=True))}}


async def test_teacher_may_be_an_sglang_server(service, make):
    service.replies = [sglang]
    [column] = (await make(Teacher).score(PROMPT, episode_of([5, 6, 7]), "k")).columns
    expected = [0.0, logprob_of(6, 5), logprob_of(7, 6)]
    assert column["teacher_logprobs"].tolist() == pytest.approx(expected)
    assert service.paths == ["/generate"]
    service.replies = [lambda body: sglang({**body, "input_ids": [5, 6, 8]})]
    with pytest.raises(RemoteFailure, match="of other tokens"):
        await make(Teacher).score(PROMPT, episode_of([5, 6, 7]), "k")


def without_texts(body: dict) -> Response | dict:
    """A server without a tokenizer."""
    if body["return_text_in_logprobs"]:
        return PlainTextResponse("no tokenizer", 400)
    return sglang(body)


def of_few_tokens(body: dict) -> Response | dict:
    if max(body["input_ids"]) > 255:
        return PlainTextResponse("an id is out of the vocabulary", 400)
    return sglang(body)


def of_other_tokens(body: dict) -> dict:
    answer = sglang(body)
    rows = answer["meta_info"]["input_token_logprobs"]
    answer["meta_info"]["input_token_logprobs"] = [(p, t, "other") for p, t, _ in rows]
    return answer


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (sglang, None),
        (without_texts, None),
        (of_few_tokens, "no log-probabilities .* out of the vocabulary"),
        (of_other_tokens, "takes the student's tokens for others: .*'other'.*\\['T'"),
        (503, r"HTTP 503 \(1 attempt\); start the teacher's server"),
    ],
)
async def test_teacher_is_tried_before_a_run_starts(service, reply, message):
    service.replies = [reply]
    config = RewardConfig(kind=RewardKind.teacher, url=service.url, timeout_s=60, max_retries=0)
    if message is None:
        await Teacher.probe("mine", config, byte_tokenizer())
        # The last id that the student may write.
        assert service.bodies[-1]["input_ids"][-1] == len(byte_tokenizer()) - 1
        return
    with pytest.raises(ValueError, match=rf"^task\.rewards\.mine\.url='http.*{message}"):
        await Teacher.probe("mine", config, byte_tokenizer())


async def test_teacher_that_cannot_be_reached_is_told_before_a_run_starts():
    url = "http://127.0.0.1:1"
    config = RewardConfig(kind=RewardKind.teacher, url=url, timeout_s=60, max_retries=0)
    with pytest.raises(ValueError, match=r"mine\.url='http://127\.0\.0\.1:1'.*ConnectError"):
        await Teacher.probe("mine", config, byte_tokenizer())


# Sandboxes ---------------------------------------------------------------------------------------

DOUBLE = "print(2 * int(input()))"
LIMITS = SandboxLimits(wall_time_s=3.0, memory_bytes=64 * 2**20)


def ended(stdout: str = "", return_code: int | None = 0, status: str = "Finished", **more) -> dict:
    """An answer of SandboxFusion."""
    result = {
        "status": status,
        "return_code": return_code,
        "stdout": stdout,
        "stderr": "",
        "execution_time": 0.05,
    }
    is_good = status == "Finished" and return_code == 0
    return {
        "status": "Success" if is_good else "Failed",
        "message": "",
        "compile_result": None,
        "run_result": {**result, **more},
        "executor_pod_name": None,
        "files": {},
    }


def double(body: dict) -> dict:
    return ended(f"{2 * int(body['stdin'])}\n")


@pytest.fixture
def exercises(tmp_path) -> CodeTask:
    tests = [{"input": str(n), "output": str(2 * n)} for n in (1, 2, 3, 4)]
    asserts = {"assert": "assert f(1) == 2"}
    lines = [{"prompt": "Double", "tests": tests}, {"prompt": "f", "tests": asserts}]
    path = tmp_path / "exercises.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in [*lines, lines[0]]))
    return CodeTask(TaskConfig(kind=TaskKind.code, path=str(path), eval_size=1))


@pytest.fixture
async def make_sandbox(service):
    """Makes the client of a sandbox service; each is closed."""
    made = []

    def make(**settings) -> RemoteSandbox:
        made.append(RemoteSandbox("tests", service_reward(**{"url": service.url, **settings})))
        return made[-1]

    yield make
    for one in made:
        await one.close()


def service_reward(**settings) -> RewardConfig:
    return RewardConfig(kind=RewardKind.code_tests, **settings)


@pytest.fixture
def score(service, exercises):
    """Scores a program by the exercise with this prompt."""

    async def score(code: str = DOUBLE, prompt: str = "Double", **settings) -> float:
        [asked] = [one for one in map(exercises.example, range(2)) if one.text == prompt]
        messages = (Message(role="assistant", content=f"```python\n{code}\n```"),)
        tests = CodeTests("tests", service_reward(**{"url": service.url, **settings}), exercises)
        try:
            scored = await tests.score(asked, replace(EPISODE, messages=messages), "k")
        finally:
            await tests.close()
        return scored.value

    return score


async def test_sandbox_is_sent_each_test_and_its_answers_are_scored(service, score):
    service.replies = [double]
    assert await score(wall_time_s=3, compile_time_s=4, memory_bytes=64 * 2**20 + 1) == 1.0
    assert [body.pop("stdin") for body in service.bodies] == ["1", "2", "3", "4"]
    assert service.bodies[0] == {
        "code": f"{DOUBLE}\n",
        "language": "python",
        "run_timeout": 3,
        "compile_timeout": 4,
        "memory_limit_MB": 65,
    }
    assert set(service.paths) == {"/run_code"}
    service.reset()
    service.replies = [ended("2"), ended("5"), ended("6"), ended("8")]
    assert await score(url=f"{service.url}/run_code") == 0.75
    assert set(service.paths) == {"/run_code"}
    service.reset()
    service.replies = [ended("2"), ended("5")]
    assert await score(all_or_nothing=True) == 0.0
    assert len(service.bodies) == 2


async def test_service_is_told_its_own_name_of_the_language(service, make_sandbox):
    service.replies = [ended("2")]
    sandbox = make_sandbox(languages=["nodejs", "js"], api_key_env="HOME")
    await sandbox.run("console.log(2)", limits=LIMITS)
    assert service.bodies[0]["language"] == "nodejs"
    assert service.headers[0]["authorization"] == f"Bearer {os.environ['HOME']}"


NOT_COMPILED = {
    **ended(return_code=1),
    "compile_result": {"status": "Finished", "return_code": 1, "stderr": "x.c:1: error: no"},
    "run_result": None,
}


@pytest.mark.parametrize(
    ("answer", "reason", "num_tests"),
    [
        (ended("2", return_code=1, stderr="ValueError"), "exit", 4),
        (ended("2", return_code=None, status="Error"), "exit", 4),
        (ended("2", return_code=None, status="TimeLimitExceeded"), "wall_time", 2),
        (NOT_COMPILED, "compile", 1),
    ],
)
async def test_failed_program_scores_0(service, make_sandbox, score, answer, reason, num_tests):
    service.replies = [answer]
    assert (await make_sandbox().run(DOUBLE, limits=LIMITS)).reason == reason
    service.bodies.clear()
    assert await score() == 0.0
    assert len(service.bodies) == num_tests


async def test_tests_share_the_time_that_their_programs_ran(service, score):
    service.replies = [ended("2", execution_time=2.0), ended("4", execution_time=2.0), double]
    assert await score(timeout_s=4, wall_time_s=2, compile_time_s=2) == 0.5
    assert len(service.bodies) == 2


ANSWERS_TO_RETRY = [429, 503, {"status": "SandboxError", "message": "no disk"}]


@pytest.mark.parametrize("answer", ANSWERS_TO_RETRY)
async def test_failure_of_the_sandbox_is_retried_and_is_not_the_programs(service, score, answer):
    service.replies = [answer, double]
    assert await score() == 1.0
    service.replies = [answer]
    what = "SandboxError: no disk" if isinstance(answer, dict) else f"HTTP {answer}"
    with pytest.raises(RemoteFailure) as failure:
        await score(max_retries=1)
    assert str(failure.value) == (
        f"task.rewards.tests.url: {service.url}/run_code: {what} (2 attempts); start the sandbox "
        "there (make sandbox), or correct task.rewards.tests.url, api_key_env or languages"
    )


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ({}, "not that of a sandbox: Object missing required field `status`"),
        ({"status": "Success"}, "has no run_result"),
        ({"status": "Done", "run_result": None}, "Invalid enum value 'Done'"),
        ({"status": "Success", "run_result": {"status": 7}}, "Expected `str`, got `int`"),
        (401, "HTTP 401"),
    ],
)
async def test_answer_of_another_form_is_no_score(service, score, answer, why):
    service.replies = [answer]
    with pytest.raises(RemoteFailure, match=f"task.rewards.tests.url: .*{why}"):
        await score()
    assert len(service.bodies) == 1


async def test_episode_of_a_dead_sandbox_is_unscored(exercises):
    # Port 9 is reserved; nothing listens there.
    url = "http://127.0.0.1:9"
    reward = service_reward(url=url, max_retries=0)
    config = TaskConfig(kind=TaskKind.code, path="x", rewards={"tests": reward})
    assert not needs_processes(config)
    scorer = EpisodeScorer(config, task=exercises, pool=None)
    scored = await scorer.score(exercises.example(0), EPISODE)
    await scorer.close()
    assert scored.is_unscored and scored.reward == 0.0
    assert re.match(rf"task.rewards.tests.url: {url}/run_code: ConnectE", scored.failures["tests"])
    with pytest.raises(ValueError, match=rf"task.rewards.tests.url: {url}/run_code: ConnectE"):
        await check_remote_sandbox("tests", reward, LIMITS)


async def test_statements_pass_only_if_they_ran_to_their_end(service, score):
    def run(body: dict) -> dict:
        assert body["code"][: body["statements_at"]] == "def f(x): return 2 * x\n"
        [word] = re.findall(r"write\('(\w+)'\)", body["code"])
        assert "assert f(1) == 2\n" in body["code"]
        return ended(f"printed\n{word}")

    service.replies = [run]
    assert await score("def f(x): return 2 * x", "f") == 1.0
    service.replies = [ended("it ended before")]
    assert await score("def f(x): return 2 * x", "f") == 0.0


async def test_service_that_fails_an_empty_program_is_refused(service):
    service.replies = [ended(return_code=1, stderr="MemoryError")]
    reward = service_reward(url=service.url)
    with pytest.raises(ValueError, match=r"tests\.url=.*an empty program fails .*: MemoryError"):
        await check_remote_sandbox("tests", reward, LIMITS)
    service.replies = [ended()]
    await check_remote_sandbox("tests", reward, LIMITS)


def test_sandbox_needs_a_task_with_tests():
    with pytest.raises(ValueError, match=r"tests\.kind=code_tests: the prompts of solved have no"):
        CodeTests("tests", service_reward(url="http://127.0.0.1:9"), Solved())
