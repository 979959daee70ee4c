#!/usr/bin/env python3
"""`bitdelta serve --tensor-parallel 2 --backend cuda` as its clients see it, beside one GPU and the goldens made with transformers.

    tests/gpu/check_ranks.py [BITDELTA] [--ranks N] [--backend cuda|cpu]     needs no package; tests/data/unpack.sh has been run

The demo's base and 14 variants, some of them in as many shards as there are ranks, through 8 slots and all at once: log-probabilities
of a prompt against the float32 goldens within the bounds of check_goldens.py, greedy tokens those of one GPU but for near-ties. Then
what goes wrong: a shard that is not there or damaged fails its variant alone, by name; a server that is killed frees its GPUs; one that
is told to stop in the middle of its work does; more ranks than GPUs are refused. Prints a line a check and
"N passed, N failed, N skipped"."""
import argparse
import concurrent.futures
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
options = argparse.ArgumentParser()
options.add_argument("binary", nargs="?", default="build/bitdelta")
options.add_argument("--ranks", type=int, default=2)
options.add_argument("--backend", default="cuda", choices=["cuda", "cpu"])
options = options.parse_args()
binary, cuda = os.path.abspath(options.binary), options.backend == "cuda"
# How far a log-probability may be from the goldens, and the gap below which a choice is a near-tie (check_goldens.py).
BOUNDS = {"bf16": (0.5, 0.2), "fp16": (0.06, 5e-2)} if cuda else {"auto": (1e-3, 1e-3)}
PROMPTS, TOKENS, SLOTS = 3, 24, 8
BASE, DELTAS = os.path.join(ROOT, "demo/zen-mini"), os.path.join(ROOT, "demo/deltas")
NAMES = sorted(name for name in os.listdir(DELTAS) if os.path.exists(os.path.join(DELTAS, name, "delta.json")))
passed = failed = skipped = 0
begin = time.monotonic()


def check(what, faults, said=""):
    global passed, failed
    passed, failed = passed + (not faults), failed + bool(faults)
    print(f"{'ok  ' if not faults else 'FAIL'} {time.monotonic() - begin:5.1f} s  {what}{': ' + said if said else ''}", *[str(f)[:300] for f in faults][:6], sep="\n     ", flush=True)


def golden(name):
    with open(os.path.join(ROOT, "tests/data/golden", "base" if name == "zen-mini" else "bitdelta", name + ".json")) as file:
        return json.load(file)["prompts"][:PROMPTS]


