"""The settings whose values are a fixed set of names."""

from __future__ import annotations

from enum import Enum


class Backend(Enum):
    """Transport of a process group. `auto` is nccl if the process has a GPU, otherwise gloo."""

    auto = "auto"
    gloo = "gloo"
    nccl = "nccl"


class LrSchedule(Enum):
    """The course of the learning rate after its warm-up."""

    constant = "constant"
    linear = "linear"
    cosine = "cosine"


class LoraInit(Enum):
    """How A of an adapter begins; B is always 0."""

    kaiming = "kaiming"
    gaussian = "gaussian"


class LoraMode(Enum):
    """How engines serve the versions of an adapter (docs/training.md#adapters-by-version compares).

    `merged` makes weights of each version, which an engine loads as any others; with `versions`
    each is an adapter of its own in the engine: requests end on theirs and nothing pauses.
    """

    merged = "merged"
    versions = "versions"


class Logger(Enum):
    """Programs that draw a run's metrics."""

    tensorboard = "tensorboard"
    wandb = "wandb"


class Dtype(Enum):
    """`auto` is bfloat16 on a GPU and float32 on a CPU."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"


class OnStall(Enum):
    """The answer to a run that makes no progress any more, beside the alarm."""

    alarm = "alarm"  # nothing but the alarm
    restart = "restart"  # what does not answer starts again, else the ranks or a late engine
    end = "end"  # the run ends as failed; it can be resumed


class OnStale(Enum):
    """The fate of a group older than `max_staleness`; each case is counted by reason."""

    requeue = "requeue"  # run its prompt again, at most `max_retries` times, then drop it
    drop = "drop"
    mask_tokens = "mask_tokens"  # exclude its stale tokens from the loss; drop it if none is left
    wait = "wait"  # the trainer waits for the oldest running group, so that none becomes too old


class OnFull(Enum):
    """The way of a push when the buffer is full; each case is counted."""

    block = "block"  # wait until there is room
    drop_stalest = "drop_stalest"
    error = "error"


class Selector(Enum):
    """The ready groups that the trainer takes first."""

    stalest = "stalest"
    freshest = "freshest"
    fifo = "fifo"
    shortest = "shortest"  # fewest trainable tokens; first those that the next step could not take


class Proximal(Enum):
    """The policy that a step's ratios compare the trained one with."""

    recomputed = "recomputed"  # the one at the start of the step, by another forward pass if needed
    log_linear = "log_linear"  # between rollout and trained policy, by version (A-3PO): no pass
    rollout = "rollout"  # the one that sampled the token, as the engine measured it


class AppendFsync(Enum):
    """When the embedded server's append-only file reaches the disk."""

    everysec = "everysec"
    always = "always"


class PauseMode(Enum):
    """The engine's treatment of running requests while weights change.

    `resubmit` ends them with their tokens so far, and they are sent again under the new weights;
    `drain` first lets them end while new ones go elsewhere, for at most
    weight_sync.drain_timeout_s, and ends the rest as `resubmit` does; `retract` keeps them and
    recomputes their KV cache; `in_place` keeps the old KV cache too, so that log-probabilities are
    not those of any one version (docs/weight-sync.md has figures). `auto` is `drain` where
    rollout.max_response_tokens is at most 32, which end sooner than they would be sent again, and
    `resubmit` else, or where weight_sync.drain_timeout_s is too long for it.
    """

    auto = "auto"
    resubmit = "resubmit"
    drain = "drain"
    retract = "retract"
    in_place = "in_place"


class CommitStrategy(Enum):
    """The way in which an engine loads a staged version; each is probed before it is used."""

    staged_disk = "staged_disk"  # reads the staged file with its own loader; works everywhere
    ipc = "ipc"  # from GPU memory that the receiver shares: needs a GPU and checkpoint-engine


class OnLongPrompt(Enum):
    """The fate of a prompt longer than rollout.max_prompt_tokens."""

    refuse = "refuse"  # the run ends with an error
    skip = "skip"  # it is skipped and counted


class TaskKind(Enum):
    """The source of prompts."""

    reasoning_gym = "reasoning_gym"  # any data set of the reasoning-gym library
    questions = "questions"  # questions with one right answer each: listed, a file or a data set
    gsm8k = "gsm8k"  # questions whose answers end in "#### 42"
    math = "math"  # problems whose solutions end in a boxed answer
    code = "code"  # programs that are run against tests
    alphabet_sort = "alphabet_sort"  # names to sort, more at each turn
    repository = "repository"  # problems in small repositories, worked on in a container
    verifiers = "verifiers"  # an environment of the verifiers library
    mixture = "mixture"  # several tasks, those in task.tasks
    custom = "custom"  # the task that the function in task.factory returns


class ContainerKind(Enum):
    """The place where tools run what the model wrote."""

    bubblewrap = "bubblewrap"  # namespaces of this machine, made by bwrap
    docker = "docker"  # a container of an image
    podman = "podman"  # the same
    kubernetes = "kubernetes"  # a pod, by kubectl
    sandbox_fusion = "sandbox_fusion"  # a service, to which the files travel with each command
    e2b = "e2b"  # a sandbox of E2B, or of a service on its wire


class TailPolicy(Enum):
    """The treatment of samples that take much longer than the others."""

    continue_across_versions = "continue_across_versions"  # they continue across commits
    interrupt_and_resume = "interrupt_and_resume"  # stopped at each version, resumed stalest first
    postpone = "postpone"  # stopped when the next batch is full without them, resumed after others


class KLPlace(Enum):
    """The place in which the divergence from the reference counts."""

    loss = "loss"  # its estimate is added to the loss of each token
    reward = "reward"  # its sum over an episode is subtracted from the reward


class StreamTokens(Enum):
    """The tokens that a stream learns from."""

    answers = "answers"  # those that the policy wrote
    observations = "observations"  # those that an environment or a tool put between its turns


class Thoughts(Enum):
    """The fate of an answer's <think>...</think> when the next question comes."""

    kept = "kept"  # the model goes on reading them
    stripped = "stripped"  # the conversation is rendered anew without them


class ToolParser(Enum):
    """The format of a model's tool calls."""

    hermes = "hermes"  # <tool_call>{"name": ..., "arguments": ...}</tool_call>: Qwen, Hermes
    llama3_json = "llama3_json"  # {"name": ..., "parameters": ...}


# Each kind has a module of its name in rollout_pool/rewards.
class RewardScope(Enum):
    """The episodes that a call of a reward function is about."""

    episode = "episode"
    group = "group"  # all of a prompt, which it may compare


class RewardKind(Enum):
    """The score of an episode."""

    task = "task"  # the task's own score of the last answer
    env = "env"  # the sum of the rewards of the environment's steps
    function = "function"  # your own function, in a scoring process
    code_tests = "code_tests"  # tests of the prompt, run in the sandbox on the last answer's code
    http = "http"  # a service that answers {"reward": ...}
    judge = "judge"  # a model behind an OpenAI-compatible URL
    teacher = "teacher"  # no reward: its log-probabilities become a column of every token
