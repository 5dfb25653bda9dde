#!/bin/bash
# Runs all GPU tests and benchmarks in less than eight minutes, without network access.
#
#   benchmarks/gpu/session.sh OUTPUT [--quick | --rehearsal]
#
# Requires nvcc 12 or 13, g++ and a python3 with NumPy, CuPy and PyTorch. The steps are: compile,
# GPU tests, a small DLRM compared with NumPy, kernels compared with a device copy, kernels compared
# with PyTorch, memcheck and racecheck, and the scaling of the core over threads. Each record is
# appended to OUTPUT/results.jsonl immediately, and every step writes to OUTPUT/log.txt. If a step
# fails or exceeds its time limit, the next step runs. The exit code is 1 if a step failed.
# --rehearsal runs the steps on the CPU, with small inputs, the emulation of CUDA and NumPy instead
# of CuPy.
set -uo pipefail
if [ $# -lt 1 ] || [ $# -gt 2 ] || { [ $# -eq 2 ] && [ "$2" != --quick ] && [ "$2" != --rehearsal ]; }; then
  echo "usage: benchmarks/gpu/session.sh OUTPUT [--quick | --rehearsal]" >&2
  exit 2
fi
mkdir -p "$1"
output=$(cd "$1" && pwd)
cd "$(dirname "$0")/../.." || exit 2
build=${SLIPSTREAM_GPU_BUILD:-$PWD/runs/gpu_session}
quick=${2:+--quick} arrays=cupy emulated="" slower=1
[ "${2:-}" != --rehearsal ] || arrays=numpy emulated=--emulated slower=4
results=$output/results.jsonl
failed=0
export PYTHONUNBUFFERED=1

# step NAME SECONDS COMMAND...: runs a command within a time limit and records how it ended.
step() {
  local name=$1 limit=$2 start=$SECONDS code
  shift 2
  echo "== $name" | tee -a "$output/log.txt"
  timeout --kill-after=5 $((limit * slower)) "$@" 2>&1 | tee -a "$output/log.txt"
  code=${PIPESTATUS[0]}
  [ "$code" -eq 0 ] || failed=1
  printf '{"record": "step", "name": "%s", "exit_code": %d, "seconds": %d}\n' \
    "$name" "$code" $((SECONDS - start)) | tee -a "$results"
}

launchers=(python3 benchmarks/gpu_launchers.py --build="$build" --gtest= --output="$output"
  --results="$results" $quick $emulated)
sizes="26 100000 2048"
[ -z "$quick" ] || sizes="4 1000 256"

step compile 100 "${launchers[@]}" --compile_only
step tests 45 "${launchers[@]}" --parts=tests
step dlrm 30 python3 benchmarks/gpu/dlrm.py "$build/libslipstream_gpu.so" --arrays="$arrays" \
  --results="$results"
step cases 110 "${launchers[@]}" --parts=cases
step peers 70 python3 benchmarks/gpu/peers.py "$build/libslipstream_gpu.so" --results="$results" \
  --arrays="$arrays" $quick
step sanitizers 60 "${launchers[@]}" --parts=sanitizers --tools=memcheck,racecheck
# shellcheck disable=SC2086  # The sizes are separate arguments.
step threads 40 bash -c "'$build/core_threads' $(nproc) 5 $sizes | tee -a '$results'"
exit $failed
