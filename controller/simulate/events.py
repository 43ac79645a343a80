"""A run as a sequence of events under a virtual clock.

    prompts ─admission─► running at engines ─► ready ─lease─► training step ─► new version
                              ▲    stale: again, or dropped        │
                              └───────── commits, engine by engine ┘

A GPU fails once in `mtbf_s`. What ran at an engine goes on at others; a failed rank brings all of
them back to the last checkpoint.

Admission, staleness and the ranks' shares of a batch are those of the buffer (`admission_limit`,
`engine_lag`, `is_fresh`, `split_by_cost`). An
engine is a counter of the tokens that each of its requests has got: the counter runs at the speed
of its batch, and a request ends when it has passed as many as the request is long. So an event
is an end, a commit or a step, never a token.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
import random
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial

from buffer.admission import admission_limit, engine_lag
from buffer.lease import split_by_cost
from buffer.staleness import is_fresh
from configs.choices import OnStale
from controller.simulate.machine import Machine

ROUNDING = 1e-6
"""Tokens, or seconds, by which floating-point numbers may miss an end."""
UNSENT = 32
"""Tokens of an answer that an engine has not yet streamed when it fails, on average."""
MOST_SETBACKS = 100
"""Failures of ranks between two steps after which no step is awaited any more."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Setting:
    """A run to simulate. Times in seconds, lengths in tokens."""

    machine: Machine
    num_engines: int
    num_trainer_gpus: int
    num_steps: int
    groups_per_step: int
    prompt_tokens: int
    max_staleness: int
    on_stale: OnStale
    oversampling: float = 1.0
    max_retries: int = 2
    max_commits: int = 1
    """Engines that take a version at the same time."""
    reward_s: float = 0.0
    """From the last answer of a group to its push."""
    mtbf_s: float = math.inf
    """Mean time between two failures of one GPU."""
    restart_s: float = 0.0
    """From the failure of an engine, or of a rank, until it works again."""
    checkpoint_every: int = 1
    """Steps between the states that the ranks can go back to."""
    has_pools: bool = True
    """False: all GPUs are one colocated job, which fails as a whole."""


@dataclass(slots=True, eq=False)
class Group:
    lengths: tuple[int, ...]
    num_tokens: int = field(init=False)
    version: int = 0
    """Version of its engine when it began."""
    num_left: int = 0
    """Answers that have not ended."""
    num_retries: int = 0

    def __post_init__(self) -> None:
        self.num_tokens = sum(self.lengths)


