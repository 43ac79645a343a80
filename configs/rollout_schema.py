"""The settings of generation: the rollout pool, its engines, and the tasks with their rewards."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from configs.choices import Dtype, OnLongPrompt, RewardKind, TailPolicy, TaskKind, ToolParser
from configs.rules import at_least, require

MAX_PORT = 65535


@dataclass(kw_only=True, slots=True)
class SamplingConfig:
    """How rollouts are drawn. All of it travels with every group, and the trainer goes by that."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        require(
            self.temperature > 0,
            "rollout.sampling.temperature",
            self.temperature,
            "must be above 0: a greedy rollout has no gradient",
        )
        require(
            self.top_p == 1.0 and self.top_k == -1 and self.min_p == 0.0,
            "rollout.sampling.top_p/top_k/min_p",
            (self.top_p, self.top_k, self.min_p),
            "truncated sampling makes the recorded log-probabilities those of another distribution "
            "than the trainer's, so importance ratios would be wrong; use top_p=1, top_k=-1 and "
            "min_p=0 (rollout.eval may truncate: nothing is trained on its answers)",
        )
        require(
            self.frequency_penalty == self.presence_penalty == 0.0
            and self.repetition_penalty == 1.0,
            "rollout.sampling.frequency_penalty/presence_penalty/repetition_penalty",
            (self.frequency_penalty, self.presence_penalty, self.repetition_penalty),
            "a penalty changes the distribution by what was written before, which the trainer does "
            "not compute, so importance ratios would be wrong; use 0, 0 and 1",
        )


@dataclass(kw_only=True, slots=True)
class EvalConfig:
    """How held-out prompts are answered."""

    num_samples: int = 1
    """Answers a prompt: pass@k and mean@k are given for k up to this."""
    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = -1
    full_score: float = 1.0
    """The reward from which on an answer counts as right."""
    pinned: bool = True
    """Let one of several engines stay at the version that is evaluated and answer alone; with a
    single engine answers are of that version or later ones, and tagged so."""

    def __post_init__(self) -> None:
        at_least(1, "rollout.eval", num_samples=self.num_samples)
        at_least(0, "rollout.eval", temperature=self.temperature)
        require(0 < self.top_p <= 1, "rollout.eval.top_p", self.top_p, "must lie in (0, 1]")
        require(
            self.top_k == -1 or self.top_k >= 1,
            "rollout.eval.top_k",
            self.top_k,
            "must be at least 1, or -1 for all tokens",
        )
        require(
            self.num_samples == 1 or self.temperature > 0,
            "rollout.eval.num_samples",
            self.num_samples,
            "greedy answers are all the same: set rollout.eval.temperature above 0",
        )


@dataclass(kw_only=True, slots=True)
class OpenAIConfig:
    """An OpenAI-compatible endpoint in front of the engines, one at each worker."""

    port: int | None = None
    """Of worker 0; worker 1 listens on the next one, and so on. 0 takes free ports (written to
    the run's folder); None starts none unless an agent needs one."""
    session_timeout_s: float = 3600.0
    """A session in which nothing is asked for this long is given up."""

    def __post_init__(self) -> None:
        require(
            self.session_timeout_s > 0,
            "rollout.openai.session_timeout_s",
            self.session_timeout_s,
            "must be above 0",
        )


@dataclass(kw_only=True, slots=True)
class EngineConfig:
    """One SGLang server."""

    tp_size: int = 1
    dtype: Dtype = Dtype.auto
    max_running_requests: int = 128
    max_total_tokens: int | None = None
    """Tokens of KV cache; None lets SGLang choose by `mem_fraction` (65536 on a CPU)."""
    mem_fraction: float | None = None
    """Part of a GPU's memory for weights and KV cache. None is 0.85, and less on a GPU that the
    engine shares with a trainer rank."""
    radix_cache: bool = False
    """Reuse KV of shared prefixes, by policy version. Needs weight_sync.pause_mode=in_place."""
    start_timeout_s: float = 600.0
    request_timeout_s: float = 600.0
    """Longest that one request may go without an answer."""
    max_restarts: int = 3
    """How often a server that died, or whose weights are torn, is started again in one run."""
    extra_args: list[str] = field(default_factory=list)
    """Further arguments for the server's command line."""

    def __post_init__(self) -> None:
        at_least(
            1,
            "rollout.engine",
            tp_size=self.tp_size,
            max_running_requests=self.max_running_requests,
        )
        at_least(0, "rollout.engine", max_restarts=self.max_restarts)
        require(
            self.mem_fraction is None or 0 < self.mem_fraction < 1,
            "rollout.engine.mem_fraction",
            self.mem_fraction,
            "must lie in (0, 1)",
        )


