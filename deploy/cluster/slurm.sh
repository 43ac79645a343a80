#!/usr/bin/env bash
# A run on the machines of a Slurm job. Outside a job it submits itself; in one it starts Ray by srun, and the run.
# Slurm's SIGTERM ahead of the time limit lets the run save and stop; then the job is queued again, and goes on.
#   make launch CLUSTER=slurm SBATCH="--nodes=4 --gpus-per-node=8 --time=12:00:00" [DRY=1] [EXPERIMENT=...] [ARGS=...]
# LEAD_S: how long before the time limit (600).
#SBATCH --job-name=leash
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --open-mode=append
#SBATCH --output=runs/%x-%j.log
set -euo pipefail
# Slurm runs a copy of this file, in the folder of the submission.
if [ ! -f deploy/cluster/run.sh ]; then cd "$(dirname "$0")/../.."; fi
. deploy/cluster/run.sh

export LEAD_S=${LEAD_S:-600}
[ "$LEAD_S" -ge 250 ] || refuse "LEAD_S=$LEAD_S: a run needs at least 250 seconds to save and stop"
read_words "$@"
if [ -z "${SLURM_JOB_ID:-}" ]; then
    command -v sbatch >/dev/null || refuse "no sbatch on PATH; run this where jobs are submitted"
    read -ra options <<<"${SBATCH:-}"
    command=(sbatch --signal="B:TERM@$LEAD_S" "${options[@]}" deploy/cluster/slurm.sh "$@")
    if [ -n "${DRY:-}" ]; then show "${command[@]}" && exit; fi
    mkdir -p runs # for the job's output
    exec "${command[@]}"
fi
mapfile -t machines < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
here=${machines[0]} others=("${machines[@]:1}")
[ "${SLURMD_NODENAME:-}" = "$here" ] || refuse "the controller runs on $here, the first machine of job $SLURM_JOB_ID; from here:" \
    "srun --overlap --nodes=1 --ntasks=1 --nodelist=$here make $1 CLUSTER=slurm ..."
[ "${SLURM_RESTART_COUNT:-0}" = 0 ] || go_on

start_node() {
    local step=(srun --nodes=1 --ntasks=1 --nodelist="$2" --overlap --cpu-bind=none --cpus-per-task="$SLURM_CPUS_ON_NODE"
        deploy/cluster/node.sh "$1" "$3")
    if [ -n "${DRY:-}" ]; then
        show "${step[@]}"
        return
    fi
    set -m # Ctrl-C must not reach them before the run has ended
    "${step[@]}" </dev/null >"$LOGS/ray-$2.log" 2>&1 &
    node_pids+=("$!")
    set +m
}
stop_nodes() { kill -TERM "${node_pids[@]}" 2>/dev/null || true; } # srun passes it on
after_end() { # Slurm calls a job that it is ending itself no longer running
    [ -z "$is_look" ] || return 0 # or it would be queued again for ever
    if [ "$asked" != TERM ] || [ "$1" = 0 ]; then return; fi
    scontrol show job --oneliner "$SLURM_JOB_ID" | grep -q JobState=RUNNING || return 0
    echo "cluster: job $SLURM_JOB_ID is queued again, and goes on with the run $run_name"
    scontrol requeue "$SLURM_JOB_ID"
}

words=("${words[0]}" cluster.stop_timeout_s=$(((LEAD_S - 150) / 6)) "${words[@]:1}") # a stop has six such parts and a minute; then the nodes have END_S
need_venv
address='' at=null # one machine: the launch starts Ray itself, as it does without Slurm
if [ "${#others[@]}" -gt 0 ]; then
    address=$(.venv/bin/python deploy/cluster/nodes.py address "${others[0]}")
    at=$address:6379
fi
run_on_nodes "$address" .venv/bin/leash "${words[@]}" cluster.ray_address="$at"
