"""The settings of generation: the rollout pool, its engines, and the tasks with their rewards."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

from configs.checks import (
    CODE,
    CODE_PATTERN,
    FINITE,
    FRACTION,
    LARGEST_COUNT,
    LARGEST_SIZE,
    MAX_PORT,
    NOT_EMPTY,
    NOT_NEGATIVE,
    PORT,
    POSITIVE,
    SECONDS,
    SEED,
    VARIABLE,
    Rule,
    Section,
    at_least,
    live,
    matching,
    within,
)
from configs.choices import (
    Dtype,
    OnLongPrompt,
    RewardKind,
    RewardScope,
    TailPolicy,
    TaskKind,
    Thoughts,
    ToolParser,
)
from configs.container_schema import ContainerConfig

ARGUMENTS = matching(r"[^\0\n]+", "words of a command, none empty or of several lines")
STOPS = matching(r"(?s).+", "not empty")
RENDERER = matching(r"[a-z0-9][a-z0-9.-]*", "auto or the name of a renderer, as qwen3")
LANGUAGES = matching(r"[a-z0-9_][a-z0-9_+#]*", "words in lower case, as [cpp, c++]")
TOOLS = matching(
    rf"python|mcp:.+|{CODE_PATTERN}",
    "python, module:name or file.py:name, or mcp: and the URL or command of a server",
)


@dataclass(kw_only=True, slots=True)
class SamplingConfig(Section):
    """How rollouts are sampled. Recorded with every group, for the trainer."""

    SECTION: ClassVar[str] = "rollout.sampling"

    temperature: float = field(default=1.0, metadata=live(POSITIVE))
    """Greedy rollouts, at 0, would have no gradient."""
    top_p: float = field(default=1.0, metadata=within(above=0, most=1))
    """Draw each token from the most likely ones that have this probability together."""
    top_k: int = field(default=-1, metadata=within(2, 1024, also=-1))
    """Draw each token from so many most likely ones. Their ids travel with the token, so that the
    trainer computes the same distribution: docs/algorithms.md#truncated-sampling."""
    min_p: float = field(default=0.0, metadata=FRACTION)
    """Draw no token that is less than this times as likely as the most likely one."""
    frequency_penalty: float = field(default=0.0, metadata=FINITE)
    presence_penalty: float = field(default=0.0, metadata=FINITE)
    repetition_penalty: float = field(default=1.0, metadata=POSITIVE)

    def rules(self) -> Iterator[Rule]:
        yield Rule(
            self.top_k != -1 or (self.top_p == 1.0 and self.min_p == 0.0),
            "top_k",
            "with top_p or min_p the ids among which a token was drawn travel with it, and need a "
            "bound: set rollout.sampling.top_k, as 50 (rollout.eval needs none: nothing is trained "
            "on its answers)",
        )
        has_no_penalty = self.frequency_penalty == self.presence_penalty == 0.0
        yield Rule(
            has_no_penalty and self.repetition_penalty == 1.0,
            "frequency_penalty/presence_penalty/repetition_penalty",
            "a penalty changes the distribution depending on earlier tokens, which the trainer "
            "does not compute, so importance ratios would be wrong; use 0, 0 and 1",
        )

    @property
    def is_truncated(self) -> bool:
        """A token is drawn from a part of the vocabulary."""
        return self.top_k != -1  # top_p and min_p need it


@dataclass(kw_only=True, slots=True)
class EvalConfig(Section):
    """How held-out prompts are answered."""

    SECTION: ClassVar[str] = "rollout.eval"

    num_samples: int = field(default=1, metadata=at_least(1))
    """Answers per prompt: pass@k and mean@k are reported for k up to this."""
    temperature: float = field(default=0.0, metadata=NOT_NEGATIVE)
    """0 is greedy."""
    top_p: float = field(default=1.0, metadata=within(above=0, most=1))
    top_k: int = field(default=-1, metadata=within(1, LARGEST_COUNT, also=-1))
    full_score: float = field(default=1.0, metadata=FINITE)
    """The lowest reward of an answer that counts as right."""
    pinned: bool = True
    """Reserve one of several engines for the evaluation and keep it at one version; with a single
    engine, answers come from the version or later ones, as recorded."""
    command: list[str] = field(default_factory=list, metadata=ARGUMENTS)
    """A program that evaluates exported checkpoints beside training, as [python, evals.py,
    "{model}", "{out}"]: docs/watching.md#by-a-program-of-your-own."""
    command_every: int | None = field(default=None, metadata=at_least(1))
    """Steps between two checkpoints that `command` evaluates; it always does the last one."""
    command_timeout_s: float = field(default=3600.0, metadata=SECONDS)
    """Longest that one of its evaluations may take, with the export of the model."""

    def rules(self) -> Iterator[Rule]:
        fix = "greedy answers are all the same: set rollout.eval.temperature above 0"
        yield Rule(self.num_samples == 1 or self.temperature > 0, "num_samples", fix)
        fix = "says how often rollout.eval.command runs: set both or neither"
        yield Rule(bool(self.command) == bool(self.command_every), "command_every", fix)
        words = " ".join(self.command[1:])
        has_both = "{model}" in words and "{out}" in words
        fix = "its arguments must hold {model}, the exported model, and {out}, a file to write"
        yield Rule(not self.command or has_both, "command", fix)


