"""A served variant that added tokens to the base's vocabulary, beside the base and one that did not."""

import json
import shutil
import subprocess
import sys

import pytest
import requests
from conftest import BASE, BINARY, ROOT, VOCAB, error_of

np = pytest.importorskip("numpy")
pytest.importorskip("xxhash")
sys.path.insert(0, str(ROOT / "tests" / "data"))
import reference_encoder as ref  # noqa: E402

ADDED = 5
PLAIN = "zen-mini-sql"


@pytest.fixture(scope="module")
def deltas(tmp_path_factory):
    """A directory of variants: `grown`, whose tokens from 4096 on repeat common ones, the same in two shards and with whole tables, and a delta of the demo."""
    folder = tmp_path_factory.mktemp("vocab")
    base, tuned = ROOT / "demo" / BASE, folder / "tuned"
    tuned.mkdir()
    tensors = ref.read_model(str(base))
    dtype, (rows, cols), data = tensors[ref.EMBED]
    assert rows == VOCAB and dtype == "BF16"
    tensors[ref.EMBED] = (dtype, (rows + ADDED, cols), data + data[40 * 2 * cols:(40 + ADDED) * 2 * cols])
    ref.write_safetensors(tuned / "model.safetensors", [(n, *t) for n, t in tensors.items()])
    config = json.loads((base / "config.json").read_text())
    (tuned / "config.json").write_text(json.dumps(config | {"vocab_size": VOCAB + ADDED}))
    (folder / "deltas").mkdir()
    for name, more in (("grown", []), ("grown-in-two", ["--shards", "2"]), ("whole", ["--embeddings", "full"]),
                       ("whole-in-four", ["--embeddings", "full", "--shards", "4"])):
        subprocess.run([BINARY, "compress", "--base", base, "--finetuned", tuned, "--out", folder / "deltas" / name, *more],
                       check=True, capture_output=True)
    shutil.copytree(ROOT / "demo" / "deltas" / PLAIN, folder / "deltas" / PLAIN)
    return folder / "deltas"


def generated(deltas, name, ids, count):
    """By one rank."""
    done = subprocess.run([BINARY, "generate", "--base", ROOT / "demo" / BASE, "--delta", deltas / name, "--prompt-ids",
                           ",".join(map(str, ids)), "--max-tokens", str(count), "--greedy", "--ignore-eos", "--json", "--backend", "cpu"],
                          check=True, capture_output=True, text=True)
    return json.loads(done.stdout)["ids"]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_added_tokens_are_served(launch, deltas, ranks):
    server = launch("--slots", "8", "--tensor-parallel", str(ranks), deltas=str(deltas))
    prompt = [4080, 260, VOCAB, 300, VOCAB + ADDED - 1]
    for name in ("grown", "grown-in-two", "whole", "whole-in-four"):
        choice = server.complete(prompt, name, max_tokens=12, ignore_eos=True, return_token_ids=True)["choices"][0]
        assert choice["token_ids"] == generated(deltas, name, prompt, 12)
        forced = server.complete(prompt, name, max_tokens=6, logit_bias={str(VOCAB + 2): 100}, return_token_ids=True,
                                 logprobs=2, return_tokens_as_token_ids=True)["choices"][0]
        assert forced["token_ids"] == [VOCAB + 2] * 6
        # Its row is that of token 42, with which it therefore ties: added columns are real logits.
        twin = server.complete(prompt, name, max_tokens=1, logit_bias={str(42): 100}, logprobs=0)["choices"][0]["logprobs"]
        assert abs(forced["logprobs"]["token_logprobs"][0] - twin["token_logprobs"][0]) < 1e-6
    assert str(VOCAB + ADDED) in error_of(server.post("/v1/completions", {"model": "grown", "prompt": [VOCAB + ADDED]}), 400, "invalid_value", "prompt")


def test_room_is_made_at_start(launch, deltas, tmp_path):
    """A server that started without added vocabulary says what would take one that has some; a start with it does."""
    later = tmp_path / "later"
    later.mkdir()
    shutil.copytree(deltas / PLAIN, later / PLAIN)
    server = launch("--slots", "3", deltas=str(later))
    shutil.copytree(deltas / "grown", later / "grown")
    refused, = requests.post(server.admin_url + "/admin/rescan", timeout=60).json()["refused"]
    assert refused["path"].endswith("/grown") and f"room for {VOCAB}; a server that starts with the variant" in refused["failure"]
    assert launch("--slots", "3", deltas=str(later)).complete([VOCAB], "grown", max_tokens=1)["choices"]


@pytest.mark.parametrize("model", [BASE, PLAIN])
def test_others_do_not_know_them(launch, deltas, model):
    server = launch("--slots", "2", deltas=str(deltas))
    for fields in ({"prompt": [5, VOCAB]}, {"prompt": "x", "logit_bias": {str(VOCAB): 5}}, {"prompt": "x", "stop_token_ids": [VOCAB]}):
        answer = server.post("/v1/completions", {"model": model, **fields})
        assert answer.status_code == 400 and str(VOCAB) in answer.text
    top = server.complete("The", model, max_tokens=8, ignore_eos=True, temperature=2.0, seed=5, logprobs=5, return_tokens_as_token_ids=True)
    for row in top["choices"][0]["logprobs"]["top_logprobs"]:
        assert all(int(token.removeprefix("token_id:")) < VOCAB for token in row)


def test_without_decode_delta_a_grown_variant_keeps_its_delta(launch, deltas):
    server = launch("--slots", "2", "--decode-delta", "false", deltas=str(deltas))
    bias = {str(VOCAB + 1): 100}
    choice = server.complete([5, VOCAB + 1], "grown", max_tokens=6, logit_bias=bias, return_token_ids=True)["choices"][0]
    assert choice["token_ids"] == [VOCAB + 1] * 6
