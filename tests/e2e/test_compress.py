"""`bitdelta compress` and `bitdelta inspect` against tests/data/reference_encoder.py and numpy: fresh random model pairs byte for
byte, planes and scales the reference does not have, refusals, kill -9 at any moment, damage named by --verify.

Sizes and values are new in every run; BD_TEST_SEED repeats one."""
import json
import os
import pathlib
import random
import resource
import shutil
import struct
import subprocess
import sys
import time

import pytest

np = pytest.importorskip("numpy")
pytest.importorskip("xxhash")

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARY = os.environ.get("BITDELTA_BIN", str(ROOT / "build" / "bitdelta"))
DEMO = ROOT / "demo"
sys.path.insert(0, str(ROOT / "tests" / "data"))
import reference_encoder as ref  # noqa: E402

SEED = int(os.environ.get("BD_TEST_SEED", time.time_ns() % 1_000_000_000))
print("BD_TEST_SEED", SEED)
SHARD = "shard-00-of-01.safetensors"


def bitdelta(*args, status=0, **kwargs):
    done = subprocess.run([BINARY, *map(str, args)], capture_output=True, text=True, timeout=300, **kwargs)
    assert done.returncode == status, (args, done.stdout[-2000:], done.stderr[-2000:])
    return done


def compress(base, tuned, out, *more, status=0, **kwargs):
    return bitdelta("compress", "--base", base, "--finetuned", tuned, "--out", out, *more, status=status, **kwargs)


# ---- model pairs ---------------------------------------------------------------------------------------------------------

def encode_as(dtype, values):
    """float32 array -> bytes of a safetensors dtype, rounded to nearest even"""
    if dtype == "F32":
        return values.astype("<f4").tobytes()
    if dtype == "F16":
        return values.astype("<f2").tobytes()
    u = values.astype("<f4").view("<u4").astype(np.uint64)
    return ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype("<u2").tobytes()


def write_model(folder, tensors, files=1):
    """tensors: name -> (dtype, float32 array)"""
    folder.mkdir(parents=True, exist_ok=True)
    names = list(tensors)
    random.Random(len(names)).shuffle(names)
    index = {}
    for i in range(files):
        name = "model.safetensors" if files == 1 else f"model-{i + 1:05d}-of-{files:05d}.safetensors"
        part = [n for j, n in enumerate(names) if j % files == i]
        ref.write_safetensors(folder / name, [(n, tensors[n][0], tensors[n][1].shape, encode_as(*tensors[n])) for n in part])
        index.update({n: name for n in part})
    if files > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def llama_tensors(r, rng, layers=None, tied=None):
    hidden, ffn = 8 * r.randint(1, 40), 8 * r.randint(1, 60)
    q, kv = 8 * r.randint(1, 24), r.randint(1, 90)
    shapes = {"model.embed_tokens.weight": (r.randint(3, 300), hidden), "model.norm.weight": (hidden,)}
    biases, qk_norm = r.random() < 0.4, r.random() < 0.4
    for i in range(layers or r.randint(1, 12)):
        p = f"model.layers.{i}."
        shapes.update({p + "self_attn.q_proj.weight": (q, hidden), p + "self_attn.k_proj.weight": (kv, hidden),
                       p + "self_attn.v_proj.weight": (kv, hidden), p + "self_attn.o_proj.weight": (hidden, q),
                       p + "mlp.gate_proj.weight": (ffn, hidden), p + "mlp.up_proj.weight": (ffn, hidden),
                       p + "mlp.down_proj.weight": (hidden, ffn), p + "input_layernorm.weight": (hidden,),
                       p + "post_attention_layernorm.weight": (hidden,)})
        if biases:
            shapes.update({p + f"self_attn.{n}_proj.bias": (q if n == "q" else kv,) for n in "qkv"})
        if qk_norm:
            shapes.update({p + "self_attn.q_norm.weight": (8,), p + "self_attn.k_norm.weight": (8,)})
    if not (r.random() < 0.5 if tied is None else tied):
        shapes["lm_head.weight"] = shapes["model.embed_tokens.weight"]
    return {n: rng.standard_normal(s, dtype=np.float32) * np.float32(0.3) for n, s in shapes.items()}


def make_pair(folder, seed, dtypes=("BF16", "BF16"), mixed=False, **kwargs):
    r, rng = random.Random(seed), np.random.default_rng(seed)
    base = llama_tensors(r, rng, **kwargs)

    def dtype(which):
        return r.choice(["BF16", "F16", "F32"]) if mixed else dtypes[which]

    tuned = {}
    for n, w in base.items():
        change = rng.standard_normal(w.shape, dtype=np.float32) * np.float32(r.choice([0.001, 0.02, 0.05]))
        if w.ndim == 2:
            change[rng.random(w.shape[0]) < 0.2] = 0                   # rows left alone have scale 0
        tuned[n] = w if r.random() < 0.15 else w + change
    write_model(folder / "base", {n: (dtype(0), w) for n, w in base.items()}, r.choice([1, 2, 3]))
    write_model(folder / "tuned", {n: (dtype(1), w) for n, w in tuned.items()}, r.choice([1, 2, 3]))
    return folder / "base", folder / "tuned"


def read_delta(folder):
    return ref.read_safetensors(folder / SHARD), json.loads((folder / "delta.json").read_text())


def same_directories(a, b):
    assert sorted(p.name for p in a.iterdir()) == sorted(p.name for p in b.iterdir())
    for p in a.iterdir():
        assert p.read_bytes() == (b / p.name).read_bytes(), p.name


