#!/usr/bin/env bash
# The one test command: installs what it needs, builds, runs every test, ends with "N passed, N failed, N skipped".
#   tests/run.sh             all of it (about 15 minutes on 2 cores)
#   tests/run.sh --quick     one build, unit and end-to-end tests only
#   tests/run.sh --oracles   also the comparisons with transformers, PEFT, lm_eval and a real model (downloads about 3 GB,
#                            the model into ~/.cache/bitdelta or $BD_ORACLE_CACHE)
# Not part of it, for the time they take: tests/tidy.sh (clang-tidy), longer fuzzing (tests/fuzz/README.md), a longer soak
# (tests/soak.py).
set -u
cd "$(dirname "$0")/.." || exit 1
quick=0 oracles=0
for argument in "$@"; do
    case $argument in
    --quick) quick=1 ;;
    --oracles) oracles=1 ;;
    *) echo "usage: tests/run.sh [--quick] [--oracles]" >&2; exit 2 ;;
    esac
done
source tests/lib.sh

say "packages"
install_packages build test || { echo "cannot install packages" >&2; exit 1; }
python_env || { echo "cannot make the Python environment" >&2; exit 1; }
bash tests/data/unpack.sh || { echo "cannot unpack the test data" >&2; exit 1; }
find_nvcc || echo "note: no nvcc: the CUDA build will be reported as failed" >&2
results=build/results
rm -rf $results && mkdir -p $results

say "rules of the tree"
check include-order .venv/bin/python tests/check_rooms.py
check include-order-self-test .venv/bin/python tests/check_rooms.py --self-test
check format sources_formatted
check size checkout_small

say "build: gcc, CUDA"
check build-gcc build_tree build -DCMAKE_C_COMPILER=gcc -DBD_CUDA=on
run_ctest build unit

say "end to end"
export BITDELTA_BIN=$PWD/build/bitdelta
marks="not oracles"
if [ $oracles = 1 ]; then
    check oracle-packages .venv/bin/pip install -q --disable-pip-version-check -r tests/requirements-oracles.txt
    marks=""
fi
.venv/bin/python -m pytest tests/e2e -q -x --maxfail=20 -m "$marks" --junitxml=$PWD/$results/e2e.xml

if [ $quick = 0 ]; then
    say "mixed traffic with faults of chance"
    check soak .venv/bin/python tests/soak.py --seconds 20
    check soak-self-test .venv/bin/python tests/soak.py --self-test
    say "build: gcc with AddressSanitizer and UndefinedBehaviorSanitizer"
    check build-asan build_tree build-asan -DCMAKE_C_COMPILER=gcc -DBD_CUDA=off -DBD_SANITIZE=address,undefined -DCMAKE_BUILD_TYPE=RelWithDebInfo
    run_ctest build-asan asan
    say "build: clang with ThreadSanitizer"
    check build-tsan build_tree build-tsan -DCMAKE_C_COMPILER=clang -DBD_CUDA=off -DBD_SANITIZE=thread
    run_ctest build-tsan tsan 'tp_(comm|loads)|base_(mailbox|pool|metrics)|tokenizer_threads|loader|cache|engine_[ghkrs]|router|http'
    check tsan-server env BITDELTA_BIN=$PWD/build-tsan/bitdelta .venv/bin/python tests/soak.py --seconds 20 --clients 4
    say "build: arm64, run under emulation"
    if arm64_ready; then
        check build-arm64 build_arm64 build-arm64
        check arm64-version qemu-aarch64-static -L .cache/arm64/root build-arm64/bitdelta --version
        run_ctest build-arm64 arm64 "^test_($arm64_rooms)(_|$)"
    else
        skip arm64 "its compiler, emulator or libraries could not be installed"
    fi
fi

say "result"
.venv/bin/python tests/count.py $results
