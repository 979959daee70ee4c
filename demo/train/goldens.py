#!/usr/bin/env python3
"""Golden outputs of the demo family, computed by Hugging Face transformers.

    goldens.py FAMILY TEXTS OUT [SALT]
FAMILY holds zen-mini/, finetuned/<variant>/ and deltas/<variant>/; TEXTS holds <domain>.txt, from which prompts are cut.
Every model gets six prompts: a sentence, a passage of general text and four of its own domain. For each place three passages of
the same length are tried and the one is kept whose greedy continuation is the most clear-cut (largest smallest margin).

Arithmetic: weights upcast from bf16 to float32 (reconstructions computed in float32), eager attention, no TF32, no KV cache.
The same weights are then run in float64 (transformers keeps norms, softmax and rotary angles in float32); "float64_max_abs_diff"
is the largest difference between the two among the log-probabilities that are recorded.
"""
import hashlib, json, multiprocessing, os, re, sys
from concurrent.futures import ProcessPoolExecutor
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../tests/data"))
import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from reference_encoder import reconstruct

DOMAINS = ["coder", "c", "shell", "sql", "math", "writer", "legal", "astro", "french", "german", "spanish", "russian", "config", "lexicon"]
SENTENCES = {"": ["The following command lists all files in the current directory:", "It is a truth universally acknowledged, that",
                  "Once the file has been opened, the function returns"],
             "second": ["In the beginning God created the heaven and the", "The server accepts a connection and then waits for",
                         "If the value is not a valid number, an error is"]}
LENGTHS = {"": [24, 32, 64, 150, 400], "second": [17, 40, 90, 200, 600]}
NEW, TOP, LAST = 32, 10, 16
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def load(family, kind, name):
    base = f"{family}/zen-mini"
    folder = base if kind == "base" else f"{family}/finetuned/{name}"
    if kind == "bitdelta":
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base), dtype=torch.float32, attn_implementation="eager")
        state = {k: torch.from_numpy(np.ascontiguousarray(v)) for k, v in reconstruct(base, f"{family}/deltas/{name}").items()}
        missing, unexpected = model.load_state_dict(state, strict=False)
        assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
        model.tie_weights()
    else:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    assert model.config._attn_implementation == "eager"
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert next(model.parameters()).dtype == torch.float32
    return model.eval().to(DEVICE)


@torch.no_grad()
def logprobs(model, ids):
    return torch.log_softmax(model(input_ids=ids.to(DEVICE), use_cache=False).logits, -1).cpu()


@torch.no_grad()
def greedy(model, ids):
    """ids [b, t] -> new ids, their log-probabilities and the margins over the second best, each [b, NEW]."""
    chosen, lps, margins = [], [], []
    for _ in range(NEW):
        lp = logprobs(model, ids)[:, -1]
        top = lp.topk(2, -1)
        chosen.append(top.indices[:, 0])
        lps.append(top.values[:, 0])
        margins.append(top.values[:, 0] - top.values[:, 1])
        ids = torch.cat((ids, chosen[-1][:, None]), 1)
    return torch.stack(chosen, 1), torch.stack(lps, 1), torch.stack(margins, 1)


def passages(tok, text, n, count, seed):
    """Passages of exactly n tokens, <|begin_of_text|> included, whose text encodes to exactly these tokens."""
    r, out = np.random.default_rng(int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "little")), []
    starts = [i + 1 for i, c in enumerate(text[:-10 * n]) if c == "\n" and text[i + 1] not in "\n "]
    for at in r.permutation(starts):
        ids = tok(text[at:at + 12 * n])["input_ids"][:n]
        piece = tok.decode(ids[1:])
        if len(ids) == n and "\ufffd" not in piece and tok(piece)["input_ids"] == ids and piece == text[at:at + len(piece)]:
            out.append((piece, ids))
        if len(out) == count:
            break
    return out


def rounded(t, digits=6):
    return [round(float(v), digits) for v in t]