# ---- bytes -----------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("case", range(10))
def test_same_bytes_as_the_reference(tmp_path, case):
    base, tuned = make_pair(tmp_path, SEED + case, mixed=case >= 5)
    compress(base, tuned, tmp_path / "ours", "--base-name", "b", "--variant", "v ü", "--threads", 1 + case % 4)
    ref.encode(str(base), str(tuned), str(tmp_path / "theirs"), "b", "v ü")
    same_directories(tmp_path / "ours", tmp_path / "theirs")
    bitdelta("inspect", tmp_path / "ours", "--verify")


def test_the_demo_fine_tune(tmp_path):
    tuned = tmp_path / "tuned"
    shutil.copytree(DEMO / "finetuned" / "zen-mini-coder", tuned)
    compress(DEMO / "zen-mini", tuned, tmp_path / "zen-mini-coder")
    same_directories(tmp_path / "zen-mini-coder", DEMO / "deltas" / "zen-mini-coder")


def planes_by_numpy(base, tuned, bits, matrix):
    rest, out = tuned - base, []
    for _ in range(bits):
        sums = np.abs(rest).astype(np.float64)
        scale = np.full(rest.shape[0], sums.mean()) if matrix else sums.sum(axis=1) / rest.shape[1]
        scale = scale.astype(np.float32)
        out.append((np.packbits(rest >= 0, axis=1, bitorder="little").tobytes(), scale.tobytes()))
        rest = rest - np.where(rest >= 0, scale[:, None], -scale[:, None])
    return out


@pytest.mark.parametrize("bits,scale", [(1, "matrix"), (2, "row"), (3, "row"), (4, "row"), (2, "matrix")])
def test_planes_and_matrix_scale(tmp_path, bits, scale):
    base, tuned = make_pair(tmp_path, SEED + 100 + bits, layers=2)
    compress(base, tuned, tmp_path / "d", "--bits", bits, "--scale", scale)
    data, meta = read_delta(tmp_path / "d")
    assert (meta["bits"], meta["scale"]) == (bits, scale)
    b, t = ref.read_model(str(base)), ref.read_model(str(tuned))
    signed = [e["name"] for e in meta["tensors"] if e["kind"] == "sign"]
    assert len(signed) >= 15
    for n in signed:
        for p, (sign, values) in enumerate(planes_by_numpy(ref.as_float32(*b[n]), ref.as_float32(*t[n]), bits, scale == "matrix")):
            suffix = str(p) if p else ""
            assert data[f"{n}.scale{suffix}"][2] == values, (n, p)
            assert data[f"{n}.sign{suffix}"][2] == sign, (n, p)
    bitdelta("inspect", tmp_path / "d", "--verify")


@pytest.mark.parametrize("how", ["full", "base"])
def test_embeddings(tmp_path, how):
    base, tuned = make_pair(tmp_path, SEED + 200, tied=False, layers=1)
    compress(base, tuned, tmp_path / "d", "--embeddings", how)
    data, meta = read_delta(tmp_path / "d")
    t = ref.read_model(str(tuned))
    assert meta["embeddings"] == how
    for n in ("model.embed_tokens.weight", "lm_head.weight"):
        assert n + ".sign" not in data
        changed = t[n] != ref.read_model(str(base))[n]
        assert (n in data) == (how == "full" and changed)
        if n in data:
            assert data[n] == t[n]
    bitdelta("inspect", tmp_path / "d", "--verify")


def test_added_vocabulary(tmp_path):
    base, tuned = make_pair(tmp_path, SEED + 300, tied=True, layers=1)
    t = {n: (d, ref.as_float32(d, s, x)) for n, (d, s, x) in ref.read_model(str(tuned)).items()}
    n = "model.embed_tokens.weight"
    more = np.random.default_rng(SEED).standard_normal((3, t[n][1].shape[1]), dtype=np.float32)
    grown = dict(t)
    grown[n] = ("BF16", np.concatenate([t[n][1], more]))
    write_model(tmp_path / "grown", grown)
    compress(base, tuned, tmp_path / "d")
    compress(base, tmp_path / "grown", tmp_path / "g")
    (plain, _), (data, meta) = read_delta(tmp_path / "d"), read_delta(tmp_path / "g")
    assert data[n + ".extra"] == ("BF16", more.shape, encode_as("BF16", more))
    assert {k: v for k, v in data.items() if k != n + ".extra"} == plain
    assert meta["tensors"][0]["extra_rows"] == 3 and meta["tensors"][0]["shape"] == list(t[n][1].shape)
    bitdelta("inspect", tmp_path / "g", "--verify")
    grown[n] = ("BF16", np.zeros((t[n][1].shape[0] + 257, t[n][1].shape[1]), np.float32))
    write_model(tmp_path / "huge", grown)
    assert "256" in compress(base, tmp_path / "huge", tmp_path / "h", status=1).stderr


def test_fused_projections_are_cut(tmp_path):
    base = ROOT / "tests" / "data" / "arch" / "phi3"
    config, tensors, rng = json.loads((base / "config.json").read_text()), ref.read_model(str(base)), np.random.default_rng(SEED)
    tuned = {n: (d, ref.as_float32(d, s, x) + np.float32(0.01) * rng.standard_normal(s, dtype=np.float32)) for n, (d, s, x) in tensors.items()}
    write_model(tmp_path / "tuned", tuned)
    shutil.copy(base / "config.json", tmp_path / "tuned")
    compress(base, tmp_path / "tuned", tmp_path / "d")
    data, meta = read_delta(tmp_path / "d")
    assert not any("qkv_proj" in e["name"] or "gate_up" in e["name"] for e in meta["tensors"])
    t = ref.read_model(str(tmp_path / "tuned"))
    heads, kv, ffn = config["num_attention_heads"], config["num_key_value_heads"], config["intermediate_size"]
    dim = config["hidden_size"] // heads
    for i in range(config["num_hidden_layers"]):
        p = f"model.layers.{i}."
        for fused, parts in ((p + "self_attn.qkv_proj.weight", [("q", heads * dim), ("k", kv * dim), ("v", kv * dim)]),
                             (p + "mlp.gate_up_proj.weight", [("gate", ffn), ("up", ffn)])):
            sign, scale = ref.encode_weight(ref.as_float32(*tensors[fused]), ref.as_float32(*t[fused]))
            at = 0
            for name, rows in parts:
                n = f"{p}{'self_attn' if len(name) == 1 else 'mlp'}.{name}_proj.weight"
                assert data[n + ".sign"][2] == sign[at:at + rows].tobytes()
                assert data[n + ".scale"][2] == scale[at:at + rows].tobytes()
                at += rows