@dataclass(kw_only=True, slots=True)
class OpenAIConfig(Section):
    """An OpenAI-compatible endpoint in front of the engines, one at each worker."""

    SECTION: ClassVar[str] = "rollout.openai"

    port: int | None = field(default=None, metadata=PORT)
    """Worker 0's; worker 1 listens on the next one, and so on. 0 takes free ports (written to
    the run's folder); None starts none unless an agent needs one."""
    session_timeout_s: float = field(default=3600.0, metadata=SECONDS)
    """A session without a request for this long is closed."""
    idle_timeout_s: float = field(default=300.0, metadata=SECONDS)
    """A group of an external program without a request for this long is given up as soon as its
    credit is needed: another group waits for one, and no full batch is ready."""
    sampling_overrides: bool = False
    """Requests may choose their own temperature, from 0.05 to 2, and, with rollout.sampling.top_k,
    a truncation that leaves no more tokens than the run's. False refuses what differs from
    rollout.sampling."""
    max_groups: int = field(default=128, metadata=at_least(1))
    """Groups of external programs in progress at one worker. Further requests for groups wait."""
    max_requests: int = field(default=64, metadata=at_least(1))
    """Requests in progress in one session. A further one gets 429."""
    max_answers: int = field(default=1000, metadata=at_least(1))
    """Answers that the model begins in one session. A further request gets 400."""
    max_session_tokens: int = field(default=1_000_000, metadata=at_least(1))
    """Tokens of all answers of one session. Once there are so many, a further request gets 400."""


@dataclass(kw_only=True, slots=True)
class EngineConfig(Section):
    """One SGLang server."""

    SECTION: ClassVar[str] = "rollout.engine"

    tp_size: int = field(default=1, metadata=at_least(1))
    dtype: Dtype = Dtype.auto
    max_running_requests: int = field(default=128, metadata=at_least(1))
    max_total_tokens: int | None = field(default=None, metadata=at_least(1))
    """Tokens of KV cache; None lets SGLang choose by `mem_fraction` (65536 on a CPU)."""
    mem_fraction: float | None = field(default=None, metadata=within(above=0, below=1))
    """Fraction of a GPU's memory for weights and KV cache. None lets SGLang choose (more than 0.8
    of 80 GB), or is less on a GPU that the engine shares with a trainer rank."""
    radix_cache: bool = True
    """Reuse KV of shared prefixes, never that of older weights. weight_sync.pause_mode=retract
    needs it off."""
    deterministic: bool = False
    """SGLang's deterministic inference: log-probabilities do not depend on which requests share the
    batch. Needs a GPU, and costs throughput."""
    routing_replay: bool = False
    """In a mixture of experts the trainer sends each token to the experts that the engine has
    chosen. They take a byte for each layer and expert of a token in the buffer."""
    start_timeout_s: float = field(default=600.0, metadata=SECONDS)
    request_timeout_s: float = field(default=600.0, metadata=SECONDS)
    """Longest that one request may take."""
    max_restarts: int = field(default=3, metadata=at_least(0))
    """How often a server that died, or failed halfway through a commit, is restarted in one run."""
    extra_args: list[str] = field(default_factory=list)
    """Further arguments for the server's command line. `tp_size` is the number of GPUs, whatever
    they are used for: --enable-dp-attention with --dp-size, and --ep-size, divide them."""

    def rules(self) -> Iterator[Rule]:
        given = _flags(self.extra_args)
        for flags, fix in _NOT_EXTRA:
            refused = [flag for flag in flags if flag in given]
            yield Rule(not refused, "extra_args", f"without {' '.join(refused)}: {fix}")
        yield Rule(
            self.dp_size == 1 or "--enable-dp-attention" in given,
            "extra_args",
            "--dp-size alone would start more copies of the model than there are GPUs reserved: "
            "set rollout.num_engines, or add --enable-dp-attention",
        )
        for what, size in (("--dp-size", self.dp_size), ("--ep-size", _size(given, _EP_SIZE))):
            fix = f"{what} {size} must divide rollout.engine.tp_size={self.tp_size}"
            yield Rule(size > 0 and self.tp_size % size == 0, "extra_args", fix)
        silent = [flag for flag in given if flag.startswith(_WITHOUT_ROUTES)]
        if given.get("--moe-runner-backend") == "triton_kernel":
            silent.append("--moe-runner-backend triton_kernel")
        yield Rule(
            not (self.routing_replay and silent),
            "routing_replay",
            f"with {', '.join(silent)} engines do not say which experts they have chosen for each "
            "token, or say wrong ones; leave it out of extra_args, or set false",
        )

    @property
    def quantizes(self) -> list[str]:
        """The `extra_args` by which the server computes in another precision than `dtype`."""
        return [flag for flag in _flags(self.extra_args) if flag in ("--dtype", CACHE_DTYPE)]

    @property
    def splitting_args(self) -> list[str]:
        """The `extra_args` by which a server is more than one process or group of requests."""
        splitting = (*_DP_SIZE, "--enable-dp-attention", "--tokenizer-worker-num")
        return [flag for flag in _flags(self.extra_args) if flag in splitting]

    @property
    def dp_size(self) -> int:
        """Parts of the GPUs that each compute the attention of their own requests."""
        return _size(_flags(self.extra_args), _DP_SIZE)


