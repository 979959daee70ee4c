#!/usr/bin/env python3
"""Which of the CUDA backend's roundings to 16 bits cost how much: its arithmetic in float32, with each place rounded or not.

    bench/roundings.py [bf16|fp16]     needs torch and numpy; tests/data/unpack.sh has been run; some 10 minutes of 2 cores

The demo family against its float32 goldens: 14400 differences of top-10 log-probabilities. Prints a line a set of places: the worst, the
99th percentile, the root mean square and the median. Places: `w` W + scale * S of a variant, as prefill makes it, scale rounded too; `n_attn`
`n_ffn` `n_final` outputs of norms; `qkv` `o` `gate_up` `down` outputs of linears; `q` `k` after rope and `v`, the KV cache; `p` weights of
attention; `attn` its output; `act` the gated activation. In float32 there: residual stream, sums, logits. `res` and `logits` are not rounded
by the backend, but are by transformers."""
import glob
import json
import math
import os
import sys

import numpy
import torch

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [f"{ROOT}/tests/data", f"{ROOT}/tests/gpu"]
import golden_errors  # noqa: E402
from reference_encoder import as_float32, read_model, read_safetensors  # noqa: E402

HEADS, KV_HEADS, DIM, LAYERS, EPS, THETA = 4, 2, 64, 8, 1e-5, 10000.0  # demo/zen-mini/config.json
LINEAR_OUT, ATTENTION = {"qkv", "o", "gate_up", "down"}, {"q", "k", "v", "p"}
LINEAR_IN = {"n_attn", "n_ffn", "n_final", "attn", "act"}
DECODE = LINEAR_OUT | ATTENTION | LINEAR_IN
TYPE = {"bf16": torch.bfloat16, "fp16": torch.float16}[sys.argv[1] if len(sys.argv) > 1 else "bf16"]
BASE = {name: torch.tensor(as_float32(*tensor)) for name, tensor in read_model(f"{ROOT}/demo/zen-mini").items()}
FREQUENCIES = 1.0 / THETA ** (torch.arange(0, DIM, 2).float() / DIM)


def rounded(x):
    return x.to(TYPE).float()


def weights(name, places):
    delta = read_safetensors(f"{ROOT}/demo/deltas/{name}/shard-00-of-01.safetensors") if name != "zen-mini" else {}
    out = {}
    for key, w in BASE.items():
        if key + ".sign" in delta:
            bits = numpy.unpackbits(numpy.frombuffer(delta[key + ".sign"][2], numpy.uint8).reshape(w.shape[0], -1), axis=1, bitorder="little")
            sign, scale = torch.from_numpy(bits).float() * 2 - 1, torch.tensor(as_float32(*delta[key + ".scale"]))[:, None]
            out[key] = rounded(w + rounded(scale) * sign) if "w" in places and "layers" in key else w + scale * sign
        else:
            out[key] = torch.tensor(as_float32(*delta[key])) if key in delta else w
    return out


def norm(x, gamma):
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + EPS) * gamma


def forward(w, ids, places, rows):
    """row -> logits, of those rows"""
    at = lambda place, x: rounded(x) if place in places else x  # noqa: E731
    tokens, x = len(ids), at("res", w["model.embed_tokens.weight"][ids])
    phase = torch.arange(tokens).float()[:, None, None] * FREQUENCIES.repeat(2)
    rope = lambda v: v * phase.cos() + torch.cat([-v[..., DIM // 2:], v[..., :DIM // 2]], -1) * phase.sin()  # noqa: E731
    unseen = ~torch.ones(tokens, tokens, dtype=torch.bool).tril()
    for layer in range(LAYERS):
        linear = lambda place, h, name: at(place, h @ w[f"model.layers.{layer}.{name}_proj.weight"].T)  # noqa: E731,B023
        h = at("n_attn", norm(x, w[f"model.layers.{layer}.input_layernorm.weight"]))
        q, k, v = (linear("qkv", h, f"self_attn.{name}").view(tokens, -1, DIM) for name in "qkv")
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (at("k", rope(k)), at("v", v)))
        scores = (torch.einsum("thd,shd->hts", at("q", rope(q)), k) / math.sqrt(DIM)).masked_fill(unseen, -math.inf)
        p = torch.exp(scores - scores.max(-1, keepdim=True).values)
        h = torch.einsum("hts,shd->thd", at("p", p), v) / p.sum(-1).T[..., None]
        x = at("res", x + linear("o", at("attn", h.reshape(tokens, -1)), "self_attn.o"))
        h = at("n_ffn", norm(x, w[f"model.layers.{layer}.post_attention_layernorm.weight"]))
        gate, up = linear("gate_up", h, "mlp.gate"), linear("gate_up", h, "mlp.up")
        x = at("res", x + linear("down", at("act", torch.nn.functional.silu(gate) * up), "mlp.down"))
    logits = at("logits", at("n_final", norm(x[rows], w["model.norm.weight"])) @ w["model.embed_tokens.weight"].T)
    return dict(zip(rows, logits.double().numpy()))


def measure(label, places):
    errors = golden_errors.Demo()
    for path in GOLDENS:
        w = weights(os.path.basename(path)[:-5], places)
        with open(path) as file:
            for prompt in json.load(file)["prompts"]:
                errors.prompt(prompt, forward(w, prompt["ids"], places, [entry["position"] for entry in prompt["top"]]))
    worst, p99, median = (float(numpy.quantile(errors.top, share)) for share in (1, 0.99, 0.5))
    print(f"{label:46s} worst {worst:.4f}  99% {p99:.4f}  rms {golden_errors.rms(errors.top):.5f}  median {median:.5f}", flush=True)


GOLDENS = [f"{ROOT}/tests/data/golden/base/zen-mini.json"] + sorted(glob.glob(f"{ROOT}/tests/data/golden/bitdelta/*.json"))


def main():
    torch.set_grad_enabled(False)
    torch.set_num_threads(2)
    print(f"# {str(TYPE)[6:]}, torch {torch.__version__.split('+')[0]}")
    measure("nothing", set())
    measure("all, prefill", DECODE | {"w"})
    measure("all, decode: W + scale * S exact", DECODE)
    measure("all of the plain kernels: not outputs, p", DECODE - LINEAR_OUT - {"p"})
    for place in ["w", *sorted(DECODE)]:
        measure(f"only {place}", {place})
    measure("only inputs of linears", LINEAR_IN)
    measure("only outputs of linears", LINEAR_OUT)
    measure("only attention and its cache: q k v p", ATTENTION)
    measure("all, prefill, outputs of linears in float32", DECODE - LINEAR_OUT | {"w"})
    measure("all, prefill, res", DECODE | {"w", "res"})
    measure("all, prefill, logits", DECODE | {"w", "logits"})


if __name__ == "__main__":
    main()
