# shellcheck shell=bash
# What the job scripts of this folder share. They source it; it is not run.
#
# Variables, all optional, set before sbatch:
#   TLT_ROOT       the repository (default: the folder that sbatch was called in)
#   TLT_IMAGE      a container: FILE.sif runs under apptainer, anything else goes to pyxis; unset: bare metal
#   TLT_MOUNTS     more folders for the container, as FROM:TO,FROM:TO (the repository and the working folder are there)
#   TLT_VENV       the environment on bare metal (default: .venv of the repository)
#   TLT_SITE       shell code for every node: modules, NCCL's settings (default: slurm/site.sh where there is one)
#   TLT_INTERFACE  the network interface (default: the one on the way to the first node)
#   TLT_NUMA       none, node, socket, exclusive, core-complex: which processors near its GPU a process is bound to
#                  (default: node where the job has GPUs and numactl is installed)
#   TLT_PORT       where the nodes meet on the first one (default: from the job's number)
#   TLT_REQUEUE    no: a job that was told to stop saves and ends, and another one goes on (default: it requeues itself)

job="${SLURM_JOB_ID:?this is a job script: sbatch --nodes=N $0 ...}"
start="${SLURM_RESTART_COUNT:-0}"
container=() given=()
step="" status=0 told=no caught=no run_dir="" nodes=0 least=None

say() { printf '[job %s] %s\n' "$job" "$*"; }

fail() { # status, message
    printf 'error: %s\n' "$2" >&2
    exit "$1"
}

# The address of a name that other nodes can reach: none of 127.*, which Debian's /etc/hosts gives a node's own name.
reachable() { # name
    getent ahostsv4 "$1" | awk '$1 !~ /^127\./ {print $1; exit}'
}

# The first node's address: by its name, else as Slurm reaches it (a loopback address where all nodes are one machine),
# else its own first address; empty if there is none.
address_of() { # node
    local address by_slurm
    address="$(reachable "$1")"
    if [[ -z "$address" ]]; then
        by_slurm="$(scontrol show node "$1" | tr ' ' '\n' | sed -n 's/^NodeAddr=//p')"
        address="$(reachable "$by_slurm")"
        if [[ -z "$address" && "$by_slurm" == 127.* ]]; then address="$by_slurm"; fi
    fi
    if [[ -z "$address" ]]; then # a job script runs on the job's first node
        address="$(hostname -I 2>/dev/null | tr ' ' '\n' | grep -E '^[0-9.]+$' | grep -v '^127\.' | head -n 1)"
    fi
    printf '%s\n' "$address"
}

# Prints srun's options, or the command, that enter the container; one word a line.
container_words() { # image, mounts
    case "$1" in
        "") ;;
        *.sif) printf '%s\n' apptainer exec --nv --bind "$2" "$1" ;;
        *) printf '%s\n' "--container-image=$1" "--container-mounts=$2" "--container-workdir=$PWD" ;;
    esac
}

begin() {
    local first mounts address
    first="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
    unset TLT_NODE_RANK TLT_NODE_NAME
    export TLT_RENDEZVOUS TLT_JOB="$job.$start"
    address="$(address_of "$first")"
    if [[ -z "$address" ]] && ((SLURM_JOB_NUM_NODES > 1)); then
        fail 2 "node $first has no address that other nodes reach: neither its name, Slurm's NodeAddr nor hostname -I says one"
    fi
    TLT_RENDEZVOUS="${address:-127.0.0.1}:${TLT_PORT:-$((20000 + job % 1500 * 8))}"
    if [[ -n "${SLURM_GPUS_ON_NODE:-}" ]] && command -v numactl >/dev/null; then
        export TLT_NUMA="${TLT_NUMA:-node}"
    fi
    mounts="$TLT_ROOT:$TLT_ROOT,$PWD:$PWD${TLT_MOUNTS:+,$TLT_MOUNTS}"
    mapfile -t container < <(container_words "${TLT_IMAGE:-}" "$mounts")
    trap stop TERM
    say "start $((start + 1)) on $SLURM_JOB_NUM_NODES node(s), $SLURM_JOB_NODELIST; they meet at $TLT_RENDEZVOUS"
}

# Slurm's warning before the time limit or a pre-emption comes here: the ranks are to save and leave.
stop() {
    say "told to stop: the ranks save and leave"
    told=yes caught=yes
    scancel --signal=TERM "$job" 2>/dev/null
}

