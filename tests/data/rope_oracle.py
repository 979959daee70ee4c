#!/usr/bin/env python3
"""Rope tables as Hugging Face transformers computes them, for tests/unit/test_model_rope.c.

    rope_oracle.py > tests/data/rope.json        needs transformers and torch

Each case has the rope parameters of a config.json, the head dimension, and what transformers' own functions return: inv_freq as
float32 bit patterns and the factor on cos and sin. The parameters of the scaled cases are those of published models."""
import json, sys
import torch
import transformers
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

CASES = [
    ("plain-128", 128, 8192, {"rope_type": "default", "rope_theta": 10000.0}),
    ("plain-64-500k", 64, 8192, {"rope_type": "default", "rope_theta": 500000.0}),
    ("plain-24-1m", 24, 8192, {"rope_type": "default", "rope_theta": 1000000.0}),
    ("linear-4", 128, 16384, {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}),
    ("llama3-1", 128, 131072, {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
                               "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}),
    ("llama3-2", 64, 131072, {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0,
                              "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}),
    ("yarn-qwen", 128, 131072, {"rope_type": "yarn", "rope_theta": 1000000.0, "factor": 4.0,
                                "original_max_position_embeddings": 32768}),
    ("yarn-mscale", 64, 163840, {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "beta_fast": 32, "beta_slow": 1,
                                 "mscale": 1.0, "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096}),
    ("yarn-whole", 64, 131072, {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0,
                                "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 4096}),
    ("yarn-given", 96, 65536, {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "attention_factor": 1.25,
                               "original_max_position_embeddings": 32768}),
]


def main():
    out = {"transformers": transformers.__version__, "torch": torch.__version__, "cases": []}
    for name, dim, positions, rope in CASES:
        config = LlamaConfig(hidden_size=dim * 2, num_attention_heads=2, head_dim=dim, max_position_embeddings=positions,
                             rope_parameters=dict(rope))
        module = LlamaRotaryEmbedding(config)
        assert (rope["rope_type"] == "default") or rope["rope_type"] in ROPE_INIT_FUNCTIONS
        bits = module.inv_freq.to(torch.float32).view(torch.int32).tolist()
        out["cases"].append({"name": name, "head_dim": dim, "max_positions": positions, "rope": rope,
                             "scale": float(module.attention_scaling), "inv_freq_bits": bits})
    cases = ",\n".join("  " + json.dumps(c) for c in out.pop("cases"))
    sys.stdout.write(json.dumps(out)[:-1] + ', "cases": [\n' + cases + "\n]}\n")


main()
