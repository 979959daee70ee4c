#!/usr/bin/env python3
"""What 16-bit rounding costs transformers itself on the goldens: the yardstick that check_goldens.py holds the CUDA backend to.

    tests/gpu/rounding_reference.py > tests/gpu/rounding_reference.json     needs tests/requirements-oracles.txt; about 10 minutes of 2 cores

The model loaded in bf16 or fp16 (rotary frequencies stay float32, which model.to(dtype) would round as well), eager attention, no KV
cache, on a CPU. A variant's weights are base + scale * sign, rounded once, as a merged checkpoint has them. The weights of the base and
of all architectures are bf16 already: nothing is rounded there. `weights` is what rounding a variant's weights makes alone, with arithmetic in
float32. worst, p99, rms: of the 10 best log-probabilities; next: root mean square of the greedy continuation's; disagreed: greedy choices
that are others."""
import glob
import json
import os
import sys

import torch
import transformers
from transformers import AutoModelForCausalLM

import golden_errors

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, f"{ROOT}/tests/data")
from reference_encoder import reconstruct  # noqa: E402

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
BASE = f"{ROOT}/demo/zen-mini"
transformers.utils.logging.disable_progress_bar()


def load(folder, kind):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=kind, attn_implementation="eager").eval()


def logits(model, ids):
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].double().numpy()


def load_demo(name, kind, rounded_to):
    model = load(BASE, kind)
    if name != "zen-mini":
        weights = reconstruct(BASE, f"{ROOT}/demo/deltas/{name}")
        for key, parameter in model.named_parameters():
            parameter.data.copy_(torch.from_numpy(weights[key]).to(rounded_to))
    return model


def demo(model, golden):
    errors = golden_errors.Demo()
    for prompt in golden["prompts"]:
        rows = logits(model, prompt["ids"] + prompt["greedy"]["ids"][:-1])
        errors.prompt(prompt, rows)
        errors.continued(prompt, rows)
        errors.chosen(prompt, rows)
    return errors


def rounded(values):
    return {key: value if isinstance(value, int) else float(f"{value:.3g}") for key, value in values.items()}


def family(out):
    names = ["zen-mini"] + sorted(os.path.basename(path)[:-5] for path in glob.glob(f"{ROOT}/tests/data/golden/bitdelta/*.json"))
    whole = {kind: [] for kind in [*DTYPES, "weights bf16", "weights fp16"]}
    for name in names:
        with open(f"{ROOT}/tests/data/golden/{'base' if name == 'zen-mini' else 'bitdelta'}/{name}.json") as file:
            golden = json.load(file)
        for dtype, kind in DTYPES.items():
            errors = demo(load_demo(name, kind, kind), golden)
            out[dtype]["demo"][name] = rounded(errors.summary())
            whole[dtype].append(errors)
            whole[f"weights {dtype}"].append(demo(load_demo(name, torch.float32, kind), golden))
        print(name, out["bf16"]["demo"][name], file=sys.stderr, flush=True)
    for dtype in DTYPES:
        out[dtype]["family"] = rounded(golden_errors.joined(whole[dtype]).summary())
        out[dtype]["weights"] = rounded(golden_errors.joined(whole[f"weights {dtype}"]).summary())


def architectures(out):
    for folder in sorted(glob.glob(f"{ROOT}/tests/data/arch/*/")):
        name = os.path.basename(folder.rstrip("/"))
        with open(f"{folder}/golden.json") as file:
            prompts = golden_errors.arch_prompts(json.load(file))
        for dtype, kind in DTYPES.items():
            model = load(folder, kind)
            out[dtype]["arch"][name] = float(f"{max(golden_errors.relative_l2(logits(model, p['ids'])[-1], p['logits']) for p in prompts):.3g}")
        print(name, out["bf16"]["arch"][name], file=sys.stderr, flush=True)


def lines(out):
    """JSON, a line a model."""
    text = []
    for dtype in DTYPES:
        part = out[dtype]
        demo_lines = ",\n   ".join(f"{json.dumps(name)}: {json.dumps(values)}" for name, values in part["demo"].items())
        text.append(f' "{dtype}": {{\n  "family": {json.dumps(part["family"])},\n  "weights": {json.dumps(part["weights"])},\n  "demo": {{\n   {demo_lines}}},\n  "arch": {json.dumps(part["arch"])}}}')
    return "{\n" + f' "transformers": {json.dumps(transformers.__version__)}, "torch": {json.dumps(torch.__version__.split("+")[0])},\n' + ",\n".join(text) + "\n}"


def main():
    torch.set_num_threads(2)
    out = {dtype: {"demo": {}, "arch": {}} for dtype in DTYPES}
    architectures(out)
    family(out)
    print(lines(out))


if __name__ == "__main__":
    main()
