#!/usr/bin/env python3
"""Encode speed against the `tokenizers` package, one thread each, on the same documents.

    python bench/tokenizer.py BENCH_TOKENIZER [ROUNDS]

BENCH_TOKENIZER is the program built from bench/tokenizer.c (cmake -DBD_BENCH=ON). The documents are files of this checkout
and the texts of the tokenizers' golden files, cut at about 4 KiB. The package runs its fastest way, encode_batch_fast without
offsets and without parallelism. The two take turns, the order changes every round, and the medians count. The ids are
compared first.
"""
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["RAYON_NUM_THREADS"] = "1"
import tokenizers  # noqa: E402 (after the settings it reads)

ROOT = Path(__file__).resolve().parents[1]
NAMES = ("gpt2", "llama3", "qwen3", "llama2", "phi3-mini")
PIECE = 4096


def documents():
    texts = [(ROOT / "README.md").read_text(encoding="utf-8")]
    for pattern in ("src/**/*.c", "include/**/*.h", "kernels/*.cu", "tests/e2e/*.py"):
        texts += [path.read_text(encoding="utf-8") for path in sorted(ROOT.glob(pattern))]
    golden = set()
    for name in NAMES:
        lines = (ROOT / "tests/data/tokenizers" / name / "golden.jsonl").read_text(encoding="utf-8").splitlines()
        golden |= {json.loads(line)["text"] for line in lines}
    texts += sorted(text for text in golden if len(text) < 1 << 16)
    pieces = [text[at : at + PIECE] for text in texts for at in range(0, len(text), PIECE)]
    return [piece for piece in pieces if piece and "\0" not in piece]


def machine():
    model = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), platform.machine())
    return f"{model}, {os.cpu_count()} CPUs, {platform.system()} {platform.release().split('-')[0]}"


def commit():
    return subprocess.run(["git", "-C", ROOT, "describe", "--always", "--dirty=+", "--exclude=*"], capture_output=True, text=True).stdout.strip()


def compare(name, program, path, pieces, rounds):
    file = ROOT / "tests/data/tokenizers" / name / "tokenizer.json"
    reference = tokenizers.Tokenizer.from_file(str(file))
    shown = subprocess.run([program, file, path, "ids"], capture_output=True, text=True, check=True).stdout
    want = [encoding.ids for encoding in reference.encode_batch_fast(pieces, add_special_tokens=False)]
    assert [[int(word) for word in line.split()] for line in shown.split("\n")[:-1]] == want, f"{name}: the ids differ"
    ours = subprocess.Popen([program, file, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)

    def once_ours():
        ours.stdin.write("\n")
        ours.stdin.flush()
        return float(ours.stdout.readline())

    def once_theirs():
        start = time.perf_counter()
        reference.encode_batch_fast(pieces, add_special_tokens=False)
        return time.perf_counter() - start

    times = {once_ours: [], once_theirs: []}
    for turn in range(rounds + 1):
        for once in (once_ours, once_theirs) if turn % 2 else (once_theirs, once_ours):
            times[once].append(once())
    ours.stdin.close()
    ours.wait()
    # The first round warms caches up on both sides.
    return [statistics.median(times[once][1:]) for once in (once_ours, once_theirs)], sum(map(len, want))


def main():
    program = Path(sys.argv[1]).resolve()
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 7
    pieces = documents()
    data = "\0".join(pieces).encode()
    size = sum(len(piece.encode()) for piece in pieces)
    print(f"# bench/tokenizer.py, {rounds} rounds; {machine()}; tokenizers {tokenizers.__version__}; commit {commit()}")
    print(f"# {len(pieces)} documents, {size} bytes; one thread each; medians of alternating rounds")
    print(f"{'tokenizer':12} {'tokens':>8} {'bitdelta, MB/s':>15} {'package, MB/s':>14} {'ratio':>7}")
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        for name in NAMES:
            (ours, theirs), count = compare(name, program, file.name, pieces, rounds)
            print(f"{name:12} {count:8} {size / ours * 1e-6:15.2f} {size / theirs * 1e-6:14.2f} {theirs / ours:6.1f}x", flush=True)


if __name__ == "__main__":
    main()
