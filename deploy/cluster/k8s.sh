#!/usr/bin/env bash
# Submits a run to Kubernetes, as a RayJob (k8s.yaml): NODES machines, the head is one of them.
#   make launch CLUSTER=k8s IMAGE=registry/leash:1 NODES=4 GPUS=8 CPUS=64 MEMORY=800Gi SHM=200Gi [CLAIM=leash-runs] [DRY=1] ...
set -euo pipefail
cd "$(dirname "$0")/../.."
. deploy/cluster/run.sh

[ -n "${IMAGE:-}" ] || refuse "IMAGE is missing: say which was built from deploy/Containerfile, as make $1 CLUSTER=k8s IMAGE=registry/leash:1"
for word in "$@"; do
    case $word in run.dir=* | --dir) refuse "$word: on Kubernetes runs are in /runs, the volume of CLAIM" ;; esac
done
if [ "$1" = resume ]; then set -- resume --dir /runs "${@:2}"; else set -- "$1" run.dir=/runs "${@:2}"; fi
read_words "$@"
# shellcheck disable=SC2034 # by their names, below
RUN=$run_name RAY_VERSION=$(sed -n 's/^ray==\([0-9.]*\).*/\1/p' deploy/requirements-gpu.lock) WORKERS=$((${NODES:-1} - 1)) CPUS=${CPUS:-8} MEMORY=${MEMORY:-32Gi} SHM=${SHM:-8Gi} GPUS=${GPUS:-0} CLAIM=${CLAIM:-leash-runs}
JOB=$(od -An -N8 -tx1 /dev/urandom | tr -d ' \n') # tells another attempt of this job from another job with the run's name
[[ $RUN =~ ^[a-z]([a-z0-9-]{0,38}[a-z0-9])?$ ]] ||
    refuse "run.name=$RUN: Kubernetes wants at most 40 small letters, digits and '-', the first a letter, the last none of '-'"
WORDS=$(show "${words[@]}")
WORDS=${WORDS//\'/\'\'} # in YAML's quotes
text=$(<deploy/cluster/k8s.yaml)
for name in RUN JOB RAY_VERSION IMAGE WORKERS CPUS MEMORY SHM GPUS CLAIM WORDS; do text=${text//"\${$name}"/"${!name}"}; done
if [ -n "${DRY:-}" ]; then
    echo "$text"
    exit
fi
job=$(kubectl create -o name -f - <<<"$text")
job=${job##*/}
echo "cluster: kubectl get rayjob $job says how it is, kubectl logs -f job/$job what the launch prints; kubectl delete rayjob $job ends it in order"
