#!/usr/bin/env python3
"""A server on the GPU as its clients see it: time to first token, time between tokens, and the first token of a variant that is cold.

    bench/gpu_serving.py BITDELTA [BASE DELTAS]      default: the demo's base and its 14 variants, in 8 slots

Prompts are random ids, none twice, of SHORT and LONG tokens; streams are greedy, of 64 tokens. Base and variants take turns: each round
sends as many streams at once to the base, then to one variant, then to as many variants as there are slots; ratios are to the base. SERVE:
more options of `serve`, as --max-batch-tokens 2048. Cold:
variants that are not resident, one after the other, each evicting another; another prompt alone once they are resident stands beside
it. Between steps: what the clock leaves, the first request's way in and the last one's out included. Medians and 99th percentiles of what arrives at the client, milliseconds. Files of the 8B shape: bench_gpu_split 8b 32 files DIR."""
import concurrent.futures
import http.client
import json
import os
import random
import shlex
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
AT_ONCE = [int(n) for n in os.environ.get("AT_ONCE", "1,8,32").split(",")]
backend = os.environ.get("BACKEND", "cuda")

with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
server = subprocess.Popen([binary, "serve", "--base", base, "--deltas", deltas, "--slots", str(SLOTS), "--backend", backend,
                           "--listen", f"127.0.0.1:{port}", "--admin", "none", *shlex.split(os.environ.get("SERVE", ""))], stderr=subprocess.PIPE, text=True)


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


def step_counts():
    """Steps, their rows, seconds to launch them, seconds of waiting for the device."""
    c = connect()
    c.request("GET", "/metrics")
    lines = c.getresponse().read().decode().splitlines()
    names = ("steps_total", "step_rows_total", 'step_seconds_total{part="launch"}', 'step_seconds_total{part="wait"}')
    return [float(line.split()[-1]) for name in names for line in lines if line.startswith("bitdelta_" + name + " ")]


def round_of(pool, models, at_once, tokens):
    """Streams at once, over the models in turn: their times, and seconds and the steps' counts of it all."""
    prompts = [prompt(tokens) for _ in range(at_once)]
    before, begin = step_counts(), time.perf_counter()
    runs = list(pool.map(lambda i: stream(models[i % len(models)], prompts[i], STREAMED), range(at_once)))
    seconds = time.perf_counter() - begin
    return runs, [seconds, *(b - a for a, b in zip(before, step_counts()))]


def side_by_side(sides, at_once, tokens):
    """sides: (what, models) each, the first the base, which the others' ratios are to."""
    runs, counts = [[] for _ in sides], [[] for _ in sides]
    with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        for _ in range(max(ROUNDS, 24 // at_once)):
            for side, (_, models) in enumerate(sides):
                got, count = round_of(pool, models, at_once, tokens)
                runs[side].extend(got)
                counts[side].append(count)
    for what, pick in (("first token", lambda r: r[:1]), ("between tokens", lambda r: [b - a for a, b in zip(r, r[1:])])):
        line = f"{tokens} tokens, {at_once} at once, {what}, ms, median and 99%:"
        for side, (name, _) in enumerate(sides):
            p50, p99 = percentiles([t for r in runs[side] for t in pick(r)])
            if side == 0:
                b50, b99 = p50, p99
            line += f"{',' if side else ''} {name} {p50:.2f} {p99:.2f}" + (f" ({p50 / b50:.3f} {p99 / b99:.3f})" if side else "")
        print(line, flush=True)
    rate = lambda side: at_once * STREAMED / statistics.median(c[0] for c in counts[side])
    print(f"{tokens} tokens, {at_once} at once, tokens/s: " + ", ".join(f"{name} {rate(side):.0f}" for side, (name, _) in enumerate(sides)), flush=True)
    line = f"{tokens} tokens, {at_once} at once, a step's rows and ms, to launch, to wait, between:"
    for side, (name, _) in enumerate(sides):
        seconds, steps, rows, launch, wait = (sum(c) for c in zip(*counts[side]))
        line += f"{',' if side else ''} {name} {rows / steps:.0f} " + " ".join(f"{1e3 * s / steps:.2f}" for s in (launch, wait, seconds - launch - wait))
    print(line, flush=True)


try:
    wait_ready()
    c = connect()
    c.request("GET", "/v1/models")
    names = [m["id"] for m in json.load(c.getresponse())["data"]]
    print(f"base and {len(names) - 1} variants, {SLOTS} slots, backend {backend} {os.environ.get('SERVE', '')}".rstrip())
    served = names[1:1 + SLOTS]
    for name in [names[0], *served]:
        stream(name, prompt(SHORT), 4)
    sides = [("base", names[:1]), ("one variant", served[:1]), (f"{len(served)} variants", served)]
    for tokens in (SHORT, LONG):
        for at_once in AT_ONCE:
            side_by_side(sides, at_once, tokens)
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
