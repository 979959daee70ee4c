#!/usr/bin/env bash
# clang-tidy over src/ with the checks of .clang-tidy; any finding fails. Not part of tests/run.sh: it
# takes about ten minutes of CPU time.
#   tests/tidy.sh [FILE...]      needs clang and clang-tidy (version 14 is what the list is made for)
set -u
cd "$(dirname "$0")/.." || exit 1
tool=$(command -v clang-tidy-14 || command -v clang-tidy) || { echo "no clang-tidy" >&2; exit 1; }
build=build-tidy
cmake -G Ninja -S . -B $build -DCMAKE_C_COMPILER=clang -DBD_CUDA=off -DBD_TESTS=off >/dev/null || exit 1
# The CUDA backend needs the toolkit's headers, which are not always there.
if [ $# = 0 ]; then mapfile -t files < <(git ls-files 'src/*.c' | grep -v '^src/backend/cuda/'); else files=("$@"); fi
check_one() {
    local facts=(--extra-arg=-include --extra-arg="$PWD/tests/tidy.h")
    case $1 in src/base/status.c | src/openai/error.c) facts=() ;; esac
    "$tool" -p "$build" --quiet "${facts[@]}" "$1" 2>/dev/null
}
export -f check_one; export tool build
printf '%s\0' "${files[@]}" | xargs -0 -n 1 -P "$(nproc)" bash -c 'check_one "$0"'
status=$?
echo "${#files[@]} files checked, $([ $status = 0 ] && echo no findings || echo findings above)"
exit $((status != 0))
