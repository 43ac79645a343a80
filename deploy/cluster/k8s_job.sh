#!/usr/bin/env bash
# In the pods of k8s.yaml: `run` launches the run, or goes on with it if an earlier attempt of this job had it; `stop`,
# before a pod ends, lets it save and stop if that is the head's; the other pods wait for it where all end.
set -euo pipefail
cd "$(dirname "$0")/../.."
. deploy/cluster/run.sh
record=/runs/$RUN/run.json job=/runs/$RUN/job # this job's id, then `stop` once that was asked for
refused=/runs/.$RUN.refused # the ids of jobs whose words were bad, and of looks that found something
NOTICE_S=20 # the pods of a cluster that is deleted end in any order
is_here() { [ -z "$is_look" ] && grep -qs "\"host\": \"$(hostname)\"" "$record"; }
ask() {
    if is_here; then echo stop >>"$job"; fi
    .venv/bin/leash stop --dir /runs --run "$RUN"
}

if [ "$1" = stop ]; then
    while grep -qs '"state": "running"' "$record"; do
        if is_here; then
            ask
        elif [ "$SECONDS" -ge "$NOTICE_S" ] && ! grep -qsx stop "$job"; then
            exit # only this machine ends, or the head has died: nobody will end the run
        fi
        sleep 2
    done
    exit
fi
if grep -qsx "$JOB" "$refused"; then refuse "an earlier attempt of this job has said what is wrong with its words; change them, and launch again"; fi
# shellcheck disable=SC2153
eval "set -- $WORDS" # k8s.sh has quoted them for a shell
read_words "$@"
if grep -qsx "$JOB" "$job"; then go_on; fi # another job of that name may live: the launch or resume decides
code=$(mktemp)
# Ray signals every descendant of a job that it stops, Redis too; `setsid --fork` makes this none, and `stop` asks in order.
# shellcheck disable=SC2016
setsid --fork bash -c '"${@:2}"; echo "$?" >"$1"' bash "$code" .venv/bin/leash "${words[@]}" cluster.stop_timeout_s=85 cluster.ray_address=auto
[ -n "$is_look" ] || trap ask TERM
until [ -s "$code" ] || is_here; do sleep 1 || true; done
if is_here; then echo "$JOB" >"$job"; fi
until [ -s "$code" ]; do sleep 1 || true; done
code=$(<"$code")
# KubeRay would build three more clusters for the same error.
if [ "$code" = 2 ] || { [ "$code" != 0 ] && [ -n "$is_look" ]; }; then echo "$JOB" >>"$refused"; fi
exit "$code"