_DP_SIZE = ("--dp-size", "--data-parallel-size", "--dp")
_EP_SIZE = ("--ep-size", "--expert-parallel-size", "--ep")
CACHE_DTYPE = "--kv-cache-dtype"
"""A server rounds the keys and values of earlier tokens."""
_WITHOUT_ROUTES = (
    "--speculative-algorithm",
    "--enable-hierarchical-cache",  # a prefix that comes back has the experts of other tokens
    "--enable-lmcache",
    "--disaggregation-mode",
)
_NOT_EXTRA = (
    (
        ("--tp-size", "--tensor-parallel-size", "--tp"),
        "set rollout.engine.tp_size, by which GPUs are reserved",
    ),
    (
        ("--nnodes", "--node-rank"),
        "the GPUs of an engine are on one machine, where its weights are staged; "
        "start more engines (rollout.num_engines)",
    ),
    (
        ("--pp-size", "--pipeline-parallel-size", "--pp"),
        "no GPUs are reserved for pipeline stages; set rollout.engine.tp_size",
    ),
    (
        ("--enable-deterministic-inference", "--rl-on-policy-target"),
        "set rollout.engine.deterministic=true, which also gives each sample its own seed",
    ),
    (
        ("--quantization", "--modelopt-quant", "--rl-quant-profile", "--torchao-config"),
        "SGLang loads a new version into weights that it has quantized, and ends at the first "
        "commit; engines compute in rollout.engine.dtype: docs/weight-sync.md#quantized-engines",
    ),
    (
        ("--enable-return-routed-experts",),
        "set rollout.engine.routing_replay=true, which also makes the trainer use them",
    ),
)


def _flags(arguments: list[str]) -> dict[str, str]:
    """Values by flag: what follows its `=`, else the next argument."""
    given = {}
    for word, after in zip(arguments, [*arguments[1:], ""], strict=False):
        flag, sign, value = word.partition("=")
        given[flag] = value if sign else after
    return given


def _size(given: dict[str, str], names: tuple[str, ...]) -> int:
    """1 if none is given, 0 for what is no number."""
    values = [given[name] for name in names if name in given]
    return 1 if not values else int(values[-1]) if values[-1].isdecimal() else 0


