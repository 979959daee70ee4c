#!/usr/bin/env python3
"""The CUDA backend against the goldens made with transformers, over `bitdelta generate --backend cuda`.

    tests/gpu/check_goldens.py [BITDELTA]      default build/bitdelta; needs numpy

Demo family: base and 14 deltas, top-10 log-probabilities within 2e-2 and greedy agreement of at least 98% of positions where
every first disagreement is a near-tie. Architectures: the logits' relative L2 within bf16's rounding. Prints one line a model and
"N passed, N failed, N skipped"."""
import concurrent.futures
import glob
import json
import os
import subprocess
import sys
import tempfile

import numpy

binary = sys.argv[1] if len(sys.argv) > 1 else "build/bitdelta"
TOP_BOUND, TIE_MARGIN, ARCH_L2 = 2e-2, 5e-2, 2e-2


def generate(base, ids, tokens, *more):
    with tempfile.NamedTemporaryFile(suffix=".npy") as dump:
        command = [binary, "generate", "--backend", "cuda", "--base", base, "--prompt-ids", ",".join(map(str, ids)), "--max-tokens", str(tokens),
                   "--greedy", "--ignore-eos", "--json", "--dump-logits", dump.name, *more]
        run = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if run.returncode:
            raise RuntimeError(run.stderr.strip()[-400:])
        return json.loads(run.stdout), numpy.load(dump.name).astype(numpy.float64)


def log_softmax(row):
    top = row.max()
    return row - top - numpy.log(numpy.exp(row - top).sum())


def first_difference(got, want):
    return next((i for i, (a, b) in enumerate(zip(got, want)) if a != b), len(want))


def demo(name, golden, *more):
    worst, agreed, total, faults = 0.0, 0, 0, []
    for prompt in golden["prompts"]:
        ids, want, margins = prompt["ids"], prompt["greedy"]["ids"], prompt["greedy"]["margins"]
        out, logits = generate("demo/zen-mini", ids, len(want), *more)  # decodes token by token
        for entry in prompt["top"]:
            row = log_softmax(logits[entry["position"]])
            worst = max(worst, max(abs(row[i] - l) for i, l in zip(entry["ids"], entry["logprobs"])))
        at = first_difference(out["ids"], want)
        if at < len(want) and margins[at] > TIE_MARGIN:
            faults.append(f"decode differs at {at} with margin {margins[at]}")
        _, logits = generate("demo/zen-mini", ids + want[:-1], 0, *more)  # the golden's own continuation, in one prefill
        for i, (token, margin) in enumerate(zip(want, margins)):
            right = int(logits[len(ids) - 1 + i].argmax()) == token
            agreed, total = agreed + right, total + 1
            if not right and margin > TIE_MARGIN:
                faults.append(f"prefill differs at {i} with margin {margin}")
    if worst > TOP_BOUND:
        faults.append(f"log-probability off by {worst:.4f}")
    return name, f"worst logprob {worst:.4f}, greedy agreement {agreed}/{total}", faults, agreed, total


def architecture(folder):
    worst, faults = 0.0, []
    golden = json.load(open(f"{folder}/golden.json"))
    for prompt in golden["prompts"]:
        out, logits = generate(folder, prompt["ids"], 16)
        want = numpy.array(prompt["logits"])
        worst = max(worst, numpy.linalg.norm(logits[len(prompt["ids"]) - 1] - want) / numpy.linalg.norm(want))
    if worst > ARCH_L2:
        faults.append("logits off")
    return os.path.basename(folder), f"relative L2 {worst:.2e}", faults, 0, 0


jobs = [(demo, "zen-mini", json.load(open("tests/data/golden/base/zen-mini.json")))]
for path in sorted(glob.glob("tests/data/golden/bitdelta/*.json")):
    name = os.path.basename(path)[:-5]
    jobs.append((demo, name, json.load(open(path)), "--delta", f"demo/deltas/{name}"))
jobs += [(architecture, folder.rstrip("/")) for folder in sorted(glob.glob("tests/data/arch/*/"))]

passed = failed = agreed = total = 0
with concurrent.futures.ThreadPoolExecutor(8) as pool:
    for future in [pool.submit(*job) for job in jobs]:
        try:
            name, text, faults, right, of = future.result()
        except Exception as fault:  # a crash of one model must not hide the others
            name, text, faults, right, of = "?", "", [str(fault)], 0, 0
        agreed, total = agreed + right, total + of
        passed, failed = passed + (not faults), failed + bool(faults)
        print("ok  " if not faults else "FAIL", name, text, "; ".join(faults))
share = agreed / max(total, 1)
print(f"greedy agreement over the family: {100 * share:.2f}% of {total} positions")
failed += share < 0.98
print(f"{passed} passed, {failed} failed, 0 skipped")
sys.exit(1 if failed else 0)
