"""`bitdelta reshard`: every number of shards from every other, byte for byte what compress writes with that number (which
test_compress.py compares with the reference encoder); what cannot be cut; damage; death at any moment.

Sizes and values are new in every run; BD_TEST_SEED repeats one."""
import json
import random
import resource
import shutil
import subprocess
import time

import pytest

np = pytest.importorskip("numpy")
pytest.importorskip("xxhash")

from test_compress import (BINARY, EMBED, ROOT, SEED, bf16, bitdelta, change_vocabulary, compress, ref, same_directories,  # noqa: E402
                           sized_model, write_sized)

ALL = (1, 2, 4, 8)


def reshard(delta, out, shards, *more, status=0):
    return bitdelta("reshard", "--delta", delta, "--out", out, "--shards", shards, *more, status=status)


def make_pair(folder, r, change="same", biases=False, want=lambda config: True):
    rng = np.random.default_rng(r.getrandbits(32))
    config, tensors = sized_model(r, rng, 8)
    while not want(config):
        config, tensors = sized_model(r, rng, 8)
    if biases:
        config["attention_bias"] = True
        for n in [n for n in tensors if "self_attn" in n]:
            tensors[n.replace("weight", "bias")] = bf16(rng.standard_normal(tensors[n].shape[0], dtype=np.float32))
    base = write_sized(folder / "base", config, tensors)
    tuned_config, tuned = dict(config), {n: bf16(w + np.float32(0.02) * rng.standard_normal(w.shape, dtype=np.float32))
                                         if r.random() < 0.9 else w for n, w in tensors.items()}
    change_vocabulary(r, rng, tuned, tuned_config, change)
    return base, write_sized(folder / "tuned", tuned_config, tuned)


def files_of(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir()}


# ---- bytes -----------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("embeddings,change", [(e, c) for e in ("sign", "full", "base") for c in ("same", "added", "removed")
                                               if (e, c) != ("base", "added")])                  # which compress refuses
@pytest.mark.parametrize("bits", [1, 3])
def test_what_compress_writes(tmp_path, embeddings, change, bits):
    r = random.Random(f"{SEED}{embeddings}{change}{bits}")
    base, tuned = make_pair(tmp_path, r, change, biases=r.random() < 0.5)
    for shards in ALL:
        compress(base, tuned, tmp_path / str(shards), "--shards", shards, "--bits", bits, "--embeddings", embeddings, "--variant", "v ü")
    for before in ALL:
        for after in ALL:
            out = tmp_path / f"{before}to{after}"
            reshard(tmp_path / str(before), out, after, *(["--base", base] if after > before or r.random() < 0.3 else []))
            same_directories(out, tmp_path / str(after))
    bitdelta("inspect", tmp_path / "1to8", "--verify")


def test_one_to_eight_to_one_of_the_demo(tmp_path):
    """The demo has too few heads for 8; two parts it has."""
    delta, base = ROOT / "demo" / "deltas" / "zen-mini-shell", ROOT / "demo" / "zen-mini"
    reshard(delta, tmp_path / "2", 2, "--base", base)
    reshard(tmp_path / "2", tmp_path / "1", 1)
    same_directories(tmp_path / "1", delta)


def test_other_files_come_along(tmp_path):
    base, tuned = make_pair(tmp_path, random.Random(SEED))
    delta = tmp_path / "one"
    compress(base, tuned, delta)
    side = {"config.json": (base / "config.json").read_bytes(), "generation_config.json": b"{}", "chat_template.jinja": b"{{ 1 }}\n",
            "tokenizer.json": bytes(range(256)) * 999, ".hidden": b"", "shard-00-of-04.safetensors": b"left over"}
    for name, data in side.items():
        (delta / name).write_bytes(data)
    (delta / "folder").mkdir()
    told = reshard(delta, tmp_path / "two", 2)                          # a config.json of its own will do
    assert "folder is no regular file" in told.stderr
    found = files_of(tmp_path / "two")
    assert {n: d for n, d in found.items() if n in side} == side
    assert sorted(set(found) - set(side)) == ["delta.json", "shard-00-of-02.safetensors", "shard-01-of-02.safetensors"]
    reshard(tmp_path / "two", tmp_path / "four", 4)
    assert (tmp_path / "four" / "shard-00-of-04.safetensors").read_bytes() != side["shard-00-of-04.safetensors"]
    bitdelta("inspect", tmp_path / "four", "--verify")


