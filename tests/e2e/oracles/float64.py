"""lm_eval, its Llama model computing in float64 throughout: `python float64.py [arguments of lm_eval]`.

transformers computes a Llama's norms and softmax in float32 whatever the model's type is; here "float32" means float64 to it.
The rotary angles stay float32 numbers: they are so by definition, in transformers and elsewhere.
"""

import runpy

import torch
from transformers.models.llama import modeling_llama


class Wide:
    """torch, but for one name."""

    float32 = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


modeling_llama.torch = Wide()
norm = modeling_llama.LlamaRMSNorm(8, eps=0).double()
narrow = torch.linspace(1, 2, 8, dtype=torch.float64) / 3
error = (norm(narrow) - narrow / narrow.pow(2).mean().sqrt()).abs().max()
assert error < 1e-15, f"a norm in float64 is off by {error}"
runpy.run_module("lm_eval", run_name="__main__", alter_sys=True)
