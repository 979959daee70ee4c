#!/usr/bin/env python3
"""Goldens of tp-llama and tp-qwen2 by Hugging Face transformers (torch, CPU, float32, eager attention, no KV cache).

    tp_goldens.py [FOLDER]       after tp_models.py; writes FOLDER/<name>/golden.json

"base" runs the base's weights, "variant" W_base + scale * sign in float32, the delta between fine-tune and base being that of
tests/data/reference_encoder.py; "sha256" are the files of that delta, cut into 1 and into 8. Prompts of 1, 17 and 60 ids: all
logits after the last, and 16 greedy steps that do not stop at the end token: per step the five best ids and their logprobs."""
import hashlib, json, os, sys, tempfile
import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(HERE))
import reference_encoder as ref
import tp_models

LENGTHS, NEW, TOP, MARGIN = (1, 17, 60), 16, 5, 0.01


def number(x):
    return float(f"{x:.7g}")


@torch.no_grad()
def prompts(model, seed):
    g, out = torch.Generator().manual_seed(seed), []
    for n in LENGTHS:
        ids = torch.randint(3, model.config.vocab_size, (1, n), generator=g)
        logits = model(input_ids=ids, use_cache=False).logits[0, -1]
        seq, steps = ids, []
        for _ in range(NEW):
            top = torch.log_softmax(model(input_ids=seq, use_cache=False).logits[0, -1], -1).topk(TOP)
            assert top.values[0] - top.values[1] > MARGIN, "not clear-cut: another salt"
            steps.append({"ids": top.indices.tolist(), "logprobs": [number(v) for v in top.values]})
            seq = torch.cat((seq, top.indices[:1][None]), 1)
        out.append({"ids": ids[0].tolist(), "logits": [number(v) for v in logits], "greedy": steps})
    return out


def model_of(folder, weights):
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32, attn_implementation="eager").eval()
    missing, unexpected = model.load_state_dict({n: torch.from_numpy(np.array(w)) for n, w in weights.items()}, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"} and (not missing or model.config.tie_word_embeddings)
    model.tie_weights()
    return model


def effective(folder, sums):
    """The variant's weights, and the sums of its deltas; the reference's decoder against the formula."""
    base, tuned = ref.read_model(folder), ref.read_model(folder + "/tuned")
    with tempfile.TemporaryDirectory() as tmp:
        for shards in (1, 8):
            ref.encode(folder, folder + "/tuned", f"{tmp}/{shards}", "base", "variant", shards)
            for f in sorted(os.listdir(f"{tmp}/{shards}")):
                sums[f"{shards}/{f}"] = hashlib.sha256(open(f"{tmp}/{shards}/{f}", "rb").read()).hexdigest()
        weights = ref.reconstruct(folder, f"{tmp}/1")
    for n, w in weights.items():
        b, t = ref.as_float32(*base[n]), ref.as_float32(*tuned[n])
        scale = np.abs(t - b).astype(np.float64).mean(axis=1).astype(np.float32)[:, None] if b.ndim == 2 else None
        want = t if scale is None else b + np.where(t - b >= 0, scale, -scale)
        assert np.array_equal(w, want), n
    return {n: ref.as_float32(*t) for n, t in base.items()}, weights


def make(folder):
    sums = {}
    base, variant = effective(folder, sums)
    golden = {"arithmetic": "float32, eager attention, CPU, no KV cache", "transformers": transformers.__version__,
              "torch": torch.__version__.split("+")[0], "sha256": sums}
    for name, weights in (("base", base), ("variant", variant)):
        model = model_of(folder, weights)
        golden[name] = prompts(model, 7)
        exact, diff = model_of(folder, weights).double(), 0.0
        for m in exact.modules():
            if hasattr(m, "inv_freq"):
                m.inv_freq = m.inv_freq.float()
        with torch.no_grad():
            for p in golden[name]:
                logits = exact(input_ids=torch.tensor([p["ids"]]), use_cache=False).logits[0, -1]
                diff = max(diff, float((logits - torch.tensor(p["logits"], dtype=torch.float64)).abs().max()))
        print(f"{folder} {name}: float64 differs by {diff:.1e}, logits' deviation {torch.tensor(golden[name][2]['logits']).std():.2f}")
    change = np.linalg.norm(np.subtract(golden["variant"][2]["logits"], golden["base"][2]["logits"]))
    print(f"  the variant's logits are {change / np.linalg.norm(golden['base'][2]['logits']):.2f} of the base's away, relatively")
    with open(f"{folder}/golden.json", "w") as f:
        f.write(json.dumps(golden, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in tp_models.SALTS:
        make(os.path.join(sys.argv[1] if len(sys.argv) > 1 else HERE, name))
