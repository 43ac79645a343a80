#!/usr/bin/env bash
# Makes .venv ready for this machine: the CPU build of everything where there is no GPU, the ordinary
# CUDA builds where there is one. Runs again only when pyproject.toml or this file has changed.
#   deploy/install.sh [cpu|gpu]      (without an argument it looks for a GPU)
set -euo pipefail
cd "$(dirname "$0")/.."

kind=${1:-}
if [ -z "$kind" ]; then
    if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; then kind=gpu; else kind=cpu; fi
fi
python=${PYTHON:-}
if [ -z "$python" ]; then
    for candidate in python3.11 python3.12 python3; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null; then
            python=$candidate
            break
        fi
    done
fi
if [ -z "$python" ]; then
    echo "install: no Python 3.11 or 3.12 found on PATH; install one or set PYTHON=/path/to/python" >&2
    exit 1
fi

stamp=.venv/.leash-installed
wanted="$kind $(cat pyproject.toml deploy/install.sh | sha256sum | cut -d' ' -f1)"
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then exit 0; fi

log=$(mktemp -t leash-install.XXXXXX.log)
step_number=0
step() { # title, command ...: runs it quietly, says how long it took, shows the log when it fails
    local title=$1 begin=$SECONDS
    shift
    step_number=$((step_number + 1))
    printf 'install %d/%d  %-52s ' "$step_number" "$num_steps" "$title"
    if ! "$@" >>"$log" 2>&1; then
        printf 'failed after %d s\n' $((SECONDS - begin))
        tail -n 30 "$log" >&2
        echo "install: '$title' failed; the whole log is $log" >&2
        return 1
    fi
    printf '%4d s\n' $((SECONDS - begin))
}
pip() { .venv/bin/python -m pip --disable-pip-version-check "$@"; }

cpu_torch() {
    # "+cpu" never matches a CUDA build. pip finds it where an index or folder with PyTorch's CPU builds
    # is configured; elsewhere uv knows the official place of those builds.
    pip install "torch==2.13.0+cpu" && return
    pip install "uv>=0.8" && .venv/bin/uv pip install --python .venv/bin/python --torch-backend cpu "torch==2.13.0"
}
cpu_sglang() {
    # SGLang's own requirements are CUDA packages; the ones that a CPU server imports are in our extra "cpu".
    pip install --no-deps "sglang==0.5.20" "triton==3.9.0" "xgrammar==0.2.1" "apache-tvm-ffi==0.1.11"
}

echo "install: $kind build into .venv with $("$python" --version) (some minutes, once)"
num_steps=$([ "$kind" = cpu ] && echo 4 || echo 2)
rm -f "$stamp"
step "virtual environment" "$python" -m venv .venv
if [ "$kind" = cpu ]; then
    step "torch (CPU build)" cpu_torch
    step "sglang (without its CUDA packages)" cpu_sglang
    step "everything else" pip install -e ".[cpu,server,dev]"
else
    step "torch, sglang (CUDA builds), everything else" pip install -e ".[gpu,server,dev]"
fi
echo "$wanted" >"$stamp"
rm -f "$log"
