#!/usr/bin/env bash
# Runs all that needs a GPU, in parts of at most 4 minutes each. Needs no network and installs nothing.
#
#   benchmarks/on_gpu.sh --prepare               first, on a machine with nvcc and a network: fills build/on_gpu
#   benchmarks/on_gpu.sh PART DIRECTORY          on the machine with the GPU, in a copy of the checkout and build/on_gpu
#   benchmarks/on_gpu.sh --dry-run [DIRECTORY]   all four parts on the CPU: small sizes, tests are only collected
#
# Part 1: is it right? A probe of the machine, the builds, and the tests side by side. Part 2: how fast is it? Whole
# steps, kernels and memory, each alone. Part 3, if time is left: Nsight Compute and compute-sanitizer. Part 4:
# float8 products.
#
# Each step has a time limit, and the next one runs even if one fails. A part leaves in DIRECTORY: summary.txt, with a
# line for each step, the figures as JSON, and logs.tar.gz. The exit status is 1 if a step failed.
#
# Environment: PYTHON, the interpreter, which must have torch (python3); AMPATCH_CARRIED, the folder that --prepare
# fills (build/on_gpu); AMPATCH_FOR_PYTHON, the Python version of the GPU's machine (3.12); AMPATCH_CACHE, where
# libraries are built (/tmp/ampatch-on-gpu).
set -uo pipefail

usage() {
    sed -n '4,6s/^# *//p' "$0" >&2
    exit 2
}

root=$(cd "$(dirname "$0")/.." && pwd) || exit 2
PYTHON=$(command -v "${PYTHON:-python3}") || { echo "there is no ${PYTHON:-python3}" >&2; exit 2; }
carried=$(realpath -m "${AMPATCH_CARRIED:-$root/build/on_gpu}")
device=cuda

# What is carried to a machine without a network: the operators for H100 and H200, and packages that may be missing.
prepare() {
    local platform platforms=() version=${AMPATCH_FOR_PYTHON:-3.12}
    for platform in manylinux_2_28 manylinux_2_17 manylinux2014 manylinux_2_12 manylinux_2_5 manylinux1; do
        platforms+=(--platform "${platform}_x86_64")
    done
    rm -rf "$carried" && mkdir -p "$carried/cache" || return
    AMPATCH_CACHE=$carried/cache "$PYTHON" -c \
        'from ampatch.native.extension_build import build; print(build("cuda", ["90"]).library.path)' || return
    rm -rf "$carried/cache/objects" "$carried"/cache/.*.lock
    "$PYTHON" -m pip install --quiet --no-compile --target "$carried/site-$version" \
        --constraint "$root/constraints.txt" --python-version "$version" --only-binary :all: "${platforms[@]}" \
        pytest pytest-xdist hypothesis wrapt PyYAML filelock tqdm || return
    du -sh "$carried"
    if [ "$(du -sm "$carried" | cut -f 1)" -ge 64 ]; then
        echo "$carried has 64 MiB or more" >&2
        return 1
    fi
}

case ${1-} in
--prepare) [ $# -eq 1 ] || usage; prepare; exit ;;
--dry-run) [ $# -le 2 ] || usage; parts=(1 2 3 4) device=cpu out=${2-} ;;
[1234]) [ $# -eq 2 ] || usage; parts=("$1") out=$2 ;;
*) usage ;;
esac

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
out=$(realpath -m "${out:-$scratch/out}")
mkdir -p "$out" "$scratch/logs" || exit 2
cd "$root" || exit 2

export PYTHON PATH=$PATH:/usr/local/cuda/bin:/usr/local/cuda/compute-sanitizer
export AMPATCH_CACHE=${AMPATCH_CACHE:-${TMPDIR:-/tmp}/ampatch-on-gpu} AMPATCH_KERNELS=auto AMPATCH_CALLS=auto
# Python imports a copy with the layout of an installed package, not the working directory.
site=$carried/site-$("$PYTHON" -c 'import sys; print(*sys.version_info[:2], sep=".")')
export PYTHONPATH=$scratch:$root/benchmarks:$site${PYTHONPATH:+:$PYTHONPATH}
export PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1
cp -R ampatch "$scratch/ampatch" && cp -R csrc lists "$scratch/ampatch" || exit 2
mkdir -p "$AMPATCH_CACHE" || exit 2
[ ! -d "$carried/cache" ] || cp -Rn "$carried/cache/." "$AMPATCH_CACHE"

# Other plugins of the machine's pytest are not loaded: some warn, and warnings are errors in these tests.
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
tests=("$PYTHON" -m pytest -p no:cacheprovider --continue-on-collection-errors --tb=short -p _hypothesis_pytestplugin)
beside=() # three such runs of five processes side by side, for 16 cores
"$PYTHON" -c 'import xdist' 2>/dev/null && beside=(-p xdist.plugin -n 5)
core=(tests/native/test_operators.py tests/native/test_kernels.py tests/scaling/test_no_synchronisation.py tests/weights/test_master_weights.py
    tests/project/test_memory.py tests/patching/test_weight_cache.py tests/integration/test_cuda_graphs.py tests/native/test_host_copy.py
    tests/test_several_devices.py)
# Short tests that reach every kernel, lists that are longer than a launch holds, and sums over blocks of threads.
sanitized=(tests/native/test_operators.py::TestOnAGpu::test_all_of_them_do_what_torch_does
    tests/native/test_operators.py::TestUnscale::test_many_tensors_each_with_a_value_of_its_own
    tests/native/test_operators.py::TestFoundInfNorm::test_constant_tensors_whose_sums_all_round_one_way)
quick=() smaller=() building=cuda slower=1

