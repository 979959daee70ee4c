"""`bitdelta generate` as its users run it: exit status, JSON on stdout, faults on stderr, logits in .npy; against the recorded
outputs of Hugging Face transformers (tests/data/arch, tests/data/golden) and, with the marker `oracles`, against PEFT itself."""
import json
import math
import os
import pathlib
import shutil
import struct
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARY = os.environ.get("BITDELTA_BIN", str(ROOT / "build" / "bitdelta"))
BASE = ROOT / "demo" / "zen-mini"
ARCHS = ["llama3-rope", "llama-gqa", "mistral-window", "qwen2", "qwen3", "phi3", "gemma2"]
VARIANTS = sorted(p.name for p in (ROOT / "demo" / "deltas").iterdir())


def run(*args, status=0):
    done = subprocess.run([BINARY, "generate", *map(str, args)], capture_output=True, timeout=300)
    assert done.returncode == status, done.stderr.decode()
    return done


def generate(*args):
    return json.loads(run(*args, "--json").stdout)


def refused(*args, status=1):
    done = run(*args, status=status)
    assert done.stdout == b""
    return done.stderr.decode()


def ids_text(ids):
    return ",".join(map(str, ids))


def test_no_place_for_the_logits(tmp_path):
    """Told before the model is loaded; a device is not replaced by a file."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path, words in ((tmp_path, "is not a regular file"), (pipe, "is not a regular file"), (tmp_path / "no/x", "No such file"), (tmp_path / ("x" * 255), "too long")):
        said = refused("--base", BASE, "--prompt-ids", "1", "--max-tokens", 0, "--dump-logits", path)
        assert words in said and "mod=model" not in said, said
    assert [p.name for p in tmp_path.iterdir()] == ["pipe"] and pipe.is_fifo()


def read_npy(path):
    """-> rows, cols, values; format version 1.0, little-endian float32 in C order."""
    blob = path.read_bytes()
    assert blob[:8] == b"\x93NUMPY\x01\x00"
    (length,) = struct.unpack("<H", blob[8:10])
    assert (10 + length) % 64 == 0
    header = eval(blob[10:10 + length], {"__builtins__": {}})  # a literal dict by definition of the format
    assert header["descr"] == "<f4" and header["fortran_order"] is False
    rows, cols = header["shape"]
    data = blob[10 + length:]
    assert len(data) == 4 * rows * cols
    return rows, cols, struct.unpack(f"<{rows * cols}f", data)


def relative_l2(got, want):
    return math.sqrt(sum((g - w) ** 2 for g, w in zip(got, want)) / sum(w * w for w in want))


def check_greedy(out, prompt, bound):
    assert set(out) == {"prompt_ids", "ids", "text", "logprobs"}
    assert out["prompt_ids"] == prompt["ids"]
    assert out["ids"] == prompt["greedy"]["ids"]
    assert max(abs(a - b) for a, b in zip(out["logprobs"], prompt["greedy"]["logprobs"])) <= bound
    assert len(out["logprobs"]) == len(out["ids"])


@pytest.mark.parametrize("chunk", [256, 7])
@pytest.mark.parametrize("arch", ARCHS)
def test_architectures(arch, chunk, tmp_path):
    folder = ROOT / "tests" / "data" / "arch" / arch
    for prompt in json.loads((folder / "golden.json").read_text())["prompts"]:
        dump = tmp_path / "logits.npy"
        out = generate("--base", folder, "--prompt-ids", ids_text(prompt["ids"]), "--max-tokens", 16, "--greedy",
                       "--ignore-eos", "--dump-logits", dump, "--chunk-tokens", chunk)
        check_greedy(out, prompt, 1e-4)
        assert out["text"] is None
        rows, cols, values = read_npy(dump)
        assert (rows, cols) == (len(prompt["ids"]) + 15, len(prompt["logits"]))
        last = len(prompt["ids"]) - 1
        assert relative_l2(values[last * cols:(last + 1) * cols], prompt["logits"]) <= 1e-5


@pytest.mark.parametrize("variant", ["zen-mini", *VARIANTS])
def test_demo_family(variant):
    kind = "base" if variant == "zen-mini" else "bitdelta"
    golden = json.loads((ROOT / "tests" / "data" / "golden" / kind / f"{variant}.json").read_text())
    delta = [] if kind == "base" else ["--delta", ROOT / "demo" / "deltas" / variant]
    for prompt in golden["prompts"][:4]:
        bound = max(1e-4, 4 * prompt["float64_max_abs_diff"])
        out = generate("--base", BASE, *delta, "--prompt-ids", ids_text(prompt["ids"]), "--max-tokens", 32, "--greedy",
                       "--ignore-eos")
        check_greedy(out, prompt, bound)
        want = prompt["greedy"]["text"]  # with special tokens, which are left out of ours
        assert out["text"] == want.replace("<|end_of_text|>", "").replace("<|begin_of_text|>", "")


def test_prompt_text_is_tokenized():
    golden = json.loads((ROOT / "tests" / "data" / "golden" / "base" / "zen-mini.json").read_text())
    prompt = golden["prompts"][0]
    args = ["--base", BASE, "--prompt", prompt["text"], "--max-tokens", 32, "--greedy", "--ignore-eos"]
    out = generate(*args)
    check_greedy(out, prompt, 1e-4)
    assert run(*args).stdout.decode() == prompt["greedy"]["text"] + "\n"


def test_finetuned():
    weights = ROOT / "demo" / "finetuned" / "zen-mini-coder"
    if not (weights / "model.safetensors").exists():
        pytest.skip("the fine-tune's weights are not unpacked")
    golden = json.loads((ROOT / "tests" / "data" / "golden" / "finetuned" / "zen-mini-coder.json").read_text())
    for prompt in golden["prompts"][:3]:
        out = generate("--base", BASE, "--finetuned", weights, "--prompt-ids", ids_text(prompt["ids"]), "--max-tokens", 32,
                       "--greedy", "--ignore-eos")
        check_greedy(out, prompt, 1e-4)


def test_no_tokens(tmp_path):
    dump = tmp_path / "logits.npy"
    out = generate("--base", BASE, "--prompt-ids", "4080,665,1352", "--max-tokens", 0, "--dump-logits", dump)
    assert out["ids"] == [] and out["logprobs"] == [] and out["text"] == ""
    assert read_npy(dump)[:2] == (3, 4096)
    assert not list(tmp_path.glob("*.part"))


def test_rows_follow_the_ids(tmp_path):
    """Row i is what follows id i: its softmax gives each generated id's log-probability."""
    dump = tmp_path / "logits.npy"
    out = generate("--base", BASE, "--prompt-ids", "4080,665,1352", "--max-tokens", 5, "--seed", 7, "--dump-logits", dump)
    rows, cols, values = read_npy(dump)
    assert rows == 3 + len(out["ids"]) - 1
    for i, (chosen, logprob) in enumerate(zip(out["ids"], out["logprobs"])):
        row = values[(2 + i) * cols:(3 + i) * cols]
        top = max(row)
        want = row[chosen] - top - math.log(sum(math.exp(v - top) for v in row))
        assert abs(want - logprob) <= 1e-4


