#!/usr/bin/env python3
"""Writes config_cases.json: config.json files of all families, in both forms and with fields left out at random, and
what transformers 5 makes of each. Needs transformers (no torch). What is kept is config_cases.json.xz (`xz -9e`).

    make_config_cases.py [COUNT [SEED]]
"""
import json, os, random, sys, tempfile
import transformers
from transformers import AutoConfig

FAMILIES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
            "mistral": "MistralForCausalLM", "phi3": "Phi3ForCausalLM", "gemma2": "Gemma2ForCausalLM"}


def rope_dict(r, kind):
    old = r.random() < 0.5
    d = {"type" if old else "rope_type": kind}
    if kind != "default":
        d["factor"] = r.choice([2.0, 4.0, 8.0])
    if kind == "llama3":
        d.update(low_freq_factor=1.0, high_freq_factor=r.choice([2.0, 4.0]))
    if kind == "yarn":
        for k, v in {"beta_fast": 24.0, "beta_slow": 2.0, "attention_factor": 1.25, "mscale": 0.7, "mscale_all_dim": 0.9,
                     "truncate": False}.items():
            if r.random() < 0.3:
                d[k] = v
    if kind in ("llama3", "yarn") and r.random() < 0.7:
        d["original_max_position_embeddings"] = r.choice([32, 64, 4096])
    return d


def make(r):
    t = r.choice(list(FAMILIES))
    kv = r.choice([1, 2, 4]) if t != "mistral" else r.choice([2, 8])
    heads = kv * r.choice([1, 2, 3, 4])
    dim = r.choice([8, 16, 24, 64])
    c = {"model_type": t, "hidden_size": heads * dim, "num_hidden_layers": r.randint(1, 40), "num_attention_heads": heads,
         "intermediate_size": 8 * r.randint(1, 90), "vocab_size": r.randint(10, 40000)}
    if r.random() < 0.7:
        c["architectures"] = [FAMILIES[t]]
    if r.random() < 0.8 or heads % {"qwen2": 32, "qwen3": 32, "mistral": 8, "gemma2": 4}.get(t, 1):
        c["num_key_value_heads"] = kv if t in ("mistral", "gemma2") or r.random() < 0.8 else None
    if r.random() < 0.5:
        c["head_dim"] = r.choice([8, 32, 40, 128])
    if r.random() < 0.5:
        c["max_position_embeddings"] = r.choice([64, 256, 8192])
    if r.random() < 0.7:
        c["rms_norm_eps"] = r.choice([1e-5, 1e-6, 3e-6])
    if r.random() < 0.5:
        c["tie_word_embeddings"] = r.random() < 0.5
    if t in ("llama", "qwen3", "gemma2") and r.random() < 0.4:
        c["attention_bias"] = r.random() < 0.5
    if t == "llama" and r.random() < 0.4:
        c["mlp_bias"] = r.random() < 0.5
    if r.random() < 0.6:
        c["hidden_activation" if t == "gemma2" else "hidden_act"] = r.choice(["silu", "gelu_pytorch_tanh"])
    for k in ("bos_token_id", "eos_token_id"):
        if r.random() < 0.6:
            c[k] = r.choice([0, 1, 7, None])
    if r.random() < 0.2:
        c["eos_token_id"] = [2, 5, 9]
    if t != "llama" and r.random() < 0.7:
        c["sliding_window"] = r.choice([16, 100, 4096] + ([None] if t != "gemma2" else []))
    if t in ("qwen2", "qwen3"):
        if r.random() < 0.6:
            c["use_sliding_window"] = r.random() < 0.7
        if r.random() < 0.5:
            c["max_window_layers"] = r.randint(0, 30)
    layered = t == "gemma2" or (t in ("qwen2", "qwen3") and c.get("use_sliding_window") and c.get("sliding_window", 1))
    if layered and r.random() < 0.3:
        c["layer_types"] = [r.choice(["full_attention", "sliding_attention"]) for _ in range(c["num_hidden_layers"])]
    if t == "gemma2":
        for k, v in {"query_pre_attn_scalar": 24, "attn_logit_softcapping": 20.0, "final_logit_softcapping": None}.items():
            if r.random() < 0.5:
                c[k] = v
    theta = r.choice([None, 10000.0, 500000, 1e6])
    kind = r.choice(["default", "linear", "llama3", "yarn"]) if t != "phi3" else "default"
    if r.random() < 0.5:                                                       # published form
        if theta:
            c["rope_theta"] = theta
        if kind != "default":
            c["rope_scaling"] = rope_dict(r, kind)
        elif r.random() < 0.5:
            c["rope_scaling"] = None
        c["torch_dtype"] = "bfloat16"
    else:
        c["rope_parameters"] = rope_dict(r, kind)
        if theta:
            c["rope_parameters"]["rope_theta"] = theta
        c["dtype"] = "bfloat16"
    if t == "phi3" and r.random() < 0.4:
        c["partial_rotary_factor"] = 0.75
    return c