@dataclass(slots=True)
class Outcome:
    """Results of a simulated run."""

    ends: list[float] = field(default_factory=list)
    """When each step ended."""
    train_s: list[float] = field(default_factory=list)
    place_s: list[float] = field(default_factory=list)
    """By the end of each step, the seconds of requests in places of engines."""
    drawn: list[int] = field(default_factory=list)
    """Tokens of each prompt's answers, as first drawn."""
    trained: list[int] = field(default_factory=list)
    """Tokens of each trained group."""
    staleness: list[int] = field(default_factory=list)
    lost_tokens: float = 0.0
    num_lost: int = 0
    """Prompts given up for good."""
    num_failures: int = 0

    @property
    def half(self) -> int:
        """Steps that fill pools and leash; what follows is measured."""
        return len(self.ends) // 2

    @property
    def seconds(self) -> float:
        """Time of the measured steps."""
        return self.ends[-1] - self.ends[self.half - 1]

    @property
    def step_s(self) -> float:
        return self.seconds / (len(self.ends) - self.half)

    @property
    def trainer_busy(self) -> float:
        """Share of the time in which a step trains."""
        return sum(self.train_s[self.half :]) / self.seconds

    @property
    def places(self) -> float:
        """Requests that run, on average."""
        return (self.place_s[-1] - self.place_s[self.half - 1]) / self.seconds

    @property
    def mean_staleness(self) -> float:
        measured = self.staleness[len(self.staleness) // 2 :]
        return sum(measured) / len(measured)

    @property
    def wasted(self) -> float:
        """Share of the sampled tokens that no step trained."""
        return self.lost_tokens / max(1.0, self.lost_tokens + sum(self.trained))

    @property
    def length_bias(self) -> float:
        """Mean tokens of a group that the later half of the steps trained, over the mean of those
        drawn. The first steps train what is short, since nothing else has ended."""
        half = self.trained[len(self.trained) // 2 :]
        return sum(half) * len(self.drawn) / (sum(self.drawn) * len(half))


Draw = Callable[[], tuple[int, ...]]
"""The lengths of the answers to one prompt, in tokens; () when there is none left."""


class Engine:
    """Requests that decode together, each a token a step.

    Example: with `machine.token_s` of 0.01, a request of 100 tokens alone ends after 1 s:

        engine = Engine(machine, prompt_tokens=0)
        engine.add(0.0, [(100.0, 0.0, group)])
        engine.next_end             # 1.0
        engine.pop_ended(1.0)       # [group]
    """

    # Thousands of engines are looked at again and again: attributes, no properties.
    __slots__ = (
        "_at", "_begun", "_counter", "_machine", "_max_running", "_numbers", "_places",
        "_prompt", "_running", "_token_s", "_waiting", "load", "next_end", "place_s", "version",
    )  # fmt: skip

    def __init__(self, machine: Machine, prompt_tokens: int) -> None:
        self.version = 0
        self.place_s = 0.0
        self.load = 0
        """Requests that run or wait; while its cache is full at least as many as it has places."""
        self.next_end = math.inf
        """When the next answer ends; infinite if none runs."""
        self._machine, self._prompt = machine, prompt_tokens
        self._places, self._max_running = machine.places, machine.max_running
        self._running: list[tuple[float, int, float, Group]] = []
        """(counter at its end, a number, counter at its begin, group), the next to end first."""
        self._waiting: deque[tuple[float, float, Group]] = deque()
        """(tokens left, tokens that other engines have sampled, group)"""
        self._numbers = itertools.count()
        self._counter = 0.0
        self._begun = 0.0
        """Sum of the counters at which the running ones began."""
        self._at = 0.0
        """Time up to which the counter is right; in a pause the pause's end."""
        self._token_s = 0.0

    @property
    def num_tokens(self) -> float:
        """Tokens of all running requests, with their prompts."""
        return len(self._running) * (self._prompt + self._counter) - self._begun

    def add(self, now: float, answers: Sequence[tuple[float, float, Group]]) -> None:
        """Answers of one group begin that have (tokens left, tokens sampled elsewhere), as far as
        there are places; their common prompt is computed once."""
        self._advance(now)
        self._at += self._machine.prefill_s(self._prompt + sum(had for _, had, _ in answers))
        self._waiting.extend(answers)
        self._fill()

    def fail(self, now: float) -> tuple[dict[Group, list[tuple[float, float, Group]]], float]:
        """Loses all that it holds. Returns what is to go on elsewhere, by group, and the tokens
        that were lost."""
        self._advance(now)
        left, lost = defaultdict[Group, list[tuple[float, float, Group]]](list), 0.0
        for end, _, began, group in self._running:
            had = self._counter - began
            unsent = min(had, UNSENT)
            lost += unsent
            left[group].append((end - self._counter + unsent, had - unsent, group))
        for answer in self._waiting:
            left[answer[2]].append(answer)
        self._running, self._begun = [], 0.0
        self._waiting.clear()
        self._fill()
        return left, lost

    def restart(self, now: float, version: int) -> None:
        self._advance(now)
        self._at, self.version = now, version

    def take_version(self, now: float, version: int) -> None:
        """All stand still for the load, and what they hold is computed again."""
        self._advance(now)
        self.version = version
        pause_s = self._machine.load_s + self._machine.prefill_s(self.num_tokens)
        self._at += pause_s
        self.next_end += pause_s

    def pop_ended(self, now: float) -> list[Group]:
        """The groups of the answers that have ended by now, one for each answer."""
        ended: list[Group] = []
        if self.next_end > now + ROUNDING:
            return ended
        self._advance(now)
        running, last = self._running, self._counter + ROUNDING
        while running and running[0][0] <= last:
            _, _, began, group = running.pop(0)
            self._begun -= began
            ended.append(group)
        if ended:
            self._fill()
        return ended

    def stop(self, now: float, groups: Collection[Group]) -> float:
        """Stops all answers of these groups; returns the tokens that the running ones had."""
        self._advance(now)
        lost, kept = 0.0, []
        for request in self._running:
            _, _, began, group = request
            if group in groups:
                lost += self._counter - began
                self._begun -= began
            else:
                kept.append(request)
        self._running = kept
        self._waiting = deque(one for one in self._waiting if one[2] not in groups)
        self._fill()
        return lost

    def _advance(self, now: float) -> None:
        passed = now - self._at
        if passed > 0:
            if self._running:
                self._counter += passed / self._token_s
                self.place_s += passed * len(self._running)
            self._at = now

    def _fill(self) -> None:
        running, waiting, counter = self._running, self._waiting, self._counter
        while waiting and len(running) < self._max_running:
            left, had, group = waiting[0]
            num_tokens = len(running) * (self._prompt + counter) - self._begun
            if running and num_tokens + self._prompt + had + left / 2 > self._places:
                break  # no room in the cache
            waiting.popleft()
            began = counter - had
            self._begun += began
            bisect.insort(running, (counter + left, next(self._numbers), began, group))
        self.load = len(running)
        if waiting:
            self.load = max(self._max_running, self.load + len(waiting))
        if not running:
            self.next_end = math.inf
            return
        number, left = len(running), running[0][0] - counter
        if left < 0.0:
            left = 0.0
        # They grow until the next end.
        num_tokens = number * (self._prompt + counter + left / 2) - self._begun
        self._token_s = self._machine.token_s(number, num_tokens)
        self.next_end = self._at + left * self._token_s


def simulate(setting: Setting, draw: Draw) -> Outcome:
    """Raises ValueError if a step can never come."""
    return _Run(setting, draw).run()


class _Run:
    def __init__(self, setting: Setting, draw: Draw) -> None:
        self._setting, self._draw = setting, draw
        engines, self._max_running = range(setting.num_engines), setting.machine.max_running
        self._engines = [Engine(setting.machine, setting.prompt_tokens) for _ in engines]
        self._engines_of: dict[Group, list[Engine]] = {}
        """Where answers of each running group began."""
        self._line: deque[tuple[float, float, Group]] = deque()
        """Answers that wait for a place: (tokens left, tokens sampled before, group)."""
        self._listed = [0] * setting.num_engines
        """Load under which each engine stands in `_loads`; other entries of it are void."""
        self._fallen = set[int]()
        """Engines whose load may have fallen since."""
        self._loads = [(0, number) for number in engines]
        """A heap of engines by load. One whose load has grown is put right when it comes up."""
        self._by_version = [(0, number) for number in engines]
        """A heap of the engines that take no version now, those most behind first."""
        self._served = {0: setting.num_engines}
        """Engines by version."""
        self._limit: int | None = None
        """Limit of admission; worked out again after a step, and when other versions are served."""
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = itertools.count()
        self._planned = [math.inf] * setting.num_engines
        """When each engine's next look is planned."""
        self._ends_next: list[tuple[float, int, int]] = []
        """A heap of these looks: (when, a number, engine). Others than the planned are void."""
        self._scored: set[Group] = set()
        """Groups whose reward is awaited."""
        self._ready: list[tuple[int, int, Group]] = []
        self._again: deque[Group] = deque()
        self._leased = 0
        self._version = 0
        self._on_wire: int | None = None
        self._newest = 0
        """Version that lies beside the engines."""
        self._committing = 0
        self._dice = random.Random(0)
        self._down = set[int]()
        """Engines that have failed and do not work again yet."""
        self._to_fail = 0
        """Failures that are planned."""
        self._ranks_work = 0.0
        """When the ranks can train again."""
        self._is_undone = False
        """A rank has failed during the step."""
        self._setbacks = 0
        """Failures of ranks since the last step."""
        self._outcome = Outcome()

    def run(self) -> Outcome:
        outcome = self._outcome
        self._admit(0.0)
        if self._setting.has_pools:
            self._plan_failure(0.0, self._num_engine_gpus, self._fail_engine)
        self._plan_failure(0.0, self._setting.num_trainer_gpus, self._fail_rank)
        ends, num_steps, events, ends_next = (
            outcome.ends, self._setting.num_steps, self._events, self._ends_next,
        )  # fmt: skip
        while len(ends) < num_steps:
            if ends_next and (not events or ends_next[0] < events[0]):
                self._look(*ends_next[0])
                continue
            if len(events) + len(ends_next) <= self._to_fail:
                raise ValueError(
                    f"after {len(outcome.ends)} steps nothing runs and nothing is ready: with "
                    f"buffer.max_staleness={self._setting.max_staleness} no group can end in time; "
                    "raise it"
                )
            now, _, happen = heapq.heappop(events)
            happen(now)
        return outcome

    def _at(self, when: float, happen: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), happen))

    # Generation ------------------------------------------------------------------------------

    def _admit(self, now: float) -> None:
        setting = self._setting
        if self._limit is None:
            self._limit = admission_limit(
                max_staleness=setting.max_staleness,
                lag=engine_lag(self._version, self._served, setting.max_staleness),
                groups_per_version=setting.groups_per_step,
                oversampling=setting.oversampling,
            )
        self._serve(now)
        while self._served and not self._line and self._num_in_flight < self._limit:
            if self._again:
                group = self._again.popleft()
            elif lengths := self._draw():
                group = Group(lengths)
                self._outcome.drawn.append(group.num_tokens)
            else:
                break
            group.version, group.num_left = self._version, len(group.lengths)
            self._engines_of[group] = []
            self._line.extend((length, 0.0, group) for length in group.lengths)
            self._serve(now)

    @property
    def _num_in_flight(self) -> int:
        return len(self._engines_of) + len(self._scored) + len(self._ready) + self._leased

    def _serve(self, now: float) -> None:
        """Answers begin, as many of a group at an engine as there are places."""
        line, stale = self._line, list[tuple[int, int]]()
        while line and (number := self._least_loaded(stale)) is not None:
            engine, group = self._engines[number], line[0][2]
            answers = list[tuple[float, float, Group]]()
            while line and line[0][2] is group and engine.load + len(answers) < self._max_running:
                answers.append(line.popleft())
            if answers:
                begun = self._engines_of[group]
                group.version = min(group.version, engine.version) if begun else engine.version
                begun.append(engine)
                engine.add(now, answers)
                self._plan(number)
            self._list(number)
            if not answers:  # nor has any other engine a place
                break
        for one in stale:
            heapq.heappush(self._loads, one)

    def _list(self, number: int) -> None:
        load = self._listed[number] = self._engines[number].load
        heapq.heappush(self._loads, (load, number))
        if len(self._loads) > 8 * len(self._engines) + 64:  # mostly void
            self._loads = [(load, number) for number, load in enumerate(self._listed)]
            heapq.heapify(self._loads)

    def _least_loaded(self, stale: list[tuple[int, int]]) -> int | None:
        """Chooses among the engines that serve a version young enough; sets others aside."""
        for number in self._fallen:
            if self._engines[number].load < self._listed[number]:
                self._list(number)
        self._fallen.clear()
        while self._loads:
            load, number = heapq.heappop(self._loads)
            engine = self._engines[number]
            if load != self._listed[number] or number in self._down:
                continue
            if load != engine.load:
                self._list(number)
            elif is_fresh(self._version, engine.version, self._setting.max_staleness):
                return number
            else:
                stale.append((load, number))
        return None

    def _plan(self, number: int) -> None:
        when = self._engines[number].next_end
        if when < self._planned[number]:
            self._planned[number] = when
            heapq.heappush(self._ends_next, (when, next(self._numbers), number))

    def _look(self, now: float, _: int, number: int) -> None:
        """The next look, at an engine in which an answer may have ended."""
        if now < self._planned[number]:
            heapq.heappop(self._ends_next)
            return  # a later plan took its place
        engine = self._engines[number]
        if engine.next_end <= now + ROUNDING:  # no commit has put it off
            for group in engine.pop_ended(now):
                group.num_left -= 1
                if group.num_left == 0:
                    del self._engines_of[group]
                    self._scored.add(group)
                    self._at(now + self._setting.reward_s, partial(self._push, group))
            self._fallen.add(number)
        when = self._planned[number] = engine.next_end
        if when < math.inf:
            heapq.heapreplace(self._ends_next, (when, next(self._numbers), number))
        else:
            heapq.heappop(self._ends_next)
        # An end alone lets no group in: it is in flight until a step has trained it.
        if number in self._fallen and (self._line or self._limit is None):
            self._admit(now)

    def _push(self, group: Group, now: float) -> None:
        self._scored.remove(group)
        if is_fresh(self._version, group.version, self._setting.max_staleness):
            heapq.heappush(self._ready, (group.version, next(self._numbers), group))
        else:
            self._give_up(group, group.num_tokens)
            self._admit(now)
        self._lease(now)

    def _give_up(self, group: Group, num_tokens: float) -> None:
        """Too old: its prompt runs again with new answers, or is lost."""
        setting, outcome = self._setting, self._outcome
        outcome.lost_tokens += num_tokens
        is_again = setting.on_stale is OnStale.requeue and group.num_retries < setting.max_retries
        if is_again and (lengths := self._draw()):
            self._again.append(Group(lengths, num_retries=group.num_retries + 1))
        else:
            outcome.num_lost += 1

    # Training --------------------------------------------------------------------------------

    def _lease(self, now: float) -> None:
        setting = self._setting
        if self._leased or len(self._ready) < setting.groups_per_step:
            return
        if now < self._ranks_work:
            self._at(self._ranks_work, self._lease)
            return
        if setting.on_stale is OnStale.wait and any(
            not is_fresh(self._version + 1, group.version, setting.max_staleness)
            for group in itertools.chain(self._engines_of, self._scored)
        ):
            return
        self._leased = setting.groups_per_step
        batch = [heapq.heappop(self._ready)[2] for _ in range(self._leased)]
        seconds = setting.machine.train_s(self._heaviest_share(batch))
        self._at(now + seconds, partial(self._end_step, batch, seconds))

    def _heaviest_share(self, batch: Sequence[Group]) -> int:
        """Tokens of the rank that has the most: a step waits for it. Ranks get whole groups, as
        in a run; a colocated loop, which is not ours, divides the answers."""
        setting, prompt = self._setting, self._setting.prompt_tokens
        if setting.has_pools:
            costs = [group.num_tokens + len(group.lengths) * prompt for group in batch]
        else:
            costs = [length + prompt for group in batch for length in group.lengths]
        shares = split_by_cost(costs, min(setting.num_trainer_gpus, len(costs)))
        return max(sum(costs[index] for index in share) for share in shares)

    def _end_step(self, batch: Sequence[Group], seconds: float, now: float) -> None:
        if self._is_undone:
            self._is_undone = False
            self._at(self._ranks_work + seconds, partial(self._end_step, batch, seconds))
            return
        outcome = self._outcome
        self._setbacks = 0
        outcome.ends.append(now)
        outcome.train_s.append(seconds)
        outcome.place_s.append(sum(engine.place_s for engine in self._engines))
        outcome.trained += [group.num_tokens for group in batch]
        outcome.staleness += [self._version - group.version for group in batch]
        self._leased = 0
        self._version += 1
        self._limit = None
        self._drop_stale(now)
        if self._on_wire is None:
            self._send(now)
        self._admit(now)
        self._lease(now)

    def _drop_stale(self, now: float) -> None:
        """Gives up what no later step may train, of the ready groups and of those that run."""
        most = self._setting.max_staleness
        while self._ready and not is_fresh(self._version, self._ready[0][0], most):
            group = heapq.heappop(self._ready)[2]
            self._give_up(group, group.num_tokens)
        if self._setting.on_stale is OnStale.wait:
            return
        dropped = {
            g: None for g in self._engines_of if not is_fresh(self._version, g.version, most)
        }
        stale = defaultdict[Engine, dict[Group, None]](dict)  # in the order of their begin
        for group in dropped:
            for engine in self._engines_of.pop(group):
                stale[engine][group] = None
        for engine, groups in stale.items():
            self._outcome.lost_tokens += engine.stop(now, groups)
        if dropped:
            self._outcome.lost_tokens += sum(
                had for _, had, group in self._line if group in dropped
            )
            self._line = deque(one for one in self._line if one[2] not in dropped)
        for group in dropped:
            self._give_up(group, 0.0)
        for number, engine in enumerate(self._engines) if stale else ():
            if engine in stale:
                self._list(number)
                self._plan(number)

    # Weights ---------------------------------------------------------------------------------

    def _send(self, now: float) -> None:
        self._on_wire = self._version
        self._at(now + self._setting.machine.wire_s, self._arrive)

    def _arrive(self, now: float) -> None:
        assert self._on_wire is not None
        self._newest, self._on_wire = self._on_wire, None
        if self._version > self._newest:  # those between were skipped
            self._send(now)
        self._await_commits(self._begin_commits(now), now)

    def _begin_commits(self, now: float) -> list[int]:
        """The engines that are most behind take the newest version, a few at a time."""
        begun = []
        while self._committing < self._setting.max_commits and self._by_version:
            version, number = self._by_version[0]
            has_failed = number in self._down or version != self._engines[number].version
            if not has_failed and version >= self._newest:
                break
            heapq.heappop(self._by_version)
            if has_failed:
                continue  # it is listed again when it works again
            self._committing += 1
            self._count_served(version, -1)
            self._count_served(self._newest, 1)
            self._engines[number].take_version(now, self._newest)  # what ends next ends later
            begun.append(number)
        return begun

    def _count_served(self, version: int, change: int) -> None:
        before = self._served.pop(version, 0)
        if before + change:
            self._served[version] = before + change
        if not before or not before + change:
            self._limit = None

    def _await_commits(self, begun: list[int], now: float) -> None:
        if begun:
            self._at(now + self._setting.machine.load_s, partial(self._end_commits, begun))

    def _end_commits(self, ended: list[int], now: float) -> None:
        begun = []
        for number in ended:
            self._committing -= 1
            heapq.heappush(self._by_version, (self._engines[number].version, number))
            begun += self._begin_commits(now)
            if self._limit is None or self._line:  # the first engine of a version may let groups in
                self._admit(now)
        self._await_commits(begun, now)

    # Failures --------------------------------------------------------------------------------

    @property
    def _num_engine_gpus(self) -> int:
        return self._setting.num_engines * self._setting.machine.tp_size

    def _plan_failure(self, now: float, num_gpus: int, fail: Callable[[float], None]) -> None:
        if math.isfinite(self._setting.mtbf_s):
            self._to_fail += 1
            self._at(now + self._dice.expovariate(num_gpus / self._setting.mtbf_s), fail)

    def _fail_engine(self, now: float) -> None:
        self._to_fail -= 1
        self._plan_failure(now, self._num_engine_gpus, self._fail_engine)
        number = self._dice.randrange(len(self._engines))
        if number in self._down:
            return
        engine, outcome = self._engines[number], self._outcome
        outcome.num_failures += 1
        self._down.add(number)
        self._count_served(engine.version, -1)
        left, lost = engine.fail(now)
        outcome.lost_tokens += lost
        self._line.extendleft(itertools.chain(*left.values()))
        self._planned[number] = math.inf
        self._at(now + self._setting.restart_s, partial(self._restart_engine, number))
        self._serve(now)

    def _restart_engine(self, number: int, now: float) -> None:
        self._down.remove(number)
        self._engines[number].restart(now, self._newest)
        self._count_served(self._newest, 1)
        heapq.heappush(self._by_version, (self._newest, number))
        self._list(number)
        self._admit(now)

    def _fail_rank(self, now: float) -> None:
        """All ranks start again, and train again what they did since the last checkpoint. A run
        drops what the undone versions have sampled; here it is kept. A colocated job has lost the
        answers, too."""
        setting, outcome = self._setting, self._outcome
        self._to_fail -= 1
        self._plan_failure(now, setting.num_trainer_gpus, self._fail_rank)
        outcome.num_failures += 1
        self._is_undone = bool(self._leased)
        self._setbacks += 1
        if self._setbacks > MOST_SETBACKS:
            raise ValueError(
                f"MTBF_H={setting.mtbf_s / 3600:g}: after {len(outcome.ends)} steps ranks have "
                f"failed {MOST_SETBACKS} times before the next one; checkpoint more often "
                f"(trainer.checkpoint_every={setting.checkpoint_every}), or say a larger MTBF_H"
            )
        kept = len(outcome.ends) // setting.checkpoint_every * setting.checkpoint_every
        again_s = sum(outcome.train_s[kept:])
        if not setting.has_pools:
            again_s = now - (outcome.ends[kept - 1] if kept else 0.0)
        self._ranks_work = now + setting.restart_s + again_s
