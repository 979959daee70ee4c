"""Models whose heads divide among 8 ranks against goldens of transformers (tests/data/arch/README.md): base and variant, the
variant's delta in 1, 2, 4 and 8 shards; all logits of every greedy step's five best, and the tokens."""
import hashlib
import json

import pytest

np = pytest.importorskip("numpy")
pytest.importorskip("xxhash")

from test_compress import ROOT, bitdelta, compress  # noqa: E402

SHARDS = (1, 2, 4, 8)
LOGITS_L2, LOGPROB = 1e-5, 1e-4          # float32 sums in another order; as for the other families


def golden_of(name):
    return json.loads((ROOT / "tests" / "data" / "arch" / name / "golden.json").read_text())


@pytest.fixture(scope="module", params=["tp-llama", "tp-qwen2"])
def model(request, tmp_path_factory):
    """name, golden, base directory, delta directory by number of shards: 1 and 8 by compress, the others by reshard"""
    folder, base = tmp_path_factory.mktemp(request.param), ROOT / "tests" / "data" / "arch" / request.param
    deltas = {shards: folder / str(shards) for shards in SHARDS}
    for shards in (1, 8):
        compress(base, base / "tuned", deltas[shards], "--shards", shards, "--base-name", "base", "--variant", "variant")
    bitdelta("reshard", "--delta", deltas[1], "--out", deltas[2], "--shards", 2, "--base", base)
    bitdelta("reshard", "--delta", deltas[8], "--out", deltas[4], "--shards", 4)
    return request.param, golden_of(request.param), base, deltas


def test_deltas_are_those_of_the_goldens(model):
    _, golden, _, deltas = model
    assert sorted(golden["sha256"]) == sorted(f"{s}/{p.name}" for s in (1, 8) for p in deltas[s].iterdir())
    for name, digest in golden["sha256"].items():
        shards, file = name.split("/")
        assert hashlib.sha256((deltas[int(shards)] / file).read_bytes()).hexdigest() == digest, name


def logprobs_of(row):
    row = row.astype(np.float64)
    return row - row.max() - np.log(np.exp(row - row.max()).sum())


@pytest.mark.parametrize("shards", [None, *SHARDS])
def test_logits_and_tokens(model, shards, tmp_path):
    name, golden, base, deltas = model
    more = ["--delta", deltas[shards]] if shards else []
    for prompt in golden["variant" if shards else "base"]:
        steps, ids = prompt["greedy"], prompt["ids"]
        told = json.loads(bitdelta("generate", "--base", base, *more, "--prompt-ids", ",".join(map(str, ids)), "--max-tokens", len(steps),
                                   "--greedy", "--ignore-eos", "--backend", "cpu", "--json", "--dump-logits", tmp_path / "l.npy").stdout)
        assert told["ids"] == [step["ids"][0] for step in steps]
        rows, want = np.load(tmp_path / "l.npy")[len(ids) - 1:], np.array(prompt["logits"])
        assert rows.shape == (len(steps), len(want))
        assert np.linalg.norm(rows[0] - want) < LOGITS_L2 * np.linalg.norm(want), name
        for row, step in zip(rows, steps):
            got = logprobs_of(row)
            assert np.abs(got[step["ids"]] - step["logprobs"]).max() < LOGPROB
