"""How the pool's parts find each other, and whose death ends the run."""

from __future__ import annotations

from types import SimpleNamespace

from rollout_pool.pool import RolloutPool, _Member, first_on_node


def test_engines_of_one_node_share_the_receiver_beside_the_first_of_them():
    assert first_on_node(["a", "a", "a"]) == [0, 0, 0]
    assert first_on_node(["a", "b", "a", "b", "c"]) == [0, 1, 0, 1, 4]


def member(name, *methods):
    """An actor whose references are their own names."""
    calls = {m: SimpleNamespace(remote=lambda *_, m=m: f"{name}.{m}") for m in methods}
    return _Member(name=name, handle=SimpleNamespace(**calls))


def test_deaths_include_a_receiver_that_is_given_up():
    pool = RolloutPool(
        [member("engine-0", "start", "gpu_ids", "wait_dead")],
        {0: member("receiver-0", "wait_ready", "keep")},
        [member("worker-0", "start", "wait_dead")],
        [member("scorer-0", "start")],
    )
    pool.start()
    assert pool.deaths() == {
        "engine-0": "engine-0.wait_dead",
        "worker-0": "worker-0.wait_dead",
        "receiver-0": "receiver-0.keep",
    }


def test_restarted_worker_gets_the_engines_with_any_call():
    asked = []

    def call(name):
        return SimpleNamespace(remote=lambda *arguments: asked.append((name, arguments)))

    methods = ("start", "run", "evaluate")
    worker = _Member(name="worker-0", handle=SimpleNamespace(**{m: call(m) for m in methods}))
    pool = RolloutPool([member("engine-0", "start", "gpu_ids")], {}, [worker], [])
    pool.start()
    pool.run()
    pool.evaluate(7, "engine-0")
    infos = ["engine-0.start"]
    assert asked == [
        ("start", (infos,)),
        ("run", (infos,)),
        ("evaluate", (infos, 7, "engine-0")),
    ]
