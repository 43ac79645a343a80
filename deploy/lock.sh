#!/usr/bin/env bash
# Writes deploy/requirements-{cpu,gpu,verifiers}.lock: one version of every package for Linux on Python 3.11
# and 3.12, with the hashes of its files. Versions that are there already stay; `--upgrade` looks for newer ones.
# Every package has a wheel for Linux on x86_64, or is one of those that are built from source (`sdists`).
#   deploy/lock.sh [--check | --upgrade]      (--check: asks no index, fails when the requirements of
#   pyproject.toml, deploy/verifiers.in or this file are others than those that the locks were made from)
set -euo pipefail
cd "$(dirname "$0")/.."
mode=${1:-}
wanted="# made from: $(
    { .venv/bin/python -c 'import json, tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
print(json.dumps([project[k] for k in ("requires-python", "dependencies", "optional-dependencies")]))
' && grep -E '^(cpu|unused|sdists)=' deploy/lock.sh && cat deploy/verifiers.in; } | sha256sum | cut -d' ' -f1
)"
if [ "$mode" = --check ]; then
    for lock in deploy/requirements-{cpu,gpu,verifiers}.lock; do
        if [ "$(head -n 1 "$lock")" != "$wanted" ]; then
            echo "lock: $lock was made from other requirements than pyproject.toml, deploy/verifiers.in and deploy/lock.sh have; run 'make lock'" >&2
            exit 1
        fi
    done
    exit 0
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# What a machine without a GPU gets beside the extra "cpu": PyTorch's CPU build, and SGLang with the packages
# that a CPU server imports of those whose own requirements are CUDA packages. So none has requirements here.
cpu=("torch==2.13.0+cpu" "sglang==0.5.20" "triton==3.9.0" "xgrammar==0.2.1" "apache-tvm-ffi==0.1.11")
for package in "${cpu[@]:1}"; do
    printf '[[dependency-metadata]]\nname = "%s"\nversion = "%s"\nrequires-dist = []\n' \
        "${package%%==*}" "${package##*==}" >>"$work/cpu.toml"
done
printf '%s\n' "${cpu[@]}" >"$work/cpu.in"
: >"$work/gpu.in"
: >"$work/gpu.toml"
# Requirements that nothing here imports. SGLang never imports cuda-tile, and FlashInfer only where it is installed:
# it is a placeholder that fetches its wheel from elsewhere, so an installation which reaches the package index
# alone would fail. Of axe-playwright-python tests take the script alone, not what playwright would drive.
unused=("cuda-tile" "playwright")
printf '%s\n' "${unused[@]}" >"$work/unused"
# Published without a wheel, but whole: they build from what the index has.
sdists=("antlr4-python3-runtime" "cellpylib" "deepspeed" "pycosat" "zss")

compile() { # cpu|gpu|verifiers, then options of uv
    local of=(pyproject.toml "$work/$1.in" --extra "$1" --extra server --extra dev --config-file "$work/$1.toml")
    [ "$1" != verifiers ] || of=(deploy/verifiers.in)
    # The main index alone: further ones may lack the files of other platforms, or hold a CPU build for "gpu".
    [ "$1" = cpu ] || local -x UV_FIND_LINKS=""
    UV_INDEX="" deploy/uv.sh pip compile "${of[@]}" --universal --python-version 3.11 --fork-strategy fewest \
        --generate-hashes --no-annotate --custom-compile-command "make lock" --excludes "$work/unused" \
        --output-file "$work/$1.lock" --quiet $([ "$mode" = --upgrade ] && echo --upgrade) "${@:2}"
}

check_wheels() { # cpu|gpu|verifiers: fails, naming the package, where one has no wheel and is none of `sdists`
    local python
    # A folder of PyTorch's CPU builds may have them for one Python only.
    for python in 3.11 $([ "$1" = cpu ] || echo 3.12); do
        deploy/uv.sh pip install --dry-run --quiet --target "$work/nowhere" --no-deps --python-version "$python" \
            --python-platform x86_64-manylinux_2_34 --only-binary :all: "${sdists[@]/#/--no-binary=}" \
            -r "$work/$1.lock" "${@:2}" || return
    done
}
lock() { compile "$@" && check_wheels "$@"; }

for kind in cpu gpu verifiers; do
    lock=deploy/requirements-$kind.lock
    if [ -f "$lock" ]; then cp "$lock" "$work/$kind.lock"; fi
    lock "$kind" 2>"$work/errors" ||
        { [ "$kind" = cpu ] && lock cpu --find-links https://download.pytorch.org/whl/cpu/torch/; } ||
        { cat "$work/errors" >&2 && exit 1; }
    { echo "$wanted" && echo "# built from source: ${sdists[*]}" &&
        grep -vE '^# (made from|built from source): ' "$work/$kind.lock"; } >"$lock"
done