@dataclass(kw_only=True, slots=True)
class RolloutConfig:
    num_engines: int = 1
    num_workers: int = 1
    group_size: int = 8
    """Trajectories of one prompt."""
    max_prompt_tokens: int = 1024
    max_response_tokens: int = 1024
    """All that follows the prompt: with several turns the environment's words too."""
    on_long_prompt: OnLongPrompt = OnLongPrompt.refuse
    tail: TailPolicy = TailPolicy.continue_across_versions
    oversampling: float = 1.0
    """Groups admitted for each that the leash has room for; those above 1 cover for stragglers."""
    max_postponements: int = 2
    """How often a group may be stopped in favour of others; then it is run to its end."""
    filter_zero_variance: bool = False
    """Leave out groups whose rewards are all equal (they have no gradient) and run others."""
    max_filtered_ratio: float = 4.0
    """The most groups left out so for each one kept; beyond it they are kept, and counted."""
    max_groups_in_flight: int = 256
    """A worker's own bound; admission is nearly always the tighter one."""
    max_request_retries: int = 2
    """How often one failed sample is asked for again, from where it stood."""
    max_group_failures: int = 2
    """A prompt whose group failed that often is put into quarantine."""
    max_worker_restarts: int = 3
    """How often a worker that died is started again in one run."""
    reward_actors: int = 1
    """Actors that score episodes, spread over the nodes."""
    reward_processes: int = 1
    """Scoring processes of each such actor."""
    reward_timeout_s: float = 30.0
    log_rate: float = 0.01
    """Share of the groups whose trajectories are written to the run's folder, for `make show`."""
    eval_every: int = 25
    """Policy versions between two evaluations on held-out prompts (0: only first and last)."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    openai: OpenAIConfig = field(default_factory=OpenAIConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)

    def __post_init__(self) -> None:
        at_least(
            1,
            "rollout",
            num_engines=self.num_engines,
            num_workers=self.num_workers,
            max_prompt_tokens=self.max_prompt_tokens,
            max_response_tokens=self.max_response_tokens,
            max_groups_in_flight=self.max_groups_in_flight,
            max_group_failures=self.max_group_failures,
            oversampling=self.oversampling,
            reward_actors=self.reward_actors,
            reward_processes=self.reward_processes,
        )
        at_least(
            0,
            "rollout",
            eval_every=self.eval_every,
            max_request_retries=self.max_request_retries,
            max_postponements=self.max_postponements,
            max_filtered_ratio=self.max_filtered_ratio,
            max_worker_restarts=self.max_worker_restarts,
        )
        require(0 <= self.log_rate <= 1, "rollout.log_rate", self.log_rate, "must lie in [0, 1]")
        if (port := self.openai.port) is not None:
            most = MAX_PORT - self.num_workers + 1
            require(
                0 <= port <= most,
                "rollout.openai.port",
                port,
                f"must lie in 0..{most}: each of {self.num_workers} workers takes the next one",
            )
        require(
            self.group_size >= 2,
            "rollout.group_size",
            self.group_size,
            "GRPO compares the trajectories of a group: at least 2",
        )


@dataclass(kw_only=True, slots=True)
class RewardConfig:
    """One part of the reward; its name is its key in `task.rewards`."""

    kind: RewardKind = RewardKind.task
    weight: float = 1.0
    """Factor in the sum that becomes the reward."""
    function: str | None = None
    """function: `module:name` or `file.py:name`, called with (prompt, episode), gives a number."""
    url: str | None = None
    """http: where to POST; judge, teacher: the base URL, as in http://host:port/v1."""
    model: str | None = None
    """judge, teacher: name of the model there."""
    api_key_env: str | None = None
    """judge, teacher, http: environment variable that holds the key."""
    prompt: str | None = None
    """judge: what it is asked; {prompt}, {answer} and {solution} are filled in."""
    timeout_s: float = 120.0
    """http, judge, teacher: longest that one answer may take."""
    max_retries: int = 3
    """http, judge, teacher: after a failure. Then the episode is unscored: its group is not trained
    and its prompt runs again, as after any failed group."""
    max_per_second: float | None = None
    """http, judge, teacher: the most requests a second from one worker; None for no limit."""

    def __post_init__(self) -> None:
        name = f"task.rewards.*.kind={self.kind.name}"
        remote = self.kind in (RewardKind.http, RewardKind.judge, RewardKind.teacher)
        require(
            not remote or bool(self.url),
            "task.rewards.*.url",
            self.url,
            f"{name} needs the address of the service",
        )
        require(
            self.kind is not RewardKind.function or bool(self.function),
            "task.rewards.*.function",
            self.function,
            f"{name} needs module:name or file.py:name",
        )
        require(
            self.kind not in (RewardKind.judge, RewardKind.teacher) or bool(self.model),
            "task.rewards.*.model",
            self.model,
            f"{name} needs the model's name",
        )
        require(self.timeout_s > 0, "task.rewards.*.timeout_s", self.timeout_s, "must be above 0")
        at_least(0, "task.rewards.*", max_retries=self.max_retries)
        require(
            self.max_per_second is None or self.max_per_second > 0,
            "task.rewards.*.max_per_second",
            self.max_per_second,
            "must be above 0, or null",
        )


