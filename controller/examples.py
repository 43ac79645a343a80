"""Examples of every command, which its `--help` prints; a test parses each."""

from __future__ import annotations

_EXAMPLES = """\
leash launch --experiment alphabet-sort buffer.max_staleness=4 trainer.num_steps=200
leash launch task=chain_sum run.name=night run.prometheus_port=9400
leash dry-run --experiment ~/mine.yaml trainer.num_ranks=4 cluster.num_gpus=8
leash doctor
leash doctor --json cluster.ray_address=auto
leash simulate --gpus 64 --gpu H100 --lengths 1000,8000 rollout.max_response_tokens=8000
leash simulate --gpus 64 --lengths-of runs/night --plot gpus.png
leash try --episodes 8 --model runs/night/final_model task=capitals
leash try --url http://127.0.0.1:8000/v1 --model Qwen3-8B --key-env MY_KEY task=capitals
leash sandbox --host 0.0.0.0 --port 8080 --key-env SANDBOX_KEY task=code
leash resume --run night trainer.num_steps=400 buffer.max_staleness=2
leash attach --run night
leash runs --dir /shared/runs --json
leash compare night night-2
leash compare --json --plot both.png night /elsewhere/runs/night
leash status --run night --json
leash status --fix
leash page --run night --port 8400
leash stop --run night
leash report --run night
leash export --run night --step best --to my-model
leash groups night.parquet
leash groups --run night --best 2 --min-reward 0.5 best.jsonl
leash tune --run night buffer.max_staleness=1 rollout.tail=postpone
leash timeline --run night --version 40
leash stacks --run night
leash depth --watch
leash depth --url redis://10.0.0.5:6379/0 --run night --json
leash trace --run night --json w0-17
leash show --run night w0-17
leash quarantine --run night --release w0-17
leash buffer-dump --run night groups.dump
leash buffer-load --run night groups.dump
leash completion bash > ~/.local/share/bash-completion/completions/leash
leash completion zsh > ~/.zfunc/_leash
"""


def examples_of(verb: str) -> list[str]:
    return [line for line in _EXAMPLES.splitlines() if line.split()[1] == verb]
