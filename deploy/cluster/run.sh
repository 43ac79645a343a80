# Read by the launchers: one run on a Ray cluster of its own, with the head and the controller on this machine and a
# worker on each of `others`. They define `start_node head|worker MACHINE ADDRESS`, which starts one in the background
# (DRY=1: prints how), `stop_nodes`, and may define `after_end CODE`.
# shellcheck shell=bash
here=$(hostname)
others=()
node_pids=()
asked='' leash='' waiter='' is_look=''
START_S=300
END_S=60

refuse() {
    echo "cluster: $*" >&2
    exit 2
}
show() { # the words of a command, as a shell would read them
    printf '%q ' "$@"
    echo
}

read_words() { # those of `leash launch`, `resume`, `doctor` or `dry-run`: sets run_dir, run_name, and words that name both
    local word before=
    # A look has no run, and one of its name may live: it touches nothing of that.
    case $1 in doctor | dry-run) is_look=1 ;; *) is_look='' ;; esac
    run_dir=runs run_name=''
    for word in "$@"; do
        case $word in run.dir=*) run_dir=${word#*=} ;; run.name=*) run_name=${word#*=} ;; esac
        case $before in --dir) run_dir=$word ;; --run) run_name=$word ;; esac
        before=$word
    done
    words=("$@")
    if [ "$1" != resume ]; then
        run_name=${run_name:-leash-${SLURM_JOB_ID:-$(date +%Y%m%d-%H%M%S)}}
        words+=(run.dir="$run_dir" run.name="$run_name")
    fi
    [ -n "$run_name" ] || refuse "RUN is missing: say which run goes on, as make resume CLUSTER=... RUN=name"
    [[ $run_name =~ ^[A-Za-z0-9][A-Za-z0-9._-]*$ ]] || refuse "run.name=$run_name: use letters, digits, '.', '_', '-'"
}

go_on() { # words of a run whose job is started again: of what it had started before, nothing is left
    local begun=$run_dir/$run_name
    [ -z "$is_look" ] && [ -e "$begun/run.json" ] || return 0
    sed -i 's/"state": "running"/"state": "failed"/' "$begun/run.json"
    if [ "${words[0]}" = launch ] && [ -e "$begun/checkpoints/latest" ]; then
        words=(resume --dir "$run_dir" --run "$run_name")
    elif [ "${words[0]}" = launch ]; then
        mv -- "$begun" "$begun-before-its-first-checkpoint-$(date +%s)"
    fi
}

need_venv() { # before the first command from it
    [ -x .venv/bin/leash ] || refuse "no .venv in $PWD; run make install there first, on a machine of the cluster"
}

wait_for_nodes() { # address, number
    .venv/bin/python deploy/cluster/nodes.py wait "$1" "$2" "$START_S" 9>&- &
    waiter=$!
    local pid
    wait -n "$waiter" "${node_pids[@]}" || true
    for pid in "${node_pids[@]}"; do
        if ! kill -0 "$pid" 2>/dev/null; then
            tail -n 15 -- "$LOGS"/*.log >&2
            refuse "a Ray node ended at its start; above are the last lines of each"
        fi
    done
    wait "$waiter"
    waiter=''
}

run_on_nodes() { # this machine's address, then the command of the run
    local address=$1 other
    shift
    # For the token and what the nodes print, until the run's own folder is there.
    folder=$(realpath -m -- "$run_dir")/.$run_name${is_look:+.look-$$}.nodes
    export LOGS=$folder/logs RAY_AUTH_TOKEN_PATH=$folder/token
    if [ -n "${DRY:-}" ]; then
        [ "${#others[@]}" = 0 ] || start_node head "$here" "$address"
        for other in "${others[@]}"; do start_node worker "$other" "$address"; done
        show "$@"
        return
    fi
    trap end_run EXIT
    trap 'exit 130' INT HUP
    trap 'asked=TERM; exit 130' TERM
    if [ "${#others[@]}" -gt 0 ]; then
        rm -rf -- "$folder"
        mkdir -p -- "$run_dir" && mkdir -m 700 -- "$folder" && mkdir -- "$LOGS"
        . deploy/ray.env && unset RAY_AUTH_TOKEN # which would come before the file
        (umask 077 && od -An -N32 -tx1 /dev/urandom | tr -d ' \n' >"$folder/token")
        start_node head "$here" "$address"
        wait_for_nodes "$address" 1
        for other in "${others[@]}"; do start_node worker "$other" "$address"; done
        wait_for_nodes "$address" $((1 + ${#others[@]}))
    fi
    trap 'asked=INT && stop_leash' INT HUP
    trap 'asked=TERM && stop_leash' TERM
    "$@" 9>&- &
    leash=$!
    [ -z "$asked" ] || stop_leash # a signal that came before its number was known
    while kill -0 "$leash" 2>/dev/null; do wait "$leash" || true; done # a signal ends `wait` alone
    wait "$leash"
}

stop_leash() { kill -TERM "$leash" 2>/dev/null || true; }

end_run() {
    local code=$? pid deadline=$((SECONDS + END_S))
    trap '' INT TERM HUP # a second Ctrl-C does not interrupt this
    kill "$waiter" 2>/dev/null || true
    [ "${#node_pids[@]}" = 0 ] || stop_nodes
    for pid in "${node_pids[@]}"; do
        timeout $((deadline > SECONDS ? deadline - SECONDS : 1)) tail -f -s 0.2 --pid="$pid" /dev/null || kill -KILL "$pid" || true
    done
    rm -f -- "$RAY_AUTH_TOKEN_PATH"
    if [ -n "$is_look" ]; then
        [ -z "$leash" ] || rm -rf -- "$folder" # else the nodes' logs say why they did not start
    elif [ -d "$run_dir/$run_name/logs" ] && [ -d "$LOGS" ]; then cp -rP -- "$LOGS/." "$run_dir/$run_name/logs/" && rm -rf -- "$folder"; fi
    if [ "$(type -t after_end)" = function ]; then after_end "$code"; fi
    exit "$code"
}