@dataclass(kw_only=True, slots=True)
class RolloutConfig(Section):
    SECTION: ClassVar[str] = "rollout"

    num_engines: int = field(default=1, metadata=live(at_least(1)))
    num_workers: int = field(default=1, metadata=at_least(1))
    group_size: int = field(default=8, metadata=live(at_least(2)))
    """Trajectories per prompt, which GRPO compares with each other."""
    max_prompt_tokens: int = field(default=1024, metadata=at_least(1))
    max_response_tokens: int = field(default=1024, metadata=at_least(1))
    """All tokens after the prompt, including the environment's if there are several turns."""
    on_long_prompt: OnLongPrompt = OnLongPrompt.refuse
    tail: TailPolicy = field(default=TailPolicy.continue_across_versions, metadata=live())
    keep_partial: bool = field(default=True, metadata=live())
    """Samples that `tail` stopped keep their tokens; if not, they begin again at their prompt."""
    keep_every_tokens: int = field(default=1024, metadata=at_least(0))
    """When a sample has grown by so many tokens, its group's tokens are kept in Redis: this is the
    most that it loses if its worker dies. A worker that stops keeps all. (0: nothing is kept.)"""
    oversampling: float = field(default=1.0, metadata=live(within(1)))
    """Factor on the number of groups that admission allows; above 1 compensates for stragglers."""
    max_postponements: int = field(default=2, metadata=live(at_least(0)))
    """How often a group may be stopped in favour of others; then it runs to completion."""
    filter_zero_variance: bool = field(default=False, metadata=live())
    """Discard groups whose rewards are all equal (they have no gradient) and run others."""
    max_filtered_ratio: float = field(default=4.0, metadata=live(NOT_NEGATIVE))
    """The most groups discarded this way per kept one; beyond it they are kept, and counted."""
    max_groups_in_flight: int = field(default=256, metadata=live(at_least(1)))
    """Per worker; admission, or room at the engines, is nearly always the tighter bound."""
    max_request_retries: int = field(default=2, metadata=at_least(0))
    """How often a failed sample is retried, from where it stood."""
    max_group_failures: int = field(default=2, metadata=at_least(1))
    """A prompt whose group failed this often is put into quarantine."""
    max_worker_restarts: int = field(default=3, metadata=at_least(0))
    """How often a worker that died, or was told to end, is restarted in one run."""
    preemption_grace_s: float = field(default=20.0, metadata=SECONDS)
    """Time that requests and groups have to end when their process gets SIGTERM."""
    reward_actors: int = field(default=0, metadata=at_least(0))
    """Actors that score episodes, spread over the nodes (0: the workers score)."""
    reward_processes: int = field(default=1, metadata=at_least(1))
    """Scoring processes per reward actor, or per worker if there are none."""
    reward_timeout_s: float = field(default=30.0, metadata=SECONDS)
    log_rate: float = field(default=0.01, metadata=FRACTION)
    """Fraction of the groups whose trajectories are written to the run's folder, for `make show`.
    """
    trace_endpoint: str | None = field(
        default=None,
        metadata=matching(
            r"https?://[^\s/@?]+(/[^\s@?]*)?",
            "an address as http://host:4318/v1/traces, without a password",
        ),
    )
    """Address for OpenTelemetry spans of episodes and requests, by OTLP over HTTP (None: no
    spans). Needs the extra leash-rl[tracing]."""
    eval_every: int = field(default=25, metadata=live(at_least(0)))
    """Policy versions between two evaluations on held-out prompts (0: only first and last)."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    openai: OpenAIConfig = field(default_factory=OpenAIConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)

    @property
    def longest_trajectory(self) -> int:
        """Tokens that a trajectory may have: the first prompt and all that follows it."""
        return self.max_prompt_tokens + self.max_response_tokens

    def rules(self) -> Iterator[Rule]:
        if (port := self.openai.port) is not None:
            most = MAX_PORT - self.num_workers + 1
            fix = f"must lie in 0..{most}: each of {self.num_workers} workers takes the next one"
            yield Rule(port <= most, "openai.port", fix)
        yield Rule(
            not (self.openai.sampling_overrides and self.engine.deterministic),
            "openai.sampling_overrides",
            "a request could choose min_p, at which SGLang ends with the seeds that "
            "rollout.engine.deterministic=true gives each request; set one of them to false",
        )
        if self.sampling.is_truncated:
            yield from self._truncation_rules()

    def _truncation_rules(self) -> Iterator[Rule]:
        """Rules for engines and groups that record the candidates of each token."""
        given = _flags(self.engine.extra_args)
        yield Rule(
            "--speculative-algorithm" not in given,
            "sampling.top_k",
            "engines with --speculative-algorithm of rollout.engine.extra_args do not return the "
            "ids among which a token was drawn; set -1, or remove that argument",
        )
        most = given.get("--sampling-mask-max-tokens", "")
        yield Rule(
            not most.isdecimal() or self.sampling.top_k <= int(most),
            "sampling.top_k",
            f"is above --sampling-mask-max-tokens {most} of rollout.engine.extra_args, and engines "
            "would refuse each request; lower it, or leave that argument out",
        )
        yield Rule(
            self.sampling.min_p == 0 or not self.engine.deterministic,
            "sampling.min_p",
            "SGLang has no such sampling with the seeds that rollout.engine.deterministic=true "
            "gives each request; set 0",
        )
        num_tokens = self.group_size * self.longest_trajectory
        size = 4 * num_tokens * self.sampling.top_k / 2**30
        yield Rule(
            size <= 1,
            "sampling.top_k",
            "the ids among which the tokens of a group were drawn could take "
            f"{size:.1f} GiB, and the most is 1; lower it",
        )


@dataclass(kw_only=True, slots=True)
class Criterion(Section):
    """One criterion of a judge; its name is its key in `task.rewards.*.rubric`."""

    SECTION: ClassVar[str] = "task.rewards.*.rubric.*"

    text: str = field(default="", metadata=NOT_EMPTY)
    """The question that the judge answers."""
    weight: float = field(default=1.0, metadata=POSITIVE)
    """In the mean over the criteria."""


@dataclass(kw_only=True, slots=True)
class RewardConfig(Section):
    """One part of the reward; its name is its key in `task.rewards`."""

    SECTION: ClassVar[str] = "task.rewards.*"

    kind: RewardKind = RewardKind.task
    weight: float = field(default=1.0, metadata=FINITE)
    """Factor in the sum that becomes the reward."""
    function: str | None = field(default=None, metadata=CODE)
    """function: `module:name` or `file.py:name`, called with (prompt, episode), returns a number. A
    parameter named `solution` gets the task's right answer, one named `row` the data's row."""
    of: RewardScope = RewardScope.episode
    """function: `group` calls it once for all episodes of a prompt, with (prompt, episodes); it
    returns a number or None for each. Evaluations leave such a part out."""
    url: str | None = field(
        default=None,
        metadata=matching(r"https?://[^\s/]+.*", "an address as http://host:port/path"),
    )
    """http: where to POST; judge, teacher: the base URL, as in http://host:port/v1. teacher:
    without /v1 that of an SGLang server. code_tests: a sandbox service (`make sandbox`, or
    SandboxFusion) that runs the programs; None: this run's own machines."""
    path: str | None = field(default=None, metadata=NOT_EMPTY)
    """teacher: instead of `url`, the folder of a model that the run serves itself."""
    model: str | None = field(default=None, metadata=NOT_EMPTY)
    """judge, teacher: name of the model there; an SGLang server needs none."""
    api_key_env: str | None = field(default=None, metadata=VARIABLE)
    """For `url`: environment variable that holds the key."""
    prompt: str | None = None
    """judge: its prompt; {prompt}, {answer}, {solution} and, of `rubric`, {rubric} are put in."""
    rubric: dict[str, Criterion] = field(default_factory=dict)
    """judge: criteria by name. It scores each from 0 to 1, and the weighted mean is the reward."""
    timeout_s: float = field(default=120.0, metadata=SECONDS)
    """For `url`: longest that one answer may take. code_tests with `url`: longest that one test may
    take, and that all tests of an answer may run."""
    max_retries: int = field(default=3, metadata=at_least(0))
    """For `url`: retries after a failure. Then the episode is unscored: its group is not trained
    and its prompt runs again, as after any failed group."""
    max_per_second: float | None = field(default=None, metadata=POSITIVE)
    """For `url`: the most requests per second from one worker; None for no limit."""
    all_or_nothing: bool = False
    """code_tests: 1 if all tests of a prompt pass, else 0, instead of the fraction that passes; the
    tests after a failed one are skipped."""
    cpu_time_s: int = field(default=5, metadata=within(1, 3600))
    """code_tests: the most seconds of CPU of one test, all threads together. A service at `url` has
    its own."""
    wall_time_s: float = field(default=10.0, metadata=SECONDS)
    """code_tests: the most seconds that one test may take; all tests of an answer share
    rollout.reward_timeout_s, with `url` task.rewards.*.timeout_s."""
    memory_bytes: int = field(default=512 * 2**20, metadata=within(64 * 2**20, LARGEST_SIZE))
    """code_tests: the most memory of one test, as address space."""
    python: str | None = field(default=None, metadata=NOT_EMPTY)
    """code_tests: the interpreter of an environment, as env/bin/python (3.11 or newer), whose
    packages programs may import; None: only the standard library."""
    command: list[str] = field(default_factory=list, metadata=ARGUMENTS)
    """code_tests: what runs a program of another language, as [node, "{file}"]; its tests must be
    inputs with outputs. If empty, programs are Python."""
    compile: list[str] = field(default_factory=list, metadata=ARGUMENTS)
    """code_tests: the compiler that makes a file of the program, as [gcc, -x, c, "{file}", -o,
    "{output}"]. `command` then runs that file, as ["{file}"]."""
    compile_time_s: float = field(default=10.0, metadata=SECONDS)
    """code_tests: the most seconds that `compile` may take for one answer."""
    languages: list[str] = field(default_factory=list, metadata=LANGUAGES)
    """code_tests: how an answer may call the language of `command` after the backquotes, as
    [javascript, js]. With `url` the first is what the service calls it."""

    @property
    def gives_reward(self) -> bool:
        """Whether it adds to the reward: a teacher's log-probabilities become a column instead."""
        return self.kind is not RewardKind.teacher

    @property
    def runs_tests(self) -> bool:
        """Whether it runs programs of the model: here, or at a service if it has a `url`."""
        return self.kind is RewardKind.code_tests

    def rules(self) -> Iterator[Rule]:
        name, kind = f"task.rewards.*.kind={self.kind.name}", self.kind
        is_teacher = not self.gives_reward
        needs_url = is_teacher or kind in (RewardKind.judge, RewardKind.http)
        fix = f"{name} needs the address of the service"
        yield Rule(bool(self.url or self.path) or not needs_url, "url", fix)
        fix = "the file was written without the password of this address; put it back"
        yield Rule(self.url is None or ":***@" not in self.url, "url", fix)
        yield Rule(
            self.path is None or (is_teacher and self.url is None),
            "path",
            "is the folder of a teacher that the run serves itself; set either "
            "task.rewards.*.url or this",
        )
        needs_model = kind is RewardKind.judge or (
            is_teacher and self.url is not None and self.url.rstrip("/").endswith("/v1")
        )
        has_function = bool(self.function) or kind is not RewardKind.function
        yield Rule(has_function, "function", f"{name} needs module:name or file.py:name")
        fix = f"{name} scores single episodes; only kind: function scores groups"
        yield Rule(self.of is RewardScope.episode or kind is RewardKind.function, "of", fix)
        yield Rule(bool(self.model) or not needs_model, "model", f"{name} needs the model's name")
        yield Rule(
            self.weight == 1.0 or not is_teacher,
            "weight",
            f"{name} gives no reward; set the weight of what learns from it, as "
            "algorithm.streams.teacher.weight",
        )
        yield from self._rubric_rules(name)
        yield Rule(
            not self.command
            or any("{file}" in argument for argument in self.command[1:])
            or (bool(self.compile) and self.command[0] == "{file}"),
            "command",
            'an argument must hold {file}, the path of the program, as in [node, "{file}"]',
        )
        yield Rule(
            bool(self.languages) == bool(self.command)
            or (self.runs_tests and self.url is not None),
            "languages",
            "names the language of task.rewards.*.command, as it follows the backquotes of a "
            "program: set both or neither",
        )
        fix = "programs run either with this Python or by task.rewards.*.command"
        yield Rule(self.python is None or not self.command, "python", fix)
        yield from self._compile_rules()
        for setting in fields(self):
            if setting.name in _OF_CODE_TESTS and not self.runs_tests:
                is_default = getattr(self, setting.name) in (setting.default, [])
                yield Rule(is_default, setting.name, f"{name} runs no tests of programs: leave out")

    def _rubric_rules(self, name: str) -> Iterator[Rule]:
        given = list(self.rubric)
        is_judge = self.kind is RewardKind.judge
        yield Rule(is_judge or not given, "rubric", f"{name} asks no judge; leave it out", given)
        wrong = [one for one in given if not re.fullmatch(r"\w[\w.-]*", one)]
        fix = "the name of a criterion has letters, digits, _, - and . only, as in to-the-point"
        yield Rule(not wrong, "rubric", fix, wrong)
        yield Rule(
            self.prompt is None or not is_judge or ("{rubric}" in self.prompt) == bool(given),
            "prompt",
            "must hold {rubric}, for the criteria of task.rewards.*.rubric, if there are any, and "
            "otherwise must not",
        )

    def _compile_rules(self) -> Iterator[Rule]:
        yield Rule(
            not self.compile or bool(self.command),
            "compile",
            'makes what task.rewards.*.command runs; set that too, to ["{file}"] for an executable',
        )
        yield Rule(
            not self.compile
            or all(any(word in argument for argument in self.compile[1:]) for word in _MADE),
            "compile",
            "its arguments must hold {file}, the path of the program, and {output}, that of what "
            'it makes, as in [gcc, -x, c, "{file}", -o, "{output}"]',
        )
        if self.runs_tests and self.url is not None:
            for setting in ("python", "command", "compile"):
                yield Rule(
                    not getattr(self, setting),
                    setting,
                    "the service at task.rewards.*.url runs the programs; set it there (make "
                    "sandbox), and here only the language, as task.rewards.*.languages",
                )
            needed_s = self.wall_time_s + self.compile_time_s
            yield Rule(
                needed_s <= self.timeout_s,
                "timeout_s",
                f"one test may take {needed_s:g} s (task.rewards.*.wall_time_s and "
                "compile_time_s); raise this, or lower them",
            )