@pytest.mark.parametrize("name", ["llama-gqa", "llama3-rope", "mistral-window", "qwen2", "qwen3", "phi3", "gemma2"])
def test_every_family_to_the_last_token(tmp_path, name):
    """Where every weight moved by the same distance one bit is exact, so the delta must continue a prompt as the fine-tune does."""
    base, rng = ROOT / "tests" / "data" / "arch" / name, np.random.default_rng(SEED)

    def moved(dtype, w):
        step = np.float32(0.02) * rng.choice(np.float32([-1, 1]), w.shape)
        return ("F32", w + step) if w.ndim == 2 else (dtype, w + step)

    write_model(tmp_path / "tuned", {n: moved(d, ref.as_float32(d, s, x)) for n, (d, s, x) in ref.read_model(str(base)).items()})
    shutil.copy(base / "config.json", tmp_path / "tuned")
    compress(base, tmp_path / "tuned", tmp_path / "d")
    ids = ",".join(str(3 + int(i)) for i in rng.integers(0, 500, 24))
    told = [json.loads(bitdelta("generate", "--base", base, *way, "--prompt-ids", ids, "--max-tokens", 3, "--greedy", "--ignore-eos",
                                "--json").stdout) for way in (("--finetuned", tmp_path / "tuned"), ("--delta", tmp_path / "d"))]
    assert told[0]["ids"][0] == told[1]["ids"][0]
    assert abs(told[0]["logprobs"][0] - told[1]["logprobs"][0]) < 1e-4


def test_tied_fine_tune_of_an_untied_base(tmp_path):
    """A head that is not stored is the embedding; one that repeats it needs no storing."""
    base, tuned = make_pair(tmp_path, SEED + 400, tied=False, layers=1)
    t = ref.read_model(str(tuned))
    e = "model.embed_tokens.weight"
    tied = {n: (d, ref.as_float32(d, s, x)) for n, (d, s, x) in t.items() if n != "lm_head.weight"}
    write_model(tmp_path / "tied", tied)
    assert "lm_head.weight" in compress(base, tmp_path / "tied", tmp_path / "x", status=1).stderr     # no config says so
    write_model(tmp_path / "repeated", {**tied, "lm_head.weight": tied[e]})
    compress(tmp_path / "tied", tmp_path / "repeated", tmp_path / "nothing")
    _, meta = read_delta(tmp_path / "nothing")
    assert [m["name"] for m in meta["tensors"] if "lm_head" in m["name"]] == []


# ---- vocabularies and tyings that differ, shards -------------------------------------------------------------------------------

EMBED, HEAD = ref.EMBED, ref.HEAD


def sized_model(r, rng, shards=1, tied=None):
    """A small whole model that runs and can be cut: its config and tensors, float32 values that bf16 holds."""
    heads = shards * r.randint(1, 2)
    kv_heads = r.choice([k for k in range(1, heads + 1) if heads % k == 0 and (k % shards == 0 or shards % k == 0)])
    head_dim, ffn, hidden = 8 * r.randint(1, 3), 8 * shards * r.randint(1, 4), 8 * r.randint(2, 9)
    vocab, tied = r.randint(20, 300), r.random() < 0.5 if tied is None else tied
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden, "intermediate_size": ffn,
              "num_hidden_layers": r.randint(1, 3), "num_attention_heads": heads, "num_key_value_heads": kv_heads,
              "head_dim": head_dim, "vocab_size": vocab, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
              "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": tied, "bos_token_id": 1, "eos_token_id": 2}
    q, kv = heads * head_dim, kv_heads * head_dim
    shapes = {EMBED: (vocab, hidden), "model.norm.weight": (hidden,)} | ({} if tied else {HEAD: (vocab, hidden)})
    for i in range(config["num_hidden_layers"]):
        p = f"model.layers.{i}."
        shapes |= {p + "self_attn.q_proj.weight": (q, hidden), p + "self_attn.k_proj.weight": (kv, hidden),
                   p + "self_attn.v_proj.weight": (kv, hidden), p + "self_attn.o_proj.weight": (hidden, q),
                   p + "mlp.gate_proj.weight": (ffn, hidden), p + "mlp.up_proj.weight": (ffn, hidden),
                   p + "mlp.down_proj.weight": (hidden, ffn), p + "input_layernorm.weight": (hidden,),
                   p + "post_attention_layernorm.weight": (hidden,)}
    return config, {n: bf16(rng.standard_normal(s, dtype=np.float32) * np.float32(0.3 if len(s) > 1 else 1)) for n, s in shapes.items()}


def bf16(values):
    return ref.as_float32("BF16", values.shape, encode_as("BF16", values))


def write_sized(folder, config, tensors, dtype="BF16", whole=()):
    """whole: names written as BF16 whatever dtype says"""
    write_model(folder, {n: ("BF16" if n in whole or w.ndim == 1 else dtype, w) for n, w in tensors.items()})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def moved(rng, w):
    """Every weight by the same distance: one bit and one scale code it exactly."""
    return w + np.float32(0.03) * rng.choice(np.float32([-1, 1]), w.shape)


