"""What a setting may be chosen from, where that is a fixed set of names."""

from __future__ import annotations

from enum import Enum


class Backend(Enum):
    """Transport of a process group. `auto` is nccl where the process has a GPU, gloo elsewhere."""

    auto = "auto"
    gloo = "gloo"
    nccl = "nccl"


class Dtype(Enum):
    """`auto` is bfloat16 on a GPU and float32 on a CPU."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"


class OnStale(Enum):
    """What happens to a group that became older than `max_staleness`; each is counted by reason."""

    requeue = "requeue"  # run its prompt again, at most `max_retries` times, then drop it
    drop = "drop"
    mask_tokens = (
        "mask_tokens"  # leave its over-age tokens out of the loss; drop it if none is left
    )
    wait = "wait"  # the trainer waits for the oldest running group, so that none becomes too old


class OnFull(Enum):
    """What a push does when the buffer holds as much as it may; each is counted."""

    block = "block"  # wait until there is room
    drop_stalest = "drop_stalest"
    error = "error"


class Selector(Enum):
    """Which of the ready groups the trainer takes first."""

    stalest = "stalest"
    freshest = "freshest"
    fifo = "fifo"


class AppendFsync(Enum):
    """When the embedded server's append-only file reaches the disk."""

    everysec = "everysec"
    always = "always"


class PauseMode(Enum):
    """What the engine does with running requests while weights change.

    `retract` computes their KV cache anew under the new weights; `in_place` goes on over the old.
    """

    retract = "retract"
    in_place = "in_place"


class CommitStrategy(Enum):
    """How an engine takes a staged version; each is probed before it is used."""

    staged_disk = "staged_disk"  # reads the staged file through its own loader; works everywhere
    ipc = "ipc"  # from GPU memory that the receiver shares: needs a GPU and checkpoint-engine
    direct = "direct"  # its own broadcast endpoint, fed by the receiver; the baseline


class OnLongPrompt(Enum):
    """What becomes of a prompt longer than rollout.max_prompt_tokens."""

    refuse = "refuse"  # the run ends with an error
    skip = "skip"  # it is left out and counted


class TaskKind(Enum):
    """Where prompts come from."""

    reasoning_gym = "reasoning_gym"  # any data set of the reasoning-gym library
    questions = "questions"  # questions with one right answer each, from the settings or a file
    gsm8k = "gsm8k"  # questions whose answers end in "#### 42"
    math = "math"  # problems whose solutions end in a boxed answer
    code = "code"  # programs that are run against tests
    alphabet_sort = "alphabet_sort"  # names to be sorted, more of them at each turn
    verifiers = "verifiers"  # an environment of the verifiers library
    custom = "custom"  # what the function named by task.factory makes


class TailPolicy(Enum):
    """What happens to samples that take much longer than the others."""

    continue_across_versions = "continue_across_versions"  # they go on, whatever is committed
    interrupt_and_resume = "interrupt_and_resume"  # stopped at each version, resumed stalest first
    postpone = "postpone"  # stopped when the next batch is full without them, resumed after others


class ToolParser(Enum):
    """The form in which a model writes tool calls."""

    hermes = "hermes"  # <tool_call>{"name": ..., "arguments": ...}</tool_call>: Qwen, Hermes
    llama3_json = "llama3_json"  # {"name": ..., "parameters": ...}


class RewardKind(Enum):
    """Who scores an episode."""

    task = "task"  # the task's own score of the last answer
    env = "env"  # the sum of what the environment gave at its steps
    function = "function"  # a function of yours, in a scoring process
    code_tests = "code_tests"  # tests of the prompt, run in the sandbox on the last answer's code
    http = "http"  # a service that answers {"reward": ...}
    judge = "judge"  # a model behind an OpenAI-compatible URL
    teacher = "teacher"  # no reward: its log-probabilities become a column of every token