_MADE = ("{file}", "{output}")
_OF_CODE_TESTS = (
    "all_or_nothing",
    "cpu_time_s",
    "wall_time_s",
    "memory_bytes",
    "python",
    "command",
    "compile",
    "compile_time_s",
)
TEST_TIME_FRACTION = 0.8
"""Fraction of `rollout.reward_timeout_s` for running all tests of a completion, before the end."""


DEFAULT_NAME = "chain_sum"
MAX_ROUND = 1000
"""Prompts of a mixture among which each task has exactly its part."""
HUB_KINDS = (TaskKind.questions, TaskKind.gsm8k, TaskKind.math)
"""Kinds of task whose prompts may come from the Hugging Face hub."""


@dataclass(kw_only=True, slots=True)
class TaskSource(Section):
    """The source of a task's prompts, and the course and score of its episodes."""

    SECTION: ClassVar[str] = "task"

    kind: TaskKind = TaskKind.reasoning_gym
    name: str = field(default=DEFAULT_NAME, metadata=NOT_EMPTY)
    """reasoning_gym: the task's name. questions, gsm8k, math: the Hugging Face data set, or the
    folder of one (unless `path` is set). verifiers: the environment's package (its taskset)."""
    params: dict[str, Any] = field(default_factory=dict)
    """Arguments of the task's generator or environment; free for a custom task."""
    path: str | None = field(default=None, metadata=NOT_EMPTY)
    """questions, gsm8k, math, code, repository: a file in JSONL, JSON, CSV, Parquet or Arrow, or a
    folder; docs/data.md describes their rows. verifiers: a folder with the environment's package,
    if that is not installed."""
    python: str | None = field(default=None, metadata=NOT_EMPTY)
    """verifiers: the interpreter of an environment, as env/bin/python, that has the library and the
    packages of its environments; None: that of .venv-verifiers, which `make install-verifiers`
    makes beside .venv."""
    eval_path: str | None = field(default=None, metadata=NOT_EMPTY)
    """A file of held-out prompts; None holds out the last `eval_size` lines of `path`."""
    prompt_pattern: str | None = None
    """A regular expression; its match in the question (group 1 if there is one) is the prompt."""
    instruction: str = ""
    """Text put after the question."""
    factory: str | None = field(default=None, metadata=CODE)
    """custom: `module:name` or `file.py:name`, called with these settings, returns the task."""
    env: str | None = field(default=None, metadata=CODE)
    """The same, called with (these settings, prompt), returns each episode's environment; a
    parameter named `solution` gets the task's right answer, one named `row` the data's row. None is
    the task's own."""
    tools: list[str] = field(default_factory=list, metadata=TOOLS)
    """Tools that the model may call: `python` (in the sandbox), functions as `module:name`, and
    those of MCP servers, as `mcp:https://host/mcp` or `mcp:command of the server`."""
    rewards: dict[str, RewardConfig] = field(default_factory=dict)
    """Parts of the reward by name; if empty, the environment's reward, or else the task's score."""
    eval_size: int = field(default=128, metadata=at_least(1))

    @property
    def is_from_hub(self) -> bool:
        """The prompts come from the Hugging Face data set `name`."""
        # Questions may be listed in `params` instead; then nobody has named a data set.
        is_named = self.kind is not TaskKind.questions or self.name != DEFAULT_NAME
        return self.kind in HUB_KINDS and self.path is None and is_named

    @property
    def teachers(self) -> list[str]:
        """Names of the parts of `rewards` that give no reward but a column."""
        return [name for name, reward in self.rewards.items() if not reward.gives_reward]

    def rules(self) -> Iterator[Rule]:
        fix = "task.kind=custom needs module:name or file.py:name, and no other kind has one"
        yield Rule((self.kind is TaskKind.custom) == (self.factory is not None), "factory", fix)
        fix = "runs the environments of task.kind=verifiers only; leave it out"
        yield Rule(self.python is None or self.kind is TaskKind.verifiers, "python", fix)