def expected(folder, c):
    json.dump(c, open(f"{folder}/config.json", "w"))
    m = AutoConfig.from_pretrained(folder)
    t, rope = m.model_type, m.rope_parameters
    dim = getattr(m, "head_dim", None) or m.hidden_size // m.num_attention_heads
    window = getattr(m, "sliding_window", None) if t != "llama" else None
    kinds = getattr(m, "layer_types", None) if t in ("qwen2", "qwen3", "gemma2") else None
    layers = [int(k == "sliding_attention") for k in kinds] if kinds else [int(window is not None)] * m.num_hidden_layers
    eos = m.eos_token_id if isinstance(m.eos_token_id, list) else [] if m.eos_token_id is None else [m.eos_token_id]
    given = "eos_token_id" in c
    return {
        "hidden": m.hidden_size, "layers": m.num_hidden_layers, "heads": m.num_attention_heads, "kv_heads": m.num_key_value_heads,
        "head_dim": dim, "ffn": m.intermediate_size, "vocab": m.vocab_size, "max_positions": m.max_position_embeddings,
        "norm_eps": m.rms_norm_eps, "tied": m.tie_word_embeddings, "window_layer": layers,
        "window_tokens": window if window and any(layers) else 0,
        "qkv_bias": t == "qwen2" or bool(getattr(m, "attention_bias", False)),
        "o_bias": t != "qwen2" and bool(getattr(m, "attention_bias", False)), "mlp_bias": bool(getattr(m, "mlp_bias", False)),
        "activation": m.hidden_activation if t == "gemma2" else m.hidden_act,
        "attn_scale": (m.query_pre_attn_scalar if t == "gemma2" else dim) ** -0.5,
        "attn_softcap": getattr(m, "attn_logit_softcapping", None) or 0.0,
        "logit_softcap": getattr(m, "final_logit_softcapping", None) or 0.0,
        "bos_id": -1 if m.bos_token_id is None else m.bos_token_id,
        "eos": [e for e in eos if given or e < m.vocab_size],
        "rope_type": rope["rope_type"], "theta": rope["rope_theta"],
        "rotary_dim": int(dim * rope.get("partial_rotary_factor", 1.0)),
        "rope": {k: rope[k] for k in ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor",
                                      "mscale", "mscale_all_dim", "truncate", "original_max_position_embeddings") if k in rope},
    }


def main(count=60, seed=1):
    r, cases = random.Random(int(seed)), []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(int(count)):
            c = make(r)
            if c.get("bos_token_id", 0) and c["bos_token_id"] >= c["vocab_size"]:
                continue
            cases.append({"config": c, "expected": expected(folder, c)})
    out = os.path.join(os.path.dirname(os.path.abspath(__file__)), "config_cases.json")
    with open(out, "w") as f:
        f.write('{"transformers": "%s", "cases": [\n' % transformers.__version__)
        f.write(",\n".join(json.dumps(c) for c in cases) + "\n]}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
