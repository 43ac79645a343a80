"""Tools, and the environment that answers the model's calls."""

from __future__ import annotations

import asyncio
import functools
import threading
from typing import Any, Literal

import pytest

from configs.choices import TaskKind
from configs.rollout_schema import TaskConfig
from rollout_pool.episodes.conversation import Completion, ToolCall
from rollout_pool.episodes.environment import Observation, SingleTurn, Step
from rollout_pool.episodes.tools import MAX_CALLS, ToolEnv, function_tool, python_tool, shorten
from rollout_pool.tasks.env_episodes import environment_factory, load_tools
from rollout_pool.tasks.registry import build_task
from rollout_pool.tasks.task import Prompt


def add(a: int, b: int = 1) -> int:
    """Adds two whole numbers."""
    return a + b


async def slow(seconds: float) -> str:
    """Waits."""
    await asyncio.sleep(seconds)
    return f"waited {seconds:g} s"


def broken(text: str) -> str:
    """Fails."""
    raise KeyError(text)


def call(name, call_id="c1", **arguments):
    return ToolCall(call_id=call_id, name=name, arguments=arguments)


def calling(*calls, bad_call=None):
    return Completion(text="...", content="", tool_calls=calls, bad_call=bad_call)


def answered(text):
    return Completion(text=text, content=text)


def env_with(*functions, call_timeout_s=60.0):
    tools = [function_tool(function, "task.tools") for function in functions]
    return ToolEnv(SingleTurn("3 + 4?"), tools, call_timeout_s=call_timeout_s)


async def results(env, *calls, bad_call=None):
    step = await env.step(calling(*calls, bad_call=bad_call))
    assert step.observation is not None and step.reward is None
    return [message.content for message in step.observation.messages]


async def test_call_is_answered_and_an_answer_without_one_ends_the_episode():
    env = env_with(add)
    first = await env.reset()
    assert first.messages[-1].content == "3 + 4?"
    assert [tool.name for tool in first.tools] == ["add"]
    step = await env.step(calling(call("add", "c7", a=3, b=4)))
    [message] = step.observation.messages
    assert (message.role, message.content) == ("tool", "7")
    assert (message.tool_call_id, message.name) == ("c7", "add")
    end = await env.step(answered("7"))
    assert end.observation is None
    assert end.info == {"tool_calls": 1.0, "tool_errors": 0.0}
    await env.close()


async def test_calls_of_one_answer_run_concurrently_and_keep_their_order():
    others = asyncio.Event()

    async def first() -> str:
        """Ends after the last has begun."""
        await others.wait()
        return "1"

    async def last() -> None:
        """Lets the first end."""
        others.set()

    env = env_with(first, add, last)
    await env.reset()
    said = await results(env, call("first"), call("add", a=1), call("last"))
    assert said[:2] == ["1", "2"] and len(said) == 3


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            call("multiply", a=1),
            "error: there is no tool named 'multiply'; the tools are add, broken, s",
        ),
        (call("add", b=2), "error: add: missing a required argument: 'a'"),
        (call("add", a=1, c=2), "error: add: got an unexpected keyword argument 'c'"),
        (call("add", a="x"), "error: TypeError: can only concatenate str"),
        (call("broken", text="no"), "error: KeyError: 'no'"),
        (call("slow", seconds=600), "error: no result within 2 s"),
    ],
)
async def test_model_sees_the_error_of_its_call(asked, message):
    env = env_with(add, broken, slow, call_timeout_s=2.0)
    await env.reset()
    [said] = await results(env, asked)
    assert said.startswith(message)
    assert (await env.step(answered("well"))).info == {"tool_calls": 1.0, "tool_errors": 1.0}


async def test_model_sees_a_bad_call_beside_the_results_of_good_ones():
    env = env_with(add)
    await env.reset()
    said = await results(env, call("add", a=1), bad_call="no closing brace")
    assert said[0] == "2"
    assert said[1].startswith("error: invalid tool call: no closing brace.")
    [alone] = await results(env, bad_call="no name")
    assert "no name" in alone


