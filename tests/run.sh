#!/usr/bin/env bash
# Sets up .venv with the tools for tests, then runs the linters, the formatter's check, the type checker and the tests.
#
#   bash tests/run.sh                           the contributor's tier of the tests: about 10 minutes on two cores
#   bash tests/run.sh --all                     all tests
#   bash tests/run.sh --all --within MINUTES    as in continuous integration: no test starts later than so many minutes
#                                               after this script, and those left out are named at the end
#   bash tests/run.sh [arguments of pytest ...] the tests that the arguments select
#   bash tests/run.sh --setup-only              no check
#
# Skipped tests are listed at the end. With --all, what only some tests need (triton, verifiers) must be there too;
# TLT_ALLOW_SKIPS=1 skips these tests instead.
# tests/conftest.py defines the tiers.
set -uo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=tools/setup_env.sh
source "$root/tools/setup_env.sh"
# shellcheck source=tests/system_packages.sh
source "$root/tests/system_packages.sh"

arguments=()
setup_only=false
tier=contributor
within="" left_out=""
while (($#)); do
    argument="$1"
    shift
    case "$argument" in
        --within)
            if [[ ! "${1:-}" =~ ^[1-9][0-9]*$ ]]; then
                printf 'error: --within: found %s; allowed: a number of minutes above 0\n' "${1:-nothing}" >&2
                exit 2
            fi
            within="$1"
            shift
            ;;
        --setup-only) setup_only=true ;;
        --all) tier=all ;;
        *) arguments+=("$argument") ;;
    esac
done
if ((${#arguments[@]})); then tier=arguments; fi

setup_env dev || exit $?
system_packages
# vLLM's second model runner runs on a CPU by Triton's interpreter, and one environment needs the verifiers library.
# Each has a folder of its own, as other tests must not see them.
failed=()
if [[ $tier == all ]]; then
    for name in triton verifiers; do
        if [[ -d "$root/.venv/$name/$name" ]] ||
            "$root/.venv/bin/python" -m pip install --quiet --no-deps --target "$root/.venv/$name" -r "$root/requirements/$name.txt"; then
            continue
        fi
        if [[ "${TLT_ALLOW_SKIPS:-}" == 1 ]]; then
            echo "[set-up] pip could not install $name; its tests are skipped"
        else
            echo "[set-up] pip could not install $name; without it set TLT_ALLOW_SKIPS=1, and its tests are skipped" >&2
            failed+=("set-up of $name")
        fi
    done
fi
if $setup_only; then exit $((${#failed[@]} > 0)); fi

cd "$root" || exit 2
export OMP_NUM_THREADS=1 PATH="$root/.venv/bin:$PATH"
checks_started=$SECONDS
lists="$(mktemp -d)" # what tests/conftest.py writes
trap 'rm -rf "$lists"' EXIT
export TLT_SKIPPED="$lists/skipped"
if [[ -n "$within" ]]; then
    TLT_NO_TEST_AFTER=$(($(date +%s) + within * 60 - SECONDS))
    export TLT_NO_TEST_AFTER TLT_LEFT_OUT="$lists/left_out"
fi

# Each check runs whatever the others said, so that one run shows everything there is to fix.
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
check "proselint" proselint check --config .proselintrc.json README.md CONTRIBUTING.md CHANGELOG.md tests/README.md docs/*.md docs/*/*.md
check "mypy" mypy
check "shellcheck" shellcheck -x launch/*.sh slurm/*.sh slurm/*.sbatch tests/*.sh tools/*.sh tools/bench/*.sh .ci/run
# Two files at a time: tests that start processes wait for these half of their time.
two_at_a_time=(-n 2 --dist loadfile --no-loadscope-reorder)
case $tier in
    arguments)
        check "pytest" python -m pytest "${arguments[@]}"
        ran="Tests: those that the arguments select."
        ;;
    all)
        # last those whose kind faster tests cover, as --within leaves out the last ones
        check "pytest, one process each" python -m pytest "${two_at_a_time[@]}" -m "not distributed and not slow"
        check "pytest, several processes each" python -m pytest "${two_at_a_time[@]}" -m distributed
        check "pytest, slow" python -m pytest "${two_at_a_time[@]}" -m "slow and not distributed"
        ran="Tests: all."
        ;;
    contributor)
        check "pytest, one process each" python -m pytest "${two_at_a_time[@]}" -m "not distributed and not slow"
        check "pytest, one test of each kind that is distributed or slow" python -m pytest -m representative
        ran="Tests: the contributor's tier; all run with --all."
        ;;
esac

if [[ -s "$TLT_SKIPPED" ]]; then
    echo "== skipped: number of tests, file, reason"
    sort "$TLT_SKIPPED" | uniq -c
fi
if [[ -n "$within" && -s "$TLT_LEFT_OUT" ]]; then
    left_out=" $(wc -l <"$TLT_LEFT_OUT") of them did NOT run, as $within minutes were over; they stand above"
    sort "$TLT_LEFT_OUT"
fi
printf '%s Time: %d s after the set-up.%s\n' "$ran" $((SECONDS - checks_started)) "$left_out"
if ((${#failed[@]})); then
    printf 'FAILED: %s\n' "$(IFS=,; echo "${failed[*]}")"
    exit 1
fi
echo "All checks passed."
