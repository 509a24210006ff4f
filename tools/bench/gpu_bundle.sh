#!/usr/bin/env bash
# Packs the wheels that an offline machine with torch and CUDA lacks, in parts of at most 60 MiB, with their unpacker.
#
#   bash tools/bench/gpu_bundle.sh --have HAVE.txt OUT [FOLDER ...]
#
# HAVE.txt: that machine's `python3 -m pip list --format=freeze` (packages it lists are not packed, but for the pinned
# ones below). FOLDER: further folders to carry, such as a model. Options: --packages "NAME==V ..." in place of the
# pinned ones; --skip "NAME ..." in place of the requirements that are left out; --wheels FOLDER packs these wheels
# and downloads nothing; --python 3.12; --part-mib 60.
# On the machine, with all parts in one folder: bash PARTS/unpack.sh PARTS /tmp/site && export PYTHONPATH=/tmp/site
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
# versions that torch 2.11 with CUDA 13.0 takes; numba 0.65 refuses newer numpy
packages="vllm==0.26.0 megatron-core==0.16.1 numpy==2.3.5 numba==0.65.0 llvmlite==0.47.0"
packages+=" pydantic PyYAML==6.0.3 rich msgspec pyzmq psutil tqdm Jinja2 safetensors sentencepiece==0.2.3"
packages+=" reasoning_gym==0.1.25 math-verify==0.9.0"
# vLLM imports these for other models, media or devices alone, or the machine's CUDA toolkit has them
skip="tokenspeed-triton tokenspeed-mla tilelang z3-solver pynvvideocodec torchcodec nvidia-cutlass-dsl-libs-cu12"
skip+=" nvidia-cuda-nvcc nvidia-nvvm nvidia-cuda-nvdisasm nvidia-cuda-cccl sentry-sdk"
have="" wheels="" python_version=3.12 part_mib=60 out=""
folders=()
while (($#)); do
    case "$1" in
        --have) have="$2"; shift 2 ;;
        --packages) packages="$2"; shift 2 ;;
        --skip) skip="$2"; shift 2 ;;
        --wheels) wheels="$2"; shift 2 ;;
        --python) python_version="$2"; shift 2 ;;
        --part-mib) part_mib="$2"; shift 2 ;;
        -*) echo "gpu_bundle.sh: unknown option $1" >&2; exit 2 ;;
        *) if [[ -z "$out" ]]; then out="$1"; else folders+=("$1"); fi; shift ;;
    esac
done
if [[ -z "$out" || (-z "$have" && -z "$wheels") ]]; then
    sed -n '2,11p' "${BASH_SOURCE[0]}" >&2
    exit 2
fi

mkdir -p "$out"
out="$(cd "$out" && pwd)"
if compgen -G "$out/bundle.tar.*" >/dev/null; then
    echo "gpu_bundle.sh: $out holds parts already; give an empty folder" >&2
    exit 2
fi
staging="$(mktemp -d)"
trap 'rm -rf "$staging"' EXIT
mkdir "$staging/wheels" "$staging/folders"
if [[ -n "$wheels" ]]; then
    cp "$wheels"/*.whl "$staging/wheels/"
else
    # shellcheck disable=SC2086 # lists of names
    python3 "$root/tools/bench/gpu_wheels.py" --have "$have" --python "$python_version" --out "$staging/wheels" \
        --requirements $packages --skip $skip
fi
for folder in "${folders[@]}"; do cp -RL "$folder" "$staging/folders/"; done

tar -C "$staging" -cf - wheels folders | split --bytes="${part_mib}M" --numeric-suffixes --suffix-length=3 - "$out/bundle.tar."
cat >"$out/unpack.sh" <<'UNPACK'
#!/usr/bin/env bash
# bash unpack.sh PARTS SITE: checks the parts, installs the wheels into SITE, and puts the folders beside them.
set -euo pipefail
parts="$(cd "$1" && pwd)"
mkdir -p "$2"
site="$(cd "$2" && pwd)"
(cd "$parts" && sha256sum --check --quiet SHA256SUMS)
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
cat "$parts"/bundle.tar.* | tar -C "$work" -xf -
install=(python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site")
"${install[@]}" "$work"/wheels/*.whl
for source in "$work"/wheels/*.tar.gz; do # packages without wheels
    if [[ -f "$source" ]]; then "${install[@]}" --no-build-isolation "$source"; fi
done
if compgen -G "$work/folders/*" >/dev/null; then cp -R "$work"/folders/* "$site/"; fi
echo "installed in $site: export PYTHONPATH=$site"
UNPACK
(cd "$out" && sha256sum bundle.tar.* >SHA256SUMS)
du -ch "$out"/bundle.tar.* | tail -n 20
