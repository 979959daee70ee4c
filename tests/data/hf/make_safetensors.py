#!/usr/bin/env python3
"""Writes python.safetensors with the safetensors package: element i of the float tensors is (i - 7) / 4, a value that every
type holds exactly. Needs safetensors, numpy and ml_dtypes.

    make_safetensors.py            write it
    make_safetensors.py FILE       read FILE with the package and print what is in it as JSON
"""
import json, os, sys
import ml_dtypes, numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file


def main(path=None):
    if path:
        with safe_open(path, "numpy") as f:
            print(json.dumps({k: [str(f.get_tensor(k).dtype), list(f.get_tensor(k).shape)] for k in f.keys()}))
        return
    values = ((np.arange(15) - 7) / 4).reshape(3, 5)
    tensors = {"f32": values.astype(np.float32), "f16": values.astype(np.float16), "bf16": values.astype(ml_dtypes.bfloat16),
               "scalar": np.array(5, dtype=np.int64), "empty": np.zeros((0, 4), np.float32),
               "näme \"x\"": np.arange(3, dtype=np.uint8), "flags": np.array([True, False, True])}
    out = os.path.join(os.path.dirname(os.path.abspath(__file__)), "python.safetensors")
    save_file(tensors, out, metadata={"made by": "make_safetensors.py"})


if __name__ == "__main__":
    main(*sys.argv[1:])