class Server:
    def __init__(self, deltas, ranks, dtype, environment=None):
        command = [binary, "serve", "--base", BASE, "--deltas", deltas, "--slots", str(SLOTS), "--backend", options.backend, "--tensor-parallel", str(ranks),
                   "--dtype", dtype, "--listen", "127.0.0.1:0", "--admin", "none", "--kv-tokens", "65536"]
        self.lines = []
        self.process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, errors="replace", env={**os.environ, **(environment or {})})
        threading.Thread(target=lambda: self.lines.extend(self.process.stderr), daemon=True).start()

    def find(self, pattern, seconds=60):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            over = self.process.poll() is not None
            if found := re.search(pattern, "".join(list(self.lines))):
                return found
            if over:
                break
            time.sleep(0.02)
        raise RuntimeError(f"the server has not said {pattern!r}: " + "".join(self.lines[-8:])[-800:])

    def ready(self):
        self.port = int(self.find(r"mod=http listening address=\S*:(\d+)").group(1))
        self.find(r"mod=serve ready ")
        return self

    def ask(self, method, path, body=None, seconds=60):
        """Status and bytes."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=seconds)
        try:
            connection.request(method, path, json.dumps(body) if body else None, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def complete(self, name, ids, tokens, **more):
        status, body = self.ask("POST", "/v1/completions", {"model": name, "prompt": ids, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True, **more})
        if status != 200:
            raise RuntimeError(f"{name}: {status} {body[:200]}")
        return json.loads(body)["choices"][0]

    def end(self, number, seconds=60):
        self.process.send_signal(number)
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return f"nothing within {seconds} s"


def answers(server):
    """Of every model and prompt what is said greedily, with the best log-probabilities, and the log-probabilities of the prompt."""
    def one(job):
        name, prompt = job
        said = server.complete(name, prompt["ids"], TOKENS, logprobs=5, return_tokens_as_token_ids=True)
        scored = server.complete(name, prompt["ids"] + prompt["greedy"]["ids"][:1], 1, prompt_logprobs=20)
        gaps = [v[0] - v[1] for v in (sorted(t.values(), reverse=True) for t in said["logprobs"]["top_logprobs"])]
        return said["token_ids"], gaps, scored["prompt_logprobs"][1:]

    jobs = [(name, prompt) for name in ["zen-mini", *NAMES] for prompt in golden(name)]
    with concurrent.futures.ThreadPoolExecutor(24) as pool:  # more models than slots, all at once
        return list(zip(jobs, pool.map(one, jobs)))


def against_goldens(found, bound):
    worst, faults = 0.0, []
    for (name, prompt), (_, _, scored) in found:
        for top in prompt["top"]:
            got = scored[top["position"]]
            for token, logprob in list(zip(top["ids"], top["logprobs"]))[:10]:
                # One that is not among the best 20 is at most the last of them.
                last = sorted((entry["logprob"] for entry in got.values()), reverse=True)[19]
                off = abs(got[str(token)]["logprob"] - logprob) if str(token) in got else logprob - last
                worst = max(worst, off)
                if not off <= bound:
                    faults.append(f"{name}: token {token} at {top['position']} is off by {off:.4f}")
    return worst, faults


def against_one(found, one, tie):
    same, total, faults = 0, 0, []
    for ((name, prompt), (ids, _, _)), (_, (want, gaps, _)) in zip(found, one):
        at = next((i for i, (a, b) in enumerate(zip(ids, want)) if a != b), len(want))
        same, total = same + at, total + len(want)
        if len(ids) != len(want):
            faults.append(f"{name}: {len(ids)} tokens, not {len(want)}")
        elif at < len(want):
            reference = prompt["greedy"]
            # Off the goldens' way the gap itself is rounded, and by both.
            margin = reference["margins"][at] if want[:at] == reference["ids"][:at] else gaps[at] / 2
            if margin > tie:
                faults.append(f"{name}: token {at} differs with margin {margin:.4f}")
    return same, total, faults


def metric(text, name, labels=""):
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name) and line[len(name)] in "{ " and labels in line)


def readable(server):
    faults = []
    status, body = server.ask("GET", "/metrics")
    text = body.decode()
    if status != 200:
        faults.append(f"/metrics: {status}")
    faults += [line for line in text.splitlines() if not re.fullmatch(r"#.*|[a-zA-Z_:][\w:]*(\{.*\})? (\S+)", line)]
    if metric(text, "bitdelta_delta_loads_total", 'result="ok"') < len(NAMES):
        faults.append("fewer loads than variants")
    status, body = server.ask("GET", "/health")
    if status != 200:
        faults.append(f"/health: {status} {body[:200]}")
    return faults


def reshard(name, out):
    subprocess.run([binary, "reshard", "--delta", os.path.join(DELTAS, name), "--out", os.path.join(out, name), "--shards", str(options.ranks), "--base", BASE],
                   check=True, capture_output=True, timeout=60)


def in_the_middle(server, number):
    """Ends a server with streams running: what it returned, and how long that took."""
    def read(name):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        try:
            connection.request("POST", "/v1/completions", json.dumps({"model": name, "prompt": [5, 6, 7], "max_tokens": 1500, "ignore_eos": True, "stream": True}), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            answer.readline()
            running.release()
            answer.read()
        except (OSError, http.client.HTTPException):
            pass
        finally:
            connection.close()

    running = threading.Semaphore(0)
    readers = [threading.Thread(target=read, args=(name,)) for name in ("zen-mini", "zen-mini-french", "zen-mini-c", "zen-mini-shell")]
    for reader in readers:
        reader.start()
    for _ in readers:
        running.acquire(timeout=60)
    since = time.monotonic()
    status = server.end(number)
    for reader in readers:
        reader.join(60)
    return status, time.monotonic() - since


def serving(dtype, deltas):
    """One GPU, then all ranks; leaves the second running."""
    bound, tie = BOUNDS[dtype]
    server = Server(DELTAS, 1, dtype).ready()
    one = answers(server)
    worst, faults = against_goldens(one, bound)
    check(f"{dtype}, one rank against the goldens", faults, f"worst log-probability {worst:.4f}, bound {bound}")
    if (status := server.end(signal.SIGTERM)) != 0:
        check(f"{dtype}, one rank stops", [status])
    server = Server(deltas, options.ranks, dtype).ready()
    found = answers(server)
    worst, faults = against_goldens(found, bound)
    check(f"{dtype}, {options.ranks} ranks against the goldens", faults, f"worst log-probability {worst:.4f}, bound {bound}")
    same, total, faults = against_one(found, one, tie)
    check(f"{dtype}, {options.ranks} ranks: greedy tokens beside one rank's", faults, f"{same} of {total} before a first near-tie's difference")
    check(f"{dtype}, {options.ranks} ranks: metrics and health", readable(server))
    return server


def broken_shards(folder):
    """Missing on the last rank alone, damaged there alone, whole."""
    last = f"shard-{options.ranks - 1:02d}-of-{options.ranks:02d}.safetensors"
    for name in ("zen-mini-sql", "zen-mini-math", "zen-mini-french"):
        reshard(name, folder)
    os.unlink(os.path.join(folder, "zen-mini-sql", last))
    with open(os.path.join(folder, "zen-mini-math", last), "r+b") as file:
        file.seek(-100, 2)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))
    shutil.copytree(os.path.join(DELTAS, "zen-mini-c"), os.path.join(folder, "zen-mini-c"))
    shutil.copytree(os.path.join(DELTAS, "zen-mini-shell"), os.path.join(folder, "zen-mini-shell"))
    return last


def faults_of_shards(server, last):
    faults = []
    for name in ("zen-mini-sql", "zen-mini-math", "zen-mini-french"):
        prompt = golden(name)[0]
        status, body = server.ask("POST", "/v1/completions", {"model": name, "prompt": prompt["ids"], "max_tokens": 4, "temperature": 0, "ignore_eos": True, "return_token_ids": True})
        answer = json.loads(body)
        if name == "zen-mini-french":
            if status != 200 or len(answer["choices"][0]["token_ids"]) != 4:
                faults.append(f"{name}: {status} {body[:200]}")
        elif status != 503 or answer["error"]["code"] != "variant_unavailable":
            faults.append(f"{name}: {status} {body[:200]}")
        else:
            line = server.find(f"load of variant {name} failed[^\n]*", 10).group(0)
            if last not in line:
                faults.append(f"{last} is not named: {line}")
    if server.ask("GET", "/health")[0] != 200:
        faults.append("/health is not 200")
    return faults


def refusals():
    """With one device to be seen."""
    server = Server(DELTAS, 2, "auto", {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]})
    try:
        status = server.process.wait(60)
    except subprocess.TimeoutExpired:
        status = server.end(signal.SIGKILL)
    time.sleep(0.2)
    said = "".join(server.lines)
    return [] if status == 1 and "2 ranks take a GPU each, 1 answer" in said else [f"status {status}: {said[-300:]}"]


with tempfile.TemporaryDirectory() as folder:
    mixed, broken = os.path.join(folder, "mixed"), os.path.join(folder, "broken")
    os.mkdir(mixed), os.mkdir(broken)
    for i, variant in enumerate(NAMES):
        if i % 3:
            shutil.copytree(os.path.join(DELTAS, variant), os.path.join(mixed, variant))
        else:
            reshard(variant, mixed)
    file_name = broken_shards(broken)
    running = None
    try:
        for kind in BOUNDS:
            if running and (ended := running.end(signal.SIGTERM)) != 0:
                check("a server that has nothing to do stops", [ended])
            running = serving(kind, mixed)
        ended, took = in_the_middle(running, signal.SIGKILL)
        check("killed in the middle", [] if ended == -signal.SIGKILL else [ended])
        running = Server(broken, options.ranks, "auto").ready()
        check("what is served after that, with a shard missing and one damaged", faults_of_shards(running, file_name))
        ended, took = in_the_middle(running, signal.SIGTERM)
        check("told to stop in the middle", [] if ended == 0 else [ended], f"{took:.1f} s")
        if cuda:
            check("more ranks than GPUs", refusals())
        else:
            skipped += 1
    except Exception as fault:  # the end of the output must say so
        check("serving", [repr(fault), *(running.lines[-6:] if running else [])])
    finally:
        if running and running.process.poll() is None:
            running.end(signal.SIGKILL)
print(f"{passed} passed, {failed} failed, {skipped} skipped")
sys.exit(1 if failed else 0)
