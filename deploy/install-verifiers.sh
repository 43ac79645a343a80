#!/usr/bin/env bash
# Makes .venv-verifiers, where the environments of the verifiers library run, in the versions and with the
# hashes of deploy/requirements-verifiers.lock. Packages of your own in it stay. Needs .venv.
set -euo pipefail
cd "$(dirname "$0")/.."
lock=deploy/requirements-verifiers.lock
stamp=.venv-verifiers/.leash-installed
wanted=$(cat deploy/install-verifiers.sh "$lock" | sha256sum | cut -d' ' -f1)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then exit 0; fi

log=$(mktemp -t leash-install.XXXXXX)
began=$SECONDS
rm -f "$stamp"
packages() {
    .venv/bin/python -m venv .venv-verifiers
    # pip, if there is no uv, installs the same versions.
    deploy/uv.sh pip install --python .venv-verifiers/bin/python --compile-bytecode --require-hashes -r "$lock" ||
        .venv-verifiers/bin/python -m pip --disable-pip-version-check install --require-hashes -r "$lock"
}
if ! packages >"$log" 2>&1; then
    tail -n 30 "$log" >&2
    echo "install-verifiers: failed; the whole log is $log" >&2
    exit 1
fi
echo "$wanted" >"$stamp"
rm -f "$log"
echo "install-verifiers: .venv-verifiers is ready ($((SECONDS - began)) s)"
