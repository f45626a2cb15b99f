#!/usr/bin/env bash
# Runs all checks that need a GPU: `benchmarks/on_gpu.sh DIRECTORY`, on a machine with a GPU and nvcc.
#
# Builds the extension, runs the tests that need a GPU, two benchmarks, and some of the operators' tests under
# compute-sanitizer. Each part has a log in DIRECTORY and a time limit, and the next part runs even if one fails.
# summary.txt and the exit status show whether any part failed. PYTHON selects the interpreter, which must have torch and
# the other requirements of ampatch and its tests. Installs nothing, and writes only to DIRECTORY and /tmp.
set -uo pipefail

if [ $# -ne 1 ]; then
    echo "usage: $0 DIRECTORY" >&2
    exit 2
fi
mkdir -p "$1" || exit 2
out=$(cd "$1" && pwd)
cd "$(dirname "$0")/.." || exit 2

PYTHON=${PYTHON:-python3}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export AMPATCH_CACHE=$scratch/cache AMPATCH_CALLS=auto
# Python imports a copy with the layout of an installed package, not the working directory.
export PYTHONPATH=$scratch${PYTHONPATH:+:$PYTHONPATH} PYTHONSAFEPATH=1 PYTHONDONTWRITEBYTECODE=1
cp -R ampatch "$scratch/ampatch" && cp -R csrc lists "$scratch/ampatch" || exit 2
failed=0

# part NAME SECONDS COMMAND...
part() {
    local name=$1 limit=$2 began=$SECONDS status
    shift 2
    echo "$name ..."
    timeout --kill-after=10 "$limit" "$@" >"$out/$name.log" 2>&1
    status=$?
    if [ $status -ne 0 ]; then
        failed=1
        tail -n 40 "$out/$name.log"
    fi
    printf '%-10s exit status %3d %5d s  %s\n' "$name" $status $((SECONDS - began)) \
        "$(grep -v '^[[:space:]]*$' "$out/$name.log" | tail -n 1 | cut -c 1-120)" >>"$out/summary.txt"
}

machine() {
    nvidia-smi && nvcc --version &&
        "$PYTHON" -c 'import torch; print("torch", torch.__version__, "on", torch.cuda.get_device_name())'
}

# sanitized TOOL SELECTION
sanitized() {
    # Without torch's memory cache every tensor is a separate allocation, so that the sanitizer checks its bounds.
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool "$1" --error-exitcode 99 \
        "$PYTHON" -m pytest -p no:cacheprovider -m gpu tests/test_operators.py -k "$2"
}

export -f machine sanitized
export PYTHON
: >"$out/summary.txt"
part machine 60 bash -c machine
part build 300 "$PYTHON" -m ampatch build --device cuda
part tests 200 "$PYTHON" -m pytest -p no:cacheprovider --continue-on-collection-errors -m gpu
part benchmark 300 "$PYTHON" benchmarks/unscale.py --device cuda --json "$out/benchmark.json"
part memory 150 "$PYTHON" benchmarks/memory.py --device cuda
part memcheck 150 bash -c 'sanitized memcheck "$1"' - \
    "not_finite_wherever or masters_hold_before or many_tensors or constant_tensors or midway or TestUpdateScale"
part racecheck 100 bash -c 'sanitized racecheck "$1"' - "constant_tensors or not_finite_wherever"

echo
cat "$out/benchmark.log" "$out/memory.log"
echo
cat "$out/summary.txt"
exit $failed