async def test_tools_that_hang_take_no_thread_that_the_worker_needs():
    is_over = threading.Event()

    def hang() -> str:
        """Hangs."""
        is_over.wait(300)
        return "late"

    more_than_asyncio_has = 33
    envs = [env_with(hang, call_timeout_s=0.1) for _ in range(more_than_asyncio_has)]
    try:
        shown = await asyncio.gather(*(results(env, call("hang")) for env in envs))
        assert {text for [text] in shown} == {"error: no result within 0.1 s"}
        async with asyncio.timeout(60):
            assert await asyncio.to_thread(lambda: "soon") == "soon"
    finally:
        is_over.set()


async def test_calls_of_one_answer_are_limited():
    env = env_with(add)
    await env.reset()
    said = await results(env, *(call("add", a=i) for i in range(MAX_CALLS + 1)))
    assert said[-2:] == [
        str(MAX_CALLS),
        f"error: only the first {MAX_CALLS} calls of an answer are run",
    ]


class Counting:
    """Asks twice, and has a word to say on each answer."""

    def __init__(self):
        self.turn = 0

    async def reset(self):
        return Observation(messages=())

    async def step(self, completion):
        self.turn += 1
        more = Observation(messages=()) if self.turn < 2 else None
        return Step(observation=more, reward=0.5, info={"turns": self.turn})

    async def close(self):
        self.turn = -1


async def test_environment_of_several_turns_sees_only_answers_without_calls():
    inner = Counting()
    env = ToolEnv(inner, [function_tool(add, "task.tools")], call_timeout_s=60)
    await env.reset()
    assert (await env.step(answered("a"))).reward == 0.5
    await results(env, call("add", a=1))
    assert inner.turn == 1
    last = await env.step(answered("b"))
    assert last.observation is None
    assert last.info == {"turns": 2, "tool_calls": 1.0, "tool_errors": 0.0}
    await env.close()
    assert inner.turn == -1


def test_signature_becomes_the_schema_of_a_tool():
    def search(
        words: list[str],
        where: Literal["web", "notes"] = "web",
        limit: int | None = None,
        *,
        options: dict[str, float] | None = None,
        rest: Any = None,
        plain="x",
    ) -> None:
        """Looks for words.

        More on it.
        """

    spec = function_tool(search, "task.tools").spec
    assert spec.name == "search"
    assert spec.description == "Looks for words.\n\nMore on it."
    number = {"type": "number"}
    assert spec.parameters == {
        "type": "object",
        "properties": {
            "words": {"type": "array", "items": {"type": "string"}},
            "where": {"enum": ["web", "notes"]},
            "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "options": {
                "anyOf": [{"type": "object", "additionalProperties": number}, {"type": "null"}]
            },
            "rest": {},
            "plain": {"type": "string"},
        },
        "required": ["words"],
    }


def test_function_with_a_cache_is_a_tool():
    assert function_tool(functools.cache(add), "task.tools").spec.parameters["required"] == ["a"]


def test_function_unfit_as_a_tool_is_refused():
    def silent(a: int) -> int:
        return a

    def odd(a: bytes) -> int:
        """Odd."""
        return len(a)

    def many(*a: int) -> int:
        """Many."""
        return len(a)

    def unknown(a: Nowhere) -> int:  # noqa: F821
        """Unknown."""
        return a

    for function, message in (
        (Counting, r"task.tools: must be a function, not <class '.*Counting'>; write one with def"),
        (functools.partial(add, 1), r"task.tools: must be a function, not functools.partial\("),
        (unknown, r"task.tools: its arguments could not be read \(name 'Nowhere' is not defined\)"),
        (getattr, r"task.tools: its arguments could not be read \(no signature found"),
        (silent, "task.tools: the function needs a docstring"),
        (odd, "argument 'a' is annotated as <class 'bytes'>, which has no JSON type"),
        (many, "argument 'a' must be a keyword argument"),
    ):
        with pytest.raises(ValueError, match=message):
            function_tool(function, "task.tools")


async def test_python_tool_shows_what_a_program_printed_and_how_it_ended():
    run = python_tool().run
    assert await run({"code": "print(6 * 7)"}) == "42\n"
    assert await run({"code": "x = 1"}) == "(no output)"
    failed = await run({"code": "print('so far')\n1 / 0"})
    assert failed.startswith("so far\n") and "ZeroDivisionError" in failed
    assert "it ended with an error (exit code 1)" in failed
    assert "left out" in await run({"code": "print('x' * 100_000)"})


