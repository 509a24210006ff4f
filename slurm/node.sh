#!/usr/bin/env bash
# One node's part of a job: srun runs it once on every node, with a command of tlt.
#
#   bash slurm/node.sh train CONFIG [key.path=value ...]
#
# Without Slurm, run it by hand on every node, with the same variables but for the index:
#   TLT_RENDEZVOUS=10.0.0.1:29400 TLT_JOB=first-try TLT_NODE_RANK=0 bash slurm/node.sh train CONFIG launcher.nnodes=2
set -euo pipefail

TLT_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# Modules, NCCL's settings, proxies: whatever this cluster needs.
site="${TLT_SITE:-$TLT_ROOT/slurm/site.sh}"
if [[ -f "$site" ]]; then
    # shellcheck source=/dev/null
    source "$site"
fi

export TLT_NODE_RANK="${TLT_NODE_RANK:-${SLURM_NODEID:-0}}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export PYTHONPATH="$TLT_ROOT${PYTHONPATH:+:$PYTHONPATH}"

python=python3 # a container's own
if [[ -z "${TLT_IMAGE:-}" ]]; then python="${TLT_VENV:-$TLT_ROOT/.venv}/bin/python"; fi
if [[ "$python" == /* && ! -x "$python" ]]; then
    printf 'error: %s: no Python at %s; make .venv there (bash launch/quickstart.sh --setup-only) or set TLT_VENV\n' \
        "${SLURMD_NODENAME:-$(hostname)}" "$python" >&2
    exit 2
fi
# exec: signals reach the launcher itself, which passes them on.
exec "$python" -m megatron_tlt "$@"
