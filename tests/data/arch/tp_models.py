#!/usr/bin/env python3
"""Writes the models of tp-llama and tp-qwen2: weights that are hashes, so that they need no storing. Standard library only.

    tp_models.py [FOLDER]        FOLDER (this file's own) has tp-llama/config.json and tp-qwen2/config.json

<name>/model.safetensors, BF16, is the base; <name>/tuned/model.safetensors, F32, its fine-tune. With u the bytes of
SHAKE-256("<salt> <name>") and v those of SHAKE-256("<salt> <name> tuned"), element i is
    base    (2 u[i] - 255) / 256 * 2^-3, of the embedding * 1, of biases * 2^-2; of norms 1 + (u[i] // 8 - 16) / 64
    tuned   base + (2 v[i] - 255) / 256 * 2^-8 * (1 + row % 5), rows counted from 0; of the embedding 8 times as much
all exact in their type, so that any machine gives the same bytes."""
import array, hashlib, json, os, struct, sys

SALTS = {"tp-llama": 5, "tp-qwen2": 1}


def shapes_of(config):
    hidden, ffn, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    q, kv = dim * config["num_attention_heads"], dim * config["num_key_value_heads"]
    shapes = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    for i in range(config["num_hidden_layers"]):
        p = f"model.layers.{i}."
        for n, rows in (("q", q), ("k", kv), ("v", kv)):
            shapes[f"{p}self_attn.{n}_proj.weight"] = (rows, hidden)
            if config["model_type"] == "qwen2":
                shapes[f"{p}self_attn.{n}_proj.bias"] = (rows,)
        shapes |= {p + "self_attn.o_proj.weight": (hidden, q), p + "mlp.gate_proj.weight": (ffn, hidden),
                   p + "mlp.up_proj.weight": (ffn, hidden), p + "mlp.down_proj.weight": (hidden, ffn),
                   p + "input_layernorm.weight": (hidden,), p + "post_attention_layernorm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def hashed(text, count):
    return hashlib.shake_256(text.encode()).digest(count)


def values(salt, name, shape):
    """base, tuned: float32 arrays"""
    count, cols = shape[0] * (shape[1] if len(shape) > 1 else 1), shape[-1]
    scale = 1 if "embed" in name else 0.25 if name.endswith("bias") else 0.125
    table = [1 + (u // 8 - 16) / 64 if "norm" in name else (2 * u - 255) / 256 * scale for u in range(256)]
    base = array.array("f", (table[u] for u in hashed(f"{salt} {name}", count)))
    step = 2 ** -5 if "embed" in name else 2 ** -8
    moves = [[(2 * v - 255) / 256 * step * (1 + row) for v in range(256)] for row in range(5)]
    moved = hashed(f"{salt} {name} tuned", count)
    tuned = array.array("f")
    for at in range(0, count, cols):
        move = moves[at // cols % 5] if len(shape) > 1 else moves[0]
        tuned.extend(b + move[v] for b, v in zip(base[at:at + cols], moved[at:at + cols]))
    return base, tuned


def little(a):
    if sys.byteorder == "big":
        a.byteswap()
    return a.tobytes()


def as_bf16(a):
    """The upper halves: the lower ones are zeros."""
    data = little(a)
    out = bytearray(len(data) // 2)
    out[0::2], out[1::2] = data[2::4], data[3::4]
    return bytes(out)


def write(path, dtype, tensors):
    header, at = {}, 0
    for name, (shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path + ".part", "wb") as f:                      # an interrupted run leaves no half file that looks done
        f.write(struct.pack("<Q", len(text)) + text)
        f.writelines(data for _, data in tensors.values())
    os.replace(path + ".part", path)


def make(folder, salt):
    base, tuned = {}, {}
    for name, shape in shapes_of(json.load(open(f"{folder}/config.json"))).items():
        b, t = values(salt, name, shape)
        base[name], tuned[name] = (shape, as_bf16(b)), (shape, little(t))
    write(f"{folder}/tuned/model.safetensors", "F32", tuned)
    write(f"{folder}/model.safetensors", "BF16", base)


if __name__ == "__main__":
    for name, salt in SALTS.items():
        make(os.path.join(sys.argv[1] if len(sys.argv) > 1 else os.path.dirname(os.path.abspath(__file__)), name), salt)