@dataclass(kw_only=True, slots=True)
class TaskConfig:
    kind: TaskKind = TaskKind.reasoning_gym
    name: str = "chain_sum"
    """reasoning_gym: the task's name. gsm8k, math: the Hugging Face data set (unless `path` is
    set). verifiers: the environment's name."""
    params: dict[str, Any] = field(default_factory=dict)
    """Arguments of the task's generator or environment; what a custom task makes of them."""
    path: str | None = None
    """gsm8k, math, code: a JSONL file; docs/tasks.md gives the form of a line."""
    eval_path: str | None = None
    """JSONL of held-out prompts; None holds back the last `eval_size` lines of `path`."""
    prompt_pattern: str | None = None
    """A regular expression; its match in the question (group 1 if there is one) is the prompt."""
    instruction: str = ""
    """Text put after the question."""
    chat_template: bool = False
    """Write the conversation with the tokenizer's chat template; otherwise texts follow each other
    as they are."""
    system_prompt: str | None = None
    """First message of every conversation."""
    factory: str | None = None
    """custom: `module:name` or `file.py:name`, called with these settings, makes the task."""
    env: str | None = None
    """The same, called with (these settings, prompt), makes each episode's environment; None is
    the task's own."""
    agent: str | None = None
    """The same, an async function called with (session, prompt): a program that talks to the model
    through the OpenAI-compatible endpoint and returns the reward."""
    tools: list[str] = field(default_factory=list)
    """Tools that the model may call: `python` (in the sandbox), or functions as `module:name`."""
    tool_parser: ToolParser = ToolParser.hermes
    max_turns: int = 1
    """The most answers of the model in one episode."""
    max_turn_tokens: int | None = None
    """The most tokens of one answer; None leaves it to rollout.max_response_tokens."""
    turn_timeout_s: float = 600.0
    """Longest that the environment or a tool may take over one step."""
    episode_timeout_s: float = 7200.0
    """Longest that a whole episode may take."""
    rewards: dict[str, RewardConfig] = field(default_factory=dict)
    """Parts of the reward by name; none: the environment's own, or else the task's score."""
    eval_size: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        at_least(1, "task", eval_size=self.eval_size, max_turns=self.max_turns)
        for name, value in (
            ("turn_timeout_s", self.turn_timeout_s),
            ("episode_timeout_s", self.episode_timeout_s),
        ):
            require(value > 0, f"task.{name}", value, "must be above 0")
        require(
            self.max_turn_tokens is None or self.max_turn_tokens >= 1,
            "task.max_turn_tokens",
            self.max_turn_tokens,
            "must be at least 1, or null",
        )
        require(
            (self.kind is TaskKind.custom) == (self.factory is not None),
            "task.factory",
            self.factory,
            "task.kind=custom needs module:name or file.py:name, and no other kind has one",
        )
        require(
            self.agent is None or self.env is None,
            "task.agent",
            self.agent,
            "an agent brings its own environment: leave task.env out",
        )
