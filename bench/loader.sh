#!/usr/bin/env bash
# The loader against fio (io_uring, direct, same block and depth) on a synthetic 4 GB delta: alternating rounds, each reader
# first in turn, so that the ratio of a round holds on a disk that is shared. Writes bench/results/loader.csv and prints
# the median of the rounds' ratios. Needs fio and a build with BD_BENCH=ON.
#
#   bench/loader.sh BENCH_LOADER FILE [ROUNDS]      FILE: where the delta is or will be written
#   BD_RUN="nice" bench/loader.sh ...               BD_RUN goes before every round
set -euo pipefail
cd "$(dirname "$0")/.."
bench=$1 file=$2 rounds=${3:-7}
out=bench/results/loader.csv
command -v fio >/dev/null || { echo "loader.sh: fio is not installed" >&2; exit 1; }
: >"$out.part"
for ((round = 0; round < rounds; round++)); do
    ${BD_RUN:-} "$bench" "$file" --mib 4096 --rounds 1 --first-round "$round" --fio 1 2>/dev/null >>"$out.part"
done
mv "$out.part" "$out"
python3 - "$out" <<'PYTHON'
import csv
import statistics
import sys

speed = {}
for row in csv.DictReader(open(sys.argv[1])):
    speed.setdefault(row["reader"], {})[row["round"]] = float(row["gb_per_s"])
for reader in ("uring", "pread"):
    ratios = [speed[reader][n] / speed["fio"][n] for n in speed["fio"]]
    print(f"{reader} / fio: median {statistics.median(ratios):.3f} of {len(ratios)} rounds "
          f"({min(ratios):.3f} to {max(ratios):.3f})")
PYTHON