async def test_bad_call_of_the_python_tool_says_what_it_takes():
    env = ToolEnv(SingleTurn("?"), [python_tool()], call_timeout_s=60)
    await env.reset()
    said = await results(env, call("python", code=3), call("python", code="1", stdin=""))
    assert said == ['error: python takes one argument, "code", a string'] * 2


def test_long_text_is_cut_in_the_middle():
    assert shorten("a" * 10, 10) == "a" * 10
    assert shorten("a" * 6 + "b" * 6, 4) == "aa\n... 8 characters left out ...\nbb"


def tool_config(tmp_path, tools, **changes):
    path = tmp_path / "my_tools.py"
    path.write_text(
        "def double(x: int) -> int:\n"
        "    'Twice x.'\n"
        "    return 2 * x\n"
        "def env(config, prompt):\n"
        "    from rollout_pool import SingleTurn\n"
        "    return SingleTurn(f'{config.name}: {prompt.text}')\n"
    )
    names = [name.replace("FILE", str(path)) for name in tools]
    changes = {
        key: value.replace("FILE", str(path)) if key == "env" else value
        for key, value in changes.items()
    }
    return TaskConfig(
        kind=TaskKind.reasoning_gym, eval_size=5, **{"max_turns": 3, "tools": names, **changes}
    )


async def test_settings_choose_the_environment_and_its_tools(tmp_path):
    config = tool_config(tmp_path, ["python", "FILE:double"], env="FILE:env")
    make = environment_factory(config, build_task(config))
    env = make(Prompt(index=0, is_held_out=False, text="1 + 1 ="))
    first = await env.reset()
    assert first.messages[-1].content == "chain_sum: 1 + 1 ="
    assert [tool.name for tool in first.tools] == ["python", "double"]
    assert await results(env, call("double", x=21)) == ["42"]


async def test_environment_is_the_tasks_by_default():
    task = build_task(TaskConfig(eval_size=5))
    prompt = task.example(0)
    env = environment_factory(TaskConfig(eval_size=5), task)(prompt)
    assert (await env.reset()).messages[-1].content == prompt.text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"tools": ["pyton"]},
            r"task.tools=\['pyton'\]: must be python, module:name or file.py:name",
        ),
        ({"tools": ["FILE:triple"]}, r"task.tools='.*:triple': .*has nothing named 'triple'"),
        ({"tools": ["FILE:double"] * 2}, r"there is a tool named 'double' already"),
        ({"tools": ["python"], "max_turns": 1}, r"task.max_turns=1: with task.tools a call and t"),
        ({"tools": [], "env": "FILE:no"}, r"task.env='.*:no': .*has nothing named 'no'"),
    ],
)
def test_bad_setting_is_named(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        config = tool_config(tmp_path, **changes)
        environment_factory(config, build_task(TaskConfig(eval_size=5)))


def test_empty_list_of_tools_adds_no_tools():
    assert load_tools([]) == []


def ends_at_once(how: str) -> str:
    """Ends."""
    raise {"exit": SystemExit(2), "stop": StopIteration("dry")}[how]


async def ends(how: str) -> str:
    """Ends."""
    raise {"exit": SystemExit(2), "cancel": asyncio.CancelledError()}[how]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (call("ends_at_once", how="exit"), "RuntimeError: ends_at_once tried to end the process"),
        (call("ends", how="exit"), "RuntimeError: ends tried to end the process: SystemExit(2)"),
        (call("ends", how="cancel"), "RuntimeError: ends cancelled itself"),
        (call("ends_at_once", how="stop"), "RuntimeError: ends_at_once raised StopIteration"),
    ],
)
async def test_tool_that_exits_stops_or_cancels_itself_is_an_error_of_its_call(asked, message):
    env = env_with(add, ends, ends_at_once)
    await env.reset()
    said = await results(env, asked, call("add", a=1))
    assert said[0].startswith(f"error: {message}") and said[1] == "2"