def logits_of(base, ids, out, *more):
    told = json.loads(bitdelta("generate", "--base", base, *more, "--prompt-ids", ",".join(map(str, ids)), "--max-tokens", 0,
                               "--dump-logits", out, "--json", "--backend", "cpu").stdout)
    assert told["prompt_ids"] == list(ids)
    return np.load(out)


def change_vocabulary(r, rng, tensors, config, change):
    """In place; returns the names of the changed tables."""
    names = [n for n in (EMBED, HEAD) if n in tensors]
    rows = tensors[EMBED].shape[0] + (r.randint(1, 9) if change == "added" else -r.randint(1, 9) if change == "removed" else 0)
    for n in names:
        more = bf16(rng.standard_normal((max(0, rows - tensors[n].shape[0]), tensors[n].shape[1]), dtype=np.float32))
        tensors[n] = np.concatenate([tensors[n][:rows], more])
    config["vocab_size"] = rows
    return names


@pytest.mark.parametrize("shards", [1, 2, 4, 8])
@pytest.mark.parametrize("embeddings", ["sign", "full"])
@pytest.mark.parametrize("change", ["same", "added", "removed"])
def test_shards_and_vocabularies_as_the_reference(tmp_path, shards, embeddings, change):
    r = random.Random(f"{SEED}{shards}{embeddings}{change}")
    rng = np.random.default_rng(r.getrandbits(32))
    config, tensors = sized_model(r, rng, shards)
    base = write_sized(tmp_path / "base", config, tensors)
    tuned_config, tuned = dict(config), {n: bf16(w + np.float32(0.02) * rng.standard_normal(w.shape, dtype=np.float32))
                                         if r.random() < 0.9 else w for n, w in tensors.items()}
    change_vocabulary(r, rng, tuned, tuned_config, change)
    if r.random() < 0.3:                                                                    # a head of its own, or none
        if HEAD in tuned:
            del tuned[HEAD]
        else:
            tuned[HEAD] = bf16(tuned[EMBED] * np.float32(0.9)) if change != "same" or r.random() < 0.5 else tensors[EMBED]
        tuned_config["tie_word_embeddings"] = HEAD not in tuned
    write_sized(tmp_path / "tuned", tuned_config, tuned)
    more = ["--base-name", "b", "--variant", "v", "--embeddings", embeddings]
    compress(base, tmp_path / "tuned", tmp_path / "ours", "--shards", shards, *more)
    ref.encode(str(base), str(tmp_path / "tuned"), str(tmp_path / "theirs"), "b", "v", shards, embeddings)
    if (tmp_path / "ours" / "config.json").exists():                                        # not the reference's concern
        shutil.copy(tmp_path / "tuned" / "config.json", tmp_path / "theirs")
    assert (tmp_path / "ours" / "config.json").exists() == (change != "same")
    same_directories(tmp_path / "ours", tmp_path / "theirs")
    told = json.loads(bitdelta("inspect", tmp_path / "ours", "--verify", "--json").stdout)
    assert told["ok"] and told["shards"] == shards == len(told["files"])
    # One rank reads S shards as it reads one.
    compress(base, tmp_path / "tuned", tmp_path / "one", *more)
    ids = [r.randrange(tuned_config["vocab_size"]) for _ in range(11)]
    got = logits_of(base, ids, tmp_path / "s.npy", "--delta", tmp_path / "ours")
    assert np.array_equal(got, logits_of(base, ids, tmp_path / "1.npy", "--delta", tmp_path / "one"))
    assert got.shape == (11, max(config["vocab_size"], tuned_config["vocab_size"]))


@pytest.mark.parametrize("case", range(2))
@pytest.mark.parametrize("embeddings", ["sign", "full"])
@pytest.mark.parametrize("change", ["same", "added", "removed"])
@pytest.mark.parametrize("tying", ["tied", "untied", "gains a head", "loses its head"])
def test_deltas_give_the_logits_of_the_fine_tune(tmp_path, case, embeddings, change, tying):
    r = random.Random(f"{SEED}{case}{embeddings}{change}{tying}")
    rng = np.random.default_rng(r.getrandbits(32))
    config, tensors = sized_model(r, rng, tied=tying in ("tied", "gains a head"))
    base = write_sized(tmp_path / "base", config, tensors)
    full = embeddings == "full"
    tuned = {n: w if w.ndim == 1 else bf16(w * np.float32(1.1)) if full and n in (EMBED, HEAD) else moved(rng, w)
             for n, w in tensors.items()}
    tuned_config = config | {"tie_word_embeddings": tying in ("tied", "loses its head")}
    if tying == "gains a head":                              # near the base's embedding, which is its reference
        tuned[HEAD] = moved(rng, tensors[EMBED]) if not full else bf16(tensors[EMBED] * np.float32(0.9)) if case else tensors[EMBED]
    if tying == "loses its head":                            # its embedding is coded twice, the second time against the base's head
        tensors[HEAD] = moved(rng, tensors[EMBED])
        if full:
            tensors[HEAD] = bf16(tensors[HEAD])
        else:
            tuned[EMBED] = (tensors[EMBED] + tensors[HEAD]) / 2
        write_sized(base, config, tensors, "F32")
        del tuned[HEAD]
    whole = change_vocabulary(r, rng, tuned, tuned_config, change)
    write_sized(tmp_path / "tuned", tuned_config, tuned, "F32", whole if full else ())
    compress(base, tmp_path / "tuned", tmp_path / "d", "--embeddings", embeddings)
    ids = [r.randrange(tuned_config["vocab_size"]) for _ in range(9)] + [tuned_config["vocab_size"] - 1]
    want = logits_of(base, ids, tmp_path / "w.npy", "--finetuned", tmp_path / "tuned")
    got = logits_of(base, ids, tmp_path / "g.npy", "--delta", tmp_path / "d")
    vocab = tuned_config["vocab_size"]
    assert want.shape[1] == vocab and got.shape == (10, max(vocab, config["vocab_size"]))
    assert np.all(np.isneginf(got[:, vocab:]))
    assert np.linalg.norm(got[:, :vocab] - want) < 1e-5 * np.linalg.norm(want)


