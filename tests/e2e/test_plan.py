"""`bitdelta plan` as its users run it, and the plan that `serve` logs: the same numbers."""
import json
import os
import pathlib
import re
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARY = os.environ.get("BITDELTA_BIN", str(ROOT / "build" / "bitdelta"))
FAMILY = ["--base", "demo/zen-mini", "--deltas", "demo/deltas", "--backend", "cpu"]


def plan(*more, status=0):
    done = subprocess.run([BINARY, "plan", *FAMILY, *more], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == status, done.stderr
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


def test_refusal_names_the_sum():
    done = plan("--slots", "14", "--device-bytes", "30MiB", status=1)
    assert re.search(r"does not fit: [\d.]+ MiB = weights [\d.]+ \+ workspace [\d.]+ \+ KV cache", done.stderr)
    assert "remains" in done.stdout
    assert plan("--device-bytes", "30", "--slots", "0", "--base", "/no/such/model", status=1).stderr


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
