"""lm-evaluation-harness against `bitdelta serve`, and the same harness with transformers on the same weights.

Two small tasks of ours (tasks/): multiple choice and rolling log-likelihood. The base is the demo's; the reference of a
variant is the whole model base + scale * sign, made here from the files of the delta. What is right is what transformers
says in float64; how far from it float32 may be is what transformers itself in float32 is, measured in the same run.
"""

import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import start_server

ROOT = Path(__file__).resolve().parents[3]
TASKS = ROOT / "tests" / "e2e" / "oracles" / "tasks"
BASE = ROOT / "demo" / "zen-mini"
VARIANT = "zen-mini-coder"
WORSE = 2  # the most times that our distance from float64 may be that of transformers in float32,
# and of the log-likelihood of one choice or text, whatever transformers does. Measured: 1.8e-5 for choices, 5.2e-5 for texts
# of up to 158 tokens and 7.4e-4 for one of 3612.
TOLERANCE = 1e-4
PER_TOKEN = 3e-7  # more for a text

pytestmark = pytest.mark.oracles


def read_tensors(path):
    """Every tensor of a safetensors file as numpy, bf16 widened to float32."""
    numpy = pytest.importorskip("numpy")
    data = path.read_bytes()
    (size,) = struct.unpack_from("<Q", data)
    tensors = {}
    for name, entry in json.loads(data[8 : 8 + size]).items():
        if name == "__metadata__":
            continue
        first, last = (8 + size + at for at in entry["data_offsets"])
        kind = {"BF16": "<u2", "F32": "<f4", "U8": "u1"}[entry["dtype"]]
        values = numpy.frombuffer(data[first:last], dtype=kind).reshape(entry["shape"])
        if entry["dtype"] == "BF16":
            values = (values.astype(numpy.uint32) << 16).view(numpy.float32)
        tensors[name] = values
    return tensors


