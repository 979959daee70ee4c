#!/usr/bin/env python3
"""A server on the GPU as its clients see it: time to first token, time between tokens, and the first token of a variant that is cold.

    bench/gpu_serving.py BITDELTA [BASE DELTAS]      default: the demo's base and its 14 variants, in 8 slots

Streams of greedy completions of 128 tokens over as many variants as there are slots, 1, 8 and 32 at a time; prompts of about 100 and
1500 characters. Cold: variants that are not resident, one after the other, each evicting another; their prompt alone once they are
resident stands beside it. Medians and 99th percentiles of what arrives at the client, milliseconds."""
import concurrent.futures
import http.client
import json
import os
import socket
import statistics
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
binary = os.path.abspath(sys.argv[1])
base, deltas = sys.argv[2:4] if len(sys.argv) > 3 else (os.path.join(ROOT, "demo/zen-mini"), os.path.join(ROOT, "demo/deltas"))
SLOTS = 8
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


def stream(model, prompt, tokens):
    """Seconds to each event that carries text, from the sending of the request."""
    c = connect()
    c.connect()
    body = json.dumps({"model": model, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0, "stream": True})
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


def shown(what, seconds):
    seconds = sorted(seconds)
    late = seconds[min(len(seconds) - 1, int(len(seconds) * 0.99))]
    print(f"{what}: median {1e3 * statistics.median(seconds):.2f} ms, 99% {1e3 * late:.2f} ms, {len(seconds)} values", flush=True)


try:
    wait_ready()
    c = connect()
    c.request("GET", "/v1/models")
    names = [m["id"] for m in json.load(c.getresponse())["data"]]
    print(f"base and {len(names) - 1} variants, {SLOTS} slots, backend {backend}")
    served, prompt = names[1:1 + SLOTS], "The quick brown fox jumps over the lazy dog. " * 2
    for name in served:
        stream(name, prompt, 4)
    for text, label in ((prompt, "short prompts"), (prompt * 16, "long prompts")):
        for at_once in (1, 8, 32):
            jobs = max(16, 2 * at_once)
            with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
                begin = time.perf_counter()
                runs = list(pool.map(lambda i: stream(served[i % len(served)], text, 128), range(jobs)))
                took = time.perf_counter() - begin
            shown(f"{label}, {at_once} at once, first token", [r[0] for r in runs])
            shown(f"{label}, {at_once} at once, between tokens", [b - a for r in runs for a, b in zip(r, r[1:])])
            print(f"{label}, {at_once} at once: {jobs * 128 / took:.0f} tokens/s", flush=True)
    others = names[1 + SLOTS:] or served
    cold, warm = [], []
    for _ in range(3):
        for name in others + served:
            cold.append(stream(name, prompt, 1)[0])
            warm.append(stream(name, prompt, 1)[0])
    shown("a variant that is cold, first token", cold)
    shown("the same variant once it is resident, first token", warm)
finally:
    server.terminate()
    server.wait(20)
