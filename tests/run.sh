#!/usr/bin/env bash
# Sets up .venv with the tools for tests, then runs the linters, the formatter's check, the type checker and the tests.
#
#   bash tests/run.sh [--setup-only] [arguments of pytest ...]
set -uo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=tools/setup_env.sh
source "$root/tools/setup_env.sh"
# shellcheck source=tests/system_packages.sh
source "$root/tests/system_packages.sh"

arguments=()
setup_only=false
for argument in "$@"; do
    if [[ "$argument" == --setup-only ]]; then setup_only=true; else arguments+=("$argument"); fi
done

setup_env dev || exit $?
system_packages
if $setup_only; then exit 0; fi

cd "$root" || exit 2
export OMP_NUM_THREADS=1 PATH="$root/.venv/bin:$PATH"
failed=()

# Each check runs whatever the others said, so that one run shows everything there is to mend.
check() { # name, command ...
    local name="$1" started=$SECONDS
    shift
    printf '== %s\n' "$name"
    if "$@"; then
        printf '== %s: passed (%d s)\n' "$name" $((SECONDS - started))
    else
        printf '== %s: FAILED (status %d)\n' "$name" $?
        failed+=("$name")
    fi
}

check "ruff check" ruff check .
check "ruff format" ruff format --check .
check "codespell" codespell
check "mypy" mypy
check "shellcheck" shellcheck -x launch/*.sh slurm/*.sh slurm/*.sbatch tests/*.sh tools/*.sh tools/bench/*.sh .ci/run
if ((${#arguments[@]})); then
    check "pytest" python -m pytest "${arguments[@]}"
else
    # Two at a time where a test is one process; those that start several have the machine to themselves.
    check "pytest, one process each" python -m pytest -n 2 --dist loadfile -m "not distributed"
    check "pytest, several processes each" python -m pytest -m distributed
fi

if ((${#failed[@]})); then
    printf 'FAILED: %s\n' "$(IFS=,; echo "${failed[*]}")"
    exit 1
fi
echo "All checks passed."
