#!/usr/bin/env python3
"""SmolLM2-135M on the CPU: `bitdelta serve` against llama.cpp, the same weights, prompts and threads, in turns.

    python bench/cpu_models.py BITDELTA BENCH_CPU_MODELS [THREADS...] [--rounds N] [--tokens N]

Needs tests/requirements-oracles.txt and bench/requirements.txt. bitdelta is measured as its clients see it: a stream of one
request, the time to the first token of a prompt of 512 ids and the time between the first and the last token. llama.cpp is
measured around llama_decode and a greedy choice. Its weights are the bf16 values of ours as F16 and as BF16. Each runs in a
process of its own, the order changes every round, the medians count, and the memory's read rate is measured in every round.
"""
import argparse
import http.client
import json
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "e2e" / "oracles"))
import smollm2  # noqa: E402 (found by the line above)

PROMPT_TOKENS = 512


def gguf_of(kind):
    """The GGUF file of the directory's weights, made once: the file they came from with its matrices as F16 or BF16."""
    import gguf
    import numpy

    target = smollm2.cache() / f"SmolLM2-135M-Instruct-{kind}-{smollm2.FORMAT}.gguf"
    if target.exists():
        return target
    reader = gguf.GGUFReader(smollm2.gguf_file())
    part = target.with_suffix(".part")
    writer = gguf.GGUFWriter(part, "llama")
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            sub = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=sub)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(numpy.float32)
        bits = smollm2.to_bf16(numpy, values)
        rounded = (bits.astype(numpy.uint32) << 16).view(numpy.float32)
        if values.ndim == 1:
            writer.add_tensor(tensor.name, rounded)
        elif kind == "F16":
            writer.add_tensor(tensor.name, rounded.astype(numpy.float16))
        else:
            writer.add_tensor(tensor.name, bits.view(numpy.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.rename(target)
    return target


def llama_worker(path, threads):
    """Child process: a line {"ids", "tokens"} in, a line {"prefill", "decode", "ids"} out."""
    import ctypes

    import llama_cpp
    import numpy

    silent = llama_cpp.llama_log_callback(lambda level, text, data: None)  # must outlive the calls
    llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
    settings = llama_cpp.llama_context_default_params()
    settings.n_ctx, settings.n_batch, settings.n_ubatch = 2048, PROMPT_TOKENS, PROMPT_TOKENS
    settings.n_threads = settings.n_threads_batch = threads
    context = llama_cpp.llama_init_from_model(model, settings)
    words = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))

    def step(ids):
        array = (llama_cpp.llama_token * len(ids))(*ids)
        assert llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(array, len(ids))) == 0
        logits = numpy.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, -1), shape=(words,))
        return int(logits.argmax())

    for line in sys.stdin:
        ask = json.loads(line)
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        start = time.perf_counter()
        ids = [step(ask["ids"])]
        first = time.perf_counter()
        while len(ids) < ask["tokens"]:
            ids.append(step(ids[-1:]))
        print(json.dumps({"prefill": first - start, "decode": (time.perf_counter() - first) / (len(ids) - 1), "ids": ids}), flush=True)


class Llama:
    def __init__(self, kind, threads):
        self.process = subprocess.Popen([sys.executable, __file__, "--worker", gguf_of(kind), str(threads)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, ids, tokens):
        self.process.stdin.write(json.dumps({"ids": ids, "tokens": tokens}) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def stop(self):
        self.process.stdin.close()
        self.process.wait()


class Bitdelta:
    def __init__(self, program, threads):
        command = [program, "serve", "--base", smollm2.directory(), "--backend", "cpu", "--listen", "127.0.0.1:0", "--admin", "none"]
        command += ["--threads", str(threads), "--max-model-len", "2048", "--kv-tokens", "4096", "--prefill-chunk-tokens", str(PROMPT_TOKENS)]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        port = None
        for line in self.process.stderr:
            found = re.search(r"mod=http listening address=\S*:(\d+)", line)
            port = int(found.group(1)) if found else port
            if "mod=serve ready " in line:
                break
        assert port, "the server did not start"
        self.http = http.client.HTTPConnection("127.0.0.1", port, timeout=300)

    def run(self, ids, tokens):
        body = {"prompt": ids, "max_tokens": tokens, "temperature": 0, "stream": True, "ignore_eos": True, "return_token_ids": True}
        start = time.perf_counter()
        self.http.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        answer = self.http.getresponse()
        assert answer.status == 200, answer.read()
        times, texts = [], []
        while line := answer.readline():
            if line.startswith(b"data: {"):
                times.append(time.perf_counter())
                texts.append(json.loads(line[6:])["choices"])
        times = times[:tokens]
        assert len(times) == tokens, f"{len(times)} events for {tokens} tokens"
        return {"prefill": times[0] - start, "decode": (times[-1] - times[0]) / (tokens - 1)}

    def stop(self):
        self.process.terminate()
        self.process.stderr.read()
        self.process.wait()


def heading():
    model = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), platform.machine())
    commit = subprocess.run(["git", "-C", ROOT, "describe", "--always", "--dirty=+", "--exclude=*"], capture_output=True, text=True).stdout.strip()
    from importlib.metadata import version

    return f"# {model}, {os.cpu_count()} CPUs; llama-cpp-python {version('llama-cpp-python')}; commit {commit}"


def measure(options, threads):
    sides = {"bitdelta": Bitdelta(options.bitdelta, threads), "llama.cpp F16": Llama("F16", threads), "llama.cpp BF16": Llama("BF16", threads)}
    rng, took, rates = random.Random(threads), {name: [] for name in sides}, []
    for turn in range(options.rounds + 1):
        ids = [rng.randrange(1000, 49152) for _ in range(PROMPT_TOKENS)]
        rates.append(float(subprocess.run([options.memory, str(threads)], capture_output=True, text=True, check=True).stdout))
        for name in list(sides) if turn % 2 else reversed(list(sides)):
            took[name].append(sides[name].run(ids, options.tokens))
    for side in sides.values():
        side.stop()
    weights = (smollm2.directory() / "model.safetensors").stat().st_size
    memory = statistics.median(rates[1:])
    middle = {name: {key: statistics.median(one[key] for one in runs[1:]) for key in ("prefill", "decode")} for name, runs in took.items()}
    print(f"threads {threads}: memory read {memory:.2f} GB/s; {weights * 1e-6:.0f} MB of weights")
    print(f"{'':16} {'decode, tokens/s':>17} {'of memory':>10} {'prefill, tokens/s':>18}")
    for name, one in middle.items():
        print(f"{name:16} {1 / one['decode']:17.2f} {weights / one['decode'] * 1e-7 / memory:9.0f}% {PROMPT_TOKENS / one['prefill']:18.1f}")
    ratios = [min(one[key] for name, one in middle.items() if name != "bitdelta") / middle["bitdelta"][key] for key in ("decode", "prefill")]
    print(f"bitdelta against the better of llama.cpp: decode {ratios[0]:.2f}x, prefill {ratios[1]:.2f}x", flush=True)


def main():
    if sys.argv[1:2] == ["--worker"]:
        return llama_worker(sys.argv[2], int(sys.argv[3]))
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("bitdelta", type=Path)
    parser.add_argument("memory", type=Path)
    parser.add_argument("threads", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    print(f"# bench/cpu_models.py, {options.rounds} rounds, {PROMPT_TOKENS} prompt tokens, {options.tokens} new ones, one sequence")
    print(heading(), flush=True)
    for threads in options.threads:
        measure(options, threads)
    return None


if __name__ == "__main__":
    main()