def merged(delta, folder, kind):
    """The whole model base + scale * sign in float32 or, exactly, in float64, as a Hugging Face directory."""
    numpy = pytest.importorskip("numpy")
    save_file = pytest.importorskip("safetensors.numpy").save_file
    weights = {name: values.astype(kind) for name, values in read_tensors(BASE / "model.safetensors").items()}
    parts = read_tensors(delta / "shard-00-of-01.safetensors")
    for name, values in parts.items():
        if name.endswith(".sign"):
            name = name.removesuffix(".sign")
            plus = numpy.unpackbits(values, axis=1, bitorder="little")
            signs = plus.astype(kind) * 2 - 1
            weights[name] = weights[name] + parts[f"{name}.scale"].astype(kind)[:, None] * signs
        elif not name.endswith(".scale"):
            weights[name] = values.astype(kind)
    assert sum(name.endswith(".sign") for name in parts) > 50
    folder.mkdir()
    for path in BASE.glob("*.json"):
        shutil.copy(path, folder)
    save_file({name: numpy.ascontiguousarray(values) for name, values in weights.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def harness(model, arguments, work, *flags, program=("-m", "lm_eval")):
    """Runs lm_eval itself; {task: {document number: ([log-likelihoods], [is greedy])}} and the results it prints."""
    pytest.importorskip("lm_eval")
    work.mkdir()
    joined = ",".join(f"{key}={value}" for key, value in arguments.items())
    command = [sys.executable, *program, "--model", model, "--model_args", joined, "--tasks", "zen_choice,zen_rolling"]
    command += ["--include_path", TASKS, "--output_path", work / "out", "--log_samples", *flags]
    settings = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(work / "huggingface"),
        "TOKENIZERS_PARALLELISM": "false",
        "OPENAI_API_KEY": "unused",
    }
    done = subprocess.run([str(part) for part in command], cwd=ROOT, env=settings, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    samples = {}
    for task in ("zen_choice", "zen_rolling"):
        (path,) = work.glob(f"out/**/samples_{task}_*.jsonl")
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        samples[task] = {line["doc_id"]: line["resps"] for line in lines}
    (path,) = work.glob("out/**/results_*.json")
    return samples, json.loads(path.read_text(encoding="utf-8"))["results"]


def by_server(served, model, work, *flags, **options):
    arguments = {"model": model, "tokenizer": BASE, "base_url": f"{served.url}/v1/completions", "add_bos_token": False, "max_retries": 1}
    return harness("local-completions", {**arguments, "tokenizer_backend": "huggingface", **options}, work, *flags)


def by_transformers(folder, work, kind):
    # The harness cuts long texts for a server of 2048 positions into windows of 2046; here it must do the same. It adds a
    # text's log-probabilities up in the type of the softmax, in float32 with an error of 1e-3 over 3600 tokens.
    arguments = {"pretrained": folder, "dtype": kind, "add_bos_token": False, "max_length": 2046}
    arguments |= {"attn_implementation": "eager", "softmax_dtype": "float64"}
    program = (Path(__file__).with_name("float64.py"),) if kind == "float64" else ("-m", "lm_eval")
    return harness("hf", arguments, work, "--device", "cpu", program=program)


def flat(responses):
    """[(log-likelihood, is greedy or None)] of one document, however the harness nests and types them."""
    pairs = []
    for response in responses:
        while isinstance(response, list) and len(response) == 1:
            response = response[0]
        value, greedy = response if isinstance(response, list) else (response, None)
        pairs.append((float(value), greedy if greedy is None else str(greedy) == "True"))
    return pairs


def token_counts():
    """Of the rolling texts, by document number."""
    encode = pytest.importorskip("tokenizers").Tokenizer.from_file(str(BASE / "tokenizer.json")).encode
    lines = (TASKS / "rolling.jsonl").read_text(encoding="utf-8").splitlines()
    return {("zen_rolling", number): len(encode(json.loads(line)["text"]).ids) for number, line in enumerate(lines)}


def errors(got, want):
    """{task: [(difference, tokens of a text or 0)]}; the greedy choices are the same."""
    counts, found = token_counts(), {}
    for task, documents in want[0].items():
        assert sorted(got[0][task]) == sorted(documents) and documents
        found[task] = []
        for number, responses in documents.items():
            ours, theirs = flat(got[0][task][number]), flat(responses)
            assert len(ours) == len(theirs)
            assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs], (task, number)
            found[task] += [(a - b, counts.get((task, number), 0)) for (a, _), (b, _) in zip(ours, theirs)]
    return found


def spread(differences):
    """Root mean square of what is one token's part: that of a sum of n grows with the root of n."""
    return (sum(difference**2 / max(tokens, 1) for difference, tokens in differences) / len(differences)) ** 0.5


@pytest.fixture(scope="module")
def served():
    running = start_server("--slots", "2", "--variant", f"{VARIANT}={ROOT / 'demo' / 'deltas' / VARIANT}", deltas=None)
    yield running
    assert running.stop() == 0


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """What transformers says of the base and of the merged variant, {name: {type: what}}."""
    work, found = tmp_path_factory.mktemp("references"), {"zen-mini": {}, VARIANT: {}}
    for kind in ("float32", "float64"):
        whole = merged(ROOT / "demo" / "deltas" / VARIANT, work / f"merged-{kind}", kind)
        found["zen-mini"][kind] = by_transformers(BASE, work / f"base-{kind}", kind)
        found[VARIANT][kind] = by_transformers(whole, work / f"variant-{kind}", kind)
    return found


@pytest.mark.parametrize("model, batch, concurrent", [("zen-mini", 1, 1), (VARIANT, 1, 1), (VARIANT, 8, 4)], ids=["base", "variant", "batches"])
def test_log_likelihoods(model, batch, concurrent, served, references, tmp_path):
    right = references[model]["float64"]
    got = by_server(served, model, tmp_path / "run", "--batch_size", batch, num_concurrent=concurrent)
    ours, theirs = errors(got, right), errors(references[model]["float32"], right)
    for task, differences in ours.items():
        assert spread(differences) <= WORSE * spread(theirs[task]), (task, differences, theirs[task])
        beyond = [(d, n) for d, n in differences if abs(d) > TOLERANCE + PER_TOKEN * n]
        assert not beyond, (task, beyond)
    for key, value in right[1]["zen_choice"].items():
        if key.startswith("acc"):
            assert got[1]["zen_choice"][key] == value


def test_the_two_models_differ(references):
    """Else the comparison of the variant would say nothing."""
    first, second = (references[name]["float64"][0] for name in ("zen-mini", VARIANT))
    pairs = [(flat(first["zen_choice"][n]), flat(second["zen_choice"][n])) for n in first["zen_choice"]]
    assert sum(abs(a[0][0] - b[0][0]) > 0.1 for a, b in pairs) > len(pairs) // 2
