"""Directories of variants that a test may rearrange, what each variant must answer, and what a server reads."""

import json
import mmap
import os
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


def bytes_read(process, way):
    """What a process (a number, or "self") has read: the kernel's count, whatever the server says. "pread": by read calls, files
    above all, not sockets. "uring": from disks, whoever asked for it."""
    text = Path(f"/proc/{process}/io").read_text()
    return int(re.search({"pread": r"rchar: (\d+)", "uring": r"read_bytes: (\d+)"}[way], text).group(1))


def counts_direct_reads(folder):
    """Whether reads past the page cache of files here show in the kernel's count of bytes from disks."""
    path = folder / "probe"
    path.write_bytes(bytes(1 << 20))
    before = bytes_read("self", "uring")
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return False
    try:
        os.preadv(fd, [mmap.mmap(-1, 1 << 20)], 0)
    finally:
        os.close(fd)
        path.unlink()
    return bytes_read("self", "uring") - before >= 1 << 20
