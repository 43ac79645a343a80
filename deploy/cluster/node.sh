#!/usr/bin/env bash
# One Ray node on this machine, until a signal ends it in order. Nothing else calls `ray start`.
#   deploy/cluster/node.sh head ADDRESS [options of ray start]         ADDRESS: where the other machines reach this one
#   deploy/cluster/node.sh worker HEAD_ADDRESS [options of ray start]
# The cluster's token is in the file RAY_AUTH_TOKEN_PATH (default: ~/.ray/auth_token). With BY_PIPE=1 it is the first
# line of standard input instead, and the end of that input ends the node: whoever held the other end is gone.
# With LOGS=folder Ray's own logs are copied there in the end.
set -euo pipefail
cd "$(dirname "$0")/../.."
. deploy/ray.env

refuse() {
    echo "node: $*" >&2
    exit 2
}
kind=${1:-} head=${2:-}
if [[ ! $kind =~ ^(head|worker)$ ]] || [ -z "$head" ]; then
    refuse "say which node, as node.sh head 10.0.0.5 on the first machine, or node.sh worker 10.0.0.5 on another"
fi
shift 2

# Ray makes its folders readable to all users; this one closes them. Paths of sockets are short: not in TMPDIR.
private=$(mktemp -d /tmp/ray-XXXXXX)
trap 'rm -rf -- "$private"' EXIT
token=${RAY_AUTH_TOKEN_PATH:-${HOME:-}/.ray/auth_token}
if [ -n "${BY_PIPE:-}" ]; then
    token=$private/token
    IFS= read -r line || refuse "BY_PIPE=1, and no token came on standard input"
    (umask 077 && printf %s "$line" >"$token")
fi
[ -s "$token" ] || refuse "no token in $token; make one as docs/cluster.md says, or name its file in RAY_AUTH_TOKEN_PATH"
if [ ! -O "$token" ] || [[ ! $(stat -L -c %a "$token") =~ ^[46]00$ ]]; then
    refuse "other users can read or change the token in $token; chmod 600 it, as its owner"
fi
export RAY_AUTH_TOKEN_PATH=$token
unset RAY_AUTH_TOKEN # it would come before the file

files=$(ulimit -H -n)
if [ "$files" = unlimited ] || [ "$files" -gt 1048576 ]; then files=1048576; fi
ulimit -S -n "$files"
ulimit -S -l "$(ulimit -H -l)" # pinned memory
ulimit -S -c 0

options=(--block --temp-dir="$private/ray")
if [ "$kind" = head ]; then
    options+=(--head --port=6379 --node-ip-address="$head")
else
    options+=(--address="$head:6379" --node-ip-address="$(.venv/bin/python deploy/cluster/nodes.py address "$head")")
fi
node='' stopped=''
stop() {
    stopped=1
    kill -TERM "$node" 2>/dev/null || true
}
trap stop TERM INT HUP
set -m # a group of its own: Ctrl-C reaches it through this script alone, and is not ignored in what Ray starts
.venv/bin/ray start "${options[@]}" "$@" </dev/null &
node=$!
set +m
[ -z "$stopped" ] || stop # a signal that came before its number was known
if [ -n "${BY_PIPE:-}" ]; then
    { cat && kill -TERM "$$"; } <&0 >/dev/null 2>&1 & # holds no stream that ssh would wait for
    trap 'kill "$!" 2>/dev/null || true; rm -rf -- "$private"' EXIT
fi
while kill -0 "$node" 2>/dev/null; do wait "$node" || true; done # a signal ends `wait` alone
code=0
wait "$node" || code=$?
if [ -n "${LOGS:-}" ]; then
    for session in "$private"/ray/session_2*/logs; do
        mkdir -p "$LOGS" && cp -rP "$session" "$LOGS/ray-$(hostname)" || true
    done
fi
[ -n "$stopped" ] || exit "$code"
