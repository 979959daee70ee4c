#!/usr/bin/env python3
"""Tiny randomly initialised models of several architectures with golden outputs from Hugging Face transformers.

    arch_goldens.py OUT SET        SET is "first" or "second": other sizes and settings; "odd": no width is a multiple of anything
Each OUT/<name>/ holds config.json, model.safetensors (bf16; one model in shards with an index) and golden.json.
config.json is written by hand in the form that published checkpoints have (rope_theta, rope_scaling, torch_dtype), or, where
"new_form" is set, in the form that transformers 5 writes (rope_parameters, dtype).
"""
import json, os, re, shutil, sys, traceback
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

NEW, LENGTHS = 16, (1, 17, 60)
COMMON = {"attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.02, "rms_norm_eps": 1e-5,
          "rope_theta": 10000.0, "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 512, "max_position_embeddings": 256}


def rope3(factor, low, high, original):
    return {"factor": factor, "high_freq_factor": high, "low_freq_factor": low, "original_max_position_embeddings": original,
            "rope_type": "llama3"}


def llama(**k):
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False, "mlp_bias": False,
            "hidden_act": "silu", "pretraining_tp": 1, "rope_scaling": None, "tie_word_embeddings": False, **COMMON, **k}


def mistral(**k):
    return {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_act": "silu", "tie_word_embeddings": False,
            **COMMON, **k}


def qwen2(**k):
    return {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "tie_word_embeddings": True,
            "use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 28, **COMMON, "rms_norm_eps": 1e-6, **k}


def qwen3(**k):
    return {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False, "hidden_act": "silu",
            "rope_scaling": None, "sliding_window": None, "use_sliding_window": False, "max_window_layers": 28,
            "tie_word_embeddings": True, **COMMON, "rms_norm_eps": 1e-6, "rope_theta": 1000000, **k}


def phi3(**k):
    return {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "embd_pdrop": 0.0, "resid_pdrop": 0.0, "hidden_act": "silu",
            "original_max_position_embeddings": 256, "pad_token_id": 0, "rope_scaling": None, "sliding_window": 2047,
            "tie_word_embeddings": False, **COMMON, **k}


def gemma2(**k):
    return {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "attention_bias": False,
            "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "final_logit_softcapping": 30.0,
            "attn_logit_softcapping": 50.0, "cache_implementation": "hybrid", "pad_token_id": 0, "tie_word_embeddings": True,
            **COMMON, "rms_norm_eps": 1e-6, **k}


def dims(hidden, layers, heads, kv, ff, head_dim=None, explicit=True):
    d = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv,
         "intermediate_size": ff}
    if explicit and head_dim:
        d["head_dim"] = head_dim
    return d


SETS = {
    "first": {
        "llama3-rope": (llama(**dims(96, 2, 3, 1, 192, 32), rope_scaling=rope3(8.0, 1.0, 4.0, 32), rope_theta=500000.0), {}),
        "llama-gqa": (llama(**dims(192, 2, 6, 3, 128)), {}),                    # head_dim left to be hidden/heads = 32
        "mistral-window": (mistral(**dims(96, 3, 4, 2, 160, 24), sliding_window=16), {}),
        "qwen2": (qwen2(**dims(96, 2, 6, 2, 176)), {}),
        "qwen3": (qwen3(**dims(64, 3, 4, 2, 192, 32)), {"shards": 3}),
        "phi3": (phi3(**dims(96, 2, 4, 2, 144)), {}),
        "gemma2": (gemma2(**dims(64, 2, 4, 2, 160, 32), query_pre_attn_scalar=24, sliding_window=16), {}),
    },
    "second": {
        "llama3-rope": (llama(**dims(64, 3, 4, 4, 112, 16), rope_scaling=rope3(4.0, 1.0, 2.0, 64), tie_word_embeddings=True), {"new_form": True}),
        "llama-gqa": (llama(**dims(80, 3, 10, 2, 136), attention_bias=False, rms_norm_eps=1e-6), {"shards": 2}),
        "mistral-window": (mistral(**dims(128, 2, 4, 1, 96), sliding_window=24, rope_theta=1000000.0), {}),
        "qwen2": (qwen2(**dims(64, 3, 4, 4, 96), tie_word_embeddings=False, rope_theta=1000000.0), {}),
        "qwen3": (qwen3(**dims(96, 2, 2, 1, 128, 64), tie_word_embeddings=False), {"new_form": True}),
        "phi3": (phi3(**dims(64, 3, 2, 1, 176), sliding_window=20), {}),
        "gemma2": (gemma2(**dims(96, 3, 4, 1, 112, 16), query_pre_attn_scalar=16, sliding_window=12, attn_logit_softcapping=20.0,
                          final_logit_softcapping=10.0), {}),
    },
    "odd": {"llama-odd": (llama(**dims(39, 2, 3, 1, 27, 10), vocab_size=67, tie_word_embeddings=True), {})},
}