def test_seeds():
    args = ["--base", BASE, "--prompt", "The function", "--max-tokens", 24, "--ignore-eos"]
    first = generate(*args, "--seed", 11)
    assert generate(*args, "--seed", 11, "--chunk-tokens", 1, "--threads", 1)["ids"] == first["ids"]
    assert any(generate(*args, "--seed", seed)["ids"] != first["ids"] for seed in (12, 13))


def test_stops_at_the_end_token(tmp_path):
    """A model told that its first greedy token ends a text stops there; the id is the last of the ids."""
    folder = tmp_path / "model"
    shutil.copytree(ROOT / "tests" / "data" / "arch" / "llama-gqa", folder)
    prompt = json.loads((folder / "golden.json").read_text())["prompts"][1]
    config = json.loads((folder / "config.json").read_text())
    config["eos_token_id"] = prompt["greedy"]["ids"][3]
    (folder / "config.json").write_text(json.dumps(config))
    args = ["--base", folder, "--prompt-ids", ids_text(prompt["ids"]), "--max-tokens", 16, "--greedy"]
    assert generate(*args)["ids"] == prompt["greedy"]["ids"][:4]
    assert generate(*args, "--ignore-eos")["ids"] == prompt["greedy"]["ids"]


def test_wrong_usage():
    refused("--prompt", "x", status=2)
    refused("--base", BASE, status=2)
    refused("--base", BASE, "--prompt", "x", "--prompt-ids", "1", status=2)
    refused("--base", BASE, "--prompt-ids", "1,,2", status=2)
    refused("--base", BASE, "--prompt-ids", "1,2x", status=2)
    refused("--base", BASE, "--prompt-ids", "1", "--delta", "a", "--lora", "b", status=2)