@dataclass(kw_only=True, slots=True)
class MixedTask(TaskSource):
    """One task of a mixture; its name is its key in `task.tasks`. All other settings of `task` are
    the same for every task of the mixture."""

    SECTION: ClassVar[str] = "task.tasks.*"

    weight: int = field(default=1, metadata=within(1, MAX_ROUND))
    """Prompts of this task in each round of prompts, which has the weights of all tasks together.
    """

    def rules(self) -> Iterator[Rule]:
        yield from TaskSource.rules(self)
        fix = "a mixture has no mixtures in it; name their tasks one by one"
        yield Rule(self.kind is not TaskKind.mixture, "kind", fix)
        fix = "every trajectory of a run has a teacher or none has: put it into task.rewards"
        yield Rule(not self.teachers, "rewards", fix, self.teachers)


FILE_KINDS = (*HUB_KINDS, TaskKind.code, TaskKind.repository)
"""Kinds of task whose `path` is a file of problems."""


@dataclass(kw_only=True, slots=True)
class EvalSet(TaskSource):
    """A further set of held-out prompts, of a task that is not trained; its name is its key in
    `task.eval_sets`, and its rewards are added to those in `task.rewards`."""

    SECTION: ClassVar[str] = "task.eval_sets.*"

    eval_size: int = field(default=1024, metadata=at_least(1))
    """The most prompts. A file's are its first lines, unless `eval_path` is set, a data set's those
    of its split `test`."""
    num_samples: int | None = field(default=None, metadata=at_least(1))
    """Answers per prompt; None, here and below: as rollout.eval."""
    temperature: float | None = field(default=None, metadata=NOT_NEGATIVE)
    top_p: float | None = field(default=None, metadata=within(above=0, most=1))
    top_k: int | None = field(default=None, metadata=within(1, LARGEST_COUNT, also=-1))
    full_score: float | None = field(default=None, metadata=FINITE)

    def answered(self, usual: EvalConfig) -> EvalConfig:
        """How its prompts are answered, where others are as `usual`. Raises ValueError."""
        names = ("num_samples", "temperature", "top_p", "top_k", "full_score")
        own = {name: getattr(self, name) for name in names}
        return replace(usual, **{n: value for n, value in own.items() if value is not None})

    def rules(self) -> Iterator[Rule]:
        yield from TaskSource.rules(self)
        is_one = self.kind is not TaskKind.mixture
        yield Rule(is_one, "kind", "a set is of one task; name several sets")
        fix = "a teacher judges no answer; leave it out"
        yield Rule(not self.teachers, "rewards", fix, self.teachers)