def test_told_as_json(tmp_path):
    base, tuned = make_pair(tmp_path, random.Random(SEED))
    compress(base, tuned, tmp_path / "one", "--variant", "v")
    done = reshard(tmp_path / "one", tmp_path / "four", 4, "--base", base, "--json")
    told = json.loads(done.stdout)
    assert (told["shards_before"], told["shards"], told["variant"], told["copied"]) == (1, 4, "v", [])
    assert told["delta_bytes"] == sum(p.stat().st_size for p in (tmp_path / "four").glob("*.safetensors"))
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert lines and lines[-1]["bytes_done"] == lines[-1]["bytes_total"] > 0


# ---- refusals --------------------------------------------------------------------------------------------------------------

def test_what_cannot_be_cut(tmp_path):
    base, tuned = make_pair(tmp_path, random.Random(SEED), want=lambda c: c["num_key_value_heads"] == c["num_attention_heads"])
    config = json.loads((base / "config.json").read_text())
    compress(base, tuned, tmp_path / "one")
    compress(base, tuned, tmp_path / "two", "--shards", 2)
    assert "needs --base DIR" in reshard(tmp_path / "two", tmp_path / "x", 4, status=2).stderr
    assert "1, 2, 4 or 8" in reshard(tmp_path / "two", tmp_path / "x", 3, status=2).stderr

    def told(status=1, **changes):
        (tmp_path / "odd").mkdir(exist_ok=True)
        (tmp_path / "odd" / "config.json").write_text(json.dumps(config | changes))
        return reshard(tmp_path / "one", tmp_path / "x", 8, "--base", tmp_path / "odd", status=status).stderr

    width = config["num_attention_heads"] * config["head_dim"]
    assert "--shards 8: num_attention_heads of the base is 4, not a multiple of 8" in \
        told(2, num_attention_heads=4, num_key_value_heads=4, head_dim=width // 4)          # the same products
    assert f"q_proj.weight has {width} rows, by config.json it would be {2 * width}" in \
        told(num_attention_heads=2 * config["num_attention_heads"])
    assert "gate_proj.weight has" in told(intermediate_size=config["intermediate_size"] + 8)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["base", "odd", "one", "tuned", "two"]


def test_heads_that_do_not_divide(tmp_path):
    """The demo: the message has the arithmetic, and the status is that of a number of ranks that does not fit."""
    delta, base = ROOT / "demo" / "deltas" / "zen-mini-shell", ROOT / "demo" / "zen-mini"
    config = json.loads((base / "config.json").read_text())
    heads, bad = config["num_attention_heads"], 8
    assert heads % bad
    assert f"--shards {bad}: num_attention_heads of the base is {heads}, not a multiple of {bad}" in \
        reshard(delta, tmp_path / "x", bad, "--base", base, status=2).stderr


def test_an_output_that_exists(tmp_path):
    base, tuned = make_pair(tmp_path, random.Random(SEED))
    for shards in (1, 8):
        compress(base, tuned, tmp_path / str(shards), "--shards", shards, "--variant", "v")
    one = files_of(tmp_path / "1")
    assert "exists (--force replaces it)" in reshard(tmp_path / "8", tmp_path / "1", 2, status=1).stderr
    assert files_of(tmp_path / "1") == one
    shutil.copytree(tmp_path / "8", tmp_path / "self")
    reshard(tmp_path / "self", tmp_path / "self", 1, "--force")
    same_directories(tmp_path / "self", tmp_path / "1")
    assert "is not a delta" in reshard(tmp_path / "8", base, 1, "--force", status=1).stderr
    assert "delta.json" in reshard(base, tmp_path / "x", 1, status=1).stderr


def test_damage_does_not_get_new_sums(tmp_path):
    base, tuned = make_pair(tmp_path, random.Random(SEED))
    delta = tmp_path / "8"
    compress(base, tuned, delta, "--shards", 8)
    victim = delta / "shard-05-of-08.safetensors"
    good = victim.read_bytes()
    bad = bytearray(good)
    bad[-1 - random.Random(SEED).randrange(100)] ^= 4
    victim.write_bytes(bad)
    assert "shard-05-of-08.safetensors" in reshard(delta, tmp_path / "x", 1, status=1).stderr
    victim.write_bytes(good[:-1])
    assert "bytes" in reshard(delta, tmp_path / "x", 1, status=1).stderr
    victim.unlink()
    assert "shard-05-of-08.safetensors" in reshard(delta, tmp_path / "x", 1, status=1).stderr
    assert not (tmp_path / "x").exists()


def test_files_that_disagree(tmp_path):
    """Sums that fit, but two files hold different values of what both should hold."""
    base, tuned = make_pair(tmp_path, random.Random(SEED))
    delta = tmp_path / "4"
    compress(base, tuned, delta, "--shards", 4)
    victim = delta / "shard-02-of-04.safetensors"
    tensors = ref.read_safetensors(victim)
    name = "model.layers.0.self_attn.o_proj.weight.scale"
    dtype, shape, data = tensors[name]
    tensors[name] = dtype, shape, data[:-1] + bytes([data[-1] ^ 1])
    ref.write_safetensors(victim, [(n, *t) for n, t in tensors.items()])
    meta = json.loads((delta / "delta.json").read_text())
    meta["files"][2] = ref.file_entry(str(victim))
    (delta / "delta.json").write_text(json.dumps(meta, indent=1) + "\n")
    told = reshard(delta, tmp_path / "x", 1, status=1).stderr
    assert name in told and "shard-02-of-04.safetensors" in told and "shard-01-of-04.safetensors" in told


# ---- death -------------------------------------------------------------------------------------------------------------------

def big_delta(folder):
    """A table alone: 12 MB of bits."""
    rng = np.random.default_rng(SEED)
    rows, cols = 24576, 4096
    sign = rng.integers(0, 256, (rows, cols // 8), dtype=np.uint8)
    scale = rng.random(rows, dtype=np.float32)
    folder.mkdir()
    name = "shard-00-of-01.safetensors"
    ref.write_safetensors(folder / name, [(EMBED + ".sign", "U8", sign.shape, sign.tobytes()), (EMBED + ".scale", "F32", scale.shape, scale.tobytes())])
    meta = {"format": "bitdelta-1", "variant": "v", "base": "b", "base_fingerprint": "0" * 64, "bits": 1, "scale": "row", "shards": 1,
            "embeddings": "sign", "tensors": [{"name": EMBED, "kind": "sign", "shape": [rows, cols]}], "files": [ref.file_entry(str(folder / name))]}
    (folder / "delta.json").write_text(json.dumps(meta, indent=1) + "\n")
    config, _ = sized_model(random.Random(SEED), rng, 8)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_kill_at_any_moment(tmp_path):
    delta, out = big_delta(tmp_path / "delta"), tmp_path / "out"
    reshard(delta, out, 8)
    new = files_of(out)
    shutil.rmtree(out)
    reshard(delta, out, 2)
    old = files_of(out)
    command = [BINARY, "reshard", "--delta", str(delta), "--out", str(out), "--shards", "8", "--force"]

    def die(at_bytes):
        """The kernel kills whoever writes past the limit: between two bytes of a file, without a chance to clean up."""
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (at_bytes, at_bytes))

    size = max(len(data) for name, data in new.items() if name.endswith(".safetensors"))
    r = random.Random(SEED)
    for at in (0, 4096, r.randrange(4097, size), size - 1):
        done = subprocess.run(command, capture_output=True, preexec_fn=lambda: die(at))
        assert done.returncode != 0
        assert files_of(out) == old
    for _ in range(8):                                                  # whenever it comes, all of the old or all of the new
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(r.random() * 0.2)
        child.kill()
        child.wait()
        assert files_of(out) in (old, new)
    subprocess.run(command, check=True, capture_output=True)
    assert files_of(out) == new
    assert sorted(p.name for p in tmp_path.iterdir()) == ["delta", "out"]           # dead runs' leftovers are gone
