"""`leash simulate`: how many GPUs for each pool, and how long a leash, before any is rented."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from configs.choices import OnStale, Selector, TailPolicy
from configs.load import load_config
from configs.schema import Config
from controller.simulate.advice import (
    Plan,
    colocated_s,
    fastest,
    in_words,
    recommended,
    splits,
)
from controller.simulate.events import Draw, Setting
from controller.simulate.machine import BANDWIDTH, Machine
from controller.start.model_size import model_size
from rollout_pool.worker.record import all_recorded

STALENESS = (0, 1, 2, 4, 8, 16)
Z99 = 2.326
"""Standard deviations of a normal distribution from its median to its 99th percentile."""


@dataclass(kw_only=True, frozen=True)
class Question:
    """The words of the command, as controller/main.py explains them, with the same defaults."""

    gpus: int = 16
    gpu: str = "H100"
    lengths: str = "1000,8000"
    lengths_of: Path | None = None
    prompt: int = 256
    parameters: float | None = None
    active: float | None = None
    kv: float | None = None
    mfu: float = 0.4
    wire: float = 10.0
    switch_s: float = 10.0
    reward_s: float = 0.0
    mtbf_h: float = 0.0
    restart_s: float = 300.0
    price: float = 0.0
    steps: int = 40
    plot: Path | None = None

    def check(self) -> None:
        """Raises ValueError naming the first number that is not possible."""
        for name, value, is_right, fix in (
            ("GPUS", self.gpus, self.gpus >= 2, "at least 2, one for each pool"),
            ("MFU", self.mfu, 0 < self.mfu <= 1, "above 0 and at most 1"),
            ("WIRE", self.wire, self.wire > 0, "GB/s above 0"),
            ("STEPS", self.steps, self.steps >= 4, "at least 4"),
            ("MTBF_H", self.mtbf_h, self.mtbf_h >= 0, "hours, or 0 for no failures"),
            ("RESTART_S", self.restart_s, self.restart_s >= 0, "seconds, at least 0"),
            ("PROMPT", self.prompt, self.prompt >= 0, "tokens, at least 0"),
        ):
            if not is_right:
                raise ValueError(f"{name}={value}: must be {fix}")
        if self.gpu not in BANDWIDTH:
            raise ValueError(f"GPU={self.gpu!r}: must be one of {', '.join(BANDWIDTH)}")


def simulate_run(overrides: Sequence[str], experiment: str, **words: Any) -> None:
    """Prints a table of the best split for each max_staleness, and a recommendation, for the words
    of a Question. Raises ValueError naming what is missing or does not fit."""
    asked, config = Question(**words), load_config(overrides, experiment)
    asked.check()
    setting, rollout = setting_of(config, asked), config.rollout
    machine = setting.machine
    next(splits(setting, asked.gpus))  # refused before anything is simulated
    if asked.lengths_of is not None:
        make_draw = recorded_lengths(asked.lengths_of)
    else:
        make_draw = lognormal_lengths(
            asked.lengths, rollout.group_size, rollout.max_response_tokens
        )
    plans = [fastest(setting, asked.gpus, value, make_draw) for value in STALENESS]
    together_s = colocated_s(setting, asked.gpus, asked.switch_s, make_draw)
    console = Console(highlight=False)
    console.print(
        f"{model_size(config.model).label}, {machine.num_params:.3g} parameters", markup=False
    )
    console.print(_table(plans, together_s, asked.gpus))
    console.print(in_words(plans, together_s, asked.price), markup=False, soft_wrap=True)
    console.print(_workers_in_words(config, recommended(plans)), markup=False, soft_wrap=True)
    if asked.plot is not None:
        _draw(asked.plot, plans, together_s)


def setting_of(config: Config, asked: Question) -> Setting:
    """A run with these settings, one GPU that trains, one engine and max_staleness 0. Raises
    ValueError for what is not simulated or not known."""
    _check_settings(config)
    return Setting(
        machine=_machine(config, asked),
        num_engines=1,
        num_trainer_gpus=1,
        num_steps=asked.steps,
        groups_per_step=config.trainer.groups_per_step,
        prompt_tokens=asked.prompt,
        max_staleness=0,
        on_stale=config.buffer.on_stale,
        oversampling=config.rollout.oversampling,
        max_retries=config.buffer.max_retries,
        max_commits=config.weight_sync.max_concurrent_commits,
        reward_s=asked.reward_s,
        mtbf_s=3600 * asked.mtbf_h or math.inf,
        restart_s=asked.restart_s,
        checkpoint_every=config.trainer.memory_copy_every or config.trainer.checkpoint_every,
    )


def _check_settings(config: Config) -> None:
    """Raises ValueError for what is not simulated."""
    trainer, buffer = config.trainer, config.buffer
    for name, value, usual in (
        ("trainer.gradient_accumulation_steps", trainer.gradient_accumulation_steps, 1),
        ("trainer.publish_every", trainer.publish_every, 1),
        ("trainer.sequence_parallel_size", trainer.sequence_parallel_size, 1),
        ("model.lora", config.model.lora, None),
        ("algorithm.critic", config.algorithm.critic, None),
        ("buffer.selector", buffer.selector, Selector.stalest),
        ("rollout.tail", config.rollout.tail, TailPolicy.continue_across_versions),
    ):
        if value != usual:
            said, left = (getattr(one, "name", one) for one in (value, usual))
            raise ValueError(f"{name}={said}: is not simulated; leave it at {left}")
    if buffer.on_stale is OnStale.mask_tokens:
        raise ValueError(
            "buffer.on_stale=mask_tokens: is not simulated; take requeue, drop or wait"
        )


def _workers_in_words(config: Config, plan: Plan) -> str:
    """The workers that can keep so many groups in flight."""
    in_flight = (plan.setting.max_staleness + 1) * plan.setting.groups_per_step
    workers = math.ceil(in_flight * plan.setting.oversampling / config.rollout.max_groups_in_flight)
    return (
        f"Up to {in_flight} groups are then in flight: rollout.num_workers={workers} at "
        f"rollout.max_groups_in_flight={config.rollout.max_groups_in_flight}, or more."
    )


def _machine(config: Config, asked: Question) -> Machine:
    size = model_size(config.model)
    num_params, elements = asked.parameters or size.num_params, asked.kv or size.kv_elements
    if num_params is None or elements is None:
        missing = "PARAMETERS" if num_params is None else "KV"
        raise ValueError(
            f"{missing}: {size.label}: {size.source}; name a local folder as model.path, or say "
            "PARAMETERS=8e9 KV=65536 (elements that a token adds to the KV cache: 2 x layers x "
            "key-value heads x size of a head)"
        )
    return Machine(
        gpu=asked.gpu,
        num_params=num_params,
        active_params=asked.active or num_params,
        kv_elements=elements,
        tp_size=config.rollout.engine.tp_size,
        max_running=config.rollout.engine.max_running_requests,
        utilisation=asked.mfu,
        wire_bytes_per_s=asked.wire * 1e9,
    )


def lognormal_lengths(text: str, group_size: int, longest: int) -> Callable[[], Draw]:
    """Lengths with the median and the 99th percentile of `text`, as "1000,8000", cut at `longest`.

    Raises ValueError for other texts.
    """
    try:
        median, p99 = map(float, text.split(","))
    except ValueError:
        median = p99 = math.nan
    if not 0 < median <= p99 < math.inf:
        raise ValueError(
            f"LENGTHS={text!r}: must be the median and the 99th percentile of the answers' tokens, "
            "as LENGTHS=1000,8000"
        )
    if p99 > longest:
        raise ValueError(
            f"LENGTHS={text!r}: rollout.max_response_tokens={longest} would cut more than one "
            "answer in a hundred; raise it, as a launch would have it, or give shorter lengths"
        )
    sigma = math.log(p99 / median) / Z99

    def make() -> Draw:
        numbers = np.random.default_rng(0)

        def groups() -> Iterator[tuple[int, ...]]:
            while True:  # many at once, which costs a tenth
                drawn = median * np.exp(sigma * numbers.standard_normal((256, group_size)))
                yield from map(tuple, np.clip(drawn.round(), 1, longest).astype(int).tolist())

        return partial(next, groups())

    return make


def recorded_lengths(folder: Path) -> Callable[[], Draw]:
    """Lengths of the groups that a run has recorded (rollout.log_rate), drawn again and again.

    Prints how many damaged lines it left out. Raises ValueError if no whole group is recorded.
    """
    damaged = list[str]()
    groups = [
        tuple(one.num_tokens - one.prompt_length for one in recorded.group.trajectories)
        for recorded in all_recorded(folder, damaged)
    ]
    if damaged:
        print(f"Left out damaged lines: {len(damaged)}. The first: {damaged[0]}")
    if not groups:
        raise ValueError(
            f"LENGTHS_OF={folder}: no groups are recorded in its folder rollouts; name the folder "
            "of a run with rollout.log_rate above 0"
        )

    def make() -> Draw:
        numbers = np.random.default_rng(0)
        return lambda: groups[int(numbers.integers(len(groups)))]

    return make


def _table(plans: Sequence[Plan], together_s: float, num_gpus: int) -> Table:
    title = f"{num_gpus} GPUs: the fastest split for each max_staleness, simulated"
    table = Table(title=title, box=None, pad_edge=False)
    for column in (  # for 80 columns
        *("max_staleness", "GPUs\nthat\ntrain", "engines", "s a\nstep", "trainer\nbusy"),
        *("places\ntaken", "staleness", "wasted", "length"),
    ):
        table.add_column(column, justify="right")
    best = recommended(plans)
    for plan in plans:
        setting, outcome = plan.setting, plan.outcome
        table.add_row(
            str(setting.max_staleness),
            str(setting.num_trainer_gpus),
            str(setting.num_engines),
            f"{outcome.step_s:.1f}",
            f"{outcome.trainer_busy:.0%}",
            f"{plan.places_taken:.0%}",
            f"{outcome.mean_staleness:.1f}",
            f"{outcome.wasted:.1%}",
            f"{outcome.length_bias:.2f}",
            style="bold" if plan is best else "",
        )
    table.caption = (
        f"All {num_gpus} for each phase in turn (colocated, synchronous): {together_s:.1f} s a "
        "step. Length: of trained answers over that of drawn ones."
    )
    if math.isfinite(best.setting.mtbf_s):
        table.caption += f" {best.outcome.num_failures} failures in the simulated time of the best."
    return table


def _draw(path: Path, plans: Sequence[Plan], together_s: float) -> None:
    figure = Figure(figsize=(6, 4))
    axes = figure.add_subplot()
    values = [str(plan.setting.max_staleness) for plan in plans]
    axes.plot(values, [plan.outcome.step_s for plan in plans], marker="o", label="seconds a step")
    axes.axhline(together_s, linestyle="--", color="gray", label="colocated, synchronous")
    axes.set_xlabel("max_staleness")
    axes.set_ylabel("s")
    axes.set_ylim(bottom=0)
    length = axes.twinx()
    lengths = [plan.outcome.length_bias for plan in plans]
    length.plot(values, lengths, marker="s", color="tab:red", label="length trained / drawn")
    length.set_ylim(0, 1.1)
    figure.legend(loc="lower center", ncols=3, fontsize=8)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(path, dpi=120)
