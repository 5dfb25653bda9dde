#!/bin/bash
# Runs all GPU tests and benchmarks without network access. The time limits add up to 7.6 minutes.
#
#   benchmarks/gpu/session.sh OUTPUT [--quick | --rehearsal]
#
# Requires nvcc 13.0 (tested) or 12 (not tested), g++ and a python3 with NumPy, CuPy and PyTorch.
# The steps are: compile, GPU tests, a small DLRM compared with NumPy, kernels compared with a device
# copy, kernels compared with PyTorch, memcheck and racecheck, and the scaling of the core over
# threads. Each record is appended to OUTPUT/results.jsonl immediately, and every step writes to
# OUTPUT/log.txt. If a step fails or exceeds its time limit, the next step runs. A step whose program
# was not compiled is skipped. The exit code is 1 if a step failed or was skipped.
# --rehearsal runs the steps on the CPU, with small inputs, the emulation of CUDA, NumPy instead of
# CuPy, four times the time limits, and without memcheck and racecheck.
set -uo pipefail
usage="usage: benchmarks/gpu/session.sh OUTPUT [--quick | --rehearsal]"
refuse() {
  echo "$@" >&2
  exit 2
}
case "${1:-}" in
  --help | -h) echo "$usage" && exit ;;
  "" | -*) refuse "$usage" ;;
esac
case "$#${2:-}" in
  1 | 2--quick | 2--rehearsal) ;;
  *) refuse "$usage" ;;
esac
unset CDPATH # `cd` would print the folder.
mkdir -p -- "$1" || exit 2
output=$(cd -- "$1" && pwd) || exit 2
results=$output/results.jsonl
[ ! -e "$results" ] || refuse "Invalid OUTPUT: $1 contains results.jsonl. Expected a folder without" \
  "results. Pass another folder."
cd -- "$(dirname -- "$0")/../.." || exit 2
build=${SLIPSTREAM_GPU_BUILD:-$PWD/runs/gpu_session}
quick=${2:+--quick} arrays=cupy emulated="" slower=1
[ "${2:-}" != --rehearsal ] || arrays=numpy emulated=--emulated slower=4
sizes=(26 100000 2048)
[ -z "$quick" ] || sizes=(4 1000 256)
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

# skip NAME REASON: records a step that does not run.
skip() {
  printf '{"record": "step", "name": "%s", "skipped": "%s"}\n' "$1" "$2" | tee -a "$results"
}

# step_with PROGRAM NAME SECONDS COMMAND...: a step that needs a compiled program, which may be a
# pattern.
step_with() {
  if [ -n "$(find "$build" -maxdepth 1 -name "$1" 2> /dev/null)" ]; then
    step "${@:2}"
  else
    skip "$2" "$1 was not compiled"
    failed=1
  fi
}

launchers=(python3 benchmarks/gpu_launchers.py --build="$build" --gtest= --output="$output"
  --results="$results" $quick $emulated)

# part PROGRAM NAME SECONDS FLAGS...: a part of gpu_launchers.py. Its own limit is lower, so that it
# records what did not finish.
part() {
  step_with "$1" "$2" "$3" "${launchers[@]}" --parts="$2" --no_compile \
    --part_seconds=$(($3 * slower - 5)) "${@:4}"
}

library=$build/libslipstream_gpu.so
step compile 100 "${launchers[@]}" --compile_only
part "*_gpu_test" tests 45
step_with libslipstream_gpu.so dlrm 30 python3 benchmarks/gpu/dlrm.py "$library" \
  --arrays="$arrays" --results="$results"
part gpu_launchers cases 110
step_with libslipstream_gpu.so peers 70 python3 benchmarks/gpu/peers.py "$library" \
  --arrays="$arrays" --results="$results" $quick
if [ -z "$emulated" ]; then
  part "*_gpu_test" sanitizers 60 --tools=memcheck,racecheck
else
  skip sanitizers "compute-sanitizer needs a GPU"
fi
# $0 of the inner shell is the results file, and its arguments are the command.
# shellcheck disable=SC2016  # The inner shell expands them.
step_with core_threads threads 40 bash -o pipefail -c '"$@" | tee -a "$0"' "$results" \
  "$build/core_threads" "$(nproc)" 5 "${sizes[@]}"
exit $failed