def randomise(model, seed):
    g = torch.Generator().manual_seed(seed)
    gemma = model.config.model_type == "gemma2"
    for name, p in model.named_parameters():
        if p.dim() == 2:
            std = 0.5 if "embed" in name and not gemma else 1.4 / p.shape[1] ** 0.5
            p.data = torch.randn(p.shape, generator=g) * std
        elif "norm" in name:
            p.data = torch.randn(p.shape, generator=g) * 0.2 + (0.0 if gemma else 1.0)
        else:
            p.data = torch.randn(p.shape, generator=g) * 0.3
        p.data = p.data.to(torch.bfloat16)


@torch.no_grad()
def golden(model, seed):
    g, out = torch.Generator().manual_seed(seed), []
    for n in LENGTHS:
        ids = torch.randint(3, model.config.vocab_size, (1, n), generator=g)
        ids[0, 0] = 1
        logits = model(input_ids=ids, use_cache=False).logits[0, -1]
        seq, new, lps, margins = ids, [], [], []
        for _ in range(NEW):
            lp = torch.log_softmax(model(input_ids=seq, use_cache=False).logits[0, -1], -1)
            top = lp.topk(2)
            new.append(int(top.indices[0]))
            lps.append(float(top.values[0]))
            margins.append(float(top.values[0] - top.values[1]))
            seq = torch.cat((seq, top.indices[:1][None]), 1)
        out.append({"ids": ids[0].tolist(), "logits": [float(v) for v in logits], "greedy": {"ids": new, "logprobs": lps, "margins": margins}})
    return out


def compact(d):
    text = json.dumps(d, indent=1)
    return re.sub(r"\[\n\s+(-?[\d.e-]+(?:,\n\s+-?[\d.e-]+)*)\n\s+\]", lambda m: "[" + " ".join(m[1].split()) + "]", text) + "\n"


def make(folder, name, config, opts):
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    json.dump(config, open(f"{folder}/config.json", "w"), indent=2)
    cfg = AutoConfig.from_pretrained(folder)
    rope = getattr(cfg, "rope_parameters", None)
    assert rope["rope_theta"] == config["rope_theta"], rope
    if config.get("rope_scaling"):
        assert rope["rope_type"] == "llama3" and rope["factor"] == config["rope_scaling"]["factor"], rope
    if opts.get("new_form"):
        config = json.loads(json.dumps(config))
        scaling = config.pop("rope_scaling", None) or {"rope_type": "default"}
        config["rope_parameters"] = {**scaling, "rope_theta": config.pop("rope_theta")}
        config["dtype"] = config.pop("torch_dtype")
        config["transformers_version"] = transformers.__version__
        json.dump(config, open(f"{folder}/config.json", "w"), indent=2)
        again = AutoConfig.from_pretrained(folder)
        assert again.rope_parameters == rope, (again.rope_parameters, rope)
        cfg = again
    model = AutoModelForCausalLM.from_config(cfg, dtype=torch.bfloat16)
    margin, seed = -1, 0
    for seed in range(1, 40):                    # the weights are those of the first seed whose greedy continuations are clear-cut
        randomise(model, 1000 * seed + len(name))
        tmp = f"{folder}/tmp"
        model.save_pretrained(tmp, **({"max_shard_size": 4 * model.num_parameters() // opts["shards"] // 2 + 20000} if opts.get("shards") else {}))
        shutil.copy(f"{folder}/config.json", f"{tmp}/config.json")
        full = AutoModelForCausalLM.from_pretrained(tmp, dtype=torch.float32, attn_implementation="eager").eval()
        out = golden(full, 77 + len(name))
        margin = min(min(p["greedy"]["margins"]) for p in out)
        if margin > 0.01:
            break
    for f in sorted(os.listdir(tmp)):
        if f.endswith((".safetensors", ".index.json")):
            shutil.move(f"{tmp}/{f}", f"{folder}/{f}")
    shutil.rmtree(tmp)
    full.double()
    for m in full.modules():
        if hasattr(m, "inv_freq"):
            m.inv_freq = m.inv_freq.float()
    diff = 0.0
    with torch.no_grad():
        for p in out:
            lo = full(input_ids=torch.tensor([p["ids"]]), use_cache=False).logits[0, -1]
            diff = max(diff, float((lo - torch.tensor(p["logits"]).double()).abs().max()))
    spread = torch.tensor(out[2]["logits"]).std().item()
    open(f"{folder}/golden.json", "w").write(compact({
        "arithmetic": "float32, weights upcast from bf16, eager attention, CPU, no KV cache", "transformers": transformers.__version__,
        "torch": torch.__version__.split("+")[0], "float64_max_abs_diff": float(f"{diff:.3g}"),
        "note": "logits are those after the last id; greedy does not stop at the end token", "prompts": out}))
    size = sum(os.path.getsize(f"{folder}/{f}") for f in os.listdir(folder))
    print(f"{name:15s} seed {seed} parameters {model.num_parameters()} logits std {spread:.2f} margin {margin:.4f} "
          f"float64 differs by {diff:.1e} size {size} {sorted(os.listdir(folder))}", flush=True)


def main(out, which):
    torch.set_num_threads(2)
    for name, (config, opts) in SETS[which].items():
        try:
            make(f"{out}/{name}", name, config, opts)
        except Exception as e:
            traceback.print_exc()
            print("FAILED", name, e, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
