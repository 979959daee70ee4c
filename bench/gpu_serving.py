#!/usr/bin/env python3
"""A server on the GPU as its clients see it: time to first token, time between tokens, and the first token of a variant that is cold.

    bench/gpu_serving.py BITDELTA [BASE DELTAS]      default: the demo's base and its 14 variants, in 8 slots

Prompts are random ids, none twice, of SHORT and LONG tokens; streams are greedy, of 64 tokens. Base and variants take turns: each round
sends as many streams at once to the base, then to as many variants as there are slots, and the ratio is of variants to base. Cold:
variants that are not resident, one after the other, each evicting another; another prompt alone once they are resident stands beside
it. Medians and 99th percentiles of what arrives at the client, milliseconds. Files of the 8B shape: bench_gpu_split 8b 32 files DIR."""
import concurrent.futures
import http.client
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
binary = os.path.abspath(sys.argv[1])
base, deltas = sys.argv[2:4] if len(sys.argv) > 3 else (os.path.join(ROOT, "demo/zen-mini"), os.path.join(ROOT, "demo/deltas"))
SLOTS, STREAMED, ROUNDS = 8, 64, int(os.environ.get("ROUNDS", "5"))
SHORT, LONG = (int(n) for n in os.environ.get("PROMPTS", "100,700").split(","))
backend = os.environ.get("BACKEND", "cuda")

with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
server = subprocess.Popen([binary, "serve", "--base", base, "--deltas", deltas, "--slots", str(SLOTS), "--backend", backend,
                           "--listen", f"127.0.0.1:{port}", "--admin", "none"], stderr=subprocess.PIPE, text=True)


def connect():
    return http.client.HTTPConnection("127.0.0.1", port, timeout=60)


def wait_ready():
    for _ in range(1200):
        if server.poll() is not None:
            sys.exit("the server ended: " + server.stderr.read()[-800:])
        try:
            c = connect()
            c.request("GET", "/health")
            if c.getresponse().status == 200:
                return
        except OSError:
            pass
        time.sleep(0.1)
    sys.exit("the server does not answer")


def prompt(tokens):
    return [random.randrange(300, 4000) for _ in range(tokens)]


def stream(model, ids, tokens):
    """Seconds to each event that carries text, from the sending of the request."""
    c = connect()
    c.connect()
    body = json.dumps({"model": model, "prompt": ids, "max_tokens": tokens, "ignore_eos": True, "temperature": 0, "stream": True, "logprobs": 0})
    begin = time.perf_counter()
    c.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    answer = c.getresponse()
    if answer.status != 200:
        raise RuntimeError(f"{model}: {answer.status} {answer.read()[:200]}")
    times = []
    for line in answer:
        if line.startswith(b"data: {"):
            times.append(time.perf_counter() - begin)
    c.close()
    return times


def percentiles(seconds):
    seconds = sorted(seconds)
    return 1e3 * statistics.median(seconds), 1e3 * seconds[min(len(seconds) - 1, int(len(seconds) * 0.99))]


def shown(what, seconds):
    print(f"{what}: median {percentiles(seconds)[0]:.2f} ms, 99% {percentiles(seconds)[1]:.2f} ms, {len(seconds)} values", flush=True)


def round_of(pool, models, at_once, tokens):
    """Streams at once, over the models in turn: their times, and tokens per second."""
    prompts = [prompt(tokens) for _ in range(at_once)]
    begin = time.perf_counter()
    runs = list(pool.map(lambda i: stream(models[i % len(models)], prompts[i], STREAMED), range(at_once)))
    return runs, at_once * STREAMED / (time.perf_counter() - begin)


def side_by_side(base, variants, at_once, tokens):
    runs, rates = ([], []), ([], [])
    with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        for _ in range(max(ROUNDS, 24 // at_once)):
            for side, models in enumerate(([base], variants)):
                got, rate = round_of(pool, models, at_once, tokens)
                runs[side].extend(got)
                rates[side].append(rate)
    for what, pick in (("first token", lambda r: r[:1]), ("between tokens", lambda r: [b - a for a, b in zip(r, r[1:])])):
        (b50, b99), (v50, v99) = (percentiles([t for r in side for t in pick(r)]) for side in runs)
        print(f"{tokens} tokens, {at_once} at once, {what}: base {b50:.2f} and {b99:.2f} ms (99%), variants {v50:.2f} and {v99:.2f}, {v50 / b50:.3f} and {v99 / b99:.3f}", flush=True)
    print(f"{tokens} tokens, {at_once} at once: base {statistics.median(rates[0]):.0f}, variants {statistics.median(rates[1]):.0f} tokens/s", flush=True)


try:
    wait_ready()
    c = connect()
    c.request("GET", "/v1/models")
    names = [m["id"] for m in json.load(c.getresponse())["data"]]
    print(f"base and {len(names) - 1} variants, {SLOTS} slots, backend {backend}")
    served = names[1:1 + SLOTS]
    for name in [names[0], *served]:
        stream(name, prompt(SHORT), 4)
    for tokens in (SHORT, LONG):
        for at_once in (1, 8, 32):
            side_by_side(names[0], served, at_once, tokens)
    others = names[1 + SLOTS:] or served
    cold, warm = [], []
    for _ in range(3):
        for name in others + served:
            cold.append(stream(name, prompt(SHORT), 1)[0])
            warm.append(stream(name, prompt(SHORT), 1)[0])
    shown("a variant that is cold, first token", cold)
    shown("the same variant once it is resident, first token", warm)
finally:
    server.terminate()
    server.wait(20)
