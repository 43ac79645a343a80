"""Environments of the verifiers library, run as agents."""

from __future__ import annotations

import importlib.util
import signal
import sys
import threading
from dataclasses import dataclass

import httpx
import pytest

from configs.choices import TaskKind
from configs.rollout_schema import TaskConfig
from rollout_pool.tasks.registry import build_task
from rollout_pool.tasks.task import TaskStream
from rollout_pool.tasks.verifiers import VerifiersTask

openai = pytest.importorskip("openai")
HAS_LIBRARY = importlib.util.find_spec("verifiers") is not None


def rows(count):
    return [
        {
            "prompt": [
                {"role": "system", "content": "Add."},
                {"role": "user", "content": f"{i} + 1"},
            ],
            "example_id": i,
            "task": "sums",
            "answer": str(i + 1),
        }
        for i in range(count)
    ]


class Sums:
    """An environment of the form that the library's have."""

    def __init__(self, training, evaluation, error=None):
        self._training, self._evaluation, self._error = training, evaluation, error

    def get_dataset(self):
        return self._training

    def get_eval_dataset(self):
        return self._evaluation or self._training

    async def run_rollout(self, input, client, model, sampling_args):
        reply = await client.chat.completions.create(
            model=model, messages=input["prompt"], **sampling_args
        )
        is_right = reply.choices[0].message.content == input["answer"]
        return {
            "reward": float(is_right),
            "metrics": {"exact": float(is_right), "num_turns": 1},
            "error": self._error,
        }


class Library:
    def __init__(self, environment):
        self.environment = environment
        self.asked = []

    def load_environment(self, env_id, **arguments):
        if env_id != "sums":
            raise ValueError(f"Could not import '{env_id}' environment.")
        self.asked.append(arguments)
        return self.environment


def config_of(**changes):
    return TaskConfig(**{"kind": TaskKind.verifiers, "name": "sums", "eval_size": 2, **changes})


def task_of(training=8, evaluation=(), error=None, **changes):
    library = Library(Sums(rows(training), list(evaluation), error))
    return VerifiersTask(config_of(**changes), library), library


@dataclass
class Session:
    """Answers every request with `says`."""

    says: str
    model: str = "policy"

    def client(self):
        return openai.AsyncOpenAI(
            base_url="http://endpoint/v1",
            api_key="key",
            http_client=httpx.AsyncClient(transport=httpx.MockTransport(self._answer)),
        )

    def _answer(self, request: httpx.Request) -> httpx.Response:
        assert request.headers["authorization"] == "Bearer key"
        message = {"role": "assistant", "content": self.says}
        return httpx.Response(
            200,
            json={
                "id": "1",
                "object": "chat.completion",
                "created": 0,
                "model": "policy",
                "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
                "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
            },
        )


def test_rows_become_prompts_and_the_last_are_held_out():
    task, library = task_of(params={"difficulty": 3})
    assert library.asked == [{"difficulty": 3}]
    assert [prompt.text for prompt in task.eval_prompts()] == ["Add.\n6 + 1", "Add.\n7 + 1"]
    stream = TaskStream(task, 0, 1)
    assert {next(stream).text for _ in range(6)} == {f"Add.\n{i} + 1" for i in range(6)}


def test_rows_for_evaluation_are_held_out_where_there_are_some():
    task, _ = task_of(training=8, evaluation=rows(9)[3:])
    assert [prompt.text for prompt in task.eval_prompts()] == ["Add.\n3 + 1", "Add.\n4 + 1"]
    stream = TaskStream(task, 0, 1)
    assert {next(stream).text for _ in range(6)} == {f"Add.\n{i} + 1" for i in (0, 1, 2, 5, 6, 7)}


async def test_episode_gives_the_rubrics_reward_and_its_metrics():
    task, _ = task_of()
    prompt = task.example(0)
    right = task.solution(prompt)
    assert await task.run_agent(Session(says=right), prompt) == (1.0, {"exact": 1, "num_turns": 1})
    assert await task.run_agent(Session(says="?"), prompt) == (0.0, {"exact": 0, "num_turns": 1})
    roles = [(m.role, m.content) for m in task.demonstration(prompt)]
    assert roles == [("system", "Add."), ("user", prompt.text[5:]), ("assistant", right)]


async def test_episode_that_the_environment_could_not_finish_is_an_error():
    task, _ = task_of(error={"error": "ModelError"})
    with pytest.raises(RuntimeError, match=r"environment sums failed: .*ModelError"):
        await task.run_agent(Session(says="1"), task.example(0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "summs"}, r"task.name='summs': .* loaded no such environment .*Could not import"),
        ({"instruction": " Think."}, r"task.instruction=' Think.': .* brings its own"),
        ({"tools": ["python"]}, r"task.tools=\['python'\]: .* brings its own"),
        ({"eval_size": 8}, r"task.eval_size=8: sums has only 8 rows, and none of its own for eval"),
    ],
)
def test_impossible_settings_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        task_of(**changes)


def test_verifiers_environment_runs_only_as_an_agent():
    task, _ = task_of()
    with pytest.raises(ValueError, match="runs through the endpoint"):
        task.environment(task.example(0))
    with pytest.raises(ValueError, match=r"leave task\.rewards out"):
        task.score(task.example(0), "1")


@pytest.mark.skipif(HAS_LIBRARY, reason="the verifiers library is installed")
def test_missing_library_is_named_with_the_install_command():
    with pytest.raises(ValueError, match=r"task.name='sums': needs .*pip install 'leash-rl\[veri"):
        build_task(config_of())


@pytest.fixture
def installed_environment(tmp_path):
    """A package with an environment, as the library finds them."""
    (tmp_path / "sums_of_ours.py").write_text(
        "import datasets\n"
        "import verifiers as vf\n"
        "def load_environment(count):\n"
        "    rows = [{'question': f'{i} + 1', 'answer': str(i + 1)} for i in range(count)]\n"
        "    def exact(completion, answer):\n"
        "        return float(completion[-1]['content'] == answer)\n"
        "    return vf.SingleTurnEnv(\n"
        "        dataset=datasets.Dataset.from_list(rows),\n"
        "        system_prompt='Add.', rubric=vf.Rubric(funcs=[exact]))\n"
    )
    sys.path.insert(0, str(tmp_path))
    yield "sums-of-ours"
    sys.path.remove(str(tmp_path))
    sys.modules.pop("sums_of_ours", None)


@pytest.mark.skipif(not HAS_LIBRARY, reason="the verifiers library is not installed")
@pytest.mark.filterwarnings("default")
async def test_environment_of_the_real_library_runs(installed_environment):
    config = config_of(name=installed_environment, params={"count": 6})
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    built = []
    # As workers do: outside the main thread.
    thread = threading.Thread(target=lambda: built.append(build_task(config)))
    thread.start()
    thread.join(60)
    [task] = built
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert len(task.eval_prompts()) == 2
    prompt = next(TaskStream(task, 0, 1))
    reward, metrics = await task.run_agent(Session(says=task.solution(prompt)), prompt)
    assert reward == 1.0 and metrics["exact"] == 1.0
    assert (await task.run_agent(Session(says="no"), prompt))[0] == 0.0
