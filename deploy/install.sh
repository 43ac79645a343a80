#!/usr/bin/env bash
# Makes .venv ready for this machine: the CPU build of everything where there is no GPU, the ordinary
# CUDA builds where there is one, in the versions and with the hashes of deploy/requirements-{cpu,gpu}.lock.
# uv installs them; where it cannot be had or fails, pip does. Runs again only when one of the files it
# reads has changed.
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

libc=$(getconf GNU_LIBC_VERSION 2>/dev/null || true)
if [ "$kind" = gpu ] && [ "$(printf '%s\n' "glibc 2.34" "${libc:-glibc 2.34}" | sort -V | head -n 1)" != "glibc 2.34" ]; then
    echo "install: the GPU build needs glibc 2.34 or newer and this machine has ${libc#glibc }; use Ubuntu 22.04, Debian 12, RHEL 9 or newer" >&2
    exit 1
fi

stamp=.venv/.leash-installed
lock=deploy/requirements-$kind.lock
wanted="$kind $(cat pyproject.toml deploy/install.sh deploy/uv.sh "$lock" | sha256sum | cut -d' ' -f1)"
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then exit 0; fi

work=$(mktemp -d -t leash-install.XXXXXX)
log=$work/log
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

locked() { # package: its lines of the lock, as a file of requirements
    awk -v start="$1==" 'index($0, start) == 1 { on = 1 } on { print } on && !/\\$/ { exit }' "$lock" >"$work/$1"
    echo "$work/$1"
}
by_pip() { .venv/bin/python -m pip --disable-pip-version-check install --no-deps "$@"; }
# pip compiles what it installs, uv only if told: without it every process of a machine that sets
# PYTHONDONTWRITEBYTECODE would compile all that it imports.
by_uv() { deploy/uv.sh pip install --no-deps --compile-bytecode --build-constraints "$lock" "$@"; }
cpu_torch() {
    # "+cpu" never matches a CUDA build. It comes from a configured index or folder that has PyTorch's CPU
    # builds, or else from where PyTorch keeps them.
    "$1" --require-hashes -r "$(locked torch)" ||
        "$1" --require-hashes -r "$(locked torch)" --find-links https://download.pytorch.org/whl/cpu/torch/
}
packages() { # by_uv or by_pip
    if [ "$kind" = cpu ]; then step "torch (CPU build)" cpu_torch "$1" || return; fi
    step "the other packages of $lock" "$1" --require-hashes -r "$lock" || return
    step "leash itself" "$1" --no-build-isolation -e .
}

echo "install: $kind build into .venv with $("$python" --version) (a minute or some, once)"
step_number=0
num_steps=$([ "$kind" = cpu ] && echo 5 || echo 4)
# Installers take PyTorch's CPU and CUDA builds for the same version, so the one does not replace the other.
clear=$([ ! -f "$stamp" ] || grep -q "^$kind " "$stamp" || echo --clear)
rm -f "$stamp"
step "virtual environment" "$python" -m venv $clear .venv
if ! { step "uv" by_pip --require-hashes -r "$(locked uv)" && packages by_uv; }; then
    echo "install: uv did not do it; now pip, which installs the same versions and takes some minutes longer"
    num_steps=$((num_steps - 2)) step_number=0
    packages by_pip
fi
echo "$wanted" >"$stamp"
rm -rf "$work"