def test_a_shrunken_vocabulary_needs_its_config(tmp_path):
    r, rng = random.Random(SEED), np.random.default_rng(SEED)
    config, tensors = sized_model(r, rng, tied=True)
    base = write_sized(tmp_path / "base", config, tensors)
    small = write_sized(tmp_path / "small", config, tensors | {EMBED: tensors[EMBED][:-1]})              # config.json says otherwise
    assert EMBED in compress(base, small, tmp_path / "d", status=1).stderr


def test_vocabularies_that_contradict_themselves(tmp_path):
    r, rng = random.Random(SEED), np.random.default_rng(SEED)
    config, tensors = sized_model(r, rng, tied=False)
    base = write_sized(tmp_path / "base", config, tensors)
    grown = {n: np.concatenate([w, w[:3]]) if n in (EMBED, HEAD) else w for n, w in tensors.items()}
    tuned = write_sized(tmp_path / "tuned", config | {"vocab_size": config["vocab_size"] + 3}, grown)
    compress(base, tuned, tmp_path / "d")

    def refusal():
        return bitdelta("generate", "--base", base, "--delta", tmp_path / "d", "--prompt-ids", "1", status=1).stderr

    for rows in (2, -1):
        (tmp_path / "d" / "config.json").write_text(json.dumps(config | {"vocab_size": config["vocab_size"] + rows}))
        told = refusal()
        assert "vocab_size" in told or "room for" in told
    (tmp_path / "d" / "config.json").unlink()
    assert "lm_head" in refusal() or "embed_tokens" in refusal()
    one = write_sized(tmp_path / "one", config | {"vocab_size": config["vocab_size"] + 3}, grown | {HEAD: tensors[HEAD]})
    done = subprocess.run([BINARY, "compress", "--base", base, "--finetuned", one, "--out", tmp_path / "e"], capture_output=True, text=True)
    if done.returncode == 0:                                     # a head short of rows is told at the latest when it is loaded
        told = bitdelta("generate", "--base", base, "--delta", tmp_path / "e", "--prompt-ids", "1", status=1).stderr
        assert "added rows" in told
    else:
        assert HEAD in done.stderr


@pytest.mark.parametrize("shards,field,value,told", [
    (3, None, None, "1, 2, 4 or 8"), (16, None, None, "1, 2, 4 or 8"),
    (4, "num_attention_heads", 6, "num_attention_heads of the base is 6, not a multiple of 4"),
    (8, "num_key_value_heads", 3, "num_key_value_heads of the base is 3"),
    (8, "intermediate_size", 40, "intermediate_size (the width of down_proj) of the base is 40, not a multiple of 64"),
    (8, "head_dim", 4, "num_attention_heads x head_dim (the width of o_proj) of the base is 96, not a multiple of 64")])