# Runs a command of tlt once on each of so many nodes and waits for it, signals or not. A node that fails ends it on all,
# but for a training that may go on with fewer devices: then the launchers of the nodes that are left agree on how.
on_nodes() { # nodes, tlt command ...
    local nodes="$1" lost=(--kill-on-bad-exit=1)
    shift
    if [[ "$told" == yes ]]; then # while something else was done
        status=143
        return "$status"
    fi
    if [[ "$1" == train && "$least" != None ]]; then lost=(--no-kill --kill-on-bad-exit=0 --wait=0); fi
    srun --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 "${lost[@]}" --cpu-bind=none --input=none \
        ${container[@]+"${container[@]}"} bash "$TLT_ROOT/slurm/node.sh" "$@" &
    step=$! caught=yes
    # A trapped signal ends `wait`, not the step.
    while [[ "$caught" == yes ]]; do
        caught=no
        wait "$step"
        status=$?
    done
    return "$status"
}

# As `on_nodes 1`, on this node; without a container no step is needed for that.
here() { # tlt command ...
    if ((${#container[@]})); then on_nodes 1 "$@"; else bash "$TLT_ROOT/slurm/node.sh" "$@"; fi
}

# Reads the config, and leaves what this job is beside the run. Sets run_dir, nodes, finished, least (the devices with
# which it may go on).
settle() { # CONFIG [key.path=value ...]
    local values
    given=("$@")
    values="$(here config "$@" --keep "slurm/job-$job.$start.config.yaml" \
        --get run.dir --get launcher.nnodes --get finished --get elastic.min_devices)" || exit 2
    # shellcheck disable=SC2034 # train.sbatch looks at finished
    { read -r run_dir && read -r nodes && read -r finished && read -r least; } < <(tail -n 4 <<<"$values")
    cp "$0" "$run_dir/slurm/job-$job.sbatch" # as Slurm runs it, whatever becomes of the file it was submitted from
    {
        printf '# %s: start %s\n' "$(date -u +%FT%TZ)" $((start + 1))
        printf 'arguments:'
        printf ' %q' "$@"
        printf '\n'
        env | grep '^TLT_' | sort
        scontrol show job -dd "$job"
    } >"$run_dir/slurm/job-$job.$start.txt"
    export TLT_LOG_DIR="$run_dir/logs/job-$job.$start"
    if ((nodes != SLURM_JOB_NUM_NODES)); then
        fail 2 "launcher.nnodes: the config says $nodes, the job has $SLURM_JOB_NUM_NODES node(s); sbatch --nodes=$nodes, or add launcher.nnodes=$SLURM_JOB_NUM_NODES"
    fi
}

# Every node looks at itself, and all at what is between them, before a GPU-hour is spent.
check_nodes() { # CONFIG [key.path=value ...]
    on_nodes "$SLURM_JOB_NUM_NODES" doctor --node "$@" && return
    if [[ "$told" == yes ]]; then finish "$status"; fi
    fail 1 "a node failed its checks, which stand above with the node's name: mend it, or submit with --exclude=NODE"
}

# Ends the job. One that was told to stop goes back to the queue, and resumes from what the ranks have saved.
finish() { # status
    local state
    # srun's status tells nothing: where a node fails it ends the others by the same signal. The ranks leave a mark.
    if (($1 == 0)); then exit 0; fi
    # a lost node's status is that of the whole step, though the others may have done the run to its end
    if [[ "$told" == no && "$least" != None && "$(here config "${given[@]}" --get finished | tail -n 1)" == yes ]]; then
        say "finished without the nodes that were lost"
        exit 0
    fi
    if [[ "$told" == no && ! -e "${TLT_LOG_DIR:-/nowhere}/stopped" ]]; then exit "$(($1 > 128 ? 1 : $1))"; fi
    state="$(squeue --noheader --jobs="$job" --format=%T 2>/dev/null)"
    if [[ "${TLT_REQUEUE:-}" == no ]]; then
        say "stopped; the run's next job goes on from here"
    elif [[ "$state" != RUNNING ]]; then
        say "stopped; not requeued, as the job is $state"
    elif scontrol requeue "$job"; then
        say "stopped and requeued: start $((start + 2)) goes on from here"
        sleep 60 # Slurm ends this script
    else
        say "stopped; it cannot be requeued here: submit the same command again to go on"
    fi
    exit "$1"
}
