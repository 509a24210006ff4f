# shellcheck shell=bash
# Sourced by tests/run.sh: `system_packages` installs what some tests need beside Python where it is missing and this
# machine lets us, as root on Debian: a real Slurm, network namespaces, a sandbox and a browser. Elsewhere those tests are skipped, with the reason.

system_packages() {
    local missing=()
    if ! PATH="$PATH:/usr/sbin:/sbin" command -v slurmctld >/dev/null; then missing+=(slurm-wlm); fi
    if ! PATH="$PATH:/usr/sbin:/sbin" command -v munged >/dev/null; then missing+=(munge); fi
    if ! PATH="$PATH:/usr/sbin:/sbin" command -v ip >/dev/null; then missing+=(iproute2); fi
    if ! command -v bwrap >/dev/null; then missing+=(bubblewrap); fi
    if ! command -v chromium >/dev/null; then missing+=(chromium); fi
    if ! ((${#missing[@]})); then return 0; fi
    if [[ "$(id -u)" != 0 ]] || ! command -v apt-get >/dev/null; then
        printf '[set-up] not here: %s; tests that need them are skipped (as root on Debian: apt-get install %s)\n' \
            "${missing[*]}" "${missing[*]}"
        return 0
    fi
    printf '[set-up] %s, for tests on a real Slurm, between network namespaces, in a sandbox and in a browser\n' "${missing[*]}"
    local quick=(-qq -o Acquire::Retries=1 -o Acquire::http::Timeout=20 -o Acquire::https::Timeout=20)
    # RUNLEVEL: the tests start daemons of their own, and none is wanted for the machine.
    if ! { timeout 300 apt-get "${quick[@]}" update &&
        DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 timeout 600 apt-get "${quick[@]}" install -y \
            --no-install-recommends "${missing[@]}"; } >/dev/null 2>&1; then
        printf '[set-up] apt-get could not install %s; tests that need them are skipped\n' "${missing[*]}"
    fi
}
