"""Tracks every prompt of a run: in exactly one place at any moment, and trained at most once.

stream ──► running ──► ready ──► leased ──► trained
             ▲  │        │
             │  └────────┴──► in line to run again, quarantine, or given up for a reason
             └────────────────────────┘
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator

from buffer.wire.codec import decode_group
from tests.soak.rollouts.picture import Event, Picture


class Ledger:
    """Fed with pictures in their order. A fault is a sentence; none is allowed, ever."""

    def __init__(
        self, num_workers: int, group_size: int, is_held_out: Callable[[int], bool]
    ) -> None:
        """`is_held_out` says whether the workers skip a prompt index."""
        self._num_workers = num_workers
        self._group_size = group_size
        self._is_held_out = is_held_out
        self._passed: dict[int, int] = defaultdict(int)
        self.expected: set[int] = set()
        """Prompts that the workers' positions say were run."""
        self.groups: dict[int, list[str]] = defaultdict(list)
        """Groups of each prompt, in the order in which they began."""
        self.prompt: dict[str, int] = {}
        """By group."""
        self.begun_ms: dict[str, int] = {}
        self.consumed_ms: dict[str, int] = {}
        self.last: dict[str, tuple[str, str]] = {}
        """The last event of each group, and its reason."""
        self.trained: dict[int, set[str]] = defaultdict(set)
        """Groups of each prompt that were trained."""
        self.num_steps = 0
        self.whole: set[str] = set()
        """Groups whose episodes were counted."""
        self.num_looks = 0

    def enter(self, picture: Picture, *, is_over: bool = False) -> list[str]:
        """Faults in what this picture shows. `is_over`: the run was stopped before."""
        self.num_looks += 1
        for event in picture.events:
            for group_id in event.group_ids:
                self._note(event, group_id)
        for worker, position in picture.positions.items():
            for place in range(self._passed[worker], position):
                index = place * self._num_workers + worker
                if not self._is_held_out(index):
                    self.expected.add(index)
            self._passed[worker] = max(position, self._passed[worker])
        return [*self._faults(picture, is_over)]

    def _note(self, event: Event, group_id: str) -> None:
        if event.what == "begun":
            index = int(event.detail["p"].rpartition(":")[2])
            self.prompt[group_id] = index
            self.groups[index].append(group_id)
            self.begun_ms[group_id] = event.at_ms
        if event.what == "consumed":
            self.trained[self.prompt[group_id]].add(group_id)
            self.consumed_ms[group_id] = event.at_ms
            self.num_steps = max(self.num_steps, int(event.detail["s"]))
        if event.what not in ("rerun", "prompt_quarantined"):  # those are of its prompt
            self.last[group_id] = event.what, event.detail.get("r", "")

    def count_episodes(self, payloads: dict[str, bytes]) -> list[str]:
        """Faults in the groups that were handed over, by their payloads."""
        faults = []
        for group_id, data in payloads.items():
            group = decode_group(data)
            self.whole.add(group_id)
            episodes = sorted(episode for episode, _ in group.rewards_by_player)
            if episodes != list(range(self._group_size)):
                faults.append(f"{group_id} has the episodes {episodes}")
            if group.prompt.index != self.prompt[group_id]:
                faults.append(f"{group_id} of prompt {group.prompt.index}: another had begun")
        return faults

    def fates(self, picture: Picture) -> Counter[str]:
        """Number of prompts by place, and of abandoned ones by reason."""
        return Counter(self._place(index, picture)[0] for index in self.groups)

    def _faults(self, picture: Picture, is_over: bool) -> Iterator[str]:
        if picture.stats.get("pushed", 0) != picture.places:
            yield f"{picture.stats['pushed']} groups were pushed, {picture.places} are somewhere"
        for index in sorted(self.expected - self.groups.keys()):
            yield f"prompt {index} is lost: its worker is past it, and no group ever ran it"
        for index in sorted(self.groups.keys() - self.expected):
            yield f"prompt {index} runs, and no worker has come so far"
        for index, group_ids in self.groups.items():
            _, places = self._place(index, picture)
            if len(places) > 1:
                yield f"prompt {index} is doubled: {places}; {self._history(group_ids)}"
        for index in self._lost(picture, is_over):
            yield f"prompt {index} is lost: {self._history(self.groups[index])}"

    def _place(self, index: int, picture: Picture) -> tuple[str, list[str]]:
        """All places where a prompt is, and their summary in a word."""
        places = []
        for group_id in self.groups[index]:
            if picture.running.get(group_id) == index:
                places.append(f"running {group_id}")
            for name in ("ready", "leased", "quarantined"):
                if group_id in getattr(picture, name):
                    places.append(f"{name} {group_id}")
        places += [f"trained {group_id}" for group_id in sorted(self.trained[index])]
        places += ["in line"] * picture.retries.count(index)
        places += ["prompt put aside"] * (index in picture.quarantined_prompts)
        if places:
            return " ".join(word for word in places[0].split() if "-" not in word), places
        what, why = self.last[self.groups[index][-1]]
        return f"{what} ({why})", places

    def _lost(self, picture: Picture, is_over: bool) -> list[int]:
        """Prompts that are nowhere, beyond those that were abandoned for a reason."""
        nowhere = defaultdict(list)
        for index in self.groups:
            fate, places = self._place(index, picture)
            if not places:
                nowhere[fate].append(index)
        # Only when a prompt has been too old too often is it not run again.
        exhausted = picture.stats.get("retries_exhausted", 0)
        for fate in ("dropped (stale)", "abandoned (too_old)"):
            given_up = nowhere.pop(fate, [])
            exhausted -= len(given_up)
            if exhausted < 0:
                return given_up
        if is_over:
            nowhere.pop("abandoned (stopped)", None)
        return [index for indices in nowhere.values() for index in indices]

    def _history(self, group_ids: list[str]) -> str:
        return "; ".join(f"{group_id} {' '.join(self.last[group_id])}" for group_id in group_ids)