def one(job):
    family, texts, kind, name, salt = job
    torch.set_num_threads(2)
    torch.set_float32_matmul_precision("highest")
    tok = AutoTokenizer.from_pretrained(f"{family}/zen-mini")
    model = load(family, kind, name)
    read = lambda d: open(f"{texts}/{d}.txt", encoding="utf-8").read()
    domain = name[len("zen-mini-"):] if kind != "base" else None
    sources = ["general"] + ([domain] * 4 if domain else ["coder", "french", "general", "writer"])
    groups = [("sentence", [(s, tok(s)["input_ids"]) for s in SENTENCES[salt]])]
    groups += [(src, passages(tok, read(src), n, 3, f"{salt}{kind}{name}{i}")) for i, (src, n) in enumerate(zip(sources, LENGTHS[salt]))]
    chosen = []
    for src, cands in groups:
        assert cands, (name, src)
        best = None
        for text, ids in cands:
            new, lp, margin = greedy(model, torch.tensor([ids]))
            if best is None or margin.min() > best[4].min():
                best = (text, ids, new[0], lp[0], margin[0])
        chosen.append((src, *best))
    results = []
    for src, text, ids, new, lp, margin in chosen:
        full = logprobs(model, torch.tensor([ids]))[0]
        first = max(0, len(ids) - LAST)
        top = full[first:].topk(TOP, -1)
        results.append({"source": src, "text": text, "ids": ids,
                        "top": [{"position": first + i, "ids": top.indices[i].tolist(), "logprobs": rounded(top.values[i])}
                                for i in range(len(ids) - first)],
                        "greedy": {"ids": new.tolist(), "logprobs": rounded(lp), "margins": rounded(margin),
                                   "text": tok.decode(new.tolist())}})
    model.double()
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq.float()
    worst = 0.0
    for r in results:
        full = logprobs(model, torch.tensor([r["ids"] + r["greedy"]["ids"]]))[0]
        n = len(r["ids"])
        diff = [abs(float(full[t["position"], i]) - v) for t in r["top"] for i, v in zip(t["ids"], t["logprobs"])]
        diff += [abs(float(full[n - 1 + j, i]) - v) for j, (i, v) in enumerate(zip(r["greedy"]["ids"], r["greedy"]["logprobs"]))]
        same = [int(full[n - 1 + j].argmax()) for j in range(NEW)] == r["greedy"]["ids"]
        r["float64_max_abs_diff"] = float(f"{max(diff):.3g}")
        r["float64_same_greedy"] = same
        worst = max(worst, max(diff))
    return name, kind, worst, min(min(r["greedy"]["margins"]) for r in results), {
        "model": name, "kind": kind, "arithmetic": f"float32 (no TF32), weights upcast from bf16, eager attention, no KV cache, {DEVICE}",
        "transformers": transformers.__version__, "torch": torch.__version__.split("+")[0],
        "note": "top[i] is the distribution of the token after ids[position]; greedy does not stop at <|end_of_text|>",
        "prompts": results}


def main(family, texts, out, salt=""):
    jobs = [(family, texts, "base", "zen-mini", salt)]
    jobs += [(family, texts, "finetuned", n, salt) for n in sorted(os.listdir(f"{family}/finetuned"))]
    jobs += [(family, texts, "bitdelta", f"zen-mini-{d}", salt) for d in DOMAINS if os.path.isdir(f"{family}/deltas/zen-mini-{d}")]
    with ProcessPoolExecutor(max_workers=max(1, min(5, (os.cpu_count() or 2) // 2)), mp_context=multiprocessing.get_context("spawn")) as pool:
        for name, kind, worst, margin, golden in pool.map(one, jobs):
            folder = f"{out}/{kind}"
            os.makedirs(folder, exist_ok=True)
            text = json.dumps(golden, ensure_ascii=False, indent=1)
            text = re.sub(r"\[\n\s+(-?[\d.e-]+(?:,\n\s+-?[\d.e-]+)*)\n\s+\]", lambda m: "[" + " ".join(m[1].split()) + "]", text)
            open(f"{folder}/{name}.json", "w", encoding="utf-8").write(text + "\n")
            print(f"{kind:10s} {name:18s} float64 differs by {worst:.2e}, smallest margin {margin:.4f}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
