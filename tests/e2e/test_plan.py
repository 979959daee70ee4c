"""`bitdelta plan` as its users run it, and the plan that `serve` logs: the same numbers."""
import datetime
import json
import os
import pathlib
import re
import shutil
import subprocess
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARY = os.environ.get("BITDELTA_BIN", str(ROOT / "build" / "bitdelta"))
FAMILY = {"--base": "demo/zen-mini", "--deltas": "demo/deltas", "--backend": "cpu"}


def plan(*more, status=0):
    family = [word for flag, value in FAMILY.items() if flag not in more for word in (flag, value)]
    done = subprocess.run([BINARY, "plan", *family, *more], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert status is None or done.returncode == status, done.stderr
    return done


def test_json_adds_up():
    got = json.loads(plan("--json").stdout)
    parts = ["weights", "workspace", "logits", "delta", "kv"]
    assert got["fits"] and got["deltas"] == 14 and got["slots"] == 14
    assert got["total_bytes"] == sum(got[p + "_bytes"] for p in parts) <= got["available_bytes"]


def test_text_has_every_part():
    text = plan().stdout
    for word in ["base weights", "workspace", "logits", "delta pages", "KV cache", "total", "available", "remains", "14 slots"]:
        assert word in text
    one = plan("--slots", "1", "--max-seqs", "1", "--logits-rows-max", "1").stdout
    for word in [", 1 sequence\n", " 1 slot = ", " 1 row of "]:
        assert word in one
    # Pages of a small model, cut further by ranks, are no "0.0 MiB".
    for ranks in ("1", "4"):
        page = json.loads(plan("--tensor-parallel", ranks, "--json").stdout)["page_bytes"]
        assert f" of {page / 1024:.1f} KiB, " in plan("--tensor-parallel", ranks).stdout


def test_refusal_names_the_sum():
    done = plan("--slots", "14", "--device-bytes", "30MiB", status=1)
    assert re.search(r"does not fit: [\d.]+ MiB = weights [\d.]+ \+ workspace [\d.]+ \+ KV cache", done.stderr)
    assert "remains" in done.stdout
    assert plan("--device-bytes", "30", "--slots", "0", "--base", "/no/such/model", status=1).stderr


def test_a_directory_without_deltas_is_told(tmp_path):
    """Nothing there, whole models there, and a delta where directories of deltas are meant."""
    for folder in (tmp_path, "demo"):
        assert plan("--deltas", folder).stdout.endswith("deltas found: none\n")
    refused = plan("--deltas", "demo/deltas/zen-mini-sql", status=1)
    assert "demo/deltas/zen-mini-sql is a delta itself; give the directory that it is in" in refused.stderr and not refused.stdout


def test_unknown_memory_is_not_planned_for():
    """Of a device that does not answer only the least is known: KV of one context, or what was asked for."""
    done = plan("--backend", "cuda", "--json", status=None)
    got = json.loads(done.stdout) if done.returncode == 0 else {}
    if got.get("available_bytes") != 0:
        pytest.skip("built without CUDA, or a device answers")
    assert got["kv_tokens"] == json.loads((ROOT / "demo/zen-mini/config.json").read_text())["max_position_embeddings"]
    assert 0 < got["total_bytes"] < 1 << 30
    text = plan("--backend", "cuda").stdout
    assert f"{got['kv_tokens']} tokens or more" in text and "give --device-bytes" in text
    assert "or more" not in plan("--backend", "cuda", "--kv-tokens", "4096").stdout
    assert "or more" not in plan("--backend", "cuda", "--device-bytes", "8GiB").stdout


def test_what_is_served_is_planned_for(tmp_path):
    """A directory whose name only looks like what a killed run leaves is a variant for the server, and so for the plan; a leftover is none."""
    for name in ("zen-mini-c", "kept.tmp-old", "left.tmp-123", ".hidden"):
        shutil.copytree(ROOT / "demo/deltas/zen-mini-c", tmp_path / name)
    assert json.loads(plan("--deltas", tmp_path, "--json").stdout)["deltas"] == 2


def test_deltas_that_cannot_be_read_are_named(tmp_path):
    for name in ("good", "odd", "worse"):
        (tmp_path / name).mkdir()
    good = (ROOT / "demo" / "deltas" / "zen-mini-c" / "delta.json").read_text()
    (tmp_path / "good" / "delta.json").write_text(good)
    (tmp_path / "odd" / "delta.json").write_text('{"format": "other"}')
    (tmp_path / "worse" / "delta.json").write_text("{")
    (tmp_path / "link").symlink_to("nothing")
    text = plan("--deltas", tmp_path).stdout
    assert "deltas found: 1," in text
    for name in ("link", "odd", "worse"):
        assert len(re.findall(rf"^  {tmp_path / name}: .+", text, re.M)) == 1
    got = json.loads(plan("--deltas", tmp_path, "--json").stdout)
    assert got["deltas"] == 1 and got["deltas_unreadable"] == 3
    assert sorted(one["path"] for one in got["unreadable"]) == [str(tmp_path / name) for name in ("link", "odd", "worse")]
    assert all(one["failure"] for one in got["unreadable"])
    assert json.loads(plan("--json").stdout)["unreadable"] == []


@pytest.mark.parametrize("tokens", [1, 2047])
def test_kv_of_less_than_a_context_is_warned_of(launch, tokens):
    """And what does not fit is refused, while what does is answered."""
    server = launch("--kv-tokens", str(tokens), deltas=None)
    held = -(-tokens // 16) * 16
    warned = [line for line in server.lines if "level=warn" in line and "holds no sequence of the whole context of 2048" in line]
    assert len(warned) == (1 if held < 2048 else 0) and all(f"kv_tokens={held}" in line for line in warned)
    server.complete([5] * 8, max_tokens=8)
    answer = server.post("/v1/completions", {"prompt": [5] * 2000, "max_tokens": 48, "ignore_eos": True})
    assert answer.status_code == (400 if held < 2048 else 200), answer.text


def test_host_memory_beyond_the_machine_is_warned_of(launch):
    assert [line for line in launch("--host-bytes", "15TiB").lines if "level=warn" in line and "host_bytes=16492674416640" in line]
    assert not [line for line in launch("--host-bytes", "1MiB").lines if "level=warn" in line and "host_bytes" in line]


def test_the_log_says_when(server):
    found = server.find(r"t=(\d+\.\d+) level=info mod=serve starting version=\S+ date=(\S+)")
    date = datetime.datetime.fromisoformat(found.group(2).replace("Z", "+00:00"))
    assert abs(date.timestamp() - time.time() + time.monotonic() - float(found.group(1))) < 60  # clocks may be set meanwhile


def test_wrong_usage():
    assert "--slots" in plan("--slots", "many", status=2).stderr


def test_serve_logs_its_plan(server):
    line = server.find(r"mod=model plan (.*)").group(1)
    logged = dict(pair.split("=") for pair in line.split())
    assert int(logged["total_mb"]) <= int(logged["available_mb"])
    assert int(logged["kv_blocks"]) > 0


def test_dtype_and_kernels_of_the_cpu():
    def generate(*more):
        command = [BINARY, "generate", "--base", "demo/zen-mini", "--backend", "cpu", "--prompt-ids", "5,17", "--max-tokens", "2", "--greedy", *more]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)

    for dtype in ["fp16", "bf16"]:
        done = generate("--dtype", dtype)
        assert done.returncode == 1 and "dtype" in done.stderr and "float32" in done.stderr
    assert generate("--dtype", "fp32", "--kernels", "plain").returncode == 0
    assert generate("--kernels", "fastest").returncode == 2
