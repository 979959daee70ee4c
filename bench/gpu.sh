#!/usr/bin/env bash
# Everything that needs a GPU, on a machine that has one: tests, sanitizers, the goldens, benchmarks.
#   bench/gpu.sh [BUILD] [OUT]    BUILD: a build with BD_CUDA=on and BD_BENCH=on (default build); OUT: default bench/results/gpu-<name>
# Every result names its command, the GPU, the driver and the commit. Exit status 1 if a test failed.
set -u
cd "$(dirname "$0")/.." || exit 1
build=${1:-build}
name=$(nvidia-smi --query-gpu=name --format=csv,noheader | head -1 | tr ' ' '-') || { echo "no GPU answers" >&2; exit 1; }
out=${2:-bench/results/gpu-$name}
mkdir -p "$out" || exit 1
failed=0

head_lines() { # COMMAND...
    echo "# $*"
    echo "# $(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | head -1), commit ${BD_COMMIT:-$(git rev-parse --short HEAD 2>/dev/null || echo unknown)}, $(date -u +%F)"
}
keep() { # FILE COMMAND...: output to the file and the terminal; of a .csv without what goes to stderr
    local file=$out/$1 log=/dev/stdout; shift
    [[ $file == *.csv ]] && log=/dev/stderr
    { head_lines "$@"; "$@" 2>$log; } | tee "$file"
    local status=${PIPESTATUS[0]}
    return "$status"
}
try() { keep "$@" || { echo "FAILED: ${*:2}"; failed=1; }; }

for test in "$build"/tests/test_gpu_*; do
    try "$(basename "$test").txt" timeout 300 "$test"
done
if sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null); then
    for tool in memcheck racecheck; do
        for what in attention sampling; do
            try "$tool-$what.txt" timeout 500 "$sanitizer" --tool $tool --error-exitcode 9 "$build/tests/test_gpu_$what" 1
        done
    done
fi
for dtype in bf16 fp16; do
    try "goldens-$dtype.txt" python3 tests/gpu/check_goldens.py "$build/bitdelta" --dtype $dtype
done
if python3 -c 'import torch' 2>/dev/null; then
    try attention.txt python3 bench/gpu_attention.py "$build/bench_gpu_attention" "$out/attention.csv"
else
    try attention.txt "$build/bench_gpu_attention"
fi
for model in small 8b; do
    for dtype in bf16 fp16; do try "model-$model-$dtype.csv" "$build/bench_gpu_model" $model $dtype; done
done
[ -x "$build/bench_gpu_linear" ] && try linear.csv "$build/bench_gpu_linear"
exit $failed