def test_faults_are_named(tmp_path):
    assert "4096" in refused("--base", BASE, "--prompt-ids", "4096")
    assert "no-such-dir" in refused("--base", tmp_path / "no-such-dir", "--prompt-ids", "1")
    arch = ROOT / "tests" / "data" / "arch" / "llama-gqa"
    assert "tokenizer.json" in refused("--base", arch, "--prompt", "x")
    assert "256 positions" in refused("--base", arch, "--prompt-ids", "1,2,3", "--max-tokens", 254)
    assert "made for base zen-mini" in refused("--base", arch, "--delta", ROOT / "demo" / "deltas" / "zen-mini-c",
                                               "--prompt-ids", "1")
    assert "hidden_size" in refused("--base", BASE, "--finetuned", arch, "--prompt-ids", "1")


def test_damaged_delta_is_named(tmp_path):
    delta = tmp_path / "delta"
    shutil.copytree(ROOT / "demo" / "deltas" / "zen-mini-c", delta)
    shard = delta / "shard-00-of-01.safetensors"
    blob = bytearray(shard.read_bytes())
    blob[len(blob) // 2] ^= 4
    shard.write_bytes(blob)
    assert shard.name in refused("--base", BASE, "--delta", delta, "--prompt-ids", "1")
    shard.write_bytes(blob[:-1])
    assert shard.name in refused("--base", BASE, "--delta", delta, "--prompt-ids", "1")


# ---- LoRA ----

def write_safetensors(path, tensors):
    header, data = {}, b""
    for name, (shape, values) in tensors.items():
        blob = struct.pack(f"<{len(values)}f", *values)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + len(blob)]}
        data += blob
    head = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(head)) + head + data)


def write_adapter(folder, rank=2, fill_b=0.0, module="self_attn.o_proj", tensors=None, **fields):
    """An adapter of llama-gqa (hidden 192) on one linear of one layer."""
    folder.mkdir()
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 4, "target_modules": ["o_proj"], "bias": "none", "lora_dropout": 0.1}
    (folder / "adapter_config.json").write_text(json.dumps({**config, **fields}))
    name = f"base_model.model.model.layers.1.{module}"
    a = [math.sin(i) * 0.3 for i in range(rank * 192)]
    b = [fill_b * math.cos(i) for i in range(192 * rank)]
    write_safetensors(folder / "adapter_model.safetensors",
                      tensors or {f"{name}.lora_A.weight": ([rank, 192], a), f"{name}.lora_B.weight": ([192, rank], b)})
    return folder