def test_shards_that_do_not_divide(tmp_path, shards, field, value, told):
    config, tensors = sized_model(random.Random(SEED), np.random.default_rng(SEED), 8)
    config.update({"num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 8, "intermediate_size": 64})
    config.update({field: value, "num_key_value_heads": 3 if field != "head_dim" else 8} if field else {})
    if field == "intermediate_size":
        config["num_key_value_heads"] = 8
        config["hidden_size"] = 40
    base = write_sized(tmp_path / "base", config, tensors)
    done = subprocess.run([BINARY, "compress", "--base", base, "--finetuned", base, "--out", tmp_path / "d", "--shards", str(shards)],
                          capture_output=True, text=True)
    assert done.returncode == 2 and told in done.stderr, done.stderr
    assert not (tmp_path / "d").exists()


def test_a_missing_or_damaged_shard_is_named(tmp_path):
    r, rng = random.Random(SEED), np.random.default_rng(SEED)
    config, tensors = sized_model(r, rng, 4)
    base = write_sized(tmp_path / "base", config, tensors)
    tuned = write_sized(tmp_path / "tuned", config, {n: moved(rng, w) for n, w in tensors.items()}, "F32")
    compress(base, tuned, tmp_path / "d", "--shards", 4)
    shard = tmp_path / "d" / "shard-02-of-04.safetensors"
    good = shard.read_bytes()
    run = ["generate", "--base", base, "--delta", tmp_path / "d", "--prompt-ids", "1", "--max-tokens", 1]
    bitdelta(*run)
    bad = bytearray(good)
    bad[-5] ^= 16
    shard.write_bytes(bad)
    assert shard.name in bitdelta(*run, status=1).stderr
    assert shard.name in bitdelta("inspect", tmp_path / "d", "--verify", status=1).stderr
    shard.unlink()
    assert shard.name in bitdelta(*run, status=1).stderr
    shutil.copy(tmp_path / "d" / "shard-01-of-04.safetensors", shard)           # another part, where sizes may be the same
    assert shard.name in bitdelta(*run, status=1).stderr
    shard.write_bytes(good)
    bitdelta(*run)


# ---- what travels along ------------------------------------------------------------------------------------------------------

def demo_copy(folder, **changes):
    shutil.copytree(DEMO / "zen-mini", folder)
    config = json.loads((folder / "config.json").read_text())
    config.update(changes)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_small_files_that_differ_are_copied(tmp_path):
    tuned = demo_copy(tmp_path / "tuned", rope_theta=20000.0, max_position_embeddings=4096)
    (tuned / "chat_template.jinja").write_text("{{ messages }}")
    (tuned / "chat_template.json").write_text('{"chat_template": "{{ messages }}"}')
    (tuned / "generation_config.json").write_text('{"eos_token_id": [4081, 4084]}')
    compress(DEMO / "zen-mini", tuned, tmp_path / "d")
    copied = ["chat_template.jinja", "chat_template.json", "generation_config.json", "config.json"]
    names = sorted(p.name for p in (tmp_path / "d").iterdir())
    assert names == sorted([SHARD, "delta.json", *copied])
    for n in copied:
        assert (tmp_path / "d" / n).read_bytes() == (tuned / n).read_bytes()
    same = demo_copy(tmp_path / "same", transformers_version="9.9")                     # nothing that matters
    compress(DEMO / "zen-mini", same, tmp_path / "e")
    assert sorted(p.name for p in (tmp_path / "e").iterdir()) == sorted([SHARD, "delta.json"])


@pytest.mark.parametrize("field,value", [("rms_norm_eps", 1e-6), ("hidden_act", "gelu_pytorch_tanh"), ("num_key_value_heads", 4),
                                         ("quantization_config", {"bits": 4}), ("rope_scaling", {"type": "dynamic", "factor": 2})])
def test_config_that_may_not_differ(tmp_path, field, value):
    tuned = demo_copy(tmp_path / "tuned", **{field: value})
    done = compress(DEMO / "zen-mini", tuned, tmp_path / "d", status=1)
    assert field in done.stderr or "dynamic" in done.stderr
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize("text,told", [("{}", "tokenizer.json"), ("", "tokenizer.json"), ('{"model": {"type": "Unigram"}}', "tokenizer.json")])
@pytest.mark.parametrize("more", [(), ("--dry-run",), ("--force",)])
def test_an_unusable_tokenizer_is_refused(tmp_path, text, told, more):
    tuned = demo_copy(tmp_path / "tuned")
    (tuned / "tokenizer.json").write_text(text)
    done = compress(DEMO / "zen-mini", tuned, tmp_path / "d", *more, status=1)
    assert str(tuned / told) in done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["tuned"]


def test_shards_that_are_no_power_of_two_are_wrong_usage(tmp_path):
    for shards in (3, 5, 6, 7, 9, 16):
        done = compress(DEMO / "zen-mini", DEMO / "zen-mini", tmp_path / "d", "--shards", shards, status=2)
        assert "--shards" in done.stderr and done.stderr.endswith("try: bitdelta help compress\n")


# ---- refusals ------------------------------------------------------------------------------------------------------------------

def edit(folder, out, change):
    tensors = {n: (d, ref.as_float32(d, s, x).copy()) for n, (d, s, x) in ref.read_model(str(folder)).items()}
    change(tensors)
    write_model(out, tensors)
    return out


def put(tensors, name, value):
    tensors[name][1].flat[tensors[name][1].size // 2] = value


Q, NORM = "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"
FAULTS = {
    "a NaN in a matrix": (lambda t: put(t, Q, np.nan), Q),
    "an infinity in a matrix": (lambda t: put(t, Q, -np.inf), Q),
    "a NaN in a norm": (lambda t: put(t, NORM, np.nan), NORM),
    "missing": (lambda t: t.pop(Q), Q),
    "surplus": (lambda t: t.update({"model.extra.weight": ("BF16", np.zeros((2, 2), np.float32))}), "model.extra.weight"),
    "rows missing": (lambda t: t.update({Q: ("BF16", t[Q][1][:-1])}), Q),
    "another rank": (lambda t: t.update({NORM: ("BF16", t[NORM][1][None])}), NORM),
    "vocabulary too small": (lambda t: t.update({"model.embed_tokens.weight": ("BF16", t["model.embed_tokens.weight"][1][:-1])}),
                             "model.embed_tokens.weight"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faulty_fine_tunes(tmp_path, fault):
    base, tuned = make_pair(tmp_path, SEED + 500, layers=1)
    change, name = FAULTS[fault]
    done = compress(base, edit(tuned, tmp_path / "bad", change), tmp_path / "d", status=1)
    assert name in done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad", "base", "tuned"]                # nothing is left


def test_faulty_base_is_told_from_faulty_fine_tune(tmp_path):
    base, tuned = make_pair(tmp_path, SEED + 510, layers=1)
    done = compress(edit(base, tmp_path / "bad", lambda t: put(t, Q, np.nan)), tuned, tmp_path / "d", status=1)
    assert Q in done.stderr and "base" in done.stderr


def test_wrong_base(tmp_path):
    base, _ = make_pair(tmp_path / "a", SEED + 600, layers=2)
    other, _ = make_pair(tmp_path / "b", SEED + 600, layers=2)
    rng = np.random.default_rng(SEED)
    edit(other, tmp_path / "other", lambda t: t.update({n: ("BF16", rng.standard_normal(w.shape, dtype=np.float32)) for n, (_, w) in t.items()}))
    done = compress(base, tmp_path / "other", tmp_path / "d", status=1)
    assert "base" in done.stderr and "--force" in done.stderr and not (tmp_path / "d").exists()
    compress(base, tmp_path / "other", tmp_path / "d", "--force")
    bitdelta("inspect", tmp_path / "d", "--verify")


def test_existing_output(tmp_path):
    base, tuned = make_pair(tmp_path, SEED + 700, layers=1)
    out = tmp_path / "d"
    out.mkdir()
    compress(base, tuned, out)                                                    # empty: taken
    before = (out / "delta.json").read_bytes()
    assert "--force" in compress(base, tuned, out, "--bits", 2, status=1).stderr
    assert (out / "delta.json").read_bytes() == before
    compress(base, tuned, str(out) + "/", "--bits", 2, "--force")
    assert (out / "delta.json").read_bytes() != before
    bitdelta("inspect", out, "--verify")
    weights = (base / "model.safetensors.index.json", base / "model.safetensors")
    assert "never replaced" in compress(base, tuned, base, "--force", status=1).stderr    # a model is not a delta
    assert any(w.exists() for w in weights)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["base", "d", "tuned"]


def test_places_that_cannot_be_written(tmp_path):
    base, tuned = make_pair(tmp_path, SEED + 710, layers=1)
    assert "absent" in compress(base, tuned, tmp_path / "absent" / "d", status=1).stderr
    (tmp_path / "file").write_text("x")
    compress(base, tuned, tmp_path / "file", "--force", status=1)
    compress(base, tuned, tmp_path / "file" / "d", status=1)
    assert (tmp_path / "file").read_text() == "x"


def test_disk_full(tmp_path):
    """A limit on file size stands for it: the write fails half-way, and nothing stays."""
    base, tuned = make_pair(tmp_path, SEED + 720, layers=3)

    def small_files():
        resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))

    done = compress(base, tuned, tmp_path / "d", status=1, preexec_fn=small_files)
    assert "cannot write" in done.stderr and "d.tmp-" in done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["base", "tuned"]


def test_wrong_arguments(tmp_path):
    base, tuned = make_pair(tmp_path, SEED + 730, layers=1)
    for more in (["--bits", 5], ["--scale", "column"], ["--embeddings", "some"], ["--shards", 3]):
        done = subprocess.run([BINARY, "compress", "--base", base, "--finetuned", tuned, "--out", tmp_path / "d", *map(str, more)],
                              capture_output=True, text=True)
        assert done.returncode in (1, 2) and more[0].strip("-") in done.stderr
    assert not (tmp_path / "d").exists()


def test_names(tmp_path):
    base, tuned = make_pair(tmp_path, SEED + 740, layers=1)
    for bad in ("a\nb", 'a"b', "it's", "a\\b", " a", "a ", "../a", "a/../b", "x" * 129):
        assert "variant name" in compress(base, tuned, tmp_path / "d", "--variant", bad, status=1).stderr
        assert "base name" in compress(base, tuned, tmp_path / "d", "--base-name", bad, status=1).stderr
    assert "--variant" in compress(base, tuned, tmp_path / "it's", status=1).stderr
    done = subprocess.run([BINARY, "compress", "--base", base, "--finetuned", tuned, "--out", os.fsencode(tmp_path) + b"/\xff"], capture_output=True)
    assert done.returncode == 1 and b"is not valid UTF-8; give one with --variant" in done.stderr
    for same in (["--variant", "base"], ["--base-name", "d"]):  # a server would refuse it
        assert "the base's name" in compress(base, tuned, tmp_path / "d", *same, status=1).stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["base", "tuned"]
    compress(base, tuned, tmp_path / "it's", "--variant", "org/a model..1")
    assert json.loads((tmp_path / "it's" / "delta.json").read_text())["variant"] == "org/a model..1"


# ---- runs ----------------------------------------------------------------------------------------------------------------------

def test_dry_run_and_json(tmp_path):
    base, tuned = make_pair(tmp_path, SEED + 800)
    dry = json.loads(compress(base, tuned, tmp_path / "d", "--dry-run", "--json").stdout)
    assert not (tmp_path / "d").exists() and dry["dry_run"] is True
    assert "sign" in compress(base, tuned, tmp_path / "d", "--dry-run").stdout
    done = compress(base, tuned, tmp_path / "d", "--json")
    real = json.loads(done.stdout)
    assert real["delta_bytes"] == dry["delta_bytes"] == (tmp_path / "d" / SHARD).stat().st_size
    assert real["base_fingerprint"] == ref.fingerprint(ref.read_model(str(base)))
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert lines[-1]["event"] == "progress" and lines[-1]["bytes_done"] == lines[-1]["bytes_total"] > 0
    told = json.loads(bitdelta("inspect", tmp_path / "d", "--json").stdout)
    assert (told["tensors_sign"], told["tensors_full"]) == (real["tensors_sign"], real["tensors_full"])


def big_pair(folder, megabytes):
    rows = megabytes * 1024 * 1024 // 2 // 4096
    rng = np.random.default_rng(SEED)
    w = rng.integers(0, 1 << 14, (rows, 4096), dtype=np.uint16) | 0x3C00
    name = "model.embed_tokens.weight"
    for which, change in (("base", 0), ("tuned", 3)):
        (folder / which).mkdir()
        ref.write_safetensors(folder / which / "model.safetensors", [(name, "BF16", w.shape, (w ^ change).tobytes())])
    return folder / "base", folder / "tuned"


def test_kill_at_any_moment(tmp_path):
    base, tuned = big_pair(tmp_path, 96)
    out = tmp_path / "d"
    command = [BINARY, "compress", "--base", str(base), "--finetuned", str(tuned), "--out", str(out)]
    begin = time.monotonic()
    subprocess.run(command, check=True, capture_output=True)
    whole = time.monotonic() - begin
    good = {p.name: p.read_bytes() for p in out.iterdir()}
    shutil.rmtree(out)
    r, cut, runs = random.Random(SEED), 0, 0
    while runs < 12 or not cut:
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(r.random() * whole if runs < 12 else 0)  # all 12 may be quicker than the first was
        runs += 1
        child.kill()
        child.wait()
        if out.exists():
            assert {p.name: p.read_bytes() for p in out.iterdir()} == good
            shutil.rmtree(out)
        else:
            cut += 1
    subprocess.run(command, check=True, capture_output=True)
    assert {p.name: p.read_bytes() for p in out.iterdir()} == good
    assert sorted(p.name for p in tmp_path.iterdir()) == ["base", "d", "tuned"]         # dead runs' leftovers are gone


def test_another_run_is_not_taken_for_a_dead_one(tmp_path):
    base, tuned = big_pair(tmp_path, 64)
    command = [BINARY, "compress", "--base", str(base), "--finetuned", str(tuned), "--out", str(tmp_path / "d"), "--force"]
    children = [subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) for _ in range(3)]
    ended = [(c.wait(), c.stderr.read()) for c in children]
    assert all(code == 0 for code, _ in ended), ended
    bitdelta("inspect", tmp_path / "d", "--verify")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["base", "d", "tuned"]


@pytest.mark.parametrize("more", [[], ["--embeddings", "full"], ["--shards", "8"], ["--bits", "4"]])
def test_memory(tmp_path, more):
    """Below three times the largest tensor. VmHWM, because ru_maxrss begins with the size of the process that forked."""
    base, tuned = big_pair(tmp_path, 128)
    config, _ = sized_model(random.Random(SEED), np.random.default_rng(SEED), 8, tied=True)
    for folder in (base, tuned):
        (folder / "config.json").write_text(json.dumps(config | {"hidden_size": 4096, "vocab_size": 16384}))
    child = subprocess.Popen([BINARY, "compress", "--base", base, "--finetuned", tuned, "--out", tmp_path / "d", "--threads", "1", *more],
                             stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    peak_kib = 0
    while child.poll() is None:
        status = pathlib.Path(f"/proc/{child.pid}/status").read_text()
        peak_kib = max([peak_kib] + [int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")])
        time.sleep(0.005)
    assert child.returncode == 0
    assert 32 << 10 < peak_kib < 3 * (128 << 10)


# ---- inspect ---------------------------------------------------------------------------------------------------------------------

def test_damage_is_named(tmp_path):
    base, tuned = big_pair(tmp_path, 160)                                            # 10 MB of bits: three chunks
    out = tmp_path / "d"
    compress(base, tuned, out)
    shard, r = out / SHARD, random.Random(SEED)
    good = shard.read_bytes()
    for _ in range(4):
        at = r.randrange(len(good))
        chunk = at // (4 << 20)
        bad = bytearray(good)
        bad[at] ^= 1 << r.randrange(8)
        shard.write_bytes(bad)
        done = bitdelta("inspect", out, "--verify", status=1)
        first, last = chunk * (4 << 20), min(len(good), (chunk + 1) * (4 << 20)) - 1
        assert SHARD in done.stderr and f"chunk {chunk} (bytes {first} to {last})" in done.stderr
        told = json.loads(bitdelta("inspect", out, "--verify", "--json", status=1).stdout)
        assert told["ok"] is False and told["verified"] is False and f"chunk {chunk} " in told["files"][0]["fault"]
    shard.write_bytes(good[:-1])
    assert "records" in bitdelta("inspect", out, status=1).stderr
    shard.unlink()
    assert SHARD in bitdelta("inspect", out, "--verify", status=1).stderr
    shard.write_bytes(good)
    bitdelta("inspect", out, "--verify")


def test_inspect_models_and_files(tmp_path):
    told = json.loads(bitdelta("inspect", DEMO / "zen-mini", "--json").stdout)
    assert told["kind"] == "model" and told["fingerprint"] == ref.fingerprint(ref.read_model(str(DEMO / "zen-mini")))
    qwen = ROOT / "tests" / "data" / "arch" / "qwen3"
    told = json.loads(bitdelta("inspect", qwen, "--json").stdout)
    assert told["files"] == 3 and told["fingerprint"] == ref.fingerprint(ref.read_model(str(qwen)))
    told = json.loads(bitdelta("inspect", ROOT / "tests" / "data" / "hf" / "python.safetensors", "--json").stdout)
    assert told["kind"] == "safetensors" and {t["name"]: t["dtype"] for t in told["tensors"]}["bf16"] == "BF16"
    assert "zen-mini-sql" in bitdelta("inspect", DEMO / "deltas" / "zen-mini-sql" / "delta.json").stdout
    for thing in (DEMO / "zen-mini", ROOT / "tests" / "data" / "hf" / "python.safetensors"):
        assert "checksums    none" in bitdelta("inspect", thing, "--verify").stdout
        assert "checksums" not in bitdelta("inspect", thing).stdout
        told = json.loads(bitdelta("inspect", thing, "--verify", "--json").stdout)
        assert told["verified"] is False and told["checksums"] == 0 and told["ok"] is True and told["tensors"]
    assert "nowhere does not exist" in bitdelta("inspect", tmp_path / "nowhere", status=1).stderr
    assert "delta.json" in bitdelta("inspect", tmp_path, status=1).stderr
    assert "nowhere does not exist" in compress(tmp_path / "nowhere", DEMO / "zen-mini", tmp_path / "d", status=1).stderr
    config = DEMO / "zen-mini" / "config.json"
    assert "config.json is not a directory" in compress(DEMO / "zen-mini", config, tmp_path / "d", status=1).stderr
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", 1 << 40) + b"{}")
    (tmp_path / "short").write_bytes(b"none")
    (tmp_path / "text").write_bytes(struct.pack("<Q", 4) + b"none")
    for name in ("x.safetensors", "short", "text"):
        assert f"{tmp_path / name} is not a safetensors file" in bitdelta("inspect", tmp_path / name, status=1).stderr
    assert f"{config} is not a safetensors file" in bitdelta("inspect", config, status=1).stderr


def test_the_safetensors_package_reads_our_files(tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy")
    base, tuned = make_pair(tmp_path, SEED + 900, layers=1)
    compress(base, tuned, tmp_path / "d")
    data, _ = read_delta(tmp_path / "d")
    with pytest.importorskip("safetensors").safe_open(str(tmp_path / "d" / SHARD), "numpy") as f:
        assert set(f.keys()) == set(data)
    assert safetensors is not None
