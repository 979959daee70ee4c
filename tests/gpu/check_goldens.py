#!/usr/bin/env python3
"""The CUDA backend against the goldens made with transformers, over `bitdelta generate --backend cuda`.

    tests/gpu/check_goldens.py [BITDELTA] [--dtype auto|bf16|fp16] [--kernels auto|plain]     needs numpy

Demo family: base and 14 deltas; greedy agreement of at least 98% of positions where every first disagreement is a near-tie, and
top-10 log-probabilities within a bound that follows from the element type. The goldens are float32. What the 8 layers of the demo
model make of 16-bit activations was measured on an H200: fp16 0.046 (plain kernels, which keep projections in float32: 0.024) and
every greedy choice right; bf16, whose steps are 8 times coarser, 0.40 and 99.86%. The bounds leave a little room over that, the
near-ties likewise. Architectures: the logits' relative L2 within the type's rounding. A model that the CUDA backend refuses by
its sizes is skipped, with what it said; any other refusal is a fault. Prints one line a model, the worst of all, and "N passed, N
failed, N skipped"."""
import argparse
import concurrent.futures
import glob
import json
import os
import subprocess
import sys
import tempfile

import numpy

options = argparse.ArgumentParser()
options.add_argument("binary", nargs="?", default="build/bitdelta")
options.add_argument("--dtype", default="auto", choices=["auto", "bf16", "fp16"])
options.add_argument("--kernels", default="auto", choices=["auto", "plain"])
options = options.parse_args()
binary = options.binary
fp16 = options.dtype == "fp16"
TOP_BOUND = 0.5 if not fp16 else 0.03 if options.kernels == "plain" else 0.06
ARCH_L2, TIE_MARGIN = (4e-3, 5e-2) if fp16 else (2e-2, 0.2)
SIZES_REFUSED = "the CUDA backend takes hidden and intermediate sizes and heads times head_dim that are multiples of 8"


def sizes_taken(base):
    config = json.load(open(f"{base}/config.json"))
    heads = config["num_attention_heads"]
    width = heads * (config.get("head_dim") or config["hidden_size"] // heads)
    return not any(size % 8 for size in (config["hidden_size"], config["intermediate_size"], width))


class Refused(Exception):
    """A model of sizes that the backend does not take."""


def generate(base, ids, tokens, *more):
    with tempfile.NamedTemporaryFile(suffix=".npy") as dump:
        command = [binary, "generate", "--backend", "cuda", "--dtype", options.dtype, "--kernels", options.kernels, "--base", base, "--prompt-ids", ",".join(map(str, ids)), "--max-tokens", str(tokens),
                   "--greedy", "--ignore-eos", "--json", "--dump-logits", dump.name, *more]
        run = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if run.returncode and SIZES_REFUSED in run.stderr and not sizes_taken(base):
            raise Refused(run.stderr.strip()[-400:])
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
    return name, f"worst logprob {worst:.4f}, greedy agreement {agreed}/{total}", faults, agreed, total, worst


def architecture(folder):
    worst, faults = 0.0, []
    golden = json.load(open(f"{folder}/golden.json"))
    for prompt in golden["prompts" if "prompts" in golden else "base"]:  # those for tensor parallelism have a variant too
        out, logits = generate(folder, prompt["ids"], 16)
        want = numpy.array(prompt["logits"])
        worst = max(worst, numpy.linalg.norm(logits[len(prompt["ids"]) - 1] - want) / numpy.linalg.norm(want))
    if worst > ARCH_L2:
        faults.append("logits off")
    return os.path.basename(folder), f"relative L2 {worst:.2e}", faults, 0, 0, 0


jobs = [(demo, "zen-mini", json.load(open("tests/data/golden/base/zen-mini.json")))]
for path in sorted(glob.glob("tests/data/golden/bitdelta/*.json")):
    name = os.path.basename(path)[:-5]
    jobs.append((demo, name, json.load(open(path)), "--delta", f"demo/deltas/{name}"))
jobs += [(architecture, folder.rstrip("/")) for folder in sorted(glob.glob("tests/data/arch/*/"))]

passed = failed = skipped = agreed = total = 0
worst = 0.0
with concurrent.futures.ThreadPoolExecutor(8) as pool:
    for job, future in [(job, pool.submit(*job)) for job in jobs]:
        name, text, faults, right, of, off = os.path.basename(job[1]), "", [], 0, 0, 0
        try:
            name, text, faults, right, of, off = future.result()
        except Refused as refusal:
            skipped += 1
            print("skip", name, refusal)
            continue
        except Exception as fault:  # a crash of one model must not hide the others
            faults = [f"{type(fault).__name__}: {fault}"]
        agreed, total, worst = agreed + right, total + of, max(worst, off)
        passed, failed = passed + (not faults), failed + bool(faults)
        print("ok  " if not faults else "FAIL", name, text, "; ".join(faults))
share = agreed / max(total, 1)
print(f"dtype {options.dtype}: worst log-probability off by {worst:.4f} (bound {TOP_BOUND}), greedy agreement {100 * share:.2f}% of {total} positions")
failed += share < 0.98
print(f"{passed} passed, {failed} failed, {skipped} skipped")
sys.exit(1 if failed else 0)
