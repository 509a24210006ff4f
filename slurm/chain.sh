#!/usr/bin/env bash
# Submits N jobs one after another for a run that is longer than a job may be. Each goes on where the one before stopped,
# however that ended; those that find the run finished end at once.
#
#   bash slurm/chain.sh N [options of sbatch ...] CONFIG [key.path=value ...]
set -euo pipefail

TLT_ROOT="${TLT_ROOT:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)}"
export TLT_ROOT
count="${1:-}"
if [[ ! "$count" =~ ^[1-9][0-9]*$ ]]; then
    echo "error: number of jobs: found '$count'; allowed: at least 1 (bash slurm/chain.sh N [options of sbatch] CONFIG ...)" >&2
    exit 2
fi
shift
options=()
while (($#)) && [[ "$1" == -* ]]; do
    if [[ "$1" != --*=* && "$1" != --exclusive && "$1" != --overcommit ]]; then
        echo "error: option of sbatch: found '$1'; allowed here: --name=value" >&2
        exit 2
    fi
    options+=("$1")
    shift
done
if ((!$#)); then
    echo "error: no config given (bash slurm/chain.sh N [options of sbatch] CONFIG [key.path=value ...])" >&2
    exit 2
fi

after=()
for ((job = 1; job <= count; job++)); do
    # No requeueing: the next of the chain goes on.
    id="$(TLT_REQUEUE=no sbatch --parsable --no-requeue ${after[@]+"${after[@]}"} ${options[@]+"${options[@]}"} \
        "$TLT_ROOT/slurm/train.sbatch" "$@")"
    id="${id%%;*}"
    printf '%s of %s: job %s\n' "$job" "$count" "$id"
    after=("--dependency=afterany:$id")
done
