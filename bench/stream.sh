#!/usr/bin/env bash
# Cold starts and hot variants while one loads (bench/stream.c), over a model made up for it: 32 layers and a small
# vocabulary, so that the embedding and one layer, which every start has to wait for, are as small a part of a delta as they
# are in models of real size. Needs a build with BD_BENCH=ON.
#
#   bench/stream.sh BITDELTA BENCH_STREAM [cold|hot]      prints what bench/results/stream.txt holds
set -euo pipefail
bitdelta=$(realpath "$1") bench=$(realpath "$2")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 - "$work" <<'PYTHON'
import json
import os
import sys

LAYERS, HIDDEN, FF, HEADS, KV, DIM, VOCAB = 32, 256, 768, 4, 2, 64, 512
shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
for i in range(LAYERS):
    p = f"model.layers.{i}."
    shapes |= {p + "self_attn.q_proj.weight": (HEADS * DIM, HIDDEN), p + "self_attn.k_proj.weight": (KV * DIM, HIDDEN),
               p + "self_attn.v_proj.weight": (KV * DIM, HIDDEN), p + "self_attn.o_proj.weight": (HIDDEN, HEADS * DIM),
               p + "mlp.gate_proj.weight": (FF, HIDDEN), p + "mlp.up_proj.weight": (FF, HIDDEN),
               p + "mlp.down_proj.weight": (HIDDEN, FF), p + "input_layernorm.weight": (HIDDEN,),
               p + "post_attention_layernorm.weight": (HIDDEN,)}


def words(count, mask):
    pattern = int.from_bytes(mask.to_bytes(2, "little") * count, "little")
    return int.from_bytes(os.urandom(2 * count), "little") & pattern


def write(name, tensors):
    os.makedirs(name)
    json.dump({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "head_dim": DIM,
               "intermediate_size": FF, "num_attention_heads": HEADS, "num_key_value_heads": KV,
               "num_hidden_layers": LAYERS, "vocab_size": VOCAB, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
               "rope_theta": 10000.0, "tie_word_embeddings": True, "hidden_act": "silu", "torch_dtype": "bfloat16"},
              open(name + "/config.json", "w"))
    header, at = {}, 0
    for key, data in tensors.items():
        header[key] = {"dtype": "BF16", "shape": shapes[key], "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    with open(name + "/model.safetensors", "wb") as out:
        out.write(len(text).to_bytes(8, "little") + text + b"".join(tensors.values()))


base, tuned = {}, {}
for key, shape in shapes.items():
    count = shape[0] * (shape[1] if len(shape) > 1 else 1)
    if len(shape) == 1:
        base[key] = tuned[key] = b"\x80\x3f" * count
        continue
    exponent = int.from_bytes(b"\x80\x3c" * count, "little")  # 2**-6: sign and mantissa are random
    w = words(count, 0x807F) | exponent
    base[key] = w.to_bytes(2 * count, "little")
    tuned[key] = (w ^ words(count, 7)).to_bytes(2 * count, "little")
write(sys.argv[1] + "/base", base)
write(sys.argv[1] + "/tuned", tuned)
PYTHON
"$bitdelta" compress --base "$work/base" --finetuned "$work/tuned" --out "$work/delta" >/dev/null 2>&1
"$bench" "$work/base" "$work/delta" ${3:-}
