"""Splits of GPUs and values of max_staleness, simulated; the best of them, in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from controller.simulate.events import Draw, Outcome, Setting, simulate
from controller.simulate.machine import MEMORY

EIGHTHS = range(1, 8)
BYTES_PER_PARAMETER = 18
"""Memory of a trainer: weights and gradients in bfloat16, float32 weights and Adam's two moments,
and two bytes more for activations."""
FAIR = 0.95
"""A setting whose trained answers are shorter than this, on average, is not recommended."""
NEARLY = 1.03
"""Among settings so close to the fastest the one with the least staleness is recommended."""
WORTH = 1.05
"""Gain that asynchrony must have against a synchronous run on all GPUs to be recommended."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Plan:
    """A split that was simulated."""

    setting: Setting
    outcome: Outcome

    @property
    def num_gpus(self) -> int:
        setting = self.setting
        return setting.num_trainer_gpus + setting.num_engines * setting.machine.tp_size

    @property
    def places_taken(self) -> float:
        setting = self.setting
        return self.outcome.places / (setting.num_engines * setting.machine.max_running)

    @property
    def gpu_hours(self) -> float:
        """GPU-hours of 1,000 steps."""
        return 1000 * self.outcome.step_s * self.num_gpus / 3600


def splits(setting: Setting, num_gpus: int) -> Iterator[Setting]:
    """Ways to divide the GPUs that leave the trainer's state room, and each rank a group.

    Raises ValueError if there is none.
    """
    machine, found = setting.machine, set[int]()
    for part in EIGHTHS:
        num_engines = max(1, (num_gpus * part // 8) // machine.tp_size)
        trainers = num_gpus - num_engines * machine.tp_size
        state = BYTES_PER_PARAMETER * machine.num_params
        has_room = state <= 0.9 * trainers * MEMORY[machine.gpu]
        if 0 < trainers <= setting.groups_per_step and has_room:
            found.add(num_engines)
    if not found or machine.places <= 0:
        raise ValueError(
            f"GPUS={num_gpus}: a model of {machine.num_params:.3g} parameters does not fit: its "
            f"training takes {BYTES_PER_PARAMETER} bytes a parameter and an engine of "
            f"rollout.engine.tp_size={machine.tp_size} 2, and each rank needs a group of "
            f"trainer.groups_per_step={setting.groups_per_step}; take more GPUs, larger ones, or "
            "more groups"
        )
    for number in sorted(found):
        trainers = num_gpus - number * machine.tp_size
        yield replace(setting, num_engines=number, num_trainer_gpus=trainers)


def fastest(
    setting: Setting, num_gpus: int, max_staleness: int, make_draw: Callable[[], Draw]
) -> Plan:
    """The split with the shortest step of those that train nearly all that was drawn. All splits
    draw the same answers."""
    # The longer the leash, the later do all lengths arrive as often as they begin.
    num_steps = setting.num_steps + 4 * max_staleness
    oversampling = setting.oversampling if max_staleness else 1.0
    setting = replace(
        setting, max_staleness=max_staleness, num_steps=num_steps, oversampling=oversampling
    )
    plans = [
        Plan(setting=one, outcome=simulate(one, make_draw())) for one in splits(setting, num_gpus)
    ]
    return min(_fair(plans), key=lambda plan: plan.outcome.step_s)


def _fair(plans: Sequence[Plan]) -> Sequence[Plan]:
    """Returns those that train nearly all that was drawn; all if there are none."""
    return [plan for plan in plans if plan.outcome.length_bias >= FAIR] or plans


def colocated_s(
    setting: Setting, num_gpus: int, switch_s: float, make_draw: Callable[[], Draw]
) -> float:
    """Seconds of a step that generates on all GPUs, then trains on all."""
    # Weights move within `switch_s`.
    unmoved = float("inf")
    machine = replace(setting.machine, wire_bytes_per_s=unmoved, host_bytes_per_s=unmoved)
    engines = num_gpus // machine.tp_size
    together = replace(
        setting,
        machine=machine,
        num_engines=engines,
        num_trainer_gpus=num_gpus,
        max_staleness=0,
        max_commits=engines,
        oversampling=1.0,
        has_pools=False,
    )
    return simulate(together, make_draw()).step_s + switch_s


def recommended(plans: Sequence[Plan]) -> Plan:
    """The least stale of those nearly as fast as the fastest; only of those that train nearly all
    that was drawn, if there are any."""
    fair = _fair(plans)
    best = min(plan.outcome.step_s for plan in fair)
    return next(plan for plan in fair if plan.outcome.step_s <= NEARLY * best)


def in_words(plans: Sequence[Plan], together_s: float, price: float) -> str:
    """Returns what to do, in sentences."""
    best = recommended(plans)
    setting, outcome = best.setting, best.outcome
    gain, synchronous = together_s / outcome.step_s, plans[0].outcome.step_s / outcome.step_s
    if gain < WORTH:
        said = (
            f"Stay synchronous and colocated: all {best.num_gpus} GPUs for each phase in turn take "
            f"{together_s:.1f} s a step, the best split {outcome.step_s:.1f} s. (Leash does not "
            "colocate.)"
        )
    else:
        said = (
            f"Asynchronous: {outcome.step_s:.1f} s a step, {gain:.2f} times as fast as all "
            f"{best.num_gpus} GPUs for each phase in turn, and {synchronous:.2f} times as fast as "
            "the best split at max_staleness 0."
        )
    said += (
        f" Take buffer.max_staleness={setting.max_staleness} with {setting.num_trainer_gpus} GPUs "
        f"that train and {setting.num_engines} engines: trainer.num_ranks="
        f"{setting.num_trainer_gpus} rollout.num_engines={setting.num_engines}."
    )
    if price:
        said += f" 1,000 steps cost {best.gpu_hours:,.0f} GPU-hours, {price * best.gpu_hours:,.0f}."
    if outcome.length_bias < FAIR:
        said += (
            f" Trained answers have {outcome.length_bias:.2f} of the length of those drawn, since "
            "the longest become too old: try a larger max_staleness, or buffer.on_stale=wait."
        )
    elif faster := [p for p in plans if p.outcome.step_s < outcome.step_s / NEARLY]:
        other = faster[0]
        said += (
            f" max_staleness={other.setting.max_staleness} would be faster "
            f"({other.outcome.step_s:.1f} s), but train answers of "
            f"{other.outcome.length_bias:.2f} of their length."
        )
    return said
