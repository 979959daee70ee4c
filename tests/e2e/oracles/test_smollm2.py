"""A real model of another's making: SmolLM2-135M-Instruct, greedy, against Hugging Face transformers in float32.

Also the conversion that makes its directory (smollm2.py), against the GGUF loader of transformers.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
import smollm2

ROOT = Path(__file__).resolve().parents[3]
BINARY = os.environ.get("BITDELTA_BIN", str(ROOT / "build" / "bitdelta"))
NEW_TOKENS = 48
END_OF_TEXT = {2}  # <|im_end|>, eos_token_id of config.json
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
PROMPTS = [
    "The quick brown fox",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village by the sea,",
    "The chemical formula of water is",
    "SELECT name, COUNT(*) FROM users",
    "1, 2, 3, 5, 8, 13, 21, 34,",
    "   leading spaces and\ttabs\n\n\nthen lines",
    "Gravity is the force that",
    "#include <stdio.h>\n\nint main(void) {\n",
    "Le petit prince habitait une planète",
    "東京は日本の",
    "In 1969, on the 20th of July, at 20:17:40 UTC,",
    "Q: Why is the sky blue?\nA:",
    "😀 emoji 👩‍👩‍👧 and naïve café",
    "x",
    CHAT.format("What is the capital of France?"),
    CHAT.format("Write a haiku about autumn leaves."),
    CHAT.format("Explain in two sentences what a compiler does."),
    CHAT.format("List three prime numbers above 100."),
    "The history of the Roman Empire is long. " * 40 + "It began",  # more than one chunk of the prompt
]

pytestmark = pytest.mark.oracles


@pytest.fixture(scope="module")
def folder():
    pytest.importorskip("gguf")
    return smollm2.directory()


@pytest.fixture(scope="module")
def model(folder):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.fixture(scope="module")
def tokenizer(folder):
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)


def bitdelta(folder, prompt):
    command = [BINARY, "generate", "--base", folder, "--prompt", prompt, "--max-tokens", str(NEW_TOKENS), "--greedy", "--json", "--backend", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("prompt", PROMPTS, ids=range(len(PROMPTS)))
def test_greedy_output(prompt, folder, model, tokenizer):
    torch = pytest.importorskip("torch")
    got = bitdelta(folder, prompt)
    ids = tokenizer(prompt)["input_ids"]
    assert got["prompt_ids"] == ids
    # One pass over prompt and answer. If each token is the most likely one after those before it, and the answer ends only
    # at its full length or an end-of-text token, it is what greedy generation gives, by induction.
    with torch.no_grad():
        scores = torch.log_softmax(model(torch.tensor([ids + got["ids"]])).logits[0, len(ids) - 1 : -1].double(), -1)
    assert scores.argmax(-1).tolist() == got["ids"]
    ends = [token in END_OF_TEXT for token in got["ids"]]
    assert not any(ends[:-1]) and (ends[-1] or len(ends) == NEW_TOKENS)
    # `text` leaves out special tokens, as a client would see it.
    assert got["text"] == tokenizer.decode(got["ids"], skip_special_tokens=True, clean_up_tokenization_spaces=False)
    want = scores.max(-1).values.tolist()
    assert max(abs(a - b) for a, b in zip(got["logprobs"], want)) <= 1e-4


def test_conversion_of_weights(model):
    """The directory's tensors are those transformers reads from the GGUF file itself, rounded to bf16."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    source = smollm2.gguf_file()
    direct = transformers.AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    ours = model.state_dict()
    theirs = direct.state_dict()
    assert sorted(ours) == sorted(theirs)
    for name, tensor in theirs.items():
        assert torch.equal(tensor.to(torch.bfloat16).float(), ours[name]), name
    for key in ("rms_norm_eps", "num_key_value_heads", "max_position_embeddings", "eos_token_id", "rope_parameters"):
        assert getattr(direct.config, key) == pytest.approx(getattr(model.config, key)), key


def test_conversion_of_tokenizer(tokenizer):
    """transformers' GGUF loader knows nothing of the separate digits, so it is asked about text without any."""
    transformers = pytest.importorskip("transformers")
    source = smollm2.gguf_file()
    theirs = transformers.AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    for prompt in PROMPTS + [(ROOT / "README.md").read_text(encoding="utf-8")]:
        text = "".join(c for c in prompt if not c.isnumeric())
        assert tokenizer(text)["input_ids"] == theirs(text)["input_ids"]
    assert tokenizer("2024")["input_ids"] == [tokenizer.convert_tokens_to_ids(digit) for digit in "2024"]