if [ $device = cpu ]; then
    # The same lines, with stand-ins for the tools that need a GPU. They run the program that they are given.
    mkdir "$scratch/stand-ins"
    cat >"$scratch/stand-ins/ncu" <<'STAND_IN'
#!/usr/bin/env bash
echo "a stand-in for ${0##*/}, which needs a GPU"
while [ $# -gt 0 ] && [ "$1" != "$PYTHON" ]; do shift; done
[ $# -eq 0 ] || exec "$@"
STAND_IN
    chmod +x "$scratch/stand-ins/ncu"
    ln -s ncu "$scratch/stand-ins/nvidia-smi"
    ln -s ncu "$scratch/stand-ins/compute-sanitizer"
    PATH=$scratch/stand-ins:$PATH
    tests+=(--collect-only --quiet) quick=(--quick) smaller=(--width 64 --layers 2)
    building=auto slower=10
fi

# step NAME SECONDS COMMAND...: runs a command for at most so long, and never beyond the end of the part.
step() {
    local name=$1 limit=$(($2 * slower)) left=$((ends - SECONDS - 10)) log=$scratch/logs/$1.log
    local began=$SECONDS status=124
    shift 2
    [ "$left" -ge "$limit" ] || limit=$left
    echo "$name ..."
    if [ "$limit" -le 0 ]; then
        echo "not run: no time was left" >"$log"
    else
        # Interrupted, pytest still names the tests that failed so far.
        timeout --signal=INT --kill-after=9 "$limit" "$@" >"$log" 2>&1
        status=$?
    fi
    [ "$status" -eq 0 ] || { touch "$scratch/failed" && tail -n 40 "$log"; }
    printf '%-22s exit status %3d %5d s  %s\n' "$name" "$status" $((SECONDS - began)) \
        "$(grep -v '^[[:space:]]*$' "$log" | tail -n 1 | cut -c 1-200)" >>"$out/summary.txt"
    return "$status"
}

machine() {
    step machine 10 nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv
}

# build SECONDS: sets `kernels` to the implementation that tests can run with. Without a library each of their processes
# would build it again.
build() {
    kernels=torch
    step build "$1" "$PYTHON" -m ampatch build --device "$building" && kernels=extension
}

part_1() {
    machine
    step probe 60 "$PYTHON" benchmarks/probe.py --device "$device" &
    build 70
    wait
    if [ $kernels = extension ]; then
        step tests-extension 140 env AMPATCH_KERNELS=extension \
            "${tests[@]}" "${beside[@]}" -m "gpu and not slow" "${core[@]}" &
    else
        echo "tests-extension        not run: the extension was not built" >>"$out/summary.txt"
    fi
    step tests-torchs-kernels 140 env AMPATCH_KERNELS=torch AMPATCH_CALLS=python \
        "${tests[@]}" "${beside[@]}" -m "gpu and not slow" "${core[@]}" &
    # Without two that do what this script does itself, and take long: they build the extension, and sanitize all tests.
    step other-tests 140 env "AMPATCH_KERNELS=$kernels" "${tests[@]}" "${beside[@]}" -m "gpu and not slow" \
        -k "not compute_sanitizer and not it_is_built" tests "${core[@]/#/--ignore=}" &
    wait
}

part_2() {
    machine
    build 40
    step steps 95 "$PYTHON" benchmarks/steps.py --device "$device" "${quick[@]}" --json "$out/steps.json"
    step kernels 50 "$PYTHON" benchmarks/unscale.py --device "$device" "${quick[@]}" \
        --only large,transformer,1,1024 --json "$out/kernels.json"
    step memory 30 "$PYTHON" benchmarks/memory.py --device "$device" "${smaller[@]}" --json "$out/memory.json"
}

part_3() {
    # The card's clocks stay as they are. A torch.cuda.profiler range limits the profile to a copy and two operators.
    local ncu=(ncu --clock-control none --profile-from-start off) tool
    local sections=(SpeedOfLight Occupancy LaunchStats MemoryWorkloadAnalysis MemoryWorkloadAnalysis_Tables)
    local sectors=l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op metrics profile
    metrics=${sectors}_ld.ratio,${sectors}_st.ratio,gpu__time_duration.sum
    metrics+=,dram__throughput.avg.pct_of_peak_sustained_elapsed,dram__bytes_read.sum,dram__bytes_write.sum
    profile=("$PYTHON" benchmarks/unscale.py --device "$device" "${quick[@]}" --only large --dtypes bfloat16
        --profile "unscale_copy,unscale_add")
    machine
    build 35
    step profile 30 "${ncu[@]}" --csv --page raw --metrics "$metrics" "${profile[@]}"
    step profile-sections 30 "${ncu[@]}" "${sections[@]/#/--section=}" "${profile[@]}"
    # Last, as they may hang. Without torch's memory cache each tensor is an allocation, whose bounds are checked.
    for tool in memcheck racecheck; do
        step "$tool" 60 env AMPATCH_KERNELS=extension PYTORCH_NO_CUDA_MEMORY_CACHING=1 \
            compute-sanitizer --tool "$tool" --error-exitcode 99 "${tests[@]}" -m gpu "${sanitized[@]}"
    done
}

part_4() {
    machine
    build 40
    step float8 170 "$PYTHON" benchmarks/float8.py --device "$device" "${quick[@]}"
}

: >"$out/summary.txt"
for part in "${parts[@]}"; do
    ends=$((SECONDS + 235 * slower))
    "part_$part"
done
tar -czf "$out/logs.tar.gz" -C "$scratch" logs

echo
for name in probe steps kernels profile memory; do
    [ ! -e "$scratch/logs/$name.log" ] || cat "$scratch/logs/$name.log"
done
echo
cat "$out/summary.txt"
[ ! -e "$scratch/failed" ]
