#!/usr/bin/env bash
# Packs the wheels that an offline machine with torch and CUDA lacks, in parts of at most 60 MiB, with their unpacker.
#
#   bash tools/bench/gpu_bundle.sh --have HAVE.txt OUT [FOLDER ...]
#
# HAVE.txt: that machine's `python3 -m pip list --format=freeze` (packages it lists are not packed, but for the pinned
# ones below). FOLDER: further folders to carry, such as a model. Options: --packages "NAME==V ..." in place of the
# pinned ones; --skip "NAME ..." in place of the requirements that are left out; --drop "GLOB ..." in place of the files
# that are left out; --wheels FOLDER packs these wheels and downloads nothing; --python 3.12; --part-mib 60.
# On the machine, with all parts in one folder: bash PARTS/unpack.sh PARTS /tmp/site && export PYTHONPATH=/tmp/site
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
# versions that torch 2.11 with CUDA 13.0 takes; numba 0.65 refuses newer numpy
packages="vllm==0.26.0 megatron-core==0.16.1 numpy==2.3.5 numba==0.65.0 llvmlite==0.47.0"
packages+=" pydantic PyYAML==6.0.3 rich msgspec pyzmq psutil tqdm Jinja2 safetensors sentencepiece==0.2.3"
packages+=" reasoning_gym==0.1.25 math-verify==0.9.0"
packages+=" apache-tvm-ffi>=0.1.11" # what xgrammar takes; others of vLLM's requirements, not imported here, pin less
# vLLM imports these for other models, media or devices alone, or the machine's CUDA toolkit has them
skip="tokenspeed-triton tokenspeed-mla tilelang z3-solver pynvvideocodec torchcodec nvidia-cutlass-dsl-libs-cu12"
skip+=" nvidia-cuda-nvcc nvidia-nvvm nvidia-cuda-nvdisasm nvidia-cuda-cccl sentry-sdk nvidia-cutlass-dsl"
skip+=" nvidia-cudnn-frontend flashinfer-python fastapi-cloud-cli supervisor"
# Hopper's attention and plain kernels are enough for dense models: of 590 MiB of vLLM 190 MiB are left
drop="vllm/vllm_flash_attn/_vllm_fa2_C* vllm/_moe_C* vllm/vllm-rs vllm/_qutlass_C* vllm/third_party/fmha_sm100"
drop+=" vllm/third_party/deep_gemm/include vllm/third_party/deep_gemm/_C.cpython-31[0134]* bin pycountry/locales/*"
drop+=" vllm/entrypoints/serve/instrumentator/static"
have="" wheels="" python_version=3.12 part_mib=60 out=""
folders=()
while (($#)); do
    case "$1" in
        --have) have="$2"; shift 2 ;;
        --packages) packages="$2"; shift 2 ;;
        --skip) skip="$2"; shift 2 ;;
        --drop) drop="$2"; shift 2 ;;
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
mkdir -p "$staging/wheels" "$staging/site/.sources"
download=()
if [[ -n "$wheels" ]]; then
    cp "$wheels"/*.whl "$staging/wheels/"
else
    # shellcheck disable=SC2206 # lists of names
    download=(--have "$have" --requirements $packages --skip $skip)
fi
set -f # the patterns are for the installed files
# shellcheck disable=SC2086 # a list of patterns
python3 "$root/tools/bench/gpu_wheels.py" "${download[@]}" --python "$python_version" --out "$staging/wheels" \
    --site "$staging/site" --drop $drop
set +f
for source in "$staging"/wheels/*.tar.gz; do # packages without wheels are built there
    if [[ -f "$source" ]]; then mv "$source" "$staging/site/.sources/"; fi
done
for folder in "${folders[@]}"; do cp -RL "$folder" "$staging/site/"; done

tar -C "$staging/site" -cf - . | xz -T0 |
    split --bytes="${part_mib}M" --numeric-suffixes --suffix-length=3 - "$out/bundle.tar."
cat >"$out/unpack.sh" <<'UNPACK'
#!/usr/bin/env bash
# bash unpack.sh PARTS SITE: checks the parts and unpacks the packages and folders into SITE.
set -euo pipefail
parts="$(cd "$1" && pwd)"
mkdir -p "$2"
site="$(cd "$2" && pwd)"
(cd "$parts" && sha256sum --check --quiet SHA256SUMS)
cat "$parts"/bundle.tar.* | xz -dc -T0 | tar -C "$site" -xf -
build=(python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --no-build-isolation)
for source in "$site"/.sources/*.tar.gz; do
    if [[ -f "$source" ]]; then "${build[@]}" --target "$site" "$source"; fi
done
echo "installed in $site: export PYTHONPATH=$site"
UNPACK
(cd "$out" && sha256sum bundle.tar.* >SHA256SUMS)
du -ch "$out"/bundle.tar.* | tail -n 20