@dataclass(kw_only=True, slots=True)
class PoolsConfig(Section):
    """Chooses prompts by the mean reward of their last group, which puts them into a pool: `hard`
    below `hard_below`, `easy` from `easy_from` on, `medium` between."""

    SECTION: ClassVar[str] = "task.pools"

    hard_below: float = field(default=0.25, metadata=FINITE)
    easy_from: float = field(default=0.75, metadata=FINITE)
    hard: float = field(default=1.0, metadata=NOT_NEGATIVE)
    """The pool's weight among the prompts that are taken of all three."""
    medium: float = field(default=2.0, metadata=NOT_NEGATIVE)
    easy: float = field(default=1.0, metadata=NOT_NEGATIVE)
    floor: float = field(default=0.1, metadata=within(above=0, most=1))
    """The least fraction of a pool's prompts that is taken."""

    def rules(self) -> Iterator[Rule]:
        fix = "must be at most task.pools.easy_from"
        yield Rule(self.hard_below <= self.easy_from, "hard_below", fix)

    def pool_of(self, reward: float) -> str:
        is_easy = reward >= self.easy_from
        return "easy" if is_easy else "hard" if reward < self.hard_below else "medium"


@dataclass(kw_only=True, slots=True)
class TaskConfig(TaskSource):
    SECTION: ClassVar[str] = "task"

    tasks: dict[str, MixedTask] = field(default_factory=dict)
    """mixture: the tasks, by names that the metrics use. Their rewards are added to those in
    `task.rewards`, which every task has."""
    eval_sets: dict[str, EvalSet] = field(default_factory=dict)
    """Further held-out prompts, by names that the metrics use: docs/data.md#several-held-out-sets.
    """
    curriculum: float | None = field(default=None, metadata=within(above=0, most=1))
    """mixture: prompts of a task are passed over while few of its groups have rewards that differ,
    but never so many that less than this fraction of its prompts is left. None passes none over."""
    pools: PoolsConfig | None = None
    """None: no prompt is passed over for its rewards."""
    chat_template: bool = False
    """Format the conversation with the tokenizer's chat template; otherwise texts are concatenated.
    """
    renderer: str | None = field(default=None, metadata=RENDERER)
    """The model family's renderer of the renderers library, as qwen3 or glm-5, which then writes
    conversations and reads tool calls: docs/environments.md#renderers. `auto`: by model.path, if
    that is a name on the hub that the library knows. None: the tokenizer's chat template and
    tool_parser."""
    template_args: dict[str, Any] = field(default_factory=dict)
    """Arguments of the chat template, or of `renderer`, by name, as {enable_thinking: false}."""
    system_prompt: str | None = None
    """First message of every conversation."""
    agent: str | None = field(default=None, metadata=CODE)
    """`module:name` or `file.py:name`, an async function called with (session, prompt): a program
    that talks to the model through the OpenAI-compatible endpoint and returns the reward."""
    tool_parser: ToolParser = ToolParser.hermes
    thoughts: Thoughts = Thoughts.kept
    """The fate of <think>...</think> when the next question comes: docs/openai.md#thoughts.
    `kept`: the model reads it again, and an episode stays one trajectory, also if an agent's client
    leaves it out. `stripped`: each question is asked without it, and begins another trajectory."""
    max_turns: int = field(default=1, metadata=at_least(1))
    """The most answers of the model in one episode."""
    max_turn_tokens: int | None = field(default=None, metadata=at_least(1))
    """The most tokens of one answer; None: limited by rollout.max_response_tokens only."""
    stop: list[str] = field(default_factory=list, metadata=STOPS)
    """Texts that end an answer, special tokens by their text included; the answer keeps them. An
    agent's request may name others."""
    grammar: str | None = field(default=None, metadata=STOPS)
    """The form of every answer, in Lark: docs/rollouts.md#answers-of-a-form. An agent's request
    may ask for another form."""
    min_turn_tokens: int = field(default=0, metadata=at_least(0))
    """The model's end is not sampled before so many tokens of an answer."""
    turn_timeout_s: float = field(default=600.0, metadata=SECONDS)
    """Longest that the environment or a tool may take over one step."""
    episode_timeout_s: float = field(default=7200.0, metadata=SECONDS)
    """Longest that a whole episode may take."""
    seed: int = field(default=0, metadata=SEED)
    container: ContainerConfig = field(default_factory=ContainerConfig)

    @property
    def by_name(self) -> dict[str, TaskConfig]:
        """The settings of each task of a mixture, as if it were the run's only one; of any other
        task, itself under the name "". Then those of the further held-out sets."""
        names = [one.name for one in fields(TaskSource)]
        own = {} if self.tasks else {"": replace(self, eval_sets={}) if self.eval_sets else self}
        return own | {
            name: replace(
                self,
                tasks={},
                eval_sets={},
                curriculum=None,
                pools=None,
                **{one: getattr(task, one) for one in names if one not in ("rewards", "eval_path")},
                # All of a set's file are held-out prompts.
                eval_path=task.eval_path
                or (task.path if isinstance(task, EvalSet) and task.kind in FILE_KINDS else None),
                rewards=self.rewards | task.rewards,
            )
            for name, task in (*self.tasks.items(), *self.eval_sets.items())
        }

    def section_of(self, name: str) -> str:
        """The section in which the task is set that `by_name` has under this name."""
        mapping = "eval_sets" if name in self.eval_sets else "tasks"
        return f"task.{mapping}.{name}" if name else "task"

    @property
    def served_teacher(self) -> tuple[str, RewardConfig] | None:
        """The reward's part whose teacher the run serves, with its name; None without one."""
        return next(((n, r) for n, r in self.rewards.items() if r.path is not None), None)

    def rules(self) -> Iterator[Rule]:
        yield from TaskSource.rules(self)
        fix = "an agent has its own environment: do not set task.env"
        yield Rule(self.agent is None or self.env is None, "agent", fix)
        fix = "it writes a chat format: set task.chat_template=true"
        yield Rule(self.renderer is None or self.chat_template, "renderer", fix)
        yield Rule(
            self.renderer is None or self.tool_parser is ToolParser.hermes,
            "tool_parser",
            "task.renderer reads the calls itself; leave it out",
        )
        fix = "they are arguments of a chat template: set task.chat_template=true"
        yield Rule(not self.template_args or self.chat_template, "template_args", fix)
        is_mixture = self.kind is TaskKind.mixture
        yield Rule(
            is_mixture == bool(self.tasks),
            "tasks",
            "task.kind=mixture needs tasks by name, as task.tasks.sums.name=chain_sum, and no other"
            " kind has any",
            list(self.tasks),
        )
        for mapping, named in (("tasks", self.tasks), ("eval_sets", self.eval_sets)):
            wrong = [name for name in named if not re.fullmatch(r"\w[\w.-]*", name)]
            fix = "a name has letters, digits, _, - and . only, as in easy-sums"
            yield Rule(not wrong, mapping, fix, wrong)
        yield from self._rules_of_sets()
        kinds = {name: task.kind.name for name, task in self.tasks.items()}
        num_verifiers = list(kinds.values()).count(TaskKind.verifiers.name)
        yield Rule(
            num_verifiers in (0, len(kinds)),
            "tasks.*.kind",
            "environments of the verifiers library call the model by themselves, and cannot be "
            "mixed with tasks whose episodes the run leads; mix them with each other only",
            kinds,
        )
        weights = {name: task.weight for name, task in self.tasks.items()}
        fix = f"the weights of all tasks may be {MAX_ROUND} together; divide them"
        yield Rule(sum(weights.values()) <= MAX_ROUND, "tasks.*.weight", fix, weights)
        fix = "it chooses between the tasks of task.kind=mixture; leave it out"
        yield Rule(is_mixture or self.curriculum is None, "curriculum", fix)
        fix = "it chooses between tasks, and task.pools between prompts; leave one of them out"
        yield Rule(self.pools is None or self.curriculum is None, "curriculum", fix)
        yield Rule(
            not is_mixture or self.agent is None,
            "agent",
            "the episodes of task.kind=mixture are those of its tasks, which may have task.tasks."
            "*.env and tools; leave it out",
        )
        for setting in fields(TaskSource) if is_mixture else ():
            if setting.name not in ("kind", "rewards"):
                value = getattr(self, setting.name)
                fix = f"is a setting of one task here: task.tasks.NAME.{setting.name}"
                yield Rule(value in (setting.default, [], {}), setting.name, fix)

    def _rules_of_sets(self) -> Iterator[Rule]:
        both = [name for name in self.eval_sets if name in self.tasks]
        yield Rule(
            not both, "eval_sets", "a task of the mixture has this name; choose another", both
        )
        fix = "an agent leads the episodes of its own task only; leave them out"
        yield Rule(self.agent is None or not self.eval_sets, "eval_sets", fix, list(self.eval_sets))
        is_of_library = next(iter(self.tasks.values()), self).kind is TaskKind.verifiers
        others = [
            name
            for name, one in self.eval_sets.items()
            if (one.kind is TaskKind.verifiers) != is_of_library
        ]
        yield Rule(
            not others,
            "eval_sets",
            "environments of the verifiers library call the model by themselves: either all tasks "
            "and sets are of this kind or none",
            others,
        )
