#!/usr/bin/env bash
# A run over this machine and HOSTS, which ssh reaches without a password. What it starts there ends with it, however
# it ends: each node reads the token from the connection, and ends when that does.
#   make launch CLUSTER=ssh HOSTS="10.0.0.6 10.0.0.7" [DRY=1] [EXPERIMENT=...] [ARGS=...]
set -euo pipefail
cd "$(dirname "$0")/../.."
. deploy/cluster/run.sh

read_words "$@"
read -ra others <<<"${HOSTS:-}"
as="as make $1 CLUSTER=ssh HOSTS=\"10.0.0.6 10.0.0.7\""
[ "${#others[@]}" -gt 0 ] || refuse "HOSTS is missing: say which machines join this one, $as"
twice=$(printf '%s\n' "${others[@]}" | sort | uniq -d)
[ -z "$twice" ] || refuse "HOSTS names ${twice//$'\n'/, } twice; name each machine once, $as"
names=()
for other in "${others[@]}"; do
    [[ $other != -* ]] || refuse "HOSTS: $other is no name of a machine; name them $as"
    names+=("$(ssh -G "$other" | awk '$1 == "hostname" { print $2 }')")
done
need_venv
address=$(.venv/bin/python deploy/cluster/nodes.py address "${names[@]}") || {
    code=$?
    [ "$code" != 3 ] || refuse "HOSTS: name other machines than this, $as"
    exit "$code"
}

start_node() {
    local command=(env BY_PIPE=1 LOGS="$LOGS" deploy/cluster/node.sh "$1" "$3")
    if [ "$1" = worker ]; then
        command=(ssh -T -o BatchMode=yes -o ConnectTimeout=20 -o ServerAliveInterval=15 -o ServerAliveCountMax=8
            "$2" "cd $(printf %q "$PWD") && exec $(show "${command[@]}")")
    fi
    if [ -n "${DRY:-}" ]; then
        show "${command[@]}"
        return
    fi
    if [ ! -p "$folder/hold" ]; then # nothing is ever written to it; its readers come to its end when this process has ended
        mkfifo "$folder/hold"
        exec 9<>"$folder/hold"
        exec 8<"$folder/hold"
    fi
    set -m # Ctrl-C must not cut the connections before the run has ended
    "${command[@]}" < <(exec 9>&- && cat "$folder/token" && echo && cat <&8) >"$LOGS/ray-$2.log" 2>&1 9>&- &
    node_pids+=("$!")
    set +m
}
stop_nodes() { exec 9>&-; }

run_on_nodes "$address" .venv/bin/leash "${words[@]}" cluster.ray_address="$address:6379"
