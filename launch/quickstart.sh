#!/usr/bin/env bash
# Sets up .venv, then trains the small model of launch/quickstart-cpu.yaml by reinforcement learning on this machine.
#
#   bash launch/quickstart.sh [--setup-only] [key.path=value ...] [--fresh] [--traceback]
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=tools/setup_env.sh
source "$root/tools/setup_env.sh"

arguments=()
setup_only=false
for argument in "$@"; do
    case "$argument" in
        --setup-only) setup_only=true ;;
        -h | --help)
            sed -n '2,4s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
            exit 0
            ;;
        *) arguments+=("$argument") ;;
    esac
done

setup_env
if $setup_only; then exit 0; fi

cd "$root"
count="from megatron_tlt.config.schema import LauncherConfig; print(LauncherConfig(nproc_per_node='auto').nproc_per_node)"
if [[ "$(.venv/bin/python -c "$count")" == 1 ]]; then
    echo "One GPU: its engine never waits for another, so the drafter is trained after each update and not during rollouts."
    arguments=(spot=null ${arguments[@]+"${arguments[@]}"})
fi
# exec: Ctrl-C and SIGTERM reach the command itself, which saves and leaves; it prints where the report is.
exec .venv/bin/tlt train launch/quickstart-cpu.yaml ${arguments[@]+"${arguments[@]}"}