def test_lora_of_zeros_is_the_base_and_others_are_not(tmp_path):
    arch = ROOT / "tests" / "data" / "arch" / "llama-gqa"
    prompt = json.loads((arch / "golden.json").read_text())["prompts"][1]
    args = ["--base", arch, "--prompt-ids", ids_text(prompt["ids"]), "--max-tokens", 16, "--greedy", "--ignore-eos"]
    check_greedy(generate(*args, "--lora", write_adapter(tmp_path / "zero")), prompt, 1e-4)
    assert generate(*args, "--lora", write_adapter(tmp_path / "some", fill_b=1.0))["logprobs"] != prompt["greedy"]["logprobs"]


@pytest.mark.parametrize("field, value", [
    ("use_dora", True), ("bias", "all"), ("modules_to_save", ["lm_head"]), ("rank_pattern", {"q_proj": 4}), ("peft_type", "IA3"),
    ("init_lora_weights", "pissa"), ("fan_in_fan_out", True), ("r", 0), ("r", 1.5), ("lora_alpha", "x"), ("use_something_new", 1)])
def test_lora_fields_are_refused_by_name(field, value, tmp_path):
    folder = write_adapter(tmp_path / "adapter", **{"rank": 2, field: value} if field != "r" else {})
    if field == "r":
        config = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps({**config, "r": value}))
    assert field in refused("--base", ROOT / "tests" / "data" / "arch" / "llama-gqa", "--lora", folder, "--prompt-ids", "1")


@pytest.mark.parametrize("name, shape", [
    ("base_model.model.model.layers.1.self_attn.o_proj.lora_A.weight", [2, 192]),  # B is missing
    ("base_model.model.model.layers.1.self_attn.o_proj.lora_A.weight", [2, 96]),
    ("base_model.model.model.layers.2.self_attn.o_proj.lora_A.weight", [2, 192]),  # there are two layers
    ("base_model.model.model.layers.1.self_attn.o_proj.lora_magnitude_vector", [192]),
    ("base_model.model.model.embed_tokens.lora_embedding_A", [2, 512]),
    ("base_model.model.lm_head.weight", [512, 192])])
def test_lora_tensors_are_refused_by_name(name, shape, tmp_path):
    folder = write_adapter(tmp_path / "adapter", tensors={name: (shape, [0.0] * math.prod(shape))})
    assert name in refused("--base", ROOT / "tests" / "data" / "arch" / "llama-gqa", "--lora", folder, "--prompt-ids", "1")


@pytest.mark.oracles
@pytest.mark.parametrize("arch, modules, rslora, ranks", [
    ("llama-gqa", ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"], False, [1]),
    ("tp-llama", ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"], False, [2, 4, 8]),
    ("qwen2", ["q_proj", "v_proj"], True, [1, 2]),
    ("phi3", ["qkv_proj", "gate_up_proj", "o_proj"], False, [1, 2]),
    ("gemma2", ["k_proj", "down_proj"], False, [1, 2])])
def test_lora_matches_peft(arch, modules, rslora, ranks, tmp_path):
    torch = pytest.importorskip("torch")
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    folder = ROOT / "tests" / "data" / "arch" / arch
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    config = peft.LoraConfig(r=6, lora_alpha=10, target_modules=modules, use_rslora=rslora, init_lora_weights=False)
    model = peft.get_peft_model(model, config).eval()
    model.save_pretrained(tmp_path / "adapter")
    golden = json.loads((folder / "golden.json").read_text())
    prompt = golden["prompts" if "prompts" in golden else "base"][1]["ids"]
    with torch.no_grad():
        want = model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0]
    for count in ranks:
        dump = tmp_path / f"{count}.npy"
        generate("--base", folder, "--lora", tmp_path / "adapter", "--prompt-ids", ids_text(prompt), "--max-tokens", 0,
                 "--dump-logits", dump, "--tensor-parallel", count)
        rows, cols, values = read_npy(dump)
        assert (rows, cols) == tuple(want.shape)
        assert relative_l2(values, want.flatten().tolist()) <= 1e-5
