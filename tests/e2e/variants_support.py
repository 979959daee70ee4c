"""Directories of variants that a test may rearrange, what each variant must answer, and what a server reads."""

import json
import re
import shutil
from pathlib import Path

import requests
from conftest import ROOT

DEMO = ROOT / "demo" / "deltas"
SHARD = "shard-00-of-01.safetensors"


def copy_variant(source, target, name=None):
    """A copy that may be written to; under another name if one is given."""
    shutil.copytree(DEMO / source, target, copy_function=shutil.copyfile)
    if name:
        rename_variant(target, name)
    return target


def rename_variant(folder, name):
    manifest = json.loads((folder / "delta.json").read_text())
    manifest["variant"] = name
    (folder / "delta.json").write_text(json.dumps(manifest))


def replace_variant(folder, source, name, scratch):
    """Another variant's weights under `name`, put in place of `folder` as the README says: a new directory renamed over it."""
    fresh = copy_variant(source, scratch / "fresh", name)
    folder.rename(scratch / "old")
    fresh.rename(folder)
    shutil.rmtree(scratch / "old")


def goldens(variant):
    """(prompt ids, greedy ids) of the reference implementation, for this variant or the base."""
    kind = "base" if variant == "zen-mini" else "bitdelta"
    golden = json.loads((ROOT / "tests" / "data" / "golden" / kind / f"{variant}.json").read_text())
    return [(p["ids"], p["greedy"]["ids"]) for p in golden["prompts"]]


def golden_body(model, prompt_ids, tokens, **fields):
    return {"model": model, "prompt": prompt_ids, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True, **fields}


def variants(server):
    body = requests.get(server.admin_url + "/admin/variants", timeout=20).json()
    return {v["name"]: v for v in body["variants"] if not v["retired"]}


def listing(server):
    return requests.get(server.admin_url + "/admin/variants", timeout=20).json()


def rescan(server, **headers):
    answer = requests.post(server.admin_url + "/admin/rescan", timeout=60, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


def bytes_read(server):
    """What the process has read by read calls, files above all (not sockets): the kernel's count, whatever the server says.
    Complete only with --io pread."""
    text = Path(f"/proc/{server.process.pid}/io").read_text()
    return int(re.search(r"rchar: (\d+)", text).group(1))
