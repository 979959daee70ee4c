"""A model split over ranks answers as one that is not: logits, greedy and sampled tokens, log-probabilities, variants that come and go
while others run, deltas of any number of shards. What cannot be split is refused with the arithmetic, and a shard that one rank alone
reads fails its variant and nobody else."""
import json
import re
import secrets
import shutil
import struct
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest
import requests
from conftest import BINARY, ROOT, VARIANTS, error_of
from test_generate import write_safetensors
from test_tensor_parallel import model  # noqa: F401  (a fixture)
from variants_support import golden_body, goldens

L2 = 1e-5
DEMO = ["--base", "demo/zen-mini"]


def run(*arguments, status=0):
    done = subprocess.run([BINARY, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == status, done.stderr
    return done


def generate(path, ranks, *more):
    """The JSON of a generation with its logits."""
    done = run("generate", *more, "--backend", "cpu", "--json", "--dump-logits", path, "--tensor-parallel", ranks)
    return json.loads(done.stdout), np.load(path).astype(np.float64)


def same(path, ranks, *more):
    (one, want), (many, got) = generate(path / "one.npy", 1, *more), generate(path / "many.npy", ranks, *more)
    assert many["ids"] == one["ids"]
    assert np.abs(np.array(many["logprobs"]) - np.array(one["logprobs"])).max() < 1e-4
    assert want.shape == got.shape
    assert np.linalg.norm(got - want) <= L2 * np.linalg.norm(want)
    return many["ids"]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("more", [[], ["--delta", "demo/deltas/zen-mini-french"], ["--finetuned", "demo/finetuned/zen-mini-coder"]],
                         ids=["base", "delta", "finetuned"])
def test_demo(ranks, more, tmp_path):
    same(tmp_path, ranks, *DEMO, *more, "--prompt", "The mouse ", "--max-tokens", 20, "--greedy", "--ignore-eos", "--chunk-tokens", 3)
    for seed in range(3):
        same(tmp_path, ranks, *DEMO, *more, "--prompt-ids", "17,5,300", "--max-tokens", 12, "--temperature", 0.9, "--top-p", 0.8,
             "--seed", seed, "--ignore-eos")


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_deltas_of_any_shards(model, ranks, tmp_path):  # noqa: F811
    _, golden, base, deltas = model
    for shards in (None, 1, 2, 4, 8):
        for prompt in golden["variant" if shards else "base"]:
            more = ["--delta", deltas[shards]] if shards else []
            ids = same(tmp_path, ranks, "--base", base, *more, "--prompt-ids", ",".join(map(str, prompt["ids"])),
                       "--max-tokens", len(prompt["greedy"]), "--greedy", "--ignore-eos")
            assert ids == [step["ids"][0] for step in prompt["greedy"]]


def read_bf16(path):
    """Every tensor of a safetensors file of bf16, as float64."""
    blob = path.read_bytes()
    at = 8 + struct.unpack("<Q", blob[:8])[0]
    tensors = {}
    for name, entry in json.loads(blob[8:at]).items():
        if name != "__metadata__":
            first, end = entry["data_offsets"]
            words = np.frombuffer(blob[at + first:at + end], "<u2").astype("<u4") << 16
            tensors[name] = words.view("<f4").astype(np.float64).reshape(entry["shape"])
    return tensors


MODULES = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
FUSED = ["self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"]


@pytest.mark.parametrize("arch, ranks", [("tp-llama", 2), ("tp-llama", 4), ("tp-llama", 8), ("tp-qwen2", 2), ("tp-qwen2", 4),
                                         ("tp-qwen2", 8), ("phi3", 2)])
def test_adapter(arch, ranks, tmp_path):
    """Also against the base with the adapter's product added to its weights by numpy, run as a checkpoint of its own."""
    base, seed = ROOT / "tests" / "data" / "arch" / arch, secrets.randbits(32)
    print("seed", seed)
    random = np.random.default_rng(seed)
    rank, factors, weights = int(random.integers(1, 12)), {}, read_bf16(base / "model.safetensors")
    for layer in range(2):
        for module in FUSED if arch == "phi3" else MODULES:
            name = f"model.layers.{layer}.{module}"
            n, k = weights[f"{name}.weight"].shape
            # About half of what the base has, whatever the rank: more would leave attention at the mercy of rounding.
            size = np.float32(0.08 * rank ** 0.25)
            a, b = (random.normal(size=shape).astype(np.float32) * size for shape in ((rank, k), (n, rank)))
            factors |= {f"base_model.model.{name}.lora_A.weight": (a.shape, a.flatten()),
                        f"base_model.model.{name}.lora_B.weight": (b.shape, b.flatten())}
            weights[f"{name}.weight"] += 6 / rank * b.astype(np.float64) @ a.astype(np.float64)
    adapter, merged = tmp_path / "adapter", tmp_path / "merged"
    adapter.mkdir()
    merged.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": 6, "bias": "none"}))
    write_safetensors(adapter / "adapter_model.safetensors", factors)
    shutil.copy(base / "config.json", merged)
    write_safetensors(merged / "model.safetensors", {name: (w.shape, w.flatten()) for name, w in weights.items()})
    ids = random.integers(0, 200, size=random.integers(1, 40)).tolist()
    more = ["--base", base, "--prompt-ids", ",".join(map(str, ids)), "--max-tokens", 12, "--greedy", "--ignore-eos"]
    (one, first), (many, got), (whole, want) = (generate(tmp_path / f"{i}.npy", n, *more, *of) for i, (n, of) in enumerate(
        [(1, ["--lora", adapter]), (ranks, ["--lora", adapter]), (1, ["--finetuned", merged])]))
    assert np.linalg.norm(got[:len(ids)] - want[:len(ids)]) <= L2 * np.linalg.norm(want[:len(ids)])
    for other, logits in ((one, first), (whole, want)):
        same_until_tie(many["ids"], other["ids"], got[len(ids) - 1:], logits[len(ids) - 1:])


def same_until_tie(got_ids, want_ids, got, want):
    """Greedy tokens and their rows of logits, up to two as good as equal."""
    for i, row in enumerate(want):
        assert np.linalg.norm(got[i] - row) <= L2 * np.linalg.norm(row)
        best, second = np.sort(row)[:-3:-1]
        if best - second < 1e-4:
            return
        assert got_ids[i] == want_ids[i]


def test_what_cannot_be_split(tmp_path):
    heads = "4 attention heads do not divide by 8 ranks"
    for command in ("generate", "plan"):
        more = ["--prompt-ids", "1"] if command == "generate" else []
        assert heads in run(command, *DEMO, *more, "--backend", "cpu", "--tensor-parallel", 8, status=2).stderr
        assert "1, 2, 4 or 8 ranks, not 3" in run(command, *DEMO, *more, "--backend", "cpu", "--tensor-parallel", 3, status=2).stderr
    serve = ["serve", *DEMO, "--listen", "127.0.0.1:0", "--admin", "none", "--backend", "cpu"]
    assert heads in run(*serve, "--tensor-parallel", 8, status=2).stderr
    assert "1, 2, 4 or 8 ranks, not 3" in run(*serve, "--tensor-parallel", 3, status=2).stderr


def test_plan_is_of_each_rank():
    one, two = (json.loads(run("plan", *DEMO, "--deltas", "demo/deltas", "--backend", "cpu", "--tensor-parallel", n, "--json").stdout)
                for n in (1, 2))
    assert two["tensor_parallel"] == 2 and two["all_ranks_bytes"] == 2 * two["total_bytes"]
    assert one["all_ranks_bytes"] == one["total_bytes"]
    for part in ("weights_bytes", "kv_bytes", "page_bytes"):
        assert 0.45 < two[part] / one[part] < 0.6, part
    text = run("plan", *DEMO, "--tensor-parallel", 2, "--device-bytes", "8GiB").stdout  # whatever backend can
    # Both are rounded to a tenth, so that twice the one may be off by 0.1 and the other by 0.05.
    each, every = (float(re.search(rf"^{word} +([\d.]+)", text, re.M).group(1)) for word in ("total", "all ranks"))
    assert abs(every - 2 * each) < 0.1501 and "2 ranks, each with" in text


@pytest.fixture(scope="module")
def split():
    """Four ranks, three slots, all variants, whose files stay in memory."""
    from conftest import start_server
    server = start_server("--tensor-parallel", "4", "--slots", "3", "--host-bytes", "64MiB")
    yield server
    assert server.stop() == 0
    assert not [line for line in server.lines if "Sanitizer" in line or "level=error" in line]


def test_every_variant_through_three_slots(split):
    """All at once, most of them cold while others run: the goldens of the reference implementation."""
    faults = []

    def ask(name):
        for ids, greedy in goldens(name)[:2]:
            answer = requests.post(split.url + "/v1/completions", json=golden_body(name, ids, 12), timeout=300)
            if answer.status_code != 200 or answer.json()["choices"][0]["token_ids"] != greedy[:12]:
                faults.append((name, answer.text))

    for _ in range(2):
        threads = [threading.Thread(target=ask, args=(name,)) for name in ["zen-mini", *VARIANTS]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not faults, faults
    assert split.metric("bitdelta_delta_loads_total", result="ok") >= len(VARIANTS)
    assert split.metric("bitdelta_delta_host_hits_total") >= 1


FIELDS = [{"temperature": 0, "logprobs": 5}, {"temperature": 0.9, "top_p": 0.8, "seed": 3, "logprobs": 2},
          {"temperature": 1.1, "top_k": 20, "seed": 4, "logprobs": 0}, {"temperature": 0.8, "min_p": 0.05, "seed": 5, "n": 3},
          {"temperature": 0, "frequency_penalty": 0.7, "presence_penalty": 0.3, "logprobs": 3},
          {"temperature": 1, "repetition_penalty": 1.3, "seed": 6}, {"temperature": 0, "logit_bias": {"198": 5, "13": -100}},
          {"temperature": 0, "min_tokens": 10, "logprobs": 20}, {"temperature": 0, "echo": True, "logprobs": 3, "max_tokens": 4}]


@pytest.mark.parametrize("fields", FIELDS, ids=lambda fields: "-".join(fields))
def test_answers_as_one_rank_does(server, split, fields):
    for name in ("zen-mini", "zen-mini-sql"):
        body = {"model": name, "prompt": "The ", "max_tokens": 16, **fields}
        want, got = (s.post("/v1/completions", body).json()["choices"] for s in (server, split))
        for one, many in zip(want, got, strict=True):
            assert many["text"] == one["text"] and many["finish_reason"] == one["finish_reason"]
            if not one["logprobs"]:
                continue
            a, b = (choice["logprobs"]["token_logprobs"] for choice in (one, many))
            assert len(a) == len(b)
            assert all(x == y or abs(x - y) < 1e-4 for x, y in zip(a, b)), (a, b)


def test_each_rank_has_its_threads(split):
    names = {(task / "comm").read_text().strip() for task in Path(f"/proc/{split.process.pid}/task").iterdir()}
    assert {f"bd-{kind}-{r}" for kind in ("exec", "load") for r in range(4)} <= names
    assert split.find(r"mod=model ready .* ranks=4 weights_mb=")


def test_a_shard_that_one_rank_reads(launch, tmp_path):
    """Of four shards on four ranks the last is gone from one variant and damaged in another."""
    names = {"zen-mini-sql": "missing", "zen-mini-math": "damaged", "zen-mini-french": "whole"}
    for name in names:
        run("reshard", "--delta", f"demo/deltas/{name}", "--out", tmp_path / name, "--shards", 4, "--base", "demo/zen-mini")
    last = "shard-03-of-04.safetensors"
    (tmp_path / "zen-mini-sql" / last).unlink()
    with open(tmp_path / "zen-mini-math" / last, "r+b") as file:
        file.seek(-100, 2)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))
    server = launch("--tensor-parallel", "4", deltas=str(tmp_path))
    for _ in range(2):
        for name, state in names.items():
            ids, greedy = goldens(name)[0]
            answer = server.post("/v1/completions", golden_body(name, ids, 8))
            if state == "whole":
                assert answer.json()["choices"][0]["token_ids"] == greedy[:8]
            else:
                error_of(answer, 503, "variant_unavailable")
    assert server.get("/health").status_code == 200
    assert server.find(r"load of variant zen-mini-sql failed.*shard-03-of-04")
